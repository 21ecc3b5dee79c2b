"""python -m accordion_bench.conformance.compile_kernels [NAME ...]: compile the kernels of all compressors in advance.

The machine code is cached on disk (`tensors/kernels/compiled.py`), so that the first run does not wait for compilation.
"""

import sys
from collections.abc import Iterable

import torch

from accordion_bench.conformance.subject import Setup, bare, from_yaml, gradients, levels_of
from accordion_bench.options.conf_dir import yaml_files
from accordion_bench.tensors import kernels


def compile_for(names: Iterable[str]) -> None:
    """Run one exchange of a small network per compressor and level, which compiles every kernel that it calls."""
    xs_W = gradients(workers=2, dtype=torch.float32)
    for name in names:
        for options in ({}, *bare(from_yaml(name)().compressor).description.claims.other_options):
            make = from_yaml(name, **options)
            for level in levels_of(make):
                setup = Setup(make(), level, workers=2, dtype=torch.float32)
                setup.contributions([x_W.clone() for x_W in xs_W])


if __name__ == "__main__":
    if not kernels.installed():
        sys.exit("kernels must be compiled by numba, got none; type pip install 'accordion-bench[fast]'")
    with torch.no_grad():
        compile_for(sys.argv[1:] or yaml_files("compressor"))
