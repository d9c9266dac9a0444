"""Cells of a sweep on Ray: each a task, with results that come back over the network, so no files are shared.

What we hand to Ray is text and what we get is bytes: settings as JSON; a line of JSON and an .npz without pickles. Ray
itself sends the function that is called, by cloudpickle, which for a module's function is its name: byzpg, and a module
that a task names, must be installed on all machines.
"""

import json
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import jax
import ray
from ray.exceptions import RayError, RayTaskError

from byzpg import training
from byzpg.config import Config
from byzpg.engines.local import environment, num_cores
from byzpg.experiments.sweeps import Cell, Event
from byzpg.runs import RunDirectory, packed, provenance, unpacked

CONNECT_SECONDS = 5.0


def train_cell(settings: str, versions: str) -> bytes:
    """Inside a Ray worker: a run with these settings, as a line of JSON about it and its results."""
    if not ray.get_gpu_ids():
        jax.config.update("jax_platforms", "cpu")  # a GPU that Ray does not know of is not ours to take
    about = provenance()
    if about["versions"] != json.loads(versions):
        return json.dumps({"failed": f"a worker has {about['versions']}, and the driver {versions}"}).encode()
    try:
        run = training.train(Config.of(json.loads(settings), "the cell"))
    except Exception as error:
        return json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode()
    return json.dumps(about).encode() + b"\n" + packed(run)


class RayWorkers:
    """Tasks of one core each or, where the cluster has GPUs, of one GPU each. Ray's own retries are off."""

    def __init__(self, folder: Path, address: str | None, number: int | None) -> None:
        """`address`: of a cluster; without, one is started on this machine and ended with us."""
        self.folder = folder
        self._number = number
        self._running: dict[Any, tuple[int, Cell]] = {}  # by what Ray calls the result to come
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # as it will be; else a warning
        variables = {name: value for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_"))}
        variables |= environment(folder / "cache" if address is None else None)
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        options["runtime_env"] = {"env_vars": variables}
        if address is None:
            ray.init("local", num_cpus=number or num_cores(), include_dashboard=False, **options)
        else:
            _check_address(address)
            try:
                ray.init(address, **options)
            except (RayError, OSError, RuntimeError, ValueError) as error:
                raise ValueError(f"there is no Ray cluster at --address {address}: {error}") from None
        self._kind = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
        num_gpus = 1 if self._kind == "GPU" else 0
        self._task = ray.remote(train_cell).options(num_cpus=1, num_gpus=num_gpus, max_retries=0)

    def idle(self) -> list[int]:
        # One waits even if there is nothing: a cluster may grow on demand.
        number = self._number or max(1, int(ray.cluster_resources().get(self._kind, 0)))
        busy = {worker for worker, _ in self._running.values()}
        return [worker for worker in range(number) if worker not in busy]

    def submit(self, worker: int, cell: Cell) -> None:
        asked = json.dumps(cell.settings.as_data()), json.dumps(provenance()["versions"])
        self._running[self._task.remote(*asked)] = worker, cell

    def wait(self, seconds: float) -> Event | None:
        ready, _ = ray.wait(list(self._running), timeout=seconds)
        if not ready:
            return None
        _, cell = self._running.pop(ready[0])
        try:
            answer = ray.get(ready[0])
        except RayTaskError as error:
            return Event(cell, "failed", reason=str(error.cause))
        except RayError as error:
            return Event(cell, "lost", reason=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        line, _, whole = answer.partition(b"\n")
        about = json.loads(line)
        if "failed" in about:
            return Event(cell, "failed", reason=about["failed"])
        self._keep(cell, whole, {**about, "command": sys.argv})
        return Event(cell, "finished")

    def _keep(self, cell: Cell, whole: bytes, about: dict[str, Any]) -> None:
        run = unpacked(cell.settings, whole, f"the results of {cell.name}")
        path = self.folder / "runs" / cell.name
        if (path / "config.json").is_file():  # begun by other workers
            kept = RunDirectory.open(path)
            kept.write_provenance(about)
        else:
            kept = RunDirectory.create(path, cell.settings, about)
        kept.write_results(run)

    def close(self) -> None:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdecimal():
        raise ValueError(f"--address must be host:port, ray://host:port or auto, got {address!r}.")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"there is no Ray cluster at --address {address}: {error}.") from None
