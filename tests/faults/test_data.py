"""Images that cannot be read among good ones, data that differs between nodes, and a data server that is away."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from app.config import Config
from app.data.samples import Subset
from app.data.splits import Splits
from app.errors import BadInput
from app.evaluate import main as evaluate
from app.fit import fit
from tests.common import tiny_splits
from tests.faults.common import slow_config
from tests.faults.conftest import Figures
from tests.integration.test_data import config, last_line, write_mixed_shapes

pytestmark = [
    pytest.mark.faults,
    pytest.mark.usefixtures("local_ray"),
    pytest.mark.filterwarnings("ignore"),  # ray's own
]

tries: list[None] = []


@pytest.mark.ci
def test_unreadable_images_among_good_ones(
    tmp_path: Path, figures: Figures, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mixed_shapes(tmp_path / "images", 20)
    bad = [tmp_path / "images" / name for name in ("dark/003.png", "light/002.png", "light/010.png")]
    for path in bad:
        path.write_bytes(path.read_bytes()[:2000])  # their headers are good
    model = "tests.integration.test_data:any_shape_net"
    settings = {"model": model, "epochs": 2, "batch_size": 8, "in_memory_mb": 0}
    summary, exit_code = fit(config(tmp_path, run_name="some", max_bad_samples=3, **settings))
    assert (exit_code, summary.status) == (0, "finished")
    assert 2 * 33 <= summary.samples_seen < 2 * 36
    output = capsys.readouterr().out
    recorded = (tmp_path / "runs" / "some" / "tracking" / "bad_samples.txt").read_text()
    for path in bad:
        assert output.count(f"skipping a sample: {path} is no readable image") == 1
        assert recorded.count(str(path)) == 1
    assert evaluate([str(tmp_path / "runs" / "some"), "--split", "train"]) == 0
    found = last_line(capsys)
    assert found["num_samples"] * 2 == summary.samples_seen
    assert len(found["unreadable"]) == 36 - found["num_samples"]
    figures("16. Corrupt images among good ones", "named once each, skipped within --max-bad-samples, batches exact")


def with_one_more(config: Config) -> Splits:
    """The tiny data set; on rank 1 with another sample in front, and the last one gone."""
    splits = tiny_splits(config)
    if dist.get_rank() == 1:
        ids = np.roll(np.arange(len(splits.train.labels)), 1)
        return dataclasses.replace(splits, train=Subset(splits.train, ids))
    return splits


@pytest.mark.ci
def test_a_node_with_other_samples(tmp_path: Path, figures: Figures) -> None:
    with pytest.raises(BadInput, match="the workers do not have the same data, code or packages") as refused:
        fit(slow_config(tmp_path, dataset="tests.faults.test_data:with_one_more"))
    assert "labels of train: 57 labels, " in str(refused.value)
    assert "(rank 1)" in str(refused.value)
    figures("30. A node with one file more", "refused before the first step with the nodes and both values, exit 2")


def unreachable_at_first(config: Config) -> Splits:
    """The tiny data set, from a server that is away for the first two tries of each process."""
    tries.append(None)
    if len(tries) <= 2:
        raise ConnectionError("the data server did not answer")
    return tiny_splits(config)


def test_a_data_server_that_is_away_for_a_moment(tmp_path: Path, figures: Figures) -> None:
    settings = {"dataset": "tests.faults.test_data:unreachable_at_first", "schedule": "constant", "max_steps": 4}
    summary, exit_code = fit(slow_config(tmp_path, **settings))
    assert (exit_code, summary.step) == (0, 4)
    figures("31. ConnectionError in a user's load()", "called again; the run is not touched")
