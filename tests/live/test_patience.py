"""How much an attacker that delays its messages can slow down the honest members, in simulated time."""

import random
from collections.abc import Callable
from itertools import product

import pytest

from byzpg.live.patience import Patience
from byzpg.live.rehearsal import Late as LateMessages
from byzpg.live.rehearsal import parse_attack

# Whether the attacker is late for a member in an iteration and a phase; the number of honest members, and chance.
Late = Callable[[int, int, int, int, random.Random], bool]
GRACE, NUM_ITERATIONS = 1.0, 600
# Seconds of computation before each message of an iteration.
SECONDS = (0.04, 0.002, 0.002, 0.002)
ATTACKS: dict[str, Late] = {
    "all": lambda t, phase, member, honest, chance: True,
    "one in turn": lambda t, phase, member, honest, chance: (4 * t + phase) % honest == member,
    "all but one in turn": lambda t, phase, member, honest, chance: (4 * t + phase) % honest != member,
    "half in turn": lambda t, phase, member, honest, chance: (4 * t + phase - member) % honest < honest // 2,
    "one before gradients": lambda t, phase, member, honest, chance: phase == 3 and t % honest == member,
    "all but one before gradients": lambda t, phase, member, honest, chance: phase == 3 and t % honest != member,
    "by chance": lambda t, phase, member, honest, chance: chance.random() < 0.5,
}


def seconds_per_iteration(late: Late | None, delay: float, num_members: int, num_byzantine: int) -> float:
    """How long an iteration takes once the first savings are spent, if f members are `delay` late where `late` says."""
    chance, honest = random.Random(0), range(num_members - num_byzantine)
    patiences = [Patience(GRACE, num_members, num_byzantine) for _ in honest]
    ends, early = [0.0 for _ in honest], 0.0
    for iteration, phase in product(range(NUM_ITERATIONS), range(len(SECONDS))):
        sent = [end + SECONDS[phase] * (1 + 0.2 * chance.random()) for end in ends]
        quorum = max(sent)  # the messages of all honest members are just enough
        for member, patience in enumerate(patiences):
            patience.sent(sum(time < sent[member] for time in sent))
            most = patience.begin(quorum)
            waits = late is not None and late(iteration, phase, member, len(honest), chance)
            ends[member] = quorum + (min(most, delay) if waits else 0.0)
            patience.end(ends[member])
        if iteration == NUM_ITERATIONS // 3:
            early = max(ends)
    return (max(ends) - early) / (NUM_ITERATIONS * 2 / 3)


@pytest.mark.parametrize(("num_members", "num_byzantine"), [(4, 1), (5, 1), (7, 2), (10, 3)])
@pytest.mark.parametrize("attack", ATTACKS)
def test_attackers_that_delay_cost_at_most_half_of_the_speed(attack: str, num_members: int, num_byzantine: int) -> None:
    healthy = seconds_per_iteration(None, 0.0, num_members, num_byzantine)
    for delay in (0.01, 0.9):
        slowed = seconds_per_iteration(ATTACKS[attack], delay, num_members, num_byzantine)
        assert healthy < slowed <= 2.05 * healthy, f"{delay} s late: {slowed / healthy:.2f} times as long"


def test_a_member_waits_for_one_that_is_a_third_slower() -> None:
    """What all honest members wait for, they can afford."""
    patience, now = Patience(GRACE, 5, 1), 0.0
    for _ in range(1000):
        patience.sent(1)
        assert patience.begin(now) > 0.33
        patience.end(now + 0.33)
        now += 1.33


def test_a_pause_is_waited_for_and_not_longer() -> None:
    patience = Patience(GRACE, 5, 1)
    waited, now = 0.0, 0.0
    while (seconds := patience.begin(now)) > 1e-9:
        assert seconds <= GRACE
        waited, now = waited + seconds, now + seconds
        patience.end(now)
        patience.sent(1)
    assert waited == pytest.approx(3 * GRACE)


@pytest.mark.parametrize(
    ("text", "attack"),
    [("late(0.2)", LateMessages(0.2)), ("Late(2, 1, 16)", LateMessages(2.0, victims=1, rounds=16))],
)
def test_late_messages_are_rehearsed_by_name(text: str, attack: LateMessages) -> None:
    assert parse_attack(text) == attack
    with pytest.raises(ValueError, match=r"late\(SECONDS\)"):
        parse_attack("late(-1)")
