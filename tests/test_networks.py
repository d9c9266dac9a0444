"""Networks of the user's own learn what the built-in one learns, wherever agents train; mistakes have clear errors."""

import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import own_networks
import pytest
from onnxruntime import InferenceSession
from own_networks import Twin
from safetensors.numpy import load_file
from tiers import slow_except

from byzpg import Config, load, train
from byzpg._registry import parse
from byzpg.engines.flower.options import Options
from byzpg.experiments.sweeps import Sweep
from byzpg.export import describe, write_policy
from byzpg.federation.members import Peer, seeded_key
from byzpg.federation.ppo import FIRST_POLICY
from byzpg.learning.policies import CategoricalNetwork, GaussianMLP, GaussianNetwork, Policy
from byzpg.live.identity import generate
from byzpg.live.manifest import Times, new_manifest
from byzpg.networks import Network, Pair, flax_linen
from byzpg.runs import Run, RunDirectory
from byzpg.testing import check_policy

SHORT: dict[str, Any] = {"num_agents": 5, "num_seeds": 1, "horizon": 40}
BUILT_IN: dict[str, Any] = {"hidden": (6,), "activation": "tanh", "output_tanh": False}
TWIN = "own_networks:Twin"
ADAPTED: list[Network] = [own_networks.linen(), own_networks.of_nnx(width=7), own_networks.of_equinox()]


# The built-in network, written again


def test_a_twin_of_the_built_in_network_has_its_parameters_outputs_and_gradients() -> None:
    built_in, own = GaussianMLP(4, action_size=3, **BUILT_IN), GaussianNetwork(4, Twin(), action_size=3)
    drawn, theta = jax.jit(lambda key: (own.initial(key), built_in.initial(key)))(jax.random.key(3))
    np.testing.assert_array_equal(drawn, theta)
    theta = np.append(theta[:-3], np.asarray([-1, 0, 1], np.float32))  # the last three: log σ
    assert own.dimension == built_in.dimension == len(theta)
    rng = np.random.default_rng(1)
    seen, actions = (jnp.asarray(rng.normal(size=(3, 2, size)), jnp.float32) for size in (4, 3))

    def total(policy: Policy, theta: Any) -> Any:
        weights = policy.unflatten(theta)
        return jnp.sum(policy.log_probability(weights, policy.outputs(weights, seen), actions) ** 2)

    both = jax.jit(lambda theta: [jax.value_and_grad(total, argnums=1)(policy, theta) for policy in (own, built_in)])
    (value, slope), (expected_value, expected_slope) = both(theta)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    np.testing.assert_allclose(slope, expected_slope, rtol=1e-4, atol=1e-5)

    mean, std = jnp.asarray([1.0, -2, 3, 0]), jnp.asarray([2.0, 1, 5, 0.5])

    @jax.jit
    def normalized(theta: Any) -> Any:
        policy, shifted = own.normalizing(), own.with_normalized_inputs(theta, mean, std)
        weights = policy.unflatten(shifted)
        plain = own.outputs(own.unflatten(theta), (seen - mean) / std)
        return policy.outputs(weights, seen), plain, weights[-1][0], jnp.zeros(len(shifted) - policy.dimension)

    found, expected, log_std, surplus = normalized(theta)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(log_std, theta[-3:])
    assert surplus.size == 0


TRAINED = {
    "a server, no critic, JAX": {"algorithm": "ByzPG", "large_batch": 4, "trajectories": 12},
    "peers, no critic, host": {
        "env": "gymnasium:CartPole-v1",
        "algorithm": "DecByzPG",
        "num_agents": 5,
        "large_batch": 4,
        "trajectories": 12,
    },
    "peers, critic, JAX": {
        "algorithm": "DecByzPPO",
        "steps": 96,
        "ppo": "PPO(environments=2, segment=16, epochs=1, minibatches=1, normalize_observations=True)",
    },
}


