"""Amendments: how the members of a federation replace its manifest during a run.

A new manifest names the digest of its predecessor and the iteration before which it replaces it. It takes effect once
K − f members of the predecessor have approved it with a signature. If an honest member approves at most one amendment
of a manifest and K > 3f, only one can be complete: two would have K − 2f > f approvers in common, and so an honest one.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cryptography.exceptions import InvalidSignature

from byzpg._files import write_atomically
from byzpg.live.identity import Member, PrivateIdentity, read_toml, to_toml
from byzpg.live.manifest import Manifest

TAG = b"byzpg approval 1\n"
LARGEST = 2**20  # bytes, for some 600 members
SIGNATURE_DIGITS = 128


@dataclass(frozen=True)
class Amendment:
    """A manifest that replaces another one, and the approvals of the other one's members."""

    manifest: Manifest
    approvals: Mapping[str, str]  # hexadecimal signatures, by name

    def __post_init__(self) -> None:
        if self.manifest.predecessor is None:
            raise ValueError("an amendment needs predecessor, the hash of the manifest that it replaces.")
        approvals: object = self.approvals
        if not isinstance(approvals, dict) or not all(isinstance(each, str) for each in approvals.values()):
            raise ValueError("approvals must be a table of names and signatures.")

    @classmethod
    def load(cls, path: Path) -> "Amendment":
        """Read an amendment from a TOML file."""
        return cls.of(read_toml(path, "amendment"), str(path))

    @classmethod
    def of(cls, values: object, source: str) -> "Amendment":
        """Make an amendment from plain data: that of a manifest, and the approvals.

        Args:
            values: The content of a file or of a message; it can be anything.
            source: What error messages call it.
        """
        if not isinstance(values, dict) or "approvals" not in values:
            raise ValueError(f"{source} is not an amendment: it must be a manifest with a table of approvals.")
        rest = {name: value for name, value in values.items() if name != "approvals"}
        manifest = Manifest.of(rest, source)
        try:
            return cls(manifest, values["approvals"])
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    @classmethod
    def from_bytes(cls, content: bytes) -> "Amendment":
        """Read what another member sent, which can be anything."""
        if len(content) > LARGEST:
            raise ValueError(f"an amendment has at most {LARGEST} bytes, got {len(content)}.")
        try:
            values = json.loads(content)
        except (ValueError, RecursionError):
            raise ValueError("the amendment cannot be read: it is not JSON.") from None
        return cls.of(values, "the amendment")

    def to_bytes(self) -> bytes:
        """The bytes that members pass on to each other."""
        content = json.dumps(self.manifest.as_data() | {"approvals": self.approvals}).encode()
        if len(content) > LARGEST:
            raise ValueError(f"an amendment has at most {LARGEST} bytes, got {len(content)}: use fewer members.")
        return content

    def write(self, path: Path) -> None:
        """Write the amendment as TOML, in the place of an earlier one."""
        approvals = "\n[approvals] # signatures of members of the predecessor\n" + to_toml(self.approvals)
        text = self.manifest.to_toml() + approvals
        write_atomically(path, lambda file: file.write(text.encode()))

    def check(self, old: Manifest) -> None:
        """Raise a ValueError unless this can replace the manifest `old`, and all approvals are valid.

        The options of training, and with them θ_0, the plan and the dimension, are the same in all manifests of a run.
        None of these depends on the number of members; rounds and step_size do if they are "theory".
        """
        new = self.manifest
        if new.predecessor != old.digest.hex():
            raise ValueError(
                f"the amendment replaces the manifest with the hash {str(new.predecessor)[:16]}…, and this one has the "
                f"hash {old.digest.hex()[:16]}…: use the manifest that it was made from."
            )
        for field in ("federation", "run", "rehearsal", "initial", "training"):
            ours, theirs = (json.dumps(each.as_data().get(field), sort_keys=True) for each in (new, old))
            if ours != theirs:
                raise ValueError(f"an amendment cannot change {field}: create a new federation for that.")
        if new.from_iteration < old.from_iteration:
            raise ValueError(
                f"from_iteration must be at least {old.from_iteration}, where the predecessor began, "
                f"got {new.from_iteration}."
            )
        self._check_continuity(old)
        for name, signature in self.approvals.items():
            if not _is_valid(new, name, signature, old):
                raise ValueError(f"the approval of {name!r} is not a signature of a member of the predecessor.")

    def _check_continuity(self, old: Manifest) -> None:
        """Newcomers get the state from 2f + 1 members that stay, of which f may be silent and f more may lie."""
        staying = {member.name for member in old.members} & {member.name for member in self.manifest.members}
        needed = 3 * min(old.num_byzantine, self.manifest.num_byzantine) + 1
        if len(staying) < needed:
            raise ValueError(
                f"at least {needed} members must stay, to pass the state on to the new ones; {len(staying)} do: "
                "change the members in several amendments."
            )

    def is_complete(self, old: Manifest) -> bool:
        """Whether K − f members of `old` have approved; a ValueError as `check` raises it."""
        self.check(old)
        return len(self.approvals) >= num_needed(old)

    def approved_by(self, private: PrivateIdentity, name: str, old: Manifest) -> "Amendment":
        """The amendment with the approval of one more member of `old`."""
        self.check(old)
        signature = private.signing.sign(TAG + self.manifest.digest).hex()
        if not _is_valid(self.manifest, name, signature, old):
            raise ValueError(f"this is not the key of {name} in the manifest that is replaced: use that key.")
        return replace(self, approvals={**self.approvals, name: signature})

    def merged(self, other: "Amendment", old: Manifest) -> "Amendment":
        """The amendment with the valid approvals of both, which must be of the same manifest."""
        if other.manifest.digest != self.manifest.digest:
            raise ValueError("these are two different amendments: only copies of one amendment can be merged.")
        valid = {
            name: signature
            for each in (self, other)
            for name, signature in each.approvals.items()
            if _is_valid(self.manifest, name, signature, old)
        }
        return replace(self, approvals=valid)

    def describe(self, old: Manifest) -> list[str]:
        """What changes, in words for the person who approves it."""
        new = self.manifest
        before, after = ({member.name: member for member in each.members} for each in (old, new))
        words = []
        for place, member in enumerate(old.members):
            there = new.members[place] if place < len(new.members) else None
            if member.name in after:
                words += _changes(member, after[member.name])
            elif there is not None and there.name not in before:
                words.append(f"{_introduced(there)} replaces {member.name}")
            else:
                words.append(f"{member.name} is removed")
        for place, member in enumerate(new.members):
            replaces = place < len(old.members) and old.members[place].name not in after
            if member.name not in before and not replaces:
                words.append(f"{_introduced(member)} is added")
        for name, seconds in asdict(new.times).items():
            if seconds != getattr(old.times, name):
                words.append(f"times: {name} changes from {getattr(old.times, name):g} s to {seconds:g} s")
        if not words:
            words.append("no member changes")
        sizes = [f"{len(each.members)} members, of which {each.num_byzantine} may be faulty" for each in (old, new)]
        words.append(sizes[0] if sizes[0] == sizes[1] else f"{sizes[0]}, become {sizes[1]}")
        words.append(f"takes effect before iteration {new.from_iteration}")
        return words


