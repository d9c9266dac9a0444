"""Members behind a network: with and without the simulator's rounding, they compute the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from byzpg.config import Config
from byzpg.federation.agents import PAGEAgent
from byzpg.federation.members import Peer, Server, Worker, seeded_key
from byzpg.live.member import Options, _new_peer
from byzpg.training import train

SHORT: dict[str, Any] = {
    "num_agents": 5,
    "num_attackers": 0,
    "num_seeds": 1,
    "hidden": (6,),
    "horizon": 17,
    "large_batch": 6,
    "small_batch": 3,
    "switch_probability": 0.5,
    "trajectories": 30,
    "rounds": 1,
    "momentum": 0.5,
}
SERVED: dict[str, Any] = SHORT | {"algorithm": "ByzPG", "rounds": None}
KEY = seeded_key(3)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many agents each program estimates a gradient for, as it is traced."""
    sizes: list[int] = []
    digest = PAGEAgent.digest

    def recorded(self: PAGEAgent, state: Any, request: Any, experience: Any, keys: Any, large: bool) -> Any:
        sizes.append(len(experience.returns))
        return digest(self, state, request, experience, keys, large)

    monkeypatch.setattr(PAGEAgent, "digest", recorded)
    return sizes


def peer(as_simulated: bool, **options: Any) -> Peer:
    settings = Config(**(SHORT | options)).resolved()
    return Peer(settings.federation(), settings.schedule(), 1, KEY, as_simulated=as_simulated)


