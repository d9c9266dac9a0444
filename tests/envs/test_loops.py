"""Loops in chunks and in kernels against plain Python, element by element."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import slow_except

from byzpg.envs.kernels import BLOCK, in_kernel
from byzpg.envs.loops import Loops, any_true, choose, computed_once

WAYS = {"chunks": Loops(in_kernel=False), "kernel": Loops(in_kernel=True)}


def run_by(way: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), in a kernel if the way is one."""
    if way == "kernel":
        return in_kernel(function, *arguments, interpret=True)
    return jax.jit(function)(*arguments)


def collatz(number: np.ndarray, most: int = 10**9) -> tuple[np.ndarray, np.ndarray]:
    """The naive twin: where each sequence is when it reaches 1 or after `most` turns, and the turns it took."""
    ends, turns = [], []
    for value in map(int, number.ravel()):
        count = 0
        while value > 1 and count < most:
            value = 3 * value + 1 if value & 1 else value // 2
            count += 1
        ends.append(value)
        turns.append(count)
    return np.array(ends).reshape(number.shape), np.array(turns).reshape(number.shape)


def one_round(constants: Any, state: Any, active: jax.Array) -> tuple[Any, jax.Array]:
    (tripled,), (value, turns) = constants, state
    following = jnp.where(value & 1 == 1, tripled * value + 1, value >> 1)
    value, turns = choose(active, (following, turns + 1), (value, turns))
    return (value, turns), active & (value > 1)


@pytest.mark.parametrize("way", [*WAYS, "leaving"])
@pytest.mark.parametrize("shape", slow_except([(7, 13), ()], [(1000,), (7, 13), (5,), ()]))
@pytest.mark.parametrize("most", [1000, 3])
def test_each_element_gets_as_many_rounds_as_it_needs(way: str, shape: tuple[int, ...], most: int) -> None:
    may_leave, usual = 20, 2
    loops = Loops(in_kernel=False, may_leave=may_leave) if way == "leaving" else WAYS[way]
    numbers = np.random.default_rng(0).integers(1, 2000, size=shape, dtype=np.int32)
    wanted = np.random.default_rng(1).random(shape) < 0.8

    def run(numbers: jax.Array, wanted: jax.Array) -> Any:
        constants, active = (jnp.full_like(numbers, 3),), wanted & (numbers > 1)
        return loops.iterate(one_round, constants, (numbers, numbers * 0), active, most=most, usual=usual)

    (ends, turns), left = run_by(way, run, jnp.asarray(numbers), jnp.asarray(wanted))
    expected_ends, expected_turns = collatz(np.asarray(numbers), most)
    assert np.sum(left) <= (may_leave if way == "leaving" else 0)
    assert np.all(np.asarray(turns)[np.asarray(left)] >= usual)
    np.testing.assert_array_equal(ends, np.where(left, ends, np.where(wanted, expected_ends, numbers)))
    np.testing.assert_array_equal(turns, np.where(left, turns, np.where(wanted, expected_turns, 0)))
    if way == "leaving" and shape == (1000,) and most == 1000:  # the longest sequences
        assert np.sum(left) > 0
        assert expected_turns[np.asarray(left)].min() >= np.max(turns)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("chunk", [16, 1])
def test_where_needed_changes_only_what_the_mask_says(way: str, share: float, chunk: int) -> None:
    rng = np.random.default_rng(2)
    values, mask = rng.normal(size=(3, 50)).astype(np.float32), rng.random((3, 50)) < share
    sizes = []

    def function(wanted: jax.Array, value: jax.Array, other: jax.Array) -> dict[str, jax.Array]:
        sizes.append(wanted.size)
        return {"sum": value + other, "wanted": wanted}

    def run(mask: jax.Array, values: jax.Array) -> Any:
        otherwise = {"sum": -values, "wanted": mask & False}
        return WAYS[way].where_needed(mask, function, (values, jnp.ones_like(values)), otherwise, chunk=chunk)

    result = run_by(way, run, jnp.asarray(mask), jnp.asarray(values))
    np.testing.assert_array_equal(result["sum"], np.where(mask, values + 1, -values))
    np.testing.assert_array_equal(result["wanted"], mask)
    assert set(sizes) == {chunk if way == "chunks" else BLOCK}


def test_a_kernel_takes_any_shape_and_booleans() -> None:
    def function(flag: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        def turn(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            value, run = carry
            return jnp.where(run, value * 2, value), run & (value < 50)

        value, _ = jax.lax.while_loop(lambda carry: any_true(carry[1]), turn, (value, flag))
        return value, ~flag

    flag, value = np.arange(45).reshape(5, 9) % 2 == 0, 1 + np.arange(45, dtype=np.float32).reshape(5, 9)
    results = [run_by(way, function, jnp.asarray(flag), jnp.asarray(value)) for way in WAYS]
    for one, other in zip(*results, strict=True):
        assert one.shape == (5, 9)
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(results[0][1], ~flag)


@pytest.mark.parametrize(("way", "shape"), [("chunks", (4,)), ("chunks", ()), ("kernel", (40,))])
def test_a_map_is_a_map(way: str, shape: tuple[int, ...]) -> None:
    items = [(jnp.full(shape, 2.0) + i, jnp.ones(shape) * i) for i in range(3)]

    def function(item: Any) -> dict[str, jax.Array]:
        return {"product": item[0] * item[1], "less": item[1] < 1}

    results = run_by(way, lambda *items: WAYS[way].map(function, items), *items)
    for item, result in zip(items, results, strict=True):
        np.testing.assert_array_equal(result["product"], item[0] * item[1])
        np.testing.assert_array_equal(result["less"], item[1] < 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_kernel_skips_what_no_element_of_a_block_needs(way: str) -> None:
    """A block that has one such element computes the function for all, so that it must leave the others unchanged."""
    mask = np.arange(3 * BLOCK) == 40

    def run(mask: jax.Array, values: jax.Array) -> Any:
        return WAYS[way].if_any(WAYS[way].any_of(mask), lambda value: (value + 1,), (values,))[0]

    result = run_by(way, run, jnp.asarray(mask), jnp.zeros(3 * BLOCK))
    np.testing.assert_array_equal(
        result, (np.arange(3 * BLOCK) // BLOCK == 1) if way == "kernel" else np.ones(3 * BLOCK)
    )


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit])
def test_computed_once_changes_no_value(transform: Callable[..., Any]) -> None:
    values = np.array([0.0, -0.0, 1.5, -3e38, 2e-38, np.inf, -np.inf, np.nan], np.float32)
    flags = np.array([True, False])
    result = transform(computed_once)((jnp.asarray(values), jnp.asarray(flags)))
    np.testing.assert_array_equal(result[0], values)
    np.testing.assert_array_equal(result[1], flags)
    assert result[1].dtype == bool


def test_elements_one_by_one_are_one_native_function() -> None:
    """If XLA ignored the mark, the loop would still be right, but a hundred times slower."""

    def function(needed: jax.Array, value: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda value: value < 100, lambda value: value * 2, value)

    def run(mask: jax.Array, values: jax.Array) -> jax.Array:
        return WAYS["chunks"].where_needed(mask, function, (values,), values, chunk=1)

    program = jax.jit(run).lower(jnp.ones(300, bool), jnp.ones(300)).compile()
    assert "xla_cpu_small_call" in str(program.as_text())
