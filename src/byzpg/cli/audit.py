"""byzpg audit."""

import json
import re
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.table import Table

from byzpg._files import write_atomically
from byzpg.cli.console import console, counted, progress_line, say, this_command
from byzpg.cli.hardware import HardwareOptions, follows_another_process
from byzpg.config import AUTO, Config
from byzpg.federation.devices import Hardware
from byzpg.runs import provenance

if TYPE_CHECKING:
    from byzpg import training
    from byzpg.experiments.audit import Findings

# Rules with which a leaderboard begins, alone and behind a pre-aggregator.
LEADERBOARD = (
    "Mean",
    "Median",
    "TrimmedMean",
    "MeaMed",
    "Krum",
    "MultiKrum",
    "Bulyan",
    "MDA",
    "MoNNA",
    "RFA",
    "CAF",
    "CenteredClipping(radius=10.0)",
    "NNM(Median())",
    "NNM(TrimmedMean())",
    "NNM(MultiKrum())",
    "NNM(RFA())",
    "Bucketing(RFA())",
    "ARC(TrimmedMean())",
)
BESIDE = ("Mean", "Median", "TrimmedMean", "RFA", "NNM(TrimmedMean())")
# What is left of the budget for the start of Python and for the page.
OVERHEAD_SECONDS, OVERHEAD_SHARE = 6.0, 0.03
LEAST_SECONDS = 20.0


