"""One real federation in network namespaces, which suffers one fault after the other."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import live_federation
import pytest
from forking import Forked
from live_federation import NAMES, Federation, drop, until

from byzpg.live.manifest import Times

# Members in network namespaces take half a minute to begin. What the protocol promises while messages are lost, and
# members crash, freeze and return, is also tested in simulated federations: test_protocol.py.
pytestmark = pytest.mark.slow

TINY: dict[str, Any] = {
    "horizon": 50,
    "large_batch": 4,
    "hidden": (8,),
    "rounds": 1,
    "trajectories": 60_000,  # more than 25 minutes, as members rest; every start plans all of them
    "seed": 1,
}
TIMES = Times(grace=0.4, start_grace=300.0, retry=0.1)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with live_federation.in_namespaces(tmp_path_factory.mktemp("faults"), TIMES, **TINY) as made:
        made.start_all()
        yield made
        for name in NAMES:
            assert not made.events(name, "equivocation"), "all members are honest"


def others(*without: str) -> list[str]:
    return [name for name in NAMES if name not in without]


def test_a_slow_start_costs_no_member_a_round(federation: Federation) -> None:
    """Every member waits for all others at the start barrier, step 0; later on, a busy machine may make one late."""
    for name in NAMES:
        assert 0 not in [event["step"] for event in federation.events(name, "without")]


def test_a_frozen_member_does_not_stall_the_others_and_catches_up(federation: Federation) -> None:
    federation.signal("dave", signal.SIGSTOP)
    try:
        federation.wait_for_iterations(4, *others("dave"))
        alone = federation.iteration("dave")
        federation.wait_for_iterations(1, *others("dave"))
        assert federation.iteration("dave") == alone
        assert ["dave"] in [event["missing"] for event in federation.events("alice", "without")]
    finally:
        federation.signal("dave", signal.SIGCONT)
    federation.wait_until_together(*NAMES)


def test_a_member_killed_and_started_at_once_needs_no_states(federation: Federation) -> None:
    rejoins = len(federation.events("erin", "rejoin"))
    # The others do not move while erin is away: with alice frozen as well, there is no quorum.
    federation.signal("alice", signal.SIGSTOP)
    try:
        federation.kill("erin")
        federation.start("erin")
        # Until erin is part of a quorum. Before that her links may be missing, and alice would not wait for her.
        federation.wait_for_iterations(1, "erin")
        assert len(federation.events("erin", "rejoin")) == rejoins
    finally:
        federation.signal("alice", signal.SIGCONT)
    federation.wait_until_together(*NAMES)


def test_a_partition_and_its_end(federation: Federation) -> None:
    alarms = len(federation.events("carol", "stalled"))
    drop(federation, "carol", 100)
    try:
        federation.wait_for_iterations(4, *others("carol"))
        alone = federation.iteration("carol")
        until(lambda: len(federation.events("carol", "stalled")) > alarms, "carol says that she is alone")
        assert federation.iteration("carol") <= alone + 1
    finally:
        drop(federation, "carol", 0)
    federation.wait_until_together(*NAMES)


@pytest.mark.parametrize("percent", [1, 20])
def test_lost_packets(federation: Federation, percent: int) -> None:
    for name in NAMES:
        drop(federation, name, percent)
    try:
        federation.wait_for_iterations(3, *NAMES)
    finally:
        for name in NAMES:
            drop(federation, name, 0)
    federation.wait_until_together(*NAMES)


def test_without_a_quorum_nothing_moves_until_one_returns(federation: Federation) -> None:
    alarms = {name: len(federation.events(name, "stalled")) for name in ("alice", "bob", "carol")}
    for name in ("dave", "erin"):
        federation.signal(name, signal.SIGSTOP)

    def state(name: str) -> tuple[int, bytes]:
        return federation.iteration(name), (federation.directory(name) / "checkpoints.bin").read_bytes()

    def nothing_moves() -> bool:
        """Whether all three raise the alarm and stay where they are.

        Not necessarily in the same round: the last message of a frozen member may have reached only some of them.
        """
        if not all(len(federation.events(name, "stalled")) > before for name, before in alarms.items()):
            return False
        before = [state(name) for name in alarms]
        time.sleep(5 * TIMES.grace)  # long enough for several rounds, if one could end
        return [state(name) for name in alarms] == before

    try:
        until(nothing_moves, "alice, bob and carol raise the alarm and stay where they are")
        assert {"dave", "erin"} <= set(federation.events("alice", "stalled")[-1]["missing"])
        federation.signal("erin", signal.SIGCONT)
        federation.wait_for_iterations(3, "alice", "bob", "carol", "erin")
        assert federation.events("alice", "recovered")
    finally:
        for name in ("dave", "erin"):
            federation.signal(name, signal.SIGCONT)
    federation.wait_until_together(*NAMES)


# Callers that must be refused, one after the other. The program prints how each was refused.
CALLERS = """
import asyncio, json, sys
from pathlib import Path
import grpc
from grpc import aio
from byzpg.live import links
from byzpg.live.identity import generate
from byzpg.live.manifest import Manifest

manifest = Manifest.load(Path(sys.argv[1]) / "federation.toml")
victim = manifest.members[0]
root, name = victim.certificate.encode(), [("grpc.ssl_target_name_override", victim.name)]
stranger, private = generate("mallory", "10.77.0.6:7700")

