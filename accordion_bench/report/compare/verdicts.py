"""One plain sentence per arm against dense: bytes, what was evaluated, and whether the seeds show a difference."""

import math
from collections.abc import Sequence
from typing import Any

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.rival import Rival, rival
from accordion_bench.report.compare.show import NO_DIFFERENCE, NOT_COUNTED, SAME, show_bytes, show_times
from accordion_bench.report.compare.tidy import tidy


def verdicts(arms: Sequence[Arm]) -> list[str]:
    """One sentence per arm that has a dense run to be compared with."""
    rows = zip(arms, tidy(arms).to_dict("records"), strict=True)
    return [verdict(one, row) for arm, row in rows if (one := rival(arm, arms)) is not None]


def verdict(one: Rival, row: dict[Any, Any]) -> str:
    """Bytes, metric and noise of one arm against dense, in words.

    Args:
        one: the arm and its baseline.
        row: of the arm in `tidy.tidy`.
    """
    gap = f"{one.judged.words} {one.side()}"
    images = one.arm.runs[0].summary.get("test_size") if one.judged.name == "accuracy" else None
    if images and one.found.gap:
        gap += f" ({_count(abs(one.found.gap) * images)} of {images:,} test images)"
    return f"{one.label}: {'; '.join([_sent(row, one), gap, _noise(one), *one.beware()])}."


def _sent(row: dict[Any, Any], one: Rival) -> str:
    """`payload 9.19x less than dense, wire 12x less`."""
    if math.isnan(row["payload_bytes"]):
        return f"bytes {NOT_COUNTED}"
    name = one.dense_name
    if one.dense.mean("payload_bytes") == 0 and row["payload_bytes"]:
        return f"payload {show_bytes(row['payload_bytes'])}, where {name} sends nothing"
    if math.isnan(row["payload_times_less"]):
        return f"bytes {NOT_COUNTED} of {name}"
    payload, wire = show_times(row["payload_times_less"]), show_times(row["wire_times_less"])
    joined = f"{payload} than {name}"
    if payload.startswith(SAME):
        joined = payload.replace(SAME, f"{SAME} as {name}")
    elif payload == "nothing sent":
        joined = payload
    return f"payload {joined}" + (f", wire {wire}" if wire != payload else "")


def _count(images: float) -> str:
    return f"{images:.2g}" if images < 99.5 else f"{images:.0f}"


def _noise(one: Rival) -> str:
    """Whether the seeds show a difference, and by which interval."""
    found = one.found
    if found.constant:
        return f"{NO_DIFFERENCE}, the same at every seed" if not found.gap else "the same at every seed: no interval"
    if found.shown is None:
        return f"{'one' if one.arm.n == 1 else f'{one.dense_name} has one'} seed: no statement about noise"
    better = "better" if one.judged.better(found.gap, 0) else "worse"
    told = f"{better} by more than noise" if found.shown else NO_DIFFERENCE
    return f"{told}, the 95 % interval of the difference is {one.reach()} ({found.how}, {one.seeds})"