@pytest.fixture(scope="module", params=slow_except(["a server, no critic, JAX"], TRAINED))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a federation trains with the built-in network and with its twin, which is kept in a directory."""
    options = SHORT | TRAINED[request.param]
    text = f"{TWIN}(last={FIRST_POLICY})" if "ppo" in options else TWIN
    folder = tmp_path_factory.mktemp("trained") / "run"
    return train(Config(**options, **BUILT_IN)), train(Config(**options, policy=text), folder), folder


def test_a_twin_of_the_built_in_network_learns_what_that_learns_and_is_read_back(trained: Any, tmp_path: Path) -> None:
    built_in, own, folder = trained
    np.testing.assert_allclose(own.returns, built_in.returns, rtol=1e-5)
    np.testing.assert_allclose(own.parameters["last"], built_in.parameters["last"], rtol=1e-3, atol=1e-5)
    changed = own.parameters["last"] - np.asarray(own.settings.federation().agent.initial_parameters(_first_key(own)))
    assert np.abs(changed).max() > 1e-3
    again, seen = load(folder), np.random.default_rng(0).normal(size=(20, 4))
    assert again.settings == own.settings
    assert (again.settings.hidden, again.settings.output_tanh) == ((), False)
    np.testing.assert_array_equal(again.policy().act(seen, greedy=True), built_in.policy().act(seen, greedy=True))

    about = write_policy(again, tmp_path / "policy.safetensors", "safetensors")
    arrays = load_file(tmp_path / "policy.safetensors")
    assert about["network"] == str(own.settings.policy)
    values = np.float32(seen)
    write_policy(again, tmp_path / "policy.onnx", "onnx")
    (translated,) = InferenceSession(tmp_path / "policy.onnx").run(["action"], {"observation": values})
    np.testing.assert_array_equal(translated, built_in.policy().act(seen, greedy=True))
    if own.settings.ppo.normalize_observations:
        values = (values - arrays.pop("observation_mean")) / arrays.pop("observation_std")
    assert set(arrays) == {f"network.{layer}.{part}" for layer in (0, 1) for part in (0, 1)}
    hidden = np.tanh(values @ arrays["network.0.0"] + arrays["network.0.1"])
    logits = hidden @ arrays["network.1.0"] + arrays["network.1.1"]
    np.testing.assert_array_equal(np.argmax(logits, axis=1), built_in.policy().act(seen, greedy=True))


def _first_key(run: Any) -> Any:
    return run.settings.schedule().initial_key


def untrained(**options: Any) -> Run:
    """A complete run with drawn parameters."""
    settings = Config(num_agents=2, num_byzantine=0, num_seeds=1, **options).resolved()
    theta = np.random.default_rng(1).normal(size=(1, 1, settings.bound_policy().dimension)).astype(np.float32)
    one, held = np.ones((1, 1), int), {"last": theta, "uniform": theta}
    return Run(settings, one, one > 0, {"return_mean": one.astype(float)}, held, np.zeros(1, int), True)


def test_an_own_network_is_translated_to_onnx_or_refused(tmp_path: Path) -> None:
    run, path = untrained(policy=own_networks.Zoo(), env="Pendulum-v1"), tmp_path / "policy.onnx"
    write_policy(run, path, "onnx")
    onnx.checker.check_model(onnx.load(path), full_check=True)
    seen = np.random.default_rng(2).normal(size=(40, 3)).astype(np.float32)
    found = InferenceSession(path).run(["mean", "log_std", "action"], {"observation": seen})
    mean, log_std, action = map(np.asarray, found)
    expected = run.policy().act(seen, greedy=True)
    np.testing.assert_allclose(mean, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(log_std, run.parameters["last"][0, 0, -1:])
    np.testing.assert_allclose(action, np.clip(expected, -2, 2), rtol=1e-4, atol=1e-4)
    assert np.abs(expected).max() > 2 > np.abs(expected).min()

    sums = untrained(policy=own_networks.Broken("sums"))
    message = r"^own_networks:Broken\('sums'\) cannot be exported as ONNX: the operation cumsum has no translation"
    with pytest.raises(ValueError, match=message):
        write_policy(sums, tmp_path / "sums.onnx", "onnx")
    assert list(tmp_path.iterdir()) == [path]
    page = (Path(__file__).parent.parent / "docs" / "tutorials" / "export.md").read_text()
    assert [name for name in describe(run) if f"`{name}`" not in page] == []


# Other libraries


@pytest.mark.parametrize("network", ADAPTED, ids=str)
def test_modules_of_other_libraries_compute_what_their_parameters_say(network: Network) -> None:
    policy = CategoricalNetwork(4, network, num_actions=3)
    theta = np.asarray(jax.jit(policy.initial)(jax.random.key(0)))
    assert theta.shape == (policy.dimension,)
    (tree,) = policy.unflatten(theta)  # pyright: ignore[reportArgumentType]
    leaves = {jax.tree_util.keystr(path, simple=True): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    matrices = [leaf for leaf in leaves.values() if leaf.ndim == 2]
    biases = [leaf for leaf in leaves.values() if leaf.ndim == 1]
    first, last = (each.T if network.__class__.__name__ == "of_equinox" else each for each in matrices)
    seen = jnp.asarray(np.random.default_rng(1).normal(size=(2, 7, 4)), jnp.float32)
    expected = np.tanh(seen @ first + biases[0]) @ last + biases[1]

    def outputs(theta: Any) -> Any:
        found = policy.outputs(policy.unflatten(theta), seen)
        return found.sum(), found

    slope, found = jax.jit(jax.grad(outputs, has_aux=True))(theta)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert np.count_nonzero(slope) == policy.dimension
    critic = policy.critic()
    values = jax.eval_shape(lambda key: critic.values(critic.unflatten(critic.initial(key)), seen), jax.random.key(2))
    assert values.shape == (2, 7)
    assert parse("network", str(network)) == network
    if "linen" in str(network):
        assert str(check_policy(network, "Pendulum-v1")).endswith(": 7 of 7 checks passed.")
    assert str(network).startswith("own_networks:")


def test_a_pair_of_functions_is_a_network_in_memory_only(tmp_path: Path) -> None:
    twin = Twin()
    settings = Config(policy=Pair(twin.init, twin.apply)).resolved()
    assert settings == Config(policy=Pair(twin.init, twin.apply)).resolved()
    assert settings.bound_policy().dimension == Config(policy=Twin()).resolved().bound_policy().dimension
    with pytest.raises(ValueError, match="could not be read back"):
        RunDirectory.create(tmp_path / "run", settings)


# Where agents train


def test_the_same_text_names_a_network_in_a_live_federation_on_flower_and_in_sweeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = f"{TWIN}(hidden=(3, 2))"
    expected = CategoricalNetwork(4, Twin(hidden=(3, 2)))
    members = [generate(name, f"{name}.example:7000")[0] for name in ("ada", "bob", "cy", "di", "eve")]
    manifest = new_manifest(members, 1, {"env": "CartPole-v1", "policy": text}, Times(), rehearsal=False)
    monkeypatch.delitem(sys.modules, "own_networks")
    assert manifest.options()["policy"] == text
    assert "own_networks" not in sys.modules, "reading a manifest imported what it names"
    monkeypatch.setitem(sys.modules, "own_networks", own_networks)
    settings = manifest.settings()
    assert settings.bound_policy() == expected
    flower = Options.of({"policy": text, "num-agents": 4, "num-byzantine": 1, "algorithm": "ByzPPO"}).settings
    assert flower.bound_policy() == expected
    sweep = Sweep.of({**SHORT, "grid": {"policy": ["auto", text]}}, "a test")
    assert [cell.settings.policy for cell in sweep.cells] == ["auto", Twin(hidden=(3, 2))]
    peer = Peer(settings.federation(), settings.schedule(), 1, seeded_key(3))
    assert peer.parameters.shape == (expected.dimension,)


# Errors


def refused(message: str, **options: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Config(**options).resolved()


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("empty", "Broken('empty').init must return a pytree of float32 arrays, got no array for an observation [4]."),
        ("integer", "Broken('integer').init must return float32 arrays, got int32[4, 2] of ['matrix']."),
        ("float", "Broken('float').init must return float32 arrays, got float16[4, 2]."),
        ("text", "Broken('text').init fails for an observation [4]: TypeError"),
        ("branches", "Broken('branches').apply fails for an observation [4]: TracerBoolConversionError"),
        ("wide", "Broken('wide').apply must return 2 outputs [2] for an observation [4], got [3]."),
        ("counts", "Broken('counts').apply must return one array of floats, got an array of int32."),
        ("pair", "Broken('pair').apply must return one array of floats, got tuple."),
    ],
)
def test_a_broken_network_is_refused_by_the_name_of_its_function(way: str, message: str) -> None:
    refused(f"own_networks:{message}", policy=own_networks.Broken(way))


def test_what_does_not_fit_an_own_network_is_refused() -> None:
    for network, state in (("remembers", "batch_stats"), ("drops", "layers/0/rngs/count"), ("counts", "count")):
        refused(f"which agents do not exchange: {state}", policy=f"own_networks:{network}")
    refused("must return 3 outputs [3] for an observation [6], got [2]", policy="own_networks:of_two", env="Acrobot-v1")
    critic = {"algorithm": "DecByzPPO"}
    refused("own_networks:of_two() cannot have one output, as a critic", policy="own_networks:of_two", **critic)
    refused("Thawed must be a frozen dataclass", policy=own_networks.Thawed())
    refused("hidden = (8,) has no effect with policy = own_networks:Twin", policy=TWIN, hidden=(8,))
    refused("output_tanh = True has no effect with policy = own_networks:Twin()", policy=Twin(), output_tanh=True)
    refused("use conventions = 'AuthorsScript(initialization=False)'", policy=TWIN, preset="script")
    refused("or a network of your own as module:Name(option=value); got 'gausian'. Did you mean", policy="gausian")
    refused("policy must be Network or 'auto' or 'categorical' or 'gaussian'; got 3", policy=3)
    refused("of_nnx has no option 'wdth'; options: width. Did you mean 'width'?", policy="own_networks:of_nnx(wdth=3)")
    with pytest.raises(ValueError, match=r"^vague: size must have a default, or be one of num_outputs\.$"):

        @flax_linen
        def vague(num_outputs: int, size: int) -> None: ...

    with pytest.raises(ValueError, match=r"^hiding: the option init needs another name"):

        @flax_linen
        def hiding(num_outputs: int, init: str = "zeros") -> None: ...
