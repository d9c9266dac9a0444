"""byzpg certify."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.progress import Progress
from rich.table import Table

from byzpg._registry import parse
from byzpg.cli.console import check_plot_path, console, say
from byzpg.cli.labels import short
from byzpg.robust import aggregators, attacks
from byzpg.robust.attacks import MessageAttack
from byzpg.robust.certificates import certificate, default_num_byzantine

C = TypeVar("C")

RULES = (
    aggregators.Mean(),
    aggregators.Median(),
    aggregators.TrimmedMean(),
    aggregators.MeaMed(),
    aggregators.Krum(),
    aggregators.MultiKrum(),
    aggregators.Bulyan(),
    aggregators.MDA(),
    aggregators.MoNNA(),
    aggregators.RFA(),
    aggregators.CAF(),
    aggregators.CenteredClipping(radius=10.0),
    aggregators.Bucketing(aggregators.RFA()),
    aggregators.NNM(aggregators.TrimmedMean()),
    aggregators.NNM(aggregators.RFA()),
    aggregators.ARC(aggregators.RFA()),
)
ATTACKS = (
    attacks.AvgZero(),
    attacks.LargeNoise(),
    attacks.SignFlip(),
    attacks.IPM(),
    attacks.ALIE(),
    attacks.MinMax(),
    attacks.MinSum(),
    attacks.Mimic(),
    attacks.MDAFooling(),
    attacks.Zero(),
    attacks.NonFinite(),
    attacks.Silent(),
)


@dataclass(frozen=True)
class Certify:
    """Measure how robust aggregation rules are under attacks.

    For each pair of a rule and an attack, C_ra is the largest squared distance between the aggregate and the honest
    mean over many random samples, in units of the honest spread. The command prints the worst of these attacks next to
    the bound that is proven for the rule, and plots a heat map of all pairs. Attacks that are not in the heat map can
    do worse.

    Example: byzpg certify --num-agents 20

    Example: byzpg certify --rules my_rules:MyRule "NNM(my_rules:MyRule)" RFA --attacks my_rules:MyAttack ALIE
    """

    num_agents: int = 13
    """Number of agents K, attackers included."""
    num_byzantine: int | None = None
    """Number of Byzantine agents f that the rules tolerate; as many attack. Default: ⌊(K − 1)/4⌋ and at least 1, or
    fewer if the given rules tolerate fewer."""
    rules: tuple[str, ...] = ()
    """Aggregation rules to measure, also your own. Default: sixteen of byzpg's."""
    attacks: tuple[str, ...] = ()
    """Attacks on messages, also your own. Default: twelve of byzpg's."""
    dimension: int = 50
    """Length d of the vectors."""
    trials: int = 64
    """Number of random samples per pair."""
    seed: int = 0
    """Seed of the samples."""
    output: Path = Path("byzpg-certificates.png")
    """File for the plot: .png, .svg or .pdf."""

    def run(self) -> None:
        from byzpg.experiments import figures

        check_plot_path(self.output)
        rules = [_read("aggregator", text, aggregators.Aggregator) for text in self.rules] or RULES
        chosen = [_read("attack", text, MessageAttack) for text in self.attacks] or ATTACKS
        num_byzantine = self.num_byzantine
        if num_byzantine is None:
            num_byzantine = default_num_byzantine(rules if self.rules else [], self.num_agents)
        aggregators.Mean().check(self.num_agents, num_byzantine)
        for rule in rules if self.rules else ():
            rule.check(self.num_agents, num_byzantine)
        tolerant = [rule for rule in rules if rule.max_byzantine(self.num_agents) >= num_byzantine]
        setting = f"K = {self.num_agents}, f = {num_byzantine}"
        table = Table(title=f"{setting}, worst of {self.trials} samples per attack")
        for column in ("rule", "worst attack", "C_ra there", "proven bound"):
            table.add_column(column, justify="left" if "C_ra" not in column and "bound" not in column else "right")
        constants: dict[str, Mapping[str, float]] = {}
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("", total=len(tolerant) * len(chosen))
            for rule in tolerant:
                row, bound = {}, None
                for attack in chosen:
                    progress.update(bar, advance=1, description=f"{rule} under {attack}")
                    row[short(attack)], bound = self._measure(rule, attack, num_byzantine)
                worst = max(row, key=row.__getitem__)
                constants[short(rule)] = row
                known = "none known" if bound is None else f"{bound:.3g}"
                table.add_row(str(rule), worst, figures.short_number(row[worst]), known)
        console.print(table)
        for rule in rules:
            if rule not in tolerant:
                say(f"Left out: {rule} needs {rule.bound}.")
        title = f"Robustness of aggregation rules: {setting}"
        figures.save(figures.constants_heatmap(constants, title), self.output)
        say(f"Plot: {self.output}")

    def _measure(
        self, rule: aggregators.Aggregator, attack: MessageAttack, num_byzantine: int
    ) -> tuple[float, float | None]:
        """The measured C_ra, and the bound proven for it."""
        found = certificate(
            rule,
            attack,
            num_agents=self.num_agents,
            num_byzantine=num_byzantine,
            dimension=self.dimension,
            trials=self.trials,
            seed=self.seed,
        )
        return found.measured["C_ra"], found.bounds["C_ra"]


def _read(family: str, text: str, kind: type[C]) -> C:
    component = parse(family, text)
    if not isinstance(component, kind):
        raise ValueError(f"{component} is not an attack on messages, such as AvgZero.")
    return component
