"""What this process's network interfaces carry: their counters, and bytes per second of a run."""

from pathlib import Path

import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.options import checks

SYSTEM = Path("/sys/class/net")


class Interface:
    """Byte counters of one network interface of this machine, or of this network namespace.

    They count frames as the interface sees them: messages of the run with their headers, acknowledgements, and whatever
    else uses the interface. What NCCL sends over NVLink, PCIe, shared memory, InfiniBand or RoCE passes the operating
    system by, and is not in them. Linux; elsewhere there are no such files.

    Args:
        name: of the interface, as `ip link` shows it.

    Raises:
        ValueRefused: there is none of this name.
    """

    def __init__(self, name: str, system: Path = SYSTEM) -> None:
        there = (
            sorted(entry.name for entry in system.iterdir() if (entry / "statistics").is_dir())
            if system.is_dir()
            else []
        )
        if not there:
            raise checks.ValueRefused("comm.interface", "{null} where no interface counts its bytes", name, None)
        if name not in there:
            rule = f"{{null}} or an interface of this machine ({', '.join(there)})"
            raise checks.ValueRefused("comm.interface", rule, name, checks.closest(str(name), there))
        self.name = name
        self._counters = system / name / "statistics"

    def sent(self) -> int:
        """Bytes sent since the interface exists."""
        return int((self._counters / "tx_bytes").read_text(encoding="utf-8"))

    def received(self) -> int:
        """Bytes received since the interface exists."""
        return int((self._counters / "rx_bytes").read_text(encoding="utf-8"))


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
