"""Job of netlab's link probe: `python -m accordion_bench.netlab.probe FILE IDLE SECONDS` in every host.

Time collectives of several sizes, each after a pause of IDLE seconds, for about SECONDS in total. Host 0 writes the
rows to FILE.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from accordion_bench.netlab.hosts import INTERFACE
from accordion_bench.network.link_probe import LinkGroup, time_collectives
from accordion_bench.network.meter import Interface


def main() -> None:
    """Time the collectives; host 0 writes the rows."""
    file, idle, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = LinkGroup(None, None, torch.device("cpu"))
    rows = time_collectives(group, float(seconds), float(idle), Interface(INTERFACE))
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
