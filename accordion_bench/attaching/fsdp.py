"""FSDP2's shard axis: gradients are reduced to their shards by codes of few bits, instead of a dense reduce-scatter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accordion_bench.attaching.agreement import refuse_differences
from accordion_bench.attaching.fsdp_groups import FSDPGroup, groups_of
from accordion_bench.attaching.own_parameters import Exempt, exempt_names
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.ledger import Ledger
from accordion_bench.comm.on_device import copy_on_cpu
from accordion_bench.compressors.assemble import CompressorSetup, wrapped_compressor
from accordion_bench.compressors.cast import Cast
from accordion_bench.compressors.compressor import Compressor
from accordion_bench.compressors.gathered import Gathered
from accordion_bench.compressors.none import Dense
from accordion_bench.compressors.scattered import Scattered
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.partition import levelled
from accordion_bench.methods.compatibility import ladder_of
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.tensors import keyed_rng


@dataclass(frozen=True)
class ShardOptions:
    """How gradients are reduced to their shards.

    Args:
        compressor: all options of the code, as a YAML file in conf/compressor has them.
        inside: those of the code between processes of one machine, where there are two levels.
        machine: processes of a machine, consecutive on the shard axis; None = one level.
        exempt: what travels as it is, see `exempt_names`.
        seed: for keyed draws, the same on all processes.
    """

    compressor: Config
    inside: Config
    machine: int | None = None
    exempt: Exempt = None
    seed: int = 0


class Level(NamedTuple):
    """Processes that hand each other codes at the same time.

    comm: collectives between them.
    config: options of their code.
    seed: of their draws; processes that exchange beside them, and other levels, draw differently.
    number_of: of these processes, which one gets what is on its way to the process with each rank on the shard axis.
    """

    comm: Comm
    config: Config
    seed: int
    number_of: Sequence[int]


class LevelExchange(NamedTuple):
    """The exchange of one level of a group.

    exchange: of all shards that are still on their way here; it owns the residuals.
    plan: its one level.
    kept: by index, those that come to this process.
    """

    exchange: Exchange
    plan: Plan
    kept: list[int]


class GroupReduction:
    """The reduce-scatter of one FSDP group: g <- mean of C(g) over the shard axis, each shard for its owner alone.

    Every process sends every other one a code of that one's shards; who gets the codes adds up in float32 what they
    stand for. With two levels, processes of one machine do so first, then those with the same number in each machine.
    Each parameter's shard is a tensor by itself: the shard of rank 1 of `layer.weight` is `layer.weight[1]`.

    Args:
        group: whose gradients.
        levels: in the order in which gradients pass them.
        exempt: names of parameters whose gradients travel as they are.

    Attributes:
        step: reductions so far.
    """

    def __init__(self, group: FSDPGroup, levels: Sequence[Level], exempt: frozenset[str]) -> None:
        self.group, self.step, self.before = group, 0, group.reduce_scatter
        self._shards = group.mesh.size()
        self.own = group.regions(group.mesh.get_local_rank())
        self._regions = [group.regions(rank) for rank in range(self._shards)]
        coming = [(rank, region.spec) for rank, regions in enumerate(self._regions) for region in regions]
        self.stages: list[LevelExchange] = []
        for level in levels:
            owners = {_name(rank, spec): level.number_of[rank] for rank, spec in coming}
            specs = [TensorSpec(_name(rank, spec), spec.shape) for rank, spec in coming]
            wrapped = scattered(level.config, owners)
            names = frozenset(_name(rank, spec) for rank, spec in coming if spec.name in exempt)
            send = SendOptions(level.seed, **{**wrapped.for_exchange, "exempt": names})
            ladder = ladder_of(wrapped.compressor, {})
            exchange = Exchange(wrapped.compressor, specs, ladder, level.comm, group.trained_shard, send)
            plan = Plan(dict.fromkeys(levelled(wrapped.compressor, exchange.sent, names), 0))
            kept = [i for i, (rank, _) in enumerate(coming) if level.number_of[rank] == level.comm.rank]
            self.stages.append(LevelExchange(exchange, plan, kept))
            coming = [coming[i] for i in kept]

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what FSDP2 hands over, and for what it gets."""
        memory: Tensor = self.before.allocate(size, dtype=dtype, device=device)
        return memory

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce the gradients of a group; called by FSDP2.

        Args:
            output_tensor: [n], gets this process's shards; in half precision they are added up in float32.
            input_tensor: [shards n], the gradients of this process.
            group: the shard axis.
            op: a sum or a mean.
            async_op: it never is.

        Raises:
            NonFinite: a gradient is NaN or infinite; on a CPU this process has sent nothing, and others wait for it.
            RuntimeError: torch has handed over something else than the gradients of the group's parameters.
        """
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ConfigError(
                f"{self.group.title} must be reduced to a sum or a mean, got {op}; leave out set_gradient_divide_factor"
            )
        rows = self.group.rows(input_tensor)
        xs_W = [region.view(row) for row, regions in zip(rows, self._regions, strict=True) for region in regions]
        for stage in self.stages:
            updates = stage.exchange(xs_W, StepInfo(stage.plan, self.step))
            stage.exchange.comm.ledger.dense_step(stage.exchange.numel, passes=1)
            xs_W = [updates[i][None] for i in stage.kept]
        for region, x_W in zip(self.own, xs_W, strict=True):
            region.view(output_tensor).copy_(x_W)
        if op == dist.ReduceOp.SUM:
            output_tensor.mul_(self._shards)
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints, on the CPU: steps, and per level and shard the compressor's tensors."""
        return {"step": self.step, "levels": [_copied(stage.exchange.state) for stage in self.stages]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.step = state["step"]
        for stage, saved in zip(self.stages, state["levels"], strict=True):
            _put(stage.exchange, saved)


class ShardAxis:
    """What was attached to the shard axis of an FSDP2 model, until `detach`.

    Every process holds the residuals of its own gradients, and saves them.

    Args:
        reductions: one for each FSDP group.
        levels: what they pass.

    Attributes:
        ledger: what this process has sent; with two levels, to other machines.
        inside_ledger: with two levels, what it has sent within its machine; else None.
    """

    def __init__(self, reductions: Sequence[GroupReduction], levels: Sequence[Level]) -> None:
        self.reductions, self._comms = list(reductions), [level.comm for level in levels]
        self.ledger: Ledger = self._comms[-1].ledger
        self.inside_ledger: Ledger | None = self._comms[0].ledger if len(levels) > 1 else None
        for reduction in self.reductions:
            reduction.group.module.set_custom_reduce_scatter(reduction)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """The compressors' state of this process, and its ledgers."""
        groups = {reduction.group.name: reduction.state_dict() for reduction in self.reductions}
        return {"groups": groups, "ledgers": [comm.ledger.state_dict() for comm in self._comms]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the `state_dict()` that this process has saved.

        Raises:
            ConfigError: it was saved with other FSDP groups, or with another number of levels.
        """
        ours = [reduction.group.name for reduction in self.reductions]
        if sorted(ours) != sorted(state["groups"]):
            raise ConfigError(
                f"the state must be of the FSDP groups {ours}, got {list(state['groups'])}; "
                "call fully_shard on the modules of the saved run"
            )
        if len(state["ledgers"]) != len(self._comms):
            raise ConfigError(
                f"the state must be of {len(self._comms)} levels, got one of {len(state['ledgers'])}; "
                "pass the machine= of the saved run"
            )
        for reduction in self.reductions:
            reduction.load_state_dict(state["groups"][reduction.group.name])
        for comm, saved in zip(self._comms, state["ledgers"], strict=True):
            comm.ledger.load_state_dict(saved)

    def detach(self) -> None:
        """Let FSDP2 reduce gradients as before."""
        for reduction in self.reductions:
            reduction.group.module.set_custom_reduce_scatter(reduction.before)
        for comm in self._comms:
            comm.leave()


def attach_to_shards(model: nn.Module, options: ShardOptions) -> ShardAxis:
    """Let codes reduce the gradients of an FSDP2 model along its shard axis. Every process calls this at one point.

    Args:
        model: wrapped by `fully_shard(..., mesh=mesh["shard"])`; which parameters are trained is settled.
        options: how.

    Returns:
        what was attached.

    Raises:
        ConfigError: the code or the model do not fit, or the processes have passed different things.
    """
    groups = groups_of(model)
    if any(isinstance(group.reduce_scatter, GroupReduction) for group in groups):
        raise ConfigError("model must be attached only once, got one that is attached; call axis.detach() first")
    for config in (options.compressor, options.inside):
        _refuse_compressor(scattered(config, {}))
    exempt = exempt_names(options.exempt, model)
    trained = [group for group in groups if group.padded_numel]
    levels = _levels(groups, options)
    shapes = {
        group.name: {region.spec.name: list(region.spec.shape) for region in group.regions(0)} for group in groups
    }
    passed: dict[str, Any] = {"compressor": options.compressor, "inside": options.inside, "machine": options.machine}
    passed |= {"seed": options.seed, "exempt": sorted(exempt), "shapes": shapes}
    for level in levels:
        refuse_differences(level.comm, passed)
    return ShardAxis([GroupReduction(group, levels, exempt) for group in trained], levels)


def scattered(config: Config, owners: Mapping[str, int]) -> CompressorSetup:
    """A code, whose messages go to the owners of tensors, within its error feedback.

    Raises:
        ConfigError: a value breaks its rule.
    """
    return wrapped_compressor(config, carried=lambda inner: Scattered(inner, owners))


def _refuse_compressor(wrapped: CompressorSetup) -> None:
    """Refuse what has no code of a tensor that stands for it alone, or needs more than its own gradients.

    Raises:
        ConfigError: with another one.
    """
    compressor = wrapped.compressor
    inner = _within(compressor).inner
    instead = {"compressor": "fp8"}, {"compressor": "int8"}
    if isinstance(inner, Cast):
        raise ConfigError(
            "compressor must be a code on the shard axis, got a cast, which torch makes itself with "
            "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)",
            *instead,
        )
    traits = compressor.traits
    coded = isinstance(inner, Gathered) and "two_way" in inner.traits.collectives
    if not (coded or isinstance(inner, Dense)) or traits.reduces != "mean" or traits.optimizer.owns:
        raise ConfigError(
            "compressor must send codes whose mean is a gradient on the shard axis, got one that does not", *instead
        )
    if wrapped.scope != "tensor":
        rule = "tensor, because FSDP2 reduces each of its groups by itself"
        raise ValueRefused("compressor.scope", rule, wrapped.scope, "tensor")
    if getattr(compressor, "residual", "local") != "local":
        raise ValueRefused("compressor.residual", "local, because each shard has one owner", "aggregate", "local")


def _within(compressor: Compressor) -> Scattered:
    """What carries the messages, within the wrappers of error feedback."""
    while not isinstance(compressor, Scattered):
        compressor = compressor.inner  # type: ignore[attr-defined]
    return compressor


def _levels(groups: Sequence[FSDPGroup], options: ShardOptions) -> list[Level]:
    """All processes of the shard axis; or those of a machine, then those with the same number in each machine.

    Raises:
        ConfigError: groups have different shard axes, or `machine` does not divide their size.
    """
    mesh = groups[0].mesh
    ranks, rank = dist.get_process_group_ranks(mesh.get_group()), mesh.get_local_rank()
    for group in groups[1:]:
        if dist.get_process_group_ranks(group.mesh.get_group()) != ranks:
            raise ConfigError(
                f"model must have one shard axis, got other processes in {group.title} than in {groups[0].title}; "
                "call fully_shard with one mesh"
            )
    device, size = str(groups[0].parameters[0].to_local().device), options.machine
    if len(ranks) < 2:
        raise ConfigError("model must be cut into at least 2 shards, got 1, which reduces nothing; leave the call out")
    if size is None:
        whole = Comm(1, len(ranks), rank, device)
        whole.group, whole.first_named = mesh.get_group(), dist.get_rank()
        return [Level(whole, options.compressor, _seed(options.seed, ranks), range(len(ranks)))]
    fits = [number for number in range(2, len(ranks)) if len(ranks) % number == 0]
    if not isinstance(size, int) or size not in fits:
        known = " or ".join(map(str, fits))
        raise ConfigError(
            f"machine must divide the {len(ranks)} processes of the shard axis into machines of several, got {size!r}; "
            f"pass machine={known or None}"
        )
    first, number = rank // size * size, rank % size
    here, there = ranks[first : first + size], ranks[number::size]
    inside, between = _comm_of(here, number, device), _comm_of(there, rank // size, device)
    everyone = range(len(ranks))
    return [
        Level(inside, options.inside, _seed(options.seed, here), [other % size for other in everyone]),
        Level(between, options.compressor, _seed(options.seed, there), [other // size for other in everyone]),
    ]


def _seed(seed: int, ranks: Sequence[int]) -> int:
    return keyed_rng.key(seed, "shard axis", *ranks)


def _comm_of(ranks: list[int], number: int, device: str) -> Comm:
    """Collectives in a group made of some processes, which alone call this."""
    comm = Comm(1, len(ranks), number, device)
    made = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    comm.group, comm.first_named = made, dist.get_rank()
    comm.made.append(comm)
    return comm


def _name(rank: int, spec: TensorSpec) -> str:
    return f"{spec.name}[{rank}]"


def _copied(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {key: copy_on_cpu(value) for key, value in own.items()} for name, own in state.items()}


def _put(exchange: Exchange, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Put what `_copied` has read into the state of an exchange."""
    for name, entries in state.items():
        kept = exchange.state.setdefault(name, {})
        for key, value in entries.items():
            if key in kept and isinstance(value, Tensor) and kept[key].shape == value.shape:
                kept[key].copy_(value)  # residuals of one shape share one storage
            else:
                kept[key] = value.to(exchange.comm.device, copy=True) if isinstance(value, Tensor) else value
