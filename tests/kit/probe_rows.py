"""Synthetic measurements of a link probe, for a link with known parameters."""

from typing import Any

from accordion_bench.network.collective_costs import KINDS, wire_and_rounds

SIZES = [1 << n for n in range(10, 26, 2)]  # bytes on the wire


def made(
    alpha: float, beta: float, burst: float = 0.0, share: float = 0.002, message: float = 800.0, cpu: float = 1e-9
) -> list[dict[str, Any]]:
    """Return rows of four workers, with equal parameters for all kinds of collectives.

    Args:
        alpha: seconds per round.
        beta: seconds per byte.
        burst: bytes.
        share: counted header bytes per byte.
        message: counted bytes per round.
        cpu: seconds of processor time per byte, in addition to 50 us per round.
    """
    rows = []
    for kind in KINDS:
        _, rounds = wire_and_rounds(kind, 1.0, 1.0, 4)
        for wire in SIZES:
            rows.append(
                {
                    "collective": kind,
                    "wire_bytes": wire,
                    "rounds": rounds,
                    "seconds": alpha * rounds + beta * max(0.0, wire - burst),
                    "cpu_seconds": 5e-5 * rounds + cpu * wire,
                    "link_sent_bytes": (1 + share) * wire + message * rounds,
                }
            )
    return rows
