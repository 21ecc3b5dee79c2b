"""Norms, rounding to levels, signs and sums of rows [R, N], by the reference and by kernels, with one interface."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Target, refuse_non_finite
from accordion_bench.codecs.coding import BlockNumbers, Coding, factors_of, to_levels
from accordion_bench.codecs.engine import Engine
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import Layout, Message
from accordion_bench.compressors.dense import dense_layout
from accordion_bench.compressors.sign import Sign
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.keyed_rng import BLOCK, blocks_of, fill_bits_


def bucket_count(n: int, size: int | None) -> int:
    return -(-n // (size or max(n, 1)))


@dataclass(frozen=True)
class Keyed(Bucket):
    """Rows with given keys."""

    given: Sequence[int] = ()

    def keys(self, stream: str) -> list[list[int]]:
        return [[key] for key in self.given]


def keyed(x_R: Tensor, keys: Sequence[int]) -> Keyed:
    """Return one tensor of rows [R, N] with keys."""
    return Keyed(0, [TensorSpec("x", (x_R.shape[1],))], [1], xs_W=[x_R], workers=range(len(x_R)), given=keys)


def random_words(key: int, start: int, count: int) -> Tensor:
    """Return words start to start + count - 1 of a key's stream, int32 [count]; use the leading bits."""
    blocks = blocks_of([[key]], [-(-(start + count) // BLOCK)], torch.device("cpu"))
    return fill_bits_(torch.empty(1, start + count, dtype=torch.int32), blocks)[0, start:]


def uniforms(key: int, start: int, count: int, bits: int = 24) -> Tensor:
    """Return the same words as multiples of 2^-bits in [0, 1)."""
    return ((random_words(key, start, count) >> (32 - bits)) & ((1 << bits) - 1)).float() * 2.0**-bits


class Path:
    """Operations of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def given(self, x_R: Tensor) -> Tensor:
        """Return the rows as a kernel receives them; half precision is exchanged in float32."""
        return x_R.float() if x_R.element_size() == 2 and self is not TORCH else x_R

    def bucket_norms(self, x_R: Tensor, size: int | None, norm: str) -> Tensor:
        n = x_R.shape[1]
        return self.engine.norms(keyed(self.given(x_R), []), Layout([n], [size or max(n, 1)], {}), norm)[0].float()

    def encode_levels(self, x_R: Tensor, norms_R: Tensor, size: int | None, book, keys) -> Tensor:
        refuse_non_finite(norms_R)
        coding, layout = to_levels(tuple(book), "linf"), self.layout(x_R.shape[1], size, book)
        message = Message.empty(layout, len(x_R), x_R.device)
        norms_R = norms_R.contiguous()
        numbers = BlockNumbers(norms_R, factors_of(coding.rule, norms_R))
        self.engine.encode(keyed(self.given(x_R), keys), message, coding, numbers)
        ((start, stop),) = layout.fields["codes"].spans
        return message.rows[:, start:stop].clone()

    def add_levels_(self, total: Tensor, message_A: Tensor, norms_A: Tensor, size: int | None, book) -> None:
        total_R = total[None] if total.ndim == 1 else total
        coding = Coding("levels", tuple(book), "linf")
        message = Message.empty(self.layout(total_R.shape[1], size, book), len(message_A), total.device)
        self.engine.write(message, "scales", norms_A.contiguous())
        ((start, stop),) = message.layout.fields["codes"].spans
        message.rows[:, start:stop] = message_A
        self.engine.add_codes(Target([total_R]), message, coding, None, None)

    def encode_sign(self, method: Sign, x_R: Tensor) -> Tensor:
        bucket = keyed(self.given(x_R), [0] * len(x_R))
        message = Message.empty(method.layout(bucket.specs, [1]), len(x_R), x_R.device)
        self.engine.encode_dense(bucket, message, method.coding(1))
        return message.rows

    @staticmethod
    def layout(n: int, size: int | None, book) -> Layout:
        return dense_layout((n,), (size or max(n, 1),), (len(book),), ("scales", "codes"))


TORCH, KERNELS = Path(Engine()), Path(engine_for([torch.zeros(1, 1)]))
PATHS = {"kernels": KERNELS, "torch": TORCH}
