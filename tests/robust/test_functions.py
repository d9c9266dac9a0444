"""Rules and attacks as plain functions."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import own_parts
import pytest

from byzpg.robust import NNM, AvgZero, Bucketing, Knowledge, Mean, Silent, TrimmedMean, aggregator, attack
from byzpg.robust.attacks import LargeNoise, NoAttack
from byzpg.robust.exchange import exchange

ROWS = np.random.default_rng(1).normal(size=(9, 5)).astype(np.float32)
KEY = jax.random.key(0)
PAIRS: list[tuple[Any, Any]] = [
    (own_parts.trimmed(), TrimmedMean()),
    (own_parts.masked(), Mean()),
    (NNM(own_parts.trimmed()), NNM(TrimmedMean())),
    (Bucketing(own_parts.trimmed(), size=2), Bucketing(TrimmedMean(), size=2)),
]


@pytest.mark.parametrize(
    ("rule", "twin"),
    [*PAIRS[:2], *(pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS[2:])],
    ids=lambda rule: str(rule),
)
def test_a_function_gets_the_usable_rows_and_what_is_left_of_f(rule: Any, twin: Any) -> None:
    """Its twin is written for missing rows. Were they zeros, or f not reduced, the trimmed mean would differ."""
    present = np.ones(9, bool)
    for missing in ((), (4,), (0, 4)):
        present[list(missing)] = False
        options: Any = {"num_byzantine": 2, "present": present, "key": KEY}
        np.testing.assert_allclose(rule(ROWS, **options), twin(ROWS, **options), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attack", [AvgZero(), Silent(), LargeNoise()], ids=str)
def test_the_same_in_an_exchange_where_receivers_hold_different_rows(attack: Any) -> None:
    options: Any = {"byzantine": [1, 5], "attack": attack, "num_byzantine": 2, "key": KEY}
    found, _ = exchange(own_parts.trimmed(), ROWS, **options)
    expected, _ = exchange(TrimmedMean(), ROWS, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_rows_come_in_the_order_of_their_senders() -> None:
    """Inside an exchange, the rows of honest agents are stored before the others."""
    found, _ = exchange(own_parts.second(), ROWS, byzantine=[0, 3], attack=NoAttack(), num_byzantine=2)
    np.testing.assert_array_equal(found, np.tile(ROWS[1], (9, 1)))


def test_its_options_are_those_of_the_function() -> None:
    rule = own_parts.trimmed(extra=1)
    assert (repr(rule), str(rule)) == ("trimmed(extra=1)", "own_parts:trimmed(extra=1)")
    assert rule.__doc__ == "The trimmed mean."
    np.testing.assert_allclose(rule(ROWS, num_byzantine=1), TrimmedMean()(ROWS, num_byzantine=2), rtol=1e-5)
    assert (own_parts.shaken().needs_key, rule.needs_key) == (True, False)
    np.testing.assert_array_equal(own_parts.shaken()(ROWS, num_byzantine=0, key=KEY), ROWS[0] + 1)
    with pytest.raises(ValueError, match=r"own_parts:shaken\(\) needs f ≤ max_byzantine\(K\); 3 of 9 .* ≤ 2"):
        own_parts.shaken()(ROWS, num_byzantine=3, key=KEY)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (own_parts.wrong_shape(), r"what the function returns must be floats \[7\] here, got float32 \[\]"),
        (own_parts.wrong_type(), r"must be floats \[7\] here, got int32 \[7\]"),
        (own_parts.not_a_number(), r"must return finite numbers; got \[nan.* for 9 finite rows of 9"),
        (own_parts.undefined_with_few(), "must return finite numbers; .* for 4 finite rows of 5"),
        (own_parts.branches(), r"cannot be compiled by JAX.*jnp\.where"),
        (own_parts.in_numpy(), "cannot be compiled by JAX.*jax.numpy in place of NumPy"),
        (own_parts.failing(), r"the function failed on a sample \(TypeError: "),
        (own_parts.nothing(), r"must be a JAX array \[7\], got NoneType"),
        (own_parts.Wide(), r"coefficients, the origin's last, must be floats \[10\] here, got float32 \[9\]"),
    ],
    ids=lambda case: type(case).__name__,
)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in NNM"])
def test_a_wrong_function_is_one_error_that_names_it(rule: Any, message: str, inside: bool) -> None:
    num_agents, f = (5, 1) if "of 5" in message else (9, 2)
    with pytest.raises(ValueError, match=rf"^{type(rule).__module__}:{type(rule).__name__}\(\): .*{message}") as caught:
        (NNM(rule) if inside else rule).check(num_agents, f)
    assert "\n" not in str(caught.value)


def test_parameters_are_checked_when_the_function_is_decorated() -> None:
    bad: Any
    for bad in (lambda received, num_byzantine: received[0], own_parts.NoSet()):
        with pytest.raises(TypeError, match="a function with a name"):
            aggregator(bad)

    def other_names(rows, f) -> Any: ...

    def any_names(received, num_byzantine, **more) -> Any: ...

    for bad in (other_names, any_names):
        with pytest.raises(TypeError, match=f"{bad.__name__} must have the parameters received, num_byzantine"):
            aggregator(bad)

    def checked(received, num_byzantine, check: float = 1.0) -> Any: ...

    with pytest.raises(TypeError, match="checked: the option check needs another name"):
        aggregator(checked)
    with pytest.raises(TypeError, match="must have the parameters honest, may have own,"):
        attack(other_names)


def test_attacks() -> None:
    knowledge = Knowledge(jnp.asarray(ROWS), jnp.array([1, 5]), jnp.asarray(0), KEY, num_byzantine=2)
    honest = np.delete(ROWS, [1, 5], axis=0)
    sent = own_parts.reversed_mean(scale=2.0).gradients(knowledge, jnp.arange(3))
    np.testing.assert_allclose(sent, np.tile(-2 * honest.mean(axis=0), (1, 2, 1)), rtol=1e-5)
    own = own_parts.own_reversed(target="both")
    np.testing.assert_array_equal(own.parameters(knowledge, jnp.arange(3)), -ROWS[None, [1, 5]])
    np.testing.assert_array_equal(
        replace(own, target="gradients").parameters(knowledge, jnp.arange(3))[0], ROWS[[1, 5]]
    )
    for wrong, message in (
        (own_parts.wrong_message(), r"must be floats \[7\] or \[2, 7\] here, got float32 \[2\]"),
        (
            own_parts.Short(),
            r"messages of gradients .* must be floats \[1, 2, 7\] or \[2, 2, 7\] here, got float32 \[7\]",
        ),
    ):
        with pytest.raises(ValueError, match=rf"^own_parts:.*{message}"):
            wrong.check(9, 2, 2, Mean())
