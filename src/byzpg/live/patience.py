"""How long a member waits for the last messages of a round.

A member that is late on purpose must not set the pace. So waiting is paid from savings: a member saves a share of all
time in which it does not wait, and whatever the others do, it waits for no more than that.

An attacker can be late for one member at a time, and while that one waits, all others save. A wait that the others did
not share is therefore charged K − f times, as if all honest members had waited one after another. A member did not
share its wait if more than f others had sent their next message before it sent its own.

Every second that rounds last longer than without waiting is then paid at least K − 2f times, by K − f members. With the
share below, rounds take at most twice as long, apart from what was saved before.
"""

from math import inf

# The largest savings, in grace periods: enough for a pause of one honest member.
MOST_GRACES = 3.0


class Patience:
    """The savings of one member.

    Args:
        grace: The longest time to wait in one round, in seconds.
        num_members: K.
        num_byzantine: f.
    """

    def __init__(self, grace: float, num_members: int, num_byzantine: int) -> None:
        self._grace, self._savings = grace, MOST_GRACES * grace
        self._share = min(0.5, 1 - 2 * num_byzantine / num_members)  # seconds saved per second without waiting
        self._num_byzantine, self._num_honest = num_byzantine, num_members - num_byzantine
        self._since, self._is_waiting, self._waited = inf, False, 0.0

    def begin(self, now: float) -> float:
        """Begin to wait; return for how many seconds at most."""
        self._pass_time(now, is_waiting=True)
        return min(self._grace, max(self._savings, 0.0))

    def end(self, now: float) -> None:
        """A round has ended, with or without waiting."""
        self._pass_time(now, is_waiting=False)

    def sent(self, num_ahead: int) -> None:
        """The member's next message has been sent; so many others had sent theirs before."""
        if num_ahead > self._num_byzantine:
            self._savings -= (self._num_honest - 1) * self._waited
        self._waited = 0.0

    def _pass_time(self, now: float, *, is_waiting: bool) -> None:
        passed = max(0.0, now - self._since)
        if self._is_waiting:
            self._waited += passed
            self._savings -= passed
        else:
            self._savings = min(self._savings + self._share * passed, MOST_GRACES * self._grace)
        self._since, self._is_waiting = now, is_waiting
