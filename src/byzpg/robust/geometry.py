"""What one receiver holds, as a cloud of points: its rows and their inner products, and which vectors are sound.

Rows that all receivers share are centred and multiplied once. Only rows that one receiver alone holds are multiplied
for that receiver. A rule does not see the difference: it asks a `Cloud` for distances, and returns coefficients. What a
rule does not ask for is not computed: XLA drops it.

Inner products are those around a row inside the majority. Parameters may differ by 1e-5 at norm 10, and an uncentred
float32 Gram matrix would lose that difference to cancellation. The origin is one more point, for rules that clip norms.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil, floor, log2, sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_batching import custom_vmap

from byzpg.robust import kernels
from byzpg.robust.components import Vectors, by_platform, zeros_for
from byzpg.robust.order_statistics import kth_smallest, sort

# A longer row cannot be squared and summed safely in float32, so it is treated like one that is not finite.
NORM_LIMIT = 1e18

# A centre is good enough if its distance to the majority is within this factor of the best row's. The Gram matrix then
# keeps about five of float32's seven digits for the distances within the majority.
CENTRE_SLACK = 8.0
# Each move to a better centre regains three digits, so a few moves suffice at any distance.
MOST_CENTRE_MOVES = 8

# On a CPU, a product of a few long rows runs on one thread. Above this number of entries, the rows are cut into tiles
# of so many columns, which are multiplied in parallel and fit into a core's cache.
LARGE_PRODUCT = 2**21
TILE = 2048

# A sum of at most so many rows is one pass over them, fused with centring them. For more, it would compile for seconds.
UNROLLED_SUM = 128


def dot(left: Array, right: Array) -> Array:
    """Return the matrix product in full float32, on accelerators too."""
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


def sum_of_rows(rows: Array) -> Array:
    """Return the sum [d] of rows [n, d].

    As soon as rows leave its cache, a CPU takes a hundred times as long for XLA's sum as for this product.
    """

    def product(rows: Array) -> Array:
        return dot(jnp.ones(len(rows), rows.dtype), rows)

    return by_platform(rows, cuda=lambda rows: jnp.sum(rows, axis=0), default=product)


def mean_of_all(rows: Array) -> tuple[Array, Array]:
    """Return the mean [d] of rows [n, d], and whether they are certainly all sound. If not, it may be any values.

    Only the mean is checked, and not all rows. Differences from the first row are scaled by a power of two. It is so
    large that a difference of 2^e in any entry overflows, so that its column's sum is infinite or NaN, whatever is
    added. Here 2^e √d is at most a quarter of NORM_LIMIT. So if the mean is finite, no row is further from it than two
    quarters.
    """
    num_rows, dimension = rows.shape
    exponent = floor(log2(NORM_LIMIT / 4 / sqrt(dimension)))
    scale = 2.0 ** (int(jnp.finfo(rows.dtype).maxexp) + 2 + ceil(log2(num_rows)) - exponent)
    weights = jnp.full(num_rows, 1 / num_rows, rows.dtype)
    mean = _sum_around(rows[0], weights * scale, rows, all_finite=True)[0] / scale + rows[0]
    return mean, is_sound(4 * mean)


@custom_vmap
def unless_batched(condition: Array) -> Array:
    """Return the condition of a shortcut. Under vmap, return False: lax.cond would compute both branches."""
    return condition


@unless_batched.def_vmap
def _never(*_: Any) -> tuple[Array, bool]:
    return jnp.asarray(False), False


def computed_if(condition: Array, compute: Callable[..., Any], operands: tuple[Any, ...], *, otherwise: Any) -> Any:
    """Return compute(*operands) if the condition holds. Under vmap, unlike lax.cond, skip it where it never holds.

    It is a loop of at most one turn. Its operands depend on the turn, or XLA would compute it before the loop, always.
    """

    def once(turn: Array, _: Any) -> Any:
        return compute(*jax.tree.map(lambda leaf: jnp.where(turn == 0, leaf, jnp.zeros_like(leaf)), operands))

    return lax.fori_loop(0, condition.astype(jnp.int32), once, otherwise)


def stored(tree: Any) -> Any:
    """Return the same values. On GPUs, keep XLA from computing them again in every kernel that uses them.

    A kernel that picks rows from joined parts would otherwise contain the code of all parts. Some of these kernels took
    ten times as long to compile.
    """
    return tree if jax.default_backend() == "cpu" else lax.optimization_barrier(tree)


def is_sound(vectors: Vectors) -> Array:
    """Return which vectors [..., d] the rules use: those that are finite and shorter than `NORM_LIMIT`.

    Examples:
        >>> print(is_sound(jnp.array([[1.0, 2], [jnp.nan, 2], [1e25, 2]])))
        [ True False False]
    """
    return jnp.sum(jnp.square(vectors), axis=-1) < NORM_LIMIT**2


# For longer vectors, np.dot would wake up all threads of the linear algebra library for every message.
ONE_THREAD = 10_000


def is_sound_on_host(vector: np.ndarray) -> bool:
    """As `is_sound`, for one vector [d] that arrived from a network, without JAX.

    The limit is lower by a factor of two. So the rules use every vector that is accepted here, whatever the order in
    which they sum its squares.

    Examples:
        >>> is_sound_on_host(np.array([1.0, 2.0], np.float32)), is_sound_on_host(np.array([np.inf, 2.0], np.float32))
        (True, False)
    """
    with np.errstate(over="ignore", invalid="ignore"):
        squares = vector.dot(vector) if len(vector) <= ONE_THREAD else np.einsum("i,i", vector, vector)
    return bool(squares < (NORM_LIMIT / 2) ** 2)


def squared_distances(gram: Array) -> Array:
    """Return ‖x_i − x_j‖² = G_ii + G_jj − 2 G_ij, exactly symmetric and never negative."""
    square = jnp.diagonal(gram)
    distances = jnp.maximum(square[:, None] + square[None, :] - (gram + gram.T), 0)
    return jnp.where(jnp.eye(len(gram), dtype=bool), 0, distances)


def repeated(items: Array, stands_for: Array | None, defined: Array | None) -> Array:
    """Return items[stands_for], or all items in order, with NaN where they are not `defined`."""
    if stands_for is not None:
        items = items[stands_for]
    return items if defined is None else jnp.where(defined[:, None], items, jnp.nan)


def _centred(rows: Array, centre: Array) -> Array:
    """Return rows minus the centre, with 0 for entries that are not finite.

    The row of such an entry has coefficient 0, but 0 × NaN would be NaN.
    """
    return jnp.where(jnp.isfinite(rows), rows - centre, 0)


def row_products(left: Array, right: Array) -> Array:
    """Return left @ right.T. Under vmap, XLA would compute the transpose as a copy."""
    return lax.dot_general(left, right, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)


def _inner_products(rows: Array, usable: Array) -> Array:
    """Return the inner products [c, c] of the rows [c, d]; 0 where a row is not usable, which need not be finite."""
    num_rows, dimension = rows.shape
    tiled = dimension - dimension % TILE if rows.size > LARGE_PRODUCT else 0
    products = row_products(rows[:, tiled:], rows[:, tiled:]) if tiled < dimension else 0
    if tiled:
        tiles = jnp.swapaxes(rows[:, :tiled].reshape(num_rows, -1, TILE), 0, 1)
        products += jnp.sum(jax.vmap(row_products)(tiles, tiles), axis=0)
    return jnp.where(usable[:, None] & usable[None, :], products, 0)


def ascending_rows(rows: Array, usable: Array) -> Array:
    """Return the values of the usable rows, ascending in each column and followed by +∞."""
    return sort(jnp.where(usable[:, None], rows, jnp.inf), axis=0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _CentreSearch:
    """The state of the search for a row to centre on."""

    centre: Array  # [d], the row
    inner: Array  # [c, c], the inner products of the rows minus that row
    proposal: Array  # the index of the row to centre on next
    improvable: Array  # bool: whether that row is much nearer to the majority than the present centre
    num_moves: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Products:
    """The inner products of the rows from which receivers of the same messages hold some, around the shared centre.

    Stored rows are, in this order: the shared rows, then the private rows.

    Attributes:
        usable: [c + p], which of them the rules may use.
        inner: [c + p, c + p]; 0 where a row is not usable.
        towards_origin: [c + p], those of the origin with the rows; 0 where a row is not usable.
    """

    usable: Array
    inner: Array
    towards_origin: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedRows:
    """Rows from which every receiver holds some, around one of them.

    Attributes:
        raw: [c, d], as received.
        usable: [c], bool.
        centre: [d], one of the rows.
        centred: [c, d], the rows minus the centre.
        inner: [c, c], the inner products of the centred rows.
        rows: The same rows as `raw`, in place.
        in_kernels: Whether GPU kernels may compute with the rows.
        num_common: Every receiver holds the rows before this one. Of the others, it holds either row num_common + j, or
            the false row j in its place: false rows are the last shared rows, or private ones.
        ascending: [num_common, d], the values of the usable ones of the first num_common rows, ascending in each column
            and followed by +∞. None if there is only one receiver.
    """

    raw: Array
    usable: Array
    centre: Array
    centred: Array
    inner: Array
    rows: kernels.Rows
    in_kernels: bool = field(metadata={"static": True})
    num_common: int = field(metadata={"static": True})
    ascending: Array | None = None

    @staticmethod
    def around(
        rows: kernels.Rows,
        usable: Array,
        *,
        first: Array,
        majority: int,
        num_common: int,
        on_one_device: bool,
        search: bool = True,
    ) -> "SharedRows":
        """Centre the rows on one of them that is near the majority.

        The first row to be tried may be an attacker's. If it is far away, rounding errors hide the distances between
        the others; each move towards the majority regains three digits.

        Args:
            rows: The rows. A row of `rows.vectors` becomes the centre.
            usable: Which of them are usable [c].
            first: The index of the row to try first.
            majority: How many of `rows.vectors` are trusted to be close together.
            num_common: How many rows, counted from the first, every receiver holds.
            on_one_device: Whether one device holds all coordinates.
            search: Whether to look for a better centre than the first row. A rule without distances needs none.
        """
        raw, in_kernels, candidates = rows.joined, on_one_device and rows.fit_kernels, rows.num_vectors
        eligible = usable[:candidates]

        def products(centre: Array) -> Array:
            return _inner_products(raw - centre, usable)

        def products_in_kernel(centre: Array) -> Array:
            return jnp.where(usable[:, None] & usable[None, :], kernels.inner_products(rows, centre), 0)

        def around_row(index: Array) -> tuple[Array, Array]:
            centre = jnp.where(usable[index], rows.vector(index), 0)
            return centre, by_platform(centre, cuda=products_in_kernel if in_kernels else None, default=products)

        def move(state: _CentreSearch) -> _CentreSearch:
            """Centre the rows on the proposed row, and check whether another one is much nearer to the majority."""
            centre, inner = around_row(state.proposal)
            distances = squared_distances(inner[:candidates, :candidates])
            distances = jnp.where(eligible[:, None] & eligible[None, :], distances, jnp.inf)
            radius = kth_smallest(distances, majority - 1)
            best = jnp.argmin(radius)
            improvable = radius[state.proposal] > CENTRE_SLACK**2 * radius[best]
            return _CentreSearch(centre, inner, best, improvable, state.num_moves + 1)

        if search:
            found = lax.while_loop(
                lambda state: state.improvable & (state.num_moves < MOST_CENTRE_MOVES),
                move,
                _CentreSearch(
                    centre=jnp.zeros_like(raw[0]),
                    inner=jnp.zeros((len(raw), len(raw)), raw.dtype),
                    proposal=first,
                    improvable=jnp.asarray(True),
                    num_moves=jnp.int32(0),
                ),
            )
            centre, inner = found.centre, found.inner
        else:
            centre, inner = around_row(first)
        return SharedRows(raw, usable, centre, _centred(raw, centre), inner, rows, in_kernels, num_common)

    def towards_origin(self) -> Array:
        """Return the inner products [c] of the origin with the rows, all of them around the centre."""
        vectors, order, more, _ = self.rows

        def in_place() -> Array:
            first, after = (-jnp.sum(_centred(each, self.centre) * self.centre, axis=1) for each in (vectors, more))
            return jnp.append(first[order], self.rows.of_more(after))

        def in_product() -> Array:
            return _towards_origin(self.centred, self.centre)

        return by_platform(cuda=in_place if self.in_kernels else None, default=in_product)

    def products(self, private: Array, private_usable: Array, *, often_unusable: bool = False) -> Products:
        """Return the products of these rows and of private ones [p, d], for each of several receivers.

        If none of the private rows are usable, as is often the case in a large federation, theirs are skipped.
        """
        num_rows = len(self.usable)
        num_receivers, num_private, dimension = private.shape

        def of_private(centred: Array) -> tuple[Array, Array]:
            # XLA's product copies the second matrix, which is the smaller one where one receiver stands for many.
            # Under vmap, XLA would also transpose it beforehand, so all private rows are one matrix.
            cross = row_products(self.centred, centred.reshape(num_receivers * num_private, dimension))
            cross = jnp.swapaxes(cross.reshape(num_rows, num_receivers, num_private), 0, 1)
            return cross, jax.vmap(_inner_products)(centred, private_usable)

        def joined(usable: Array, centred: Array, cross: Array, inner: Array) -> Products:
            cross = jnp.where(self.usable[:, None] & usable, cross, 0)
            usable = jnp.append(self.usable, usable)
            origin = jnp.append(self.towards_origin(), _towards_origin(centred, self.centre))
            return Products(usable, jnp.block([[self.inner, cross], [cross.T, inner]]), jnp.where(usable, origin, 0))

        centred = _centred(private, self.centre)
        if often_unusable:
            none = zeros_for(of_private, centred)
            products = computed_if(jnp.any(private_usable), of_private, (centred,), otherwise=none)
        else:
            products = of_private(centred)
        return jax.vmap(joined)(private_usable, centred, *products)

    def combine(self, stored: Array, stands_for: Array | None, defined: Array | None) -> Array:
        """Return affine combinations of the rows, some of them repeatedly.

        Args:
            stored: Coefficients u [m, c + 1] of the rows and the origin; the sum is Σ_j u_j x_j.
            stands_for: [n], which of the sums each result is; None for all of them in turn.
            defined: [n], which results are not NaN; None for all.

        Returns:
            The results [n, d].
        """

        def in_kernel() -> Array:
            each = repeated(stored, stands_for, defined)
            return kernels.combinations(each[:, :-1], _share(each), self.rows, self.centre)

        def in_products() -> Array:
            total = dot(stored[:, :-1], self.centred)
            return repeated(_around(self.centre, stored, total), stands_for, defined)

        return by_platform(cuda=in_kernel if self.in_kernels else None, default=in_products)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cloud:
    """The n points that one receiver holds: stored rows, or affine combinations (`mixing`) of them.

    Stored rows are, in this order: the shared rows, the private rows, the origin. Point n is always the origin.

    Attributes:
        shared: The rows that all receivers hold.
        private: [p, d], the rows that this receiver alone holds, as received. None if there is only one receiver, which
            holds all shared rows.
        private_centred: [p, d], the same minus the centre.
        place: [n], the stored row that each point is, unless points are mixed.
        sender: [c + p], the point that each stored row is, where the receiver holds that row.
        mixing: [n + 1, c + p + 1], the points as combinations of stored rows, whose rows sum to one; None for points
            that are stored rows.
        usable: [n], which points the rules may use.
        inner: [n, n], the inner products of the points around some centre.
        towards_origin: [n + 1], those of the origin with the points and itself.
        has_products: Whether inner products are there in any case, because other receivers have the same.
        own: The index of the receiver's own point, where that is known.

    Examples:
        >>> cloud = Cloud.received(jnp.array([[1.0, 1], [1, 3], [2, 2]]), None, 2, None)
        >>> print(cloud.distances())
        [[0. 4. 2.]
         [4. 0. 2.]
         [2. 2. 0.]]
        >>> print(cloud.combine(cloud.mean_of(jnp.array([True, True, False]))))
        [1. 2.]
    """

    shared: SharedRows
    private: Array | None
    private_centred: Array | None
    place: Array
    sender: Array
    usable: Array
    inner: Array
    towards_origin: Array
    has_products: bool = field(default=False, metadata={"static": True})
    own: Array | None = None
    mixing: Array | None = None

    @staticmethod
    def of(
        shared: SharedRows,
        private: Array,
        products: Products,
        *,
        place: Array,
        sender: Array,
        own: Array | None,
        has_products: bool,
    ) -> "Cloud":
        """Return the cloud whose point j is row place[j], and whose row i can only be point sender[i].

        Shared rows are counted first, then private ones.
        """
        return Cloud(
            shared=shared,
            private=private,
            private_centred=_centred(private, shared.centre),
            place=place,
            sender=sender,
            usable=products.usable[place],
            inner=products.inner[place][:, place],
            towards_origin=jnp.append(products.towards_origin[place], dot(shared.centre, shared.centre)),
            has_products=has_products,
            own=own,
        )

    @staticmethod
    def received(rows: Array, present: Array | None, majority: int, own: Array | None) -> "Cloud":
        """Return the cloud of the rows [K, d] that one receiver holds.

        Args:
            rows: The vectors that it received.
            present: Which of them have arrived [K]; None means all.
            majority: How many of them can be trusted to be near each other, K − f.
            own: The index of the receiver's own row, if it has one.
        """
        num_rows = len(rows)
        usable = is_sound(rows) if present is None else is_sound(rows) & present
        shared = SharedRows.around(
            kernels.Rows(rows, None, rows[:0]),
            usable,
            first=jnp.argmax(usable),
            majority=majority,
            num_common=num_rows,
            on_one_device=False,  # an attack may call a rule on rows that are divided among devices
        )
        # Every point is a shared row, in order. `of` would give the same, but its gathers take long to compile.
        origin = jnp.where(usable, shared.towards_origin(), 0)
        return Cloud(
            shared=shared,
            private=None,
            private_centred=None,
            place=jnp.arange(num_rows),
            sender=jnp.arange(num_rows),
            usable=usable,
            inner=shared.inner,
            towards_origin=jnp.append(origin, dot(shared.centre, shared.centre)),
            own=own,
        )

    @property
    def num_points(self) -> int:
        """n, the number of points without the origin."""
        return len(self.usable)

    @property
    def _held(self) -> Array:
        """Which stored rows [c + p] are points."""
        return self.place[self.sender] == jnp.arange(len(self.sender))

    @property
    def gram(self) -> Array:
        """[n + 1, n + 1], the Gram matrix of the points and the origin around some centre."""
        return jnp.block([[self.inner, self.towards_origin[:-1, None]], [self.towards_origin[None]]])

    def distances(self) -> Array:
        """Return the squared distances [n, n] between points, infinite to and from points that are not usable."""
        usable = self.usable
        distances = squared_distances(self.inner)
        return jnp.where(usable[:, None] & usable[None, :], distances, jnp.inf)

    def distances_from(self, point: Array) -> Array:
        """Return a row of `distances`, without all inner products where it can be had more cheaply."""
        if self.mixing is not None or self.has_products or (self.private is not None and point is not self.own):
            return self.distances()[point]
        stored = self.shared.raw[self.place[point]]  # a receiver's own row is always a shared one
        if self.private is None:
            squares = jnp.sum(jnp.square(self.shared.raw - stored), axis=1)
        else:
            shared = squared_distances(self.shared.inner)[self.place[point]]
            private = jnp.sum(jnp.square(self.private - stored), axis=1)
            squares = jnp.concatenate([shared, private])[self.place]
        return jnp.where(self.usable & self.usable[point], squares, jnp.inf)

    def distances_to(self, coefficients: Array) -> Array:
        """Return ‖x_i − Σ_j u_j x_j‖ [n + 1] for affine coefficients u [n + 1]; 0 for points that are not usable."""
        gram = self.gram
        product = dot(gram, coefficients)
        square = jnp.diagonal(gram) - 2 * product + dot(coefficients, product)
        return jnp.where(jnp.append(self.usable, True), jnp.sqrt(jnp.maximum(square, 0)), 0)

    def mean_of(self, members: Array) -> Array:
        """Return the coefficients [n + 1] of the mean over `members` [n]; the origin has coefficient 0."""
        members = members.astype(self.inner.dtype)
        return jnp.append(members / jnp.sum(members), 0)

    def origin(self) -> Array:
        """Return the coefficients [n + 1] of the origin."""
        return jnp.zeros_like(self.towards_origin).at[-1].set(1)

    def combine(self, coefficients: Array) -> Array:
        """Return Σ_j u_j x_j [d] for affine coefficients u [n + 1]."""
        alone = self.private is None and self.mixing is None
        stored = coefficients[None] if alone else self.of_stored(coefficients[None])
        if self.private is not None:
            num_shared, centre = len(self.shared.raw), self.shared.centre
            total = dot(stored[:, :num_shared], self.shared.centred)
            total += _sum_around(centre, stored[0, num_shared:-1], self.private)
            return _around(centre, stored, total)[0]
        # Around the row with the largest coefficient, so that rules without distances need no search for a centre.
        heaviest = jnp.argmax(stored[0, :-1])
        centre = jnp.where(self.shared.usable[heaviest], self.shared.raw[heaviest], 0)
        return _around(centre, stored, _sum_around(centre, stored[0, :-1], self.shared.raw))[0]

    def of_stored(self, coefficients: Array) -> Array:
        """Return coefficients [m, n + 1] of points as coefficients [m, c + p + 1] of stored rows."""
        if self.mixing is not None:
            return dot(coefficients, self.mixing)
        stored = jnp.where(self._held, coefficients[:, self.sender], 0)
        return jnp.concatenate([stored, coefficients[:, -1:]], axis=1)

    def _stored_sum(self, stored: Array) -> Array:
        """Return affine combinations [m, c + p + 1] of the stored rows."""
        num_shared = len(self.shared.raw)
        total = dot(stored[:, :num_shared], self.shared.centred)
        if self.private_centred is not None and len(self.private_centred):
            total += dot(stored[:, num_shared:-1], self.private_centred)
        return _around(self.shared.centre, stored, total)

    def mixed(self, matrix: Array, usable: Array, own: Array | None) -> "Cloud":
        """Return the cloud whose points are the affine combinations `matrix` [n', n + 1] of these points."""
        matrix = jnp.concatenate([matrix, jnp.zeros_like(matrix[:1]).at[0, -1].set(1)])
        # Points that were scaled towards the origin are far from the old centre, so centre on one of them instead.
        pulled = jnp.any(matrix[:-1, -1] != 0)
        around = matrix[:, :-1] - matrix[jnp.argmax(usable), :-1]
        around = jnp.concatenate([around, -jnp.sum(around, axis=1, keepdims=True)], axis=1)
        around = jnp.where(pulled, around, matrix)
        gram = dot(dot(around, self.gram), around.T)
        return replace(
            self,
            mixing=self.of_stored(matrix),
            usable=usable,
            inner=gram[:-1, :-1],
            towards_origin=gram[-1],
            own=own,
        )

    def points(self) -> tuple[Array, Array]:
        """Return the points [n, d] in the order of their senders, 0 where they are not usable, and which are usable."""
        if self.mixing is not None:
            points = self._stored_sum(self.mixing[:-1])
        else:
            points = jnp.concatenate(self.rows()[0])
            if self.private is not None:  # honest agents come first in it
                points = jnp.zeros_like(points).at[self.sender[: len(points)]].set(points)
        return jnp.where(self.usable[:, None], points, 0), self.usable

    def in_each_coordinate(
        self, function: Callable[..., Array], *numbers: Array, members: Array | None = None
    ) -> Array:
        """Return function(values, count, *numbers) [d] of the values that the points have in each coordinate.

        Args:
            function: Elementwise in the values, a list of arrays with one entry for each point, in any order. Those of
                points that do not count are +∞. The count is the number of those that do.
            numbers: Numbers that the function needs.
            members: Which points [n] count; by default those that are usable.
        """

        def in_kernel() -> Array:
            counts = self.usable if members is None else members
            points, centre = kernels.Points(counts, self.place), None
            if self.mixing is not None:
                mixing, centre = self.mixing[:-1], self.shared.centre
                points = points._replace(mixing=mixing[:, :-1], share=_share(mixing))
            given = tuple(jnp.asarray(each) for each in (jnp.sum(counts), *numbers))
            return kernels.in_each_coordinate(function, given, points, self.shared.rows, centre)

        def in_rows() -> Array:
            rows, counts = self.rows(members)
            values = [jnp.where(here, row, jnp.inf) for row, here in zip(rows, counts, strict=True)]
            return function(values, lax.optimization_barrier(jnp.sum(jnp.stack(counts))), *numbers)[0]

        alone = self.private is None or not len(self.private)
        return by_platform(cuda=in_kernel if self.shared.in_kernels and alone else None, default=in_rows)

    def rows(self, members: Array | None = None) -> tuple[list[Array], list[Array]]:
        """Return the points [1, d] as a list, in any order, and which of them are `members` [n] (default: usable)."""
        if members is None:
            members = self.usable
        if self.mixing is not None:
            points = self._stored_sum(self.mixing[:-1])
            return [points[j : j + 1] for j in range(len(points))], list(members)
        # The rows as received, without rounding from centring, and without a copy.
        raw, num_common, num_points = self.shared.raw, self.shared.num_common, self.num_points
        held = lax.optimization_barrier(self._held & members[self.sender])
        false_rows = self._false_rows()
        rows, among = [raw[j : j + 1] for j in range(num_common)], list(held[:num_common])
        for j in range(num_points - num_common):
            true, false = held[num_common + j], held[num_points + j]
            rows.append(jnp.where(true, raw[num_common + j : num_common + j + 1], false_rows[j : j + 1]))
            among.append(true | false)
        return rows, among

    def rows_at(self, points: Array) -> list[Array]:
        """Return the rows [1, d] of these points [m]."""
        rows, private, place = self.shared.raw, self.private, self.place[points]
        if self.mixing is not None:
            rows, private, place = self._stored_sum(self.mixing[:-1]), None, points
        place = lax.optimization_barrier(place)
        found = [lax.dynamic_slice_in_dim(rows, place[j], 1) for j in range(len(points))]
        if private is None or not len(private):
            return found
        number = len(rows)
        theirs = (lax.dynamic_slice_in_dim(private, jnp.maximum(place[j] - number, 0), 1) for j in range(len(points)))
        return [
            jnp.where(place[j] < number, row, other) for j, (row, other) in enumerate(zip(found, theirs, strict=True))
        ]

    def _false_rows(self) -> Array:
        """Return the rows [n − num_common, d] that the receiver may hold in place of true ones."""
        raw = self.shared.raw
        return raw[self.num_points :] if len(raw) > self.num_points or self.private is None else self.private

    def ascending(self) -> tuple[Array, Array]:
        """Return the usable points in two parts [·, d], each ascending in each column and followed by +∞.

        The first part is the same for all receivers, and is sorted once for all of them.
        """
        raw, common, num_points = self.shared.raw, self.shared.num_common, self.num_points
        if self.mixing is not None:
            points = self._stored_sum(self.mixing[:-1])
            return ascending_rows(points, self.usable), points[:0]
        if self.shared.ascending is None:
            return ascending_rows(raw, self.usable), raw[:0]
        true = self._held[common:num_points]
        points = jnp.where(true[:, None], raw[common:num_points], self._false_rows())
        return self.shared.ascending, ascending_rows(points, self.usable[self.sender[common:num_points]])


def _towards_origin(centred: Array, centre: Array) -> Array:
    """Return the inner products of the origin with these rows, all of them around the centre."""
    return dot(centred, -centre)


def _sum_around(centre: Array, weights: Array, rows: Array, *, all_finite: bool = False) -> Array:
    """Return Σ_j w_j (x_j − centre), [1, d], for weights [m] and rows [m, d], as `_centred` unless all are finite."""

    def centred(rows: Array) -> Array:
        return rows - centre if all_finite else _centred(rows, centre)

    if len(rows) > UNROLLED_SUM:
        return dot(weights[None], centred(rows))
    terms = (weights[j] * centred(rows[j : j + 1]) for j in range(len(rows)))
    return sum(terms, jnp.zeros_like(centre[None]))


def _around(centre: Array, stored: Array, total: Array) -> Array:
    """Return affine combinations [m, d] from those of the centred rows, `total`, and the coefficients [m, c + p + 1].

    The origin's share is subtracted from the centre beforehand. If it were subtracted from the result, rounding errors
    would spoil a result that is much shorter than the centre.
    """
    return total + _share(stored)[:, None] * centre


def _share(stored: Array) -> Array:
    """Return the sums [m] of the coefficients [m, c + p + 1] without the origin's: exactly 1 if it has none."""
    return jnp.where(stored[:, -1] == 0, 1, jnp.sum(stored[:, :-1], axis=1))
