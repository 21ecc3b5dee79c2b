"""Files of metrics rows that a loop of one's own has written: read as runs, beside those of the bench."""

import json
import os
import random
import sys
import time

import pytest

from accordion_bench.options import instantiate
from accordion_bench.report import load_metrics, load_runs, read
from accordion_bench.report.__main__ import main as report_main
from accordion_bench.report.compare import arms, columns, grouping, times, verdicts
from accordion_bench.report.compare.arms import own_commands
from accordion_bench.report.render import captions, figures, write
from accordion_bench.report.render.write import group_sound_runs
from accordion_bench.runs import untrusted
from tests.report.hostile.test_fuzz import damaged
from tests.report.test_report import no_figures, node, run_folder  # noqa: F401

EPOCHS, PARAMETERS = 4, 75002
SECONDS = 10  # for one file, however slow the machine is
LEVELS = {"conv.weight": 2, "stages.0.0.conv1.weight": 1, "fc.weight": 2}
SAID = {"model": "resnet8", "dataset": "digits"}  # with which a file stands beside runs of `run_folder`


def row(epoch, payload=413184, **columns):
    """A row as `comm.metrics()` returns it, without `run`; numbers as a bench run of two epochs had them."""
    share = (epoch + 1) / EPOCHS
    return {
        "epoch": epoch,
        "step": 12 * (epoch + 1),
        "lr": 0.1,
        "train_loss": 1.8 - share,
        "accuracy": 0.59 + 0.2 * share,
        "payload_bytes": int(payload * share),
        "wire_bytes": int(1.5 * payload * share),
        "inner_wire_bytes": 0,
        "rounds": 288,
        "control_bytes": 16,
        "control_wire_bytes": 0,
        "control_rounds": 0,
        "dense_bytes": int(7200192 * share),
        "paper_floats": 103296,
        "seconds": 0.7 * share,
        "outlier_seconds_count": 0,
        "outlier_seconds": 0.0,
        "data_seconds": 0.02 * share,
        "compute_seconds": 0.6 * share,
        "exposed_seconds": 0.06 * share,
        "update_seconds": 0.02 * share,
        "policy_seconds": 0.0,
        "encode_seconds": 0.04 * share,
        "comm_seconds": 0.01 * share,
        "decode_seconds": 0.02 * share,
        "modelled_seconds": 0.21 * share,
        "modelled_exposed_seconds": 0.05 * share,
        "modelled_comm_seconds": 0.02 * share,
        "modelled_dense_comm_seconds": 0.09 * share,
        "seconds_by_bucket": [[4, 23.0, 0.007, [[0.0064, 0.0004, 0.0007, 25824.0, 12.0]], 0.0006]],
        "seconds_by_phase": [["compute", 32, 21, 0.0277], ["update", ["gradient-4"], 23, 0.0007]],
        "plan": {"batch_size": 32, "lr_factor": 1.0, "period": 1, "levels": LEVELS},
        "decisions": {},
        **columns,
    }


def about(compressor="powersgd", seed=0, adaptive=(), **said):
    """`run` of a row."""
    options = {"compressor": node("compressor", compressor), "sync": node("sync", "every_step")}
    options["adaptive"] = {name: node("adaptive", name) for name in adaptive}
    return {
        "name": None,
        "compressor": compressor,
        "adaptive": list(adaptive),
        "sync": "every_step",
        "options": options,
        "workers": 4,
        "processes": 4,
        "seed": seed,
        "model": "Net",
        "parameters": PARAMETERS,
        "versions": {"accordion_bench": "0.2.0", "torch": "2.15.0"},
        "host": "vm",
        "processor": "P",
        "threads": 1,
        "device": "cpu",
        **said,
    }


def rows_file(path, run=None, epochs=EPOCHS, payload=413184, **columns):
    """A file of an own loop's rows."""
    run = about() if run is None else run
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({**row(e, payload, **columns), "run": run}) + "\n" for e in range(epochs)))
    return path


def of_file(path):
    (run,) = read.read_runs([path])
    return run


def parts_of(*paths):
    """The arms of each setting."""
    return grouping.settings(grouping.group(read.read_runs(paths))[0])


def labels_of(*paths):
    return [[arm.label for arm in part] for part in parts_of(*paths)]


