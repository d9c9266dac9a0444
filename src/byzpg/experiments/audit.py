"""The audit of aggregation rules: a search for the attack that does most harm, and what it does on fresh seeds.

Candidates are whole training runs, of which as many as possible share one program. The search goes on in generations of
members of `robust.adaptive.Adaptive`, some that equivocate and some that do not; attacks that are known are candidates
too. The best candidates of all are trained again on more seeds, and the worst of those is reported on seeds that no
choice has seen.

Harm is the share of learning that is lost: the area between the learning curve of the honest federation and that of the
run, over the area between the former and where it starts. 0 is no harm, 1 is a federation that never learns.
Every measurement is kept in a file of its own, so that an audit that was stopped goes on where it was.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from hashlib import sha256
from math import inf, log10
from pathlib import Path
from shlex import quote
from typing import Any, Literal
from zlib import crc32

import numpy as np

from byzpg import __version__, envs, training
from byzpg._parts import Part
from byzpg.config import REPORTED_SEED, Config
from byzpg.envs.spaces import Discrete
from byzpg.experiments.paper import HEATMAP_ATTACKS, run_name
from byzpg.experiments.results import Result, reading_archive, write_archive
from byzpg.experiments.statistics import lower_median, trajectories_to_reach
from byzpg.experiments.summaries import Estimate, estimate, final_returns
from byzpg.robust.adaptive import Adaptive
from byzpg.robust.aggregators import Aggregator
from byzpg.robust.attacks import ALIE, Attack, AvgZero, MessageAttack
from byzpg.robust.certificates import certificate
from byzpg.runs import Run

FORMAT = 1
SEARCH_SEED, SELECTION_SEED = 500, 600  # the first seeds of the search; what is reported starts at REPORTED_SEED
# Known attacks, which are candidates as well: a search that finds nothing worse than these reports the worst of them.
KNOWN = (*HEATMAP_ATTACKS, "Normalized", "PoisonedReward(share=0.25)", "PoisonedReward(factor=-10.0, share=0.1)")
BONUSES = (1.0, 10.0, 100.0)  # that attackers record for the action that they want
LEVEL = 0.9  # of what the honest federation learns, which counts as learned
FINALISTS = 4  # candidates of a rule that are trained on more seeds
ELITE = 3  # candidates of a family from which the next generation descends

Goal = Literal["area", "end", "target"]
GOALS: dict[Goal, str] = {
    "area": "the slowest learning",
    "end": "the lowest return at the end",
    "target": "the action that attackers want",
}


# Measurements


class OutOfTime(Exception):
    """The time for a part of the audit is over."""


@dataclass(frozen=True)
class Measured:
    """What one federation did on some seeds, compared with the honest one."""

    rule: str
    attack: str | None  # None: nobody attacks
    num_byzantine: int
    num_attackers: int
    seed: int  # the first one
    progress: np.ndarray = field(repr=False)  # [cell]
    returns: np.ndarray = field(repr=False)  # [seed, cell]
    lost: np.ndarray  # share of learning that is lost [seed]
    lost_at_end: np.ndarray  # the same of the return at the end [seed]
    slowdown: np.ndarray  # time until LEVEL over that of the honest federation [seed]; ∞ if it never gets there
    targeted: np.ndarray | None = None  # share of steps with the wanted action [seed], if that is what is searched for

    def harm(self, goal: Goal) -> np.ndarray:
        """What the search maximizes [seed]."""
        if goal == "target":
            assert self.targeted is not None
            return self.targeted
        return self.lost if goal == "area" else self.lost_at_end

    def estimates(self) -> dict[str, Estimate]:
        """Means over seeds with intervals; the slowdown is a median."""
        return {
            "lost": estimate(self.lost, np.mean),
            "lost_at_end": estimate(self.lost_at_end, np.mean),
            "slowdown": estimate(self.slowdown, lower_median),
        }


@dataclass(frozen=True)
class Honest:
    """The federation without attackers, whose agents average: what others are compared with."""

    result: Result

    @property
    def curve(self) -> np.ndarray:
        return np.mean(self.result.returns, axis=0, dtype=float)

    @property
    def start(self) -> float:
        return float(self.curve[0])

    @property
    def end(self) -> float:
        return float(np.mean(final_returns(self.result)))

    @property
    def level(self) -> float:
        return self.start + LEVEL * (self.end - self.start)

    def check(self) -> None:
        """Refuse a federation that learns nothing, of which no attack could take anything.

        Raises:
            ValueError: If what it gains is within the noise of its seeds.
        """
        ends = final_returns(self.result)
        if not self.end - self.start > 2 * np.std(ends) / np.sqrt(len(ends)):
            settings = self.result.settings
            raise ValueError(
                f"the honest federation learns nothing in {settings.length:,} {settings.unit} (return {self.start:.3g} "
                f"at first, {self.end:.3g} at the end), so that no attack can take anything: give it more "
                f"{settings.unit}."
            )

    def _times(self, progress: np.ndarray, returns: np.ndarray) -> np.ndarray:
        """When each of these curves [curve] reaches the level, over one cell."""
        return trajectories_to_reach(progress, returns, self.level, float(progress[0]))

    @cached_property
    def _time(self) -> float:
        """When half of its own seeds reach the level; if fewer do, when their mean does, which it does always."""
        progress, returns = self.result.progress, self.result.returns
        median = float(lower_median(self._times(progress, returns)))
        return median if np.isfinite(median) else float(self._times(progress, self.curve[None])[0])

    def measured(self, result: Result) -> Measured:
        settings, curve = result.settings, np.interp(result.progress, self.result.progress, self.curve)
        # A seed that diverged learns nothing from then on.
        returns = np.where(np.isfinite(result.returns), result.returns, self.start)
        gained = max(float(np.mean(curve)) - self.start, 1e-9)
        learned = max(self.end - self.start, 1e-9)
        return Measured(
            rule=str(settings.aggregator),
            attack=str(settings.attack) if settings.num_attackers else None,
            num_byzantine=settings.num_byzantine,
            num_attackers=settings.num_attackers,
            seed=settings.seeds[0],
            progress=result.progress,
            returns=returns,
            lost=np.mean(curve - returns, axis=1) / gained,
            lost_at_end=(self.end - np.mean(returns[:, result.progress > 0.9 * result.progress[-1]], axis=1)) / learned,
            slowdown=self._times(result.progress, returns) / self._time,
            targeted=result.metrics["targeted"][:, 0] if "targeted" in result.metrics else None,
        )


OnProgress = Callable[[str, training.Progress], None]


@dataclass
class Bench:
    """Trains federations, and keeps what they did."""

    folder: Path
    action: int | None = None  # whose share in the steps of the trained policies is measured
    on_progress: OnProgress | None = None
    slowest_start: float = 0.0  # seconds until a program reported for the first time: compiling cannot be interrupted

    def measure(self, configs: Sequence[Config], what: str, deadline: float = inf) -> list[Result]:
        """The results of these configurations; those that are not kept yet are trained in as few programs as possible.

        Raises:
            OutOfTime: If the deadline passes before all are trained; those of programs that ended are kept.
        """
        paths = [self.folder / f"{run_name(config.resolved())}-{self._origin(config)}.npz" for config in configs]
        missing = {path: config for path, config in zip(paths, configs, strict=True) if not path.is_file()}
        began, reported = time.monotonic(), False
        if missing and began + self.slowest_start > deadline:
            raise OutOfTime

        def on_progress(progress: training.Progress) -> None:
            nonlocal reported
            if not reported:
                self.slowest_start, reported = max(self.slowest_start, time.monotonic() - began), True
            if self.on_progress is not None:
                self.on_progress(what, progress)
            if time.monotonic() > deadline and progress.done < 1:
                raise OutOfTime

        where = list(missing)
        for index, run in training.train_all(list(missing.values()), on_progress):
            path, result = where[index], Result.of(run)
            metrics = {"return_mean": result.returns}
            if self.action is not None:
                metrics["targeted"] = _shares_of_action(run, self.action)[:, None]
            write_archive(path, FORMAT, {"settings": run.settings.as_data()}, {**metrics, "progress": result.progress})
        return [self._read(path, config) for path, config in zip(paths, configs, strict=True)]

    def _origin(self, config: Config) -> str:
        """What else a measurement depends on: the version of byzpg, modules of the user's own, and the action."""
        parts = [Part.of(module).as_data() for module in sorted(config.own_modules)]
        text = json.dumps([__version__, self.action, parts], sort_keys=True)
        return sha256(text.encode()).hexdigest()[:8]

    def _read(self, path: Path, config: Config) -> Result:
        with reading_archive(path, FORMAT, "byzpg audit") as (_, arrays):
            metrics = {name: arrays[name] for name in arrays if name != "progress"}
            return Result(config.resolved(), arrays["progress"], metrics)


