"""Messages as bytes: only signed messages are accepted, every check refuses what violates it alone, and no other bytes
pass."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from byzpg.live import wire
from byzpg.live.identity import generate
from byzpg.live.manifest import Manifest, Times, new_manifest
from byzpg.live.protocol import NOTHING, Course, Kind, Message, Receipt
from byzpg.live.wire import BARRIER, FIXED_BYTES, HEAD, KINDS, MAGIC, RECEIPT, TAG, VERSION, Codec, Rejected

K, F, ROUNDS, ITERATIONS, D, STATE = 5, 1, 2, 3, 4, 6
SENDER, RECEIVER = 1, 0
# The same keys in every run of the tests, so that fuzzing is reproducible.
SIGNING = [Ed25519PrivateKey.from_private_bytes(bytes([index]) * 32) for index in range(K)]
MEMBERS = [
    replace(generate(name, f"{name}.example:7000")[0], public_key=key.public_key().public_bytes_raw().hex())
    for name, key in zip(("ada", "bob", "cy", "di", "eve"), SIGNING, strict=True)
]
MANIFEST = new_manifest(MEMBERS, F, {"env": "CartPole-v1"}, Times(), rehearsal=False)
COURSE = Course(num_members=K, num_byzantine=F, own=RECEIVER, rounds=ROUNDS, num_iterations=ITERATIONS)
LAST = COURSE.last
CODEC = Codec(
    course=COURSE,
    manifest=MANIFEST.digest,
    run=UUID(MANIFEST.run).bytes,
    dimension=D,
    state_dimension=STATE,
    keys=[member.verifier() for member in MANIFEST.members],
)
VECTOR = np.asarray([0.5, -2.0, 3e-40, 1e17], np.float32)
FINAL = np.arange(STATE, dtype=np.float32)


def seal(kind: Kind, step: int, vector: np.ndarray = VECTOR, receipts=(), sender=SENDER, codec=CODEC) -> Message:
    """A message of one member."""
    codec = replace(codec, course=replace(COURSE, own=sender))
    return codec.encode(kind, step, vector, receipts, SIGNING[sender])


def receipts_of(step: int, senders: Iterable[int], codec=CODEC) -> tuple[Receipt, ...]:
    """The receipts of a step's vectors."""
    vector = NOTHING if COURSE.is_barrier(step) else VECTOR
    return tuple(seal("vector", step, vector, sender=sender, codec=codec).receipt for sender in senders)


def every_kind(codec: Codec) -> dict[str, Message]:
    rows: dict[str, tuple[Kind, int, np.ndarray, tuple[int, ...]]] = {
        "gradients": ("vector", 1, VECTOR, ()),
        "start": ("vector", 0, NOTHING, ()),
        "gradients, receipts of the start": ("vector", 1, VECTOR, (0, 2)),
        "agreement": ("vector", 2, -VECTOR, (0, 2, 3)),
        "last agreement": ("vector", LAST - 1, VECTOR / 2, (0, 2, 3, 4)),
        "end": ("vector", LAST, NOTHING, (3,)),
        "ask": ("ask", 5, NOTHING, ()),
        "ask for the start": ("ask", 0, NOTHING, ()),
        "ask for the end": ("ask", LAST, NOTHING, ()),
        "first state": ("state", 1, FINAL, ()),
        "state": ("state", COURSE.first_step(2), -FINAL, ()),
        "state at the end": ("state", LAST, FINAL, ()),
    }
    return {
        name: seal(kind, step, vector, receipts_of(step - 1, senders, codec), codec=codec)
        for name, (kind, step, vector, senders) in rows.items()
    }


EVERY_KIND = every_kind(CODEC)


@pytest.mark.parametrize("message", EVERY_KIND.values(), ids=EVERY_KIND)
def test_decoding_inverts_encoding(message):
    decoded = CODEC.decode(message.frame, SENDER)
    np.testing.assert_array_equal(decoded.vector, message.vector)
    assert decoded.vector.dtype == np.float32
    assert decoded._replace(vector=NOTHING) == message._replace(vector=NOTHING)
    assert len(message.frame) <= CODEC.largest


