"""The report: hand-made run folders in, numbers, sentences and figures out."""

import json
import math

import pandas as pd
import pytest
import yaml

from accordion_bench.methods import labels
from accordion_bench.options.conf_dir import conf_dir
from accordion_bench.report import load_metrics, load_runs, parallel, read
from accordion_bench.report.__main__ import main as report_main
from accordion_bench.report.compare import arms, columns, grouping, intervals, verdicts
from accordion_bench.report.compare.arms import own_commands
from accordion_bench.report.render import captions, figures, tables, write
from accordion_bench.report.render.figures import layers
from accordion_bench.runs.folder import RunFolder

DENSE_BYTES = 1000
COSINE = {"_target_": "accordion_bench.schedules.learning_rate.Cosine", "warmup_epochs": 0, "lr_scaling": "none"}
LAYERS = ["conv.weight", "stages.0.0.conv1.weight", "fc.weight"]


def node(group, name):
    return yaml.safe_load((conf_dir() / group / f"{name}.yaml").read_text())


def run_folder(
    root,
    compressor="none",
    seed=0,
    accuracy=0.9,
    payload=DENSE_BYTES,
    wire=None,
    adaptive=None,
    epochs=4,
    seconds=2.0,
    comm_seconds=None,
    ladder=(1, 2),
    started="2026-01-01T00:00:00",
    command=None,
    **changes,
):
    """A finished run; `changes` are dotted config keys with __ for the dot."""
    name = f"{compressor}-{'-'.join(adaptive or {})}-s{seed}-{len(list(root.glob('*'))) if root.exists() else 0}"
    path = root / name
    path.mkdir(parents=True)
    config = {
        "model": node("model", "resnet8"),
        "dataset": node("dataset", "digits"),
        "compressor": node("compressor", compressor),
        "adaptive": adaptive or {},
        "optimizer": node("optimizer", "sgd"),
        "comm": node("comm", "simulated"),
        "schedule": node("schedule", "multistep"),
        "sync": node("sync", "every_step"),
        "tracker": node("tracker", "none"),
        "seed": seed,
        "epochs": epochs,
        "batch_size": 32,
        "workers": 4,
        "paths": {"data": "data", "runs": str(root)},
        "checkpoint": {"every": 0},
        "resume": None,
        "choices": {"model": "resnet8", "dataset": "digits", "compressor": compressor, "sync": "every_step"},
    }
    for key, value in changes.items():
        *parents, leaf = key.split("__")
        inner = config
        for parent in parents:
            inner = inner[parent]
        inner[leaf] = value
    wire = payload * 1.5 if wire is None else wire
    rows = []
    for epoch in range(epochs):
        share = (epoch + 1) / epochs
        rows.append(
            {
                "epoch": epoch,
                "step": 10 * (epoch + 1),
                "lr": 0.1 if epoch < epochs // 2 else 0.01,
                "accuracy": accuracy * (0.7 + 0.3 * share),
                "payload_bytes": int(payload * share),
                "wire_bytes": int(wire * share),
                "dense_bytes": int(DENSE_BYTES * share),
                "dense_wire_bytes": int(1.5 * DENSE_BYTES * share),
                "seconds": seconds * share,
                "exposed_seconds": 0.1,
                "comm_seconds": comm_seconds,
                "plan": {"batch_size": 32, "lr_factor": 1.0, "levels": level_plan(epoch, ladder) if adaptive else {}},
                "decisions": {"accordion": {"critical": True}} if adaptive and epoch % 2 else {},
            }
        )
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    typed = command or f"python -m accordion_bench compressor={compressor} seed={seed} paths.runs={root}"
    environment = {"command": typed, "commit": "abc", "started": started, "processor": "P", "cpu_cores": 2, "gpus": []}
    (path / "environment.json").write_text(json.dumps(environment))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    last = {key: value for key, value in rows[-1].items() if key not in ("epoch", "step", "lr", "plan", "decisions")}
    summary = {"metric_name": "accuracy", "metric": rows[-1]["accuracy"], "best_metric": rows[-1]["accuracy"]}
    summary |= {"epochs": epochs, "workers": 4, "test_size": 360}
    (path / "summary.json").write_text(json.dumps({**last, **summary}))
    (path / "done").touch()
    return path


def level_plan(epoch, ladder=(1, 2)):
    return dict.fromkeys(LAYERS, ladder[epoch % len(ladder)])


