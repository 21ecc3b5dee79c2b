"""What the measured times of arms hold, and whether they compare."""

from collections.abc import Iterable
from typing import Any

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.provenance import machines


def is_ddp(config: dict[str, Any]) -> bool:
    """Whether a run was DistributedDataParallel's, which cannot tell communication from computation."""
    return (config.get("comm") or {}).get("engine") == "ddp"


def communicates(arm: Arm) -> bool:
    """Whether measured times hold communication: one worker in each process."""
    return bool(arm.values("comm_seconds")) or is_ddp(arm.config)


def shares_process(arm: Arm) -> bool:
    """Whether its workers share a process, so that nothing went over a link; of somebody's own loop nobody knows."""
    return not arm.attached and not communicates(arm)


def comparable(arm: Arm, dense: Arm, column: str) -> bool:
    """Whether times compare: of one machine; `seconds` with communication in both or neither, else on one network."""
    if unlike([arm, dense]):
        return False
    if column == "seconds":
        return communicates(arm) == communicates(dense)
    return bool(arm.config.get("network") == dense.config.get("network"))


def unlike(arms: Iterable[Arm]) -> str:
    """Why no times of these arms compare, to stand behind `because`; "" where nothing is known against it."""
    runs = [run for arm in arms for run in arm.runs]
    if len({machine for run in runs for machine in machines(run)}) > 1:
        return "the runs come from different machines"
    if len({environment.get("threads") for run in runs for environment in run.environments} - {None}) > 1:
        return "the runs differ in threads per process"
    return ""
