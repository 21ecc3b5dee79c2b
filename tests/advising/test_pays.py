"""The step time at which the answer flips, and that the answer does flip there."""

import math
from dataclasses import replace

import pytest

from accordion_bench.advising.advice import advise
from accordion_bench.advising.cluster import Cluster
from accordion_bench.advising.predict import lasting, pays_below, step
from accordion_bench.advising.verdict import verdict
from accordion_bench.network.link_model import Network
from tests.advising.made_up_costs import ALL, BF16, FP32, LOCAL, SMALL, times

COSTS = [replace(FP32, name="dense"), replace(BF16, name="bf16"), *ALL[2:]]
CLUSTERS = {"1 Gbit/s": Cluster(Network(1e9, 1e-5), 16), "100 Mbit/s": Cluster(Network(1e8, 1e-5), 16)}


@pytest.mark.parametrize("where", CLUSTERS)
def test_the_answer_flips_there(where):
    cluster = CLUSTERS[where]
    below = pays_below(times(), COSTS, cluster)
    assert 0 < below < math.inf
    for factor, answer in ((0.95, "compress"), (1.05, "do not compress")):
        found = advise(lasting(times(), factor * below), COSTS, cluster)
        (first, *_), at = verdict(found), f"at {where} "
        assert first.partition(at)[2].startswith(answer), first
        assert found.pays is not None and found.pays.below == pytest.approx(below, rel=0.02)


def test_slower_links_flip_at_longer_steps():
    assert pays_below(times(), COSTS, CLUSTERS["1 Gbit/s"]) < pays_below(times(), COSTS, CLUSTERS["100 Mbit/s"]) / 3


def test_local_methods_do_not_count():
    assert pays_below(times(), [FP32, BF16, LOCAL], CLUSTERS["1 Gbit/s"]) == 0


def test_never_and_always():
    """A codec that takes longer than dense communication never pays; one on a dead link always does."""
    slow = replace(SMALL, buckets=tuple(bucket.scaled(1e4) for bucket in SMALL.buckets))
    assert pays_below(times(), [FP32, BF16, slow], CLUSTERS["1 Gbit/s"]) == 0
    dead = Cluster(Network(1e2, 1e-5), 16)
    assert pays_below(times(), COSTS, dead) == math.inf


def test_nothing_is_said_where_nothing_compresses():
    from accordion_bench.advising.advice import Pays
    from tests.advising import made_up

    dense = made_up.advice(1e9, methods=("dense", "bf16", "DiLoCo, H 64"))
    assert not [said for said in verdict(replace(dense, pays=Pays(0.0))) if "starts to pay" in said]


def test_only_both_passes_change():
    shorter = lasting(times(), 0.009)
    assert shorter.backward_end == pytest.approx(0.009) and shorter.update == times().update
    assert shorter.ready == pytest.approx([0.1 * moment for moment in times().ready])
    assert shorter.steps == pytest.approx([0.1 * seconds for seconds in times().steps])
    assert step(shorter, FP32, CLUSTERS["1 Gbit/s"]).seconds < step(times(), FP32, CLUSTERS["1 Gbit/s"]).seconds


@pytest.mark.parametrize(
    ("below", "on", "said"),
    [
        (0.0081, "", "At 1 Gbit/s compressing starts to pay where forward and backward pass take less than 8.1 ms."),
        (0.0, "", "At 1 Gbit/s compressing pays at no step time."),
        (math.inf, "", "At 1 Gbit/s compressing pays at every step time."),
        (
            2.5,
            "GPUs with codecs as on an NVIDIA H200",
            "On GPUs with codecs as on an NVIDIA H200, compressing starts to pay at 1 Gbit/s where forward and "
            "backward pass take less than 2.5 s: gpu=h100, say, or compute_ms=12 answers for them.",
        ),
    ],
)
def test_it_is_the_second_sentence(below, on, said):
    from accordion_bench.advising.advice import Pays
    from tests.advising import made_up

    assert verdict(replace(made_up.advice(1e9), pays=Pays(below, on)))[1] == said
