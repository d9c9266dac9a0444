"""federation.toml: who takes part, what they train, and what they tolerate. Its hash is in every message."""

import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from byzpg._files import write_atomically
from byzpg.config import Config, Settings
from byzpg.federation.algorithms import ALGORITHMS
from byzpg.live.identity import Member, to_toml
from byzpg.live.protocol import Course

VERSION = 1
# What a federation fixes by itself: its members are the agents, and nobody says in advance who lies.
FIXED = ("num_agents", "num_byzantine", "num_attackers", "attack", "byzantine_set", "num_seeds")
# The name of num_byzantine in files of byzpg 0.1, and in the bytes that are hashed: they are part of the protocol.
NUM_BYZANTINE_ON_WIRE = "num_faulty"


@dataclass(frozen=True)
class Times:
    """How long members wait, in seconds."""

    grace: float = 1.0  # for the last f, once K − f messages of a step are in
    start_grace: float = 600.0  # the same before the first step: others may still be starting
    linger: float = 30.0  # the same after the last step: others may still need what was sent
    retry: float = 0.5  # between two questions for a missing message

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) not in (int, float) or not 0 < value < 1e9:
                raise ValueError(f"times: {name} must be a positive number of seconds, got {value!r}.")


@dataclass(frozen=True)
class Manifest:
    """A federation, the same at every member."""

    federation: str  # its id
    run: str  # of this run of it
    num_byzantine: int  # f
    rehearsal: bool  # whether members may attack on purpose, --attack
    times: Times
    training: dict[str, Any]  # options of Config
    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        for field in ("federation", "run"):
            try:
                UUID(getattr(self, field))
            except (ValueError, AttributeError, TypeError):
                raise ValueError(f"{field} must be an id such as {uuid4()}, got {getattr(self, field)!r}.") from None
        if type(self.num_byzantine) is not int or type(self.rehearsal) is not bool:
            raise ValueError("num_byzantine must be a whole number, and rehearsal true or false.")
        if len(self.members) < 2:
            raise ValueError(f"a federation needs at least 2 members, got {len(self.members)}.")
        for what in ("name", "address", "public_key", "fingerprint"):
            values = [getattr(member, what) for member in self.members]
            twice = [value for value in values if values.count(value) > 1]
            if twice:
                raise ValueError(f"members must differ: the {what} {twice[0]} is there twice.")
        for option in FIXED:
            if option in self.training:
                raise ValueError(f"training: {option} follows from the members and num_byzantine: leave it out.")
        self.settings()
        try:
            _ = self.canonical
        except TypeError as error:
            raise ValueError(f"training must hold plain values, components as text: {error}.") from None

    def settings(self) -> Settings:
        """What is trained, as the simulator would have it."""
        config = Config.of(self.training, "training")
        config = replace(
            config,
            num_agents=len(self.members),
            num_byzantine=self.num_byzantine,
            num_attackers=0,
            num_seeds=1,
        )
        settings = config.resolved()
        algorithm = ALGORITHMS[settings.algorithm]
        if algorithm.centralized or algorithm.single:
            fitting = [name for name, each in ALGORITHMS.items() if not each.centralized and not each.single]
            raise ValueError(
                f"training: {settings.algorithm} is not for members without a server: use {' or '.join(fitting)}."
            )
        return settings

    def as_data(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "federation": self.federation,
            "run": self.run,
            "num_byzantine": self.num_byzantine,
            "rehearsal": self.rehearsal,
            "times": {name: float(seconds) for name, seconds in asdict(self.times).items()},
            "training": {option: value for option, value in self.training.items() if value is not None},
            "members": [member.as_data() for member in self.members],
        }

    @property
    def canonical(self) -> bytes:
        """The same bytes for the same content, however the file is written."""
        data = self.as_data()
        data[NUM_BYZANTINE_ON_WIRE] = data.pop("num_byzantine")
        return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> bytes:
        return sha256(self.canonical).digest()

    def index(self, name: str) -> int:
        names = [member.name for member in self.members]
        if name not in names:
            raise ValueError(f"{name!r} is no member of this federation: {', '.join(names)}.")
        return names.index(name)

    def course(self, own: int, num_iterations: int, rounds: int) -> Course:
        return Course(len(self.members), self.num_byzantine, own, rounds, num_iterations)

    def difference(self, other: bytes) -> str:
        """What differs in somebody's canonical manifest, in words."""
        try:
            theirs = json.loads(other)
            if not isinstance(theirs, dict):
                return "theirs is no manifest"
            if NUM_BYZANTINE_ON_WIRE in theirs:
                theirs["num_byzantine"] = theirs.pop(NUM_BYZANTINE_ON_WIRE)
            found = list(_differences("", json.loads(json.dumps(self.as_data())), theirs))
        except (ValueError, RecursionError):
            return "theirs cannot be read"
        words = "; ".join(found[:8]) or "theirs has the same content, written in another way"
        return words + (f"; and {len(found) - 8} more" if len(found) > 8 else "")

    def write(self, path: Path) -> None:
        if path.exists():
            raise ValueError(f"{path} is there already: choose another --manifest.")
        write_atomically(path, lambda file: file.write(self.to_toml().encode()))

    def to_toml(self) -> str:
        data = self.as_data()
        times, training, members = data.pop("times"), data.pop("training"), data.pop("members")
        parts = [
            "# A byzpg federation. Every member needs this very content: change it here, and give it to all of them.\n"
            "# To run it again from the beginning, put another id at `run`.\n" + to_toml(data),
            "[times] # seconds\n" + to_toml(times),
            "[training] # options of `byzpg train`\n" + to_toml(training),
            *("[[members]]\n" + to_toml(member) for member in members),
        ]
        return "\n".join(parts)

    @classmethod
    def load(cls, path: Path) -> "Manifest":
        try:
            values = tomllib.loads(path.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
            raise ValueError(f"manifest {path} cannot be read: {error}") from None
        return cls.of(values, str(path))

    @classmethod
    def of(cls, values: dict[str, Any], source: str) -> "Manifest":
        if NUM_BYZANTINE_ON_WIRE in values and "num_byzantine" not in values:
            values = {**values, "num_byzantine": values[NUM_BYZANTINE_ON_WIRE]}
            del values[NUM_BYZANTINE_ON_WIRE]
        known = {"version", "federation", "run", "num_byzantine", "rehearsal", "times", "training", "members"}
        for name in sorted(values.keys() ^ known):
            raise ValueError(f"{source}: {f'there is no {name!r}' if name in values else f'{name} is missing'}.")
        if values["version"] != VERSION:
            raise ValueError(
                f"{source}: version must be {VERSION}, got {values['version']!r}: update byzpg, or the file."
            )
        for table in ("times", "training"):
            if not isinstance(values[table], dict):
                raise ValueError(f"{source}: {table} must be a table.")
        if not isinstance(values["members"], list) or not all(isinstance(each, dict) for each in values["members"]):
            raise ValueError(f"{source}: members must be a list of tables.")
        unknown_times = values["times"].keys() - asdict(Times()).keys()
        if unknown_times:
            raise ValueError(f"{source}: times has no {', '.join(sorted(unknown_times))}.")
        try:
            return cls(
                values["federation"],
                values["run"],
                values["num_byzantine"],
                values["rehearsal"],
                Times(**values["times"]),
                values["training"],
                tuple(Member.of(each, source) for each in values["members"]),
            )
        except ValueError as error:
            raise ValueError(f"{source}: {str(error).removeprefix(f'{source}: ')}") from None


def new_manifest(
    members: Sequence[Member], num_byzantine: int, training: dict[str, Any], times: Times, rehearsal: bool
) -> Manifest:
    return Manifest(str(uuid4()), str(uuid4()), num_byzantine, rehearsal, times, training, tuple(members))


def _differences(where: str, mine: Any, theirs: Any) -> Iterator[str]:
    """Lines `what: here X, there Y`. Theirs can be anything: it is what somebody sent."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in sorted(mine.keys() | theirs.keys()):
            name = key if key in mine else _brief(key)
            yield from _differences(f"{where}.{name}".lstrip("."), mine.get(key), theirs.get(key))
    elif isinstance(mine, list) and isinstance(theirs, list) and where == "members":
        ours, others = (
            {str(member["name"]): member for member in each if isinstance(member, dict) and "name" in member}
            for each in (mine, theirs)
        )
        yield from _differences("member", ours, others)
        if len(mine) != len(theirs):
            yield f"members: here {len(mine)}, there {len(theirs)}"
        elif ours == others and mine != theirs:
            yield "members: another order"
    elif json.dumps(mine) != json.dumps(theirs):  # to which 1 is not 1.0
        yield f"{where}: here {_brief(mine)}, there {_brief(theirs)}"


def _brief(value: Any) -> str:
    if value is None:
        return "nothing"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
