"""Agents with a critic: one update by hand, several exchanges per iteration, and federations of such agents."""

import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from shutil import copytree
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import slow_except

from byzpg import Config, load, resume, train
from byzpg.federation.agents import AgentState
from byzpg.federation.algorithms import Federation
from byzpg.federation.members import Peer, Worker, _aggregate, seeded_key
from byzpg.federation.ppo import Batch, Memory, Played, PPOAgent
from byzpg.federation.schedule import ITERATIONS, block_key, exchange_key, play_stream, round_stream, stream_key
from byzpg.federation.simulator import LARGE, SimulationState
from byzpg.learning.advantages import PPO, Steps
from byzpg.learning.policies import MLP, CriticMLP
from byzpg.robust.attacks import Knowledge, LargeNoise
from byzpg.robust.components import with_numbers, without_numbers
from byzpg.robust.exchange import attack_key
from byzpg.runs import Run, RunDirectory
from byzpg.training import Progress, resume_all, simulation_of, train_all

TINY: dict[str, Any] = {
    "algorithm": "DecByzPPO",
    "num_agents": 5,
    "num_byzantine": 1,
    "attack": "SignFlip",
    "aggregator": "TrimmedMean",
    "rounds": 1,
    "hidden": (6,),
    "horizon": 30,
    "optimizer": "adam",
    "decay": 0.0,
    "step_size": 0.01,
    "discount": 0.99,  # one agent alone has another preset
    "momentum": 0.0,
    "num_seeds": 2,
    "steps": 96,
    "ppo": "PPO(environments=2, segment=8, epochs=2, minibatches=2, entropy=0.01)",
}
NORMALIZED = "PPO(environments=2, segment=8, epochs=2, minibatches=2, entropy=0.01, normalize_observations=True)"
SERVED: dict[str, Any] = TINY | {"algorithm": "ByzPPO", "rounds": None}
PLAIN: dict[str, Any] = TINY | {"algorithm": "Dec-PPO", "aggregator": None, "rounds": None, "num_byzantine": 0}
ALONE: dict[str, Any] = PLAIN | {"algorithm": "PPO", "num_agents": 1}


@cache
def agent_of(**options: Any) -> PPOAgent:
    agent = Config(**(TINY | options)).resolved().federation().agent
    assert isinstance(agent, PPOAgent)
    return agent


@cache
def trained(**options: Any) -> Run:
    return train(Config(**options))


@partial(jax.jit, static_argnames="agent")
def sent(agent: PPOAgent, state: AgentState, memory: Memory, batch: Batch, exchange: int) -> tuple[Memory, jax.Array]:
    return agent.message(state, memory, batch, exchange)


@partial(jax.jit, static_argnames="agent")
def advanced(agent: PPOAgent, state: AgentState, own: jax.Array, aggregated: jax.Array) -> AgentState:
    return agent.advance(state, own, aggregated, True)


@partial(jax.jit, static_argnames="agent")
def digested(agent: PPOAgent, state: AgentState, memory: Memory, keys: jax.Array) -> tuple[Played, Batch]:
    request = agent.request(state, memory, keys, large=True)
    played = agent.play(request, keys, large=True)
    return played, agent.digest(state, request, played, keys, large=True)[0]


@partial(jax.jit, static_argnames=("agent", "num_agents"))
def a_batch(agent: PPOAgent, num_agents: int) -> tuple[AgentState, Memory, Played, Batch]:
    """What agents learn from in iteration 0, with parameters that differ."""
    keys = jax.random.split(jax.random.key(3), num_agents)
    state = agent.initial(jax.vmap(agent.initial_parameters)(keys))
    memory = agent.initial_memory(state.parameters)
    return state, memory, *digested(agent, state, memory, keys)


def steps_of(batch: Batch, agent: int) -> Steps:
    """The steps of one agent [step, ...]."""
    return jax.tree.map(lambda leaf: leaf[agent].reshape(-1, *leaf.shape[3:]), batch.steps)


# One agent


@partial(jax.jit, static_argnames="agent")
def by_hand(agent: PPOAgent, parameters: jax.Array, steps: Steps) -> jax.Array:
    """The gradient of one update, written down once more, with JAX for the derivative alone."""
    size, options = agent.policy.dimension, agent.ppo

    def loss(parameters: jax.Array) -> jax.Array:
        weights = agent.policy.unflatten(parameters[:size])
        scores = agent.policy.outputs(weights, steps.observations)
        shares = jax.nn.softmax(scores)
        chosen = jnp.take_along_axis(shares, steps.actions[:, None], axis=1)[:, 0]
        ratio = chosen / jnp.exp(steps.log_probabilities)
        bounded = jnp.maximum(jnp.minimum(ratio, 1 + options.clip), 1 - options.clip)
        gain = (
            jnp.where(steps.advantages > 0, jnp.minimum(ratio, bounded), jnp.maximum(ratio, bounded)) * steps.advantages
        )
        assert isinstance(agent.policy, MLP)
        critic = CriticMLP(agent.policy.observation_size, agent.policy.hidden, agent.policy.activation)
        values = critic.outputs(critic.unflatten(parameters[size:]), steps.observations)[:, 0]
        entropy = -jnp.sum(shares * jnp.log(shares), axis=1)
        return (
            -jnp.mean(gain)
            + options.value / 2 * jnp.mean((values - steps.targets) ** 2)
            - options.entropy * (jnp.mean(entropy))
        )

    gradient = -jax.grad(loss)(parameters)
    parts = gradient[:size], gradient[size:]
    return jnp.concatenate([part * jnp.minimum(1, options.largest_norm / jnp.linalg.norm(part)) for part in parts])


