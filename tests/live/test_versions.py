"""Members beside a recorded member of byzpg 0.2.0, which speaks version 1 of the protocol, and after restarts.

`python tests/live/test_versions.py record FOLDER`, run with byzpg 0.2.0, made the recording: the keys and the manifest
of five members, and all that the last one sent to the others.
"""

import asyncio
import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from byzpg.live.amendment import amended
from byzpg.live.identity import generate, read_key, write_identity
from byzpg.live.links import LINK, SERVICE, channel_options, free_ports, server_credentials
from byzpg.live.manifest import Manifest, Times, new_manifest
from byzpg.live.peer import Checkpoint, LivePeer
from byzpg.live.protocol import NOTHING
from byzpg.live.status import Log, Status
from byzpg.live.store import Store

NAMES = ("alice", "bob", "carol", "dave", "erin")
RECORDING = Path(__file__).parent / "recorded" / "version-1"
DIMENSION, ITERATIONS, ROUNDS = 4, 3, 1


class Exact:
    """A computation whose vectors have the same bits on every machine."""

    dimension, num_iterations, rounds = DIMENSION, ITERATIONS, ROUNDS
    state_dimension = snapshot_dimension = DIMENSION
    plan_digest = "exact"

    def __init__(self, own: int) -> None:
        self.own, self.state = own, np.zeros(DIMENSION, np.float32)

    def warm_up(self) -> None: ...

    def begin(self, iteration: int) -> np.ndarray:
        return np.full(DIMENSION, 1 + self.own + 8 * iteration, np.float32)

    def combine(self, iteration: int, phase: int, received: np.ndarray, present: np.ndarray) -> np.ndarray | None:
        assert present.all()
        total = received.sum(axis=0, dtype=np.float32)  # of small integers: exact
        if phase < ROUNDS:
            return total
        self.state = total
        return None

    def snapshot(self) -> np.ndarray:
        return self.state

    def restore(self, iteration: int, snapshot: np.ndarray) -> None:
        self.state = snapshot

    def adopt(self, iteration: int, states: Sequence[np.ndarray | None]) -> None:
        raise AssertionError("nobody falls behind")

    def observe(self, status: Status, iteration: int, phase: int | None) -> dict[str, Any]:
        return {}


def member(manifest: Manifest, keys: Path, folder: Path, own: int) -> LivePeer:
    each = manifest.members[own]
    return LivePeer(
        manifest=manifest,
        own=own,
        private=read_key(keys / f"{each.name}.key", each),
        store=Store(folder / each.name, manifest, each),
        computation=Exact(own),
        status=Status(
            names=NAMES, own=own, num_iterations=ITERATIONS, attack=None, reward_threshold=None, task="exact"
        ),
        log=Log(folder / f"{each.name}.log", each.name, None),
        listen=each.address,
    )


async def record(folder: Path) -> None:
    """Run five members, and keep what the last one sends."""
    made = [
        generate(name, f"127.77.0.{number}:7700") for number, name in enumerate(NAMES, 1)
    ]  # nobody else listens there
    for identity in made:
        write_identity(folder, *identity)
    manifest = new_manifest([one for one, _ in made], 1, {"trajectories": 100}, Times(), rehearsal=True)
    manifest.write(folder / "federation.toml")
    members = [member(manifest, folder, folder / "directories", own) for own in range(len(NAMES))]
    frames: dict[int, str] = {}

    def keep(to: int, message: Any) -> bytes:
        if message.kind == "vector":
            frames[message.step] = message.frame.hex()
        return message.frame

    members[-1].outgoing = keep
    await asyncio.gather(*(each.run() for each in members))
    hello = manifest.canonical + b"\n" + Exact.plan_digest.encode()
    (folder / "erin.json").write_text(json.dumps({"hello": hello.hex(), "frames": frames}, indent=1) + "\n")


class Recorded:
    """The recorded member: it answers a message of a step with its own, and knows nothing of versions."""

    def __init__(self, manifest: Manifest, keys: Path) -> None:
        recording = json.loads((keys / "erin.json").read_text())
        self.hello = bytes.fromhex(recording["hello"])
        self.frames = {int(step): bytes.fromhex(frame) for step, frame in recording["frames"].items()}
        self.received: list[bytes] = []
        self.server = aio.server(options=channel_options(2**20))
        handlers = {LINK: grpc.stream_stream_rpc_method_handler(self.accept)}
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        private = read_key(keys / "erin.key", manifest.members[-1])
        self.server.add_secure_port(manifest.members[-1].address, server_credentials(manifest, 4, private))

    async def accept(self, requests: object, context: aio.ServicerContext) -> None:
        await context.write(self.hello)
        assert await context.read() == self.hello, "an old member compares the bytes"
        while isinstance(frame := await context.read(), bytes):
            self.received.append(frame)
            if frame[5] in (0, 1):  # a vector of a step, or an ask for it
                await context.write(self.frames[step_of(frame)])


def step_of(frame: bytes) -> int:
    """The step in the head of a message of version 1: magic, version, kind, sender, iteration, phase."""
    iteration, phase = struct.unpack_from("<4xBBHIH", frame)[3:]
    if phase == 0xFFFF:  # a barrier
        return 0 if iteration == 0 else 1 + ITERATIONS * (1 + ROUNDS)
    return 1 + iteration * (1 + ROUNDS) + phase


