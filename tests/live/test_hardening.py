"""Two real federations under what must not stop a member: damaged, lost, old and full disks, floods, and latecomers.

The first one suffers one fault after the other. Its last member, erin, withholds her state at first, and floods others
and equivocates later. The second one finishes with one disk full, and without dave, who comes too late.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forking import Forked
from live_federation import CALM, NAMES, Federation, free_ports, on_loopback, run, until
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from byzpg import load
from byzpg.cli.watch import members_table
from byzpg.live.identity import read_key
from byzpg.live.links import FRAME_SECONDS, MOST_WASTE, RESTRAINED_WASTE, SERVICE, STATUS, WASTE, open_channel
from byzpg.live.manifest import Times
from byzpg.live.member import Options, take_part
from byzpg.live.observe import LARGEST_STATUS, Answer, Statuses, parse_status
from byzpg.live.records import HEAD
from byzpg.live.wire import prove

# With tiny steps the policy stays bad. Otherwise all returns would soon be alike and all gradients 0, and a member that
# equivocates would send the same to all.
TINY: dict[str, Any] = {"horizon": 50, "large_batch": 4, "hidden": (8,), "rounds": 1, "seed": 1, "step_size": 1e-6}
TRAJECTORIES = 60_000  # at a rest of 0.1 s per iteration, more than 25 minutes; every start plans all of them
TIMES = Times(grace=1.0, start_grace=300.0, retry=0.1)  # on a busy machine, erin needs most of it to be heard
SLOTS = {"outbox.bin": 6, "checkpoints.bin": 2, "mark.bin": 2}  # with one round of agreement
MOST_FILES = 1024
STRANGER = "127.0.0.66"

# A member with the usual limit of open files, which it cannot raise.
LIMITED = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, 2 * ({MOST_FILES},)){CALM}"
# One that never sends its state to those that need it.
WITHHOLDING = f"from byzpg.live.peer import LivePeer; LivePeer._send_state = lambda *_: None{CALM}"


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, metrics_port: int) -> Iterator[Federation]:
    with on_loopback(tmp_path_factory.mktemp("hardening"), TIMES, trajectories=TRAJECTORIES, **TINY) as made:
        made.start_all(bob=(LIMITED, "--metrics-port", str(metrics_port)), erin=(WITHHOLDING,))
        yield made


def others(*without: str) -> list[str]:
    return [name for name in NAMES if name not in without]


def new_events(federation: Federation, name: str, event: str) -> Callable[[], list[dict[str, Any]]]:
    """What a member logs from now on; its log must not be replaced meanwhile."""
    before = len(federation.events(name, event))
    return lambda: federation.events(name, event)[before:]


def all_together(federation: Federation) -> None:
    """Wait until all members do the same iterations, and check that none accuses another or takes it for a stranger."""
    federation.wait_until_together(*NAMES)
    for name in NAMES:
        assert not federation.events(name, "equivocation")
        assert "stranger" not in [event["reason"] for event in federation.events(name, "refused")]


# Damaged, old and lost directories


def flip_bits(path: Path, num_slots: int) -> None:
    """Flip one bit in the content of every record."""
    content = bytearray(path.read_bytes())
    slot_bytes = len(content) // num_slots
    assert slot_bytes * num_slots == len(content)
    for slot in range(num_slots):
        content[slot * slot_bytes + HEAD.size + 5] ^= 0x10
    path.write_bytes(content)  # in place: a file that moves is noticed anyway


@pytest.mark.slow
@pytest.mark.parametrize("damaged", ["checkpoints.bin", "mark.bin"])
def test_a_damaged_file_is_named_and_its_owner_comes_back(federation: Federation, damaged: str) -> None:
    """Nor do bad bytes in progress.jsonl prevent the start, or a member that withholds its state the return."""
    federation.kill("dave")
    path = federation.directory("dave") / damaged
    flip_bits(path, SLOTS[damaged])
    progress = path.with_name("progress.jsonl")
    broken = (
        progress.read_bytes().replace(b"trajectories", b"trajectorie\xff", 1).replace(b"return_mean", b"return_meaN", 2)
    )
    progress.write_bytes(broken)
    damages, rejoins = new_events(federation, "dave", "damaged"), new_events(federation, "dave", "rejoin")
    forgotten = new_events(federation, "dave", "forgotten")
    federation.start("dave")
    states = until(rejoins, "dave has taken over a state")[0]["states"]
    assert states == ["alice", "bob", "carol"], "2f + 1, and erin sends none"
    assert str(path) in [event["file"] for event in damages()]
    assert not forgotten(), "the mark tells dave enough; he need not hear it from others"
    all_together(federation)


def restore_in_place(older: Path, directory: Path) -> None:
    """Restore the content of a directory into its files, as the snapshot of a whole disk does."""
    for path in directory.iterdir():
        if path.is_file() and not (older / path.name).exists():
            path.unlink()
    for path in older.iterdir():
        if path.is_file():
            with (directory / path.name).open("r+b") as file:
                file.write(path.read_bytes())
                file.truncate()


@pytest.mark.slow
def test_a_directory_from_a_backup_is_noticed(federation: Federation) -> None:
    """A copy has other files than those that the mark names. After a snapshot, only the other members can tell."""
    directory, older = federation.directory("dave"), federation.folder / "older"
    federation.kill("dave")
    shutil.copytree(directory, older)
    federation.start("dave")
    federation.wait_for_iterations(4, *NAMES)
    # On a busy machine, all that he has sent since may have come too late: then there is nothing to forget.
    until(lambda: status(federation, "bob")["others"]["dave"]["present"], "bob has a message of dave")

    federation.kill("dave")
    restore_in_place(older, directory)
    federation.logs.pop("dave")
    forgotten, damaged = new_events(federation, "dave", "forgotten"), new_events(federation, "dave", "damaged")
    federation.start("dave")
    found = until(forgotten, "dave hears what he has forgotten")
    assert found[0]["file"] == str(directory)
    assert not damaged(), "the files alone do not tell"
    all_together(federation)

    federation.kill("dave")
    directory.rename(federation.folder / "newer")  # kept, so that its files' numbers are not used again
    shutil.copytree(older, directory)
    federation.logs.pop("dave")
    damaged, rejoins = new_events(federation, "dave", "damaged"), new_events(federation, "dave", "rejoin")
    federation.start("dave")
    until(rejoins, "dave has taken over a state")
    assert [event["file"] for event in damaged()] == [str(directory / "mark.bin")]
    all_together(federation)


# More faults than the federation tolerates, and those that it must overcome


def metrics(port: int) -> dict[tuple[str, ...], float]:
    """The value of every metric, by its name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


