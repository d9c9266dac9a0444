"""The least-diameter subset, by both of its paths, against listing every subset; and the order statistics beneath it.

All coordinates and distances here are small integers, exact in float32, so that ties are real ties and the test can
ask for the same subset, not only for the same diameter.
"""

from bisect import bisect_left
from functools import lru_cache
from itertools import chain, combinations, product
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import twins
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from tiers import slow_except

from byzpg.robust import aggregators, least_diameter, order_statistics
from byzpg.robust.least_diameter import SearchLimitError, least_diameter_subset

TABLE_LIMITS = {"table": 10**9, "search": 0}  # the limit that forces each path
PLENTY = 100_000


def masked(distances, usable):
    return np.where(usable[..., :, None] & usable[..., None, :], distances, np.inf).astype(np.float32)


def by_path(path, distances, usable, size, node_limit):
    with mock.patch.object(least_diameter, "TABLE_LIMIT", TABLE_LIMITS[path]):  # it is read while tracing
        return least_diameter_subset(distances, usable, size, node_limit)


@lru_cache
def solver(path, size):
    """One program per shape; the node limit is an argument, so that trying another one compiles nothing."""
    return jax.jit(lambda distances, usable, node_limit: by_path(path, distances, usable, size, node_limit))


def solve(path, distances, size, usable=None, node_limit=PLENTY):
    usable = np.ones(len(distances), bool) if usable is None else usable
    return np.asarray(solver(path, size)(masked(distances, usable), usable, jnp.int32(node_limit)))


# Two oracles: list all subsets; or, where there are too many, a plain recursion on Python integers as sets.


def krum_order(distances, size):
    return np.argsort(np.sort(distances, axis=1)[:, :size].sum(axis=1), kind="stable")


def by_listing(distances, size, usable=None):
    """Of all subsets of least diameter the first in the order of Krum scores, as a mask."""
    index = np.arange(len(distances)) if usable is None else np.flatnonzero(usable)
    near = distances[np.ix_(index, index)]
    subsets = np.array(list(combinations(krum_order(near, size), size)))
    diameters = near[subsets[:, :, None], subsets[:, None, :]].max(axis=(1, 2))
    return np.isin(np.arange(len(distances)), index[subsets[np.argmin(diameters)]])


def coverable(far, rows, budget):
    """Whether dropping `budget` of `rows` leaves no two far apart: drop the busiest row, or all its partners."""
    degree = [(far[row] & rows).bit_count() if rows >> row & 1 else 0 for row in range(len(far))]
    most = max(degree)
    if budget < 0 or sum(degree) > 2 * budget * most:
        return False
    row = degree.index(most)
    rest = rows & ~(1 << row)
    return most == 0 or coverable(far, rest, budget - 1) or coverable(far, rest & ~far[row], budget - most)


def by_recursion(distances, size):
    num_rows = len(distances)
    all_rows, budget = (1 << num_rows) - 1, num_rows - size

    def further_than(limit):
        return [sum(1 << int(j) for j in np.flatnonzero(line > limit)) for line in distances]

    levels = np.unique(distances)
    far = further_than(levels[bisect_left(levels, 1, key=lambda x: coverable(further_than(x), all_rows, budget))])
    kept, rows = [], all_rows
    for row in krum_order(distances, size).tolist():
        if rows >> row & 1 and len(kept) < size:
            rest = rows & ~(1 << row)
            lost = (rest & far[row]).bit_count()
            if coverable(far, rest & ~far[row], budget - lost):
                kept, rows, budget = [*kept, row], rest & ~far[row], budget - lost
            else:
                rows, budget = rest, budget - 1
    return np.isin(np.arange(num_rows), kept)


# Instances: squared distances [K, K] of clouds, and of graphs, whose edges are the pairs that are far apart


def squared(rows):
    return np.sum((rows[:, None] - rows[None, :]) ** 2, axis=-1)


def graph(num_rows, edges, near=1, far=2):
    distances = np.where(np.eye(num_rows, dtype=bool), 0, near)
    for i, j in edges:
        distances[i, j] = distances[j, i] = far
    return distances


def cycle(*rows):
    return list(zip(rows, rows[1:] + rows[:1], strict=True))


def cubic(rng, num_rows):
    """The edges of a random graph with three partners to a row."""
    while True:
        edges = np.sort(rng.permutation(np.repeat(np.arange(num_rows), 3)).reshape(-1, 2), axis=1)
        if np.all(edges[:, 0] < edges[:, 1]) and len(np.unique(edges, axis=0)) == len(edges):
            return edges.tolist()


PETERSEN = cycle(0, 1, 2, 3, 4) + cycle(5, 7, 9, 6, 8) + [(i, i + 5) for i in range(5)]


