"""Identities, manifests and the files of a member.

Others may have written these files, or a crash may have cut them off. Every fault must be one clear error.
"""

import asyncio
import json
import os
import random
import re
import stat
import subprocess
import sys
import tomllib
from copy import deepcopy
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from grpc import aio

from byzpg.config import Config
from byzpg.live import identity
from byzpg.live.identity import Member, PrivateIdentity, generate, read_card, read_key, to_toml, write_identity
from byzpg.live.manifest import FIXED, Manifest, Times, new_manifest
from byzpg.live.protocol import Course, Evidence
from byzpg.live.store import Store
from byzpg.live.wire import Codec, prove

IDENTITIES = [generate(name, f"{name}.example:7000") for name in ("ada", "bob", "cy", "di", "eve")]
MEMBERS = [member for member, _ in IDENTITIES]
ADA, ADAS = IDENTITIES[0]
BOB, BOBS = IDENTITIES[1]
TRAINING: dict[str, Any] = {
    "env": "CartPole-v1",
    "hidden": (8, 4),
    "step_size": 1e-05,
    "discount": 0.99,
    "output_tanh": True,
    "rounds": None,
    "aggregator": "NNM(TrimmedMean())",
    "estimator": 'GPOMDP(baseline="leave-one-out")',
}
MANIFEST = new_manifest(MEMBERS, 1, TRAINING, Times(grace=0.1), rehearsal=False)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# Identity


def test_an_identity_on_the_disk(tmp_path):
    key, card = write_identity(tmp_path / "new", ADA, ADAS)
    assert key.stat().st_mode & 0o777 == 0o600
    assert card.stat().st_mode & 0o777 == 0o644
    assert sorted(path.name for path in key.parent.iterdir()) == ["ada.card", "ada.key"]
    assert read_card(card) == ADA
    private = read_key(key, ADA)
    assert private.signing.private_bytes_raw() == ADAS.signing.private_bytes_raw()
    assert private.tls == ADAS.tls
    secrets = (ADAS.signing.private_bytes_raw().hex(), ADAS.tls.decode(), "PRIVATE")
    assert not any(secret in card.read_text() for secret in secrets)


def test_a_key_is_private_whatever_the_umask_says(tmp_path):
    before = os.umask(0)
    try:
        key, _ = write_identity(tmp_path, ADA, ADAS)
    finally:
        os.umask(before)
    assert key.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610, 0o644])
def test_a_key_that_others_can_use_is_refused(tmp_path, mode):
    key, _ = write_identity(tmp_path, ADA, ADAS)
    key.chmod(mode)
    with pytest.raises(ValueError, match="can be read by other users: run chmod 600"):
        read_key(key, ADA)
    key.chmod(0o400)
    read_key(key, ADA)


@pytest.mark.parametrize("there", ["ada.key", "ada.card"])
def test_no_file_is_overwritten(tmp_path, there):
    write(tmp_path / there, "precious")
    with pytest.raises(ValueError, match=rf"{there} exists already, and keys are never overwritten"):
        write_identity(tmp_path, ADA, ADAS)
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "precious"


def test_a_certificate_belongs_to_one_member_and_cannot_sign_others():
    for member, private in IDENTITIES:
        certificate = x509.load_pem_x509_certificate(member.certificate.encode())
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
        assert constraints.critical
        assert not constraints.value.ca
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert list(names) == [x509.DNSName(member.name)]
        # Before the clock of a machine that was never set, and without an end.
        assert certificate.not_valid_before_utc == datetime(1970, 1, 1, tzinfo=UTC)
        assert certificate.not_valid_after_utc.year == 9999
        tls = serialization.load_pem_private_key(private.tls, None)
        assert tls.public_key() == certificate.public_key()
    assert len({member.fingerprint for member in MEMBERS}) == len(MEMBERS)


def card_values(tmp_path: Path) -> dict[str, Any]:
    _, card = write_identity(tmp_path / "true", ADA, ADAS)
    return tomllib.loads(card.read_text())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"address": "evil.example:7000"}, "not signed by ada's own key"),
        ({"name": "bob"}, "not signed by bob's own key"),
        ({"public_key": BOB.public_key}, "not signed by ada's own key"),
        ({"certificate": BOB.certificate}, "the fingerprint .* one of the two was changed"),
        ({"certificate": BOB.certificate, "fingerprint": BOB.fingerprint}, "not signed by ada's own key"),
        ({"fingerprint": BOB.fingerprint}, "one of the two was changed"),
        ({"fingerprint": ADA.fingerprint.upper()}, "one of the two was changed"),
        ({"signature": "00" * 64}, "not signed by ada's own key"),
        ({"signature": ""}, "not signed"),
        ({"signature": "no"}, "not signed"),
        ({"signature": 5}, "not signed"),
        ({"signature": None}, "not signed"),
        ({"public_key": "00"}, "member ada: its certificate or public key is broken"),
        ({"public_key": "no"}, "broken"),
        (
            {"public_key": ADA.public_key.upper()},
            "one PEM block with nothing around it, and its public key must be 64 digits",
        ),
        ({"public_key": f"{ADA.public_key[:32]} {ADA.public_key[32:]}"}, "64 digits"),
        ({"certificate": "no"}, "broken"),
        ({"certificate": ADA.certificate.replace("M", "N", 1)}, "broken"),
        ({"certificate": ADA.certificate + BOB.certificate}, "one PEM block with nothing around"),
        ({"certificate": "hello\n" + ADA.certificate}, "one PEM block with nothing around"),
        ({"certificate": ADA.certificate + '"""\n[[members]]\n'}, "one PEM block with nothing around"),
        ({"name": "Ada"}, "a member's name must be"),
        ({"address": "ada"}, "an address must be host:port"),
        ({"extra": "text"}, "a member has no 'extra'"),
        *(({field: 5}, f"needs {field}, a string") for field in ADA.as_data()),
        *(({field: None}, f"needs {field}, a string") for field in ADA.as_data()),
    ],
)
def test_a_changed_card_is_refused(tmp_path, changes, words):
    """A field whose change is None is left out."""
    values = {name: value for name, value in (card_values(tmp_path) | changes).items() if value is not None}
    with pytest.raises(ValueError, match=words):
        read_card(write(tmp_path / "changed.card", to_toml(values)))


