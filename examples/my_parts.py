"""Your own task, rule, attack and network: one module, whose names every command of byzpg understands.

Copy examples/my_parts.py into an empty directory; there, for instance:

    byzpg train --env my_parts:Docking --aggregator my_parts:near_median --attack "my_parts:sleeper(wake=5)"

The tutorial docs/tutorials/five-minutes.md continues from here.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from byzpg.envs import Discrete, JaxTask
from byzpg.networks import Network
from byzpg.robust import aggregator, attack


@dataclass(frozen=True)
class Docking(JaxTask):
    """Bring a boat to rest at a pier. The boat glides on, and a gust of wind pushes it in every step."""

    wind: float = 0.02

    observation_size = 2  # position and speed
    action_space = Discrete(3)  # back, coast, ahead
    horizon = 30

    def begin(self, key: Array) -> tuple[Array, Array]:
        boat = jnp.stack([jax.random.uniform(key, minval=-1, maxval=1), 0.0])
        return boat, boat  # the state, and what the agent sees of it

    def advance(self, state: Array, action: Array, key: Array) -> tuple[Array, Array, Array, bool]:
        position, speed = state
        speed = 0.9 * speed + 0.1 * (action - 1) + self.wind * jax.random.normal(key)
        boat = jnp.clip(jnp.stack([position + speed, speed]), -2, 2)
        return boat, boat, -jnp.abs(boat[0]), False  # the episode ends at the horizon only


@aggregator(max_byzantine=lambda num_agents: (num_agents - 1) // 2)
def near_median(received: Array, num_byzantine: int) -> Array:
    """The mean of the K − f vectors that are nearest to the median of each coordinate."""
    distances = jnp.linalg.norm(received - jnp.median(received, axis=0), axis=1)
    nearest = jnp.argsort(distances)[: len(received) - num_byzantine]
    return received[nearest].mean(axis=0)


@attack
def sleeper(honest: Array, own: Array, iteration: Array, wake: int = 0, scale: float = 5.0) -> Array:
    """Honest vectors before iteration `wake`; from there on, the honest mean times −scale."""
    return jnp.where(iteration < wake, own, -scale * honest.mean(axis=0))


@dataclass(frozen=True)
class Waves(Network):
    """One layer of sines and cosines."""

    width: int = 16

    def init(self, key: Array, observation: Array, num_outputs: int) -> dict[str, Array]:
        first, last = jax.random.split(key)
        return {
            "angles": jax.random.normal(first, (observation.size, self.width)),
            "outputs": 0.01 * jax.random.normal(last, (2 * self.width, num_outputs)),
        }

    def apply(self, parameters: dict[str, Array], observation: Array) -> Array:
        angles = observation @ parameters["angles"]
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)]) @ parameters["outputs"]
