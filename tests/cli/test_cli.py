"""The command line, started as a user starts it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from forking import Forked
from live_federation import until
from matplotlib import pyplot
from PIL import Image, ImageSequence
from rich.console import Console
from rich.table import Table

from byzpg import Config, __version__, cli, envs, load
from byzpg._install import install
from byzpg._registry import FAMILIES, members, summary
from byzpg.cli import reproduce
from byzpg.cli.console import Output, console
from byzpg.cli.labels import curves
from byzpg.cli.parsing import BASIC
from byzpg.cli.tables import BEST, LAST_TENTH, SOLVED, WEIGHT, runs_table
from byzpg.cli.train import free_directory
from byzpg.envs import host
from byzpg.experiments import figures, paper
from byzpg.experiments.results import Result, Results
from byzpg.experiments.statistics import mean_and_deviation, significant
from byzpg.experiments.summaries import attacker_weight, best_return, final_returns
from byzpg.federation.algorithms import ALGORITHMS
from byzpg.federation.devices import Hardware
from byzpg.runs import Checkpoint, Run, RunDirectory

Here = Callable[..., subprocess.CompletedProcess[str]]
START = [sys.executable, "-c", "from byzpg.cli import main; main()"]
OPTIONS = """
algorithm = "ByzPG"
aggregator = "RFA"
num_agents = 5
num_seeds = 3
hidden = [4]
large_batch = 6
small_batch = 2
switch_probability = 0.2
horizon = 20
trajectories = 9999
"""


@pytest.fixture(autouse=True, scope="module")
def wide() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "150")
        patch.setattr(console, "_width", 150)
        patch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Runs a command in this process and an empty folder, where Python and its modules are loaded already."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["byzpg", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return subprocess.CompletedProcess(sys.argv, code, *capsys.readouterr())

    return run


def forked(*arguments: object, folder: Path, **environment: str) -> Forked:
    """A command in a process of its own; `said` reads what it says."""
    with (folder / "out").open("w") as out, (folder / "err").open("w") as errors:
        return Forked(*arguments, stdout=out, stderr=errors, folder=folder, **environment)


def said(folder: Path) -> tuple[str, str]:
    return (folder / "out").read_text(), (folder / "err").read_text()


def byzpg(*arguments: str | Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*START, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | environment,
        check=False,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder in which a user has trained, and what the command said; the options come from a file and the line."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "tiny.toml").write_text(OPTIONS)
    options = ["--trajectories", "60", "--attack", "sign-flip", "--log", "jsonl"]
    done = byzpg("train", "--config", "tiny.toml", *options, folder=folder)
    return folder, done


@pytest.fixture(scope="module")
def run(trained: tuple[Path, subprocess.CompletedProcess[str]]) -> Path:
    return trained[0] / "runs" / "CartPole-v1-ByzPG-SignFlip-1"


# Training


def test_train_trains_compares_and_concludes(trained: tuple[Path, subprocess.CompletedProcess[str]], run: Path) -> None:
    folder, done = trained
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    where = run.relative_to(folder)
    about = "5 agents, 1 of them attacking (SignFlip); 3 seeds, 60 trajectories per agent; preset tuned"
    for line in (
        f"Training on CartPole-v1: {about}\n",
        f"  ByzPG with RFA → {where}\n",
        f"  Fed-PAGE-PG with plain averaging → {where}/plain-averaging\n",
        "Return of honest agents (mean ± standard deviation over seeds)",
        f"Learning curves:  {where}/curves.png\n",
        f"Watch it play:    byzpg play {where}\n",
        f"Load in Python:   byzpg.load('{where}')\n",
    ):
        assert line in done.stdout
    ours, naive = load(run), load(run / "plain-averaging")
    total = int(np.mean(ours.trajectories[:, -1]))
    assert re.search(
        rf"^{total} of {total} trajectories per agent, return [\d.]+ \(100% done after \d+ s\)$",
        done.stdout,
        re.MULTILINE,
    )
    rows = [re.split(r"\s{2,}", line.strip()) for line in done.stdout.splitlines() if " never " in line]
    ends = []
    for run_of, row in zip((ours, naive), rows, strict=True):
        late = final_returns(Result.of(run_of))
        ends.append(significant(late.mean()))
        assert run_of.settings.algorithm in row[0]
        assert row[1] == mean_and_deviation(late)
        best, weight = best_return(Result.of(run_of)), attacker_weight(Result.of(run_of))
        assert row[2:] == [significant(best), "never", f"{weight:.1%}"]
    assert f"With 1 of 5 agents attacking, ByzPG ends at {ends[0]} and plain averaging at {ends[1]}.\n" in done.stdout
    with Image.open(run / "curves.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > 1000


def test_options_on_the_line_come_before_those_in_the_file(run: Path) -> None:
    ours, naive = load(run), load(run / "plain-averaging")
    tiny = Config(
        algorithm="ByzPG",
        aggregator="RFA",
        num_agents=5,
        num_seeds=3,
        hidden=(4,),
        large_batch=6,
        small_batch=2,
        switch_probability=0.2,
        horizon=20,
        trajectories=60,
        attack="SignFlip",
    )
    assert ours.settings == tiny.resolved()
    assert naive.settings == replace(tiny, algorithm="Fed-PAGE-PG", aggregator=None).resolved()
    assert ours.complete
    assert naive.complete
    assert ours.parameters["last"].shape == (3, 1, 30)  # a server's
    command = json.loads((run / "provenance.json").read_text())["command"]
    assert command[1:7] == ["train", "--config", "tiny.toml", "--trajectories", "60", "--attack"]


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    """Even if a block never ends: its first step waits for a file that does not come."""
    options = ["--env", "host_tasks:patient", "--num-agents", "2", "--num-byzantine", "0", "--num-seeds", "1"]
    told = {"BYZPG_WAIT": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent.parent)}
    training = forked("train", "--directory", "run", *options, folder=tmp_path, **told)
    until(lambda: (tmp_path / "process").exists() or training.poll() is not None, "it is in the midst of a block")
    training.send_signal(signal.SIGINT)
    until(lambda: "Stopping after this block" in said(tmp_path)[0], "it says that it will stop")
    training.send_signal(signal.SIGINT)
    assert training.wait() == 130
    importing = "Importing the module 'host_tasks' for the task 'host_tasks:patient'.\n"
    assert said(tmp_path)[1] == importing + "Stopped. Continue with: byzpg resume run\n"
    assert not (tmp_path / "run" / "checkpoint.npz").exists()


def test_ctrl_c_stops_gracefully_and_resume_does_the_rest(run: Path, tmp_path: Path) -> None:
    """From the configuration of the run above, so that both can be compared to the bit."""
    training = forked("train", "--config", run / "config.json", "--directory", "again", folder=tmp_path)
    first = until(lambda: said(tmp_path)[0], "it has begun")
    training.send_signal(signal.SIGINT)
    assert training.wait() == 130, said(tmp_path)
    assert "Training on CartPole-v1" in first
    out, errors = said(tmp_path)
    assert "Stopping after this block of iterations. Press Ctrl-C again to stop at once." in out
    assert errors == "Stopped. Continue with: byzpg resume again\n"
    stopped = load(tmp_path / "again")
    assert (stopped.complete, stopped.returns.shape[1]) == (False, 1)  # it was still compiling: then comes one alone
    assert not (tmp_path / "again" / "curves.png").exists()

    assert forked("resume", "again", folder=tmp_path, JAX_LOG_COMPILES="1").wait() == 0, said(tmp_path)
    out, errors = said(tmp_path)
    assert "_run_block" in errors  # the control of the test of bad input, which asserts the contrary
    assert "byzpg play again\n" in out
    assert (tmp_path / "again" / "curves.png").read_bytes().startswith(b"\x89PNG")
    for part in (".", "plain-averaging"):
        once, twice = load(run / part), load(tmp_path / "again" / part)
        assert twice.complete
        assert once.settings == twice.settings
        for ours, theirs in ((once.metrics, twice.metrics), (once.parameters, twice.parameters)):
            assert {name: values.tobytes() for name, values in ours.items()} == {
                name: values.tobytes() for name, values in theirs.items()
            }


def test_the_next_run_gets_the_next_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Config().resolved()
    assert free_directory(settings) == Path("runs/CartPole-v1-DecByzPG-AvgZero-1")
    for _ in range(2):
        RunDirectory.create(free_directory(settings), settings)
    assert free_directory(settings) == Path("runs/CartPole-v1-DecByzPG-AvgZero-3")
    assert free_directory(Config(algorithm="PAGE-PG").resolved()) == Path("runs/CartPole-v1-PAGE-PG-NoAttack-1")


# Looking at runs


def test_plot_compares_runs(run: Path, tmp_path: Path, here: Here) -> None:
    done = here("plot", run, run / "plain-averaging", "--output", "both.svg", "--title", "Ours [1]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Plot: both.svg" in done.stdout
    assert list(contents(tmp_path)) == ["both.svg"]
    # Matplotlib draws letters as shapes, and notes the texts in comments.
    texts = set(re.findall(r"<!-- (.*) -->", (tmp_path / "both.svg").read_text()))
    assert {"ByzPG with RFA", "Fed-PAGE-PG with plain averaging", "Ours [1]", "trajectories per agent"} <= texts
    assert any(text.startswith("interquartile mean") for text in texts)


def test_resume_extends_a_run_and_the_one_it_is_compared_with(
    run: Path, tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it then ends as one long run is tested where runs are tested."""
    monkeypatch.setattr(Hardware, "start", lambda self: None)  # this process has taken its devices
    finished = list[Path]()
    monkeypatch.setattr("byzpg.cli.resume.finish", lambda path, log: finished.append(path))
    shutil.copytree(run, tmp_path / "longer")
    done = here("resume", "longer", "--trajectories", "64")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("longer", "longer/plain-averaging"):
        assert f"{name} is extended from 60 to 64 trajectories per agent.\n" in done.stdout
        assert RunDirectory.open(tmp_path / name).settings().trajectories == 64
        assert not load(tmp_path / name).complete
    assert finished == [Path("longer")]
    assert here("resume", "longer", "--trajectories", "64").stdout == ""


