"""How many trajectories the theorems' goal takes: the mean of ‖∇J(θ_t)‖² over the iterations so far is at most ε².

The task is `AliasedStates-v1`, on which ∇J is computed exactly inside the simulator. Every method chooses its batch
sizes and its step size for every ε on tuning seeds, and is measured on other ones. The choice is only among settings
that learn: at large steps, importance weights can throw a policy onto the plateau of deterministic policies, where ∇J
vanishes as well.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf, sqrt
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from byzpg import envs
from byzpg.config import Config, Settings
from byzpg.experiments.paper import run_name
from byzpg.experiments.results import reading_archive, write_archive
from byzpg.experiments.summaries import Estimate
from byzpg.federation.agents import AgentState
from byzpg.federation.simulator import LARGE
from byzpg.learning.gradients import GPOMDP, ImportanceWeights
from byzpg.runs import Run, RunDirectory
from byzpg.training import simulation_of

TASK = "AliasedStates-v1"
EPSILONS = (0.24, 0.17, 0.12, 0.085, 0.06, 0.042)
STEP_SIZES = (0.12, 0.25, 0.5)
# Settings are chosen on these seeds; reported ones start from `config.REPORTED_SEED`. Few seeds would not do: with the
# heavy tails of importance weights, a step size that is too large looks fast on most of them.
TUNING_SEED, TUNING_SEEDS = 100, 12
NUM_SEEDS = 10
# A setting learns if the return of its worst seed at the end has come this share of the way from the uniform policy to
# the best one.
LEARNED = 0.8
# A setting is chosen for ε only if tuning reaches ε in this share of its trajectories: there is room for worse seeds.
ROOM = 1 / 2
# Points of trajectories at which running means are kept; two neighbours are about 2 % apart.
NUM_POINTS = 400
RESAMPLES = 1000
FORMAT = 1


@dataclass(frozen=True)
class Method:
    """A line of the figure: who learns, and the batches it may choose from."""

    label: str
    algorithm: str
    num_agents: int
    page: bool  # PAGE, or large batches alone
    batches: tuple[tuple[int, int], ...]  # (N, B)
    iterations: int = 1500  # with the largest batch; large batches alone, if smaller, need more and smaller steps
    num_byzantine: int = 0
    step_sizes: tuple[float, ...] = STEP_SIZES
    like: str = ""  # a method whose averages have the same law, so that its choice serves here as well

    @property
    def slope(self) -> float:
        """The slope of trajectories against ε on log-log axes, by theory."""
        return -3.0 if self.page else -4.0

    def settings(self, batch: tuple[int, int], step_size: float) -> Settings:
        """One setting of this method, on the tuning seeds.

        With p = B/(N + B), as many trajectories are spent on large batches as on small ones.
        """
        large, small = batch
        probability = small / (large + small) if self.page else 1.0
        longer = 1.0 if self.page else sqrt(max(self.batches)[0] / large)
        options: dict[str, Any] = {"rounds": 3} if self.algorithm == "DecByzPG" else {}
        return federation(
            algorithm=self.algorithm,
            num_agents=self.num_agents,
            num_byzantine=self.num_byzantine,
            large_batch=large,
            small_batch=small if self.page else 1,
            switch_probability=probability,
            step_size=step_size,
            trajectories=round(longer * self.iterations * (probability * large + (1 - probability) * small)),
            **options,
        )

    def candidates(self) -> list[Settings]:
        """The settings that tuning tries; for a method like another one, one for each of the other's."""
        return [self.settings(batch, step_size) for batch, step_size in product(self.batches, self.step_sizes)]


def federation(**options: Any) -> Settings:
    """What all runs have in common: plain SGD, GPOMDP without a baseline, a policy that is a table.

    The rule is the exact mean at f = 0, as the theorems ask.
    """
    if options["algorithm"] in ("ByzPG", "DecByzPG"):
        options["aggregator"] = "NNM(TrimmedMean())"
    shared: dict[str, Any] = {"discount": 1.0, "hidden": (), "output_tanh": False, "attack": "ALIE"}
    shared |= {"seed": TUNING_SEED, "num_seeds": TUNING_SEEDS}
    return Config(env=TASK, preset="paper", optimizer="sgd", **(shared | options)).resolved()


