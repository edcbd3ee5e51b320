"""Before a run, and where each worker starts: that the nodes agree with each other, and see what the run needs."""

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.cluster import Cluster, autoscaling_limits
from app.config import Config
from app.data.builtin import TORCHVISION
from app.deliver import server_problem
from app.errors import BadInput
from app.runs import RUN
from app.storage import Storage

# How long a node may take to say what it has, beside making the job's environment.
NODE_S = 30.0
# Ray's default for one that a job asks for, and the ways to ask.
ENVIRONMENT_S, ENVIRONMENTS = 600.0, ("pip", "uv", "conda", "image_uri", "container")
PACKAGES = ("torch", "torchvision", "ray")
# Where Ray unpacks what `ray job submit --working-dir` has sent.
JOB_FOLDER = "/runtime_resources/working_dir_files/"
SHARED = "a path that is shared by all nodes, or a URI such as s3://bucket"


@dataclass(frozen=True)
class Node:
    """A node that workers can run on. found: what look() says of it, or why it says nothing."""

    address: str
    cpus: float
    gpus: float
    found: dict[str, Any] | str


@dataclass(frozen=True)
class Inspection:
    """What the nodes have, and what is wrong with that, each with the way to mend it."""

    nodes: tuple[Node, ...]
    problems: tuple[str, ...]


def look(packages: Sequence[str], root: str, marker: str, token: str, data_dir: str | None) -> dict[str, Any]:
    """What there is where this runs: versions, the code, whether root has the file marker, and data_dir is there.

    Of the latter two: True, or a line that says why not, or nothing. This is sent to nodes whose code may be another
    one, or none: so it imports by itself what it needs.
    """
    import hashlib
    import os
    import platform
    from importlib.metadata import PackageNotFoundError, version
    from pathlib import Path

    def version_of(package: str) -> str:
        try:
            return version(package).partition("+")[0]  # 2.15.0+cpu computes what 2.15.0+cu130 does
        except PackageNotFoundError:
            return "none"

    found: dict[str, Any] = {"Python": ".".join(platform.python_version_tuple()[:2])}
    found |= {name: version_of(name) for name in packages}
    try:
        import app
        from app.storage import Storage
    except ModuleNotFoundError:
        return found | {"code": "none"}
    folder, digest = Path(str(app.__file__)).parent, hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())

    def says(root: str, marker: str) -> bool | str:
        try:
            return Storage(root).read(marker) == token.encode()
        except Exception as error:  # whatever an object store raises where its credentials are missing
            return f"{type(error).__name__}: {error}"

    def is_there(place: str) -> bool | str:
        if "://" not in place:
            return os.path.exists(place)
        try:
            return Storage(place, "--data-dir").exists()
        except Exception as error:  # as above
            return f"{type(error).__name__}: {error}"

    found["code"] = digest.hexdigest()[:6]
    return found | {"output": says(root, marker), "data": data_dir is None or is_there(data_dir)}


@dataclass(frozen=True)
class Here:
    """What the process that starts workers finds where it is: they are to find the same."""

    question: tuple[Any, ...]
    found: dict[str, Any]


def look_here(config: Config) -> Here:
    """Of a run that has begun: its run.json is what is looked for in the output_dir."""
    marker = f"{config.run_name}/{RUN}"
    question = _question(config, marker, (Storage(config.output_dir).read(marker) or b"").decode())
    return Here(question, look(*question))


def refuse_other_node(config: Config, there: Here) -> None:
    """Raise BadInput where this process, a worker's, does not find what the one that started it has found.

    Nodes may have come since these were asked.
    """
    import ray.util

    if problems := list(_of_a_node(config, look(*there.question), there.found)):
        raise BadInput(told([f"node {ray.util.get_node_ip_address()}: {problem}" for problem in problems]))


def _question(config: Config, marker: str, token: str) -> tuple[Any, ...]:
    data_dir = config.data_dir
    if config.dataset in TORCHVISION and config.download:
        data_dir = None  # the node fetches it
    elif ":" in config.dataset and data_dir is not None and "://" in data_dir:
        data_dir = None  # what it means is up to the user's function
    return PACKAGES, config.output_dir, marker, token, data_dir


def inspect_nodes(config: Config) -> Inspection:
    """Ask every node that workers can run on. It takes as long as the slowest of them needs to start a process."""
    import ray
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    import app.nodes

    nodes = _usable_nodes()
    storage, marker, token = Storage(config.output_dir), f".seen-{secrets.token_hex(4)}", secrets.token_hex(8)
    question = _question(config, marker, token)
    cloudpickle.register_pickle_by_value(app.nodes)
    try:
        with storage.temporary(marker, token.encode()):
            remote: Any = ray.remote(look)
            answers = {
                node: remote.options(
                    num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
                ).remote(*question)
                for node in nodes
            }
            patience = _patience()
            ray.wait(list(answers.values()), num_returns=len(answers), timeout=patience)
            mine = look(*question)
            found = {node: _answer(answer, patience) for node, answer in answers.items()}
    finally:
        cloudpickle.unregister_pickle_by_value(app.nodes)
    left = _usable_nodes().keys()  # one that went meanwhile is no problem of the run's
    seen = [
        Node(node["NodeManagerAddress"], node["Resources"]["CPU"], node["Resources"].get("GPU", 0.0), found[node_id])
        for node_id, node in nodes.items()
        if node_id in left
    ]
    return Inspection(tuple(seen), tuple(_problems(config, seen, mine)))


