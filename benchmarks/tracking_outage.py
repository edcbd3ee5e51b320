"""python -m benchmarks.tracking_outage [ROUNDS]

Training speed with an MLflow server that answers, that is not there, that dies half-way, and that accepts
connections without answering, in turn on one Ray; as ratios to the first.
"""

import contextlib
import logging
import statistics
import sys
import tempfile
import threading
from pathlib import Path

from app.config import Config
from tests.faults.common import Watched, free_port, wait_until
from tests.faults.test_tracking import mlflow_server, silent_server, stop

KINDS = ("answering", "down from the start", "dying mid-run", "accepting and not answering")


def samples_per_s(kind: str, folder: Path, number: int) -> float:
    from app.fit import fit

    port = free_port()
    config = Config(
        run_name=f"r{number}",
        output_dir=str(folder),
        num_workers=2,
        max_steps=200,
        log_every=1,  # ten times what is usual
        tracking_uri=f"http://127.0.0.1:{port}",
    )
    watched = Watched(config)
    with contextlib.ExitStack() as during:
        if kind == "accepting and not answering":
            during.enter_context(silent_server(port))
        elif kind != "down from the start":
            server = during.enter_context(mlflow_server(port, folder))
            if kind == "dying mid-run":
                kill = threading.Thread(target=lambda: (wait_until(lambda: watched.step() >= 50), stop(server)))
                kill.start()
        summary, _ = fit(config)
    assert summary.step == 200
    assert summary.samples_per_s is not None
    return summary.samples_per_s


def main(rounds: int) -> None:
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds * len(KINDS)):
            kind = KINDS[number % len(KINDS)]
            speeds[kind].append(samples_per_s(kind, Path(folder), number))
    normal = statistics.median(speeds[KINDS[0]])
    for kind, values in speeds.items():
        ratio = statistics.median(values) / normal
        print(f"MLflow server {kind}: {ratio:.2f}, {', '.join(f'{value:.0f}' for value in values)} samples/s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
