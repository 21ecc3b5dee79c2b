"""Meter: what the network interface has carried while the run was training."""

import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.network.interface import Interface


class Meter:
    """Counts between `start` and `stop`: training steps, not evaluation, nor what is decided between epochs.

    Args:
        interface: its name; null = nothing is counted.
        comm: whose hosts share the counts.

    Attributes:
        totals: [sent, received] by this process's interface so far.
    """

    def __init__(self, interface: str | None, comm: Comm) -> None:
        self.interface = None if interface is None else Interface(interface)
        self.comm = comm
        self.totals = [0, 0]
        self._began: list[int] | None = None

    def _read(self) -> list[int]:
        assert self.interface is not None
        return [self.interface.sent(), self.interface.received()]

    def start(self) -> None:
        """Training goes on."""
        if self.interface is not None:
            self.stop()
            self._began = self._read()

    def stop(self) -> None:
        """Something else begins: evaluation, writing."""
        if self._began is not None:
            self.totals = [t + now - then for t, now, then in zip(self.totals, self._read(), self._began, strict=True)]
            self._began = None

    def worker_state(self, row: int) -> dict[str, list[int]]:
        """The counts, kept by the first local worker."""
        return {"link": self.totals if row == 0 else [0, 0]}

    def load_worker_state(self, row: int, state: dict[str, list[int]]) -> None:
        """Continue from `worker_state()`."""
        self.totals = [a + b for a, b in zip(self.totals, state["link"], strict=True)]

    def columns(self) -> dict[str, int | None]:
        """`link_sent_bytes` and `link_received_bytes`, means over the processes; every process calls it.

        Headers and acknowledgements are in them, and what else has used the interface: of several processes on one
        host, each counts what all have sent. Bytes over NVLink, shared memory, InfiniBand or RoCE are not in them.
        """
        sent = received = None
        if self.interface is not None:
            counted = torch.tensor(self.totals, dtype=torch.int64, device=self.comm.device)
            sent, received = (self.comm.sum_(counted, "eval") // self.comm.processes).tolist()
        return {"link_sent_bytes": sent, "link_received_bytes": received}
