"""The published figures as numbers, and the random numbers behind them.

The published script seeds PyTorch and NumPy with 0 before every agent is made, whatever the seed of the run. So all its
runs start from one θ_0 and toss one coin; the seed only moves the environments.
"""

import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

import numpy as np


@cache
def _all_curves() -> dict[str, Any]:
    return json.loads((files("byzpg") / "published_curves.json").read_text())


def curves(figure: str, panel: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By method, the mean curve of a panel of the paper: trajectories per agent, and return where it can be seen.

    Read off the plots (arXiv 2401.03489); an error of about ±3 on CartPole, ±2 on LunarLander.
    """
    found = {}
    for method, curve in _all_curves()[figure][panel].items():
        trajectories, returns = (np.asarray(curve[axis], float) for axis in "xy")
        seen = np.isfinite(returns)
        found[method.replace("alpha", "α")] = trajectories[seen], returns[seen]
    return found


def first_parameters(sizes: tuple[int, ...]) -> np.ndarray:
    """θ_0 [d] of a network with layers of these sizes: per layer the weights [in, out], then the biases.

    Both PyTorch and NumPy seed the Mersenne Twister in the same way; PyTorch's uniform numbers are its low 24 bits.
    """
    generator = np.random.RandomState(0)

    def uniform(count: int, bound: float) -> np.ndarray:
        bits = generator.randint(0, 2**32, size=count, dtype=np.uint32) & 0xFFFFFF
        return (bound * (2 * bits / 2**24 - 1)).astype(np.float32)

    layers = list(pairwise(sizes))
    for inputs, outputs in layers:  # PyTorch's own first weights, which the script overwrites
        uniform((inputs + 1) * outputs, 1)
    parts = []
    for inputs, outputs in layers:
        matrix = uniform(outputs * inputs, inputs**-0.5).reshape(outputs, inputs)
        parts += [matrix.T.ravel(), uniform(outputs, outputs**-0.5)]
    return np.concatenate(parts)


def tosses(switch_probability: float) -> Iterator[bool]:
    """Whether each iteration samples the large batch. Attacks that draw noise there would shift the sequence."""
    generator = np.random.RandomState(0)
    yield True
    while True:
        yield bool(generator.random_sample() < switch_probability)
