"""Components by name: what is printed can be read back, what cannot be read is explained."""

import inspect
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
from jax import Array

from byzpg._registry import FAMILIES, members, parse, summary
from byzpg.config import Config
from byzpg.federation.devices import Hardware
from byzpg.learning.gradients import GPOMDP
from byzpg.robust import aggregators, agreement, attacks
from byzpg.robust.aggregators import (
    ARC,
    MDA,
    NNM,
    RFA,
    SMEA,
    Bucketing,
    CenteredClipping,
    Clipping,
    FedPGFilter,
    Krum,
    MoNNA,
    TrimmedMean,
)
from byzpg.robust.attacks import (
    ALIE,
    IPM,
    AvgZero,
    FixedSet,
    LargeNoise,
    MDAFooling,
    MinSum,
    NonFinite,
    Normalized,
    RotatingSet,
)
from byzpg.robust.components import SYNONYMS, Component, nearest, plain_name, with_numbers, without_numbers
from byzpg.robust.exchange import exchange

WITH_OPTIONS: dict[str, list[Component]] = {
    "aggregator": [
        Krum(neighbours="original"),
        NNM(ARC(Bucketing(RFA(smoothing=1e-07, start="zero"), size=2))),
        Clipping(TrimmedMean(), threshold=0.5),
        CenteredClipping(radius=10, iterations=7),
        MoNNA(pivot=3),
        MDA(node_limit=10),
        SMEA(subset_limit=10),
        FedPGFilter(radius=0.5),
        RFA(tolerance=float("inf")),
    ],
    "agreement": [agreement.MDA(node_limit=7)],
    "attack": [
        IPM(epsilon=-0.1),
        ALIE(z=1.5, target="both"),
        MinSum(direction="std"),
        LargeNoise(target="gradients", scale=1e30),
        MDAFooling(node_limit=9),
        Normalized(direction="std", largest=3.0, candidates=4),
        NonFinite(target="parameters"),
    ],
    "estimator": [GPOMDP(baseline="leave-one-out", trace_decay=0.995), GPOMDP(trace_decay=1.0)],
    "byzantine set": [FixedSet(members=(0, 3)), FixedSet(members=(5,)), FixedSet(members=()), RotatingSet(period=10)],
}


def smallest(component_class: type[Any]) -> Component:
    """A component with nothing but what it must have."""
    required = [p for p in inspect.signature(component_class).parameters.values() if p.default is p.empty]
    return component_class(*(RFA() for _ in required))


EVERY_CLASS = [(family, smallest(each)) for family in FAMILIES for each in members(family).values()]
EVERY_ROW = EVERY_CLASS + [(family, each) for family, rows in WITH_OPTIONS.items() for each in rows]


@pytest.mark.parametrize(("family", "component"), EVERY_ROW, ids=lambda value: str(value))
def test_what_is_printed_is_read_back(family: str, component: Component) -> None:
    read = parse(family, str(component))
    assert read == component
    assert type(read) is type(component)
    assert str(read) == str(component)


@pytest.mark.parametrize(("family", "component"), EVERY_ROW, ids=lambda value: str(value))
def test_numbers_are_put_back_where_they_were(family: str, component: Component) -> None:
    code, numbers = without_numbers(component)
    assert with_numbers(code, numbers) == component
    assert (code == component) == (not numbers)
    assert {code: 1}[without_numbers(component)[0]] == 1  # hashable, as static arguments must be


def test_numbers_of_components_inside_others_too() -> None:
    code, numbers = without_numbers(Clipping(CenteredClipping(radius=2.0), threshold=0.5))
    assert numbers == (2.0, 0.5)
    assert str(with_numbers(code, [3.0, 4.0])) == "Clipping(CenteredClipping(radius=3.0), threshold=4.0)"
    assert without_numbers(IPM(epsilon=0.0)) == (IPM(epsilon=0.0), ())  # 0 may decide something: it stays code
    assert without_numbers(IPM(epsilon=-1e-60)) == (IPM(epsilon=-1e-60), ())  # as data it would be 0


@dataclass(frozen=True)
class FlipIfLarge(attacks.SignFlip):
    """A subclass that decides by an option with which its base class only computes."""

    def false_messages(self, knowledge: attacks.Knowledge, receivers: Array) -> Array:
        return super().false_messages(knowledge, receivers) if self.scale > 2 else knowledge.truth()


def test_a_subclass_names_its_own_numbers() -> None:
    assert without_numbers(FlipIfLarge(scale=3.0)) == (FlipIfLarge(scale=3.0), ())
    for scale, expected in ((3.0, -6.0), (1.0, 2.0)):
        options: Any = {"byzantine": [1], "attack": FlipIfLarge(scale=scale), "num_byzantine": 1}
        results, _ = exchange(aggregators.Mean(), np.full((2, 1), 2, np.float32), **options)
        np.testing.assert_allclose(results[0], (2 + expected) / 2)


