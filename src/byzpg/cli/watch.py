"""byzpg watch."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from subprocess import Popen
from typing import TYPE_CHECKING

import tyro
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from byzpg.cli.console import console, say
from byzpg.cli.membership import Membership
from byzpg.experiments.statistics import significant

if TYPE_CHECKING:  # needs the extra packages
    from byzpg.live.manifest import Manifest
    from byzpg.live.observe import Answer, Statuses

SECONDS = 0.5  # between two looks at the members


@dataclass(frozen=True)
class Watch:
    """Watch a federation in the terminal: where each member is, which ones are missing, and which ones equivocated.

    Example: byzpg watch federation.toml --name alice
    """

    manifest: tyro.conf.Positional[Path]
    """Manifest of the federation, federation.toml."""
    name: str
    """Name of the member to connect as, whose private key is on this machine."""
    key: Path | None = None
    """Private key of that member. Default: NAME.key beside the manifest."""
    once: bool = False
    """Print the state once and exit."""

    def run(self) -> None:
        asyncio.run(watch(Membership.load(self.manifest, self.name, self.key), once=self.once))


async def watch(membership: Membership, *, once: bool = False, processes: Sequence[Popen[bytes]] | None = None) -> None:
    """Show what members report, until all of them have finished.

    Args:
        membership: The member that asks.
        once: Whether to show it once only.
        processes: The members' processes, if they run here: watching ends when all have ended, or one has failed.
    """
    from byzpg.live.identity import read_key
    from byzpg.live.observe import Observer

    manifest, own = membership.manifest, membership.index
    observer = Observer(manifest, own, read_key(membership.key, manifest.members[own]))
    last_line, last_alarm = -1, None
    try:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            while True:
                statuses = await observer.ask()
                live.update(members_table(manifest, statuses), refresh=console.is_terminal)
                heard = [status for status in statuses.values() if status is not None]
                done = median_low([status["iteration"] for status in heard] or [-1])
                if not console.is_terminal and done >= 0 and done // 10 != last_line // 10:
                    last_line = done
                    say(f"iteration {done} of {heard[0]['num_iterations']}: return {_last_return(statuses)}")
                if not (once or console.is_terminal) and (words := alarm(manifest, statuses)) != last_alarm:
                    last_alarm = words
                    say(words or "The federation tolerates the faults of its members again.")
                if once or _is_over(heard, processes):
                    break
                await asyncio.sleep(SECONDS)
        if once:
            console.print(members_table(manifest, statuses))
    finally:
        await observer.close()


def _is_over(heard: "Sequence[Answer]", processes: Sequence[Popen[bytes]] | None) -> bool:
    if processes is None:
        return bool(heard) and all(status["state"] == "finished" for status in heard)
    codes = [process.poll() for process in processes]
    return all(code is not None for code in codes) or any(codes)


def _last_return(statuses: "Statuses") -> str:
    values = [status["curve"][-1][1] for status in statuses.values() if status is not None and status["curve"]]
    return significant(median(values)) if values else "–"


def members_table(manifest: "Manifest", statuses: "Statuses") -> Table:
    """A row per member: what it reports about itself, and what the others have seen of it.

    Of what several members report, f of them cannot raise any number: it is a median, or what f + 1 at least report.
    """
    table = Table(
        title=f"federation {manifest.federation[:8]}, run {manifest.run[:8]}",
        caption=alarm(manifest, statuses),
        caption_style="bold red",
    )
    for column in ("member", "state", "iteration", "return", "round", "missed", "weight", "equivocated", "rejected"):
        table.add_column(column, justify="left" if column in ("member", "state") else "right")
    for member in manifest.members:
        status, seen = statuses[member.name], _seen_by_others(member.name, statuses, manifest.num_byzantine)
        if status is None:
            table.add_row(member.name, "[red]no answer[/red]", "–", "–", "–", *seen)
        else:
            table.add_row(*_own_report(member.name, status), *seen)
    return table


def alarm(manifest: "Manifest", statuses: "Statuses") -> str | None:
    """One line if more members are faulty than the federation tolerates, by what more than f members report."""
    tolerated = manifest.num_byzantine
    reports = Counter(name for status in statuses.values() if status is not None for name in status["faults"])
    faulty = [member.name for member in manifest.members if reports[member.name] > tolerated]
    if len(faulty) <= tolerated:
        return None
    return f"Too many faults: {', '.join(faulty)} (missing or equivocated); the federation tolerates {tolerated}."


def _seen_by_others(name: str, statuses: "Statuses", num_byzantine: int) -> tuple[str, str, str, str]:
    """Missed messages, weight, equivocations and rejected messages of a member."""
    seen = [other["others"][name] for each, other in statuses.items() if other is not None and each != name]
    weights = [each["weight"] for each in seen if each["weight"] is not None]

    def reported(counts: list[int]) -> int:
        """The largest number that f + 1 of the others reach."""
        return sorted([0] * (num_byzantine + 1) + counts)[-1 - num_byzantine]

    return (
        f"{median_low([each['absences'] for each in seen] or [0])}",
        f"{median(weights):.0%}" if weights else "–",
        f"{reported([each['equivocations'] for each in seen])}",
        f"{reported([sum(each['rejected'].values()) for each in seen])}",
    )


def _own_report(name: str, status: "Answer") -> tuple[str, str, str, str, str]:
    """Name, state, iteration, return and time per round of a member."""
    if status["rehearsal"]:
        name += f"\n[red]rehearsal: {escape(status['rehearsal'])}[/red]"
    state = status["state"] + (f" for {', '.join(status['waiting_for'])}" if status["waiting_for"] else "")
    seconds = status["median_step_seconds"]
    return (
        name,
        f"[bold red]{state}[/bold red]" if status["state"] == "stalled" else state,
        f"{status['iteration']} of {status['num_iterations']}",
        significant(status["curve"][-1][1]) if status["curve"] else "–",
        "–" if seconds is None else f"{1000 * seconds:.0f} ms",
    )
