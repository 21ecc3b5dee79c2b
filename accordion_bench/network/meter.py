"""Byte counters of network interfaces: bytes sent and received during the training steps of a run."""

from pathlib import Path

import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.options import checks

SYSTEM = Path("/sys/class/net")


class Interface:
    """Byte counters of one network interface of this machine, or of this network namespace, named as by `ip link`.

    They count whole frames: messages of the run with their headers, acknowledgements, and any other traffic of the
    interface. Traffic of NCCL over NVLink, PCIe, shared memory, InfiniBand or RoCE bypasses the operating system and is
    not counted. The counters are available on Linux only. ValueRefused is raised if the interface does not exist.
    """

    def __init__(self, name: str, system: Path = SYSTEM) -> None:
        there = sorted(folder.parent.name for folder in system.glob("*/statistics"))
        if not there:
            raise checks.ValueRefused("comm.interface", "{null} where no interface counts its bytes", name, None)
        if name not in there:
            rule = f"{{null}} or an interface of this machine ({', '.join(there)})"
            raise checks.ValueRefused("comm.interface", rule, name, checks.closest(str(name), there))
        self.name = name
        self._counters = system / name / "statistics"

    def sent(self) -> int:
        """Return the bytes sent since the interface was created."""
        return int((self._counters / "tx_bytes").read_text(encoding="utf-8"))

    def received(self) -> int:
        """Return the bytes received since the interface was created."""
        return int((self._counters / "rx_bytes").read_text(encoding="utf-8"))


class Meter:
    """Counter of interface bytes between `start` and `stop`: training steps without evaluation and decisions of epochs.

    Attributes:
        totals: bytes [sent, received] by this process's interface so far; without a name none are counted.
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
        """Start counting, before training steps."""
        if self.interface is not None:
            self.stop()
            self._began = self._read()

    def stop(self) -> None:
        """Stop counting, before evaluation or writing."""
        if self._began is not None:
            self.totals = [t + now - then for t, now, then in zip(self.totals, self._read(), self._began, strict=True)]
            self._began = None

    def worker_state(self, row: int) -> dict[str, list[int]]:
        """Return the counts as state of the first local worker; zeros for others."""
        return {"link": self.totals if row == 0 else [0, 0]}

    def load_worker_state(self, row: int, state: dict[str, list[int]]) -> None:
        """Add the counts of a `worker_state()`."""
        self.totals = [a + b for a, b in zip(self.totals, state["link"], strict=True)]

    def columns(self) -> dict[str, int | None]:
        """Return `link_sent_bytes` and `link_received_bytes`, means over the processes. Every process must call it.

        The counts include all traffic of the interface: each of several processes on a host counts the bytes of all.
        See `Interface` for what is excluded. Without an interface both are None; also once the processes have changed,
        because those that entered later have counted less, and the counts of lost ones are missing.
        """
        sent = received = None
        if self.interface is not None and not self.comm.membership.changed:
            counted = torch.tensor(self.totals, dtype=torch.int64, device=self.comm.device)
            sent, received = (self.comm.sum_(counted, "eval") // self.comm.processes).tolist()
        return {"link_sent_bytes": sent, "link_received_bytes": received}
