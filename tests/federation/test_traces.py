"""Traced programs that are kept on the disk: they are found, they compute the same, and nothing else is found."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import byzpg
from byzpg.config import Config
from byzpg.envs.jax_tasks import LibraryTask
from byzpg.envs.spaces import Discrete
from byzpg.federation import simulator, traces
from byzpg.federation.simulator import LARGE, SKIP, Simulation
from byzpg.robust import RFA, Mean
from byzpg.robust.components import Component

MEAN = Mean()
OF_A_LIBRARY = LibraryTask("gymnax:CartPole-v1", 4, Discrete(2), 500)
TRACED: list[str] = []


@partial(jax.jit, static_argnums=(2, 3), donate_argnums=0)
def program(state: dict[str, Array], step: Array, rule: Component, calls_python: bool) -> tuple[Any, tuple[Array, ...]]:
    TRACED.append(str(rule))
    if calls_python:
        step = jax.pure_callback(lambda value: value, jax.ShapeDtypeStruct((), jnp.float32), step)
    following = state["vectors"] + step
    return {"vectors": following}, (jnp.sum(following), jnp.linalg.norm(following))


def results(
    rule: Component = MEAN, size: int = 3, *, dtype: Any = jnp.float32, calls_python: bool = False
) -> list[np.ndarray]:
    """What the program gives in a process that has not run it yet."""
    traces._ready.clear()
    jax.clear_caches()
    arguments = {"vectors": jnp.arange(float(size))}, jnp.asarray(2, dtype)
    found = traces.ready(program, (rule, calls_python), arguments, {})
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found(*arguments))]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = traces._directory
    traces.keep_in(tmp_path / "traces")
    TRACED.clear()
    yield tmp_path / "traces"
    traces.keep_in(before)
    traces._ready.clear()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


def test_a_program_is_traced_once_for_all_processes(folder: Path) -> None:
    first = results()
    for again in (results(), results()):
        np.testing.assert_equal(again, first)
    np.testing.assert_equal(first, [[2, 3, 4], 9, np.float32(np.sqrt(29))])
    assert len(TRACED) == len(files(folder)) == 1


@pytest.mark.parametrize(
    "changed",
    [
        partial(results, RFA(max_iterations=3)),
        partial(results, RFA(), size=4),
        partial(results, RFA(), dtype=jnp.int32),
    ],
    ids=["other options", "other shapes", "other types"],
)
def test_another_program_is_traced_by_itself(folder: Path, changed: Callable[[], object]) -> None:
    results(RFA())
    changed()
    assert len(TRACED) == len(files(folder)) == 2


def test_another_version_is_another_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results()
    monkeypatch.setattr(traces, "_surroundings", lambda: "another version")
    results()
    assert len(TRACED) == len(files(folder)) == 2


def test_what_counts_as_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> str:
        traces._versions.cache_clear()
        return traces._surroundings()

    monkeypatch.setattr(byzpg, "__file__", str(tmp_path / "__init__.py"))
    here = {told()}
    (tmp_path / "folder").mkdir()
    for name in ("module.py", "folder/module.py"):
        (tmp_path / name).write_text("added = 1")
        here.add(told())
        (tmp_path / name).write_text("added = 2")
        here.add(told())
        (tmp_path / name).unlink()
    for setting in (jax.numpy_rank_promotion("raise"), jax.default_matmul_precision("highest")):
        with setting:
            here.add(told())
    monkeypatch.setattr(jax, "devices", lambda: ["others"])
    here.add(told())
    traces._versions.cache_clear()
    assert len(here) == 8


def test_settings_count_in_the_same_process(folder: Path) -> None:
    traces._ready.clear()
    arguments = {"vectors": jnp.arange(3.0)}, jnp.float32(2)
    plain = traces.ready(program, (MEAN, False), arguments, {})
    assert traces.ready(program, (MEAN, False), arguments, {}) is plain
    with jax.default_matmul_precision("highest"):
        assert traces.ready(program, (MEAN, False), arguments, {}) is not plain


@dataclass(frozen=True)
class Outside(Mean):
    """A rule from outside byzpg, whose code may change from one process to the next."""


def test_nothing_is_kept_of_code_from_outside(folder: Path) -> None:
    np.testing.assert_equal(results(Outside()), results(Outside()))
    assert len(TRACED) == 2
    assert not files(folder)


@pytest.mark.parametrize("value", [jnp.sum, len, object(), [1], Mean, Config, OF_A_LIBRARY])
def test_values_that_text_cannot_tell(value: object) -> None:
    with pytest.raises(traces._UnknownError):
        traces._text(((value,),))


def test_a_program_that_calls_python_is_not_kept(folder: Path) -> None:
    np.testing.assert_equal(results(calls_python=True), results())
    assert len(TRACED) == 2
    assert len(files(folder)) == 1


def test_a_damaged_file_is_replaced(folder: Path) -> None:
    first = results()
    (file,) = files(folder)
    whole = file.read_bytes()
    for damaged in (b"", b"x", whole[:1000], whole[:-1000]):
        file.write_bytes(damaged)
        TRACED.clear()
        np.testing.assert_equal(results(), first)
        assert len(TRACED) == 1
        assert len(file.read_bytes()) == len(whole)


def test_the_programs_used_least_recently_make_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MOST_KEPT", 2)
    for size in (1, 2, 1, 3):
        results(size=size)
    assert len(files(folder)) == 2
    TRACED.clear()
    results(size=1)
    assert not TRACED


def test_where_nothing_can_be_written_programs_are_traced(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "traces").touch()
    np.testing.assert_equal(results(), results())
    assert len(TRACED) == 2


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_a_federation_learns_the_same_without_tracing(
    seeds: tuple[int, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(num_agents=5, num_byzantine=1, large_batch=4, small_batch=2, horizon=8, num_seeds=len(seeds))
    simulation = Simulation((config.resolved().federation(),), seeds)

    def learned() -> list[np.ndarray]:
        traces._ready.clear()
        states, _ = simulation.run(simulation.start(), [LARGE, SKIP], 1, only_large=True)
        states, metrics = simulation.run(states, [LARGE, SKIP], 2, only_large=True)
        return [np.asarray(leaf) for leaf in jax.tree.leaves((states, metrics))]

    traces.keep_in(None)
    alone = learned()
    traces.keep_in(folder)
    first = learned()
    assert len(files(folder)) == 1  # for both blocks
    jax.clear_caches()
    monkeypatch.setattr(simulator, "_iterate_block", None)  # so that tracing it would fail
    again = learned()
    np.testing.assert_equal(first, alone)
    np.testing.assert_equal(again, alone)
    other = replace(simulation, seeds=(*seeds, 2))
    with pytest.raises(TypeError):
        other.run(other.start(), [LARGE, SKIP], 1, only_large=True)
