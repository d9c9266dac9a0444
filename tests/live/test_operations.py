"""What operators rely on: log rotation, the systemd unit, and the containers' start-up as plain processes."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from byzpg.live import status
from byzpg.live.status import Log

# Log rotation


@pytest.fixture
def small_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Log, "LARGEST", 2_000)


def written(folder: Path) -> list[int]:
    """The numbers in the log's lines, oldest first. Every line must be whole."""
    files = [folder / f"log.jsonl{suffix}" for suffix in (".3", ".2", ".1", "")]
    lines = [line for path in files if path.exists() for line in path.read_text().splitlines()]
    return [json.loads(line)["number"] for line in lines]


def write(log: Log, *numbers: int) -> None:
    for number in numbers:
        log("event", number=number)


@pytest.mark.usefixtures("small_logs")
def test_a_log_is_rotated_and_keeps_the_newest_lines(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl", "alice", None)
    write(log, *range(50))
    assert written(tmp_path) == list(range(50))
    write(log, *range(50, 500))
    log.close()
    kept = written(tmp_path)
    assert kept == list(range(500 - len(kept), 500))
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sorted(sizes) == ["log.jsonl", "log.jsonl.1", "log.jsonl.2", "log.jsonl.3"]
    assert max(sizes.values()) <= 2_000
    assert min(sizes[f"log.jsonl.{number}"] for number in (1, 2, 3)) > 1_800


@pytest.mark.usefixtures("small_logs")
def test_a_restarted_member_continues_its_log_and_drops_the_line_that_a_crash_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = Log(path, "alice", None)
    write(log, 0, 1)
    log.close()
    with path.open("a") as file:
        file.write('{"time": 17')
    log = Log(path, "alice", None)
    write(log, *range(2, 50))
    log.close()
    assert written(tmp_path) == list(range(50))


@pytest.mark.usefixtures("small_logs")
@pytest.mark.parametrize("fails", ["replace", "open"])
def test_a_log_that_cannot_be_rotated_is_continued(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path / "log.jsonl", "alice", None)
    write(log, *range(45))
    assert (tmp_path / "log.jsonl.2").exists()

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(Path, fails, refuse)
        write(log, *range(45, 100))
    assert written(tmp_path) == list(range(100))
    write(log, *range(100, 120))
    log.close()
    assert written(tmp_path)[-20:] == list(range(100, 120))
    assert (tmp_path / "log.jsonl").stat().st_size <= 2_000


def test_a_line_that_does_not_fit_on_the_disk_is_left_out_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that fills up in the middle of a line: the system writes a part of it, and then nothing."""
    heard: list[dict[str, Any]] = []
    log = Log(tmp_path / "log.jsonl", "alice", heard.append)
    write(log, 0)
    room = [10]

    def short_write(handle: int, content: bytes) -> int:
        if not (taken := min(room[0], len(content))):
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= taken
        return os_write(handle, content[:taken])

    os_write = os.write
    with monkeypatch.context() as full:
        full.setattr(status.os, "write", short_write)
        write(log, 1, 2)
    write(log, 3)
    log.close()
    assert written(tmp_path) == [0, 3]
    assert [event["number"] for event in heard] == [0, 1, 2, 3]


def test_a_log_takes_any_text(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl", "alice", None)
    name = os.fsdecode(b"/home/ren\xe9")  # a path in another encoding
    log("event", number=0, path=name)
    log.close()
    assert json.loads((tmp_path / "log.jsonl").read_text())["path"] == name
