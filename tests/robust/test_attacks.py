"""Every attack: one table of contracts, golden values from naive twins or by hand, and what each attack claims."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import twins
from tiers import slow_except

from byzpg._registry import parse
from byzpg.robust import aggregators, attacks
from byzpg.robust.attacks import Attack, FixedSet, Knowledge, RotatingSet
from byzpg.testing import check_attack

K, D = 13, 6
ATTACKERS = (1, 4, 8)
HONEST = tuple(k for k in range(K) if k not in ATTACKERS)
ALL_AGENTS = jnp.arange(K)
PHASES = ("gradients", "parameters")


class Row(NamedTuple):
    """One line of the table: an attack as constructed without options, and what it should be."""

    attack: Attack
    target: str | None = "gradients"  # None: its messages are honest
    equivocates: bool = False
    draws: bool = False  # its messages depend on the key


TABLE = (
    Row(attacks.NoAttack(), None),
    *(Row(make(), None) for make in (attacks.RandomAction, attacks.RewardFlip, attacks.RandomReward)),
    *(Row(make()) for make in (attacks.AvgZero, attacks.SignFlip, attacks.Zero, attacks.Mimic, attacks.IPM)),
    *(Row(make()) for make in (attacks.ALIE, attacks.OptimalALIE, attacks.OptimalIPM, attacks.MinMax, attacks.MinSum)),
    Row(attacks.Normalized()),
    *(Row(make(), "both") for make in (attacks.NonFinite, attacks.Silent)),
    Row(attacks.LargeNoise(), "both", equivocates=True, draws=True),
    Row(attacks.Equivocate(), "both", equivocates=True),
    Row(attacks.Dissensus(), "parameters", equivocates=True),
    Row(attacks.MDAFooling(), "both", equivocates=True),
)


def name_of(row: Row) -> str:
    return type(row.attack).__name__


table = pytest.mark.parametrize("row", TABLE, ids=name_of)


def known(seed=0, rule=None, dimension=D, key=0) -> Knowledge:
    vectors = np.random.default_rng(seed).normal(0.5, 1, (K, dimension)).astype(np.float32)
    rule = aggregators.Mean() if rule is None else rule
    return Knowledge(
        vectors=jnp.asarray(vectors),
        byzantine=jnp.asarray(ATTACKERS),
        iteration=jnp.asarray(0),
        key=jax.random.key(key),
        rule=rule,
        num_byzantine=len(ATTACKERS),
    )


def honest_rows(knowledge: Knowledge) -> np.ndarray:
    return np.delete(np.asarray(knowledge.vectors, np.float64), np.asarray(knowledge.byzantine), axis=0)


def sent(attack: Attack, knowledge: Knowledge) -> np.ndarray:
    return np.asarray(any_hook(attack)(knowledge, ALL_AGENTS))


def any_hook(attack: Attack) -> Callable[[Knowledge, jax.Array], jax.Array]:
    """The hook that the attack changes."""
    return attack.gradients if getattr(attack, "target", None) == "gradients" else attack.parameters


def close(left, right, tolerance=1e-5):
    np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def test_the_table_is_complete():
    public = {item for name, item in vars(attacks).items() if inspect.isclass(item) and not name.startswith("_")}
    assert {item for item in public if issubclass(item, Attack)} == {
        Attack,
        attacks.MessageAttack,
        *(type(row.attack) for row in TABLE),
    }


# What these send is also compared with twins below, or with what they claim, and their programs are the largest.
WITH_A_TWIN = (
    attacks.AvgZero,
    attacks.Dissensus,
    attacks.Equivocate,
    attacks.LargeNoise,
    attacks.MDAFooling,
    attacks.Mimic,
    attacks.MinMax,
    attacks.MinSum,
    attacks.Normalized,
    attacks.OptimalALIE,
    attacks.OptimalIPM,
)


@pytest.mark.parametrize(
    "row", slow_except([row for row in TABLE if not isinstance(row.attack, WITH_A_TWIN)], TABLE), ids=name_of
)
def test_contract(row):
    """`byzpg.testing` checks users' attacks in the same way."""
    report = check_attack(row.attack, num_agents=K, num_attackers=len(ATTACKERS))
    assert getattr(row.attack, "target", None) == row.target
    assert row.attack.needs_key == row.draws
    for phase in PHASES:
        assert report.has(f"false {phase}") == (row.target in (phase, "both"))
    assert report.has("equivocation") == row.equivocates
    # It draws where it says so.
    draws = not np.array_equal(sent(row.attack, known()), sent(row.attack, known(key=1)), equal_nan=True)
    assert draws == row.draws


