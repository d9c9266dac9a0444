"""A running federation whose members change: one is replaced, one gets new keys, and all recover from a lost quorum."""

import signal
from collections.abc import Iterator
from pathlib import Path

import live_federation
import pytest
from live_federation import NAMES, Federation, until

from byzpg.live.amendment import Amendment, amended
from byzpg.live.identity import Member, generate, read_key, write_identity
from byzpg.live.manifest import Manifest, Times

pytestmark = pytest.mark.slow

TINY = {"horizon": 50, "large_batch": 4, "hidden": (8,), "rounds": 1, "trajectories": 400_000, "seed": 1}
TIMES = Times(grace=0.4, start_grace=300.0, retry=0.1, linger=2.0)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with live_federation.on_loopback(tmp_path_factory.mktemp("membership"), TIMES, **TINY) as made:
        made.start_all()
        yield made


def newcomer(folder: Path, name: str) -> Member:
    """A new identity on this machine; its key is in `folder`."""
    member, private = generate(name, f"127.0.0.1:{live_federation.free_ports(1)[0]}")
    write_identity(folder, member, private)
    return member


def approved(amendment: Amendment, old: Manifest, folder: Path, *names: str) -> Amendment:
    for name in names:
        amendment = amendment.approved_by(read_key(folder / f"{name}.key", old.members[old.index(name)]), name, old)
    return amendment


def wait_for_change(federation: Federation, amendment: Amendment, *names: str) -> None:
    """Wait until members have done iterations under the new manifest, with messages from each other."""
    for name in names:
        until(
            lambda name=name: any(
                event["iteration"] == amendment.manifest.from_iteration
                for event in federation.events(name, "amendment")
                if "iteration" in event
            ),
            f"{name} has the amendment",
        )
    start = amendment.manifest.from_iteration
    for name in names:
        until(lambda name=name: federation.iteration(name) > start + 5, f"{name} goes on with the new members")


STAYING = ("alice", "bob", "carol", "dave")


@pytest.fixture(scope="module")
def changed(federation: Federation) -> Federation:
    """The federation, in which frank has replaced erin."""
    folder, old = federation.folder, federation.manifest
    ahead = max(federation.iteration(name) for name in NAMES) + 40
    frank = newcomer(folder, "frank")
    proposal = amended(old, from_iteration=ahead, substitutes={"erin": frank})
    proposal = approved(proposal, old, folder, "alice", "bob", "dave", "erin")  # the one that leaves may approve
    proposal.write(federation.directory("carol") / "amendment.toml")
    proposal.write(folder / "amendment.toml")
    federation.start("frank", manifest="amendment.toml")
    wait_for_change(federation, proposal, *STAYING)
    federation.manifest = proposal.manifest
    return federation


def test_a_member_is_replaced_while_the_others_train(changed: Federation) -> None:
    until(lambda: changed.events("frank", "rejoin"), "frank has adopted the state")
    changed.wait_until_together(*STAYING, "frank")
    assert changed.processes["erin"].wait(live_federation.PATIENCE) == 0
    assert (changed.directory("erin") / "run").is_dir(), "the results of the member that left"


def test_a_member_restarts_with_the_first_manifest(changed: Federation) -> None:
    """The usual command still works after a change: the directory knows what has replaced the manifest."""
    changed.kill("dave")
    changed.start("dave")
    changed.wait_until_together(*STAYING, "frank")


def test_keys_are_rotated_and_a_member_that_was_away_hears_of_it(changed: Federation) -> None:
    federation = changed
    folder, old = federation.folder, federation.manifest
    present = ("alice", "bob", "carol", "frank")
    federation.kill("dave")
    federation.kill("bob")
    federation.start("bob", "--next-key", folder / "new" / "bob.key")
    bob = newcomer(folder / "new", "bob")
    federation.wait_until_together(*present)
    ahead = max(federation.iteration(name) for name in present) + 40
    proposal = approved(amended(old, from_iteration=ahead, substitutes={"bob": bob}), old, folder, *present)
    proposal.write(federation.directory("alice") / "amendment.toml")
    wait_for_change(federation, proposal, *present)
    federation.start("dave")
    federation.wait_until_together(*present, "dave")
    assert federation.events("dave", "amendment")
    for name in (*present, "dave"):
        assert not federation.events(name, "equivocation")
    federation.manifest = proposal.manifest


def test_incomplete_amendments_have_no_effect(changed: Federation) -> None:
    federation = changed
    folder, old = federation.folder, federation.manifest
    ahead = federation.iteration("alice") + 10
    few = approved(amended(old, from_iteration=ahead, remove=["dave"], num_byzantine=0), old, folder, "alice", "frank")
    few.write(federation.directory("alice") / "amendment.toml")
    words = until(
        lambda: [event["words"] for event in federation.events("alice", "amendment") if event["level"] == "error"],
        "alice says what is wrong",
    )
    assert "2 of 4 approvals" in words[-1]
    federation.wait_for_iterations(15, "alice", "dave")


def test_members_recover_after_a_loss_of_power(changed: Federation) -> None:
    """All have lost what they signed, so none may sign anything; with a new manifest they continue."""
    federation = changed
    folder, old = federation.folder, federation.manifest
    names = tuple(member.name for member in old.members)
    for name in names:
        federation.signal(name, signal.SIGKILL)
        federation.processes[name].wait()
        (mark,) = (federation.directory(name)).glob(f"mark{old.suffix}.bin")
        content = bytearray(mark.read_bytes())
        for start in range(0, len(content), len(content) // 2):
            content[start + 40] ^= 1  # in the id of the machine's boot, or in what it protects
        mark.write_bytes(content)
    rotated = (folder / "new" / "bob.key").is_file()
    keys = {"bob": ("--next-key", folder / "new" / "bob.key")} if rotated else {}
    for name in names:
        federation.start(name, *keys.get(name, ()), manifest="amendment.toml")
    for name in names:
        until(lambda name=name: federation.events(name, "stalled"), f"{name} is stalled")
    stuck = {name: federation.iteration(name) for name in names}
    proposal = amended(old, from_iteration=min(stuck.values()))
    if rotated:
        (folder / "new" / "bob.key").replace(folder / "bob.key")
    proposal = approved(proposal, old, folder, "alice", "bob", "carol", "dave")
    proposal.write(federation.directory("frank") / "amendment.toml")
    for name in names:
        until(lambda name=name: federation.iteration(name) > stuck[name] + 3, f"{name} continues")
        assert not federation.events(name, "equivocation")