@dataclass(frozen=True)
class Audit:
    """Search for the attack that harms an aggregation rule most, and write one page about what it does.

    Every candidate is a whole training run, and as many of them as possible share one program. The search and the
    report use different seeds. Results are kept: the same command goes on where an audit was stopped.

    Example: byzpg audit --aggregator RFA --budget 10m

    Example: byzpg audit --aggregator my_rules:MyRule --env LunarLander-v3 --algorithm ByzPPO --budget 2h
    """

    aggregator: tuple[str, ...] = ("NNM(TrimmedMean())",)
    """Aggregation rules to audit, also your own, or all for a leaderboard of byzpg's."""
    env: str = "CartPole-v1"
    """Task, as for byzpg train."""
    algorithm: str = AUTO
    """Algorithm, as for byzpg train; one that is robust, such as DecByzPPO, ByzPPO, DecByzPG or ByzPG. Default: the
    best one for the task."""
    num_agents: int = 13
    """Number of agents K, attackers included."""
    num_byzantine: int | None = None
    """Number of Byzantine agents f that the rules tolerate; as many attack. Default: ⌊(K − 1)/4⌋."""
    momentum: float | None = None
    """Momentum of the agents. Default: that of the preset."""
    steps: int | None = None
    """Environment steps per agent and run, with a critic. Default: half of those of the preset."""
    trajectories: int | None = None
    """Trajectories per agent and run, without a critic. Default: half of those of the preset."""
    goal: Literal["area", "end", "target"] = "area"
    """What attackers want: area (the slowest learning), end (the lowest return at the end), or target (that the trained
    policies take a certain action)."""
    action: int | None = None
    """The action that attackers want, with --goal target, on tasks with discrete actions."""
    beside: tuple[str, ...] | None = None
    """Rules to show next to a single audited one, under the attack that was found. Default: five of byzpg's."""
    known: tuple[str, ...] | None = None
    """Known attacks that are tried as well. Default: all of byzpg's that fit."""
    budget: str = "10m"
    """Time for all of it, such as 90s, 10m or 2h; none for all generations, however long they take."""
    generations: int = 8
    """The most generations of candidates."""
    population: int = 8
    """Candidates of each family of attacks, generation and rule."""
    search_seeds: int = 2
    """Seeds on which a candidate is tried; the best ones get twice as many others."""
    report_seeds: int = 6
    """Fresh seeds on which the worst attacks are reported."""
    breaking_point: bool = True
    """Whether to try the worst attack with other numbers of attackers as well."""
    seed: int = 0
    """Seed of the search."""
    directory: Path = Path("audit")
    """Directory for measurements, the page (audit.html), its numbers (audit.json) and its ranking (audit.md)."""
    hardware: HardwareOptions = field(default_factory=Hardware)

    def run(self) -> None:
        from byzpg.experiments.audit import KNOWN, Plan
        from byzpg.experiments.audit import Audit as Search

        if follows_another_process(self.hardware):
            return
        budget = _seconds(self.budget)
        self._check()
        config = self._federation()
        rules = self._tolerant(config) if self.aggregator == ("all",) else self.aggregator
        rules, beside = (
            tuple(dict.fromkeys(str(replace(config, aggregator=each).resolved().aggregator) for each in several))
            for several in (rules, self._beside(rules))
        )
        plan = Plan(
            config=config,
            rules=rules,
            beside=tuple(each for each in beside if each not in rules),
            known=KNOWN if self.known is None else self.known,
            goal=self.goal,
            action=self.action,
            generations=self.generations,
            population=self.population,
            search_seeds=self.search_seeds,
            report_seeds=self.report_seeds,
            breaking=self.breaking_point,
            seed=self.seed,
        )
        settings = config.resolved()
        say(
            f"Auditing {counted(len(rules), 'rule')} on {settings.env}: {settings.algorithm}, K = "
            f"{settings.num_agents}, f = {settings.num_byzantine}, {settings.length:,} {settings.unit} per agent; "
            f"{'no limit of time' if budget == inf else f'budget {budget:,.0f} s'}"
        )
        with progress_line(
            first="compiling", on_stop="Stopping after this block of iterations", continue_with=this_command()
        ) as show:

            def on_progress(what: str, progress: "training.Progress") -> None:
                spent = search.elapsed
                done = progress.done if budget == inf else min(spent / budget, 1.0)
                text = f"{what}: {progress.label}{progress.progress:,} of {progress.total:,} {progress.unit} per agent"
                show(done, text, seconds=spent, ended=progress.done == 1)

            search = Search(plan, self.directory, budget * (1 - OVERHEAD_SHARE) - OVERHEAD_SECONDS, on_progress)
            findings = search.run()
        self._conclude(findings)

    def _check(self) -> None:
        for name, least in (
            ("generations", 0),
            ("population", 1),
            ("search_seeds", 1),
            ("report_seeds", 1),
            ("seed", 0),
        ):
            if (given := getattr(self, name)) < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {given}.")
        if not self.aggregator:
            raise ValueError("--aggregator needs at least one rule, or all.")

    def _tolerant(self, config: Config) -> tuple[str, ...]:
        """The rules of the leaderboard that this federation can have."""
        found = []
        for rule in LEADERBOARD:
            try:
                replace(config, aggregator=rule).resolved()
                found.append(rule)
            except ValueError as error:
                say(f"Left out: {error}")
        return tuple(found)

    def _federation(self) -> Config:
        """The federation to audit, of half the preset's length unless a length is given."""
        config = Config(
            env=self.env,
            algorithm=self.algorithm,
            num_agents=self.num_agents,
            num_byzantine=self.num_byzantine,
            momentum=self.momentum,
            steps=self.steps,
            trajectories=self.trajectories,
        )
        settings = config.resolved()
        config = replace(config, algorithm=settings.algorithm, num_byzantine=settings.num_byzantine)
        if self.steps is None and self.trajectories is None:
            config = replace(config, **{settings.unit: settings.length // 2})
        return config

    def _beside(self, rules: tuple[str, ...]) -> tuple[str, ...]:
        if self.beside is not None:
            return self.beside
        return BESIDE if len(rules) == 1 else ()

    def _conclude(self, findings: "Findings") -> None:
        from byzpg.experiments.report.audit import leaderboard, summary, verdict, write_audit

        about = {**provenance(), "command": this_command(), "seconds": findings.seconds}
        page, numbers = self.directory / "audit.html", summary(findings)
        write_audit(findings, page, about)
        texts = {
            "audit.json": json.dumps({**numbers, "provenance": about}, ensure_ascii=False, indent=1),
            "audit.md": leaderboard(numbers),
        }
        for name, text in texts.items():
            write_atomically(self.directory / name, lambda file, text=text: file.write(text.encode()))
        console.print(_table(findings))
        first = findings.rules[0]
        if first.worst is None:
            say(verdict(findings, first))
        else:
            say(f"Replay the worst attack on {first.rule}: {findings.command(first.worst)}")
        if findings.cut_short:
            say(f"The budget did not suffice for all of: {', '.join(findings.cut_short)}. The same command goes on.")
        say(f"Page: {page}")


def _table(findings: "Findings") -> Table:
    title = f"Learning lost under the worst attack of {findings.candidates:,}, on fresh seeds"
    table = Table(title=title)
    for column in ("rule", "lost [95 %]", "worst seed", "without attack", "verdict"):
        is_text = column in ("rule", "verdict")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=column != "rule", overflow="fold")
    for each in findings.ranked(findings.rules):
        without = f"{each.without.lost.mean():.0%}"
        if each.worst is None:
            table.add_row(each.rule, "–", "–", without, each.verdict)
            continue
        lost = each.worst.estimates()["lost"]
        table.add_row(
            each.rule,
            f"{lost.value:.0%} [{lost.low:.0%}, {lost.high:.0%}]",
            f"{each.worst.lost.max():.0%}",
            without,
            each.verdict,
        )
    return table


def _seconds(budget: str) -> float:
    """The seconds of a text such as 90s, 10m or 2h."""
    if budget == "none":
        return inf
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)", budget)
    if found is None:
        raise ValueError(f"--budget must be a time such as 90s, 10m or 2h, or none; got {budget!r}.")
    seconds = float(found[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[found[2]]
    if seconds < LEAST_SECONDS:
        raise ValueError(f"--budget must be at least {LEAST_SECONDS:.0f}s, got {budget!r}.")
    return seconds
