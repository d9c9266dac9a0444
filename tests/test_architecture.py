"""The shape of the package: imports point one way, only the command line prints, README and CI say the same."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = [
    "files",
    "components",
    "cluster",
    "order_statistics",
    "clouds",
    "least_diameter",
    "rules",
    "aggregators",
    "agreement",
    "attacks",
    "exchange",
    "robustness",
    "coin",
    "published",
    "spaces",
    "envs",
    "policies",
    "kernels",
    "rollouts",
    "lockstep",
    "gradients",
    "registry",
    "algorithms",
    "simulate",
    "config",
    "runs",
    "training",
    "learner",
    "play",
    "statistics",
    "experiments",
    "results",
    "summaries",
    "figures",
    "report",
    "sweeps",
    "live",
    "engines",
    "cli",
]


def imported_modules(tree: ast.Module) -> set[str]:
    """The byzpg modules a file imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "byzpg":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("byzpg."):
            names.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("byzpg.")}
    return names


SOURCES = ROOT / "src" / "byzpg"


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCES)))
def test_imports_point_one_way_and_only_the_command_line_prints(path: Path) -> None:
    tree = ast.parse(path.read_text())
    module = path.relative_to(SOURCES).parts[0].removesuffix(".py")
    if module in ("__init__", "__main__"):
        return
    itself = {module} if path.parent != SOURCES else set()  # a folder's files may import each other
    assert imported_modules(tree) <= set(ORDER[: ORDER.index(module)]) | itself
    prints = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "print"]
    assert not prints, "use the console of cli"


def test_ci_runs_the_readme_test_command() -> None:
    blocks = (ROOT / "README.md").read_text().split("```bash\n")[1:]
    commands = [block.split("\n```")[0] for block in blocks]
    test_command = next(command for command in commands if "pytest" in command)
    script = (ROOT / ".ci" / "run").read_text()
    assert test_command in script.splitlines()
    assert script.startswith("#!/usr/bin/env bash\nset -euo pipefail\n")


def test_the_command_line_starts_without_what_only_some_commands_need() -> None:
    slow = ("matplotlib", "grpc", "ray", "jax.experimental.pallas")
    program = f"import sys, byzpg.cli; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_sixty_four_bits_keep_the_type_of_the_input() -> None:
    """With JAX's x64 mode on, float32 stays float32, and float64 is computed in float64."""
    program = """
import jax, numpy as np
jax.config.update("jax_enable_x64", True)
import twins
from byzpg.robust import aggregators, attacks
from byzpg.robust.exchange import exchange
rng = np.random.default_rng(0)
for dtype, tolerance in ((np.float32, 1e-4), (np.float64, 1e-9)):
    rows = (rng.normal(size=(13, 5)) + 3).astype(dtype)
    for rule, twin in [
        (aggregators.MDA(), twins.mda(rows, 5)),  # by search: with f = 4, it would be by the table of subsets
        (aggregators.NNM(aggregators.TrimmedMean()), twins.trimmed_mean(twins.nnm(rows.astype(float), 5), 5)),
        (aggregators.CAF(), twins.caf(rows, 5)),
    ]:
        result = rule(rows, num_byzantine=5)
        assert result.dtype == dtype, (rule, result.dtype)
        np.testing.assert_allclose(result, twin, rtol=tolerance)
    noise, key = attacks.LargeNoise(), jax.random.key(0)
    agreed, _ = exchange(rule, rows, byzantine=[0, 1], attack=noise, num_byzantine=5, key=key)
    assert agreed.dtype == dtype
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks" / "references")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