@pytest.mark.parametrize("content", [b"\xff", b"[", b"name = ", b"a = " + b"[" * 100_000, b"\0"])
def test_a_card_that_cannot_be_read(tmp_path, content):
    card = tmp_path / "bad.card"
    card.write_bytes(content)
    with pytest.raises(ValueError, match=r"card .*bad\.card cannot be read"):
        read_card(card)
    with pytest.raises(ValueError, match=r"card .*none\.card cannot be read"):
        read_card(tmp_path / "none.card")


# Signatures that anybody can forge


def torsion() -> list[tuple[int, int]]:
    """The points (x, y) of small order: the multiples of one of order 8, which is L·P for a random point P."""
    p, order = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
    d = -121665 * pow(121666, -1, p) % p

    def add(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
        (x1, y1), (x2, y2) = one, other
        both = d * x1 * x2 * y1 * y2
        x3, y3 = (x1 * y2 + x2 * y1) * pow(1 + both, -1, p), (y1 * y2 + x1 * x2) * pow(1 - both, -1, p)
        return x3 % p, y3 % p

    def multiple(number: int, point: tuple[int, int]) -> tuple[int, int]:
        total = 0, 1
        for bit in f"{number:b}":
            total = add(total, total)
            total = add(total, point) if bit == "1" else total
        return total

    for y in range(2, 100):
        square = (y * y - 1) * pow(d * y * y + 1, -1, p) % p
        root = pow(square, (p + 3) // 8, p)
        x = root if root * root % p == square else root * pow(2, (p - 1) // 4, p) % p
        if x * x % p == square:
            found = multiple(order, (x, y))
            points = [multiple(number, found) for number in range(8)]
            if len(set(points)) == 8:
                return points
    raise AssertionError("there is a point of order 8")


def encodings(points: list[tuple[int, int]]) -> list[bytes]:
    """All 32 bytes that stand for these points: also with y + p for y, and with either sign where x = 0."""
    ys = {value for _, y in points for value in (y, y + 2**255 - 19) if value < 2**255}
    return [(y + sign * 2**255).to_bytes(32, "little") for y in sorted(ys) for sign in (0, 1)]


SMALL = encodings(torsion())


def test_keys_of_small_order_are_refused():
    assert len(SMALL) == len(set(SMALL)) == 14
    for public_key in SMALL:
        assert identity.has_small_order(public_key)
        with pytest.raises(ValueError, match="member ada: its public key has a small order, so that anybody can forge"):
            replace(ADA, public_key=public_key.hex())
        with pytest.raises(ValueError, match="small order"):
            Manifest.of(changed("members", 0, "public_key", to=public_key.hex()), "federation.toml")


def test_other_keys_are_not_of_small_order():
    for _ in range(20):
        assert not identity.has_small_order(os.urandom(32))
    assert not any(identity.has_small_order(bytes.fromhex(member.public_key)) for member in MEMBERS)


@pytest.mark.parametrize("public_key", SMALL, ids=bytes.hex)
def test_a_key_of_small_order_accepts_what_nobody_signed(public_key):
    """So such a member could be "proven" to have signed anything."""
    key = ed25519.Ed25519PublicKey.from_public_bytes(public_key)

    def accepts(message: bytes, nonce: bytes) -> bool:
        try:
            key.verify(nonce + bytes(32), message)
        except InvalidSignature:
            return False
        return True

    messages = [f"vector {number}".encode() for number in range(20)]
    assert any(accepts(message, nonce) for message in messages for nonce in SMALL)


# Clocks


def test_a_wrong_clock_is_named(monkeypatch):
    now = datetime(2026, 3, 5, 12, 30, tzinfo=UTC)
    identity.check_clock(ADA, now)
    identity.check_clock(ADA, datetime(1970, 1, 1, tzinfo=UTC))
    monkeypatch.setattr(identity, "VALID_FROM", now + timedelta(days=3))
    late, _ = generate("fay", "fay.example:1")
    words = (
        "this machine's clock says 2026-03-05 12:30 UTC, but the certificate of fay is valid from 2026-03-08 12:30 to "
        "9999-12-31 23:59 UTC: set the clock, or rotate the key."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        identity.check_clock(late, now)
    with pytest.raises(ValueError, match="certificate of ada"):
        identity.check_clock(ADA, datetime(1969, 12, 31, tzinfo=UTC))
    identity.check_clock(late, now + timedelta(days=3))


def key_file(path: Path, content: bytes) -> Path:
    path.touch(0o600)
    path.write_bytes(content)
    return path


def encrypted(private: PrivateIdentity) -> bytes:
    kind = serialization.BestAvailableEncryption(b"word")
    return private.signing.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, kind)


def test_the_key_of_another_member_is_refused(tmp_path):
    bobs, _ = write_identity(tmp_path, BOB, BOBS)
    with pytest.raises(ValueError, match=r"bob\.key is not the key of ada: its public key is not the one"):
        read_key(bobs, ADA)
    mixed = key_file(tmp_path / "mixed.key", bobs.read_bytes().replace(BOBS.tls, ADAS.tls))
    with pytest.raises(ValueError, match=r"mixed\.key is not the key of bob: its second key does not match the cert"):
        read_key(mixed, BOB)


def test_a_broken_key_is_refused(tmp_path):
    true, _ = write_identity(tmp_path, ADA, ADAS)
    signing = true.read_bytes().removesuffix(ADAS.tls)
    for index, (content, words) in enumerate(
        (
            (b"", "two keys, got 0"),
            (b"\xff\0", "two keys, got 0"),
            (ADAS.tls, "two keys, got 1"),
            (ADAS.tls + signing, "first key must be Ed25519"),
            (true.read_bytes() + ADAS.tls, "two keys, got 3"),
            (signing.replace(b"M", b"", 1) + ADAS.tls, "keys are broken or encrypted"),
            (signing + ADAS.tls.replace(b"\nM", b"\n!", 1), "keys are broken or encrypted"),
            (encrypted(ADAS) + ADAS.tls, "keys are broken or encrypted"),
        )
    ):
        with pytest.raises(ValueError, match=rf"{index}\.key is not a private key of byzpg: .*{words}"):
            read_key(key_file(tmp_path / f"{index}.key", content), ADA)
    with pytest.raises(ValueError, match=r"private key of ada cannot be read: .* See byzpg keygen"):
        read_key(tmp_path / "none.key", ADA)


@pytest.mark.parametrize("name", ["", "Ada", "-a", "a-", "a b", "a_b", "a" * 33, "a\n", "../a", "é", "a.b", "²"])
def test_bad_names(name):
    with pytest.raises(ValueError, match="a member's name must be 1 to 32 characters of a-z, 0-9 and -, got"):
        generate(name, "host:1")


@pytest.mark.parametrize(
    "address",
    [
        "",
        "host",
        "host:",
        ":1",
        "host:0",
        "host:65536",
        "host:-1",
        "host:1\n",
        "a b:1",
        "::1:7",
        "[::1]",
        "host:٣",
        "h/x:1",
        ".:1",
        "a..b:1",
        "-a:1",
        "a-:1",
        "a" * 64 + ":1",
        "1.2.3:1",
        "256.0.0.1:1",
        "[:]:1",
        "[1.2.3.4]:1",
        "[fe80::1%eth0]:1",
        "unix:/tmp/x:1",
        "unix:///x:1",
        "dns:///host:1",
        "ipv4:1.2.3.4:1",
    ],
)
def test_bad_addresses(address):
    with pytest.raises(ValueError, match="an address must be host:port with a port of 1 to 65535, got"):
        generate("ada", address)


@pytest.mark.parametrize(
    "address",
    ["unix:1", "unix-abstract:5", "vsock:1", "dns:1", "ipv4:80", "ipv6:7700", "xds:1", "google-c2p:1", "UNIX:1"],
)
def test_a_scheme_of_grpc_is_no_host(address):
    with pytest.raises(ValueError, match="is a scheme of gRPC, got"):
        generate("ada", address)


def test_grpc_itself_would_read_a_scheme(tmp_path, monkeypatch):
    """Without the check, a member would listen on a file."""

    async def listen() -> int:
        server = aio.server()
        try:
            return server.add_insecure_port("unix:1")
        finally:
            await server.stop(None)

    monkeypatch.chdir(tmp_path)
    asyncio.run(listen())
    assert stat.S_ISSOCK(Path("1").stat().st_mode)


@pytest.mark.parametrize(
    ("name", "address"),
    [
        *(("a", "host:1"), ("a" * 32, "10.0.0.1:65535"), ("0-9", "[::1]:7"), ("x1", "a-b.c_d.example:80")),
        *(("a", f"{host}:1") for host in ("unix.example", "1a", "a" * 63, "example.org.", "3.example")),
    ],
)
def test_good_names_and_addresses(tmp_path, name, address):
    member, private = generate(name, address)
    assert read_card(write_identity(tmp_path, member, private)[1]) == member


TEXTS = [
    "",
    'a "quoted" word',
    "back\\slash \\n \\",
    "two\nlines",
    "\nbegins and ends\n",
    "\n",
    'three """ quotes\n""" in """\nlines"""',
    '"\n"',
    "back\\\nslash\\",
    "tab\t, return\r, both\r\n, bell\a, delete\x7f, null\0",
    "γ, 𝛾, \u2028 and \x85",
    "'''",
]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_survive_toml(text):
    assert tomllib.loads(to_toml({"text": text, "list": [text, text]})) == {"text": text, "list": [text, text]}


def test_values_survive_toml():
    values = {
        "floats": [1e-05, 1e16, 0.1, -0.0, 5e-324, 1.7976931348623157e308, 1.0],
        "numbers": [0, -1, 2**62],
        "truth": [True, False],
        "empty": [],
        "nested": [["a", 1], []],
    }
    assert repr(tomllib.loads(to_toml(values))) == repr(values)
    assert tomllib.loads(to_toml({"hidden": (16, 8)})) == {"hidden": [16, 8]}


def test_short_contents_tell_apart():
    assert identity.short(b"a") != identity.short(b"b")
    assert len(identity.short(b"a")) == 12


# Manifest


def test_a_manifest_survives_its_file(tmp_path):
    path = tmp_path / "federation.toml"
    MANIFEST.write(path)
    loaded = Manifest.load(path)
    assert loaded.canonical == MANIFEST.canonical
    assert loaded.digest == MANIFEST.digest
    assert loaded.members == MANIFEST.members
    assert loaded.times == MANIFEST.times
    assert loaded.settings() == MANIFEST.settings()
    assert loaded.settings().hidden == (8, 4)
    assert loaded.settings().num_byzantine == 1
    assert "rounds" not in loaded.training
    with pytest.raises(ValueError, match="exists already"):
        MANIFEST.write(path)
    again = tmp_path / "again.toml"
    loaded.write(again)
    assert again.read_text() == path.read_text()


def shuffled(values: dict[str, Any]) -> dict[str, Any]:
    """The same data with its keys in another order."""
    names = sorted(values)
    random.Random(3).shuffle(names)
    return {name: shuffled(values[name]) if isinstance(values[name], dict) else values[name] for name in names}


def test_the_digest_depends_on_the_content_only(tmp_path):
    data = shuffled(json.loads(MANIFEST.canonical))
    members = [shuffled(member) for member in data.pop("members")]
    tables = {name: data.pop(name) for name in ("training", "times")}
    parts = [f"# {uuid4()}\n\n" + to_toml(data).replace(" = ", "=")]
    parts += ["[[members]]  # one\n\n" + to_toml(member) for member in members]
    parts += [f"[{name}]\n" + to_toml(values) + "# end\n" for name, values in tables.items()]
    written = Manifest.load(write(tmp_path / "other.toml", "\n".join(parts).replace("\n", "\r\n")))
    assert written.digest == MANIFEST.digest
    assert written.digest != replace(MANIFEST, num_byzantine=0).digest


# Written by byzpg 0.1, which computed this digest of it.
OLD_DIGEST = "7a56b6c59124fee88d18bdf1aacbd9cfe6edc5a5e69345b484e8936c889070db"
OLD_MANIFEST = '''
# A byzpg federation. Every member needs this very content: change it here, and give it to all of them.
# To run it again from the beginning, put another id at `run`.
version = 1
federation = "9f08cbe4-5db9-40b7-84cb-23172420f8f9"
run = "081f97e9-0cca-48e0-8105-78fbca0e11b7"
num_faulty = 0
rehearsal = true

[times] # seconds
grace = 0.5
start_grace = 600.0
linger = 30.0
retry = 0.5

[training] # options of `byzpg train`
env = "CartPole-v1"
algorithm = "DecByzPG"
preset = "tuned"
seed = 0
trajectories = 40
aggregator = "RFA()"
agreement = "MDA()"
rounds = 3
large_batch = 15
small_batch = 4
switch_probability = 1.0
estimator = "GPOMDP(baseline='leave-one-out')"
importance = "ImportanceWeights(cap=1.0)"
gate = 1.0
memory = "paper"
coin = "common"
optimizer = "adam"
step_size = 0.02
policy = "auto"
hidden = [16, 16]
activation = "relu"
output_tanh = false
initialization = "seeded"
horizon = 50
discount = 0.999
output = "last"

[[members]]
name = "ada"
address = "ada.example:7000"
fingerprint = "f5aa69adf678c51d99e7313a2754265e1d23bf7eb34498ad87b2293e0cad8f49"
public_key = "dc4d01209dc6f1fe76e53168082cebfec611f659f8c9551a93e92c78ebf26766"
certificate = """
-----BEGIN CERTIFICATE-----
MIIBPjCB5qADAgECAhRnwg1+Oz1oirBUlZDUdgj0PgYX2zAKBggqhkjOPQQDAjAO
MQwwCgYDVQQDDANhZGEwIBcNMjYxMTE1MTAzOTIzWhgPMjEyNjEwMjMxMDM5MjNa
MA4xDDAKBgNVBAMMA2FkYTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABNWjMheA
yjwguQeBSwPJ++CY5Iw+clkwyCUAthKhT17fJzYyBQAB5P3iOaJysDEIvf312fUg
wdRhyEwY3S0M6yyjIDAeMA4GA1UdEQQHMAWCA2FkYTAMBgNVHRMBAf8EAjAAMAoG
CCqGSM49BAMCA0cAMEQCIAgEJProzZvTCP+D/QlqKZlm+qXUIbxChdGNZrHTmktA
AiBzie37sF7NMLK0iiHo1RLpO2pa6KEshkwzefshlUSKeQ==
-----END CERTIFICATE-----
"""

[[members]]
name = "bob"
address = "bob.example:7000"
fingerprint = "b2deba57839c8b990237fd4676b3e041c15cf4150955fbb83fd91a8efcb3e16e"
public_key = "41782e094adab118cb3534a694841473db6c8362d3d302cbc37c78b023e928bd"
certificate = """
-----BEGIN CERTIFICATE-----
MIIBPzCB5qADAgECAhQ6YjI6PG7RuXFvWuMiEQ8uLu4QEjAKBggqhkjOPQQDAjAO
MQwwCgYDVQQDDANib2IwIBcNMjYxMTE1MTAzOTIzWhgPMjEyNjEwMjMxMDM5MjNa
MA4xDDAKBgNVBAMMA2JvYjBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABIwnW/mN
qNu5JT7yShSG9UKJ/heNDzpTb5aJtZb6lwRgjb3/utRxQ+VQVB42ttL1tI3bQjJU
qwCTJXhVi9+XroGjIDAeMA4GA1UdEQQHMAWCA2JvYjAMBgNVHRMBAf8EAjAAMAoG
CCqGSM49BAMCA0gAMEUCIC/Zv6ttEQ4W0dfqNUnUX9fpkYtTokcFT9B5L8My5yy/
AiEAqRbbzdu93pGNkryiDjkbdhZC3HEUm4SWTteUqGzSRuE=
-----END CERTIFICATE-----
"""
'''


def test_a_manifest_of_byzpg_0_1_is_read_and_keeps_its_digest(tmp_path):
    old = Manifest.load(write(tmp_path / "old.toml", OLD_MANIFEST))
    assert old.digest.hex() == OLD_DIGEST
    assert (old.num_byzantine, old.settings().num_byzantine, old.settings().num_attackers) == (0, 0, 0)
    old.write(tmp_path / "new.toml")
    new = (tmp_path / "new.toml").read_text()
    assert "num_byzantine = 0" in new
    assert "num_faulty" not in new
    assert Manifest.load(tmp_path / "new.toml").digest == old.digest
    both = OLD_MANIFEST.replace("num_faulty = 0", "num_faulty = 0\nnum_byzantine = 0")
    with pytest.raises(ValueError, match="unknown key 'num_faulty'"):
        Manifest.load(write(tmp_path / "both.toml", both))


def test_seconds_may_be_written_as_whole_numbers():
    whole, exact = (replace(MANIFEST, times=Times(grace=number)) for number in (2, 2.0))
    assert whole.digest == exact.digest
    assert Manifest.of(tomllib.loads(whole.to_toml()), "text").digest == exact.digest


def test_the_digest_changes_with_every_field():
    other, _ = generate("zoe", "zoe.example:7000")
    renamed = replace(ADA, name="abe")
    changed = {
        "federation": replace(MANIFEST, federation=str(uuid4())),
        "run": replace(MANIFEST, run=str(uuid4())),
        "num_byzantine": replace(MANIFEST, num_byzantine=0),
        "rehearsal": replace(MANIFEST, rehearsal=True),
        "members": replace(MANIFEST, members=(*MEMBERS, other)),
        "order": replace(MANIFEST, members=tuple(reversed(MEMBERS))),
        "no training": replace(MANIFEST, training={}),
        "name": replace(MANIFEST, members=(renamed, *MEMBERS[1:])),
        "address": replace(MANIFEST, members=(replace(ADA, address="ada.example:7001"), *MEMBERS[1:])),
        "public_key": replace(MANIFEST, members=(replace(ADA, public_key=other.public_key), *MEMBERS[1:])),
        "certificate": replace(MANIFEST, members=(replace(ADA, certificate=other.certificate), *MEMBERS[1:])),
    }
    changed |= {
        f"times.{field.name}": replace(MANIFEST, times=replace(MANIFEST.times, **{field.name: 7.5}))
        for field in fields(Times)
    }
    others: dict[str, Any] = {"hidden": [8, 8], "step_size": 1e-4, "discount": 0.9, "output_tanh": False, "seed": 1}
    changed |= {
        f"training.{option}": replace(MANIFEST, training=TRAINING | {option: value}) for option, value in others.items()
    }
    digests = {MANIFEST.digest, *(manifest.digest for manifest in changed.values())}
    assert len(digests) == 1 + len(changed)
    for name, manifest in changed.items():
        assert MANIFEST.difference(manifest.canonical), name


def data() -> dict[str, Any]:
    return tomllib.loads(MANIFEST.to_toml())


def changed(*path: Any, to: Any) -> dict[str, Any]:
    """The manifest's data with one value replaced."""
    values: Any = data()
    inner = values
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = to
    return values


def without(*path: Any) -> dict[str, Any]:
    values: Any = data()
    inner = values
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    return values


REFUSED: list[tuple[dict[str, Any], str]] = [
    (changed("extra", to=1), "unknown key 'extra'"),
    *((without(name), f"{name} is missing") for name in data()),
    (changed("version", to=2), "version must be 1, got 2: update byzpg or the file"),
    (changed("version", to="1"), "version must be 1, got '1'"),
    (changed("federation", to="demo"), "federation must be an id such as .*, got 'demo'"),
    (changed("run", to=5), "run must be an id"),
    (changed("run", to=[]), "run must be an id"),
    (changed("run", to=datetime(2026, 1, 1)), "run must be an id"),
    (changed("num_byzantine", to="1"), "num_byzantine must be a whole number"),
    (changed("num_byzantine", to=1.0), "num_byzantine must be a whole number"),
    (changed("num_byzantine", to=True), "num_byzantine must be a whole number"),
    (changed("num_byzantine", to=-1), "num_byzantine must not be negative, got -1"),
    (changed("num_byzantine", to=2), r"MDA\(\) needs f < K/4; 2 of 5 .* use num_byzantine ≤ 1"),
    (changed("num_byzantine", to=3), r"NNM\(TrimmedMean\(\)\) needs f < K/2; 3 of 5 .* use num_byzantine ≤ 2"),
    (changed("rehearsal", to=1), "rehearsal true or false"),
    (changed("rehearsal", to="no"), "rehearsal true or false"),
    (changed("times", to=1), "times must be a table"),
    (changed("times", "patience", to=1.0), "times has no patience"),
    *(
        (changed("times", field.name, to=value), f"times: {field.name} must be a positive number of seconds, got")
        for field in fields(Times)
        for value in (0, -1.0, "1", True, float("inf"), float("nan"), [1.0], 10**400)
    ),
    (changed("training", to=[]), "training must be a table"),
    (changed("training", "stepsize", to=1), "training: there is no option 'stepsize'.*step_size"),
    (
        changed("training", "algorithm", to="ByzPG"),
        "ByzPG does not run among members without a server: use Dec-PA",
    ),
    (changed("training", to={"algorithm": "Fed-PAGE-PG"}), "Fed-PAGE-PG does not run among members without a server"),
    (changed("training", to={"algorithm": "PAGE-PG"}), "PAGE-PG is one agent alone"),
    (changed("training", "algorithm", to=3), "algorithm must be a name"),
    (changed("training", "env", to="CartPole-v9"), "CartPole-v9"),
    (changed("training", "hidden", to="8, 4"), "hidden must be"),
    (changed("training", "aggregator", to="Krumm"), "Krumm"),
    (changed("training", "step_size", to=datetime(2026, 1, 1)), "step_size must be"),
    *(
        (changed("training", option, to=1), f"training: {option} follows from the members")
        for option in (*FIXED, "num_declared")
    ),
    (changed("members", to={}), "members must be a list of tables"),
    (changed("members", to=[1]), "members must be a list of tables"),
    (changed("members", to=[]), "a federation needs at least 2 members, got 0"),
    (changed("members", to=[ADA.as_data()]), "a federation needs at least 2 members, got 1"),
    (changed("members", 0, "extra", to="text"), "a member has no 'extra'"),
    *((without("members", 0, name), f"a member needs {name}, a string") for name in ADA.as_data()),
    *((changed("members", 0, name, to=1), f"a member needs {name}, a string") for name in ADA.as_data()),
    (changed("members", 0, "name", to="bob"), "members must differ: two have the name bob"),
    (changed("members", 0, "address", to=BOB.address), "members must differ: two have the address bob.example:7000"),
    (changed("members", 0, "public_key", to=BOB.public_key), "members must differ: two have the public_key"),
    (
        changed("members", 0, to=BOB.as_data() | {"name": "ada", "address": "x:1", "public_key": ADA.public_key}),
        "members must differ: two have the fingerprint",
    ),
    (changed("members", 0, "public_key", to=BOB.public_key.upper()), "64 digits"),
    (changed("members", 0, "certificate", to=BOB.certificate), "the certificate of ada has the fingerprint"),
    (changed("members", 0, "fingerprint", to="00"), "the certificate of ada has the fingerprint .*, not 00"),
    (changed("members", 0, "certificate", to="text"), "member ada: its certificate or public key is broken"),
]


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=[words[:50] for _, words in REFUSED])
def test_a_bad_manifest_is_refused(values, words):
    Manifest.of(data(), "federation.toml")
    with pytest.raises(ValueError, match=words) as caught:
        Manifest.of(values, "federation.toml")
    assert str(caught.value).startswith("federation.toml: ")
    assert str(caught.value).count("federation.toml") == 1


WRONG = (
    True,
    -1,
    1.5,
    float("nan"),
    "x",
    "",
    [],
    ["a"],
    [[1]],
    {"a": 1},
    datetime(2026, 1, 1),
    10**400,
    "RFA(",
    "(" * 300,
)


@pytest.mark.parametrize("option", [option.name for option in fields(Config)])
def test_an_option_of_a_wrong_type_is_an_error_in_words(option):
    """Any value gives either a manifest that can be written and hashed, or a ValueError."""
    for value in WRONG:
        manifest, words = None, ""
        try:
            manifest = Manifest.of(changed("training", option, to=value), "federation.toml")
        except ValueError as error:
            words = str(error)
        assert manifest is not None or words.startswith("federation.toml: ")
        if manifest is not None:
            assert Manifest.of(tomllib.loads(manifest.to_toml()), "again").digest == manifest.digest


def test_training_must_be_plain():
    with pytest.raises(ValueError, match="training must hold plain values, components as text"):
        new_manifest(
            MEMBERS, 1, {"aggregator": Config(aggregator="RFA").resolved().aggregator}, Times(), rehearsal=False
        )


@pytest.mark.parametrize("content", [b"\xff", b"version = ", b"version = 1\nversion = 1", b"a = " + b"[" * 100_000])
def test_a_manifest_that_cannot_be_read(tmp_path, content):
    path = tmp_path / "federation.toml"
    with pytest.raises(ValueError, match=r"manifest .*federation\.toml cannot be read"):
        Manifest.load(path)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"manifest .*federation\.toml cannot be read"):
        Manifest.load(path)


def test_members_have_positions():
    assert [MANIFEST.index(member.name) for member in MEMBERS] == list(range(5))
    with pytest.raises(ValueError, match=r"'zoe' is not a member .* whose members are ada, bob, cy, di, eve"):
        MANIFEST.index("zoe")
    assert MANIFEST.course(2, num_iterations=10, rounds=3) == Course(
        num_members=5, num_byzantine=1, own=2, rounds=3, num_iterations=10
    )


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (replace(MANIFEST, num_byzantine=0), "num_byzantine: here 1, there 0"),
        (replace(MANIFEST, rehearsal=True), "rehearsal: here false, there true"),
        (replace(MANIFEST, times=Times(grace=2)), "times.grace: here 0.1, there 2.0"),
        (
            replace(MANIFEST, members=(*MEMBERS[:4], replace(MEMBERS[4], address="eve.example:7001"))),
            'member.eve.address: here "eve.example:7000", there "eve.example:7001"',
        ),
        (replace(MANIFEST, members=(MEMBERS[1], MEMBERS[0], *MEMBERS[2:])), "members: in another order"),
        (replace(MANIFEST, training=TRAINING | {"discount": 0.9}), "training.discount: here 0.99, there 0.9"),
        (replace(MANIFEST, training=TRAINING | {"hidden": [8]}), "training.hidden: here [8, 4], there [8]"),
        (replace(MANIFEST, training=TRAINING | {"seed": 4}), 'training."seed": here nothing, there 4'),
        (
            replace(MANIFEST, training={name: value for name, value in TRAINING.items() if name != "discount"}),
            "training.discount: here 0.99, there nothing",
        ),
    ],
)
def test_a_difference_in_words(theirs, words):
    assert MANIFEST.difference(theirs.canonical) == words


