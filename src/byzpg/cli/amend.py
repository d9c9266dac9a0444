"""byzpg federation: amend, approve and recover."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from byzpg.cli.console import say
from byzpg.cli.membership import Membership

if TYPE_CHECKING:  # needs the extra packages
    from byzpg.live.amendment import Amendment
    from byzpg.live.manifest import Manifest

NAME_IN_DIRECTORY = "amendment.toml"  # where a running member looks


@dataclass(frozen=True)
class Amend:
    """Propose a change of the members while the federation runs: add, remove or replace members, or rotate keys.

    The proposal takes effect once K − f of the members have approved it with `byzpg federation approve`.

    Example: byzpg federation amend federation.toml --replace erin=frank.card --from-iteration 500
    """

    manifest: tyro.conf.Positional[Path]
    """Manifest in use, or the amendment in use."""
    from_iteration: int
    """Iteration before which the members change to the new manifest. Leave time to collect the approvals."""
    add: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="CARD [CARD ...]", help_behavior_hint="")] = ()
    """Cards of new members. They take the places of removed members, and then follow at the end. Default:
    nobody is added."""
    remove: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]", help_behavior_hint="")] = ()
    """Members to remove. Default: nobody is removed."""
    replace: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=CARD [NAME=CARD ...]", help_behavior_hint="")] = ()
    """Members to replace, each with the card of another member, or of the same one with new keys or another address.
    Default: nobody is replaced."""
    evidence: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE [FILE ...]", help_behavior_hint="")] = ()
    """Evidence files: the members that they prove to be guilty are removed, unless they are replaced. Default: no
    evidence is used."""
    num_byzantine: int | None = None
    """Number of faulty members f to tolerate from then on. Default: as before."""
    amendment: Path = Path("amendment.toml")
    """File for the proposal, .toml."""

    def run(self) -> None:
        from byzpg.live.amendment import amended
        from byzpg.live.identity import read_card
        from byzpg.live.manifest import Manifest

        old = Manifest.load(self.manifest)
        substitutes = {}
        for pair in self.replace:
            name, _, card = pair.partition("=")
            if not card or name in substitutes or name in self.remove:
                raise ValueError(f"--replace takes NAME=CARD, for members that are not removed; got {pair!r}.")
            substitutes[name] = read_card(Path(card))
        guilty = [name for path in self.evidence if (name := _proven_guilty(old, path)) not in substitutes]
        amendment = amended(
            old,
            from_iteration=self.from_iteration,
            add=[read_card(card) for card in self.add],
            remove={*self.remove, *guilty},
            substitutes=substitutes,
            num_byzantine=self.num_byzantine,
        )
        new = amendment.manifest
        if (new.members, new.num_byzantine) == (old.members, old.num_byzantine):
            raise ValueError("nothing changes: name members with --add, --remove, --replace or --evidence.")
        _propose(amendment, old, self.manifest, self.amendment)


@dataclass(frozen=True)
class Approve:
    """Show a proposed amendment, approve it as one of the present members, and merge the approvals of several copies.

    Approve at most one amendment of a manifest: two complete ones would split the federation.

    Example: byzpg federation approve amendment.toml --name alice
    """

    amendment: tyro.conf.Positional[Path]
    """Amendment, to which the approvals are added."""
    copies: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="[COPY ...]", help_behavior_hint="")
    ] = ()
    """Copies of the amendment that others have approved. Default: there are none."""
    manifest: Path = Path("federation.toml")
    """Manifest that the amendment replaces."""
    name: str | None = None
    """Name of the member that approves. Default: nobody does, and the amendment is only shown and merged."""
    key: Path | None = None
    """Private key of this member in the manifest that is replaced. Default: NAME.key beside that manifest."""
    directory: Path | None = None
    """Directory of a member, into which the amendment is copied once it is complete. Default: it is not
    copied."""

    def run(self) -> None:
        from byzpg.live.amendment import Amendment, num_needed
        from byzpg.live.manifest import Manifest

        old, amendment = Manifest.load(self.manifest), Amendment.load(self.amendment)
        amendment.check(old)
        if self.directory is not None:
            _check_directory(self.directory, old)
        for path in self.copies:
            copy = Amendment.load(path)
            try:
                copy.check(old)
                amendment = amendment.merged(copy, old)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        _show(amendment, old)
        if self.name is not None:
            amendment = self._approved(amendment, self.name)
        if self.name is not None or self.copies:
            amendment.write(self.amendment)
        names = ", ".join(amendment.approvals) or "nobody"
        say(f"Approved by {names}: {len(amendment.approvals)} of {num_needed(old)} approvals.")
        if amendment.is_complete(old):
            self._conclude(amendment, old)

    def _approved(self, amendment: "Amendment", name: str) -> "Amendment":
        """Sign the amendment, after a note on the disk that this member will sign no other one."""
        from byzpg._files import write_atomically
        from byzpg.live.identity import read_key

        member = Membership.load(self.manifest, name, self.key)
        private = read_key(member.key, member.manifest.members[member.index])
        note, predecessor = member.key.with_suffix(".approved"), member.manifest.digest.hex()
        try:
            approved = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else {}
            other = approved.get(predecessor)
        except (ValueError, AttributeError, RecursionError):
            raise ValueError(f"{note} is broken: it must hold the amendments that {name} has approved.") from None
        if other not in (None, amendment.manifest.digest.hex()):
            raise ValueError(
                f"{name} has approved another amendment of this manifest, with the hash {str(other)[:16]}…: two "
                f"complete ones would split the federation. If all members have given that one up, remove {note}."
            )
        signed = amendment.approved_by(private, name, member.manifest)
        text = json.dumps({**approved, predecessor: amendment.manifest.digest.hex()}, indent=2) + "\n"
        write_atomically(note, lambda file: file.write(text.encode()))
        return signed

    def _conclude(self, amendment: "Amendment", old: "Manifest") -> None:
        known = {member.name for member in old.members}
        new = [member.name for member in amendment.manifest.members if member.name not in known]
        if self.directory is None:
            say(
                f"Complete. Put {self.amendment} as {NAME_IN_DIRECTORY} into the directory of one member, which passes "
                "it on to the others while it runs."
            )
        else:
            amendment.write(self.directory / NAME_IN_DIRECTORY)
            say(f"Complete, and copied to {self.directory}: this member passes it on to the others while it runs.")
        if new:
            say(f"New members ({', '.join(new)}) run: byzpg peer {self.amendment} --name NAME")


@dataclass(frozen=True)
class Recover:
    """Propose that the same members start again from an iteration that they hold.

    This is for failures that no protocol can solve: all machines lost power at once, or more than f members lost their
    disks. Stop all members first. What they did after that iteration, usually one iteration at most, is repeated. If
    K − f members keep running, they continue with the old manifest, and there are two different results.

    Example: byzpg federation recover federation.toml --directory alice-1a2b3c4d
    """

    manifest: tyro.conf.Positional[Path]
    """Manifest in use, or the amendment in use."""
    directory: Path
    """Directory of a member."""
    from_iteration: int | None = None
    """Iteration to start from, which at least 2f + 1 members should hold. Default: the last one that this directory
    holds."""
    amendment: Path = Path("amendment.toml")
    """File for the proposal, .toml."""

    def run(self) -> None:
        from byzpg.live.amendment import amended
        from byzpg.live.manifest import Manifest

        old = Manifest.load(self.manifest)
        _check_directory(self.directory, old)
        held = _held_iterations(self.directory)
        listed = " and ".join(map(str, held))
        iteration = held[-1] if self.from_iteration is None else self.from_iteration
        if iteration not in held:
            raise ValueError(f"--from-iteration must be one that {self.directory} holds, {listed}; got {iteration}.")
        if iteration == 0:
            raise ValueError(
                f"{self.directory} holds only the state before the first iteration: start again from the beginning, "
                f"with a new id `run` in {self.manifest}."
            )
        proposal = amended(old, from_iteration=iteration)
        say(f"{self.directory} holds the states before iterations {listed}; the other members must hold {iteration}.")
        _propose(proposal, old, self.manifest, self.amendment)


def _propose(amendment: "Amendment", old: "Manifest", manifest: Path, path: Path) -> None:
    from byzpg.live.amendment import num_needed

    if path.suffix != ".toml":
        raise ValueError(f"--amendment must end in .toml, got {path}.")
    if path.exists():
        raise ValueError(f"{path} exists already: choose another --amendment.")
    amendment.write(path)
    _show(amendment, old)
    say(f"Proposal: {path} (hash {amendment.manifest.digest.hex()[:16]}…)")
    say(f"It needs the approval of {num_needed(old)} of the {len(old.members)} members. Each of them runs:")
    say(f"byzpg federation approve {path} --manifest {manifest} --name NAME")


def _show(amendment: "Amendment", old: "Manifest") -> None:
    for words in amendment.describe(old):
        say(f"  {words}")


def _proven_guilty(manifest: "Manifest", path: Path) -> str:
    """The name of the member against which an evidence file is proof."""
    from byzpg.live.wire import prove

    try:
        proven = prove(manifest, json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    say(f"{path}: proven. {proven.words}.")
    return proven.member.name


def _check_directory(directory: Path, manifest: "Manifest") -> None:
    """Raise a ValueError unless this is the directory of a member in this run."""
    try:
        run = json.loads((directory / "owner.json").read_text(encoding="utf-8"))["run"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{directory} is not the directory of a member: it has no sound owner.json.") from None
    if run != manifest.run:
        raise ValueError(f"{directory} belongs to run {run}, not to {manifest.run}: choose another directory.")


def _held_iterations(directory: Path) -> list[int]:
    """The iterations whose states a member's directory holds, in order."""
    from byzpg.live.peer import Checkpoint
    from byzpg.live.records import HEAD, Records

    path, num_slots = directory / "checkpoints.bin", 2
    size = path.stat().st_size if path.is_file() else 0
    held: list[int] = []
    if size > num_slots * HEAD.size and size % num_slots == 0:  # opening a file of another size would resize it
        records = Records(path, num_slots, size // num_slots - HEAD.size, lambda path, over: None)
        held = sorted({Checkpoint.of(content).iteration for content in records.read().values()})
        records.close()
    if not held:
        raise ValueError(f"{path} holds no intact state: choose the directory of another member.")
    return held
