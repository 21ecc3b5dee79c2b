"""Faults: whatever happens to one process, the run ends soon, says why, and leaves nobody behind."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from accordion_bench import train
from accordion_bench.comm.sealed_store import SealedStore
from accordion_bench.options.checks import ConfigError
from accordion_bench.processes import waiting, watchdog
from accordion_bench.processes.waiting import Neighbours
from accordion_bench.processes.watchdog import ChildRefused, RankFailed, Watch, error_for, failure_of, first_failure
from accordion_bench.runs.folder import RunFolder
from tests.kit import composed, processes, tiny
from tests.kit.stores import LocalStore

SOON = 30.0  # seconds from the fault to the end of the last process
LONG = ["comm=gloo", "epochs=100000", "model._target_=tests.kit.faulty.Net"]
SOURCE = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp"  # as torch 2.15 has it
GLOO_LOST = f"{SOURCE}/pair.cc:561] Connection closed by peer [127.0.0.1]:5. This is typically caused by"
GLOO_LATE = f"{SOURCE}/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of spawned processes


def began(runs: Path, jobs: list) -> float:
    """The time at which training has begun: a fault comes within its first steps."""
    until = time.monotonic() + 90
    while not list(runs.glob("*/run.log")):
        assert time.monotonic() < until and all(job.poll() is None for job in jobs), processes.outputs(jobs)
        time.sleep(0.05)
    return time.monotonic()


def ended(runs: Path, jobs: list) -> list:
    """Outputs of all jobs, which end soon after training has begun."""
    start = began(runs, jobs)
    done = processes.outputs(jobs, SOON + 5)
    assert time.monotonic() - start < SOON
    return done


def summary(runs: Path) -> dict:
    folder = RunFolder(tiny.only(runs))
    assert not folder.done
    return folder.read_json("summary.json")


def first_traceback(text: str) -> str:
    """Up to the line that names the error."""
    lines = text[text.index("Traceback (most recent call last)") :].splitlines()
    return next(line for line in lines[1:] if line[:1] not in (" ", ""))


# ---- one rank fails


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_raises_in_backward_under_slurm(rank, tmp_path, monkeypatch):
    """Its traceback is the first and only one, on rank 0 as well as where it happened."""
    monkeypatch.setenv("FAULT", f"backward:{rank}:9")
    done = ended(tmp_path, processes.tasks(tiny.typed(tmp_path, *LONG)))
    assert [job.returncode for job in done] == [1, 1]
    for job in done[: rank + 1]:
        assert first_traceback(job.stderr) == "ValueError: boom in backward"
        assert job.stderr.count("Traceback") == 1
    assert (rank == 0) == ("Traceback" not in done[1].stderr)
    assert summary(tmp_path)["stopped_by"] == "ValueError" and "boom in backward" in summary(tmp_path)["reason"]
    assert "boom in backward" in (tiny.only(tmp_path) / "run.log").read_text()


@pytest.mark.slow
def test_a_rank_is_killed_under_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULT", "kill:1:9")
    (done,) = ended(tmp_path, [processes.started([*tiny.TORCHRUN, *tiny.typed(tmp_path, *LONG)], dict(os.environ))])
    assert done.returncode != 0
    text = "rank 1 failed:\nit ended without a word (killed; out of memory?)"
    assert text in done.stderr and summary(tmp_path) == {"stopped_by": "died", "reason": text}
    assert done.stderr.index(text) < done.stderr.index("Traceback")  # torchrun's own


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill:1:9", "backward:1:9"])
@pytest.mark.parametrize("kind", ["static", "elastic"])
def test_a_rank_fails_under_two_agents(kind, fault, tmp_path, monkeypatch):
    """The agents number the machines of an elastic run as they come; rank 1 fails on whichever it is."""
    monkeypatch.setenv("FAULT", fault)
    done = ended(tmp_path, processes.agents(kind, tiny.typed(tmp_path, *LONG)))
    assert all(job.returncode != 0 for job in done)
    told_by_leader = [job.stderr for job in done if "rank 1 failed:" in job.stderr]
    assert len(told_by_leader) == 1
    assert summary(tmp_path)["reason"].startswith("rank 1 failed:")
    if fault.startswith("backward"):
        assert [first_traceback(job.stderr) for job in done] == ["ValueError: boom in backward"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed_under_slurm(rank, tmp_path, monkeypatch):
    """Also the one that hosts the store of all."""
    monkeypatch.setenv("FAULT", f"kill:{rank}:9")
    done = ended(tmp_path, processes.tasks(tiny.typed(tmp_path, *LONG)))
    assert done[rank].returncode == -signal.SIGKILL and done[1 - rank].returncode == 1
    assert "Traceback" not in done[1 - rank].stderr
    assert "ended without a word" in done[1 - rank].stderr or "has lost" in done[1 - rank].stderr


@pytest.mark.parametrize("kind", ["backward", "kill"])
def test_a_spawned_rank_fails(kind, tmp_path, monkeypatch):
    """While a thread of each process may wait in a collective."""
    monkeypatch.setenv("FAULT", f"{kind}:1:9")
    start = time.monotonic()
    with processes.forked(), pytest.raises(RankFailed, match=r"^rank 1 failed:\n") as failed:
        train.run(composed.run(tmp_path, *LONG, "comm.processes=2", "comm.overlap=true"))
    assert time.monotonic() - start < SOON
    assert ("boom in backward" if kind == "backward" else "exit status -9") in str(failed.value)
    assert summary(tmp_path)["reason"] == str(failed.value)


@pytest.mark.slow
def test_a_launcher_that_is_killed(tmp_path):
    """Its processes end by themselves."""
    job = processes.started([*tiny.TORCHRUN, *tiny.typed(tmp_path, *LONG)], dict(os.environ))
    began(tmp_path, [job])
    job.kill()
    until = time.monotonic() + SOON
    while (left := processes.group_members(job.pid)) and time.monotonic() < until:
        time.sleep(0.2)
    processes.outputs([job])
    assert left == []


# ---- one rank is different, or does not answer


@pytest.mark.slow
def test_another_configuration_on_one_rank(tmp_path):
    done = processes.outputs(processes.tasks(tiny.typed(tmp_path, *LONG), [(), ("batch_size=8",)]))
    assert [job.returncode for job in done] == [2, 2]
    told = "batch_size must be 4 as on rank 0, got 8 on rank 1; type the same command on every machine\n"
    assert [job.stderr for job in done] == [told, told]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_command_that_cannot_be_read_on_one_rank(tmp_path):
    """The others, who could go on, are told."""
    done = processes.outputs(processes.tasks(tiny.typed(tmp_path, *LONG), [(), ("batchsize=8",)]))
    assert [job.returncode for job in done] == [2, 2]
    assert {job.stderr for job in done} == {"batchsize is called batch_size here; type batch_size=8\n"}


@pytest.mark.slow
def test_a_rank_that_hangs(tmp_path, monkeypatch):
    """The others wait for comm.timeout; then the one that hangs is ended as well."""
    monkeypatch.setenv("FAULT", "hang:1:9")
    done = ended(tmp_path, processes.tasks(tiny.typed(tmp_path, *LONG, "comm.timeout=5")))
    assert [job.returncode for job in done] == [1, 1]
    assert done[0].stderr.startswith("rank 0 has waited for another process for comm.timeout=5 s: ")
    assert done[0].stderr.count("\n") == 1 and "type comm.timeout=10 if" in done[0].stderr
    assert summary(tmp_path)["stopped_by"] == "TimedOut"


# ---- the watch itself


@pytest.fixture
def store():
    return SealedStore(dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False), 3)


def test_the_first_failure_counts(store):
    """Also for those who fail by themselves a little later."""
    failures = [failure_of(ValueError(f"of rank {rank}"), rank, 600) for rank in range(3)]
    assert [first_failure(store.clone(), failure)["message"] for failure in failures] == ["of rank 0"] * 3


def test_who_lost_a_peer_waits_for_the_cause(store):
    """A process that fails is noticed by the others before its traceback is there."""
    late = failure_of(ValueError("the cause"), 1, 600)
    timer = threading.Timer(0.5, lambda: first_failure(store.clone(), late))
    timer.start()
    error = Watch(store, 0, 2, 0, 600).first_error(RuntimeError(GLOO_LOST))
    timer.join()
    assert isinstance(error, RankFailed) and error.kind == "ValueError" and "the cause" in str(error)


def wrapped(text: str) -> Exception:
    """As the main thread sees what another thread has met."""
    try:
        try:
            raise RuntimeError(text)
        except RuntimeError as error:
            raise ValueError("of a bucket") from error
    except ValueError as error:
        return error


@pytest.mark.parametrize("make", [RuntimeError, wrapped])
def test_what_gloo_says(make):
    lost, late = failure_of(make(GLOO_LOST), 2, 4.0), failure_of(make(GLOO_LATE), 2, 4.0)
    assert (lost["kind"], late["kind"]) == (watchdog.LOST, watchdog.TIMED_OUT)
    assert "rank 2 has lost another process" in lost["message"] and "typically" not in lost["message"]
    assert "comm.timeout=4 s" in late["message"] and "type comm.timeout=8" in late["message"]


def test_what_the_store_says_of_a_server_that_is_gone():
    """Nothing but the system's words."""
    assert failure_of(RuntimeError("Connection reset by peer"), 1, 4.0)["kind"] == watchdog.LOST


