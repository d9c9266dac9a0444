"""What holds for all tests: how programs are compiled, how long a test may take, and in which order files run."""

import faulthandler
import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import guardian
import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

# Must be set before JAX is imported, and before workers are started. Most of the suite's time was compilation. Programs
# here are small, so without optimizations they take half as long in all.
FLAGS = ["--xla_backend_optimization_level=0"]
# Half of that without the newer emitters, and with one module per program. Only where it was measured: JAX aborts at a
# flag that it does not know.
if version("jaxlib").startswith("0.10."):
    FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
GIVEN = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([GIVEN, *(flag for flag in FLAGS if flag.partition("=")[0] not in GIVEN)]).strip()
# No stack trace of each operation in programs that nobody reads.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

# Programs that several tests start compile the same, and so does the next run, in this checkout or another. With a
# limit on its size, JAX locks the cache; without, a process could read what another is just writing, and warn of it.
CACHES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHES / "byzpg-tests"))
os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(2**27)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

# Tests start dozens of programs, which would each compile our modules anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

SECONDS = 300  # that a test may take with its fixtures, unless it says otherwise: @pytest.mark.time_limit(seconds)
SECONDS_IF_SLOW = 900  # the same for tests that are marked so
SECONDS_TO_END = 120  # that the teardown of a failed test may take, and the process after its last test

TESTS = Path(__file__).parent
# Whole files go to processes, the longest first, so that no core waits for the other at the end.
LONGEST = [
    "cli/test_cli.py",
    "federation/test_ppo.py",
    "experiments/test_report.py",
    "learning/test_gradients.py",
    "live/test_live.py",
    "test_runs.py",
    "robust/test_exchange.py",
    "live/test_hardening.py",
    "federation/test_simulator.py",
    "test_contracts.py",
    "experiments/test_audit.py",
    "robust/test_aggregators.py",
    "engines/test_flower.py",
    "test_parts.py",
    "federation/test_devices.py",
    "robust/test_attacks.py",
    "robust/test_examples.py",
    "robust/test_agreement.py",
    "envs/test_host.py",
    "learning/test_advantages.py",
    "test_networks.py",
    "test_export.py",
    "learning/test_rollout_kernel.py",
    "live/test_monitor.py",
    "test_architecture.py",
    "learning/test_rollouts.py",
    "experiments/test_sweeps.py",
    # Long in the slow tier alone.
    "live/test_faults.py",
    "live/test_membership.py",
    "test_five_minutes.py",
    "robust/test_kernels.py",
    "robust/test_least_diameter.py",
]

# Their tests are about a rule each, the last part of their names in brackets, and share its programs.
BY_CASE = ("test_aggregators.py", "test_contracts.py")


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests neither see nor change which modules the user has made runs with."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle-files", type=int, metavar="SEED", help="run the files in a random order")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("shuffle_files")
    files = list(dict.fromkeys(item.path for item in items))
    if seed is None:
        places = {TESTS / name: place for place, name in enumerate(LONGEST)}
        files.sort(key=lambda path: places.get(path, len(places)))
    else:
        random.Random(seed).shuffle(files)
    order = {path: place for place, path in enumerate(files)}
    items.sort(key=lambda item: order[item.path])


def pytest_collection_finish() -> None:
    """What is loaded by now stays: the garbage collector need not look through it again and again."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


# Time limits


class Limits:
    """Ends this process, all thread stacks printed, when a test exceeds its time limit.

    The limit holds even if the main thread is stuck in C code or ignores exceptions: faulthandler's own thread needs
    no interpreter. With xdist, the test then counts as failed and a new worker runs the remaining tests.
    """

    def __init__(self, output: TextIO) -> None:
        self.output = output
        mark = f"{os.getpid()}-{time.time_ns()}"
        unmarked = {name: value for name, value in os.environ.items() if name != guardian.MARK}
        command = [sys.executable, "-I", "-S", guardian.__file__, mark]
        self.guardian = subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=output, env=unmarked, text=True, start_new_session=True
        )
        assert self.guardian.stdin is not None
        os.register_at_fork(after_in_child=self.guardian.stdin.close)  # or the guardian would wait for it too
        os.environ[guardian.MARK] = mark

    def tell_guardian(self, running: str) -> None:
        assert self.guardian.stdin is not None
        self.guardian.stdin.write(f"{running}\n")
        self.guardian.stdin.flush()

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        faulthandler.dump_traceback_later(seconds, exit=True, file=self.output)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        with self.limited(SECONDS):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        marker = item.get_closest_marker("time_limit")
        seconds = SECONDS_IF_SLOW if item.get_closest_marker("slow") else SECONDS
        self.tell_guardian(item.nodeid)
        with self.limited(marker.args[0] if marker else seconds):
            result = yield
        self.tell_guardian("")
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_exception_interact(self) -> None:
        """pytest lifts the limit of a test that fails, for debuggers; its teardown must not hang either."""
        faulthandler.dump_traceback_later(SECONDS_TO_END, exit=True, file=self.output)

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        if hasattr(config, "workerinput"):
            return  # it waits for the other workers, and xdist ends it
        faulthandler.dump_traceback_later(SECONDS_TO_END, exit=True, file=self.output)


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        # What a process was writing when it was killed is not whole: its time, which is written last, is missing.
        for entry in Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).glob("*-cache"):
            if not entry.with_name(f"{entry.name.removesuffix('-cache')}-atime").exists():
                entry.unlink(missing_ok=True)
    config.addinivalue_line("markers", f"time_limit(seconds): how long this test may take, instead of {SECONDS} s")
    # Capturing is suspended just now, so this is the terminal.
    config.pluginmanager.register(Limits(os.fdopen(os.dup(2), "w")))


class Scheduling(LoadFileScheduling):
    """A file is run by one worker, since its tests share compiled programs and fixtures; so are the files of rules.

    Of these, if run alone, each case is: its tests share nothing with others, and two workers take half as long. A test
    that takes its worker down is not run again, while xdist would, for every worker that it replaces.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        if file.rpartition("/")[2] not in BY_CASE:
            return file
        if self.collection is None or any(not each.startswith(file) for each in self.collection):
            return "rules"
        return test.partition("[")[2].rpartition("-")[2] or test

    def remove_node(self, node: WorkerController) -> str | None:
        units = self.assigned_work.pop(node)
        unfinished = [(unit, name) for unit in units.values() for name, finished in unit.items() if not finished]
        if not unfinished:
            return None
        unit, crashed = unfinished[0]
        unit[crashed] = True
        self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Of the whole suite, one more than there are cores: many tests wait for browsers, servers and members."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + (config.args_source == pytest.Config.ArgsSource.TESTPATHS)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None
