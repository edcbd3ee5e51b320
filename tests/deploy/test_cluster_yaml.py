"""cluster.yaml, by Ray's own code for it, its commands in a shell, and what README says of it. No cloud is called."""

import copy
import ipaddress
import json
import os
import re
import runpy
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import psutil
import pytest
import ray
import yaml
from packaging.specifiers import SpecifierSet

from app.cluster import autoscaling_limits
from tests.test_docs import FLAGS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "cluster.yaml").read_text()
HEAD_IP = "10.0.0.9"
VARIANTS = [(), ("s3",), ("nfs",), ("docker",), ("s3", "nfs", "docker")]
SECTION = "On a cluster of AWS machines"


class StrictLoader(yaml.SafeLoader):
    """YAML as Ray reads it, but for a key that stands twice: of these the last one would win, without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: a key stands twice in {keys}"
        return super().construct_mapping(node, deep=deep)


def cluster(*variant: str) -> dict[str, Any]:
    """The file's settings, with the variants of these names taken, as its first lines say."""
    text = TEXT
    for name in variant:
        assert f"\n#{name} " in text
        text = re.sub(rf"^#{name} ", "", text, flags=re.M)
    config = yaml.load(text, StrictLoader)
    if "docker" in variant:
        config |= {"setup_commands": [], "head_setup_commands": []}
    return config


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    """What `ray up` makes of it before it asks the cloud for anything."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    filled_out = prepare_config(copy.deepcopy(config))
    validate_config(filled_out)
    return filled_out


def all_commands(config: dict[str, Any]) -> list[str]:
    return [command for name, commands in config.items() if name.endswith("_commands") for command in commands]


@pytest.fixture(autouse=True)
def no_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of a cloud, or of anything else on a network, fails the test."""

    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        raise AssertionError(f"a test of cluster.yaml went on the network: {arguments}")

    for name in ("boto3", "botocore"):  # all of Ray's calls of AWS are through these: importing them fails
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("socket.socket.connect", "socket.socket.connect_ex", "socket.getaddrinfo"):
        monkeypatch.setattr(name, refuse)


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of somebody who has a token, and is in the repository."""
    home = tmp_path / "home"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text("0" * 64)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(ROOT)
    return home


# What Ray makes of it


@pytest.mark.parametrize("variant", VARIANTS)
def test_ray_takes_it_with_all_files_that_it_sends(variant: tuple[str, ...], user: Path) -> None:
    from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig

    config = prepared(cluster(*variant))
    # Ray fills in what is not given: its own commands would install another Ray, and show the dashboard to everyone.
    assert set(all_commands(config)) == set(all_commands(cluster(*variant)))
    # Reads each of the files.
    autoscaler = AutoscalingConfig(copy.deepcopy(config))
    assert autoscaler.get_node_type_configs().keys() == {"head", "gpu", "gpu-spot"}
    assert (user / ".ray/auth_token").samefile(os.path.expanduser(config["file_mounts"]["~/.ray/auth_token"]))
    assert config["file_mounts"]["~/requirements.lock"] == "requirements.lock"


def test_a_file_that_is_not_there_is_missed(user: Path) -> None:
    from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig

    (user / ".ray/auth_token").unlink()
    with pytest.raises(FileNotFoundError, match="auth_token"):
        AutoscalingConfig(prepared(cluster()))


def test_a_key_that_ray_does_not_know_is_refused() -> None:
    import jsonschema

    with pytest.raises(jsonschema.ValidationError):
        prepared(cluster() | {"idle_timeout": 10})


def scheduled(config: dict[str, Any], **state: Any) -> Any:
    """What Ray's autoscaler does with the cluster in this state."""
    from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest

    autoscaling = AutoscalingConfig(copy.deepcopy(config), skip_content_hash=True)
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=autoscaling.get_node_type_configs(),
        max_num_nodes=autoscaling.get_max_num_nodes(),
        idle_timeout_s=autoscaling.get_idle_timeout_s(),
        **state,
    )
    return ResourceDemandScheduler(None).schedule(request)  # type: ignore[arg-type]  # no log of events


