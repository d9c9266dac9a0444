"""byzpg keygen."""

from dataclasses import dataclass
from pathlib import Path

from byzpg.cli.console import say


@dataclass(frozen=True)
class Keygen:
    """Create the identity of a member: a private key for its machine, and a public card for the federation.

    Example: byzpg keygen --name alice --address alice.example.org:7700
    """

    name: str
    """Name of the member: letters a to z, digits and hyphens."""
    address: str
    """Address where the other members reach it, host:port."""
    directory: Path = Path()
    """Directory for NAME.key and NAME.card."""

    def run(self) -> None:
        from byzpg.live.identity import generate, write_identity

        key, card = write_identity(self.directory, *generate(self.name, self.address))
        say(f"Private key: {key} (keep it on this machine)")
        say(f"Public card: {card} (send it to the person who creates the federation)")