def is_due(manifest: Manifest, iteration: int, *, num_changed: int, num_byzantine: int) -> bool:
    """Whether a member changes to a new manifest at once, instead of after a barrier before the agreed iteration.

    Args:
        manifest: The new manifest.
        iteration: The iteration in which the member is.
        num_changed: How many members refuse it, because their manifest is another one.
        num_byzantine: f of the old manifest.
    """
    return iteration >= manifest.from_iteration or num_changed > num_byzantine


def num_needed(old: Manifest) -> int:
    """How many members of a manifest must approve what replaces it: K − f."""
    return len(old.members) - old.num_byzantine


def amended(
    old: Manifest,
    *,
    from_iteration: int,
    add: Sequence[Member] = (),
    remove: Collection[str] = (),
    substitutes: Mapping[str, Member] | None = None,
    num_byzantine: int | None = None,
) -> Amendment:
    """Propose a manifest that replaces another one.

    Members that stay keep their order. New ones take the places of removed ones, and then follow at the end.

    Args:
        old: The manifest that is replaced.
        from_iteration: The iteration before which the members change to the new one.
        add: New members.
        remove: Names of members that leave.
        substitutes: By name, what takes the place of a member: a new one, or the same one with other keys.
        num_byzantine: f from then on; None to keep it.
    """
    substitutes = substitutes or {}
    for name in (*remove, *substitutes):
        old.index(name)
    kept = [None if member.name in remove else substitutes.get(member.name, member) for member in old.members]
    new = iter(add)
    filled = [next(new, None) if member is None else member for member in kept]
    manifest = replace(
        old,
        predecessor=old.digest.hex(),
        from_iteration=from_iteration,
        num_byzantine=old.num_byzantine if num_byzantine is None else num_byzantine,
        members=(*(member for member in filled if member is not None), *new),
    )
    amendment = Amendment(manifest, {})
    amendment.check(old)
    amendment.to_bytes()  # refuses what is too large to be passed on
    return amendment


def check_chain(first: Manifest, amendments: Sequence[Amendment]) -> Manifest:
    """Return the newest manifest of a run.

    Args:
        first: A manifest that the caller trusts.
        amendments: What replaced it, one after the other.

    Raises:
        ValueError: If one of them does not fit its predecessor, or is not complete.
    """
    newest = first
    for amendment in amendments:
        if not amendment.is_complete(newest):
            raise ValueError(
                f"the amendment from iteration {amendment.manifest.from_iteration} has {len(amendment.approvals)} of "
                f"{num_needed(newest)} approvals: it is not complete."
            )
        newest = amendment.manifest
    return newest


def _is_valid(new: Manifest, name: str, signature: str, old: Manifest) -> bool:
    signers = [member for member in old.members if member.name == name]
    if not signers or len(signature) != SIGNATURE_DIGITS:
        return False
    try:
        signers[0].verifier().verify(bytes.fromhex(signature), TAG + new.digest)
    except (InvalidSignature, ValueError):
        return False
    return True


def _changes(before: Member, after: Member) -> list[str]:
    words = []
    if before.public_key != after.public_key:
        words.append(f"{after.name} gets a new signing key, {after.public_key[:16]}…")
    if before.fingerprint != after.fingerprint:
        words.append(f"{after.name} gets a new certificate, {after.fingerprint[:16]}…")
    if before.address != after.address:
        words.append(f"{after.name} moves from {before.address} to {after.address}")
    return words


def _introduced(member: Member) -> str:
    return f"{member.name} at {member.address}, certificate {member.fingerprint[:16]}…,"
