"""AliasedStates-v1: a task whose J(θ) and ∇J(θ) can be computed exactly, to hold learning against the theorems.

Six states look like two, so the best policy that sees only the look is random: neither the noise of a gradient
estimate nor the curvature of J vanishes there, as the rates of the theorems presume. (In a task whose best policy is
deterministic, both do, and learning is faster than any bound says.)
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from byzpg.envs.spaces import Discrete
from byzpg.robust.components import Component

# [state, action, next state] and [state, action]; drawn at random and rounded, among tables whose best policy is random
# in both looks. Even states look alike, and so do odd ones.
TRANSITIONS = np.array(
    [
        [[0, 0, 0, 0, 1, 0], [0, 0, 0.75, 0, 0, 0.25]],
        [[0, 0.75, 0, 0, 0, 0.25], [0, 0, 0, 1, 0, 0]],
        [[1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]],
        [[0.25, 0, 0, 0, 0.75, 0], [0, 0, 0, 0, 0, 1]],
        [[0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 0, 0]],
        [[0, 0.75, 0, 0.25, 0, 0], [0, 0.25, 0, 0, 0, 0.75]],
    ]
)
REWARDS = np.array([[0.25, 0.0], [-0.75, 0.75], [0.75, -0.75], [-0.75, 0.75], [-0.25, 0.5], [0.0, -0.75]])
NUM_STATES, NUM_ACTIONS = REWARDS.shape
NUM_LOOKS = 2


def _entry(table: np.ndarray, state: Array, action: Array) -> Array:
    """table[state, action], elementwise."""
    value = jnp.zeros(jnp.shape(state), jnp.float32)
    for index, entry in np.ndenumerate(table):
        value = jnp.where((state == index[0]) & (action == index[1]), float(entry), value)
    return value


@dataclass(frozen=True)
class AliasedStates(Component):
    """Six states that look like two, two actions and four steps: small enough to compute ∇J(θ) exactly."""

    name = "AliasedStates-v1"
    observation_size = NUM_LOOKS
    action_space = Discrete(NUM_ACTIONS)
    horizon = 4
    reward_threshold = None
    noise_size = 1
    has_loops = False

    def reset(self, key: Array) -> Array:
        """A first state: each is equally likely."""
        return jax.random.randint(key, (), 0, NUM_STATES)

    def observe(self, state: Array) -> tuple[Array, ...]:
        """Which of the two looks the state has, as two features that are 0 or 1."""
        return tuple((state % NUM_LOOKS == look).astype(jnp.float32) for look in range(NUM_LOOKS))

    def step(self, state: Array, action: tuple[Array, ...], noise: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        """The next state, the reward, and that the episode goes on."""
        cumulated = np.cumsum(TRANSITIONS, axis=2)
        passed = (
            (_entry(cumulated[:, :, i], state, action[0]) <= noise[0]).astype(jnp.int32) for i in range(NUM_STATES - 1)
        )
        following = sum(passed, start=jnp.zeros(jnp.shape(state), jnp.int32))
        return following, _entry(REWARDS, state, action[0]), jnp.zeros(jnp.shape(state), bool)

    def every_observation(self) -> Array:
        """What the agent sees in each state [state, feature]."""
        return jnp.stack(self.observe(jnp.arange(NUM_STATES)), axis=1)

    def expected_return(self, probabilities: Array, horizon: int, discount: Array | float) -> Array:
        """J = E Σ_h γ^h r_h, for the probability of every action in every state [state, action]."""
        values = jnp.zeros(NUM_STATES)
        for _ in range(horizon):
            following = jnp.einsum("san,n->sa", jnp.asarray(TRANSITIONS, jnp.float32), values)
            values = jnp.sum(probabilities * (jnp.asarray(REWARDS, jnp.float32) + discount * following), axis=1)
        return jnp.mean(values)
