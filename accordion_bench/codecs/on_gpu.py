"""The engine of a GPU: Triton's kernels for dense codes and drawn coordinates, torch for sparse codes."""

from torch import Tensor

from accordion_bench.codecs.bucket import Bucket
from accordion_bench.codecs.coding import LEVELS, Coding
from accordion_bench.codecs.compiled import Compiled, table_of, tile_of
from accordion_bench.codecs.engine import header_of
from accordion_bench.codecs.layout import Message
from accordion_bench.codecs.on_device import OnDevice
from accordion_bench.tensors.kernels.on_gpu import room
from accordion_bench.tensors.kernels.on_gpu.encode import Measured

NORMS = ("l2", "linf")


class OnGpu(Compiled, OnDevice):
    """Where blocks are small, scales and codes are made in one read of the coordinates."""

    name = "triton"

    def __init__(self) -> None:
        super().__init__(room)

    def encode_dense(self, bucket: Bucket, message: Message, coding: Coding, shared: Tensor | None = None) -> None:
        table = table_of(message.layout, header_of(coding), tile_of(coding))
        to_levels = coding.rounding == LEVELS and coding.scale == "norm"
        known = coding.norm in NORMS and (to_levels or coding.scale == "largest")
        if known and Measured.possible(table, coding.kinds):
            measured = Measured(coding.norm, 0.0 if to_levels else coding.largest)
            self.write_codes(bucket, message, coding, measured=measured)
        else:
            super().encode_dense(bucket, message, coding, shared)
