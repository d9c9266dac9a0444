"""The subset of m rows with the least diameter: exact, at any number of rows, inside jit.

Consider the graph whose edges are the pairs of rows further apart than δ. There is a subset of m rows with diameter ≤ δ
if and only if this graph has a vertex cover of at most n − m rows: the rows to drop. The search lowers δ from the
diameter of a ball of m rows. It asks by turns whether any subset is better at all, and whether one is much better. It
answers each question by branch and bound on bit sets (a row of the graph is K/32 words). Three reductions do nearly
all of the work:

- a row with more far partners than rows may still be dropped must be dropped itself;
- a row with one far partner may be kept, and the partner dropped;
- where no row has more than two far partners, only cycles are left, and any of their rows may be dropped.

Only a row with three or more far partners makes the search branch: drop it, or keep it and drop all its partners.

Several subsets may share the least diameter. The result is the first of them in lexicographic order, with the rows
ordered by their Krum scores (the sum of the m smallest squared distances of a row; equal scores by index). So it does
not depend on how the subset was found nor, except for equal scores, on how the rows are numbered. Most rows are in all
of these subsets or in none. Scores cost more than all else, and are computed only for the others.
"""

from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import combinations
from math import comb
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from byzpg.robust.order_statistics import kth_smallest, smallest, sum_of_smallest

# How many rows are tried as the centre of the first ball, and how many are scored at a time.
ROWS_AT_ONCE = 32

# If all subsets together have at most this many pairs, listing them is faster than searching.
TABLE_LIMIT = 2**15

RUNNING, FOUND, NONE, OUT_OF_NODES = range(4)


class SearchLimitError(RuntimeError):
    """The search reached its node limit before it had proven the least-diameter subset."""


def least_diameter_subset(distances: Array, usable: Array, size: int, node_limit: int) -> Array:
    """Find the subset of `size` usable rows with the least diameter.

    Args:
        distances: Squared distances [K, K], symmetric, and infinite to and from rows that are not usable.
        usable: Which rows [K] are usable; at least `size` of them.
        size: The number of rows in the subset.
        node_limit: The most nodes that the search may visit.

    Returns:
        The members of the subset, as a mask [K].

    Raises:
        SearchLimitError: If `node_limit` is reached. Under jit, XLA wraps this error in one of its own.

    Examples:
        >>> positions = jnp.array([0.0, 1.0, 2.0, 9.0])
        >>> distances = (positions[:, None] - positions[None, :]) ** 2
        >>> print(least_diameter_subset(distances, jnp.ones(4, bool), size=3, node_limit=1000))
        [ True  True  True False]
    """
    if comb(len(usable), size) * comb(size, 2) <= TABLE_LIMIT:
        return _by_listing(distances, usable, size)
    return _by_search(distances, usable, size, node_limit)


