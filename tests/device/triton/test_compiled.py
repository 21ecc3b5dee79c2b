"""Kernels compile for GPUs that are not there, to code that rounds as torch does."""

import json
import os
import subprocess
import sys

import pytest

from tests.kit.paths import ROOT

ENCODERS = ("_encode", "_add_values")
# most instructions per coordinate or entry, for sm_90 with Triton 3.6: both ends of a slice, a loop's body once
MOST = {
    ("sign", "_encode"): 25,
    ("sign", "_add_values"): 25,
    ("4 bits", "_encode"): 45,
    ("4 bits", "_add_values"): 40,
    ("3 bits", "_encode"): 50,
    ("3 bits", "_add_values"): 45,
    ("e4m3", "_encode"): 40,
    ("e4m3", "_add_values"): 40,
    ("e3m0", "_encode"): 45,
    ("e3m0", "_add_values"): 40,
    ("4 bits, measured", "_encode"): 60,
    ("e4m3, measured", "_encode"): 45,
    ("sign, fed", "_sum_pieces"): 40,
    ("sign, fed", "_encode"): 40,
    ("sign, fed at a rate, masked", "_sum_pieces"): 45,
    ("sign, fed at a rate, masked", "_encode"): 50,
    ("sign, led, masked", "_sum_pieces"): 45,
    ("sign, led, masked", "_encode"): 55,
    ("4 bits, measured, fed", "_encode"): 85,
    ("e4m3, measured, fed", "_encode"): 80,
    ("1-bit SGD", "_sum_pieces"): 60,
    ("TernGrad", "_sum_pieces"): 45,
    ("columns", "_encode"): 25,
    ("columns", "_add_values"): 50,
    ("float16", "_add_up"): 30,
    ("float16", "_widen"): 20,
    ("bfloat16", "_add_up"): 35,
    ("bfloat16", "_widen"): 25,
    ("momentum", "_add"): 25,
    ("momentum, ahead", "_add"): 30,
    ("momentum and sums", "_add"): 35,
    ("steps", "_take"): 35,
    ("int8", "_encode"): 45,
    ("int8", "_add_values"): 35,
    ("int8, measured", "_encode"): 50,
    ("powers", "_encode"): 40,
    ("powers", "_add_values"): 37,
    ("ternary", "_encode"): 70,
    ("ternary", "_add_values"): 50,
    ("ternary, shared", "_encode"): 60,
    ("ternary, shared", "_add_values"): 40,
    ("RandomK", "_draw"): 50,
    ("RandomK", "_gather"): 25,
    ("RandomK", "_scatter"): 35,
    ("tiles", "_choose"): 65,
    ("tiles", "_add_tiles"): 110,
}
# coordinates of ternary codes, five per byte, and entries of a message are read one by one
NARROW = {("tiles", "_add_tiles"), *((f"ternary{of}", kernel) for of in ("", ", shared") for kernel in ENCODERS)}


def printed(module: str, cache) -> list:
    """What a module of this folder prints, by a process that compiles for a GPU."""
    pytest.importorskip("triton")
    environ = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", f"tests.device.triton.{module}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_coordinates_are_read_16_bytes_at_once_and_nothing_is_divided(tmp_path):
    found = {(one["case"], one["kernel"]): one for one in printed("counts", tmp_path)}
    assert found.keys() == MOST.keys()
    assert not [
        key for key, one in found.items() if not (one["wide"] or key in NARROW) or one["divided"] or one["local"]
    ]
    assert {key: one["each"] for key, one in found.items() if one["each"] > MOST[key]} == {}


@pytest.mark.slow
def test_no_product_is_fused_with_a_sum_and_no_division_is_approximate(tmp_path):
    found = printed("to_ptx", tmp_path)
    names = {"_encode", "_add_values", "_sum_pieces", "_join_pieces", "_write_headers", "_read_headers", "_factors"}
    names |= {"_add_up", "_widen", "_add", "_take", "_choose", "_add_tiles"}
    names |= {"_draw", "_gather", "_scatter"}
    names |= {"_narrow_in_sample", "_put_aside", "_narrow", "_tally", "_gather"}
    names |= {"_write_entries", "_write_codes", "_write_heads", "_count_ones", "_add_entries"}
    names |= {"_sample", "_count", "_decide", "_tally", "_compact", "_sum_largest", "_scale", "_send"}
    names |= {"_times_right", "_times_left", "_outer", "_join_parts", "_orthonormalise", "_renew"}
    assert {name for name, _, _ in found} == names
    assert [one for one in found if one[2]] == []
