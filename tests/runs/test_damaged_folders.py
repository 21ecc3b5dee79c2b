"""Whatever has happened to the files of a run folder: reports, resume= and resume_sweep never end with a traceback."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from accordion_bench import train
from accordion_bench.config import continuation
from accordion_bench.options.checks import ConfigError
from accordion_bench.processes.placement import place
from accordion_bench.report import load_metrics, load_runs
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import durable, reuse
from accordion_bench.runs import folder as folder_of
from accordion_bench.runs.folder import RunFolder
from accordion_bench.runs.weights import save_weights
from accordion_bench.training import launch
from tests.kit import composed
from tests.runs.test_resume import finished_and_stopped

FILES = ("config.yaml", "environment.json", "metrics.jsonl", "summary.json", "done", "run.log")
DAMAGES = {
    "absent": Path.unlink,
    "empty": lambda file: file.write_text(""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "binary": lambda file: file.write_bytes(bytes(range(256))),
    "a list": lambda file: file.write_text("[1, 2]\n"),
    "a word": lambda file: file.write_text("hello\n"),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Configuration and folder of a finished run and of one that was stopped."""
    return finished_and_stopped(tmp_path_factory.mktemp, "compressor=topk", "epochs=2", "schedule=constant")


def doors(cfg: dict, folder: Path) -> list[str]:
    """Everything that reads the folder, up to where training would begin; the sentences that were said."""
    load_runs([folder.parent])
    load_metrics([folder.parent])
    said = []

    def resume(asked: dict, typed: set[str]) -> None:
        config = RunConfig.from_dict(continuation.resumed_config(asked, typed))
        continuation.refuse_changed_history(config, train.validate(config, place(config)))
        RunFolder(folder).keep_metrics_before(1)

    def sweep() -> None:
        found = reuse.find_earlier({**cfg, "workers": 4})
        if found is not None and found.done:
            train._tell_done(found)

    asked = {**cfg, "resume": str(folder)}
    for door in (
        sweep,
        lambda: resume(asked, {"resume"}),
        lambda: resume({**asked, "epochs": 3}, {"resume", "epochs"}),
    ):
        try:
            door()
        except ConfigError as error:
            said.append(str(error))
    assert all(sentence and "\n" not in sentence for sentence in said)
    return said


def copied(runs: dict, kind: str, root: Path) -> tuple[dict, Path]:
    cfg, folder = runs[kind]
    cfg = {**cfg, "paths": {**cfg["paths"], "runs": str(root)}}
    return cfg, Path(shutil.copytree(folder, root / folder.name))


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", ["finished", "stopped"])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file(kind, file, runs, tmp_path):
    for damage, hurt in DAMAGES.items():
        cfg, folder = copied(runs, kind, tmp_path / damage.replace(" ", "-"))
        if (folder / file).exists():
            hurt(folder / file)
        said = doors(cfg, folder)
        if file == "config.yaml":
            assert said, damage


STRANGE = (5, None, "x", [1], {"a": 1}, ...)  # ...: absent


def strange(runs: dict, root: Path, every: int) -> None:
    """Every option as another kind, and as none: each `every`-th of these."""
    cfg, folder = copied(runs, "stopped", root)
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    for key, value in list(itertools.product(saved, STRANGE))[::every]:
        changed = {**saved, key: value}
        if value is ...:
            del changed[key]
        (folder / "config.yaml").write_text(yaml.safe_dump(changed))
        doors(cfg, folder)


def test_some_strange_values(runs, tmp_path):
    strange(runs, tmp_path, every=7)


@pytest.mark.slow
def test_strange_values(runs, tmp_path):
    strange(runs, tmp_path, every=1)


@pytest.mark.parametrize("row", ["[]", "5", '{"epoch": "x"}', '{"epoch": 0}', '{"epoch": 0, "step": null}', "{"])
def test_a_strange_row(row, runs, tmp_path):
    for place_of in ("first", "last"):
        cfg, folder = copied(runs, "finished", tmp_path / place_of)
        rows = (folder / "metrics.jsonl").read_text()
        (folder / "metrics.jsonl").write_text(f"{row}\n{rows}" if place_of == "first" else f"{rows}{row}\n")
        doors(cfg, folder)


@pytest.mark.parametrize("metric", [None, "x", [1]])
def test_a_metric_that_is_no_number(metric, runs, tmp_path):
    cfg, folder = copied(runs, "finished", tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    assert RunFolder(folder).done
    (folder / "summary.json").write_text(durable.json_text({**summary, "metric": metric}))
    assert not RunFolder(folder).done and RunFolder(folder).wrong_summary() == "summary.json has no metric"
    doors(cfg, folder)


def test_rows_that_are_lost_are_told(runs, tmp_path, capsys):
    cfg, folder = copied(runs, "stopped", tmp_path)
    (folder / "metrics.jsonl").write_text("")
    train.run({**cfg, "resume": str(folder)}, {"resume": None})
    assert RunFolder(folder).done and len(RunFolder(folder).read_metrics()) == 2


def test_no_link_leads_out_of_the_folder(tmp_path):
    """What a resumed run writes stays in its folder, wherever links of another user lead."""
    folder, mine = RunFolder(tmp_path / "run"), tmp_path / "mine"
    folder.path.mkdir()
    mine.write_text("mine")
    for name in ("metrics.jsonl", "config.yaml", "weights.pt"):
        (folder.path / f"{name}.part").symlink_to(mine)
    folder.keep_metrics_before(1)
    folder.write_config({"epochs": 1})
    save_weights(folder.path / "weights.pt", {"x": torch.zeros(1)})
    (folder.path / "run.log").symlink_to(mine)
    with pytest.raises(OSError, match="symbolic"):
        folder.log_to_file()
    assert mine.read_text() == "mine" and folder.read_config() == {"epochs": 1}


@pytest.mark.parametrize("name", folder_of.APPENDED)
def test_a_link_where_a_run_appends_or_removes_is_refused(name, tmp_path):
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"{name} must be as the run has written it, got a link; restore it, or"):
        RunFolder(tmp_path).refuse_strange()


def test_a_folder_that_takes_no_log_is_told(tmp_path):
    """Nor one that cannot be made."""
    config = RunConfig.from_dict(composed.run(tmp_path))
    (tmp_path / "run.log").mkdir()
    with pytest.raises(ConfigError, match="must be a folder that the run can write to, got: Is a directory"):
        launch.train(config, place(config), RunFolder(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="must be a folder that the run can write to, got: Not a directory"):
        RunFolder.create(str(tmp_path / "file"), "x", config.to_dict())
