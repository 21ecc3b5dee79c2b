"""Local methods in the report: their names, rounds and modelled time; and the script of results/local_methods."""

import argparse
import subprocess
import sys
from types import SimpleNamespace

import pandas as pd
import pytest

from accordion_bench import __main__ as command
from accordion_bench.methods import labels
from accordion_bench.options.conf_dir import conf_dir
from accordion_bench.report import read
from accordion_bench.report.compare import columns, grouping, intervals, verdicts
from accordion_bench.report.compare.arms import dense_command
from accordion_bench.report.read import Run
from accordion_bench.report.render import captions, tables
from accordion_bench.report.render.figures.curves import tradeoff
from accordion_bench.runs.folder import RunFolder
from scripts.studies import local_methods
from tests.kit import composed, tiny
from tests.report.test_report import grouped, node, run_folder

SCHEMES = sorted(file.stem for file in (conf_dir() / "sync").glob("*.yaml"))


def local(root, scheme="local_sgd", preset=False, modelled=None, **options):
    """A finished run of a local method with dense messages."""
    adaptive = (
        {scheme: {"_target_": "accordion_bench.adaptive.period_policies.Preset", "sync": scheme}} if preset else None
    )
    changes = {"sync": {**node("sync", scheme), **options}, "choices__sync": scheme}
    return with_model(run_folder(root, adaptive=adaptive, **changes), modelled)


def with_model(path, seconds=None):
    """The same run with modelled columns: `seconds` in all, a tenth of it communication."""
    if seconds is not None:
        folder = RunFolder(path)
        link = {"bandwidth": 1e9, "latency": 5e-5}
        cfg = folder.read_config()
        folder.write_config({**cfg, "network": link, "choices": {**cfg["choices"], "network": "1gbit"}})
        numbers = {"rounds": 6, "modelled_seconds": seconds, "modelled_comm_seconds": seconds / 10}
        folder.write_json("summary.json", folder.read_json("summary.json") | numbers)
    return path


# ---- names


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_has_a_name_with_its_period(scheme):
    cfg = composed.cfg(f"sync={scheme}")
    period = cfg["sync"].get("period")
    label = labels.label(cfg)
    assert "_" not in label
    assert label.endswith(f", H {period}") if period else label in (
        "dense", "AD-PSGD", "drawn times, K-sync", "hierarchical local SGD, H 4/16", "SPARTA 0.5 %", "0/1 Adam"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["sync=local_sgd", "sync.period=4"], "local SGD, H 4"),
        (["adaptive=local_sgd", "sync.period=16"], "local SGD, H 16"),
        (["adaptive=diloco", "compressor=topk"], "DiLoCo, H 30, TopK 10 %"),
        (["sync=sparta", "sync.sparta=0.01"], "SPARTA 1 %"),
        (["sync=diloco", "sync.sparta=0.005"], "DiLoCo, H 30, SPARTA 0.5 %"),
        (["sync=diloco", "sync.sparta=0.005", "compressor=topk"], "DiLoCo, H 30, SPARTA 0.5 %, TopK 10 %"),
        (["sync=desloc", "compressor=topk"], "DES-LOC, H 32, TopK 10 %"),
        (["sync=noloco", "sync.period=20"], "NoLoCo, H 20"),
        (["adaptive=[slowmo,accordion]", "compressor=powersgd"], "Accordion (SlowMo, H 12, PowerSGD rank 2/1)"),
        (["sync=drawn_times", "sync.first=3"], "drawn times, K-sync 3"),
        (["sync=drawn_times", "sync.rule=k_async", "sync.first=2"], "drawn times, K-async 2"),
        (["sync=drawn_times", "sync.rule=anytime"], "drawn times, anytime"),
        (["sync=gossip"], "gossip SGD, H 1"),
        (["sync=gossip", "sync.graph=ring"], "gossip SGD, ring, H 1"),
        (["compressor=topk", "compressor.reduce=senders"], "TopK 10 %, mean over senders"),
    ],
)
def test_labels_of_local_methods(overrides, expected):
    assert labels.label(composed.cfg(*overrides)) == expected


def test_two_periods_are_no_levels():
    cfg = composed.cfg("adaptive=accordion_sync", "compressor=powersgd")
    cfg["adaptive"]["accordion_sync"] |= {"weak": 3, "strong": 5}
    assert labels.pair_of(cfg) is None
    assert labels.label(cfg) == "AccordionSync (local SGD, H 3/5, PowerSGD rank 2)"


def test_a_preset_is_its_scheme(tmp_path):
    local(tmp_path, preset=True, period=8)
    local(tmp_path, preset=False, period=8)
    found, repeats = grouping.group(read.read_runs([tmp_path]))
    assert [arm.label for arm in found] == ["local SGD, H 8"] and len(repeats) == 1


def test_the_scheme_is_compared_not_warned_of(tmp_path):
    run_folder(tmp_path)
    local(tmp_path, period=8)
    run_folder(tmp_path, "powersgd", schedule=node("schedule", "cosine"), choices__schedule="cosine")
    local_, cosine = verdicts.verdicts(grouped(tmp_path))
    assert "beware" not in local_
    assert "beware, dense differs in more than compression: schedule cosine (None)." in cosine