# ---- what a file becomes


def test_a_file_and_a_run_folder_with_the_same_rows_have_the_same_numbers(tmp_path):
    """The report's rows of a run folder and of its own rows as a file agree in everything that rows tell."""
    folder = run_folder(tmp_path / "bench", "powersgd", comm_seconds=0.5, processes=4)
    own = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    run = about("powersgd", **SAID)
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({**one, "run": run}) + "\n" for one in own))
    bench, attached = ([arm] for arm in parts_of(folder, tmp_path / "own.jsonl")[0])
    (theirs,), (mine,) = (columns.tidy(part).to_dict("records") for part in (bench, attached))
    assert (theirs.pop("arm"), mine.pop("arm")) == ("PowerSGD rank 2", "PowerSGD rank 2, attached")
    assert {key for key in theirs if str(theirs[key]) != str(mine[key])} <= {"test_accuracy_at_best"}


def test_one_file_alone_makes_a_whole_report(tmp_path, capsys):
    file = rows_file(tmp_path / "mine-seed0.jsonl")
    assert report_main([str(file), "--out", str(tmp_path / "out"), "--figures", "png"]) == 0
    out, err = capsys.readouterr()
    assert err == f"reading the runs in {file}\n" and "Figures that could not be drawn" not in out
    assert "## Net on unknown data, 4 workers x 32 samples, 4 epochs" in out
    assert "| PowerSGD rank 2, attached |  1 |         79.00 % |" in out
    assert 'Add one: the same loop with attach(..., compressor="none")' in out
    assert "Attached: users' own training loops" in out and "do not name their data set" in out
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "# mine-seed0.jsonl: a training loop of its own\n" in readme
    assert "python -m accordion_bench" not in readme  # nobody has typed that
    for name in ("comparison", "accuracy_epoch", "accuracy_bytes", "accuracy_time", "breakdown"):
        assert (tmp_path / "out" / f"{name}.png").exists()
    page = (tmp_path / "out" / "report.html").read_text()
    assert "PowerSGD rank 2, attached" in page and "mine-seed0.jsonl" in page


def test_seeds_are_one_arm_and_options_that_differ_are_told(tmp_path):
    for seed in (0, 1, 2):
        rows_file(tmp_path / f"a{seed}.jsonl", about(seed=seed))
        plain = about(seed=seed)
        plain["options"]["compressor"]["error_feedback"] = False
        rows_file(tmp_path / f"b{seed}.jsonl", plain)
        rows_file(tmp_path / f"c{seed}.jsonl", about(seed=seed, name="long warm-up"))
    (part,) = parts_of(tmp_path)
    assert {arm.label: arm.seeds for arm in part} == {
        "PowerSGD rank 2, attached, error_feedback=True": [0, 1, 2],
        "PowerSGD rank 2, attached, error_feedback=False": [0, 1, 2],
        "long warm-up (PowerSGD rank 2, attached)": [0, 1, 2],
    }


def test_what_the_user_has_passed_may_stand_beside_the_run(tmp_path):
    anonymous = about(seed=None, model=None)
    rows_file(tmp_path / "a.jsonl", anonymous, seed=3, batch_size=64, plan={}, **SAID)
    run = of_file(tmp_path / "a.jsonl")
    assert run.finished and run.seed == 3
    assert (run.config["choices"]["model"], run.config["choices"]["dataset"]) == ("resnet8", "digits")
    assert run.config["batch_size"] == 64


def test_what_the_user_has_passed_comes_before_what_was_attached(tmp_path):
    """`attach` writes its default seed, and the class of the model."""
    for seed in (1, 2):
        rows_file(tmp_path / f"{seed}.jsonl", about(seed=0), seed=seed, model="resnet8")
    (arm,), repeats = grouping.group(read.read_runs([tmp_path]))
    assert (arm.seeds, repeats) == ([1, 2], [])
    assert of_file(tmp_path / "1.jsonl").config["choices"]["model"] == "resnet8"


