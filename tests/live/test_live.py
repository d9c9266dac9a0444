"""Whole federations over real connections: members learn, and they learn what the simulator says."""

import asyncio
import errno
import json
import sys
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from live_federation import NAMES, PATIENCE, Federation, free_ports, on_loopback
from prometheus_client.parser import text_string_to_metric_families

from byzpg import Config, cli, load
from byzpg.config import Settings
from byzpg.federation.members import Peer, seeded_key
from byzpg.federation.simulator import LARGE, SMALL, Simulation
from byzpg.live.manifest import Manifest, Times
from byzpg.live.member import Options, take_part
from byzpg.live.records import Records
from byzpg.live.rehearsal import parse_attack
from byzpg.live.wire import prove
from byzpg.robust.attacks import Equivocate

SEED = 3
SHORT: dict[str, Any] = {
    "horizon": 100,
    "large_batch": 6,
    "trajectories": 180,
    "seed": SEED,
    "estimator": "GPOMDP(baseline='leave-one-out', trace_decay=0.9)",
    "momentum": 0.6,
}
# Long enough for a busy machine: if one member were late, the results would differ.
PATIENT = Times(grace=120.0, start_grace=300.0)


# A member whose messages are all rejected or late never finishes by itself.
UNHEARD = ("garbage", "oversized", "slow", "NonFinite", "Silent")


def peer(settings: Settings, index: int = 0, key_data: np.ndarray | None = None, **options: Any) -> Peer:
    """The computation of one member, without a network."""
    key_data = np.zeros(2, np.uint32) if key_data is None else key_data
    return Peer(settings.federation(), settings.schedule(), index, key_data, **options)


def take_part_together(
    federation: Federation,
    attack: str | None,
    seed: int | None = SEED,
    metrics: tuple[str, int] | None = None,
    meanwhile: Callable[[], None] | None = None,
    restarts: str | None = None,
) -> None:
    """Run all members in this process, over real connections, until all have finished. The last one attacks.

    The first one serves its metrics; `meanwhile` is called now and then. One member stops after its second iteration
    and is started again.
    """
    peer(federation.manifest.settings(), as_simulated=seed is not None).warm_up()  # compiled once for all

    async def run_member(name: str) -> None:
        options = Options(
            federation.folder / f"{name}.key",
            federation.directory(name),
            attack=attack if name == NAMES[-1] else None,
            seed=seed,
            metrics=metrics if name == NAMES[0] else None,
        )
        if name == restarts:
            first = asyncio.create_task(take_part(federation.manifest, name, options))
            while federation.iteration(name) < 2 and not first.done():
                await asyncio.sleep(0.01)
            first.cancel()
            await asyncio.wait([first])
        await take_part(federation.manifest, name, options)

    async def run_members() -> None:
        members = {name: asyncio.create_task(run_member(name)) for name in NAMES}
        *honest, last = members.values()
        async with asyncio.timeout(PATIENCE):
            while meanwhile is not None and not any(each.done() for each in honest):
                await asyncio.to_thread(meanwhile)
                await asyncio.sleep(0.05)
            awaited = honest if attack in UNHEARD else [*honest, last]
            done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_EXCEPTION)
        for member in members.values():
            member.cancel()
        await asyncio.gather(*members.values(), return_exceptions=True)
        for member in done:
            member.result()

    asyncio.run(run_members())


def take_part_until(condition: Callable[[], bool], federation: Federation, manifests: dict[str, Manifest]) -> None:
    """Run some members in this process, each with its own manifest, until a condition holds."""

    async def run_members() -> None:
        options = {name: Options(federation.folder / f"{name}.key", federation.directory(name)) for name in manifests}
        members = [asyncio.create_task(take_part(each, name, options[name])) for name, each in manifests.items()]
        try:
            async with asyncio.timeout(PATIENCE):
                while not condition():
                    for member in members:
                        if member.done():
                            member.result()  # raises what ended it
                    await asyncio.sleep(0.05)
        finally:
            for member in members:
                member.cancel()
            await asyncio.gather(*members, return_exceptions=True)

    asyncio.run(run_members())


def parameters(federation: Federation, name: str, output: str = "last") -> np.ndarray:
    return load(federation.directory(name) / "run").parameters[output][0, 0]


