"""Flower's run configuration, read and checked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from byzpg._registry import addresses, members, parse
from byzpg.config import Config, Settings
from byzpg.federation.algorithms import ALGORITHMS
from byzpg.robust.attacks import Attack
from byzpg.robust.components import nearest, plain_name

# Options of a Config that only simulated runs have: here attackers are real, or rehearsed.
SIMULATED = ("num_attackers", "attack", "byzantine_set", "num_seeds", "coins", "agreement", "rounds")
# Options under their names in byzpg 0.1.
OLD_NAMES = {"num_declared": "num_byzantine", "rehearsal_liars": "rehearsal_attackers"}

# Faults of a reply rather than of the gradient in it.
ReplyFault = Literal["WrongShape", "WrongType", "WrongRound", "WrongPosition", "Malformed", "Crash"]
REPLY_FAULTS: tuple[ReplyFault, ...] = get_args(ReplyFault)


@dataclass(frozen=True)
class Rehearsal:
    """Which clients attack on purpose, and how: the attacks in turn, one in every round."""

    attackers: tuple[int, ...] = ()
    attacks: tuple[Attack | ReplyFault, ...] = ()

    @classmethod
    def of(cls, attack: str, attackers: str, num_agents: int) -> "Rehearsal":
        """Read a rehearsal from text.

        Args:
            attack: The attacks, separated by semicolons.
            attackers: The positions of the attackers, separated by commas.
            num_agents: The number of clients.

        Raises:
            ValueError: If an attack or a position does not exist, or if no client is honest.
        """
        try:
            positions = tuple(int(position) for position in attackers.split(",") if position.strip())
        except ValueError:
            raise ValueError(f"rehearsal-attackers must be positions such as '0,3', got {attackers!r}.") from None
        if not all(0 <= position < num_agents for position in positions) or len(set(positions)) < len(positions):
            raise ValueError(
                f"rehearsal-attackers must be different positions of 0 to {num_agents - 1}, got {attackers!r}."
            )
        texts = [text.strip() for text in attack.split(";") if text.strip()]
        attacks: tuple[Attack | ReplyFault, ...] = tuple(_parse_attack(text) for text in texts)
        if bool(attacks) != bool(positions):
            raise ValueError("rehearsal-attack and rehearsal-attackers belong together: give both, or neither.")
        if len(positions) == num_agents:
            raise ValueError(f"rehearsal-attackers must leave an honest client, got all {num_agents}.")
        return cls(positions, attacks)

    def attack(self, position: int, server_round: int) -> Attack | ReplyFault | None:
        """The attack of the client at this position in this round; None if it is honest."""
        return self.attacks[(server_round - 1) % len(self.attacks)] if position in self.attackers else None


def _parse_attack(text: str) -> Attack | ReplyFault:
    for fault in REPLY_FAULTS:
        if plain_name(text) == plain_name(fault):
            return fault
    known = [*REPLY_FAULTS, *members("attack")]
    if not addresses(text) and plain_name(text.partition("(")[0]) not in map(plain_name, known):
        raise ValueError(f"rehearsal-attack: there is no {text!r}; known: {', '.join(known)}.{nearest(text, known)}")
    attack = parse("attack", text)
    assert isinstance(attack, Attack)
    return attack


@dataclass(frozen=True)
class Options:
    """The run configuration; an option whose text is empty is left out."""

    settings: Settings
    directory: Path  # where the server keeps runs
    reply_seconds: float  # how long it waits for clients, and for the replies of a round
    rehearsal: Rehearsal | None  # None: the random numbers of all clients are secret, and no client attacks on purpose

    @classmethod
    def of(cls, run_config: Mapping[str, Any]) -> "Options":
        """Read Flower's run configuration, also one with the option names of byzpg 0.1.

        Raises:
            ValueError: If an option is unknown, wrong, or not for a run on Flower.
        """
        given = {name.replace("-", "_"): value for name, value in run_config.items() if value != ""}
        for old, new in OLD_NAMES.items():
            if old in given and new in given:
                names = [name.replace("_", "-") for name in (old, new)]
                raise ValueError(f"run config: {names[0]} is the old name of {names[1]}: give only one of them.")
            if old in given:
                given[new] = given.pop(old)
        directory, seconds = given.pop("directory", "runs"), given.pop("reply_seconds", 600)
        rehearsed = given.pop("rehearsal", False)
        attack, attackers = given.pop("rehearsal_attack", ""), given.pop("rehearsal_attackers", "")
        if not isinstance(directory, str):
            raise ValueError(f"directory must be a path in quotes, got {directory!r}.")
        if type(seconds) not in (int, float) or not 0 < seconds < math.inf:
            raise ValueError(f"reply-seconds must be a positive number, got {seconds!r}.")
        if type(rehearsed) is not bool:
            raise ValueError(f"rehearsal must be true or false, got {rehearsed!r}.")
        if (attack or attackers) and not rehearsed:
            raise ValueError(
                "rehearsal-attack and rehearsal-attackers are for rehearsals: set rehearsal=true, or neither."
            )
        settings = _settings(given)
        rehearsal = Rehearsal.of(str(attack), str(attackers), settings.num_agents) if rehearsed else None
        return cls(settings, Path(directory), float(seconds), rehearsal)


def _settings(given: dict[str, Any]) -> Settings:
    for option in SIMULATED:
        if option in given:
            name = option.replace("_", "-")
            raise ValueError(f"run config: {name} is for simulated runs; leave it out, and see rehearsal-attack.")
    if isinstance(hidden := given.get("hidden"), str):  # Flower's configuration has no lists
        try:
            given["hidden"] = tuple(int(size) for size in hidden.split(","))
        except ValueError:
            raise ValueError(f"run config: hidden must be sizes such as '16,16', got {hidden!r}.") from None
    values = {"algorithm": "ByzPG", "num_seeds": 1, **given}
    for name, algorithm in ALGORITHMS.items():
        if plain_name(str(values["algorithm"])) != plain_name(name):
            continue
        if not algorithm.centralized:
            served = [other for other, each in ALGORITHMS.items() if each.centralized and each.agent is algorithm.agent]
            raise ValueError(f"run config: algorithm {name} has no server: use one of {', '.join(served)}.")
        if not algorithm.robust:
            values.setdefault("num_byzantine", 0)
    # Clients may attack, but no attack is simulated.
    settings = Config.of({**values, "num_attackers": 0}, "run config").resolved()
    if settings.transport:
        raise ValueError("run config: transport needs earlier parameters, which the server does not send.")
    if not ALGORITHMS[settings.algorithm].robust and settings.num_byzantine:
        raise ValueError(
            f"run config: {settings.algorithm} averages all replies and tolerates no attacker: num-byzantine must be "
            f"0, got {settings.num_byzantine}."
        )
    return settings
