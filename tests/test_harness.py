"""The harness itself: a test that hangs is ended and named, the others still run, and no process is left behind."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import guardian
import pytest
from live_federation import until

TESTS = Path(__file__).parent
HANGING = """
import os, shutil, subprocess, threading
import pytest
from playwright.sync_api import sync_playwright

@pytest.fixture(scope="module", autouse=True)
def started():
    subprocess.Popen(["sleep", "1001"])
    subprocess.run("setsid sh -c 'trap \\"\\" TERM; sleep 1002; true' &", shell=True, check=True)
    subprocess.run(["ip", "netns", "add", f"bz{os.getpid()}hung"], check=True)
    playwright = sync_playwright().start()
    options = ["--no-sandbox", "--disable-gpu"]
    browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=options)
    browser.new_page()
    yield browser

def test_before():
    with open(os.environ["NOTED"], "w") as file:
        file.write(os.environ["BYZPG_TEST_PROCESS"])

@pytest.mark.time_limit(3)
def test_that_hangs():
    threading.Thread(target=wait_in_another_thread, daemon=True).start()
    forever = threading.Lock()
    while True:  # neither an exception nor a signal handler would end this
        try:
            forever.acquire()
        except BaseException:
            pass

def wait_in_another_thread():
    threading.Event().wait()

def test_after():
    pass
"""


def prepare(folder: Path, tests: str) -> None:
    """A suite of its own, with this one's harness."""
    for name in ("conftest.py", "guardian.py"):
        shutil.copy(TESTS / name, folder)
    (folder / "test_hanging.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\n")


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_hanging_test_is_ended_and_named_with_all_it_started(workers: int, tmp_path: Path) -> None:
    prepare(tmp_path, HANGING)
    noted, path = tmp_path / "noted", f"{os.environ['PATH']}:/usr/sbin"
    for tool, package in (("chromium", "chromium"), ("ip", "iproute2")):
        assert shutil.which(tool, path=path), f"this test needs {tool}: apt-get install {package}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", str(workers)],
        cwd=tmp_path,
        env=os.environ | {"NOTED": str(noted), "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "Timeout (0:00:03)!" in said
    assert re.search(r'test_hanging.py", line \d+ in test_that_hangs', said)
    assert re.search(r'test_hanging.py", line \d+ in wait_in_another_thread', said)
    assert "The test process ended in test_hanging.py::test_that_hangs" in said
    assert "sleep 1002" in said
    assert "chromium" in said
    if workers:
        # The one after it ran in a new worker, whose own processes ended with it.
        assert "FAILED test_hanging.py::test_that_hangs" in said
        assert "1 failed, 2 passed" in said
    mark = noted.read_text()
    until(lambda: not guardian.marked_processes(mark), "no process is left")
    namespace = f"bz{mark.partition('-')[0]}hung".encode()
    listing = [shutil.which("ip", path=path) or "ip", "netns", "list"]
    until(lambda: namespace not in subprocess.check_output(listing), "its network namespace is gone")


TEARDOWN = """
import threading
import conftest
import pytest

conftest.SECONDS_TO_END = 3  # only here: this module is the one that pytest uses

@pytest.fixture
def never_ends():
    yield
    forever = threading.Lock()
    forever.acquire()
    forever.acquire()

def test_that_fails(never_ends):
    assert False
"""


@pytest.mark.slow
def test_a_failing_test_may_not_hang_in_its_teardown(tmp_path: Path) -> None:
    prepare(tmp_path, TEARDOWN.replace("import conftest", "import sys\nconftest = sys.modules['conftest']"))
    done = subprocess.run([sys.executable, "-m", "pytest", "-n0"], cwd=tmp_path, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "Timeout (0:00:03)!" in said
    assert "in never_ends" in said
