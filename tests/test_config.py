"""Configurations: what presets fill in, what files hold, what survives the way to the disk, and what is refused."""

import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from byzpg.config import FORMERLY, PRESETS, Config, Settings
from byzpg.experiments.authors_script import AuthorsScript
from byzpg.federation.algorithms import ALGORITHMS
from byzpg.federation.schedule import Paper
from byzpg.learning.gradients import GPOMDP, REINFORCE, ImportanceWeights
from byzpg.robust import agreement
from byzpg.robust.aggregators import NNM, RFA, Bucketing, FedPGFilter, Mean, TrimmedMean
from byzpg.robust.agreement import GDA, NoAgreement
from byzpg.robust.attacks import IPM, AvgZero, FixedSet, NoAttack, RotatingSet

# The task table of the paper, which all presets share but for what they name.
TASK = {"horizon": 500, "discount": 0.999, "hidden": (16, 16), "large_batch": 50, "small_batch": 4}
EXPECTED: dict[str, dict[str, Any]] = {
    "paper": {
        "optimizer": "adam",
        "step_size": 5e-3,
        "switch_probability": 0.2,
        "activation": "relu",
        "output_tanh": True,
        "conventions": Paper(),
        "estimator": GPOMDP(baseline="none"),
        "importance": ImportanceWeights(mode="trajectory", cap=None),
        "gate": 1.0,
        "aggregator": RFA(),
        "agreement": agreement.MDA(),
        "output": "last",
    },
    "theory": {
        "optimizer": "sgd",
        "switch_probability": 1 / 50,
        "activation": "tanh",
        "estimator": GPOMDP(baseline="none"),
        "aggregator": Bucketing(RFA()),
        "agreement": agreement.MDA(),
        "rounds": 136,  # ⌈log(50 · 13 · 50²)/log(1/0.9)⌉: MDA leaves 9/10 in the worst case at f = 3 of 13
        "importance": ImportanceWeights(),
        "gate": 1.0,
        "output": "uniform",
    },
    "script": {
        "optimizer": "adam",
        "step_size": 5e-4,
        "switch_probability": 0.2,
        "activation": "tanh",
        "output_tanh": False,
        "conventions": AuthorsScript(),
        "importance": ImportanceWeights(floor=1e-9),
        "aggregator": RFA.reference(),
        "output": "last",
    },
    "tuned": {
        "optimizer": "local-adam",
        "step_size": 4e-2,
        "decay": 0.9,
        "adam_epsilon": 1e-5,
        "large_batch": 6,
        "momentum": 0.8,
        "trajectories": 600,
        "switch_probability": 1.0,
        "output_tanh": False,
        "estimator": GPOMDP(baseline="leave-one-out"),
        "importance": ImportanceWeights(cap=1.0),
        "aggregator": NNM(TrimmedMean()),
        "output": "last",
    },
}


def chosen(settings: Settings, options: dict[str, Any]) -> dict[str, Any]:
    return {option: getattr(settings, option) for option in options}


def test_the_table_has_every_preset() -> None:
    assert set(EXPECTED) == set(PRESETS)


@pytest.mark.parametrize("preset", EXPECTED)
def test_presets_fill_in_what_is_left_out(preset: Any) -> None:
    expected = TASK | EXPECTED[preset]
    assert chosen(Config(preset=preset).resolved(), expected) == expected


@pytest.mark.parametrize("preset", EXPECTED)
def test_what_is_given_comes_before_the_preset(preset: Any) -> None:
    given: dict[str, Any] = {
        "num_agents": 9,
        "num_byzantine": 1,
        "seed": 3,
        "num_seeds": 2,
        "trajectories": 100,
        "aggregator": TrimmedMean(),
        "agreement": GDA(),
        "rounds": 4,
        "large_batch": 20,
        "small_batch": 3,
        "switch_probability": 0.5,
        "coins": "shared" if PRESETS[preset]["coins"] == "per-seed" else "per-seed",
        "estimator": REINFORCE(),
        "importance": ImportanceWeights(cap=2.0),
        "gate": 0.0,
        "conventions": AuthorsScript(coin=False),
        "optimizer": "sgd" if PRESETS[preset]["optimizer"] == "adam" else "adam",
        "step_size": 0.125,
        "hidden": (3,),
        "activation": "elu",
        "output_tanh": not PRESETS[preset]["output_tanh"],
        "horizon": 30,
        "discount": 0.5,
        "output": "last" if PRESETS[preset]["output"] == "uniform" else "uniform",
    }
    assert chosen(Config(preset=preset, **given).resolved(), given) == given


