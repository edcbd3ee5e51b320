"""The examples of docs/, from the page as it stands."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.train import main
from tests.common import DOCS, write_examples

pytestmark = pytest.mark.filterwarnings("ignore")  # ray's own


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = path
    for name in ("my_data", "my_net", "mine"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("page", ["your-own.md", "from-ddp.md"])
def test_a_dry_run_of_the_examples_is_what_the_page_shows(
    page: str, start: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = write_examples(page, start)
    command = next((words for words in commands if "--dry-run" in words), [*commands[-1], "--dry-run"])
    assert main(command) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said if line.startswith("ok  ")] == [
        f"ok  {subject}" for subject in ("settings", "storage", "data", "model", "length", "tracking", "cluster")
    ]
    shown = re.findall(r"^    (ok  (?:data|model|length): .*)", (DOCS / page).read_text(), re.M)
    assert len(shown) == (3 if page == "your-own.md" else 0)
    for line in shown:
        assert re.sub(r"loss .*? on", "loss on", line) in [re.sub(r"loss .*? on", "loss on", told) for told in said]


@pytest.mark.slow
@pytest.mark.ci
def test_the_examples_train(tmp_path: Path) -> None:
    """By the command itself, in a directory of its own, from which its workers find the two files too."""
    command = write_examples("your-own.md", tmp_path)[-1]
    words = [sys.executable, "-m", "app.train", *command, "--tracking-uri", "none", "--cpus-per-worker", "0.5"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["status"], summary["step"], summary["samples_seen"]) == ("finished", 120, 3592)
    assert summary["metrics"]["test/accuracy"] > 0.9
