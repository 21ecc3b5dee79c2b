"""python -m accordion_bench.netlab.probe FILE IDLE SECONDS: times collectives of several sizes, in every host at once.

Each begins at one moment on all hosts, which share a clock, on links that have been idle for IDLE seconds: as in
training, where a backward pass comes between. Its time is the slowest host's. Host 0 writes FILE after about SECONDS.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accordion_bench.comm.ledger import Ledger
from accordion_bench.netlab.hosts import INTERFACE
from accordion_bench.network.interface import Interface

COLLECTIVES = ("all_reduce", "all_gather", "all_to_all")
WIRE = [1 << n for n in (10, 12, 14, 16, 18, 20, 22, 24)]  # bytes that each host sends, about
FEWEST, MOST = 3, 15  # repetitions
SETTLE = 0.05  # seconds after a collective until the counters are read: the last acknowledgement may come late
START = 0.01  # seconds from the agreement on a start to the start, beside IDLE


def collective(name: str, wire: int, ledger: Ledger) -> Callable[[], Any]:
    """A collective in which each host sends about `wire` bytes; it is charged to the ledger once, here."""
    hosts = ledger.workers
    part = max(wire // (hosts - 1), 1)  # for each of the others
    everywhere = torch.zeros(hosts * part, dtype=torch.uint8)
    if name == "all_gather":
        ledger.all_gather(part)
        message = torch.zeros(part, dtype=torch.uint8)
        return lambda: dist.all_gather_into_tensor(everywhere, message)
    if name == "all_to_all":
        ledger.all_to_all([part] * hosts)
        messages = torch.zeros(hosts * part, dtype=torch.uint8)
        return lambda: dist.all_to_all_single(everywhere, messages)
    floats = torch.zeros(hosts * max(part // 8, 1))
    ledger.all_reduce(4 * len(floats))
    return lambda: dist.all_reduce(floats)


def repetitions(run: Callable[[], Any], idle: float, budget: float) -> Iterator[tuple[float, int]]:
    """(seconds until the slowest host had finished, bytes sent by the mean host) of each repetition."""
    interface, first = Interface(INTERFACE), time.monotonic()
    for done in range(MOST):
        enough = done >= FEWEST and time.monotonic() - first > budget
        begin = torch.tensor([-1.0 if enough else time.monotonic() + START + idle], dtype=torch.float64)
        dist.broadcast(begin, src=0)
        if begin < 0:
            return
        sent = interface.sent()
        time.sleep(max(0.0, float(begin) - time.monotonic()))
        run()
        took = time.monotonic() - float(begin)
        time.sleep(SETTLE + took)  # others may still be sending
        mine = torch.tensor([took, float(interface.sent() - sent)], dtype=torch.float64)
        everyones = torch.empty(2 * dist.get_world_size(), dtype=torch.float64)
        dist.all_gather_into_tensor(everyones, mine)
        yield float(everyones[0::2].max()), round(float(everyones[1::2].mean()))


def measure(idle: float, seconds: float) -> list[dict[str, Any]]:
    """One row for each collective and size; sizes whose repetitions would take too long are left out."""
    rows: list[dict[str, Any]] = []
    budget = seconds / len(COLLECTIVES) / len(WIRE)
    for name in COLLECTIVES:
        median = 0.0
        for wire in WIRE:
            if 4 * FEWEST * median > 4 * budget:  # each size takes at most four times as long as the one before
                break
            ledger = Ledger(dist.get_world_size())
            run = collective(name, wire, ledger)
            run()  # connections, buffers
            found = list(repetitions(run, idle, budget))
            median = statistics.median(took for took, _ in found)
            sent = ledger.columns()
            rows.append(
                {
                    "collective": name,
                    "payload_bytes": sent["payload_bytes"],
                    "wire_bytes": sent["wire_bytes"],
                    "rounds": sent["rounds"],
                    "seconds": median,
                    "link_sent_bytes": statistics.median(count for _, count in found),
                    "repetitions": [took for took, _ in found],
                }
            )
    return rows


def main() -> None:
    """Measure; host 0 writes the rows."""
    file, idle, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = measure(float(idle), float(seconds))
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
