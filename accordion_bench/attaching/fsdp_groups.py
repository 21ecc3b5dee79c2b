"""What FSDP2 hands to its all-reduce hook: whose gradients, in which order, where each one lies."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec


class Region(NamedTuple):
    """Where the gradient of one parameter's shard lies in what an FSDP group hands over.

    spec: the parameter's name, the shape of the shard of this process.
    start: its first number.
    """

    spec: TensorSpec
    start: int

    def view(self, flat: Tensor) -> Tensor:
        """The shard [1, ...] of one local worker, as a view into the flat tensor."""
        return flat[self.start : self.start + self.spec.numel].view(1, *self.spec.shape)


class FSDPGroup:
    """The parameters whose gradients FSDP2 reduces together; each call of `fully_shard` makes one such group.

    FSDP2 packs the shards of all gradients one after another into a flat tensor, each padded to the longest shard of
    its parameter. torch tells the hook neither names nor order: they are read from the group's own list, which is
    private to torch. `regions` holds for a group whose parameters have one type; of several types the order differs
    between versions of torch.

    Args:
        name: of the module on which `fully_shard` was called; "" is the whole model.
        module: this module, resharded, so that its parameters are shards.
        names: of the parameters in the model.

    Attributes:
        regions: of the parameters that are trained.
        padded_numel: numbers that the group hands over when each of them has a gradient.

    Raises:
        ConfigError: this FSDP2 set-up has no replicate axis that a hook could exchange, or one that is not known here.
    """

    def __init__(self, name: str, module: FSDPModule, names: dict[nn.Parameter, str]) -> None:
        self.name, self.module = name, module
        self._held: Sequence[Any] = _held(module, self.title)
        self.parameters = [held.sharded_param for held in self._held]
        self._was_trained = self._trained()
        for parameter in self.parameters:
            _refuse_unknown(parameter, names[parameter])
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        _refuse_mixed(trained, self.title)
        self.regions: list[Region] = []
        self.padded_numel = 0
        for parameter in trained:
            shape = tuple(parameter.to_local().shape)
            self.regions.append(Region(TensorSpec(names[parameter], shape), self.padded_numel))
            self.padded_numel += _padded_numel(parameter)

    @property
    def title(self) -> str:
        """For messages."""
        return f"the FSDP group of {self.name or 'the whole model'}"

    @property
    def mesh(self) -> DeviceMesh:
        """The shard axis."""
        return self.parameters[0].device_mesh

    @property
    def shards(self) -> list[Tensor]:
        """What this process has of every parameter, the frozen ones too; the parameters' own storage."""
        return [parameter.detach().to_local() for parameter in self.parameters]

    @property
    def trained_shard(self) -> Tensor:
        """One of those that are trained, for its type and device."""
        return next(parameter.detach().to_local() for parameter in self.parameters if parameter.requires_grad)

    def split(self, flat: Tensor) -> list[Tensor]:
        """The shards [1, ...] of gradients, as views into what the group hands over, [padded_numel].

        Raises:
            RuntimeError: some parameter has no gradient, or another set of parameters is trained than when this group
                was read.
        """
        if self._trained() != self._was_trained:
            raise RuntimeError(
                f"{self.title} trains other parameters than when its replicas were attached; "
                "detach and attach again after requires_grad has changed"
            )
        if flat.numel() != self.padded_numel:
            raise RuntimeError(
                f"{self.title} has handed over {flat.numel()} numbers, and its trained parameters have "
                f"{self.padded_numel}: some had no gradient in this backward pass, and torch does not say which; "
                "call module.set_reduce_scatter_unused_params(True), where torch has it, or freeze them"
            )
        return [region.view(flat) for region in self.regions]

    def _trained(self) -> list[bool]:
        return [held.sharded_param.requires_grad for held in self._held]


def groups_of(model: nn.Module) -> list[FSDPGroup]:
    """The FSDP groups of a model, in the order of its modules.

    Raises:
        ConfigError: the model has none, or trains a parameter that is in none, which would not be exchanged.
    """
    modules: dict[int, tuple[str, FSDPModule]] = {}  # of modules wrapped together, the first
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            modules.setdefault(id(module._get_fsdp_state()), (name, module))
    if not modules:
        raise ConfigError(
            f"model must be sharded by FSDP2, got {type(model).__name__}, which is not; "
            'call fully_shard(model, mesh=mesh["shard"]) first'
        )
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [FSDPGroup(name, module, names) for name, module in modules.values()]
    groups = [group for group in groups if group.parameters]  # a module may have left all its own to inner ones
    held = {parameter for group in groups for parameter in group.parameters}
    for parameter, name in names.items():
        if parameter.requires_grad and parameter not in held:
            raise ConfigError(
                f"every trained parameter must be in an FSDP group, got {name}, which is in none, so that its "
                "gradient is not exchanged; call fully_shard(model, ...) without ignored_params, or freeze it"
            )
    return groups


def _held(module: FSDPModule, title: str) -> Sequence[Any]:
    """torch's records of the parameters of a group, in the order in which it packs their gradients."""
    try:
        group = module._get_fsdp_state()._fsdp_param_group
    except AssertionError:
        raise ConfigError(
            f"{title} must have one mesh for all its parameters, got several, for which torch has no all-reduce hook; "
            "call fully_shard without a shard_placement_fn that returns meshes"
        ) from None
    if group is None:
        return []
    if group._all_reduce_hook is not None:
        raise ConfigError(
            f"{title} must have no all-reduce hook yet, got one that is set; call detach() on what was attached before"
        )
    return group.fsdp_params


def _refuse_unknown(parameter: nn.Parameter, name: str) -> None:
    """Refuse a parameter whose replicas torch has averaged already, or that is not where its gradient is."""
    shard = parameter if isinstance(parameter, DTensor) else None
    if shard is None or shard.device_mesh.ndim != 1 or not isinstance(shard.placements[0], Shard):
        mesh = f"one with the placements {shard.placements}" if shard is not None else "one that is no shard"
        raise ConfigError(
            f"{name} must be sharded over a mesh of one dimension, got {mesh}: torch averages the replicas of an HSDP "
            'mesh itself before the hook; call fully_shard(model, mesh=mesh["shard"])'
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
    """Refuse parameters of several types: in which order their gradients are packed depends on torch's version."""
    types = sorted({str(parameter.dtype) for parameter in trained})
    if len(types) > 1:
        raise ConfigError(
            f"{title} must train parameters of one type, got {' and '.join(types)}; "
            "call fully_shard(...) on modules of one type each"
        )


def _padded_numel(parameter: DTensor) -> int:
    """Numbers in the longest shard of a parameter, to which the others are padded."""
    (placement,) = parameter.placements
    assert isinstance(placement, Shard)
    sizes = list(parameter.shape)
    sizes[placement.dim] = -(-sizes[placement.dim] // parameter.device_mesh.size())
    return math.prod(sizes)
