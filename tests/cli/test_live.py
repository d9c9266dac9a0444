"""The commands of the live federation, as a user types them."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from forking import Forked
from live_federation import NAMES, free_ports, until

from byzpg import load
from byzpg._install import install
from byzpg.cli.federation import _signals_wait
from byzpg.live.manifest import Manifest

TASK = """
import gymnasium

def make():
    return gymnasium.make("CartPole-v1", max_episode_steps=25)
"""


def byzpg(*arguments: str, folder: Path, expect: int = 0) -> str:
    """What a command prints, in one line of text."""
    said = folder / "said.txt"
    with said.open("w") as output:
        done = Forked(*arguments, stdout=output, folder=folder, COLUMNS="200", PYTHONPATH=str(folder))
    code, text = done.wait(), " ".join(said.read_text().split())
    assert code == expect, text
    return text


# Many commands in one process, which starts only once.
SERVANT = """
import io, json, sys
import jax
from byzpg import cli
from byzpg.cli.console import console, errors
answers = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["byzpg", *arguments]
    console.file = errors.file = said = io.StringIO()
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code
    answers.append((code, " ".join(said.getvalue().split())))
    jax.config.update = lambda *_: None  # its first call has done it
sys.stdout.write(json.dumps(answers))
"""


def in_turn(commands: list[tuple[str, ...]], folder: Path) -> list[tuple[int, str]]:
    """Exit codes and texts of commands, one after the other."""
    said, complaints = folder / "answers.json", folder / "complaints"
    with said.open("w") as answers, complaints.open("w") as errors:
        line = json.dumps(commands)
        done = Forked(line, program=SERVANT, stdout=answers, stderr=errors, folder=folder, COLUMNS="200")
    assert done.wait() == 0, complaints.read_text()
    return json.loads(said.read_text())


def test_from_keys_to_a_manifest_and_what_can_be_wrong(tmp_path: Path) -> None:
    first, second = free_ports(2)
    assert "alice.key" in byzpg("keygen", "--name", "alice", "--address", f"127.0.0.1:{first}", folder=tmp_path)
    assert (tmp_path / "alice.key").stat().st_mode & 0o777 == 0o600
    cards = ("alice.card", "bob.card")
    right = [
        ("keygen", "--name", "bob", "--address", f"127.0.0.1:{second}"),
        ("federation", "new", *cards, "--trajectories", "50"),
        ("watch", "federation.toml", "--name", "alice", "--once"),
    ]
    elsewhere = ("federation", "new", *cards, "--manifest", "x.toml")
    wrong = {
        ("keygen", "--name", "alice", "--address", "127.0.0.1:1"): "never overwritten",
        ("keygen", "--name", "Alice!", "--address", "127.0.0.1:1"): "a-z",
        ("federation", "new", cards[0]): "at least 2 members",
        ("federation", "new", *cards): "choose another --manifest",
        (*elsewhere, "--num-byzantine", "1"): "num_byzantine ≤ 0",
        (*elsewhere, "--num-seeds", "2"): "--num-seeds cannot be set here: it follows from the members.",
        (*elsewhere, "--num-attackers", "1"): "--num-attackers cannot be set here",
        (*elsewhere, "--algorithm", "ByzPG"): "without a server",
        ("peer", "federation.toml", "--name", "mallory"): "not a member of this federation",
        ("peer", "federation.toml", "--name", "alice", "--key", "bob.key"): "not the key of alice",
        ("peer", "nowhere.toml", "--name", "alice"): "cannot be read",
        ("peer", "federation.toml", "--name", "alice", "--listen", "here"): "host:port",
        ("watch", "federation.toml", "--name", "alice", "--key", "none.key"): "cannot be read",
        ("evidence", "verify", "federation.toml", "alice.card"): "alice.card",
        ("federation", "demo", "--attacker", "AvgZero"): "needs to know the messages of all members",
        ("federation", "demo", "--attacker", "nonsense"): "there is no attack",
        ("federation", "demo", "--members", "1"): "2 to 13",
        ("federation", "demo", "--directory", "."): "exists already: choose another --directory.",
    }
    done = in_turn([*right, *wrong], tmp_path)
    assert [code for code, _ in done] == [0] * len(right) + [2] * len(wrong), done
    manifest = Manifest.load(tmp_path / "federation.toml")
    assert manifest.digest.hex()[:16] in done[1][1]
    assert (manifest.num_byzantine, manifest.rehearsal) == (0, False)
    assert manifest.settings().trajectories == 50
    assert "no answer" in done[2][1]
    for (command, words), (_, said) in zip(wrong.items(), done[len(right) :], strict=True):
        assert words in said, (command, said)
    assert not (tmp_path / "x.toml").exists()
    assert not list(tmp_path.glob("federation-demo*"))


@pytest.mark.slow
def test_a_demo_with_an_own_task_and_an_attacker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "short_cartpole.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    options = ["--env", "short_cartpole:make", "--large-batch", "3", "--trajectories", "9", "--rounds", "1"]
    options += ["--grace", "10"]  # with six rounds in all, an attacker that is late on a busy machine would miss them
    (tmp_path / "federation-demo-1").mkdir()
    said = byzpg("federation", "demo", "--attacker", "equivocate", *options, folder=tmp_path)
    assert "erin attacks with equivocate" in said
    made = tmp_path / "federation-demo-2"
    assert (made / "curves.png").stat().st_size > 10_000
    runs = {name: load(made / name / "run") for name in NAMES[:4]}
    assert all(run.complete and run.returns.shape == (1, 3) for run in runs.values())
    assert all((run.returns <= 25).all() for run in runs.values())
    by_member = {name: list((made / name / "evidence").glob("*.json")) for name in NAMES[:4]}
    steps = {json.loads(path.read_text())["step"] for paths in by_member.values() for path in paths}
    rounds, holders = len(steps), sum(map(bool, by_member.values()))
    caught = re.search(r"Caught: erin equivocated in at least (\d+) rounds?; (\d) honest members? can prove it", said)
    assert caught is not None, said
    assert tuple(map(int, caught.groups())) == (rounds, holders)
    assert rounds > 0
    command = "evidence verify federation-demo-2/federation.toml federation-demo-2/*/evidence/*.json"
    assert f"Verify it: byzpg {command}" in said
    forged = tmp_path / "forged.json"
    # Who can prove it depends on who hears what first: any of the honest members, not always alice.
    values = json.loads(next(path for paths in by_member.values() for path in paths).read_text())
    values["messages"][0]["head"] = values["messages"][0]["head"][:-2] + "00"
    forged.write_text(json.dumps(values))
    *verify, pattern = command.split()
    files = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.glob(pattern))]
    (code, proven), (code_if_forged, said) = in_turn([(*verify, *files), (*verify, str(forged))], tmp_path)
    assert code == 0
    assert proven.count("proven. erin signed two different messages") == len(files)
    assert code_if_forged == 2
    assert "forged" in said
    events = [json.loads(line) for line in (made / "erin" / "log.jsonl").read_text().splitlines()]
    assert any(event["event"] == "rehearsal" for event in events)


@pytest.mark.slow
def test_a_demo_names_the_member_that_failed_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = TASK + '\nimport sys\nif "bob" in sys.argv: raise ValueError("the joystick is not connected")\n'
    (tmp_path / "joystick.py").write_text(failing)
    monkeypatch.syspath_prepend(tmp_path)
    options = ("--env", "joystick:make", "--members", "2", "--large-batch", "3", "--trajectories", "9")
    said = byzpg("federation", "demo", *options, folder=tmp_path, expect=2)
    output = "federation-demo-1/bob.out"
    assert re.search(rf"bob failed \(exit code 2\). Its last line in {output}: .*the joystick is not connected", said)
    assert "the joystick is not connected" in (tmp_path / output).read_text()
    assert "alice failed" not in said


def running_in(folder: Path) -> list[int]:
    """The processes with this current directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is another user's
            if os.readlink(process / "cwd") == str(folder):
                found.append(int(process.name))
    return found


def test_a_demo_that_is_terminated_leaves_no_member_behind(tmp_path: Path) -> None:
    with (tmp_path / "said.txt").open("w") as output:
        demo = Forked("federation", "demo", "--members", "2", stdout=output, folder=tmp_path)
    until(lambda: demo.poll() is not None or len(running_in(tmp_path)) > 1, "a member has been started")
    demo.send_signal(signal.SIGTERM)
    assert demo.wait() == 130, (tmp_path / "said.txt").read_text()
    left = running_in(tmp_path)
    for number in left:
        os.kill(number, signal.SIGKILL)
    assert not left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_a_member_is_started(number: signal.Signals) -> None:
    before, started = signal.getsignal(number), list[str]()

    def start() -> None:
        with _signals_wait():
            os.kill(os.getpid(), number)
            started.append("alice")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert started
    assert signal.getsignal(number) is before


def test_without_its_packages_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "cryptography.py").write_text("raise ModuleNotFoundError(name='cryptography')")
    line = [sys.executable, "-m", "byzpg", "keygen", "--name", "alice", "--address", "127.0.0.1:7700"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 2
    assert install("live") in done.stderr
