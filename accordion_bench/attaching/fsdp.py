"""FSDP2's shard axis: reduction of gradients to their shards by low-bit codes instead of a dense reduce-scatter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accordion_bench.attaching.agreement import refuse_differences
from accordion_bench.attaching.fsdp_groups import FSDPGroup, groups_of
from accordion_bench.attaching.own_parameters import Exempt, exempt_names
from accordion_bench.codecs.bucket import Bucket, Target
from accordion_bench.codecs.layout import Transfer
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.ledger import Ledger
from accordion_bench.comm.on_device import copy_on_cpu
from accordion_bench.compressors.assemble import CompressorSetup, wrapped_compressor
from accordion_bench.compressors.compressor import Compressor, Context, Exchanged, Kept, State, paying_levels, subtract_
from accordion_bench.compressors.gathered import Gathered, average_at_owners, naming
from accordion_bench.compressors.probe import dense_bytes
from accordion_bench.compressors.uncoded import Cast, Dense
from accordion_bench.compressors.wrapper import Wrapper
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.partition import levelled
from accordion_bench.methods.compatibility import ladder_of
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import with_options
from accordion_bench.plan import Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.same_shape import in_rows


@with_options
class Scattered(Wrapper):
    """Update of a tensor = mean_w C(x_w), for its owner only: owners decode all messages and sum them in float32.

    This is the first half of `TwoWay`, with tensors instead of pieces. Tensors without a level, or without a shorter
    message, are sent uncompressed. On workers that do not own a tensor, the update is their own input and is unused.

    Args:
        inner: encodes the messages; if its messages do not encode single tensors, all tensors are sent uncompressed.
        owners: index of the worker that owns a tensor, by name.
    """

    owners: Mapping[str, int]

    def transfers(self, spec: TensorSpec, level: float, workers: int, kept: Kept = None) -> Sequence[Transfer]:
        assert isinstance(self.inner, Gathered)
        return [Transfer("all_to_all", self.inner.message_bytes(spec, level))]

    def pays(self, spec: TensorSpec, level: float, workers: int) -> bool:
        return sum(transfer.nbytes for transfer in self.transfers(spec, level, workers)) < dense_bytes(spec)

    def takes_feedback(self, spec: TensorSpec, level: float | None, workers: int) -> bool:
        return level is not None and self.inner.takes_feedback(spec, level, workers) and self.pays(spec, level, workers)

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        owned = [[i for i, spec in enumerate(ctx.specs) if self.owners[spec.name] == w] for w in range(comm.workers)]
        levels = paying_levels(self, ctx, comm.workers)
        coded = [[i for i in own if i in levels] for own in owned]
        ids = [i for own in coded for i in own]
        whole = [[i for i in own if i not in levels] for own in owned]
        update = [x_W[0] for x_W in xs_W]
        bucket = Bucket.of(xs_W, ctx, ids, comm.local)
        if ids:
            assert isinstance(self.inner, Gathered)
            with naming(ctx, ids, comm.first_named):
                handed = average_at_owners(self.inner, bucket, list(map(len, coded)), comm)
            for owner, means in zip(comm.local, handed.means_W, strict=True):
                for i, mean in zip(coded[owner], means, strict=True):
                    update[i] = mean.view(ctx.specs[i].shape)
        for owner, parts in zip(comm.local, _means_of_owned(xs_W, whole, comm), strict=True):
            for i, part in zip(whole[owner], parts, strict=True):
                update[i] = part.view(ctx.specs[i].shape)

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            subtract_({i: target_W for i, target_W in targets_W.items() if i not in levels}, xs_W)
            ks = [k for k, i in enumerate(ids) if i in targets_W]
            if ks:
                assert isinstance(self.inner, Gathered)
                target = Target([in_rows(targets_W[ids[k]]) for k in ks], -1.0)
                self.inner.add_bucket_(target, handed.message.take(ks), bucket.take(ks))

        return Exchanged(update, subtract_sent_)


def _means_of_owned(xs_W: Sequence[Tensor], owned: Sequence[Sequence[int]], comm: Comm) -> list[Sequence[Tensor]]:
    """Return for each local worker the means of the tensors that it owns, [N] each, exchanged uncompressed."""
    if not any(xs_W[i].numel() for own in owned for i in own):
        return [[xs_W[i].new_empty(0) for i in owned[worker]] for worker in comm.local]
    parts_AW = [[in_rows(xs_W[i]) for i in own] for own in owned]
    none_W = xs_W[0].new_empty(comm.local_workers, 0)
    rows_AW = [torch.cat([none_W, *parts_W], dim=1) for parts_W in parts_AW]
    received = comm.all_to_all([row_W.view(torch.uint8) for row_W in rows_AW])
    means: list[Sequence[Tensor]] = []
    for worker, message_A in zip(comm.local, received, strict=True):
        sizes = [part_W.shape[1] for part_W in parts_AW[worker]]
        rows_A = message_A.reshape(-1).view(none_W.dtype).view(comm.workers, sum(sizes))
        means.append((rows_A.sum(0) / comm.workers).split(sizes))
    return means


@dataclass(frozen=True)
class ShardOptions:
    """How gradients are reduced to their shards: the arguments of `ab.attach_shards`, with all compressor options."""

    compressor: Config
    inside: Config
    machine: int | None = None
    exempt: Exempt = None
    seed: int = 0


class Level(NamedTuple):
    """A level of the reduction: a group of processes that exchange codes."""

    comm: Comm  # collectives between these processes
    config: Config  # options of their compressor
    seed: int  # seed of their draws; concurrent groups and other levels have different seeds
    # for each rank on the shard axis, the process of this group that receives the shards of that rank
    number_of: Sequence[int]


class LevelExchange(NamedTuple):
    """The exchange of one level of a group."""

    exchange: Exchange  # exchange of the shards that remain at this level; contains the residuals
    plan: Plan  # plan with its only level
    kept: list[int]  # indices of the shards that this process receives


class GroupReduction:
    """The reduce-scatter of one FSDP group: g <- mean of C(g) over the shard axis, each shard for its owner alone.

    Every process sends to every other process the compressed shards that it owns; the receiver sums the decoded values
    in float32. With two levels, this is done first within each machine, then between processes with equal numbers in
    their machines. Each parameter's shard is compressed as one tensor: the shard of rank 1 of `layer.weight` is
    `layer.weight[1]`.
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
        """Allocate the input and output buffers for FSDP2."""
        return self.before.allocate(size, dtype=dtype, device=device)  # type: ignore[no-any-return]

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce the gradients of a group; called by FSDP2.

        Args:
            output_tensor: [n], receives this process's shards; half precision is summed in float32.
            input_tensor: [shards n], the gradients of this process.
            group, op, async_op: process group of the shard axis; sum or mean; False.

        Raises:
            NonFinite: a gradient is NaN or infinite. On a CPU this process has sent nothing; the others wait for it.
            RuntimeError: torch did not pass the gradients of the group's parameters.
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
        """Return the state for checkpoints, on the CPU: steps, and the compressor's tensors by level and shard."""
        return {"step": self.step, "levels": [_copied(stage.exchange.state) for stage in self.stages]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.step = state["step"]
        for stage, saved in zip(self.stages, state["levels"], strict=True):
            _put(stage.exchange, saved)


class ShardAxis:
    """Low-bit reduction on the shard axis of an FSDP2 model, active until `detach`.

    Every process stores and saves the residuals of its own gradients. There is one reduction per FSDP group.

    Attributes:
        ledger: bytes that this process sent; with two levels, to other machines.
        inside_ledger: with two levels, bytes that it sent within its machine; else None.
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
        """Continue from this process's `state_dict()`; ConfigError if FSDP groups or number of levels are others."""
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
        """Restore FSDP2's own reduction."""
        for reduction in self.reductions:
            reduction.group.module.set_custom_reduce_scatter(reduction.before)
        for comm in self._comms:
            comm.leave()


def attach_to_shards(model: nn.Module, options: ShardOptions) -> ShardAxis:
    """Reduce the gradients of an FSDP2 model along its shard axis by a compressor. All processes must call it.

    Its trained parameters must not change afterwards.

    Raises:
        ConfigError: the compressor or the model is not supported, or the processes passed different arguments.
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
    """Create a compressor, with its error feedback, whose messages are sent to the owners of the tensors only."""
    return wrapped_compressor(config, carried=lambda inner: Scattered(inner, owners))


def _refuse_compressor(wrapped: CompressorSetup) -> None:
    """Refuse a compressor that cannot encode each tensor independently, or that needs more than the gradients."""
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
    """Return the innermost part, which sends the messages, without its error feedback."""
    while not isinstance(compressor, Scattered):
        compressor = compressor.inner  # type: ignore[attr-defined]
    return compressor


def _levels(groups: Sequence[FSDPGroup], options: ShardOptions) -> list[Level]:
    """Return the levels: all processes of the shard axis; or one machine, then equal numbers in each machine."""
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
    for name, entries in state.items():
        kept = exchange.state.setdefault(name, {})
        for key, value in entries.items():
            if key in kept and isinstance(value, Tensor) and kept[key].shape == value.shape:
                kept[key].copy_(value)  # residuals of one shape share one storage
            else:
                kept[key] = value.to(exchange.comm.device, copy=True) if isinstance(value, Tensor) else value
