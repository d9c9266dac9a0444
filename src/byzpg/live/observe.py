"""Looking at a federation from outside: every member is asked for its status, over the same mutual TLS.

Read-only. What a member says of itself may be a lie; what it says of others is what it saw of them.
"""

import asyncio
import json
from typing import Any

import grpc
from grpc import aio

from byzpg.live.identity import PrivateIdentity
from byzpg.live.links import SERVICE, STATUS, open_channel
from byzpg.live.manifest import Manifest

LARGEST_STATUS = 2**20

# By member's name; None: it did not answer.
Statuses = dict[str, dict[str, Any] | None]


class Observer:
    """Asks as one of the members, with its key."""

    def __init__(self, manifest: Manifest, own: int, private: PrivateIdentity) -> None:
        self.manifest = manifest
        self._channels = {
            member.name: open_channel(manifest, own, private, index, LARGEST_STATUS)
            for index, member in enumerate(manifest.members)
        }

    async def ask(self, seconds: float = 2.0) -> Statuses:
        """Every member's status."""
        answers = await asyncio.gather(*(self._ask(channel, seconds) for channel in self._channels.values()))
        return dict(zip(self._channels, answers, strict=True))

    async def _ask(self, channel: aio.Channel, seconds: float) -> dict[str, Any] | None:
        try:
            answer = json.loads(await channel.unary_unary(f"/{SERVICE}/{STATUS}")(b"", timeout=seconds))
        except (aio.AioRpcError, grpc.RpcError, ValueError, RecursionError):
            return None
        return answer if isinstance(answer, dict) else None

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
