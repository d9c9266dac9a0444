"""The quirks of the published script: its random numbers against PyTorch's and NumPy's own, and its three switches."""

from dataclasses import replace
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from byzpg import Config
from byzpg.experiments.authors_script import AuthorsScript, first_parameters, tosses
from byzpg.federation.schedule import CommonCoin, Paper
from byzpg.learning.policies import CategoricalMLP, GaussianMLP
from byzpg.training import simulation_of


def test_first_parameters_are_pytorchs() -> None:
    """Read off the script's own network for CartPole, made with PyTorch 2.15 after torch.manual_seed(0)."""
    parameters = first_parameters((4, 16, 16, 2))
    assert parameters.shape == (386,)
    weights = CategoricalMLP(4, (16, 16), num_actions=2).unflatten(jnp.asarray(parameters))
    (first, first_bias), (second, _), (last, last_bias) = weights
    seen = [*first[:, 0], *first_bias[:2], *second[:3, 1], *last[-2:, 1], *last_bias]
    expected = [
        *(0.25933146476745605, 0.3108241558074951, -0.17499607801437378, 0.23991376161575317),
        *(0.20733225345611572, 0.1346108615398407),
        *(-0.20592224597930908, 0.13046017289161682, -0.02547377347946167),
        *(-0.19180867075920105, -0.07306930422782898),
        *(0.23191708326339722, -0.6194856762886047),
    ]
    np.testing.assert_allclose(seen, expected, rtol=1e-6)


def test_tosses_are_those_of_numpys_choice() -> None:
    generator = np.random.RandomState(0)
    expected = [True] + [bool(generator.choice([True, False], p=[0.2, 0.8])) for _ in range(500)]
    assert list(islice(tosses(0.2), 501)) == expected
    assert 70 < sum(expected) < 130


def test_the_script_preset_starts_from_them_whatever_the_seed() -> None:
    settings = Config(preset="script", num_agents=2, num_byzantine=0, num_seeds=2, seed=7, trajectories=400).resolved()
    assert settings.conventions == AuthorsScript()
    simulation = simulation_of(settings)
    (state,) = simulation.start()
    expected = np.broadcast_to(first_parameters((4, 16, 16, 2)), (2, 2, 386))
    np.testing.assert_array_equal(state.agents.parameters, expected)
    timetable = settings.schedule().timetable(simulation.initial_parameters())
    assert timetable.in_step
    assert list(timetable.large) == list(islice(tosses(0.2), timetable.num_entries))
    keys = jax.random.split(jax.random.key(0), 2)
    seeded = jax.vmap(Config(num_agents=2).resolved().federation().agent.policy.initial)(keys)
    assert np.all(seeded[0] != seeded[1])


# The three switches

POLICY = CategoricalMLP(4, (16, 16), num_actions=2)
COIN = CommonCoin(bytes(32))


def test_each_switch_changes_one_thing_and_the_rest_is_the_papers() -> None:
    key = jax.random.key(3)
    vectors = {name: jnp.full(2, number) for number, name in enumerate(("before", "moved", "own", "aggregated"))}
    for switch in ("initialization", "coin", "memory"):
        off = replace(AuthorsScript(), **{switch: False})
        for conventions in (AuthorsScript(), off):
            of_script = {
                name: conventions is not off or name != switch for name in ("initialization", "coin", "memory")
            }
            first = first_parameters((4, 16, 16, 2)) if of_script["initialization"] else POLICY.initial(key)
            np.testing.assert_array_equal(conventions.initial_parameters(POLICY, key), first)
            sides = list(islice(conventions.tosses(COIN, 0.3), 60))
            assert sides == list(islice(tosses(0.3) if of_script["coin"] else Paper().tosses(COIN, 0.3), 60))
            remembered = [float(vector[0]) for vector in conventions.remembered(**vectors)]
            assert remembered == ([1, 2] if of_script["memory"] else [0, 3])
            assert conventions.uses_realized_direction == (not of_script["memory"])


def test_a_gaussian_policy_keeps_its_own_first_deviations() -> None:
    policy = GaussianMLP(3, (4,), action_size=1)
    parameters = AuthorsScript().initial_parameters(policy, jax.random.key(0))
    assert parameters.shape == policy.initial(jax.random.key(0)).shape
    np.testing.assert_array_equal(parameters[: len(first_parameters(policy.layer_sizes))], first_parameters((3, 4, 1)))


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ({"initialization": "script", "coin": "script", "memory": "script"}, AuthorsScript()),
        ({"initialization": "seeded", "coin": "common", "memory": "paper"}, Paper()),
        ({"initialization": "seeded", "coin": "script", "memory": "paper"}, AuthorsScript(False, True, False)),
        ({"memory": "script"}, AuthorsScript(initialization=False, coin=False)),
        ({"memory": "paper"}, Paper()),
        ({"preset": "script"}, AuthorsScript()),
        ({"preset": "script", "coin": "common", "memory": "paper"}, AuthorsScript(coin=False, memory=False)),
    ],
    ids=str,
)
def test_configurations_of_older_versions_mean_the_same(old: dict[str, Any], now: Any) -> None:
    """There, each quirk was an option of its own."""
    assert Config.of(old, "config.json").resolved().conventions == now
