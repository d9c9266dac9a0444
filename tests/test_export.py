"""Exported policies act as ours do, in every format and without JAX."""

import importlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from safetensors import safe_open
from tiers import slow_except

from byzpg import Config, __version__, envs, export
from byzpg._install import install
from byzpg.cli.export import Export
from byzpg.envs.spaces import Box
from byzpg.export import FORMATS, describe, write_policy
from byzpg.learning.policies import ACTIVATIONS
from byzpg.runs import Run

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tutorials" / "export.md"
# Acts with exported policies by the code of the example, in a process that has never seen JAX.
WITHOUT_JAX = """
import json, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from act_without_jax import act
observations = np.load(sys.argv[2])
actions = {}
for number, path in enumerate(sys.argv[4:]):
    policy = dict(np.load(path))
    about = json.loads(str(policy["about"]))
    actions[str(number)] = act(policy, about, observations[:, : about["layers"][0]], None)
np.savez(sys.argv[3], **actions)
print([name for name in sys.modules if name.split(".")[0] in ("jax", "jaxlib", "byzpg")])
"""


def untrained(num_seeds: int = 1, **options: Any) -> Run:
    """A complete run with drawn parameters."""
    config = Config(num_agents=2, num_byzantine=0, num_seeds=num_seeds, **options)
    settings, rng = config.resolved(), np.random.default_rng(21)
    held = rng.normal(size=(num_seeds, 2, settings.bound_policy().dimension)).astype(np.float32)
    one = np.ones((num_seeds, 1), int)
    parameters, outputs = {"last": held, "uniform": -held}, np.zeros(num_seeds, int)
    return Run(settings, one, one > 0, {"return_mean": one.astype(float)}, parameters, outputs, True)


NETWORKS = [{"hidden": (7, 3), "activation": activation, "output_tanh": False} for activation in ACTIVATIONS]
NETWORKS += [{"hidden": (5,), "output_tanh": True}, {"hidden": ()}]
TASKS = ("CartPole-v1", "LunarLanderContinuous-v3", "Pendulum-v1", "host_tasks:slider")
CASES = {f"{task} {network}": {"env": task, **network} for task in TASKS for network in NETWORKS}


def outputs(run: Run, observations: np.ndarray) -> np.ndarray:
    """The logits or means of our own policy."""
    policy, parameters = run.policy().policy, jnp.asarray(run.policy().parameters)
    return np.asarray(policy.outputs(policy.unflatten(parameters), jnp.asarray(observations)))


def actions(run: Run, observations: np.ndarray) -> np.ndarray:
    """Our most likely actions, as the task takes them."""
    chosen, space = run.policy().act(observations, greedy=True), envs.make(run.settings.env).action_space
    return np.clip(chosen, space.low, space.high) if isinstance(space, Box) else chosen


def drawn_observations(size: int, number: int = 200) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(number, size)).astype(np.float32)


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of a file and what it says about them."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        return arrays, json.loads(str(arrays.pop("about")))
    if path.suffix == ".safetensors":
        with safe_open(path, "numpy") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, json.loads(file.metadata()["about"])
    model = onnx.load(path)
    arrays = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    return arrays, json.loads({each.key: each.value for each in model.metadata_props}["about"])


# Acting


@pytest.mark.parametrize("case", slow_except([case for case in CASES if "relu" in case or "()" in case], CASES))
def test_an_onnx_policy_acts_as_ours(case: str, tmp_path: Path) -> None:
    run = untrained(**CASES[case])
    write_policy(run, tmp_path / "policy.onnx", "onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "policy.onnx"), full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx", providers=["CPUExecutionProvider"])
    seen = drawn_observations(run.settings.bound_policy().observation_size)
    assert [(each.name, each.shape) for each in session.get_inputs()] == [("observation", ["batch", seen.shape[1]])]
    names = [each.name for each in session.get_outputs()]
    found = {name: np.asarray(session.run([name], {"observation": seen})[0]) for name in names}
    expected = outputs(run, seen)
    if isinstance(envs.make(run.settings.env).action_space, Box):
        assert set(found) == {"mean", "log_std", "action"}
        size = expected.shape[1]
        np.testing.assert_array_equal(found["log_std"], run.policy().parameters[-size:])
        np.testing.assert_allclose(found["mean"], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found["action"], actions(run, seen), rtol=1e-5, atol=1e-5)
    else:
        assert set(found) == {"logits", "action"}
        np.testing.assert_allclose(found["logits"], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found["action"], actions(run, seen))


