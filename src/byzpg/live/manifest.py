"""The manifest, federation.toml: who takes part, what they train, and what they tolerate.

Its hash is in every message.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from byzpg import _parts
from byzpg._files import write_atomically
from byzpg.config import Config, Settings
from byzpg.federation.algorithms import ALGORITHMS
from byzpg.live.identity import Member, read_toml, to_toml
from byzpg.live.protocol import Course

VERSION = 1
# Options that a federation fixes: its members are the agents, and no attacker is simulated.
FIXED = ("num_agents", "num_byzantine", "num_attackers", "attack", "byzantine_set", "num_seeds")
# The name of num_byzantine in the files of byzpg 0.1 and in the bytes that are hashed, which are part of the protocol.
NUM_BYZANTINE_ON_WIRE = "num_faulty"
# Keys that a first manifest lacks, with what they are then.
OPTIONAL: dict[str, Any] = {"predecessor": None, "from_iteration": 0, "initial": None}
HASH = re.compile(r"[0-9a-f]{64}")
# The name of num_byzantine in a Config of byzpg 0.1.
OLD_OPTION = "num_declared"


@dataclass(frozen=True)
class Times:
    """How long members wait, in seconds."""

    grace: float = 1.0  # for the last f messages of a round, once K − f have arrived
    start_grace: float = 600.0  # the same at the start barrier, where others may still be starting
    linger: float = 30.0  # the same at the final barrier, where others may still need messages
    retry: float = 0.5  # before asking again for a missing message

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) not in (int, float) or not 0 < value < 1e9:
                raise ValueError(f"times: {name} must be a positive number of seconds, got {value!r}.")


@dataclass(frozen=True)
class Manifest:
    """A federation, described by the same manifest at every member."""

    federation: str  # the federation's id
    run: str  # the id of this run of it
    num_byzantine: int  # f
    rehearsal: bool  # whether members may attack on purpose
    times: Times
    training: dict[str, Any]  # options of Config
    members: tuple[Member, ...]
    predecessor: str | None = None  # the digest, hexadecimal, of the manifest that this one replaces
    from_iteration: int = 0  # the iteration before which it replaces it
    initial: str | None = None  # SHA-256 of θ_0, hexadecimal; None if θ_0 follows from the seed

    def __post_init__(self) -> None:
        for field in ("federation", "run"):
            try:
                UUID(getattr(self, field))
            except (ValueError, AttributeError, TypeError):
                raise ValueError(f"{field} must be an id such as {uuid4()}, got {getattr(self, field)!r}.") from None
        if type(self.num_byzantine) is not int or type(self.rehearsal) is not bool:
            raise ValueError("num_byzantine must be a whole number, and rehearsal true or false.")
        for field in ("predecessor", "initial"):
            value = getattr(self, field)
            if value is not None and not (isinstance(value, str) and HASH.fullmatch(value)):
                raise ValueError(f"{field} must be 64 digits of 0-9 and a-f, got {value!r}.")
        start = self.from_iteration
        if type(start) is not int or not 0 <= start < 2**32 or (start > 0) != (self.predecessor is not None):
            raise ValueError(
                f"from_iteration must be a whole number of 1 or more if there is a predecessor, and is left out "
                f"otherwise; got {start!r}."
            )
        if len(self.members) < 2:
            raise ValueError(f"a federation needs at least 2 members, got {len(self.members)}.")
        for what in ("name", "address", "public_key", "fingerprint"):
            values = [getattr(member, what) for member in self.members]
            twice = [value for value in values if values.count(value) > 1]
            if twice:
                raise ValueError(f"members must differ: two have the {what} {twice[0]}.")
        for option in (*FIXED, OLD_OPTION):
            if option in self.training:
                raise ValueError(f"training: {option} follows from the members and num_byzantine: leave it out.")
        algorithm = self.options()["algorithm"]
        fitting = [name for name, each in ALGORITHMS.items() if not each.centralized and not each.single]
        if algorithm not in fitting:
            raise ValueError(
                f"training: {algorithm} does not run among members without a server: use {' or '.join(fitting)}."
            )
        try:
            _ = self.canonical
        except TypeError as error:
            raise ValueError(f"training must hold plain values, components as text: {error}.") from None

    def options(self) -> dict[str, Any]:
        """The options of the training, as far as they are known without running code that others have named."""
        return self._config().without_own_code()

    @property
    def own_modules(self) -> set[str]:
        """The modules outside byzpg that it names; nothing is imported."""
        return self._config().own_modules

    def settings(self) -> Settings:
        """The settings of a simulation that trains the same. The modules that it names are imported.

        Raises:
            UntrustedCodeError: If the user has not named these modules in this process.
        """
        _parts.check_trusted(self.own_modules, "the manifest", remembered=False)
        return self._config().resolved()

    def _config(self) -> Config:
        return replace(
            Config.of(self.training, "training"),
            num_agents=len(self.members),
            num_byzantine=self.num_byzantine,
            num_attackers=0,
            num_seeds=1,
        )

    def as_data(self) -> dict[str, Any]:
        """Plain data, as in the file."""
        return {
            "version": VERSION,
            "federation": self.federation,
            "run": self.run,
            "num_byzantine": self.num_byzantine,
            "rehearsal": self.rehearsal,
            "times": {name: float(seconds) for name, seconds in asdict(self.times).items()},
            "training": {option: value for option, value in self.training.items() if value is not None},
            "members": [member.as_data() for member in self.members],
            **self._optional_data(),
        }

    def _optional_data(self) -> dict[str, Any]:
        """What a first manifest lacks; without it, the canonical bytes are those of byzpg 0.2."""
        return {name: value for name in OPTIONAL if (value := getattr(self, name))}

    @property
    def canonical(self) -> bytes:
        """The bytes that are hashed: the same for the same content, however the file is formatted."""
        data = self.as_data()
        data[NUM_BYZANTINE_ON_WIRE] = data.pop("num_byzantine")
        return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()

    @property
    def digest(self) -> bytes:
        """SHA-256 of the canonical bytes."""
        return sha256(self.canonical).digest()

    @property
    def suffix(self) -> str:
        """What the names of a member's files end with: nothing for a first manifest, else a part of its hash."""
        return "" if self.predecessor is None else f"-{self.digest.hex()[:16]}"

    def index(self, name: str) -> int:
        """The position of a member."""
        names = [member.name for member in self.members]
        if name not in names:
            raise ValueError(f"{name!r} is not a member of this federation, whose members are {', '.join(names)}.")
        return names.index(name)

    @property
    def exchanges(self) -> int:
        """Rounds of gradients in an iteration."""
        options = self.options()
        return options["ppo"].num_exchanges if ALGORITHMS[options["algorithm"]].agent.unit == "steps" else 1

    def course(self, own: int, num_iterations: int, rounds: int) -> Course:
        """The sequence of rounds, as seen by the member at position `own`."""
        return Course(
            num_members=len(self.members),
            num_byzantine=self.num_byzantine,
            own=own,
            exchanges=self.exchanges,
            rounds=rounds,
            num_iterations=num_iterations,
        )

    def difference(self, other: bytes) -> str:
        """Describe how the canonical manifest of another member differs.

        Args:
            other: What the other member sent; it can be anything.
        """
        try:
            theirs = json.loads(other)
            if not isinstance(theirs, dict):
                return "theirs is not a manifest"
            found = list(_differences("", _with_present_name(json.loads(self.canonical)), _with_present_name(theirs)))
        except (ValueError, RecursionError):
            return "theirs cannot be read"
        words = "; ".join(found[:8]) or "theirs has the same content in another format"
        return words + (f"; and {len(found) - 8} more" if len(found) > 8 else "")

    def write(self, path: Path) -> None:
        """Write the manifest as TOML; an existing file is never overwritten."""
        if path.exists():
            raise ValueError(f"{path} exists already: choose another file for the manifest.")
        write_atomically(path, lambda file: file.write(self.to_toml().encode()))

    def to_toml(self) -> str:
        data = self.as_data()
        times, training, members = data.pop("times"), data.pop("training"), data.pop("members")
        again = "# To run the federation again from the beginning, change the id `run`.\n"
        parts = [
            "# A byzpg federation. Every member needs a manifest with the same content.\n"
            + (again if self.predecessor is None else "")
            + to_toml(data),
            "[times] # seconds\n" + to_toml(times),
            "[training] # options of `byzpg train`\n" + to_toml(training),
            *("[[members]]\n" + to_toml(member) for member in members),
        ]
        return "\n".join(parts)

    @classmethod
    def load(cls, path: Path) -> "Manifest":
        """Read a manifest from a TOML file: also one of byzpg 0.1, or an amendment, whose approvals are not read."""
        values = read_toml(path, "manifest")
        values.pop("approvals", None)
        return cls.of(values, str(path))

    @classmethod
    def of(cls, values: dict[str, Any], source: str) -> "Manifest":
        """Make a manifest from plain data.

        Args:
            values: The content of a file, also of one written by byzpg 0.1.
            source: What error messages call it.
        """
        values = _with_present_name(values)
        known = {"version", "federation", "run", "num_byzantine", "rehearsal", "times", "training", "members"}
        for name in sorted((values.keys() - OPTIONAL.keys()) ^ known):
            raise ValueError(f"{source}: {f'unknown key {name!r}' if name in values else f'{name} is missing'}.")
        if values["version"] != VERSION:
            raise ValueError(
                f"{source}: version must be {VERSION}, got {values['version']!r}: update byzpg or the file."
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
                federation=values["federation"],
                run=values["run"],
                num_byzantine=values["num_byzantine"],
                rehearsal=values["rehearsal"],
                times=Times(**values["times"]),
                training=values["training"],
                members=tuple(Member.of(each) for each in values["members"]),
                **{name: values.get(name, default) for name, default in OPTIONAL.items()},
            )
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None