@pytest.mark.parametrize(
    "said, link",
    [({}, "1gbit"), ({"network": "10gbit"}, "10gbit"), ({"network": "no such"}, "1gbit"), ({"network": [1]}, "1gbit")],
    ids=str,
)
def test_the_link_of_modelled_times_is_the_one_that_was_passed(tmp_path, said, link):
    run = of_file(rows_file(tmp_path / "a.jsonl", about(**said)))
    assert run.finished and run.config["choices"]["network"] == link
    assert run.config["network"] == {**node("network", link)}


def test_files_without_a_seed_count_once(tmp_path):
    for name in "ab":
        rows_file(tmp_path / f"{name}.jsonl", about(seed=None))
    (arm,), repeats = grouping.group(read.read_runs([tmp_path]))
    assert arm.seeds == [None] and [run.name for run in repeats] == ["a.jsonl"]


def test_policies_and_schemes_are_labelled_as_in_the_bench(tmp_path):
    rows_file(tmp_path / "a.jsonl", about(adaptive=["accordion"]))
    run = about("none", sync="local_sgd")
    run["options"]["sync"] = node("sync", "local_sgd")
    rows_file(tmp_path / "b.jsonl", run)
    bench = run_folder(tmp_path / "bench", adaptive={"accordion": node("adaptive", "accordion")}, compressor="powersgd")
    adaptive, scheme, theirs = read.read_runs([tmp_path / "a.jsonl", tmp_path / "b.jsonl", bench])
    assert adaptive.label == f"{theirs.label}, attached" == "Accordion (PowerSGD rank 2/1), attached"
    assert scheme.label.startswith("local SGD, H ") and scheme.label.endswith(", attached")


def test_one_call_loads_files_beside_folders(tmp_path):
    rows_file(tmp_path / "mine.jsonl", about(**SAID), eval_note="x")
    run_folder(tmp_path / "bench")
    runs, metrics = load_runs([tmp_path]), load_metrics([tmp_path])
    assert list(runs["label"]) == ["PowerSGD rank 2, attached", "dense"]
    assert list(runs["model"]) == ["resnet8", "resnet8"] and runs["finished"].all()
    assert runs.loc[0, "compressor.rank"] == 2 and runs.loc[0, "run"].endswith("mine.jsonl")
    assert len(metrics) == 2 * EPOCHS and set(metrics["run"]) == set(runs["run"])


# ---- beside the bench's runs


def test_a_file_stands_beside_runs_that_train_the_same(tmp_path):
    run_folder(tmp_path / "bench")
    rows_file(tmp_path / "mine.jsonl", about(**SAID))
    (part,) = parts_of(tmp_path / "mine.jsonl", tmp_path / "bench")
    assert [arm.label for arm in part] == ["dense", "PowerSGD rank 2, attached"]  # the bench first
    assert captions.heading(part[0]) == "resnet8 on digits, 4 workers x 32 samples, 4 epochs"
    (said,) = verdicts.verdicts(part)
    assert "beware, dense differs in more than compression: the training loop, attached beside the bench's own" in said


def test_a_class_with_as_many_parameters_is_the_same_model(tmp_path):
    folder = run_folder(tmp_path / "bench")
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "parameters": PARAMETERS}))
    rows_file(tmp_path / "mine.jsonl", about(model="CifarResNet", dataset="digits"))
    assert labels_of(tmp_path) == [["dense", "PowerSGD rank 2, attached"]]
    rows_file(tmp_path / "mine.jsonl", about(model="CifarResNet", dataset="digits", parameters=PARAMETERS + 1))
    assert len(labels_of(tmp_path)) == 2
    rows_file(tmp_path / "mine.jsonl", about(model="resnet8", dataset="digits", parameters=PARAMETERS + 1))
    assert len(labels_of(tmp_path)) == 2


