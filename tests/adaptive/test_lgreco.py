"""L-GreCo: when it refines, and what it refines."""

import re
from dataclasses import replace

import pytest

from accordion_bench import train
from accordion_bench.adaptive.accordion import Accordion
from accordion_bench.adaptive.lgreco import LGreCo
from accordion_bench.adaptive.policy import notify_refiners
from accordion_bench.adaptive.schedule import LevelSchedule
from accordion_bench.plan import Ladder, Plan, Probe, RecentMean, RunFacts, Signals
from accordion_bench.runs.folder import RunFolder
from tests.kit import composed, tiny
from tests.kit.policies import ERRORS, PAIRS, measured, refused, started, values


def test_uniform_reference_by_hand():
    """Ranks 2, 2 lose 5.9 at 40 bytes; of all pairs within that, (1, 3) and (2, 2) cost 40, and (1, 3) loses 5.0."""
    policy, ladder, plan = started(LGreCo(reference=2, samples=2, every=4), "rank")
    assert ladder.values == (1, 2, 3, 4) and values(plan, ladder) == [2, 2]
    plan = policy.update(Signals(0, 0.1, 0.1, exchange=1, probes=measured(ladder, ERRORS)), plan)
    assert values(plan, ladder) == [1, 3]
    decision = policy.decision()
    assert (decision["error_limit"], decision["error"]) == pytest.approx((5.9, 5.0))
    assert (decision["wire_bytes_before"], decision["wire_bytes"]) == (40, 40)
    assert decision["errors"]["3"] == pytest.approx([1.9, 1.0]) and decision["refined"] == [2, 2]
    # the limit is the reference's, not that of its own decision
    plan = policy.update(Signals(0, 0.1, 0.1, exchange=5, probes=measured(ladder, ERRORS)), plan)
    assert values(plan, ladder) == [1, 3] and policy.decision()["error_limit"] == pytest.approx(5.9)


def test_what_it_asks_for():
    policy, _, _ = started(LGreCo(samples=2, every=5), "rank")
    probing = {Probe(i) for i in range(4)} | {RecentMean()}
    asked = [policy.needs_at(exchange) for exchange in range(7)]
    assert asked == [{RecentMean()}, probing, set(), set(), set(), {RecentMean()}, probing]
    assert [exchange for exchange in range(7) if policy.due(exchange)] == [1, 6]


def refinements(per_epoch, **options):
    """Per epoch the exchanges (counted in it) that refine, and how many exchanges each of them looks at."""
    run = RunFacts(epochs=len(per_epoch), train_size=45 * 8, batch_size=8)
    policy, _, plan = started(LGreCo(**options), "rank", run=run)
    out, done, counted = [], 0, 0
    for epoch, exchanges in enumerate(per_epoch):
        policy.begin_epoch(epoch, done, plan)
        found = []
        for exchange in range(done, done + exchanges):
            counted += RecentMean() in policy.needs_at(exchange)
            assert policy.due(exchange) == (Probe(0) in policy.needs_at(exchange))
            if policy.due(exchange):
                found.append((exchange - done, counted))
                counted = 0
        out.append(found)
        done += exchanges
    return out


def test_once_per_epoch_however_often_is_exchanged():
    """Exchanges per epoch as with every_step, local_sgd, post_local_sgd, hierarchical; a batch that grows; every=7."""
    assert refinements([45] * 3) == [[(9, 10)]] * 3
    local, _, plan = started(LGreCo(), "rank", run=RunFacts(train_size=45 * 8, batch_size=8))
    local.start(
        replace(plan, period=8), Ladder("rank", (1, 2, 3, 4), (1, 2)), RunFacts(train_size=45 * 8, batch_size=8)
    )
    assert [exchange for exchange in range(5) if local.due(exchange)] == [4]
    assert refinements([5] * 4) == [[], [(0, 6)], [(4, 5)], [(4, 5)]]
    assert refinements([45, 45, 5, 5, 5]) == [[(9, 10)], [(9, 10)], [], [(0, 6)], [(4, 5)]]
    assert refinements([11, 11, 11]) == [[(9, 10)]] * 3
    assert refinements([45, 6, 6, 6]) == [[(9, 10)], [], [(0, 7)], [(5, 6)]]
    assert refinements([0, 1, 0, 0, 1, 1], samples=3) == [[], [(0, 1)], [], [], [(0, 1)], [(0, 1)]]
    assert refinements([10, 4], samples=2, every=7) == [[(1, 2), (8, 2)], []]


SCHEMES = {
    "post": ["sync=post_local_sgd", "sync.switch_step=12", "sync.period=2"],
    "groups": ["sync=hierarchical", "sync.groups=[[2,2],[6,4]]"],
    "seldom": ["sync=local_sgd", "sync.period=6"],
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SCHEMES)
def test_refines_in_every_epoch_of_every_scheme(tmp_path, name):
    """6 steps per epoch: synchronous, then local from step 12 on; groups that meet every 2 steps; and all processes
    would agree, because `update` has no part in it."""
    common = ["adaptive=lgreco", "compressor=topk", "adaptive.lgreco.samples=2", "epochs=4"]
    train.run(composed.run(tmp_path, *common, *SCHEMES[name]))
    rows = RunFolder(tiny.only(tmp_path)).read_metrics()
    assert [len(row["decisions"]["lgreco"]["updates"]) for row in rows] == [1] * 4


