"""Environments on the host that go on from one segment to the next."""

from dataclasses import dataclass
from typing import Any

import host_tasks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from host_tasks import Corridor
from tiers import slow_except

from byzpg import envs
from byzpg.envs.cartpole import CartPole, State
from byzpg.envs.host import HostTask
from byzpg.learning.host_segments import Venue
from byzpg.learning.policies import CategoricalMLP, Policy
from byzpg.learning.rollouts import PlayAttacks
from byzpg.learning.segments import Environments, Segment, play_segment
from byzpg.robust.adaptive import BonusForAction
from byzpg.robust.attacks import Attack, NoAttack, RandomAction, RandomReward, RewardFlip

CARTPOLE = CategoricalMLP(4, hidden=(8,))
CORRIDOR = CategoricalMLP(2, (), num_actions=3)
NUM_AGENTS, NUM_ENVIRONMENTS, NUM_STEPS, HORIZON = 3, 4, 40, 25


def venue_of(name: str) -> Venue:
    task = envs.make(name)
    assert isinstance(task, HostTask)
    return Venue(task)


def played(
    where: Venue | CartPole,
    policy: Policy = CARTPOLE,
    environments: Environments | None = None,
    seed: int = 0,
    horizon: int = HORIZON,
    attackers: PlayAttacks = (),
) -> tuple[Environments, Segment]:
    task = where.task if isinstance(where, Venue) else where
    environments = environments or Environments.initial(task, NUM_AGENTS, NUM_ENVIRONMENTS)
    parameters = jax.vmap(policy.initial)(jax.random.split(jax.random.key(7), NUM_AGENTS))
    given: Any = policy, parameters, environments, jax.random.split(jax.random.key(seed), NUM_AGENTS)
    options: Any = {"num_steps": NUM_STEPS, "horizon": horizon, "attackers": attackers}
    return where.play_segment(*given, **options) if isinstance(where, Venue) else play_segment(where, *given, **options)


def two(where: Venue | CartPole, **options: Any) -> tuple[list[Environments], Segment]:
    """Two segments, one after the other, as one."""
    first, segment = played(where, **options)
    second, following = played(where, environments=first, seed=1, **options)
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=2), segment, following)
    return [first, second], joined


@dataclass(frozen=True)
class FixedStart(CartPole):
    """The JAX twin of host_tasks.fixed_start."""

    def reset(self, key: jax.Array) -> State:
        return State(*(jnp.float32(each) for each in host_tasks.START))


