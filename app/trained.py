"""A trained network and all that using it needs, found by what a person calls it."""

import os
from dataclasses import dataclass

import torch
from torch import nn

from app.checkpoint import load_checkpoint, load_weights
from app.config import Config
from app.data.samples import DataInfo
from app.errors import BadInput
from app.models.build import build_model, preprocessing
from app.runs import checkpoint_names, read_run
from app.storage import Storage


class Classifier(nn.Module):
    """From the loader's inputs (uint8 pixels, token ids, features) to logits (N, num_classes)."""

    def __init__(self, network: nn.Module, info: DataInfo):
        super().__init__()
        self.preprocess, self.network = preprocessing(info), network

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.network(self.preprocess(inputs))


@dataclass(frozen=True)
class Trained:
    """Weights with the settings and the data that they belong to. path: where they were read from."""

    path: str
    config: Config
    info: DataInfo
    weights: dict[str, torch.Tensor]

    def classifier(self) -> Classifier:
        """On the CPU, in evaluation mode."""
        network = build_model(self.config, self.info, pretrained=False)
        load_weights(network, self.weights, self.path)
        return Classifier(network, self.info).eval()


def load_trained(given: str, config_file: str | None = None) -> Trained:
    """The network that a person means by a run's folder or name, or a checkpoint's folder. Raises BadInput."""
    if config_file is not None:
        raise BadInput(f"--config {config_file}: {given} has its settings with it; leave --config out")
    path = find_checkpoint(given)
    checkpoint = load_checkpoint(Storage(path), "")
    return Trained(path, checkpoint.config, checkpoint.info, checkpoint.model)


def find_checkpoint(given: str) -> str:
    """The folder of the checkpoint that a person means by a run, its name, or a checkpoint."""
    if ".." in given.replace("\\", "/").split("/"):
        raise BadInput(f"{given}: name the run or the checkpoint by a path without '..'")
    root = given.rstrip("/") if "://" in given else os.path.abspath(given)
    for path in (root, os.path.abspath(os.path.join("runs", given))):
        storage = Storage(path)
        if "manifest.json" in storage.names(""):
            return path
        run = read_run(storage)
        if run is None:
            continue
        names = checkpoint_names(Storage(f"{path}/checkpoints"))
        if run.summary is not None and run.summary.checkpoint is not None:
            best = run.summary.checkpoint.rpartition("/")[2]
            if best in names:
                return f"{path}/checkpoints/{best}"
        if names:
            return f"{path}/checkpoints/{names[-1]}"
        raise BadInput(f"{given}: this run has no checkpoint")
    raise BadInput(f"{given} is no run's folder, no run below ./runs, and no checkpoint's folder")