@pytest.mark.parametrize(
    "said",
    [
        {"dataset": None},
        {"dataset": "cifar10"},
        {"model": "resnet20"},
        {"model": None},
        {"workers": 8},
        {"epochs": 3},
        {"batch_size": 16},
        {"batch_size": None},
        {"metric": "perplexity"},
    ],
)
def test_what_trains_something_else_has_a_table_of_its_own(tmp_path, said):
    """A file beside the bench is one setting; with one thing said otherwise, or not at all, it is two."""
    run_folder(tmp_path / "bench")
    rows_file(tmp_path / "mine.jsonl", about(**SAID))
    assert len(labels_of(tmp_path)) == 1
    columns = {}
    if said.get("metric"):
        columns = {"accuracy": None, "perplexity": 9.0}
    if "batch_size" in said:
        columns["plan"] = {"batch_size": said["batch_size"], "levels": {}}
    changed = {key: value for key, value in said.items() if key in ("dataset", "model", "workers")}
    rows_file(tmp_path / "mine.jsonl", about(**{**SAID, **changed}), said.get("epochs", EPOCHS), **columns)
    assert sorted(labels_of(tmp_path)) == [["PowerSGD rank 2, attached"], ["dense"]]


@pytest.mark.parametrize("option", [{"dataset__subset": 100}, {"scale": "tiny"}, {"dataset__validation": 50}])
def test_parts_of_a_data_set_are_no_place_for_a_file(tmp_path, option):
    """A file names a data set, and not which part of it: beside runs on a part it stands apart."""
    run_folder(tmp_path / "bench", **option)
    rows_file(tmp_path / "mine.jsonl", about(**SAID))
    assert len(labels_of(tmp_path)) == 2


def test_where_two_settings_fit_a_file_stands_apart(tmp_path):
    run_folder(tmp_path / "bench")
    run_folder(tmp_path / "bench", model__depth=14)  # of the same name, as far as anybody tells
    rows_file(tmp_path / "mine.jsonl", about(**SAID))
    assert ["PowerSGD rank 2, attached"] in labels_of(tmp_path)


def test_a_file_is_compared_with_its_own_dense_run_where_there_is_one(tmp_path):
    for seed in (0, 1):
        run_folder(tmp_path / "bench", seed=seed)
        run_folder(tmp_path / "bench", "topk", seed=seed, payload=100)
        rows_file(tmp_path / f"p{seed}.jsonl", about(seed=seed, **SAID))
        rows_file(tmp_path / f"d{seed}.jsonl", about("none", seed=seed, **SAID), payload=7200192)
    (part,) = parts_of(tmp_path)
    base = {arm.label: arms.baseline(arm, part).label for arm in part}
    assert base == {
        "dense": "dense",
        "TopK 10 %": "dense",
        "dense, attached": "dense, attached",
        "PowerSGD rank 2, attached": "dense, attached",
    }
    said = verdicts.verdicts(part)
    assert not any("beware" in line for line in said)
    assert any(line.startswith("PowerSGD rank 2, attached: payload 17.4x less than dense, attached") for line in said)


def test_runs_of_the_bench_have_the_same_numbers_with_a_file_beside_them(tmp_path):
    run_folder(tmp_path / "bench", target=0.8, comm_seconds=0.5)
    run_folder(tmp_path / "bench", "topk", payload=100, target=0.8, comm_seconds=0.5)
    alone = {str(one["arm"]): one for one in columns.tidy(parts_of(tmp_path)[0]).to_dict("records")}
    target = write.section(parts_of(tmp_path)[0]).partition("Time to 80.00 %")[2]
    rows_file(tmp_path / "mine.jsonl", about(**SAID), accuracy=None, test_loss=None, train_loss=0.5)  # stands apart
    rows_file(tmp_path / "also.jsonl", about(**SAID))
    beside, apart = parts_of(tmp_path)
    assert [arm.label for arm in apart] == ["PowerSGD rank 2, attached"]
    among = {str(one["arm"]): one for one in columns.tidy(beside).to_dict("records")}
    assert all(str(among[name]) == str(alone[name]) for name in alone)
    own, other = (_cells(text, "TopK 10 %") for text in (target, write.section(beside).partition("Time to 80.00 %")[2]))
    assert own == other != []


def _cells(markdown, arm):
    """Of the first row of an arm."""
    rows = [[cell.strip() for cell in line.split("|")] for line in markdown.splitlines() if line.startswith(f"| {arm}")]
    return rows[0] if rows else []


def test_loops_of_ones_own_share_no_speed(tmp_path):
    """Nobody knows whether they compute the same: a file's modelled time is that of its rows, whatever is beside it."""
    slow = [["compute", 32, 21, 0.09]]
    rows_file(tmp_path / "a.jsonl", about(seed=0))
    rows_file(tmp_path / "b.jsonl", about(seed=1), seconds_by_phase=slow)
    ((arm,),) = parts_of(tmp_path)
    assert arm.values("modelled_seconds") == [row(EPOCHS - 1)["modelled_seconds"]] * 2


