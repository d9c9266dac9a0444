"""Amendments: manifests that replace others, approved by the members, from the class to the commands."""

import json
import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import pytest

from byzpg import cli
from byzpg.config import Config
from byzpg.federation.members import Peer, seeded_key
from byzpg.live.amendment import LARGEST, TAG, Amendment, amended, check_chain, num_needed
from byzpg.live.identity import generate, write_identity
from byzpg.live.initial import read_initial, write_initial
from byzpg.live.manifest import FIXED, Manifest, Times, new_manifest
from byzpg.live.peer import Checkpoint
from byzpg.live.store import Store
from byzpg.live.wire import Codec
from byzpg.runs import Run, RunDirectory

NAMES = ("alice", "bob", "carol", "dave", "erin")
IDENTITIES = {name: generate(name, f"{name}.example:7000") for name in (*NAMES, "frank", "grace", "heidi")}
MEMBERS = {name: member for name, (member, _) in IDENTITIES.items()}
KEYS = {name: private for name, (_, private) in IDENTITIES.items()}
BOB_AGAIN, BOBS_NEW_KEYS = generate("bob", "bob.example:7001")
SETTINGS = Config(num_agents=5, num_byzantine=1, num_seeds=1, num_attackers=0, trajectories=30).resolved()
TRAINING = {option: value for option, value in SETTINGS.as_data().items() if option not in FIXED}
OLD = new_manifest([MEMBERS[name] for name in NAMES], 1, TRAINING, Times(), rehearsal=False)
PROPOSAL = amended(OLD, from_iteration=7, add=[MEMBERS["frank"]], remove=["erin"])


def approved(amendment: Amendment, *names: str, old: Manifest = OLD) -> Amendment:
    for name in names:
        amendment = amendment.approved_by(KEYS[name], name, old)
    return amendment


COMPLETE = approved(PROPOSAL, "alice", "bob", "carol", "erin")


# The manifest


def test_a_first_manifest_is_as_before_and_an_amended_one_says_whom_it_replaces() -> None:
    assert not {"predecessor", "from_iteration", "initial"} & json.loads(OLD.canonical).keys()
    new = PROPOSAL.manifest
    assert (new.predecessor, new.from_iteration) == (OLD.digest.hex(), 7)
    assert json.loads(new.canonical)["predecessor"] == OLD.digest.hex()
    digests = {
        new.digest,
        *(replace(new, **each).digest for each in ({"from_iteration": 8}, {"predecessor": 64 * "0"})),
    }
    digests |= {OLD.digest, replace(OLD, initial=64 * "1").digest}
    assert len(digests) == 5
    assert Manifest.of(tomllib.loads(new.to_toml()), "text").digest == new.digest
    assert '"from_iteration": here nothing, there 7' in OLD.difference(new.canonical)


@pytest.mark.parametrize(
    "wrong",
    [
        {"predecessor": "00"},
        {"predecessor": 64 * "A"},
        {"predecessor": None},
        {"from_iteration": 0},
        {"from_iteration": -1},
        {"from_iteration": 2**32},
        {"from_iteration": 7.0},
        {"from_iteration": True},
        {"initial": 63 * "0"},
    ],
)
def test_a_manifest_with_a_broken_predecessor_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong)) if wrong != {"predecessor": None} else "from_iteration"):
        replace(PROPOSAL.manifest, **wrong)
    values = {name: value for name, value in (PROPOSAL.manifest.as_data() | wrong).items() if value is not None}
    with pytest.raises(ValueError, match="text: "):
        Manifest.of(values, "text")


