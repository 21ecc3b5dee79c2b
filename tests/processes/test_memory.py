"""Freed memory is kept: a large block that is taken again faults no page."""

import subprocess
import sys

import pytest

COUNT = """
import resource, numpy
from accordion_bench.processes.machine import keep_freed_memory
kept = {keep} and keep_freed_memory()
for _ in range(3):
    numpy.ones(10_000_000)  # 80 MB
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    numpy.ones(10_000_000)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: bool) -> tuple[bool, int]:
    done = subprocess.run(
        [sys.executable, "-c", COUNT.format(keep=keep)], capture_output=True, text=True, check=True, timeout=120
    )
    kept, count = done.stdout.split()
    return kept == "True", int(count)


def test_a_block_that_is_taken_again_faults_no_page() -> None:
    kept, count = faults(keep=True)
    if not kept:
        pytest.skip("this C library has no such option")
    assert count < 100 < faults(keep=False)[1]
