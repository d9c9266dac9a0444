"""From the arguments to a command: the options come from the commands' own types."""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol, Union, get_args, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from byzpg import _parts
from byzpg.cli.audit import Audit
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
from byzpg.robust.components import Component, synonym

DESCRIPTION = """Byzantine fault-tolerant federated reinforcement learning.

Start with `byzpg train`. `byzpg COMMAND --help` explains a command; `byzpg --version` prints the version."""
COMMANDS = (
    *(Resume, Reproduce, Sweep, Report, Plot, Play, Export, List, Certify, Audit),
    *(Keygen, Federation, Peer, Watch, Monitor, Evidence),
)


class Command(Protocol):
    """A command with its options."""

    def run(self) -> None: ...


def parse_command() -> Command:
    """Read the arguments of this process; wrong ones, and --help, end it."""
    _refuse_synonyms()
    registry = ConstructorRegistry()
    registry.primitive_rule(_component_by_name)
    options = _options_from_file()
    registry.struct_rule(_Help(options if sys.argv[1:2] == ["train"] else None))
    train = Annotated[Train, _subcommand(Train, default=Train(options))]
    others = [Annotated[each, _subcommand(each)] for each in COMMANDS]
    return tyro.cli(  # pyright: ignore[reportCallIssue]
        Union[train, *others],  # pyright: ignore[reportArgumentType]
        prog="byzpg",
        description=DESCRIPTION,
        registry=registry,
        config=(tyro.conf.DisallowNone,),
    )


def _refuse_synonyms() -> None:
    """Raise a ValueError if an option has the name that it has elsewhere; other mistakes are found by the parser."""
    command = next((each for each in (Train, *COMMANDS) if sys.argv[1:2] == [each.__name__.lower()]), None)
    known = set() if command is None else set(_options(command))
    for argument in sys.argv[2:]:
        name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
        if argument.startswith("--") and name not in known and (meant := synonym(name, known)) is not None:
            raise ValueError(
                f"there is no option {argument.partition('=')[0]}. Did you mean --{meant.replace('_', '-')}?"
            )


def _options(kind: Any) -> Iterator[str]:
    """The names of all options of a command, with those of the groups and commands in it."""
    if isinstance(kind, type) and is_dataclass(kind) and not issubclass(kind, Component):
        hints = get_type_hints(kind, include_extras=True)
        for option in fields(kind):
            inside = list(_options(hints[option.name]))
            yield from inside or [option.name]
    else:
        for part in get_args(kind):
            yield from _options(part)


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


# The options that most people set. The others are below them, under a heading of their own.
BASIC = (
    *("env", "algorithm", "preset", "num_agents", "num_byzantine", "num_attackers", "attack"),
    *("num_seeds", "seed", "trajectories", "steps", "aggregator", "agreement", "step_size"),
)


class _Advanced:
    """Stands for the options of `Config` that are not among BASIC."""


class _Help:
    """How options are explained: without "(default: None)", and those of `Config` by what a preset makes of them.

    Only `train` says which values these are: other commands set some of the options themselves.
    """

    def __init__(self, options: Config | None) -> None:
        self._inside = False
        self._advanced: list[Any] = []
        self._heading, self._values = "", dict[str, str]()
        if options is not None and {"-h", "--help"} & {*sys.argv}:
            self._heading, self._values = _by_preset(options)

    def __call__(self, info: StructTypeInfo) -> StructConstructorSpec | None:
        if info.type is _Advanced:
            return StructConstructorSpec(instantiate=dict, fields=tuple(self._advanced))
        if self._inside:  # the rules below this one are asked
            return None
        self._inside = True
        try:
            found = ConstructorRegistry.get_struct_spec(info)
        finally:
            self._inside = False
        if not isinstance(found, StructConstructorSpec):
            return None
        if info.type is not Config:
            return replace(found, fields=tuple(map(self._explained, found.fields)))
        return self._grouped([self._explained(field, of_preset=True) for field in found.fields])

    def _explained(self, field: Any, *, of_preset: bool = False) -> Any:
        if field.default is not None:
            return field
        hint = ""
        if of_preset:
            said = "Default:" in _text(field.helptext)
            hint = self._values.get(field.name, "" if said else "default: set by the preset")
            hint = f"({hint.replace('default:', 'here:') if said else hint})" if hint else ""
        return replace(field, type=Annotated[field.type, tyro.conf.arg(help_behavior_hint=hint)])

    def _grouped(self, options: list[Any]) -> StructConstructorSpec:
        """The options of `Config`, those that few people set in a group of their own."""
        self._advanced = [option for option in options if option.name not in BASIC]
        about = f"Options that few people set. {self._heading}".rstrip()
        shown: Any = Annotated[
            tyro.conf.OmitArgPrefixes[_Advanced], tyro.conf.arg(name="advanced", help=about, prefix_name=False)
        ]
        group = StructFieldSpec(name="advanced", type=shown, default=tyro.MISSING)
        return StructConstructorSpec(
            instantiate=lambda advanced, **basic: Config(**basic, **advanced),
            fields=(*(option for option in options if option.name in BASIC), group),
        )


def _by_preset(options: Config) -> tuple[str, dict[str, str]]:
    """What the preset sets for the task and algorithm on the command line: in words, and by option."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("env", "algorithm", "preset"):
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS)
    parser.add_argument("--num-agents", type=int, default=argparse.SUPPRESS)
    try:
        chosen = replace(options, **vars(parser.parse_known_args(sys.argv[2:])[0]))
        values = chosen.without_own_code()
        unused = chosen.neutral_options(values["algorithm"])
    except (ValueError, argparse.ArgumentError):
        return "", {}
    heading = f"Here, defaults are those of the preset {values['preset']} for {values['algorithm']} on {values['env']}."
    shown = {name: f"default: {_written(value)}" for name, value in values.items()}
    return heading, shown | dict.fromkeys(unused, f"not used by {values['algorithm']}")


def _written(value: Any) -> str:
    """A value as one would type it."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value).removesuffix("()")


def _text(words: str | Callable[[], str | None] | None) -> str:
    return (words() if callable(words) else words) or ""
