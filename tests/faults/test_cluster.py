"""Nodes that come and go, and a driver that is killed: the command on a cluster of raylets of its own."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.common import PlainNet
from tests.faults.common import CHECKPOINT_EVERY, Command, Fit, assert_same_run, slow_config, wait_until
from tests.faults.conftest import Figures

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore")]  # ray's own


class SlowPlainNet(PlainNet):
    """Without dropout: its curve is the same on any number of workers."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)
        return self.fc(F.relu(self.conv(images)).flatten(1))


class MemoryForFive(SlowPlainNet):
    """Has memory for the gradients of five samples at a time."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and len(images) > 5:
            raise torch.OutOfMemoryError(f"tried to allocate memory for {len(images)} samples")
        return super().forward(images)


EPOCHS, STEPS = 20, 120
PLAIN = {"model": "tests.faults.test_cluster:SlowPlainNet", "epochs": EPOCHS, "cpus_per_worker": 1.0}


@pytest.fixture(scope="module")
def undisturbed(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Fit:
    run = Fit(slow_config(tmp_path_factory.mktemp("undisturbed"), **PLAIN, num_workers=1))
    assert run.result()[1] == 0
    return run


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head node without CPUs, where the driver and the Tracker are; its nodes are added by the tests."""
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": folder}
        cluster = Cluster(initialize_head=True, connect=False, head_node_args=head)
        yield cluster
        cluster.shutdown()


def started(cluster: Any, tmp_path: Path, **settings: Any) -> Command:
    return Command(slow_config(tmp_path, **{**PLAIN, **settings}), tmp_path, RAY_ADDRESS=cluster.address)


def alive_actors(cluster: Any, class_name: str = "") -> list[dict[str, Any]]:
    actors = cluster.global_state.actor_table(None).values()
    return [actor for actor in actors if actor["State"] == "ALIVE" and class_name in actor["ActorClassName"]]


def drain(address: str, node_id: str) -> None:
    """As a cloud's notice does it: 60 seconds are left."""
    ray = Path(sys.executable).with_name("ray")
    words = ["drain-node", "--address", address, "--node-id", node_id, "--deadline-remaining-seconds", "60"]
    why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    subprocess.run([ray, *words, *why], check=True, capture_output=True)


def tags_of(run: Command) -> list[dict[str, str]]:
    from app.spool import read_records

    records = [record for record, _ in read_records(run.folder / "tracking", 0)]
    return [record["tags"] for record in records if record["kind"] == "tags"]


def world_sizes(run: Command) -> list[str]:
    return [tags["world_size"] for tags in tags_of(run) if "world_size" in tags]


def test_nodes_that_go_without_notice_and_come(
    undisturbed: Fit, cluster: Any, tmp_path: Path, figures: Figures
) -> None:
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    run = started(cluster, tmp_path, num_workers="1:2", resize_after_s=2)
    step = run.wait_for_step(10)
    removed_at = time.time()
    cluster.remove_node(nodes[1], allow_graceful=False)
    shrunk_at = run.wait_for_step(step + 3)
    recovery_s = run.seconds_to_step_after(step, removed_at)
    lost = run.steps_lost(step, run.output())
    assert lost <= CHECKPOINT_EVERY
    assert world_sizes(run) == ["2", "1"]
    outcome = "an elastic run goes on with the workers that are left, same curve"
    figures("3. A node removed without notice", outcome, lost, run.seconds_to_first_step(), recovery_s)

    cluster.add_node(num_cpus=1)
    added_at = time.time()
    wait_until(lambda: len(world_sizes(run)) == 3)
    grown_at = run.step()
    assert grown_at >= shrunk_at
    summary, exit_code = run.result()
    assert (exit_code, summary["status"], summary["step"]) == (0, "finished", STEPS)
    assert world_sizes(run) == ["2", "1", "2"]
    assert_same_run(run, undisturbed, exact=False)
    assert run.steps_lost(grown_at, run.output()) == 0
    grown_s = run.seconds_to_step_after(grown_at, added_at)
    figures("3.1 A node added", "an elastic run takes it up after a checkpoint, same curve", 0, None, grown_s)


