"""A model sharded by FSDP2, trained by four processes."""

import importlib
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from tests.kit.helpers import yaml_node
from tests.kit.processes import together

REPLICAS, SHARDS = 2, 2
SECONDS = 300  # timeout of a process: without a cache, numba compiles the kernels in each process


class Net(nn.Module):
    """Matrices, a convolution and vectors; 5 and 7 rows give unequal shards, and 1 row gives an empty shard."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv1d(2, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 7))
        self.norm = nn.LayerNorm(7)
        self.outer = nn.Linear(7, 5)
        self.last = nn.Linear(5, 1)

    def forward(self, x: Tensor, to_the_end: bool = True) -> Tensor:
        hidden = self.outer(self.norm(self.inner(x).relu()))
        return self.last(hidden.relu()) if to_the_end else hidden


class Found(dict):
    """Results of the four processes by case, computed at the first access; slow cases only when one is requested.

    Args:
        folder: folder for the files.
        run: function called in each process with (cases, edges, folder); saves its results as `<rank>.pt`.
        usual, slow: (cases, edges) that are run together.
    """

    def __init__(self, folder: Path, run: Callable, usual: tuple[list, list], slow: tuple[list, list]) -> None:
        self.folder, self.run, self.usual, self.slow = folder, run, usual, slow

    def __missing__(self, name: str) -> list:
        more = name in [*self.slow[0], *self.slow[1]]
        folder = self.folder / ("more" if more else "default")
        folder.mkdir()
        together(1, in_four, self.run, *(self.slow if more else self.usual), str(folder), seconds=5 * SECONDS)
        ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(REPLICAS * SHARDS)]
        for key in ranks[0]:
            self.setdefault(key, [of_rank[key] for of_rank in ranks])
        return self[name]


def node_of(name: str, **options) -> dict:
    return {**yaml_node("compressor", name), **options}


def sharded(mesh: DeviceMesh, seed: int = 0, **how) -> Net:
    """Return the net in two FSDP groups; `how` as in the cases."""
    torch.manual_seed(seed)
    net = Net().to(how.get("dtype", torch.float32))
    net.outer.bias.requires_grad_(not how.get("frozen", False))
    options: dict = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=how.get("reduce_dtype"))}
    if how.get("columns"):
        options["shard_placement_fn"] = lambda p: Shard(1) if p.ndim > 1 and p.shape[1] % SHARDS == 0 else None
    fully_shard([net.inner, net.norm] if how.get("together") else net.inner, **options)
    return fully_shard(net, **options)


def loss_of(net: nn.Module, step: int, micro_batch: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the loss of this process's own samples."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * dist.get_rank() + micro_batch)
    return net(torch.randn(6, 2, 8, generator=generator).to(dtype)).square().mean()


def sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05)


Seen = list[tuple[list[Tensor], list[Tensor]]]


def trained(net: nn.Module, steps: range, optimizer=None, comm=None, seen: Seen | None = None, **how):
    """Train some steps, and return this process's shards of the parameters.

    Args:
        comm: the attachment.
        seen: list to which the gradients of each step before and after their exchange are appended.
    """
    optimizer = optimizer or sgd(net)
    parts = how.get("micro_batches", 1)
    for step in steps:
        for part in range(parts):
            if parts > 1:
                net.set_requires_gradient_sync(part == parts - 1)
            loss_of(net, step, part, how.get("dtype", torch.float32)).backward()
        if seen is not None:
            before = gradients(net)
            comm.join()
            seen.append((before, gradients(net)))
        optimizer.step()
        optimizer.zero_grad()
    return local(net)


def local(net: nn.Module) -> list[Tensor]:
    net.reshard()
    return [p.detach().to_local().clone() for p in net.parameters()]


def gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad.to_local().clone() for p in net.parameters() if p.requires_grad]


def all_equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def in_four(_: int, run: Callable, *arguments) -> None:
    """Fork four processes from one that has imported FSDP2 and the imports of `fully_shard`, to import them once."""
    importlib.import_module("torch._dynamo")
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=run, args=(rank, *arguments)) for rank in range(REPLICAS * SHARDS)]
    for child in children:
        child.start()
    for child in children:
        child.join(SECONDS)
        if child.is_alive():
            child.kill()
    assert [child.exitcode for child in children] == [0] * len(children)


def joined(rank: int, folder: str) -> DeviceMesh:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=REPLICAS * SHARDS)
    return init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replicate", "shard"))