@table
def test_target_says_which_messages_are_false(row):
    knowledge, receivers = known(), jnp.asarray([0, K - 1])
    truth, false_messages = np.asarray(knowledge.vectors)[None, ATTACKERS], object()
    assert np.allclose(sent(row.attack, knowledge), truth) == (row.target is None)
    if row.target is None:
        for phase in PHASES:
            np.testing.assert_array_equal(row.attack.messages(phase, knowledge, receivers), truth)
        return
    for target, phase in product((*PHASES, "both"), PHASES):
        with mock.patch.object(type(row.attack), "false_messages", return_value=false_messages) as asked:
            message = replace(row.attack, target=target).messages(phase, knowledge, receivers)
        if target in (phase, "both"):
            assert message is false_messages
            asked.assert_called_once_with(knowledge, receivers)
        else:
            np.testing.assert_array_equal(message, truth)


@table
def test_unknown_options(row):
    wrong_target = TypeError if row.target is None else ValueError  # an option it does not have
    for error, bad in ((wrong_target, {"target": "rewards"}), (TypeError, {"strength": 3})):
        with pytest.raises(error, match=r"target must be one of|unexpected keyword"):
            type(row.attack)(**bad)


@pytest.mark.parametrize(
    "make",
    [
        lambda: replace(attacks.MinMax(), direction="up"),
        lambda: attacks.LargeNoise(scale=0),
        lambda: attacks.OptimalIPM(candidates=0),
        lambda: attacks.Normalized("up"),  # type: ignore[arg-type]
        lambda: attacks.Normalized(largest=-1.0),
        lambda: attacks.Mimic(agent=len(HONEST)).false_messages(known(), ALL_AGENTS),
        lambda: attacks.OptimalALIE().false_messages(replace(known(), rule=None), ALL_AGENTS),
    ],
)
def test_bad_options(make):
    with pytest.raises(ValueError, match=r"must be|needs a rule"):
        make()


def test_poisoned_play():
    action, uniform, reward, key = jnp.asarray(1), jnp.asarray(3), jnp.arange(3.0), jax.random.key(0)
    assert attacks.RandomAction().act(action, uniform) == 3
    np.testing.assert_array_equal(attacks.RewardFlip().record(reward, key), -reward)
    noise = np.asarray(attacks.RandomReward(scale=2.0).record(jnp.full(20_000, 7.0), key))
    assert_uniform(noise, 2.0)
    assert not np.array_equal(noise, attacks.RandomReward(scale=2.0).record(jnp.full(20_000, 7.0), jax.random.key(1)))


def assert_uniform(sample: np.ndarray, scale: float):
    """Mean and variance of U(−a, a) within five standard errors: var x = a²/3, var x² = 4a⁴/45."""
    n = sample.size
    assert np.abs(sample).max() <= scale
    assert abs(sample.mean(dtype=np.float64)) < 5 * scale / np.sqrt(3 * n)
    assert abs(np.mean(np.square(sample, dtype=np.float64)) - scale**2 / 3) < 5 * scale**2 * np.sqrt(4 / 45 / n)


# Golden values

GOLDEN = (
    (attacks.AvgZero(), twins.attack_avg_zero),
    *((attacks.IPM(epsilon=e), lambda h, f, e=e: twins.attack_ipm(h, f, e)) for e in (0.5, 2.0)),
    *((attacks.ALIE(z=z), lambda h, f, z=z: twins.attack_alie(h, f, z)) for z in (None, 1.5)),
    *((attacks.MinMax(direction=p), lambda h, f, p=p: twins.attack_min_max(h, f, p)) for p in ("unit", "std", "sign")),
    *((attacks.MinSum(direction=p), lambda h, f, p=p: twins.attack_min_sum(h, f, p)) for p in ("unit", "std", "sign")),
    *(
        (attacks.Normalized(p, candidates=5), lambda h, f, p=p: twins.attack_normalized(h, f, twins.mean, p, 10.0, 5))
        for p in ("unit", "std", "sign")
    ),
    (attacks.Mimic(agent=2), lambda honest, f: honest[2]),
    (attacks.Mimic(), lambda honest, f: honest[np.argmax(np.abs(np.linalg.svd(honest - honest.mean(0))[0][:, 0]))]),
)


@pytest.mark.parametrize(("attack", "twin"), GOLDEN, ids=lambda item: str(item) if isinstance(item, Attack) else "")
def test_golden(attack, twin):
    for knowledge in (known(1), known(2)):
        close(sent(attack, knowledge)[0], np.tile(twin(honest_rows(knowledge), len(ATTACKERS)), (len(ATTACKERS), 1)))


