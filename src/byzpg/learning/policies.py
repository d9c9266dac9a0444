"""Policies π_θ(a|s) and critics: networks over one flat float32 vector θ [d].

A policy is a network, the built-in `MLP` or an `OwnNetwork`, with a head: `Categorical` or `Gaussian`. `unflatten`
turns θ into weights. All other functions take the weights, so that a rollout does not slice θ at every step. Functions
are written for one θ and observations [..., features]; callers `vmap` over agents.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate, pairwise
from math import e, log, pi, prod
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import ndtri

from byzpg import networks
from byzpg.envs.spaces import Discrete, Space
from byzpg.robust.components import Component, check_choice, check_count, check_finite

ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh, "elu": jax.nn.elu, "silu": jax.nn.silu}

Numbers = tuple[Array, ...]  # one array per number
# Of an MLP, per layer: matrix [in, out], bias [out]. Of an own network: its parameters. A Gaussian's last: (log_std,).
Weights = tuple[Any, ...]


def _split(parameters: Array, sizes: list[int]) -> list[Array]:
    """Split parameters [d] into consecutive parts of these sizes, and leave out what follows.

    The gradient of a slice is as long as what it is a slice of, and they would all be added. That of a split is one
    concatenation.
    """
    return jnp.split(parameters, list(accumulate(sizes)))[:-1]


@dataclass(frozen=True)
class Model(Component):
    """A network over θ [d].

    Attributes:
        observation_size: The number of features of an observation.
    """

    observation_size: int

    @property
    @abstractmethod
    def num_outputs(self) -> int: ...

    @property
    @abstractmethod
    def dimension(self) -> int:
        """The length of the network's part of θ."""

    @abstractmethod
    def initial(self, key: Array) -> Array:
        """Draw the initial parameters."""

    @abstractmethod
    def unflatten(self, parameters: Array) -> Weights:
        """Split the parameters into weights."""

    @abstractmethod
    def outputs(self, weights: Weights, observations: Array) -> Array:
        """The network's outputs [..., num_outputs] at observations [..., features]."""

    @abstractmethod
    def critic(self) -> "Critic":
        """The critic with the same network, which has one output."""

    @abstractmethod
    def with_last_layer(self, parameters: Array, factor: float) -> Array:
        """The parameters with those of the last layer multiplied by a factor, if it is known which these are."""

    @abstractmethod
    def with_normalized_inputs(self, parameters: Array, mean: Array, std: Array) -> Array:
        """The parameters of `normalizing()`, which does with x what this does with (x − mean)/std [feature]."""

    @abstractmethod
    def normalizing(self) -> Self:
        """The network of `with_normalized_inputs`."""


@dataclass(frozen=True)
class MLP(Model):
    """A multilayer perceptron.

    Attributes:
        hidden: The sizes of the hidden layers.
        activation: The activation of the hidden layers: relu, tanh, elu or silu.
        output_tanh: Whether the outputs are bounded to ±1 by a tanh, as in the paper. In a policy, this bounds the
            action probabilities, too.
    """

    hidden: tuple[int, ...] = (16, 16)
    activation: str = "relu"
    output_tanh: bool = False

    def __post_init__(self) -> None:
        for size in self.hidden:
            check_count(self, hidden=size)
        check_choice(self, "activation", self.activation, tuple(ACTIVATIONS))

    @property
    def layer_sizes(self) -> tuple[int, ...]:
        return self.observation_size, *self.hidden, self.num_outputs

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        return [shape for inputs, outputs in pairwise(self.layer_sizes) for shape in ((inputs, outputs), (outputs,))]

    @property
    def dimension(self) -> int:
        return sum(prod(shape) for shape in self._shapes)

    def initial(self, key: Array) -> Array:
        """Draw the initial parameters: weights and biases are uniform in ±1/√(number of the layer's inputs)."""
        bounds = []
        for inputs, outputs in pairwise(self.layer_sizes):
            bounds += (inputs + 1) * outputs * [inputs**-0.5]
        return jax.random.uniform(key, (len(bounds),), minval=-1) * jnp.asarray(bounds)

    def with_last_layer(self, parameters: Array, factor: float) -> Array:
        sizes = [prod(shape) for shape in self._shapes]
        first, end = sum(sizes[:-2]), sum(sizes)
        return parameters.at[first:end].multiply(factor)

    def with_normalized_inputs(self, parameters: Array, mean: Array, std: Array) -> Array:
        matrix_size, bias_size = (prod(shape) for shape in self._shapes[:2])
        matrix = parameters[:matrix_size].reshape(self._shapes[0]) / std[:, None]
        bias = parameters[matrix_size:][:bias_size] - jnp.dot(mean, matrix, precision=jax.lax.Precision.HIGHEST)
        return jnp.concatenate([matrix.reshape(-1), bias, parameters[matrix_size + bias_size :]])

    def unflatten(self, parameters: Array) -> Weights:
        """Split the parameters into the weights [in, out] and biases [out] of the layers."""
        parts = _split(parameters, [prod(shape) for shape in self._shapes])
        shaped = [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        return tuple(zip(shaped[::2], shaped[1::2], strict=True))

    def outputs(self, weights: Weights, observations: Array) -> Array:
        layers = weights[: len(self.hidden) + 1]
        values = observations
        for index, (matrix, bias) in enumerate(layers):
            values = jnp.dot(values, matrix, precision=jax.lax.Precision.HIGHEST) + bias
            if index < len(self.hidden):
                values = ACTIVATIONS[self.activation](values)
        return jnp.tanh(values) if self.output_tanh else values

    def critic(self) -> "Critic":
        return CriticMLP(self.observation_size, self.hidden, self.activation)

    def normalizing(self) -> Self:
        return self  # the first layer is linear


@dataclass(frozen=True)
class OwnNetwork(Model):
    """A network of the user's own; its part of θ is its parameters in the order of `jax.tree.leaves`.

    Attributes:
        network: The network.
        normalizes: Whether the network sees (x − mean)/std in place of an observation x. The means and the standard
            deviations [feature] then follow its parameters in θ.
    """

    network: networks.Network
    normalizes: bool = False

    def __post_init__(self) -> None:
        networks.check(self.network)
        networks.parameter_shapes(self.network, self.observation_size, self.num_outputs)

    @property
    def _shapes(self) -> Any:
        return networks.parameter_shapes(self.network, self.observation_size, self.num_outputs)

    @property
    def _size(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self._shapes))

    @property
    def dimension(self) -> int:
        return self._size + (2 * self.observation_size if self.normalizes else 0)

    def initial(self, key: Array) -> Array:
        """Draw the initial parameters by the network's own `init`."""
        drawn = networks.drawn(self.network, key, self.observation_size, self.num_outputs)
        return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(drawn)])

    def with_last_layer(self, parameters: Array, factor: float) -> Array:
        return parameters

    def with_normalized_inputs(self, parameters: Array, mean: Array, std: Array) -> Array:
        return jnp.concatenate([parameters[: self._size], mean, std, parameters[self._size :]])

    def normalizing(self) -> Self:
        return replace(self, normalizes=True)

    def critic(self) -> "Critic":
        return CriticNetwork(self.observation_size, self.network)

    def unflatten(self, parameters: Array) -> Weights:
        """Split the parameters into the pytree that the network takes and, if it normalizes, means and deviations."""
        leaves, structure = jax.tree.flatten(self._shapes)
        statistics = 2 * [self.observation_size] if self.normalizes else []
        parts = _split(parameters, [leaf.size for leaf in leaves] + statistics)
        shaped = (part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=False))
        tree = jax.tree.unflatten(structure, shaped)
        return (tree, tuple(parts[-2:])) if self.normalizes else (tree,)

    def outputs(self, weights: Weights, observations: Array) -> Array:
        if self.normalizes:
            mean, std = weights[1]
            observations = (observations - mean) / std
        return networks.outputs(self.network, weights[0], observations, self.num_outputs)


