"""Parts of a user's own, module:Name(option=value): read back wherever they are saved, and imported with consent."""

import json
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import own_parts
import pytest
from forking import Forked

import byzpg
from byzpg import Config, _parts
from byzpg._parts import Call, Part, UntrustedCodeError, read_call
from byzpg._registry import addresses, parse
from byzpg.cli.federation import Federation, New
from byzpg.engines.flower.options import Options
from byzpg.experiments.results import Result, Results
from byzpg.experiments.sweeps import Sweep
from byzpg.live.rehearsal import parse_attack
from byzpg.robust import NNM, aggregator
from byzpg.runs import RunDirectory

OWN: dict[str, Any] = {
    "aggregator": NNM(own_parts.trimmed(extra=1)),
    "agreement": own_parts.Agreed(node_limit=7),
    "attack": own_parts.Boost(factor=2.0, target="both"),
    "byzantine_set": own_parts.FirstOnes(),
    "estimator": own_parts.Returns(baseline="leave-one-out"),
}
TEXTS = {
    "aggregator": "NNM(own_parts:trimmed(extra=1))",
    "agreement": "own_parts:Agreed(node_limit=7)",
    "attack": "own_parts:Boost(target='both', factor=2.0)",
    "byzantine_set": "own_parts:FirstOnes()",
    "estimator": "own_parts:Returns(baseline='leave-one-out')",
}
TINY: dict[str, Any] = {"num_agents": 9, "num_seeds": 1, "trajectories": 12, "horizon": 10, "large_batch": 4}
# A module that exists for one test alone.
MINE = """
from byzpg.robust import aggregator

@aggregator
def first(received, num_byzantine):
    return received[0]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with mine.py, where the user has named nothing yet."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(_parts, "_named", set())
    monkeypatch.setattr(_parts, "_reported", set())
    monkeypatch.setattr(_parts, "on_change", warnings.warn)  # a command that ran in this process has changed it
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were another process."""
    monkeypatch.setattr(_parts, "_named", set())
    monkeypatch.delitem(sys.modules, "mine", raising=False)


def made_with_mine(folder: Path) -> Path:
    """A run with a rule of mine.py, not trained."""
    settings = Config(algorithm="ByzPG", aggregator="mine:first", **TINY).resolved()
    return RunDirectory.create(folder / "run", settings).path


def test_objects_and_texts_are_the_same_everywhere(tmp_path: Path) -> None:
    settings = Config(**OWN, **TINY).resolved()
    data = settings.as_data()
    assert {option: data[option] for option in TEXTS} == TEXTS
    assert Config(**TEXTS, **TINY).resolved() == settings
    lines = (f"{option} = {json.dumps(value)}" for option, value in {**TEXTS, **TINY}.items())
    (tmp_path / "own.toml").write_text("\n".join(lines))
    assert Config.load(tmp_path / "own.toml").resolved() == settings
    grid = Sweep.of({**TINY, "grid": {"aggregator": ["RFA", TEXTS["aggregator"]], "seed": [0, 1]}}, "grid")
    assert [str(cell.settings.aggregator) for cell in grid.cells][-1] == TEXTS["aggregator"]
    flower = Options.of(
        {"aggregator": TEXTS["aggregator"], "num-agents": 9, "rehearsal": True}
        | {"rehearsal-attack": "own_parts:reversed_mean(scale=2.0)", "rehearsal-attackers": "0"}
    )
    assert flower.settings.aggregator == OWN["aggregator"]
    assert flower.rehearsal is not None
    assert flower.rehearsal.attacks == (own_parts.reversed_mean(scale=2.0),)
    assert Config(algorithm="ByzPG", aggregator=own_parts.trimmed).resolved().aggregator == own_parts.trimmed()


def test_options_are_known_without_running_own_code() -> None:
    texts: dict[str, Any] = {option: text.replace("own_parts", "nowhere_at_all") for option, text in TEXTS.items()}
    config = Config(**texts, policy="nowhere_at_all:Net", **TINY)
    options = config.without_own_code()
    assert {option: options[option] for option in texts} == texts
    assert (options["policy"], config.own_modules) == ("nowhere_at_all:Net", {"nowhere_at_all"})
    for option, text in texts.items():
        assert Config(**{option: text}).without_own_code()[option] == text


