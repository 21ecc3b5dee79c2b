"""Tables of runs that have really communicated: beside the model, and beside what a network card has counted."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from accordion_bench.network.link_options import link_name, show_link
from accordion_bench.options.units import digits
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.intervals import half_width
from accordion_bench.report.compare.show import NONE, show_bytes
from accordion_bench.report.read.load import Run

CLOSE = 0.01  # relative: rates that are one rate


class Beside(NamedTuple):
    """A table beside the comparison: the headings, then a row per arm; and what its numbers are."""

    heading: str
    cells: list[list[str]]
    note: str


def tables(arms: Sequence[Arm]) -> list[Beside]:
    """Those of one setting that have a row."""
    return [table for table in (against_model(arms), on_the_link(arms)) if len(table.cells) > 1]


def against_model(arms: Sequence[Arm]) -> Beside:
    """Modelled and measured time of the runs whose `network` describes the link that they really used."""
    rows = [["arm", "n", "modelled network", "measured", "modelled", "error"]]
    for arm in arms:
        if arm.values("comm_seconds") and arm.values("modelled_seconds") and all(map(describes_its_link, arm.runs)):
            column = "own_modelled_seconds" if arm.values("own_modelled_seconds") else "modelled_seconds"
            pairs = zip(arm.values(column), arm.values("seconds"), strict=True)
            errors = [100 * (modelled / measured - 1) if measured else math.nan for modelled, measured in pairs]
            seconds = [f"{digits(arm.mean(name))} s" for name in ("seconds", column)]
            rows.append([arm.label, str(arm.n), show_link(arm.config["network"]), *seconds, percent(errors)])
    note = (
        "Both without evaluation and warm-up. The model starts from what this run has computed, and knows nothing of "
        "how long its communication took; error: modelled over measured, minus 1, mean over the seeds."
    )
    return Beside("Modelled against measured", rows, note)


def describes_its_link(run: Run) -> bool:
    """Whether a run was modelled on its own link: values given by hand for an interface, or the rate of a netlab."""
    network, lab = run.config.get("network") or {}, run.environment.get("netlab")
    choice = (run.config.get("choices") or {}).get("network")
    by_hand = choice is not None and link_name(run.config) != choice
    if isinstance(lab, dict) and not by_hand:
        rate, slow = lab.get("rate"), [speed for speed in lab.get("slow_host", {}).values() if speed]
        if lab.get("cuts") or network.get("slow_bandwidth") != (min(slow) if slow else None):
            return False
        return isinstance(rate, int | float) and math.isclose(rate, network.get("bandwidth", 0), rel_tol=CLOSE)
    return by_hand and bool((run.config.get("comm") or {}).get("interface"))


def on_the_link(arms: Sequence[Arm]) -> Beside:
    """The ledger's bytes beside those that the interfaces have counted."""
    rows = [["arm", "n", "sent per worker", "control", "sent by the interface", "counted over sent + control"]]
    for arm in arms:
        if counted := arm.values("link_sent_bytes"):
            wire = arm.values("wire_bytes") or [math.nan] * arm.n
            known = zip(wire, arm.values("control_wire_bytes"), strict=True)
            ratios = [sent / sum(own) if sum(own) else math.nan for sent, own in zip(counted, known, strict=True)]
            columns = ("wire_bytes", "control_wire_bytes", "link_sent_bytes")
            sizes = [show_bytes(arm.mean(column)) for column in columns]
            ratio = math.fsum(ratios) / len(ratios)
            rows.append([arm.label, str(arm.n), *sizes, NONE if math.isnan(ratio) else f"{ratio:.3f}"])
    note = (
        "Bytes of one worker, by arithmetic, control without checksums; of one interface, mean over the processes, as "
        "the operating system counts them in training: with headers, acknowledgements, checksums of the run and all "
        "else that has used it; without what NCCL sends over NVLink, shared memory, InfiniBand or RoCE."
    )
    return Beside("Bytes on the link", rows, note)


def percent(errors: Sequence[float]) -> str:
    """`-3.2 %`, over several seeds `-3.2 ± 1.1 %`."""
    half = half_width(errors)
    return f"{math.fsum(errors) / len(errors):+.1f}" + ("" if math.isnan(half) else f" ± {half:.1f}") + " %"
