"""Observe a federation: ask every member for its status, over the same mutual TLS, without changing anything.

A Byzantine member can answer anything, about itself and about others. So `parse_status` keeps only what has the type
and the range of the fields below.
"""

import asyncio
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Literal, TypedDict, get_args

import grpc
from grpc import aio

from byzpg.live.identity import PrivateIdentity
from byzpg.live.links import SERVICE, STATUS, open_channel
from byzpg.live.manifest import Manifest
from byzpg.live.status import CURVE_POINTS, RECENT_STEPS, State

LARGEST_STATUS = 2**20
# Larger numbers make no sense; integers up to this one are exact in a browser too.
LARGEST_NUMBER = 10**15
LONGEST_TEXT = 80
MOST_REASONS = 16
REASON = re.compile(r"[a-z][a-z -]{0,23}")
STATES: tuple[str, ...] = get_args(State)


class Seen(TypedDict):
    """What one member observed of another."""

    connected: bool
    present: bool | None  # whether its message arrived in the last round; None before the first round has ended
    absences: int
    weight: float | None  # in [0, 1]; None if the rule gives no weights
    equivocations: int
    rejected: dict[str, int]  # by reason


class Answer(TypedDict):
    """A member's answer: the content of `Status.as_data`, checked."""

    name: str
    task: str
    state: State | Literal["unknown"]
    rehearsal: str | None
    iteration: int
    num_iterations: int
    step: int
    waiting_for: list[str]
    faults: list[str]  # members that it misses, or that provably equivocated
    uptime: float
    curve: list[tuple[int, float]]  # return by number of trajectories or steps, which rises
    reward_threshold: float | None
    diameters: dict[str, float]
    step_seconds: list[float]
    median_step_seconds: float | None
    bytes_sent: int
    bytes_received: int
    others: dict[str, Seen]  # every member, by name
    strangers: dict[str, int]


# By the member's name; None if it did not answer, or if its answer cannot be read.
Statuses = dict[str, Answer | None]


def parse_status(raw: bytes, name: str, names: Sequence[str]) -> Answer | None:
    """Read the answer of a member, leaving out what does not fit.

    Args:
        raw: The answer, which can be any bytes.
        name: The member's name, from its certificate.
        names: The names of all members.

    Returns:
        The answer, or None if it is not a JSON object.
    """
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict):
        return None
    state, rehearsal = answer.get("state"), answer.get("rehearsal")
    diameters, others = _table(answer.get("diameters")), _table(answer.get("others"))
    seconds = [value for value in _numbers(answer.get("step_seconds"), RECENT_STEPS) if value >= 0]
    return {
        "name": name,
        "task": _text(answer.get("task")),
        "state": state if isinstance(state, str) and state in STATES else "unknown",  # pyright: ignore[reportReturnType]
        "rehearsal": _text(rehearsal) or None,
        "iteration": _count(answer.get("iteration")),
        "num_iterations": _count(answer.get("num_iterations")),
        "step": _count(answer.get("step")),
        "waiting_for": _members(answer.get("waiting_for"), names),
        "faults": _members(answer.get("faults"), names),
        "uptime": max(0.0, _number(answer.get("uptime")) or 0.0),
        "curve": list(_curve(answer.get("curve"))),
        "reward_threshold": _number(answer.get("reward_threshold")),
        "diameters": {
            phase: value
            for phase in ("gradients", "parameters")
            if (value := _number(diameters.get(phase))) is not None and value >= 0
        },
        "step_seconds": seconds,
        "median_step_seconds": statistics.median(seconds) if seconds else None,
        "bytes_sent": _count(answer.get("bytes_sent")),
        "bytes_received": _count(answer.get("bytes_received")),
        "others": {each: _seen(_table(others.get(each))) for each in names},
        "strangers": _reasons(answer.get("strangers")),
    }


def _seen(report: dict[str, Any]) -> Seen:
    present, weight = report.get("present"), _number(report.get("weight"))
    return {
        "connected": report.get("connected") is True,
        "present": present if isinstance(present, bool) else None,
        "absences": _count(report.get("absences")),
        "weight": None if weight is None else min(max(weight, 0.0), 1.0),
        "equivocations": _count(report.get("equivocations")),
        "rejected": _reasons(report.get("rejected")),
    }


def _members(value: Any, names: Sequence[str]) -> list[str]:
    return [each for each in names if isinstance(value, list) and each in value]


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    """One line of printable characters: none of them moves a terminal's cursor or reverses the text around it."""
    printable = filter(str.isprintable, value if isinstance(value, str) else "")
    return "".join(islice(printable, LONGEST_TEXT)).strip()


def _number(value: Any) -> float | None:
    fits = type(value) in (int, float) and -LARGEST_NUMBER <= value <= LARGEST_NUMBER  # false for NaN
    return float(value) if fits else None


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value <= LARGEST_NUMBER else 0


def _numbers(values: Any, most: int) -> list[float]:
    numbers = map(_number, values[-most:] if isinstance(values, list) else [])
    return [value for value in numbers if value is not None]


def _curve(points: Any) -> Iterator[tuple[int, float]]:
    last = -1
    for point in points[-2 * CURVE_POINTS :] if isinstance(points, list) else []:
        if isinstance(point, list) and len(point) == 2 and type(point[0]) is int:
            at, value = point[0], _number(point[1])
            if last < at <= LARGEST_NUMBER and value is not None:
                last = at
                yield at, value


def _reasons(counts: Any) -> dict[str, int]:
    fitting = ((why, _count(number)) for why, number in _table(counts).items() if REASON.fullmatch(why))
    return dict(islice(((why, number) for why, number in fitting if number), MOST_REASONS))


class Observer:
    """Asks all members for their statuses, as one of them."""

    def __init__(self, manifest: Manifest, own: int, private: PrivateIdentity) -> None:
        self.manifest, self._own, self._private = manifest, own, private
        self._names = [member.name for member in manifest.members]
        self._channels = [self._open(index) for index in range(len(self._names))]

    def _open(self, index: int) -> aio.Channel:
        return open_channel(self.manifest, self._own, self._private, index, LARGEST_STATUS)

    async def ask(self, seconds: float = 2.0) -> Statuses:
        """Ask every member; one that takes longer than `seconds` counts as silent."""
        answers = await asyncio.gather(*(self._ask(index, seconds) for index in range(len(self._names))))
        return dict(zip(self._names, answers, strict=True))

    async def _ask(self, index: int, seconds: float) -> Answer | None:
        try:
            raw = await self._channels[index].unary_unary(f"/{SERVICE}/{STATUS}")(b"", timeout=seconds)
        except aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                # The old channel would wait longer and longer between attempts, up to minutes.
                old, self._channels[index] = self._channels[index], self._open(index)
                await old.close()
            return None
        return parse_status(raw, self._names[index], self._names)

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))
