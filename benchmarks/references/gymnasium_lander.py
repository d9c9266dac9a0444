"""Gymnasium's LunarLander as the reference for ours: replay its episodes from the same states with the same noise.

Box2D has no wheel on some machines. Tests therefore read Gymnasium's episodes from `RECORDED`, which
`python benchmarks/fidelity.py record` writes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
from gymnasium.utils.seeding import np_random

from byzpg._files import write_atomically
from byzpg.envs.box2d import Contact, Pose, Velocity
from byzpg.envs.lander_bodies import Body, Hinge, Leg
from byzpg.envs.lunar_lander import LunarLander, State

HORIZON = LunarLander.horizon
RECORDED = Path(__file__).parent / "gymnasium_lander.npz"
# The number of recorded episodes per policy, and for how many steps after the end of an episode noise is recorded.
NUMBERS = {"random": 75, "heuristic": 40, "continuous": 8}
ROOM = 100


@dataclass(frozen=True)
class Episode:
    """One episode of Gymnasium, with the noise that its steps drew and that later steps would have drawn."""

    first: State
    observations: np.ndarray
    rewards: np.ndarray
    actions: np.ndarray
    noise: np.ndarray

    @property
    def length(self) -> int:
        return len(self.rewards)


def copied(inner: Any) -> State:
    """Convert Gymnasium's state after `reset`, where nothing touches the ground, to our state."""

    def scalar(value: float) -> Any:
        return np.float32(value)

    def body(body: Any) -> Body:
        centre, speed = body.worldCenter, body.linearVelocity
        pose = Pose((scalar(centre[0]), scalar(centre[1])), scalar(body.angle))
        velocity = Velocity((scalar(speed[0]), scalar(speed[1])), scalar(body.angularVelocity))
        return Body(pose, velocity, scalar(0))

    def leg(leg: Any) -> Leg:
        joint = leg.joint
        force, limit = joint.GetReactionForce(1.0), joint.GetReactionTorque(1.0)
        hinge = Hinge(
            (scalar(force[0]), scalar(force[1])),
            scalar(limit),
            scalar(joint.GetMotorTorque(1.0)),
            scalar(np.sign(limit)),
        )
        none = scalar(0), scalar(0)
        contact = Contact((scalar(-1), scalar(-1)), none, none)
        return Leg(body(leg), hinge, (contact, contact), none, (none, none), scalar(leg.ground_contact))

    corners = [fixture.shape.vertices for fixture in inner.moon.fixtures[1:]]
    assert len(corners) == 10
    heights = [corners[0][0][1], *(end[1] for _, end in corners)]
    left, right = (leg(each) for each in inner.legs)
    return State(body(inner.lander), (left, right), tuple(map(scalar, heights)), scalar(inner.prev_shaping), scalar(0))


