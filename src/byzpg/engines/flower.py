"""Centralized ByzPG on Flower (`byzpg[flower]`): a Strategy for the trusted server, a ClientApp for its workers.

A Flower round is an iteration of Algorithm 1. In one with a large batch every client samples privately and replies with
its gradient; in one with a small batch no message goes out, and the server samples alone. Nobody evaluates.

The server is trusted, clients are not. It gives every node its position, and a reply counts for the node that it was
asked of. Whatever else comes back (an error, a wrong round, type or shape, NaN, two replies, none) is counted, logged
by name and left out. With fewer than K − f usable replies the gradient is undefined: θ stays, and the run goes on.
How long a reply may be, and for how long a half-sent one is waited for (3 minutes), Flower decides.
"""

import io
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log
from httpx import TransportError
from numpy.lib import format as numpy_format

from byzpg._registry import members, parse
from byzpg.config import Config, Settings
from byzpg.federation.algorithms import ALGORITHMS
from byzpg.federation.members import Server, Worker, secret_key, seeded_key
from byzpg.federation.metrics import METRICS
from byzpg.robust.attacks import Attack
from byzpg.robust.components import nearest, plain_name
from byzpg.robust.geometry import is_sound_on_host
from byzpg.runs import Run, RunDirectory

# Seconds between two looks for replies, and for clients that have yet to connect.
PAUSE = 0.2
LONGEST_TEXT = 200  # of what others say, in a line of the log
# Of a compiled program, how long that took: shorter ones are compiled again in every process.
WORTH_KEEPING = 0.1
# What a Config says of simulated runs only: here attackers are real, or rehearsed.
SIMULATED = ("num_attackers", "attack", "byzantine_set", "num_seeds", "agreement", "rounds")

# What a client can do wrong beside lying about its gradient.
Wire = Literal["WrongShape", "WrongType", "WrongRound", "WrongPosition", "Malformed", "Crash"]
WIRE: tuple[Wire, ...] = get_args(Wire)


@dataclass(frozen=True)
class Rehearsal:
    """Who misbehaves on purpose, and how: the lies in turn, one in every round."""

    attackers: tuple[int, ...] = ()
    lies: tuple[Attack | Wire, ...] = ()

    @classmethod
    def of(cls, attack: str, attackers: str, num_agents: int) -> "Rehearsal":
        """From text: lies apart by ;, positions by a comma."""
        try:
            positions = tuple(int(position) for position in attackers.split(",") if position.strip())
        except ValueError:
            raise ValueError(f"rehearsal-attackers must be positions such as '0,3', got {attackers!r}.") from None
        if not all(0 <= position < num_agents for position in positions) or len(set(positions)) < len(positions):
            raise ValueError(
                f"rehearsal-attackers must be different positions of 0 to {num_agents - 1}, got {attackers!r}."
            )
        lies: tuple[Attack | Wire, ...] = tuple(_lie(text.strip()) for text in attack.split(";") if text.strip())
        if bool(lies) != bool(positions):
            raise ValueError("rehearsal-attack and rehearsal-attackers belong together: give both, or neither.")
        if len(positions) == num_agents:
            raise ValueError(f"rehearsal-attackers must leave an honest client, got all {num_agents}.")
        return cls(positions, lies)

    def lie(self, position: int, server_round: int) -> Attack | Wire | None:
        """What the client at this position does in this round; None: nothing wrong."""
        return self.lies[(server_round - 1) % len(self.lies)] if position in self.attackers else None


def _lie(text: str) -> Attack | Wire:
    for wire in WIRE:
        if plain_name(text) == plain_name(wire):
            return wire
    known = [*WIRE, *members("attack")]
    if plain_name(text.partition("(")[0]) not in map(plain_name, known):
        raise ValueError(f"rehearsal-attack: there is no {text!r}; known: {', '.join(known)}.{nearest(text, known)}")
    attack = parse("attack", text)
    assert isinstance(attack, Attack)
    return attack


