"""A classifier as a program of torch.export: one that is run without this project's code.

Left open are the sizes that differ from batch to batch: how many samples, how long the texts are, and
how large the images are where they do not all have one shape.
"""

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch.export import Dim, ExportedProgram

from app.data.samples import DataInfo
from app.errors import ExportFailed
from app.trained import Classifier


def example_inputs(info: DataInfo) -> torch.Tensor:
    """What to trace with: two samples, since torch takes a size of 1 for a fixed one."""
    return info.example(2)


def open_sizes(info: DataInfo) -> dict[int, str]:
    """The dimensions of the inputs whose size is left open, and what they are."""
    if info.tokenizer is not None and info.input_shape[0] > 1:
        return {0: "batch", 1: "length"}
    return {0: "batch", 2: "height", 3: "width"} if info.shapes else {0: "batch"}


def traced(classifier: Classifier, info: DataInfo) -> ExportedProgram:
    """From the loader's inputs to logits (N, num_classes). Raises ExportFailed where torch cannot trace it."""
    classifier.requires_grad_(False)
    sizes = dict.fromkeys(open_sizes(info), Dim.DYNAMIC)
    try:
        with tracing(info), torch.no_grad():
            return torch.export.export(classifier, (example_inputs(info),), dynamic_shapes=(sizes,))
    except Exception as error:  # what torch raises for a model that it cannot trace has no common type
        lines = "\n  ".join(line for line in str(error).strip().splitlines()[:3] if line)
        raise ExportFailed(
            f"torch.export cannot trace this model with an open {', '.join(open_sizes(info).values())} "
            f"({type(error).__name__}):\n  {lines}"
        ) from error


@contextlib.contextmanager
def tracing(info: DataInfo) -> Iterator[None]:
    """Within it, torch.export leaves the sizes open that it would otherwise fix at the example's."""
    # Neither has a public name yet in torch 2.15; torch.onnx uses the first two for itself.
    from torch.export._patches import register_gru_while_loop_decomposition, register_lstm_while_loop_decomposition
    from torch.fx.experimental import _config

    with (
        # Left to itself, torch follows an LSTM step by step, as many as the example has.
        register_lstm_while_loop_decomposition(),
        register_gru_while_loop_decomposition(),
        # ... and takes images for ever to be on the example's side of where a feature map becomes one pixel.
        _config.patch(backed_size_oblivious=bool(info.shapes)),  # type: ignore[attr-defined]  # put there at run time
        warnings.catch_warnings(),
    ):
        # An LSTM's weights are put in its list of them anew, and torch warns of its own function.
        warnings.filterwarnings("ignore", r"The tensor attributes? .*_flat_weights", UserWarning)
        warnings.filterwarnings("ignore", "_check_is_size will be removed", FutureWarning)
        yield
