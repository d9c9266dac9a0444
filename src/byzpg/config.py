"""What to train, as data: the only place with defaults. What a user leaves out comes from a preset."""

import json
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from inspect import isclass
from math import inf, sqrt
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp

from byzpg import _parts, envs
from byzpg._registry import addresses, check_readable, fits, parse, type_name
from byzpg.envs.host import imported_module
from byzpg.envs.spaces import Box
from byzpg.federation.agents import Optimizer
from byzpg.federation.algorithms import ALGORITHMS, Federation
from byzpg.federation.schedule import Conventions, Schedule
from byzpg.learning.advantages import PPO
from byzpg.learning.gradients import GPOMDP, REINFORCE, Correction, Estimator, HessianVector, ImportanceWeights
from byzpg.learning.policies import Gaussian, Policy, policy_for
from byzpg.networks import Network
from byzpg.robust.aggregators import CAF, NNM, RFA, Aggregator, Bucketing, Mean, Remember, TrimmedMean
from byzpg.robust.agreement import MDA, Agreement, NoAgreement
from byzpg.robust.attacks import Attack, ByzantineSet, NoAttack
from byzpg.robust.components import Component, is_own, nearest, plain_name, trying, unknown
from byzpg.robust.rules import Rule

# What presets share on each task unless they say otherwise: the paper's table; of Pendulum and Acrobot, our choice.
TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"discount": 0.999, "hidden": (16, 16), "activation": "relu", "large_batch": 50, "small_batch": 4},
    "LunarLander-v3": {
        "discount": 0.999,
        "hidden": (64, 64),
        "activation": "tanh",
        "large_batch": 96,
        "small_batch": 32,
    },
    "Pendulum-v1": {"discount": 0.97, "hidden": (32, 32), "activation": "tanh", "large_batch": 50, "small_batch": 4},
    "Acrobot-v1": {"discount": 0.99, "hidden": (64, 64), "activation": "tanh", "large_batch": 50, "small_batch": 4},
}
# For a task that is in no table.
OTHER_TASKS: dict[str, Any] = {
    "discount": 0.999,
    "hidden": (64, 64),
    "activation": "relu",
    "large_batch": 96,
    "small_batch": 32,
}

ADAMS = ("adam", "local-adam")  # the optimizers with an ε
ADAM_EPSILON = 1e-8  # of Kingma & Ba 2015, and of PyTorch

PAPER: dict[str, Any] = {
    "trajectories": 1200,
    "output_tanh": True,
    "conventions": "Paper",
    "coins": "per-seed",
    "optimizer": "adam",
    "adam_epsilon": ADAM_EPSILON,
    "step_size": 5e-3,
    "switch_probability": 0.2,
    "estimator": GPOMDP(),
    "importance": ImportanceWeights(),
    "gate": 1.0,
    "momentum": 0.0,
    "transport": False,
    "decay": 0.0,
    "aggregator": RFA(),
    "agreement": MDA(),
    "rounds": 5,
    "output": "last",
    "ppo": PPO(),
}
# Options of presets that were added later, at the values that mean what byzpg did without them.
FORMERLY: dict[str, Any] = {
    "coins": "shared",
    "adam_epsilon": ADAM_EPSILON,
    "momentum": 0.0,
    "transport": False,
    "decay": 0.0,
    "ppo": PPO(),
}
PRESETS: dict[str, dict[str, Any]] = {
    "tuned": PAPER
    | {
        "output_tanh": False,
        "estimator": GPOMDP(baseline="leave-one-out"),
        "importance": ImportanceWeights(cap=1.0),
        "aggregator": NNM(TrimmedMean()),
        "rounds": 3,
        "switch_probability": 1.0,
        "large_batch": 45,
    },
    "paper": PAPER,
    # What the theorems ask for: docs/concepts/method.md lists it. RFA alone is not the mean at f = 0.
    "theory": PAPER
    | {
        "activation": "tanh",
        "optimizer": "sgd",
        "step_size": "theory",
        "switch_probability": "theory",
        "aggregator": Bucketing(RFA()),
        "rounds": "theory",
        "output": "uniform",
    },
    # What produced the published figures; docs/concepts/method.md says how that was found out.
    "script": PAPER
    | {
        "activation": "tanh",
        "output_tanh": False,
        "conventions": "AuthorsScript",
        "coins": "shared",
        "step_size": 5e-4,
        "importance": ImportanceWeights(floor=1e-9),
        "aggregator": RFA.reference(),
    },
}

# Whether agents scale their messages or Adam scales what the rule makes of them.
ADAM_AT_AGENTS: dict[str, Any] = {"optimizer": "local-adam", "adam_epsilon": 1e-5}
ADAM_BEHIND_RULE: dict[str, Any] = {"optimizer": "adam", "adam_epsilon": ADAM_EPSILON, "momentum": 0.0, "decay": 0.0}

# What presets change in some tasks.
PRESETS_BY_TASK: dict[str, dict[str, dict[str, Any]]] = {
    "tuned": {
        "CartPole-v1": ADAM_AT_AGENTS
        | {"momentum": 0.8, "large_batch": 6, "step_size": 4e-2, "decay": 0.9, "trajectories": 600},
        "LunarLander-v3": ADAM_AT_AGENTS
        | {
            "estimator": GPOMDP(baseline="leave-one-out", trace_decay=0.995),
            "momentum": 0.8,
            "large_batch": 20,
            "step_size": 2e-2,
            "decay": 0.7,
            "trajectories": 2000,
        },
        "Pendulum-v1": {"large_batch": 20, "discount": 0.99},
    },
    "paper": {"LunarLander-v3": {"step_size": 1e-3}},
    "theory": {},
    "script": {"LunarLander-v3": {"step_size": 1e-3}},
}

