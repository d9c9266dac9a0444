"""One long-lived stream per pair of members, over mutual TLS with pinned certificates.

A member dials the members after it in the manifest, and those before it dial this one. The certificate of a connection
decides who the sender of a message is. Nobody waits for a slow member: at most one message of each kind waits to be
sent to it (of vectors and states two: this iteration's or round's, and the last one's), and a newer message replaces an
older one. Nor can a member keep this one busy: what it sends in vain is read only as fast as its `Allowance` permits.
"""

import asyncio
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from time import perf_counter
from typing import Any, Literal

import grpc
from grpc import aio

from byzpg.live.amendment import LARGEST as LARGEST_AMENDMENT
from byzpg.live.door import Door, connection_limit
from byzpg.live.identity import PrivateIdentity, fingerprint
from byzpg.live.manifest import Manifest
from byzpg.live.protocol import Message

SERVICE, LINK, STATUS, AMEND = "byzpg.Federation", "Link", "Status", "Amend"
HELLO_SECONDS = 10.0
FIRST_BACKOFF, LARGEST_BACKOFF = 0.2, 3.0
# Rejected frames in a row after which a connection is closed, and seconds until the member may connect again.
PATIENCE, BANISHMENT = 50, 5.0
# Seconds until a member with another manifest may connect again; it may be about to change to this one.
DIFFERENT_MANIFEST_PAUSE = 0.5
CALL_SECONDS = 0.001  # what answering a call costs this member, at least
MOST_CALLS = 8  # of one member at once
# Versions of the protocol. The dialling member says which ones it speaks, and the other one chooses; a member of byzpg
# 0.1 or 0.2 says nothing, and speaks version 1, which has no echoes. Since the choice travels beside the messages, old
# members do not notice it.
VERSIONS, ECHO_VERSION = (1, 2), 2
SPOKEN, CHOSEN = "byzpg-versions", "byzpg-version"
# How many seconds of this member's time another one may waste per second, how many it may save up, and what remains to
# a member that provably equivocated.
WASTE, MOST_WASTE, RESTRAINED_WASTE = 0.1, 0.5, 0.005
# What gRPC and the system spend on a frame and on a byte, which cannot be measured here.
FRAME_SECONDS, BYTES_PER_SECOND = 2e-4, 5e8

# What a received frame was worth: "bad" if it was no valid message, "useless" if it changed nothing for this member.
Received = Literal["useful", "useless", "bad"]
# The environment can name a proxy for all names, and one for certain IP addresses, which has its own option.
NO_PROXY = (("grpc.enable_http_proxy", 0), ("grpc.address_http_proxy_enabled_addresses", ""))


