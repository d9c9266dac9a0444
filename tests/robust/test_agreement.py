"""Agreement rules: golden values, what is proven about one round, and that the proofs leave no slack.

A round leaves at most contraction(K, f) of the honest diameter, and moves the honest mean by at most drift(K, f) of it.
"It halves each round" is a common reading of these rules, and false at their bounds on f: see the worst case below.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import twins
from jax import lax

from byzpg.robust import aggregators, attacks
from byzpg.robust.agreement import GDA, MDA, NoAgreement, TrimmedMeanAgreement
from byzpg.robust.certificates import honest_clouds
from byzpg.robust.exchange import exchange
from byzpg.robust.geometry import Cloud

# At the bound on f, and the least number of rounds that surely halves the honest diameter.
AT_THE_BOUND = [
    pytest.param(MDA(), 13, 3, 7, id="MDA-13"),
    pytest.param(MDA(), 9, 2, 5, id="MDA-9"),
    pytest.param(GDA(), 11, 2, 6, id="GDA-11"),
    pytest.param(GDA(), 16, 3, 9, id="GDA-16"),
    pytest.param(TrimmedMeanAgreement(), 13, 3, 1, id="TrimmedMean-13"),
]
ATTACKS = (attacks.Dissensus(), attacks.MDAFooling(), attacks.LargeNoise(), attacks.Equivocate(target="both"))
# MDA of 13 looks at 286 subsets for every receiver: there, only the attack that is for agreement.
ATTACKED = [
    pytest.param(*case.values, number, id=f"{case.id}-{type(attack).__name__}")
    for case in AT_THE_BOUND
    for number, attack in enumerate(ATTACKS[:1] if case.id == "MDA-13" else ATTACKS)
]


def slow_if_large(cases):
    """For rules that have another case with fewer agents."""
    large = {"MDA-13", "GDA-16"}
    return [
        pytest.param(*case.values, id=case.id, marks=pytest.mark.slow if case.id[:6] in large else ()) for case in cases
    ]


def spread(rows, per_coordinate):
    """The diameter of rows [..., n, d], as [..., 1]; or the range in each coordinate, [..., d]."""
    rows = np.asarray(rows, np.float64)
    if per_coordinate:
        return np.ptp(rows, axis=-2)
    gaps = np.linalg.norm(rows[..., :, None, :] - rows[..., None, :, :], axis=-1)
    return gaps.max(axis=(-2, -1))[..., None]


def moved(before, after, per_coordinate):
    step = np.mean(after, axis=-2, dtype=np.float64) - np.mean(before, axis=-2, dtype=np.float64)
    return np.abs(step) if per_coordinate else np.linalg.norm(step, axis=-1, keepdims=True)


def check_one_round(rule, num_agents, f, before, after):
    """Honest rows [..., K − f, d] before and after a round keep within the rule's bounds, up to rounding."""
    rounding = 4e-6 * np.abs(before).max()
    size = spread(before, rule.per_coordinate)
    assert np.all(spread(after, rule.per_coordinate) <= rule.contraction(num_agents, f) * size + rounding)
    assert np.all(moved(before, after, rule.per_coordinate) <= rule.drift(num_agents, f) * size + rounding)


