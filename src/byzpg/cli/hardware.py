"""What the commands that train share: the hardware options and the line of progress."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import tyro

from byzpg.cli.console import progress_line, say
from byzpg.experiments.statistics import significant
from byzpg.federation import devices

if TYPE_CHECKING:  # loads the simulator, which the commands of a live federation do not need
    from byzpg.training import OnProgress, Progress

HardwareOptions = Annotated[
    tyro.conf.OmitArgPrefixes[devices.Hardware],
    tyro.conf.arg(name="hardware", help="The devices to train on, on one host or on several."),
]


def follows_another_process(hardware: devices.Hardware) -> bool:
    """Take the devices. If this process follows another one, do what that one does, to the end; then return True."""
    hardware.start()
    if not devices.follows():
        return False
    from byzpg import training

    say(f"Process {hardware.process} of {hardware.processes} follows {hardware.coordinator}.")
    training.follow()
    say("Done.")
    return True


@contextmanager
def training_progress(continue_with: str) -> "Iterator[OnProgress]":
    """Show how far training is. After Ctrl-C it ends with a checkpoint, from which a command continues."""
    with progress_line(
        first="compiling", on_stop="Stopping after this block of iterations", continue_with=continue_with
    ) as show:

        def on_progress(progress: "Progress") -> None:
            text = (
                f"{progress.label}{progress.progress:,} of {progress.total:,} {progress.unit} per agent, "
                f"return {significant(progress.mean_return)}"
            )
            # After the last iteration of one program, the next one is compiled.
            ended = progress.iteration == progress.num_iterations
            show(progress.done, text, seconds=progress.seconds, ended=ended, live="compiling" if ended else text)

        yield on_progress