def test_resume_says_what_an_extension_changes(tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hardware, "start", lambda self: None)
    settings = Config(num_agents=1, num_byzantine=0, num_seeds=3, decay=0.8, trajectories=100).resolved()
    made = a_run(Config(num_agents=1, num_byzantine=0, num_seeds=3, decay=0.8))
    for path in (tmp_path / "mine", tmp_path / paper.run_name(settings)):
        kept = RunDirectory.create(path, settings)
        kept.write_checkpoint(Checkpoint(10, [], dict(made.metrics)))
        kept.write_results(replace(made, parameters={"last": np.zeros((3, 1, 2)), "uniform": np.zeros((3, 1, 2))}))
    done = here("resume", "mine", "--trajectories", "200")  # and fails later, as its state is made up
    assert "mine is extended from 100 to 200 trajectories per agent.\n" in done.stdout
    assert "Its step size decays by 80% over the run: it now goes up again" in done.stdout
    refused = here("resume", paper.run_name(settings), "--trajectories", "200")
    assert refused.returncode == 2
    assert "belongs to a sweep or an experiment, and its name stands for its length" in refused.stderr


def a_run(config: Config) -> Run:
    trajectories = np.tile(np.arange(1, 11) * 10, (3, 1))
    metrics = {"return_mean": np.linspace(20, 480, 10) + np.zeros((3, 1)), "byzantine_weight": np.full((3, 10), np.nan)}
    return Run(config.resolved(), trajectories, trajectories > 0, metrics, {}, np.zeros(3, int), True)