@pytest.mark.slow
def test_the_minibatches_of_an_epoch_are_all_steps_once_and_another_epoch_divides_them_otherwise() -> None:
    agent = agent_of(ppo="PPO(environments=2, segment=8, epochs=2, minibatches=2, entropy=0.01, largest_norm=1e9)")
    state, memory, _, batch = a_batch(agent, 2)
    messages = np.stack([sent(agent, state, memory, batch, update)[1] for update in range(4)])  # [update, agent, d]
    for k in range(2):
        whole = by_hand(agent, state.parameters[k], steps_of(batch, k))
        for epoch in (0, 2):
            np.testing.assert_allclose(np.mean(messages[epoch : epoch + 2, k], axis=0), whole, rtol=1e-3, atol=1e-4)
        assert not np.allclose(messages[0, k], messages[2, k], rtol=1e-2)


def test_one_update_is_that_of_a_reference_by_hand() -> None:
    agent = agent_of(ppo="PPO(environments=2, segment=8, epochs=2, minibatches=1, entropy=0.01, largest_norm=0.1)")
    state, memory, _, batch = a_batch(agent, 2)
    _, message = sent(agent, state, memory, batch, 0)
    expected = [by_hand(agent, state.parameters[k], steps_of(batch, k)) for k in range(2)]
    np.testing.assert_allclose(message, np.stack(expected), rtol=1e-4, atol=1e-5)
    for k, part in ((0, slice(None, agent.policy.dimension)), (1, slice(agent.policy.dimension, None))):
        np.testing.assert_allclose(np.linalg.norm(message[k, part]), 0.1, rtol=1e-4)
    stepped = agent.advance(state, message, message, True)
    adam = optax.adam(0.01, eps=1e-5)
    updates, _ = adam.update(-message[0], adam.init(state.parameters[0]))
    np.testing.assert_allclose(stepped.parameters[0], state.parameters[0] + jnp.asarray(updates), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_every_agent_may_have_a_largest_divergence_of_its_own() -> None:
    """As those of federations that differ in it, and share a program."""
    ppo = "PPO(environments=2, segment=8, minibatches=1, largest_norm=1e9, largest_kl={})"
    agents = [agent_of(ppo=ppo.format(limit)) for limit in (1e-3, 9.0)]
    state, memory, _, batch = a_batch(agents[0], 2)
    moved = replace(
        state, parameters=state.parameters + 0.3 * jax.random.normal(jax.random.key(4), state.parameters.shape)
    )
    code, numbers = without_numbers(agents[0])
    assert code == without_numbers(agents[1])[0]
    both = with_numbers(code, [jnp.asarray(each) for each in zip(numbers, without_numbers(agents[1])[1], strict=True)])
    found = jax.jit(lambda state: both.message(state, memory, batch, 0)[1])(moved)
    near, far = (sent(agent, moved, memory, batch, 0)[1] for agent in agents)
    np.testing.assert_allclose(found, jnp.stack([near[0], far[1]]), rtol=1e-4, atol=1e-6)
    assert not np.allclose(near[1], far[1], atol=1e-2)


def test_advantages_and_targets_are_those_of_the_critic_that_played() -> None:
    agent = agent_of(ppo="PPO(environments=2, segment=8, epochs=2, minibatches=1, gae_lambda=0.0, reward_scale=0.5)")
    state, _, played, batch = a_batch(agent, 2)
    critic = agent.critic
    for k in range(2):
        weights = critic.unflatten(state.parameters[k, agent.policy.dimension :])
        following = critic.values(weights, played.segment.following[k])
        targets = 0.5 * played.segment.rewards[k] + agent.discount * np.where(
            played.segment.terminated[k], 0, following
        )
        np.testing.assert_allclose(batch.steps.targets[k], targets, rtol=1e-5, atol=1e-5)
        errors = np.asarray(targets - critic.values(weights, played.segment.observations[k]))
        np.testing.assert_allclose(
            batch.steps.advantages[k], (errors - errors.mean()) / errors.std(), rtol=1e-3, atol=1e-3
        )


def test_agents_that_step_alone_send_how_far_that_led() -> None:
    every = agent_of(ppo="PPO(environments=2, segment=8, epochs=2, minibatches=2, entropy=0.01, exchange_every=4)")
    single = agent_of()
    state, memory, _, batch = a_batch(every, 2)
    kept, change = sent(every, state, memory, batch, 0)
    alone, of_one = single.initial(state.parameters), single.initial_memory(state.parameters)
    for update in range(4):
        of_one, gradient = sent(single, alone, of_one, batch, update)
        alone = advanced(single, alone, gradient, gradient)
    np.testing.assert_allclose(change, alone.parameters - state.parameters, rtol=1e-4, atol=1e-6)
    for one, other in zip(jax.tree.leaves(kept.optimizer), jax.tree.leaves(alone.optimizer), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    moved = every.advance(state, change, 2 * change, True)
    np.testing.assert_allclose(moved.parameters, state.parameters + 2 * change, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
def test_histories_last_from_one_message_to_the_next(every: int) -> None:
    """m_t/(1 − β^t) by hand, of the gradients that an agent without momentum would send or take a step along."""
    options = f"PPO(environments=2, segment=8, epochs=2, minibatches=2, exchange_every={every}, entropy=0.01)"
    agent, plain = agent_of(momentum=0.7, ppo=options), agent_of(ppo=TINY["ppo"], momentum=0.7)
    state, memory, _, batch = a_batch(agent, 2)
    blank = plain.initial_memory(state.parameters)  # of an agent that has sent nothing, whose message is its gradient
    alone, mean = replace(state, optimizer=memory.optimizer) if every > 1 else state, 0.0
    for exchange in range(2):
        memory, message = sent(agent, state, memory, batch, exchange)
        for update in range(every):
            number = exchange * every + update
            at = alone if every > 1 else state
            _, gradient = sent(plain, at, blank, batch, number)
            mean = 0.7 * mean + 0.3 * np.asarray(gradient)
            if every > 1:
                corrected = jnp.asarray(mean / (1 - 0.7 ** (number + 1)))
                alone = advanced(plain, alone, corrected, corrected)
        if every == 1:
            np.testing.assert_allclose(message, mean / (1 - 0.7 ** (exchange + 1)), rtol=1e-3, atol=1e-5)
        else:
            np.testing.assert_allclose(message, alone.parameters - state.parameters, rtol=1e-3, atol=1e-5)
            alone = replace(alone, parameters=state.parameters)  # the message was not aggregated: back to θ_t


def test_environments_go_on_in_the_next_iteration() -> None:
    agent = agent_of()
    state, memory, played, batch = a_batch(agent, 2)
    memory, _ = sent(agent, state, memory, batch, 0)
    following, _ = digested(agent, state, memory, jax.random.split(jax.random.key(4), 2))
    goes_on = ~np.asarray(played.segment.ended[:, :, -1])
    assert np.any(goes_on)
    np.testing.assert_array_equal(
        np.asarray(following.segment.observations[:, :, 0])[goes_on],
        np.asarray(played.segment.following[:, :, -1])[goes_on],
    )


def test_the_first_policy_is_almost_uniform_and_agents_start_alike() -> None:
    agent = agent_of()
    parameters = agent.initial_parameters(jax.random.key(1))
    assert parameters.shape == (agent.dimension,) == (sum(agent.blocks),)
    weights = agent.policy.unflatten(parameters[: agent.policy.dimension])
    shares = jax.nn.softmax(agent.policy.outputs(weights, jax.random.normal(jax.random.key(2), (50, 4))))
    np.testing.assert_allclose(shares, 0.5, atol=0.02)


@pytest.mark.parametrize("segment", [8, 24, 4096])
def test_every_epoch_has_a_random_order_of_its_own(segment: int) -> None:
    """Numbers of steps that are a power of two and that are not; every step is once in every epoch."""
    agent = agent_of(ppo=PPO(environments=2, segment=segment, epochs=3, minibatches=4))
    orders = np.asarray(agent._orders(jax.random.split(jax.random.key(3), 2)))
    num_steps = 2 * segment
    assert orders.shape == (2, 3, num_steps)
    np.testing.assert_array_equal(np.sort(orders, axis=-1), np.broadcast_to(np.arange(num_steps), orders.shape))
    assert len(np.unique(orders.reshape(6, -1), axis=0)) == 6
    if num_steps > 1000:  # the minibatch of a step says nothing about its number, nor about that in another epoch
        placed = np.argsort(orders.reshape(6, -1), axis=-1)
        np.testing.assert_allclose(np.corrcoef([np.arange(num_steps), *placed]), np.eye(7), atol=0.05)
    assert (
        agent_of(ppo=PPO(environments=2, segment=segment, minibatches=1))._orders(
            jax.random.split(jax.random.key(3), 2)
        )
        is None
    )


# Normalized observations


def networks_and_statistics(agent: PPOAgent, parameters: Any) -> tuple[np.ndarray, np.ndarray]:
    size = agent.blocks[2]
    return np.asarray(parameters)[..., :-size], np.asarray(parameters)[..., -size:]


@pytest.mark.slow
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_what_is_deployed_does_with_observations_what_the_policy_does_with_normalized_ones(env: str) -> None:
    agent = agent_of(ppo=NORMALIZED, env=env)
    rng, size = np.random.default_rng(0), agent.policy.observation_size
    mean, log_std = rng.normal(0, 3, size), rng.normal(0, 2, size)
    parameters = np.asarray(agent.initial_parameters(jax.random.key(0))) + rng.normal(0, 0.3, agent.dimension)
    parameters[-2 * size :] = [*mean, *log_std]
    parameters = jnp.asarray(parameters, jnp.float32)
    seen = mean + np.exp(log_std) * rng.normal(size=(50, size))
    noise = jnp.asarray(rng.uniform(size=(50, agent.policy.noise_size)), jnp.float32)

    def log_probabilities(flat: jax.Array, observations: np.ndarray) -> jax.Array:
        weights = agent.policy.unflatten(flat)
        outputs = agent.policy.outputs(weights, jnp.asarray(observations, jnp.float32))
        return agent.policy.log_probability(weights, outputs, actions)

    policy = parameters[: agent.policy.dimension]
    normal = (seen - mean) / np.exp(log_std)
    weights = agent.policy.unflatten(policy)
    actions = agent.policy.draw(weights, agent.policy.outputs(weights, jnp.asarray(normal, jnp.float32)), noise)
    (deployed,) = agent.deployed(parameters[None])
    np.testing.assert_allclose(log_probabilities(deployed, seen), log_probabilities(policy, normal), atol=1e-4)
    assert np.max(np.abs(log_probabilities(policy, seen) - log_probabilities(policy, normal))) > 0.1


@pytest.mark.parametrize("every", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_first_iteration_measures_and_later_ones_follow(every: int) -> None:
    agent = agent_of(ppo=NORMALIZED.replace(")", f", exchange_every={every})"), momentum=0.5)
    state, memory, played, batch = a_batch(agent, 2)
    start = before = state
    for iteration in range(2):
        before = state
        for exchange in range(agent.num_exchanges):
            memory, message = sent(agent, state, memory, batch, exchange)
            state = advanced(agent, state, message, message)
        if iteration == 0:
            networks, found = networks_and_statistics(agent, state.parameters)
            np.testing.assert_array_equal(networks, networks_and_statistics(agent, start.parameters)[0])
            for ours, theirs in zip(*map(jax.tree.leaves, (state.optimizer, start.optimizer)), strict=True):
                np.testing.assert_array_equal(ours, theirs)
            assert np.all(np.asarray(memory.history.count) == 0)
            seen = np.asarray(played.segment.observations, np.float64).reshape(2, -1, 4)
            expected = np.concatenate([seen.mean(1), np.log(np.maximum(seen.std(1), 0.01))], axis=1)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
            played, batch = digested(agent, state, memory, jax.random.split(jax.random.key(5), 2))
            mean, log_std = np.split(found[:, None, None], 2, axis=-1)
            normal = (np.asarray(played.segment.observations) - mean) / np.exp(log_std)
            np.testing.assert_allclose(batch.steps.observations, normal, rtol=1e-3, atol=1e-3)
            for k, policy in enumerate(agent.parts(state.parameters)[0]):  # which played with what it learns from
                weights, steps = agent.policy.unflatten(policy), steps_of(batch, k)
                outputs = agent.policy.outputs(weights, steps.observations)
                expected = agent.policy.log_probability(weights, outputs, steps.actions)
                np.testing.assert_allclose(steps.log_probabilities, expected, rtol=1e-5, atol=1e-5)
    assert np.all(np.asarray(memory.history.count) == agent.num_updates)
    old, new = (networks_and_statistics(agent, each.parameters) for each in (before, state))
    assert np.all(np.any(old[0] != new[0], axis=1))
    np.testing.assert_allclose(new[1] - old[1], 0.1 * (batch.statistics - old[1]), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_observations_of_any_scale_leave_the_parameters_finite() -> None:
    agent = agent_of(ppo=NORMALIZED, activation="relu")
    state, memory, played, _ = a_batch(agent, 2)
    keys = jax.random.split(jax.random.key(3), 2)
    request = agent.request(state, memory, keys, large=True)
    large = replace(played.segment, observations=1e12 * played.segment.observations)
    digest = jax.jit(partial(agent.digest, large=True))
    batch, _ = digest(state, request, replace(played, segment=large), keys)
    for exchange in range(agent.num_exchanges):
        memory, message = sent(agent, state, memory, batch, exchange)
        assert np.all(np.isfinite(message))
        state = advanced(agent, state, message, message)
    assert np.all(np.isfinite(state.parameters))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "robust"),
    [({"aggregator": "NNM(TrimmedMean())"}, True), ({"algorithm": "Fed-PPO", "aggregator": None}, False)],
    ids=["robust", "mean"],
)
def test_huge_statistics_move_only_the_plain_mean(options: dict[str, Any], robust: bool) -> None:
    attacked = SERVED | {"ppo": NORMALIZED, "attack": "LargeNoise", "num_attackers": 1} | options
    simulation = simulation_of(Config(**attacked).resolved())
    states, _ = simulation.run(simulation.start(), [LARGE], 0, only_large=True)
    agent = agent_of(ppo=NORMALIZED)
    parameters = simulation.fetched(states)[0].agents.parameters[0, 0]
    root = jax.random.fold_in(jax.random.key(0), ITERATIONS)
    keys = jnp.stack([stream_key(root, 0, play_stream(k)) for k in range(4)])  # of the honest agents
    state = agent.initial(jnp.tile(simulation.initial_parameters()[0], (4, 1)))
    _, batch = digested(agent, state, agent.initial_memory(state.parameters), keys)
    honest, found = np.asarray(batch.statistics), networks_and_statistics(agent, parameters)[1]
    inside = (found >= honest.min(axis=0) - 1e-5) & (found <= honest.max(axis=0) + 1e-5)
    assert np.all(inside) == robust
    assert robust or np.max(np.abs(found - honest.mean(axis=0))) > 1


@pytest.mark.parametrize(
    "aggregator",
    slow_except(["RFA"], ["RFA", "NNM(TrimmedMean())", "CenteredClipping"]),
)
def test_statistics_are_trimmed_coordinate_by_coordinate(aggregator: str) -> None:
    """Features have different units: distances, which one with a wide mean decides, cannot protect the others.

    Nor can attackers move statistics in exchanges in which honest agents send none.
    """
    settings = Config(**(TINY | {"num_agents": 13, "num_byzantine": 3, "ppo": NORMALIZED, "aggregator": aggregator}))
    federation = settings.resolved().federation()
    rows = np.zeros((13, federation.agent.dimension), np.float32)
    rows[10:, -3:] = 30.0
    present = np.ones(13, bool)
    rule, key, nothing = federation.aggregator, jax.random.key(0), federation.nothing_received()
    silent = _aggregate(federation.agent, rule, 3, rows, present, 0, key, nothing)[0]
    np.testing.assert_array_equal(silent[-8:], np.zeros(8))
    rows[:10, -8] = np.linspace(-100, 100, 10)  # the mean of one feature
    rows[:10, -3:] = np.random.default_rng(0).normal(0, 0.1, (10, 3))
    lied_to = _aggregate(federation.agent, rule, 3, rows, present, 0, key, nothing)[0]
    assert np.max(np.abs(lied_to[-3:])) < 0.3


def test_a_trained_policy_has_the_statistics_in_it() -> None:
    run = trained(**(TINY | {"ppo": NORMALIZED}))
    policy, held = run.policy(1, 2), run.held(1, 2)
    size = policy.policy.observation_size
    assert policy.parameters.shape == (policy.policy.dimension,)
    mean, log_std = held[-2 * size : -size], held[-size:]
    assert np.all(log_std != 0)
    weights = policy.policy.unflatten(jnp.asarray(held[: policy.policy.dimension]))
    seen = np.random.default_rng(0).normal(0, 0.3, (40, size)).astype(np.float32)
    scores = np.asarray(policy.policy.outputs(weights, jnp.asarray((seen - mean) / np.exp(log_std))))
    np.testing.assert_array_equal(policy.act(seen, greedy=True), np.argmax(scores, axis=1))


# Federations


@pytest.mark.parametrize(
    "ppo",
    [pytest.param(TINY["ppo"], id="plain", marks=pytest.mark.slow), pytest.param(NORMALIZED, id="normalized")],
)
def test_a_federation_of_one_is_ppo_to_the_bit(ppo: str) -> None:
    alone, one = trained(**(ALONE | {"ppo": ppo})), trained(**(PLAIN | {"num_agents": 1, "ppo": ppo}))
    np.testing.assert_array_equal(one.parameters["last"], alone.parameters["last"])
    np.testing.assert_array_equal(one.returns, alone.returns)
    robust = trained(**(TINY | {"num_agents": 1, "num_byzantine": 0, "ppo": ppo}))
    np.testing.assert_array_equal(robust.parameters["last"], alone.parameters["last"])


@pytest.mark.slow
def test_identical_agents_learn_as_one_with_all_their_steps() -> None:
    """Agents that hold the same steps send the same gradient, which is that of all their steps together."""
    merged = agent_of(ppo="PPO(environments=6, segment=8, epochs=2, minibatches=1, entropy=0.01)")
    whole = agent_of(ppo="PPO(environments=2, segment=8, epochs=2, minibatches=1, entropy=0.01)")
    state, memory, _, batch = a_batch(whole, 1)
    three = jax.tree.map(lambda leaf: jnp.repeat(leaf, 3, axis=0), (state, memory, batch))
    _, of_three = sent(whole, *three, 0)
    together = replace(batch, steps=jax.tree.map(lambda leaf: jnp.concatenate([leaf] * 3, axis=1), batch.steps))
    _, of_one = sent(merged, state, memory, together, 0)
    np.testing.assert_allclose(np.mean(of_three, axis=0), of_one[0], rtol=1e-4, atol=1e-5)


def one_by_one(options: dict[str, Any], num_iterations: int) -> np.ndarray:
    """The first seed's parameters [K, d], with messages handed over by hand, block by block; the last agent attacks."""
    settings = Config(**options).resolved()
    agent, rule = settings.federation().agent, settings.aggregator
    everyone, root = range(settings.num_agents), jax.random.fold_in(jax.random.key(settings.seed), ITERATIONS)
    first = agent.initial_parameters(settings.schedule().initial_key)[None]
    states, memories = [agent.initial(first) for _ in everyone], [agent.initial_memory(first) for _ in everyone]
    for iteration in range(num_iterations):
        batches = []
        for k in everyone:
            key = stream_key(root, iteration, play_stream(k))[None]
            batches.append(digested(agent, states[k], memories[k], key)[1])
        for exchange in range(agent.num_exchanges):
            messages = []
            for k in everyone:
                memories[k], message = sent(agent, states[k], memories[k], batches[k], exchange)
                messages.append(np.asarray(message[0]))
            for k in everyone:
                rows = np.stack([-row if j == 4 and j != k else row for j, row in enumerate(messages)])
                parts = [rule(part, num_byzantine=1) for part in agent.parts(rows)]
                aggregated = jnp.concatenate([jnp.asarray(part) for part in parts])[None]
                states[k] = advanced(agent, states[k], jnp.asarray(messages[k])[None], aggregated)
        held = [np.asarray(state.parameters[0]) for state in states]
        for k in everyone:
            rows = np.stack([-row if j == 4 and j != k else row for j, row in enumerate(held)])
            agreed = settings.agreement(rows, own=k, num_byzantine=1)
            states[k] = agent.settle(jnp.asarray(held[k])[None], states[k], jnp.asarray(agreed)[None])
    return np.stack([np.asarray(state.parameters[0]) for state in states])


def after_two(**options: Any) -> SimulationState:
    simulation = simulation_of(Config(**(TINY | options)).resolved())
    states, _ = simulation.run(simulation.start(), [LARGE] * 2, 0, only_large=True)
    return simulation.fetched(states)[0]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="gradients", marks=pytest.mark.slow),
        pytest.param(
            {"momentum": 0.5, "ppo": "PPO(environments=2, segment=8, epochs=2, minibatches=2, exchange_every=2)"},
            id="changes",
            marks=pytest.mark.slow,
        ),
        pytest.param({"optimizer": "local-adam", "momentum": 0.5, "decay": 0.9}, id="scaled", marks=pytest.mark.slow),
        pytest.param({"momentum": 0.5, "ppo": NORMALIZED}, id="normalized", marks=pytest.mark.slow),
        pytest.param({"momentum": 0.5, "ppo": NORMALIZED.replace(")", ", exchange_every=2)")}, id="normalized changes"),
    ],
)
def test_the_simulator_does_what_agents_do_apart_from_each_other(options: dict[str, Any]) -> None:
    expected = one_by_one(TINY | options, 2)
    np.testing.assert_allclose(after_two(**options).agents.parameters[0], expected, rtol=1e-3, atol=1e-4)


