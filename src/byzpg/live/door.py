"""Limits for incoming connections, which anybody can open: in total, per address, and per member.

gRPC limits the total by itself, and closes what is beyond at once. It has no limit per address, so a stranger could
take all places. `Door` therefore looks at the open sockets of this process from time to time, and ends those that are
too many from one address, or too old, and not known to belong to a member. Members have a limit of their own.
"""

import asyncio
import os
import resource
import socket
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

HANDSHAKE_SECONDS = 10.0
# File descriptors that connections never take, for files and for the connections that this member opens itself.
RESERVED_FILES = 96
MOST_CONNECTIONS = 1024
PER_MEMBER = 8  # one is enough for training; others are for watching, and old ones may not have been noticed to be dead
LOOK_SECONDS, BUSY_LOOK_SECONDS = 0.25, 0.05

Peer = tuple[str, int]  # address and port


def connection_limit(num_members: int) -> int:
    """How many incoming connections this process can afford; it raises its limit of open files as far as it may.

    Raises:
        ValueError: If the limit of open files is too low for a federation of this size.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = RESERVED_FILES + num_members + MOST_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    left = (wanted if soft == resource.RLIM_INFINITY else soft) - RESERVED_FILES - num_members
    needed = 4 * num_members  # each member may connect, watch, monitor, and connect anew
    if left < needed:
        raise ValueError(
            f"this process may open {soft} files, and a federation of {num_members} needs "
            f"{RESERVED_FILES + num_members + needed}: raise the limit with ulimit -n."
        )
    return min(left, MOST_CONNECTIONS)


class Door:
    """Ends incoming connections that strangers hold open, and those that are too many of one member.

    Args:
        port: The port on which this process accepts connections.
        num_members: K; so many may come from one address, for example from behind one router.
        limit: How many connections gRPC accepts in total.
        on_closed: Called with an address and the number of its connections that were ended.
    """

    def __init__(self, port: int, num_members: int, limit: int, on_closed: Callable[[str, int], None]) -> None:
        self._port, self._limit, self._on_closed = port, limit, on_closed
        self._per_address = 16 + 2 * num_members
        self._members: dict[Peer, int] = {}  # whose connections they are
        self._since: dict[Peer, float] = {}

    def authenticated(self, peer: str, member: int) -> None:
        """Note that a connection, in gRPC's words, belongs to a member."""
        _, _, rest = unquote(peer).partition(":")
        address, _, port = rest.rpartition(":")
        with suppress(ValueError):
            self._members[_plain(address.strip("[]")), int(port)] = member

    async def keep(self) -> None:
        """Look after the door until the task is cancelled."""
        while True:
            busy = True
            with suppress(OSError):  # if there are no file descriptors left, look again soon
                busy = self._look(asyncio.get_running_loop().time()) > self._limit // 2
            await asyncio.sleep(BUSY_LOOK_SECONDS if busy else LOOK_SECONDS)

    def _look(self, now: float) -> int:
        """End what is too much; return how many connections there are."""
        held = dict(_incoming(self._port))
        self._members = {peer: member for peer, member in self._members.items() if peer in held}
        self._since = {peer: self._since.get(peer, now) for peer in held}
        by_address: dict[str, list[Peer]] = defaultdict(list)
        for peer in sorted(held.keys() - self._members.keys(), key=lambda peer: self._since[peer]):
            by_address[peer[0]].append(peer)
        for address, peers in by_address.items():
            old = [peer for peer in peers if now - self._since[peer] > HANDSHAKE_SECONDS]
            ended = {*old, *peers[self._per_address :]}
            for peer in ended:
                _shut_down(held[peer], peer)
            if ended:
                self._on_closed(address, len(ended))
        self._limit_members(held)
        return len(held)

    def _limit_members(self, held: dict[Peer, int]) -> None:
        """Of a member that holds too many connections, end the newest ones."""
        by_member: dict[int, list[Peer]] = defaultdict(list)
        for peer in sorted(self._members, key=lambda peer: self._since[peer]):
            by_member[self._members[peer]].append(peer)
        for peers in by_member.values():
            for peer in peers[PER_MEMBER:]:
                _shut_down(held[peer], peer)


def _incoming(port: int) -> Iterator[tuple[Peer, int]]:
    """The connections to a port that this process holds, and their file descriptors."""
    for name in os.listdir("/dev/fd") if Path("/dev/fd").is_dir() else []:
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] == port:
                    yield _peer(copy), int(name)


def _peer(connection: socket.socket) -> Peer:
    address, port = connection.getpeername()[:2]
    return _plain(address), port


def _plain(address: str) -> str:
    """An address as gRPC writes it, which shows IPv4 addresses of IPv6 sockets without their prefix."""
    return address.removeprefix("::ffff:")


def _shut_down(descriptor: int, peer: Peer) -> None:
    """End a connection whose descriptor belongs to gRPC, which then closes it."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        if _peer(copy) == peer:  # the number may belong to another connection by now
            copy.shutdown(socket.SHUT_RDWR)
