"""The GPU kernels for long rows, interpreted: against naive twins, and inside whole rounds of messages."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import slow_except

from byzpg._registry import parse
from byzpg.robust import (
    NNM,
    RFA,
    Attack,
    AvgZero,
    Bulyan,
    Equivocate,
    Mean,
    Median,
    MessageAttack,
    NoAttack,
    SignFlip,
    TrimmedMean,
    exchange,
    geometry,
    kernels,
)
from byzpg.robust.agreement import TrimmedMeanAgreement
from byzpg.robust.attacks import Knowledge
from byzpg.robust.kernels import COLUMNS, FEWEST, SORTED_COLUMNS, SUMMED_COLUMNS, Points, Rows

KEY = jax.random.key(0)
LENGTHS = [1, SUMMED_COLUMNS, 3 * COLUMNS + 5]


def rows_of(num_first: int, num_more: int, dimension: int) -> tuple[Rows, np.ndarray]:
    """Rows in two arrays, some numbers of which are not finite, and the same as one array."""
    random = np.random.default_rng(0)
    vectors, more = random.normal(2, 1, (num_first + 2, dimension)), random.normal(2, 1, (num_more, dimension))
    order = random.permutation(num_first + 2)[:num_first]
    vectors[order[0], 0], more[:1, -1] = np.nan, np.inf
    rows = Rows(jnp.asarray(vectors, jnp.float32), jnp.asarray(order), jnp.asarray(more, jnp.float32))
    return rows, np.concatenate([vectors[order], more])


# Each has programs of its own, which run without a GPU step by step.
@pytest.mark.parametrize(
    ("num_first", "num_more", "dimension"),
    [
        sizes
        if sizes in ((FEWEST, 1, LENGTHS[1]), (26, 6, LENGTHS[2]))
        else pytest.param(*sizes, marks=pytest.mark.slow)
        for sizes in (
            (*number, length) for number in ((1, 0), (10, 3), (FEWEST, 0), (FEWEST, 1), (26, 6)) for length in LENGTHS
        )
    ],
)
def test_products_of_long_rows_are_those_of_their_naive_twins(num_first: int, num_more: int, dimension: int) -> None:
    rows, raw = rows_of(num_first, num_more, dimension)
    centre = jnp.linspace(1, 3, dimension)
    centred = np.where(np.isfinite(raw), raw - np.asarray(centre), 0)
    found = kernels.inner_products(rows, centre, interpret=True)
    np.testing.assert_allclose(found, centred @ centred.T, rtol=1e-4, atol=1e-3)
    found = kernels.inner_products(rows, centre, only_finite=False, interpret=True)
    sound: Any = np.isfinite(raw).all(axis=1)
    assert np.array_equal(np.isfinite(found), sound[:, None] & sound)
    for number in (1, 13, FEWEST + 1):
        random = np.random.default_rng(number)
        coefficients, share = random.normal(size=(number, len(raw))), random.normal(size=number)
        given = jnp.asarray(coefficients, jnp.float32), jnp.asarray(share, jnp.float32)
        found = kernels.combinations(*given, rows, centre, interpret=True)
        expected = coefficients @ centred + share[:, None] * np.asarray(centre)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(rows.joined, raw.astype(np.float32))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dimension", [SORTED_COLUMNS + 5])
def test_what_is_computed_in_each_coordinate_is_that_of_a_naive_twin(mixed: bool, dimension: int) -> None:
    rows, raw = rows_of(5, 2, dimension)
    rows = rows._replace(more=rows.more[1:], more_order=jnp.zeros(2, int))  # the last two rows are the same
    raw[-2] = raw[-1]
    random, centre = np.random.default_rng(0), jnp.linspace(1, 3, dimension)
    members = np.array([[True, True, False, True], [False, True, True, True], [True] * 4])
    scale = jnp.asarray([1.0, -2.0, 3.0])
    if mixed:
        mixing, share = random.normal(size=(3, 4, 7)), random.normal(size=(3, 4))
        mixing[0, :, 3] = mixing[1, 0, 3] = 0  # the first receiver never reads this row
        points = Points(jnp.asarray(members), jnp.zeros((3, 4), int), jnp.float32(mixing), jnp.float32(share))
        centred = np.where(np.isfinite(raw), raw - np.asarray(centre), 0)
        values = mixing @ centred + share[:, :, None] * np.asarray(centre)
    else:
        place = np.array([[0, 1, 2, 6], [4, 3, 5, 1], [1, 2, 3, 5]])
        points = Points(jnp.asarray(members), jnp.asarray(place))
        values = raw[place]
    expected = np.asarray(scale)[:, None] * np.min(np.where(members[:, :, None], values, np.inf), axis=1)

    def least(values: list[jax.Array], scale: jax.Array) -> jax.Array:
        return scale * jnp.minimum(jnp.minimum(values[0], values[1]), jnp.minimum(values[2], values[3]))

    def of_one(scale: jax.Array, points: Points, rows: Rows) -> jax.Array:
        around = centre if mixed else None
        return kernels.in_each_coordinate(least, (scale,), points, rows, around, interpret=True)

    compare = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    compare(jax.vmap(of_one, (0, 0, None))(scale, points, rows), expected)
    one = jax.tree.map(lambda leaf: leaf[1], (scale, points))
    compare(of_one(one[0], one[1], rows), expected[1])
    compare(jax.vmap(of_one, (0, None, None))(scale, one[1], rows), expected[1] / scale[1] * scale[:, None])
    # Receivers of several runs, whose rows differ.
    runs = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), rows)
    runs = runs._replace(more=runs.more.at[1].add(1))
    found = jax.vmap(jax.vmap(of_one, (0, 0, None)), (None, None, 0))(scale, points, runs)
    compare(found[0], expected)
    assert not np.allclose(found[1], found[0], equal_nan=True)
    at_server = jax.vmap(of_one, (None, None, 0))(one[0], one[1], runs)
    compare(at_server, found[:, 1])


class OneStandsOut(MessageAttack):
    """All attackers send the same, but the second: an attack of a user's own."""

    def false_messages(self, knowledge: Knowledge, receivers: jax.Array) -> jax.Array:
        return knowledge.same_for_all(knowledge.mean()).at[0, 1].multiply(100)


