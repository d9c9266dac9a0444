"""From configurations to runs: blocks of iterations, progress and checkpoints between them.

Runs that differ in who takes part, who lies and what the others do about it share one program. Several processes that
train as one (`cluster`) run the same blocks: the first tells the others which, and they keep nothing.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError

from byzpg import cluster, published
from byzpg.coin import CommonCoin
from byzpg.config import Config, Settings
from byzpg.runs import Checkpoint, Run, RunDirectory
from byzpg.simulate import LARGE, SKIP, SMALL, Metrics, Simulation, SimulationState, States

# Iterations between two looks at the clock: few enough for Ctrl-C, enough to hide the way to the host and back.
BLOCK = 8
# Checkpoints are this far apart, and further where they are large: writing them is to take a small share of the time.
CHECKPOINT_SECONDS = 5.0
CHECKPOINT_SHARE = 0.05
# What follows a block, in all processes alike.
GO_ON, SAVE, STOP = range(3)
# Steps of one batch of episodes in a shared program: more would no longer fit the memory (of a GPU: 140 GB of it), and
# on a CPU not the cache either.
LARGEST_BATCH = {"cpu": 12_000_000, "gpu": 120_000_000}


@dataclass(frozen=True)
class Progress:
    """How far a run is, or several that share a program."""

    iteration: int
    num_iterations: int
    trajectories: int  # per agent, so far
    total_trajectories: int
    mean_return: float  # of the last block, over seeds and honest agents; of several runs, the first one's
    seconds: float  # since training (or resuming) began
    done: float  # share of all the work that was asked for
    label: str = ""  # which part of it


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Plan:
    """Which batch every iteration samples: known before the first one, as the coin is common."""

    large: np.ndarray  # [iteration]
    trajectories: np.ndarray  # [iteration], running total per agent
    output_iteration: int  # T̂

    @classmethod
    def of(cls, settings: Settings, coin: CommonCoin) -> "Plan":
        large, total = [], [0]
        probability = settings.switch_probability
        common = (coin.is_large(iteration, probability) for iteration in count())
        tosses = common if settings.coin == "common" else published.tosses(probability)
        while total[-1] < settings.trajectories:
            large.append(next(tosses))
            total.append(total[-1] + (settings.large_batch if large[-1] else settings.small_batch))
        return cls(np.asarray(large), np.asarray(total[1:]), coin.output_iteration(len(large)))


def train(config: Config, directory: str | Path | None = None, on_progress: OnProgress | None = None) -> Run:
    """Train as configured. With a directory, everything is kept there and can be resumed; without, in memory alone."""
    settings = config.resolved()
    kept = None if directory is None else RunDirectory.create(Path(directory), settings)
    return _run([_Pending(settings, kept, None)], on_progress)[0]


def resume(directory: str | Path, on_progress: OnProgress | None = None) -> Run:
    """Continue a run from its last checkpoint; a complete one is just loaded.

    On the same machine, with as many JAX devices as before, the result is to the bit as if it had never stopped.
    """
    kept = RunDirectory.open(Path(directory))
    if kept.complete:
        return kept.read_results()
    return _run([_Pending(kept.settings(), kept, kept.read_checkpoint())], on_progress)[0]


def resume_all(directories: Sequence[Path], on_progress: OnProgress | None = None) -> None:
    """Continue many runs, as many as possible in one program; complete ones are left alone.

    What a run computes is the same as alone up to rounding, which depends on what it shares a program with.
    """
    opened = [RunDirectory.open(directory) for directory in directories]
    pending = [_Pending(kept.settings(), kept, kept.read_checkpoint()) for kept in opened if not kept.complete]
    programs: dict[Any, list[_Pending]] = {}
    for each in pending:
        programs.setdefault(each.program, []).append(each)
    parts = [part for group in programs.values() for part in _parts(group)]
    total, before = sum(each.work for each in pending), 0.0
    started = time.monotonic()
    for number, part in enumerate(parts, 1):
        work = sum(each.work for each in part)

        def of_all(progress: Progress, part=part, work=work, number=number, before=before) -> None:
            assert on_progress is not None
            done = (before + work * progress.done) / total
            label = f"program {number} of {len(parts)} ({len(part)} runs), " if len(parts) > 1 else ""
            on_progress(replace(progress, done=done, label=label, seconds=time.monotonic() - started))

        _run(part, None if on_progress is None else of_all)
        before += work


def follow() -> None:
    """As one of several processes that train as one: do what the first one does, until it is done."""
    while message := cluster.bytes_of_first():
        with np.load(BytesIO(message), allow_pickle=False) as arrays:
            runs = json.loads(str(arrays["runs"]))
            parts = [_part(arrays, f"{index}/") for index in range(len(runs))]
        pending = [
            _Pending(Config.of(values, "the first process").resolved(), None, Checkpoint.of(part) if part else None)
            for values, part in zip(runs, parts, strict=True)
        ]
        with cluster.common_program():
            _run(pending, None)


def _part(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}


def _lead(pending: Sequence["_Pending"]) -> None:
    """Tell those who follow this process what comes next."""
    arrays = {"runs": np.asarray(json.dumps([each.settings.as_data() for each in pending]))}
    for index, each in enumerate(pending):
        if each.checkpoint is not None:
            arrays |= {f"{index}/{name}": values for name, values in each.checkpoint.as_arrays().items()}
    message = BytesIO()
    np.savez(message, allow_pickle=False, **arrays)
    cluster.bytes_of_first(message.getvalue())


def dismiss() -> None:
    """Let those go who follow this process."""
    if cluster.leads() and not cluster.torn():
        with suppress(JaxRuntimeError), cluster.common_program():  # whoever died has gone already
            cluster.bytes_of_first(b"")


def load(directory: str | Path) -> Run:
    """A run from its directory: complete, or as far as its last checkpoint."""
    kept = RunDirectory.open(Path(directory))
    if kept.complete:
        return kept.read_results()
    checkpoint = kept.read_checkpoint()
    if checkpoint is None:
        raise ValueError(
            f"{directory} has not reached its first checkpoint: continue it with `byzpg resume {directory}`."
        )
    settings = kept.settings()
    simulation = settings.simulation()
    plan = Plan.of(settings, simulation.coin())
    return _results(settings, plan, _restored(simulation, [checkpoint])[0], checkpoint.metrics)


def _restored(simulation: Simulation, checkpoints: Sequence[Checkpoint]) -> States:
    states = []
    for start, checkpoint in zip(simulation.start(), checkpoints, strict=True):
        leaves, structure = jax.tree.flatten(start)
        columns = {column.name: (len(simulation.seeds), checkpoint.iteration) for column in fields(Metrics)}
        fits = [(leaf.shape, leaf.dtype) for leaf in leaves] == [(leaf.shape, leaf.dtype) for leaf in checkpoint.state]
        if not fits or columns != {name: values.shape for name, values in checkpoint.metrics.items()}:
            raise ValueError(
                "the checkpoint does not fit this version of byzpg: its arrays have other names or shapes. "
                "Go on with the version that provenance.json names, or train anew in another directory."
            )
        states.append(jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in checkpoint.state]))
    return simulation.placed(tuple(states))


@dataclass(frozen=True)
class _Pending:
    """A run to do, or the rest of one."""

    settings: Settings
    kept: RunDirectory | None
    checkpoint: Checkpoint | None

    @property
    def program(self) -> Any:
        """Runs with the same share a program: agents that play alike, the same seeds and coin, equally far."""
        settings = self.settings
        coin = (settings.coin, settings.switch_probability, settings.trajectories)
        alone = self.kept if settings.simulation().on_host else None
        iteration = self.checkpoint.iteration if self.checkpoint is not None else 0
        return settings.federation().agent.playing, settings.seeds, coin, iteration, alone

    @property
    def batch(self) -> int:
        """Steps of a large batch of episodes."""
        settings = self.settings
        return settings.num_seeds * settings.num_agents * settings.large_batch * settings.horizon

    @property
    def work(self) -> float:
        """What it will cost, roughly: an episode of LunarLander as much as seven of CartPole."""
        settings = self.settings
        episodes = settings.num_seeds * settings.num_agents * settings.trajectories
        return episodes * settings.horizon * settings.bound_policy().dimension ** 0.5


def _parts(group: list[_Pending]) -> Iterator[list[_Pending]]:
    """Runs of one program in parts, as few and as equal as memory allows."""
    largest = LARGEST_BATCH["gpu" if jax.default_backend() == "gpu" else "cpu"]
    number = min(len(group), -(-sum(each.batch for each in group) // largest))
    ordered = sorted(group, key=lambda each: each.batch)
    for part in range(number):
        yield ordered[part::number]


def _run(pending: Sequence[_Pending], on_progress: OnProgress | None) -> list[Run]:
    """Run what fits one program to its end."""
    started = time.monotonic()
    settings = pending[0].settings
    simulation = Simulation(tuple(each.settings.federation() for each in pending), settings.seeds)
    if cluster.leads() and simulation.on_host:
        raise ValueError(f"{settings.env} is played on the host, by one process: leave --coordinator out.")
    plan = Plan.of(settings, simulation.coin())
    num_iterations = len(plan.large)
    states, begin = simulation.start(), 0
    blocks: list[list[dict[str, np.ndarray]]] = [[] for _ in pending]
    if pending[0].checkpoint is not None:
        checkpoints = [each.checkpoint for each in pending if each.checkpoint is not None]
        states, begin = _restored(simulation, checkpoints), checkpoints[0].iteration
        blocks = [[checkpoint.metrics] for checkpoint in checkpoints]
    next_save = started + CHECKPOINT_SECONDS
    block_length = 1 if simulation.on_host else BLOCK  # on the host, one iteration may take minutes
    stopped, decision = None, GO_ON
    if cluster.leads():
        _lead(pending)
    with cluster.common_program():
        for first in range(begin, num_iterations, block_length):
            last = min(first + block_length, num_iterations)
            batches = np.full(block_length, SKIP)
            batches[: last - first] = np.where(plan.large[first:last], LARGE, SMALL)
            states, latest = simulation.run(states, batches, plan.output_iteration)
            for kept_blocks, block in zip(blocks, cluster.fetched(latest), strict=True):
                kept_blocks.append({name: values[:, : last - first] for name, values in vars(block).items()})
            if on_progress is not None:
                latest_return = float(np.mean(blocks[0][-1]["return_mean"]))
                reached, total = int(plan.trajectories[last - 1]), int(plan.trajectories[-1])
                try:
                    seconds = time.monotonic() - started
                    on_progress(Progress(last, num_iterations, reached, total, latest_return, seconds, reached / total))
                except BaseException as error:  # whoever watches may stop a run (Ctrl-C): not before it is saved
                    stopped = error
            began = time.monotonic()
            save = stopped is not None or last == num_iterations or began > next_save
            decision = cluster.number_of_first(STOP if stopped is not None else SAVE if save else GO_ON)
            if decision != GO_ON:
                for each, state, kept_blocks in zip(pending, cluster.fetched(states), blocks, strict=True):
                    if each.kept is not None:
                        each.kept.write_checkpoint(Checkpoint(last, jax.tree.leaves(state), _joined(kept_blocks)))
                spent = time.monotonic() - began
                next_save = time.monotonic() + max(CHECKPOINT_SECONDS, spent / CHECKPOINT_SHARE)
            if decision == STOP:
                break
        held = cluster.fetched(states)
    if stopped is not None:
        raise stopped
    if decision == STOP:
        return []
    runs = [
        _results(each.settings, plan, state, _joined(kept_blocks))
        for each, state, kept_blocks in zip(pending, held, blocks, strict=True)
    ]
    for each, run in zip(pending, runs, strict=True):
        if each.kept is not None:
            each.kept.write_results(run)
    return runs


def _joined(blocks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([block[name] for block in blocks], axis=1) for name in blocks[0]}


def _results(settings: Settings, plan: Plan, state: SimulationState, metrics: dict[str, np.ndarray]) -> Run:
    done = int(state.iteration)
    return Run(
        settings,
        plan.trajectories[:done],
        plan.large[:done],
        metrics,
        {"last": np.asarray(state.agents.parameters), "uniform": np.asarray(state.output)},
        plan.output_iteration,
        complete=done == len(plan.large),
    )
