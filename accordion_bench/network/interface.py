"""Interface: what a network card has carried, as the operating system counts it."""

from pathlib import Path

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
            raise checks.ValueRefused("comm.interface", "null where no interface counts its bytes", name, None)
        if name not in there:
            rule = f"null or an interface of this machine ({', '.join(there)})"
            raise checks.ValueRefused("comm.interface", rule, name, checks.closest(str(name), there))
        self.name = name
        self._counters = system / name / "statistics"

    def sent(self) -> int:
        """Bytes sent since the interface exists."""
        return int((self._counters / "tx_bytes").read_text(encoding="utf-8"))

    def received(self) -> int:
        """Bytes received since the interface exists."""
        return int((self._counters / "rx_bytes").read_text(encoding="utf-8"))
