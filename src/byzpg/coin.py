"""The common coin: every agent tosses it alone, on the host, without a message, and all see the same side.

It is a pseudorandom function keyed by the first parameters θ_0, which all agents share, of a label and an iteration;
Byzantine agents can compute it as well. The bytes hashed are part of the protocol: to change them, change TAG.
"""

import hmac
from dataclasses import dataclass
from hashlib import sha256
from typing import Self

import numpy as np

from byzpg.components import Vectors, check_count

TAG = b"byzpg common coin 1"


@dataclass(frozen=True)
class CommonCoin:
    """uniform(label, i) = HMAC-SHA256(key, label, i) / 2²⁵⁶, to 53 bits."""

    key: bytes

    def __post_init__(self) -> None:
        if len(self.key) != 32:
            raise ValueError(f"CommonCoin: key must be 32 bytes, got {len(self.key)}.")

    @classmethod
    def of(cls, parameters: Vectors) -> Self:
        """The coin of θ_0 [d]: key = SHA-256(TAG, d, θ_0), d as 8 bytes, θ_0 as float32, both little-endian."""
        values = np.asarray(parameters)
        if values.ndim != 1:
            raise ValueError(f"CommonCoin: parameters must have one axis [d], got shape {values.shape}.")
        return cls(sha256(TAG + _eight_bytes(len(values)) + values.astype("<f4").tobytes()).digest())

    def uniform(self, label: str, index: int) -> float:
        """A number in [0, 1) that depends on the key, the label and the index, and on nothing else."""
        # The index has a fixed length, so no two pairs make one message.
        digest = hmac.digest(self.key, label.encode() + _eight_bytes(index), "sha256")
        return (int.from_bytes(digest[:8], "big") >> 11) / 2**53

    def is_large(self, iteration: int, switch_probability: float) -> bool:
        """Whether an iteration samples the large batch: the first one always, any other with probability p."""
        # Where p = 1 there is nothing to toss for, and a long run has very many iterations.
        return iteration == 0 or switch_probability == 1 or self.uniform("large batch", iteration) < switch_probability

    def output_iteration(self, num_iterations: int) -> int:
        """The iteration T̂ whose parameters are the result: uniform in 0 to num_iterations − 1."""
        check_count(self, num_iterations=num_iterations)
        return int(self.uniform("output", num_iterations) * num_iterations)


def _eight_bytes(count: int) -> bytes:
    return count.to_bytes(8, "little")
