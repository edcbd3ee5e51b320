"""python autoscaling_limits.py, on the head of a `ray up` cluster: tell Ray what its autoscaler may start.

The autoscaler of Ray 2.60 keeps that to itself. Where it is not known, a run that the cluster has no
room for yet is refused instead of waiting for it (app/cluster.py: autoscaling_limits).
"""

from pathlib import Path
from typing import Any

import yaml
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # made by Cython
from ray.core.generated import autoscaler_pb2

BOOTSTRAP_CONFIG = Path("~/ray_bootstrap_config.yaml")  # where `ray up` writes what the autoscaler goes by


def cluster_config(config: dict[str, Any]) -> Any:
    """What may be started, as Ray's message of it: each type of machine, its resources and how many of it."""
    limits = autoscaler_pb2.ClusterConfig()  # type: ignore[attr-defined]  # made by protobuf
    for name, node_type in config["available_node_types"].items():
        limits.node_group_configs.add(
            name=name,
            resources=node_type["resources"],
            min_count=node_type["min_workers"],
            max_count=node_type["max_workers"],
        )
        for resource, amount in node_type["resources"].items():  # max_workers is also that of all types together
            limits.max_resources[resource] = max(limits.max_resources[resource], amount * config["max_workers"])
    return limits


if __name__ == "__main__":
    limits = cluster_config(yaml.safe_load(BOOTSTRAP_CONFIG.expanduser().read_text()))
    GcsClient(address=canonicalize_bootstrap_address_or_die("auto")).report_cluster_config(limits.SerializeToString())
