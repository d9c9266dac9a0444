"""The least-diameter subset, exactly, at any number of rows, inside jit.

"Is there a subset of m rows with diameter ≤ δ" asks for a vertex cover of at most n − m rows in the graph whose edges
are the pairs further apart than δ. The search bisects δ over the distances that occur and decides each question by
branch and bound on bit sets (one row of the graph is K/32 words). Three reductions do nearly all of the work:

- a row with more far partners than there is budget must be dropped;
- a row with one far partner may be kept and the partner dropped;
- where no row has more than two, only cycles are left, and any of their rows may be dropped.

Only a row with three or more far partners branches: drop it, or keep it and drop all its partners.

Several subsets may share the least diameter. The one returned is the first in lexicographic order, rows being ordered
by their Krum score (the sum of their m smallest squared distances; equal scores by index): a definition that does not
depend on which path found the subset nor, but for equal scores, on how the rows were numbered.
"""

from functools import lru_cache
from itertools import combinations
from math import comb
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from byzpg.robust.order_statistics import kth_smallest, smallest, sum_of_smallest

# With no more pairs in all subsets together than this, looking at all of them is faster than searching.
TABLE_LIMIT = 2**15

RUNNING, FOUND, NONE, OUT_OF_NODES = range(4)


class SearchLimitError(RuntimeError):
    """The node limit was reached before the least-diameter subset was proven."""


def least_diameter_subset(distances: Array, usable: Array, size: int, node_limit: int) -> Array:
    """Members [K] of the least-diameter subset of `size` usable rows, given squared distances [K, K].

    `distances` is symmetric, and infinite to and from rows that are not usable.
    """
    scores = jnp.where(usable, sum_of_smallest(distances, size), jnp.inf)
    order = jnp.argsort(scores, stable=True)
    distances, usable = distances[order][:, order], usable[order]
    if comb(len(usable), size) * comb(size, 2) <= TABLE_LIMIT:
        members = _look_at_all(distances, size)
    else:
        members = _search(distances, usable, size, node_limit)
    return jnp.zeros_like(usable).at[order].set(members)


@lru_cache
def _subset_table(num_rows: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """All subsets in lexicographic order: their members [C, K], and their pairs as flat indices [C, pairs]."""
    subsets = np.array(list(combinations(range(num_rows), size)))
    members = np.zeros((len(subsets), num_rows), bool)
    np.put_along_axis(members, subsets, True, axis=1)
    first, second = np.triu_indices(size, 1)
    return members, subsets[:, first] * num_rows + subsets[:, second]


def _look_at_all(distances: Array, size: int) -> Array:
    members, pairs = _subset_table(len(distances), size)
    diameters = jnp.max(distances.ravel()[pairs], axis=1, initial=0)
    return jnp.asarray(members)[jnp.argmin(diameters)]


# Bit sets: a set of rows is [K / 32] words of 32 bits.


def _pack(mask: Array) -> Array:
    width = mask.shape[-1]
    words = -(-width // 32)
    mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, 32 * words - width)])
    bits = mask.reshape(*mask.shape[:-1], words, 32).astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)
    return jnp.sum(bits, axis=-1, dtype=jnp.uint32)


def _unpack(words: Array, width: int) -> Array:
    bits = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :width].astype(bool)


def _count(words: Array) -> Array:
    return jnp.sum(lax.population_count(words).astype(jnp.int32), axis=-1)


def _union(sets: Array, chosen: Array) -> Array:
    """Union of the chosen ones among sets [n, words]."""
    return lax.reduce(jnp.where(chosen[:, None], sets, 0), jnp.uint32(0), lax.bitwise_or, (0,))


class _Node(NamedTuple):
    """The depth-first search at one node: rows still undecided, rows dropped, and the branches not yet tried."""

    open: Array
    dropped: Array
    depth: Array
    stack_open: Array
    stack_dropped: Array
    status: Array
    nodes: Array  # visited so far


def _cover(
    far: Array, open_: Array, dropped: Array, budget: Array, nodes: Array, node_limit: int, max_depth: int
) -> _Node:
    """Drop at most `budget` rows in all so that no two rows left in `open_` are far apart, if that is possible."""
    width = len(far)
    single = _pack(jnp.eye(width, dtype=bool))
    before = _pack(jnp.tril(jnp.ones((width, width), bool), -1))

    def step(node: _Node) -> _Node:
        partners = far & node.open
        degree = jnp.where(_unpack(node.open, width), _count(partners), 0)
        left = budget - _count(node.dropped)
        busiest = jnp.argmax(degree)
        most = degree[busiest]
        # `left` drops remove at most left × most edges.
        hopeless = (left < 0) | (jnp.sum(degree) > 2 * left * most)
        solved = ~hopeless & (most == 0)

        forced = degree > left
        leaf = degree == 1
        # Of two rows that have only each other, the later one is dropped.
        has_earlier_leaf = jnp.any((partners & _pack(leaf) & before) != 0, axis=-1)
        any_forced, any_leaf = jnp.any(forced), jnp.any(leaf)
        drop = jnp.where(any_leaf, _union(partners, leaf & ~has_earlier_leaf), single[busiest])
        drop = jnp.where(any_forced, _pack(forced), drop)

        # Branch: drop the busiest row now; keep it and drop its partners later.
        branch = ~hopeless & ~any_forced & ~any_leaf & (most > 2)
        slot = ((jnp.arange(max_depth) == node.depth) & branch)[:, None]
        stack_open = jnp.where(slot, node.open & ~single[busiest] & ~partners[busiest], node.stack_open)
        stack_dropped = jnp.where(slot, node.dropped | partners[busiest], node.stack_dropped)
        depth = node.depth + branch

        nodes = node.nodes + 1
        status = jnp.where(nodes >= node_limit, OUT_OF_NODES, RUNNING)
        status = jnp.where(hopeless & (depth == 0), NONE, status)
        status = jnp.where(solved, FOUND, status).astype(jnp.int32)
        previous = jnp.maximum(depth - 1, 0)
        return _Node(
            open=jnp.where(hopeless, stack_open[previous], node.open & ~drop),
            dropped=jnp.where(hopeless, stack_dropped[previous], node.dropped | jnp.where(solved, 0, drop)),
            depth=depth - hopeless,
            stack_open=stack_open,
            stack_dropped=stack_dropped,
            status=status,
            nodes=nodes,
        )

    empty = jnp.zeros((max_depth, far.shape[1]), jnp.uint32)
    start = _Node(open_, dropped, jnp.int32(0), empty, empty, jnp.int32(RUNNING), nodes)
    return lax.while_loop(lambda node: node.status == RUNNING, step, start)


