"""Dense codes of all tensors at once, on a pretended device: the same messages and the same sums as one by one."""

import math

import pytest
import torch

from accordion_bench.compressors.base import Context
from accordion_bench.compressors.chunks import Chunks
from accordion_bench.compressors.dense_codes import DenseCodes
from accordion_bench.compressors.eight_bit import Blockwise
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
    "natural": (Natural, {}),
    "natural, 7 bits": (Natural, {"exponent_bits": 7}),
}


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
            on_device.scales = {key: value.to(DEVICE) for key, value in method.scales.items()}
        warm = on_device.encode_many(there, SPECS, level, CTX, WORKERS)
        on_device.sums_of_many(warm, SPECS, level, CTX)  # tables are uploaded, once
        counts.reset()
        messages = on_device.encode_many(there, SPECS, level, CTX, WORKERS)
        sums = on_device.sums_of_many(messages, SPECS, level, CTX)
        assert not counts.waits and sum(counts.launches.values()) <= 70
        messages, sums = [m.cpu() for m in messages], [s.cpu() for s in sums]
    different = 0
    for i, (message, total, spec) in enumerate(zip(messages, sums, SPECS, strict=True)):
        own = [Alone(worker) for worker in WORKERS]
        one_by_one = [method.encode_rows([x[w : w + 1] for x in xs_W], CTX, [i], level, own[w])[0] for w in (0, 1)]
        assert message.shape == (2, one_by_one[0].shape[1])
        decoded, expected = torch.zeros(2, spec.numel), torch.zeros(2, spec.numel)
        method.add_decoded_(decoded, message[None], spec, level, CTX)
        method.add_decoded_(expected, torch.cat(one_by_one)[None], spec, level, CTX)
        apart = (decoded - expected).abs() > 1e-6 * expected.abs().max()
        different += int(apart.sum())  # a norm's last bit moves what lies on a border
        torch.testing.assert_close(total[0], decoded.sum(0), rtol=1e-6, atol=1e-6 * float(decoded.abs().max()))
    assert different <= 3


class Alone:
    """What `encode_rows` asks of collectives: one worker, of this number."""

    def __init__(self, worker: int) -> None:
        self.local, self.local_workers, self.first_named = range(worker, worker + 1), 1, worker


@pytest.mark.parametrize("options", [{"bucket_size": 1000}, {"balanced": True}])
def test_buckets_that_fit_no_chunk_go_one_by_one(options):
    with pretended():
        assert Quantiser(**options).encode_many([x.to(DEVICE) for x in rows()], SPECS, 4, CTX, WORKERS) is None


def test_zero_tensors_decode_to_zeros():
    method = Quantiser()
    with pretended():
        messages = method.encode_many([x.to(DEVICE) for x in rows(zero=True)], SPECS, 4, CTX, WORKERS)
        assert not any(total.cpu().any() for total in method.sums_of_many(messages, SPECS, 4, CTX))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["sign of tensors", "qsgd", "ternary", "fp8", "int8 at random"])
def test_what_is_not_finite_shows_in_the_sum(name, bad):
    kind, options = METHODS[name]
    method, xs_W = made(kind, **options), rows()
    xs_W[5][1, 3] = bad
    level = method.bits if kind is Quantiser else 1
    with pretended():
        messages = method.encode_many([x.to(DEVICE) for x in xs_W], SPECS, level, CTX, WORKERS)
        sums = [total.cpu() for total in method.sums_of_many(messages, SPECS, level, CTX)]
    assert [bool(total.isfinite().all()) for total in sums] == [i != 5 for i in range(len(SPECS))]


@pytest.mark.parametrize("rows_of", [1, 2])
def test_each_sender_goes_to_its_row(rows_of):
    method, xs_W = Sign(), rows()
    with pretended():
        messages = method.encode_many([x.to(DEVICE) for x in xs_W], SPECS, 1, CTX, WORKERS)
        sums = [total.cpu() for total in method.sums_of_many(messages, SPECS, 1, CTX, rows=rows_of)]
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
