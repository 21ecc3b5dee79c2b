"""What several test files need."""

from pathlib import Path

import torch
import yaml

from accordion_bench import config
from accordion_bench.blocks import Blocks
from accordion_bench.comm import Comm
from accordion_bench.config_dir import conf_dir
from accordion_bench.exchange import Exchange, levelled, sent_specs
from accordion_bench.plan import Ladder, Plan, TensorSpec

# as in a small network: repeated shapes, a 1-D tensor between them, a wide and a narrow matrix, one entry
SPECS = [
    TensorSpec("stem", (8, 3, 3, 3)),
    TensorSpec("a", (16, 8, 3, 3)),
    TensorSpec("a.bias", (16,)),
    TensorSpec("b", (16, 8, 3, 3)),
    TensorSpec("c", (16, 8, 3, 3)),
    TensorSpec("head", (10, 64)),
    TensorSpec("scalar", (1, 1)),
]


def yaml_names(group: str) -> list[str]:
    """Names of a config group, from its files."""
    return sorted(file.stem for file in (conf_dir() / group).glob("*.yaml"))


def yaml_node(group: str, name: str) -> dict:
    return yaml.safe_load((Path(conf_dir()) / group / f"{name}.yaml").read_text())


def compressor(name: str, **options):
    """(compressor with its wrappers, scope, start step) of a YAML file with some options replaced."""
    return config._compressor({**yaml_node("compressor", name), **options})


def gradients(specs=SPECS, workers=4, seed=0, dtype=torch.float64, step=0) -> Blocks:
    """Gradients [W, ...]: a lasting mean of rank 4 with decaying singular values, and noise of worker and step."""
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
    """(Exchange, Plan) for a compressor YAML, all tensors at one level."""
    built, scope, start_step = compressor(name, **options)
    comm = comm or Comm(workers)
    values = () if built.knob is None else (built.level if level is None else level,)
    ladder = Ladder(built.knob or "", values)
    names = levelled(built, sent_specs(specs, scope))
    like = torch.zeros((), dtype=dtype)
    exchange = Exchange(built, specs, ladder, comm, like, seed=3, scope=scope, start_step=start_step)
    return exchange, Plan(dict.fromkeys(names, 0), 1)


def residuals(exchange) -> dict[str, torch.Tensor]:
    """Residuals [W, ...] by tensor name."""
    return {name: entry["residual_W"] for name, entry in exchange.state.items() if "residual_W" in entry}
