"""The command line, as far as it goes without Ray."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from app.cli import EXIT_CODES


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app.train", *words], capture_output=True, text=True, cwd=cwd, check=False
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lr", "nan"], ["--lr nan", "finite"]),
        (["--learning-rate", "1"], ["--learning-rate"]),
        (["--epoch", "1"], ["--epochs"]),
        (["--optimizer", "rmsprop"], ["rmsprop", "sgd"]),
        (["--batch-size", "many"], ["--batch-size", "many"]),
        (["--run-name", "../up"], ["--run-name", "'../up'"]),
        (["--dataset", "image-folder", "--data-dir", "nowhere"], ["nowhere", "no such directory"]),
        (["--model", "no_such_package.net:build"], ["--model", "no_such_package"]),
        (["--grad-accumulation", "4"], ["--grad-accumulation is no setting any more", "--micro-batch-size"]),
        (["--config", "a.yaml", "--config", "b.yaml"], ["--config is given 2 times"]),
        (["--weights", "missing.pt"], ["--weights missing.pt", "no such file"]),
        (["--tracking-uri", "mlruns"], ["--tracking-uri mlruns", "sqlite:///mlflow.db"]),
        (["--output-dir", "file/below"], ["--output-dir", "cannot be written"]),
    ],
)
def test_bad_input_is_refused_with_exit_code_2_and_no_traceback(
    words: list[str], said: list[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a directory")
    done = command(*words, cwd=tmp_path)
    output = done.stdout + done.stderr
    assert done.returncode == 2
    assert "Traceback" not in output
    for word in said:
        assert word in output
    assert not (tmp_path / "runs").exists()  # nothing was begun


def test_a_wrong_value_is_answered_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    began = time.monotonic()
    assert command("--lr", "-1", cwd=tmp_path).returncode == 2
    assert time.monotonic() - began < 8  # 0.6 s on two free cores; torch and ray alone take 10


def test_flags_override_yaml_and_print_config_shows_the_result(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("lr: 0.5\nepochs: 3\n")
    done = command("--config", "c.yaml", "--epochs", "4", "--print-config", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = yaml.safe_load(done.stdout)
    assert (printed["lr"], printed["epochs"]) == (0.5, 4)
    assert printed["output_dir"] == str(tmp_path / "runs")
    assert printed["tracking_uri"] == f"sqlite:///{tmp_path}/mlflow.db"
    assert printed["run_name"].startswith("digits-mnist-cnn-")
    assert not (tmp_path / "runs").exists()


def test_a_cluster_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # a port that nobody listens on
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{taken.getsockname()[1]}")
        done = command("--tracking-uri", "none", cwd=tmp_path)
    assert done.returncode == 2
    assert "RAY_ADDRESS 127.0.0.1:" in done.stderr
    assert "no cluster answers there" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_password_is_printed(tmp_path: Path) -> None:
    done = command("--print-config", "--tracking-uri", "https://me:canary@server:5000", cwd=tmp_path)
    assert done.returncode == 0
    assert "tracking_uri: https://server:5000" in done.stdout
    assert "canary" not in done.stdout + done.stderr


def test_what_is_printed_can_be_read_back(tmp_path: Path) -> None:
    done = command("--print-config", "--lr", "0.5", cwd=tmp_path)
    (tmp_path / "again.yaml").write_text(done.stdout)
    assert command("--print-config", "--config", "again.yaml", cwd=tmp_path).stdout == done.stdout


def test_help_is_grouped_and_says_defaults_and_exit_codes(tmp_path: Path) -> None:
    done = command("--help", cwd=tmp_path)
    assert done.returncode == 0
    text = " ".join(done.stdout.replace("│", " ").split())
    assert " ".join(EXIT_CODES.split()) in text
    for group in ("run options", "cluster options", "data options", "training options", "tracking options"):
        assert group in text
    assert "Samples in one optimizer step, over all workers together. (default: 128)" in text
