"""A trained policy in one file that other programs act with, without JAX: ONNX, safetensors or NumPy.

A file holds the weights and a JSON text `about` (see `describe`). An ONNX file also holds the whole computation.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from byzpg import envs
from byzpg._files import write_atomically
from byzpg._install import install
from byzpg.envs.spaces import LARGEST, Box
from byzpg.learning.policies import MLP, Gaussian, OwnNetwork
from byzpg.runs import Run, TrainedPolicy

Arrays = dict[str, np.ndarray]
About = dict[str, Any]
# Both are from 2022, so that the runtimes of recent years read the file.
ONNX_OPSET, ONNX_IR = 17, 8


def write_policy(run: Run, path: Path, kind: str, *, seed: int = 0, agent: int = 0) -> About:
    """Write the policy of one agent to a new file.

    Args:
        run: The run that trained it.
        path: The file.
        kind: The format, a name in `FORMATS`.
        seed: Index of the seed among the run's seeds, from 0.
        agent: Index of the agent; a run with a server has one.

    Returns:
        What the file says about the policy: `describe`.

    Raises:
        ValueError: If the file exists, the parameters are not finite or a package is missing.
    """
    if kind not in FORMATS:
        raise ValueError(f"the format must be one of {', '.join(FORMATS)}; got {kind!r}.")
    if path.exists():
        raise ValueError(f"{path} already exists: remove it, or choose another file.")
    trained = run.policy(seed, agent)
    if not np.all(np.isfinite(trained.parameters)):
        raise ValueError(
            f"the {run.settings.output} parameters of seed {seed}, agent {agent} are not finite: "
            "export another seed, agent or run."
        )
    about = describe(run, seed, agent)
    try:
        content = FORMATS[kind].encode(trained, about)
    except ImportError:
        raise ValueError(f"the format {kind} needs more packages: {install('export')}.") from None
    write_atomically(path, lambda file: file.write(content))
    return about


def describe(run: Run, seed: int = 0, agent: int = 0) -> About:
    """What a program needs beside the weights to act, as plain data.

    Of the built-in network, layer i computes `activations[i](values @ weight_i + bias_i)`; of the user's own, `network`
    is the text, and the program needs its code. The last layer gives the logits of a categorical policy, or the means
    of a Gaussian one. `action_low` and `action_high` are the bounds of the task, which it clips a Gaussian's actions
    to; the largest float32, ±3.4e38, stands for no bound.
    """
    settings, policy = run.settings, run.settings.bound_policy()
    if isinstance(policy, MLP):
        last = "tanh" if policy.output_tanh else "identity"
        network: About = {
            "layers": list(policy.layer_sizes),
            "activations": [policy.activation] * len(policy.hidden) + [last],
        }
    else:
        network = {"network": str(settings.policy), "observation_size": policy.observation_size}
    space = envs.make(settings.env).action_space
    if isinstance(space, Box):
        low, high = ([min(max(each, -LARGEST), LARGEST) for each in side] for side in (space.low, space.high))
        kind: About = {"policy": "gaussian", "action_low": low, "action_high": high}
    else:
        kind = {"policy": "categorical", "num_actions": space.num_actions}
    return {
        "byzpg": version("byzpg"),
        "task": settings.env,
        **kind,
        **network,
        "parameters": settings.output,
        "seed": settings.seeds[seed],
        "agent": agent,
    }


def _arrays(trained: TrainedPolicy) -> Arrays:
    """The parts of θ by name: weight_i [in, out], bias_i [out] and, for a Gaussian, log_std [size].

    Of a network of the user's own: network.PATH, its path in the pytree, and what its observations are normalized with.
    """
    policy, parts = trained.policy, trained.policy.unflatten(trained.parameters)  # pyright: ignore[reportArgumentType]
    named: list[tuple[str, Any]] = []
    *parts, log_std = parts if isinstance(policy, Gaussian) else (*parts, ())
    if isinstance(policy, OwnNetwork):
        tree, *statistics = parts
        for path, leaf in tree_leaves_with_path(tree):
            named.append((f"network.{keystr(path, simple=True, separator='.')}".rstrip("."), leaf))
        for mean, std in statistics:
            named += [("observation_mean", mean), ("observation_std", std)]
    else:
        for index, (matrix, bias) in enumerate(parts):
            named += [(f"weight_{index}", matrix), (f"bias_{index}", bias)]
    named += [("log_std", each) for each in log_std]
    arrays = {name: np.asarray(array, np.float32) for name, array in named}
    if len(arrays) < len(named):
        raise ValueError(f"two parameters of the network have the same name in a file, among {', '.join(arrays)}.")
    return arrays


def _numpy(trained: TrainedPolicy, about: About) -> bytes:
    content = BytesIO()
    np.savez(content, allow_pickle=False, about=np.asarray(json.dumps(about)), **_arrays(trained))
    return content.getvalue()


def _safetensors(trained: TrainedPolicy, about: About) -> bytes:
    from safetensors.numpy import save  # an extra

    return save(_arrays(trained), {"about": json.dumps(about)})


def _onnx(trained: TrainedPolicy, about: About) -> bytes:
    """A graph from observation [batch, features] to action, and to logits, or mean and log_std."""
    from onnx import TensorProto, helper, numpy_helper  # an extra, and slow to import

    gaussian, policy, arrays = about["policy"] == "gaussian", trained.policy, _arrays(trained)
    last = "mean" if gaussian else "logits"
    nodes = []

    def add(operator: str, inputs: list[str], output: str, **attributes: Any) -> None:
        nodes.append(helper.make_node(operator, inputs, [output], **attributes))

    if isinstance(policy, OwnNetwork):  # a graph for one observation, which is applied to each
        add("Scan", ["observation"], last, num_scan_inputs=1, body=_body(trained, about))
        arrays = {name: array for name, array in arrays.items() if name == "log_std"}
    names = ["observation", *(f"hidden_{layer}" for layer in range(len(about.get("layers", ())) - 2)), last]
    for layer, activation in enumerate(about.get("activations", ())):
        linear = f"linear_{layer}"
        add("Gemm", [names[layer], f"weight_{layer}", f"bias_{layer}"], linear)
        if activation == "silu":  # x · sigmoid(x), an operator of its own only since opset 24
            add("Sigmoid", [linear], f"sigmoid_{layer}")
            add("Mul", [linear, f"sigmoid_{layer}"], names[layer + 1])
        else:
            add(activation.capitalize(), [linear], names[layer + 1])
    outputs: dict[str, tuple[int, list[str | int]]] = {last: (TensorProto.FLOAT, ["batch", policy.num_outputs])}
    constants = {f"{name}_value" if name == "log_std" else name: array for name, array in arrays.items()}
    if gaussian:
        constants |= {name: np.asarray(about[name], np.float32) for name in ("action_low", "action_high")}
        add("Max", [last, "action_low"], "raised")
        add("Min", ["raised", "action_high"], "action")
        add("Identity", ["log_std_value"], "log_std")
        outputs |= {"action": outputs[last], "log_std": (TensorProto.FLOAT, [policy.num_outputs])}
    else:
        add("ArgMax", [last], "action", axis=1, keepdims=0)
        outputs["action"] = (TensorProto.INT64, ["batch"])
    graph = helper.make_graph(
        nodes,
        "policy",
        [helper.make_tensor_value_info("observation", TensorProto.FLOAT, ["batch", policy.observation_size])],
        [helper.make_tensor_value_info(name, *kind) for name, kind in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    versions = {"ir_version": ONNX_IR, "opset_imports": [helper.make_opsetid("", ONNX_OPSET)]}
    model = helper.make_model(graph, producer_name="byzpg", producer_version=about["byzpg"], **versions)
    helper.set_model_props(model, {"about": json.dumps(about)})
    return model.SerializeToString(deterministic=True)


def _body(trained: TrainedPolicy, about: About) -> Any:
    """A graph from one observation [features] to the outputs of a network of the user's own."""
    from byzpg import _onnx  # needs an extra

    policy, weights = trained.policy, trained.policy.unflatten(jnp.asarray(trained.parameters))
    try:
        return _onnx.translated(partial(policy.outputs, weights), policy.observation_size, "one", "outputs")
    except _onnx.Untranslatable as error:
        raise ValueError(
            f"{about['network']} cannot be exported as ONNX: {error}. Export it as safetensors or numpy, which hold "
            "its parameters by name."
        ) from None


@dataclass(frozen=True)
class Format:
    """A file format: how its files end, and the bytes of one."""

    suffix: str
    encode: Callable[[TrainedPolicy, About], bytes]


FORMATS = {
    "onnx": Format(".onnx", _onnx),
    "safetensors": Format(".safetensors", _safetensors),
    "numpy": Format(".npz", _numpy),
}
