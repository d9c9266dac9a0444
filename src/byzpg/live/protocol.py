"""Rounds without a leader, as a state machine: events in, actions out; no I/O, no clock, no randomness of its own.

A run is a sequence of rounds, and a *step* is the number of a round in it. Step 0 is the start barrier. Then every
iteration has one or more rounds of gradients and then κ of agreement. The last round is a barrier again, at which
members wait for those that are behind. In every round each member publishes one message and collects those of the
others.

A round ends when the messages of all awaited members have arrived, or when K − f have arrived (the member's own is one
of them) and a grace period has passed. Members that were absent several times in a row, or that provably equivocated,
are not awaited. With fewer than K − f messages a round does not end. The final barrier is the only exception: it also
ends after a grace period in which fewer than K − f members gave a sign of life, because the others have received all K
messages there and have left. If the members change, a barrier before the agreed iteration is the last round with the
old manifest. It ends with K − f messages at least, so that enough members hold the state for those that do not.

Messages are pushed and pulled: a member that lacks one asks its sender, which keeps the messages of this iteration and
of the one before. A member that is too far behind for that receives states instead. It adopts them once K − f members
have sent theirs for one iteration, or, after a while, 2f + 1.

A member must never sign two different messages for one step, even if its disk has lost what it signed. So it signs
nothing for steps up to `silent_through`, except for what it still has, and waits for a state of a later iteration. It
learns of forgotten messages from *echoes*: on every new connection, members tell each other the last message that they
have from one another. After a start, a member signs nothing before it has heard enough of them.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

Kind = Literal["vector", "ask", "state", "echo"]
Timer = Literal["grace", "retry", "echoes"]


@dataclass(frozen=True, kw_only=True)
class Course:
    """The sequence of rounds, and the members that take part."""

    num_members: int  # K
    num_byzantine: int  # f, how many faulty members the rules tolerate
    own: int  # this member's index
    exchanges: int = 1  # rounds of gradients in an iteration
    rounds: int  # κ, of agreement
    num_iterations: int  # T

    @cached_property
    def quorum(self) -> int:
        """K − f: how many messages a round needs."""
        return self.num_members - self.num_byzantine

    @cached_property
    def state_quorum(self) -> int:
        """2f + 1, but at most K − f: how many states of one iteration are enough to adopt it.

        With f of them false, every coordinate of their trimmed mean lies between two honest ones.
        """
        return min(2 * self.num_byzantine + 1, self.quorum)

    @cached_property
    def per_iteration(self) -> int:
        """The number of rounds in an iteration."""
        return self.exchanges + self.rounds

    @cached_property
    def last(self) -> int:
        """The step of the final barrier."""
        return self.first_step(self.num_iterations)

    @cached_property
    def others(self) -> tuple[int, ...]:
        return tuple(each for each in range(self.num_members) if each != self.own)

    def first_step(self, iteration: int) -> int:
        """The step with which an iteration begins; for iteration T, the final barrier."""
        return 1 + iteration * self.per_iteration

    def iteration(self, step: int) -> int:
        """The iteration of a step; 0 for the start barrier."""
        return max(0, (step - 1) // self.per_iteration)

    def phase(self, step: int) -> int:
        """The number of a step in its iteration, from 0: rounds of gradients, then of agreement. Not for barriers."""
        return (step - 1) % self.per_iteration

    def is_barrier(self, step: int) -> bool:
        return step in (0, self.last)

    def last_step(self, iteration: int) -> int:
        """The last step of an iteration; the last iteration includes the final barrier."""
        return self.last if iteration + 1 >= self.num_iterations else self.first_step(iteration + 1) - 1


class Receipt(NamedTuple):
    """What a signature covers, without the message itself. Two receipts are enough to prove equivocation."""

    sender: int
    step: int
    digest: bytes  # of the message's content
    signature: bytes


class Message(NamedTuple):
    """A message whose sender and format have been checked."""

    kind: Kind
    sender: int
    step: int  # for a state, the first step of its iteration; for an ask or an echo, that of the message in question
    vector: np.ndarray
    receipts: tuple[Receipt, ...]  # of the messages received in the round before; in an echo, the receiver's own
    digest: bytes
    signature: bytes
    frame: bytes = b""  # the whole message, as it is sent

    @property
    def receipt(self) -> Receipt:
        return Receipt(self.sender, self.step, self.digest, self.signature)


# Actions, to be carried out in the given order


class Log(NamedTuple):
    """Store one of the member's own messages where it survives a crash of the process."""

    message: Message


