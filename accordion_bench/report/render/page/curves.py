"""The numbers of a setting's curves: what is evaluated, against everything that training costs."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from accordion_bench.network.link_model import Network
from accordion_bench.options.units import human_rate
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.intervals import half_width
from accordion_bench.report.compare.other_links import modelled_seconds
from accordion_bench.report.compare.timed import communicates
from accordion_bench.report.render.captions import hidden
from accordion_bench.report.render.figures.limits import MOST, curve_limits, least_span
from accordion_bench.report.render.figures.marks import metric_label
from accordion_bench.report.render.figures.series import Array, column, ends, metric_of, scores
from accordion_bench.report.render.page.packed import packed, rows, thinned

STOPS = [digit * 10.0**power for power in range(6, 11) for digit in (1, 2, 5)] + [1e11]  # bit/s, of the slider

# key -> short name of the switch, name, unit, note
AXES = {
    "epoch": ("epochs", "training", "epochs", ""),
    "wire_bytes": ("bytes sent", "sent per worker", "bytes", "What one worker's own link has sent."),
    "payload_bytes": ("payload", "payload per worker", "bytes", "What one worker has handed to the collectives."),
    "modelled_seconds": ("modelled time", "modelled time", "s", ""),
    "seconds": ("measured time", "measured time", "s", "Measured training time, without evaluation and warm-up."),
}


def curves(arms: Sequence[Arm], most: int) -> dict[str, Any]:
    """What the page draws of the curves of one setting.

    Args:
        arms: of the setting.
        most: points of a curve.

    Returns:
        `axes` that at least one arm has, `arms` with their values on them, `stops` of the slider, limits of the metric.
    """
    stops, own = stops_of(arms)
    found = [_curve(arm, most, stops, own) for arm in arms]
    axes = [
        {"key": key, "short": short, "name": name, "unit": unit, "note": note}
        for key, (short, name, unit, note) in AXES.items()
        if any(key in curve["x"] for curve in found) and (key != "seconds" or all(map(communicates, arms)))
    ]
    of = metric_of(arms)
    return {
        "metric": {
            "label": metric_label(arms),
            "unit": of.unit,
            "decimals": 2 if of.percent else 4,
            "least": least_span(arms),
            "most": MOST if of.percent else None,
        },
        "limits": curve_limits(arms, [scores(arm).mean(axis=0) for arm in arms]),
        "axes": axes,
        "stops": [{"bandwidth": stop, "name": human_rate(stop)} for stop in stops],
        "stop": stops.index(own),
        "model": formula(arms),
        "curves": found,
    }


def stops_of(arms: Sequence[Arm]) -> tuple[list[float], float]:
    """The bandwidths of the slider, and where it stands at first: the link of most arms, which is one of them."""
    own = [bandwidth_of(arm) for arm in arms if arm.values("modelled_seconds")] or [1e9]
    return sorted({*STOPS, *own}), max(own, key=own.count)


def bandwidth_of(arm: Arm) -> float:
    """bit/s of the link that an arm was modelled on."""
    return Network(**{key: value for key, value in arm.config["network"].items() if key != "_target_"}).bandwidth


def _curve(arm: Arm, most: int, stops: Sequence[float], own: float) -> dict[str, Any]:
    """One arm; of times and bytes the means over the seeds."""
    values = scores(arm)
    kept = thinned(values.shape[1], most)
    last = ends(arm)
    x = {"epoch": packed(column(arm, "epoch")[0][kept] + 1)}
    for key in ("payload_bytes", "wire_bytes", "seconds"):
        mean = column(arm, key).mean(axis=0)[kept]
        if np.isfinite(mean).all() and mean[-1] > 0:
            x[key] = packed(mean)
    modelled = on_links(arm, stops, kept)
    return {
        "seeds": [str(seed) for seed in arm.seeds],
        "score": rows(values[:, kept]),
        "half": packed([half_width(values[:, epoch].tolist()) for epoch in kept]),
        "end": [known(float(np.mean(last))), known(half_width(last))],
        "x": x if modelled is None else {**x, "modelled_seconds": rows(modelled)},
    }


def known(value: float) -> float | None:
    """A number; None where it is not known, or infinite, which JSON has no word for."""
    return value if math.isfinite(value) else None


def on_links(arm: Arm, stops: Sequence[float], epochs: Sequence[int]) -> Array | None:
    """Modelled time [stops, epochs], mean over the seeds; None where rows have no model.

    At the runs' own bandwidth it is what they have recorded.
    """
    if not arm.sends() or not arm.values("modelled_seconds"):
        return None
    seconds = modelled_seconds(arm, stops, epochs).mean(axis=1)
    return seconds if np.isfinite(seconds).all() else None


def formula(arms: Sequence[Arm]) -> str:
    """How modelled time is made."""
    known = [arm for arm in arms if arm.values("modelled_seconds")]
    if not known:
        return ""
    latencies = sorted({f"{arm.config['network']['latency'] * 1e6:g}" for arm in known})
    return (
        "Modelled, not measured: computation of one worker as measured + communication, 8 × wire bytes / bandwidth + "
        f"rounds × latency ({' or '.join(latencies)} µs), {hidden(known)}."
    )
