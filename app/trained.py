"""A trained network and all that using it needs, found by what a person calls it."""

import os
from dataclasses import dataclass

import torch
from torch import nn

from app.checkpoint import load_checkpoint
from app.config import TEXT_DATASETS, TOKENIZERS, WEIGHTS_SUFFIXES, Config, is_weights_file
from app.config_file import load_yaml
from app.data.datasets import check_data, load_splits
from app.data.samples import DataInfo
from app.errors import BadInput
from app.models.build import build_model, preprocessing
from app.runs import absolute, find_checkpoint, resolved
from app.storage import Storage
from app.user_code import import_own
from app.weights import load_weights, load_weights_file


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

    def config_for(self, num_workers: int, device: str) -> Config:
        """The settings for workers that use the network: they need less than those that trained it."""
        needs = {"num_workers": num_workers, "device": device, "cpus_per_worker": 1.0, "sync_batchnorm": False}
        return self.config.model_copy(update=needs)


def device_here(name: str) -> torch.device:
    """What --device means in this process. Raises BadInput for a GPU that is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda: there is no GPU here")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def load_trained(given: str, config_file: str | None = None, cache_dir: str | None = None) -> Trained:
    """The network that a person means by a run's folder or name, a checkpoint's folder, or a file of weights.

    config_file: the settings of a file of weights, which has none. cache_dir: this machine's; a run's was of
    where it was trained. Raises BadInput.
    """
    if is_weights_file(given) and not os.path.isdir(os.path.join("runs", given)):
        return _with_settings(given, config_file, cache_dir)
    if config_file is not None:
        raise BadInput(
            f"--config {config_file}: {given} is no file of weights ({', '.join(WEIGHTS_SUFFIXES)}); runs and "
            "checkpoints have their settings: leave it out"
        )
    path = find_checkpoint(given)
    checkpoint = load_checkpoint(Storage(path), "")
    import_own(checkpoint.config, data=False)
    config = checkpoint.config.model_copy(update={"cache_dir": absolute(cache_dir) if cache_dir else None})
    return Trained(path, config, checkpoint.info, checkpoint.model)


def _with_settings(weights_file: str, config_file: str | None, cache_dir: str | None) -> Trained:
    """Classes, preprocessing and tokens are those of the data that the settings name, which is read for them."""
    path = os.path.abspath(os.path.expanduser(weights_file))
    weights = load_weights_file(path, path)
    if config_file is None:
        raise BadInput(
            f"{weights_file} has weights alone, which do not say their model, classes and preprocessing: "
            "give the settings they were trained with as --config FILE.yaml"
        )
    values = load_yaml(config_file) | {"weights": None}  # those that training began with are not needed any more
    if cache_dir is not None:
        values["cache_dir"] = cache_dir
    try:
        config = resolved(Config.model_validate(values))
    except BadInput as error:
        raise BadInput(f"--config {config_file}: {error}") from None
    if config.dataset in TEXT_DATASETS and config.tokenizer in TOKENIZERS:
        raise BadInput(
            f"--config {config_file}: weights of texts mean nothing without the tokenizer they were trained with: "
            "set tokenizer to its file, tokenizer.json in the run's folder, and leave vocab_size out"
        )
    import_own(config)
    return Trained(path, config, load_splits(config, check_data(config).tokenizer).info, weights)