def _divided(batches: Sequence[tuple[int, int]], num_agents: int) -> tuple[tuple[int, int], ...]:
    return tuple((large // num_agents, max(1, small // num_agents)) for large, small in batches)


ALONE = ((64, 1), (256, 1), (1024, 1))
ALONE_PAGE = ((64, 16), (256, 64), (1024, 64), (4096, 128))
# For α > 0: large batches alone, all agents, the server alone.
ATTACKED, ATTACKED_PAGE, ATTACKED_SERVER = ((16, 1), (64, 1)), ((64, 4), (256, 8)), ((64, 16), (256, 32))
ATTACKERS = {"1/8": (16, 2), "3/13": (13, 3)}  # α: K and f


def _attacked(share: str) -> tuple[Method, ...]:
    num_agents, num_byzantine = ATTACKERS[share]

    def method(algorithm: str, name: str, page: bool, batches: tuple[tuple[int, int], ...], like: str = "") -> Method:
        label = f"{algorithm}, {name}, α = {share}"
        return Method(label, algorithm, num_agents, page, batches, 600, num_byzantine, like=like)

    return (
        method("ByzPG", "p = 1", False, ATTACKED),
        # ALIE sends the same to all, so that all agents do what a server would.
        method("DecByzPG", "p = 1", False, ATTACKED, like=f"ByzPG, p = 1, α = {share}"),
        method("ByzPG", "PAGE", True, ATTACKED_SERVER),
        method("DecByzPG", "PAGE", True, ATTACKED_PAGE),
    )


# The mean over K agents with batches N and B has the law of one agent with batches NK and BK.
METHODS = (
    Method("p = 1, K = 1", "PAGE-PG", 1, False, ALONE, 800),
    Method("p = 1, K = 4", "ByzPG", 4, False, _divided(ALONE, 4), 800, like="p = 1, K = 1"),
    Method("p = 1, K = 16", "ByzPG", 16, False, _divided(ALONE, 16), 800, like="p = 1, K = 1"),
    Method("PAGE, K = 1", "PAGE-PG", 1, True, ALONE_PAGE),
    Method("PAGE, K = 4, all agents", "DecByzPG", 4, True, _divided(ALONE_PAGE, 4), like="PAGE, K = 1"),
    Method("PAGE, K = 16, all agents", "DecByzPG", 16, True, _divided(ALONE_PAGE, 16), like="PAGE, K = 1"),
    Method("PAGE, K = 4, server alone", "ByzPG", 4, True, ((64, 16), (256, 32), (256, 64))),
    Method("PAGE, K = 16, server alone", "ByzPG", 16, True, ((16, 8), (64, 16), (256, 32), (256, 64))),
    *_attacked("1/8"),
    *_attacked("3/13"),
)
# Rounds of agreement κ, and the federation that is measured with them.
ROUNDS = (0, 1, 2, 3, 4, 6, 8)
AGREEING: dict[str, Any] = {
    "algorithm": "DecByzPG",
    "num_agents": 13,
    "num_byzantine": 3,
    "attack": "Equivocate",
    "large_batch": 64,
    "small_batch": 1,
    "switch_probability": 1.0,
    "step_size": 0.5,
    "trajectories": 64 * 200,
}


@dataclass(frozen=True)
class Scope:
    """How much of the experiment is run."""

    seed: int
    num_seeds: int = NUM_SEEDS
    methods: tuple[Method, ...] = METHODS
    rounds: tuple[int, ...] = ROUNDS

    def __post_init__(self) -> None:
        tuning = set(range(TUNING_SEED, TUNING_SEED + TUNING_SEEDS))
        if tuning & set(range(self.seed, self.seed + self.num_seeds)):
            raise ValueError(
                f"seeds {TUNING_SEED} to {TUNING_SEED + TUNING_SEEDS - 1} are for tuning, and seeds from {self.seed} "
                "on are to be reported: choose another first seed."
            )

    def reported(self, settings: Settings) -> Settings:
        """The setting on the reported seeds."""
        return replace(settings, seed=self.seed, num_seeds=self.num_seeds)

    def tuning_settings(self) -> list[Settings]:
        """What is trained first, on the tuning seeds."""
        return [each for method in self.methods if not method.like for each in method.candidates()]

    def agreement_settings(self) -> dict[int, Settings]:
        """What is trained for each κ."""
        return {rounds: self.reported(federation(**AGREEING, rounds=rounds)) for rounds in self.rounds}

    def reported_settings(self, folder: Path) -> list[Settings]:
        """What is trained on the reported seeds, once the tuning runs in a folder are complete."""
        return [*dict.fromkeys(self.choices(folder).values()), *self.agreement_settings().values()]

    def choices(self, folder: Path) -> dict[tuple[str, float], Settings]:
        """The setting of each method (label) and ε, as the tuning runs in a folder say, on the reported seeds.

        A pair is missing if no setting that learns reaches ε.
        """
        chosen: dict[tuple[str, float], Settings] = {}
        tuned = {method.label: method for method in self.methods if not method.like}
        for method in self.methods:
            candidates = method.candidates()
            tried = [
                RunDirectory(folder / run_name(each)).read_results()
                for each in tuned[method.like or method.label].candidates()
            ]
            curves = [Curve.of(run) if np.all(learned(run)) else None for run in tried]
            for epsilon in EPSILONS:
                needed = [inf if curve is None else curve.reach(epsilon, ROOM) for curve in curves]
                if min(needed) < inf:
                    chosen[method.label, epsilon] = self.reported(candidates[int(np.argmin(needed))])
        return chosen


# Running means, and when they reach ε²


@dataclass(frozen=True, eq=False)
class Curve:
    """The running mean of ‖∇J(θ_t)‖² of every seed, over trajectories per agent."""

    points: np.ndarray  # [point], trajectories
    means: np.ndarray  # [seed, point]: the mean over the iterations that have ended by then

    @classmethod
    def of(cls, run: Run) -> "Curve":
        """The curve of a run, up to where all its seeds have come."""
        values = run.metrics["gradient_squared"].astype(float)
        totals = np.broadcast_to(run.trajectories, values.shape)
        means = np.cumsum(values, axis=1) / np.arange(1, values.shape[1] + 1)
        points = np.geomspace(np.max(totals[:, 0]), np.min(totals[:, -1]), NUM_POINTS)
        # 1e-9: the last point must not lie behind the last iteration by rounding.
        places = [np.searchsorted(total, points * (1 + 1e-9), side="right") - 1 for total in totals]
        return cls(points, np.stack([mean[place] for mean, place in zip(means, places, strict=True)]))

    def reach(self, epsilon: float, share: float = 1.0) -> float:
        """Trajectories until the mean over seeds is at most ε²; ∞ if it is not within this share of the run."""
        found = float(first_reach(self.points, np.mean(self.means, axis=0), epsilon))
        return found if found <= share * self.points[-1] else inf

    def resampled(self, drawn: np.ndarray, epsilon: float) -> np.ndarray:
        """As `reach`, for resampled seeds [resample, seed]."""
        return first_reach(self.points, np.mean(self.means[drawn], axis=1), epsilon)


def first_reach(points: np.ndarray, means: np.ndarray, epsilon: float) -> np.ndarray:
    """The first point at which means [..., point] are at most ε²; ∞ if none is."""
    reached = means <= epsilon**2
    return np.where(np.any(reached, axis=-1), points[np.argmax(reached, axis=-1)], inf)


def learned(run: Run) -> np.ndarray:
    """Which seeds [seed] end near the best return, and not on a plateau; see LEARNED."""
    uniform, best = reference_returns()

    def at_the_end(returns: np.ndarray) -> float:
        known = returns[np.isfinite(returns)]
        return float(np.mean(known[-max(1, len(known) // 5) :])) if len(known) else -inf

    late = np.asarray([at_the_end(returns) for returns in run.metrics["return_mean"]])
    return late >= uniform + LEARNED * (best - uniform)


@cache
def reference_returns() -> tuple[float, float]:
    """J of the policy that takes all actions alike, and of the best policy that sees what agents see."""
    task = cast(envs.Environment, envs.make(TASK))
    assert isinstance(task, envs.Enumerable)
    observations = task.every_observation()

    def expected_return(logits: jax.Array) -> jax.Array:
        return task.expected_return(jax.nn.softmax(observations @ logits, axis=1), task.horizon, 1.0)

    space = cast(envs.Discrete, task.action_space)
    start = jnp.zeros((task.observation_size, space.num_actions))
    best = jax.lax.fori_loop(0, 1000, lambda _, logits: logits + jax.grad(expected_return)(logits), start)
    return float(expected_return(start)), float(expected_return(best))


def fitted_slope(epsilons: np.ndarray, trajectories: np.ndarray) -> np.ndarray:
    """The slope of log trajectories [..., ε] against log ε by least squares; ∞ in trajectories gives NaN."""
    x = np.log(epsilons) - np.mean(np.log(epsilons))
    with np.errstate(invalid="ignore"):
        return np.sum(x * np.log(trajectories), axis=-1) / np.sum(x**2)


# Results


@dataclass(frozen=True, eq=False)
class Measured:
    """One method: what it chose for every ε that it reaches, and the trajectories per agent that it took."""

    label: str
    slope: float  # by theory
    epsilons: np.ndarray  # [ε]
    trajectories: np.ndarray  # [ε]
    resamples: np.ndarray  # [ε, resample]: the same for resampled seeds
    chosen: tuple[str, ...]  # [ε], in words
    stuck: tuple[int, ...]  # [ε]: how many seeds end on a plateau

    def estimate(self, at: int) -> Estimate:
        """The trajectories at one ε, with their interval."""
        return _interval(self.trajectories[at], self.resamples[at])

    def fit(self) -> Estimate:
        """The fitted slope."""
        return _interval(
            float(fitted_slope(self.epsilons, self.trajectories)), fitted_slope(self.epsilons, self.resamples.T)
        )

    def factor(self) -> Estimate:
        """The factor for half the ε that the fit says."""
        fit = self.fit()
        return Estimate(2**-fit.value, 2**-fit.high, 2**-fit.low)


def _interval(value: float, resamples: np.ndarray) -> Estimate:
    """The 95 % interval; resamples without a value, such as a ratio of ∞ and ∞, are left out."""
    low, high = np.nanquantile(resamples, [0.025, 0.975], method="nearest")
    return Estimate(float(value), float(low), float(high))


def ratio(one: Measured, other: Measured, epsilon: float) -> Estimate | None:
    """How many times the trajectories of `other` the method `one` takes at ε; None unless both reach it."""
    if epsilon not in one.epsilons or epsilon not in other.epsilons:
        return None
    i, j = (int(np.argmax(each.epsilons == epsilon)) for each in (one, other))
    with np.errstate(invalid="ignore"):
        return _interval(one.trajectories[i] / other.trajectories[j], one.resamples[i] / other.resamples[j])


def crossover(one: Measured, other: Measured) -> Estimate:
    """The ε at which the fitted lines of two methods meet."""

    def meet(ones: np.ndarray, others: np.ndarray) -> np.ndarray:
        slopes = fitted_slope(one.epsilons, ones), fitted_slope(other.epsilons, others)
        heights = [
            np.mean(np.log(values), axis=-1) - slope * np.mean(np.log(each.epsilons))
            for values, slope, each in zip((ones, others), slopes, (one, other), strict=True)
        ]
        return np.exp((heights[1] - heights[0]) / (slopes[0] - slopes[1]))

    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return _interval(float(meet(one.trajectories, other.trajectories)), meet(one.resamples.T, other.resamples.T))


def comparisons(rates: "Rates") -> Iterator[tuple[str, Estimate, str]]:
    """What is compared, what was measured, and what theory says; a comparison that no ε allows is left out."""
    by_label = {each.label: each for each in rates.methods if len(each.epsilons)}

    def at_least(one: str, other: str) -> tuple[float, Estimate] | None:
        """The ratio of two methods at the least ε that both reach."""
        if one not in by_label or other not in by_label:
            return None
        common = [epsilon for epsilon in EPSILONS if ratio(by_label[one], by_label[other], epsilon) is not None]
        return (common[-1], cast(Estimate, ratio(by_label[one], by_label[other], common[-1]))) if common else None

    pairs = {
        "p = 1: K = 1 over K = 4": ("p = 1, K = 1", "p = 1, K = 4", "K = 4"),
        "p = 1: K = 1 over K = 16": ("p = 1, K = 1", "p = 1, K = 16", "K = 16"),
        "PAGE, all agents: K = 1 over K = 4": ("PAGE, K = 1", "PAGE, K = 4, all agents", "K = 4"),
        "PAGE, all agents: K = 1 over K = 16": ("PAGE, K = 1", "PAGE, K = 16, all agents", "K = 16"),
        "PAGE, server alone: K = 1 over K = 4": ("PAGE, K = 1", "PAGE, K = 4, server alone", "√K = 2"),
        "PAGE, server alone: K = 1 over K = 16": ("PAGE, K = 1", "PAGE, K = 16, server alone", "√K = 4"),
        "server alone over all agents, K = 16": ("PAGE, K = 16, server alone", "PAGE, K = 16, all agents", "√K = 4"),
        "p = 1 over PAGE, K = 16": ("p = 1, K = 16", "PAGE, K = 16, all agents", "grows like 1/ε"),
    }
    for what, (one, other, theory) in pairs.items():
        if found := at_least(one, other):
            yield f"{what}, ε = {found[0]:g}", found[1], theory
    for agents in ("K = 1", "K = 16, all agents"):
        one, other = f"p = 1, {agents.removesuffix(', all agents')}", f"PAGE, {agents}"
        if all(label in by_label and len(by_label[label].epsilons) > 1 for label in (one, other)):
            yield f"ε below which PAGE is ahead, {agents}", crossover(by_label[one], by_label[other]), "–"


@dataclass(frozen=True, eq=False)
class Rates:
    """All that the experiment measured."""

    methods: tuple[Measured, ...]
    rounds: np.ndarray  # κ
    floors: np.ndarray  # [κ, seed]: mean ‖∇J(θ_t)‖² over the last half of the run, over honest agents
    diameters: np.ndarray  # [κ, seed]: mean diameter of honest parameters after agreement, in the same half
    noises: Mapping[str, float]  # by step, see `correction_noise`
    provenance: Mapping[str, Any]

    @classmethod
    def of(cls, scope: Scope, folder: Path, noises: Mapping[str, float], provenance: Mapping[str, Any]) -> "Rates":
        """Collect the finished runs in a folder."""
        choices, drawn = (
            scope.choices(folder),
            np.random.default_rng(0).integers(scope.num_seeds, size=(RESAMPLES, scope.num_seeds)),
        )

        @cache
        def curve(settings: Settings) -> Curve:
            return Curve.of(read(settings))

        def read(settings: Settings) -> Run:
            return RunDirectory(folder / run_name(settings)).read_results()

        methods = []
        for method in scope.methods:
            measured = {
                epsilon: (settings, value)
                for epsilon in EPSILONS
                if (settings := choices.get((method.label, epsilon))) is not None
                and (value := curve(settings).reach(epsilon)) < inf
            }
            methods.append(
                Measured(
                    method.label,
                    method.slope,
                    np.asarray(list(measured)),
                    np.asarray([value for _, value in measured.values()]),
                    np.asarray([curve(settings).resampled(drawn, e) for e, (settings, _) in measured.items()]),
                    tuple(_in_words(settings) for settings, _ in measured.values()),
                    tuple(int(np.sum(~learned(read(settings)))) for settings, _ in measured.values()),
                )
            )
        runs = {
            k: RunDirectory(folder / run_name(each)).read_results() for k, each in scope.agreement_settings().items()
        }
        floors, diameters = (
            np.asarray([_last_half(run.metrics[name]) for run in runs.values()])
            for name in ("gradient_squared", "diameter_after")
        )
        return cls(tuple(methods), np.asarray(list(runs)), floors, diameters, noises, provenance)

    def method(self, label: str) -> Measured:
        """The method with a label."""
        return next(each for each in self.methods if each.label == label)

    def save(self, path: Path) -> None:
        """Write everything to one .npz file."""
        about = {
            "methods": [
                {"label": each.label, "slope": each.slope, "chosen": each.chosen, "stuck": each.stuck}
                for each in self.methods
            ],
            "noises": dict(self.noises),
            "provenance": self.provenance,
        }
        arrays = {
            f"{index}/{name}": getattr(each, name)
            for index, each in enumerate(self.methods)
            for name in ("epsilons", "trajectories", "resamples")
        }
        arrays |= {name: getattr(self, name) for name in ("rounds", "floors", "diameters")}
        write_archive(path, FORMAT, about, arrays)

    @classmethod
    def load(cls, path: Path) -> "Rates":
        """Read what `save` wrote.

        Raises:
            ValueError: If the file is missing, broken, or not such a file.
        """
        with reading_archive(path, FORMAT, "byzpg reproduce rates") as (about, arrays):
            methods = tuple(
                Measured(
                    each["label"],
                    each["slope"],
                    *(arrays[f"{index}/{name}"] for name in ("epsilons", "trajectories", "resamples")),
                    chosen=tuple(each["chosen"]),
                    stuck=tuple(each["stuck"]),
                )
                for index, each in enumerate(about["methods"])
            )
            kept = (arrays[name] for name in ("rounds", "floors", "diameters"))
            return cls(methods, *kept, noises=about["noises"], provenance=about["provenance"])


def _in_words(settings: Settings) -> str:
    small = f", B = {settings.small_batch}" if settings.switch_probability < 1 else ""
    return f"N = {settings.large_batch}{small}, η = {settings.step_size:g}"


def _last_half(values: np.ndarray) -> np.ndarray:
    """The mean [seed] over the last half of the iterations."""
    return np.nanmean(values[:, values.shape[1] // 2 :], axis=1) if np.any(np.isfinite(values)) else values[:, -1]


# Why a task is on one side of the crossover

# Steps whose corrections are compared: PAGE at work on this task, and p = 1 at work on CartPole.
STEPS: dict[str, dict[str, Any]] = {
    f"{TASK}, SGD, η = 0.5": {"env": TASK, "preset": "paper", "hidden": (), "output_tanh": False, "discount": 1.0}
    | {"optimizer": "sgd", "step_size": 0.5, "large_batch": 1024},
    "CartPole-v1, Adam, η = 5e-3 (paper)": {"preset": "paper", "step_size": 5e-3},
    "CartPole-v1, Adam, η = 2e-2 (tuned)": {"preset": "tuned", "step_size": 2e-2},
}
STEP_AFTER, STEP_EPISODES = 24, 1000


def correction_noises() -> Iterator[tuple[str, float]]:
    """The noise of the correction at each of STEPS, after STEP_AFTER iterations with large batches."""
    for label, options in STEPS.items():
        config = Config(algorithm="PAGE-PG", switch_probability=1.0, seed=TUNING_SEED, num_seeds=1, **options)
        yield label, correction_noise(config.resolved(), STEP_AFTER, STEP_EPISODES)


def correction_noise(settings: Settings, num_iterations: int, num_episodes: int) -> float:
    """The variance of one trajectory's PAGE correction over that of its gradient, at a step that training takes.

    Var[g(τ|θ_t) − ω g(τ|θ_{t−1})] / Var[g(τ|θ_t)], τ ~ θ_t. Over the 1/p ≈ N/B small batches between two large ones,
    the corrections add up to noise/(pB) of a gradient's variance, against the 1/N of a large batch. PAGE therefore
    saves trajectories only where the noise is below about (B/N)².

    Args:
        settings: What is trained, with one agent; θ_t and θ_{t−1} are those of its first seed.
        num_iterations: t.
        num_episodes: How many trajectories to sample.
    """
    simulation = simulation_of(settings)
    states, _ = simulation.run(simulation.start(), [LARGE] * num_iterations, 0, only_large=True)
    # Without a baseline, which would need several trajectories per batch, and with the weights as they are.
    agent = replace(
        settings.federation().agent, small_batch=1, estimator=GPOMDP(), importance=ImportanceWeights(), gate=1.0
    )
    trained = jax.tree.map(lambda leaf: jnp.repeat(leaf[0], num_episodes, axis=0), simulation.fetched(states)[0].agents)
    alone = replace(trained, direction=jnp.zeros_like(trained.direction))

    @jax.jit
    def estimates(state: AgentState, keys: jax.Array) -> list[jax.Array]:
        points = agent.request(state, None, keys, large=False)
        episodes = agent.play(points, keys, large=False)
        return [agent.digest(state, points, episodes, keys, large)[0] for large in (False, True)]

    found = estimates(alone, jax.random.split(jax.random.key(settings.seed), num_episodes))
    corrected, plain = (float(np.sum(np.var(np.asarray(each, float), axis=0))) for each in found)
    return corrected / plain
