"""Buckets: what some of their tensors keep, and names of random streams, on which results of every run depend."""

from dataclasses import replace

import torch

from accordion_bench.codecs.bucket import Bucket, Context, Target, by_level
from accordion_bench.compressors.gathered import Gathered
from accordion_bench.conformance.subject import from_yaml
from accordion_bench.options.conf_dir import yaml_files
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import keyed_rng

SPECS = [TensorSpec("a", (2, 3)), TensorSpec("b", ()), TensorSpec("c", (4,))]
STREAMS = {
    "atomo": "ATOMO",
    "distefblocksgd": "Sign",
    "efsignsgd": "Sign",
    "fp4": "FP4",
    "fp8": "Blockwise",
    "int8": "Blockwise",
    "lion": "Sign",
    "natural": "Natural",
    "nuqsgd": "Quantiser",
    "onebit": "OneBit",
    "onebitadam": "Sign",
    "qsgd": "Quantiser",
    "qsgdinf": "Quantiser",
    "signsgd": "Sign",
    "signum": "Sign",
    "trn": "Quantiser",
}
"""A name never changes, whatever the class is called: draws, and with them results, hang on it."""


def bucket() -> Bucket:
    xs_W = [torch.ones(2, *spec.shape) for spec in SPECS]
    return Bucket.of(xs_W, Context(3, SPECS, [1, 2, 1], 7, [0.1, 0.2, 0.3]), [0, 1, 2], [4, 9])


def streams() -> dict[str, str]:
    """Of every file whose method is gathered and draws, below its wrappers."""
    found = {}
    for name in yaml_files("compressor"):
        method = from_yaml(name)().compressor
        while not isinstance(method, Gathered) and hasattr(method, "inner"):
            method = method.inner
        if isinstance(method, Gathered) and method.stream:
            found[name] = method.stream
    return found


def test_streams_have_the_names_that_they_had():
    assert streams() == STREAMS


def test_keys_depend_on_all_that_tells_draws_apart():
    own = bucket()
    keys = own.keys("s")
    assert keys == [[keyed_rng.key(7, "s", "", spec.name, 3, worker) for spec in SPECS] for worker in (4, 9)]
    others = [replace(own, purpose="server"), replace(own, step=4), replace(own, seed=8)]
    every = {key for one in (own, *others) for row in one.keys("s") for key in row}
    assert len(every | {key for row in own.keys("t") for key in row}) == 5 * 2 * 3
    assert own.take([2]).keys("s") == [[row[2]] for row in keys]  # whatever else is in the bucket


def test_some_tensors_keep_what_is_said_of_them():
    part = bucket().take([1, 2])
    assert part.numels == (1, 4) and part.levels == [2, 1] and part.lrs == [0.2, 0.3]
    assert [x_W.shape for x_W in part.rows_W] == [(2, 1), (2, 4)]  # a number is a row of one
    own = bucket()
    assert own.take(range(3)) is own
    target = Target([torch.zeros(1, 2), torch.zeros(1, 3)], -1.0, 5)
    assert target.take([1]).rows_R[0] is target.rows_R[1] and target.take([1]).divisor == 5


def test_tensors_of_equal_level_are_told():
    assert by_level([2, 1, 2, 0.5]) == [(2, [0, 2]), (1, [1]), (0.5, [3])]