def simulated(manifest: Manifest, **attackers: Any) -> tuple[np.ndarray, np.ndarray]:
    """The simulator's θ [K, d] after as many iterations, and its θ_T̂."""
    options = {"num_agents": len(NAMES), "num_byzantine": 1, "num_attackers": 0, "num_seeds": 1}
    given = {**manifest.training, **options, **attackers, "hidden": tuple(manifest.training["hidden"])}
    settings = Config(**given).resolved()
    simulation = Simulation((settings.federation(),), settings.seeds)
    plan = peer(manifest.settings()).plan
    batches = [LARGE if each else SMALL for each in plan.large]
    only_large = bool(np.all(plan.large))
    (state,), _ = simulation.run(simulation.start(), batches, plan.output_iteration, only_large=only_large)
    return np.asarray(state.agents.parameters[0]), np.asarray(state.output[0])


QUICK = Times(grace=1.5, start_grace=300.0)


@pytest.mark.parametrize(
    ("attack", "options", "times"),
    [
        pytest.param(None, {}, PATIENT, marks=pytest.mark.slow),
        pytest.param("SignFlip", {}, PATIENT, marks=pytest.mark.slow),
        # Small batches, plain SGD (whose v̂ follows from the agreed step), and no agreement at all.
        pytest.param(
            None,
            {"optimizer": "sgd", "step_size": 1e-3, "switch_probability": 0.3, "small_batch": 3},
            PATIENT,
            marks=pytest.mark.slow,
        ),
        pytest.param(None, {"algorithm": "Dec-PAGE-PG"}, PATIENT, marks=pytest.mark.slow),
        # A missing row is left out, and does not count as zeros.
        pytest.param("Silent", {"trajectories": 12, "rounds": 1}, QUICK, marks=pytest.mark.slow),
    ],
)
def test_members_learn_what_their_simulated_twins_learn(
    tmp_path: Path, attack: str | None, options: dict[str, Any], times: Times
) -> None:
    """To 3e-6 after 30 iterations: compilers round the sum of two products differently from program to program."""
    with on_loopback(tmp_path, times, **{**SHORT, **options}) as federation:
        take_part_together(federation, attack)
        attackers = {} if attack is None else {"num_attackers": 1, "attack": attack}
        expected, drawn = simulated(federation.manifest, **attackers)
        heard = NAMES[:4] if attack == "Silent" else NAMES  # a silent member may be left behind at the end
        for index, name in enumerate(heard):
            np.testing.assert_allclose(parameters(federation, name), expected[index], rtol=0, atol=3e-6)
            np.testing.assert_allclose(parameters(federation, name, "uniform"), drawn[index], rtol=0, atol=3e-6)
        first = peer(federation.manifest.settings()).parameters
        assert np.max(np.abs(parameters(federation, "alice") - first)) > 1e-3, "something was learned"
        if not options:
            assert len(federation.events("alice", "iteration")) == 30
            run = load(federation.directory("alice") / "run")
            assert 30 * 6 < run.steps[0, -1] == np.sum(run.metrics["environment_steps"]), "of this member alone"
        assert not [event for name in NAMES for event in federation.events(name, "equivocation")]


# Four exchanges of gradients and one round of agreement in each of 6 iterations, in the middle of episodes.
WITH_CRITIC: dict[str, Any] = {
    "algorithm": "DecByzPPO",
    "aggregator": "TrimmedMean",
    "hidden": (6,),
    "horizon": 30,
    "rounds": 1,
    "momentum": 0.5,
    "seed": SEED,
    "steps": 6 * 16,
    "ppo": "PPO(environments=2, segment=8, epochs=2, minibatches=2)",
}


