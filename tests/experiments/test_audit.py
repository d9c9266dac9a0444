"""The search of an audit: on curves whose harm is known, and on real training runs that must be found out."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from byzpg import Config, training
from byzpg.experiments import audit
from byzpg.experiments.audit import Audit, Honest, Plan, families, next_generation
from byzpg.experiments.results import Result
from byzpg.robust.adaptive import Adaptive
from byzpg.robust.certificates import certificate

FEDERATION = Config(algorithm="ByzPG", num_agents=5, num_byzantine=1, trajectories=60, horizon=20)
PROGRESS = np.arange(6, 61, 6)
certified = cache(certificate)


# Candidates


def test_genes_are_inverted_and_known_attacks_are_members() -> None:
    for server in (True, False):
        for family in families(100, 10, 3, critic=True, server=server):
            for attack in family.anchors:
                again = family.attack(family.places(attack))
                for gene in family.genes:
                    assert getattr(again, gene.name) == pytest.approx(getattr(attack, gene.name), rel=0.01), gene.name
            for place in np.random.default_rng(0).random((50, len(family.genes))):
                attack = family.attack(place)
                assert family.attack(family.places(attack)) == attack


def test_generations_descend_from_the_worst_and_never_repeat_themselves() -> None:
    family, *_ = families(100, 10, 3, critic=False, server=True)

    def harm(attack: Adaptive) -> float:
        """The worst attack has this pull; nothing else matters."""
        return -abs(np.log(max(attack.pull, 1e-3) / 3))

    def searched(parents: Callable[[dict[Adaptive, float]], dict[Adaptive, float]]) -> dict[Adaptive, float]:
        scored: dict[Adaptive, float] = {}
        for generation in range(8):
            rng = np.random.default_rng(generation)
            children = next_generation(family, parents(scored) if scored else {}, 12, generation, rng)
            assert len(children) == 12
            assert not scored.keys() & set(children)
            scored |= {child: harm(child) for child in children}
        return scored

    guided, misled = searched(dict), searched(lambda scored: {attack: -each for attack, each in scored.items()})
    assert np.mean(list(guided.values())[-12:]) > np.mean(list(misled.values())[-12:]) + 1
    assert max(guided.values()) > -0.1


# Harm


def result(returns: npt.ArrayLike) -> Result:
    return Result(FEDERATION.resolved(), PROGRESS, {"return_mean": np.asarray(returns, np.float32)})


def test_harm_is_the_share_of_learning_that_is_lost() -> None:
    rising = np.linspace(10, 100, len(PROGRESS))
    honest = Honest(result([rising, rising]))
    half = 10 + (rising - 10) / 2
    measured = honest.measured(result([rising, np.full_like(rising, 10), half, np.full_like(rising, np.nan)]))
    np.testing.assert_allclose(measured.lost, [0, 1, 0.5, 1], atol=1e-6)
    np.testing.assert_allclose(measured.lost_at_end, [0, 1, 0.5, 1], atol=1e-6)
    np.testing.assert_array_equal(measured.slowdown, [1, np.inf, np.inf, np.inf])
    early = np.minimum(10 + 2 * (rising - 10), 100)
    assert honest.measured(result([early])).slowdown[0] == pytest.approx(0.5, abs=0.1), "twice as fast"
    with pytest.raises(ValueError, match="the honest federation learns nothing in 60 trajectories"):
        Honest(result(np.full((2, len(PROGRESS)), 10.0))).check()


def test_the_verdict_follows_the_goal() -> None:
    rising = np.linspace(10, 100, len(PROGRESS))
    honest, falls = Honest(result([rising, rising])), np.where(PROGRESS > 50, 10, rising)
    worst, without = honest.measured(result([falls, falls])), honest.measured(result([rising, rising]))
    found = audit.RuleFindings("Median()", without, worst, None, ())
    assert found.verdict == "slowed"
    assert replace(found, goal="end").verdict == "lost"
    wanted = replace(found, goal="target", worst=replace(worst, targeted=np.ones(2)))
    assert replace(wanted, without=replace(without, targeted=np.full(2, 0.5))).verdict == "lost"


# The whole search, with training replaced by curves whose harm is known


@dataclass
class Learner:
    """Stands for `training.train_all`: attacks with a drift near 2 do most harm, AvgZero does a third of it."""

    trained: int = 0

    seeds: set[int] = field(default_factory=set)

    def __call__(
        self, configs: Sequence[Config], on_progress: training.OnProgress | None = None
    ) -> Iterator[tuple[int, SimpleNamespace]]:
        self.trained += len(configs)
        self.seeds |= {config.seed for config in configs}
        yield from enumerate(map(self.run, configs))

    def run(self, config: Config) -> SimpleNamespace:
        settings = config.resolved()
        attack, harm = settings.attack, 0.0
        if settings.num_attackers:
            harm = 0.3 if str(attack) == "AvgZero()" else 0.05
            if isinstance(attack, Adaptive):
                harm = 0.9 * np.exp(-((np.log10(max(attack.drift, 1e-3) / 2)) ** 2) * 8)
            if str(settings.aggregator) == "Mean()":
                harm = 1.0
        noise = 0.01 * np.random.default_rng(settings.seeds[0]).standard_normal((settings.num_seeds, 1))
        progress = np.broadcast_to(PROGRESS, (settings.num_seeds, len(PROGRESS)))
        returns = 10 + (1 - harm + noise) * np.linspace(0, 90, len(PROGRESS))
        metrics: dict[str, np.ndarray] = {}
        return SimpleNamespace(settings=settings, progress=progress, returns=returns, metrics=metrics)


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> Learner:
    """What is measured on random vectors takes longest, and is the same for the same rule and attack."""
    made = Learner()
    monkeypatch.setattr(training, "train_all", made)
    monkeypatch.setattr(audit, "certificate", certified)
    return made


PLAN = Plan(FEDERATION, ("Median()", "Mean()"), known=("AvgZero", "RandomAction"), generations=4, report_seeds=3)


def test_the_search_finds_what_is_worse_than_known_attacks(learner: Learner, tmp_path: Path) -> None:
    findings = Audit(PLAN, tmp_path).run()
    median, mean = findings.rules
    assert median.known is not None
    assert median.worst is not None
    assert median.known.attack == "AvgZero()"
    assert np.mean(median.known.lost) == pytest.approx(0.3, abs=0.03)
    assert np.mean(median.worst.lost) > 0.8
    assert median.verdict in ("crippled", "lost")
    assert mean.verdict == "lost"
    assert median.worst.seed == 2000, "the report has seeds of its own"
    assert {each.num_attackers for each in median.breaking} == {1, 2}
    assert [harm for _, harm in median.searched[:5]] == sorted((h for _, h in median.searched[:5]), reverse=True)
    assert not findings.cut_short
    assert learner.seeds == {500, 600, 2000}, "of the search, of the choice among the best, and of the report"
    # The same again trains nothing, and says the same.
    before = learner.trained
    again = Audit(PLAN, tmp_path).run()
    assert learner.trained == before
    assert again.rules[0].worst is not None
    assert again.rules[0].worst.attack == median.worst.attack
    # A rule has the same candidates whatever it is audited with.
    alone = Audit(replace(PLAN, rules=("Median()",)), tmp_path).run()
    assert learner.trained == before
    assert alone.rules[0].searched == median.searched


def test_a_known_attack_that_is_an_anchor_too_counts_once(learner: Learner, tmp_path: Path) -> None:
    plan = replace(PLAN, rules=("Median()",), known=("Adaptive(pull=1.0)",), generations=1)
    (found,) = Audit(plan, tmp_path).run().rules
    harms = [harm for _, harm in found.searched]
    assert "Adaptive(pull=1.0)" in dict(found.searched)
    assert harms[: audit.FINALISTS] == sorted(harms, reverse=True)[: audit.FINALISTS]


def test_measurements_belong_to_their_source_and_to_the_action(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    source = "from byzpg.robust import Median\n\nclass EditedRule(Median):\n    pass\n"
    (tmp_path / "edited_rule.py").write_text(source)
    config = replace(FEDERATION, aggregator="edited_rule:EditedRule")
    bench = audit.Bench(tmp_path / "kept")
    bench.measure([config], "")
    bench.measure([config], "")
    assert learner.trained == 1
    (tmp_path / "edited_rule.py").write_text(source + "# another rule\n")
    bench.measure([config], "")
    assert learner.trained == 2
    monkeypatch.setattr(audit, "_shares_of_action", lambda run, action: np.full(run.settings.num_seeds, 0.5))
    for action in (0, 1):
        audit.Bench(tmp_path / "kept", action).measure([config], "")
    assert learner.trained == 4


def test_wrong_goals_and_attacks_are_refused_before_any_work(learner: Learner, tmp_path: Path) -> None:
    for changes, problem in (
        ({"known": ("AvgZeroo",)}, "AvgZeroo"),
        ({"goal": "target"}, "goal target and an action belong together"),
        ({"goal": "target", "action": 7}, "action must be 0 to 1 on CartPole-v1, got 7"),
        ({"rules": ("Medial",)}, "no aggregator 'Medial'"),
    ):
        with pytest.raises(ValueError, match=problem):
            Audit(replace(PLAN, **changes), tmp_path)
    assert Audit(replace(PLAN, goal="target", action=1), tmp_path).known[-1] == "BonusForAction(action=1, bonus=100.0)"
    assert not learner.trained


def test_without_attackers_no_attack_is_found(learner: Learner, tmp_path: Path) -> None:
    honest = replace(FEDERATION, num_byzantine=0)
    findings = Audit(replace(PLAN, config=honest, rules=("Median()",), beside=("Mean()",)), tmp_path).run()
    assert findings.rules[0].verdict == "untested"
    assert findings.rules[0].worst is None
    assert findings.candidates == 0


def test_parts_that_the_budget_does_not_suffice_for_are_named(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0.0

    def slowly(configs: Sequence[Config], on_progress: training.OnProgress | None = None) -> Any:
        nonlocal clock
        clock += 25
        assert on_progress is not None
        on_progress(SimpleNamespace(done=0.5))  # pyright: ignore[reportArgumentType]
        return learner(configs, on_progress)

    monkeypatch.setattr(training, "train_all", slowly)
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    findings = Audit(PLAN, tmp_path, budget=150).run()
    assert "the search" in findings.cut_short
    assert findings.rules[0].worst is not None
    assert clock <= 150 + 25
    with pytest.raises(ValueError, match="budget of 10 s does not suffice to train the federation once"):
        Audit(PLAN, tmp_path / "another", budget=10).run()


def test_the_replay_command_is_the_federation(learner: Learner, tmp_path: Path) -> None:
    findings = Audit(replace(PLAN, rules=("Median()",), generations=1), tmp_path).run()
    worst = findings.rules[0].worst
    assert worst is not None
    words = shlex.split(findings.command(worst))
    assert words[:2] == ["byzpg", "train"]
    assert words[words.index("--attack") + 1] == worst.attack
    assert words[words.index("--aggregator") + 1] == "Median()"
    assert words[words.index("--horizon") + 1] == "20"
    assert words[words.index("--seed") + 1] == "2000"


# Real training


@pytest.mark.slow
def test_a_real_audit_finds_the_flaw_of_a_weakened_rule(tmp_path: Path) -> None:
    """The command, as users run it, on CartPole: the mean loses all, and the weak rule much more than the sound one."""
    (tmp_path / "weak.py").write_text(
        "import jax.numpy as jnp\nfrom byzpg.robust import aggregator\n\n\n"
        "@aggregator\ndef weak(received, num_byzantine):\n"
        "    cut = num_byzantine - 1\n    ranked = jnp.sort(received, axis=0)\n"
        "    return jnp.mean(ranked[cut : len(received) - cut], axis=0)\n"
    )
    options = "--algorithm ByzPG --trajectories 300 --generations 1 --population 5 --report-seeds 4 --budget none"
    command = ["audit", "--aggregator", "weak:weak", "TrimmedMean", "Mean", *options.split(), "--known", "AvgZero"]
    made = subprocess.run(
        [sys.executable, "-m", "byzpg", *command, "--no-breaking-point", "--directory", "audit"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    rows = {row["rule"]: row for row in json.loads((tmp_path / "audit" / "audit.json").read_text())["rules"]}
    assert rows["Mean()"]["verdict"] == "lost"
    weak, sound = (rows[name]["lost"]["value"] for name in ("weak:weak()", "TrimmedMean()"))
    assert weak > sound + 0.2
    assert "Replay the worst attack on weak:weak()" in made.stdout
    assert "<html" in (tmp_path / "audit" / "audit.html").read_text()
    assert "| `weak:weak` | " in (tmp_path / "audit" / "audit.md").read_text()
