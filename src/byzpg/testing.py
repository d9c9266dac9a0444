"""Contracts for components of your own: `check_aggregator`, `check_agreement`, `check_attack`, `check_environment`,
`check_policy`.

Each function tries one component, returns a `Report`, and raises a `ContractError` if a part of the contract is broken.
byzpg's own components are tested with the same functions.

Examples:
    >>> from byzpg.robust import Mean, Median
    >>> print(check_aggregator(Median()))
    Median(): 8 of 8 checks passed; properties: order, translation, agreement, exact agreement, robustness.
    >>> check_aggregator(Mean())
    Traceback (most recent call last):
    byzpg.testing.ContractError: Mean() breaks its contract:
    - robustness: with 3 of 13 rows at distance 1e+16 of the others, the result moves by 2.31e+15 times their spread.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from byzpg import envs
from byzpg._registry import FAMILIES, check_readable
from byzpg.envs.host import HostTask
from byzpg.envs.spaces import Box, Discrete, Space
from byzpg.learning.policies import Policy, policy_for
from byzpg.networks import Network
from byzpg.robust import rules
from byzpg.robust.aggregators import Aggregator, Mean
from byzpg.robust.agreement import Agreement
from byzpg.robust.attacks import Attack, Knowledge
from byzpg.robust.components import Component
from byzpg.robust.rules import Rule

DIMENSION = 5  # of the rows
TOLERANCE = 1e-4
KEY = jax.random.key(7)


class ContractError(AssertionError):
    """A component breaks its contract; the message lists how."""


@dataclass(frozen=True)
class Report:
    """What was found out about a component.

    Attributes:
        subject: The component, as text.
        checks: What every component of its family must do: the problem, or None if it does.
        properties: What some of them have: why this one has it not, or None if it has.
        claims: The properties that were claimed.
    """

    subject: str
    checks: Mapping[str, str | None]
    properties: Mapping[str, str | None]
    claims: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        """Whether the component has a property."""
        return self.properties[name] is None

    @property
    def failures(self) -> dict[str, str]:
        """The checks that failed, and the claims that do not hold, with what is wrong."""
        claimed = {name: self.properties[name] for name in self.claims}
        return {name: problem for name, problem in {**self.checks, **claimed}.items() if problem is not None}

    def __str__(self) -> str:
        if self.failures:
            lines = [f"- {name}: {problem}" for name, problem in self.failures.items()]
            return "\n".join([f"{self.subject} breaks its contract:", *lines])
        found = ", ".join(name for name in self.properties if self.has(name))
        listed = f"; properties: {found}" if found else ""
        return f"{self.subject}: {len(self.checks)} of {len(self.checks)} checks passed{listed}."

    def checked(self) -> "Report":
        """The same report.

        Raises:
            ContractError: If there are failures.
        """
        if self.failures:
            raise ContractError(str(self))
        return self


class _Broken(Exception):
    """A problem that a check has found."""


def _require(condition: object, problem: str) -> None:
    if not condition:
        raise _Broken(problem)


def _run(checks: Mapping[str, Callable[[], None]]) -> dict[str, str | None]:
    """The problem that each check finds, or None. An error inside the component is a problem, too."""
    found: dict[str, str | None] = {}
    for name, check in checks.items():
        try:
            check()
        except _Broken as broken:
            found[name] = str(broken)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = None
    return found


def _close(left: Any, right: Any, tolerance: float = TOLERANCE) -> bool:
    return np.allclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)


def _check_value(family: str, component: Component) -> None:
    """Components are static under jit, and runs are saved by their text."""
    copy = replace(component)  # pyright: ignore[reportArgumentType]
    _require(copy == component and hash(copy) == hash(component), "a copy is not equal to it: use a frozen dataclass.")
    check_readable(family, component)


def sample_rows(seed: int, num_rows: int, dimension: int = DIMENSION) -> np.ndarray:
    """Rows of spread 1 around a point of norm 1 to 3, two of them outliers, so that every rule drops some row."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(num_rows, dimension)) + rng.normal(size=dimension)
    rows[1:3] *= 4
    return rows.astype(np.float32)


# Rules


