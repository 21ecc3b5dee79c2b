"""Feedback: error feedback, that is residuals added before encoding and updated with the encoding error.

Tensor suffixes: W local workers, N coordinates.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.tensors.same_shape import in_rows, one_allocation


@dataclass(frozen=True)
class Feedback:
    """Encode p = a x + d e + b u in place of x; then e <- m (p - decoded message).

    Args:
        residuals_W: e of each tensor, [W, ...]; None = no residual, x is encoded.
        scales: a of each tensor: a float, or a 0-dimensional tensor on a device.
        decay: d.
        masks: m of each tensor, [...], zeros and ones; None = 1.
        momenta: u of each tensor, [...]; None = 0.
        momentum: b.
    """

    residuals_W: Sequence[Any]
    scales: Sequence[Any]
    decay: float = 1.0
    masks: Sequence[Tensor | None] = ()
    momenta: Sequence[Tensor | None] = ()
    momentum: float = 0.0

    def take(self, which: Sequence[int]) -> "Feedback | None":
        """Return the feedback of some tensors; None if they have no residuals."""
        residuals_W = [self.residuals_W[k] for k in which]
        if not residuals_W or residuals_W[0] is None:
            assert all(e_W is None for e_W in residuals_W), "some tensors of a bucket have residuals, some have not"
            return None
        masks, momenta = ([own[k] for k in which] if own else () for own in (self.masks, self.momenta))
        scales = [self.scales[k] for k in which]
        return replace(self, residuals_W=residuals_W, scales=scales, masks=masks, momenta=momenta)

    def only(self, which: Container[int]) -> "Feedback | None":
        """Return the feedback without the residuals of other tensors; None if no residual remains."""
        residuals_W = [e_W if k in which else None for k, e_W in enumerate(self.residuals_W)]
        return None if all(e_W is None for e_W in residuals_W) else replace(self, residuals_W=residuals_W)

    def cut(self, parts: Sequence[tuple[int, int, int]]) -> "Feedback | None":
        """Return the feedback of slices of tensors.

        Args:
            parts: (index of the tensor, start, stop) of each slice.
        """
        own = self.take([k for k, _, _ in parts])
        if own is None:
            return None
        cuts = [slice(start, stop) for _, start, stop in parts]
        residuals_W = [in_rows(e_W)[:, cut] for e_W, cut in zip(own.residuals_W, cuts, strict=True)]
        masks, momenta = (
            [None if x is None else x.view(-1)[cut] for x, cut in zip(given, cuts, strict=False)]
            for given in (own.masks, own.momenta)
        )
        return replace(own, residuals_W=residuals_W, masks=masks, momenta=momenta)

    @property
    def is_sum(self) -> bool:
        """Whether p = x + e for every tensor."""
        plain = all(not isinstance(scale, Tensor) and scale == 1 for scale in self.scales)
        return plain and self.decay == 1 and all(u is None for u in self.momenta)

    @property
    def rates(self) -> list[Tensor]:
        """Scales that are tensors on a device."""
        return [scale for scale in self.scales if isinstance(scale, Tensor)]

    @property
    def rows_W(self) -> list[Tensor]:
        """Residuals as rows [W, N]; views."""
        return [in_rows(e_W) for e_W in self.residuals_W]

    def fits_kernels(self, rows_W: Sequence[Tensor], shared: Tensor | None) -> bool:
        """Return whether kernels of a GPU can add the residuals in their read and write the encoding error.

        Args:
            rows_W: coordinates [W, N]; kernels require float32.
            shared: scales that are not in the messages; kernels require None.
        """
        rates, side_by_side = self.rates, all(e_W.stride(1) == 1 for e_W in self.rows_W)
        alike = len(rates) == len(self.scales) or (not rates and len(set(self.scales)) == 1)
        alike = alike and len({u is None for u in self.momenta}) <= 1
        return side_by_side and alike and shared is None and rows_W[0].dtype == torch.float32

    def form(self, xs_W: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compute p of each tensor in the storage of its residual, so that no third buffer is needed."""
        if self.decay != 1:
            torch._foreach_mul_(list(self.residuals_W), self.decay)
        led = [(e_W, u) for e_W, u in zip(self.residuals_W, self.momenta, strict=False) if u is not None]
        for w in range(len(led[0][0]) if led else 0):
            own = [e_W[w] for e_W, _ in led]
            torch._foreach_add_(own, [u.view(e.shape) for e, (_, u) in zip(own, led, strict=True)], alpha=self.momentum)
        groups: dict[Any, list[int]] = {}
        for k, scale in enumerate(self.scales):
            groups.setdefault(id(scale) if isinstance(scale, Tensor) else float(scale), []).append(k)
        for ks in groups.values():
            kept, given = one_allocation([self.residuals_W[k] for k in ks], [xs_W[k] for k in ks])
            scale = self.scales[ks[0]]
            if isinstance(scale, Tensor):
                torch._foreach_add_(kept, torch._foreach_mul(given, scale))
            else:
                torch._foreach_add_(kept, given, alpha=scale)
        return self.residuals_W

    def mask(self) -> None:
        """Multiply the residuals by their masks in place."""
        pairs = [(e_W, m) for e_W, m in zip(self.residuals_W, self.masks, strict=False) if m is not None]
        for w in range(len(self.residuals_W[0]) if pairs else 0):
            torch._foreach_mul_([e_W[w] for e_W, _ in pairs], [m.view(e_W[w].shape) for e_W, m in pairs])
