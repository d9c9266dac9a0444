"""A member from its files: manifest and key in, a trained policy out."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from byzpg import envs
from byzpg.config import Settings
from byzpg.federation import members
from byzpg.federation.members import seeded_key
from byzpg.federation.metrics import METRICS
from byzpg.live.identity import read_key
from byzpg.live.manifest import Manifest
from byzpg.live.peer import Peer
from byzpg.live.rehearsal import Mischief, parse_attack
from byzpg.live.status import Log, Sink, Status
from byzpg.live.store import Store
from byzpg.robust.attacks import Attack
from byzpg.runs import Run, RunDirectory

# How much slower than the grace period a rehearsed slow writer is.
SLOWNESS = 10.0


@dataclass(frozen=True)
class Options:
    """What a member decides for itself."""

    key: Path
    directory: Path
    listen: str | None = None  # None: the manifest's address
    attack: str | None = None
    seed: int | None = None  # of its random numbers; None: a secret one
    metrics: tuple[str, int] | None = None  # where Prometheus scrapes


class Observed(members.Peer):
    """A learner that tells a status what its steps were like."""

    def observe(self, status: Status, iteration: int, phase: int | None) -> dict[str, Any]:
        """Of the last step, or with phase None of the last iteration; numbers to keep."""
        if phase is not None:
            status.combined(phase, self.outcome.diameter, self.outcome.weights)
            return {}
        trajectories, mean = int(self.plan.trajectories[iteration]), float(np.mean(self.returns))
        status.iteration_ended(iteration + 1, trajectories, mean)
        return {
            "trajectories": trajectories,
            "return_mean": mean,
            "return_std": float(np.std(self.returns)),
            "environment_steps": self.steps,
        }


async def take_part(manifest: Manifest, name: str, options: Options, sink: Sink | None = None) -> RunDirectory:
    """Run one member until the federation has finished; its results are a run's directory."""
    own = manifest.index(name)
    member, settings = manifest.members[own], manifest.settings()
    private = read_key(options.key, member)
    attack = None if options.attack is None else parse_attack(options.attack)
    for chosen, option in ((attack, "--attack"), (options.seed, "--seed")):
        if chosen is not None and not manifest.rehearsal:
            raise ValueError(f"{option} is for rehearsals, and this manifest says rehearsal = false.")
    store = Store(options.directory, manifest, member)
    try:
        key_data = store.random_key() if options.seed is None else seeded_key(options.seed)
        learner = Observed(
            settings.federation(),
            settings.schedule(),
            own,
            key_data,
            attack=attack if isinstance(attack, Attack) else None,
            as_simulated=options.seed is not None,
        )
        learner.on_output = store.keep_output
        log = Log(options.directory / "log.jsonl", name, sink)
        status = Status(
            tuple(each.name for each in manifest.members),
            own,
            learner.num_iterations,
            None if attack is None else str(attack),
            envs.make(settings.env).reward_threshold,
            settings.env,
        )
        for record in store.read_progress():
            status.curve.append((record["trajectories"], record["return_mean"]))
        delay = SLOWNESS * manifest.times.grace if attack == "slow" else 0.0
        peer = Peer(manifest, own, private, store, learner, status, log, options.listen or member.address, delay)
        if attack is not None:
            log("rehearsal", level="warning", attack=str(attack))
            peer.outgoing = Mischief(attack, learner, peer.course, peer.seal).frame
        stop = None if options.metrics is None else status.numbers.serve(*options.metrics)
        try:
            await peer.run()
        finally:
            log.close()
            if stop is not None:
                stop()
        return _write_results(store, settings, learner)
    finally:
        store.close()


def _write_results(store: Store, settings: Settings, learner: members.Peer) -> RunDirectory:
    """What this member has learned and seen, as a run of one agent."""
    path = store.path / "run"
    if path.exists() and RunDirectory.open(path).complete:
        return RunDirectory.open(path)
    directory = RunDirectory.open(path) if path.exists() else RunDirectory.create(path, settings)
    records = {record["iteration"]: record for record in store.read_progress()}
    iterations = range(learner.num_iterations)
    metrics = {
        name: np.asarray([[records.get(t, {}).get(name, np.nan) for t in iterations]], np.float32) for name in METRICS
    }
    # Of a member that was behind when iteration T̂ came, there is none.
    uniform = np.full_like(learner.parameters, np.nan) if (kept := store.output()) is None else kept
    run = Run.of(
        settings, learner.plan, metrics=metrics, last=learner.parameters[None, None], uniform=uniform[None, None]
    )
    directory.write_results(run)
    return directory
