"""How long a member waits for the last messages of a round.

A member that is late on purpose must not set the pace. So waiting is paid from savings: a member saves a share of all
time in which it does not wait, and whatever the others do, it waits for no more than that.
"""

from math import inf

# Seconds saved per second without waiting. Rounds therefore take at most 1.8 times as long as without waiting.
SHARE = 0.8
# The largest savings, in grace periods: enough for a pause of one honest member.
MOST_GRACES = 3.0


class Patience:
    """The savings of one member.

    Args:
        grace: The longest time to wait in one round, in seconds.
    """

    def __init__(self, grace: float) -> None:
        self._grace, self._savings = grace, MOST_GRACES * grace
        self._since, self._is_waiting = inf, False

    def begin(self, now: float) -> float:
        """Begin to wait; return for how many seconds at most."""
        self._pass_time(now, is_waiting=True)
        return min(self._grace, self._savings)

    def end(self, now: float) -> None:
        """A round has ended, with or without waiting."""
        self._pass_time(now, is_waiting=False)

    def _pass_time(self, now: float, *, is_waiting: bool) -> None:
        passed = max(0.0, now - self._since)
        change = -passed if self._is_waiting else SHARE * passed
        self._savings = min(max(self._savings + change, 0.0), MOST_GRACES * self._grace)
        self._since, self._is_waiting = now, is_waiting
