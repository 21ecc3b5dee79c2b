"""What a run sets, trials set, too: one function, which run, dry run, advice and benches all enter."""

import contextlib

import pytest
import torch

from accordion_bench import train
from accordion_bench.advise.__main__ import main as advise
from accordion_bench.cli import dry_run
from accordion_bench.comm.collectives import Comm
from accordion_bench.processes import machine
from accordion_bench.processes.machine import computing_with, run_settings
from scripts.bench.arms import trainer_for
from tests.kit import composed

TINY = ["model=resnet8", "dataset=digits", "batch_size=4"]


def test_threads_and_kernels_come_back():
    threads, mode, search = (
        torch.get_num_threads(),
        torch.get_deterministic_debug_mode(),
        torch.backends.cudnn.benchmark,
    )
    with run_settings("cpu", threads=threads + 1, deterministic=True):
        assert torch.get_num_threads() == threads + 1 and torch.get_deterministic_debug_mode() == 2
        with computing_with(None):
            assert torch.get_num_threads() == threads + 1
    assert (torch.get_num_threads(), torch.get_deterministic_debug_mode()) == (threads, mode)
    with run_settings("cuda"):
        assert torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark == search


def of_a_run(tmp_path):
    train.run(composed.run(tmp_path / "runs", "epochs=1"))


def of_a_dry_run(tmp_path):
    dry_run.run(composed.cfg("workers=2", "epochs=1"), {})


def of_advice(tmp_path):
    words = [*TINY, "workers=2", "device=cpu", "--seconds", "0.1", "--no-figures", "--methods", "none"]
    assert advise([*words, "--out", str(tmp_path / "advice")]) == 0


def of_a_bench(tmp_path):
    trainer_for([*TINY, "workers=1"], Comm(1))


@pytest.mark.parametrize("compute", [of_a_run, of_a_dry_run, of_advice, of_a_bench])
def test_everybody_computes_as_a_run_does(compute, tmp_path, monkeypatch):
    kept, kernels = [], []

    @contextlib.contextmanager
    def use_kernels(deterministic, device):
        kernels.append((deterministic, device))
        yield

    monkeypatch.setattr(machine, "keep_freed_memory", lambda: kept.append(True))
    monkeypatch.setattr(machine, "use_deterministic_kernels", use_kernels)
    compute(tmp_path)
    assert kept and (False, "cpu") in kernels


def test_a_timeline_is_of_somebody_s_own_loop(tmp_path, monkeypatch):
    """Its loop has none of a run's settings, so that the methods beside it are timed without them, too."""
    from tests.cli.test_advice_command import timeline

    kept = []
    monkeypatch.setattr(machine, "keep_freed_memory", lambda: kept.append(True))
    words = ["--timeline", str(timeline(tmp_path / "timeline.json")), "workers=2", "--seconds", "0.1", "--no-figures"]
    assert advise([*words, "--methods", "none", "--out", str(tmp_path / "advice")]) == 0
    assert not kept and "in a loop of your own" in (tmp_path / "advice" / "advice.txt").read_text()
