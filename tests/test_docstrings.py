"""The examples in docstrings say what really happens, and every public function and class is explained."""

import doctest
import importlib
import inspect

import pytest


@pytest.mark.parametrize("name", ["config", "training", "testing"])
def test_examples_give_what_they_say(name: str) -> None:
    module = importlib.import_module(f"byzpg.{name}")
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize("package", ["byzpg", "byzpg.robust", "byzpg.envs", "byzpg.learning", "byzpg.federation"])
def test_every_public_name_is_explained(package: str) -> None:
    module = importlib.import_module(package)
    public = {name: getattr(module, name) for name in module.__all__}
    unexplained = [
        name
        for name, item in public.items()
        if (inspect.isclass(item) or inspect.isfunction(item)) and len((item.__doc__ or "").split()) < 4
    ]
    assert not unexplained