# Who is a member


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"add": ["frank"]}, ["alice", "bob", "carol", "dave", "erin", "frank"]),
        ({"add": ["frank"], "remove": ["bob"]}, ["alice", "frank", "carol", "dave", "erin"]),
        ({"add": ["frank", "grace"], "remove": ["bob"]}, ["alice", "frank", "carol", "dave", "erin", "grace"]),
        ({"remove": ["bob"], "num_byzantine": 0}, ["alice", "carol", "dave", "erin"]),
        ({"add": ["frank"], "remove": ["bob", "carol"], "num_byzantine": 0}, ["alice", "frank", "dave", "erin"]),
        ({"substitutes": {"carol": "frank"}}, ["alice", "bob", "frank", "dave", "erin"]),
    ],
)
def test_those_who_stay_keep_their_order(change: dict[str, Any], names: list[str]) -> None:
    change = dict(change)
    if "add" in change:
        change["add"] = [MEMBERS[name] for name in change["add"]]
    if "substitutes" in change:
        change["substitutes"] = {old: MEMBERS[new] for old, new in change["substitutes"].items()}
    new = amended(OLD, from_iteration=3, **change).manifest
    assert [member.name for member in new.members] == names
    assert (new.federation, new.run, new.training, new.times) == (OLD.federation, OLD.run, OLD.training, OLD.times)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"remove": ["mallory"]}, "'mallory' is not a member"),
        ({"substitutes": {"mallory": MEMBERS["frank"]}}, "'mallory' is not a member"),
        ({"add": [MEMBERS["bob"]]}, "two have the name bob"),
        ({"remove": ["erin"]}, "num_byzantine ≤ 0"),
        ({"num_byzantine": 2}, "num_byzantine ≤ 1"),
        ({"num_byzantine": -1}, "num_byzantine must not be negative"),
        ({"from_iteration": 0}, "from_iteration must be a whole number of 1 or more"),
        ({"add": [MEMBERS["frank"], MEMBERS["grace"]], "remove": ["erin", "dave"]}, "at least 4 members must stay"),
    ],
)
def test_what_the_rules_do_not_allow_is_not_proposed(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        amended(OLD, **{"from_iteration": 3, **change})


def test_what_changes_is_said_in_words() -> None:
    new, old = MEMBERS["frank"], OLD.members[1]
    assert PROPOSAL.describe(OLD) == [
        f"frank at frank.example:7000, certificate {new.fingerprint[:16]}…, replaces erin",
        "5 members, of which 1 may be faulty",
        "takes effect before iteration 7",
    ]
    rotated = amended(OLD, from_iteration=7, substitutes={"bob": BOB_AGAIN}).describe(OLD)
    assert rotated[:3] == [
        f"bob gets a new signing key, {BOB_AGAIN.public_key[:16]}…",
        f"bob gets a new certificate, {BOB_AGAIN.fingerprint[:16]}…",
        f"bob moves from {old.address} to bob.example:7001",
    ]
    fewer = amended(OLD, from_iteration=7, remove=["bob"], num_byzantine=0).describe(OLD)
    assert fewer[:2] == [
        "bob is removed",
        "5 members, of which 1 may be faulty, become 4 members, of which 0 may be faulty",
    ]
    more = amended(OLD, from_iteration=7, add=[new, MEMBERS["grace"]], remove=["bob"]).describe(OLD)
    assert [words.split(",")[-1] for words in more[:2]] == [" replaces bob", " is added"]
    patient = Amendment(replace(PROPOSAL.manifest, members=OLD.members, times=Times(grace=2.5)), {}).describe(OLD)
    assert patient[0] == "times: grace changes from 1 s to 2.5 s"
    assert amended(OLD, from_iteration=7).describe(OLD)[0] == "no member changes"


# Approvals


def test_an_amendment_is_complete_once_k_minus_f_old_members_have_approved() -> None:
    assert num_needed(OLD) == 4
    assert not PROPOSAL.is_complete(OLD)
    three = approved(PROPOSAL, "alice", "bob", "erin")  # also the one who is removed: it is a member of the old one
    assert not approved(three, "erin").is_complete(OLD)
    assert approved(three, "dave").is_complete(OLD)
    assert COMPLETE.is_complete(OLD)


@pytest.mark.parametrize(
    ("signer", "name"),
    [("frank", "frank"), ("alice", "bob"), ("grace", "alice"), ("alice", "mallory")],
)
def test_only_old_members_can_approve_with_their_own_keys(signer: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"not the key of {name}"):
        PROPOSAL.approved_by(KEYS[signer], name, OLD)
    signature = KEYS[signer].signing.sign(TAG + PROPOSAL.manifest.digest).hex()
    forged = Amendment(PROPOSAL.manifest, {name: signature})
    for asked in (forged.check, forged.is_complete):
        with pytest.raises(ValueError, match=f"the approval of '{name}' is not a signature"):
            asked(OLD)
    assert not PROPOSAL.merged(forged, OLD).approvals


def test_a_rotated_key_counts_from_the_next_manifest_on() -> None:
    rotation = amended(OLD, from_iteration=7, substitutes={"bob": BOB_AGAIN})
    with pytest.raises(ValueError, match="not the key of bob"):
        rotation.approved_by(BOBS_NEW_KEYS, "bob", OLD)
    new = approved(rotation, "bob").manifest
    after = amended(new, from_iteration=9, remove=["erin"], num_byzantine=0)
    with pytest.raises(ValueError, match="not the key of bob"):
        after.approved_by(KEYS["bob"], "bob", new)
    assert after.approved_by(BOBS_NEW_KEYS, "bob", new).approvals.keys() == {"bob"}


@pytest.mark.parametrize(
    "signature",
    [
        "",
        64 * "00",
        64 * "zz",
        COMPLETE.approvals["alice"][:-2],
        COMPLETE.approvals["alice"] + "00",
        COMPLETE.approvals["bob"],
        KEYS["alice"].signing.sign(PROPOSAL.manifest.digest).hex(),
        KEYS["alice"].signing.sign(TAG + OLD.digest).hex(),
    ],
)
def test_a_signature_of_anything_else_is_no_approval(signature: str) -> None:
    forged = Amendment(PROPOSAL.manifest, {**COMPLETE.approvals, "alice": signature})
    with pytest.raises(ValueError, match="the approval of 'alice' is not"):
        forged.is_complete(OLD)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"predecessor": 64 * "0"}, "replaces the manifest with the hash 0000000000000000"),
        ({"federation": str(uuid4())}, "cannot change federation"),
        ({"run": str(uuid4())}, "cannot change run"),
        ({"rehearsal": True}, "cannot change rehearsal"),
        ({"initial": 64 * "0"}, "cannot change initial"),
        ({"training": TRAINING | {"seed": 1}}, "cannot change training"),
        ({"training": TRAINING | {"rounds": 4}}, "cannot change training"),
        ({"training": {}}, "cannot change training"),
        ({"from_iteration": 8}, "the approval of 'alice' is not"),
        ({"times": Times(grace=2.0)}, "the approval of 'alice' is not"),
        ({"members": OLD.members}, "the approval of 'alice' is not"),
        ({"num_byzantine": 0}, "the approval of 'alice' is not"),
    ],
)
def test_a_changed_amendment_is_refused(change: dict[str, Any], words: str) -> None:
    forged = Amendment(replace(COMPLETE.manifest, **change), COMPLETE.approvals)
    for asked in (forged.check, forged.is_complete, lambda old: forged.approved_by(KEYS["alice"], "alice", old)):
        with pytest.raises(ValueError, match=words):
            asked(OLD)