def launched(config: dict[str, Any], *bundles: dict[str, float], **state: Any) -> dict[str, int] | None:
    """The machines it starts for workers that ask for these resources; None: it cannot."""
    from ray.autoscaler.v2.utils import ResourceRequestUtil
    from ray.core.generated import autoscaler_pb2

    requests = [ResourceRequestUtil.make(dict(bundle)) for bundle in bundles]
    gang = autoscaler_pb2.GangResourceRequest(requests=requests)  # type: ignore[attr-defined]  # made by protobuf
    reply = scheduled(config, gang_resource_requests=[gang], **state)
    machines = {launch.instance_type: launch.count for launch in reply.to_launch}
    return None if reply.infeasible_gang_resource_requests else machines


def ended(config: dict[str, Any], idle_minutes: float) -> list[str]:
    """The machines it ends, of a head and a GPU machine that have had nothing to do for so long."""
    from ray.autoscaler.v2.schema import AutoscalerInstance
    from ray.core.generated import autoscaler_pb2, instance_manager_pb2

    messages: Any = autoscaler_pb2
    machines: Any = instance_manager_pb2
    idle = [
        AutoscalerInstance(
            cloud_instance_id=name,
            ray_node=messages.NodeState(status=messages.NodeStatus.IDLE, idle_duration_ms=int(idle_minutes * 60_000)),
            im_instance=machines.Instance(
                instance_id=name,
                instance_type=name,
                status=machines.Instance.RAY_RUNNING,
                node_kind=machines.NodeKind.HEAD if name == "head" else machines.NodeKind.WORKER,
            ),
        )
        for name in ("head", "gpu")
    ]
    return [request.instance_id for request in scheduled(config, current_instances=idle).to_terminate]


WORKER = {"CPU": 4.0, "GPU": 1.0}


def test_workers_get_a_machine_each_and_none_trains_on_the_head() -> None:
    config = cluster()
    assert config["available_node_types"][config["head_node_type"]]["resources"] == {"CPU": 0}
    assert launched(config, *[WORKER] * 4) == {"gpu": 4}
    assert launched(config, *[WORKER] * 5) is None
    assert launched(config, {"CPU": 0.1}) == {"gpu": 1}


def test_there_are_no_spot_machines_unless_they_are_asked_for_and_then_they_come_first() -> None:
    config = cluster()
    spot = config["available_node_types"]["gpu-spot"]
    assert (spot["max_workers"], spot["node_config"].pop("InstanceMarketOptions")) == (0, {"MarketType": "spot"})
    assert spot["node_config"] == config["available_node_types"]["gpu"]["node_config"]
    spot["max_workers"] = 4
    assert launched(config, *[WORKER] * 4) == {"gpu-spot": 4}
    # AWS has none:
    assert launched(config, *[WORKER] * 4, recoverable_resource_availabilities={"gpu-spot": 0.0}) == {"gpu": 4}


def test_machines_go_when_nothing_needs_them() -> None:
    config = cluster()
    assert launched(config) == {}
    assert ended(config, idle_minutes=config["idle_timeout_minutes"] - 1) == []
    assert ended(config, idle_minutes=config["idle_timeout_minutes"] + 1) == ["gpu"]
    assert 1 <= config["idle_timeout_minutes"] <= 60
    assert config["provider"]["cache_stopped_nodes"] is False