async def uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Do all of this work, however often the caller is cancelled meanwhile; only then is it cancelled."""
    task = asyncio.create_task(work)
    cancelled = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


def channel_options(largest: int) -> list[tuple[str, Any]]:
    """Options of both ends; a message over `largest` bytes is refused by its announced length, before it is read."""
    return [
        ("grpc.max_receive_message_length", largest),
        # Only uncompressed messages: a few bytes could otherwise expand to `largest`, again and again.
        ("grpc.compression_enabled_algorithms_bitset", 1 << grpc.Compression.NoCompression),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.max_concurrent_streams", MOST_CALLS),
        ("grpc.max_connection_idle_ms", 60_000),
        ("grpc.max_metadata_size", 8192),
    ]


def server_credentials(manifest: Manifest, own: int, private: PrivateIdentity) -> grpc.ServerCredentials:
    """Accept connections from members only."""
    trusted = "".join(member.certificate for member in manifest.members).encode()
    certificate = manifest.members[own].certificate.encode()
    return grpc.ssl_server_credentials([(private.tls, certificate)], trusted, require_client_auth=True)


@cache
def keep_runtime() -> None:
    """Keep gRPC's asyncio runtime until the process ends.

    Otherwise it ends with the last of its objects, whenever the garbage collector finds that one. The collecting thread
    then waits in `Thread.join` for gRPC's own thread, which can block forever.
    """
    aio.init_grpc_aio()  # pyright: ignore[reportAttributeAccessIssue]


def open_channel(
    manifest: Manifest, own: int, private: PrivateIdentity, other: int, largest: int, *, proxy: bool = False
) -> aio.Channel:
    """Open a connection that only the member at position `other` can answer.

    Args:
        manifest: The federation.
        own: The position of the member that connects.
        private: Its keys.
        other: The position of the member that answers.
        largest: The size in bytes of the largest message.
        proxy: Whether to use the proxy that the environment names, such as in https_proxy.
    """
    keep_runtime()
    member = manifest.members[other]
    credentials = grpc.ssl_channel_credentials(
        member.certificate.encode(), private.tls, manifest.members[own].certificate.encode()
    )
    options = [
        *channel_options(largest),
        ("grpc.ssl_target_name_override", member.name),
        *(() if proxy else NO_PROXY),
    ]
    return aio.secure_channel(f"dns:///{member.address}", credentials, options)


def free_ports(number: int) -> list[int]:
    """Find ports of this machine that are free now.

    They lie below the range from which systems take the ports of outgoing connections, so that none of them is taken
    before a member listens there.
    """
    found: list[int] = []
    for port in random.sample(range(20_000, 32_768), 10_000):
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == number:
            return found
    raise OSError(f"this machine has fewer than {number} free ports.")


@dataclass
class Mailbox:
    """The messages that wait to be sent to one member."""

    waiting: dict[str, bytes] = field(default_factory=dict)
    newest: int = -1
    filled: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, message: Message, frame: bytes) -> None:
        kind: str = message.kind
        if kind == "state":
            kind = f"state {message.step}"
            kept = [each for each in self.waiting if each.startswith("state") and each != kind]
            if len(kept) > 1:  # of two iterations at most
                del self.waiting[min(kept, key=lambda each: int(each[6:]))]
        elif kind == "vector" and message.step < self.newest:
            kind = "answer"  # an old message must not replace the current one
        elif kind == "vector":
            self.newest = message.step
            if "vector" in self.waiting:
                # This member has left that round, but the receiver may still be in it.
                self.waiting["previous"] = self.waiting.pop("vector")
        self.waiting[kind] = frame
        self.filled.set()

    async def get(self) -> bytes:
        while not self.waiting:
            self.filled.clear()
            await self.filled.wait()
        return self.waiting.pop(next(iter(self.waiting)))


@dataclass(kw_only=True)
class Events:
    """The callbacks of `Links`."""

    received: Callable[[int, bytes], Received]
    linked: Callable[[int, int], None]  # with the version of the protocol
    unlinked: Callable[[int, str], None]  # with the reason in words
    refused: Callable[[int | None, str, str], None]  # with a reason to count by, and words
    status: Callable[[], bytes]
    amended: Callable[[bytes], None]  # another member passes on an amendment, which can be any bytes


def _plain(words: str) -> str:
    """Words that another member may have chosen, so that a terminal can show them."""
    return "".join(each if each.isprintable() else " " for each in words[:300]).strip()


def _seconds(frame: bytes) -> float:
    return FRAME_SECONDS + len(frame) / BYTES_PER_SECOND


@dataclass
class Allowance:
    """Seconds of this member's time that another one may waste."""

    per_second: float = WASTE
    left: float = MOST_WASTE
    since: float = 0.0

    def spend(self, seconds: float, now: float) -> float:
        """Spend time; return for how long to pause."""
        self.left = min(self.left + self.per_second * (now - self.since), MOST_WASTE) - seconds
        self.since = now
        return max(0.0, -self.left / self.per_second)


@dataclass(frozen=True)
class Stream:
    """One end of a connection to a member."""

    read: Callable[[], Awaitable[Any]]
    write: Callable[[bytes], Awaitable[None]]
    refuse: Callable[[str], Awaitable[None]]  # end the connection, and say why
    version: Callable[[], Awaitable[int]]  # of the protocol, once the other side has answered


