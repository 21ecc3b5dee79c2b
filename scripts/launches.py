"""Writes the table of launches and waits into docs/performance.md, counted without a GPU.

    python -m scripts.launches                        # print it
    python -m scripts.launches docs/performance.md    # write it between its marks
    python -m scripts.launches --only topk            # some rows, with what was launched how often

Of the networks' tensors the sides are an eighth: operations are counted, and their number does not depend on sizes.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from accordion_bench.conformance.devices import WORKERS, count_launches
from accordion_bench.conformance.placement import gpt2, resnet50, small
from accordion_bench.conformance.pretend_device import Counts
from accordion_bench.conformance.subject import from_yaml
from accordion_bench.options.conf_dir import yaml_files

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
