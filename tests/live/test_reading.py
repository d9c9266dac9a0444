"""Reading what others wrote: commands import and build nothing that a manifest names, unless they train it."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from forking import Forked
from live_federation import NAMES, free_ports, until

from byzpg import _parts, envs
from byzpg.live import identity
from byzpg.live.identity import generate, write_identity
from byzpg.live.manifest import Manifest, Times, new_manifest

# Leaves a mark when it is imported, and says so.
EVIL = """
import sys
from pathlib import Path

Path("mark").touch()
print("evil runs", file=sys.stderr, flush=True)

def go():
    raise RuntimeError("evil was called")
"""
TRAINING: dict[str, Any] = {"env": "CartPole-v1", "horizon": 50, "aggregator": "RFA", "trajectories": 100}
OWN_TASKS = ("evil:go", "gymnasium:evil:Go-v0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with evil.py, and the keys and the manifest of a federation."""
    (tmp_path / "evil.py").write_text(EVIL)
    return with_federation(tmp_path)


def with_federation(folder: Path) -> Path:
    made = [generate(name, f"127.0.0.1:{port}") for name, port in zip(NAMES, free_ports(len(NAMES)), strict=True)]
    for member, private in made:
        write_identity(folder, member, private)
    new_manifest([member for member, _ in made], 1, TRAINING, Times(), rehearsal=True).write(folder / "federation.toml")
    return folder


def rename_task(folder: Path, env: str) -> Path:
    """Name another task in the manifest, as an editor would do it."""
    path = folder / "federation.toml"
    text = path.read_text()
    assert '"CartPole-v1"' in text
    path.write_text(text.replace('"CartPole-v1"', json.dumps(env)))
    return path


def start(folder: Path, *arguments: str) -> Forked:
    with (folder / "said.txt").open("w") as said:
        return Forked(*arguments, stdout=said, folder=folder, COLUMNS="200", PYTHONPATH=str(folder))


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit code of a command in this folder, and what it printed."""
    code = start(folder, *arguments).wait()
    return code, (folder / "said.txt").read_text()


@pytest.mark.parametrize("env", OWN_TASKS)
def test_commands_that_read_a_manifest_import_nothing(folder: Path, env: str) -> None:
    rename_task(folder, env)
    (folder / "evidence.json").write_text("{}")
    code, said = run(folder, "evidence", "verify", "federation.toml", "evidence.json")
    assert (code, "evidence.json" in said) == (2, True), said  # the manifest is right, the evidence is not
    code, said = run(folder, "watch", "federation.toml", "--name", "alice", "--once")
    assert (code, said.count("no answer")) == (0, len(NAMES)), said
    (port,) = free_ports(1)
    monitor = start(folder, "monitor", "federation.toml", "--name", "alice", "--port", str(port))
    try:
        until(lambda: "Status page" in (folder / "said.txt").read_text(), "the page is served")
        with urlopen(f"http://127.0.0.1:{port}/status.json") as answer:
            data = json.load(answer)
    finally:
        monitor.kill()
        monitor.wait()
    assert (data["task"], data["algorithm"], data["aggregator"], data["length"]) == (
        env,
        "DecByzPG",
        "RFA()",
        100,
    )
    assert data["reward_threshold"] is None
    assert not (folder / "mark").exists()


@pytest.mark.parametrize("env", OWN_TASKS)
@pytest.mark.parametrize("command", ["peer", "train"])
def test_commands_that_train_say_first_what_they_import(folder: Path, command: str, env: str) -> None:
    rename_task(folder, env)
    chosen = {"peer": ("federation.toml", "--name", "alice", "--parts", "evil"), "train": ("--env", env)}[command]
    code, said = run(folder, command, *chosen)
    assert code == 2
    first, second, *_ = said.splitlines()
    assert (first, second) == (f"Importing the module 'evil' for the task {env!r}.", "evil runs")
    assert (folder / "mark").exists()


@pytest.mark.parametrize(
    ("option", "name"), [("env", OWN_TASKS[0]), ("env", OWN_TASKS[1]), ("aggregator", "NNM(evil:Rule(size=2))")]
)
def test_a_member_imports_only_what_its_own_command_names(folder: Path, option: str, name: str) -> None:
    path = rename_task(folder, name) if option == "env" else folder / "federation.toml"
    path.write_text(path.read_text().replace('aggregator = "RFA"', f'aggregator = "{name}"' if option != "env" else ""))
    assert Manifest.load(path).options()[option] == name
    code, said = run(folder, "peer", "federation.toml", "--name", "alice", "--parts", "another")
    assert (code, (folder / "mark").exists()) == (2, False)
    assert "the manifest names the module 'evil'." in said
    assert said.strip().endswith("if you trust that code, add --parts evil"), said


@pytest.mark.parametrize("env", [*OWN_TASKS, "gymnasium:CartPole-v1", "envpool:CartPole-v1", "nowhere.at.all:make"])
@pytest.mark.parametrize("horizon", [True, False], ids=["horizon", "no horizon"])
def test_a_manifest_is_read_whole_without_its_task(
    folder: Path, monkeypatch: pytest.MonkeyPatch, env: str, horizon: bool
) -> None:
    def build(name: str) -> None:
        raise AssertionError(f"{name} was built")

    monkeypatch.setattr(envs, "_own_or_on_host", build)
    monkeypatch.setattr(_parts, "_named", {"evil", "nowhere.at.all"})
    path = rename_task(folder, env)
    if not horizon:
        path.write_text(path.read_text().replace("horizon = 50\n", ""))
    manifest = Manifest.load(path)
    options = manifest.options()
    assert (options["env"], options.get("horizon")) == (env, 50 if horizon else None)
    assert (options["num_agents"], options["num_byzantine"]) == (5, 1)
    with pytest.raises(AssertionError, match="was built"):
        manifest.settings()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("horizon = 0", "horizon must be at least 1"),
        ("horizon = 1.5", "horizon must be int"),
        ("hidden = [8, 0]", "hidden"),
        ('aggregator = "Krumm"', "Krumm"),
        ("rounds = -1", "rounds must not be negative"),
        ('algorithm = "ByzPG"', "does not run among members without a server"),
        ('policy = "best"', "policy must be"),
        ("discount = 2", "discount must lie in"),
    ],
)
def test_all_other_options_are_still_checked(folder: Path, line: str, words: str) -> None:
    path = rename_task(folder, "evil:go")
    option = line.partition(" ")[0]
    kept = [each for each in path.read_text().splitlines() if not each.startswith(f"{option} = ")]
    kept.insert(kept.index("[training] # options of `byzpg train`") + 1, line)
    path.write_text("\n".join(kept))
    with pytest.raises(ValueError, match=words):
        Manifest.load(path)


@pytest.mark.parametrize("command", ["peer", "watch", "monitor"])
def test_a_wrong_clock_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """TLS would only say that the connection was closed."""
    monkeypatch.setattr(identity, "VALID_FROM", datetime.now(UTC) + timedelta(days=3))
    code, said = run(with_federation(tmp_path), command, "federation.toml", "--name", "alice")
    assert (code, said.count("\n")) == (2, 1), said
    assert said.startswith("error: this machine's clock says ")
    assert "the certificate of alice is valid from " in said
    assert said.endswith("set the clock, or rotate the key.\n")