class Send(NamedTuple):
    """Send a message to a member."""

    to: int
    message: Message


class SendState(NamedTuple):
    """Send the state with which this member began its iteration, as a `Message` of kind "state".

    With `previous`, send that of the iteration before as well: the members ahead may be in either of the two.
    """

    to: int
    previous: bool = False


class SetTimer(NamedTuple):
    """Call `timer_fired` with these arguments, after the time that belongs to the timer."""

    timer: Timer
    step: int


class Begin(NamedTuple):
    """Compute the first message of an iteration, then call `computed`."""

    iteration: int


class Combine(NamedTuple):
    """Combine the messages [K] of a round that has ended; None where one is missing.

    Compute the next message of the iteration and call `computed`, or, after the iteration's last round, finish it and
    call `finished`.
    """

    step: int
    messages: tuple[Message | None, ...]


class Adopt(NamedTuple):
    """Combine these states [K] into the member's own at the beginning of an iteration, then call `adopted`."""

    iteration: int
    states: tuple[Message | None, ...]


class Alarm(NamedTuple):
    """Report that a round has been short of a quorum for several retries; with no one missing, that this is over."""

    step: int
    missing: frozenset[int]


class Evidence(NamedTuple):
    """Keep the proof of equivocation: two different messages that one member signed for one step."""

    first: Receipt
    second: Receipt
    kind: Kind = "vector"


class Forgotten(NamedTuple):
    """Report that this member has signed a message which it does not have: its files are older than that."""

    receipt: Receipt
    reported_by: int


class Count(NamedTuple):
    """Count a message that was not used, by the reason."""

    sender: int
    reason: str


class Finished(NamedTuple):
    """The run is over for this member."""


Action = Log | Send | SendState | SetTimer | Begin | Combine | Adopt | Alarm | Evidence | Forgotten | Count | Finished

# Makes the signed message of a step; the same input must give the same message.
Seal = Callable[[int, np.ndarray, tuple[Receipt, ...]], Message]
Verify = Callable[[Receipt], bool]

NOTHING = np.zeros(0, np.float32)
# How many retries without a quorum make a member raise an alarm.
ALARM_AFTER = 10
# How many grace periods a member waits at the final barrier for a quorum; those that come later find its final state.
MOST_LINGERS = 3
# How often a member asks for messages of an earlier iteration before it is sent states as well.
MANY_ASKS = 5
# After how many rounds without its message a member is no longer awaited.
ABSENT_AFTER = 3


