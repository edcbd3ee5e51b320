"""The model in MLflow: for any number of samples and length of texts, with what its users need beside it."""

from pathlib import Path

import pytest
import torch

from app.mlflow_model import log_model
from app.trained import load_trained
from tests.test_evaluate import trained_run
from tests.test_export import texts


@pytest.mark.filterwarnings("ignore")  # MLflow's own, of its database and of an example without a batch
@pytest.mark.parametrize("bidirectional", [False, True])
def test_an_lstm_takes_texts_of_any_number_and_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bidirectional: bool
) -> None:
    import mlflow
    from mlflow.models import get_model_info
    from mlflow.pytorch import load_model

    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    monkeypatch.chdir(tmp_path)
    trained_run(tmp_path, **texts(tmp_path, model="text-lstm", bidirectional=bidirectional))
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    client = mlflow.MlflowClient()
    run = client.create_run(client.create_experiment("e", artifact_location=str(tmp_path / "artifacts")))
    trained = load_trained(str(tmp_path / "runs" / "r"))
    # A record that is delivered twice does not make another model, or another version.
    for register in (None, None, "texts", "texts"):
        log_model(run.info.run_id, trained.path, register)

    version = client.get_model_version_by_alias("texts", "champion")
    assert (str(version.version), version.run_id) == ("1", run.info.run_id)
    assert len(client.search_model_versions("name = 'texts'")) == 1
    (model,) = client.search_logged_models([run.info.experiment_id])
    found = get_model_info(model.model_uri)
    assert found.metadata == {"class_names": ["a", "b"], "checkpoint": trained.path}
    (tokenizer,) = (tmp_path / "artifacts").rglob("extra_files/tokenizer.json")
    assert tokenizer.read_text() == trained.info.tokenizer
    network, loaded = trained.classifier(), load_model(model.model_uri)
    for shape in ((1, 1), (1, 12), (3, 5), (4, 30)):
        tokens = torch.randint(1, 6, shape)
        tokens[0, (shape[1] + 1) // 2 :] = 0
        torch.testing.assert_close(loaded(tokens), network(tokens), rtol=1e-5, atol=1e-6)
    scored = mlflow.pyfunc.load_model(model.model_uri).predict(tokens.numpy())
    torch.testing.assert_close(torch.from_numpy(scored), network(tokens).detach(), rtol=1e-5, atol=1e-6)
