"""The step after which all do the same: simulated processes in lock-step, whose steps take what they like."""

import heapq
import random
import sys
import threading
from collections.abc import Callable

import pytest

from accordion_bench.comm import sealed_store
from accordion_bench.comm.sealed_store import LOOK, AgreedStep, SealedStore
from tests.kit.stores import LocalStore

Seconds = Callable[[int, int], float]  # of a rank's step


class Lockstep:
    """Processes that wait for each other after every `period` steps, on a clock of their own.

    Args:
        seconds: that each step takes on each rank, without the waiting.
        ranks: how many.
        period: steps between two exchanges.
        asked: when each of them gets the signal; those who get none are not in it.
    """

    def __init__(self, seconds: Seconds, ranks: int, period: int, asked: dict[int, float]) -> None:
        self.seconds, self.ranks, self.period, self.asked = seconds, ranks, period, asked
        self.now, self.offset = 0.0, 0.0
        self.ends: dict[int, tuple[int, float]] = {}  # step and time
        self.longest = 0.0  # seconds of a step after the signal, waiting for the others left out
        self.apart = 0  # steps, from the signal on

    def run(self, monkeypatch: pytest.MonkeyPatch) -> "Lockstep":
        monkeypatch.setattr(sealed_store.time, "monotonic", lambda: self.now + self.offset)
        store = SealedStore(LocalStore(), self.ranks)
        agreed = [AgreedStep("stop", store) for _ in range(self.ranks)]
        queue = [(self.seconds(rank, 1), rank, 1) for rank in range(self.ranks)]
        heapq.heapify(queue)
        arrived: list[int] = []
        first = min(self.asked.values())
        reached = [0] * self.ranks
        while queue:
            self.now, rank, step = heapq.heappop(queue)
            arrived.append(rank)
            if step % self.period == 0 and len(arrived) < self.ranks:
                continue
            ready, arrived = (arrived, []) if step % self.period == 0 else ([rank], arrived[:-1])
            for rank in ready:
                reached[rank] = step
                self.offset = 1000.0 * rank  # no clock is another one's
                if agreed[rank].due(step, lambda r=rank: self.now >= self.asked.get(r, float("inf"))):
                    self.ends[rank] = step, self.now
                    continue
                takes = self.seconds(rank, step + 1)
                if self.now + takes > first:
                    self.longest = max(self.longest, takes)
                heapq.heappush(queue, (self.now + takes, rank, step + 1))
            if self.now >= first:
                self.apart = max(self.apart, max(reached) - min(reached))
        return self

    def check(self) -> None:
        """All have ended after one step, within the bound that `AgreedStep` names."""
        assert len(self.ends) == self.ranks
        assert len({step for step, _ in self.ends.values()}) == 1, self.ends
        late = max(time for _, time in self.ends.values()) - min(self.asked.values())
        steps = 4 + (self.apart if self.period > 1 else 0)
        assert late <= LOOK + steps * self.longest + 1e-6, (late, self.longest, self.apart)


def changing(before: float, after: float, when: int) -> Seconds:
    return lambda rank, step: before if step < when else after


def straggling(usual: float, slow: float) -> Seconds:
    return lambda rank, step: slow if rank == 1 else usual


def compiling(usual: float, pause: float, when: int) -> Seconds:
    """One rank alone compiles anew in one step."""
    return lambda rank, step: pause if (rank, step) == (2, when) else usual * (1 + 0.1 * rank)


@pytest.mark.parametrize(
    "asked", [{0: 1.0}, {2: 1.0}, {0: 1.0, 1: 1.01, 2: 0.99, 3: 1.0}], ids=["leader", "one", "all"]
)
@pytest.mark.parametrize(
    "seconds",
    [
        changing(0.002, 0.25, 500),  # right after the signal
        changing(0.002, 0.25, 480),
        changing(0.002, 0.25, 540),
        changing(0.25, 0.002, 5),
        changing(0.25, 0.002, 4),
        straggling(0.002, 0.2),
        compiling(0.005, 40.0, 190),
        compiling(0.25, 40.0, 5),
    ],
)
def test_all_stop_after_the_same_step_soon(seconds, asked, monkeypatch):
    """Steps that become a hundred times longer or shorter, a straggler, and a pause on one rank alone."""
    run = Lockstep(seconds, 4, 1, asked).run(monkeypatch)
    run.check()
    if run.longest < 1:
        assert max(time for _, time in run.ends.values()) < 1.0 + 2.0  # 121 s, where the step was foreseen


