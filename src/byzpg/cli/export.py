"""byzpg export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from byzpg.cli.console import say
from byzpg.cli.parts import OwnModules

USE = {
    "onnx": "onnxruntime.InferenceSession({path!r}).run(['action'], {{'observation': observations}})  # greedy",
    "safetensors": "safetensors.numpy.load_file({path!r}), and the metadata 'about'",
    "numpy": "numpy.load({path!r}), or python examples/act_without_jax.py {path}",
}


@dataclass(frozen=True)
class Export:
    """Write a trained policy to a file that other programs act with, without JAX.

    The file holds the weights and describes the network, the task and its actions.

    Example: byzpg export runs/CartPole-v1-DecByzPPO-AvgZero-1 --format onnx
    """

    directory: tyro.conf.Positional[Path]
    """Directory of the run, which must be complete."""
    format: Literal["onnx", "safetensors", "numpy"]
    """Format of the file. ONNX and safetensors need the extra `export` of byzpg."""
    index: int = 0
    """Index of the training seed whose policy is written, from 0."""
    agent: int = 0
    """Agent whose parameters are used, from 0."""
    output: Path | None = None
    """File to write. Default: policy.onnx, policy.safetensors or policy.npz in the directory of the run."""
    parts: OwnModules = ()

    def run(self) -> None:
        from byzpg import export
        from byzpg.runs import RunDirectory

        suffix = export.FORMATS[self.format].suffix
        output = self.directory / f"policy{suffix}" if self.output is None else self.output
        if output.suffix != suffix:
            raise ValueError(f"--output must end in {suffix} with --format {self.format}, got {output}.")
        kept = RunDirectory.open(self.directory)
        if not kept.complete:
            raise ValueError(f"{self.directory} is not complete: finish it with `byzpg resume {self.directory}`.")
        run = kept.read_results()
        about = export.write_policy(run, output, self.format, seed=self.index, agent=self.agent)
        layers, kinds = " → ".join(map(str, about["layers"])), ", ".join(about["activations"])
        say(f"Policy of {about['task']}: {output} ({output.stat().st_size:,} bytes)")
        say(f"{about['policy'].capitalize()}, layers {layers} ({kinds}), seed {about['seed']}, agent {about['agent']}")
        say(f"Use it:  {USE[self.format].format(path=str(output))}")
        outputs = "the logits" if about["policy"] == "categorical" else "mean and log_std"
        say(f"To act as in training, draw from {outputs}. `byzpg play {self.directory}` compares greedy and sampled.")
