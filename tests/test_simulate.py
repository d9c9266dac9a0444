"""The simulator against agents that are run one by one, and the five algorithms against each other."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from byzpg import Config, Run, train
from byzpg.algorithms import Agent, AgentState
from byzpg.config import Settings
from byzpg.simulate import ITERATIONS, LARGE, SKIP, SMALL, Metrics, Simulation
from byzpg.training import BLOCK

COMPILATION = "/jax/core/compile/backend_compile_duration"

TINY: dict[str, Any] = {
    "hidden": (4,),
    "horizon": 20,
    "large_batch": 6,
    "small_batch": 3,
    "switch_probability": 0.2,
    "num_seeds": 2,
    "trajectories": 60,
    "aggregator": "RFA",  # whose weights are known
    "rounds": 2,
    "step_size": 0.02,
}


@cache
def trained(**options: Any) -> Run:
    unused = {"PAGE-PG": {"aggregator", "rounds"}, "Dec-PAGE-PG": {"aggregator", "rounds"}, "ByzPG": {"rounds"}}
    left_out = unused.get(options.get("algorithm", "DecByzPG"), set())
    tiny = {name: value for name, value in TINY.items() if name not in left_out}
    return train(Config(**(tiny | options)))


def settings_of(**options: Any) -> Settings:
    return Config(**(TINY | options)).resolved()


def block(*batches: int) -> list[int]:
    """As long as those of training, so that its programs serve."""
    return [*batches, *[SKIP] * (BLOCK - len(batches))]


def assert_same_run(one: Run, other: Run) -> None:
    np.testing.assert_array_equal(one.returns, other.returns)
    for name in ("last", "uniform"):
        np.testing.assert_array_equal(one.parameters[name], other.parameters[name])


@partial(jax.jit, static_argnums=0)
def both_estimates(agent: Agent, state: AgentState, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of a large batch and of a small one."""

    def of_batch(large: bool) -> jax.Array:
        episodes = agent.play(state.parameters, key[None], large)
        return agent.estimate(state, episodes, large)[0][0]

    return of_batch(True), of_batch(False)


def one_by_one(settings: Settings, batches: list[int], seed: int) -> np.ndarray:
    """Agents run apart from each other, as peers would, with the messages of SignFlip handed over by hand: θ [K, d]."""
    federation = settings.federation()
    agent, everyone = federation.agent, range(settings.num_agents)
    liars = set(everyone[settings.num_agents - settings.num_byzantine :])
    root = jax.random.key(seed)
    initial = agent.policy.initial(jax.random.fold_in(root, 0))
    states = [agent.initial(initial[None]) for _ in everyone]

    def received_by(receiver: int, truths: list[np.ndarray], lying: bool) -> np.ndarray:
        rows = [-truth if lying and k in liars and k != receiver else truth for k, truth in enumerate(truths)]
        return np.stack(rows)

    for iteration, batch in enumerate(batches):
        now = jax.random.fold_in(jax.random.fold_in(root, ITERATIONS), iteration)
        truths = []
        for k in everyone:
            estimates = both_estimates(agent, states[k], jax.random.fold_in(now, k))
            truths.append(np.asarray(estimates[batch == SMALL]))
        before = [state.parameters for state in states]
        for k in everyone:
            aggregated = settings.aggregator(received_by(k, truths, True), num_byzantine=settings.num_declared)
            states[k] = agent.advance(states[k], jnp.asarray(truths[k])[None], aggregated[None])
        held = [np.asarray(state.parameters[0]) for state in states]
        for _ in range(settings.rounds):  # SignFlip leaves parameters alone
            rows = np.stack(held)
            held = [np.asarray(settings.agreement(rows, own=k, num_byzantine=settings.num_declared)) for k in everyone]
        states = [agent.settle(before[k], states[k], jnp.asarray(held[k])[None]) for k in everyone]
    return np.concatenate([state.parameters for state in states])