def test_curves_are_named_after_what_tells_them_apart() -> None:
    first, second = Path("a"), Path("b")
    ours, plain = Config(aggregator="RFA"), Config(algorithm="Dec-PAGE-PG")

    def names(one: Config, other: Config) -> list[str]:
        return [curve.label for curve in curves({first: a_run(one), second: a_run(other)})[0]]

    assert names(ours, plain) == ["DecByzPG with RFA", "Dec-PAGE-PG with plain averaging"]
    assert names(ours, Config(aggregator="Bucketing(RFA(), size=2)"))[1] == "DecByzPG with Bucketing(RFA(), size=2)"
    attacked = names(ours, replace(ours, attack="LargeNoise"))
    assert attacked == ["DecByzPG with RFA, AvgZero", "DecByzPG with RFA, LargeNoise"]
    assert names(ours, replace(ours, seed=1)) == ["a", "b"]
    assert names(Config(algorithm="PAGE-PG"), plain)[0] == "PAGE-PG (no momentum)"
    # What is called PAGE-PG need not use PAGE: curves tell the p in which they differ, and what they have in common.
    page = Config(algorithm="PAGE-PG", switch_probability=0.2)
    assert names(page, replace(page, switch_probability=1.0)) == ["PAGE-PG (p = 0.2)", "PAGE-PG (p = 1)"]
    estimator = "GPOMDP(baseline='leave-one-out')"
    assert (
        curves({first: a_run(page), second: a_run(replace(page, switch_probability=1.0))})[1]
        == f"{estimator}, no momentum"
    )
    without = f"{estimator}, momentum 0.8, Adam at the agents, p = 1, so without small batches and the PAGE correction"
    assert curves({first: a_run(plain)})[1] == without
    assert without in str(runs_table({first: a_run(plain)}, with_paths=False).caption)


def columns_of(runs: dict[Path, Run], *, with_paths: bool = False) -> dict[str, list[str]]:
    table = runs_table(runs, with_paths=with_paths)
    return {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}


def test_the_summary_says_when_a_task_is_solved() -> None:
    def run_with(*solved: bool) -> Run:
        # The mean over 100 trajectories is that of one iteration.
        made = a_run(Config())
        made = replace(made, progress=20 * made.progress)
        made.returns[~np.array(solved)] = 10.0
        return made

    runs = {Path("short"): a_run(Config())}  # 100 trajectories: at its end, not before, the window is full
    runs |= {Path(f"{number}"): run_with(*([True] * number + [False] * (3 - number))) for number in range(4)}
    columns = columns_of(runs)
    assert columns[SOLVED] == ["never", "never", "1 of 3 seeds", "2,000 (2 of 3)", "2,000"]
    assert columns[BEST][2] == f"{(480 + 10 + 10) / 3:.0f}"
    assert columns[WEIGHT] == ["–"] * 5
    names = columns_of({Path("long [1]"): run_with(True, True, True)}, with_paths=True)["method"]
    assert names == [
        "DecByzPG with NNM(TrimmedMean())\n[dim]long [1]\n2,000 trajectories per agent[/dim]",
    ]


