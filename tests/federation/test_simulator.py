"""The simulator against agents that are run one by one, and the five algorithms against each other."""

from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from byzpg import Config, Run, train
from byzpg.config import Settings
from byzpg.envs import CartPole
from byzpg.federation import simulator
from byzpg.federation.agents import Agent, AgentState
from byzpg.federation.metrics import Metrics
from byzpg.federation.schedule import Paper, iteration_stream
from byzpg.federation.simulator import LARGE, SKIP, SMALL, Simulation, SimulationState
from byzpg.robust.aggregators import Aggregator
from byzpg.robust.agreement import Agreement
from byzpg.robust.attacks import Attack, Knowledge, MessageAttack, NoAttack
from byzpg.runs import RunDirectory
from byzpg.training import BLOCK, resume_all, simulation_of

COMPILATION = "/jax/core/compile/backend_compile_duration"

TINY: dict[str, Any] = {
    "hidden": (4,),
    "horizon": 20,
    "large_batch": 6,
    "small_batch": 3,
    "switch_probability": 0.2,
    "coins": "shared",  # so that training and BATCHES are one program
    "num_seeds": 2,
    "trajectories": 60,
    "aggregator": "RFA",  # whose weights are known
    "rounds": 2,
    "step_size": 0.02,
    "momentum": 0.0,
    "adam_epsilon": 1e-8,
}


def settings_of(**options: Any) -> Settings:
    return Config(**(TINY | options)).resolved()


# Of all of them one program, which most tests share; in the order in which `resume_all` puts them, so that it does too.
FEDERATIONS: dict[str, dict[str, Any]] = {
    "lone": {"algorithm": "PAGE-PG", "aggregator": None, "rounds": None},
    "averaging": {
        "algorithm": "Dec-PAGE-PG",
        "num_agents": 3,
        "attack": "RewardFlip",
        "num_byzantine": 1,
        "aggregator": None,
        "rounds": None,
    },
    "robust": {"num_agents": 5},
    "rotating": {"num_agents": 5, "byzantine_set": "RotatingSet"},
    "plain steps": {"num_agents": 5, "attack": "SignFlip", "optimizer": "sgd", "momentum": 0.6},
    "as published": {
        "num_agents": 5,
        "attack": "SignFlip",
        "conventions": "AuthorsScript(initialization=False, coin=False)",
        "num_attackers": 2,
        "num_byzantine": 1,
        "aggregator": "TrimmedMean",
    },
    "noisy": {"num_agents": 5, "attack": "LargeNoise"},
    "noisy, no agreement": {"num_agents": 5, "attack": "LargeNoise", "agreement": "NoAgreement"},
    "server": {"algorithm": "ByzPG", "num_agents": 5, "attack": "AvgZero", "rounds": None, "momentum": 0.3},
    "careful": {
        "num_agents": 5,
        "attack": "RandomAction",
        "gate": 0.5,
        "step_size": 0.01,
        "aggregator": "Remember(RFA(), exchanges=4, weight=5)",
    },
    "remembers": {"num_agents": 5, "attack": "LargeNoise", "aggregator": "Remember(RFA(), exchanges=2, weight=1)"},
}
BATCHES = [LARGE, SMALL, SMALL, LARGE, SMALL]


def all_federations() -> Simulation:
    settings = [settings_of(**options) for options in FEDERATIONS.values()]
    return Simulation(tuple(each.federation() for each in settings), settings[0].seeds)


def block(*batches: int) -> list[int]:
    """As long as those of training, so that its programs serve."""
    return [*batches, *[SKIP] * (BLOCK - len(batches))]


@pytest.fixture(scope="module")
def together() -> dict[str, tuple[SimulationState, Metrics]]:
    """After BATCHES, where each federation is and what it did."""
    simulation = all_federations()
    states, metrics = simulation.run(simulation.start(), block(*BATCHES), 2)
    return dict(zip(FEDERATIONS, zip(states, metrics, strict=True), strict=True))


