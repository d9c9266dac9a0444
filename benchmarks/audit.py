"""The leaderboards of docs/results/audit.md: rules under their worst attacks, on several tasks.

    python benchmarks/audit.py run --parts 3     # all of them, each in three processes side by side
    python benchmarks/audit.py run --boards pendulum lander --parts 3
    python benchmarks/audit.py known             # all known attacks on the seeds that are reported, for comparison
    python benchmarks/audit.py show              # the tables, and the picture and numbers of docs/results

Every leaderboard is one `byzpg audit` command, which `run` prints. Most of its time is compilation, so that `run` first
gives parts of the rules to processes of their own, all into one directory, and then calls the command itself, which
finds their measurements. On a GPU, start CUDA's Multi-Process Service first (`nvidia-cuda-mps-control -d`), without
which the processes take turns, and set XLA_PYTHON_CLIENT_PREALLOCATE=false. Baseline: an honest federation that
averages, to which all losses are relative.
"""

import argparse
import json
import shlex
import subprocess
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D

from byzpg import Config
from byzpg._files import write_atomically
from byzpg.cli.audit import LEADERBOARD
from byzpg.config import REPORTED_SEED
from byzpg.experiments.audit import Audit, Honest, Plan
from byzpg.experiments.figures import COLOURS, save

NINE = "Mean Median TrimmedMean Krum MultiKrum MDA RFA CenteredClipping(radius=10.0) NNM(TrimmedMean())"
EIGHT = "Median TrimmedMean Krum MultiKrum RFA CAF MoNNA NNM(TrimmedMean())"
MUJOCO = "Mean Median TrimmedMean MeaMed Krum MultiKrum RFA CenteredClipping(radius=10.0) NNM(TrimmedMean())"
SHORT = "--algorithm ByzPG --trajectories 300 --generations 3"
PENDULUM = "--env Pendulum-v1 --algorithm ByzPPO --steps 20480 --report-seeds 10 --known"
LANDER = "--env LunarLander-v3 --algorithm ByzPPO --steps 61440 --generations 1 --report-seeds 10 --known"
TWENTY = "--search-seeds 4 --report-seeds 20 --known"
CARTPOLE = f"--algorithm ByzPPO --steps 20480 --generations 3 {TWENTY}"
FIXED = "--no-breaking-point"
NO_MOMENTUM = f"--momentum 0 {FIXED}"
# Rules, and the other options of `byzpg audit`.
BOARDS = {
    "known": (NINE, f"{SHORT} --search-seeds 32 --report-seeds 40 {FIXED}"),
    "cartpole": ("all", f"{SHORT} {TWENTY}"),
    "cartpole-others": ("SMEA FedPGFilter Clipping(TrimmedMean(),threshold=10.0)", f"{SHORT} {TWENTY}"),
    "cartpole-0": ("all", f"{SHORT} {TWENTY} {NO_MOMENTUM}"),
    "cartpole-ppo": ("all", CARTPOLE),
    "cartpole-ppo-0": ("all", f"{CARTPOLE} {NO_MOMENTUM}"),
    "pendulum": ("all", f"{PENDULUM} --generations 3"),
    "lander": ("all", f"{LANDER} {FIXED}"),
    "lander-0": ("all", f"{LANDER} {NO_MOMENTUM}"),
    "mujoco": (
        MUJOCO,
        "--env envpool:InvertedPendulum-v4 --algorithm ByzPPO --steps 16384 --generations 1 --population 6 "
        f"--search-seeds 1 --report-seeds 5 --known {FIXED}",
    ),
    "cartpole-5": (EIGHT, f"{SHORT} {TWENTY} --num-agents 5 --num-byzantine 1 {FIXED}"),
    "cartpole-27": (f"{EIGHT} Bulyan", f"{SHORT} {TWENTY} --num-agents 27 --num-byzantine 6 {FIXED}"),
    "pendulum-5": (EIGHT, f"{PENDULUM} --generations 2 --num-agents 5 --num-byzantine 1 {FIXED}"),
    "pendulum-27": (f"{EIGHT} Bulyan", f"{PENDULUM} --generations 2 --num-agents 27 --num-byzantine 6 {FIXED}"),
}
# The panels of the picture: a title, and the leaderboards with and without momentum.
PANELS = {
    "CartPole, ByzPG": ("cartpole", "cartpole-0"),
    "CartPole, ByzPPO": ("cartpole-ppo", "cartpole-ppo-0"),
    "Pendulum, ByzPPO": ("pendulum",),
    "LunarLander, ByzPPO": ("lander", "lander-0"),
    "InvertedPendulum, ByzPPO": ("mujoco",),
}
RESULTS = Path(__file__).parent.parent / "docs" / "results"


def command(name: str, directory: Path, rules: list[str] | None = None) -> list[str]:
    audited, options = BOARDS[name]
    rules = audited.split() if rules is None else rules
    words = ["byzpg", "audit", "--aggregator", *rules, *options.split(), "--budget", "none"]
    return [*words, "--directory", str(directory / name)]