def test_the_order_of_options_does_not_matter() -> None:
    shuffled = replace(COMPLETE.manifest, training=dict(reversed(TRAINING.items())))
    assert Amendment(shuffled, COMPLETE.approvals).is_complete(OLD)


def test_copies_are_merged_and_what_is_invalid_is_left_out() -> None:
    one, other = approved(PROPOSAL, "alice", "bob"), approved(PROPOSAL, "carol", "bob")
    assert one.merged(other, OLD).approvals.keys() == {"alice", "bob", "carol"}
    spoiled = Amendment(PROPOSAL.manifest, {**one.approvals, "alice": 64 * "00", "mallory": 64 * "00"})
    for first, second in ((spoiled, one), (one, spoiled)):
        assert first.merged(second, OLD) == one
    another = amended(OLD, from_iteration=8, add=[MEMBERS["frank"]], remove=["erin"])
    with pytest.raises(ValueError, match="two different amendments"):
        one.merged(another, OLD)


def test_a_chain_of_amendments() -> None:
    second = amended(COMPLETE.manifest, from_iteration=12, add=[MEMBERS["grace"]])
    signed = approved(second, "alice", "bob", "carol", "frank", old=COMPLETE.manifest)
    assert check_chain(OLD, []) == OLD
    assert check_chain(OLD, [COMPLETE, signed]) == signed.manifest
    with pytest.raises(ValueError, match="is not complete"):
        check_chain(OLD, [COMPLETE, approved(second, "alice", "bob", "carol", old=COMPLETE.manifest)])
    with pytest.raises(ValueError, match="replaces the manifest"):
        check_chain(OLD, [signed])
    with pytest.raises(ValueError, match="replaces the manifest"):
        check_chain(COMPLETE.manifest, [COMPLETE])
    with pytest.raises(ValueError, match="not the key of erin"):  # who was a member once
        approved(second, "erin", old=COMPLETE.manifest)
    with pytest.raises(ValueError, match="from_iteration must be at least 7"):
        amended(COMPLETE.manifest, from_iteration=6, add=[MEMBERS["grace"]])
    # A manifest that cannot start, for example because of a wrong address, is replaced before its first iteration.
    amended(COMPLETE.manifest, from_iteration=7, add=[MEMBERS["grace"]])