@pytest.mark.slow
def test_a_program_of_large_batches_alone_gives_the_same() -> None:
    # A server aggregates only after large batches, so here the two programs differ most.
    simulation = simulation_of(settings_of(**FEDERATIONS["server"]))
    results = [
        simulation.run(simulation.start(), block(LARGE, SKIP, LARGE), 1, only_large=only_large)
        for only_large in (False, True)
    ]
    for either, other in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(either, other, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="only_large is for runs without small batches"):
        simulation.run(simulation.start(), [LARGE, SMALL, LARGE], 1, only_large=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The federations trained to their end."""
    return trained_together(
        tmp_path_factory.mktemp("runs"), {name: settings_of(**FEDERATIONS[name]) for name in FEDERATIONS}
    )


def trained_together(folder: Path, settings: dict[str, Settings]) -> dict[str, Run]:
    kept = {name: RunDirectory.create(folder / name, each, about={}) for name, each in settings.items()}
    resume_all([directory.path for directory in kept.values()])
    return {name: directory.read_results() for name, directory in kept.items()}


@cache
def trained(**options: Any) -> Run:
    unused = {"PAGE-PG": {"aggregator", "rounds"}, "Dec-PAGE-PG": {"aggregator", "rounds"}, "ByzPG": {"rounds"}}
    left_out = unused.get(options.get("algorithm", "DecByzPG"), set())
    tiny = {name: value for name, value in TINY.items() if name not in left_out}
    return train(Config(**(tiny | options)))


def assert_same_run(one: Run, other: Run) -> None:
    np.testing.assert_array_equal(one.returns, other.returns)
    for name in ("last", "uniform"):
        np.testing.assert_array_equal(one.parameters[name], other.parameters[name])


# One agent's part of an iteration, each with a program of its own


@partial(jax.jit, static_argnums=0)
def both_estimates(
    agent: Agent, parameters: jax.Array, previous: jax.Array, direction: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Of a large batch and of a small one."""
    state = AgentState(parameters, previous, direction, ())

    def of_batch(large: bool) -> jax.Array:
        points, keys = agent.request(state, None, key[None], large), key[None]
        return agent.digest(state, points, agent.play(points, keys, large), keys, large)[0][0]

    return of_batch(True), of_batch(False)


@partial(jax.jit, static_argnums=(0, 1, 2))
def advanced(
    agent: Agent, aggregator: Aggregator, num_byzantine: int, state: AgentState, own: jax.Array, received: jax.Array
) -> AgentState:
    aggregated = aggregator(received, num_byzantine=num_byzantine)
    return agent.advance(state, own[None], aggregated[None], True)


@partial(jax.jit, static_argnums=(0, 1))
def agreed(agreement: Agreement, num_byzantine: int, received: jax.Array, own: int) -> jax.Array:
    return agreement(received, own=own, num_byzantine=num_byzantine)


@partial(jax.jit, static_argnums=0)
def settled(agent: Agent, before: jax.Array, state: AgentState, held: jax.Array) -> AgentState:
    return agent.settle(before, state, held[None])


@partial(jax.jit, static_argnums=0)
def start_of(agent: Agent, root: jax.Array) -> AgentState:
    return agent.initial(agent.policy.initial(jax.random.fold_in(root, 0))[None])


@jax.jit
def key_of(root: jax.Array, iteration: int, stream: int) -> jax.Array:
    return iteration_stream(root, iteration, stream)


def one_by_one(settings: Settings, batches: list[int], seed: int) -> np.ndarray:
    """Agents run apart from each other, as peers would, with the messages of SignFlip handed over by hand: θ [K, d]."""
    agent, everyone, num_byzantine = settings.federation().agent, range(settings.num_agents), settings.num_byzantine
    # Estimates depend on neither, so that the programs of two kinds of agents are one.
    estimating = replace(agent, conventions=Paper(), optimizer="sgd")
    attackers = set(everyone[settings.num_agents - settings.num_attackers :])
    root = jax.random.key(seed)
    states = [start_of(agent, root) for _ in everyone]
    memories = [np.zeros(states[0].parameters.shape[1]) for _ in everyone]

    def received_by(receiver: int, truths: list[np.ndarray], lying: bool) -> np.ndarray:
        rows = [-truth if lying and k in attackers and k != receiver else truth for k, truth in enumerate(truths)]
        return np.stack(rows)

    for iteration, batch in enumerate(batches):
        truths = []
        for k, state in enumerate(states):
            key = key_of(root, iteration, k)
            estimates = both_estimates(estimating, state.parameters, state.previous, state.direction, key)
            memories[k] = settings.momentum * memories[k] + (1 - settings.momentum) * estimates[batch == SMALL]
            truths.append(np.asarray(memories[k] / (1 - settings.momentum ** (iteration + 1)), np.float32))
        before = [state.parameters for state in states]
        for k in everyone:
            received = received_by(k, truths, True)
            states[k] = advanced(agent, settings.aggregator, num_byzantine, states[k], truths[k], received)
        held = [np.asarray(state.parameters[0]) for state in states]
        for _ in range(settings.rounds):  # SignFlip leaves parameters alone
            rows = np.stack(held)
            held = [np.asarray(agreed(settings.agreement, num_byzantine, rows, k)) for k in everyone]
        states = [settled(agent, before[k], states[k], held[k]) for k in everyone]
    return np.concatenate([state.parameters for state in states])


def assert_only_messages_move(settings: Settings, state: SimulationState) -> None:
    for index, seed in enumerate(settings.seeds):
        expected = one_by_one(settings, BATCHES, seed)
        np.testing.assert_allclose(state.agents.parameters[index], expected, atol=5e-4)  # RFA and v̂ amplify rounding
    assert np.max(np.abs(state.agents.parameters[0] - state.agents.parameters[1])) > 0.01


def test_the_simulator_only_moves_messages(together: dict[str, tuple[SimulationState, Metrics]]) -> None:
    settings, (state, _) = settings_of(**FEDERATIONS["plain steps"]), together["plain steps"]
    assert_only_messages_move(settings, state)
    realized = (state.agents.parameters - state.agents.previous) / settings.step_size
    np.testing.assert_array_equal(state.agents.direction, realized)  # v̂, to the bit


def test_the_simulator_only_moves_messages_as_published(
    together: dict[str, tuple[SimulationState, Metrics]],
) -> None:
    assert_only_messages_move(settings_of(**FEDERATIONS["as published"]), together["as published"][0])


@pytest.mark.slow
def test_a_lone_agent_learns_the_same_with_every_algorithm_to_the_bit() -> None:
    alone = trained(algorithm="PAGE-PG")
    assert_same_run(alone, trained(algorithm="DecByzPG", num_agents=1))
    assert_same_run(alone, trained(algorithm="ByzPG", num_agents=1))
    with_sgd: dict[str, Any] = {"num_agents": 1, "optimizer": "sgd"}  # whose v̂ is a quotient where agents agree
    assert_same_run(trained(algorithm="ByzPG", **with_sgd), trained(algorithm="DecByzPG", **with_sgd))


@pytest.mark.slow
def test_without_robustness_and_agreement_decbyzpg_is_dec_page_pg_to_the_bit() -> None:
    bare = trained(num_agents=5, aggregator="Mean", agreement="NoAgreement")
    plain = trained(algorithm="Dec-PAGE-PG", num_agents=5)
    assert_same_run(bare, plain)
    for name in ("aggregation_error", "byzantine_weight", "environment_steps"):
        np.testing.assert_array_equal(bare.metrics[name], plain.metrics[name])
    assert np.any(plain.returns != trained(num_agents=5).returns), "robustness changes the run"


def test_the_server_samples_small_batches_alone(runs: dict[str, Run]) -> None:
    run = runs["server"]
    steps, most = run.metrics["environment_steps"], TINY["horizon"]
    assert np.all(steps[run.large] > 5 * 6)
    assert np.all(steps[~run.large] <= 3 * most)
    assert np.all(np.isnan(run.metrics["aggregation_error"][~run.large]))
    assert np.all(run.metrics["aggregation_error"][run.large] >= 0)
    assert run.parameters["last"].shape[:2] == (2, 1)


def test_metrics_say_what_happened(runs: dict[str, Run]) -> None:
    run = runs["robust"]
    metrics = run.metrics
    assert set(metrics) == set(Metrics.__dataclass_fields__)
    assert all(values.shape == run.large.shape == run.trajectories.shape for values in metrics.values())
    np.testing.assert_allclose(metrics["honest_weight"] + metrics["byzantine_weight"], 1, rtol=1e-5)
    assert np.all(metrics["byzantine_weight"] < 0.2), "less than the mean would give"
    for name, at_large in (("effective_sample", 1), ("largest_weight", 1), ("capped", 0)):
        np.testing.assert_array_equal(metrics[name][run.large], at_large)
    assert np.any(metrics["effective_sample"][~run.large] < 1)
    assert np.all((metrics["return_mean"] >= 1) & (metrics["return_mean"] <= TINY["horizon"]))
    np.testing.assert_array_equal(run.trajectories, np.cumsum(np.where(run.large, 6, 3), axis=1))


def test_agreement_brings_agents_together_that_are_told_different_lies(runs: dict[str, Run]) -> None:
    """Under large noise, fresh for each receiver, agents drift apart without agreement."""
    agreeing, apart = runs["noisy"], runs["noisy, no agreement"]
    spread = [np.ptp(run.parameters["last"][:, :4], axis=1).max() for run in (agreeing, apart)]
    assert spread[0] < spread[1] / 2 or spread[0] < 1e-5
    before, after = agreeing.metrics["diameter_before"], agreeing.metrics["diameter_after"]
    assert np.all(after <= before)
    assert np.any(before > 0)


def test_liars_rotate_and_keep_honest_state(runs: dict[str, Run]) -> None:
    run = runs["rotating"]
    assert np.all(run.metrics["byzantine_weight"] < 0.2)
    np.testing.assert_allclose(np.ptp(run.parameters["last"], axis=1), 0, atol=1e-5)
    assert np.any(run.returns != runs["robust"].returns)


def test_skipped_entries_change_nothing_and_one_program_serves_all_blocks() -> None:
    simulation = all_federations()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    jax.jit(lambda: jnp.arange(3.0))()  # heard, whether or not a test before this one compiled the program
    whole, metrics = simulation.run(simulation.start(), block(LARGE, SMALL, SMALL), 1)
    at_first = compiled.count(COMPILATION)
    states, first = simulation.run(simulation.start(), block(LARGE), 1)
    at_output = [np.array(state.agents.parameters) for state in states]
    states, second = simulation.run(states, block(SMALL, SMALL), 1)
    assert compiled.count(COMPILATION) == at_first > 0
    for left, right in zip(jax.tree.leaves(whole), jax.tree.leaves(states), strict=True):
        np.testing.assert_array_equal(left, right)
    for index, state in enumerate(states):
        np.testing.assert_array_equal(state.iteration, [3, 3])
        returns = [np.asarray(each[index].return_mean) for each in (metrics, first, second)]
        np.testing.assert_array_equal(returns[0][:, 0], returns[1][:, 0])
        np.testing.assert_array_equal(returns[0][:, 1:3], returns[2][:, :2])
        assert np.all(np.isnan(returns[0][:, 3:]))
        np.testing.assert_array_equal(state.output, at_output[index])  # θ_T̂ with T̂ = 1


@pytest.mark.slow
def test_federations_side_by_side_do_what_each_does_alone(
    together: dict[str, tuple[SimulationState, Metrics]],
) -> None:
    """Up to rounding, which a batch of another size may do otherwise.

    One of each algorithm: they differ in number, in how they estimate, and in how attackers play or what they send.
    """
    names = ["lone", "averaging", "server", "careful"]
    for name in names:
        state, found = together[name]
        alone = simulation_of(settings_of(**FEDERATIONS[name]))
        (expected_state,), (expected,) = alone.run(alone.start(), block(*BATCHES), 2)
        for metric, values in vars(expected).items():
            tolerance = 0.02 if "weight" in metric else 1e-3  # RFA's weights magnify rounding most
            np.testing.assert_allclose(getattr(found, metric), values, rtol=2e-3, atol=tolerance, err_msg=metric)
        for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-3)  # RFA, again
    returns = {np.asarray(together[name][1].return_mean[:, 1:]).tobytes() for name in names}
    assert len(returns) == len(names)


