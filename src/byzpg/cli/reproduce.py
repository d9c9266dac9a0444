"""byzpg reproduce."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from byzpg.cli.console import console, say, this_command
from byzpg.cli.hardware import HardwareOptions, follows_another_process, training_progress
from byzpg.config import REPORTED_SEED
from byzpg.federation.devices import Hardware
from byzpg.runs import RunDirectory, provenance

if TYPE_CHECKING:
    from byzpg.config import Settings
    from byzpg.experiments.paper import Grid

# The options that say what is run. Most experiments take them all, and some are run by themselves and take fewer.
SCOPE = ("task", "panel", "preset", "seeds", "seed", "trajectories", "steps")
BY_ITSELF = {"rates": ("seeds", "seed")}


@dataclass(frozen=True)
class Reproduce:
    """Run the experiments of the paper, or those beyond it, and plot them next to the published curves.

    Finished runs are kept and skipped: a grid that was stopped continues, and a larger grid only trains what is new.

    Example: byzpg reproduce fig2 --seeds 3
    """

    names: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="NAME [NAME ...]", help_behavior_hint="(at least one)"),
    ]
    """Experiments. In the paper: fig1 to fig6, or cartpole, lunarlander, all. Beyond the paper: ablation, momentum,
    traces, variance, speedup, tolerance, heatmap, rotating, agreement, averaging, or beyond for all of these. With a
    critic: joining, which compares members of federations with a single agent. By itself: rates, which measures the
    rates of the theorems on a task with an exact gradient."""
    task: str | None = None
    """Task whose experiments are run: CartPole-v1 or LunarLander-v3; for joining, any task with a level to reach.
    Default: both tasks, and LunarLander-v3 for joining."""
    panel: str | None = None
    """Title of the panels that are kept, in most experiments an attack: AvgZero. Default: all panels."""
    preset: Literal["tuned", "paper", "theory", "script"] = "tuned"
    """Preset of every run: tuned learns fastest, paper is the paper's table, theory is what its theorems ask for,
    script is the published script."""
    seeds: int | None = None
    """Number of seeds per run. Default: 10, or fewer in large grids."""
    seed: int = REPORTED_SEED
    """First seed."""
    trajectories: int | None = None
    """Number of trajectories per agent. Default: those of the preset with tuned, otherwise 8,000 as in the paper; some
    experiments have a length of their own."""
    steps: int | None = None
    """Number of environment steps per agent, in place of trajectories for joining. Default: those of the preset, of
    which a single agent has more."""
    directory: Path = Path("reproduction")
    """Directory for runs, results and plots."""
    hardware: HardwareOptions = field(default_factory=Hardware)

    def run(self) -> None:
        from byzpg.experiments.paper import Scope, grid

        if follows_another_process(self.hardware):
            return
        self._check()
        if "rates" in self.names:
            self._measure_rates()
            return
        scope = Scope(self.preset, self.seeds, self.seed, self.trajectories, self.steps)
        planned = grid(self.names, scope, self.task, self.panel)
        directories = planned.create_runs(self.directory / "runs")
        started_before = any((directory / "checkpoint.npz").is_file() for directory in directories)
        seconds = self._train(directories, f"preset {self.preset}")
        about = {**provenance(), "command": this_command()}
        if not started_before:  # otherwise the seconds are those of the last part alone
            about["seconds"] = seconds
        self._conclude(planned, directories, about)

    def _check(self) -> None:
        from byzpg.experiments.paper import COLLECTIONS, EXPERIMENTS, WITH_CRITIC

        if not self.names:
            raise ValueError(f"reproduce needs at least one name: {', '.join([*EXPERIMENTS, *COLLECTIONS])}.")
        defaults = {option.name: option.default for option in fields(self)}
        for name in BY_ITSELF.keys() & self.names:
            for option in SCOPE:
                if option not in BY_ITSELF[name] and (given := getattr(self, option)) != defaults[option]:
                    raise ValueError(f"--{option} has no effect on {name}, got {given}: leave it out.")
            if len(self.names) > 1:
                raise ValueError(f"{name} is run by itself: leave out the other names, or run them in another command.")
        for option in ("seeds", "trajectories", "steps"):
            if (given := getattr(self, option)) is not None and given < 1:
                raise ValueError(f"--{option} must be at least 1, got {given}.")
        with_critic = [name in WITH_CRITIC for name in self.names]
        for option, other, counts in (
            ("trajectories", "steps", not all(with_critic)),
            ("steps", "trajectories", any(with_critic)),
        ):
            if (given := getattr(self, option)) is not None and not counts:
                raise ValueError(f"--{option} has no effect on {', '.join(self.names)}, got {given}: use --{other}.")

    def _train(self, directories: list[Path], which: str) -> float:
        """Train what is not complete yet, and return the seconds that took."""
        from byzpg import training

        started = time.monotonic()
        left = sum(not RunDirectory.open(directory).complete for directory in directories)
        with training_progress(this_command()) as on_progress:
            say(f"{len(directories)} runs, {which}: {len(directories) - left} done, {left} to do.")
            training.resume_all(directories, on_progress)
        return time.monotonic() - started

    def _measure_rates(self) -> None:
        """Choose settings on the tuning seeds, measure them on the reported ones, and save, print and plot that."""
        from byzpg.cli.tables import rates_tables
        from byzpg.experiments import figures, rates
        from byzpg.experiments.paper import create_runs, run_name

        scope, folder = rates.Scope(self.seed, self.seeds or rates.NUM_SEEDS), self.directory / "runs"
        started, started_before = time.monotonic(), folder.exists()

        def train(settings: "Sequence[Settings]", which: str) -> None:
            self._train(create_runs(folder, {run_name(each): each for each in settings}), which)

        train(scope.tuning_settings(), "seeds for tuning")
        train(scope.reported_settings(folder), "reported seeds")
        with console.status("measuring the noise of corrections"):
            noises = dict(rates.correction_noises())
        about = {**provenance(), "command": this_command()}
        if not started_before:
            about["seconds"] = time.monotonic() - started
        measured, saved = rates.Rates.of(scope, folder, noises, about), self.directory / f"{self._file_name()}.npz"
        measured.save(saved)
        for table in rates_tables(measured):
            console.print(table)
        plot = saved.with_suffix(".png")
        for ending in (".png", ".svg", ".pdf"):
            figures.save(figures.draw_rates(measured), plot.with_suffix(ending))
        say(f"Plot: {plot} (also .svg and .pdf)")
        say(f"Results: {saved}")

    def _conclude(self, planned: "Grid", directories: list[Path], about: dict[str, Any]) -> None:
        """Save the results, print the table and save the plots."""
        from byzpg import training
        from byzpg.cli.report import save_plots
        from byzpg.cli.tables import experiments_table, reach_table, report_diverged
        from byzpg.experiments.results import Results

        runs = {directory.name: training.load(directory) for directory in directories}
        results, saved = Results.of(planned, runs, about), self.directory / f"{self._file_name()}.npz"
        results.save(saved)
        console.print(experiments_table(results))
        for experiment in results.experiments:
            if experiment.kind == "reach":
                console.print(reach_table(experiment, results.runs))
        for name, run in runs.items():
            report_diverged(run.diverged, self.directory / "runs" / name)
        save_plots([results], saved.with_suffix(""))
        say(f"Results: {saved}")
        say(f"Make a report: byzpg report {saved}")

    def _file_name(self) -> str:
        """A name that says what was asked for, so that no other results are overwritten."""
        asked = {
            "task": self.task.replace(":", "-").replace("/", "-") if self.task else None,
            "panel": self.panel.replace(" ", "-") if self.panel else None,
            "preset": self.preset,
            "seeds": f"{self.seeds}-seeds" if self.seeds else None,
            "seed": f"from-{self.seed}" if self.seed != REPORTED_SEED else None,
            "trajectories": f"{self.trajectories}-trajectories" if self.trajectories else None,
            "steps": f"{self.steps}-steps" if self.steps else None,
        }
        taken = BY_ITSELF.get(self.names[0], SCOPE)
        return "-".join([*self.names, *(text for option, text in asked.items() if text and option in taken)])