@dataclass(frozen=True)
class Options:
    """What Flower's run configuration says; an empty text is an option left out."""

    settings: Settings
    directory: Path  # where the server keeps runs
    reply_seconds: float  # how long it waits for clients, and for the replies of a round
    rehearsal: Rehearsal | None  # None: everyone's random numbers are secret, and nobody lies on purpose

    @classmethod
    def of(cls, run_config: Mapping[str, Any]) -> "Options":
        given = {name.replace("-", "_"): value for name, value in run_config.items() if value != ""}
        if "num_declared" in given:  # as byzpg 0.1 called it
            given["num_byzantine"] = given.pop("num_declared")
        if "rehearsal_liars" in given:
            given["rehearsal_attackers"] = given.pop("rehearsal_liars")
        directory, seconds = given.pop("directory", "runs"), given.pop("reply_seconds", 600)
        rehearsed = given.pop("rehearsal", False)
        attack, attackers = given.pop("rehearsal_attack", ""), given.pop("rehearsal_attackers", "")
        if not isinstance(directory, str):
            raise ValueError(f"directory must be a path in quotes, got {directory!r}.")
        if type(seconds) not in (int, float) or not 0 < seconds < math.inf:
            raise ValueError(f"reply-seconds must be a positive number, got {seconds!r}.")
        if type(rehearsed) is not bool:
            raise ValueError(f"rehearsal must be true or false, got {rehearsed!r}.")
        if (attack or attackers) and not rehearsed:
            raise ValueError(
                "rehearsal-attack and rehearsal-attackers are for rehearsals: set rehearsal=true, or neither."
            )
        settings = _settings(given)
        rehearsal = Rehearsal.of(str(attack), str(attackers), settings.num_agents) if rehearsed else None
        return cls(settings, Path(directory), float(seconds), rehearsal)


def _settings(given: dict[str, Any]) -> Settings:
    for option in SIMULATED:
        if option in given:
            name = option.replace("_", "-")
            raise ValueError(f"run config: {name} is for simulated runs; leave it out, and see rehearsal-attack.")
    if isinstance(hidden := given.get("hidden"), str):  # Flower's configuration knows no lists
        try:
            given["hidden"] = tuple(int(size) for size in hidden.split(","))
        except ValueError:
            raise ValueError(f"run config: hidden must be sizes such as '16,16', got {hidden!r}.") from None
    values = {"algorithm": "ByzPG", "num_seeds": 1, **given}
    for name, algorithm in ALGORITHMS.items():
        if plain_name(str(values["algorithm"])) != plain_name(name):
            continue
        if not algorithm.centralized:
            raise ValueError(f"run config: algorithm {name} has no server: use ByzPG or Fed-PAGE-PG.")
        if not algorithm.robust:
            values.setdefault("num_byzantine", 0)
    # Clients may attack; none of these attacks is simulated.
    settings = Config.of({**values, "num_attackers": 0}, "run config").resolved()
    if not ALGORITHMS[settings.algorithm].robust and settings.num_byzantine:
        raise ValueError(
            f"run config: {settings.algorithm} averages all replies and tolerates no attacker: num-byzantine must be "
            f"0, got {settings.num_byzantine}."
        )
    return settings


@lru_cache(maxsize=8)
def _read_options(run_config: tuple[tuple[str, Any], ...]) -> Options:
    return Options.of(dict(run_config))


class _RefusedError(Exception):
    """Why a reply does not count: a reason to count by, and words for the log."""

    def __init__(self, reason: str, words: str) -> None:
        super().__init__(reason, words)
        self.reason, self.words = reason, words


def _read_reply(reply: Message, server_round: int, position: int, dimension: int) -> tuple[np.ndarray, float]:
    """The gradient [d] and the mean return in a reply; all of it may be false, but is what it should be in kind."""
    if reply.has_error():
        raise _RefusedError("error", f"error {reply.error.code}: {_one_line(reply.error.reason)}")
    try:
        said, arrays = reply.content.metric_records["metrics"], reply.content.array_records["arrays"]
        array, mean_return = arrays["gradient"], said["return"]
        for what, claimed, asked in (("round", said["round"], server_round), ("position", said["position"], position)):
            if type(claimed) is not int or claimed != asked:
                raise _RefusedError(
                    f"wrong {what}", f"it is for {what} {_one_line(claimed)}, and {asked} was asked for"
                )
        if not isinstance(mean_return, (int, float)) or not math.isfinite(mean_return):
            raise _RefusedError("malformed", f"its return is {_one_line(mean_return)}")
        gradient = _read_vector(array, dimension)
    except _RefusedError:
        raise
    except Exception as error:  # whatever an attacker can make Flower's records and NumPy raise
        raise _RefusedError("malformed", f"{type(error).__name__}: {_one_line(error)}") from None
    if not is_sound_on_host(gradient):
        raise _RefusedError("not finite", "its gradient has entries that are not finite, or is too long")
    return gradient, float(mean_return)