def test_the_summary_counts_seeds_that_diverged() -> None:
    some, every = a_run(Config()), a_run(Config())
    some.returns[1, 5:] = np.nan
    every.returns[:, :] = np.nan
    columns = columns_of({Path("some"): some, Path("every"): every})
    assert columns[LAST_TENTH] == ["1 of 3 diverged", "diverged"]
    assert columns[BEST] == [significant(some.returns[0, 4]), "–"]


def gymnasium_returns(run: Run, episodes: int) -> list[float]:
    """Independently: greedy play from seeds 5, 6, ..."""
    environment, policy, returns = gymnasium.make("CartPole-v1"), run.policy(1), []
    for episode in range(episodes):
        observation, _ = environment.reset(seed=5 + episode)
        returns.append(0.0)
        ended = False
        while not ended:
            observation, reward, terminated, truncated, _ = environment.step(int(policy.act(observation, greedy=True)))
            returns[-1] += float(reward)
            ended = terminated or truncated
    environment.close()
    return returns


def test_play_shows_the_policy_in_the_real_environment(run: Path, tmp_path: Path, here: Here) -> None:
    options = ["--episodes", "3", "--seed", "5", "--index", "1", "--output", "play.gif"]
    done = here("play", run, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    returns = gymnasium_returns(load(run), 3)
    shown = ", ".join(f"{each:g}" for each in returns)
    sampled, greedy = re.findall(r"mean return [\d.]+ \((.+)\)", done.stdout)
    assert done.stdout.splitlines()[0] == "CartPole-v1, 3 episodes"
    assert greedy == shown
    assert f"\n  greedy: mean return {significant(sum(returns) / 3)} ({shown})\n" in done.stdout
    assert sampled != greedy
    with Image.open(tmp_path / "play.gif") as animation:
        frames = [np.asarray(frame.convert("RGB")).tobytes() for frame in ImageSequence.Iterator(animation)]
        assert animation.size == (300, 200)
    assert len(set(frames)) > 3
    assert len(frames) <= float(sampled.split(",")[0]) / 2 + 1

    again = here("play", run, *options, "--greedy")
    assert again.stdout.splitlines()[:3] == done.stdout.splitlines()[:3]
    with Image.open(tmp_path / "play.gif") as animation:
        animated = sum(1 for _ in ImageSequence.Iterator(animation))
    assert len(frames) != animated <= returns[0] / 2 + 1


def test_play_tells_the_returns_before_it_writes_files(run: Path, tmp_path: Path, here: Here) -> None:
    Path(tmp_path / "taken").write_text("a file where the folder should be")
    done = here("play", run, "--episodes", "1", "--output", "taken/play.gif")
    assert done.returncode == 2
    assert "greedy: mean return" in done.stdout
    assert "taken" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["gymnasium", "pygame"])
def test_play_says_how_to_get_what_is_missing(missing: str, run: Path, tmp_path: Path) -> None:
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / f"{missing}.py").write_text(f"raise ImportError('no {missing}')")
    before = contents(run)
    first = os.pathsep.join([str(tmp_path / "shim"), os.environ.get("PYTHONPATH", "")])
    assert forked("play", run, "--episodes", "1", folder=tmp_path, PYTHONPATH=first).wait() == 2
    assert said(tmp_path)[1] == f"error: playing needs Gymnasium and its renderers: {install('gymnasium')}.\n"
    assert contents(run) == before


@pytest.mark.parametrize(("kind", "suffix"), [("onnx", "onnx"), ("safetensors", "safetensors"), ("numpy", "npz")])
def test_export_writes_a_policy_and_says_how_to_use_it(kind: str, suffix: str, run: Path, here: Here) -> None:
    done = here("export", run, "--format", kind, "--index", "2", "--output", f"folder/policy.{suffix}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    written, shape, use, drawing = done.stdout.splitlines()
    size = Path("folder", f"policy.{suffix}").stat().st_size
    assert written == f"Policy of CartPole-v1: folder/policy.{suffix} ({size:,} bytes)"
    assert shape == "Categorical, layers 4 → 4 → 2 (relu, identity), seed 2, agent 0"
    assert use.startswith("Use it: ")
    assert f"folder/policy.{suffix}" in use
    assert drawing.startswith("To act as in training, draw from the logits.")
    again = here("export", run, "--format", kind, "--output", f"folder/policy.{suffix}")
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == f"error: folder/policy.{suffix} already exists: remove it, or choose another file.\n"


def test_export_writes_beside_the_run_by_default(run: Path, tmp_path: Path, here: Here) -> None:
    shutil.copytree(run, tmp_path / "run")
    assert here("export", "run", "--format", "numpy").returncode == 0
    with np.load("run/policy.npz") as file:
        theta = np.concatenate([file[name].ravel() for name in ("weight_0", "bias_0", "weight_1", "bias_1")])
    np.testing.assert_array_equal(theta, load(run).parameters["last"][0, 0])


def test_export_writes_scores_for_rliable(run: Path, here: Here) -> None:
    done = here("export", run, run / "plain-averaging", "--format", "rliable")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:3] == [
        "Scores: scores.json, for the task CartPole-v1",
        "  ByzPG with RFA: 3 runs",
        "  Fed-PAGE-PG with plain averaging: 3 runs",
    ]
    scores = json.loads(Path("scores.json").read_text())
    np.testing.assert_allclose(np.array(scores["ByzPG with RFA"])[:, 0], final_returns(Result.of(load(run))))
    again = here("export", run, "--format", "rliable")
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == "error: scores.json already exists: remove it, or choose another file.\n"