def test_a_gradient_is_computed_once_unless_it_is_compared_with_the_simulator(batches: list[int]) -> None:
    # Step sizes that no other test has, so that the programs are traced here.
    once = peer(as_simulated=False, step_size=0.0111).begin(0)
    assert batches == [1]
    twice = peer(as_simulated=True, step_size=0.0112).begin(0)
    assert batches == [1, 2]
    np.testing.assert_allclose(once, twice, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", [None, 3])
def test_only_rehearsals_with_a_seed_are_computed_as_in_the_simulator(seed: int | None, batches: list[int]) -> None:
    class Keys:
        """All that a new member asks of its store."""

        def random_key(self) -> np.ndarray:
            return KEY

        def keep_output(self, parameters: np.ndarray) -> None: ...

    options: dict[str, Any] = SHORT | {"step_size": 0.0113 if seed is None else 0.0114}
    settings = Config(**options).resolved()
    member = _new_peer(settings, 1, Keys(), Options(Path(), Path(), seed=seed), None)  # pyright: ignore[reportArgumentType]
    member.begin(0)
    assert batches == [1 if seed is None else 2]


@pytest.mark.slow
def test_peers_go_the_same_way_with_either_rounding() -> None:
    members = [peer(as_simulated=False), peer(as_simulated=True)]
    for iteration in range(3):
        own = [member.begin(iteration) for member in members]
        np.testing.assert_allclose(*own, rtol=1e-4, atol=1e-4)
        for member, vector in zip(members, own, strict=True):
            received = np.stack([vector + shift for shift in (0.01, 0, 0.02, -0.01, -0.02)]).astype(np.float32)
            phase: int = 0
            while (following := member.combine(iteration, phase, received, np.ones(5, bool))) is not None:
                received, phase = np.tile(following, (5, 1)), phase + 1
    np.testing.assert_allclose(members[0].parameters, members[1].parameters, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_server_and_its_workers_go_the_same_way_with_either_rounding() -> None:
    settings = Config(**SERVED).resolved()
    federation, schedule = settings.federation(), settings.schedule()
    pairs = [
        (Server(federation, schedule, KEY, as_simulated=exact), Worker(federation, 2, KEY, as_simulated=exact))
        for exact in (False, True)
    ]
    for iteration in range(4):
        found = []
        for server, worker in pairs:
            if server.begin(iteration):
                gradient = worker.message(iteration, 0, server.parameters)
                assert worker.sampled.returns.shape == (1, settings.large_batch)
                assert server.combine(iteration, 0, np.tile(gradient, (5, 1)), np.ones(5, bool))
            else:
                assert server.sample(iteration).returns.shape == (1, settings.small_batch)
            found.append(server.parameters)
        np.testing.assert_allclose(*found, rtol=1e-3, atol=1e-3)
    assert not np.all(pairs[0][0].plan.large[:4])


# Histories


def iterated(member: Peer, iteration: int) -> np.ndarray:
    """One iteration, in which all others send what this member sends; return its gradient."""
    sent = member.begin(iteration)
    received, phase = np.tile(sent, (5, 1)), 0
    while (following := member.combine(iteration, phase, received, np.ones(5, bool))) is not None:
        received, phase = np.tile(following, (5, 1)), phase + 1
    return sent


def test_a_peer_restarts_with_its_history_to_the_bit() -> None:
    whole, restarted = peer(as_simulated=False), peer(as_simulated=False)
    for iteration in range(2):
        iterated(whole, iteration)
    assert whole.snapshot_dimension == len(whole.snapshot()) == whole.state_dimension + whole.dimension + 1
    whole.begin(2)  # crashes before the end of the iteration, whose estimate is then remembered once
    restarted.restore(2, whole.snapshot())
    np.testing.assert_array_equal(restarted.begin(2), whole.begin(2))
    np.testing.assert_array_equal(iterated(restarted, 2), iterated(whole, 2))
    np.testing.assert_array_equal(restarted.snapshot(), whole.snapshot())


def test_a_peer_that_fell_behind_continues_from_the_direction_of_the_others() -> None:
    others, late = peer(as_simulated=False), peer(as_simulated=False)
    for iteration in range(3):
        iterated(others, iteration)
    state = others.snapshot()[: others.state_dimension]
    late.adopt(3, [state] * 4 + [None])
    np.testing.assert_allclose(late.snapshot()[: late.state_dimension], state, rtol=1e-5, atol=1e-6)
    direction, plain = state[2 * late.dimension : 3 * late.dimension], peer(as_simulated=False, momentum=0.0)
    plain.adopt(3, [state] * 4 + [None])
    share = 0.5 / (1 - 0.5**4)
    np.testing.assert_allclose(late.begin(3), (1 - share) * direction + share * plain.begin(3), rtol=1e-4, atol=1e-4)


def test_a_worker_remembers_each_batch_once_also_in_another_process() -> None:
    settings = Config(**SERVED).resolved()
    federation = settings.federation()
    parameters = np.asarray(federation.agent.initial_parameters(settings.schedule().initial_key))
    without: dict[str, Any] = SERVED | {"momentum": 0.0}
    worker, plain = Worker(federation, 2, KEY), Worker(Config(**without).resolved().federation(), 2, KEY)
    estimates = [plain.message(iteration, 0, parameters) for iteration in (0, 3, 4)]
    assert plain.memory == {}
    np.testing.assert_allclose(worker.message(0, 0, parameters), estimates[0], rtol=1e-5, atol=1e-6)
    for _ in range(2):
        sent = worker.message(3, 0, parameters)
        np.testing.assert_allclose(sent, (estimates[0] + 2 * estimates[1]) / 3, rtol=1e-4, atol=1e-5)
    other = Worker(federation, 2, KEY)
    other.recall(worker.memory)
    following = worker.message(4, 0, parameters)
    np.testing.assert_array_equal(other.message(4, 0, parameters), following)
    anew = Worker(federation, 2, KEY).message(4, 0, parameters)
    assert np.any(anew != following)
    np.testing.assert_allclose(anew, estimates[2], rtol=1e-5, atol=1e-6)


def test_workers_with_a_critic_are_refused_on_a_host_task() -> None:
    """Another process, which sends the next message, would begin new episodes in every iteration."""
    settings = Config(algorithm="ByzPPO", env="gymnasium:CartPole-v1", num_agents=5).resolved()
    federation = settings.federation()
    with pytest.raises(ValueError, match="use a task written in JAX, or ByzPG"):
        Server(federation, settings.schedule(), KEY)
    with pytest.raises(ValueError, match="use a task written in JAX, or ByzPG"):
        Worker(federation, 1, KEY)


def test_an_algorithm_without_a_server_is_refused() -> None:
    settings = Config(**SHORT).resolved()
    with pytest.raises(ValueError, match="has no server: use ByzPG, ByzPPO or another one"):
        Server(settings.federation(), settings.schedule(), KEY)


# Receivers that remember

REMEMBERS: dict[str, Any] = {
    "num_agents": 5,
    "num_byzantine": 1,
    "num_attackers": 0,
    "num_seeds": 1,
    "seed": 3,
    "hidden": (4,),
    "horizon": 20,
    "steps": 64,
    "aggregator": "Remember(NNM(TrimmedMean()), exchanges=4, weight=5)",
    "ppo": "PPO(environments=2, segment=8, epochs=2, minibatches=1, normalize_observations=True)",
}
FORGETS: dict[str, Any] = REMEMBERS | {"aggregator": "NNM(TrimmedMean())"}


@pytest.mark.slow
def test_peers_remember_what_their_simulated_twins_remember() -> None:
    settings = Config(algorithm="DecByzPPO", rounds=1, **REMEMBERS).resolved()
    peers = [Peer(settings.federation(), settings.schedule(), index, KEY, as_simulated=True) for index in range(5)]
    for iteration in range(peers[0].num_iterations):
        sent: list[Any] = [each.begin(iteration) for each in peers]
        phase = 0
        while sent[0] is not None:
            received = np.stack(sent)
            sent = [each.combine(iteration, phase, received, np.ones(5, bool)) for each in peers]
            phase += 1
    found = np.stack([each.parameters for each in peers])
    # Without memories, they would go another way.
    plain = Config(algorithm="DecByzPPO", rounds=1, **FORGETS)
    _check_same(found, Config(algorithm="DecByzPPO", rounds=1, **REMEMBERS), plain)


def test_a_member_that_restarts_among_others_than_before_begins_its_memory_anew() -> None:
    """What it remembered is of members that may have left, and its length is another."""

    def member(num_agents: int) -> Peer:
        options: dict[str, Any] = REMEMBERS | {"num_agents": num_agents}
        settings = Config(algorithm="DecByzPPO", rounds=1, **options).resolved()
        return Peer(settings.federation(), settings.schedule(), 1, KEY, as_simulated=True)

    before, after = member(5), member(6)
    draw = np.random.default_rng(0)
    message = before.begin(0)
    assert message is not None
    before.combine(0, 0, draw.normal(size=(5, len(message))).astype(np.float32), np.ones(5, bool))
    assert after.snapshot_dimension == before.snapshot_dimension
    state = before.snapshot()
    again, new = member(6), member(6)
    for each in (after, new):
        each.begin(0)
    # `after` has heard others in another federation, and restarts; `new` has heard nobody.
    after.combine(0, 0, 100 * draw.normal(size=(6, len(message))).astype(np.float32), np.ones(6, bool))
    for each in (after, again, new):
        each.restore(0, state)
        each.begin(0)
    received = draw.normal(size=(6, len(message))).astype(np.float32)
    received[1] = again.begin(0)
    found = [each.combine(0, 0, received, np.ones(6, bool)) for each in (after, again, new)]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[2], found[1])


def test_a_server_remembers_what_its_simulated_twin_remembers() -> None:
    settings = Config(algorithm="ByzPPO", **REMEMBERS).resolved()
    federation, schedule = settings.federation(), settings.schedule()
    server = Server(federation, schedule, KEY, as_simulated=True)
    workers = [Worker(federation, index, KEY, as_simulated=True) for index in range(5)]
    for iteration in range(server.num_iterations):
        assert server.begin(iteration)
        for exchange in range(server.exchanges):
            received = np.stack([each.message(iteration, exchange, server.parameters) for each in workers])
            assert server.combine(iteration, exchange, received, np.ones(5, bool))
    plain = Config(algorithm="ByzPPO", **FORGETS)
    _check_same(server.parameters[None], Config(algorithm="ByzPPO", **REMEMBERS), plain)


def _check_same(found: np.ndarray, config: Config, other: Config) -> None:
    simulated, differs = (train(each).parameters["last"][0] for each in (config, other))
    np.testing.assert_allclose(found, simulated, rtol=1e-4, atol=1e-4)
    assert np.max(np.abs(differs - simulated)) > 1e-3