def _read_vector(array: Array, dimension: int) -> np.ndarray:
    """Float32 [d], read by hand: NumPy would make room for as much as a header claims, before it looks."""
    data = io.BytesIO(array.data)
    if array.stype != "numpy.ndarray" or numpy_format.read_magic(data) != (1, 0):
        raise _RefusedError("malformed", f"its gradient is stored as {_one_line(array.stype)}")
    shape, _, dtype = numpy_format.read_array_header_1_0(data)
    if dtype != np.dtype("<f4") or array.dtype != "float32":
        raise _RefusedError("wrong type", f"its gradient is of {_one_line(dtype)}, not float32")
    if shape != (dimension,) or tuple(array.shape) != shape:
        raise _RefusedError("wrong shape", f"its gradient has the shape {_one_line(shape)}, not ({dimension},)")
    return np.frombuffer(data.read(), "<f4", count=dimension)


def _one_line(said: object) -> str:
    """One line of printable characters, of what others may have written."""
    return "".join(filter(str.isprintable, str(said)[:LONGEST_TEXT]))


class CarefulGrid(Grid):
    """A grid that asks for every reply by itself: one that cannot be read becomes an error reply, and no exception."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    @property
    def run(self) -> Any:
        return self._grid.run

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    def create_message(self, *content: Any, **options: Any) -> Message:
        return self._grid.create_message(*content, **options)

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        sent = list(messages)
        if not sent:
            return []
        pushed = set(self.push_messages(sent))
        asked = {number: each for each in sent if (number := each.metadata.message_id) in pushed}
        deadline, replies = time.monotonic() + (math.inf if timeout is None else timeout), []
        while asked and time.monotonic() < deadline:
            for number in list(asked):
                if arrived := self._pull(number, asked[number]):
                    replies += arrived
                    del asked[number]
            if asked:
                time.sleep(PAUSE)
        return replies

    def _pull(self, number: str, message: Message) -> list[Message]:
        try:
            replies = list(self.pull_messages([number]))
        except TransportError:  # of the way to the SuperLink, not of the reply
            raise
        except Exception as error:  # whatever an attacker can make Flower's decoders raise
            return [_error(message, f"the reply cannot be read: {type(error).__name__}: {_one_line(error)}")]
        return [
            each if _answers(each, message) else _error(message, "the reply claims to be another's") for each in replies
        ]


def _answers(reply: Message, message: Message) -> bool:
    """Whether it says of itself that it is what it was pulled as; a sender can write there what it likes."""
    if reply.metadata.reply_to_message_id != message.metadata.message_id:
        return False
    return reply.has_error() or reply.metadata.src_node_id == message.metadata.dst_node_id


def _error(message: Message, words: str) -> Message:
    return Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, words), reply_to=message)


class ByzPG(Strategy):
    """ByzPG's server as a strategy of Flower; with algorithm Fed-PAGE-PG, that of plain averaging.

    θ lives in `server`; the arrays that Flower hands around are copies of it.
    """

    def __init__(self, settings: Settings, key_data: np.ndarray | None = None) -> None:
        """`key_data` decides the server's random numbers; None: secret ones."""
        self.settings = settings
        self.server = Server(
            settings.federation(),
            settings.schedule(),
            secret_key() if key_data is None else key_data,
            as_simulated=key_data is not None,
        )
        self.nodes: list[int] = []  # by position
        self.refused: Counter[tuple[int, str]] = Counter()  # replies left out, by node and reason
        self.returns: list[float] = []  # by iteration: the median of what clients say, or the server's own mean
        self.stepped: list[bool] = []
        self.usable: list[float] = []  # replies, NaN in small batches
        self._sent: list[Message] = []

    @property
    def arrays(self) -> ArrayRecord:
        """θ, for `start` and for clients."""
        return ArrayRecord({"parameters": Array(self.server.parameters)})

    def wait_for_clients(self, grid: Grid, seconds: float) -> None:
        """Wait until K nodes are connected, and give them their positions: from then on they are the federation."""
        expected, deadline, last = self.server.num_workers, time.monotonic() + seconds, -1
        while len(nodes := sorted(grid.get_node_ids())) < expected:
            if len(nodes) != last:
                log(INFO, "Waiting for %d clients (num-agents), %d are connected", expected, last := len(nodes))
            if time.monotonic() > deadline:
                raise ValueError(
                    f"num-agents is {expected}, and only {len(nodes)} SuperNodes are connected after {seconds:g} s: "
                    "start the others, or set num-agents."
                )
            time.sleep(PAUSE)
        if len(nodes) > expected:
            raise ValueError(
                f"num-agents is {expected}, but {len(nodes)} SuperNodes are connected: set num-agents={len(nodes)}, "
                "or stop the others."
            )
        self.nodes = nodes

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, *arguments: Any, **options: Any
    ) -> Result:
        """As Flower's, over a grid that no reply can break."""
        if num_rounds > self.server.num_iterations:
            raise ValueError(f"num_rounds must be at most {self.server.num_iterations}, got {num_rounds}.")
        return super().start(CarefulGrid(grid), initial_arrays, num_rounds, *arguments, **options)

    def summary(self) -> None:
        settings = self.settings
        log(INFO, "\t├──> %s on %s with %s", settings.algorithm, settings.env, settings.aggregator)
        log(INFO, "\t├──> %d clients, of which %d may lie", settings.num_agents, settings.num_byzantine)
        log(INFO, "\t└──> %d of the rounds ask clients", np.sum(self.server.plan.large))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if not self.nodes:
            self.wait_for_clients(grid, 0)
        self._sent = []
        if self.server.begin(server_round - 1):
            for position, node in enumerate(self.nodes):
                asked = ConfigRecord({**config, "round": server_round, "position": position})
                content = RecordDict({"arrays": self.arrays, "config": asked})
                self._sent.append(Message(content, node, MessageType.TRAIN, group_id=str(server_round)))
        return self._sent

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        iteration, refused_before = server_round - 1, self.refused.total()
        if self._sent:
            rows, present, said = self._read(server_round, replies)
            stepped, usable = self.server.combine(iteration, rows, present), float(np.sum(present))
            mean_return = float(np.median(said)) if said else math.nan
            if not stepped:
                need = self.server.num_workers - self.server.num_byzantine
                words = "Round %d: no step, with %d usable replies of the %d that are needed (K − f)"
                log(WARNING, words, server_round, usable, need)
        else:
            stepped, usable = True, math.nan
            mean_return = float(np.mean(self.server.sample(iteration)))
        self.returns.append(mean_return)
        self.stepped.append(stepped)
        self.usable.append(usable)
        entry: dict[str, int | float] = {
            "return": mean_return,
            "trajectories": int(self.server.plan.trajectories[iteration]),
            "stepped": int(stepped),
            "replies-refused": self.refused.total() - refused_before,
        }
        return self.arrays, MetricRecord({**entry})

    def _read(self, server_round: int, replies: Iterable[Message]) -> tuple[np.ndarray, np.ndarray, list[float]]:
        """The rows [K, d] of a round, which of them are usable, and the returns that go with those."""
        num_workers = self.server.num_workers
        by_message = {message.metadata.message_id: position for position, message in enumerate(self._sent)}
        found: list[list[Message]] = [[] for _ in range(num_workers)]
        for reply in replies:  # each is to one of these, see `CarefulGrid`
            found[by_message[reply.metadata.reply_to_message_id]].append(reply)
        rows = np.zeros((num_workers, self.server.dimension), np.float32)
        present, said = np.zeros(num_workers, bool), []
        for position, theirs in enumerate(found):
            try:
                if not theirs:
                    raise _RefusedError("missing", "there is none")
                if len(theirs) > 1:
                    raise _RefusedError("duplicate", f"there are {len(theirs)}")
                row, mean_return = _read_reply(theirs[0], server_round, position, self.server.dimension)
            except _RefusedError as refusal:
                self.refused[self.nodes[position], refusal.reason] += 1
                line = "Round %d: the reply of client %d (node %d) is left out (%s): %s"
                log(WARNING, line, server_round, position, self.nodes[position], refusal.reason, refusal.words)
                continue
            rows[position], present[position] = row, True
            said.append(mean_return)
        return rows, present, said

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return []  # the curve is that of the clients' own episodes

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None

    def report(self) -> list[str]:
        """What became of it, in lines; what was left out, by client and reason."""
        lines = [f"{np.sum(self.stepped)} steps in {len(self.stepped)} rounds, last return {self.returns[-1]:.1f}"]
        for (node, reason), number in sorted(self.refused.items()):
            lines.append(f"left out: {number} × {reason} from client {self.nodes.index(node)} (node {node})")
        return lines

    def results(self) -> Run:
        """What was learnt, as a run of one agent."""
        metrics = {name: np.full((1, len(self.stepped)), np.nan, np.float32) for name in METRICS}
        columns = {"return_mean": self.returns, "stepped": self.stepped, "usable_replies": self.usable}
        metrics |= {name: np.asarray([values], np.float32) for name, values in columns.items()}
        last, uniform = self.server.parameters[None, None], self.server.output[None, None]
        return Run.of(self.settings, self.server.plan, metrics=metrics, last=last, uniform=uniform)


