"""The command line. Nothing else prints."""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, Union, get_args

import numpy as np
import tyro
from jax.errors import JaxRuntimeError
from rich.markup import escape
from rich.table import Table
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from byzpg import _registry, envs, play, training
from byzpg.cli import certify, live, sweep
from byzpg.cli.console import check_picture, console, errors, progress_line, say
from byzpg.config import Config, Settings
from byzpg.envs import host
from byzpg.experiments import statistics
from byzpg.experiments.paper import COLLECTIONS, EXPERIMENTS, Scope, grid
from byzpg.experiments.results import Results
from byzpg.experiments.summaries import final_returns, run_means
from byzpg.federation import devices
from byzpg.federation.algorithms import ALGORITHMS
from byzpg.robust.components import Component
from byzpg.robust.least_diameter import SearchLimitError
from byzpg.runs import Run, RunDirectory, provenance

if TYPE_CHECKING:  # it loads Matplotlib, which is slow: commands that draw import it themselves
    from byzpg.experiments import figures

COMPARISON = "plain-averaging"  # where, in a run's directory, the run it is compared with lies

# Options that several commands have.
HardwareOptions = Annotated[tyro.conf.OmitArgPrefixes[devices.Hardware], tyro.conf.arg(name="hardware")]


def _follows(hardware: devices.Hardware) -> bool:
    """Take the devices. Where this process follows another, do as that one does; then there is no more to do."""
    hardware.start()
    if devices.follows():
        say(f"Process {hardware.process} of {hardware.processes} follows {hardware.coordinator}.")
        training.follow()
        say("Done.")
    return devices.follows()


@dataclass(frozen=True)
class Train:
    """Train a federation, and show how it went.

    Everything is kept in a directory: options, metrics, checkpoints, parameters, a picture of the learning curves. For
    ByzPG and DecByzPG the picture also shows plain averaging under the same attack.
    """

    options: Annotated[tyro.conf.OmitArgPrefixes[Config], tyro.conf.arg(name="training")]
    config: Path | None = None
    """A .toml or .json file of options, such as a run's config.json; options on the command line come first."""
    directory: Path | None = None
    """Where the run goes; must not hold a run yet. Left out: runs/ and a name with the first free number."""
    compare: bool = True
    """Train plain averaging under the same attack as well."""
    hardware: HardwareOptions = field(default_factory=devices.Hardware)

    def run(self) -> None:
        if _follows(self.hardware):
            return
        settings = self.options.resolved()
        directory = _free_directory(settings) if self.directory is None else self.directory
        plans, others = {directory: settings}, {"DecByzPG": "Dec-PAGE-PG", "ByzPG": "Fed-PAGE-PG"}
        if self.compare and settings.num_attackers and settings.algorithm in others:
            other = replace(
                self.options, algorithm=others[settings.algorithm], aggregator=None, agreement=None, rounds=None
            )
            plans[directory / COMPARISON] = other.resolved()
        # Both runs are laid down before either starts, so that whatever stops them, `resume` does all the rest.
        for path, planned in plans.items():
            RunDirectory.create(path, planned)
        _resume(directory)


@dataclass(frozen=True)
class Resume:
    """Continue a run from its last checkpoint, as if it had never stopped."""

    directory: tyro.conf.Positional[Path]
    """The run's directory."""
    hardware: HardwareOptions = field(default_factory=devices.Hardware)

    def run(self) -> None:
        if not _follows(self.hardware):
            _resume(self.directory)


