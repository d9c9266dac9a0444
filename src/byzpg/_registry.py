"""Components by name, and from the text that they print: `parse("aggregator", "NNM(RFA())")`."""

import ast
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import formatannotation, isclass, signature
from math import inf
from types import ModuleType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from byzpg.federation import schedule
from byzpg.learning import advantages, gradients
from byzpg.robust import aggregators, agreement, attacks
from byzpg.robust.components import Component, nearest, plain_name, unknown


def _public(module: ModuleType, base: type[Component] | UnionType) -> dict[str, type[Component]]:
    """The concrete classes of a module that are `base`, but not `base` itself, by name."""

    def is_concrete(item: type) -> bool:
        # Not inspect.isabstract, which overlooks abstract methods where the metaclass is not ABCMeta.
        return not any(getattr(getattr(item, name), "__isabstractmethod__", False) for name in dir(item))

    return {
        name: item
        for name, item in vars(module).items()
        if isclass(item) and issubclass(item, Component) and issubclass(item, base) and item is not base
        if not name.startswith("_") and is_concrete(item)
    }


FAMILIES = ("aggregator", "agreement", "attack", "byzantine set", "estimator", "correction", "learner", "conventions")


@cache
def members(family: str) -> dict[str, type[Component]]:
    """The components of a family, by name."""
    match family:
        case "aggregator":
            return _public(aggregators, aggregators.Aggregator)
        case "agreement":
            return _public(agreement, agreement.Agreement)
        case "attack":
            return _public(attacks, attacks.Attack)
        case "byzantine set":
            return _public(attacks, attacks.ByzantineSet)
        case "estimator":
            return _public(gradients, gradients.Estimator)
        case "correction":
            return _public(gradients, gradients.Correction)
        case "learner":
            return {"PPO": advantages.PPO}
        case "conventions":
            # By its address, as users' own components are found: it builds on what is above this module.
            script = import_module("byzpg.experiments.authors_script")
            return _public(schedule, schedule.Conventions) | _public(script, schedule.Conventions)
    raise ValueError(unknown("family", family, FAMILIES))


def summary(component_class: type) -> str:
    """The first line of a component's documentation."""
    return (component_class.__doc__ or "").strip().partition("\n")[0]


def parse(family: str, text: str) -> Component:
    """Read the component that prints as `text`. Components inside it are of the same family; RFA is short for RFA()."""
    members(family)
    return _Reader(family, text).read()


@dataclass(frozen=True)
class _Reader:
    """Reads one text, as data and never as code."""

    family: str
    text: str

    def error(self, problem: str) -> NoReturn:
        raise ValueError(f"{self.family} {self.text!r}: {problem}") from None

    def read(self) -> Component:
        # Outside quotes, avg-zero is one name and not a difference.
        names_joined = re.sub(r"""('[^']*'|"[^"]*")|(?<=\w)-(?=[^\W\d])""", lambda found: found[1] or "_", self.text)
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
        self.error(f"{what} is not written as Name or Name(option=value, ...). Known names: {known}.")

    def find(self, name: str, advice: str = "") -> type[Component]:
        for each, component_class in members(self.family).items():
            if plain_name(each) == plain_name(name):
                return component_class
        self.error(unknown(self.family, name, members(self.family)) + advice)

    def build(self, made: type[Component], positional: list[ast.expr], named: list[ast.keyword]) -> Component:
        hints = get_type_hints(made)
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
            if not fits(value, hints[name]):
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