def test_the_log_of_a_run_and_of_the_one_it_is_compared_with(run: Path) -> None:
    for path in (run, run / "plain-averaging"):
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        table = load(path).to_dataframe().sort_values(["iteration", "seed"])
        rows.sort(key=lambda row: (row["iteration"], row["seed"]))
        assert [row["return_mean"] for row in rows] == table["return_mean"].tolist()


def test_list_names_and_explains_everything(here: Here) -> None:
    done = here("list")
    assert done.returncode == 0, done.stdout + done.stderr
    words = " ".join(done.stdout.split())
    for name, algorithm in ALGORITHMS.items():
        assert f"{name} {algorithm.summary}" in words
    families = [*map(members, FAMILIES), envs.ENVIRONMENTS]
    for name, member in [pair for family in families for pair in family.items()]:
        assert f"{name} {summary(member)}" in words
    for kind, text in host.available().items():
        assert f"{kind} {text}" in words


def test_help_is_worth_reading(here: Here) -> None:
    done = here("train", "--help")
    assert done.returncode == 0
    text = " ".join(done.stdout.replace("│", " ").split())
    for line in (
        "--num-agents INT Number of agents K, attackers included. Default: 13, or 1 for algorithms of one agent alone.",
        "--num-attackers INT Number of agents that really attack.",
        "--attack NAME What attackers do; `byzpg list` shows all attacks. (default: AvgZero)",
        "--hidden {[INT [INT ...]]} Sizes of the policy's hidden layers. (default: 16 16)",
        "Here, defaults are those of the preset tuned for DecByzPPO on CartPole-v1.",
        "--large-batch INT Number of trajectories N in a large batch. (not used by DecByzPPO)",
        "--directory PATH Directory for the run, which must be new or empty.",
        "Example: byzpg train ",
    ):
        assert line in text
    assert "default: None" not in text
    # What most people set comes first, and every option is there once.
    places = [re.search(rf" --{option.name.replace('_', '-')}[ ,]", text) for option in fields(Config)]
    places = [place.start() for place in places if place]
    advanced = text.index("advanced options")
    basic = [option.name for option, place in zip(fields(Config), places, strict=True) if place < advanced]
    assert {"env", "attack", "aggregator", "step_size"} <= {*basic} == {*BASIC}
    assert len({*places}) == len(places)
    other = here("train", "--env", "LunarLander-v3", "--preset=paper", "--num-agents", "9", "--help").stdout
    text = " ".join(other.replace("│", " ").split())
    told = {"num-byzantine": "(here: 2)", "large-batch": "(default: 96)", "discount": "(default: 0.999)"}
    for option, value in told.items():
        assert text.split(f" --{option} ")[1].split(" --")[0].endswith(value), option
    for mistake in (["--algorithm", "nonsense"], ["--num-agents", "many"]):  # help is help
        mistaken = here("train", *mistake, "--help").stdout
        assert "set by the preset" in mistaken
    # A demo sets the number of agents itself.
    assert "(here:" not in here("federation", "demo", "--help").stdout


def test_every_command_is_listed_in_one_line_and_explained_at_length(here: Here) -> None:
    overview = here("--help").stdout
    listed = re.findall(r"• (\w+)", overview)
    assert listed[0] == "train"
    assert len(listed) == 17
    assert "Example:" not in overview
    for name in listed:
        help_text = here(name, "--help").stdout
        words = [line for line in help_text.splitlines() if line and not line.startswith("usage:")]
        assert words[0].endswith("."), name
        assert "Example: byzpg" in help_text or name == "list", name
        assert "default: None" not in help_text, name


@pytest.mark.slow
def test_output_needs_no_utf_8_and_no_reader(tmp_path: Path) -> None:
    plain = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = byzpg("list", folder=tmp_path, **plain)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the mean of the K - f rows" in done.stdout
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as unread:
        for arguments in (["list"], ["train", "--help"]):  # from rich, and from tyro
            with (tmp_path / "err").open("w") as errors:
                code = Forked(*arguments, stdout=unread, stderr=errors, folder=tmp_path).wait()
            assert (code, (tmp_path / "err").read_text()) == (141, "")