@dataclass(frozen=True)
class Critic(Model):
    """The value of an observation: the discounted return that the policy is expected to have from there on."""

    @property
    def num_outputs(self) -> int:
        return 1

    def values(self, weights: Weights, observations: Array) -> Array:
        """The values [...] at observations [..., features]."""
        return self.outputs(weights, observations)[..., 0]


@dataclass(frozen=True)
class CriticMLP(Critic, MLP):
    """A critic that is a multilayer perceptron."""


@dataclass(frozen=True)
class CriticNetwork(Critic, OwnNetwork):
    """A critic that is a network of the user's own."""

    def __post_init__(self) -> None:
        if not self.network.has_any_size:
            raise ValueError(
                f"{self.network} cannot have one output, as a critic: let its init take num_outputs, or use an "
                "algorithm without a critic, such as DecByzPG."
            )
        super().__post_init__()


@dataclass(frozen=True)
class Policy(Model):
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
class Categorical(Policy):
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
class Gaussian(Policy):
    """Continuous actions: independent normals around the outputs, with log standard deviations that are part of θ.

    Attributes:
        action_size: The number of numbers per action.
        initial_log_std: The log standard deviation of every number in θ_0.
    """

    action_size: int = 1
    initial_log_std: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()  # pyright: ignore[reportAttributeAccessIssue]
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
        network, log_std = _split(parameters, [super().dimension, self.action_size])
        return (*super().unflatten(network), (log_std,))

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


@dataclass(frozen=True)
class CategoricalMLP(Categorical, MLP):
    """Discrete actions, and a multilayer perceptron."""


@dataclass(frozen=True)
class GaussianMLP(Gaussian, MLP):
    """Continuous actions, and a multilayer perceptron."""


@dataclass(frozen=True)
class CategoricalNetwork(Categorical, OwnNetwork):
    """Discrete actions, and a network of the user's own."""


@dataclass(frozen=True)
class GaussianNetwork(Gaussian, OwnNetwork):
    """Continuous actions, and a network of the user's own."""


def policy_for(kind: str | networks.Network, observation_size: int, action_space: Space, **options: Any) -> Policy:
    """Make the policy of a task.

    Args:
        kind: "categorical", "gaussian", or "auto", which chooses by the action space; or a network of your own.
        observation_size: The number of features of the task's observations.
        action_space: The task's action space.
        **options: Options of `MLP`, such as `hidden`.
    """
    if isinstance(kind, networks.Network):
        if isinstance(action_space, Discrete):
            return CategoricalNetwork(observation_size, kind, num_actions=action_space.num_actions)
        return GaussianNetwork(observation_size, kind, action_size=action_space.size)
    fitting = "categorical" if isinstance(action_space, Discrete) else "gaussian"
    if kind not in ("auto", "categorical", "gaussian"):
        raise ValueError(f"policy must be auto, categorical or gaussian; got {kind!r}.")
    if kind not in ("auto", fitting):
        raise ValueError(f"policy = {kind} does not fit {action_space}: use policy = {fitting} (or auto).")
    if isinstance(action_space, Discrete):
        return CategoricalMLP(observation_size, num_actions=action_space.num_actions, **options)
    return GaussianMLP(observation_size, action_size=action_space.size, **options)