def test_a_run_is_trained_resumed_and_opened_again(tmp_path: Path) -> None:
    trained = byzpg.train(Config(**OWN, **TINY), tmp_path / "run")
    assert trained.returns.shape == (1, 3)
    (part,) = json.loads((tmp_path / "run" / "parts.json").read_text())["modules"]
    assert part == {"module": "own_parts", "file": "own_parts.py", "sha256": Part.of("own_parts").sha256}
    assert byzpg.load(tmp_path / "run").settings == trained.settings
    assert byzpg.resume(tmp_path / "run").settings.aggregator == OWN["aggregator"]


def test_what_cannot_be_read_back_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    @aggregator
    def local(received, num_byzantine):
        return received[0]

    @dataclass(frozen=True)
    class RFA(own_parts.Average):
        """Has the name of another rule."""

    in_program = type("InProgram", (own_parts.Average,), {"__module__": "__main__"})
    no_text = own_parts.Average(size=pytest)  # type: ignore[arg-type]
    for rule, words in (
        (local(), "the class local is defined inside a function"),
        (RFA(), "the class RFA is defined inside a function"),
        (in_program(), "InProgram is defined in the program itself.*Move it to a module"),
        (no_text, "could not be read back from its text"),
    ):
        with pytest.raises(ValueError, match=words):
            byzpg.train(Config(algorithm="ByzPG", aggregator=rule, **TINY), tmp_path / "run")
        assert not (tmp_path / "run").exists()
    assert byzpg.train(Config(algorithm="ByzPG", aggregator=local(), **TINY)).complete  # in memory alone


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("own_parts:trimed", r"own_parts has no 'trimed'\. Did you mean 'trimmed'\?"),
        ("nowhere_at_all:Rule", r"the module 'nowhere_at_all' cannot be imported \(ModuleNotFoundError"),
        ("own_parts:Boost", "own_parts:Boost is no aggregator: it must subclass byzpg.robust.aggregators.Aggregator"),
        ("own_parts:undecorated", "own_parts:undecorated is not a class.*the decorator byzpg.robust.aggregator"),
        ("NNM(own_parts:trimmed(size=2))", "trimmed has no option 'size'; options: extra"),
        ("own_parts:trimmed(extra=0.5)", "trimmed: extra must be int, got 0.5"),
        ("byzpg.robust.aggregators:WeightedAggregator", "is abstract: it must define coefficients"),
        ("own_parts:trimmed() + 1", r"own_parts:trimmed\(\) \+ 1 is not written as Name"),
        ("os:system('true')", "os:system is not a class"),
    ],
)
def test_what_cannot_be_found_is_one_clear_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse("aggregator", text)
    assert "\n" not in str(caught.value)
    assert "own_part_" not in str(caught.value)


def test_names_in_quotes_are_no_addresses() -> None:
    assert addresses("A(x='b:C', y=d.e:F(g:H), z=\"i:J\")") == ["d.e:F", "g:H"]
    assert read_call(" a.b:C.d(x=(1, 'e:f'), y=-2) ") == Call("a.b:C.d", {"x": (1, "e:f"), "y": -2})
    for bad in ("a", "a:b(1)", "a:b(**c)", "a:b(x=c)", "a:b()()", ":b", "a:", "a b:c", "a:b(x=1"):
        with pytest.raises(ValueError, match="is not written as module:Name"):
            read_call(bad)


