"""From a configuration to a run: blocks of iterations, progress and checkpoints between them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from byzpg import published
from byzpg.config import Config, Settings
from byzpg.runs import Checkpoint, Run, RunDirectory
from byzpg.simulate import LARGE, SKIP, SMALL, Metrics, Simulation, SimulationState

# Iterations between two looks at the clock: few enough for Ctrl-C, enough to hide the way to the host and back.
BLOCK = 8
CHECKPOINT_SECONDS = 5.0


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    iteration: int
    num_iterations: int
    trajectories: int  # per agent, so far
    total_trajectories: int
    mean_return: float  # of the last block, over seeds and honest agents
    seconds: float  # since training (or resuming) began


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Plan:
    """Which batch every iteration samples: known before the first one, as the coin is common."""

    large: np.ndarray  # [iteration]
    trajectories: np.ndarray  # [iteration], running total per agent
    output_iteration: int  # T̂

    @classmethod
    def of(cls, settings: Settings, simulation: Simulation) -> "Plan":
        coin, large, total = simulation.coin(), [], [0]
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
    return _run(settings, kept, None, on_progress)


def resume(directory: str | Path, on_progress: OnProgress | None = None) -> Run:
    """Continue a run from its last checkpoint; a complete one is just loaded.

    On the same machine, with as many JAX devices as before, the result is to the bit as if it had never stopped.
    """
    kept = RunDirectory.open(Path(directory))
    if kept.complete:
        return kept.read_results()
    return _run(kept.settings(), kept, kept.read_checkpoint(), on_progress)


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
    plan = Plan.of(settings, simulation)
    return _results(settings, plan, _restored(simulation, checkpoint), checkpoint.metrics)


def _restored(simulation: Simulation, checkpoint: Checkpoint) -> SimulationState:
    leaves, structure = jax.tree.flatten(simulation.start())
    columns = {column.name: (len(simulation.seeds), checkpoint.iteration) for column in fields(Metrics)}
    fits = [(leaf.shape, leaf.dtype) for leaf in leaves] == [(leaf.shape, leaf.dtype) for leaf in checkpoint.state]
    if not fits or columns != {name: values.shape for name, values in checkpoint.metrics.items()}:
        raise ValueError(
            "the checkpoint does not fit this version of byzpg: its arrays have other names or shapes. "
            "Go on with the version that provenance.json names, or train anew in another directory."
        )
    return simulation.placed(jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in checkpoint.state]))


def _run(
    settings: Settings, kept: RunDirectory | None, checkpoint: Checkpoint | None, on_progress: OnProgress | None
) -> Run:
    started = time.monotonic()
    simulation = settings.simulation()
    plan = Plan.of(settings, simulation)
    num_iterations = len(plan.large)
    state, blocks, begin = simulation.start(), [], 0
    if checkpoint is not None:
        state, blocks, begin = _restored(simulation, checkpoint), [checkpoint.metrics], checkpoint.iteration
    saved = started
    block_length = 1 if simulation.on_host else BLOCK  # on the host, one iteration may take minutes
    for first in range(begin, num_iterations, block_length):
        last = min(first + block_length, num_iterations)
        batches = np.full(block_length, SKIP)
        batches[: last - first] = np.where(plan.large[first:last], LARGE, SMALL)
        state, block = simulation.run(state, batches, plan.output_iteration)
        blocks.append({name: np.asarray(values)[:, : last - first] for name, values in vars(block).items()})
        stopped = None
        if on_progress is not None:
            latest = float(np.mean(blocks[-1]["return_mean"]))
            reached, total = int(plan.trajectories[last - 1]), int(plan.trajectories[-1])
            try:
                on_progress(Progress(last, num_iterations, reached, total, latest, time.monotonic() - started))
            except BaseException as error:  # whoever watches may stop a run (Ctrl-C): not before it is saved
                stopped = error
        due = stopped or last == num_iterations or time.monotonic() - saved > CHECKPOINT_SECONDS
        if kept is not None and due:
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
            kept.write_checkpoint(Checkpoint(last, leaves, _joined(blocks)))
            saved = time.monotonic()
        if stopped is not None:
            raise stopped
    run = _results(settings, plan, state, _joined(blocks))
    if kept is not None:
        kept.write_results(run)
    return run


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