def test_plain_characters_can_be_read(here: Here) -> None:
    for text, expected in {
        "θ̂ ← β m ± 2σ": "theta <- beta m +/- 2sigma",
        "‖x‖² ≤ ⌊K/4⌋ …": "||x||^2 <= floor(K/4) ...",
        "Grötschla – 3 × 4": "Grotschla - 3 x 4",
        "╭─ a │": "+- a |",
    }.items():
        assert text.encode("ascii", "byzpg-plain").decode() == expected
    for command in (["train", "--help"], ["list"], ["reproduce", "--help"], ["certify", "--help"]):
        text = here(*command).stdout
        assert text.encode("ascii", "byzpg-plain").decode().count("?") == text.count("?"), command


def test_columns_stay_straight_in_plain_characters() -> None:
    plain = TextIOWrapper(BytesIO(), encoding="ascii")  # without an error handler
    table = Table("a", "b", box=None, title="θ")
    table.add_row("1 ± 2", "next")
    table.add_row("1", "next")
    Output(file=plain, width=40).print(table, "ε")
    plain.seek(0)
    *_, first, second, last = plain.read().splitlines()
    assert first.split() == ["1", "+/-", "2", "next"]
    assert first.index("next") == second.index("next")
    assert last == "epsilon"


def test_numbers_stay_whole_on_narrow_terminals() -> None:
    runs = {Path("a/long/path/of/a/run/that/is/folded"): a_run(Config())}
    narrow = Console(width=60, file=StringIO())
    narrow.print(runs_table(runs, with_paths=True))
    text = narrow.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert mean_and_deviation(final_returns(Result.of(next(iter(runs.values()))))) in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 60


def test_version(here: Here) -> None:
    assert here("--version").stdout == f"byzpg {__version__}\n"


# Certificates


