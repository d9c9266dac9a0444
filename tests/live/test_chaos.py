"""A real federation in network namespaces that suffers minutes of random faults, at most one member at a time.

The seed decides which faults come and whom they hit; when exactly they do is left to the machine. By hand, for longer:

    BYZPG_CHAOS_MINUTES=30 BYZPG_CHAOS_SEED=7 python -m pytest -n 0 -m slow -s tests/live/test_chaos.py
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import live_federation
import numpy as np
import pytest
from forking import BYZPG, Forked
from live_federation import Federation, drop, until

from byzpg.live.amendment import amended
from byzpg.live.identity import Member, generate, read_key, write_identity
from byzpg.live.links import LARGEST_BACKOFF
from byzpg.live.manifest import Times
from byzpg.live.peer import Checkpoint
from byzpg.live.records import HEAD, Records

MINUTES = float(os.environ.get("BYZPG_CHAOS_MINUTES", "2"))
SEED = int(os.environ.get("BYZPG_CHAOS_SEED", "1"))
TINY: dict[str, Any] = {"horizon": 50, "large_batch": 4, "hidden": (8,), "rounds": 2, "trajectories": 4_000_000}
TIMES = Times(grace=0.5, start_grace=300.0, retry=0.1)
ON_SMALL_DISK = "dave"  # whose directory is a file system of its own
SMALL_DISK_BYTES = 2**25
STATE_VECTORS = 6  # θ_t, θ_{t−1}, v̂, Adam's two moments and the history, which a count follows
# What a process may grow by. A leak of one kilobyte per message would exceed it within minutes.
MOST_GROWTH_BYTES, MOST_GROWTH_FILES = 2**27, 40

# A stranger that holds connections open until its input is closed.
IDLERS = """
import socket, sys
connections = []
for _ in range(300):
    try:
        connections.append(socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2))
    except OSError:
        pass
print(len(connections), flush=True)
sys.stdin.read()
"""

# Whoever has stolen the key of a member sends junk to the members that this one dials, again and again.
JUNK = """
import asyncio, random, sys, time
from pathlib import Path
from byzpg.live import links
from byzpg.live.identity import read_key
from byzpg.live.manifest import Manifest
from grpc import aio

manifest, key, until = Manifest.load(Path(sys.argv[1])), Path(sys.argv[3]), time.monotonic() + float(sys.argv[4])
own = manifest.index(sys.argv[2])
private = read_key(key, manifest.members[own])

async def flood(other):
    while time.monotonic() < until:
        channel = links.open_channel(manifest, own, private, other, 2**20)
        call = channel.stream_stream(f"/{links.SERVICE}/{links.LINK}")(timeout=5)
        try:
            await call.write(await call.read())
            while time.monotonic() < until:
                await call.write(random.randbytes(random.randrange(1, 5000)))
        except (aio.AioRpcError, asyncio.InvalidStateError, TypeError):
            await asyncio.sleep(0.2)
        finally:
            await channel.close()

async def main():
    await asyncio.gather(*(flood(other) for other in range(own + 1, len(manifest.members))))