def test_members_with_a_critic_learn_what_their_twins_learn_also_after_a_restart(tmp_path: Path) -> None:
    with on_loopback(tmp_path, PATIENT, **WITH_CRITIC) as federation:
        take_part_together(federation, "SignFlip", restarts="bob")
        expected, drawn = simulated(federation.manifest, num_attackers=1, attack="SignFlip")
        for index, name in enumerate(NAMES):
            np.testing.assert_allclose(parameters(federation, name), expected[index], rtol=0, atol=2e-5)
            np.testing.assert_allclose(parameters(federation, name, "uniform"), drawn[index], rtol=0, atol=2e-5)
        first = peer(federation.manifest.settings()).parameters
        assert np.max(np.abs(expected - first)) > 1e-3, "something was learned"
        started = [(event["iteration"], event["restarted"]) for event in federation.events("bob", "start")]
        (begin, again) = started
        assert begin == (0, False)
        assert 2 <= again[0] < 6
        assert again[1]
        assert not federation.events("bob", "rejoin"), "it continues by itself"
        assert not [event for name in NAMES for event in federation.events(name, "equivocation")]
        assert federation.iteration("alice") == 6
        run = load(federation.directory("bob") / "run")
        np.testing.assert_array_equal(run.steps, [16 * np.arange(1, 7)])


@pytest.mark.slow
def test_members_with_a_critic_catch_one_that_equivocates(tmp_path: Path) -> None:
    """In an exchange of gradients, of which each has its own step; from then on its messages do not count."""
    with on_loopback(tmp_path, PATIENT, **WITH_CRITIC) as federation:
        take_part_together(federation, "equivocate")
        honest = NAMES[:-1]
        caught = [event for name in honest for event in federation.events(name, "equivocation")]
        assert {event["sender"] for event in caught} == {NAMES[-1]}
        for name in honest:
            (path, *_) = sorted((federation.directory(name) / "evidence").iterdir())
            assert "gradients of exchange" in prove(federation.manifest, json.loads(path.read_text())).words
        ends = np.stack([parameters(federation, name) for name in honest])
        assert np.all(np.isfinite(ends))
        first = peer(federation.manifest.settings()).parameters
        assert np.max(np.ptp(ends, axis=0)) < 0.2 * np.max(np.abs(ends - first)), "they agree on what they learned"


def last_return(federation: Federation, name: str) -> float:
    returns = load(federation.directory(name) / "run").returns[0]
    return float(np.mean(returns[-4:]))


@pytest.mark.slow
@pytest.mark.parametrize(("aggregator", "learns"), [(None, True), ("Mean", False)])
def test_honest_members_learn_beside_an_attacker_unless_they_just_average(
    tmp_path: Path, aggregator: str | None, learns: bool
) -> None:
    options = {"horizon": 200, "trajectories": 600, "rounds": 1, "seed": SEED}
    with on_loopback(tmp_path, PATIENT, aggregator=aggregator, **options) as federation:
        take_part_together(federation, "SignFlip(scale=10.0)")
        returns = [last_return(federation, name) for name in NAMES[:4]]
        assert all(each >= 180 for each in returns) if learns else all(each < 50 for each in returns), returns


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        ("garbage", "malformed"),
        pytest.param("oversized", "oversized", marks=pytest.mark.slow),
        pytest.param("slow", None, marks=pytest.mark.slow),
        ("NonFinite", "non-finite"),
        pytest.param("Silent", None, marks=pytest.mark.slow),
    ],
)
def test_members_with_broken_messages_are_counted_and_left_out(tmp_path: Path, attack: str, reason: str | None) -> None:
    times = Times(grace=0.2, start_grace=300.0, retry=0.05, linger=0.5)
    with on_loopback(tmp_path, times, horizon=20, large_batch=4, rounds=1, trajectories=12, seed=SEED) as federation:
        take_part_together(federation, attack, seed=None)
        for name in NAMES[:4]:
            assert {"finished"} <= {event["event"] for event in federation.events(name)}
            missed = [tuple(event["missing"]) for event in federation.events(name, "without")]
            assert ("erin",) in missed
        said = [event for name in NAMES[:4] for event in federation.events(name)]
        assert reason is None or {"erin"} == {
            event.get("sender", event.get("to")) for event in said if event.get("reason") == reason
        }
        # Every member has a secret key of its own.
        assert len({(federation.directory(name) / "random.key").read_text() for name in NAMES}) == len(NAMES)


