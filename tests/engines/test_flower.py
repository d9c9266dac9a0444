"""ByzPG and ByzPPO on Flower: they learn what the simulator learns, and no reply can stop them."""

import functools
import io
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flower_deployment import APP, PATIENCE, Deployment, deployment, write_node_key
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from numpy.lib import format as numpy_format

from byzpg import Config, Run, load
from byzpg.engines.flower import SIMULATED, ByzPG, Options, client_app, server_app
from byzpg.federation.members import Server, seeded_key
from byzpg.federation.schedule import ITERATIONS
from byzpg.federation.simulator import LARGE, SMALL, Simulation
from byzpg.robust.attacks import NoAttack
from byzpg.robust.exchange import exchange

RUN, SERVER = 7, 1
NODES = (900, 17, 2**63, 44)  # unsorted; positions follow the sorted ids
ATTACKER = max(NODES)  # at position 3
SEED = 3
SHORT: dict[str, Any] = {
    "num-agents": 4,
    "num-byzantine": 1,
    "seed": SEED,
    "horizon": 40,
    "large-batch": 6,
    "small-batch": 3,
    "switch-probability": 0.6,
    "momentum": 0.5,
    "rehearsal": True,
}


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what Flower's runtime tells a process about itself."""
    for name, value in (("_task_id", 1), ("_run_id", RUN), ("_node_id", SERVER)):
        monkeypatch.setattr(TaskIdentity, name, value)
    monkeypatch.setattr("byzpg.engines.flower.replies.PAUSE", 0.001)


