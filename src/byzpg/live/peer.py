"""One running member, which carries out the protocol's actions with a network, a disk and an agent.

Everything but the agent's computation happens in one event loop. The computation has a thread of its own, so that the
loop keeps answering other members.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from typing import Any
from typing import Protocol as Interface
from uuid import UUID

import numpy as np

from byzpg.live.identity import PrivateIdentity
from byzpg.live.links import Events, Links
from byzpg.live.manifest import Manifest
from byzpg.live.protocol import (
    NOTHING,
    Action,
    Adopt,
    Alarm,
    Begin,
    Combine,
    Count,
    Evidence,
    Finished,
    Message,
    Protocol,
    Send,
    SendState,
    SetTimer,
    Timer,
)
from byzpg.live.protocol import (
    Log as LogMessage,
)
from byzpg.live.status import Log, Status
from byzpg.live.store import Store
from byzpg.live.wire import Codec, Rejected
from byzpg.robust.geometry import is_sound_on_host

# A member can equivocate in every round; this many proofs against it are enough.
EVIDENCE_PER_MEMBER = 20
FLUSH_SECONDS = 3.0
REPORT_SECONDS = 0.4  # the shortest time between two status reports
SMALL = 2**18  # numbers that are combined in the event loop; see `_is_small`


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state at the beginning of an iteration; the first one is written after the start barrier."""

    iteration: int
    snapshot: np.ndarray

    def parts(self) -> tuple[bytes, memoryview]:
        """The bytes of a record, without a copy."""
        return self.iteration.to_bytes(8, "little"), np.ascontiguousarray(self.snapshot, "<f4").data.cast("B")

    @classmethod
    def of(cls, content: bytes) -> "Checkpoint":
        return cls(int.from_bytes(content[:8], "little"), np.frombuffer(content, "<f4", offset=8))


class Computation(Interface):
    """What a member computes between messages."""

    @property
    def num_iterations(self) -> int: ...

    @property
    def rounds(self) -> int: ...

    @property
    def dimension(self) -> int: ...

    @property
    def state_dimension(self) -> int: ...

    @property
    def plan_digest(self) -> str:
        """A hash of what all members must have computed alike."""
        ...

    def warm_up(self) -> None: ...

    def begin(self, iteration: int) -> np.ndarray: ...

    def combine(self, iteration: int, phase: int, received: np.ndarray, present: np.ndarray) -> np.ndarray | None: ...

    def snapshot(self) -> np.ndarray: ...

    def restore(self, iteration: int, snapshot: np.ndarray) -> None: ...

    def adopt(self, iteration: int, states: Sequence[np.ndarray | None]) -> None: ...

    def observe(self, status: Status, iteration: int, phase: int | None) -> dict[str, Any]:
        """Record the last round or, if phase is None, the last iteration; return numbers to keep."""
        ...


# The bytes that a rehearsal sends to a member in place of a message; None to send nothing.
Outgoing = Callable[[int, Message], bytes | None]


