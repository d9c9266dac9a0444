"""Real federations for tests: one process per member, real sockets, and network namespaces on demand."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from forking import BYZPG, Forked

from byzpg.config import Config
from byzpg.live.identity import generate, write_identity
from byzpg.live.manifest import FIXED, Manifest, Times, new_manifest

NAMES = ("alice", "bob", "carol", "dave", "erin")
# A member that rests in every iteration, and so leaves the processors to other tests.
CALM = f"""
import time
from byzpg.live.peer import LivePeer
begin = LivePeer._begin
LivePeer._begin = lambda peer, iteration: time.sleep(0.1) or begin(peer, iteration)
{BYZPG}
"""
PATIENCE = 200.0  # seconds until a condition fails; less than a test's time limit, whose error names no condition


def until(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """Wait for a condition, and fail after `patience` seconds."""
    deadline = time.monotonic() + patience
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.05)
    return found


# Below the range of ports for outgoing connections, and different in each of pytest's processes.
_ports = count(10_000 + 97 * os.getpid() % 9_000)


def free_ports(number: int) -> list[int]:
    """Find free ports that no other process is given before a test listens there."""
    found: list[int] = []
    while len(found) < number:
        port = next(_ports)
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            found.append(port)
    return found


def found(folder: Path, addresses: list[str], times: Times, rehearsal: bool = True, **options: Any) -> Manifest:
    """Write the keys and the manifest of a federation that tolerates one faulty member."""
    made = [generate(name, address) for name, address in zip(NAMES, addresses, strict=True)]
    for identity in made:
        write_identity(folder, *identity)
    training = Config(num_agents=len(NAMES), num_byzantine=1, num_attackers=0, num_seeds=1, **options).resolved()
    chosen = {name: value for name, value in training.as_data().items() if name not in FIXED}
    manifest = new_manifest([member for member, _ in made], 1, chosen, times, rehearsal=rehearsal)
    manifest.write(folder / "federation.toml")
    return manifest


@dataclass
class Federation:
    """The processes of a federation."""

    folder: Path
    manifest: Manifest
    namespaces: dict[str, str] = field(default_factory=dict)  # by member
    program: str = CALM  # that members run
    processes: dict[str, Forked] = field(default_factory=dict)
    logs: dict[str, tuple[int, list[dict[str, Any]]]] = field(default_factory=dict)  # bytes and events read so far

    def start(
        self,
        name: str,
        *options: object,
        manifest: str = "federation.toml",
        program: str | None = None,
        **environment: Any,
    ) -> None:
        line = ("peer", self.folder / manifest, "--name", name, "--directory", self.directory(name), *options)
        program, namespace = program or self.program, self.namespaces.get(name)
        with (self.folder / f"{name}.out").open("ab") as output:
            self.processes[name] = Forked(*line, stdout=output, program=program, namespace=namespace, **environment)

    def start_all(self, **special: tuple[str, ...]) -> None:
        """Start all members, and wait until each has done a few iterations.

        Args:
            special: For some members, the program and the options with which to start them.
        """
        for name in NAMES:
            program, *options = special.get(name, (self.program,))
            self.start(name, *options, program=program)
            if name == NAMES[0]:  # it fills the cache of programs
                self.wait_until_ready(name)
        self.wait_for_iterations(4, *NAMES)

    def wait_until_ready(self, name: str) -> None:
        """Wait until a member has compiled its programs, or has failed."""
        until(lambda: self.processes[name].poll() is not None or self.events(name, "ready"), f"{name} is ready")

    def directory(self, name: str) -> Path:
        return self.folder / name

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def events(self, name: str, event: str | None = None) -> list[dict[str, Any]]:
        path = self.directory(name) / "log.jsonl"
        start, known = self.logs.get(name, (0, []))
        if path.is_file():
            with path.open("rb") as log:
                log.seek(start)
                whole = log.read().rpartition(b"\n")[0]
            if whole:
                known = known + [json.loads(line) for line in whole.split(b"\n")]
                self.logs[name] = start + len(whole) + 1, known
        return [line for line in known if event in (None, line["event"])]

    def iteration(self, name: str) -> int:
        """How many iterations a member has done."""
        done = self.events(name, "iteration")
        return done[-1]["iteration"] if done else 0

    def wait_for_iterations(self, more: int, *names: str) -> None:
        """Wait until members have done this many more iterations."""
        aims = {name: self.iteration(name) + more for name in names}
        for name, aim in aims.items():
            until(lambda name=name, aim=aim: self.iteration(name) >= aim, f"{name} has done {aim} iterations")

    def wait_until_together(self, *names: str) -> None:
        """Wait until members do the same iterations again, each with messages from all of `names`."""
        start = max(self.iteration(name) for name in names)
        for name in names:
            until(lambda name=name: self.iteration(name) > start + 2, f"{name} is with the others again")

    def finish(self) -> dict[str, int]:
        """Wait until all members have ended; return their exit codes."""
        return {name: process.wait(PATIENCE) for name, process in self.processes.items()}

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


@contextmanager
def on_loopback(folder: Path, times: Times, **options: Any) -> Iterator[Federation]:
    """A federation on this machine that has not been started."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(len(NAMES))]
    federation = Federation(folder, found(folder, addresses, times, **options))
    try:
        yield federation
    finally:
        federation.stop()


def run(*command: str, given: str | None = None) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


@contextmanager
def in_namespaces(folder: Path, times: Times, **options: Any) -> Iterator[Federation]:
    """A federation with a network namespace per member, joined by a bridge, and one more for an outsider."""
    for tool, package in (("ip", "iproute2"), ("nft", "nftables")):
        assert shutil.which(tool), f"these tests need {tool}: apt-get install {package}"
    assert os.geteuid() == 0, "these tests make network namespaces: run them as root"
    prefix = f"bz{os.getpid()}"
    hub, spaces = f"{prefix}hub", {name: f"{prefix}{name}" for name in (*NAMES, "outsider")}
    try:
        run("ip", "netns", "add", hub)
        run("ip", "-n", hub, "link", "add", "bridge0", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "bridge0", "up")
        for number, space in enumerate(spaces.values(), 1):
            run("ip", "netns", "add", space)
            run("ip", "-n", hub, "link", "add", f"to{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
            run("ip", "-n", hub, "link", "set", f"to{number}", "master", "bridge0", "up")
            run("ip", "-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            run("ip", "-n", space, "link", "set", "lo", "up")
        addresses = [f"10.77.0.{number}:7700" for number in range(1, len(NAMES) + 1)]
        federation = Federation(folder, found(folder, addresses, times, **options), spaces)
        try:
            yield federation
        finally:
            federation.stop()
    finally:
        for space in (*spaces.values(), hub):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def drop(federation: Federation, name: str, percent: int) -> None:
    """Drop this share of all packets from and to a member; 0 drops none."""
    rules = "flush ruleset\n"
    if percent:
        for hook, device in (("input", "iifname"), ("output", "oifname")):
            rules += (
                f"table inet {hook}_faults {{ chain {hook} {{ type filter hook {hook} priority 0; "
                f'{device} "eth0" numgen random mod 100 <= {percent - 1} drop; }}; }}\n'
            )
    run("ip", "netns", "exec", federation.namespaces[name], "nft", "-f", "-", given=rules)
