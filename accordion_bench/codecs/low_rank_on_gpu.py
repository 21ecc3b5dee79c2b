"""Operations of the engine on matrices and their factors by Triton kernels; by torch if the rank is too high."""

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
from torch import Tensor

from accordion_bench.codecs import orthonormal
from accordion_bench.codecs.engine import OnDevice

HIGHEST = 8  # largest rank that the kernel of orthonormalisation supports


class LowRankOnGpu(OnDevice):
    """Operations on matrices of different sizes in a few launches."""

    one_by_one = True

    def orthonormalise(self, factors: Sequence[Tensor], passes: int = 2) -> list[Tensor]:
        kernels = _kernels("orthonormal")
        if not factors or max(factor.shape[2] for factor in factors) > HIGHEST:
            return super().orthonormalise(factors, passes)
        longest = max(factor[0].numel() for factor in factors)
        fixed = orthonormal.fixed_numbers(longest, torch.float64, factors[0].device)
        shifts = orthonormal.SHIFT, orthonormal.LAST_SHIFT
        numbers = kernels.Numbers(*shifts, orthonormal.TINY, orthonormal.FILL, fixed)
        found: list[Tensor] = kernels.orthonormalise(factors, passes, numbers)
        return found

    def replace_degenerate(self, news: Sequence[Tensor], olds: Sequence[Tensor]) -> list[Tensor]:
        found: list[Tensor] = _kernels("orthonormal").replace_degenerate(news, olds) if news else []
        return found

    def multiply(
        self, matrices_W: Sequence[Tensor], factors: Sequence[Tensor], terms_W: Sequence[Sequence[Tensor]] = ()
    ) -> list[Tensor]:
        fits = _kernels().fits([M_W.shape for M_W in matrices_W], [F.shape[-1] for F in factors])
        in_place = not terms_W or all(1 in M_W.stride()[2:] for M_W in matrices_W)
        if not fits or not in_place:
            return super().multiply(matrices_W, factors, terms_W)
        found: list[Tensor] = _kernels().multiply(matrices_W, factors, terms_W)
        return found

    def products(self, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> list[Tensor]:
        kernels = _kernels()
        shapes = [(1, len(L), L.shape[1], R.shape[2]) for L, R in zip(lefts, rights, strict=True)]
        if not kernels.fits(shapes, [L.shape[2] for L in lefts]):
            return super().products(lefts, rights)
        found = kernels.empty_tensors(shapes, lefts[0])
        kernels.fill(_batches(found, [L[None] for L in lefts], [R[None] for R in rights]))
        return [M_W[0] for M_W in found]

    def subtract_products(
        self,
        targets_W: Sequence[Mapping[int, Tensor]],
        lefts_W: Sequence[Tensor],
        rights_W: Sequence[Tensor],
        alpha: float = 1.0,
    ) -> None:
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for own_W, L_W, R_W in zip(targets_W, lefts_W, rights_W, strict=True):
            shape = (len(L_W), 1, L_W.shape[2], R_W.shape[3])
            found += [(x_W.view(shape), L_W[:, g : g + 1], R_W[:, g : g + 1]) for g, x_W in own_W.items()]
        if not found:
            return
        matrices_W, ls_W, rs_W = zip(*found, strict=True)
        if _kernels().fits([M_W.shape for M_W in matrices_W], [L_W.shape[3] for L_W in ls_W]):
            _kernels().subtract(_batches(matrices_W, ls_W, rs_W), alpha)
        else:
            super().subtract_products(targets_W, lefts_W, rights_W, alpha)


def _batches(matrices_W: Sequence[Tensor], lefts_W: Sequence[Tensor], rights_W: Sequence[Tensor]) -> list[object]:
    kernels = _kernels()
    columns = (kernels.in_rows(L_W) for L_W in lefts_W)
    rows = (kernels.in_rows(R_W.mT) for R_W in rights_W)
    return [kernels.ProductBatch(*one) for one in zip(matrices_W, columns, rows, strict=True)]


def _kernels(module: str = "products") -> ModuleType:
    return importlib.import_module(f"accordion_bench.tensors.kernels.on_gpu.{module}")
