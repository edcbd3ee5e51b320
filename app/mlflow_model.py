"""The best checkpoint as an MLflow model, from the checkpoint alone."""

from importlib.metadata import version

import torch

from app.trained import load_trained


def log_model(run_id: str, path: str) -> None:
    """Log it with its signature; MLflow's load_model for PyTorch then gives a module from inputs to logits.

    Stored as an exported program (pt2), which is read back without unpickling.
    """
    import mlflow
    from mlflow.models import infer_signature
    from mlflow.pytorch import log_model as log_pytorch_model

    trained = load_trained(path)
    classifier = trained.classifier()
    # Two samples: an export from one would fix the batch size at 1.
    example = trained.info.example(2)
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
            metadata={"class_names": list(trained.info.class_names), "checkpoint": path},
        )
