"""Hugging Face's Trainer: torchrun --standalone --nproc-per-node 2 examples/attach/with_hf_trainer.py"""

import gc
import tempfile
from typing import Any

import torch
from sklearn.datasets import load_digits
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import accordion_bench as ab


class Attach(TrainerCallback):
    trainer: Trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        chosen = {"compressor": "powersgd", "rank": 4, "exempt": "norm,bias,embedding"}
        model = self.trainer.model_wrapped  # not the one that the callback gets
        self.comm = ab.attach(model, self.trainer.optimizer, **chosen)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.comm.end_epoch()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.comm.detach()


small = {"vocab_size": 17, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
model, attach = GPT2LMHeadModel(GPT2Config(**small, bos_token_id=0, eos_token_id=0)), Attach()
images = torch.tensor(load_digits().data).long()  # an image is a text of 64 words; the model guesses the next one
options = TrainingArguments(
    tempfile.mkdtemp(), num_train_epochs=2, per_device_train_batch_size=16, gradient_accumulation_steps=2,
    learning_rate=0.005, logging_steps=14, save_strategy="no", report_to="none", disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(), ddp_find_unused_parameters=False,
)  # fmt: skip
trainer = Trainer(model, options, train_dataset=[{"input_ids": x, "labels": x} for x in images], callbacks=[attach])
attach.trainer = trainer
trainer.train()
if trainer.is_world_process_zero():
    print(attach.comm)
del trainer, attach  # what refers to the process group must go before it does: docs/attach.md, "At the end"
gc.collect()
torch.distributed.destroy_process_group()