def accordion(**options):
    return {"accordion": {**node("adaptive", "accordion"), **options}}


def calendar(**options):
    return {"schedule": {**node("adaptive", "schedule"), **options}}


def grouped(root):
    return grouping.group(read.read_runs([root]))[0]


@pytest.fixture
def no_figures(monkeypatch):
    """For tests that look at something else: figures take longest."""
    monkeypatch.setattr(figures, "draw_one", lambda *_: None)


# ---- loading


def test_one_call_loads_many_runs(tmp_path):
    first = run_folder(tmp_path / "a", "powersgd", adaptive=accordion())
    run_folder(tmp_path / "b", "none", seed=1)
    runs, metrics = load_runs([first, tmp_path / "b", first]), load_metrics([tmp_path / "a", tmp_path / "b"])
    assert list(runs["label"]) == ["Accordion (PowerSGD rank 2/1)", "dense"]
    assert list(runs["seed"]) == [0, 1]
    assert runs["finished"].all()
    assert runs.loc[0, "compressor"] == "powersgd"
    assert runs.loc[0, "compressor.rank"] == 2
    assert runs.loc[0, "payload_bytes"] == DENSE_BYTES
    assert len(metrics) == 8
    assert metrics.loc[1, "plan.levels"] == level_plan(1)
    assert {"payload_bytes", "wire_bytes", "dense_bytes", "dense_wire_bytes", "seconds", "comm_seconds"} <= {*metrics}


def test_torn_last_line_is_left_out(tmp_path):
    path = run_folder(tmp_path)
    (path / "done").unlink()
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(text[:-40])
    (row,) = load_runs([tmp_path]).to_dict("records")
    assert not row["finished"]
    assert row["last_epoch"] == 2
    assert len(load_metrics([tmp_path])) == 3


@pytest.mark.sample(3)
@pytest.mark.parametrize("broken", ["done", "summary.json", "metrics.jsonl", "config.yaml", "all"])
@pytest.mark.parametrize("how", ["absent", "torn"])
def test_broken_runs_are_listed_and_in_no_mean(tmp_path, broken, how, capsys, no_figures):
    run_folder(tmp_path, accuracy=0.9)
    path = run_folder(tmp_path, accuracy=0.1, seed=1)
    for file in list(path.iterdir()) if broken == "all" else [path / broken]:
        if how == "torn" and broken not in ("done", "all"):
            file.write_bytes(file.read_bytes()[:150] + b"\xff")
        else:
            file.unlink()
    assert report_main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert ("Skipped: no run in it" if broken == "all" else "Unfinished, in no mean") in said
    assert path.name in said
    assert "90.00 %" in said
    assert [arm.n for arm in grouped(tmp_path)] == [1]


def test_interrupted_run_says_where_it_stopped(tmp_path):
    path = run_folder(tmp_path)
    (path / "done").unlink()
    (path / "summary.json").write_text(
        json.dumps({"stopped_by": "Interrupted", "reason": "Ctrl-C", "payload_bytes": 3})
    )
    (run,) = read.read_runs([path])
    assert write.unfinished(run) == (f"{path.name} (dense, seed 0): stopped by Interrupted; epoch 4 of 4 was the last")


def test_only_unfinished_runs(tmp_path, capsys):
    (run_folder(tmp_path) / "done").unlink()
    assert report_main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert "Unfinished" in capsys.readouterr().out


# ---- labels


@pytest.mark.parametrize("name", sorted(file.stem for file in (conf_dir() / "compressor").glob("*.yaml")))
def test_every_compressor_has_a_label(name):
    config = {"compressor": node("compressor", name), "choices": {"compressor": name}}
    label = labels.label(config)
    knob = labels.knob_of(config["compressor"])
    assert "_" not in label and (label == "dense") == (name == "none")
    if knob:
        assert labels.show_level(knob, config["compressor"][knob]) in label
        adaptive = labels.label({**config, "adaptive": accordion()})
        weak, strong = labels.pair_of({**config, "adaptive": accordion()})
        assert strong < weak
        assert adaptive.startswith("Accordion (")
        assert labels.show_level(knob, weak, strong) in adaptive