@pytest.mark.parametrize(("num_agents", "large_batch"), [(13, 50), (5, 6), (16, 64)])
def test_theory_prescribes_the_switch_and_the_rounds(num_agents: int, large_batch: int) -> None:
    """p = 1/N, and κ rounds leave at most p²/(NK) of the diameter, one round less does not; either can be had alone."""
    size: dict[str, Any] = {"num_agents": num_agents, "large_batch": large_batch}
    f = (num_agents - 1) // 4
    contraction = 3 * f / (num_agents - f)
    settings = Config(preset="theory", **size).resolved()
    assert settings.switch_probability == 1 / large_batch
    share = 1 / (large_batch * num_agents * large_batch**2)
    assert contraction**settings.rounds <= share < contraction ** (settings.rounds - 1)
    mixed = Config(rounds="theory", switch_probability=0.25, **size).resolved()
    assert mixed.switch_probability == 0.25
    assert contraction**mixed.rounds <= 1 / (large_batch * num_agents * 16) < contraction ** (mixed.rounds - 1)
    assert Config(switch_probability="theory", **size).resolved().switch_probability == 1 / large_batch
    assert Config(preset="theory", num_byzantine=0, **size).resolved().rounds == 1


# K = 16, f = 3, N = 64, p = 1/64, L = 3, C = 7: what A is for each algorithm.
A_OF_THEORY = {
    "PAGE-PG": 7 * 64,
    "Fed-PAGE-PG": 7 * 64,  # the server samples small batches alone
    "ByzPG": 7 * 64,
    "Dec-PAGE-PG": 7 * 64 / 16,  # it knows nothing of f
    "DecByzPG": 7 * (64**2 * 3 / 16 + 64 / 16),
}


@pytest.mark.parametrize("algorithm", A_OF_THEORY)
def test_theory_prescribes_the_step_size(algorithm: str) -> None:
    """η = ½ min(1/√A, 1/L)."""
    given: dict[str, Any] = {"preset": "theory", "algorithm": algorithm, "large_batch": 64, "correction_noise": 7.0}
    if algorithm != "PAGE-PG":
        given |= {"num_agents": 16, "num_byzantine": 3}
    settings = Config(smoothness=3.0, **given).resolved()
    assert settings.step_size == pytest.approx(0.5 / math.sqrt(A_OF_THEORY[algorithm]), rel=1e-12)
    assert Config(smoothness=1e6, **given).resolved().step_size == pytest.approx(0.5e-6, rel=1e-12)
    # A run records the number, and reads it back without the constants.
    assert Config.of(json.loads(json.dumps(settings.as_data())), "file").resolved() == settings
    assert Config(**given | {"step_size": 0.25, "correction_noise": None}).resolved().step_size == 0.25


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (13, 3)),
        ({"algorithm": "Dec-PAGE-PG"}, (13, 3)),
        ({"algorithm": "PAGE-PG"}, (1, 0)),
        ({"num_agents": 4}, (4, 0)),
        ({"num_agents": 5}, (5, 1)),
        ({"num_agents": 8}, (8, 1)),
        ({"num_agents": 9}, (9, 2)),
        ({"num_agents": 9, "num_byzantine": 0}, (9, 0)),
        ({"agreement": "GDA"}, (13, 2)),
        ({"algorithm": "ByzPG", "aggregator": "Bulyan"}, (13, 2)),
    ],
)
def test_how_many_agents_are_tolerated_and_attack(given: dict[str, Any], expected: tuple[int, int]) -> None:
    settings = Config(**given).resolved()
    assert (settings.num_agents, settings.num_byzantine) == expected
    assert settings.num_attackers == settings.num_byzantine
    assert settings.attack == (AvgZero() if settings.num_attackers else NoAttack())


