"""What each worker does: the only module of the loop that knows Ray Train.

data -> restore -> model -> optimizer -> loaders -> steps: train, record, evaluate, save -> test
"""

import json
import math
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import ray.train
import ray.train.torch
import torch
from ray.util import get_node_ip_address

from app.checkpoint import Checkpoint, CheckpointWriter, Position, find_good, load_checkpoint
from app.clock import Span, StepClock
from app.config import Config
from app.data.datasets import load_splits
from app.data.loader import Batch
from app.data.sampling import Order, Schedule, build_order, build_schedule
from app.data.splits import Splits
from app.distributed import World, any_rank, current_world, from_rank_zero, gather_texts
from app.errors import BadInput, FailedTogether, NonFiniteLoss, TrainingFailed, Unavailable, plain_message
from app.fingerprint import fingerprint_rank, refuse_disagreement
from app.loop import Training, evaluate, refuse_unreadable, train
from app.metrics import Evaluation, Window
from app.micro_batches import ForwardPass, samples_per_pass
from app.models.build import preprocessing
from app.nodes import Here, refuse_other_node
from app.optim import build_optimizer, learning_rate
from app.outcome import Outcome
from app.phases import NO_PHASES, Phases
from app.reporter import Reporter
from app.retry import is_transient
from app.runs import Status, checkpoint_name, checkpoint_storage, stored_tokenizer
from app.setup import (
    build_ema,
    build_network,
    check_smallest_part,
    ddp_options,
    evaluation_loader,
    is_fast_at_bf16,
    load_optimizer,
    refuse_slow_bf16,
    set_up_ddp,
    set_up_torch,
    training_loader,
)
from app.storage import Storage
from app.weights import load_weights

NUM_WORST = 25

T = TypeVar("T")


