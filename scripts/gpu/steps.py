"""Training steps of scripts/gpu/report.py, a process for each GPU, and one trace of them."""

import importlib.util
import json
import multiprocessing
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accordion_bench.comm.collectives import Comm
from accordion_bench.config.components import build_components, build_model
from accordion_bench.training.trainer import Trainer
from scripts.bench.arms import our_step, plain_step, trainer_for
from scripts.bench.harness import interleaved

LARGE = ["model=resnet50", "dataset=synthetic", "batch_size=64"]
SMALL = ["model=resnet8", "dataset=synthetic", "batch_size=4"]
RANK = 2
DDP = "DDP"
OURS = {"none": DDP, "bf16": f"{DDP}, bf16 hook", "powersgd": f"{DDP}, PowerSGD hook", "topk": DDP, "signsgd": DDP}
WORKERS = 4  # of `training`
TRAINING = ["model=resnet18", "dataset=synthetic"]  # images as CIFAR-10's
HOW = {  # overrides of ours, and whether the plain loop does the same
    "float32": [],
    "bfloat16, channels_last": ["precision=bfloat16", "channels_last=true"],
    "bfloat16, channels_last, compiled": ["precision=bfloat16", "channels_last=true", "compile=inductor"],
}


def rival(name: str) -> str:
    """What a row is measured against."""
    return OURS.get(name, DDP)


def cannot() -> str:
    """Why steps cannot be taken here; "" = they can."""
    missing = [name for name in ("hydra", "omegaconf") if importlib.util.find_spec(name) is None]
    return f"Needs {' and '.join(missing)}, which compose a run." if missing else ""


def measured(device: str, world: int, rounds: int, smallest: bool, out: Path | None) -> dict[str, list[float]]:
    """Seconds per step of each arm in each round.

    Args:
        device: `cuda` over NCCL, or `cpu` over gloo.
        world: processes.
        rounds: interleaved.
        smallest: few arms and a small network.
        out: where `trace.json` is to be; None = nowhere.

    Raises:
        RuntimeError: a process failed; it has said why.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, folder, device, rounds, smallest, out)
        children = [context.Process(target=_process, args=(rank, *arguments)) for rank in range(world)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        if any(child.exitcode for child in children):
            raise RuntimeError(f"steps ended with {[child.exitcode for child in children]}")
        return json.loads((Path(folder) / "seconds.json").read_text(encoding="utf-8"))


def training(device: str, rounds: int, smallest: bool) -> Iterator[tuple[str, int, dict[str, list[float]]]]:
    """Steps of four workers in this process, and of a plain loop whose batch is theirs together.

    Args:
        device: `cuda` or `cpu`.
        rounds: interleaved.
        smallest: few images, and float32 alone.

    Yields:
        How both compute, images per step, seconds per step of each arm in each round.
    """
    batch = 2 if smallest else 128
    for how, overrides in ({"float32": HOW["float32"]} if smallest else HOW).items():
        typed = [*TRAINING, *overrides]
        arms = {
            f"four workers, {name}": our_step(
                trainer_for([*typed, f"batch_size={batch}", f"compressor={name}"], Comm(WORKERS, device=device))
            )
            for name in ("none", "powersgd")
        }
        alone = trainer_for([*typed, f"batch_size={WORKERS * batch}"], Comm(1, device=device))
        arms["a plain loop"] = plain_step(alone, plain_network(alone))
        with torch.enable_grad():
            found = interleaved(arms, rounds, device=device)
        yield how, WORKERS * batch, found


def plain_network(trainer: Trainer) -> torch.nn.Module:
    """The network of a trainer, as everyone would have it compute."""
    config = trainer.config
    model = build_model(config.model, build_components(config, 1).dataset).to(trainer.device)
    model = model.to(memory_format=trainer.step.memory_format)  # type: ignore[call-overload]
    if config.compile:
        model = torch.compile(model, backend=config.compile)
    return Autocast(model, config.precision) if config.precision else model


class Autocast(torch.nn.Module):
    """A network whose forward pass computes in another precision.

    Args:
        model: takes images.
        precision: name of the dtype.
    """

    def __init__(self, model: torch.nn.Module, precision: str) -> None:
        super().__init__()
        self.model, self.dtype = model, getattr(torch, precision)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, self.dtype):
            return self.model(x)


def _process(rank: int, world: int, folder: str, kind: str, rounds: int, smallest: bool, out: Path | None) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    own = {}
    if kind == "cuda":
        torch.cuda.set_device(device)
        own["device_id"] = device
    else:
        torch.set_num_threads(1)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world, **own)
    arms = _arms(Comm(1, world, rank, str(device)), smallest)
    seconds = interleaved(arms, rounds, device=kind)
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(seconds), encoding="utf-8")
    if out is not None:
        _trace(arms, rank, kind, out)
    dist.barrier()
    dist.destroy_process_group()


def _arms(comm: Comm, smallest: bool) -> dict[str, Callable[[], None]]:
    """Our step by compressor, and DistributedDataParallel's with its hooks."""
    overrides = SMALL if smallest else LARGE
    arms: dict[str, Callable[[], None]] = {}
    for name in ["none", "powersgd"] if smallest else OURS:
        # each with collectives of its own: a trainer gives them a thread
        own = Comm(1, comm.processes, comm.rank, str(comm.device))
        trainer = trainer_for([*overrides, f"compressor={name}"], own)
        arms[name] = our_step(trainer)
    hooks = {
        DDP: None,
        f"{DDP}, bf16 hook": (None, default_hooks.bf16_compress_hook),
        f"{DDP}, PowerSGD hook": (
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2),
            powerSGD_hook.powerSGD_hook,
        ),
    }
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.15 renames broadcast_buffers, 2.11 has only that
    for name, hook in hooks.items():
        model = build_model(trainer.config.model, build_components(trainer.config, 1).dataset).to(comm.device)
        wrapped = DistributedDataParallel(model, broadcast_buffers=False)
        if hook is not None:
            wrapped.register_comm_hook(*hook)
        arms[name] = plain_step(trainer, wrapped)
    return arms


def _trace(arms: dict[str, Callable[[], None]], rank: int, kind: str, out: Path) -> None:
    """Two steps of the dense and of the PowerSGD arm, for chrome://tracing or Perfetto: one sees what overlaps."""
    from torch import profiler

    activities = [profiler.ProfilerActivity.CPU, *[profiler.ProfilerActivity.CUDA] * (kind == "cuda")]
    with profiler.profile(activities=activities) as recorded:
        for name in ("none", "powersgd"):
            with profiler.record_function(f"step: {name}"):
                for _ in range(2):
                    arms[name]()
                if kind == "cuda":
                    torch.cuda.synchronize()
    if rank == 0:
        recorded.export_chrome_trace(str(out / "trace.json"))
