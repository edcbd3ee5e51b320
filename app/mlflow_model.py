"""The best checkpoint as an MLflow model, from the checkpoint alone."""

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.traced import example_inputs, open_sizes, tracing
from app.trained import load_trained

CHAMPION = "champion"
# Tags: of a logged model, its checkpoint's path; of a version, the logged model.
CHECKPOINT, MODEL_ID = "checkpoint", "model_id"


def log_model(run_id: str, path: str, register: str | None = None) -> None:
    """Log it with its signature; MLflow's load_model for PyTorch then gives a module from inputs to logits.

    register: as a new version of the registered model of this name, which gets the alias champion. What was logged
    or registered before is not again.
    """
    import mlflow

    client = mlflow.MlflowClient()
    model = _logged(client, run_id, path) or _log(run_id, path)
    if register is not None:
        versions = client.search_model_versions(f"name = '{register}'")
        # the version's own model_id is not kept by MLflow's SQL stores
        found = next((each for each in versions if each.tags.get(MODEL_ID) == model.model_id), None)
        found = found or mlflow.register_model(model.model_uri, register, tags={MODEL_ID: model.model_id})
        client.set_registered_model_alias(register, CHAMPION, str(found.version))


def _logged(client: Any, run_id: str, path: str) -> Any:
    """The run's model of this checkpoint; None if there is none."""
    outputs = client.get_run(run_id).outputs
    models = (client.get_logged_model(each.model_id) for each in (outputs.model_outputs if outputs else ()))
    return next((each for each in models if each.status == "READY" and each.tags.get(CHECKPOINT) == path), None)


def _log(run_id: str, path: str) -> Any:
    """Log a checkpoint as a model of the run.

    Stored as an exported program (pt2), which is read back without unpickling. Class names are in its
    metadata; the tokenizer of texts is its file extra_files/tokenizer.json.
    """
    import mlflow
    from mlflow.models import ModelSignature
    from mlflow.pytorch import log_model as log_pytorch_model
    from mlflow.types import Schema, TensorSpec

    trained = load_trained(path)
    info = trained.info
    classifier = trained.classifier().requires_grad_(False)
    example = example_inputs(info).numpy()
    # MLflow leaves the sizes open that are -1 in the signature.
    shape = tuple(-1 if dimension in open_sizes(info) else size for dimension, size in enumerate(example.shape))
    signature = ModelSignature(
        inputs=Schema([TensorSpec(example.dtype, shape)]),
        outputs=Schema([TensorSpec(np.dtype(np.float32), (-1, info.num_classes))]),
    )
    requirements = [f"{name}=={version(name)}" for name in ("mlflow", "torch", "torchvision")]
    with tempfile.TemporaryDirectory() as folder, tracing(info), torch.no_grad():
        files = []
        if info.tokenizer is not None:
            tokenizer = Path(folder, "tokenizer.json")
            tokenizer.write_text(info.tokenizer, encoding="utf-8")
            files.append(str(tokenizer))
        with mlflow.start_run(run_id=run_id):
            return log_pytorch_model(
                classifier,
                name="model",
                signature=signature,
                input_example=example,
                extra_files=files or None,
                tags={CHECKPOINT: path},
                pip_requirements=requirements,  # given, so that MLflow need not find them out by running the model
                metadata={"class_names": list(info.class_names), "checkpoint": path},
            )