def _shares_of_action(run: Run, action: int) -> np.ndarray:
    """The share of steps [seed] in which the trained policies take the action, over some episodes."""
    from byzpg import play  # needs Gymnasium for some tasks, which is an extra

    def of_seed(seed: int) -> float:
        taken: list[np.ndarray] = []
        play.evaluate(run.policy(seed), run.settings, 20, seed=0, drawn=False, on_step=taken.append)
        return float(np.mean(np.concatenate(taken) == action))

    return np.asarray([of_seed(seed) for seed in range(run.settings.num_seeds)])


# Candidates


@dataclass(frozen=True)
class Gene:
    """A number of `Adaptive` as a coordinate between 0 and 1."""

    name: str
    low: float
    high: float
    rest: float | None = None  # the value of the lower third, where the attack does without it
    logarithmic: bool = False
    whole: bool = False

    def value(self, place: float) -> float:
        """The number at a coordinate."""
        if self.rest is not None:
            if place < 1 / 3:
                return self.rest
            place = (place - 1 / 3) * 1.5
        low, high = (log10(each) if self.logarithmic else each for each in (self.low, self.high))
        value = low + (high - low) * place
        value = 10**value if self.logarithmic else value
        return float(round(value)) if self.whole else float(f"{value:.3g}")

    def place(self, value: float) -> float:
        """The inverse of `value`."""
        if value == self.rest:
            return 1 / 6
        low, high, value = (log10(each) if self.logarithmic else each for each in (self.low, self.high, value))
        place = float(np.clip((value - low) / (high - low), 0, 1)) if high > low else 0.5
        return place if self.rest is None else 1 / 3 + place / 1.5


