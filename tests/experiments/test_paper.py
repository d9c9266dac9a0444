"""Named grids: what is in them, that runs share programs, and that a grid goes on where it was stopped."""

import shlex
import threading
import time
from ast import literal_eval
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jax
import numpy as np
import pytest

from byzpg import Config, training
from byzpg.cli.reproduce import Reproduce
from byzpg.config import PRESETS
from byzpg.experiments.paper import (
    COLLECTIONS,
    EXPERIMENTS,
    FIVE_ATTACKS,
    Scope,
    _TextBuilder,
    grid,
    published_curves,
    run_name,
)
from byzpg.federation import simulator
from byzpg.federation.simulator import Simulation
from byzpg.runs import Run, RunDirectory
from byzpg.training import Progress

# What is in a grid

PEERS = ("SVRPG", "N-PG-IGT", "FedPG-BR")
ATTACKED = ("fig2", "fig3", "fig5", "fig6")


@pytest.fixture(scope="module")
def everything() -> Any:
    return grid(["all", "beyond"], Scope())


# Trajectories per agent of the tuned preset: of federations, of one agent alone, and of peers.
LENGTHS = {"CartPole-v1": (600, 1200, 2000), "LunarLander-v3": (2000, 5000, 5000)}


def test_figures_have_the_papers_methods_and_published_curves(everything: Any) -> None:
    figures = [experiment for experiment in everything.experiments if experiment.name.startswith("fig")]
    assert [figure.name for figure in figures] == [f"fig{number}" for number in range(1, 7)]
    for figure in figures:
        for panel in figure.panels:
            assert panel.published is not None
            ours = [cell for cell in panel.cells if everything.settings[cell.run].algorithm not in PEERS]
            assert set(published_curves(*panel.published)) == {cell.label for cell in ours}
            assert len(panel.cells) - len(ours) == (1 if figure.name in ATTACKED else 2)
            for cell in panel.cells:
                settings = everything.settings[cell.run]
                method, _, setting = cell.label.partition(" K=")
                assert (settings.env, settings.algorithm) == (panel.task, method)
                assert settings.num_agents == int(setting.split()[0])
                assert settings.num_byzantine == (3 if "3/13" in setting else 0)
                if settings.num_byzantine:
                    assert type(settings.attack).__name__ == panel.title
                kind = 2 if settings.algorithm in PEERS else int(settings.num_agents == 1)
                assert (settings.seeds, settings.trajectories) == (tuple(range(2000, 2010)), LENGTHS[panel.task][kind])


def test_published_curves_are_known_where_they_can_be_seen() -> None:
    found = published_curves("fig2_cartpole_attacks_decbyzpg", "LargeNoise")
    assert set(found) == {
        *("PAGE-PG K=1 α=0", "Dec-PAGE-PG K=13 α=0", "Dec-PAGE-PG K=13 α=3/13", "DecByzPG K=13 α=3/13")
    }
    trajectories, returns = found["DecByzPG K=13 α=3/13"]
    np.testing.assert_array_equal(trajectories, np.arange(0, 8001, 250))
    assert (returns[0], returns[-1]) == (16.5, 493.8)
    trajectories, returns = found["Dec-PAGE-PG K=13 α=0"]  # behind another line at times, also at the end
    assert len(trajectories) == len(returns) == 30
    assert trajectories[-1] == 7750
    assert np.all(np.isfinite(returns))


def test_a_run_that_several_figures_share_is_there_once(everything: Any) -> None:
    shown = [cell.run for each in everything.experiments for panel in each.panels for cell in panel.cells]
    assert set(shown) == set(everything.settings)
    assert len(set(shown)) < len(shown)
    assert len({str(settings) for settings in everything.settings.values()}) == len(everything.settings)
    for name, settings in everything.settings.items():
        assert name == run_name(settings)