def channel_of(how):
    if how == "plaintext":
        return aio.insecure_channel(victim.address)
    if how == "no certificate":
        return aio.secure_channel(victim.address, grpc.ssl_channel_credentials(root), name)
    certificates = {
        "foreign certificate": stranger.certificate,
        "copied certificate": manifest.members[4].certificate,  # a member's card is public, its key is not
    }
    credentials = grpc.ssl_channel_credentials(root, private.tls, certificates[how].encode())
    return aio.secure_channel(victim.address, credentials, name)

async def call(how):
    try:
        async with channel_of(how) as channel:
            call = channel.stream_stream(f"/{links.SERVICE}/{links.LINK}")(timeout=20)
            await call.write(manifest.canonical)
            return "ANSWERED" if isinstance(await call.read(), bytes) else "CLOSED"
    except (aio.AioRpcError, ValueError, RuntimeError) as error:
        return f"REFUSED {getattr(error, 'code', lambda: error)()}"

async def main():
    print(json.dumps({how: await call(how) for how in sys.argv[2:]}))

asyncio.run(main())
"""
STRANGERS = ("plaintext", "no certificate", "foreign certificate", "copied certificate")


def test_strangers_are_refused(federation: Federation) -> None:
    linked = len(federation.events("alice", "linked"))
    said, complaints = federation.folder / "strangers.out", federation.folder / "strangers.err"
    with said.open("w") as output, complaints.open("w") as errors:
        space = federation.namespaces["outsider"]
        line = (federation.folder, *STRANGERS)
        callers = Forked(*line, program=CALLERS, stdout=output, stderr=errors, namespace=space)
    assert callers.wait() == 0, complaints.read_text()
    answers = json.loads(said.read_text())
    assert tuple(answers) == STRANGERS
    assert all(words == "CLOSED" or words.startswith("REFUSED") for words in answers.values()), answers
    assert len(federation.events("alice", "linked")) == linked
    federation.wait_for_iterations(1, *NAMES)


# An attacker with alice's stolen key. The program prints the outcome of each attempt.
TRAITOR = """
import asyncio, sys
from pathlib import Path
from typing import Any
from grpc import aio
from byzpg.live import links
from byzpg.live.identity import read_key
from byzpg.live.manifest import Manifest

folder = Path(sys.argv[1])
manifest = Manifest.load(folder / "federation.toml")
private = read_key(folder / "alice.key", manifest.members[0])

async def attempt(what, frames):
    channel = links.open_channel(manifest, 0, private, 1, 2**20)
    call = channel.stream_stream(f"/{links.SERVICE}/{links.LINK}")(timeout=60)
    try:
        hello = await call.read()
        await call.write(hello)
        for frame in frames:
            await call.write(frame)
        while isinstance(await call.read(), bytes):
            pass
        print(what, await call.code(), await call.details())
    except (aio.AioRpcError, asyncio.InvalidStateError) as error:
        print(what, await call.code(), await call.details())
    finally:
        await channel.close()

async def main():
    await attempt("large", [bytes(2**28)])
    await attempt("flood", [b"nonsense" * 30] * 60)
    await attempt("again", [])

asyncio.run(main())
"""

SLOW = """
import socket, sys
connections = []
for _ in range(200):
    try:
        connections.append(socket.create_connection(("10.77.0.1", 7700), timeout=5))
        connections[-1].sendall(b"\\x16\\x03\\x01\\x02\\x00\\x01")  # the beginning of a TLS handshake, and nothing more
    except OSError:
        pass
print(len(connections), flush=True)
sys.stdin.read()
"""


def memory(federation: Federation, name: str) -> int:
    """Resident bytes of a member."""
    statuses = Path(f"/proc/{federation.processes[name].pid}/status").read_text().splitlines()
    return int(next(line for line in statuses if line.startswith("VmRSS")).split()[1]) * 1024


def test_a_stolen_key_does_no_harm_and_its_owner_rejoins(federation: Federation) -> None:
    """A large frame is refused before it is read, and a flood is cut off."""
    federation.kill("alice")
    away_since, rejoins = federation.iteration("alice"), len(federation.events("alice", "rejoin"))
    before = memory(federation, "bob")
    said = federation.folder / "traitor.out"
    with said.open("w") as output:
        space = federation.namespaces["alice"]
        traitor = Forked(federation.folder, program=TRAITOR, stdout=output, namespace=space)
    largest = before
    while traitor.poll() is None:
        largest = max(largest, memory(federation, "bob"))
        time.sleep(0.05)
    became = said.read_text()
    assert "large StatusCode.RESOURCE_EXHAUSTED" in became, became
    assert "again StatusCode.PERMISSION_DENIED too many bad messages" in became, became
    assert "flood" in {event["reason"] for event in federation.events("bob", "refused")}
    assert largest - before < 2**27, "half of the frame"

    federation.wait_for_iterations(5, *others("alice"))
    federation.start("alice")
    rejoined = until(lambda: federation.events("alice", "rejoin")[rejoins:], "alice has rejoined")[0]
    assert rejoined["iteration"] > away_since + 2
    assert len(rejoined["states"]) >= 3, "2f + 1"
    federation.wait_until_together(*NAMES)


def test_silent_connections_cost_a_member_neither_time_nor_memory(federation: Federation) -> None:
    before = memory(federation, "alice")
    command = ["ip", "netns", "exec", federation.namespaces["outsider"], sys.executable, "-c", SLOW]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as loris:
        assert loris.stdout is not None
        assert int(loris.stdout.readline()) > 100
        federation.wait_for_iterations(3, *NAMES)
        assert memory(federation, "alice") - before < 2**27
        loris.communicate()  # closes its input, and so ends it