def test_a_file_imports_only_what_the_user_has_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_with_mine(folder)
    forget(monkeypatch)
    foreign = folder / "foreign"
    foreign.mkdir()
    with monkeypatch.context() as inside:
        inside.chdir(foreign)
        RunDirectory(run).settings()  # a run that was made on this machine, with the same module
        assert str(foreign) not in sys.path  # or a json.py there could be imported some day
    shutil.rmtree(folder / "state")
    forget(monkeypatch)
    with pytest.raises(UntrustedCodeError, match=r"config.json names the module 'mine'.*byzpg\.trust\('mine'\) first"):
        byzpg.resume(run)
    assert "mine" not in sys.modules
    byzpg.trust("mine")
    assert str(RunDirectory(run).settings().aggregator) == "mine:first()"

    made_with = RunDirectory.create(folder / "another", RunDirectory(run).settings())
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(folder / "mine.py", elsewhere)
    forget(monkeypatch)
    sys.path.remove(str(folder))
    monkeypatch.chdir(elsewhere)
    with pytest.raises(UntrustedCodeError):  # another module of this name
        made_with.settings()
    assert str(elsewhere) not in sys.path
    byzpg.trust("mine")
    made_with.settings()
    assert str(elsewhere) in sys.path
    sys.path.remove(str(elsewhere))
    # The command that starts members from a run opens it, so it takes consent, too.
    assert Federation(New((), Config(), parts=("mine",))).parts == ("mine",)


def test_the_same_for_tasks_and_reports(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Config(algorithm="ByzPG", aggregator="mine:first", **TINY).resolved()
    result = Result(settings, np.ones(1), {"return_mean": np.zeros((1, 1))})
    Results((), {"one": result}, {}).save(folder / "r.npz")
    (folder / "config.json").write_text(json.dumps({"env": "mine:make"}))
    forget(monkeypatch)
    for read in (lambda: Results.load(folder / "r.npz"), lambda: Config.load(folder / "config.json")):
        with pytest.raises(ValueError, match="names the module 'mine'"):
            read()
    assert "mine" not in sys.modules


def test_opening_a_run_says_what_has_changed_or_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_with_mine(folder)
    (folder / "mine.py").write_text(MINE + "# changed\n")
    with pytest.warns(UserWarning, match="run was made with another mine.py: the module 'mine' has changed since"):
        RunDirectory(run).settings()
    RunDirectory(run).settings()  # said once
    (folder / "mine.py").unlink()
    forget(monkeypatch)
    with pytest.raises(ValueError, match=r"was made with mine\.py, which cannot be imported here: run this where"):
        RunDirectory(run).settings()
    packaged = Part("mine", "mine.py", "0", "my-package", "1.2")
    with pytest.raises(ValueError, match=r"mine\.py of the package my-package 1\.2.*install my-package 1\.2"):
        packaged.check("run")


def test_a_package_is_recorded_with_its_version() -> None:
    part = Part.of("numpy.linalg")
    assert (part.package, part.version) == ("numpy", sys.modules["numpy"].__version__)
    assert part.file == "__init__.py"
    assert Part.from_data(part.as_data()) == part
    for broken in ({}, {"module": []}, {"module": "a", "sha256": 1}):
        with pytest.raises(ValueError, match="must be described by texts"):
            Part.from_data(broken)


def test_attacks_of_a_live_member_know_its_own_vector_alone() -> None:
    assert parse_attack("own_parts:own_reversed") == own_parts.own_reversed()
    with pytest.raises(ValueError, match="needs to know the messages of all members"):
        parse_attack("own_parts:reversed_mean")


@pytest.mark.slow
def test_the_command_line_finds_modules_here_and_asks_elsewhere(folder: Path) -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]

    def run(*arguments: str, where: Path = folder) -> tuple[int, str]:
        with (folder / "said.txt").open("w") as said:
            code = Forked(*arguments, stdout=said, folder=where, COLUMNS="200").wait()
        return code, (folder / "said.txt").read_text()

    code, said = run(
        "train", "--algorithm=ByzPG", "--aggregator=mine:first", "--no-compare", "--directory=run", *options
    )
    assert code == 0, said
    assert said.count("Importing the module 'mine' for aggregator 'mine:first'.") == 1
    code, said = run("plot", "run")
    assert (code, "mine:first" in said) == (0, True), said
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.py").write_text(MINE + "# another\n")
    code, said = run("plot", "../run", where=elsewhere)
    assert code == 2
    assert said.strip().endswith("if you trust that code, add --parts mine"), said
    assert "Importing the module" not in said
    code, said = run("plot", "../run", "--parts", "mine", where=elsewhere)
    assert (code, "Warning: ../run was made with another mine.py" in said) == (0, True), said
    code, said = run("export", "../run", "--format", "numpy", where=folder / "state")
    assert (code, "which cannot be imported here" in said) == (2, True), said