@dataclass(frozen=True)
class Family:
    """Attacks with the same code, whose numbers are searched."""

    name: str
    code: Adaptive
    genes: tuple[Gene, ...]
    anchors: tuple[Adaptive, ...]  # known attacks among them, with which the search begins

    def attack(self, places: np.ndarray) -> Adaptive:
        return replace(
            self.code, **{gene.name: gene.value(place) for gene, place in zip(self.genes, places, strict=True)}
        )

    def places(self, attack: Adaptive) -> np.ndarray:
        return np.asarray([gene.place(getattr(attack, gene.name)) for gene in self.genes])


def families(num_iterations: int, num_honest: int, num_attackers: int, *, critic: bool, server: bool) -> list[Family]:
    """The families to search: the same messages to all receivers and, without a server, other ones to some."""
    genes = [
        Gene("pull", 0.1, 30.0, rest=0.0, logarithmic=True),
        Gene("against", 0.1, 10.0, rest=0.0, logarithmic=True),
        Gene("hide", -3.0, 3.0),
        Gene("drift", 0.1, 30.0, rest=0.0, logarithmic=True),
        Gene("noise", 0.1, 1000.0, rest=0.0, logarithmic=True),
        Gene("own", 0.1, 1.0, rest=0.0),
        Gene("start", 1.0, max(2.0, num_iterations / 2), rest=0.0, whole=True),
        Gene("period", 2.0, max(3.0, num_iterations / 4), rest=1.0, whole=True),
        Gene("duty", 0.2, 0.8, rest=1.0),
        Gene("silent", 0.0, 1.0, rest=0.0, whole=True),
    ]
    if critic:
        genes += [Gene("actor", 0.0, 1.0, rest=1.0), Gene("critic", 0.0, 3.0, rest=1.0)]
    all_zero = 1 + num_honest / max(num_attackers, 1)
    pulls = [Adaptive(pull=pull) for pull in (float(f"{all_zero:.3g}"), 1.0, 2.0)]
    same = [*pulls, Adaptive(against=1.0), Adaptive(against=2.0), Adaptive(drift=1.0)]
    found = [Family("the same to all", Adaptive(), tuple(genes), tuple(same))]
    if not server:
        code = Adaptive(equivocates=True, target="both")
        genes += [Gene("reach", 0.1, 0.9, rest=1.0), Gene("mirror", -2.0, 2.0)]
        apart = [
            replace(code, noise=1000.0),
            replace(code, pull=2.0, reach=0.5, mirror=0.0),
            replace(code, drift=1.0, reach=0.5, mirror=-1.0),
        ]
        found.append(Family("others to some", code, tuple(genes), tuple(apart)))
    return found


