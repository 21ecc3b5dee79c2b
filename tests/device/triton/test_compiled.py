"""Kernels compile for GPUs that are not there, to code that rounds as torch does."""

import json
import os
import subprocess
import sys

import pytest

from tests.kit.paths import ROOT


@pytest.mark.slow
def test_no_product_is_fused_with_a_sum_and_no_division_is_approximate(tmp_path):
    pytest.importorskip("triton")
    environ = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.device.triton.to_ptx"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    names = {"_encode", "_add_values", "_sum_pieces", "_join_pieces", "_write_headers", "_read_headers", "_factors"}
    names |= {"_draw", "_gather", "_scatter"}
    names |= {"_narrow_in_sample", "_put_aside", "_narrow", "_tally", "_gather"}
    names |= {"_write_entries", "_write_codes", "_count_ones", "_add_entries"}
    names |= {"_times_right", "_times_left", "_outer", "_join_parts", "_orthonormalise", "_renew"}
    assert {name for name, _, _ in found} == names
    assert [one for one in found if one[2]] == []
