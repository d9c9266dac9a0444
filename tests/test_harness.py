"""The harness itself: a test that hangs is ended and named, the others still run, and no process is left behind."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import guardian
import pytest

TESTS = Path(__file__).parent
HANGING = """
import os, shutil, subprocess, threading
import pytest
from playwright.sync_api import sync_playwright

def test_before():
    pass

@pytest.mark.time_limit(20)
def test_that_hangs(tmp_path):
    path = shutil.which("chromium")
    subprocess.Popen(["sleep", "1001"])
    subprocess.run("setsid sh -c 'trap \\"\\" TERM; sleep 1002; true' &", shell=True, check=True)
    subprocess.run(["ip", "netns", "add", f"bz{os.getpid()}hung"], check=True)
    playwright = sync_playwright().start()
    browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
    browser.new_page()
    with open(os.environ["NOTED"], "w") as file:
        file.write(os.environ["BYZPG_TEST_PROCESS"])
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


@pytest.mark.parametrize("workers", [0, 1])
def test_a_hanging_test_is_ended_and_named_with_all_it_started(workers: int, tmp_path: Path) -> None:
    for name in ("chromium", "ip"):
        assert shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin"), f"this test needs {name}: see .ci/run"
    for name in ("conftest.py", "guardian.py"):
        shutil.copy(TESTS / name, tmp_path)
    (tmp_path / "test_hanging.py").write_text(HANGING)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    noted = tmp_path / "noted"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", str(workers)],
        cwd=tmp_path,
        env=os.environ | {"NOTED": str(noted), "PATH": f"{os.environ['PATH']}:/usr/sbin"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "Timeout (0:00:20)!" in said
    assert re.search(r'test_hanging.py", line \d+ in test_that_hangs', said)
    assert re.search(r'test_hanging.py", line \d+ in wait_in_another_thread', said)
    assert "The test process ended in test_hanging.py::test_that_hangs" in said
    assert "sleep 1002" in said
    assert "chromium" in said
    if workers:
        assert "FAILED test_hanging.py::test_that_hangs" in said
        assert "1 failed, 2 passed" in said  # the one after it ran in a new worker
    mark = noted.read_text()
    while left := guardian.marked_processes(mark):  # its own time limit ends this test
        time.sleep(0.05)
    assert not left
    assert (
        f"bz{mark.partition('-')[0]}hung"
        not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    )
