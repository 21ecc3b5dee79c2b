"""Dense codes of all tensors at once, on a pretended device: the same messages and the same sums as one by one."""

import math

import pytest
import torch
from accordion_bench.compressors.chunks import Chunks
from accordion_bench.compressors.dense_codes import DenseCodes

from accordion_bench.compressors.base import Context
from accordion_bench.compressors.eight_bit import Blockwise
from accordion_bench.compressors.fp4 import FP4
from accordion_bench.compressors.natural import Natural
from accordion_bench.compressors.quantiser import Quantiser
from accordion_bench.compressors.sign import Sign
from accordion_bench.compressors.terngrad import TernaryCodes
from accordion_bench.conformance.pretend_device import DEVICE, pretended
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.counter_rng import BLOCK

LENGTHS = (1, 7, 512, 513, 4096, 5000, 20480, 30001)
SPECS = [TensorSpec(f"t{n}", (n,)) for n in LENGTHS]
WORKERS = [0, 3]
CTX = Context(2, SPECS, [1] * len(SPECS), 5, [0.1] * len(SPECS), {})
LEVELS = [-1, -0.7, 0.1, 0.2, 0.9, 1]


def made(kind: type[DenseCodes], **options) -> DenseCodes:
    if kind is TernaryCodes:
        return TernaryCodes({spec.name: torch.tensor(2.0) for spec in SPECS}, "none")
    return kind(**options)


METHODS = {
    "sign": (Sign, {}),
    "sign of tensors": (Sign, {"scale": "l1"}),
    "sign of chunks": (Sign, {"scale": "l1", "block": "chunk", "block_size": 512}),
    "sign of long chunks": (Sign, {"scale": "l1", "block": "chunk", "block_size": 8192}),
    "qsgd": (Quantiser, {}),
    "qsgd of tensors": (Quantiser, {"bucket_size": None, "norm": "linf"}),
    "2 bits": (Quantiser, {"bits": 2, "bucket_size": 8192}),
    "3 bits": (Quantiser, {"bits": 3, "zero_level": False}),
    "8 bits": (Quantiser, {"bits": 8, "bucket_size": 1024, "norm": "linf"}),
    "exponential": (Quantiser, {"bits": 4, "levels": "exponential"}),
    "any levels": (Quantiser, {"bits": None, "levels": LEVELS}),
    "ternary": (Quantiser, {"bits": None, "levels": [-1, 0, 1], "bucket_size": 8192, "norm": "linf"}),
    "terngrad": (TernaryCodes, {}),
    "fp8": (Blockwise, {"format": "e4m3"}),
    "fp8 with a wide range": (Blockwise, {"format": "e5m2", "bucket_size": None}),
    "int8 at random": (Blockwise, {"format": "int8", "rounding": "random"}),
    "fp4": (FP4, {}),
    "fp4 of tensors": (FP4, {"bucket_size": None}),
    "natural": (Natural, {}),
    "natural, 7 bits": (Natural, {"exponent_bits": 7}),
}


def sums_of(method: DenseCodes, xs_W: list[torch.Tensor], level: float, rows: int = 1):
    """The messages, and their sums."""
    levels = [level] * len(SPECS)
    messages = method.encode_all(xs_W, SPECS, levels, CTX, WORKERS)
    sums = {i: torch.zeros(rows, spec.numel, device=xs_W[0].device) for i, spec in enumerate(SPECS)}
    method.add_all_(sums, messages, SPECS, levels, CTX)
    return messages, list(sums.values())


