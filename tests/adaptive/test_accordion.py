"""Accordion's detector against hand-made norms, its schedule against the specification's, the policy contract."""

import math

import pytest
import torch

from accordion_bench.adaptive.accordion import Accordion, CriticalRegime
from accordion_bench.comm.collectives import Comm
from accordion_bench.config.components import build_components
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import conf_dir, read_yaml
from accordion_bench.options.instantiate import target
from accordion_bench.plan import Ladder, Plan, RunFacts, Signals
from accordion_bench.run_config import RunConfig
from accordion_bench.schedules.learning_rate import Cosine, MultiStep
from accordion_bench.signals.statistics import GradientSums
from scripts import matrix
from tests.kit import composed
from tests.kit.helpers import SPECS, gradients, yaml_names, yaml_node


def detector(eta=0.5, interval=10, lr_drop_ratio=0.5, min_hold=None):
    return CriticalRegime(eta, interval, lr_drop_ratio, min_hold)


def test_first_check_has_no_history():
    found = detector()
    assert found.update(0, [3.0, 0.0], 0.1, 0.1) is None
    assert found.saved == [3.0, 0.0]


@pytest.mark.parametrize(
    ("old", "new", "critical"),
    [
        (1.0, 1.0, False),
        (1.0, 0.51, False),
        (1.0, 0.5, True),  # exactly eta counts
        (1.0, 1.49, False),
        (1.0, 1.5, True),
        (1.0, 0.0, True),
        (0.0, 0.0, True),  # nothing to divide by
        (0.0, 5.0, True),
        (math.nan, 1.0, True),
        (1.0, math.nan, True),
        (math.inf, math.inf, True),
        (4.0, 2.0, True),
        (4.0, 2.0000001, False),
    ],
)
def test_changed(old, new, critical):
    assert detector().changed(old, new) is critical


def test_each_tensor_decides_for_itself_against_the_epoch_t_before():
    found = detector(interval=2)
    history = {0: [1.0, 8.0], 2: [0.9, 2.0], 4: [0.4, 1.9], 6: [0.4, 1.9]}
    decisions = {epoch: found.update(epoch, history.get(epoch), 0.1, 0.1) for epoch in range(7)}
    assert decisions == {0: None, 1: None, 2: [False, True], 3: None, 4: [True, False], 5: None, 6: [False, False]}


def weak_epochs(schedule, epochs, fires=(), interval=10, lr=1.0, **guards):
    """Epochs in which a tensor is weak, when the checks at the end of the epochs `fires` see a changed norm."""
    found = detector(interval=interval, **guards)
    weak, norm, out = True, 1.0, []
    for epoch in range(epochs):
        if weak:
            out.append(epoch)
        norms = None
        if found.due(epoch):
            held = found.last_drop is not None and epoch - found.last_drop < found.min_hold
            if not held and found.saved is not None:
                norm = found.saved[0] * (0.4 if epoch in fires else 0.95)
            norms = [norm]
        end = lr * schedule(math.nextafter(epoch + 1, 0))
        critical = found.update(epoch, norms, lr * schedule(epoch), lr * schedule(epoch + 1), end_lr=end)
        if critical is not None:
            weak = critical if isinstance(critical, bool) else critical[0]
    return out


def spans(*pairs):
    return [epoch for first, last in pairs for epoch in range(first, last + 1)]


class TestSpecifiedSchedule:
    """Section 1.2 of the specification: 300 epochs, T = 10, cuts at 150 and 250."""

    ours = MultiStep(300, 4)
    official = MultiStep(300, 4, lag=True)

    def test_always_weak(self):
        assert weak_epochs(self.ours, 300) == spans((0, 10), (150, 160), (250, 260))
        assert len(weak_epochs(self.ours, 300)) == 33

    def test_all_checks_fire(self):
        weak = weak_epochs(self.ours, 300, fires=(10, 160, 260))
        assert weak == spans((0, 20), (150, 170), (250, 270)) and len(weak) == 63

    def test_official_code(self):
        guards = {"lr_drop_ratio": 1, "min_hold": 0}
        assert weak_epochs(self.official, 300, **guards) == spans((0, 10), (152, 160), (252, 260))
        assert len(weak_epochs(self.official, 300, fires=(10, 160, 260), **guards)) == 59

    def test_without_hold_the_cut_lasts_one_epoch(self):
        """A cut at the exact start of 150 is cancelled by the check at its close."""
        weak = weak_epochs(self.ours, 300, min_hold=0)
        assert weak == spans((0, 10), (150, 150), (250, 250))

    def test_official_learning_rates(self):
        lr = [round(0.1 * self.official(e), 6) for e in range(300)]
        assert lr[:7] == [0.1, 0.1, 0.16, 0.22, 0.28, 0.34, 0.4]
        assert lr[151:153] == [0.4, 0.04] and lr[251:253] == [0.04, 0.004]

    def test_our_learning_rates(self):
        lr = [round(0.1 * self.ours(e), 6) for e in range(300)]
        assert lr[:6] == [0.1, 0.16, 0.22, 0.28, 0.34, 0.4]
        assert lr[149:151] == [0.4, 0.04] and lr[249:251] == [0.04, 0.004]


