"""Runs behind different links, or in different numbers of processes, are different arms."""

from dataclasses import replace

from accordion_bench.network.link_model import Network
from accordion_bench.report.compare.arms import describe_netlab
from accordion_bench.report.compare.beside import describes_its_link
from accordion_bench.report.compare.grouping import group
from accordion_bench.report.compare.times import on_link
from accordion_bench.report.render.captions import heading
from tests.report.test_figures import run

LAB = {"hosts": 4, "rate": 1e8, "slow_host": {}, "delay": 0.0}


def on(lab, processes=4, **changes):
    made = run(**changes)
    return replace(made, environment={"netlab": lab} if lab else {}, summary={**made.summary, "processes": processes})


def test_links_tell_arms_apart():
    slow, cut = {**LAB, "slow_host": {"2": 2e7}}, {**LAB, "cuts": [[1, 3.0]]}
    arms, repeats = group([on(LAB), on(LAB, seed=1), on(slow), on(cut)])
    assert not repeats and [arm.n for arm in arms] == [2, 1, 1]
    labels = [arm.label for arm in arms]
    assert labels[1].endswith("links of 100 Mbit/s, host 2 20 Mbit/s")
    assert labels[2].endswith("links of 100 Mbit/s, host 1 cut for 3 s")


def test_a_model_of_alike_links_says_nothing_of_a_slow_one():
    network = {"bandwidth": 1e8, "latency": 1e-4}
    slow, cut = {**LAB, "slow_host": {"2": 2e7}}, {**LAB, "cuts": [[1, 3.0]]}
    for lab, described in [(LAB, True), (slow, False), (cut, False)]:
        made = on(lab)
        assert describes_its_link(replace(made, config={**made.config, "network": network})) is described
    slower = {**network, "slow_bandwidth": 2e7}
    made = on({**LAB, "slow_host": {"2": 2e7}})
    assert describes_its_link(replace(made, config={**made.config, "network": slower}))


def test_processes_tell_arms_apart():
    arms, repeats = group([on(None, 1), on(None, 2)])
    assert not repeats and [arm.label for arm in arms] == ["dense, processes=1", "dense, processes=2"]


def test_a_link_without_a_limit_is_told():
    assert describe_netlab({"rate": None, "delay": 0.005}) == "links of unlimited, 5 ms"


def test_what_most_twins_have_is_not_told():
    """Of three arms the third has other processes, the first another link."""
    arms, _ = group([on(LAB), on({**LAB, "rate": 1e9}), on({**LAB, "rate": 1e9}, 8)])
    assert [arm.label for arm in arms] == ["dense, links of 100 Mbit/s", "dense", "dense, processes=8"]


def test_at_its_own_slowest_link_a_run_has_its_own_network():
    """A kind of collective keeps its share of the slowest link, and is not slowed down twice."""
    kinds = {"all_to_all": {"bandwidth": 5e8}}
    network = {"bandwidth": 1e9, "latency": 1e-4, "slow_bandwidth": 2e8, "kinds": kinds}
    made = run()
    (arm,), _ = group([replace(made, config={**made.config, "network": network})])
    assert on_link(arm, 2e8).cost("all_to_all") == Network(**network).cost("all_to_all")
    assert on_link(arm, 1e8).cost("all_to_all").bandwidth == 5e7


def test_batches_that_differ_from_worker_to_worker():
    """Their sum is the batch of all; they are another setting than equal batches."""
    arms, _ = group([run(batch_size=[64, 32, 32, 32]), run("topk", batch_size=40)])
    unequal, equal = arms
    assert (unequal.batch, unequal.batch_each, equal.batch, equal.batch_each) == (160, "64+32+32+32", 160, 40)
    assert unequal.batches == ("64+32+32+32",) and unequal.setting != equal.setting
    assert heading(unequal).startswith("resnet8 on digits, 4 workers x 64+32+32+32 samples")
