"""Members that misbehave on purpose, in federations whose manifest allows it: attackers, and breakers of the wire."""

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

Wire = Literal["garbage", "oversized", "slow"]
WIRE: tuple[Wire, ...] = get_args(Wire)
OVERSIZED_BYTES = 2**26
# What lies without knowing what others will send: a member learns that only afterwards.
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


def parse_attack(text: str) -> Attack | Wire:
    """An attack that one member can do by itself."""
    text = "Silent" if plain_name(text) == "silence" else text
    for wire in WIRE:
        if plain_name(text) == wire:
            return wire
    name = text.partition("(")[0]
    known = {plain_name(each): each for each in ALONE}
    names = [*ALONE, *WIRE]
    if plain_name(name) not in known:
        if plain_name(name) in map(plain_name, members("attack")):
            raise ValueError(
                f"attack {name} needs to know what everybody else sends, which a member of a live federation does "
                f"not; use one of {', '.join(names)}."
            )
        raise ValueError(unknown("attack for a live member", name, names))
    attack = parse("attack", text)
    assert isinstance(attack, Attack)
    return attack


@dataclass
class Mischief:
    """Turns the honest messages of a member into what it sends."""

    attack: Attack | Wire
    learner: Peer
    course: Course
    seal: Callable[[int, np.ndarray, tuple], Message]
    _step: int = -1
    _lies: list[Message | None] | None = None

    def frame(self, to: int, message: Message) -> bytes | None:
        """What goes to a member in place of a message; None: nothing."""
        if message.kind != "vector" or not len(message.vector):
            return message.frame
        if self.attack == "garbage":
            return secrets.token_bytes(len(message.frame))
        if self.attack == "oversized":
            return bytes(OVERSIZED_BYTES)
        if not isinstance(self.attack, MessageAttack):
            return message.frame
        if self._step != message.step:
            self._step, self._lies = message.step, self._lie(self.attack, message)
        assert self._lies is not None
        lie = self._lies[to]
        return None if lie is None else lie.frame

    def _lie(self, attack: MessageAttack, message: Message) -> list[Message | None]:
        iteration, phase = self.course.iteration(message.step), self.course.phase(message.step)
        vectors = self.learner.false_messages(attack, iteration, phase, message.vector)
        return [
            None if isinstance(attack, Silent) else self.seal(message.step, vector, message.receipts)
            for vector in vectors
        ]
