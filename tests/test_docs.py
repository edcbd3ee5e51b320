"""What docs/ says exists; its examples are run in tests/integration/test_docs.py and tests/faults/test_code.py."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from app import evaluate, train
from app.config import Config, flag
from app.reporter import GAUGES
from tests.common import DOCS, write_examples
from tests.tune.test_space import space_of
from tune import sweep

ROOT = DOCS.parent
PAGES = ("from-ddp.md", "sweeps.md", "your-own.md")
FROM_DDP = (DOCS / "from-ddp.md").read_text()
FLAGS = {
    word
    for command in (Config, train.Command, evaluate.Command, sweep.Command)
    for name in command.model_fields
    for word in (flag(name), flag(f"no_{name}"))
} | {"--register"}


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_it_names_exists(page: str) -> None:
    # Not those of the programs that the reader comes from.
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", (DOCS / page).read_text())) - {"--nproc-per-node"}
    assert len(named) > 5
    if page == "your-own.md":
        named -= {"--working-dir"}  # of ray job submit
    assert named <= FLAGS


def test_every_row_of_the_way_over_names_tests_and_these_exist() -> None:
    rows = [line.split(" | ") for line in FROM_DDP.splitlines() if line.startswith("| ") and "::" in line]
    assert len(rows) > 20
    for row in rows:
        assert len(row) == 3
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[2])
        assert len(tests) == row[2].count("::") > 0
        for file, name in tests:
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M), f"{file}::{name}"


def test_the_example_of_a_space_is_one(tmp_path: Path) -> None:
    text = re.findall(r"```yaml\n(.*?)```", (DOCS / "sweeps.md").read_text(), re.S)[0]
    assert len(space_of(tmp_path, text).dimensions) == 5


def test_the_page_on_prometheus_names_every_gauge() -> None:
    page = (DOCS / "observability.md").read_text()
    named = set(re.findall(r"ray_(evenkeel_\w+)", page))
    assert named == {name for name, _ in GAUGES.values()}
    metrics = Path(ray.__file__).parent / "dashboard" / "modules" / "reporter" / "reporter_agent.py"
    for name in set(re.findall(r"ray_(node_\w+)", page)):
        assert f'"{name}"' in metrics.read_text(), name


@pytest.mark.parametrize("page", [*PAGES, "observability.md", "security.md", "scaling.md", "growth.md"])
def test_readme_links_to_it(page: str) -> None:
    assert f"(docs/{page})" in (ROOT / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.ci
def test_the_script_that_is_left_behind_runs(tmp_path: Path) -> None:
    write_examples("from-ddp.md", tmp_path)
    torchrun = Path(sys.executable).with_name("torchrun")
    words = [torchrun, "--standalone", "--nproc-per-node", "2", "train_ddp.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "epoch 2 accuracy 1.000" in done.stdout
    assert (tmp_path / "net.pt").exists()
