"""Networks of your own, in place of the built-in multilayer perceptron.

A network is a pair of pure functions: `init(key, observation)` draws parameters (any pytree of float32 arrays), and
`apply(parameters, observation)` computes the outputs for one observation [feature]. byzpg vectorizes `apply`, keeps the
parameters as one flat vector θ, and turns the outputs into a distribution over actions.

The number of outputs is the number of actions or, for continuous actions, of the numbers of an action. A network that
asks for `num_outputs` in the signature of `init` (and `apply`, if needed) fits every task, and can be a critic.

Examples:
    >>> from dataclasses import dataclass
    >>> import jax, jax.numpy as jnp
    >>> from byzpg.networks import Network
    >>> @dataclass(frozen=True)
    ... class Linear(Network):
    ...     scale: float = 0.1
    ...
    ...     def init(self, key, observation, num_outputs):
    ...         return {"matrix": self.scale * jax.random.normal(key, (observation.size, num_outputs))}
    ...
    ...     def apply(self, parameters, observation):
    ...         return observation @ parameters["matrix"]
    >>> from byzpg import Config
    >>> Config(policy=Linear()).resolved().bound_policy().dimension  # CartPole: 4 features, 2 actions
    8
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import lru_cache, partial
from inspect import Parameter, signature
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from byzpg.robust.components import Component

Tree = Any  # a pytree of arrays


class Network(Component):
    """The base of networks of your own, which are frozen dataclasses with two methods.

    ```
    init(self, key, observation) → parameters           or init(self, key, observation, num_outputs)
    apply(self, parameters, observation) → outputs      or apply(self, parameters, observation, num_outputs)
    ```

    `observation` is one vector [feature]; `outputs` are [num_outputs].
    """

    @abstractmethod
    def init(self, *args: Any, **kwargs: Any) -> Tree:
        """Draw the parameters: a pytree of float32 arrays."""

    @abstractmethod
    def apply(self, *args: Any, **kwargs: Any) -> Array:
        """The outputs for one observation."""

    @property
    def has_any_size(self) -> bool:
        """Whether the network can have any number of outputs."""
        return "num_outputs" in signature(self.init).parameters


@dataclass(frozen=True)
class Pair(Network):
    """A network of two functions, such as `Pair(module.init, module.apply)` of a library whose modules have both.

    It has no text form, so a run with it can be trained in memory, but not in a directory.
    """

    init_function: Callable[..., Tree]
    apply_function: Callable[..., Array]

    @property
    def init(self) -> Callable[..., Tree]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.init_function

    @property
    def apply(self) -> Callable[..., Array]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.apply_function


def drawn(network: Network, key: Array, observation_size: int, num_outputs: int) -> Tree:
    """Draw the network's parameters."""
    return _call(network.init, key, jnp.zeros(observation_size), num_outputs=num_outputs)


def outputs(network: Network, parameters: Tree, observations: Array, num_outputs: int) -> Array:
    """The outputs [..., num_outputs] at observations [..., feature].

    Products are computed in full float32 unless the network says otherwise: on GPUs, JAX would round to fewer bits,
    and play and gradients would disagree about probabilities.
    """
    apply = partial(_call, network.apply, num_outputs=num_outputs)
    for _ in range(observations.ndim - 1):
        apply = jax.vmap(apply, (None, 0))
    with jax.default_matmul_precision("highest"):
        return apply(parameters, observations).astype(observations.dtype)


def _call(function: Callable[..., Any], *arguments: Any, num_outputs: int) -> Any:
    more = {"num_outputs": num_outputs} if "num_outputs" in signature(function).parameters else {}
    return function(*arguments, **more)


