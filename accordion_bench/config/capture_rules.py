"""Decide which work of a run is captured as CUDA graphs, and why other work stays eager, before anything is loaded."""

import inspect
from collections.abc import Mapping

from accordion_bench.comm.graphs import EVALUATION, EXCHANGE, UPDATE, WORKERS
from accordion_bench.compressors.assemble import optimizer_node
from accordion_bench.config.components import Components
from accordion_bench.forward.task import task_of
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.instantiate import target
from accordion_bench.processes.placement import Placement
from accordion_bench.run_config import RunConfig

ALL = {WORKERS, EXCHANGE, UPDATE, EVALUATION}


def stays_eager(config: RunConfig, parts: Components, processes: int) -> dict[str, str]:
    """Return the reasons why work of a step is not captured on a GPU, by kind of work; other kinds may be captured."""
    if whole := _nothing(config, processes):
        return dict.fromkeys(sorted(ALL), whole)
    reasons: dict[str, str] = dict(task_of(parts.dataset).not_captured)
    compressors = [parts.wrapped.compressor, *([parts.differences().compressor] if parts.sync.local else [])]
    if not all(compressor.traits.replays for compressor in compressors):
        reasons[EXCHANGE] = "what the compressor sends depends on the data"
    left = optimizer_node(config.optimizer, parts.wrapped.compressor)
    if "fused" not in inspect.signature(target(left, "optimizer")).parameters:
        reasons[UPDATE] = "torch has no fused kernel for this optimizer"
    return reasons


def _nothing(config: RunConfig, processes: int) -> str:
    if config.graphs is False:
        return "graphs is false"
    if processes > 1:
        return "several processes exchange buckets during the backward pass"
    return "profile records operations one by one" if config.profile else ""


def refuse(config: RunConfig, parts: Components, where: Placement) -> None:
    """Refuse `graphs=true` if part of a step stays eager, and `workers_at_once` if the workers' passes stay eager.

    Raises:
        ConfigError: gives the reason.
    """
    _refuse_at_once(config, parts, where)
    if config.graphs is not True:
        return
    if where.device != "cuda":
        raise ValueRefused("graphs", "null or false on a CPU, where nothing is captured", True, None)
    for name, why in stays_eager(config, parts, where.processes).items():
        raise ValueRefused("graphs", f"null, because the {name} would stay eager: {why}", True, None)


def _refuse_at_once(config: RunConfig, parts: Components, where: Placement) -> None:
    asked = config.workers_at_once
    if asked == 1:
        return
    if where.device != "cuda":
        raise ValueRefused("workers_at_once", "1 on a CPU, where nothing is replayed", asked, 1)
    if why := stays_eager(config, parts, where.processes).get(WORKERS, ""):
        raise ValueRefused("workers_at_once", f"1, because the workers' passes are not replayed: {why}", asked, 1)
    if asked > where.workers_per_process:
        limit = f"at most {where.workers_per_process}, the workers of the process"
        raise ValueRefused("workers_at_once", limit, asked, where.workers_per_process)


def told(eager: Mapping[str, str], at_once: int = 1) -> str:
    """Return the header's sentence about capture: what is replayed, workers at once, why the rest is eager."""
    if set(eager) == ALL and len(set(eager.values())) == 1:
        return f"steps are eager: {next(iter(eager.values()))}"
    rest = "; ".join(f"{name} eager: {why}" for name, why in eager.items())
    several = f", {at_once} workers at once; times of a worker are sampled one by one" if at_once > 1 else ""
    return f"steps are captured and replayed{f' ({rest})' if rest else ''}{several}"
