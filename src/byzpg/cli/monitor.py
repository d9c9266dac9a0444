"""byzpg monitor."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from byzpg.cli.console import say
from byzpg.cli.membership import Membership


@dataclass(frozen=True)
class Monitor:
    """Serve a status page of a federation in the browser.

    The page shows the learning curves, the time per round, and which members are present, filtered or equivocating.

    Example: byzpg monitor federation.toml --name alice
    """

    manifest: tyro.conf.Positional[Path]
    """Manifest of the federation, federation.toml."""
    name: str
    """Name of the member to connect as, whose private key is on this machine."""
    key: Path | None = None
    """Private key of that member. Default: NAME.key beside the manifest."""
    host: str = "127.0.0.1"
    """Address on which to serve the page. The page has no login: use it on trusted networks only."""
    port: int = 8711
    """Port on which to serve the page."""

    def run(self) -> None:
        from byzpg.live.monitor import serve

        member = Membership.load(self.manifest, self.name, self.key)
        serve(member.manifest, member.index, member.key, host=self.host, port=self.port, on_ready=_announce)


def _announce(url: str) -> None:
    say(f"Status page: {url} (Ctrl-C ends it)")