@pytest.fixture(scope="module")
def acted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What the example's code does with every policy, by case."""
    folder = tmp_path_factory.mktemp("acted")
    np.save(folder / "observations.npy", drawn_observations(20))
    files = [folder / f"{number}.npz" for number in range(len(CASES))]
    for file, options in zip(files, CASES.values(), strict=True):
        write_policy(untrained(**options), file, "numpy")
    command = [
        sys.executable,
        "-c",
        WITHOUT_JAX,
        ROOT / "examples",
        folder / "observations.npy",
        folder / "actions.npz",
    ]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n", "JAX or byzpg was imported"
    with np.load(folder / "actions.npz") as file:
        return {case: file[str(number)] for number, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES)
def test_the_example_acts_as_ours_without_jax(case: str, acted: dict[str, np.ndarray]) -> None:
    run = untrained(**CASES[case])
    seen = drawn_observations(20)[:, : run.settings.bound_policy().observation_size]
    np.testing.assert_allclose(acted[case], actions(run, seen), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("task", ["CartPole-v1", "LunarLanderContinuous-v3"])
def test_the_example_samples_as_ours(task: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The means and deviations of many actions at one observation agree within five standard errors."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    act = importlib.import_module("act_without_jax").act
    run, number = untrained(env=task, hidden=(7, 3)), 20_000
    write_policy(run, tmp_path / "policy.npz", "numpy")
    seen = np.tile(drawn_observations(run.settings.bound_policy().observation_size, 1) / 50, (number, 1))
    theirs = act(*read(tmp_path / "policy.npz"), seen, np.random.default_rng(0))
    space, ours = envs.make(task).action_space, run.policy().act(seen)
    ours = np.clip(ours, space.low, space.high) if isinstance(space, Box) else ours
    assert np.all(np.std(ours, axis=0) > 0.1)
    error = 5 * np.std(ours, axis=0) / number**0.5
    assert np.all(np.abs(np.mean(ours, axis=0) - np.mean(theirs, axis=0)) < 1.5 * error)
    assert np.all(np.abs(np.std(ours, axis=0) - np.std(theirs, axis=0)) < 1.5 * error)


@pytest.mark.parametrize("task", TASKS)
def test_the_cases_reach_all_actions_and_bounds(task: str) -> None:
    """Otherwise the tests above would also pass with constant actions, or without clipping."""
    runs, space = [untrained(env=task, **network) for network in NETWORKS], envs.make(task).action_space
    seen = drawn_observations(runs[0].settings.bound_policy().observation_size)
    chosen = [run.policy().act(seen, greedy=True) for run in runs]
    if isinstance(space, Box):
        assert any(np.any(each[:, 0] > space.high[0]) for each in chosen)
        assert any(np.any(each[:, 0] < space.low[0]) for each in chosen)
    else:
        assert [set(each) for each in chosen] == len(runs) * [{0, 1}]


# Content


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_holds_what_is_needed_to_act(kind: str, tmp_path: Path) -> None:
    run = untrained(env="host_tasks:slider", hidden=(5,), activation="elu", num_seeds=3, seed=40, output="uniform")
    path = tmp_path / f"policy{FORMATS[kind].suffix}"
    about = write_policy(run, path, kind, seed=2, agent=1)
    largest = float(np.finfo(np.float32).max)
    assert about == {
        "byzpg": __version__,
        "task": "host_tasks:slider",
        "policy": "gaussian",
        "action_low": [-0.5, -largest],
        "action_high": [0.25, largest],
        "layers": [2, 5, 2],
        "activations": ["elu", "identity"],
        "parameters": "uniform",
        "seed": 42,
        "agent": 1,
    }
    arrays, told = read(path)
    assert told == about
    theta = run.parameters["uniform"][2, 1]
    parts = {"weight_0": (2, 5), "bias_0": (5,), "weight_1": (5, 2), "bias_1": (2,)}
    log_std = arrays.pop("log_std_value" if kind == "onnx" else "log_std")
    assert {name: arrays[name].shape for name in parts} == parts
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(np.concatenate([*(arrays[name].ravel() for name in parts), log_std]), theta)
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_categorical_policy_is_described() -> None:
    about = describe(untrained(hidden=(4,), activation="tanh", output_tanh=True))
    assert (about["policy"], about["num_actions"], about["layers"]) == ("categorical", 2, [4, 4, 2])
    assert about["activations"] == ["tanh", "tanh"]
    assert "action_low" not in about


def test_the_same_policy_gives_the_same_bytes(tmp_path: Path) -> None:
    for kind in ("onnx", "safetensors"):
        for name in ("first", "second"):
            write_policy(untrained(), tmp_path / name, kind)
        assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
        for name in ("first", "second"):
            (tmp_path / name).unlink()


def test_the_command_offers_every_format() -> None:
    assert get_args(get_type_hints(Export)["format"]) == (*FORMATS, "rliable")  # which is for scores


# Errors


def test_bad_input_writes_nothing(tmp_path: Path) -> None:
    path, run = tmp_path / "policy.npz", untrained()
    spoilt = replace(run, parameters={**run.parameters, "last": np.full_like(run.parameters["last"], np.nan)})
    for bad, options, message in (
        (run, {"kind": "pickle"}, "the format must be one of onnx, safetensors, numpy; got 'pickle'."),
        (run, {"seed": 1}, "seed must be 0 to 0, got 1."),
        (run, {"agent": 2}, "agent must be 0 to 1, got 2."),
        (spoilt, {}, "the last parameters of seed 0, agent 0 are not finite"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            write_policy(bad, path, **{"kind": "numpy", **options})
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "policy.onnx"
    path.write_text("mine")
    with pytest.raises(ValueError, match=r"policy.onnx already exists: remove it, or choose another file\."):
        write_policy(untrained(), path, "onnx")
    assert path.read_text() == "mine"


@pytest.mark.parametrize(("kind", "package"), [("onnx", "onnx"), ("safetensors", "safetensors.numpy")])
def test_a_missing_package_is_named_with_its_remedy(
    kind: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"^the format {kind} needs more packages: {re.escape(install('export'))}\.$"):
        write_policy(untrained(), tmp_path / "policy", kind)
    assert not list(tmp_path.iterdir())
    write_policy(untrained(), tmp_path / "policy.npz", "numpy")


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_policy(untrained(), tmp_path / "policy.npz", "numpy")
    assert not list(tmp_path.iterdir())


# Documentation


def test_the_code_of_the_tutorial_acts_as_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = untrained(env="Pendulum-v1", hidden=(5,), activation="tanh")
    for kind, form in FORMATS.items():
        write_policy(run, Path(f"policy{form.suffix}"), kind)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        names: dict[str, Any] = {"observations": drawn_observations(3)}
        exec(block, names)
        np.testing.assert_allclose(names["actions"], actions(run, names["observations"]), rtol=1e-5, atol=1e-5)


def test_the_tutorial_explains_every_part_of_the_description() -> None:
    page = PAGE.read_text()
    for task in ("CartPole-v1", "Pendulum-v1"):
        assert [name for name in describe(untrained(env=task)) if f"`{name}`" not in page] == []
    assert int(re.findall(r"opset (\d+)", page)[0]) == export.ONNX_OPSET
