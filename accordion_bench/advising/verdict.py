"""Verdict of advice in a few sentences: whether to compress, with which method, and at which bandwidth this changes.

Methods within measurement noise are not ranked, and a gain below 2 % is treated as none.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from accordion_bench.advising.advice import Advice, AdviceRow, Regions, by_step, limit_in_words
from accordion_bench.advising.predict import GAIN
from accordion_bench.options.units import counted, duration, human_rate

DENSE, HALF = "dense", "bf16"  # labels of the baselines
BASELINES = (DENSE, HALF)
SPOKEN = {DENSE: "dense fp32", HALF: "dense bf16"}
NAMED = 3  # equivalent methods listed by name; the others are counted


class Stretch(NamedTuple):
    """Part of an axis in which one method is as good as the fastest."""

    method: str  # the winner; dense if dense is as good as the fastest
    alike: tuple[str, ...]  # all methods that are as good as the fastest in the whole part, the winner first
    # low, high: limits on the axis
    low: float
    high: float


def as_good(rows: Sequence[AdviceRow]) -> list[AdviceRow]:
    """Return the fastest method and those within noise of it or at most 2 % slower, sorted by step time."""
    ordered = by_step(rows)
    good = _good({row.method: row.step.value for row in ordered}, ordered)
    return [row for row in ordered if row.method in good]


def noise(row: AdviceRow) -> tuple[float, float]:
    """Return the (lower, upper) bound of a method's step time relative to its estimate.

    The bounds follow from its speed-up over dense bf16. Their interval excludes the noise of computation, which is the
    same for all methods.
    """
    return row.over_bf16.value / row.over_bf16.high, row.over_bf16.value / row.over_bf16.low


def stretches(regions: Regions, rows: Sequence[AdviceRow], from_above: bool) -> list[Stretch]:
    """Cover an axis with the fewest stretches, in the order of traversal, from its largest value down if `from_above`.

    A method is the winner until it is no longer as good as the fastest. The next winner is dense if it is as good,
    otherwise the method that remains so for longest. Intervals have the same relative width as those of `rows`.
    """
    places = sorted(range(len(regions.at)), key=lambda i: regions.at[i], reverse=from_above)
    good = [_good({row.method: regions.steps[row.method][i] for row in rows}, rows) for i in places]
    found: list[Stretch] = []
    first = 0
    while first < len(places):
        reach = {name: _reach(good, first, name) for name in good[first]}
        winner = max(reach, key=lambda name: (name in BASELINES, reach[name]))
        end = reach[winner]
        others = [name for name in good[first] if name != winner and reach[name] >= end]
        ends = _edge(regions, places, first), _edge(regions, places, end)
        found.append(Stretch(winner, (winner, *others), min(ends), max(ends)))
        first = end
    return found


def _good(steps: Mapping[str, float], rows: Sequence[AdviceRow]) -> list[str]:
    best = min(rows, key=lambda row: steps[row.method])
    fastest = steps[best.method]
    upper = fastest * noise(best)[1]
    good = [
        row.method
        for row in rows
        if steps[row.method] * noise(row)[0] <= upper or steps[row.method] <= (1 + GAIN) * fastest
    ]
    return sorted(good, key=lambda name: steps[name])


def _reach(good: Sequence[Sequence[str]], first: int, name: str) -> int:
    return next((i for i in range(first, len(good)) if name not in good[i]), len(good))


def _edge(regions: Regions, places: Sequence[int], i: int) -> float:
    """Return the start of a stretch at index i; between two bandwidths, their geometric mean."""
    if i == len(places):
        return regions.at[places[-1]]
    if i == 0 or regions.axis == "workers":
        return regions.at[places[i]]
    return float((regions.at[places[i - 1]] * regions.at[places[i]]) ** 0.5)


def verdict(advice: Advice) -> tuple[str, ...]:
    """Return the verdict as sentences, the answer first. No method is called faster than another within noise."""
    every_step = [row for row in advice.rows if not row.local]
    best = as_good(every_step)
    over_bandwidth = stretches(advice.by_bandwidth, every_step, from_above=True)
    said = [_headline(advice, best, over_bandwidth), *_pays(advice), *_elsewhere(advice, best, over_bandwidth)]
    return (*said, *_by_workers(advice, every_step), *_local(advice, best))


def spoken(method: str) -> str:
    """Return a method's name for a sentence: `dense fp32`, `PowerSGD rank 4`, `DiLoCo H 30`."""
    return SPOKEN.get(method, method.replace(",", ""))


