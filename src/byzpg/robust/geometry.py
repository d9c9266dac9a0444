"""What one receiver holds, as a cloud of points: its rows and their Gram matrix, and which vectors are sound.

Rows that all receivers share are centred and multiplied once. Only rows that one receiver alone holds are multiplied
for that receiver. A rule does not see the difference: it asks a `Cloud` for distances, and returns coefficients.

The Gram matrix is centred on a row inside the majority. Parameters may differ by 1e-5 at norm 10, and an uncentred
float32 Gram matrix would lose that difference to cancellation. The origin is one more point, for rules that clip norms.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from byzpg.robust.components import Vectors
from byzpg.robust.order_statistics import sort

# A longer row cannot be squared and summed safely in float32, so it is treated like one that is not finite.
NORM_LIMIT = 1e18

# A centre is good enough if its distance to the majority is within this factor of the best row's. The Gram matrix then
# keeps about five of float32's seven digits for the distances within the majority.
CENTRE_SLACK = 8.0
# Each move to a better centre regains three digits, so a few moves suffice at any distance.
MOST_CENTRE_MOVES = 8


def dot(left: Array, right: Array) -> Array:
    """Return the matrix product in full float32, on accelerators too."""
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


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


def _centred(rows: Array, centre: Array) -> Array:
    """Return rows minus the centre, with 0 for entries that are not finite.

    The row of such an entry has coefficient 0, but 0 × NaN would be NaN.
    """
    return jnp.where(jnp.isfinite(rows), rows - centre, 0)


def _gram(left: Array, right: Array, left_usable: Array, right_usable: Array) -> Array:
    """Return the inner products; 0 where a row is not usable."""
    return jnp.where(left_usable[:, None] & right_usable[None, :], dot(left, right.T), 0)


def ascending_rows(rows: Array, usable: Array) -> Array:
    """Return the values of the usable rows, ascending in each column and followed by +∞."""
    return sort(jnp.where(usable[:, None], rows, jnp.inf), axis=0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _CentreSearch:
    """The state of the search for a row to centre on."""

    centre: Array  # [d]
    centred: Array  # [c + 1, d], the rows and the origin minus the centre
    gram: Array  # [c + 1, c + 1], of `centred`
    proposal: Array  # index of the row to centre on next
    improvable: Array  # bool: whether that row is much nearer to the majority than the present centre
    num_moves: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SharedRows:
    """Rows that all receivers hold, with the origin as one more row at the end of `centred` and `gram`.

    Attributes:
        raw: [c, d], as received.
        centre: [d], one of the rows.
        centred: [c + 1, d], the rows and the origin minus the centre.
        usable: [c + 1], bool; the origin always is.
        gram: [c + 1, c + 1], the Gram matrix of `centred`.
        differing: [b], the points at which receivers hold different rows, where there are several receivers.
        ascending: [·, d], the values of all other usable points, ascending in each column and followed by +∞.
    """

    raw: Array
    centre: Array
    centred: Array
    usable: Array
    gram: Array
    differing: Array | None = None
    ascending: Array | None = None

    @staticmethod
    def around(raw: Array, usable: Array, *, first: Array, majority: int, candidates: int) -> "SharedRows":
        """Centre the rows on one of them that is near the majority.

        The first row to be tried may be an attacker's. If it is far away, rounding errors hide the distances between
        the others; each move towards the majority regains three digits.

        Args:
            raw: The rows [c, d].
            usable: Which of them are usable [c].
            first: The index of the row to try first.
            majority: How many of the candidates are trusted to be close together.
            candidates: How many rows, counted from the first, may become the centre.
        """
        usable_points = jnp.append(usable, True)
        eligible = usable[:candidates]

        def move(search: _CentreSearch) -> _CentreSearch:
            """Centre the rows on the proposed row, and check whether another one is much nearer to the majority."""
            index = search.proposal
            centre = jnp.where(usable[index], raw[index], 0)
            centred = jnp.concatenate([_centred(raw, centre), -centre[None]])
            gram = _gram(centred, centred, usable_points, usable_points)
            distances = squared_distances(gram[:candidates, :candidates])
            distances = jnp.where(eligible[:, None] & eligible[None, :], distances, jnp.inf)
            radius = -lax.top_k(-distances, majority)[0][:, -1]
            best = jnp.argmin(radius)
            improvable = radius[index] > CENTRE_SLACK**2 * radius[best]
            return _CentreSearch(centre, centred, gram, best, improvable, search.num_moves + 1)

        num_points, dimension = len(raw) + 1, raw.shape[1]
        found = lax.while_loop(
            lambda search: search.improvable & (search.num_moves < MOST_CENTRE_MOVES),
            move,
            _CentreSearch(
                centre=jnp.zeros_like(raw[0]),
                centred=jnp.zeros((num_points, dimension), raw.dtype),
                gram=jnp.zeros((num_points, num_points), raw.dtype),
                proposal=first,
                improvable=jnp.asarray(True),
                num_moves=jnp.int32(0),
            ),
        )
        return SharedRows(raw, found.centre, found.centred, usable_points, found.gram)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cloud:
    """The n points that one receiver holds: stored rows, or affine combinations (`mixing`) of them.

    Stored rows are, in this order: the shared rows, the origin, the private rows. Point n is always the origin.

    Attributes:
        shared: The rows that all receivers hold.
        private: [p, d], the rows that this receiver alone holds, as received.
        private_centred: [p, d], the same minus the centre.
        place: [n + 1], the stored row that each point is, unless points are mixed.
        sender: [c + 1 + p], the point that each stored row is, where the receiver holds that row.
        mixing: [n + 1, c + 1 + p], the points as combinations of stored rows, whose rows sum to one; None for points
            that are stored rows.
        usable: [n], which points the rules may use.
        gram: [n + 1, n + 1], the Gram matrix of the points and the origin.
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
    private: Array
    private_centred: Array
    place: Array
    sender: Array
    usable: Array
    gram: Array
    own: Array | None = None
    mixing: Array | None = None

    @staticmethod
    def of(
        shared: SharedRows,
        private: Array,
        private_usable: Array,
        *,
        place: Array,
        sender: Array,
        own: Array | None,
    ) -> "Cloud":
        """Return the cloud whose point j is row place[j], and whose row i can only be point sender[i].

        Shared rows are counted first, then private ones.
        """
        num_shared = len(shared.raw)
        place = jnp.where(place < num_shared, place, place + 1)  # step over the origin's slot
        place = jnp.append(place, num_shared)
        sender = jnp.insert(sender, num_shared, len(place) - 1)
        centred = _centred(private, shared.centre)
        usable = jnp.concatenate([shared.usable, private_usable])
        cross = _gram(centred, shared.centred, private_usable, shared.usable)
        inner = _gram(centred, centred, private_usable, private_usable)
        stored_gram = jnp.block([[shared.gram, cross.T], [cross, inner]])
        return Cloud(
            shared=shared,
            private=private,
            private_centred=centred,
            place=place,
            sender=sender,
            usable=usable[place[:-1]],
            gram=stored_gram[place][:, place],
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
        shared = SharedRows.around(rows, usable, first=jnp.argmax(usable), majority=majority, candidates=num_rows)
        # Every point is a shared row, in order. `of` would give the same, but its gathers take long to compile.
        no_rows = rows[:0]
        return Cloud(
            shared=shared,
            private=no_rows,
            private_centred=no_rows,
            place=jnp.arange(num_rows + 1),
            sender=jnp.arange(num_rows + 1),
            usable=usable,
            gram=shared.gram,
            own=own,
        )

    @property
    def num_points(self) -> int:
        """n, the number of points without the origin."""
        return len(self.usable)

    @property
    def _held(self) -> Array:
        """Which stored rows [c + 1 + p] are points."""
        return self.place[self.sender] == jnp.arange(len(self.sender))

    def distances(self) -> Array:
        """Return the squared distances [n, n] between points, infinite to and from points that are not usable."""
        usable = self.usable
        distances = squared_distances(self.gram[:-1, :-1])
        return jnp.where(usable[:, None] & usable[None, :], distances, jnp.inf)

    def distances_from(self, point: Array) -> Array:
        """Return one row [n] of `distances`, without the Gram matrix of all points where points are stored rows."""
        if self.mixing is None:
            row = self.place[point]
            num_shared = len(self.shared.raw)
            vector = self.shared.centred[jnp.minimum(row, num_shared)]
            if len(self.private):
                private = self.private_centred[jnp.maximum(row - num_shared - 1, 0)]
                vector = jnp.where(row > num_shared, private, vector)
            square = jnp.diagonal(self.shared.gram)
            product = dot(self.shared.centred, vector)
            if len(self.private):
                square = jnp.append(square, jnp.sum(jnp.square(self.private_centred), axis=1))
                product = jnp.append(product, dot(self.private_centred, vector))
            distances = jnp.maximum(square + jnp.sum(jnp.square(vector)) - 2 * product, 0)[self.place[:-1]]
        else:
            square = jnp.diagonal(self.gram)[:-1]
            distances = jnp.maximum(square + square[point] - 2 * self.gram[point, :-1], 0)
        distances = jnp.where(jnp.arange(self.num_points) == point, 0, distances)
        return jnp.where(self.usable & self.usable[point], distances, jnp.inf)

    def distances_to(self, coefficients: Array) -> Array:
        """Return ‖x_i − Σ_j u_j x_j‖ [n + 1] for affine coefficients u [n + 1]; 0 for points that are not usable."""
        product = dot(self.gram, coefficients)
        square = jnp.diagonal(self.gram) - 2 * product + dot(coefficients, product)
        return jnp.where(jnp.append(self.usable, True), jnp.sqrt(jnp.maximum(square, 0)), 0)

    def mean_of(self, members: Array) -> Array:
        """Return the coefficients [n + 1] of the mean over `members` [n]; the origin has coefficient 0."""
        members = members.astype(self.gram.dtype)
        return jnp.append(members / jnp.sum(members), 0)

    def origin(self) -> Array:
        """Return the coefficients [n + 1] of the origin."""
        return jnp.zeros_like(self.gram[0]).at[-1].set(1)

    def combine(self, coefficients: Array) -> Array:
        """Return Σ_j u_j x_j [d] for affine coefficients u [n + 1]."""
        return self._stored_sum(self._of_stored(coefficients[None]))[0]

    def _of_stored(self, coefficients: Array) -> Array:
        """Return coefficients [m, n + 1] of points as coefficients [m, c + 1 + p] of stored rows."""
        if self.mixing is None:
            return jnp.where(self._held, coefficients[:, self.sender], 0)
        return dot(coefficients, self.mixing)

    def _stored_sum(self, stored: Array) -> Array:
        """Return affine combinations [m, c + 1 + p] of the stored rows.

        The origin's share is subtracted from the centre beforehand. If it were subtracted from the result, rounding
        errors would spoil a result that is much shorter than the centre.
        """
        num_shared = len(self.shared.raw)
        total = dot(stored[:, :num_shared], self.shared.centred[:-1])
        if len(self.private):
            total += dot(stored[:, num_shared + 1 :], self.private_centred)
        share = jnp.sum(stored.at[:, num_shared].set(0), axis=1)
        share = jnp.where(stored[:, num_shared] == 0, 1, share)
        return total + share[:, None] * self.shared.centre

    def mixed(self, matrix: Array, usable: Array, own: Array | None) -> "Cloud":
        """Return the cloud whose points are the affine combinations `matrix` [n', n + 1] of these points."""
        matrix = jnp.concatenate([matrix, jnp.zeros_like(matrix[:1]).at[0, -1].set(1)])
        # Points that were scaled towards the origin are far from the old centre, so centre on one of them instead.
        pulled = jnp.any(matrix[:-1, -1] != 0)
        around = matrix[:, :-1] - matrix[jnp.argmax(usable), :-1]
        around = jnp.concatenate([around, -jnp.sum(around, axis=1, keepdims=True)], axis=1)
        around = jnp.where(pulled, around, matrix)
        return replace(
            self,
            mixing=self._of_stored(matrix),
            usable=usable,
            gram=dot(dot(around, self.gram), around.T),
            own=own,
        )

    def rows(self, members: Array | None = None) -> tuple[list[Array], list[Array]]:
        """Return the points as a list, in any order, and which of them are `members` [n] (default: the usable ones)."""
        if members is None:
            members = self.usable
        if self.mixing is not None:
            return list(self._stored_sum(self.mixing[:-1])), list(members)
        # The rows as received, without rounding from centring, and without a copy.
        num_shared = len(self.shared.raw)
        stored = lax.optimization_barrier(self._held & jnp.append(members, False)[self.sender])
        return [*self.shared.raw, *self.private], [*stored[:num_shared], *stored[num_shared + 1 :]]

    def ascending(self) -> tuple[Array, Array]:
        """Return the usable points in two parts [·, d], each ascending in each column and followed by +∞.

        The first part is the same for all receivers, and is sorted once for all of them.
        """
        if self.mixing is not None:
            points = self._stored_sum(self.mixing[:-1])
            return ascending_rows(points, self.usable), points[:0]
        points, differing = self.shared.raw, self.shared.differing
        if differing is None or self.shared.ascending is None:
            return ascending_rows(points, self.usable), points[:0]
        row, num_shared = self.place[differing], len(points)
        differing_points = points[jnp.minimum(row, num_shared - 1)]
        if len(self.private):
            private = self.private[jnp.maximum(row - num_shared - 1, 0)]
            differing_points = jnp.where((row > num_shared)[:, None], private, differing_points)
        return self.shared.ascending, ascending_rows(differing_points, self.usable[differing])

    @property
    def num_stored(self) -> int:
        """The number of rows, shared and private, that `rows` returns for points that are not mixed."""
        return len(self.shared.raw) + len(self.private)
