"""Take part in a federation as one member: a manifest and a key in, a trained policy out."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from byzpg import envs
from byzpg.config import Settings
from byzpg.federation import members
from byzpg.federation.members import seeded_key
from byzpg.federation.metrics import METRICS
from byzpg.live.identity import Member, PrivateIdentity, read_key
from byzpg.live.manifest import Manifest
from byzpg.live.peer import LivePeer
from byzpg.live.rehearsal import Late, RehearsedAttack, WireFault, parse_attack
from byzpg.live.status import Log, Sink, Status
from byzpg.live.store import Store, manifests
from byzpg.robust.attacks import Attack
from byzpg.runs import Run, RunDirectory

# The delay of a rehearsed slow member, in grace periods.
SLOWNESS = 10.0


@dataclass(frozen=True)
class Options:
    """What a member decides for itself.

    Attributes:
        key: The file of its private key.
        directory: Where its state and results go.
        listen: Where to accept connections, host:port; None for the manifest's address.
        attack: An attack to carry out on purpose, in a rehearsal.
        seed: The seed of its random numbers, in a rehearsal; None for a secret key.
        metrics: Address and port at which to serve metrics for Prometheus; None to serve none.
        proxy: Whether to connect to other members through the proxy that the environment names.
        final_states: Files final.state of members that have finished, for a member that comes too late.
        next_key: The file of its next private key, if the members have agreed on a new one.
        initial: θ_0 [d], if the manifest names its hash; see `live.initial`.
    """

    key: Path
    directory: Path
    listen: str | None = None
    attack: str | None = None
    seed: int | None = None
    metrics: tuple[str, int] | None = None
    proxy: bool = False
    final_states: tuple[Path, ...] = ()
    next_key: Path | None = None
    initial: np.ndarray | None = None


class ObservedPeer(members.Peer):
    """A peer that records in a status what happened in its rounds."""

    def observe(self, status: Status, iteration: int, phase: int | None) -> dict[str, Any]:
        """Record the last round or, if phase is None, the last iteration; return numbers to keep."""
        if phase is not None:
            status.combined(phase < self.exchanges, self.outcome.diameter, self.outcome.weights)
            return {}
        progress, mean = int(self.plan.progress[iteration]), float(np.mean(self.returns))
        status.iteration_ended(iteration + 1, progress, mean)
        return {
            self.agent.unit: progress,
            "return_mean": mean,
            "return_std": float(np.std(self.returns)),
            "environment_steps": self.steps,
            "episodes": self.ended,
        }


async def take_part(manifest: Manifest, name: str, options: Options, sink: Sink | None = None) -> RunDirectory:
    """Run one member until the federation has finished.

    Args:
        manifest: The federation.
        name: Which member this is.
        options: What the member decides for itself.
        sink: Called with every event of the log.

    Returns:
        The directory of a run with this member's results.

    Raises:
        ValueError: If the files do not belong together, or if an option is for rehearsals and the manifest allows none.
    """
    while True:
        history = manifests(options.directory, manifest)
        directory = await _take_part(history, name, options, sink)
        if directory is not None:
            return directory


async def _take_part(
    history: Sequence[Manifest], name: str, options: Options, sink: Sink | None
) -> RunDirectory | None:
    """Take part with the newest manifest, until the federation has finished or the manifest is replaced.

    Returns:
        The directory of the results; None if there is a new manifest, and this member is in it.
    """
    manifest = history[-1]
    if name not in [member.name for member in manifest.members]:
        raise ValueError(f"{name} is no longer a member of this federation: its members have removed it.")
    own = manifest.index(name)
    member, settings = manifest.members[own], manifest.settings()
    private = _private_keys(options, member)
    attack = _chosen_attack(manifest, options)
    log = Log(options.directory / "log.jsonl", name, sink)
    store = Store(options.directory, manifest, member, partial(_report_full_disk, log))
    try:
        peer = _new_peer(settings, own, store, options, attack)
        status = Status(
            names=tuple(each.name for each in manifest.members),
            own=own,
            num_iterations=peer.num_iterations,
            attack=None if attack is None else str(attack),
            reward_threshold=envs.make(settings.env).reward_threshold,
            task=settings.env,
            num_byzantine=manifest.num_byzantine,
        )
        status.curve.extend(
            (record[settings.unit], record["return_mean"])
            for record in store.read_progress()
            if {settings.unit, "return_mean"} <= record.keys()
        )
        live = LivePeer(
            manifest=manifest,
            own=own,
            private=private,
            store=store,
            computation=peer,
            status=status,
            log=log,
            listen=options.listen or member.address,
            proxy=options.proxy,
            history=history[:-1],
        )
        peer.on_output = live.keep_output
        live.bring(options.final_states)
        if attack is not None:
            log("rehearsal", level="warning", attack=str(attack))
            late = Late(SLOWNESS * manifest.times.grace) if attack == "slow" else attack
            send, step = live.links.send, lambda: live.protocol.step
            live.outgoing = RehearsedAttack(late, peer, live.course, live.seal, send, step).frame
            live.protocol.rehearses = True
        stop = None if options.metrics is None else status.numbers.serve(*options.metrics)
        try:
            await live.run()
        finally:
            log.close()
            if stop is not None:
                stop()
        successor = None if status.state == "finished" else live.successor
        if successor is not None and name in [each.name for each in successor.manifest.members]:
            return None
        return _write_results(store, settings, peer)
    finally:
        store.close()


def _private_keys(options: Options, member: Member) -> PrivateIdentity:
    """The member's keys: those that it has now, or those that the manifest gives it."""
    try:
        return read_key(options.key, member)
    except ValueError:
        if options.next_key is None:
            raise
        return read_key(options.next_key, member)


