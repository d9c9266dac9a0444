"""The identity of a member: a private key file that never leaves its machine, and a public card.

A member has two keys: an Ed25519 key that signs its messages, and an ECDSA key with a certificate that secures its
connections. There is no certificate authority: the other members pin the certificate itself.
"""

import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

from byzpg._files import write_atomically

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:]+\]):(?P<port>[0-9]{1,5})")
HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
# In front of a colon, gRPC does not read these as host names: unix:1 is a file, not port 1 of the host unix.
SCHEMES = re.compile(r"binder|dns|google-c2p(-experimental)?|ipv[46]|unix(-abstract)?|vsock|xds", re.IGNORECASE)
CARD_TAG = b"byzpg card 1\n"
# Certificates are pinned, and a new manifest replaces them, so dates would only stop a running federation. A clock that
# was never set stands at the first date or later; the last date is that of RFC 5280 for no expiry.
VALID_FROM, VALID_TO = datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
# Edwards25519, −x² + y² = 1 + d·x²·y² modulo p (RFC 8032, section 5.1).
FIELD = 2**255 - 19
CURVE = -121665 * pow(121666, -1, FIELD)


@dataclass(frozen=True)
class Member:
    """The public part of a member's identity."""

    name: str
    address: str
    certificate: str  # PEM
    public_key: str  # Ed25519, hexadecimal

    def __post_init__(self) -> None:
        check_name(self.name)
        check_address(self.address)
        try:
            certificate = x509.load_pem_x509_certificate(self.certificate.encode())
            public_key = self.verifier().public_bytes_raw().hex()
        except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm) as error:
            raise ValueError(f"member {self.name}: its certificate or public key is broken: {error}") from None
        if has_small_order(bytes.fromhex(public_key)):
            raise ValueError(
                f"member {self.name}: its public key has a small order, so that anybody can forge its signatures. "
                "Make a new key with byzpg keygen."
            )
        # Each has one spelling only. Otherwise one key could pass for two, and a second certificate could be hidden.
        pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
        if (pem, public_key) != (self.certificate, self.public_key):
            raise ValueError(
                f"member {self.name}: its certificate must be one PEM block with nothing around it, and its public key "
                "must be 64 digits of 0-9 and a-f."
            )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate."""
        return fingerprint(self.certificate.encode())

    def verifier(self) -> ed25519.Ed25519PublicKey:
        """The key that verifies its signatures."""
        return ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.public_key))

    def as_data(self) -> dict[str, str]:
        """Plain data, as in a card and in a manifest."""
        return {
            "name": self.name,
            "address": self.address,
            "fingerprint": self.fingerprint,
            "public_key": self.public_key,
            "certificate": self.certificate,
        }

    @classmethod
    def of(cls, values: dict[str, object]) -> "Member":
        """Make a member from plain data, whose fingerprint must match the certificate."""
        fields = ("name", "address", "fingerprint", "public_key", "certificate")
        for field in fields:
            if not isinstance(values.get(field), str):
                raise ValueError(f"a member needs {field}, a string.")
        for field in sorted(values.keys() - set(fields)):
            raise ValueError(f"a member has no {field!r}.")
        name, address, expected, public_key, certificate = (str(values[field]) for field in fields)
        member = cls(name=name, address=address, certificate=certificate, public_key=public_key)
        if member.fingerprint != expected:
            raise ValueError(
                f"the certificate of {name} has the fingerprint {member.fingerprint}, not {expected}: one of the two "
                "was changed. Ask the member for its card again."
            )
        return member


@dataclass(frozen=True, eq=False)
class PrivateIdentity:
    """A member's two private keys."""

    signing: ed25519.Ed25519PrivateKey
    tls: bytes  # PEM


def fingerprint(certificate: bytes) -> str:
    """SHA-256 of a PEM certificate."""
    loaded = x509.load_pem_x509_certificate(certificate)
    return loaded.fingerprint(hashes.SHA256()).hex()


def has_small_order(public_key: bytes) -> bool:
    """Whether 8·P = 0 for an Ed25519 public key P; then signatures without a private key are valid for it."""
    y = int.from_bytes(public_key, "little") % 2**255  # without the sign of x, which does not matter here
    for _ in range(3):
        y_squared = y * y
        x_squared = (y_squared - 1) * _inverse(CURVE * y_squared + 1)
        y = (y_squared + x_squared) * _inverse(1 - CURVE * x_squared * y_squared) % FIELD  # of twice the point
    return y == 1


def _inverse(number: int) -> int:
    return pow(number, -1, FIELD) if number % FIELD else 0  # 0 can occur if no point has this y


def check_clock(member: Member, now: datetime) -> None:
    """Raise a ValueError if a certificate is not valid now: TLS would only say that the connection was closed."""
    certificate = x509.load_pem_x509_certificate(member.certificate.encode())
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not first <= now <= last:
        raise ValueError(
            f"this machine's clock says {now:%Y-%m-%d %H:%M} UTC, but the certificate of {member.name} is valid "
            f"from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC: set the clock, or rotate the key."
        )


def check_name(name: str) -> None:
    """Raise a ValueError unless this can be a member's name."""
    if not NAME.fullmatch(name):
        raise ValueError(f"a member's name must be 1 to 32 characters of a-z, 0-9 and -, got {name!r}.")