# What presets change in some tasks where agents do not scale their messages: for one agent alone, whose gradients are
# not averaged with others, and with small batches, which correct sums of gradients as they are.
PRESETS_UNSCALED: dict[str, dict[str, dict[str, Any]]] = {
    "tuned": {
        "CartPole-v1": ADAM_BEHIND_RULE | {"large_batch": 15, "step_size": 2e-2, "trajectories": 1200},
        "LunarLander-v3": ADAM_BEHIND_RULE | {"large_batch": 45, "step_size": 5e-3, "trajectories": 5000},
    },
}

# MuJoCo's tasks: the best of a few settings with one tuning seed or two, under AvgZero and, for HalfCheetah, others.
MUJOCO_TASKS = ("HalfCheetah-v4", "Hopper-v4", "Walker2d-v4")
MUJOCO: dict[str, Any] = {
    "steps": 307_200,
    "step_size": 1e-2,
    "momentum": 0.95,
    "decay": 0.9,
    "discount": 0.99,
    "activation": "tanh",
    "ppo": PPO(environments=2, segment=512, epochs=10, minibatches=8, reward_scale=0.1, normalize_observations=True),
}
# Where to start from, and not tuned: the options of Schulman et al. 2017.
MUJOCO_ALONE: dict[str, Any] = {
    "discount": 0.99,
    "ppo": PPO(environments=4, segment=512, epochs=10, minibatches=32, reward_scale=0.1, normalize_observations=True),
}
# As RL Baselines3 Zoo has it for this task; so are the discount of 0.98 and the federation's network below. One agent
# alone learns worse with that network, and keeps a smaller one.
HALF_CHEETAH: dict[str, Any] = {"gae_lambda": 0.92, "initial_log_std": -2.0}
# What the tuned preset says about algorithms with a critic, for every task and for some. docs/results/README.md says
# on which seeds they were chosen, and which are only where to start from.
PPO_DEFAULTS: dict[str, Any] = ADAM_AT_AGENTS | {"steps": 500_000, "step_size": 1e-2, "momentum": 0.9}
PPO_BY_TASK: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "steps": 20_480,
        "step_size": 3e-2,
        "decay": 0.8,
        "discount": 0.99,
        "ppo": PPO(environments=1, segment=128, epochs=4, minibatches=1, reward_scale=0.1),
    },
    "LunarLander-v3": {
        "steps": 204_800,
        "step_size": 1e-2,
        "momentum": 0.95,
        "decay": 0.9,
        "discount": 0.999,
        "ppo": PPO(
            environments=4, segment=256, epochs=16, minibatches=4, gae_lambda=0.98, entropy=5e-3, reward_scale=0.05
        ),
    },
    "LunarLanderContinuous-v3": {
        "steps": 153_600,
        "step_size": 3e-2,
        "decay": 0.5,
        "discount": 0.999,
        "ppo": PPO(
            environments=4, segment=256, epochs=8, minibatches=4, gae_lambda=0.98, entropy=1e-3, reward_scale=0.05
        ),
    },
    "Pendulum-v1": {
        "steps": 40_960,
        "step_size": 2e-2,
        "decay": 0.9,
        "discount": 0.95,
        "hidden": (64, 64),
        "ppo": PPO(environments=4, segment=128, epochs=4, minibatches=1, reward_scale=0.1),
    },
    "Acrobot-v1": {
        "steps": 30_720,
        "step_size": 2e-2,
        "decay": 0.9,
        "ppo": PPO(environments=4, segment=128, epochs=4, minibatches=1, reward_scale=0.1),
    },
    **dict.fromkeys(MUJOCO_TASKS, MUJOCO),
    "HalfCheetah-v4": MUJOCO
    | {
        "steps": 204_800,
        "aggregator": Remember(CAF()),
        "step_size": 3e-3,
        "momentum": 0.9,
        "adam_epsilon": 1e-3,
        "discount": 0.98,
        "hidden": (256, 256),
        "activation": "relu",
        "ppo": replace(MUJOCO["ppo"], segment=256, epochs=8, minibatches=4, largest_kl=0.1, **HALF_CHEETAH),
    },
    "Hopper-v4": MUJOCO | {"discount": 0.995, "ppo": replace(MUJOCO["ppo"], initial_log_std=-1.0)},
}

# Where DecByzPPO with this preset was measured under attack, on seeds that were not used to choose it.
TUNED_WITH_CRITIC = ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "LunarLander-v3")
AUTO = "auto"  # in place of an algorithm

# What the tuned preset says about PPO alone, whose gradients have no attackers to withstand: many small updates with
# Adam's own momentum, as in the tables of RL Baselines3 Zoo.
PPO_ALONE_DEFAULTS: dict[str, Any] = {
    "steps": 1_000_000,
    "optimizer": "adam",
    "step_size": 3e-4,
    "decay": 0.0,
    "momentum": 0.0,
}
PPO_ALONE: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "steps": 40_960,
        "step_size": 1e-3,
        "decay": 0.9,
        "discount": 0.99,
        "hidden": (64, 64),
        "ppo": PPO(environments=2, segment=128, epochs=10, minibatches=4, reward_scale=0.05),
    },
    "Acrobot-v1": {
        "steps": 153_600,
        "step_size": 1e-3,
        "ppo": PPO(environments=4, segment=128, epochs=8, minibatches=4, reward_scale=0.1),
    },
    "LunarLander-v3": {
        "steps": 409_600,
        "step_size": 3e-4,
        "decay": 0.5,
        "ppo": PPO(
            environments=2, segment=512, epochs=8, minibatches=16, gae_lambda=0.98, entropy=0.01, reward_scale=0.05
        ),
    },
    "Pendulum-v1": {
        "steps": 61_440,
        "step_size": 1e-3,
        "decay": 0.9,
        "ppo": PPO(environments=8, segment=128, epochs=10, minibatches=8, reward_scale=0.1),
    },
    **dict.fromkeys(MUJOCO_TASKS, MUJOCO_ALONE),
    "HalfCheetah-v4": {
        "step_size": 5e-4,
        "adam_epsilon": 1e-5,
        "decay": 0.9,
        "hidden": (64, 64),
        "activation": "tanh",
        "ppo": replace(MUJOCO_ALONE["ppo"], environments=1, epochs=20, minibatches=8, **HALF_CHEETAH),
    },
}

