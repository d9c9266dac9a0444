"""Whole federations over real connections: what members learn, and that it is what the simulator says."""

import asyncio
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
import numpy as np
import pytest
from live_federation import NAMES, PATIENCE, Federation, free_ports, on_loopback
from prometheus_client.parser import text_string_to_metric_families

from byzpg import Config, cli, load
from byzpg.federation.members import Learner
from byzpg.federation.simulator import LARGE, SMALL
from byzpg.live.manifest import Manifest, Times
from byzpg.live.member import Options, take_part
from byzpg.live.records import Records
from byzpg.live.rehearsal import parse_attack
from byzpg.live.wire import verify_evidence

SEED = 3
SHORT: dict[str, Any] = {"horizon": 100, "large_batch": 6, "trajectories": 180, "seed": SEED}
# Long enough that no shared machine makes a member late: with one missing, results would differ.
PATIENT = Times(grace=120.0, start_grace=300.0)


# A member whose messages are all rejected, or come too late, never finishes by itself.
UNHEARD = ("garbage", "oversized", "slow", "NonFinite", "Silent")


def take_part_together(
    federation: Federation,
    attack: str | None,
    seed: int | None = SEED,
    metrics: tuple[str, int] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> None:
    """All members in this process, over real connections; the last one attacks. The run ends when they all have.

    The first one serves its metrics; `meanwhile` is called now and then.
    """
    Learner(federation.manifest.settings(), 0, np.zeros(2, np.uint32)).warm_up()  # compiled once for all

    async def everyone() -> None:
        members = {
            name: asyncio.create_task(
                take_part(
                    federation.manifest,
                    name,
                    Options(
                        federation.folder / f"{name}.key",
                        federation.directory(name),
                        attack=attack if name == NAMES[-1] else None,
                        seed=seed,
                        metrics=metrics if name == NAMES[0] else None,
                    ),
                )
            )
            for name in NAMES
        }
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

    asyncio.run(everyone())


def take_part_until(condition: Callable[[], bool], federation: Federation, manifests: dict[str, Manifest]) -> None:
    """Some members in this process, each with the manifest that it has."""

    async def everyone() -> None:
        options = {name: Options(federation.folder / f"{name}.key", federation.directory(name)) for name in manifests}
        members = [asyncio.create_task(take_part(each, name, options[name])) for name, each in manifests.items()]
        try:
            async with asyncio.timeout(PATIENCE):
                while not condition():
                    for member in members:
                        if member.done():
                            member.result()  # or whatever ended it
                    await asyncio.sleep(0.05)
        finally:
            for member in members:
                member.cancel()
            await asyncio.gather(*members, return_exceptions=True)

    asyncio.run(everyone())


def parameters(federation: Federation, name: str, output: str = "last") -> np.ndarray:
    return load(federation.directory(name) / "run").parameters[output][0, 0]


def simulated(manifest: Manifest, **attackers: Any) -> tuple[np.ndarray, np.ndarray]:
    """θ [K, d] of the simulator after as many iterations, and θ_T̂."""
    options = {"num_agents": len(NAMES), "num_declared": 1, "num_byzantine": 0, "num_seeds": 1}
    settings = Config(**{**manifest.training, **options, **attackers, "hidden": tuple(manifest.training["hidden"])})
    resolved = settings.resolved()
    simulation = resolved.simulation()
    plan = Learner(manifest.settings(), 0, np.zeros(2, np.uint32)).plan
    batches = [LARGE if each else SMALL for each in plan.large]
    (state,), _ = simulation.run(simulation.start(), batches, plan.output_iteration)
    return np.asarray(state.agents.parameters[0]), np.asarray(state.output[0])


QUICK = Times(grace=1.5, start_grace=300.0)


@pytest.mark.parametrize(
    ("attack", "options", "times"),
    [
        (None, {}, PATIENT),
        ("Equivocate", {}, PATIENT),
        # Small batches, plain SGD (whose v̂ is what agreement made of a step), and no agreement at all.
        pytest.param(
            None,
            {"optimizer": "sgd", "step_size": 1e-3, "switch_probability": 0.3, "small_batch": 3},
            PATIENT,
            marks=pytest.mark.slow,
        ),
        pytest.param(None, {"algorithm": "Dec-PAGE-PG"}, PATIENT, marks=pytest.mark.slow),
        # A missing row is none, not one of zeros.
        pytest.param("Silent", {"trajectories": 12, "rounds": 1}, QUICK, marks=pytest.mark.slow),
    ],
)
def test_members_learn_what_their_simulated_twins_learn(
    tmp_path: Path, attack: str | None, options: dict[str, Any], times: Times
) -> None:
    """To 1e-6 after 30 iterations: how a sum of two products is rounded, a compiler decides program by program."""
    with on_loopback(tmp_path, times, **{**SHORT, **options}) as federation:
        take_part_together(federation, attack)
        attackers = {} if attack is None else {"num_byzantine": 1, "attack": attack}
        expected, drawn = simulated(federation.manifest, **attackers)
        heard = NAMES[:4] if attack == "Silent" else NAMES  # whom nobody hears from may be left behind at the end
        for index, name in enumerate(heard):
            np.testing.assert_allclose(parameters(federation, name), expected[index], rtol=0, atol=1e-6)
            np.testing.assert_allclose(parameters(federation, name, "uniform"), drawn[index], rtol=0, atol=1e-6)
        first = federation.manifest.settings().simulation().start()[0].agents.parameters[0, 0]
        assert np.max(np.abs(parameters(federation, "alice") - np.asarray(first))) > 1e-3, "something was learned"
        if not options:
            assert len(federation.events("alice", "iteration")) == 30
        accused = {event["sender"] for name in NAMES for event in federation.events(name, "equivocation")}
        assert accused == ({"erin"} if attack == "Equivocate" else set())
        if attack == "Equivocate":
            evidence = sorted((federation.directory("alice") / "evidence").glob("*.json"))
            proven = verify_evidence(federation.manifest, json.loads(evidence[0].read_text()))
            assert "erin signed two different messages" in proven


def last_return(federation: Federation, name: str) -> float:
    returns = load(federation.directory(name) / "run").returns[0]
    return float(np.mean(returns[-4:]))


@pytest.mark.parametrize(("aggregator", "learns"), [(None, True), ("Mean", False)])
def test_honest_members_learn_beside_a_liar_unless_they_just_average(
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
        ("oversized", "oversized"),
        ("slow", None),
        ("NonFinite", "non-finite"),
        ("Silent", None),
    ],
)
def test_breakers_of_the_wire_are_counted_and_left_out(tmp_path: Path, attack: str, reason: str | None) -> None:
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
        # Secret random numbers: every member's own.
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