def _usable_nodes() -> dict[str, dict[str, Any]]:
    """Those that workers can run on, by their ids, as Ray describes them."""
    import ray

    from app.places import draining_nodes

    going = draining_nodes()
    return {
        node["NodeID"]: node
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) > 0 and node["NodeID"] not in going
    }


def _patience() -> float:
    """Seconds for a node to answer. Where the job asks for packages, each node first installs them."""
    import ray

    environment = ray.get_runtime_context().runtime_env
    if not any(environment.get(way) for way in ENVIRONMENTS):
        return NODE_S
    return NODE_S + (environment.get("config") or {}).get("setup_timeout_seconds", ENVIRONMENT_S)


def _answer(answer: Any, patience: float) -> dict[str, Any] | str:
    import ray
    from ray.exceptions import GetTimeoutError, RayTaskError

    try:
        return ray.get(answer, timeout=0)
    except GetTimeoutError:
        ray.cancel(answer)
        return f"no answer in {patience:g} s"
    except Exception as error:  # of Ray: the node, or its process, died
        cause = error.cause if isinstance(error, RayTaskError) else error
        return " ".join(str(cause).split())[:300] or type(cause).__name__


def _problems(config: Config, nodes: Sequence[Node], mine: dict[str, Any]) -> Iterator[str]:
    """One for each thing that is wrong, with the nodes that have it."""
    where = defaultdict(list)
    for node in nodes:
        for problem in _of_a_node(config, node.found, mine):
            where[problem].append(node.address)
    for problem, addresses in where.items():
        more = f" and {len(addresses) - 5} more" if len(addresses) > 5 else ""
        yield f"{'node' if len(addresses) == 1 else 'nodes'} {', '.join(addresses[:5])}{more}: {problem}"


def _of_a_node(config: Config, found: dict[str, Any] | str, mine: dict[str, Any]) -> Iterator[str]:
    if isinstance(found, str):
        yield f"cannot be asked ({found}): see `ray status`; mend it, or take the node away"
        return
    for name in ("Python", *PACKAGES):
        if found[name] != mine[name]:
            yield (
                f"{name} {found[name]}, and {mine[name]} where the command runs: install requirements.lock on both, or "
                "submit with --runtime-env deploy/runtime_env.yaml, which does"
            )
    if found["code"] != mine["code"]:
        what = "no app package" if found["code"] == "none" else "another version of the app package"
        yield f"{what}: submit with --working-dir . so that every node gets this one"
    if found["code"] == "none":
        return  # which is what the rest is looked for with
    if found["output"] is not True:
        problem = f" ({found['output']})" if found["output"] else ""
        yield f"--output-dir {config.output_dir} is not the one that the command sees{problem}: give {SHARED}/runs"
    if found["data"] is not True:
        problem = f" ({found['data']})" if found["data"] else ""
        yield f"--data-dir {config.data_dir} is not there{problem}: copy it there, or give {SHARED}/data"


def look_around(config: Config, cluster: Cluster, tracking_uri: str | None, event: Callable[[str], None]) -> None:
    """Before a run or a sweep begins: what a person should know goes to event.

    Raises BadInput for nodes that would fail it, or give another result.
    """
    for note in cluster.notes:
        event(note)
    if cluster.num_nodes > 1 and (problems := inspect_nodes(config).problems):
        raise BadInput(told(problems))
    if tracking_uri is not None and (problem := server_problem(tracking_uri)):
        event(f"tracking server {problem}: training goes on, and records are delivered when it does")
    for flag, path in (("--output-dir", config.output_dir), ("--tracking-uri", tracking_uri or "")):
        if JOB_FOLDER in path:
            event(f"{flag} {path} is in the job's own directory, which ends with Ray's session: give one that stays")


def told(problems: Sequence[str]) -> str:
    return "the nodes cannot train this run together:\n" + "\n".join(f"  {problem}" for problem in problems)


def print_nodes(nodes: Sequence[Node]) -> None:
    from rich.table import Table
    from rich.text import Text

    from app.progress import console

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("node", "CPUs", "GPUs", "Python", "torch", "vision", "ray", "code", "output", "data"):
        table.add_column(column, overflow="fold")
    for node in nodes:
        cells = [node.address, f"{node.cpus:g}", f"{node.gpus:g}"]
        if isinstance(node.found, str):
            cells.append("?")
        else:
            found = node.found
            cells += [found["Python"], *(found[name] for name in PACKAGES), found["code"]]
            cells += ["there" if found.get(name) is True else "missing" for name in ("output", "data")]
        table.add_row(*map(Text, cells))
    output = console()
    output.print(table)
    if limits := autoscaling_limits():
        most = " and ".join(f"{limits.get(name, 0):g} {name}s" for name in ("CPU", "GPU"))
        output.print(
            f"after autoscaling: up to {most}; a node that comes later is looked at when a worker starts there"
        )
