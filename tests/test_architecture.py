"""The shape of the package: imports point one way, only the command line prints, README and CI say the same."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import byzpg

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "byzpg"
# Each may import what stands above it. Packages import each other's modules; their own modules may import each other.
ORDER = [
    "_files",
    "_install",
    "robust",
    "_parts",
    "envs",
    "networks",
    "learning",
    "federation",
    "_registry",
    "testing",
    "config",
    "runs",
    "logs",
    "training",
    "play",
    "_onnx",
    "export",
    "experiments",
    "live",
    "engines",
    "cli",
]
# Exceptions within that order. Tasks may use what all components share, and nothing else of `robust`. They also import
# modules of users. A member behind a
# network needs neither the simulator nor the trainer.
ONLY = {"robust": set(), "envs": {"robust.components", "_parts", "_install"}, "networks": {"robust.components"}}
NEVER = {
    "live": {"federation.simulator", "training"},
    "engines/flower": {"federation.simulator", "training"},
    "config": {"federation.simulator", "federation.members", "federation.devices"},
}


def imported_modules(path: Path) -> set[str]:
    """The modules of byzpg that a file imports, without the leading `byzpg.`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "byzpg":
            assert node.module is not None
            assert node.level == 0
            for alias in node.names:
                module = ROOT / "src" / node.module.replace(".", "/") / alias.name
                is_module = module.with_suffix(".py").is_file() or (module / "__init__.py").is_file()
                names.add(f"{node.module}.{alias.name}" if is_module else node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.split(".")[0] == "byzpg"}
    return {name.removeprefix("byzpg").removeprefix(".") for name in names} - {""}


FILES = sorted(path for path in SOURCES.rglob("*.py") if path.name != "__main__.py")
FILES.remove(SOURCES / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCES)))
def test_imports_point_one_way_and_only_the_command_line_prints(path: Path) -> None:
    inside = path.relative_to(SOURCES)
    home = inside.parts[0].removesuffix(".py")
    imported = imported_modules(path)
    allowed = {*ORDER[: ORDER.index(home)], *([home] if path.parent != SOURCES else [])}
    assert {name.split(".")[0] for name in imported} <= allowed
    if home in ONLY:
        assert {name for name in imported if name.split(".")[0] != home} <= ONLY[home]
    for part, forbidden in NEVER.items():
        if str(inside).startswith(part):
            assert not imported & forbidden
    tree = ast.parse(path.read_text())
    prints = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "print"]
    assert not prints, "use the console of cli"
    if home != "cli":
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        flags = [text for text in texts if re.search(r"(?<![\w(-])--[a-z]", text) and not text.startswith("--")]
        assert not flags, "only cli knows a flag"


def test_what_is_imported_by_its_address() -> None:
    """`_registry` finds components as it finds users' own: the quirks of the published script are such a component."""
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
                found |= {(path.name, n.value) for n in node.args if isinstance(n, ast.Constant)}
    assert found == {("_registry.py", "byzpg.experiments.authors_script")}


def test_every_module_has_its_place() -> None:
    assert {path.relative_to(SOURCES).parts[0].removesuffix(".py") for path in FILES} == set(ORDER)


def test_the_file_of_an_import_is_found() -> None:
    found = imported_modules(SOURCES / "federation" / "simulator.py")
    assert {"envs.host", "federation.algorithms", "robust.exchange", "learning.rollouts"} <= found
    assert "training" in imported_modules(SOURCES / "__init__.py")


@pytest.mark.slow
def test_no_public_function_hides_a_module() -> None:
    program = """
import importlib, pkgutil, types, byzpg
for found in pkgutil.walk_packages(byzpg.__path__, "byzpg."):
    package, _, name = found.name.rpartition(".")
    if name == "__main__" or found.name.startswith(("byzpg.engines.", "byzpg.live.")):
        continue
    module = importlib.import_module(found.name)
    assert getattr(importlib.import_module(package), name) is module, found.name
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_public_names_of_a_package_are_there() -> None:
    for name in ("byzpg", "byzpg.robust", "byzpg.envs", "byzpg.learning", "byzpg.federation"):
        package = importlib.import_module(name)
        assert all(hasattr(package, each) for each in package.__all__), name
    assert set(byzpg.__all__) == {"Config", "Run", "__version__", "load", "resume", "train", "trust"}


def test_benchmarks_and_examples_import_nothing_from_tests() -> None:
    ours = {path.stem for path in (ROOT / "tests").rglob("*.py")}
    for path in [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {alias.name.split(".")[0] for n in nodes if isinstance(n, ast.Import) for alias in n.names}
        names |= {str(n.module).split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom)}
        assert not names & ours, path


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


@pytest.mark.slow
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
