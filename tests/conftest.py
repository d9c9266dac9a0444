"""What holds for all tests. All of it must be set before JAX is imported, and before workers are started."""

import os
import shutil
import tempfile
from importlib.metadata import version

import pytest

# Most of the suite's time is compilation; at level 1 it takes half as long.
FLAGS = ["--xla_backend_optimization_level=1"]
# Without the newer emitters, half of that. Only where it was measured: JAX aborts at a flag that it does not know.
if version("jaxlib").startswith("0.10."):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()

# And many programs that tests start compile the same: the second one finds it here.
CACHE = "JAX_COMPILATION_CACHE_DIR"
MINE = CACHE not in os.environ
if MINE:
    os.environ[CACHE] = tempfile.mkdtemp(prefix="byzpg-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"


# Files are dealt out whole: the longest first, so that no core waits for the other at the end.
FIRST = ("simulate", "cli", "flower", "sweeps", "lunar_lander", "agreement", "contracts", "exchange")
LONGEST = [f"test_{name}.py" for name in FIRST]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_unconfigure(config: pytest.Config) -> None:
    if MINE:
        shutil.rmtree(os.environ[CACHE], ignore_errors=True)
