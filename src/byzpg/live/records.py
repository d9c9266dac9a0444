"""A file with a fixed number of records that are overwritten in turn.

The file never moves or changes its size, so writing a record needs no space, and a single flush makes all of them
durable. A record that a crash cut off is empty. One that fails its checksum is damaged: something else has changed it.
"""

import errno
import os
import struct
import time
import zlib
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import TypeVar

from byzpg._files import flush_directory

_flush = getattr(os, "fdatasync", os.fsync)  # macOS has only the latter
HEAD = struct.Struct("<QQI")  # number, length, checksum of the number and the content
EMPTY = bytes(HEAD.size)
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
FULL_DISK_SECONDS = 0.5

Result = TypeVar("Result")
# Called with a path while its disk is full, and with whether there is space again.
OnFullDisk = Callable[[Path, bool], None]


def patiently(path: Path, write: Callable[[], Result], on_full_disk: OnFullDisk) -> Result:
    """Write a file, and while the disk is full, wait for space."""
    waited = False
    while True:
        try:
            result = write()
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise OSError(error.errno, f"{path} cannot be written: {error.strerror}") from None
            if not waited:
                on_full_disk(path, False)
            waited = True
            time.sleep(FULL_DISK_SECONDS)
        else:
            if waited:
                on_full_disk(path, True)
            return result


class Records:
    """Contents by number, of which the last `num_slots` are kept.

    Args:
        path: The file.
        num_slots: The number of records.
        largest: The size in bytes of the largest content.
        on_full_disk: Called while a write waits for space on the disk.
    """

    def __init__(self, path: Path, num_slots: int, largest: int, on_full_disk: OnFullDisk) -> None:
        self.path, self.num_slots, self._slot_bytes = path, num_slots, HEAD.size + largest
        self._patiently = partial(patiently, path, on_full_disk=on_full_disk)
        self.damaged: frozenset[int] = frozenset()  # the slots that failed their checksums when they were last read
        self._handle = self._patiently(lambda: os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        size = num_slots * self._slot_bytes
        self.is_new = os.fstat(self._handle).st_size != size  # or of another size, and so of no use
        if os.fstat(self._handle).st_size != size:
            self._patiently(lambda: self._allocate(size))

    def _allocate(self, size: int) -> None:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._handle, 0, size)
        os.truncate(self._handle, size)
        os.fsync(self._handle)
        flush_directory(self.path.parent)

    def close(self) -> None:
        os.close(self._handle)

    def identity(self) -> tuple[int, int]:
        """The numbers of the file's device and of the file on it, which a copy does not share."""
        found = os.fstat(self._handle)
        return found.st_dev, found.st_ino

    def put(self, number: int, *parts: bytes | memoryview) -> None:
        """Store a record, the concatenation of its parts. It survives a crash of the process; see `flush`."""
        length = sum(map(len, parts))
        if length > self._slot_bytes - HEAD.size:
            raise ValueError(f"a record must have at most {self._slot_bytes - HEAD.size} bytes, got {length}.")
        head = HEAD.pack(number, length, _checksum(number, *parts))
        self._patiently(lambda: self._write(number % self.num_slots, head, parts))

    def _write(self, slot: int, head: bytes, parts: tuple[bytes | memoryview, ...]) -> None:
        start = slot * self._slot_bytes
        os.pwrite(self._handle, EMPTY, start)  # until the head is there again, the record is empty, not damaged
        os.pwritev(self._handle, parts, start + HEAD.size)
        os.pwrite(self._handle, head, start)

    def flush(self) -> None:
        """Make all records survive a power cut."""
        self._patiently(lambda: _flush(self._handle))

    def read(self) -> dict[int, bytes]:
        """Read all complete records, by number."""
        found, damaged = {}, set()
        for slot in range(self.num_slots):
            head = os.pread(self._handle, HEAD.size, slot * self._slot_bytes)
            number, length, checksum = HEAD.unpack(head)
            content = b""
            if length <= self._slot_bytes - HEAD.size:
                content = os.pread(self._handle, length, slot * self._slot_bytes + HEAD.size)
            if head == EMPTY:
                continue
            if checksum == _checksum(number, content) and number % self.num_slots == slot:
                found[number] = content
            else:
                damaged.add(slot)
        self.damaged = frozenset(damaged)
        return found


def _checksum(number: int, *parts: bytes | memoryview) -> int:
    return reduce(lambda so_far, part: zlib.crc32(part, so_far), parts, zlib.crc32(number.to_bytes(8, "little")))
