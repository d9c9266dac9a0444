"""Which vectors are sound: the rules and the network agree, and the network is the stricter one."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byzpg.robust.geometry import NORM_LIMIT, is_sound, is_sound_on_host

D = 6
by_rules = jax.jit(is_sound)


def filled(value: float, entry: float = 1.0) -> np.ndarray:
    """A vector of ones in which `value` takes the place of one entry."""
    vector = np.full(D, entry, np.float32)
    vector[3] = value
    return vector


@pytest.mark.parametrize(
    "vector",
    [
        filled(np.nan),
        filled(np.inf),
        filled(-np.inf),
        filled(1e25),  # finite, but its square is not
        filled(-3e18),
        filled(2e18, 2e18),
        np.full(D, np.nan, np.float32),
        np.full(D, np.finfo(np.float32).max, np.float32),
    ],
    ids=str,
)
def test_refused_by_both(vector: np.ndarray):
    assert not by_rules(vector)
    assert not is_sound_on_host(vector)


@pytest.mark.parametrize("vector", [filled(0.0), filled(-1e4), filled(1e17), np.zeros(D, np.float32)], ids=str)
def test_accepted_by_both(vector: np.ndarray):
    assert by_rules(vector)
    assert is_sound_on_host(vector)


def test_the_host_is_stricter_by_a_factor_of_two():
    between = filled(0.7 * NORM_LIMIT)
    assert by_rules(between)
    assert not is_sound_on_host(between)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.floats(-1, 1, width=32), min_size=D, max_size=D),
    st.floats(0.1, 10),
    st.sampled_from([np.nan, np.inf, 1.0, 1.0, 1.0]),
)
def test_whatever_the_host_accepts_the_rules_use(direction: list[float], length: float, factor: float):
    """Lengths from a tenth of the limit to ten times it, where the two might differ by rounding."""
    with np.errstate(over="ignore", invalid="ignore"):
        unit = np.asarray(direction) / max(np.linalg.norm(direction), 1e-30)
        vector = (length * NORM_LIMIT * unit).astype(np.float32)
        vector[0] *= np.float32(factor)
    if is_sound_on_host(vector):
        assert by_rules(vector)
    if not by_rules(vector):
        assert not is_sound_on_host(vector)


def test_many_coordinates_in_any_order_of_summation():
    """A vector of a million entries just below the host's limit is used by the rules."""
    num_entries = 2**20
    vector = np.full(num_entries, 0.499 * NORM_LIMIT / np.sqrt(num_entries), np.float32)
    assert is_sound_on_host(vector)
    assert is_sound(vector)
    assert not is_sound_on_host(2.1 * vector)
    assert not is_sound(2.1 * vector)


def test_a_batch_of_vectors_is_judged_row_by_row():
    rows = np.stack([filled(1.0), filled(np.nan), filled(1e30), filled(2.0)])
    np.testing.assert_array_equal(is_sound(rows), [True, False, False, True])
