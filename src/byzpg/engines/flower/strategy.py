"""ByzPG's server as a strategy of Flower."""

import math
import time
from collections import Counter
from collections.abc import Iterable
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log

from byzpg.config import Settings
from byzpg.engines.flower import replies as receiving
from byzpg.engines.flower.replies import CarefulGrid, RefusedError, read_reply
from byzpg.federation.members import Server, secret_key
from byzpg.federation.metrics import METRICS
from byzpg.runs import Run


class ByzPG(Strategy):
    """The trusted server of ByzPG, or with algorithm Fed-PAGE-PG the server of plain averaging.

    The parameters θ live in `server`; the arrays that Flower passes around are copies of them.

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
        self.returns: list[float] = []  # by iteration: the median of the clients' claims, or the server's own mean
        self.stepped: list[bool] = []  # by iteration: whether the parameters changed
        self.usable: list[float] = []  # by iteration: usable replies, NaN for small batches
        self._sent: list[Message] = []

    @property
    def arrays(self) -> ArrayRecord:
        """θ, for `start` and for clients."""
        return ArrayRecord({"parameters": Array(self.server.parameters)})

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
        if num_rounds > self.server.num_iterations:
            raise ValueError(f"num_rounds must be at most {self.server.num_iterations}, got {num_rounds}.")
        return super().start(CarefulGrid(grid), initial_arrays, num_rounds, *arguments, **options)

    def summary(self) -> None:
        """Log what will be trained."""
        settings = self.settings
        log(INFO, "\t├──> %s on %s with %s", settings.algorithm, settings.env, settings.aggregator)
        log(INFO, "\t├──> %d clients, of which %d may be Byzantine", settings.num_agents, settings.num_byzantine)
        log(INFO, "\t└──> %d of the rounds ask clients", np.sum(self.server.plan.large))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every client for its gradient, if the round samples a large batch."""
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
        """Step along the aggregate of the replies or, in a small batch, along the server's own gradient."""
        iteration, refused_before = server_round - 1, self.refused.total()
        if self._sent:
            rows, present, claimed = self._read(server_round, replies)
            stepped, usable = self.server.combine(iteration, rows, present), float(np.sum(present))
            mean_return = float(np.median(claimed)) if claimed else math.nan
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
            "trajectories": int(self.server.plan.progress[iteration]),
            "stepped": int(stepped),
            "replies-refused": self.refused.total() - refused_before,
        }
        return self.arrays, MetricRecord({**entry})

    def _read(self, server_round: int, replies: Iterable[Message]) -> tuple[np.ndarray, np.ndarray, list[float]]:
        """The rows [K, d] of a round, which of them are usable, and the mean returns that these clients claim."""
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
                row, mean_return = read_reply(theirs[0], server_round, position, self.server.dimension)
            except RefusedError as refusal:
                self.refused[self.nodes[position], refusal.reason] += 1
                line = "Round %d: the reply of client %d (node %d) is left out (%s): %s"
                log(WARNING, line, server_round, position, self.nodes[position], refusal.reason, refusal.words)
                continue
            rows[position], present[position] = row, True
            claimed.append(mean_return)
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
        lines = [f"{np.sum(self.stepped)} steps in {len(self.stepped)} rounds, last return {self.returns[-1]:.1f}"]
        for (node, reason), number in sorted(self.refused.items()):
            lines.append(f"left out: {number} × {reason} from client {self.nodes.index(node)} (node {node})")
        return lines

    def results(self) -> Run:
        """The results as a run of one agent."""
        metrics = {name: np.full((1, len(self.stepped)), np.nan, np.float32) for name in METRICS}
        columns = {"return_mean": self.returns, "stepped": self.stepped, "usable_replies": self.usable}
        metrics |= {name: np.asarray([values], np.float32) for name, values in columns.items()}
        last, uniform = self.server.parameters[None, None], self.server.output[None, None]
        return Run.of(self.settings, [self.server.plan], metrics=metrics, last=last, uniform=uniform)
