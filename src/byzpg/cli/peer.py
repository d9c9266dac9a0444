"""byzpg peer."""

import asyncio
import json
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro
from rich.markup import escape

from byzpg.cli.console import console, errors, say
from byzpg.cli.membership import Membership
from byzpg.cli.parts import MembersModules
from byzpg.experiments.statistics import significant
from byzpg.federation.devices import keep_programs

if TYPE_CHECKING:  # needs the extra packages
    from byzpg.live.member import Options
    from byzpg.runs import RunDirectory

COLOURS = {"warning": "yellow", "error": "bold red", "info": "default"}


@dataclass(frozen=True)
class Peer:
    """Take part in a federation as one of its members, until training ends.

    After a crash, the same command continues. A member that comes after the others have finished takes over their final
    states: from them, if they are started again, or from their files.

    Example: byzpg peer federation.toml --name alice

    Example: byzpg peer federation.toml --name alice --final-states bob.state carol.state dave.state
    """

    manifest: tyro.conf.Positional[Path]
    """Manifest of the federation, federation.toml."""
    name: str
    """Name of this member."""
    key: Path | None = None
    """Private key of this member. Default: NAME.key beside the manifest."""
    directory: Path | None = None
    """Directory for state and results. Default: NAME-RUN beside the manifest, where RUN is the run's id, shortened."""
    listen: str | None = None
    """Address to listen on, host:port. Default: the address in the manifest."""
    proxy: bool = False
    """Connect to the other members through the proxy that the environment names, such as in https_proxy."""
    metrics_port: int | None = None
    """Port on which to serve metrics for Prometheus. Default: no metrics are served."""
    metrics_host: str = "127.0.0.1"
    """Address on which to serve metrics."""
    log: Literal["text", "json"] = "text"
    """Format of the printed events. The file log.jsonl in the directory has them in either case."""
    final_states: tuple[Path, ...] = ()
    """Files final.state from the directories of members that have finished, of at least 2f + 1 members. Default: the
    states come over the network."""
    next_key: Path | None = None
    """Next private key of this member, if an amendment gives it a new one. Default: the key stays the same."""
    attack: str | None = None
    """Attack of this member, in rehearsals only: SignFlip, LargeNoise, Zero, NonFinite, Silent, Equivocate,
    RandomAction, RewardFlip, RandomReward, garbage, oversized, slow or late(SECONDS). Default: the member is
    honest."""
    seed: int | None = None
    """Seed of the random numbers, in rehearsals only. Default: the random numbers are secret."""
    parts: MembersModules = ()

    def run(self) -> None:
        membership = Membership.load(self.manifest, self.name, self.key)
        options = self._options(membership)
        if self.attack is not None:
            errors.print(f"[bold red]REHEARSAL:[/bold red] {self.name} attacks on purpose: {escape(self.attack)}")
        keep_programs()
        try:
            kept = asyncio.run(self._take_part(membership, options))
        except asyncio.CancelledError:
            raise KeyboardInterrupt("Stopped. The same command continues.") from None
        if self.log == "text":
            say(f"Results: {kept.path} (see byzpg play and byzpg plot)")

    def _options(self, membership: Membership) -> "Options":
        from byzpg.live.identity import check_address
        from byzpg.live.initial import read_initial
        from byzpg.live.member import Options

        if self.listen is not None:
            check_address(self.listen)
        default_directory = self.manifest.parent / f"{self.name}-{membership.manifest.run[:8]}"
        return Options(
            key=membership.key,
            directory=default_directory if self.directory is None else self.directory,
            listen=self.listen,
            attack=self.attack,
            seed=self.seed,
            proxy=self.proxy,
            metrics=None if self.metrics_port is None else (self.metrics_host, self.metrics_port),
            final_states=self.final_states,
            next_key=self.next_key,
            initial=read_initial(membership.manifest, self.manifest.parent),
        )

    async def _take_part(self, membership: Membership, options: "Options") -> "RunDirectory":
        """Run the member until the federation has finished, or until a signal cancels it."""
        from byzpg.live.member import take_part

        task = asyncio.ensure_future(take_part(membership.manifest, self.name, options, self._print))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await task

    def _print(self, event: dict[str, Any]) -> None:
        if self.log == "json":
            sys.stdout.write(json.dumps(event, ensure_ascii=False) + "\n")
            sys.stdout.flush()
            return
        in_front = {"time", "level", "member", "event"}
        values = "  ".join(f"{name} {_shown(value)}" for name, value in event.items() if name not in in_front)
        clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        colour = COLOURS[event["level"]]
        with suppress(SystemExit):  # from rich, if nobody reads its output any more; a member goes on
            console.print(
                f"[dim]{clock}[/dim] [{colour}]{event['event']:<12}[/{colour}] {escape(values)}",
                soft_wrap=True,
                highlight=False,
            )


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return significant(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
