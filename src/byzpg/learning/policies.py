"""Policies π_θ(a|s) and critics: multilayer perceptrons over one flat float32 vector θ [d].

`unflatten` turns θ into weights. All other functions take the weights, so that a rollout does not slice θ at every
step. Functions are written for one θ and observations [..., features]; callers `vmap` over agents.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from math import e, log, pi, prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import ndtri

from byzpg.envs.spaces import Discrete, Space
from byzpg.robust.components import Component, check_choice, check_count, check_finite

ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh, "elu": jax.nn.elu, "silu": jax.nn.silu}

Numbers = tuple[Array, ...]  # one array per number
Weights = tuple[tuple[Array, ...], ...]  # per layer: matrix [in, out], bias [out]; a Gaussian's last entry: (log_std,)


@dataclass(frozen=True)
class Network(Component):
    """A multilayer perceptron.

    Attributes:
        observation_size: The number of features of an observation.
        hidden: The sizes of the hidden layers.
        activation: The activation of the hidden layers: relu, tanh, elu or silu.
        output_tanh: Whether the outputs are bounded to ±1 by a tanh, as in the paper. In a policy, this bounds the
            action probabilities, too.
    """

    observation_size: int
    hidden: tuple[int, ...] = (16, 16)
    activation: str = "relu"
    output_tanh: bool = False

    def __post_init__(self) -> None:
        for size in self.hidden:
            check_count(self, hidden=size)
        check_choice(self, "activation", self.activation, tuple(ACTIVATIONS))

    @property
    @abstractmethod
    def num_outputs(self) -> int: ...

    @property
    def layer_sizes(self) -> tuple[int, ...]:
        return self.observation_size, *self.hidden, self.num_outputs

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        return [shape for inputs, outputs in pairwise(self.layer_sizes) for shape in ((inputs, outputs), (outputs,))]

    @property
    def dimension(self) -> int:
        """The length of the network's part of θ."""
        return sum(prod(shape) for shape in self._shapes)

    def initial(self, key: Array) -> Array:
        """Draw the initial parameters: weights and biases are uniform in ±1/√(number of the layer's inputs)."""
        bounds = []
        for inputs, outputs in pairwise(self.layer_sizes):
            bounds += (inputs + 1) * outputs * [inputs**-0.5]
        return jax.random.uniform(key, (len(bounds),), minval=-1) * jnp.asarray(bounds)

    def with_last_layer(self, parameters: Array, factor: float) -> Array:
        """The parameters with those of the last layer multiplied by a factor."""
        sizes = [prod(shape) for shape in self._shapes]
        first, end = sum(sizes[:-2]), sum(sizes)
        return parameters.at[first:end].multiply(factor)

    def with_normalized_inputs(self, parameters: Array, mean: Array, std: Array) -> Array:
        """The parameters of a network that does with x what this one does with (x − mean)/std [feature]."""
        matrix_size, bias_size = (prod(shape) for shape in self._shapes[:2])
        matrix = parameters[:matrix_size].reshape(self._shapes[0]) / std[:, None]
        bias = parameters[matrix_size:][:bias_size] - jnp.dot(mean, matrix, precision=jax.lax.Precision.HIGHEST)
        return jnp.concatenate([matrix.reshape(-1), bias, parameters[matrix_size + bias_size :]])

    def unflatten(self, parameters: Array) -> Weights:
        """Split the parameters into the weights [in, out] and biases [out] of the layers."""
        parts, start = [], 0
        for shape in self._shapes:
            parts.append(parameters[start : start + prod(shape)].reshape(shape))
            start += prod(shape)
        return tuple(zip(parts[::2], parts[1::2], strict=True))

    def outputs(self, weights: Weights, observations: Array) -> Array:
        """The network's outputs [..., num_outputs] at observations [..., features]."""
        layers = weights[: len(self.hidden) + 1]
        values = observations
        for index, (matrix, bias) in enumerate(layers):
            values = jnp.dot(values, matrix, precision=jax.lax.Precision.HIGHEST) + bias
            if index < len(self.hidden):
                values = ACTIVATIONS[self.activation](values)
        return jnp.tanh(values) if self.output_tanh else values


@dataclass(frozen=True)
class Critic(Network):
    """The value of an observation: the discounted return that the policy is expected to have from there on."""

    @property
    def num_outputs(self) -> int:
        return 1

    def values(self, weights: Weights, observations: Array) -> Array:
        """The values [...] at observations [..., features]."""
        return self.outputs(weights, observations)[..., 0]


@dataclass(frozen=True)
class Policy(Network):
    """A network whose outputs are the parameters of a distribution over actions."""

    @property
    @abstractmethod
    def noise_size(self) -> int:
        """The number of uniform draws that one action takes."""

    def draw(self, weights: Weights, outputs: Array, noise: Array) -> Array:
        """Draw actions, given the network's outputs and uniform draws `noise` [..., noise_size]."""
        return self.choose(weights, outputs, self.deviates(noise))

    def deviates(self, noise: Array) -> Array:
        """Turn uniform draws [..., noise_size] into the random part of an action; it does not depend on the weights."""
        return noise

    def choose(self, weights: Weights, outputs: Array, deviates: Array) -> Array:
        """Compute actions from the network's outputs and the random part `deviates`."""
        numbers = [tuple(array[..., i] for i in range(array.shape[-1])) for array in (outputs, deviates)]
        return self.actions(self.choose_numbers(weights, *numbers))

    @abstractmethod
    def choose_numbers(self, weights: Any, outputs: Numbers, deviates: Numbers) -> Numbers:
        """The elementwise form of `choose`: all arguments and the result are one array per number."""

    @abstractmethod
    def actions(self, numbers: Numbers) -> Array:
        """Stack one array per number to one array of actions."""

    @abstractmethod
    def log_probability(self, weights: Weights, outputs: Array, actions: Array) -> Array:
        """Compute log π(a|s) [...], given the network's outputs at s."""

    @abstractmethod
    def entropy(self, weights: Weights, outputs: Array) -> Array:
        """The entropy of the distribution over actions [...]."""

    @abstractmethod
    def mode(self, weights: Weights, outputs: Array) -> Array:
        """The most likely action."""