class _Bisection(NamedTuple):
    low: Array  # no subset has a smaller diameter
    high: Array  # the diameter of the subset that leaves out `dropped`
    dropped: Array
    nodes: Array
    status: Array


class _Canonical(NamedTuple):
    dropped: Array  # by the best subset so far
    settled: Array  # rows that every subset preferred so far must drop
    nodes: Array
    status: Array


def _search(distances: Array, usable: Array, size: int, node_limit: int) -> Array:
    width = len(usable)
    budget = jnp.sum(usable) - size
    everyone = _pack(usable)
    nobody = jnp.zeros_like(everyone)
    index = jnp.arange(width)

    def cover(far: Array, kept: Array, nodes: Array) -> _Node:
        """The search for a subset that holds all of `kept` (a mask)."""
        kept_set = _pack(kept)
        dropped = _union(far, kept) & everyone
        clash = jnp.any(dropped & kept_set)
        limit = jnp.where(clash, -1, budget)
        return _cover(
            far,
            everyone & ~dropped & ~kept_set,
            dropped,
            limit,
            nodes,
            node_limit,
            max_depth=width - size + 1,
        )

    def diameter_without(dropped: Array) -> Array:
        inside = usable & ~_unpack(dropped, width)
        return jnp.max(jnp.where(inside[:, None] & inside[None, :], distances, 0))

    # A subset's diameter is at least its members' distance to their m-th nearest row; the ball around the row where
    # that is least is a subset to start from.
    radius = kth_smallest(distances, size - 1)
    ball = smallest(distances[jnp.argmin(radius)], size)
    outside = everyone & ~_pack(ball)

    def bisect(state: _Bisection) -> _Bisection:
        # Halve the interval, then move both ends to distances that occur. The order of non-negative floats is that
        # of their bits, so halving bits ends; halving values might not.
        integer = jnp.int32 if distances.dtype.itemsize == 4 else jnp.int64
        bits = lax.bitcast_convert_type(jnp.stack([state.low, state.high]), integer)
        middle = lax.bitcast_convert_type(bits[0] + (bits[1] - bits[0]) // 2, state.low.dtype)
        node = cover(_pack(distances > middle), jnp.zeros_like(usable), state.nodes)
        found = node.status == FOUND
        above = jnp.min(jnp.where(distances > middle, distances, jnp.inf))
        return _Bisection(
            low=jnp.where(found, state.low, above),
            high=jnp.where(found, diameter_without(node.dropped), state.high),
            dropped=jnp.where(found, node.dropped, state.dropped),
            nodes=node.nodes,
            status=node.status,
        )

    best = lax.while_loop(
        lambda state: (state.low < state.high) & (state.status != OUT_OF_NODES),
        bisect,
        _Bisection(jnp.min(radius), diameter_without(outside), outside, jnp.int32(0), jnp.int32(RUNNING)),
    )

    # Now the first such subset in lexicographic order: try to keep, in order, each row that the subset leaves out.
    far = _pack(distances > best.high)

    def doubtful(state: _Canonical) -> Array:
        """Rows the subset leaves out for no proven reason, as long as the rows before them do not fill it."""
        dropped = _unpack(state.dropped, width)
        kept = usable & ~dropped
        kept_before = jnp.cumsum(kept) - kept
        return dropped & ~_unpack(state.settled, width) & (kept_before < size)

    def improve(state: _Canonical) -> _Canonical:
        row = jnp.argmax(doubtful(state))
        kept = (usable & ~_unpack(state.dropped, width) & (index < row)) | (index == row)
        node = cover(far, kept, state.nodes)
        found = node.status == FOUND
        return _Canonical(
            dropped=jnp.where(found, node.dropped, state.dropped),
            settled=jnp.where(found, state.settled, state.settled | _pack(index == row)),
            nodes=node.nodes,
            status=node.status,
        )

    first = lax.while_loop(
        lambda state: jnp.any(doubtful(state)) & (state.status != OUT_OF_NODES),
        improve,
        _Canonical(best.dropped, nobody, best.nodes, best.status),
    )
    members = usable & ~_unpack(first.dropped, width)
    members &= jnp.cumsum(members) <= size
    return members & _proven(first.status != OUT_OF_NODES, node_limit)


def _proven(proven: Array, node_limit: int) -> Array:
    """True, or an error: under jit too, an unproven subset must never pass for the right one."""

    def complain(proven: np.ndarray) -> np.ndarray:
        if not np.all(proven):
            raise SearchLimitError(
                f"MDA: the least-diameter subset was not proven within node_limit = {node_limit} search nodes. "
                "Raise node_limit, or use GDA (agreement) or MultiKrum (aggregation), which need no search."
            )
        return np.asarray(proven)

    return jax.pure_callback(complain, jax.ShapeDtypeStruct((), bool), proven, vmap_method="broadcast_all")
