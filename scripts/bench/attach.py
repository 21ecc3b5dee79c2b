"""Step times of a plain PyTorch loop, with `ab.attach` and without: interleaved rounds; prints Markdown.

    python -m scripts.bench.attach                                   # 2 hosts: unshaped, 1 Gbit/s, 100 Mbit/s
    python -m scripts.bench.attach --hosts 4 --rates none 100mbit --arms "attach(none)" "DDP"

Hosts, model and rounds are those of scripts/bench/netlab.py; all arms but `bench` are one loop in plain PyTorch. Needs
root (network namespaces); `epfml` needs github.com/epfml/powersgd on PYTHONPATH.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import accordion_bench as ab
from accordion_bench.comm.collectives import Comm
from scripts.bench import netlab
from scripts.bench.arms import our_step, plain_step, trainer_for

POWERSGD = ["compressor=powersgd", "compressor.rank=2"]
ARMS = {
    "DDP": [],
    "DDP, bf16 hook": [],
    "DDP, PowerSGD hook, one bucket": [],
    "epfml": [],
    "attach(none)": [],
    "attach(none), DDP": [],
    "attach(bf16)": [],
    "attach(bf16), DDP": [],
    "attach(powersgd)": [],
    "attach(powersgd), DDP": [],
    "bench, dense": [],
    "bench, bf16": ["compressor=bf16"],
    "bench, PowerSGD": POWERSGD,
}
# (ours, theirs, largest ratio aimed at)
TARGETS = [
    ("attach(none)", "DDP", 1.03),
    ("attach(none), DDP", "DDP", 1.03),
    ("attach(bf16)", "DDP, bf16 hook", 1.0),
    ("attach(bf16), DDP", "DDP, bf16 hook", 1.0),
    ("attach(powersgd)", "DDP, PowerSGD hook, one bucket", 0.95),
    ("attach(powersgd), DDP", "DDP, PowerSGD hook, one bucket", 0.95),
    ("attach(powersgd)", "epfml", 1.0),
    ("attach(powersgd), DDP", "epfml", 1.0),
    ("attach(none)", "bench, dense", 1.02),
    ("attach(bf16)", "bench, bf16", 1.02),
    ("attach(powersgd)", "bench, PowerSGD", 1.02),
]
OPTIONS = {"powersgd": {"rank": 2}}


def wrapped(model: torch.nn.Module, hook: str) -> torch.nn.Module:
    """Return the model in DistributedDataParallel, with one of torch's hooks."""
    one_bucket = 1000 if "PowerSGD" in hook else None  # torch's aborts the process on gloo with more
    module = DistributedDataParallel(model, broadcast_buffers=False, bucket_cap_mb=one_bucket)
    if "bf16" in hook:
        module.register_comm_hook(None, default_hooks.bf16_compress_hook)
    if "PowerSGD" in hook:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return module


def arm(name: str, overrides: list[str], rank: int, processes: int) -> Callable[[], None]:
    """Return one training step of an arm."""
    trainer = trainer_for([*netlab.MODEL, *overrides], Comm(1, processes, rank))
    model = trainer.axis.model
    if name.startswith("bench"):
        return our_step(trainer)
    if name == "epfml":
        return netlab.epfml(trainer, model)
    if name.startswith("DDP"):
        return plain_step(trainer, wrapped(model, name))
    compressor = name.partition("(")[2].partition(")")[0]
    module = DistributedDataParallel(model, broadcast_buffers=False) if name.endswith("DDP") else model

    def connect(optimizer: torch.optim.Optimizer) -> object:
        return ab.attach(module, optimizer, compressor, batch_size=8, **OPTIONS.get(compressor, {}))

    return plain_step(trainer, module, connect=connect)


if __name__ == "__main__":
    assert dist.is_available()
    netlab.main("scripts.bench.attach", ARMS, TARGETS, arm, __doc__)
