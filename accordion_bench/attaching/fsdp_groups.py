"""FSDP2: shards of a model, and the layout of gradients in the reduce-scatter buffers of its groups."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from accordion_bench.attaching.own_parameters import plain_name
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec


class Region(NamedTuple):
    """Position of the gradient of one shard in a row of the reduce-scatter buffer of an FSDP group."""

    spec: TensorSpec  # name of the parameter, shape of the shard
    start: int  # index of the first element

    def view(self, flat: Tensor) -> Tensor:
        """Return the shard [1, ...] of one local worker as a view of the flat tensor."""
        return flat[self.start : self.start + self.spec.numel].view(1, *self.spec.shape)


class FSDPGroup:
    """Parameters whose gradients FSDP2 reduces together; each call of `fully_shard` creates one group.

    FSDP2 packs the gradients with a row for each process, [shards, padded_numel]: the shards of that process, one after
    another, each padded to the longest shard of its parameter. torch exposes neither names nor order. They are read
    from a private list of the group, which is valid if all parameters have one dtype; with several dtypes the order
    depends on the version of torch.

    Args:
        name, module: module on which `fully_shard` was called, resharded, so that its parameters are shards, and its
            name; "" = the whole model.
        names: names of the parameters in the model.
    """

    def __init__(self, name: str, module: FSDPModule, names: dict[nn.Parameter, str]) -> None:
        self.name, self.module = name, module
        self._group = _group(module, self.title)
        self._held: Sequence[Any] = self._group.fsdp_params if self._group is not None else []
        self.parameters: list[Any] = [held.sharded_param for held in self._held]
        self._was_trained = self._trained()
        for parameter in self.parameters:
            refuse_unknown(parameter, names[parameter])
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        _refuse_mixed(trained, self.title)
        self._trained_names = [(names[parameter], parameter) for parameter in trained]
        # number of elements of a row if each trained parameter has a gradient
        self.padded_numel = sum(math.prod(_shard_shape(parameter, 0)) for parameter in trained)

    def regions(self, rank: int) -> list[Region]:
        """Return the positions of the shards of a rank of the shard axis in its row."""
        regions, start = [], 0
        for name, parameter in self._trained_names:
            regions.append(Region(TensorSpec(name, _shard_shape(parameter, rank)), start))
            start += math.prod(_shard_shape(parameter, 0))
        return regions

    @property
    def reduce_scatter(self) -> Any:
        """Current reduce-scatter function of the group."""
        return self._group._reduce_scatter_comm

    @property
    def title(self) -> str:
        """Name of the group in messages."""
        return f"the FSDP group of {self.name or 'the whole model'}"

    @property
    def mesh(self) -> DeviceMesh:
        """Mesh of the shard axis."""
        mesh: DeviceMesh = self.parameters[0].device_mesh
        return mesh

    @property
    def trained_shard(self) -> Tensor:
        """One of the trained shards, for its dtype and device."""
        shards = (parameter.detach().to_local() for parameter in self.parameters if parameter.requires_grad)
        found: Tensor = next(shards)
        return found

    def rows(self, flat: Tensor) -> Tensor:
        """Return the buffer as [shards, padded_numel]; RuntimeError if a gradient is missing, or others are trained."""
        if self._trained() != self._was_trained:
            raise RuntimeError(
                f"{self.title} trains other parameters than when its shards were attached; "
                "detach and attach again after requires_grad has changed"
            )
        shards = self.mesh.size()
        if flat.numel() != shards * self.padded_numel:
            raise RuntimeError(
                f"{self.title} has handed over {flat.numel()} numbers, and its trained parameters have "
                f"{shards * self.padded_numel}: some had no gradient in this backward pass, and torch does not say "
                "which; call module.set_reduce_scatter_unused_params(True), or freeze them"
            )
        return flat.view(shards, -1)

    def _trained(self) -> list[bool]:
        return [held.sharded_param.requires_grad for held in self._held]


def groups_of(model: nn.Module) -> list[FSDPGroup]:
    """Return the FSDP groups of a model, in its order; ConfigError if it has none, or trains a parameter in none."""
    modules: dict[int, tuple[str, FSDPModule]] = {}  # the first of modules that were wrapped together
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            modules.setdefault(id(module._get_fsdp_state()), (name, module))
    if not modules:
        raise ConfigError(
            f"model must be sharded by FSDP2, got {type(model).__name__}, which is not; "
            'call fully_shard(model, mesh=mesh["shard"]) first'
        )
    names = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
    groups = [FSDPGroup(name, module, names) for name, module in modules.values()]
    groups = [group for group in groups if group.parameters]  # all parameters of a module may belong to inner groups
    held = {parameter for group in groups for parameter in group.parameters}
    for parameter, name in names.items():
        if parameter.requires_grad and parameter not in held:
            refuse_unknown(parameter, name)
    return groups


def refuse_shards(named: Sequence[tuple[str, nn.Parameter]], process_group: dist.ProcessGroup | None) -> int:
    """Return the number of this process's shard of an FSDP2 model, whose parameters are resharded.

    Raises:
        ConfigError: the processes of the group do not hold replicas of the same shards.
    """
    for name, parameter in named:
        refuse_unknown(parameter, name)
        assert isinstance(parameter, DTensor)
        same = dist.get_process_group_ranks(parameter.device_mesh.get_group())
        both = {*dist.get_process_group_ranks(process_group or dist.group.WORLD)} & {*same}
        if both != {dist.get_rank()}:
            raise ConfigError(
                f"process_group must hold one process of each shard group, got the ranks {sorted(both)}, which hold "
                f'shards of {name}; pass process_group=mesh["replicate"].get_group()'
            )
    first = named[0][1]
    assert isinstance(first, DTensor)
    return first.device_mesh.get_local_rank()


def _group(module: FSDPModule, title: str) -> Any:
    """Return torch's parameter group of a module; None = all its parameters belong to inner groups."""
    try:
        return module._get_fsdp_state()._fsdp_param_group
    except AssertionError:
        raise ConfigError(
            f"{title} must have one mesh for all its parameters, got several, for which torch has no reduce-scatter to "
            "be set; call fully_shard without a shard_placement_fn that returns meshes"
        ) from None


