"""The random numbers of the published script, against those of PyTorch and NumPy themselves."""

from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np

from byzpg import Config
from byzpg.policies import CategoricalMLP
from byzpg.published import first_parameters, tosses
from byzpg.training import Plan


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
    simulation = settings.simulation()
    (state,) = simulation.start()
    expected = np.broadcast_to(first_parameters((4, 16, 16, 2)), (2, 2, 386))
    np.testing.assert_array_equal(state.agents.parameters, expected)
    large = Plan.of(settings, simulation).large
    assert list(large) == list(islice(tosses(0.2), len(large)))
    keys = jax.random.split(jax.random.key(0), 2)
    seeded = jax.vmap(Config(num_agents=2).resolved().federation().agent.policy.initial)(keys)
    assert np.all(seeded[0] != seeded[1])
