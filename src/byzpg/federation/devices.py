"""The devices of a simulation, on one host or on several whose processes act as one.

The devices form a mesh of seeds × agents. Seeds need nothing of each other. Agents that are divided among devices play
and receive there, and their messages travel between devices. Large policies are divided by coordinate instead, so that
more devices can hold larger ones. Of several processes, the first one decides what to train and when to save and stop,
and writes the files; the others follow it.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from platformdirs import user_cache_path

from byzpg.federation import traces
from byzpg.robust.exchange import ONE_DEVICE, Shards

SEEDS, AGENTS, COORDINATES = "seed", "agent", "coordinate"  # axes of the mesh: the first two, or the last
BY_SEED, EVERYWHERE = PartitionSpec(SEEDS), PartitionSpec()
BY_COORDINATE = PartitionSpec(None, None, COORDINATES)  # of vectors [row, agent, d]

# If all vectors of an exchange take more bytes than this, they are divided among devices by coordinate. Every device
# would otherwise hold all of them, about twenty times over in its state and messages. What rules do with K × K matrices
# is then done on all devices: with small vectors and many agents that is most of the work, so receivers are divided.
MOST_BYTES_ON_EACH = 2**23

# Shorter compilation, on CPUs by the first and the last option and on GPUs by the second, for programs that then run
# about as fast; LunarLander on CPUs is up to a quarter slower. What the user sets in XLA_FLAGS takes precedence.
QUICK_COMPILATION: dict[str, int | bool] = {"xla_backend_optimization_level": 1, "xla_gpu_enable_triton_gemm": False}
if version("jaxlib").startswith("0.10."):  # only where it was measured: an option that XLA does not know is an error
    QUICK_COMPILATION["xla_cpu_use_fusion_emitters"] = False
_GIVEN = os.environ.get("XLA_FLAGS", "")
QUICK_COMPILATION = {option: value for option, value in QUICK_COMPILATION.items() if option not in _GIVEN}

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
    if jax.config.jax_enable_compilation_cache:  # pyright: ignore[reportAttributeAccessIssue]
        traces.keep_in(directory / "traces")


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


def mesh_for(num_seeds: int, num_agents: int, exchange_bytes: int = 0) -> Mesh:
    """The mesh that leaves each device the least work, with as few messages and devices as that takes.

    Seeds must be divided evenly; agents need not be. With several processes, every device takes part. Where seeds alone
    do not occupy the devices and the vectors of an exchange are large, all devices divide the coordinates.
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
    if chosen[1] > 1 and exchange_bytes > MOST_BYTES_ON_EACH:
        return Mesh(np.asarray(devices), (COORDINATES,))
    return Mesh(np.asarray(devices[: chosen[0] * chosen[1]]).reshape(chosen), (SEEDS, AGENTS))


def divides_coordinates(mesh: Mesh) -> bool:
    """Whether vectors are divided by coordinate."""
    return COORDINATES in mesh.axis_names


def _is_vector(leaf: Any, dimension: int) -> bool:
    """Whether a leaf holds vectors [row, agent, d]; they may be filled up, and no other leaf is as long as they are."""
    return leaf.ndim == 3 and leaf.shape[2] >= dimension


def layout(tree: Any, mesh: Mesh, dimension: int) -> Any:
    """How leaves are divided among devices.

    On a mesh of coordinates, vectors [seed, agent, d] are divided, and other leaves are everywhere. On a mesh of seeds
    and agents, leaves are divided by seed, if they have an axis.
    """
    if divides_coordinates(mesh):
        return jax.tree.map(lambda leaf: BY_COORDINATE if _is_vector(leaf, dimension) else EVERYWHERE, tree)
    return jax.tree.map(lambda leaf: BY_SEED if leaf.ndim else EVERYWHERE, tree)


def _shardings(tree: Any, mesh: Mesh, dimension: int) -> Any:
    return jax.tree.map(partial(NamedSharding, mesh), layout(tree, mesh, dimension))


def placed(tree: Any, mesh: Mesh, dimension: int) -> Any:
    """The leaves on the devices that `layout` names. Zeros fill up vectors whose coordinates are divided unevenly."""
    if divides_coordinates(mesh):
        tree = filled(tree, mesh, dimension)
    if jax.process_count() == 1:
        return jax.device_put(tree, _shardings(tree, mesh, dimension))

    def of(leaf: Array, sharding: NamedSharding) -> Array:
        values = np.asarray(leaf)
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    return jax.tree.map(of, tree, _shardings(tree, mesh, dimension))


# Programs cannot take or return arrays with parts of different sizes, though inside a program there may be some.


def filled(tree: Any, mesh: Mesh, dimension: int) -> Any:
    """The leaves with vectors [row, agent, d] filled up with zeros, so that devices have equally many coordinates."""
    return jax.tree.map(lambda leaf: _fill(leaf, 2, mesh.size) if _is_vector(leaf, dimension) else leaf, tree)


