"""How many trials run at once, and what each of them takes from the cluster."""

from ray.tune import PlacementGroupFactory

from app.cluster import room
from app.config import Config
from app.errors import BadInput

# A resource that the head's node has 1 of, and how much of it Ray Train's own actor takes.
HEAD, FOR_RAY_TRAIN = "node:__internal_head__", 0.001
# Trials of several workers each have a share of it.
MOST_OF_SEVERAL = 200


def at_once(base: Config, use_gpu: bool, wanted: int | None) -> int:
    """How many trials run at the same time. Raises BadInput for more than there is room for."""
    places = room(base, use_gpu)
    fit = max(1, places // base.max_workers)
    if base.max_workers > 1:
        fit = min(fit, MOST_OF_SEVERAL)
    if wanted is not None and wanted > fit:
        what = "GPUs" if use_gpu else "CPUs"
        raise BadInput(
            f"--max-concurrent {wanted}: the cluster has room for {places} workers ({what}), and a trial has "
            f"{base.max_workers}: at most {fit} at once"
        )
    return fit if wanted is None else wanted


def resources(base: Config, use_gpu: bool, most: int) -> PlacementGroupFactory:
    """Of a trial's own process. One with several workers has none itself: they have; the head's node counts
    how many there are, and has room for what Ray Train starts there, which is counted as the trial's."""
    if base.max_workers == 1:
        return PlacementGroupFactory([{"CPU": base.cpus_per_worker, **({"GPU": 1.0} if use_gpu else {})}])
    share = int(10_000 / most) / 10_000
    return PlacementGroupFactory([{"CPU": 0.0, HEAD: share - 2 * FOR_RAY_TRAIN}, {"CPU": 0.0, HEAD: FOR_RAY_TRAIN}])
