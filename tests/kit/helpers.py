"""Helpers of several test files: components from YAML files, gradients, exchanges and residuals."""

import copy
import functools
from pathlib import Path

import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.conformance import subject
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.partition import levelled, sent_specs
from accordion_bench.options.conf_dir import conf_dir, read_options
from accordion_bench.options.instantiate import target
from accordion_bench.plan import Ladder, Plan
from accordion_bench.tensors.same_shape import Blocks

SPECS = list(subject.SPECS)  # the conformance kit's small network

# the optimizer from which methods with momentum of their own take it
SGD = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}


def yaml_names(group: str) -> list[str]:
    """Return the names of a config group, from its files."""
    return sorted(file.stem for file in (conf_dir() / group).glob("*.yaml"))


def yaml_node(group: str, name: str) -> dict:
    return copy.deepcopy(_parsed(conf_dir() / group / f"{name}.yaml"))


@functools.cache
def _parsed(file: Path) -> dict:
    return read_options(file)


def optimizer_for(group: str, name: str) -> dict:
    """Return the optimizer that a choice requires; else SGD with momentum."""
    beside = target(yaml_node(group, name), group).description.requires.get("optimizer", {})
    if isinstance(beside, str):
        return yaml_node("optimizer", beside)
    return {**SGD, **beside} if beside.get("momentum") != 0 else {**SGD, **beside, "nesterov": False}


def changed_options(group: str, name: str) -> list[str]:
    """Return the overrides that a choice requires."""
    beside = target(yaml_node(group, name), group).description.requires.get("optimizer", {})
    return [f"optimizer={beside}"] if isinstance(beside, str) else [f"optimizer.{k}={v}" for k, v in beside.items()]


def compressor(name: str, **options):
    """Return a compressor with its wrappers, from a YAML file with some options replaced."""
    return wrapped_compressor({**yaml_node("compressor", name), **options}, optimizer_for("compressor", name))


def gradients(specs=SPECS, workers=4, seed=0, dtype=torch.float64, step=0) -> Blocks:
    """Return gradients [W, ...]: a constant mean of rank 4 with decaying singular values, and noise by worker, step."""
    blocks = Blocks(specs, workers, torch.zeros((), dtype=dtype))
    lasting = torch.Generator().manual_seed(seed)
    noise = torch.Generator().manual_seed(1000 + 1000 * seed + step)
    for x in blocks.tensors:
        n = x.shape[1]
        left = torch.randn(n, 4, generator=lasting, dtype=dtype) * 3.0 ** -torch.arange(4, dtype=dtype)
        common = left @ torch.randn(4, x[0].numel() // n, generator=lasting, dtype=dtype)
        x.copy_(common.view(x.shape[1:]) + 0.05 * torch.randn(x.shape, generator=noise, dtype=dtype))
    return blocks


def exchange_for(name: str, workers: int = 4, specs=SPECS, level=None, dtype=torch.float64, comm=None, **options):
    """Return (Exchange, Plan) for a compressor's YAML file, with all tensors at one level."""
    wrapped = compressor(name, **options)
    built = wrapped.compressor
    comm = comm or Comm(workers)
    values = () if built.traits.knob is None else (built.level if level is None else level,)
    ladder = Ladder(built.traits.knob or "", values)
    names = levelled(built, sent_specs(specs, wrapped.scope, wrapped.block_size))
    like = torch.zeros((), dtype=dtype)
    exchange = Exchange(built, specs, ladder, comm, like, SendOptions(3, **wrapped.for_exchange))
    return exchange, Plan(dict.fromkeys(names, 0), 1)


def residuals(exchange) -> dict[str, torch.Tensor]:
    """Return residuals [W, ...] by tensor name."""
    return {name: entry["residual_W"] for name, entry in exchange.state.items() if "residual_W" in entry}


def server_residuals(exchange) -> dict[str, torch.Tensor]:
    """Return the owners' residuals of a two-way exchange, [...] by name; all workers must be in this process."""
    two_way = exchange.compressor
    while not hasattr(two_way, "pieces"):
        if not hasattr(two_way, "inner"):
            return {}
        two_way = two_way.inner
    if not any(key in exchange.state for key in two_way.kept_in.values()):
        return {}
    kept = {name: exchange.state[key]["residual_W"] for name, key in two_way.kept_in.items()}
    dtype = next(iter(kept.values())).dtype
    out = {spec.name: torch.zeros(spec.numel, dtype=dtype) for spec in exchange.sent}
    for name, rows in kept.items():
        for piece in two_way.pieces[name]:
            size = piece.stop - piece.start
            out[name][piece.start : piece.stop] = rows[piece.owner, piece.offset : piece.offset + size]
    return {spec.name: out[spec.name].view(spec.shape) for spec in exchange.sent}
