"""What the commands of a live federation share."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from byzpg._install import install

if TYPE_CHECKING:  # needs the extra packages
    from byzpg.live.manifest import Manifest

# The packages of the extra `live`, by the names under which they are imported.
PACKAGES = ("grpc", "cryptography", "prometheus_client")
INSTALL = f"this command needs more packages: {install('live')}."


@dataclass(frozen=True)
class Membership:
    """A member of a federation, from the manifest and the private key on this machine."""

    manifest: "Manifest"
    index: int
    key: Path

    @classmethod
    def load(cls, path: Path, name: str, key: Path | None) -> "Membership":
        """Read the manifest, and check the clock; without a key, the private key is NAME.key beside the manifest.

        Certificates of other members do not count: one of them could choose a certificate that soon expires.
        """
        from byzpg.live.identity import check_clock
        from byzpg.live.manifest import Manifest

        manifest = Manifest.load(path)
        index = manifest.index(name)
        check_clock(manifest.members[index], datetime.now(UTC))
        return cls(manifest, index, path.parent / f"{name}.key" if key is None else key)