def next_generation(
    family: Family, scored: Mapping[Adaptive, float], number: int, generation: int, rng: np.random.Generator
) -> list[Adaptive]:
    """Children of the best candidates so far; the first generation has the family's anchors and random members.

    A child takes every coordinate from one of two parents, and half of them move, less far in every generation. A
    quarter of the children are random: the first parents may be on the wrong hill. No candidate comes twice, so that
    all generations have the same size and share a program.
    """
    children = [] if scored else list(family.anchors)[:number]
    parents = [family.places(attack) for attack in sorted(scored, key=lambda each: -scored[each])[:ELITE]]
    while len(children) < number:
        places = rng.random(len(family.genes))
        if parents and len(children) % 4 != 3:
            first, second = (parents[index] for index in rng.integers(len(parents), size=2))
            moves = 0.3 * 0.75**generation * rng.standard_normal(len(first)) * (rng.random(len(first)) < 0.5)
            places = np.clip(np.where(rng.random(len(first)) < 0.5, first, second) + moves, 0, 1)
        child = family.attack(places)
        if child not in scored and child not in children:
            children.append(child)
    return children


# The audit


@dataclass(frozen=True)
class Plan:
    """What is audited, and how much of the search there is."""

    config: Config  # the federation, without its aggregator and attack
    rules: tuple[str, ...]
    beside: tuple[str, ...] = ()  # rules that are trained under the attacks found against the first rule
    known: tuple[str, ...] = KNOWN
    goal: Goal = "area"
    action: int | None = None  # which attackers want, with the goal "target"
    generations: int = 8
    population: int = 8  # candidates of each family, generation and rule
    search_seeds: int = 2
    report_seeds: int = 6
    breaking: bool = True  # whether the worst attack is also tried with other numbers of attackers
    seed: int = 0  # of the search

    def federation(self, rule: str, attack: Attack | str | None, seed: int, num_seeds: int, **options: Any) -> Config:
        """The federation with this rule under this attack; nobody attacks if it is None."""
        given: dict[str, Any] = {"aggregator": rule, "seed": seed, "num_seeds": num_seeds, **options}
        given |= {"num_attackers": 0} if attack is None else {"attack": str(attack)}
        return replace(self.config, **given)

    def honest(self, seed: int, num_seeds: int) -> Config:
        return self.federation("Mean()", None, seed, num_seeds)