def new_manifest(
    members: Sequence[Member], num_byzantine: int, training: dict[str, Any], times: Times, *, rehearsal: bool
) -> Manifest:
    """Make the manifest of a new federation, with new ids.

    Args:
        members: The members, in the order of their positions.
        num_byzantine: f, the number of faulty members to tolerate.
        training: Options of `Config`.
        times: How long members wait for each other.
        rehearsal: Whether members may attack on purpose.
    """
    return Manifest(
        federation=str(uuid4()),
        run=str(uuid4()),
        num_byzantine=num_byzantine,
        rehearsal=rehearsal,
        times=times,
        training=training,
        members=tuple(members),
    )


def _with_present_name(values: dict[str, Any]) -> dict[str, Any]:
    """The same data, with num_byzantine under its present name; both names at once stay, and are an error."""
    if NUM_BYZANTINE_ON_WIRE not in values or "num_byzantine" in values:
        return values
    return {"num_byzantine" if name == NUM_BYZANTINE_ON_WIRE else name: value for name, value in values.items()}


def _differences(where: str, mine: Any, theirs: Any) -> Iterator[str]:
    """Yield texts `what: here X, there Y`; theirs can be anything."""
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
            yield "members: in another order"
    elif json.dumps(mine) != json.dumps(theirs):  # as text, because 1 == 1.0
        yield f"{where}: here {_brief(mine)}, there {_brief(theirs)}"


def _brief(value: Any) -> str:
    if value is None:
        return "nothing"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
