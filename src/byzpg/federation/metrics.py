"""What a run records: one value per seed and iteration, under the names below."""

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleMetrics:
    """What the honest players sampled in one iteration, per seed."""

    return_mean: Array  # undiscounted training return; of PPO, of the last episode that ended in each environment
    return_std: Array  # over episodes
    episodes: Array  # that ended, mean over players
    environment_steps: Array  # taken by all players together
    largest_weight: Array  # max ω of whole episodes, before the cap; this and the next two are perfect in large batches
    effective_sample: Array  # (Σω)²/(BΣω²) after the cap, mean over players
    capped: Array  # fraction of ω above the cap


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExchangeMetrics:
    """What the round of gradients did, per seed, averaged over honest receivers; NaN where there was none."""

    aggregation_error: Array  # ‖v − honest mean of ṽ‖²
    honest_variance: Array  # of ṽ; aggregation_error over this is C_ra · α
    gradient_diameter: Array  # of honest ṽ
    honest_weight: Array  # total weight of honest senders; NaN for rules without weights
    byzantine_weight: Array

    @classmethod
    def none(cls, num_seeds: int) -> "ExchangeMetrics":
        return cls(*(jnp.full(num_seeds, jnp.nan) for _ in fields(cls)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics(SampleMetrics, ExchangeMetrics):
    """All metrics of one iteration."""

    diameter_before: Array  # of honest θ̃, before agreement; NaN where there is none
    diameter_after: Array
    gradient_squared: Array  # ‖∇J(θ_t)‖², exact, mean over honest holders of parameters; NaN unless the task has it


METRICS = tuple(field.name for field in fields(Metrics))