def _chosen_attack(manifest: Manifest, options: Options) -> Attack | WireFault | Late | None:
    """The attack that this member rehearses, once the manifest is known to allow its options."""
    attack = None if options.attack is None else parse_attack(options.attack)
    for option, chosen in (("attack", options.attack), ("seed", options.seed)):
        if chosen is not None and not manifest.rehearsal:
            raise ValueError(f"{option} = {chosen} is for rehearsals only, and this manifest says rehearsal = false.")
    return attack


def _new_peer(
    settings: Settings, own: int, store: Store, options: Options, attack: Attack | WireFault | Late | None
) -> ObservedPeer:
    return ObservedPeer(
        settings.federation(),
        settings.schedule(),
        own,
        store.random_key() if options.seed is None else seeded_key(options.seed),
        attack=attack if isinstance(attack, Attack) else None,
        as_simulated=options.seed is not None,
        initial=options.initial,
    )


def _report_full_disk(log: Log, path: Path, over: bool) -> None:
    if over:
        log("disk", file=str(path), words="there is space again: this member continues")
    else:
        words = "the disk is full: this member waits until there is space"
        log("disk", level="error", file=str(path), words=words)


def _write_results(store: Store, settings: Settings, peer: members.Peer) -> RunDirectory:
    """Write what this member has learned and recorded, as a run of one agent."""
    records = {record["iteration"]: record for record in store.read_progress()}
    iterations = range(peer.num_iterations)
    metrics = {
        name: np.asarray([[records.get(t, {}).get(name, np.nan) for t in iterations]], np.float32) for name in METRICS
    }
    # A member that was behind in iteration T̂ has no θ_T̂.
    uniform = np.full_like(peer.parameters, np.nan) if (kept := store.output()) is None else kept
    run = Run.of(settings, [peer.plan], metrics=metrics, last=peer.parameters[None, None], uniform=uniform[None, None])
    path = store.path / "run"
    try:
        exists = (path / "config.json").is_file()  # on a full disk, an earlier try may have left an empty directory
        directory = RunDirectory.open(path) if exists else RunDirectory.create(path, settings)
        if not directory.complete:
            directory.write_results(run)
    except OSError as error:
        words = "training has finished, and the same command writes the results again"
        raise OSError(f"{path} cannot be written: {error.strerror or error}; {words}.") from None
    return directory