# As bytes and files


def test_there_and_back(tmp_path: Path) -> None:
    assert Amendment.from_bytes(COMPLETE.to_bytes()).is_complete(OLD)
    assert Amendment.from_bytes(PROPOSAL.to_bytes()).approvals == {}
    path = tmp_path / "amendment.toml"
    for amendment in (PROPOSAL, COMPLETE):
        amendment.write(path)
        found = Amendment.load(path)
        assert (found.manifest.digest, found.approvals) == (amendment.manifest.digest, amendment.approvals)
    assert Manifest.load(path).digest == COMPLETE.manifest.digest  # new members start with this file
    OLD.write(tmp_path / "federation.toml")
    with pytest.raises(ValueError, match=r"federation\.toml is not an amendment"):
        Amendment.load(tmp_path / "federation.toml")
    with pytest.raises(ValueError, match=r"nowhere\.toml cannot be read"):
        Amendment.load(tmp_path / "nowhere.toml")


def mangled(change: Callable[[dict[str, Any]], Any]) -> bytes:
    values = json.loads(COMPLETE.to_bytes())
    change(values)
    return json.dumps(values).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b"1" * 10_000,
        b"{}",
        b'{"approvals": {}}',
        mangled(lambda values: values.pop("approvals")),
        mangled(lambda values: values.update(approvals=[])),
        mangled(lambda values: values.update(approvals={"alice": 7})),
        mangled(lambda values: values.update(approvals={"alice": None})),
        mangled(lambda values: values.pop("predecessor")),
        mangled(lambda values: (values.pop("predecessor"), values.pop("from_iteration"))),
        mangled(lambda values: values.update(surprise=1)),
        mangled(lambda values: values.update(members={})),
        mangled(lambda values: values["times"].update(grace=float("nan"))),
        mangled(lambda values: values["training"].update(step_size=float("inf"))),
        mangled(lambda values: values.update(version=2)),
        COMPLETE.to_bytes()[:-1],
        COMPLETE.to_bytes() + b" " * LARGEST,
    ],
)
def test_bytes_that_are_no_amendment_are_one_error(content: bytes) -> None:
    with pytest.raises(ValueError, match="amendment") as error:
        Amendment.from_bytes(content)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("change", [{"env": "evil:go"}, {"aggregator": "evil:go()"}, {"conventions": "evil:go()"}])