def test_the_number_of_attackers_is_independent_of_what_the_rules_tolerate() -> None:
    more = Config(num_agents=9, num_byzantine=1, num_attackers=4).resolved()
    assert (more.num_byzantine, more.num_attackers, more.attack) == (1, 4, AvgZero())
    none = Config(num_agents=9, num_attackers=0).resolved()
    assert (none.num_byzantine, none.num_attackers, none.attack) == (2, 0, NoAttack())


OLD_FILES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"num_byzantine": 2}, {"num_byzantine": 2, "num_attackers": 2}),
    ({"num_declared": 1, "num_byzantine": 3}, {"num_byzantine": 1, "num_attackers": 3}),
    ({"num_declared": 1}, {"num_byzantine": 1, "num_attackers": 1}),
    ({"num_declared": None, "num_byzantine": 2}, {"num_byzantine": 2, "num_attackers": 2}),
    ({"memory": "paper", "coin": "common", "initialization": "seeded"}, {"conventions": Paper()}),
    ({"memory": "script", "coin": "script", "initialization": "script"}, {"conventions": AuthorsScript()}),
    ({"memory": "script"}, {"conventions": AuthorsScript(initialization=False, coin=False)}),
    ({"memory": None, "coin": None}, {"conventions": Paper()}),
    ({"preset": "script", "coin": "common"}, {"conventions": AuthorsScript(coin=False)}),
    ({"preset": "script"}, {"conventions": AuthorsScript()}),
]


WRONG_OLD_FILES: list[tuple[dict[str, Any], str]] = [
    ({"coin": "sript"}, "old.toml: coin must be 'common' or 'script', got 'sript'."),
    ({"memory": True}, "old.toml: memory must be 'paper' or 'script', got True."),
    ({"memory": "script", "conventions": "Paper"}, "conventions replaces it: leave memory out"),
    ({"num_declared": 3, "num_byzantine": 2, "num_attackers": 1}, "num_attackers replaces it: leave num_declared out"),
]


