"""AdaQS-style: bits from recorded ratios of mean to deviation, and the ratio against its definition."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from accordion_bench.adaptive.level_policies import AdaQS
from accordion_bench.comm.collectives import Comm
from accordion_bench.plan import Signals
from accordion_bench.signals.statistics import GradientSums
from tests.kit.helpers import SPECS, gradients
from tests.kit.policies import refused, started, values


def ratios(policy, plan, ladder, history):
    """Bits after each look at a recorded ratio per tensor."""
    out = []
    for epoch, seen in enumerate(history):
        assert policy.needs(epoch) == {"msdr_local"}
        plan = policy.update(Signals(epoch, 0.1, 0.1, {"msdr_local": seen}), plan)
        out.append(values(plan, ladder))
    return out


def test_one_more_bit_when_the_ratio_has_halved():
    policy, ladder, plan = started(AdaQS(interval=1, cap=4), "bits")
    assert values(plan, ladder) == [2, 2]
    a = [8.0, 4.1, 4.0, 3.0, 9.0, 2.0, 1.0, 0.1]  # against 8, 8, 8, then 4, then 2; then the cap
    b = [1.0, math.nan, 2.0, 0.6, math.inf, 0.5, 0.3, 0.25]  # against 1, then 0.5
    found = ratios(policy, plan, ladder, [{"a": x, "b": y, "model": 1.0} for x, y in zip(a, b, strict=True)])
    assert [bits[0] for bits in found] == [2, 2, 3, 3, 3, 4, 4, 4]
    assert [bits[1] for bits in found] == [2, 2, 2, 2, 2, 3, 3, 4]
    assert policy.decision()["msdr"] == [0.1, 0.25] and policy.decision()["raised"] == [False, True]


def test_one_ratio_for_the_whole_model():
    policy, ladder, plan = started(AdaQS(interval=1, scope="model", factor=4, initial=3), "bits")
    seen = [{"a": 1.0, "b": 1.0, "model": model} for model in (1.0, 0.3, 0.25, 0.2, 0.0625)]
    assert ratios(policy, plan, ladder, seen) == [[3, 3], [3, 3], [4, 4], [4, 4], [5, 5]]


def test_the_last_epoch_of_each_interval_is_looked_at():
    policy = AdaQS(interval=3)
    assert [epoch for epoch in range(10) if policy.needs(epoch)] == [2, 5, 8]


def test_a_ratio_of_another_batch_is_not_compared():
    policy, ladder, plan = started(AdaQS(interval=1), "bits", "a")
    seen, found = [(8.0, 6), (1.0, 1), (0.9, 1), (0.5, 1)], []
    for epoch, (ratio, steps) in enumerate(seen):
        signals = Signals(epoch, 0.1, 0.1, {"msdr_local": {"a": ratio, "model": ratio}}, epoch_steps=steps)
        plan = policy.update(signals, plan)
        found += values(plan, ladder)
    assert found == [2, 2, 2, 3]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["adaptive.adaqs.initial=1"], "adaqs.initial must be an integer from 2 to 8, got 1; type .*initial=2"),
        (["adaptive.adaqs.initial=5", "adaptive.adaqs.cap=4"], "adaqs.cap must be an integer from 5 to 8.*, got 4"),
        (["adaptive.adaqs.cap=9"], "adaqs.cap must be .*, got 9; type adaptive.adaqs.cap=8"),
        (["adaptive.adaqs.factor=1"], "adaqs.factor must be a number above 1, got 1"),
        (["adaptive.adaqs.scope=layer"], "adaqs.scope must be one of tensor, model"),
        (["compressor=powersgd"], "adaptive=adaqs needs a compressor with the knob bits to .*, got .*=powersgd"),
    ],
)
def test_refused_adaqs(options, told):
    assert re.search(told, refused("adaptive=adaqs", "compressor=qsgd", *options))


class TestMeanToDeviation:
    needs = frozenset(["msdr_local", "norm_of_sum_local"])

    def sums(self, workers=4, dtype=torch.float64):
        sums = GradientSums(SPECS, Comm(workers), torch.zeros((), dtype=dtype))
        sums.begin(self.needs)
        return sums

    def test_equals_its_definition_on_worker_0(self):
        steps = [gradients(step=s).tensors for s in range(5)]
        sums = self.sums()
        for xs_W in steps:
            sums.add_gradients(xs_W)
        read, means, spreads = sums.read()["msdr_local"], 0.0, 0.0
        for i, spec in enumerate(SPECS):
            own = torch.stack([xs_W[i][0] for xs_W in steps])
            mean, spread = own.mean(0).square().sum(), own.var(0, unbiased=False).sum()
            assert read[spec.name] == pytest.approx(float((mean / spread).sqrt()), rel=1e-9)
            means, spreads = means + float(mean), spreads + float(spread)
        assert read["model"] == pytest.approx(math.sqrt(means / spreads), rel=1e-9)
        assert set(sums.read()) == set(self.needs)

    def test_without_spread_or_without_gradient_there_is_no_ratio(self):
        sums, zero = self.sums(), self.sums()
        xs_W = [torch.ones(4, *spec.shape, dtype=torch.float64) for spec in SPECS]
        for _ in range(4):
            sums.add_gradients(xs_W)
            zero.add_gradients([x * 0 for x in xs_W])
        assert all(value == math.inf or value > 1e6 for value in sums.read()["msdr_local"].values())
        assert all(math.isnan(value) for value in zero.read()["msdr_local"].values())

    def test_goes_on_bit_for_bit(self):
        steps = [gradients(step=s, dtype=torch.float32).tensors for s in range(6)]
        straight, first, second = (self.sums(dtype=torch.float32) for _ in range(3))
        for xs_W in steps:
            straight.add_gradients(xs_W)
        for xs_W in steps[:4]:
            first.add_gradients(xs_W)
        second.add_state(first.state_dict())
        for xs_W in steps[4:]:
            second.add_gradients(xs_W)
        assert second.read() == straight.read()

    def test_other_processes_collect_nothing(self):
        follower = SimpleNamespace(leader=False, workers=4, local_workers=4)
        sums = GradientSums(SPECS, follower, torch.zeros((), dtype=torch.float64))
        sums.begin(self.needs)
        sums.add_gradients(gradients().tensors)
        assert sums.read() == {} and sums.state_dict() == {}
