"""Files are written whole or not at all."""

import errno
import os
import tempfile
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import IO


def flush_directory(path: Path) -> None:
    """Make sure that what was created or renamed there outlives a power cut, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def append_whole(file: FileIO, line: bytes) -> None:
    """Append a line whole or not at all, even if the disk is full."""
    start = file.seek(0, os.SEEK_END)
    if os.write(file.fileno(), line) < len(line):
        os.ftruncate(file.fileno(), start)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let `write` fill a new file, and put it in the place of `path` once it is safe on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
        flush_directory(path.parent)
    finally:
        Path(temporary).unlink(missing_ok=True)
