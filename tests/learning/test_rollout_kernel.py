"""The rollout kernel, interpreted on the CPU, agrees with the plain loop, and it can be lowered for GPUs."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from byzpg.envs import ENVIRONMENTS, Environment
from byzpg.envs.cartpole import CartPole
from byzpg.envs.spaces import Box
from byzpg.learning import rollouts
from byzpg.learning.policies import CategoricalMLP, GaussianMLP, Numbers, Policy, policy_for
from byzpg.learning.rollout_kernel import Agents, Ongoing, Setup, StepInputs, play_in_kernel
from byzpg.learning.rollouts import Episodes, play_in_loop, rollout
from byzpg.robust.attacks import Attack, RandomAction, RewardFlip
from byzpg.robust.components import Component

NUM_AGENTS, NUM_STEPS, FIRST, HORIZON = 2, 12, 30, 38


@dataclass(frozen=True)
class Drifting(Component):
    """Two noisy points that the actions push; an episode ends when they are far apart."""

    name = "Drifting"
    observation_size = 2
    action_space = Box(2, (-1.0, -1.0), (1.0, 1.0))
    horizon = 100
    reward_threshold = None
    noise_size = 1
    has_loops = False

    def reset(self, key: Array) -> Numbers:
        return tuple(jax.random.normal(key, (2,)))

    def observe(self, state: Numbers) -> Numbers:
        return state

    def step(self, state: Numbers, action: Numbers, noise: Numbers) -> tuple[Numbers, Array, Array]:
        moved = tuple(place + 0.3 * push + noise[0] for place, push in zip(state, action, strict=True))
        return moved, state[0] * action[1], jnp.abs(moved[0] - moved[1]) > 3


class Looping(CartPole):
    """CartPole that claims to have loops."""

    has_loops = True


def setup(env: Environment, policy: Policy) -> Setup:
    return Setup(env, policy, HORIZON, (RandomAction(),))


def example(env: Environment, policy: Policy, num_episodes: int) -> tuple[Agents, Ongoing, StepInputs]:
    """Two agents, the second of which takes random actions, and episodes of which some have ended."""
    keys = jax.random.split(jax.random.key(0), NUM_AGENTS)
    weights = jax.vmap(policy.unflatten)(2 * jax.vmap(policy.initial)(keys))
    state = jax.vmap(lambda key: jax.vmap(env.reset)(jax.random.split(key, num_episodes)))(keys)
    shape = (NUM_AGENTS, num_episodes)
    alive = jnp.arange(num_episodes) % 3 != 1 + jnp.arange(NUM_AGENTS)[:, None]
    noise = jax.random.uniform(jax.random.key(1), (NUM_STEPS, *shape, policy.noise_size + env.noise_size))
    draws = jax.random.uniform(jax.random.key(2), (NUM_STEPS, *shape, env.action_space.size))
    inputs = StepInputs(FIRST + jnp.arange(NUM_STEPS), noise, env.action_space.uniform(draws))
    ongoing = Ongoing(state, alive, jnp.full(shape, FIRST))
    return Agents(weights, [jnp.array([False, True])]), ongoing, inputs


CARTPOLE = ENVIRONMENTS["CartPole-v1"]()


@pytest.mark.parametrize(
    ("env", "policy", "num_episodes"),
    [
        (CARTPOLE, CategoricalMLP(4, (16, 16), num_actions=2), 4),
        pytest.param(
            CARTPOLE,
            CategoricalMLP(4, (5,), "tanh", output_tanh=True, num_actions=2),
            33,  # two blocks
            marks=pytest.mark.slow,
        ),
        pytest.param(CARTPOLE, CategoricalMLP(4, (20, 33, 8), "elu", num_actions=2), 16, marks=pytest.mark.slow),
        pytest.param(CARTPOLE, CategoricalMLP(4, (), num_actions=2), 5, marks=pytest.mark.slow),
        pytest.param(
            Drifting(),
            GaussianMLP(2, (6, 4), "silu", action_size=2, initial_log_std=-0.5),
            7,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ENVIRONMENTS["LunarLander-v3"](), CategoricalMLP(8, (16,), num_actions=4), 3, marks=pytest.mark.slow
        ),
    ],
)
def test_the_kernel_plays_what_the_loop_plays(env: Environment, policy: Policy, num_episodes: int) -> None:
    given = jax.jit(partial(example, env, policy, num_episodes))()
    expected = jax.jit(partial(play_in_loop, setup(env, policy)))(*given)
    found = jax.jit(partial(play_in_kernel, setup(env, policy), interpret=True))(*given)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    played = np.asarray(FIRST + jnp.arange(NUM_STEPS) < expected[0].lengths[..., None])
    for i, (ours, theirs) in enumerate(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        if i >= len(jax.tree.leaves(expected[0])):  # nothing is said about steps after an episode's end
            ours, theirs = (np.asarray(each)[played] for each in (ours, theirs))
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-4 if env.has_loops else 2e-5)
    _, _, inputs = given
    np.testing.assert_array_equal(expected[1].actions[1], jnp.moveaxis(inputs.uniform_actions, 0, 2)[1])
    # The horizon cuts episodes off, and episodes that had ended stay ended.
    lengths = np.asarray(expected[0].lengths) - FIRST
    assert lengths.max() == HORIZON - FIRST
    assert lengths.min() == 0


@pytest.mark.parametrize(
    "env",
    [
        pytest.param(member(), marks=pytest.mark.slow) if "LunarLander" in name or "Acrobot" in name else member()
        for name, member in ENVIRONMENTS.items()
    ],
    ids=str,
)
def test_it_can_be_lowered_for_gpus(env: Environment) -> None:
    """Operations that a kernel does not support fail when it is lowered, which needs no GPU."""
    policy = policy_for("auto", env.observation_size, env.action_space)
    given = jax.eval_shape(partial(example, env, policy, 30))
    program = jax.jit(partial(play_in_kernel, setup(env, policy)))
    assert "triton" in program.trace(*given).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("env", "attack", "hidden", "in_kernel"),
    [
        (CARTPOLE, None, (16,), True),
        pytest.param(CARTPOLE, RewardFlip(), (16,), True, marks=pytest.mark.slow),
        pytest.param(CARTPOLE, RandomAction(), (16,), True, marks=pytest.mark.slow),
        (CARTPOLE, None, (200,), False),
        (Looping(), None, (16,), False),
    ],
)
def test_rollouts_on_gpus_use_it_where_it_fits(
    env: Environment, attack: Attack | None, hidden: tuple[int, ...], in_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It supports neither wide layers nor environments with loops that were not written for kernels."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(rollouts, "TURN", 4)  # CPUs would play in two turns
    policy = CategoricalMLP(4, hidden, "tanh", output_tanh=True, num_actions=2)

    def play(parameters: Array, keys: Array, byzantine: Array) -> Episodes:
        attackers = [] if attack is None else [(attack, byzantine)]
        return rollout(env, policy, parameters, keys, num_episodes=4, horizon=30, attackers=attackers)

    given = (jnp.zeros((2, policy.dimension)), jax.random.split(jax.random.key(0), 2), jnp.array([True, False]))
    program = jax.jit(play).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert ("triton" in program) == in_kernel