def test_families_hold_every_concrete_class_and_no_other() -> None:
    names = {family: set(members(family)) for family in FAMILIES}
    assert {"Mean", "RFA", "NNM", "Bucketing", "MDA"} <= names["aggregator"]
    assert names["agreement"] == {"MDA", "GDA", "TrimmedMeanAgreement", "NoAgreement"}
    assert {"NoAttack", "RandomAction", "AvgZero", "OptimalIPM", "MinSum"} <= names["attack"]
    assert names["byzantine set"] == {"FixedSet", "RotatingSet"}
    abstract = {
        "Aggregator",
        "WeightedAggregator",
        "WeightedAgreement",
        "PreAggregator",
        "Agreement",
        "Attack",
        "ByzantineSet",
        "MessageAttack",
        "_Directed",
        "_LineSearch",
    }
    assert not abstract & set.union(*names.values())
    assert members("aggregator")["MDA"] is aggregators.MDA
    assert members("agreement")["MDA"] is agreement.MDA
    modules = (aggregators, agreement, attacks)
    components = {
        item
        for module in modules
        for name, item in vars(module).items()
        if inspect.isclass(item) and issubclass(item, Component) and item.__module__ == module.__name__
        if name not in abstract
    }
    registered = {each for family in FAMILIES for each in members(family).values()}
    assert components == {each for each in registered if each.__module__ in {module.__name__ for module in modules}}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_two_names_of_a_family_are_alike_and_each_is_explained(family: str) -> None:
    assert len({plain_name(name) for name in members(family)}) == len(members(family))
    for each in members(family).values():
        line = summary(each)
        assert line.endswith((".", ":"))
        assert not line.startswith(f"{each.__name__}("), "the docstring is the one dataclass makes up"


def test_summary() -> None:
    assert summary(AvgZero).endswith("(Jordan et al. 2024).")
    assert summary(MDA).startswith("Minimum-diameter averaging")
    assert "\n" not in summary(MDA)


@pytest.mark.parametrize(
    ("family", "text", "component"),
    [
        ("aggregator", "RFA", RFA()),
        ("aggregator", " rfa() ", RFA()),
        ("aggregator", "nnm(rfa)", NNM(RFA())),
        ("aggregator", "NNM(rule=ARC(trimmed-mean))", NNM(ARC(TrimmedMean()))),
        ("aggregator", "Krum('original')", Krum(neighbours="original")),
        ("aggregator", "rfa(max-iterations=3, smoothing=1e-3)", RFA(smoothing=1e-3, max_iterations=3)),
        ("aggregator", "Bucketing(RFA, size=None)", Bucketing(RFA())),
        ("attack", "avg-zero", AvgZero()),
        ("attack", "avg_zero", AvgZero()),
        ("attack", "AVGZERO()", AvgZero()),
        ("attack", 'alie(z=-2,target="both")', ALIE(z=-2, target="both")),
        ("byzantine set", "fixed-set(members=(0,3))", FixedSet(members=(0, 3))),
    ],
)
def test_short_forms(family: str, text: str, component: Component) -> None:
    assert parse(family, text) == component


