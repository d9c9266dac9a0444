"""The files of a member: damaged, lost, cut off and copied ones, and what follows for what it may sign."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from byzpg.live import store
from byzpg.live.links import Mailbox
from byzpg.live.protocol import Message
from byzpg.live.records import HEAD, Records
from byzpg.live.store import Mark, forgotten_through


def quiet(path: Path, over: bool) -> None: ...


def records(path: Path, num_slots: int = 4) -> Records:
    return Records(path, num_slots, 100, quiet)


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_is_damage_and_a_record_that_was_cut_off_is_not(tmp_path: Path) -> None:
    path = tmp_path / "records.bin"
    file = records(path)
    for number in range(3):
        file.put(number, b"content %d" % number)
    slot_bytes = len(path.read_bytes()) // 4
    flip(path, slot_bytes + HEAD.size + 3)  # in the content of number 1
    file._write(2, bytes(HEAD.size), (b"half",))  # killed before the head was written
    assert file.read() == {0: b"content 0"}
    assert file.damaged == {1}
    file.close()


@pytest.mark.parametrize("where", [0, 8, 16])
def test_a_flipped_bit_in_a_head_is_damage(tmp_path: Path, where: int) -> None:
    file = records(tmp_path / "records.bin")
    file.put(2, b"content")
    slot_bytes = (tmp_path / "records.bin").stat().st_size // 4
    flip(tmp_path / "records.bin", 2 * slot_bytes + where)
    assert file.read() == {}
    assert file.damaged == {2}
    file.close()


def test_a_file_of_another_size_is_new(tmp_path: Path) -> None:
    path = tmp_path / "records.bin"
    file = records(path)
    assert file.is_new
    file.put(0, b"content")
    file.close()
    file = records(path)
    assert not file.is_new
    file.close()
    path.write_bytes(path.read_bytes()[:-1])
    file = records(path)
    assert file.is_new
    file.close()


def mark(path: Path, *, expected: bool = True) -> Mark:
    return Mark(records(path, 2), expected=expected)


def test_a_mark_survives_and_says_when_it_cannot_be_relied_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mark.bin"
    assert (mark(path, expected=False).step, mark(path, expected=False).lost) == (-1, False)
    assert mark(path).lost, "there should be one"
    made = mark(path, expected=False)
    made.move(10)
    made.move(20)
    again = mark(path)
    assert (again.step, again.same_boot, again.lost) == (20, True, False)

    again.distrust()
    distrusted = mark(path)
    assert (distrusted.step, distrusted.same_boot, distrusted.lost) == (20, False, False)
    distrusted.move(30)
    assert mark(path).same_boot

    settled = mark(path)
    settled.settle(25)
    with monkeypatch.context() as rebooted:
        rebooted.setattr(store, "_boot", lambda: bytes(range(16)))
        again = mark(path)
        assert (again.step, again.same_boot, again.settled) == (25, True, True), "an orderly end loses nothing"
        again.move(30)
    assert (mark(path).step, mark(path).same_boot, mark(path).settled) == (30, False, False)
    mark(path).move(30)

    copy = tmp_path / "copy.bin"
    shutil.copy(path, copy)
    assert mark(copy).lost, "a copy knows nothing of what was signed since"

    slot_bytes = path.stat().st_size // 2
    newest = 1 if (mark(path)._number % 2) else 0
    flip(path, newest * slot_bytes + HEAD.size)
    assert mark(path).lost, "the older one of the two says too little"

    flip(path, (1 - newest) * slot_bytes + HEAD.size)
    again = mark(path)
    assert (again.step, again.lost) == (-1, True)
    again.move(40)
    assert (mark(path).step, mark(path).lost) == (40, False), "nothing of the damage is left"


def test_what_may_be_forgotten() -> None:
    def through(mark: int, damaged: set[int] = frozenset(), **options: bool) -> int:  # pyright: ignore
        known = {"same_boot": True, "damaged_checkpoint": False} | options
        return forgotten_through(mark, damaged_slots=damaged, num_slots=10, **known)

    assert through(-1) == through(25) == -1
    assert through(25, same_boot=False) == 25
    assert through(25, damaged_checkpoint=True) == 25
    assert through(25, {3}) == 23, "the last step that this slot can have held"
    assert through(25, {3, 8}) == 23
    assert through(25, {6}) == 16
    assert through(5, {8}) == -1, "no step so far was in this slot"


def state(step: int) -> Message:
    return Message("state", 0, step, np.zeros(1), (), b"", b"", frame=b"%d" % step)


@pytest.mark.parametrize("per_iteration", [2, 3, 4])
def test_states_of_two_iterations_wait_to_be_sent(per_iteration: int) -> None:
    mailbox = Mailbox()
    steps = [1 + iteration * per_iteration for iteration in (5, 4, 6)]
    mailbox.put(state(steps[0]), b"5")
    mailbox.put(state(steps[1]), b"4")
    assert set(mailbox.waiting.values()) == {b"4", b"5"}
    mailbox.put(state(steps[2]), b"6")
    assert set(mailbox.waiting.values()) == {b"5", b"6"}