def unfilled(tree: Any, dimension: int) -> Any:
    """The inverse of `filled`, for vectors [row, agent, `dimension`]."""
    return jax.tree.map(lambda leaf: leaf[:, :, :dimension] if _is_vector(leaf, dimension) else leaf, tree)


def _fill(leaf: Array, axis: int, multiple: int, mode: Literal["constant", "edge"] = "constant") -> Array:
    """The leaf with more entries at the end of an axis, until their number is a multiple."""
    missing = -leaf.shape[axis] % multiple
    widths = [(0, missing if each == axis else 0) for each in range(leaf.ndim)]
    pad: Any = np.pad if isinstance(leaf, np.ndarray) else jnp.pad  # what is on the host may not fit on one device
    return pad(leaf, widths, mode=mode) if missing else leaf


# How the devices divide an iteration

# Turns what the agents of each table have [row, agent, ...] into something else that they have.
ForAgents = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class ByAgent:
    """Every device holds all vectors of its seeds. It plays for some agents, and applies rules at some receivers.

    What uses it is written for one device, inside `jax.shard_map`.
    """

    receivers: Shards = ONE_DEVICE

    def for_agents(self, function: ForAgents, agents: list[Any]) -> list[Any]:
        """Apply the function to this device's agents of each table, and return what comes of all agents."""
        found = function(self.receivers.part(agents, axis=1))
        numbers = map(_num_agents, agents)
        return [self.receivers.whole(each, number, axis=1) for each, number in zip(found, numbers, strict=True)]

    def kept(self, tree: Any) -> Any:
        """The leaves as they are kept between iterations."""
        return tree


@dataclass(frozen=True)
class ByCoordinate:
    """Every device holds some coordinates of all vectors; to play for some agents, it gets their whole vectors.

    What uses it is written as for one device, and the compiler divides it: so no rule and no attack needs to know of
    devices. A rule that works in each coordinate needs no messages between devices, and a Gram matrix is a sum over
    devices. Only play is divided by hand, because the compiler cannot divide a kernel.
    """

    mesh: Mesh
    dimension: int  # d

    @property
    def receivers(self) -> Shards:
        """Rules are applied at all receivers by all devices, each for its coordinates."""
        return Shards(coordinates=self.mesh.size)

    def for_agents(self, function: ForAgents, agents: list[Any]) -> list[Any]:
        """Apply the function to the agents of each table, some on each device, and return what comes of all agents."""
        shards, numbers = Shards(self.mesh.size, COORDINATES), [*map(_num_agents, agents)]
        send = partial(lax.all_to_all, axis_name=COORDINATES, tiled=True)

        def of_few_agents(leaf: Array) -> Array:
            """[row, agent, d/D] → [row, agent/D, d]."""
            rows = _fill(leaf, 1, self.mesh.size, mode="edge")
            return send(rows, split_axis=1, concat_axis=2)[:, :, : self.dimension]

        def of_all_agents(number: int, leaf: Array) -> Array:
            """[row, agent/D, d] → [row, agent, d/D]."""
            if not _is_vector(leaf, self.dimension):
                return shards.whole(leaf, number, axis=1)
            return send(_fill(leaf, 2, self.mesh.size), split_axis=2, concat_axis=1)[:, :number]

        def on_device(agents: list[Any]) -> list[Any]:
            divided = jax.tree.map(
                lambda leaf, is_vector: of_few_agents(leaf) if is_vector else shards.part(leaf, axis=1), agents, vectors
            )
            return [
                jax.tree.map(partial(of_all_agents, number), each)
                for each, number in zip(function(divided), numbers, strict=True)
            ]

        vectors = jax.tree.map(lambda leaf: _is_vector(leaf, self.dimension), agents)
        found = jax.eval_shape(function, agents)
        filled_up = filled(agents, self.mesh, self.dimension)
        result = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(layout(filled_up, self.mesh, self.dimension),),
            out_specs=layout(found, self.mesh, self.dimension),
            check_vma=False,
        )(filled_up)
        return self.kept(unfilled(result, self.dimension))

    def kept(self, tree: Any) -> Any:
        """The leaves as they are kept between iterations: each device has its coordinates of vectors."""
        return lax.with_sharding_constraint(tree, _shardings(tree, self.mesh, self.dimension))


def division(mesh: Mesh, dimension: int) -> ByAgent | ByCoordinate:
    """How the devices of a mesh divide an iteration for policies with d = `dimension` parameters."""
    return ByCoordinate(mesh, dimension) if divides_coordinates(mesh) else ByAgent(Shards(mesh.shape[AGENTS], AGENTS))


def _num_agents(tree: Any) -> int:
    return jax.tree.leaves(tree)[0].shape[1]
