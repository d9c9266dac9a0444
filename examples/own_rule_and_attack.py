"""Your own rule and your own attack: two small classes, used like those that byzpg brings.

    python examples/own_rule_and_attack.py
    python examples/own_rule_and_attack.py --output plots

The rule averages the vectors around the medoid. The attack is a sleeper: attackers behave well until a given iteration,
and send reversed gradients from there on. The script applies the rule to thirteen vectors, measures it with a
certificate, and trains on CartPole with the rule and with the plain mean.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import byzpg
from byzpg.experiments import figures
from byzpg.robust import Mean, certificate
from byzpg.robust.aggregators import WeightedAggregator
from byzpg.robust.attacks import Knowledge, MessageAttack
from byzpg.robust.geometry import Cloud


@dataclass(frozen=True)
class AroundMedoid(WeightedAggregator):
    """The mean of the K − f vectors nearest to the medoid, the vector with the smallest sum of distances to the others.

    A rule that is a weighted mean returns its weights, as coefficients of the points in the cloud. Distances to vectors
    that are missing or not finite are infinite, so they must not count in a sum.
    """

    def coefficients(self, cloud: Cloud, num_byzantine: int, key: Array | None) -> Array:
        distances = jnp.sqrt(cloud.distances())
        sums = jnp.sum(jnp.where(cloud.usable, distances, 0), axis=1)
        medoid = jnp.argmin(jnp.where(cloud.usable, sums, jnp.inf))
        rank = jnp.argsort(jnp.argsort(distances[medoid]))
        return cloud.mean_of(rank < cloud.num_points - num_byzantine)


@dataclass(frozen=True)
class Sleeper(MessageAttack):
    """The honest gradient until iteration `wake`; from there on, −scale × the honest mean."""

    wake: int = 0
    scale: float = 5.0

    def false_messages(self, knowledge: Knowledge, receivers: Array) -> Array:
        reversed_mean = knowledge.same_for_all(-self.scale * knowledge.mean())
        return jnp.where(knowledge.iteration >= self.wake, reversed_mean, knowledge.truth())


def main(output: Path) -> None:
    honest = 1 + 0.1 * jax.random.normal(jax.random.key(0), (10, 4))
    received = np.concatenate([honest, np.full((3, 4), -50.0)])
    for rule in (AroundMedoid(), Mean()):
        print(f"{rule} of ten vectors near 1 and three at -50: {np.asarray(rule(received, num_byzantine=3))[0]:.2f}")
    for rule in (AroundMedoid(), Mean()):
        print(certificate(rule, Sleeper(), num_agents=13, num_byzantine=3, trials=64))

    curves = []
    for rule in (AroundMedoid(), Mean()):
        config = byzpg.Config(
            num_agents=5,
            num_byzantine=1,
            aggregator=rule,
            attack=Sleeper(wake=10, scale=20.0),
            num_seeds=2,
            trajectories=375,
            horizon=200,
        )
        run = byzpg.train(config)
        curves.append(figures.Curve(str(rule), run.trajectories, run.returns))
        before, after = run.returns[:, 9].mean(), run.returns[:, -3:].mean()
        print(f"{rule}: return {before:.0f} before the attack, {after:.0f} at the end")
    title = "CartPole, 5 agents; one attacks from iteration 10 on"
    figures.save(figures.learning_curves(curves, title), output / "own-rule-and-attack.png")
    print(f"Plot: {output / 'own-rule-and-attack.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/examples"), help="folder of the plot")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    main(output)