@pytest.mark.parametrize(
    ("compressor", "options", "adaptive", "expected"),
    [
        ("none", {}, {}, "dense"),
        ("powersgd", {"rank": 4}, {}, "PowerSGD rank 4"),
        ("topk", {"density": 0.01}, {}, "TopK 1 %"),
        ("fp16", {}, {}, "fp16"),
        ("efsignsgd", {}, {}, "EF-signSGD"),
        ("a_new_one", {"_target_": "gone.module.Other"}, {}, "a new one"),
        ("powersgd", {}, accordion(weak=4), "Accordion (PowerSGD rank 4/1)"),
        ("topk", {}, accordion(), "Accordion (TopK 99/10 %)"),
        ("unheard", {"_target_": "gone.module.Other", "bits": 4}, {}, "unheard 4 bits"),
        ("unheard", {"_target_": "gone.module.Unheard", "rank": 4}, accordion(), "Accordion (Unheard rank 4)"),
        ("powersgd", {"rank": 4}, calendar(), "schedule (PowerSGD rank 2/1)"),
        ("powersgd", {}, calendar(outside="dense"), "schedule (PowerSGD rank 2/dense)"),
        ("topk", {}, calendar(inside=0.5, outside="dense"), "schedule (TopK 50/100 %)"),
        ("powersgd", {}, calendar(inside="strong"), "schedule (PowerSGD rank 1)"),
        ("powersgd", {}, calendar(ranges=[[0, 2, 4], [2, 3, "strong"], [3, None, 4]]), "schedule (PowerSGD rank 4/1)"),
        ("topk", {}, {"gravac": node("adaptive", "gravac")}, "GraVAC (TopK)"),
        ("powersgd", {}, {"lgreco": node("adaptive", "lgreco")}, "L-GreCo (PowerSGD)"),
        ("powersgd", {}, {"advised": node("adaptive", "advised")}, "Advised (PowerSGD)"),
        ("qsgd", {}, {"adaqs": node("adaptive", "adaqs")}, "AdaQS (QSGD)"),
    ],
)
def test_labels(compressor, options, adaptive, expected):
    known = (conf_dir() / "compressor" / f"{compressor}.yaml").exists()
    options = {**(node("compressor", compressor) if known else {}), **options}
    assert (
        labels.label({"compressor": options, "adaptive": adaptive, "choices": {"compressor": compressor}}) == expected
    )


# ---- grouping and statistics


def test_runs_that_differ_only_in_seed_are_one_arm(tmp_path):
    for seed in (2, 0, 1):
        run_folder(tmp_path, "powersgd", seed=seed, accuracy=0.9 + 0.01 * seed, checkpoint__every=seed)
    run_folder(tmp_path, "powersgd", seed=0, compressor__rank=4)
    three, one = grouped(tmp_path)
    assert (three.label, three.seeds, one.label, one.seeds) == ("PowerSGD rank 2", [0, 1, 2], "PowerSGD rank 4", [0])
    assert three.mean("metric") == pytest.approx(0.91)


def test_runs_from_before_an_option_are_of_the_arm_that_has_its_default(tmp_path):
    run_folder(tmp_path, seed=0)
    run_folder(tmp_path, seed=1, deterministic=False, target_every=1.0)
    run_folder(tmp_path, seed=2, deterministic=True)
    assert [(arm.label, arm.seeds) for arm in grouped(tmp_path)] == [
        ("dense, deterministic=False", [0, 1]),
        ("dense, deterministic=True", [2]),
    ]


def test_looking_for_the_target_within_epochs_makes_no_other_arm(tmp_path):
    for seed, every in enumerate((1.0, 0.25)):
        run_folder(tmp_path, seed=seed, target=0.8, target_every=every)
    assert [(arm.label, arm.seeds) for arm in grouped(tmp_path)] == [("dense", [0, 1])]


def test_a_repeated_seed_counts_once(tmp_path):
    run_folder(tmp_path, accuracy=0.5, started="2026-01-02")
    older = run_folder(tmp_path, accuracy=0.9, started="2026-01-01")
    (arm,), repeats = grouping.group(read.read_runs([tmp_path]))
    assert (arm.n, arm.mean("metric")) == (1, 0.5)
    assert [run.path for run in repeats] == [older]


def test_arms_with_one_label_are_told_apart(tmp_path):
    run_folder(tmp_path, "powersgd", compressor__error_feedback=True)
    run_folder(tmp_path, "powersgd", compressor__error_feedback=False)
    assert {arm.label for arm in grouped(tmp_path)} == {
        "PowerSGD rank 2, error_feedback=True",
        "PowerSGD rank 2, error_feedback=False",
    }