class Links:
    """All connections of one member.

    Args:
        manifest: The federation.
        own: The position of this member.
        private: Its keys.
        largest: The size in bytes of the largest message.
        listen: Where to accept connections, host:port.
        events: What to call when something happens.
        plan_digest: The hash of what all members must have computed alike; see `Peer.plan_digest`.
        proxy: Whether to dial through the proxy that the environment names.
    """

    def __init__(
        self,
        *,
        manifest: Manifest,
        own: int,
        private: PrivateIdentity,
        largest: int,
        listen: str,
        events: Events,
        plan_digest: str,
        proxy: bool = False,
    ) -> None:
        self._proxy = proxy
        self.manifest, self.own, self.private, self.events, self.listen = manifest, own, private, events, listen
        self._hello = manifest.canonical + b"\n" + plan_digest.encode()
        self._longest_hello = 2 * len(self._hello) + 4096
        self.limit = max(largest, self._longest_hello, LARGEST_AMENDMENT)
        # It takes a millisecond per member to read one. Members that grow faster in number put it into each directory.
        self._longest_amendment = min(4 * len(self._hello) + 2**16, LARGEST_AMENDMENT)
        self.connected: set[int] = set()
        self.bytes_sent = self.bytes_received = 0
        self._mailboxes = [Mailbox() for _ in manifest.members]
        self._streams: dict[int, asyncio.Task[Any]] = {}
        self._banished: dict[int, float] = {}
        self._dialers: list[asyncio.Task[None]] = []
        self._door_task: asyncio.Task[None] | None = None
        self._passing: dict[int, asyncio.Task[None]] = {}
        self._by_fingerprint = {member.fingerprint: index for index, member in enumerate(manifest.members)}
        self._reported: dict[int, str] = {}
        self.versions: dict[int, int] = {}  # of the protocol, by connected member
        self._bad = [0 for _ in manifest.members]  # bad messages in a row
        self._allowances = [Allowance() for _ in manifest.members]
        self._seconds_queued = [0.0 for _ in manifest.members]
        self._calls: Counter[int] = Counter()  # in progress, by member
        limit = connection_limit(len(manifest.members))
        port = int(listen.rpartition(":")[2])
        self._door = Door(port, len(manifest.members), limit, self._closed_strangers)
        keep_runtime()
        options = [*channel_options(self.limit), ("grpc.max_allowed_incoming_connections", limit)]
        self._server = aio.server(options=options, compression=grpc.Compression.NoCompression)

    async def open(self) -> None:
        """Accept connections, and begin to dial."""
        handlers = {
            LINK: grpc.stream_stream_rpc_method_handler(self._accept),
            # A caller sees no difference from unary calls; but gRPC would read their requests before it calls us.
            STATUS: grpc.stream_unary_rpc_method_handler(self._report),
            AMEND: grpc.stream_unary_rpc_method_handler(self._amend),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            port = self._server.add_secure_port(self.listen, server_credentials(self.manifest, self.own, self.private))
        except RuntimeError:
            port = 0
        if not port:
            raise ValueError(
                f"cannot listen: listen = {self.listen} names a port that is taken, or an address that this machine "
                "does not have."
            )
        try:
            await uninterrupted(self._server.start())
        except asyncio.CancelledError:
            await self.close()
            raise
        self._door_task = asyncio.create_task(self._door.keep())
        self._dialers = [
            asyncio.create_task(self._dial(other)) for other in range(self.own + 1, len(self.manifest.members))
        ]

    def send(self, to: int, message: Message, frame: bytes | None = None) -> None:
        """Queue a message for a member, or other bytes in its place."""
        frame = message.frame if frame is None else frame
        self._seconds_queued[to] += _seconds(frame)
        self._mailboxes[to].put(message, frame)

    @property
    def num_queued(self) -> int:
        """How many messages wait to be sent."""
        return sum(len(mailbox.waiting) for mailbox in self._mailboxes)

    def restrain(self, other: int) -> None:
        """Spend hardly any more time on a member's messages."""
        allowance = self._allowances[other]
        allowance.per_second, allowance.left = RESTRAINED_WASTE, min(allowance.left, RESTRAINED_WASTE)

    async def flush(self, seconds: float) -> None:
        """Wait until the queued messages for connected members are sent, but at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(self._mailboxes[other].waiting for other in self.connected):
                    await asyncio.sleep(0.02)
                await asyncio.sleep(0.2)  # a written message may not have left yet

    async def close(self) -> None:
        """End all connections. Otherwise, gRPC's server would only end when no event loop is left to end it in."""
        tasks = [*self._dialers, *self._streams.values(), *self._passing.values()]
        tasks += [] if self._door_task is None else [self._door_task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.stop(0.5)

    # Accepting

    @asynccontextmanager
    async def _call(self, context: aio.ServicerContext) -> AsyncIterator[int]:
        """The position of the caller, by its certificate; a call of anyone but a member, or one too many, ends here.

        A caller that has wasted this member's time waits before the call begins, also if it has connected anew.
        """
        certificates = list(context.auth_context().get("x509_pem_cert") or ())
        caller = self._by_fingerprint.get(fingerprint(certificates[0])) if certificates else None
        if caller is None:
            self.events.refused(None, "stranger", f"a certificate that is not in the manifest, from {context.peer()}")
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this certificate is not in the manifest")
        self._door.authenticated(context.peer(), caller)
        if self._calls[caller] >= MOST_CALLS:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "too many calls at once: wait")
        self._calls[caller] += 1
        try:
            allowance = self._allowances[caller]
            seconds = allowance.spend(CALL_SECONDS, perf_counter())
            while seconds:
                await asyncio.sleep(seconds)
                seconds = allowance.spend(0.0, perf_counter())  # others of its calls may have spent more meanwhile
            yield caller
        finally:
            self._calls[caller] -= 1

    def _closed_strangers(self, address: str, number: int) -> None:
        words = f"{number} connections from {address} that did not authenticate were closed"
        self.events.refused(None, "stranger", words)

    async def _accept(self, requests: object, context: aio.ServicerContext) -> None:
        async with self._call(context) as caller:
            await self._accept_from(caller, context)

    async def _accept_from(self, caller: int, context: aio.ServicerContext) -> None:
        if caller >= self.own:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "of two members, the earlier one dials")
        if asyncio.get_running_loop().time() < self._banished.get(caller, 0):
            words = "too many bad messages, or another manifest: wait before you connect again"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, words)

        async def refuse(words: str) -> None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, words)

        spoken = dict(context.invocation_metadata() or ()).get(SPOKEN, "1")
        chosen = max((each for each in VERSIONS if str(each) in str(spoken).split(",")), default=None)
        if chosen is None:
            words = f"no common version of the protocol: one side speaks {spoken!s:.20}, the other {VERSIONS}"
            self.events.refused(caller, "version", words)
            await refuse(words)
            return

        async def version() -> int:
            return chosen

        await context.send_initial_metadata(((CHOSEN, str(chosen)),))
        await self._converse(caller, Stream(context.read, context.write, refuse, version))

    async def _report(self, requests: object, context: aio.ServicerContext) -> bytes:
        async with self._call(context):
            return self.events.status()

    async def _amend(self, requests: object, context: aio.ServicerContext) -> bytes:
        async with self._call(context) as caller:
            request, began = await context.read(), perf_counter()
            if isinstance(request, bytes) and len(request) <= self._longest_amendment:
                self.events.amended(request)
            self._allowances[caller].spend(perf_counter() - began, perf_counter())
            return b""

    def pass_on(self, amendments: Sequence[bytes], to: int) -> None:
        """Tell a member, once, what has replaced a manifest that it may still have."""
        if to not in self._passing:
            self._passing[to] = asyncio.create_task(self._pass_on(amendments, to))
            self._passing[to].add_done_callback(lambda _: self._passing.pop(to))

    async def _pass_on(self, amendments: Sequence[bytes], to: int) -> None:
        channel = open_channel(self.manifest, self.own, self.private, to, self.limit, proxy=self._proxy)
        try:
            for each in amendments:
                with suppress(aio.AioRpcError):  # it does not run, or its version is too old for amendments
                    await channel.unary_unary(f"/{SERVICE}/{AMEND}")(each, timeout=HELLO_SECONDS)
        finally:
            await channel.close()

    # Dialling

    async def _dial(self, other: int) -> None:
        backoff = FIRST_BACKOFF
        while True:
            channel = open_channel(self.manifest, self.own, self.private, other, self.limit, proxy=self._proxy)
            try:
                spoken = ((SPOKEN, ",".join(map(str, VERSIONS))),)
                call = channel.stream_stream(f"/{SERVICE}/{LINK}")(metadata=spoken)

                async def refuse(words: str, call: Any = call) -> None:
                    call.cancel()

                async def version(call: Any = call) -> int:
                    chosen = str(dict(await call.initial_metadata()).get(CHOSEN, "1"))
                    return int(chosen) if chosen in map(str, VERSIONS) else 1

                began = asyncio.get_running_loop().time()
                failure = await self._converse(other, Stream(call.read, call.write, refuse, version))
                if not call.done():
                    call.cancel()
                elif failure is not None:
                    self._report_failure(other, failure.code(), failure.details())
                elif (code := await call.code()) != grpc.StatusCode.OK:
                    self._report_failure(other, code, await call.details())
                if asyncio.get_running_loop().time() - began > LARGEST_BACKOFF:
                    backoff = FIRST_BACKOFF
            except aio.AioRpcError as error:
                self._report_failure(other, error.code(), error.details())
            finally:
                await channel.close()
            banished = self._banished.get(other, 0) - asyncio.get_running_loop().time()
            await asyncio.sleep(max(backoff, banished))
            backoff = min(2 * backoff, LARGEST_BACKOFF)

    def _report_failure(self, other: int, code: grpc.StatusCode, details: str | None) -> None:
        """Report why there is no connection, once for each reason."""
        reason = {
            grpc.StatusCode.FAILED_PRECONDITION: "manifest",
            grpc.StatusCode.UNAUTHENTICATED: "stranger",
            grpc.StatusCode.RESOURCE_EXHAUSTED: "oversized",
            grpc.StatusCode.PERMISSION_DENIED: "banished",
        }.get(code, "unreachable")
        words = _plain(details or code.name)
        if self._reported.get(other) != reason or reason == "oversized":
            self._reported[other] = reason
            self.events.refused(other, reason, words)

    # Either direction

    async def _converse(self, other: int, stream: Stream) -> aio.AioRpcError | None:
        """Exchange manifests, then messages, until the connection ends; return why it did, if that is known."""
        if previous := self._streams.pop(other, None):
            previous.cancel()
        task = asyncio.current_task()
        assert task is not None
        self._streams[other] = task
        try:
            return await self._exchange(other, stream) if await self._greeted(other, stream) else None
        finally:
            if self._streams.get(other) is task:
                del self._streams[other]

    async def _greeted(self, other: int, stream: Stream) -> bool:
        """Return whether both sides have the same manifest and plan; if not, tell both what differs."""
        await stream.write(self._hello)
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                theirs = await stream.read()
        except TimeoutError:
            return False
        if theirs == self._hello:
            return True
        if isinstance(theirs, bytes):
            self._banished[other] = asyncio.get_running_loop().time() + DIFFERENT_MANIFEST_PAUSE
            words = self._difference(theirs)
            self.events.refused(other, "manifest", f"its manifest differs: {words}")
            await stream.refuse(f"{self.manifest.members[self.own].name} has another manifest: {words}")
        return False

    def _difference(self, hello: bytes) -> str:
        if len(hello) > self._longest_hello:
            return "theirs is too long"
        theirs = hello.rpartition(b"\n")[0]
        if theirs == self.manifest.canonical:
            return "it computed another plan of large and small batches: use the same versions of byzpg and JAX"
        return self.manifest.difference(theirs)

    async def _exchange(self, other: int, stream: Stream) -> aio.AioRpcError | None:
        """Exchange messages until the connection ends; return why reading failed, if it did.

        If a write fails first, the call has another status, which does not tell what the other side did.
        """
        self._reported.pop(other, None)
        self.versions[other] = await stream.version()
        self.connected.add(other)
        self.events.linked(other, self.versions[other])
        writer = asyncio.create_task(self._write(other, stream.write))
        reader = asyncio.create_task(self._read(other, stream.read))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for half in (reader, writer):
                half.cancel()
            ended = await asyncio.gather(reader, writer, return_exceptions=True)
            if self._streams.get(other) is asyncio.current_task():  # otherwise a new connection has replaced this one
                self.connected.discard(other)
                failures = [each for each in ended if isinstance(each, Exception)]
                words = [
                    _plain(str(each.details() if isinstance(each, aio.AioRpcError) else each)) for each in failures
                ]
                self.events.unlinked(other, words[0] if words else "the connection ended")
        return ended[0] if isinstance(ended[0], aio.AioRpcError) else None

    async def _write(self, other: int, write: Callable[[bytes], Awaitable[None]]) -> None:
        mailbox = self._mailboxes[other]
        while True:
            frame = await mailbox.get()
            await write(frame)
            self.bytes_sent += len(frame)

    async def _read(self, other: int, read: Callable[[], Awaitable[Any]]) -> None:
        allowance = self._allowances[other]
        while isinstance(frame := await read(), bytes):
            self.bytes_received += len(frame)
            began, queued = perf_counter(), self._seconds_queued[other]
            worth = self.events.received(other, frame)
            if worth != "useful":
                answers = self._seconds_queued[other] - queued
                spent = perf_counter() - began + _seconds(frame) + answers
                if pause := allowance.spend(spent, perf_counter()):
                    await asyncio.sleep(pause)
            self._bad[other] = self._bad[other] + 1 if worth == "bad" else 0
            if self._bad[other] >= PATIENCE:
                self._banished[other] = asyncio.get_running_loop().time() + BANISHMENT
                words = f"{PATIENCE} bad messages in a row: disconnected for {BANISHMENT:.0f} s"
                self._bad[other] = 0
                self.events.refused(other, "flood", words)
                return