def check_aggregator(
    rule: Aggregator,
    *,
    num_agents: int = 13,
    num_byzantine: int | None = None,
    claims: Collection[str] = ("order", "agreement", "robustness"),
) -> Report:
    """Check an aggregation rule of your own.

    Every rule must give one finite row of the right type, also if rows are missing or not finite, whose content must
    not matter. It must do the same inside jit and vmap, compile once, refuse too many Byzantine rows and too few rows,
    and be read back from its text. If it has weights, they must fit its result.

    The properties that it may have are: "order" (the order of the rows does not matter), "translation" (moving all rows
    moves the result), "agreement" (identical rows come back, up to rounding), "exact agreement", "convexity" (weights
    sum to one) and "robustness" (the error stays below three times the honest spread wherever attackers are).

    Args:
        rule: The rule.
        num_agents: K.
        num_byzantine: f. Default: a quarter of K, or what the rule tolerates if that is less.
        claims: The properties that it must have.

    Raises:
        ContractError: If it breaks the contract, with a list of what is broken.
    """
    return _check_rule("aggregator", rule, num_agents, num_byzantine, claims, own=None)


def check_agreement(
    rule: Agreement,
    *,
    num_agents: int = 13,
    num_byzantine: int | None = None,
    claims: Collection[str] = ("order", "agreement", "robustness"),
) -> Report:
    """Check an agreement rule of your own; see `check_aggregator`."""
    return _check_rule("agreement", rule, num_agents, num_byzantine, claims, own=4)


