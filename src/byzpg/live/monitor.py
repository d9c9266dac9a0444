"""The status page of a federation: one HTML file and the result of the last poll, served read-only to browsers.

The page has no login, takes no input and loads nothing from other servers. Members may lie, so `parse_status` checks
their answers first, and the page shows them as text only.
"""

import asyncio
import base64
import json
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path
from statistics import mode
from typing import Any, Self

from byzpg import envs
from byzpg.federation.algorithms import ALGORITHMS
from byzpg.live.identity import read_key
from byzpg.live.manifest import Manifest
from byzpg.live.observe import Answer, Observer, Statuses
from byzpg.live.serving import Handler, Server

PAGE = Path(__file__).with_name("page.html")
POLL_SECONDS = 1.0

Ask = Callable[[], Awaitable[Statuses]]
# A context that is entered in the event loop of the poll.
Source = Callable[[], AbstractAsyncContextManager[Ask]]


class Board:
    """What is known about a federation: its manifest, the last poll, and the last answers of silent members."""

    def __init__(self, manifest: Manifest, own: int) -> None:
        options = manifest.options()
        self._task = envs.built_in(options["env"])
        self._facts = {
            "federation": manifest.federation,
            "run": manifest.run,
            "asked_as": manifest.members[own].name,
            "members": [{"name": member.name, "address": member.address} for member in manifest.members],
            "num_byzantine": manifest.num_byzantine,
            "rehearsal": manifest.rehearsal,
            "task": options["env"],
            "algorithm": options["algorithm"],
            "aggregator": str(options["aggregator"]),
            "agreement": str(options["agreement"]),
            "length": options["trajectories"] or options["steps"],
            "unit": ALGORITHMS[options["algorithm"]].agent.unit,
        }
        self._lock = threading.Lock()
        self._statuses: Statuses = {member.name: None for member in manifest.members}
        self._answers: dict[str, tuple[float, Answer]] = {}
        self._polled: float | None = None

    def put(self, statuses: Statuses) -> None:
        """Keep the result of a poll."""
        with self._lock:
            now = self._polled = time.monotonic()
            self._statuses = statuses
            self._answers |= {name: (now, status) for name, status in statuses.items() if status is not None}

    def as_data(self) -> dict[str, Any]:
        """The content of status.json."""
        with self._lock:
            now, statuses, answers, polled = time.monotonic(), self._statuses, dict(self._answers), self._polled
        silent = {
            name: {"age": round(now - at, 1), "status": status}
            for name, (at, status) in answers.items()
            if statuses[name] is None
        }
        age = None if polled is None else round(now - polled, 3)
        threshold = self._reward_threshold([status for _, status in answers.values()])
        return {
            **self._facts,
            "reward_threshold": threshold,
            "age": age,
            "statuses": statuses,
            "last_answers": silent,
        }

    def _reward_threshold(self, answers: Sequence[Answer]) -> float | None:
        """What most members report, unless the task is built in: the page does not run the code of another task."""
        if self._task is not None:
            return self._task.reward_threshold
        return mode([answer["reward_threshold"] for answer in answers] or [None])


class Monitor:
    """Polls the members and serves the page, each in its own thread, while the context is open."""

    def __init__(self, manifest: Manifest, own: int, source: Source, *, host: str, port: int) -> None:
        self.board = Board(manifest, own)
        self._source = source
        self._server = _Server(host, port, self.board)
        self.url = self._server.url

    def __enter__(self) -> Self:
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(2, "monitor")
        self._work: list[Future[None]] = [
            self._pool.submit(self._server.serve_forever, 0.1),
            self._pool.submit(lambda: asyncio.run(self._poll())),
        ]
        for each in self._work:
            each.add_done_callback(lambda _: self._stopping.set())
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._server.shutdown()
        self._pool.shutdown()
        self._server.server_close()
        for each in self._work:
            each.result()

    def wait(self) -> None:
        """Wait until the monitor is stopped, or fails."""
        self._stopping.wait()

    def stop(self) -> None:
        """End `wait`; leaving the context then ends the threads."""
        self._stopping.set()

    async def _poll(self) -> None:
        async with self._source() as ask:
            loop = asyncio.get_running_loop()
            while not self._stopping.is_set():
                due = loop.time() + POLL_SECONDS
                self.board.put(await ask())
                while loop.time() < due and not self._stopping.is_set():
                    await asyncio.sleep(0.05)


def serve(manifest: Manifest, own: int, key: Path, *, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve the status page until Ctrl-C or SIGTERM.

    Args:
        manifest: The federation.
        own: The position of the member that asks the others.
        key: The file of its private key.
        host: The address at which to serve the page.
        port: The port; 0 for any free one.
        on_ready: Called with the page's address.

    Raises:
        ValueError: If the key cannot be used, or the page cannot be served there.
    """
    private = read_key(key, manifest.members[own])

    @asynccontextmanager
    async def source() -> AsyncIterator[Ask]:
        observer = Observer(manifest, own, private)
        try:
            yield observer.ask
        finally:
            await observer.close()

    with Monitor(manifest, own, source, host=host, port=port) as monitor:
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, lambda *_: monitor.stop()) for number in numbers]
        try:
            on_ready(monitor.url)
            monitor.wait()
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


class _Server(Server):
    def __init__(self, host: str, port: int, board: Board) -> None:
        self.board, self.page = board, PAGE.read_bytes()
        super().__init__("the status page", host, port, _Handler)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/"
        self.policy = _policy(self.page.decode())


class _Handler(Handler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "byzpg", ""

    def do_GET(self) -> None:
        if self.path == "/":
            self._answer("text/html; charset=utf-8", self.server.page)
        elif self.path == "/status.json":
            content = json.dumps(self.server.board.as_data(), allow_nan=False)
            self._answer("application/json", content.encode())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def _answer(self, kind: str, content: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            with suppress(ConnectionError):
                self.wfile.write(content)

    def send_response(self, code: int, message: str | None = None) -> None:
        super().send_response(code, message)
        if code == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        for name, value in {
            "Content-Security-Policy": self.server.policy,
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }.items():
            self.send_header(name, value)


def _policy(page: str) -> str:
    """The Content-Security-Policy: the page's own script and style, by their hashes, and data from this server."""

    def hashes(tag: str) -> str:
        contents = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(sha256(each.encode()).digest()).decode()}'" for each in contents)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
