"""What all components (rules, attacks, …) share: they print as they are written, and they check their options."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from difflib import get_close_matches
from math import inf, isfinite
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.errors import JAXIndexError, JAXTypeError
from jax.extend.backend import get_backend

Vectors = Array | np.ndarray


class Component:
    """The base of all components, which are frozen dataclasses.

    A component is hashable, so it can be static under jit. It prints as the expression that makes it, so a run can be
    repeated from its text. A component from outside byzpg prints with its module, as module:Name(option=value).
    """

    # Options that a compiled program may take as data, so that it serves all their values: the component only computes
    # with them, and never decides by them. 0 and None may decide: they stay code. So do numbers that float32 cannot
    # hold. A subclass names its own numbers: it may decide by an option with which its base class only computes.
    numbers: ClassVar[tuple[str, ...]] = ()
    # Whether 0 is one more value of these numbers, by which nothing is decided.
    zero_is_data: ClassVar[bool] = False

    def __str__(self) -> str:
        """Return the shortest expression that makes it: NNM(RFA()), IPM(epsilon=0.1), my_rules:MyRule(size=2)."""
        options = []
        for option in fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, option.name)
            text = str(value) if isinstance(value, Component) else repr(value)
            if option.default is MISSING:
                options.append(text)
            elif value != option.default:
                options.append(f"{option.name}={text}")
        return f"{address(type(self))}({', '.join(options)})"


def is_own(component_class: type) -> bool:
    """Whether a component's class is from outside byzpg."""
    return component_class.__module__.partition(".")[0] != "byzpg"


def address(component_class: type) -> str:
    """How a component's class is named in text: module:Name, or the name alone if it is one of byzpg's.

    A class that cannot be imported by its name, because it is in a function or in the program itself, has its name
    alone too.
    """
    module, name = component_class.__module__, component_class.__qualname__
    if not is_own(component_class) or module == "__main__" or "<locals>" in name:
        return component_class.__name__
    return f"{module}:{name}"


C = TypeVar("C", bound="Component")
Result = TypeVar("Result")


class _Number:
    """Stands for a number in a component whose numbers are data."""

    def __repr__(self) -> str:
        return "·"


_NUMBER = _Number()


def _is_data(component: "Component", value: object) -> bool:
    """Whether a program may take this value of a number as data: it is not 0, and would not become 0 or infinite."""
    if not isinstance(value, float):
        return isinstance(value, Array)
    limits = np.finfo(np.float32)
    return bool(limits.tiny <= abs(value) <= limits.max) or (value == 0 and component.zero_is_data)


def without_numbers(component: C) -> tuple[C, tuple[Any, ...]]:
    """Separate code from data: the component with placeholders for its numbers, and the numbers.

    Components with the same code compare equal then. The components inside it are treated alike.

    Examples:
        >>> from byzpg.robust import IPM, SignFlip
        >>> code, numbers = without_numbers(IPM(epsilon=0.1))
        >>> print(numbers, code == without_numbers(IPM(epsilon=0.7))[0], code == without_numbers(SignFlip())[0])
        (0.1,) True False
        >>> print(with_numbers(code, [0.7]))
        IPM(epsilon=0.7)
    """
    options, numbers = {}, []
    names = vars(type(component)).get("numbers", ())
    if getattr(component, "poisons_play", False):  # the episodes of all federations are one batch
        names = ()
    for option in fields(component):  # pyright: ignore[reportArgumentType]
        value = getattr(component, option.name)
        if option.name in names and _is_data(component, value):
            numbers.append(value)
            value = _NUMBER
        elif isinstance(value, Component):
            value, inside = without_numbers(value)
            numbers += inside
        options[option.name] = value
    return (_made(component, options) if numbers else component), tuple(numbers)


def with_numbers(code: C, numbers: Iterable[Any]) -> C:
    """The inverse of `without_numbers`; the numbers may be arrays, as they are inside a compiled program."""
    return _filled(code, iter(numbers))


def _filled(code: C, numbers: Iterator[Any]) -> C:
    options = {option.name: getattr(code, option.name) for option in fields(code)}  # pyright: ignore[reportArgumentType]
    filled = {
        name: next(numbers) if value is _NUMBER else _filled(value, numbers) if isinstance(value, Component) else value
        for name, value in options.items()
    }
    return code if all(filled[name] is options[name] for name in options) else _made(code, filled)


def _made(component: C, options: dict[str, Any]) -> C:
    """A component of the same class, without its checks: they were made with the numbers in place."""
    made = object.__new__(type(component))
    for name, value in options.items():
        object.__setattr__(made, name, value)
    return made