@pytest.mark.parametrize(("file", "words"), WRONG_OLD_FILES)
def test_old_options_are_checked_as_well(file: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Config.of(file, "old.toml")


@pytest.mark.parametrize(("file", "expected"), OLD_FILES)
def test_files_with_the_options_of_an_earlier_version_are_read(file: dict[str, Any], expected: dict[str, Any]) -> None:
    settings = Config.of(file, "old.toml").resolved()
    assert chosen(settings, expected) == expected
    assert Config.of(settings.as_data(), "config.json").resolved() == settings


def test_a_run_that_was_saved_before_an_option_existed_means_what_it_meant_then() -> None:
    data = Config(momentum=0.7).resolved().as_data()
    old = {name: value for name, value in data.items() if name not in FORMERLY}
    assert Config.of(data, "config.json").resolved().momentum == 0.7
    assert Config.of(old, "config.json").resolved().momentum == 0
    assert Config.of({"attack": "ALIE"}, "mine.toml").resolved().momentum == 0.8, (
        "a user's file leaves it to the preset"
    )


def test_one_agent_alone_has_a_preset_of_its_own() -> None:
    alone = Config(algorithm="PAGE-PG").resolved()
    assert (alone.large_batch, alone.step_size, alone.momentum, alone.adam_epsilon) == (15, 2e-2, 0, 1e-8)
    lander = Config(env="LunarLander-v3", algorithm="PAGE-PG").resolved()
    assert (lander.large_batch, lander.step_size, lander.momentum, lander.adam_epsilon) == (45, 5e-3, 0, 1e-8)
    assert lander.estimator == Config(env="LunarLander-v3").resolved().estimator
    assert lander.estimator == GPOMDP(baseline="leave-one-out", trace_decay=0.995)
    assert Config(algorithm="N-PG-IGT").resolved().momentum == 0.9


def test_presets_of_mujoco_differ_by_task_and_alone_ones_inherit_nothing_from_a_federation() -> None:
    def preset(task: str, algorithm: str) -> tuple[Any, ...]:
        found = Config(env=f"envpool:{task}-v4", algorithm=algorithm).resolved()
        ppo = found.ppo
        numbers = found.discount, found.momentum, ppo.largest_kl, ppo.initial_log_std
        return *numbers, (ppo.environments, ppo.segment, ppo.epochs, ppo.minibatches)

    assert preset("HalfCheetah", "DecByzPPO") == (0.98, 0.9, 0.1, -2, (2, 256, 8, 4))
    networks = {
        algorithm: Config(env="envpool:HalfCheetah-v4", algorithm=algorithm).resolved().hidden
        for algorithm in ("DecByzPPO", "PPO")
    }
    assert networks == {"DecByzPPO": (256, 256), "PPO": (64, 64)}
    assert preset("Hopper", "DecByzPPO") == (0.995, 0.95, None, -1, (2, 512, 10, 8))
    assert preset("Walker2d", "DecByzPPO") == (0.99, 0.95, None, 0, (2, 512, 10, 8))
    assert preset("HalfCheetah", "PPO") == (0.98, 0, None, -2, (1, 512, 20, 8))
    for task in ("Hopper", "Walker2d"):
        assert preset(task, "PPO") == (0.99, 0, None, 0, (4, 512, 10, 32))


def test_ppo_alone_has_a_preset_of_its_own() -> None:
    alone = Config(algorithm="PPO").resolved()
    assert (alone.steps, alone.step_size, alone.momentum, alone.hidden) == (40_960, 1e-3, 0, (64, 64))
    assert (alone.ppo.environments, alone.ppo.segment, alone.ppo.epochs) == (2, 128, 10)
    # What the preset does not say about one agent is what it says about a federation.
    assert (alone.activation, alone.adam_epsilon) == ("relu", 1e-5)
    together = Config(algorithm="DecByzPPO").resolved()
    assert (together.steps, together.step_size, together.momentum) == (20_480, 3e-2, 0.9)
    for algorithm in ("Fed-PPO", "Dec-PPO", "ByzPPO"):
        each = Config(algorithm=algorithm).resolved()
        assert (each.steps, each.ppo) == (together.steps, together.ppo)
    assert Config(algorithm="Dec-PPO", num_agents=1).resolved().ppo == together.ppo, "the algorithm says it, not K"


def test_the_epsilon_of_a_preset_is_for_adam_alone() -> None:
    assert Config().resolved().adam_epsilon == 1e-5
    assert Config(optimizer="sgd").resolved().adam_epsilon == 1e-8


@pytest.mark.parametrize(("env", "large_batch"), [("CartPole-v1", 15), ("LunarLander-v3", 45)])
def test_messages_are_not_scaled_where_small_batches_correct_them(env: str, large_batch: int) -> None:
    """`tuned` trains with small batches too, whether an option or the algorithm asks for them."""
    for config in (Config(env=env, switch_probability=0.2), Config(env=env, algorithm="FedPG-BR")):
        settings = config.resolved()
        assert (settings.optimizer, settings.momentum, settings.decay) == ("adam", 0.0, 0.0)
        assert (settings.large_batch, settings.switch_probability) == (large_batch, 0.2)
    assert Config(env=env, switch_probability=1).resolved() == Config(env=env).resolved()
    with pytest.raises(ValueError, match="which small batches cannot correct"):
        Config(env=env, switch_probability=0.2, optimizer="local-adam").resolved()


def test_a_small_batch_left_out_is_never_the_larger_one() -> None:
    assert Config(large_batch=3).resolved().small_batch == 3
    assert Config(large_batch=300).resolved().small_batch == 4


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms_have_only_their_own_rules(algorithm: str) -> None:
    settings = Config(algorithm=algorithm).resolved()
    tuned, agrees = NNM(TrimmedMean()), algorithm in ("DecByzPG", "DecByzPPO")
    rules = {"ByzPG": tuned, "DecByzPG": tuned, "FedPG-BR": FedPGFilter(), "ByzPPO": tuned, "DecByzPPO": tuned}
    assert settings.aggregator == rules.get(algorithm, Mean())
    assert settings.agreement == (agreement.MDA() if agrees else NoAgreement())
    assert (settings.rounds > 0) == agrees
    assert Config(algorithm=algorithm.lower().replace("-", "_")).resolved() == settings


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("preset", PRESETS)
def test_settings_survive_the_way_through_a_file(preset: Any, algorithm: str) -> None:
    step_size = 0.01 if preset == "theory" and algorithm not in A_OF_THEORY else None  # no theorem has one for these
    config = Config(preset=preset, algorithm=algorithm, step_size=step_size)
    if "PPO" in algorithm and preset != "tuned":
        with pytest.raises(ValueError, match=f"^preset = {preset} is for the paper's algorithms, not for {algorithm}"):
            config.resolved()
        return
    settings = config.resolved()
    assert Config.of(json.loads(json.dumps(settings.as_data())), "test").resolved() == settings


@pytest.mark.parametrize(
    "config",
    [
        Config(aggregator=NNM(Bucketing(RFA(start="zero"), size=2)), agreement="TrimmedMeanAgreement"),
        Config(attack=IPM(epsilon=0.5), byzantine_set=FixedSet(members=(0, 3, 7)), hidden=(), gate="health"),
        Config(num_byzantine=0, byzantine_set=RotatingSet(period=3), importance=ImportanceWeights(cap=2), rounds=0),
    ],
)
def test_options_survive_the_way_through_a_file(config: Config) -> None:
    settings = config.resolved()
    assert Config.of(json.loads(json.dumps(settings.as_data())), "test").resolved() == settings


def test_components_go_by_name_or_as_objects() -> None:
    by_name = Config(
        attack="ipm(epsilon=0.5)",
        byzantine_set="RotatingSet(period=2)",
        aggregator="NNM(trimmed-mean)",
        agreement="gda",
        estimator="REINFORCE",
        importance="ImportanceWeights(cap=3.0)",
        num_byzantine=2,
    )
    as_objects = Config(
        attack=IPM(epsilon=0.5),
        byzantine_set=RotatingSet(period=2),
        aggregator=NNM(TrimmedMean()),
        agreement=GDA(),
        estimator=REINFORCE(),
        importance=ImportanceWeights(cap=3.0),
        num_byzantine=2,
    )
    assert by_name.resolved() == as_objects.resolved()


def test_none_is_left_out() -> None:
    nothing: dict[str, Any] = {option.name: None for option in fields(Config)}
    assert Config(**nothing).resolved() == Config().resolved()


# Files


def test_a_toml_and_a_json_file_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        'algorithm = "ByzPG"\nnum_agents = 7\nattack = "SignFlip(scale=2.0)"\nhidden = [8, 4]\nstep_size = 1e-3\n'
        'output_tanh = true\nrounds = 0\nswitch_probability = "theory"\n'
    )
    values = {
        "algorithm": "ByzPG",
        "num_agents": 7,
        "attack": "SignFlip(scale=2.0)",
        "hidden": [8, 4],
        "step_size": 1e-3,
        "output_tanh": True,
        "rounds": 0,
        "switch_probability": "theory",
        "gate": None,
    }
    (tmp_path / "a.json").write_text(json.dumps(values))
    toml, plain = Config.load(tmp_path / "a.toml"), Config.load(tmp_path / "a.json")
    assert toml == plain
    assert toml.resolved().hidden == (8, 4)
    assert toml.resolved().switch_probability == 1 / toml.resolved().large_batch
    assert toml.preset == "tuned"


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.toml", b"num_agnts = 5", ["a.toml", "'num_agnts'", "Did you mean 'num_agents'?"]),
        ("a.json", b'{"num_agents": 5, "stepsize": 1}', ["a.json", "'stepsize'", "Did you mean 'step_size'?"]),
        ("a.toml", b"[training]\nnum_agents = 5", ["no option 'training'"]),
        ("a.toml", b"num_agents = \n", ["a.toml cannot be read", "line 1"]),
        ("a.json", b'{"num_agents": 5', ["a.json cannot be read", "line 1"]),
        ("a.json", b"[1, 2]", ["a.json must be a table of options, got list"]),
        ("a.toml", b"env = '\xff'", ["a.toml cannot be read"]),
        ("a.toml", None, ["a.toml cannot be read", "No such file"]),
    ],
)
def test_bad_files(name: str, content: bytes | None, parts: list[str], tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(parts[0])) as caught:
        Config.load(tmp_path / name)
    assert all(part in str(caught.value) for part in parts)