def test_a_node_that_goes_and_leaves_less_memory_than_a_step_needs(
    undisturbed: Fit, cluster: Any, tmp_path: Path, figures: Figures
) -> None:
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    run = started(cluster, tmp_path, num_workers="1:2", model="tests.faults.test_cluster:MemoryForFive")
    step = run.wait_for_step(10)
    cluster.remove_node(nodes[1], allow_graceful=False)
    summary, exit_code = run.result()
    assert (exit_code, summary["step"]) == (0, STEPS), run.output()
    assert "out of memory at 10 samples per forward pass on 1 worker: continuing with 5" in run.output()
    tags = {name: value for each in tags_of(run) for name, value in each.items()}
    assert (tags["world_size"], tags["micro_batch_size"]) == ("1", "5")
    assert_same_run(run, undisturbed, exact=False)
    lost, outcome = run.steps_lost(step, run.output()), "continues with micro-batches of the size before, same curve"
    figures("15.1 Out of memory on the workers that are left", outcome, lost, run.seconds_to_first_step())


def test_a_node_that_goes_with_notice(undisturbed: Fit, cluster: Any, tmp_path: Path, figures: Figures) -> None:
    nodes = {node.node_id: node for node in (cluster.add_node(num_cpus=1) for _ in range(3))}
    run = started(cluster, tmp_path, num_workers=2, max_failures=0)  # a drained node is no failure
    run.wait_for_step(10)
    drained = alive_actors(cluster, "RayTrainWorker")[0]["Address"]["NodeID"]
    drain(cluster.address, drained)
    drained_at = time.time()
    wait_until(lambda: "starting the workers anew after a checkpoint" in run.output())
    wait_until(lambda: not alive_actors(cluster, "RayTrainWorker"))
    cluster.remove_node(nodes[drained], allow_graceful=False)
    step = run.step()
    summary, exit_code = run.result()
    assert (exit_code, summary["step"]) == (0, STEPS)
    assert_same_run(run, undisturbed, exact=False)
    lost = run.steps_lost(step, run.output())
    assert lost <= 1
    outcome = "a checkpoint just in time; goes on on another node; no failure is counted"
    recovery_s = run.seconds_to_step_after(step, drained_at)
    figures("4. A node drained with notice", outcome, lost, run.seconds_to_first_step(), recovery_s)


def test_a_node_that_does_not_agree(cluster: Any, tmp_path: Path, figures: Figures) -> None:
    another = tmp_path / "another"  # version of torch, as far as its metadata tell
    (another / "torch-1.0.dist-info").mkdir(parents=True)
    (another / "torch-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    cluster.add_node(num_cpus=1)
    cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(another)})
    run = started(cluster, tmp_path)
    assert run.result() == ({}, 2)
    assert "torch 1.0, and 2." in run.output()
    assert "install requirements.lock on both" in run.output()
    assert not (tmp_path / "runs" / "r" / "run.json").exists()
    figures("25. A node with another version of torch", "refused before training, with the node, exit 2")


@pytest.mark.ci
def test_a_driver_that_is_killed_and_a_second_job_on_its_name(
    undisturbed: Fit, cluster: Any, tmp_path: Path, figures: Figures
) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    database = f"sqlite:///{tmp_path}/mlflow.db"
    run = started(cluster, tmp_path, tracking_uri=database)
    step = run.wait_for_step(10)
    assert len({actor["Address"]["NodeID"] for actor in alive_actors(cluster, "RayTrainWorker")}) == 2  # spread

    began = time.monotonic()
    second = started(cluster, tmp_path, tracking_uri=database)
    assert second.result() == ({}, 2)
    assert f"--run-name r is being trained right now by process {run.process.pid} on " in second.output()
    figures(
        "11. Two jobs on one run name", f"the second is refused in {time.monotonic() - began:.1f} s, naming the first"
    )

    run.process.kill()
    run.process.wait()
    killed_at = time.time()
    # Ray's own, named and detached, which it keeps for whoever comes next.
    ours = {"RayTrainWorker", "TrainController", "Tracker"}
    wait_until(lambda: not ours & {actor["ActorClassName"] for actor in alive_actors(cluster)})
    groups = cluster.global_state.placement_group_table().values()
    assert {group["state"] for group in groups} <= {"REMOVED"}
    gone_s = time.time() - killed_at

    again = started(cluster, tmp_path, tracking_uri=database)
    summary, exit_code = again.result()
    assert (exit_code, summary["step"]) == (0, STEPS)
    assert_same_run(again, undisturbed, exact=False)
    lost = again.steps_lost(step, again.output())
    assert lost <= CHECKPOINT_EVERY + 4  # it went on until it was killed
    again_s = again.seconds_to_step_after(max(s for s, _, at in again.losses() if at <= again.began), again.began)
    outcome = f"nothing is left of it after {gone_s:.0f} s; the same command goes on, the stale lock is no hindrance"
    figures("5. The driver killed", outcome, lost, run.seconds_to_first_step(), again_s)
