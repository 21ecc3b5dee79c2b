"""Quantisers and codebook policies: variance as predicted, exact bytes, levels that a policy fits."""

import math
from dataclasses import replace

import pytest
import torch

from accordion_bench import train
from accordion_bench.adaptive.distributions import TruncatedNormals
from accordion_bench.adaptive.fitted_codebook import FittedCodebook
from accordion_bench.adaptive.level_solvers import alq
from accordion_bench.codecs import packed_codes
from accordion_bench.codecs.bucket import Bucket
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors import dense
from accordion_bench.compressors.compressor import Context, NonFinite
from accordion_bench.compressors.probe import Buckets, bucket_table, buckets_of
from accordion_bench.compressors.quantiser import Quantiser, exponential, uniform
from accordion_bench.config.components import build_components
from accordion_bench.exchange.dry_exchange import cut_into_buckets, probe_exchange
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import (
    BucketMoments,
    CoordinateHistogram,
    Ladder,
    Plan,
    PooledMoments,
    RunFacts,
    Signals,
    TensorSpec,
)
from accordion_bench.position import StepInfo
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.signals.statistics import BucketStatistics
from tests.kit import composed
from tests.kit.coded import bucket_of, coded
from tests.kit.helpers import exchange_for, gradients

BOOKS = {
    "uniform": {"levels": "uniform", "zero_level": False},
    "uniform, zero": {"levels": "uniform", "zero_level": True},
    "exponential": {"levels": "exponential", "zero_level": False},
    "exponential, zero": {"levels": "exponential", "zero_level": True},
    "any": {"levels": [-1, -0.3, -0.05, 0.1, 0.4, 0.7, 0.9, 1], "bits": None},
}


def variance(quantiser, *args):
    return quantiser.description.claims.variance(quantiser, *args)


def decoded(quantiser, x, step, codebooks=None):
    return coded(quantiser, x, level=quantiser.level or 1, step=step, codebooks=codebooks)[1]


@pytest.mark.sample(5)
@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("book", BOOKS)
def test_predicted_variance_is_the_measured_one(book, norm):
    """Over 400 draws of 5,000 coordinates in buckets of 512, tail included: within 2 %."""
    quantiser = Quantiser(**{"bits": 3, **BOOKS[book]}, norm=norm, bucket_size=512)
    x = torch.randn(1, 5000, generator=torch.Generator().manual_seed(1))
    measured = torch.stack([(decoded(quantiser, x, step) - x).double().square().sum() for step in range(400)]).mean()
    spec = TensorSpec("x", (1, 5000))
    predicted = variance(quantiser, x, spec, quantiser.level or 1, Context(0, [spec], [1]))
    assert float(measured / predicted[0]) == pytest.approx(1, abs=0.02)


def test_alq_at_3_bits_reaches_its_variance():
    """Gaussian buckets of 16,384 under L2: 0.2291 of the energy is lost, with exact levels from their distribution."""
    d, quantiser = 16_384, Quantiser(bits=3, bucket_size=16_384, zero_level=False)
    one = torch.ones(1, dtype=torch.float64)
    fit = alq(TruncatedNormals(0 * one, d**-0.5 * one, one), 3, False)
    assert d * fit.psi == pytest.approx(0.229074, abs=1e-5)
    x = torch.randn(8, d, generator=torch.Generator().manual_seed(2))
    lost = torch.stack([(decoded(quantiser, x, s, {3: fit.levels}) - x).square().sum(1) for s in range(10)]).mean(0)
    assert float((lost / x.square().sum(1)).mean()) == pytest.approx(d * fit.psi, rel=0.02)


@pytest.mark.parametrize("n, bucket, message", [(464_154, 8192, 174_288), (1_727_962, 16384, 648_412)])
def test_published_sizes_with_a_quantised_tail(n, bucket, message):
    quantiser = Quantiser(bits=3, bucket_size=bucket, zero_level=False)
    assert quantiser.message_bytes(TensorSpec("x", (1, n)), 3) == message


