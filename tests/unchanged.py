"""Whether a change of the code changes results: records small runs of all algorithms and engines, and compares them.

    python tests/unchanged.py record before        # with the code as it was
    python tests/unchanged.py record after         # with the code as it is
    python tests/unchanged.py compare before after

Every metrics.npz and parameters.npz must be equal to the bit. Recording takes about 15 minutes on two cores.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

NAMES = ("alice", "bob", "carol", "dave", "erin")


def options(text: str) -> list[str]:
    """Words of a command line; `a=b` stands for `--a b`."""
    return [word for pair in text.split() for word in (f"--{pair.partition('=')[0]}", pair.partition("=")[2])]


SMALL = options("num-agents=5 num-seeds=2 horizon=60 large-batch=6 small-batch=3 trajectories=40 hidden=8")
SMALL += options("switch-probability=0.5")
LANDER = options("num-agents=5 num-seeds=1 horizon=40 large-batch=4 small-batch=2 trajectories=10")
LIVE = options(
    "horizon=40 large-batch=5 small-batch=3 trajectories=20 switch-probability=0.5 rounds=2 hidden=8 grace=600"
)
DECENTRALIZED = ["--algorithm", "DecByzPG", *SMALL]
SWEEP = """num_agents = 3
num_byzantine = 1
hidden = [4]
horizon = 20
large_batch = 3
num_seeds = 1
trajectories = 9
algorithm = "ByzPG"
[grid]
attack = ["AvgZero", "SignFlip"]
seed = [0, 1]
"""


def training_runs() -> dict[str, list[str]]:
    """The options of `byzpg train`, by name."""
    runs = {
        f"{algorithm}-{preset}": ["--algorithm", algorithm, "--preset", preset, *SMALL]
        + (["--num-agents", "1"] if algorithm == "PAGE-PG" else [])
        for algorithm in ("PAGE-PG", "Fed-PAGE-PG", "ByzPG", "Dec-PAGE-PG", "DecByzPG")
        for preset in ("tuned", "paper", "theory", "script")
    }
    for attack in ("RandomAction", "RewardFlip", "LargeNoise", "Dissensus", "OptimalALIE", "Silent", "MinMax"):
        runs[f"attack-{attack}"] = [*DECENTRALIZED, "--attack", attack]
    for rule in ("Krum", "MDA", "CAF", "CenteredClipping", "MoNNA", "Bucketing(RFA())", "NNM(Krum())", "ARC(Median())"):
        runs[f"rule-{rule.partition('(')[0]}"] = [*DECENTRALIZED, "--aggregator", rule, "--attack", "IPM"]
    for rule, size in (("GDA", "7"), ("TrimmedMeanAgreement", "5"), ("NoAgreement", "5")):
        more = ["--num-agents", size, "--agreement", rule, "--attack", "SignFlip"]
        runs[f"agreement-{rule}"] = [*DECENTRALIZED, *more]
    return runs | {
        "more-attackers": [*DECENTRALIZED, "--num-attackers", "2", "--num-byzantine", "1", "--attack", "ALIE"],
        "rotating": [*DECENTRALIZED, "--byzantine-set", "RotatingSet(period=2)", "--gate", "health"],
        "sgd": [*DECENTRALIZED, "--optimizer", "sgd", "--output", "uniform", "--step-size", "0.01"],
        "per-decision": [*DECENTRALIZED, "--importance", "ImportanceWeights(mode='per-decision', cap=2.0)"],
        "pendulum": [*DECENTRALIZED, "--env", "Pendulum-v1"],
        "lander": ["--env", "LunarLander-v3", *LANDER],
        "lander-continuous": ["--env", "LunarLanderContinuous-v3", *LANDER],
        "host-gymnasium": [*DECENTRALIZED, "--env", "gymnasium:CartPole-v1"],
        "host-envpool": ["--algorithm", "ByzPG", *SMALL, "--env", "envpool:CartPole-v1"],
        "three-devices": [*DECENTRALIZED, "--devices", "3", "--num-seeds", "1", "--attack", "LargeNoise"],
        "defaults": ["--trajectories", "60", "--num-seeds", "2"],
    }


def byzpg(*arguments: object, folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "log.txt").open("ab") as log:
        line = [sys.executable, "-m", "byzpg", *map(str, arguments)]
        return subprocess.Popen(line, cwd=folder, stdout=log, stderr=subprocess.STDOUT)


def record(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder = folder.resolve()

    def run(*arguments: object) -> None:
        print("byzpg", *arguments, flush=True)
        assert byzpg(*arguments, folder=folder).wait() == 0, f"see {folder / 'log.txt'}"

    for name, given in training_runs().items():
        run("train", *given, "--no-compare", "--directory", folder / "train" / name)
    (folder / "grid.toml").write_text(SWEEP)
    for engine in ("local", "ray"):
        run("sweep", "grid.toml", "--engine", engine, "--directory", f"sweep-{engine}")
    run("reproduce", "fig2", *options("task=CartPole-v1 seeds=1 trajectories=45"), "--directory", "reproduce")
    record_live(folder, run)
    record_flower(folder / "flower")


def record_live(folder: Path, run: Callable[..., None]) -> None:
    """A federation of five members over real sockets, one of which attacks, with random numbers by a seed."""
    from live_federation import free_ports

    for name, port in zip(NAMES, free_ports(len(NAMES)), strict=True):
        run("keygen", "--name", name, "--address", f"127.0.0.1:{port}")
    cards = [f"{name}.card" for name in NAMES]
    run("federation", "new", *cards, "--num-byzantine", 1, "--rehearsal", *LIVE)
    peers = []
    for name in NAMES:
        attack = ("--attack", "SignFlip") if name == NAMES[-1] else ()
        line = ("peer", "federation.toml", "--name", name, "--seed", 3, "--directory", f"live/{name}", *attack)
        peers.append(byzpg(*line, folder=folder))
    assert [peer.wait() for peer in peers] == [0] * len(peers), f"see {folder / 'log.txt'}"


def record_flower(folder: Path) -> None:
    """ByzPG and plain averaging over Flower's messages, in this process."""
    tests = Path(__file__).parent
    sys.path += [str(tests / "engines"), str(tests.parent / "benchmarks" / "references")]
    import test_flower  # pyright: ignore[reportMissingImports]

    for name, value in (("_task_id", 1), ("_run_id", test_flower.RUN), ("_node_id", test_flower.SERVER)):
        setattr(test_flower.TaskIdentity, name, value)  # what Flower tells its processes about themselves
    attacked = {"rehearsal-attack": "AvgZero", "rehearsal-attackers": "3"}
    mean = {"algorithm": "Fed-PAGE-PG", "num-byzantine": 0}
    for name, given in {"ByzPG": {}, "attacked": attacked, "mean": mean}.items():
        (folder / name).mkdir(parents=True)
        test_flower.flower_run(folder / name, trajectories=30, **given)


