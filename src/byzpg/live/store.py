"""The files of a member, from which it continues after a crash.

  owner.json        the member and the manifest that the directory belongs to
  random.key        the secret key of the member's random numbers
  checkpoints.bin   the states at the beginning of this iteration and of the one before
  outbox.bin        all messages of these two iterations, each written before it is sent
  evidence/*.json   proofs of equivocation
  progress.jsonl    one line per iteration
  output.npy        θ_T̂, from iteration T̂ on
A record or a line that a crash cut off is ignored.
"""

import fcntl
import json
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from byzpg._files import flush_directory, write_atomically
from byzpg.live.identity import Member
from byzpg.live.manifest import Manifest
from byzpg.live.protocol import Evidence
from byzpg.live.records import Records


class Store:
    """The directory of one member.

    Raises:
        ValueError: If the directory belongs to another member or manifest, or is in use.
    """

    def __init__(self, path: Path, manifest: Manifest, member: Member) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        owner = {"member": member.name, "manifest": manifest.digest.hex(), "run": manifest.run}
        existing = path / "owner.json"
        if existing.is_file():
            try:
                found = json.loads(existing.read_text())
                whose = f"member {found['member']} of run {found['run']}"
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{existing} is broken: choose another directory.") from None
            if found != owner:
                raise ValueError(f"{path} belongs to {whose}, or to another manifest: choose another directory.")
        elif any(each.name != "lock" and not each.name.startswith(".owner.json.") for each in path.iterdir()):
            raise ValueError(f"{path} is neither empty nor the directory of a member: choose another directory.")
        # Two processes of one member would equivocate.
        self._lock = (path / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ValueError(f"{path} is in use: member {member.name} is already running.") from None
        text = json.dumps(owner, indent=2) + "\n"
        write_atomically(existing, lambda file: file.write(text.encode()))
        self._open: list[Records] = []
        self._num_evidence: dict[str, int] = {}
        self._progress = (path / "progress.jsonl").open("ab+")
        if self._progress.tell():
            self._progress.seek(-1, os.SEEK_END)
            if self._progress.read() != b"\n":  # a crash cut off the last line; the next one must not be lost with it
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
            temporary = path.with_suffix(".new")
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(secrets.token_hex(8))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            flush_directory(self.path)
        try:
            return np.frombuffer(bytes.fromhex(path.read_text()), "<u4", 2)
        except ValueError:
            raise ValueError(f"{path} is broken: it must hold 16 digits of 0-9 and a-f.") from None

    def records(self, name: str, num_slots: int, largest: int) -> Records:
        """Open a file of records in this directory, until the store is closed."""
        opened = Records(self.path / name, num_slots, largest)
        self._open.append(opened)
        return opened

    def keep_evidence(self, manifest: Manifest, evidence: Evidence, heads: tuple[bytes, bytes]) -> Path:
        """Write the heads of two messages that one member signed for one step."""
        first, second = evidence
        member = manifest.members[first.sender]
        digests = "-".join(sorted((first.digest.hex()[:8], second.digest.hex()[:8])))
        path = self.path / "evidence" / f"{first.step}-{member.name}-{digests}.json"
        values = {
            "what": "two different messages, signed by one member for one step",
            "member": member.name,
            "step": first.step,
            "manifest": manifest.digest.hex(),
            "messages": [
                {"head": head.hex(), "signature": receipt.signature.hex()}
                for head, receipt in zip(heads, (first, second), strict=True)
            ],
        }
        text = json.dumps(values, indent=2) + "\n"
        write_atomically(path, lambda file: file.write(text.encode()))
        self._num_evidence[member.name] = self.num_evidence(member.name) + 1
        return path

    def num_evidence(self, name: str) -> int:
        """How many proofs against a member there are."""
        if name not in self._num_evidence:
            self._num_evidence[name] = len(list((self.path / "evidence").glob(f"*-{name}-*.json")))
        return self._num_evidence[name]

    def keep_output(self, parameters: np.ndarray) -> None:
        """Write θ_T̂, the parameters of the uniformly drawn iteration."""
        write_atomically(self.path / "output.npy", lambda file: np.save(file, parameters, allow_pickle=False))

    def output(self) -> np.ndarray | None:
        """θ_T̂, or None before iteration T̂."""
        path = self.path / "output.npy"
        return np.load(path, allow_pickle=False) if path.is_file() else None

    def append_progress(self, values: dict[str, Any]) -> None:
        """Write a line about an iteration."""
        self._progress.write(json.dumps(values).encode() + b"\n")
        self._progress.flush()

    def read_progress(self) -> list[dict[str, Any]]:
        """One dictionary per iteration; if an iteration was done twice, the last one written."""
        path = self.path / "progress.jsonl"
        found: dict[int, dict[str, Any]] = {}
        for line in path.read_text().splitlines() if path.is_file() else []:
            try:
                values = json.loads(line)
                found[values["iteration"]] = values
            except (ValueError, KeyError, TypeError):
                continue
        return [found[iteration] for iteration in sorted(found)]
