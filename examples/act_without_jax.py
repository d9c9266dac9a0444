"""Act with an exported policy: NumPy and Gymnasium are enough, and neither JAX nor byzpg is needed.

    byzpg export runs/CartPole-v1-DecByzPPO-AvgZero-1 --format numpy
    python examples/act_without_jax.py runs/CartPole-v1-DecByzPPO-AvgZero-1/policy.npz

Needs `pip install 'gymnasium[classic-control]'`.
"""

import json
import sys
from typing import Any

import gymnasium
import numpy as np

ACTIVATIONS = {
    "identity": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "tanh": np.tanh,
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "silu": lambda x: x * (1 + np.tanh(x / 2)) / 2,
}


def act(
    policy: dict[str, np.ndarray], about: dict[str, Any], observation: np.ndarray, rng: np.random.Generator | None
) -> np.ndarray:
    """Draw an action as in training, or without a generator take the most likely one, which can be far worse."""
    values = np.asarray(observation, np.float32)
    for layer, activation in enumerate(about["activations"]):
        values = ACTIVATIONS[activation](values @ policy[f"weight_{layer}"] + policy[f"bias_{layer}"])
    if about["policy"] == "categorical":
        if rng is not None:  # the largest logit with Gumbel noise has the probabilities of the softmax
            values = values + rng.gumbel(size=values.shape)
        return np.argmax(values, axis=-1)
    if rng is not None:
        values = values + np.exp(policy["log_std"]) * rng.normal(size=values.shape)
    return np.clip(values, about["action_low"], about["action_high"])


if __name__ == "__main__":
    policy = dict(np.load(sys.argv[1]))
    about = json.loads(str(policy["about"]))
    env = gymnasium.make(about["task"].removeprefix("gymnasium:"))
    for name, rng in {"sampled": np.random.default_rng(0), "greedy": None}.items():
        observation, _ = env.reset(seed=0)
        total, ended = 0.0, False
        while not ended:
            observation, reward, terminated, truncated, _ = env.step(act(policy, about, observation, rng))
            total, ended = total + float(reward), terminated or truncated
        print(f"{about['task']}, {name}: return {total:.1f}")
