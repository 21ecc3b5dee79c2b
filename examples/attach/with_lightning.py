"""Lightning, with its DDPStrategy: torchrun --standalone --nproc-per-node 2 examples/attach/with_lightning.py"""

import gc
import os

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accordion_bench as ab


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Attach(lightning.Callback):
    def on_train_start(self, trainer: lightning.Trainer, _: lightning.LightningModule) -> None:
        self.comm = ab.attach(trainer.strategy.model, trainer.optimizers[0], compressor="powersgd", rank=2)

    def on_train_epoch_end(self, trainer: lightning.Trainer, _: lightning.LightningModule) -> None:
        self.comm.end_epoch()
        trainer.print(f"epoch {trainer.current_epoch}: loss {trainer.callback_metrics['loss'].item():.3f}")

    def on_train_end(self, trainer: lightning.Trainer, _: lightning.LightningModule) -> None:
        self.comm.detach()


pixels, digits = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits))
model, attach = Digits(), Attach()
trainer = lightning.Trainer(
    max_epochs=8, strategy="ddp", devices=int(os.environ["LOCAL_WORLD_SIZE"]), callbacks=[attach], gradient_clip_val=5,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, DataLoader(data, batch_size=32, shuffle=True, drop_last=True))
trainer.print(attach.comm)
del trainer, attach  # what refers to the process group must go before it does: docs/attach.md, "At the end"
gc.collect()
torch.distributed.destroy_process_group()
