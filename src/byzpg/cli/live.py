"""Commands of the live federation."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, median_low
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from byzpg import envs, training
from byzpg.cli.console import console, errors, say
from byzpg.config import Config

if TYPE_CHECKING:  # an extra: imported where it is needed
    from byzpg.live.manifest import Manifest, Times
    from byzpg.live.observe import Statuses

PACKAGES = ("grpc", "cryptography", "prometheus_client")
INSTALL = "this command needs more packages: pip install 'byzpg[live]'."
NAMES = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi", "ivan", "judy", "ken", "lea", "mia")
COLOURS = {"warning": "yellow", "error": "bold red", "info": "default"}


@dataclass(frozen=True)
class Waiting:
    """How long members wait for each other, in seconds."""

    grace: float = 1.0
    """For the last f, once K − f messages of a step are in."""
    start_grace: float = 600.0
    """The same at the start, where some may take longer."""
    linger: float = 30.0
    """The same at the end, where some may still need messages."""
    retry: float = 0.5
    """Between two questions for a missing message."""

    def times(self) -> "Times":
        from byzpg.live.manifest import Times

        return Times(**vars(self))


@dataclass(frozen=True)
class Keygen:
    """Make a member's identity: a private key for its own machine, and a public card for everybody."""

    name: str
    """The member's name: letters a to z, digits and -."""
    address: str
    """Where the others reach it: host:port."""
    directory: Path = Path()
    """Where NAME.key and NAME.card go."""

    def run(self) -> None:
        from byzpg.live.identity import generate, write_identity

        key, card = write_identity(self.directory, *generate(self.name, self.address))
        say(f"Private key: {key} (it never leaves this machine)")
        say(f"Public card: {card} (for whoever makes the federation)")


@dataclass(frozen=True)
class New:
    """Make a federation's manifest from its members' cards; every member needs the same one."""

    cards: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="CARD [CARD ...]", help_behavior_hint="(at least two)"),
    ]
    """The members' cards; their order is the members' order."""
    options: Annotated[tyro.conf.OmitArgPrefixes[Config], tyro.conf.arg(name="training")]
    waiting: Annotated[tyro.conf.OmitArgPrefixes[Waiting], tyro.conf.arg(name="waiting")] = field(
        default_factory=Waiting
    )
    rehearsal: bool = False
    """Allow members to attack on purpose, `byzpg peer --attack`."""
    manifest: Path = Path("federation.toml")
    """Where the manifest goes."""

    def run(self) -> None:
        from byzpg.live.identity import read_card

        if len(self.cards) < 2:
            raise ValueError(f"a federation needs the cards of at least 2 members, got {len(self.cards)}.")
        if self.manifest.suffix != ".toml":
            raise ValueError(f"--manifest must end in .toml, got {self.manifest}.")
        members = [read_card(card) for card in self.cards]
        manifest = _manifest(members, self.options, self.waiting, self.rehearsal)
        manifest.write(self.manifest)
        for member in manifest.members:
            say(f"{member.name:>12}  {member.address:<24} certificate {member.fingerprint[:16]}…")
        say(
            f"Manifest: {self.manifest}, hash {manifest.digest.hex()[:16]}…, {len(members)} members, "
            f"{manifest.num_byzantine} of them may be faulty."
        )
        say(f"Every member: byzpg peer {self.manifest} --name NAME")


def _manifest(members: list[Any], options: Config, waiting: Waiting, rehearsal: bool) -> Any:
    """Every option is written out, so that members with other versions cannot fill in others."""
    from byzpg.live.manifest import FIXED, new_manifest

    defaults = Config()
    for option in set(FIXED) - {"num_byzantine"}:
        if getattr(options, option) != getattr(defaults, option):
            raise ValueError(f"--{option.replace('_', '-')} is not for a federation: it follows from its members.")
    planned = replace(options, num_agents=len(members), num_seeds=1).resolved()
    training = {name: value for name, value in planned.as_data().items() if name not in FIXED}
    return new_manifest(members, planned.num_byzantine, training, waiting.times(), rehearsal)