def test_manifests_that_differ_refuse_each_other_and_say_why(tmp_path: Path) -> None:
    with on_loopback(tmp_path, Times(start_grace=1.0, retry=0.1), **SHORT) as federation:
        text = (tmp_path / "federation.toml").read_text()
        (tmp_path / "other.toml").write_text(text.replace("large_batch = 6", "large_batch = 5"))
        manifests = {"alice": federation.manifest, "bob": Manifest.load(tmp_path / "other.toml")}

        def refused(name: str) -> bool:
            return any(event["reason"] == "manifest" for event in federation.events(name, "refused"))

        take_part_until(lambda: refused("alice") and refused("bob"), federation, manifests)
        words = [event["words"] for name in manifests for event in federation.events(name, "refused")]
        assert "training.large_batch" in " ".join(words)
        assert not federation.events("alice", "linked")


def resolved(**options: Any) -> Settings:
    return Config(num_agents=5, num_byzantine=1, num_attackers=0, num_seeds=1, **{**SHORT, **options}).resolved()


def test_a_peer_draws_what_its_key_says_and_a_restored_peer_continues_alike() -> None:
    settings, key = resolved(horizon=20), seeded_key(SEED)
    first, twin = peer(settings, 1, key), peer(settings, 1, key)
    all_present = np.ones(5, bool)

    def iterate(one: Peer, iteration: int) -> np.ndarray:
        vector: np.ndarray | None = one.begin(iteration)
        for phase in range(1 + one.rounds):
            assert vector is not None
            noise = np.random.default_rng(phase).normal(size=(5, len(vector))).astype(np.float32) * 1e-3
            rows = vector + noise
            rows[1] = vector
            vector = one.combine(iteration, phase, rows, all_present)
        assert vector is None
        return one.parameters

    iterate(first, 0)
    twin.restore(1, first.snapshot())
    np.testing.assert_array_equal(iterate(first, 1), iterate(twin, 1))
    stranger = peer(settings, 1, key + 1)
    assert np.any(stranger.begin(0) != peer(settings, 1, key).begin(0))


def test_warming_up_after_a_restart_leaves_the_drawn_parameters_alone() -> None:
    one, kept = peer(resolved(horizon=20)), []
    one.plan = replace(one.plan, output_iteration=0)
    one.on_output = kept.append
    first = one.parameters
    one.begin(0)
    one.restore(1, one.snapshot() + 1)
    one.warm_up()
    np.testing.assert_array_equal(kept, [first])


def test_after_warming_up_a_rehearsed_attacker_compiles_nothing() -> None:
    """On a busy machine, an attacker that compiled in its first rounds missed them, and so the whole of a short run."""
    one = peer(resolved(horizon=20, hidden=(5, 3)), attack=Equivocate())  # no other test compiles for this network
    one.warm_up()
    compilation, compiled = "/jax/core/compile/backend_compile_duration", []

    def listen(event: str, *_: Any, **__: Any) -> None:
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        vector = one.begin(0)
        for phase in range(one.exchanges + one.rounds):
            assert vector is not None
            rows = np.stack(one.false_messages(Equivocate(), 0, phase, vector))
            vector = one.combine(0, phase, rows, np.ones(len(rows), bool))
        assert compilation not in compiled
        jax.jit(lambda: jnp.arange(3.0))()
        assert compilation in compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_an_attacker_does_not_move_a_member_that_adopts_states() -> None:
    truth = peer(resolved()).snapshot()[: peer(resolved()).state_dimension] + 1
    jitter = np.random.default_rng(0).normal(size=(5, len(truth))).astype(np.float32) * 1e-3
    states: list[np.ndarray | None] = [None, *(truth + jitter[1:])]
    states[3] = np.full_like(truth, 1e6)
    for agreement in ("MDA", "TrimmedMeanAgreement"):
        behind = peer(resolved(agreement=agreement))
        behind.adopt(7, states)
        state = behind.snapshot()[: behind.state_dimension]
        np.testing.assert_allclose(state, truth, atol=5e-3)
        assert all(int(leaf[0]) == 7 for leaf in jax.tree.leaves(behind._state) if leaf.dtype == np.int32)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("AvgZero", "needs to know the messages of all members"),
        ("sign-flop", "Did you mean 'SignFlip'"),
        ("", "there is no"),
    ],
)
def test_attacks_that_no_member_can_carry_out_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_attack(text)


