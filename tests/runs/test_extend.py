"""A run may have more epochs than it was started with, where that leaves what is trained as it was."""

import re

import pytest

from accordion_bench import train
from accordion_bench.config import continuation
from accordion_bench.options.checks import ConfigError
from accordion_bench.processes.placement import place
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.runs.saving import FILE, Manifest, Trained
from tests.kit import composed, tiny
from tests.runs.test_resume import differences, start, state, stop

CONSTANT = "schedule=constant"
ARMS = {
    "topk": ["compressor=topk"],
    "local SGD, averaged at the end": ["sync=local_sgd", "sync.period=5", "compressor=topk"],
    "milestones in epochs": ["schedule=multistep", "schedule.milestones=[1,3]", "adaptive=accordion"],
}


@pytest.fixture(autouse=True)
def same_surroundings():
    import torch

    torch.manual_seed(0)


def extend(folder, cfg: dict, epochs: int) -> None:
    train.run({**cfg, "resume": str(folder), "epochs": epochs}, dict.fromkeys(["epochs", "resume"]))


@pytest.mark.sample(3)
@pytest.mark.parametrize("arm", ARMS)
def test_it_is_the_longer_run_bit_for_bit(arm, tmp_path):
    """Also its rows: the last one of the shorter run is written again, without what its end had added."""
    options = [CONSTANT, *ARMS[arm]] if "schedule=multistep" not in ARMS[arm] else ARMS[arm]
    compressor = [] if "compressor=topk" in options else ["compressor=powersgd"]
    straight = start(tmp_path / "straight", *options, *compressor)
    train.run(straight)
    short = {**straight, "epochs": 2, "paths": {**straight["paths"], "runs": str(tmp_path / "short")}}
    train.run({**short, "checkpoint": tiny.saving(None)})
    folder = tiny.only(tmp_path / "short")
    assert RunFolder(folder).done and len(RunFolder(folder).read_metrics()) == 2
    extend(folder, {**short, "checkpoint": tiny.saving(None)}, 4)
    assert RunFolder(folder).done and RunFolder(folder).read_config()["epochs"] == 4
    assert RunFolder(folder).read_json("summary.json")["epochs"] == 4
    assert differences(state(folder), state(tiny.only(tmp_path / "straight"))) == []


def past(tmp_path, trained: Trained, *overrides: str, done: bool = True) -> tuple[RunFolder, dict]:
    """A folder as a run of 4 epochs leaves it, without the state."""
    cfg = {**composed.run(tmp_path, *overrides), "workers": 4}
    folder = RunFolder.create(str(tmp_path), "x", cfg)
    there = folder.path / "checkpoint" / f"step-{trained.step:08d}"
    there.mkdir(parents=True)
    config = continuation.reuse.decisive(cfg)
    (there / FILE).write_text(Manifest(trained, config, {}).text())
    for epoch in range(trained.epoch):
        folder.append_metrics({"epoch": epoch, "step": 6 * (epoch + 1)})
    if done:
        folder.finish({"metric": 0.5})
    return folder, cfg


def refused(folder: RunFolder, cfg: dict, epochs: int) -> str:
    """The sentence; "" where nothing is refused."""
    asked = {**cfg, "resume": str(folder.path), "epochs": epochs}
    try:
        resumed = RunConfig.from_dict(continuation.resumed_config(asked, {"resume", "epochs"}))
        continuation.refuse_changed_history(resumed, train.validate(resumed, place(resumed)))
    except ConfigError as error:
        return str(error)
    return ""


WHOLE = Trained(3, 24, 6, 6)
ANEW = "type the run's own options with epochs=8, without resume="
RATES = "epochs must leave the learning rates that were trained with as they were, got 8, with which"
TAKEN = "epochs must leave the steps that were taken as they were, got 8, with which"
DECIDED = "epochs must leave what was decided as it was, got 8, with which adaptive="


