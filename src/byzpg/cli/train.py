"""byzpg train."""

from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Annotated

import tyro

from byzpg.cli.console import say
from byzpg.cli.hardware import HardwareOptions, follows_another_process
from byzpg.cli.parts import OwnModules
from byzpg.cli.resume import COMPARISON, Logs, finish
from byzpg.config import AUTO, Config, Settings
from byzpg.federation.devices import Hardware
from byzpg.logs import check_logs
from byzpg.runs import RunDirectory

# The algorithm that averages plainly, for each that aggregates robustly.
PLAIN = {"DecByzPG": "Dec-PAGE-PG", "ByzPG": "Fed-PAGE-PG", "DecByzPPO": "Dec-PPO", "ByzPPO": "Fed-PPO"}

TrainingOptions = Annotated[
    tyro.conf.OmitArgPrefixes[Config],
    tyro.conf.arg(
        name="training",
        help="What to train. The preset sets every option that is not given: `byzpg train --help` shows its defaults "
        "for the task, algorithm and preset that stand before --help.",
    ),
]


@dataclass(frozen=True)
class Train:
    """Train a federation and show how it went.

    The run is kept in a directory: its options, metrics, checkpoints, parameters and learning curves. Robust algorithms
    are compared with plain averaging under the same attack.

    Example: byzpg train --env LunarLander-v3 --attack ALIE --num-attackers 2
    """

    options: TrainingOptions
    config: Path | None = None
    """File with options, .toml or .json, such as the config.json of a run. Options on the command line override it."""
    directory: Path | None = None
    """Directory for the run, which must be new or empty. Default: runs/TASK-ALGORITHM-ATTACK-1, or the next number."""
    compare: bool = True
    """Also train plain averaging under the same attack."""
    log: Logs = ()
    """Logs of all metrics to write into the directory: jsonl (metrics.jsonl), tensorboard, wandb (Weights & Biases).
    Default: none. Example: --log jsonl tensorboard"""
    parts: OwnModules = ()
    hardware: HardwareOptions = field(default_factory=Hardware)

    def run(self) -> None:
        if follows_another_process(self.hardware):
            return
        check_logs(self.log)
        settings = self.options.resolved()
        if self.options.algorithm == AUTO:
            say(f"Algorithm: {settings.algorithm}, the best one measured for these options. --algorithm sets another.")
        directory = free_directory(settings) if self.directory is None else self.directory
        planned = {directory: settings}
        if self.compare and settings.num_attackers and settings.algorithm in PLAIN:
            planned[directory / COMPARISON] = _with_plain_averaging(self.options, settings)
        # Both runs are created before either starts, so that `byzpg resume` can finish both, whatever stops them.
        for path, each in planned.items():
            RunDirectory.create(path, each)
        finish(directory, self.log)


def free_directory(settings: Settings) -> Path:
    """The first directory for such a run that does not exist yet."""
    name = f"{settings.task_in_names}-{settings.algorithm}-{type(settings.attack).__name__}"
    return numbered(Path("runs") / name)


def numbered(path: Path) -> Path:
    """The first of PATH-1, PATH-2, ... that does not exist yet."""
    return next(free for number in count(1) if not (free := path.with_name(f"{path.name}-{number}")).exists())


def _with_plain_averaging(options: Config, settings: Settings) -> Settings:
    """The same federation and attack, with the plain mean in place of the robust rules."""
    same = {"num_byzantine": settings.num_byzantine, "num_attackers": settings.num_attackers}
    neutral = {"aggregator": None, "agreement": None, "rounds": None}
    return replace(options, algorithm=PLAIN[settings.algorithm], **neutral, **same).resolved()