@pytest.mark.parametrize("text", ["boom", "the reader of data timed out", "division by zero"])
def test_what_gloo_does_not_say(text):
    failure = failure_of(RuntimeError(text), 0, 4.0)
    assert failure["kind"] == "RuntimeError" and failure["traceback"].endswith(f"RuntimeError: {text}")


def test_who_tells_what():
    """Rank 0 and the failing one everything, the first process of a machine one line, the others nothing."""
    failed = failure_of(ValueError("boom"), 2, 600)
    refused = failure_of(ConfigError("x must be y"), 2, 600)
    assert str(error_for(failed, 0)).startswith("rank 2 failed:\n") and isinstance(error_for(failed, 0), RankFailed)
    assert str(error_for(failed, 1)) == "rank 1 has stopped, because rank 2 did: boom"
    assert str(error_for(failed, 1, aloud=False)) == ""
    assert str(error_for(refused, 0)) == "x must be y" and isinstance(error_for(refused, 0), ChildRefused)


def test_waiting_hears_of_failures(store):
    """A key that will never come: told of the failure, or after comm.timeout."""
    waiting = Watch(store, 1, 2, 1, 0.3)
    with pytest.raises(RuntimeError, match=r"wait timeout after 0.3 s, key: x"):
        waiting.get("x")
    first_failure(store, failure_of(ConfigError("no"), 0, 600))
    with pytest.raises(ChildRefused):
        waiting.get("x")


