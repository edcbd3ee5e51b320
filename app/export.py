"""python -m app.export RUN_OR_CHECKPOINT --format torch-export|onnx --output FILE

A trained network as one file that is run without this project: from pixels (uint8) or token ids to logits,
with its preprocessing inside and its class names beside. What was written is read back and compared with
the network on samples of the run's own data. The last line on stdout is one JSON object.
"""

import contextlib
import importlib.util
import itertools
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import tyro
from pydantic import BaseModel, ConfigDict, Field

from app.cli import EXIT_CODES, run_main
from app.config_file import to_yaml
from app.errors import BadInput, ExportFailed
from app.runs import absolute
from app.user_code import import_own

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

    from app.data.samples import SampleSet
    from app.trained import Classifier, Trained

SUFFIXES = {"torch-export": ".pt2", "onnx": ".onnx"}
ONNX_PACKAGES = ("onnx", "onnxruntime", "onnxscript")
# A protobuf message, which a whole .onnx file is, cannot be larger.
ONNX_LIMIT = 2**31 - 2**20
# Largest difference of a logit, as a share of the largest logit, or of 1 where that is smaller.
TOLERANCE = 1e-4
BATCH_SIZES = (1, 2, 7, 16)

Run = Callable[["torch.Tensor"], "torch.Tensor"]


class Command(BaseModel):
    """What to export, and where to."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: tyro.conf.Positional[str] = Field(
        description="A run's folder or name (its best checkpoint), a checkpoint's folder, or a file of weights."
    )
    format: Literal["torch-export", "onnx"] = Field(description="torch-export is read by torch.export.load.")
    output: str = Field(description="The file to write: .pt2 of torch-export, .onnx of onnx.")
    overwrite: bool = Field(False, description="Replace the file if it is there.")
    config: str | None = Field(None, description="YAML file with the settings of a file of weights.")
    data_dir: str | None = Field(None, description="Where the data lies now, if not where it was trained on.")
    cache_dir: str | None = Field(
        None, description="Where a node keeps its copies of data at a URI. Default: ~/.cache/evenkeel."
    )
    num_samples: int = Field(64, description="Samples to compare on, of test, or of val where there is no test.")


@dataclass(frozen=True)
class Parity:
    """How far the file's logits are from the network's."""

    max_difference: float
    tolerance: float
    num_samples: int
    input_shapes: list[tuple[int, ...]]

    def refuse_other_logits(self) -> None:
        if not self.max_difference <= self.tolerance:  # so that NaN is refused
            raise ExportFailed(
                f"the exported file gives other logits than the network: the largest difference on {self.num_samples} "
                f"samples is {self.max_difference:.3g}, allowed is {self.tolerance:.3g}; nothing was written"
            )


def main(argv: Sequence[str]) -> int:
    command = tyro.cli(
        Command,
        args=list(argv),
        prog="python -m app.export",
        description=f"Write a trained network to a file that is run without this project.\n\n{EXIT_CODES}",
    )
    output = checked_output(command)
    from app.checkpoint import refuse_other_data
    from app.data.datasets import check_data, load_splits
    from app.evaluate import to_evaluate
    from app.trained import load_trained

    trained = load_trained(command.checkpoint, command.config, command.cache_dir)
    import_own(trained.config)
    data_dir = absolute(command.data_dir) if command.data_dir is not None else trained.config.data_dir
    config = to_evaluate(trained.config, data_dir)
    for note in check_data(config, trained.info.tokenizer).notes:
        print(note)
    splits = load_splits(config, trained.info.tokenizer)
    refuse_other_data(trained.path, trained.info, splits.info)
    split = "test" if splits.test is not None else "val"
    batches = real_batches(splits[split], command.num_samples, skip_unreadable=config.max_bad_samples > 0)
    parity = export(trained, command.format, output, batches)
    print(
        f"the file's logits and the network's, on {parity.num_samples} samples of {split}: largest difference "
        f"{parity.max_difference:.3g}, allowed {parity.tolerance:.3g}"
    )
    content = {
        "file": str(output),
        "format": command.format,
        "size": output.stat().st_size,
        "checkpoint": trained.path,
        "num_classes": trained.info.num_classes,
        "split": split,
        **asdict(parity),
    }
    print(json.dumps(content, allow_nan=False))
    return 0


def checked_output(command: Command) -> Path:
    """Its absolute path. Raises BadInput for what the command alone shows to be impossible."""
    suffix, output = SUFFIXES[command.format], Path(command.output).expanduser().absolute()
    if "://" in command.output:
        raise BadInput(f"--output {command.output}: must be a file on this machine, not a URI")
    if output.suffix != suffix:
        raise BadInput(f"--output {command.output}: a file of --format {command.format} must end in {suffix}")
    if output.is_dir():
        raise BadInput(f"--output {command.output} is a directory: name a file in it")
    if output.exists() and not command.overwrite:
        raise BadInput(f"--output {command.output} exists: choose another file, or replace it with --overwrite")
    if not output.parent.is_dir():
        raise BadInput(f"--output {command.output}: there is no directory {output.parent}")
    if command.num_samples < 1:
        raise BadInput(f"--num-samples {command.num_samples}: must be at least 1")
    missing = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if command.format == "onnx" and missing:
        raise BadInput(f"--format onnx needs {', '.join(missing)}: install with uv sync --extra onnx")
    return output


def export(trained: "Trained", kind: str, output: Path, batches: list["torch.Tensor"]) -> Parity:
    """Write the file, read it back and compare. It takes its name only if its logits are the network's."""
    from app.traced import traced

    write, read = {"torch-export": (write_pt2, read_pt2), "onnx": (write_onnx, read_onnx)}[kind]
    classifier = trained.classifier()
    program = traced(classifier, trained.info)
    beside = output.with_name(f".{output.stem}.{uuid.uuid4().hex[:8]}{output.suffix}")
    try:
        write(program, trained, beside)
        parity = compare(classifier, read(beside), batches)
        parity.refuse_other_logits()
        os.replace(beside, output)
    except OSError as error:
        raise BadInput(f"--output {output} cannot be written: {error.strerror or error}") from None
    finally:
        beside.unlink(missing_ok=True)
    return parity