# Coins


def assert_alike(one: Run, seed: int, other: Run, other_seed: int) -> None:
    """Seeds of two runs do the same, up to rounding."""
    num_iterations = one.num_iterations[seed]
    assert num_iterations == other.num_iterations[other_seed]
    assert one.output_iteration[seed] == other.output_iteration[other_seed]
    for values, others in ((one.trajectories, other.trajectories), (one.large, other.large)):
        np.testing.assert_array_equal(values[seed, :num_iterations], others[other_seed, :num_iterations])
    assert set(one.metrics) == set(other.metrics)
    for name, values in one.metrics.items():
        tolerance = 0.02 if "weight" in name else 2e-3  # RFA's weights magnify rounding most
        np.testing.assert_allclose(
            values[seed, :num_iterations],
            other.metrics[name][other_seed, :num_iterations],
            rtol=2e-3,
            atol=tolerance,
            err_msg=name,
        )
    for name, values in one.parameters.items():
        np.testing.assert_allclose(values[seed], other.parameters[name][other_seed], atol=2e-3, err_msg=name)


@pytest.mark.slow
def test_a_seed_does_the_same_alone_as_among_others_and_a_federation_too(tmp_path: Path) -> None:
    """Every seed has its own coin: it waits for the others without doing anything, and ends when its own plan ends.

    The attackers, their noise, play and Adam all depend on the iteration, which differs between seeds.
    """
    rotating: dict[str, Any] = {"num_agents": 5, "byzantine_set": "RotatingSet", "attack": "LargeNoise"}
    options: dict[str, Any] = {"coins": "per-seed", "num_seeds": 3, "trajectories": 40}
    settings = {name: settings_of(**options, **each) for name, each in (("a", rotating), ("b", FEDERATIONS["server"]))}
    together = trained_together(tmp_path / "together", settings)
    run = together["a"]
    assert len({each.tobytes() for each in run.large}) == 3, "the seeds toss different coins"
    assert len(set(run.num_iterations)) > 1
    assert len(set(run.output_iteration)) > 1
    beyond = np.arange(run.returns.shape[1]) >= run.num_iterations[:, None]
    assert all(np.all(np.isnan(values[beyond])) for values in run.metrics.values())
    np.testing.assert_array_equal(together["b"].large, run.large)  # the same seeds, so the same coins
    config = Config(**(TINY | options | rotating))
    alone = train(config)
    for seed in range(3):
        assert_alike(run, seed, alone, seed)
        assert_alike(alone, seed, train(replace(config, seed=seed, num_seeds=1)), 0)
    # With the shared coin, only the first seed does what it does alone.
    shared = settings_of(**options | rotating | {"coins": "shared"})
    timetable = shared.schedule().timetable(simulation_of(shared).initial_parameters())
    assert timetable.in_step
    np.testing.assert_array_equal(timetable.large, run.large[0, : run.num_iterations[0]])
    assert not np.array_equal(timetable.plans[1].large, run.large[1, : run.num_iterations[1]])


