"""Figures of the metric against cost: learning curves, final values, time on several links, and Pareto fronts."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from accordion_bench.network.links import show_link
from accordion_bench.options.units import human_rate
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.intervals import apart, beaten, pareto_front
from accordion_bench.report.compare.times import communicates, modelled_seconds, unlike
from accordion_bench.report.render import Drawn, with_looks
from accordion_bench.report.render.captions import heading, hidden, without_bytes
from accordion_bench.report.render.figures.sheet import (
    EPOCHS,
    LARGEST,
    SENT,
    SMALLEST,
    Array,
    Sheet,
    bytes_axis,
    column,
    curve,
    curve_limits,
    end,
    end_limits,
    end_marker,
    entry,
    epochs_axis,
    interval,
    interval_bar,
    log_axis,
    name_height,
    scores,
    seeds,
    several,
    shown_end,
)

PALE = 0.3  # opacity of an arm that is beaten by another


def points(axes: Axes, shown: Sequence[Drawn], costs: Sequence[Sequence[float]], pale: Collection[int] = ()) -> None:
    """Draw one marker per arm at its mean cost and its metric after the last epoch, with both intervals.

    `costs` has one value per seed of each arm; the limits of its axis are final. The arms with indices in `pale` are
    pale.
    """
    arms = [arm for arm, _ in shown]
    axes.set_ylim(end_limits(arms))
    for i, (arm, look) in enumerate(shown):
        before, (y, half), x = len(axes.lines), end(arm), float(np.mean(costs[i]))
        interval_bar(axes, (x, y), half, look.colour)
        interval_bar(axes, (x, y), interval(costs[i]), look.colour, across=True)
        size = LARGEST - (LARGEST - SMALLEST) * i / max(len(shown) - 1, 1)  # covered ones are larger
        end_marker(axes, (x, y), look, shown_end(arm), size=size)
        for line in axes.lines[before:]:
            line.set_alpha(PALE if i in pale else None)
    name_height(axes, arms)
    axes.grid()


def sent_axis_of_ends(axes: Axes, costs: Sequence[Sequence[float]]) -> None:
    """Set up an axis of bytes from the fewest to the most."""
    means = [float(np.mean(of)) for of in costs]
    bytes_axis(axes, min(means), max(means))
    axes.set_xlabel(SENT)


TIMES = 6  # most intervals between numbers on an axis of time: more numbers of five digits would touch


def time_axis(axes: Axes, costs: Sequence[Sequence[float]]) -> None:
    """Set up an axis of modelled seconds from 0 to the largest mean, regardless of the intervals."""
    axes.set_xlim(0, 1.15 * max(float(np.mean(of)) for of in costs) or 1)
    axes.xaxis.set_major_locator(MaxNLocator(TIMES))
    axes.set_xlabel("modelled time [s]")


def points_note(arms: Sequence[Arm]) -> str:
    """Return the footnote's part on seeds, markers and bars."""
    bars = "; bars: Student's 95 % t-interval, arrows: it goes on outside" if several(arms) else ""
    return f"{seeds(arms)}; after the last epoch{bars}"


TOGETHER = 8  # number of arms beyond which curves in one panel hide each other
MARKS = 4  # small markers on a curve


def consensus_distance(arms: Sequence[Arm]) -> Figure | None:
    """Draw the distance of the workers from their mean against steps, for arms whose rows contain it."""
    shown = [pair for pair in with_looks(arms) if (column(pair[0], "consensus_distance") > 0).any()]
    if not shown or too_short(arms):
        return None
    sheet = Sheet(1)
    (axes,) = sheet.panels
    low, high = math.inf, 0.0
    for arm, look in shown:
        steps, distances = column(arm, "step").mean(axis=0), column(arm, "consensus_distance")
        curve(axes, steps, distances, look)
        axes.plot(steps, distances.mean(axis=0), zorder=4, **look.point, markersize=3.5)
        seen = distances[distances > 0]
        low, high = min(low, float(seen.min())), max(high, float(seen.max()))
    log_axis(axes, low, high)
    axes.set_xlabel("step [count]")
    axes.set_ylabel("distance from mean [log scale]")
    axes.grid()
    note = (
        f"{heading(arms[0])}; {seeds(arms)}. Root mean square over the workers of the distance between a worker's "
        "parameters and their mean, at the end of each epoch; the last one before the final average."
    )
    return sheet.finish(note, [entry(look, arm.label) for arm, look in shown])


# columns that learning curves are drawn against, and the labels of their axes
COSTS = {
    "epoch": EPOCHS,
    "payload_bytes": "payload per worker [bytes, log scale]",
    "wire_bytes": SENT,
    "seconds": "measured training time [s]",
    "simulated_seconds": "simulated time, computing alone [s]",
}