class LivePeer:
    """One member of a federation, on a network.

    Args:
        manifest: The federation.
        own: The position of this member.
        private: Its keys.
        store: Its directory.
        computation: Its agent.
        status: Where it records what happens.
        log: Where it logs events.
        listen: Where to accept connections, host:port.
        delay: Seconds to wait before every message, to rehearse a slow member.
    """

    def __init__(
        self,
        *,
        manifest: Manifest,
        own: int,
        private: PrivateIdentity,
        store: Store,
        computation: Computation,
        status: Status,
        log: Log,
        listen: str,
        delay: float = 0.0,
    ) -> None:
        self.manifest, self.own, self.private, self.store, self.log = manifest, own, private, store, log
        self.computation, self.status = computation, status
        self.course = manifest.course(own, num_iterations=computation.num_iterations, rounds=computation.rounds)
        self.codec = self._new_codec()
        self.outgoing: Outgoing | None = None
        kept_messages = 2 * self.course.per_iteration + 2  # of this iteration, the one before, and both barriers
        self._outbox = store.records("outbox.bin", kept_messages, self.codec.largest)
        self._checkpoints = store.records("checkpoints.bin", 2, 8 + 4 * computation.state_dimension)
        found = self._checkpoints.read()
        self._num_checkpoints = max(found, default=-1) + 1  # a new checkpoint never overwrites the newest one
        self._checkpoint = Checkpoint.of(found[max(found)]) if found else None
        if self._checkpoint is not None:
            computation.restore(self._checkpoint.iteration, self._checkpoint.snapshot)
        self.protocol = self._new_protocol()
        self.links = self._new_links(listen, delay)
        status.connected = self.links.connected
        self._jobs: asyncio.Queue[Callable[[], Callable[[], list[Action]]]] = asyncio.Queue()
        # Combining a few short vectors takes less time than passing them to another thread.
        self._is_small = self.course.num_members * computation.dimension <= SMALL
        self._over = asyncio.Event()
        self._failure: Exception | None = None
        self._step_began = 0.0
        self._report_time, self._last_report = -inf, b""
        self._state_message: Message | None = None

    def _new_codec(self) -> Codec:
        return Codec(
            course=self.course,
            manifest=self.manifest.digest,
            run=UUID(self.manifest.run).bytes,
            dimension=self.computation.dimension,
            state_dimension=self.computation.state_dimension,
            keys=[member.verifier() for member in self.manifest.members],
        )

    def _new_protocol(self) -> Protocol:
        """The protocol at the newest checkpoint, or at the start barrier if there is none."""
        return Protocol(
            course=self.course,
            seal=self.seal,
            seal_ask=lambda step: self.codec.encode("ask", step, NOTHING, (), self.private.signing),
            verify=self.codec.verify,
            iteration=0 if self._checkpoint is None else self._checkpoint.iteration,
            started=self._checkpoint is not None,
            sent=self._own_messages(),
        )

    def _new_links(self, listen: str, delay: float) -> Links:
        events = Events(
            received=self._received,
            linked=self._linked,
            unlinked=self._unlinked,
            refused=self._refused,
            status=self._report,
        )
        return Links(
            manifest=self.manifest,
            own=self.own,
            private=self.private,
            largest=self.codec.largest,
            listen=listen,
            events=events,
            plan_digest=self.computation.plan_digest,
            delay=delay,
        )

    def _own_messages(self) -> dict[int, Message]:
        """The messages that were logged before a restart, and that of the start barrier, which is always the same."""
        logged = {step: self.codec.decode(frame, self.own) for step, frame in self._outbox.read().items()}
        return {0: self.seal(0, NOTHING, ()), **logged} if self._checkpoint is not None else logged

    def seal(self, step: int, vector: np.ndarray, receipts: tuple) -> Message:
        """Sign this member's message of a step."""
        return self.codec.encode("vector", step, vector, receipts, self.private.signing)

    async def run(self) -> None:
        """Take part until the run is over."""
        self.status.iteration = self.protocol.iteration
        self.log("start", iteration=self.protocol.iteration, restarted=self._checkpoint is not None)
        with ThreadPoolExecutor(1, "agent") as pool:
            loop = asyncio.get_running_loop()
            await self.links.open()
            worker = asyncio.create_task(self._work(pool))
            over = asyncio.create_task(self._over.wait())
            try:
                await loop.run_in_executor(pool, self.computation.warm_up)
                self.log("ready")
                self._react(self.protocol.start)
                await asyncio.wait((worker, over), return_when=asyncio.FIRST_COMPLETED)
                if worker.done():
                    worker.result()
                if self._failure is not None:
                    raise self._failure
                await self.links.flush(FLUSH_SECONDS)
            finally:
                for task in (worker, over):
                    task.cancel()
                await asyncio.gather(worker, over, return_exceptions=True)
                await self.links.close()
                self.log("end", state=self.status.state)

    async def _work(self, pool: ThreadPoolExecutor) -> None:
        """Run the computations one after the other, and tell the protocol their results."""
        loop = asyncio.get_running_loop()
        while True:
            job = await self._jobs.get()
            self._react(await loop.run_in_executor(pool, job))

    # The protocol's actions

    def _react(self, event: Callable[[], list[Action]]) -> None:
        """Pass an event to the protocol, and carry out its actions. If one fails, the member stops.

        It must not continue with some actions undone: it could send a message that it has not logged.
        """
        if self._failure is None:
            try:
                self._do(event())
            except Exception as error:
                self._failure = error
                self._over.set()

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(to, message):
                    self._send(to, message)
                case LogMessage(message):
                    self._outbox.put(message.step, message.frame)
                    self._step_began = asyncio.get_running_loop().time()
                case SetTimer(timer, step):
                    asyncio.get_running_loop().call_later(self._seconds(timer, step), self._fire, timer, step)
                case Begin(iteration):
                    self._jobs.put_nowait(lambda iteration=iteration: self._begin(iteration))
                case Combine():
                    self._step_ended(action)
                    if self._is_small:
                        self._do(self._combine(action)())
                    else:
                        self._jobs.put_nowait(lambda action=action: self._combine(action))
                case Adopt():
                    self.log("rejoin", iteration=action.iteration, states=self._named(action.states))
                    self._jobs.put_nowait(lambda action=action: self._adopt(action))
                case SendState(to):
                    self._send_state(to)
                case Alarm():
                    self._alarm(action)
                case Evidence():
                    self._evidence(action)
                case Count(sender, reason):
                    self._count(sender, reason)
                case Finished():
                    self.status.state = "finished"
                    self.log("finished", iteration=self.course.num_iterations)
                    self._over.set()
        self.status.step = self.protocol.step

    def _send(self, to: int, message: Message) -> None:
        frame = message.frame if self.outgoing is None else self.outgoing(to, message)
        if frame is not None:
            self.links.send(to, message, frame)

    def _send_state(self, to: int) -> None:
        assert self._checkpoint is not None
        step = self.course.first_step(self._checkpoint.iteration)
        if self._state_message is None or self._state_message.step != step:
            self._state_message = self.codec.encode("state", step, self._checkpoint.snapshot, (), self.private.signing)
        self.log.seldom("state sent", to, to=self._name(to), iteration=self._checkpoint.iteration)
        self.links.send(to, self._state_message)

    def _seconds(self, timer: Timer, step: int) -> float:
        times = self.manifest.times
        if timer == "retry":
            return times.retry
        return {0: times.start_grace, self.course.last: times.linger}.get(step, times.grace)

    def _fire(self, timer: Timer, step: int) -> None:
        if not self._over.is_set():
            self._react(lambda: self.protocol.timer_fired(timer, step))
            if step == self.protocol.step and timer == "retry":
                self._look_behind()

    def _look_behind(self) -> None:
        if self.status.state == "running" and self.protocol.is_behind:
            self.status.state = "behind"
            self.log.seldom("behind", level="warning", iteration=self.protocol.iteration)

    # Computations, in the agent's thread; what they return runs in the event loop

    def _begin(self, iteration: int) -> Callable[[], list[Action]]:
        vector = self.computation.begin(iteration)
        return lambda: self._computed(self.course.first_step(iteration), vector)

    def _computed(self, step: int, vector: np.ndarray) -> list[Action]:
        if is_sound_on_host(vector):
            return self.protocol.computed(step, vector)
        # It cannot send this vector, so it waits until the others are far enough ahead to send it their states.
        words = "this member's vector is not finite or too large; waiting for the states of the others"
        self.log("unsound", level="error", step=step, words=words)
        return []

    def _combine(self, action: Combine) -> Callable[[], list[Action]]:
        step, iteration = action.step, self.course.iteration(action.step)
        if step == 0:
            first = self._saved(0)
            return lambda: self._finished(step, first, {})
        phase = self.course.phase(step)
        received = np.zeros((self.course.num_members, self.computation.dimension), np.float32)
        for sender, message in enumerate(action.messages):
            if message is not None:
                received[sender] = message.vector
        present = np.asarray([message is not None for message in action.messages])
        vector = self.computation.combine(iteration, phase, received, present)
        self.computation.observe(self.status, iteration, phase)
        if vector is not None:
            return lambda: self._computed(step + 1, vector)
        record = self.computation.observe(self.status, iteration, None)
        self.store.append_progress({"iteration": iteration, **record})
        checkpoint = self._saved(iteration + 1)
        return lambda: self._finished(step, checkpoint, record)

    def _saved(self, iteration: int) -> Checkpoint:
        checkpoint = Checkpoint(iteration, self.computation.snapshot())
        if not is_sound_on_host(checkpoint.snapshot):
            raise ValueError(f"training has diverged in iteration {iteration - 1}: try a smaller step_size.")
        self._checkpoints.put(self._num_checkpoints, *checkpoint.parts())
        self._num_checkpoints += 1
        return checkpoint

    def _finished(self, step: int, checkpoint: Checkpoint, record: dict[str, Any]) -> list[Action]:
        self._checkpoint = checkpoint
        self.status.state, self.status.waiting_for = "running", []
        self.status.bytes = self.links.bytes_sent, self.links.bytes_received
        if step:
            self.log("iteration", iteration=checkpoint.iteration, **record)
        return self.protocol.finished(step)

    def _adopt(self, action: Adopt) -> Callable[[], list[Action]]:
        states = [None if message is None else message.vector for message in action.states]
        self.computation.adopt(action.iteration, states)
        checkpoint = self._saved(action.iteration)

        def adopted() -> list[Action]:
            self._checkpoint, self.status.iteration, self.status.state = checkpoint, action.iteration, "running"
            return self.protocol.adopted(action.iteration)

        return adopted

    # Events of the network

    def _received(self, sender: int, frame: bytes) -> bool:
        try:
            message = self.codec.decode(frame, sender)
        except Rejected as rejected:
            self._count(sender, rejected.reason)
            return False
        self._react(lambda: self.protocol.received(message))
        return True

    def _linked(self, other: int) -> None:
        self.log.seldom("linked", other, pause=1.0, to=self._name(other))
        self._react(lambda: self.protocol.linked(other))

    def _unlinked(self, other: int, words: str) -> None:
        self.log.seldom("unlinked", other, pause=1.0, to=self._name(other), words=words)

    def _refused(self, other: int | None, reason: str, words: str) -> None:
        if reason != "unreachable":
            self._count(other, reason)
        self.log.seldom("refused", other, reason, level="warning", to=self._name(other), reason=reason, words=words)

    def _count(self, sender: int | None, reason: str) -> None:
        self.status.reject(sender, reason)
        if reason not in ("duplicate", "late", "early"):  # these happen among honest members too
            self.log.seldom("rejected", sender, reason, level="warning", sender=self._name(sender), reason=reason)

    def _step_ended(self, action: Combine) -> None:
        seconds = asyncio.get_running_loop().time() - self._step_began
        self.status.step_ended([message is not None for message in action.messages], seconds)
        missing = [k for k, message in enumerate(action.messages) if message is None]
        if missing:
            names = [self._name(k) for k in missing]
            self.log.seldom("without", *missing, level="warning", step=action.step, missing=names)

    def _alarm(self, alarm: Alarm) -> None:
        names = [self._name(each) for each in sorted(alarm.missing)]
        if alarm.step == 0:
            self.status.state, self.status.waiting_for = "waiting" if names else "starting", names
            if names:
                self.log("waiting", step=0, missing=names)
            return
        self.status.state, self.status.waiting_for = "stalled" if names else "running", names
        self.status.numbers.stalled.set(bool(names))
        if names:
            need = f"{self.course.quorum} of {self.course.num_members} messages are needed to continue"
            self.log("stalled", level="error", step=alarm.step, missing=names, words=need)
        else:
            self.log("recovered", step=alarm.step)

    def _evidence(self, evidence: Evidence) -> None:
        sender = evidence.first.sender
        self.status.equivocated(sender)
        words: dict[str, Any] = {"sender": self._name(sender), "step": evidence.first.step}
        if self.store.num_evidence(self._name(sender)) < EVIDENCE_PER_MEMBER:
            heads = self.codec.head(evidence.first), self.codec.head(evidence.second)
            words["file"] = self.store.keep_evidence(self.manifest, evidence, heads).name
        self.log.seldom("equivocation", sender, level="warning", **words)

    def _report(self) -> bytes:
        now = asyncio.get_running_loop().time()
        if now - self._report_time > REPORT_SECONDS:
            self.status.bytes = self.links.bytes_sent, self.links.bytes_received
            self._report_time, self._last_report = now, json.dumps(self.status.as_data()).encode()
        return self._last_report

    def _name(self, index: int | None) -> str:
        return "a stranger" if index is None else self.manifest.members[index].name

    def _named(self, messages: Sequence[Message | None]) -> list[str]:
        return [self._name(index) for index, message in enumerate(messages) if message is not None]