def test_rehearsals_need_a_manifest_that_allows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with on_loopback(tmp_path, Times(), rehearsal=False, **SHORT) as federation:
        for option in (("--attack", "SignFlip"), ("--seed", "3")):
            line = (
                "peer",
                tmp_path / "federation.toml",
                "--name",
                "alice",
                "--directory",
                federation.directory("alice"),
            )
            monkeypatch.setattr(sys, "argv", ["byzpg", *map(str, line), *option])
            with pytest.raises(SystemExit) as end:
                cli.main()
            assert end.value.code == 2
            assert "rehearsal = false" in " ".join(capsys.readouterr().err.split())
        assert not federation.directory("alice").exists()


def test_prometheus_sees_what_happens(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    times = Times(grace=0.1, start_grace=300.0, retry=0.05, linger=0.5)
    with on_loopback(tmp_path, times, horizon=20, large_batch=4, rounds=1, trajectories=40, seed=SEED) as federation:
        found: dict[str, float] = {}
        values: dict[str, set[float]] = defaultdict(set)

        def scrape() -> None:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                for family in text_string_to_metric_families(answer.read().decode()):
                    for sample in family.samples:
                        found[sample.name + json.dumps(sample.labels)] = sample.value
                        values[sample.name].add(sample.value)

        take_part_together(federation, "NonFinite", seed=None, metrics=("127.0.0.1", port), meanwhile=scrape)
        assert found['byzpg_messages_rejected_total{"peer": "erin", "reason": "non-finite"}'] > 0
        assert found['byzpg_absences_total{"peer": "erin"}'] > 0
        assert 1 in values["byzpg_peers_missing"]
        assert found["byzpg_round_seconds_count{}"] > 3
        assert found["byzpg_iteration{}"] >= 1
        assert 1 <= found["byzpg_return{}"] <= 20
        assert found['byzpg_diameter{"phase": "gradients"}'] > 0
        assert values["byzpg_stalled"] <= {0, 1}  # on a busy machine it may be 1 for a while
        assert 0 in values["byzpg_stalled"]


def test_a_member_whose_disk_fails_ends_with_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not continue: it could send a message that it has not logged."""
    put, written = Records.put, []

    def fail_in_the_end(self: Records, number: int, *parts: bytes | memoryview) -> None:
        written.append(number)
        if len(written) > 30:
            raise OSError(errno.EIO, "Input/output error")
        put(self, number, *parts)

    monkeypatch.setattr(Records, "put", fail_in_the_end)
    with on_loopback(tmp_path, PATIENT, **SHORT) as federation, pytest.raises(OSError, match="Input/output error"):
        take_part_together(federation, None)


def test_a_member_never_sends_a_vector_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits until the others send it their states."""
    begin = Peer.begin

    def spoiled(self: Peer, iteration: int) -> np.ndarray:
        vector = begin(self, iteration)
        return vector * np.nan if (self.index, iteration) == (1, 1) else vector

    monkeypatch.setattr(Peer, "begin", spoiled)
    # The others wait for bob at the end, however long he takes.
    times = Times(grace=0.2, start_grace=300.0, retry=0.05, linger=PATIENCE)
    with on_loopback(tmp_path, times, horizon=20, large_batch=4, rounds=1, trajectories=40, seed=SEED) as federation:
        take_part_together(federation, None)
        assert federation.events("bob", "unsound")
        assert federation.events("bob", "rejoin")
        assert federation.events("bob", "finished")
        assert not federation.events("alice", "rejected")


def test_members_with_different_plans_refuse_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter(["one", "other", "one", "one", "one"])
    monkeypatch.setattr(Peer, "plan_digest", property(lambda self: next(digests)))
    times = Times(grace=0.2, start_grace=300.0, retry=0.05, linger=1.0)
    with on_loopback(tmp_path, times, horizon=20, large_batch=4, rounds=1, trajectories=8, seed=SEED) as federation:

        def refused() -> bool:
            """Whether one was refused for that reason; at first, some are unreachable."""
            events = [event for name in NAMES for event in federation.events(name, "refused")]
            return any("another plan of large and small batches" in event["words"] for event in events)

        take_part_until(refused, federation, dict.fromkeys(NAMES, federation.manifest))
