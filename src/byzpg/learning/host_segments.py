"""Segments of tasks on the host, whose environments somebody must keep between two segments.

One compiled call per time step evaluates the policies of all agents. Random numbers have the same addresses as in
`segments`, so both ways draw the same actions.
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from weakref import finalize

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from byzpg.envs.host import HostTask, Stage
from byzpg.envs.spaces import Space
from byzpg.learning.host_rollouts import chosen_actions
from byzpg.learning.policies import Policy, Weights
from byzpg.learning.rollouts import ATTACK_ACTIONS, NOISE, RESET, PlayAttacks
from byzpg.learning.segments import NOT_STARTED, Environments, Segment, draws, keys_for, recorded_rewards
from byzpg.robust.attacks import Attack


class Venue:
    """The host environments of some agents, which go on from one segment to the next.

    A simulation has one, and so does a live member. Environments cannot be saved: one that is not where
    `Environments` says begins a new episode. In a resumed run, whose venue is new, that is all of them.
    """

    def __init__(self, task: HostTask) -> None:
        self.task = task
        self._stage: Stage | None = None
        self._opened = ExitStack()
        finalize(self, self._opened.close)
        # Of all environments [row]: what they show, and where they are.
        self._observations = np.zeros((0, task.observation_size), np.float32)
        self._elapsed = self._ended = np.zeros(0, np.int32)

    def play_segment(
        self,
        policy: Policy,
        parameters: Array,
        environments: Environments,
        keys: Array,
        *,
        num_steps: int,
        horizon: int,
        attackers: PlayAttacks = (),
    ) -> tuple[Environments, Segment]:
        """Take steps in all environments with every agent's policy; arguments as for `segments.play_segment`.

        An episode also ends where the task truncates it.
        """
        by_agent, space = environments.elapsed.shape, self.task.action_space
        on_actions = [(attack, mask) for attack, mask in attackers if attack.changes_actions]
        weights, noise, attack_draws, seeds = _prepared(
            parameters, keys, policy=policy, space=space if on_actions else None, shape=(num_steps, by_agent[1])
        )

        def act(observations: np.ndarray, time: int) -> list[np.ndarray]:
            """The actions at observations [row, feature], and log π of them."""
            found = chosen_actions(
                weights,
                observations.reshape(*by_agent, -1),
                noise,
                attack_draws,
                time,
                [mask for _, mask in on_actions],
                policy=policy,
                space=space,
                attacks=tuple(attack for attack, _ in on_actions),
            )
            return [np.asarray(each).reshape(-1, *each.shape[2:]) for each in found]

        elapsed, gained, latest, ended = (
            np.asarray(each).reshape(-1)
            for each in (environments.elapsed, environments.gained, environments.latest, environments.ended)
        )
        seeds = np.asarray(seeds).reshape(len(elapsed), -1)
        rows, steps = np.arange(len(elapsed)), []
        try:
            stage, begun = self._gathered(elapsed, ended, seeds[:, 0])
            elapsed, gained = (np.where(begun, 0, each) for each in (elapsed, gained))
            for time in range(num_steps):
                seen = self._observations
                actions, log_probabilities = act(seen, time)
                following, rewards, terminated, truncated = stage.step(rows, actions)
                self.task.checked("observation", following)
                elapsed, gained = elapsed + 1, gained + self.task.checked("reward", rewards)
                ends = terminated | truncated | (elapsed >= horizon)
                steps.append((seen, following, actions, rewards, log_probabilities, terminated, ends))
                latest = np.where(ends | (ended == 0), gained, latest)
                ended = ended + ends.astype(ended.dtype)
                elapsed, gained = (np.where(ends, 0, each) for each in (elapsed, gained))
                self._observations = self._restarted(stage, ends, seeds[:, time + 1], following)
        except BaseException as error:  # the environments are in the middle of a segment, and perhaps broken
            self._stage = None
            self._opened.__exit__(type(error), error, error.__traceback__)
            raise
        self._elapsed, self._ended = elapsed, ended
        after = Environments((), *(jnp.asarray(each.reshape(by_agent)) for each in (elapsed, gained, latest, ended)))
        columns = (np.stack(each, axis=1) for each in zip(*steps, strict=True))
        segment = Segment(*(jnp.asarray(each.reshape(*by_agent, *each.shape[1:])) for each in columns))
        masks, attacks = [mask for _, mask in attackers], tuple(attack for attack, _ in attackers)
        return after, _recorded(segment, keys, masks, attacks=attacks)

    def _gathered(self, elapsed: np.ndarray, ended: np.ndarray, seeds: np.ndarray) -> tuple[Stage, np.ndarray]:
        """The environments, each where it was left or at the start of a new episode; also which of them are new."""
        if self._stage is None:
            self._stage = self._opened.enter_context(self.task.stage(len(seeds)))
            self._elapsed = self._ended = np.full(len(seeds), NOT_STARTED)
        elsewhere = (self._elapsed != elapsed) | (self._ended != ended)
        if np.all(elsewhere):  # then the seeds decide everything, also in EnvPool
            self._observations = self.task.checked("observation", self._stage.reset(seeds))
        else:
            self._observations = self._restarted(self._stage, elsewhere, seeds, self._observations)
        return self._stage, elsewhere

    def _restarted(self, stage: Stage, where: np.ndarray, seeds: np.ndarray, observations: np.ndarray) -> np.ndarray:
        """The observations [row, feature], with new episodes in some places."""
        if not np.any(where):
            return observations
        rows, observations = np.flatnonzero(where), observations.copy()
        observations[rows] = self.task.checked("observation", stage.restart(rows, seeds[rows]))
        return observations


@partial(jax.jit, static_argnames=("policy", "space", "shape"))
def _prepared(
    parameters: Array, keys: Array, *, policy: Policy, space: Space | None, shape: tuple[int, int]
) -> tuple[Weights, Array, Array | None, Array]:
    """The agents' weights, their draws, those of attackers on actions in `space`, if any, and seeds of episodes.

    An environment [agent, environment] has a seed for the start of the segment, and one after each of its steps. They
    are at most 2³¹ − 2: EnvPool takes no larger ones.
    """
    num_steps, num_environments = shape
    noise = draws(keys, NOISE, (*shape, policy.noise_size))
    attack_draws = None if space is None else draws(keys, ATTACK_ACTIONS, (*shape, space.size))
    seeds = jax.vmap(lambda key: jax.random.randint(key, (num_environments, num_steps + 1), 0, 2**31 - 1))
    return jax.vmap(policy.unflatten)(parameters), noise, attack_draws, seeds(keys_for(keys, RESET))


@partial(jax.jit, static_argnames="attacks")
def _recorded(segment: Segment, keys: Array, masks: list[Array], *, attacks: tuple[Attack, ...]) -> Segment:
    """The segment with rewards as the agents record them."""
    rewards = recorded_rewards(segment, keys, [*zip(attacks, masks, strict=True)])
    return replace(segment, rewards=rewards)
