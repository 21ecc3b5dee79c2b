"""Link probe: time collectives between processes of torchrun, fit the link's parameters and write them to a file.

The processes have no common clock. Links are idle before each collective, as in training, where a backward pass
precedes it. A tiny all-reduce synchronises the processes; each then measures its own duration, and the longest counts.
"""

import datetime
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accordion_bench.comm import on_device
from accordion_bench.comm.ledger import Ledger
from accordion_bench.network import fit
from accordion_bench.network.collective_costs import KINDS
from accordion_bench.network.links import LEVELS, MeasuredLink, Row, link_table, to_type, write_measured_link
from accordion_bench.network.meter import Interface
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError

WIRE = [1 << n for n in (10, 12, 14, 16, 18, 20, 22, 24, 26, 28)]  # approximate bytes sent per worker
USUAL = 1 << 24  # bytes; larger sizes are measured only while a repetition is shorter than LONG
LONG = 0.1  # seconds
FEWEST, MOST = 3, 15  # number of repetitions
SLOPE = 1.5  # the bandwidth is measurable only if the largest message takes this many times as long as the smallest
IDLE = 0.05  # seconds between two repetitions
SETTLE = 0.05  # seconds from a collective to reading the counters, since the last acknowledgement may be late


@dataclass(frozen=True)
class LinkGroup:
    """Process groups and device of a measurement."""

    members: dist.ProcessGroup | None  # process group of the timed collectives; None = all processes
    # process group that starts its collectives at the same time, such as `members` of several machines; None = all
    # processes
    together: dist.ProcessGroup | None
    device: torch.device  # device of the messages

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
    """Measurement of one collective."""

    seconds: float  # duration on the slowest process
    cpu: float  # seconds of processor time, mean over the processes
    sent: float  # bytes sent by a process's interface, mean over the processes; 0 = not counted


def time_collectives(
    group: LinkGroup,
    seconds: float,
    idle: float = IDLE,
    interface: Interface | None = None,
    tell: Callable[[str], None] = lambda said: None,
) -> list[Row]:
    """Time each kind of collective at several sizes. All processes of `LinkGroup.together` pass equal arguments.

    Args:
        seconds: approximate total time. Sizes whose repetitions would take too long are skipped, except those required
            to measure the bandwidth.
        idle: seconds of pause before each collective.
        interface: interface whose byte counters are read as well; None = none.

    Returns:
        one row per kind and size: the ledger's counts of one worker, medians of seconds, processor seconds and bytes of
        the interface, and the seconds of all repetitions.
    """
    budget = seconds / len(KINDS) / sum(wire <= USUAL for wire in WIRE)
    rows: list[Row] = []
    for kind in KINDS:
        tell(f"{kind} of {group.workers} workers")
        some: list[Row] = []
        for wire in WIRE:
            if some and _enough(some, wire, budget):
                break
            some.append(_row(group, kind, wire, idle, budget, interface))
        rows += some
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
    """Return a function that runs a collective of about `wire` bytes per worker, and count one run in the ledger."""
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
    if interface is None:
        return 0.0
    time.sleep(SETTLE + took)  # others may still be sending
    return float(interface.sent() - before)


TORCHRUN = "torchrun --nproc-per-node=1 --nnodes=2 ... -m accordion_bench.advise --probe"
FROM_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PATIENCE = 300.0  # timeout for all processes to join, seconds


class Place(NamedTuple):
    """Ranks of this process in all and on its machine, and the number of processes in all and per machine."""

    rank: int
    workers: int
    local_rank: int
    per_machine: int

    @property
    def machines(self) -> int:
        """Number of machines."""
        return self.workers // self.per_machine

    @property
    def two_levels(self) -> bool:
        """Whether there are several machines with several processes each."""
        return 1 < self.per_machine < self.workers


def probe_link(seconds: float, out: Path) -> MeasuredLink:
    """Return the measured link between all processes of torchrun, the same in each; rank 0 prints and writes it.

    The backend is NCCL if GPUs are available, otherwise gloo. Several machines with several processes each are probed
    at both levels. The function creates the default process group, which must not exist yet, and destroys it.

    Args:
        seconds: approximate total time.
        out: path of the file, `link.json`.

    Raises:
        ConfigError: there is only one process, or the numbers of processes are inconsistent.
    """
    seconds = checks.number("--seconds", seconds, above=0, instead=20)
    place = placed(os.environ)
    device = _device(place)
    _join(place, device, datetime.timedelta(seconds=PATIENCE + 10 * seconds))
    try:
        _refuse_uneven(place, device)
        rows = _agreed(_rows(place, device, seconds), device)
    finally:
        dist.destroy_process_group()
    backend = "nccl" if device.type == "cuda" else "gloo"
    costs = {
        level: fit.costs(of_level, shared_by=place.per_machine if level == "between_together" else 1)
        for level in ("kinds", *LEVELS)
        if (of_level := [row for row in rows if row["level"] == level])
    }
    link = MeasuredLink(place.workers, place.machines, backend, device.type, **costs)
    if place.rank == 0:
        write_measured_link(out, link, rows)
        print(link_table(link))
        print(
            f"\nIn {out}, for advice:\n\n    python -m accordion_bench.advise --link {out} ...\n\n"
            f"As a modelled link of runs type\n\n    {to_type(link)}"
        )
    return link