def _check_rule(
    family: str, rule: Rule, num_agents: int, num_byzantine: int | None, claims: Collection[str], own: int | None
) -> Report:
    if not isinstance(rule, FAMILIES[family]):
        raise TypeError(f"{rule!r} is no {family}: it must be an object of a subclass of {FAMILIES[family].__name__}.")
    try:
        most = rule.max_byzantine(num_agents)
        chosen = max(0, min((num_agents - 1) // 4, most)) if num_byzantine is None else num_byzantine
        rule.check(num_agents, chosen)
    except Exception as error:
        return Report(str(rule), {"first use": f"{type(error).__name__}: {error}"}, {}).checked()
    subject = _RuleUnderTest(rule, num_agents, chosen, own)
    checks, properties = _run(subject.checks(family)), _run(subject.properties())
    for name in claims:
        if name not in properties:
            raise ValueError(f"there is no property {name!r} of {rule}; known: {', '.join(properties)}.")
    return Report(str(rule), checks, properties, tuple(claims)).checked()


@dataclass(frozen=True)
class _RuleUnderTest:
    rule: Any
    num_agents: int
    num_byzantine: int
    own: int | None

    def checks(self, family: str) -> dict[str, Callable[[], None]]:
        found = {
            "value": partial(_check_value, family, self.rule),
            "bound": self.bound,
            "result": self.result,
            "jit and vmap": self.jit_and_vmap,
            "one program": self.one_program,
            "missing rows": self.missing_rows,
            "too few rows": self.too_few_rows,
        }
        return found | {"weights": self.weights if self.rule.has_weights else self.no_weights}

    def properties(self) -> dict[str, Callable[[], None]]:
        found = {
            "order": self.order,
            "translation": self.translation,
            "agreement": self.agreement,
            "exact agreement": self.exact_agreement,
        }
        if self.rule.has_weights:
            found["convexity"] = self.convexity
        return found | {"robustness": self.robustness}

    @property
    def everyone(self) -> np.ndarray:
        return np.ones(self.num_agents, bool)

    def rows(self, seed: int) -> np.ndarray:
        return sample_rows(seed, self.num_agents)

    def call(self, rows: Any, present: Any, *, own: int | None = None, weights: bool = False) -> Array:
        """The result or the weights, with all that the rule may need: always the same signature, so one program."""
        options = {} if self.own is None else {"own": self.own if own is None else own}
        function = self.rule.weights if weights else self.rule
        return function(rows, num_byzantine=self.num_byzantine, present=present, key=KEY, **options)

    def aggregate(self, rows: Any) -> np.ndarray:
        return np.asarray(self.call(rows, self.everyone))

    def without(self, *missing: int) -> np.ndarray:
        present = self.everyone
        present[list(missing)] = False
        return present

    def others(self, *, number: int) -> list[int]:
        """So many rows, none of which is the receiver's own."""
        return [row for row in range(self.num_agents) if row != self.own][::-1][:number]

    def bound(self) -> None:
        for num_agents in (self.num_agents, self.num_agents + 1):
            most = self.rule.max_byzantine(num_agents)
            _require(type(most) is int and most < num_agents, f"max_byzantine({num_agents}) is {most!r}.")
            for num_byzantine, allowed in ((most, True), (most + 1, False)):
                if num_byzantine < 0:
                    continue
                try:
                    self.rule.check(num_agents, num_byzantine)
                except ValueError as error:
                    _require(not allowed, f"check({num_agents}, {num_byzantine}) refuses it: {error}")
                else:
                    _require(allowed, f"check({num_agents}, {num_byzantine}) accepts more than max_byzantine.")

    def result(self) -> None:
        rows, present = self.rows(0), self.everyone
        unusable = self.others(number=min(2, self.num_byzantine))
        if unusable:
            rows[unusable[0]] = np.nan
            present = self.without(*unusable[1:])
        before = rows.tobytes(), present.tobytes()
        found = self.call(rows, present)
        _require(found.shape == rows.shape[1:], f"rows {list(rows.shape)} give {list(found.shape)}, not one row.")
        _require(found.dtype == jnp.float32, f"rows of float32 give {found.dtype}.")
        _require(
            np.all(np.isfinite(found)), f"the result is {np.asarray(found)} where {len(unusable)} rows are missing."
        )
        _require((rows.tobytes(), present.tobytes()) == before, "the rows that it was given have changed.")

    def jit_and_vmap(self) -> None:
        traces = []

        def program(clouds: Array) -> Array:
            traces.append(clouds.shape)
            return jax.vmap(lambda rows: self.call(rows, None))(clouds)

        compiled = jax.jit(program)
        for seeds in (range(3), range(3, 6)):
            clouds = np.stack([self.rows(seed) for seed in seeds])
            expected = np.stack([self.aggregate(rows) for rows in clouds])
            found = compiled(clouds)
            _require(_close(found, expected, 1e-5), f"jit and vmap give {np.asarray(found)[0]}, a call {expected[0]}.")
        _require(len(traces) == 1, "it is traced again for other values.")

    def one_program(self) -> None:
        first = self.aggregate(self.rows(0))
        apply: Any = rules._apply
        programs = apply._cache_size()
        missing = self.others(number=min(1, self.num_byzantine))
        second = self.call(self.rows(1), self.without(*missing))
        _require(not _close(first, second), "other rows give the same result.")
        _require(apply._cache_size() == programs, "it is compiled again for other values.")

    def missing_rows(self) -> None:
        if not self.num_byzantine:
            return
        (row,) = self.others(number=1)
        rows = self.rows(2)
        expected = np.asarray(self.call(rows, self.without(row)))
        for garbage in (0, -1e4, 1e25, np.nan, -np.inf):
            rows[row] = garbage
            found = np.asarray(self.call(rows, self.without(row)))
            _require(np.array_equal(found, expected), f"a missing row that holds {garbage} changes the result.")
        for columns in (slice(None), 3):  # a whole row, or one entry of it
            for unusable in (np.nan, np.inf, -np.inf, 1e25):
                rows[row] = 1
                rows[row, columns] = unusable
                found = self.aggregate(rows)
                _require(np.array_equal(found, expected), f"a row with {unusable} does not count as missing.")

    def too_few_rows(self) -> None:
        missing = self.others(number=self.num_byzantine + 1)
        try:
            found = self.call(self.rows(0), self.without(*missing))
        except ValueError as error:
            _require("present and finite" in str(error), f"fewer than K − f rows are refused with: {error}")
        else:
            raise _Broken(f"fewer than K − f rows give {np.asarray(found)}, not an error.")

    def no_weights(self) -> None:
        try:
            self.call(self.rows(7), self.everyone, weights=True)
        except TypeError:
            return
        raise _Broken("it has weights, but has_weights is False.")

    def _weights(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Rows and their weights, where one row is not finite."""
        found = []
        for seed in (7, 8, 9):
            rows = self.rows(seed)
            rows[self.others(number=min(1, self.num_byzantine))] = np.nan
            found.append((rows, np.asarray(self.call(rows, self.everyone, weights=True), np.float64)))
        return found

    def weights(self) -> None:
        for rows, weights in self._weights():
            _require(weights.shape == (self.num_agents,), f"weights have the shape {weights.shape}.")
            _require(
                np.all(weights >= 0) and weights.sum() < 1 + 1e-5, f"weights are {weights}: at least 0, sum at most 1."
            )
            unusable = ~np.all(np.isfinite(rows), axis=1)
            _require(np.all(weights[unusable] == 0), "a row that is not finite has a weight.")
            expected = weights @ np.where(unusable[:, None], 0, rows)
            _require(_close(self.aggregate(rows), expected), "the result is not the sum of the weighted rows.")

    def order(self) -> None:
        for seed in range(5):
            rows, order = self.rows(seed), np.random.default_rng(seed).permutation(self.num_agents)
            own = None if self.own is None else int(np.flatnonzero(order == self.own)[0])
            found = self.call(rows[order], self.everyone, own=own)
            _require(_close(found, self.aggregate(rows)), "rows in another order give another result.")

    def translation(self) -> None:
        rows = self.rows(5)
        found = self.aggregate(rows + np.float32(10))
        _require(_close(found, self.aggregate(rows) + 10), "rows that are moved by 10 do not move the result by 10.")

    def _identical(self) -> tuple[np.ndarray, np.ndarray]:
        row = 3 * np.random.default_rng(8).normal(size=DIMENSION).astype(np.float32)
        return row, self.aggregate(np.tile(row, (self.num_agents, 1)))

    def agreement(self) -> None:
        row, found = self._identical()
        few_ulp = np.max(np.abs(found - row) / np.spacing(np.abs(row))) <= 4
        _require(few_ulp, f"where all rows are {row}, the result is {found}.")

    def exact_agreement(self) -> None:
        row, found = self._identical()
        _require(np.array_equal(row, found), f"where all rows are {row}, the result is {found}.")

    def convexity(self) -> None:
        sums = [weights.sum() for _, weights in self._weights()]
        _require(min(sums) > 1 - 1e-5, f"weights sum to {min(sums):.6g}.")

    def robustness(self) -> None:
        """The error stays bounded wherever the attackers are. The plain mean must fail this."""
        attackers, worst = self.num_byzantine, (0.0, 0.0)
        for seed in range(5):
            rng = np.random.default_rng(100 + seed)
            honest = rng.normal(size=(self.num_agents - attackers, DIMENSION)) + 1 / np.sqrt(DIMENSION)
            mean = honest.mean(axis=0)
            spread = np.sqrt(np.mean(np.sum((honest - mean) ** 2, axis=1)))
            direction = rng.normal(size=DIMENSION)
            direction /= np.linalg.norm(direction)
            for distance in (1, 1e2, 1e4, 1e6, 1e10, 1e16):
                false_row = mean + distance * spread * direction
                rows = np.concatenate([np.tile(false_row, (attackers, 1)), honest]).astype(np.float32)
                # Attackers come first, so the receiver's own row, the fifth, is an honest one.
                error = float(np.linalg.norm(self.aggregate(rows) - mean) / spread)
                worst = max(worst, (error if np.isfinite(error) else inf, distance))
        _require(
            worst[0] < 3,
            f"with {attackers} of {self.num_agents} rows at distance {worst[1]:g} of the others, the result moves by "
            f"{worst[0]:.3g} times their spread.",
        )


# Attacks


def check_attack(
    attack: Attack, *, num_agents: int = 13, num_attackers: int = 3, rule: Aggregator | None = None
) -> Report:
    """Check an attack of your own.

    Its messages must have the shape [receiver or 1, attacker, d], be the same inside jit, and be the same for a
    receiver alone as among others, and for all receivers of one `audience`. It must say what it does: `needs_key`,
    `uses_rule` and `poisons_play` in its class.

    The properties that it may have are "false gradients", "false parameters", "equivocation" and "poisoned play".

    Args:
        attack: The attack.
        num_agents: K.
        num_attackers: The number of agents that attack.
        rule: The rule that the receivers apply. Default: the plain mean.

    Raises:
        ContractError: If it breaks the contract, with a list of what is broken.
    """
    if not isinstance(attack, Attack):
        raise TypeError(f"{attack!r} is no attack: it must be an object of a subclass of Attack.")
    if not 0 < num_attackers < num_agents:
        raise ValueError(f"num_attackers must be between 1 and {num_agents - 1}, got {num_attackers}.")
    subject = _AttackUnderTest(attack, num_agents, num_attackers, Mean() if rule is None else rule)
    return Report(str(attack), _run(subject.checks()), _run(subject.properties())).checked()


@dataclass(frozen=True)
class _AttackUnderTest:
    attack: Attack
    num_agents: int
    num_attackers: int
    rule: Aggregator

    def checks(self) -> dict[str, Callable[[], None]]:
        return {
            "value": partial(_check_value, "attack", self.attack),
            "messages": self.messages,
            "jit": self.jit,
            "receivers": self.receivers,
            "needs_key": self.needs_key,
            "uses_rule": self.uses_rule,
            "play": self.play,
        }

    def properties(self) -> dict[str, Callable[[], None]]:
        def false(phase: str) -> None:
            known = self.known()
            _require(not _close(self.sent(phase, known), known.truth()), "messages are true.")

        def equivocation() -> None:
            sent = [np.asarray(self.sent(phase, self.known())) for phase in ("gradients", "parameters")]
            _require(any(not _close(each[:1], each) for each in sent), "all receivers get the same.")

        return {
            "false gradients": partial(false, "gradients"),
            "false parameters": partial(false, "parameters"),
            "equivocation": equivocation,
            "poisoned play": lambda: _require(not all(self._honest_play()), "its episodes are honest."),
        }

    def known(self, seed: int = 0, key: int = 0) -> Knowledge:
        step = self.num_agents // self.num_attackers
        return Knowledge(
            vectors=jnp.asarray(np.random.default_rng(seed).normal(0.5, 1, (self.num_agents, 6)), jnp.float32),
            byzantine=1 + step * jnp.arange(self.num_attackers),
            iteration=jnp.asarray(0),
            key=jax.random.key(key),
            rule=self.rule,
            num_byzantine=self.num_attackers,
        )

    @property
    def everyone(self) -> Array:
        return jnp.arange(self.num_agents)

    @cached_property
    def _compiled(self) -> dict[str, Callable[[Knowledge, Array], Array]]:
        return {phase: jax.jit(partial(self.attack.messages, phase)) for phase in ("gradients", "parameters")}

    def sent(self, phase: str, known: Knowledge) -> Array:
        return self._compiled[phase](known, self.everyone)

    def messages(self) -> None:
        for phase in ("gradients", "parameters"):
            found = self.attack.messages(phase, self.known(), self.everyone)
            shapes = [(number, self.num_attackers, 6) for number in (1, self.num_agents)]
            _require(
                isinstance(found, Array) and found.shape in shapes and found.dtype == jnp.float32,
                f"{phase} must be float32 [receiver or 1, attacker, d], here {shapes[0]} or {shapes[1]}; got "
                f"{getattr(found, 'dtype', type(found).__name__)} {np.shape(found)}.",
            )

    def jit(self) -> None:
        for phase in ("gradients", "parameters"):
            expected = self.attack.messages(phase, self.known(1), self.everyone)
            self.sent(phase, self.known(0))
            _require(
                _close(self.sent(phase, self.known(1)), expected), f"compiled {phase} differ from those of a call."
            )

    def receivers(self) -> None:
        for phase in ("gradients", "parameters"):
            known = self.known()
            together = np.broadcast_to(
                self.sent(phase, known), (self.num_agents, self.num_attackers, known.vectors.shape[1])
            )
            ask = self._compiled[phase]
            alone = np.concatenate([ask(known, jnp.asarray([each])) for each in range(self.num_agents)])
            _require(_close(alone, together), f"a receiver alone gets other {phase} than among others.")
            audience = self.attack.stated_audience(known, self.everyone)
            if audience is not None:
                _require(
                    audience.shape == (self.num_agents,) and bool(jnp.all(audience >= 0)),
                    f"audience must be a number ≥ 0 for each of {self.num_agents} receivers, got {audience}.",
                )
                first = np.argmax(np.asarray(audience) == np.asarray(audience)[:, None], axis=1)
                _require(
                    np.array_equal(together, together[first], equal_nan=True),
                    f"receivers of one audience get different {phase}.",
                )

    def needs_key(self) -> None:
        for phase in ("gradients", "parameters"):
            same = _close(self.sent(phase, self.known(key=1)), self.sent(phase, self.known(key=2)))
            _require(same or self.attack.needs_key, f"{phase} are random: set needs_key = True in the class.")

    def uses_rule(self) -> None:
        if self.attack.uses_rule:
            return
        for phase in ("gradients", "parameters"):
            try:
                same = _close(self.sent(phase, replace(self.known(), rule=None)), self.sent(phase, self.known()))
            except (AttributeError, TypeError, ValueError):
                same = False
            _require(same, f"{phase} depend on the receivers' rule: set uses_rule = True in the class.")

    def _honest_play(self) -> tuple[bool, bool]:
        action, uniform, reward = jnp.zeros(3), jnp.ones(3), jnp.arange(3.0)
        recorded = self.attack.record_step(reward, jnp.zeros(3, jnp.int32), jax.random.key(0))
        _require(recorded.shape == reward.shape, f"record gives {recorded.shape} for rewards {reward.shape}.")
        return _close(self.attack.act(action, uniform), action), _close(recorded, reward)

    def play(self) -> None:
        poisoned = not all(self._honest_play())
        _require(
            poisoned == self.attack.poisons_play,
            f"its episodes are {'poisoned' if poisoned else 'honest'}, and poisons_play is {self.attack.poisons_play}.",
        )


# Environments


def check_environment(task: "envs.Task | str", *, steps: int = 100) -> Report:
    """Check an environment of your own, with uniform actions (normal ones where the actions have no bounds).

    A task in JAX must keep the shapes and types of its state, compute the same inside jit and for batches, and give
    finite numbers. A task on the host must give finite numbers in the right shapes, and its seed must determine all.

    Args:
        task: The task, or its name, such as "my_task:make".
        steps: How many steps to take.

    Raises:
        ContractError: If it breaks the contract, with a list of what is broken.
    """
    name = task if isinstance(task, str) else task.name
    try:
        made = envs.make(task) if isinstance(task, str) else task
    except ValueError as error:
        return Report(name, {"first use": str(error)}, {}).checked()
    checks = _host_checks(made, steps) if isinstance(made, HostTask) else _JaxTask(made, steps).checks()
    return Report(name, _run(checks), {}).checked()


def _uniform_actions(space: Space, key: Array, shape: tuple[int, ...]) -> Array:
    if isinstance(space, Box) and not space.bounded:
        return jax.random.normal(key, (*shape, space.size))
    return space.uniform(jax.random.uniform(key, (*shape, space.size)))


def _host_checks(task: HostTask, steps: int) -> dict[str, Callable[[], None]]:
    num_episodes = 2
    drawn = np.asarray(_uniform_actions(task.action_space, KEY, (steps, num_episodes)))

    def played(seeds: list[int]) -> list[np.ndarray]:
        """What was seen and paid: until an episode ends, or for so many steps."""
        with task.stage(num_episodes) as stage:
            seen, every = stage.reset(np.asarray(seeds)), np.arange(num_episodes)
            found = [task.checked("observation", seen)]
            for actions in drawn:
                outcome = stage.step(every, actions)
                found += [task.checked("observation", outcome.observations), task.checked("reward", outcome.rewards)]
                if np.any(outcome.terminated | outcome.truncated):
                    break
        return found

    def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
        return len(one) == len(other) and all(map(np.array_equal, one, other))

    def numbers() -> None:
        found = played([1, 2])
        shape = num_episodes, task.observation_size
        _require(all(each.shape in (shape, shape[:1]) for each in found), "observations or rewards have a wrong shape.")

    def seeds() -> None:
        first = played([3, 4])
        _require(
            same(first, played([3, 4])), "the same seeds and actions give other episodes: use self.np_random alone."
        )
        swapped = [each[::-1] for each in played([4, 3])]
        _require(np.array_equal(first[0], swapped[0]), "an episode depends on the environment, not on its seed alone.")

    return {"numbers": numbers, "seeds": seeds}


@dataclass(frozen=True)
class _JaxTask:
    task: Any
    steps: int

    def checks(self) -> dict[str, Callable[[], None]]:
        return {
            "description": self.description,
            "shapes and types": self.shapes,
            "jit": self.jit,
            "batches": self.batches,
            "numbers": self.numbers,
            "seeds": self.seeds,
        }

    def description(self) -> None:
        task = self.task
        hash(task)
        for name, least in (("observation_size", 1), ("horizon", 1), ("noise_size", 0)):
            value = getattr(task, name)
            _require(
                type(value) is int and value >= least, f"{name} must be a whole number from {least}, got {value!r}."
            )
        _require(isinstance(task.action_space, Discrete | Box), f"action_space is {task.action_space!r}.")

    @cached_property
    def _step(self) -> Callable[..., Any]:
        return jax.jit(self.task.step)

    def begin(self, seed: int) -> Any:
        return self.task.reset(jax.random.key(seed))

    def inputs(self, seed: int, shape: tuple[int, ...] = ()) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Actions and noise of one step."""
        key, space = jax.random.fold_in(KEY, seed), self.task.action_space
        noise = jax.random.uniform(jax.random.fold_in(key, 1), (self.task.noise_size, *shape))
        return space.numbers(_uniform_actions(space, key, shape)), tuple(noise)

    def shapes(self) -> None:
        state = self.begin(0)
        seen = self.task.observe(state)
        _require(
            isinstance(seen, tuple) and len(seen) == self.task.observation_size,
            f"observe must give a tuple of {self.task.observation_size} arrays.",
        )
        _require(
            all(each.shape == () for each in seen), "an observation of one episode must be one number per feature."
        )
        after, reward, ended = self.task.step(state, *self.inputs(0))
        kinds = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(each)] for each in (state, after)]
        same = jax.tree.structure(state) == jax.tree.structure(after) and kinds[0] == kinds[1]
        _require(same, f"a step changes the shapes or types of the state, from {kinds[0]} to {kinds[1]}.")
        _require(reward.dtype == jnp.float32 and reward.shape == (), f"the reward is {reward.dtype} {reward.shape}.")
        _require(
            ended.dtype == bool and ended.shape == (), f"whether it ended is {ended.dtype} {ended.shape}, not bool."
        )

    def jit(self) -> None:
        state, inputs = self.begin(1), self.inputs(1)
        found = self._step(state, *inputs)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(self.task.step(state, *inputs)), strict=True)
        _require(all(_close(*pair) for pair in pairs), "a compiled step differs from a call.")

    def batches(self) -> None:
        states = jax.vmap(self.task.reset)(jax.random.split(KEY, 3))
        inputs = self.inputs(2, (3,))
        together = jax.tree.leaves(self._step(states, *inputs))
        for index in range(3):
            state, one = jax.tree.map(lambda leaf, index=index: leaf[index], (states, inputs))
            for alone, each in zip(jax.tree.leaves(self._step(state, *one)), together, strict=True):
                _require(_close(alone, each[index]), "an episode in a batch differs from one alone: step elementwise.")

    @cached_property
    def _played(self) -> Callable[[Array], tuple[Array, Array, Array]]:
        """From a key: observations [time, feature] and rewards [time], and which of them come before the end."""
        space, task = self.task.action_space, self.task

        def step(ongoing: tuple[Any, Array], key: Array) -> tuple[tuple[Any, Array], tuple[Array, Array, Array]]:
            (state, alive), noise = ongoing, tuple(jax.random.uniform(jax.random.fold_in(key, 1), (task.noise_size,)))
            seen = jnp.stack(task.observe(state)).astype(jnp.float32)
            after, reward, ended = task.step(state, space.numbers(_uniform_actions(space, key, ())), noise)
            return (after, alive & ~ended), (seen, reward, alive)

        def play(key: Array) -> tuple[Array, Array, Array]:
            keys = jax.random.split(key, min(self.steps, task.horizon))
            return lax.scan(step, (task.reset(key), jnp.asarray(True)), keys)[1]

        return jax.jit(play)

    def numbers(self) -> None:
        seen, rewards, alive = map(np.asarray, self._played(jax.random.key(3)))
        for name, values in (("observation", seen[alive]), ("reward", rewards[alive])):
            wrong = values[~np.isfinite(values)]
            _require(not len(wrong), f"gave the {name} {wrong[:1]}: every number must be finite.")

    def seeds(self) -> None:
        first, again = (np.asarray(self._played(jax.random.key(4))[0]) for _ in range(2))
        _require(np.array_equal(first, again), "the same key gives another episode.")