def _resume(path: Path) -> None:
    from byzpg.experiments import figures

    comparison = path / COMPARISON
    directories = [path, comparison] if comparison.exists() else [path]
    plans = {directory: RunDirectory.open(directory).settings() for directory in directories}
    with _progress(f"byzpg resume {path}") as on_progress:
        for directory, settings in plans.items():
            seeds = f"{settings.num_seeds} seed{'s' * (settings.num_seeds > 1)}"
            say(f"{_method(settings)} on {_setting(settings)}: {seeds}, preset {settings.preset} → {directory}")
        training.resume_all(directories, on_progress)
    runs = {directory: training.load(directory) for directory in directories}
    console.print(_summary(runs))
    for directory, run in runs.items():
        if run.diverged:
            seeds = ", ".join(map(str, run.diverged))
            say(f"Diverged: seed {seeds} of {directory}. A smaller --step-size, or a cap on the weights, may help.")
    picture, settings = path / "curves.png", plans[path]
    solved = envs.make(settings.env).reward_threshold
    figures.save(
        figures.learning_curves(
            _curves(runs), _setting(settings), reference_level=solved, reference_name="counts as solved"
        ),
        picture,
    )
    say(f"Picture: {picture}")
    say(f"See it play: byzpg play {path}")


@dataclass(frozen=True)
class Reproduce:
    """Run the experiments of the paper, or those beyond it, and draw them next to the published curves.

    Finished runs are kept and skipped, so that a grid that was stopped goes on, and a larger one does only what is new.
    """

    names: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="NAME [NAME ...]", help_behavior_hint="(at least one)"),
    ]
    """fig1 to fig6, cartpole, lunarlander, all (six figures); beyond the paper: ablation, speedup, tolerance, heatmap,
    rotating, agreement, beyond (all of these)."""
    task: Literal["CartPole-v1", "LunarLander-v3"] | None = None
    """Only the panels of this task."""
    preset: Literal["tuned", "paper", "script"] = "tuned"
    """tuned (learns fastest), paper (its table), script (as published)."""
    seeds: int | None = None
    """Seeds of every run. Left out: 10, in larger grids fewer."""
    seed: int = 2000
    """The first seed."""
    trajectories: int | None = None
    """Trajectories per agent. Left out: 8,000, as in the paper; in experiments beyond it fewer."""
    directory: Path = Path("reproduction")
    """Where runs, results and pictures go."""
    hardware: HardwareOptions = field(default_factory=devices.Hardware)

    def run(self) -> None:
        if _follows(self.hardware):
            return
        if not self.names:
            raise ValueError(f"reproduce needs a name: {', '.join([*EXPERIMENTS, *COLLECTIONS])}.")
        for option in ("seeds", "trajectories"):
            if (given := getattr(self, option)) is not None and given < 1:
                raise ValueError(f"--{option} must be at least 1, got {given}.")
        planned = grid(self.names, Scope(self.preset, self.seeds, self.seed, self.trajectories), self.task)
        directories = planned.lay_down(self.directory / "runs")
        left = sum(not RunDirectory.open(directory).complete for directory in directories)
        begun = any((directory / "checkpoint.npz").is_file() for directory in directories)
        started = time.monotonic()
        command = shlex.join(["byzpg", *sys.argv[1:]])
        with _progress(command) as on_progress:
            say(f"{len(directories)} runs, preset {self.preset}: {len(directories) - left} done, {left} to do.")
            training.resume_all(directories, on_progress)
        about = {**provenance(), "command": command}
        if not begun:  # else it would be the time of the last call alone
            about["seconds"] = time.monotonic() - started
        runs = {directory.name: training.load(directory) for directory in directories}
        results, kept = Results.of(planned, runs, about), self.directory / f"{self._name()}.npz"
        results.save(kept)
        console.print(_table_of(results))
        for name, run in runs.items():
            if run.diverged:
                say(f"Diverged: seed {', '.join(map(str, run.diverged))} of {self.directory / 'runs' / name}.")
        _draw([results], kept.with_suffix(""))
        say(f"Results: {kept}")
        say(f"A page of them: byzpg report {kept}")

    def _name(self) -> str:
        """What was asked for, so that no other results are overwritten."""
        asked = [
            *self.names,
            self.task,
            self.preset,
            f"{self.seeds}-seeds" if self.seeds else None,
            f"from-{self.seed}" if self.seed != Scope().seed else None,
            f"{self.trajectories}-trajectories" if self.trajectories else None,
        ]
        return "-".join(part for part in asked if part)