@pytest.mark.parametrize(
    "attack",
    slow_except(
        [RandomAction(), RewardFlip()], [NoAttack(), RandomAction(), RandomReward(), RewardFlip(), BonusForAction(1)]
    ),
    ids=str,
)
def test_segments_are_those_of_the_twin_in_jax(attack: Attack) -> None:
    attackers = [(attack, jnp.asarray([False, True, False]))]
    here, there = two(venue_of("host_tasks:fixed_start"), attackers=attackers), two(FixedStart(), attackers=attackers)
    assert np.any(here[1].terminated)
    assert np.any(here[1].ended & ~here[1].terminated)
    for name, ours in vars(here[1]).items():
        np.testing.assert_allclose(ours, getattr(there[1], name), atol=1e-4)
        assert ours.dtype == getattr(there[1], name).dtype
    for ours, theirs in zip(here[0], there[0], strict=True):
        for name in ("elapsed", "gained", "latest", "ended"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
            assert getattr(ours, name).dtype == getattr(theirs, name).dtype
    honest = two(venue_of("host_tasks:fixed_start"))[1]
    changed = any(np.any(one != other) for one, other in zip(*map(jax.tree.leaves, (here[1], honest)), strict=True))
    assert changed == (attack != NoAttack())


def test_a_task_ends_episodes_by_itself_and_says_how() -> None:
    """A corridor shows 1 at the start of an episode and 0 later, and how much is left; odd lengths are terminated."""
    Corridor.made.clear()
    venue = venue_of("host_tasks:corridor")
    ends, segment = two(venue, policy=CORRIDOR, horizon=100)
    assert len(Corridor.made) <= NUM_AGENTS * NUM_ENVIRONMENTS + 1, "environments are made once"
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for i, j in np.ndindex(NUM_AGENTS, NUM_ENVIRONMENTS):
        length, is_first = 0, True
        for t in range(2 * NUM_STEPS):
            length += 1
            assert segment.observations[i, j, t, 0] == is_first
            assert segment.following[i, j, t, 0] == 0, "what is seen before a new episode begins"
            is_first = bool(segment.ended[i, j, t])
            assert is_first == (segment.following[i, j, t, 1] == 0)
            if is_first:
                lengths[bool(segment.terminated[i, j, t])].append(length)
                length = 0
            else:
                after = segment.observations[i, j, t + 1 : t + 2]
                np.testing.assert_array_equal(after, segment.following[i, j, t][None][: len(after)])
    assert {each % 2 for each in lengths[True]} == {1}
    assert {each % 2 for each in lengths[False]} == {0}
    assert len(set(lengths[True] + lengths[False])) > 5, "every episode has a seed of its own"
    np.testing.assert_array_equal(ends[1].ended, np.sum(segment.ended, axis=2))


def test_a_horizon_cuts_off_what_the_task_does_not() -> None:
    _, segment = two(venue_of("host_tasks:corridor"), policy=CORRIDOR, horizon=3)
    cut = segment.ended & ~segment.terminated & (segment.following[..., 1] > 0)
    assert np.any(cut)
    runs = np.diff(np.flatnonzero(segment.ended[0, 0]))
    assert np.max(runs) <= 3


def test_a_pool_goes_on_and_restarts_what_has_ended() -> None:
    venue = venue_of("envpool:CartPole-v1")
    _, segment = two(venue)
    goes_on = ~segment.ended[:, :, :-1]
    seen, before = segment.observations[:, :, 1:], segment.following[:, :, :-1]
    np.testing.assert_array_equal(seen[goes_on], before[goes_on])
    fresh = seen[~goes_on]
    assert np.all(np.abs(fresh) <= 0.05)
    assert len(np.unique(fresh, axis=0)) == len(fresh)
    assert np.all(segment.rewards == 1), "no step is lost to a restart"
    assert np.any(segment.terminated)
    assert np.any(segment.ended & ~segment.terminated), "at our horizon, which the pool does not know"
    np.testing.assert_array_equal(two(venue_of("envpool:CartPole-v1"))[1].observations, segment.observations)


@pytest.mark.parametrize("name", ["gymnasium:CartPole-v1", "envpool:CartPole-v1"])
def test_environments_that_are_elsewhere_begin_new_episodes(name: str) -> None:
    venue = venue_of(name)
    first, segment = played(venue)
    after, _ = played(venue, environments=first, seed=1)
    # As in a resumed run: a new venue, which cannot know where the environments were.
    resumed, new = played(venue_of(name), environments=first, seed=1)
    assert np.all(np.abs(new.observations[:, :, 0]) <= 0.05)
    assert np.any(np.abs(segment.following[:, :, -1]) > 0.05)
    np.testing.assert_array_equal(resumed.ended, first.ended + np.sum(new.ended, axis=2))
    # The same segment once more, in environments that have gone on since.
    again, repeated = played(venue, environments=first, seed=1)
    np.testing.assert_array_equal(repeated.observations, new.observations)
    np.testing.assert_array_equal(again.latest, resumed.latest)
    # One agent goes on, the others are elsewhere.
    mixed = jax.tree.map(lambda ours, theirs: jnp.concatenate([ours[:1], theirs[1:]]), again, after)
    _, last = played(venue, environments=mixed, seed=2)
    going = ~np.asarray(repeated.ended[0, :, -1])
    np.testing.assert_array_equal(last.observations[0, :, 0][going], repeated.following[0, :, -1][going])
    moved = np.asarray((again.elapsed != after.elapsed) | (again.ended != after.ended))
    assert np.any(moved[1:])
    assert np.all(np.abs(last.observations[1:, :, 0])[moved[1:]] <= 0.05)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unpaid", "gave the reward nan: every number must be finite"),
        ("unseen", "gave the observation inf: every number must be finite"),
        ("old", r"step failed \(ValueError: step returned 4 values, as in Gym before 0.26, and does not say which"),
    ],
)
def test_broken_tasks_give_one_clear_error(name: str, message: str) -> None:
    venue = venue_of(f"host_tasks:{name}")
    for _ in range(2):  # environments that failed are not used again
        with pytest.raises(ValueError, match=message):
            played(venue, CORRIDOR)