def test_provenance_says_what_was_typed_and_what_was_not(tmp_path):
    rows_file(tmp_path / "mine.jsonl", about(device="cuda:0", host="h"))
    runs = read.read_runs([tmp_path, run_folder(tmp_path / "bench", command="python -m accordion_bench epochs=2")])
    assert own_commands(runs) == [
        "# mine.jsonl: a training loop of its own",
        "python -m accordion_bench epochs=2",
    ]
    assert times.machine(runs[0]) == "P, ? cores, cuda:0"


# ---- rows without some columns


def without(*columns):
    return dict.fromkeys(columns)


NO_BYTES = without("payload_bytes", "wire_bytes", "rounds", "dense_bytes", "paper_floats")
NO_TIME = without(*(name for name in row(0) if name.startswith("seconds") or name.endswith("_seconds")), "lr", "step")


@pytest.mark.parametrize("missing", [NO_BYTES, NO_TIME, {**NO_BYTES, **NO_TIME, "plan": None, "decisions": None}])
@pytest.mark.parametrize("beside", [False, True])
def test_rows_may_lack_columns(tmp_path, missing, beside, capsys):
    """Null or absent: everything else is drawn and said, and what is not counted is neither 0 nor dense's number."""
    plan = {} if "plan" in missing else {"plan": {"batch_size": 32, "levels": {}}}
    rows_file(tmp_path / "runs" / "null.jsonl", about(seed=0, **SAID), **{**missing, **plan}, batch_size=32)
    lines = (tmp_path / "runs" / "null.jsonl").read_text().splitlines()
    absent = [{key: v for key, v in json.loads(line).items() if v is not None} for line in lines]
    absent = [{**one, "run": {**one["run"], "seed": 1}} for one in absent]
    (tmp_path / "runs" / "absent.jsonl").write_text("".join(json.dumps(one) + "\n" for one in absent))
    if beside:
        run_folder(tmp_path / "runs", comm_seconds=0.5)
    assert report_main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "could not be drawn" not in out and "in no mean" not in out
    assert ("not counted" in out) == ("payload_bytes" in missing)
    assert (tmp_path / "out" / "comparison.png").exists()
    found = next(arm for part in parts_of(tmp_path / "runs") for arm in part if arm.attached)
    assert found.n == 2
    (own,) = [one for one in columns.tidy([found]).to_dict("records")]
    assert (own["payload_bytes"] != own["payload_bytes"]) == ("payload_bytes" in missing)  # NaN
    if beside and "payload_bytes" in missing:
        assert "bytes not counted" in out


def test_a_metric_that_is_not_evaluated_in_every_epoch(tmp_path):
    file = tmp_path / "a.jsonl"
    lines = [{**row(e), "accuracy": 0.7 if e % 2 else None, "run": about()} for e in range(EPOCHS)]
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    run = of_file(file)
    assert run.finished and run.summary["metric"] == 0.7 and run.summary["best_epoch"] == 1
    assert figures.draw_all(parts_of(file)[0], tmp_path)
    file.write_text("".join(json.dumps(one) + "\n" for one in lines[:3]))
    assert of_file(file).problem == "the last row of a.jsonl has no accuracy, which earlier ones have"


@pytest.mark.parametrize("key", about())
def test_a_run_may_lack_any_key(tmp_path, key):
    """What is not said is unknown; only how many workers there are must be known."""
    run = about(**SAID)
    (tmp_path / "nulls").mkdir()
    null = of_file(rows_file(tmp_path / "nulls" / "a.jsonl", {**run, key: None}))
    absent = of_file(rows_file(tmp_path / "a.jsonl", {name: value for name, value in run.items() if name != key}))
    assert null.problem == absent.problem and null.label == absent.label
    said = {"workers": "workers is missing in the rows of a.jsonl, or of the wrong type"}
    assert absent.problem == said.get(key, "")
    expected = {"compressor": "unknown method rank 2, attached", "options": "powersgd, attached"}
    assert absent.label == expected.get(key, "PowerSGD rank 2, attached")
    if absent.finished:
        assert write.section(parts_of(tmp_path / "a.jsonl")[0])


