"""byzpg evidence."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from byzpg.cli.console import say


@dataclass(frozen=True)
class Evidence:
    """Check evidence of equivocation offline: that a member signed two different messages for one round.

    Example: byzpg evidence verify federation.toml alice-1a2b3c4d/evidence/*.json
    """

    action: tyro.conf.Positional[Literal["verify"]]
    """What to do with the evidence."""
    manifest: tyro.conf.Positional[Path]
    """Manifest of the federation, which has the public keys of its members."""
    evidence: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="FILE [FILE ...]", help_behavior_hint="(at least one)"),
    ]
    """Evidence files, which members keep as evidence/*.json."""

    def run(self) -> None:
        from byzpg.live.manifest import Manifest
        from byzpg.live.wire import prove

        if not self.evidence:
            raise ValueError("evidence verify needs at least one file.")
        manifest = Manifest.load(self.manifest)
        for path in self.evidence:
            try:
                proven = prove(manifest, json.loads(path.read_text(encoding="utf-8"))).words
            except (ValueError, OSError, RecursionError) as error:
                raise ValueError(f"{path}: {error}") from None
            say(f"{path}: proven. {proven}.")
