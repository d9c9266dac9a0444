"""Run the cells of a sweep on this machine, in one process per worker, each with one device.

Workers are told what to do in lines of JSON; no pickles are sent.
"""

import json
import os
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from signal import Signals
from threading import Thread
from typing import Any

from byzpg.engines.worker import GRACE_SECONDS
from byzpg.experiments.sweeps import Cell, Event
from byzpg.runs import RunDirectory

START_LIMIT = 3  # how often a worker may fail to start before that is an error


def environment() -> dict[str, str]:
    """The environment variables of a worker: one device and, unless the user sets NPROC, one core.

    The results of XLA may depend on the number of cores that it uses. With one core, machines of the same kind agree to
    the bit.
    """
    suggested = {"NPROC": "1", "JAX_CUDA_VISIBLE_DEVICES": "0"}
    return {name: os.environ.get(name, value) for name, value in suggested.items()} | {"JAX_NUM_CPU_DEVICES": "1"}


def num_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class _Worker:
    process: subprocess.Popen[str]
    log: Path
    about: Mapping[str, Any] | None = None  # its provenance; None until it is ready
    cells: Sequence[Cell] = ()  # that it is training
    listener: Thread = field(init=False)

    def death(self) -> str:
        """Describe how its process ended, and where its log is."""
        code = self.process.wait()
        how = f"by {Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"its process ended {how}; its log is {self.log}"


class LocalWorkers:
    """Worker processes on this machine.

    Args:
        folder: The folder of the sweep, with runs/, logs/ and a cache of compiled programs.
        number: How many workers to start; None for one on a GPU, or one per core on CPUs.
        num_cells: The number of cells; there are never more workers.
    """

    def __init__(self, folder: Path, number: int | None, num_cells: int) -> None:
        self.folder = folder
        self._workers: dict[int, _Worker] = {}
        self._heard: SimpleQueue[tuple[int, str | None]] = SimpleQueue()
        self._failed_starts = Counter[int]()  # by worker, in a row
        self._events: deque[Event] = deque()  # that `wait` has yet to return
        try:
            self.together = self._first() != "cpu"
            wanted = number or (1 if self.together else num_cores())
            for index in range(1, min(wanted, num_cells)):
                self._start(index)
        except BaseException:
            self.close()
            raise

    def _first(self) -> str:
        """Start one worker, and return the backend that it trains on."""
        self._start(0)
        _, line = self._heard.get()
        self._ready(0, line)
        assert line is not None
        return json.loads(line)["backend"]

    def _start(self, index: int) -> None:
        log = self.folder / "logs" / f"worker-{index + 1}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "byzpg.engines.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | environment(),
                start_new_session=True,  # Ctrl-C goes to the parent process, which then ends the workers
            )
        worker = self._workers[index] = _Worker(process, log)
        worker.listener = Thread(target=self._listen, args=(index, process), daemon=True)
        worker.listener.start()

    def _listen(self, index: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._heard.put((index, line))
        self._heard.put((index, None))

    def _ready(self, index: int, line: str | None) -> None:
        worker = self._workers[index]
        if line is None:
            raise ValueError(f"a worker did not start: {worker.death()}.")
        worker.about = json.loads(line)["about"]
        self._failed_starts[index] = 0

    def idle(self) -> list[int]:
        """The workers that wait for a cell."""
        return [i for i, worker in self._workers.items() if worker.about is not None and not worker.cells]

    def submit(self, worker: int, cells: Sequence[Cell]) -> None:
        """Let a worker train cells, or continue them."""
        chosen = self._workers[worker]
        assert chosen.about is not None
        assert chosen.process.stdin is not None
        chosen.cells = cells
        about = {**chosen.about, "command": sys.argv}
        paths = [self.folder / "runs" / cell.name for cell in cells]
        for path, cell in zip(paths, cells, strict=True):
            if (path / "config.json").is_file():
                RunDirectory.open(path).write_provenance(about)
            else:
                RunDirectory.create(path, cell.settings, about)
        with suppress(BrokenPipeError):  # its process has just ended, which `wait` will find out
            modules = sorted(set[str]().union(*(cell.settings.own_modules for cell in cells)))
            asked = {"directories": [str(path) for path in paths], "modules": modules}
            chosen.process.stdin.write(json.dumps(asked) + "\n")
            chosen.process.stdin.flush()

    def wait(self, seconds: float) -> Event | None:
        """Wait for an event of a worker; None if there was none within `seconds`."""
        if not self._events:
            self._listen_for(seconds)
        return self._events.popleft() if self._events else None

    def _listen_for(self, seconds: float) -> None:
        try:
            index, line = self._heard.get(timeout=seconds)
        except Empty:
            return
        worker = self._workers[index]
        if worker.about is None and line is None and self._failed_starts[index] < START_LIMIT:
            self._failed_starts[index] += 1
            self._hang_up(worker)
            self._start(index)
        elif worker.about is None:
            self._ready(index, line)
        elif line is None:
            reason = worker.death()
            self._hang_up(worker)
            self._start(index)
            self._events += [Event(cell, "lost", reason=reason) for cell in worker.cells]
        else:
            report = json.loads(line)
            self._events += [Event(cell, **report) for cell in worker.cells]
            if report["kind"] != "training":
                worker.cells = ()

    def close(self) -> None:
        """End the workers: each finishes its block of iterations and writes a checkpoint; see `worker`."""
        for worker in self._workers.values():
            assert worker.process.stdin is not None
            with suppress(BrokenPipeError):
                worker.process.stdin.close()
        for worker in self._workers.values():
            try:
                worker.process.wait(GRACE_SECONDS + 5)
            except subprocess.TimeoutExpired:
                worker.process.kill()
            self._hang_up(worker)

    def _hang_up(self, worker: _Worker) -> None:
        worker.process.wait()
        worker.listener.join()
        for pipe in (worker.process.stdin, worker.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
