"""Fit the rows of a probe: seconds, interface bytes and processor time as linear functions of wire bytes and rounds.

    seconds of a collective  =  alpha rounds + beta max(0, wire - burst)
    bytes over the interface =  (1 + h) wire + c rounds
    processor time           =  a rounds + b wire

Coefficients are non-negative and minimise the squares of relative errors. `burst` is the number of bytes that take no
time after a pause. The line of one kind of collective is then refined to minimise the mean |log(fitted / measured)|,
with less weight for sizes whose repetitions vary. Disturbed sizes then have little influence, and the penalty for
underestimating a long message is unbounded, whereas its relative error is at most 100 %.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize, nnls

from accordion_bench.network.links import LinkCost, Row
from accordion_bench.options.checks import ConfigError

RING = ("all_reduce", "all_gather")  # one flow on each link at a time
CANDIDATES = 400  # number of tried bursts
NOTHING = 1e-9  # seconds, in place of 0
STEADY = 0.03  # added to the relative spread of repetitions, to bound their weight
SMALLEST = 1e3  # smallest burst, bytes
WORTH = 1.25  # a burst is used only if the distance without it is more than this many times as large
GROWS = 1e-6  # least increase of time by the longest message, relative to the first one; below it is rounding
GOOD = 0.01  # a line with a smaller distance needs no burst


@dataclass(frozen=True)
class Link:
    """seconds = alpha rounds + beta max(0, wire - burst), with wire and burst in bytes."""

    alpha: float
    beta: float
    burst: float = 0.0

    def seconds(self, row: Row) -> float:
        """Return the fitted seconds of a collective that starts after a pause."""
        return self.alpha * row["rounds"] + self.beta * max(0.0, row["wire_bytes"] - self.burst)

    def error(self, rows: Sequence[Row]) -> float:
        """Return the root mean square of the relative errors."""
        return float(np.sqrt(np.mean([(self.seconds(row) / row["seconds"] - 1) ** 2 for row in rows])))

    def distance(self, rows: Sequence[Row]) -> float:
        """Return the mean of |log(fitted / measured)|, where rows with unsteady repetitions have less weight."""
        ratios = [max(self.seconds(row), NOTHING) / row["seconds"] for row in rows]
        weights = [1 / (STEADY + _spread(row)) for row in rows]
        return float(np.average(np.abs(np.log(ratios)), weights=weights))

    @property
    def bandwidth(self) -> float:
        """Bandwidth in bit/s."""
        return 8 / self.beta if self.beta else float("inf")


@dataclass(frozen=True)
class Overhead:
    """Counted bytes = (1 + share) wire + message rounds."""

    share: float  # h, bytes of headers per byte of long messages
    message: float  # c, bytes per round: headers, acknowledgements, control messages of the library

    def counted(self, row: Row) -> float:
        """Return the expected bytes of the interface counter."""
        return (1 + self.share) * row["wire_bytes"] + self.message * row["rounds"]


def link(rows: Sequence[Row], with_burst: bool = True) -> Link:
    """Fit one line to kinds of collective with similar behaviour on the link, by least squares of relative errors."""
    lines = [_line(rows, burst) for burst in (_bursts(rows) if with_burst else (0.0,))]
    return min(lines, key=lambda one: one.error(rows))


def link_of_kind(rows: Sequence[Row], with_burst: bool = True) -> Link:
    """Fit the line of smallest distance to one kind, with a burst only if this is much closer than any line without."""
    plain = _moved(_line(rows, 0.0), rows)
    if not with_burst:
        return plain
    bursting = (_line(rows, burst) for burst in _bursts(rows))
    best = _moved(min(bursting, key=lambda one: one.distance(rows)), rows)
    return best if plain.distance(rows) > max(GOOD, WORTH * best.distance(rows)) else plain


def _bursts(rows: Sequence[Row]) -> list[float]:
    most = max(row["wire_bytes"] for row in rows) / 2
    return [0.0, *np.geomspace(min(SMALLEST, most), most, CANDIDATES).tolist()]


def _spread(row: Row) -> float:
    """Return the median absolute deviation of the repetitions, relative to their median."""
    seconds = np.asarray(row.get("repetitions", [1.0]))
    middle = np.median(seconds)
    return float(np.median(np.abs(seconds - middle)) / middle)


def _moved(line: Link, rows: Sequence[Row]) -> Link:
    """Minimise the distance, starting from the least-squares line, by the simplex method on logarithms."""
    if not line.alpha or not line.beta:
        return line
    start = np.log([line.alpha, line.beta, *([line.burst] if line.burst else [])])
    found = minimize(lambda logs: Link(*np.exp(logs)).distance(rows), start, method="Nelder-Mead")
    return Link(*map(float, np.exp(found.x)))


def _line(rows: Sequence[Row], burst: float) -> Link:
    sent = [max(0.0, row["wire_bytes"] - burst) for row in rows]
    alpha, beta = _relative([row["rounds"] for row in rows], sent, [row["seconds"] for row in rows])
    return Link(alpha, beta, float(burst))


def costs(rows: Sequence[Row], with_burst: bool = True, shared_by: int = 1) -> dict[str, LinkCost]:
    """Fit the line of each kind of collective, with a burst if allowed.

    `shared_by` workers sent over one link at the same time; bandwidth and burst are those of the link.

    Raises:
        ConfigError: times do not grow with message size, so that the bandwidth cannot be determined.
    """
    found = {}
    for kind, some in by_kind(rows).items():
        line = link_of_kind(some, with_burst)
        first, last = some[0], some[-1]
        if line.beta * max(row["wire_bytes"] for row in some) <= GROWS * first["seconds"]:
            raise ConfigError(
                f"probe must see times that grow with messages, got {1e3 * first['seconds']:.2f} ms of {kind} for "
                f"{first['wire_bytes']:,} bytes and {1e3 * last['seconds']:.2f} ms for {last['wire_bytes']:,}; "
                "type the same command again when the machines are quieter"
            )
        found[kind] = LinkCost(
            latency=line.alpha,
            bandwidth=shared_by * line.bandwidth,
            burst=shared_by * line.burst,
            cpu=cpu_per_byte(some),
            error=line.error(some),
        )
    return found


def by_kind(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Group rows by kind of collective."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["collective"], []).append(row)
    return found


def cpu_per_byte(rows: Sequence[Row]) -> float:
    """Return the seconds of processor time per byte that a worker sends, without those per round; 0 = unknown."""
    if not all(row.get("cpu_seconds") for row in rows):
        return 0.0
    rounds, wire, burned = ([row[name] for row in rows] for name in ("rounds", "wire_bytes", "cpu_seconds"))
    return _relative(rounds, wire, burned)[1]


def overhead(rows: Sequence[Row]) -> Overhead:
    """Fit the bytes of the interface counter by least squares of relative errors."""
    message, slope = _relative(
        [row["rounds"] for row in rows],
        [row["wire_bytes"] for row in rows],
        [row["link_sent_bytes"] - row["wire_bytes"] for row in rows],
        [row["link_sent_bytes"] for row in rows],
    )
    return Overhead(slope, message)


def _relative(
    first: Sequence[float], second: Sequence[float], target: Sequence[float], scale: Sequence[float] | None = None
) -> tuple[float, float]:
    """Return (a, b) >= 0 that minimise the sum of ((a first + b second - target) / scale)^2; scale = target if None."""
    weight = 1 / np.asarray(target if scale is None else scale, dtype=float)
    columns = np.stack([np.asarray(first, dtype=float), np.asarray(second, dtype=float)], axis=1) * weight[:, None]
    norms = np.linalg.norm(columns, axis=0) + 1e-300  # seconds per byte are far smaller than seconds per round
    found, _ = nnls(columns / norms, np.asarray(target, dtype=float) * weight)
    return float(found[0] / norms[0]), float(found[1] / norms[1])


def summary(rows: Sequence[Row], with_burst: bool = True) -> dict[str, Any]:
    """Return the contents of probe.json except the rows."""
    by_name = by_kind(rows)
    ring = [row for row in rows if row["collective"] in RING]
    best = link(ring, with_burst)
    return {
        "link": asdict(best) | {"bandwidth": best.bandwidth},
        "link_without_burst": asdict(link(ring, with_burst=False)),
        "error": {name: best.error(some) for name, some in by_name.items()},
        "longest": {name: longest(some, best) for name, some in by_name.items()},
        "of_itself": {
            name: asdict(own := link_of_kind(some, with_burst)) | {"bandwidth": own.bandwidth}
            for name, some in by_name.items()
        },
        "overhead": {name: asdict(overhead(some)) for name, some in by_name.items()},
    }


def longest(rows: Sequence[Row], best: Link) -> float:
    """Return the measured time of the largest message relative to the fitted time."""
    row = max(rows, key=lambda row: row["wire_bytes"])
    return float(row["seconds"] / best.seconds(row))