def test_alie_factor():
    for num_agents, f in ((5, 1), (13, 3), (20, 4), (25, 11), (50, 24)):
        assert attacks.alie_factor(num_agents, f) == pytest.approx(twins.alie_z(num_agents, f))


def test_golden_by_hand():
    knowledge = known()
    truth = np.asarray(knowledge.truth())[0]
    np.testing.assert_array_equal(sent(attacks.SignFlip(scale=3.0), knowledge), -3 * truth[None])
    np.testing.assert_array_equal(sent(attacks.Zero(), knowledge), 0 * truth[None])
    poisoned = truth.copy()
    poisoned[:, 0] = [np.nan, np.inf, -np.inf]
    np.testing.assert_array_equal(sent(attacks.NonFinite(), knowledge), poisoned[None])
    assert np.isnan(sent(attacks.Silent(), knowledge)).all()
    halves = sent(attacks.Equivocate(scale=2.0), knowledge)
    np.testing.assert_array_equal(halves[:7], np.tile(truth, (7, 1, 1)))  # 13 receivers: 7 and 6
    np.testing.assert_array_equal(halves[7:], np.tile(-2 * truth, (6, 1, 1)))


def test_dissensus():
    knowledge = known()
    rows, honest = np.asarray(knowledge.vectors), honest_rows(knowledge)
    messages = sent(attacks.Dissensus(scale=0.7), knowledge)
    for receiver in range(K):
        close(messages[receiver], np.tile(twins.attack_dissensus(rows[receiver], honest, 3, 0.7), (3, 1)))
    # With scale 1, plain averaging leaves every honest receiver where it is.
    stuck = sent(attacks.Dissensus(), knowledge)
    for receiver in HONEST:
        close((honest.sum(axis=0) + stuck[receiver].sum(axis=0)) / K, rows[receiver])


# What attacks claim


def test_avg_zero_makes_the_plain_mean_zero():
    honest, messages = honest_rows(known()), sent(attacks.AvgZero(), known())[0]
    assert np.abs(honest.mean(axis=0)).max() > 0.1
    close((honest.sum(axis=0) + messages.sum(axis=0)) / K, np.zeros(D), 1e-6)


def test_large_noise_is_uniform_and_fresh_for_every_receiver():
    knowledge = known(dimension=2000)
    noise = sent(attacks.LargeNoise(), knowledge)
    assert_uniform(noise, 1000.0)
    streams = noise.reshape(K * len(ATTACKERS), -1) / np.linalg.norm(noise, axis=2).reshape(-1, 1)
    assert np.abs(np.triu(streams @ streams.T, 1)).max() < 6 / np.sqrt(2000)  # no two senders or receivers alike
    close(sent(attacks.LargeNoise(scale=1.0), knowledge), noise / 1000)


def test_mda_fooling_is_accepted_and_as_long_as_it_can_be():
    knowledge = known()
    honest, rows = honest_rows(knowledge), np.asarray(knowledge.vectors)
    inner = honest[twins.mda_subset(honest, len(ATTACKERS))]  # K − 2f of the K − f honest
    limit, middle = twins.diameter(inner), inner.mean(axis=0)
    messages = sent(attacks.MDAFooling(), knowledge)
    assert not np.allclose(messages[0], messages[-1])  # the two halves of the receivers get opposite ones
    for receiver in HONEST:
        assert np.ptp(messages[receiver], axis=0).max() == 0
        step = messages[receiver, 0] - middle
        assert np.linalg.norm(middle + step - inner, axis=1).max() <= limit * (1 + 1e-5)
        assert np.linalg.norm(middle + 1.05 * step - inner, axis=1).max() > limit
        received = rows.copy()
        received[list(ATTACKERS)] = messages[receiver]
        weights = aggregators.MDA().weights(jnp.asarray(received), num_byzantine=len(ATTACKERS))
        assert (np.asarray(weights)[list(ATTACKERS)] > 0).all()


