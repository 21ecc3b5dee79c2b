"""How long a run has waited for processor cores: counted by the system, summed over processes and resumptions, told."""

import sys
import time

import pytest

from accordion_bench import train
from accordion_bench.comm.collectives import Comm
from accordion_bench.processes import waiting
from accordion_bench.runs.folder import RunFolder
from tests.kit import composed, tiny


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts")
def test_what_is_computed_is_counted():
    began, until = waiting.Waiting(), time.process_time() + 0.1
    while time.process_time() < until:
        pass
    computed, waited = began.totals()
    assert computed >= 0.09 and waited >= 0 and 0 <= began.share(Comm(1)) < 1


def test_a_run_that_goes_on_takes_its_past_along(monkeypatch):
    counted = iter([[1.0, 0.0], [3.0, 1.0], [10.0, 0.0], [14.0, 2.0], [14.0, 2.0]])
    monkeypatch.setattr(waiting, "_counted", lambda: next(counted))
    first = waiting.Waiting()
    state = first.worker_state(0)
    assert state == {"waiting_seconds": [2.0, 1.0]} and first.worker_state(1) == {"waiting_seconds": [0.0, 0.0]}
    then = waiting.Waiting()
    then.load_worker_state(0, state)
    then.load_worker_state(1, first.worker_state(1))
    assert then.totals() == [6.0, 3.0] and then.share(Comm(1)) == 1 / 3


def test_where_nothing_is_counted_nothing_is_told(monkeypatch):
    monkeypatch.setattr(waiting, "_counted", lambda: [0.0, 0.0])
    assert waiting.Waiting().share(Comm(1)) is None


@pytest.mark.parametrize(("share", "told"), [(None, 0), (0.02, 0), (0.31, 1)])
def test_the_summary_says_that_the_machine_was_busy(share, told, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(waiting.Waiting, "share", lambda self, comm: share)
    train.run(composed.run(tmp_path, "epochs=1"))
    assert RunFolder(tiny.only(tmp_path)).read_json("summary.json")["waited_for_cores"] == share
    said = "machine    busy: 31% of their time processes waited for a core; times are too long\n"
    assert capsys.readouterr().out.count(said) == told
