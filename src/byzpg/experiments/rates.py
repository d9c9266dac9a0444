"""How many trajectories the theorems' goal takes: the mean of ‖∇J(θ_t)‖² over the iterations so far is at most ε².

The task is `AliasedStates-v1`, on which ∇J is computed exactly inside the simulator. Every method chooses its batch
sizes and its step size for every ε on tuning seeds, and is measured on other ones. The choice is only among settings
that learn: at large steps, importance weights can throw a policy onto the plateau of deterministic policies, where ∇J
vanishes as well.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from math import inf, sqrt
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np

from byzpg import envs
from byzpg._files import write_atomically
from byzpg.config import REPORTED_SEED, Config, Settings
from byzpg.experiments.paper import run_name
from byzpg.experiments.statistics import bootstrap_interval
from byzpg.experiments.summaries import Estimate
from byzpg.runs import Run, RunDirectory

TASK = "AliasedStates-v1"
EPSILONS = (0.24, 0.17, 0.12, 0.085, 0.06, 0.042, 0.03)
STEP_SIZES = (0.06, 0.12, 0.25, 0.5, 1.0)
TUNING_SEED, TUNING_SEEDS = 100, 4  # reported seeds start from REPORTED_SEED
ROUNDS = (0, 1, 2, 3, 4, 6, 8)  # κ
# Slopes that theory predicts for trajectories against ε, by whether p = 1 or PAGE.
SLOPES = {False: -4.0, True: -3.0}
# A setting learns if the return of its worst seed at the end has come this share of the way from the uniform policy to
# the best one.
LEARNED = 0.8
# Points of trajectories at which running means are kept.
NUM_POINTS = 240
RESAMPLES = 1000
FORMAT = 1


@dataclass(frozen=True)
class Method:
    """A line of the figure: who learns, with which batches to choose from."""

    label: str
    algorithm: str
    num_agents: int
    page: bool  # PAGE, or large batches alone
    batches: tuple[tuple[int, int], ...]  # (N, B)
    iterations: int = 1500
    num_byzantine: int = 0
    step_sizes: tuple[float, ...] = STEP_SIZES
    like: str = ""  # the label of a method with the same law for batches NK and BK, whose choice it takes over

    def settings(self, batch: tuple[int, int], step_size: float, seed: int, num_seeds: int) -> Settings:
        """One setting of this method; p = B/(N + B) spends as many trajectories on large batches as on small ones."""
        large, small = batch
        probability = small / (large + small) if self.page else 1.0
        per_iteration = probability * large + (1 - probability) * small
        return federation(
            algorithm=self.algorithm,
            num_agents=self.num_agents,
            num_byzantine=self.num_byzantine,
            large_batch=large,
            small_batch=small if self.page else 1,
            switch_probability=probability,
            step_size=step_size,
            seed=seed,
            num_seeds=num_seeds,
            trajectories=round(self.iterations * per_iteration),
        )

    def candidates(self) -> Iterable[Settings]:
        """The settings that tuning tries."""
        for batch, step_size in product(self.batches, self.step_sizes):
            yield self.settings(batch, step_size, TUNING_SEED, TUNING_SEEDS)


def federation(**options: Any) -> Settings:
    """What all runs share: plain SGD, GPOMDP without a baseline, a policy that is a table, and the exact mean at f = 0."""
    robust = options["algorithm"] in ("ByzPG", "DecByzPG")
    if options["algorithm"] == "DecByzPG":
        options.setdefault("rounds", 3)
    if robust:
        options["aggregator"] = "NNM(TrimmedMean())"
    return Config(
        env=TASK,
        preset="paper",
        optimizer="sgd",
        discount=1.0,
        hidden=(),
        output_tanh=False,
        **{"attack": "ALIE", **options},
    ).resolved()


ALONE = ((64, 1), (256, 1), (1024, 1))
ALONE_PAGE = ((256, 32), (1024, 32), (1024, 64), (4096, 64))


def _shared_out(batches: Sequence[tuple[int, int]], num_agents: int) -> tuple[tuple[int, int], ...]:
    return tuple((large // num_agents, max(1, small // num_agents)) for large, small in batches)


# Averages of K agents with batches N and B have the law of one agent with NK and BK.
METHODS = (
    Method("p = 1, K = 1", "PAGE-PG", 1, False, ALONE, 1000),
    Method("p = 1, K = 4", "ByzPG", 4, False, _shared_out(ALONE, 4), 1000, like="p = 1, K = 1"),
    Method("p = 1, K = 16", "ByzPG", 16, False, _shared_out(ALONE, 16), 1000, like="p = 1, K = 1"),
    Method("PAGE, K = 1", "PAGE-PG", 1, True, ALONE_PAGE),
    Method("PAGE, K = 4, all agents", "DecByzPG", 4, True, _shared_out(ALONE_PAGE, 4), like="PAGE, K = 1"),
    Method("PAGE, K = 16, all agents", "DecByzPG", 16, True, _shared_out(ALONE_PAGE, 16), like="PAGE, K = 1"),
    Method("PAGE, K = 4, server alone", "ByzPG", 4, True, ((64, 16), (256, 32), (1024, 64))),
    Method("PAGE, K = 16, server alone", "ByzPG", 16, True, ((16, 8), (64, 16), (256, 32))),
)