def refuse_unknown(parameter: nn.Parameter, name: str) -> None:
    """Check that a parameter is a one-dimensional shard on the device of its gradient, without torch's replicas.

    Raises:
        ConfigError: it is not; the message gives the reason.
    """
    shard = parameter if isinstance(parameter, DTensor) else None
    if shard is None:
        raise ConfigError(
            f"every trained parameter must be in an FSDP group, got {name}, which is in none, so that its gradient is "
            "not exchanged; call fully_shard(model, ...) without ignored_params, or freeze it"
        )
    if shard.device_mesh.ndim != 1 or not isinstance(shard.placements[0], Shard):
        raise ConfigError(
            f"{name} must be sharded over a mesh of one dimension, got one with the placements {shard.placements}: "
            "torch averages the replicas of an HSDP mesh itself; call "
            'fully_shard(model, mesh=mesh["shard"])'
        )
    device = shard.to_local().device.type
    if device == "meta":
        raise ConfigError(f"{name} must have values, got one on the meta device; call model.to_empty(...) first")
    if device != shard.device_mesh.device_type:
        raise ConfigError(
            f"{name} must stay on {shard.device_mesh.device_type}, got a shard that is offloaded to {device}; "
            "call fully_shard(model, ...) without offload_policy"
        )


def _refuse_mixed(trained: Sequence[nn.Parameter], title: str) -> None:
    """Check that parameters have one dtype; with several, the packing order depends on the version of torch."""
    types = sorted({str(parameter.dtype) for parameter in trained})
    if len(types) > 1:
        raise ConfigError(
            f"{title} must train parameters of one type, got {' and '.join(types)}; "
            "call fully_shard(...) on modules of one type each"
        )


def _shard_shape(parameter: DTensor, rank: int) -> tuple[int, ...]:
    """Return the shape of the shard of a rank; that of rank 0 is the longest."""
    (placement,) = parameter.placements
    assert isinstance(placement, Shard)
    sizes = list(parameter.shape)
    length = -(-sizes[placement.dim] // parameter.device_mesh.size())
    sizes[placement.dim] = max(0, min(length, sizes[placement.dim] - rank * length))
    return tuple(sizes)
