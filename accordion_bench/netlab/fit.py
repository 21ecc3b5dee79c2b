"""What a probe says about a link: seconds and counted bytes as straight lines in wire bytes and rounds.

    seconds of a collective  =  alpha rounds + beta max(0, wire - burst)
    bytes over the interface =  (1 + h) wire + c rounds

Both by least squares of relative errors, with alpha, beta, h, c >= 0. `burst` is what passes at once after a pause.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

Row = dict[str, Any]
RING = ("all_reduce", "all_gather")  # one flow on each link at a time
CANDIDATES = 400  # bursts that are tried


@dataclass(frozen=True)
class Link:
    """seconds = alpha rounds + beta max(0, wire - burst).

    Args:
        alpha: seconds per round.
        beta: seconds per byte.
        burst: bytes.
    """

    alpha: float
    beta: float
    burst: float = 0.0

    def seconds(self, row: Row) -> float:
        """Of a collective that begins after a pause."""
        return self.alpha * row["rounds"] + self.beta * max(0.0, row["wire_bytes"] - self.burst)

    def error(self, rows: Sequence[Row]) -> float:
        """Root mean square of relative errors."""
        return float(np.sqrt(np.mean([(self.seconds(row) / row["seconds"] - 1) ** 2 for row in rows])))

    @property
    def bandwidth(self) -> float:
        """bit/s."""
        return 8 / self.beta if self.beta else float("inf")


@dataclass(frozen=True)
class Overhead:
    """Counted bytes = (1 + share) wire + message rounds.

    Args:
        share: h, of headers inside long messages.
        message: c, bytes of each round: headers, acknowledgements, the library's own words.
    """

    share: float
    message: float

    def counted(self, row: Row) -> float:
        """Bytes that the interface should show."""
        return (1 + self.share) * row["wire_bytes"] + self.message * row["rounds"]


def link(rows: Sequence[Row], with_burst: bool = True) -> Link:
    """The line that fits best."""
    limit = max(row["wire_bytes"] for row in rows) / 2 if with_burst else 0
    tried = [_line(rows, burst) for burst in np.linspace(0, limit, CANDIDATES if with_burst else 1)]
    return min(tried, key=lambda one: one.error(rows))


def _line(rows: Sequence[Row], burst: float) -> Link:
    sent = [max(0.0, row["wire_bytes"] - burst) for row in rows]
    alpha, beta = _relative([row["rounds"] for row in rows], sent, [row["seconds"] for row in rows])
    return Link(alpha, beta, float(burst))


def overhead(rows: Sequence[Row]) -> Overhead:
    """The line that fits best."""
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
    """(a, b) >= 0 that minimise the sum of ((a first + b second - target) / scale)^2."""
    weight = 1 / np.asarray(target if scale is None else scale, dtype=float)
    columns = np.stack([np.asarray(first, dtype=float), np.asarray(second, dtype=float)], axis=1) * weight[:, None]
    norms = np.linalg.norm(columns, axis=0) + 1e-300  # seconds per byte are tiny beside seconds per round
    found, _ = nnls(columns / norms, np.asarray(target, dtype=float) * weight)
    return float(found[0] / norms[0]), float(found[1] / norms[1])


def summary(rows: Sequence[Row], with_burst: bool = True) -> dict[str, Any]:
    """Everything that probe.json says beside the rows."""
    names = dict.fromkeys(row["collective"] for row in rows)
    by_name = {name: [row for row in rows if row["collective"] == name] for name in names}
    ring = [row for row in rows if row["collective"] in RING]
    best = link(ring, with_burst)
    return {
        "link": asdict(best) | {"bandwidth": best.bandwidth},
        "link_without_burst": asdict(link(ring, with_burst=False)),
        "error": {name: best.error(some) for name, some in by_name.items()},
        "longest": {name: longest(some, best) for name, some in by_name.items()},
        "of_itself": {
            name: asdict(own := link(some, with_burst)) | {"bandwidth": own.bandwidth} for name, some in by_name.items()
        },
        "overhead": {name: asdict(overhead(some)) for name, some in by_name.items()},
    }


def longest(rows: Sequence[Row], best: Link) -> float:
    """How much longer than fitted the largest message took, as a factor."""
    row = max(rows, key=lambda row: row["wire_bytes"])
    return float(row["seconds"] / best.seconds(row))
