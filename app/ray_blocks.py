"""Blocks through Ray Data: read in one task, predicted by actors that keep their network, given back in order."""

import logging
import warnings
from collections.abc import Iterable, Iterator

import pyarrow as pa
import ray
import torch
from ray.data import ActorPoolStrategy, DataContext, Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from app.data.inputs import Inputs
from app.predictor import Predictor

# A block of ours is one row of Ray's: it joins and cuts rows as it likes.
COLUMN = "block"


class Source(Datasource):
    """One task on the driver's node, where the files are. It goes on as its blocks are taken, not faster."""

    def __init__(self, inputs: Inputs):
        super().__init__()
        self._inputs = inputs

    @property
    def supports_distributed_reads(self) -> bool:
        return False

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        inputs = self._inputs
        nothing_known = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(lambda: map(packed, inputs.blocks()), nothing_known)]


class Actor:
    """Its network is built once, and serves all the blocks that it gets."""

    def __init__(self, trained: "ray.ObjectRef", device: str, batch_size: int):
        self._predict = Predictor(ray.get(trained), torch.device(device), batch_size)

    def __call__(self, batch: pa.Table) -> pa.Table:
        results = [packed(self._predict(block)) for block in unpacked(batch)]
        return pa.concat_tables(results) if results else batch  # which is empty where there is no input at all


def predicted(
    inputs: Inputs, trained: "ray.ObjectRef", num_workers: int, use_gpu: bool, batch_size: int
) -> Iterator[pa.Table]:
    """The result of each block, in the blocks' order, as they come. trained: a Trained."""
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what goes wrong is raised, too
    warnings.filterwarnings("ignore", "The minimum number of concurrent actors")  # where there are fewer blocks
    context = DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = context.print_on_execution_start = False
    context.target_max_block_size = 1  # bytes: each row is handed on as soon as it is there
    with DataContext.current(context):
        source = ray.data.read_datasource(Source(inputs), num_cpus=0, override_num_blocks=1)
        results = source.map_batches(
            Actor,
            fn_constructor_args=(trained, "cuda" if use_gpu else "cpu", batch_size),
            batch_size=1,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(size=num_workers),
            num_cpus=1,
            num_gpus=1 if use_gpu else 0,
        )
    batches: Iterable[pa.Table] = results.iter_batches(batch_size=None, batch_format="pyarrow")
    for batch in batches:
        yield from unpacked(batch)


def packed(table: pa.Table) -> pa.Table:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return pa.table({COLUMN: pa.array([sink.getvalue().to_pybytes()], pa.large_binary())})


def unpacked(rows: pa.Table) -> Iterator[pa.Table]:
    for row in rows[COLUMN] if rows.num_rows else ():
        yield pa.ipc.open_stream(row.as_buffer()).read_all()