@dataclass(frozen=True)
class RuleFindings:
    """What the audit found about one rule, on seeds that no choice has seen."""

    rule: str
    without: Measured  # nobody attacks
    worst: Measured | None  # the worst attack of all; None if no attack was tried
    known: Measured | None  # the worst of the known attacks
    searched: tuple[tuple[str, float], ...]  # attacks and their harm on the seeds of the search, the worst first
    breaking: tuple[Measured, ...] = ()  # the worst attack by growing numbers of attackers
    constants: Mapping[str, Any] = field(default_factory=dict)  # C_ra as measured, under which attack, and its bound
    goal: Goal = "area"

    def harm(self, measured: Measured) -> Estimate:
        """The mean over seeds of what attackers want, between 0 for what the rule does without them and 1 for all."""
        values = measured.harm(self.goal)
        if self.goal == "target":
            before = float(np.mean(self.without.harm(self.goal)))
            values = (values - before) / max(1 - before, 1e-9)
        return estimate(values, np.mean)

    @property
    def verdict(self) -> str:
        """One of: untested, unharmed, slowed, crippled, lost."""
        if self.worst is None:
            return "untested"
        of_worst, plain = self.harm(self.worst), self.harm(self.without)
        if of_worst.low <= plain.high and of_worst.value < 0.1:
            return "unharmed"
        return "slowed" if of_worst.value < 0.5 else "crippled" if of_worst.value < 0.9 else "lost"


@dataclass(frozen=True)
class Findings:
    """All of an audit."""

    plan: Plan
    honest: Measured
    rules: tuple[RuleFindings, ...]
    beside: tuple[RuleFindings, ...]  # without a search of their own
    level: float  # the return that counts as learned
    unit: str  # of progress: trajectories or steps
    generations: int  # that were searched
    candidates: int  # that were trained
    cut_short: tuple[str, ...]  # the parts that the budget did not suffice for
    seconds: float

    def ranked(self, rules: Sequence[RuleFindings]) -> list[RuleFindings]:
        """Rules by their worst attack, the least harmed one first; untested ones last."""

        def harm(found: RuleFindings) -> float:
            return float(np.mean(found.worst.harm(self.plan.goal))) if found.worst else inf

        return sorted(rules, key=harm)

    def command(self, measured: Measured) -> str:
        """The command that trains this federation again."""
        config, default = self.plan.config, Config()
        options = {
            "algorithm": config.algorithm,
            "aggregator": measured.rule,
            "num_byzantine": measured.num_byzantine,
            "num_attackers": measured.num_attackers,
            "num_seeds": len(measured.lost),
            "seed": measured.seed,
        }
        if measured.attack is not None:
            options["attack"] = measured.attack
        words = ["byzpg", "train"]
        for option in fields(Config):
            name = option.name
            value = options.get(name, getattr(config, name))
            if name in options or value != getattr(default, name):
                texts = map(str, value if isinstance(value, tuple) else [value])
                words += [f"--{name.replace('_', '-')}", *map(quote, texts)]
        return " ".join([*words, "--no-compare"])


# The share of the budget by which each part of the audit has to be over.
DEADLINES = {
    "the honest federation": 0.3,
    "known attacks": 0.45,
    "the search": 0.6,
    "the best on more seeds": 0.7,
    "fresh seeds": 1.0,
    "more attackers": 0.93,
    "theory": 0.95,
    "other rules": 1.0,
}


