"""From the arguments to a command: the options come from the commands' own types."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Protocol, Union, get_args

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructTypeInfo,
)

from byzpg import _parts
from byzpg.cli.certify import Certify
from byzpg.cli.evidence import Evidence
from byzpg.cli.export import Export
from byzpg.cli.federation import Federation
from byzpg.cli.keygen import Keygen
from byzpg.cli.list import List
from byzpg.cli.monitor import Monitor
from byzpg.cli.peer import Peer
from byzpg.cli.play import Play
from byzpg.cli.plot import Plot
from byzpg.cli.report import Report
from byzpg.cli.reproduce import Reproduce
from byzpg.cli.resume import Resume
from byzpg.cli.sweep import Sweep
from byzpg.cli.train import Train
from byzpg.cli.watch import Watch
from byzpg.config import AUTO, Config
from byzpg.robust.components import Component

DESCRIPTION = """Byzantine fault-tolerant federated reinforcement learning.

Start with `byzpg train`. `byzpg COMMAND --help` explains a command; `byzpg --version` prints the version."""
COMMANDS = (
    *(Resume, Reproduce, Sweep, Report, Plot, Play, Export, List, Certify),
    *(Keygen, Federation, Peer, Watch, Monitor, Evidence),
)


class Command(Protocol):
    """A command with its options."""

    def run(self) -> None: ...


def parse_command() -> Command:
    """Read the arguments of this process; wrong ones, and --help, end it."""
    registry = ConstructorRegistry()
    registry.primitive_rule(_component_by_name)
    registry.struct_rule(_HideMissingDefaults())
    train = Annotated[Train, _subcommand(Train, default=Train(_options_from_file()))]
    others = [Annotated[each, _subcommand(each)] for each in COMMANDS]
    return tyro.cli(  # pyright: ignore[reportCallIssue]
        Union[train, *others],  # pyright: ignore[reportArgumentType]
        prog="byzpg",
        description=DESCRIPTION,
        registry=registry,
        config=(tyro.conf.DisallowNone,),
    )


def _subcommand(command: type[Command], **options: Any) -> Any:
    """How a command is listed: among the others by the first line of its documentation."""
    name = command.__name__.lower()
    summary = (command.__doc__ or "").partition("\n")[0]
    return tyro.conf.subcommand(name, description=None if sys.argv[1:2] == [name] else summary, **options)


def _options_from_file() -> Config:
    """The options in the file of `train --config`, which options on the command line override."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--parts", nargs="*", default=[])
    given = parser.parse_known_args(sys.argv[2:])[0]
    if sys.argv[1:2] != ["train"] or given.config is None:
        return Config(algorithm=AUTO)
    _parts.trust(*given.parts)
    return Config.load(given.config, algorithm=AUTO)


def _component_by_name(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[str] | None:
    """Rules, attacks and the like stay text here; they are parsed when the options are resolved."""
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


class _HideMissingDefaults:
    """Keeps "(default: None)" out of the help: an option without a default of its own says in words what happens."""

    def __init__(self) -> None:
        self._inside = False

    def __call__(self, info: StructTypeInfo) -> StructConstructorSpec | None:
        if self._inside:  # the rules below this one are asked
            return None
        self._inside = True
        try:
            found = ConstructorRegistry.get_struct_spec(info)
        finally:
            self._inside = False
        if not isinstance(found, StructConstructorSpec):
            return None
        return replace(found, fields=tuple(self._without_default(field, info.type) for field in found.fields))

    def _without_default(self, field: Any, owner: Any) -> Any:
        if field.default is not None:
            return field
        words = _text(field.helptext)
        hint = "(default: set by the preset)" if owner is Config and "Default:" not in words else ""
        return replace(field, type=Annotated[field.type, tyro.conf.arg(help_behavior_hint=hint)])


def _text(words: str | Callable[[], str | None] | None) -> str:
    return (words() if callable(words) else words) or ""
