"""Cells of a sweep on this machine: a process per worker, each with one device. No pickle is sent."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
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


def environment(cache: Path | None) -> dict[str, str]:
    """What workers of any engine find set: one device and, unless the user says otherwise, one core (NPROC) for each.

    What XLA computes may depend on the number of cores it may use; with one, all machines of a kind agree to the bit.
    """
    suggested = {"NPROC": "1", "JAX_CUDA_VISIBLE_DEVICES": "0"}
    if cache is not None:
        suggested["JAX_COMPILATION_CACHE_DIR"] = str(cache.absolute())
    return {name: os.environ.get(name, value) for name, value in suggested.items()} | {"JAX_NUM_CPU_DEVICES": "1"}


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class _Worker:
    process: subprocess.Popen[str]
    log: Path
    about: Mapping[str, Any] | None = None  # its provenance, once it is ready
    cell: Cell | None = None
    listener: Thread = field(init=False)

    def death(self) -> str:
        """How its process ended, and where its last words are."""
        code = self.process.wait()
        how = f"by {Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"its process ended {how}; its log is {self.log}"


class LocalWorkers:
    """Processes of this Python. On a GPU one, unless told otherwise; on CPUs as many as there are cores."""

    def __init__(self, folder: Path, number: int | None, num_cells: int) -> None:
        """`folder`: of the sweep, where runs/, logs/ and a cache of compiled programs lie."""
        self.folder = folder
        self._workers: dict[int, _Worker] = {}
        self._heard: SimpleQueue[tuple[int, str | None]] = SimpleQueue()
        self._failed_starts = Counter[int]()  # of each worker, in a row
        try:
            backend = self._first()
            wanted = number or (1 if backend != "cpu" else num_cores())
            for index in range(1, min(wanted, num_cells)):
                self._start(index)
        except BaseException:
            self.close()
            raise

    def _first(self) -> str:
        """Start one worker, and ask it what it trains on."""
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
                env=os.environ | environment(self.folder / "cache"),
                start_new_session=True,  # Ctrl-C is for whoever started us, who ends the workers
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
        return [i for i, worker in self._workers.items() if worker.about is not None and worker.cell is None]

    def submit(self, worker: int, cell: Cell) -> None:
        chosen = self._workers[worker]
        assert chosen.about is not None
        assert chosen.process.stdin is not None
        chosen.cell = cell
        path = self.folder / "runs" / cell.name
        about = {**chosen.about, "command": sys.argv}
        if (path / "config.json").is_file():
            RunDirectory.open(path).write_provenance(about)
        else:
            RunDirectory.create(path, cell.settings, about)
        with suppress(BrokenPipeError):  # it has just died, which `wait` hears next
            chosen.process.stdin.write(json.dumps({"directory": str(path)}) + "\n")
            chosen.process.stdin.flush()

    def wait(self, seconds: float) -> Event | None:
        try:
            index, line = self._heard.get(timeout=seconds)
        except Empty:
            return None
        worker = self._workers[index]
        if worker.about is None and line is None and self._failed_starts[index] < START_LIMIT:
            self._failed_starts[index] += 1
            self._hang_up(worker)
            self._start(index)
            return None
        if worker.about is None:
            self._ready(index, line)
            return None
        if line is None:
            reason = worker.death()
            self._hang_up(worker)
            self._start(index)
            return None if worker.cell is None else Event(worker.cell, "lost", reason=reason)
        said = json.loads(line)
        cell = worker.cell
        assert cell is not None
        if said["kind"] != "training":
            worker.cell = None
        return Event(cell, **said)

    def close(self) -> None:
        """Each ends after its block of iterations, with a checkpoint; see `worker`."""
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