class Audit:
    """An audit in its folder; calling `run` again goes on where it was.

    Args:
        plan: What is audited.
        folder: Where measurements are kept.
        budget: Seconds that all of it may take; ∞ trains all that is planned.
        on_progress: Called with the part of the audit and how far training in it is.
    """

    def __init__(self, plan: Plan, folder: Path, budget: float = inf, on_progress: OnProgress | None = None) -> None:
        self.plan, self.budget, self.started = plan, budget, time.monotonic()
        self.bench = Bench(folder / "measurements", plan.action, on_progress)
        for rule in (*plan.rules, *plan.beside):  # wrong rules are refused before any work
            plan.federation(rule, None, 0, 1).resolved()
        self.settings = plan.honest(0, 1).resolved()
        self._check_action()
        known = [*plan.known, *(f"BonusForAction({plan.action}, bonus={bonus})" for bonus in self._bonuses)]
        under = [plan.federation(plan.rules[0], each, 0, 1) for each in known]
        if plan.known == KNOWN:  # of byzpg's own, those that this federation can have
            under = [each for each in under if _resolves(each)]
        self.known = list(dict.fromkeys(str(each.resolved().attack) for each in under))
        self.num_attackers = plan.federation(plan.rules[0], "AvgZero", 0, 1).resolved().num_attackers
        self.cut_short: list[str] = []
        # By rule and attack, the harm on each group of seeds, which its first seed stands for.
        self.scores: dict[str, dict[str, dict[int, np.ndarray]]] = {rule: {} for rule in plan.rules}
        self.generations = 0

    def run(self) -> Findings:
        """Carry the audit out.

        Raises:
            ValueError: If the budget does not even suffice for the honest federation.
        """
        plan = self.plan
        # With the rules without attackers, which are reported: they share a program.
        unharmed = [plan.federation(rule, None, REPORTED_SEED, plan.report_seeds) for rule in plan.rules]
        found = self._measure("the honest federation", [plan.honest(REPORTED_SEED, plan.report_seeds), *unharmed])
        if found is None:
            raise ValueError(
                f"the budget of {self.budget:.0f} s does not suffice to train the federation once: give it more, or "
                "fewer steps."
            )
        honest = Honest(found[0])
        honest.check()
        if self.num_attackers:
            self._search(honest)
        rules = self._report(honest)
        beside = self._beside(honest, rules[0])
        return Findings(
            plan=plan,
            honest=honest.measured(honest.result),
            rules=tuple(rules),
            beside=tuple(beside),
            level=honest.level,
            unit=self.settings.unit,
            generations=self.generations,
            candidates=sum(len(scores) for scores in self.scores.values()),
            cut_short=tuple(self.cut_short),
            seconds=self.elapsed,
        )

    @property
    def _bonuses(self) -> tuple[float, ...]:
        return BONUSES if self.plan.goal == "target" else ()

    def _check_action(self) -> None:
        plan, space = self.plan, envs.make(self.settings.env).action_space
        if (plan.goal == "target") != (plan.action is not None):
            raise ValueError("the goal target and an action belong together: give both, or neither.")
        if plan.action is None:
            return
        if not isinstance(space, Discrete):
            raise ValueError(f"the goal target is for discrete actions, and those of {self.settings.env} are not.")
        if not 0 <= plan.action < space.num_actions:
            raise ValueError(f"action must be 0 to {space.num_actions - 1} on {self.settings.env}, got {plan.action}.")

    @property
    def elapsed(self) -> float:
        """Seconds since the audit began."""
        return time.monotonic() - self.started

    def _deadline(self, part: str) -> float:
        return self.started + self.budget * DEADLINES[part]

    def _measure(self, part: str, configs: Sequence[Config], what: str | None = None) -> list[Result] | None:
        """The results, or None if the time for this part is over."""
        try:
            return self.bench.measure(configs, what or part, self._deadline(part))
        except OutOfTime:
            self._cut(part)
            return None

    def _cut(self, part: str) -> None:
        """Remember that the budget did not suffice for all of a part."""
        if part not in self.cut_short:
            self.cut_short.append(part)

    def _on_fresh_seeds(
        self, honest: Honest, part: str, places: Sequence[tuple[str, str | None]]
    ) -> dict[tuple[str, str | None], Measured] | None:
        """What rules do under attacks (None: nobody attacks) on the reported seeds, or None if the time is over."""
        plan = self.plan
        configs = [plan.federation(rule, attack, REPORTED_SEED, plan.report_seeds) for rule, attack in places]
        results = self._measure(part, configs)
        return None if results is None else dict(zip(places, map(honest.measured, results), strict=True))

    def _try(
        self,
        honest: Honest,
        part: str,
        attacks: Mapping[str, Sequence[Attack | str]],
        seed: int,
        number: int,
        what: str | None = None,
    ) -> bool:
        """Train candidates of each rule on some seeds, and score them; whether the time sufficed."""
        places = [(rule, str(attack)) for rule, several in attacks.items() for attack in several]
        configs = [self.plan.federation(rule, attack, seed, number) for rule, attack in places]
        found = self._measure(part, configs, what)
        if found is None:
            return False
        for (rule, attack), result in zip(places, found, strict=True):
            self.scores[rule].setdefault(attack, {})[seed] = honest.measured(result).harm(self.plan.goal)
        return True

    def _search(self, honest: Honest) -> None:
        plan, settings = self.plan, self.settings
        self._try(honest, "known attacks", dict.fromkeys(plan.rules, self.known), SEARCH_SEED, plan.search_seeds)
        found = families(
            round(settings.schedule().expected_iterations),
            settings.num_agents - self.num_attackers,
            self.num_attackers,
            critic=settings.has_critic,
            server=settings.federation().centralized,
        )
        scored: dict[tuple[str, str], dict[Adaptive, float]] = {}
        for generation in range(plan.generations):
            began = time.monotonic()
            candidates: dict[str, list[Attack | str]] = {}
            members: dict[tuple[str, str], list[Adaptive]] = {}
            for rule in plan.rules:
                for number, family in enumerate(found):
                    # By its text: a rule has the same candidates whatever it is audited with.
                    rng = np.random.default_rng((plan.seed, crc32(rule.encode()), number, generation))
                    place = rule, family.name
                    members[place] = next_generation(family, scored.get(place, {}), plan.population, generation, rng)
                    candidates.setdefault(rule, []).extend(members[place])
            what = f"generation {generation + 1} of at most {plan.generations}"
            if not self._try(honest, "the search", candidates, SEARCH_SEED, plan.search_seeds, what):
                break
            self.generations += 1
            for (rule, name), several in members.items():
                harms = {each: self._score(rule, str(each)) for each in several}
                scored.setdefault((rule, name), {}).update(harms)
            took = time.monotonic() - began
            if time.monotonic() + took > self._deadline("the search"):
                if generation + 1 < plan.generations:
                    self._cut("the search")
                break
        finalists = {rule: self._ranked(rule)[:FINALISTS] for rule in plan.rules}
        for rule in plan.rules:  # the worst known one is always among them
            finalists[rule] += [each for each in self._ranked(rule) if each in self.known][:1]
        finalists = {rule: list(dict.fromkeys(several)) for rule, several in finalists.items()}
        if any(finalists.values()):
            self._try(honest, "the best on more seeds", finalists, SELECTION_SEED, 2 * plan.search_seeds)

    def _ranked(self, rule: str) -> list[str]:
        """The attacks of a rule, the worst first; those that were trained on more seeds come before all others."""
        scores = self.scores[rule]
        return sorted(scores, key=lambda attack: (-len(scores[attack]), -self._score(rule, attack)))

    def _score(self, rule: str, attack: str) -> float:
        """The mean harm over all seeds that the search has seen it on."""
        return float(np.mean(np.concatenate(list(self.scores[rule][attack].values()))))

    def _worst(self, rule: str) -> tuple[str | None, str | None]:
        """The worst attack on a rule, and the worst known one, by what the search has seen."""
        ranked = self._ranked(rule)
        return next(iter(ranked), None), next((attack for attack in ranked if attack in self.known), None)

    def _report(self, honest: Honest) -> list[RuleFindings]:
        plan = self.plan
        places = [(rule, attack) for rule in plan.rules for attack in dict.fromkeys([None, *self._worst(rule)])]
        measured = self._on_fresh_seeds(honest, "fresh seeds", places)
        if measured is None:
            raise ValueError(
                f"the budget of {self.budget:.0f} s was over before anything was measured on fresh seeds: give it more."
            )
        findings = []
        for rule in plan.rules:
            worst, known = self._worst(rule)
            findings.append(
                RuleFindings(
                    rule,
                    without=measured[rule, None],
                    worst=measured[rule, worst] if worst is not None else None,
                    known=measured[rule, known] if known is not None else None,
                    searched=tuple((each, self._score(rule, each)) for each in self._ranked(rule)),
                    goal=plan.goal,
                )
            )
        broken = self._breaking(honest, findings)
        return [
            replace(found, breaking=broken.get(found.rule, ()), constants=self._constants(found)) for found in findings
        ]

    def _breaking(self, honest: Honest, findings: Sequence[RuleFindings]) -> dict[str, tuple[Measured, ...]]:
        """By rule, the worst attack with 1 attacker to one more than the rule is told to tolerate."""
        plan, configs = self.plan, []
        for found in findings if plan.breaking else ():
            if found.worst is not None:
                bound = found.worst.num_byzantine
                for number in range(1, bound + 2):
                    sizes = {"num_byzantine": min(number, bound), "num_attackers": number}
                    configs.append(
                        plan.federation(found.rule, found.worst.attack, REPORTED_SEED, plan.report_seeds, **sizes)
                    )
        results = self._measure("more attackers", [each for each in configs if _resolves(each)])
        broken: dict[str, list[Measured]] = {}
        for result in results or ():
            measured = honest.measured(result)
            broken.setdefault(measured.rule, []).append(measured)
        return {rule: tuple(several) for rule, several in broken.items()}

    def _constants(self, found: RuleFindings) -> dict[str, Any]:
        """The worst C_ra that was measured on random vectors, and the proven bound."""
        if found.worst is None or found.worst.attack is None:
            return {}
        if time.monotonic() > self._deadline("theory"):
            self._cut("theory")
            return {}
        config = self.plan.federation(found.rule, found.worst.attack, 0, 1).resolved()
        rule, attacks = config.aggregator, list[MessageAttack]([AvgZero(), ALIE()])
        if isinstance(config.attack, Adaptive):  # in an iteration in which it strikes
            attacks.append(replace(config.attack, start=0.0))
        elif isinstance(config.attack, MessageAttack):
            attacks.append(config.attack)
        assert isinstance(rule, Aggregator)
        if not config.num_byzantine:
            return {}
        options = {"num_agents": config.num_agents, "num_byzantine": config.num_byzantine}
        all_of_them = [certificate(rule, attack, **options) for attack in attacks]
        worst = max(all_of_them, key=lambda each: each.measured["C_ra"])
        return {"measured": worst.measured["C_ra"], "attack": str(worst.attack), "bound": worst.bounds["C_ra"]}

    def _beside(self, honest: Honest, found: RuleFindings) -> list[RuleFindings]:
        """Other rules without attackers and under the worst attack on the audited one."""
        if found.worst is None or not self.plan.beside:
            return []
        plan, attacks = self.plan, (None, found.worst.attack)
        places = [(rule, attack) for rule in plan.beside for attack in attacks]
        measured = self._on_fresh_seeds(honest, "other rules", places)
        if measured is None:
            return []
        return [
            RuleFindings(rule, measured[rule, None], measured[rule, attacks[1]], None, (), goal=plan.goal)
            for rule in plan.beside
        ]


def _resolves(config: Config) -> bool:
    """Whether there can be such a federation."""
    try:
        config.resolved()
    except ValueError:
        return False
    return True
