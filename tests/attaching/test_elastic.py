"""Workers that come and go: a lost one costs a repeated average, a new one gets everything from a peer."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.elastic import LR, Run

PERIOD = 2
STREAMED = {"sync": "streaming_diloco", "period": 4, "fragments": 2, "delay": 1}


def after(rounds: list[list[int]]) -> float:
    """What every weight is after rounds of local SGD, each with these workers."""
    return -LR * PERIOD * sum(statistics.mean(name + 1 for name in names) for names in rounds)


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_lost_worker_costs_a_repeated_average(tmp_path: Path, end: str) -> None:
    """The average is that of the others; their bytes are those of an undisturbed run, and nobody waits for long."""
    with Run(tmp_path, 8, period=PERIOD) as run:
        run.start(0, 1, 2, first=4)
        run.start(3, first=4, end=(3, end))
        found = [run.told(name) for name in range(3)]
    for own in found:
        assert own["values"]["1"] == [pytest.approx(after([[0, 1, 2, 3]]))] * 2
        assert own["values"]["3"] == [pytest.approx(after([[0, 1, 2, 3], [0, 1, 2]]))] * 2
        assert own["end"] == pytest.approx(after([[0, 1, 2, 3], *[[0, 1, 2]] * 3]))
        assert list(own["members"].values()) == [4] * 3 + [3] * 5
        assert own["took"]["3"] < 5 + 2
        row = own["row"]
        assert (row["members"], row["joined"], row["lost"]) == (3, 0, 1)
        assert row["payload_bytes"] == 4 * 4 * 8  # of one worker: 4 rounds of 8 weights
    assert not any("error" in own for own in found)


def test_a_new_worker_gets_everything_from_a_peer(tmp_path: Path) -> None:
    """It enters after a round with the others' values and step, and from then on averages are of four again."""
    with Run(tmp_path, 40, period=PERIOD, pace=0.05) as run:
        run.start(0, 1, 2, first=3)
        run.start(7)
        found = {name: run.told(name) for name in (0, 1, 2, 7)}
    entered = found[7]["entered"]
    assert 0 < entered < 40 and entered % PERIOD == 0
    with_it, without = [[0, 1, 2, 7]] * ((40 - entered) // PERIOD), [[0, 1, 2]] * (entered // PERIOD)
    for own in found.values():
        assert own["end"] == pytest.approx(after([*without, *with_it]))
        assert (own["row"]["members"], own["row"]["joined"], own["row"]["lost"]) == (4, 1, 0)
        assert own["row"]["payload_bytes"] == 20 * 4 * 8
        assert own["row"]["joining_bytes"] == found[0]["row"]["joining_bytes"] > 4 * 8
    before = {name: own["values"].get(str(entered - 1)) for name, own in found.items() if name != 7}
    assert len(set(map(str, before.values()))) == 1


def seen(found: dict[int, dict[str, Any]], steps: dict[int, range]) -> list[int]:
    return [i for name, own in found.items() for step in steps[name] for i in own["samples"][str(step)]]


def test_no_sample_is_lost_or_in_two_averages(tmp_path: Path) -> None:
    """What a lost worker has computed since the last average is dealt to the others."""
    with Run(tmp_path, 5, period=PERIOD) as run:
        run.start(0, 1, 2, first=4)
        run.start(3, first=4, end=(1, "killed"))
        found = {name: run.told(name) for name in range(3)}
    shared = seen(found, dict.fromkeys(found, range(4)))  # 24 samples: 4 steps of 3 workers with 2 each
    assert sorted(shared) == list(range(24))


@pytest.mark.parametrize("options", [STREAMED, {"sync": "diloco", "period": 2}, {"sync": "slowmo", "period": 2}])
def test_fragments_and_outer_optimizers_go_on(tmp_path: Path, options: dict[str, Any]) -> None:
    """A worker is lost while a fragment travels or a round is averaged, and a new one enters; all end at one place."""
    with Run(tmp_path, 48, pace=0.05, **options) as run:
        run.start(0, 1, 2, first=4)
        run.start(3, first=4, end=(7, "killed"))
        run.start(8)
        found = {name: run.told(name) for name in (0, 1, 2, 8)}
    assert not any("error" in own for own in found.values())
    assert len({own["end"] for own in found.values()}) == 1
    assert {(own["row"]["members"], own["row"]["joined"], own["row"]["lost"]) for own in found.values()} == {(4, 1, 1)}
    assert len({own["row"]["payload_bytes"] for own in found.values()}) == 1


def test_the_outer_momentum_goes_on(tmp_path: Path) -> None:
    """After a loss and an entry z is what DiLoCo makes of the averages of those who were there."""
    with Run(tmp_path, 24, pace=0.05, sync="diloco", period=PERIOD) as run:
        run.start(0, 1, 2, first=4)
        run.start(3, first=4, end=(3, "killed"))
        run.start(8)
        found = {name: run.told(name) for name in (0, 1, 2, 8)}
    assert not any("error" in own for own in found.values())
    z = torch.zeros((), requires_grad=True)
    outer = torch.optim.SGD([z], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(PERIOD, 24 + PERIOD, PERIOD):
        there = [0, 1, 2] + [3] * (step < 4) + [8] * (step > found[8]["entered"])
        z.grad = torch.tensor(LR * PERIOD * statistics.mean(name + 1 for name in there))
        outer.step()
    assert [own["end"] for own in found.values()] == [pytest.approx(z.item())] * 4


@pytest.mark.slow
@pytest.mark.parametrize("at", [4, 5, 6, 7])  # before and after a fragment is sent, and when it is used
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_loss_at_any_moment_of_a_fragment(tmp_path: Path, fragments: int, delay: int, at: int) -> None:
    """Those who are left end at one place, in as many steps, with as many bytes of one worker."""
    options = STREAMED | {"fragments": fragments, "delay": delay}
    with Run(tmp_path, 16, **options) as run:
        run.start(0, 1, 2, first=4)
        run.start(3, first=4, end=(at, "killed"))
        found = [run.told(name) for name in range(3)]
    assert not any("error" in own for own in found)
    assert len({own["end"] for own in found}) == 1
    assert {own["row"]["payload_bytes"] for own in found} == {(4 * 8 * 16) // 4 + 4 * 8}  # H = 4, and the end's average


@pytest.mark.slow
def test_workers_enter_after_two_rounds_and_again(tmp_path: Path) -> None:
    """Two begin, two more enter at the same time and one later: all end at one place."""
    with Run(tmp_path, 80, period=PERIOD, pace=0.05) as run:
        run.start(0, 1, first=2)
        run.start(2, 3)
        run.start(4, pace=0.06)
        found = [run.told(name) for name in range(5)]
    assert not any("error" in own for own in found)
    assert len({own["end"] for own in found}) == 1
    assert {(own["row"]["members"], own["row"]["joined"]) for own in found} == {(5, 3)}


def test_who_cannot_go_on_is_told(tmp_path: Path) -> None:
    """Another option or model, too few that are left, a run that is over: one sentence each."""
    with Run(tmp_path, 30, period=PERIOD, pace=0.05, timeout=2.0) as run:
        run.start(0, first=2)
        run.start(1, first=2, end=(25, "killed"))
        run.start(5, period=4)
        run.start(6, inputs=4)
        assert run.told(5)["error"] == (
            "LostWorker: ab.local: sync.period must be 2 as in the run that goes on, got 4; start it alike"
        )
        assert run.told(6)["error"] == (
            "LostWorker: ab.local: parameters.layers.0.weight must be [2, 3] torch.float32 as in the run that goes on, "
            "got [2, 4] torch.float32; start it alike"
        )
        assert run.told(0)["error"] == (
            "LostWorker: step 25: at least min_workers must be left, got 1 process of 2; go on from a checkpoint, or "
            "begin with a smaller min_workers"
        )
    with Run(tmp_path, 2, period=PERIOD) as run:
        run.start(0, 1, first=2)
        run.told(0), run.told(1)
        run.start(9)
        assert run.told(9)["error"] == (
            "LostWorker: ab.local: a run must go on for a worker to enter, got one that is over; begin another one"
        )
