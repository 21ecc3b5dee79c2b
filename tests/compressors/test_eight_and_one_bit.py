"""Signs, 1-bit SGD, TernGrad, natural, fp8 and int8: their definitions, on small tensors."""

import math

import pytest
import torch

from accordion_bench.codecs.coding import FORMATS
from accordion_bench.compressors.number_formats import Blockwise, Natural, coding_of
from accordion_bench.compressors.probe import payload_bytes
from accordion_bench.compressors.quantiser import TernGrad
from accordion_bench.compressors.sign import OneBit, Sign
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from tests.codecs.kit import bucket_of
from tests.kit.coded import coded
from tests.kit.helpers import exchange_for, gradients, residuals


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---- signs


def test_bit_order_and_the_sign_of_zero_are_pinned():
    x = torch.tensor([[-1.0, 2.0, -0.0, 0.0, -3.0, 4.0, 5.0, -6.0, 7.0, -8.0]])
    message, signs = coded(Sign(), x)
    assert message[0].tolist() == [0b10010001, 0b10]
    assert signs[0].tolist() == [-1, 1, 1, 1, -1, 1, 1, -1, 1, -1]
    message, scaled = coded(Sign("l1"), x)
    assert message[0].tolist()[4:] == [0b10010001, 0b10]
    assert scaled[0].tolist() == pytest.approx([3.6 * s for s in signs[0].tolist()])


