"""The command line, started as a user starts it."""

import subprocess
import sys
from pathlib import Path

import pytest

from byzpg import figures


def byzpg(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from byzpg.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


def test_certify_prints_every_rule_and_draws_a_picture(tmp_path: Path) -> None:
    done = byzpg("certify", "--num-agents", "7", "--num-byzantine", "1", "--trials", "4", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("Mean()", "RFA()", "NNM(TrimmedMean())", "Bulyan()"):
        assert name in done.stdout
    assert (tmp_path / "byzpg-certificates.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["byzpg-certificates.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["certify", "--num-byzantine", "0"], "at least one Byzantine agent"),
        (["certify", "--num-byzantine", "13"], "Mean() needs f < K"),
        (["certify", "--trials", "0"], "trials and dimension must be positive"),
        (["certify", "--output", "picture.bmp"], "must end in .png, .svg or .pdf"),
        (["certify", "--agents", "5"], "--agents"),
        (["certfy"], "certify"),
    ],
)
def test_bad_input_is_one_error_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = byzpg(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert message in " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_failed_picture_leaves_nothing_behind(tmp_path: Path) -> None:
    figure = figures.constants_heatmap({"Mean": {"AvgZero": 1.0}}, "title")
    with pytest.raises(ValueError, match="not supported"):
        figures.save(figure, tmp_path / "picture.nonsense")
    assert not list(tmp_path.iterdir())


def test_short_numbers() -> None:
    assert [figures.short_number(x) for x in (0, 0.004, 0.05, 1.26, 99.4, 256.1, 44580.0)] == [
        "0",
        "0",
        "0.05",
        "1.3",
        "99",
        "256",
        "4e4",
    ]
