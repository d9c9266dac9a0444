"""What operators rely on: log rotation, the systemd unit, and the containers' start-up as plain processes."""

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import guardian
import pytest
import yaml
from live_federation import NAMES, PATIENCE, free_ports, until

from byzpg.live.status import Log

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = DEPLOY / "byzpg@.service"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]

# Log rotation


@pytest.fixture
def small_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Log, "LARGEST", 2_000)


def written(folder: Path) -> list[int]:
    """The numbers in the log's lines, oldest first. Every line must be whole."""
    files = [folder / f"log.jsonl{suffix}" for suffix in (".3", ".2", ".1", "")]
    lines = [line for path in files if path.exists() for line in path.read_text().splitlines()]
    return [json.loads(line)["number"] for line in lines]


def write(log: Log, *numbers: int) -> None:
    for number in numbers:
        log("event", number=number)


@pytest.mark.usefixtures("small_logs")
def test_a_log_is_rotated_and_keeps_the_newest_lines(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl", "alice", None)
    write(log, *range(50))
    assert written(tmp_path) == list(range(50))
    write(log, *range(50, 500))
    log.close()
    kept = written(tmp_path)
    assert kept == list(range(500 - len(kept), 500))
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sorted(sizes) == ["log.jsonl", "log.jsonl.1", "log.jsonl.2", "log.jsonl.3"]
    assert max(sizes.values()) <= 2_000
    assert min(sizes[f"log.jsonl.{number}"] for number in (1, 2, 3)) > 1_800


@pytest.mark.usefixtures("small_logs")
def test_a_restarted_member_continues_its_log_and_drops_the_line_that_a_crash_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = Log(path, "alice", None)
    write(log, 0, 1)
    log.close()
    with path.open("a") as file:
        file.write('{"time": 17')
    log = Log(path, "alice", None)
    write(log, *range(2, 50))
    log.close()
    assert written(tmp_path) == list(range(50))


@pytest.mark.usefixtures("small_logs")
@pytest.mark.parametrize("fails", ["replace", "open"])
def test_a_log_that_cannot_be_rotated_is_continued(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path / "log.jsonl", "alice", None)
    write(log, *range(45))
    assert (tmp_path / "log.jsonl.2").exists()

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(Path, fails, refuse)
        write(log, *range(45, 100))
    assert written(tmp_path) == list(range(100))
    write(log, *range(100, 120))
    log.close()
    assert written(tmp_path)[-20:] == list(range(100, 120))
    assert (tmp_path / "log.jsonl").stat().st_size <= 2_000


def test_a_line_that_does_not_fit_on_the_disk_is_left_out_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that fills up in the middle of a line: the system writes a part of it, and then nothing."""
    heard: list[dict[str, Any]] = []
    log = Log(tmp_path / "log.jsonl", "alice", heard.append)
    write(log, 0)
    room = [10]

    def short_write(handle: int, content: bytes) -> int:
        if not (taken := min(room[0], len(content))):
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= taken
        return os_write(handle, content[:taken])

    os_write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", short_write)
        write(log, 1, 2)
    write(log, 3)
    log.close()
    assert written(tmp_path) == [0, 3]
    assert [event["number"] for event in heard] == [0, 1, 2, 3]


def test_a_log_goes_on_if_nobody_can_read_it(tmp_path: Path) -> None:
    def full(event: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    log = Log(tmp_path / "log.jsonl", "alice", full)
    log("start")
    log.close()
    assert "start" in (tmp_path / "log.jsonl").read_text()


def test_a_log_takes_any_text(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl", "alice", None)
    name = os.fsdecode(b"/home/ren\xe9")  # a path in another encoding
    log("event", number=0, path=name)
    log.close()
    assert json.loads((tmp_path / "log.jsonl").read_text())["path"] == name


# The systemd unit


def systemd_analyze(*arguments: object) -> str:
    assert shutil.which("systemd-analyze"), "this test needs systemd-analyze: apt-get install systemd"
    line = ["systemd-analyze", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(line)}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def of_unit(setting: str) -> list[str]:
    return re.findall(rf"^{setting}=(.*)$", UNIT.read_text(), re.MULTILINE)


def test_systemd_accepts_the_unit_and_finds_it_confined(tmp_path: Path) -> None:
    installed = tmp_path / UNIT.name
    program = shlex.quote(str(Path(sys.executable).parent / "byzpg"))
    installed.write_text(UNIT.read_text().replace("/opt/byzpg/bin/byzpg", program))
    assert systemd_analyze("verify", installed) == ""
    systemd_analyze("security", "--offline=true", "--threshold=15", installed)  # of 100; a bare unit has 96


@cache
def system_calls(*groups: str) -> frozenset[str]:
    """The system calls of systemd's groups, such as @system-service."""
    found: frozenset[str] = frozenset()
    for group in groups:
        lines = [line.strip() for line in systemd_analyze("syscall-filter", group).splitlines()[1:]]
        names = {line for line in lines if line and not line.startswith("#")}
        nested = {name for name in names if name.startswith("@")}
        found |= (names - nested) | system_calls(*nested)
    return found


# Runs a command under a filter as systemd makes it.
CONFINED = """
import ctypes, errno, json, os, socket, sys

class Comparison(ctypes.Structure):
    _fields_ = [("argument", ctypes.c_uint), ("operator", ctypes.c_int), ("first", ctypes.c_uint64),
                ("second", ctypes.c_uint64)]

EQUAL, ALLOW, REFUSE = 4, 0x7FFF0000, 0x00050000 | errno.EPERM
seccomp = ctypes.CDLL("libseccomp.so.2")
seccomp.seccomp_init.restype = ctypes.c_void_p
context = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(REFUSE)))

def allow(name, *comparisons):
    number = seccomp.seccomp_syscall_resolve_name(name.encode())
    array = (Comparison * len(comparisons))(*comparisons)
    if number >= 0:  # this machine has it
        code = seccomp.seccomp_rule_add_array(context, ctypes.c_uint32(ALLOW), number, len(comparisons), array)
        assert code == 0, (name, code)

calls, families, *command = sys.argv[1:]
for name in json.loads(calls):
    if name != "socket":
        allow(name)
for family in families.split():
    allow("socket", Comparison(0, EQUAL, getattr(socket, family), 0))
assert seccomp.seccomp_load(context) == 0
try:
    os.sched_setaffinity(0, os.sched_getaffinity(0))
except PermissionError:
    os.execvp(command[0], command)
sys.exit("the filter is not in force")
"""


def confined(command: list[str]) -> list[str]:
    """A command under the unit's filters of system calls and of address families."""
    allowed, refused = of_unit("SystemCallFilter")
    assert refused.startswith("~")
    calls = system_calls("@default", *allowed.split()) - system_calls(*refused[1:].split())
    (families,) = of_unit("RestrictAddressFamilies")
    return [sys.executable, "-c", CONFINED, json.dumps(sorted(calls)), families, *command]


# Containers


def instructions(name: str) -> list[str]:
    """The arguments of an instruction in the Dockerfile, each time it occurs."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.partition(" ")[2].strip() for line in text.splitlines() if line.startswith(f"{name} ")]


def of_image() -> dict[str, str]:
    """The environment that the image sets."""
    pairs = [pair.partition("=") for line in instructions("ENV") for pair in line.split()]
    return {name: value for name, _, value in pairs}


def mounts(service: str) -> dict[str, tuple[str, bool]]:
    """The volumes of a service: the path of each, and whether the service may write there."""
    parts = [each.split(":") for each in SERVICES[service].get("volumes", [])]
    return {volume: (path, options != ["ro"]) for volume, path, *options in parts}


def interpolated(value: str, **environment: str) -> str:
    """Replace ${NAME:-default}, as Compose does."""
    return re.sub(r"\$\{(\w+):-(.*?)\}", lambda found: environment.get(found[1], found[2]), value)


def test_containers_have_the_least_privileges() -> None:
    assert sorted(SERVICES) == sorted([*NAMES, "manifest", "monitor"])
    assert instructions("USER") == ["byzpg"]
    for service in SERVICES.values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["ulimits"]["nofile"]["soft"] == int(of_unit("LimitNOFILE")[0])
        assert service["restart"] == of_unit("Restart")[0]
    for name in NAMES:
        seen_by = {service: mounts(service)[name][1] for service in SERVICES if name in mounts(service)}
        assert seen_by == {name: True} | (
            {"monitor": False} if name == SERVICES["monitor"]["environment"]["NAME"] else {}
        )
    writers = [service for service in SERVICES if mounts(service).get("manifest", ("", False))[1]]
    assert writers == ["manifest"]
    used = {volume for service in SERVICES for volume in mounts(service)}
    assert used == set(COMPOSE["volumes"])
    # Docker gives an empty volume the owner of the directory in the image.
    made = " ".join(instructions("RUN"))
    assert all(path in made for service in SERVICES for path, _ in mounts(service).values())


class Containers:
    """The services of compose.yaml as plain processes: volumes are folders, and all addresses are on loopback."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, dict[str, subprocess.Popen[bytes]]()
        members, others = free_ports(len(NAMES)), free_ports(len(SERVICES))
        self.addresses = {f"{name}:7700": f"127.0.0.1:{port}" for name, port in zip(NAMES, members, strict=True)}
        self.ports = dict(zip(SERVICES, others, strict=True))
        for volume in COMPOSE["volumes"]:
            (folder / volume).mkdir()
        (folder / "bin").mkdir()
        source, target = next(line.split()[-2:] for line in instructions("COPY") if "start" in line)
        (folder / "bin" / Path(target).name).symlink_to(DEPLOY.parent / source)

    def environment(self, service: str) -> dict[str, str]:
        values: dict[str, str] = of_image() | SERVICES[service].get("environment", {})
        for volume, (path, _) in mounts(service).items():
            values = {name: value.replace(path, str(self.folder / volume)) for name, value in values.items()}
        values = {name: self.addresses.get(value, value) for name, value in values.items()}
        programs = [str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        # How tests compile, in place of a cache per member; and the mark of what a test has started.
        ours = {name: value for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_", guardian.MARK))}
        return values | ours | {"PORT": str(self.ports[service]), "PATH": os.pathsep.join(programs)}

    def command(self, *arguments: object) -> list[str]:
        """What a container with these arguments runs."""
        (entrypoint,) = instructions("ENTRYPOINT")
        return confined([*json.loads(entrypoint), *map(str, arguments)])

    def start(self, service: str, **environment: str) -> None:
        command = [interpolated(part, **environment) for part in SERVICES[service]["command"]]
        with (self.folder / f"{service}.out").open("wb") as output:
            self.processes[service] = subprocess.Popen(
                self.command(*command),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment(service),
                start_new_session=True,
            )

    def run(self, service: str, *arguments: object) -> str:
        """What another command prints in a container of a service."""
        return subprocess.check_output(self.command(*arguments), env=self.environment(service), text=True)

    def is_healthy(self, service: str) -> bool:
        """Whether the image's health check passes."""
        assert self.processes[service].poll() is None, self.said(service)
        (line,) = instructions("HEALTHCHECK")
        command = json.loads(line.partition("CMD ")[2])
        return not subprocess.run(command, env=self.environment(service), capture_output=True, check=False).returncode

    def said(self, service: str) -> str:
        return (self.folder / f"{service}.out").read_text()

    def status(self) -> dict[str, Any]:
        """What the status page shows."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['monitor']}/status.json", timeout=10) as answer:
            return json.load(answer)

    def signal(self, service: str, number: signal.Signals) -> None:
        os.killpg(self.processes[service].pid, number)

    def stop(self) -> None:
        for service, process in self.processes.items():
            if process.poll() is None:
                self.signal(service, signal.SIGKILL)
            process.wait()


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[Containers]:
    made = Containers(tmp_path)
    try:
        yield made
    finally:
        made.stop()


@pytest.mark.slow
def test_the_containers_start_up_as_plain_processes(containers: Containers) -> None:
    """From empty volumes to trained members, under the system call filter of the systemd unit."""
    folder, honest = containers.folder, NAMES[:4]
    manifest = folder / "manifest" / "federation.toml"
    for service in NAMES:
        containers.start(service)
    assert not containers.is_healthy("alice")
    until((folder / "cards" / "erin.card").exists, "erin has published its card")
    containers.signal("erin", signal.SIGSTOP)  # training waits for it, and there is time to look at the others
    containers.start("manifest", TRAJECTORIES="150")
    containers.start("monitor")
    assert containers.processes["manifest"].wait(PATIENCE) == 0, containers.said("manifest")
    for service in ("alice", "monitor"):
        until(lambda service=service: containers.is_healthy(service), f"{service} is healthy")
    until(lambda: all(containers.status()["statuses"][name] for name in honest), "the monitor hears the four")
    containers.signal("bob", signal.SIGKILL)
    containers.processes["bob"].wait()
    containers.start("bob")  # with the key that it has
    containers.signal("erin", signal.SIGCONT)
    for name in honest:
        assert containers.processes[name].wait(PATIENCE) == 0, containers.said(name)
    proofs = [path for name in honest for path in (folder / name / "member" / "evidence").glob("*.json")]
    assert proofs
    verified = containers.run("alice", "evidence", "verify", manifest, *proofs)
    assert verified.count("proven. erin signed two different messages") == len(proofs)
    for name in NAMES:
        assert {path.name for path in (folder / name).rglob("*.key")} == {f"{name}.key", "random.key"}
    os.kill(containers.processes["monitor"].pid, signal.SIGTERM)
    assert containers.processes["monitor"].wait(PATIENCE) == 0, containers.said("monitor")
    before = manifest.read_bytes()
    containers.start("manifest")  # as after a reboot: it has nothing left to do
    assert containers.processes["manifest"].wait(PATIENCE) == 0
    assert manifest.read_bytes() == before