def test_tasks_and_collections_narrow_a_grid() -> None:
    cartpole = grid(["cartpole"], Scope())
    assert {settings.env for settings in cartpole.settings.values()} == {"CartPole-v1"}
    assert [each.name for each in cartpole.experiments] == ["fig1", "fig2", "fig4", "fig5"]
    assert len(cartpole.settings) == 24
    same = grid(["fig1", "fig2", "fig3", "fig4", "fig5"], Scope(), "CartPole-v1")
    assert same == cartpole
    one = grid(["fig2"], Scope("script", 3, 7, 90))
    assert {(each.preset, each.seeds, each.trajectories) for each in one.settings.values()} == {
        ("script", (7, 8, 9), 90)
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_every_figure(preset: Any) -> None:
    settings = grid(["all"], Scope(preset=preset)).settings.values()
    of_the_paper = ("PAGE-PG", "Fed-PAGE-PG", "ByzPG", "Dec-PAGE-PG", "DecByzPG")
    planned = {(each.env, each.algorithm) for each in settings}
    assert planned >= set(product(("CartPole-v1", "LunarLander-v3"), of_the_paper))
    assert {each.preset for each in settings} == {preset}
    assert preset == "tuned" or {each.trajectories for each in settings} == {8000}, "as long as the published curves"
    peers = set() if preset == "theory" else set(product(("CartPole-v1", "LunarLander-v3"), PEERS))
    assert {pair for pair in planned if pair[1] in PEERS} == peers, "no theorem of the paper has their step sizes"
    for accepting in (Scope, Reproduce):
        assert preset in get_args(get_type_hints(accepting)["preset"])


def test_the_papers_figures_compare_with_the_same_estimator_and_traces_has_the_whole_preset() -> None:
    """The algorithms of others were tuned without a trace decay."""
    made = grid(["all", "ablation", "momentum"], Scope())
    assert {str(each.estimator) for each in made.settings.values()} == {"GPOMDP(baseline='leave-one-out')"}
    whole = grid(["traces"], Scope())
    attacks = {"RandomAction", "LargeNoise", "AvgZero", None}
    assert {type(each.attack).__name__ if each.num_attackers else None for each in whole.settings.values()} == attacks
    for each in whole.settings.values():
        tuned: dict[str, Any] = {"env": "LunarLander-v3", "algorithm": each.algorithm, "attack": each.attack}
        same = Config(num_seeds=10, seed=each.seed, **tuned).resolved()
        assert each == same
        assert "trace_decay" in str(each.estimator)


def test_the_command_on_the_results_page_is_what_the_ablation_measures() -> None:
    page = (Path(__file__).parents[2] / "docs/results/README.md").read_text().replace("\\\n", " ")
    (command,) = [line for line in page.splitlines() if line.startswith("byzpg train")]
    _, _, *words = shlex.split(command)
    options = {
        flag.removeprefix("--").replace("-", "_"): text for flag, text in zip(words[::2], words[1::2], strict=True)
    }
    numbers = ("large_batch", "small_batch", "switch_probability", "step_size", "trajectories", "num_seeds", "seed")
    given = {
        name: literal_eval(text) if name in (*numbers, "momentum", "adam_epsilon") else text
        for name, text in options.items()
    }
    made = grid(["ablation"], Scope())
    cells = {cell.run: cell.label for panel in made.experiments[0].panels for cell in panel.cells}
    assert cells[run_name(Config.of(given, "the results page").resolved())] == "PAGE, gated by health"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((["fig7"], Scope()), ["no experiment 'fig7'", "fig1", "cartpole"]),
        ((["fig2"], Scope(), "LunarLander-v3"), ["none of these experiments", "LunarLander-v3"]),
        ((["fig2"], Scope(num_seeds=-1)), ["num_seeds must be at least 1"]),
    ],
)
def test_bad_grids(arguments: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"experiment|must be") as error:
        grid(*arguments)
    assert all(word in str(error.value) for word in words)


def test_every_name_is_an_experiment() -> None:
    for members, _ in COLLECTIONS.values():
        assert set(members) <= set(EXPERIMENTS)


def test_joining_has_one_agent_and_federations_with_a_quarter_attacking() -> None:
    made = grid(["joining"], Scope(num_seeds=2))
    (experiment,) = made.experiments
    assert [(panel.title, panel.task, panel.level) for panel in experiment.panels] == [
        (attack, "LunarLander-v3", 200) for attack in FIVE_ATTACKS
    ]
    for panel in experiment.panels:
        planned = [(cell.label, cell.at, made.settings[cell.run]) for cell in panel.cells]
        assert [(label, at) for label, at, _ in planned] == [
            ("PPO alone", 1),
            *((label, size) for size in (2, 5, 13) for label in ("DecByzPPO", "Dec-PPO")),
            ("DecByzPPO", 25),
        ]
        for label, size, settings in planned:
            assert settings.algorithm == label.removesuffix(" alone")
            assert (settings.num_agents, settings.num_seeds) == (size, 2)
            attackers = {1: 0, 2: 0, 5: 1, 13: 3, 25: 6}[settings.num_agents]
            assert (settings.num_byzantine, settings.num_attackers) == (attackers, attackers)
            assert type(settings.attack).__name__ == (panel.title if attackers else "NoAttack")
            alone = Config(env="LunarLander-v3", algorithm=settings.algorithm).resolved()
            assert (settings.steps, settings.ppo) == (alone.steps, alone.ppo)
    # Runs without attackers are shared by all panels.
    assert len(made.settings) == 1 + 2 + 5 * (2 * 2 + 1)


