"""The quirks of the script that the paper's authors published, as `Conventions` for a run.

The script seeds PyTorch and NumPy with 0 before it creates each agent, whatever the seed of the run. So all its runs
start from one θ_0 and toss one coin, and the seed only affects the environments. The correction of a small batch refers
to the parameters after the agent's own step and to the agent's own estimate, instead of θ_t and the aggregate. The
preset "script" uses all three quirks; docs/concepts/method.md explains how they were found.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
from jax import Array

from byzpg.federation.schedule import CommonCoin, Conventions, Paper
from byzpg.learning.policies import MLP, GaussianMLP, Policy


@dataclass(frozen=True)
class AuthorsScript(Conventions):
    """The published script: one θ_0 and one coin for all seeds, and a correction that refers to θ̃_{t+1} and ṽ_t.

    A switch that is off follows the paper instead.

    Attributes:
        initialization: Whether all seeds start from the script's θ_0.
        coin: Whether all seeds toss the script's coin.
        memory: Whether the correction refers to θ̃_{t+1} and ṽ_t.
    """

    initialization: bool = True
    coin: bool = True
    memory: bool = True

    @property
    def shared(self) -> tuple[str, str]:
        start, coin = Paper().shared
        return "script" if self.initialization else start, "script" if self.coin else coin

    @property
    def uses_realized_direction(self) -> bool:
        return not self.memory

    def initial_parameters(self, policy: Policy, key: Array) -> Array:
        if not self.initialization:
            return Paper().initial_parameters(policy, key)
        if not isinstance(policy, MLP):
            raise ValueError(
                f"{self} starts from the parameters of the script's own network: use "
                "conventions = 'AuthorsScript(initialization=False)' with a network of your own."
            )
        parameters = jnp.asarray(first_parameters(policy.layer_sizes))
        if isinstance(policy, GaussianMLP):
            parameters = policy.with_log_std(parameters)
        return parameters

    def tosses(self, coin: CommonCoin, switch_probability: float) -> Iterator[bool]:
        return tosses(switch_probability) if self.coin else Paper().tosses(coin, switch_probability)

    def remembered(self, *, before: Array, moved: Array, own: Array, aggregated: Array) -> tuple[Array, Array]:
        return (moved, own) if self.memory else (before, aggregated)


def first_parameters(sizes: tuple[int, ...]) -> np.ndarray:
    """The script's θ_0 [d] for layers of these sizes: per layer the weights [in, out], then the biases.

    PyTorch and NumPy seed the Mersenne Twister in the same way. PyTorch takes its uniform numbers from the low 24 bits.
    """
    generator = np.random.RandomState(0)

    def uniform(count: int, bound: float) -> np.ndarray:
        bits = generator.randint(0, 2**32, size=count, dtype=np.uint32) & 0xFFFFFF
        return (bound * (2 * bits / 2**24 - 1)).astype(np.float32)

    layers = list(pairwise(sizes))
    for inputs, outputs in layers:  # PyTorch's initial weights, which the script overwrites
        uniform((inputs + 1) * outputs, 1)
    parts = []
    for inputs, outputs in layers:
        matrix = uniform(outputs * inputs, inputs**-0.5).reshape(outputs, inputs)
        parts += [matrix.T.ravel(), uniform(outputs, outputs**-0.5)]
    return np.concatenate(parts)


def tosses(switch_probability: float) -> Iterator[bool]:
    """Whether each iteration samples the large batch, by the script's coin.

    In the script, an attack that draws noise shifts this sequence; that is not reproduced.
    """
    generator = np.random.RandomState(0)
    yield True
    while True:
        yield bool(generator.random_sample() < switch_probability)
