"""Members that attack on purpose, in federations whose manifest allows it: with false messages or broken bytes."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from byzpg._registry import members, parse
from byzpg.federation.members import Peer
from byzpg.live.protocol import Course, Message
from byzpg.robust.attacks import Attack, MessageAttack, Silent
from byzpg.robust.components import plain_name, unknown

# Faults of the connection rather than of the vectors.
WireFault = Literal["garbage", "oversized", "slow"]
WIRE_FAULTS: tuple[WireFault, ...] = get_args(WireFault)
OVERSIZED_BYTES = 2**26
# Attacks that need not know what the other members will send, which a live member learns only afterwards.
ALONE = (
    "SignFlip",
    "LargeNoise",
    "Zero",
    "NonFinite",
    "Silent",
    "Equivocate",
    "RandomAction",
    "RewardFlip",
    "RandomReward",
)


def parse_attack(text: str) -> Attack | WireFault:
    """Read an attack that one member can carry out by itself.

    Raises:
        ValueError: If there is no such attack, or if it needs to know the messages of others.
    """
    text = "Silent" if plain_name(text) == "silence" else text
    for fault in WIRE_FAULTS:
        if plain_name(text) == fault:
            return fault
    name = text.partition("(")[0]
    known = {plain_name(each): each for each in ALONE}
    names = [*ALONE, *WIRE_FAULTS]
    if plain_name(name) not in known:
        if plain_name(name) in map(plain_name, members("attack")):
            raise ValueError(
                f"attack {name} needs to know the messages of all members, and a live member does not: use one of "
                f"{', '.join(names)}."
            )
        raise ValueError(unknown("attack for a live member", name, names))
    attack = parse("attack", text)
    assert isinstance(attack, Attack)
    return attack


@dataclass
class RehearsedAttack:
    """Replaces the honest messages of a member by those of an attack."""

    attack: Attack | WireFault
    peer: Peer
    course: Course
    seal: Callable[[int, np.ndarray, tuple], Message]
    _step: int = -1
    _false: list[Message | None] | None = None  # the messages of this step, by receiver

    def frame(self, to: int, message: Message) -> bytes | None:
        """The bytes to send to a member in place of a message; None to send nothing."""
        if message.kind != "vector" or not len(message.vector):
            return message.frame
        if self.attack == "garbage":
            return secrets.token_bytes(len(message.frame))
        if self.attack == "oversized":
            return bytes(OVERSIZED_BYTES)
        if not isinstance(self.attack, MessageAttack):
            return message.frame
        if self._step != message.step:
            self._step, self._false = message.step, self._false_messages(self.attack, message)
        assert self._false is not None
        false = self._false[to]
        return None if false is None else false.frame

    def _false_messages(self, attack: MessageAttack, message: Message) -> list[Message | None]:
        iteration, phase = self.course.iteration(message.step), self.course.phase(message.step)
        vectors = self.peer.false_messages(attack, iteration, phase, message.vector)
        return [
            None if isinstance(attack, Silent) else self.seal(message.step, vector, message.receipts)
            for vector in vectors
        ]
