"""Members that attack on purpose, in federations whose manifest allows it: with false, broken or late messages."""

import asyncio
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from byzpg._registry import addresses, members, parse
from byzpg.federation.members import Peer
from byzpg.live.protocol import Course, Message
from byzpg.robust.attacks import Attack, Knowledge, MessageAttack, Silent
from byzpg.robust.components import Component, plain_name, unknown

# Faults of the connection rather than of the vectors.
WireFault = Literal["garbage", "oversized", "slow"]
WIRE_FAULTS: tuple[WireFault, ...] = get_args(WireFault)
OVERSIZED_BYTES = 2**26
LATE = re.compile(
    r"late\((?P<seconds>[0-9]+\.?[0-9]*)(?:, *(?P<victims>[0-9]+)(?:, *(?P<rounds>[0-9]+))?)?\)", re.IGNORECASE
)
POLL_SECONDS = 0.001
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


@dataclass(frozen=True)
class Late(Component):
    """Hold messages back, so that the other members wait for them as long as possible.

    Attributes:
        seconds: How long.
        victims: How many members get a round's message late. They change from round to round, and the others get it
            when the attacker has all messages of the round, so that no two of them wait for one another at a time.
            0: all members, counted from when the message is ready.
        rounds: For how many rounds the messages are on time and then late, in turn. 0: they are always late.
    """

    seconds: float
    victims: int = 0
    rounds: int = 0


def parse_attack(text: str) -> Attack | WireFault | Late:
    """Read an attack that one member can carry out by itself; `Late` is written late(seconds, victims, rounds).

    Raises:
        ValueError: If there is no such attack, or if it needs to know the messages of others.
    """
    text = "Silent" if plain_name(text) == "silence" else text
    for fault in WIRE_FAULTS:
        if plain_name(text) == fault:
            return fault
    if late := LATE.fullmatch(text):
        return Late(float(late["seconds"]), int(late["victims"] or 0), int(late["rounds"] or 0))
    if addresses(text):
        return _own_attack(text)
    name = text.partition("(")[0]
    known = {plain_name(each): each for each in ALONE}
    names = [*ALONE, *WIRE_FAULTS, "late(SECONDS)"]
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


def _own_attack(text: str) -> Attack:
    """An attack from outside byzpg. It is tried with what a live member knows: its own vector, and NaN for others."""
    attack = parse("attack", text)
    assert isinstance(attack, Attack)
    vectors = jnp.full((4, 3), jnp.nan).at[3].set(1.0)
    knowledge = Knowledge(vectors, jnp.array([3]), jnp.asarray(0), jax.random.key(0))
    for phase in ("gradients", "parameters"):
        if bool(jnp.any(jnp.isnan(attack.messages(phase, knowledge, jnp.arange(3))))):
            raise ValueError(f"attack {attack} needs to know the messages of all members, and a live member does not.")
    return attack


@dataclass
class RehearsedAttack:
    """Replaces the honest messages of a member by those of an attack, or holds them back."""

    attack: Attack | WireFault | Late
    peer: Peer
    course: Course
    seal: Callable[[int, np.ndarray, tuple], Message]
    send: Callable[[int, Message], None]
    current_step: Callable[[], int]
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
        if isinstance(self.attack, Late):
            self._hold(to, message, self.attack)
            return None
        if not isinstance(self.attack, MessageAttack):
            return message.frame
        if self._step != message.step:
            self._step, self._false = message.step, self._false_messages(self.attack, message)
        assert self._false is not None
        false = self._false[to]
        return None if false is None else false.frame

    def _hold(self, to: int, message: Message, late: Late) -> None:
        loop, step = asyncio.get_running_loop(), message.step
        if late.victims and self.current_step() <= step:
            loop.call_later(POLL_SECONDS, self._hold, to, message, late)
            return
        is_victim = not late.victims or (self.course.others.index(to) + step) % len(self.course.others) < late.victims
        is_on_time = not is_victim or (late.rounds and step // late.rounds % 2 == 0)
        loop.call_later(0 if is_on_time else late.seconds, self.send, to, message)

    def _false_messages(self, attack: MessageAttack, message: Message) -> list[Message | None]:
        iteration, phase = self.course.iteration(message.step), self.course.phase(message.step)
        vectors = self.peer.false_messages(attack, iteration, phase, message.vector)
        return [
            None if isinstance(attack, Silent) else self.seal(message.step, vector, message.receipts)
            for vector in vectors
        ]
