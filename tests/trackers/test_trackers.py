"""Trackers: what is read back is what the run has written; a tracker never costs a run."""

import csv
import importlib.util
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from accordion_bench import train
from accordion_bench.options.checks import ConfigError
from accordion_bench.report.render.page import AXES as PAGE_AXES
from accordion_bench.runs.folder import RunFolder
from accordion_bench.runs.metrics import METRICS
from accordion_bench.trackers.services import AXES, CURVES, MLflow, TensorBoard, Wandb, grouped
from accordion_bench.trackers.tracker import CSV, build_tracker, scalars
from tests.kit import composed, tiny
from tests.kit.helpers import yaml_node
from tests.runs.test_resume import stopping_after

ACCORDION = ["compressor=powersgd", "compressor.min_compression_rate=0", "adaptive=accordion", "epochs=2"]
SHORT = ["tracker=wandb", "tracker.figures=false"]


@pytest.fixture(autouse=True)
def own_wandb(tmp_path, monkeypatch):
    """Nothing of the user's, and nothing in the user's folders."""
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb"))
    monkeypatch.delenv("WANDB_MODE", raising=False)


def records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format behind a header of 7 bytes, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def items(entries: Any) -> dict[str, Any]:
    return {"/".join(x.nested_key) or x.key: json.loads(x.value_json) for x in entries}


class Logged:
    """What one process has written for wandb."""

    def __init__(self, file: Path) -> None:
        found = list(records(file))
        self.files = file.parent / "files"
        self.run = next(r.run for r in found if r.HasField("run"))
        self.config = items(self.run.config.update)
        self.rows = [items(r.history.item) for r in found if r.HasField("history")]
        self.axes = {r.metric.name: r.metric.step_metric for r in found if r.HasField("metric")}
        self.summary: dict[str, Any] = {}
        for record in found:
            self.summary |= items(record.summary.update)
        self.exits = [r.exit.exit_code for r in found if r.HasField("exit")]


