"""Where workers can run now: as many places as the cluster gives, and which nodes are about to go."""

import time
from typing import Any

# A cluster gives its places one by one: what came within this time counts as all.
SETTLE_S = 2.0


class Places:
    """Placement groups, to learn how many workers the cluster has room for: one of `least` workers, and then up
    to `most` of one worker each.

    Unlike a count of the nodes' resources, they cannot count a node that is dead, being drained or
    full, and an autoscaler sees those that wait as a demand. Fewer than `least` places are never held: two
    that wait for more, each with what the other one lacks, would wait for ever.
    """

    def __init__(self, most: int, resources: dict[str, float], least: int = 1):
        from ray.util.placement_group import placement_group

        self._most, self._resources, self._least = most, resources, least
        self._groups = [placement_group([resources] * least)] if most else []
        self._ready, self._changed_at = 0, time.monotonic()

    def ready(self) -> int:
        """Of how many the cluster has given a place."""
        from ray.util.placement_group import placement_group, placement_group_table

        table: dict[str, Any] = placement_group_table()
        going = draining_nodes()
        ready = 0
        for number, group in enumerate(self._groups):
            entry = table.get(group.id.hex(), {})
            stays = not going & set(entry.get("bundles_to_node_id", {}).values())
            if entry.get("state") == "CREATED" and stays:
                ready += 1 if number else self._least
        if ready and len(self._groups) == 1:
            self._groups += [placement_group([self._resources]) for _ in range(self._most - self._least)]
        if ready != self._ready:
            self._ready, self._changed_at = ready, time.monotonic()
        return ready

    def settled(self) -> bool:
        """Whether no further place is to be expected: ready() has not changed for a while, or all are there."""
        return self._ready == self._most or time.monotonic() - self._changed_at > SETTLE_S

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