# Policies


def check_policy(policy: Policy | Network, env: str = "CartPole-v1") -> Report:
    """Check a network or a policy of your own.

    θ must be float32 [dimension] and finite. Outputs must be the same alone and in batches. Draws must follow
    `log_probability`: its gradient must be zero on average over draws, and the `entropy` must be its mean. No draw may
    be more likely than the `mode`.

    Args:
        policy: The network, or a policy that is fitted to a task.
        env: The task that a network is fitted to.

    Raises:
        ContractError: If it breaks the contract, with a list of what is broken.
        ValueError: If a network cannot be fitted to the task.
    """
    if isinstance(policy, Network):
        task = envs.make(env)
        policy = policy_for(policy, task.observation_size, task.action_space)
    return Report(str(policy), _run(_PolicyUnderTest(policy).checks()), {}).checked()


@dataclass(frozen=True)
class _PolicyUnderTest:
    policy: Policy
    num_draws: int = 4096

    def checks(self) -> dict[str, Callable[[], None]]:
        return {
            "value": self.value,
            "initial parameters": self.initial,
            "outputs": self.outputs,
            "log-probabilities": self.log_probabilities,
            "draws": self.draws,
            "entropy": self.entropy,
            "mode": self.mode,
        }

    def parameters(self) -> Array:
        return self.policy.initial(KEY)

    def observations(self, *shape: int) -> Array:
        return jax.random.normal(jax.random.fold_in(KEY, 1), (*shape, self.policy.observation_size))

    def value(self) -> None:
        copy = replace(self.policy)
        _require(
            copy == self.policy and hash(copy) == hash(self.policy), "a copy is not equal: use a frozen dataclass."
        )

    def initial(self) -> None:
        found, other = self.parameters(), self.policy.initial(jax.random.key(8))
        _require(
            found.shape == (self.policy.dimension,) and found.dtype == jnp.float32,
            f"θ must be float32 [{self.policy.dimension}], got {found.dtype} {list(found.shape)}.",
        )
        _require(np.all(np.isfinite(found)), "initial parameters are not finite.")
        _require(np.array_equal(found, self.parameters()), "the same key gives other parameters.")
        _require(not np.array_equal(found, other), "all keys give the same parameters.")

    def outputs(self) -> None:
        weights, seen = self.policy.unflatten(self.parameters()), self.observations(2, 3)
        found = self.policy.outputs(weights, seen)
        wanted = (2, 3, self.policy.num_outputs)
        _require(found.shape == wanted, f"outputs of observations {seen.shape} must be {wanted}, got {found.shape}.")
        alone = jnp.stack([self.policy.outputs(weights, each) for each in seen[0]])
        _require(_close(found[0], alone), "outputs of a batch differ from those of observations one by one.")
        compiled = jax.jit(lambda theta: self.policy.outputs(self.policy.unflatten(theta), seen))(self.parameters())
        _require(_close(found, compiled), "compiled outputs differ from those of a call.")

    @cached_property
    def _at_one(self) -> dict[str, np.ndarray]:
        """At one observation: draws, their log π and its gradients, the entropy, and log π of the mode."""

        def log_probability(theta: Array, seen: Array, action: Array) -> Array:
            weights = self.policy.unflatten(theta)
            return self.policy.log_probability(weights, self.policy.outputs(weights, seen), action)

        @jax.jit
        def evaluate(theta: Array, seen: Array, noise: Array) -> dict[str, Array]:
            weights = self.policy.unflatten(theta)
            outputs = self.policy.outputs(weights, seen)
            actions = self.policy.draw(weights, jnp.broadcast_to(outputs, (len(noise), *outputs.shape)), noise)
            every = jax.vmap(jax.value_and_grad(log_probability), (None, None, 0))(theta, seen, actions)
            mode = self.policy.mode(weights, outputs)
            found = {"entropy": self.policy.entropy(weights, outputs), "mode": log_probability(theta, seen, mode)}
            return found | dict(zip(("logarithms", "scores"), every, strict=True))

        noise = jax.random.uniform(jax.random.fold_in(KEY, 2), (self.num_draws, self.policy.noise_size))
        found = evaluate(self.parameters(), self.observations(), noise)
        return {name: np.asarray(values, np.float64) for name, values in found.items()}

    def log_probabilities(self) -> None:
        _require(self._at_one["logarithms"].shape == (self.num_draws,), "log π must be one number per action.")
        finite = all(np.all(np.isfinite(self._at_one[name])) for name in ("logarithms", "scores"))
        _require(finite, "log π or its gradient is not finite.")

    def draws(self) -> None:
        scores = self._at_one["scores"]
        limit = 6 * scores.std(axis=0) / np.sqrt(self.num_draws) + 1e-5
        fits = np.all(np.abs(scores.mean(axis=0)) <= limit)
        _require(fits, "draws do not follow log π: its mean gradient over draws is not zero.")

    def entropy(self) -> None:
        logarithms, found = self._at_one["logarithms"], float(self._at_one["entropy"])
        error, expected = 6 * logarithms.std() / np.sqrt(self.num_draws) + 1e-4, -logarithms.mean()
        _require(abs(found - expected) <= error, f"the entropy is {found:.4g}, and −log π over draws {expected:.4g}.")

    def mode(self) -> None:
        most = self._at_one["logarithms"].max()
        _require(float(self._at_one["mode"]) >= most - 1e-5, "a draw is more likely than the mode.")