def over_the_wire(message: Message) -> Message:
    """The message as it arrives, after Flower's serialisation."""
    objects = {number: each.deflate() for number, each in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(message.object_id, objects)
    assert isinstance(arrived, Message)
    arrived.metadata.__dict__["_message_id"] = message.object_id
    return arrived


# Replaces a reply on its way, by round (from 1) and node: by other replies, by none, or by an exception.
Tamper = Callable[[int, int, Message], list[Message]]


class LoopbackGrid(Grid):
    """Nodes in this process, each with its own context; messages go through Flower's own serialisation."""

    def __init__(self, run_config: Mapping[str, Any], tamper: Tamper | None = None, nodes: Iterable[int] = NODES):
        self.contexts = {node: Context(RUN, node, {}, RecordDict(), dict(run_config)) for node in nodes}
        self.tamper = tamper or (lambda server_round, node, reply: [reply])
        self.replies: dict[str, Callable[[], list[Message]]] = {}
        self.sent: list[Message] = []

    @property
    def run(self) -> Any: ...

    def set_run(self, run: Any) -> None: ...

    def create_message(self, *content: Any, **options: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            self.sent.append(message)
            self.replies[message.object_id] = lambda message=message: self._answers(message)
        return [message.object_id for message in messages]

    def _answers(self, message: Message) -> list[Message]:
        node, arrived = message.metadata.dst_node_id, over_the_wire(message)
        try:
            reply = client_app(arrived, self.contexts[node])
        except Exception as error:  # as `flwr-clientapp` does
            reply = Message(Error(2, str(error)), reply_to=arrived)
        return [over_the_wire(each) for each in self.tamper(int(message.metadata.group_id), node, reply)]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [reply for number in message_ids if number in self.replies for reply in self.replies.pop(number)()]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


def flower_run(folder: Path, tamper: Tamper | None = None, **options: Any) -> tuple[Run, LoopbackGrid]:
    """Run the whole server app in this process."""
    config = {**SHORT, **{name.replace("_", "-"): value for name, value in options.items()}, "directory": str(folder)}
    grid = LoopbackGrid(config, tamper, NODES[-config["num-agents"] :])
    server_app(grid, Context(RUN, SERVER, {}, RecordDict(), config))
    (path,) = folder.iterdir()
    return load(path), grid


# Iterations that the simulator runs in one call.
BLOCK = 10
# The simulator's attackers, by the name of their run on Flower.
TWINS: dict[str, dict[str, Any]] = {
    "honest": {},
    "AvgZero": {"num_attackers": 1, "attack": "AvgZero"},
    "Silent": {"num_attackers": 1, "attack": "Silent"},
}


@dataclass(frozen=True)
class Twins:
    """The simulated runs, side by side in one program."""

    trajectories: list[int]  # after every block
    parameters: dict[str, list[np.ndarray]]  # θ after every block


@pytest.fixture(scope="module")
def twins() -> Twins:
    options = {name.replace("-", "_"): value for name, value in SHORT.items() if name != "rehearsal"} | {
        "algorithm": "ByzPG",
        "num_seeds": 1,
        "num_attackers": 0,
        "trajectories": 10 * len(BAD),
    }
    settings = [Config(**{**options, **each}).resolved() for each in TWINS.values()]
    simulation = Simulation(tuple(each.federation() for each in settings), (SEED,))
    plan, states = ByzPG(settings[0]).server.plan, simulation.start()
    found = Twins([], {name: [] for name in TWINS})
    for first in range(0, len(plan.large) - BLOCK, BLOCK):
        batches = np.where(plan.large[first : first + BLOCK], LARGE, SMALL)
        assert len(set(batches)) == 2, "both sizes are tried"
        states, _ = simulation.run(states, batches, plan.output_iteration)
        found.trajectories.append(int(plan.progress[first + BLOCK - 1]))
        for name, state in zip(TWINS, states, strict=True):
            found.parameters[name].append(np.asarray(state.agents.parameters[0, 0]))
    return found


@pytest.mark.parametrize("name", [name for name in TWINS if name != "Silent"])
def test_a_run_on_flower_is_what_the_simulator_says(tmp_path: Path, twins: Twins, name: str) -> None:
    attack: dict[str, Any] = {"rehearsal_attack": name, "rehearsal_attackers": "3"} if TWINS[name] else {}
    run, grid = flower_run(tmp_path, trajectories=twins.trajectories[0], **attack)
    expected = {twin: parameters[0] for twin, parameters in twins.parameters.items()}
    np.testing.assert_allclose(run.parameters["last"][0, 0], expected[name], rtol=0, atol=1e-6)
    assert all(np.max(np.abs(expected[name] - theirs)) > 1e-4 for twin, theirs in expected.items() if twin != name)
    assert len(grid.sent) == 4 * np.sum(run.large) < 4 * run.large.size, "small batches ask no client"
    assert run.complete
    assert np.all(run.metrics["stepped"] == 1)
    assert np.all(np.isfinite(run.returns))
    assert np.all(run.metrics["usable_replies"][run.large] == 4)
    assert play_a_step(run) in (0, 1)


# With a critic: 5 iterations of 32 steps and 4 updates each.
WITH_CRITIC: dict[str, Any] = {
    "num-agents": 4,
    "num-byzantine": 1,
    "seed": SEED,
    "horizon": 20,
    "hidden": "8",
    "optimizer": "adam",
    "decay": 0.0,
    "momentum": 0.5,
    "steps": 5 * 32,
    "rehearsal": True,
}
# By the name of the run on Flower: the algorithm, whether a client attacks, and the updates between two rounds.
CRITICS: dict[str, tuple[str, bool, int]] = {
    "gradients": ("ByzPPO", False, 1),
    "gradients, attacked": ("ByzPPO", True, 1),
    "plain mean": ("Fed-PPO", False, 1),
    "changes": ("ByzPPO", False, 4),
    "changes, attacked": ("ByzPPO", True, 4),
}


def with_critic(name: str) -> dict[str, Any]:
    algorithm, _, every = CRITICS[name]
    learner = f"PPO(environments=2, segment=16, epochs=2, minibatches=2, exchange_every={every})"
    return WITH_CRITIC | {"algorithm": algorithm, "num-byzantine": int(algorithm == "ByzPPO"), "ppo": learner}


@pytest.fixture(scope="module")
def critics() -> dict[str, np.ndarray]:
    """The parameters of the simulated runs; those with the same number of rounds are side by side in one program."""
    found: dict[str, np.ndarray] = {}
    for every in (1, 4):
        names = [name for name, (_, _, updates) in CRITICS.items() if updates == every]
        settings = []
        for name in names:
            given = {option.replace("-", "_"): value for option, value in with_critic(name).items()}
            given |= {"num_seeds": 1, "num_attackers": int(CRITICS[name][1]), "hidden": (8,)}
            settings.append(
                Config(**{option: value for option, value in given.items() if option != "rehearsal"}).resolved()
            )
        simulation = Simulation(tuple(each.federation() for each in settings), (SEED,))
        states, _ = simulation.run(simulation.start(), [LARGE] * 5, 0, only_large=True)
        found |= {name: np.asarray(state.agents.parameters[0, 0]) for name, state in zip(names, states, strict=True)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CRITICS)
def test_a_run_with_a_critic_on_flower_is_what_the_simulator_says(
    tmp_path: Path, critics: dict[str, np.ndarray], name: str
) -> None:
    """A round is one exchange; environments, histories and optimizers stay on the nodes between rounds."""
    _, attacked, every = CRITICS[name]
    rehearsed = {"rehearsal-attack": "AvgZero", "rehearsal-attackers": "3"} if attacked else {}
    config = with_critic(name) | rehearsed | {"directory": str(tmp_path)}
    grid = LoopbackGrid(config)
    server_app(grid, Context(RUN, SERVER, {}, RecordDict(), config))
    (path,) = tmp_path.iterdir()
    run = load(path)
    np.testing.assert_allclose(run.parameters["last"][0, 0], critics[name], rtol=0, atol=2e-5)
    others = [theirs for other, theirs in critics.items() if other != name]
    assert all(np.max(np.abs(critics[name] - theirs)) > 1e-3 for theirs in others)
    assert len(grid.sent) == 4 * 5 * (4 // every)
    assert run.complete
    np.testing.assert_array_equal(run.steps, [np.arange(1, 6) * 32])
    np.testing.assert_array_equal(run.metrics["environment_steps"], 4 * 32)
    assert 5 < run.trajectories[0, -1] < 160
    assert np.all(np.isfinite(run.returns))
    assert np.all(run.metrics["stepped"] == 1)
    assert np.all(run.metrics["usable_replies"] == 4)
    assert play_a_step(run) in (0, 1)
    # Between iterations, a node keeps no steps: environments, two moments and a history, or a history alone.
    honest = grid.contexts[min(NODES)].state.array_records[f"byzpg-memory-{RUN}"]
    (kept,) = (each.numpy() for each in honest.values())
    dimension = critics[name].size
    assert kept.dtype == np.uint8
    assert (1 if every == 1 else 3) * 4 * dimension < kept.size < (1 if every == 1 else 3) * 4 * dimension + 100


def play_a_step(run: Run) -> int:
    return int(run.policy().act(np.zeros(4)))


def test_a_random_rule_draws_the_same_at_the_server_and_in_the_simulator() -> None:
    rule = "Bucketing(RFA(), size=3)"
    given = {**SHORT, "num-byzantine": 0, "aggregator": rule, "optimizer": "sgd", "step-size": 1.0}
    settings = Options.of(given).settings
    server = Server(settings.federation(), settings.schedule(), seeded_key(SEED))
    rows = np.random.default_rng(0).normal(size=(4, server.dimension)).astype(np.float32)
    for iteration in range(5):  # another draw may happen to agree, but not five times
        key = functools.reduce(jax.random.fold_in, (ITERATIONS, iteration, 4), jax.random.key(SEED))
        expected, _ = exchange(
            server.aggregator, rows, byzantine=[], attack=NoAttack(), num_byzantine=0, key=key, at_server=True
        )
        before = server.parameters
        assert server.combine(iteration, 0, rows, np.ones(4, bool))
        np.testing.assert_allclose(server.parameters - before, expected, atol=1e-5)


def reply_with(reply: Message, arrays: Any = None, metrics: Any = None) -> Message:
    """The reply, with other records."""
    records: dict[str, Any] = {"arrays": arrays, "metrics": metrics}
    kept = {name: reply.content[name] if records[name] is None else records[name] for name in records}
    twin = Message(RecordDict(kept), reply_to=reply)
    twin.__dict__["_metadata"] = reply.metadata
    return twin


def with_gradient(reply: Message, **fields: Any) -> Message:
    """The reply, with other fields in its array, which may contradict its data."""
    array = reply.content.array_records["arrays"]["gradient"]
    values = {name: fields.get(name, getattr(array, name)) for name in ("dtype", "shape", "stype", "data")}
    return reply_with(reply, arrays=ArrayRecord({"gradient": Array(**values)}))


def with_vector(reply: Message, change: Callable[[np.ndarray], np.ndarray]) -> Message:
    vector = reply.content.array_records["arrays"]["gradient"].numpy()
    return reply_with(reply, arrays=ArrayRecord({"gradient": Array(change(vector))}))


def saying(reply: Message, **said: Any) -> Message:
    honest = dict(reply.content.metric_records["metrics"])
    return reply_with(reply, metrics=MetricRecord({**honest, **said}))


def from_another(reply: Message) -> Message:
    reply.metadata.__dict__["_src_node_id"] = min(NODES)
    return reply


def to_another(reply: Message) -> Message:
    reply.metadata.__dict__["_reply_to_message_id"] = "f" * 64
    return reply


def unreadable(reply: Message) -> list[Message]:
    raise ValueError("no such object")


def claiming(shape: tuple[int, ...]) -> bytes:
    """The header of an array of this shape, and nothing after it."""
    header = io.BytesIO()
    numpy_format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return header.getvalue()


BAD: dict[str, tuple[str, Callable[[Message], list[Message]]]] = {
    "NaN": ("not finite", lambda reply: [with_vector(reply, lambda vector: vector * np.nan)]),
    "Inf": ("not finite", lambda reply: [with_vector(reply, lambda vector: vector + np.float32(np.inf))]),
    "too long": ("not finite", lambda reply: [with_vector(reply, lambda vector: vector * 0 + np.float32(1e18))]),
    "one short": ("wrong shape", lambda reply: [with_vector(reply, lambda vector: vector[:-1])]),
    "a row": ("wrong shape", lambda reply: [with_vector(reply, lambda vector: vector[None])]),
    "no number": ("wrong shape", lambda reply: [with_vector(reply, lambda vector: vector[0, ...])]),
    "float64": ("wrong type", lambda reply: [with_vector(reply, lambda vector: vector.astype(np.float64))]),
    "text": ("wrong type", lambda reply: [with_vector(reply, lambda vector: vector.astype("U8"))]),
    "false label": ("wrong shape", lambda reply: [with_gradient(reply, shape=(3,))]),
    "claimed": ("wrong shape", lambda reply: [with_gradient(reply, data=claiming((10**12,)))]),
    "cut off": ("malformed", lambda reply: [with_gradient(reply, data=b"\x93NUMPY\x01\x00")]),
    "half": (
        "malformed",
        lambda reply: [with_gradient(reply, data=reply.content.array_records["arrays"]["gradient"].data[:-100])],
    ),
    "no array": ("malformed", lambda reply: [with_gradient(reply, data=b"")]),
    "pickle": ("malformed", lambda reply: [with_gradient(reply, stype="pickle")]),
    "other arrays": ("malformed", lambda reply: [reply_with(reply, arrays=ArrayRecord())]),
    "config for arrays": ("malformed", lambda reply: [reply_with(reply, arrays=ConfigRecord({"gradient": 1.0}))]),
    "empty": ("malformed", lambda reply: [Message(RecordDict(), reply_to=reply_to(reply))]),
    "old round": ("wrong round", lambda reply: [saying(reply, round=0)]),
    "round in halves": ("wrong round", lambda reply: [saying(reply, round=1.5)]),
    "other position": ("wrong position", lambda reply: [saying(reply, position=0)]),
    "return NaN": ("malformed", lambda reply: [saying(reply, **{"return": float("nan")})]),
    "return list": ("malformed", lambda reply: [saying(reply, **{"return": [1.0]})]),
    "error": ("error", lambda reply: [Message(Error(2, "\x1b[2Jboom\n" + "!" * 999), reply_to=reply_to(reply))]),
    "unreadable": ("error", unreadable),
    "twice": ("duplicate", lambda reply: [reply, saying(reply, **{"return": 9.0})]),
    "none": ("missing", lambda reply: []),
    "forged sender": ("error", lambda reply: [from_another(reply)]),
    "no question": ("error", lambda reply: [to_another(reply)]),
}


def reply_to(reply: Message) -> Message:
    """A message that such a reply answers."""
    asked = Message(RecordDict(), reply.metadata.src_node_id, "train", group_id=reply.metadata.group_id)
    asked.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    asked.metadata.__dict__["_src_node_id"] = SERVER
    return asked


def test_every_bad_reply_is_counted_named_and_left_out(
    tmp_path: Path, twins: Twins, caplog: pytest.LogCaptureFixture
) -> None:
    """One client sends one after the other, and the run equals a simulation in which it is silent."""
    tried = iter(BAD)

    def tamper(server_round: int, node: int, reply: Message) -> list[Message]:
        return BAD[next(tried, "none")][1](reply) if node == ATTACKER else [reply]

    run, _ = flower_run(tmp_path, tamper, trajectories=twins.trajectories[-1], reply_seconds=0.05)
    rounds = int(np.sum(run.large))
    assert rounds >= len(BAD), "every kind has its round"
    expected = twins.parameters["Silent"][-1]
    np.testing.assert_allclose(run.parameters["last"][0, 0], expected, rtol=0, atol=1e-6)
    assert np.all(run.metrics["stepped"] == 1)
    assert np.all(run.metrics["usable_replies"][run.large] == 3)
    refusals = [line for line in caplog.messages if "is left out" in line]
    expected_reasons = Counter(reason for reason, _ in BAD.values())
    expected_reasons["missing"] += rounds - len(BAD)  # of the rounds after that
    assert Counter(line.partition("is left out (")[2].partition(")")[0] for line in refusals) == expected_reasons
    named = [line for line in refusals if f"client 3 (node {ATTACKER})" in line]
    assert len(named) == rounds
    assert all(line.isprintable() and len(line) < 400 for line in refusals)
    summary = [line for line in caplog.messages if line.startswith("left out: ")]
    assert f"left out: 5 × wrong shape from client 3 (node {ATTACKER})" in summary


def test_with_too_few_usable_replies_the_parameters_stay_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two clients fail in the first two rounds, with f = 1: θ must not move there, and the third round steps."""

    def tamper(server_round: int, node: int, reply: Message) -> list[Message]:
        failing = server_round <= 2 and node in (ATTACKER, min(NODES))
        return [saying(reply, round=99)] if failing else [reply]

    seen = []
    options = {**SHORT, "trajectories": 18, "switch-probability": 1.0}
    strategy, grid = ByzPG(Options.of(options).settings, seeded_key(SEED)), LoopbackGrid(options, tamper)
    advance = strategy.aggregate_train

    def watched(server_round: int, replies: Iterable[Message]) -> Any:
        result = advance(server_round, replies)
        seen.append(strategy.server.parameters)
        return result

    strategy.aggregate_train = watched
    before = strategy.server.parameters
    result = strategy.start(grid, strategy.arrays, 3, timeout=5)
    np.testing.assert_array_equal(before, seen[0])
    np.testing.assert_array_equal(before, seen[1])
    assert np.max(np.abs(seen[2] - before)) > 1e-3
    np.testing.assert_array_equal(result.arrays["parameters"].numpy(), seen[2])
    assert strategy.stepped == [False, False, True]
    assert strategy.refused == {(ATTACKER, "wrong round"): 2, (min(NODES), "wrong round"): 2}
    assert "Round 2: no step, with 2 usable replies of the 3 that are needed (K − f)" in caplog.messages


def test_a_client_that_claims_a_high_return_does_not_move_the_curve(tmp_path: Path) -> None:
    run, _ = flower_run(
        tmp_path,
        lambda server_round, node, reply: [saying(reply, **{"return": 1e9}) if node == ATTACKER else reply],
        trajectories=6,
    )
    assert run.metrics["usable_replies"].tolist() == [[4]]
    assert np.all(run.returns <= SHORT["horizon"])


# 1 of 4 clients attacks.
@pytest.mark.parametrize(
    ("algorithm", "attack"),
    [
        pytest.param("ByzPG", None, marks=pytest.mark.slow),
        pytest.param("ByzPG", "NonFinite", marks=pytest.mark.slow),
        pytest.param("ByzPG", "WrongShape", marks=pytest.mark.slow),
        ("ByzPG", "AvgZero"),
        pytest.param("Fed-PAGE-PG", None, marks=pytest.mark.slow),
        pytest.param("Fed-PAGE-PG", "NonFinite", marks=pytest.mark.slow),
        pytest.param("Fed-PAGE-PG", "WrongShape", marks=pytest.mark.slow),
        ("Fed-PAGE-PG", "AvgZero"),
    ],
)
def test_byzpg_learns_beside_an_attacker_and_plain_averaging_does_not(
    tmp_path: Path, algorithm: str, attack: str | None
) -> None:
    attacked: dict[str, Any] = {} if attack is None else {"rehearsal_attack": attack, "rehearsal_attackers": "3"}
    tolerated = {"algorithm": algorithm, "num_byzantine": int(algorithm == "ByzPG")}
    # Few rounds of large steps: every round costs the serialisation of all messages.
    batches = {"large_batch": 15, "switch_probability": 1.0, "horizon": 200, "trajectories": 270, "step_size": 0.08}
    batches |= {"momentum": 0.0}
    run, _ = flower_run(tmp_path, **batches, **tolerated, **attacked)
    last = float(np.mean(run.returns[0, -4:]))
    assert last > 160 if algorithm == "ByzPG" or attack is None else last < 50, last


def test_random_numbers_are_secret_last_a_run_and_follow_the_seed_in_rehearsals_only(tmp_path: Path) -> None:
    short = {"trajectories": 12, "switch_probability": 1.0}
    one, first = flower_run(tmp_path / "one", rehearsal=False, **short)
    two, _ = flower_run(tmp_path / "two", rehearsal=False, **short)
    assert np.max(np.abs(one.parameters["last"] - two.parameters["last"])) > 1e-4
    secrets = [context.state.config_records["byzpg"]["key"] for context in first.contexts.values()]
    assert len(set(secrets)) == 4
    context = first.contexts[ATTACKER]
    client_app(over_the_wire(first.sent[-1]), context)
    assert context.state.config_records["byzpg"]["key"] in secrets, "the same in all rounds of a run"
    context.run_id = RUN + 1
    client_app(over_the_wire(first.sent[-1]), context)
    assert context.state.config_records["byzpg"]["key"] not in secrets, "and a new one in the next run"
    rehearsed = [flower_run(tmp_path / name, **short)[0].parameters["last"] for name in ("three", "four")]
    np.testing.assert_array_equal(rehearsed[0], rehearsed[1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"agregator": "RFA"}, "there is no option 'agregator'. Did you mean 'aggregator'?"),
        ({"aggregator": "RFX"}, "there is no aggregator 'RFX'"),
        ({"algorithm": "DecByzPG"}, "algorithm DecByzPG has no server: use one of Fed-PAGE-PG, ByzPG, FedPG-BR"),
        ({"algorithm": "Dec-PPO"}, "algorithm Dec-PPO has no server: use one of Fed-PPO, ByzPPO"),
        ({"algorithm": "Fed-PAGE-PG"}, "tolerates no attacker: num-byzantine must be 0, got 1"),
        ({"num-byzantine": 2}, "2 of 4 agents breaks that: use num_byzantine ≤ 1"),
        ({"num-attackers": 1}, "num-attackers is for simulated runs"),
        ({"transport": True}, "transport needs earlier parameters, which the server does not send"),
        ({"hidden": "16;16"}, "hidden must be sizes such as '16,16', got '16;16'"),
        ({"large-batch": "many"}, "large_batch must be int; got 'many'"),
        ({"reply-seconds": -1}, "reply-seconds must be a positive number, got -1"),
        ({"directory": 3}, "directory must be a path in quotes, got 3"),
        ({"rehearsal": "yes"}, "rehearsal must be true or false, got 'yes'"),
        ({"rehearsal": False, "rehearsal-attack": "Crash"}, "set rehearsal=true, or neither"),
        ({"rehearsal-attack": "Crash"}, "rehearsal-attack and rehearsal-attackers belong together"),
        ({"rehearsal-attack": "Crush", "rehearsal-attackers": "1"}, "Did you mean 'Crash'?"),
        ({"rehearsal-attack": "Crash", "rehearsal-attackers": "4"}, "different positions of 0 to 3, got '4'"),
        ({"rehearsal-attack": "Crash", "rehearsal-attackers": "one"}, "must be positions such as '0,3', got 'one'"),
        ({"rehearsal-attack": "Crash", "rehearsal-attackers": "0,1,2,3"}, "must leave an honest client"),
    ],
)
def test_a_bad_run_config_is_refused_before_any_work(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    config = {**SHORT, **options}
    grid = LoopbackGrid(config)
    with pytest.raises(ValueError, match=re.escape(words)):
        server_app(grid, Context(RUN, SERVER, {}, RecordDict(), {"directory": str(tmp_path), **config}))
    assert not grid.sent
    assert not list(tmp_path.iterdir())


def test_options_left_out_come_from_the_preset_and_sizes_from_text() -> None:
    app = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    settings = Options.of(app).settings
    assert settings == Config(algorithm="ByzPG", num_agents=4, num_byzantine=1, num_attackers=0, num_seeds=1).resolved()
    assert Options.of({**app, "hidden": "8, 4"}).settings.hidden == (8, 4)
    # The default of num-byzantine is a quarter of the agents, as in a simulation; no attacker is simulated.
    silent = Options.of({**app, "num-agents": 9, "num-byzantine": ""}).settings
    assert (silent.num_byzantine, silent.num_attackers) == (2, 0)
    plain = Options.of({**app, "algorithm": "Fed-PAGE-PG", "num-byzantine": ""}).settings
    assert plain.num_byzantine == 0
    missing = {field.name.replace("_", "-") for field in fields(Config)} - set(app)
    assert missing == {name.replace("_", "-") for name in SIMULATED}, "Flower takes no option that the app lacks"


def test_the_option_names_of_byzpg_0_1_are_still_read() -> None:
    present = {**SHORT, "rehearsal-attack": "Crash", "rehearsal-attackers": "3"}
    renamed = {"num-byzantine": "num-declared", "rehearsal-attackers": "rehearsal-liars"}
    old = {renamed.get(name, name): value for name, value in present.items()}
    assert old.keys() >= set(renamed.values())
    assert Options.of(old) == Options.of(present)
    for name, old_name in renamed.items():
        with pytest.raises(ValueError, match=f"{old_name} is the old name of {name}: give only one of them"):
            Options.of({**present, old_name: present[name]})


@pytest.mark.parametrize("module", ["byzpg.engines.flower", "byzpg.live.member"])
def test_a_member_imports_neither_the_simulator_nor_the_trainer(module: str) -> None:
    unneeded = ("byzpg.federation.simulator", "byzpg.training")
    program = f"import sys, {module}; print([name for name in {unneeded} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_the_number_of_nodes_must_be_num_agents(caplog: pytest.LogCaptureFixture) -> None:
    strategy = ByzPG(Options.of(SHORT).settings)
    with pytest.raises(ValueError, match="only 3 SuperNodes are connected after"):
        strategy.wait_for_clients(LoopbackGrid(SHORT, nodes=NODES[:3]), 0.01)
    assert "Waiting for 4 clients (num-agents), 3 are connected" in caplog.messages
    with pytest.raises(ValueError, match="but 5 SuperNodes are connected: set num-agents=5"):
        strategy.wait_for_clients(LoopbackGrid(SHORT, nodes=(*NODES, 5)), 0.01)
    strategy.wait_for_clients(LoopbackGrid(SHORT), 0.01)
    assert strategy.nodes == sorted(NODES)


def kept_run(deployed: Deployment) -> Run:
    """The only run that the server wrote."""
    (path,) = (deployed.folder / "runs").iterdir()
    run = load(path)
    shutil.rmtree(path)
    return run


@pytest.mark.slow
def test_a_deployment_with_tls_and_node_authentication_learns_the_same_beside_an_attacker(tmp_path: Path) -> None:
    """A SuperLink and three SuperNodes; a fourth, whose key is not registered, is refused."""
    options: dict[str, Any] = {"num-agents": 3, "trajectories": 15, "switch-probability": 0.4}
    options |= {"rehearsal-attack": "NonFinite; Zero; Crash", "rehearsal-attackers": "2"}
    twin, _ = flower_run(tmp_path / "twin", **options)  # first, so that the others find compiled programs
    assert twin.large.tolist() == [[True, False, True]]
    with deployment(tmp_path, tls=True) as deployed:
        deployed.start_secure_superlink()
        deployed.start_nodes(3)
        stranger = deployed.start_node("stranger", write_node_key(tmp_path / "stranger.key"))
        said = deployed.run(**{**SHORT, **options})
        run = kept_run(deployed)
        assert stranger.wait(PATIENCE) != 0
        assert "SuperNode ID" not in deployed.log("stranger")
        assert all("SuperNode ID" in deployed.log(f"node{number}") for number in range(3))
        assert len(deployed.alive()) >= 4
    assert not deployed.alive()
    np.testing.assert_allclose(run.parameters["last"], twin.parameters["last"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(run.returns, twin.returns, rtol=1e-6)
    np.testing.assert_array_equal(run.metrics["usable_replies"], [[2, np.nan, 2]])
    assert re.findall(r"left out: (\d+) × (.*) from client 2", said) == [("1", "error"), ("1", "not finite")]
    assert "a rehearsed crash" in said


@pytest.mark.slow
def test_the_app_runs_in_flowers_simulation(tmp_path: Path) -> None:
    """As in the documentation, but with a SuperLink of the test's own: `flwr run` would leave one behind."""
    options: dict[str, Any] = {"trajectories": 15, "switch-probability": 0.4}
    twin, _ = flower_run(tmp_path / "twin", **options)
    with deployment(tmp_path, tls=False) as deployed:
        deployed.start_superlink("--insecure", "--simulation")
        federation = "num-supernodes=4 client-resources-num-cpus=1 init-args-num-cpus=2"
        said = deployed.run("--federation-config", federation, **{**SHORT, **options})
        assert "3 steps in 3 rounds" in said, said
        run = kept_run(deployed)
    np.testing.assert_allclose(run.parameters["last"], twin.parameters["last"], rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def four_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployment(tmp_path_factory.mktemp("four"), tls=True) as deployed:
        deployed.start_secure_superlink()
        deployed.start_nodes(4)
        yield deployed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "attack"), [("ByzPG", ""), *product(("ByzPG", "Fed-PAGE-PG"), ("NonFinite", "WrongShape", "AvgZero"))]
)
def test_in_a_deployment_byzpg_learns_beside_an_attacker_and_plain_averaging_does_not(
    four_nodes: Deployment, algorithm: str, attack: str
) -> None:
    """CartPole, with 1 attacker among 4 clients. Few rounds of many episodes: every round costs seconds."""
    batches = {"large-batch": 150, "trajectories": 1200, "step-size": 0.15, "horizon": 500, "switch-probability": 1.0}
    batches |= {"momentum": 0.0}
    attacked = {"rehearsal-attack": attack, "rehearsal-attackers": "3"} if attack else {}
    tolerated = {"algorithm": algorithm, "num-byzantine": int(algorithm == "ByzPG")}
    four_nodes.run(**{**SHORT, **batches, **tolerated, **attacked})
    returns = kept_run(four_nodes).returns[0].round().tolist()
    assert returns[-1] > 200 if algorithm == "ByzPG" else max(returns) < 50, returns