@lru_cache
def _subset_table(num_rows: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all subsets in lexicographic order: their members [C, K], and their pairs as flat indices [C, pairs]."""
    subsets = np.array(list(combinations(range(num_rows), size)))
    members = np.zeros((len(subsets), num_rows), bool)
    np.put_along_axis(members, subsets, True, axis=1)
    first, second = np.triu_indices(size, 1)
    return members, subsets[:, first] * num_rows + subsets[:, second]


def _by_listing(distances: Array, usable: Array, size: int) -> Array:
    scores = jnp.where(usable, sum_of_smallest(distances, size), jnp.inf)
    order = jnp.argsort(scores, stable=True)
    members, pairs = _subset_table(len(distances), size)
    diameters = jnp.max(distances[order][:, order].ravel()[pairs], axis=1, initial=0)
    return jnp.zeros_like(usable).at[order].set(jnp.asarray(members)[jnp.argmin(diameters)])


# Bit sets: a set of rows is [K / 32] words of 32 bits. Row i is bit i // words of word i % words: so neighbouring rows
# are in neighbouring words, and sets are packed by vector instructions.


def _pack(mask: Array) -> Array:
    """Return the rows of one mask [K], or of each of several [K, K], as sets."""
    width = mask.shape[-1]
    words = -(-width // 32)
    mask = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, 32 * words - width)])
    if mask.ndim == 1:  # a reduction, which is computed once and not wherever it is used
        bits = mask.reshape(32, words).astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)[:, None]
        return jnp.sum(bits, axis=0, dtype=jnp.uint32)
    bits = (mask[:, bit * words : (bit + 1) * words].astype(jnp.uint32) << np.uint32(bit) for bit in range(32))
    return reduce(lax.bitwise_or, bits)


def _unpack(words: Array, width: int) -> Array:
    bits = (words[..., None, :] >> jnp.arange(32, dtype=jnp.uint32)[:, None]) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :width].astype(bool)


@lru_cache
def _constant_sets(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two sets for each of `width` rows: that row alone, and the rows before it."""
    words = -(-width // 32)
    row = np.arange(width)
    single = np.zeros((width, words), np.uint32)
    single[row, row % words] = 1 << (row // words)
    return single, np.cumsum(single, axis=0, dtype=np.uint32) - single


def _count(words: Array) -> Array:
    return jnp.sum(lax.population_count(words).astype(jnp.int32), axis=-1)


def _union(sets: Array, chosen: Array) -> Array:
    """Return the union of the chosen sets among `sets` [n, words]."""
    return lax.reduce(jnp.where(chosen[:, None], sets, 0), jnp.uint32(0), lax.bitwise_or, (0,))


class _Node(NamedTuple):
    """The depth-first search for a vertex cover, at one node. Sets of rows are bit sets."""

    open: Array  # rows that are still undecided
    dropped: Array
    depth: Array  # number of branches on the stack
    stack_open: Array  # `open` and `dropped` of the branches that are still to be tried
    stack_dropped: Array
    status: Array
    nodes: Array  # visited so far


def _cover(
    far: Array, *, open_rows: Array, dropped: Array, budget: Array, nodes: Array, node_limit: int, max_depth: int
) -> _Node:
    """Search for rows to drop, so that no two rows left in `open_rows` are far apart.

    Args:
        far: For each row, the set of rows that are far from it [K, words].
        open_rows: The rows that may be dropped or kept.
        dropped: The rows that are already dropped.
        budget: The most rows that may be dropped in all.
        nodes: The number of nodes visited before.
        node_limit: The most nodes that may be visited in all.
        max_depth: The most branches that can be open at once.

    Returns:
        The last node: its status is FOUND, NONE or OUT_OF_NODES.
    """
    width = len(far)
    single, before = map(jnp.asarray, _constant_sets(width))

    def step(node: _Node) -> _Node:
        partners = far & node.open
        degree = jnp.where(_unpack(node.open, width), _count(partners), 0)
        left = budget - _count(node.dropped)
        busiest = jnp.argmax(degree)
        most = degree[busiest]
        # Dropping `left` rows removes at most left × most edges.
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
    start = _Node(
        open=open_rows,
        dropped=dropped,
        depth=jnp.int32(0),
        stack_open=empty,
        stack_dropped=empty,
        status=jnp.int32(RUNNING),
        nodes=nodes,
    )
    return lax.while_loop(lambda node: node.status == RUNNING, step, start)


class _Descent(NamedTuple):
    """The search for the least diameter."""

    low: Array  # no subset has a smaller diameter
    high: Array  # the diameter of the subset that leaves out `dropped`
    dropped: Array
    halve: Array  # bool: whether to try the middle of the interval next, or else anything below its upper end
    nodes: Array
    status: Array


class _Scoring(NamedTuple):
    """The Krum scores of rows, computed for a few at a time."""

    scores: Array
    unscored: Array


class _Ordering(NamedTuple):
    """The search for the first subset of least diameter in lexicographic order."""

    dropped: Array  # by the best subset so far
    settled: Array  # rows that every better subset must drop
    nodes: Array
    status: Array


@dataclass(frozen=True)
class _Problem:
    """One search."""

    distances: Array
    usable: Array
    size: int
    node_limit: int
    budget: Array  # number of usable rows that the subset leaves out
    usable_set: Array  # `usable` as a bit set

    @property
    def num_rows(self) -> int:
        return len(self.usable)

    def cover(self, far: Array, kept: Array, nodes: Array) -> _Node:
        """Search for a subset that has no two rows far apart and contains all of `kept` (a mask)."""
        kept_set = _pack(kept)
        dropped = _union(far, kept) & self.usable_set
        clash = jnp.any(dropped & kept_set)
        return _cover(
            far,
            open_rows=self.usable_set & ~dropped & ~kept_set,
            dropped=dropped,
            budget=jnp.where(clash, -1, self.budget),
            nodes=nodes,
            node_limit=self.node_limit,
            max_depth=self.num_rows - self.size + 1,
        )

    def diameter_without(self, dropped: Array) -> Array:
        # A reduction is computed once. XLA would compute `_unpack` again for each of the K² distances.
        single, _ = _constant_sets(self.num_rows)
        inside = self.usable & ~jnp.any(dropped & single, axis=1)
        return jnp.max(jnp.where(inside[:, None] & inside[None, :], self.distances, 0))

    def ball(self) -> Array:
        """Return a ball of `size` rows, the smallest around any of a few rows that are spread over the usable ones."""
        usable_rows = jnp.nonzero(self.usable, size=self.num_rows)[0]
        number = min(self.num_rows, ROWS_AT_ONCE)
        centres = usable_rows[jnp.arange(number) * jnp.sum(self.usable) // number]
        around = self.distances[centres]
        return smallest(around[jnp.argmin(kth_smallest(around, self.size - 1))], self.size)

    def least_diameter(self) -> _Descent:
        """Find the least diameter, and some subset that has it."""
        distances = self.distances
        nothing_kept = jnp.zeros_like(self.usable)
        outside = self.usable_set & ~_pack(self.ball())
        # Non-negative floats are ordered as their bits are, and halving bits ends; halving values might not.
        integer = jnp.int32 if distances.dtype.itemsize == 4 else jnp.int64

        def ask(state: _Descent) -> _Descent:
            low, high = lax.bitcast_convert_type(jnp.stack([state.low, state.high]), integer)
            middle = low + (high - low) // 2
            # The ball was at most twice as wide as the best one, had the best centre been among those tried.
            guess = lax.bitcast_convert_type(state.high / 4, integer)
            tried = jnp.where(state.halve, jnp.where(low == 0, guess, middle), high - 1)
            limit = lax.bitcast_convert_type(tried, distances.dtype)
            node = self.cover(_pack(distances > limit), nothing_kept, state.nodes)
            found = node.status == FOUND
            return _Descent(
                low=jnp.where(found, state.low, lax.bitcast_convert_type(tried + 1, distances.dtype)),
                high=jnp.where(found, self.diameter_without(node.dropped), state.high),
                dropped=jnp.where(found, node.dropped, state.dropped),
                halve=~state.halve,
                nodes=node.nodes,
                status=node.status,
            )

        return lax.while_loop(
            lambda state: (state.low < state.high) & (state.status != OUT_OF_NODES),
            ask,
            _Descent(
                low=jnp.zeros((), distances.dtype),
                high=self.diameter_without(outside),
                dropped=outside,
                halve=jnp.asarray(False),
                nodes=jnp.int32(0),
                status=jnp.int32(RUNNING),
            ),
        )

    def always_dropped(self, far: Array) -> Array:
        """Return rows that every subset without far pairs leaves out: those with too many far partners, repeatedly."""

        def more(state: tuple[Array, Array]) -> tuple[Array, Array]:
            dropped, _ = state
            left = self.budget - _count(dropped)
            still_open = _unpack(self.usable_set & ~dropped, self.num_rows)
            forced = still_open & (_count(far & ~dropped) > left)
            return dropped | _pack(forced), jnp.any(forced)

        far = far & self.usable_set
        nothing = jnp.zeros_like(self.usable_set)
        return lax.while_loop(lambda state: state[1], more, (nothing, jnp.asarray(True)))[0]

    def scores(self, doubtful: Array) -> Array:
        """Return the Krum scores of the doubtful rows, and −1 for all others."""

        def score(state: _Scoring) -> _Scoring:
            number = min(self.num_rows, ROWS_AT_ONCE)
            rows = jnp.nonzero(state.unscored, size=number, fill_value=self.num_rows)[0]
            scores = sum_of_smallest(self.distances.at[rows].get(mode="fill", fill_value=0), self.size)
            return _Scoring(
                scores=state.scores.at[rows].set(scores, mode="drop"),
                unscored=state.unscored.at[rows].set(False, mode="drop"),
            )

        start = _Scoring(jnp.full(self.num_rows, -1, self.distances.dtype), doubtful)
        return lax.while_loop(lambda state: jnp.any(state.unscored), score, start).scores

    def first_in_order(self, best: _Descent) -> Array:
        """Find the first subset of least diameter, as a mask: try to keep, in order, each row that is left out."""
        usable, num_rows = self.usable, self.num_rows
        index = jnp.arange(num_rows)
        far = _pack(self.distances > best.high)
        hopeless = self.always_dropped(far)
        # Without the pairs that are exactly as far apart as the least diameter, which were too many, one row less need
        # be dropped for each of them. If there is one such pair, then no row can be dropped without need, and a row
        # that is far from no other is in all of the subsets.
        touching = jnp.where(usable, jnp.sum(self.distances == best.high, axis=1), 0)
        tight = jnp.sum(touching) <= 2
        open_rows = self.usable_set & ~hopeless
        in_need = _count(far & open_rows) > 0
        done = _count(hopeless) == self.budget
        scores = self.scores(_unpack(open_rows, num_rows) & (in_need | ~tight) & ~done)
        order = jnp.argsort(scores, stable=True)
        rank = jnp.zeros_like(order).at[order].set(index)

        def doubtful(state: _Ordering) -> Array:
            """Rows that are left out without proof, and come before the subset is full."""
            dropped = _unpack(state.dropped, num_rows)
            kept = (usable & ~dropped)[order]
            kept_before = (jnp.cumsum(kept) - kept)[rank]
            return dropped & ~_unpack(state.settled, num_rows) & (kept_before < self.size)

        def improve(state: _Ordering) -> _Ordering:
            row = jnp.argmin(jnp.where(doubtful(state), rank, num_rows))
            kept = (usable & ~_unpack(state.dropped, num_rows) & (rank < rank[row])) | (index == row)
            node = self.cover(far, kept, state.nodes)
            found = node.status == FOUND
            return _Ordering(
                dropped=jnp.where(found, node.dropped, state.dropped),
                settled=jnp.where(found, state.settled, state.settled | _pack(index == row)),
                nodes=node.nodes,
                status=node.status,
            )

        first = lax.while_loop(
            lambda state: jnp.any(doubtful(state)) & (state.status != OUT_OF_NODES),
            improve,
            _Ordering(best.dropped, settled=hopeless, nodes=best.nodes, status=best.status),
        )
        members = (usable & ~_unpack(first.dropped, num_rows))[order]
        members = (members & (jnp.cumsum(members) <= self.size))[rank]
        return members & _proven(first.status != OUT_OF_NODES, self.node_limit)


def _by_search(distances: Array, usable: Array, size: int, node_limit: int) -> Array:
    budget = jnp.sum(usable) - size
    problem = _Problem(distances, usable, size, node_limit, budget=budget, usable_set=_pack(usable))
    return problem.first_in_order(problem.least_diameter())


def _proven(proven: Array, node_limit: int) -> Array:
    """Return True or raise an error, under jit too: a subset that is not proven must never be returned."""

    def check(proven: np.ndarray) -> np.ndarray:
        if not np.all(proven):
            raise SearchLimitError(
                f"MDA: the least-diameter subset was not proven within node_limit = {node_limit} search nodes. "
                "Raise node_limit, or use GDA (agreement) or MultiKrum (aggregation), which need no search."
            )
        return np.asarray(proven)

    return jax.pure_callback(check, jax.ShapeDtypeStruct((), bool), proven, vmap_method="broadcast_all")