@pytest.mark.parametrize("byzantine_set", ["FixedSet", "RotatingSet"])
def test_honest_agents_remember_the_same_only_if_the_same_agents_attack(byzantine_set: str) -> None:
    """An agent that attacks holds its own vector, and remembers it when others attack."""
    options = {"num_agents": 5, "attack": "SignFlip", "aggregator": "Remember(RFA(), exchanges=2, weight=1)"}
    simulation = simulation_of(settings_of(**options, byzantine_set=byzantine_set))
    (state,), _ = simulation.run(simulation.start(), block(LARGE, LARGE, LARGE), 0)
    (remembered,) = state.received
    first, *others = np.asarray(remembered.messages[0, :4])
    assert all(np.array_equal(first, each) for each in others) == (byzantine_set == "FixedSet")


@dataclass(frozen=True)
class Sleeper(MessageAttack):
    """An attack of a user's own, which depends on the iteration."""

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        return jnp.where(knowledge.iteration >= 2, -5 * knowledge.truth(), knowledge.truth())


def test_an_attack_knows_the_iteration_of_its_seed() -> None:
    """The first seed is in iteration 1, and the second in iteration 2, where the attack begins."""
    federation = settings_of(
        algorithm="ByzPG", num_agents=5, rounds=None, aggregator="Mean", attack="Zero"
    ).federation()
    takes_part = np.array([[True, False, True], [True, True, True]])
    found = []
    for attack in (Sleeper(), NoAttack()):
        simulation = Simulation((replace(federation, attack=attack),), (3, 4))
        states, _ = simulation.run(simulation.start(), [LARGE] * 3, 0, takes_part=takes_part, only_large=True)
        found.append(np.asarray(states[0].agents.direction))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert np.max(np.abs(found[0][1] - found[1][1])) > 0.01


