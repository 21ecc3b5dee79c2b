"""--dry-run: what it says of bytes is what a run sends; it leaves nothing behind."""

import sys
import time
from dataclasses import replace

import pytest

from accordion_bench import __main__ as command
from accordion_bench import train
from accordion_bench.advising import gpus
from accordion_bench.cli import command_line, dry_run, sweep
from accordion_bench.config.validate import validate
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.network.link_model import Network
from accordion_bench.options.checks import ConfigError
from accordion_bench.processes.placement import place
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from tests.kit import composed

RUNS = {
    "dense": ["compressor=none"],
    "low rank after a dense start": ["compressor=powersgd", "compressor.start_step=5"],
    "a warm-up": ["compressor=dgc", "compressor.warmup_epochs=2"],
    "two ways": ["compressor=efsignsgd", "compressor.collective=two_way"],
    "local steps, and some at the end": ["compressor=topk", "sync=local_sgd", "sync.period=3"],
    "groups": ["sync=hierarchical", "sync.groups=[[2,2],[4,4]]"],
    "sparse averages": ["sync=sparta", "sync.sparta=0.01", "sync.switch_step=2"],
    "sparse averages beside others": ["sync=diloco", "sync.period=3", "sync.sparta=0.01", "compressor=topk"],
    "pairs": ["sync=noloco", "sync.period=4"],
    "AD-PSGD": ["sync=adpsgd"],
    "drawn times": ["sync=drawn_times", "sync.rule=k_async", "sync.first=2"],
    "neighbours": ["sync=gossip", "sync.graph=ring", "sync.period=2"],
    "post-local": ["sync=post_local_sgd", "sync.switch_step=3", "sync.period=2", "compressor=qsgd"],
}


def forecast(cfg):
    config = RunConfig.from_dict(cfg)
    where = place(config)
    parts = validate(config, where)
    training = dry_run.training_of(replace(config, workers=where.workers), where, parts)
    dry_run.seconds_of_a_step(training)
    return dry_run.totals(training, parts, dry_run.exchanges(training, parts))


def sent(cfg):
    note = {}
    train.run(cfg, {}, note)
    return RunFolder(note["folder"]).read_json("summary.json")


@pytest.mark.sample(5)
@pytest.mark.parametrize("overrides", list(RUNS.values()), ids=list(RUNS))
def test_the_bytes_are_those_of_the_run(overrides, tmp_path):
    cfg = composed.run(tmp_path / "runs", *overrides, "epochs=3")
    summary = sent(cfg)
    payload, wire = forecast(cfg)
    exact = validate(RunConfig.from_dict(cfg), place(RunConfig.from_dict(cfg))).wrapped.compressor.traits.fixed_size
    if exact:  # each exchange is rounded to whole bytes of a mean worker
        assert payload == pytest.approx(summary["payload_bytes"], rel=0, abs=summary["steps"] / 2)
        assert wire == pytest.approx(summary["wire_bytes"], rel=0, abs=summary["steps"] / 2)
    else:  # a bound
        assert payload >= summary["payload_bytes"] > payload / 2


LATE = ["sync=overlap_local_sgd", "sync.period=3"]
GROWING = ["sync=zerooneadam", "optimizer=adamw", "sync.freeze_step=2", "sync.doubling_steps=1"]


@pytest.mark.parametrize("options", [LATE, GROWING], ids=["late averages", "a growing period"])
def test_the_exact_average_at_the_end_is_counted(options, tmp_path):
    cfg = composed.run(tmp_path / "runs", *options, "optimizer.lr=1e-4", "epochs=1")
    summary = sent(cfg)
    assert forecast(cfg) == pytest.approx((summary["payload_bytes"], summary["wire_bytes"]), rel=0, abs=3)