asyncio.run(main())
"""


@dataclass
class Chaos:
    """A federation, the faults that it suffers, and a log of both."""

    federation: Federation
    seed: int
    chance: random.Random = field(init=False)
    manifest_file: str = "federation.toml"  # of the manifest in use
    first_manifests: dict[str, str] = field(default_factory=dict)  # of members that came, or got their keys, later on
    next_keys: dict[str, Path] = field(default_factory=dict)
    backups: dict[str, Path] = field(default_factory=dict)
    first: dict[int, tuple[int, int]] = field(default_factory=dict)  # resources of processes, when first seen
    accusations: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.note("seed", seed=self.seed, minutes=MINUTES)

    def note(self, event: str, **values: Any) -> None:
        """Write a line to the log of this test, and print it."""
        line = json.dumps({"seconds": round(time.monotonic() - self.began, 1), "event": event, **values})
        with (self.folder / "chaos.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def pause(self, most: float = 6.0) -> None:
        time.sleep(self.chance.uniform(0.0, most))

    @property
    def folder(self) -> Path:
        return self.federation.folder

    def key(self, name: str) -> Path:
        """The file of a member's keys in the manifest in use."""
        return self.next_keys.get(name, self.folder / f"{name}.key")

    @property
    def names(self) -> tuple[str, ...]:
        """The present members."""
        return tuple(member.name for member in self.federation.manifest.members)

    def start(self, name: str) -> None:
        """Start a member with the same command as ever, whatever has changed since."""
        next_key = ("--next-key", self.next_keys[name]) if name in self.next_keys else ()
        self.federation.start(name, *next_key, manifest=self.first_manifests.get(name, "federation.toml"))

    @contextmanager
    def down(self, name: str) -> Iterator[None]:
        """Kill a member, and start it again.

        Half of the times, another one is frozen meanwhile. Then the others have no quorum, and stay where they remember
        what the member has sent. If it signs something else, they have a proof.
        """
        frozen = self.chance.choice([each for each in self.names if each != name])
        frozen = frozen if self.chance.random() < 0.5 else None
        if frozen is not None:
            self.note("no quorum", frozen=frozen)
            self.federation.signal(frozen, signal.SIGSTOP)
        self.federation.kill(name)
        yield
        since = time.time()
        self.start(name)
        if frozen is not None:
            until(
                lambda: any(event["time"] >= since for event in self.federation.events(name, "ready")),
                f"{name} has started again",
            )
            time.sleep(2 * LARGEST_BACKOFF)  # until it is connected, and may have sent something
            self.federation.signal(frozen, signal.SIGCONT)

    # Faults of one member; each ends before its function returns

    def crash(self, name: str) -> None:
        with self.down(name):
            self.pause()

    def freeze(self, name: str) -> None:
        self.federation.signal(name, signal.SIGSTOP)
        self.pause()
        self.federation.signal(name, signal.SIGCONT)

    def cut_off(self, name: str) -> None:
        self.lose_packets(name, 100)

    def lose_packets(self, name: str, percent: int | None = None) -> None:
        drop(self.federation, name, percent or self.chance.randrange(5, 40))
        self.pause(10.0)
        drop(self.federation, name, 0)

    def rot(self, name: str) -> None:
        """Flip some bits in one of the files of a member that is down."""
        pattern = self.chance.choice(("outbox*.bin", "checkpoints*.bin", "mark*.bin", "progress.jsonl"))
        with self.down(name):
            path = newest(self.federation.directory(name), pattern)
            content = bytearray(path.read_bytes())
            for _ in range(self.chance.choice((1, 1000))):
                content[self.chance.randrange(len(content))] ^= 1 << self.chance.randrange(8)
            with path.open("r+b") as damaged:  # in place: a new file would be noticed as a copy
                damaged.write(content)
            self.note("flipped bits", file=path.name)

    def lose_directory(self, name: str) -> None:
        with self.down(name):
            self.empty(name)
            self.pause()

    def restore_backup(self, name: str) -> None:
        """Replace a member's directory by a copy that was made while it was running."""
        backup = self.backups.get(name)
        self.backups[name] = self.folder / f"{name}-backup-{time.monotonic_ns()}"
        shutil.copytree(self.federation.directory(name), self.backups[name])
        if backup is None:
            backup = self.backups[name]
            self.pause()
        with self.down(name):
            self.empty(name)
            shutil.copytree(backup, self.federation.directory(name), dirs_exist_ok=True)

    def empty(self, name: str) -> None:
        """Delete what is in a member's directory, which may be a mount point."""
        self.look_for_accusations(name)
        self.federation.logs.pop(name, None)
        for path in self.federation.directory(name).iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def fill_disk(self, name: str) -> None:
        """Leave no space for the member that has a disk of its own; half of the times, it starts like that."""
        filler = self.federation.directory(name) / "filler"
        restarts = self.chance.random() < 0.5
        if restarts:
            self.federation.kill(name)
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(2**12)):
                pass
        if restarts:
            self.start(name)
        self.pause()
        filler.unlink()

    def crowd(self, name: str) -> None:
        """A stranger opens hundreds of connections to a member."""
        address, _, port = self.federation.manifest.members[self.names.index(name)].address.rpartition(":")
        command = ["ip", "netns", "exec", self.federation.namespaces["outsider"], sys.executable, "-c", IDLERS]
        with subprocess.Popen(
            [*command, address, port], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as stranger:
            assert stranger.stdout is not None
            stranger.stdout.readline()
            self.pause()
            stranger.communicate()

    def steal_key(self, name: str) -> None:
        """A member is down, and somebody else sends junk in its name."""
        self.federation.kill(name)
        with (self.folder / "junk.out").open("ab") as output:
            line = (self.folder / self.manifest_file, name, self.key(name), self.chance.uniform(1.0, 6.0))
            junk = Forked(*line, program=JUNK, stdout=output, namespace=self.federation.namespaces[name])
        assert junk.wait() == 0
        self.start(name)

    # Changes of the members

    def replace_last(self) -> None:
        """Replace the last member by a new one, which is started when the change has happened."""
        leaving = self.federation.manifest.members[-1]
        newcomer, private = generate("frank", leaving.address)
        write_identity(self.folder, newcomer, private)
        self.federation.namespaces["frank"] = self.federation.namespaces[leaving.name]
        self.amend({leaving.name: newcomer})
        assert self.federation.processes[leaving.name].wait() == 0
        self.first_manifests["frank"] = self.manifest_file
        self.start("frank")

    def rotate_key(self) -> None:
        """Give a member new keys; it is started anew before, to know them."""
        name = self.chance.choice(self.names)
        old = self.federation.manifest.members[self.names.index(name)]
        member, private = generate(name, old.address)
        write_identity(self.folder / "next", member, private)
        self.next_keys[name] = self.folder / "next" / f"{name}.key"
        self.federation.kill(name)
        self.start(name)
        self.federation.wait_until_together(*self.names)
        self.amend({name: member})
        # The others refuse its old keys, so it could not hear of the change from them.
        self.first_manifests[name] = self.manifest_file
        self.backups.pop(name, None)

    def amend(self, substitutes: dict[str, Member]) -> None:
        """Replace members, and wait until those that stay have done so."""
        old = self.federation.manifest
        start = max(self.federation.iteration(name) for name in self.names) + 40
        amendment = amended(old, from_iteration=start, substitutes=substitutes)
        for name in self.names:
            if name not in substitutes:  # K − f approvals are enough
                private = read_key(self.key(name), old.members[self.names.index(name)])
                amendment = amendment.approved_by(private, name, old)
        told, self.manifest_file = self.chance.choice(self.names), f"amendment-{start}.toml"
        amendment.write(self.folder / self.manifest_file)
        amendment.write(self.federation.directory(told) / "amendment.toml")
        self.note("amendment", told=told, from_iteration=start)
        staying = set(self.names)
        self.federation.manifest = amendment.manifest
        for name in staying & set(self.names):
            until(lambda name=name: self.federation.iteration(name) > start + 3, f"{name} has changed its manifest")

    # What must hold

    def look_for_accusations(self, *names: str) -> None:
        for name in names:
            self.accusations += self.federation.events(name, "equivocation")
            for path in (self.federation.directory(name) / "evidence").glob("*"):
                self.accusations.append({"member": name, "file": path.name})
        assert not self.accusations, f"seed {self.seed}: an honest member was accused: {self.accusations[0]}"

    def look_at_resources(self) -> None:
        for name in self.names:
            number = self.federation.processes[name].pid
            lines = Path(f"/proc/{number}/status").read_text().splitlines()
            resident = int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024
            now = resident, len(os.listdir(f"/proc/{number}/fd"))
            first = self.first.setdefault(number, now)
            assert now[0] - first[0] < MOST_GROWTH_BYTES, f"{name} had {first[0]} bytes in memory, and has {now[0]}"
            assert now[1] - first[1] < MOST_GROWTH_FILES, f"{name} had {first[1]} open files, and has {now[1]}"

    def parameters(self) -> dict[str, dict[int, np.ndarray]]:
        """The parameters in the last checkpoints of all members, by name and iteration, while none of them moves."""
        for name in self.names:
            self.federation.signal(name, signal.SIGSTOP)
        found = {}
        for name in self.names:
            copy = self.folder / f"{name}.checkpoints"
            shutil.copyfile(newest(self.federation.directory(name), "checkpoints*.bin"), copy)
            records = Records(copy, 2, copy.stat().st_size // 2 - HEAD.size, lambda path, over: None)
            checkpoints = [Checkpoint.of(content) for content in records.read().values()]
            found[name] = {each.iteration: each.snapshot[: each.snapshot.size // STATE_VECTORS] for each in checkpoints}
            records.close()
        for name in self.names:
            self.federation.signal(name, signal.SIGCONT)
        return found


def newest(directory: Path, pattern: str) -> Path:
    """A member's file that belongs to the manifest in use; files of other manifests have other names."""
    return max(directory.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


Fault = Callable[[Chaos, str], None]
FAULTS: list[Fault] = [
    Chaos.crash,
    Chaos.freeze,
    Chaos.cut_off,
    Chaos.lose_packets,
    Chaos.rot,
    Chaos.lose_directory,
    Chaos.restore_backup,
    Chaos.fill_disk,
    Chaos.crowd,
    Chaos.steal_key,
]
CHANGES = (Chaos.replace_last, Chaos.rotate_key)


@contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """Give a directory a file system with little space."""
    path.mkdir()
    live_federation.run("mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(path))
    try:
        yield
    finally:
        live_federation.run("umount", "--lazy", str(path))


@pytest.fixture
def chaos(tmp_path: Path) -> Iterator[Chaos]:
    with (
        small_disk(tmp_path / ON_SMALL_DISK),
        live_federation.in_namespaces(tmp_path, TIMES, rehearsal=False, **TINY) as federation,
    ):
        federation.program = BYZPG  # without rests
        federation.start_all()
        yield Chaos(federation, SEED)


@pytest.mark.slow
@pytest.mark.time_limit(60 * MINUTES + 900)
def test_a_federation_survives_faults_of_one_member_after_another(chaos: Chaos) -> None:
    """No honest member is accused, no process grows, and in the end all members hold the same parameters."""
    federation, deck, changes = chaos.federation, list[Fault](), list(CHANGES)
    # On a busy machine, a single fault may take longer than is left for the changes.
    while (passed := time.monotonic() - chaos.began) < 60 * MINUTES or changes:
        if changes and passed > 60 * MINUTES / 3 * (1 + len(CHANGES) - len(changes)):
            change = changes.pop(0)
            chaos.note(change.__name__)
            change(chaos)
            federation.wait_until_together(*chaos.names)
        if not deck:
            deck = chaos.chance.sample(list(FAULTS), len(FAULTS))  # each comes before any comes again
        fault = deck.pop()
        # The last member dials nobody, so its key is of no use to a flood.
        special: dict[Fault, tuple[str, ...]] = {
            Chaos.fill_disk: (ON_SMALL_DISK,),
            Chaos.steal_key: chaos.names[:-1],
        }
        names = special.get(fault, chaos.names)
        name = chaos.chance.choice(names)
        chaos.note(fault.__name__, member=name)
        fault(chaos, name)
        federation.wait_until_together(*chaos.names)
        chaos.note("together", iteration=federation.iteration(name))
        chaos.look_for_accusations(*chaos.names)
        chaos.look_at_resources()

    def agree() -> bool:
        """Whether all members hold the same parameters.

        They do if each has received all messages of the last round: then all combine the same vectors by the same rule.
        A busy machine can make a message late, but not in every iteration. Adam's moments, which are not exchanged,
        forget a gradient that one member lacked only after thousands of iterations.
        """
        time.sleep(1)
        parameters = chaos.parameters()
        common = sorted(set.intersection(*(set(each) for each in parameters.values())))
        spread = [float(np.ptp([each[at] for each in parameters.values()], axis=0).max()) for at in common]
        chaos.note("parameters", iterations=common, spread=spread)
        return 0.0 in spread

    until(agree, "all members hold the same parameters", patience=120.0)
    for name in chaos.names:
        federation.signal(name, signal.SIGTERM)
    federation.finish()
    for name in chaos.names:
        assert federation.events(name)[-1]["event"] == "end"
    chaos.look_for_accusations(*chaos.names)