# Each of them in numbers alone, but in all numbers there are.
IN_NUMBERS: list[dict[str, Any]] = [
    {
        "attack": f"IPM(epsilon={epsilon})",
        "aggregator": f"Clipping(RFA(smoothing={smoothing}), threshold={threshold})",
        "step_size": step_size,
        "discount": discount,
        "gate": gate,
        "importance": f"ImportanceWeights(cap={cap}, floor={floor})",
        "estimator": f"GPOMDP(baseline='leave-one-out', trace_decay={trace})",
    }
    for epsilon, smoothing, threshold, step_size, discount, gate, cap, floor, trace in (
        (0.5, 1e-6, 3.0, 0.1, 0.99, 1.0, 2.0, 1e-9, 1.0),
        (-2.0, 1e-2, 0.5, 0.3, 0.9, 0.3, 1.01, 1e-5, 0.6),
        (0.1, 1e-1, 9.0, 0.01, 0.5, 0.7, 5.0, 1e-2, 0.9),
    )
]


# Alone, or beside two of its kind, which is the program of all three again.
@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "num_alike"), [("sgd", 3), ("adam", 1)])
def test_federations_that_differ_in_numbers_are_one_program(optimizer: str, num_alike: int) -> None:
    def end_of(settings: Settings) -> tuple[SimulationState, Metrics]:
        simulation = simulation_of(*[settings] * num_alike)
        states, metrics = simulation.run(simulation.start(), block(*BATCHES), 2)
        return states[0], metrics[0]

    settings = [settings_of(num_agents=5, optimizer=optimizer, **options) for options in IN_NUMBERS]
    joint = simulation_of(*settings)
    program: Any = simulator._run_block
    before = program._cache_size()
    states, metrics = joint.run(joint.start(), block(*BATCHES), 2)
    assert program._cache_size() == before + 1
    num_programs = before + (2 if num_alike == 1 else 1)  # the same for each of them
    for each, state, found in zip(settings, states, metrics, strict=True):
        expected_state, expected = end_of(each)
        for name, values in vars(expected).items():
            np.testing.assert_allclose(getattr(found, name), values, rtol=2e-3, atol=1e-3, err_msg=name)
        for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-3)
    assert program._cache_size() == num_programs
    # Every number counts: one of them changed is another run.
    for option, value in IN_NUMBERS[1].items():
        state, _ = end_of(settings_of(num_agents=5, optimizer=optimizer, **IN_NUMBERS[0] | {option: value}))
        assert np.abs(np.asarray(state.agents.parameters - states[0].agents.parameters)).max() > 1e-5, option
    assert program._cache_size() == num_programs