@pytest.mark.slow
def test_one_behind_and_one_without_its_directory(federation: Federation, metrics_port: int) -> None:
    """Two faults are one too many, so everything stops and says so. When both are back, it goes on."""
    federation.kill("erin")
    federation.start("erin")
    all_together(federation)
    alarms = new_events(federation, "alice", "faults")
    federation.signal("carol", signal.SIGSTOP)
    try:
        federation.wait_for_iterations(4, *others("carol"))
        federation.kill("dave")
        shutil.rmtree(federation.directory("dave"))
        federation.logs.pop("dave")
        until(lambda: [event for event in alarms() if event["members"] == ["carol", "dave"]], "alice raises the alarm")
        until(lambda: metrics(metrics_port)["byzpg_faults",] == 2, "bob counts two")
        assert metrics(metrics_port)["byzpg_faults_tolerated",] == 1
        assert "carol, dave (missing or equivocated)" in watched(federation)
    finally:
        federation.signal("carol", signal.SIGCONT)
    federation.start("dave")
    all_together(federation)
    until(lambda: metrics(metrics_port)["byzpg_faults",] <= 1, "bob misses nobody any more")
    assert federation.events("dave", "forgotten")


def test_a_member_that_lost_its_messages_signs_no_others(federation: Federation) -> None:
    """Without alice and dave there is no quorum, so the others still compare what dave sends with what he has sent."""
    damages, forgotten = new_events(federation, "dave", "damaged"), new_events(federation, "dave", "forgotten")
    ready = new_events(federation, "dave", "ready")
    path = federation.directory("dave") / "outbox.bin"
    federation.signal("alice", signal.SIGSTOP)
    try:
        federation.kill("dave")
        flip_bits(path, SLOTS["outbox.bin"])
        federation.start("dave")
        until(ready, "dave is up")
        time.sleep(10 * TIMES.retry)  # in which he would sign and send
    finally:
        federation.signal("alice", signal.SIGCONT)
    all_together(federation)
    assert str(path) in [event["file"] for event in damages()]
    assert not forgotten(), "the mark tells dave enough; he need not hear it from others"


