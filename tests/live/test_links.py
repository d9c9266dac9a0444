"""Connections: what gRPC would do by itself, and must not do here."""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from live_federation import NAMES, Federation, free_ports, on_loopback, until

from byzpg.live.identity import PrivateIdentity, generate, read_key
from byzpg.live.links import AMEND, LINK, MOST_CALLS, SERVICE, STATUS, _plain, open_channel, server_credentials
from byzpg.live.manifest import Manifest, Times, new_manifest
from byzpg.live.observe import LARGEST_STATUS, Observer

ZEROS = bytes(200_000_000)  # compressed, they are smaller than the largest message


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A federation of which only alice has started."""
    options: dict[str, Any] = {
        "aggregator": "RFA",
        "horizon": 20,
        "large_batch": 4,
        "small_batch": 4,
        "hidden": (300, 300),
    }
    with on_loopback(tmp_path_factory.mktemp("federation"), Times(), rounds=1, trajectories=100, **options) as made:
        made.start("alice")
        made.wait_until_ready("alice")
        yield made


def key_of(federation: Federation, name: str) -> PrivateIdentity:
    manifest = federation.manifest
    return read_key(federation.folder / f"{name}.key", manifest.members[manifest.index(name)])


def peak_memory(process: int) -> int:
    """The most memory that a process has used, in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("method", [STATUS, LINK])
def test_a_member_refuses_compressed_messages(federation: Federation, method: str) -> None:
    manifest, bob = federation.manifest, key_of(federation, "bob")
    alice = federation.processes["alice"].pid

    async def send() -> tuple[grpc.StatusCode, str]:
        credentials = grpc.ssl_channel_credentials(
            manifest.members[0].certificate.encode(), bob.tls, manifest.members[1].certificate.encode()
        )
        options = [("grpc.ssl_target_name_override", "alice"), ("grpc.max_send_message_length", -1)]
        async with aio.secure_channel(manifest.members[0].address, credentials, options) as channel:
            if method == STATUS:
                call = channel.unary_unary(f"/{SERVICE}/{method}")(ZEROS, compression=grpc.Compression.Gzip)
            else:  # refused before the first message
                call = channel.stream_stream(f"/{SERVICE}/{method}")(compression=grpc.Compression.Gzip)
            return await call.code(), await call.details()

    before = peak_memory(alice)
    assert asyncio.run(send()) == (grpc.StatusCode.UNIMPLEMENTED, "Compression algorithm 'gzip' is disabled.")
    assert peak_memory(alice) - before < len(ZEROS) / 10
    assert asyncio.run(asked(federation))["alice"] is not None  # other calls are answered as before


def test_a_member_cannot_take_all_places_or_calls(federation: Federation) -> None:
    """Bob holds many connections, each with a call that never ends; the others are still answered."""
    manifest, bob = federation.manifest, key_of(federation, "bob")

    async def hold() -> tuple[int, int]:
        channels = [open_channel(manifest, 1, bob, 0, LARGEST_STATUS) for _ in range(40)]
        try:
            calls = [channel.stream_unary(f"/{SERVICE}/{AMEND}")() for channel in channels]
            await asyncio.wait([asyncio.create_task(call.code()) for call in calls], timeout=4.0)
            refused = [call for call in calls if call.done() and (await call.code()) == grpc.StatusCode.UNAVAILABLE]
            carol = Observer(manifest, 2, key_of(federation, "carol"))
            try:
                answers = await carol.ask(seconds=20)
            finally:
                await carol.close()
            assert answers["alice"] is not None
            return len(refused), sum(not call.done() for call in calls)
        finally:
            for channel in channels:
                await channel.close()

    refused, pending = asyncio.run(hold())
    assert pending <= MOST_CALLS
    assert refused >= 40 - MOST_CALLS


def test_words_of_other_members_cannot_control_a_terminal() -> None:
    assert _plain("\x1b[2J\nfinished \x07é" + "x" * 400) == "[2J finished  é" + "x" * 284


async def asked(federation: Federation) -> Any:
    observer = Observer(federation.manifest, 1, key_of(federation, "bob"))
    try:
        return await observer.ask(seconds=20)
    finally:
        await observer.close()


IDENTITIES = [generate(name, f"127.0.0.1:{port}") for name, port in zip(NAMES, free_ports(len(NAMES)), strict=True)]
MANIFEST = new_manifest([member for member, _ in IDENTITIES], 1, {}, Times(), rehearsal=False)


@asynccontextmanager
async def answering(manifest: Manifest, answer: bytes, **options: Any) -> AsyncIterator[None]:
    """Bob, who answers this when he is asked for his status."""

    async def report(request: bytes, context: Any) -> bytes:
        return answer

    server = aio.server(options=[("grpc.max_send_message_length", -1)], **options)
    handlers = {STATUS: grpc.unary_unary_rpc_method_handler(report)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_secure_port(manifest.members[1].address, server_credentials(manifest, 1, IDENTITIES[1][1]))
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


async def ask_bob(**options: Any) -> bytes:
    async with open_channel(MANIFEST, 0, IDENTITIES[0][1], 1, LARGEST_STATUS, **options) as channel:
        return await channel.unary_unary(f"/{SERVICE}/{STATUS}")(b"", timeout=20)


def test_compressed_answers_are_refused() -> None:
    async def ask() -> None:
        async with answering(MANIFEST, bytes(10_000)):
            assert len(await ask_bob()) == 10_000
        async with answering(MANIFEST, bytes(10_000), compression=grpc.Compression.Gzip):
            with pytest.raises(aio.AioRpcError) as refused:
                await ask_bob()
        assert refused.value.code() == grpc.StatusCode.INTERNAL
        assert "ompression algorithm" in (refused.value.details() or "")

    asyncio.run(ask())


# Proxies

PROXIES = {
    "for all hosts": lambda proxy: dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), f"http://{proxy}"),
    "for addresses": lambda proxy: {
        "GRPC_ADDRESS_HTTP_PROXY": proxy,
        "GRPC_ADDRESS_HTTP_PROXY_ENABLED_ADDRESSES": "127.0.0.1",
    },
}


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[bytes]]]:
    """The address of a proxy that connects nobody, and what it was sent."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def listen() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listening.accept()
                    with client:
                        heard.append(client.recv(1000))

        thread = threading.Thread(target=listen)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}", heard
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("kind", PROXIES)
def test_proxies_of_the_environment_are_used_on_request_only(
    proxy: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    address, heard = proxy
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name, value in PROXIES[kind](address).items():
        monkeypatch.setenv(name, value)

    async def ask() -> None:
        async with answering(MANIFEST, b"here"):
            assert await ask_bob() == b"here"
            assert heard == []
            with pytest.raises(aio.AioRpcError):
                await ask_bob(proxy=True)
            assert heard[0].startswith(f"CONNECT {MANIFEST.members[1].address} ".encode())

    asyncio.run(ask())


@pytest.mark.slow
def test_a_member_uses_a_proxy_on_request_only(
    federation: Federation, proxy: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, heard = proxy
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, f"http://{address}")
    federation.kill("alice")
    before = len(federation.events("alice", "refused"))
    federation.start("alice")
    until(lambda: len(federation.events("alice", "refused")) >= before + 4, "alice has dialled the others")

    def for_members() -> list[bytes]:
        """Requests for members. Other libraries may use the proxy as well, for telemetry for example."""
        return [request for request in heard if request.startswith(b"CONNECT 127.0.0.1:")]

    assert for_members() == []
    federation.kill("alice")
    federation.start("alice", "--proxy")
    until(for_members, "alice asks the proxy")