# ---- what it is judged by


def test_the_metric_is_one_that_the_bench_knows_else_a_loss(tmp_path):
    """The first of all metrics, then losses, that the rows have; losses are said to be used."""
    columns = {"accuracy": 0.9, "perplexity": 80.0, "bits_per_byte": 2.5, "token_perplexity": 9.0}
    columns |= {"test_loss": 0.3, "train_loss": 0.2}
    for name in list(columns):
        run = of_file(rows_file(tmp_path / f"{name}.jsonl", **columns))
        assert (run.summary["metric_name"], run.summary["metric"]) == (name, columns[name])
        ((arm,),) = parts_of(tmp_path / f"{name}.jsonl")
        said = " ".join(captions.captions([arm]))
        assert (f"judged by {name.replace('_', ' ')}" in said) == name.endswith("loss")
        assert ("Lower is better" in said) == (name != "accuracy")
        columns[name] = None
    problem = of_file(rows_file(tmp_path / "none.jsonl", **columns)).problem
    assert problem.startswith("none.jsonl has no number for any of accuracy, perplexity, bits_per_byte, token_")


def test_the_best_epoch_of_a_loss_is_its_lowest(tmp_path):
    file = tmp_path / "a.jsonl"
    losses = [0.5, 0.2, 0.4]
    lines = [{**row(e), "accuracy": None, "test_loss": loss, "run": about()} for e, loss in enumerate(losses)]
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    summary = of_file(file).summary
    assert (summary["metric"], summary["best_metric"], summary["best_epoch"]) == (0.4, 0.2, 1)


def test_accuracy_in_percent_is_refused(tmp_path):
    problem = of_file(rows_file(tmp_path / "a.jsonl", accuracy=91.0)).problem
    assert problem == "accuracy must be a share from 0 to 1, got 91.0; type comm.metrics(accuracy=0.91)"


# ---- when it counts as finished


def test_a_file_is_finished_from_its_first_row_on(tmp_path):
    run = of_file(rows_file(tmp_path / "a.jsonl", epochs=1))
    assert run.finished and run.config["epochs"] == 1
    assert "Not known here" in captions.attached(parts_of(tmp_path / "a.jsonl")[0])[0]


def test_rows_that_say_of_how_many_epochs_they_are(tmp_path):
    problem = of_file(_of_ten(tmp_path, 3)).problem
    assert problem == "a.jsonl has rows up to epoch 3 of 10: still running, or stopped"
    assert of_file(_of_ten(tmp_path, 10)).finished


def _of_ten(folder, written):
    lines = [{**row(EPOCHS - 1), "epoch": e, "epochs": 10, "run": about()} for e in range(written)]
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return folder / "a.jsonl"


def test_a_torn_last_line_is_left_out(tmp_path):
    file = rows_file(tmp_path / "a.jsonl")
    file.write_text(file.read_text()[:-30])
    run = of_file(file)
    assert run.finished and len(run.rows) == EPOCHS - 1 == run.config["epochs"]


def test_a_damaged_line_with_others_after_it_is_told(tmp_path):
    file = rows_file(tmp_path / "a.jsonl")
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], lines[1][:40] + lines[1], *lines[2:]]) + "\n")
    assert of_file(file).problem == "line 2 of a.jsonl is not a row of metrics, and others follow it: delete it"


def test_several_runs_in_one_file_are_told(tmp_path):
    first = rows_file(tmp_path / "a.jsonl", about(seed=0)).read_text()
    second = rows_file(tmp_path / "b.jsonl", about(seed=1)).read_text()
    (tmp_path / "a.jsonl").write_text(first + second)
    said = "line 5 of a.jsonl belongs to another run than line 1: write each run to a separate file"
    assert of_file(tmp_path / "a.jsonl").problem == said


