"""Messages as bytes: a fixed head, a signature over it, receipts, and raw little-endian float32.

    head       magic, version, kind, sender, iteration, phase, dimension, manifest hash, run id, content digest
    signature  Ed25519 over TAG and the head, and so over everything: the head's digest is SHA-256 of all that follows
    receipts   of the round before: sender, digest and signature of each; an echo has that of the receiver's own message
    vector     dimension × float32

A signature needs only the head, so two heads prove equivocation without the vectors. Decoding raises nothing but
`Rejected`, and refuses everything that is larger than a message of this manifest can be.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple, get_args
from uuid import UUID

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ed25519

from byzpg.live.identity import Member
from byzpg.live.manifest import Manifest
from byzpg.live.protocol import Course, Kind, Message, Receipt
from byzpg.robust.geometry import is_sound_on_host

MAGIC, VERSION, TAG = b"BZPG", 1, b"byzpg message 1\n"
HEAD = struct.Struct("<4sBBHIHHI32s16s32s")
RECEIPT = struct.Struct("<H32s64s")
SIGNATURE_BYTES = 64
FIXED_BYTES = HEAD.size + SIGNATURE_BYTES
KINDS: tuple[Kind, ...] = get_args(Kind)
# Of these, a member signs one for each step.
SIGNED_ONCE: tuple[Kind, ...] = ("vector", "state")
BARRIER = 0xFFFF  # the phase of a barrier


class Rejected(ValueError):
    """The bytes are not a message from this sender in this run. The reason is one word, for counting."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Encodes and decodes the messages of one run."""

    course: Course
    manifest: bytes  # its digest, 32 bytes
    run: bytes  # its id, 16 bytes
    dimension: int  # d
    state_dimension: int
    keys: Sequence[ed25519.Ed25519PublicKey]  # of all members

    @cached_property
    def largest(self) -> int:
        """The size in bytes of the largest possible message."""
        return FIXED_BYTES + self.course.num_members * RECEIPT.size + 4 * max(self.dimension, self.state_dimension)

    def encode(
        self,
        kind: Kind,
        step: int,
        vector: np.ndarray,
        receipts: Sequence[Receipt],
        signing: ed25519.Ed25519PrivateKey,
    ) -> Message:
        """Sign a message of this member.

        Args:
            kind: What the message is: a vector, a state, an ask or an echo.
            step: The step to which it belongs; for a state, the first one of its iteration.
            vector: What it carries; empty for an ask, for an echo, and at a barrier.
            receipts: Receipts of the messages that arrived in the round before, or the one that is echoed.
            signing: The private key of this member.
        """
        packed = b"".join(RECEIPT.pack(each.sender, each.digest, each.signature) for each in receipts)
        raw = np.ascontiguousarray(vector, "<f4").data.cast("B") if len(vector) else b""
        hashed = sha256(packed)
        hashed.update(raw)
        digest = hashed.digest()
        head = self._head(kind, self.course.own, step, len(vector), digest)
        signature = signing.sign(TAG + head)
        frame = b"".join((head, signature, packed, raw))
        return Message(
            kind=kind,
            sender=self.course.own,
            step=step,
            vector=vector,
            receipts=tuple(receipts),
            digest=digest,
            signature=signature,
            frame=frame,
        )

    def decode(self, frame: bytes, sender: int) -> Message:
        """Read a message that came over the connection of member `sender`.

        Raises:
            Rejected: If the frame is not a message from this member in this run.
        """
        if len(frame) < FIXED_BYTES or len(frame) > self.largest:
            raise Rejected("size")
        fields = HEAD.unpack_from(frame)
        magic, version, kind_number, claimed, iteration, phase, reserved, dimension, manifest, run, digest = fields
        if magic != MAGIC or reserved or kind_number >= len(KINDS):
            raise Rejected("malformed")
        for wrong, reason in (
            (version != VERSION, "version"),
            (manifest != self.manifest, "manifest"),
            (run != self.run, "run"),
            (claimed != sender or not 0 <= sender < len(self.keys), "sender"),
        ):
            if wrong:
                raise Rejected(reason)
        kind = KINDS[kind_number]
        step = self._step(kind, iteration, phase)
        if dimension != self._dimension(kind, step):
            raise Rejected("dimension")
        receipts_end = len(frame) - 4 * dimension
        num_receipts, rest = divmod(receipts_end - FIXED_BYTES, RECEIPT.size)
        most_receipts = {"vector": self.course.num_members - 1, "echo": 1}.get(kind, 0)
        if rest or not 0 <= num_receipts <= most_receipts:
            raise Rejected("size")
        view = memoryview(frame)
        if sha256(view[FIXED_BYTES:]).digest() != digest:
            raise Rejected("digest")
        signature = bytes(view[HEAD.size : FIXED_BYTES])
        if not self._verified(sender, bytes(view[: HEAD.size]), signature):
            raise Rejected("signature")
        receipts = tuple(
            Receipt(signer, step if kind == "echo" else step - 1, content, signed)
            for signer, content, signed in RECEIPT.iter_unpack(view[FIXED_BYTES:receipts_end])
        )
        if any(receipt.sender >= self.course.num_members for receipt in receipts):
            raise Rejected("malformed")
        vector = np.frombuffer(frame, "<f4", dimension, receipts_end)
        if not is_sound_on_host(vector):
            raise Rejected("non-finite")
        return Message(
            kind=kind,
            sender=sender,
            step=step,
            vector=vector,
            receipts=receipts,
            digest=digest,
            signature=signature,
            frame=frame,
        )

    def decode_claimed(self, frame: bytes) -> Message:
        """Read a message from a file; its sender is the one that it names, and that signed it."""
        if len(frame) < FIXED_BYTES:
            raise Rejected("size")
        return self.decode(frame, HEAD.unpack_from(frame)[3])

    def verify(self, receipt: Receipt) -> bool:
        """Whether the member that a receipt names has signed it for a vector of this run."""
        if not 0 <= receipt.step <= self.course.last or not 0 <= receipt.sender < len(self.keys):
            return False
        return self._verified(receipt.sender, self.head(receipt), receipt.signature)

    def head(self, receipt: Receipt, kind: Kind = "vector") -> bytes:
        """The head of the message that a receipt belongs to."""
        return self._head(kind, receipt.sender, receipt.step, self._dimension(kind, receipt.step), receipt.digest)

    def _verified(self, sender: int, head: bytes, signature: bytes) -> bool:
        try:
            self.keys[sender].verify(signature, TAG + head)
        except InvalidSignature:
            return False
        return True

    def _head(self, kind: Kind, sender: int, step: int, dimension: int, digest: bytes) -> bytes:
        course = self.course
        phase = BARRIER if course.is_barrier(step) else course.phase(step)
        return HEAD.pack(
            MAGIC,
            VERSION,
            KINDS.index(kind),
            sender,
            course.iteration(step),
            phase,
            0,
            dimension,
            self.manifest,
            self.run,
            digest,
        )

    def _step(self, kind: Kind, iteration: int, phase: int) -> int:
        course = self.course
        if phase == BARRIER and iteration == course.num_iterations:
            return course.last
        if phase == BARRIER and iteration == 0 and kind != "state":
            return 0
        if iteration >= course.num_iterations or phase >= course.per_iteration or (kind == "state" and phase):
            raise Rejected("round")
        return course.first_step(iteration) + phase

    def _dimension(self, kind: Kind, step: int) -> int:
        if kind == "state":
            return self.state_dimension
        return self.dimension if kind == "vector" and not self.course.is_barrier(step) else 0


