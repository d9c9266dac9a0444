"""Ends what a test process leaves behind, however it died. Started by conftest.py, it outlives the process it guards.

Its standard input is a pipe from the guarded process: one line with the name of each test that begins, and an empty
line when the test has ended. The pipe closes when the guarded process is gone. Then every process that carries its
mark, all their descendants, and its network namespaces are removed. The mark is an environment variable, which
children inherit even if they become daemons; what the test process itself forks, without a program, has it not.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "BYZPG_TEST_PROCESS"


def marked_processes(mark: str) -> dict[int, str]:
    """Command lines, by process id, of the processes that carry this mark and of their descendants."""
    commands: dict[int, str] = {}
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            environment = (path / "environ").read_bytes().split(b"\0")
            command = (path / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
        except OSError:  # gone, or somebody else's
            continue
        # Another guardian ends by itself, once it has ended what it is for.
        if state != "Z" and Path(__file__).name not in command:
            parents[int(path.name)] = int(parent)
            if f"{MARK}={mark}".encode() in environment:
                commands[int(path.name)] = command
    # A browser overwrites the environments of its helpers: they are found through their parents.
    growing = True
    while growing:
        children = {process for process, parent in parents.items() if parent in commands} - commands.keys()
        commands |= dict.fromkeys(children, "(a descendant)")
        growing = bool(children)
    return commands


def remove_namespaces(process: str) -> None:
    """Those that tests made in this process: see `live_federation.in_namespaces`."""
    if tool := shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin"):
        listed = subprocess.run([tool, "netns", "list"], capture_output=True, text=True, check=False).stdout
        for name in re.findall(rf"^bz{process}[a-z]+", listed, re.MULTILINE):
            subprocess.run([tool, "netns", "delete", name], capture_output=True, check=False)


def main(mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the tests, and this must come after them
    running = ""
    for line in sys.stdin:
        running = line.strip()
    killed: dict[int, str] = {}
    deadline = time.monotonic() + 60
    while (found := marked_processes(mark)) and time.monotonic() < deadline:
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        killed |= found
        time.sleep(0.05)
    remove_namespaces(mark.partition("-")[0])
    if running:
        sys.stderr.write(f"\nThe test process ended in {running}; {len(killed)} processes it had started were killed")
        sys.stderr.write("".join(f"\n  {process}: {words[:120]}" for process, words in killed.items()) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