def test_of_epochs_that_come_again_the_later_rows_count(tmp_path):
    """A loop that was begun again from a checkpoint, or by all ranks, leaves what it would have left in one go."""
    whole = rows_file(tmp_path / "whole.jsonl")
    lines = whole.read_text().splitlines()
    stopped = [json.dumps({**json.loads(line), "accuracy": 0.1, "epoch": e}) for e, line in enumerate(lines)]
    other = json.dumps({**json.loads(lines[1]), "run": {**about(), "host": "elsewhere", "threads": 8}})
    (tmp_path / "again.jsonl").write_text("\n".join([lines[0], *stopped[1:3], other, *lines[2:]]) + "\n")
    (tmp_path / "ranks.jsonl").write_text("\n".join(line for line in lines for _ in range(2)) + "\n")
    expected, again, ranks = (of_file(tmp_path / f"{name}.jsonl") for name in ("whole", "again", "ranks"))
    for run in (again, ranks):
        assert (run.rows, run.summary, run.problem) == (expected.rows, expected.summary, "")


# ---- where files are looked for


def test_files_are_found_in_folders_and_nothing_else_is_taken_for_one(tmp_path):
    folder = run_folder(tmp_path / "runs")
    rows_file(folder / "mine.jsonl")  # inside a run folder nothing is looked for
    first, second = rows_file(tmp_path / "runs" / "b.jsonl"), rows_file(tmp_path / "runs" / "own" / "c.jsonl")
    rows_file(tmp_path / "runs" / ".hidden.jsonl")
    rows_file(tmp_path / "runs" / "rows.txt")
    (tmp_path / "runs" / "sweep.jsonl").write_text('{"overrides": ["seed=0"], "folder": null, "status": "failed"}\n')
    (tmp_path / "runs" / "data.jsonl").write_text('{"text": "hello", "run": "x", "epoch": 1}\n')
    (tmp_path / "runs" / "empty.jsonl").touch()
    (tmp_path / "runs" / "bytes.jsonl").write_bytes(bytes(range(256)))
    os.symlink(first, tmp_path / "runs" / "z.jsonl")
    assert read.find_runs([tmp_path / "runs", first]) == [first, folder, second]
    given = [tmp_path / "runs" / name for name in ("own", "rows.txt")]
    assert [run.finished for run in read.read_runs(given)] == [True, True]  # by its name any file
    assert read.no_runs([tmp_path / "runs" / "own", first]) == []


def test_rows_in_a_file_named_like_the_benchs_are_no_broken_run(tmp_path):
    file = rows_file(tmp_path / "runs" / "metrics.jsonl")
    other = rows_file(tmp_path / "runs" / "more" / "b.jsonl", about(seed=1))
    assert read.find_runs([tmp_path]) == [file, other]
    assert all(run.finished for run in read.read_runs([tmp_path]))