def on_machine(name: str, store: SealedStore, rank: int, monkeypatch) -> Neighbours:
    """A process that has come, on another machine."""
    monkeypatch.setattr(waiting, "process_space", lambda: name)
    come = Neighbours(store, rank)
    come.come()
    store.set(f"beat-{rank}", "1")
    come.settled()
    return come


def test_a_silent_machine_counts_as_gone(store, monkeypatch):
    """Where no process can be looked at; one whose speaker has left is not missed."""
    monkeypatch.setattr(watchdog, "SILENCE", 0.3)
    monkeypatch.setattr(waiting, "process_space", lambda: "machine-0")
    leader = Watch(store, 0, 3, 0, 600)
    leader._neighbours.come()
    leader._neighbours.settled()
    for rank in (1, 2):
        on_machine(f"machine-{rank}", store, rank, monkeypatch)
    store.set("left-1", "yes")
    assert leader._look() is None  # hears of them for the first time
    time.sleep(0.4)
    store.set("beat-0", "2")
    failure = leader._look()
    assert failure is not None and (failure["rank"], failure["kind"]) == (2, watchdog.DIED)
    assert "nothing has been heard of it" in failure["message"]
    assert json.loads(store.base.get(watchdog.FAILURE)) == failure


def test_who_looks_after_whom(monkeypatch):
    """The first of a machine after the others there, they after it; its heartbeat goes to rank 0, whose to it."""
    store = SealedStore(LocalStore(), 8)
    come = {rank: on_machine(f"machine-{rank % 2}", store, rank, monkeypatch) for rank in (2, 1, 4, 0, 3, 7, 5)}
    assert not come[2].look(store) and come[2].pids == {}  # one is missing
    come[6] = on_machine("machine-0", store, 6, monkeypatch)
    assert all(each.look(store) for each in come.values())
    looks_after = {rank: sorted(each.pids) for rank, each in come.items()}
    assert looks_after == {2: [0, 4, 6], 1: [3, 5, 7], 4: [2], 0: [2], 3: [1], 7: [1], 5: [1], 6: [2]}
    assert {rank: each.heard for rank, each in come.items() if each.heard} == {0: [1], 1: [0]}
    assert sorted(rank for rank, each in come.items() if each.speaks) == [0, 1, 2]
    monkeypatch.setattr(waiting, "_alive", lambda pid: False)
    assert [come[rank].gone() for rank in (2, 5)] == [[4, 0, 6], [1]]


