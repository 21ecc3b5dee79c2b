"""Time collectives of several sizes between processes without a common clock.

Links are idle before each collective, as in training, where a backward pass precedes it. A tiny all-reduce synchronises
the processes; each then measures its own duration, and the longest counts.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accordion_bench.comm.ledger import Ledger
from accordion_bench.network.collective_costs import KINDS
from accordion_bench.network.meter import Interface

Row = dict[str, Any]
WIRE = [1 << n for n in (10, 12, 14, 16, 18, 20, 22, 24, 26, 28)]  # approximate bytes sent per worker
USUAL = 1 << 24  # bytes; larger sizes are measured only while a repetition is shorter than LONG
LONG = 0.1  # seconds
FEWEST, MOST = 3, 15  # number of repetitions
SLOPE = 1.5  # the bandwidth is measurable only if the largest message takes this many times as long as the smallest
IDLE = 0.05  # seconds between two repetitions
SETTLE = 0.05  # seconds from a collective to reading the counters, since the last acknowledgement may be late


@dataclass(frozen=True)
class LinkGroup:
    """Process groups and device of a measurement.

    Args:
        members: process group of the timed collectives; None = all processes.
        together: process group that starts its collectives at the same time, such as `members` of several machines;
            None = all processes.
        device: device of the messages.
    """

    members: dist.ProcessGroup | None
    together: dist.ProcessGroup | None
    device: torch.device

    @property
    def workers(self) -> int:
        """Number of workers of a collective."""
        return dist.get_world_size(self.members)

    def wait(self) -> None:
        """Synchronise with the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """Synchronise all processes of `together`."""
        self.largest(0.0)

    def largest(self, *mine: float) -> list[float]:
        """Return the element-wise maximum over the processes of `together`."""
        numbers = torch.tensor(mine, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.together)
        return numbers.tolist()

    def mean(self, *mine: float) -> list[float]:
        """Return the element-wise mean over the processes of `together`."""
        numbers = torch.tensor(mine, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, group=self.together)
        return (numbers / dist.get_world_size(self.together)).tolist()


@dataclass(frozen=True)
class Repetition:
    """Measurement of one collective.

    Args:
        seconds: duration on the slowest process.
        cpu: seconds of processor time, mean over the processes.
        sent: bytes sent by a process's interface, mean over the processes; 0 = not counted.
    """

    seconds: float
    cpu: float
    sent: float


def time_collectives(
    group: LinkGroup,
    seconds: float,
    idle: float = IDLE,
    interface: Interface | None = None,
    tell: Callable[[str], None] = lambda said: None,
) -> list[Row]:
    """Time each kind of collective at several sizes. All processes of `LinkGroup.together` pass equal arguments.

    Args:
        group: process groups and device.
        seconds: approximate total time. Sizes whose repetitions would take too long are skipped, except those required
            to measure the bandwidth.
        idle: seconds of pause before each collective.
        interface: interface whose byte counters are read as well; None = none.
        tell: called with progress messages.

    Returns:
        one row per kind and size, with `collective`, the ledger's `payload_bytes`, `wire_bytes` and `rounds` of one
        worker, medians `seconds` and `cpu_seconds`, `link_sent_bytes` of the interface, and all `repetitions` in
        seconds.
    """
    budget = seconds / len(KINDS) / sum(wire <= USUAL for wire in WIRE)
    rows: list[Row] = []
    for kind in KINDS:
        tell(f"{kind} of {group.workers} workers")
        sample_distribution: list[Row] = []
        for wire in WIRE:
            if sample_distribution and _enough(sample_distribution, wire, budget):
                break
            sample_distribution.append(_row(group, kind, wire, idle, budget, interface))
        rows += sample_distribution
    return rows


def _enough(rows: list[Row], wire: int, budget: float) -> bool:
    first, last = rows[0]["seconds"], rows[-1]["seconds"]
    if wire > USUAL and last > LONG:
        return True
    return FEWEST * last > budget and last > SLOPE * first  # the next takes at most four times as long


def _row(group: LinkGroup, kind: str, wire: int, idle: float, budget: float, interface: Interface | None) -> Row:
    ledger = Ledger(group.workers)
    run = collective(kind, wire, ledger, group)
    run()  # opens connections and allocates buffers
    found = list(_repetitions(group, run, idle, budget, interface))
    sent = ledger.columns()
    row: Row = {
        "collective": kind,
        "workers": group.workers,
        "payload_bytes": sent["payload_bytes"],
        "wire_bytes": sent["wire_bytes"],
        "rounds": sent["rounds"],
        "seconds": statistics.median(one.seconds for one in found),
        "cpu_seconds": statistics.median(one.cpu for one in found),
        "repetitions": [one.seconds for one in found],
    }
    return row | ({"link_sent_bytes": statistics.median(one.sent for one in found)} if interface else {})


def collective(kind: str, wire: int, ledger: Ledger, group: LinkGroup) -> Callable[[], Any]:
    """Return a function that runs a collective, and count one run in the ledger.

    Args:
        kind: one of `KINDS`.
        wire: approximate bytes sent per worker.
        ledger: ledger of the group's workers.
        group: process groups and device.
    """
    workers, members = group.workers, group.members
    part = max(wire // (workers - 1), 1)  # bytes per receiver
    from_all = torch.zeros(workers * part, dtype=torch.uint8, device=group.device)
    if kind == "all_gather":
        ledger.all_gather(part)
        message = torch.zeros(part, dtype=torch.uint8, device=group.device)
        return lambda: dist.all_gather_into_tensor(from_all, message, group=members)
    if kind == "all_to_all":
        ledger.all_to_all([part] * workers)
        messages = torch.zeros_like(from_all)
        return lambda: dist.all_to_all_single(from_all, messages, group=members)
    floats = torch.zeros(workers * max(part // 8, 1), device=group.device)
    ledger.all_reduce(4 * len(floats))
    return lambda: dist.all_reduce(floats, group=members)


def _repetitions(
    group: LinkGroup, run: Callable[[], Any], idle: float, budget: float, interface: Interface | None
) -> Iterator[Repetition]:
    first = time.monotonic()
    for done in range(1, MOST + 1):
        group.meet()
        time.sleep(idle)
        group.meet()
        before = interface.sent() if interface else 0
        burned, begin = time.process_time(), time.monotonic()
        run()
        group.wait()
        mine = time.monotonic() - begin
        cpu = time.process_time() - burned if group.device.type == "cpu" else 0.0  # on a GPU the processor only waits
        sent = _sent(interface, before, mine)
        took, since = group.largest(mine, time.monotonic() - first)
        yield Repetition(took, *group.mean(cpu, sent))
        if done >= FEWEST and since > budget:
            return


def _sent(interface: Interface | None, before: int, took: float) -> float:
    """Return the bytes sent since `before`; 0 without an interface."""
    if interface is None:
        return 0.0
    time.sleep(SETTLE + took)  # others may still be sending
    return float(interface.sent() - before)
