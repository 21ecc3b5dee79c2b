"""FSDP2: gradients of shards go to their replicas through a compressor, instead of a dense all-reduce."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accordion_bench.attaching.agreement import refuse_differences
from accordion_bench.attaching.fsdp_groups import FSDPGroup, groups_of
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.ledger import Ledger
from accordion_bench.comm.on_device import copy_on_cpu
from accordion_bench.compressors.assemble import Wrapped, wrapped_compressor
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.partition import levelled
from accordion_bench.methods.compatibility import ladder_of
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import Ladder, Plan
from accordion_bench.position import StepInfo
from accordion_bench.tensors import keyed_rng


class GroupExchange:
    """The all-reduce hook of one FSDP group: g <- C-mean over the replicas of g, the mean over the shard axis.

    Each parameter's shard is a tensor by itself, under the parameter's name: a matrix [n, m] is rows [n / shards, m] of
    it here, a vector a part of it. All shards of the group travel in one exchange.

    Args:
        group: what torch hands over.
        wrapped: the compressor.
        ladder: its one level.
        comm: of the replicas of this shard.
        seed: of the run; processes that hold different shards draw different numbers.

    Attributes:
        exchange: owns the compressor's state; `exchange.sent` are the tensors as they travel.
        step: exchanges so far.
    """

    def __init__(self, group: FSDPGroup, wrapped: Wrapped, ladder: Ladder, comm: Comm, seed: int) -> None:
        self.group, self.step = group, 0
        specs = [region.spec for region in group.regions]
        seed = keyed_rng.key(seed, "shard", group.mesh.get_local_rank())
        self.exchange = Exchange(
            wrapped.compressor, specs, ladder, comm, group.trained_shard, SendOptions(seed, **wrapped.for_exchange)
        )
        self.plan = Plan(dict.fromkeys(levelled(wrapped.compressor, self.exchange.sent), 0))

    @torch.no_grad()
    def __call__(self, reduced: Tensor) -> None:
        """Exchange what FSDP has reduced over the shard axis; in place.

        Args:
            reduced: [n], gradients of all shards of the group; in half precision they are exchanged in float32.

        Raises:
            NonFinite: a gradient is NaN or infinite; on a CPU this process has sent nothing, and others wait for it.
            RuntimeError: torch has handed over something else than the gradients of the group's parameters.
        """
        shards_W = self.group.split(reduced)
        updates = self.exchange(shards_W, StepInfo(self.plan, self.step))
        self.exchange.comm.ledger.dense_step(self.exchange.numel)
        for shard_W, update in zip(shards_W, updates, strict=True):
            shard_W[0].copy_(update)
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints, on the CPU: steps, and per parameter the compressor's tensors."""
        state = {
            name: {key: copy_on_cpu(value) for key, value in entries.items()}
            for name, entries in self.exchange.state.items()
        }
        return {"step": self.step, "state": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.step = state["step"]
        for name, entries in state["state"].items():
            kept = self.exchange.state.setdefault(name, {})
            for key, value in entries.items():
                if key in kept and isinstance(value, Tensor) and kept[key].shape == value.shape:
                    kept[key].copy_(value)  # residuals of one shape share one storage
                else:
                    kept[key] = value.to(self.exchange.comm.device, copy=True) if isinstance(value, Tensor) else value


class ReplicateAxis:
    """What was attached to an FSDP2 model: the exchanges of its groups, until `detach`.

    Every process holds the state of its own shards, and saves it.

    Args:
        exchanges: one for each FSDP group.
        comm: of the replicas of this process's shards.
    """

    def __init__(self, exchanges: Sequence[GroupExchange], comm: Comm) -> None:
        self.exchanges, self.comm = list(exchanges), comm
        for exchange in self.exchanges:
            exchange.group.module.set_all_reduce_hook(exchange)

    @property
    def ledger(self) -> Ledger:
        """What this process has sent to the replicas of its shards; the traffic of the shard axis is not in it."""
        return self.comm.ledger

    def state_dict(self) -> dict[str, Any]:
        """The compressors' state of this process, and its ledger."""
        groups = {exchange.group.name: exchange.state_dict() for exchange in self.exchanges}
        return {"groups": groups, **self.ledger.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the `state_dict()` that this process has saved.

        Raises:
            ConfigError: it was saved with other FSDP groups.
        """
        ours = [exchange.group.name for exchange in self.exchanges]
        if sorted(ours) != sorted(state["groups"]):
            raise ConfigError(
                f"the state must be of the FSDP groups {ours}, got {list(state['groups'])}; "
                "call fully_shard on the modules of the saved run"
            )
        for exchange in self.exchanges:
            exchange.load_state_dict(state["groups"][exchange.group.name])
        self.ledger.load_state_dict(state)

    def detach(self) -> None:
        """Take the hooks away; from here on nothing is exchanged between the replicas."""
        for exchange in self.exchanges:
            exchange.group.module.set_all_reduce_hook(None)  # type: ignore[arg-type]


def attach_to_shards(
    model: nn.Module, compressor: Config, process_group: dist.ProcessGroup, seed: int = 0
) -> ReplicateAxis:
    """Let a compressor exchange the gradients of an FSDP2 model along its replicate axis.

    `fully_shard` is called with the shard axis alone. It reduces each gradient to its mean over this axis; the mean
    over the replicas is what the compressor makes of it, during the backward pass, group by group. Parameters are
    first made those of the first replica. Every process calls this at the same point.

    Args:
        model: wrapped by `fully_shard(..., mesh=mesh["shard"])`; which parameters are trained is settled.
        compressor: all of its options, as a YAML file in conf/compressor has them.
        process_group: the processes that hold the same shards, `mesh["replicate"].get_group()`.
        seed: for keyed draws, the same on all processes.

    Returns:
        what was attached.

    Raises:
        ConfigError: the compressor, the model or the group do not fit, or the processes have passed different things.
    """
    wrapped = wrapped_compressor(compressor)
    ladder = ladder_of(wrapped.compressor, {})
    _refuse_compressor(wrapped)
    groups = groups_of(model)
    comm = _comm_of_replicas(groups, process_group)
    shapes = {group.name: {spec.name: list(spec.shape) for spec, _ in group.regions} for group in groups}
    shard = groups[0].mesh.get_local_rank()
    refuse_differences(comm, {"compressor": compressor, "seed": seed, "shard": shard, "shapes": shapes})
    for group in groups:
        comm.broadcast_(group.shards, "setup")
    trained = [group for group in groups if group.regions]
    return ReplicateAxis([GroupExchange(group, wrapped, ladder, comm, seed) for group in trained], comm)


def _refuse_compressor(wrapped: Wrapped) -> None:
    """Refuse what needs more than the gradient shards of one FSDP group."""
    traits = wrapped.compressor.traits
    if traits.optimizer.owns or traits.optimizer.units != "gradient":
        owned = ", ".join(sorted(traits.optimizer.owns)) or "the step"
        raise ConfigError(
            f"compressor must leave {owned} to the optimizer where an FSDP2 model is attached, got one that applies it "
            "itself, which the optimizer of the shards would do again",
            {"compressor": "topk"},
            {"compressor": "powersgd"},
        )
    if wrapped.scope == "model":
        rule = "tensor, because FSDP2 exchanges each of its groups by itself"
        raise ValueRefused("compressor.scope", rule, wrapped.scope, "tensor")


def _comm_of_replicas(groups: Sequence[FSDPGroup], process_group: dist.ProcessGroup) -> Comm:
    """Collectives over the processes that hold the same shards.

    Raises:
        ConfigError: this process is not in the group, or the group holds two shards of one parameter.
    """
    rank = dist.get_rank(process_group)
    instead = 'type process_group=mesh["replicate"].get_group()'
    if rank < 0:
        raise ConfigError(f"process_group must hold this process, got one without rank {dist.get_rank()}; {instead}")
    replicas = dist.get_process_group_ranks(process_group)
    for group in groups:
        both = {*replicas} & {*dist.get_process_group_ranks(group.mesh.get_group())}
        if both != {dist.get_rank()}:
            raise ConfigError(
                "process_group must hold one process of each shard group, got the ranks "
                f"{sorted(both)} of {group.title}; {instead}"
            )
    comm = Comm(1, len(replicas), rank, str(groups[0].shards[0].device))
    comm.group, comm.first_named = process_group, dist.get_rank()
    return comm
