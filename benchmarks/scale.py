"""The cost of large federations, of large policies, of several processes, and of the engines Flower and Ray.

    python benchmarks/scale.py agents               # seconds per iteration and peak memory at K = 13, 100 and 1,000
    python benchmarks/scale.py agents --sizes 13    # a quick check
    python benchmarks/scale.py peers                # 1,000 agents without a server, also while attackers equivocate
    python benchmarks/scale.py shards               # memory of each of 1, 2, 4 and 8 devices, for a large policy
    python benchmarks/scale.py large                # one exchange at d = 10⁷ against the bandwidth, 10⁸ on paper
    python benchmarks/scale.py large --dimension 1000000    # as much as a CPU can do quickly
    python benchmarks/scale.py devices              # the parallel efficiency of two processes with a core each
    python benchmarks/scale.py engines              # what Flower adds to an iteration, and Ray to a cell of a sweep

`agents`: one federation on CartPole-v1 with batches of two episodes, in which a fifth of the agents attack, without a
server (one round of agreement by MDA or GDA) and with one. Every case runs in its own process. Baseline: a sizing that
adds up the parts of an iteration. These are play, which grows linearly in K, and the time of each rule at one
receiver, times the number of receivers that hold different vectors. From the same parts follows the cost of an
iteration when every agent has its own machine and link.

`peers`: the same without a server, for attackers that send the same to all (AvgZero), one thing to each half of the
agents (Equivocate) and something else to each agent (LargeNoise), at a tenth of the agents and at the most that the
rule of agreement tolerates. Devices are those of `byzpg train`, one per core. Baseline: a limit of 10 s per iteration
and 4 GiB.

`shards`: one DecByzPG federation on CartPole-v1 with two hidden layers of 512, whose vectors are divided by coordinate
among virtual devices of the CPU. Baseline: one device. Memory is what the compiler plans for one device: arguments (the
state, which results overwrite), temporaries, and outputs that are not written over arguments. Virtual devices share the
cores, so that seconds tell only what dividing costs.

`large`: one round of messages among 13 agents, 3 of which attack (AvgZero). Baseline: the time to read each vector once
and write each result once at the bandwidth of the device's memory, which is that of the data sheet or, for a device
that we have no sheet of, measured by scaling the vectors. No rule can reach it: whether a vector is sound, and its
distance from others, is known only after it has been read once, and 13 large vectors do not fit into any cache, so that
they must be read again. "With diagnostics" is what a simulation does: it also measures errors, diameters and variances.
The sizing multiplies this by the coordinates of one device.

`devices`: baseline is the same federation in one process on one core.

`engines`: baseline is the bare simulator, one program in one process. A Flower round is timed as the difference
between a longer and a shorter `flwr run` of examples/flower, in Flower's simulation and in a deployment (SuperLink,
four SuperNodes, TLS). A sweep whose cells differ in the seed alone is timed in one process, by local workers, and on
Ray, with one worker each.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

METHODS = ("averaging", "server", "MDA", "GDA")
SIZES = (13, 100, 1000)
DIMENSION = 386  # of CartPole's policy
LINK = 1e9  # bits/s
ATTACKS = ("AvgZero", "Equivocate", "LargeNoise")
MOST_SECONDS, MOST_BYTES = 10, 4 * 2**30  # the limits of `peers`


def child(*arguments: str, core: int | None = None, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *arguments]
    if core is not None:
        command = ["taskset", "--cpu-list", str(core), *command]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})


def result(process: subprocess.Popen[str]) -> Any:
    """Wait for a process, and return the last line that it printed."""
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"failed: {' '.join(map(str, process.args))}")  # pyright: ignore[reportArgumentType]
    return json.loads(output.splitlines()[-1])


def simulated(config: Any) -> Any:
    """The simulation of one federation."""
    from byzpg.federation.simulator import Simulation

    settings = config.resolved()
    return Simulation((settings.federation(),), settings.seeds)


def timed(simulation: Any, iterations: int, repeats: int) -> float:
    """The median of the seconds per iteration."""
    from byzpg.federation.simulator import LARGE

    states, seconds = simulation.start(), []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        states, _ = simulation.run(states, [LARGE] * iterations, -1)
        seconds.append((time.perf_counter() - started) / iterations)
    return statistics.median(seconds[1:])  # the first run compiles


# One simulation of many agents


def method_config(method: str, num_agents: int, aggregator: str) -> Any:
    from byzpg.config import Config

    shared: dict[str, Any] = {"num_agents": num_agents, "large_batch": 2, "num_seeds": 1, "horizon": 200}
    if method == "averaging":
        return Config(algorithm="Dec-PAGE-PG", num_byzantine=0, **shared)
    config = Config(num_byzantine=(num_agents - 1) // 5, attack="AvgZero", aggregator=aggregator, **shared)
    if method == "server":
        return replace(config, algorithm="ByzPG")
    return replace(config, agreement=method, rounds=1)


def measure_agents(method: str, num_agents: int, aggregator: str, iterations: int) -> None:
    import jax

    simulation = simulated(method_config(method, num_agents, aggregator))
    seconds = timed(simulation, iterations, 3)
    print(json.dumps({"seconds": seconds, "peak": peak_memory(), "device": jax.devices()[0].device_kind}))


def measure_rule(name: str, num_agents: int) -> None:
    """Print the seconds of one rule at one receiver that holds K vectors, a fifth of them from attackers."""
    import jax

    from byzpg._registry import parse

    family = "agreement" if name in ("MDA", "GDA") else "aggregator"
    rule, num_byzantine = parse(family, name), (num_agents - 1) // 5
    rows = jax.random.normal(jax.random.key(0), (num_agents, DIMENSION))
    rows = rows.at[num_agents - num_byzantine :].set(-rows.mean(axis=0))
    own = {"own": 0} if family == "agreement" else {}
    seconds = []
    for _ in range(11):
        started = time.perf_counter()
        jax.block_until_ready(rule(rows, num_byzantine=num_byzantine, **own))  # pyright: ignore[reportCallIssue]
        seconds.append(time.perf_counter() - started)
    print(json.dumps(statistics.median(seconds[1:])))


def rounds_of(method: str, num_agents: int, aggregator: str) -> list[tuple[str, int]]:
    """The rules of an iteration, each with the number of receivers that hold different vectors.

    The attack sends the same to all, so that all honest receivers hold the same vectors. An attacker also holds its own
    honest vector. GDA depends on the receiver's own vector, so that its result differs at every receiver.
    """
    different = 1 + (num_agents - 1) // 5
    return {
        "averaging": [],
        "server": [(aggregator, 1)],
        "MDA": [(aggregator, different), ("MDA", different)],
        "GDA": [(aggregator, different), ("GDA", num_agents)],
    }[method]


def agents(arguments: argparse.Namespace) -> None:
    print("| K | method | receivers | s per iteration | sizing | measured / sizing | peak memory |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    rules: dict[tuple[str, int], float] = {}
    play, device = 0.0, ""
    for size in arguments.sizes:
        for method in METHODS:
            now = result(child("one", method, str(size), arguments.aggregator, str(5 if size < 1000 else 1)))
            if method == "averaging" and size == arguments.sizes[0]:
                play, device = now["seconds"] / size, now["device"]
            expected, at = play * size, 0
            for rule, number in rounds_of(method, size, arguments.aggregator):
                if (rule, size) not in rules:
                    rules[rule, size] = result(child("rule", rule, str(size)))
                expected, at = expected + number * rules[rule, size], at + number
            figures = f"{now['seconds']:.3g} | {expected:.3g} | {now['seconds'] / expected:.2f}"
            print(f"| {size:,} | {method} | {at:,} | {figures} | {now['peak'] / 2**20:,.0f} MiB |", flush=True)
    print(f"\n{device}, {os.cpu_count()} cores, aggregator {arguments.aggregator}, d = {DIMENSION}\n")

    size = arguments.sizes[-1]
    print(f"| K = {size:,}, on real links | messages | MB per agent | MB of server | link, s | rules, s | play, s |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for method in METHODS[1:]:
        rules_seconds = sum(rules[rule, size] for rule, _ in rounds_of(method, size, arguments.aggregator))
        if method == "server":
            messages, agent, server = 2 * size, 4 * DIMENSION, 4 * DIMENSION * size
        else:
            messages, agent, server = 2 * size * (size - 1), 2 * (size - 1) * 4 * DIMENSION, 0
        # A link has the same speed in both directions; its busier end limits it.
        link = 8 * max(agent, server) / LINK
        figures = f"{agent / 1e6:.3g} | {server / 1e6:.3g} | {link:.3g} | {rules_seconds:.3g} | {play:.2g}"
        print(f"| {method} | {messages:,} | {figures} |", flush=True)


def peak_memory() -> int:
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return device.memory_stats()["peak_bytes_in_use"]


def measure_peers(method: str, attack: str, num_agents: int, num_byzantine: int) -> None:
    from byzpg.federation.devices import Hardware
    from byzpg.federation.simulator import LARGE

    Hardware().start()
    config = method_config(method, num_agents, "TrimmedMean")
    simulation = simulated(replace(config, attack=attack, num_byzantine=num_byzantine))
    states, seconds = simulation.start(), []
    for _ in range(4):
        started = time.perf_counter()
        states, _ = simulation.run(states, [LARGE], -1, only_large=True)
        seconds.append(time.perf_counter() - started)
    compiled, later = seconds[0], statistics.median(seconds[1:])
    print(json.dumps({"seconds": later, "compile": compiled - later, "peak": peak_memory()}))


def peers(arguments: argparse.Namespace) -> None:
    print("| K | f | agreement | attack | s per iteration | of 10 s | compilation, s | peak memory | of 4 GiB |")
    print("|---:|---:|---|---|---:|---:|---:|---:|---:|")
    size = arguments.size
    for method, most in (("MDA", (size - 1) // 4), ("GDA", (size - 1) // 5)):
        for num_byzantine in (size // 10, most):
            for attack in ATTACKS:
                case = ("peer", method, attack, str(size), str(num_byzantine))
                now = result(child(*case, JAX_ENABLE_COMPILATION_CACHE="false"))
                speed = f"{now['seconds']:.3g} | {now['seconds'] / MOST_SECONDS:.0%} | {now['compile']:.0f}"
                memory = f"{now['peak'] / 2**20:,.0f} MiB | {now['peak'] / MOST_BYTES:.0%}"
                print(f"| {size:,} | {num_byzantine} | {method} | {attack} | {speed} | {memory} |", flush=True)


# Large policies

SHARDS = (1, 2, 4, 8)
VECTORS_AT_REST = 6  # of an agent: parameters, previous parameters, direction, two of Adam, output
SHEET = {"NVIDIA H200": 4.8e12}  # bytes/s of the memory
MEMORY = 139 * 2**30  # of an H200
NVLINK = 450e9  # bytes/s in each direction, between H200s of one machine
LARGE_RULES = ("Mean", "Median", "NNM(TrimmedMean)", "RFA", "MDA")


def measure_shards(num_devices: int, num_agents: int, width: int, path: str) -> None:
    import numpy as np

    from byzpg.config import Config
    from byzpg.federation import devices
    from byzpg.federation.simulator import LARGE

    devices.Hardware(num_devices).start()
    devices.MOST_BYTES_ON_EACH = 0
    config = Config(
        num_agents=num_agents,
        num_byzantine=(num_agents - 1) // 4,
        attack="AvgZero",
        aggregator="NNM(TrimmedMean)",
        agreement="MDA",
        hidden=(width, width),
        rounds=1,
        horizon=50,
        large_batch=4,
        num_seeds=1,
    )
    simulation = simulated(config)
    memory = simulation.compiled([LARGE], only_large=True).memory_analysis()
    states, seconds = simulation.start(), []
    start = simulation.fetched(states)[0].agents.parameters
    for _ in range(4):
        started = time.perf_counter()
        states, _ = simulation.run(states, [LARGE], -1, only_large=True)
        seconds.append(time.perf_counter() - started)
    parameters = simulation.fetched(states)[0].agents.parameters
    np.save(path, parameters - start)
    written = memory.output_size_in_bytes - memory.alias_size_in_bytes
    sizes = [memory.argument_size_in_bytes, memory.temp_size_in_bytes, written]
    print(json.dumps({"sizes": sizes, "seconds": min(seconds[1:]), "dimension": parameters.shape[2]}))


def shards(arguments: argparse.Namespace) -> None:
    import numpy as np

    print("| K | d | devices | arguments, MiB | temporaries, MiB | outputs, MiB | of one device | s | difference |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for size in arguments.sizes:
        alone: Any = None
        for number in SHARDS:
            with tempfile.TemporaryDirectory() as folder:
                path = f"{folder}/parameters.npy"
                now = result(child("shard", str(number), str(size), str(arguments.width), path))
                moved = np.load(path)
            alone = alone or (now, moved)
            share = sum(now["sizes"]) / sum(alone[0]["sizes"])
            sizes = " | ".join(f"{each / 2**20:.1f}" for each in now["sizes"])
            difference = np.linalg.norm(moved - alone[1]) / np.linalg.norm(alone[1])
            figures = f"{sizes} | {share:.0%} | {now['seconds']:.2f} | {difference:.1g}"
            print(f"| {size} | {now['dimension']:,} | {number} | {figures} |", flush=True)
    print("\nDifference: from where one device gets in four iterations, divided by how far that is.")


def measure_large(name: str, num_agents: int, dimension: int) -> None:
    """Print the seconds of one exchange, with and without diagnostics, and the memory that it takes."""
    import jax

    from byzpg._registry import parse
    from byzpg.robust import AvgZero
    from byzpg.robust.exchange import exchange

    rule: Any = parse("agreement" if name == "MDA" else "aggregator", name)
    num_byzantine = (num_agents - 1) // 4
    vectors = jax.block_until_ready(
        jax.jit(lambda key: jax.random.normal(key, (num_agents, dimension)))(jax.random.key(0))
    )

    def program(diagnose: bool) -> Any:
        options: dict[str, Any] = {"attack": AvgZero(), "num_byzantine": num_byzantine, "diagnose": diagnose}
        byzantine = list(range(num_agents - num_byzantine, num_agents))
        return jax.jit(lambda rows: exchange(rule, rows, byzantine=byzantine, **options)).lower(vectors).compile()

    def seconds_of(function: Any) -> float:
        """The best of several series of calls; a series waits only for its last call."""
        calls, found = 1 if device.platform == "cpu" else 20, []
        outcome = jax.block_until_ready(function(vectors))
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(calls):
                outcome = function(vectors)
            jax.block_until_ready(outcome)
            found.append((time.perf_counter() - started) / calls)
        return min(found)

    device = jax.devices()[0]
    plain, diagnosed = program(False), program(True)
    jax.block_until_ready(diagnosed(vectors))
    peak = peak_memory()
    seconds = [seconds_of(plain), seconds_of(diagnosed)]
    copy = 2 * vectors.nbytes / seconds_of(jax.jit(lambda rows: 2 * rows))
    temporaries = diagnosed.memory_analysis().temp_size_in_bytes / vectors.nbytes
    print(
        json.dumps(
            {"seconds": seconds, "peak": peak, "copy": copy, "temporaries": temporaries, "device": device.device_kind}
        )
    )


def large(arguments: argparse.Namespace) -> None:
    agents, dimension = arguments.agents, arguments.dimension
    cases = {name: result(child("exchange", name, str(agents), str(dimension))) for name in LARGE_RULES}
    device = cases["Mean"]["device"]
    copy: float = max(case["copy"] for case in cases.values())
    bandwidth = arguments.bandwidth or SHEET.get(str(device), copy)
    limit = 2 * 4 * agents * dimension / bandwidth  # each vector is read, and each result is written
    print("| rule | s per exchange | of the limit | with diagnostics, s | of the limit | temporaries, Kd | peak, MiB |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, case in cases.items():
        figures = " | ".join(f"{seconds:.3g} | {seconds / limit:.1f}×" for seconds in case["seconds"])
        print(f"| {name} | {figures} | {case['temporaries']:.1f} | {case['peak'] / 2**20:,.0f} |")
    print(
        f"\n{device}, K = {agents}, d = {dimension:,}. Limit: {limit:.3g} s at {bandwidth / 1e12:.3g} TB/s. "
        f"Scaling the vectors reaches {copy / 1e12:.3g} TB/s.\n"
    )

    size, number = arguments.sizing, arguments.devices
    vector = 4 * size
    rest = VECTORS_AT_REST * agents * vector / number
    temporaries = max(case["temporaries"] for case in cases.values()) * agents * vector / number
    players = -(-agents // number)
    play = 5 * players * vector  # θ_t, θ_{t−1}, v̂_{t−1}, the gradient, and one more while it is summed up
    needed = max(temporaries, play) + rest
    ratio = max(case["seconds"][1] for case in cases.values()) / limit
    exchange_seconds = ratio * 2 * agents * vector / number / bandwidth
    sent = players * vector * (number - 1) / number
    print(f"| d = {size:,}, K = {agents}, {number} devices | of one device |")
    print("|---|---:|")
    print(f"| state of an agent, all its coordinates | {VECTORS_AT_REST * vector / 2**30:.2f} GiB |")
    print(f"| state of all agents, coordinates of one device | {rest / 2**30:.2f} GiB |")
    print(f"| temporaries of an exchange | {temporaries / 2**30:.2f} GiB |")
    print(f"| whole vectors of the {players} agents that it plays for | {play / 2**30:.2f} GiB |")
    print(f"| memory needed (H200: {MEMORY / 2**30:.0f} GiB) | {needed / 2**30:.2f} GiB, {needed / MEMORY:.0%} |")
    print(f"| an exchange, {ratio:.1f}× the limit | {1000 * exchange_seconds:.2f} ms |")
    print(f"| parameters to players, or gradients back, over NVLink | {1000 * sent / NVLINK:.2f} ms |")


# Two processes that act as one


def measure_devices(num_seeds: int, num_agents: int, port: int, processes: int, process: int) -> None:
    from byzpg.config import ADAM_BEHIND_RULE, Config
    from byzpg.federation.devices import Hardware

    several = (f"127.0.0.1:{port}", processes, process) if processes > 1 else (None, None, None)
    Hardware(1, *several).start()
    config = Config(num_agents=num_agents, num_seeds=num_seeds, attack="LargeNoise", large_batch=15, **ADAM_BEHIND_RULE)
    simulation = simulated(config)
    shape = tuple(simulation._mesh().shape.values())
    print(json.dumps({"seconds": timed(simulation, 8, 5), "mesh": shape}))


def devices(arguments: argparse.Namespace) -> None:
    from byzpg.live.links import free_ports

    print("| seeds | agents | divided among devices | one process, s | two, s | speed-up | parallel efficiency |")
    print("|---:|---:|---|---:|---:|---:|---:|")
    for num_seeds, num_agents in ((4, 13), (1, 13), (1, 40)):
        case = ["part", str(num_seeds), str(num_agents), str(free_ports(1)[0])]
        alone = result(child(*case, "1", "0", core=0))
        pair = [result(each) for each in [child(*case, "2", str(process), core=process) for process in range(2)]]
        both = max(each["seconds"] for each in pair)
        divided = "seeds" if pair[0]["mesh"][0] > 1 else "agents"
        ratio = alone["seconds"] / both
        figures = f"{alone['seconds']:.3f} | {both:.3f} | {ratio:.2f}× | {ratio / 2:.0%}"
        print(f"| {num_seeds} | {num_agents} | {divided} | {figures} |", flush=True)


# Flower and Ray

FLOWER: dict[str, Any] = {"env": "CartPole-v1", "algorithm": "ByzPG", "num_agents": 4, "num_byzantine": 1, "seed": 0}
CELLS = 12
GRID = f"""
algorithm = "ByzPG"
num_agents = 13
num_byzantine = 3
num_seeds = 1
trajectories = 600
[grid]
seed = {list(range(CELLS))}
"""


def measure_bare(kind: str) -> None:
    """The baseline of `engines`: the seconds of an iteration of Flower's federation, or of all cells of the grid."""
    from byzpg import training
    from byzpg.config import Config
    from byzpg.experiments import sweeps
    from byzpg.federation.devices import Hardware

    Hardware(1).start()
    if kind == "flower":
        simulation = simulated(Config(**FLOWER, num_attackers=0, num_seeds=1))
        print(json.dumps(timed(simulation, 1, 30)))  # one iteration at a time, as with Flower
        return
    with tempfile.TemporaryDirectory() as folder:
        grid = Path(folder) / "grid.toml"
        grid.write_text(GRID)
        cells = sweeps.Sweep.load(grid).cells
        config = [Config.of(cell.settings.as_data(), "grid") for cell in cells]
        started = time.perf_counter()
        runs = [training.train(each, Path(folder) / str(number)) for number, each in enumerate(config)]
        seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "iterations": int(max(runs[0].num_iterations))}))


