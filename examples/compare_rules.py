"""Compare three rules under the same attack: the plain mean, the geometric median (RFA), and NNM with a trimmed mean.

    python examples/compare_rules.py
    python examples/compare_rules.py --attack LargeNoise --output plots

Five agents learn CartPole without a server; one of them attacks. AvgZero chooses its message so that the mean of all
gradients is zero: with the plain mean, nothing is learned. The script prints the final returns and plots the curves.
"""

import argparse
from pathlib import Path

import byzpg
from byzpg.experiments import figures
from byzpg.robust import NNM, RFA, Mean, TrimmedMean

RULES = {"mean": Mean(), "RFA": RFA(), "NNM and trimmed mean": NNM(TrimmedMean())}


def main(attack: str, output: Path) -> None:
    curves = []
    print(f"Return in the last five iterations, under {attack}")
    for name, rule in RULES.items():
        config = byzpg.Config(
            num_agents=5, num_byzantine=1, attack=attack, aggregator=rule, num_seeds=2, trajectories=450, horizon=200
        )
        run = byzpg.train(config)
        curves.append(figures.Curve(name, run.trajectories, run.returns))
        print(f"  {name:<21} {run.returns[:, -5:].mean():4.0f} of {config.horizon}")
    figures.save(figures.learning_curves(curves, f"CartPole under {attack}"), output / "compare-rules.png")
    print(f"Plot: {output / 'compare-rules.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attack", default="AvgZero", help="any attack of `byzpg list`; default AvgZero")
    parser.add_argument("--output", type=Path, default=Path("runs/examples"), help="folder of the plot")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    main(given.attack, given.output)