@pytest.mark.parametrize(
    "overrides, told",
    [
        ([CONSTANT], ""),
        (["schedule=multistep", "schedule.milestones=[2,6]"], ""),
        (
            ["schedule=multistep", "schedule.milestones=[0.5]"],
            f"{RATES} schedule=multistep has .* after 2 epochs; {ANEW}",
        ),
        (
            ["schedule=multistep", "schedule.milestones=[0.25]"],
            f"{RATES} schedule=multistep has .* after 1 epoch; {ANEW}",
        ),
        (["schedule=cosine"], f"{RATES} schedule=cosine has .*; {ANEW}"),
        (
            [CONSTANT, "compressor=onebitadam", "optimizer=adamw"],
            f"{TAKEN} compressor=onebitadam would have begun after step 7 instead of 4; {ANEW}",
        ),
        ([CONSTANT, "compressor=onebitadam", "optimizer=adamw", "compressor.freeze_step=4"], ""),
        (
            [CONSTANT, "sync=zerooneadam", "optimizer=adamw"],
            f"{TAKEN} sync=zerooneadam would have begun after step 7 instead of 4; {ANEW}",
        ),
        (["schedule=cosine", "schedule.warmup_epochs=4"], ""),  # nothing but the warm-up is over
        (
            [CONSTANT, "adaptive=schedule", "compressor=powersgd", "adaptive.schedule.critical=[[0,null]]"],
            "",
        ),
        (
            [*("sync=local_sgd", "adaptive=qsr", "schedule=multistep", "schedule.milestones=[2]")],
            f"{DECIDED}qsr would have decided otherwise in the first 4 epochs; {ANEW}",
        ),
    ],
    ids=str,
)
def test_where_the_past_would_be_another_it_is_refused(overrides, told, tmp_path):
    folder, cfg = past(tmp_path, WHOLE, *overrides)
    found = refused(folder, cfg, 8)
    assert re.fullmatch(told, found) if told else found == ""


def test_critical_epochs_as_shares_of_the_run(tmp_path):
    """A fifteenth of 30 epochs is two, of 60 four: the third one was trained at another level."""
    options = [CONSTANT, "adaptive=schedule", "compressor=powersgd", "epochs=30"]
    folder, cfg = past(tmp_path, Trained(29, 180, 6, 6), *options)
    assert f"{DECIDED}schedule would have decided otherwise" in refused(folder, cfg, 60).replace("got 60", "got 8")


def test_how_many_epochs_there_may_be(tmp_path):
    folder, cfg = past(tmp_path, WHOLE, CONSTANT)
    assert "epochs must be more than the 4 that are trained, got 3; type resume=" in refused(folder, cfg, 3)
    assert re.search(
        "resume must be a run that has not finished.* or epochs=N for more than its 4", refused(folder, cfg, 4)
    )
    (folder.path / "done").unlink()
    assert refused(folder, cfg, 4) == ""
    (folder.path / "checkpoint" / "step-00000024" / FILE).unlink()
    told = "epochs must be 4 for a run without a checkpoint to continue from, got 8; type the run's own options"
    assert refused(folder, cfg, 8).startswith(told)


def test_an_unfinished_run_may_end_elsewhere(tmp_path):
    folder, cfg = past(tmp_path, Trained(1, 9, 3, 6), CONSTANT, done=False)
    assert refused(folder, cfg, 2) == "" == refused(folder, cfg, 9)
    assert "more than the 1.5 that are trained, got 1" in refused(folder, cfg, 1)


def test_a_config_that_was_edited_is_no_continuation(tmp_path):
    cfg = start(tmp_path, "compressor=topk")
    folder = stop(cfg, 8, every=6)
    saved = RunFolder(folder).read_config()
    RunFolder(folder).write_config({**saved, "compressor": {**saved["compressor"], "density": 0.5}})
    told = (
        "compressor.density must be .* as when the checkpoint was written, got 0.5 in .*config.yaml; restore that, or "
        "type compressor.density=0.5 without resume= for a new run"
    )
    with pytest.raises(ConfigError, match=told):
        train.run({**cfg, "resume": str(folder)}, {"resume": None})
    assert len(RunFolder(folder).read_metrics()) == 1