@pytest.mark.parametrize(
    ("memory", "options"),
    [
        ("paper", {"optimizer": "sgd"}),
        ("script", {"optimizer": "adam", "num_byzantine": 2, "num_declared": 1, "aggregator": "TrimmedMean"}),
    ],
)
def test_the_simulator_only_moves_messages(memory: str, options: dict[str, Any]) -> None:
    settings = settings_of(num_agents=5, attack="SignFlip", memory=memory, seed=3, **options)
    simulation = settings.simulation()
    batches = [LARGE, SMALL, SMALL, LARGE, SMALL]
    (state,), _ = simulation.run(simulation.start(), batches, 0)
    for index, seed in enumerate(simulation.seeds):
        expected = one_by_one(settings, batches, seed)
        np.testing.assert_allclose(state.agents.parameters[index], expected, atol=5e-4)  # RFA and v̂ amplify rounding
    if memory == "paper":
        realized = (state.agents.parameters - state.agents.previous) / settings.step_size
        np.testing.assert_array_equal(state.agents.direction, realized)  # v̂, to the bit
    assert np.max(np.abs(state.agents.parameters[0] - state.agents.parameters[1])) > 0.01


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


def test_the_server_samples_small_batches_alone() -> None:
    run = trained(algorithm="ByzPG", num_agents=5)
    steps, most = run.metrics["environment_steps"], TINY["horizon"]
    assert np.all(steps[:, run.large] > 5 * 6)
    assert np.all(steps[:, ~run.large] <= 3 * most)
    assert np.all(np.isnan(run.metrics["aggregation_error"][:, ~run.large]))
    assert np.all(run.metrics["aggregation_error"][:, run.large] >= 0)
    assert run.parameters["last"].shape[:2] == (2, 1)


def test_metrics_say_what_happened() -> None:
    run = trained(num_agents=5)
    metrics = run.metrics
    assert set(metrics) == set(Metrics.__dataclass_fields__)
    assert all(values.shape == (2, len(run.large)) for values in metrics.values())
    np.testing.assert_allclose(metrics["honest_weight"] + metrics["byzantine_weight"], 1, rtol=1e-5)
    assert np.all(metrics["byzantine_weight"] < 0.2), "less than the mean would give"
    for name, at_large in (("effective_sample", 1), ("largest_weight", 1), ("capped", 0)):
        np.testing.assert_array_equal(metrics[name][:, run.large], at_large)
    assert np.any(metrics["effective_sample"][:, ~run.large] < 1)
    assert np.all((metrics["return_mean"] >= 1) & (metrics["return_mean"] <= TINY["horizon"]))
    np.testing.assert_array_equal(run.trajectories, np.cumsum(np.where(run.large, 6, 3)))


def test_agreement_brings_agents_together_that_are_told_different_lies() -> None:
    """Under large noise, fresh for each receiver, agents drift apart without agreement."""
    agreed = trained(num_agents=5, attack="LargeNoise")
    apart = trained(num_agents=5, attack="LargeNoise", agreement="NoAgreement")
    spread = [np.ptp(run.parameters["last"][:, :4], axis=1).max() for run in (agreed, apart)]
    assert spread[0] < spread[1] / 2 or spread[0] < 1e-5
    before, after = agreed.metrics["diameter_before"], agreed.metrics["diameter_after"]
    assert np.all(after <= before)
    assert np.any(before > 0)


def test_liars_rotate_and_keep_honest_state() -> None:
    run = trained(num_agents=5, byzantine_set="RotatingSet")
    assert np.all(run.metrics["byzantine_weight"] < 0.2)
    np.testing.assert_allclose(np.ptp(run.parameters["last"], axis=1), 0, atol=1e-5)
    assert np.any(run.returns != trained(num_agents=5).returns)