@pytest.mark.parametrize(
    ("search", "rule"),
    [
        (attacks.OptimalALIE(candidates=6), aggregators.Krum()),
        (attacks.OptimalIPM(largest=4.0, candidates=6), aggregators.TrimmedMean()),
    ],
    ids=str,
)
def test_line_search_finds_the_worst_factor(search, rule):
    false_messages = jax.jit(search.false_messages)
    sizes = search.largest / 2.0 ** np.arange(search.candidates)
    factors = np.append(-sizes, sizes)
    inner_product = isinstance(search, attacks.OptimalIPM)
    plain = [attacks.IPM(epsilon=-1 - t) if inner_product else attacks.ALIE(z=-t) for t in factors]
    gains = []
    for knowledge in (known(seed, rule) for seed in range(3)):
        honest = honest_rows(knowledge)
        mean = honest.mean(axis=0)
        direction = mean if inner_product else honest.std(axis=0)

        def damage(messages, knowledge=knowledge, mean=mean):
            received = knowledge.vectors.at[knowledge.byzantine].set(messages)
            return np.sum((np.asarray(rule(received, num_byzantine=len(ATTACKERS))) - mean) ** 2)

        found = np.asarray(false_messages(knowledge, ALL_AGENTS))[0]
        factor = (found[0] - mean) @ direction / (direction @ direction)
        assert np.abs(factors / factor - 1).min() < 1e-3
        harm = [damage(sent(attack, knowledge)[0]) for attack in plain]
        np.testing.assert_allclose(harm, [damage(mean + t * direction) for t in factors], rtol=1e-3)
        assert damage(found) == pytest.approx(max(harm), rel=1e-3)
        gains.append(max(harm) / min(harm))
    assert max(gains) > 1.5  # there was something to search for


@pytest.mark.parametrize(
    ("rule", "twin"),
    [(aggregators.Krum(), twins.krum), (aggregators.TrimmedMean(), twins.trimmed_mean)],
    ids=["Krum", "TrimmedMean"],
)
def test_normalized_is_optimized_against_the_rule_in_use(rule, twin):
    false_messages = jax.jit(attacks.Normalized(candidates=8).false_messages)
    for seed in range(4):
        knowledge = known(seed, rule)
        expected = twins.attack_normalized(honest_rows(knowledge), len(ATTACKERS), twin, candidates=8)
        close(false_messages(knowledge, ALL_AGENTS)[0], np.tile(expected, (len(ATTACKERS), 1)), 1e-4)


