"""HTTP without a login, for browsers and scrapers: what the status page and the metrics share."""

import ipaddress
import re
import socketserver
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET, AF_INET6
from typing import Any

MOST_CONNECTIONS = 32  # at once


class Server(ThreadingHTTPServer):
    """Serves requests, one thread for each, and closes connections that are too many.

    Args:
        what: What is served, for the error.
        host: The address on which to serve it.
        port: The port; 0 for any free one.
        handler: What answers.

    Raises:
        ValueError: If it cannot be served there.
    """

    request_queue_size = 2 * MOST_CONNECTIONS  # with the usual 5, the others would wait for a second and more

    def __init__(self, what: str, host: str, port: int, handler: "type[Handler]") -> None:
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self.address_family = AF_INET6 if ":" in host else AF_INET
        try:
            super().__init__((host, port), handler)
        except (OSError, OverflowError, UnicodeError) as error:
            words = getattr(error, "strerror", None) or error
            raise ValueError(f"cannot serve {what} on {host}:{port}: {words}. Choose another host or port.") from None
        self.local = _is_loopback(str(self.server_address[0]))

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's would ask the name service, which can take long

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that closes its connection is not an error."""


class Handler(BaseHTTPRequestHandler):
    """Answers requests, but on this machine's own addresses only those that ask for this machine."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = 10.0  # seconds without a byte, after which the connection is closed

    def parse_request(self) -> bool:
        """Read a request; returns whether to answer it."""
        if not super().parse_request():
            return False
        asked = re.sub(r":\d+$", "", self.headers.get("Host", "")).strip("[]")
        if self.server.local and not _is_loopback(asked):
            # DNS rebinding: a foreign website can point its name to this machine, and read what browsers get from it.
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
            return False
        return True

    def log_message(self, format: str, *args: Any) -> None:
        """Only the command line prints."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
