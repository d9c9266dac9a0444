"""byzpg reproduce."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from byzpg.cli.console import console, say, this_command
from byzpg.cli.hardware import HardwareOptions, follows_another_process, training_progress
from byzpg.config import REPORTED_SEED
from byzpg.federation.devices import Hardware
from byzpg.runs import RunDirectory, provenance

if TYPE_CHECKING:
    from byzpg.experiments.paper import Grid


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
    variance, speedup, tolerance, heatmap, rotating, agreement, averaging, or beyond for all of these."""
    task: Literal["CartPole-v1", "LunarLander-v3"] | None = None
    """Task whose experiments are run. Default: both tasks."""
    preset: Literal["tuned", "paper", "theory", "script"] = "tuned"
    """Preset of every run: tuned learns fastest, paper is the paper's table, theory is what its theorems ask for,
    script is the published script."""
    seeds: int | None = None
    """Number of seeds per run. Default: 10, or fewer in large grids."""
    seed: int = REPORTED_SEED
    """First seed."""
    trajectories: int | None = None
    """Number of trajectories per agent. Default: 8,000 as in the paper; fewer in the experiments beyond it."""
    directory: Path = Path("reproduction")
    """Directory for runs, results and plots."""
    hardware: HardwareOptions = field(default_factory=Hardware)

    def run(self) -> None:
        from byzpg.experiments.paper import Scope, grid

        if follows_another_process(self.hardware):
            return
        self._check()
        scope = Scope(preset=self.preset, num_seeds=self.seeds, seed=self.seed, trajectories=self.trajectories)
        planned = grid(self.names, scope, self.task)
        directories = planned.create_runs(self.directory / "runs")
        started_before = any((directory / "checkpoint.npz").is_file() for directory in directories)
        seconds = self._train(directories)
        about = {**provenance(), "command": this_command()}
        if not started_before:  # otherwise the seconds are those of the last part alone
            about["seconds"] = seconds
        self._conclude(planned, directories, about)

    def _check(self) -> None:
        from byzpg.experiments.paper import COLLECTIONS, EXPERIMENTS

        if not self.names:
            raise ValueError(f"reproduce needs at least one name: {', '.join([*EXPERIMENTS, *COLLECTIONS])}.")
        for option in ("seeds", "trajectories"):
            if (given := getattr(self, option)) is not None and given < 1:
                raise ValueError(f"--{option} must be at least 1, got {given}.")

    def _train(self, directories: list[Path]) -> float:
        """Train what is not complete yet, and return the seconds that took."""
        from byzpg import training

        started = time.monotonic()
        left = sum(not RunDirectory.open(directory).complete for directory in directories)
        with training_progress(this_command()) as on_progress:
            say(f"{len(directories)} runs, preset {self.preset}: {len(directories) - left} done, {left} to do.")
            training.resume_all(directories, on_progress)
        return time.monotonic() - started

    def _conclude(self, planned: "Grid", directories: list[Path], about: dict[str, Any]) -> None:
        """Save the results, print the table and save the plots."""
        from byzpg import training
        from byzpg.cli.report import save_plots
        from byzpg.cli.tables import experiments_table, report_diverged
        from byzpg.experiments.results import Results

        runs = {directory.name: training.load(directory) for directory in directories}
        results, saved = Results.of(planned, runs, about), self.directory / f"{self._file_name()}.npz"
        results.save(saved)
        console.print(experiments_table(results))
        for name, run in runs.items():
            report_diverged(run.diverged, self.directory / "runs" / name)
        save_plots([results], saved.with_suffix(""))
        say(f"Results: {saved}")
        say(f"Make a report: byzpg report {saved}")

    def _file_name(self) -> str:
        """A name that says what was asked for, so that no other results are overwritten."""
        asked = [
            *self.names,
            self.task,
            self.preset,
            f"{self.seeds}-seeds" if self.seeds else None,
            f"from-{self.seed}" if self.seed != REPORTED_SEED else None,
            f"{self.trajectories}-trajectories" if self.trajectories else None,
        ]
        return "-".join(part for part in asked if part)