def draws(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The heights and the force that `reset` draws, and pairs of noise in [0, 1).

    The first pair belongs to the step that `reset` takes, the others to the steps of the episode.
    """
    generator, _ = np_random(seed)
    heights = generator.uniform(0, 400 / 30 / 2, size=12)
    force = generator.uniform(-1000, 1000, size=2)
    return heights, force, (generator.uniform(-1, 1, size=(HORIZON + 1, 2)) + 1) / 2


def episode(seed: int, policy: str, *, continuous: bool = False) -> Episode:
    env = gymnasium.make("LunarLander-v3", continuous=continuous)
    observation, _ = env.reset(seed=seed)
    first = copied(env.unwrapped)
    *_, noise = draws(seed)
    rng = np.random.default_rng([seed, 1])
    observations, rewards, actions, ended = [observation], [], [], False
    while not ended:
        if policy == "heuristic":
            action = int(heuristic(observation[None])[0])
        else:
            action = rng.uniform(-1, 1, 2).astype(np.float32) if continuous else int(rng.integers(4))
        observation, reward, terminated, truncated, _ = env.step(action)
        observations.append(observation)
        rewards.append(reward)
        actions.append(action)
        ended = terminated or truncated
    return Episode(first, np.array(observations), np.array(rewards), np.array(actions), noise[1:].astype(np.float32))


def heuristic(observation: np.ndarray) -> np.ndarray:
    """Gymnasium's own controller, for a batch of observations [n, 8]."""
    x, y, x_speed, y_speed, angle, spin, left, right = observation.T
    turn = (np.clip(0.5 * x + x_speed, -0.4, 0.4) - angle) * 0.5 - spin
    lift = (0.55 * np.abs(x) - y) * 0.5 - y_speed * 0.5
    grounded = (left > 0) | (right > 0)
    turn, lift = np.where(grounded, 0, turn), np.where(grounded, -y_speed * 0.5, lift)
    main = (lift > np.abs(turn)) & (lift > 0.05)
    return np.select([main, turn < -0.05, turn > 0.05], [2, 3, 1], 0)


def replay(
    step: Callable[..., Any],
    environment: LunarLander,
    episodes: list[Episode],
    policies: Sequence[str],
    batch: int,
    most: int = HORIZON,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Play our episodes from Gymnasium's first states with Gymnasium's noise, for at most `most` steps each.

    Each episode has its policy: "random" repeats the actions of Gymnasium's episode, "heuristic" sees our own
    observations. All episodes share one batch: when an episode ends, the next one takes its place.

    Returns:
        The observations and the rewards of each episode.
    """
    observe = jax.jit(environment.observe)
    firsts = jax.tree.map(lambda *leaves: np.stack(leaves), *(each.first for each in episodes))
    looks = np.array([policy == "heuristic" for policy in policies])
    number = np.minimum(np.arange(batch), len(episodes) - 1)  # the episode at each place of the batch
    busy, time = np.arange(batch) < len(episodes), np.zeros(batch, int)
    waiting = iter(range(batch, len(episodes)))
    state, fresh = jax.tree.map(lambda leaf: leaf[number], firsts), busy.copy()
    observations: list[list[np.ndarray]] = [[] for _ in episodes]
    rewards: list[list[np.ndarray]] = [[] for _ in episodes]
    observation = np.zeros((batch, environment.observation_size))
    while busy.any():
        if fresh.any():
            state = jax.tree.map(lambda first, now: np.where(fresh, first[number], now), firsts, state)
            observation = np.stack(observe(state), axis=-1)
            for place in np.flatnonzero(fresh):
                observations[number[place]].append(observation[place])
        chosen = [(episodes[k], t) for k, t in zip(number, time, strict=True)]
        actions = np.stack([each.actions[min(t, each.length - 1)] for each, t in chosen])
        if looks.any():
            actions = np.where(looks[number], heuristic(observation), actions)
        columns = (actions.astype(np.int32),) if actions.ndim == 1 else actions.T
        # Our episode can be longer than Gymnasium's: the recorded noise continues beyond its end.
        noise = np.stack([each.noise[min(t, len(each.noise) - 1)] for each, t in chosen])
        state, reward, ended = step(state, tuple(columns), (noise[:, 0], noise[:, 1]))
        observation, reward, time = np.stack(observe(state), axis=-1), np.asarray(reward), time + 1
        for place in np.flatnonzero(busy):
            observations[number[place]].append(observation[place])
            rewards[number[place]].append(reward[place])
        fresh[:] = False
        for place in np.flatnonzero(busy & (np.asarray(ended) | (time >= most))):
            following = next(waiting, None)
            busy[place] = fresh[place] = following is not None
            if following is not None:
                number[place], time[place] = following, 0
    return [(np.array(seen), np.array(paid)) for seen, paid in zip(observations, rewards, strict=True)]


def outcome(rewards: np.ndarray) -> str:
    return {100.0: "landed", -100.0: "lost"}.get(float(rewards[-1]), "time is up")


def first_touch(observations: np.ndarray) -> int:
    """The first step at which a leg touches the ground, else the number of steps."""
    touching = observations[:, 6:].any(axis=1)
    return int(np.argmax(touching)) if touching.any() else len(observations) - 1


def record() -> None:
    """Write `RECORDED`: Gymnasium's episodes from seeds 0, 1, ..., and the first observations of 1,000 seeds."""
    arrays: dict[str, np.ndarray] = {}
    for policy, number in NUMBERS.items():
        for seed in range(number):
            each, name = episode(seed, policy, continuous=policy == "continuous"), f"{policy}/{seed}"
            arrays[f"{name}/first"] = np.array(jax.tree.leaves(each.first), np.float32)
            arrays[f"{name}/observations"] = each.observations.astype(np.float32)
            arrays[f"{name}/rewards"] = each.rewards
            arrays[f"{name}/actions"] = each.actions
            arrays[f"{name}/noise"] = each.noise[: each.length + ROOM]
    env = gymnasium.make("LunarLander-v3")
    arrays["starts"] = np.array([env.reset(seed=seed)[0] for seed in range(1000)], np.float32)
    write_atomically(RECORDED, lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))


def recorded(policy: str) -> list[Episode]:
    """The recorded episodes of Gymnasium."""
    environment = LunarLander()
    structure = jax.tree.structure(jax.eval_shape(environment.reset, jax.random.key(0)))
    with np.load(RECORDED) as arrays:
        return [
            Episode(
                jax.tree.unflatten(structure, list(arrays[f"{policy}/{seed}/first"])),
                *(arrays[f"{policy}/{seed}/{part}"] for part in ("observations", "rewards", "actions", "noise")),
            )
            for seed in range(NUMBERS[policy])
        ]
