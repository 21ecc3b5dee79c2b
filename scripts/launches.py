"""Writes the table of launches and waits into docs/performance.md, counted without a GPU.

    python -m scripts.launches                        # print it
    python -m scripts.launches docs/performance.md    # write it between its marks
    python -m scripts.launches --only topk            # some rows, with what was launched how often

Of the networks' tensors the sides are an eighth: operations are counted, and their number does not depend on sizes.
"""

import argparse
import copy
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.conformance.pretend_device import DEVICE, Counts, pretended
from accordion_bench.conformance.subject import Maker, Setup, from_yaml
from accordion_bench.options.conf_dir import yaml_files
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import keyed_rng
from scripts.echo import echoed

WORKERS = 8  # workers, each in its own process
WARM = 2  # exchanges before the counted one, because tables are uploaded once
WIDTH, LAYERS, WORDS, POSITIONS = 768, 12, 50257, 1024


def resnet50() -> list[TensorSpec]:
    """Return the specs of ResNet-50: 161 tensors, 25.6 million entries."""
    import torchvision

    with torch.device("meta"):
        named = torchvision.models.resnet50().named_parameters()
    return [TensorSpec(name, tuple(p.shape)) for name, p in named]


def gpt2() -> list[TensorSpec]:
    """Return the specs of GPT-2: 148 tensors, 124 million entries."""
    norm = {"weight": (WIDTH,), "bias": (WIDTH,)}
    parts = {"attn.qkv": 3 * WIDTH, "attn.proj": WIDTH, "mlp.up": 4 * WIDTH}
    shapes: dict[str, tuple[int, ...]] = {"wte": (WORDS, WIDTH), "wpe": (POSITIONS, WIDTH)}
    for layer in range(LAYERS):
        for ln in ("ln_1", "ln_2"):
            shapes |= {f"{layer}.{ln}.{key}": shape for key, shape in norm.items()}
        for name, wide in parts.items():
            shapes |= {f"{layer}.{name}.weight": (wide, WIDTH), f"{layer}.{name}.bias": (wide,)}
        shapes |= {f"{layer}.mlp.down.weight": (WIDTH, 4 * WIDTH), f"{layer}.mlp.down.bias": (WIDTH,)}
    shapes |= {f"ln_f.{key}": shape for key, shape in norm.items()}
    return [TensorSpec(name, shape) for name, shape in shapes.items()]


def small(specs: list[TensorSpec]) -> list[TensorSpec]:
    """Return as many specs, with as many distinct shapes, with an eighth of each side; sides below 8 stay."""
    return [TensorSpec(s.name, tuple(side // 8 if side >= 8 else side for side in s.shape)) for s in specs]


def count_launches(make: Maker, specs: Sequence[TensorSpec], workers: int = WORKERS) -> Counts:
    """Count the device operations of one exchange of all tensors in one bucket, in one of `workers` processes."""
    generator = keyed_rng.generator("launches")
    with pretended() as counts, echoed(workers):
        comm = Comm(1, workers, device=str(DEVICE))
        setup = Setup(make(), specs=specs, dtype=torch.float32, device=str(DEVICE), comm=comm)
        for step in range(WARM + 1):
            xs_W = [torch.randn(1, *spec.shape, generator=generator).to(DEVICE) for spec in specs]
            counts.reset()
            setup(xs_W, step)
    return copy.deepcopy(counts)


NETWORKS = {"ResNet-50": resnet50, "gpt2": gpt2}
BEGIN, END = "<!-- launches -->", "<!-- end of launches -->"


def row(name: str, network: str) -> Counts:
    """What one exchange of a compressor asks for."""
    return count_launches(from_yaml(name), small(NETWORKS[network]()))


def table(names: Sequence[str]) -> str:
    """In Markdown: for each compressor and network launches and waits."""
    heads = [f"{network} {what}" for network in NETWORKS for what in ("launches", "waits")]
    lines = ["| compressor | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name in names:
        counts = [row(name, network) for network in NETWORKS]
        cells = [str(sum(c.values())) for of in counts for c in (of.launches, of.waits)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def stated(page: str) -> dict[tuple[str, str], tuple[int, int]]:
    """(launches, waits) by (compressor, network), from the table in a page."""
    rows = re.findall(r"^\| (\w+) \| (.*) \|$", page.partition(BEGIN)[2].partition(END)[0], re.MULTILINE)[1:]
    return {
        (name, network): (int(cells[2 * k]), int(cells[2 * k + 1]))
        for name, joined in rows
        for cells in [joined.split(" | ")]
        for k, network in enumerate(NETWORKS)
    }


def main() -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(description=f"Launches and waits of one exchange, one of {WORKERS} processes.")
    parser.add_argument("page", nargs="?", type=Path, help="where to write the table")
    names = sorted(yaml_files("compressor"))
    parser.add_argument("--only", nargs="+", default=[], choices=names, metavar="NAME", help="compressors")
    typed = parser.parse_args()
    for name in typed.only:
        for network in NETWORKS:
            counts = row(name, network)
            print(name, network, dict(counts.launches.most_common()), dict(counts.waits))
    if typed.only:
        return
    made = table(names)
    if typed.page is None:
        print(made)
        return
    before, _, rest = typed.page.read_text(encoding="utf-8").partition(BEGIN)
    typed.page.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