def described(trained: "Trained") -> dict[str, str]:
    """What stands beside the network in a file, by name; all but the settings is JSON."""
    files = {
        "class_names.json": json.dumps(trained.info.class_names),
        "settings.yaml": to_yaml(trained.config),
    }
    if trained.info.tokenizer is not None:
        files["tokenizer.json"] = trained.info.tokenizer
    return files


def write_pt2(program: "ExportedProgram", trained: "Trained", file: Path) -> None:
    import torch

    torch.export.save(program, file, extra_files=described(trained))


def read_pt2(file: Path) -> Run:
    import torch

    logger = logging.getLogger("torch._export.serde.serialize")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of symbols of sizes that the graph has no use for
    try:
        return torch.export.load(file).module()
    finally:
        logger.setLevel(level)


def write_onnx(program: "ExportedProgram", trained: "Trained", file: Path) -> None:
    import torch

    from app.traced import open_sizes, tracing

    size = sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict.values())
    if size > ONNX_LIMIT:
        raise BadInput(f"--format onnx: the weights take {size:,} bytes, and a file holds 2 GiB; use torch-export")
    names = open_sizes(trained.info)
    try:
        with tracing(trained.info), torch.no_grad():
            exported = torch.onnx.export(
                program, input_names=["inputs"], output_names=["logits"], dynamic_shapes=(names,), verbose=False
            )
    except torch.onnx.errors.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[:3]
        raise ExportFailed("torch.onnx cannot export this model:\n  " + "\n  ".join(reason)) from error
    assert exported is not None
    exported.model.metadata_props.update(described(trained))
    exported.save(file, external_data=False)


def read_onnx(file: Path) -> Run:
    import onnxruntime
    import torch

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    return lambda inputs: torch.from_numpy(session.run(None, {given.name: inputs.numpy()})[0])


def real_batches(samples: "SampleSet", num_samples: int, *, skip_unreadable: bool) -> list["torch.Tensor"]:
    """Inputs of samples spread over the split, in batches of different sizes; of one shape each, texts from
    the shortest on."""
    count = len(samples.labels)
    ids = np.unique(np.linspace(0, count - 1, min(num_samples, count)).round().astype(np.int64))
    if skip_unreadable:
        ids = np.array([i for i in ids if _is_readable(samples, i)], np.int64)
    if not len(ids):
        raise BadInput("there is no sample to compare the exported file on")
    if samples.facts.lengths is not None:
        ids = ids[np.argsort(samples.facts.lengths[ids], kind="stable")]
    groups = np.zeros(len(ids)) if samples.facts.groups is None else samples.facts.groups[ids]
    return [samples.inputs(part) for group in np.unique(groups) for part in _cut(ids[groups == group])]


def _is_readable(samples: "SampleSet", i: int) -> bool:
    with contextlib.suppress(BadInput):  # which --max-bad-samples allows
        samples.inputs(np.array([i]))
        return True
    return False


def _cut(ids: np.ndarray) -> Iterator[np.ndarray]:
    for size in itertools.cycle(BATCH_SIZES):
        if not len(ids):
            return
        yield ids[:size]
        ids = ids[size:]


def compare(network: "Classifier", run: Run, batches: list["torch.Tensor"]) -> Parity:
    """Raises ExportFailed where the file does not take a batch, or gives it logits of another shape."""
    import torch

    differences, largest = [], 1.0
    with torch.no_grad():
        for inputs in batches:
            expected = network(inputs)
            try:
                found = run(inputs)
            except Exception as error:  # torch and onnxruntime have no common type for it
                reason = str(error).strip().splitlines()[0]
                raise ExportFailed(f"the exported file does not take inputs {tuple(inputs.shape)}: {reason}") from error
            if found.shape != expected.shape:
                raise ExportFailed(f"the exported file gives {tuple(found.shape)} instead of {tuple(expected.shape)}")
            differences.append((found - expected).abs().max())
            largest = max(largest, expected.abs().max().item())
    return Parity(
        max_difference=torch.stack(differences).max().item(),
        tolerance=TOLERANCE * largest,
        num_samples=sum(len(inputs) for inputs in batches),
        input_shapes=sorted({tuple(inputs.shape) for inputs in batches}),
    )


if __name__ == "__main__":
    run_main(main)
