"""What `plot`, `report` and the export of scores read: runs, folders of runs such as sweeps, and experiments."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from byzpg.cli.console import counted, say
from byzpg.runs import Run, RunDirectory

if TYPE_CHECKING:
    from byzpg.experiments.results import Results

WHAT = "the directory of a run, of a sweep or of `byzpg reproduce`, or an .npz file of `byzpg reproduce`"


@dataclass(frozen=True)
class Inputs:
    """Everything that was named, in order."""

    runs: dict[Path, Run] = field(default_factory=dict)  # where several differ in the seed alone, they are one
    made_by: list[dict[str, Any]] = field(default_factory=list)  # the provenance of every run
    results: "list[Results]" = field(default_factory=list)


def read_inputs(paths: Sequence[Path]) -> Inputs:
    """Load what the paths name; runs that have not reached a checkpoint are left out, unless they are named alone."""
    from byzpg import training
    from byzpg.experiments.results import Results, joined

    inputs, alike, early = Inputs(), dict[Any, dict[Path, Run]](), 0
    for path in paths:
        if path.suffix == ".npz" and not path.is_dir():
            inputs.results.append(Results.load(path))
            continue
        for directory in _directories(path):
            if directory != path and not _has_begun(directory):
                early += 1
                continue
            run = training.load(directory)
            # A run that was named alone stays alone; those of a folder are repetitions if only their seeds differ. With
            # the same seed, it would be the same numbers again.
            group = directory if directory == path else (path, replace(run.settings, seed=0))
            if any({*run.settings.seeds} & {*other.settings.seeds} for other in alike.get(group, {}).values()):
                group = directory
            alike.setdefault(group, {})[directory] = run
            inputs.made_by.append(_provenance(directory))
    for group in alike.values():
        first = next(iter(group))
        more = f" and {counted(len(group) - 1, 'other seed')}" if len(group) > 1 else ""
        inputs.runs[first.with_name(first.name + more)] = joined(list(group.values()))
    if early:
        say(f"{counted(early, 'run')} without a checkpoint yet: left out.")
    if not inputs.runs and not inputs.results:
        raise ValueError(f"no run in {', '.join(map(str, paths))} has reached its first checkpoint.")
    return inputs


def _directories(path: Path) -> Iterator[Path]:
    """The runs at a path: it is one, or they are in it, or in its folder `runs`."""
    if (path / "config.json").is_file():
        yield path
        return
    folders = [path / "runs", path]
    found = [sorted(each.glob("*/config.json")) for each in folders]
    if not any(found):
        raise ValueError(f"{path} holds no run: name {WHAT}.")
    yield from (config.parent for config in next(filter(None, found)))


def _has_begun(directory: Path) -> bool:
    return RunDirectory(directory).complete or (directory / "checkpoint.npz").is_file()


def _provenance(directory: Path) -> dict[str, Any]:
    about = RunDirectory(directory).read_provenance()
    program, *arguments = about["command"]
    called = ["byzpg"] if Path(program).name in ("byzpg", "__main__.py") else ["python", program]
    return {**about, "command": shlex.join([*called, *arguments])}
