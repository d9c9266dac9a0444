"""Networks as users may write them, for tests: correct ones and broken ones."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import Array

from byzpg import networks
from byzpg.networks import Network


@dataclass(frozen=True)
class Twin(Network):
    """The built-in network, written again: with the same draws, in the same order.

    Attributes:
        last: The factor of the last layer of a policy, which byzpg can only set in its own network.
    """

    hidden: tuple[int, ...] = (6,)
    last: float = 1.0

    def init(self, key: Array, observation: Array, num_outputs: int) -> Any:
        sizes = list(pairwise((observation.size, *self.hidden, num_outputs)))
        draws = jax.random.uniform(key, (sum((inputs + 1) * outputs for inputs, outputs in sizes),), minval=-1)
        layers, start = [], 0
        for index, (inputs, outputs) in enumerate(sizes):
            is_last = index == len(self.hidden) and num_outputs > 1
            scale = jnp.float32(inputs**-0.5) * (self.last if is_last else 1)
            end = start + inputs * outputs
            matrix, bias = draws[start:end].reshape(inputs, outputs), draws[end : end + outputs]
            layers.append((scale * matrix, scale * bias))
            start = end + outputs
        return layers

    def apply(self, parameters: Any, observation: Array) -> Array:
        *hidden, (matrix, bias) = parameters
        values = observation
        for weights, shift in hidden:
            values = jnp.tanh(values @ weights + shift)
        return values @ matrix + bias


@dataclass(frozen=True)
class Zoo(Network):
    """Many operations, each with a factor of its own."""

    def init(self, key: Array, observation: Array, num_outputs: int) -> Any:
        return jax.random.normal(key, (16, num_outputs))

    def apply(self, parameters: Array, observation: Array) -> Array:
        x = observation
        centred = (x - x.mean()) / jnp.sqrt(x.var() + 0.1)
        first, rest = jnp.split(jnp.concatenate([x, jnp.cos(x)]), [2])
        table = jnp.outer(x, jax.nn.softmax(x))
        numbers = [
            *(jnp.max(jnp.where(x[1:] > 0, x[1:], jnp.exp(x[:-1]))), jnp.min(jnp.clip(x, -0.5, 0.5)), jnp.prod(x)),
            *(jax.nn.silu(x[0]), jax.nn.softplus(x[1]), jax.nn.gelu(x[2]), jax.nn.elu(x[0]), jax.nn.log_softmax(x)[2]),
            *(jnp.sum(table @ table.T), jnp.einsum("ij,ij->", table, table.T), jnp.linalg.norm(x) ** 3),
            *(jnp.sum(centred * jnp.arange(x.size)), jnp.sum(first), jnp.max(rest), jax.lax.rsqrt(1 + x[0] ** 2)),
            jnp.sum(jnp.tile(jnp.abs(jnp.sin(x)), 2)[:5]),
        ]
        return jnp.stack(numbers) @ parameters


@networks.flax_linen
def linen(num_outputs: int, width: int = 5) -> nn.Module:
    """Two layers of Flax Linen."""
    return nn.Sequential([nn.Dense(width), nn.tanh, nn.Dense(num_outputs)])


@networks.flax_nnx
def of_nnx(observation_size: int, num_outputs: int, rngs: nnx.Rngs, width: int = 5) -> nnx.Module:
    """Two layers of Flax NNX."""
    first, last = nnx.Linear(observation_size, width, rngs=rngs), nnx.Linear(width, num_outputs, rngs=rngs)
    return nnx.Sequential(first, nnx.tanh, last)


@networks.equinox
def of_equinox(observation_size: int, num_outputs: int, key: Array, width: int = 5) -> eqx.Module:
    """Two layers of Equinox."""
    return eqx.nn.MLP(observation_size, num_outputs, width, depth=1, activation=jnp.tanh, key=key)


# Broken ones


@networks.flax_linen
def remembers(num_outputs: int) -> nn.Module:
    """Has state besides its parameters."""
    return nn.Sequential([nn.BatchNorm(use_running_average=True), nn.Dense(num_outputs)])


@networks.flax_nnx
def drops(observation_size: int, num_outputs: int, rngs: nnx.Rngs) -> nnx.Module:
    """Has random state."""
    return nnx.Sequential(nnx.Dropout(0.5, rngs=rngs), nnx.Linear(observation_size, num_outputs, rngs=rngs))


class Counting(eqx.Module):
    """Has an array that is no parameter."""

    linear: eqx.nn.Linear
    count: Array

    def __call__(self, observation: Array) -> Array:
        return self.linear(observation)


@networks.equinox
def counts(observation_size: int, num_outputs: int, key: Array) -> eqx.Module:
    return Counting(eqx.nn.Linear(observation_size, num_outputs, key=key), jnp.zeros((), jnp.int32))


@networks.equinox
def of_two(observation_size: int, key: Array) -> eqx.Module:
    """Always has two outputs."""
    return eqx.nn.Linear(observation_size, 2, key=key)


@dataclass(frozen=True)
class Broken(Network):
    """Fails in the way that is asked for."""

    way: str

    def init(self, key: Array, observation: Array, num_outputs: int) -> Any:
        matrix = jnp.zeros((observation.size, num_outputs))
        ways = {"empty": {}, "integer": {"matrix": matrix.astype(int)}, "float": jnp.float16(matrix), "text": "matrix"}
        return ways.get(self.way, matrix)

    def apply(self, parameters: Array, observation: Array) -> Any:
        outputs = observation @ parameters
        if self.way == "sums":  # not broken, but not in ONNX
            return jnp.cumsum(outputs)
        if self.way == "branches":
            return outputs if outputs[0] > 0 else -outputs
        ways = {"wide": jnp.append(outputs, 0.0), "counts": outputs.astype(int), "pair": (outputs, outputs)}
        return ways.get(self.way, outputs)


@dataclass
class Thawed(Network):
    """Not frozen."""

    def init(self, key: Array, observation: Array) -> Array:
        return observation

    def apply(self, parameters: Array, observation: Array) -> Array:
        return parameters
