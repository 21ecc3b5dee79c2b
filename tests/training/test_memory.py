"""A long run holds as much memory after its last step as after its thousandth; what the clock keeps: test_clock.py."""

import gc
import tracemalloc
import weakref

import pytest

from accordion_bench import train
from accordion_bench.comm import samples
from accordion_bench.options.conf_dir import package_dir
from accordion_bench.training.trainer import Trainer
from tests.kit import composed

ONE_EPOCH = ["dataset.train_size=8000", "dataset.size=4", "batch_size=1", "epochs=1", "schedule=constant"]
ARMS = {
    "dense": [],
    "topk": ["compressor=topk"],
    "accordion": ["compressor=powersgd", "adaptive=accordion", "adaptive.accordion.interval=1"],
    "local": ["sync=local_sgd", "sync.period=4"],
    "gravac": ["compressor=topk", "adaptive=gravac"],
    "qsr": ["adaptive=qsr", "schedule=cosine", "schedule.warmup_epochs=0"],
    "alq": ["compressor=qsgd", "adaptive=alq", "adaptive.alq.update_at=[0,500]"],
    "saved": ["checkpoint.minutes=0.01"],
}


def growth(runs, monkeypatch, first: int, last: int, *overrides: str) -> float:
    """Bytes of memory per step that a run holds on to between two steps, of what lines of this program have made."""
    held: dict[int, int] = {}
    original = Trainer.train_step

    def train_step(self: Trainer) -> None:
        original(self)
        if self.position.step in (first, last):
            gc.collect()
            ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, f"{package_dir()}/*")])
            held[self.position.step] = sum(trace.size for trace in ours.traces)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    monkeypatch.setattr(samples, "MOST", 64)  # a thousand, of a run that takes longer
    monkeypatch.setattr(samples, "LONGEST", 16)
    cfg = composed.run(runs, *ONE_EPOCH, *overrides)
    tracemalloc.start(1)
    try:
        train.run(cfg)
    finally:
        tracemalloc.stop()
    return (held[last] - held[first]) / (last - first)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS)
def test_no_step_of_any_kind_leaves_anything(arm, tmp_path, monkeypatch):
    assert growth(tmp_path, monkeypatch, 1000, 2000, *ARMS[arm]) < 16


def test_a_run_that_is_over_leaves_nothing_without_waiting_for_the_collector(tmp_path, monkeypatch):
    """Readers of data go with it; the model, whose hooks know each other, goes with the collector."""
    kept: list[weakref.ref] = []
    original = Trainer.__init__

    def init(self: Trainer, *arguments) -> None:
        original(self, *arguments)
        kept.extend([weakref.ref(self), weakref.ref(self.data)])

    monkeypatch.setattr(Trainer, "__init__", init)
    gc.disable()
    try:
        train.run(composed.run(tmp_path, "epochs=1", "schedule.warmup_epochs=0"))
        assert [reference() for reference in kept] == [None] * 2
    finally:
        gc.enable()