def logged(folder: Path) -> list[Logged]:
    import wandb

    wandb.teardown()  # a finished run's file is still being written, until the process that does it has ended
    return [Logged(file) for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"))]


def test_wandb_offline(tmp_path, monkeypatch):
    """Configuration, every row, curves against bytes, the figures and the summary."""
    monkeypatch.setattr("accordion_bench.report.render.figures.OF_A_SETTING", ("accuracy_bytes", "levels"))
    cfg = tiny.cfg(tmp_path / "runs", "tracker=wandb", *ACCORDION)
    train.run(cfg)
    folder = tiny.only(tmp_path / "runs")
    (log,) = logged(folder)
    assert {key: log.config[key] for key in cfg if key != "workers"} == {k: v for k, v in cfg.items() if k != "workers"}
    assert (log.run.run_id, log.run.project) == (folder.name, "accordion_bench")
    assert log.run.run_group.startswith("resnet18 (_target_=tests.kit.tiny.Net) on synthetic (")
    assert log.run.job_type == "Accordion (PowerSGD rank 2/1)"
    assert {"powersgd", "accordion", "synthetic"} <= set(log.run.tags)

    rows = RunFolder(folder).read_metrics()
    told, figures = [row for row in log.rows if "epoch" in row], log.rows[-1]
    losses = [(row["step"], row["train_loss_by_step"]) for row in log.rows if "train_loss_by_step" in row]
    assert [step for step, _ in losses] == list(range(1, rows[-1]["step"] + 1))
    of_first = [loss for step, loss in losses if step <= tiny.STEPS]
    assert sum(of_first) / len(of_first) == pytest.approx(rows[0]["train_loss"], rel=1e-5)
    assert log.axes["train_loss_by_step"] == "step"
    assert [{key: row.get(key) for key in scalars(want)} for row, want in zip(told, rows, strict=True)] == [
        pytest.approx(scalars(row)) for row in rows
    ]
    assert told[0]["plan/levels/a.weight"] in (1, 2)
    assert log.axes["accuracy"] == log.axes["perplexity"] == log.axes["test_loss"] == "payload_bytes"
    assert {"payload_bytes", "wire_bytes", "seconds", "modelled_seconds"} <= log.axes.keys()
    assert {"accuracy", "payload_bytes", "wire_bytes", "seconds"} <= told[0].keys()

    images = [value for key, value in figures.items() if key.startswith("figures/") and key.endswith("/path")]
    assert any("accuracy_bytes" in path for path in images) and any("levels" in path for path in images)
    assert all((log.files / path).read_bytes().startswith(b"\x89PNG") for path in images)
    summary = RunFolder(folder).read_json("summary.json")
    assert {k: log.summary[k] for k in ("metric", "payload_bytes", "steps")} == pytest.approx(
        {k: summary[k] for k in ("metric", "payload_bytes", "steps")}
    )
    assert log.exits == [0]


def test_wandb_gets_no_secret(tmp_path, monkeypatch):
    import wandb

    def init(**options):
        told.append(options["config"])
        raise wandb.Error("no further")

    told: list = []
    monkeypatch.setattr(wandb, "init", init)
    cfg = tiny.cfg(tmp_path)
    with pytest.raises(ConfigError, match="no further"):
        Wandb().begin({**cfg, "model": {**cfg["model"], "token": {"mine": "hunter2"}}}, tmp_path)
    assert told == [{**cfg, "model": {**cfg["model"], "token": {"mine": "***"}}}]


def test_a_resumed_run_keeps_its_id(tmp_path):
    """Even in one process; the part that was stopped is marked as failed."""
    cfg = tiny.cfg(tmp_path / "runs", *SHORT, "checkpoint.every=4")
    cfg["choices"] |= {"experiment": "accordion/table1, faithful", "arm": "dense"}
    with stopping_after(3 * tiny.STEPS + 1), pytest.raises(KeyboardInterrupt):
        train.run(cfg)
    folder = tiny.only(tmp_path / "runs")
    train.run({**cfg, "resume": str(folder)})
    first, second = sorted(logged(folder), key=lambda log: log.rows[0]["step"])
    assert first.run.run_id == second.run.run_id == folder.name
    assert first.run.run_group == second.run.run_group == "accordion/table1, faithful"
    assert {"accordion/table1", "faithful", "dense"} <= set(first.run.tags)
    assert [row["epoch"] for row in first.rows if "epoch" in row] == [0, 1, 2]
    assert [row["epoch"] for row in second.rows if "epoch" in row] == [2, 3]  # the checkpoint lies in the third epoch
    assert (first.exits, second.exits) == ([1], [0])


def test_figures_that_cannot_be_drawn_cost_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr("accordion_bench.report.render.figures.draw_all", lambda *_: 1 / 0)
    train.run(tiny.cfg(tmp_path / "runs", "tracker=wandb", "epochs=1"))
    folder = tiny.only(tmp_path / "runs")
    assert RunFolder(folder).done and logged(folder)[0].exits == [0]
    assert "ZeroDivisionError" in (folder / "run.log").read_text()


def test_without_wandb(tmp_path, monkeypatch):
    """Everything else runs; tracker=wandb is refused before anything is touched."""
    here = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else here(name, *rest))
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import of it fails
    with pytest.raises(ConfigError, match=r"type pip install 'accordion-bench\[wandb\]', or tracker=none"):
        train.run(tiny.cfg(tmp_path / "runs", "tracker=wandb"))
    assert not (tmp_path / "runs").exists()
    train.run(tiny.cfg(tmp_path / "runs", "epochs=1"))
    assert RunFolder(tiny.only(tmp_path / "runs")).done


@pytest.mark.parametrize(
    "options, told",
    [
        ({"mode": "onlin"}, "mode must be one of offline, online, got onlin; type mode=online"),
        ({"project": "a/b"}, "project must be 1 to 128 characters without"),
        ({"project": None}, "project must be 1 to 128 characters without"),
        ({"figures": 1}, "figures must be true or false, got 1; type figures=true"),
    ],
)
def test_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        Wandb(**options)


@pytest.mark.parametrize(
    "name, value, told",
    [
        ("PROJECT", "a/b c", r"got a/b c \(.*\); type unset WANDB_PROJECT, and tracker.project=NAME for another one"),
        ("MODE", "offlin", r"got offlin \(Input should be .*'offline'.*\); type unset WANDB_MODE, and export"),
        ("SILENT", "perhaps", r"got perhaps \(Input should be a valid boolean"),
        ("RUN_ID", "a/b", r"got a/b \(Run ID cannot contain"),
        ("BASE_URL", "x" * 200, rf"got {'x' * 100} \(Input should be a valid URL"),
    ],
)
def test_variables_that_wandb_does_not_take(name, value, told, tmp_path, monkeypatch):
    """Before there is a run folder; wandb would complain when everything else has begun."""
    monkeypatch.setenv(f"WANDB_{name}", value)
    with pytest.raises(ConfigError, match=f"^WANDB_{name} in the environment must be what wandb takes, {told}"):
        train.run(tiny.cfg(tmp_path / "runs", "tracker=wandb"))
    assert not (tmp_path / "runs").exists()


