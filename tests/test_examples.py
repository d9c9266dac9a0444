"""The examples and the notebook run and show what they claim; the benchmarks start without the tests."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from forking import Forked

from byzpg import Config, Run
from byzpg.export import write_policy
from byzpg.testing import check_aggregator, check_attack, check_environment, check_policy

ROOT = Path(__file__).parent.parent
EXAMPLES, BENCHMARKS = ROOT / "examples", ROOT / "benchmarks"
NOTEBOOK = EXAMPLES / "tour.ipynb"
SCRIPT = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
# The code cells as a plain program: no Jupyter needed.
CELLS = """
import json, sys
names = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
"""
PICTURES = {".png": b"\x89PNG", ".gif": b"GIF8"}


def run(script: Path, folder: Path, *arguments: object, program: str = SCRIPT) -> str:
    """What a script prints, run as its reader runs it: in its own process, with its own folder on the path."""
    with (folder / "printed").open("w+b") as printed:
        process = Forked(
            script, *arguments, program=program, stdout=printed, folder=folder, PYTHONPATH=str(script.parent)
        )
        code = process.wait()
        printed.seek(0)
        text = printed.read().decode()
    assert code == 0, text
    return text


def example(name: str, folder: Path, *arguments: object) -> str:
    """What an example prints; the last line names the picture that it wrote."""
    text = run(EXAMPLES / name, folder, "--output", folder / "output", *arguments)
    picture = Path(text.splitlines()[-1].partition(": ")[2])
    assert picture.parent == folder / "output"
    assert picture.read_bytes().startswith(PICTURES[picture.suffix])
    return text


def number(pattern: str, text: str) -> float:
    """The number in the first group of the only match."""
    (found,) = re.findall(pattern, text)
    return float(found)


@pytest.mark.slow
def test_a_module_of_ones_own_parts_keeps_their_contracts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_five_minutes.py` runs the commands with them."""
    monkeypatch.syspath_prepend(EXAMPLES)
    assert len((EXAMPLES / "my_parts.py").read_text().splitlines()) <= 80
    import my_parts  # pyright: ignore[reportMissingImports]

    for report in (
        check_environment(my_parts.Docking()),
        check_aggregator(my_parts.near_median()),
        check_attack(my_parts.sleeper(wake=0)),
        check_policy(my_parts.Waves(width=4)),
    ):
        assert "checks passed" in str(report)


@pytest.mark.slow
def test_digits_are_learned_beside_attackers_by_a_robust_rule_and_not_by_the_mean(tmp_path: Path) -> None:
    text = run(EXAMPLES / "digits.py", tmp_path)
    assert number(r"Mean\(\): (\d+)%", text) < 30
    assert number(r"NNM\(TrimmedMean\(\)\): (\d+)%", text) > 90


@pytest.mark.slow
def test_of_three_rules_the_mean_alone_learns_nothing(tmp_path: Path) -> None:
    text = example("compare_rules.py", tmp_path)
    assert number(r"  mean +(\d+) of 200", text) < 30
    for name in ("RFA", "NNM and trimmed mean"):
        assert number(rf"  {name} +(\d+) of 200", text) > 120


@pytest.mark.slow
def test_a_trained_policy_balances_the_pole_of_gymnasium_and_is_loaded_the_second_time(tmp_path: Path) -> None:
    text = example("use_policy.py", tmp_path)
    assert number(r"Random actions in Gymnasium: mean return (\d+)", text) < 60
    assert number(r"The policy in Gymnasium: mean return (\d+)", text) > 300
    assert number(r"Its most likely actions: mean return (\d+)", text) > 300
    trained = (tmp_path / "output" / "cartpole" / "parameters.npz").stat()
    assert example("use_policy.py", tmp_path, "--run", tmp_path / "output" / "cartpole") == text
    assert (tmp_path / "output" / "cartpole" / "parameters.npz").stat() == trained


def test_an_exported_policy_balances_the_pole_without_jax(tmp_path: Path) -> None:
    settings = Config(num_agents=1, num_byzantine=0, num_seeds=1, hidden=()).resolved()
    push_right = np.asarray([1.0, 5.0, 10.0, 10.0])  # to where the pole leans and falls: a known solution
    theta = np.concatenate([np.stack([-push_right, push_right], axis=1).ravel(), [0, 0]]).astype(np.float32)
    held, one = theta[None, None], np.ones((1, 1), int)
    parameters, outputs = {"last": held, "uniform": held}, np.zeros(1, int)
    run = Run(settings, one, one > 0, {"return_mean": one.astype(float)}, parameters, outputs, True)
    write_policy(run, tmp_path / "policy.npz", "numpy")
    program = SCRIPT + "; print(sorted({'jax', 'jaxlib', 'byzpg'} & sys.modules.keys()))"
    command = [sys.executable, "-c", program, EXAMPLES / "act_without_jax.py", tmp_path / "policy.npz"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    expected = [f"CartPole-v1, {how}: return 500.0" for how in ("sampled", "greedy")]
    assert (done.returncode, done.stdout.splitlines()) == (0, [*expected, "[]"]), done.stderr


@pytest.mark.slow
def test_members_of_a_live_federation_end_with_equal_parameters(tmp_path: Path) -> None:
    text = example("live_federation.py", tmp_path)
    assert number(r"Largest difference between the honest members' parameters: (.+)", text) <= 1e-6
    for name in ("alice", "bob", "carol", "dave"):
        returns = re.search(rf"{name}: return +(\d+) at first, +(\d+) at the end", text)
        assert returns is not None
        assert float(returns[2]) > 2 * float(returns[1])


def without_numbers(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"-?\d+\.?\d*", "#", text))


def stored_output() -> str:
    """What the notebook's cells printed when it was saved."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    return "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")


def check_findings(text: str) -> None:
    assert number(r"RFA (\d+), plain mean", text) > 120
    assert number(r"plain mean (\d+) in the last", text) < 30
    assert number(r"NNM\(TrimmedMean\(\)\) under .+ C_ra (\S+)", text) < 3


def test_the_notebook_has_its_outputs() -> None:
    assert NOTEBOOK.stat().st_size < 300_000
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "execute_result"}
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    check_findings(stored_output())


@pytest.mark.slow
def test_the_cells_of_the_notebook_still_run(tmp_path: Path) -> None:
    printed = run(NOTEBOOK, tmp_path, program=CELLS)
    assert without_numbers(printed) == without_numbers(stored_output())
    check_findings(printed)


def test_every_example_is_tested_and_listed_and_says_how_to_run_it() -> None:
    tested, listed = Path(__file__).read_text(), (EXAMPLES / "README.md").read_text()
    for path in [*EXAMPLES.glob("*.py"), NOTEBOOK]:
        assert f'"{path.name}"' in tested
        assert f"({path.name})" in listed
        assert f"examples/{path.name}" in path.read_text()


# The help of every script, one after the other in one process, which is faster.
HELP = """
import contextlib, runpy, sys
paths = sys.argv[1:]
for path in paths:
    sys.argv = [path, "--help"]
    print("HELP OF", path)
    with contextlib.suppress(SystemExit):
        runpy.run_path(path, run_name="__main__")
"""


def test_benchmarks_start_without_the_tests_and_name_their_baseline(tmp_path: Path) -> None:
    paths = sorted(BENCHMARKS.glob("*.py"))
    texts = run(paths[0], tmp_path, *paths[1:], program=HELP).split("HELP OF ")[1:]
    for path, text in zip(paths, texts, strict=True):
        assert f"python benchmarks/{path.name}" in text
        assert "aseline" in text