def plain_name(name: str) -> str:
    """Return the name without case, - and _: avg-zero, AVG_ZERO and AvgZero mean the same."""
    return name.lower().replace("-", "").replace("_", "")


# What other libraries and papers call things, by the name that they have here.
SYNONYMS: dict[str, tuple[str, ...]] = {
    # options
    "step_size": ("learning_rate", "lr", "eta", "policy_lr"),
    "discount": ("gamma", "discount_factor"),
    "decay": ("lr_decay", "learning_rate_decay", "anneal_lr"),
    "adam_epsilon": ("adam_eps", "eps", "epsilon"),
    "num_agents": (
        "agents",
        "num_workers",
        "workers",
        "num_clients",
        "clients",
        "num_peers",
        "nodes",
        "num_nodes",
        "k",
    ),
    "num_byzantine": ("f", "byzantine", "num_faulty", "num_malicious", "num_adversaries", "nb_byz", "tolerance"),
    "num_attackers": ("attackers", "num_declared"),
    "num_seeds": ("seeds", "repetitions", "num_runs", "trials"),
    "seed": ("random_seed", "rng_seed"),
    "trajectories": ("episodes", "num_episodes", "num_trajectories", "iterations"),
    "steps": ("timesteps", "total_timesteps", "num_steps", "env_steps", "frames"),
    "large_batch": ("batch_size", "batch"),
    "small_batch": ("minibatch_size",),
    "rounds": ("agreement_rounds", "gossip_rounds", "kappa"),
    "switch_probability": ("probability", "page_probability", "p"),
    "env": ("task", "environment", "env_id", "env_name"),
    "algorithm": ("algo", "method"),
    "aggregator": ("aggregation", "rule", "gar", "defense", "defence"),
    "hidden": ("hidden_sizes", "hidden_layers", "layers", "net_arch"),
    "horizon": ("max_episode_steps", "max_steps", "episode_length"),
    "directory": ("output_dir", "out_dir", "log_dir", "save_dir", "dir", "out"),
    "devices": ("gpus", "num_gpus"),
    # rules
    "RFA": ("geomed", "geometric_median", "gm", "geomedian", "weiszfeld", "autogm"),
    "Mean": ("average", "avg", "fedavg", "averaging", "plain_averaging"),
    "Median": ("coordinate_wise_median", "coordinate_median", "cw_median", "cwmed", "comed", "marginal_median"),
    "TrimmedMean": ("trmean", "tm", "cwtm", "coordinate_wise_trimmed_mean", "trimmed"),
    "CenteredClipping": ("cc", "centered_clip", "cclip"),
    "NNM": ("nearest_neighbor_mixing", "nearest_neighbour_mixing"),
    "MDA": ("minimum_diameter_averaging", "minimal_diameter_averaging", "brute"),
    "Clipping": ("static_clipping", "norm_clipping"),
    "FedPGFilter": ("fedpg", "fedpgbr"),
    # attacks
    "SignFlip": ("sign_flipping", "bit_flip", "flip", "negation", "reverse_gradient"),
    "ALIE": ("a_little_is_enough", "little", "lie"),
    "IPM": ("inner_product_manipulation", "foe", "fall_of_empires"),
    "LargeNoise": ("noise", "gaussian", "gaussian_noise", "gauss", "random_noise"),
    "NoAttack": ("none", "honest", "no", "benign"),
    "RewardFlip": ("label_flip", "label_flipping", "flip_reward"),
    "NonFinite": ("nan", "inf", "infinity"),
    "Silent": ("crash", "drop", "dropout"),
}


def synonym(name: str, known: Collection[str]) -> str | None:
    """Return the known name for something that others call `name`, or None."""
    called = plain_name(name)
    return next((each for each in known if called in map(plain_name, SYNONYMS.get(each, ()))), None)


def nearest(name: str, known: Collection[str]) -> str:
    """Return the hint " Did you mean 'X'?" for an unknown name, or "" if no known name is similar."""
    if (meant := synonym(name, known)) is not None:
        return f" Did you mean {meant!r}?"
    names = {plain_name(each): each for each in known}
    return "".join(f" Did you mean {names[each]!r}?" for each in get_close_matches(plain_name(name), names, n=1))


def unknown(kind: str, name: str, known: Collection[str]) -> str:
    """Return the error message for a name that is not one of the `known` ones."""
    return f"there is no {kind} {name!r}; known: {', '.join(known)}.{nearest(name, known)}"