def test_variables_that_wandb_takes(monkeypatch):
    for name, value in (("PROJECT", "mine"), ("MODE", "online"), ("TAGS", "a,b"), ("NOTHING", "x"), ("ENTITY", "")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    Wandb()


def test_scalars():
    row = {"a": 1, "b": None, "c": True, "d": "x", "plan": {"levels": {"fc.weight": 2}, "codebooks": {"2": [0, 1]}}}
    assert scalars(row) == {"a": 1, "plan/levels/fc.weight": 2}


class Recorder:
    """Stands in for a SummaryWriter and for wandb's run: (name, value) by step."""

    def __init__(self) -> None:
        self.told: dict[int, dict[str, float]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.told.setdefault(step, {})[name] = value

    def log(self, values: dict[str, float], step: int, commit: bool) -> None:
        assert commit and step not in self.told
        self.told[step] = dict(values)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("metric", METRICS)
def test_both_have_the_names_units_and_steps_of_the_rows(metric):
    """Bytes and seconds as in metrics.jsonl, the metric by its own name; what is null, a list or a text is nowhere."""
    rows = [
        {
            **{"epoch": epoch, "step": 10 * epoch + 10, metric: 0.5 + epoch, "test_loss": 1.5},
            **{"payload_bytes": 1000 + epoch, "wire_bytes": 2**40, "seconds": 3.25, "modelled_seconds": 1e-3},
            **{"comm_seconds": None, "seconds_by_bucket": [[1, 2, 3, []]], "plan": {"levels": {"fc.weight": 2}}},
        }
        for epoch in range(2)
    ]
    board, wandb = TensorBoard(), Wandb()
    for tracker, place in ((board, "writer"), (wandb, "run")):
        setattr(tracker, place, recorder := Recorder())
        for row in rows:
            tracker.log(row)
        wanted = {
            row["step"]: {
                **{key: row[key] for key in ("epoch", "step", metric, "test_loss", *AXES)},
                "plan/levels/fc.weight": 2,
            }
            for row in rows
        }
        if tracker is board:
            wanted = {
                step: {grouped(name): v for name, v in of.items() if name != "step"} for step, of in wanted.items()
            }
            assert {f"eval/{metric}", "eval/test_loss", "comm/wire_bytes", "time/seconds", "train/epoch"} <= wanted[
                10
            ].keys()
        assert recorder.told == wanted


def test_curves_may_be_drawn_against_what_the_page_draws_them_against():
    assert set(AXES) == set(PAGE_AXES)
    assert {*METRICS, "train_loss", "test_loss"} <= set(CURVES)


def test_tensorboard(tmp_path):
    """Each epoch once, although the resumed run writes one again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg = tiny.cfg(tmp_path / "runs", "tracker=tensorboard", "checkpoint.every=4")
    with stopping_after(3 * tiny.STEPS + 1), pytest.raises(KeyboardInterrupt):
        train.run({**cfg, "checkpoint": tiny.saving(3 * tiny.STEPS - 1)})  # the third epoch is told, and lost
    folder = tiny.only(tmp_path / "runs")
    train.run({**cfg, "resume": str(folder)})
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    rows = RunFolder(folder).read_metrics()
    assert [(e.step, e.value) for e in events.Scalars("eval/accuracy")] == [
        (row["step"], pytest.approx(row["accuracy"])) for row in rows
    ]
    assert [e.step for e in events.Scalars("plan/batch_size")] == [6, 12, 18, 24]


@pytest.mark.parametrize("epochs", [1, 3])
def test_tensorboard_keeps_the_steps_before_an_extension(epochs, tmp_path):
    """The last row is written again; only the loss at its step is lost."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg = {
        **tiny.cfg(tmp_path / "runs", "tracker=tensorboard", "schedule=constant", "checkpoint.every=6"),
        "epochs": epochs,
    }
    train.run(cfg)
    folder = tiny.only(tmp_path / "runs")
    train.run({**cfg, "resume": str(folder), "epochs": 4}, {"resume", "epochs"})
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    steps = [loss.step for loss in events.Scalars("train/loss_by_step")]
    assert steps == [step for step in range(1, 4 * tiny.STEPS + 1) if step != epochs * tiny.STEPS]
    assert [e.step for e in events.Scalars("eval/accuracy")] == [6, 12, 18, 24]


def test_tensorboard_has_groups_the_loss_of_each_step_options_and_figures(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr("accordion_bench.report.render.figures.OF_A_SETTING", ("accuracy_epoch",))
    train.run(tiny.cfg(tmp_path / "runs", "tracker=tensorboard", *ACCORDION))
    folder = tiny.only(tmp_path / "runs")
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()
    nested = {"plan", "norms", "decisions", "hparam"}
    assert {tag.partition("/")[0] for tag in tags["scalars"]} <= {"train", "eval", "comm", "time"} | nested
    rows = RunFolder(folder).read_metrics()
    losses = events.Scalars("train/loss_by_step")
    assert [loss.step for loss in losses] == list(range(1, rows[-1]["step"] + 1))
    for epoch, row in enumerate(rows):
        of_epoch = [loss.value for loss in losses][epoch * tiny.STEPS : (epoch + 1) * tiny.STEPS]
        assert sum(of_epoch) / len(of_epoch) == pytest.approx(row["train_loss"], rel=1e-5)
    assert tags["images"] == ["figures/accuracy_epoch"]
    (metric,) = events.Scalars("hparam/metric")
    assert metric.value == pytest.approx(RunFolder(folder).read_json("summary.json")["metric"])
    assert "_hparams_/session_start_info" in events.summary_metadata


def table(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.open()))


def test_csv(tmp_path):
    """Each number of each row once, although the resumed run writes one again; columns that come later, too."""
    cfg = tiny.cfg(tmp_path / "runs", "tracker=csv", "checkpoint.every=4")
    with stopping_after(3 * tiny.STEPS + 1), pytest.raises(KeyboardInterrupt):
        train.run({**cfg, "checkpoint": tiny.saving(3 * tiny.STEPS - 1)})
    folder = tiny.only(tmp_path / "runs")
    train.run({**cfg, "resume": str(folder)})
    rows = [scalars(row) for row in RunFolder(folder).read_metrics()]
    found = table(folder / "metrics.csv")
    assert [{key: float(text) for key, text in row.items() if text} for row in found] == rows and len(rows) == 4

    tracker = CSV()
    tracker.begin({}, tmp_path)
    for row in ({"epoch": 0, "step": 1}, {"epoch": 1, "step": 2}, {"epoch": 2, "step": 3, "plan": {"batch_size": 8}}):
        tracker.log(row)
    assert (tmp_path / "metrics.csv").read_text() == "epoch,step,plan/batch_size\n0,1,\n1,2,\n2,3,8\n"


def test_several_at_once(tmp_path):
    """Each gets every row; an option counts for all that have it."""
    train.run(tiny.cfg(tmp_path / "runs", "tracker=[csv,tensorboard]", "tracker.figures=false", "epochs=2"))
    folder = tiny.only(tmp_path / "runs")
    assert len(table(folder / "metrics.csv")) == 2 and any((folder / "tensorboard").iterdir())
    saved = RunFolder(folder).read_config()
    assert list(saved["tracker"]) == ["csv", "tensorboard"] and saved["tracker"]["tensorboard"]["figures"] is False
    assert saved["choices"]["tracker"] == "csv,tensorboard"
    assert build_tracker([yaml_node("tracker", "csv"), yaml_node("tracker", "none")]).by_step is False
    assert "tracker" in composed.cfg("tracker=[csv]") and "_target_" in composed.cfg("tracker=[csv]")["tracker"]
    with pytest.raises(ConfigError, match=r"tracker\.figures must be true or false, got 3"):
        train.run(tiny.cfg(tmp_path / "runs", "tracker=[csv,tensorboard]", "tracker.figures=3"))
    with pytest.raises(ConfigError, match=r"tracker\.foo is no option of CSV"):
        train.run(tiny.cfg(tmp_path / "runs", "tracker=[csv,tensorboard]", "+tracker.foo=3"))


class Server:
    """What a tracking server of MLflow has been told; stands in for its client, too."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.experiments: list[str] = []

    def __call__(self, uri: str | None) -> "Server":
        self.uri = uri
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=name) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments.append(name)
        return name

    def search_runs(self, experiments: list[str], query: str) -> list[Any]:
        named = [name for name in self.runs if query == f"attributes.run_name = '{name}'"]
        return [SimpleNamespace(info=SimpleNamespace(run_id=name)) for name in named]

    def create_run(self, experiment: str, tags: dict[str, str], run_name: str) -> Any:
        self.runs[run_name] = {"tags": tags, "params": {}, "metrics": [], "files": [], "status": "RUNNING"}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

    def update_run(self, run: str, status: str) -> None:
        self.runs[run]["status"] = status

    def set_terminated(self, run: str, status: str) -> None:
        self.update_run(run, status)

    def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(metrics) <= 100 and len(params) <= 100
        self.runs[run]["params"] |= dict(params)
        self.runs[run]["metrics"] += [(key, value, step) for key, value, _, step in metrics]

    def log_artifact(self, run: str, file: str, folder: str) -> None:
        self.runs[run]["files"].append((folder, Path(file).name))


@pytest.fixture
def server(monkeypatch) -> Server:
    """MLflow's client, pretended."""
    found, here = Server(), importlib.util.find_spec
    entities = {"Param": lambda *parts: parts, "Metric": lambda *parts: parts}
    parts = {"": {}, ".entities": entities, ".exceptions": {"MlflowException": OSError}, ".tracking": {}}
    for name, content in parts.items():
        module = ModuleType(f"mlflow{name}")
        vars(module).update(content, **({"MlflowClient": found} if name == ".tracking" else {}))
        monkeypatch.setitem(sys.modules, f"mlflow{name}", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name == "mlflow" or here(name, *rest))
    return found


def test_mlflow(tmp_path, monkeypatch, server):
    """Options, every row, losses of each step, figures and summary; a resumed run is the same one."""
    monkeypatch.setattr("accordion_bench.report.render.figures.OF_A_SETTING", ("accuracy_epoch",))
    words = ["tracker=mlflow", "tags=[final]", "note=as in the paper", "checkpoint.every=4"]
    cfg = tiny.cfg(tmp_path / "runs", *words)
    with stopping_after(3 * tiny.STEPS + 1), pytest.raises(KeyboardInterrupt):
        train.run(cfg)
    folder = tiny.only(tmp_path / "runs")
    train.run({**cfg, "resume": str(folder)})
    ((name, told),) = server.runs.items()
    assert (name, server.experiments) == (folder.name, ["accordion_bench"])
    assert server.uri is None
    assert told["tags"]["mlflow.note.content"] == "as in the paper" and told["tags"]["final"] == "true"
    assert told["params"]["optimizer.lr"] == str(cfg["optimizer"]["lr"])
    rows = RunFolder(folder).read_metrics()
    for row in rows:
        assert {(key, value, row["step"]) for key, value in scalars(row).items()} <= set(told["metrics"])
    assert {step for key, _, step in told["metrics"] if key == "train_loss_by_step"} == set(
        range(1, rows[-1]["step"] + 1)
    )
    summary = RunFolder(folder).read_json("summary.json")
    assert ("summary/metric", summary["metric"], summary["steps"]) in told["metrics"]
    assert (told["status"], told["files"]) == ("FINISHED", [("figures", "accuracy_epoch.png")])


def test_mlflow_that_is_not_reached_or_not_there(tmp_path, monkeypatch, server):
    def refuse(*_: Any) -> None:
        raise OSError("no such\nserver")

    monkeypatch.setattr(server, "get_experiment_by_name", refuse, raising=False)
    with pytest.raises(ConfigError, match=r"tracker\.uri=http://x must be .*, got: no such server; type tracker"):
        MLflow(uri="http://x").begin(tiny.cfg(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match="uri must be text or null, got ''; type uri=null"):
        MLflow(uri="")
    with pytest.raises(ConfigError, match="experiment must be text, got 3; type experiment=accordion_bench"):
        MLflow(experiment=3)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    with pytest.raises(ConfigError, match=r"type pip install 'accordion-bench\[mlflow\]', or tracker=none"):
        MLflow()


@pytest.mark.parametrize(
    ("column", "tag"),
    [
        ("lr", "train/lr"),
        ("valid_perplexity", "eval/valid_perplexity"),
        ("control_wire_bytes", "comm/control_wire_bytes"),
        ("rounds", "comm/rounds"),
        ("paper_floats", "comm/paper_floats"),
        ("encode_seconds", "time/encode_seconds"),
        ("plan/levels/fc.weight", "plan/levels/fc.weight"),
    ],
)
def test_groups(column, tag):
    assert grouped(column) == tag
