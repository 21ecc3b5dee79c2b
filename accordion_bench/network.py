"""Network: what the counted bytes and rounds would take on a link that the machine need not have."""

import math

from accordion_bench import check
from accordion_bench.clock import EXCLUSIVE
from accordion_bench.comm import Comm


class Network:
    """A link per worker, with the cost of a collective as alpha rounds + beta bytes (Thakur et al. 2005).

    All wire bytes cross this one link, those inside groups and those of decisions, too, and nothing overlaps with
    computation. What is on no clock takes no modelled time: set-up, evaluation, checksums.

    Args:
        bandwidth: bit/s that a worker sends, full duplex.
        latency: seconds that each round of a collective adds.
        jitter: seconds, the mean of an exponentially distributed delay of each message; null = none. A round ends with
            the last of its A messages, so that it takes jitter (1 + 1/2 + ... + 1/A) longer (Rényi 1953: the expected
            largest of A independent exponential delays).
        slow_bandwidth: bit/s of the slowest worker's link; every collective waits for it. null = all links are alike.
    """

    def __init__(
        self, bandwidth: float, latency: float, jitter: float | None = None, slow_bandwidth: float | None = None
    ) -> None:
        self.bandwidth = check.number("bandwidth", bandwidth, above=0, instead=1e9)
        self.latency = check.number("latency", latency, at_least=0, instead=5e-5)
        self.jitter = 0.0 if jitter is None else check.number("jitter", jitter, at_least=0, instead=1e-4)
        if slow_bandwidth is not None:
            limits = {"above": 0, "at_most": self.bandwidth}
            self.bandwidth = check.number("slow_bandwidth", slow_bandwidth, **limits, instead=self.bandwidth / 5)

    def seconds(self, wire_bytes: float, rounds: float, workers: int) -> float:
        """Modelled seconds of communication: 8 wire_bytes / bandwidth + rounds (latency + jitter H_A).

        Args:
            wire_bytes: that one worker sends.
            rounds: one after another.
            workers: that take part, A; H_A = 1 + 1/2 + ... + 1/A.
        """
        slowest = self.jitter * math.fsum(1 / n for n in range(1, workers + 1))
        return 8 * wire_bytes / self.bandwidth + rounds * (self.latency + slowest)

    def columns(self, comm: Comm) -> dict[str, float]:
        """Modelled columns of a metrics row, apart from the measured ones.

        `modelled_seconds` is what one worker alone on its machine would need: what this process has measured without
        communication, shared by its local workers, which run one after another, plus `modelled_comm_seconds`. What the
        process does once for all of them (the step of a common optimizer) is shared, too, and so counts too little; the
        first step's computation is left out, as in `seconds`. `modelled_dense_comm_seconds` is an fp32 ring all-reduce
        in every step.
        """
        sent, spent = comm.ledger.columns(), comm.clock.read()
        own = sum(spent.get(part, 0.0) for part in EXCLUSIVE) - spent.get("comm", 0.0)
        wire_bytes, rounds = (sent[key] + sent[f"control_{key}"] for key in ("wire_bytes", "rounds"))
        communication = self.seconds(wire_bytes, rounds, comm.workers)
        return {
            "modelled_seconds": own / comm.local_workers + communication,
            "modelled_comm_seconds": communication,
            "modelled_dense_comm_seconds": self.seconds(sent["dense_wire_bytes"], sent["dense_rounds"], comm.workers),
        }
