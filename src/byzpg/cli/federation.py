"""byzpg federation: new and demo; the other commands are in `amend`."""

import asyncio
import json
import shlex
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from byzpg import envs
from byzpg.cli.amend import Amend, Approve, Recover
from byzpg.cli.console import console, counted, say
from byzpg.cli.parts import OwnModules
from byzpg.cli.train import TrainingOptions, numbered
from byzpg.config import Config
from byzpg.learning.policies import Gaussian, Policy

if TYPE_CHECKING:  # needs the extra packages
    from byzpg.live.identity import Member
    from byzpg.live.manifest import Manifest, Times
    from byzpg.runs import Run

MANIFEST = "federation.toml"
NAMES = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi", "ivan", "judy", "ken", "lea", "mia")


@dataclass(frozen=True)
class Waiting:
    """How long members wait for each other, in seconds."""

    grace: float = 1.0
    """Seconds to wait for the last f messages of a round, once K − f have arrived."""
    start_grace: float = 600.0
    """Seconds to wait before the first round, for members that start late."""
    linger: float = 30.0
    """Seconds to stay after the last round, for members that still need messages."""
    retry: float = 0.5
    """Seconds between two requests for a missing message."""

    def times(self) -> "Times":
        from byzpg.live.manifest import Times

        return Times(**vars(self))


@dataclass(frozen=True)
class New:
    """Create the manifest of a federation from the cards of its members.

    Every member needs the same manifest.

    Example: byzpg federation new alice.card bob.card carol.card dave.card erin.card --env CartPole-v1
    """

    cards: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="CARD [CARD ...]", help_behavior_hint="(at least two)"),
    ]
    """Cards of the members. Their order is that of the members in the manifest."""
    options: TrainingOptions
    waiting: Annotated[tyro.conf.OmitArgPrefixes[Waiting], tyro.conf.arg(name="waiting")] = field(
        default_factory=Waiting
    )
    rehearsal: bool = False
    """Allow members to attack on purpose with `byzpg peer --attack`."""
    manifest: Path = Path(MANIFEST)
    """File for the manifest, .toml."""
    trained: Annotated[Path | None, tyro.conf.arg(name="from", metavar="RUN")] = None
    """Directory of a run whose trained parameters the members start from. Default: the seed determines θ_0."""
    parts: OwnModules = ()

    def run(self) -> None:
        from byzpg.live.identity import read_card

        if len(self.cards) < 2:
            raise ValueError(f"federation new needs the cards of at least 2 members, got {len(self.cards)}.")
        if self.manifest.suffix != ".toml":
            raise ValueError(f"--manifest must end in .toml, got {self.manifest}.")
        if self.manifest.exists():
            raise ValueError(f"{self.manifest} exists already: choose another --manifest.")
        members = [read_card(card) for card in self.cards]
        manifest = make_manifest(members, self.options, waiting=self.waiting, rehearsal=self.rehearsal)
        if self.trained is not None:
            manifest = self._starting_from(self.trained, manifest)
        manifest.write(self.manifest)
        for member in manifest.members:
            say(f"{member.name:>12}  {member.address:<24} certificate {member.fingerprint[:16]}…")
        say(
            f"Manifest: {self.manifest} (hash {manifest.digest.hex()[:16]}…), {len(members)} members, "
            f"of which {manifest.num_byzantine} may be faulty"
        )
        parts = _parts_option(manifest)
        say(f"Each member runs: {shlex.join(['byzpg', 'peer', str(self.manifest), '--name', 'NAME', *parts])}")

    def _starting_from(self, directory: Path, manifest: "Manifest") -> "Manifest":
        """The same manifest with the parameters of a run, which are written beside it."""
        from byzpg import training
        from byzpg.live.initial import write_initial

        run, settings = training.load(directory), manifest.settings()
        for option, here, there in (
            ("env", settings.env, run.settings.env),
            ("policy", _after_start(settings.bound_policy()), _after_start(run.settings.bound_policy())),
            ("unit of its length", settings.unit, run.settings.unit),  # with steps, θ has a critic
            ("ppo.normalize_observations", *(each.ppo.normalize_observations for each in (settings, run.settings))),
        ):
            if here != there:
                raise ValueError(f"--from {directory} needs the same {option}: here {here}, there {there}.")
        digest, path = write_initial(self.manifest.parent, run.held())
        say(f"Parameters to start from: {path} (every member needs this file beside the manifest)")
        return replace(manifest, initial=digest)