def test_student_interval_by_hand():
    # mean 2, s = 1, t(0.975, 2) = 4.302653: 4.302653 / sqrt(3)
    assert intervals.half_width([1, 2, 3]) == pytest.approx(2.484138, abs=1e-6)
    # s = sqrt(2) / 2, t(0.975, 1) = 12.706205: 12.706205 * 0.5
    assert intervals.half_width([1, 2]) == pytest.approx(6.353102, abs=1e-6)
    assert math.isnan(intervals.half_width([1]))


def test_welch_interval_by_hand():
    # equal n and equal variances: 4 degrees of freedom, t = 2.776445; sqrt(1/3 + 1/3)
    found = intervals.difference([2, 3, 4], [1, 2, 3])
    assert (found.gap, found.half) == (pytest.approx(1), pytest.approx(2.776445 * math.sqrt(2 / 3), abs=1e-6))
    assert (found.how, found.shown) == ("Welch", False)
    assert math.isnan(intervals.difference([1], [2, 3]).half)
    assert intervals.difference([1], [2, 3]).shown is None


def test_paired_interval_by_hand():
    # differences 1, 2, 3: mean 2, s = 1, t(0.975, 2) = 4.302653
    found = intervals.difference([11, 2, 33], [10, 0, 30], ((0, 1, 2), (0, 1, 2)))
    assert (found.gap, found.half) == (pytest.approx(2), pytest.approx(4.302653 / math.sqrt(3), abs=1e-6))
    assert (found.how, found.shown) == ("paired by seed", False)


@pytest.mark.parametrize("seeds", [((0, 1, 2), (0, 1, 3)), ((0, 1, 2), (0, 1)), ((None,) * 2, (None,) * 2), ((), ())])
def test_other_seeds_are_not_paired(seeds):
    a, b = [1, 2, 4][: len(seeds[0]) or 3], [2, 5, 3][: len(seeds[1]) or 3]
    assert intervals.difference(a, b, seeds).how == "Welch"


def test_arms_with_other_optimizers_are_told_by_their_names(tmp_path):
    """Neither by the class nor by the options that follow from it; by the rate where that differs, too."""
    choices = {"model": "resnet8", "dataset": "digits", "compressor": "none", "sync": "every_step"}
    for name, more in (("sgd", {}), ("lion", {}), ("adamw", {}), ("adamw", {"optimizer__lr": 0.5})):
        own = {"optimizer": node("optimizer", name), "choices": {**choices, "optimizer": name}}
        run_folder(tmp_path, "none", **own, **more)
    labels = {arm.label for arm in grouped(tmp_path)}
    assert labels == {
        *("dense, optimizer=sgd", "dense, optimizer=lion"),
        *("dense, optimizer=adamw, lr=0.001", "dense, optimizer=adamw, lr=0.5"),
    }


def test_no_spread_is_no_interval():
    """Three seeds that differ by the same image each: an interval of width 0 would claim too much."""
    for seeds in (((0, 1, 2), (0, 1, 2)), ((), ())):
        found = intervals.difference([0.9, 0.9, 0.9], [0.8, 0.8, 0.8], seeds)
        assert found.constant and math.isnan(found.half) and found.shown is None
    assert intervals.difference([0.9, 0.7], [0.8, 0.6], ((0, 1), (0, 1))).constant  # up to rounding


def test_dense_baseline_is_the_nearest_of_the_same_setting(tmp_path):
    run_folder(tmp_path, "powersgd", optimizer__lr=0.2)
    run_folder(tmp_path, "none", optimizer__lr=0.1)
    run_folder(tmp_path, "none", optimizer__lr=0.2)
    run_folder(tmp_path, "none", optimizer__lr=0.2, epochs=5)
    found = grouped(tmp_path)
    assert arms.baseline(found[-1], found).config["optimizer"]["lr"] == 0.2
    assert len(grouping.settings(found)) == 2


# ---- table and words


