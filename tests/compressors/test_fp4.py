"""fp4: what its sixteen codes stand for, which of them is nearest, and what messages cost."""

import itertools

import pytest
import torch

from accordion_bench.codecs.coding import E3M0_MAGNITUDES as MAGNITUDES
from accordion_bench.codecs.layout import in_blocks
from accordion_bench.compressors.number_formats import FP4
from accordion_bench.compressors.probe import payload_bytes
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec
from tests.kit.coded import coded
from tests.kit.helpers import compressor, exchange_for

POWERS = [2.0**-e for e in range(6, -1, -1)]


def twin(x_R: torch.Tensor, bucket: int | None) -> torch.Tensor:
    """What rows [R, N] decode to: of all sixteen numbers the nearest, of two equally near the one with an even code."""
    cells = in_blocks(x_R, bucket or x_R.shape[1])
    scale = cells.abs().amax(2, keepdim=True)
    steps = torch.where(scale > 0, cells * scale.reciprocal(), 0).double()
    far = (steps.abs()[..., None] - torch.tensor([0.0, *POWERS], dtype=torch.float64)).abs()
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # argmin takes the first
    code = torch.tensor(order)[far[..., order].argmin(-1)]
    value = torch.tensor([0.0, *POWERS])[code].copysign(steps.float())
    return (value * scale).flatten(1)[:, : x_R.shape[1]]


def test_its_magnitudes_are_zero_and_seven_powers_of_two():
    assert (0.0, *POWERS) == MAGNITUDES


def test_every_number_comes_back():
    x = torch.tensor([[*MAGNITUDES, *(-m for m in MAGNITUDES)]])
    message, decoded = coded(FP4(None), x)
    assert torch.equal(decoded, x)
    assert message[0, 4:].tolist() == [low | (low + 1) << 4 for low in range(0, 16, 2)]  # the code of each is its place
    assert message[0, :4].view(torch.float32).item() == 1.0


def test_ties_go_to_the_even_code():
    borders = [(low + high) / 2 for low, high in itertools.pairwise(MAGNITUDES)]
    wanted = [0.0, 2**-5, 2**-5, 2**-3, 2**-3, 2**-1, 2**-1]
    for sign in (1, -1):
        x = sign * torch.tensor([[1.0, *borders]])
        assert coded(FP4(None), x)[1][0, 1:].tolist() == [sign * value for value in wanted]
        above, below = x.nextafter(2 * x), x.nextafter(0 * x)
        above[0, 0] = below[0, 0] = x[0, 0]  # the scale stays 1
        assert coded(FP4(None), above)[1][0, 1:].tolist() == [sign * high for high in MAGNITUDES[1:]]
        assert coded(FP4(None), below)[1][0, 1:].tolist() == [sign * low for low in MAGNITUDES[:-1]]


@pytest.mark.parametrize("bucket", [None, 1, 7, 512, 1024])
@pytest.mark.parametrize("n", [1, 2, 513, 3000])
def test_the_nearest_is_that_of_the_twin(n, bucket):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(3, n, generator=generator) ** 3 * torch.logspace(-4, 3, n)
    x[1, ::3] = 0
    x[2] = 0
    assert torch.equal(coded(FP4(bucket), x)[1], twin(x, bucket))


def test_an_entry_is_off_by_a_third_of_itself_at_most():
    x = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))
    off = (coded(FP4(None), x)[1] - x).abs()
    smallest = x.abs().amax(1, keepdim=True) * 2.0**-6
    assert (off <= torch.maximum(x.abs() / 3, smallest / 2) * (1 + 1e-6)).all()


@pytest.mark.parametrize("n, bucket, nbytes", [(1, 1024, 5), (1024, 1024, 516), (5000, 1024, 2520), (4097, None, 2053)])
def test_a_message_has_four_bits_for_each_and_a_scale_per_bucket(n, bucket, nbytes):
    assert FP4(bucket).message_bytes(TensorSpec("x", (n,)), 1) == nbytes
    assert coded(FP4(bucket), torch.ones(1, n))[0].shape == (1, nbytes)


def test_it_travels_gathered_up_to_fifteen_workers():
    """From 16 on a dense all-reduce is less, as with all codes of four bits."""
    fp4, spec = compressor("fp4").compressor, TensorSpec("x", (64, 1024))
    assert payload_bytes(fp4, spec, 1, 15) == 64 * 1024 // 2 + 4 * 64
    assert payload_bytes(fp4, spec, 1, 16) == 4 * 64 * 1024
    two_way = compressor("fp4", collective="two_way").compressor
    assert payload_bytes(two_way, spec, 1, 16) == (64 * 1024 // 2 + 4 * 64) * 17 / 16


def test_sums_are_those_of_decoded_values_in_float32():
    from accordion_bench.position import StepInfo

    specs = [TensorSpec("x", (32, 64))]
    xs_W = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(3))
    exchange, plan = exchange_for("fp4", 4, specs=specs, dtype=torch.float32)
    (update,) = exchange([xs_W.clone()], StepInfo(plan, 0, 0.1))
    sent_W = twin(xs_W.flatten(1), 1024)
    total = torch.zeros(32 * 64)
    for sent in sent_W:
        total += sent
    assert torch.equal(update.flatten(), total / 4)


@pytest.mark.parametrize("bucket_size", [0, -1, 1.5, "x", True])
def test_what_is_no_size_is_refused(bucket_size):
    with pytest.raises(ConfigError, match="bucket_size must be"):
        FP4(bucket_size)