# Options of one kind of learner, at values that do nothing with the other kind.
ONLY_PAGE: dict[str, Any] = {
    "trajectories": None,
    "large_batch": 1,
    "small_batch": 1,
    "switch_probability": 1.0,
    "coins": "per-seed",
    "estimator": GPOMDP(),
    "importance": ImportanceWeights(),
    "gate": 1.0,
    "transport": False,
    "conventions": "Paper",
}
ONLY_PPO: dict[str, Any] = {"steps": None, "ppo": PPO()}
# Options of the built-in network, at values that stand for none in runs with a network of the user's own.
ONLY_MLP: dict[str, Any] = {"hidden": (), "activation": "relu", "output_tanh": False}

# What to do about an option that an algorithm does not use, without a critic and with one. All others are options of
# algorithms without a critic.
FIXES = {
    "aggregator": "use ByzPG or DecByzPG",
    "agreement": "use DecByzPG",
    "rounds": "use DecByzPG",
    "steps": "set trajectories",
    "ppo": "use DecByzPPO or another algorithm with a critic",
}
FIXES_WITH_CRITIC = {
    "aggregator": "use ByzPPO or DecByzPPO",
    "agreement": "use DecByzPPO",
    "rounds": "use DecByzPPO",
    "trajectories": "set steps",
}

# Reported experiments start from this seed, on which no option was chosen.
REPORTED_SEED = 2000

POLICIES = ("auto", "categorical", "gaussian")  # in place of a network of the user's own

# The families of the components that a configuration names.
FAMILY_OF = {
    "conventions": "conventions",
    "attack": "attack",
    "byzantine_set": "byzantine set",
    "aggregator": "aggregator",
    "agreement": "agreement",
    "estimator": "estimator",
    "importance": "correction",
    "ppo": "learner",
    "policy": "network",
}


