"""A loop with Accelerate: torchrun --standalone --nproc-per-node 2 examples/attach/with_accelerate.py"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accordion_bench as ab

accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
pixels, digits = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits))
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
batches = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)

model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
comm = ab.attach(model, optimizer, compressor="powersgd", rank=2)  # after prepare, which wraps the model

for epoch in range(8):
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")

comm.detach()
accelerator.print(comm)
accelerator.end_training()
