"""The status of a member: numbers for Prometheus, a summary for `byzpg watch` and the monitor, and log lines."""

import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import prometheus_client

from byzpg._files import append_whole
from byzpg.live.serving import Handler, Server

State = Literal["starting", "running", "waiting", "stalled", "behind", "finished"]
# Points of a learning curve, and rounds whose times are remembered.
CURVE_POINTS, RECENT_STEPS = 400, 200

Sink = Callable[[dict[str, Any]], None]


class Log:
    """Events as JSON, one object per line, written to a file and passed to an optional sink.

    A full file becomes `log.jsonl.1`, the one before it `log.jsonl.2`, and so on. What cannot be written is left out:
    nothing that the log needs is a reason to stop.
    """

    # Bytes of a file, and how many full ones are kept.
    LARGEST, KEPT = 10 * 2**20, 3
    # Seconds after which `seldom` repeats an event about the same subject.
    PAUSE = 10.0

    def __init__(self, path: Path, name: str, sink: Sink | None) -> None:
        self._path, self._name, self._sink = path, name, sink
        self._last: dict[tuple[Any, ...], float] = {}

    @cached_property
    def _file(self) -> FileIO:
        """Opened with the first event: before that, it may not be known whether the directory is this member's."""
        file = self._path.open("ab", buffering=0)
        os.ftruncate(file.fileno(), self._path.read_bytes().rfind(b"\n") + 1)  # a crash may have cut off the last line
        return file

    def __call__(self, event: str, level: str = "info", **fields: Any) -> None:
        line = {"time": round(time.time(), 3), "level": level, "member": self._name, "event": event, **fields}
        with suppress(OSError):
            # The text may hold a path whose bytes are not UTF-8.
            self._write(json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
        if self._sink is not None:
            with suppress(OSError, ValueError):
                self._sink(line)

    def close(self) -> None:
        self._file.close()

    def _write(self, line: bytes) -> None:
        if self._file.seek(0, os.SEEK_END) + len(line) > self.LARGEST:
            with suppress(OSError):
                self._rotate()
        append_whole(self._file, line)

    def _rotate(self) -> None:
        """Continue in a new file. If a step fails, the open file stays in use, and the next call does the rest."""
        if self._path.exists():
            kept = [self._path.with_name(f"{self._path.name}.{number}") for number in range(self.KEPT, 0, -1)]
            for older, newer in pairwise([*kept, self._path]):
                if newer.exists():
                    newer.replace(older)
        full, self._file = self._file, self._path.open("ab", buffering=0)
        full.close()

    def seldom(self, event: str, *about: Any, level: str = "info", pause: float = PAUSE, **fields: Any) -> None:
        """Log an event, unless the same one about the same subject was logged within `pause` seconds."""
        now = time.monotonic()
        if now - self._last.get((event, *about), -pause) >= pause:
            self._last[event, *about] = now
            self(event, level, **fields)


class Numbers:
    """Prometheus metrics of one member."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()

        def make(kind: Any, name: str, words: str, labels: tuple[str, ...] = (), **options: Any) -> Any:
            return kind(f"byzpg_{name}", words, labels, registry=self.registry, **options)

        def seconds(name: str, words: str) -> Any:
            buckets = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
            return make(prometheus_client.Histogram, name, words, buckets=buckets)

        gauge, counter = prometheus_client.Gauge, prometheus_client.Counter
        self.iteration = make(gauge, "iteration", "Iterations completed.")
        self.mean_return = make(gauge, "return", "Mean undiscounted return of this member's last episodes.")
        self.round_seconds = seconds(
            "round_seconds", "Seconds from the member's own message of a round to the last one that it waited for."
        )
        self.rejected = make(counter, "messages_rejected", "Messages that were not used.", ("peer", "reason"))
        self.missing = make(gauge, "peers_missing", "Members without a message in the last round.")
        self.absences = make(counter, "absences", "Rounds that ended without a member's message.", ("peer",))
        self.diameter = make(gauge, "diameter", "Diameter of the last vectors, attackers included.", ("phase",))
        self.weight = make(gauge, "weight", "Weight of a member's last gradient.", ("peer",))
        self.equivocations = make(counter, "equivocations", "Equivocations of a member.", ("peer",))
        self.faults = make(gauge, "faults", "Members that are missing or that provably equivocated.")
        self.tolerated = make(gauge, "faults_tolerated", "Faulty members that the federation tolerates, f.")
        self.behind = make(gauge, "peers_behind", "Members that are more than an iteration behind this one.")
        self.queued = make(gauge, "messages_queued", "Messages that wait to be sent.")
        self.damage = make(counter, "damage", "Damaged, lost or outdated files of this member.")
        self.flush_seconds = seconds("flush_seconds", "Seconds until this member's files were safe on the disk.")
        self.stalled = make(gauge, "stalled", "1 while too few messages arrive to continue.")
        self.sent = make(gauge, "bytes_sent", "Bytes of messages sent, without TLS and HTTP/2.")
        self.received = make(gauge, "bytes_received", "Bytes of messages received, without TLS and HTTP/2.")

    def serve(self, address: str, port: int) -> Callable[[], None]:
        """Serve the metrics over HTTP; call the result to stop."""

        class Metrics(Handler, prometheus_client.MetricsHandler):  # pyright: ignore[reportIncompatibleVariableOverride]
            registry = self.registry

        server = Server("metrics", address, port, Metrics)
        thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
        thread.start()

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return stop


@dataclass(kw_only=True)
class Status:
    """What a member knows about the run."""

    names: tuple[str, ...]  # of all members
    own: int  # this member's index
    num_iterations: int
    attack: str | None
    reward_threshold: float | None
    task: str
    numbers: Numbers = field(default_factory=Numbers)
    state: State = "starting"
    iteration: int = 0
    step: int = 0
    present: list[bool] = field(default_factory=list)
    waiting_for: list[str] = field(default_factory=list)
    connected: set[int] = field(default_factory=set)
    weights: np.ndarray | None = None  # [K], a decaying mean of the gradients' weights
    diameters: dict[str, float] = field(default_factory=dict)
    rejected: Counter[tuple[int, str]] = field(default_factory=Counter)
    absences: Counter[int] = field(default_factory=Counter)
    equivocations: Counter[int] = field(default_factory=Counter)
    curve: list[tuple[int, float]] = field(default_factory=list)  # trajectories or steps, return
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    started: float = field(default_factory=time.time)
    bytes: tuple[int, int] = (0, 0)  # sent, received
    num_byzantine: int = 0  # f
    faults: list[str] = field(default_factory=list)  # members that are missing or that provably equivocated

    def __post_init__(self) -> None:
        self.numbers.tolerated.set(self.num_byzantine)

    def reject(self, sender: int | None, reason: str) -> None:
        """Count a message that was not used; None is a sender outside the federation."""
        peer = "stranger" if sender is None else self.names[sender]
        self.rejected[-1 if sender is None else sender, reason] += 1
        self.numbers.rejected.labels(peer, reason).inc()

    def equivocated(self, sender: int) -> None:
        """Count an equivocation."""
        self.equivocations[sender] += 1
        self.numbers.equivocations.labels(self.names[sender]).inc()

    def fault(self, members: list[int]) -> None:
        """Record which members are faulty now."""
        self.faults = [self.names[each] for each in members]
        self.numbers.faults.set(len(members))

    def step_ended(self, present: list[bool], seconds: float) -> None:
        """Record a round: whose message was there, and how long it took."""
        self.present = present
        self.step_seconds.append(seconds)
        self.numbers.round_seconds.observe(seconds)
        self.numbers.missing.set(present.count(False))
        for index, there in enumerate(present):
            if not there:
                self.absences[index] += 1
                self.numbers.absences.labels(self.names[index]).inc()

    def combined(self, gradients: bool, diameter: float, weights: np.ndarray | None) -> None:
        """Record what the rule of a round saw: the diameter of the vectors, and the weights [K] it gave them."""
        name = "gradients" if gradients else "parameters"
        self.diameters[name] = diameter
        self.numbers.diameter.labels(name).set(diameter)
        if gradients and weights is not None:
            self.weights = weights if self.weights is None else 0.9 * self.weights + 0.1 * weights
            for name, weight in zip(self.names, weights, strict=True):
                self.numbers.weight.labels(name).set(float(weight))

    def iteration_ended(self, iteration: int, progress: int, mean_return: float) -> None:
        """Record an iteration; old points of the curve are merged in pairs."""
        self.iteration = iteration
        self.numbers.iteration.set(iteration)
        self.numbers.mean_return.set(mean_return)
        self.numbers.sent.set(self.bytes[0])
        self.numbers.received.set(self.bytes[1])
        self.curve.append((progress, mean_return))
        if len(self.curve) > 2 * CURVE_POINTS:
            pairs = zip(self.curve[::2], self.curve[1::2], strict=False)
            self.curve = [(b[0], (a[1] + b[1]) / 2) for a, b in pairs]

    def as_data(self) -> dict[str, Any]:
        """Plain data; `others` is what this member observed of the others."""
        recent = sorted(self.step_seconds)
        return {
            "name": self.names[self.own],
            "task": self.task,
            "state": self.state,
            "rehearsal": self.attack,
            "iteration": self.iteration,
            "num_iterations": self.num_iterations,
            "step": self.step,
            "waiting_for": self.waiting_for,
            "faults": self.faults,
            "uptime": round(time.time() - self.started, 1),
            "curve": [[at, round(value, 3)] for at, value in self.curve[-2 * CURVE_POINTS :]],
            "reward_threshold": self.reward_threshold,
            "diameters": self.diameters,
            "step_seconds": [round(value, 5) for value in self.step_seconds],
            "median_step_seconds": recent[len(recent) // 2] if recent else None,
            "bytes_sent": self.bytes[0],
            "bytes_received": self.bytes[1],
            "others": {
                name: {
                    "connected": index in self.connected or index == self.own,
                    "present": self.present[index] if self.present else None,
                    "absences": self.absences[index],
                    "weight": None if self.weights is None else round(float(self.weights[index]), 4),
                    "equivocations": self.equivocations[index],
                    "rejected": {why: n for (who, why), n in sorted(self.rejected.items()) if who == index},
                }
                for index, name in enumerate(self.names)
            },
            "strangers": {why: n for (who, why), n in sorted(self.rejected.items()) if who == -1},
        }