def watched(federation: Federation) -> str:
    said = federation.folder / "watched.out"
    with said.open("w") as output:
        line = ("watch", federation.folder / "federation.toml", "--name", "alice", "--once")
        assert Forked(*line, stdout=output, COLUMNS="200").wait() == 0
    return said.read_text()


@pytest.mark.parametrize(
    ("reports", "is_shown"),
    [
        ({"alice": ["dave", "erin"], "bob": ["erin", "dave"]}, True),
        ({"alice": ["dave", "erin"]}, False),  # one member alone may say anything
        ({"alice": ["dave"], "bob": ["erin"], "carol": ["dave"]}, False),
        ({"alice": ["dave"], "bob": ["dave"], "carol": ["dave"]}, False),  # as many as are tolerated
    ],
)
def test_watch_shows_too_many_faults(federation: Federation, reports: dict[str, list[str]], is_shown: bool) -> None:
    statuses: Statuses = {
        name: parse_status(json.dumps({"faults": reports.get(name, [])}).encode(), name, NAMES) for name in NAMES
    }
    output = StringIO()
    Console(file=output, width=200).print(members_table(federation.manifest, statuses | {"erin": None}))
    assert ("dave, erin (missing or equivocated); the federation tolerates 1" in output.getvalue()) == is_shown


def test_f_members_cannot_accuse_another_one_in_watch(federation: Federation) -> None:
    lie = {"equivocations": 10**6, "rejected": {"size": 10**6}}
    seen = {"erin": {"equivocations": 2, "rejected": {"late": 3}}}
    others = {"alice": {"bob": lie}, "bob": seen, "carol": seen, "dave": {}}
    statuses: Statuses = {
        name: parse_status(json.dumps({"others": others.get(name, {})}).encode(), name, NAMES) for name in NAMES
    }
    output = StringIO()
    Console(file=output, width=200).print(members_table(federation.manifest, statuses))
    rows = [line.replace("│", " ").split() for line in output.getvalue().splitlines()]
    assert [row[-2:] for row in rows if row[:1] in (["bob"], ["erin"])] == [["0", "0"], ["2", "3"]]


# Floods

# A member that sends to others what the file in FLOOD says: the name of a flood, and whom to flood.
FLOODING = f"""
import asyncio, itertools, os
import numpy as np
from byzpg.live.peer import LivePeer
from byzpg.live.protocol import NOTHING, Receipt

def frames(peer, kind):
    seal = lambda kind, step, *content: peer.codec.encode(kind, step, *content, peer.private.signing).frame
    ask = seal("ask", 0, NOTHING, ())
    if kind == "junk":
        return [b"junk" * 60] * 49 + [ask]
    if kind == "asks":
        return [ask]
    bogus = [Receipt(sender, 0, os.urandom(32), os.urandom(64)) for sender in range(4)]
    vectors = np.random.default_rng(1).normal(size=(300, peer.computation.dimension)).astype(np.float32)
    return [seal("vector", peer.protocol.step, vector, bogus) for vector in vectors]

async def run(peer, usual_run=LivePeer.run):
    usual_write = peer.links._write

    async def write_flood(other, write):
        prepared = {{}}
        while True:
            kind, victim = open(os.environ["FLOOD"]).read().split()
            if int(victim) != other:
                await asyncio.sleep(0.05)
                continue
            if kind not in prepared:
                prepared[kind] = itertools.cycle(frames(peer, kind))
            for frame in itertools.islice(prepared[kind], 50):
                await write(frame)

    peer.links._write = write_flood
    await usual_run(peer)

LivePeer.run = run
{CALM}
"""
# The victim of each flood, the bytes of a frame, and how much of the victim's time may be wasted.
FLOODS = {"junk": ("bob", 240, WASTE), "asks": ("dave", 164, WASTE), "vectors": ("alice", 700, RESTRAINED_WASTE)}


