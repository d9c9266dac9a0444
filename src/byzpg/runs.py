"""A run: what was trained and how it went, in memory or as a directory. The only module that writes run files.

A directory holds
  config.json       every option, resolved; `Config.load` reads it
  provenance.json   the command, versions and machine
  parts.json        if it names modules outside byzpg: their files' hashes and their packages' versions
  checkpoint.npz    what continues the run bit for bit: state, entries done, metrics so far, a hash of config.json;
                    environments on the host that go on between iterations cannot be saved, and begin anew;
                    of an extended run, also where it was extended
  metrics.npz       once complete: trajectories (or steps, see `Run.progress`), large and every metric, all
                    [seed, iteration]
  parameters.npz    once complete: last, uniform [seed, agent, d] (at a server: one agent), and output_iteration [seed]
Every file is written whole or not at all, and none holds a pickle.
"""

import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from byzpg import _parts
from byzpg._files import write_atomically
from byzpg._install import install
from byzpg.config import Config, Settings
from byzpg.federation.schedule import Extension, Plan
from byzpg.learning.policies import Policy

if TYPE_CHECKING:  # an extra
    import pandas

# The metrics that older checkpoints lack, and what they were in all their iterations; see also `config.FORMERLY`.
FORMERLY = {"gradient_squared": np.nan, "episodes": np.nan}  # the one was never known, the other not recorded


@dataclass(frozen=True, eq=False)
class TrainedPolicy:
    """A policy with its parameters."""

    policy: Policy
    parameters: np.ndarray = field(repr=False)  # [d]
    _calls: Iterator[int] = field(default_factory=count, init=False, repr=False)  # numbers those without a key

    def act(self, observation: npt.ArrayLike, key: jax.Array | None = None, *, greedy: bool = False) -> np.ndarray:
        """Draw actions from the policy, as in training, at observations [..., features].

        Args:
            observation: One observation, or many.
            key: A random key to draw with. Default: one that depends on how often this object has drawn without a key,
                so calls in a row differ, and a program that loads a policy and plays acts alike every time.
            greedy: Take the most likely action instead. It can be far worse than what was trained.
        """
        if greedy and key is not None:
            raise ValueError("greedy actions are not drawn: leave out key, or greedy.")
        seen = np.asarray(observation, np.float32)
        if seen.shape[-1:] != (self.policy.observation_size,):
            raise ValueError(
                f"observation must have {self.policy.observation_size} features in its last axis, got {seen.shape}."
            )
        if not greedy and key is None:
            key = jax.random.fold_in(jax.random.key(0), next(self._calls))
        return np.asarray(_act(self.policy, self.parameters, seen, key))


@partial(jax.jit, static_argnames="policy")
def _act(policy: Policy, parameters: jax.Array, observation: jax.Array, key: jax.Array | None) -> jax.Array:
    weights = policy.unflatten(parameters)
    outputs = policy.outputs(weights, observation)
    if key is None:
        return policy.mode(weights, outputs)
    return policy.draw(weights, outputs, jax.random.uniform(key, (*outputs.shape[:-1], policy.noise_size)))


