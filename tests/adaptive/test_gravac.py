"""GraVAC: densities from recorded gains, the search for a candidate, refusals."""

import re

import pytest

from accordion_bench.adaptive.level_policies import GraVAC
from accordion_bench.plan import Measured, Signals
from tests.kit.policies import GRAVAC, probes, refused, started, values


def densities(policy, plan, ladder, history):
    """Density after each recorded exchange; only what the policy has asked for is shown to it."""
    out = []
    for exchange, gains in enumerate(history):
        asked = {request.level for request in policy.needs_at(exchange)}
        seen = {i: found for i, found in probes(ladder, **gains).items() if i in asked}
        if policy.due(exchange):
            plan = policy.update(Signals(0, 0.1, 0.1, exchange=exchange, probes=seen), plan)
        (density,) = set(values(plan, ladder))
        out.append(density)
    return out


def test_the_ladder_of_densities():
    policy = GraVAC()
    assert policy.ladder("density", (0.1, 0.99)) == (*reversed([0.1 * 0.5**i for i in range(10)]), 1.0)
    assert GraVAC(mildest=0.1, smallest=0.001, step=0.1).densities == pytest.approx([0.1, 0.01, 0.001])


def test_current_then_mildest_then_dense():
    policy, ladder, plan = started(GraVAC(**GRAVAC), "density")
    assert ladder.values == (0.1, 0.2, 0.4, 1.0) and values(plan, ladder) == [0.4, 0.4]
    low, good = {"d0_4": 0.5, "d0_2": 0.4}, {"d0_4": 0.9, "d0_2": 0.8}
    between = {"d0_4": 0.75, "d0_2": 0.74}
    # the window keeps the mildest; from then on its gain is too low; 0.2 is the candidate from exchange 6 on
    history = [low, low, good, low, good, good, good, between, low, good]
    expected = [0.4, 1.0, 0.4, 1.0, 0.4, 0.4, 0.2, 0.4, 1.0, 0.2]
    policy.interval = 6
    assert densities(policy, plan, ladder, history) == expected


def test_the_search_goes_on_while_scores_grow_and_keeps_the_smaller_of_two_equal_ones():
    gains = {"d0_4": 0.96, "d0_2": 0.9, "d0_1": 0.8}
    policy, ladder, plan = started(GraVAC(**GRAVAC), "density")
    found = densities(policy, plan, ladder, [gains] * 12)
    assert found == [0.4] * 3 + [0.2] * 3 + [0.1] * 6  # a new candidate is used once it is measured
    assert not policy.searching and policy.scores[0] == pytest.approx(0.96 * 1e9 / (8 * 800))
    # with a second of computation, bytes do not count any more: scores are the gains
    policy, ladder, plan = started(GraVAC(**GRAVAC, compute_seconds=1.0, eps=0.7), "density")
    found = densities(policy, plan, ladder, [{"d0_4": 0.96, "d0_2": 0.93, "d0_1": 0.8}] * 12)
    assert found == [0.4] * 3 + [0.2] * 9 and not policy.searching
    assert policy.scores == pytest.approx({0: 0.96, 1: 0.93}, rel=1e-4)
    # no two alike: the best of all stays
    policy, ladder, plan = started(GraVAC(**GRAVAC, compute_seconds=1.0, eps=0.7), "density")
    found = densities(policy, plan, ladder, [{"d0_4": 0.99, "d0_2": 0.85, "d0_1": 0.75}] * 12)
    assert found == [0.4] * 3 + [0.2] * 3 + [0.1] * 3 + [0.4] * 3 and policy.candidate == 0


def test_a_candidate_that_keeps_too_little_ends_the_search():
    policy, ladder, plan = started(GraVAC(**GRAVAC), "density")
    found = densities(policy, plan, ladder, [{"d0_4": 0.96, "d0_2": 0.9, "d0_1": 0.6}] * 12)
    assert found == [0.4] * 3 + [0.2] * 3 + [0.4] * 3 + [0.2] * 3 and set(policy.scores) == {0, 1}
    # but a mildest density that does is tried again
    policy, ladder, plan = started(GraVAC(**GRAVAC), "density")
    early = [{"d0_4": 0.5}] * 3 + [{"d0_4": 0.9, "d0_2": 0.8, "d0_1": 0.7}] * 6
    assert densities(policy, plan, ladder, early) == [0.4, 1.0, 1.0] + [0.4] * 3 + [0.2] * 3


def test_gain_is_a_ratio_of_smoothed_sums():
    policy, _, plan = started(GraVAC(**{**GRAVAC, "smoothing": 0.25}), "density")
    for exchange, norms in enumerate(((4.0, 2.0), (8.0, 6.0))):
        seen = {2: {"a": Measured(0.0, norms[0], norms[1], 1.0)}}
        policy.update(Signals(0, 0.1, 0.1, exchange=exchange, probes=seen), plan)
    assert policy.gain(0) == (2 + 0.25 * 4) / (4 + 0.25 * 4)


def test_decisions_every_so_many_exchanges():
    policy, ladder, plan = started(GraVAC(**GRAVAC, every=2), "density")
    assert [x for x in range(6) if policy.needs_at(x)] == [x for x in range(6) if policy.due(x)] == [1, 3, 5]
    found = densities(policy, plan, ladder, [{"d0_4": 0.9, "d0_2": 0.8}] * 8)
    assert found == [0.4] * 5 + [0.2] * 3  # scored after exchange 3, measured in exchange 5


def test_a_lone_worker_sends_nothing_and_gains_decide():
    assert GraVAC().throughput({"a": Measured(0.0, 1.0, 1.0, 0.0)}) == 1.0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["adaptive.gravac.mildest=1"], "gravac.mildest must be a number above 0 and below 1, got 1"),
        (["adaptive.gravac.smallest=0.2"], "gravac.smallest must be .* at most 0.1, got 0.2; type .*=0.01"),
        (["adaptive.gravac.step=1"], "gravac.step must be a number above 0 and at most 0.9"),
        (["adaptive.gravac.every=0"], "gravac.every must be an integer of at least 1"),
        (["adaptive.gravac.bandwidth=0"], "gravac.bandwidth must be a number above 0"),
        (["compressor=powersgd"], "adaptive=gravac needs a compressor with the knob density to choose from, got"),
        (["adaptive=[accordion,gravac]"], "adaptive must not drive the same quantity twice"),
    ],
)
def test_refused_gravac(options, told):
    assert re.search(told, refused("adaptive=gravac", "compressor=topk", *options))