def test_policy_and_critic_are_aggregated_each_by_itself() -> None:
    """MDA of whole vectors would choose agents by the critic's gradients, which are longer."""
    apart: dict[str, Any] = {
        "aggregator": "MDA",
        "ppo": "PPO(environments=2, segment=8, epochs=1, minibatches=1)",
        "rounds": 0,
    }
    expected = one_by_one(TINY | apart | {"agreement": "NoAgreement"}, 1)
    simulation = simulation_of(Config(**(TINY | apart)).resolved())
    states, _ = simulation.run(simulation.start(), [LARGE], 0, only_large=True)
    found = simulation.fetched(states)[0].agents.parameters[0]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def peers(**options: Any) -> list[Peer]:
    honest: dict[str, Any] = TINY | {"num_attackers": 0} | options
    settings = Config(**honest).resolved()
    federation, schedule = settings.federation(), settings.schedule()
    return [Peer(federation, schedule, index, seeded_key(0), as_simulated=True) for index in range(5)]


def iterated(members: list[Peer], iteration: int) -> None:
    vectors: list[Any] = [member.begin(iteration) for member in members]
    for phase in range(members[0].exchanges + members[0].rounds):
        rows = np.stack(vectors)
        vectors = [member.combine(iteration, phase, rows, np.ones(5, bool)) for member in members]
    assert vectors == [None] * 5


