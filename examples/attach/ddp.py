"""A loop with DistributedDataParallel: torchrun --standalone --nproc-per-node 2 examples/attach/ddp.py"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accordion_bench as ab

dist.init_process_group()
rank, workers = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
pixels, digits = load_digits(return_X_y=True)
x = torch.tensor(pixels[rank::workers], dtype=torch.float32, device=device) / 16
y = torch.tensor(digits[rank::workers], device=device)

torch.manual_seed(rank)  # every worker draws its own batches
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
comm = ab.attach(model, optimizer, compressor="topk", density=0.05, exempt="bias")

for epoch in range(6):
    for batch in torch.randperm(len(x), device=device)[:896].split(32):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[batch]), y[batch])
        loss.backward()  # gradients are the exchanged ones when it returns
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.3f}")

comm.detach()
if rank == 0:
    print(comm)
dist.destroy_process_group()
