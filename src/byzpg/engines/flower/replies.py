"""Replies of clients that may be Byzantine: how the server receives and checks them."""

import io
import math
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import Array, Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from httpx import TransportError
from numpy.lib import format as numpy_format

from byzpg.federation.agents import Sampled
from byzpg.robust.geometry import is_sound_on_host

# Seconds between two polls for replies, and for clients that have yet to connect.
PAUSE = 0.2
LONGEST_TEXT = 200  # of a client's words, in a line of the log

# What clients claim about their play: the mean return, the episodes that ended, and the steps they took.
CLAIMS = ("return", "episodes", "steps")


def claims(sampled: Sampled) -> dict[str, float]:
    """What an agent's play was like, under the names of CLAIMS."""
    values = sampled.returns, sampled.ended, sampled.steps
    return {name: float(np.mean(value)) for name, value in zip(CLAIMS, values, strict=True)}


class RefusedError(Exception):
    """A reply is left out, with a reason to count by and words for the log."""

    def __init__(self, reason: str, words: str) -> None:
        super().__init__(reason, words)
        self.reason, self.words = reason, words


def read_reply(reply: Message, server_round: int, position: int, dimension: int) -> tuple[np.ndarray, dict[str, float]]:
    """Check a reply and return the gradient [d] and the claims in it. Their values may still be false.

    Raises:
        RefusedError: If the reply is an error, or not a reply to what the server asked.
    """
    if reply.has_error():
        raise RefusedError("error", f"error {reply.error.code}: {_one_line(reply.error.reason)}")
    try:
        metrics, arrays = reply.content.metric_records["metrics"], reply.content.array_records["arrays"]
        array, claimed = arrays["gradient"], {name: metrics[name] for name in CLAIMS}
        answers = {"round": (metrics["round"], server_round), "position": (metrics["position"], position)}
        for what, (said, asked) in answers.items():
            if type(said) is not int or said != asked:
                raise RefusedError(f"wrong {what}", f"it is for {what} {_one_line(said)}, and {asked} was asked for")
        numbers: dict[str, float] = {}
        for name, value in claimed.items():
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise RefusedError("malformed", f"its {name} is {_one_line(value)}")
            numbers[name] = float(value)
        gradient = _read_vector(array, dimension)
    except RefusedError:
        raise
    except Exception as error:  # whatever an attacker can make Flower's records and NumPy raise
        raise RefusedError("malformed", f"{type(error).__name__}: {_one_line(error)}") from None
    if not is_sound_on_host(gradient):
        raise RefusedError("not finite", "its gradient has entries that are not finite, or is too long")
    return gradient, numbers


def _read_vector(array: Array, dimension: int) -> np.ndarray:
    """Read float32 [d] without NumPy's reader, which allocates as much memory as a header claims."""
    data = io.BytesIO(array.data)
    if array.stype != "numpy.ndarray" or numpy_format.read_magic(data) != (1, 0):
        raise RefusedError("malformed", f"its gradient is stored as {_one_line(array.stype)}")
    shape, _, dtype = numpy_format.read_array_header_1_0(data)
    if dtype != np.dtype("<f4") or array.dtype != "float32":
        raise RefusedError("wrong type", f"its gradient is of {_one_line(dtype)}, not float32")
    if shape != (dimension,) or tuple(array.shape) != shape:
        raise RefusedError("wrong shape", f"its gradient has the shape {_one_line(shape)}, not ({dimension},)")
    return np.frombuffer(data.read(), "<f4", count=dimension)


def _one_line(text: object) -> str:
    """One line of printable characters, from what a client may have written."""
    return "".join(filter(str.isprintable, str(text)[:LONGEST_TEXT]))


class CarefulGrid(Grid):
    """A grid that fetches every reply separately. One that cannot be read becomes an error reply, not an exception."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    @property
    def run(self) -> Any:
        return self._grid.run

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    def create_message(self, *content: Any, **options: Any) -> Message:
        return self._grid.create_message(*content, **options)

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages, and return the replies that arrive in time."""
        sent = list(messages)
        if not sent:
            return []
        pushed = set(self.push_messages(sent))
        asked = {number: each for each in sent if (number := each.metadata.message_id) in pushed}
        deadline, replies = time.monotonic() + (math.inf if timeout is None else timeout), []
        while asked and time.monotonic() < deadline:
            for number in list(asked):
                if arrived := self._pull(number, asked[number]):
                    replies += arrived
                    del asked[number]
            if asked:
                time.sleep(PAUSE)
        return replies

    def _pull(self, number: str, message: Message) -> list[Message]:
        try:
            replies = list(self.pull_messages([number]))
        except TransportError:  # a fault of the connection to the SuperLink, not of the reply
            raise
        except Exception as error:  # whatever an attacker can make Flower's decoders raise
            return [_error(message, f"the reply cannot be read: {type(error).__name__}: {_one_line(error)}")]
        return [
            each if _answers(each, message) else _error(message, "the reply claims to be another's") for each in replies
        ]


def _answers(reply: Message, message: Message) -> bool:
    """Whether a reply claims to be what it was pulled as; its sender can write anything there."""
    if reply.metadata.reply_to_message_id != message.metadata.message_id:
        return False
    return reply.has_error() or reply.metadata.src_node_id == message.metadata.dst_node_id


def _error(message: Message, words: str) -> Message:
    return Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, words), reply_to=message)
