"""byzpg play."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from byzpg.cli.console import console, counted, say
from byzpg.cli.parts import OwnModules


@dataclass(frozen=True)
class Play:
    """Play a trained policy in the real environment.

    Prints the returns of the policy as it was trained, with actions sampled from it, and of its most likely (greedy)
    actions, which can be far worse. Where the environment can be drawn, the first episode is saved as an animation.

    Example: byzpg play runs/CartPole-v1-DecByzPPO-AvgZero-1 --episodes 3
    """

    directory: tyro.conf.Positional[Path]
    """Directory of the run."""
    episodes: int = 10
    """Number of episodes."""
    seed: int = 0
    """Seed of the environment; episode i starts from seed + i."""
    index: int = 0
    """Index of the training seed whose policy plays, from 0."""
    agent: int = 0
    """Agent whose parameters are used, from 0."""
    greedy: bool = False
    """Animate greedy actions instead of sampled ones."""
    output: Path | None = None
    """File for the animation, .gif. Default: play.gif in the directory of the run."""
    parts: OwnModules = ()

    def run(self) -> None:
        output = self.directory / "play.gif" if self.output is None else self.output
        if output.suffix != ".gif":
            raise ValueError(f"--output must end in .gif, got {output}.")
        if self.episodes < 1:
            raise ValueError(f"--episodes must be at least 1, got {self.episodes}.")
        if not 0 <= self.seed <= 2**31 - 1 - self.episodes:
            raise ValueError(
                f"--seed must not be negative, and --seed + --episodes must be below 2³¹; got --seed {self.seed}."
            )
        from byzpg import play, training
        from byzpg.experiments import figures
        from byzpg.experiments.statistics import significant

        run = training.load(self.directory)
        policy, frames = run.policy(self.index, self.agent), []
        say(f"{run.settings.env}, {counted(self.episodes, 'episode')}")
        for name, greedy in {"sampled, as in training": False, "greedy": True}.items():
            drawn = greedy == self.greedy
            with console.status(f"playing: {name}"):
                returns, seen = play.evaluate(
                    policy, run.settings, self.episodes, self.seed, greedy=greedy, drawn=drawn
                )
            frames += seen
            listed = ", ".join(f"{float(f'{each:.4g}'):g}" for each in returns)  # 4 digits, without 1e+04
            say(f"  {name}: mean return {significant(returns.mean())} ({listed})")
        if not frames:
            say("This environment cannot be drawn.")
            return
        figures.save_animation(frames, output)
        say(f"Animation of the first episode ({'greedy' if self.greedy else 'sampled'}): {output}")