def test_a_signal_to_all_ends_the_run_after_the_next_step(monkeypatch):
    """As Slurm and torchrun send it: also where steps take 10 s, there is time before the kill after 30 s."""
    run = Lockstep(lambda rank, step: 10.0, 4, 1, dict.fromkeys(range(4), 34.0)).run(monkeypatch)
    assert {time for _, time in run.ends.values()} == {50.0}


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_steps_take(seed, monkeypatch):
    """Random processes, steps between 1 ms and 1 s, local steps, signals to some."""
    draw = random.Random(seed)
    ranks, period = draw.randint(2, 6), draw.choice([1, 1, 2, 7, 64])
    phases = [(draw.randint(1, 400), 10 ** draw.uniform(-3, 0)) for _ in range(4)]
    speed = [draw.uniform(1, 3) for _ in range(ranks)]

    def seconds(rank: int, step: int) -> float:
        base = next((base for begin, base in sorted(phases, reverse=True) if step >= begin), 0.01)
        return base * speed[rank]

    asked = {rank: draw.uniform(0.5, 3) for rank in draw.sample(range(ranks), draw.randint(1, ranks))}
    Lockstep(seconds, ranks, period, asked).run(monkeypatch).check()


def test_processes_that_never_wait_for_each_other_agree_too(monkeypatch):
    """Threads that race through their steps: the agreement rests on no exchange and on no clock."""
    monkeypatch.setattr(sealed_store, "LOOK", 0.0)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for seed in range(20):
            ends = _race(seed, 5)
            assert len(ends) == 5 and len({tuple(steps) for steps in ends}) == 1, ends
    finally:
        sys.setswitchinterval(interval)


def _race(seed: int, ranks: int, rounds: int = 3) -> list[list[int]]:
    store = SealedStore(LocalStore(), ranks, "a secret of some length")
    ends: list[list[int]] = []

    def train(rank: int) -> None:
        draw, agreed, mine = random.Random(f"{seed} {rank}"), AgreedStep("save", store), []
        for step in range(1, 100_000):
            if agreed.due(step, lambda: draw.random() < 0.02):
                mine.append(step)
                if len(mine) == rounds:
                    break
        ends.append(mine)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


@pytest.mark.parametrize(("processes", "seconds", "most"), [(2, 0.002, 1 + 2 / LOOK), (1000, 0.01, 11)])
def test_nobody_wants_it(processes, seconds, most, monkeypatch):
    """Then the store is looked at now and then, not after every step; of a thousand processes, once a second."""
    now = [0.0]
    monkeypatch.setattr(sealed_store.time, "monotonic", lambda: now[0])
    raw = LocalStore()
    agreed = AgreedStep("stop", SealedStore(raw, processes))
    for step in range(1, 1001):
        now[0] += seconds
        assert not agreed.due(step, lambda: False)
    assert raw.calls <= most


@pytest.mark.parametrize("garbage", [b"last", b"last -1", b"go 1e9", b"\xff", b"last 3", b"stop 9" * 300_000])
def test_a_stranger_in_the_store(garbage, capsys):
    """Is told, and stops nothing: neither by what is no number, nor by a step that is over."""
    raw = LocalStore()
    agreed = AgreedStep("stop", SealedStore(raw, 2))
    raw.values["stop-0"] = garbage
    assert not any(agreed.due(step, lambda: True) for step in range(7, 30))
    told = capsys.readouterr().err
    assert told.startswith("warning: stop-0 in the store of the run ") and told.count("\n") == 1