def test_ratios_against_the_measured_dense_run(tmp_path):
    run_folder(tmp_path, "none", payload=2000)
    run_folder(tmp_path, "powersgd", payload=100)
    numbers = columns.tidy(grouped(tmp_path)).set_index("arm")
    assert numbers.loc["PowerSGD rank 2", "payload_times_less"] == 20
    assert numbers.loc["PowerSGD rank 2", "wire_times_less"] == 20
    assert numbers.loc["PowerSGD rank 2", "seconds_over_dense"] == 1
    assert "20x less" in tables.markdown(columns.tidy(grouped(tmp_path)))


def test_without_a_dense_run_nothing_is_said_about_accuracy(tmp_path):
    typed = ".venv/bin/python -m accordion_bench compressor=powersgd compressor.rank=2 epochs=4 paths.runs=x seed=0"
    for seed in (0, 1):
        run_folder(tmp_path, "powersgd", payload=100, seed=seed, command=typed)
    found = grouped(tmp_path)
    (sentence,) = verdicts.answers(found)
    assert verdicts.verdicts(found) == []
    assert "nothing is said about accuracy, bytes or time against dense" in sentence
    assert "python -m accordion_bench -m compressor=none adaptive=none epochs=4 seed=0,1" in sentence
    numbers = columns.tidy(found).iloc[0]
    for column in ("payload_times_less", "wire_times_less", "accuracy_minus_dense", "seconds_over_dense"):
        assert math.isnan(numbers[column]), column
    assert "without a dense run there are no ratios" in captions.captions(found)[1]
    text = tables.markdown(columns.tidy(found))
    assert "x less" not in text and "dense" not in text and "x)" not in text


def test_more_than_dense_is_said(tmp_path):
    run_folder(tmp_path, "none")
    run_folder(tmp_path, "topk", payload=2000, wire=1000)
    (sentence,) = verdicts.verdicts(grouped(tmp_path))
    assert sentence.startswith("TopK 10 %: payload 2x MORE than dense, wire 1.5x less;")
    assert "2x MORE" in tables.markdown(columns.tidy(grouped(tmp_path)))


def test_one_seed_says_nothing_about_noise(tmp_path):
    run_folder(tmp_path, "none", accuracy=0.9)
    run_folder(tmp_path, "powersgd", accuracy=0.9 - 2 / 360)
    (sentence,) = verdicts.verdicts(grouped(tmp_path))
    assert "accuracy 0.56 points below dense (2 of 360 test images); one seed: no statement about noise" in sentence
    assert "±" not in tables.markdown(columns.tidy(grouped(tmp_path)))


def test_a_mean_of_almost_a_hundred_test_images_is_written_as_a_number(tmp_path):
    for seed, images in enumerate((99, 100, 100)):
        run_folder(tmp_path, "none", seed=seed, accuracy=0.9)
        run_folder(tmp_path, "powersgd", seed=seed, accuracy=0.9 - images / 360)
    (sentence,) = verdicts.verdicts(grouped(tmp_path))
    assert "27.69 points below dense (100 of 360 test images)" in sentence


@pytest.mark.parametrize(
    ("low", "expected", "cell"),
    [
        (0.899, "no difference shown, the 95 % interval", "no difference shown (-0.10 ± 2.48)"),
        (0.85, "worse by more than noise, the 95 % interval", " -5.00 ± 2.48 |"),
        (0.95, "better by more than noise, the 95 % interval", " +5.00 ± 2.48 |"),
    ],
)
def test_noise_over_seeds(tmp_path, low, expected, cell):
    for seed, wiggle in enumerate((0, 0.01, 0.02)):
        run_folder(tmp_path, "none", seed=seed, accuracy=0.9)
        run_folder(tmp_path, "powersgd", seed=seed, accuracy=low + wiggle - 0.01)
    (sentence,) = verdicts.verdicts(grouped(tmp_path))
    assert expected in sentence
    assert "(paired by seed, n = 3)" in sentence
    assert f"points {'above' if low > 0.9 else 'below'} dense" in sentence
    assert cell in tables.markdown(columns.tidy(grouped(tmp_path)))
    assert f"{100 * low:.2f} ± 2.48 %" in tables.markdown(columns.tidy(grouped(tmp_path)))


def test_communication_time_is_shown_only_where_measured(tmp_path):
    run_folder(tmp_path / "a", "none")
    assert "no communication time was measured" in captions.captions(grouped(tmp_path / "a"))[2]
    run_folder(tmp_path / "b", "none", comm_seconds=0.5)
    assert "no communication time" not in captions.captions(grouped(tmp_path / "b"))[2]
    assert "communication" in tables.markdown(columns.tidy(grouped(tmp_path / "b")))