@dataclass(frozen=True)
class Report:
    """Write results of `byzpg reproduce` as one self-contained HTML page: figures, tables, commands, what differs."""

    results: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="FILE [FILE ...]", help_behavior_hint="(at least one)"),
    ]
    """Files that `byzpg reproduce` has written, .npz."""
    output: Path = Path("report.html")
    """Where the page goes."""
    figures: Path | None = None
    """A folder for the figures as pictures of their own: .png, .svg and .pdf."""

    def run(self) -> None:
        from byzpg.experiments.report import write_report

        if not self.results:
            raise ValueError("report needs at least one .npz file of `byzpg reproduce`.")
        if self.output.suffix != ".html":
            raise ValueError(f"--output must end in .html, got {self.output}.")
        loaded = [Results.load(path) for path in self.results]
        with console.status("drawing"):
            write_report(loaded, self.output)
        if self.figures is not None:
            _draw(loaded, self.figures)
        say(f"Page: {self.output}")


@dataclass(frozen=True)
class Plot:
    """Compare runs: mean ± standard deviation, and interquartile mean with bootstrap intervals."""

    directories: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="PATH [PATH ...]", help_behavior_hint="(at least one)"),
    ]
    """Directories of runs, complete or not."""
    output: Path = Path("curves.png")
    """Where the picture goes; .png, .svg or .pdf."""
    title: str = "Learning curves"

    def run(self) -> None:
        from byzpg.experiments import figures

        check_picture(self.output)
        if not self.directories:
            raise ValueError("plot needs at least one run's directory.")
        runs = {directory: training.load(directory) for directory in self.directories}
        console.print(_summary(runs))
        figures.save(figures.learning_curves(_curves(runs), self.title), self.output)
        say(f"Picture: {self.output}")


@dataclass(frozen=True)
class Play:
    """Play a trained policy in the real environment; prints returns and, where it can be drawn, records an episode."""

    directory: tyro.conf.Positional[Path]
    """The run's directory."""
    episodes: int = 10
    seed: int = 0
    """Of the environment; episode i starts from seed + i."""
    index: int = 0
    """Which of the run's seeds."""
    agent: int = 0
    """Whose parameters."""
    sample: bool = False
    """Draw actions from the policy, as in training, instead of taking the most likely one."""
    output: Path | None = None
    """Where the animation goes, .gif. Left out: play.gif in the run's directory."""

    def run(self) -> None:
        from byzpg.experiments import figures

        output = self.directory / "play.gif" if self.output is None else self.output
        if output.suffix != ".gif":
            raise ValueError(f"--output must end in .gif, got {output}.")
        if self.episodes < 1:
            raise ValueError(f"--episodes must be at least 1, got {self.episodes}.")
        if not 0 <= self.seed <= 2**31 - 1 - self.episodes:
            raise ValueError(f"--seed must not be negative, nor seed + episodes exceed 2³¹ − 1; got {self.seed}.")
        run = training.load(self.directory)
        policy = run.policy(self.index, self.agent)
        with console.status("playing"):
            returns, frames = play.evaluate(policy, run.settings, self.episodes, self.seed, self.sample)
            if frames:
                figures.save_animation(frames, output)
        shown = ", ".join(f"{each:g}" for each in returns)
        say(f"{run.settings.env}, {self.episodes} episodes: mean return {returns.mean():.1f} ({shown})")
        say(f"First episode: {output}" if frames else "This task makes no pictures.")


@dataclass(frozen=True)
class List:
    """List algorithms, rules, attacks and environments."""

    def run(self) -> None:
        families = {
            "algorithm": {name: algorithm.summary for name, algorithm in ALGORITHMS.items()},
            **{
                family: {name: _registry.summary(member) for name, member in _registry.members(family).items()}
                for family in _registry.FAMILIES
            },
            "environment": {name: _registry.summary(member) for name, member in envs.ENVIRONMENTS.items()}
            | host.available(),
        }
        for family, members in families.items():
            table = Table(title=family, title_justify="left", show_header=False, box=None, padding=(0, 2))
            for name, summary in members.items():
                table.add_row(name, escape(summary))
            console.print(table)
            console.print()