@pytest.mark.slow
def test_attackers_play_as_their_federation_says() -> None:
    """Rows of one table, whose attackers play differently."""
    server = {"algorithm": "ByzPG", "num_agents": 5, "rounds": None, "aggregator": "Median"}
    settings = [settings_of(**server, attack=attack) for attack in ("RandomAction", "RewardFlip")]
    both = simulation_of(*settings)
    states, _ = both.run(both.start(), [LARGE], 0, only_large=True)
    for each, state in zip(settings, states, strict=True):
        alone = simulation_of(each)
        (expected,), _ = alone.run(alone.start(), [LARGE], 0, only_large=True)
        np.testing.assert_allclose(state.agents.direction, expected.agents.direction, atol=1e-5)


@dataclass(frozen=True)
class ScaledReward(Attack):
    """An attack of a user's own on play, which names a number."""

    poisons_play: ClassVar[bool] = True
    numbers: ClassVar[tuple[str, ...]] = ("factor",)
    factor: float = 1.0

    def record(self, reward: Array, key: Array) -> Array:
        return self.factor * reward


def test_an_attack_on_play_may_name_numbers() -> None:
    federation = settings_of(algorithm="ByzPG", num_agents=5, rounds=None, aggregator="Mean").federation()
    factors = 1.0, 5.0, -15.0
    simulation = Simulation(tuple(replace(federation, attack=ScaledReward(factor=each)) for each in factors), (3,))
    states, _ = simulation.run(simulation.start(), [LARGE], 0, only_large=True)
    directions = [np.asarray(state.agents.direction) for state in states]
    # The gradient is linear in the rewards of the one attacker.
    np.testing.assert_allclose(directions[2] - directions[0], -4 * (directions[1] - directions[0]), atol=1e-4)
    assert np.abs(directions[1] - directions[0]).max() > 0.01