def placed(environ: Mapping[str, str]) -> Place:
    """Read the ranks from the launcher's variables; ConfigError if one is bad, or there is one process only."""
    if environ.get("WORLD_SIZE", "1") == "1":
        got = "one" if "WORLD_SIZE" in environ else "none"
        raise ConfigError(f"probe must run with at least two processes, got {got}; type {TORCHRUN}")
    if missing := [name for name in FROM_LAUNCHER if name not in environ]:
        raise ConfigError(f"probe must be started by torchrun, got no {missing[0]}; type {TORCHRUN}")
    numbers = [environ[name] for name in FROM_LAUNCHER[:4]]
    for name, text in zip(FROM_LAUNCHER, numbers, strict=False):
        if not text.isdecimal():
            raise ConfigError(f"{name} must be a whole number, as torchrun sets it, got {text!r}; type {TORCHRUN}")
    rank, workers, local_rank, per_machine = map(int, numbers)
    return Place(rank, workers, local_rank, per_machine)


def _device(place: Place) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        return torch.device("cpu")
    if gpus > 1 and place.per_machine > gpus:
        raise ConfigError(
            f"--nproc-per-node must be at most the number of GPUs, {gpus}, got {place.per_machine}; "
            f"type --nproc-per-node={gpus}"
        )
    device = torch.device("cuda", place.local_rank if gpus > 1 else 0)  # a launcher may show each process one GPU
    torch.cuda.set_device(device)
    return device


def _join(place: Place, device: torch.device, patience: datetime.timedelta) -> None:
    options: dict[str, Any] = {}
    if device.type == "cuda":
        options = {"device_id": device, "pg_options": on_device.nccl_options(patience)}
    try:
        dist.init_process_group("nccl" if options else "gloo", timeout=patience, **options)
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        why = str(error).splitlines()[0]
        raise ConfigError(
            f"MASTER_ADDR and MASTER_PORT must lead to rank 0 of {place.workers} processes, got {where} ({why}); "
            "type the same torchrun command on every machine"
        ) from None


def _refuse_uneven(place: Place, device: torch.device) -> None:
    most, fewest = LinkGroup(None, None, device).largest(place.per_machine, -place.per_machine)
    if most != -fewest or place.workers % place.per_machine:
        raise ConfigError(
            f"--nproc-per-node must be the same on all machines, got {-fewest:.0f} and {most:.0f} for "
            f"{place.workers} processes in all; type --nproc-per-node={-fewest:.0f} everywhere"
        )


def _rows(place: Place, device: torch.device, seconds: float) -> list[Row]:
    rows: list[Row] = []
    budget = seconds / (1 + len(LEVELS) * place.two_levels)
    for level, group in _groups(place, device):

        def tell(said: str, level: str = level) -> None:
            if place.rank == 0:
                where = f", {level.replace('_', ' ')}" if level in LEVELS else ""
                print(f"probe: {said}{where}", file=sys.stderr, flush=True)

        rows += [{"level": level, **row} for row in time_collectives(group, budget, tell=tell)]
    return rows


def _groups(place: Place, device: torch.device) -> list[tuple[str, LinkGroup]]:
    """Return level and group in the order of the probe; without `between` if this process takes no part in it."""
    everyone = ("kinds", LinkGroup(None, None, device))
    if not place.two_levels:
        return [everyone]
    first_of_machine = range(0, place.workers, place.per_machine)
    inside = _own_group(place.rank, [range(first, first + place.per_machine) for first in first_of_machine])
    columns = [range(index, place.workers, place.per_machine) for index in range(place.per_machine)]
    across = _own_group(place.rank, columns)
    found = [everyone, ("inside", LinkGroup(inside, None, device))]
    if place.rank in first_of_machine:
        found.append(("between", LinkGroup(across, across, device)))
    return [*found, ("between_together", LinkGroup(across, None, device))]


def _own_group(rank: int, groups: list[range]) -> dist.ProcessGroup:
    made = [dist.new_group(list(ranks), **on_device.nccl_sub_group_options(None)) for ranks in groups]
    (own,) = (group for group, ranks in zip(made, groups, strict=True) if rank in ranks)
    assert isinstance(own, dist.ProcessGroup)
    return own


def _agreed(rows: list[Row], device: torch.device) -> list[Row]:
    """Broadcast the rows of rank 0, which takes part in all levels."""
    said = [rows]
    dist.broadcast_object_list(said, src=0, device=device)
    return said[0]
