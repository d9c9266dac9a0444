"""byzpg certify."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress
from rich.table import Table

from byzpg.cli.console import check_plot_path, console, say
from byzpg.cli.labels import short
from byzpg.robust import aggregators, attacks
from byzpg.robust.certificates import certificate

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
    """Measure how robust the aggregation rules are under twelve attacks.

    For each pair of a rule and an attack, C_ra is the largest squared distance between the aggregate and the honest
    mean over many random samples, in units of the honest spread. The command prints the worst of these attacks next to
    the bound that is proven for the rule, and plots a heat map of all pairs. Attacks that are not in the heat map can
    do worse.

    Example: byzpg certify --num-agents 20 --num-byzantine 4
    """

    num_agents: int = 13
    """Number of agents K, attackers included."""
    num_byzantine: int = 3
    """Number of Byzantine agents f that the rules tolerate; as many attack."""
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
        aggregators.Mean().check(self.num_agents, self.num_byzantine)
        tolerant = [rule for rule in RULES if rule.max_byzantine(self.num_agents) >= self.num_byzantine]
        setting = f"K = {self.num_agents}, f = {self.num_byzantine}"
        table = Table(title=f"{setting}, worst of {self.trials} samples per attack")
        for column in ("rule", "worst attack", "C_ra there", "proven bound"):
            table.add_column(column, justify="left" if "C_ra" not in column and "bound" not in column else "right")
        constants: dict[str, Mapping[str, float]] = {}
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("", total=len(tolerant) * len(ATTACKS))
            for rule in tolerant:
                row, bound = {}, None
                for attack in ATTACKS:
                    progress.update(bar, advance=1, description=f"{rule} under {attack}")
                    row[type(attack).__name__], bound = self._measure(rule, attack)
                worst = max(row, key=row.__getitem__)
                constants[short(rule)] = row
                known = "none known" if bound is None else f"{bound:.3g}"
                table.add_row(str(rule), worst, figures.short_number(row[worst]), known)
        console.print(table)
        for rule in RULES:
            if rule not in tolerant:
                say(f"Left out: {rule} needs {rule.bound}.")
        title = f"Robustness of aggregation rules: {setting}"
        figures.save(figures.constants_heatmap(constants, title), self.output)
        say(f"Plot: {self.output}")

    def _measure(self, rule: aggregators.Aggregator, attack: attacks.MessageAttack) -> tuple[float, float | None]:
        """The measured C_ra, and the bound proven for it."""
        found = certificate(
            rule,
            attack,
            num_agents=self.num_agents,
            num_byzantine=self.num_byzantine,
            dimension=self.dimension,
            trials=self.trials,
            seed=self.seed,
        )
        return found.measured["C_ra"], found.bounds["C_ra"]