def test_attackers_of_a_users_own_each_have_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SHORTEST", 1)
    vectors, options = jnp.ones((5, 3)), {"byzantine": [3, 4], "num_byzantine": 2, "at_server": True}
    with jax.disable_jit():
        found, _ = exchange.exchange(Mean(), vectors, attack=OneStandsOut(), **options)
    np.testing.assert_allclose(found, (4 + 100) / 5, rtol=1e-6)


def test_long_rows_that_fit() -> None:
    def fits(num_rows: int, dimension: int, dtype: Any = jnp.float32) -> bool:
        vectors = jax.ShapeDtypeStruct((num_rows, dimension), dtype)
        return Rows(vectors, np.arange(num_rows), np.zeros((0, dimension))).fit_kernels  # pyright: ignore

    assert fits(13, kernels.SHORTEST)
    assert not fits(13, kernels.SHORTEST - 1)
    assert not fits(kernels.MOST + 1, kernels.SHORTEST)
    assert fits(16, 2**27 - 1)
    assert not fits(16, 2**27)
    assert not fits(13, kernels.SHORTEST, jnp.float16)


# Clipping with a small radius gives the origin a coefficient.
RULES = ["Mean", "RFA", "CenteredClipping(radius=0.1)", "ARC(RFA)", "MDA", "NNM(TrimmedMean)", "ARC(MeaMed)", "Median"]
RULES += ["TrimmedMean", "MeaMed", "Bulyan"]