@pytest.mark.parametrize(
    "options",
    [
        ["sync=local_sgd", "optimizer=adamw", "sync.phase1=model", "sync.buffers=average"],
        ["sync=overlap_local_sgd", "sync.delay=1", "sync.buffers=average"],
        ["sync=desloc", "optimizer=adamw", "epochs=6"],
    ],
    ids=["at the switch", "late", "with periods of their own"],
)
def test_averages_of_buffers_are_counted(options, tmp_path):
    options = ["epochs=1", *options, "sync.period=3", "sync.switch_step=1"]
    cfg = composed.run(tmp_path / "runs", *options)
    summary = sent(cfg)
    assert forecast(cfg) == pytest.approx((summary["payload_bytes"], summary["wire_bytes"]), rel=0, abs=3)


def test_averagings_before_the_compressor_starts_are_dense(tmp_path):
    options = ["sync=local_sgd", "sync.period=2", "sync.switch_step=1", "compressor=powersgd"]
    cfg = composed.run(tmp_path / "runs", *options, "compressor.start_step=4", "epochs=1")
    summary = sent(cfg)
    assert forecast(cfg) == pytest.approx((summary["payload_bytes"], summary["wire_bytes"]), rel=0, abs=3)


@pytest.mark.parametrize("options", [["sync=local_sgd"], ["sync=streaming_diloco", "sync.period=6", "sync.delay=1"]])
def test_the_time_of_averagings_is_without_the_compilation_of_kernels(options, tmp_path, monkeypatch):
    first, usual = set(), Exchange.__call__

    def compiles(self, *args, **options):
        if self.what == "difference" and self.number not in first:
            first.add(self.number)
            time.sleep(1)
        return usual(self, *args, **options)

    monkeypatch.setattr(Exchange, "__call__", compiles)
    config = RunConfig.from_dict(composed.run(tmp_path / "runs", *options, "compressor=qsgd", "epochs=3"))
    where = place(config)
    parts = validate(config, where)
    made = dry_run.exchanges(dry_run.training_of(replace(config, workers=where.workers), where, parts), parts)
    assert first and all(0 < one.seconds < 0.5 for one in made)


@pytest.mark.parametrize(
    "options", [[], ["dataset.validation=16"], ["batch_size=[8,4,4,2]"]], ids=["plain", "validation", "unequal batches"]
)
def test_shards_by_label_need_no_data(options, tmp_path):
    options = ["dataset.sharding=dirichlet", "dataset.alpha=0.3", "compressor=topk", "epochs=1", *options]
    cfg = composed.run(tmp_path / "runs", *options)
    summary = sent(cfg)
    assert forecast(cfg) == pytest.approx((summary["payload_bytes"], summary["wire_bytes"]), rel=0, abs=3)


def test_every_line_and_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cfg = composed.cfg("compressor=powersgd", "adaptive=accordion", "workers=4", "epochs=3", "paths.runs=there")
    dry_run.run(cfg, {}, "seed=0: ")
    lines = capsys.readouterr().out.splitlines()
    assert "THIS CPU" in lines[0] and lines[1] == "seed=0"
    assert lines[2].startswith("resnet8 on digits, compressor powersgd")
    assert "3 epochs of 12 steps, 36 in all" in lines[3]
    words = [line.split()[0] for line in lines[3:] if line[0] != " "]
    assert words == ["plan", "bytes", "memory", "time", "modelled"]
    assert any("adaptive=accordion chooses rank 1, 2" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("typed", "on"),
    [("gpu=a100", "an NVIDIA A100 (estimated)"), ("compute_ms=12", "a GPU whose forward and backward pass take 12 ms")],
)
def test_the_times_are_those_of_the_device_that_is_asked_for(typed, on, capsys):
    asked, _ = gpus.split([typed])
    dry_run.run(composed.cfg("compressor=powersgd", "workers=4", "epochs=2", "network.bandwidth=5gbit"), {}, "", asked)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"dry run    times are those of {on}"
    (time,) = [line for line in lines if line.startswith("time")]
    assert "for one worker on " in time and "CPU" not in "".join(lines[2:])
    steps, each = 2 * 12, float(time.partition(" ms a step")[0].rpartition(" ")[2])
    assert float(time.split()[2]) == pytest.approx(steps * each / 1000, rel=0.01)
    if typed == "compute_ms=12":
        assert each == pytest.approx(12, rel=0.05)
    (modelled,) = [line for line in lines if line.startswith("modelled")]
    assert " on 5 Gbit/s and 50 µs per round, " in modelled and "1gbit" not in "".join(lines)


