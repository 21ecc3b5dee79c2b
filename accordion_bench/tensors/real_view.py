"""What is exchanged of a parameter: of a complex one its real parts, [..., 2]; of a DTensor this process's shard."""

import torch
from torch import Tensor


def is_sharded(x: Tensor) -> bool:
    """Whether it is a DTensor, such as a parameter of FSDP2; its class, whose import takes a second, is not asked."""
    return hasattr(x, "device_mesh")


def as_real(x: Tensor) -> Tensor:
    """What is exchanged of a tensor, in the same memory; a tensor that is neither complex nor sharded as it is."""
    if is_sharded(x):
        x = x.detach().to_local()  # type: ignore[attr-defined]
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def as_kind_of(x: Tensor, like: Tensor) -> Tensor:
    """What `as_real` was made of, in the same memory where two parts lie side by side: of the kind that `like` is."""
    if like.is_complex():
        x = torch.view_as_complex(x if x.stride(-1) == 1 else x.contiguous())
    if not is_sharded(like):
        return x
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return DTensor.from_local(x, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