def test_a_directory_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        Config.load(tmp_path)


# Bad input, with the paper's preset where none is given: the value, the rule it breaks, the fix.

BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"num_byzantine": 7}, ["RFA()", "f < K/2", "7 of 13", "num_byzantine ≤ 6"]),
    ({"num_byzantine": 4}, ["MDA()", "f < K/4", "4 of 13", "num_byzantine ≤ 3"]),
    ({"num_byzantine": 3, "agreement": "GDA"}, ["GDA()", "f < K/5", "3 of 13", "num_byzantine ≤ 2"]),
    ({"num_byzantine": 4, "algorithm": "ByzPG", "aggregator": "Krum"}, ["Krum()", "4 of 13", "num_byzantine ≤ 3"]),
    ({"num_byzantine": 13, "algorithm": "Dec-PAGE-PG"}, ["Mean()", "f < K", "13 of 13"]),
    ({"num_byzantine": -1}, ["num_byzantine must not be negative", "-1"]),
    ({"small_batch": 51}, ["small_batch must be at most large_batch = 50", "51"]),
    ({"large_batch": 3, "small_batch": 4}, ["small_batch must be at most large_batch = 3", "4"]),
    ({"switch_probability": 0.0}, ["switch_probability must lie in (0, 1]", "0.0"]),
    ({"switch_probability": -0.1}, ["switch_probability must lie in (0, 1]", "-0.1"]),
    ({"switch_probability": 1.01}, ["switch_probability must lie in (0, 1]", "1.01"]),
    ({"switch_probability": math.nan}, ["switch_probability must lie in (0, 1]", "nan"]),
    ({"switch_probability": "often"}, ["switch_probability must be a number or 'theory'", "'often'"]),
    ({"env": "CartPole"}, ["no environment 'CartPole'", "Did you mean 'CartPole-v1'?"]),
    ({"env": 3}, ["env must be a name", "3"]),
    ({"algorithm": "DecByz"}, ["no algorithm 'DecByz'", "Did you mean 'DecByzPG'?"]),
    ({"algorithm": 3}, ["algorithm must be a name", "3"]),
    ({"preset": "tunde"}, ["no preset 'tunde'", "Did you mean 'tuned'?"]),
    ({"preset": ()}, ["preset must be a name", "()"]),
    ({"aggregator": "RFAA"}, ["no aggregator 'RFAA'", "Did you mean 'RFA'?"]),
    ({"aggregator": "RFA(smoothin=1)"}, ["no option 'smoothin'", "Did you mean 'smoothing'?"]),
    ({"aggregator": NNM}, ["aggregator = NNM needs options", "'rule'"]),
    ({"aggregator": dict}, ["aggregator must be Aggregator", "{}"]),
    ({"aggregator": GDA()}, ["aggregator must be Aggregator", "GDA()"]),
    ({"agreement": "MDB"}, ["no agreement 'MDB'", "Did you mean 'MDA'?"]),
    ({"attack": "AvgZer"}, ["no attack 'AvgZer'", "Did you mean 'AvgZero'?"]),
    ({"attack": "AvgZer", "num_byzantine": 0}, ["no attack 'AvgZer'"]),
    ({"byzantine_set": "FixSet"}, ["no byzantine set 'FixSet'", "Did you mean 'FixedSet'?"]),
    ({"byzantine_set": FixedSet(members=(0, 1, 13))}, ["members must be 3 different agents of 0 to 12", "(0, 1, 13)"]),
    ({"estimator": "GPOMD"}, ["no estimator 'GPOMD'", "Did you mean 'GPOMDP'?"]),
    ({"small_batch": 1, "estimator": GPOMDP(baseline="leave-one-out")}, ["leave-one-out", "at least 2", "got 1"]),
    ({"importance": "ImportanceWeights(cap=0.0)"}, ["cap must be positive", "0.0"]),
    ({"policy": "gaussian"}, ["policy = gaussian does not fit", "use policy = categorical"]),
    (
        {"estimator": "REINFORCE", "importance": "ImportanceWeights(mode='per-decision')"},
        ["per-decision", "REINFORCE() does not", "use GPOMDP"],
    ),
    ({"policy": "softmax"}, ["policy must be auto, categorical, gaussian, or a network of your own", "'softmax'"]),
    ({"algorithm": "PAGE-PG", "num_agents": 3}, ["PAGE-PG is one agent alone", "num_agents must be 1", "3"]),
    ({"algorithm": "Dec-PAGE-PG", "aggregator": "RFA"}, ["aggregator = RFA", "Dec-PAGE-PG", "ByzPG or DecByzPG"]),
    ({"algorithm": "Dec-PAGE-PG", "aggregator": RFA()}, ["aggregator = RFA()", "leave it out"]),
    ({"algorithm": "ByzPG", "agreement": "MDA"}, ["agreement = MDA", "ByzPG", "leave it out", "use DecByzPG"]),
    ({"algorithm": "Fed-PAGE-PG", "rounds": 5}, ["rounds = 5", "Fed-PAGE-PG", "leave it out", "use DecByzPG"]),
    ({"hidden": 16}, ["hidden must be tuple[int, ...]", "16"]),
    ({"hidden": (16, 2.5)}, ["hidden must be tuple[int, ...]", "(16, 2.5)"]),
    ({"hidden": (16, 0)}, ["hidden must be a positive whole number", "0"]),
    ({"rounds": 2.5}, ["rounds must be int", "2.5"]),
    ({"rounds": "many"}, ["rounds must be a number or 'theory'", "'many'"]),
    ({"rounds": -1}, ["rounds must not be negative", "-1"]),
    ({"gate": "abc"}, ["gate must be float or 'health'", "'abc'"]),
    ({"gate": 1.5}, ["gate must lie in [0, 1]", "1.5"]),
    ({"gate": math.nan}, ["gate must lie in [0, 1]", "nan"]),
    ({"momentum": 1.0}, ["momentum must lie in [0, 1)", "1.0"]),
    ({"momentum": -0.1}, ["momentum must lie in [0, 1)", "-0.1"]),
    ({"momentum": math.nan}, ["momentum must lie in [0, 1)", "nan"]),
    ({"transport": True}, ["transport keeps momentum from lagging behind", "set momentum"]),
    ({"importance": "DefensiveSampling", "small_batch": 5}, ["DefensiveSampling()", "small_batch must be even", "5"]),
    ({"importance": "HessianVector", "gate": 0.5}, ["HessianVector()", "gate must be 1", "0.5"]),
    ({"algorithm": "N-PG-IGT", "optimizer": "sgd"}, ["optimizer must be 'normalized' with N-PG-IGT", "'sgd'"]),
    ({"num_agents": "13"}, ["num_agents must be int", "'13'"]),
    ({"num_agents": 12.5}, ["num_agents must be int", "12.5"]),
    ({"num_agents": True}, ["num_agents must be int", "True"]),
    ({"num_agents": 0}, ["num_agents must be at least 1", "0"]),
    ({"num_seeds": 0}, ["num_seeds must be at least 1", "0"]),
    ({"seed": -1}, ["seed must not be negative", "-1"]),
    ({"seed": 2**31 - 3}, ["seed + num_seeds must be at most 2³¹", "2147483645"]),
    ({"trajectories": 0}, ["trajectories must be at least 1", "0"]),
    ({"trajectories": 1e3}, ["trajectories must be int", "1000.0"]),
    ({"large_batch": 0}, ["large_batch must be at least 1", "0"]),
    ({"horizon": 0}, ["horizon must be at least 1", "0"]),
    ({"horizon": 501}, ["horizon must be at most 500", "CartPole-v1", "501"]),
    ({"discount": 0}, ["discount must lie in (0, 1]", "0"]),
    ({"step_size": 0}, ["step_size must be positive and finite", "0"]),
    ({"step_size": math.inf}, ["step_size must be positive and finite", "inf"]),
    ({"step_size": "1e-3"}, ["step_size must be a number or 'theory'", "'1e-3'"]),
    (
        {"step_size": "theory"},
        ["step_size = 'theory' is for the paper's algorithms with SGD", "adam", "set a step size"],
    ),
    ({"preset": "theory", "momentum": 0.5}, ["step_size = 'theory' is for", "momentum = 0.5", "set a step size"]),
    ({"preset": "theory", "algorithm": "SVRPG"}, ["step_size = 'theory' is for", "got SVRPG", "set a step size"]),
    ({"smoothness": 3.0}, ["smoothness = 3.0 has no effect", "set step_size = 'theory'"]),
    ({"correction_noise": 3.0}, ["correction_noise = 3.0 has no effect", "set step_size = 'theory'"]),
    ({"preset": "theory", "smoothness": 0.0}, ["smoothness must be a positive and finite number", "0.0"]),
    ({"preset": "theory", "correction_noise": math.nan}, ["correction_noise must be a positive", "nan"]),
    ({"preset": "theory", "correction_noise": "much"}, ["correction_noise must be a positive", "'much'"]),
    (
        {"preset": "theory", "agreement": "NoAgreement"},
        ["NoAgreement() has the contraction 1, not below 1", "3 of 13", "use MDA"],
    ),
    ({"adam_epsilon": 0.0}, ["adam_epsilon must be positive and finite", "0.0"]),
    ({"adam_epsilon": 1e-3, "optimizer": "sgd"}, ["adam_epsilon = 0.001 has no effect with sgd", "'adam'"]),
    ({"coins": "common"}, ["coins must be 'per-seed' or 'shared'", "'common'"]),
    ({"optimizer": "rmsprop"}, ["optimizer must be 'adam'", "'rmsprop'"]),
    ({"decay": 1.5}, ["decay must lie in [0, 1]", "1.5"]),
    (
        {"optimizer": "local-adam", "switch_probability": 0.5},
        ["small batches cannot correct", "switch_probability = 1"],
    ),
    ({"conventions": "Script"}, ["no conventions 'Script'", "Did you mean 'AuthorsScript'?"]),
    ({"activation": "gelu"}, ["activation must be 'relu' or 'tanh'", "'gelu'"]),
    ({"output_tanh": "yes"}, ["output_tanh must be bool", "'yes'"]),
    ({"output": "best"}, ["output must be 'last' or 'uniform'", "'best'"]),
    ({"preset": "theory", "large_batch": 0}, ["large_batch must be at least 1", "0"]),
    ({"preset": "theory", "num_byzantine": 4}, ["MDA()", "num_byzantine ≤ 3"]),
]