@pytest.mark.parametrize(
    ("family", "text", "message"),
    [
        ("aggregator", "RFAA", "aggregator 'RFAA': there is no aggregator 'RFAA'; known: Mean, Median, TrimmedMean, "),
        ("aggregator", "KRUMM", ". Did you mean 'Krum'?"),
        (
            "aggregator",
            "NNM(multikrun)",
            "aggregator 'NNM(multikrun)': there is no aggregator 'multikrun'; known: Mean",
        ),
        ("aggregator", "NNM(AvgZero())", "there is no aggregator 'AvgZero'"),
        ("agreement", "RFA", "there is no agreement 'RFA'; known: MDA, GDA, TrimmedMeanAgreement, NoAgreement."),
        ("attack", "Attack", "there is no attack 'Attack'; known: NoAttack, "),
        ("byzantine set", "fixedsets", "Did you mean 'FixedSet'?"),
        ("rule", "RFA", "there is no family 'rule'; known: aggregator, agreement, attack, byzantine set"),
        (
            "aggregator",
            "RFA(smooth=1)",
            "RFA has no option 'smooth'; options: smoothing, max_iterations, tolerance, start.",
        ),
        ("aggregator", "RFA(smothing=1)", "Did you mean 'smoothing'?"),
        ("aggregator", "Mean(1)", "Mean: too many positional arguments; options: none."),
        ("aggregator", "Mean(x=1)", "Mean has no option 'x'; options: none."),
        ("aggregator", "NNM", "aggregator 'NNM': NNM: missing a required argument: 'rule'; options: rule."),
        ("aggregator", "Bucketing(RFA(), rule=RFA())", "Bucketing: multiple values for argument 'rule'"),
        ("aggregator", "RFA(smoothing=1, smoothing=2)", "RFA: smoothing is given twice."),
        ("aggregator", "R\nFA", "aggregator 'R\\nFA': this is not written as Name"),
        ("aggregator", "NNM(3)", "NNM: rule must be Aggregator, got 3."),
        ("aggregator", "MDA(node_limit=True)", "MDA: node_limit must be int, got True."),
        ("aggregator", "Krum(neighbours=7)", "Krum: neighbours must be Literal['paper', 'original'], got 7."),
        ("aggregator", "Krum(neighbours=original)", ". A text is written in quotes."),
        ("byzantine set", "FixedSet(members=3)", "FixedSet: members must be tuple[int, ...] | None, got 3."),
        (
            "byzantine set",
            "FixedSet(members=(0, 'a'))",
            "FixedSet: members must be tuple[int, ...] | None, got (0, 'a').",
        ),
        ("byzantine set", "FixedSet(members=[0])", "FixedSet: members must be tuple[int, ...] | None, got [0]."),
        (
            "aggregator",
            "",
            "aggregator '': this is not written as Name or Name(option=value, ...). Known names: Mean, ",
        ),
        ("aggregator", "RFA(", "aggregator 'RFA(': this is not written as Name"),
        ("aggregator", "RFA() + 1", "RFA() + 1 is not written as Name"),
        ("aggregator", "aggregators.RFA()", "aggregators.RFA() is not written as Name"),
        ("aggregator", "RFA()()", "RFA()() is not written as Name"),
        ("aggregator", "RFA, Mean", "(RFA, Mean) is not written as Name"),
        ("aggregator", "3", "3 is not written as Name"),
        ("aggregator", "NNM(" * 500 + "RFA" + ")" * 500, "is not written as Name"),
        ("aggregator", "RFA(smoothing=" + "-" * 100_000 + "1)", "is not written as Name"),
        ("aggregator", "RFA(smoothing=1 + 1)", "1 + 1 is not a number, a quoted text, a tuple"),
        ("aggregator", "RFA(*(1, 2))", "*(1, 2) is not a number"),
        ("aggregator", "RFA(**{'start': 'zero'})", "RFA has no option '**'"),
        ("aggregator", "RFA(smoothing=[1][0])", "[1][0] is not a number"),
        ("aggregator", "MDA(node_limit={[]})", "{[]} is not a number"),
        ("aggregator", "NNM(__import__('os').system('x'))", "__import__('os').system('x') is not written as Name"),
    ],
)
def test_what_cannot_be_read_is_one_clear_error(family: str, text: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        parse(family, text)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("aggregator", "Krum(neighbours='nearest')"),
        ("aggregator", "Bucketing(RFA(), size=0)"),
        ("aggregator", "Bucketing(MoNNA(pivot=1))"),
        ("attack", "LargeNoise(scale=-1)"),
        ("byzantine set", "RotatingSet(period=0)"),
    ],
)
def test_a_components_own_errors_pass_through(family: str, text: str) -> None:
    names: dict[str, Any] = {name: item for family in FAMILIES for name, item in members(family).items()}
    with pytest.raises(ValueError) as own:  # noqa: PT011
        eval(text, names)
    with pytest.raises(ValueError) as parsed:  # noqa: PT011
        parse(family, text)
    assert str(parsed.value) == str(own.value)


def test_nearest() -> None:
    assert nearest("AVG_ZRO", ["AvgZero", "Zero"]) == " Did you mean 'AvgZero'?"
    assert nearest("completely different", ["AvgZero", "Zero"]) == ""


def test_every_synonym_leads_to_something_that_exists_and_is_no_name_itself() -> None:
    names = {option.name for option in [*fields(Config), *fields(Hardware)]} | {"directory"}
    names |= {name for family in FAMILIES for name in members(family)}
    taken = {plain_name(name) for name in names}
    for meant, synonyms in SYNONYMS.items():
        assert meant in names
        for each in synonyms:
            assert plain_name(each) not in taken, each
    everything = [plain_name(each) for synonyms in SYNONYMS.values() for each in synonyms]
    assert len(everything) == len({*everything})
    assert nearest("geomed", members("aggregator")) == " Did you mean 'RFA'?"
    assert nearest("learning-rate", ["seed", "step_size"]) == " Did you mean 'step_size'?"
    assert nearest("learning-rate", ["seed"]) == ""