def test_a_missing_member_in_words():
    fewer = replace(MANIFEST, num_byzantine=0, members=tuple(MEMBERS[:4]))
    words = replace(MANIFEST, num_byzantine=0).difference(fewer.canonical)
    assert words.startswith('member.eve: here {"address": "eve.example:7000"')
    assert words.endswith("there nothing; members: here 5, there 4")
    assert 'member."eve": here nothing, there {' in fewer.difference(replace(MANIFEST, num_byzantine=0).canonical)


def test_many_differences_are_counted():
    other = new_manifest(
        [generate(f"m{index}", f"m{index}:1")[0] for index in range(5)], 1, {}, Times(), rehearsal=True
    )
    words = MANIFEST.difference(other.canonical)
    assert words.count(";") == 8
    assert words.endswith(" more")


def theirs(*path: Any, to: Any) -> bytes:
    values = json.loads(MANIFEST.canonical)
    inner = values
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = to
    return json.dumps(values).encode()


@pytest.mark.parametrize(
    ("garbage", "words"),
    [
        (b"", "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"{", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"a":' * 100_000, "cannot be read"),
        (b"9" * 10_000, "cannot be read"),
        (b"null", "not a manifest"),
        (b"[]", "not a manifest"),
        (b'"text"', "not a manifest"),
        (b"NaN", "not a manifest"),
        (b"{}", "and 1 more|federation: here"),
        (theirs("members", to=None), "members: here"),
        (theirs("members", to={}), "members: here"),
        (theirs("members", to=[]), "members: here 5, there 0"),
        (theirs("members", to=[None, 1, "x", [], {}]), "member.ada"),
        (theirs("members", 0, "name", to=[]), "member.ada"),
        (theirs("members", 0, "name", to={"a": 1}), "member.ada"),
        (theirs("members", 0, "name", to=7), "member.ada"),
        (theirs("members", 0, "name", to="bob"), "member.ada"),
        (theirs("training", to=[1]), "training: here"),
        (theirs("num_faulty", to=1.0), "num_byzantine: here 1, there 1.0"),
        (theirs("rehearsal", to=0), "rehearsal: here false, there 0"),
        (theirs("num_faulty", to="\ud800\x1b[2J\n"), "num_byzantine: here 1, there "),
        (theirs("\ud800\x1b[2J\n" * 1000, to=1), "here nothing, there 1"),
        (theirs("training", "\u202e" * 5000, to=1), "here nothing, there 1"),
        (theirs("extra", to=None), "the same content in another format"),
        (MANIFEST.canonical + b" ", "the same content in another format"),
    ],
    ids=range(27),
)
def test_a_difference_from_anything_is_a_few_harmless_words(garbage, words):
    """The words go to logs, to the screen and, in a gRPC status, to the other member."""
    found = MANIFEST.difference(garbage)
    assert re.search(words, found)
    assert len(found.encode()) < 2000
    assert found.isprintable()


# Store


def open_store(path: Path, manifest: Manifest = MANIFEST, member: Member = ADA) -> Store:
    return Store(path, manifest, member)


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "ada")
    yield store
    store.close()


def test_only_one_process_uses_a_directory(store):
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from byzpg.live.manifest import Manifest\nfrom byzpg.live.store import Store\n"
        "manifest = Manifest.load(Path(sys.argv[1]))\n"
        "try:\n    Store(Path(sys.argv[2]), manifest, manifest.members[0])\n"
        "except ValueError as error:\n    sys.exit(str(error))\n"
    )
    manifest = store.path.parent / "federation.toml"
    MANIFEST.write(manifest)
    command = [sys.executable, "-W", "error", "-c", script, str(manifest), str(store.path)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr.strip() == f"{store.path} is in use: member ada is already running."
    with pytest.raises(ValueError, match="is in use: member ada is already running"):
        open_store(store.path)
    store.close()
    open_store(store.path).close()


def test_a_directory_of_another_member_or_manifest_is_refused(store):
    store.close()
    open_store(store.path).close()
    for manifest, member in (
        (MANIFEST, BOB),
        (replace(MANIFEST, run=str(uuid4())), ADA),
        (replace(MANIFEST, times=Times(grace=3)), ADA),
    ):
        before = (store.path / "owner.json").read_bytes()
        with pytest.raises(ValueError, match=rf"belongs to member ada of run {MANIFEST.run}, or to another manifest"):
            open_store(store.path, manifest, member)
        assert (store.path / "owner.json").read_bytes() == before


@pytest.mark.parametrize("content", ["", "[]", "{}", "null", '{"member": "ada"', '"member run"'])
def test_a_broken_owner_is_refused(tmp_path, content):
    write(tmp_path / "owner.json", content)
    with pytest.raises(ValueError, match=r"owner\.json is broken: choose another directory"):
        open_store(tmp_path)


def test_a_foreign_directory_is_refused(tmp_path):
    write(tmp_path / "thesis.tex", "precious")
    with pytest.raises(ValueError, match="is neither empty nor the directory of a member"):
        open_store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_directory_can_be_used_after_a_crash_in_the_first_moment(tmp_path):
    for left in ("lock", ".owner.json.x1y2"):
        write(tmp_path / left, "")
    open_store(tmp_path).close()
    assert json.loads((tmp_path / "owner.json").read_text())["member"] == "ada"


def test_the_random_key_is_secret_and_stays(store):
    before = os.umask(0)
    try:
        key = store.random_key()
    finally:
        os.umask(before)
    assert (key.shape, key.dtype) == ((2,), np.dtype("<u4"))
    assert (store.path / "random.key").stat().st_mode & 0o777 == 0o600
    assert not (store.path / "random.new").exists()
    np.testing.assert_array_equal(store.random_key(), key)
    store.close()
    again = open_store(store.path)
    np.testing.assert_array_equal(again.random_key(), key)
    again.close()
    other = open_store(store.path.parent / "other")
    assert other.random_key().tolist() != key.tolist()
    other.close()


@pytest.mark.parametrize("content", ["", "0011", "no", "zz" * 8])
def test_a_broken_random_key_is_refused(store, content):
    write(store.path / "random.key", content)
    with pytest.raises(ValueError, match=r"random\.key is broken"):
        store.random_key()


def test_the_last_records_come_back(store):
    """Messages and checkpoints: as many as there are slots, also after a restart."""
    records = store.records("outbox.bin", 4, 100)
    assert records.read() == {}
    contents = {number: os.urandom(1 + 9 * number) for number in range(12)}
    for number, content in contents.items():
        records.put(number, content)
        assert records.read() == {each: contents[each] for each in range(max(0, number - 3), number + 1)}
    records.put(11, b"again")
    store.close()
    reopened = open_store(store.path)
    assert reopened.records("outbox.bin", 4, 100).read() == {each: contents[each] for each in (8, 9, 10)} | {
        11: b"again"
    }
    assert reopened.records("checkpoints.bin", 2, 100).read() == {}
    reopened.close()


def test_a_record_that_was_cut_off_is_ignored(store):
    """The record and the one that it was to replace are lost; the others are kept."""
    path = store.path / "outbox.bin"
    records = store.records("outbox.bin", 2, 40)
    old, other, new = b"o" * 40, b"x" * 30, b"n" * 35
    records.put(0, old)
    records.put(1, other)
    before = path.read_bytes()
    records.put(2, new)
    after = path.read_bytes()
    written = next(end for end in range(len(after)) if before[end:] == after[end:])
    for end in range(1, written):
        if after[:end] == before[:end]:
            continue
        path.write_bytes(after[:end] + before[end:])
        found = records.read()
        assert found.pop(1) == other
        assert not found
    path.write_bytes(after)
    assert records.read() == {1: other, 2: new}


def test_only_the_line_that_was_cut_off_is_dropped(store):
    path = store.path / "progress.jsonl"
    assert store.read_progress() == []
    records = [{"iteration": iteration, "episode_return": 0.5 * iteration} for iteration in range(4)]
    for record in records[:2]:
        store.append_progress(record)
    whole = path.read_bytes()
    store.append_progress(records[2])
    written = path.read_bytes()
    store.close()
    for end in range(len(whole), len(written) + 1):
        path.write_bytes(written[:end])
        again = open_store(store.path)
        expected = records[:3] if b"}" in written[len(whole) : end] else records[:2]
        assert again.read_progress() == expected
        again.append_progress(records[3])  # the next line is not lost with it
        assert again.read_progress() == [*expected, records[3]]
        again.close()


def test_the_last_record_counts_if_an_iteration_was_done_twice(store):
    for iteration, value in ((0, 1), (1, 2), (1, 3), (0, 4)):
        store.append_progress({"iteration": iteration, "value": value})
    with (store.path / "progress.jsonl").open("a") as file:
        file.write('[]\n5\nnull\n{}\n{"iteration": []}\n\n')
    assert [record["value"] for record in store.read_progress()] == [4, 3]


def test_kept_evidence_proves_what_it_says(store):
    codec = Codec(
        course=MANIFEST.course(1, num_iterations=3, rounds=2),
        manifest=MANIFEST.digest,
        run=UUID(MANIFEST.run).bytes,
        dimension=4,
        state_dimension=6,
        keys=[member.verifier() for member in MEMBERS],
    )
    vectors = np.ones(4, np.float32), np.zeros(4, np.float32)
    first, second = (codec.encode("vector", 2, vector, (), BOBS.signing).receipt for vector in vectors)
    heads = codec.head(first), codec.head(second)
    path = store.keep_evidence(MANIFEST, Evidence(first, second), heads)
    found = json.loads(path.read_text())
    assert prove(MANIFEST, found).words == "bob signed two different messages for iteration 0, agreement round 1"
    forged = deepcopy(found)
    forged["messages"][0]["signature"] = found["messages"][1]["signature"]
    with pytest.raises(ValueError, match="forged"):
        prove(MANIFEST, forged)
    # The same two messages in the other order go to the same file.
    assert store.keep_evidence(MANIFEST, Evidence(second, first), heads[::-1]) == path