@dataclass(frozen=True)
class CategoricalMLP(Policy):
    """Discrete actions: π(a|s) is the softmax of the outputs."""

    num_actions: int = 2

    @property
    def num_outputs(self) -> int:
        return self.num_actions

    @property
    def noise_size(self) -> int:
        return 1

    def choose_numbers(self, weights: Any, outputs: Numbers, deviates: Numbers) -> Numbers:
        # Inverse transform sampling: the action is the number of cumulated probabilities that the draw exceeds.
        largest = reduce(jnp.maximum, outputs)
        cumulated = list(accumulate(jnp.exp(score - largest) for score in outputs))
        draw = deviates[0] * cumulated[-1]
        passed = ((each <= draw).astype(jnp.int32) for each in cumulated[:-1])
        return (sum(passed, start=jnp.zeros(draw.shape, jnp.int32)),)

    def actions(self, numbers: Numbers) -> Array:
        return numbers[0]

    def log_probability(self, weights: Weights, outputs: Array, actions: Array) -> Array:
        # The gradient of a masked sum is a product; that of a gather would be a scatter, which is slower.
        chosen = jnp.arange(self.num_actions) == actions[..., None]
        return jnp.sum(jnp.where(chosen, outputs, 0), axis=-1) - jax.nn.logsumexp(outputs, axis=-1)

    def entropy(self, weights: Weights, outputs: Array) -> Array:
        logarithms = jax.nn.log_softmax(outputs, axis=-1)
        return -jnp.sum(jnp.exp(logarithms) * logarithms, axis=-1)

    def mode(self, weights: Weights, outputs: Array) -> Array:
        return jnp.argmax(outputs, axis=-1).astype(jnp.int32)


@dataclass(frozen=True)
class GaussianMLP(Policy):
    """Continuous actions: independent normals around the outputs, with log standard deviations that are part of θ.

    Attributes:
        action_size: The number of numbers per action.
        initial_log_std: The log standard deviation of every number in θ_0.
    """

    action_size: int = 1
    initial_log_std: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_finite(self, initial_log_std=self.initial_log_std)

    @property
    def num_outputs(self) -> int:
        return self.action_size

    @property
    def noise_size(self) -> int:
        return self.action_size

    @property
    def dimension(self) -> int:
        return super().dimension + self.action_size

    def initial(self, key: Array) -> Array:
        return self.with_log_std(super().initial(key))

    def with_log_std(self, network: Array) -> Array:
        """Append the initial log standard deviations to the parameters of a network, which gives θ_0 [d]."""
        return jnp.append(network, jnp.full(self.action_size, self.initial_log_std))

    def unflatten(self, parameters: Array) -> Weights:
        return (*super().unflatten(parameters), (parameters[-self.action_size :],))

    def deviates(self, noise: Array) -> Array:
        # A uniform draw can be 0, where the inverse of the normal distribution function is −∞.
        return ndtri(jnp.maximum(noise, 2.0**-24))

    def choose_numbers(self, weights: Any, outputs: Numbers, deviates: Numbers) -> Numbers:
        pairs = enumerate(zip(outputs, deviates, strict=True))
        return tuple(mean + jnp.exp(weights[-1][0][i]) * deviate for i, (mean, deviate) in pairs)

    def actions(self, numbers: Numbers) -> Array:
        return jnp.stack(numbers, axis=-1)

    def log_probability(self, weights: Weights, outputs: Array, actions: Array) -> Array:
        log_std = weights[-1][0]
        standardised = (actions - outputs) * jnp.exp(-log_std)
        return -jnp.sum(0.5 * jnp.square(standardised) + log_std + 0.5 * log(2 * pi), axis=-1)

    def entropy(self, weights: Weights, outputs: Array) -> Array:
        return jnp.broadcast_to(jnp.sum(weights[-1][0] + 0.5 * log(2 * pi * e)), outputs.shape[:-1])

    def mode(self, weights: Weights, outputs: Array) -> Array:
        return outputs


def policy_for(kind: str, observation_size: int, action_space: Space, **network: Any) -> Policy:
    """Make the policy of a task.

    Args:
        kind: "categorical", "gaussian", or "auto", which chooses by the action space.
        observation_size: The number of features of the task's observations.
        action_space: The task's action space.
        **network: Options of `Policy`, such as `hidden`.
    """
    fitting = "categorical" if isinstance(action_space, Discrete) else "gaussian"
    if kind not in ("auto", "categorical", "gaussian"):
        raise ValueError(f"policy must be auto, categorical or gaussian; got {kind!r}.")
    if kind not in ("auto", fitting):
        raise ValueError(f"policy = {kind} does not fit {action_space}: use policy = {fitting} (or auto).")
    if isinstance(action_space, Discrete):
        return CategoricalMLP(observation_size, num_actions=action_space.num_actions, **network)
    return GaussianMLP(observation_size, action_size=action_space.size, **network)