def test_the_largest_message_is_accepted():
    state = replace(CODEC, state_dimension=1000)
    frame = (
        replace(state, course=replace(COURSE, own=SENDER)).encode("state", 1, np.ones(1000), (), SIGNING[SENDER]).frame
    )
    assert state.decode(frame, SENDER).vector.sum() == 1000


def test_a_vector_of_any_layout_travels_as_little_endian_float32():
    step, values = 1, np.arange(2 * D, dtype=">f8")[::2]
    np.testing.assert_array_equal(CODEC.decode(seal("vector", step, values).frame, SENDER).vector, values)


# Rejections


def build(
    content: bytes = VECTOR.tobytes(), digest: bytes | None = None, signature: bytes | None = None, **changes: Any
) -> bytes:
    """A signed frame of the sender, valid but for the given changes."""
    fields: dict[str, Any] = {
        "magic": MAGIC,
        "version": VERSION,
        "kind": 0,
        "sender": SENDER,
        "iteration": 0,
        "phase": 0,
        "reserved": 0,
        "dimension": D,
        "manifest": MANIFEST.digest,
        "run": UUID(MANIFEST.run).bytes,
    }
    assert changes.keys() <= fields.keys()
    digest = sha256(content).digest() if digest is None else digest
    head = HEAD.pack(*(fields | changes).values(), digest)
    return head + (SIGNING[SENDER].sign(TAG + head) if signature is None else signature) + content


def with_receipts(*senders: int) -> bytes:
    return b"".join(RECEIPT.pack(sender, bytes(32), bytes(64)) for sender in senders) + VECTOR.tobytes()


def number(value: float) -> bytes:
    return np.asarray([1, value, 1, 1], "<f4").tobytes()


ASK, STATES = KINDS.index("ask"), KINDS.index("state")
HEAD_OF_1 = build()[: HEAD.size]
# The order of Ed25519's group. Adding it to the second half of a signature is the classical malleability attack.
ORDER = 2**252 + 27742317777372353535851937790883648493
SIGNED = build()[HEAD.size : FIXED_BYTES]
SECOND = SIGNED[:32] + (int.from_bytes(SIGNED[32:], "little") + ORDER).to_bytes(32, "little")