@pytest.mark.parametrize(
    ("rule", "env", "ppo"),
    [
        pytest.param("TrimmedMean", "CartPole-v1", TINY["ppo"], marks=pytest.mark.slow),
        ("Bucketing(MDA())", "CartPole-v1", TINY["ppo"]),
        pytest.param("TrimmedMean", "gymnasium:CartPole-v1", TINY["ppo"], marks=pytest.mark.slow),
        pytest.param("TrimmedMean", "envpool:CartPole-v1", NORMALIZED, marks=pytest.mark.slow),
    ],
)
def test_peers_do_what_the_simulator_does(rule: str, env: str, ppo: str) -> None:
    """Also with a rule that looks at whole blocks, and draws random numbers for each block and exchange."""
    options: dict[str, Any] = {"momentum": 0.7, "aggregator": rule, "env": env, "ppo": ppo}
    members = peers(**options)
    assert members[0].exchanges == 4
    if env.startswith("envpool"):
        members[0].warm_up()  # what it plays there is forgotten
    for iteration in range(2):
        iterated(members, iteration)
    expected = after_two(num_attackers=0, **options).agents.parameters[0]
    np.testing.assert_allclose(np.stack([member.parameters for member in members]), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("optimizer", "ppo"),
    [
        pytest.param(
            "adam",
            "PPO(environments=2, segment=8, epochs=2, minibatches=2)",
            id="gradients",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "local-adam", "PPO(environments=2, segment=8, epochs=2, minibatches=2, exchange_every=2)", id="changes"
        ),
        pytest.param("adam", NORMALIZED, id="normalized", marks=pytest.mark.slow),
    ],
)
def test_a_peer_restarts_in_the_middle_of_its_episodes(optimizer: str, ppo: str) -> None:
    options = {"optimizer": optimizer, "decay": 0.5, "momentum": 0.7, "ppo": ppo}
    members = peers(**options)
    for iteration in range(2):
        iterated(members, iteration)
    whole, restarted = members[0], peers(**options)[0]
    assert len(whole.snapshot()) == whole.snapshot_dimension
    restarted.restore(2, whole.snapshot())
    assert restarted.snapshot().tobytes() == whole.snapshot().tobytes()
    jax.tree.map(np.testing.assert_array_equal, (restarted._memory, restarted._state), (whole._memory, whole._state))
    np.testing.assert_array_equal(restarted.begin(2), whole.begin(2))
    restarted._memory = replace(whole._memory, environments=peers(**options)[0]._memory.environments)
    assert np.any(restarted.begin(2) != whole.begin(2)), "new episodes lead to another message"


