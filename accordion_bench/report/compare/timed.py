"""What the measured times of an arm hold."""

from typing import Any

from accordion_bench.report.compare.arms import Arm


def is_ddp(config: dict[str, Any]) -> bool:
    """Whether a run was DistributedDataParallel's, which cannot tell communication from computation."""
    return (config.get("comm") or {}).get("engine") == "ddp"


def communicates(arm: Arm) -> bool:
    """Whether measured times hold communication: one worker in each process."""
    return bool(arm.values("comm_seconds")) or is_ddp(arm.config)
