"""Complex tensors as real ones, [..., 2]: what is exchanged of a complex parameter are its two real parts."""

import torch
from torch import Tensor


def as_real(x: Tensor) -> Tensor:
    """The real parts of a complex tensor, [..., 2], in the same memory; another tensor as it is."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def as_kind_of(x: Tensor, like: Tensor) -> Tensor:
    """What `as_real` was made of, in the same memory where the two parts lie side by side: complex where `like` is."""
    if not like.is_complex():
        return x
    return torch.view_as_complex(x if x.stride(-1) == 1 else x.contiguous())