@pytest.mark.slow
def test_an_agent_that_lost_its_memory_takes_steps_as_small_as_the_others() -> None:
    options = "PPO(environments=2, segment=8, epochs=2, minibatches=2, exchange_every=2)"
    agent = agent_of(optimizer="local-adam", decay=0.9, momentum=0.5, ppo=options)
    anew = agent.initial_memory(jnp.zeros((2, agent.dimension)))
    recalled = agent.recalled(jnp.zeros((2, agent.dimension)), jnp.full(2, 3))
    counts = [np.asarray(leaf) for leaf in jax.tree.leaves(recalled.optimizer)]
    np.testing.assert_array_equal(counts, [[3 * 4] * 2])
    state, _, _, batch = a_batch(agent, 2)
    whole, smaller = (sent(agent, state, memory, batch, 0)[1] for memory in (anew, recalled))
    # The first of two updates is the same but for its size; the second one starts elsewhere.
    ratio = np.linalg.norm(smaller) / np.linalg.norm(whole)
    assert ratio < 1 - 0.9 * 12 / 24 + 0.2


@pytest.mark.parametrize("every", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_peer_that_fell_behind_continues_with_the_others_state(every: int) -> None:
    options = f"PPO(environments=2, segment=8, epochs=2, minibatches=2, entropy=0.01, exchange_every={every})"
    members, late = peers(momentum=0.7, ppo=options), peers(momentum=0.7, ppo=options)[0]
    for iteration in range(2):
        iterated(members, iteration)
    states = [member.snapshot()[: member.state_dimension] for member in members]
    late.adopt(2, [None, *states[1:]])
    np.testing.assert_allclose(late.parameters, members[1].parameters, rtol=1e-4, atol=1e-5)
    history = late._memory.history
    # A history of gradients begins from the last aggregate, if that is a gradient, as if all updates had given it.
    assert int(history.count[0]) == (8 if every == 1 else 0)
    expected = (1 - 0.7**8) * late._state.direction if every == 1 else np.zeros_like(late._state.direction)
    np.testing.assert_allclose(history.mean, expected, rtol=1e-4, atol=1e-6)
    assert np.all(np.isfinite(late.begin(2)))


def test_an_attacker_lies_block_by_block_as_in_the_simulator() -> None:
    member = peers()[1]
    truth = np.arange(member.dimension, dtype=np.float32)
    messages = member.false_messages(LargeNoise(), 0, 2, truth)
    key = exchange_key(
        stream_key(jax.random.fold_in(jax.random.key(0), ITERATIONS), 0, round_stream(5, 0)), 2, num_exchanges=4
    )
    start = 0
    for block, size in enumerate(member.agent.blocks):
        vectors = jnp.full((5, size), jnp.nan).at[1].set(truth[start : start + size])
        knowledge = Knowledge(vectors, jnp.asarray([1]), jnp.asarray(0), attack_key(block_key(key, block)))
        expected = LargeNoise().messages("gradients", knowledge, jnp.arange(5))[:, 0]
        np.testing.assert_allclose(
            np.stack(messages)[:, start : start + size], np.broadcast_to(expected, (5, size)), rtol=1e-5
        )
        start += size


def test_a_worker_that_was_away_plays_at_the_first_message_it_is_asked_for() -> None:
    """In a new process for every message; what it plays in an iteration, it plays once."""
    settings = Config(**SERVED).resolved()
    federation = settings.federation()
    parameters = np.asarray(federation.agent.initial_parameters(settings.schedule().initial_key))
    sizes, sent, worker = [], [], Worker(federation, 1, seeded_key(0))
    for moment in ((0, 2), (0, 3), (1, 0)):
        earlier, worker = worker, Worker(federation, 1, seeded_key(0))
        worker.recall(earlier.memory)
        sent.append(worker.message(*moment, parameters))
        (content,) = worker.memory.values()
        sizes.append(content.size)
        np.testing.assert_array_equal(worker.sampled.steps, 16)
    assert sizes[0] == sizes[2] > sizes[1], "what was played is kept until the last message of the iteration"
    whole = Worker(federation, 1, seeded_key(0))
    for exchange in range(4):
        expected = whole.message(0, exchange, parameters)
        if exchange > 1:
            np.testing.assert_array_equal(sent[exchange - 2], expected)
    np.testing.assert_array_equal(sent[2], whole.message(1, 0, parameters))
    lost = Worker(federation, 1, seeded_key(0)).message(1, 0, parameters)
    assert np.any(lost != sent[2]), "a worker that lost its memory begins new episodes"


def test_a_step_of_its_own_along_a_gradient_that_is_not_finite_is_not_taken() -> None:
    """Else the agent's optimizer, and so all its later messages, would not be finite."""
    agent = agent_of(ppo="PPO(environments=2, segment=8, epochs=2, minibatches=2, exchange_every=2)")
    state, memory, _, batch = a_batch(agent, 3)
    _, whole = sent(agent, state, memory, batch, 0)
    first = batch.orders[1, 0, 0]
    poisoned = batch.steps.advantages.reshape(3, 16).at[1, first].set(jnp.inf).reshape(batch.steps.advantages.shape)
    memory, message = sent(agent, state, memory, replace(batch, steps=replace(batch.steps, advantages=poisoned)), 0)
    np.testing.assert_array_equal(message[jnp.array([0, 2])], whole[jnp.array([0, 2])])
    assert np.all(np.isfinite(message))
    assert np.any(message[1] != whole[1])
    assert np.any(message[1] != 0), "the other update is carried out"
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(memory.optimizer))
    assert [int(leaf[1]) for leaf in jax.tree.leaves(memory.optimizer) if leaf.ndim == 1] == [1]


