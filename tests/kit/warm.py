"""Preloaded by the server that forks test processes: compiled kernels and a composed configuration.

Each forked process would otherwise load the kernels, which takes 0.7 seconds. The lock lets one server compile them
where no machine code is kept on disk yet; the others read what it has written.
"""

import fcntl

import torch

from accordion_bench.conformance.compile_kernels import compile_for
from accordion_bench.options.conf_dir import yaml_files
from accordion_bench.tensors import kernels
from tests.kit import composed

torch.set_num_threads(1)
composed.cfg("dataset=digits")
if kernels.installed():
    with open(__file__) as own, torch.no_grad():
        fcntl.flock(own, fcntl.LOCK_EX)
        compile_for(yaml_files("compressor"))