@pytest.mark.parametrize(
    ("rule", "at_victim", "scale"),
    [
        (aggregators.MoNNA(), aggregators.MoNNA(pivot=2), 1.0),  # it starts from the receiver's own row
        (aggregators.Mean(), aggregators.Mean(), 1e17),  # receivers drop what the largest factors give
    ],
    ids=["own row", "too long"],
)
def test_a_search_sees_what_the_first_honest_agent_would_receive(rule, at_victim, scale):
    """Here, attackers come before the first honest agent."""
    attack = attacks.OptimalIPM(largest=1000.0, candidates=12)
    rows = scale * np.random.default_rng(3).normal(1, 1, (7, 5)).astype(np.float32)
    byzantine = jnp.array([0, 1])
    knowledge = attacks.Knowledge(jnp.asarray(rows), byzantine, jnp.array(0), jax.random.key(0), rule, num_byzantine=2)
    mean = rows[2:].mean(axis=0)

    def damage(factor: float) -> float:
        received = rows.copy()
        received[:2] = mean + factor * mean
        result = at_victim(jnp.asarray(received), num_byzantine=2)
        return float(np.sum(((np.asarray(result) - mean) / scale) ** 2))

    found = np.asarray(attack.false_messages(knowledge, jnp.arange(7)))[0, 0]
    sizes = 1000.0 / 2.0 ** np.arange(12)
    harm = {factor: damage(factor) for factor in np.append(-sizes, sizes).tolist()}
    chosen = min(harm, key=lambda factor: abs(factor - (found @ mean / (mean @ mean) - 1)))
    assert harm[chosen] == pytest.approx(max(harm.values()), rel=1e-3)
    assert sorted(harm.values())[len(harm) // 2] < 0.9 * max(harm.values())  # most factors do less harm


@pytest.mark.parametrize("rule", [aggregators.CAF(), aggregators.Median()], ids=str)
def test_a_search_on_a_gpu_tries_several_factors_at_once_and_finds_the_same(rule, monkeypatch):
    knowledge, attack = known(0, rule), attacks.Normalized(candidates=4)
    one_by_one = jax.jit(attack.false_messages)(knowledge, ALL_AGENTS)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    tried = 2 * knowledge.vectors.nbytes
    for at_once, groups in ((3, [2]), (100, [])):  # two groups of three and two more factors; all eight
        monkeypatch.setattr(attacks, "BYTES_TRIED_AT_ONCE", at_once * tried)
        traced = jax.make_jaxpr(lambda known: attack.false_messages(known, ALL_AGENTS))(knowledge)
        lengths = [each.params["length"] for each in traced.eqns if each.primitive.name == "scan"]
        assert lengths == groups
        close(jax.jit(lambda known: attack.false_messages(known, ALL_AGENTS))(knowledge), one_by_one, 1e-5)


def cosines(attack, rule, dimension=50) -> np.ndarray:
    """How well the result of the rule keeps the direction of the honest mean, in ten rounds.

    Half of the coordinates are negated: else the standard deviation would be parallel to the mean.
    """
    false_messages, found = jax.jit(attack.false_messages), []
    for knowledge in (known(seed, rule, dimension) for seed in range(10)):
        knowledge = replace(knowledge, vectors=knowledge.vectors * (-1.0) ** jnp.arange(dimension))
        received = knowledge.vectors.at[knowledge.byzantine].set(false_messages(knowledge, ALL_AGENTS)[0])
        result, mean = np.asarray(rule(received, num_byzantine=len(ATTACKERS))), np.asarray(knowledge.mean())
        found.append(result @ mean / np.linalg.norm(result) / np.linalg.norm(mean))
    return np.asarray(found)


def test_normalized_turns_the_mean_and_a_robust_rule_keeps_the_direction():
    mean, robust = aggregators.Mean(), aggregators.NNM(aggregators.TrimmedMean())
    turned = cosines(attacks.Normalized(), mean)
    assert (turned < cosines(attacks.OptimalALIE(), mean) - 0.1).all()  # which moves it furthest instead
    assert (turned < -0.3).all()
    assert (cosines(attacks.Normalized(), robust) > 0.8).all()


# Which agents attack


def test_fixed_set():
    key = jax.random.key(0)
    for iteration in (0, 7):
        np.testing.assert_array_equal(FixedSet()(K, 3, iteration, key), [10, 11, 12])
        np.testing.assert_array_equal(FixedSet((8, 1, 4))(K, 3, iteration, key), ATTACKERS)


@pytest.mark.parametrize("members", [(1, 4), (1, 4, 13), (-1, 4, 8), (1, 1, 4), (1, 1, 4, 8)])
def test_fixed_set_refuses_bad_members(members):
    with pytest.raises(ValueError, match="members must be 3 different"):
        FixedSet(members)(K, 3, 0, jax.random.key(0))


def test_rotating_set():
    key = jax.random.key(3)
    draw = jax.jit(lambda iteration: RotatingSet(period=5)(K, 3, iteration, key))
    drawn = np.asarray([draw(t) for t in range(200)])
    assert (np.diff(drawn, axis=1) > 0).all()  # distinct, in order
    np.testing.assert_array_equal(drawn[0::5], drawn[4::5])
    assert len(np.unique(drawn[::5], axis=0)) > 30  # of 40 periods
    assert set(drawn.ravel()) == set(range(K))
    np.testing.assert_array_equal(RotatingSet(period=5)(K, 3, 17, key), drawn[17])
    with pytest.raises(ValueError, match="period must be a positive whole number"):
        RotatingSet(period=0)


# The main option of every attack that has one, and a value of it that is not its default.
MAIN_OPTION = {
    attacks.RandomReward: ("scale", 2.5),
    attacks.SignFlip: ("scale", 2.5),
    attacks.IPM: ("epsilon", 0.7),
    attacks.ALIE: ("z", 1.5),
    attacks.OptimalALIE: ("largest", 4.0),
    attacks.OptimalIPM: ("largest", 4.0),
    attacks.Mimic: ("agent", 2),
    attacks.MinMax: ("direction", "std"),
    attacks.MinSum: ("direction", "sign"),
    attacks.Normalized: ("direction", "std"),
    attacks.LargeNoise: ("scale", 10.0),
    attacks.Equivocate: ("scale", 2.5),
    attacks.Dissensus: ("scale", 2.5),
    attacks.MDAFooling: ("node_limit", 1000),
}


@table
def test_the_first_argument_of_an_attack_is_its_main_option(row: Row) -> None:
    """As an object and as text, `IPM(0.7)` is IPM(epsilon=0.7). Which messages are false is given by keyword alone."""
    make: Any = type(row.attack)
    options = inspect.signature(make).parameters
    if make not in MAIN_OPTION:
        assert set(options) <= {"target"}
        return
    name, value = MAIN_OPTION[make]
    expected = make(**{name: value})
    assert expected != row.attack
    assert make(value) == expected
    texts = [f"{make.__name__}({value!r})", str(expected)]
    if "target" in options:
        assert options["target"].kind is inspect.Parameter.KEYWORD_ONLY
        expected = replace(expected, target="parameters")
        texts = [f"{make.__name__}({value!r}, target='parameters')", str(expected)]
    assert [parse("attack", text) for text in texts] == [expected, expected]