def instances(rng, num_rows=12):
    def gaussian(dimension, scale=16):
        return np.round(scale * rng.normal(size=(num_rows, dimension))).astype(int)

    plane = gaussian(2)
    clusters = gaussian(2, 3) + 40 * rng.integers(0, 3, (num_rows, 1))
    duplicates, simplex = plane[rng.integers(0, 5, num_rows)], 3 * np.eye(num_rows, dtype=int)
    line, grid = rng.integers(0, 9, (num_rows, 1)), rng.integers(0, 3, (num_rows, 2))
    yield from map(squared, (plane, gaussian(3), gaussian(60), clusters, duplicates, simplex, line, grid))
    at_diameter = squared(plane)  # attackers exactly as far from all others as the honest are from each other
    honest, attackers = np.split(rng.permutation(num_rows), [-3])
    at_diameter[attackers] = at_diameter[:, attackers] = at_diameter[np.ix_(honest, honest)].max()
    at_diameter[np.ix_(attackers, attackers)] = 0
    yield at_diameter
    relabel = rng.permutation(num_rows)
    for edges in (
        PETERSEN,
        cycle(0, 1, 2, 3, 4) + cycle(5, 6, 7, 8, 9),
        cycle(0, 1, 2, 3, 4) + cycle(5, 6, 7) + cycle(8, 9, 10),
        cycle(0, 1, 2) + cycle(3, 4, 5) + cycle(6, 7, 8) + cycle(9, 10, 11),
        list(product(range(6), range(6, 12))),
        list(product(range(3), range(3, 10))),
        [(0, 1), (2, 3), (3, 4), (5, 6), (5, 7), (5, 8), (5, 9), (10, 11)],  # pairs, a path, a star
        cubic(rng, num_rows),
        [pair for pair in combinations(range(num_rows), 2) if rng.random() < 0.35],
    ):
        yield graph(num_rows, edges)[np.ix_(relabel, relabel)]
    yield (levels := np.triu(rng.integers(1, 5, (num_rows, num_rows)), 1)) + levels.T


@pytest.mark.parametrize("num_dropped", slow_except([4], [2, 4, 5, 6]))
def test_both_paths_find_the_subset_that_listing_finds(num_dropped):
    rng = np.random.default_rng(num_dropped)
    size = 12 - num_dropped
    for distances in chain(instances(rng), instances(rng), instances(rng)):
        missing = np.ones(12, bool)
        missing[rng.permutation(12)[: rng.integers(1, num_dropped + 1)]] = False
        for usable in (None, missing):
            expected = by_listing(distances, size, usable)
            for path in TABLE_LIMITS:
                np.testing.assert_array_equal(solve(path, distances, size, usable), expected, path)


@pytest.mark.slow
@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=21, max_size=21), st.sets(st.integers(0, 6), max_size=3))
def test_any_integer_distances(values, absent):
    distances = np.zeros((7, 7), int)
    distances[np.triu_indices(7, 1)] = values
    distances += distances.T
    usable = ~np.isin(np.arange(7), list(absent))
    expected = by_listing(distances, 4, usable)
    for path in TABLE_LIMITS:
        np.testing.assert_array_equal(solve(path, distances, 4, usable), expected, path)


def test_permuting_the_rows_permutes_the_answer():
    rng = np.random.default_rng(0)
    for _ in range(20):
        distances = squared(np.round(100 * rng.normal(size=(12, 3))).astype(int))
        assert len(np.unique(np.sort(distances, axis=1)[:, :8].sum(axis=1))) == 12  # else the numbering may decide
        order = rng.permutation(12)
        for path in TABLE_LIMITS:
            shuffled = solve(path, distances[np.ix_(order, order)], 8)
            np.testing.assert_array_equal(shuffled, solve(path, distances, 8)[order])


@pytest.mark.parametrize("path", slow_except(["table"], TABLE_LIMITS))
def test_under_vmap_and_map(path):
    rng = np.random.default_rng(1)
    batch = np.stack([squared(rng.integers(0, 4, (7, 2))) for _ in range(16)])
    usable = np.ones((16, 7), bool)
    usable[::3, 2] = False

    def one(instance):
        distances, usable = instance
        return by_path(path, distances, usable, 4, PLENTY)

    expected = np.stack([by_listing(d, 4, u) for d, u in zip(batch, usable, strict=True)])
    for batched in (jax.jit(jax.vmap(one)), jax.jit(lambda instances: lax.map(one, instances))):
        np.testing.assert_array_equal(batched((masked(batch, usable), usable)), expected)


