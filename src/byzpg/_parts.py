"""Parts of the user's own, named `module:Name`: how they are imported, who allows that, and what a run records of them.

Importing a module runs its code. What users name themselves, on the command line, in a .toml file or in Python, is
imported. A file that byzpg wrote may come from someone else, so a module that it names must be one that the user has
named too: in this process, or for an earlier run on this machine. For a manifest, only this process counts.
"""

import ast
import json
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from platformdirs import user_state_path

from byzpg._files import write_atomically
from byzpg.robust.components import nearest

# Modules that the user has named in this process.
_named: set[str] = set()
# What was reported in this process: a run is opened several times by one command.
_reported: set[tuple[str, "Part"]] = set()


class UntrustedCodeError(ValueError):
    """A file names modules that the user has not named."""

    def __init__(self, source: str, modules: Iterable[str]) -> None:
        self.modules = tuple(sorted(modules))
        named = ", ".join(map(repr, self.modules))
        self.problem = (
            f"{source} names the module {named}. Importing it would run its code, and you have not named it yourself"
        )
        super().__init__(f"{self.problem}: if you trust that code, call byzpg.trust({named}) first.")


def on_import(module: str, asked_for: str) -> None:
    """Called before a module is imported, because its code then runs on this machine; see `byzpg.cli`."""


def on_change(message: str) -> None:
    """Called if a module is not the one that a run was made with; see `byzpg.cli`."""
    warnings.warn(message, stacklevel=2)


def trust(*modules: str) -> None:
    """Allow files to name these modules in this process: importing them runs their code.

    Examples:
        >>> trust("my_rules")  # then byzpg.load can open a run whose aggregator is my_rules:MyRule
    """
    _named.update(modules)


def check_trusted(modules: Iterable[str], source: str, *, remembered: bool = True) -> None:
    """Check that the user has named all modules that a file names.

    Args:
        modules: The modules.
        source: The file, for the error message.
        remembered: Whether it is enough that a run on this machine was made with them.

    Raises:
        UntrustedCodeError: If one of them was not named.
    """
    unknown = {each for each in modules if each not in _named and each.partition(".")[0] != "byzpg"}
    known = {None} | (_read_memory() if remembered else set())  # a module that is nowhere runs no code
    unknown = {each for each in unknown if _place(each) not in known}
    if unknown:
        raise UntrustedCodeError(source, unknown)


def remember(modules: Iterable[str]) -> None:
    """Keep for later processes that the user has made a run with these modules, by the places where they were found."""
    places = {place for each in modules if (place := _place(each)) is not None}
    known = _read_memory()
    if not places <= known:
        text = json.dumps(sorted(places | known), indent=2) + "\n"
        try:
            write_atomically(_memory(), lambda file: file.write(text.encode()))
        except OSError:
            return  # nothing can be kept there: the user will be asked again


def _memory() -> Path:
    return user_state_path("byzpg") / "own-modules.json"


def _read_memory() -> set[str]:
    try:
        places = json.loads(_memory().read_text())
    except (OSError, ValueError):
        return set()
    return {each for each in places if isinstance(each, str)} if isinstance(places, list) else set()


def _place(module: str) -> str | None:
    """Where the top-level package of a module is, found without importing anything; None if nowhere.

    The current directory comes first. Where the package has no place, as modules inside the interpreter have none, it
    is the name.
    """
    top, here = module.partition(".")[0], str(Path.cwd())
    is_added = here not in sys.path
    if is_added:
        sys.path.insert(0, here)
    try:
        spec = find_spec(top)
    except ValueError:  # it is loaded, and from nowhere
        return top
    finally:
        if is_added:
            sys.path.remove(here)
    if spec is None:
        return None
    places = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or ())
    return str(Path(places[0]).resolve()) if places else top


def _look_here_for(module: str) -> None:
    """Let a module be imported from the current directory, as `python -m` does, if it is there.

    Only then: in a directory of someone else, later imports of other packages would find files in it, too.
    """
    here, place = Path.cwd(), _place(module)
    if place is not None and str(here) not in sys.path and here.resolve() in Path(place).parents[:2]:
        sys.path.insert(0, str(here))


