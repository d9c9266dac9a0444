"""byzpg list."""

from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from byzpg import _registry, envs
from byzpg.cli.console import console
from byzpg.envs import host
from byzpg.federation.algorithms import ALGORITHMS

# The options that take a member of a family, where they do not have its name.
OPTIONS = {"correction": "--importance", "environment": "--env", "network": "--policy"}


@dataclass(frozen=True)
class List:
    """List the algorithms, rules, attacks and environments."""

    def run(self) -> None:
        families = {"algorithm": {name: algorithm.summary for name, algorithm in ALGORITHMS.items()}}
        for family in _registry.FAMILIES:
            members = _registry.members(family)
            families[family] = {name: _registry.summary(member) for name, member in members.items()}
        families["network"] = {
            "auto": "The built-in multilayer perceptron, which has the options --hidden and --activation.",
            "module:Name": "Your own: a subclass of byzpg.networks.Network, or a function that makes a module.",
        }
        families["environment"] = {name: _registry.summary(member) for name, member in envs.ENVIRONMENTS.items()}
        families["environment"] |= host.available()
        for family, summaries in families.items():
            option = OPTIONS.get(family, f"--{family.replace(' ', '-')}")
            title = f"{family.capitalize()} ({option})"
            table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
            for name, summary in summaries.items():
                table.add_row(name, escape(summary))
            console.print(table)
            console.print()