def test_a_learner_draws_what_it_is_told_and_a_restored_one_goes_on_alike() -> None:
    settings = Config(num_agents=5, num_declared=1, num_byzantine=0, num_seeds=1, **{**SHORT, "horizon": 20}).resolved()
    key = np.asarray(jax.random.key_data(jax.random.key(SEED)))
    learner, twin = Learner(settings, 1, key), Learner(settings, 1, key)
    everyone = np.ones(5, bool)

    def iterate(one: Learner, iteration: int) -> np.ndarray:
        vector: np.ndarray | None = one.begin(iteration)
        for phase in range(1 + one.rounds):
            assert vector is not None
            noise = np.random.default_rng(phase).normal(size=(5, len(vector))).astype(np.float32) * 1e-3
            rows = vector + noise
            rows[1] = vector
            vector = one.combine(iteration, phase, rows, everyone)
        assert vector is None
        return one.parameters

    iterate(learner, 0)
    twin.restore(1, learner.snapshot())
    np.testing.assert_array_equal(iterate(learner, 1), iterate(twin, 1))
    stranger = Learner(settings, 1, key + 1)
    assert np.any(stranger.begin(0) != Learner(settings, 1, key).begin(0))


def test_warming_up_after_a_restart_leaves_the_drawn_parameters_alone() -> None:
    settings = Config(num_agents=5, num_declared=1, num_byzantine=0, num_seeds=1, **{**SHORT, "horizon": 20}).resolved()
    learner, kept = Learner(settings, 0, np.zeros(2, np.uint32)), []
    learner.plan = replace(learner.plan, output_iteration=0)
    learner.on_output = kept.append
    first = learner.parameters
    learner.begin(0)
    learner.restore(1, learner.snapshot() + 1)
    learner.warm_up()
    np.testing.assert_array_equal(kept, [first])


