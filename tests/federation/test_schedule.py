"""The common coin: the same for everyone, in every version, and fair; and when seeds with their own coins go on."""

import hashlib
import struct

import jax.numpy as jnp
import numpy as np
import pytest

from byzpg.federation.schedule import CommonCoin, Paper, Schedule

START = np.array([0.5, -1.25, 3.0e-5, 0.0], np.float32)
COIN = CommonCoin.of(START)


def hmac_by_hand(key: bytes, message: bytes) -> bytes:
    """RFC 2104."""
    padded = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded) + message).digest()
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in padded) + inner).digest()


def test_the_protocol_never_changes() -> None:
    """Pinned: agents of different versions must toss the same coin."""
    assert COIN.key.hex() == "dd49d253052096fe1ec26328b1cab174a31ff6f65f8431f3cd8a13eedb8c5316"
    assert [COIN.uniform("large batch", t) for t in (1, 2)] == [0.9435418616728684, 0.27512189943419507]
    assert [t for t in range(40) if COIN.is_large(t, 0.2)] == [0, 3, 6, 16, 30, 33, 35, 36, 37, 39]
    assert [COIN.output_iteration(n) for n in (1, 10, 1000, 10**9)] == [0, 8, 528, 936019153]


def test_the_hashed_bytes_are_the_documented_ones() -> None:
    values = b"".join(struct.pack("<f", value) for value in START)
    key = hashlib.sha256(b"byzpg common coin 1" + struct.pack("<Q", 4) + values).digest()
    assert CommonCoin(key) == COIN
    digest = hmac_by_hand(key, b"any label" + struct.pack("<Q", 7))
    first_bits = int("".join(f"{byte:08b}" for byte in digest)[:53], 2)
    assert COIN.uniform("any label", 7) == first_bits / 2**53


def test_every_form_of_the_same_parameters_tosses_the_same_coin() -> None:
    strided = np.repeat(START, 2)[::2]
    for same in (
        START.copy(),
        jnp.asarray(START),
        START.astype("<f4"),
        START.astype(">f4"),
        START.astype(float),
        strided,
    ):
        assert CommonCoin.of(same) == COIN


@pytest.mark.parametrize("bit", range(0, 8 * START.nbytes, 5))
def test_one_flipped_bit_makes_another_coin(bit: int) -> None:
    flipped = bytearray(START.astype("<f4").tobytes())
    flipped[bit // 8] ^= 1 << bit % 8
    other = CommonCoin.of(np.frombuffer(bytes(flipped), "<f4"))
    assert other.key != COIN.key
    here, there = ([coin.uniform("large batch", t) < 0.5 for t in range(200)] for coin in (COIN, other))
    assert 60 < sum(a == b for a, b in zip(here, there, strict=True)) < 140


def test_parameters_of_another_length_make_another_coin() -> None:
    assert CommonCoin.of(np.append(START, np.float32(0))).key != COIN.key


def test_labels_and_indices_are_told_apart() -> None:
    draws = [COIN.uniform(label, index) for label in ("", "a", "b", "a\0") for index in (0, 1, 256, 2**40)]
    assert len(set(draws)) == len(draws)


@pytest.mark.parametrize("probability", [0.02, 0.2, 0.5, 0.9])
def test_large_batches_come_as_often_as_asked(probability: float) -> None:
    num_tosses = 20_000
    count = sum(COIN.is_large(t, probability) for t in range(1, num_tosses + 1))
    deviation = (num_tosses * probability * (1 - probability)) ** 0.5
    assert abs(count - num_tosses * probability) < 4 * deviation


def test_tosses_in_a_row_are_independent() -> None:
    large = np.array([COIN.is_large(t, 0.3) for t in range(1, 20_001)])
    for lag in (1, 2, 3):
        both = np.mean(large[lag:] & large[:-lag])
        assert abs(both - 0.3**2) < 4 * (0.09 * 0.91 / len(large)) ** 0.5


def test_the_first_iteration_is_always_large_and_certain_coins_are_certain() -> None:
    for seed in range(20):
        coin = CommonCoin.of(np.full(3, seed, np.float32))
        assert coin.is_large(0, 0.0)
        assert not any(coin.is_large(t, 0.0) for t in range(1, 200))
        assert all(coin.is_large(t, 1.0) for t in range(200))


def test_uniform_draws_fill_the_unit_interval() -> None:
    draws = np.sort([COIN.uniform("any label", i) for i in range(10_000)])
    assert draws[0] >= 0
    assert draws[-1] < 1
    # Kolmogorov–Smirnov at about 1e-6.
    assert np.max(np.abs(draws - (np.arange(len(draws)) + 0.5) / len(draws))) < 2.7 / len(draws) ** 0.5


def test_the_output_iteration_is_uniform() -> None:
    num_iterations, num_coins = 8, 8000
    chosen = [CommonCoin.of(np.array([seed], np.float32)).output_iteration(num_iterations) for seed in range(num_coins)]
    counts = np.bincount(chosen, minlength=num_iterations)
    assert len(counts) == num_iterations
    expected = num_coins / num_iterations
    assert np.sum((counts - expected) ** 2 / expected) < 40  # χ² with 7 degrees of freedom: 1e-6
    assert COIN.output_iteration(1) == 0


# Many seeds


def schedule(*, shared_coin: bool, switch_probability: float = 0.2) -> Schedule:
    return Schedule(
        seed=0,
        length=600,
        switch_probability=switch_probability,
        large_batch=20,
        small_batch=3,
        conventions=Paper(),
        shared_coin=shared_coin,
    )


STARTS = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)