@dataclass(frozen=True)
class Config:
    """What to train. The preset or the task fills in options that are None. Components are given as text or as objects.

    >>> settings = Config(num_agents=9, attack="LargeNoise", aggregator="NNM(TrimmedMean())").resolved()
    >>> settings.num_byzantine, settings.num_attackers, str(settings.agreement)
    (2, 2, 'MDA()')
    >>> Config(num_byzantine=4).resolved()
    Traceback (most recent call last):
    ValueError: MDA() needs f < K/4; 4 of 13 agents breaks that: use num_byzantine ≤ 3, or at least 17 agents.

    A component of your own is written module:Name(option=value), as in NNM(my_rules:MyRule(size=2)).
    """

    env: str | envs.JaxTask | Callable[..., Any] = "CartPole-v1"
    """Task: one of `byzpg list`; in JAX also gymnax:ID, brax:NAME, mjx:NAME; on the host gymnasium:ID, envpool:ID; or
    your own as module:Name, and in Python also as a class, a function that makes it, or a task in JAX."""
    algorithm: str = "DecByzPG"
    """Algorithm: PAGE-PG, Fed-PAGE-PG, ByzPG, Dec-PAGE-PG, DecByzPG; with a critic PPO, Fed-PPO, ByzPPO, Dec-PPO,
    DecByzPPO; for comparison SVRPG, FedPG-BR, N-PG-IGT; or auto: the best one measured for the task, DecByzPPO or
    DecByzPG."""
    preset: Literal["tuned", "paper", "theory", "script"] = "tuned"
    """Source of all other defaults: tuned (learns fastest), paper (its table), theory (what its theorems ask for),
    script (the authors' code)."""

    num_agents: int | None = None
    """Number of agents K, attackers included. Default: 13, or 1 for algorithms of one agent alone."""
    num_byzantine: int | None = None
    """Number of Byzantine agents f that the rules tolerate. Default: ⌊(K − 1)/4⌋, or fewer if the rules tolerate
    fewer."""
    num_attackers: int | None = None
    """Number of agents that really attack. Default: num_byzantine."""
    attack: Attack | str = "AvgZero"
    """What attackers do; `byzpg list` shows all attacks."""
    byzantine_set: ByzantineSet | str = "FixedSet"
    """Which agents attack when: FixedSet (the last ones), FixedSet(members=(0, 3)), RotatingSet(period=1)."""

    num_seeds: int = 4
    """Number of independent repetitions, run side by side."""
    seed: int = 0
    """First seed; the others are the numbers after it."""
    trajectories: int | None = None
    """Number of trajectories per agent; training ends with the iteration that reaches it. Default: by task, long enough
    for the tuned preset to learn it."""
    steps: int | None = None
    """Number of environment steps per agent, in place of trajectories for algorithms with a critic. Default: by
    task."""

    aggregator: Aggregator | str | None = None
    """How gradients are aggregated (ByzPG, DecByzPG, ByzPPO, DecByzPPO): RFA, Krum, NNM(TrimmedMean()),
    Bucketing(RFA(), size=2), ..."""
    agreement: Agreement | str | None = None
    """How agents agree on parameters (DecByzPG, DecByzPPO): MDA, GDA, TrimmedMeanAgreement, NoAgreement."""
    rounds: int | Literal["theory"] | None = None
    """Number of agreement rounds κ per iteration; theory: as many as surely shrink the honest diameter by NK/p²."""

    large_batch: int | None = None
    """Number of trajectories N in a large batch."""
    small_batch: int | None = None
    """Number of trajectories B in a small batch, at most N."""
    switch_probability: float | Literal["theory"] | None = None
    """Probability p of a large batch, in (0, 1]; theory: 1/N."""
    coins: Literal["per-seed", "shared"] | None = None
    """Whether every seed tosses a coin of its own for its batches, or all toss the first seed's, which is faster but
    makes the spread over seeds too small."""
    estimator: Estimator | str | None = None
    """Gradient estimator: GPOMDP(baseline='none' or 'leave-one-out', trace_decay=None or a number in (0, 1]), or
    REINFORCE(baseline=...)."""
    importance: Correction | str | None = None
    """Correction of small batches: ImportanceWeights(mode='trajectory' or 'per-decision', cap=None or a number,
    floor=0), DefensiveSampling(mode=...) or HessianVector."""
    gate: float | Literal["health"] | None = None
    """Share β of the PAGE correction, in [0, 1]: 1 is the paper's, 0 a plain small batch; health: 1 if all importance
    weights are 1, and towards 0 the more they degenerate."""
    momentum: float | None = None
    """Momentum β at the agents, in [0, 1): each sends m ← β m + (1 − β) ṽ instead of its estimate ṽ; Adam then has no
    first moment. 0: no momentum."""
    ppo: PPO | str | None = None
    """Options of algorithms with a critic: PPO(environments=8, segment=64, epochs=4, minibatches=4, exchange_every=1,
    gae_lambda=0.95, clip=0.2, largest_kl=None, entropy=0, value=0.5, reward_scale=1, largest_norm=0.5,
    initial_log_std=0, normalize_observations=False)."""
    transport: bool | None = None
    """Play large batches ahead of the parameters, so that the agents' momentum does not lag behind them (N-PG-IGT)."""
    conventions: Conventions | str | None = None
    """Where implementations differ (θ_0, the coin, what the correction refers to): Paper, or AuthorsScript."""
    optimizer: Optimizer | None = None
    """Optimizer: adam; local-adam, where each agent scales its message by Adam before it is aggregated; plain sgd as in
    the theory; or normalized: steps of length η."""
    step_size: float | Literal["theory"] | None = None
    """Step size η; theory: computed from p, K, f, smoothness and correction_noise, for SGD."""
    smoothness: float = 1e3
    """Smoothness L of the expected return, for step_size = theory, where η ≤ 1/(2L). The default is a guess."""
    correction_noise: float = 1e5
    """Constant C of the PAGE correction's noise, for step_size = theory, where η ≤ 1/(2√A) and, for DecByzPG, A =
    C(α/p² + 1/(pK)). The default is a guess."""
    decay: float | None = None
    """Share of the step size that is gone at the end of the run, in [0, 1]; it falls linearly. 0: constant."""
    adam_epsilon: float | None = None
    """Adam's ε. Gradients much smaller than ε lead to small steps; with 1e-8 even rounding errors lead to full
    steps."""

    policy: Network | str = "auto"
    """Policy: auto (what fits the task's actions), categorical, gaussian, or your own network as
    module:Name(option=value)."""
    hidden: tuple[int, ...] | None = None
    """Sizes of the policy's hidden layers."""
    activation: Literal["relu", "tanh", "elu", "silu"] | None = None
    """Activation of the hidden layers."""
    output_tanh: bool | None = None
    """Put a tanh on the policy's outputs, as in the paper; it bounds the probability of an action."""
    horizon: int | None = None
    """Number of steps H after which an episode is cut off. Default: the task's own."""
    discount: float | None = None
    """Discount γ, in (0, 1]."""
    output: Literal["last", "uniform"] | None = None
    """Which iterate is the result: the last, or one drawn uniformly as in the theory. Both are saved."""

    def __post_init__(self) -> None:
        # A run is what can be written down and read back.
        if self.env is not None:
            object.__setattr__(self, "env", envs.name_of(self.env))

    def resolved(self) -> "Settings":
        """Fill in everything that was left out, and check it. A task on the host is built for that.

        Raises:
            ValueError: If an option has a wrong type or value; the message names the option, the value and the fix.
        """
        _parts.trust(*self.own_modules)
        return Settings(**self._filled(envs.make, _component))

    def without_own_code(self) -> dict[str, Any]:
        """The resolved options, as far as they are known and can be checked without running code that they name.

        A task on the host is not built; its horizon is left out if it is not given. Components from outside byzpg
        remain text.
        """
        return self._filled(envs.built_in, _built_in_component)

    @property
    def own_modules(self) -> set[str]:
        """The modules outside byzpg that the options name; nothing is imported."""
        return own_modules(vars(self))

    def _filled(
        self, find_task: "Callable[[str], envs.Task | None]", component: Callable[[str, Any], Any]
    ) -> dict[str, Any]:
        defaults = {option.name: option.default for option in fields(self) if option.default is not None}
        given: dict[str, Any] = defaults | {name: value for name, value in vars(self).items() if value is not None}
        for option in ("env", "preset", "algorithm"):
            if not isinstance(given[option], str):
                raise ValueError(f"{option} must be a name, got {given[option]!r}.")
        env, preset = given["env"], given["preset"]
        name = self.best_algorithm if given["algorithm"] == AUTO else _algorithm_name(given["algorithm"])
        if preset not in PRESETS:
            raise ValueError(unknown("preset", preset, PRESETS))
        task = find_task(env)
        values = {
            **_task_defaults(env, preset, name, self.switch_probability),
            **ALGORITHMS[name].defaults,
            **ALGORITHMS[name].fixed,
            **self.neutral_options(name),
            **self._neutral_network_options(),
            **given,
            "algorithm": name,
        }
        if task is not None and values.setdefault("horizon", task.horizon) is None:
            raise ValueError(f"{env} does not limit the length of its episodes: set horizon, in steps.")
        values = {option: component(option, value) for option, value in values.items()}
        if values["optimizer"] not in ADAMS and self.adam_epsilon is None:  # the preset's is for Adam
            values["adam_epsilon"] = ADAM_EPSILON
        values.setdefault("num_agents", 1 if ALGORITHMS[name].single else 13)
        values.setdefault("num_byzantine", _most_tolerated(values))
        values.setdefault("num_attackers", values["num_byzantine"])
        if values["num_attackers"] == 0:
            values["attack"] = NoAttack()
        if self.small_batch is None and isinstance(values["large_batch"], int):
            values["small_batch"] = min(values["small_batch"], values["large_batch"])
        return _with_theory(values, task)

    @property
    def best_algorithm(self) -> str:
        """The algorithm without a server that learns fastest, among those that have the options that are given."""
        critic_only, page_only = (
            any(self._sets(option, neutral) for option, neutral in options.items()) for options in (ONLY_PPO, ONLY_PAGE)
        )
        is_tuned = envs.name_of(self.env).rpartition(":")[2] in TUNED_WITH_CRITIC
        return "DecByzPPO" if critic_only or (is_tuned and self.preset == "tuned" and not page_only) else "DecByzPG"

    def _sets(self, option: str, neutral: Any) -> bool:
        """Whether an option is given, at another value than one that does nothing."""
        return _built_in_component(option, getattr(self, option)) not in (None, _component(option, neutral))

    def neutral_options(self, algorithm_name: str) -> dict[str, Any]:
        """The options that the algorithm does not use, at values that do nothing; any other value is an error."""
        algorithm = ALGORITHMS[algorithm_name]
        has_critic = algorithm.agent.unit == "steps"
        values: dict[str, Any] = dict(ONLY_PAGE if has_critic else ONLY_PPO)
        if not algorithm.robust:
            values |= {"aggregator": Mean()}
        if not algorithm.agrees:
            values |= {"agreement": NoAgreement(), "rounds": 0}
        for option, neutral in values.items():
            if self._sets(option, neutral):
                fixes = FIXES_WITH_CRITIC if has_critic else FIXES
                fix = fixes.get(option, "use an algorithm without a critic, such as DecByzPG")
                value = getattr(self, option)
                raise ValueError(f"{option} = {value} has no effect with {algorithm_name}: leave it out, or {fix}.")
        return values

    def _neutral_network_options(self) -> dict[str, Any]:
        """With a network of the user's own, the options of the built-in one at values that do nothing."""
        network = _built_in_component("policy", self.policy)
        if network is None or (isinstance(network, str) and not isinstance(network, _Unread)):
            return {}
        for option, neutral in ONLY_MLP.items():
            if self._sets(option, neutral):
                raise ValueError(
                    f"{option} = {getattr(self, option)} has no effect with policy = {network}: leave it out, or give "
                    "the network such an option."
                )
        return ONLY_MLP

    @classmethod
    def load(cls, path: Path, **defaults: Any) -> "Config":
        """Read a configuration from a .toml or .json file whose keys are the options.

        A .json file comes from a run, perhaps of someone else. The modules that it names must be ones that the user
        has named too: see `byzpg.trust`.

        Args:
            path: The file.
            defaults: Options in place of those that the file leaves out.
        """
        try:
            text = path.read_text(encoding="utf-8")
            values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"configuration {path} cannot be read: {error}") from None
        config = cls.of(defaults | values if isinstance(values, dict) else values, str(path))
        if path.suffix == ".json":
            _parts.check_trusted(config.own_modules, str(path))
        return config

    @classmethod
    def of(cls, values: object, source: str) -> "Config":
        """Make a configuration from plain data: components as text, tuples as lists; also with the options of 0.1."""
        if not isinstance(values, dict):
            raise ValueError(f"{source} must be a table of options, got {type(values).__name__}.")
        values = _with_present_names(values, source)
        if all(values.get(option) is not None for option in PAPER.keys() - FORMERLY):  # then byzpg wrote this file
            values = FORMERLY | values
        known = [option.name for option in fields(cls)]
        for option in values:
            if option not in known:
                raise ValueError(f"{source}: there is no option {option!r}.{nearest(option, known)}")
        plain: dict[str, Any] = {o: tuple(value) if isinstance(value, list) else value for o, value in values.items()}
        return cls(**plain)