def test_skipped_entries_change_nothing_and_one_program_serves_all_blocks() -> None:
    settings = settings_of(num_agents=5)
    simulation = settings.simulation()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    jax.jit(lambda: jnp.arange(3.0))()  # heard, whether or not a test before this one compiled the program
    whole, (metrics,) = simulation.run(simulation.start(), block(LARGE, SMALL, SMALL), 1)
    at_first = compiled.count(COMPILATION)
    states, (first,) = simulation.run(simulation.start(), block(LARGE), 1)
    at_output = np.array(states[0].agents.parameters)
    (state,), (second,) = simulation.run(states, block(SMALL, SMALL), 1)
    assert compiled.count(COMPILATION) == at_first > 0
    for left, right in zip(jax.tree.leaves(whole), jax.tree.leaves((state,)), strict=True):
        np.testing.assert_array_equal(left, right)
    assert int(state.iteration) == 3
    np.testing.assert_array_equal(metrics.return_mean[:, 0], first.return_mean[:, 0])
    np.testing.assert_array_equal(metrics.return_mean[:, 1:3], second.return_mean[:, :2])
    assert np.all(np.isnan(metrics.return_mean[:, 3:]))
    np.testing.assert_array_equal(state.output, at_output)  # θ_T̂ with T̂ = 1


# Two of them were trained alone by the tests above, so that their programs are there.
SIDE_BY_SIDE: list[dict[str, Any]] = [
    {"num_agents": 5, "attack": "RandomAction", "gate": 0.5, "step_size": 0.01},
    {"num_agents": 5, "num_byzantine": 2, "num_declared": 1, "attack": "RewardFlip"},
    {"algorithm": "ByzPG", "num_agents": 5, "attack": "AvgZero", "rounds": None},
    # Not AvgZero, which leaves a plain mean nothing but rounding for Adam to magnify.
    {
        "algorithm": "Dec-PAGE-PG",
        "num_agents": 3,
        "attack": "SignFlip",
        "num_byzantine": 1,
        "aggregator": None,
        "rounds": None,
    },
    {"algorithm": "PAGE-PG", "aggregator": None, "rounds": None},
]


def test_federations_side_by_side_do_what_each_does_alone() -> None:
    """Up to rounding, which a batch of another size may do otherwise."""
    settings = [settings_of(**options) for options in SIDE_BY_SIDE]
    together = Simulation(tuple(each.federation() for each in settings), settings[0].seeds)
    batches = block(LARGE, SMALL, LARGE, SMALL)
    states, metrics = together.run(together.start(), batches, 2)
    for each, state, found in zip(settings, states, metrics, strict=True):
        alone = each.simulation()
        (expected_state,), (expected,) = alone.run(alone.start(), batches, 2)
        for name, values in vars(expected).items():
            tolerance = 0.02 if "weight" in name else 1e-3  # RFA's weights magnify rounding most
            np.testing.assert_allclose(getattr(found, name), values, rtol=2e-3, atol=tolerance, err_msg=name)
        for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-3)  # RFA, again
    assert len({np.asarray(found.return_mean[:, 1:]).tobytes() for found in metrics}) == len(settings)


def test_agents_of_a_simulation_play_alike() -> None:
    ours, theirs = settings_of(num_agents=5), settings_of(num_agents=5, large_batch=7)
    with pytest.raises(ValueError, match="one pair of batch sizes"):
        Simulation((ours.federation(), theirs.federation()), (0,))


@pytest.mark.parametrize("algorithm", ["PAGE-PG", "Fed-PAGE-PG", "ByzPG", "Dec-PAGE-PG", "DecByzPG"])
def test_every_algorithm_learns(algorithm: str) -> None:
    """Honest agents, a short CartPole: from about 20 steps to most of 60."""
    learnt = train(
        Config(
            algorithm=algorithm,
            num_agents=1 if algorithm == "PAGE-PG" else 3,
            num_byzantine=0,
            horizon=60,
            hidden=(8,),
            large_batch=16,
            small_batch=8,
            switch_probability=0.2,
            step_size=0.05,
            num_seeds=2,
            trajectories=400,
        )
    )
    assert np.all(learnt.returns[:, 0] < 30)
    assert np.all(learnt.returns[:, -5:].mean(axis=1) > 48)
