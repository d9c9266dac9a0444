"""Fill in the parts of the documentation site that the code itself defines: commands, options and metrics.

MkDocs calls `on_page_markdown` for every page. A line `<!-- generated: NAME -->` in a page is replaced by what the
function NAME returns, so that these pages cannot fall behind the code. A mismatch raises `PluginError`, which ends the
build.
"""

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch
from xml.etree.ElementTree import Element, SubElement

import griffe
import tyro._fmtlib
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from markdown.util import ETX, STX, AtomicString
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parent.parent
MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


class Index(InlineProcessor):
    """The index of a symbol of one letter, as in x̄_S, θ_{t−1} or γ^h, below or above it."""

    def __init__(self, mark: str, tag: str, md: Markdown) -> None:
        symbol, braces = r"(?<!\w)(?:argmin|[^\W\d_][\u0300-\u036f]?)", r"\{(?:[^{}]|\{[^{}]*\})*\}"
        super().__init__(rf"({symbol}){mark}({braces}|\([^()\s]*\)|\w{{1,4}}\b)", md)
        self.tag = tag

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element, int, int]:
        whole = Element("span", {"class": "symbol"})
        whole.text = AtomicString(m[1])
        SubElement(whole, self.tag).text = m[2][1:-1] if m[2][0] == "{" else m[2]
        return whole, m.start(), m.end()


class Underscore(InlineProcessor):
    """Any other underscore in the text, as if it were escaped."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:
        return f"{STX}{ord('_')}{ETX}", m.start(), m.end()


class Symbols(Extension):
    """Underscores mean subscripts on these pages, as in Σ_H x̄_S; only asterisks emphasize."""

    def extendMarkdown(self, md: Markdown) -> None:
        # After links and HTML, before emphasis.
        md.inlinePatterns.register(Index("_", "sub", md), "subscript", 67)
        md.inlinePatterns.register(Index(r"\^", "sup", md), "superscript", 66)
        md.inlinePatterns.register(Underscore("_", md), "underscore", 65)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.markdown_extensions.append(Symbols())  # pyright: ignore[reportArgumentType]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace every marker of a page by what its function returns."""
    return MARKER.sub(lambda found: GENERATED[found[1]](markdown), markdown)


# Commands, from their own --help


@dataclass
class Section:
    """One box of a command's help."""

    title: str
    words: list[str] = field(default_factory=list)
    entries: list[tuple[str, str]] = field(default_factory=list)  # how it is written, what it means


@dataclass
class Help:
    """A command's help, in parts."""

    command: str
    usage: str
    words: str
    sections: list[Section]

    @property
    def subcommands(self) -> list[str]:
        return [name for section in self.sections if section.title == "subcommands" for name, _ in section.entries]


def _boxes_below_each_other(cols: Callable[..., Any]) -> Callable[..., Any]:
    """Long help on a wide terminal has boxes side by side: columns that consist of rows."""
    row = type(tyro._fmtlib.rows())
    return lambda *parts: tyro._fmtlib.rows(*parts) if all(isinstance(each, row) for each in parts) else cols(*parts)


def help_text(arguments: list[str]) -> str:
    """What `byzpg ARGUMENTS --help` prints, one line per paragraph."""
    from byzpg.cli import main

    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # its encoding decides how boxes are drawn
    with (
        patch.object(sys, "argv", ["byzpg", *arguments, "--help"]),
        patch.dict(os.environ, {"COLUMNS": "1000", "NO_COLOR": "1"}),
        patch("tyro._fmtlib.cols", _boxes_below_each_other(tyro._fmtlib.cols)),
        redirect_stdout(printed),
    ):
        try:
            main()
        except SystemExit as ended:
            if ended.code:
                raise PluginError(f"byzpg {' '.join(arguments)} --help failed with {ended.code}.") from None
    printed.seek(0)
    return re.sub(r"\x1b\[[0-9;]*m", "", printed.read())


def parse_help(arguments: list[str]) -> Help:
    """A command's help in parts: usage, description, then one box per group of options."""
    command = " ".join(["byzpg", *arguments])
    above, *boxes = re.split(r"^╭─ ", help_text(arguments), flags=re.MULTILINE)
    usage, _, words = above.partition("\n\n")
    if not usage.startswith("usage:") or not boxes:
        raise PluginError(f"{command} --help has another form than docs/hooks.py expects.")
    return Help(command, usage.removeprefix("usage:").strip(), words.strip(), [parse_box(box) for box in boxes])