@dataclass(frozen=True, eq=False)
class Run:
    """A run and its results, so far or complete.

    Every seed tosses its own coin, so seeds may have different numbers of iterations. After the last one of a seed,
    `progress` stays the same, `large` is False and metrics are NaN.
    """

    settings: Settings
    # [seed, iteration], per agent, up to and including the iteration, in trajectories or, with a critic, in steps
    progress: np.ndarray
    large: np.ndarray  # [seed, iteration], whether it sampled a large batch
    metrics: Mapping[str, np.ndarray]  # name: [seed, iteration], documented in federation.metrics
    parameters: Mapping[str, np.ndarray]  # last, uniform: [seed, agent, d]
    output_iteration: np.ndarray  # T̂ [seed]
    complete: bool

    @classmethod
    def of(
        cls,
        settings: Settings,
        plans: Sequence[Plan],
        *,
        metrics: Mapping[str, np.ndarray],
        last: np.ndarray,
        uniform: np.ndarray,
        done: np.ndarray | None = None,
    ) -> "Run":
        """Build a run, complete or as far as its metrics go.

        Args:
            settings: What was trained.
            plans: For each seed, the batches of all its iterations.
            metrics: By name, values [seed, iteration].
            last: The latest parameters [seed, agent, d].
            uniform: The parameters at iteration T̂, in the same shape.
            done: The number of iterations [seed] that are done. Default: as many as there are metrics.
        """
        width = metrics["return_mean"].shape[1]
        ends = np.full(len(plans), width) if done is None else done
        progress, large = np.zeros((len(plans), width), int), np.zeros((len(plans), width), bool)
        for seed, (plan, end) in enumerate(zip(plans, ends, strict=True)):
            progress[seed, :end] = plan.progress[:end]
            progress[seed, end:] = plan.progress[end - 1]
            large[seed, :end] = plan.large[:end]
        return cls(
            settings=settings,
            progress=progress,
            large=large,
            metrics=metrics,
            parameters={"last": last, "uniform": uniform},
            output_iteration=np.asarray([plan.output_iteration for plan in plans]),
            complete=all(end == plan.num_iterations for plan, end in zip(plans, ends, strict=True)),
        )

    def __repr__(self) -> str:
        settings, ends = self.settings, self.num_iterations - 1
        attack = f" ({settings.num_attackers} attacking, {settings.attack})" if settings.num_attackers else ""
        agents = f"{settings.num_agents} agent{'s' * (settings.num_agents > 1)}{attack}"
        seeds = f"{settings.num_seeds} seed{'s' * (settings.num_seeds > 1)}"
        reached = f"{np.max(self.progress)}{'' if self.complete else f' of {settings.length}'} {settings.unit}"
        last = np.mean(self.returns[np.arange(len(ends)), ends])
        return f"Run({settings.env}, {settings.algorithm}, {agents}, {seeds}, {reached}, last return {last:.4g})"

    @property
    def num_iterations(self) -> np.ndarray:
        """The number of iterations [seed] that are done."""
        return np.sum(np.diff(self.progress, prepend=0, axis=1) > 0, axis=1)

    @property
    def trajectories(self) -> np.ndarray:
        """Trajectories per agent [seed, iteration] up to and including the iteration; of PPO, those that ended."""
        if self.settings.unit == "trajectories":
            return self.progress
        return np.cumsum(np.nan_to_num(self.metrics["episodes"]), axis=1)

    @property
    def steps(self) -> np.ndarray:
        """Environment steps per agent [seed, iteration], up to and including the iteration; a mean over players."""
        if self.settings.unit == "steps":
            return self.progress
        federation = self.settings.federation()
        players = np.where(self.large, federation.num_players(True), federation.num_players(False))
        if self.parameters["last"].shape[1] < federation.num_holders:  # of a live member, which knows its own steps
            players = 1
        return np.cumsum(np.nan_to_num(self.metrics["environment_steps"]) / players, axis=1)

    @property
    def returns(self) -> np.ndarray:
        """Mean undiscounted training return of the honest agents [seed, iteration].

        With a critic, iterations before the first episode has ended have the first return that is known.
        """
        returns, ended = self.metrics["return_mean"], self.metrics.get("episodes")
        if not self.settings.has_critic or ended is None:
            return returns
        some = np.cumsum(np.nan_to_num(ended), axis=1) > 0
        first = np.take_along_axis(returns, np.argmax(some, axis=1)[:, None], axis=1)
        return np.where(some | ~np.any(some, axis=1, keepdims=True) | np.isnan(returns), returns, first)

    @property
    def diverged(self) -> list[int]:
        """The seeds whose parameters are no longer finite numbers."""
        finite = np.all(np.isfinite(self.parameters["last"]), axis=(1, 2))
        return [self.settings.seed + int(index) for index in np.flatnonzero(~finite)]

    def to_dataframe(self) -> "pandas.DataFrame":
        """A table with one row per seed and iteration that is done, as a pandas DataFrame.

        The columns are seed, iteration (from 0), trajectories or steps, large, and all metrics, as in a log of the run.

        Raises:
            ValueError: If pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise ValueError(f"to_dataframe needs pandas: {install('pandas')}.") from None
        seed, iteration = np.nonzero(np.arange(self.progress.shape[1]) < self.num_iterations[:, None])
        columns: dict[str, np.ndarray] = {
            "seed": self.settings.seed + seed,
            "iteration": iteration,
            self.settings.unit: self.progress[seed, iteration],
            "large": self.large[seed, iteration],
        }
        columns |= {name: np.asarray(values, float)[seed, iteration] for name, values in self.metrics.items()}
        return pandas.DataFrame(columns)

    def policy(self, seed: int = 0, agent: int = 0, output: str | None = None) -> TrainedPolicy:
        """The trained policy of one agent.

        Args:
            seed: Index of the seed among the run's seeds, from 0.
            agent: Index of the agent; a run with a server has one.
            output: "last", "uniform", or None for what the settings say.
        """
        learner = self.settings.federation().agent
        held = jnp.asarray(self.held(seed, agent, output))
        return TrainedPolicy(learner.deployed_policy, np.asarray(learner.deployed(held[None])[0]))

    def held(self, seed: int = 0, agent: int = 0, output: str | None = None) -> np.ndarray:
        """The parameters θ [d] of one agent, with all that is not its policy's; arguments as for `policy`."""
        output = self.settings.output if output is None else output
        if output not in self.parameters:
            raise ValueError(f"output must be last or uniform, got {output!r}.")
        held = self.parameters[output]
        for name, index, size in (("seed", seed, len(held)), ("agent", agent, held.shape[1])):
            if not 0 <= index < size:
                raise ValueError(f"{name} must be 0 to {size - 1}, got {index}.")
        if output == "uniform" and self.num_iterations[seed] <= self.output_iteration[seed]:
            raise ValueError(
                f"iteration T̂ = {self.output_iteration[seed]} of this seed has not come yet: finish the run, or use "
                "output = 'last'."
            )
        return held[seed, agent]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What continues a run."""

    iteration: int  # entries of the timetable that are done; where seeds share one coin, iterations
    state: list[np.ndarray]  # leaves of the simulation's state
    metrics: dict[str, np.ndarray]  # name: [seed, entry]
    extension: Extension | None = None  # of a run that was extended

    def as_arrays(self) -> dict[str, Any]:
        """All of it by name; `of` reads it back."""
        arrays: dict[str, Any] = {f"state_{index}": leaf for index, leaf in enumerate(self.state)}
        arrays |= {f"metric_{name}": values for name, values in self.metrics.items()}
        if self.extension is not None:
            arrays |= {f"extension_{name}": values for name, values in vars(self.extension).items()}
        return arrays | {"iteration": self.iteration}

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> "Checkpoint":
        state = [arrays[f"state_{index}"] for index in range(sum(name.startswith("state_") for name in arrays))]
        metrics = {
            name.removeprefix("metric_"): values for name, values in arrays.items() if name.startswith("metric_")
        }
        if "return_mean" in metrics:
            for name, value in FORMERLY.items():
                metrics.setdefault(name, np.full_like(metrics["return_mean"], value))
        extension = None
        if "extension_begin" in arrays:
            extension = Extension(arrays["extension_begin"], arrays["extension_output_iteration"])
        return cls(int(arrays["iteration"]), state, metrics, extension)


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, settings: Settings, about: Mapping[str, Any] | None = None) -> "RunDirectory":
        """Create the directory of a new run, with `about` as its provenance; one that holds anything is refused."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            if (path / "config.json").exists():
                raise ValueError(f"{path} already holds a run: choose another directory, or `byzpg resume {path}`.")
            raise ValueError(f"{path} is not an empty directory: choose another one.")
        settings.check_readable()
        parts = [_parts.Part.of(module).as_data() for module in sorted(settings.own_modules)]
        path.mkdir(parents=True, exist_ok=True)
        directory = cls(path)
        if parts:
            directory._write_json("parts.json", {"modules": parts})
            _parts.remember(settings.own_modules)
        directory._write_json("config.json", settings.as_data())
        directory.write_provenance(provenance() if about is None else about)
        return directory

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} holds no run: there is no config.json in it.")
        return cls(path)

    def settings(self) -> Settings:
        """What was trained. Modules outside byzpg are imported again, and reported if they have changed.

        Raises:
            UntrustedCodeError: If the user has not named one of these modules.
            ValueError: If a module is missing, or the options are wrong.
        """
        config = Config.load(self.path / "config.json")
        for part in self._parts():
            if part.module in config.own_modules:
                part.check(str(self.path))
        return config.resolved()

    def _parts(self) -> list[_parts.Part]:
        """The modules outside byzpg that the run was made with; none are recorded by byzpg before 0.3."""
        path = self.path / "parts.json"
        if not path.is_file():
            return []
        with _reading(str(path)):
            return [_parts.Part.from_data(values) for values in json.loads(path.read_text(encoding="utf-8"))["modules"]]

    @property
    def complete(self) -> bool:
        return (self.path / "parameters.npz").is_file()

    def write_provenance(self, about: Mapping[str, Any]) -> None:
        self._write_json("provenance.json", about)

    def read_provenance(self) -> dict[str, Any]:
        path = self.path / "provenance.json"
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} cannot be read: {error}") from None

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._write_arrays("checkpoint.npz", checkpoint.as_arrays() | {"config": self._config_digest()})

    def extend(self, settings: Settings, checkpoint: Checkpoint) -> None:
        """Turn a complete run into an unfinished one with a longer plan; stopped anywhere, it is one or the other."""
        longer = _as_json(settings.as_data())
        both = np.stack([self._config_digest(), _digest(longer)])
        self._write_arrays("checkpoint.npz", checkpoint.as_arrays() | {"config": both})
        (self.path / "parameters.npz").unlink()
        (self.path / "metrics.npz").unlink()
        write_atomically(self.path / "config.json", lambda file: file.write(longer))

    def read_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint, or None if there is none yet; one of another configuration is an error."""
        if not (self.path / "checkpoint.npz").is_file():
            return None
        arrays = self._read_arrays("checkpoint.npz")
        digests = np.atleast_2d(arrays.get("config", np.zeros(0)))  # two, where a run is being extended
        if not any(np.array_equal(each, self._config_digest()) for each in digests):
            raise ValueError(
                f"{self.path / 'checkpoint.npz'} belongs to another configuration than the config.json beside it: "
                "put that config.json back, or train again in another directory."
            )
        return Checkpoint.of(arrays)

    def write_results(self, run: Run) -> None:
        metrics, parameters = _tables(run)
        self._write_arrays("metrics.npz", metrics)
        # Last, since it marks the run as complete.
        self._write_arrays("parameters.npz", parameters)

    def read_results(self) -> Run:
        tables = self._read_arrays("metrics.npz"), self._read_arrays("parameters.npz")
        return _complete(self.settings(), *tables, str(self.path))

    def _config_digest(self) -> np.ndarray:
        return _digest((self.path / "config.json").read_bytes())

    def _write_json(self, name: str, values: Mapping[str, Any]) -> None:
        write_atomically(self.path / name, lambda file: file.write(_as_json(values)))

    def _write_arrays(self, name: str, arrays: Mapping[str, Any]) -> None:
        write_atomically(self.path / name, lambda file: np.savez(file, allow_pickle=False, **arrays))

    def _read_arrays(self, name: str) -> dict[str, np.ndarray]:
        path = self.path / name
        with _reading(str(path)), path.open("rb") as file:
            return _arrays(file)


def _as_json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def _digest(content: bytes) -> np.ndarray:
    return np.frombuffer(sha256(content).digest(), np.uint8)


def packed(run: Run) -> bytes:
    """The results of a complete run as bytes, for a process that shares no files: an .npz without pickles."""
    whole = BytesIO()
    named = zip(("metrics", "parameters"), _tables(run), strict=True)
    arrays = {f"{table}/{name}": values for table, columns in named for name, values in columns.items()}
    np.savez(whole, allow_pickle=False, **arrays)
    return whole.getvalue()


def unpacked(settings: Settings, whole: bytes, source: str) -> Run:
    """The inverse of `packed`."""
    with _reading(source):
        arrays = _arrays(BytesIO(whole))
    tables: dict[str, dict[str, np.ndarray]] = {"metrics": {}, "parameters": {}}
    for name, values in arrays.items():
        table, _, column = name.partition("/")
        tables.setdefault(table, {})[column] = values
    return _complete(settings, tables["metrics"], tables["parameters"], source)


def _tables(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of metrics.npz and parameters.npz."""
    columns = {run.settings.unit: run.progress, "large": run.large, **run.metrics}
    return columns, {**run.parameters, "output_iteration": run.output_iteration}


