"""Messages and sums by Triton are those of torch, to the bit where scales are the same."""

import math

import numpy as np
import pytest
import torch
from accordion_bench.compressors.dense_codes import in_buckets

from accordion_bench.codecs.packed_codes import pack_codes, unpack_codes
from accordion_bench.compressors.base import Context
from accordion_bench.compressors.eight_bit import Blockwise
from accordion_bench.compressors.fp4 import FP4
from accordion_bench.compressors.natural import Natural
from accordion_bench.compressors.onebit import OneBit
from accordion_bench.compressors.quantiser import Quantiser
from accordion_bench.compressors.sign import Sign
from accordion_bench.compressors.terngrad import TernaryCodes
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import kernels
from accordion_bench.tensors.counter_rng import BLOCK, block_keys, integers_of

SHORT, LONG = (1, 7, 0, 8, 9, 39, 41, 130), (4095, 4096, 4097, 20481)
WORKERS, SENDERS = [0, 3], 3


def uniform(K):
    return np.linspace(-1, 1, K).tolist()


def exponential(count):
    positive = [0.9**k for k in range(count)][::-1]
    return [-x for x in positive[::-1]] + positive


METHODS = {
    "sign": (Sign, {}),
    "sign of tensors": (Sign, {"scale": "l1"}),
    "sign of chunks": (Sign, {"scale": "l1", "block": "chunk", "block_size": 100}),
    **{f"{bits} bits": (Quantiser, {"bits": bits, "zero_level": False}) for bits in range(2, 9)},
    "zero level": (Quantiser, {"bits": 3, "bucket_size": None}),
    "balanced": (Quantiser, {"bits": 5, "bucket_size": 1000, "balanced": True, "norm": "linf"}),
    "odd buckets": (Quantiser, {"bits": 4, "bucket_size": 371, "norm": "linf"}),
    "two levels": (Quantiser, {"bits": None, "levels": [-1, 1]}),
    "ternary": (Quantiser, {"bits": None, "levels": [-1, 0, 1], "bucket_size": 3000}),
    "exponential": (Quantiser, {"bits": 4, "levels": "exponential"}),
    "symmetric": (Quantiser, {"bits": 3, "levels": exponential(4)}),
    "symmetric, 7 bits": (Quantiser, {"bits": 7, "levels": exponential(64)}),
    "any levels": (Quantiser, {"bits": None, "levels": [-1, -0.7, 0.1, 0.2, 0.9, 1]}),
    "any of 100 levels": (Quantiser, {"bits": 7, "levels": [*uniform(99)[:50], *np.linspace(0.001, 1, 50).tolist()]}),
    "terngrad": (TernaryCodes, {}),
    "natural": (Natural, {}),
    "natural, 7 bits": (Natural, {"exponent_bits": 7}),
    "e4m3": (Blockwise, {"format": "e4m3"}),
    "e5m2": (Blockwise, {"format": "e5m2", "bucket_size": None}),
    "int8": (Blockwise, {"format": "int8", "bucket_size": 100}),
    "int8 at random": (Blockwise, {"format": "int8", "rounding": "random"}),
    "fp4": (FP4, {"bucket_size": 100}),
}


def specs_of(lengths):
    return [TensorSpec(f"t{n}", (n,)) for n in lengths]


def made(kind, options, lengths, device="cpu"):
    if kind is TernaryCodes:
        return TernaryCodes({spec.name: torch.tensor(2.0, device=device) for spec in specs_of(lengths)}, "none")
    return kind(**options)


def rows(lengths, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(len(WORKERS), n, generator=generator) * 10.0 ** -(i % 4) for i, n in enumerate(lengths)]
    return [x_W.to(dtype).to(device) for x_W in drawn]


def context(lengths):
    specs = specs_of(lengths)
    return Context(2, specs, [1] * len(specs), 5, [0.1] * len(specs), {})