def _component(option: str, value: Any) -> Any:
    """The value, with the text of a component read, and a class called."""
    if option in FAMILY_OF and isclass(value):
        try:
            return value()
        except TypeError as error:
            raise ValueError(f"{option} = {value.__name__} needs options, so it must be called ({error}).") from error
    if option == "policy" and isinstance(value, str) and ":" not in value:  # a kind of the built-in network
        if value not in POLICIES:
            raise ValueError(
                f"policy must be {', '.join(POLICIES)}, or a network of your own as module:Name(option=value); got "
                f"{value!r}.{nearest(value, POLICIES)}"
            )
        return value
    return parse(FAMILY_OF[option], value) if option in FAMILY_OF and isinstance(value, str) else value


class _Unread(str):
    """The text of a component from outside byzpg, whose module is not imported."""


def _built_in_component(option: str, value: Any) -> Any:
    """As `_component`, but the text of a component from outside byzpg remains text."""
    is_own = option in FAMILY_OF and isinstance(value, str) and addresses(value)
    return _Unread(value) if is_own else _component(option, value)


def own_modules(values: Mapping[str, Any]) -> set[str]:
    """The modules outside byzpg that these options name, as text or as components; nothing is imported."""
    named = [str(value) for option, value in values.items() if option in FAMILY_OF and value is not None]
    found = {each.partition(":")[0] for text in named for each in addresses(text)}
    task = values.get("env")
    if isinstance(task, str) and (module := imported_module(task)) is not None:
        found.add(module)
    return found


def _algorithm_name(text: str) -> str:
    for name in ALGORITHMS:
        if plain_name(name) == plain_name(text):
            return name
    raise ValueError(unknown("algorithm", text, ALGORITHMS))


