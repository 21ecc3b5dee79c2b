"""The launcher of elastic runs: which lost worker is replaced, and when no other one is started."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from accordion_bench.comm.generations import Generation, Register, Terms
from accordion_bench.processes import replacing
from accordion_bench.processes.placement import Placement
from accordion_bench.processes.replacing import Replaced
from accordion_bench.processes.spawn import Ended, Meeting
from tests.kit.processes import forked

KILLED = -int(signal.SIGKILL)
SHORT = 0.3  # in these tests, for `replacing.SHORT`
NONE_AFTER = "no other one is started after 5 in a row that were lost before they worked for"


class Pretended:
    """A worker that is a thread: what it does is the launcher's task, which returns an exit status."""

    def __init__(self, target: Callable, args: tuple, name: str, daemon: bool) -> None:
        self.args, self.name, self.exitcode, self.pid = args, name, None, 0
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        task, where, meeting, _ = self.args  # the launcher closes its copy of the pipe, which is this one
        self.exitcode = task(where.rank, meeting)

    def start(self) -> None:
        self.thread.start()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        self.exitcode = KILLED if self.exitcode is None else self.exitcode


class Pretending:
    """A context of multiprocessing."""

    Process = Pretended


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Ended, list[int]]]:
    """Runs pretended workers under the launcher; returns how they ended, and the numbers of those that were started."""
    monkeypatch.setattr(replacing, "LOOK", 0.02)
    monkeypatch.setattr(replacing, "SHORT", SHORT)
    monkeypatch.setattr(replacing.multiprocessing, "get_context", lambda kind: Pretending)

    def run(worker: Callable[[int, Meeting], int], workers: int) -> tuple[Ended, list[int]]:
        numbers: list[int] = []

        def task(number: int, meeting: Meeting) -> int:
            numbers.append(number)
            return worker(number, meeting)

        return Replaced(task, Placement("gloo", workers, 1), 5.0, None).run(), sorted(numbers)  # type: ignore[arg-type]

    return run


def register(number: int, meeting: Meeting) -> Register:
    """What a worker of this number has of the run's store."""
    return Register(meeting.store(1), Terms(1, 1, 5.0, {}, number))


def enter(number: int, meeting: Meeting, others: Sequence[str] = ()) -> Register:
    """Become a member, of the first generation that is not there yet, besides others."""
    own = register(number, meeting)
    generation = next(n for n in range(1, 100) if own.generation(n) is None)
    own.proposed(generation, Generation([(member, True) for member in (*others, own.me)]))
    return own


def test_a_lost_worker_is_replaced_by_one_of_a_new_number(launch: Any, capfd: pytest.CaptureFixture) -> None:
    ended, started = launch(lambda number, meeting: KILLED if number == 0 else 0, 1)
    assert (started, ended.failures) == ([0, 1], [])
    assert capfd.readouterr().err == "warning: worker 0 is lost (died: SIGKILL); another one is started\n"


def test_no_worker_is_started_for_a_run_that_is_over(launch: Any, capfd: pytest.CaptureFixture) -> None:
    """Worker 0 says that the run is over, and is still busy when worker 1 is killed."""
    lost = threading.Event()

    def worker(number: int, meeting: Meeting) -> int:
        if number == 0:
            register(number, meeting).end()
            lost.wait(5)
            time.sleep(0.2)  # ten looks of the launcher
            return 0
        while not register(number, meeting).over:
            time.sleep(0.01)
        lost.set()
        return KILLED

    ended, started = launch(worker, 2)
    assert (started, ended.failures) == ([0, 1], [])
    assert capfd.readouterr().err == ""


def test_after_one_has_come_to_the_end_none_is_started(launch: Any, capfd: pytest.CaptureFixture) -> None:
    def worker(number: int, meeting: Meeting) -> int:
        if number == 0:
            return 0
        time.sleep(0.2)
        return KILLED

    ended, started = launch(worker, 2)
    assert (started, ended.failures) == ([0, 1], [])
    assert capfd.readouterr().err == ""


def test_after_five_in_a_row_that_have_not_worked_none_is_started(launch: Any, capfd: pytest.CaptureFixture) -> None:
    """Neither those that never entered have worked, nor those that were lost at once after entering."""

    def worker(number: int, meeting: Meeting) -> int:
        if number % 2:
            enter(number, meeting)
            time.sleep(SHORT / 3)
        return KILLED

    ended, started = launch(worker, 1)
    assert started == [0, 1, 2, 3, 4]
    (failure,) = ended.failures
    assert failure["message"] == "all workers are lost, the last one (died: SIGKILL) like those before it"
    said = capfd.readouterr().err.splitlines()
    assert said[:-1] == [f"warning: worker {n} is lost (died: SIGKILL); another one is started" for n in range(4)]
    assert said[-1] == f"warning: worker 4 is lost (died: SIGKILL); {NONE_AFTER} 0.3 s"


def test_the_others_go_on_without_those_that_do_not_work(launch: Any, capfd: pytest.CaptureFixture) -> None:
    """Two of three are lost again and again: the reason is told once, and the one that works comes to the end."""
    told = threading.Event()

    def worker(number: int, meeting: Meeting) -> int:
        if number == 0:
            told.wait(5)
            time.sleep(0.2)
            return 0
        if number == 6:  # the last that is started
            told.set()
        return KILLED

    ended, started = launch(worker, 3)
    assert (started, ended.failures) == ([0, 1, 2, 3, 4, 5, 6], [])
    said = capfd.readouterr().err
    assert said.count("another one is started") == 4
    assert said.count(NONE_AFTER) == 1
    assert len(said.splitlines()) == 6


def test_who_has_worked_is_replaced_however_often(launch: Any, capfd: pytest.CaptureFixture) -> None:
    """Seven members are lost one after another, each after it has worked; the eighth comes to the end."""

    def worker(number: int, meeting: Meeting) -> int:
        enter(number, meeting)
        time.sleep(2 * SHORT)
        return 0 if number == 7 else KILLED

    ended, started = launch(worker, 1)
    assert (started, ended.failures) == (list(range(8)), [])
    assert capfd.readouterr().err.count("another one is started") == 7


def test_a_member_that_the_others_go_on_without_is_killed_and_replaced(launch: Any) -> None:
    """It hangs: it would never end by itself."""
    hangs = threading.Event()

    def worker(number: int, meeting: Meeting) -> int:
        if number == 0:
            enter(number, meeting)
            hangs.wait(30)
            return 0
        time.sleep(2 * SHORT)
        enter(number, meeting)
        time.sleep(2 * SHORT)
        return 0

    try:
        ended, started = launch(worker, 2)
    finally:
        hangs.set()
    assert (started, ended.failures) == ([0, 1, 2], [])


def die(where: Placement, watch: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_processes_that_die_at_once_are_not_started_for_ever(capfd: pytest.CaptureFixture) -> None:
    """Real ones, which do not come as far as the store."""
    with forked():
        ended = Replaced(die, Placement("gloo", 2, 1), 5.0, None).run()
    said = capfd.readouterr().err
    assert said.count("(died: SIGKILL); another one is started") == 4
    assert sum(line.startswith("warning: worker") for line in said.splitlines()) == 6
    assert said.count(f"(died: SIGKILL); {NONE_AFTER} 10 s") == 1
    (failure,) = ended.failures
    assert failure["message"].startswith("all workers are lost")