def together(methods: Sequence[str]) -> str:
    """Join the names of methods: `PowerSGD rank 1, PowerSGD rank 2, TopK 1 % and 4 others`."""
    words = [spoken(method) for method in methods[:NAMED]]
    if len(methods) > NAMED:
        words.append(counted(len(methods) - NAMED, "other"))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _headline(advice: Advice, best: Sequence[AdviceRow], found: Sequence[Stretch]) -> str:
    here, compute = advice.by_bandwidth.here, advice.compute.value
    dense = [row for row in best if row.method in BASELINES]
    others = [row for row in best if row.method not in BASELINES]
    told = dense or others
    names = together([row.method for row in told])
    alike = "" if len(told) == 1 else f", {_alike(told)},"
    verb = "takes" if len(told) == 1 else "take"
    takes = f"{names}{alike} {verb} {told[0].step.value / compute:.2f} of computing alone"
    if dense:
        lower = next((s for s in found if s.method not in BASELINES and s.low < here), None)
        if lower is None:
            lowest = human_rate(min(advice.by_bandwidth.at))
            rest = f", and no method gains {100 * GAIN:g} % or more down to {lowest}"
        else:
            rest = f"; from {_rate(min(lower.high, here))} down {_wins(lower)}"
        return f"{_where(advice)} do not compress: {takes}{rest}."
    fastest = told[0]
    ratio, against = fastest.over_bf16, spoken(HALF)
    if any(row.method == DENSE and row.step.value < advice.row(HALF).step.value for row in advice.rows):
        ratio, against = fastest.over_fp32, spoken(DENSE)
    between = "" if ratio.low == ratio.high else f" ({ratio.low:.3g} to {ratio.high:.3g})"
    gain = f"{ratio.value:.3g} times as fast as {against}{between}"
    upper = [s for s in found if s.method in BASELINES and s.high > here]
    rest = f"; from {_rate(max(upper[-1].low, here))} up do not compress" if upper else ""
    return f"{_where(advice)} compress: {takes}, {gain}{rest}."


def _where(advice: Advice) -> str:
    return f"On {advice.on}, {duration(advice.compute.value)} a step, at {human_rate(advice.by_bandwidth.here)}"


def _pays(advice: Advice) -> list[str]:
    if advice.pays is None or all(row.local or row.method in BASELINES for row in advice.rows):
        return []
    below, on = advice.pays
    at = human_rate(advice.by_bandwidth.here)
    limit = {"never": "at no step time", "always": "at every step time"}.get(limit_in_words(below))
    pays = "pays" if limit else "starts to pay"
    limit = limit or f"where forward and backward pass take less than {duration(below)}"
    if not on:
        return [f"At {at} compressing {pays} {limit}."]
    return [f"On {on}, compressing {pays} at {at} {limit}: gpu=h100, say, or compute_ms=12 answers for them."]


def _elsewhere(advice: Advice, best: Sequence[AdviceRow], found: Sequence[Stretch]) -> list[str]:
    here = advice.by_bandwidth.here
    if any(row.method in BASELINES for row in best):
        compressed = [s for s in found if s.method not in BASELINES]
        told = [s for s in compressed if s.low < here][1:]
        above = [s for s in compressed if s.low >= here]
    else:
        told = [s for s in found if s.high < here]
        above = [s for s in found if s.low > here and s.method not in BASELINES]
    said = []
    if above:
        said.append("; ".join(f"from {_rate(s.low)} to {_rate(s.high)} {_wins(s)}" for s in above))
    if told:
        said.append("; ".join(f"from {_rate(s.high)} down {_wins(s)}" for s in told))
    return [f"{text[0].upper()}{text[1:]}." for text in said]


def _wins(stretch: Stretch) -> str:
    if stretch.method in BASELINES:
        return "do not compress"
    if len(stretch.alike) == 1:
        return f"{spoken(stretch.method)} is fastest"
    return f"{together(stretch.alike)}, alike, are fastest"


def _by_workers(advice: Advice, rows: Sequence[AdviceRow]) -> list[str]:
    found = stretches(advice.by_workers, rows, from_above=False)
    said = "; ".join(f"from {s.low:g} workers up {_wins(s)}" for s in found[1:])
    first = f"from {found[0].low:g} to {found[0].high:g} workers" if not said else f"with {found[0].low:g} workers"
    return [f"On this link, {first}: {_wins(found[0])}{f'; {said}' if said else ''}."]


def _local(advice: Advice, best: Sequence[AdviceRow]) -> list[str]:
    """Return the sentence on local methods, which are listed separately because they change the algorithm most."""
    local = [row for row in advice.rows if row.local]
    if not local:
        return []
    good = as_good(local)
    if best[0] in as_good([good[0], best[0]]):
        return ["Local steps would gain nothing here that can be told from noise."]
    share = good[0].step.value / advice.compute.value
    names = together([row.method for row in good])
    if len(good) == 1:
        what = f"{names}, one exchange in {counted(good[0].period, 'step')}, takes"
    else:
        periods = sorted({row.period for row in good})
        span = f"{periods[0]} to {periods[-1]} steps" if len(periods) > 1 else counted(periods[0], "step")
        what = f"{names}, {_alike(good)}, with one exchange in {span}, take"
    return [f"If accuracy allows local steps: {what} {share:.2f} of computing alone."]


def _alike(rows: Sequence[AdviceRow]) -> str:
    """Return the reason why these methods, the fastest first, are listed together."""
    near = all(row.step.value <= (1 + GAIN) * rows[0].step.value for row in rows)
    return f"alike within {100 * GAIN:g} %" if near else "alike within noise"


def _rate(bits: float) -> str:
    return human_rate(float(f"{bits:.2g}"))
