"""The command that shows what rules withstand."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.progress import Progress
from rich.table import Table

from byzpg.cli.console import check_picture, console, say
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
    """Show the rules at work: robust rules against attacks on their messages.

    Prints the constant C_ra of each pair (how far the worst of many random clouds moved the rule from the honest mean,
    in units of the honest spread) next to the bound proven for the rule, and draws them as a heat map.
    """

    num_agents: int = 13
    """Agents K, attackers included."""
    num_byzantine: int = 3
    """Attackers f."""
    dimension: int = 50
    """Length d of the vectors."""
    trials: int = 64
    """Random honest clouds per pair."""
    seed: int = 0
    output: Path = Path("byzpg-certificates.png")
    """Where the picture goes; .png, .svg or .pdf."""

    def run(self) -> None:
        from byzpg.experiments import figures

        check_picture(self.output)
        aggregators.Mean().check(self.num_agents, self.num_byzantine)
        tolerant = [rule for rule in RULES if rule.max_byzantine(self.num_agents) >= self.num_byzantine]
        setting = f"K = {self.num_agents}, f = {self.num_byzantine}"
        table = Table(title=f"{setting}, worst of {self.trials} clouds per attack")
        table.add_column("rule")
        table.add_column("worst attack")
        table.add_column("C_ra there", justify="right")
        table.add_column("proven bound", justify="right")
        constants: dict[str, dict[str, float]] = {}
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("", total=len(tolerant) * len(ATTACKS))
            for rule in tolerant:
                row, bound = {}, None
                for attack in ATTACKS:
                    progress.update(bar, advance=1, description=f"{rule} under {attack}")
                    measured = certificate(
                        rule,
                        attack,
                        num_agents=self.num_agents,
                        num_byzantine=self.num_byzantine,
                        dimension=self.dimension,
                        trials=self.trials,
                        seed=self.seed,
                    )
                    row[type(attack).__name__], bound = measured.measured["C_ra"], measured.bounds["C_ra"]
                worst = max(row, key=row.__getitem__)
                constants[str(rule).removesuffix("()")] = row
                known = "none known" if bound is None else f"{bound:.3g}"
                table.add_row(str(rule), worst, figures.short_number(row[worst]), known)
        console.print(table)
        for rule in RULES:
            if rule not in tolerant:
                console.print(f"Left out: {rule} needs {rule.bound}.")
        title = f"Robust rules under attack: {setting}"
        figures.save(figures.constants_heatmap(constants, title), self.output)
        say(f"Picture: {self.output}")


COMMANDS = (Annotated[Certify, tyro.conf.subcommand("certify")],)
