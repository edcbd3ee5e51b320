"""Where workers can run now: as many places as the cluster gives, and which nodes are about to go."""

import time
from typing import Any

# A cluster gives its places one by one: what came within this time counts as all.
SETTLE_S = 2.0


class Places:
    """Placement groups of one worker each, to learn how many workers the cluster has room for.

    Unlike a count of the nodes' resources, they cannot count a node that is dead, being drained or
    full, and an autoscaler sees those that wait as a demand.
    """

    def __init__(self, count: int, resources: dict[str, float]):
        from ray.util.placement_group import placement_group

        self._groups = [placement_group([resources]) for _ in range(count)]
        self._ready, self._changed_at = 0, time.monotonic()

    def ready(self) -> int:
        """Of how many the cluster has given a place."""
        from ray.util.placement_group import placement_group_table

        table: dict[str, Any] = placement_group_table()
        going = draining_nodes()
        ready = 0
        for group in self._groups:
            entry = table.get(group.id.hex(), {})
            stays = not going & set(entry.get("bundles_to_node_id", {}).values())
            ready += entry.get("state") == "CREATED" and stays
        if ready != self._ready:
            self._ready, self._changed_at = ready, time.monotonic()
        return ready

    def settled(self) -> bool:
        """Whether no further place is to be expected: ready() has not changed for a while, or all are there."""
        return self._ready == len(self._groups) or time.monotonic() - self._changed_at > SETTLE_S

    def release(self) -> None:
        from ray.util.placement_group import remove_placement_group

        for group in self._groups:
            remove_placement_group(group)
        self._groups = []


def draining_nodes() -> set[str]:
    """The ids of the nodes that were told to end: a spot machine's notice, or an autoscaler's."""
    # What Ray Train's own watcher asks; ray.train.get_preemption_info() is a barrier of all ranks.
    from ray._private.state import state

    return set(state.get_draining_nodes())
