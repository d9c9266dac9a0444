"""Traced programs on the disk, so that the next process need not trace them again.

JAX finds a compiled program on the disk by the program's text. To get that text, it traces and lowers Python code,
which takes several seconds for a federation, and as long each time. Here the text is kept, too. It is found by what it
was traced from: byzpg's own files, the versions and settings of what they use, the devices, and the arguments.
"""

import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax import Array, export

import byzpg
from byzpg._files import write_atomically
from byzpg.envs.jax_tasks import JaxTask
from byzpg.networks import Network

# The number of programs that are kept, of some 200 KB each; the ones used least recently make way for new ones.
MOST_KEPT = 100

USED = ("jax", "jaxlib", "numpy", "optax")

# Changes the state in the first argument, and returns it with other results.
Program = Callable[..., tuple[Any, tuple[Array, ...]]]

_directory: Path | None = None
_ready: dict[Any, Program] = {}  # the programs that this process has used


class _UnknownError(Exception):
    """A value may behave in ways that neither byzpg's files nor its text tell."""


def keep_in(directory: Path | None) -> None:
    """Keep traced programs in this directory from now on; with None, keep none."""
    global _directory
    _directory = directory


def ready(function: Program, static: tuple[Any, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> Program:
    """The function, compiled with these options, without tracing it if its text for such arguments is on the disk.

    Only programs for CPUs of this process are kept: programs for GPUs have kernels that JAX cannot read back, and
    several processes must trace the same.

    Args:
        function: A function under `jax.jit` that takes `static` after the arguments. Its first argument is consumed.
        static: What the function was made from, by value. If there is code from outside byzpg in it, nothing is kept.
        arguments: Trees of arrays.
        options: The options of the compiler.
    """
    if _directory is None or jax.default_backend() != "cpu" or jax.process_count() > 1:
        return lambda *arguments: function(*arguments, *static)
    leaves, structure = jax.tree.flatten(arguments)
    kinds = [(jax.typeof(leaf), leaf.sharding) for leaf in leaves]
    surroundings = _surroundings()
    address = function.__name__, static, structure, tuple(kinds), surroundings
    if address not in _ready:
        try:
            told = blake2b("\n".join((surroundings, *map(str, (function.__name__, structure, kinds)))).encode())
            told.update(_text(static).encode())
        except _UnknownError:
            return lambda *arguments: function(*arguments, *static)
        _ready[address] = _made(function, static, arguments, options, _directory / f"{told.hexdigest()[:32]}.trace")
    return _ready[address]


def _made(
    function: Program, static: tuple[Any, ...], arguments: tuple[Any, ...], options: dict[str, Any], path: Path
) -> Program:
    leaves, structure = jax.tree.flatten(arguments)
    state = jax.tree.structure(arguments[0])
    places = [leaf.sharding for leaf in leaves[: state.num_leaves]]

    def flat(*leaves: Array) -> list[Array]:
        # Within another program, a function under `jax.jit` may have no options of the compiler.
        return jax.tree.leaves(function.__wrapped__(*jax.tree.unflatten(structure, leaves), *static))  # pyright: ignore[reportFunctionMemberAccess]

    consumed = {"donate_argnums": tuple(range(state.num_leaves)), "compiler_options": options}
    flat.__name__ = function.__name__  # in logs and profiles
    traced = jax.jit(flat, **consumed)
    known = _read(path)
    if known is None:
        known = _exported(traced, leaves)
        if known is not None:
            _write(path, known)
    # What is read and what was just traced take the same way, so that JAX compiles the same text.
    program = traced if known is None else jax.jit(_named(known.call, function.__name__), **consumed)

    def run(*arguments: Any) -> tuple[Any, tuple[Array, ...]]:
        results = program(*jax.tree.leaves(arguments))
        # What was read says in other words where its results are, and the next call would be another program.
        following = jax.device_put(results[: state.num_leaves], places)
        return jax.tree.unflatten(state, following), tuple(results[state.num_leaves :])

    return run


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def called(*arguments: Any) -> Any:
        return function(*arguments)

    called.__name__ = name
    return called


def _exported(traced: Any, leaves: list[Array]) -> export.Exported | None:
    """The text of a program; None if it calls Python, as a rule with a limited search does."""
    try:
        exported = export.export(traced)(*leaves)
        # Its text alone, as another process reads it: what was traced would have other marks of where it came from.
        return export.deserialize(exported.serialize())
    except (NotImplementedError, ValueError):
        return None


def _read(path: Path) -> export.Exported | None:
    try:
        known = export.deserialize(bytearray(path.read_bytes()))
        path.touch()
    except Exception:  # the file does not exist, or is not whole
        return None
    return known


def _write(path: Path, program: export.Exported) -> None:
    try:
        write_atomically(path, lambda file: file.write(program.serialize()))
        for old in sorted(path.parent.glob("*.trace"), key=lambda each: -each.stat().st_mtime)[MOST_KEPT:]:
            old.unlink(missing_ok=True)
    except OSError:  # the disk is full, say, or another process removes the same files
        pass


def _surroundings() -> str:
    """Everything besides its arguments that decides a program's text."""
    # As they are now: within `jax.default_matmul_precision`, say, they differ from `values`.
    settings = (f"{name}={getattr(jax.config, name, value)}" for name, value in sorted(jax.config.values.items()))
    return "\n".join((_versions(Path(byzpg.__file__).parent), *settings, str(jax.devices())))


@cache
def _versions(package: Path) -> str:
    """The package's own files, and the versions of what they use."""
    code = blake2b()
    for path in sorted(package.rglob("*.py")):
        code.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return "\n".join((code.hexdigest(), sys.version, *(f"{each} {version(each)}" for each in USED)))


def _text(value: Any) -> str:
    """What a value is, in full; values that are equal here behave alike."""
    kind = type(value)
    if kind in (bool, int, float, str, type(None)):
        return repr(value)
    if kind is tuple:
        return f"({', '.join(map(_text, value))})"
    if kind is jax.sharding.Mesh:
        return repr((value, value.devices))
    belongs = kind.__module__.startswith("byzpg.") and vars(sys.modules[kind.__module__]).get(kind.__name__) is kind
    if not belongs or isinstance(value, JaxTask | Network):  # these two call the code of others
        raise _UnknownError
    names = [option.name for option in fields(value)] if is_dataclass(value) else []
    if set(names) != set(vars(value)):
        raise _UnknownError
    return f"{kind.__module__}.{kind.__name__}({', '.join(f'{name}={_text(getattr(value, name))}' for name in names)})"