class RefusedTogether(Exception):
    """Every rank knows that it cannot start: all return, none waits for another, and none is restarted."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.message, self.exit_code = message, exit_code


def train_loop_per_worker(task: dict[str, Any]) -> Outcome:
    """Train as task["config"] says, reporting to the actor task["tracker"]. Rank 0's Outcome is the run's.

    task["here"]: of a cluster, what must be found on this node too. task["left"]: in the driver's process, set when it
    no longer waits. task["phases"]: for time stamps. task["span"]: steps to measure, and then to end.
    """
    config, context = Config(**task["config"]), ray.train.get_context()
    phases: Phases = task.get("phases", NO_PHASES)
    phases("a worker begins")
    place = (current_world(), context.get_node_rank(), context.get_local_rank())
    limits, setup_timeout_s = (config.hang_timeout_s, task.get("left")), config.setup_timeout_s
    with Reporter(task["tracker"], str(config.run_name), *place, *limits, setup_timeout_s=setup_timeout_s) as reporter:
        if failure := reporter.failure():  # of the workers before these, see below
            return Outcome("failed", error=failure[0], exit_code=failure[1])
        try:
            return run(config, reporter, task.get("here"), phases, task.get("span"))
        except RefusedTogether as error:
            return Outcome("failed", error=error.message, exit_code=error.exit_code)
        except Unavailable:  # of storage or data, which may be back when the workers are started again
            reporter.raised(current_world().rank, traceback.format_exc())
            raise
        except (BadInput, TrainingFailed) as error:
            # On this rank only, and the others wait for it: Ray has to end them. The workers it then
            # starts return at once with this message.
            reporter.fail(plain_message(error), 2 if isinstance(error, BadInput) else 1)
            raise
        except (MemoryError, torch.OutOfMemoryError) as error:  # the next workers compute fewer samples at a time
            reporter.out_of_memory(str(error) or type(error).__name__)
            raise
        except Exception:  # of the user's own code or a lost connection: told, and raised for Ray Train to start anew
            reporter.raised(current_world().rank, traceback.format_exc())
            raise


def run(
    config: Config,
    reporter: Reporter,
    here: Here | None = None,
    phases: Phases = NO_PHASES,
    span: Span | None = None,
) -> Outcome:
    world, device, storage = current_world(), ray.train.torch.get_device(), checkpoint_storage(config)
    clock = StepClock(device, span)

    found = agreed_checkpoint(storage, reporter, device)

    def prepare() -> tuple[Splits, Order, Schedule, Checkpoint | None, torch.nn.Module, dict[str, str]]:
        if here is not None:
            refuse_other_node(config, here)
        set_up_torch(config, device)
        splits = load_splits(config, stored_tokenizer(config))
        order = build_order(config, splits.train.labels, splits.train.facts)
        schedule = build_schedule(config, order)
        checkpoint = load_checkpoint(storage, found, splits.info) if found else None
        refuse_slow_bf16(config, checkpoint, device)
        if checkpoint is not None:
            checkpoint.refuse_other_order(order.digest)
        phases("a worker has its data")
        network = build_network(config, splits.info, checkpoint)
        check_smallest_part(network, config, splits.info, schedule)
        return splits, order, schedule, checkpoint, network, fingerprint_rank(config, splits, order)

    splits, order, schedule, checkpoint, network, fingerprint = together(prepare, reporter, device)
    compare_ranks(fingerprint)
    if checkpoint is not None:
        reporter.event(f"going on from {checkpoint.path}, after step {checkpoint.position.step}")
    config = with_precision(config, checkpoint, device, reporter)
    position = checkpoint.position if checkpoint else Position(order=order.digest)
    trained, config_to_save = position.samples_per_pass, config
    config, per_pass = with_micro_batches(config, network, splits, schedule, world, reporter, trained)
    model = ray.train.torch.prepare_model(network, parallel_strategy_kwargs=ddp_options(config))
    set_up_ddp(model, config, clock)
    optimizer = build_optimizer(config, list(network.parameters()))
    if checkpoint is not None:
        load_optimizer(optimizer, checkpoint.trainer["optimizer"])
    training = Training(
        config=config,
        schedule=schedule,
        world=world,
        device=device,
        network=network,
        model=cast(torch.nn.Module, torch.compile(model)) if config.compile else model,
        preprocess=preprocessing(splits.info).to(device),
        optimizer=optimizer,
        ema=build_ema(config, network, checkpoint),
        clock=clock,
    )
    # Left alone, prepare_data_loader would put a padding DistributedSampler of seed 0 in the place of
    # our order and batches: it moves batches to the device, and nothing else.
    to_device = partial(ray.train.torch.prepare_data_loader, add_dist_sampler=False)
    train_loader = to_device(training_loader(config, splits, order, schedule, world, position.step, device))
    val_loader = to_device(evaluation_loader(config, splits.val, world, device))

    status: Status = "finished"
    error, seen_before, train_seconds = None, position.samples_seen, 0.0
    latest: dict[str, float] = {}
    told = (reporter.snapshot, reporter.saved, reporter.event)
    with CheckpointWriter(storage, config_to_save, splits.info, *told, enabled=world.rank == 0) as writer:
        writer.discard_after(position.step)
        if checkpoint is None:
            writer.save(position, network, optimizer, training.ema)  # there is always one to go back to
        steps = ()
        if wants_more(config, position):
            stop = partial(asked_to_stop, reporter, clock)
            steps = train(training, train_loader, stop, reporter.unreadable, position.bad_samples)
        phases("a worker has its model")
        reporter.begin_training()
        try:
            for result in steps:
                if not train_seconds:
                    phases("the first step is made")
                reporter.alive()
                position.step = result.step + 1
                position.epoch = schedule.epochs_begun(position.step)
                position.samples_seen += result.count
                position.bad_samples = result.bad_samples
                position.samples_per_pass = per_pass
                for window in (position.window, position.epoch_window):
                    window.add(result.loss, result.correct, result.count, result.seconds, result.data_seconds)
                position.train_seconds += result.seconds
                train_seconds += result.seconds
                last = position.step == schedule.total_steps
                epoch_ended = last or position.step % schedule.steps_per_epoch == 0

                # once in a while: record
                if last or position.step % config.log_every == 0:
                    rate = learning_rate(result.step, config, schedule)
                    with clock.part("tracking"):
                        reporter.metrics(position.step, {**position.window.metrics(), "lr": rate})
                    position.window = Window()

                if epoch_ended:  # or the run, in mid-epoch: then of the epoch so far
                    with clock.part("tracking"):
                        reporter.metrics(position.step, position.epoch_window.epoch_metrics())
                if position.step % schedule.steps_per_epoch == 0:
                    position.epoch_window = Window()

                # at an epoch's end, and in between if that is asked for: evaluate
                improved = False
                validated = epoch_ended or (config.validate_every and position.step % config.validate_every == 0)
                if validated:
                    with clock.part("validation"):
                        validation = measure(training.evaluated, training, val_loader, splits, "val", reporter)
                    if not math.isfinite(validation.loss):  # the same number on every rank
                        raise NonFiniteLoss(f"the validation loss is {validation.loss} after step {position.step}")
                    latest = validation.metrics("val")
                    with clock.part("tracking"):
                        reporter.metrics(position.step, {**latest, "epoch": position.step / schedule.steps_per_epoch})
                    improved = position.best.update(position.step, validation.accuracy, validation.loss, epoch_ended)
                with clock.part("tracking"):
                    reporter.live(position.step, schedule, epoch_ended)

                # when it is due: save
                due = validated if config.checkpoint_every is None else position.step % config.checkpoint_every == 0
                if due or improved or last or result.stop:
                    with clock.part("checkpoint"):
                        writer.save(position, network, optimizer, training.ema)
                if validated:
                    with clock.part("tracking"):
                        reporter.validated(position.step, schedule, latest)
                if result.stop and not last:
                    status = reporter.stop or "killed"
                    break
                if not wants_more(config, position):
                    break
        except FailedTogether as failure:
            status, error = "failed", str(failure)

    # at the end: test the best weights
    reporter.rest()
    best_step_name = checkpoint_name(position.best.step)
    best_name = agreed_checkpoint(storage, reporter, device, prefer=best_step_name)
    assert best_name is not None
    is_best = best_name == best_step_name  # else the best one is lost, and its metrics are not this one's
    metrics = position.best.metrics() if is_best else {}
    if status == "finished":
        try:
            best = load_checkpoint(storage, best_name, splits.info)
            if not is_best:
                load_weights(training.network, best.model, best.path)
                metrics |= measure(training.network, training, val_loader, splits, "val", reporter).metrics("val")
            metrics |= test(training, splits, best, reporter)
            reporter.metrics(position.step, metrics)
        except FailedTogether as failure:
            status, error = "failed", str(failure)
    reporter.flush()
    return Outcome(
        status,
        checkpoint=storage.uri(best_name),
        epoch=position.epoch,
        step=position.step,
        samples_seen=position.samples_seen,
        samples_per_s=(position.samples_seen - seen_before) / train_seconds if train_seconds else None,
        train_seconds=train_seconds,
        run_train_seconds=position.train_seconds,
        metrics=metrics,
        error=error,
        exit_code=1 if status == "failed" else 0,
        step_times=clock.times(),
    )


def with_precision(config: Config, checkpoint: Checkpoint | None, device: torch.device, reporter: Reporter) -> Config:
    """The config with --precision auto decided: by the devices the run starts on. A run that goes on keeps to it."""
    if config.precision != "auto":
        return config
    if checkpoint is not None:
        precision = checkpoint.config.precision
    else:
        precision = "fp32" if any_rank(not is_fast_at_bf16(device), device) else "bf16"
    reporter.precision(precision)
    return config.model_copy(update={"precision": precision})


def with_micro_batches(
    config: Config,
    network: torch.nn.Module,
    splits: Splits,
    schedule: Schedule,
    world: World,
    reporter: Reporter,
    trained: int,
) -> tuple[Config, int]:
    """The config with smaller micro-batches where earlier workers ran out of memory, and the samples of a pass.

    trained: the samples of a pass in the checkpoint's last step, 0 if it has none. Rank 0 decides for all. Raises
    TrainingFailed on every rank if batch norm cannot train on so few samples.
    """
    full = schedule.batch_size if schedule.num_full else max(schedule.leftovers)
    decided = None
    if reporter.is_rank_zero:
        sizes = [size for size in (config.micro_batch_size, reporter.micro_batch_size()) if size is not None]
        decided = min(sizes, default=None)
        samples = samples_per_pass(full, world.size, decided)
        reporter.forward_pass(ForwardPass(samples, world.size, trained))
    told = from_rank_zero(None if decided is None else str(decided))
    size = None if told is None else int(told)
    if size != config.micro_batch_size:
        config = config.model_copy(update={"micro_batch_size": size})
        try:
            check_smallest_part(network, config, splits.info, schedule)
        except BadInput as error:
            raise TrainingFailed(f"out of memory, and there are no smaller micro-batches to try: {error}") from error
    return config, samples_per_pass(full, world.size, size)


def asked_to_stop(reporter: Reporter, clock: StepClock) -> bool:
    return reporter.asked_to_stop() or clock.is_full


def wants_more(config: Config, position: Position) -> bool:
    """False once early stopping has run out of patience."""
    return config.early_stop_patience is None or position.best.epochs_since < config.early_stop_patience


def together(work: Callable[[], T], reporter: Reporter, device: torch.device) -> T:
    """Return work(), or raise on all ranks if it raised on any.

    Raises Unavailable if all that failed was a store or a server that may be back: the attempt is repeated. Raises
    RefusedTogether for anything else, which would fail again.
    """
    result, unavailable = None, list[str]()
    try:
        result = work()
    except Exception as error:
        if is_transient(error):
            unavailable = [f"rank {current_world().rank}: {plain_message(error)}"]
            reporter.raised(current_world().rank, traceback.format_exc())
        elif isinstance(error, BadInput):
            reporter.fail(plain_message(error), 2)
        else:  # in the user's model or data set, say
            reporter.fail(f"setting up failed:\n{traceback.format_exc()}", 1)
    with reporter.waiting():
        failed = any_rank(result is None, device)
    if failed:
        unavailable = gather_texts(unavailable)
        if failure := reporter.failure():
            raise RefusedTogether(*failure)
        raise Unavailable(unavailable[0])
    assert result is not None
    return result


def compare_ranks(fingerprint: dict[str, str]) -> None:
    """Raise RefusedTogether on all ranks unless all have the same data, code and packages."""
    nodes, fingerprints = gather_texts([get_node_ip_address()]), gather_texts([json.dumps(fingerprint)])
    try:
        refuse_disagreement([json.loads(each) for each in fingerprints], nodes)
    except BadInput as error:
        raise RefusedTogether(str(error), 2) from error


def agreed_checkpoint(
    storage: Storage, reporter: Reporter, device: torch.device, prefer: str | None = None
) -> str | None:
    """Return the name of the checkpoint `prefer`, or else of the newest one, that is good. Rank 0 decides for all.

    Raises as together() does.
    """

    def find() -> str:
        return (find_good(storage, reporter.event, prefer) or "") if reporter.is_rank_zero else ""

    return from_rank_zero(together(find, reporter, device)) or None


def measure(
    network: torch.nn.Module,
    training: Training,
    loader: Iterable[Batch],
    splits: Splits,
    split: str,
    reporter: Reporter,
    num_worst: int = 0,
) -> Evaluation:
    """Measure the network on a split. Raises TooManyBadSamples on every rank."""
    result = evaluate(
        network,
        training.preprocess,
        reporter.watched(loader),
        splits.info.num_classes,
        training.config,
        training.device,
        num_worst,
    )
    reporter.unreadable(result.unreadable)
    refuse_unreadable(result, training.config, split)
    return result


def test(training: Training, splits: Splits, best: Checkpoint, reporter: Reporter) -> dict[str, float]:
    """Measure the best weights on the test split, or on val where there is none; the numbers and what the
    final pictures are drawn from go to the Tracker."""
    name, samples = ("test", splits.test) if splits.test is not None else ("val", splits.val)
    load_weights(training.network, best.model, best.path)
    loader = ray.train.torch.prepare_data_loader(
        evaluation_loader(training.config, samples, training.world, training.device), add_dist_sampler=False
    )
    result = measure(training.network, training, loader, splits, name, reporter, NUM_WORST)
    worst = result.worst
    if reporter.is_rank_zero:
        reporter.pictures(
            split=np.array(name),
            class_names=np.array(splits.info.class_names),
            confusion=np.array(result.confusion),
            **samples.shown(np.array([mistake.sample_id for mistake in worst], np.int64)),
            targets=np.array([mistake.target for mistake in worst], np.int64),
            predictions=np.array([mistake.prediction for mistake in worst], np.int64),
            losses=np.array([mistake.loss for mistake in worst]),
        )
    return result.metrics(name)
