"""A live federation in one file: keys, a manifest, and five members that talk over real connections on this machine.

    python examples/live_federation.py
    python examples/live_federation.py --attack Equivocate --output plots

Needs `pip install '.[live]'` in the clone. Every member has its own keys, port, directory and random numbers. Members
connect by mutual TLS, sign their messages, and exchange gradients and parameters; no trajectory leaves a member. The
last member, erin, attacks. At the end, the script compares the honest members' parameters: they must be equal.

On several machines, each member would be one process: `byzpg keygen`, `byzpg federation new` and `byzpg peer`.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

import numpy as np

import byzpg
from byzpg.experiments import figures
from byzpg.live.identity import generate, write_identity
from byzpg.live.links import free_ports
from byzpg.live.manifest import Manifest, Times, new_manifest
from byzpg.live.member import Options, take_part

NAMES = ("alice", "bob", "carol", "dave", "erin")
TRAINING = {"env": "CartPole-v1", "trajectories": 300, "horizon": 200, "rounds": 1}


def found(folder: Path) -> Manifest:
    """Write a key file for every member, and the manifest that all members share."""
    identities = [generate(name, f"127.0.0.1:{port}") for name, port in zip(NAMES, free_ports(5), strict=True)]
    for member, private in identities:
        write_identity(folder, member, private)
    # A rehearsal lets a member attack on purpose. Members wait up to 30 s for a late message, so that none is missed.
    times = Times(grace=30.0, linger=1.0)
    manifest = new_manifest([member for member, _ in identities], 1, TRAINING, times, rehearsal=True)
    manifest.write(folder / "federation.toml")
    return manifest


async def train(folder: Path, manifest: Manifest, attack: str | None) -> None:
    """Run all members side by side until training has ended."""

    def options(name: str) -> Options:
        own_attack = attack if name == NAMES[-1] else None
        return Options(key=folder / f"{name}.key", directory=folder / name, attack=own_attack)

    await asyncio.gather(*(take_part(manifest, name, options(name)) for name in NAMES))


def main(attack: str | None, output: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = found(folder)
        print(f"Manifest of {len(NAMES)} members, f = {manifest.num_byzantine}; {NAMES[-1]} attacks with {attack}")
        asyncio.run(train(folder, manifest, attack))
        runs = {name: byzpg.load(folder / name / "run") for name in NAMES}
        evidence = sorted((folder / NAMES[0] / "evidence").glob("*.json"))

    parameters = {name: run.parameters["last"][0, 0] for name, run in runs.items()}
    for name, run in runs.items():
        first, last = run.returns[0, 0], run.returns[0, -5:].mean()
        print(
            f"{name:>6}: return {first:4.0f} at first, {last:4.0f} at the end; first parameters {parameters[name][:3]}"
        )
    honest = [parameters[name] for name in NAMES[:-1]]
    apart = max(float(np.max(np.abs(one - other))) for one in honest for other in honest)
    print(f"Largest difference between the honest members' parameters: {apart:.1g}")
    if evidence:
        print(f"{NAMES[0]} has {len(evidence)} proofs of equivocation")

    curves = [figures.Curve(name, run.trajectories, run.returns) for name, run in runs.items()]
    title = f"Five members on this machine; {NAMES[-1]} attacks with {attack}"
    what = "return (each member's own)"
    figures.save(figures.learning_curves(curves, title, what=what), output / "live-federation.png")
    print(f"Plot: {output / 'live-federation.png'}")
    if apart > 1e-6:
        raise SystemExit("the honest members' parameters differ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attack", default="SignFlip(scale=10.0)", help="what erin does; for example Equivocate")
    parser.add_argument("--output", type=Path, default=Path("runs/examples"), help="folder of the plot")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    main(given.attack, given.output)