@dataclass(frozen=True)
class Demo:
    """Make a federation on this machine and run it: keys, manifest, one process per member, the result as a picture."""

    options: Annotated[tyro.conf.OmitArgPrefixes[Config], tyro.conf.arg(name="training")]
    members: int = 5
    """How many members K."""
    attacker: str | None = None
    """What the last member does instead of what it should: sign-flip, equivocate, silent, garbage, ..."""
    grace: float = 1.0
    """Seconds that members wait for the last f."""
    directory: Path = Path("federation-demo")
    """Where everything goes; must not be there yet."""

    def run(self) -> None:
        from byzpg.live.identity import generate, write_identity
        from byzpg.live.links import free_ports
        from byzpg.live.rehearsal import parse_attack

        if not 2 <= self.members <= len(NAMES):
            raise ValueError(f"--members must be 2 to {len(NAMES)}, got {self.members}.")
        if self.directory.exists():
            raise ValueError(f"{self.directory} is there already: choose another --directory.")
        if self.attacker is not None:
            parse_attack(self.attacker)
        made = [
            generate(name, f"127.0.0.1:{port}") for name, port in zip(NAMES, free_ports(self.members), strict=False)
        ]
        waiting = Waiting(grace=self.grace, linger=max(10.0, 5 * self.grace))
        manifest = _manifest([member for member, _ in made], self.options, waiting, rehearsal=True)
        for identity in made:
            write_identity(self.directory, *identity)
        path = self.directory / "federation.toml"
        manifest.write(path)
        say(
            f"{self.members} members, {manifest.num_byzantine} may be faulty, {manifest.settings().env} → "
            f"{self.directory}"
        )
        if self.attacker is not None:
            say(f"Rehearsal: {manifest.members[-1].name} attacks with {self.attacker}.")
        self._train(manifest, path)

    def _train(self, manifest: "Manifest", path: Path) -> None:
        from byzpg.experiments import figures

        names = [member.name for member in manifest.members]
        honest = names[:-1] if self.attacker is not None else names
        processes = {}
        try:
            for name in names:
                attack = ["--attack", self.attacker] if self.attacker is not None and name == names[-1] else []
                command = [sys.executable, "-m", "byzpg", "peer", str(path), "--name", name, *attack]
                with (self.directory / f"{name}.out").open("w") as output:
                    processes[name] = subprocess.Popen(
                        [*command, "--directory", str(self.directory / name)],
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env={"JAX_COMPILATION_CACHE_DIR": str(self.directory / "cache"), **os.environ},
                    )
                # What the first member compiles, the others find.
                with console.status("compiling"):
                    while name == names[0] and processes[name].poll() is None and not _is_ready(self.directory / name):
                        time.sleep(0.1)
            # A attacker that nobody hears would never end.
            awaited = {name: processes[name] for name in honest}
            asyncio.run(_watch(manifest, 0, self.directory / f"{names[0]}.key", processes=awaited))
        finally:
            for process in processes.values():
                process.terminate()
            for process in processes.values():
                process.wait()
        failed = [name for name in honest if processes[name].returncode]
        if failed:
            raise ValueError(f"{', '.join(failed)} did not finish: see {self.directory / failed[0]}.out.")
        runs = {name: training.load(self.directory / name / "run") for name in honest}
        curves = [figures.Curve(name, run.trajectories, run.returns) for name, run in runs.items()]
        attacker = f", {names[-1]} attacking ({self.attacker})" if self.attacker is not None else ""
        picture, settings = self.directory / "curves.png", manifest.settings()
        title = f"{settings.env}, {len(names)} members{attacker}"
        solved = envs.make(settings.env).reward_threshold
        figures.save(
            figures.learning_curves(
                curves,
                title,
                reference_level=solved,
                reference_name="counts as solved",
                what="return of a member's own episodes",
            ),
            picture,
        )
        for name, run in runs.items():
            late = run.returns[0, -max(1, len(run.trajectories) // 10) :].mean()
            say(f"{name:>12}  return of the last tenth {late:.0f}")
        say(f"Picture: {picture}")
        say(f"See it play: byzpg play {self.directory / names[0] / 'run'}")


@dataclass(frozen=True)
class FederationCommand:
    """Make a federation's manifest, or try one out on this machine."""

    command: tyro.conf.OmitSubcommandPrefixes[
        Annotated[New, tyro.conf.subcommand("new", default=New((), Config()))]
        | Annotated[Demo, tyro.conf.subcommand("demo", default=Demo(Config()))]
    ]

    def run(self) -> None:
        self.command.run()


@dataclass(frozen=True)
class PeerCommand:
    """Take part in a federation: train with the others until the end. Run again after a crash, it goes on."""

    manifest: tyro.conf.Positional[Path]
    """The federation's manifest, federation.toml."""
    name: str
    """Which member this is."""
    key: Path | None = None
    """Its private key. Left out: NAME.key beside the manifest."""
    directory: Path | None = None
    """Where its state and results go. Left out: NAME-RUN beside the manifest."""
    listen: str | None = None
    """Where to listen, host:port. Left out: the manifest's address."""
    metrics_port: int | None = None
    """Serve metrics for Prometheus on this port."""
    metrics_host: str = "127.0.0.1"
    """On this address."""
    log: Literal["text", "json"] = "text"
    """How to print events; NAME-RUN/log.jsonl has them in any case."""
    attack: str | None = None
    """Rehearsal only: SignFlip, LargeNoise, Zero, NonFinite, Silent, Equivocate, RandomAction, RewardFlip,
    RandomReward, garbage, oversized or slow."""
    seed: int | None = None
    """Rehearsal only: random numbers by this seed, not secret ones."""

    def run(self) -> None:
        from byzpg.live.identity import check_address
        from byzpg.live.manifest import Manifest
        from byzpg.live.member import Options, take_part

        manifest = Manifest.load(self.manifest)
        manifest.index(self.name)
        folder = self.manifest.parent
        if self.listen is not None:
            check_address(self.listen)
        options = Options(
            folder / f"{self.name}.key" if self.key is None else self.key,
            folder / f"{self.name}-{manifest.run[:8]}" if self.directory is None else self.directory,
            self.listen,
            self.attack,
            self.seed,
            None if self.metrics_port is None else (self.metrics_host, self.metrics_port),
        )
        if self.attack is not None:
            errors.print(f"[bold red]REHEARSAL:[/bold red] {self.name} attacks on purpose: {escape(self.attack)}")

        async def until_stopped() -> Any:
            task = asyncio.ensure_future(take_part(manifest, self.name, options, self._print))
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
            return await task

        try:
            kept = asyncio.run(until_stopped())
        except asyncio.CancelledError:
            raise KeyboardInterrupt("Stopped. The same command goes on from here.") from None
        if self.log == "text":
            say(f"Results: {kept.path} (byzpg play, byzpg plot)")

    def _print(self, line: dict[str, Any]) -> None:
        if self.log == "json":
            sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
            sys.stdout.flush()
            return
        plain = {"time", "level", "member", "event"}
        values = "  ".join(f"{name} {_shown(value)}" for name, value in line.items() if name not in plain)
        clock = time.strftime("%H:%M:%S", time.localtime(line["time"]))
        colour = COLOURS[line["level"]]
        console.print(
            f"[dim]{clock}[/dim] [{colour}]{line['event']:<12}[/{colour}] {escape(values)}",
            soft_wrap=True,
            highlight=False,
        )


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


@dataclass(frozen=True)
class Watch:
    """Watch a federation in the terminal: who is where, who is missing, who lies."""

    manifest: tyro.conf.Positional[Path]
    """The federation's manifest."""
    name: str
    """As which member to ask; its key is needed."""
    key: Path | None = None
    """Its private key. Left out: NAME.key beside the manifest."""
    once: bool = False
    """Show it once and end."""

    def run(self) -> None:
        manifest, own, key = _as_member(self.manifest, self.name, self.key)
        asyncio.run(_watch(manifest, own, key, once=self.once))


@dataclass(frozen=True)
class Monitor:
    """Serve a status page of a federation: learning curves, who is present, filtered or equivocating, round times."""

    manifest: tyro.conf.Positional[Path]
    """The federation's manifest."""
    name: str
    """As which member to ask; its key is needed."""
    key: Path | None = None
    """Its private key. Left out: NAME.key beside the manifest."""
    host: str = "127.0.0.1"
    """Where to serve; the page has no login, so keep it to trusted networks."""
    port: int = 8711

    def run(self) -> None:
        from byzpg.live.monitor import serve

        manifest, own, key = _as_member(self.manifest, self.name, self.key)
        serve(manifest, own, key, self.host, self.port, lambda url: say(f"Status page: {url} (Ctrl-C ends it)"))


@dataclass(frozen=True)
class Evidence:
    """Check, offline, that evidence proves what it says: that a member signed two messages for one step."""

    action: tyro.conf.Positional[Literal["verify"]]
    """What to do with it."""
    manifest: tyro.conf.Positional[Path]
    """The federation's manifest, with the members' public keys."""
    evidence: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="FILE [FILE ...]", help_behavior_hint="(at least one)"),
    ]
    """Files that members have kept, evidence/*.json."""

    def run(self) -> None:
        from byzpg.live.manifest import Manifest
        from byzpg.live.wire import verify_evidence

        if not self.evidence:
            raise ValueError("evidence verify needs at least one file.")
        manifest = Manifest.load(self.manifest)
        for path in self.evidence:
            try:
                proven = verify_evidence(manifest, json.loads(path.read_text()))
            except (ValueError, OSError, RecursionError) as error:
                raise ValueError(f"{path}: {error}") from None
            say(f"{path}: proven. {proven}.")


