"""Named grids of runs: every figure of the paper, and experiments beyond it.

An experiment says which runs make up one figure. A `Grid` holds several experiments and the settings of every run that
they need; a run that several figures share is in it once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from importlib.resources import files
from itertools import chain
from json import dumps, loads
from pathlib import Path
from typing import Any, Literal

import numpy as np

from byzpg import envs
from byzpg.config import (
    ADAM_AT_AGENTS,
    ADAM_BEHIND_RULE,
    MUJOCO_TASKS,
    PRESETS,
    PRESETS_BY_TASK,
    REPORTED_SEED,
    Config,
    Settings,
)
from byzpg.federation.algorithms import ALGORITHMS
from byzpg.robust.components import unknown
from byzpg.runs import RunDirectory

CARTPOLE, LUNARLANDER = "CartPole-v1", "LunarLander-v3"
PAPER_ATTACKS = ("RandomAction", "LargeNoise", "AvgZero")
FIVE_ATTACKS = (*PAPER_ATTACKS, "ALIE", "Normalized")
PUBLISHED_LENGTH = 8000  # trajectories per agent

Kind = Literal["curves", "reach", "tolerance", "heatmap", "agreement"]


@dataclass(frozen=True)
class Cell:
    """The place of one run in a figure."""

    label: str  # of its line, or of its row
    run: str  # the name of the run
    at: str | int | None = None  # its place along the line (K, the number of attackers, κ), or its column


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    task: str
    cells: tuple[Cell, ...]
    published: tuple[str, str] | None = None  # the figure and the panel with the paper's curves
    level: float | None = None  # the return that counts as learned, if it is not that of the paper's figures


@dataclass(frozen=True)
class Experiment:
    """One figure, and the question it answers."""

    name: str
    title: str
    question: str
    kind: Kind
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Grid:
    """Experiments and the settings of every run in them, by name."""

    experiments: tuple[Experiment, ...]
    settings: Mapping[str, Settings]

    def create_runs(self, folder: Path) -> list[Path]:
        """Create the directory of every run that has none yet, and return all of them."""
        return create_runs(folder, self.settings)


def create_runs(folder: Path, settings: Mapping[str, Settings]) -> list[Path]:
    """Create the directory of every run, by name, that has none yet, and return all of them."""
    directories = [folder / name for name in settings]
    for path, each in zip(directories, settings.values(), strict=True):
        if not (path / "config.json").is_file():
            RunDirectory.create(path, each)
    return directories


@dataclass(frozen=True)
class Scope:
    """What all runs of a grid have in common. None stands for the experiment's own choice."""

    preset: Literal["tuned", "paper", "theory", "script"] = "tuned"
    num_seeds: int | None = None
    seed: int = REPORTED_SEED
    trajectories: int | None = None
    steps: int | None = None  # in place of trajectories, for algorithms with a critic


@cache
def _all_published_curves() -> dict[str, Any]:
    return loads((files("byzpg.experiments") / "published_curves.json").read_text(encoding="utf-8"))


