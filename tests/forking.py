"""Programs in processes of their own that need not load JAX and byzpg first: forked from a process that has.

A test process cannot be forked itself: JAX's threads would not be there. As a program, this file is that other process.
What it starts has the same hash seed, and has byzpg's modules loaded; where that matters, use `subprocess`.
"""

import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

BYZPG = "from byzpg.cli import main; main()"
CLONE_NEWNET = 0x40000000
LARGEST = 2**20  # bytes of a request


class Forked:
    """What tests need of a `subprocess.Popen`."""

    def __init__(
        self,
        *arguments: object,
        program: str = BYZPG,
        stdout: IO[Any],
        stderr: IO[Any] | None = None,
        folder: Path | None = None,
        namespace: str | None = None,
        **environment: str,
    ) -> None:
        request = {
            "arguments": [str(each) for each in arguments],
            "program": program,
            "folder": str(folder or Path.cwd()),
            "namespace": namespace,
            "environment": {**os.environ, **environment},
        }
        server = _server()
        streams = [stdout.fileno(), (stderr or stdout).fileno()]
        socket.send_fds(server.link, [json.dumps(request).encode()], streams)
        self.pid = server.number_of_the_next()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            _server().listen()
            self.returncode = _server().ended.pop(self.pid, None)
        return self.returncode

    def wait(self, timeout: float = 300.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended")
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    def __init__(self) -> None:
        self.link, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            command = [sys.executable, __file__, str(other.fileno())]
            nothing = subprocess.DEVNULL
            self.process = subprocess.Popen(command, pass_fds=[other.fileno()], stdin=nothing, stdout=nothing)
        self.started: list[int] = []
        self.ended: dict[int, int] = {}

    def listen(self, wait: bool = False) -> None:
        """Read what the server says of its processes."""
        self.link.setblocking(wait)
        try:
            while said := self.link.recv(1024):
                number, code = json.loads(said)
                if code is None:
                    self.started.append(number)
                    self.ended.pop(number, None)  # of an earlier process with this number
                else:
                    self.ended[number] = code
                self.link.setblocking(False)
        except BlockingIOError:
            return
        raise RuntimeError("the process that starts others has ended")

    def number_of_the_next(self) -> int:
        while not self.started:
            self.listen(wait=True)
        return self.started.pop()


@cache
def _server() -> _Server:
    return _Server()


def serve(link: socket.socket) -> dict[str, Any] | None:
    """Start what is asked for; returns in each new process what it is to be, and None when nobody will ask again."""
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if woken in ready:
                woken.recv(1024)
                while (ended := _ended()) is not None:
                    link.send(json.dumps(ended).encode())
            if link in ready:
                message, streams, _, _ = socket.recv_fds(link, LARGEST, 2)
                if not message:
                    return None
                number = os.fork()
                if number == 0:
                    break
                for stream in streams:
                    os.close(stream)
                link.send(json.dumps([number, None]).encode())
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for each in (link, woken, waker):
        each.close()
    for stream, number in zip(streams, (1, 2), strict=True):
        os.dup2(stream, number)
        os.close(stream)
    return json.loads(message)


def _ended() -> tuple[int, int] | None:
    try:
        number, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (number, os.waitstatus_to_exitcode(status)) if number else None


def become(request: dict[str, Any]) -> None:
    """Do what the program does, in its surroundings."""
    if request["namespace"] is not None:
        with Path("/run/netns", request["namespace"]).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    # In place of this file's own folder.
    sys.path[:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    # JAX's configuration and Rich's consoles look at the environment when they are loaded: here is what tests vary.
    jax.config.update("jax_log_compiles", os.environ.get("JAX_LOG_COMPILES") == "1")
    console.width = errors.width = int(os.environ.get("COLUMNS", 80))
    sys.argv = ["byzpg", *request["arguments"]]
    exec(request["program"], {"__name__": "__main__"})


if __name__ == "__main__":
    import jax

    import byzpg.cli.membership
    import byzpg.cli.parsing
    import byzpg.engines.local
    import byzpg.experiments.figures
    import byzpg.experiments.report
    import byzpg.experiments.sweeps
    import byzpg.live.member
    import byzpg.live.monitor
    import byzpg.play
    import byzpg.training  # all that commands import when they need it
    from byzpg.cli.console import console, errors

    link = socket.socket(fileno=int(sys.argv[1]))
    # What the parser finds out about the commands, and what is loaded by now, serves all processes: none has to find it
    # out again, and no garbage collector looks through it, which would copy its pages.
    sys.argv = ["byzpg", "train"]
    byzpg.cli.parsing.parse_command()
    gc.collect()
    gc.freeze()

    if (asked := serve(link)) is not None:
        become(asked)
