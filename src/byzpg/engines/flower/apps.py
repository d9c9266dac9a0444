"""The two apps that Flower runs: the server, and a client on every SuperNode."""

import os
from collections.abc import Callable
from functools import lru_cache
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log

from byzpg.engines.flower.options import Options, ReplyFault
from byzpg.engines.flower.replies import claims
from byzpg.engines.flower.strategy import ByzPG
from byzpg.federation.devices import keep_programs
from byzpg.federation.members import Worker, secret_key, seeded_key
from byzpg.robust.attacks import Attack
from byzpg.runs import RunDirectory

server_app = ServerApp()
client_app = ClientApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Train as the run configuration says, and write the results as the directory of a run."""
    options = Options.of(context.run_config)
    settings, rehearsal = options.settings, options.rehearsal
    _keep_programs()
    name = f"{settings.task_in_names}-{settings.algorithm}-flower-{context.run_id}"
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    if rehearsal is not None:
        log(WARNING, "This is a rehearsal: random numbers follow from seed %d and are not secret", settings.seed)
    strategy = ByzPG(settings, None if rehearsal is None else seeded_key(settings.seed))
    strategy.wait_for_clients(grid, options.reply_seconds)
    strategy.start(grid, strategy.arrays, strategy.num_rounds, timeout=options.reply_seconds)
    kept = RunDirectory.create(directory / name, settings)  # not earlier: a run on Flower cannot be resumed
    kept.write_results(strategy.results())
    for line in strategy.report():
        log(INFO, line)
    log(INFO, "Results: %s (byzpg plot, byzpg play)", kept.path)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Reply with the gradient at the server's θ, from what the client played itself."""
    options = _read_options(tuple(sorted(context.run_config.items())))
    _keep_programs()
    asked = message.content.config_records["config"]
    server_round, position = _whole(asked["round"]), _whole(asked["position"])
    parameters = message.content.array_records["arrays"]["parameters"].numpy()
    rehearsal = options.rehearsal
    attack = None if rehearsal is None else rehearsal.attack(position, server_round)
    key_data = _secret(context) if rehearsal is None else seeded_key(options.settings.seed)
    worker = Worker(
        options.settings.federation(),
        position,
        key_data,
        attack=attack if isinstance(attack, Attack) else None,
        as_simulated=rehearsal is not None,
    )
    memory = f"byzpg-memory-{context.run_id}"
    kept = context.state.array_records.get(memory, {})  # nothing at the first message
    worker.recall({name: array.numpy() for name, array in kept.items()})
    moment = divmod(server_round - 1, worker.exchanges)
    gradient = worker.message(*moment, parameters)
    if isinstance(attack, Attack) and rehearsal is not None:
        gradient = worker.false_message(attack, *moment, parameters, rehearsal.attackers)
    if longer := worker.memory:
        context.state[memory] = ArrayRecord({name: Array(value) for name, value in longer.items()})
    metrics = {"round": server_round, "position": position, **claims(worker.sampled)}
    return _FAULTY_REPLIES.get(attack, _reply)(message, gradient, metrics)


@lru_cache(maxsize=8)
def _read_options(run_config: tuple[tuple[str, Any], ...]) -> Options:
    return Options.of(dict(run_config))


ReplyMetrics = dict[str, int | float]


def _reply(message: Message, gradient: np.ndarray, metrics: ReplyMetrics) -> Message:
    arrays = ArrayRecord({"gradient": Array(gradient)})
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({**metrics})}), reply_to=message)


def _crash(message: Message, gradient: np.ndarray, metrics: ReplyMetrics) -> Message:
    raise RuntimeError("a rehearsed crash")


_FAULTY_REPLIES: dict[Attack | ReplyFault | None, Callable[[Message, np.ndarray, ReplyMetrics], Message]] = {
    "WrongShape": lambda message, gradient, metrics: _reply(message, gradient[:-1], metrics),
    "WrongType": lambda message, gradient, metrics: _reply(message, gradient.astype(np.float64), metrics),
    "WrongRound": lambda message, gradient, metrics: _reply(
        message, gradient, metrics | {"round": metrics["round"] - 1}
    ),
    "WrongPosition": lambda message, gradient, metrics: _reply(message, gradient, metrics | {"position": -1}),
    "Malformed": lambda message, gradient, metrics: Message(RecordDict(), reply_to=message),
    "Crash": _crash,
}


def _whole(value: object) -> int:
    assert isinstance(value, int), "the server sends whole numbers"
    return value


def _secret(context: Context) -> np.ndarray:
    """The client's key for this run, drawn at its first message and kept in its state on the node."""
    kept = context.state.config_records.get("byzpg")
    if kept is None or kept["run"] != context.run_id:
        kept = ConfigRecord({"run": context.run_id, "key": secret_key().tobytes()})
        context.state["byzpg"] = kept
    key = kept["key"]
    assert isinstance(key, bytes)
    return np.frombuffer(key, np.uint32)


def _keep_programs() -> None:
    """Keep compiled programs where Flower keeps its files: a SuperNode starts a new process for every message."""
    keep_programs(Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "byzpg-programs")