def _as_member(path: Path, name: str, key: Path | None) -> tuple["Manifest", int, Path]:
    from byzpg.live.manifest import Manifest

    manifest = Manifest.load(path)
    return manifest, manifest.index(name), path.parent / f"{name}.key" if key is None else key


async def _watch(
    manifest: "Manifest",
    own: int,
    key: Path,
    once: bool = False,
    processes: dict[str, subprocess.Popen[bytes]] | None = None,
) -> None:
    """Show what members say until all have finished or, where there are processes, these have ended."""
    from byzpg.live.identity import read_key
    from byzpg.live.observe import Observer

    observer: Observer = Observer(manifest, own, read_key(key, manifest.members[own]))
    said = -1
    try:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            while True:
                statuses = await observer.ask()
                live.update(_table(manifest, statuses), refresh=console.is_terminal)
                heard = [status for status in statuses.values() if status is not None]
                done = median_low([status["iteration"] for status in heard] or [-1])
                if not console.is_terminal and done >= 0 and done // 10 != said // 10:
                    said = done
                    say(f"iteration {done} of {heard[0]['num_iterations']}: return {_last_return(statuses)}")
                over = heard and all(status["state"] == "finished" for status in heard)
                if processes is not None:
                    over = all(process.poll() is not None for process in processes.values())
                    over |= any(process.poll() for process in processes.values())
                if over or once:
                    break
                await asyncio.sleep(0.5)
        if once:
            console.print(_table(manifest, statuses))
    finally:
        await observer.close()


