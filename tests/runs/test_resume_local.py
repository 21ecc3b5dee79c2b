"""Local methods stopped in mid-round and resumed equal the runs that were not, bit for bit."""

import pytest
import torch

from accordion_bench import train
from accordion_bench.runs import checkpoint
from tests.kit import tiny
from tests.runs.test_resume import differences, resume, start, state, stop, stopping_after

OVERLAP = "sync=overlap_local_sgd"
ARMS = {
    "local SGD": ["sync=local_sgd", "sync.period=5"],
    "averaged buffers": ["sync=local_sgd", "sync.period=5", "sync.buffers=average"],
    "slowmo": ["sync=slowmo", "sync.period=5"],
    "diloco": ["sync=diloco", "sync.period=5", "optimizer=adamw"],
    "muloco": ["sync=diloco", "sync.period=5", "optimizer=muon"],
    "sparseloco": ["sync=diloco", "sync.period=5", "compressor=topk", "compressor.chunk=8", "compressor.value_bits=2"],
    "muon, averaged buffers": ["sync=local_sgd", "sync.period=5", "sync.buffers=average", "optimizer=muon"],
    "late workers": ["sync=diloco", "sync.period=5", "sync.quorum=2", "sync.lateness=0.5", "compressor=topk"],
    "overlap": [OVERLAP, "sync.period=5"],
    "overlap, used early": [OVERLAP, "sync.period=5", "sync.delay=2"],
    "streaming": ["sync=streaming_diloco", "sync.period=6", "sync.delay=2", "compressor=topk", "optimizer=adamw"],
    "cocod": [OVERLAP, "sync.period=5", "sync.merge=cocod", "sync.beta=0"],
    "sparta": ["sync=sparta", "sync.sparta=0.1"],
    "diloco with sparta": ["sync=diloco", "sync.period=5", "sync.sparta=0.1"],
    "noloco": ["sync=noloco", "sync.period=5"],
    "gossip": ["sync=gossip"],
    "gossip, used late": ["sync=gossip", "sync.delay=1", "sync.period=2"],
    "desloc": ["sync=desloc", "sync.period=2", "optimizer=adamw", "sync.clip=0.05"],
    "groups": ["sync=hierarchical", "sync.groups=[[3,2],[9,4]]", "compressor=topk"],
    "groups with queries of their own": ["sync=hierarchical", "sync.groups=[[3,2],[9,4]]", "compressor=powersgd"],
    "two-way": ["sync=local_sgd", "sync.period=5", "compressor=distefblocksgd"],
    "post-local": ["sync=post_local_sgd", "sync.period=5", "compressor=topk"],
    "models first": ["sync=post_local_sgd", "sync.period=5", "sync.phase1=model", "bn=recompute"],
    "0/1 Adam": [
        *("sync=zerooneadam", "optimizer=adamw", "optimizer.lr=0.0002"),
        *("sync.freeze_step=4", "sync.refreshes=1", "sync.doubling_steps=4"),
    ],
}  # fmt: skip
STOPS = [2, 13]  # before and after the first averaging, and the switch (after 12 steps)


@pytest.mark.sample(7)
@pytest.mark.parametrize("arm", ARMS)
def test_in_mid_round(arm, tmp_path):
    torch.manual_seed(0)  # the global generator's state is saved, too, although no run draws from it
    first, second = STOPS
    train.run(start(tmp_path / "straight", *ARMS[arm]))
    cfg = start(tmp_path / "stopped", *ARMS[arm])
    folder = stop(cfg, first, every=first)
    with stopping_after(second), pytest.raises(KeyboardInterrupt):
        resume(folder, {**cfg, "checkpoint": {"every": second}})
    stopped = checkpoint.latest(folder)
    assert stopped is not None and stopped.name == f"step-{second:08d}"
    resume(folder, cfg)
    assert differences(state(folder), state(tiny.only(tmp_path / "straight"))) == []


def test_the_comparison_compares_something(tmp_path):
    """Replicas, buffers, anchors, residuals and what is in flight are in the files, and differ between workers."""
    found = {}
    for arm in ("groups", "overlap", "slowmo", "diloco", "noloco"):
        folder = stop(start(tmp_path / arm, *ARMS[arm]), 13, every=13)
        path = checkpoint.latest(folder)
        assert path is not None
        found[arm] = [torch.load(path / f"{name}.pt", weights_only=True) for name in ("shared", "worker-0", "worker-3")]
    for _, first, last in found.values():
        a, b = first["replica"], last["replica"]
        assert not torch.equal(a["parameters"]["stem.weight"], b["parameters"]["stem.weight"])
        assert a["optimizer"]["stem.weight"].keys() == b["optimizer"]["stem.weight"].keys() != set()
    shared, first, last = found["groups"]
    assert shared["sync"]["since"] == 4 and shared["sync"]["count"] == 13
    anchors = [worker["sync"]["anchors"][2]["stem.weight"] for worker in (first, last)]
    assert not torch.equal(anchors[0], anchors[1])
    assert set(first["exchange_states"]) == {"pseudo_gradient-2", "pseudo_gradient-4"}
    for worker in (first, last):
        for tier in worker["exchange_states"].values():
            assert float(tier["a.weight"]["residual_W"].abs().max()) > 0
    shared, first, last = found["overlap"]
    assert (
        all(float(x.abs().max()) > 0 for x in shared["sync"]["in_flight"]["updates"]) and shared["sync"]["since"] == 3
    )
    assert float(first["sync"]["momentum"]["a.weight"].abs().max()) > 0
    assert float(found["slowmo"][0]["sync"]["outer_buffers"][0].abs().max()) > 0
    assert float(found["diloco"][0]["sync"]["outer_buffers"][0].abs().max()) > 0
    _, first, last = found["noloco"]
    for key in ("z", "momentum"):
        assert not torch.equal(first["sync"][key]["a.weight"], last["sync"][key]["a.weight"])
    assert found["diloco"][1]["replica"]["optimizer"]["stem.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}
