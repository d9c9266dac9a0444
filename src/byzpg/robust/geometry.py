"""What one receiver holds, as a cloud of points: the rows, and the Gram matrix distance rules work in.

Rows that every receiver shares are centred and multiplied once; only rows sent to one receiver alone are its own
cost. A rule never sees the difference: it asks a `Cloud` for distances and hands back coefficients.

The Gram matrix is centred on a row inside the majority, because parameters differ by 1e-5 at norm 10 and an
uncentred float32 Gram is all cancellation. The origin is carried along as one more point, for rules that clip norms.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from byzpg.robust.components import Vectors

# A longer row cannot be squared and summed safely in float32; it is treated like a non-finite one.
NORM_LIMIT = 1e18

# A centre is good enough when its distance to the majority is within this factor of the best row's: the Gram
# matrix then keeps about five of float32's seven digits where it matters.
CENTRE_SLACK = 8.0
# Each move to a better centre regains three digits, so a few suffice at any distance.
MOST_CENTRE_MOVES = 8


def dot(left: Array, right: Array) -> Array:
    """Matrix product in full float32, on accelerators too."""
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


def is_sound(vectors: Vectors) -> Array:
    """Which vectors [..., d] the rules use: finite ones that are short enough to be squared in float32."""
    return jnp.sum(jnp.square(vectors), axis=-1) < NORM_LIMIT**2


def is_sound_on_host(vector: np.ndarray) -> bool:
    """As `is_sound`, for one vector [d] that arrived from a network, without JAX.

    Stricter by a factor of two: whatever the order of a sum, every vector accepted here is used by the rules.
    """
    # Not np.dot: it would wake all threads of the linear algebra library at every message.
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.einsum("i,i", vector, vector) < (NORM_LIMIT / 2) ** 2)


def squared_distances(gram: Array) -> Array:
    """‖x_i − x_j‖² = G_ii + G_jj − 2 G_ij, symmetric to the bit, never negative."""
    square = jnp.diagonal(gram)
    distances = jnp.maximum(square[:, None] + square[None, :] - (gram + gram.T), 0)
    return jnp.where(jnp.eye(len(gram), dtype=bool), 0, distances)


def _centred(rows: Array, centre: Array) -> Array:
    """Rows minus the centre. Non-finite entries become 0: their row has coefficient 0, and 0 × NaN is NaN."""
    return jnp.where(jnp.isfinite(rows), rows - centre, 0)


def _gram(left: Array, right: Array, left_usable: Array, right_usable: Array) -> Array:
    """Inner products, 0 where a row is not usable."""
    return jnp.where(left_usable[:, None] & right_usable[None, :], dot(left, right.T), 0)


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
    """Rows held by every receiver alike, with the origin as one more row at the end of `centred` and `gram`."""

    raw: Array  # [c, d] as received
    centre: Array  # [d]
    centred: Array  # [c + 1, d]
    usable: Array  # [c + 1] bool; the origin always is
    gram: Array  # [c + 1, c + 1]

    @staticmethod
    def around(raw: Array, usable: Array, first: Array, majority: int, candidates: int) -> "SharedRows":
        """`raw` centred on one of its first `candidates` rows, of which a `majority` is trusted to be close together.

        Row `first` is tried first. It may be an attacker's, and a row far away would drown the distances between the
        others in rounding errors: each move towards the majority regains three digits.
        """
        usable_points = jnp.append(usable, True)
        eligible = usable[:candidates]

        def move(search: _CentreSearch) -> _CentreSearch:
            """Centre the rows on the proposed row, and see whether another one is much nearer to the majority."""
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
    """The n points one receiver holds. Points are affine combinations (`mixing`) of stored rows.

    Stored rows are, in this order: shared rows, the origin, private rows. Point n is always the origin.
    """

    shared: SharedRows
    private: Array  # [p, d] as received
    private_centred: Array  # [p, d]
    mixing: Array  # [n + 1, c + 1 + p], rows sum to one
    usable: Array  # [n]
    gram: Array  # [n + 1, n + 1]
    own: Array | None = None  # which point is the receiver's own, where that is known
    plain: bool = field(default=True, metadata={"static": True})  # points are stored rows, unmixed

    @staticmethod
    def of(shared: SharedRows, private: Array, private_usable: Array, place: Array, own: Array | None) -> "Cloud":
        """The cloud whose point j is stored row place[j] (shared rows first, then private ones)."""
        num_shared = len(shared.raw)
        place = jnp.where(place < num_shared, place, place + 1)  # step over the origin's slot
        place = jnp.append(place, num_shared)
        centred = _centred(private, shared.centre)
        usable = jnp.concatenate([shared.usable, private_usable])
        cross = _gram(centred, shared.centred, private_usable, shared.usable)
        inner = _gram(centred, centred, private_usable, private_usable)
        stored_gram = jnp.block([[shared.gram, cross.T], [cross, inner]])
        mixing = (place[:, None] == jnp.arange(len(usable))).astype(shared.raw.dtype)
        return Cloud(
            shared,
            private,
            centred,
            mixing,
            usable[place[:-1]],
            stored_gram[place][:, place],
            own,
        )

    @staticmethod
    def received(rows: Array, present: Array | None, majority: int, own: Array | None) -> "Cloud":
        """The cloud of one receiver's rows [K, d], `majority` of which can be trusted to be near each other."""
        num_rows = len(rows)
        usable = is_sound(rows) if present is None else is_sound(rows) & present
        shared = SharedRows.around(rows, usable, jnp.argmax(usable), majority, num_rows)
        # Every point is a shared row, in order: as `of` would find by gathering, which takes long to compile.
        nothing = rows[:0]
        return Cloud(shared, nothing, nothing, jnp.eye(num_rows + 1, dtype=rows.dtype), usable, shared.gram, own)

    @property
    def num_points(self) -> int:
        return len(self.usable)

    def distances(self) -> Array:
        """Squared distances [n, n] between points, infinite to and from points that are not usable."""
        usable = self.usable
        distances = squared_distances(self.gram[:-1, :-1])
        return jnp.where(usable[:, None] & usable[None, :], distances, jnp.inf)

    def distances_to(self, coefficients: Array) -> Array:
        """‖x_i − Σ_j u_j x_j‖ [n + 1], for affine coefficients u [n + 1]; 0 for unusable points."""
        product = dot(self.gram, coefficients)
        square = jnp.diagonal(self.gram) - 2 * product + dot(coefficients, product)
        return jnp.where(jnp.append(self.usable, True), jnp.sqrt(jnp.maximum(square, 0)), 0)

    def mean_of(self, members: Array) -> Array:
        """Coefficients [n + 1] of the mean over `members` [n]; none for the origin."""
        members = members.astype(self.gram.dtype)
        return jnp.append(members / jnp.sum(members), 0)

    def origin(self) -> Array:
        """Coefficients [n + 1] of the origin."""
        return jnp.zeros_like(self.gram[0]).at[-1].set(1)

    def combine(self, coefficients: Array) -> Array:
        """Σ_j u_j x_j [d], for affine coefficients u [n + 1]."""
        return self._stored_sum(dot(coefficients, self.mixing)[None])[0]

    def _stored_sum(self, stored: Array) -> Array:
        """Affine combinations [m, c + 1 + p] of the stored rows.

        The origin's share is taken off the centre beforehand: taken off afterwards, it would leave only rounding errors
        of a result much shorter than the centre.
        """
        num_shared = len(self.shared.raw)
        total = dot(stored[:, :num_shared], self.shared.centred[:-1])
        if len(self.private):
            total += dot(stored[:, num_shared + 1 :], self.private_centred)
        share = jnp.sum(stored.at[:, num_shared].set(0), axis=1)
        share = jnp.where(stored[:, num_shared] == 0, 1, share)
        return total + share[:, None] * self.shared.centre

    def mixed(self, matrix: Array, usable: Array, own: Array | None) -> "Cloud":
        """The cloud of affine combinations matrix [n', n + 1] of these points."""
        matrix = jnp.concatenate([matrix, jnp.zeros_like(matrix[:1]).at[0, -1].set(1)])
        # Points pulled towards the origin lie far from the old centre: centre on one of them instead.
        pulled = jnp.any(matrix[:-1, -1] != 0)
        around = matrix[:, :-1] - matrix[jnp.argmax(usable), :-1]
        around = jnp.concatenate([around, -jnp.sum(around, axis=1, keepdims=True)], axis=1)
        around = jnp.where(pulled, around, matrix)
        return replace(
            self,
            mixing=dot(matrix, self.mixing),
            usable=usable,
            gram=dot(dot(around, self.gram), around.T),
            own=own,
            plain=False,
        )

    def rows(self, members: Array | None = None) -> tuple[list[Array], list[Array]]:
        """The points as a list, in any order, and which of them are `members` [n] (default: the usable ones)."""
        if members is None:
            members = self.usable
        num_shared = len(self.shared.raw)
        if self.plain:  # as received: no rounding from centring, and no copy
            stored = jnp.any((self.mixing[:-1] > 0) & members[:, None], axis=0)
            stored = lax.optimization_barrier(stored)
            return [*self.shared.raw, *self.private], [*stored[:num_shared], *stored[num_shared + 1 :]]
        return list(self._stored_sum(self.mixing[:-1])), list(members)