def test_a_file_that_is_none_is_told(tmp_path, capsys, no_figures):  # noqa: F811
    folder = run_folder(tmp_path / "runs")
    (tmp_path / "bad.jsonl").write_text("{")
    given = [tmp_path / "bad.jsonl", folder / "metrics.jsonl", rows_file(tmp_path / "good.jsonl")]
    assert report_main([*map(str, given), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "bad.jsonl: neither a folder nor a file of metrics rows: its first line cannot be read as JSON" in said
    assert (
        "metrics.jsonl: neither a folder nor a file of metrics rows: its first line lacks an epoch or the run" in said
    )
    assert "good.jsonl" not in said
    assert report_main([str(given[0]), "--out", str(tmp_path / "out")]) == 2
    assert "RUN must be a run folder, a file of metrics rows or a folder" in capsys.readouterr().err


# ---- files of strangers


@pytest.fixture
def payload(tmp_path, monkeypatch):
    """The file that appears when a stranger's module is imported."""
    ran = tmp_path / "ran"
    (tmp_path / "strangers.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\nclass Sparse: ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(instantiate, "_added", set())
    yield ran
    sys.modules.pop("strangers", None)


def test_a_class_is_imported_only_where_it_is_trusted(tmp_path, payload, capsys, no_figures):  # noqa: F811
    run = {**about("topk"), "compressor": "sparse"}
    run["options"]["compressor"]["_target_"] = "strangers.Sparse"
    run["options"]["adaptive"] = {"mine": {"_target_": "strangers.Sparse"}}
    rows_file(tmp_path / "runs" / "a.jsonl", run)
    assert report_main(["runs", "--out", "out"]) == 0
    assert "mine (Sparse 10 %), attached" in capsys.readouterr().out
    assert not payload.exists()
    assert report_main(["runs", "--out", "out", "--trust"]) == 0
    assert payload.exists()


def test_texts_are_printable_and_secrets_masked(tmp_path):
    evil = "a\n\n# owned\x1b[2J\u202e"
    run = about(name=evil, model=evil, dataset=evil, processor=evil, host="\ud800")
    run["options"]["compressor"]["api_key"] = "hunter2"
    file = rows_file(tmp_path / "a.jsonl", run, note=evil, my_token="hunter2")
    found = of_file(file)
    assert found.finished
    _, _, _, (markdown, latex) = group_sound_runs([found], write.texts)
    assert all(line.isprintable() for text in [*markdown, *latex] for line in text.splitlines())
    for text in (found.label, json.dumps([found.config, found.environment, found.summary], ensure_ascii=False)):
        assert text.isprintable() and "hunter2" not in text


@pytest.mark.parametrize("content", ['{"epoch": 0, "run": ' + "[" * 200_000, '{"epoch": 0, "run": {}}\n' + "[" * 100])
def test_deep_files_are_a_sentence(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    runs = read.read_runs([tmp_path / "a.jsonl"])
    assert not any(run.finished for run in runs)


def test_only_regular_files_of_limited_size_are_read(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.jsonl")
    os.symlink("/dev/zero", tmp_path / "zero.jsonl")
    (tmp_path / "long.jsonl").touch()
    os.truncate(tmp_path / "long.jsonl", 10 << 30)  # one line of ten gigabytes, on no disk
    start = time.monotonic()
    assert read.find_runs([tmp_path, *tmp_path.iterdir()]) == []
    assert time.monotonic() - start < SECONDS
    file = rows_file(tmp_path / "big.jsonl")
    os.truncate(file, 10 << 30)
    assert "bytes; at most" in of_file(file).problem
    with pytest.raises(untrusted.Refused, match=r"first line of big\.jsonl has more than 10 bytes"):
        untrusted.read_first_line(file, 10)


STRANGE = (
    None,
    True,
    -1,
    0,
    2.5,
    10**18,
    10**400,
    float("nan"),
    float("inf"),
    "x",
    "x" * 10**5,
    [],
    [[1]],
    {},
    {"a": 1},
)
PLACES = [("run", key) for key in about()] + [(key,) for key in row(0)] + [("run", "options", "compressor")]


@pytest.mark.sample(4)
@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_strange_values_are_a_result_or_a_sentence(tmp_path, place):
    honest = [{**row(e), "run": about(**SAID)} for e in range(2)]
    for value in STRANGE:
        lines = json.loads(json.dumps(honest))
        for line in lines:
            for key in place[:-1]:
                line = line[key]
            line[place[-1]] = value
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for run in read.read_runs([tmp_path / "a.jsonl"]):
            said, parts, _, (markdown, latex) = group_sound_runs([run], write.texts)
            assert bool(said[0].problem) != bool(parts)
            assert all(line.isprintable() for text in [*markdown, *latex] for line in text.splitlines())


def test_damaged_files_are_a_result_or_a_sentence(tmp_path):
    fuzz(tmp_path, 60, 0)


@pytest.mark.slow
def test_many_damaged_files_are_a_result_or_a_sentence(tmp_path):
    fuzz(tmp_path, 1500, 1)


def fuzz(root, cases, seed):
    draw = random.Random(seed)
    honest = rows_file(root / "a.jsonl", about(adaptive=["accordion"], **SAID), epochs=2).read_bytes()
    bench = read.read_run(run_folder(root / "bench", epochs=2))
    finished = 0
    for _ in range(cases):
        (root / "a.jsonl").write_bytes(damaged(honest, draw))
        read.no_runs([root / "a.jsonl"])
        for run in read.read_runs([root / "a.jsonl"]):
            assert run.problem.isprintable() and run.label.isprintable()
            runs, _, _, (markdown, _) = group_sound_runs([bench, run], write.texts)
            assert runs[0].finished  # the honest one beside it
            assert all(line.isprintable() for text in markdown for line in text.splitlines())
            finished += runs[1].finished
    assert finished