def parse_box(box: str) -> Section:
    first, *lines = box.splitlines()
    section = Section(first.rstrip("╮").rstrip("─ "))
    for raw in lines:
        line = raw.removeprefix("│ ").rstrip("│╯╰─ ")
        if not line or line == "(required)":
            continue
        text = line.strip()
        if line.startswith("  • "):
            name, _, meaning = text.removeprefix("• ").partition(" ")
            section.entries.append((name, meaning.strip()))
        elif section.title == "subcommands":
            continue  # further paragraphs, which the command's own section repeats
        elif line.startswith(" "):
            written, meaning = section.entries[-1]
            section.entries[-1] = written, f"{meaning} {text}".strip()
        elif section.title in ("options", "positional arguments") or line.startswith("-"):
            written, _, meaning = re.sub(r"\s{2,}", "\0", text, count=1).partition("\0")
            section.entries.append((written, meaning))
        else:
            section.words.append(text)
    section.entries = [entry for entry in section.entries if not entry[0].startswith("-h")]
    return section


def every_command(arguments: list[str] | None = None) -> Iterator[Help]:
    """All commands that do something, in the order of the help."""
    found = parse_help(arguments or [])
    if found.subcommands:
        for name in found.subcommands:
            yield from every_command([*(arguments or []), name])
    else:
        yield found


def commands(_: str) -> str:
    """Every command with its help; a group of options that several commands share is printed once."""
    parts, shown = [], {}
    for found in every_command():
        anchor = found.command.replace(" ", "-")
        words = re.sub(r"^Example: (.+)$", r"Example: `\1`", found.words, flags=re.MULTILINE)
        parts += [f"## `{found.command}` {{ #{anchor} }}", escaped(words), f"```text\n{found.usage}\n```"]
        for section in found.sections:
            if not section.entries:
                continue
            title = section.title.rpartition(".")[2]
            content = tuple(section.entries)
            if content in shown:
                first, where = shown[content]
                parts.append(f"It also takes the [{title} of `{first}`](#{where}).")
                continue
            if len(content) > 3 and title != "options":
                shown[content] = found.command, f"{anchor}-{slug(title)}"
            parts.append(f"**{title.capitalize()}**{{ #{anchor}-{slug(title)} }}")
            parts += [definition(written, meaning) for written, meaning in section.entries]
    return "\n\n".join(parts)


def definition(written: str, meaning: str) -> str:
    return f"`{written}`\n:   {escaped(meaning.removesuffix('(default: None)').strip())}"


def slug(text: str) -> str:
    return re.sub(r"\W+", "-", text.lower()).strip("-")


def escaped(text: str) -> str:
    """Plain text as Markdown: only text in backquotes keeps its meaning."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_<>\[\]|#])", r"\\\1", part) for part in parts)


# Options, from Config

PRESETS = ("tuned", "paper", "theory", "script")
TASKS = ("CartPole-v1", "LunarLander-v3", "Pendulum-v1", "Acrobot-v1")


def options(_: str) -> str:
    """Every option of Config with its type, its default and its docstring."""
    from byzpg.config import Config

    described = attributes("byzpg.config", "Config")
    parts = []
    for option in fields(Config):
        attribute = described[option.name]
        if attribute.docstring is None:
            raise PluginError(f"Config.{option.name} has no docstring.")
        kind = str(attribute.annotation).removesuffix(" | None")
        default = "" if option.default is None else f", default `{option.default!r}`"
        words = " ".join(attribute.docstring.value.split())
        parts.append(f"`{option.name}`{{ #{option.name} }} : `{kind}`{default}\n:   {escaped(words)}")
    return "\n\n".join(parts)


def presets(_: str) -> str:
    """The values that every preset gives to CartPole-v1, and how the other tasks differ from them."""
    from byzpg.config import Config

    def values(task: str, preset: str) -> dict[str, str]:
        settings = Config(env=task, preset=preset).resolved()  # pyright: ignore[reportArgumentType]
        return {option: shown(getattr(settings, option)) for option in filled}

    filled = [option.name for option in fields(Config) if option.default is None]
    every = {task: {preset: values(task, preset) for preset in PRESETS} for task in TASKS}
    first = every[TASKS[0]]
    lines = [f"| {TASKS[0]} | {' | '.join(PRESETS)} |", "|---|" + "---|" * len(PRESETS)]
    lines += [f"| `{option}` | {' | '.join(first[preset][option] for preset in PRESETS)} |" for option in filled]
    for task in TASKS[1:]:
        lines += ["", f"| {task}, where it differs | {' | '.join(PRESETS)} |", "|---|" + "---|" * len(PRESETS)]
        for option in filled:
            cells = [every[task][preset][option] for preset in PRESETS]
            if cells != [first[preset][option] for preset in PRESETS]:
                lines.append(f"| `{option}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return "–".join(map(str, value))
    return f"`{value}`" if not isinstance(value, bool | int) else str(value)


def attributes(module: str, name: str) -> dict[str, Any]:
    """A class's attributes with their docstrings, read from the source."""
    loaded = griffe.load(module, search_paths=[str(ROOT / "src")])
    return {attribute.name: attribute for attribute in loaded[name].attributes.values()}


GENERATED: dict[str, Callable[[str], str]] = {each.__name__: each for each in (commands, options, presets)}
