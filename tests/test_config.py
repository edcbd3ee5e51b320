"""Settings: refused in plain words, at once, and without importing what is heavy."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.config import Config, did_you_mean, effect_of
from app.config_file import load_yaml, to_yaml
from app.errors import BadInput
from app.models.names import torchvision_models

# settings, and words that the message must have: the flag, the value, what is allowed
TEXT = {"dataset": "text", "model": "text-lstm", "data_dir": "reviews.csv"}
REFUSED = [
    ({"lr": 0}, ["--lr", "0", "greater than 0"]),
    ({"lr": -1.5}, ["--lr", "-1.5", "greater than 0"]),
    ({"lr": float("nan")}, ["--lr", "nan", "finite"]),
    ({"lr": float("inf")}, ["--lr", "inf", "finite"]),
    ({"epochs": 0}, ["--epochs", "0", "at least 1"]),
    ({"max_steps": 0}, ["--max-steps", "0", "at least 1"]),
    ({"val_fraction": 0.0}, ["--val-fraction", "0.0", "greater than 0"]),
    ({"val_fraction": 1.0}, ["--val-fraction", "1.0", "less than 1"]),
    ({"batch_size": 2, "num_workers": 3}, ["--batch-size 2", "--num-workers 3"]),
    ({"dataset": "imagefolder"}, ["--dataset", "'imagefolder'", "image-folder", "cifar10"]),
    ({"model": "resnet-18"}, ["--model", "'resnet-18'", "did you mean resnet18"]),
    ({"optimizer": "adamx"}, ["--optimizer", "'adamx'", "'sgd', 'adam' or 'adamw'"]),
    ({"run_name": "a/b"}, ["--run-name", "'a/b'", "letters"]),
    ({"run_name": ".."}, ["--run-name", "'..'", "without '..'"]),
    ({"run_name": "a..b"}, ["--run-name", "'a..b'"]),
    ({"run_name": "-x"}, ["--run-name", "'-x'", "not starting with"]),
    ({"run_name": ""}, ["--run-name", "''"]),
    ({"keep_checkpoints": 1}, ["--keep-checkpoints", "1", "at least 2"]),
    ({"sync_batchnorm": True, "device": "cpu"}, ["--sync-batchnorm", "--device is cpu"]),
    ({"mixup": 0.2, "cutmix": 1.0}, ["--mixup", "--cutmix", "exclude each other"]),
    ({"momentum": 0.9}, ["--momentum 0.9", "--optimizer sgd"]),
    ({"step_epochs": 3}, ["--step-epochs 3", "--schedule step"]),
    ({"synthetic_samples": 100}, ["--synthetic-samples 100", "--dataset synthetic"]),
    ({"image_channels": 1}, ["--image-channels 1", "image-folder"]),
    ({"dataset": "image-folder"}, ["--data-dir", "image-folder"]),
    ({"data_dir": "here"}, ["--data-dir here", "read from files"]),
    ({"weights": "DEFAULT"}, ["--weights DEFAULT", "--model mnist-cnn", ".safetensors"]),
    ({"weights": "w.ckpt"}, ["--weights w.ckpt", ".pt", "runs/NAME"]),
    ({"bach_size": 8}, ["bach_size is no setting", "did you mean batch_size"]),
    ({"grad_accumulation": 4}, ["grad_accumulation is no setting any more", "--micro-batch-size"]),
    ({"micro_batch_size": 0}, ["--micro-batch-size 0", "at least 1"]),
    ({"seed": -1}, ["--seed", "-1", "at least 0"]),
    ({"max_bad_samples": 3}, ["--max-bad-samples 3", "image-folder"]),
    ({"max_bad_samples": -1}, ["--max-bad-samples", "-1", "at least 0"]),
    ({"sampler": "random"}, ["--sampler", "'random'", "'shuffled', 'sequential', 'subset'"]),
    ({"sampler": "subset"}, ["--sampler subset", "--subset-fraction", "--subset-file"]),
    ({"sampler": "subset", "subset_fraction": 0}, ["--subset-fraction", "greater than 0"]),
    ({"subset_fraction": 0.5}, ["--subset-fraction 0.5", "--sampler subset"]),
    ({"subset_file": "ids.txt"}, ["--subset-file ids.txt", "--sampler subset"]),
    ({"weight_column": "w", "sampler": "weighted"}, ["--weight-column w", "image-folder"]),
    ({"sampler": "weighted"}, ["--sampler weighted", "--dataset digits", "image-folder"]),
    ({"sampler": "weighted", "dataset": "image-folder", "data_dir": "d"}, ["--sampler weighted", "--weight-column"]),
    (
        {"sampler": "length-bucketed", "dataset": "image-folder", "data_dir": "d"},
        ["--sampler length-bucketed", "lengths", "--dataset image-folder"],
    ),
    ({"sampler": "aspect-grouped", "dataset": "cifar10"}, ["--sampler aspect-grouped", "shapes", "cifar10"]),
    ({"dataset": "text", "model": "text-lstm"}, ["--dataset text", "--data-dir", "train, val and test"]),
    ({**TEXT, "model": "mnist-cnn"}, ["--model mnist-cnn", "has texts", "text-lstm, text-transformer"]),
    ({"model": "text-lstm"}, ["--model text-lstm reads texts", "--dataset digits has images"]),
    ({**TEXT, "mixup": 0.5}, ["--mixup 0.5", "texts"]),
    ({**TEXT, "augment": "shift"}, ["--augment shift", "texts"]),
    ({**TEXT, "image_size": 32}, ["--image-size 32", "images"]),
    ({**TEXT, "label_column": "text"}, ["--text-column and --label-column are both text"]),
    ({**TEXT, "model": "text-transformer", "num_heads": 3}, ["--embedding-size 128", "multiple of --num-heads 3"]),
    ({**TEXT, "num_heads": 2}, ["--num-heads 2", "--model text-transformer"]),
    ({**TEXT, "model": "text-transformer", "bidirectional": True}, ["--bidirectional True", "--model text-lstm"]),
    ({**TEXT, "tokenizer": "t.json", "vocab_size": 100}, ["--vocab-size 100", "--tokenizer word or bpe"]),
    ({"max_length": 12}, ["--max-length 12", "texts"]),
    ({"hidden_size": 12}, ["--hidden-size 12", "a text model"]),
    ({"dataset": "stdlib-docs", "model": "text-lstm", "text_column": "t"}, ["--text-column t", "--dataset text"]),
    ({"dataset": "stdlib-docs", "model": "text-lstm", "data_dir": "d"}, ["--data-dir d", "read from files"]),
    ({**TEXT, "sampler": "weighted"}, ["--sampler weighted", "--weight-column"]),
    ({**TEXT, "sampler": "aspect-grouped"}, ["--sampler aspect-grouped", "shapes", "image-folder"]),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED, ids=[str(settings) for settings, _ in REFUSED])
def test_refuses_in_plain_words(settings: dict, words: list[str]) -> None:
    with pytest.raises(BadInput) as error:
        Config(**settings)
    for word in words:
        assert word in str(error.value)


def test_names_every_wrong_setting_at_once() -> None:
    with pytest.raises(BadInput) as error:
        Config(lr=0, epochs=0)
    assert "--lr" in str(error.value)
    assert "--epochs" in str(error.value)


def test_defaults_are_valid_and_survive_yaml(tmp_path: Path) -> None:
    config = Config(run_name="x", lr=0.25, max_steps=7)
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert Config(**load_yaml(str(tmp_path / "c.yaml"))) == config
    assert Config(**load_yaml(f"file://{tmp_path}/c.yaml")) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lrr: 1", ["lrr is no setting", "did you mean lr?"]),
        ("lr: -1", ["--lr -1", "greater than 0"]),
        ("- a\n- b", ["setting: value"]),
        ("1: 2", ["setting: value"]),
        ("lr: " + "[" * 5000, ["no YAML"]),
        ("lr: [", ["no YAML"]),
    ],
)
def test_a_wrong_yaml_names_the_file(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(BadInput) as error:
        load_yaml(str(path))
    for word in [str(path), *words]:
        assert word in str(error.value)


def test_a_yaml_is_completed_by_flags(tmp_path: Path) -> None:
    """What does not fit together in the file alone may fit with the flags."""
    path = tmp_path / "c.yaml"
    path.write_text("momentum: 0.5\nbatch_size: 2\nnum_workers: 4\ndataset: image-folder\nlr: 1e-3\n")
    values = load_yaml(str(path))
    assert values["lr"] == 0.001  # YAML's own 1e-3 is a text
    with pytest.raises(BadInput):
        Config(**values)
    Config(**{**values, "optimizer": "sgd", "batch_size": 8, "data_dir": "photos"})


def test_a_missing_yaml_is_named() -> None:
    with pytest.raises(BadInput, match=r"--config /no/such\.yaml: No such file"):
        load_yaml("/no/such.yaml")
    with pytest.raises(BadInput, match=r"--config file:///no/such\.yaml: there is no such file"):
        load_yaml("file:///no/such.yaml")


def test_where_it_runs_does_not_change_the_result_and_what_it_learns_does() -> None:
    free = ["num_workers", "cpus_per_worker", "device", "loader_workers", "log_every", "tracking_uri", "experiment"]
    free += ["max_failures", "keep_checkpoints", "run_name", "output_dir"]
    assert {effect_of(name) for name in free} == {"free"}
    result = [
        "sampler",
        "subset_fraction",
        "subset_file",
        "weight_column",
        "drop_last",
        "model",
        "dataset",
        "seed",
        "batch_size",
        "lr",
        "optimizer",
        "schedule",
        "augment",
        "precision",
    ]
    assert {effect_of(name) for name in result} == {"result"}
    assert {effect_of(name) for name in ("epochs", "max_steps", "max_bad_samples")} == {"length"}


def test_torchvision_names_are_read_from_its_source_correctly() -> None:
    import torchvision

    assert list(torchvision_models()) == sorted(torchvision.models.list_models(module=torchvision.models))


def test_did_you_mean_says_nothing_when_nothing_is_near() -> None:
    assert did_you_mean("zzzz", ["lr", "epochs"]) == ""


def test_importing_the_config_imports_nothing_heavy() -> None:
    code = (
        "import sys; from app.config import Config; import app.train, app.fit; Config();"
        "print([m for m in ('torch', 'torchvision', 'ray', 'mlflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_yaml_has_every_setting() -> None:
    assert set(yaml.safe_load(to_yaml(Config()))) == set(Config.model_fields)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent.parent / "configs").glob("*.yaml")), ids=lambda p: p.name
)
def test_the_example_configs_are_valid(path: Path) -> None:
    Config(**load_yaml(str(path)))


@pytest.mark.parametrize(
    "line", ["run_name: 2024-99-99", "epochs: !!int abc", "lr: !!float x", "!!map abc", "compile: !!bool x", "a: &a *a"]
)
def test_yaml_that_cannot_be_read_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(line + "\n")
    with pytest.raises(BadInput, match=r"--config .*c\.yaml"):
        load_yaml(str(tmp_path / "c.yaml"))


def test_numbers_in_yaml_are_what_they_look_like(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("num_workers: 1:4\nepochs: 010\nseed: 08\n")
    assert load_yaml(str(tmp_path / "c.yaml")) == {"num_workers": "1:4", "epochs": 10, "seed": 8}
    (tmp_path / "c.yaml").write_text("lr: 1\nlr: 2\n")
    with pytest.raises(BadInput, match=r"lr is given twice \(line 2\)"):
        load_yaml(str(tmp_path / "c.yaml"))


@pytest.mark.parametrize(
    ("given", "kept", "least", "most"),
    [(2, 2, 2, 2), ("2", 2, 2, 2), ("1:4", "1:4", 1, 4), ("3:3", 3, 3, 3)],
)
def test_a_number_of_workers_or_a_range(given: int | str, kept: int | str, least: int, most: int) -> None:
    config = Config(num_workers=given)
    assert (config.num_workers, config.min_workers, config.max_workers) == (kept, least, most)


@pytest.mark.parametrize("given", [0, -1, "0", "4:1", "0:3", "1:", ":2", "a", "1:2:3", 2.5])
def test_no_number_of_workers(given: Any) -> None:
    with pytest.raises(BadInput, match="--num-workers"):
        Config(num_workers=given)