def rows(zero: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(len(WORKERS), n, generator=generator) * (0 if zero else 10.0**-i) for i, n in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize("name", METHODS)
def test_messages_and_sums_are_those_of_one_by_one(name):
    kind, options = METHODS[name]
    method, xs_W = made(kind, **options), rows()
    level = method.bits if kind is Quantiser else 1
    with pretended() as counts:
        there, on_device = [x.to(DEVICE) for x in xs_W], made(kind, **options)
        if kind is TernaryCodes:
            on_device.known = {key: value.to(DEVICE) for key, value in method.known.items()}
        sums_of(on_device, there, level)  # tables are uploaded, once
        counts.reset()
        messages, sums = sums_of(on_device, there, level)
        assert not counts.waits and sum(counts.launches.values()) <= 75
        messages, sums = messages.cpu(), [s.cpu() for s in sums]
    different = 0
    sizes = [method.message_bytes(spec, level) for spec in SPECS]
    for x_W, message, total, spec in zip(xs_W, messages.split(sizes, dim=1), sums, SPECS, strict=True):
        one_by_one = method.encode(x_W, spec, level, CTX, method.keys(CTX, spec.name, WORKERS))
        assert message.shape == one_by_one.shape
        decoded, expected = torch.zeros(2, spec.numel), torch.zeros(2, spec.numel)
        method.add_decoded_(decoded, message[None], spec, level, CTX)
        method.add_decoded_(expected, one_by_one[None], spec, level, CTX)
        apart = (decoded - expected).abs() > 1e-6 * expected.abs().max()
        different += int(apart.sum())  # a norm's last bit moves what lies on a border
        torch.testing.assert_close(total[0], decoded.sum(0), rtol=1e-6, atol=1e-6 * float(decoded.abs().max()))
    assert different <= 3


@pytest.mark.parametrize("options", [{"bucket_size": 1000}, {"balanced": True}])
def test_buckets_that_fit_no_chunk_go_one_by_one(options):
    with pretended():
        there, method = [x.to(DEVICE) for x in rows()], Quantiser(**options)
        assert method._chunks(SPECS, method.form(4), there[0].device) is None
        messages, sums = (sums_of(method, there, 4)[0].cpu(), [s.cpu() for s in sums_of(method, there, 4)[1]])
    here, on_cpu = sums_of(method, rows(), 4)
    assert (messages != here).float().mean() < 0.001  # a norm's last bit
    for total, other in zip(sums, on_cpu, strict=True):
        torch.testing.assert_close(total, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()) + 1e-30)


def test_zero_tensors_decode_to_zeros():
    method = Quantiser()
    with pretended():
        _, sums = sums_of(method, [x.to(DEVICE) for x in rows(zero=True)], 4)
        assert not any(total.cpu().any() for total in sums)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["sign of tensors", "qsgd", "ternary", "fp8", "fp4", "int8 at random"])
def test_what_is_not_finite_shows_in_the_sum(name, bad):
    kind, options = METHODS[name]
    method, xs_W = made(kind, **options), rows()
    xs_W[5][1, 3] = bad
    level = method.bits if kind is Quantiser else 1
    with pretended():
        sums = [total.cpu() for total in sums_of(method, [x.to(DEVICE) for x in xs_W], level)[1]]
    assert [bool(total.isfinite().all()) for total in sums] == [i != 5 for i in range(len(SPECS))]


@pytest.mark.parametrize("rows_of", [1, 2])
def test_each_sender_goes_to_its_row(rows_of):
    method, xs_W = Sign(), rows()
    with pretended():
        sums = [total.cpu() for total in sums_of(method, [x.to(DEVICE) for x in xs_W], 1, rows_of)[1]]
    signs = [torch.where(x < 0, -1.0, 1.0).view(-1, rows_of, x.shape[1]).sum(0) for x in xs_W]
    assert all(total.equal(sign) for total, sign in zip(sums, signs, strict=True))


@pytest.mark.parametrize("bucket", [None, 512, BLOCK, 2 * BLOCK])
@pytest.mark.parametrize("ord", [1, 2, math.inf])
def test_norms_of_buckets(bucket, ord):
    chunks, xs_W = Chunks(LENGTHS, BLOCK, bucket, torch.device("cpu")), rows()
    x_W = chunks.joined(xs_W)
    assert all(a.equal(b) for a, b in zip(chunks.rows(x_W), xs_W, strict=True))
    norms_W = chunks.norms(x_W, ord)
    spread_W = chunks.spread(norms_W).repeat_interleave(BLOCK // chunks.parts, dim=2)
    for own_W, of_each_W, x in zip(chunks.headers(norms_W), chunks.rows(spread_W), xs_W, strict=True):
        parts = x.double().split(bucket or x.shape[1], dim=1)
        expected = torch.stack([torch.linalg.vector_norm(part, ord, dim=1) for part in parts], dim=1)
        torch.testing.assert_close(own_W, expected)
        lengths = torch.tensor([part.shape[1] for part in parts])
        torch.testing.assert_close(of_each_W, expected.repeat_interleave(lengths, dim=1))
    entries = chunks.headers(chunks.entries[None])
    assert [e[0].tolist() for e in entries] == [[p.shape[1] for p in x.split(bucket or x.shape[1], 1)] for x in xs_W]
    headers = [h.float().view(torch.uint8) for h in chunks.headers(norms_W)]
    back = chunks.headers(chunks.joined_headers(headers))
    assert all(a.equal(b.float()) for a, b in zip(back, chunks.headers(norms_W), strict=True))