def results(folder: Path) -> dict[str, Path]:
    """The files to compare. Some directories are named by a hash of all options, which may have been renamed."""
    found = {}
    for path in [*folder.rglob("metrics.npz"), *folder.rglob("parameters.npz")]:
        seed = json.loads((path.parent / "config.json").read_text())["seed"]
        found[re.sub(r"-[0-9a-f]{8}/", f"-seed-{seed}/", str(path.relative_to(folder)))] = path
    return found


def compare(before: Path, after: Path) -> int:
    ours, theirs = results(before), results(after)
    different = sorted(ours.keys() ^ theirs.keys())
    for name in ours.keys() & theirs.keys():
        with np.load(ours[name]) as one, np.load(theirs[name]) as other:
            same = sorted(one) == sorted(other) and all(
                (one[key].dtype, one[key].shape, one[key].tobytes())
                == (other[key].dtype, other[key].shape, other[key].tobytes())
                for key in one
            )
        different += [] if same else [name]
    print(*(f"different: {name}" for name in different), sep="\n")
    print(f"{len(ours.keys() | theirs.keys()) - len(different)} files are equal to the bit, {len(different)} are not.")
    return len(different) > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("record").add_argument("folder", type=Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    asked = parser.parse_args()
    sys.exit(record(asked.folder) if asked.command == "record" else compare(asked.before, asked.after))


if __name__ == "__main__":
    main()