@dataclass(kw_only=True)
class Protocol:
    """One member's view of the run.

    Every method that reports an event returns the actions that follow from it.
    """

    course: Course
    seal: Seal
    seal_ask: Callable[[int], Message]
    seal_echo: Callable[[Receipt | None], Message]
    verify: Verify
    iteration: int = 0  # the one to begin, or to continue after a restart
    started: bool = False  # whether the start barrier was passed before a restart
    sent: dict[int, Message] = field(default_factory=dict)  # own messages by step; never replaced by different ones
    silent_through: int = -1  # the last step for which a message may have been signed and lost
    forgetful: bool = False  # whether even that is unknown, and only the other members can tell
    masked: set[int] = field(default_factory=set)  # members that provably equivocated: their messages do not count
    # With a new manifest after the final barrier, the members that it removes. Nobody goes there without a quorum.
    leaving: frozenset[int] | None = None
    rehearses: bool = False  # whether other messages are sent than those in `sent`, on purpose

    step: int = field(default=0, init=False)
    _inbox: dict[int, dict[int, Message]] = field(default_factory=dict, init=False)  # this step's and the next one's
    _seen: dict[int, dict[int, Receipt]] = field(default_factory=dict, init=False)  # by step and sender
    _positions: list[int] = field(default_factory=list, init=False)  # the latest step heard of each member
    _states: dict[int, dict[int, Message]] = field(default_factory=dict, init=False)  # by sender and step
    _behind: set[int] = field(default_factory=set, init=False)  # members that need a state
    _gone: set[int] = field(default_factory=set, init=False)  # members that have a new manifest already
    _lingers: int = field(default=0, init=False)  # grace periods at the final barrier without a quorum
    _lagging: Counter[int] = field(default_factory=Counter, init=False)  # asks for earlier iterations, by member
    _adopting: bool = field(default=False, init=False)
    _gracing: bool = field(default=False, init=False)  # whether the grace period of this step has begun
    _waited: int = field(default=0, init=False)  # for how many retries this step has been short of a quorum
    _heard: set[int] = field(default_factory=set, init=False)  # since this step, or its latest grace period, began
    _over: bool = field(default=False, init=False)
    _latest: dict[int, Receipt] = field(default_factory=dict, init=False)  # of each member's message of the latest step
    _absences: list[int] = field(default_factory=list, init=False)  # rounds in a row without a member's message
    _echoed: set[int] = field(default_factory=set, init=False)  # members that told what they have from this one
    _cleared: bool = field(default=False, init=False)  # whether enough of them have, to sign something new
    _unsigned: tuple[int, np.ndarray] | None = field(default=None, init=False)  # a step's vector, until then
    _has_adopted: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.silent_through > 0:  # whole iterations: what one may sign of an iteration is reserved as a whole
            self.silent_through = self.course.last_step(self.course.iteration(self.silent_through))
        self._positions = [-1] * self.course.num_members
        self._absences = [0] * self.course.num_members
        # What the others had sent is known from the receipts in this member's own messages.
        for _, message in sorted(self.sent.items()):
            self._latest |= {receipt.sender: receipt for receipt in message.receipts}

    @property
    def absent(self) -> frozenset[int]:
        """Members that are not awaited, because they were absent several times in a row."""
        return frozenset(other for other in self.course.others if self._absences[other] >= ABSENT_AFTER)

    @property
    def is_silent(self) -> bool:
        """Whether this member may have signed a message for its step and lost it."""
        return self.step <= self.silent_through and self.step not in self.sent and self.step > 0

    @property
    def is_behind(self) -> bool:
        """Whether more than f members, so at least one honest member, were heard in a later iteration."""
        later = self.course.first_step(self.iteration + 1)
        return sum(position >= later for position in self._positions) > self.course.num_byzantine

    def may_reserve(self, iteration: int) -> bool:
        """Whether what this member signs in an iteration may be marked as known, so that nothing lost is covered up."""
        return (self._cleared or not self.forgetful) and self.course.first_step(iteration) > self.silent_through

    @property
    def num_behind(self) -> int:
        """How many members were last heard more than an iteration ago, in steps."""
        recent = self.step - self.course.per_iteration
        return sum(self._positions[other] < recent for other in self.course.others)

    @property
    def num_ahead(self) -> int:
        """How many members have been heard in this step or later."""
        return sum(self._positions[other] >= self.step for other in self.course.others)

    # Events

    def start(self) -> list[Action]:
        """The member starts, or continues after a restart."""
        if self._adopting:
            return []
        if self.iteration == 0 and not self.started:
            return self._enter(0) + self.computed(0, NOTHING)
        return self._begin(self.iteration)

    def computed(self, step: int, vector: np.ndarray) -> list[Action]:
        """The member's own vector of a step has been computed."""
        if step != self.step or self._adopting or self.course.own in self._inbox.get(step, {}):
            return []  # an adopted state was faster
        message, actions = self.sent.get(step), []
        if message is None and step > 0 and not self._cleared:
            timer = [] if self._unsigned is not None and self._unsigned[0] == step else [SetTimer("echoes", step)]
            self._unsigned = step, vector
            return [*timer, *self._clear(patient=True)]
        if message is None and self.is_silent:
            return []
        if message is None:
            before = self._seen.get(step - 1, {})
            receipts = tuple(before[sender] for sender in sorted(before) if sender != self.course.own)
            message = self.sent[step] = self.seal(step, vector, receipts)
            actions.append(Log(message))
        self._inbox.setdefault(step, {})[self.course.own] = message
        actions += [Send(other, message) for other in self.course.others]
        return actions + self._progress()

    def finished(self, step: int) -> list[Action]:
        """The iteration that ends with a step is finished, and its result is safe on the disk."""
        if step + 1 != self.step or self._adopting:
            return []
        return self._begin(self.course.iteration(step) + 1 if step else 0)

    def adopted(self, iteration: int) -> list[Action]:
        """The state at the beginning of an iteration was adopted from other members, and is safe on the disk."""
        self._adopting, self._has_adopted = False, True
        self._states.clear()
        return self._calm() + self._begin(iteration)

    def linked(self, other: int, *, echoes: bool = True) -> list[Action]:
        """There is a new connection to a member; what was sent over the old one may be lost.

        Args:
            other: The member.
            echoes: Whether it tells what it has from this one; members with an old version do not.
        """
        message = self.sent.get(self.step)
        actions: list[Action] = [Send(other, self.seal_echo(self._latest.get(other)))] if echoes else []
        actions += [] if message is None else [Send(other, message)]
        return actions if echoes else actions + self._heard_echo(other)

    def changed(self, other: int) -> list[Action]:
        """A member has a new manifest already."""
        self._gone.add(other)
        return self._progress()

    def timer_fired(self, timer: Timer, step: int) -> list[Action]:
        """The time of a `SetTimer` has passed."""
        if step != self.step or self._over:
            return []
        inbox = self._inbox.get(step, {})
        if timer == "grace":
            return self._grace_ended(inbox)
        if timer == "echoes":
            if self._cleared:
                return []
            asks: list[Action] = [
                Send(each, self.seal_ask(0)) for each in self.course.others if each not in self._echoed
            ]
            return [SetTimer("echoes", step), *asks, *self._clear(patient=False)]
        actions: list[Action] = [SetTimer("retry", step)]
        if self._adopting:
            return actions
        if adopted := self._adopt_from(self.course.state_quorum):
            return actions + adopted
        missing = [other for other in self.course.others if other not in inbox]
        # A member that is stuck here while others are ahead needs a state from each of them, also from those whose
        # message it has. One that must be silent needs states in any case: it asks for what nobody keeps.
        others_ahead = self.is_behind or any(max(states) > step for states in self._states.values())
        asked = self.course.others if self.is_silent or (others_ahead and not self._ready(inbox)) else missing
        actions += [Send(other, self.seal_ask(1 if self.is_silent else step)) for other in asked]
        waits = self.course.own in inbox or self.is_silent or self._unsigned is not None  # it has computed its vector
        if len(inbox) < self.course.quorum and waits:
            self._waited += 1
            if self._waited == ALARM_AFTER:
                actions.append(Alarm(step, frozenset(missing)))
        return actions

    def received(self, message: Message) -> list[Action]:
        """A message has arrived; its sender, format and signature have been checked."""
        sender, step = message.sender, message.step
        self._heard.add(sender)
        if message.kind == "ask":
            return self._asked(sender, step)
        if message.kind == "echo":
            reports = [action for receipt in message.receipts for action in self._own_seen(receipt, sender)]
            return reports + self._heard_echo(sender)
        if self._is_masked(sender, step) or (sender in self.masked and message.kind == "state"):
            return [Count(sender, "masked")]
        self._positions[sender] = max(self._positions[sender], step)
        if message.kind == "state":
            return self._offered(message)
        known = self._inbox.get(step, {}).get(sender)
        if known is not None and known.digest == message.digest:
            return [Count(sender, "duplicate")]
        actions = self._witness(message.receipt, trusted=True)
        own, before = self.course.own, self._seen.get(step - 1, {})
        for receipt in message.receipts:
            if receipt.sender == own:
                actions += self._own_seen(receipt, sender)
            elif before.get(receipt.sender) != receipt and receipt.sender != sender:  # most are seen already
                actions += self._witness(receipt, trusted=False, sender=sender)
        if step > self.step - self.course.per_iteration:
            self._absences[sender] = 0
        if self._is_masked(sender, step):
            return actions
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

    # What follows from events

    def _is_masked(self, sender: int, step: int) -> bool:
        """Whether a member's message of a step does not count. At a barrier it does, so that all leave together."""
        return sender in self.masked and not self.course.is_barrier(step)

    def _ready(self, inbox: dict[int, Message]) -> bool:
        """Whether a round has a quorum, the member's own message included.

        Before a new manifest, those that have it already have passed the barrier.
        """
        gone = self._gone - inbox.keys() if self.leaving is not None and self.step == self.course.last else ()
        return self.course.own in inbox and len(inbox) + len(gone) >= self.course.quorum

    def _progress(self) -> list[Action]:
        """End the current round, or begin its grace period, if its messages allow that."""
        inbox = self._inbox.get(self.step, {})
        if self._over or self._adopting or not self._ready(inbox):
            return []
        actions = self._calm()
        not_awaited = self.masked | self.absent
        if self.course.is_barrier(self.step):
            not_awaited = self.leaving | self._gone if self.leaving is not None and self.step else frozenset()
        if all(other in inbox or other in not_awaited for other in self.course.others):
            return actions + self._end_step()
        if not self._gracing:
            self._gracing = True
            actions.append(SetTimer("grace", self.step))
        return actions

    def _calm(self) -> list[Action]:
        """End an alarm, if there is one."""
        waited, self._waited = self._waited, 0
        return [Alarm(self.step, frozenset())] if waited >= ALARM_AFTER else []

    def _grace_ended(self, inbox: dict[int, Message]) -> list[Action]:
        """End the current round, if it has a quorum or if the other members have left the final barrier."""
        if self._adopting:
            return []
        if not self._ready(inbox):
            if self.step < self.course.last or self.leaving is not None:
                return []
            may_be_quorum = len(self._heard | inbox.keys()) >= self.course.quorum and not self.is_silent
            if may_be_quorum and self._lingers < MOST_LINGERS:
                self._lingers += 1
                self._heard.clear()
                return [SetTimer("grace", self.step)]
        return self._calm() + self._end_step()

    def _end_step(self) -> list[Action]:
        step, inbox = self.step, self._inbox.get(self.step, {})
        if step == self.course.last:
            self._over = True
            return [Finished()]
        messages = tuple(inbox.get(each) for each in range(self.course.num_members))
        for other in self.course.others:
            self._absences[other] = 0 if other in inbox else self._absences[other] + 1
        return [*self._enter(step + 1), Combine(step, messages)]

    def _enter(self, step: int) -> list[Action]:
        """Collect the messages of a step from now on."""
        self.step, self._gracing, self._waited = step, False, 0
        self._heard.clear()
        self._inbox = {
            each: {sender: message for sender, message in inbox.items() if not self._is_masked(sender, each)}
            for each, inbox in self._inbox.items()
            if each in (step, step + 1)
        }
        self._seen = {each: seen for each, seen in self._seen.items() if each >= step - 2}
        inbox = self._inbox.get(step, {})
        # Members that are here or ahead have sent their message already, and it came too early to be kept.
        ahead = [other for other in self.course.others if self._positions[other] >= step and other not in inbox]
        actions: list[Action] = [Send(other, self.seal_ask(step)) for other in ahead]
        actions.append(SetTimer("retry", step))
        if step == self.course.last:
            actions.append(SetTimer("grace", step))
        return actions

    def _begin(self, iteration: int) -> list[Action]:
        """Begin an iteration whose state is safe on the disk."""
        self.iteration = iteration
        first = self.course.first_step(iteration)
        oldest = self.course.first_step(iteration - 1) if iteration > 0 else 0
        self.sent = {step: message for step, message in self.sent.items() if step >= oldest or step == 0}
        actions: list[Action] = []
        if self.step != first:
            actions += self._enter(first)
        actions += [SendState(other) for other in sorted(self._behind) if self._may_sign_state(iteration)]
        self._behind.clear()
        self._lagging.clear()
        if iteration == self.course.num_iterations:
            return actions + self.computed(first, NOTHING)
        return [*actions, Begin(iteration)]

    def _asked(self, sender: int, step: int) -> list[Action]:
        """Answer with the message of a step or, if that is no longer kept, with a state.

        A member that asks again and again for a message of an earlier iteration may lack those of others, who keep it
        no longer: it gets both. States of two iterations are sent then, because the members ahead may be in either.
        """
        message = self.sent.get(step)
        actions: list[Action] = [] if message is None else [Send(sender, message)]
        if step == 0:
            return [*actions, Send(sender, self.seal_echo(self._latest.get(sender)))]
        asked_again = sender in self._behind or self._lagging[sender] >= MANY_ASKS
        if step >= self.course.first_step(self.iteration) or self._adopting:
            return actions
        if message is None:
            # The state is sent again when the next iteration begins, at the same time as those of the other members.
            self._behind.add(sender)
        self._lagging[sender] += 1
        if self._may_sign_state(self.iteration) and (message is None or asked_again):
            actions.append(SendState(sender, previous=asked_again and self._may_sign_state(self.iteration - 1)))
        return actions

    def _may_sign_state(self, iteration: int) -> bool:
        """Whether this member cannot have signed another state for the same iteration.

        One that it has adopted may differ from one that it has forgotten, of which the others can tell.
        """
        told = self._cleared or not (self.forgetful or self._has_adopted)
        return told and self.course.first_step(iteration) > self.silent_through

    def _offered(self, message: Message) -> list[Action]:
        """Keep a member's state of a later iteration; adopt it once K − f members have sent theirs."""
        step = message.step
        if not self._may_adopt(step) or self._adopting or self._over:
            return [Count(message.sender, "late")]
        states = self._states.setdefault(message.sender, {})
        known = states.setdefault(step, message)
        if known.digest != message.digest:
            return self._proven(Evidence(known.receipt, message.receipt, "state"))
        for old in sorted(states)[:-2]:
            del states[old]
        return self._adopt_from(self.course.quorum)

    def _may_adopt(self, step: int) -> bool:
        """Whether a state is later than this member's own, and from an iteration in which it may sign."""
        later = step > self.step and self.course.iteration(step) > self.iteration  # before `start`, the step is 0
        return later and (step > self.silent_through or step == self.course.last)

    def _adopt_from(self, quorum: int) -> list[Action]:
        """Adopt the latest iteration for which this many members have sent their states."""
        steps = {step for states in self._states.values() for step in states if self._may_adopt(step)}
        for step in sorted(steps, reverse=True):
            offers = tuple(self._states.get(each, {}).get(step) for each in range(self.course.num_members))
            if sum(state is not None for state in offers) >= quorum:
                self._adopting = True
                return [Adopt(self.course.iteration(step), offers)]
        return []

    def _witness(self, receipt: Receipt, trusted: bool, sender: int = -1) -> list[Action]:
        """Compare a receipt with what its signer is known to have signed; a difference is equivocation.

        Args:
            receipt: The receipt of a message.
            trusted: Whether its signature has been verified already.
            sender: The member that passed on a receipt that is not trusted.
        """
        latest = self._latest.get(receipt.sender)
        if trusted and (latest is None or receipt.step > latest.step):
            self._latest[receipt.sender] = receipt
        if not self.step - 2 <= receipt.step <= self.step + 1:
            return []
        seen = self._seen.setdefault(receipt.step, {})
        known = seen.get(receipt.sender)
        if known is not None and known.digest == receipt.digest:
            return []
        if not trusted and not self.verify(receipt):
            return [Count(sender, "receipt")]
        if known is not None:
            return self._proven(Evidence(known, receipt))
        seen[receipt.sender] = receipt
        return []

    def _proven(self, evidence: Evidence) -> list[Action]:
        """Do not count a member's messages from now on."""
        sender = evidence.first.sender
        self.masked.add(sender)
        self._states.pop(sender, None)
        return [evidence]

    # What this member may have signed and forgotten

    def _own_seen(self, receipt: Receipt, reported_by: int) -> list[Action]:
        """Compare a receipt of this member's own message with what it knows to have signed."""
        known = self.sent.get(receipt.step)
        if receipt.step == 0 or self.rehearses or (known is not None and known.digest == receipt.digest):
            return []
        kept_since = self.course.first_step(self.iteration - 1) if self.iteration > 0 else 0
        if receipt.sender != self.course.own or receipt.step < kept_since or not self.verify(receipt):
            return []
        # It may also have signed the state with which the next iteration begins.
        through = self.course.last_step(self.course.iteration(receipt.step) + 1)
        if through <= self.silent_through:
            return []
        # What is known to be lost is no news, unless it still has another message of that step.
        is_news = known is not None or receipt.step > self.silent_through
        self.silent_through = through
        return [Forgotten(receipt, reported_by)] if is_news else []

    def _heard_echo(self, other: int) -> list[Action]:
        self._echoed.add(other)
        return self._clear(patient=True)

    def _clear(self, *, patient: bool) -> list[Action]:
        """Sign what waits for the echoes of the others, once K − f are known.

        Args:
            patient: Whether to wait for all others, which the next `SetTimer` ends.
        """
        # One that has forgotten everything must also know where the others are.
        known = [other for other in self._echoed if not self.forgetful or self._positions[other] > 0]
        missing = self.course.num_members - 1 - len(known)
        if self._cleared or missing > (0 if patient else self.course.num_byzantine):
            return []
        self._cleared = True
        if self.forgetful:
            here = self.course.last_step(self.iteration)
            self.silent_through = max(self.silent_through, here, self._signed_at_most())
        (step, vector), self._unsigned = self._unsigned or (-1, NOTHING), None
        return self.computed(step, vector)

    def _signed_at_most(self) -> int:
        """The last step for which this member can have signed a message, by where the others are.

        A member that signs in an iteration has finished the one before with K − f messages, so all but f of the others
        have reached at least that one.
        """
        reached = sorted(self._positions)[-1 - self.course.num_byzantine]
        return self.course.last_step(self.course.iteration(reached) + 1)