@pytest.mark.parametrize(("slower", "expected"), [(0.1, "no difference shown"), (20, "7.67x")])
def test_times_within_noise_give_no_ratio(tmp_path, slower, expected):
    for seed, wiggle in enumerate((0, 1, 2)):
        run_folder(tmp_path, "none", seed=seed, seconds=2.0 + wiggle)
        run_folder(tmp_path, "powersgd", seed=seed, seconds=2.0 + wiggle + slower)
    dense, other = tables.markdown(columns.tidy(grouped(tmp_path))).splitlines()[2:]
    assert "1.00x" in dense
    assert expected in other


def test_a_dense_run_with_another_optimizer_is_named(tmp_path):
    run_folder(tmp_path, "none", optimizer__lr=0.1)
    run_folder(tmp_path, "powersgd", optimizer__lr=0.2)
    (sentence,) = verdicts.verdicts(grouped(tmp_path))
    assert "beware, dense differs in more than compression: optimizer.lr 0.2 (0.1)" in sentence


def test_commands_are_shown_without_folders(tmp_path):
    run_folder(tmp_path, command="/some/where/accordion-bench seed=3 paths.runs=/some/where")
    (run,) = read.read_runs([tmp_path])
    assert own_commands([run]) == ["python -m accordion_bench seed=3"]


# ---- figures and the command line


def test_level_map(tmp_path):
    run_folder(tmp_path, "powersgd", adaptive=accordion(weak=4))
    (run,) = read.read_runs([tmp_path])
    assert layers.levels_by_layer(run) == {layer: [1, 2, 1, 2] for layer in LAYERS}
    assert parallel.lr_drops(run.config, run.rows) == [2]
    halving = run_folder(tmp_path / "steady", "powersgd", adaptive=accordion(weak=4), schedule=COSINE)
    for row, share in zip(rows := RunFolder(halving).read_metrics(), (1, 0.85, 0.5, 0.146), strict=True):
        row["lr"] = share  # of half a cosine over four epochs
    (halving / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (steady,) = read.read_runs([tmp_path / "steady"])
    assert parallel.lr_drops(steady.config, steady.rows) == []
    assert "conv.weight" in parallel.dense_layers(run.config, 4)  # 16 x 9: rank 4 would save less than half
    assert "stages.0.0.conv1.weight" not in parallel.dense_layers(run.config, 4)
    assert parallel.dense_layers({"model": {"_target_": "gone.Model"}}, 4) == frozenset()


def test_a_report_end_to_end(tmp_path, capsys):
    for seed in (0, 1):
        run_folder(tmp_path / "runs", "none", seed=seed, accuracy=0.9 + 0.01 * seed, comm_seconds=0.1)
        run_folder(
            tmp_path / "runs",
            "topk",
            seed=seed,
            adaptive=accordion(),
            payload=300,
            comm_seconds=0.1,
            ladder=(0.1, 0.99),
        )
    out = tmp_path / "out"
    out.mkdir()
    (out / "levels-7.png").touch()  # of another report
    assert report_main([str(tmp_path / "runs"), "--out", str(out), "--figures", "png"]) == 0
    assert "Accordion (TopK 99/10 %)" in capsys.readouterr().out
    stems = ("accuracy_bytes", "accuracy_time", "levels", "comparison")
    figures = {f"{stem}.png" for stem in stems}
    written = {path.name for path in out.iterdir()}
    assert {"table.csv", "table.md", "table.tex", "report.html", "README.md"} | figures <= written
    assert "levels-7.png" in written and not any(name.endswith(".pdf") for name in written)
    assert all((out / name).stat().st_size > 5000 for name in figures)
    assert list(pd.read_csv(out / "table.csv")["n"]) == [2, 2]
    readme = (out / "README.md").read_text()
    assert "![comparison](comparison.png)" in readme
    assert "commit: abc" in readme
    assert str(tmp_path) not in readme


@pytest.mark.parametrize(("ladder", "compressor"), [((1,), "powersgd"), ((1, 2, 3), "powersgd"), ((0.99,), "topk")])
def test_level_map_of_any_ladder(tmp_path, ladder, compressor):
    run_folder(tmp_path, compressor, adaptive=accordion(), ladder=ladder)
    (arm,) = grouped(tmp_path)
    figure = figures.level_maps([arm])
    texts = {text.get_text() for text in figure.axes[0].get_legend().get_texts()}
    knob = "density" if compressor == "topk" else "rank"
    assert any(text.startswith(labels.show_level(knob, ladder[0])) for text in texts)
    figures.save(figure, tmp_path / "map")


def test_two_settings_are_two_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "OF_A_SETTING", ("comparison",))
    run_folder(tmp_path, "none")
    run_folder(tmp_path, "none", epochs=5)
    text = write.write(read.read_runs([tmp_path]), tmp_path / "out").text
    assert text.count("## resnet8 on digits") == 2
    assert [file.name for file in sorted((tmp_path / "out").glob("comparison*.png"))] == [
        "comparison-resnet8-on-digits-4x32-4-epochs.png",
        "comparison-resnet8-on-digits-4x32-5-epochs.png",
    ]


