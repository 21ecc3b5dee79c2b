"""Preloaded by the server that forks test processes: compiled kernels, the report and a composed configuration.

Each forked process would otherwise load the kernels in 0.7 seconds and import the report in 0.9. The lock lets one
server compile the kernels where no machine code is kept on disk yet; the others read what it has written.
"""

import atexit
import fcntl
import gc

import torch

from accordion_bench.conformance.compile_kernels import compile_for
from accordion_bench.options.conf_dir import yaml_files
from accordion_bench.report import serve  # noqa: F401  # with pandas, matplotlib and all that reads run folders
from accordion_bench.tensors import kernels
from tests.kit import composed

torch.set_num_threads(1)
composed.cfg("dataset=digits")
if kernels.installed():
    with open(__file__) as own, torch.no_grad():
        fcntl.flock(own, fcntl.LOCK_EX)
        compile_for(yaml_files("compressor"))
gc.collect()
gc.freeze()  # a collection in a forked process would go through all of it, and copy its pages
atexit.register(gc.unfreeze)