def _after_start(policy: Policy) -> Policy:
    """The policy without what concerns θ_0 alone."""
    return replace(policy, initial_log_std=0.0) if isinstance(policy, Gaussian) else policy


def make_manifest(members: "Sequence[Member]", options: Config, *, waiting: Waiting, rehearsal: bool) -> "Manifest":
    """A manifest with every option written out, so that members with other versions cannot fill in other defaults."""
    from byzpg.live.manifest import FIXED, new_manifest

    defaults = Config()
    for option in set(FIXED) - {"num_byzantine"}:
        if getattr(options, option) != getattr(defaults, option):
            raise ValueError(f"--{option.replace('_', '-')} cannot be set here: it follows from the members.")
    planned = replace(options, num_agents=len(members), num_seeds=1).resolved()
    training = {name: value for name, value in planned.as_data().items() if name not in FIXED}
    return new_manifest(members, planned.num_byzantine, training, waiting.times(), rehearsal=rehearsal)


def _parts_option(manifest: "Manifest") -> list[str]:
    """How a member allows the modules that the manifest names."""
    modules = sorted(manifest.own_modules)
    return ["--parts", *modules] if modules else []


@dataclass(frozen=True)
class Demo:
    """Run a whole federation on this machine: keys, manifest, one process per member, and a plot of the result.

    Example: byzpg federation demo --attacker sign-flip
    """

    options: TrainingOptions
    members: int = 5
    """Number of members K."""
    attacker: str | None = None
    """Attack of the last member: sign-flip, equivocate, silent, garbage, ... Default: all members are honest."""
    grace: float = 1.0
    """Seconds to wait for the last f messages of a round, once K − f have arrived."""
    directory: Path | None = None
    """Directory for everything; it must not exist yet. Default: federation-demo-1, or the next number."""

    def run(self) -> None:
        from byzpg.live.rehearsal import parse_attack

        if not 2 <= self.members <= len(NAMES):
            raise ValueError(f"--members must be 2 to {len(NAMES)}, got {self.members}.")
        directory = numbered(Path("federation-demo")) if self.directory is None else self.directory
        if directory.exists():
            raise ValueError(f"{directory} exists already: choose another --directory.")
        if self.attacker is not None:
            parse_attack(self.attacker)
        manifest = self._create(directory)
        names = [member.name for member in manifest.members]
        env = manifest.settings().env
        say(f"{env}: {len(names)} members, of which {manifest.num_byzantine} may be faulty → {directory}")
        if self.attacker is not None:
            say(f"Rehearsal: {names[-1]} attacks with {self.attacker}.")
        honest = names if self.attacker is None else names[:-1]
        self._train(directory, manifest, honest)
        from byzpg import training

        self._conclude(directory, manifest, {name: training.load(directory / name / "run") for name in honest})
        _report_equivocations(directory, honest)

    def _create(self, directory: Path) -> "Manifest":
        """Write the keys, the cards and the manifest."""
        from byzpg.live.identity import generate, write_identity
        from byzpg.live.links import free_ports

        ports = free_ports(self.members)
        identities = [generate(name, f"127.0.0.1:{port}") for name, port in zip(NAMES, ports, strict=False)]
        waiting = Waiting(grace=self.grace, linger=max(10.0, 5 * self.grace))
        members = [member for member, _ in identities]
        manifest = make_manifest(members, self.options, waiting=waiting, rehearsal=True)
        for identity in identities:
            write_identity(directory, *identity)
        manifest.write(directory / MANIFEST)
        return manifest

    def _train(self, directory: Path, manifest: "Manifest", honest: Sequence[str]) -> None:
        """Run one process per member until all honest ones have finished, or one has failed."""
        from byzpg.cli.membership import Membership
        from byzpg.cli.watch import watch

        names = [member.name for member in manifest.members]
        processes: dict[str, subprocess.Popen[bytes]] = {}
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the members would run on without this process
        try:
            for name in names:
                with _signals_wait():
                    processes[name] = self._start(directory, manifest, name, attacks=name not in honest)
                # The first member compiles; the others find its programs in the cache.
                with console.status("compiling"):
                    while name == names[0] and processes[name].poll() is None and not _is_ready(directory / name):
                        time.sleep(0.1)
            # An attacker whom no member hears would never finish.
            awaited = [processes[name] for name in honest]
            membership = Membership(manifest, 0, directory / f"{names[0]}.key")
            asyncio.run(watch(membership, processes=awaited))
            # Before the others are stopped: they have not failed.
            failed = {name: code for name in honest if (code := processes[name].poll())}
        finally:
            for process in processes.values():
                process.terminate()
            for process in processes.values():
                process.wait()
        if failed:
            raise ValueError(". ".join(_failure(directory, name, code) for name, code in failed.items()))

    def _start(self, directory: Path, manifest: "Manifest", name: str, *, attacks: bool) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "byzpg", "peer", str(directory / MANIFEST), "--name", name]
        command += _parts_option(manifest)
        if attacks and self.attacker is not None:
            command += ["--attack", self.attacker]
        with _output(directory, name).open("w") as output:
            return subprocess.Popen(
                [*command, "--directory", str(directory / name)],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _conclude(self, directory: Path, manifest: "Manifest", runs: "Mapping[str, Run]") -> None:
        """Print how the honest members ended, and save their learning curves."""
        from byzpg.cli.tables import LAST_TENTH
        from byzpg.experiments import figures
        from byzpg.experiments.results import Result
        from byzpg.experiments.statistics import significant
        from byzpg.experiments.summaries import final_returns, gradient_estimate

        settings, last = manifest.settings(), manifest.members[-1].name
        attacker = f", {last} attacking ({self.attacker})" if self.attacker is not None else ""
        figure = figures.learning_curves(
            [figures.Curve(name, run.progress, run.returns) for name, run in runs.items()],
            f"{settings.env}, {len(manifest.members)} members{attacker}",
            subtitle=", ".join(filter(None, gradient_estimate(settings))),
            reference_level=envs.make(settings.env).reward_threshold,
            reference_name="counts as solved",
            what="return of a member's own episodes",
            unit=settings.unit,
        )
        plot = directory / "curves.png"
        figures.save(figure, plot)
        say(f"Return of each honest member, {LAST_TENTH} of training:")
        for name, run in runs.items():
            say(f"{name:>12}  {significant(float(final_returns(Result.of(run))[0]))}")
        say(f"Learning curves: {plot}")
        say(f"Watch it play: byzpg play {directory / next(iter(runs)) / 'run'}")


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Let SIGINT and SIGTERM wait: a process that is just being started could not be stopped."""
    caught: list[int] = []
    before = {number: signal.signal(number, lambda *_: caught.append(1)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if caught:
        raise KeyboardInterrupt


def _output(directory: Path, name: str) -> Path:
    """The file with what a member of the demo prints."""
    return directory / f"{name}.out"


def _failure(directory: Path, name: str, code: int) -> str:
    """How a member ended, with the last line that it printed."""
    output = _output(directory, name)
    lines = output.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
    how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    return f"{name} failed ({how}). Its last line in {output}: {last}"


def _report_equivocations(directory: Path, honest: Sequence[str]) -> None:
    """Print which members were caught equivocating, and how to verify it."""
    rounds: defaultdict[str, set[int]] = defaultdict(set)
    holders: defaultdict[str, set[str]] = defaultdict(set)
    for holder in honest:
        for path in (directory / holder / "evidence").glob("*.json"):
            evidence = json.loads(path.read_text(encoding="utf-8"))
            rounds[evidence["member"]].add(evidence["step"])
            holders[evidence["member"]].add(holder)
    for name in sorted(rounds):
        # "At least": a member keeps a limited number of proofs.
        often = f"at least {counted(len(rounds[name]), 'round')}"
        say(f"Caught: {name} equivocated in {often}; {counted(len(holders[name]), 'honest member')} can prove it.")
    if rounds:
        folder = shlex.quote(str(directory))
        say(f"Verify it: byzpg evidence verify {folder}/{MANIFEST} {folder}/*/evidence/*.json")
    else:
        say("No member was caught equivocating.")


def _is_ready(directory: Path) -> bool:
    log = directory / "log.jsonl"
    return log.is_file() and '"event": "ready"' in log.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Federation:
    """Create or change the manifest of a live federation, or try one out on this machine."""

    command: tyro.conf.OmitSubcommandPrefixes[
        Annotated[New, tyro.conf.subcommand("new", default=New((), Config()))]
        | Annotated[Demo, tyro.conf.subcommand("demo", default=Demo(Config()))]
        | Annotated[Amend, tyro.conf.subcommand("amend")]
        | Annotated[Approve, tyro.conf.subcommand("approve")]
        | Annotated[Recover, tyro.conf.subcommand("recover")]
    ]

    @property
    def parts(self) -> tuple[str, ...]:
        return getattr(self.command, "parts", ())

    def run(self) -> None:
        self.command.run()
