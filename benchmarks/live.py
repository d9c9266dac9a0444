"""The speed of the live federation, and its use of memory and files over a long run.

    python benchmarks/live.py rounds                                # K = 5, d = 5,000 and 1,000,000
    python benchmarks/live.py rounds --dimension 5000 --repeats 1   # a quick check
    python benchmarks/live.py absences                              # one member dead or late, about 40 minutes
    python benchmarks/live.py absences --case dead --repeats 1      # a quick check
    python benchmarks/live.py soak --minutes 60                     # one hour of training

`rounds` measures rounds per second among five processes on loopback, each connected to every other by mutual TLS. The
members are those of `byzpg peer`, with signatures, receipts, the outbox on disk and checkpoints, around a computation
that does nothing. Baseline: bare gRPC streams over the same TLS, where every process sends one message of the same size
to every other one, waits for theirs, and does nothing else. A second baseline also hashes, signs and verifies every
message, as proofs of equivocation require: no member that keeps such proofs can be faster than this one. `absences`
measures how fast four members train while the fifth is dead, or is late on purpose; its baseline is the same federation
with five healthy members. `soak` trains with one equivocating member and records each process's memory and open files;
its baseline is the second tenth of the same run.
"""

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc import aio

from byzpg.live.identity import generate, read_key, write_identity
from byzpg.live.links import SERVICE, channel_options, free_ports, open_channel, server_credentials
from byzpg.live.manifest import Manifest, Times, new_manifest
from byzpg.live.peer import LivePeer
from byzpg.live.status import Log, Status
from byzpg.live.store import Store

NAMES = ("alice", "bob", "carol", "dave", "erin")
STATE_VECTORS = 5  # θ_t, θ_{t−1}, v̂ and Adam's two moments


class Idle:
    """A computation that does nothing, so that only the cost of the rounds remains."""

    def __init__(self, dimension: int, num_iterations: int, rounds: int) -> None:
        self.dimension, self.num_iterations, self.rounds = dimension, num_iterations, rounds
        self.state_dimension = self.snapshot_dimension = STATE_VECTORS * dimension
        self._state = np.zeros(self.state_dimension, np.float32)
        self._vector = np.random.default_rng(0).normal(size=dimension).astype(np.float32)
        self.plan_digest = ""
        self.times: list[tuple[float, float]] = []  # of the clock and of the processor, at each iteration

    def warm_up(self) -> None: ...

    def begin(self, iteration: int) -> np.ndarray:
        self.times.append((time.perf_counter(), time.process_time()))
        return self._vector

    def combine(self, iteration: int, phase: int, received: np.ndarray, present: np.ndarray) -> np.ndarray | None:
        return self._vector if phase < self.rounds else None

    def snapshot(self) -> np.ndarray:
        return self._state

    def restore(self, iteration: int, snapshot: np.ndarray) -> None: ...

    def adopt(self, iteration: int, states: Sequence[np.ndarray | None]) -> None: ...

    def observe(self, status: Status, iteration: int, phase: int | None) -> dict[str, Any]:
        return {}


def found(folder: Path, training: dict[str, Any], times: Times) -> Manifest:
    """Write the keys and the manifest of a federation on loopback."""
    made = [generate(name, f"127.0.0.1:{port}") for name, port in zip(NAMES, free_ports(len(NAMES)), strict=True)]
    for identity in made:
        write_identity(folder, *identity)
    manifest = new_manifest([member for member, _ in made], 1, training, times, rehearsal=True)
    manifest.write(folder / "federation.toml")
    return manifest


# A member in its own process


def live_member(folder: Path, own: int, dimension: int, num_iterations: int, rounds: int) -> None:
    manifest = Manifest.load(folder / "federation.toml")
    member = manifest.members[own]
    store = Store(folder / member.name, manifest, member)
    status = Status(
        names=NAMES, own=own, num_iterations=num_iterations, attack=None, reward_threshold=None, task="none"
    )
    computation, private = Idle(dimension, num_iterations, rounds), read_key(folder / f"{member.name}.key", member)
    log = Log(store.path / "log.jsonl", member.name, None)

    async def run() -> LivePeer:
        peer = LivePeer(
            manifest=manifest,
            own=own,
            private=private,
            store=store,
            computation=computation,
            status=status,
            log=log,
            listen=member.address,
        )
        await peer.run()
        return peer

    peer = asyncio.run(run())
    print(json.dumps({**speed(computation.times, 1 + rounds), "bytes": peer.links.bytes_sent / peer.course.last}))