def _last_return(statuses: "Statuses") -> str:
    values = [status["curve"][-1][1] for status in statuses.values() if status is not None and status["curve"]]
    return f"{median(values):.0f}" if values else "–"


def _table(manifest: "Manifest", statuses: "Statuses") -> Table:
    """A line per member: what it says of itself, and what the others have seen of it.

    Of numbers that all of them see, the median: one attacker does not move it.
    """
    table = Table(title=f"federation {manifest.federation[:8]}, run {manifest.run[:8]}")
    for column in ("member", "state", "iteration", "return", "step", "missed", "weight", "equivocated", "rejected"):
        table.add_column(column, justify="left" if column in ("member", "state") else "right")
    for member in manifest.members:
        status = statuses[member.name]
        seen = [
            other["others"][member.name]
            for name, other in statuses.items()
            if other is not None and name != member.name
        ]
        weights = [each["weight"] for each in seen if each["weight"] is not None]
        rejected = sum(sum(each["rejected"].values()) for each in seen)
        about = (
            f"{median_low([each['absences'] for each in seen] or [0])}",
            f"{median(weights):.0%}" if weights else "–",
            f"{max((each['equivocations'] for each in seen), default=0)}",
            f"{rejected}",
        )
        if status is None:
            table.add_row(member.name, "[red]no answer[/red]", "–", "–", "–", *about)
            continue
        state = status["state"] + (f" for {', '.join(status['waiting_for'])}" if status["waiting_for"] else "")
        seconds = status["median_step_seconds"]
        name = member.name + (f"\n[red]rehearsal: {escape(status['rehearsal'])}[/red]" if status["rehearsal"] else "")
        table.add_row(
            name,
            f"[bold red]{state}[/bold red]" if status["state"] == "stalled" else state,
            f"{status['iteration']} of {status['num_iterations']}",
            f"{status['curve'][-1][1]:.0f}" if status["curve"] else "–",
            "–" if seconds is None else f"{1000 * seconds:.0f} ms",
            *about,
        )
    return table


def _is_ready(directory: Path) -> bool:
    log = directory / "log.jsonl"
    return log.is_file() and '"event": "ready"' in log.read_text()


COMMANDS = (
    Annotated[Keygen, tyro.conf.subcommand("keygen")],
    Annotated[FederationCommand, tyro.conf.subcommand("federation")],
    Annotated[PeerCommand, tyro.conf.subcommand("peer")],
    Annotated[Watch, tyro.conf.subcommand("watch")],
    Annotated[Monitor, tyro.conf.subcommand("monitor")],
    Annotated[Evidence, tyro.conf.subcommand("evidence")],
)
