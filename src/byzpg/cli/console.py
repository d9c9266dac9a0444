"""Where the command line prints, and how it shows progress."""

import codecs
import os
import select
import shlex
import signal
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from math import inf
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

BROKEN_PIPE = 141  # 128 + SIGPIPE: the exit code of a command whose reader is gone, as in shells


class Output(Console):
    """A console that ends the command quietly if nobody reads its output any more: byzpg list | head -1.

    It replaces characters that the terminal does not have before it lays out a table: ± may be three characters wide.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        plain = text if self.encoding == "utf-8" else text.encode(self.encoding, PLAINLY).decode(self.encoding)
        return super().render_str(plain, **options)

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(BROKEN_PIPE) from None


console = Output()
errors = Output(stderr=True)

# Seconds between two lines of progress where there is no terminal.
LINE_SECONDS = 2.5


PLAINLY = "byzpg-plain"  # the name by which Python knows `_in_plain_characters`
# What a terminal without UTF-8 shows instead. Letters lose their accents, and Greek ones are written out.
PLAIN = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "—": "-",
        "‖": "||",
        "±": "+/-",
        "≤": "<=",
        "≥": ">=",
        "→": "->",
        "←": "<-",
        "×": "x",
        "…": "...",
        "·": "*",
        "•": "*",
        "“": '"',
        "”": '"',
        "’": "'",
        "√": "sqrt",
        "∞": "inf",
        "Σ": "sum",
        "∇": "grad ",
        "⌊": "floor(",
        "⌋": ")",
        "⌈": "ceil(",
        "⌉": ")",
        "⟨": "<",
        "⟩": ">",
        "≈": "~",
        "°": " deg",
        "∈": " in ",
        "∂": "d",
        "²": "^2",
        "³": "^3",
        **dict.fromkeys("─━═╶╴╺╸", "-"),
        **dict.fromkeys("│┃║", "|"),
        **dict.fromkeys("╭╮╰╯┌┐└┘├┤┬┴┼", "+"),
    }
)


def _in_plain_characters(error: UnicodeError) -> tuple[str, int]:
    """What to write instead of characters that the terminal does not have."""
    assert isinstance(error, UnicodeEncodeError)
    texts = []
    for letter in error.object[error.start : error.end]:
        text = letter.translate(PLAIN)
        if not text.isascii():
            name = unicodedata.name(letter, "")
            greek = name.rpartition(" LETTER ")[2].lower() if name.startswith("GREEK") else ""
            base = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode()
            text = greek or base or "?" * (not unicodedata.combining(letter))
        texts.append(text)
    return "".join(texts), error.end


codecs.register_error(PLAINLY, _in_plain_characters)


def survive_any_terminal() -> None:
    """Let no character that the terminal cannot show end a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors=PLAINLY)


def reader_is_gone() -> bool:
    """Whether nobody reads the output any more."""
    try:
        watched = select.poll()
        watched.register(sys.stdout.fileno(), 0)  # for errors alone
    except OSError:  # it is no file
        return False
    return bool(watched.poll(0))


def say(text: str) -> None:
    """Print one line, however long: people copy paths and commands."""
    console.print(escape(text), soft_wrap=True, highlight=False)


def complain(text: str, prefix: str = "error") -> None:
    """Print one line to the standard error."""
    errors.print(f"[red]{prefix}:[/red] {escape(text)}", highlight=False, soft_wrap=True)


def this_command() -> str:
    """The command that runs, as one would type it."""
    return shlex.join(["byzpg", *sys.argv[1:]])


def counted(number: int, noun: str) -> str:
    """A number and its noun: 1 seed, 4 seeds."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def check_plot_path(path: Path) -> None:
    """Refuse, before any work, a file that no plot can be written to."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--output must end in .png, .svg or .pdf, got {path}.")


class Show(Protocol):
    """Shows how far the work is. After Ctrl-C, it raises KeyboardInterrupt."""

    def __call__(self, done: float, text: str, *, seconds: float, ended: bool, live: str | None = None) -> None:
        """Show the share that is done.

        Args:
            done: The share of the work that is done, in [0, 1].
            text: What to print beside it.
            seconds: How long the work has taken.
            ended: Whether a part of the work has ended, which is always printed.
            live: What a terminal shows instead of the text.
        """
        ...


@contextmanager
def progress_line(*, first: str, on_stop: str, continue_with: str) -> Iterator[Show]:
    """Show one line of progress. Ctrl-C stops at the next call of `Show`, a second Ctrl-C at once.

    Args:
        first: The text before the first call.
        on_stop: What to print after the first Ctrl-C.
        continue_with: The command that continues the work.
    """
    stopping, farewell = False, f"Stopped. Continue with: {continue_with}"

    def stop(signum: int, frame: object) -> None:
        nonlocal stopping
        if stopping:  # an exception could be swallowed in the middle of a compilation, or crash it
            console.show_cursor()
            errors.print(escape(farewell), highlight=False, soft_wrap=True)
            os._exit(130)
        stopping = True
        say(f"{on_stop}. Press Ctrl-C again to stop at once.")

    columns = (
        SpinnerColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    before = signal.signal(signal.SIGINT, stop)
    last_line = -inf
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(first, total=1)

        def show(done: float, text: str, *, seconds: float, ended: bool, live: str | None = None) -> None:
            nonlocal last_line
            bar.update(task, completed=done, description=text if live is None else live)
            if not console.is_terminal and (ended or seconds - last_line > LINE_SECONDS):
                last_line = -inf if ended else seconds
                say(f"{text} ({done:.0%} done after {seconds:.0f} s)")
            if stopping:
                raise KeyboardInterrupt

        try:
            yield show
        except KeyboardInterrupt:
            raise KeyboardInterrupt(farewell) from None
        finally:
            signal.signal(signal.SIGINT, before)