def check_address(address: str) -> None:
    """Raise a ValueError unless this is host:port, where the host is a name, an IPv4 address or [an IPv6 address]."""
    found = ADDRESS.fullmatch(address)
    if not found or not 0 < int(found["port"]) < 65536 or not _is_host(found["host"]):
        raise ValueError(f"an address must be host:port with a port of 1 to 65535, got {address!r}.")
    if SCHEMES.fullmatch(found["host"]):
        raise ValueError(
            f"an address must begin with a host, but {found['host']}: is a scheme of gRPC, got {address!r}: use the "
            "full name of the host, or its IP address."
        )


def _is_host(host: str) -> bool:
    labels = host.removesuffix(".").split(".")
    try:
        if host.startswith("["):
            ipaddress.IPv6Address(host.strip("[]"))
        elif labels[-1].isdecimal():
            ipaddress.IPv4Address(host)
        else:
            return all(map(HOST_LABEL.fullmatch, labels))
    except ValueError:
        return False
    return True


def generate(name: str, address: str) -> tuple[Member, PrivateIdentity]:
    """Make a new member and its private keys."""
    check_name(name)
    check_address(address)
    signing, tls = ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(tls.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(VALID_FROM)
        .not_valid_after(VALID_TO)
        # TLS checks this name instead of a host name: members are known by their names, wherever they run.
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(tls, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
    public_key = signing.public_key().public_bytes_raw().hex()
    member = Member(name=name, address=address, certificate=pem, public_key=public_key)
    return member, PrivateIdentity(signing, _pem(tls))


def _pem(key: ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def write_identity(folder: Path, member: Member, private: PrivateIdentity) -> tuple[Path, Path]:
    """Write NAME.key, readable by its owner only, and NAME.card.

    Returns:
        The paths of the key and of the card.

    Raises:
        ValueError: If one of the two files exists already.
    """
    key, card = folder / f"{member.name}.key", folder / f"{member.name}.card"
    for path in (key, card):
        if path.exists():
            raise ValueError(f"{path} exists already, and keys are never overwritten: choose another directory.")
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(_pem(private.signing) + private.tls)
        file.flush()
        os.fsync(file.fileno())
    values = member.as_data() | {"signature": private.signing.sign(_card_content(member)).hex()}
    text = "# The public card of a member of a byzpg federation.\n" + to_toml(values)
    write_atomically(card, lambda file: file.write(text.encode()))
    return key, card


def _card_content(member: Member) -> bytes:
    return CARD_TAG + "\n".join(member.as_data().values()).encode()


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Read a TOML file that may come from anyone; an error calls it by `what` it should be."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{what} {path} cannot be read: {error}") from None


def read_card(path: Path) -> Member:
    """Read a card, which the member must have signed itself."""
    values = read_toml(path, "card")
    signature = values.pop("signature", "")
    try:
        member = Member.of(values)
    except ValueError as error:
        raise ValueError(f"card {path}: {error}") from None
    try:
        member.verifier().verify(bytes.fromhex(str(signature)), _card_content(member))
    except (InvalidSignature, ValueError):
        raise ValueError(f"card {path} is not signed by {member.name}'s own key: ask for it again.") from None
    return member


def read_key(path: Path, member: Member) -> PrivateIdentity:
    """Read the private keys of a member.

    Raises:
        ValueError: If they belong to another member, or if other users of this machine can read them.
    """
    try:
        if os.name == "posix" and path.stat().st_mode & 0o077:
            raise ValueError(f"{path} can be read by other users: run chmod 600 {path}.")
        blocks = re.findall(rb"-----BEGIN [^-]+-----.+?-----END [^-]+-----\n", path.read_bytes(), re.DOTALL)
    except OSError as error:
        raise ValueError(f"the private key of {member.name} cannot be read: {error}. See byzpg keygen.") from None
    if len(blocks) != 2:
        raise ValueError(f"{path} is not a private key of byzpg: it must hold two keys, got {len(blocks)}.")
    try:
        signing, tls = (serialization.load_pem_private_key(block, None) for block in blocks)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError if it needs a password
        raise ValueError(f"{path} is not a private key of byzpg: its keys are broken or encrypted.") from None
    if not isinstance(signing, ed25519.Ed25519PrivateKey):
        raise ValueError(f"{path} is not a private key of byzpg: its first key must be Ed25519.")
    if signing.public_key().public_bytes_raw().hex() != member.public_key:
        raise ValueError(f"{path} is not the key of {member.name}: its public key is not the one in the manifest.")
    if tls.public_key() != x509.load_pem_x509_certificate(member.certificate.encode()).public_key():
        raise ValueError(f"{path} is not the key of {member.name}: its second key does not match the certificate.")
    return PrivateIdentity(signing, blocks[1])


def short(content: bytes) -> str:
    """The first 12 digits of a hash, to tell contents apart."""
    return sha256(content).hexdigest()[:12]


def to_toml(values: Mapping[str, object]) -> str:
    """Write plain values as TOML, with multi-line strings for texts of several lines."""
    return "".join(f"{name} = {_toml_value(value)}\n" for name, value in values.items())


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are valid in TOML, which requires one more.
        lines = [json.dumps(line, ensure_ascii=False)[1:-1].replace("\x7f", "\\u007f") for line in value.split("\n")]
        return f'"{lines[0]}"' if len(lines) == 1 else '"""\n' + "\n".join(lines) + '"""'
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml_value, value))}]"
    return repr(value)