def load(module: str, asked_for: str, hint: str = "") -> ModuleType:
    """Import a module; the current directory counts, as with `python -m`.

    Args:
        module: Its name.
        asked_for: What the user has written, for messages.
        hint: What else to say if that fails.

    Raises:
        ValueError: If it cannot be imported, whatever the reason.
    """
    _look_here_for(module)
    if module not in sys.modules:
        on_import(module, asked_for)
    try:
        return import_module(module)
    except Exception as error:
        problem = f"{asked_for}: the module {module!r} cannot be imported;{hint}"
        raise ValueError(f"{problem.rstrip(';')} ({type(error).__name__}: {error})") from error


def find(address: str, asked_for: str | None = None) -> Any:
    """Import what `module:Name` names; Name may have dots.

    Args:
        address: The module and the name.
        asked_for: What the user has written, for messages. Default: the address.

    Raises:
        ValueError: If there is no such module, or no such name in it.
    """
    module_name, _, name = address.partition(":")
    found: Any = load(module_name, asked_for or address)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{asked_for or address}: {module_name} has no {part!r}.{nearest(part, dir(found))}")
        found = getattr(found, part)
    return found


@dataclass(frozen=True)
class Call:
    """What `module:Name(option=value)` says: an address, and options that are plain values."""

    address: str
    options: dict[str, Any]

    @property
    def module(self) -> str:
        return self.address.partition(":")[0]


def read_call(text: str) -> Call:
    """Read `module:Name` or `module:Name(option=value, ...)`, as data and never as code.

    Raises:
        ValueError: If it is not written so.

    Examples:
        >>> read_call("my_tasks:make(size=3, kind='round')")
        Call(address='my_tasks:make', options={'size': 3, 'kind': 'round'})
    """
    module, colon, rest = text.strip().partition(":")
    try:
        call = ast.parse(rest.strip(), mode="eval").body
        options = {}
        if isinstance(call, ast.Call):
            if call.args or any(option.arg is None for option in call.keywords):
                raise ValueError
            options = {option.arg or "": ast.literal_eval(option.value) for option in call.keywords}
            call = call.func
        name = ast.unparse(call)
        if not colon or not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
            raise ValueError
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError(
            f"{text!r} is not written as module:Name or module:Name(option=value, ...), with values that are numbers, "
            "quoted texts, tuples, True, False or None."
        ) from None
    return Call(f"{module}:{name}", options)


@dataclass(frozen=True)
class Part:
    """What a run records of a module of the user's own."""

    module: str
    file: str | None  # the name of its file; None if it has none
    sha256: str | None  # of that file
    package: str | None  # the installed package that it belongs to, if any
    version: str | None

    @classmethod
    def of(cls, module: str) -> "Part":
        """Describe a module as it is here; it is imported."""
        where = getattr(load(module, "the run"), "__file__", None)
        path = None if where is None else Path(where)
        package = next(iter(_packages().get(module.partition(".")[0], ())), None)
        return cls(
            module=module,
            file=None if path is None else path.name,
            sha256=sha256(path.read_bytes()).hexdigest() if path is not None and path.is_file() else None,
            package=package,
            version=None if package is None else version(package),
        )

    @classmethod
    def from_data(cls, values: Mapping[str, Any]) -> "Part":
        found = {name: values.get(name) for name in ("module", "file", "sha256", "package", "version")}
        if not isinstance(found["module"], str) or not all(isinstance(each, str | None) for each in found.values()):
            raise ValueError(f"a module must be described by texts, got {values}.")
        return cls(**found)  # pyright: ignore[reportArgumentType]

    def as_data(self) -> dict[str, str]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def _origin(self) -> str:
        package = "" if self.package is None else f" of the package {self.package} {self.version}"
        return f"{self.file or 'no file'}{package}"

    def check(self, source: str) -> None:
        """Import the module again, and report it if it has changed since.

        Raises:
            ValueError: If it cannot be imported any more.
        """
        try:
            now = Part.of(self.module)
        except ValueError as error:
            fix = (
                f"install {self.package} {self.version}"
                if self.package is not None
                else f"run this where {self.file} can be imported, such as in its directory"
            )
            raise ValueError(
                f"{source} was made with {self._origin}, which cannot be imported here: {fix}. {error}"
            ) from None
        if (now.sha256, now.version) != (self.sha256, self.version) and (source, self) not in _reported:
            _reported.add((source, self))
            versions = f", from {self.version} to {now.version}" if now.version != self.version else ""
            on_change(
                f"{source} was made with another {self._origin}: the module {self.module!r} has changed since"
                f"{versions}, and results may differ."
            )


@cache
def _packages() -> Mapping[str, list[str]]:
    return packages_distributions()
