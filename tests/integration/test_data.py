"""A whole run on images of mixed shapes."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import nn

from app.config import Config
from app.evaluate import main as evaluate
from app.fit import fit
from app.predict import main as predict
from app.trained import load_trained

pytestmark = [
    pytest.mark.usefixtures("local_ray"),
    pytest.mark.filterwarnings("ignore"),  # ray's, mlflow's and alembic's own
]


def any_shape_net(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Takes images of any height and width."""
    return nn.Sequential(
        nn.Conv2d(input_shape[0], 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes)
    )


def write_mixed_shapes(root: Path, count: int) -> None:
    """Dark and light noise, images of four shapes in each class."""
    generator = np.random.default_rng(1)
    for name, light in (("dark", 0), ("light", 100)):
        (root / name).mkdir(parents=True)
        for number in range(count):
            width, height = ((40, 40), (60, 40), (32, 64), (90, 45))[number % 4]
            pixels = generator.integers(light, light + 156, (height, width, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number:03d}.png")


def config(tmp_path: Path, **settings) -> Config:
    images = {"dataset": "image-folder", "data_dir": str(tmp_path / "images"), "image_size": 32, "loader_workers": 0}
    run = {"output_dir": str(tmp_path / "runs"), "num_workers": 2, "cpus_per_worker": 0.5, "batch_size": 7}
    return Config(**{**images, **run, "lr": 0.02, "schedule": "constant", "tracking_uri": "none", **settings})


def last_line(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
def test_batches_of_one_shape_each_train_and_are_measured_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mixed_shapes(tmp_path / "images", 30)
    settings = {"run_name": "mixed", "sampler": "aspect-grouped", "model": "tests.integration.test_data:any_shape_net"}
    summary, exit_code = fit(config(tmp_path, epochs=4, **settings))
    assert (exit_code, summary.status, summary.samples_seen) == (0, "finished", 4 * 54)
    capsys.readouterr()
    assert evaluate([str(tmp_path / "runs" / "mixed"), "--split", "val"]) == 0
    found = last_line(capsys)
    assert found["num_samples"] == 6
    assert found["metrics"]["val/accuracy"] == summary.metrics["val/accuracy"]
    assert found["metrics"]["val/loss"] == pytest.approx(summary.metrics["val/loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.ci
def test_a_table_of_ones_own_trains_is_measured_and_predicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = np.random.default_rng(2)
    words = {"good": ["fine", "lovely", "great", "loved"], "bad": ["awful", "dull", "hated", "poor"]}
    rows = [
        (" ".join(generator.choice([*special, "the", "film", "a", "was"], generator.integers(6, 20))), label)
        for label, special in words.items()
        for _ in range(60)
    ]
    table = tmp_path / "reviews.csv"
    table.write_text("stars,review\n" + "".join(f'{label},"{text}"\n' for text, label in rows))
    run = {"output_dir": str(tmp_path / "runs"), "run_name": "reviews", "tracking_uri": f"sqlite:///{tmp_path}/m.db"}
    texts = {"text_column": "review", "label_column": "stars", "max_length": 12, "sampler": "length-bucketed"}
    settings = {"model": "text-lstm", "num_workers": 2, "cpus_per_worker": 0.5, "batch_size": 20, "epochs": 8}
    summary, exit_code = fit(
        Config(dataset="text", data_dir=str(table), lr=0.01, **run, **texts, **settings)  # type: ignore[arg-type]  # checked by Config
    )
    assert (exit_code, summary.status, summary.samples_seen) == (0, "finished", 8 * 108)
    said = capsys.readouterr().out
    assert "texts: 108 train, 12 val; " in said
    assert " of the texts are cut off at --max-length 12" in said

    assert evaluate([str(tmp_path / "runs" / "reviews"), "--split", "val"]) == 0
    found = last_line(capsys)
    assert found["metrics"]["val/accuracy"] == summary.metrics["val/accuracy"] > 0.9
    assert found["metrics"]["val/loss"] == pytest.approx(summary.metrics["val/loss"], rel=1e-5)

    texts_given = ["A lovely film, loved it, great", "dull and awful, hated it"]
    assert predict([str(tmp_path / "runs" / "reviews"), *texts_given]) == 0
    labels = [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()]
    assert labels == ["good", "bad"]

    # The tokenizer in the checkpoint is that of the run, whatever has become of the data.
    assert summary.checkpoint is not None
    tokenizer = load_trained(summary.checkpoint).info.tokenizer
    assert tokenizer == (tmp_path / "runs" / "reviews" / "tokenizer.json").read_text()
