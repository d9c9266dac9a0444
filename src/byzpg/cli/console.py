"""Where the command line prints to."""

from rich.console import Console
from rich.markup import escape

console = Console()
errors = Console(stderr=True)


def say(text: str) -> None:
    """One line, however long: paths and commands are to be copied."""
    console.print(escape(text), soft_wrap=True, highlight=False)