@pytest.mark.slow
def test_the_rule_averages_that_subset():
    rng = np.random.default_rng(2)
    for (f, present), limit in product(((3, None), (4, np.arange(14) != 5)), (20, 3)):
        rows = rng.integers(0, limit, (14, 2)).astype(np.float32)
        weights = aggregators.MDA().weights(jnp.asarray(rows), num_byzantine=f, present=present)
        np.testing.assert_array_equal(np.flatnonzero(weights), twins.mda_subset(rows, f, present))


# Beyond listing


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "num_dropped"), [(34, 16), (64, 15), (100, 33)])
def test_many_rows(num_rows, num_dropped):
    """Exact where no table could be, rows and budgets past the 32 bits of a word; and equal distances end at once."""
    rng = np.random.default_rng(num_rows)
    size = num_rows - num_dropped
    plane, *higher = (np.round(16 * rng.normal(size=(num_rows, dimension))).astype(int) for dimension in (2, 5, 50))
    shifted = plane.copy()
    shifted[:num_dropped] = shifted[num_dropped : 2 * num_dropped] + np.array([40, 0])
    for distances in map(squared, (plane, *higher, shifted, plane // 8)):
        np.testing.assert_array_equal(solve("search", distances, size), by_recursion(distances, size))
    np.testing.assert_array_equal(solve("search", graph(num_rows, []), size), np.arange(num_rows) < size)
    if num_rows == 34:  # deep branching: every row has three or four partners
        for _ in range(8):
            edges = cubic(rng, 28) + [(i, i + 14) for i in range(14)] * int(rng.integers(2))
            distances = graph(34, edges, far=int(rng.integers(2, 4)))
            np.testing.assert_array_equal(solve("search", distances, size), by_recursion(distances, size))


def test_a_search_cut_short_never_passes_for_an_answer():
    """A cubic graph on 28 rows: dropping 15 cannot leave it without an edge, though no count of edges says so."""
    distances = graph(64, cubic(np.random.default_rng(1), 28))
    expected = by_recursion(distances, 49)
    assert distances[np.ix_(expected, expected)].max() == 2
    refused = []
    for node_limit in (*range(1, 90, 4), 256, 1024, 4096):
        try:
            np.testing.assert_array_equal(solve("search", distances, 49, node_limit=node_limit), expected)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            refused.append(str(error))
    assert 10 < len(refused) < 26
    assert all("not proven within node_limit" in message for message in refused)


def test_a_search_cut_short_is_a_clear_error():
    """Rows that realise the Petersen graph: an edge is one coordinate, +1 at one end and −1 at the other."""
    rows = np.zeros((16, 15 + 18), np.float32)
    for column, (i, j) in enumerate(PETERSEN):
        rows[i, column], rows[j, column] = 1, -1
    rows[10:, 15:] = np.kron(np.eye(6), np.ones(3))  # six more, as long, far from no other
    np.testing.assert_array_equal(squared(rows), graph(16, PETERSEN, near=6, far=8))
    rows, rule = jnp.asarray(rows), aggregators.MDA(node_limit=5)
    message = r"not proven within node_limit = 5 search nodes. Raise node_limit, or use GDA"
    with pytest.raises(SearchLimitError, match=message):
        rule(rows, num_byzantine=5)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.jit(lambda rows: rule(rows, num_byzantine=5))(rows).block_until_ready()


# Order statistics


@pytest.mark.parametrize("width", range(1, 34))
def test_ascending(width):
    """Up to 14 values, all sequences of zeros and ones: what sorts those sorts everything (Knuth, 0–1 principle)."""
    if width <= 14:
        values = np.arange(2**width) >> np.arange(width)[:, None] & 1
    else:
        values = np.random.default_rng(width).integers(0, width // 2, (width, 2000))
    result = order_statistics.ascending([jnp.asarray(column, jnp.float32) for column in values])
    np.testing.assert_array_equal(np.stack(result), np.sort(values, axis=0))


@pytest.mark.parametrize(("width", "count"), [(1, 1), (2, 1), (5, 5), (9, 6), (33, 20), (129, 64)])
def test_the_smallest(width, count):
    rng = np.random.default_rng(width)
    values = rng.integers(0, width // 2 + 2, (40, width)).astype(np.float32)
    values[0, count:] = np.inf

    @jax.jit
    def measured(values):
        return (
            order_statistics.kth_smallest(values, count - 1),
            order_statistics.sum_of_smallest(values, count),
            order_statistics.smallest(values, count),
        )

    in_order = np.sort(values, axis=1)
    total = in_order[:, :count].sum(axis=1)
    rank = np.argsort(np.argsort(values, axis=1, kind="stable"), axis=1)  # of two equal ones, the first is less
    expected = in_order[:, count - 1], total, rank < count
    jax.tree.map(np.testing.assert_array_equal, measured(values), expected)