@pytest.mark.parametrize("spot", [0, 4])
def test_a_run_is_told_what_the_cluster_can_become(spot: int, user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.state import state
    from ray.core.generated import autoscaler_pb2

    config = prepared(cluster())
    config["available_node_types"]["gpu-spot"]["max_workers"] = spot
    (user / "ray_bootstrap_config.yaml").write_text(json.dumps(config))
    reported: list[bytes] = []

    class Gcs:
        def __init__(self, address: str):
            assert address == f"{HEAD_IP}:6379"

        def report_cluster_config(self, serialized: bytes) -> None:
            reported.append(serialized)

    monkeypatch.setattr("ray._raylet.GcsClient", Gcs)
    monkeypatch.setattr(
        "ray._private.services.canonicalize_bootstrap_address_or_die",
        lambda address: {"auto": f"{HEAD_IP}:6379"}[address],
    )
    runpy.run_path(config["file_mounts"]["~/autoscaling_limits.py"], run_name="__main__")
    message = autoscaler_pb2.ClusterConfig.FromString(*reported)  # type: ignore[attr-defined]
    monkeypatch.setattr(state, "get_cluster_config", lambda: message)
    assert autoscaling_limits() == {"CPU": 16, "GPU": 4}


# Who gets at it


def rules(commands: list[str]) -> list[dict[str, str]]:
    """What these commands of AWS's let into which group."""
    words = [shlex.split(command) for command in commands]
    ingress = [line[3:] for line in words if line[:3] == ["aws", "ec2", "authorize-security-group-ingress"]]
    return [dict(zip(line[::2], line[1::2], strict=True)) for line in ingress]


def test_the_security_group_lets_in_ssh_from_the_users_addresses_and_the_group_itself() -> None:
    group = cluster()["metadata"]["security_group"]
    ssh, inside = rules(re.findall(r"^#   (aws .*)", TEXT, re.M))
    addresses = ipaddress.IPv4Network(ssh.pop("--cidr"))
    assert ssh == {"--group-id": group, "--protocol": "tcp", "--port": "22"}
    assert inside == {"--group-id": group, "--protocol": "all", "--source-group": group}
    # Reserved for documentation: as long as it is not replaced, it lets nobody in.
    assert addresses.subnet_of(ipaddress.IPv4Network("203.0.113.0/24"))
    assert "0.0.0.0/0" not in TEXT


@pytest.fixture
def aws(no_cloud: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Ray's code for AWS, without AWS's library: it can be imported, and fails where it would call AWS."""

    class Library(ModuleType):
        __version__ = "1.44.5"

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (Exception,), {})

    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        raise AssertionError(f"Ray calls AWS: {arguments}")

    for name in ("boto3", "boto3.exceptions", "boto3.resources", "boto3.resources.base"):
        monkeypatch.setitem(sys.modules, name, Library(name))
    for name in ("botocore", "botocore.client", "botocore.config", "botocore.exceptions"):
        monkeypatch.setitem(sys.modules, name, Library(name))
    for name in [name for name in sys.modules if name.startswith("ray.autoscaler._private.aws")]:
        monkeypatch.delitem(sys.modules, name)
    import ray.autoscaler._private.aws.config as module

    for name in ("_resource", "_client"):
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(sys.modules["boto3"], "resource", refuse, raising=False)
    return module


@pytest.mark.parametrize("variant", VARIANTS)
def test_ray_neither_makes_nor_opens_a_security_group(variant: tuple[str, ...], aws: ModuleType) -> None:
    config = prepared(cluster(*variant))
    assert aws._configure_security_group(copy.deepcopy(config)) == config
    assert "security_group" not in config["provider"]
    group = config["metadata"]["security_group"]
    for node_type in config["available_node_types"].values():
        assert node_type["node_config"]["SecurityGroupIds"] == [group]
        assert "NetworkInterfaces" not in node_type["node_config"]


def test_a_group_that_ray_makes_is_open_to_the_world(aws: ModuleType) -> None:
    """Why it must not make one."""
    mine = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "203.0.113.7/32"}]}
    opened = aws._create_default_inbound_rules({"sg-1"}, [mine])
    assert {"CidrIp": "0.0.0.0/0"} in [addresses for rule in opened for addresses in rule.get("IpRanges", [])]


def test_placeholders_are_no_ids_and_ray_puts_nothing_in_their_place(aws: ModuleType) -> None:
    config = prepared(cluster())
    for name, pattern in (("security_group", r"sg-[0-9a-f]+"), ("image", r"ami-[0-9a-f]+")):
        assert not re.fullmatch(pattern, config["metadata"][name])
    aws._check_ami(config)  # where there is none, it takes one of 2021
    for node_type in config["available_node_types"].values():
        assert node_type["node_config"]["ImageId"] == config["metadata"]["image"]


def made_by_aws_iam(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """How deploy/aws_iam.sh ends, and what it calls of AWS's, where there are no roles yet."""
    program = tmp_path / "aws"
    program.write_text(
        "#!/bin/bash\n"
        'printf "%s\\0" "$@" >>"$CALLS"; printf "\\n" >>"$CALLS"\n'
        'case "$1 $2" in "sts get-caller-identity") echo 123456789012 ;; "iam get-role") exit 254 ;;\n'
        '    "iam get-instance-profile") [[ $* == *--query* ]] || exit 254 ;; esac\n'
    )
    program.chmod(0o755)
    (tmp_path / "calls").touch()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}
    script = [str(ROOT / "deploy/aws_iam.sh"), *arguments]
    done = subprocess.run(script, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    return done, [call.split("\0") for call in (tmp_path / "calls").read_text().split("\0\n")[:-1]]


def roles() -> dict[str, str]:
    """Of the types of machines, by the names that #s3 has for them."""
    types = cluster("s3")["available_node_types"]
    return {name: each["node_config"]["IamInstanceProfile"]["Name"] for name, each in types.items()}


def test_the_roles_that_are_made_are_those_of_the_file(tmp_path: Path) -> None:
    done, calls = made_by_aws_iam(tmp_path, "our-bucket")
    assert done.returncode == 0, done.stderr
    options = [(call[:2], dict(zip(call[2::2], call[3::2], strict=True))) for call in calls]
    head, worker = roles()["head"], roles()["gpu"]
    assert roles()["gpu-spot"] == worker != head
    for verb, option in (("create-role", "--role-name"), ("create-instance-profile", "--instance-profile-name")):
        assert {named[option] for call, named in options if call == ["iam", verb]} == {head, worker}
    joined = [named for call, named in options if call == ["iam", "add-role-to-instance-profile"]]
    assert joined == [{"--instance-profile-name": name, "--role-name": name} for name in (worker, head)]
    assert "IamInstanceProfile" not in str(cluster()["available_node_types"])


def test_the_roles_may_do_no_more_than_the_file_says(tmp_path: Path) -> None:
    _, calls = made_by_aws_iam(tmp_path, "our-bucket")
    granted: dict[str, list[dict[str, Any]]] = {}
    for call in calls:
        if call[:2] == ["iam", "put-role-policy"]:
            named = dict(zip(call[2::2], call[3::2], strict=True))
            granted.setdefault(named["--role-name"], []).extend(json.loads(named["--policy-document"])["Statement"])
    storage = granted[roles()["gpu"]]
    assert {each["Resource"] for each in storage} == {"arn:aws:s3:::our-bucket", "arn:aws:s3:::our-bucket/*"}
    needed = {"s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"}
    actions = {action for each in storage for action in each["Action"]}
    assert needed <= actions
    assert all(action.startswith("s3:") and "*" not in action for action in actions)
    head = granted[roles()["head"]]
    assert head[: len(storage)] == storage
    free, *narrowed = head[len(storage) :]
    assert free == {"Effect": "Allow", "Resource": "*", "Action": ["ec2:DescribeInstances", "ec2:RunInstances"]}
    # Ray's tag on the machines of a cluster:
    from ray.autoscaler.tags import TAG_RAY_CLUSTER_NAME

    mine = {f"aws:ResourceTag/{TAG_RAY_CLUSTER_NAME}": cluster()["cluster_name"]}
    role = f"arn:aws:iam::123456789012:role/{roles()['gpu']}"
    assert [(each["Action"], each["Resource"], each["Condition"]["StringEquals"]) for each in narrowed] == [
        ("ec2:CreateTags", "*", {"ec2:CreateAction": "RunInstances"}),
        (["ec2:CreateTags", "ec2:TerminateInstances"], "*", mine),
        ("iam:PassRole", role, {"iam:PassedToService": "ec2.amazonaws.com"}),
    ]


def test_rays_autoscaler_calls_no_more_of_ec2_than_the_head_may() -> None:
    source = (Path(ray.__file__).parent / "autoscaler/_private/aws/node_provider.py").read_text()
    of_the_provider = source[source.index("class AWSNodeProvider") :]
    called = set(re.findall(r"ec2(?:_fail_fast)?\.((?:meta\.client\.)?\w+(?:\.filter)?)\(", of_the_provider))
    assert called == {
        "instances.filter",  # DescribeInstances
        "create_instances",  # RunInstances
        "meta.client.create_tags",
        "meta.client.start_instances",  # of stopped ones, which cache_stopped_nodes: false leaves none of
        "meta.client.describe_images",  # for CloudWatch, which is not asked for
    }


@pytest.mark.parametrize("arguments", [(), ("s3://our-bucket",), ("s3://our-bucket/runs",), ('x"}',)])
def test_a_bucket_that_is_none_makes_no_roles(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done, calls = made_by_aws_iam(tmp_path, *arguments)
    assert (done.returncode, calls) == (2, [])
    assert "usage: deploy/aws_iam.sh BUCKET" in done.stderr


@pytest.mark.parametrize("page", ["cluster.yaml", "docs/security.md"])
def test_it_is_said_what_rays_own_role_reaches(page: str, aws: ModuleType) -> None:
    text = " ".join((ROOT / page).read_text().replace("\n# ", " ").split())
    rights = set(re.findall(r"policy/(\w+)", Path(str(aws.__file__)).read_text()))
    assert rights == {"AmazonEC2FullAccess", "AmazonS3FullAccess"}
    assert {*rights, aws.DEFAULT_RAY_IAM_ROLE, "deploy/aws_iam.sh"} <= set(re.findall(r"[\w/.-]*\w", text))


SECRETS = re.compile(
    r"\b(AKIA|ASIA)[0-9A-Z]{16}\b"  # AWS's access keys
    r"|(?<![\w/+=])[A-Za-z0-9/+=]{40}(?![\w/+=])"  # and secret ones
    r"|\b[0-9a-fA-F]{32,}\b"  # Ray's tokens
    r"|\b(ghp|gho|hf|xox[bp]|sk)[-_][A-Za-z0-9]{10,}|-----BEGIN"
    r"|AUTH_TOKEN=|(?i:passw(or)?d|secret|credential)\w*\s*[=:]"
    r"|://[^/\s]+:[^/\s]+@"
)


def test_there_is_no_secret_in_it() -> None:
    assert not SECRETS.search(TEXT)
    for planted in (
        "AKIAIOSFODNN7EXAMPLE",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "0a" * 32,
        "-----BEGIN RSA PRIVATE KEY-----",
        "export RAY_AUTH_TOKEN=x",
        "aws_credentials: {}",
        "http://me:pw@127.0.0.1:5000",
    ):
        assert SECRETS.search(f"{TEXT}  - {planted}\n"), planted


# Its commands, in a shell

RECORD = """#!/bin/sh
printf '%s|%s|%s|%s\\n' "$(basename "$0") $*" "$RAY_AUTH_MODE" "$MLFLOW_TRACKING_URI" "$PWD" >> "$HOME/calls"
case "$(basename "$0") $*" in
    "wget "*/uv/*/install.sh) echo 'mkdir -p ~/.local/bin && ln -s ~/programs/uv-of-the-web ~/.local/bin/uv' ;;
    "wget "*) exit 1 ;;
esac
"""
# Of the system's. Beside them there may be a uv in the same place.
TOOLS = ("bash", "sh", "basename", "cat", "chmod", "grep", "ln", "mkdir", "setsid")


class Machine:
    """A made-up machine: Ray's shell and its environment, in which programs write down what they are called with."""

    def __init__(self, home: Path, config: dict[str, Any], is_head: bool, has_uv: bool = True):
        from ray.autoscaler._private.util import with_envs

        self.home = home
        (home / ".ray").mkdir(parents=True)
        (home / ".ray/auth_token").write_text("0" * 64)
        (home / ".ray/auth_token").chmod(0o644)
        programs = home / "programs"
        programs.mkdir()
        for name in ("uv" if has_uv else "uv-of-the-web", "ray", "mlflow", "python", "wget", "sudo"):
            (programs / name).write_text(RECORD)
            (programs / name).chmod(0o755)
        for name in TOOLS:
            (programs / name).symlink_to(shutil.which(name) or pytest.fail(f"{name} is missing"))
        (home / ".bashrc").write_text(f"export PATH={programs}\n")
        kind = "head" if is_head else "worker"
        self._setup = config[f"{kind}_setup_commands"]
        self._start = with_envs(config[f"{kind}_start_ray_commands"], {"RAY_HEAD_IP": HEAD_IP})

    def set_up(self) -> None:
        from ray.autoscaler._private.command_runner import _with_interactive

        for command in [*self._setup, *self._start]:
            done = subprocess.run(
                ["bash", "-c", " ".join(_with_interactive(command))],
                env={"HOME": str(self.home), "PATH": "/usr/bin:/bin"},
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                start_new_session=True,  # an interactive shell would take over the terminal
                check=False,
            )
            assert done.returncode == 0, f"{command}\n{done.stderr}"

    def calls(self, program: str) -> list[list[str]]:
        """Of a program: its command line, RAY_AUTH_MODE, MLFLOW_TRACKING_URI and directory, call by call."""
        lines = (self.home / "calls").read_text().replace(str(self.home), "~").splitlines()
        return [line.split("|") for line in lines if line.startswith(f"{program} ")]


def machine(home: Path, *variant: str, is_head: bool, has_uv: bool = True) -> Machine:
    made_up = Machine(home, prepared(cluster(*variant)), is_head, has_uv)
    made_up.set_up()
    deadline = time.monotonic() + 10
    while is_head and not made_up.calls("mlflow") and time.monotonic() < deadline:
        time.sleep(0.05)  # it is started in the background
    return made_up


@pytest.mark.parametrize("is_head", [True, False])
def test_a_machine_is_set_up_from_the_lock_with_a_python_of_one_version(is_head: bool, tmp_path: Path) -> None:
    made_up = machine(tmp_path, is_head=is_head)
    calls = [call[0] for call in made_up.calls("uv")]
    python = re.fullmatch(r"uv venv --allow-existing --python (\d+\.\d+\.\d+) ~/venv", calls[0])
    assert python
    requires = re.findall(r'^requires-python = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert python[1] in SpecifierSet(*requires)
    assert calls[1] == "uv pip install --python ~/venv --require-hashes -r ~/requirements.lock"
    more = [re.fullmatch(r"uv pip install --python ~/venv (boto3)==[\d.]+", call) for call in calls[2:]]
    assert [match and match[1] for match in more] == ["boto3"] * is_head
    assert stat.S_IMODE((tmp_path / ".ray/auth_token").stat().st_mode) == 0o600
    made_up.set_up()  # `ray up` again
    assert (tmp_path / ".bashrc").read_text().count("venv/bin") == 1


@pytest.mark.parametrize("is_head", [True, False])
def test_a_machine_without_uv_gets_the_version_that_the_other_files_name(is_head: bool, tmp_path: Path) -> None:
    made_up = machine(tmp_path, is_head=is_head, has_uv=False)
    fetched, *_ = [call[0] for call in made_up.calls("wget")]
    address = re.fullmatch(r"wget -qO- https://astral\.sh/uv/(\d+\.\d+\.\d+)/install\.sh", fetched)
    assert address, fetched
    assert f" uv=={address[1]} " in (ROOT / "deploy/Dockerfile").read_text()
    assert yaml.safe_load((ROOT / "deploy/runtime_env.yaml").read_text())["uv"]["uv_version"] == f"=={address[1]}"
    installed = [call[0].split()[1] for call in made_up.calls("uv")]
    assert installed == ["venv", "pip", "pip"][: 2 + is_head]
    calls = len(made_up.calls("wget"))
    made_up.set_up()
    assert calls + is_head == len(made_up.calls("wget")), "it is fetched once; the head asks whether MLflow is up"


def test_a_machine_that_has_uv_does_not_fetch_it(tmp_path: Path) -> None:
    assert not (tmp_path / "calls").exists()
    made_up = machine(tmp_path, is_head=False)
    assert made_up.calls("uv")
    assert not made_up.calls("wget")


def test_the_image_for_docker_has_what_the_heads_autoscaler_sets_up_the_others_with() -> None:
    recipe = re.findall(r"^#docker #   (.*)", TEXT, re.M)
    (packages,) = [line.split("--no-install-recommends ")[1].split() for line in recipe if "apt-get install" in line]
    assert {"openssh-client", "rsync"} <= set(packages)
    head = cluster()["head_setup_commands"]
    boto3 = re.findall(r"boto3==\S+", " ".join(recipe))
    assert boto3 == re.findall(r"boto3==\S+", " ".join(head))
    assert recipe[0] == f"FROM {cluster('docker')['docker']['image'].split('/')[-1]}"
    image_user = re.findall(r"^USER (.*)", (ROOT / "deploy/Dockerfile").read_text(), re.M)[-1]
    assert recipe[-1] == f"USER {image_user}"


@pytest.mark.parametrize("variant", [(), ("docker",)])
def test_the_head_shows_its_dashboard_and_mlflow_to_itself_alone(variant: tuple[str, ...], tmp_path: Path) -> None:
    head = machine(tmp_path, *variant, is_head=True)
    stop, start = head.calls("ray")
    assert stop[0] == "ray stop"
    command, auth, tracking, _ = start
    (start_ray,) = [each for each in cluster(*variant)["head_start_ray_commands"] if "ray start --head" in each]
    assert " RAY_JOB_STOP_WAIT_TIME_S=120;" in start_ray
    assert command.startswith("ray start --head ")
    words = command.split()
    assert {"--dashboard-host=127.0.0.1", "--autoscaling-config=~/ray_bootstrap_config.yaml"} <= set(words)
    assert auth == "token"
    ((command, _, _, directory),) = head.calls("mlflow")
    words = command.split()
    assert words[:2] == ["mlflow", "server"]
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert tracking == f"http://127.0.0.1:{words[words.index('--port') + 1]}"
    assert directory == "~/mlflow"
    assert [call[:2] for call in head.calls("python")] == [["python ~/autoscaling_limits.py", "token"]]


@pytest.mark.parametrize("variant", [(), ("docker",)])
def test_a_worker_joins_with_the_token_and_knows_no_mlflow(variant: tuple[str, ...], tmp_path: Path) -> None:
    worker = machine(tmp_path, *variant, is_head=False)
    stop, start = worker.calls("ray")
    assert stop[0] == "ray stop"
    command, auth, tracking, _ = start
    assert command.startswith(f"ray start --address={HEAD_IP}:6379 ")
    assert (auth, tracking, worker.calls("mlflow")) == ("token", "", [])


def shell_commands() -> list[str]:
    everywhere = {command for variant in VARIANTS for command in all_commands(cluster(*variant))}
    return [*sorted(everywhere), *re.findall(r"^#   ((?:aws|export) .*)", TEXT, re.M)]


@pytest.mark.parametrize("command", shell_commands())
def test_bash_and_shellcheck_find_nothing_wrong_with(command: str) -> None:
    from ray.autoscaler._private.command_runner import _with_interactive

    for script in (command, " ".join(_with_interactive(command))):  # the second as Ray sends it
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed; bash -n has passed")
    done = subprocess.run(
        [shellcheck, "--shell=bash", "-"], input=f"{command}\n", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_mlflow_stays_when_the_shell_ends_and_is_not_started_twice(tmp_path: Path) -> None:
    (command,) = [command for command in cluster()["head_start_ray_commands"] if "mlflow server" in command]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = command.replace("5000", str(port))
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}

    def start() -> None:
        subprocess.run(["bash", "-c", script], env=environment, check=True, start_new_session=True)

    def listening() -> set[str]:
        sockets: Any = psutil.net_connections("tcp")
        return {found.laddr.ip for found in sockets if found.status == "LISTEN" and found.laddr.port == port}

    def servers() -> list[psutil.Process]:
        found = psutil.process_iter(["cmdline"])
        return [process for process in found if {"server", str(port)} <= set(process.info["cmdline"] or ())]

    log = tmp_path / "mlflow/server.log"

    def wait_for(condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)

    start()
    try:
        wait_for(listening)
        assert listening() == {"127.0.0.1"}
        wait_for(lambda: "startup complete" in log.read_text())
        first = servers()
        start()
        assert servers() == first
        assert (tmp_path / "mlflow/mlflow.db").exists()
    finally:
        for process in servers():
            process.terminate()
            process.wait(30)


# What README says of it


def section() -> str:
    found = re.search(rf"^## {SECTION}\n(.*?)(?=^## |\Z)", (ROOT / "README.md").read_text(), re.S | re.M)
    assert found, f"README.md has no section '{SECTION}', which cluster.yaml names"
    assert SECTION in TEXT
    return found[1]


def command_lines() -> list[list[str]]:
    lines = [shlex.split(line, comments=True) for line in re.findall(r"^    (.*)", section(), re.M)]
    return [line for line in lines if line]


def test_every_name_that_readme_has_of_it_is_in_it() -> None:
    commands = [" ".join(line) for line in command_lines()]
    names = {name for name in re.findall(r"`([^`]+)`", section()) if not name.startswith("ray ")}
    names |= {f"port={port}" for port in re.findall(r"(?:127\.0\.0\.1:|-p )(\d+)", section())}
    names |= {word for command in commands for word in command.split() if word.startswith("~/")}
    assert len(names) > 6
    text = TEXT.replace("--port ", "port=")
    assert not {name for name in names if name.rstrip("/") not in text}


def test_the_variant_that_the_job_of_readme_needs_is_taken_before_the_cluster_is_started(tmp_path: Path) -> None:
    lines = command_lines()
    (up,) = [number for number, words in enumerate(lines) if words[-3:] == ["ray", "up", "cluster.yaml"]]
    before = lines[:up]
    assert ["deploy/aws_iam.sh", "BUCKET"] in before
    (sed,) = [words for words in before if words[0] == "sed"]
    shutil.copy(ROOT / "cluster.yaml", tmp_path)
    subprocess.run(sed, cwd=tmp_path, check=True)
    assert yaml.load((tmp_path / "cluster.yaml").read_text(), StrictLoader) == cluster("s3")
    assert " ".join(shlex.quote(word) for word in sed) in TEXT
    assert any(word == "s3://BUCKET/runs" for words in lines for word in words)


def test_every_command_of_rays_in_readme_exists_with_its_options() -> None:
    import click
    from ray.scripts.scripts import cli

    used: set[str] = set()
    for words in command_lines():
        if "ray" not in words:
            continue
        words = words[words.index("ray") + 1 :]
        group: Any = cli
        while isinstance(group, click.Group):
            used.add(words[0])
            group = group.commands[words.pop(0)]
        own = words[: words.index("--")] if "--" in words else words
        known = {option for parameter in group.params for option in parameter.opts}
        assert {word for word in own if word.startswith("-")} <= known
        takes_file = "cluster_config_file" in {parameter.name for parameter in group.params}
        assert [word for word in own if word.endswith(".yaml")] == ["cluster.yaml"] * takes_file
    assert used >= {"up", "dashboard", "job", "submit", "down", "get-auth-token"}


def test_the_job_of_readme_is_one_that_fits() -> None:
    from app.config import Config

    ((_, job),) = [
        (words, words[words.index("--") + 1 :]) for words in command_lines() if "submit" in words and "--" in words
    ]
    assert job[:3] == ["python", "-m", "app.train"]
    options = dict(zip(job[3::2], job[4::2], strict=True))
    assert options.keys() <= FLAGS
    config = Config.model_validate({flag[2:].replace("-", "_"): value for flag, value in options.items()})
    worker = {"CPU": config.cpus_per_worker, "GPU": 1}
    assert launched(cluster(), *[worker] * config.max_workers) == {"gpu": config.max_workers}
    assert re.match(r"s3://|/mnt/", config.output_dir)
