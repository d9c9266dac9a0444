"""Components by name, and from the text that they print: `parse("aggregator", "NNM(RFA())")`.

A component of the user's own is named with its module, as in `NNM(my_rules:MyRule(size=2))`; see `_parts`.
"""

import ast
import re
from functools import cache
from importlib import import_module
from inspect import formatannotation, isclass, signature
from math import inf
from types import ModuleType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from byzpg import _parts, networks
from byzpg.federation import schedule
from byzpg.learning import advantages, gradients
from byzpg.robust import adaptive, aggregators, agreement, attacks
from byzpg.robust.components import Component, address, nearest, plain_name, unknown


def _public(module: ModuleType, base: type[Component]) -> dict[str, type[Component]]:
    """The concrete classes of a module that are `base`, but not `base` itself, by name."""

    return {
        name: item
        for name, item in vars(module).items()
        if isclass(item) and issubclass(item, base) and item is not base
        if not name.startswith("_") and not _abstract_methods(item)
    }


def _abstract_methods(item: type) -> list[str]:
    # Not inspect.isabstract, which overlooks abstract methods where the metaclass is not ABCMeta.
    return [name for name in dir(item) if getattr(getattr(item, name), "__isabstractmethod__", False)]


# The base class of each family, which is also that of users' own members.
FAMILIES: dict[str, type[Component]] = {
    "aggregator": aggregators.Aggregator,
    "agreement": agreement.Agreement,
    "attack": attacks.Attack,
    "byzantine set": attacks.ByzantineSet,
    "estimator": gradients.Estimator,
    "correction": gradients.Correction,
    "learner": advantages.PPO,
    "conventions": schedule.Conventions,
    "network": networks.Network,
}


@cache
def members(family: str) -> dict[str, type[Component]]:
    """The components of a family that byzpg has, by name."""
    if family not in FAMILIES:
        raise ValueError(unknown("family", family, FAMILIES))
    base = FAMILIES[family]
    if family in ("learner", "network"):
        return {"PPO": base} if family == "learner" else {}  # all networks with a name are users' own
    found = _public(import_module(base.__module__), base)
    if family == "attack":
        found |= _public(adaptive, base)
    if family == "conventions":
        # By its address, as users' own components are found: it builds on what is above this module.
        found |= _public(import_module("byzpg.experiments.authors_script"), base)
    return found


def summary(component_class: type) -> str:
    """The first line of a component's documentation."""
    return (component_class.__doc__ or "").strip().partition("\n")[0]


def parse(family: str, text: str) -> Component:
    """Read the component that prints as `text`. Components inside it are of the same family; RFA is short for RFA().

    The modules that it names are imported, which runs their code: see `_parts.check_trusted`.
    """
    members(family)
    return _Reader(family, text).read()


QUOTED = r"""'[^']*'|"[^"]*\""""
ADDRESS = re.compile(rf"({QUOTED})|([^\W\d][\w.]*:[^\W\d][\w.]*)")


def addresses(text: str) -> list[str]:
    """All module:Name in the text of a component; nothing is imported."""
    return [found[2] for found in ADDRESS.finditer(text) if found[2]]


def check_readable(family: str, component: Component) -> None:
    """Check that a component can be read back from its text, as opening a run does.

    Raises:
        ValueError: If not, with what to do about it.
    """
    found = type(component)
    if "<locals>" in found.__qualname__ or found.__module__ == "__main__":
        where = "in the program itself" if found.__module__ == "__main__" else "inside a function"
        raise ValueError(
            f"{family} {component}: the class {found.__name__} is defined {where}, where opening the run cannot find "
            f"it again. Move it to a module of its own, such as my_parts.py, and import it from there."
        )
    try:
        read = parse(family, str(component))
    except ValueError as error:
        raise ValueError(f"{family} {component} could not be read back from its text: {error}") from None
    if type(read) is not found or read != component:
        raise ValueError(
            f"{family} {component} could not be read back: its text gives {read!r} of {address(type(read))}. Options "
            "must be numbers, texts, tuples, True, False, None or components, and be the fields of the dataclass."
        )