@lru_cache(maxsize=256)
def parameter_shapes(network: Network, observation_size: int, num_outputs: int) -> Tree:
    """The shapes of the network's parameters, once it is known to be sound.

    Raises:
        ValueError: If it is not; the message names the function, what it returned, and what it must return.
    """
    observation = jax.ShapeDtypeStruct((observation_size,), jnp.float32)
    given = f"for an observation [{observation_size}]"
    shapes = _traced(
        f"{network}.init", given, lambda key: drawn(network, key, observation_size, num_outputs), _abstract_key()
    )
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    if not leaves:
        raise ValueError(f"{network}.init must return a pytree of float32 arrays, got no array {given}.")
    for path, leaf in leaves:
        if leaf.dtype not in (jnp.float32, jnp.float64):
            name = f" of {text}" if (text := jax.tree_util.keystr(path)) else ""
            raise ValueError(f"{network}.init must return float32 arrays, got {leaf.dtype}{list(leaf.shape)}{name}.")
    found = _traced(
        f"{network}.apply",
        given,
        lambda *both: _call(network.apply, *both, num_outputs=num_outputs),
        shapes,
        observation,
    )
    if not isinstance(found, jax.ShapeDtypeStruct) or not jnp.issubdtype(found.dtype, jnp.floating):
        what = f"an array of {found.dtype}" if isinstance(found, jax.ShapeDtypeStruct) else type(found).__name__
        raise ValueError(f"{network}.apply must return one array of floats, got {what}.")
    if found.shape != (num_outputs,):
        fix = "" if network.has_any_size else "; let init take num_outputs if it is to fit every task"
        raise ValueError(
            f"{network}.apply must return {num_outputs} outputs [{num_outputs}] {given}, got {list(found.shape)}{fix}."
        )
    return shapes


def check(network: object) -> None:
    """Raise a ValueError unless the object is a network that can be a part of compiled programs."""
    kind = type(network)
    if not isinstance(network, Network):
        raise ValueError(f"a network must derive from byzpg.networks.Network (or be a Pair), got {kind.__name__}.")
    parameters = getattr(kind, "__dataclass_params__", None)
    if (
        not is_dataclass(kind)
        or parameters is None
        or not parameters.frozen
        or "__dataclass_fields__" not in vars(kind)
    ):
        raise ValueError(f"{kind.__name__} must be a frozen dataclass: write @dataclass(frozen=True) above the class.")
    try:
        hash(network)
    except TypeError as error:
        raise ValueError(f"{network}: the options of a network must be hashable ({error}): use tuples.") from None


def _abstract_key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


