"""A federation in memory: a network, disks, crashes and attackers, all of them drawn from one seed.

Every member but the attackers does what `live.peer.LivePeer` does, without its input and output: it carries out the
protocol's actions in order, computes one thing after the other, and continues from its disk after a crash. A crash can
come before any action. `World.run` raises `Violation` if the protocol breaks a promise, and
`python tests/live_world.py SEED` prints the trace.
"""

import struct
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import combinations
from math import log
from random import Random
from typing import Any, NamedTuple, NoReturn

import numpy as np

from byzpg.live.amendment import is_due
from byzpg.live.protocol import (
    NOTHING,
    Action,
    Adopt,
    Begin,
    Combine,
    Count,
    Course,
    Evidence,
    Finished,
    Kind,
    Log,
    Message,
    Protocol,
    Receipt,
    Send,
    SendState,
    SetTimer,
)
from byzpg.live.store import forgotten_through
from byzpg.robust.agreement import MDA

# In units of a message's usual delay. The long linger outlasts every fault and the recovery from it.
GRACE, START_GRACE, LINGER, LONG_LINGER, RETRY, ECHOES, FLUSH = 4.0, 10.0, 100.0, 250.0, 5.0, 5.0, 1.0
LAST_FAULT, LONGEST_FAULT, PATIENCE = 25.0, 60.0, 1500.0
MOST_EVENTS = 60_000
DISK_FAULTS = ("power cut", "reboot", "rot", "restored", "lost")
COUNTED = ("accused", "adopted", "crashes", "partitions", "agreed", "stuck", "late", "changed", *DISK_FAULTS)
ROUNDING = 1e-9
STEP_SIZE = 0.5


class Violation(AssertionError):
    """The protocol broke a promise."""


class Crash(Exception):
    """A member stops at this point."""


# Vectors are points of the plane, as complex numbers; in one dimension the imaginary part is 0.


def to_vector(point: complex) -> np.ndarray:
    return np.array((point.real, point.imag))


def to_point(vector: np.ndarray) -> complex:
    return complex(*vector.tolist())


def diameter(points: list[complex]) -> float:
    return max((abs(one - other) for one, other in combinations(points, 2)), default=0.0)


def trimmed_mean(points: list[complex], trim: int) -> complex:
    def of(values: list[float]) -> float:
        kept = sorted(values)[trim : len(values) - trim]
        return sum(kept) / len(kept)

    return complex(of([point.real for point in points]), of([point.imag for point in points]))