# Runs


def test_before_the_first_episode_has_ended_the_first_known_return_stands() -> None:
    run = trained(**TINY)
    ended = np.zeros_like(run.metrics["episodes"])
    ended[:, 2:] = 1
    late = replace(run, metrics={**run.metrics, "episodes": ended})
    known = run.metrics["return_mean"]
    np.testing.assert_array_equal(late.returns[:, :2], known[:, [2, 2]])
    np.testing.assert_array_equal(late.returns[:, 2:], known[:, 2:])


def test_runs_count_steps_and_know_their_trajectories() -> None:
    run = trained(**TINY)
    np.testing.assert_array_equal(run.steps, [[16, 32, 48, 64, 80, 96]] * 2)
    np.testing.assert_array_equal(run.metrics["environment_steps"], 5 * 16)
    np.testing.assert_allclose(run.trajectories, np.cumsum(run.metrics["episodes"], axis=1))
    assert run.settings.trajectories is None
    trained_policy = run.policy()
    assert trained_policy.parameters.shape == (trained_policy.policy.dimension,)  # without the critic's
    np.testing.assert_array_equal(trained_policy.parameters, run.parameters["last"][0, 0, :44])


@pytest.mark.slow
def test_a_run_without_a_critic_knows_its_steps() -> None:
    run = train(Config(num_agents=3, num_byzantine=0, num_seeds=1, trajectories=8, large_batch=4, horizon=20))
    steps = np.cumsum(run.metrics["environment_steps"], axis=1) / 3
    np.testing.assert_allclose(run.steps, steps)
    np.testing.assert_array_equal(run.metrics["episodes"], 4)