def _task_defaults(env: str, preset: str, algorithm_name: str, switch_probability: object) -> dict[str, Any]:
    """What a preset says about a task, wherever the task is played (CartPole-v1, gymnasium:CartPole-v1).

    The probability of a large batch may be left out (None).
    """
    name, algorithm = env.rpartition(":")[2], ALGORITHMS[algorithm_name]
    values = TASKS.get(name, OTHER_TASKS) | PRESETS[preset] | PRESETS_BY_TASK[preset].get(name, {})
    if algorithm.agent.unit == "steps":
        if preset != "tuned":
            raise ValueError(f"preset = {preset} is for the paper's algorithms, not for {algorithm_name}: use tuned.")
        alone = PPO_ALONE_DEFAULTS | PPO_ALONE.get(name, {}) if algorithm.single else {}
        return values | PPO_DEFAULTS | PPO_BY_TASK.get(name, {}) | alone
    probability = switch_probability or algorithm.defaults.get("switch_probability", values["switch_probability"])
    unscaled = algorithm.single or probability != 1
    return values | (PRESETS_UNSCALED.get(preset, {}).get(name, {}) if unscaled else {})


def _most_tolerated(values: dict[str, Any]) -> int:
    """The default of num_byzantine: a quarter of the agents, or what the rules in use tolerate if that is less."""
    num_agents = values["num_agents"] if isinstance(values["num_agents"], int) else 1  # refused later
    agrees = ALGORITHMS[values["algorithm"]].agrees
    rules = [values["aggregator"], values["agreement"]] if agrees else [values["aggregator"]]
    tolerated = [rule.max_byzantine(num_agents) for rule in rules if isinstance(rule, Rule)]
    return max(0, min([(num_agents - 1) // 4, *tolerated]))


def _with_theory(values: dict[str, Any], task: envs.Task | None) -> dict[str, Any]:
    """The options, with those at "theory" computed from the others, once those are known to be sound."""
    constants = {option: values.pop(option) for option in ("smoothness", "correction_noise")}
    by_theory = {o for o in ("switch_probability", "rounds", "step_size") if isinstance(values[o], str)}
    for option in by_theory:
        if values[option] != "theory":
            raise ValueError(f"{option} must be a number or 'theory', got {values[option]!r}.")
    _check(values | dict.fromkeys(by_theory, 1), task)
    if "switch_probability" in by_theory:
        values["switch_probability"] = 1 / values["large_batch"]
    num_agents, num_byzantine = values["num_agents"], values["num_byzantine"]
    if "rounds" in by_theory and isinstance(values["agreement"], _Unread):
        values["rounds"] = "theory"
    elif "rounds" in by_theory:
        share = values["switch_probability"] ** 2 / (values["large_batch"] * num_agents)
        values["rounds"] = values["agreement"].rounds_to_shrink(share, num_agents, num_byzantine)
    for option, value in constants.items():
        if "step_size" not in by_theory and value != getattr(Config, option):
            raise ValueError(
                f"{option} = {value} has no effect with a step size of your own: set step_size = 'theory'."
            )
    if "step_size" in by_theory:
        values["step_size"] = _step_size_of_theory(values, **constants)
    return values


def _step_size_of_theory(values: Mapping[str, Any], *, smoothness: float, correction_noise: float) -> float:
    """η = ½ min(1/√A, 1/L): docs/concepts/method.md says where A comes from, and corrects that of ByzPG."""
    for option, value in {"smoothness": smoothness, "correction_noise": correction_noise}.items():
        if not fits(value, float) or not 0 < value < inf:
            raise ValueError(f"{option} must be a positive and finite number, got {value!r}.")
    algorithm, probability = ALGORITHMS[values["algorithm"]], values["switch_probability"]
    if values["optimizer"] != "sgd" or values["momentum"] or algorithm.anchored:
        raise ValueError(
            f"step_size = 'theory' is for the paper's algorithms with SGD and no momentum; got {values['algorithm']}, "
            f"optimizer = {values['optimizer']}, momentum = {values['momentum']}: set a step size."
        )
    num_samplers = 1 if algorithm.centralized else values["num_agents"]  # of small batches
    error = 1 / (probability * num_samplers)
    if algorithm.robust and not algorithm.centralized:  # what attackers can do in a small batch
        error += values["num_byzantine"] / values["num_agents"] / probability**2
    return min(1 / sqrt(correction_noise * error), 1 / smoothness) / 2


# Options of byzpg 0.1 that are switches of AuthorsScript today, and what they were called without it.
SCRIPT_SWITCHES = {"initialization": "seeded", "coin": "common", "memory": "paper"}


def present_name(option: str, given: Collection[str]) -> str:
    """Today's name of an option in a file of byzpg 0.1, which has the options `given`.

    There, num_declared was f and num_byzantine the number of attackers; without num_declared, num_byzantine was both.
    """
    if option in SCRIPT_SWITCHES:
        return "conventions"
    if "num_declared" in given:
        return {"num_declared": "num_byzantine", "num_byzantine": "num_attackers"}.get(option, option)
    return option


def _with_present_names(values: dict[str, Any], source: str) -> dict[str, Any]:
    """The options of a file under today's names; old and new names of one option are not mixed."""
    old = {name for name in ("num_declared", *SCRIPT_SWITCHES) if values.get(name) is not None}
    known = {name: value for name, value in values.items() if name in old or name not in SCRIPT_SWITCHES}
    if "num_declared" not in old:
        known.pop("num_declared", None)
    for name in sorted(old):
        new = "num_attackers" if name == "num_declared" else "conventions"
        if values.get(new) is not None:
            raise ValueError(f"{source}: {name} is an option of byzpg 0.1, and {new} replaces it: leave {name} out.")
    present = {present_name(name, known): value for name, value in known.items() if name not in SCRIPT_SWITCHES}
    switches = {name: values.get("preset") == "script" for name in SCRIPT_SWITCHES}
    for name in old & set(SCRIPT_SWITCHES):
        if values[name] not in (SCRIPT_SWITCHES[name], "script"):
            raise ValueError(f"{source}: {name} must be {SCRIPT_SWITCHES[name]!r} or 'script', got {values[name]!r}.")
        switches[name] = values[name] == "script"
    if old & set(SCRIPT_SWITCHES):
        off = ", ".join(f"{name}=False" for name, is_on in switches.items() if not is_on)
        present["conventions"] = f"AuthorsScript({off})" if any(switches.values()) else "Paper()"
    return present


@dataclass(frozen=True)
class Settings:
    """A configuration with everything filled in and checked: what a run is, to the last option."""

    env: str
    algorithm: str
    preset: str
    num_agents: int
    num_byzantine: int
    num_attackers: int
    attack: Attack
    byzantine_set: ByzantineSet
    num_seeds: int
    seed: int
    trajectories: int | None  # None with a critic
    steps: int | None  # None without a critic
    aggregator: Aggregator
    agreement: Agreement
    rounds: int
    large_batch: int
    small_batch: int
    switch_probability: float
    coins: Literal["per-seed", "shared"]
    estimator: Estimator
    importance: Correction
    gate: float | Literal["health"]
    momentum: float
    ppo: PPO
    transport: bool
    conventions: Conventions
    optimizer: Optimizer
    step_size: float
    decay: float
    adam_epsilon: float
    policy: Network | Literal["auto", "categorical", "gaussian"]
    hidden: tuple[int, ...]
    activation: Literal["relu", "tanh", "elu", "silu"]
    output_tanh: bool
    horizon: int
    discount: float
    output: Literal["last", "uniform"]

    def __post_init__(self) -> None:
        _check(vars(self), envs.make(self.env))

    def bound_policy(self) -> Policy:
        """The policy, fitted to the task."""
        return _policy(vars(self), envs.make(self.env))

    @property
    def task_in_names(self) -> str:
        """The task, as a part of a file's name."""
        return re.sub(r"[^\w.+-]+", "-", self.env).strip("-")

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.seed, self.seed + self.num_seeds))

    @property
    def unit(self) -> Literal["trajectories", "steps"]:
        """In what the length of the run is counted, per agent."""
        return ALGORITHMS[self.algorithm].agent.unit

    @property
    def has_critic(self) -> bool:
        """Whether agents have a critic; they then learn from steps, and the length of the run is counted in steps."""
        return self.unit == "steps"

    @property
    def length(self) -> int:
        """How long agents train, in `unit`."""
        length = self.steps if self.has_critic else self.trajectories
        assert length is not None
        return length

    def schedule(self) -> Schedule:
        """How long its agents train, and how often they sample a large batch."""
        large, small = self.large_batch, self.small_batch
        if self.has_critic:
            large = small = self.ppo.num_steps
        return Schedule(
            seed=self.seed,
            length=self.length,
            switch_probability=self.switch_probability,
            large_batch=large,
            small_batch=small,
            conventions=self.conventions,
            shared_coin=self.coins == "shared",
        )

    @property
    def _expected_updates(self) -> float:
        """The number of updates of a run, on average over coins."""
        return self.schedule().expected_iterations * (self.ppo.num_updates if self.has_critic else 1)

    def federation(self) -> Federation:
        """The federation this describes."""
        algorithm = ALGORITHMS[self.algorithm]
        options: dict[str, Any] = vars(self) | {
            "env": envs.make(self.env),
            "policy": self.bound_policy(),
            # Adam at the agents needs a history, whatever β is.
            "momentum": self.momentum if self.optimizer == "local-adam" else self.momentum or None,
            "decay": self.decay / self._expected_updates if self.decay else None,
            "anchored": algorithm.anchored,
        }
        agent = algorithm.agent(**{option.name: options[option.name] for option in fields(algorithm.agent)})
        return Federation(
            agent=agent,
            centralized=algorithm.centralized,
            num_agents=self.num_agents,
            num_attackers=self.num_attackers,
            num_byzantine=self.num_byzantine,
            aggregator=self.aggregator,
            agreement=None if isinstance(self.agreement, NoAgreement) else self.agreement,
            rounds=self.rounds,
            attack=self.attack,
            byzantine_set=self.byzantine_set,
        )

    @property
    def own_modules(self) -> set[str]:
        """The modules outside byzpg that the settings name."""
        return own_modules(vars(self))

    def check_readable(self) -> None:
        """Check that `as_data` can be read back.

        Raises:
            ValueError: If not, because a component cannot be imported by its name or printed as text.
        """
        for option, family in FAMILY_OF.items():
            if isinstance(value := getattr(self, option), Component):  # a policy can be a word
                check_readable(family, value)

    def as_data(self) -> dict[str, Any]:
        """Plain data that `Config.of` reads back: components as text."""
        values = ((option.name, getattr(self, option.name)) for option in fields(self))
        return {name: str(value) if isinstance(value, Component) else value for name, value in values}


def _check(values: Mapping[str, Any], task: envs.Task | None) -> None:
    """Raise a ValueError unless these options of `Settings` are sound.

    Args:
        values: All options, but perhaps not the horizon if there is no task.
        task: The task; None if it is not built.
    """
    for option, hint in get_type_hints(Settings).items():
        if option not in values:
            continue
        value = values[option]
        if isinstance(value, _Unread):
            continue
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        choices = [each for part in parts if get_origin(part) is Literal for each in get_args(part)]
        if not fits(value, hint) or (isinstance(value, str) and choices and value not in choices):
            types = [type_name(part) for part in parts if get_origin(part) is not Literal]
            raise ValueError(f"{option} must be {' or '.join([*types, *map(repr, choices)])}; got {value!r}.")
    _check_numbers(values)
    _check_components(values)
    if task is None:
        return
    if task.horizon is not None and values["horizon"] > task.horizon:
        raise ValueError(
            f"horizon must be at most {task.horizon}, where {task.name} ends episodes; got {values['horizon']}."
        )
    space, attack = task.action_space, values["attack"]
    takes_any = isinstance(attack, Attack) and attack.changes_actions  # not if it is unread
    if takes_any and isinstance(space, Box) and not space.bounded:
        raise ValueError(f"{attack} takes uniform actions, and those of {task.name} have no bounds: {space}.")
    if any(isinstance(values[option], _Unread) for option in ("policy", "ppo")):
        return
    policy = _policy(values, task)
    if ALGORITHMS[values["algorithm"]].agent.unit == "steps":
        policy.critic()
    elif isinstance(values["policy"], Network):
        jax.eval_shape(lambda: values["conventions"].initial_parameters(policy, jax.random.key(0)))


def _check_numbers(values: Mapping[str, Any]) -> None:
    counts = ("num_agents", "num_seeds", "trajectories", "steps", "large_batch", "small_batch", "horizon")
    for option in counts:
        if values.get(option) is not None and values[option] < 1:
            raise ValueError(f"{option} must be at least 1, got {values[option]}.")
    for size in values["hidden"]:
        if size < 1:
            raise ValueError(f"hidden must be a positive whole number, got {size}.")
    for option in ("num_byzantine", "num_attackers", "seed", "rounds"):
        if values[option] < 0:
            raise ValueError(f"{option} must not be negative, got {values[option]}.")
    if values["seed"] + values["num_seeds"] > 2**31:
        raise ValueError(f"seed + num_seeds must be at most 2³¹, got {values['seed']} + {values['num_seeds']}.")
    for option in ("switch_probability", "discount"):
        if not 0 < values[option] <= 1:
            raise ValueError(f"{option} must lie in (0, 1], got {values[option]}.")
    small, large = values["small_batch"], values["large_batch"]
    if small > large:
        raise ValueError(f"small_batch must be at most large_batch = {large}, got {small}.")
    for option in ("step_size", "adam_epsilon"):
        if not 0 < values[option] < inf:
            raise ValueError(f"{option} must be positive and finite, got {values[option]}.")
    if values["optimizer"] not in ADAMS and values["adam_epsilon"] != ADAM_EPSILON:
        raise ValueError(
            f"adam_epsilon = {values['adam_epsilon']} has no effect with {values['optimizer']}: leave it out, or use "
            "optimizer = 'adam'."
        )
    if values["optimizer"] == "local-adam" and values["switch_probability"] < 1:
        raise ValueError(
            "local-adam aggregates scaled messages, which small batches cannot correct: set switch_probability = 1, or "
            "use optimizer = 'adam'."
        )
    if not 0 <= values["decay"] <= 1:
        raise ValueError(f"decay must lie in [0, 1], got {values['decay']}.")
    if not 0 <= values["momentum"] < 1:
        raise ValueError(f"momentum must lie in [0, 1), got {values['momentum']}.")
    if values["gate"] != "health" and not 0 <= values["gate"] <= 1:
        raise ValueError(f"gate must lie in [0, 1], or be 'health'; got {values['gate']}.")
    for option, value in ALGORITHMS[values["algorithm"]].fixed.items():
        if values[option] != value:
            raise ValueError(
                f"{option} must be {value!r} with {values['algorithm']}, got {values[option]!r}: leave it out, or use "
                "another algorithm."
            )
    if ALGORITHMS[values["algorithm"]].single and values["num_agents"] > 1:
        raise ValueError(f"{values['algorithm']} is one agent alone: num_agents must be 1, got {values['num_agents']}.")


def _check_components(values: Mapping[str, Any]) -> None:
    num_agents, num_byzantine, num_attackers = (
        values[option] for option in ("num_agents", "num_byzantine", "num_attackers")
    )
    if any(isinstance(values[option], _Unread) for option in FAMILY_OF):
        return  # checked once it is read
    estimator, importance = values["estimator"], values["importance"]
    if ALGORITHMS[values["algorithm"]].agent.unit == "trajectories":
        estimator.check(values["small_batch"])
    if values["small_batch"] % importance.num_points:
        raise ValueError(
            f"{importance} plays one half of a small batch with each of two policies: small_batch must be even, got "
            f"{values['small_batch']}."
        )
    if isinstance(importance, HessianVector) and values["gate"] != 1:
        raise ValueError(f"{importance} corrects v̂ as a whole: gate must be 1, got {values['gate']}.")
    if values["transport"] and not values["momentum"]:
        raise ValueError("transport keeps momentum from lagging behind: set momentum, or leave transport out.")
    if isinstance(estimator, REINFORCE) and importance.weighs_rewards:
        raise ValueError(f"{importance} weighs rewards one by one, which {estimator} does not: use GPOMDP.")
    values["aggregator"].check(num_agents, num_byzantine)
    if values["rounds"]:
        values["agreement"].check(num_agents, num_byzantine)
    if num_attackers >= num_agents:
        raise ValueError(
            f"num_attackers must leave an honest agent: at most {num_agents - 1}, got {num_attackers}, "
            f"for which num_agents must be at least {num_attackers + 1}."
        )
    values["attack"].check(num_agents, num_attackers, num_byzantine, values["aggregator"])
    byzantine_set = values["byzantine_set"]
    with trying(byzantine_set, "its call") if is_own(type(byzantine_set)) else nullcontext():
        found = jax.eval_shape(lambda: byzantine_set(num_agents, num_attackers, 0, jax.random.key(0)))
    if found.shape != (num_attackers,) or not jnp.issubdtype(found.dtype, jnp.integer):
        raise ValueError(
            f"{byzantine_set} must give the indices of {num_attackers} agents, int32 [{num_attackers}]; got "
            f"{found.dtype} {list(found.shape)}."
        )


def _policy(values: Mapping[str, Any], task: envs.Task) -> Policy:
    network = {option: values[option] for option in ("hidden", "activation", "output_tanh")}
    policy = policy_for(values["policy"], task.observation_size, task.action_space, **network)
    first = values["ppo"].initial_log_std
    if first == 0:
        return policy
    if not isinstance(policy, Gaussian):
        raise ValueError(
            f"PPO: initial_log_std = {first} is for continuous actions, and those of {task.name} are discrete: leave "
            "it out."
        )
    return replace(policy, initial_log_std=first)
