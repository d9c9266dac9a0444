"""Where the command line prints to, and what several commands have in common."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console()
errors = Console(stderr=True)

LINE_SECONDS = 10.0  # between two lines of progress, where there is no terminal


def say(text: str) -> None:
    """One line, however long: paths and commands are to be copied."""
    console.print(escape(text), soft_wrap=True, highlight=False)


def check_picture(path: Path) -> None:
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--output must end in .png, .svg or .pdf, got {path}.")


class Show(Protocol):
    """Shows how far it is; where somebody has pressed Ctrl-C, raises KeyboardInterrupt."""

    def __call__(self, done: float, text: str, seconds: float, ended: bool, live: str | None = None) -> None:
        """`done` of 1, after so many seconds; an end is always said; `live` is the text of a terminal, if another."""
        ...


@contextmanager
def progress_line(command: str, first: str, stopping_words: str) -> Iterator[Show]:
    """A live line of progress; Ctrl-C stops where `Show` is called next, a second one at once. `command` goes on."""
    stopping, farewell = False, f"Stopped. To go on from here: {command}"

    def stop(signum: int, frame: object) -> None:
        nonlocal stopping
        if stopping:  # an exception, raised in the midst of a compilation, could be swallowed or crash it
            console.show_cursor()
            errors.print(escape(farewell), highlight=False, soft_wrap=True)
            os._exit(130)
        stopping = True
        say(f"{stopping_words}; Ctrl-C again stops at once.")

    columns = (
        SpinnerColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    before = signal.signal(signal.SIGINT, stop)
    shown = -inf
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(first, total=1)

        def show(done: float, text: str, seconds: float, ended: bool, live: str | None = None) -> None:
            nonlocal shown
            bar.update(task, completed=done, description=text if live is None else live)
            if not console.is_terminal and (ended or seconds - shown > LINE_SECONDS):
                shown = -inf if ended else seconds
                say(f"{text}; {done:.0%} of all after {seconds:.0f} s")
            if stopping:
                raise KeyboardInterrupt

        try:
            yield show
        except KeyboardInterrupt:
            raise KeyboardInterrupt(farewell) from None
        finally:
            signal.signal(signal.SIGINT, before)