OTHER_PLAY: list[dict[str, Any]] = [
    {"large_batch": 7},
    {"small_batch": 5},
    {"horizon": 21},
    {"hidden": (5,)},
    {"env": "Pendulum-v1"},
    {"conventions": "AuthorsScript(memory=False, coin=False)"},
    {"conventions": "AuthorsScript(memory=False, initialization=False)"},
]


@pytest.mark.parametrize("other", OTHER_PLAY, ids=str)
def test_agents_of_a_simulation_play_alike(other: dict[str, Any]) -> None:
    ours, theirs = settings_of(num_agents=5), settings_of(num_agents=5, **other)
    with pytest.raises(ValueError, match="must have the same task, policy, horizon, batch sizes, θ_0 and coin"):
        Simulation((ours.federation(), theirs.federation()), ours.seeds)


ALL_ALGORITHMS = ["PAGE-PG", "Fed-PAGE-PG", "ByzPG", "Dec-PAGE-PG", "DecByzPG"]


@pytest.fixture(scope="module")
def learners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Honest agents, a short CartPole."""
    settings = {
        algorithm: Config(
            algorithm=algorithm,
            num_agents=1 if algorithm == "PAGE-PG" else 3,
            num_byzantine=0,
            horizon=60,
            hidden=(8,),
            large_batch=16,
            small_batch=8,
            switch_probability=0.2,
            coins="shared",
            step_size=0.05,
            num_seeds=2,
            trajectories=400,
        ).resolved()
        for algorithm in ALL_ALGORITHMS
    }
    return trained_together(tmp_path_factory.mktemp("learners"), settings)


@pytest.mark.parametrize("algorithm", ALL_ALGORITHMS)
def test_every_algorithm_learns(algorithm: str, learners: dict[str, Run]) -> None:
    """From about 20 steps to most of 60."""
    learnt = learners[algorithm]
    assert np.all(learnt.returns[:, 0] < 30)
    assert np.all(learnt.returns[:, -5:].mean(axis=1) > 48)


@pytest.mark.slow
def test_the_exact_gradient_is_that_before_the_step_over_honest_agents() -> None:
    """Without agreement, agents drift apart under an attack that tells them different things."""
    settings = Config(
        env="AliasedStates-v1",
        preset="paper",
        num_agents=4,
        num_byzantine=0,
        num_attackers=1,
        attack="Equivocate",
        rounds=0,
        num_seeds=2,
        hidden=(),
        optimizer="sgd",
        step_size=1.0,
        switch_probability=1.0,
        large_batch=2,
    ).resolved()
    simulation = simulation_of(settings)
    agent, states, seen, parameters = settings.federation().agent, simulation.start(), [], np.zeros(0)
    exactly = jax.jit(agent.gradient_squared)
    for _ in range(2):
        parameters = np.asarray(states[0].agents.parameters)  # [seed, agent, d]
        states, (metrics,) = simulation.run(states, [LARGE], 0, only_large=True)
        exact = np.stack([exactly(each) for each in parameters])
        np.testing.assert_allclose(metrics.gradient_squared[:, 0], np.mean(exact[:, :3], axis=1), rtol=1e-5)
        seen.append(exact)
    assert np.ptp(seen[1][0]) > 1e-4  # the agents differ, so that the attacker, the last one, could be told from them
    assert abs(np.mean(seen[1][0]) - np.mean(seen[1][0, :3])) > 1e-5
    assert np.all(np.isnan(replace(agent, env=CartPole()).gradient_squared(parameters[0])))