def speed(times: list[tuple[float, float]], rounds: int) -> dict[str, float]:
    """Rounds per second, and the processor's seconds per round, after the first tenth."""
    first, last = times[len(times) // 10], times[-1]
    number = (len(times) - 1 - len(times) // 10) * rounds
    return {"rounds": number / (last[0] - first[0]), "cpu": (last[1] - first[1]) / number}


def bare_member(folder: Path, own: int, size: int, num_rounds: int, signed: int) -> None:
    manifest = Manifest.load(folder / "federation.toml")
    private = read_key(folder / f"{NAMES[own]}.key", manifest.members[own])
    frame, limit = os.urandom(size), size + 1024
    keys = [member.verifier() for member in manifest.members]

    def sign() -> bytes:
        content = frame[64:]
        return private.signing.sign(hashlib.sha256(content).digest()) + content if signed else frame

    async def receive(other: int, read: Any) -> None:
        received = memoryview(await read())
        if signed:
            keys[other].verify(bytes(received[:64]), hashlib.sha256(received[64:]).digest())

    async def run() -> list[tuple[float, float]]:
        links: dict[int, tuple[Any, Any]] = {}
        connected, over = asyncio.Event(), asyncio.Event()

        async def accept(requests: object, context: aio.ServicerContext) -> None:
            links[int.from_bytes(await context.read(), "big")] = context.read, context.write
            if len(links) == len(NAMES) - 1:
                connected.set()
            await over.wait()

        server = aio.server(options=channel_options(limit))
        handlers = {"Bare": grpc.stream_stream_rpc_method_handler(accept)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        server.add_secure_port(manifest.members[own].address, server_credentials(manifest, own, private))
        await server.start()
        channels = []
        for other in range(own + 1, len(NAMES)):
            channel = open_channel(manifest, own, private, other, limit)
            await channel.channel_ready()
            call = channel.stream_stream(f"/{SERVICE}/Bare")()
            await call.write(bytes([own]))
            links[other] = call.read, call.write
            channels.append(channel)
        if len(links) == len(NAMES) - 1:
            connected.set()
        await connected.wait()
        times = []
        for _ in range(num_rounds):
            times.append((time.perf_counter(), time.process_time()))
            own_frame = sign()
            moves = [move for k, (read, write) in links.items() for move in (write(own_frame), receive(k, read))]
            await asyncio.gather(*moves)
        await asyncio.sleep(1)
        over.set()
        for channel in channels:
            await channel.close()
        await server.stop(0.5)
        return times

    print(json.dumps(speed(asyncio.run(run()), 1)))


def together(arguments: list[list[str]]) -> list[dict[str, float]]:
    """Run several processes of this script at once, and return their results."""
    command = [sys.executable, __file__]
    processes = [subprocess.Popen([*command, *each], stdout=subprocess.PIPE, text=True) for each in arguments]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a process failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def measure(dimension: int, num_iterations: int, rounds: int, repeats: int, where: Path | None) -> None:
    training = {"trajectories": 100}
    rates: dict[str, list[float]] = {"bare": [], "signed": [], "live": []}
    cpu: dict[str, list[float]] = {kind: [] for kind in rates}  # seconds of one member's processor per round
    sizes, num_rounds = 0.0, num_iterations * (1 + rounds)
    for _ in range(repeats):  # alternating, so that other load on the machine affects all alike
        with tempfile.TemporaryDirectory(dir=where) as name:
            found(Path(name), training, Times(grace=30.0))
            members = [str(own) for own in range(len(NAMES))]
            lengths = [str(dimension), str(num_iterations), str(rounds)]
            results = {"live": together([["live-member", name, own, *lengths] for own in members])}
            sizes = results["live"][0]["bytes"]
            lengths = [str(int(sizes / (len(NAMES) - 1))), str(num_rounds)]
            for kind, signed in (("bare", "0"), ("signed", "1")):
                results[kind] = together([["bare-member", name, own, *lengths, signed] for own in members])
        for kind, each in results.items():
            rates[kind].append(statistics.mean(member["rounds"] for member in each))
            cpu[kind].append(statistics.mean(member["cpu"] for member in each))
    print(f"d = {dimension:,}, {sizes:,.0f} bytes sent per member and round; medians of {repeats}")
    for kind in rates:
        ratios = [each / bare for each, bare in zip(rates[kind], rates["bare"], strict=True)]
        print(
            f"  {kind:6}  {statistics.median(rates[kind]):7.1f} rounds/s, {statistics.median(ratios):4.0%} of bare "
            f"({min(ratios):.0%} to {max(ratios):.0%}); {1e3 * statistics.median(cpu[kind]):.2f} ms of CPU per round"
        )


# Members that are absent or late

# What the last member does; see byzpg.live.rehearsal.Late. None: it is dead.
CASES = {
    "dead": None,
    **{f"{ms} ms late": f"late({ms / 1000})" for ms in (2, 5, 10, 20, 50, 200, 900)},
    "900 ms late in 16 of 32 rounds": "late(0.9, 0, 16)",
    "200 ms late to 1 member in turn": "late(0.2, 1)",
    "900 ms late to 1 member in turn": "late(0.9, 1)",
    "200 ms late to 3 members in turn": "late(0.2, 3)",
}


def start_member(folder: Path, name: str, attack: str | None = None) -> subprocess.Popen[bytes]:
    attacker = [] if attack is None else ["--attack", attack]
    command = ["byzpg", "peer", str(folder / "federation.toml"), "--name", name, "--log", "json", *attacker]
    return subprocess.Popen(
        [sys.executable, "-m", *command, "--directory", str(folder / name)], stdout=subprocess.DEVNULL
    )


def rate(folder: Path, warm_up: float, seconds: float) -> float:
    """Iterations per second of the first member."""
    time.sleep(warm_up)
    began, before = time.perf_counter(), done_by(folder)
    time.sleep(seconds)
    return (done_by(folder) - before) / (time.perf_counter() - began)


def wait_for(folder: Path, more: int) -> None:
    """Wait until a member has done this many more iterations."""
    path = folder / "progress.jsonl"
    while not path.is_file():
        time.sleep(0.5)
    aim = done_by(folder) + more
    while done_by(folder) < aim:
        time.sleep(0.5)


def absences(cases: list[str], warm_up: float, seconds: float, repeats: int) -> None:
    """Measure how fast members train while one of them is dead or late, in turn with healthy ones."""
    rates: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}  # healthy, and with this case
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            found(folder, {"trajectories": 3_000_000}, Times())
            processes = [start_member(folder, member) for member in NAMES[:-1]]
            try:
                for case in cases:
                    processes.append(start_member(folder, NAMES[-1]))
                    wait_for(folder / NAMES[-1], 10)
                    healthy = rate(folder / NAMES[0], warm_up, seconds)
                    end(processes.pop())
                    if CASES[case] is not None:
                        processes.append(start_member(folder, NAMES[-1], CASES[case]))
                        wait_for(folder / NAMES[-1], 1)
                    rates[case].append((healthy, rate(folder / NAMES[0], warm_up, seconds)))
                    if CASES[case] is not None:
                        end(processes.pop())
                    print(f"{case}: healthy {healthy:.1f} iterations/s, then {rates[case][-1][1]:.1f}", flush=True)
            finally:
                for process in processes:
                    end(process)
    print(f"K = {len(NAMES)}, f = 1, grace {Times().grace} s, {os.cpu_count()} cores; medians of {repeats}")
    for case, pairs in rates.items():
        ratios = [late / healthy for healthy, late in pairs]
        medians = [statistics.median(each) for each in zip(*pairs, strict=True)]
        words = f"| {case} | {medians[0]:.1f} | {medians[1]:.1f} | {statistics.median(ratios):.0%} |"
        print(f"{words} {min(ratios):.0%} to {max(ratios):.0%} |")


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


# A long run


def resources(process: subprocess.Popen[bytes]) -> tuple[float, int]:
    """The resident mebibytes and the open file descriptors of a process."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    resident = next(line for line in lines if line.startswith("VmRSS"))
    return int(resident.split()[1]) / 1024, len(os.listdir(f"/proc/{process.pid}/fd"))


def done_by(folder: Path) -> int:
    """How many iterations a member has completed."""
    with (folder / "progress.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        lines = file.read().splitlines()
    return json.loads(lines[-1])["iteration"] + 1 if len(lines) > 1 else 0


def soak(minutes: float, every: float, output: Path) -> None:
    """Train with five processes, one of them equivocating, and plot the memory and the files of each."""
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found(folder, {"trajectories": 3_000_000}, Times())
        processes = []
        try:
            for member in NAMES:
                processes.append(start_member(folder, member, "Equivocate" if member == NAMES[-1] else None))
            while not all((folder / member / "progress.jsonl").is_file() for member in NAMES):
                time.sleep(1)
            while done_by(folder / NAMES[0]) < 10:
                time.sleep(1)
            started = time.monotonic()
            while (now := time.monotonic() - started) < 60 * minutes:
                if any(process.poll() is not None for process in processes):
                    raise SystemExit(f"a member ended after {now:.0f} s")
                held = [resources(process) for process in processes]
                done = [done_by(folder / member) for member in NAMES]
                samples.append({"seconds": now, "mebibytes": [m for m, _ in held], "files": [f for _, f in held]})
                samples[-1]["iterations"] = done
                print(f"{now:6.0f} s  iterations {done[0]:>7,}  MiB {[round(m) for m, _ in held]}", flush=True)
                time.sleep(every)
        finally:
            for process in processes:
                end(process)
    draw_soak(samples, output)


def draw_soak(samples: list[dict[str, Any]], output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    minutes = [each["seconds"] / 60 for each in samples]
    figure, axes = pyplot.subplots(3, 1, figsize=(8, 7), sharex=True, constrained_layout=True)
    for axis, what, label in zip(
        axes, ("mebibytes", "files", "iterations"), ("resident MiB", "open files", "iterations"), strict=True
    ):
        for index, name in enumerate(NAMES):
            axis.plot(minutes, [each[what][index] for each in samples], label=name, linewidth=1.2)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].set_title(f"{minutes[-1]:.0f} minutes of CartPole-v1, 5 members, {NAMES[-1]} equivocating")
    axes[0].legend(ncols=len(NAMES), fontsize="small", loc="lower right")
    axes[-1].set_xlabel("minutes")
    figure.savefig(output, dpi=150)
    tenth = len(samples) // 10
    for what in ("mebibytes", "files"):
        first, last = (
            np.mean([each[what] for each in part], axis=0) for part in (samples[tenth : 2 * tenth], samples[-tenth:])
        )
        print(f"{what}: second tenth {np.round(first, 1)}, last tenth {np.round(last, 1)}")
    total = samples[-1]["iterations"][0] - samples[0]["iterations"][0]
    print(f"{total:,} iterations in {minutes[-1]:.0f} minutes; picture {output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    rounds = commands.add_parser("rounds")
    rounds.add_argument("--repeats", type=int, default=3)
    rounds.add_argument("--dimension", type=int)
    rounds.add_argument("--where", type=Path, help="folder of the members' files, for example /dev/shm")
    absent = commands.add_parser("absences")
    absent.add_argument("--case", dest="cases", action="append", choices=CASES, help="default: all, one after another")
    absent.add_argument("--warm-up", type=float, default=8.0)
    absent.add_argument("--seconds", type=float, default=20.0)
    absent.add_argument("--repeats", type=int, default=3)
    long = commands.add_parser("soak")
    long.add_argument("--minutes", type=float, default=60.0)
    long.add_argument("--every", type=float, default=10.0)
    long.add_argument("--output", type=Path, default=Path("live-soak.png"))
    for name, arguments in (
        ("live-member", ("dimension", "num_iterations", "rounds")),
        ("bare-member", ("size", "num_rounds", "signed")),
    ):
        member = commands.add_parser(name)
        member.add_argument("folder", type=Path)
        for argument in ("own", *arguments):
            member.add_argument(argument, type=int)
    options = vars(parser.parse_args())
    command = options.pop("command")
    if command == "live-member":
        live_member(**options)
    elif command == "bare-member":
        bare_member(**options)
    elif command == "absences":
        absences(options.pop("cases") or list(CASES), **options)
    elif command == "soak":
        soak(**options)
    else:
        print(f"K = {len(NAMES)}, loopback, mutual TLS, {os.cpu_count()} cores")
        for dimension, num_iterations in ((5_000, 300), (1_000_000, 12)):
            if options["dimension"] in (None, dimension):
                measure(dimension, num_iterations, 3, options["repeats"], options["where"])


if __name__ == "__main__":
    main()