REJECTED: dict[str, tuple[str, bytes]] = {
    "nothing": ("size", b""),
    "cut in the signature": ("size", build()[: FIXED_BYTES - 1]),
    "larger than any": ("size", build(content=with_receipts(*range(K)) + bytes(4 * STATE))),
    "a byte more": ("size", build(content=VECTOR.tobytes() + b"\0")),
    "a byte less": ("size", build(content=VECTOR.tobytes()[:-1])),
    "no content": ("size", build(content=b"")),
    "a receipt from every member": ("size", build(content=with_receipts(*range(K)))),
    "an ask with a receipt": ("size", build(content=with_receipts(0)[: RECEIPT.size], kind=ASK, dimension=0)),
    "a state with a receipt": (
        "size",
        build(content=with_receipts(0) + bytes(4 * (STATE - D)), kind=STATES, dimension=STATE),
    ),
    "magic": ("malformed", build(magic=b"BZPF")),
    "reserved": ("malformed", build(reserved=1)),
    "kind": ("malformed", build(kind=len(KINDS))),
    "a receipt of nobody": ("malformed", build(content=with_receipts(K))),
    "version": ("version", build(version=VERSION + 1)),
    "version 0": ("version", build(version=0)),
    "manifest": ("manifest", build(manifest=sha256(b"another").digest())),
    "run": ("run", build(run=uuid4().bytes)),
    "sender": ("sender", build(sender=SENDER + 1)),
    "nobody": ("sender", build(sender=0xFFFF)),
    "iteration": ("round", build(iteration=ITERATIONS)),
    "last iteration there can be": ("round", build(iteration=2**32 - 1)),
    "phase": ("round", build(phase=ROUNDS + 1)),
    "barrier in the midst": ("round", build(iteration=1, phase=BARRIER, dimension=0, content=b"")),
    "barrier past the end": ("round", build(iteration=ITERATIONS + 1, phase=BARRIER, dimension=0, content=b"")),
    "a state of a round": ("round", build(kind=STATES, phase=1, dimension=STATE, content=bytes(4 * STATE))),
    "a state of the start": ("round", build(kind=STATES, phase=BARRIER, dimension=STATE, content=bytes(4 * STATE))),
    "dimension": ("dimension", build(dimension=D + 1, content=bytes(4 * (D + 1)))),
    "dimension 0": ("dimension", build(dimension=0, content=b"")),
    "largest dimension": ("dimension", build(dimension=2**32 - 1)),
    "a barrier with a vector": ("dimension", build(phase=BARRIER)),
    "an ask with a vector": ("dimension", build(kind=ASK)),
    "a state as short as a vector": ("dimension", build(kind=STATES)),
    "digest": ("digest", build(digest=sha256(b"another").digest())),
    "content": ("digest", build()[:-1] + b"\x01"),
    "no signature": ("signature", build(signature=bytes(64))),
    "another member's signature": ("signature", build(signature=SIGNING[2].sign(TAG + HEAD_OF_1))),
    "signed for another purpose": ("signature", build(signature=SIGNING[SENDER].sign(HEAD_OF_1))),
    "a second signature": ("signature", build(signature=SECOND)),
    "nan": ("non-finite", build(content=number(np.nan))),
    "inf": ("non-finite", build(content=number(np.inf))),
    "minus inf": ("non-finite", build(content=number(-np.inf))),
    "too large for any rule": ("non-finite", build(content=number(6e17))),
}


def reason(frame: bytes, sender=SENDER, codec=CODEC) -> str:
    with pytest.raises(Rejected) as caught:
        codec.decode(frame, sender)
    assert str(caught.value) == caught.value.reason
    return caught.value.reason


def test_the_unchanged_frame_is_accepted():
    """Otherwise the changed frames could all be refused for the same reason."""
    assert CODEC.decode(build(), SENDER).frame == seal("vector", 1).frame
    for sound in (
        build(content=with_receipts(0, 2, 3, 4)),
        build(kind=ASK, dimension=0, content=b""),
        build(kind=STATES, dimension=STATE, content=bytes(4 * STATE)),
        build(phase=BARRIER, dimension=0, content=b""),
        build(iteration=ITERATIONS, phase=BARRIER, dimension=0, content=b""),
        build(iteration=ITERATIONS - 1, phase=ROUNDS),
        build(content=number(4e17)),
    ):
        CODEC.decode(sound, SENDER)


@pytest.mark.parametrize(("expected", "frame"), REJECTED.values(), ids=REJECTED)
def test_each_check_refuses_a_frame_that_violates_it_alone(expected, frame):
    assert reason(frame) == expected


def test_a_frame_above_the_largest_size_is_not_read():
    assert reason(build() + bytes(CODEC.largest)) == "size"
    assert reason(b"x" * (CODEC.largest + 1)) == "size"
    assert reason(b"x" * CODEC.largest) == "malformed"


def test_a_message_replayed_over_another_link_is_refused():
    """The connection decides who the sender is, so a valid message of another member is refused there."""
    theirs = seal("vector", 1, sender=2).frame
    assert CODEC.decode(theirs, 2).sender == 2
    assert reason(theirs, SENDER) == "sender"
    head = HEAD.pack(*(SENDER if place == 3 else field for place, field in enumerate(HEAD.unpack_from(theirs))))
    assert reason(head + theirs[HEAD.size :], SENDER) == "signature"
    for nobody in (-1, K, 0xFFFF):
        assert reason(build(sender=nobody % 2**16), nobody) == "sender"


