"""+experiment=smoke and +experiment=debug: the cells cover all pairs, failures are named, one batch is learnt."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

from accordion_bench import __main__ as command
from accordion_bench import train
from accordion_bench.cli import smoke, sweep
from accordion_bench.comm.clock import Clock
from accordion_bench.config.components import build_components
from accordion_bench.config.compose import compose
from accordion_bench.datasets.sampler import Sampler, Sharding
from accordion_bench.options.checks import ConfigError
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.profiler import profiled
from tests.kit import tiny

# ---- the cover


def possible(cell: smoke.Cell) -> bool:
    """A rule with refusals of every kind: by pair, and of policies that do not go together."""
    compressor, sync, policies = cell
    alone = ("ab", "ac") if compressor == "y" else ()
    refused = (compressor, sync) == ("z", "local") or any(p in alone for p in policies) or {"aa", "ab"} <= set(policies)
    return not refused and not (sync == "local" and "ad" in policies)


def test_all_pairs_that_run_occur():
    groups = (["x", "y", "z"], ["every", "local"], ["aa", "ab", "ac", "ad", "none"])
    cells = smoke.cover(possible, *groups)
    occur = set().union(*(smoke.pairs(c, s, policy) for c, s, policies in cells for policy in policies))
    singles = [(c, s, a) for c, s, a in itertools.product(*groups) if possible((c, s, (a,)))]
    assert occur == set().union(*(smoke.pairs(*single) for single in singles))
    assert all(possible(cell) for cell in cells) and len(cells) < len(singles)
    assert not any("none" in policies and len(policies) > 1 for _, _, policies in cells)
    assert cells == smoke.cover(possible, *groups)


def test_cells_of_what_is_typed():
    base = compose(["+experiment=smoke", "compressor=topk", "adaptive=[accordion,gravac]"])
    typed = {"compressor": "topk", "adaptive": "[accordion,gravac]"}
    cells = smoke.cells(base, typed)
    assert {compressor for compressor, _, _ in cells} == {"topk"}
    syncs = {
        s for s in smoke.names("sync") if not smoke.refusal(smoke.composed_cell(base, "topk", s, ["accordion"]), 4)
    }
    assert {sync for _, sync, _ in cells} == syncs > {"every_step", "diloco"}
    assert {policy for _, _, policies in cells for policy in policies} == {"accordion", "gravac"}
    assert {len(policies) for _, _, policies in cells} == {1}  # both drive the level


def _between(sync: dict) -> int | None:
    """Steps from one averaging to the next."""
    period = sync.get("period")
    return period and period // sync.get("fragments", 1)


def test_shortened_options_are_options():
    """Every policy and scheme still fits the run, and decides or averages within its six steps."""
    base = compose(["+experiment=smoke"])
    for sync in smoke.names("sync"):
        cells = [smoke.shortened(smoke.composed_cell(base, name, sync, ["none"])) for name in ("qsgd", "none")]
        cfg = next(cfg for cfg in cells if not smoke.refusal(cfg, 4))
        build_components(RunConfig.from_dict(cfg), 4)
        periods = [_between(cfg["sync"])] if not cfg["sync"].get("groups") else [p for p, _ in cfg["sync"]["groups"]]
        assert all(period is None or period <= 2 for period in periods)
    for policy in smoke.names("adaptive"):
        compressor = "topk" if policy == "gravac" else "qsgd"
        ran = [
            sync
            for sync in smoke.names("sync")
            if not smoke.refusal(smoke.shortened(smoke.composed_cell(base, compressor, sync, [policy])), 4)
        ]
        assert ran, policy


# ---- the run


@pytest.fixture
def record(monkeypatch):
    """A sweep of its own for each test."""
    monkeypatch.setattr(sweep, "current", sweep.Sweep())


def run_smoke(runs: Path, *overrides: str) -> tuple[float, list[str]]:
    """(share of cells that ran, what was told)."""
    base = compose(["+experiment=smoke", f"paths.runs={runs}", *overrides])
    told: list[str] = []

    def tell(error: Exception, cell: str) -> int:
        told.append(f"{cell}{error}")
        return 1

    return smoke.run(base, dict(item.split("=", 1) for item in overrides), tell), told


def test_a_line_per_cell_and_a_record(tmp_path, capsys, record):
    share, told = run_smoke(tmp_path, "compressor=topk", "sync=local_sgd", "adaptive=gravac")
    lines = capsys.readouterr().out.splitlines()
    (line,) = [json.loads(text) for text in (tmp_path / "smoke" / "sweep.jsonl").read_text().splitlines()]
    assert share == 1 and not told and len(lines) == 2 and lines[0].startswith("  1 of 1  ran")
    assert lines[1].startswith("1 of 1 cell ran")
    assert line["overrides"] == ["+experiment=smoke", "compressor=topk", "sync=local_sgd", "adaptive=gravac"]
    assert line["status"] == "done" and RunFolder(line["folder"]).done and 0 <= line["metric"] <= 1
    assert RunFolder(line["folder"]).read_config()["choices"]["experiment"] == "smoke"
    assert sweep.close() == 0


def test_failed_cells_are_named_and_the_others_run(tmp_path, capsys, monkeypatch, record):
    true = train.run

    def broken(cfg, *rest):
        if cfg["choices"]["sync"] == "slowmo":
            raise RuntimeError("boom")
        return true(cfg, *rest)

    monkeypatch.setattr(train, "run", broken)
    share, told = run_smoke(tmp_path, "compressor=none", "adaptive=none")
    assert told == ["compressor=none sync=slowmo adaptive=none: boom"]
    assert share == pytest.approx(1 - 1 / len(smoke.names("sync")))
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert len(failed) == 1 and failed[0].endswith("compressor=none sync=slowmo adaptive=none")
    assert sweep.close() == 1
    assert "failed: sync=slowmo: RuntimeError: boom" in capsys.readouterr().err


def test_from_the_command_line(tmp_path, capsys, monkeypatch, record):
    """It just works; a wrong option is refused once, not in every cell."""
    words = ["+experiment=smoke", f"paths.runs={tmp_path}", "compressor=fp16", "sync=every_step", "adaptive=none"]
    monkeypatch.setattr(sys, "argv", ["accordion_bench", *words])
    command.main()  # else it would exit with a status
    said = capsys.readouterr()
    assert said.err == "" and said.out.splitlines()[-1].startswith("1 of 1 cell ran")
    with pytest.raises(ConfigError, match="batch_size must be"):
        run_smoke(tmp_path, "batch_size=0")


@pytest.mark.slow
def test_every_cell(tmp_path, record):
    assert run_smoke(tmp_path) == (1, [])


# ---- debug


def debug(runs: Path, *overrides: str) -> tuple[RunFolder, list[dict]]:
    train.run(compose(["+experiment=debug", f"paths.runs={runs}", "epochs=30", *overrides]))
    folder = RunFolder(tiny.only(runs))
    return folder, folder.read_metrics()


@pytest.mark.sample(2)
@pytest.mark.parametrize("overrides", [[], ["compressor=powersgd", "profile=0"]], ids=["dense", "powersgd"])
def test_one_batch_is_learnt(tmp_path, overrides, capfd):
    folder, rows = debug(tmp_path, *overrides)
    assert capfd.readouterr().err == ""  # the profiler says nothing of GPUs that are not there
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert rows[0]["train_loss"] > 2 and rows[-1]["train_loss"] < 0.1
    if overrides:
        assert not (folder.path / "trace.json").exists()
        return
    events = json.loads((folder.path / "trace.json").read_text())["traceEvents"]
    assert len({e["name"] for e in events if e.get("name", "").startswith("ProfilerStep")}) == 3
    assert "convolution" in (folder.path / "profile.txt").read_text()
    spans = json.loads((folder.path / "timeline.json").read_text())["traceEvents"]
    assert {"compute", "exposed"} <= {s["name"] for s in spans if s["tid"] == "main"}
    assert "comm 0" in {s["name"] for s in spans if s["tid"] == "exchange"}


def test_the_batch_is_the_same_in_every_step():
    cfg = compose(["+experiment=debug"])
    run, dataset = build_components(RunConfig.from_dict(cfg), cfg["workers"]).run, cfg["dataset"]
    assert run.steps_per_epoch() == 1 and run.train_size == run.workers * run.batch_size == dataset["subset"]
    sampler = Sampler(run.train_size, run.workers, 0, Sharding(dataset["sharding"]))
    seen = []
    for epoch in range(3):
        sampler.begin_epoch(epoch, run.batch_size)
        seen.append(torch.stack([sampler.batch(worker, 0) for worker in range(run.workers)]))
    assert seen[0].unique().numel() == run.train_size and all(torch.equal(seen[0], other) for other in seen)


def test_a_profile_changes_nothing(tmp_path):
    """Rows without times are those of a run without."""
    found = []
    for steps in (0, 2):
        _, rows = debug(tmp_path / str(steps), "epochs=3", f"profile={steps}")
        found.append([{k: v for k, v in row.items() if "seconds" not in k} for row in rows])
    assert found[0] == found[1]
    assert (tiny.only(tmp_path / "2") / "trace.json").is_file()


def test_profiles_of_a_negative_number_of_steps_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"profile must be an integer of at least 0, got -1; type profile=0"):
        train.run(compose([f"paths.runs={tmp_path}", "profile=-1"]))


def test_profiled_records_the_steps_after_the_first(tmp_path):
    clock = Clock(torch.device("cpu"))
    with profiled(2, RunFolder(tmp_path), clock) as step:
        for size in (3, 5, 7, 11):
            torch.ones(size, size) @ torch.ones(size, size)
            clock.lap("compute")
            step()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len([e for e in events if e.get("name") == "aten::mm"]) == 2
    spans = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert [s["name"] for s in spans] == ["compute"] * 2
    assert spans[0]["ts"] == 0 and spans[1]["ts"] >= spans[0]["dur"]  # what the profiler does is in between