class Stop(Exception):
    pass


def stop(progress: Progress) -> None:
    if progress.progress >= 48:
        raise Stop


@pytest.mark.parametrize("ppo", [TINY["ppo"], NORMALIZED], ids=["plain", "normalized"])
def test_a_run_that_was_stopped_or_extended_ends_to_the_bit_as_one_that_was_not(ppo: str, tmp_path: Path) -> None:
    longer: dict[str, Any] = TINY | {"steps": 16 * 12, "ppo": ppo}
    with pytest.raises(Stop):
        train(Config(**longer), tmp_path / "run", stop)
    shorter: dict[str, Any] = longer | {"steps": 96}
    train(Config(**shorter), tmp_path / "extended")
    whole = train(Config(**longer))
    for run in (resume(tmp_path / "run"), resume(tmp_path / "extended", steps=16 * 12)):
        assert run.settings == whole.settings
        np.testing.assert_array_equal(run.parameters["last"], whole.parameters["last"])
        np.testing.assert_array_equal(run.returns, whole.returns)


@pytest.mark.slow
@pytest.mark.parametrize("env", ["gymnasium:CartPole-v1", "envpool:CartPole-v1"])
def test_on_a_host_task_a_resumed_run_begins_new_episodes(env: str, tmp_path: Path) -> None:
    options: dict[str, Any] = TINY | {"env": env, "attack": "RandomAction", "steps": 16 * 12}
    whole = train(Config(**options))
    np.testing.assert_array_equal(train(Config(**options)).parameters["last"], whole.parameters["last"])
    with pytest.raises(Stop):
        train(Config(**options), tmp_path / "run", stop)
    copytree(tmp_path / "run", tmp_path / "copy")
    done = load(tmp_path / "run").num_iterations[0]
    assert done < 12
    resumed, again = resume(tmp_path / "run"), resume(tmp_path / "copy")
    np.testing.assert_array_equal(resumed.parameters["last"], again.parameters["last"])
    for name, values in whole.metrics.items():
        np.testing.assert_array_equal(resumed.metrics[name][:, :done], values[:, :done])
    assert np.any(resumed.parameters["last"] != whole.parameters["last"])
    # Episodes of an untrained policy are shorter than a run: their number goes on from where it was.
    assert np.all(resumed.trajectories[:, -1] >= whole.trajectories[:, done - 1])
    assert np.all(np.isfinite(resumed.returns))


@pytest.mark.slow
def test_blocks_of_a_host_run_go_on_in_one_venue() -> None:
    options: dict[str, Any] = TINY | {"env": "gymnasium:CartPole-v1"}
    simulation = simulation_of(Config(**options).resolved())

    def episodes(blocks: list[list[int]], shared: bool) -> Any:
        states, venue = simulation.start(), simulation.venue()
        for block in blocks:
            states, _ = simulation.run(states, block, 0, only_large=True, venue=venue if shared else None)
        return simulation.fetched(states)[0]

    whole, divided = episodes([[LARGE] * 3], True), episodes([[LARGE]] * 3, True)
    for one, other in zip(*map(jax.tree.leaves, (whole, divided)), strict=True):
        np.testing.assert_array_equal(one, other)
    apart = episodes([[LARGE]] * 3, False)
    assert np.all(apart.memories.environments.elapsed <= 8)
    assert np.any(whole.memories.environments.elapsed > 8)