def by_torch(method, x_R, header_R, spec, level, ctx):
    """The packed codes of rows [R, N], by torch, with the scales of a message."""
    form, n = method.form(level), spec.numel
    scales_R, draws_R = method.shared_scales([spec.name], x_R.device), None
    if form.norm:
        scales_R = header_R.contiguous().view(torch.float32)
    if form.bits:
        keys = method.keys(ctx, spec.name, WORKERS)
        draws_R = in_buckets(integers_of(block_keys(keys, 0, -(-n // BLOCK)), form.bits)[:, :n], form.size(n))
    factor_R = None if scales_R is None else method.factors(scales_R, level, ctx)[..., None]
    streams = method.codes(in_buckets(x_R.float(), form.size(n)), factor_R, draws_R, level, ctx)
    return [pack_codes(c.flatten(1)[:, :n].contiguous(), K) for c, K in zip(streams, form.levels, strict=True)]


@pytest.mark.sample(5)
@pytest.mark.parametrize("lengths", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)], ids=["short", "long"])
@pytest.mark.parametrize("name", METHODS)
def test_codes_are_those_of_torch_for_the_same_scales(gpu, name, lengths):
    kind, options = METHODS[name]
    specs, ctx, method = specs_of(lengths), context(lengths), made(kind, options, lengths)
    level = method.bits if kind is Quantiser else 1
    there = made(kind, options, lengths, gpu.device)
    levels = [level] * len(specs)
    message_W = there.encode_all(rows(lengths, device=gpu.device), specs, levels, ctx, WORKERS).cpu()
    parts = iter(message_W.split([b for n in lengths for b in method.form(level).parts(n)], dim=1))
    for x_R, spec in zip(rows(lengths), specs, strict=True):
        header_R, own = next(parts), [next(parts) for _ in method.form(level).levels]
        norms_are_near(method, x_R, header_R, level)
        if spec.numel:
            expected = by_torch(method, x_R, header_R, spec, level, ctx)
            assert all(a.equal(b) for a, b in zip(own, expected, strict=True)), spec.numel


def norms_are_near(method, x_R, header_R, level):
    form = method.form(level)
    if form.norm and x_R.shape[1]:
        cells_R = in_buckets(x_R.float(), form.size(x_R.shape[1]))
        order = {"l1": 1, "l2": 2, "linf": math.inf}[form.norm]
        exists_R = in_buckets(torch.ones_like(x_R), form.size(x_R.shape[1]))
        scales_R = method.scales(torch.linalg.vector_norm(cells_R.double(), order, dim=2), exists_R.double().sum(2))
        bits = [scales.contiguous().view(torch.int32) for scales in (scales_R, header_R)]
        assert (bits[0] - bits[1]).abs().max() <= 2  # ulp


@pytest.mark.sample(5)
@pytest.mark.parametrize("lengths", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)], ids=["short", "long"])
@pytest.mark.parametrize("name", METHODS)
def test_sums_round_each_product_and_each_sum_once(gpu, name, lengths):
    kind, options = METHODS[name]
    specs, ctx, method = specs_of(lengths), context(lengths), made(kind, options, lengths)
    level = method.bits if kind is Quantiser else 1
    targets, dtype = 1 + len(lengths) % 2, torch.float64 if "bits" in name else torch.float32
    messages = [method.encode_all(rows(lengths), specs, [level] * len(specs), ctx, [s, s + 1]) for s in range(SENDERS)]
    message_A, before = torch.cat(messages), [x_W[:targets] for x_W in rows(lengths, dtype)]
    sums = [x_R.to(gpu.device) for x_R in before]
    there, levels = made(kind, options, lengths, gpu.device), [level] * len(specs)
    there.add_all_(dict(enumerate(sums)), message_A.to(gpu.device), specs, levels, ctx, -0.3, 7)
    parts = iter(message_A.split([b for n in lengths for b in method.form(level).parts(n)], dim=1))
    for total_R, sum_R, spec in zip(before, sums, specs, strict=True):
        header_A, own = next(parts), [next(parts) for _ in method.form(level).levels]
        expected_R = total_R.clone()
        for a in range(len(message_A)):
            values = decoded(method, header_A[a : a + 1], [codes[a : a + 1] for codes in own], spec, level, ctx, -0.3)
            expected_R[a % targets] += values
        assert sum_R.cpu().equal(expected_R / 7), spec.numel


def decoded(method, header, streams, spec, level, ctx, alpha):
    """What one message stands for, times alpha."""
    form, n = method.form(level), spec.numel
    tables = [torch.tensor(values) for values in method.values(level, ctx)]
    codes = [
        unpack_codes(packed.contiguous(), len(table), n)[0].long()
        for packed, table in zip(streams, tables, strict=True)
    ]
    values = math.prod(table[code] for table, code in zip(tables, codes, strict=True))
    scales = method.shared_scales([spec.name], values.device)
    if form.norm:
        scales = header[0].clone().view(torch.float32)
    scales = torch.ones(form.buckets(n)) if scales is None else scales
    return values * (scales * alpha).repeat_interleave(form.size(n))[:n]


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("name", ["sign of tensors", "4 bits", "ternary", "int8 at random"])
def test_what_is_not_finite_shows_in_the_sum(gpu, name, bad):
    kind, options = METHODS[name]
    lengths = (9, 300)
    method, specs, ctx = made(kind, options, lengths, gpu.device), specs_of(lengths), context(lengths)
    rows_W = rows(lengths)
    rows_W[1][1, 7] = bad
    levels = [method.bits if kind is Quantiser else 1] * 2
    message_W = method.encode_all([x_W.to(gpu.device) for x_W in rows_W], specs, levels, ctx, WORKERS)
    sums = [torch.zeros(2, n, device=gpu.device) for n in lengths]
    method.add_all_(dict(enumerate(sums)), message_W, specs, levels, ctx)
    finite = [total_R.cpu().isfinite().all(1).tolist() for total_R in sums]
    assert finite == [[True, True], [True, False]]


def test_1_bit_sgd_is_that_of_torch(gpu, monkeypatch):
    specs = [TensorSpec("a", (5, 41)), TensorSpec("b", (17,)), TensorSpec("c", (3, 2, 4))]
    ctx, method = Context(2, specs, [1] * 3, 5, [0.1] * 3, {}), OneBit()
    rows_W = rows([spec.numel for spec in specs])
    found = encoded_and_added(method, [x_W.to(gpu.device) for x_W in rows_W], specs, ctx)
    monkeypatch.setattr(kernels, "room_of", lambda xs: None)
    expected = encoded_and_added(method, rows_W, specs, ctx)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-6, atol=0)


def encoded_and_added(method, rows_W, specs, ctx):
    message_W = method.encode_all(rows_W, specs, [1] * len(specs), ctx, WORKERS)
    sums = [torch.zeros_like(x_W[:1]) for x_W in rows_W]
    method.add_all_(dict(enumerate(sums)), message_W, specs, [1] * len(specs), ctx, 0.5, 2)
    return sums


def test_tensors_without_coordinates(gpu):
    specs, method = specs_of((0, 0)), Quantiser()
    rows_W = rows((0, 0), device=gpu.device)
    message_W = method.encode_all(rows_W, specs, [4, 4], context((0, 0)), WORKERS)
    method.add_all_(dict(enumerate(rows_W)), message_W, specs, [4, 4], context((0, 0)))
    assert message_W.shape == (2, 0)