def test_a_message_of_another_run_of_the_same_members_is_refused():
    again = replace(CODEC, run=uuid4().bytes)
    assert reason(build(), codec=again) == "run"
    assert reason(build(), codec=replace(CODEC, manifest=bytes(32))) == "manifest"


# Receipts


def test_receipts_travel_and_are_verified():
    receipts = receipts_of(1, (0, 2, 3, 4))
    decoded = CODEC.decode(seal("vector", 2, receipts=receipts).frame, SENDER)
    assert decoded.receipts == receipts
    assert all(CODEC.verify(receipt) for receipt in (*decoded.receipts, decoded.receipt))
    for name, message in EVERY_KIND.items():
        vector = message.kind == "vector"
        assert all(map(CODEC.verify, message.receipts)), name
        # A receipt belongs to a vector, so a signature of an ask or of a state is not valid.
        assert CODEC.verify(message.receipt) == vector, name
        assert (CODEC.head(message.receipt) == message.frame[: HEAD.size]) == vector, name


@pytest.mark.parametrize(
    "changes",
    [
        {"sender": 2},
        {"sender": K},
        {"sender": -1},
        {"step": 2},
        {"step": 0},
        {"step": -1},
        {"step": LAST + 1},
        {"digest": bytes(32)},
        {"signature": bytes(64)},
        {"signature": b""},
    ],
    ids=str,
)
def test_a_changed_receipt_is_not_verified(changes):
    receipt = seal("vector", 1).receipt
    assert CODEC.verify(receipt)
    assert not CODEC.verify(receipt._replace(**changes))


def test_a_step_before_the_first_is_not_taken_for_another():
    """Iteration and phase are signed; computed for step −1, they would equal those of step 2."""
    receipt = seal("vector", 2).receipt
    assert CODEC.head(receipt._replace(step=-1)) == CODEC.head(receipt)
    assert CODEC.verify(receipt)
    assert not CODEC.verify(receipt._replace(step=-1))


# Evidence


def part(message: Message, **changes: Any) -> dict[str, Any]:
    return {"head": message.frame[: HEAD.size].hex(), "signature": message.signature.hex()} | changes


def evidence(*messages: Message) -> dict[str, Any]:
    return {"messages": [part(message) for message in messages]}


ONE, OTHER = seal("vector", 1), seal("vector", 1, -VECTOR)
ANOTHER_MANIFEST = replace(MANIFEST, num_byzantine=0)
ANOTHER_RUN = replace(CODEC, run=uuid4().bytes, course=replace(COURSE, own=SENDER))


def elsewhere(codec: Codec) -> dict[str, Any]:
    """Equivocation in another run."""
    vectors = (VECTOR, -VECTOR)
    return evidence(*(codec.encode("vector", 1, vector, (), SIGNING[SENDER]) for vector in vectors))


@pytest.mark.parametrize(
    ("step", "where"),
    [
        (1, "iteration 0, gradients"),
        (3, "iteration 0, agreement round 2"),
        (4, "iteration 1, gradients"),
    ],
)
def test_two_messages_for_one_step_are_evidence(step, where):
    found = evidence(seal("vector", step), seal("vector", step, -VECTOR))
    proof = wire.prove(MANIFEST, json.loads(json.dumps(found)))
    assert proof == (MANIFEST.members[1], f"bob signed two different messages for {where}")


def test_two_states_for_one_iteration_are_evidence():
    found = evidence(seal("state", 4, FINAL), seal("state", 4, -FINAL))
    assert wire.prove(MANIFEST, found).words == "bob signed two different states for the beginning of iteration 1"


