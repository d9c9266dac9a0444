"""One simulation on several devices, and in several processes that act as one."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forking import BYZPG, Forked
from jax import Array
from jax.sharding import Mesh
from live_federation import free_ports

from byzpg import training
from byzpg.config import Config
from byzpg.federation import devices, traces
from byzpg.federation.devices import COORDINATES, Hardware
from byzpg.federation.simulator import LARGE, SKIP, SMALL, Simulation
from byzpg.robust import (
    ALIE,
    NNM,
    RFA,
    AvgZero,
    Equivocate,
    Krum,
    LargeNoise,
    Median,
    MinMax,
    TrimmedMean,
    agreement,
    exchange,
)
from byzpg.robust.attacks import Attack
from byzpg.robust.exchange import Diagnostics, Round, Shards, exchange_all
from byzpg.robust.rules import Rule
from byzpg.runs import RunDirectory

HERE = Path(__file__).parent
TINY: dict[str, Any] = {
    "hidden": (8,),
    "horizon": 20,
    "large_batch": 6,
    "small_batch": 3,
    "num_seeds": 2,
    "seed": 5,
    "switch_probability": 0.5,
}
# 13 agents do not divide evenly among 4 devices, nor 5 among 3 or 4. Messages and a rule that differ by receiver; play;
# a server.
FEDERATIONS = [
    Config(
        num_agents=13,
        num_byzantine=2,
        attack="LargeNoise",
        aggregator="Remember(RFA())",
        agreement="GDA",
        rounds=2,
        **TINY,
    ),
    Config(
        num_agents=5,
        num_byzantine=1,
        attack="RandomAction",
        algorithm="ByzPG",
        aggregator="Median",
        optimizer="sgd",
        **TINY,
    ),
]
BATCHES = [LARGE, SMALL, SMALL, LARGE, SKIP]
# Seeds toss coins of their own, so one of them waits while the other takes part.
TAKES_PART = np.array([[True, True, False, True, False], [True, True, True, False, False]])
# The products of another number of agents are rounded differently.
TOLERANCE = 1e-5


SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture
def _settings_of_the_cache() -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    traces.keep_in(None)


@pytest.mark.usefixtures("_settings_of_the_cache")
def test_programs_are_kept_unless_they_cannot_be_or_the_user_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(given: str | None, default: Path) -> tuple[Any, Any]:
        jax.config.update(SETTINGS[0], given)
        jax.config.update(SETTINGS[1], -1)
        monkeypatch.setattr(devices, "user_cache_path", lambda name: default / name)
        devices.keep_programs()
        return getattr(jax.config, SETTINGS[0]), getattr(jax.config, SETTINGS[1])

    (tmp_path / "file").touch()
    assert kept("elsewhere", tmp_path) == ("elsewhere", -1)
    assert traces._directory is None
    assert kept(None, tmp_path) == (str(tmp_path / "byzpg" / "programs"), 2**30)
    assert traces._directory == tmp_path / "byzpg" / "programs" / "traces"
    assert kept(None, tmp_path / "file") == (None, -1)


def run_all(mesh_shape: dict[str, int], first: int = 0) -> list[np.ndarray]:
    """What comes of the federations from the first one on, on a mesh of this shape."""
    simulation = Simulation(tuple(config.resolved().federation() for config in FEDERATIONS[first:]), (5, 6))
    assert dict(simulation._mesh().shape) == mesh_shape
    states, metrics = simulation.run(simulation.start(), BATCHES, np.array([1, 2]), takes_part=TAKES_PART)
    return [np.asarray(leaf) for leaf in jax.tree.leaves((simulation.fetched(states), metrics))]


def in_eight(tmp_path: Path, call: str) -> Forked:
    """A process with eight devices that makes this call of this module."""
    program = f"""