class _Reader:
    """Reads one text, as data and never as code."""

    def __init__(self, family: str, text: str) -> None:
        self.family = family
        self.text = text
        self.own: dict[str, str] = {}  # addresses, by the names that stand for them in the syntax tree

    def error(self, problem: str) -> NoReturn:
        for name, found in self.own.items():
            problem = problem.replace(name, found)
        raise ValueError(f"{self.family} {self.text!r}: {problem}") from None

    def read(self) -> Component:
        def stand_in(found: re.Match[str]) -> str:
            if found[2] is None:
                return found[1]
            name = f"own_part_{len(self.own)}_"
            self.own[name] = found[2]
            return name

        marked = ADDRESS.sub(stand_in, self.text)
        # Outside quotes, avg-zero is one name and not a difference.
        names_joined = re.sub(rf"({QUOTED})|(?<=\w)-(?=[^\W\d])", lambda found: found[1] or "_", marked)
        try:
            return self.component(ast.parse(names_joined.strip(), mode="eval").body)
        except (SyntaxError, RecursionError, MemoryError):
            self.not_a_component("this")

    def component(self, node: ast.expr) -> Component:
        match node:
            case ast.Name(id=name):
                return self.build(self.find(name), [], [])
            case ast.Call(func=ast.Name(id=name), args=positional, keywords=named):
                return self.build(self.find(name), positional, named)
        self.not_a_component(ast.unparse(node))

    def not_a_component(self, what: str) -> NoReturn:
        known = ", ".join(members(self.family))
        self.error(
            f"{what} is not written as Name or Name(option=value, ...). Known names: {known}; or your own, module:Name."
        )

    def find(self, name: str, advice: str = "") -> type[Component]:
        if name in self.own:
            return self.find_own(self.own[name])
        for each, component_class in members(self.family).items():
            if plain_name(each) == plain_name(name):
                return component_class
        self.error(unknown(self.family, name, members(self.family)) + advice)

    def find_own(self, address: str) -> type[Component]:
        found, base = _parts.find(address, f"{self.family} {self.text!r}"), FAMILIES[self.family]
        public = f"{base.__module__}.{base.__name__}"
        if not isclass(found):
            how = "a function becomes one with the decorator byzpg.robust.aggregator"
            how = f"; {how}" if self.family == "aggregator" and callable(found) else ""
            self.error(f"{address} is not a class: {self.family}s are frozen dataclasses that subclass {public}{how}.")
        if not issubclass(found, base):
            self.error(f"{address} is no {self.family}: it must subclass {public}.")
        if missing := _abstract_methods(found):
            self.error(f"{address} is abstract: it must define {', '.join(missing)}.")
        if found.__hash__ is None:
            self.error(f"{address} cannot be hashed: decorate it with @dataclass(frozen=True).")
        return found

    def build(self, made: type[Component], positional: list[ast.expr], named: list[ast.keyword]) -> Component:
        hints = get_type_hints(made)  # an option without a type may be anything
        options = list(signature(made).parameters)
        choices = f"options: {', '.join(options) or 'none'}."
        values: dict[str, Any] = {}
        for option in named:
            name = option.arg or "**"
            if name not in options:
                self.error(f"{made.__name__} has no option {name!r}; {choices}{nearest(name, options)}")
            if name in values:
                self.error(f"{made.__name__}: {name} is given twice.")
            values[name] = self.value(option.value)
        try:
            given = signature(made).bind(*map(self.value, positional), **values)
        except TypeError as error:
            self.error(f"{made.__name__}: {error}; {choices}")
        for name, value in given.arguments.items():
            if not fits(value, hints.get(name, Any)):
                self.error(f"{made.__name__}: {name} must be {type_name(hints[name])}, got {value!r}.")
        return made(**given.arguments)

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(id="inf"):
                return inf
            case ast.Name(id=name):
                return self.build(self.find(name, " A text is written in quotes."), [], [])
            case ast.Call():
                return self.component(node)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError):
            text = ast.unparse(node)
            self.error(f"{text} is not a number, a quoted text, a tuple, True, False, None or a component.")


def type_name(hint: Any) -> str:
    """How to write a type in a message."""
    return hint.__name__ if isclass(hint) else formatannotation(hint)


def fits(value: object, hint: Any) -> bool:
    """Whether a value is of the type an option declares; which of a Literal's choices, the component checks itself."""
    if hint is Any:
        return True
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if kind is Literal:
        return type(value) in map(type, parts)
    if kind is tuple:
        return isinstance(value, tuple) and all(fits(item, parts[0]) for item in value)
    if hint is float:
        return type(value) in (int, float)
    # Not isinstance throughout: True is an int to Python, but not a count to anyone.
    return type(value) is hint or (isinstance(value, Component) and isinstance(value, hint))
