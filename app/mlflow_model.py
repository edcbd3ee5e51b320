"""The best checkpoint as an MLflow model, from the checkpoint alone."""

from importlib.metadata import version

import torch
from torch import nn

from app.checkpoint import Checkpoint, load_checkpoint, load_weights
from app.data.samples import DataInfo
from app.models.build import build_model, preprocessing
from app.storage import Storage


class Classifier(nn.Module):
    """From the loader's inputs (uint8 pixels, token ids, features) to logits (N, num_classes)."""

    def __init__(self, network: nn.Module, info: DataInfo):
        super().__init__()
        self.preprocess, self.network = preprocessing(info), network

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.network(self.preprocess(inputs))


def load_classifier(checkpoint: Checkpoint) -> Classifier:
    network = build_model(checkpoint.config, checkpoint.info, pretrained=False)
    load_weights(network, checkpoint.model, checkpoint.path)
    return Classifier(network, checkpoint.info).eval()


def log_model(run_id: str, path: str) -> None:
    """Log it with its signature; MLflow's load_model for PyTorch then gives a module from inputs to logits.

    Stored as an exported program (pt2), which is read back without unpickling.
    """
    import mlflow
    from mlflow.models import infer_signature
    from mlflow.pytorch import log_model as log_pytorch_model

    checkpoint = load_checkpoint(Storage(path), "")
    classifier = load_classifier(checkpoint)
    # Two samples: an export from one would fix the batch size at 1.
    example = checkpoint.info.example(2)
    with torch.no_grad():
        logits = classifier(example)
    requirements = [f"{name}=={version(name)}" for name in ("mlflow", "torch", "torchvision")]
    with mlflow.start_run(run_id=run_id):
        log_pytorch_model(
            classifier,
            name="model",
            signature=infer_signature(example.numpy(), logits.numpy()),
            input_example=example.numpy(),
            pip_requirements=requirements,  # given, so that MLflow need not find them out by running the model
            metadata={"class_names": list(checkpoint.info.class_names), "checkpoint": path},
        )