def test_files_of_settings_have_short_names_of_their_own():
    one = "vgg19 (width=8) on cifar10, 4 workers x 32 samples, 12 epochs, 20,000 training samples, "
    one += "2,000 of the training samples held out"
    names = [
        figures._short(one),
        figures._short(one.replace("32 samples", "256 samples")),
        figures._short(f"{one}, and {'x' * 99}"),
    ]
    assert figures._short("vgg19 on cifar10, 4 workers x 32 samples, 12 epochs") == "vgg19-on-cifar10-4x32-12-epochs"
    assert len(set(names)) == 3 and max(map(len, names)) <= figures.LONGEST
    assert figures._short(one).startswith("vgg19-width-8-on-cifar10-4x32-12-epochs-20000-training")


def test_runs_are_found_at_any_depth_and_nothing_is_looked_for_inside_them(tmp_path):
    deep = run_folder(tmp_path / "papers" / "accordion", "none")
    near = run_folder(tmp_path, "topk")
    run_folder(near / "checkpoint", "none")
    run_folder(tmp_path / ".hidden", "none")
    (tmp_path / "empty").mkdir()
    assert read.find_runs([tmp_path]) == [deep, near]
    assert read.no_runs([tmp_path]) == [("empty", f"no run: has none of {', '.join(read.FILES)}")]


def test_runs_that_have_learned_nothing_are_told(tmp_path):
    (folder,) = [run_folder(tmp_path, "none")]
    (arm,) = grouped(tmp_path)
    assert captions.not_learned([arm]) == []
    file = folder / "summary.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "not_learned": "the accuracy is that of a guess"}))
    (arm,) = grouped(tmp_path)
    assert captions.not_learned([arm]) == ["dense: in 1 of 1 run the accuracy is that of a guess."]


def test_of_an_arm_whose_levels_change_what_went_dense_in_most_steps_is_told(tmp_path):
    for seed, notes in enumerate([{"half travels dense": 5, "all travels dense": 9}, {"all travels dense": 8}]):
        path = run_folder(tmp_path / str(seed), seed=seed)
        file = path / "summary.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "went_dense": notes}))
    (arm,) = grouped(tmp_path)
    assert captions.went_dense([arm]) == ["dense (17 of its steps; 5 with other tensors): all travels dense."]


def test_no_run_is_refused_with_what_to_type(tmp_path, capsys):
    assert report_main([str(tmp_path / "nothing")]) == 2
    assert "type python -m accordion_bench.report results/runs/*" in capsys.readouterr().err


def test_many_arms_are_rows_instead_of_curves(tmp_path, monkeypatch):
    """Eleven curves hide each other: one row each, fewest bytes at the top, dense black."""
    monkeypatch.setattr(figures, "OF_A_SETTING", ("comparison",))
    names = sorted(file.stem for file in (conf_dir() / "compressor").glob("*.yaml"))[: figures.MANY + 1]
    for i, name in enumerate(["none", *(name for name in names if name != "none")]):
        for seed in (0, 1):
            run_folder(tmp_path / "runs", name, seed=seed, payload=1000 - i, accuracy=0.9 + seed / 100)
    write.write(read.read_runs([tmp_path / "runs"]), tmp_path / "out")
    assert (tmp_path / "out" / "comparison.png").exists()
    figure = figures.forest(grouped(tmp_path / "runs"))
    rows = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert len(rows) > figures.MANY and rows[-1].startswith("dense") and rows[-1].endswith("kB")
