"""Views of parameters for exchange: real and imaginary parts [..., 2] of complex tensors, local shards of DTensors."""

import torch
from torch import Tensor


def is_sharded(x: Tensor) -> bool:
    """Return whether x is a DTensor, as with FSDP2; without the import of the class, which takes a second."""
    return hasattr(x, "device_mesh")


def as_real(x: Tensor) -> Tensor:
    """Return the view of a tensor for exchange; x itself if it is neither complex nor sharded."""
    if is_sharded(x):
        x = x.detach().to_local()  # type: ignore[attr-defined]
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def as_kind_of(x: Tensor, like: Tensor) -> Tensor:
    """Return the tensor of the kind of `like` for a result of `as_real`; a view if the two parts are adjacent."""
    if like.is_complex():
        x = torch.view_as_complex(x if x.stride(-1) == 1 else x.contiguous())
    if not is_sharded(like):
        return x
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return DTensor.from_local(x, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