def test_balanced_buckets_have_no_tiny_tail():
    plain, balanced = Quantiser(bucket_size=512), Quantiser(bucket_size=512, balanced=True)
    for n in (1, 511, 512, 513, 1025, 5000):
        sizes = [method.blocks(TensorSpec("x", (n,))) for method in (plain, balanced)]
        count = -(-n // sizes[0])
        assert -(-n // sizes[1]) == count
        assert sizes[1] - (n - (count - 1) * sizes[1]) < count + 1


def test_identical_zero_and_level_coordinates_come_back():
    quantiser = Quantiser(bits=4, norm="linf", bucket_size=None)
    x = torch.tensor([[7.0, -7.0, 0.0, 3.0, -1.0, 5.0]])  # multiples of 1/7 of the norm
    torch.testing.assert_close(decoded(quantiser, x, 0), x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("options, told", [
    ({"bits": 1}, "bits must be an integer from 2 to 8, got 1; type bits=2"),
    ({"bits": 9}, "bits must be an integer from 2 to 8, got 9; type bits=8"),
    ({"bits": 2.5}, "bits must be an integer from 2 to 8"),
    ({"levels": [-1, 0.5, 0.2, 1], "bits": None}, "type levels=[-1,0.2,0.5,1]"),
    ({"levels": [-0.9, 0, 1], "bits": None}, "from -1 to 1, got [-0.9,0,1]"),
    ({"levels": [-1, 0, 1], "bits": 4}, "bits must be 2 or null, as compressor.levels has 3 levels, got 4"),
    ({"levels": "exponential", "bits": 8, "p": 0.1}, "p must be so large that 256 levels differ in float32"),
    ({"levels": [-1, 0.5, 0.5 + 1e-12, 1], "bits": None}, "in ascending order (in float32)"),
    ({"norm": "l1"}, "norm must be one of l2, linf"),
    ({"bucket_size": 0}, "bucket_size must be an integer of at least 1"),
])  # fmt: skip
def test_wrong_options_are_refused_in_one_sentence(options, told):
    with pytest.raises(ConfigError) as refused:
        Quantiser(**options)
    assert told in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.sample(3)
@pytest.mark.parametrize("overrides, told", [
    (["compressor=topk", "adaptive=alq"], "with a codebook of its own, got compressor=topk; type compressor=qsgd"),
    (["compressor=trn", "adaptive=alq"], "adaptive=alq needs a compressor with a codebook"),
    (["compressor=qsgd", "adaptive=[alq,amq]"], "adaptive must not drive the same quantity twice"),
    (["compressor=signsgd", "compressor.collective=two_way", "+compressor.error_feedback=true"],
     "compressor.error_feedback must be false, because the update is a vote"),
    (["compressor=signsgd", "compressor.collective=all_reduce"], "because signs cannot be summed in one bit"),
    (["compressor=topk", "compressor.collective=all_reduce"], "and a sum of sparse tensors is not sparse"),
    (["compressor=powersgd", "+compressor.collective=all_gather"], "must be all_reduce, because"),
    (["compressor=topk", "compressor.density=0"], "compressor.density must be a number above 0 and at most 1, got 0"),
    (["compressor=qsgd", "compressor.entropy=elias", "compressor.collective=two_way"], "entropy must be none"),
    (["compressor=qsgd", "adaptive=alq", "adaptive.alq.solver=official"], "adaptive.alq.solver must be exact where"),
    (["compressor=distefblocksgd", "optimizer=adamw"], "optimizer must be sgd"),
    (["compressor=distefblocksgd", "compressor.block=chunk"], "compressor.block_size must be an integer of at least 1"),
    (["compressor=distefblocksgd", "compressor.block_size=64"], "block_size must be null where block is tensor"),
    (["compressor=efsignsgd", "+compressor.residual_units=parameter"], "optimizer.momentum must be 0"),
])  # fmt: skip
def test_impossible_pairs_are_refused(overrides, told):
    with pytest.raises(ConfigError) as refused:
        build_components(RunConfig.from_dict(composed.cfg(*overrides)), 4)
    assert told in str(refused.value) and "; type " in str(refused.value)


# ---- entropy


@pytest.mark.parametrize("zero_level", [True, False])
def test_elias_lengths_count_levels_from_zero(zero_level):
    lengths = dense.elias_code_lengths(uniform(3, zero_level)).tolist()
    # omega: 1, 2-3, 4-7 take 1, 3, 6 bits; a sign bit where there are two signs
    assert lengths == ([7, 4, 4, 1, 4, 4, 7] if zero_level else [7, 4, 4, 2, 2, 4, 4, 7])


def codes_of(message, spec, book):
    """The codes of each sender, the codebook, and the bytes in front of the codes."""
    ((start, stop),) = message.layout.fields["codes"].spans
    return packed_codes.unpack_codes(message.rows[:, start:stop].contiguous(), len(book), spec.numel), book, start


@pytest.mark.parametrize("method", ["huffman", "elias", "ans"])
def test_entropy_column_recounts_the_real_codes(method):
    if method == "ans":
        pytest.importorskip("constriction")
    exchange, plan = exchange_for("qsgd", 4, level=3, dtype=torch.float32, entropy=method, bucket_size=512)
    plain, _ = exchange_for("qsgd", 4, level=3, dtype=torch.float32, bucket_size=512)
    xs_W = gradients(dtype=torch.float32).tensors
    for a, b in zip(exchange(xs_W, StepInfo(plan, 0, 0.1)), plain(xs_W, StepInfo(plan, 0, 0.1)), strict=True):
        assert torch.equal(a, b)
    columns, without = exchange.comm.ledger.columns(), plain.comm.ledger.columns()
    assert without["entropy_bytes"] is None
    assert columns["payload_bytes"] == without["payload_bytes"]
    quantiser, total = exchange.compressor, 0
    ctx = exchange.context(StepInfo(plan, 0, 0.1))
    for x_W, spec, level in zip(xs_W, exchange.sent, ctx.levels, strict=True):
        if not quantiser.pays(spec, level, 4):
            total += 4 * 4 * spec.numel
            continue
        message = quantiser.encode_bucket(Bucket(0, [spec], [level], ctx.seed, xs_W=[x_W], workers=range(4)))
        rows, book, header = codes_of(message, spec, quantiser.codebook(3))
        total += sum(header + dense.coded_bytes(row, book, method) for row in rows)
    assert columns["entropy_bytes"] == round(total / 4)


def test_entropy_counts_steps_without_codes():
    exchange, plan = exchange_for("qsgd", 4, level=3, dtype=torch.float32, entropy="huffman", start_step=1)
    xs_W = gradients(dtype=torch.float32).tensors
    exchange(xs_W, StepInfo(plan, 0, 0.1))
    columns = exchange.comm.ledger.columns()
    assert columns["entropy_bytes"] == columns["payload_bytes"] == 4 * exchange.numel


def test_huffman_shortens_what_is_peaked():
    """Gaussian coordinates and ALQ's levels: 2.24 of 3 bits, as Huffman's code of their distribution says."""
    d = 16_384
    book = (-1, -0.0272057, -0.0114758, -0.0034706, 0.0034706, 0.0114758, 0.0272057, 1)
    quantiser = Quantiser(bits=3, bucket_size=d, zero_level=False)
    x = torch.randn(1, 16 * d, generator=torch.Generator().manual_seed(0))
    bucket = bucket_of(x, level=3, codebooks={3: book})
    rows, _, _ = codes_of(quantiser.encode_bucket(bucket), bucket.specs[0], book)
    assert 8 * dense.coded_bytes(rows[0], book, "huffman") / (16 * d) == pytest.approx(2.2420, rel=0.01)
    assert packed_codes.code_bytes(16 * d, 8) == 3 * 16 * d // 8


# ---- codebook policies


def statistics_of(policy, xs_W, quantiser, workers=4, placements=1):
    spec = TensorSpec("x", tuple(xs_W.shape[1:]))
    collected = BucketStatistics(Comm(workers))
    buckets = buckets_of(quantiser, [xs_W], Context(0, [spec], [quantiser.level]))
    collected.add(policy.signals, buckets)
    return collected.read(policy.signals), collected.comm.ledger.columns()["control_bytes"]


@pytest.mark.sample(5)
@pytest.mark.parametrize("method", ["alq", "alqg", "amq"])
@pytest.mark.parametrize("fit", ["mixture", "single", "empirical"])
@pytest.mark.parametrize("zero_level", [True, False])
def test_fitted_levels_lose_less(method, fit, zero_level):
    """On Gaussian gradients of two scales, each fit beats uniform and exponential levels."""
    x = torch.randn(4, 40, 1024, generator=torch.Generator().manual_seed(3)).flatten(1) * 1e-3
    for norm in ["l2"] if method == "alqg" else ["l2", "linf"]:  # 30 sweeps of alqg do not always arrive
        quantiser = Quantiser(bits=3, bucket_size=1024, norm=norm, zero_level=zero_level)
        policy = FittedCodebook(method, fit, num_components=160)  # all: under linf the largest are not typical
        own = {3: uniform(3, zero_level)}
        plan = policy.start(Plan(codebooks=own), Ladder("bits", (3,)), RunFacts())
        statistics, control = statistics_of(policy, x, quantiser)
        assert control == {"mixture": 40 * 40, "single": 24, "empirical": 3 * 8 * 4096}[fit]
        fitted = policy.update(Signals(0, 0.1, 0.1, step=0, statistics=statistics), plan)
        spec = TensorSpec("x", tuple(x.shape[1:]))
        lost = [
            float(
                quantiser.description.claims.variance(
                    quantiser, x, spec, 3, Context(0, [spec], [3], codebooks=books)
                ).sum()
            )
            for books in (fitted.codebooks, own, plan.codebooks)
        ]
        assert lost[0] < min(lost[1:])
        decision = policy.decision()
        assert decision["fits"]["3"]["psi"] < decision["fits"]["3"]["psi_before"]
        policy.update(Signals(0, 0.1, 0.1, step=0, statistics=statistics), fitted)  # now they are those before, too
        assert policy.decision()["fits"]["3"]["psi_before"] == pytest.approx(decision["fits"]["3"]["psi"], rel=1e-4)
        if norm == "l2":  # what the fit expects is what is lost; under linf one coordinate per bucket is 1
            energy = float(quantiser.norms(x).double().square().sum())
            assert lost[0] == pytest.approx(energy * 1024 * decision["fits"]["3"]["psi"], rel=0.02)


def test_statistics_do_not_see_the_placement():
    x = torch.randn(4, 5000, generator=torch.Generator().manual_seed(4))
    quantiser = Quantiser(bits=3, bucket_size=512)
    spec = TensorSpec("x", (5000,))
    for fit in ("single", "empirical"):
        policy = FittedCodebook("alq", fit)
        ((statistic, together),) = statistics_of(policy, x, quantiser)[0].items()
        rows = [BucketStatistics(Comm(1)) for _ in range(4)]
        for row, one in enumerate(rows):
            one.add(policy.signals, buckets_of(quantiser, [x[row : row + 1]], Context(0, [spec], [3])))
        expected = torch.stack([one.sums[statistic][0] for one in rows]).sum(0)
        torch.testing.assert_close(together, expected, rtol=1e-12, atol=0)


def weighed_by_hand(x_W, size, count, power):
    """Mean, spread and weight of the mixture's components: one bucket at a time, all of each length counted."""
    by_length: dict[int, list[tuple[float, float, float]]] = {}
    for x in x_W:
        for start in range(0, len(x), size):
            bucket = x[start : start + size].double()
            norm = float(bucket.norm())
            if norm:
                r = bucket / norm
                spread = float(r.std()) if len(r) > 1 else 0.0
                by_length.setdefault(len(r), []).append((norm, float(r.mean()), spread))
    components = []
    for length, buckets in sorted(by_length.items()):
        total = sum(length * norm**power for norm, _, _ in buckets)
        largest = sorted(buckets, reverse=True)[:count]
        own = sum(norm**power for norm, _, _ in largest)
        components += [[mean, spread, total * norm**power / own] for norm, mean, spread in largest]
    return torch.tensor(components, dtype=torch.float64)


@pytest.mark.parametrize("norm_weight, power", [("squared", 2), ("first", 1), ("none", 0)])
@pytest.mark.parametrize("count", [2, 20])
def test_the_weights_of_the_mixture(norm_weight, power, count):
    """Over two exchanges and four workers, in any placement: the twin above, which sees all buckets at once."""
    first, second = torch.randn(2, 4, 45, generator=torch.Generator().manual_seed(5))
    first[1, :10], second[:, 40:] = 0, 0  # a bucket, and all of the last one
    quantiser, spec = Quantiser(bits=3, bucket_size=10), TensorSpec("x", (45,))
    policy = FittedCodebook(fit="mixture", norm_weight=norm_weight, num_components=count)
    collected = BucketStatistics(Comm(4))
    for x in (first, second):
        collected.add(policy.signals, buckets_of(quantiser, [x], Context(0, [spec], [3])))
    (found,) = collected.read(policy.signals).values()
    expected = weighed_by_hand(torch.cat([first, second]), 10, count, power)
    torch.testing.assert_close(found[found[:, 2] > 0], expected, rtol=1e-5, atol=1e-6)


def expected_error(quantiser, xs, levels):
    """E||Q(v) - v||^2 / ||v||^2 of some tensors [1, N]."""
    lost = 0.0
    for x in xs:
        spec = TensorSpec("x", (x.shape[1],))
        lost += float(
            quantiser.description.claims.variance(
                quantiser, x, spec, 3, Context(0, [spec], [3], codebooks={3: levels})
            ).sum()
        )
    return lost / sum(float(x.square().sum()) for x in xs)


def test_short_buckets_do_not_decide_the_levels():
    """10 buckets of 4096 beside 10 of 16, all of norm 1: long ones are what is lost, 0.64 at the best levels."""
    generator = torch.Generator().manual_seed(0)
    xs = [torch.nn.functional.normalize(torch.randn(1, n, generator=generator)) for n in [4096] * 10 + [16] * 10]
    quantiser = Quantiser(bits=3, bucket_size=8192)
    context = Context(0, [TensorSpec(str(i), (x.shape[1],)) for i, x in enumerate(xs)], [3] * len(xs))
    lost = {}
    for fit in (None, "mixture", "empirical"):
        policy, collected = FittedCodebook(fit=fit), BucketStatistics(Comm(1))
        collected.add(policy.signals, buckets_of(quantiser, xs, context))
        dist = policy.distribution(collected.read(policy.signals))
        lost[fit] = expected_error(quantiser, xs, policy.solve(dist, 3, exponential(3, True)).levels)
    assert max(lost.values()) < 0.66
    assert lost[None] == lost["empirical"]
    equal = FittedCodebook().signals
    collected = BucketStatistics(Comm(1))
    collected.add(equal, buckets_of(quantiser, xs[:10], replace(context, specs=context.specs[:10], levels=[3] * 10)))
    assert [type(statistic) for statistic in collected.read(equal)] == [BucketMoments]


def test_zero_buckets_and_padding_count_for_nothing():
    r = torch.tensor([[0.6, 0.8, 0.0], [0.0, 0.0, 0.0]])
    exists = torch.tensor([[True, True, False], [True, True, True]])
    collected = BucketStatistics(Comm(1))
    moments, pooled, histogram = BucketMoments(5), PooledMoments(), CoordinateHistogram("squared")
    needs = frozenset([moments, pooled, histogram])
    collected.add(needs, [[Buckets(torch.tensor([2.0, 0.0]), r, exists)]])
    read = collected.read(needs)
    by_weight = read[moments][read[moments][:, 2].argsort()]
    assert by_weight[1].tolist() == pytest.approx([0.7, math.sqrt(0.02), 2 * 2.0**2])
    assert (by_weight[0] == 0).all() and len(by_weight) == 2
    assert read[pooled].tolist() == pytest.approx([1.4, 0.02, 2])
    assert float(read[histogram][0].sum()) == pytest.approx(8)  # two coordinates of weight 4
    assert float(read[histogram][2].sum()) == pytest.approx(4)


def test_schedule_and_nothing_but_zeros():
    policy = FittedCodebook(update_at=[0, 100, 2000], update_every=10_000, stat_samples=10)
    assert [s for s in range(30_001) if policy.due(s)] == [0, 100, 2000, 10_000, 20_000, 30_000]
    assert [s for s in range(150) if policy.needs_at(s)] == [0, *range(91, 101)]
    plan = Plan(codebooks={3: uniform(3, True)})
    zeros = {statistic: torch.zeros(20, 3, dtype=torch.float64) for statistic in policy.signals}
    assert policy.update(Signals(0, 0.1, 0.1, statistics=zeros), plan) is plan


def test_plan_with_codebooks_survives_the_broadcast():
    books = {3: tuple(torch.tensor(uniform(3, True)).tolist()), 2: (-1.0, 0.0, 1.0)}
    plan = Plan({"a": 1, "b": 0}, 32, 0.5, 7, books)
    assert plan.unpack(torch.tensor(plan.pack(), dtype=torch.float32).tolist()) == plan


SINGLE = "adaptive.alq.fit=single"  # quick to fit


def run(tmp_path, *overrides):
    small = ["dataset=synthetic", "dataset.size=8", "dataset.train_size=256", "dataset.test_size=32", "batch_size=16"]
    around = ["comm=simulated", "workers=4", "epochs=3", f"paths.runs={tmp_path}"]
    train.run(composed.cfg(*small, *around, *overrides))
    (folder,) = tmp_path.iterdir()
    return RunFolder(folder).read_metrics()


def test_a_run_fits_logs_and_charges_its_codebooks(tmp_path):
    options = ["adaptive.alq.update_at=[1,6]", "adaptive.alq.stat_samples=2", "compressor.bits=3"]
    rows = run(tmp_path, "compressor=qsgd", "adaptive=alq", *options)
    assert [u["step"] for row in rows for u in row["decisions"].get("alq", {"updates": []})["updates"]] == [1, 6]
    update = rows[0]["decisions"]["alq"]["updates"][0]
    assert update["measured_error"] > 0 and update["solve_seconds"] > 0
    assert rows[0]["plan"]["codebooks"] != rows[1]["plan"]["codebooks"] or rows[1] is not rows[0]
    levels = rows[-1]["plan"]["codebooks"]["3"]
    assert levels[0] == -1 and levels[-1] == 1 and 0.0 in levels and levels == sorted(levels)


def test_accordion_on_bits_with_a_codebook_for_each(tmp_path):
    options = ["adaptive.accordion.interval=1", "adaptive.accordion.weak=4", "adaptive.accordion.strong=2"]
    rows = run(tmp_path, "compressor=qsgd", "adaptive=[accordion,alq]", "adaptive.alq.update_at=[0]", SINGLE, *options)
    assert set(rows[-1]["plan"]["codebooks"]) == {"2", "4"}
    assert {level for row in rows for level in row["plan"]["levels"].values()} <= {2, 4}


@pytest.mark.sample(5)
@pytest.mark.parametrize("adaptive", [f"alq {SINGLE}", "alqn", "alq adaptive.alq.fit=empirical", "alq"])
def test_codebooks_wait_while_nothing_is_quantised(tmp_path, adaptive):
    name, *fit = adaptive.split()
    options = [f"adaptive.{name}.update_at=[0,2,6]", f"adaptive.{name}.stat_samples=2", "compressor.start_step=4", *fit]
    rows = run(tmp_path, "compressor=qsgd", f"adaptive={name}", *options)
    made = [u["step"] for row in rows for u in row["decisions"].get(name, {"updates": []})["updates"]]
    assert made == [6]


def test_a_gradient_that_is_not_finite_is_named_before_its_statistics(tmp_path):
    with pytest.raises(NonFinite, match=r"step .* (loss|gradient) of"):
        run(tmp_path, "compressor=qsgd", "adaptive=alq", "adaptive.alq.update_at=[3]", "optimizer.lr=1e30")


def test_sums_stay_sums_and_rates_reach_the_probe():
    xs_W = [x.new_ones(4, *x.shape[1:]) for x in gradients().tensors]
    exchange, plan = exchange_for("topk", level=1.0, reduce="sum", collective="two_way", error_feedback=False)
    updates = exchange(xs_W, StepInfo(plan, 0, 0.1))
    for spec, update in zip(exchange.sent, updates, strict=True):
        sums = spec.ndim > 1 and exchange.compressor.pays(spec, 1.0, 4)
        assert torch.allclose(update, torch.full_like(update, 4.0 if sums else 1.0))
    exchange, plan = exchange_for("distefblocksgd")
    for step in range(3):
        exchange(gradients(step=step).tensors, StepInfo(plan, step, 0.01))
    small, large = (
        probe_exchange(exchange, gradients(step=3).tensors, StepInfo(plan, 3, lr, 0)).total_error for lr in (0.01, 1.0)
    )
    assert small != large


def test_probe_tells_error_bytes_and_buckets_at_any_level():
    exchange, plan = exchange_for("qsgd", 4, dtype=torch.float32, bucket_size=512)
    xs_W = gradients(dtype=torch.float32).tensors
    probes, tables = {}, {}
    for bits in (2, 4, 8):
        exchange.ladder = Ladder("bits", (bits,))
        probes[bits] = probe_exchange(exchange, xs_W, StepInfo(plan, 0))
        tables[bits] = [bucket_table(own) for own in cut_into_buckets(exchange, xs_W, StepInfo(plan, 0))]
        assert round(sum(probes[bits].payload_bytes)) == exchange.predicted_bytes(StepInfo(plan, 0))
    assert probes[2].total_error > 10 * probes[4].total_error > 100 * probes[8].total_error > 0
    assert all(torch.equal(a, b) for a, b in zip(tables[2], tables[8], strict=True))
    buckets = sum(-(-spec.numel // 512) for spec in exchange.sent)
    assert [tuple(own.shape) for own in tables[2]] == [(buckets, 4)] * 4
    norm, mean, _, _ = tables[2][1][0].tolist()
    first = xs_W[0][1].flatten()[:512]
    assert norm == pytest.approx(float(first.norm()), rel=1e-6)
    assert mean == pytest.approx(float((first / first.norm()).mean()), rel=1e-4)
    topk, plan = exchange_for("topk")
    assert buckets_of(topk.compressor, topk.as_sent(gradients().tensors), topk.context(StepInfo(plan, 0))) is None
