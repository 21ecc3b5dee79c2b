"""python -m scripts.studies.sparse_wire: bytes on a worker's link of sparse methods over 2 to 64 workers.

The bytes are predicted by the ledger's own cost functions; tests/compressors/test_tree.py compares them with the sent
bytes for 2, 3, 4 and 8 workers.
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.compressors.probe import dense_bytes, wire
from accordion_bench.options.conf_dir import read_options, yaml_files
from accordion_bench.plan import TensorSpec
from accordion_bench.report.render.figures.sheet import save, styled
from scripts.few_colours import reduce_colours

SPEC, DENSITY = TensorSpec("w", (1000, 1000)), 0.01
WORKERS = range(2, 65)
METHODS = {
    "TopK, gather": ("topk", "all_gather"),
    "TopK, tree (gTopK)": ("topk", "tree"),
    "TopK, two-way (Ok-Topk)": ("topk", "two_way"),
}
TICKS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5)
SHOWN = (2, 3, 4, 8, 16, 32, 64)


def of_method(name: str, collective: str) -> list[float]:
    """Return the megabytes of one worker for each number of workers."""
    node = {**read_options(yaml_files("compressor")[name]), "density": DENSITY, "collective": collective}
    compressor = wrapped_compressor(node).compressor
    return [wire(compressor.transfers(SPEC, DENSITY, workers), workers) / workers / 1e6 for workers in WORKERS]


def draw(found: dict[str, list[float]]) -> Figure:
    """Plot the bytes of each method over the number of workers."""
    figure = Figure(figsize=(5.5, 3.4), layout="constrained")
    axes = figure.subplots()
    for marker, values in zip("osD^", found.values(), strict=False):
        axes.plot(list(WORKERS), values, marker=marker, markevery=[w - 2 for w in SHOWN])
    axes.set(xscale="log", yscale="log", xlabel="workers", ylabel="MB on a worker's link")
    axes.set_xticks(SHOWN, [str(workers) for workers in SHOWN])
    axes.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.minorticks_off()
    for name, values in found.items():
        axes.annotate(name, (WORKERS[-1], values[-1]), (8, 0), textcoords="offset points", va="center")
    return figure


def main() -> None:
    """Write the figure and the table."""
    parser = argparse.ArgumentParser("scripts.studies.sparse_wire", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/sparse_wire"), help="default: results/sparse_wire")
    folder = parser.parse_args().out
    found = {name: of_method(*method) for name, method in METHODS.items()}
    found["dense all-reduce"] = [2 * (w - 1) / w * dense_bytes(SPEC) / 1e6 for w in WORKERS]
    folder.mkdir(parents=True, exist_ok=True)
    with styled():
        reduce_colours(save(draw(found), folder / "wire"))
    lines = ["# Wire of sparse methods over 2 to 64 workers", "", "`python -m scripts.studies.sparse_wire`", ""]
    lines += [
        f"MB on one worker's link, mean over the workers, for a matrix of 1,000 x 1,000 at density {DENSITY:g}, by the",
        "ledger's prices: what tests find sent for 2, 3, 4 and 8 workers. No run.",
        "",
        "| workers | " + " | ".join(str(workers) for workers in SHOWN) + " |",
        "|---|" + "---:|" * len(SHOWN),
    ]
    for name, values in found.items():
        lines.append(f"| {name} | " + " | ".join(f"{values[workers - 2]:.3g}" for workers in SHOWN) + " |")
    (folder / "README.md").write_text("\n".join([*lines, "", "![wire](wire.png)", ""]), encoding="utf-8")
    print(folder)


if __name__ == "__main__":
    main()