server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Train as the run configuration says; the results are a run's directory."""
    options = Options.of(context.run_config)
    settings, rehearsal = options.settings, options.rehearsal
    _keep_programs()
    name = f"{settings.task_in_names}-{settings.algorithm}-flower-{context.run_id}"
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    if rehearsal is not None:
        log(WARNING, "A rehearsal: random numbers follow from seed %d, and are no secret", settings.seed)
    strategy = ByzPG(settings, None if rehearsal is None else seeded_key(settings.seed))
    strategy.wait_for_clients(grid, options.reply_seconds)
    rounds = strategy.server.num_iterations
    strategy.start(grid, strategy.arrays, rounds, timeout=options.reply_seconds)
    kept = RunDirectory.create(directory / name, settings)  # not before: there is nothing that could be resumed
    kept.write_results(strategy.results())
    for line in strategy.report():
        log(INFO, line)
    log(INFO, "Results: %s (byzpg plot, byzpg play)", kept.path)


client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Reply with the gradient at the server's θ, from episodes of the client's own."""
    options = _read_options(tuple(sorted(context.run_config.items())))
    _keep_programs()
    asked = message.content.config_records["config"]
    server_round, position = _whole(asked["round"]), _whole(asked["position"])
    parameters = message.content.array_records["arrays"]["parameters"].numpy()
    rehearsal = options.rehearsal
    lie = None if rehearsal is None else rehearsal.lie(position, server_round)
    key_data = _secret(context) if rehearsal is None else seeded_key(options.settings.seed)
    worker = Worker(
        options.settings.federation(),
        position,
        key_data,
        attack=lie if isinstance(lie, Attack) else None,
        as_simulated=rehearsal is not None,
    )
    gradient = worker.gradient(server_round - 1, parameters)
    if isinstance(lie, Attack) and rehearsal is not None:
        gradient = worker.false_gradient(lie, server_round - 1, parameters, rehearsal.attackers)
    said = {"round": server_round, "position": position, "return": float(np.mean(worker.returns))}
    return _MISCHIEF.get(lie, _reply)(message, gradient, said)


Said = dict[str, int | float]


def _reply(message: Message, gradient: np.ndarray, said: Said) -> Message:
    arrays = ArrayRecord({"gradient": Array(gradient)})
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({**said})}), reply_to=message)


def _crash(message: Message, gradient: np.ndarray, said: Said) -> Message:
    raise RuntimeError("a rehearsed crash")


_MISCHIEF: dict[Attack | Wire | None, Callable[[Message, np.ndarray, Said], Message]] = {
    "WrongShape": lambda message, gradient, said: _reply(message, gradient[:-1], said),
    "WrongType": lambda message, gradient, said: _reply(message, gradient.astype(np.float64), said),
    "WrongRound": lambda message, gradient, said: _reply(message, gradient, said | {"round": said["round"] - 1}),
    "WrongPosition": lambda message, gradient, said: _reply(message, gradient, said | {"position": -1}),
    "Malformed": lambda message, gradient, said: Message(RecordDict(), reply_to=message),
    "Crash": _crash,
}


def _whole(value: object) -> int:
    assert isinstance(value, int), "the server's own words"
    return value


def _secret(context: Context) -> np.ndarray:
    """The client's key of this run, made up at its first message and kept in its state on the node."""
    kept = context.state.config_records.get("byzpg")
    if kept is None or kept["run"] != context.run_id:
        kept = ConfigRecord({"run": context.run_id, "key": secret_key().tobytes()})
        context.state["byzpg"] = kept
    key = kept["key"]
    assert isinstance(key, bytes)
    return np.frombuffer(key, np.uint32)


def _keep_programs() -> None:
    """Keep compiled programs on the disk: on a SuperNode, every message is the first of a new process."""
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
        jax.config.update("jax_compilation_cache_dir", str(home / "byzpg-programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)