@pytest.mark.parametrize("block, block_size", [("tensor", None), ("chunk", 100), ("chunk", 1000)])
def test_scaled_sign_identities(block, block_size):
    """<C(v), v - C(v)> = 0, ||C(v)||_1 = ||v||_1, the exact loss, C(C(v)) = C(v), C(a v) = a C(v); with zeros in v."""
    v = normal(3, 730).double()
    v[:, ::7] = 0
    compressor = Sign("l1", block, block_size)
    decoded = coded(compressor, v)[1].double()
    size = block_size or 730
    for row, c in zip(v, decoded, strict=True):
        for part, sent in zip(row.split(size), c.split(size), strict=True):
            assert abs(float(sent @ (part - sent))) < 1e-6 * float(part @ part)
            assert float(sent.abs().sum()) == pytest.approx(float(part.abs().sum()), rel=1e-6)
            loss = float(part @ part) - float(part.abs().sum()) ** 2 / len(part)
            assert float((part - sent).square().sum()) == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(coded(compressor, decoded)[1].double(), decoded, rtol=1e-6, atol=0)
    torch.testing.assert_close(coded(compressor, 4 * v)[1].double(), 4 * decoded, rtol=1e-6, atol=0)
    assert (coded(compressor, torch.zeros(1, 730))[1] == 0).all()


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
def test_majority_vote_is_the_sign_of_the_sum_of_signs(workers):
    """Exactly, ties to +1, one bit up and one down."""
    exchange, plan = exchange_for("signsgd", workers, collective="two_way", ties="plus", dtype=torch.float32)
    xs_W = gradients(workers=workers, dtype=torch.float32).tensors
    voted = exchange.compressor
    assert voted.traits.reduces == "vote"
    ups = 0
    for x_W, spec, update in zip(xs_W, exchange.sent, exchange(xs_W, StepInfo(plan, 0, 0.1)), strict=True):
        if voted.pays(spec, 1, workers):
            total = torch.where(x_W < 0, -1, 1).sum(0)
            assert torch.equal(update, torch.where(total < 0, -1.0, 1.0))
            ups += sum(-(-(p.stop - p.start) // 8) for p in voted.pieces[spec.name])
    assert exchange.comm.ledger.columns()["payload_bytes"] == exchange.predicted_bytes(StepInfo(plan, 0))
    assert ups * 20 < 4 * sum(s.numel for s in exchange.sent)


def test_tied_votes_are_fair_coins():
    """Two workers of opposite signs: half of the ties go up, others in every step; what is not tied stays."""
    specs = [TensorSpec("x", (1, 20_000))]
    exchange, plan = exchange_for("signsgd", 2, specs=specs, collective="two_way", dtype=torch.float32)
    x = normal(1, 1, 20_000)
    votes = [exchange([torch.cat([x, -x])], StepInfo(plan, step, 0.1))[0] for step in range(2)]
    for vote in votes:
        assert abs(float(vote.mean())) < 4 / math.sqrt(20_000)
    assert abs(float((votes[0] * votes[1]).mean())) < 4 / math.sqrt(20_000)
    assert torch.equal(exchange([torch.cat([x, x])], StepInfo(plan, 2, 0.1))[0], torch.where(x[0] < 0, -1.0, 1.0))


def test_blocks_of_whole_buckets_share_a_scale():
    """block=bucket: consecutive tensors as one vector, as in a flattened bucket."""
    exchange, plan = exchange_for("efsignsgd", 2, block="bucket", block_size=3000, error_feedback=False)
    xs_W = gradients(workers=2).tensors
    updates = exchange(xs_W, StepInfo(plan, 0, 0.1))
    assert 1 < len(exchange.sent) < len(exchange.specs) and all(s.numel <= 3000 for s in exchange.sent)
    first = [i for unit in exchange.units[:1] for i in unit]
    flat_W = torch.cat([xs_W[i].flatten(1) for i in first], dim=1)
    expected = (flat_W.abs().mean(1, keepdim=True).float().double() * torch.where(flat_W < 0, -1, 1)).mean(0)
    torch.testing.assert_close(torch.cat([updates[i].flatten() for i in first]), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["efsignsgd", "onebit"])
@pytest.mark.parametrize("workers", [1, 4])
def test_a_constant_gradient_gets_through(name, workers):
    """The running mean of updates goes to the gradient, whatever the number of workers and the learning rate."""
    specs = [TensorSpec("matrix", (12, 10)), TensorSpec("vector", (7,))]
    exchange, plan = exchange_for(name, workers, specs=specs)
    xs_W = gradients(specs, workers=workers).tensors
    steps, total = 200, [torch.zeros_like(x[0]) for x in xs_W]
    for step in range(steps):
        for t, u in zip(total, exchange(xs_W, StepInfo(plan, step, 0.1)), strict=True):
            t += u
    for t, x in zip(total, xs_W, strict=True):
        assert (t / steps - x.mean(0)).norm() <= 0.2 * x.mean(0).norm()


# ---- 1-bit SGD


def test_onebit_centroids_are_the_means_of_each_column():
    x = normal(2, 6 * 10)
    x[0, :10] = x[0, :10].abs()  # a column without negative entries
    decoded = coded(OneBit(), x, shape=(6, 10))[1].view(2, 6, 10)
    for row, sent in zip(x.view(2, 6, 10), decoded, strict=True):
        for column, values in zip(row, sent, strict=True):
            for part in (column < 0, column >= 0):
                if part.any():
                    mean = float(column[part].mean())
                    assert values[part].tolist() == pytest.approx([mean] * int(part.sum()), rel=1e-5)
    # no other two values per column lose less
    lost = (x.view(2, 6, 10) - decoded).square().sum()
    for shift in (0.02, -0.02):
        assert (x.view(2, 6, 10) - decoded - shift).square().sum() > lost


# ---- TernGrad


def test_terngrad_shares_one_scale_and_sends_five_to_a_byte():
    exchange, plan = exchange_for("terngrad", 4, clip=None, dtype=torch.float32)
    xs_W = gradients(dtype=torch.float32).tensors
    updates = exchange(xs_W, StepInfo(plan, 0, 0.1))
    for x_W, update, spec in zip(xs_W, updates, exchange.sent, strict=True):
        if exchange.compressor.pays(spec, 1, 4):
            steps = update * 4 / x_W.abs().max()
            torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-5)
            assert payload_bytes(exchange.compressor, spec, 1, 4) == math.ceil(spec.numel / 5) + 4


def test_terngrad_clips_at_so_many_standard_deviations():
    x_W = normal(2, 1, 5000)
    x_W[0, 0, 0] = 1000.0
    compressor = TernGrad(clip=2.5)
    bucket = bucket_of([x_W.flatten(1)])
    assert float(compressor.largest_of(bucket)[0]) == pytest.approx(2.5 * float(x_W[0].std()), rel=1e-5)
    assert float(TernGrad(clip=None).largest_of(bucket)[0]) == 1000.0


@pytest.mark.parametrize("n", [2, 9, 10, 1000, 65_536])
def test_terngrad_cuts_nothing_where_all_entries_are_alike(n):
    values = torch.rand(40, 1, 1, generator=torch.Generator().manual_seed(n)) + 0.01
    buckets = [bucket_of([value.repeat(1, n)]) for value in values]
    found = [float(TernGrad().largest_of(bucket)[0]) for bucket in buckets]
    assert found == [float(value) for value in values]


def test_terngrads_entropy_counts_the_shared_scales():
    counts = []
    for entropy in ("none", "huffman"):
        exchange, plan = exchange_for("terngrad", 4, dtype=torch.float32, entropy=entropy)
        exchange(gradients(dtype=torch.float32).tensors, StepInfo(plan, 0, 0.1))
        counts.append(exchange.comm.ledger.columns())
    scales = 4 * sum(exchange.compressor.pays(spec, 1, 4) for spec in exchange.sent)
    dense = 4 * sum(spec.numel for spec in exchange.sent if not exchange.compressor.pays(spec, 1, 4))
    assert scales + dense < counts[1]["entropy_bytes"] < counts[1]["payload_bytes"] == counts[0]["payload_bytes"]


# ---- natural


def test_natural_rounds_to_neighbouring_powers_without_bias():
    x = torch.tensor([[4 / 3, -1.5, 1.0, -2.0, 0.0, 3.999, 1e-39, -5e30]]).repeat(1, 500)
    total, squares, steps = torch.zeros(x.shape[1]).double(), 0.0, 40
    for step in range(steps):
        decoded = coded(Natural(), x, step=step)[1].double()[0]
        size = decoded.abs()
        nonzero = size[size > 0]
        assert (torch.log2(nonzero) == torch.log2(nonzero).round()).all()
        total += decoded
        squares += decoded.square()
    means = (total / steps).view(500, 8).mean(0)
    for value, mean in zip(x[0, :8].double().tolist(), means.tolist(), strict=True):
        low = 2.0 ** math.floor(math.log2(abs(value))) if value else 0.0
        deviation = math.sqrt(max(0.0, (2 * low - abs(value)) * (abs(value) - low)) / (500 * steps))
        assert abs(mean - value) <= 4 * deviation + 1e-7 * abs(value) or abs(value) < 1e-37
    second = (squares / steps).view(500, 8).mean(0)
    assert float(second[0] / (4 / 3) ** 2) == pytest.approx(9 / 8, rel=0.01)  # the worst mantissa


@pytest.mark.parametrize("bits, size", [(8, 9), (7, 8)])
def test_natural_sends_nine_or_eight_bits(bits, size):
    for n in range(1, 50):
        expected = math.ceil(9 * n / 8) if bits == 8 else 8 * math.ceil(n / 8)
        assert Natural(bits).message_bytes(TensorSpec("x", (n,)), 1) == expected
    assert size * 8 == Natural(bits).message_bytes(TensorSpec("x", (64,)), 1)


def test_natural_with_seven_exponent_bits_keeps_its_mean_below_its_range():
    x = torch.full((1, 200_000), 2.0**-65)
    mean = float(coded(Natural(7), x)[1].double().mean())
    assert mean == pytest.approx(2.0**-65, rel=0.02)
    assert float(coded(Natural(7), torch.tensor([[2.0**100]]))[1]) == 2.0**63


# ---- fp8 and int8


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_every_finite_fp8_number_comes_back(format):
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(FORMATS[format]).float()
    finite = values.isfinite()
    x = values[finite][None]
    assert torch.equal(coded(Blockwise(format, None), x)[1], x)  # the largest number gives the scale 1
    assert float(x.max()) == coding_of(format, False).largest


@pytest.mark.parametrize("format, relative", [("e4m3", 2**-4), ("e5m2", 2**-3)])
def test_fp8_error_is_within_its_mantissa(format, relative):
    x = normal(2, 5000)
    compressor = Blockwise(format, 512)
    decoded = coded(compressor, x)[1]
    small = x.abs() < 1e-2 if format == "e4m3" else x.abs() < 1e-4
    assert ((decoded - x).abs() <= relative * x.abs() * (1 + 1e-5))[~small].all()
    assert compressor.message_bytes(TensorSpec("x", (5000,)), 1) == 5000 + 4 * 10


def test_int8_nearest_is_off_by_half_a_step_and_random_is_unbiased():
    x = normal(1, 3000)
    step = float(x.abs().max()) / 127
    nearest = coded(Blockwise("int8", None), x)[1]
    assert float((nearest - x).abs().max()) <= step / 2 * (1 + 1e-4)
    draws = torch.stack([coded(Blockwise("int8", None, "random"), x, step=s)[1][0] for s in range(300)]).double()
    assert float((draws - x.double()).abs().max()) <= step * (1 + 1e-4)
    r = x.double()[0] / step
    variance = (step**2 * (r.ceil() - r) * (r - r.floor())).sum()
    deviation = (draws.mean(0) - x.double()[0]).square().sum() * 300
    assert float(deviation / variance) == pytest.approx(1, abs=4 * math.sqrt(2 / 3000) * 1.5)


@pytest.mark.parametrize("n", [1, 2, 511, 512, 513, 1024, 70_000])
@pytest.mark.parametrize("bucket", [None, 1, 512, 65_537])
def test_buckets_of_any_size_have_their_own_scale(n, bucket):
    x = normal(1, n) * torch.logspace(-3, 3, n)
    if bucket == 1 and n > 2000:
        return
    compressor = Blockwise("int8", bucket)
    decoded = coded(compressor, x)[1]
    for part, sent in zip(x[0].split(bucket or n), decoded[0].split(bucket or n), strict=True):
        assert float((part - sent).abs().max()) <= float(part.abs().max()) / 253


def test_residuals_of_signs_stay_bounded():
    exchange, plan = exchange_for("efsignsgd", 4)
    for step in range(50):
        exchange(gradients(step=step).tensors, StepInfo(plan, step, 0.1))
    assert all(float(e.norm()) < 20 * float(e.numel()) ** 0.5 for e in residuals(exchange).values())


def test_the_residual_of_natural_stays_below_a_gradient():
    """||e|| <= sqrt(1/8) (||g|| + ||e||) in the mean, so that it settles below 0.55 ||g||."""
    exchange, plan = exchange_for("natural", 4, error_feedback=True)
    largest = 0.0
    for step in range(200):
        tensors = gradients(step=step).tensors
        largest = max(largest, *(float(x.norm()) for x in tensors))
        exchange(tensors, StepInfo(plan, step, 0.1))
    kept = [float(e.norm()) for e in residuals(exchange).values()]
    assert 0 < max(kept) < 0.55 * largest