def test_two_messages_at_a_barrier_are_evidence_if_their_receipts_differ():
    one, other = (seal("vector", LAST, NOTHING, receipts_of(LAST - 1, senders)) for senders in ((2,), (3,)))
    assert wire.prove(MANIFEST, evidence(one, other)).words.endswith("iteration 3, a barrier")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (evidence(ONE, ONE), "are no equivocation"),
        (evidence(ONE, seal("vector", 2, -VECTOR)), "are no equivocation"),
        (evidence(ONE, seal("vector", 1, -VECTOR, sender=2)), "are no equivocation"),
        (evidence(seal("ask", 1, NOTHING), ONE), "are no equivocation"),
        ({"messages": [part(ONE), part(OTHER, signature=bytes(64).hex())]}, "has not signed both"),
        ({"messages": [part(ONE, signature=part(OTHER)["signature"]), part(OTHER)]}, "has not signed both"),
        ({"messages": [part(ONE), part(OTHER, signature="00")]}, "has not signed both"),
        ({"messages": [part(ONE), part(OTHER, signature="")]}, "has not signed both"),
        (elsewhere(ANOTHER_RUN), "do not belong to this manifest and run"),
        (
            elsewhere(replace(ANOTHER_RUN, run=CODEC.run, manifest=ANOTHER_MANIFEST.digest)),
            "do not belong to this manifest",
        ),
        ({"messages": [part(ONE)]}, "no evidence"),
        (evidence(ONE, OTHER, ONE), "no evidence"),
        ({"messages": [part(ONE), part(OTHER, head=part(OTHER)["head"][:-2])]}, "no evidence"),
        ({"messages": [part(ONE), part(OTHER, head="xy" * HEAD.size)]}, "no evidence"),
        ({"messages": [part(ONE), part(OTHER, head="é" * 2 * HEAD.size)]}, "no evidence"),
        ({"messages": [part(ONE), part(OTHER, head=None)]}, "no evidence"),
        ({"messages": [part(ONE), part(OTHER, signature=[1])]}, "no evidence"),
        ({"messages": [part(ONE), "text"]}, "no evidence"),
        ({"messages": [part(ONE), None]}, "no evidence"),
        ({"messages": {"a": part(ONE), "b": part(OTHER)}}, "no evidence"),
        ({"messages": "no"}, "no evidence"),
        ({"messages": None}, "no evidence"),
        ({"messages": 5}, "no evidence"),
        ({}, "no evidence"),
        ([], "no evidence"),
        (None, "no evidence"),
        ("text", "no evidence"),
        (1.5, "no evidence"),
    ],
)
def test_evidence_that_proves_nothing_is_refused(found, words):
    with pytest.raises(ValueError, match=words):
        wire.prove(MANIFEST, found)


def test_two_asks_for_one_step_are_no_equivocation():
    """A member may ask again, so two asks with different content would prove nothing."""
    heads = [build(kind=ASK, dimension=0, content=content) for content in (b"", b"more")]
    found = {"messages": [{"head": f[: HEAD.size].hex(), "signature": f[HEAD.size : FIXED_BYTES].hex()} for f in heads]}
    with pytest.raises(ValueError, match="are neither vectors nor states"):
        wire.prove(MANIFEST, found)


@pytest.mark.parametrize("manifest", [ANOTHER_MANIFEST, replace(MANIFEST, run=str(uuid4()))], ids=["manifest", "run"])
def test_evidence_is_valid_under_its_own_manifest_only(manifest: Manifest):
    with pytest.raises(ValueError, match="do not belong to this manifest and run"):
        wire.prove(manifest, evidence(ONE, OTHER))


# Fuzz

# The checks that mutants reach; a vector that is not finite would need a valid signature first.
REACHED = {expected for expected, _ in REJECTED.values()} - {"non-finite"}
FUZZED = replace(CODEC, manifest=sha256(b"a manifest").digest(), run=UUID(int=20).bytes)
TEMPLATES = [np.frombuffer(message.frame, np.uint8) for message in every_kind(FUZZED).values()]
ORIGINALS = frozenset(template.tobytes() for template in TEMPLATES)
# The place of each field in the head.
SIZES = (4, 1, 1, 2, 4, 2, 2, 4, 32, 16, 32)
FIELDS = [slice(sum(SIZES[:place]), sum(SIZES[: place + 1])) for place in range(len(SIZES))]
DIMENSION, DIGEST, SIGNATURE = FIELDS[7], FIELDS[10], slice(HEAD.size, FIXED_BYTES)


