"""Lightning: a LightningModule and its Trainer, with DDP."""

import lightning  # type: ignore[import-not-found]  # of the group bench
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.peers.common import EVALUATED, LR, Record, Task, parse


class Module(lightning.LightningModule):
    def __init__(self, task: Task):
        super().__init__()
        self.task, self.network = task, task.network()
        self.record, self.right, self.seen = Record(task), 0.0, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.network(inputs)

    def on_train_start(self) -> None:
        self.record = Record(self.task, self.global_rank)

    def on_train_epoch_start(self) -> None:
        self.record.epoch_begins()

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs), targets)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: object, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.record.step(len(batch[0]) * self.task.workers)

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.record.epoch_ended()

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        inputs, targets = batch
        accuracy = (self(inputs).argmax(1) == targets).float().mean()
        self.log("accuracy", accuracy, sync_dist=True, batch_size=len(inputs))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.record.tested(float(self.trainer.callback_metrics["accuracy"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LR)


if __name__ == "__main__":
    given = parse()
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=given.workers,
        strategy="ddp_spawn" if given.workers > 1 else "auto",
        max_epochs=given.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(
        Module(given),
        DataLoader(given.dataset(train=True), given.batch_size, shuffle=True),
        DataLoader(given.dataset(train=False), EVALUATED),
    )
