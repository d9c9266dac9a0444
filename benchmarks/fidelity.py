"""LunarLander fidelity: how closely our lander follows Gymnasium's.

    python benchmarks/fidelity.py paired --policy random       # the same first states, actions and noise in both
    python benchmarks/fidelity.py paired --policy heuristic    # Gymnasium's controller, in closed loop on both sides
    python benchmarks/fidelity.py independent                  # two samples of random play, each with its own noise
    python benchmarks/fidelity.py record                       # write Gymnasium's episodes for the tests

`--number 20` is a quick check. Each command but the last prints a Markdown table. Baseline: Gymnasium itself, one
environment at a time (needs `pip install 'gymnasium[box2d]'`).
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from references.gymnasium_lander import HORIZON, episode, first_touch, outcome, record, replay

from byzpg.envs.lunar_lander import LunarLander, State

LANDER = LunarLander()
STEP = jax.jit(LANDER.step)
OUTCOMES = ("lost", "landed", "time is up")


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def paired(policy: str, number: int, batch: int) -> None:
    theirs, ours = [], []
    for start in range(0, number, batch):
        episodes = [episode(seed, policy) for seed in range(start, min(start + batch, number))]
        theirs += episodes
        ours += replay(STEP, LANDER, episodes, [policy] * len(episodes), batch)
        agreeing = [each.length == len(rewards) for each, (_, rewards) in zip(theirs, ours, strict=True)]
        say(f"{policy}: {len(ours)} of {number} seeds, same length {np.mean(agreeing):.1%}")
    pairs = list(zip(theirs, ours, strict=True))
    same_outcome = [outcome(each.rewards) == outcome(rewards) for each, (_, rewards) in pairs]
    same_length = [each.length == len(rewards) for each, (_, rewards) in pairs]
    first, worst = [], []
    for each, (observations, rewards) in pairs:
        first.append(np.abs(observations[0] - each.observations[0]).max())
        steps = min(first_touch(each.observations), each.length, len(rewards))
        worst.append(np.abs(observations[:steps] - each.observations[:steps]).max())
    returns = [np.array([each.rewards.sum() for each in theirs]), np.array([rewards.sum() for _, rewards in ours])]
    print(f"\n| paired, {policy} play, {number} seeds | |\n|---|---:|")
    print(f"| same outcome | {np.mean(same_outcome):.1%} |\n| same length | {np.mean(same_length):.1%} |")
    print(f"| largest error of the first observation | {max(first):.1e} |")
    if policy == "random":
        # The heuristic sees our own observations, so that rounding can change its actions.
        print(f"| largest error before the first touch: worst episode | {max(worst):.1e} |")
        print(f"| largest error before the first touch: median episode | {np.median(worst):.1e} |")
    for name, values in zip(("Gymnasium", "ours"), returns, strict=True):
        print(f"| mean return, {name} | {values.mean():.2f} ± {values.std():.1f} |")
    print(f"| Kolmogorov–Smirnov p, returns | {kolmogorov_smirnov(*returns):.2f} |", flush=True)


def kolmogorov_smirnov(one: np.ndarray, other: np.ndarray) -> float:
    """The p-value of the two-sample test, from its asymptotic distribution."""
    values = np.sort(np.concatenate([one, other]))
    shares = [np.searchsorted(np.sort(each), values, side="right") / len(each) for each in (one, other)]
    scaled = np.abs(shares[0] - shares[1]).max() * np.sqrt(len(one) * len(other) / (len(one) + len(other)))
    terms = np.arange(1, 101)
    return float(np.clip(2 * np.sum((-1.0) ** (terms - 1) * np.exp(-2 * terms**2 * scaled**2)), 0, 1))


def gymnasium_at_random(number: int) -> Iterator[tuple[float, int, str]]:
    env, rng = gymnasium.make("LunarLander-v3"), np.random.default_rng(0)
    for seed in range(10**6, 10**6 + number):
        env.reset(seed=seed)
        rewards, ended = [], False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(int(rng.integers(4)))
            rewards.append(float(reward))
            ended = terminated or truncated
        yield sum(rewards), len(rewards), outcome(np.array(rewards))


def draw(key: jax.Array, batch: int) -> tuple[tuple[jax.Array], tuple[jax.Array, jax.Array]]:
    """Random actions and the noise of one step."""
    actions, one, other = jax.random.split(key, 3)
    chosen = jax.random.randint(actions, (batch,), 0, 4, jnp.int32)
    return (chosen,), (jax.random.uniform(one, (batch,)), jax.random.uniform(other, (batch,)))


@jax.jit
def play_on(state: State, keys: jax.Array) -> tuple[State, tuple[jax.Array, jax.Array]]:
    """Play len(keys) random steps; returns the rewards and the ends [steps, batch]."""

    def step(state: State, key: jax.Array) -> tuple[State, tuple[jax.Array, jax.Array]]:
        state, reward, ended = LANDER.step(state, *draw(key, state.ended.size))
        return state, (reward, ended)

    return jax.lax.scan(step, state, keys)


RESET = jax.jit(jax.vmap(LANDER.reset))


def ours_at_random(number: int, batch: int) -> Iterator[tuple[float, int, str]]:
    for start in range(0, number, batch):
        key = jax.random.fold_in(jax.random.key(0), start)
        state = RESET(jax.random.split(jax.random.fold_in(key, 0), batch))
        rewards, ends = [], []
        for i in range(1, HORIZON // 50 + 1):
            state, (reward, ended) = play_on(state, jax.random.split(jax.random.fold_in(key, i), 50))
            rewards.append(np.asarray(reward))
            ends.append(np.asarray(ended))
            if ends[-1][-1].all():
                break
        rewards, ends = np.concatenate(rewards), np.concatenate(ends)
        for j in range(min(batch, number - start)):
            length = int(np.argmax(ends[:, j])) + 1 if ends[-1, j] else HORIZON
            yield float(rewards[:length, j].sum()), length, outcome(rewards[:length, j])


def independent(number: int, batch: int) -> None:
    samples = []
    for name, play in (("Gymnasium", gymnasium_at_random(number)), ("ours", ours_at_random(number, batch))):
        sample = []
        for each in play:
            sample.append(each)
            if len(sample) % 500 == 0:
                say(f"{name}: {len(sample)} of {number} episodes")
        samples.append(sample)
    returns, lengths = ([np.array([each[i] for each in sample]) for sample in samples] for i in (0, 1))
    counts = [Counter(each[2] for each in sample) for sample in samples]
    print(f"\n| independent, random play, {number} episodes each | Gymnasium | ours | |\n|---|---:|---:|---|")
    for name, (one, other) in (("return", returns), ("length", lengths)):
        error = np.sqrt(one.var() / len(one) + other.var() / len(other))
        apart = f"{(other.mean() - one.mean()) / error:+.1f} standard errors"
        p_value = f"Kolmogorov–Smirnov p = {kolmogorov_smirnov(one, other):.2f}"
        print(f"| mean {name} | {one.mean():.2f} | {other.mean():.2f} | {apart}; {p_value} |")
    for name in OUTCOMES:
        one, other = (count[name] for count in counts)
        share = (one + other) / (2 * number)
        error = np.sqrt(2 * number * share * (1 - share)) or 1.0
        print(f"| {name} | {one} | {other} | {(other - one) / error:+.1f} σ |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("paired", "independent", "record"))
    parser.add_argument("--policy", choices=("random", "heuristic"), default="random")
    parser.add_argument("--number", type=int)
    parser.add_argument("--batch", type=int, default=250)
    arguments = parser.parse_args()
    if arguments.what == "paired":
        paired(arguments.policy, arguments.number or 1000, arguments.batch)
    elif arguments.what == "independent":
        independent(arguments.number or 5000, arguments.batch)
    else:
        record()


if __name__ == "__main__":
    main()