def _free_directory(settings: Settings) -> Path:
    name = f"{settings.task_in_names}-{settings.algorithm}-{type(settings.attack).__name__}"
    return next(path for number in count(1) if not (path := Path("runs") / f"{name}-{number}").exists())


def _setting(settings: Settings) -> str:
    attackers = (
        f", {settings.num_attackers} of them lying ({_short(settings.attack)})" if settings.num_attackers else ""
    )
    agents = "1 agent" if settings.num_agents == 1 else f"{settings.num_agents} agents"
    return f"{settings.env}, {agents}{attackers}"


def _method(settings: Settings) -> str:
    """What tells algorithms apart: DecByzPG with RFA, or Dec-PAGE-PG with plain averaging."""
    if settings.num_agents == 1:
        return settings.algorithm
    robust = ALGORITHMS[settings.algorithm].robust
    return f"{settings.algorithm} with {_short(settings.aggregator) if robust else 'plain averaging'}"


def _short(component: Component) -> str:
    return str(component).removesuffix("()")


def _curves(runs: Mapping[Path, Run]) -> "list[figures.Curve]":
    from byzpg.experiments import figures

    labels = [_method(run.settings) for run in runs.values()]
    attacked = [f"{label}, {_short(run.settings.attack)}" for label, run in zip(labels, runs.values(), strict=True)]
    for candidate in (labels, attacked):
        if len(set(candidate)) == len(labels):
            break
    else:
        candidate = [str(path) for path in runs]
    return [
        figures.Curve(label, run.trajectories, run.returns) for label, run in zip(candidate, runs.values(), strict=True)
    ]