import sys
from pathlib import Path
from byzpg.federation.devices import Hardware
Hardware(devices=8).start()
import test_devices
test_devices.{call}
"""
    with (tmp_path / "said").open("w") as output:
        return Forked(tmp_path, program=program, stdout=output, PYTHONPATH=f"{HERE}{os.pathsep}{HERE.parent}")


def save_all(folder: str, first: int) -> None:
    np.savez(f"{folder}/agents.npz", *run_all({"seed": 2, "agent": 3 if first else 4}, first))
    devices.MOST_BYTES_ON_EACH = 0
    np.savez(f"{folder}/coordinates.npz", *run_all({"coordinate": 8}, first))


@pytest.mark.parametrize("first", [pytest.param(0, id="all", marks=pytest.mark.slow), pytest.param(1, id="server")])
def test_eight_devices_give_what_one_gives(first: int, tmp_path: Path) -> None:
    done = in_eight(tmp_path, f"save_all(sys.argv[1], {first})")
    alone = run_all({"seed": 1, "agent": 1}, first)
    assert done.wait() == 0, (tmp_path / "said").read_text()
    for divided in ("agents", "coordinates"):
        with np.load(tmp_path / f"{divided}.npz") as eight:
            assert len(eight) == len(alone)
            for one, other in zip(alone, eight.values(), strict=True):
                np.testing.assert_allclose(other, one, rtol=TOLERANCE, atol=TOLERANCE, err_msg=divided)
    parameters = [leaf for leaf in alone if leaf.ndim == 3]
    assert parameters
    assert all(np.all(np.isfinite(leaf)) for leaf in parameters)


# Large policies

# 1,003 coordinates do not divide evenly among 8 devices.
ROUNDS: list[tuple[Rule, Attack]] = [
    (TrimmedMean(), AvgZero()),
    (Krum(), MinMax()),
    # The median is close to the two equal rows of ALIE, where distances are mostly rounding: smoothing keeps these out.
    # With a tolerance, rounding would decide on one step more or less.
    (RFA(smoothing=10.0, tolerance=0.0, max_iterations=20), ALIE()),
    (NNM(Median()), LargeNoise()),
    (agreement.MDA(), AvgZero()),
    (agreement.GDA(), LargeNoise(target="both")),
    (Krum(), Equivocate()),  # receivers of the same messages share their products
]
NUM_AGENTS, DIMENSION = 11, 1003


def test_the_last_row_is_repeated_to_fill_the_last_part() -> None:
    parts = jax.vmap(lambda _: Shards(3).part(jnp.arange(5.0)), axis_name="agent")(jnp.arange(3))
    np.testing.assert_array_equal(parts, [[0, 1], [2, 3], [4, 4]])


def exchanged(vectors: Array, shards: Shards) -> list[tuple[Array, Diagnostics]]:
    """Two runs of every round, for vectors [run, agent, d]."""

    def for_each_run(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (2, *jnp.shape(leaf))), tree)

    def of(rule: Rule, attack: Attack) -> Round:
        alike = Round.of(
            rule,
            attack,
            num_byzantine=2,
            phase="gradients",
            at_server=False,
            vectors=vectors[0],
            byzantine=jnp.array([3, 7]),
            keys=jax.random.key(0),
            iteration=jnp.array(0),
        )
        return dataclasses.replace(for_each_run(alike), vectors=vectors)

    return [outcome[:2] for outcome in exchange_all([of(*each) for each in ROUNDS], shards)]


def bytes_needed(program: jax.stages.Compiled) -> tuple[int, int]:
    """For arguments and temporaries, on each device."""
    analysis = program.memory_analysis()
    assert analysis is not None
    return analysis.argument_size_in_bytes, analysis.temp_size_in_bytes


def check_exchanges() -> None:
    """Each device has some coordinates of all vectors, and what it sends to others does not grow with d."""
    exchange.GROUP_BYTES = 2**16  # so that receivers form several groups
    mesh = Mesh(np.asarray(jax.devices()), (COORDINATES,))
    vectors = jax.random.normal(jax.random.key(1), (2, NUM_AGENTS, DIMENSION))
    # Every device would choose other vectors by its own coordinates alone.
    vectors *= (
        1
        + jax.random.permutation(jax.random.key(2), NUM_AGENTS * mesh.size)
        .reshape(NUM_AGENTS, -1)
        .repeat(-(-DIMENSION // mesh.size), axis=1)[:, :DIMENSION]
    )

    by = devices.ByCoordinate(mesh, DIMENSION)

    def divided(filled: Array) -> list[tuple[Array, Diagnostics]]:
        outcomes = exchanged(by.kept(devices.unfilled(filled, DIMENSION)), by.receivers)
        return [(by.kept(devices.filled(result, mesh, DIMENSION)), report) for result, report in outcomes]

    one = jax.jit(partial(exchanged, shards=Shards())).lower(vectors).compile()
    placed = devices.placed(vectors, mesh, DIMENSION)
    eight = jax.jit(divided).lower(placed).compile()
    for here, (results, report) in zip(one(vectors), eight(placed), strict=True):
        there = devices.unfilled(results, DIMENSION), report
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-3), there, here)
    assert bytes_needed(eight)[1] < bytes_needed(one)[1] / 4
    sent = re.findall(r"= (.*?) (?:all-\w+|collective-permute)\(", str(eight.as_text()))
    assert sent
    lengths = [
        int(length) for each in sent for shape in re.findall(r"\[([\d,]+)\]", each) for length in shape.split(",")
    ]
    assert max(lengths) <= 2 * NUM_AGENTS, sent


def test_exchanges_are_divided_by_coordinate(tmp_path: Path) -> None:
    assert in_eight(tmp_path, "check_exchanges()").wait() == 0, (tmp_path / "said").read_text()


LARGE_POLICY = Config(
    **TINY
    | {"algorithm": "Dec-PAGE-PG", "num_agents": 8, "num_seeds": 1, "hidden": (128, 128)}
    | {"switch_probability": 1.0, "trajectories": 12}
)
# As training runs it, so that their programs are one.
LARGE_BLOCK = [LARGE] + [SKIP] * (training.BLOCK - 1)


def check_memory(folder: str) -> None:
    """The state rests divided, a block needs a fraction of the memory, and files are as always."""
    settings = LARGE_POLICY.resolved()
    simulation = Simulation((settings.federation(),), settings.seeds)

    arguments, temporary = bytes_needed(simulation.compiled(LARGE_BLOCK, only_large=True))  # all on each device
    devices.MOST_BYTES_ON_EACH = 0
    fewer_arguments, less_temporary = bytes_needed(simulation.compiled(LARGE_BLOCK, only_large=True))
    assert fewer_arguments < arguments / 7
    assert less_temporary < temporary / 4
    dimension = settings.federation().agent.policy.dimension
    assert dimension % 8
    states, _ = simulation.run(simulation.start(), LARGE_BLOCK, 0, only_large=True)
    for leaf in jax.tree.leaves(states):
        if leaf.ndim == 3:
            assert {part.data.shape for part in leaf.addressable_shards} == {(1, 8, -(-dimension // 8))}
    training.train(LARGE_POLICY, Path(folder) / "run")


@pytest.mark.slow
def test_more_devices_need_less_memory_each(tmp_path: Path) -> None:
    done = in_eight(tmp_path, "check_memory(sys.argv[1])")
    alone = training.train(LARGE_POLICY)
    assert done.wait() == 0, (tmp_path / "said").read_text()
    for name, parameters in training.load(tmp_path / "run").parameters.items():
        np.testing.assert_allclose(parameters, alone.parameters[name], rtol=TOLERANCE, atol=TOLERANCE)


# With a critic; an iteration has more steps than θ has coordinates, so that the two could be taken for each other.
WITH_CRITIC = Config(
    algorithm="DecByzPPO",
    num_agents=5,
    num_byzantine=1,
    attack="SignFlip",
    aggregator="Remember(NNM(TrimmedMean()))",
    hidden=(4,),
    horizon=20,
    num_seeds=1,
    steps=384,
    ppo="PPO(environments=8, segment=16, epochs=1, minibatches=2, normalize_observations=True)",
)


def train_with_critic(folder: str) -> None:
    training.train(WITH_CRITIC, Path(folder) / "agents")
    devices.MOST_BYTES_ON_EACH = 0
    training.train(WITH_CRITIC, Path(folder) / "coordinates")


@pytest.mark.slow
def test_agents_with_a_critic_learn_the_same_on_eight_devices(tmp_path: Path) -> None:
    done = in_eight(tmp_path, "train_with_critic(sys.argv[1])")
    alone = training.train(WITH_CRITIC)
    assert WITH_CRITIC.resolved().federation().agent.dimension < 128
    assert done.wait() == 0, (tmp_path / "said").read_text()
    for divided in ("agents", "coordinates"):
        found = training.load(tmp_path / divided)
        np.testing.assert_allclose(found.parameters["last"], alone.parameters["last"], rtol=TOLERANCE, atol=TOLERANCE)


# Ctrl-C while the first block of iterations runs.
INTERRUPTED = """
import os, signal
from byzpg.cli import main
from byzpg.federation.simulator import Simulation
run = Simulation.run
def interrupted(*arguments, **options):
    os.kill(os.getpid(), signal.SIGINT)
    return run(*arguments, **options)