def _complete(
    settings: Settings, metrics: dict[str, np.ndarray], parameters: dict[str, np.ndarray], source: str
) -> Run:
    try:
        progress, large = metrics.pop(settings.unit), metrics.pop("large")
        output_iteration = parameters.pop("output_iteration")
        num_seeds = len(parameters["last"])
    except KeyError as error:
        raise ValueError(f"{source}: the results lack {error}.") from None
    # In older files, all seeds share one plan, and these have no axis for seeds.
    return Run(
        settings=settings,
        progress=np.broadcast_to(progress, (num_seeds, progress.shape[-1])),
        large=np.broadcast_to(large, (num_seeds, large.shape[-1])),
        metrics=metrics,
        parameters=parameters,
        output_iteration=np.broadcast_to(output_iteration, num_seeds),
        complete=True,
    )


@contextmanager
def _reading(source: str) -> Iterator[None]:
    """Turn whatever NumPy raises at a broken file into one clear error."""
    try:
        yield
    except (OSError, ValueError, TypeError, AttributeError, KeyError, BadZipFile, EOFError) as error:
        raise ValueError(f"{source} cannot be read: {error}") from None


def _arrays(file: IO[bytes]) -> dict[str, np.ndarray]:
    with np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def provenance() -> dict[str, Any]:
    """The command, versions and machine of this process."""
    devices = jax.local_devices()
    return {
        "command": sys.argv,
        "versions": {name: version(name) for name in ("byzpg", "jax", "jaxlib", "numpy", "optax")},
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "devices": [str(device.device_kind) for device in devices],
    }
