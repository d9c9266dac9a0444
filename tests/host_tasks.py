"""Tasks as users may write them, for tests: correct ones and broken ones."""

import os
import time
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import TimeLimit

START = (0.01, -0.02, 0.03, 0.04)


class FixedStart(CartPoleEnv):
    """CartPole with a fixed first state."""

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(**options)
        self.state = np.asarray(START)
        return np.asarray(START, np.float32), {}


def fixed_start() -> gymnasium.Env:
    return TimeLimit(FixedStart(), 500)


class Corridor(gymnasium.Env):
    """The seed decides the length, 1 to 9 steps. Odd lengths are terminated, even ones truncated. Pays the action."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space: spaces.Space = spaces.Discrete(3, start=-1)
    made: ClassVar[list["Corridor"]] = []

    def __init__(self) -> None:
        self.made.append(self)
        self.num_steps = 0
        self.left = 0
        self.taken: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.length = self.left = int(self.np_random.integers(1, 10))
        return np.asarray([1, self.left / 9], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.left > 0, "stepped after its end"
        self.num_steps += 1
        self.left -= 1
        self.taken.append(action)
        ended, odd = self.left == 0, self.length % 2 == 1
        return np.asarray([0, self.left / 9], np.float32), float(np.sum(action)), ended and odd, ended and not odd, {}


def corridor() -> gymnasium.Env:
    return Corridor()


class Slider(Corridor):
    """A corridor whose actions are two numbers, one of them bounded."""

    action_space = spaces.Box(np.asarray([-0.5, -np.inf], np.float32), np.asarray([0.25, np.inf], np.float32))


def slider() -> gymnasium.Env:
    return TimeLimit(Slider(), 9)


class Misfit(Corridor):
    """A corridor with the given spaces."""

    def __init__(self, observation_space: spaces.Space | None = None, action_space: spaces.Space | None = None) -> None:
        super().__init__()
        self.observation_space = observation_space or Corridor.observation_space
        self.action_space = action_space or Corridor.action_space


def dictionary() -> gymnasium.Env:
    return Misfit(spaces.Dict({"place": spaces.Discrete(2)}))


def image() -> gymnasium.Env:
    return Misfit(spaces.Box(0, 255, (8, 8, 3), np.uint8))


def many_choices() -> gymnasium.Env:
    return Misfit(action_space=spaces.MultiDiscrete([2, 3]))


def failing() -> gymnasium.Env:
    raise KeyError("the map is missing")


def no_environment() -> dict[str, int]:
    return {}


numbers = count()


def always_another() -> gymnasium.Env:
    return Misfit(action_space=spaces.Discrete(2 + next(numbers)))


class Growing(Corridor):
    """Its number of actions changes with every reset."""

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self.action_space = spaces.Discrete(3 + next(numbers))
        return super().reset(**options)


def growing() -> gymnasium.Env:
    return Growing()


class Longer(Corridor):
    """Its observations are longer than its space says."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        return np.append(observation, 0), reward, terminated, truncated, info


def longer() -> gymnasium.Env:
    return Longer()


class Spoilt(Corridor):
    """Gives NaN as reward, or infinity as observation."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.what == "reward":
            reward = np.nan
        else:
            observation = observation + np.inf
        return observation, reward, terminated, truncated, info


def unpaid() -> gymnasium.Env:
    return Spoilt("reward")


def unseen() -> gymnasium.Env:
    return Spoilt("observation")


ONE = Corridor()


def the_same() -> gymnasium.Env:
    return ONE


def the_same_wrapped() -> gymnasium.Env:
    return gymnasium.wrappers.TimeLimit(the_same(), 20)


class Old(Corridor):
    """The interface of Gym before 0.26: `step` returns four values."""

    def step(self, action: Any) -> Any:
        return super().step(action)[:4]


def old() -> gymnasium.Env:
    return Old()


class Patient(Corridor):
    """Its first step writes its process id into the folder BYZPG_WAIT and waits there for a file `go`, up to 60 s."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        folder = Path(os.environ.get("BYZPG_WAIT") or "nowhere")
        if folder.is_dir() and not (folder / "process").exists():
            (folder / "writing").write_text(str(os.getpid()))
            (folder / "writing").rename(folder / "process")
            for _ in range(1200):
                if (folder / "go").exists():
                    break
                time.sleep(0.05)
        return super().step(action)


def patient() -> gymnasium.Env:
    print('{"kind": "finished"}')  # must not be taken for output of the program that plays it
    return TimeLimit(Patient(), 9)


class Stumbling(Corridor):
    """Raises an error at its first step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        raise KeyError("the map is missing")


def stumbling() -> gymnasium.Env:
    return TimeLimit(Stumbling(), 9)


class Unseeded(Corridor):
    """Starts anywhere, whatever the seed is."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        observation, info = super().reset(seed=seed)
        return observation + np.random.default_rng().normal(size=2).astype(np.float32), info


def unseeded() -> gymnasium.Env:
    return Unseeded()
