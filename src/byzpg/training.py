"""From configurations to runs: blocks of iterations, with progress and checkpoints between them.

Runs that differ only in their agents' number, rules and attacks share one program. Several processes that train as one
(see `federation.devices`) run the same blocks: the first one tells the others what to run, and only it writes files.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from math import inf
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError

from byzpg.config import Config, Settings
from byzpg.federation import devices
from byzpg.federation.metrics import METRICS
from byzpg.federation.schedule import Extension, Timetable
from byzpg.federation.simulator import LARGE, SKIP, SMALL, Simulation, SimulationState, States
from byzpg.logs import Log, OnIteration, Report, check_logs, open_log, reports, reports_of
from byzpg.runs import Checkpoint, Run, RunDirectory

# Iterations between two looks at the clock: few enough for Ctrl-C, enough to hide the way to the host and back.
BLOCK = 8
# Reports of progress are no further apart than this, if an iteration takes less.
REPORT_SECONDS = 2.5
# Checkpoints are this far apart, and further if they are large: writing them should take a small share of the time.
CHECKPOINT_SECONDS = 5.0
CHECKPOINT_SHARE = 0.05
# What follows a block, in all processes alike.
GO_ON, SAVE, STOP = range(3)
# Steps in one batch of episodes of a shared program: more would not fit into memory (of a GPU: 140 GB of it), and on a
# CPU not into the cache either.
LARGEST_BATCH = {"cpu": 12_000_000, "gpu": 120_000_000}
# How many programs are compiled at once, by cores that would be idle while a GPU trains. CPUs are busy with training.
COMPILED_AT_ONCE = {"cpu": 0, "gpu": min(4, (os.cpu_count() or 1) // 2)}
COMPILING = "compiling"  # the name of the threads that do it


@dataclass(frozen=True)
class Progress:
    """How far a run is, or several runs that share a program."""

    iteration: int  # entries of the timetable, where seeds toss coins of their own
    num_iterations: int
    progress: int  # trajectories or steps per agent, so far, mean over seeds
    total: int  # of them
    unit: str
    mean_return: float  # of the last block, over seeds and honest agents; of several runs, the first one's
    seconds: float  # since training (or resuming) began
    done: float  # share of all the work that was asked for
    label: str = ""  # which part of it


OnProgress = Callable[[Progress], None]


def train(
    config: Config,
    directory: str | Path | None = None,
    on_progress: OnProgress | None = None,
    *,
    on_iteration: OnIteration | None = None,
    log: Sequence[str] = (),
) -> Run:
    """Train a federation.

    Args:
        config: What to train.
        directory: Where to keep the run, so that it can be resumed; without it, the run exists in memory alone.
        on_progress: Called after every block of iterations. What it raises stops training, after a checkpoint.
        on_iteration: Called for every iteration, in order, with all metrics of all seeds (`byzpg.logs.Report`).
            Iterations run in blocks, and the calls for a block come after it. What it raises stops training, after a
            checkpoint of the whole block.
        log: The logs to write into the directory: jsonl, tensorboard, wandb.

    Returns:
        The run, with metrics and trained policies.

    Raises:
        ValueError: If the configuration is wrong or the directory is not empty; nothing is written then.

    >>> from byzpg import Config, train
    >>> run = train(Config(num_agents=5, num_seeds=1, trajectories=30, horizon=20))
    >>> run.returns.shape == run.trajectories.shape  # [seed, iteration]; returns are means over honest agents
    True
    """
    settings = config.resolved()
    check_logs(log)
    if log and directory is None:
        raise ValueError(f"log = {log!r} needs a directory: logs lie in the directory of the run.")
    kept = None if directory is None else RunDirectory.create(Path(directory), settings)
    with _logging([_Pending(settings, kept, None)], log) as pending:
        return _Program(pending).run(on_progress, on_iteration)[0]


def resume(
    directory: str | Path,
    on_progress: OnProgress | None = None,
    *,
    on_iteration: OnIteration | None = None,
    log: Sequence[str] = (),
    trajectories: int | None = None,
    steps: int | None = None,
) -> Run:
    """Continue a run from its last checkpoint; a complete run is only loaded, unless a greater length is given.

    On the same machine, with the same number of JAX devices, the result is bit-identical to an uninterrupted run. There
    is one exception: agents with a critic begin new episodes on a host task, whose environments cannot be saved.

    Args:
        directory: The directory of the run.
        on_progress: As for `train`.
        on_iteration: As for `train`, for the iterations after the checkpoint; `load` has those before it.
        log: As for `train`. Iterations that a log lacks are written first, and none is written twice.
        trajectories: A new length of the run in all, to which a complete run is extended: see `extend`.
        steps: The same for algorithms with a critic.
    """
    check_logs(log)
    extend(directory, trajectories=trajectories, steps=steps)
    kept = RunDirectory.open(Path(directory))
    if kept.complete:
        return _complete_logs(kept, log)
    with _logging([_Pending(kept.settings(), kept, kept.read_checkpoint())], log) as pending:
        return _Program(pending).run(on_progress, on_iteration)[0]


def extend(directory: str | Path, *, trajectories: int | None = None, steps: int | None = None) -> bool:
    """Give a complete run a greater length, so that `resume` trains it on; with the length that it has, do nothing.

    The last parameters will be bit-identical to those of one long run, with two exceptions. If the step size decays,
    it depends on the length: the extension follows the schedule of the new length, and so begins with larger steps than
    the run ended with. The iteration T̂ of the uniform output is the long run's only if it is not over yet; otherwise it
    stays. T̂ is uniform in either case.

    Args:
        directory: The directory of the run.
        trajectories: The number of trajectories per agent, those that are done included.
        steps: The number of steps per agent, in place of trajectories for algorithms with a critic.

    Returns:
        Whether the run was extended.

    Raises:
        ValueError: If the run cannot be extended; it is unchanged then.
    """
    kept = RunDirectory.open(Path(directory))
    settings = kept.settings()
    unit, given = settings.unit, {"trajectories": trajectories, "steps": steps}
    for name, length in given.items():
        if length is not None and name != unit:
            raise ValueError(f"{name} = {length} has no effect with {settings.algorithm}: set {unit}.")
    length = given[unit]
    if length in (None, settings.length):
        return False
    if length < settings.length:
        raise ValueError(f"{directory} has {settings.length} {unit}: {unit} must be at least that, got {length}.")
    if not kept.complete:
        raise ValueError(
            f"{directory} has not reached its {settings.length} {unit}: finish it first with "
            f"`byzpg resume {directory}`, then extend it."
        )
    checkpoint = kept.read_checkpoint()
    if checkpoint is None:
        raise ValueError(f"{directory} has no checkpoint.npz, from which it could be extended.")
    run = kept.read_results()
    longer = replace(settings, **{unit: length})
    extension = Extension(run.num_iterations, run.output_iteration)
    kept.extend(longer, Checkpoint(run.progress.shape[1], checkpoint.state, dict(run.metrics), extension))
    return True


def resume_all(directories: Sequence[Path], on_progress: OnProgress | None = None, log: Sequence[str] = ()) -> None:
    """Continue many runs, as many as possible in one program; of complete ones, only logs may be written.

    The result of a run is the same as alone up to rounding, which depends on the runs it shares a program with.
    """
    opened = [RunDirectory.open(directory) for directory in directories]
    pending = [_Pending(kept.settings(), kept, kept.read_checkpoint()) for kept in opened if not kept.complete]
    for kept in opened:
        if log and kept.complete:
            _complete_logs(kept, log)
    for _ in _run_all(pending, on_progress, log):
        pass


def train_all(configs: Sequence[Config], on_progress: OnProgress | None = None) -> Iterator[tuple[int, Run]]:
    """Train many federations in memory, as many as possible in one program; otherwise as `resume_all`.

    Yields:
        The place of a configuration and its run, as soon as the program that it is in has ended.

    Raises:
        ValueError: If a configuration is wrong; nothing is trained then.
    """
    yield from _run_all([_Pending(config.resolved(), None, None) for config in configs], on_progress)


def _run_all(
    pending: Sequence["_Pending"], on_progress: OnProgress | None, log: Sequence[str] = ()
) -> Iterator[tuple[int, Run]]:
    """Train all of these, and yield each run with its place in `pending`."""
    programs: dict[Any, list[_Pending]] = {}
    for each in pending:
        programs.setdefault(each.program, []).append(each)
    places = {id(each): place for place, each in enumerate(pending)}
    parts = [part for group in programs.values() for part in _parts(group)]
    total, before = sum(each.work for each in pending), 0.0
    started = time.monotonic()
    with _compiling(parts) as wait_for:
        for number, part in enumerate(parts, 1):
            work = sum(each.work for each in part)

            def of_all(progress: Progress, part=part, work=work, number=number, before=before) -> None:
                assert on_progress is not None
                done = (before + work * progress.done) / total
                label = f"program {number} of {len(parts)} ({len(part)} runs), " if len(parts) > 1 else ""
                on_progress(replace(progress, done=done, label=label, seconds=time.monotonic() - started))

            wait_for(number - 1)
            with _logging(part, log) as logged:
                runs = _Program(logged).run(None if on_progress is None else of_all)
            yield from ((places[id(each)], run) for each, run in zip(part, runs, strict=True))
            before += work


def follow() -> None:
    """As one of several processes that train as one, do what the first one does until it is done."""
    while message := devices.broadcast_bytes():
        with np.load(BytesIO(message), allow_pickle=False) as arrays:
            runs = json.loads(str(arrays["runs"]))
            parts = [_part(arrays, f"{index}/") for index in range(len(runs))]
        pending = [
            _Pending(Config.of(values, "the first process").resolved(), None, Checkpoint.of(part) if part else None)
            for values, part in zip(runs, parts, strict=True)
        ]
        with devices.common_program():
            _Program(pending).run(None)


def _part(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}


def _lead(pending: Sequence["_Pending"]) -> None:
    """Tell the processes that follow this one what comes next."""
    arrays = {"runs": np.asarray(json.dumps([each.settings.as_data() for each in pending]))}
    for index, each in enumerate(pending):
        if each.checkpoint is not None:
            arrays |= {f"{index}/{name}": values for name, values in each.checkpoint.as_arrays().items()}
    message = BytesIO()
    np.savez(message, allow_pickle=False, **arrays)
    devices.broadcast_bytes(message.getvalue())


def dismiss() -> None:
    """Let the processes that follow this one end."""
    if devices.leads() and not devices.torn():
        with suppress(JaxRuntimeError), devices.common_program():  # a process that died has gone already
            devices.broadcast_bytes(b"")


def load(directory: str | Path) -> Run:
    """Load a run from its directory: complete, or as far as its last checkpoint.

    Raises:
        ValueError: If the directory holds no run, or one without a checkpoint.
    """
    kept = RunDirectory.open(Path(directory))
    if kept.complete:
        return kept.read_results()
    checkpoint = kept.read_checkpoint()
    if checkpoint is None:
        raise ValueError(
            f"{directory} has not reached its first checkpoint: continue it with `byzpg resume {directory}`."
        )
    settings = kept.settings()
    simulation = simulation_of(settings)
    timetable = settings.schedule().timetable(simulation.initial_parameters(), checkpoint.extension)
    return _results(settings, timetable, _restored(simulation, timetable, [checkpoint])[0], checkpoint.metrics)


def simulation_of(*settings: Settings) -> Simulation:
    """The simulation of the federations that settings describe, which must share their seeds."""
    return Simulation(tuple(each.federation() for each in settings), settings[0].seeds)


def _restored(simulation: Simulation, timetable: Timetable, checkpoints: Sequence[Checkpoint]) -> States:
    states = []
    num_seeds = len(simulation.seeds)
    for shapes, checkpoint in zip(simulation.shapes(), checkpoints, strict=True):
        leaves, structure = jax.tree.flatten(shapes)
        columns = dict.fromkeys(METRICS, (num_seeds, checkpoint.iteration))
        # In older checkpoints, the iteration is one number for all seeds.
        kept = [leaf if leaf.ndim else np.full(num_seeds, leaf) for leaf in checkpoint.state]
        fits = [(leaf.shape, leaf.dtype) for leaf in leaves] == [(leaf.shape, leaf.dtype) for leaf in kept]
        fits = fits and columns == {name: values.shape for name, values in checkpoint.metrics.items()}
        state = jax.tree.unflatten(structure, kept) if fits else None
        if state is None or not np.array_equal(state.iteration, timetable.iterations(checkpoint.iteration)):
            raise ValueError(
                "the checkpoint does not fit this version of byzpg: its arrays have other names or shapes. "
                "Continue with the version that provenance.json names, or train again in another directory."
            )
        states.append(state)
    return tuple(states)


@dataclass(frozen=True)
class _Pending:
    """A run to train, or the rest of one."""

    settings: Settings
    kept: RunDirectory | None
    checkpoint: Checkpoint | None
    logs: tuple[Log, ...] = ()

    @property
    def begin(self) -> int:
        return self.checkpoint.iteration if self.checkpoint is not None else 0

    @property
    def extension(self) -> Extension | None:
        return None if self.checkpoint is None else self.checkpoint.extension

    @property
    def program(self) -> Any:
        """Runs with the same value share a program: agents that play alike, the same seeds and coin, equally far."""
        settings = self.settings
        length = (settings.switch_probability, settings.coins, settings.length)
        alone = id(self) if simulation_of(settings).on_host else None
        extended = self.extension and tuple(values.tobytes() for values in vars(self.extension).values())
        return settings.federation().agent.shared, settings.seeds, length, self.begin, extended, alone

    @property
    def batch(self) -> int:
        """Steps in a large batch of episodes."""
        settings = self.settings
        steps = settings.ppo.num_steps if settings.has_critic else settings.large_batch * settings.horizon
        return settings.num_seeds * settings.num_agents * steps

    @property
    def work(self) -> float:
        """What it will cost, roughly: an episode of LunarLander as much as seven of CartPole."""
        settings = self.settings
        steps = settings.length * (settings.ppo.epochs if settings.has_critic else settings.horizon)
        return settings.num_seeds * settings.num_agents * steps * settings.bound_policy().dimension ** 0.5


@contextmanager
def _logging(pending: Sequence[_Pending], names: Sequence[str]) -> Iterator[list[_Pending]]:
    """The runs with logs of these names, which are open meanwhile."""
    with ExitStack() as opened:

        def with_logs(each: _Pending) -> _Pending:
            assert each.kept is not None
            logs = (open_log(name, each.kept.path, each.settings) for name in dict.fromkeys(names))
            return replace(each, logs=tuple(opened.enter_context(closing(log)) for log in logs))

        yield [with_logs(each) for each in pending] if names else list(pending)


def _complete_logs(kept: RunDirectory, names: Sequence[str]) -> Run:
    """Write what these logs lack of a complete run, and return it."""
    run = kept.read_results()
    for name in dict.fromkeys(names):
        with closing(open_log(name, kept.path, run.settings)) as log:
            log.extend(reports_of(run))
    return run


def _parts(group: list[_Pending]) -> Iterator[list[_Pending]]:
    """Divide runs of one program into parts, as few and as equal as memory allows."""
    largest = LARGEST_BATCH[_backend()]
    number = min(len(group), -(-sum(each.batch for each in group) // largest))
    ordered = sorted(group, key=lambda each: each.batch)
    for part in range(number):
        yield ordered[part::number]


def _backend() -> str:
    return "gpu" if jax.default_backend() == "gpu" else "cpu"


@contextmanager
def _compiling(parts: Sequence[Sequence[_Pending]]) -> Iterator[Callable[[int], object]]:
    """Compile the programs of these parts in the background; yields a function that waits for the one in a place."""
    threads = COMPILED_AT_ONCE[_backend()]
    if threads < 1 or len(parts) < 2 or devices.leads():
        yield lambda place: None
        return
    pool = ThreadPoolExecutor(threads, COMPILING)
    compiled = [pool.submit(lambda part=part: _Program(part).compile()) for part in parts]
    try:
        yield lambda place: compiled[place].exception()  # training will raise it again
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def is_compiling() -> bool:
    """Whether a program is being compiled in the background, which cannot be interrupted."""
    return any(thread.name.startswith(COMPILING) for thread in threading.enumerate())


def iterations_to_run(pace: float) -> int:
    """How many iterations to run before the next report, at `pace` seconds per iteration."""
    return max(1, min(BLOCK, int(REPORT_SECONDS / pace)))


class _Program:
    """Runs that share one program, from where they are to their end."""

    def __init__(self, pending: Sequence[_Pending]) -> None:
        self.started = time.monotonic()
        self.pending = pending
        settings = pending[0].settings
        self.simulation = simulation_of(*(each.settings for each in pending))
        if devices.leads() and self.simulation.on_host:
            raise ValueError(f"{settings.env} is a host task, which one process plays: leave out coordinator.")
        self.extension = pending[0].extension
        self.timetable = settings.schedule().timetable(self.simulation.initial_parameters(), self.extension)
        self.done = pending[0].begin
        self.blocks: list[list[dict[str, np.ndarray]]] = [[] for _ in pending]  # metrics of each run, block by block
        checkpoints = [each.checkpoint for each in pending if each.checkpoint is not None]
        if checkpoints:
            self.states = self.simulation.placed(_restored(self.simulation, self.timetable, checkpoints))
            self.blocks = [[checkpoint.metrics] for checkpoint in checkpoints]
        else:
            self.states = self.simulation.start()
        self.venue = self.simulation.venue()
        self.next_save = self.started + CHECKPOINT_SECONDS
        self.logged = 0  # entries that all logs have; at first they are given all, and pass over those that they have
        self.pace = inf  # seconds per iteration of the last block; nothing is known of the first one

    def run(self, on_progress: OnProgress | None, on_iteration: OnIteration | None = None) -> list[Run]:
        """Train to the end; what a callback or a log raises stops all processes, and is raised once all is saved.

        Args:
            on_progress: Called after every block.
            on_iteration: Called for every iteration of the first run, after its block.
        """
        stopped, decision = None, GO_ON
        if devices.leads():
            _lead(self.pending)
        with devices.common_program():
            while self.done < self.timetable.num_entries and decision != STOP:
                self._run_block()
                try:
                    if stopped is None and on_iteration is not None:
                        for report in self._latest_reports():
                            on_iteration(report)
                    if stopped is None and on_progress is not None:
                        on_progress(self._progress())
                except BaseException as error:  # Ctrl-C among others
                    stopped = error
                decision = devices.broadcast_number(self._decide(stopped))
                if decision != GO_ON:
                    self._save()
                    try:
                        self._log()
                    except BaseException as error:
                        stopped = error if stopped is None else stopped
            states = self.simulation.fetched(self.states)
        if stopped is not None:
            raise stopped
        if self.logged < self.done:  # a log failed in the last iteration, and the run was resumed
            self._log()
        return [] if decision == STOP else self._finish(states)

    def _latest_reports(self) -> Iterator[Report]:
        latest = self.blocks[0][-1]
        first = self.done - latest["return_mean"].shape[1]
        return reports(self.pending[0].settings, self.timetable, latest, first)

    def _log(self) -> None:
        """Bring all logs up to the checkpoint."""
        for each, blocks in zip(self.pending, self.blocks, strict=True):
            latest = {name: values[:, self.logged :] for name, values in _joined(blocks).items()} if each.logs else {}
            for log in each.logs:
                log.extend(reports(each.settings, self.timetable, latest, self.logged))
        self.logged = self.done

    def _run_block(self) -> None:
        began = time.monotonic()
        length = devices.broadcast_number(iterations_to_run(self.pace))
        timetable, entries = self.timetable, slice(self.done, self.done + length)
        large = timetable.large[entries]
        # One length is one program. On the host there is none for a whole block, and one iteration may take minutes.
        batches = np.full(length if self.simulation.on_host else BLOCK, SKIP)
        batches[: len(large)] = np.where(large, LARGE, SMALL)
        takes_part = None
        if not timetable.in_step:
            takes_part = np.zeros((len(timetable.plans), len(batches)), bool)
            takes_part[:, : len(large)] = timetable.takes_part[:, entries]
        self.states, latest = self.simulation.run(
            self.states,
            batches,
            timetable.output_iterations,
            takes_part=takes_part,
            only_large=timetable.only_large,
            venue=self.venue,
        )
        for blocks, block in zip(self.blocks, latest, strict=True):
            blocks.append({name: values[:, : len(large)] for name, values in vars(block).items()})
        self.done += len(large)
        self.pace = (time.monotonic() - began) / len(large)

    def compile(self) -> None:
        """Compile the program of all blocks; a host task has none."""
        if not self.simulation.on_host:
            timetable, batches = self.timetable, np.full(BLOCK, SKIP)
            takes_part = None if timetable.in_step else np.zeros((len(timetable.plans), BLOCK), bool)
            self.simulation.compiled(batches, takes_part=takes_part, only_large=timetable.only_large)

    def _progress(self) -> Progress:
        plans = self.timetable.plans
        done = self.timetable.iterations(self.done)
        reached = np.mean([plan.progress[end - 1] for plan, end in zip(plans, done, strict=True)])
        total = np.mean([plan.progress[-1] for plan in plans])
        latest = self.blocks[0][-1]["return_mean"]
        took_part = self.timetable.takes_part[:, self.done - latest.shape[1] : self.done]
        return Progress(
            iteration=self.done,
            num_iterations=self.timetable.num_entries,
            progress=int(reached),
            total=int(total),
            unit=self.pending[0].settings.unit,
            mean_return=float(np.mean(latest[took_part])),
            seconds=time.monotonic() - self.started,
            done=float(reached / total),
        )

    def _decide(self, stopped: BaseException | None) -> int:
        if stopped is not None:
            return STOP
        ended = self.done == self.timetable.num_entries
        return SAVE if ended or time.monotonic() > self.next_save else GO_ON

    def _save(self) -> None:
        began = time.monotonic()
        for each, state, blocks in zip(self.pending, self.simulation.fetched(self.states), self.blocks, strict=True):
            if each.kept is not None:
                saved = Checkpoint(self.done, jax.tree.leaves(state), _joined(blocks), self.extension)
                each.kept.write_checkpoint(saved)
        spent = time.monotonic() - began
        self.next_save = time.monotonic() + max(CHECKPOINT_SECONDS, spent / CHECKPOINT_SHARE)

    def _finish(self, states: States) -> list[Run]:
        runs = [
            _results(each.settings, self.timetable, state, _joined(blocks))
            for each, state, blocks in zip(self.pending, states, self.blocks, strict=True)
        ]
        for each, run in zip(self.pending, runs, strict=True):
            if each.kept is not None:
                each.kept.write_results(run)
        return runs


def _joined(blocks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([block[name] for block in blocks], axis=1) for name in blocks[0]}


def _results(
    settings: Settings, timetable: Timetable, state: SimulationState, metrics: Mapping[str, np.ndarray]
) -> Run:
    """The run, from its metrics [seed, entry]."""
    return Run.of(
        settings,
        timetable.plans,
        metrics={name: timetable.by_iteration(values) for name, values in metrics.items()},
        last=np.asarray(state.agents.parameters),
        uniform=np.asarray(state.output),
        done=np.asarray(state.iteration),
    )