@pytest.mark.parametrize(
    ("task", "level"),
    [
        ("CartPole-v1", 475),
        ("gymnasium:CartPole-v1", 475),
        ("Acrobot-v1", -85),
        ("Pendulum-v1", -200),
        ("envpool:HalfCheetah-v4", 3000),
    ],
)
def test_joining_on_other_tasks(task: str, level: float) -> None:
    (experiment,) = _planned_without_runs("joining", task)
    assert {(panel.task, panel.level) for panel in experiment.panels} == {(task, level)}


def _planned_without_runs(name: str, task: str) -> list[Any]:
    """An experiment whose runs are not resolved: tasks on the host need not work with every algorithm."""
    return [EXPERIMENTS[name](_TextBuilder(Scope(), task))]


def test_joining_needs_a_level_and_the_tuned_preset() -> None:
    with pytest.raises(ValueError, match=r"a return that counts as learned, and AliasedStates-v1 has none: .*Acrobot"):
        grid(["joining"], Scope(), "AliasedStates-v1")
    with pytest.raises(ValueError, match="preset = paper is for the paper's algorithms, not for PPO: use tuned"):
        grid(["joining"], Scope(preset="paper"))
    steps = grid(["joining"], Scope(steps=2048), "CartPole-v1").settings.values()
    assert {each.steps for each in steps} == {2048}


# Runs that share programs

TINY = Config(hidden=(4,), horizon=20, large_batch=4, num_seeds=2, trajectories=80)
CONFIGS = {
    "attackers": replace(TINY, num_agents=5, attack="RandomAction", aggregator="TrimmedMean", rounds=1),
    "honest": replace(TINY, algorithm="ByzPG", num_agents=3, num_byzantine=0),
    "other-step": replace(TINY, algorithm="PAGE-PG", step_size=0.5),
    # It shares no program with the runs above; after the crash below, other-step goes on with this one's.
    "other-length": replace(TINY, algorithm="PAGE-PG", step_size=0.5, trajectories=84),
}


def laid_down(folder: Path) -> list[Path]:
    for name, config in CONFIGS.items():
        RunDirectory.create(folder / name, config.resolved())
    return [folder / name for name in CONFIGS]


@pytest.fixture(scope="module")
def sizes() -> Iterator[list[int]]:
    """How many federations each simulation that ran had, block by block."""
    found: list[int] = []
    run = Simulation.run

    def watched(self: Simulation, *arguments: Any, **options: Any) -> Any:
        found.append(len(self.federations))
        return run(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Simulation, "run", watched)
        yield found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> tuple[list[Path], list[Progress]]:
    directories, heard = laid_down(tmp_path_factory.mktemp("grid")), []
    training.resume_all(directories, heard.append)
    return directories, heard


def assert_same(one: Run, other: Run) -> None:
    assert one.settings == other.settings
    for name, values in one.metrics.items():
        np.testing.assert_array_equal(values, other.metrics[name], err_msg=name)
    np.testing.assert_array_equal(one.parameters["last"], other.parameters["last"])


def test_runs_share_programs_and_say_how_far_they_are(finished: Any, sizes: list[int]) -> None:
    directories, heard = finished
    assert sorted(set(sizes)) == [1, 3]
    assert all(training.load(directory).complete for directory in directories)
    done = [progress.done for progress in heard]
    assert done == sorted(done)
    assert done[-1] == 1
    assert {progress.label for progress in heard} == {"program 1 of 2 (3 runs), ", "program 2 of 2 (1 runs), "}
    seconds = [progress.seconds for progress in heard]
    assert seconds == sorted(seconds)


