"""The user's own code on a cluster whose nodes have other files, or older ones of the same names."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from tests.common import write_examples
from tests.faults.common import wait_until
from tests.faults.test_cluster import cluster as a_cluster
from tests.faults.test_jobs import client as a_client

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore")]  # ray's own
cluster, client = a_cluster, a_client  # fixtures

# Which file a process has it from.
SEEN = """
import os
from pathlib import Path
Path({folder!r}, f"{{os.getpid()}}-{{__name__}}").write_text(__file__)
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cluster is started: a directory in which another mine.py lies."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "mine.py").write_text("raise RuntimeError('this is not the one')")
    monkeypatch.chdir(folder)
    return folder


def write_code(tmp_path: Path) -> list[str]:
    """The page's example, which now imports a module and a package. Returns the command's words."""
    project = tmp_path / "project"
    (project / "parts").mkdir(parents=True)
    (tmp_path / "seen").mkdir()
    (command,) = write_examples("from-ddp.md", project)
    seen = SEEN.format(folder=str(tmp_path / "seen"))
    mine = (project / "mine.py").read_text()
    (project / "mine.py").write_text(f"import beside\nimport parts.deep\n{seen}\n{mine}")
    (project / "beside.py").write_text(seen)
    (project / "parts" / "deep.py").write_text(seen)
    own = ["--output-dir", str(tmp_path / "runs"), "--run-name", "r", "--tracking-uri", "none"]
    return [sys.executable, "-m", "app.train", *command, "--cpus-per-worker", "0.5", *own]


def assert_all_was_sent(tmp_path: Path) -> None:
    """The command has the modules from its directory, and all workers have what it sent."""
    by_process: dict[str, dict[str, str]] = {}
    for file in (tmp_path / "seen").iterdir():
        process, _, module = file.name.partition("-")
        by_process.setdefault(process, {})[module] = file.read_text()
    at_home = [files for files in by_process.values() if str(tmp_path / "project") in files["mine"]]
    sent = [files for files in by_process.values() if "/py_modules_files/" in files["mine"]]
    assert (len(at_home), len(sent)) == (1, len(by_process) - 1)
    assert len(sent) >= 2
    for files in sent:
        assert files.keys() == {"mine", "beside", "parts.deep"}
        assert all("/py_modules_files/" in path for path in files.values())


@pytest.mark.ci
def test_code_is_found_on_a_cluster_that_was_started_elsewhere(elsewhere: Path, cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=1)
    words = write_code(tmp_path)
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    done = subprocess.run(words, cwd=tmp_path / "project", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["status"], summary["epoch"]) == ("finished", 3)
    assert summary["metrics"]["val/accuracy"] > 0.9
    assert_all_was_sent(tmp_path)


def test_a_job_keeps_its_working_dir_and_modules(elsewhere: Path, client: JobSubmissionClient, tmp_path: Path) -> None:
    words = write_code(tmp_path)
    (tmp_path / "working").mkdir()
    (tmp_path / "working" / "hello.txt").write_text("of the job")
    (tmp_path / "jobs_own").mkdir()
    (tmp_path / "jobs_own" / "__init__.py").write_text("")
    mine = tmp_path / "project" / "mine.py"
    mine.write_text(
        mine.read_text().replace(
            "    labels = np",
            "    import jobs_own\n    assert open(config.data_dir + '/hello.txt').read() == 'of the job'\n"
            "    if 'py_modules_files' in __file__:\n        assert open('hello.txt').read() == 'of the job'\n"
            "    labels = np",
            1,
        )
    )
    words += ["--max-steps", "2", "--data-dir", str(tmp_path / "working")]
    project = shlex.quote(str(tmp_path / "project"))
    job = client.submit_job(
        entrypoint=f"cd {project} && exec {shlex.join(words)}",
        runtime_env={"working_dir": str(tmp_path / "working"), "py_modules": [str(tmp_path / "jobs_own")]},
    )
    wait_until(lambda: client.get_job_status(job).is_terminal())
    assert client.get_job_status(job) == JobStatus.SUCCEEDED, client.get_job_logs(job)
    assert_all_was_sent(tmp_path)
