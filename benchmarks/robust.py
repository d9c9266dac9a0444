"""The speed of every rule, applied at all K receivers under an equivocating attack.

    python benchmarks/robust.py                      # the three smaller sizes, and MDA's own table
    python benchmarks/robust.py --sizes 100x1000000  # K = 100, d = 1,000,000
    python benchmarks/robust.py --sizes 5x50         # a quick check
    python benchmarks/robust.py --sizes 50x100000 --without-naive    # baseline (b) alone: not minutes for each rule
    python benchmarks/robust.py --costs              # the rules of `byzpg audit --aggregator all`, by size
    python benchmarks/robust.py --attacks            # what attackers add to an exchange in which nobody attacks
    python benchmarks/robust.py --against            # side by side with ByzFL and ByzPy: pip install '.[against]'

Baselines: (a) the naive NumPy twin of each rule (benchmarks/references/twins.py), called once per receiver; (b) the
matrix products that any rule based on distances needs: one K × K × d product for the rows that all receivers share,
and one f × K × d product per receiver for the messages that only this receiver gets (NumPy's BLAS or XLA, whichever is
faster). Our time includes computing the attack's messages. Times are the best of several runs.

`--against` gives other libraries the same rows and parameters, as NumPy arrays and as torch tensors where both work,
and counts the faster of the two. It prints how far their result is from ours, relative to the largest entry. They take
turns of three calls, so that they share what else the machine does. One receiver is a plain call. All receivers are our
exchange, and for a library one call per receiver. Some results differ by design: ByzPy's median of an even number of
values is the lower middle one, ByzFL and ByzPy look for CAF's direction in one and three power iterations instead of
exactly, and ByzFL estimates SMEA's eigenvalues in one, from a random start, so that it may average another subset.
"""

import argparse
import importlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from references import twins

from byzpg import Config
from byzpg.cli.audit import LEADERBOARD
from byzpg.robust import aggregators, agreement, attacks
from byzpg.robust.exchange import exchange

ATTACK = attacks.Equivocate()
RULES: dict[str, tuple[aggregators.Aggregator | agreement.Agreement, Callable | None]] = {
    "Mean": (aggregators.Mean(), twins.mean),
    "Median": (aggregators.Median(), twins.median),
    "TrimmedMean": (aggregators.TrimmedMean(), twins.trimmed_mean),
    "MeaMed": (aggregators.MeaMed(), twins.meamed),
    "Krum": (aggregators.Krum(), twins.krum),
    "MultiKrum": (aggregators.MultiKrum(), twins.multi_krum),
    "RFA": (aggregators.RFA(), lambda x, f: twins.rfa(x, f, tolerance=1e-5)),
    "MDA": (aggregators.MDA(), twins.mda),
    "SMEA": (aggregators.SMEA(), twins.smea),
    "FedPGFilter": (aggregators.FedPGFilter(), twins.fedpg_filter),
    "MoNNA": (aggregators.MoNNA(), twins.monna),
    "Bulyan": (aggregators.Bulyan(), twins.bulyan),
    "CenteredClipping": (
        aggregators.CenteredClipping(),
        lambda x, f: twins.centered_clipping(x, f, radius=1.0, iterations=3, start="medoid"),
    ),
    "CAF": (aggregators.CAF(), twins.caf),
    "NNM(RFA)": (
        aggregators.NNM(aggregators.RFA()),
        lambda x, f: twins.rfa(twins.nnm(x.astype(float), f), f, tolerance=1e-5),
    ),
    "ARC(RFA)": (
        aggregators.ARC(aggregators.RFA()),
        lambda x, f: twins.rfa(twins.arc(x.astype(float), f), f, tolerance=1e-5),
    ),
    "Bucketing(RFA)": (
        aggregators.Bucketing(aggregators.RFA()),
        lambda x, f: twins.rfa(
            twins.buckets(x.astype(float), np.random.default_rng(0).permutation(len(x)), 2), f, tolerance=1e-5
        ),
    ),
    "agreement.MDA": (agreement.MDA(), lambda x, f: twins.agree_mda(x, 0, f)),
    "agreement.GDA": (agreement.GDA(), lambda x, f: twins.agree_gda(x, 0, f)),
    "agreement.TrimmedMean": (agreement.TrimmedMeanAgreement(), lambda x, f: twins.agree_trimmed_mean(x, 0, f)),
}
SIZES = [(13, 386), (13, 4_996), (50, 100_000)]
# At a server, `--attacks`.
COSTED_SIZES = [(13, 4_996), (13, 72_000)]
COSTED = (
    attacks.SignFlip(),
    attacks.LargeNoise(),
    attacks.AvgZero(),
    attacks.ALIE(),
    attacks.Normalized(),
    attacks.OptimalALIE(),
)
# At a million parameters a run takes 10 s or more: only the main rules, each in its own process to measure its memory.
LARGE_RULES = ["Krum", "MultiKrum", "RFA", "MDA", "agreement.MDA", "agreement.GDA", "Median", "TrimmedMean"]