def accuracy_against(arms: Sequence[Arm], cost: str) -> Figure | None:
    """Draw the metric against one of `COSTS`, in one panel, or in several with dense in each if there are many arms.

    On an axis of bytes only arms that send are drawn, on one of simulated time only those that have it. Measured time
    needs arms that have all measured their communication.
    """
    of_bytes, bars = cost.endswith("_bytes"), cost != "epoch"  # curves end at the same epoch: bars would overlap
    pairs = with_looks(arms)
    if of_bytes:
        pairs = [pair for pair in pairs if pair[0].sends()]
    elif cost == "simulated_seconds":
        pairs = [pair for pair in pairs if pair[0].values(cost)]
    if not pairs or too_short(arms) or (cost == "seconds" and not all(map(communicates, arms))):
        return None
    parts = panes(pairs)
    sheet = Sheet(len(parts))
    limits = curve_limits([arm for arm, _ in pairs])
    xs = {arm.label: column(arm, cost) + (cost == "epoch") for arm, _ in pairs}
    for axes, part in zip(sheet.panels, parts, strict=True):
        if of_bytes:
            sent_axis(axes, pairs, xs, limits)
        curves(axes, part, xs, limits, bars)
        axes.set_xlabel(COSTS[cost])
        if cost == "epoch":
            epochs_axis(axes)
        elif cost.endswith("seconds"):
            axes.xaxis.set_major_locator(MaxNLocator(TIMES))
    note = footnote(arms, bars) + (without_bytes(arms) if of_bytes else "")
    return sheet.finish(f"{heading(arms[0])}; {note}", handles(pairs))