def test_cosine_does_not_degenerate_to_static_weak():
    """Every epoch lowers the learning rate a little; the last ones, towards zero, halve it, but never at once."""
    cosine = Cosine(300, 4)
    assert cosine(299) < 0.3 * cosine(298)
    assert weak_epochs(cosine, 300) == spans((0, 10))
    assert len(weak_epochs(cosine, 300, lr_drop_ratio=1, min_hold=0)) > 290


def test_a_held_check_keeps_the_norm_from_before_the_drop():
    found = detector(interval=10)
    found.update(140, [2.0], 0.4, 0.4)
    assert found.update(149, None, 0.4, 0.04) is True and found.last_drop == 150
    assert found.update(150, [1.0], 0.04, 0.04) is None and found.saved == [2.0]
    assert found.update(160, [1.5], 0.04, 0.04) == [False] and found.saved == [1.5]


@pytest.mark.parametrize("statistic", ["local", "update"])
def test_updates_that_were_gradients_are_not_compared_with_differences_of_parameters(statistic):
    policy = Accordion(statistic=statistic, interval=1)

    def reason(epoch, norm):
        policy.detect(Signals(epoch, 0.1, 0.1, {policy.signal: {"a": norm}}), ["a"])
        return policy.decision()["reason"]

    assert [reason(0, 5.0), reason(1, 5.0)] == ["first check", "norm"]
    policy.units_change()
    assert reason(2, 0.5) == ("first check" if statistic == "update" else "norm")
    assert reason(3, 0.5) == "norm"


def test_a_drop_wins_over_the_norm_rule():
    found = detector(interval=10)
    found.update(0, [1.0], 0.4, 0.4)
    assert found.update(10, [1.0], 0.4, 0.04) is True


def test_raising_the_rate_is_no_drop():
    found = detector()
    assert found.update(3, None, 0.1, 0.16) is None


class TestPolicy:
    def plan(self, ladder):
        policy = Accordion(interval=2)
        return policy, policy.start(Plan({"a": 0, "b": 0}, 32), ladder, RunFacts())

    @pytest.mark.parametrize("ladder", [Ladder("rank", (1, 2), (1, 2)), Ladder("density", (0.10, 0.99), (0.10, 0.99))])
    def test_same_detector_drives_rank_and_density(self, ladder):
        policy, plan = self.plan(ladder)
        assert plan.levels == {"a": 1, "b": 1}
        for epoch, norms in ((0, [1.0, 1.0]), (2, [1.0, 0.2])):
            values = {policy.signal: dict(zip("ab", norms, strict=True))}
            plan = policy.update(Signals(epoch, 0.1, 0.1, values), plan)
        assert plan.levels == {"a": 0, "b": 1} and plan.batch_size == 32
        assert policy.decision()["critical"] == [False, True]
        assert policy.decision()["norm_before"] == [1.0, 1.0]

    def test_state_continues(self):
        policy, _ = self.plan(Ladder("rank", (1, 2), (1, 2)))
        policy.detector.saved, policy.detector.last_drop = [1.0, 2.0], 7
        other, _ = self.plan(Ladder("rank", (1, 2), (1, 2)))
        other.load_state_dict(policy.state_dict())
        assert other.detector.saved == [1.0, 2.0] and other.detector.last_drop == 7

    def test_needs_costs_nothing_between_checks(self):
        policy, _ = self.plan(Ladder("rank", (1, 2), (1, 2)))
        assert [sorted(policy.needs(e)) for e in range(3)] == [["norm_of_sum_local"], [], ["norm_of_sum_local"]]
        sums = GradientSums(SPECS, Comm(4), torch.zeros((), dtype=torch.float64))
        sums.begin(policy.needs(1))
        assert not sums.sums and not sums.read()

    @pytest.mark.parametrize(
        "options",
        [{"eta": 0}, {"interval": 0}, {"statistic": "max"}, {"lr_drop_ratio": 2}, {"min_hold": -1}, {"interval": 2.5}],
    )
    def test_bad_options(self, options):
        with pytest.raises(ConfigError, match=next(iter(options))):
            Accordion(**options)

    def test_strong_must_be_stronger(self):
        with pytest.raises(ConfigError, match="strong"):
            Accordion(weak=1, strong=2).ladder("rank", (1, 2))