def test_machines_without_process_numbers_speak_for_themselves(monkeypatch):
    """As on macOS: each process alone, by its heartbeat."""
    store = SealedStore(LocalStore(), 3)
    come = [on_machine("", store, rank, monkeypatch) for rank in range(3)]
    assert all(each.look(store) and each.speaks and not each.pids for each in come)
    assert [each.heard for each in come] == [[1, 2], [0], [0]]


GARBAGE = [
    "",
    "null",
    "7",
    "[]",
    "{}",
    "{",
    "[" * 100_000,
    '{"rank": "0", "kind": "x", "message": "y", "traceback": "z"}',
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_failure_that_is_none(garbage, capsys):
    """Somebody else has written it: ours counts, and nothing is raised."""
    raw = LocalStore()
    store = SealedStore(raw, 3)
    watch = Watch(store, 0, 3, 0, 0.1)
    raw.values[watchdog.FAILURE] = garbage.encode()
    assert watch._look() is None
    with pytest.raises(RuntimeError, match="wait timeout"):
        watch.get("x")
    assert capsys.readouterr().err.count("warning: failure in the store of the run is no such thing") == 1
    mine = ValueError("mine")
    assert watch.first_error(mine) is mine
    assert json.loads(raw.values[watchdog.FAILURE])["message"] == "mine"


def test_places_that_are_none(monkeypatch, capsys):
    """They are passed over."""
    raw = LocalStore()
    store = SealedStore(raw, 2)
    monkeypatch.setattr(waiting, "process_space", lambda: "machine-0")
    watch = Watch(store, 0, 2, 0, 600)
    watch._neighbours.come()
    watch._neighbours.settled()
    host = watch._neighbours.host
    raw.values |= {f"host-{host}": b"99999999999", "speakers": b"5", "placed": b"7"}
    assert watch._look() is None
    raw.values |= {f"place-{host}-2": b"one two", "speaker-2": b"x"}
    assert watch._look() is None and watch._neighbours.complete
    assert "warning: " in capsys.readouterr().err


def test_what_others_say_gives_the_terminal_no_orders():
    told = {"rank": 1, "kind": "ValueError", "message": "\x1b[2Jgone\n\tnow", "traceback": "\x9b1m"}
    failure = watchdog.read_failure(json.dumps(told))
    assert (failure["message"], failure["traceback"]) == ("?[2Jgone\n\tnow", "?1m")


def test_a_failure_ends_a_main_thread_that_hears_nothing(store, monkeypatch):
    """It is given a moment; then the last words are said and the process ends."""
    monkeypatch.setattr(watchdog, "LOOK", 0.05)
    monkeypatch.setattr(watchdog, "GRACE", 0.1)
    ends: list[int] = []
    words: list[str] = []
    monkeypatch.setattr(watchdog.os, "_exit", ends.append)
    with Watch(store, 0, 1, 0, 600) as mine:
        mine.last_words = lambda error: words.append(str(error))
        first_failure(store, failure_of(ValueError("boom"), 1, 600))
        until = time.monotonic() + 5
        while not ends and time.monotonic() < until:
            time.sleep(0.02)
    assert ends == [1] and words[0].startswith("rank 1 failed:\n") and "boom" in words[0]


def test_a_main_thread_that_leaves_is_left_alone(store, monkeypatch):
    monkeypatch.setattr(watchdog, "LOOK", 0.05)
    monkeypatch.setattr(watchdog.os, "_exit", lambda status: pytest.fail("ended"))
    with Watch(store, 0, 1, 0, 600):
        first_failure(store, failure_of(ValueError("boom"), 1, 600))
        time.sleep(0.3)
