"""Files are written whole or not at all."""

import os
import tempfile
from collections.abc import Callable
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
