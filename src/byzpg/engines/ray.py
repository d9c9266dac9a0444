"""Run the cells of a sweep on Ray: each is a task, and its results come back over the network, not in shared files.

A task gets its settings as JSON, and returns a line of JSON and an .npz without pickles. Ray itself sends the function
to call by cloudpickle, which sends only the name of a module's function. So byzpg, and the modules that tasks come
from, must be installed on all machines.
"""

import json
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import ray
from ray.exceptions import RayError, RayTaskError

from byzpg import training
from byzpg._parts import Part
from byzpg.config import Config
from byzpg.engines.local import environment, num_cores
from byzpg.experiments.sweeps import Cell, Event
from byzpg.federation.devices import keep_programs
from byzpg.runs import RunDirectory, packed, provenance, unpacked

CONNECT_SECONDS = 5.0


def train_cell(settings: str, versions: str, modules: str) -> bytes:
    """Train a run inside a Ray worker.

    Args:
        settings: The settings, as JSON.
        versions: The driver's versions of packages, as JSON; others are an error.
        modules: The modules outside byzpg that the settings name, as the driver has them, as JSON; likewise.

    Returns:
        A line of JSON about the run, and its results.
    """
    if not ray.get_gpu_ids():
        jax.config.update("jax_platforms", "cpu")  # this task has no GPU, even if the machine has one
    keep_programs()
    about = provenance()
    if about["versions"] != json.loads(versions):
        return json.dumps({"failed": f"a worker has {about['versions']}, and the driver {versions}"}).encode()
    try:
        for values in json.loads(modules):
            theirs, ours = Part.from_data(values), Part.of(values["module"])
            if theirs != ours:
                problem = f"a worker has another {ours.module} than the driver: {ours.as_data()} and {values}"
                return json.dumps({"failed": problem}).encode()
        run = training.train(Config.of(json.loads(settings), "the cell"))
    except Exception as error:
        return json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode()
    return json.dumps(about).encode() + b"\n" + packed(run)


class RayWorkers:
    """Tasks with one cell and one core each or, if the cluster has GPUs, with one GPU. Ray's own retries are off.

    Args:
        folder: The folder of the sweep.
        address: The address of a cluster; None starts one on this machine, which ends with this process.
        number: How many tasks run at once; None for as many as the cluster has room for.
    """

    together = False

    def __init__(self, folder: Path, address: str | None, number: int | None) -> None:
        self.folder = folder
        self._number = number
        self._running: dict[Any, tuple[int, Cell]] = {}  # by Ray's reference to the future result
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's future default; unset, it warns
        variables = {name: value for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_"))}
        variables |= environment()
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        options["runtime_env"] = {"env_vars": variables}
        if address is None:
            ray.init("local", num_cpus=number or num_cores(), include_dashboard=False, **options)
        else:
            _check_address(address)
            try:
                ray.init(address, **options)
            except (RayError, OSError, RuntimeError, ValueError) as error:
                raise ValueError(f"there is no Ray cluster at address {address}: {error}") from None
        self._kind = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
        num_gpus = 1 if self._kind == "GPU" else 0
        self._task = ray.remote(train_cell).options(num_cpus=1, num_gpus=num_gpus, max_retries=0)

    def idle(self) -> list[int]:
        """The workers that wait for a cell."""
        # At least one, even if the cluster is empty: it may grow on demand.
        number = self._number or max(1, int(ray.cluster_resources().get(self._kind, 0)))
        busy = {worker for worker, _ in self._running.values()}
        return [worker for worker in range(number) if worker not in busy]

    def submit(self, worker: int, cells: Sequence[Cell]) -> None:
        """Train a cell as a task."""
        (cell,) = cells
        modules = [Part.of(module).as_data() for module in sorted(cell.settings.own_modules)]
        asked = cell.settings.as_data(), provenance()["versions"], modules
        self._running[self._task.remote(*map(json.dumps, asked))] = worker, cell

    def wait(self, seconds: float) -> Event | None:
        """Wait for a task to end; None if none did within `seconds`."""
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
        if (path / "config.json").is_file():  # local workers have begun it
            kept = RunDirectory.open(path)
            kept.write_provenance(about)
        else:
            kept = RunDirectory.create(path, cell.settings, about)
        kept.write_results(run)

    def close(self) -> None:
        """Disconnect from the cluster, or end the one on this machine."""
        ray.shutdown()


def _check_address(address: str) -> None:
    """Check that a cluster is reachable; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdecimal():
        raise ValueError(f"address must be host:port, ray://host:port or auto, got {address!r}.")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"there is no Ray cluster at address {address}: {error}.") from None
