"""A real Flower deployment on this machine: SuperLink and SuperNodes as processes, with TLS and registered keys.

The tests of the Flower engine and `benchmarks/scale.py` run `examples/flower` in it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from byzpg.live.links import free_ports

APP = Path(__file__).parents[2] / "examples" / "flower"
TOOLS = Path(sys.executable).parent
MARK = "BYZPG_TEST_DEPLOYMENT"  # in the environment of every process that a deployment starts
PATIENCE = 200.0  # seconds to wait for an event


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE:.0f} s in vain until {what}")
        time.sleep(0.05)


def write_certificates(folder: Path) -> None:
    """Write a certificate authority (ca.crt), and a server certificate that it signed (server.crt, server.key)."""
    now = datetime.now(UTC)

    def certificate(name: str, key: Any, issuer: str, issuer_key: Any, authority: bool) -> x509.Certificate:
        names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, issuer)]
        builder = x509.CertificateBuilder().subject_name(names[0]).issuer_name(names[1]).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(authority, None), critical=True)
        loopback = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("localhost")])
        return builder.add_extension(loopback, critical=False).sign(issuer_key, hashes.SHA256())

    authority_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    authority = certificate("authority", authority_key, "authority", authority_key, True)
    server = certificate("127.0.0.1", server_key, "authority", authority_key, False)
    (folder / "ca.crt").write_bytes(authority.public_bytes(Encoding.PEM))
    (folder / "server.crt").write_bytes(server.public_bytes(Encoding.PEM))
    (folder / "server.key").write_bytes(
        server_key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    )


def write_node_key(path: Path) -> Path:
    """Write a SuperNode's private key, and its public key next to it."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)
    return path


@dataclass
class Deployment:
    """The processes of a deployment, and the folder that contains all of Flower's files."""

    folder: Path
    port: int
    others: list[int]  # ports
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(self.folder),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3",
            MARK: str(self.folder),
        }

    def start(self, name: str, tool: str, *options: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as output:
            process = subprocess.Popen(
                [str(TOOLS / tool), *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=self.folder,
            )
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def flwr(self, *options: str) -> str:
        """Run Flower's command line and return its output."""
        command = [str(TOOLS / "flwr"), *options]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.folder,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return re.sub(r"\x1b\[\d*m", "", done.stdout)

    def start_superlink(self, *options: str) -> None:
        control, fleet, *self.others = self.others
        addresses = ["--control-api-address", f"127.0.0.1:{control}", "--fleet-api-address", f"127.0.0.1:{fleet}"]
        superlink = self.start("superlink", "flower-superlink", "--port", str(self.port), *addresses, *options)
        until(lambda: "Uvicorn running" in self.log("superlink") or superlink.poll() is not None, "the SuperLink is up")
        if superlink.poll() is not None:
            raise RuntimeError(self.log("superlink"))

    def start_secure_superlink(self) -> None:
        """Start a SuperLink with TLS that accepts registered SuperNodes only."""
        files = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}
        trust = [word for option, file in files.items() for word in (f"--ssl-{option}", str(self.folder / file))]
        self.start_superlink(*trust, "--enable-supernode-auth")

    def start_nodes(self, num_nodes: int) -> None:
        """Start SuperNodes, each with its own key, which is registered first."""
        keys = [write_node_key(self.folder / f"node{number}.key") for number in range(num_nodes)]
        with ThreadPoolExecutor() as pool:
            public = (str(key.with_suffix(".pub")) for key in keys)
            for said in pool.map(lambda path: self.flwr("supernode", "register", path, "here"), public):
                if "registered successfully" not in said:
                    raise RuntimeError(said)
        for number, key in enumerate(keys):
            self.start_node(f"node{number}", key)

    def start_node(self, name: str, key: Path) -> subprocess.Popen[bytes]:
        port, *self.others = self.others
        trust = ["--root-certificates", str(self.folder / "ca.crt"), "--auth-supernode-private-key", str(key)]
        address = ["--superlink", f"127.0.0.1:{self.port}", "--port", str(port)]
        return self.start(name, "flower-supernode", *address, *trust)

    def run(self, *federation: str, **options: Any) -> str:
        """Call `flwr run`, wait until it ends, and return the server's log."""
        given = {**options, "directory": str(self.folder / "runs")}
        # JSON writes these values as TOML does.
        config = (f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in given.items())
        return self.flwr("run", str(APP), "here", "--stream", "--run-config", " ".join(config), *federation)

    def alive(self) -> list[str]:
        """All processes of this deployment, those that Flower started among them."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:  # the process has ended, or belongs to another user
                continue
        return found

    def stop(self) -> None:
        """End the processes that were started here; those that Flower started end with them."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.wait(PATIENCE)
        until(lambda: not self.alive(), "all processes have ended")


@contextmanager
def deployment(folder: Path, tls: bool) -> Iterator[Deployment]:
    """A deployment that is not started yet. With TLS, its certificates are written."""
    port, *others = free_ports(12)
    made = Deployment(folder, port, others)
    trust = f'root-certificates = "{folder / "ca.crt"}"' if tls else "insecure = true"
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\n{trust}\n'
    )
    if tls:
        write_certificates(folder)
    try:
        yield made
    finally:
        made.stop()
