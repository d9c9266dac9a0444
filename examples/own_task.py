"""Your own task: write a Gymnasium environment, and let a federation with an attacker learn it.

    python examples/own_task.py
    python examples/own_task.py --output plots

Needs `pip install '.[gymnasium]'` in the clone. Five agents learn to keep a room at the right temperature; one sends
false gradients. The task is named by `module:factory`, here `own_task:make`, so it works on the command line as well:
`cd examples && byzpg train --env own_task:make`.
"""

import argparse
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import byzpg
from byzpg.experiments import figures


class Thermostat(gymnasium.Env):
    """Heat or cool a room. The observation is the temperature error; the reward is minus its absolute value."""

    observation_space = gymnasium.spaces.Box(-10, 10, (1,))
    action_space = gymnasium.spaces.Discrete(2)  # cool, heat

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.error = self.np_random.uniform(-3, 3, 1)
        return self.error, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.error = (self.error + 0.5 * (2 * action - 1)).clip(-10, 10)
        return self.error, -abs(float(self.error[0])), False, False, {}


def make() -> gymnasium.Env:
    """The factory: byzpg calls it once for every environment that it needs. Episodes have 20 steps."""
    return gymnasium.wrappers.TimeLimit(Thermostat(), 20)


def main(output: Path) -> None:
    config = byzpg.Config(
        env="own_task:make",
        num_agents=5,
        num_byzantine=1,
        attack="SignFlip",
        num_seeds=2,
        trajectories=160,
        large_batch=8,
        switch_probability=1.0,
        step_size=0.05,
        hidden=(8,),
    )
    run = byzpg.train(config)
    first, last = run.returns[:, 0].mean(), run.returns[:, -5:].mean()
    print(f"Return of the first iteration: {first:.1f}")
    print(f"Return of the last five iterations: {last:.1f}")

    policy = run.policy()
    for error in (-2.0, 2.0):
        action = ("cool", "heat")[int(policy.act(np.array([error]), greedy=True))]
        print(f"The room is {abs(error):.0f} degrees too {'cold' if error < 0 else 'warm'}: {action}")

    curve = figures.Curve("DecByzPG, 1 of 5 agents attacks", run.trajectories, run.returns)
    figures.save(figures.learning_curves([curve], "Thermostat"), output / "own-task.png")
    print(f"Plot: {output / 'own-task.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/examples"), help="folder of the plot")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    main(output)