def test_the_tables_of_a_host_run_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the shapes of what receivers remember, which are traced."""
    options: dict[str, Any] = TINY | {"env": "gymnasium:CartPole-v1", "aggregator": "Remember(RFA())"}
    simulation = simulation_of(Config(**options).resolved())
    asked, shapes = [], Federation.nothing_received
    monkeypatch.setattr(Federation, "nothing_received", lambda self: asked.append(self) or shapes(self))
    states = simulation.start()
    asked.clear()
    simulation.run(states, [LARGE] * 3, 0, only_large=True)
    assert len(asked) <= 1


@pytest.mark.slow
def test_federations_of_one_program_do_what_they_do_alone(tmp_path: Path) -> None:
    variants = {"peers": TINY, "server": SERVED, "faster": TINY | {"step_size": 0.02, "momentum": 0.5}, "mean": PLAIN}
    paths = [tmp_path / name for name in variants]
    for path, options in zip(paths, variants.values(), strict=True):
        RunDirectory.create(path, Config(**options).resolved())
    resume_all(paths)
    for path, options in zip(paths, variants.values(), strict=True):
        alone, together = trained(**options), RunDirectory.open(path).read_results()
        np.testing.assert_allclose(together.parameters["last"], alone.parameters["last"], rtol=2e-2, atol=2e-3)


def test_every_form_learns_and_only_the_robust_one_under_attack() -> None:
    """A short CartPole, which pays at most 60; AvgZero makes the mean of gradients zero."""
    short: dict[str, Any] = {
        "horizon": 60,
        "hidden": (16,),
        "discount": 0.98,
        "optimizer": "adam",
        "decay": 0.0,
        "step_size": 0.01,
        "momentum": 0.0,
        "num_seeds": 2,
        "steps": 4096,
        "adam_epsilon": 1e-3,
        "ppo": "PPO(environments=4, segment=64, epochs=4, minibatches=1)",
    }
    attacked = {"num_agents": 5, "num_byzantine": 1, "attack": "AvgZero"}
    ends = {
        name: float(np.mean(train(Config(**(short | options))).returns[:, -3:]))
        for name, options in {
            "one": {"algorithm": "PPO"},
            "robust": {"algorithm": "ByzPPO", **attacked},
            "mean": {"algorithm": "Fed-PPO", **attacked},
        }.items()
    }
    assert ends["one"] > 45
    assert ends["robust"] > 45
    assert ends["mean"] < 35


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trajectories": 100}, "trajectories = 100 has no effect with DecByzPPO: leave it out, or set steps."),
        ({"large_batch": 4}, "large_batch = 4 has no effect with DecByzPPO"),
        ({"algorithm": "DecByzPG"}, "steps = 96 has no effect with DecByzPG: leave it out, or set trajectories."),
        ({"steps": 0}, "steps must be at least 1, got 0."),
        ({"preset": "paper"}, "preset = paper is for the paper's algorithms, not for DecByzPPO: use tuned."),
        ({"ppo": "PPO(minibatches=7)"}, "PPO: minibatches must divide environments × segment = 512 steps, got 7."),
        ({"ppo": "PPO(lambda_=1)"}, "PPO has no option 'lambda_'"),
        (
            {"ppo": "PPO(initial_log_std=-2)"},
            "PPO: initial_log_std = -2 is for continuous actions, and those of CartPole-v1 are discrete: leave it out.",
        ),
        ({"ppo": "PPO(initial_log_std=inf)"}, "PPO: initial_log_std must lie in [-20, 20], got inf."),
        ({"switch_probability": 0.5}, "switch_probability = 0.5 has no effect with DecByzPPO"),
        ({"algorithm": "ByzPPO"}, "rounds = 1 has no effect with ByzPPO: leave it out, or use DecByzPPO."),
        ({"algorithm": "Dec-PPO", "rounds": None}, "leave it out, or use ByzPPO or DecByzPPO."),
    ],
)
def test_bad_options_are_one_clear_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Config(**(TINY | options)).resolved()


@pytest.mark.slow
def test_the_first_actions_are_as_noisy_as_asked_for_in_each_of_several_federations() -> None:
    def with_noise(log_std: float) -> Config:
        ppo = f"PPO(environments=2, segment=8, epochs=1, minibatches=1, initial_log_std={log_std})"
        options: dict[str, Any] = {"env": "Pendulum-v1", "steps": 16, "num_seeds": 1, "ppo": ppo}
        return Config(**(TINY | options))

    plain, quiet = with_noise(0), with_noise(-2)
    for config, expected in ((plain, 0), (quiet, -2)):
        agent = config.resolved().federation().agent
        log_std = agent.initial_parameters(jax.random.key(0))[agent.policy.dimension - 1]
        assert float(log_std) == expected
    # Trained at the same time, each starts from its own: one update of η = 0.01 cannot bring them together.
    runs = dict(train_all([plain, quiet]))
    ends = [runs[index].parameters["last"][0, 0, agent.policy.dimension - 1] for index in (0, 1)]
    np.testing.assert_allclose(ends, [0, -2], atol=0.1)


def test_without_a_critic_its_options_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^ppo = PPO\(epochs=2\) has no effect with DecByzPG: leave it out, or use Dec"
    ):
        Config(ppo=PPO(epochs=2)).resolved()
    assert Config().resolved().ppo == PPO()


def test_options_of_the_other_learner_may_be_given_at_values_that_do_nothing() -> None:
    """However they are written."""
    plain = Config(**TINY).resolved()
    same: dict[str, Any] = TINY | {"switch_probability": 1, "gate": 1, "estimator": "GPOMDP()", "conventions": "paper"}
    assert Config(**same).resolved() == plain
    assert Config(ppo="PPO").resolved() == Config(ppo="PPO(epochs=4)").resolved() == Config().resolved()