def curves(
    axes: Axes, shown: Sequence[Drawn], costs: Mapping[str, Array], limits: tuple[float, float], bars: bool = True
) -> None:
    """Draw one curve per arm: mean over the seeds by epoch, band = their range, marker = end with 95 % t-interval.

    Dense is drawn below all others, whose dashes let it show through.

    Args:
        axes: axes to draw on.
        shown: arms with their looks.
        costs: by label, an arm's values [seeds, epochs] on the other axis.
        limits: limits of the metric's axis.
        bars: whether intervals are drawn.
    """
    axes.set_ylim(limits)
    for i, (arm, look) in enumerate(shown):
        xs, ys, (last, half) = costs[arm.label].mean(axis=0), scores(arm), end(arm)
        every = max(len(xs) // MARKS, 1)
        curve(axes, xs, ys, look, zorder=2 if arm.dense else 3)
        some = {**look.point, "markevery": (i * every // len(shown), every), "markersize": 3.5}
        axes.plot(xs, ys.mean(axis=0), zorder=4, **some)
        if bars:
            interval_bar(axes, (float(xs[-1]), last), half, look.colour)
        end_marker(axes, (float(xs[-1]), last), look, shown_end(arm))
    name_height(axes, [arm for arm, _ in shown])
    axes.grid()


def sent_axis(axes: Axes, shown: Sequence[Drawn], costs: Mapping[str, Array], limits: tuple[float, float]) -> None:
    """Set up an axis of bytes that starts where the curves enter the metric's limits."""
    seen = []
    for arm, _ in shown:
        xs, ys = costs[arm.label].mean(axis=0), scores(arm).mean(axis=0)
        seen.append(xs[(xs > 0) & ((limits[0] <= ys) & (ys <= limits[1]) | (xs == xs[-1]))])
    if len(spent := np.concatenate(seen)):
        bytes_axis(axes, float(spent.min()), float(spent.max()))


def panes(shown: Sequence[Drawn]) -> list[list[Drawn]]:
    """Distribute arms over panels: all in one, or a few of distinct colours in each, with dense arms in all."""
    if len(shown) <= TOGETHER:
        return [list(shown)]
    dense = [pair for pair in shown if pair[0].dense][: TOGETHER // 2]
    rest = [pair for pair in shown if pair not in dense]
    most = len(dense) + math.ceil(len(rest) / math.ceil(len(rest) / (TOGETHER - len(dense))))
    found: list[list[Drawn]] = []
    for arm, look in rest:
        room = (pane for pane in found if len(pane) < most and look.colour not in {other.colour for _, other in pane})
        pane = next(room, None)
        if pane is None:
            found.append(pane := [*dense])
        pane.append((arm, look))
    return found


def handles(shown: Sequence[Drawn], line: bool = True) -> list[Any]:
    """Return the legend: every arm with its metric after the last epoch."""
    return [entry(look, f"{arm.label}: {shown_end(arm)}", line) for arm, look in shown]


def footnote(arms: Sequence[Arm], bars: bool = True) -> str:
    """Return the footnote on seeds, lines, bands and markers."""
    lines = "; lines: mean over the seeds; bands: their range" if several(arms) else ""
    if several(arms) and bars:
        lines += "; bars: Student's 95 % t-interval, arrows: it goes on outside"
    cut = "; early epochs are cut off" if apart(arms) else ""
    return f"{seeds(arms)}{lines}; large markers: after the last epoch{cut}."


def too_short(arms: Sequence[Arm]) -> bool:
    """Whether no run has enough epochs for a curve."""
    return all(len(run.rows) < 2 for arm in arms for run in arm.runs)


def accuracy_modelled(arms: Sequence[Arm], bandwidths: Sequence[float]) -> Figure | None:
    """Draw one panel per bandwidth, in bit/s of each worker's link: learning curves, or of many arms their ends."""
    sending = [pair for pair in with_looks(arms) if pair[0].sends()]
    times = {arm.label: modelled_seconds(arm, bandwidths) for arm, _ in sending}
    shown = [pair for pair in sending if np.isfinite(times[pair[0].label]).all()]
    if len(shown) < 2 or too_short(arms):
        return None
    sheet = Sheet(len(bandwidths))
    limits, many = curve_limits([arm for arm, _ in shown]), len(shown) > TOGETHER
    for i, (axes, bandwidth) in enumerate(zip(sheet.panels, bandwidths, strict=True)):
        of = {arm.label: times[arm.label][i] for arm, _ in shown}
        costs = [of[arm.label][:, -1].tolist() for arm, _ in shown]
        time_axis(axes, costs)
        if many:
            points(axes, shown, costs)
        else:
            curves(axes, shown, of, limits)
        sheet.titles[axes] = human_rate(bandwidth)
    latencies = sorted({f"{arm.config['network']['latency'] * 1e6:g}" for arm, _ in shown})
    note = (
        f"{heading(arms[0])}; {points_note(arms) + '.' if many else footnote(arms)} Modelled, not measured: measured "
        f"computation of one worker + 8 x wire bytes / bandwidth + rounds x {' or '.join(latencies)} µs, "
        f"{hidden([arm for arm, _ in shown])}.{without_bytes(arms)}"
    )
    return sheet.finish(note, handles(shown, not many))


AXES = {"wire_bytes": sent_axis_of_ends, "modelled_seconds": time_axis}


def tradeoff(arms: Sequence[Arm]) -> Figure | None:
    """Draw the final metric against bytes on the wire, and against modelled time if all arms have it.

    Pale arms are beaten by another. A line is the front, if intervals separate its arms. Both are omitted for modelled
    times of different networks, machines or numbers of threads. Arms that send nothing, such as the one-worker control,
    are not drawn.
    """
    shown = [pair for pair in with_looks(arms) if pair[0].sends()]
    placed = [arm for arm, _ in shown]
    if len(placed) < 2:
        return None
    xs = [x for x in AXES if all(arm.values(x) for arm in placed)]
    apart = _apart(placed) if len(xs) > 1 else ""
    sheet, fronts = Sheet(len(xs)), {x: pareto_front(placed, x) for x in xs if x == "wire_bytes" or not apart}
    for axes, x in zip(sheet.panels, xs, strict=True):
        costs = [arm.values(x) for arm in placed]
        AXES[x](axes, costs)
        points(axes, shown, costs, pale=beaten(placed, x) if x in fronts else ())
        corners = [(arm.mean(x), end(arm)[0]) for arm in fronts.get(x, ())]
        if len(corners) > 1:
            axes.step(*zip(*corners, strict=True), where="post", color="#777777", linewidth=1, zorder=1, gid="front")
    model = f" Modelled, not measured: {_links(placed)}." if len(xs) > 1 else ""
    model += f" Modelled times do not compare, because {apart}." if apart else ""
    note = f"{heading(arms[0])}; {points_note(arms)}{_ranked(placed, fronts)}.{model}{without_bytes(arms)}"
    return sheet.finish(note, [entry(look, arm.label, line=False) for arm, look in shown])


def _ranked(arms: Sequence[Arm], fronts: dict[str, list[Arm]]) -> str:
    """Explain pale markers and the line, or their absence."""
    if not several(arms):
        return ""  # stated with the seeds
    pale = "; pale: another arm is shown better, and costs no more" if any(beaten(arms, x) for x in fronts) else ""
    if any(len(corners) > 1 for corners in fronts.values()):
        return f"{pale}; line: arms that are shown better than all that cost less"
    return f"{pale}; no front: no arm is shown better than all that cost less"


def _apart(arms: Sequence[Arm]) -> str:
    """Return why modelled times of these arms are not comparable; "" if they are."""
    if any(arm.config["network"] != arms[0].config["network"] for arm in arms):
        return "the arms differ in their network"
    return unlike(arms)


def _links(arms: Sequence[Arm]) -> str:
    return "; ".join(sorted({show_link(arm.config["network"]) for arm in arms}))