CALLS_PER_TURN = 3


def best_ms(function: Callable, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def best_of_each(functions: list[Callable], repeats: int) -> list[float]:
    """As `best_ms` for each function, in turns, so that they share what else the machine does.

    A turn is several calls: during the first one, the threads of the library before may still wait for work, busily.
    """
    rounds = [[best_ms(function, CALLS_PER_TURN) for function in functions] for _ in range(repeats)]
    return [min(times) for times in zip(*rounds, strict=True)]


def vectors(num_agents: int, dimension: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((num_agents, dimension), np.float32) + np.float32(1)


def matrix_products_ms(rows: np.ndarray, num_byzantine: int) -> float:
    """Baseline (b)."""
    num_agents = len(rows)
    told = rows[-num_byzantine:] * 2
    product = jax.jit(lambda left, right: jnp.matmul(left, right.T, precision="highest"))
    on_device, told_on_device = jnp.asarray(rows), jnp.asarray(told)
    repeats = 1 if rows.size > 5e7 else 5
    if num_agents * told.size < 2e8:  # one product for all receivers, as a good implementation would do it
        told = np.tile(told, (num_agents, 1))
        told_on_device, times = jnp.asarray(told), 1
    else:
        times = num_agents
    jax.block_until_ready((product(on_device, on_device), product(told_on_device, on_device)))
    blas = best_ms(lambda: rows @ rows.T, repeats) + times * best_ms(lambda: told @ rows.T, repeats)
    xla = best_ms(lambda: product(on_device, on_device), repeats)
    xla += times * best_ms(lambda: product(told_on_device, on_device), repeats)
    return min(blas, xla)


def exchange_ms(
    rule: aggregators.Aggregator | agreement.Agreement,
    rows: np.ndarray,
    num_byzantine: int,
    *,
    at_server: bool = False,
    attack: attacks.Attack = ATTACK,
) -> float:
    """The time of one exchange under attack, at all receivers or at a server."""
    num_agents, on_device, key = len(rows), jnp.asarray(rows), jax.random.key(0)
    attackers = jnp.arange(num_agents - num_byzantine, num_agents)
    options = {"attack": attack, "num_byzantine": num_byzantine, "key": key, "at_server": at_server}

    def run() -> jax.Array:
        return exchange(rule, on_device, byzantine=attackers, **options)[0]

    jax.block_until_ready(run())  # compile
    return best_ms(run, 1 if rows.size > 5e7 else 3 if rows.size > 1e6 else 20)


def ours_ms(name: str, rows: np.ndarray, num_byzantine: int) -> tuple[float, int]:
    """The time of all receivers, and the f that was used, which the rule's own bound may lower."""
    rule, _ = RULES[name]
    num_byzantine = min(num_byzantine, rule.max_byzantine(len(rows)))
    return exchange_ms(rule, rows, num_byzantine), num_byzantine


def naive_ms(name: str, rows: np.ndarray, num_byzantine: int) -> float | None:
    """Baseline (a): the time of one receiver, times K. None if a single receiver would take hours."""
    _, twin = RULES[name]
    num_agents = len(rows)
    if twin is None or (name.endswith(("MDA", "SMEA")) and num_agents > 13):  # they list all subsets
        return None
    return num_agents * best_ms(lambda: twin(rows, num_byzantine), 2 if num_agents <= 13 else 1)


def table(num_agents: int, dimension: int, *, with_naive: bool) -> None:
    num_byzantine = (num_agents - 1) // 4
    rows = vectors(num_agents, dimension)
    products = matrix_products_ms(rows, num_byzantine)
    print(f"\n### K = {num_agents}, d = {dimension:,}, f = {num_byzantine} (or the rule's largest)\n")
    print(f"(b) matrix products: {products:.3g} ms\n")
    print("| rule | f | ours, ms | (a) naive, ms | (a) / ours | ours / (b) |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in RULES:
        ours, used = ours_ms(name, rows, num_byzantine)
        naive = naive_ms(name, rows, used) if with_naive else None
        against = "| – | – |" if naive is None else f"| {naive:.3g} | {naive / ours:.0f}× |"
        print(f"| {name} | {used} | {ours:.3g} {against} {ours / products:.1f}× |", flush=True)


def costs(sizes: list[tuple[int, ...]]) -> None:
    """What one exchange costs with each rule of the audit's leaderboard, at a server and at all receivers."""
    texts = [f"K = {num_agents}, d = {dimension:,}" for num_agents, dimension in sizes]
    print("\nMilliseconds of one exchange at a server / at all K agents:\n")
    print(f"| rule | {' | '.join(texts)} |")
    print("|---|" + "---:|" * len(sizes), flush=True)
    for name in LEADERBOARD:
        cells = []
        for num_agents, dimension in sizes:
            num_byzantine = (num_agents - 1) // 4
            rule = Config(aggregator=name, num_agents=num_agents, num_byzantine=0).resolved().aggregator
            if num_byzantine > rule.max_byzantine(num_agents):
                cells.append("–")
                continue
            rows = vectors(num_agents, dimension)
            both = [exchange_ms(rule, rows, num_byzantine, at_server=at_server) for at_server in (True, False)]
            cells.append(" / ".join(f"{float(f'{each:.2g}'):g}" for each in both))
        print(f"| `{name.replace('()', '')}` | {' | '.join(cells)} |", flush=True)


def attack_costs(sizes: list[tuple[int, ...]]) -> None:
    """What attackers add to one exchange with CAF at a server. Baseline: nobody attacks."""
    print("\nMilliseconds of one exchange with CAF at a server, and of the exchange in which nobody attacks:\n")
    print(f"| attack | {' | '.join(f'K = {num_agents}, d = {dimension:,}' for num_agents, dimension in sizes)} |")
    print("|---|" + "---:|" * len(sizes), flush=True)
    nobody: list[float] = []
    for attack in (attacks.NoAttack(), *COSTED):
        times = [
            exchange_ms(aggregators.CAF(), vectors(*size), (size[0] - 1) // 4, at_server=True, attack=attack)
            for size in sizes
        ]
        nobody = nobody or times
        cells = [f"{each:.3g} ({each / baseline:.1f}×)" for each, baseline in zip(times, nobody, strict=True)]
        print(f"| {attack} | {' | '.join(cells)} |", flush=True)


def large_table(num_agents: int, dimension: int) -> None:
    num_byzantine = (num_agents - 1) // 4
    print(f"\n### K = {num_agents}, d = {dimension:,}, f = {num_byzantine} (or the rule's largest)\n")
    rows = vectors(num_agents, dimension)
    products = matrix_products_ms(rows, num_byzantine)
    del rows
    print(f"(b) matrix products: {products / 1e3:.3g} s\n")
    print("| rule | f | ours, s | ours / (b) | peak memory, GiB |")
    print("|---|---:|---:|---:|---:|", flush=True)
    for name in LARGE_RULES:
        command = [sys.executable, __file__, "--one", name, "--sizes", f"{num_agents}x{dimension}"]
        ours, used, peak = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        print(f"| {name} | {used} | {float(ours) / 1e3:.3g} | {float(ours) / products:.1f}× | {peak} |", flush=True)


def one(name: str, num_agents: int, dimension: int) -> None:
    ours, used = ours_ms(name, vectors(num_agents, dimension), (num_agents - 1) // 4)
    print(ours, used, f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f}")


def least_diameter() -> None:
    """MDA on one core: distances and search together, d = 50."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print("\n### MDA on one core, d = 50\n\n| case | ms |\n|---|---:|")
    for num_agents, num_byzantine in [(13, 3), (64, 15), (200, 49)]:
        rows = jnp.asarray(vectors(num_agents, 50))

        def run(rows: jax.Array = rows, num_byzantine: int = num_byzantine) -> jax.Array:
            return agreement.MDA()(rows, own=0, num_byzantine=num_byzantine)

        run()
        print(f"| one receiver, K = {num_agents}, f = {num_byzantine} | {best_ms(run, 5):.3g} |", flush=True)
    rows, attackers, key = jnp.asarray(vectors(100, 50)), jnp.arange(76, 100), jax.random.key(0)
    options = {"byzantine": attackers, "num_byzantine": 24, "phase": "parameters", "key": key}
    for attack in (ATTACK, attacks.MDAFooling(), attacks.LargeNoise(scale=3.0)):

        def one_round(attack: attacks.Attack = attack) -> jax.Array:
            return exchange(agreement.MDA(), rows, attack=attack, **options)[0]

        one_round()
        print(f"| one round of 100 receivers, f = 24, {attack} | {best_ms(one_round, 3):.3g} |", flush=True)


AGAINST_SIZES = [(64, 65_536, 8), (13, 4_996, 3)]


def shared_rules(num_agents: int, f: int) -> dict[str, tuple[aggregators.Aggregator, Callable | None, Callable | None]]:
    """Rules that another library has too: ours, ByzFL's and ByzPy's, which map rows to a result."""
    byzfl = importlib.import_module("byzfl")
    pre = importlib.import_module("byzpy.pre_aggregators")
    by_coordinate, by_distance, by_norm = (
        importlib.import_module(f"byzpy.aggregators.{kind}_wise") for kind in ("coordinate", "geometric", "norm")
    )

    def listed(rule: Any, first: Any = None) -> Callable:
        return lambda rows: rule.aggregate(first.pre_aggregate(list(rows)) if first else list(rows))

    rules = {
        "Mean": (aggregators.Mean(), byzfl.Average(), None),
        "Median": (aggregators.Median(), byzfl.Median(), listed(by_coordinate.CoordinateWiseMedian())),
        "TrimmedMean": (
            aggregators.TrimmedMean(),
            byzfl.TrMean(f),
            listed(by_coordinate.CoordinateWiseTrimmedMean(f)),
        ),
        "MeaMed": (aggregators.MeaMed(), byzfl.Meamed(f), listed(by_coordinate.MeanOfMedians(f))),
        "Krum": (aggregators.Krum(), byzfl.Krum(f), listed(by_distance.Krum(f))),
        "MultiKrum": (
            aggregators.MultiKrum(),
            byzfl.MultiKrum(f),
            listed(by_distance.MultiKrum(f, num_agents - f)),
        ),
        "RFA, 8 steps from zero": (aggregators.RFA.reference(), byzfl.GeometricMedian(nu=0.1, T=8), None),
        "RFA": (aggregators.RFA(), None, listed(by_distance.GeometricMedian(init="mean"))),
        "MoNNA": (aggregators.MoNNA(pivot=0), byzfl.MoNNA(f, idx=0), listed(by_distance.MoNNA(f))),
        "CenteredClipping from zero": (
            aggregators.CenteredClipping(radius=10.0, start="zero"),
            lambda rows: byzfl.CenteredClipping(L=3, tau=10.0)(rows),  # it keeps its last result as the next start
            listed(by_norm.CenteredClipping(c_tau=10.0, M=3, init="zero")),
        ),
        "CAF": (aggregators.CAF(), byzfl.CAF(f), listed(by_norm.CAF(f))),
        "NNM(TrimmedMean)": (
            aggregators.NNM(aggregators.TrimmedMean()),
            lambda rows: byzfl.TrMean(f)(byzfl.NNM(f)(rows)),
            listed(by_coordinate.CoordinateWiseTrimmedMean(f), pre.NearestNeighborMixing(f)),
        ),
        "ARC(TrimmedMean)": (
            aggregators.ARC(aggregators.TrimmedMean()),
            lambda rows: byzfl.TrMean(f)(byzfl.ARC(f)(rows)),
            listed(by_coordinate.CoordinateWiseTrimmedMean(f), pre.ARC(f)),
        ),
    }
    if num_agents <= 13:  # they try all subsets
        rules["SMEA"] = (aggregators.SMEA(), byzfl.SMEA(f), listed(by_distance.SMEA(f)))
        rules["MDA"] = (aggregators.MDA(), byzfl.MDA(f), listed(by_distance.MinimumDiameterAveraging(f)))
    return rules


def against(num_agents: int, dimension: int, f: int) -> None:
    torch = importlib.import_module("torch")
    rows, key = vectors(num_agents, dimension), jax.random.key(0)
    on_device, attackers = jnp.asarray(rows.copy()), jnp.arange(num_agents - f, num_agents)
    repeats = 7 if rows.size > 1e6 else 50
    print(f"\n### Side by side: K = {num_agents}, d = {dimension:,}, f = {f}\n")
    print(
        "| rule | library | difference | theirs, ms | ours, ms | ratio | all receivers: theirs, ms | ours, ms | ratio |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for name, (rule, *theirs) in shared_rules(num_agents, f).items():
        everywhere = aggregators.MoNNA() if name == "MoNNA" else rule  # each receiver's pivot is its own row

        def all_receivers(rule: aggregators.Aggregator = everywhere) -> jax.Array:
            return exchange(rule, on_device, byzantine=attackers, attack=ATTACK, num_byzantine=f, key=key)[0]

        all_receivers()
        ours_all = best_ms(all_receivers, max(2, repeats // 3))
        call = jax.jit(lambda rows, rule=rule: rule(rows, num_byzantine=f))
        result = np.asarray(call(on_device))
        for library, function in zip(("ByzFL", "ByzPy"), theirs, strict=True):
            if function is None:
                continue
            tensors = torch.asarray(rows.copy())  # of their own, since some rules change their input
            difference = np.max(np.abs(np.asarray(function(tensors)) - result)) / np.max(np.abs(result))
            inputs = (tensors, rows.copy()) if library == "ByzFL" else (tensors,)  # ByzPy takes tensors if it can
            ours, *once = best_of_each(
                [partial(call, on_device), *(partial(function, data) for data in inputs)], repeats
            )
            one, every = min(once), num_agents * min(once)
            print(
                f"| {name} | {library} | {difference:.0e} | {one:.3g} | {ours:.3g} | {one / ours:.1f}× "
                f"| {every:.3g} | {ours_all:.3g} | {every / ours_all:.0f}× |",
                flush=True,
            )


def _size(text: str) -> tuple[int, ...]:
    num_agents, dimension = text.split("x")
    return int(num_agents), int(dimension)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=_size, metavar="KxD", help="default: those in docs/results")
    parser.add_argument("--one", choices=list(RULES), help="measure this rule alone at the first size: ms, f, peak GiB")
    parser.add_argument("--without-naive", action="store_true", help="leave out baseline (a)")
    parser.add_argument("--costs", action="store_true", help="compare the rules of the audit's leaderboard instead")
    parser.add_argument("--attacks", action="store_true", help="compare attacks with an exchange without any instead")
    parser.add_argument("--against", action="store_true", help="compare with ByzFL and ByzPy instead")
    arguments = parser.parse_args()
    if arguments.against and arguments.sizes:
        parser.error("--against has two sizes of its own; leave out --sizes.")
    sizes = arguments.sizes or (COSTED_SIZES if arguments.attacks else SIZES)
    if arguments.one:
        one(arguments.one, *sizes[0])
        return
    print(
        f"JAX {jax.__version__} on {jax.devices()[0].platform}, {len(os.sched_getaffinity(0))} cores, attack {ATTACK}"
    )
    if arguments.costs:
        costs(sizes)
        return
    if arguments.attacks:
        attack_costs(sizes)
        return
    if arguments.against:
        for size in AGAINST_SIZES:
            against(*size)
        return
    for num_agents, dimension in sizes:
        if num_agents * dimension > 5e7:
            large_table(num_agents, dimension)
        else:
            table(num_agents, dimension, with_naive=not arguments.without_naive)
    if len(sizes) > 1:
        least_diameter()


if __name__ == "__main__":
    main()
