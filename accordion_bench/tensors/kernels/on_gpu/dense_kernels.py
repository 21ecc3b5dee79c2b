"""`DenseKernels` by kernels for GPUs."""

from accordion_bench.tensors.kernels.on_gpu.drawn import draw, gather, scatter
from accordion_bench.tensors.kernels.on_gpu.encode import encode
from accordion_bench.tensors.kernels.on_gpu.norms import bucket_norms
from accordion_bench.tensors.kernels.on_gpu.sums import add_values, read_headers, write_headers

__all__ = ["add_values", "bucket_norms", "draw", "encode", "gather", "read_headers", "scatter", "write_headers"]
