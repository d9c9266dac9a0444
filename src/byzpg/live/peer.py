"""One running member, which carries out the protocol's actions with a network, a disk and an agent.

Everything but the agent's computation happens in one event loop. The computation has a thread of its own, so that the
loop keeps answering other members, and so has the disk where it must be flushed.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar
from typing import Protocol as Interface
from uuid import UUID

import numpy as np

from byzpg.live.amendment import Amendment, check_chain, is_due
from byzpg.live.identity import PrivateIdentity
from byzpg.live.links import ECHO_VERSION, Events, Links, Received, uninterrupted
from byzpg.live.manifest import Manifest
from byzpg.live.patience import Patience
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
    Forgotten,
    Message,
    Protocol,
    Receipt,
    Send,
    SendState,
    SetTimer,
    Timer,
)
from byzpg.live.protocol import (
    Log as LogMessage,
)
from byzpg.live.status import Log, Status
from byzpg.live.store import Store, forgotten_through
from byzpg.live.wire import SIGNED_ONCE, Codec, Rejected, prove
from byzpg.robust.geometry import is_sound_on_host

# A member can equivocate again and again before it is masked; this many proofs against it are enough.
EVIDENCE_PER_MEMBER = 20
# The mark moves ahead by the iterations of this many seconds, and by at most this many, so that it is seldom flushed.
RESERVED_SECONDS, MOST_RESERVED = 1.0, 64
FLUSH_SECONDS = 3.0
AMENDMENT_SECONDS = 0.5  # between two looks for an amendment
REPORT_SECONDS = 0.4  # the shortest time between two status reports
SMALL = 2**18  # numbers that are combined in the event loop; see `_is_small`

Written = TypeVar("Written")


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
    def rounds(self) -> int:
        """Rounds of agreement in an iteration."""
        ...

    @property
    def dimension(self) -> int: ...

    @property
    def state_dimension(self) -> int:
        """The length of what members send to one that fell behind: the beginning of a snapshot."""
        ...

    @property
    def snapshot_dimension(self) -> int: ...

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
        proxy: Whether to dial through the proxy that the environment names.
        history: The manifests that this one has replaced, if the members have changed, in order.
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
        proxy: bool = False,
        history: Sequence[Manifest] = (),
    ) -> None:
        self.manifest, self.own, self.private, self.store, self.log = manifest, own, private, store, log
        self.computation, self.status = computation, status
        self.course = manifest.course(own, num_iterations=computation.num_iterations, rounds=computation.rounds)
        self.codec = self._new_codec()
        self.outgoing: Outgoing | None = None
        self.history = history
        self.successor: Amendment | None = None  # what replaces the manifest
        kept_messages = 2 * self.course.per_iteration + 2  # of this iteration, the one before, and both barriers
        self._outbox = store.records(f"outbox{manifest.suffix}.bin", kept_messages, self.codec.largest)
        self._checkpoints = store.records("checkpoints.bin", 2, 8 + 4 * computation.snapshot_dimension)
        self._read_checkpoints()
        self._take_up_amendment()
        if self._checkpoint is not None:
            computation.restore(self._checkpoint.iteration, self._checkpoint.snapshot)
        self._with_other_manifest: set[int] = set()  # members that may have changed to it
        self._amendments = [each.to_bytes() for each in store.amendments()]  # those that have led to this manifest
        self._brought: dict[int, Message] = {}  # final states from files, by sender
        self._proofs: Counter[int] = Counter()  # by the member that equivocated
        self.protocol = self._new_protocol()
        self.links = self._new_links(listen, proxy)
        status.connected = self.links.connected
        self._jobs: asyncio.Queue[Callable[[], Callable[[], list[Action]]]] = asyncio.Queue()
        # Combining a few short vectors takes less time than passing them to another thread.
        self._is_small = self.course.num_members * computation.dimension <= SMALL
        self._over = asyncio.Event()
        self._failure: Exception | None = None
        self._step_began = 0.0
        self._report_time, self._last_report = -inf, b""
        self._states: dict[int, Message] = {}  # signed states of this iteration and the one before, by iteration
        for equivocator in self.protocol.masked:
            self.links.restrain(equivocator)
        self._patience = Patience(manifest.times.grace, self.course.num_members, self.course.num_byzantine)
        self._disk = ThreadPoolExecutor(1, "disk")
        self._reserved = self.protocol.iteration, time.monotonic()  # when the mark was last moved
        self._faults: frozenset[int] = frozenset()

    def _read_checkpoints(self) -> None:
        found = self._checkpoints.read()
        self._num_checkpoints = max(found, default=-1) + 1  # a new checkpoint never overwrites the newest one
        checkpoints = [Checkpoint.of(found[number]) for number in sorted(found)]
        agreed = [each for each in checkpoints if each.iteration == self.manifest.from_iteration]
        if self.manifest.from_iteration and agreed and not self._outbox.read():
            # This member has not begun with the new manifest. It forgets what it has done beyond the agreed iteration.
            checkpoints = [agreed[-1]]
            self._checkpoints.put(self._num_checkpoints, *agreed[-1].parts())
            self._checkpoints.flush()
            self._num_checkpoints += 1
        self._checkpoint = checkpoints[-1] if checkpoints else None
        previous = checkpoints[-2] if len(checkpoints) > 1 else None
        follows = previous is not None and previous.iteration + 1 == checkpoints[-1].iteration
        self._previous = previous if follows else None

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
        try:
            sent = self._own_messages()
        except Rejected:  # signed for a meeting before a new manifest that is no longer there
            sent, self._outbox.damaged = {}, frozenset(range(self._outbox.num_slots))
        started = self._checkpoint is not None or bool(self._checkpoints.damaged)
        has_signed = any(sent) or bool(self._outbox.damaged) or (started and not self.history)
        self._mark = self.store.mark(f"mark{self.manifest.suffix}.bin", expected=has_signed)
        silent_through = forgotten_through(
            self._mark.step,
            same_boot=self._mark.same_boot,
            damaged_slots=range(self._outbox.num_slots) if self._outbox.is_new else self._outbox.damaged,
            num_slots=self._outbox.num_slots,
            damaged_checkpoint=bool(self._checkpoints.damaged) or self._checkpoints.is_new,
        )
        self._report_damage(silent_through)
        if silent_through >= 0:
            self._mark.distrust()
        return Protocol(
            course=self.course,
            seal=self.seal,
            seal_ask=lambda step: self.codec.encode("ask", step, NOTHING, (), self.private.signing),
            seal_echo=self._seal_echo,
            verify=lambda receipt: self.codec.verify(receipt),
            iteration=0 if self._checkpoint is None else self._checkpoint.iteration,
            started=started,
            sent={0: self.seal(0, NOTHING, ()), **sent} if started else sent,  # the start barrier's is always the same
            silent_through=silent_through,
            forgetful=self._mark.lost,
            masked=self._proven_equivocators(),
            leaving=self._leaving(),
        )

    def _report_damage(self, silent_through: int) -> None:
        """Name in the log what is wrong with this member's files, and what follows from it."""
        damages = [
            (records.path, f"{len(records.damaged)} of {records.num_slots} records fail their checksums")
            for records in (self._outbox, self._checkpoints)
            if records.damaged
        ]
        if self._mark.lost:
            words = "the mark of what this member has signed is missing or damaged, or the directory was restored"
            damages.append((self._mark.path, words))
        elif silent_through >= 0 and not damages:
            words = "the machine has stopped without warning, so this member may have signed messages that it has lost"
            damages.append((self._outbox.path, words))
        remedy = "it stays silent until it can take over a later state from the others"
        for path, words in damages:
            self.log("damaged", level="error", file=str(path), words=f"{words}: {remedy}")
        self.status.numbers.damage.inc(len(damages))

    def _proven_equivocators(self) -> set[int]:
        """The members against which there are proofs, also from before the members changed, if they kept their keys."""
        keys = [member.public_key for member in self.manifest.members]
        for path, evidence in self.store.evidence():
            failure = None
            for manifest in (*self.history, self.manifest):
                try:
                    proven = prove(manifest, evidence).member.public_key
                except ValueError as error:
                    failure = error
                else:
                    self._proofs.update(index for index, key in enumerate(keys) if key == proven)
                    break
            else:
                self.log("damaged", level="warning", file=str(path), words=f"{failure} The file is ignored.")
        return set(self._proofs)

    def _new_links(self, listen: str, proxy: bool) -> Links:
        events = Events(
            received=self._received,
            linked=self._linked,
            unlinked=self._unlinked,
            refused=self._refused,
            status=self._report,
            amended=self._offered_amendment,
        )
        return Links(
            manifest=self.manifest,
            own=self.own,
            private=self.private,
            largest=self.codec.largest,
            listen=listen,
            events=events,
            plan_digest=self.computation.plan_digest,
            proxy=proxy,
        )

    def _own_messages(self) -> dict[int, Message]:
        """The messages that were logged before a restart."""
        return {step: self.codec.decode(frame, self.own) for step, frame in self._outbox.read().items()}

    def _seal_echo(self, receipt: Receipt | None) -> Message:
        step, receipts = (0, ()) if receipt is None else (receipt.step, (receipt,))
        return self.codec.encode("echo", step, NOTHING, receipts, self.private.signing)

    def seal(self, step: int, vector: np.ndarray, receipts: tuple) -> Message:
        """Sign this member's message of a step."""
        return self.codec.encode("vector", step, vector, receipts, self.private.signing)

    def bring(self, paths: Sequence[Path]) -> None:
        """Take the final states of members that have finished from files.

        Raises:
            ValueError: If a file is not the final state of a member, or if there are too few.
        """
        for path in paths:
            try:
                state = self.codec.decode_claimed(path.read_bytes())
            except (OSError, Rejected) as error:
                words = f"not a signed state of this run ({error})" if isinstance(error, Rejected) else str(error)
                raise ValueError(f"{path} cannot be used as a final state: {words}.") from None
            if (state.kind, state.step) != ("state", self.course.last):
                raise ValueError(f"{path} is a message of {self._name(state.sender)}, but not its final state.")
            if state.sender in self._brought or state.sender in self.protocol.masked:
                words = "equivocated" if state.sender in self.protocol.masked else "is the sender of another file"
                raise ValueError(f"{path} cannot be used as a final state: {self._name(state.sender)} {words}.")
            self._brought[state.sender] = state
        needed = self.course.state_quorum
        if paths and len(self._brought) < needed:
            raise ValueError(
                f"the final states of at least {needed} members are needed, because {self.course.num_byzantine} may be "
                f"false, got those of {len(self._brought)}."
            )

    async def run(self) -> None:
        """Take part until the run is over."""
        self.status.iteration = self.protocol.iteration
        self.log("start", iteration=self.protocol.iteration, restarted=self._checkpoint is not None)
        with ThreadPoolExecutor(1, "agent") as pool:
            loop = asyncio.get_running_loop()
            if self._checkpoint is not None:  # others can ask for its state from now on, and states are signed as well
                self._reserve_at_once(self._checkpoint.iteration)
            await self.links.open()
            worker = asyncio.create_task(self._work(pool))
            over = asyncio.create_task(self._over.wait())
            looking = asyncio.create_task(self._look_for_amendment())
            try:
                await loop.run_in_executor(pool, self.computation.warm_up)
                self.log("ready")
                self._react(self.protocol.start)
                if self.successor is not None:
                    self._announce_successor()
                for state in self._brought.values():
                    self._react(lambda state=state: self.protocol.received(state))
                await asyncio.wait((worker, over), return_when=asyncio.FIRST_COMPLETED)
                if worker.done():
                    worker.result()
                if self._failure is not None:
                    raise self._failure
                await self.links.flush(FLUSH_SECONDS)
            finally:
                await uninterrupted(self._end(worker, over, looking))

    async def _end(self, *tasks: asyncio.Task[Any]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.links.close()
        self._disk.shutdown()
        if self._failure is None:
            self._settle_mark()
        self.log("end", state=self.status.state)

    async def _work(self, pool: ThreadPoolExecutor) -> None:
        """Run the computations one after the other, and tell the protocol their results."""
        loop = asyncio.get_running_loop()
        while True:
            job = await self._jobs.get()
            self._react(await loop.run_in_executor(pool, job))

    # The protocol's actions

    def _react(self, event: Callable[[], list[Action]]) -> list[Action]:
        """Pass an event to the protocol, and carry out its actions. If one fails, the member stops.

        It must not continue with some actions undone: it could send a message that it has not logged.
        """
        if self._failure is None:
            try:
                actions = event()
                self._do(actions)
            except Exception as error:
                self._failure = error
                self._over.set()
            else:
                return actions
        return []

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(to, message):
                    self._send(to, message)
                case LogMessage(message):
                    if message.step > 0 and not self._is_reserved(message.step):
                        raise RuntimeError(f"step {message.step} was signed beyond the mark, {self._mark.step}.")
                    self._outbox.put(message.step, message.frame)
                    self._step_began = asyncio.get_running_loop().time()
                    self._patience.sent(self.protocol.num_ahead)
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
                case SendState(to, previous):
                    for checkpoint in (self._checkpoint, self._previous if previous else None):
                        self._send_state(to, checkpoint)
                case Alarm():
                    self._alarm(action)
                case Evidence():
                    self._evidence(action)
                case Forgotten():
                    self._forgotten(action)
                case Count(sender, reason):
                    self._count(sender, reason)
                case Finished() if self.successor is not None:
                    self._change()
                case Finished():
                    self.status.state = "finished"
                    self.log("finished", iteration=self.course.num_iterations)
                    self._keep_final_state()
                    self._over.set()
        self.status.step = self.protocol.step

    def _send(self, to: int, message: Message) -> None:
        if message.kind == "echo" and self.links.versions.get(to, 1) < ECHO_VERSION:
            return
        frame = message.frame if self.outgoing is None else self.outgoing(to, message)
        if frame is not None:
            self.links.send(to, message, frame)

    def _send_state(self, to: int, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None and checkpoint.iteration >= self.protocol.iteration - 1:
            self.log.seldom("state sent", to, to=self._name(to), iteration=checkpoint.iteration)
            self.links.send(to, self._state(checkpoint))

    def _state(self, checkpoint: Checkpoint) -> Message:
        """The signed state of a checkpoint."""
        iteration = checkpoint.iteration
        if iteration not in self._states:
            step = self.course.first_step(iteration)
            state = checkpoint.snapshot[: self.computation.state_dimension]
            signed = self.codec.encode("state", step, state, (), self.private.signing)
            self._states = {each: state for each, state in self._states.items() if each == iteration - 1}
            self._states[iteration] = signed
        return self._states[iteration]

    def _keep_final_state(self) -> None:
        """Leave the signed state for members that come too late, unless this member may have signed another one."""
        last, checkpoint = self.course.num_iterations, self._checkpoint
        if checkpoint is not None and checkpoint.iteration == last and self.protocol.may_reserve(last):
            frame = self._state(checkpoint).frame
            self._tolerate("final.state", lambda: self.store.keep_final_state(frame))

    def _seconds(self, timer: Timer, step: int) -> float:
        times = self.manifest.times
        if timer in ("retry", "echoes"):
            return times.retry
        barriers = {0: times.start_grace, self.course.last: times.linger}
        return barriers[step] if step in barriers else self._patience.begin(asyncio.get_running_loop().time())

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
        reserved = self._reserve(iteration)
        vector = self.computation.begin(iteration)
        if reserved is not None:
            reserved.result()
        return lambda: self._computed(self.course.first_step(iteration), vector)

    def _reserve(self, iteration: int) -> Future[None] | None:
        """Move the mark, if necessary, so that this member may sign messages of an iteration."""
        if not self.protocol.may_reserve(iteration) or self._is_reserved(self._mark_after(iteration)):
            return None
        (before, then), now = self._reserved, time.monotonic()
        self._reserved = iteration, now
        ahead = min(int(RESERVED_SECONDS * (iteration - before) / max(now - then, 1e-9)), MOST_RESERVED)
        return self._disk.submit(self._flush, partial(self._mark.move, self._mark_after(iteration + ahead)))

    def _is_reserved(self, step: int) -> bool:
        return step <= self._mark.step and not self._mark.settled

    def _mark_after(self, iteration: int) -> int:
        """The mark that covers an iteration, the barrier that may follow it, and the state after it."""
        return min(self.course.first_step(iteration + 1), self.course.first_step(self.computation.num_iterations))

    def _reserve_at_once(self, iteration: int) -> None:
        if (reserved := self._reserve(iteration)) is not None:
            reserved.result()

    def _flush(self, set_mark: Callable[[], None]) -> None:
        began = time.monotonic()
        self._outbox.flush()
        self._checkpoints.flush()
        set_mark()
        self.status.numbers.flush_seconds.observe(time.monotonic() - began)

    def _settle_mark(self) -> None:
        """At an orderly end, set the mark to what was really signed, so that the next start need not be careful.

        Not even if the machine was started anew meanwhile: all is on the disk.
        """
        state = 0 if self._checkpoint is None else self.course.first_step(self._checkpoint.iteration)
        signed = max(state, *self.protocol.sent, 0)
        if self.protocol.may_reserve(self.protocol.iteration) and self._mark.step >= signed:
            self._flush(partial(self._mark.settle, signed))

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
        received = np.empty((self.course.num_members, self.computation.dimension), np.float32)
        for sender, message in enumerate(action.messages):
            received[sender] = 0.0 if message is None else message.vector
        present = np.asarray([message is not None for message in action.messages])
        vector = self.computation.combine(iteration, phase, received, present)
        self.computation.observe(self.status, iteration, phase)
        if vector is not None:
            return lambda: self._computed(step + 1, vector)
        record = self.computation.observe(self.status, iteration, None)
        self._tolerate("progress.jsonl", lambda: self.store.append_progress({"iteration": iteration, **record}))
        checkpoint = self._saved(iteration + 1)
        return lambda: self._finished(step, checkpoint, record)

    def _saved(self, iteration: int) -> Checkpoint:
        checkpoint = Checkpoint(iteration, self.computation.snapshot())
        if not is_sound_on_host(checkpoint.snapshot[: self.computation.state_dimension]):
            raise ValueError(f"training has diverged in iteration {iteration - 1}: try a smaller step_size.")
        self._checkpoints.put(self._num_checkpoints, *checkpoint.parts())
        self._num_checkpoints += 1
        return checkpoint

    def _finished(self, step: int, checkpoint: Checkpoint, record: dict[str, Any]) -> list[Action]:
        self._previous, self._checkpoint = self._checkpoint, checkpoint
        self.status.state, self.status.waiting_for = "running", []
        self.status.bytes = self.links.bytes_sent, self.links.bytes_received
        self.status.numbers.queued.set(self.links.num_queued)
        self.status.numbers.behind.set(self.protocol.num_behind)
        if step:
            self.log("iteration", iteration=checkpoint.iteration, **record)
        return self.protocol.finished(step)

    def _adopt(self, action: Adopt) -> Callable[[], list[Action]]:
        states = [None if message is None else message.vector for message in action.states]
        self.computation.adopt(action.iteration, states)
        checkpoint = self._saved(action.iteration)
        self._reserve_at_once(action.iteration)

        def adopted() -> list[Action]:
            self._previous, self._checkpoint = self._checkpoint, checkpoint
            self.status.iteration, self.status.state = action.iteration, "running"
            return self.protocol.adopted(action.iteration)

        return adopted

    # A new manifest

    async def _look_for_amendment(self) -> None:
        """Take the amendment that an operator puts into this member's directory."""
        path, seen = self.store.path / "amendment.toml", None
        while True:
            with suppress(OSError):
                if (changed := path.stat().st_mtime_ns) != seen:
                    seen = changed
                    try:
                        self._consider(Amendment.load(path))
                    except ValueError as error:
                        self.log("amendment", level="error", file=str(path), words=str(error))
            await asyncio.sleep(AMENDMENT_SECONDS)

    def _offered_amendment(self, content: bytes) -> None:
        with suppress(ValueError):  # it may belong to an earlier manifest, or come from an attacker
            self._consider(Amendment.from_bytes(content))

    def _consider(self, amendment: Amendment) -> None:
        """Keep an amendment if it is complete, pass it on, and change to its manifest when it is time.

        Raises:
            ValueError: If it does not replace this manifest, or is not complete.
        """
        if self.successor is not None or amendment.manifest.digest == self.manifest.digest:
            return
        self._check_amendment(amendment)
        self._tolerate("amendment.toml", lambda: amendment.write(self.store.path / "amendment.toml"))
        self.successor = amendment
        self._announce_successor()
        if not self._change_if_due():
            self._shorten(amendment)
            self.protocol.course, self.protocol.leaving = self.course, self._leaving()

    def _check_amendment(self, amendment: Amendment) -> None:
        check_chain(self.manifest, [amendment])
        if amendment.manifest.from_iteration > self.computation.num_iterations:
            raise ValueError(
                f"the amendment takes effect before iteration {amendment.manifest.from_iteration}, and training has "
                f"{self.computation.num_iterations} iterations: propose an earlier one."
            )

    def _shorten(self, amendment: Amendment) -> None:
        """Meet the others before the agreed iteration, so that K − f members begin it with the new manifest."""
        self.course = replace(self.course, num_iterations=amendment.manifest.from_iteration)
        self.codec = self._new_codec()

    def _leaving(self) -> frozenset[int] | None:
        """The members that the new manifest removes, if there is one."""
        if self.successor is None:
            return None
        staying = {member.name for member in self.successor.manifest.members}
        return frozenset(other for other in self.course.others if self._name(other) not in staying)

    def _take_up_amendment(self) -> None:
        """After a restart, continue to wait for the agreed iteration, unless it has begun with the old manifest."""
        with suppress(ValueError):
            amendment = Amendment.load(self.store.path / "amendment.toml")
            self._check_amendment(amendment)
            start, whole = amendment.manifest.from_iteration, (self.course, self.codec)
            if (0 if self._checkpoint is None else self._checkpoint.iteration) <= start:
                self._shorten(amendment)
                try:
                    self._own_messages()
                except Rejected:
                    self.course, self.codec = whole
                else:
                    self.successor = amendment

    def _announce_successor(self) -> None:
        assert self.successor is not None
        new = self.successor.manifest
        self.log("amendment", iteration=new.from_iteration, words=self.successor.describe(self.manifest))
        for other in self.course.others:
            self._pass_on_successor(other)

    def _pass_on_successor(self, other: int) -> None:
        if self.successor is not None:
            self.links.pass_on([self.successor.to_bytes()], other)

    def _change_if_due(self) -> bool:
        """End this part of the run, if it is too late to meet the others at the agreed iteration."""
        due = self.successor is not None and is_due(
            self.successor.manifest,
            self.protocol.iteration,
            num_changed=len(self._with_other_manifest),
            num_byzantine=self.course.num_byzantine,
        )
        if due:
            self._change()
        return due

    def _change(self) -> None:
        """Let the new manifest take the place of this one."""
        assert self.successor is not None
        self.store.keep_amendment(self.successor)
        self._over.set()

    # Events of the network

    def _received(self, sender: int, frame: bytes) -> Received:
        try:
            message = self.codec.decode(frame, sender)
        except Rejected as rejected:
            self._count(sender, rejected.reason)
            return "bad"
        actions = self._react(lambda: self.protocol.received(message))
        in_vain = any(isinstance(action, (Count, Evidence)) for action in actions)
        return "useful" if message.kind in SIGNED_ONCE and not in_vain else "useless"

    def _linked(self, other: int, version: int) -> None:
        self._with_other_manifest.discard(other)
        self.log.seldom("linked", other, pause=1.0, to=self._name(other), version=version)
        self._pass_on_successor(other)  # it may have been away when the others heard of it
        self._react(lambda: self.protocol.linked(other, echoes=version >= ECHO_VERSION))

    def _unlinked(self, other: int, words: str) -> None:
        self.log.seldom("unlinked", other, pause=1.0, to=self._name(other), words=words)

    def _refused(self, other: int | None, reason: str, words: str) -> None:
        if reason != "unreachable":
            self._count(other, reason)
        if other is not None and reason == "manifest":
            self._with_other_manifest.add(other)
            if not self._change_if_due():
                self._react(lambda: self.protocol.changed(other))
            self.links.pass_on(self._amendments, other)
        self.log.seldom("refused", other, reason, level="warning", to=self._name(other), reason=reason, words=words)

    def _count(self, sender: int | None, reason: str) -> None:
        self.status.reject(sender, reason)
        if reason not in ("duplicate", "late", "early", "masked"):  # the first three happen among honest members too
            self.log.seldom("rejected", sender, reason, level="warning", sender=self._name(sender), reason=reason)

    def _step_ended(self, action: Combine) -> None:
        now = asyncio.get_running_loop().time()
        self._patience.end(now)
        self.status.step_ended([message is not None for message in action.messages], now - self._step_began)
        self._look_for_faults(frozenset())
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
        self._look_for_faults(alarm.missing)
        if names:
            need = f"{self.course.quorum} of {self.course.num_members} messages are needed to continue"
            self.log("stalled", level="error", step=alarm.step, missing=names, words=need)
        else:
            self.log("recovered", step=alarm.step)

    def _evidence(self, evidence: Evidence) -> None:
        sender = evidence.first.sender
        self.status.equivocated(sender)
        words: dict[str, Any] = {"sender": self._name(sender), "step": evidence.first.step}
        if self._proofs[sender] < EVIDENCE_PER_MEMBER:
            self._proofs[sender] += 1
            heads = self.codec.head(evidence.first, evidence.kind), self.codec.head(evidence.second, evidence.kind)
            kept = self._tolerate("evidence", lambda: self.store.keep_evidence(self.manifest, evidence, heads))
            words |= {} if kept is None else {"file": kept.name}
        self.links.restrain(sender)
        self.log.seldom("equivocation", sender, level="warning", **words)
        self._look_for_faults(frozenset())

    def _forgotten(self, forgotten: Forgotten) -> None:
        step = forgotten.receipt.step
        words = (
            f"{self._name(forgotten.reported_by)} has a message that this member signed for step {step} and does not "
            "have: its directory is older than that, or its key is used elsewhere. It stays silent until it can take "
            "over a later state from the others"
        )
        self.status.numbers.damage.inc()
        self.log("forgotten", level="error", file=str(self.store.path), step=step, words=words)

    def _look_for_faults(self, missing: frozenset[int]) -> None:
        """Raise an alarm if more members are faulty than the federation tolerates."""
        faults = self.protocol.absent | self.protocol.masked | missing
        if faults == self._faults:
            return
        self._faults = faults
        self.status.fault(sorted(faults))
        if len(faults) > self.course.num_byzantine:
            names = [self._name(each) for each in sorted(faults)]
            words = f"members are missing or have equivocated; the federation tolerates {self.course.num_byzantine}"
            self.log("faults", level="error", members=names, words=words)

    def _tolerate(self, what: str, write: Callable[[], Written]) -> Written | None:
        """Write a file without which this member can go on; None if that fails."""
        try:
            return write()
        except OSError as error:
            words = f"{error.strerror or error}; this member continues without it"
            self.log.seldom("not written", what, level="error", file=str(self.store.path / what), words=words)
            return None

    def keep_output(self, parameters: np.ndarray) -> None:
        """Keep θ_T̂, if that is possible."""
        self._tolerate("output.npy", lambda: self.store.keep_output(parameters))

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
