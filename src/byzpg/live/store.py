"""The files of a member, from which it continues after a crash.

  owner.json        the member and the manifest that the directory belongs to
  random.key        the secret key of the member's random numbers
  checkpoints.bin   the states at the beginning of this iteration and of the one before
  outbox.bin        all messages of these two iterations, each written before it is sent
  mark.bin          the last step for which a message may have been signed
  evidence/*.json   proofs of equivocation
  progress.jsonl    one line per iteration
  output.npy        θ_T̂, from iteration T̂ on
  final.state       the signed state at the end of training, for members that come too late
A record or a line that a crash cut off is ignored.

A member that forgets what it has signed may sign something else, and would then be proven to equivocate. The mark
prevents that. It is on the disk before the member signs anything up to it, so that messages and checkpoints need not be
flushed one by one: what a power cut takes away lies at or below the mark, and there the member stays silent.
"""

import fcntl
import json
import os
import secrets
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np

from byzpg._files import append_whole, flush_directory, write_atomically
from byzpg.live.amendment import Amendment, check_chain
from byzpg.live.identity import Member
from byzpg.live.manifest import Manifest
from byzpg.live.protocol import Evidence
from byzpg.live.records import OnFullDisk, Records, patiently


def forgotten_through(
    mark: int, *, same_boot: bool, damaged_slots: Collection[int], num_slots: int, damaged_checkpoint: bool
) -> int:
    """The last step whose message may have been signed and lost; −1 if there is none.

    Args:
        mark: The last step for which a message may have been signed.
        same_boot: Whether the machine has been running since the mark was written. Then nothing was lost that was
            written after it.
        damaged_slots: The slots of the outbox that fail their checksums; a message with number n is in slot
            n mod `num_slots`.
        num_slots: The number of slots of the outbox.
        damaged_checkpoint: Whether a checkpoint fails its checksum. The state that follows from an older one may
            contradict the one that the member has sent to others.
    """
    if not same_boot or damaged_checkpoint:
        return mark
    return max((step for step in range(mark + 1)[-num_slots:] if step % num_slots in damaged_slots), default=-1)


def _amendments(directory: Path) -> dict[str, Amendment]:
    """The amendments in a member's directory, by the hash of what they replace."""
    found = (Amendment.load(path) for path in sorted((directory / "amendments").glob("*.toml")))
    return {str(amendment.manifest.predecessor): amendment for amendment in found}


def manifests(directory: Path, first: Manifest) -> list[Manifest]:
    """A manifest, and those that have replaced it since, according to a member's directory."""
    amendments, found = _amendments(directory), [first]
    while (amendment := amendments.get(found[-1].digest.hex())) is not None:
        found.append(check_chain(found[-1], [amendment]))
    return found


SETTLED = b"\xff" * 16  # in place of the machine's boot: nothing was lost, whatever happened to the machine since


class Mark:
    """The last step for which a message may have been signed, and whether its file can be relied on."""

    CONTENT = struct.Struct("<q16sQQ")  # the step, the machine's boot, and the device and number of the file

    def __init__(self, records: Records, *, expected: bool) -> None:
        self.path, self.step, self.same_boot, self.settled = records.path, -1, True, False
        self._records = records
        found = records.read()
        self._number = max(found, default=-1)
        # A copy of the directory, restored from a backup, says nothing about what was signed after it was made.
        self.lost = expected
        if found:
            self.step, boot, *place = self.CONTENT.unpack(found[self._number])
            self.settled = boot == SETTLED
            self.same_boot = self.settled or (boot == _boot() and any(boot))
            self.lost = bool(records.damaged) or tuple(place) != records.identity()

    def move(self, step: int) -> None:
        """Set the mark; on return it is safe on the disk."""
        self._set(step, _boot())

    def settle(self, step: int) -> None:
        """Set the mark to the last step that was signed, when nothing can be lost; `move` it before signing more."""
        self._set(step, SETTLED)

    def _set(self, step: int, boot: bytes) -> None:
        was_lost, self.lost = self.lost, False
        self.step, self.same_boot, self.settled = step, True, boot == SETTLED
        self._write(boot)
        if was_lost:  # the other record may be damaged, and the next start must not find it so
            self._write(boot)

    def distrust(self) -> None:
        """Remember, until the mark moves, that something up to it is lost."""
        if self.step >= 0 and not self.lost:
            self._write(bytes(16))

    def _write(self, boot: bytes) -> None:
        self._number += 1
        self._records.put(self._number, self.CONTENT.pack(self.step, boot, *self._records.identity()))
        self._records.flush()


@cache
def _boot() -> bytes:
    """An id of the time since the machine was started; zeros if the system does not tell."""
    with suppress(OSError, ValueError):
        return UUID(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()).bytes
    return bytes(16)


