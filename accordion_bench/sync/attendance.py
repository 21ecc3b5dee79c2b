"""Attendance: the kind of lateness that a run has."""

from accordion_bench.exchange.exchange import Exchange
from accordion_bench.options.checks import ConfigError
from accordion_bench.sync.base import SyncContext
from accordion_bench.sync.drawn_lateness import DrawnLateness
from accordion_bench.sync.late_processes import LateProcesses
from accordion_bench.sync.outer import Average
from accordion_bench.sync.quorum import Quorum


def attended(
    context: SyncContext,
    exchange: Exchange,
    outer: Average,
    buffers: str,
    quorum: int | None,
    grace: float,
    lateness: float | None,
) -> Quorum | None:
    """How workers are late; None where averagings are of all.

    Args:
        context, exchange, outer, buffers: see `Quorum`.
        quorum, grace, lateness: as `LocalSGD` has them.
    """
    if quorum is None or quorum >= context.axis.comm.workers:
        return None
    if lateness is not None:
        return DrawnLateness(context, exchange, outer, buffers, quorum, lateness, context.runner.seed)
    return LateProcesses(context, exchange, outer, buffers, quorum, grace)


def refuse_unheard(context: SyncContext, quorum: int | None, lateness: float | None) -> None:
    """Refuse a quorum of processes that cannot tell each other who has come.

    Args:
        context: of the run.
        quorum, lateness: as `LocalSGD` has them.

    Raises:
        ConfigError: with what to type instead.
    """
    comm = context.axis.comm
    if quorum is None or quorum >= comm.workers or lateness is not None:
        return
    if context.store is None or comm.device.type != "cpu":
        raise ConfigError(
            f"sync.quorum needs a run over comm=gloo on CPUs, where processes can be late, got {quorum} elsewhere; "
            "type sync.lateness=0.1 to draw who is late, or sync.quorum=null"
        )
