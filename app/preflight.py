"""--dry-run: everything that can be found out about a run without training."""

import torch
from torch.nn import functional as F

from app.cluster import connected
from app.config import Config
from app.data.datasets import check_data, load_splits
from app.data.sampling import build_order, build_schedule
from app.distributed import World
from app.models.build import preprocessing
from app.runs import open_run, run_storage, stored_tokenizer
from app.setup import build_network, training_loader


def check(config: Config, verbose: bool) -> int:
    """Print what was found, one line a subject. Raises BadInput at the first thing that cannot work."""
    run = open_run(config)
    print(f"ok  settings: run {config.run_name} is {'finished' if run.status == 'finished' else 'ready to start'}")
    run_storage(config).check_writable()
    print(f"ok  storage: {run_storage(config).root} can be written to")
    found = check_data(config, stored_tokenizer(config))
    splits = load_splits(config, found.tokenizer)
    sizes = {name: len(samples.labels) for name, samples in splits.named().items()}
    print(f"ok  data: {splits.info}, {sizes}")
    for note in found.notes:
        print(f"    note: {note}")

    network = build_network(config, splits.info, checkpoint=None)
    order = build_order(config, splits.train.labels, splits.train.facts)
    schedule, world = build_schedule(config, order), World(0, config.max_workers)
    batch = next(iter(training_loader(config, splits, order, schedule, world, 0, torch.device("cpu"))))
    loss = F.cross_entropy(network(preprocessing(splits.info)(batch["inputs"])), batch["targets"])
    loss.backward()
    count = sum(parameter.numel() for parameter in network.parameters())
    print(f"ok  model: {config.model}, {count:,} parameters, loss {loss.item():.4f} on a batch of {len(batch['ids'])}")
    print(f"ok  length: {schedule.total_steps:,} steps, {schedule.steps_per_epoch:,} an epoch")

    with connected(config, verbose) as cluster:
        device = "cuda" if cluster.use_gpu else "cpu"
        print(f"ok  cluster: {config.num_workers} workers on {cluster.num_nodes} nodes, device {device}")
        for note in cluster.notes:
            print(f"    note: {note}")
    return 0
