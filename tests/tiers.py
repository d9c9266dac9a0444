"""Which cases of a test belong to the suite, and which to its slow tier."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_except(fast: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """All cases of one parameter; those that are not in `fast` are marked slow."""
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]
