"""A loop and a module of one's own: torchrun --standalone --nproc-per-node 2 examples/attach/plain.py"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import accordion_bench as ab

dist.init_process_group()
rank, workers = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
pixels, digits = load_digits(return_X_y=True)
x = torch.tensor(pixels[rank::workers], dtype=torch.float32, device=device) / 16
y = torch.tensor(digits[rank::workers], device=device)

torch.manual_seed(rank)  # every worker draws its own batches
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

with ab.attach(model, optimizer, compressor="powersgd", adaptive={"accordion": {"weak": 4, "strong": 1}}) as comm:
    for epoch in range(6):
        for batch in torch.randperm(len(x), device=device)[:896].split(32):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[batch]), y[batch])
            loss.backward()  # buckets of gradients leave meanwhile
            optimizer.step()  # waits for them first
        comm.end_epoch()  # Accordion chooses the ranks of the next one
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")

if rank == 0:
    print(comm)
dist.destroy_process_group()