@pytest.mark.parametrize("name", slow_except(["RFA", "NNM(TrimmedMean)", "MeaMed"], RULES))
@pytest.mark.parametrize(
    "attack",
    [AvgZero(), *(pytest.param(each, marks=pytest.mark.slow) for each in (SignFlip(), Equivocate()))],
    ids=str,
)
def test_a_round_of_messages_is_the_same_with_kernels(
    name: str, attack: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule: Any = parse("agreement" if name == "MDA" else "aggregator", name)
    vectors = 1e-3 * jax.random.normal(jax.random.key(0), (13, COLUMNS + 1)) + 5
    vectors = vectors.at[12].set(1e25)  # of an attacker
    if attack == SignFlip():  # AvgZero would pass it on
        vectors = vectors.at[3, 7].set(jnp.nan)  # of an honest agent
    options: dict[str, Any] = {"byzantine": [10, 11, 12], "attack": attack, "diagnose": True}
    options["num_byzantine"] = rule.max_byzantine(13) if name == "Bulyan" else 3
    plain, measured = exchange.exchange(rule, vectors, **options)

    calls, outside = [], set()

    def on_gpu(*arguments: Any, cuda: Any, default: Any) -> Any:
        if cuda is None:
            outside.add(default.__name__)
            return default(*arguments)
        calls.append(cuda)
        return cuda(*arguments)

    num_messages = set()

    def interpreted(rows: Rows, *given: Any, **options: Any) -> jax.Array:
        num_messages.add(len(rows.more))
        return inner_products(rows, *given, **options, interpret=True)

    inner_products = kernels.inner_products
    monkeypatch.setattr(kernels, "SHORTEST", 1)
    monkeypatch.setattr(exchange, "SHORTEST", 1)
    monkeypatch.setattr(kernels, "inner_products", interpreted)
    monkeypatch.setattr(exchange, "inner_products", interpreted)
    monkeypatch.setattr(kernels, "combinations", partial(kernels.combinations, interpret=True))
    in_each_coordinate = kernels.in_each_coordinate

    def interpreted_in_each(function: Any, *given: Any) -> Any:
        def apart(values: list[jax.Array], count: jax.Array, *numbers: jax.Array) -> jax.Array:
            """In a loop of its own. XLA would fuse a sorting network with loads, and compile it for minutes."""
            otherwise = jnp.zeros_like(values[0])
            return geometry.computed_if(count > 0, function, (values, count, *numbers), otherwise=otherwise)

        return in_each_coordinate(apart, *given, interpret=True)

    monkeypatch.setattr(kernels, "in_each_coordinate", interpreted_in_each)
    monkeypatch.setattr(geometry, "by_platform", on_gpu)
    monkeypatch.setattr(exchange, "by_platform", on_gpu)
    compiled: Any = exchange._exchange
    compiled.clear_cache()  # or the program above would run again
    found, also_measured = exchange.exchange(rule, vectors, **options)
    compiled.clear_cache()
    # What rules compute in each coordinate is not in kernels where each receiver has messages of its own.
    assert outside <= ({"in_rows"} if attack == Equivocate() else set())
    assert len(calls) >= 3
    # One message stands for those of all attackers; diagnostics multiply true vectors alone.
    assert num_messages <= ({0, 1} if attack == AvgZero() else {0, 3})
    np.testing.assert_allclose(found, plain, rtol=1e-6)
    assert np.isfinite(plain).any()
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-3, atol=1e-6), also_measured, measured)


def test_receivers_in_kernels_take_no_copies_unless_the_rule_makes_them() -> None:
    class Own(TrimmedMean):
        pass

    for rule in (Median(), NNM(TrimmedMean()), TrimmedMeanAgreement(), Bulyan()):
        assert rule.combines_in_place
    for rule in (Own(), NNM(Own()), NNM(RFA())):
        assert not rule.combines_in_place


def test_rounds_with_one_message_and_with_several_are_not_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SHORTEST", 1)
    vectors = jax.random.normal(KEY, (1, 7, 5))
    shared: Any = {"num_byzantine": 2, "phase": "gradients", "at_server": False, "vectors": vectors}
    shared |= {"byzantine": jnp.asarray([[5, 6]]), "iteration": jnp.zeros(1, int), "keys": jax.random.split(KEY, 1)}
    rounds = [exchange.Round.of(Median(), attack, **shared) for attack in (AvgZero(), NoAttack())]
    for each, (results, *_) in zip(rounds, exchange.exchange_all(rounds), strict=True):
        ((alone, *_),) = exchange.exchange_all([each])
        np.testing.assert_array_equal(results, alone)


def test_coordinates_on_several_devices_do_not_enter_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SHORTEST", 1)
    rows, raw = rows_of(10, 3, 5)
    around = partial(geometry.SharedRows.around, rows, jnp.ones(len(raw), bool), first=jnp.asarray(1), majority=9)
    assert around(num_common=10, on_one_device=True).in_kernels
    assert not around(num_common=10, on_one_device=False).in_kernels
