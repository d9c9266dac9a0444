"""Rules on pytrees do what they do on vectors, also as optax's aggregators; mistakes have clear errors."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from optax.experimental import aggregating

from byzpg.robust import NNM, RFA, Bucketing, Mean, Remember, TrimmedMean, aggregate, optax_aggregator

K, F = 7, 2
RNG = np.random.default_rng(5)
STACKED: dict[str, Any] = {
    "layers": [(RNG.normal(size=(K, 3, 2)).astype(np.float32), RNG.normal(size=(K, 2)).astype(np.float32))],
    "scale": RNG.normal(size=K).astype(np.float32),
}
STACKED["scale"][-F:] = 100  # of attackers


def of_worker(number: int, stacked: Any = STACKED) -> Any:
    return jax.tree.map(lambda leaf: leaf[number], stacked)


LIST = [of_worker(number) for number in range(K)]


@pytest.mark.parametrize("rule", [RFA(), NNM(TrimmedMean())], ids=str)
def test_a_list_and_a_stacked_tree_are_aggregated_as_whole_vectors(rule: Any) -> None:
    rows = jnp.stack([ravel_pytree(each)[0] for each in LIST])
    expected = rule(rows, num_byzantine=F)
    assert np.abs(expected).max() < 10 < np.abs(Mean()(rows, num_byzantine=F)).max()
    for given in (LIST, STACKED):
        found = aggregate(RFA if rule == RFA() else rule, given, num_byzantine=F)  # RFA is short for RFA()
        assert jax.tree.structure(found) == jax.tree.structure(LIST[0])
        assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, LIST[0])
        np.testing.assert_array_equal(ravel_pytree(found)[0], expected)


def test_missing_gradients_count_as_byzantine_and_too_few_are_an_error_or_nan() -> None:
    present = np.arange(K) != 0
    rows = jnp.stack([ravel_pytree(each)[0] for each in LIST])
    found = aggregate(RFA(), STACKED, num_byzantine=F, present=present)
    np.testing.assert_array_equal(ravel_pytree(found)[0], RFA()(rows, num_byzantine=F, present=present))
    spoilt = jax.tree.map(
        lambda leaf: np.where(np.arange(K).reshape(K, *[1] * (leaf.ndim - 1)) < 3, np.nan, leaf), STACKED
    )
    with pytest.raises(ValueError, match="only 4 of 7 vectors are present and finite"):
        aggregate(RFA(), spoilt, num_byzantine=F)
    inside = jax.jit(lambda tree: aggregate(RFA(), tree, num_byzantine=F))(spoilt)
    assert all(np.all(np.isnan(leaf)) for leaf in jax.tree.leaves(inside))


def test_types_stay_and_half_precision_is_aggregated_in_full() -> None:
    half = {"a": jnp.asarray([[256.0], [1], [1]], jnp.bfloat16), "b": jnp.ones((3, 2))}
    found = aggregate(Mean(), half, num_byzantine=0)
    assert (found["a"].dtype, found["b"].dtype) == (jnp.bfloat16, jnp.float32)
    assert float(found["a"][0]) == 86  # in bfloat16, 256 + 1 is 256


def test_gradients_flow_through_a_rule_without_loops_and_tangents_through_all() -> None:
    rows = jnp.asarray([[0.0, 1], [1, 2], [2, 9], [7, 3], [3, 4]])
    slope = jax.grad(lambda rows: aggregate(TrimmedMean(), {"a": rows}, num_byzantine=1)["a"].sum())(rows)
    np.testing.assert_allclose(slope, [[0, 0], [1 / 3, 1 / 3], [1 / 3, 0], [0, 1 / 3], [1 / 3, 1 / 3]], atol=1e-6)

    def of_shift(shift: Any) -> Any:
        return aggregate(RFA(), rows + shift, num_byzantine=1)

    np.testing.assert_allclose(jax.jvp(of_shift, (0.0,), (1.0,))[1], [1, 1], rtol=1e-3)


# optax


def test_updates_of_optax_that_are_a_list_are_layers_and_not_workers() -> None:
    layers = [jnp.full((4, 2), number).at[3].set(-99.0) for number in (1.0, 2.0, 3.0)]
    optimizer = optax_aggregator(TrimmedMean(), num_byzantine=1)
    found, _ = optimizer.update(layers, optimizer.init(None))
    np.testing.assert_allclose(found, [[1, 1], [2, 2], [3, 3]])


def test_a_rule_is_an_aggregator_of_optax_in_a_compiled_loop() -> None:
    target = jnp.asarray([1.0, -2.0])
    shifts = 0.1 * jax.random.normal(jax.random.key(0), (K, 2))

    def end(aggregator: Any) -> Any:
        assert isinstance(aggregator, aggregating.Aggregator)
        optimizer = aggregating.process(optax.identity(), aggregator, optax.sgd(0.2))

        def step(carry: Any, _: None) -> Any:
            parameters, state = carry
            honest = {"w": parameters["w"] - target - shifts}
            gradients = jax.tree.map(lambda leaf: leaf.at[-F:].set(-50.0), honest)
            updates, state = optimizer.update(gradients, state, parameters)
            return (optax.apply_updates(parameters, updates), state), None

        start = {"w": jnp.zeros(2)}
        return jax.lax.scan(step, (start, optimizer.init(start)), length=30)[0][0]["w"]

    np.testing.assert_allclose(end(optax_aggregator(NNM(TrimmedMean()), num_byzantine=F)), target, atol=0.2)
    assert np.abs(end(optax_aggregator(Mean(), num_byzantine=F)) - target).max() > 5


def test_a_randomised_rule_draws_anew_in_every_update_by_its_seed() -> None:
    rows = jnp.asarray(RNG.normal(size=(K, 3)), jnp.float32)

    def first_two(seed: int) -> Any:
        aggregator = optax_aggregator(Bucketing(RFA(), size=2), num_byzantine=1, seed=seed)
        one, state = aggregator.update(rows, aggregator.init(rows[0]))
        return np.stack([one, aggregator.update(rows, state)[0]])

    one, same, other = first_two(0), first_two(0), first_two(1)
    np.testing.assert_array_equal(one, same)
    assert len(np.unique(np.concatenate([one, other]), axis=0)) == 4


# Errors


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "gradients must be a list of one pytree per worker, got an empty list."),
        ({}, "gradients hold no array."),
        ({"a": np.ones((3, 2), int)}, "gradients must be arrays of floats, got int64 at ['a']."),
        ({"a": 1.0}, "gradients must be arrays of floats, got float at ['a']."),
        (np.float32(1), "stacked gradients must lead with an axis of workers [K, ...], got a number."),
        (
            {"a": np.ones((3, 2), "f"), "b": np.ones(4, "f")},
            "must all lead with the same number of workers, got 3 at ['a'], 4 at ['b'].",
        ),
        ([{"a": np.ones(2, "f")}, {"b": np.ones(2, "f")}], "must have one structure: that of worker 1 is"),
        ([{"a": np.ones(2, "f")}, {"a": np.ones(3, "f")}], "worker 1 has [3], worker 0 [2] at ['a']."),
        ({"a": np.ones((2, 2), "f")}, "RFA() needs f < K/2; 1 of 2 agents breaks that"),
    ],
)
def test_bad_gradients_are_refused(given: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        aggregate(RFA(), given, num_byzantine=1)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="the rule must be one of"):
        aggregate("RFA", STACKED, num_byzantine=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="num_byzantine must be a Python int"):
        optax_aggregator(RFA(), num_byzantine=1.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=re.escape("no memories of workers, which Remember(RFA()) needs")):
        optax_aggregator(Remember(RFA()), num_byzantine=1)