def rows(table: np.ndarray) -> list[bytes]:
    data, width = table.tobytes(), table.shape[1]
    return [data[start : start + width] for start in range(0, len(data), width)]


def copies(frame: np.ndarray, count: int) -> np.ndarray:
    return np.tile(frame, (count, 1))


def places(rng: np.random.Generator, frame: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Random places outside the signature, which is slow to check and has a mutation of its own."""
    found = rng.integers(len(frame) - 64, size=shape)
    return np.where(found < HEAD.size, found, found + 64)


def reseal(table: np.ndarray) -> np.ndarray:
    """Set matching digests, so that only the signature is wrong."""
    for row in table:
        row[DIGEST] = np.frombuffer(sha256(row[FIXED_BYTES:].tobytes()).digest(), np.uint8)
    return table


def flip_bits(rng, frame, other, count) -> list[bytes]:
    table, width = copies(frame, count), int(rng.integers(1, 5))
    for chosen in places(rng, frame, (count, width)).T:
        table[np.arange(count), chosen] ^= (1 << rng.integers(8, size=count)).astype(np.uint8)
    return rows(table)


def change_bytes(rng, frame, other, count) -> list[bytes]:
    table, width = copies(frame, count), int(rng.integers(1, 9))
    np.put_along_axis(table, places(rng, frame, (count, width)), rng.integers(256, size=(count, width)), 1)
    return rows(table)


def truncate(rng, frame, other, count) -> list[bytes]:
    data = frame.tobytes()
    return [data[:end] if end % 3 else data[len(data) - end :] for end in rng.integers(len(data), size=count).tolist()]


def extend(rng, frame, other, count) -> list[bytes]:
    data, noise = frame.tobytes(), rng.bytes(1024)
    return [data + noise[a : a + 1 + b] for a, b in rng.integers(500, size=(count, 2)).tolist()]


def splice(rng, frame, other, count) -> list[bytes]:
    """The beginning of one frame and the end of another, cut anywhere, at the same place, or between parts."""
    first, second = frame.tobytes(), other.tobytes()
    cuts = rng.integers(len(first), size=(count, 2))
    cuts[::3, 1] = cuts[::3, 0]
    cuts[1::3] = rng.choice([HEAD.size, FIXED_BYTES, FIXED_BYTES + RECEIPT.size], size=(len(cuts[1::3]), 1))
    return [first[:a] + second[b:] for a, b in cuts.tolist()]


def change_head(rng, frame, other, count) -> list[bytes]:
    """Change one field: to noise, to zeros, to ones, by one, or to the field of another frame."""
    table = copies(frame, count)
    for row, place, way in zip(table, rng.integers(len(FIELDS), size=count), rng.integers(8, size=count), strict=True):
        field = FIELDS[place]
        if way < 4:
            row[field] = (0, 255, row[field] + np.uint8(1), other[field])[way]
        else:
            row[field] = rng.integers(256, size=SIZES[place])
    return rows(table)


def noise(rng, frame, other, count) -> list[bytes]:
    """Only noise, half of it after a valid beginning."""
    data, start = rng.bytes(4096), frame.tobytes()
    cuts = rng.integers((HEAD.size, 3400, 500), size=(count, 3)).tolist()
    return [start[: kept * (index % 2)] + data[a : a + b] for index, (kept, a, b) in enumerate(cuts)]


def change_content(rng, frame, other, count) -> list[bytes]:
    """Change the content and its digest: only the signature is wrong."""
    if len(frame) == FIXED_BYTES:
        return []
    table = copies(frame, count)
    chosen = rng.integers(FIXED_BYTES, len(frame), size=count)
    table[np.arange(count), chosen] ^= rng.integers(1, 256, size=count).astype(np.uint8)
    return rows(reseal(table))


def change_signature(rng, frame, other, count) -> list[bytes]:
    """Change one bit, or take noise, swapped halves, or another frame's signature."""
    table = copies(frame, count)
    chosen = rng.integers(HEAD.size, FIXED_BYTES, size=count)
    table[np.arange(count), chosen] ^= (1 << rng.integers(8, size=count)).astype(np.uint8)
    table[1, SIGNATURE] = rng.integers(256, size=64)
    table[2, SIGNATURE] = np.roll(frame[SIGNATURE], 32)
    table[3, SIGNATURE] = other[SIGNATURE]
    return rows(table)


def change_lengths(rng, frame, other, count) -> list[bytes]:
    """Add or remove numbers and receipts, with or without a matching dimension and digest."""
    found: list[bytes] = []
    for numbers, receipts, fitted in rng.integers((-4, -2, 0), (5, 3, 8), size=(count, 3)).tolist():
        change = 4 * numbers + RECEIPT.size * receipts
        content = np.resize(frame[FIXED_BYTES:], max(0, len(frame) - FIXED_BYTES + change))
        row = np.concatenate([frame[:FIXED_BYTES], content])
        if fitted % 2:
            row[DIMENSION] = np.frombuffer(((numbers + D) % 2**32).to_bytes(4, "little"), np.uint8)
        found.append((reseal(row[None])[0] if fitted > 3 else row).tobytes())
    return found


# How many of each in 5,000 mutants; those that reach the signature are slow, and few.
MUTATIONS = {
    flip_bits: 1340,
    change_bytes: 1000,
    truncate: 500,
    extend: 500,
    splice: 700,
    change_head: 350,
    noise: 400,
    change_content: 50,
    change_signature: 60,
    change_lengths: 100,
}


def mutants(seed: int) -> Iterator[bytes]:
    """Endless mutants; none of them is a valid frame."""
    rng, turn = np.random.default_rng(seed), 0
    while True:
        for place, (mutate, count) in enumerate(MUTATIONS.items()):
            frame = TEMPLATES[(turn + place * (turn > 0)) % len(TEMPLATES)]
            other = TEMPLATES[rng.integers(len(TEMPLATES))]
            yield from (mutant for mutant in mutate(rng, frame, other, count) if mutant not in ORIGINALS)
        turn += 1


def accepted(count: int, reasons: Counter[str]) -> list[bytes]:
    """The mutants among the first `count` that the codec accepts."""
    found: list[bytes] = []
    decode, source = FUZZED.decode, mutants(seed=20)
    for _ in range(count):
        mutant = next(source)
        try:
            decode(mutant, SENDER)
        except Rejected as rejected:
            reasons[rejected.reason] += 1
        else:
            found.append(mutant)
    return found


# The tests below find holes that accept one mutant in 5,000. Such a hole would escape 100,000 mutants with probability
# (1 − 1/5,000)^100,000 = 2e-9.
@pytest.mark.parametrize("number", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_no_mutant_is_accepted(number: int):
    for template in TEMPLATES:
        FUZZED.decode(template.tobytes(), SENDER)
    reasons: Counter[str] = Counter()
    assert accepted(number, reasons) == []
    # All checks were reached, and the last one often.
    assert reasons.keys() == REACHED
    assert reasons["signature"] > number / 100
    assert reasons.total() == number


class Anything:
    """Equals everything."""

    def __ne__(self, other: object) -> bool:
        return False


def no_signature_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Codec, "_verified", lambda *_: True)


def no_digest_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "sha256", lambda _: SimpleNamespace(digest=Anything))


@pytest.mark.parametrize("break_codec", [no_signature_check, no_digest_check])
def test_a_codec_without_one_check_accepts_a_mutant(break_codec, monkeypatch):
    """The negative control: the mutants would find a hole."""
    break_codec(monkeypatch)
    assert accepted(5000, Counter())