def check_choice(component: object, name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError if the option is not one of `choices`."""
    if value not in choices:
        raise ValueError(f"{type(component).__name__}: {name} must be one of {', '.join(choices)}; got {value!r}.")


def check_positive(component: object, **values: float) -> None:
    """Raise ValueError if an option is not a positive finite number."""
    for name, value in values.items():
        if not 0 < value < inf:
            raise ValueError(f"{type(component).__name__}: {name} must be positive, got {value}.")


def check_count(component: object, **values: object) -> None:
    """Raise ValueError if an option is not a positive whole number."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{type(component).__name__}: {name} must be a positive whole number, got {value!r}.")


def check_finite(component: object, **values: float) -> None:
    """Raise ValueError if an option is not a finite number."""
    for name, value in values.items():
        if not isfinite(value):
            raise ValueError(f"{type(component).__name__}: {name} must be a finite number, got {value}.")


def check_num_byzantine(num_byzantine: object) -> int:
    """Return f, or raise TypeError if it is not a Python int."""
    if isinstance(num_byzantine, bool) or not isinstance(num_byzantine, int):
        raise TypeError(f"num_byzantine must be a Python int (it decides shapes), got {type(num_byzantine).__name__}.")
    return num_byzantine


def check_vectors(name: str, vectors: object) -> Array:
    """Return `vectors` as an array [K, d] of floats, with K and d at least 1, or raise TypeError or ValueError."""
    dtype = getattr(vectors, "dtype", None)
    if dtype is None:
        raise TypeError(f"{name} must be an array [K, d] of float32, got {type(vectors).__name__}.")
    if dtype not in (jnp.float32, jnp.float64):
        raise TypeError(f"{name} must be float32 (or float64), got {dtype}; convert it with .astype('float32').")
    array = vectors if isinstance(vectors, Array) else jnp.asarray(vectors)
    if array.ndim != 2:
        raise ValueError(
            f"{name} must have two axes [K, d], one row per sender; got shape {array.shape}"
            f"{' (use jax.vmap for batches)' if array.ndim > 2 else ''}."
        )
    if 0 in array.shape:
        raise ValueError(f"{name} must have at least one row and one column, got shape {array.shape}.")
    return array


def by_platform(*arguments: Any, cuda: Callable[..., Result] | None, default: Callable[..., Result]) -> Result:
    """`lax.platform_dependent`, without tracing a branch that the default backend does not use: both are slow to trace.

    Without a function for CUDA, the default is for all platforms. Programs may run on another platform than that of the
    default backend only if the user has chosen a default device.
    """
    platform = default_platform()
    if platform == "cpu" or cuda is None:
        return default(*arguments)
    if platform == "cuda":
        return cuda(*arguments)
    return lax.platform_dependent(*arguments, cuda=cuda, default=default)


def default_platform() -> str | None:
    """Where programs run, "cpu" or "cuda"; None if that is another platform, or not known."""
    if jax.default_backend() == "cpu":
        return "cpu"
    is_cuda = "cuda" in get_backend().platform_version  # to JAX, ROCm is the backend "gpu" too
    return "cuda" if is_cuda and jax.config.jax_default_device is None else None  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def trying(component: Component, what: str) -> Iterator[None]:
    """Turn whatever a component of the user's own raises on a sample into one error that names it."""
    try:
        yield
    except (JAXTypeError, JAXIndexError) as error:
        raise ValueError(
            f"{component}: {what} cannot be compiled by JAX, because it needs the value of an array before it is "
            "known. Use jax.numpy in place of NumPy, jnp.where in place of if, and jnp.sum over a mask in place of "
            f"rows[mask]. ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        ) from error
    except ValueError as error:
        if str(error).startswith(f"{component}: "):
            raise ValueError(str(error)) from None  # without what JAX adds to errors that pass through it
        raise ValueError(f"{component}: {what} failed on a sample (ValueError: {error})") from error
    except Exception as error:
        raise ValueError(f"{component}: {what} failed on a sample ({type(error).__name__}: {error})") from error


def check_array(component: Component, what: str, result: object, shapes: Collection[tuple[int, ...]]) -> None:
    """Raise ValueError unless `what` gave a JAX array of floats in one of these shapes."""
    wanted = " or ".join(str(list(shape)) for shape in shapes)
    if not isinstance(result, Array | jax.ShapeDtypeStruct):
        raise ValueError(f"{component}: {what} must be a JAX array {wanted}, got {type(result).__name__}.")
    if result.shape not in shapes or not jnp.issubdtype(result.dtype, jnp.floating):
        raise ValueError(f"{component}: {what} must be floats {wanted} here, got {result.dtype} {list(result.shape)}.")


def zeros_for(function: Callable[..., Result], *arguments: Any) -> Result:
    """Zeros in the shapes of function(*arguments), which is not computed: what a loop starts from."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, *arguments))