class Store:
    """The directory of one member.

    Args:
        path: The directory; it is created if there is none.
        manifest: The federation.
        member: The member.
        on_full_disk: Called while a write waits for space on the disk.

    Raises:
        ValueError: If the directory belongs to another member or manifest, or is in use.
    """

    def __init__(
        self, path: Path, manifest: Manifest, member: Member, on_full_disk: OnFullDisk = lambda path, over: None
    ) -> None:
        self.path, self._on_full_disk = path, on_full_disk
        path.mkdir(parents=True, exist_ok=True)
        owner = {"member": member.name, "manifest": manifest.digest.hex(), "run": manifest.run}
        existing = path / "owner.json"
        if existing.is_file():
            try:
                found = json.loads(existing.read_text(encoding="utf-8"))
                whose = f"member {found['member']} of run {found['run']}"
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{existing} is broken: choose another directory.") from None
            amendments, digest = _amendments(path), found.get("manifest")
            while digest != owner["manifest"] and digest in amendments:
                digest = amendments[digest].manifest.digest.hex()
            if {**found, "manifest": digest} != owner:
                raise ValueError(f"{path} belongs to {whose}, or to another manifest: choose another directory.")
        elif any(not each.name.startswith(("lock", "log.jsonl", ".owner.json.")) for each in path.iterdir()):
            raise ValueError(f"{path} is neither empty nor the directory of a member: choose another directory.")
        # Two processes of one member would equivocate.
        self._lock = (path / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ValueError(f"{path} is in use: member {member.name} is already running.") from None
        if not existing.is_file():
            text = (json.dumps(owner, indent=2) + "\n").encode()
            patiently(existing, lambda: write_atomically(existing, lambda file: file.write(text)), on_full_disk)
        self._open: list[Records] = []
        self._progress = (path / "progress.jsonl").open("ab", buffering=0)
        if (path / "progress.jsonl").read_bytes()[-1:] not in (b"", b"\n"):
            with suppress(OSError):  # a crash cut off the last line; the next one must not be lost with it
                self._progress.write(b"\n")

    def close(self) -> None:
        while self._open:  # each once: a second time, its number may belong to another file
            self._open.pop().close()
        self._progress.close()
        self._lock.close()

    def random_key(self) -> np.ndarray:
        """The key of the member's random numbers [2], drawn once."""
        path = self.path / "random.key"
        if not path.is_file():
            patiently(path, lambda: self._write_secret(path, secrets.token_hex(8)), self._on_full_disk)
        try:
            return np.frombuffer(bytes.fromhex(path.read_text(encoding="utf-8")), "<u4", 2)
        except ValueError:
            raise ValueError(f"{path} is broken: it must hold 16 digits of 0-9 and a-f.") from None

    def _write_secret(self, path: Path, text: str) -> None:
        temporary = path.with_suffix(".new")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        flush_directory(self.path)

    def records(self, name: str, num_slots: int, largest: int) -> Records:
        """Open a file of records in this directory, until the store is closed."""
        opened = Records(self.path / name, num_slots, largest, self._on_full_disk)
        self._open.append(opened)
        return opened

    def mark(self, name: str, *, expected: bool) -> Mark:
        """Open a mark.

        Args:
            name: Its file.
            expected: Whether other files show that there was one.
        """
        return Mark(self.records(name, 2, Mark.CONTENT.size), expected=expected)

    def keep_amendment(self, amendment: Amendment) -> None:
        """Write what replaces the manifest, under the hash of what it replaces."""
        path = self.path / "amendments" / f"{amendment.manifest.predecessor}.toml"
        patiently(path, lambda: amendment.write(path), self._on_full_disk)

    def amendments(self) -> list[Amendment]:
        """What has replaced manifests of this run, in order."""
        return sorted(_amendments(self.path).values(), key=lambda each: each.manifest.from_iteration)

    def keep_evidence(self, manifest: Manifest, evidence: Evidence, heads: tuple[bytes, bytes]) -> Path:
        """Write the heads of two messages that one member signed for one step."""
        first, second, _ = evidence
        name = manifest.members[first.sender].name
        digests = "-".join(sorted((first.digest.hex()[:8], second.digest.hex()[:8])))
        values = {
            "what": "two different messages, signed by one member for one step",
            "member": name,
            "step": first.step,
            "manifest": manifest.digest.hex(),
            "messages": [
                {"head": head.hex(), "signature": receipt.signature.hex()}
                for head, receipt in zip(heads, (first, second), strict=True)
            ],
        }
        text, path = json.dumps(values, indent=2) + "\n", self.path / "evidence" / f"{first.step}-{name}-{digests}.json"
        write_atomically(path, lambda file: file.write(text.encode()))
        return path

    def evidence(self) -> Iterator[tuple[Path, object]]:
        """The proofs that this member keeps, as plain data; files that cannot be read are left out."""
        for path in sorted((self.path / "evidence").glob("*.json")):
            with suppress(OSError, ValueError, RecursionError):
                yield path, json.loads(path.read_text(encoding="utf-8"))

    def keep_final_state(self, frame: bytes) -> None:
        """Write the signed state at the end of training."""
        write_atomically(self.path / "final.state", lambda file: file.write(frame))

    def keep_output(self, parameters: np.ndarray) -> None:
        """Write θ_T̂, the parameters of the uniformly drawn iteration."""
        write_atomically(self.path / "output.npy", lambda file: np.save(file, parameters, allow_pickle=False))

    def output(self) -> np.ndarray | None:
        """θ_T̂, or None before iteration T̂."""
        path = self.path / "output.npy"
        return np.load(path, allow_pickle=False) if path.is_file() else None

    def append_progress(self, values: dict[str, Any]) -> None:
        """Write a line about an iteration."""
        append_whole(self._progress, json.dumps(values).encode() + b"\n")

    def read_progress(self) -> list[dict[str, Any]]:
        """One dictionary per iteration; if an iteration was done twice, the last one written."""
        path = self.path / "progress.jsonl"
        found: dict[int, dict[str, Any]] = {}
        for line in path.read_bytes().splitlines() if path.is_file() else []:
            try:
                values = json.loads(line)
                found[values["iteration"]] = values
            except (ValueError, KeyError, TypeError):  # damaged, or cut off by a crash
                continue
        return [found[iteration] for iteration in sorted(found)]
