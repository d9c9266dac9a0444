"""The tutorial on your own parts: its commands run as a reader runs them, and print what the page says."""

import re
import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from forking import Forked
from live_federation import until

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "tutorials" / "five-minutes.md").read_text()
SLOW_FROM = "## Measure the rule"  # from here on, the commands take long


@pytest.mark.slow
def test_a_module_is_trained_stopped_resumed_and_played_by_name(tmp_path: Path) -> None:
    follow(PAGE.partition(SLOW_FROM)[0], tmp_path)
    assert (tmp_path / "runs" / "docking" / "curves.png").exists()
    check_learning(tmp_path / "runs" / "docking")


@pytest.mark.slow
def test_the_same_names_work_in_all_commands_and_live(tmp_path: Path) -> None:
    assert SLOW_FROM in PAGE
    follow(PAGE, tmp_path)
    check_learning(tmp_path / "runs" / "docking")
    for picture in ("byzpg-certificates.png", "docking.png", "sweeps/docking/sweep.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    for member in ("alice", "bob", "carol", "dave"):
        assert returns(tmp_path / "federation-demo-1" / member / "run")[-5:].mean() > -5


def returns(directory: Path) -> np.ndarray:
    """The mean over seeds [iteration], read from the file: this process need not import the module."""
    with np.load(directory / "metrics.npz") as metrics:
        return metrics["return_mean"].mean(axis=0)


def check_learning(directory: Path) -> None:
    """The rule learns in spite of the attack, and the mean unlearns what it knew before."""
    robust, plain = returns(directory), returns(directory / "plain-averaging")
    assert robust[0] < -15
    assert robust[-10:].mean() > -5
    assert plain[-10:].mean() < plain.max() - 20


def follow(page: str, folder: Path) -> None:
    """Do what a page says in an empty folder: write its files, type its commands, compare what they print."""
    shutil.copy(ROOT / "examples" / "my_parts.py", folder)
    done, command = 0, ""
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        if language == "toml":
            (folder / "docking.toml").write_text(block)
        elif language == "bash":
            command = block
        elif language == "text":
            printed = typed(command, folder, stop="^C" in block)
            print(f"$ {command}{printed}")  # for the author of the page
            compare(block.replace("^C", "…"), printed)
            done += 1
    assert done == page.count("```bash") == page.count("\nbyzpg ")


def typed(command: str, folder: Path, *, stop: bool) -> str:
    """What a command prints; `stop` presses Ctrl-C as soon as it has begun to train."""
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    assert program == "byzpg"
    with (folder / "printed").open("w") as printed:
        process = Forked(*arguments, stdout=printed, folder=folder, COLUMNS="120")
    if stop:
        # Not before the last line that the page shows, or the answer to Ctrl-C could come first.
        until(lambda: "→ runs/docking/plain-averaging" in (folder / "printed").read_text(), "it has begun")
        process.send_signal(signal.SIGINT)
    code, text = process.wait(600), (folder / "printed").read_text()
    assert code == (130 if stop else 0), text
    return text


def compare(expected: str, printed: str) -> None:
    """All that the page shows is printed, in this order; numbers may differ, and … stands for anything."""
    rest = plain(printed)
    for piece in re.split(r"\s*…\s*|\n", expected):
        assert plain(piece) in rest, f"{piece!r} is not, or not in this order, in\n{printed}"
        rest = rest.partition(plain(piece))[2] if piece.strip() else rest


def plain(text: str) -> str:
    """Without numbers and breaks between words."""
    return " ".join(re.sub(r"-?\d[\d,]*(\.\d+)?", "#", text).split())
