"""Order statistics of two lists together, against sorting all values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import slow_except

from byzpg.robust import order_statistics
from byzpg.robust.order_statistics import BLOCK, sum_of_ranks

WIDTH = 40


@pytest.mark.parametrize("num_common", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("num_extra", slow_except([1, BLOCK + 7], [0, 1, 4, BLOCK + 7]))
def test_sums_of_ranks_of_two_lists(num_common: int, num_extra: int) -> None:
    """Whole blocks of rows and parts of them, with ties, and values that are missing."""
    rng = np.random.default_rng(num_common + num_extra)
    total = num_common + num_extra
    common, extra = (
        np.sort(rng.integers(-9, 10, (number, WIDTH)), axis=0).astype(np.float32) for number in (num_common, num_extra)
    )
    num_missing = rng.integers(0, (num_common + 1) // 2 + 1)
    common[num_common - num_missing :] = np.inf
    ordered = np.sort(np.concatenate([common, extra]), axis=0)
    ask = jax.jit(sum_of_ranks)
    ends = {0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, total // 2, total - num_missing}
    ends = sorted(end for end in ends if end <= total - num_missing)
    for first in ends:
        for stop in (end for end in ends if end >= first):
            expected = np.sum(ordered[first:stop], axis=0)
            np.testing.assert_array_equal(ask(common, extra, first, stop), expected, f"{first} {stop}")


@pytest.mark.parametrize("width", slow_except([5], [1, 5, 13]))
def test_ranks_by_counting_as_on_gpus(width, monkeypatch):
    """On GPUs ranks are counted. Ties and infinities are ranked as by sorting."""
    values = np.random.default_rng(width).integers(0, 4, (7, width)).astype(np.float32)
    values[::2, -1] = np.inf
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    ordered, order = np.sort(values, axis=1), np.argsort(values, axis=1, kind="stable")
    for count in range(1, width + 1):
        np.testing.assert_array_equal(
            order_statistics.kth_smallest(jnp.asarray(values), count - 1), ordered[:, count - 1]
        )
        np.testing.assert_array_equal(
            order_statistics.sum_of_smallest(jnp.asarray(values), count), ordered[:, :count].sum(1)
        )
        expected = np.zeros(values.shape, bool)
        np.put_along_axis(expected, order[:, :count], True, axis=1)
        np.testing.assert_array_equal(order_statistics.smallest(jnp.asarray(values), count), expected)
