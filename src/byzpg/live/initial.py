"""Trained parameters from which a federation starts: a file beside the manifest, which has their hash."""

from hashlib import sha256
from pathlib import Path

import numpy as np

from byzpg._files import write_atomically
from byzpg.live.manifest import Manifest
from byzpg.robust.geometry import is_sound_on_host


def write_initial(folder: Path, parameters: np.ndarray) -> tuple[str, Path]:
    """Write θ_0 [d].

    Returns:
        Its hash for the manifest, and the file, whose name follows from the hash.
    """
    values = np.asarray(parameters, "<f4")
    if values.ndim != 1 or not is_sound_on_host(values):
        raise ValueError("the parameters to start from must be finite numbers [d]: choose another run.")
    digest = sha256(values.tobytes()).hexdigest()
    path = _path(folder, digest)
    write_atomically(path, lambda file: np.save(file, values, allow_pickle=False))
    return digest, path


def read_initial(manifest: Manifest, folder: Path) -> np.ndarray | None:
    """Read θ_0 [d] from its file in the folder of the manifest; None if it follows from the seed."""
    if manifest.initial is None:
        return None
    path = _path(folder, manifest.initial)
    advice = "copy it from the person who created the federation."
    try:
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path}, the parameters to start from, cannot be read: {error}; {advice}") from None
    if not isinstance(values, np.ndarray) or values.dtype != np.float32 or values.ndim != 1:
        raise ValueError(f"{path} must hold one array [d] of float32: {advice}")
    if sha256(values.astype("<f4").tobytes()).hexdigest() != manifest.initial:
        raise ValueError(f"{path} does not have the hash that the manifest names: {advice}")
    return values


def _path(folder: Path, digest: str) -> Path:
    return folder / f"initial-{digest[:16]}.npy"
