"""The command line, with one module per command. It is the only package that prints or names an option as a flag."""

import atexit
import gc
import os
import sys
from typing import NoReturn

from jax.errors import JaxRuntimeError
from rich.markup import escape

from byzpg import __version__, _parts
from byzpg.cli import membership
from byzpg.cli.console import BROKEN_PIPE, complain, errors, reader_is_gone, say, survive_any_terminal
from byzpg.cli.parsing import parse_command
from byzpg.federation import devices
from byzpg.robust.least_diameter import SearchLimitError

__all__ = ["main"]


def main() -> None:
    """Run the command that the arguments of this process name, on whatever terminal."""
    survive_any_terminal()
    if not gc.get_freeze_count():
        # What was imported stays, and so does all that is left when Python exits: it need not be searched for garbage.
        gc.freeze()
        atexit.register(gc.freeze)
    try:
        try:
            _main()
        finally:
            if sys.stdout is not None:  # it may be closed
                sys.stdout.flush()
    except BrokenPipeError:
        if sys.stdout is None or not reader_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left of it
        _exit(BROKEN_PIPE)


def _main() -> None:
    if sys.argv[1:] == ["--version"]:
        say(f"byzpg {__version__}")
        return
    _parts.on_import, _parts.on_change = _announce_import, _announce_change
    try:
        command = parse_command()
        _parts.trust(*getattr(command, "parts", ()))
        try:
            command.run()
        finally:
            _dismiss_followers()
    except _parts.UntrustedCodeError as error:
        complain(f"{error.problem}: if you trust that code, add --parts {' '.join(error.modules)}")
        _exit(2)
    except (ValueError, OSError, SearchLimitError) as error:
        if isinstance(error, BrokenPipeError) and sys.stdout is not None and reader_is_gone():
            raise
        complain(str(error))
        _exit(2)
    except JaxRuntimeError as error:
        if not devices.torn():
            raise
        complain(str(error).splitlines()[0])
        _exit(1)
    except ModuleNotFoundError as error:
        if error.name not in membership.PACKAGES:
            raise
        complain(membership.INSTALL)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        errors.print(escape(str(stop) or "Stopped."), highlight=False, soft_wrap=True)
        _exit(130)  # 128 + SIGINT, as in shells


def _announce_import(module: str, asked_for: str) -> None:
    errors.print(escape(f"Importing the module {module!r} for {asked_for}."), highlight=False, soft_wrap=True)


def _announce_change(message: str) -> None:
    errors.print(escape(f"Warning: {message}"), highlight=False, soft_wrap=True)


def _dismiss_followers() -> None:
    """Let the processes that follow this one end."""
    if devices.leads():
        from byzpg import training

        training.dismiss()


def _exit(code: int) -> NoReturn:
    training = sys.modules.get("byzpg.training")
    if devices.torn() or (training is not None and training.is_compiling()):
        # An orderly exit would wait: for the other processes, which hang, or for programs that nobody needs any more.
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(code)
    sys.exit(code)
