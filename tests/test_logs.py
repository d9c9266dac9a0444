"""Reports of iterations, the logs that keep them, tables and scores of runs."""

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from byzpg import Config, Run, load, resume, train
from byzpg.experiments.results import Result
from byzpg.experiments.summaries import final_returns, scores_by_algorithm, write_scores
from byzpg.federation.metrics import METRICS
from byzpg.logs import Report, open_log
from byzpg.training import resume_all

# Seeds toss coins of their own, so they are not at the same iteration.
CONFIG = Config(
    algorithm="DecByzPG",
    num_agents=4,
    num_byzantine=0,
    num_seeds=2,
    seed=7,
    hidden=(4,),
    large_batch=4,
    small_batch=2,
    switch_probability=0.5,
    trajectories=80,
    horizon=10,
)
LOGS = ("jsonl", "tensorboard", "wandb")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


class StopError(Exception):
    """What a callback of a test raises."""


@cache
def whole_run() -> tuple[Run, list[Report]]:
    """The run without an interruption, and its reports."""
    reports: list[Report] = []
    return train(CONFIG, on_iteration=reports.append), reports


def rows_of(run: Run) -> list[dict[str, Any]]:
    return run.to_dataframe().to_dict("records")  # pyright: ignore[reportReturnType]


def assert_same_rows(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """The same rows in any order, with None in place of NaN."""
    assert len(ours) == len(theirs)
    in_order = (sorted(rows, key=lambda row: (row["seed"], row["iteration"])) for rows in (ours, theirs))
    for one, other in zip(*in_order, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            np.testing.assert_equal(np.nan if value is None else value, other[name])


# Reports


def test_reports_are_the_iterations_of_the_run_in_order() -> None:
    run, reports = whole_run()
    assert [report.number for report in reports] == list(range(len(reports)))
    assert not all(report.took_part.all() for report in reports), "a seed waits where coins differ"
    assert set(reports[0].metrics) == set(METRICS)
    assert reports[0].seeds == (7, 8)
    assert_same_rows([row for report in reports for row in report.rows()], rows_of(run))
    for index in range(2):
        assert [report.iteration[index] for report in reports if report.took_part[index]] == [
            *range(run.num_iterations[index])
        ]
        waits = [report for report in reports if not report.took_part[index]]
        assert all(np.isnan(report.metrics["return_mean"][index]) for report in waits)


def test_a_table_has_the_metrics_of_the_run() -> None:
    run, _ = whole_run()
    table = run.to_dataframe()
    assert list(table.columns) == ["seed", "iteration", "trajectories", "large", *run.metrics]
    assert len(table) == run.num_iterations.sum()
    of_second = table[table["seed"] == 8]
    done = run.num_iterations[1]
    np.testing.assert_array_equal(of_second["trajectories"], run.trajectories[1, :done])
    np.testing.assert_array_equal(of_second["large"], run.large[1, :done])
    np.testing.assert_allclose(of_second["return_mean"], run.returns[1, :done])


@pytest.mark.slow
def test_what_a_callback_raises_ends_the_run_and_nothing_is_lost(tmp_path: Path) -> None:
    path, seen = tmp_path / "run", []

    def stop(report: Report) -> None:
        seen.append(report)
        if report.number == 10:
            raise StopError

    with pytest.raises(StopError):
        train(CONFIG, path, on_iteration=stop, log=LOGS)
    assert len(seen) == 11
    part = load(path)
    assert not part.complete
    done = int(part.num_iterations.sum())
    assert_same_rows(read_jsonl(path), rows_of(part))
    # A process that is killed while it writes leaves part of a line, or all of it but its end.
    whole = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(whole[:-1])
    resumed = open_log("jsonl", path, part.settings)
    resumed.close()
    assert whole.startswith((path / "metrics.jsonl").read_text())
    assert (path / "metrics.jsonl").read_text().endswith("}\n")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"seed": 7, "iter')
    later: list[Report] = []
    run = resume(path, on_iteration=later.append, log=LOGS)
    assert sum(len(report.rows()) for report in later) == run.num_iterations.sum() - done
    assert_same_rows(rows_of(run), rows_of(whole_run()[0]))
    assert_same_rows(read_jsonl(path), rows_of(run))
    points = sorted(read_tensorboard(path))
    assert len(points) == len(set(points))
    assert points == sorted(
        (f"return_mean/seed_{row['seed']}", row["trajectories"], np.float32(row["return_mean"])) for row in rows_of(run)
    )
    logged = [values for values in read_wandb(path) if "return_mean/seed_8" in values]
    assert [values["return_mean/seed_8"] for values in logged] == run.returns[1, : run.num_iterations[1]].tolist()
    steps = [values["_step"] for values in read_wandb(path)]
    assert steps == list(range(len(steps)))


def test_a_log_that_is_asked_for_later_begins_with_the_first_iteration(tmp_path: Path) -> None:
    def stop(report: Report) -> None:
        raise StopError

    with pytest.raises(StopError):
        train(CONFIG, tmp_path / "run", on_iteration=stop)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    resume(tmp_path / "run", log=["jsonl"])
    assert_same_rows(read_jsonl(tmp_path / "run"), rows_of(whole_run()[0]))
    # The same of a complete run, alone or among several; what is there is not written twice.
    (tmp_path / "run" / "metrics.jsonl").unlink()
    resume_all([tmp_path / "run"], log=["jsonl"])
    resume(tmp_path / "run", log=["jsonl"])
    assert_same_rows(read_jsonl(tmp_path / "run"), rows_of(whole_run()[0]))


def test_a_log_goes_on_where_a_finished_run_is_extended(tmp_path: Path) -> None:
    run = train(CONFIG, tmp_path / "run", log=["jsonl"])
    assert_same_rows(read_jsonl(tmp_path / "run"), rows_of(run))
    longer = resume(tmp_path / "run", trajectories=100, log=["jsonl"])
    assert_same_rows(read_jsonl(tmp_path / "run"), rows_of(longer))


def test_a_log_that_fails_ends_the_run_after_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, *_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("byzpg.logs._JSONLines.write", full)
    with pytest.raises(OSError, match="No space left"):
        train(CONFIG, tmp_path / "run", log=["jsonl"])
    monkeypatch.undo()
    resume(tmp_path / "run", log=["jsonl"])
    assert_same_rows(read_jsonl(tmp_path / "run"), rows_of(whole_run()[0]))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def read_tensorboard(path: Path) -> Iterator[tuple[str, int, np.float32]]:
    """The points of the metric return_mean."""
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    for file in (path / "tensorboard").glob("events*"):
        data = file.read_bytes()
        place = 0
        while place < len(data):  # records: length, checksum, event, checksum
            size = int.from_bytes(data[place : place + 8], "little")
            event = Event.FromString(data[place + 12 : place + 12 + size])
            place += 16 + size
            for value in event.summary.value:
                if value.tag.startswith("return_mean/"):
                    yield value.tag, event.step, np.float32(value.simple_value)


def read_wandb(path: Path) -> list[dict[str, Any]]:
    """The rows of all offline runs, in the order in which they were started."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    rows = []
    for file in sorted((path / "wandb").glob("offline-run-*/*.wandb")):
        data, whole, place = file.read_bytes(), b"", 7
        while place < len(data):  # a log of LevelDB: parts of records in blocks of 32 KiB
            if (left := -place % 2**15) and left < 7:
                place += left
                continue
            size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
            whole += data[place + 7 : place + 7 + size]
            place += 7 + size
            if kind in (1, 4):  # the whole record, or its last part
                history = Record.FromString(whole).history.item
                if history:
                    rows.append({"/".join(item.nested_key): json.loads(item.value_json) for item in history})
                whole = b""
    return rows


# Errors


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["csv"], "there is no log 'csv'; known: jsonl, tensorboard, wandb"),
        (["tensorboard"], r"the log tensorboard needs a package: pip install .*\[tensorboard\]"),
        (["wandb"], r"the log wandb needs a package: pip install .*\[wandb\]"),
    ],
)
def test_logs_that_cannot_be_written_are_refused_before_anything_is(
    names: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=message):
        train(CONFIG, tmp_path / "run", log=names)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=message):
        open_log(names[0], tmp_path, CONFIG.resolved())


def test_a_log_needs_a_directory_and_a_table_needs_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"log = \['jsonl'\] needs a directory"):
        train(CONFIG, log=["jsonl"])
    with pytest.raises(ValueError, match=r"log must be a list: log = \['jsonl'\]"):
        train(CONFIG, log="jsonl")
    run, _ = whole_run()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ValueError, match=r"to_dataframe needs pandas: pip install .*\[pandas\]"):
        run.to_dataframe()


# The documented table


def test_every_metric_is_documented_with_its_unit() -> None:
    page = (Path(__file__).parent.parent / "docs" / "reference" / "metrics.md").read_text()
    units = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \| [^|]+ \|$", page, re.MULTILINE))
    on_flower = {"stepped", "usable_replies"}
    assert set(units) == {"seed", "iteration", "trajectories", "steps", "large", *METRICS, *on_flower}
    assert all(unit.strip() for unit in units.values())


# Scores


def result_of(env: str, seed: int, num_seeds: int, level: float, **options: Any) -> Result:
    settings = Config(env=env, seed=seed, num_seeds=num_seeds, horizon=10, **options).resolved()
    returns = level + np.arange(num_seeds)[:, None] + np.zeros(20)
    return Result(settings, np.arange(1, 21), {"return_mean": returns})


def test_scores_have_a_row_per_seed_and_a_column_per_task(tmp_path: Path) -> None:
    results = {
        "a": result_of("Pendulum-v1", 0, 3, -10.0),
        "b": result_of("CartPole-v1", 0, 2, 20.0),
        "c": result_of("CartPole-v1", 5, 1, 40.0),
    }
    scores, tasks = scores_by_algorithm(results, ["ours"] * 3)
    assert tasks == ["CartPole-v1", "Pendulum-v1"]
    np.testing.assert_array_equal(scores["ours"], [[20, -10], [21, -9], [40, -8]])
    np.testing.assert_array_equal(final_returns(results["a"]), scores["ours"][:, 1])
    scores["ours"][0, 0] = np.nan
    write_scores(scores, tmp_path / "scores.json")
    read = {name: np.array(rows, float) for name, rows in json.loads((tmp_path / "scores.json").read_text()).items()}
    np.testing.assert_array_equal(read["ours"], scores["ours"])


@pytest.mark.parametrize(
    ("other", "label", "message"),
    [
        (("CartPole-v1", 0, 2, 0.0), "ours", "first and other have seeds in common"),
        (
            ("CartPole-v1", 2, 2, 0.0, 3e-3),
            "ours",
            "first and other are both 'ours' on CartPole-v1, but with other opt",
        ),
        (("Pendulum-v1", 0, 3, 0.0), "ours", "'ours' has 2 on CartPole-v1, 3 on Pendulum-v1"),
        (("Pendulum-v1", 0, 2, 0.0), "theirs", "'ours' has 2 on CartPole-v1, 0 on Pendulum-v1"),
    ],
)
def test_scores_that_fit_no_table_are_refused(other: tuple[Any, ...], label: str, message: str) -> None:
    options = {"step_size": other[4]} if len(other) > 4 else {}
    results = {"first": result_of("CartPole-v1", 0, 2, 0.0), "other": result_of(*other[:4], **options)}
    with pytest.raises(ValueError, match=message):
        scores_by_algorithm(results, ["ours", label])
