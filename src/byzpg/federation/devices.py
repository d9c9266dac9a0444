"""The devices of a simulation, on one host or on several whose processes act as one.

They form a mesh of seeds × agents. Seeds need nothing of each other; agents that are dealt to several devices play and
receive there, and their messages travel between devices. Of several processes the first one takes the command, keeps
the files and decides when to save and stop; the others follow it.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SEEDS, AGENTS = "seed", "agent"  # axes of the mesh
BY_SEED, EVERYWHERE = PartitionSpec(SEEDS), PartitionSpec()

# Shorter compilation, on CPUs by the first option and on GPUs by the second, for programs that then run about as fast.
# What the user sets in XLA_FLAGS takes precedence.
QUICK_COMPILATION = {
    option: value
    for option, value in {"xla_backend_optimization_level": 1, "xla_gpu_enable_triton_gemm": False}.items()
    if option not in os.environ.get("XLA_FLAGS", "")
}


@dataclass(frozen=True)
class Hardware:
    """What to train on."""

    devices: int | None = None
    """Devices to use, here. Left out: all GPUs; without one, a device per core."""
    coordinator: str | None = None
    """Train on several hosts as one: host:port where the first process listens; the same at all of them."""
    processes: int | None = None
    """How many processes there are, with --coordinator."""
    process: int | None = None
    """Which of them this is, from 0. The first takes the command and keeps the files; the others follow it."""

    def start(self) -> None:
        """Take the devices; before JAX has looked for any. With several processes, wait for the others."""
        self._check()
        jax.config.update("jax_num_cpu_devices", self.devices or os.cpu_count() or 1)
        if self.devices is not None:
            visible = ",".join(map(str, range(self.devices)))
            jax.config.update("jax_cuda_visible_devices", visible)
            jax.config.update("jax_rocm_visible_devices", visible)
        if self.coordinator is not None:
            jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
            try:
                jax.distributed.initialize(self.coordinator, self.processes, self.process)
            except RuntimeError as error:
                raise ValueError(f"the processes of --coordinator {self.coordinator} did not meet: {error}") from None
        with common_program():
            self._check_devices()

    def _check_devices(self) -> None:
        if self.devices is not None and jax.local_device_count() < self.devices:
            raise ValueError(f"--devices must be at most {jax.local_device_count()} here, got {self.devices}.")
        counts = Counter(device.process_index for device in jax.devices())
        if len(set(counts.values())) > 1:
            listed = ", ".join(str(counts[process]) for process in sorted(counts))
            raise ValueError(f"all processes must have as many devices, and they have {listed}: say --devices.")

    def _check(self) -> None:
        if self.devices is not None and self.devices < 1:
            raise ValueError(f"--devices must be at least 1, got {self.devices}.")
        if self.coordinator is None:
            if self.processes is not None or self.process is not None:
                raise ValueError("--processes and --process are for several processes: say --coordinator host:port.")
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"--coordinator must be host:port, got {self.coordinator!r}.")
        if self.processes is None or self.process is None:
            raise ValueError("--coordinator needs --processes (how many) and --process (which one this is, from 0).")
        if not 0 <= self.process < self.processes:
            raise ValueError(f"--process must be 0 to {self.processes - 1}, got {self.process}.")


# Several processes


def follows() -> bool:
    """Whether this process follows another."""
    return jax.distributed.is_initialized() and jax.process_index() > 0


def leads() -> bool:
    """Whether others follow this process."""
    return jax.distributed.is_initialized() and jax.process_index() == 0


_torn = False


@contextmanager
def common_program() -> Iterator[None]:
    """Around what all processes do in step: where one fails in it, the others hang."""
    global _torn
    try:
        yield
    except BaseException:
        _torn = jax.process_count() > 1
        raise


def torn() -> bool:
    """Whether a common program failed here: then all that helps the others is that this process ends at once."""
    return _torn


def number_of_first(number: int = 0) -> int:
    """What the first of several processes says here, at all of them."""
    return number if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.asarray(number)))


def bytes_of_first(message: bytes = b"") -> bytes:
    """As `number_of_first`."""
    if len(message) >= 2**31:
        raise ValueError(f"checkpoints of {len(message) / 2**30:.1f} GiB cannot be sent: resume in one process.")
    length = number_of_first(len(message))
    here = np.zeros(length, np.uint8) if follows() else np.frombuffer(message, np.uint8)
    # Summed up over processes, and so of a wider type.
    return np.asarray(multihost_utils.broadcast_one_to_all(here), np.uint8).tobytes()


def fetched(tree: Any) -> Any:
    """The values of arrays, wherever they are; all processes must ask for them."""
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    return multihost_utils.process_allgather(tree, tiled=True)


# The mesh


def mesh_for(num_seeds: int, num_agents: int) -> Mesh:
    """The mesh that leaves each device least to do, with as few messages and devices as that takes.

    Seeds must be dealt evenly; agents need not be. Of several processes, every device takes part.
    """
    devices, alone = jax.devices(), jax.process_count() == 1
    shapes = [
        (by_seed, by_agent)
        for by_seed in range(1, len(devices) + 1)
        for by_agent in range(1, len(devices) // by_seed + 1)
        if num_seeds % by_seed == 0 and (alone or by_seed * by_agent == len(devices))
    ]

    def cost(shape: tuple[int, int]) -> tuple[int, int, int]:
        by_seed, by_agent = shape
        return num_seeds // by_seed * -(-num_agents // by_agent), by_agent, by_seed

    chosen = min(shapes, key=cost)
    return Mesh(np.asarray(devices[: chosen[0] * chosen[1]]).reshape(chosen), (SEEDS, AGENTS))


def layout(tree: Any) -> Any:
    """Which leaves are dealt to devices by seed: all that have seeds."""
    return jax.tree.map(lambda leaf: BY_SEED if leaf.ndim else EVERYWHERE, tree)


def placed(tree: Any, mesh: Mesh) -> Any:
    """The leaves on the devices that `layout` gives them."""
    shardings = jax.tree.map(partial(NamedSharding, mesh), layout(tree))
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def of(leaf: Array, sharding: NamedSharding) -> Array:
        values = np.asarray(leaf)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    return jax.tree.map(of, tree, shardings)
