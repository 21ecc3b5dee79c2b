"""Hooks that others have written: the same run as ours where they do the same, bytes that nobody claims, refusals."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accordion_bench import train
from accordion_bench.cli import dry_run
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.ledger import OF_EXCHANGES
from accordion_bench.config import continuation
from accordion_bench.exchange.ddp import UNMEASURED, ForeignHook, can_be_saved
from accordion_bench.options.checks import ConfigError
from accordion_bench.processes.watchdog import ChildRefused
from accordion_bench.report.read import read_run
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer
from tests.exchange.test_ddp import HOOK as POWERSGD
from tests.kit import composed, hooks, tiny
from tests.kit.hooks import TORCHS
from tests.kit.processes import forked, in_two

DDP = ["comm=gloo", "comm.processes=2", "workers=2", "comm.engine=ddp"]
MEAN = "comm.hook=tests.kit.hooks:mean"
SCALED = ["comm.hook=tests.kit.hooks:scaled", "comm.hook_state=tests.kit.hooks:Kept"]
OPTIONS = "matrix_approximation_rank:1,start_powerSGD_iter:2,min_compression_rate:1,orthogonalization_epsilon:1e-8"
# a hook, and what DistributedDataParallel does in its place without one
TWINS = {
    "mean": ([MEAN], []),
    "allreduce": ([f"comm.hook={TORCHS}.default_hooks:allreduce_hook"], []),
    "fp16": ([f"comm.hook={TORCHS}.default_hooks:fp16_compress_hook"], ["compressor=fp16"]),
    "PowerSGD": (
        [
            f"comm.hook={TORCHS}.powerSGD_hook:powerSGD_hook",
            f"comm.hook_state={TORCHS}.powerSGD_hook:PowerSGDState",
            f"comm.hook_options={{{OPTIONS}}}",
        ],
        POWERSGD,
    ),
}


def trainer_for(cfg: dict, rank: int, folder: str) -> Trainer:
    trainer = Trainer(RunConfig.from_dict(cfg), Comm(1, 2, rank), RunFolder(Path(folder)))
    trainer.begin_epoch()
    return trainer


def _trained(rank: int, cases: dict, folder: str) -> None:
    """Five steps of every case in one of two processes; `scaled` goes on from a checkpoint, too."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {}
    for name, cfg in cases.items():
        trainer = trainer_for(cfg, rank, folder)
        for step in range(5):
            if step == 3:
                saved = trainer.save()
            trainer.train_step()
        found[name] = {"parameters": parameters(trainer), "columns": columns(trainer), "saved": saved is not None}
        if name == "scaled":
            resumed = Trainer(RunConfig.from_dict(cfg), Comm(1, 2, rank), RunFolder(Path(folder)))
            resumed.load(saved)
            found["resumed with"] = resumed.ddp.hook_state.steps
            resumed.begin_epoch()
            for _ in range(2):
                resumed.train_step()
            found["resumed"] = {"parameters": parameters(resumed)}
            assert torch.equal(resumed.ddp.hook_state.own, trainer.ddp.hook_state.own)
            owns = trainer.comm.gather_objects(float(trainer.ddp.hook_state.own))
            assert owns[0] != owns[1]
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.destroy_process_group()


def parameters(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.axis.params])