def test_a_member_that_adopts_states_is_not_moved_by_a_liar() -> None:
    settings = Config(num_agents=5, num_declared=1, num_byzantine=0, num_seeds=1, **SHORT).resolved()
    learner = Learner(settings, 0, np.zeros(2, np.uint32))
    truth = learner.snapshot() + 1
    jitter = np.random.default_rng(0).normal(size=(5, len(truth))).astype(np.float32) * 1e-3
    states: list[np.ndarray | None] = [None, *(truth + jitter[1:])]
    states[3] = np.full_like(truth, 1e6)
    for agreement in ("MDA", "TrimmedMeanAgreement"):
        learner = Learner(
            Config(num_agents=5, num_declared=1, num_byzantine=0, num_seeds=1, agreement=agreement, **SHORT).resolved(),
            0,
            np.zeros(2, np.uint32),
        )
        learner.adopt(7, states)
        np.testing.assert_allclose(learner.snapshot(), truth, atol=5e-3)
        assert all(int(leaf[0]) == 7 for leaf in jax.tree.leaves(learner._state) if leaf.dtype == np.int32)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("AvgZero", "needs to know what everybody else sends"),
        ("sign-flop", "Did you mean 'SignFlip'"),
        ("", "there is no"),
    ],
)
def test_attacks_that_no_member_can_do_are_refused(text: str, words: str) -> None:
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
    """It must not go on: it could send what it has not logged."""
    put, written = Records.put, []

    def fail_in_the_end(self: Records, number: int, *parts: bytes | memoryview) -> None:
        written.append(number)
        if len(written) > 30:
            raise OSError("No space left on device")
        put(self, number, *parts)

    monkeypatch.setattr(Records, "put", fail_in_the_end)
    with on_loopback(tmp_path, PATIENT, **SHORT) as federation, pytest.raises(OSError, match="No space left"):
        take_part_together(federation, None)


def test_an_own_vector_that_is_no_number_is_never_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has one stays away until the others tell it their states."""
    begin = Learner.begin

    def spoiled(self: Learner, iteration: int) -> np.ndarray:
        vector = begin(self, iteration)
        return vector * np.nan if (self.index, iteration) == (1, 1) else vector

    monkeypatch.setattr(Learner, "begin", spoiled)
    # The others wait for bob at the end, however long he takes.
    times = Times(grace=0.2, start_grace=300.0, retry=0.05, linger=PATIENCE)
    with on_loopback(tmp_path, times, horizon=20, large_batch=4, rounds=1, trajectories=40, seed=SEED) as federation:
        take_part_together(federation, None)
        assert federation.events("bob", "unsound")
        assert federation.events("bob", "rejoin")
        assert federation.events("bob", "finished")
        assert not federation.events("alice", "rejected")


def test_members_whose_batches_fall_otherwise_refuse_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = iter(["one", "other", "one", "one", "one"])
    monkeypatch.setattr(Learner, "plan_digest", property(lambda self: next(digests)))
    times = Times(grace=0.2, start_grace=300.0, retry=0.05, linger=1.0)
    with on_loopback(tmp_path, times, horizon=20, large_batch=4, rounds=1, trajectories=8, seed=SEED) as federation:

        def refused() -> bool:
            """For that reason: before all of them listen, some are unreachable."""
            events = [event for name in NAMES for event in federation.events(name, "refused")]
            return any("large and small batches fall otherwise" in event["words"] for event in events)

        take_part_until(refused, federation, dict.fromkeys(NAMES, federation.manifest))