def _traced(name: str, given: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The shapes that a user's function returns, or one clear error."""
    try:
        return jax.eval_shape(function, *arguments)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise ValueError(f"{name} fails {given}: {type(error).__name__}: {lines[0]}") from error


# Modules of other libraries


def flax_linen(function: Callable[..., Any]) -> Callable[..., Network]:
    """Make a network class of a function that returns a Flax Linen module.

    The function asks for `num_outputs` by name; its other arguments, with defaults, are the options of the network.

    Examples:
        ```python
        @byzpg.networks.flax_linen
        def small(num_outputs, width: int = 32):
            return nn.Sequential([nn.Dense(width), nn.tanh, nn.Dense(num_outputs)])

        Config(policy=small(width=16))
        ```
    """
    return _network_class(function, _Linen)


def flax_nnx(function: Callable[..., Any]) -> Callable[..., Network]:
    """Make a network class of a function that returns a Flax NNX module.

    The function asks for `observation_size`, `num_outputs` and `rngs` by name; its other arguments are options.

    Examples:
        ```python
        @byzpg.networks.flax_nnx
        def small(observation_size, num_outputs, rngs, width: int = 32):
            first, last = nnx.Linear(observation_size, width, rngs=rngs), nnx.Linear(width, num_outputs, rngs=rngs)
            return nnx.Sequential(first, nnx.tanh, last)
        ```
    """
    return _network_class(function, _NNX)


def equinox(function: Callable[..., Any]) -> Callable[..., Network]:
    """Make a network class of a function that returns an Equinox module.

    The function asks for `observation_size`, `num_outputs` and `key` by name; its other arguments are options.

    Examples:
        ```python
        @byzpg.networks.equinox
        def small(observation_size, num_outputs, key, width: int = 32):
            return eqx.nn.MLP(observation_size, num_outputs, width, depth=2, key=key)
        ```
    """
    return _network_class(function, _Equinox)


class _Made(Network):
    """A network whose module a function makes."""

    _function: ClassVar[Callable[..., Any]]
    _given: ClassVar[tuple[str, ...]] = ("num_outputs",)

    @property
    def has_any_size(self) -> bool:
        return "num_outputs" in signature(type(self)._function).parameters

    def _module(self, **given: Any) -> Any:
        options = {each.name: getattr(self, each.name) for each in fields(self)}  # pyright: ignore[reportArgumentType]
        asked = signature(type(self)._function).parameters
        return type(self)._function(**options, **{name: value for name, value in given.items() if name in asked})


def _network_class(function: Callable[..., Any], base: type[_Made]) -> Callable[..., Network]:
    options = []
    for each in signature(function, eval_str=True).parameters.values():
        if each.name in base._given:
            continue
        if each.default is Parameter.empty or each.kind not in (
            Parameter.POSITIONAL_OR_KEYWORD,
            Parameter.KEYWORD_ONLY,
        ):
            raise ValueError(
                f"{function.__name__}: {each.name} must have a default, or be one of {', '.join(base._given)}."
            )
        if hasattr(base, each.name):
            raise ValueError(f"{function.__name__}: the option {each.name} needs another name; networks have that one.")
        kind = type(each.default) if each.annotation is Parameter.empty else each.annotation
        options.append((each.name, kind, field(default=each.default)))
    namespace = {"_function": staticmethod(function), "__doc__": function.__doc__}
    made = make_dataclass(function.__name__, options, bases=(base,), frozen=True, namespace=namespace)
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    return made


class _Linen(_Made):
    def init(self, key: Array, observation: Array, num_outputs: int) -> Tree:
        variables = self._module(num_outputs=num_outputs).init(key, observation)
        _check_no_state(set(variables) - {"params"})
        return variables["params"]

    def apply(self, parameters: Tree, observation: Array, num_outputs: int) -> Array:
        return self._module(num_outputs=num_outputs).apply({"params": parameters}, observation)


class _NNX(_Made):
    _given = ("observation_size", "num_outputs", "rngs")

    def _split(self, key: Array, observation: Array, num_outputs: int) -> tuple[Any, Any]:
        from flax import nnx

        module = self._module(observation_size=observation.size, num_outputs=num_outputs, rngs=nnx.Rngs(key))
        definition, parameters, state = nnx.split(module, nnx.Param, ...)
        _check_no_state({"/".join(map(str, path)) for path, _ in nnx.to_flat_state(state)})
        return definition, parameters

    def init(self, key: Array, observation: Array, num_outputs: int) -> Tree:
        from flax import nnx

        return nnx.to_pure_dict(self._split(key, observation, num_outputs)[1])

    def apply(self, parameters: Tree, observation: Array, num_outputs: int) -> Array:
        from flax import nnx

        definition, state = nnx.eval_shape(lambda: self._split(jax.random.key(0), observation, num_outputs))
        nnx.replace_by_pure_dict(state, parameters)
        return nnx.merge(definition, state)(observation)


class _Equinox(_Made):
    _given = ("observation_size", "num_outputs", "key")

    def _made(self, key: Array, observation: Array, num_outputs: int) -> Any:
        return self._module(observation_size=observation.size, num_outputs=num_outputs, key=key)

    def init(self, key: Array, observation: Array, num_outputs: int) -> Tree:
        import equinox as eqx

        parameters, rest = eqx.partition(self._made(key, observation, num_outputs), eqx.is_inexact_array)
        state = [path for path, leaf in jax.tree_util.tree_leaves_with_path(rest) if eqx.is_array(leaf)]
        _check_no_state({jax.tree_util.keystr(path, simple=True, separator="/") for path in state})
        return parameters

    def apply(self, parameters: Tree, observation: Array, num_outputs: int) -> Array:
        import equinox as eqx

        # Everything but the parameters, such as activation functions; no array is computed for that.
        shapes = eqx.filter_eval_shape(lambda: self._made(jax.random.key(0), observation, num_outputs))
        _, rest = eqx.partition(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
        return eqx.combine(parameters, rest)(observation)


def _check_no_state(state: set[str]) -> None:
    if state:
        raise ValueError(
            f"its module has state besides its parameters, which agents do not exchange: {', '.join(sorted(state))}. "
            "Use layers without state (no batch normalization, no dropout)."
        )