def test_the_dense_command_is_synchronous(tmp_path):
    typed = "python -m accordion_bench sync=local_sgd sync.period=4 epochs=4"
    (arm,) = grouping.group(
        [Run(tmp_path, {"seed": 0, "batch_size": 32, "choices": {}}, {"command": typed}, {"workers": 4})]
    )[0]
    expected = "python -m accordion_bench compressor=none adaptive=none epochs=4 seed=0"
    assert dense_command(arm) == expected


# ---- modelled time


def test_modelled_time_is_shown_where_there_is_some(tmp_path):
    with_model(run_folder(tmp_path), 2.0)
    local(tmp_path, modelled=1.0)
    found = grouped(tmp_path)
    numbers = columns.tidy(found).set_index("arm")
    assert numbers.loc["local SGD, H 8", "modelled_seconds_over_dense"] == 0.5
    dense, own = tables.markdown(columns.tidy(found)).splitlines()[2:]
    assert "modelled time" in tables.markdown(columns.tidy(found))
    assert "0.50x" in own and "0.10 s" in own and "1.00x" in dense
    assert any(
        "Modelled, not measured" in line and "1 Gbit/s and 50 µs per round" in line for line in captions.captions(found)
    )
    assert len(tradeoff(found).axes) == 2


def test_older_runs_without_it_are_read(tmp_path):
    run_folder(tmp_path)
    local(tmp_path)
    found = grouped(tmp_path)
    assert "modelled" not in tables.markdown(columns.tidy(found)) and len(captions.captions(found)) == 3
    assert len(tradeoff(found).axes) == 1
    with_model(run_folder(tmp_path, "powersgd"), 2.0)
    *_, old, new = tables.markdown(columns.tidy(grouped(tmp_path))).splitlines()
    assert old.count(intervals.NONE) > new.count(intervals.NONE)


# ---- the script


@pytest.fixture
def args(tmp_path, monkeypatch):
    own = [item for item in tiny.RUN if not item.startswith("epochs")]
    monkeypatch.setattr(local_methods, "ALWAYS", [*own, "workers=4"])
    monkeypatch.setattr(local_methods, "SETTINGS", {"synthetic": []})
    monkeypatch.setattr(
        local_methods, "ARMS", {"dense": [], "H 4": ["sync=local_sgd", "sync.period=4"], "gone": ["adaptive=gone"]}
    )
    options = {"data": None, "minutes": 2, "jobs": 2, "seeds": "0", "epochs": 2, "cifar_epochs": 2, "only": ""}
    return argparse.Namespace(**options, runs=tmp_path / "runs", out=tmp_path / "out")


class Here:
    """Stands in for subprocess.Popen: the command is carried out in this process, which has imported torch already."""

    def __init__(self, line, **_):
        self.returncode = 0
        assert line[:3] == [sys.executable, "-m", "accordion_bench"]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "argv", line[2:])
            patched.setattr(sys, "orig_argv", line)
            try:
                command.main()
            except SystemExit as end:
                self.returncode = end.code

    def poll(self):
        return self.returncode

    def communicate(self):
        return b"", b""


def test_what_cannot_be_composed_is_told(args):
    cells, refused = local_methods.planned(args)
    assert [(cell.arm, cell.seed) for cell in cells] == [("dense", 0), ("H 4", 0)]
    (sentence,) = refused
    assert sentence.startswith("synthetic, gone: adaptive must be a known name")


def test_runs_once_and_writes_the_tables(args, monkeypatch, capsys):
    cells, refused = local_methods.planned(args)
    args.out.mkdir()
    (args.out / "what_it_says.md").write_text("Dense loses.\n")
    monkeypatch.setattr(local_methods, "subprocess", SimpleNamespace(Popen=Here, DEVNULL=None, PIPE=None))
    local_methods.train(cells, args)
    local_methods.report(cells, refused, args)
    monkeypatch.setattr(local_methods, "subprocess", None)  # nothing is run again
    local_methods.train(cells, args)
    local_methods.report(cells, refused, args)
    assert "2 runs, 0 of them to make" in capsys.readouterr().out
    readme = (args.out / "README.md").read_text()
    assert (
        "## What it says\n\nDense loses." in readme and "local SGD, H 4" in readme and "gone: adaptive must" in readme
    )
    assert str(args.runs) not in readme
    assert set(pd.read_csv(args.out / "table.csv")["arm"]) == {"dense", "local SGD, H 4"}


def test_an_interrupted_run_goes_on(args, monkeypatch):
    (cell, _), _ = local_methods.planned(args)
    folder = RunFolder.create(str(args.runs), "x", composed.cfg(*cell.overrides, f"paths.runs={args.runs}"))
    assert local_methods.found([cell], args.runs)[cell].path == folder.path
    commands = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
    local_methods.start(cell, local_methods.found([cell], args.runs)[cell], args)
    (folder.path / "checkpoint" / "step-00000003").mkdir(parents=True)
    local_methods.start(cell, local_methods.found([cell], args.runs)[cell], args)
    assert "seed=0" in commands[0] and f"resume={folder.path}" not in commands[0]
    assert commands[1] == [sys.executable, "-m", "accordion_bench", f"resume={folder.path}"]


def test_the_arms_can_be_composed():
    for name, options in local_methods.ARMS.items():
        typed = [option.format(interval=2, freq=3) for option in options]
        assert composed.cfg(*typed)["epochs"] == 60, name
