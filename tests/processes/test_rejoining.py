"""Restarted processes of elastic runs: which attempt they join, and the end of processes that are lost."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.elastic import ElasticMembership
from accordion_bench.comm.generations import Generation, Register, Terms
from accordion_bench.comm.membership import LeftBehind
from accordion_bench.comm.sealed_store import SealedStore
from accordion_bench.processes import rejoining, watchdog
from accordion_bench.processes.rejoining import NEW, OVER, RUNNING, Guard, find_attempt
from accordion_bench.processes.watchdog import RankFailed, failure_of, first_failure, own_error

TERMS = Terms(2, 1, 5.0, {})
RESTARTED = {"TORCHELASTIC_RESTART_COUNT": "1"}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SealedStore:
    monkeypatch.setattr(rejoining, "SILENCE", 0.3)
    monkeypatch.setattr(rejoining, "BEAT", 0.1)
    return SealedStore(dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False), 2)


def formed(store: SealedStore, *members: Register, number: int = 1) -> None:
    """Members form a generation."""
    members[0].proposed(number, Generation([(member.me, True) for member in members]))


@pytest.fixture
def beating(store: SealedStore) -> Iterator[Register]:
    """A member that is alive."""
    register, left = Register(store, TERMS), threading.Event()

    def beat() -> None:
        while not left.wait(0.05):
            register.store.add(f"beat-{register.me}", 1)

    thread = threading.Thread(target=beat)
    thread.start()
    yield register
    left.set()
    thread.join()


def test_the_first_processes_begin(store: SealedStore) -> None:
    assert find_attempt(store, {})[1] == NEW
    assert find_attempt(store, RESTARTED)[1] == NEW  # it was lost before any could begin


def test_a_restarted_process_joins_members_that_are_alive(store: SealedStore, beating: Register) -> None:
    formed(store, beating, Register(store, TERMS))
    own, state = find_attempt(store, RESTARTED)
    own.set("x", "1")
    assert state == RUNNING and store.read("x", str) == "1"


def test_without_a_member_a_new_attempt_begins(store: SealedStore) -> None:
    """All processes that are started again find the same one, apart from what the lost ones have left."""
    formed(store, Register(store, TERMS))
    store.set("run_folder", "left")
    (first, one), (second, two) = (find_attempt(store, RESTARTED) for _ in range(2))
    first.set("x", "1")
    assert (one, two) == (NEW, NEW)
    assert second.read("x", str) == "1" and second.read("run_folder", str) is None
    formed(first, Register(first, TERMS))
    assert find_attempt(store, RESTARTED)[0].read("x", str) is None  # the third one


def test_a_run_that_has_ended_is_not_begun_again(store: SealedStore) -> None:
    register = Register(store, TERMS)
    formed(store, register)
    register.end()
    assert find_attempt(store, RESTARTED)[1] == OVER


def test_a_failure_before_the_start_is_over_after_a_restart(store: SealedStore) -> None:
    """A process that is started for the first time still reads it."""
    first_failure(store, failure_of(ValueError("boom"), 1, 5.0))
    assert find_attempt(store, {})[0].read(watchdog.FAILURE, str) is not None
    assert find_attempt(store, RESTARTED)[0].read(watchdog.FAILURE, str) is None


def test_a_loss_needs_no_traceback() -> None:
    error = own_error(LeftBehind("the others went on"), 1, 5.0)
    assert isinstance(error, RankFailed) and str(error) == "the others went on"
    own = ValueError("boom")
    assert own_error(own, 1, 5.0) is own


def test_a_worker_that_joins_never_begins_a_run(store: SealedStore) -> None:
    """It has not loaded the checkpoint from which a run would begin again."""
    membership = ElasticMembership(store, Comm(1, 2), Terms(2, 1, 5.0, {}, may_found=False))
    try:
        with pytest.raises(LeftBehind, match="a worker must be left for another one to enter, got none"):
            membership.enter(None)  # type: ignore[arg-type]
    finally:
        membership.leave(over=False)


# ---- processes that do not end by themselves


def ended(guard: Guard, monkeypatch: pytest.MonkeyPatch, seconds: float = 1.5) -> list[int]:
    """Exit statuses with which a guard ends its process within some seconds."""
    statuses: list[int] = []
    monkeypatch.setattr(rejoining, "LOOK", 0.05)
    monkeypatch.setattr(rejoining, "GRACE", 0.2)
    monkeypatch.setattr(rejoining, "AFTER", 0.4)
    monkeypatch.setattr(rejoining.os, "_exit", statuses.append)
    with guard:
        until = time.monotonic() + seconds
        while not statuses and time.monotonic() < until:
            time.sleep(0.02)
    return statuses[:1]


def test_a_member_is_left_alone(store: SealedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    me = Register(store, TERMS)
    formed(store, me)
    assert ended(Guard(store, me.me), monkeypatch) == []


@pytest.mark.parametrize("why", ["the others continue without it", "the run has been over"])
def test_a_process_that_hangs_ends(store: SealedStore, monkeypatch: pytest.MonkeyPatch, capfd, why: str) -> None:
    me, other = Register(store, TERMS), Register(store, TERMS)
    formed(store, me, other)
    if "over" in why:
        other.end()
    else:
        formed(store, other, number=2)
    assert ended(Guard(store, me.me), monkeypatch) == [1]
    assert f"this worker has ended itself, because {why}" in capfd.readouterr().err


def test_without_its_launcher_it_ends(store: SealedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    guard = Guard(store, Register(store, TERMS).me)
    monkeypatch.setattr(rejoining, "is_gone", lambda parent: True)
    assert ended(guard, monkeypatch) == [1]


def test_a_suspended_process_is_killed_by_others_of_its_machine(
    store: SealedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the process that has registered: a later one of its number has another start time."""
    monkeypatch.setattr(rejoining, "NEIGHBOUR", 0.0)
    me, *others = (Register(store, TERMS) for _ in range(3))
    children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in others]
    space = rejoining.process_space()
    for other, child, later in zip(others, children, (0, 1), strict=True):
        os.kill(child.pid, signal.SIGSTOP)
        store.set(f"process-{other.me}", f"{space} {child.pid} {rejoining._started(child.pid) + later}")
    formed(store, me, *others)
    formed(store, me, number=2)
    try:
        assert ended(Guard(store, me.me), monkeypatch) == []
        assert children[0].wait(5) == -signal.SIGKILL
        assert children[1].poll() is None
    finally:
        for child in children:
            child.kill()
            child.wait()


@pytest.mark.parametrize("garbage", ["", "a b", "a b c", json.dumps({"pid": 1})])
def test_garbage_of_others_kills_nobody(store: SealedStore, garbage: str) -> None:
    store.set("process-0123456789abcdef", garbage)
    Guard(store, "0" * 16)._kill("0123456789abcdef")
