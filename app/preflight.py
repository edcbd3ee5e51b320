"""--dry-run: everything that can be found out about a run without training."""

import torch
from torch import nn
from torch.nn import functional as F

from app.cluster import connected
from app.config import Config
from app.data.datasets import check_data, load_splits
from app.data.sampling import build_order, build_schedule
from app.deliver import server_problem
from app.distributed import World
from app.errors import BadInput
from app.generators import generators_kept
from app.loop import inputs_in_layout
from app.models.build import preprocessing
from app.nodes import inspect_nodes, print_nodes, told
from app.runs import open_run, run_storage, tokenizer_to_go_on_with
from app.setup import build_network, training_loader
from app.storage import without_credentials
from app.user_code import import_own, told_as_bad_input


@generators_kept()
def check(config: Config, verbose: bool) -> int:
    """Print what was found, one line a subject. Raises BadInput at the first thing that cannot work."""
    run = open_run(config)
    import_own(config)
    print(f"ok  settings: run {config.run_name} is {'finished' if run.status == 'finished' else 'ready to start'}")
    run_storage(config).check_writable()
    print(f"ok  storage: {run_storage(config).root} can be written to")
    found = check_data(config, tokenizer_to_go_on_with(config))
    splits = load_splits(config, found.tokenizer)
    sizes = {name: len(samples.labels) for name, samples in splits.named().items()}
    print(f"ok  data: {splits.info}, {sizes}")
    for note in found.notes:
        print(f"    note: {note}")

    on_cpu = config.model_copy(update={"sync_batchnorm": False})  # which needs a GPU, and this process may have none
    network = build_network(on_cpu, splits.info, checkpoint=None)
    order = build_order(config, splits.train.labels, splits.train.facts)
    schedule, world = build_schedule(config, order), World(0, config.max_workers)
    batch = next(iter(training_loader(config, splits, order, schedule, world, 0, torch.device("cpu"))))
    loss = first_loss(config, network, preprocessing(splits.info)(batch["inputs"]), batch["targets"])
    count = sum(parameter.numel() for parameter in network.parameters())
    print(f"ok  model: {config.model}, {count:,} parameters, loss {loss.item():.4f} on a batch of {len(batch['ids'])}")
    print(f"ok  length: {schedule.total_steps:,} steps, {schedule.steps_per_epoch:,} an epoch")

    if problem := server_problem(str(config.tracking_uri)):
        raise BadInput(f"--tracking-uri: {problem}; start it, or train without it: records are delivered later")
    uri = without_credentials(str(config.tracking_uri))
    print(f"ok  tracking: {'no records' if uri == 'none' else f'records go to {uri}'}")
    with connected(config, verbose) as cluster:
        device = "cuda" if cluster.use_gpu else "cpu"
        nodes = inspect_nodes(config)
        print_nodes(nodes.nodes)
        if nodes.problems:
            raise BadInput(told(nodes.problems))
        print(f"ok  cluster: {config.num_workers} workers on {cluster.num_nodes} nodes, device {device}")
        for note in cluster.notes:
            print(f"    note: {note}")
    return 0


def first_loss(config: Config, network: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of a batch, in training mode, after a backward pass. Raises BadInput where there is none."""
    inputs = inputs_in_layout(inputs, config)
    with told_as_bad_input(f"--model {config.model}, training on a batch of {tuple(inputs.shape)}"):
        logits = network.train()(inputs)
        if not isinstance(logits, torch.Tensor):
            raise BadInput(f"it gives {type(logits).__name__} in training mode: it must give logits, as in evaluation")
        loss = F.cross_entropy(logits, targets)
        if not loss.requires_grad:
            raise BadInput("no gradient comes from its logits: they are detached, or made under torch.no_grad()")
        if not loss.isfinite():
            raise BadInput(f"the loss is {loss.item()} before the first step: its logits or the inputs are not finite")
        loss.backward()
    return loss