def columns(trainer: Trainer) -> dict:
    found = {**trainer.comm.ledger.columns(), **trainer.network.columns(trainer.comm)}
    return {name: value for name, value in found.items() if isinstance(value, int | float | None)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hooks")
    cases = {}
    for name, (hook, twin) in TWINS.items():
        cases[name] = composed.run(folder, *DDP, *hook)
        cases[f"{name}, ours"] = composed.run(folder, *DDP, *twin)
    cases["scaled"] = composed.run(folder, *DDP, *SCALED)
    in_two(_trained, cases, str(folder))
    return torch.load(folder / "found.pt")


@pytest.mark.parametrize("name", TWINS)
def test_a_hook_of_torchs_is_the_run_that_has_it_already_bit_for_bit(found, name):
    assert torch.equal(found[name]["parameters"], found[f"{name}, ours"]["parameters"])


@pytest.mark.parametrize("name", TWINS)
def test_what_a_hook_sends_is_unknown_and_neither_0_nor_denses(found, name):
    theirs, ours = found[name]["columns"], found[f"{name}, ours"]["columns"]
    unknown = {*OF_EXCHANGES, "modelled_comm_seconds", *(name for name in UNMEASURED if name in theirs)}
    assert {name for name, value in theirs.items() if value is None} == unknown
    assert all(ours[name] for name in ("payload_bytes", "wire_bytes", "rounds", "modelled_comm_seconds"))
    known = ("dense_bytes", "dense_wire_bytes", "dense_rounds", "setup_bytes", "modelled_dense_comm_seconds")
    assert all(theirs[name] == ours[name] > 0 for name in known)


def test_a_state_is_saved_by_worker_or_there_is_no_checkpoint(found):
    assert found["resumed with"] == 3
    assert torch.equal(found["resumed"]["parameters"], found["scaled"]["parameters"])
    assert not torch.equal(found["scaled"]["parameters"], found["mean"]["parameters"])
    saved = {name: found[name]["saved"] for name in (*TWINS, "scaled")}
    assert saved == {"mean": True, "allreduce": True, "fp16": True, "PowerSGD": False, "scaled": True}


# ---- a whole run


def test_a_run_with_a_hook_is_a_run_like_others(tmp_path, capsys):
    with forked():
        train.run(tiny.cfg(tmp_path, *DDP, "epochs=1", MEAN, "comm.interface=lo"))
    said = capsys.readouterr().out
    assert "by DistributedDataParallel and its hook tests.kit.hooks:mean" in said
    assert "payload    not counted: what comm.hook=tests.kit.hooks:mean sends is known to the hook alone" in said
    assert "sent by lo" in said
    folder = tiny.only(tmp_path)
    assert "-mean-" in folder.name
    summary = json.loads((folder / "summary.json").read_text())
    assert [summary[key] for key in OF_EXCHANGES] == [None] * len(OF_EXCHANGES)
    assert summary["link_sent_bytes"] > 0
    run = read_run(folder)
    assert run.finished and run.label == "DDP, mean"


def test_a_hook_that_leaves_the_workers_apart_is_found_out(tmp_path):
    with forked(), pytest.raises(Exception, match="the parameters"):
        train.run(tiny.cfg(tmp_path, *DDP, "epochs=1", "comm.hook=tests.kit.hooks:alone"))


def test_a_dry_run_counts_nothing_either(tmp_path, capsys):
    dry_run.run(tiny.cfg(tmp_path, *DDP, MEAN), {})
    said = capsys.readouterr().out
    assert "bytes      not counted: what comm.hook=tests.kit.hooks:mean sends is known to the hook alone" in said
    assert "payload" not in said and "modelled" not in said and "time " in said


# ---- what is refused, and what is told

LOST = [MEAN, "comm.hook_state=tests.kit.hooks:Lost"]
STATED = " ".join(SCALED)
REFUSED = {
    "comm.hook=tests.kit.hooks": "must be package.module:function .* got tests.kit.hooks; type comm.hook=torch",
    "comm.hook=3": "must be package.module:function .* got 3; type",
    "comm.hook=nowhere.at:all": "got nowhere.at:all: there is no module nowhere here; type comm.hook=torch",
    "comm.hook=tests.kit.hooks:gone": "tests.kit.hooks has no gone; type comm.hook=torch",
    "comm.hook=tests.kit.hooks:NUMBER": "must name what can be called, got tests.kit.hooks:NUMBER, a int; type",
    "comm.hook=tests.kit.hooks:of_one": "of two arguments, state and bucket, .* got tests.kit.hooks:of_one; type",
    "comm.hook=tests.kit.hooks:renamed": "the second of this name, got tests.kit.hooks:renamed; type",
    f"{MEAN} comm.engine=exchange": "hook needs comm.engine=ddp, got .*=exchange; type comm.engine=ddp comm.hook=",
    "comm.hook_state=tests.kit.hooks:Kept": "hook_state must be null without comm.hook, got .*; type .*=null",
    f"{MEAN} comm.hook_options={{steps:1}}": "hook_options must be null without comm.hook_state, got {steps:1}",
    f"{MEAN} comm.hook_state=tests.kit.hooks:gone": "comm.hook_state must be .* has no gone; type comm.hook_state",
    f"{STATED} comm.hook_options={{stops:1}}": "got {stops:1}, and it takes steps; type comm.hook_options=null",
    f"{STATED} comm.hook_options=3": "must be null or a group of options, got 3; type comm.hook_options=null",
    f"{MEAN} compressor=bf16": "compressor must be none with .* got bf16; type compressor=none, or comm.hook=null",
    f"{MEAN} compressor=topk": "compressor must be none with comm.hook, .* got topk; type compressor=none",
    f"{MEAN} sync=local_sgd": "got local_sgd; type sync=every_step, or comm.engine=exchange",
    f"{MEAN} adaptive=noise_scale": "got noise_scale; type adaptive=none",
    f"{STATED} precision=float16": "state would keep an overflow, got float16; type precision=bfloat16",
    f"{' '.join(LOST)} checkpoint.every=5": "Lost, which has no state_dict: .* got 5; type checkpoint.every=null",
    " ".join([*TWINS["PowerSGD"][0], "comm.bucket_cap_mb=5"]): "aborts the process .* type comm.bucket_cap_mb=null",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_refused_in_one_sentence(tmp_path, overrides):
    with pytest.raises(ConfigError, match=REFUSED[overrides]):
        composed.validated(composed.run(tmp_path, *DDP, *overrides.split()))


@pytest.mark.parametrize("overrides", [f"{MEAN} precision=float16", f"{STATED} checkpoint.every=5", f"{MEAN} bn=local"])
def test_allowed(tmp_path, overrides):
    composed.validated(composed.run(tmp_path, *DDP, *overrides.split()))


LATE = {
    f"{MEAN} comm.hook_state=tests.kit.hooks:lost checkpoint.every=5": "has made a Lost without state_dict, got 5",
    f"{' '.join(LOST)} comm.hook_options={{most:0}}": "by tests.kit.hooks:Lost, got {most:0}: most must be at least 1",
    "comm.hook=tests.kit.hooks:annotated": "takes, got tests.kit.hooks:annotated: .* annotation should be",
}


FIRST, *OTHERS = LATE


@pytest.mark.parametrize("overrides", [FIRST, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
def test_what_only_the_processes_find_is_a_sentence_too(tmp_path, overrides):
    with forked(), pytest.raises(ChildRefused, match=LATE[overrides]):
        train.run(tiny.cfg(tmp_path, *DDP, *overrides.split()))


def test_a_state_that_cannot_be_saved_is_told_once(tmp_path):
    late = [MEAN, "comm.hook_state=tests.kit.hooks:lost"]

    def before(*overrides: str) -> list[str]:
        return composed.warnings(composed.run(tmp_path, *DDP, "checkpoint.every=null", *overrides), set())

    (told,) = before(*LOST)
    assert "comm.hook=tests.kit.hooks:mean saves no checkpoint" in told
    assert before(*SCALED) == before(MEAN) == before(*late) == []
    with forked():
        train.run(tiny.cfg(tmp_path, *DDP, "checkpoint.every=null", "epochs=1", *late))
    log = (tiny.only(tmp_path) / "run.log").read_text()
    assert log.count("has made a Lost without state_dict: the run saves no checkpoint") == 1


def test_what_is_done_about_gloo_and_torchs_powersgd_is_said(tmp_path):
    cfg = composed.run(tmp_path, *DDP, *TWINS["PowerSGD"][0], "checkpoint.every=0")
    (warning,) = composed.warnings(cfg, set())
    assert warning.startswith(f"comm.hook={TORCHS}.powerSGD_hook:powerSGD_hook uses one bucket")


def test_what_can_be_saved():
    assert can_be_saved(hooks.Kept) and not can_be_saved(hooks.Lost) and not can_be_saved(None)


def test_modules_of_the_current_folder_can_be_named(tmp_path, monkeypatch):
    (tmp_path / "hooks_from_here.py").write_text("def own(state, bucket):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ForeignHook("hooks_from_here:own").function().__name__ == "own"


# ---- folders of strangers


@pytest.fixture
def strangers(tmp_path, monkeypatch):
    """A run folder that names a module which leaves a trace when it is imported."""
    text = "import pathlib\npathlib.Path(__file__).with_suffix('.imported').touch()\n\ndef hook(state, bucket): pass\n"
    (tmp_path / "hook_of_a_stranger.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = composed.cfg(*DDP, f"paths.runs={tmp_path / 'runs'}", "dataset=synthetic")
    cfg["comm"] |= {"hook": "hook_of_a_stranger:hook", "hook_state": "hook_of_a_stranger:hook"}
    folder = RunFolder.create(cfg["paths"]["runs"], "x", cfg)
    (folder.path / "metrics.jsonl").write_text("")
    yield folder
    assert not (tmp_path / "hook_of_a_stranger.imported").exists() and "hook_of_a_stranger" not in sys.modules


def resumed(folder: RunFolder, *overrides: str) -> dict:
    typed = [f"resume={folder.path}", *overrides]
    return continuation.resumed_config(composed.cfg(*typed), {item.partition("=")[0] for item in typed})


def test_resuming_a_strangers_hook_imports_nothing(strangers):
    hook, state = "comm.hook=hook_of_a_stranger:hook", "comm.hook_state=hook_of_a_stranger:hook"
    for named, left in (([], hook), ([hook], state), ([state], hook)):
        with pytest.raises(ConfigError, match=f"whose config.yaml has {left}; type {left} beside resume= only if"):
            resumed(strangers, *named)
    other = "comm.hook=tests.kit.hooks:mean"
    with pytest.raises(ConfigError, match=f"whose config.yaml has {hook}"):
        resumed(strangers, other)
    config = resumed(strangers, hook, state)
    assert config["comm"]["hook"] == "hook_of_a_stranger:hook" and config["comm"]["engine"] == "ddp"
    assert continuation.continuing(config, strangers).endswith(f" {hook} {state}")


def test_a_report_of_a_strangers_hook_imports_nothing(strangers):
    assert read_run(strangers.path).label == "DDP, hook"


def test_a_hook_cannot_be_added_to_a_run_that_had_none(tmp_path):
    folder = RunFolder.create(str(tmp_path), "x", composed.cfg(*DDP, "dataset=synthetic"))
    with pytest.raises(ConfigError, match=f"comm.hook must be null as in the run that is resumed, got {MEAN[10:]}"):
        resumed(folder, MEAN)