def processor_seconds(federation: Federation, name: str) -> float:
    fields = Path(f"/proc/{federation.processes[name].pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def status(federation: Federation, name: str) -> Answer:
    """What a member reports."""
    manifest = federation.manifest
    private = read_key(federation.folder / "alice.key", manifest.members[0])

    async def ask() -> bytes:
        async with open_channel(manifest, 0, private, NAMES.index(name), LARGEST_STATUS) as channel:
            return await channel.unary_unary(f"/{SERVICE}/{STATUS}")(b"", timeout=60)

    answer = parse_status(asyncio.run(ask()), name, NAMES)
    assert answer is not None
    return answer


@pytest.mark.slow
def test_a_flood_costs_a_member_little_time(federation: Federation) -> None:
    """Without carol and erin there is no quorum, so the others have nothing to do but to read the flood."""
    choice = federation.folder / "flood"
    choice.write_text("junk 1")
    federation.signal("carol", signal.SIGSTOP)
    federation.kill("erin")
    try:
        federation.start("erin", program=FLOODING, FLOOD=str(choice))
        until(lambda: status(federation, "bob")["others"]["erin"]["rejected"].get("malformed"), "the flood has begun")
        for kind, (victim, frame_bytes, waste) in FLOODS.items():
            choice.write_text(f"{kind} {NAMES.index(victim)}")
            received = status(federation, victim)["bytes_received"]
            began, before = time.monotonic(), processor_seconds(federation, victim)
            time.sleep(4.0)
            seconds, spent = time.monotonic() - began, processor_seconds(federation, victim) - before
            num_frames = (status(federation, victim)["bytes_received"] - received) / frame_bytes
            # The others also send something, and reports are a moment old.
            assert num_frames < 1.5 * (MOST_WASTE + waste * seconds) / FRAME_SECONDS, kind
            assert spent < MOST_WASTE + 0.4 * seconds, f"{kind}: {spent} s of processor time"
        assert federation.events("alice", "equivocation"), "two vectors of one step"
        assert not federation.events("bob", "equivocation")
    finally:
        federation.signal("carol", signal.SIGCONT)
        federation.kill("erin")
    federation.wait_until_together(*others("erin"))


# Strangers

# Somebody who holds as many connections open as possible, and renews them. The program prints how many it has opened,
# and after a line of input, how many of those that it opened last are still open a moment later.
IDLE = """
import resource, select, socket, sys, time
address, port = sys.argv[1], int(sys.argv[2])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (2048 if hard == resource.RLIM_INFINITY else min(hard, 2048), hard))

def connect():
    made = socket.socket()
    made.bind((address, 0))
    made.settimeout(10)
    made.connect(("127.0.0.1", port))
    return made

connections = [connect() for _ in range(1100)]
print(len(connections), flush=True)
while not select.select([sys.stdin], [], [], 0.1)[0]:
    for old in connections[:30]:
        old.close()
    connections = connections[30:] + [connect() for _ in range(30)]
time.sleep(1.0)
ended = select.poll()
for each in connections:
    ended.register(each, select.POLLIN)
print(len(connections) - len(ended.poll(0)), flush=True)
"""


def num_open_files(federation: Federation, name: str) -> int:
    return len(os.listdir(f"/proc/{federation.processes[name].pid}/fd"))


def proof_at_bob(federation: Federation) -> dict[str, Any]:
    """Wait until bob can prove that erin equivocated.

    Erin tells carol and dave something else. Once both have proof, they pass on nothing more from her, perhaps before
    bob has heard of it. Carol cannot keep her proof: if she starts again, she passes on what erin tells her.
    """
    patience = time.monotonic() + 20

    def proofs() -> list[dict[str, Any]]:
        nonlocal patience
        if time.monotonic() > patience:
            federation.kill("carol")
            federation.start("carol")
            patience = time.monotonic() + 100  # on a busy machine, she may need most of it to start
        return federation.events("bob", "equivocation")

    return until(proofs, "bob has proof")[0]


def test_idle_connections_cannot_crash_a_member(federation: Federation) -> None:
    """The victim, bob, keeps his evidence and accepts a member. Carol cannot keep hers, and continues as well."""
    federation.kill("erin")
    (federation.directory("carol") / "evidence").write_text("not a directory")
    unwritten = new_events(federation, "carol", "not written")
    port = federation.manifest.members[1].address.rpartition(":")[2]
    command = [sys.executable, "-c", IDLE, STRANGER, port]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdin is not None
        assert stranger.stdout is not None
        assert int(stranger.stdout.readline()) == 1100
        federation.start("erin", "--attack", "Equivocate")
        found = proof_at_bob(federation)
        assert found["sender"] == "erin"
        federation.kill("alice")
        federation.start("alice")
        federation.wait_until_together(*others("erin"))
        assert num_open_files(federation, "bob") < MOST_FILES - 50
        stranger.stdin.write("\n")
        stranger.stdin.flush()
        assert int(stranger.stdout.readline()) < 100
    evidence = json.loads((federation.directory("bob") / "evidence" / found["file"]).read_text())
    assert "erin signed two different messages" in prove(federation.manifest, evidence).words
    lost = str(federation.directory("carol") / "evidence")
    until(lambda: lost in [event["file"] for event in unwritten()], "carol has proof that she cannot keep")
    assert "stranger" in [event["reason"] for event in federation.events("bob", "refused")]


def test_who_equivocated_stays_masked_after_a_restart(federation: Federation) -> None:
    honest = others("erin")
    for name in honest:
        federation.kill(name)
    # Carol could not keep her evidence. Who has proof first stops passing on, so that others may have none.
    careful = [name for name in ("alice", "bob", "dave") if federation.events(name, "equivocation")]
    assert "bob" in careful
    proofs = [new_events(federation, name, "equivocation") for name in careful]
    stopped = 1 + 2 * max(federation.iteration(name) for name in honest)  # a step; later ones come after the restart
    for name in honest:
        federation.start(name)
    federation.wait_until_together(*honest)
    for name in careful:
        until(
            lambda name=name: status(federation, name)["others"]["erin"]["rejected"].get("masked"),
            f"{name} has left out a message of erin",
        )
    steps = [event["step"] for proof in proofs for event in proof()]
    assert all(step <= stopped + 2 for step in steps), "masked members need no new proof"


# Full disks, and a member that comes too late


@contextmanager
def small_disk(path: Path, directory: Path) -> Iterator[Path]:
    """A disk of its own for a member's directory; yields a file that can fill it."""
    assert os.geteuid() == 0, "these tests mount a file system: run them as root"
    path.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(path))
    try:
        (path / "member").mkdir()
        directory.symlink_to(path / "member")
        yield path / "filler"
    finally:
        run("umount", "--lazy", str(path))


def fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def printed(federation: Federation, name: str, event: str) -> list[dict[str, Any]]:
    """What a member prints with --log json; its log may be on a full disk."""
    lines = (federation.folder / f"{name}.out").read_text().splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return [each for each in found if each["event"] == event]


FINISHED = ("alice", "carol", "erin")


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A federation that has finished without dave, and whose bob had no space for anything after his start."""
    folder = tmp_path_factory.mktemp("late")
    times = Times(grace=0.4, start_grace=1.0, linger=2.0, retry=0.1)
    with (
        on_loopback(folder, times, trajectories=24, **TINY) as made,
        small_disk(folder / "disk", folder / "bob") as filler,
    ):
        made.start("bob", "--log", "json")
        until(lambda: made.processes["bob"].poll() is not None or printed(made, "bob", "ready"), "bob is up")
        fill(filler)
        for name in FINISHED:
            made.start(name)
        codes = made.finish()
        assert [codes[name] for name in FINISHED] == [0, 0, 0]
        filler.unlink()
        yield made


def parameters(federation: Federation, name: str) -> np.ndarray:
    return load(federation.directory(name) / "run").parameters["last"][0, 0]


def is_between_the_others(federation: Federation, name: str) -> bool:
    """Whether every parameter of a latecomer lies between those of the members that have finished."""
    others = np.stack([parameters(federation, each) for each in FINISHED])
    own = parameters(federation, name)
    return bool(np.all((others.min(0) <= own) & (own <= others.max(0))))


@pytest.mark.slow
def test_a_full_disk_costs_a_member_its_records_but_not_its_place(late: Federation) -> None:
    unwritten = {Path(event["file"]).name for event in printed(late, "bob", "not written")}
    assert unwritten == {"progress.jsonl", "output.npy", "final.state"}
    assert printed(late, "bob", "finished")
    last = (late.folder / "bob.out").read_text().splitlines()[-1]
    assert f"{late.directory('bob') / 'run'} cannot be written: No space left on device" in last
    late.start("bob")
    assert late.processes["bob"].wait() == 0
    assert is_between_the_others(late, "bob")
    assert (late.directory("bob") / "final.state").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "change", "words"),
    [
        (
            ("alice", "carol"),
            0,
            "the final states of at least 3 members are needed, because 1 may be false, got those of 2",
        ),
        (("alice", "carol", "alice"), 0, "alice is the sender of another file"),
        (("alice", "carol", "nobody"), 0, "No such file"),
        (("alice", "carol", "erin"), -1, "not a signed state of this run (digest)"),  # a bit of the vector
        (("alice", "carol", "erin"), 24, "not a signed state of this run (manifest)"),  # of another federation
        (("alice", "carol", "erin"), 110, "not a signed state of this run (signature)"),
    ],
)
def test_final_states_that_cannot_be_used_are_refused(
    late: Federation, tmp_path: Path, names: tuple[str, ...], change: int, words: str
) -> None:
    paths = [late.directory(name) / "final.state" for name in names]
    if change:
        frame = bytearray(paths[-1].read_bytes())
        frame[change] ^= 1
        paths[-1] = tmp_path / "final.state"
        paths[-1].write_bytes(frame)
    options = Options(late.folder / "dave.key", tmp_path / "dave", final_states=tuple(paths))
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        asyncio.run(take_part(late.manifest, "dave", options))
    assert len(names) == 2 or str(paths[-1]) in str(refused.value)


@pytest.mark.slow
def test_a_latecomer_takes_files_and_waits_for_space_on_its_disk(late: Federation) -> None:
    with small_disk(late.folder / "another disk", late.directory("dave")) as filler:
        fill(filler)
        paths = [str(late.directory(name) / "final.state") for name in FINISHED]
        late.start("dave", "--log", "json", "--final-states", *paths)
        full = until(lambda: printed(late, "dave", "disk"), "dave waits for space")[0]
        assert full["file"] == str(late.directory("dave") / "owner.json")
        assert late.processes["dave"].poll() is None
        filler.unlink()
        assert late.processes["dave"].wait() == 0
        assert is_between_the_others(late, "dave")
    late.directory("dave").unlink()


@pytest.mark.slow
def test_a_latecomer_gets_states_from_members_that_are_started_again(late: Federation) -> None:
    late.start("dave")
    until(lambda: late.events("dave", "ready"), "dave is up")
    for name in FINISHED:
        late.start(name)
    assert late.finish() == dict.fromkeys(late.processes, 0)
    assert is_between_the_others(late, "dave")
