"""When a run saves: rarely enough to cost nothing, often enough to lose little."""

import itertools

import pytest

from accordion_bench.comm import sealed_store
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.sealed_store import AgreedStep, SealedStore
from accordion_bench.run_config import CheckpointConfig
from accordion_bench.training import saver
from accordion_bench.training.saver import Saver
from scripts.bench import checkpoint as bench_checkpoint
from tests.kit.stores import LocalStore


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch):
    clock = Time()
    monkeypatch.setattr(saver, "time", clock)
    monkeypatch.setattr(sealed_store, "time", clock)
    return clock


def train(time: Time, epochs: int, epoch: float, took: float, **options) -> list[tuple[int, float]]:
    """(step, when) of each saving in a run of ten steps per epoch."""
    own = Saver(CheckpointConfig(**options), Comm(1), None)
    own.begin(0)
    found = []

    def save(step: int) -> None:
        began = time.now
        time.now += took
        own.saved(step, began)
        found.append((step, round(began, 6)))

    for step in range(1, 10 * epochs + 1):
        time.now += epoch / 10
        if own.due_after_step(step):
            save(step)
        if step % 10 == 0 and own.due_after_epoch(step, step == 10 * epochs):
            save(step)
    return found


def test_once_per_epoch(time):
    assert [step for step, _ in train(time, 5, epoch=100, took=1)] == [10, 20, 30, 40, 50]


@pytest.mark.parametrize("epoch, took", [(1.0, 0.1), (0.2, 0.01), (30, 2), (3, 0.002)])
def test_saving_takes_at_most_two_percent(epoch, took, time):
    """Of the time until then; the end of the run is saved in any case."""
    found = train(time, 400, epoch, took)
    assert found[-1][0] == 4000 and len(found) > 4
    for number, (_, when) in enumerate(found[:-1], 1):
        assert number * took <= 0.02 * when + took
    apart = [b - a for (_, a), (_, b) in itertools.pairwise(found[1:-1])]
    assert max(apart) <= max(took / saver.SHARE, epoch) + epoch + 2 * took  # and not more rarely than that


def test_long_epochs_are_saved_by_the_clock(time):
    found = train(time, 2, epoch=3600, took=5)
    assert [step for step, _ in found] == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    time.now = 0
    assert [step for step, _ in train(time, 2, epoch=3600, took=5, minutes=0)] == [10, 20]
    time.now = 0
    assert [step for step, _ in train(time, 2, epoch=3600, took=5, minutes=25)] == [5, 10, 15, 20]


def test_steps_that_were_typed_are_kept_whatever_they_cost(time):
    assert [step for step, _ in train(time, 2, epoch=0.01, took=1, every=6)] == [6, 12, 18, 20]


def test_nothing_where_it_is_switched_off_or_cannot_be(time):
    assert train(time, 2, epoch=3600, took=1, every=0) == []
    lost = Saver(CheckpointConfig(), Comm(1), None, resumable=False)
    lost.begin(0)
    time.now = 1e6
    assert not lost.due_after_step(1) and not lost.due_after_epoch(10, True)


@pytest.mark.parametrize("period", [1, 64])
def test_all_processes_save_after_the_same_steps(period, time):
    """Between two averagings of local steps a process may be far ahead of the leader."""
    store = SealedStore(LocalStore(), 3)
    agreed = [AgreedStep("save", store) for _ in range(3)]
    found: list[list[int]] = [[], [], []]
    since = 0.0

    def late() -> bool:
        return time.now >= since + 20

    for begin in range(0, 20_000, period):
        for rank in (2, 1, 0):  # the leader is last, always
            for step in range(begin + 1, begin + period + 1):
                time.now += 0.004
                if agreed[rank].due(step, late):
                    found[rank].append(step)
                    since = time.now
    assert found[0] == found[1] == found[2] and len(found[0]) > 3


def test_what_it_costs(capsys):
    """At the default less than two percent of training, whatever the model."""
    bench_checkpoint.main(["--models", "resnet8", "--steps", "1", "--saves", "1"])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| resnet8")]
    assert float(row.split("|")[-4].strip().removesuffix("%")) <= 2