def _summary(runs: Mapping[Path, Run]) -> Table:
    table = Table(title="Return of honest agents: mean ± standard deviation over seeds")
    for column in ("run", "trajectories", "last tenth", "best", "solved at", "weight of attackers"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for path, run in runs.items():
        threshold = envs.make(run.settings.env).reward_threshold
        end = run.trajectories[-1]
        smoothed = statistics.smooth_on_grid(run.trajectories, run.returns, np.linspace(0, end, 41)[1:])
        late = np.nanmean(smoothed[:, -4:], axis=1)
        solved = "–"
        if threshold is not None:
            reached = statistics.trajectories_to_reach(run.trajectories, run.returns, threshold, window=100)
            found = reached[np.isfinite(reached)]
            solved = f"{np.mean(found):,.0f} ({len(found)} of {len(reached)})" if len(found) else "never"
        weight = run.metrics["byzantine_weight"]
        shown = "–" if np.all(np.isnan(weight)) or not run.settings.num_attackers else f"{np.nanmean(weight):.1%}"
        best = np.nanmax(smoothed.mean(axis=0))
        name = f"{_method(run.settings)}\n[dim]{escape(str(path))}[/dim]"
        late_text = f"{late.mean():.0f} ± {late.std():.0f}"
        table.add_row(name, f"{end:,}", late_text, f"{best:.0f}", solved, shown)
    return table


def _draw(results: Sequence[Results], folder: Path) -> None:
    """Every experiment as a picture, for the screen and for papers."""
    from byzpg.experiments import figures
    from byzpg.experiments.report import by_preset

    folder.mkdir(parents=True, exist_ok=True)
    for chapter in by_preset(results):
        for experiment in chapter.experiments.values():
            picture = folder / f"{experiment.name}-{chapter.preset}.png"
            figure = figures.draw_experiment(experiment, chapter.runs)
            for ending in (".png", ".svg", ".pdf"):
                figures.save(figure, picture.with_suffix(ending))
            say(f"Picture: {picture} (and .svg, .pdf)")


def _table_of(results: Results) -> Table:
    """Every run of every experiment, in a line."""
    table = Table(title="Return of honest agents: mean ± standard deviation over seeds")
    for column in ("experiment", "panel", "run", "best", "last tenth", "weight of attackers"):
        table.add_column(column, justify="left" if column in ("experiment", "panel", "run") else "right")
    for experiment in results.experiments:
        for panel in experiment.panels:
            for cell in panel.cells:
                run = results.runs[cell.run]
                late, weight = final_returns(run), run_means(run, "byzantine_weight")
                attackers = "–" if weight is None or not run.settings.num_attackers else f"{np.nanmean(weight):.1%}"
                label = cell.label if cell.at is None else f"{cell.label}: {cell.at}"
                best, last = np.nanmax(run.returns.mean(axis=0)), f"{late.mean():.0f} ± {late.std():.0f}"
                table.add_row(experiment.name, panel.title, escape(label), f"{best:.0f}", last, attackers)
    return table


@contextmanager
def _progress(command: str) -> Iterator[training.OnProgress]:
    """How far training is; stopped, it ends with a checkpoint, from which `command` goes on."""
    with progress_line(command, "compiling", "Stopping after this block of iterations") as show:

        def on_progress(progress: training.Progress) -> None:
            now, total = progress.trajectories, progress.total_trajectories
            text = f"{progress.label}{now:,} of {total:,} trajectories: return {progress.mean_return:.0f}"
            # After its last iteration, what follows is the next program's compilation.
            ended = progress.iteration == progress.num_iterations
            show(progress.done, text, progress.seconds, ended, "compiling" if ended else text)

        yield on_progress


def _components_by_name(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[str] | None:
    """Rules, attacks and the like are texts on the command line, read when the options are resolved."""
    parts = get_args(info.type)
    if str not in parts or not any(isinstance(part, type) and issubclass(part, Component) for part in parts):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME",
        instance_from_str=lambda texts: texts[0],
        is_instance=lambda value: value is None or isinstance(value, str),
        str_from_instance=lambda value: [str(value)],
    )


def _default_options() -> Config:
    """The options of the file that `train --config` names, which those on the command line override."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    named = parser.parse_known_args(sys.argv[2:])[0].config if sys.argv[1:2] == ["train"] else None
    return Config() if named is None else Config.load(named)


def main() -> None:
    by_name = ConstructorRegistry()
    by_name.primitive_rule(_components_by_name)
    try:
        commands = Union[
            Annotated[Train, tyro.conf.subcommand("train", default=Train(_default_options()))],
            Annotated[Resume, tyro.conf.subcommand("resume")],
            Annotated[Reproduce, tyro.conf.subcommand("reproduce")],
            *sweep.COMMANDS,
            Annotated[Report, tyro.conf.subcommand("report")],
            Annotated[Plot, tyro.conf.subcommand("plot")],
            Annotated[Play, tyro.conf.subcommand("play")],
            Annotated[List, tyro.conf.subcommand("list")],
            *certify.COMMANDS,
            *live.COMMANDS,
        ]
        command = tyro.cli(  # pyright: ignore[reportCallIssue]
            commands,  # pyright: ignore[reportArgumentType]
            prog="byzpg",
            description="Byzantine fault-tolerant federated reinforcement learning.",
            registry=by_name,
            config=(tyro.conf.DisallowNone,),
        )
        try:
            command.run()
        finally:
            training.dismiss()
    except (ValueError, OSError, SearchLimitError) as error:
        errors.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        _exit(2)
    except JaxRuntimeError as error:
        if not devices.torn():
            raise
        errors.print(f"[red]error:[/red] {escape(str(error).splitlines()[0])}", highlight=False, soft_wrap=True)
        _exit(1)
    except ModuleNotFoundError as error:
        if error.name not in live.PACKAGES:
            raise
        errors.print(f"[red]error:[/red] {escape(live.INSTALL)}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        errors.print(escape(str(stop) or "Stopped."), highlight=False, soft_wrap=True)
        _exit(130)  # 128 + SIGINT, as shells have it


def _exit(code: int) -> NoReturn:
    if devices.torn():
        os._exit(code)  # an orderly end would wait for the others, who hang
    sys.exit(code)