def test_where_dense_gradients_no_longer_hide(capsys):
    """They take as long as the link needs for them, whatever the method of the run."""
    said = {}
    for compressor in ("none", "powersgd"):
        dry_run.run(composed.cfg(f"compressor={compressor}", "workers=4", "epochs=1", "network=100mbit"), {})
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "no longer hide" in line]
        said[compressor] = float(line.partition(" ms,")[0].rpartition(" ")[2])
    link = Network(1e8, 1e-4)
    dense = 4 * 75_042  # bytes of resnet8
    assert said["none"] == said["powersgd"] == pytest.approx(1000 * link.seconds(1.5 * dense, 6, 4), rel=0.02)


def test_memory_counts_what_is_there(tmp_path, capsys):
    """Parameters in fp32, a gradient for each of four workers, one momentum."""
    dry_run.run(composed.cfg("compressor=topk", "workers=4", "epochs=1"), {})
    memory = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("memory"))
    for part in ("parameters 300 kB", "gradients 1.2 MB", "optimizer 300 kB"):
        assert part in memory


@pytest.mark.parametrize(
    "options",
    [["sync=diloco"], ["sync=noloco"], ["sync=zerooneadam", "optimizer=adamw"], ["sync=streaming_diloco"]],
    ids=lambda options: options[0],
)
def test_memory_counts_what_a_scheme_keeps(options, capsys):
    """An outer momentum for all; z and a momentum for each worker; the same, and a variance and its root for all."""
    dry_run.run(composed.cfg(*options, "workers=2", "epochs=1"), {})
    kept = {"sync=noloco": "1.2 MB", "sync=zerooneadam": "1.2 MB"}.get(options[0], "300 kB")
    assert f"scheme {kept}" in capsys.readouterr().out


def test_no_data_is_needed(tmp_path, capsys):
    cfg = composed.cfg("dataset=cifar10", "workers=2", "batch_size=2", "epochs=1", f"paths.data={tmp_path / 'none'}")
    dry_run.run(cfg, {})
    assert "1 epoch of 12500 steps" in capsys.readouterr().out


@pytest.mark.parametrize("overrides", [["resume=results/runs/x"], ["+experiment=smoke"]])
def test_what_is_no_new_run_is_refused(overrides):
    with pytest.raises(ConfigError, match=r"^--dry-run (must stand|tells)"):
        dry_run.run(composed.cfg(*overrides), {})


def test_nothing_is_submitted():
    typed = ["-m", "--dry-run", "hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=5", "seed=0,1"]
    assert command_line.for_dry_run(typed, "/x") == ["-m", "seed=0,1", "hydra.sweep.dir='/x'"]


def test_a_sweep_tells_each_cell_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["accordion_bench", "--dry-run", "-m", "batch_size=2,0", "epochs=1"])
    monkeypatch.setattr(sweep, "current", sweep.Sweep())
    monkeypatch.setattr(sweep, "needs_data", sweep.needs_data)  # what the command sets
    with pytest.raises(SystemExit) as ended:
        command.main()
    said = capsys.readouterr()
    assert ended.value.code == 2  # one cell is refused, the other told
    assert said.out.count("plan ") == said.err.count("batch_size must be") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("late", ["comm=gloo", "sync.lateness=0.3"])
def test_of_a_quorum_all_take_part(late, capsys):
    options = [late, "sync=local_sgd", "sync.quorum=3", "workers=4", "epochs=1"]
    dry_run.run(composed.cfg(*options), {})
    assert "as if all workers took part in each averaging" in capsys.readouterr().out