def run(names: list[str], directory: Path, parts: int) -> None:
    """Carry out audits one after the other, each in `parts` processes at once."""
    for name in names:
        started = time.monotonic()
        rules = BOARDS[name][0].split()
        if rules == ["all"]:  # all leaderboards of all rules have K = 13 and f = 3
            rules = [rule for rule in LEADERBOARD if rule != "Bulyan"]
        several = [rules[part::parts] for part in range(min(parts, len(rules)))] if parts > 1 else []
        processes = [subprocess.Popen(command(name, directory, each), stdout=subprocess.DEVNULL) for each in several]
        failed = [process.wait() for process in processes]
        if any(failed):
            raise SystemExit(f"a part of {name} failed: see above")
        print(shlex.join(command(name, directory)), flush=True)
        subprocess.run(command(name, directory), check=True)
        print(f"{name} took {time.monotonic() - started:.0f} s.", flush=True)


def known(directory: Path) -> None:
    """How harmful the worst of all known attacks is on the seeds that are reported, next to what the audit chose."""
    found = json.loads((directory / "known" / "audit.json").read_text())["rules"]
    config = Config(algorithm="ByzPG", trajectories=300, num_agents=13, num_byzantine=3)
    plan = Plan(config, tuple(row["rule"] for row in found), report_seeds=found[0]["seeds"])
    audit = Audit(plan, directory / "known")
    honest = Honest(audit.bench.measure([plan.honest(REPORTED_SEED, plan.report_seeds)], "")[0])

    def lost(rule: str, attacks: list[str]) -> np.ndarray:
        configs = [plan.federation(rule, attack, REPORTED_SEED, plan.report_seeds) for attack in attacks]
        return np.asarray([honest.measured(result).lost for result in audit.bench.measure(configs, rule)])

    print("| rule | found | worst of all known | difference |\n|---|---:|---:|---:|")
    for row in found:
        (chosen,), of_known = lost(row["rule"], [row["worst_attack"]]), lost(row["rule"], audit.known)
        worst = int(np.argmax(of_known.mean(1)))
        gap = chosen - of_known[worst]
        error = 1.96 * gap.std(ddof=1) / np.sqrt(len(gap))
        print(
            f"| `{row['rule']}` | {chosen.mean():.1%} | {audit.known[worst]}, {of_known[worst].mean():.1%} "
            f"| {100 * gap.mean():+.1f} ± {100 * error:.1f} |",
            flush=True,
        )


def show(directory: Path) -> None:
    """Print the tables of what was run, and draw the picture of that and of what is stored."""
    stored = RESULTS / "audit.json"
    boards = json.loads(stored.read_text()) if stored.is_file() else {}
    for name in BOARDS:
        path = directory / name / "audit.json"
        if path.is_file():
            print(f"{shlex.join(command(name, directory))}\n\n{(path.parent / 'audit.md').read_text()}")
            boards[name] = json.loads(path.read_text())["rules"]
    boards = {name: boards[name] for name in BOARDS if name in boards}
    rows = {name: ",\n".join(json.dumps(row, ensure_ascii=False) for row in board) for name, board in boards.items()}
    text = "{\n" + ",\n".join(f'"{name}": [\n{text}\n]' for name, text in rows.items()) + "\n}\n"  # a line per rule
    write_atomically(stored, lambda file: file.write(text.encode()))
    draw({name: {row["rule"]: row for row in board} for name, board in boards.items()})


def draw(boards: dict[str, dict[str, dict]]) -> None:
    """What rules lose under their worst attacks, ordered by the mean over the panels that all rules are in."""
    panels = {title: names for title, names in PANELS.items() if names[0] in boards}
    of_all = [names[0] for names in panels.values() if BOARDS[names[0]][0] == "all"]
    rules = [rule for rule in boards[of_all[0]] if rule != "Mean()"]
    rules.sort(key=lambda rule: -np.mean([boards[name][rule]["lost"]["value"] for name in of_all]))
    figure, axes = plt.subplots(1, len(panels), figsize=(2.6 * len(panels), 4.6), sharey=True, layout="constrained")
    for axis, (title, names) in zip(axes, panels.items(), strict=True):
        for name, colour, shift in zip(names, COLOURS, (0.12, -0.12), strict=False):
            for place, rule in enumerate(rules):
                if rule in boards[name]:
                    lost = boards[name][rule]["lost"]
                    low, middle, high = (100 * lost[each] for each in ("low", "value", "high"))
                    axis.plot([low, high], [place + shift] * 2, color=colour, linewidth=1.2)
                    axis.plot(middle, place + shift, "o", color=colour, markersize=4)
        axis.set_title(title, fontsize=10)
        axis.set_xlim(-5, 105)
        axis.set_xlabel("learning lost, %")
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(rules)), [rule.replace("()", "") for rule in rules], fontsize=8)
    marks = [Line2D([], [], color=colour, marker="o", markersize=4) for colour in COLOURS[:2]]
    figure.legend(marks, ["with momentum", "without momentum"], loc="outside upper right", ncols=2, fontsize=9)
    save(figure, RESULTS / "figures" / "audit.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "known", "show"])
    parser.add_argument("--boards", nargs="+", choices=list(BOARDS), default=list(BOARDS))
    parser.add_argument("--parts", type=int, default=1, help="processes for each leaderboard (default: 1)")
    parser.add_argument("--directory", type=Path, default=Path("audits"))
    arguments = parser.parse_args()
    if arguments.what == "run":
        run(arguments.boards, arguments.directory, arguments.parts)
    elif arguments.what == "known":
        known(arguments.directory)
    else:
        show(arguments.directory)


if __name__ == "__main__":
    main()