class TestStatistics:
    def test_norm_of_the_sum_of_each_kind(self):
        steps = [gradients(step=s) for s in range(3)]
        updates = [[x.mean(0) + 1 for x in g.tensors] for g in steps]
        comm = Comm(4)
        sums = GradientSums(SPECS, comm, torch.zeros((), dtype=torch.float64))
        kinds = frozenset(f"norm_of_sum_{kind}" for kind in ("local", "mean", "update"))
        sums.begin(kinds)
        for g, u in zip(steps, updates, strict=True):
            sums.add_gradients(g.tensors)
            sums.add_updates(u)
        read = sums.read()
        for i, spec in enumerate(SPECS):
            local = sum(g.tensors[i][0] for g in steps).norm()
            mean = sum(g.tensors[i].mean(0) for g in steps).norm()
            update = sum(u[i] for u in updates).norm()
            for kind, norm in (("local", local), ("mean", mean), ("update", update)):
                assert read[f"norm_of_sum_{kind}"][spec.name] == pytest.approx(float(norm))
        # the exact mean costs one dense all-reduce, charged as control traffic; here in float64
        assert comm.ledger.columns()["control_bytes"] == 8 * sum(spec.numel for spec in SPECS)

    def test_whole_model(self):
        sums = GradientSums(SPECS, Comm(4), torch.zeros((), dtype=torch.float64))
        sums.begin(frozenset(["norm_of_sum_local"]))
        g = gradients()
        sums.add_gradients(g.tensors)
        whole = torch.cat([x[0].reshape(-1) for x in g.tensors]).norm()
        assert sums.read()["norm_of_sum_local"]["model"] == pytest.approx(float(whole))


def scheme_of(policy: str) -> str:
    """The synchronisation that a policy's file chooses."""
    for item in read_yaml(conf_dir() / "adaptive" / f"{policy}.yaml").get("defaults", []):
        for key, value in item.items() if isinstance(item, dict) else ():
            if key.startswith("override /sync"):
                return value
    return "every_step"


@pytest.mark.parametrize("name", yaml_names("adaptive"))
@pytest.mark.parametrize("compressor", ["powersgd", "topk", "qsgd"])
def test_contract_of_every_policy(name, compressor):
    """Builds from its YAML, starts on any ladder, and its state survives a round trip; codebooks need a quantiser."""
    cfg = matrix.cell(compressor, scheme_of(name), [name])
    if matrix.of_pair("compressor", compressor, "adaptive", name):
        with pytest.raises(ConfigError, match=r"type .*compressor="):
            build_components(RunConfig.from_dict(cfg), workers=4)
        return
    parts = build_components(RunConfig.from_dict(cfg), workers=4)
    assert list(parts.policies) == ([] if name == "none" else [name])
    for policy in parts.policies.values():
        plan = policy.start(Plan({"a": 0}, 32, codebooks=parts.codebooks), parts.ladder, parts.run)
        assert set(plan.levels) == {"a"} and plan.levels["a"] in range(len(parts.ladder.values))
        for epoch in range(12):
            values = {need: {"a": 1.0, "model": 1.0} for need in policy.needs(epoch)}
            plan = policy.update(Signals(epoch, 0.1, 0.1, values), plan)
            assert plan.levels["a"] in range(len(parts.ladder.values))
        state = policy.state_dict()
        policy.load_state_dict(state)
        assert policy.state_dict() == state


def test_every_policy_of_levels_refuses_a_compressor_without():
    for name in yaml_names("adaptive"):
        if name != "none" and target(yaml_node("adaptive", name), name).drives in ("level", "codebook"):
            with pytest.raises(ConfigError, match=r"got compressor=none; type .*compressor=(powersgd|qsgd|topk)"):
                build_components(RunConfig.from_dict(matrix.cell("none", scheme_of(name), [name])), workers=4)


def test_two_policies_on_one_knob_are_refused():
    cfg = composed.cfg("adaptive=accordion", "compressor=powersgd")
    cfg["adaptive"]["again"] = dict(cfg["adaptive"]["accordion"])
    with pytest.raises(ConfigError, match="accordion and again"):
        build_components(RunConfig.from_dict(cfg), workers=4)