def test_every_seed_follows_the_plan_of_its_own_coin() -> None:
    ours = schedule(shared_coin=False)
    timetable = ours.timetable(STARTS)
    assert not timetable.in_step
    for start, plan, takes_part in zip(STARTS, timetable.plans, timetable.takes_part, strict=True):
        alone = ours.plan(start)
        np.testing.assert_array_equal(timetable.large[takes_part], alone.large)
        np.testing.assert_array_equal(plan.progress, alone.progress)
        assert plan.output_iteration == alone.output_iteration
    assert np.all(np.any(timetable.takes_part, axis=0)), "no entry is for nobody"
    np.testing.assert_array_equal(timetable.takes_part[:, 0], True)
    lengths = [plan.num_iterations for plan in timetable.plans]
    np.testing.assert_array_equal(timetable.iterations(timetable.num_entries), lengths)
    np.testing.assert_array_equal(timetable.output_iterations, [plan.output_iteration for plan in timetable.plans])


def test_values_are_put_in_the_order_of_iterations() -> None:
    timetable = schedule(shared_coin=False).timetable(STARTS)
    for num_entries in (1, 17, timetable.num_entries):
        values = np.random.default_rng(0).normal(size=(10, num_entries)).astype(np.float32)
        found = timetable.by_iteration(values)
        assert found.dtype == np.float32
        for row, of_seed, takes_part in zip(found, values, timetable.takes_part, strict=True):
            kept = of_seed[takes_part[:num_entries]]
            np.testing.assert_array_equal(row[: len(kept)], kept)
            assert np.all(np.isnan(row[len(kept) :]))


def test_waiting_costs_less_than_computing_both_batches_in_every_iteration() -> None:
    ours = schedule(shared_coin=False)
    timetable = ours.timetable(STARTS)
    both = max(plan.num_iterations for plan in timetable.plans) * (20 + 3)
    longest = max(int(plan.progress[-1]) for plan in timetable.plans)
    computed = timetable.trajectories_computed(ours)
    assert longest <= computed < 0.7 * both
    # Nor does it wait for all seeds before every large batch: then each pause is as long as that of the slowest seed.
    pauses = [np.diff(np.flatnonzero(plan.large), append=plan.num_iterations) - 1 for plan in timetable.plans]
    slowest = [max(each[index] for each in pauses if index < len(each)) for index in range(max(map(len, pauses)))]
    assert computed < 20 * len(slowest) + 3 * sum(slowest)


def test_with_the_shared_coin_seeds_do_not_differ_in_their_batches() -> None:
    """The spread over seeds of the number of large batches: none with the shared coin."""
    counts = {
        shared: [int(np.sum(plan.large)) for plan in schedule(shared_coin=shared).timetable(STARTS).plans]
        for shared in (True, False)
    }
    assert np.var(counts[True]) == 0
    assert np.var(counts[False]) > 1
    shared = schedule(shared_coin=True).timetable(STARTS)
    assert shared.in_step
    np.testing.assert_array_equal(shared.large, schedule(shared_coin=True).plan(STARTS[0]).large)


def test_if_all_batches_are_large_seeds_differ_in_their_output_alone() -> None:
    ours = schedule(shared_coin=False, switch_probability=1.0)
    timetable = ours.timetable(STARTS)
    assert timetable.in_step
    assert np.all(timetable.large)
    assert timetable.num_entries == 600 // 20
    np.testing.assert_array_equal(timetable.output_iterations, [ours.plan(start).output_iteration for start in STARTS])
    assert len(set(timetable.output_iterations)) > 1
    np.testing.assert_array_equal(timetable.by_iteration(np.eye(10, 30)), np.eye(10, 30))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"one axis \[d\], got shape \(2, 2\)"):
        CommonCoin.of(START.reshape(2, 2))
    with pytest.raises(ValueError, match="32 bytes, got 3"):
        CommonCoin(b"abc")
    with pytest.raises(ValueError, match="num_iterations must be a positive whole number, got 0"):
        COIN.output_iteration(0)