def published_curves(figure: str, panel: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The published mean curves of a panel, by method: trajectories per agent, and returns where they are visible.

    They were read off the plots (arXiv 2401.03489); the error is about ±3 on CartPole and ±2 on LunarLander.
    """
    found = {}
    for method, curve in _all_published_curves()[figure][panel].items():
        trajectories, returns = (np.asarray(curve[axis], float) for axis in "xy")
        seen = np.isfinite(returns)
        found[method.replace("alpha", "α")] = trajectories[seen], returns[seen]
    return found


def run_name(settings: Settings) -> str:
    """The name of a run's directory: the main options, and a hash of all options."""
    digest = sha256(dumps(settings.as_data(), sort_keys=True).encode()).hexdigest()[:8]
    attackers = f"{settings.num_attackers}-{type(settings.attack).__name__}" if settings.num_attackers else "0"
    return f"{settings.task_in_names}-{settings.algorithm}-{settings.num_agents}-{attackers}-{digest}"


class _Builder:
    """Collects the settings of the runs while experiments are built."""

    def __init__(self, scope: Scope, task: str | None = None) -> None:
        self.scope = scope
        self.task = task  # for experiments that can be run on any task
        self.settings: dict[str, Settings] = {}

    def cell(
        self,
        label: str,
        at: str | int | None = None,
        *,
        seeds: int = 10,
        trajectories: int | None = None,
        untuned: int = PUBLISHED_LENGTH,
        **options: Any,
    ) -> Cell:
        """One run. `tuned`, whose steps get smaller, has a length of its own unless one is given; others, `untuned`."""
        scope = self.scope
        length: dict[str, Any] = {
            "trajectories": scope.trajectories or trajectories or (None if scope.preset == "tuned" else untuned)
        }
        if ALGORITHMS[options.get("algorithm", Config.algorithm)].agent.unit == "steps":
            length = {"steps": scope.steps}  # or those of the preset
        config = Config(preset=scope.preset, num_seeds=scope.num_seeds or seeds, seed=scope.seed, **length, **options)
        settings = config.resolved()
        name = run_name(settings)
        self.settings[name] = settings
        return Cell(label, name, at)


class _TextBuilder(_Builder):
    """Builds experiments without the settings of their runs."""

    def cell(self, label: str, at: str | int | None = None, **options: Any) -> Cell:
        return Cell(label, "", at)


# The paper's figures

# The estimator of `tuned` without the trace decay that it has on LunarLander.
UNDECAYED: dict[str, Any] = {"estimator": PRESETS["tuned"]["estimator"]}
# The settings of algorithms by others that learned fastest in `benchmarks/tuning.py cartpole-peers` and
# `lunarlander-peers`, within 2,000 and 2,500 trajectories. Unlike our own on CartPole, none was tried in longer runs.
_PEERS: dict[str, dict[str, dict[str, Any]]] = {
    CARTPOLE: {
        "SVRPG": {"large_batch": 24, "small_batch": 8, "step_size": 2e-2, "trajectories": 2000},
        "N-PG-IGT": {"large_batch": 6, "step_size": 3e-2, "trajectories": 2000},
        "FedPG-BR": {"large_batch": 15, "small_batch": 4, "step_size": 2e-2, "trajectories": 2000},
    },
    LUNARLANDER: {
        "SVRPG": {"large_batch": 45, "small_batch": 15, "step_size": 2e-3, "trajectories": 5000},
        "N-PG-IGT": {"large_batch": 30, "step_size": 6e-2, "trajectories": 5000},
        "FedPG-BR": {"large_batch": 45, "small_batch": 15, "step_size": 5e-3, "trajectories": 5000},
    },
}


def _same_estimator(build: _Builder) -> dict[str, Any]:
    """The estimator where algorithms are compared whose other settings were all chosen without a trace decay."""
    return UNDECAYED if build.scope.preset == "tuned" else {}


def _peer(build: _Builder, label: str, *, env: str, algorithm: str, **options: Any) -> list[Cell]:
    """The line of an algorithm by others, with its own tuned settings or those of the preset.

    Normalized steps have a length, which no step size of Adam says, so N-PG-IGT keeps its own. No theorem of the paper
    has a step size for these algorithms, so the preset `theory` leaves them out.
    """
    if build.scope.preset == "theory":
        return []
    tuned = _PEERS[env][algorithm]
    if build.scope.preset != "tuned":
        tuned = {"step_size": tuned["step_size"]} if algorithm == "N-PG-IGT" else {}
    return [build.cell(label, env=env, algorithm=algorithm, **tuned, **options, **_same_estimator(build))]


def _speedup(build: _Builder, *, algorithm: str, name: str, key: str) -> Experiment:
    def panel(title: str, env: str) -> Panel:
        shared: dict[str, Any] = {"env": env, **_same_estimator(build)}
        alone = build.cell("PAGE-PG K=1", algorithm="PAGE-PG", **shared)
        others = (
            build.cell(f"{algorithm} K={size}", algorithm=algorithm, num_agents=size, num_byzantine=0, **shared)
            for size in (5, 13)
        )
        peers = (_peer(build, f"{peer} K=1", env=env, algorithm=peer) for peer in ("SVRPG", "N-PG-IGT"))
        return Panel(title, env, (alone, *others, *chain.from_iterable(peers)), (key, title))

    return Experiment(
        name,
        f"{algorithm}: more agents learn faster",
        "All agents are honest. Do more agents need fewer trajectories each to reach a level?",
        "curves",
        (panel("CartPole", CARTPOLE), panel("LunarLander", LUNARLANDER)),
    )


def _attacks(build: _Builder, *, robust: str, plain: str, env: str, name: str, key: str) -> Experiment:
    def panel(attack: str) -> Panel:
        shared: dict[str, Any] = {"env": env, **_same_estimator(build)}
        attacked = shared | {"num_byzantine": 3, "attack": attack}
        cells = (
            build.cell("PAGE-PG K=1 α=0", algorithm="PAGE-PG", **shared),
            build.cell(f"{plain} K=13 α=0", algorithm=plain, num_byzantine=0, **shared),
            build.cell(f"{plain} K=13 α=3/13", algorithm=plain, **attacked),
            build.cell(f"{robust} K=13 α=3/13", algorithm=robust, **attacked),
        )
        label = "FedPG-BR K=13 α=3/13" + ("" if robust == "ByzPG" else ", with a server")
        peer = _peer(build, label, env=env, algorithm="FedPG-BR", num_byzantine=3, attack=attack)
        return Panel(attack, env, (*cells, *peer), (key, attack))

    return Experiment(
        name,
        f"{robust} under attack: {env}",
        f"3 of 13 agents attack. Does {robust} learn almost as well as without attackers, where {plain} does not?",
        "curves",
        tuple(map(panel, PAPER_ATTACKS)),
    )


# Beyond the paper


def _ablation(build: _Builder) -> Experiment:
    """The PAGE correction as printed, capped, gated and left out, at equal trajectories per agent."""
    variants: dict[str, dict[str, Any]] = {
        "PAGE as printed": {"importance": "ImportanceWeights()"},
        "PAGE, ω capped at 1": {"importance": "ImportanceWeights(cap=1.0)"},
        "PAGE, gated by health": {"importance": "ImportanceWeights()", "gate": "health"},
    }

    # By task: the batches of PAGE, the batch without it, the seeds and the trajectories per agent.
    batches = {CARTPOLE: {"large_batch": 50, "small_batch": 4}, LUNARLANDER: {"large_batch": 96, "small_batch": 32}}
    plain_batch = {CARTPOLE: 15, LUNARLANDER: 45}
    lengths = {CARTPOLE: {"seeds": 10, "trajectories": 2000}, LUNARLANDER: {"seeds": 3, "trajectories": 5000}}

    def panel(title: str, env: str, step_size: float) -> Panel:
        shared: dict[str, Any] = {"env": env, "step_size": step_size, "num_byzantine": 3, "attack": "AvgZero"}
        shared |= ADAM_BEHIND_RULE | lengths[env] | _same_estimator(build)
        page: dict[str, Any] = batches[env] | {"switch_probability": 0.2}
        if build.scope.preset == "script":  # the correction is the paper's in every preset
            page["conventions"] = "AuthorsScript(coin=False, memory=False)"
        cells = [build.cell(label, **shared, **page, **options) for label, options in variants.items()]
        plain = {"large_batch": plain_batch[env], "switch_probability": 1.0}
        cells.append(build.cell(f"p = 1, N = {plain_batch[env]}", **shared, **plain))
        return Panel(title, env, tuple(cells))

    return Experiment(
        "ablation",
        "When does the PAGE correction pay?",
        "DecByzPG with 3 of 13 agents attacking (AvgZero), at equal trajectories and step sizes.",
        "curves",
        (
            panel("CartPole, η = 2e-2", CARTPOLE, 2e-2),
            panel("CartPole, η = 5e-3", CARTPOLE, 5e-3),
            panel("LunarLander, η = 5e-3", LUNARLANDER, 5e-3),
            panel("LunarLander, η = 1e-3", LUNARLANDER, 1e-3),
        ),
    )


# The best that `benchmarks/tuning.py` found with and without momentum, out of the same choices for both. A trace decay
# was not among them.
_WITH_MOMENTUM = {env: PRESETS_BY_TASK["tuned"][env] | UNDECAYED for env in (CARTPOLE, LUNARLANDER)}
_WITHOUT_MOMENTUM = {
    CARTPOLE: _WITH_MOMENTUM[CARTPOLE] | {"momentum": 0.0},
    LUNARLANDER: _WITH_MOMENTUM[LUNARLANDER] | {"momentum": 0.0, "large_batch": 45},
}


def _momentum(build: _Builder) -> Experiment:
    """The best settings with momentum against the best ones without it."""

    def panel(title: str, env: str, attack: str) -> Panel:
        shared: dict[str, Any] = {"env": env, "attack": attack, "num_byzantine": 3}
        settings = {
            f"momentum {_WITH_MOMENTUM[env]['momentum']:g}": _WITH_MOMENTUM[env],
            "no momentum": _WITHOUT_MOMENTUM[env],
        }
        cells = [
            build.cell(f"{label}, N = {options['large_batch']}", **shared, **options)
            for label, options in settings.items()
        ]
        return Panel(f"{title}, {attack}", env, tuple(cells))

    return Experiment(
        "momentum",
        "Momentum at the agents",
        "DecByzPG with 3 of 13 agents attacking. Does a mean over time of each agent's own gradients, taken before "
        "aggregation, save trajectories? Batch, step size and decay of both sides come from the same choices.",
        "curves",
        (
            *(panel("CartPole", CARTPOLE, attack) for attack in FIVE_ATTACKS),
            *(panel("LunarLander", LUNARLANDER, attack) for attack in PAPER_ATTACKS),
        ),
    )


def _traces(build: _Builder) -> Experiment:
    """The whole `tuned` preset on LunarLander: the paper's figures leave out its trace decay."""
    env = LUNARLANDER
    alone = build.cell("PAGE-PG K=1", env=env, algorithm="PAGE-PG")
    attacked = (
        build.cell(f"DecByzPG under {attack}", env=env, num_byzantine=3, attack=attack) for attack in PAPER_ATTACKS
    )
    return Experiment(
        "traces",
        "LunarLander with a trace that decays",
        "With a trace decay of 0.995, an action counts 0.995^h times as much for a reward h steps later, so estimates "
        "are biased but vary less. How fast is the tuned preset, which has it, where the paper's figures leave it out? "
        "In DecByzPG, 3 of 13 agents attack; PAGE-PG is one agent alone.",
        "curves",
        (Panel("LunarLander", env, (alone, *attacked)),),
    )


_PAGE: dict[str, Any] = ADAM_BEHIND_RULE | {"large_batch": 15, "small_batch": 4, "switch_probability": 0.25}
# The settings of each way to lower the variance that were best in `benchmarks/tuning.py variance`, out of nine each:
# those that reach 475 first in the slower of two cases or, if none does, those with the higher end in the worse case.
_VARIANTS: dict[str, dict[str, Any]] = {
    "momentum 0.8, Adam at the agents": ADAM_AT_AGENTS
    | {"momentum": 0.8, "large_batch": 6, "step_size": 4e-2, "decay": 0.0},
    "no momentum, Adam at the agents": ADAM_AT_AGENTS
    | {"momentum": 0.0, "large_batch": 6, "step_size": 4e-2, "decay": 0.0},
    "momentum 0.8": ADAM_BEHIND_RULE | {"momentum": 0.8, "large_batch": 6, "step_size": 1e-2},
    "momentum 0.8, transport": ADAM_BEHIND_RULE
    | {"momentum": 0.8, "transport": True, "large_batch": 6, "step_size": 5e-3},
    "no momentum": ADAM_BEHIND_RULE | {"large_batch": 6, "step_size": 2e-2},
    "PAGE, per decision": _PAGE | {"importance": "ImportanceWeights(mode='per-decision')", "step_size": 5e-3},
    "PAGE, defensive": _PAGE | {"importance": "DefensiveSampling(mode='per-decision')", "step_size": 5e-3},
    "PAGE, Hessian": _PAGE | {"importance": "HessianVector()", "large_batch": 10, "step_size": 5e-3},
}


def _variance(build: _Builder) -> Experiment:
    """Every way to lower the variance of gradients, each with its own best batch and step size."""

    def panel(attack: str) -> Panel:
        shared: dict[str, Any] = {"attack": attack, "num_byzantine": 3, "trajectories": 600}
        return Panel(
            attack, CARTPOLE, tuple(build.cell(label, **shared, **options) for label, options in _VARIANTS.items())
        )

    return Experiment(
        "variance",
        "Which variance reduction pays?",
        "CartPole, DecByzPG with 3 of 13 agents attacking. Do corrections of small batches beat momentum alone? Each "
        "way has the best of nine pairs of batch and step size.",
        "curves",
        tuple(map(panel, ("AvgZero", "RandomAction"))),
    )


def _many(build: _Builder) -> Experiment:
    sizes = (1, 2, 3, 5, 8, 13, 25, 50, 100)
    cells = tuple(
        build.cell("DecByzPG, all honest", size, num_agents=size, num_byzantine=0, untuned=1000) for size in sizes
    )
    return Experiment(
        "speedup",
        "Speed-up with up to 100 agents",
        "All agents are honest. How many trajectories per agent does a level take, by number of agents?",
        "reach",
        (Panel("CartPole", CARTPOLE, cells),),
    )


def _tolerance(build: _Builder) -> Experiment:
    def panel(attack: str) -> Panel:
        cells = []
        for attackers in range(7):
            shared: dict[str, Any] = {"num_attackers": attackers, "attack": attack, "seeds": 5, "untuned": 1000}
            cells += [
                build.cell("DecByzPG, f = 3", attackers, num_byzantine=3, **shared),
                build.cell("ByzPG, f = 6", attackers, algorithm="ByzPG", num_byzantine=6, **shared),
                build.cell("Dec-PAGE-PG", attackers, algorithm="Dec-PAGE-PG", num_byzantine=0, **shared),
            ]
        return Panel(attack, CARTPOLE, tuple(cells))

    return Experiment(
        "tolerance",
        "How many attackers are too many?",
        "13 agents. The proof for agreement by MDA covers f < K/4, so up to 3; that for a server f < K/2, so up to 6.",
        "tolerance",
        tuple(map(panel, ("LargeNoise", "AvgZero", "ALIE"))),
    )


HEATMAP_RULES = (
    "Mean",
    "Median",
    "TrimmedMean",
    "Krum",
    "MultiKrum",
    "MDA",
    "RFA",
    "CenteredClipping(radius=10.0)",
    "NNM(TrimmedMean())",
)
HEATMAP_ATTACKS = (
    "RandomAction",
    "RewardFlip",
    "RandomReward",
    "LargeNoise",
    "AvgZero",
    "SignFlip",
    "IPM",
    "ALIE",
    "OptimalALIE",
    "OptimalIPM",
    "Mimic",
    "MinMax",
    "MinSum",
    "Zero",
    "NonFinite",
    "Silent",
    "Equivocate",
    "Dissensus",
    "MDAFooling",
)


def _heatmap(build: _Builder) -> Experiment:
    cells = tuple(
        build.cell(rule, attack, aggregator=rule, attack=attack, num_byzantine=3, seeds=3, untuned=600)
        for rule in HEATMAP_RULES
        for attack in HEATMAP_ATTACKS
    )
    return Experiment(
        "heatmap",
        "Every attack against every rule",
        "DecByzPG with each rule and 3 of 13 agents attacking: the return at the end, and the weight of the attackers.",
        "heatmap",
        (Panel("CartPole", CARTPOLE, cells),),
    )


def _rotating(build: _Builder) -> Experiment:
    sets = {
        "the same 3": "FixedSet",
        "another 3 in every iteration": "RotatingSet(period=1)",
        "another 3 every 10": "RotatingSet(period=10)",
    }

    def panel(attack: str) -> Panel:
        shared: dict[str, Any] = {"num_byzantine": 3, "attack": attack, "untuned": 1000}
        return Panel(
            attack, CARTPOLE, tuple(build.cell(label, byzantine_set=which, **shared) for label, which in sets.items())
        )

    return Experiment(
        "rotating",
        "When attackers take turns",
        "The theory allows the Byzantine set to change in every iteration. Does the method work then?",
        "curves",
        tuple(map(panel, PAPER_ATTACKS)),
    )


def _agreement(build: _Builder) -> Experiment:
    def panel(attack: str) -> Panel:
        shared: dict[str, Any] = {"num_byzantine": 3, "attack": attack, "seeds": 5, "untuned": 1000}
        cells = [
            build.cell(rule, rounds, agreement=rule, rounds=rounds, **shared)
            for rule in ("MDA", "TrimmedMeanAgreement")
            for rounds in (0, 1, 2, 3, 5, 8)
        ]
        return Panel(attack, CARTPOLE, tuple(cells))

    return Experiment(
        "agreement",
        "How many rounds of agreement?",
        "The diameter of the honest parameters after κ rounds, averaged over the run, and the return at the end.",
        "agreement",
        tuple(map(panel, ("LargeNoise", "Equivocate", "Dissensus"))),
    )


def _averaging(build: _Builder) -> Experiment:
    """Plain averaging and DecByzPG under AvgZero, with two values of Adam's ε."""
    shared: dict[str, Any] = {"num_byzantine": 3, "attack": "AvgZero", "trajectories": 600}
    shared |= {"optimizer": "adam", "momentum": 0.8, "step_size": 1.2e-2, "decay": 0.0}

    def panel(title: str, algorithm: str) -> Panel:
        cells = (
            build.cell(f"{title}, ε = {name}", algorithm=algorithm, adam_epsilon=epsilon, **shared)
            for name, epsilon in (("1e-8", 1e-8), ("1e-2", 1e-2))
        )
        return Panel(title, CARTPOLE, tuple(cells))

    return Experiment(
        "averaging",
        "What AvgZero does to plain averaging",
        "AvgZero makes the mean of the gradients zero. Where do parameters go if only rounding is left of it? With "
        "Adam's usual ε of 1e-8, rounding becomes full steps; with a larger ε, the step is zero as well.",
        "curves",
        (panel("Plain averaging", "Dec-PAGE-PG"), panel("DecByzPG", "DecByzPG")),
    )


SIZES_TO_JOIN = (2, 5, 13, 25)
LARGEST_PLAIN = 13  # Plain averaging fails with the first attacker: the largest federation would only take time.
# The return that counts as learned where the task's own threshold is too low, out of reach, or there is none. In MuJoCo
# it is about half of what is published for PPO after a million steps (RL Baselines3 Zoo; v3 of the tasks, greedy).
_LEVELS_TO_JOIN_FOR = {
    "Acrobot-v1": -85.0,
    "Pendulum-v1": -200.0,
    "HalfCheetah-v4": 3000.0,
    "Hopper-v4": 1200.0,
    "Walker2d-v4": 1700.0,
}


def _joining(build: _Builder) -> Experiment:
    """What a member of a federation saves, by the number of members, of which almost a quarter attack."""
    task = build.task or LUNARLANDER
    level = _LEVELS_TO_JOIN_FOR.get(task.rpartition(":")[2]) or envs.make(task).reward_threshold
    if level is None:
        raise ValueError(
            f"joining needs a return that counts as learned, and {task} has none: choose one of "
            f"{', '.join(f'envpool:{name}' if name in MUJOCO_TASKS else name for name in _LEVELS_TO_JOIN_FOR)}, or a "
            "task with a reward threshold."
        )

    def panel(attack: str) -> Panel:
        cells = [build.cell("PPO alone", 1, env=task, algorithm="PPO")]
        for size in SIZES_TO_JOIN:
            shared: dict[str, Any] = {"num_agents": size, "num_byzantine": (size - 1) // 4, "attack": attack}
            cells.append(build.cell("DecByzPPO", size, env=task, algorithm="DecByzPPO", **shared))
            if size <= LARGEST_PLAIN:
                cells.append(build.cell("Dec-PPO", size, env=task, algorithm="Dec-PPO", **shared))
        return Panel(attack, task, tuple(cells), level=level)

    return Experiment(
        "joining",
        "Does joining pay?",
        "⌊(K − 1)/4⌋ of K members attack. How many environment steps of its own does a member need until a level? PPO "
        "alone has settings of its own, and Dec-PPO is plain averaging under the same attack.",
        "reach",
        tuple(map(panel, FIVE_ATTACKS)),
    )


_DECENTRALIZED: dict[str, Any] = {"robust": "DecByzPG", "plain": "Dec-PAGE-PG"}
_CENTRALIZED: dict[str, Any] = {"robust": "ByzPG", "plain": "Fed-PAGE-PG"}
# `key` is the name of the figure in published_curves.json.
EXPERIMENTS: dict[str, Callable[[_Builder], Experiment]] = {
    "fig1": lambda build: _speedup(build, algorithm="DecByzPG", name="fig1", key="fig1_speedup_decbyzpg"),
    "fig2": lambda build: _attacks(
        build, env=CARTPOLE, name="fig2", key="fig2_cartpole_attacks_decbyzpg", **_DECENTRALIZED
    ),
    "fig3": lambda build: _attacks(
        build, env=LUNARLANDER, name="fig3", key="fig3_lunarlander_attacks_decbyzpg", **_DECENTRALIZED
    ),
    "fig4": lambda build: _speedup(build, algorithm="ByzPG", name="fig4", key="fig4_speedup_byzpg"),
    "fig5": lambda build: _attacks(build, env=CARTPOLE, name="fig5", key="fig5_cartpole_attacks_byzpg", **_CENTRALIZED),
    "fig6": lambda build: _attacks(
        build, env=LUNARLANDER, name="fig6", key="fig6_lunarlander_attacks_byzpg", **_CENTRALIZED
    ),
    "ablation": _ablation,
    "momentum": _momentum,
    "traces": _traces,
    "variance": _variance,
    "speedup": _many,
    "tolerance": _tolerance,
    "heatmap": _heatmap,
    "rotating": _rotating,
    "agreement": _agreement,
    "averaging": _averaging,
    "joining": _joining,
}
# Experiments on agents with a critic: their length is counted in steps, and they have the tuned preset alone.
WITH_CRITIC = ("joining",)


def texts(name: str) -> tuple[str, str] | None:
    """The title and the question of an experiment; None if there is no experiment of that name."""
    if name not in EXPERIMENTS:
        return None
    experiment = EXPERIMENTS[name](_TextBuilder(Scope()))
    return experiment.title, experiment.question


FIGURES = ("fig1", "fig2", "fig3", "fig4", "fig5", "fig6")
# Names for several experiments at once, and the task to which their panels are narrowed.
COLLECTIONS: dict[str, tuple[Sequence[str], str | None]] = {
    "cartpole": (("fig1", "fig2", "fig4", "fig5"), CARTPOLE),
    "lunarlander": (("fig1", "fig3", "fig4", "fig6"), LUNARLANDER),
    "all": (FIGURES, None),
    "beyond": (tuple(name for name in EXPERIMENTS if name not in (*FIGURES, *WITH_CRITIC)), None),
}


def grid(names: Iterable[str], scope: Scope, task: str | None = None, panel: str | None = None) -> Grid:
    """The grid of these experiments or collections.

    Args:
        names: Names of EXPERIMENTS or COLLECTIONS.
        scope: What all runs have in common.
        task: The task to which panels are narrowed, and on which `joining` is run; None keeps all panels.
        panel: The title to which panels are narrowed, which in most experiments is an attack; None keeps all panels.

    Raises:
        ValueError: If a name is unknown, or none of the experiments has a panel of the task or of that title.
    """
    wanted: dict[str, set[str | None]] = {}
    for name in names:
        if name not in EXPERIMENTS and name not in COLLECTIONS:
            raise ValueError(unknown("experiment", name, [*EXPERIMENTS, *COLLECTIONS]))
        members, of_task = COLLECTIONS.get(name, ((name,), None))
        for member in members:
            wanted.setdefault(member, set()).add(of_task)
    build = _Builder(scope, task)
    experiments, titles = [], set[str]()
    for name in EXPERIMENTS:
        if name in wanted:
            made, tasks = EXPERIMENTS[name](build), wanted[name]
            kept = tuple(each for each in made.panels if None in tasks or each.task in tasks)
            kept = tuple(each for each in kept if task is None or each.task == task)
            titles |= {each.title for each in kept}
            kept = tuple(each for each in kept if panel is None or each.title == panel)
            if kept:
                experiments.append(replace(made, panels=kept))
    if panel is not None and titles and not experiments:
        raise ValueError(unknown("panel", panel, sorted(titles)))
    if not experiments:
        raise ValueError(
            f"none of these experiments is on task {task!r}: choose {CARTPOLE} or {LUNARLANDER}; only "
            f"{' and '.join(WITH_CRITIC)} can be run on other tasks."
        )
    needed = {cell.run for experiment in experiments for panel in experiment.panels for cell in panel.cells}
    return Grid(tuple(experiments), {name: settings for name, settings in build.settings.items() if name in needed})