class Proof(NamedTuple):
    """What evidence proves."""

    member: Member  # that equivocated
    words: str


def prove(manifest: Manifest, evidence: object) -> Proof:
    """Check the proof that a member equivocated.

    Args:
        manifest: The manifest of the run.
        evidence: The content of a file in `evidence/`.

    Returns:
        Which member equivocated, and where.

    Raises:
        ValueError: If the evidence does not prove it.
    """
    try:
        (first, one), (second, other) = (
            (bytes.fromhex(each["head"]), bytes.fromhex(each["signature"]))
            for each in evidence["messages"]  # pyright: ignore[reportIndexIssue]
        )
        fields, against = HEAD.unpack(first), HEAD.unpack(second)
    except (KeyError, TypeError, ValueError, struct.error):
        raise ValueError("this is no evidence: it must hold two messages, each with a head and a signature.") from None
    magic, version, kind, sender, iteration, phase, *_, digest, run, _ = fields
    if fields[:-1] != against[:-1] or fields[-1] == against[-1]:
        raise ValueError("the two messages are no equivocation: they must differ in their content and in nothing else.")
    if (magic, version) != (MAGIC, VERSION) or kind not in map(KINDS.index, SIGNED_ONCE):
        raise ValueError("the two messages are neither vectors nor states: a member may send several of other kinds.")
    if digest != manifest.digest or run != UUID(manifest.run).bytes or sender >= len(manifest.members):
        raise ValueError("the two messages do not belong to this manifest and run.")
    member = manifest.members[sender]
    for head, signature in ((first, one), (second, other)):
        try:
            member.verifier().verify(signature, TAG + head)
        except InvalidSignature:
            raise ValueError(f"{member.name} has not signed both messages: the evidence is forged.") from None
    if KINDS[kind] == "state":
        return Proof(member, f"{member.name} signed two different states for the beginning of iteration {iteration}")
    where = "a barrier" if phase == BARRIER else _round(phase, manifest.exchanges)
    return Proof(member, f"{member.name} signed two different messages for iteration {iteration}, {where}")


def _round(phase: int, exchanges: int) -> str:
    if phase >= exchanges:
        return f"agreement round {phase - exchanges + 1}"
    return "gradients" if exchanges == 1 else f"gradients of exchange {phase + 1}"
