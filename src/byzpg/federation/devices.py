"""The devices of a simulation, on one host or on several whose processes act as one.

The devices form a mesh of seeds × agents. Seeds need nothing of each other. Agents that are divided among devices play
and receive there, and their messages travel between devices. Of several processes, the first one decides
what to train and when to save and stop, and writes the files; the others follow it.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from platformdirs import user_cache_path

SEEDS, AGENTS = "seed", "agent"  # axes of the mesh
BY_SEED, EVERYWHERE = PartitionSpec(SEEDS), PartitionSpec()

# Shorter compilation, on CPUs by the first option and on GPUs by the second, for programs that then run about as fast.
# What the user sets in XLA_FLAGS takes precedence.
QUICK_COMPILATION = {
    option: value
    for option, value in {"xla_backend_optimization_level": 1, "xla_gpu_enable_triton_gemm": False}.items()
    if option not in os.environ.get("XLA_FLAGS", "")
}

# The most that compiled programs may take on the disk; the ones used least recently make way for new ones.
MOST_KEPT_BYTES = 2**30
# Programs that compile faster than this, in seconds, are compiled again each time.
WORTH_KEEPING = 0.1


def keep_programs(directory: Path | None = None) -> None:
    """Keep compiled programs on the disk, so that the next process need not compile them again.

    JAX's own settings take precedence: JAX_COMPILATION_CACHE_DIR, and JAX_ENABLE_COMPILATION_CACHE=false for no cache.
    Where nothing can be written, nothing is kept.

    Args:
        directory: Where to keep them. Default: the user's directory for caches.
    """
    if jax.config.jax_compilation_cache_dir is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return
    directory = directory or user_cache_path("byzpg") / "programs"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(directory, os.W_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_compilation_cache_max_size", MOST_KEPT_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)


@dataclass(frozen=True)
class Hardware:
    """What to train on."""

    devices: int | None = None
    """Number of devices to use on this host. Default: all GPUs; without one, a device per core."""
    coordinator: str | None = None
    """Address host:port where the first of several processes listens, to train on several hosts as one."""
    processes: int | None = None
    """Number of processes that train as one, if there is a coordinator."""
    process: int | None = None
    """Index of this process, from 0. The first one decides what to train and writes the files; the others follow it."""

    def start(self) -> None:
        """Take the devices, before JAX has looked for any; with several processes, wait for the others."""
        self._check()
        keep_programs()
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
                raise ValueError(f"the processes of coordinator {self.coordinator} did not meet: {error}") from None
        with common_program():
            self._check_devices()

    def _check_devices(self) -> None:
        if self.devices is not None and jax.local_device_count() < self.devices:
            raise ValueError(f"devices must be at most {jax.local_device_count()} here, got {self.devices}.")
        counts = Counter(device.process_index for device in jax.devices())
        if len(set(counts.values())) > 1:
            listed = ", ".join(str(counts[process]) for process in sorted(counts))
            raise ValueError(f"all processes must have the same number of devices, not {listed}: set devices.")

    def _check(self) -> None:
        if self.devices is not None and self.devices < 1:
            raise ValueError(f"devices must be at least 1, got {self.devices}.")
        if self.coordinator is None:
            if self.processes is not None or self.process is not None:
                raise ValueError("processes and process are for several processes: set coordinator to host:port.")
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(f"coordinator must be host:port, got {self.coordinator!r}.")
        if self.processes is None or self.process is None:
            raise ValueError("coordinator needs processes (how many) and process (which one this is, from 0).")
        if not 0 <= self.process < self.processes:
            raise ValueError(f"process must be 0 to {self.processes - 1}, got {self.process}.")


# Several processes


def follows() -> bool:
    """Whether this process follows the first one."""
    return jax.distributed.is_initialized() and jax.process_index() > 0


def leads() -> bool:
    """Whether this process is the first, and others follow it."""
    return jax.distributed.is_initialized() and jax.process_index() == 0


_torn = False


@contextmanager
def common_program() -> Iterator[None]:
    """Mark what all processes do together: if one fails in it, the others hang."""
    global _torn
    try:
        yield
    except BaseException:
        _torn = jax.process_count() > 1
        raise


def torn() -> bool:
    """Whether a common program failed here: then this process must end at once, or the others hang."""
    return _torn


# Every process calls these two in the same order; what the followers pass is ignored.


def broadcast_number(number: int = 0) -> int:
    """The number that the first process passes."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.asarray(number)))


def broadcast_bytes(message: bytes = b"") -> bytes:
    """The bytes that the first process passes."""
    if len(message) >= 2**31:
        raise ValueError(f"checkpoints of {len(message) / 2**30:.1f} GiB cannot be sent: resume in one process.")
    # An array's shape must be the same at all processes before its values can be sent: so the length goes ahead.
    length = broadcast_number(len(message))
    buffer = np.zeros(length, np.uint8) if follows() else np.frombuffer(message, np.uint8)
    received = multihost_utils.broadcast_one_to_all(buffer)
    # JAX sums over processes, which widens the type.
    return np.asarray(received, np.uint8).tobytes()


def fetched(tree: Any) -> Any:
    """The values of arrays, wherever they are; all processes must call this."""
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    return multihost_utils.process_allgather(tree, tiled=True)


# The mesh


def mesh_for(num_seeds: int, num_agents: int) -> Mesh:
    """The mesh that leaves each device the least work, with as few messages and devices as that takes.

    Seeds must be divided evenly; agents need not be. With several processes, every device takes part.
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
    """How leaves are divided among devices: by seed, or not at all if they have no axis."""
    return jax.tree.map(lambda leaf: BY_SEED if leaf.ndim else EVERYWHERE, tree)


def placed(tree: Any, mesh: Mesh) -> Any:
    """The leaves on the devices that `layout` names."""
    shardings = jax.tree.map(partial(NamedSharding, mesh), layout(tree))
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def of(leaf: Array, sharding: NamedSharding) -> Array:
        values = np.asarray(leaf)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    return jax.tree.map(of, tree, shardings)
