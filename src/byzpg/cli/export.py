"""byzpg export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from byzpg.cli.console import counted, say
from byzpg.cli.inputs import read_inputs
from byzpg.cli.labels import method, short
from byzpg.cli.parts import OwnModules

USE = {
    "onnx": "onnxruntime.InferenceSession({path!r}).run(['action'], {{'observation': observations}})  # greedy",
    "safetensors": "safetensors.numpy.load_file({path!r}), and the metadata 'about'",
    "numpy": "numpy.load({path!r}), or python examples/act_without_jax.py {path}",
}

OWN_USE = "numpy.load({path!r}), and the code of the network"


@dataclass(frozen=True)
class Export:
    """Write a trained policy, or the scores of runs, to a file for other programs.

    A policy's file holds the weights and describes the network, the task and its actions, so that programs act with it
    without JAX. Of a network of your own, ONNX holds the computation, and other formats hold the parameters by name.
    With --format rliable, the scores of many runs are written as JSON in the form that rliable takes: for each
    algorithm, a row per seed and a column per task, with the mean return of the last tenth of the run.

    Example: byzpg export runs/CartPole-v1-DecByzPPO-AvgZero-1 --format onnx

    Example: byzpg export runs/* --format rliable
    """

    directories: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="PATH [PATH ...]", help_behavior_hint="(at least one)"),
    ]
    """Directory of the run, which must be complete. For rliable: directories of runs, of sweeps, or of
    `byzpg reproduce`, or result files, .npz."""
    format: Literal["onnx", "safetensors", "numpy", "rliable"]
    """Format of the file. ONNX and safetensors need the extra `export` of byzpg."""
    index: int = 0
    """Index of the training seed whose policy is written, from 0."""
    agent: int = 0
    """Agent whose parameters are used, from 0."""
    output: Path | None = None
    """File to write. Default: policy.onnx, policy.safetensors or policy.npz in the directory of the run; for rliable,
    scores.json in the current directory."""
    parts: OwnModules = ()

    def run(self) -> None:
        if not self.directories:
            raise ValueError("export needs the directory of a run.")
        if self.format == "rliable":
            self._write_scores()
        elif len(self.directories) > 1:
            raise ValueError(f"--format {self.format} is for one run, got {len(self.directories)} directories.")
        else:
            self._write_policy()

    def _output(self, default: Path) -> Path:
        if self.output is not None and self.output.suffix != default.suffix:
            raise ValueError(f"--output must end in {default.suffix} with --format {self.format}, got {self.output}.")
        return default if self.output is None else self.output

    def _write_scores(self) -> None:
        from byzpg.experiments.results import Result
        from byzpg.experiments.summaries import scores_by_algorithm, write_scores

        output = self._output(Path("scores.json"))
        inputs = read_inputs(self.directories)
        if unfinished := [str(path) for path, run in inputs.runs.items() if not run.complete]:
            raise ValueError(f"{unfinished[0]} is not complete: finish it with `byzpg resume`.")
        results = {str(path): Result.of(run) for path, run in inputs.runs.items()}
        results |= {name: result for each in inputs.results for name, result in each.runs.items()}
        attacks = {short(result.settings.attack) for result in results.values()}
        labels = [
            method(each.settings) + (f", {short(each.settings.attack)}" if len(attacks) > 1 else "")
            for each in results.values()
        ]
        scores, tasks = scores_by_algorithm(results, labels)
        write_scores(scores, output)
        say(f"Scores: {output}, for the task{'s' * (len(tasks) > 1)} {', '.join(tasks)}")
        for label, rows in scores.items():
            say(f"  {label}: {counted(len(rows), 'run')}")
        say(f"Use it:  {{name: numpy.array(rows, float) for name, rows in json.load(open({str(output)!r})).items()}}")

    def _write_policy(self) -> None:
        from byzpg import export
        from byzpg.runs import RunDirectory

        (directory,) = self.directories
        output = self._output(directory / f"policy{export.FORMATS[self.format].suffix}")
        kept = RunDirectory.open(directory)
        if not kept.complete:
            raise ValueError(f"{directory} is not complete: finish it with `byzpg resume {directory}`.")
        run = kept.read_results()
        about = export.write_policy(run, output, self.format, seed=self.index, agent=self.agent)
        if "network" in about:
            network, use = about["network"], OWN_USE if self.format == "numpy" else USE[self.format]
        else:
            layers, kinds = " → ".join(map(str, about["layers"])), ", ".join(about["activations"])
            network, use = f"layers {layers} ({kinds})", USE[self.format]
        say(f"Policy of {about['task']}: {output} ({output.stat().st_size:,} bytes)")
        say(f"{about['policy'].capitalize()}, {network}, seed {about['seed']}, agent {about['agent']}")
        say(f"Use it:  {use.format(path=str(output))}")
        outputs = "the logits" if about["policy"] == "categorical" else "mean and log_std"
        say(f"To act as in training, draw from {outputs}. `byzpg play {directory}` compares greedy and sampled.")