def test_certify_prints_every_rule_and_saves_a_plot(tmp_path: Path, here: Here) -> None:
    done = here("certify", "--num-agents", "4", "--num-byzantine", "1", "--trials", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("Mean()", "RFA()", "NNM(TrimmedMean())", "Bulyan()"):
        assert name in done.stdout
    assert (tmp_path / "byzpg-certificates.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["byzpg-certificates.png"]


# Experiments


def test_reproduce_plots_keeps_and_reports(tmp_path: Path, here: Here) -> None:
    line = ("reproduce", "fig1", "--task", "CartPole-v1", "--seeds", "2", "--trajectories", "20")
    assert forked(*line, folder=tmp_path).wait() == 0, said(tmp_path)
    out, _ = said(tmp_path)
    assert "5 runs, preset tuned: 0 done, 5 to do." in out
    assert re.search(r"\(100% done after \d+ s\)", out)
    folder = tmp_path / "reproduction"
    name = "fig1-CartPole-v1-tuned-2-seeds-20-trajectories"
    assert {path.name for path in folder.iterdir()} == {"runs", name, f"{name}.npz"}
    pictures = {path.name for path in (folder / name).iterdir()}
    assert pictures == {"fig1-tuned.png", "fig1-tuned.svg", "fig1-tuned.pdf"}
    results = Results.load(folder / f"{name}.npz")
    assert results.provenance["seconds"] > 0
    assert results.provenance["command"] == "byzpg " + " ".join(line)
    assert {run.settings.trajectories for run in results.runs.values()} == {20}
    for path in (folder / "runs").iterdir():
        assert load(path).complete

    assert forked(*line, folder=tmp_path, JAX_LOG_COMPILES="1").wait() == 0, said(tmp_path)
    out, errors = said(tmp_path)
    assert "5 runs, preset tuned: 5 done, 0 to do." in out
    assert "_run_block" not in errors
    assert "seconds" not in Results.load(folder / f"{name}.npz").provenance, "those of the training are not known here"

    page = here("report", folder / f"{name}.npz", "--figures", "pictures")
    assert page.returncode == 0, page.stdout + page.stderr
    assert "byzpg reproduce fig1" in (tmp_path / "report.html").read_text()
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == pictures


@pytest.mark.slow
def test_joining_prints_what_members_save(tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny version, with one attack: nobody learns in one iteration. A second call finds all runs complete."""
    monkeypatch.setattr(paper, "SIZES_TO_JOIN", (2, 5))
    monkeypatch.setattr(reproduce, "follows_another_process", lambda _: False)  # in this process, JAX has started
    line = ("reproduce", "joining", "--task", "CartPole-v1", "--panel", "AvgZero", "--seeds", "2", "--steps", "256")
    done = here(*line)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 runs, preset tuned: 0 done, 5 to do." in done.stdout
    assert "joining: steps per agent until a return of 475" in done.stdout
    rows = [" ".join(row.split()) for row in done.stdout.splitlines()]
    assert "PPO alone 1 (0) – never – never –" in rows
    assert "Dec-PPO 5 (1) AvgZero never never never never" in rows
    saved = tmp_path / "reproduction" / "joining-CartPole-v1-AvgZero-tuned-2-seeds-256-steps.npz"
    (panel,) = Results.load(saved).experiments[0].panels
    assert panel.level == 475
    page = here("report", saved)
    assert page.returncode == 0, page.stdout + page.stderr
    assert "Does joining pay?" in (tmp_path / "report.html").read_text()
    assert "5 runs, preset tuned: 5 done, 0 to do." in here(*line).stdout


# Bad input

BAD: dict[str, list[str]] = {
    "certify --num-byzantine 0": ["at least one Byzantine agent"],
    "certify --num-byzantine 13": ["Mean() needs f < K"],
    "certify --trials 0": ["trials and dimension must be positive"],
    "certify --output picture.bmp": ["must end in .png, .svg or .pdf"],
    "certify --agents 5": ["--agents"],
    "certfy": ["certify"],
    "reproduce": ["reproduce needs at least one name", "fig1", "cartpole"],
    "reproduce fig7": ["no experiment 'fig7'"],
    "reproduce fig1 --seeds 0": ["--seeds must be at least 1, got 0"],
    "reproduce fig2 --task LunarLander-v3": ["none of these experiments", "LunarLander-v3"],
    "reproduce fig2 --steps 9": ["--steps has no effect on fig2, got 9: use --trajectories."],
    "reproduce joining --trajectories 9": ["--trajectories has no effect on joining, got 9: use --steps."],
    "reproduce joining --task AliasedStates-v1": ["AliasedStates-v1 has none", "Acrobot-v1"],
    "reproduce joining --task CartPole-v1 --panel AvgZeros": ["no panel 'AvgZeros'", "Did you mean 'AvgZero'?"],
    "reproduce joining --task CartPole": ["no environment 'CartPole'", "Did you mean 'CartPole-v1'?"],
    "report": ["report needs at least one path: the directory of a run"],
    "report nowhere.npz": ["nowhere.npz cannot be read"],
    "report misspelt.toml": ["misspelt.toml holds no run: name the directory of a run"],
    "report nowhere.npz --output page.txt": ["must end in .html, got page.txt"],
    "train --aggregator RFA --num-byzantine 7": [
        "RFA() needs f < K/2; 7 of 13 agents breaks that: use num_byzantine ≤ 6, or at least 15 agents."
    ],
    "train --num-byzantine 4": [
        "MDA() needs f < K/4; 4 of 13 agents breaks that: use num_byzantine ≤ 3, or at least 17 agents."
    ],
    "train --learning-rate 0.1": ["there is no option --learning-rate. Did you mean --step-size?"],
    "federation demo --gamma=0.9": ["there is no option --gamma. Did you mean --discount?"],
    "train --aggregator geomed": ["there is no aggregator 'geomed'", "Did you mean 'RFA'?"],
    "train --attack sign_flipping": ["Did you mean 'SignFlip'?"],
    "train --num-agents 5 --num-byzantine 1 --num-attackers 6": ["got 6, for which num_agents must be at least 7."],
    "train --algorithm ByzPG --aggregator Krum --num-byzantine 4": ["Krum()", "num_byzantine ≤ 3"],
    "train --large-batch 50 --small-batch 51": ["small_batch must be at most large_batch = 50, got 51."],
    "train --switch-probability 0": ["switch_probability must lie in (0, 1], got 0.0."],
    "train --switch-probability 1.5": ["switch_probability must lie in (0, 1], got 1.5."],
    "train --env gymnasium:Cartpool-v1": ["Gymnasium has no task 'Cartpool-v1'", "Did you mean 'CartPole-v1'?"],
    "train --env CartPole": ["there is no environment 'CartPole'", "Did you mean 'CartPole-v1'?"],
    "train --algorithm DecByz": ["there is no algorithm 'DecByz'", "Did you mean 'DecByzPG'?"],
    "train --aggregator RFAA": ["there is no aggregator 'RFAA'", "Did you mean 'RFA'?"],
    "train --agreement MDB": ["there is no agreement 'MDB'", "Did you mean 'MDA'?"],
    "train --attack AvgZer": ["there is no attack 'AvgZer'", "Did you mean 'AvgZero'?"],
    "train --policy gaussian": ["policy = gaussian does not fit Discrete(num_actions=2): use policy = categorical"],
    "train --algorithm Dec-PAGE-PG --aggregator RFA": ["aggregator = RFA has no effect with Dec-PAGE-PG"],
    "train --num-agents many": ["--num-agents", "'many'"],
    "train --num-agnts 5": ["--num-agnts"],
    "train --preset best": ["--preset", "best"],
    "train --config nowhere.toml": ["configuration nowhere.toml cannot be read"],
    "train --config misspelt.toml": ["misspelt.toml: there is no option 'num_agnts'. Did you mean 'num_agents'?"],
    "train --directory started": ["started already holds a run: choose another directory, or `byzpg resume started`."],
    "train --directory misspelt.toml": ["misspelt.toml is not an empty directory: choose another one."],
    "train --directory misspelt.toml/run": ["Not a directory"],
    "resume changed": ["changed/checkpoint.npz belongs to another configuration than the config.json beside it"],
    "resume nowhere": ["nowhere holds no run: there is no config.json in it."],
    "resume": ["PATH"],
    "plot": ["plot needs at least one path: the directory of a run"],
    "plot started": ["started has not reached its first checkpoint: continue it with `byzpg resume started`."],
    "plot started --output picture.bmp": ["must end in .png, .svg or .pdf"],
    "play nowhere": ["nowhere holds no run"],
    "play started --output film.avi": ["--output must end in .gif, got film.avi."],
    "play started --episodes 0": ["--episodes must be at least 1, got 0."],
    "play started --seed -1": ["--seed must not be negative", "got --seed -1."],
    "export nowhere --format numpy": ["nowhere holds no run: there is no config.json in it."],
    "export started --format numpy": ["started is not complete: finish it with `byzpg resume started`."],
    "export started": ["--format"],
    "export --format numpy": ["export needs the directory of a run."],
    "export started nowhere --format numpy": ["--format numpy is for one run, got 2 directories."],
    "export nowhere --format rliable": ["nowhere holds no run: name the directory of a run"],
    "train --log csv": ["'csv'", "'jsonl', 'tensorboard', 'wandb'"],
    "export started --format pickle": ["'pickle'", "'onnx', 'safetensors', 'numpy'"],
    "export started --format onnx --output p.npz": ["--output must end in .onnx with --format onnx, got p.npz."],
}
# Each line in a process of its own, but Python and its modules are loaded once.
RUNNER = """
import gc, json, os, sys
import gymnasium  # this and the next are what some lines need
import byzpg.experiments.report
from byzpg.cli import main
from byzpg.cli.parsing import parse_command
sys.argv, lines = ["byzpg", "train"], json.loads(sys.argv[1])
parse_command()  # what it finds out about the commands, no process has to find out again
gc.freeze()
outcomes = []
for line in lines:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        sys.argv = ["byzpg", *line.split()]
        try:
            main()
        except SystemExit as outcome:
            os._exit(outcome.code)  # to tidy up would take longer than all the rest
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        said = pipe.read()
    outcomes.append((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said))
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and words of every line, none of which may write anything."""
    folder = tmp_path_factory.mktemp("bad")
    settings = Config().resolved()
    RunDirectory.create(folder / "started", settings)
    RunDirectory.create(folder / "changed", settings).write_checkpoint(Checkpoint(8, [], {}))
    shutil.copy(folder / "started" / "config.json", folder / "changed" / "config.json")
    config = json.loads((folder / "changed" / "config.json").read_text()) | {"seed": 7}
    (folder / "changed" / "config.json").write_text(json.dumps(config))
    (folder / "misspelt.toml").write_text("num_agnts = 5")
    before = contents(folder)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUNNER, json.dumps(list(BAD))],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"JAX_LOG_COMPILES": "1"},
        check=True,
    )
    assert contents(folder) == before
    return dict(zip(BAD, map(tuple, json.loads(done.stdout)), strict=True))


STOPPED_WHILE_COMPILING = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
from byzpg import cli, training

begun = threading.Event()
ThreadPoolExecutor(1, training.COMPILING).submit(lambda: (begun.set(), time.sleep(600)))
begun.wait()
print("Stopped.")
cli._exit(130)
"""


def test_who_stops_does_not_wait_for_programs_that_are_compiled_in_the_background() -> None:
    ended = subprocess.run([sys.executable, "-c", STOPPED_WHILE_COMPILING], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (130, "Stopped.\n")


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_error_and_exit_code_2(line: str, outcomes: dict[str, tuple[int, str]]) -> None:
    code, said = outcomes[line]
    words = " ".join(said.replace("│", " ").split())
    assert code == 2, said
    assert [part for part in BAD[line] if part not in words] == []
    assert "Traceback" not in said
    assert "_run_block" not in said  # it comes before the program of a federation is compiled


# Plots


def test_a_failed_plot_leaves_nothing_behind(tmp_path: Path) -> None:
    figure = figures.constants_heatmap({"Mean": {"AvgZero": 1.0}}, "title")
    with pytest.raises(ValueError, match="not supported"):
        figures.save(figure, tmp_path / "picture.nonsense")
    assert not list(tmp_path.iterdir())


def test_a_legend_is_no_wider_than_its_picture() -> None:
    curves = [figures.Curve(f"a rather long name of a run {i}", np.arange(1, 4), np.ones((1, 3))) for i in range(5)]
    for wide in (curves, [replace(curve, returns=np.ones((3, 3))) for curve in curves]):
        figure = figures.learning_curves(wide, "title")
        figure.draw_without_rendering()
        assert figure.legends[0].get_window_extent().width < figure.bbox.width
        pyplot.close(figure)


def test_short_numbers() -> None:
    assert [figures.short_number(x) for x in (0, 0.004, 0.05, 1.26, 99.4, 256.1, 44580.0)] == [
        "0",
        "0",
        "0.05",
        "1.3",
        "99",
        "256",
        "4e4",
    ]