def test_members_train_with_one_of_an_older_version(tmp_path: Path) -> None:
    manifest = Manifest.load(RECORDING / "federation.toml")
    for name in NAMES:
        (RECORDING / f"{name}.key").chmod(0o600)  # version control does not keep this

    async def run() -> tuple[list[LivePeer], Recorded]:
        erin = Recorded(manifest, RECORDING)
        await erin.server.start()
        members = [member(manifest, RECORDING, tmp_path, own) for own in range(4)]
        try:
            await asyncio.gather(*(each.run() for each in members))
        finally:
            await erin.server.stop(None)
            for each in members:
                each.store.close()
                each.log.close()
        return members, erin

    members, erin = asyncio.run(run())
    events = [json.loads(line) for name in NAMES[:4] for line in (tmp_path / f"{name}.log").read_text().splitlines()]
    assert {event["event"] for event in events} <= {
        "start",
        "ready",
        "linked",
        "unlinked",
        "iteration",
        "finished",
        "end",
    }
    for event in events:
        if event["event"] == "linked":
            assert event["version"] == (1 if event["to"] == "erin" else 2)
    expected = members[0].computation.snapshot()
    assert expected.any()
    for each in members:
        np.testing.assert_array_equal(each.computation.snapshot(), expected)
    kinds = {frame[5] for frame in erin.received if isinstance(frame, bytes)}
    assert kinds <= {0, 1, 2}, "vectors, asks and states: version 1 has no other kinds"


def test_a_version_that_nobody_speaks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from byzpg.live import links

    ports = free_ports(2)
    made = [generate(name, f"127.0.0.1:{port}") for name, port in zip(("alice", "bob"), ports, strict=True)]
    for identity in made:
        write_identity(tmp_path, *identity)
    manifest = new_manifest([one for one, _ in made], 0, {"trajectories": 100}, Times(), rehearsal=True)
    bob = made[1]

    async def call() -> aio.AioRpcError | None:
        refused: list[tuple[Any, ...]] = []
        events = links.Events(
            received=lambda sender, frame: "bad",
            linked=lambda other, version: None,
            unlinked=lambda other, words: None,
            refused=lambda *words: refused.append(words),
            status=lambda: b"",
            amended=lambda content: None,
        )
        server = links.Links(
            manifest=manifest,
            own=1,
            private=bob[1],
            largest=1000,
            listen=bob[0].address,
            events=events,
            plan_digest="",
        )
        await server.open()
        channel = links.open_channel(manifest, 0, made[0][1], 1, 2**20)
        try:
            call = channel.stream_stream(f"/{SERVICE}/{LINK}")(metadata=((links.SPOKEN, "7,8"),))
            with pytest.raises(aio.AioRpcError) as error:
                await call.read()
            assert refused[0][:2] == (0, "version")
            return error.value
        finally:
            await channel.close()
            await server.close()

    error = asyncio.run(call())
    assert error is not None
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "no common version" in str(error.details())


def test_a_member_restarts_at_the_meeting_before_a_new_manifest(tmp_path: Path) -> None:
    """What it has signed there is a message of the shortened run, and it still has it."""
    old, start = Manifest.load(RECORDING / "federation.toml"), 2
    for name in NAMES:
        (RECORDING / f"{name}.key").chmod(0o600)
    proposal = amended(old, from_iteration=start, remove=["erin"], num_byzantine=0)
    for own, name in enumerate(NAMES[:4]):
        proposal = proposal.approved_by(read_key(RECORDING / f"{name}.key", old.members[own]), name, old)
    (tmp_path / "alice").mkdir()

    async def made(*, amendment: bool) -> LivePeer:
        alice = member(old, RECORDING, tmp_path, 0)
        if amendment:
            proposal.write(tmp_path / "alice" / "amendment.toml")
        return alice

    def closed(alice: LivePeer) -> LivePeer:
        alice.store.close()
        alice.log.close()
        return alice

    closed(asyncio.run(made(amendment=True)))
    alice = asyncio.run(made(amendment=True))
    assert alice.course.num_iterations == start
    step = alice.course.last
    barrier = alice.seal(step, NOTHING, ())
    alice._mark.move(step)
    alice._outbox.put(step, barrier.frame)
    alice._checkpoints.put(0, *Checkpoint(start, np.ones(DIMENSION, np.float32)).parts())
    closed(alice)
    again = closed(asyncio.run(made(amendment=True)))
    assert again.protocol.sent[step].frame == barrier.frame
    assert again.protocol.leaving == {4}
    assert again.protocol.silent_through == -1


@pytest.mark.parametrize("sleeps", [0, 1, 2, 5])
def test_a_member_that_is_cancelled_more_than_once_still_ends_its_server(tmp_path: Path, sleeps: int) -> None:
    """While it starts or ends; gRPC would complain later, in the garbage collector, of a server that still runs."""
    manifest = Manifest.load(RECORDING / "federation.toml")
    (RECORDING / "alice.key").chmod(0o600)

    async def run() -> LivePeer:
        alice = member(manifest, RECORDING, tmp_path, 0)
        running = asyncio.create_task(alice.run())
        await asyncio.sleep(0)
        while not running.done():
            running.cancel()
            for _ in range(sleeps):
                await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert running.cancelled()
        return alice

    alice = asyncio.run(run())
    alice.store.close()
    alice.log.close()
    assert not vars(alice.links._server)["_server"].is_running()


if __name__ == "__main__":
    asyncio.run(record(Path(sys.argv[2])))
