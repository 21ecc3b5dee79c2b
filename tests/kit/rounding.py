"""Norms, rounding to levels, signs and sums of rows [R, N], by torch and by kernels, behind one face."""

import numpy as np
import torch
from accordion_bench.compressors.dense_codes import ORDERS, Form, in_buckets, table_of
from torch import Tensor

from accordion_bench.codecs import packed_codes
from accordion_bench.codecs.non_finite import refuse_non_finite
from accordion_bench.codecs.rounding import factors, for_kernel, round_to_levels, rounding_to
from accordion_bench.compressors.base import Context
from accordion_bench.compressors.sign import Sign
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.counter_rng import BLOCK, block_keys, integers_of, streams_of


def bucket_count(n: int, size: int | None) -> int:
    return Form((2,), size).buckets(n)


class Torch:
    """What a device does, and a CPU without numba."""

    def bucket_norms(self, x_R: Tensor, size: int | None, norm: str) -> Tensor:
        cells_R = in_buckets(x_R.float(), Form((2,), size).size(x_R.shape[1]))
        return torch.linalg.vector_norm(cells_R, ORDERS[norm], dim=2, dtype=torch.float64).float()

    def encode_levels(self, x_R: Tensor, norms_R: Tensor, size: int | None, book, keys) -> Tensor:
        refuse_non_finite(norms_R)
        n, rounding = x_R.shape[1], rounding_to(book)
        size = Form((2,), size).size(n)
        draws_R = integers_of(block_keys(keys, 0, -(-n // BLOCK)), rounding.bits)[:, :n]
        cells = in_buckets(x_R.float(), size), factors(norms_R, rounding.scale)[..., None], in_buckets(draws_R, size)
        codes_R = round_to_levels(*cells, rounding).flatten(1)[:, :n]
        return packed_codes.pack_codes(codes_R.contiguous(), len(book))

    def add_levels_(self, total: Tensor, message_A: Tensor, norms_A: Tensor, size: int | None, book) -> None:
        total_R = total[None] if total.ndim == 1 else total
        n = total_R.shape[1]
        for a, (message, norms) in enumerate(zip(message_A, norms_A, strict=True)):
            values = in_buckets(packed_codes.look_up(message[None], book, n), Form((2,), size).size(n))
            total_R[a % len(total_R)] += (values * norms[None, :, None]).flatten(1)[0, :n]

    def encode_sign(self, method: Sign, x_R: Tensor) -> Tensor:
        spec = TensorSpec("x", (1, x_R.shape[1]))
        return method.encode(x_R, spec, 1, Context(0, [spec], [1]), [0] * len(x_R))


class Kernels:
    """What a CPU does."""

    def _given(self, x_R: Tensor, size: int | None, K: int):
        from accordion_bench.tensors.kernels.on_cpu import array_like
        from accordion_bench.tensors.kernels.table import addresses

        x_R = x_R.contiguous() if x_R.element_size() > 2 else x_R.float()
        return addresses([x_R]), table_of((x_R.shape[1],), (0,), Form((K,), size)), array_like(x_R), x_R

    def bucket_norms(self, x_R: Tensor, size: int | None, norm: str) -> Tensor:
        from accordion_bench.tensors.kernels.norms import bucket_norms

        at, table, like, _kept = self._given(x_R, size, 2)
        return torch.from_numpy(bucket_norms(at, table, norm, like)).float()

    def encode_levels(self, x_R: Tensor, norms_R: Tensor, size: int | None, book, keys) -> Tensor:
        from accordion_bench.tensors.kernels.encode import encode

        refuse_non_finite(norms_R)
        at, table, like, _kept = self._given(x_R, size, len(book))
        message_R = torch.empty(len(x_R), packed_codes.code_bytes(x_R.shape[1], len(book)), dtype=torch.uint8)
        factor_R = factors(norms_R, rounding_to(book).scale).contiguous().numpy()
        encode(at, table, factor_R, streams_of(keys)[:, None], message_R.numpy(), like, for_kernel(book))
        return message_R

    def add_levels_(self, total: Tensor, message_A: Tensor, norms_A: Tensor, size: int | None, book) -> None:
        from accordion_bench.tensors.kernels.sums import add_values

        at, table, like, _kept = self._given(total[None] if total.ndim == 1 else total, size, len(book))
        add_values(at, table, norms_A.contiguous().numpy(), message_A.numpy(), [np.float32(book)], like, 1)

    def encode_sign(self, method: Sign, x_R: Tensor) -> Tensor:
        spec = TensorSpec("x", (1, x_R.shape[1]))
        return method.encode_all([x_R], [spec], [1], Context(0, [spec], [1]), range(len(x_R)))


TORCH, KERNELS = Torch(), Kernels()
PATHS = {"kernels": KERNELS, "torch": TORCH}