def median(points: list[complex]) -> complex:
    return trimmed_mean(points, (len(points) - 1) // 2)


@lru_cache
def subsets(count: int, size: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every subset, and the places of its pairs in the list of all pairs."""
    places = {pair: place for place, pair in enumerate(combinations(range(count), 2))}
    return [
        (chosen, tuple(places[pair] for pair in combinations(chosen, 2))) for chosen in combinations(range(count), size)
    ]


def least_diameter_mean(points: list[complex], size: int) -> complex:
    """Exact MDA, by listing every subset."""
    if len(points) > size:
        distances = [abs(one - other) for one, other in combinations(points, 2)]
        chosen = min(subsets(len(points), size), key=lambda each: max([distances[place] for place in each[1]]))[0]
        points = [points[place] for place in chosen]
    return sum(points) / len(points)


# A signature is a token that only the owner of a secret can make.


def digest_of(vector: np.ndarray, receipts: tuple[Receipt, ...]) -> bytes:
    content = b"".join([bytes((each.sender,)) + each.digest + each.signature for each in receipts]) + vector.tobytes()
    return blake2b(content, digest_size=8).digest()


class Secret(NamedTuple):
    owner: int
    token: bytes

    def sign(self, kind: Kind, step: int, digest: bytes) -> bytes:
        return self.token + struct.pack("<i", step) + kind[:1].encode() + digest

    def seal(self, kind: Kind, step: int, vector: np.ndarray, receipts: tuple[Receipt, ...]) -> Message:
        digest = digest_of(vector, receipts)
        return Message(kind, self.owner, step, vector, receipts, digest, self.sign(kind, step, digest))


Checkpoint = tuple[int, complex]


class Disk:
    """The files of a member, and what can happen to them."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.outbox: dict[int, Message | None] = {}  # by slot, which is overwritten in turn; None if it is damaged
        self.checkpoints: list[Checkpoint | None] = []  # the last two
        self.mark, self.settled = -1, False
        self.masked: set[int] = set()
        self.same_boot, self.forgetful = True, False
        self.amended = False  # whether there is an amendment
        self.epoch = 0  # 1 with the new manifest
        self.flushed: tuple[dict[int, Message | None], list[Checkpoint | None]] = {}, []

    @property
    def used(self) -> bool:
        return bool(self.checkpoints)

    @property
    def newest(self) -> Checkpoint | None:
        return max((each for each in self.checkpoints if each is not None), key=lambda each: each[0], default=None)

    def reserve(self, step: int) -> None:
        if step > self.mark or self.settled:
            self.mark, self.same_boot, self.forgetful, self.settled = step, True, False, False
            self.flushed = dict(self.outbox), list(self.checkpoints)

    def settle(self, signed: int) -> None:
        """As `LivePeer._settle_mark`."""
        self.mark, self.same_boot, self.forgetful, self.settled = signed, True, False, True
        self.flushed = dict(self.outbox), list(self.checkpoints)

    def forgotten_through(self) -> int:
        damaged = {slot for slot, message in self.outbox.items() if message is None}
        return forgotten_through(
            self.mark,
            same_boot=self.same_boot,
            damaged_slots=damaged,
            num_slots=self.slots,
            damaged_checkpoint=None in self.checkpoints,
        )

    def cut_power(self) -> None:
        self.outbox, self.checkpoints = dict(self.flushed[0]), list(self.flushed[1])
        self.same_boot &= self.settled

    def rot(self, random: Random) -> None:
        """Flip a bit in many records, and perhaps in the mark; or only in the newest checkpoint."""
        if random.random() < 0.3:
            self.checkpoints = [*self.checkpoints[:-1], *[None for _ in self.checkpoints[-1:]]]
            return
        self.outbox = {slot: None if random.random() < 0.7 else message for slot, message in self.outbox.items()}
        self.checkpoints = [None if random.random() < 0.3 else each for each in self.checkpoints]
        if random.random() < 0.3:
            self.mark, self.forgetful = -1, self.used

    def change(self, from_iteration: int) -> None:
        """Begin with a new manifest, at the agreed iteration if its state is there."""
        agreed = [each for each in self.checkpoints if each is not None and each[0] == from_iteration]
        self.checkpoints = [agreed[-1]] if agreed else self.checkpoints[-1:]
        self.outbox, self.mark, self.same_boot, self.forgetful, self.settled = {}, -1, True, False, False
        self.flushed = {}, list(self.checkpoints)
        self.amended, self.epoch = True, 1

    def copy(self) -> "Disk":
        made = Disk(self.slots)
        made.amended, made.epoch = self.amended, self.epoch
        made.outbox, made.checkpoints, made.mark = dict(self.outbox), list(self.checkpoints), self.mark
        made.masked, made.flushed = set(self.masked), (dict(self.outbox), list(self.checkpoints))
        made.settled = self.settled
        return made


class Member:
    """One member: `LivePeer`, on a simulated disk."""

    attacker = False

    def __init__(self, world: "World", own: int) -> None:
        self.world, self.own = world, own
        self.whole_course = self.course = Course(
            num_members=world.num_members,
            num_byzantine=world.num_byzantine,
            own=own,
            rounds=world.rounds,
            num_iterations=world.num_iterations,
        )
        self.target = world.targets[own]
        self.effort = 3.0 if own == world.slow else 0.5  # how long it computes
        self.disk = Disk(2 * self.course.per_iteration + 2)
        self.backup: Disk | None = None  # an old copy of it
        self.brought: set[int] = set()  # lives in which it was given the others' final states
        # Memory, which is lost in a crash
        self.up = self.finished = self.recovering = False
        self.fuse: int | None = None  # how many more actions until a crash
        self.life = 0
        self.awake()

    @property
    def secret(self) -> Secret:
        """What it signs with; a signature covers the hash of the manifest."""
        return self.world.secrets[self.disk.epoch][self.own]

    def awake(self) -> None:
        """As `LivePeer.__init__`; `start` comes later, and messages may come before it."""
        self.life += 1
        self.up = True
        disk, checkpoint = self.disk, self.disk.newest
        self.state = 0j if checkpoint is None else checkpoint[1]
        self.advanced = self.state
        self.jobs: deque[Callable[[], list[Action]]] = deque()
        self.firsts: dict[tuple[int, int], Message] = {}  # the first message in time, by step and sender
        self.sealed: set[int] = set()  # steps whose message was made since the last start
        self.accusations: set[tuple[int, int]] = set()
        self.masked_before = set(disk.masked)  # when this step began
        self.with_other_manifest: set[int] = set()
        self.course = self.whole_course
        self.protocol = self.world.protocol(
            course=self.course,
            seal=self.seal,
            seal_ask=lambda step: Message("ask", self.own, step, NOTHING, (), b"", b""),
            seal_echo=self.seal_echo,
            verify=partial(self.world.verify, self.disk.epoch),
            iteration=0 if checkpoint is None else checkpoint[0],
            started=disk.used,
            sent=self.logged(),
            silent_through=disk.forgotten_through(),
            forgetful=disk.forgetful,
            masked=set(disk.masked),
        )
        if self.protocol.silent_through >= 0:
            disk.same_boot = False  # as `Mark.distrust`
        if self.meets and self.protocol.iteration <= self.world.from_iteration:
            self.shorten()
        if checkpoint is not None:
            self.reserve(checkpoint[0])
        self.world.after(self.world.drawn(1.0), self.guarded, self.life, self.start)

    def logged(self) -> dict[int, Message]:
        found = {message.step: message for message in self.disk.outbox.values() if message is not None}
        return {0: self.secret.seal("vector", 0, NOTHING, ()), **found} if self.disk.used else found

    def seal(self, step: int, vector: np.ndarray, receipts: tuple[Receipt, ...]) -> Message:
        self.sealed.add(step)
        return self.secret.seal("vector", step, vector, receipts)

    def seal_echo(self, receipt: Receipt | None) -> Message:
        receipts = () if receipt is None else (receipt,)
        return Message("echo", self.own, 0 if receipt is None else receipt.step, NOTHING, receipts, b"", b"")

    def linked(self, other: int) -> None:
        if self.meets:
            self.world.pass_on(self.own, other)
        self.do(self.protocol.linked(other, echoes=self.world.echoes))

    def start(self) -> None:
        if self.course is self.whole_course and self.change_if_due():
            return
        self.do(self.protocol.start())

    def guarded(self, life: int, event: Callable[..., object], *arguments: Any) -> None:
        """Let an event happen to a member, unless it has crashed since the event was planned."""
        if self.up and life == self.life:
            try:
                event(*arguments)
            except Crash:
                self.crash()

    def crash(self) -> None:
        self.world.note("crash", self.own)
        self.up, self.fuse, self.recovering = False, None, True
        self.jobs.clear()

    def burn(self) -> None:
        """Crash here, if it is time."""
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise Crash

    # Actions

    def do(self, actions: list[Action]) -> None:
        world, life = self.world, self.life
        for action in actions:
            if life != self.life:
                return  # it has changed to the new manifest
            if self.fuse is not None:
                self.burn()
            kind = type(action)
            if kind is Send:
                self.send(*action)  # pyright: ignore
                continue
            if kind is Count:
                continue
            if world.trace is not None:
                world.note("do", self.own, _brief(action))
            match action:
                case SetTimer(timer, step):
                    seconds = RETRY
                    if timer == "grace":
                        seconds = {0: START_GRACE, self.course.last: world.linger}.get(step, GRACE)
                    elif timer == "echoes":
                        seconds = ECHOES
                    world.after(seconds * (0.5 + world.random()), self.guarded, self.life, self.fire, timer, step)
                case Log(message):
                    world.require(
                        message.step <= self.disk.mark or not message.step, f"{self.own} signs more than it reserved"
                    )
                    self.disk.outbox[message.step % self.disk.slots] = message
                case Combine():
                    self.check_combine(action)
                    if world.inline:
                        self.do(self.combine(action))
                    else:
                        self.queue(lambda action=action: self.combine(action))
                case Begin(iteration):
                    self.queue(lambda iteration=iteration: self.begin(iteration))
                case Adopt():
                    self.check_adopt(action)
                    self.queue(lambda action=action: self.adopt(action))
                case SendState(to, previous):
                    self.send_state(to)
                    if previous:
                        self.send_state(to, previous=True)
                case Evidence(first, second, kind):
                    self.check_evidence(first, second, kind)
                case Finished() if self.meets:
                    self.change()
                case Finished():
                    self.finished, self.fuse = True, None
                    world.left(self)
                    world.after(FLUSH, self.leave)

    # A new manifest

    def learn(self) -> None:
        """It gets the amendment, and passes it on."""
        if self.disk.amended or self.finished:
            return
        self.disk.amended = True
        for other in self.course.others:
            self.world.pass_on(self.own, other)
        if not self.change_if_due():
            self.shorten()

    def shorten(self) -> None:
        self.course = self.protocol.course = replace(self.course, num_iterations=self.world.from_iteration)
        self.protocol.leaving = frozenset(k for k in self.course.others if k == self.world.replaced)

    def change_if_due(self) -> bool:
        """As `LivePeer._change_if_due`; if it is time, the member goes on with the new manifest."""
        due = self.meets and is_due(
            self.world,  # pyright: ignore[reportArgumentType]
            self.protocol.iteration,
            num_changed=len(self.with_other_manifest),
            num_byzantine=self.course.num_byzantine,
        )
        if due:
            self.change()
        return due

    def others_changed(self, other: int) -> None:
        if not self.change_if_due():
            self.do(self.protocol.changed(other))

    @property
    def meets(self) -> bool:
        """Whether it has an amendment that it has not yet carried out."""
        return self.disk.amended and not self.disk.epoch and not self.finished

    def change(self) -> None:
        world = self.world
        world.note("change", self.own)
        world.counts["changed"] += 1
        self.fuse = None
        if self.own == world.replaced:  # a new member takes its place, some time later
            self.up, self.disk = False, Disk(self.disk.slots)
            self.disk.amended, self.disk.epoch = True, 1
            self.life += 1
            self.recovering = True
            world.after(world.drawn(5.0), world.restart, self)
            return
        self.disk.change(world.from_iteration)
        if self.disk.newest is not None and not self.attacker:
            iteration, state = self.disk.newest
            world.states.setdefault((1, iteration), {})[self.own] = state
        self.awake()
        for other in self.course.others:
            world.after(world.drawn(1.0), world.link, self.own, other)

    def leave(self) -> None:
        self.up = False

    def send(self, to: int, message: Message) -> None:
        if message.kind == "echo" and not self.world.echoes:
            return
        if message.kind == "vector":
            self.world.check_sent(self, message)
        self.world.post(to, message)

    def send_state(self, to: int, previous: bool = False) -> None:
        iteration = self.protocol.iteration - previous
        for checkpoint in self.disk.checkpoints:
            if checkpoint is None or checkpoint[0] != iteration:
                continue
            self.world.check_state(self, checkpoint)
            self.world.post(to, self.sealed_state(checkpoint))

    def sealed_state(self, checkpoint: "Checkpoint") -> Message:
        return self.secret.seal("state", self.course.first_step(checkpoint[0]), to_vector(checkpoint[1]), ())

    def fire(self, timer: Any, step: int) -> None:
        if not self.finished and (actions := self.protocol.timer_fired(timer, step)):
            self.do(actions)

    def receive(self, message: Message) -> None:
        """Receive a message from the network."""
        world, protocol = self.world, self.protocol
        kind, sender, step = message[:3]
        if world.trace is not None:
            world.note("get", self.own, _brief(message))
        if kind == "vector" and 0 <= step - protocol.step <= 1:
            self.firsts.setdefault((step, sender), message)
        if actions := protocol.received(message):
            self.do(actions)
        if sender in world.attackers or kind == "state":
            self.check_memory()

    # Computing

    def queue(self, job: Callable[[], list[Action]]) -> None:
        self.jobs.append(job)
        if len(self.jobs) == 1:
            self.world.after(self.world.drawn(self.effort), self.guarded, self.life, self.work)

    def work(self) -> None:
        self.burn()
        life, actions = self.life, self.jobs[0]()
        if life != self.life:
            return  # it has changed to the new manifest
        self.burn()
        self.do(actions)
        if life != self.life:
            return
        self.jobs.popleft()
        if self.jobs:
            self.world.after(self.world.drawn(self.effort), self.guarded, self.life, self.work)

    def saved(self, iteration: int) -> None:
        self.burn()
        self.disk.checkpoints = [*self.disk.checkpoints[-1:], (iteration, self.state)]
        if self.world.random() < 0.3:
            self.backup = self.disk.copy()
        if not self.attacker:
            self.world.states.setdefault((self.disk.epoch, iteration), {})[self.own] = self.state
        self.burn()

    def reserve(self, iteration: int) -> None:
        """As `LivePeer._reserve`: what is signed from now on may be lost in a power cut, but not this mark."""
        if self.protocol.may_reserve(iteration):
            ahead = int(self.world.stride * self.world.random())
            whole = self.whole_course
            self.disk.reserve(min(whole.first_step(iteration + 1 + ahead), whole.last))
        self.burn()

    def begin(self, iteration: int) -> list[Action]:
        # What it computes again after a restart is different, as if its random numbers were lost as well.
        gradient = self.target * (1 + iteration) - self.state + 1e-3 * self.life
        self.reserve(iteration)
        return self.protocol.computed(self.course.first_step(iteration), to_vector(gradient))

    def combine(self, action: Combine) -> list[Action]:
        step, course = action.step, self.course
        if step == 0:
            self.saved(0)
            return self.protocol.finished(0)
        phase, iteration = course.phase(step), course.iteration(step)
        points = [to_point(message.vector) for message in action.messages if message is not None]
        if phase == 0:
            trim = max(0, course.num_byzantine - (course.num_members - len(points)))
            result = self.advanced = self.state + STEP_SIZE * trimmed_mean(points, trim)
        else:
            result = least_diameter_mean(points, course.quorum)
            self.world.agreed(self, action, result)
        if phase < course.rounds:
            return self.protocol.computed(step + 1, to_vector(result))
        self.state = result
        self.saved(iteration + 1)
        return self.protocol.finished(step)

    def adopt(self, action: Adopt) -> list[Action]:
        points = [to_point(message.vector) for message in action.states if message is not None]
        missing = self.course.num_members - len(points)
        self.state = least_diameter_mean([*points, *[median(points)] * missing], self.course.quorum)
        self.world.adopted(self, action, self.state)
        self.saved(action.iteration)
        self.reserve(action.iteration)
        return self.protocol.adopted(action.iteration)

    # Promises

    def check_combine(self, action: Combine) -> None:
        world, step = self.world, action.step
        present = [message for message in action.messages if message is not None]
        own = action.messages[self.own]
        if len(present) < self.course.quorum:
            world.violated(f"{self.own} ended step {step} with {len(present)} messages")
        if own is None or own is not self.protocol.sent.get(step):
            world.violated(f"{self.own} ended step {step} without its own")
        if any(message is not None and message.sender != k for k, message in enumerate(action.messages)):
            world.violated(f"{self.own} counted a message in another's place")
        if self.masked_before & {message.sender for message in present} and not self.course.is_barrier(step):
            world.violated(f"{self.own} counts a message in step {step} of one that it has proven to equivocate")
        self.masked_before = set(self.disk.masked)
        theirs = {receipt.sender: receipt.digest for receipt in own.receipts}
        for message in present:
            if message is own:
                continue
            sender = message.sender
            if message is not self.firsts.get((step, sender)):
                world.violated(f"{self.own} did not count the first message of {sender} in step {step}")
            if step in self.sealed and sender not in world.attackers:
                for witnessed, of_step, digest, _ in message.receipts:
                    if theirs.get(witnessed, digest) != digest:
                        if (witnessed, of_step) not in self.accusations:
                            world.violated(f"{self.own} did not accuse {witnessed} of two messages for step {of_step}")
                        world.counts["accused"] += 1
        self.check_memory()

    def check_adopt(self, action: Adopt) -> None:
        states = [state for state in action.states if state is not None]
        first = self.course.first_step(action.iteration)
        self.world.require(
            len(states) >= self.course.state_quorum and all(state.step == first for state in states),
            f"{self.own} adopts {len(states)} states for iteration {action.iteration}",
        )
        held = 0 if self.disk.newest is None else self.disk.newest[0]
        self.world.require(action.iteration > held, f"{self.own} goes back to iteration {action.iteration}")

    def check_evidence(self, first: Receipt, second: Receipt, kind: Kind) -> None:
        world = self.world
        self.disk.masked.add(first.sender)
        sound = first[:2] == second[:2] and first.digest != second.digest
        signed = all(
            each.signature == world.secrets[self.disk.epoch][each.sender].sign(kind, each.step, each.digest)
            for each in (first, second)
        )
        world.require(sound and signed, f"{self.own} has evidence of nothing")
        world.require(first.sender in world.attackers, f"{self.own} accuses {first.sender}, who is honest")
        self.accusations.add((first.sender, first.step))

    def check_memory(self) -> None:
        """Memory is bounded: messages of two steps, receipts of four, two states per sender, the outbox."""
        members, protocol = self.course.num_members, self.protocol
        for what, kept, most in (
            ("messages", sum(map(len, protocol._inbox.values())), 2 * members),
            ("receipts", sum(map(len, protocol._seen.values())), 4 * members),
            ("states", sum(map(len, protocol._states.values())), 2 * (members - 1)),
            ("own messages", len(protocol.sent), self.disk.slots + 1),
        ):
            if kept > most:
                self.world.violated(f"{self.own} keeps {kept} {what}, more than {most}")


class Attacker(Member):
    """A member that deviates from the protocol at will, and can sign anything in its own name."""

    attacker = True

    def __init__(self, world: "World", own: int) -> None:
        super().__init__(world, own)
        self.style = world.rng.choice(("equivocate", "equivocate", "chaos", "chaos", "silent", "subtle", "withhold"))
        self.said: list[Message] = []
        self.inventions_left = 12
        if self.style == "chaos":
            world.after(world.drawn(3.0), self.invent)

    def check_combine(self, action: Combine) -> None:
        pass

    def check_adopt(self, action: Adopt) -> None:
        pass

    def check_evidence(self, first: Receipt, second: Receipt, kind: Kind) -> None:
        pass

    def check_memory(self) -> None:
        pass

    def say(self, to: int, message: Message) -> None:
        self.said.append(message)
        self.world.post(to, message)

    def nonsense(self) -> np.ndarray:
        random = self.world.rng
        size = random.choice((1e-3, 1.0, 1e3, 1e12))
        return to_vector(complex(random.uniform(-size, size), random.uniform(-size, size)))

    def send(self, to: int, message: Message) -> None:
        random = self.world.random()
        if self.style == "silent" or (self.style == "chaos" and random < 0.2):
            return
        if self.style == "withhold" and message.kind == "echo":
            return
        if self.style in ("subtle", "withhold") or message.kind != "vector":
            self.say(to, message)
            return
        if random < 0.3:
            self.say(to, message)
        if random > 0.2:
            vector = self.nonsense() if len(message.vector) else message.vector
            receipts = message.receipts if random < 0.8 else message.receipts[1:]
            self.say(to, self.secret.seal("vector", message.step, vector, receipts))

    def send_state(self, to: int, previous: bool = False) -> None:
        if self.style == "subtle":
            super().send_state(to, previous)
        elif self.style not in ("silent", "withhold") and self.disk.newest is not None:
            first = self.course.first_step(self.disk.newest[0])
            self.say(to, self.secret.seal("state", first, self.nonsense(), ()))

    def invent(self) -> None:
        """Send a message that no round asks for."""
        random, course = self.world.rng, self.course
        step = random.choice((0, 1, self.protocol.step, self.protocol.step, self.protocol.step + 1, course.last))
        match random.randrange(5):
            case 0 if self.said:
                message = random.choice(self.said)
            case 1:
                message = Message("ask", self.own, step, NOTHING, (), b"", b"")
            case 2:
                first = course.first_step(random.randrange(course.num_iterations + 1))
                message = self.secret.seal("state", first, self.nonsense(), ())
            case _:
                receipts = [
                    Receipt(other, step - 1, random.randbytes(8), self.secret.token + random.randbytes(13))
                    for other in range(course.num_members)
                    if other != self.own and random.random() < 0.5
                ]
                vector = NOTHING if course.is_barrier(step) else self.nonsense()
                message = self.secret.seal("vector", step, vector, tuple(receipts))
        for to in range(course.num_members):
            if to != self.own and random.random() < 0.6:
                self.say(to, message)
        self.inventions_left -= 1
        if self.inventions_left and self.up:
            self.world.after(self.world.drawn(3.0), self.invent)


class World:
    """One federation, from its start to its end."""

    def __init__(self, seed: int, protocol: type[Protocol] = Protocol, traced: bool = False) -> None:
        self.seed, self.protocol, self.trace = seed, protocol, [] if traced else None
        random = self.rng = Random(seed)
        self.random = random.random
        self.inline = seed % 2 == 0  # short vectors are combined at once, long ones in the agent's thread
        shape = random.random()
        self.num_members, self.num_byzantine = (5, 1) if shape < 0.85 else (4, 0) if shape < 0.97 else (9, 2)
        self.rounds = 1 if random.random() < 0.7 else 2
        # In some worlds disks fail again and again, and in some of these the others are too old to send echoes.
        self.bad_disks = random.random() < 0.25
        self.echoes = not self.bad_disks or random.random() < 0.6
        self.num_iterations = 5 if self.bad_disks else 3 if random.random() < 0.25 else 2
        self.plane = random.random() < 0.5
        self.loss = 0.0 if self.bad_disks else random.choice((0.0, 0.0, 0.05, 0.3))
        self.twice = random.choice((0.0, 0.0, 0.1))
        self.pace = random.choice((0.2, 0.7, 2.0))
        self.slow = random.randrange(self.num_members) if random.random() < 0.3 else None
        # Beyond f: for a while more members are faulty than the protocol tolerates.
        self.beyond = random.random() < 0.2
        self.stride = random.choice((0, 1, 3))  # how many iterations ahead members reserve, at most
        self.must_end = True
        attackers = random.randint(min(1, self.num_byzantine), self.num_byzantine) if random.random() < 0.5 else 0
        self.attackers = set(random.sample(range(self.num_members), attackers))

        self.now, self.serial, self.events = 0.0, 0, 0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.blocked: set[tuple[int, int]] = set()  # links, from and to
        self.cut_off: set[int] = set()
        self.sent: dict[tuple[int, int], dict[int, Message]] = {}  # by epoch, step and honest sender
        self.results: dict[tuple[int, int], list[complex]] = {}  # of agreement, if enough messages had arrived
        self.states: dict[tuple[int, int], dict[int, complex]] = {}  # by epoch and iteration
        self.counts: dict[str, int] = dict.fromkeys(COUNTED, 0)
        self.signed_states: dict[tuple[int, int, int], complex] = {}  # by epoch, honest sender and iteration
        self.secrets = [[Secret(k, random.randbytes(6)) for k in range(self.num_members)] for _ in range(2)]
        # In some worlds the members change: before an iteration, a new manifest replaces the old one.
        self.from_iteration = random.randrange(1, self.num_iterations) if random.random() < 0.15 else 0
        self.replaced = random.choice([None, *range(self.num_members)])
        self.targets = [
            complex(random.uniform(-1, 1), random.uniform(-1, 1) if self.plane else 0) for _ in range(self.num_members)
        ]
        self.members = [Attacker(self, k) if k in self.attackers else Member(self, k) for k in range(self.num_members)]
        self.honest = [member for member in self.members if not member.attacker]
        self.waiting = len(self.honest)
        for one, other in combinations(range(self.num_members), 2):
            self.after(self.drawn(1.0), self.link, one, other)
        self.linger = LONG_LINGER
        if self.from_iteration:  # the members have the amendment before they reach the iteration
            for member in self.honest:
                member.disk.amended = True
                member.shorten()
        if self.beyond:
            begin = random.uniform(0, LAST_FAULT)
            self.healing = begin + random.uniform(1, LONGEST_FAULT)
            for _ in range(random.randrange(1, self.num_members + 1)):
                self.after(random.uniform(begin, self.healing), self.fault, 0)
            self.after(self.healing, self.heal_all)
        elif self.bad_disks and not self.attackers and self.num_byzantine == 1 and random.random() < 0.4:
            self.healing = PATIENCE
            self.after(random.uniform(1, 10), self.trouble_twice, *random.sample(self.honest, 2))
        else:
            self.healing = PATIENCE
            num_faults = random.randrange(8 if self.bad_disks else 5) if len(self.attackers) < self.num_byzantine else 0
            for _ in range(num_faults):
                self.after(random.uniform(0, LAST_FAULT), self.fault, 3)
            self.linger = LONG_LINGER if num_faults else LINGER

    # Time

    def drawn(self, mean: float) -> float:
        return -mean * log(1 - self.random())

    def after(self, seconds: float, event: Callable[..., None], *arguments: Any) -> None:
        self.serial += 1
        heappush(self.heap, (self.now + seconds, self.serial, event, arguments))

    def run(self) -> "World":
        heap, pop = self.heap, heappop
        while self.waiting:
            self.events += 1
            if self.events > MOST_EVENTS or self.now > PATIENCE:
                self.require(not self.must_end, f"{self.waiting} honest members never finish")
                self.counts["stuck"] += 1
                break
            self.now, _, event, arguments = pop(heap)
            event(*arguments)
        self.check_agreement()
        for member in self.honest:
            member.check_memory()
        return self

    def note(self, what: str, *words: Any) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:9.3f} {what:6} " + " ".join(map(str, words)))

    def require(self, condition: bool, words: str) -> None:
        if not condition:
            self.violated(words)

    def violated(self, words: str) -> NoReturn:
        raise Violation(f"seed {self.seed}, at {self.now:.3f}: {words}; python tests/live_world.py {self.seed}")

    # The network

    def post(self, to: int, message: Message) -> None:
        random = self.random
        if (self.blocked and (message.sender, to) in self.blocked) or (self.loss and random() < self.loss):
            return
        self.serial += 1
        arrival, epoch = self.now - self.pace * log(1 - random()), self.members[message.sender].disk.epoch
        heappush(self.heap, (arrival, self.serial, self.deliver, (to, message, epoch)))
        if self.twice and random() < self.twice:
            self.after(self.drawn(4 * self.pace), self.deliver, to, message, epoch)

    def pass_on(self, sender: int, to: int) -> None:
        """Tell a member of the amendment, if it can be reached."""

        def arrive() -> None:
            if self.can_reach(sender, to):
                member = self.members[to]
                member.guarded(member.life, member.learn)

        self.after(self.drawn(self.pace), arrive)

    def can_reach(self, one: int, other: int) -> bool:
        return self.members[one].up and self.members[other].up and (one, other) not in self.blocked

    def refuse(self, member: Member, other: Member) -> None:
        """Two members with different manifests refuse each other, and the one with the new one says why."""
        for one, another in ((member, other), (other, member)):
            one.with_other_manifest.add(another.own)
            if one.disk.amended:
                self.pass_on(one.own, another.own)
            if one.up:
                one.guarded(one.life, one.others_changed, another.own)

    def deliver(self, to: int, message: Message, epoch: int) -> None:
        member = self.members[to]
        if message.signature and not self.is_signed(epoch, message):
            return  # an attacker repeats a message from before the members changed
        if member.up and epoch != member.disk.epoch:
            sender = self.members[message.sender]
            if sender.disk.epoch == epoch and self.can_reach(sender.own, to):
                self.refuse(member, sender)
        elif member.up and not (self.blocked and (message.sender, to) in self.blocked):
            try:
                member.receive(message)
            except Crash:
                member.crash()

    def link(self, one: int, other: int) -> None:
        for own, to in ((one, other), (other, one)):
            member = self.members[own]
            other_manifest = member.disk.epoch != self.members[to].disk.epoch
            if self.can_reach(own, to) and not member.finished and not other_manifest:
                member.with_other_manifest.discard(to)
                member.guarded(member.life, member.linked, to)

    def is_signed(self, epoch: int, message: Message) -> bool:
        kind, sender, step = message[:3]
        return message.signature == self.secrets[epoch][sender].sign(kind, step, message.digest)

    def verify(self, epoch: int, receipt: Receipt) -> bool:
        return receipt.signature == self.secrets[epoch][receipt.sender].sign("vector", receipt.step, receipt.digest)

    # Faults

    def in_trouble(self, member: Member) -> bool:
        """Whether a member is down, about to crash, cut off, or still behind after one of these."""
        if not member.up or member.fuse is not None or member.own in self.cut_off:
            return not member.finished
        uncertain = member.protocol.step <= member.protocol.silent_through or (
            member.life > 1 and not member.protocol._cleared
        )
        if uncertain and not member.finished:
            return True
        if member.protocol.step >= max(each.protocol.step for each in self.honest) - 1:
            member.recovering = False
        return member.recovering

    def fault(self, again: int) -> None:
        """A fault hits an honest member, if the federation tolerates one more."""
        trouble = [self.in_trouble(member) for member in self.honest]
        sound = [member for member, bad in zip(self.honest, trouble, strict=True) if not bad and not member.finished]
        if not sound:
            return
        if not self.beyond and len(self.attackers) + sum(trouble) >= self.num_byzantine:
            if again:
                self.after(self.drawn(5.0), self.fault, again - 1)
            return
        member = self.rng.choice(sound)
        longest = LONGEST_FAULT if self.random() < 0.4 else LONGEST_FAULT / 4
        seconds = min(self.rng.uniform(1, longest), self.healing - self.now)
        member.recovering = True
        if self.random() < 0.6:
            self.counts["crashes"] += 1
            member.fuse = self.rng.randrange(20)
            worse = self.rng.choice(DISK_FAULTS) if self.random() < (0.9 if self.bad_disks else 0.3) else None
            self.note("fault", member.own, "crashes after", member.fuse, worse or "")
            if self.random() < 0.05:  # it returns after the others have finished and left
                seconds = 0.4 * PATIENCE
            elif worse is not None:  # it returns while the others still have what it has lost
                seconds = self.drawn(3.0)
            self.after(seconds, self.restart, member, worse)
            return
        self.counts["partitions"] += 1
        self.cut_off.add(member.own)
        others = [k for k in range(self.num_members) if k != member.own]
        chosen = self.rng.sample(others, self.rng.randrange(1, len(others) + 1))
        self.note("fault", member.own, "is cut off from", chosen)
        for other in chosen:
            self.blocked |= {(member.own, other), (other, member.own)}
        self.after(seconds, self.reconnect, member, chosen)

    def trouble_twice(self, one: Member, other: Member) -> None:
        """A member falls far behind, and when it returns, another one has lost what it signed."""
        if one.up and one.life == 1:
            one.fuse = 0
            self.counts["crashes"] += 1
        ahead = max(member.protocol.iteration for member in self.honest)
        if ahead < 3:
            self.after(1.0, self.trouble_twice, one, other)
            return
        self.note("fault", one.own, "returns, and", other.own, "crashes")
        other.fuse = self.rng.randrange(8)
        self.restart(one)
        self.after(self.drawn(3.0), self.restart, other, self.rng.choice(("power cut", "rot")))

    def restart(self, member: Member, worse: str | None = None) -> None:
        if member.fuse is not None:  # it did too little to crash by itself
            member.guarded(member.life, member.crash)
        if member.up or member.finished:
            return
        if worse is not None:
            self.spoil(member, worse)
        self.note("start", member.own)
        member.awake()
        if worse is not None and self.random() < 0.5:  # a second crash soon after
            member.fuse = self.rng.randrange(8)
            self.after(self.drawn(5.0), self.restart, member)
        for other in range(self.num_members):
            if other != member.own:
                self.after(self.drawn(1.0), self.link, member.own, other)
        self.bring_files()

    def spoil(self, member: Member, how: str) -> None:
        """Let something happen to a disk while its member is down."""
        # That an old copy is in use shows only in what the others say, so their echoes must arrive.
        others = [each for each in self.honest if each is not member]
        told = (
            self.echoes and not self.loss and not self.beyond and not self.cut_off and all(each.up for each in others)
        )
        if how in ("restored", "lost") and not told:
            return
        self.counts[how] += 1
        self.note("disk", member.own, how)
        match how:
            case "power cut":
                member.disk.cut_power()
            case "reboot":  # an orderly one
                disk, course = member.disk, member.course
                checkpoint = 0 if disk.newest is None else course.first_step(disk.newest[0])
                signed = max(checkpoint, *(each.step for each in disk.outbox.values() if each is not None), 0)
                if member.protocol.may_reserve(member.protocol.iteration) and disk.mark >= signed:
                    disk.settle(signed)
                disk.cut_power()
            case "rot":
                member.disk.rot(self.rng)
            case "restored":
                member.disk = (member.backup or Disk(member.disk.slots)).copy()
            case "lost":
                member.disk = Disk(member.disk.slots)

    def reconnect(self, member: Member, others: list[int]) -> None:
        self.note("link", member.own, others)
        self.cut_off.discard(member.own)
        for other in others:
            self.blocked -= {(member.own, other), (other, member.own)}
            self.after(self.drawn(1.0), self.link, member.own, other)

    def heal_all(self) -> None:
        """End all faults. Members that are too far behind need K − f others that are not."""
        self.beyond = False
        for member in self.honest:
            self.reconnect(member, [k for k in range(self.num_members) if (member.own, k) in self.blocked])
            self.restart(member)
        reached = [0 if member.disk.newest is None else member.disk.newest[0] for member in self.honest]
        silent = sum(
            member.protocol.silent_through >= member.protocol.step or member.protocol.forgetful
            for member in self.honest
        )
        near = sum(iteration >= max(reached) - 1 for iteration in reached)
        # A silent member waits until the others have gone on without it; one that is behind needs 2f + 1 states. If the
        # members change while more than f are in trouble, those who hold the state may be too few.
        self.must_end = (
            not self.from_iteration
            and silent + len(self.attackers) <= self.num_byzantine
            and (near == len(reached) or near - silent >= 2 * self.num_byzantine + 1)
        )
        self.note("heal", reached, self.must_end)

    def left(self, member: Member) -> None:
        if not member.attacker:
            self.waiting -= 1
            self.after(2 * LONG_LINGER, self.bring_files)

    def bring_files(self) -> None:
        """To members that are still there when others have left, the operators bring these others' final states."""
        finished = [member for member in self.honest if member.finished]
        if len(finished) <= 2 * self.num_byzantine or any(member.up for member in finished):
            return
        for late in self.honest:
            if late.up and not late.finished and late.life not in late.brought:
                if late.disk.epoch < max(other.disk.epoch for other in finished):
                    late.change()  # it is started again with the new manifest
                late.brought.add(late.life)
                self.counts["late"] += 1
                for other in finished:
                    assert other.disk.newest is not None
                    final = other.sealed_state(other.disk.newest)
                    self.after(self.drawn(1.0), self.deliver, late.own, final, other.disk.epoch)

    # Promises

    def check_sent(self, member: Member, message: Message) -> None:
        """An honest member never equivocates, over all its restarts."""
        known = self.sent.setdefault((member.disk.epoch, message.step), {}).setdefault(member.own, message)
        if known is not message:
            same = known.receipt == message.receipt
            self.require(same, f"{member.own} equivocates in step {message.step}")

    def check_state(self, member: Member, checkpoint: Checkpoint) -> None:
        """An honest member never signs two states for one iteration."""
        if not member.attacker:
            iteration, state = checkpoint
            known = self.signed_states.setdefault((member.disk.epoch, member.own, iteration), state)
            self.require(known == state, f"{member.own} contradicts its state of iteration {iteration}")

    def agreed(self, member: Member, action: Combine, result: complex) -> None:
        came = sum(message is not None and message.sender not in self.attackers for message in action.messages)
        if not member.attacker and len(self.honest) - came + len(self.attackers) <= self.num_byzantine:
            self.results.setdefault((member.disk.epoch, action.step), []).append(result)
            self.counts["agreed"] += 1

    def check_agreement(self) -> None:
        """Honest results are closer to each other than the honest vectors were, by the rule's factor."""
        factor = MDA().contraction(self.num_members, self.num_byzantine)
        for step, results in self.results.items():
            before = [to_point(message.vector) for message in self.sent[step].values()]
            bound = factor * diameter(before) + ROUNDING * (1 + max(map(abs, before)))
            found = diameter(results)
            self.require(found <= bound, f"results of step {step} are {found} apart, more than {bound}")

    def adopted(self, member: Member, action: Adopt, state: complex) -> None:
        """An adopted state is close to those of honest members, if few were missing."""
        if member.attacker:
            return
        self.counts["adopted"] += 1
        honest = [k for k, each in enumerate(action.states) if each is not None and k not in self.attackers]
        missing = len(self.honest) - 1 - len(honest)
        if missing + len(self.attackers) <= self.num_byzantine:
            points = [self.states[member.disk.epoch, action.iteration][k] for k in honest]
            away, apart = min(abs(state - point) for point in points), diameter(points)
            bound = 2 * apart + ROUNDING * (1 + max(map(abs, points)))
            self.require(away <= bound, f"{member.own} adopts a state that is {away} from all others")


def _brief(action: Action | Message) -> str:
    match action:
        case Message():
            return f"{action.kind} {action.step} from {action.sender} {action.digest.hex()[:6]}"
        case Log(message):
            return f"Log {_brief(message)}"
        case Combine(step, messages):
            return f"Combine {step} of {[k for k, message in enumerate(messages) if message is not None]}"
        case Adopt(iteration, states):
            return f"Adopt {iteration} of {[k for k, state in enumerate(states) if state is not None]}"
        case Evidence(first, _):
            return f"Evidence against {first.sender}, step {first.step}"
        case _:
            return str(action)


def violation(seed: int, protocol: type[Protocol] = Protocol) -> str | None:
    """The promise that a seed breaks, in words; None if it breaks none."""
    try:
        World(seed, protocol).run()
    except Violation as found:
        return str(found)
    return None


def main() -> None:
    world = World(int(sys.argv[1]), traced=True)
    try:
        world.run()
        print(f"seed {world.seed}: all is well; {world.events} events, {world.counts}")
    except Violation as found:
        print(found)
    finally:
        print("\n".join(world.trace or []))


if __name__ == "__main__":
    main()
