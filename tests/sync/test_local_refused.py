"""Options of local methods that do not fit are refused in one sentence, before the run."""

import re

import pytest

from accordion_bench.options.checks import ConfigError
from accordion_bench.sync.local_sgd import LocalSGD
from tests.kit import composed, tiny

STREAM = "sync=streaming_diloco"
REFUSED = [
    (["sync.period=0"], "sync.period must be an integer of at least 1, got 0; type sync.period=8"),
    (["sync.switch_step=24"], "sync.switch_step must be below 24, .*, got 24; type sync.switch_step=12"),
    (["sync.switch_step=-1"], "sync.switch_step must be an integer of at least 0, got -1; type sync.switch_step=0"),
    (["sync.switch_step=null", "schedule.milestones=[]"], "switch_step must be a number of steps .*, got null; .*=12"),
    (["sync.switch_step=null", "schedule=cosine"], "sync.switch_step must be a number of steps .*, got null; .*=12"),
    (["sync.phase1=models"], "sync.phase1 must be one of gradient, model, got models; type sync.phase1=model"),
    (["sync.buffers=zero"], "sync.buffers must be one of keep, reset, average, got zero; type"),
    (["sync.final=2"], "sync.final must be true or false, got 2; type sync.final=true"),
    (["sync.outer_optimizer=adam"], "sync.outer_optimizer must be one of none, slowmo, sgd, got adam; type"),
    (["+sync.alpha=2"], "sync.alpha is no option of outer_optimizer=none; type sync=slowmo, or sync=diloco"),
    (["sync=slowmo", "sync.outer_optimizer=sgd"], "sync.(alpha|beta) is no option of outer_optimizer=sgd; type"),
    (["sync=slowmo", "+sync.outer_lr=1"], "sync.outer_lr is no option of outer_optimizer=slowmo; type"),
    (["sync=diloco", "+sync.beta=0.5"], "sync.beta is no option of outer_optimizer=sgd; type"),
    (["sync=slowmo", "sync.beta=1"], "sync.beta must be a number at least 0 and below 1, got 1; type sync.beta=0.5"),
    (["sync=slowmo", "sync.alpha=0"], "sync.alpha must be a number above 0, got 0; type sync.alpha=1"),
    (["sync=diloco", "sync.outer_momentum=1"], "sync.outer_momentum must be .* below 1, got 1; .*=0.9"),
    (["sync=diloco", "sync.outer_lr=0"], "sync.outer_lr must be a number above 0, got 0; type sync.outer_lr=0.7"),
    (["sync=diloco", "sync.outer_momentum=0"], "sync.outer_nesterov must be false where .*, got true; .*=false"),
    (["sync=hierarchical", "sync.period=8"], "sync.period must be null where groups say it, got 8; .*=null"),
    (["sync=hierarchical", "sync.groups=null"], "sync.period must be an integer of at least 1, got null; .*=8"),
    (["sync=hierarchical", "sync.groups=[[4,2],[16,8]]"], r"all 4 workers, got .*; type sync.groups=\[\[4,2\],\[16,4"),
    (["sync=hierarchical", "sync.groups=[[4,2],[6,4]]"], "sync.groups must be a list .* each divides the next, got"),
    (["sync=hierarchical", "sync.groups=[[4,3],[8,4]]"], "sync.groups must be a list .* each divides the next, got"),
    (["sync=hierarchical", "sync.groups=[[4,4],[8,4]]"], "sync.groups must be a list .* each divides the next, got"),
    (["sync=hierarchical", "sync.groups=[4,4]"], "sync.groups must be a list .* each divides the next, got"),
    (["sync=hierarchical", "sync.groups=[]"], "sync.groups must be a list .* each divides the next, got"),
    (["sync=hierarchical", "comm=gloo", "workers=12", "comm.processes=4", "sync.groups=[[2,2],[4,12]]"],
     r"sync.groups must be groups that divide the 3 workers of a process, .*; type sync.groups=\[\[4,12\]\]"),
    (["sync=overlap_local_sgd", "sync.delay=3"], "sync.delay must be at most period=2, .*, got 3; type sync.delay=2"),
    (["sync=overlap_local_sgd", "sync.delay=0"], "sync.delay must be an integer of at least 1, got 0; .*=1"),
    (["sync=overlap_local_sgd", "sync.merge_alpha=1"], "sync.merge_alpha must be below 1 where .*, got 1.0; .*=0.6"),
    (["sync=overlap_local_sgd", "sync.merge_alpha=1", "sync.delay=2"], "sync.merge_alpha must be below 1 where .*"),
    (["sync=overlap_local_sgd", "sync.merge_alpha=0"], "sync.merge_alpha must be .* above 0 .*, got 0; .*=0.6"),
    (["sync=overlap_local_sgd", "sync.beta=1"], "sync.beta must be .* below 1, got 1; type sync.beta=0.7"),
    (["sync=overlap_local_sgd", "sync.merge=cocod"], "sync.beta must be 0 with merge=cocod, got 0.7; type sync.beta=0"),
    (["sync=overlap_local_sgd", "sync.merge=pull"], "sync.merge must be one of pull_back, cocod, got pull; .*=pull_b"),
    ([STREAM, "sync.fragments=4"], "sync.fragments must be a divisor of period=30, got 4; type sync.fragments=3"),
    ([STREAM, "sync.period=5"], "sync.period must be a multiple of fragments=2, .* delay=5 steps, got 5; .*=12"),
    ([STREAM, "sync.period=8"], "sync.delay must be below 4, .*, got 5; type sync.delay=3"),
    ([STREAM, "sync.period=15", "sync.fragments=3"], "sync.delay must be below 5, .*, got 5; type sync.delay=4"),
    ([STREAM, "sync.fragments=0"], "sync.fragments must be an integer of at least 1, got 0; type sync.fragments=2"),
    ([STREAM, "sync.delay=-1"], "sync.delay must be an integer of at least 0, got -1; type sync.delay=5"),
    ([STREAM, "sync.mixing=1.5"], "sync.mixing must be a number at least 0 and at most 1, got 1.5; .*=0.5"),
    ([STREAM, "sync.fragments=5", "sync.delay=1"], "sync.fragments must be at most 4, .* 4 layers, got 5; .*=3"),
    ([STREAM, "compressor=topk", "compressor.scope=model"], "compressor.scope must be tensor where .*; .*=tensor"),
    (
        [STREAM, "compressor=efsignsgd", "compressor.block=bucket", "compressor.block_size=64"],
        "compressor.block must be tensor .*; type compressor.block=tensor compressor.block_size=null",
    ),
    ([STREAM, "adaptive=qsr"], "adaptive=qsr drives the period .*; type sync=diloco adaptive=qsr"),
    ([STREAM, "compressor=topk", "adaptive=lgreco"], "adaptive=lgreco needs all tensors .*; type sync=diloco "),
    (["sync.quorum=5", "sync.lateness=0.1"], "sync.quorum must be at most 4, .*, got 5; type sync.quorum=4"),
    (["sync.quorum=0", "sync.lateness=0.1"], "sync.quorum must be an integer of at least 1, got 0; type sync.quorum=2"),
    (["sync.quorum=0.5", "sync.lateness=0.1"], "sync.quorum must be an integer of at least 1, got 0.5; .*=2"),
    (["sync.quorum=3", "sync.grace=-1", "sync.lateness=0.1"], "sync.grace must be a number at least 0, got -1; .*=1"),
    (["sync.quorum=3", "sync.lateness=1"], "sync.lateness must be a number at least 0 and below 1, got 1; .*=0.1"),
    (["sync.quorum=3"], "sync.lateness must be a probability where one process has all .*, got null; .*=0.1"),
    (["sync.quorum=3", "sync.lateness=0.1", "sync.buffers=average"],
     "sync.buffers must be keep or reset with a quorum, .*, got average; type sync.buffers=keep"),
    (["sync.quorum=3", "sync.lateness=0.1", "sync.sparta=0.1"],
     "sync.sparta must be null with a quorum, .*, got 0.1; type sync.sparta=null"),
    (["sync.quorum=3", "sync.lateness=0.1", "sync.period=null", "+sync.groups=[[4,2],[8,4]]"],
     "sync.quorum must be null where groups say who averages, got 3; type sync.quorum=null"),
    (["sync.quorum=3", "sync.lateness=0.1", "adaptive=accordion", "compressor=topk"],
     "sync.quorum must be null where adaptive=accordion drives the level, .*, got 3; type sync.quorum=null"),
    (["sync.quorum=3", "sync.lateness=0.1", "compressor=distefblocksgd"],
     "compressor must send messages of a fixed size to all .*, got distefblocksgd, .*; type compressor=topk, or"),
    (["sync.quorum=3", "sync.lateness=0.1", "compressor=adacomp"],
     "compressor must send messages of a fixed size to all .*, got adacomp, .*; type compressor=topk, or"),
    (["compressor=dgc"], "compressor must leave momentum and step to the optimizer .*, got dgc, .*; type"),
    (["compressor=demo", "optimizer.momentum=0"], "compressor must leave momentum .*, got demo, .*; type"),
    (["compressor=signsgd"], "compressor must preserve the scale of its input .*, got signsgd, .*; type"),
    (["compressor=distefblocksgd", "sync.switch_step=6"], "got distefblocksgd, .*; type sync.phase1=model"),
    (["compressor=distefblocksgd", "sync=overlap_local_sgd", "sync.switch_step=6"], "; type sync.switch_step=0"),
    (["sync.sparta=0"], "sync.sparta must be a number above 0 and at most 1, got 0; type sync.sparta=0.005"),
    (["sync.sparta=1.5"], "sync.sparta must be a number above 0 and at most 1, got 1.5; type sync.sparta=0.005"),
    (["sync=sparta", "sync.sparta=0"], "sync.sparta must be a number above 0 and at most 1, got 0; type sync.spa"),
    (["sync=sparta", "sync.sparta=null"], "sync.sparta must be a number, got null; type sync.sparta=0.005"),
    (["sync=sparta", "adaptive=accordion", "compressor=topk"], "adaptive=accordion steers a compressor, .*; type sync"),
    (["sync=sparta", "compressor=topk"], "compressor must be none with sync=sparta, which .*, got topk; type compre"),
    (["sync=sparta", "adaptive=qsr", "schedule=cosine"], "drives the period .*, got sync=sparta, .*; type sync=local_"),
    (["sync=sparta", "adaptive=accordion_batch", "adaptive.accordion_batch.factor=2",
      "adaptive.accordion_batch.statistic=update"],
     "statistic must be local or mean with sync=sparta, .*, got update; type adaptive.accordion_batch.statistic=local"),
    (["sync=gossip", "sync.graph=star"], "sync.graph must be one of exponential, ring, complete, got star; type sync"),
    (["sync=gossip", "sync.delay=2"], "sync.delay must be an integer of at most 1, got 2; type sync.delay=0"),
    (["sync=gossip", "compressor=topk"], "compressor must be none with sync=gossip, whose workers .*, got topk; type"),
    (["sync=gossip", "adaptive=qsr", "schedule=cosine"], "drives the period .*, got sync=gossip, whose .*; type sync"),
    (["sync=desloc", "sync.period=0"], "sync.period must be an integer of at least 1, got 0; type sync.period=32"),
    (["sync=desloc", "sync.momentum_period=40"], "momentum_period must be a multiple of period=32, got 40; type .*=96"),
    (["sync=desloc", "sync.variance_period=16"], "variance_period must be a multiple of .*, got 16; type .*=192"),
    (["sync=desloc", "sync.variance_period=0"], "variance_period must be an integer of at least 1, got 0; type .*=192"),
    (["sync=desloc", "sync.clip=0"], "sync.clip must be a number above 0, got 0; type sync.clip=1"),
    (["sync=desloc", "compressor=demo", "optimizer.momentum=0"], "compressor must leave momentum .*, got demo"),
    (["sync=noloco", "workers=3"], "workers must be an even number .*, got 3; type workers=4, or sync=diloco"),
    (["sync=noloco", "compressor=distefblocksgd"], "compressor must be none with sync=noloco, whose .*; type compres"),
    (["sync=noloco", "adaptive=qsr", "schedule=cosine"], "drives the period .*, got sync=noloco, whose .*; type sync"),
    (["sync=noloco", "sync.buffers=average"], "sync.buffers must be one of keep, reset, got average; .*keep"),
    (["sync=noloco", "sync.outer_momentum=1"], "sync.outer_momentum must be .* below 1, got 1; .*=0.3"),
    (["sync=noloco", "sync.outer_lr=0"], "sync.outer_lr must be a number above 0, got 0; type sync.outer_lr=0.7"),
    (["sync=noloco", "sync.period=0"], "sync.period must be an integer of at least 1, got 0; type sync.period=50"),
]  # fmt: skip