@pytest.mark.parametrize(
    ("knob", "options", "ladder"),
    [
        ("rank", {}, (1, 2, 3, 4)),
        ("rank", {"reference": 4}, (2, 3, 4, 5, 6, 7, 8)),
        ("rank", {"reference": 32}, (16, 19, 23, 27, 32, 38, 45, 54, 64)),
        ("rank", {"levels": [8, 1]}, (1, 2, 8)),
        ("density", {}, (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)),
        ("density", {"reference": 0.5}, (0.125, 0.25, 0.5, 1.0)),
        ("density", {"reference": 0.001}, (0.00025, 0.001, 0.004, 0.016, 0.064, 0.256)),
        ("bits", {}, (2, 3, 4, 5, 6, 7, 8)),
    ],
)
def test_levels_to_choose_from(knob, options, ladder):
    assert LGreCo(**options).ladder(knob, PAIRS[knob]) == ladder


def test_on_top_of_accordion_the_limit_is_accordions_error():
    """Through decisions of both: refined levels never become the limit, Accordion's new ones do at once."""
    accordion, lgreco = Accordion(interval=1, min_hold=0), LGreCo(samples=1, every=2)
    both = [accordion, lgreco]
    ladder = Ladder("rank", tuple(sorted({1, 2} | set(lgreco.ladder("rank", (1, 2))))), (1, 2))
    plan = Plan({"a": 3, "b": 3}, 8)
    for policy in both:
        plan = policy.start(plan, ladder, RunFacts())
        notify_refiners(both, policy, plan)
    assert values(plan, ladder) == [2, 2]

    def decide(policy, signals):
        nonlocal plan
        before, plan = plan, policy.update(signals, plan)
        if plan is not before:
            notify_refiners(both, policy, plan)
        return values(plan, ladder)

    def refine(exchange):
        return decide(lgreco, Signals(0, 0.1, 0.1, exchange=exchange, probes=measured(ladder, ERRORS)))

    def check(epoch, a, b):
        return decide(accordion, Signals(epoch, 0.1, 0.1, {accordion.signal: {"a": a, "b": b}}))

    assert refine(0) == [1, 3] and check(0, 1.0, 1.0) == [1, 3]  # the first check decides nothing
    assert refine(2) == [1, 3] and lgreco.decision()["refined"] == [2, 2]
    assert check(1, 1.0, 0.1) == [1, 2]
    # as cheap as (1, 2), at an error of 6.0 instead of 7.9
    assert refine(4) == [2, 1] and lgreco.decision()["error_limit"] == pytest.approx(7.9)
    # the detector says what the refinement has said already: that is the limit now
    assert check(2, 0.1, 0.1) == [2, 1]
    assert refine(6) == [2, 1] and lgreco.decision()["error_limit"] == pytest.approx(6.0)
    assert check(3, 0.1, 0.1) == [1, 1]
    assert refine(8) == [1, 1] and lgreco.decision()["refined"] == [1, 1]


def test_a_decision_equal_to_the_refined_levels_is_a_decision():
    """The driver may decide exactly what the refinement has made: from then on that is the limit."""
    driver = LevelSchedule(ranges=[[0, 1, 2], [1, 2, 1]])
    lgreco = LGreCo(samples=1, every=1)
    ladder = Ladder("rank", (1, 2, 3, 4), (1, 2))
    plan = driver.start(Plan({"a": 3}, 8), ladder, RunFacts(epochs=2))
    notify_refiners([driver, lgreco], driver, plan)
    plan = lgreco.start(plan, ladder, RunFacts(epochs=2))
    alike = {"a": [2.0, 2.0, 2.0, 2.0]}
    plan = lgreco.update(Signals(0, 0.1, 0.1, probes=measured(ladder, alike)), plan)
    assert values(plan, ladder) == [1] and lgreco.decision()["refined"] == [2]
    decided = driver.update(Signals(0, 0.1, 0.1), plan)
    assert decided is not plan and decided == plan
    notify_refiners([driver, lgreco], driver, decided)
    lgreco.update(Signals(1, 0.1, 0.1, probes=measured(ladder, alike)), decided)
    assert lgreco.decision()["refined"] == [1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["adaptive.lgreco.alpha=0"], "lgreco.alpha must be a number above 0, got 0; type adaptive.lgreco.alpha=1"),
        (["adaptive.lgreco.reference=0.5"], "lgreco.reference must be an integer .* as a rank, got 0.5; type .*=2"),
        (["adaptive.lgreco.reference=x"], "lgreco.reference must be a number above 0"),
        (["adaptive.lgreco.levels=[1,2.5]"], r"lgreco.levels must be an integer from 1 .*, got 2.5; .*levels=\[1,2\]"),
        (["adaptive.lgreco.levels=[]"], "lgreco.levels must be null or a list of numbers"),
        (["adaptive.lgreco.samples=0"], "lgreco.samples must be an integer of at least 1"),
        (["adaptive.lgreco.every=0"], "lgreco.every must be an integer of at least 1"),
        (["adaptive=[lgreco,accordion]"], r"drive the level; type adaptive=\[accordion,lgreco\]"),
        (["compressor=signsgd"], "adaptive=lgreco needs a compressor with levels"),
    ],
)
def test_refused_lgreco(options, told):
    assert re.search(told, refused("adaptive=lgreco", "compressor=powersgd", *options))
