"""A file with a fixed number of records that are overwritten in turn.

The file never moves or changes its size, so one write and one flush make a record durable; a new file would need
several flushes of its directory. A record that a crash cut off fails its checksum and is ignored, and the one that it
was to replace is no longer needed.
"""

import os
import struct
import zlib
from functools import reduce
from pathlib import Path

from byzpg._files import flush_directory

_flush = getattr(os, "fdatasync", os.fsync)  # macOS has only the latter
HEAD = struct.Struct("<QQI")  # number, length, checksum of the number and the content


class Records:
    """Contents by number, of which the last `num_slots` are kept."""

    def __init__(self, path: Path, num_slots: int, largest: int) -> None:
        self._num_slots, self._slot_bytes = num_slots, HEAD.size + largest
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        size = num_slots * self._slot_bytes
        if os.fstat(self._handle).st_size != size:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._handle, 0, size)
            os.truncate(self._handle, size)
            os.fsync(self._handle)
            flush_directory(path.parent)

    def close(self) -> None:
        os.close(self._handle)

    def put(self, number: int, *parts: bytes | memoryview) -> None:
        """Store a record, the concatenation of its parts; on return it is safe on the disk."""
        length = sum(map(len, parts))
        if length > self._slot_bytes - HEAD.size:
            raise ValueError(f"a record must have at most {self._slot_bytes - HEAD.size} bytes, got {length}.")
        head = HEAD.pack(number, length, _checksum(number, *parts))
        os.pwritev(self._handle, [head, *parts], (number % self._num_slots) * self._slot_bytes)
        _flush(self._handle)

    def read(self) -> dict[int, bytes]:
        """Read all complete records, by number."""
        found = {}
        for slot in range(self._num_slots):
            number, length, checksum = HEAD.unpack(os.pread(self._handle, HEAD.size, slot * self._slot_bytes))
            if 0 < length <= self._slot_bytes - HEAD.size:
                content = os.pread(self._handle, length, slot * self._slot_bytes + HEAD.size)
                if checksum == _checksum(number, content):
                    found[number] = content
        return found


def _checksum(number: int, *parts: bytes | memoryview) -> int:
    return reduce(lambda so_far, part: zlib.crc32(part, so_far), parts, zlib.crc32(number.to_bytes(8, "little")))