@pytest.mark.sample(7)
@pytest.mark.parametrize("overrides, told", REFUSED, ids=[" ".join(o) for o, _ in REFUSED])
def test_refused_in_one_sentence(tmp_path, overrides, told):
    typed = tiny.typed(tmp_path, "sync=local_sgd", *overrides)
    with pytest.raises(ConfigError, match=told) as caught:
        composed.validated(composed.cfg(*typed))
    assert "\n" not in str(caught.value) and str(caught.value).count("; type ") == 1
    for followed in advised(typed, str(caught.value)):
        composed.validated(composed.cfg(*followed))


def test_a_sparse_average_beside_groups_is_refused():
    with pytest.raises(ConfigError, match="sparta must be null where groups say who averages, got 0"):
        LocalSGD(period=None, groups=[[2, 2], [4, 4]], sparta=0.1)


def advised(typed: list[str], sentence: str) -> list[list[str]]:
    """The overrides after following a refusal's advice, one list for each of its alternatives; none where it is words.

    What is advised replaces what was typed; the options of a group that is advised fall, too.
    """
    out = []
    for advice in re.split(", or | or |, ", sentence.partition("; type ")[2].removeprefix("one of ")):
        items = advice.split()
        if not all(re.fullmatch(r"[\w.]+=\S+", item) for item in items):
            return out
        keys = [item.split("=")[0] for item in items]
        kept = [o for o in typed if not any(o.lstrip("+").startswith((f"{key}=", f"{key}.")) for key in keys)]
        out.append([*kept, *items])
    return out


def test_advice_is_read():
    assert advised(["a=1", "b=2", "b.c=3", "+b.d=4"], "x; type b=5") == [["a=1", "b=5"]]
    assert advised(["a=1"], "x; type one of a=2, b=[1,2]") == [["a=2"], ["a=1", "b=[1,2]"]]
    assert advised(["a=1"], "x; type a=2 b=3, or a=4") == [["a=2", "b=3"], ["a=4"]]
    assert advised(["a=1"], "x; type sync=slowmo to choose an outer optimizer") == []