def flower_round(folder: Path, secure: bool, rounds: tuple[int, int]) -> float:
    """The seconds of a Flower round."""
    from references.flower_deployment import deployment

    with deployment(folder, tls=secure) as made:
        if secure:
            made.start_secure_superlink()
            made.start_nodes(FLOWER["num_agents"])
        else:
            made.start_superlink("--insecure", "--simulation")
        federation = [] if secure else ["--federation-config", f"num-supernodes={FLOWER['num_agents']}"]
        seconds = []
        for number in (1, *rounds):  # the first run compiles
            started = time.perf_counter()
            made.run(*federation, **FLOWER, trajectories=15 * number)
            seconds.append(time.perf_counter() - started)
    return (seconds[2] - seconds[1]) / (rounds[1] - rounds[0])


def engines(arguments: argparse.Namespace) -> None:
    bare = result(child("bare", "flower"))
    print("| an iteration of ByzPG, 4 workers, 15 episodes each, CartPole-v1 | s | over the bare simulator |")
    print("|---|---:|---:|")
    print(f"| bare simulator | {bare:.4f} | |", flush=True)
    for name, secure, rounds in (("Flower, simulation", False, (3, 23)), ("Flower, deployment", True, (2, 8))):
        with tempfile.TemporaryDirectory() as folder:
            seconds = flower_round(Path(folder), secure, rounds)
        print(f"| {name} | {seconds:.3f} | +{seconds - bare:.3f} s |", flush=True)

    print(f"\n| {CELLS} cells, 13 workers, one core | total, s | added per cell, s | added per iteration, ms |")
    print("|---|---:|---:|---:|")
    environment = {"NPROC": "1", "JAX_NUM_CPU_DEVICES": "1"}
    one = result(child("bare", "grid", core=0, **environment))
    print(f"| one process, one cell after the other | {one['seconds']:.1f} | | |", flush=True)
    for engine in ("local", "ray"):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "grid.toml").write_text(GRID)
            command = [sys.executable, "-m", "byzpg", "sweep", "grid.toml", "--engine", engine, "--workers", "1"]
            started = time.perf_counter()
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
            seconds = time.perf_counter() - started
        over = (seconds - one["seconds"]) / CELLS
        print(f"| {engine} | {seconds:.1f} | {over:+.2f} | {1000 * over / one['iterations']:+.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("agents")
    command.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    command.add_argument("--aggregator", default="TrimmedMean")
    command.set_defaults(run=agents)
    command = commands.add_parser("peers")
    command.add_argument("--size", type=int, default=SIZES[-1])
    command.set_defaults(run=peers)
    command = commands.add_parser("peer")  # a case of `peers`
    command.add_argument("case", nargs=4)
    command.set_defaults(
        run=lambda given: measure_peers(given.case[0], given.case[1], int(given.case[2]), int(given.case[3]))
    )
    command = commands.add_parser("shards")
    command.add_argument("--sizes", type=int, nargs="+", default=(8, 13), help="K")
    command.add_argument("--width", type=int, default=512, help="of both hidden layers")
    command.set_defaults(run=shards)
    command = commands.add_parser("large")
    command.add_argument("--dimension", type=int, default=10**7)
    command.add_argument("--agents", type=int, default=13)
    command.add_argument("--bandwidth", type=float, help="bytes/s; default: that of the data sheet, or of a copy")
    command.add_argument("--sizing", type=int, default=10**8, help="d of the sizing")
    command.add_argument("--devices", type=int, default=8, help="of the sizing")
    command.set_defaults(run=large)
    command = commands.add_parser("devices")
    command.set_defaults(run=devices)
    command = commands.add_parser("engines")
    command.set_defaults(run=engines)
    command = commands.add_parser("bare")  # a case of `engines`
    command.add_argument("case")
    command.set_defaults(run=lambda given: measure_bare(given.case))
    command = commands.add_parser("one")  # a case of `agents`
    command.add_argument("case", nargs=4)
    command.set_defaults(
        run=lambda given: measure_agents(given.case[0], int(given.case[1]), given.case[2], int(given.case[3]))
    )
    command = commands.add_parser("rule")  # a part of the sizing
    command.add_argument("case", nargs=2)
    command.set_defaults(run=lambda given: measure_rule(given.case[0], int(given.case[1])))
    command = commands.add_parser("shard")  # a case of `shards`
    command.add_argument("case", nargs=4)
    command.set_defaults(
        run=lambda given: measure_shards(int(given.case[0]), int(given.case[1]), int(given.case[2]), given.case[3])
    )
    command = commands.add_parser("exchange")  # a case of `large`
    command.add_argument("case", nargs=3)
    command.set_defaults(run=lambda given: measure_large(given.case[0], int(given.case[1]), int(given.case[2])))
    command = commands.add_parser("part")  # a process of `devices`
    command.add_argument("case", type=int, nargs=5)
    command.set_defaults(run=lambda given: measure_devices(*given.case))
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
