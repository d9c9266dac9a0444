"""Rounds without a leader, as a state machine: events in, actions out; no I/O, no clock, no randomness of its own.

A run is a row of steps. Step 0 is the start barrier; then every iteration has 1 + κ steps, the exchange of gradients
and κ rounds of agreement; the last step is a barrier too, where members wait for those behind. In every step each
member publishes one message and gathers everyone's. A step ends when all K messages are in, or K − f (the member's own
counts) and a grace period has passed; with fewer it never ends. Only the last step does, after a grace period in which
fewer than K − f members gave a sign of life: the others have seen all K there, and left.

Messages travel by pull as well as by push: a member that lacks one asks its sender, who has kept those of this and the
last iteration. A member too far behind for that is sent states instead, and adopts what K − f members say.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

Kind = Literal["vector", "ask", "state"]
Timer = Literal["grace", "retry"]


@dataclass(frozen=True)
class Course:
    """The row of steps, and who takes part."""

    num_members: int  # K
    num_byzantine: int  # f, tolerated
    own: int  # this member's index
    rounds: int  # κ
    num_iterations: int  # T

    @cached_property
    def quorum(self) -> int:
        return self.num_members - self.num_byzantine

    @cached_property
    def per_iteration(self) -> int:
        return 1 + self.rounds

    @cached_property
    def last(self) -> int:
        """The step of the final barrier."""
        return self.first_step(self.num_iterations)

    @cached_property
    def others(self) -> tuple[int, ...]:
        return tuple(each for each in range(self.num_members) if each != self.own)

    def first_step(self, iteration: int) -> int:
        return 1 + iteration * self.per_iteration

    def iteration(self, step: int) -> int:
        """Of a step; that of the start barrier is 0."""
        return max(0, (step - 1) // self.per_iteration)

    def phase(self, step: int) -> int:
        """0: gradients, k: the k-th round of agreement. Not for barriers."""
        return (step - 1) % self.per_iteration

    def is_barrier(self, step: int) -> bool:
        return step in (0, self.last)


class Receipt(NamedTuple):
    """What a signature is over, short of the message itself: enough to prove that two messages are in contradiction."""

    sender: int
    step: int
    digest: bytes  # of the message's content
    signature: bytes


class Message(NamedTuple):
    """A message whose sender and form have been checked."""

    kind: Kind
    sender: int
    step: int  # of a state: the first step of its iteration; of an ask: the step whose message is wanted
    vector: np.ndarray
    receipts: tuple[Receipt, ...]  # of the sender's messages of the step before
    digest: bytes
    signature: bytes
    frame: bytes = b""  # all of it, as it travels

    @property
    def receipt(self) -> Receipt:
        return Receipt(self.sender, self.step, self.digest, self.signature)


# Actions, to be carried out in the order given


class Log(NamedTuple):
    """Keep an own message where a crash does not reach it."""

    message: Message


class Send(NamedTuple):
    to: int
    message: Message


class SendState(NamedTuple):
    """Send the state with which this member began its iteration, `Message` of kind "state"."""

    to: int


class SetTimer(NamedTuple):
    """Call `timer_fired` with these, after the time that the timer stands for."""

    timer: Timer
    step: int


class Begin(NamedTuple):
    """Compute the first message of an iteration, then call `computed`."""

    iteration: int


class Combine(NamedTuple):
    """The step has ended with these messages [K], None where one is missing.

    Compute the next message of the iteration, or, after its last step, finish it; then call `computed` or `finished`.
    """

    step: int
    messages: tuple[Message | None, ...]


class Adopt(NamedTuple):
    """Combine these states [K] into the own one at the beginning of an iteration, then call `adopted`."""

    iteration: int
    states: tuple[Message | None, ...]


class Alarm(NamedTuple):
    """Too few messages to go on, for longer than a retry; an empty set: the alarm is over."""

    step: int
    missing: frozenset[int]


class Evidence(NamedTuple):
    """Two different messages, signed by one member for one step."""

    first: Receipt
    second: Receipt


class Count(NamedTuple):
    """A message that did not count, and why."""

    sender: int
    reason: str


class Finished(NamedTuple):
    """The run is over for this member."""


Action = Log | Send | SendState | SetTimer | Begin | Combine | Adopt | Alarm | Evidence | Count | Finished

# Makes the signed message of a step; must give the same for the same input.
Seal = Callable[[int, np.ndarray, tuple[Receipt, ...]], Message]
Verify = Callable[[Receipt], bool]

NOTHING = np.zeros(0, np.float32)
# Retries without a quorum after which a member says so loudly.
ALARM_AFTER = 10


@dataclass
class Protocol:
    """One member's view of the run."""

    course: Course
    seal: Seal
    seal_ask: Callable[[int], Message]
    verify: Verify
    iteration: int = 0  # to begin or go on with
    started: bool = False  # whether the start barrier has been passed, before a restart
    sent: dict[int, Message] = field(default_factory=dict)  # own messages, by step; never contradicted

    step: int = field(default=0, init=False)
    _inbox: dict[int, dict[int, Message]] = field(default_factory=dict, init=False)  # of this step and the next
    _seen: dict[int, dict[int, Receipt]] = field(default_factory=dict, init=False)  # by step and sender
    _positions: list[int] = field(default_factory=list, init=False)  # the latest step each member was heard in
    _states: dict[int, dict[int, Message]] = field(default_factory=dict, init=False)  # by sender and step
    _behind: set[int] = field(default_factory=set, init=False)
    _adopting: bool = field(default=False, init=False)
    _gracing: bool = field(default=False, init=False)  # the grace period of this step has begun
    _waited: int = field(default=0, init=False)  # how many retries this step has been short of a quorum
    _heard: set[int] = field(default_factory=set, init=False)  # members heard in this step, or grace period of the last
    _over: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._positions = [-1] * self.course.num_members

    @property
    def is_behind(self) -> bool:
        """Whether more members than can lie were heard in a later iteration."""
        later = self.course.first_step(self.iteration + 1)
        return sum(position >= later for position in self._positions) > self.course.num_byzantine

    # Events

    def start(self) -> list[Action]:
        """Begin, or go on after a restart."""
        if self._adopting:
            return []
        if self.iteration == 0 and not self.started:
            return self._enter(0) + self.computed(0, NOTHING)
        return self._begin(self.iteration)

    def computed(self, step: int, vector: np.ndarray) -> list[Action]:
        """The own vector of a step is there."""
        if step != self.step or self._adopting or self.course.own in self._inbox.get(step, {}):
            return []  # overtaken by an adopted state
        message, actions = self.sent.get(step), []
        if message is None:
            before = self._seen.get(step - 1, {})
            receipts = tuple(before[sender] for sender in sorted(before) if sender != self.course.own)
            message = self.sent[step] = self.seal(step, vector, receipts)
            actions.append(Log(message))
        self._inbox.setdefault(step, {})[self.course.own] = message
        actions += [Send(other, message) for other in self.course.others]
        return actions + self._progress()

    def finished(self, step: int) -> list[Action]:
        """The iteration that ends with a step is done, and its result is safe on the disk."""
        if step + 1 != self.step or self._adopting:
            return []
        return self._begin(self.course.iteration(step) + 1 if step else 0)

    def adopted(self, iteration: int) -> list[Action]:
        """The state at the beginning of an iteration has been taken over from others, and is safe on the disk."""
        self._adopting = False
        self._states.clear()
        return self._calm() + self._begin(iteration)

    def linked(self, other: int) -> list[Action]:
        """There is a new connection; what was sent over the old one may be lost."""
        message = self.sent.get(self.step)
        return [] if message is None else [Send(other, message)]

    def timer_fired(self, timer: Timer, step: int) -> list[Action]:
        if step != self.step or self._over:
            return []
        inbox = self._inbox.get(step, {})
        if timer == "grace":
            return self._grace_ended(inbox)
        actions: list[Action] = [SetTimer("retry", step)]
        if self._adopting:
            return actions
        short = len(inbox) < self.course.quorum
        missing = [other for other in self.course.others if other not in inbox]
        # One that cannot go on while others do needs a state of each, of those too whose message is here.
        ahead = self.is_behind or any(max(states) > step for states in self._states.values())
        far = ahead and not self._ready(inbox)
        actions += [Send(other, self.seal_ask(step)) for other in (self.course.others if far else missing)]
        if self.course.own in inbox and short:
            self._waited += 1
            if self._waited == ALARM_AFTER:
                actions.append(Alarm(step, frozenset(missing)))
        return actions

    def received(self, message: Message) -> list[Action]:
        """A message whose sender, form and signature have been checked."""
        sender, step = message.sender, message.step
        self._heard.add(sender)
        if message.kind == "ask":
            return self._asked(sender, step)
        self._positions[sender] = max(self._positions[sender], step)
        if message.kind == "state":
            return self._offered(message)
        known = self._inbox.get(step, {}).get(sender)
        if known is not None and known.digest == message.digest:
            return [Count(sender, "duplicate")]
        actions = self._witness(message.receipt, trusted=True)
        own, before = self.course.own, self._seen.get(step - 1, {})
        for receipt in message.receipts:
            if before.get(receipt.sender) == receipt:
                continue  # as most are: seen already
            if receipt.sender not in (sender, own) and receipt.step == step - 1:
                actions += self._witness(receipt, trusted=False)
        current = step in (self.step, self.step + 1)
        inbox = self._inbox.setdefault(step, {}) if current else {}
        if sender in inbox:
            actions.append(Count(sender, "duplicate"))
        elif not current:
            actions.append(Count(sender, "late" if step < self.step else "early"))
        else:
            inbox[sender] = message
            actions += self._progress()
        return actions

    # What follows from them

    def _ready(self, inbox: dict[int, Message]) -> bool:
        return self.course.own in inbox and len(inbox) >= self.course.quorum

    def _progress(self) -> list[Action]:
        inbox = self._inbox.get(self.step, {})
        if self._over or self._adopting or not self._ready(inbox):
            return []
        actions = self._calm()
        if len(inbox) == self.course.num_members:
            return actions + self._end_step()
        if not self._gracing:
            self._gracing = True
            actions.append(SetTimer("grace", self.step))
        return actions

    def _calm(self) -> list[Action]:
        """There is no reason for an alarm any more."""
        waited, self._waited = self._waited, 0
        return [Alarm(self.step, frozenset())] if waited >= ALARM_AFTER else []

    def _grace_ended(self, inbox: dict[int, Message]) -> list[Action]:
        if self._adopting or (self.step < self.course.last and not self._ready(inbox)):
            return []
        if not self._ready(inbox) and len(self._heard | inbox.keys()) >= self.course.quorum:
            self._heard.clear()
            return [SetTimer("grace", self.step)]  # there may be a quorum yet
        return self._calm() + self._end_step()

    def _end_step(self) -> list[Action]:
        step, inbox = self.step, self._inbox.get(self.step, {})
        if step == self.course.last:
            self._over = True
            return [Finished()]
        messages = tuple(inbox.get(each) for each in range(self.course.num_members))
        return [*self._enter(step + 1), Combine(step, messages)]

    def _enter(self, step: int) -> list[Action]:
        """Gather the messages of a step from now on."""
        self.step, self._gracing, self._waited = step, False, 0
        self._heard.clear()
        self._inbox = {each: inbox for each, inbox in self._inbox.items() if each in (step, step + 1)}
        self._seen = {each: seen for each, seen in self._seen.items() if each >= step - 2}
        inbox = self._inbox.get(step, {})
        # Those heard here or ahead have sent theirs already, and it was too early to be kept.
        ahead = [j for j in self.course.others if self._positions[j] >= step and j not in inbox]
        actions: list[Action] = [*(Send(j, self.seal_ask(step)) for j in ahead), SetTimer("retry", step)]
        return [*actions, SetTimer("grace", step)] if step == self.course.last else actions

    def _begin(self, iteration: int) -> list[Action]:
        """Begin an iteration; its state is safe on the disk."""
        self.iteration = iteration
        first = self.course.first_step(iteration)
        kept = self.course.first_step(iteration - 1) if iteration else 0
        self.sent = {step: message for step, message in self.sent.items() if step >= kept or not step}
        actions: list[Action] = []
        if self.step != first:
            actions += self._enter(first)
        actions += [SendState(other) for other in sorted(self._behind)]
        self._behind.clear()
        if iteration == self.course.num_iterations:
            return actions + self.computed(first, NOTHING)
        return [*actions, Begin(iteration)]

    def _asked(self, sender: int, step: int) -> list[Action]:
        if step in self.sent:
            return [Send(sender, self.sent[step])]
        if 0 < self.course.first_step(self.iteration - 1) > step and not self._adopting:
            self._behind.add(sender)  # and again where the next iteration begins, together with everybody else
            return [SendState(sender)]
        return []

    def _offered(self, message: Message) -> list[Action]:
        """Someone's state: worth something if others have one of the same iteration, which is ahead."""
        iteration = self.course.iteration(message.step)
        if message.step <= self.step or iteration <= self.iteration or self._adopting or self._over:
            return []  # before `start`, the step is not yet that of the iteration
        states = self._states.setdefault(message.sender, {})
        states[message.step] = message
        for old in sorted(states)[:-2]:
            del states[old]
        theirs = tuple(self._states.get(j, {}).get(message.step) for j in range(self.course.num_members))
        if sum(state is not None for state in theirs) < self.course.quorum:
            return []
        self._adopting = True
        return [Adopt(iteration, theirs)]

    def _witness(self, receipt: Receipt, trusted: bool) -> list[Action]:
        """Hold a signed receipt against what its signer was seen to sign."""
        if not self.step - 2 <= receipt.step <= self.step + 1:
            return []
        seen = self._seen.setdefault(receipt.step, {})
        known = seen.get(receipt.sender)
        if known is not None and known.digest == receipt.digest:
            return []
        if not trusted and not self.verify(receipt):
            return []
        if known is not None:
            return [Evidence(known, receipt)]
        seen[receipt.sender] = receipt
        return []
