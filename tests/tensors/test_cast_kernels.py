"""Casts by kernels: the bits of torch's own conversions."""

import pytest
import torch

from accordion_bench.tensors import kernels, sixteen_bits
from tests.kit.gpu import gpu_for_triton

pytestmark = pytest.mark.skipif(not kernels.installed(), reason="needs numba, the extra fast")

TYPES = (torch.float16, torch.bfloat16)


def every_half() -> torch.Tensor:
    """All numbers of float16, among them NaN, infinity and denormals, as float32."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).float()


def hard_numbers() -> torch.Tensor:
    """Numbers beside every float16 and every bfloat16, where rounding tips over, and any bits at all."""
    generator = torch.Generator().manual_seed(0)
    brains = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    beside = [brains + step for step in (0, 1, -1, 0x7FFF, 0x8000, 0x8001)]
    beside += [every_half().view(torch.int32) + step for step in (0, 1, -1, 0x0FFF, 0x1000, 0x1001)]
    anything = torch.randint(-(2**31), 2**31, (50_001,), generator=generator, dtype=torch.int64).int()
    return torch.cat([*beside, anything]).view(torch.float32)


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal bit by bit, but for which NaN it is."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    bits = torch.int16 if ours.element_size() == 2 else torch.int32 if ours.element_size() == 4 else torch.int64
    nan = ours.isnan()
    return torch.equal(nan, theirs.isnan()) and torch.equal(ours[~nan].view(bits), theirs[~nan].view(bits))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_shares_have_the_bits_of_torch_s_conversion(dtype, workers):
    x_W = hard_numbers()[None]
    theirs = (x_W[0] / workers).to(dtype)
    if dtype == torch.float16:
        most = sixteen_bits.largest_share(workers, dtype)
        theirs = theirs.clamp(-most, most)
    assert same_bits(sixteen_bits.sum_of_shares([x_W], workers, dtype), theirs)
    wide = sixteen_bits.widened(theirs, torch.float32)
    assert same_bits(wide, theirs.float()) and same_bits(sixteen_bits.widened(theirs, torch.float64), theirs.double())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_sums_and_what_was_sent_are_those_of_the_torch_path(dtype, rows, wide, monkeypatch):
    """Odd lengths, nothing, several tiles, strides, tensors of no dimensions, one thread and two."""
    generator = torch.Generator().manual_seed(rows)
    shapes = [(3, 5), (0,), (), (sixteen_bits.TILE * 17 + 3,), (2, 0, 3), (1,)]
    xs_W = [torch.randn(rows, *shape, generator=generator, dtype=wide) * 10.0**6 for shape in shapes]
    xs_W += [torch.randn(rows, 7, 6, generator=generator, dtype=wide).transpose(1, 2)]
    xs_W += [torch.randn(2 * rows, 4, 9, generator=generator, dtype=wide)[::2, ::2]]
    xs_W += [torch.randn(rows, 3, 11, generator=generator, dtype=wide)[:, 1]]
    targets_W = [torch.randn(x_W.shape, generator=generator, dtype=wide) for x_W in xs_W]

    def results():
        own = [target_W.clone() for target_W in targets_W]
        sixteen_bits.subtract_shares_(own, xs_W, 7, dtype)
        return [sixteen_bits.sum_of_shares(xs_W, 7, dtype), *own]

    with monkeypatch.context() as absent:
        absent.setattr(kernels, "installed", lambda: False)
        theirs = results()
    kept = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert all(same_bits(mine, other) for mine, other in zip(results(), theirs, strict=True)), threads
    finally:
        torch.set_num_threads(kept)


def test_a_processor_that_knows_no_float16_leaves_it_to_torch(monkeypatch):
    from accordion_bench.tensors.kernels import casts as by_kernel

    monkeypatch.setattr(by_kernel, "converts_float16", lambda: False)
    monkeypatch.setattr(by_kernel, "sum_of_shares", None)
    xs_W = [torch.tensor([[1.0, 1e30, -1e30]])]
    assert sixteen_bits.sum_of_shares(xs_W, 1, torch.float16).tolist() == [1, 65_504, -65_504]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "workers"), [(1, 1), (1, 3), (4, 4), (2, 6)])
def test_triton_has_the_bits_of_torch(dtype, rows, workers):
    """Numbers beside every bfloat16 and float16, lengths that fill no slice, nothing, rows apart."""
    generator = torch.Generator().manual_seed(1)
    hard = hard_numbers()
    hard = hard[torch.randperm(len(hard), generator=generator)[: rows * 20_000]].view(rows, -1)
    xs_W = [hard, torch.randn(rows, 3, 5, generator=generator), torch.zeros(rows, 0), -torch.zeros(rows, 4096)]
    theirs = sixteen_bits.share(sixteen_bits.side_by_side(xs_W).double().div(workers).float(), 1, dtype)
    if dtype == torch.float16:
        most = sixteen_bits.largest_share(workers, dtype)
        theirs = theirs.clamp(-most, most)
    total = theirs[0] if rows == 1 else sum(theirs.float(), torch.zeros(theirs.shape[1])).to(dtype)
    with gpu_for_triton() as there, torch.no_grad():
        ours = sixteen_bits.sum_of_shares([x_W.to(there.device) for x_W in xs_W], workers, dtype)
        wide = [sixteen_bits.widened(total.to(there.device), kind).cpu() for kind in (torch.float32, torch.float64)]
    assert same_bits(ours.cpu(), total)
    assert same_bits(wide[0], total.float()) and same_bits(wide[1], total.double())
