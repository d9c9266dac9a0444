"""The server of ByzPG and ByzPPO as a strategy of Flower."""

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log

from byzpg.config import Settings
from byzpg.engines.flower import replies as receiving
from byzpg.engines.flower.replies import CLAIMS, CarefulGrid, RefusedError, claims, read_reply
from byzpg.federation.members import Server, secret_key
from byzpg.federation.metrics import METRICS
from byzpg.runs import Run


class ByzPG(Strategy):
    """The trusted server of ByzPG or ByzPPO, or with algorithm Fed-PAGE-PG or Fed-PPO the server of plain averaging.

    A round of Flower is one exchange of gradients: an iteration of ByzPG, and with a critic one of the exchanges of an
    iteration. The parameters θ live in `server`; the arrays that Flower passes around are copies of them.

    Args:
        settings: The settings of the run.
        key_data: The key of the server's random numbers, as the simulator would have it; None for a secret key.
    """

    def __init__(self, settings: Settings, key_data: np.ndarray | None = None) -> None:
        self.settings = settings
        self.server = Server(
            settings.federation(),
            settings.schedule(),
            secret_key() if key_data is None else key_data,
            as_simulated=key_data is not None,
        )
        self.nodes: list[int] = []  # by position
        self.refused: Counter[tuple[int, str]] = Counter()  # replies left out, by node and reason
        self.claims: list[dict[str, float]] = []  # by round: the median of the clients' claims, or the server's own
        self.stepped: list[bool] = []  # by round: whether the parameters changed
        self.usable: list[float] = []  # by round: usable replies, NaN for small batches
        self._sent: list[Message] = []

    @property
    def arrays(self) -> ArrayRecord:
        """θ, for `start` and for clients."""
        return ArrayRecord({"parameters": Array(self.server.parameters)})

    @property
    def num_rounds(self) -> int:
        """Rounds of the whole run."""
        return self.server.num_iterations * self.server.exchanges

    def wait_for_clients(self, grid: Grid, seconds: float) -> None:
        """Wait until K nodes are connected, and give them their positions. They are the federation from then on.

        Raises:
            ValueError: If too few nodes connect within `seconds`, or if too many are connected.
        """
        expected, deadline, last = self.server.num_workers, time.monotonic() + seconds, -1
        while len(nodes := sorted(grid.get_node_ids())) < expected:
            if len(nodes) != last:
                log(INFO, "Waiting for %d clients (num-agents), %d are connected", expected, last := len(nodes))
            if time.monotonic() > deadline:
                raise ValueError(
                    f"num-agents is {expected}, and only {len(nodes)} SuperNodes are connected after {seconds:g} s: "
                    "start the others, or set num-agents."
                )
            time.sleep(receiving.PAUSE)
        if len(nodes) > expected:
            raise ValueError(
                f"num-agents is {expected}, but {len(nodes)} SuperNodes are connected: set num-agents={len(nodes)}, "
                "or stop the others."
            )
        self.nodes = nodes

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, *arguments: Any, **options: Any
    ) -> Result:
        """Run rounds as Flower's `Strategy.start` does, over a grid that no reply can break."""
        if num_rounds > self.num_rounds:
            raise ValueError(f"num_rounds must be at most {self.num_rounds}, got {num_rounds}.")
        return super().start(CarefulGrid(grid), initial_arrays, num_rounds, *arguments, **options)

    def summary(self) -> None:
        """Log what will be trained."""
        settings = self.settings
        log(INFO, "\t├──> %s on %s with %s", settings.algorithm, settings.env, settings.aggregator)
        log(INFO, "\t├──> %d clients, of which %d may be Byzantine", settings.num_agents, settings.num_byzantine)
        asking = np.sum(self.server.plan.large) * self.server.exchanges
        log(INFO, "\t└──> %d rounds, of which %d ask clients", self.num_rounds, asking)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every client for its gradient, unless the server samples alone in this round."""
        if not self.nodes:
            self.wait_for_clients(grid, 0)
        self._sent = []
        iteration, exchange = self._moment(server_round)
        if exchange or self.server.begin(iteration):
            for position, node in enumerate(self.nodes):
                asked = ConfigRecord({**config, "round": server_round, "position": position})
                content = RecordDict({"arrays": self.arrays, "config": asked})
                self._sent.append(Message(content, node, MessageType.TRAIN, group_id=str(server_round)))
        return self._sent

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Step along the aggregate of the replies or, in a small batch, along the server's own gradient."""
        (iteration, exchange), refused_before = self._moment(server_round), self.refused.total()
        if self._sent:
            rows, present, claimed = self._read(server_round, replies)
            stepped, usable = self.server.combine(iteration, exchange, rows, present), float(np.sum(present))
            typical = {
                name: float(np.median([each[name] for each in claimed])) if claimed else math.nan for name in CLAIMS
            }
            if not stepped:
                need = self.server.num_workers - self.server.num_byzantine
                words = "Round %d: no step, with %d usable replies of the %d that are needed (K − f)"
                log(WARNING, words, server_round, usable, need)
        else:
            stepped, usable = True, math.nan
            typical = claims(self.server.sample(iteration))
        self.claims.append(typical)
        self.stepped.append(stepped)
        self.usable.append(usable)
        entry: dict[str, int | float] = {
            "return": typical["return"],
            self.server.agent.unit: int(self.server.plan.progress[iteration]),
            "stepped": int(stepped),
            "replies-refused": self.refused.total() - refused_before,
        }
        return self.arrays, MetricRecord({**entry})

    def _moment(self, server_round: int) -> tuple[int, int]:
        """The iteration and the exchange of a round; where there are several exchanges, all batches are large."""
        return divmod(server_round - 1, self.server.exchanges)

    def _read(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[np.ndarray, np.ndarray, list[dict[str, float]]]:
        """The rows [K, d] of a round, which of them are usable, and what these clients claim."""
        num_workers = self.server.num_workers
        by_message = {message.metadata.message_id: position for position, message in enumerate(self._sent)}
        found: list[list[Message]] = [[] for _ in range(num_workers)]
        for reply in replies:  # each answers one of the messages; `CarefulGrid` has checked that
            found[by_message[reply.metadata.reply_to_message_id]].append(reply)
        rows = np.zeros((num_workers, self.server.dimension), np.float32)
        present, claimed = np.zeros(num_workers, bool), []
        for position, theirs in enumerate(found):
            try:
                if not theirs:
                    raise RefusedError("missing", "there is none")
                if len(theirs) > 1:
                    raise RefusedError("duplicate", f"there are {len(theirs)}")
                row, claim = read_reply(theirs[0], server_round, position, self.server.dimension)
            except RefusedError as refusal:
                self.refused[self.nodes[position], refusal.reason] += 1
                line = "Round %d: the reply of client %d (node %d) is left out (%s): %s"
                log(WARNING, line, server_round, position, self.nodes[position], refusal.reason, refusal.words)
                continue
            rows[position], present[position] = row, True
            claimed.append(claim)
        return rows, present, claimed

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask no client: the learning curve shows the returns of training."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing is evaluated."""
        return None

    def report(self) -> list[str]:
        """Lines about the outcome, and about the replies that were left out, by client and reason."""
        lines = [
            f"{np.sum(self.stepped)} steps in {len(self.stepped)} rounds, last return {self.claims[-1]['return']:.1f}"
        ]
        for (node, reason), number in sorted(self.refused.items()):
            lines.append(f"left out: {number} × {reason} from client {self.nodes.index(node)} (node {node})")
        return lines

    def results(self) -> Run:
        """The results as a run of one agent."""
        claimed = {name: self._by_iteration([each[name] for each in self.claims]) for name in CLAIMS}
        plan, num_iterations = self.server.plan, len(claimed["return"])
        players = np.where(plan.large[:num_iterations], self.server.num_workers, 1)
        columns = {
            "return_mean": claimed["return"],
            "episodes": claimed["episodes"],
            "environment_steps": claimed["steps"] * players,
            "stepped": self._by_iteration(self.stepped),
            "usable_replies": self._by_iteration(self.usable),
        }
        metrics = {name: np.full((1, num_iterations), np.nan, np.float32) for name in METRICS}
        metrics |= {name: values[None].astype(np.float32) for name, values in columns.items()}
        last, uniform = self.server.parameters[None, None], self.server.output[None, None]
        return Run.of(self.settings, [plan], metrics=metrics, last=last, uniform=uniform)

    def _by_iteration(self, values: Sequence[float]) -> np.ndarray:
        """The mean over those rounds of each whole iteration that have a value; NaN if none has."""
        exchanges = self.server.exchanges
        table = np.asarray(values, float)[: len(values) // exchanges * exchanges].reshape(-1, exchanges)
        known = np.isfinite(table)
        total, number = np.sum(np.where(known, table, 0), axis=1), np.sum(known, axis=1)
        return np.where(number, total / np.maximum(number, 1), np.nan)