def test_reading_an_amendment_runs_nothing_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="amendment"):
        Amendment.from_bytes(mangled(lambda values: values["training"].update(change))).check(OLD)
    assert "evil" not in sys.modules


def test_an_amendment_has_a_largest_size() -> None:
    huge = Amendment(PROPOSAL.manifest, {"alice": LARGEST * "0"})
    with pytest.raises(ValueError, match=f"at most {LARGEST} bytes"):
        huge.to_bytes()


# Trained parameters to start from


def test_the_parameters_to_start_from_have_the_hash_of_the_manifest(tmp_path: Path) -> None:
    assert read_initial(OLD, tmp_path) is None
    trained = np.arange(5, dtype=np.float32) / 3
    digest, path = write_initial(tmp_path, trained)
    manifest = replace(OLD, initial=digest)
    found = read_initial(manifest, tmp_path)
    assert found is not None
    assert found.tobytes() == trained.tobytes()
    for spoiled in (trained + 1, trained.astype(np.float64), trained[None]):
        np.save(path, spoiled)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            read_initial(manifest, tmp_path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be read"):
        read_initial(manifest, tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        read_initial(manifest, tmp_path)
    for bad in (np.full(5, np.nan), trained[None]):
        with pytest.raises(ValueError, match="finite numbers"):
            write_initial(tmp_path, bad)
    assert not list(tmp_path.iterdir())


def test_a_peer_starts_from_them() -> None:
    settings = replace(SETTINGS, switch_probability=0.5, trajectories=300, optimizer="adam")
    federation, schedule, key = settings.federation(), settings.schedule(), seeded_key(0)
    seeded = Peer(federation, schedule, 0, key)
    same = Peer(federation, schedule, 0, key, initial=seeded.parameters)
    assert np.array_equal(same.parameters, seeded.parameters)
    assert same.plan_digest == seeded.plan_digest
    other = Peer(federation, schedule, 0, key, initial=seeded.parameters + 1)
    assert np.array_equal(other.parameters, seeded.parameters + 1)
    assert other.plan_digest != seeded.plan_digest  # the coin is keyed by θ_0
    with pytest.raises(ValueError, match="parameters to start from must have shape"):
        Peer(federation, schedule, 0, key, initial=seeded.parameters[1:])


# Commands

Shell = Callable[..., str]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """What a command says, in the folder of a federation; `expect` is its exit code."""
    for name in NAMES:
        write_identity(tmp_path, *IDENTITIES[name])
    OLD.write(tmp_path / "federation.toml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")

    def byzpg(*arguments: str, expect: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["byzpg", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code
        said = " ".join("".join(capsys.readouterr()).split())
        assert code == expect, said
        return said

    return byzpg


def member_directory(folder: Path, name: str, *iterations: int) -> Path:
    """The directory of a member that holds the states before these iterations."""
    store = Store(folder / f"{name}-run", OLD, MEMBERS[name])
    checkpoints = store.records("checkpoints.bin", 2, 8 + 4 * 3)
    for number, iteration in enumerate(iterations):
        checkpoints.put(number, *Checkpoint(iteration, np.ones(3, np.float32)).parts())
    store.close()
    return store.path


def equivocation(name: str) -> dict[str, Any]:
    """Evidence that a member signed two messages of one round."""
    own = OLD.index(name)
    codec = Codec(
        course=OLD.course(own, num_iterations=9, rounds=3),
        manifest=OLD.digest,
        run=UUID(OLD.run).bytes,
        dimension=2,
        state_dimension=2,
        keys=[member.verifier() for member in OLD.members],
    )
    messages = [codec.encode("vector", 3, np.full(2, each, np.float32), (), KEYS[name].signing) for each in (1, 2)]
    heads = [{"head": each.frame[:100].hex(), "signature": each.signature.hex()} for each in messages]
    return {"member": "alice", "messages": heads}  # the words are not signed


def test_from_a_proposal_to_the_directory_of_a_member(tmp_path: Path, shell: Shell) -> None:
    write_identity(tmp_path, *IDENTITIES["frank"])
    directory = member_directory(tmp_path, "alice", 3, 4)
    said = shell("federation", "amend", "federation.toml", "--replace", "erin=frank.card", "--from-iteration", "7")
    assert "replaces erin" in said
    assert "takes effect before iteration 7" in said
    assert "approval of 4 of the 5 members" in said
    proposal = Amendment.load(Path("amendment.toml"))
    assert proposal.manifest.digest == PROPOSAL.manifest.digest
    Path("copy.toml").write_bytes(Path("amendment.toml").read_bytes())

    approve = ("federation", "approve", "amendment.toml")
    assert "Approved by nobody: 0 of 4" in shell(*approve)
    assert "replaces erin" in shell(*approve, "--name", "alice")
    assert "Approved by alice, bob: 2 of 4" in shell(*approve, "--name", "bob", "--key", "bob.key")
    Path("carol.key").rename("elsewhere.key")
    shell("federation", "approve", "copy.toml", "--name", "carol", "--key", "elsewhere.key")
    assert "2 of 4" in shell("federation", "approve", "copy.toml", "--name", "erin", "--directory", str(directory))
    assert not (directory / "amendment.toml").exists()
    said = shell(*approve, "copy.toml", "--directory", str(directory))
    assert "4 of 4 approvals. Complete, and copied" in said
    assert "New members (frank) run: byzpg peer amendment.toml --name NAME" in said
    assert "Put amendment.toml as amendment.toml into the directory" in shell(*approve)
    for path in (directory / "amendment.toml", Path("amendment.toml")):
        assert Amendment.load(path).approvals.keys() == {"alice", "bob", "carol", "erin"}
        assert Amendment.load(path).is_complete(OLD)

    # The next one begins from it; frank is a member of it.
    again = ("federation", "amend", "amendment.toml", "--remove", "dave", "--num-byzantine", "0", "--from-iteration")
    assert "dave is removed" in shell(*again, "9", "--amendment", "second.toml")
    said = shell("federation", "approve", "second.toml", "--manifest", "amendment.toml", "--name", "frank")
    assert "Approved by frank: 1 of 4" in said


def test_a_member_approves_one_amendment_of_a_manifest(tmp_path: Path, shell: Shell) -> None:
    approve = ("federation", "approve", "amendment.toml", "--name", "alice")
    PROPOSAL.write(tmp_path / "amendment.toml")
    shell(*approve)
    assert "1 of 4" in shell(*approve)
    amended(OLD, from_iteration=8, add=[MEMBERS["frank"]]).write(tmp_path / "amendment.toml")
    assert "would split the federation" in shell(*approve, expect=2)
    assert Amendment.load(tmp_path / "amendment.toml").approvals == {}
    (tmp_path / "alice.approved").write_text("[]")
    assert "alice.approved is broken" in shell(*approve, expect=2)
    (tmp_path / "alice.approved").unlink()
    shell(*approve)


def test_evidence_proposes_a_removal(tmp_path: Path, shell: Shell) -> None:
    evidence = equivocation("dave")
    (tmp_path / "evidence.json").write_text(json.dumps(evidence))
    amend = ("federation", "amend", "federation.toml", "--from-iteration", "7", "--evidence", "evidence.json")
    said = shell(*amend, "--num-byzantine", "0")
    assert "evidence.json: proven. dave signed two different messages" in said
    names = [member.name for member in Manifest.load(tmp_path / "amendment.toml").members]
    assert names == ["alice", "bob", "carol", "erin"]
    write_identity(tmp_path / "new", *IDENTITIES["frank"])
    shell(*amend, "--replace", "dave=new/frank.card", "--amendment", "replaced.toml")
    assert [member.name for member in Manifest.load(tmp_path / "replaced.toml").members][3] == "frank"
    evidence["messages"][0]["signature"] = 64 * "00"
    (tmp_path / "evidence.json").write_text(json.dumps(evidence))
    assert "forged" in shell(*amend, "--num-byzantine", "0", "--amendment", "x.toml", expect=2)
    assert not (tmp_path / "x.toml").exists()


def test_the_same_members_start_again_from_what_they_hold(tmp_path: Path, shell: Shell) -> None:
    directory = member_directory(tmp_path, "alice", 4, 5)
    before = (directory / "checkpoints.bin").read_bytes()
    recover = ("federation", "recover", "federation.toml", "--directory")
    said = shell(*recover, str(directory))
    assert "holds the states before iterations 4 and 5; the other members must hold 5" in said
    assert "no member changes" in said
    new = Manifest.load(tmp_path / "amendment.toml")
    assert (new.members, new.from_iteration, new.predecessor) == (OLD.members, 5, OLD.digest.hex())
    shell(*recover, str(directory), "--from-iteration", "4", "--amendment", "four.toml")
    assert Manifest.load(tmp_path / "four.toml").from_iteration == 4
    for arguments, words in (
        ((str(directory), "--from-iteration", "3"), "must be one that"),
        ((str(directory),), "amendment.toml exists already"),
        ((str(tmp_path),), "is not the directory of a member"),
        ((str(member_directory(tmp_path, "bob")),), "holds no intact state"),
        ((str(member_directory(tmp_path, "carol", 0)),), "start again from the beginning"),
    ):
        assert words in shell(*recover, *arguments, expect=2)
    assert (directory / "checkpoints.bin").read_bytes() == before
    (directory / "checkpoints.bin").write_bytes(before[:-1])
    assert "holds no intact state" in shell(*recover, str(directory), "--amendment", "x.toml", expect=2)
    assert (directory / "checkpoints.bin").read_bytes() == before[:-1]
    replace(OLD, run=str(uuid4())).write(tmp_path / "other.toml")
    assert "belongs to run" in shell("federation", "recover", "other.toml", "--directory", str(directory), expect=2)


def test_what_can_be_wrong(tmp_path: Path, shell: Shell) -> None:
    write_identity(tmp_path, *IDENTITIES["frank"])
    PROPOSAL.write(tmp_path / "there.toml")
    amended(OLD, from_iteration=8, add=[MEMBERS["grace"]]).write(tmp_path / "another.toml")
    Amendment(PROPOSAL.manifest, {"alice": 64 * "00"}).write(tmp_path / "forged.toml")
    amend = ("federation", "amend", "federation.toml", "--from-iteration", "7")
    approve = ("federation", "approve", "there.toml")
    for arguments, words in (
        (amend, "nothing changes: name members with --add"),
        ((*amend, "--add", "erin.card"), "two have the name erin"),
        ((*amend, "--replace", "erin"), "--replace takes NAME=CARD"),
        ((*amend, "--replace", "erin=frank.card", "--remove", "erin"), "--replace takes NAME=CARD"),
        ((*amend, "--add", "frank.card", "--amendment", "there.toml"), "there.toml exists already"),
        ((*amend, "--add", "frank.card", "--amendment", "there.txt"), "must end in .toml"),
        ((*approve, "--name", "frank"), "'frank' is not a member"),
        ((*approve, "--name", "bob", "--key", "alice.key"), "not the key of bob"),
        ((*approve, "another.toml"), "another.toml: these are two different amendments"),
        ((*approve, "forged.toml"), "forged.toml: the approval of 'alice' is not"),
        (("federation", "approve", "forged.toml"), "the approval of 'alice' is not"),
        ((*approve, "--name", "bob", "--directory", "."), "is not the directory of a member"),
        (("federation", "approve", "federation.toml"), "federation.toml is not an amendment"),
        ((*approve, "--manifest", "there.toml"), "use the manifest that it was made from"),
    ):
        assert words in shell(*arguments, expect=2)
    assert Amendment.load(tmp_path / "there.toml").approvals == {}
    assert not list(tmp_path.glob("*.approved"))


def test_a_federation_starts_from_a_trained_run(tmp_path: Path, shell: Shell) -> None:
    small = ("--trajectories", "4", "--large-batch", "2", "--hidden", "3", "--horizon", "5")
    settings = replace(SETTINGS, trajectories=4, large_batch=2, small_batch=2, hidden=(3,), horizon=5)
    plan = settings.schedule().plan(np.zeros(1))
    last = np.random.default_rng(0).normal(size=(1, 5, settings.bound_policy().dimension)).astype(np.float32)
    run = Run.of(settings, [plan], metrics={"return_mean": np.zeros((1, 2))}, last=last, uniform=np.zeros_like(last))
    RunDirectory.create(tmp_path / "trained", settings).write_results(run)
    cards = [f"{name}.card" for name in NAMES]
    new = ("federation", "new", *cards, *small, "--from", "trained", "--manifest")
    said = shell(*new, "new/federation.toml")
    manifest = Manifest.load(tmp_path / "new" / "federation.toml")
    trained = read_initial(manifest, tmp_path / "new")
    assert manifest.initial is not None
    assert trained is not None
    assert f"initial-{manifest.initial[:16]}.npy (every member needs this file" in said
    assert np.array_equal(trained, last[0, 0])
    for options, words in (
        (("--hidden", "4"), "needs the same policy"),
        (("--env", "Pendulum-v1"), "needs the same env"),
    ):
        assert words in shell(*new, "x.toml", *options, expect=2)
    assert not (tmp_path / "x.toml").exists()


def test_a_federation_may_start_from_a_run_whose_first_actions_were_less_noisy(tmp_path: Path, shell: Shell) -> None:
    """Where the parameters come from a run, nothing is drawn with that noise."""
    options: dict[str, Any] = {"env": "Pendulum-v1", "algorithm": "DecByzPPO", "hidden": (3,), "steps": 16}
    ppo = "PPO(environments=2, segment=8, epochs=1, minibatches=1{})"
    quiet = Config(**options, num_agents=5, num_seeds=1, ppo=ppo.format(", initial_log_std=-2")).resolved()
    plan, dimension = quiet.schedule().plan(np.zeros(1)), quiet.federation().agent.dimension
    last = np.random.default_rng(0).normal(size=(1, 5, dimension)).astype(np.float32)
    run = Run.of(quiet, [plan], metrics={"return_mean": np.zeros((1, 1))}, last=last, uniform=np.zeros_like(last))
    RunDirectory.create(tmp_path / "quiet", quiet).write_results(run)
    small = ("--env", "Pendulum-v1", "--algorithm", "DecByzPPO", "--hidden", "3", "--steps", "16", "--ppo")
    cards = [f"{name}.card" for name in NAMES]
    start = ("--from", "quiet", "--manifest")
    shell("federation", "new", *cards, *small, ppo.format(""), *start, "new/federation.toml")
    initial = read_initial(Manifest.load(tmp_path / "new" / "federation.toml"), tmp_path / "new")
    assert initial is not None
    assert np.array_equal(initial, last[0, 0])
    longer = ppo.format(", normalize_observations=True")  # θ then includes the statistics
    said = shell("federation", "new", *cards, *small, longer, *start, "x.toml", expect=2)
    assert "needs the same ppo.normalize_observations: here True, there False." in said
    assert not (tmp_path / "x.toml").exists()
