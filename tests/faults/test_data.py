"""Images that cannot be read among good ones."""

from pathlib import Path

import pytest

from app.evaluate import main as evaluate
from app.fit import fit
from tests.faults.conftest import Figures
from tests.integration.test_data import config, last_line, write_mixed_shapes

pytestmark = [
    pytest.mark.faults,
    pytest.mark.usefixtures("local_ray"),
    pytest.mark.filterwarnings("ignore"),  # ray's own
]


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