@pytest.mark.parametrize(
    ("rule", "twin", "num_agents", "f"),
    [
        (MDA(), twins.agree_mda, 13, 3),
        (GDA(), twins.agree_gda, 16, 3),
        (TrimmedMeanAgreement(), twins.agree_trimmed_mean, 13, 3),
        (NoAgreement(), twins.agree_none, 6, 3),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_golden_values(rule, twin, num_agents, f):
    rng = np.random.default_rng(0)
    for trial in range(12):
        received = (5 + rng.normal(size=(num_agents, 4))).astype(np.float32)
        order = rng.permutation(num_agents)
        present = ~np.isin(np.arange(num_agents), order[: trial % (f + 1)])  # up to f are missing
        if trial % 3 == 2:
            received[order[0]], present[order[0]] = np.nan, True  # or sent nonsense
        own = int(order[-1])
        result = rule(received, own=own, num_byzantine=f, present=present)
        np.testing.assert_allclose(result, twin(received, own, f, present), rtol=1e-5)


@pytest.mark.parametrize(
    ("rule", "limit", "halving"), [(MDA(), 1, 7), (GDA(), 1, 9), (TrimmedMeanAgreement(), 0.5, 4)], ids=str
)
def test_the_bounds_are_where_the_guarantees_end(rule, limit, halving):
    """Contraction stays below 1, by coordinate below ½; half in every round is certain from K ≥ halving × f on."""
    for num_agents in range(4, 120):
        f = rule.max_byzantine(num_agents)
        assert rule.contraction(num_agents, f) < limit <= rule.contraction(num_agents, f + 1)
        rule.check(num_agents, f)
        with pytest.raises(ValueError, match=rf"needs {rule.bound}; .* use num_byzantine ≤ {f}, or at least"):
            rule.check(num_agents, f + 1)
    assert rule.contraction(2 * halving, 2) <= 0.5 < rule.contraction(2 * halving - 1, 2)


# Under the attacks of the library, which equivocate


@dataclass(frozen=True)
class OneOf(attacks.MessageAttack):
    """The one of ATTACKS whose number is the iteration, so that all of them are one program."""

    target: attacks.Target = "both"
    needs_key: ClassVar[bool] = True

    def false_messages(self, knowledge, receivers):
        return lax.switch(knowledge.iteration, [attack.false_messages for attack in ATTACKS], knowledge, receivers)


@partial(jax.jit, static_argnames=("rule", "attack", "f", "rounds"))
def history(rule, attack, clouds, f, rounds, iteration=0):
    """Honest vectors [cloud, round, K − f, d], the first before any round. The last f agents attack."""
    num_honest = clouds.shape[1] - f

    def one(vectors, key):
        def step(vectors, number):
            agreed, _ = exchange(
                rule,
                vectors,
                byzantine=jnp.arange(num_honest, len(vectors)),
                attack=attack,
                num_byzantine=f,
                phase="parameters",
                iteration=iteration,
                key=jax.random.fold_in(key, number),
            )
            return agreed, agreed[:num_honest]

        _, after = lax.scan(step, vectors, jnp.arange(rounds))
        return jnp.concatenate([vectors[None, :num_honest], after])

    return jax.vmap(one)(clouds, jax.random.split(jax.random.key(1), len(clouds)))


@lru_cache
def clouds():
    """Vectors [72, 16, 8]: 32 clouds of four kinds, then 40 Gaussian ones."""
    mixed = np.asarray(honest_clouds(jax.random.key(0), 192, 16, 8))
    return np.concatenate([mixed[:32], mixed[32::4]])


@pytest.mark.parametrize(("rule", "num_agents", "f", "rounds", "attack"), slow_if_large(ATTACKED))
def test_attacked_agents_agree(rule, num_agents, f, rounds, attack):
    # After nine rounds MDA has agreed, after twelve the others have: more would show rounding errors only.
    how = ATTACKS[attack] if isinstance(rule, MDA) and num_agents == 13 else OneOf()  # no program for the others
    history_of = history(rule, how, clouds()[:, :num_agents], f, 9 if isinstance(rule, MDA) else 12, attack)
    vectors = np.asarray(history_of, np.float64)
    check_one_round(rule, num_agents, f, vectors[:, :-1], vectors[:, 1:])
    left = spread(vectors, rule.per_coordinate)
    left = left / left[:, :1]
    assert left[:, -1].max() < 1e-4
    # These attacks are not the worst ones: two rounds always halve, one does on nearly all Gaussian clouds.
    assert left[:, min(rounds, 2)].max() < 0.5
    assert np.mean(left[32:, 1] < 0.5) >= 0.95


def test_averaging_does_not_agree():
    """The negative control: Dissensus keeps plain averaging apart for ever."""
    vectors = history(aggregators.Mean(), attacks.Dissensus(), clouds()[:, :13], 3, 20)
    left = spread(vectors, False)
    assert np.all(left[:, -1] > 0.99 * left[:, 0])


def test_without_agreement_no_agent_moves():
    vectors = history(NoAgreement(), attacks.Equivocate(), clouds()[:, :6], 3, 2)
    np.testing.assert_allclose(vectors[:, 2], vectors[:, 0], rtol=1e-5, atol=1e-5)


# Under false messages written out for each receiver: received [receiver, sender, d], attackers first


@partial(jax.jit, static_argnames=("rule", "f"))
def one_round(rule, received, present, f):
    """One round at every honest receiver; where the rule does not tolerate f, past its check of that."""
    num_agents = received.shape[1]

    def one(rows, here, own):
        if f <= rule.max_byzantine(num_agents):
            return rule(rows, own=own, num_byzantine=f, present=here)
        return rule.combine(Cloud.received(rows, here, num_agents - f, own), f, None)

    return jax.vmap(one)(received, present, jnp.arange(f, num_agents))


def on_a_line(values):
    """Points [..., 2] with these first coordinates: in the plane, as all clouds here, so that programs are shared."""
    return np.stack([values, np.zeros_like(values)], axis=-1)


def with_false_rows(honest, false_rows):
    """What each honest agent receives, given the false messages [receiver, f, d] that are sent to it."""
    true_rows = np.broadcast_to(honest, (len(honest), *honest.shape))
    return np.concatenate([false_rows, true_rows], axis=1).astype(np.float32)


def random_false_rows(rng, honest, f):
    """Near the cloud: from a random honest row, or from the receiver's own outwards, along honest differences."""
    num_honest = len(honest)
    start = honest[rng.integers(num_honest, size=(num_honest, f))]
    step = start - honest[rng.integers(num_honest, size=(num_honest, f))]
    if rng.random() < 0.5:  # all attackers together, to keep each receiver where it is
        start = np.repeat(honest[:, None], f, axis=1)
        step = start - honest.mean(axis=0)
    return start + rng.uniform(-0.5, 2) * step + 0.01 * rng.normal(size=step.shape)


@pytest.mark.parametrize(("rule", "num_agents", "f", "rounds"), slow_if_large(AT_THE_BOUND))
def test_no_random_messages_break_the_bounds(rule, num_agents, f, rounds):
    rng = np.random.default_rng(num_agents)
    honest = rng.normal(size=(256, num_agents - f, 2))
    honest[::4, :, 1] = 0  # on a line
    honest[1::4] = 0.1 * honest[1::4] + rng.integers(0, 2, (64, num_agents - f, 1))  # two clusters
    honest[2::4] = 0.1 * honest[2::4] + rng.integers(-1, 2, (64, num_agents - f, 1))  # three
    received = np.stack([with_false_rows(rows, random_false_rows(rng, rows, f)) for rows in honest])
    present = np.ones(received.shape[:3], bool)
    present[:, :, :f] = rng.random((256, num_agents - f, f)) < 0.9
    after = np.stack([one_round(rule, *both, f) for both in zip(received, present, strict=True)])
    check_one_round(rule, num_agents, f, honest, after)
    if isinstance(rule, MDA):  # the search is strong enough to refute that every round halves
        assert np.max(spread(after, False) / spread(honest, False)) > 0.5


def worst_round(rule, honest, f, slack):
    """f agents on either side receive messages that pull them outwards, from as far away as the rule lets through. The
    agents in the middle receive nothing from the attackers and stay there.
    """
    reach = {MDA: 1.0, GDA: 1.5, TrimmedMeanAgreement: 10.0}[type(rule)] - slack
    side = np.repeat([1, 0, -1], [f, len(honest) - 2 * f, f])
    messages = on_a_line(reach * np.ptp(honest) * side)[:, None]
    received = with_false_rows(honest, np.repeat(messages, f, axis=1))
    present = np.ones(received.shape[:2], bool)
    present[side == 0, :f] = False
    return np.asarray(one_round(rule, received, present, f))


def three_camps(num_agents, f):
    return on_a_line(np.repeat([0.5, 0, -0.5], [f, num_agents - 3 * f, f]).astype(np.float32))


@pytest.mark.parametrize(("rule", "num_agents", "f", "rounds"), AT_THE_BOUND)
def test_the_worst_case_is_as_bad_as_proven_in_every_round(rule, num_agents, f, rounds):
    honest = three_camps(num_agents, f)
    contraction = rule.contraction(num_agents, f)
    for number in range(1, 21):
        before, honest = honest, worst_round(rule, honest, f, slack=1e-4)
        check_one_round(rule, num_agents, f, before, honest)
        np.testing.assert_allclose(np.ptp(honest), contraction**number, rtol=3e-4 * number)
        assert (np.ptp(honest) < 0.5) == (number >= rounds)


@pytest.mark.parametrize(("rule", "num_agents", "f", "rounds"), AT_THE_BOUND)
def test_so_many_rounds_are_enough_and_one_less_is_not(rule, num_agents, f, rounds):
    """On a line, there is one coordinate; the rule by coordinate must be sure of all, and takes more rounds."""
    assert rule.rounds_to_shrink(0.5, num_agents, f) == rounds + (2 if rule.per_coordinate else 0)
    share, honest = 0.1, three_camps(num_agents, f)
    enough = rule.rounds_to_shrink(share, num_agents, f)
    for number in range(1, enough + 1):
        honest = worst_round(rule, honest, f, slack=1e-4)
        assert np.ptp(honest) > share or number == enough or rule.per_coordinate
    assert np.ptp(honest) <= share


def test_the_number_of_rounds_follows_from_the_contraction():
    for rule, num_agents, f in ((MDA(), 13, 3), (MDA(), 16, 1), (GDA(), 16, 3), (TrimmedMeanAgreement(), 13, 3)):
        factor, stretch = rule.contraction(num_agents, f), np.sqrt(num_agents - f - 1) if rule.per_coordinate else 1
        for share in (0.3, 1e-3, 1e-9):
            rounds = rule.rounds_to_shrink(share, num_agents, f)
            assert factor**rounds * stretch <= share < factor ** (rounds - 1) * stretch
    assert MDA().rounds_to_shrink(4.0**-20, 13, 1) == 20  # 1/4 in each: no round for rounding
    for rule in (MDA(), GDA(), TrimmedMeanAgreement()):
        assert rule.rounds_to_shrink(1e-9, 13, 0) == 1


def test_no_number_of_rounds_is_enough_without_contraction():
    for rule, f, words in (
        (MDA(), 4, r"MDA\(\) has the contraction 1.33, not below 1, with 4 of 13"),
        (NoAgreement(), 0, "has the contraction 1, not below 1"),
    ):
        with pytest.raises(ValueError, match=words):
            rule.rounds_to_shrink(0.5, 13, f)
    with mock.patch.object(MDA, "contraction", return_value=None), pytest.raises(ValueError, match="is not known to"):
        MDA().rounds_to_shrink(0.5, 13, 1)


def test_ranges_by_coordinate_are_bounded_by_the_diameter():
    """‖ranges‖ ≤ √(n − 1) Δ for n rows, whatever d; one row per axis comes close to it: √n to √2."""
    rng = np.random.default_rng(5)
    for num_rows, dimension in ((2, 7), (10, 3), (10, 400)):
        rows = [rng.normal(size=(num_rows, dimension)), np.eye(num_rows, max(num_rows, dimension))]
        for each in rows:
            ranges, diameter = spread(each, True), spread(each, False)[0]
            assert np.linalg.norm(ranges) <= np.sqrt(num_rows - 1) * diameter * (1 + 1e-9)


@pytest.mark.parametrize(
    ("rule", "num_agents", "f"), [(MDA(), 4, 1), (GDA(), 5, 1), (TrimmedMeanAgreement(), 3, 1)], ids=str
)
def test_just_beyond_the_bound_agents_can_be_kept_apart_for_ever(rule, num_agents, f):
    """With GDA and K = 5, the honest agents are at ½, 0, 0, −½. The attacker sends 3/2 to the first one, which averages
    (½, 0, 0, 3/2) to ½. It sends −3/2 to the last agent and nothing to the two in the middle, so no agent ever moves.
    With MDA and K = 4, (½, 0, 1) has mean ½ and diameter 1.
    """
    with pytest.raises(ValueError, match=r"needs f < K/\d; 1 of"):
        rule.check(num_agents, f)
    honest = three_camps(num_agents, f)
    for _ in range(5):
        np.testing.assert_array_equal(worst_round(rule, honest, f, slack=0), honest)


@pytest.mark.parametrize(("rule", "num_agents", "f", "growth"), [(MDA(), 7, 2, 6 / 5), (GDA(), 9, 2, 8 / 7)], ids=str)
def test_further_beyond_the_bound_agents_can_be_driven_apart(rule, num_agents, f, growth):
    honest = three_camps(num_agents, f)
    for number in range(1, 6):
        honest = worst_round(rule, honest, f, slack=1e-4)
        np.testing.assert_allclose(np.ptp(honest), growth**number, rtol=1e-3)


def test_two_camps_that_are_told_to_stay():
    """Five honest agents are at 0 and five at 1. Three attackers send each receiver its own vector back."""
    honest = on_a_line(np.repeat([0.0, 1.0], 5))
    received = with_false_rows(honest, np.repeat(honest[:, None], 3, axis=1))
    after = np.asarray(one_round(MDA(), received, np.ones(received.shape[:2], bool), 3))
    np.testing.assert_allclose(after, on_a_line(np.repeat([0.2, 0.8], 5)), rtol=1e-5)
    assert 0.5 < np.ptp(after[:, 0]) <= MDA().contraction(13, 3)


@pytest.mark.parametrize(
    ("rule", "num_agents", "position", "share"),
    [(MDA(), 13, 1 - 1e-4, 1), (GDA(), 16, 1 - 1e-4, 10 / 13), (TrimmedMeanAgreement(), 13, 10.0, 1)],
    ids=str,
)
def test_receivers_can_drift_as_far_as_proven(rule, num_agents, position, share):
    """Three honest agents are at −1, the others at 0; no attacker equivocates. With GDA, those at −1 discard it."""
    honest = on_a_line(np.repeat([-1.0, 0.0], [3, num_agents - 6]))
    received = with_false_rows(honest, on_a_line(np.full((len(honest), 3), position)))
    after = np.asarray(one_round(rule, received, np.ones(received.shape[:2], bool), 3))
    np.testing.assert_allclose(moved(honest, after, False), share * rule.drift(num_agents, 3), rtol=1e-3)