@pytest.mark.parametrize(("given", "parts"), BAD, ids=[str(given) for given, _ in BAD])
def test_bad_input_is_one_error_that_names_value_and_rule(given: dict[str, Any], parts: list[str]) -> None:
    options: dict[str, Any] = {"preset": "paper"} | given
    with pytest.raises(ValueError, match=re.escape(parts[0])) as caught:
        Config(**options).resolved()
    message = str(caught.value)
    assert [part for part in parts if part not in message] == []
    assert "\n" not in message


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, "DecByzPPO"),
        ({"env": "gymnasium:Pendulum-v1"}, "DecByzPPO"),
        ({"env": "LunarLander-v3"}, "DecByzPPO"),
        ({"env": "LunarLanderContinuous-v3"}, "DecByzPG"),
        ({"env": "LunarLanderContinuous-v3", "steps": 5000}, "DecByzPPO"),
        ({"trajectories": 60}, "DecByzPG"),
        ({"estimator": "REINFORCE"}, "DecByzPG"),
        ({"estimator": "GPOMDP()", "gate": 1.0}, "DecByzPPO"),
        ({"preset": "paper"}, "DecByzPG"),
    ],
    ids=str,
)
def test_auto_is_the_best_algorithm_that_has_the_options_that_are_given(options: dict[str, Any], chosen: str) -> None:
    assert Config(algorithm="auto", **options).resolved().algorithm == chosen
