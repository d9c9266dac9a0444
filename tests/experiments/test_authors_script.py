"""What is published: the curves as numbers, and the random numbers of the script against PyTorch's and NumPy's own."""

from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np

from byzpg import Config
from byzpg.experiments.authors_script import curves, first_parameters, tosses
from byzpg.experiments.paper import Scope, grid
from byzpg.learning.policies import CategoricalMLP
from byzpg.training import Plan


def test_curves_are_known_where_they_can_be_seen() -> None:
    found = curves("fig2_cartpole_attacks_decbyzpg", "LargeNoise")
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


def test_every_published_panel_is_one_of_the_experiments() -> None:
    """Labels of cells are those of the published curves, to the letter."""
    for experiment in grid(["all"], Scope()).experiments:
        for panel in experiment.panels:
            assert panel.published is not None
            assert set(curves(*panel.published)) == {cell.label for cell in panel.cells}


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
    large = Plan.of(settings, simulation.coin()).large
    assert list(large) == list(islice(tosses(0.2), len(large)))
    keys = jax.random.split(jax.random.key(0), 2)
    seeded = jax.vmap(Config(num_agents=2).resolved().federation().agent.policy.initial)(keys)
    assert np.all(seeded[0] != seeded[1])