@pytest.mark.slow
def test_programs_are_compiled_in_the_background(
    finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a GPU trains: each program once, by threads of its own, and runs stay the same."""
    block: Any = simulator._run_block
    block.clear_cache()
    compiled = []

    def listen(event: str, duration_secs: float, **about: Any) -> None:
        if event.endswith("backend_compile_duration") and "_run_block" in about["fun_name"]:
            compiled.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        monkeypatch.setitem(training.COMPILED_AT_ONCE, "cpu", 2)
        directories = laid_down(tmp_path)
        training.resume_all(directories)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) == 2
    assert all(name.startswith(training.COMPILING) for name in compiled)
    for ours, theirs in zip(directories, finished[0], strict=True):
        assert_same(training.load(ours), training.load(theirs))


@pytest.mark.slow
def test_training_says_what_compiling_in_the_background_could_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Simulation, *arguments: Any, **options: Any) -> Any:
        raise ValueError("no memory")

    monkeypatch.setitem(training.COMPILED_AT_ONCE, "cpu", 2)
    directories = laid_down(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "compiled", fail)
        training.resume_all(directories[:1] + directories[-1:])  # which compiles them itself
        patch.setattr(Simulation, "run", fail)
        with pytest.raises(ValueError, match="no memory"):
            training.resume_all(directories)
    deadline = time.monotonic() + 60
    while training.is_compiling() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not training.is_compiling()


def test_what_runs_of_one_program_have_in_common() -> None:
    """Agents that play alike, seeds, coin and length; not the number of agents, the attack or the estimator."""

    def program(**options: Any) -> Any:
        config = replace(TINY, algorithm="ByzPG", num_agents=5, switch_probability=0.5, small_batch=2)
        return training._Pending(replace(config, **options).resolved(), None, None).program

    ours = program()
    for same in ({"num_agents": 3}, {"attack": "IPM"}, {"aggregator": "Krum"}, {"gate": 0.0}, {"optimizer": "sgd"}):
        assert program(**same) == ours, same
    for other in (
        {"seed": 1},
        {"num_seeds": 3},
        {"trajectories": 81},
        {"switch_probability": 0.4},
        {"conventions": "AuthorsScript(initialization=False, memory=False)"},
        {"small_batch": 3},
        {"large_batch": 5},
        {"horizon": 19},
        {"hidden": (5,)},
        {"conventions": "AuthorsScript(coin=False, memory=False)"},
        {"env": "Pendulum-v1", "horizon": 20},
    ):
        assert program(**other) != ours, other


@pytest.mark.slow
def test_a_crash_between_the_checkpoints_of_a_program(finished: Any, tmp_path: Path, sizes: list[int]) -> None:
    """What was saved goes on from there, the rest from before: up to rounding, the same runs."""
    directories = laid_down(tmp_path)[:3]
    write, written = RunDirectory.write_checkpoint, []

    def dying(self: RunDirectory, checkpoint: Any) -> None:
        if written:
            raise SystemError("the power is gone")
        written.append(self.path)
        write(self, checkpoint)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "CHECKPOINT_SECONDS", -1.0)
        patch.setattr(RunDirectory, "write_checkpoint", dying)
        with pytest.raises(SystemError):
            training.resume_all(directories)
    sizes.clear()
    training.resume_all(directories)
    assert set(sizes) == {1, 2}
    for ours, theirs in zip(directories, finished[0], strict=False):
        np.testing.assert_allclose(training.load(ours).returns[:, :9], training.load(theirs).returns[:, :9], rtol=1e-3)


def test_a_stopped_grid_goes_on_and_finished_runs_are_left_alone(
    finished: Any, tmp_path: Path, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "iterations_to_run", lambda pace: training.BLOCK)
    directories = laid_down(tmp_path)

    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.resume_all(directories, stop)
    sizes.clear()
    training.resume_all(directories)
    assert 0 < sizes.count(3) < 3, "it went on from the first block of three"
    for ours, theirs in zip(directories, finished[0], strict=True):
        assert_same(training.load(ours), training.load(theirs))
    sizes.clear()
    training.resume_all(directories)
    assert sizes == []


def test_batches_that_would_not_fit_the_memory_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "gpu" if jax.default_backend() == "gpu" else "cpu"
    monkeypatch.setitem(training.LARGEST_BATCH, kind, 2 * 2 * 4 * 20)
    configs = [replace(CONFIGS["other-step"], step_size=step_size) for step_size in (0.1, 0.2, 0.3, 0.4)]
    pending = [training._Pending(config.resolved(), None, None) for config in configs]
    parts = list(training._parts(pending))
    assert [len(part) for part in parts] == [2, 2]
    assert sorted(each.settings.step_size for part in parts for each in part) == [0.1, 0.2, 0.3, 0.4]