Simulation.run = interrupted
main()
"""


class Pair:
    """Two processes that carry out one command of byzpg as one; Ctrl-C may be pressed at the first."""

    def __init__(self, folder: Path, *command: str, interrupted: bool = False) -> None:
        coordinator = f"127.0.0.1:{free_ports(1)[0]}"
        common = [*command, "--devices", "2", "--coordinator", coordinator, "--processes", "2"]
        self.outputs = [folder / f"{process}.out" for process in range(2)]
        self.processes: list[Forked | subprocess.Popen[bytes]] = []
        for process, output in enumerate(self.outputs):
            (folder / f"at-{process}").mkdir(exist_ok=True)
            with output.open("wb") as file:
                line, place = [*common, "--process", str(process)], folder / f"at-{process}"
                if process == 0:
                    program = INTERRUPTED if interrupted else BYZPG
                    self.processes.append(Forked(*line, program=program, stdout=file, folder=place))
                else:  # with a hash seed of its own
                    alone = [sys.executable, "-m", "byzpg", *line]
                    self.processes.append(subprocess.Popen(alone, stdout=file, stderr=subprocess.STDOUT, cwd=place))

    def end(self) -> list[int]:
        """The exit codes."""
        try:
            return [process.wait(300) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()

    def said(self) -> list[str]:
        return [output.read_text() for output in self.outputs]


ONE_SEED: dict[str, Any] = TINY | {"num_seeds": 1}
# Five agents: on four devices of two processes. Three blocks.
FOR_TWO = Config(algorithm="ByzPG", num_agents=5, num_byzantine=1, aggregator="Krum", trajectories=80, **ONE_SEED)


@pytest.mark.slow
def test_two_processes_stop_and_go_on_as_one(tmp_path: Path) -> None:
    """The second of them has no files."""
    config = FOR_TWO
    (tmp_path / "at-0").mkdir()
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(config).items()}
    given = {name: value for name, value in values.items() if value is not None}
    (tmp_path / "at-0" / "config.json").write_text(json.dumps(given))
    (tmp_path / "at-1").mkdir()
    (tmp_path / "at-1" / "config.json").write_text("{}")  # it does what the first one says
    directory = tmp_path / "at-0" / "run"
    pair = Pair(tmp_path, "train", "--config", "config.json", "--directory", "run", "--no-compare", interrupted=True)
    assert pair.end() == [130, 0], pair.said()
    assert "Continue with" in pair.said()[0]
    halfway = training.load(directory)
    assert not halfway.complete

    pair = Pair(tmp_path, "resume", "run")
    assert pair.end() == [0, 0], pair.said()
    both, alone = training.load(directory), training.train(config)
    assert both.complete
    assert np.all(alone.num_iterations > halfway.num_iterations)
    assert np.all(halfway.num_iterations > 0)
    np.testing.assert_allclose(both.parameters["last"], alone.parameters["last"], rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(both.parameters["uniform"], alone.parameters["uniform"], rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_array_equal(both.returns, alone.returns)
    assert [path.name for path in (tmp_path / "at-1").iterdir()] == ["config.json"]


@pytest.mark.slow
def test_a_failure_of_the_first_process_ends_both(tmp_path: Path) -> None:
    """Its checkpoint cannot be written, while the other one is in the next program already."""
    (tmp_path / "at-0").mkdir()
    RunDirectory.create(tmp_path / "at-0" / "run", FOR_TWO.resolved())
    (tmp_path / "at-0" / "run" / "checkpoint.npz").mkdir()
    pair = Pair(tmp_path, "resume", "run")
    first, second = pair.end()
    assert first == 2, pair.said()
    assert second != 0, pair.said()
    assert "checkpoint.npz" in pair.said()[0]


def test_a_wrong_option_ends_both_processes(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "train", "--num-agents", "5", "--num-byzantine", "4", "--directory", "run")
    assert pair.end() == [2, 0], pair.said()
    assert "use num_byzantine ≤ 2" in pair.said()[0]
    assert not list((tmp_path / "at-0").iterdir())


@pytest.mark.parametrize(
    ("hardware", "complaint"),
    [
        (Hardware(devices=0), "devices must be at least 1, got 0"),
        (Hardware(processes=2), "set coordinator to host:port"),
        (Hardware(coordinator="here", processes=2, process=0), "coordinator must be host:port, got 'here'"),
        (Hardware(coordinator="here:70000", processes=2, process=0), "coordinator must be host:port"),
        (Hardware(coordinator="here:7000"), "coordinator needs processes"),
        (Hardware(coordinator="here:7000", processes=2, process=2), "process must be 0 to 1, got 2"),
    ],
)
def test_wrong_hardware_is_one_clear_error(hardware: Hardware, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        hardware.start()
