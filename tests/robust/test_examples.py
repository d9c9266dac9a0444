"""The examples in the docstrings of byzpg.robust: they are true, and every rule, attack and Byzantine set has one."""

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest
from tiers import slow_except

from byzpg import _registry, robust
from byzpg.robust.certificates import certificate
from byzpg.robust.exchange import exchange

MODULES = [robust, *(importlib.import_module(f"byzpg.robust.{m.name}") for m in pkgutil.iter_modules(robust.__path__))]
FAMILIES = ("aggregator", "agreement", "attack", "byzantine set")
COMPONENTS = [item for family in FAMILIES for item in _registry.members(family).values()]


def examples_of(module: ModuleType) -> list[doctest.DocTest]:
    return [test for test in doctest.DocTestFinder().find(module, module.__name__) if test.examples]


EXAMPLES = {test.name.removeprefix("byzpg.robust."): test for module in MODULES for test in examples_of(module)}
# What they show is tested elsewhere as well, and they compile for seconds.
LONG = {
    "adaptive.Adaptive",
    "attacks.Dissensus",
    "attacks.MDAFooling",
    "attacks.Normalized",
    "certificates.certificate",
    "functions.aggregator",
    "geometry.Cloud",
    "least_diameter.least_diameter_subset",
}
assert EXAMPLES.keys() >= LONG


@pytest.mark.parametrize("name", slow_except(EXAMPLES.keys() - LONG, EXAMPLES))
def test_examples_are_true(name: str):
    example = EXAMPLES[name]
    output: list[str] = []
    doctest.DocTestRunner().run(example, out=output.append)
    assert not output, "".join(output)


@pytest.mark.parametrize(
    "item", [*COMPONENTS, exchange, certificate], ids=lambda item: f"{item.__module__}.{item.__name__}"
)
def test_there_is_an_example(item: type):
    assert any(test.name == f"{item.__module__}.{item.__name__}" for test in EXAMPLES.values())


@pytest.mark.parametrize("component", COMPONENTS, ids=lambda item: f"{item.__module__}.{item.__name__}")
def test_the_first_line_is_a_sentence(component: type):
    """`byzpg list` shows it."""
    summary = _registry.summary(component)
    assert summary.endswith(".")
    assert 20 < len(summary) <= 120
    assert component.__doc__ is not component.__mro__[1].__doc__


def test_public_names_are_documented_and_exist():
    for name in robust.__all__:
        assert getattr(robust, name).__doc__, name
    assert len(set(robust.__all__)) == len(robust.__all__)
