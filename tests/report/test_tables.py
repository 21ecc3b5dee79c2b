"""The report's tables: any metric, several batch sizes, scales, paper's counts, and LaTeX."""

import json
import math
import random
import re
import shutil
import subprocess
from dataclasses import replace

import pandas as pd
import pytest
import yaml

from accordion_bench.report import Print, read
from accordion_bench.report.__main__ import main as report_main
from accordion_bench.report.compare import arms, columns, grouping, intervals, verdicts
from accordion_bench.report.compare.arms import dense_command
from accordion_bench.report.render import captions, figures, tables, write
from accordion_bench.report.render.figures import DrawnFigures
from accordion_bench.report.render.tables import page_columns
from accordion_bench.runs.metrics import metric
from tests.report.test_report import accordion, grouped, no_figures, node, run_folder  # noqa: F401


def edited(path, name, **values):
    """The same run with other values in one of its files; None as a value takes the key away."""
    file = path / name
    parse, dump = (json.loads, json.dumps) if name.endswith(".json") else (yaml.safe_load, yaml.safe_dump)
    content = parse(file.read_text())
    for key, value in values.items():
        content[key] = value
    file.write_text(dump({key: value for key, value in content.items() if value is not None}))
    return path


def perplexed(root, value, **options):
    """A run that is judged by perplexity."""
    path = run_folder(root, **options)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["perplexity"] = value + 4 * (len(rows) - 1 - row["epoch"])
        del row["accuracy"]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return edited(path, "summary.json", metric_name="perplexity", metric=value, best_metric=value)


def preset(root, compressor="none", arm="", experiment="accordion/table5_resnet18", **options):
    """A run of a preset's arm."""
    path = run_folder(root, compressor, **options)
    choices = yaml.safe_load((path / "config.yaml").read_text())["choices"]
    return edited(path, "config.yaml", choices={**choices, "arm": arm, "experiment": experiment})


def counted(path, floats):
    """The same run with the paper's count."""
    return edited(path, "summary.json", paper_floats=floats)


# ---- statistics


def test_intervals_are_those_of_scipy():
    from scipy import stats

    draw = random.Random(1)
    for n, m in ((2, 2), (3, 5), (7, 4)):
        a, b = [draw.gauss(3, 1) for _ in range(n)], [draw.gauss(1, 4) for _ in range(m)]
        low, high = stats.ttest_ind(a, b, equal_var=False).confidence_interval()
        found = intervals.difference(a, b)
        assert (found.gap - found.half, found.gap + found.half) == (pytest.approx(low), pytest.approx(high))
        shown = bool(stats.ttest_ind(a, b, equal_var=False).pvalue < 0.05)
        assert found.shown is shown
        pairs = (tuple(range(n)),) * 2
        c = [draw.gauss(2, 1) for _ in range(n)]
        low, high = stats.ttest_rel(a, c).confidence_interval()
        paired = intervals.difference(a, c, pairs)
        assert (paired.gap - paired.half, paired.gap + paired.half) == (pytest.approx(low), pytest.approx(high))


def test_pairs_take_out_what_seeds_share(tmp_path):
    """A seed that is hard for both arms widens Welch's interval, not that of the pairs."""
    for seed, shared in enumerate((0, 0.1, 0.2)):
        run_folder(tmp_path, seed=seed, accuracy=0.7 + shared)
        run_folder(tmp_path, "powersgd", seed=seed, accuracy=0.69 + shared + 0.001 * seed)
        run_folder(tmp_path, "topk", seed=seed + 1, accuracy=0.69 + shared + 0.001 * seed)
    rows = columns.tidy(grouped(tmp_path)).set_index("arm")
    assert rows.loc["PowerSGD rank 2", ["interval", "difference_shown"]].tolist() == ["paired by seed", "yes"]
    assert rows.loc["TopK 10 %", ["interval", "difference_shown"]].tolist() == ["Welch", "no"]
    paired, welch = verdicts.verdicts(grouped(tmp_path))
    assert "paired by seed, n = 3" in paired and "Welch, n = 3" in welch


def test_the_same_difference_at_every_seed_has_no_interval(tmp_path):
    for seed in (0, 1):
        run_folder(tmp_path, seed=seed, accuracy=0.9)
        run_folder(tmp_path, "topk", seed=seed, accuracy=0.8)
        run_folder(tmp_path, "powersgd", seed=seed, accuracy=0.9)
    equal, lower = verdicts.verdicts(grouped(tmp_path))
    assert "the same at every seed: no interval" in lower
    assert "accuracy equal to dense; no difference shown, the same at every seed" in equal
    text = tables.markdown(columns.tidy(grouped(tmp_path)))
    assert " -10.00 |" in text and "no difference shown (+0.00)" in text


def test_a_dense_arm_with_one_seed_says_nothing_about_noise(tmp_path):
    run_folder(tmp_path, seed=0)
    for seed in (0, 1):
        run_folder(tmp_path, "topk", seed=seed, accuracy=0.8 + seed / 100)
    (sentence,) = verdicts.verdicts(grouped(tmp_path))
    assert "dense has one seed: no statement about noise" in sentence


# ---- perplexity


def test_lower_perplexity_is_better(tmp_path):
    for seed in range(3):
        perplexed(tmp_path, 97 + seed / 10, seed=seed)
        perplexed(tmp_path, 105 + seed / 20, seed=seed, compressor="topk")
        perplexed(tmp_path, 90 + seed / 20, seed=seed, compressor="powersgd")
    better, worse = verdicts.verdicts(grouped(tmp_path))
    assert "perplexity 7.95 above dense; worse by more than noise" in worse
    assert "perplexity 7.05 below dense; better by more than noise" in better
    assert "images" not in worse and "%" not in worse.replace("95 %", "").replace("TopK 10 %", "")
    numbers_ = columns.tidy(grouped(tmp_path))
    assert numbers_["perplexity"].tolist() == pytest.approx([97.1, 90.05, 105.05])
    assert set(numbers_["metric"]) == {"perplexity"} and "accuracy" not in numbers_
    text = tables.markdown(numbers_)
    assert "perplexity, final" in text and "97.1 ± 0.25" in text
    assert "points" not in text + better + worse
    evaluated = captions.captions(grouped(tmp_path))[0]
    assert evaluated.startswith("Perplexity: after the last epoch") and "Lower is better." in evaluated


def test_settings_of_two_metrics_are_one_csv(tmp_path, no_figures):  # noqa: F811
    perplexed(tmp_path / "runs", 97, epochs=5)
    run_folder(tmp_path / "runs")
    write.write(read.read_runs([tmp_path / "runs"]), tmp_path / "out")
    found = pd.read_csv(tmp_path / "out" / "table.csv")
    assert len(found) == 2
    assert set(found["metric"]) == {"accuracy", "perplexity"}
    assert found["perplexity"].notna().sum() == found["accuracy"].notna().sum() == 1


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_run_that_has_diverged_is_in_no_mean(tmp_path, value):
    path = perplexed(tmp_path, 97)
    edited(path, "summary.json", metric=value)
    (run,) = read.read_runs([tmp_path])
    assert run.problem == f"the last perplexity is {value}"


# ---- arms and settings


def test_scales_are_never_compared(tmp_path):
    run_folder(tmp_path)  # of an older version: no scale
    run_folder(tmp_path, "powersgd", scale="full")
    run_folder(tmp_path, "topk", scale="tiny")
    full, tiny = grouping.settings(grouped(tmp_path))
    assert [arm.label for arm in full] == ["dense", "PowerSGD rank 2"]
    assert "scale" not in captions.heading(full[0])
    assert captions.heading(tiny[0]).endswith("(scale=tiny: not the full experiment)")
    assert any("Scale tiny" in line for line in captions.captions(tiny))
    assert arms.baseline(tiny[0], [*full, *tiny]) is None
    assert "scale=tiny" in write.section(tiny) and r"scale=tiny" in write.tex(tiny, 1)


def test_what_changes_no_result_splits_no_arm(tmp_path):
    preset(tmp_path, "powersgd", arm="powersgd_rank2", seed=0, measure={"norms": True, "error": False})
    run_folder(tmp_path, "powersgd", seed=1, clip_norm=None, scale="full", resume_sweep=False, target=0.9)
    (arm,) = grouped(tmp_path)
    assert arm.n == 2


def test_whole_numbers_with_and_without_a_point_are_one_arm(tmp_path):
    run_folder(tmp_path, optimizer__lr=1, compressor__betas=[0, 1])
    run_folder(tmp_path, seed=1, optimizer__lr=1.0, compressor__betas=[0.0, 1.0])
    (arm,) = grouped(tmp_path)
    assert arm.n == 2 and arm.label == "dense"


def test_arms_with_one_label_have_their_names_in_the_experiment(tmp_path):
    preset(tmp_path, "powersgd", arm="b", compressor__error_feedback=True)
    preset(tmp_path, "powersgd", arm="c", compressor__error_feedback=False)
    assert [arm.label for arm in grouped(tmp_path)] == ["PowerSGD rank 2, b", "PowerSGD rank 2, c"]


def test_an_arm_named_as_its_label_keeps_it(tmp_path):
    preset(tmp_path, arm="dense")
    preset(tmp_path, arm="dense_muon", optimizer__lr=0.3)
    assert [arm.label for arm in grouped(tmp_path)] == ["dense", "dense, dense_muon"]


def large(root, **options):
    return preset(root, **{"arm": "large", "batch_size": 256, "payload": 100, "wire": 150, **options})


def test_batch_sizes_are_compared_inside_an_experiment(tmp_path):
    for seed in range(3):
        preset(tmp_path, arm="dense", seed=seed, accuracy=0.9 + seed / 1000)
        large(tmp_path, seed=seed, accuracy=0.8 + seed / 500)
        policy = {"accordion_batch": node("adaptive", "accordion_batch")}
        preset(tmp_path, arm="accordion", seed=seed, adaptive=policy, payload=180, accuracy=0.9 + seed / 700)
    found = grouped(tmp_path)
    assert len(grouping.settings(found)) == 1
    dense = found[0]
    assert [arm.label for arm in found] == [
        "dense, batch 128",
        "dense, batch 1024",
        "AccordionBatch (dense), batch 128 at first",
    ]
    assert captions.heading(dense) == "resnet8 on digits, 4 workers x 32 or 256 samples, 4 epochs"
    assert all(arms.baseline(arm, found) is dense for arm in found)
    rows = columns.tidy(found).set_index("arm")
    assert rows.loc["dense, batch 1024", "payload_times_less"] == 10
    first, second = verdicts.verdicts(found)
    assert first.startswith("dense, batch 1024: payload 10x less than dense, batch 128; accuracy")
    assert "beware, batch 1024 against 128: other steps in the same epochs" in first
    assert second.startswith("AccordionBatch (dense), batch 128 at first:") and "beware" not in second
    assert "against the measured run of dense, batch 128" in captions.sent(found)
    assert columns.paper_reference(rows.reset_index()) == "dense, batch 128"


def one_worker(root, compressor="none", **options):
    """A control: its link sends nothing."""
    return edited(preset(root, compressor, wire=0, workers=1, **options), "summary.json", workers=1, paper_floats=1e12)


def method(root, **options):
    return counted(preset(root, "topk", arm="topk", **options), 1e10)


def test_a_control_of_one_worker_stands_beside_its_method(tmp_path, no_figures):  # noqa: F811
    """With the batch of all workers, or with fewer epochs; it is nobody's baseline, and sets no batch size."""
    same_method = {"compressor": "topk", "arm": "topk_one_worker", "batch_size": 128, "micro_batch_size": 32}
    one_worker(tmp_path / "runs", **same_method)
    one_worker(tmp_path / "runs", arm="one_worker", epochs=2)
    counted(preset(tmp_path / "runs", arm="dense"), 3e11)
    method(tmp_path / "runs")
    counted(preset(tmp_path / "runs", "powersgd", arm="powersgd"), 2e11)
    (setting,) = grouping.settings(grouped(tmp_path / "runs"))
    names = [arm.label for arm in setting]
    assert names == ["dense", "dense, 1 worker", "PowerSGD rank 2", "TopK 10 %", "TopK 10 %, 1 worker"]
    assert [arm.control for arm in setting] == [False, True, False, False, True]
    assert captions.heading(setting[0]) == "resnet8 on digits, 4 workers x 32 samples, 4 epochs"
    assert all(arms.baseline(arm, setting) is setting[0] for arm in setting)
    rows = columns.tidy(setting)
    assert columns.paper_reference(rows) == "PowerSGD rank 2"
    few, _, _, same = verdicts.verdicts(setting)
    assert few.endswith(
        "beware, batch 32 against 128; beware, dense differs in more than compression: epochs 2 (4), workers 1 (4)."
    )
    assert "differs in more than compression: micro_batch_size 32 (None), workers 1 (4)." in same
    assert "beware, batch" not in same and "wire nothing sent" in same
    text = write.write(read.read_runs([tmp_path / "runs"]), tmp_path / "out").text
    assert text.count("## ") == 1


def test_other_runs_of_one_worker_do_not(tmp_path):
    """Of a sweep over numbers of workers, of another experiment, by hand, or where it is not clear whose control."""
    one_worker(tmp_path, arm="topk", compressor="topk")
    one_worker(tmp_path, arm="control", experiment="another")
    edited(run_folder(tmp_path, "qsgd", workers=1), "summary.json", workers=1)
    method(tmp_path)
    assert [len(setting) for setting in grouping.settings(grouped(tmp_path))] == [3, 1]
    one_worker(tmp_path, "randomk", arm="randomk_one_worker")
    assert [len(setting) for setting in grouping.settings(grouped(tmp_path))] == [3, 2]
    method(tmp_path, epochs=8)
    assert [len(setting) for setting in grouping.settings(grouped(tmp_path))] == [4, 1, 1]


def test_batch_sizes_of_different_experiments_are_not(tmp_path):
    preset(tmp_path, arm="dense")
    large(tmp_path, experiment="another")
    run_folder(tmp_path, batch_size=64)
    found = grouped(tmp_path)
    assert len(grouping.settings(found)) == 3
    assert [arm.label for arm in found] == ["dense"] * 3


def test_runs_by_hand_join_an_experiment_of_their_batch(tmp_path):
    run_folder(tmp_path)
    preset(tmp_path, "powersgd", arm="small")
    large(tmp_path)
    assert len(grouping.settings(grouped(tmp_path))) == 1


def test_each_batch_size_has_its_own_dense_run(tmp_path):
    """With dense at both batches a compressed arm is compared at its own."""
    preset(tmp_path, arm="dense")
    large(tmp_path)
    preset(tmp_path, "powersgd", arm="powersgd", batch_size=256)
    found = grouped(tmp_path)
    assert arms.baseline(found[2], found) is found[1]
    assert "batch 1024 against" not in verdicts.verdicts(found)[1]


def test_the_dense_command_of_a_preset(tmp_path):
    typed = "python -m accordion_bench -m +experiment=accordion/table1_resnet18 +arm=powersgd_weak scale=tiny seed=0"
    preset(tmp_path, "powersgd", arm="powersgd_rank2", command=typed)
    (arm,) = grouped(tmp_path)
    expected = "python -m accordion_bench -m +experiment=accordion/table1_resnet18 scale=tiny +arm=dense seed=0"
    assert dense_command(arm) == expected


# ---- the paper's count


def test_the_papers_count_is_shown_where_all_arms_have_it(tmp_path):
    counted(run_folder(tmp_path), 328_500_000_000)
    counted(run_folder(tmp_path, "powersgd", compressor__rank=2), 2_418_400_000)
    counted(run_folder(tmp_path, "powersgd", compressor__rank=1), 1_350_400_000)
    counted(run_folder(tmp_path, "fp16"), 328_500_000_000)
    last = run_folder(tmp_path, "powersgd", adaptive=accordion())
    assert "paper's count" not in tables.markdown(columns.tidy(grouped(tmp_path)))
    counted(last, 1_571_800_000)
    lines = tables.markdown(columns.tidy(grouped(tmp_path))).splitlines()
    assert "paper's count (vs PowerSGD rank 2)" in lines[0]
    counts = [line.split("|")[-2].strip() for line in lines[2:]]
    assert counts == [
        "328.5 B (136x MORE)",
        "328.5 B",
        "2418.4 M",
        "1350.4 M (1.79x less)",
        "1571.8 M (1.54x less)",
    ]
    assert any("Paper's count" in line and "PowerSGD rank 2" in line for line in captions.captions(grouped(tmp_path)))


def test_the_papers_ratio_never_stands_alone(tmp_path):
    """Without dense there is no ratio to the weakest compressed arm, either."""
    counted(run_folder(tmp_path, "powersgd", compressor__rank=2), 2_000_000)
    counted(run_folder(tmp_path, "powersgd", compressor__rank=1), 1_000_000)
    text = tables.markdown(columns.tidy(grouped(tmp_path)))
    assert "paper's count |" in text and "2 M |" in text and "x less" not in text


# ---- what is skipped


def test_folders_without_a_run_are_named(tmp_path, capsys, no_figures):  # noqa: F811
    run_folder(tmp_path / "runs")
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / ".hidden").mkdir()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "file").touch()
    given = [str(tmp_path / name) for name in ("runs", "nothing", "gone", "file")]
    assert report_main([*given, "--out", str(tmp_path / "out")]) == 0
    said, warned = capsys.readouterr()
    skipped = said.partition("Skipped: no run in it:")[2]
    names = ["empty: no run: has none of", "nothing: holds no run", "gone: does not exist", "file: neither a folder"]
    assert all(name in skipped and name in warned for name in names)
    assert ".hidden" not in said + warned
    assert str(tmp_path) not in (tmp_path / "out" / "README.md").read_text()


def test_cells_of_a_sweep_without_a_run_are_named(tmp_path, no_figures):  # noqa: F811
    runs = tmp_path / "runs"
    here = run_folder(runs)
    lines = [
        {"overrides": ["seed=0"], "status": "done", "folder": str(here)},
        {"overrides": ["seed=1"], "status": "done", "folder": "/elsewhere/deleted"},
        {"overrides": ["seed=2", "+experiment=a/b", "paths.runs=/x"], "status": "refused", "error": "seed is odd"},
        {"overrides": ["seed=3"], "status": "interrupted", "folder": None, "error": ""},
        {"overrides": ["seed=3"], "status": "done", "folder": str(here)},
        {"overrides": ["seed=4"], "status": "failed", "folder": None, "error": 1},
        {"strange": 1},
    ]
    (runs / "sweep.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"torn')
    expected = [
        "deleted: done in sweep.jsonl, but no longer here",
        "seed=2 +experiment=a/b: refused in sweep.jsonl: seed is odd",
        "seed=4: failed in sweep.jsonl",
    ]
    for given in ([runs], [here, runs / "sweep.jsonl"]):
        assert write.skipped(read.no_runs(given)) == expected


STRANGE = (None, "x", -1, [1], {"a": 1}, True)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "every"])
@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "environment.json"])
def test_no_strange_value_ends_the_report(tmp_path, name, every, no_figures):  # noqa: F811
    """Whatever stands in a file: the run is read, or named with its problem; the others are reported."""
    dense = read.read_run(run_folder(tmp_path, seed=0))
    path = run_folder(tmp_path, "powersgd", seed=0, adaptive=accordion())
    parse, dump = (json.loads, json.dumps) if name.endswith(".json") else (yaml.safe_load, yaml.safe_dump)
    good = parse((path / name).read_text())
    for number, key in enumerate(good):
        some = [STRANGE[number // 3 % len(STRANGE)]] if number % 3 == 0 else []
        for value in STRANGE if every else some:
            (path / name).write_text(dump({**good, key: value}))
            run = read.read_run(path)
            if run.problem:  # then only this line looks at it
                assert path.name in write.unfinished(run), (key, value)
            else:
                text = write.write([dense, run], tmp_path / "out").text
                assert "| dense " in text, (key, value)
                assert path.name in (tmp_path / "out" / "report.html").read_text(), (key, value)


@pytest.mark.parametrize("column", ["accuracy", "lr", "wire_bytes", "comm_seconds", "plan", "epoch"])
def test_no_strange_row_ends_the_report(tmp_path, column):
    """Figures read rows: a run with one that they cannot read is in none."""
    path = run_folder(tmp_path, "powersgd", adaptive=accordion())
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for value in ("x", [1]):
        rows[1][column] = value
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run,) = read.read_runs([tmp_path])
        assert run.problem, value
        assert write.unfinished(run)


# ---- LaTeX

HOSTILE = r"a_b & 50 % of $x^2$ #1 {c} \d ~ < > | [e] ±1 – µ … ↓ é "


def test_latex_escapes():
    text = tables.escaped(HOSTILE)
    bare = re.sub(r"\\[&%$#_{}]|\\[a-z]+\{\}|\$\\?[a-z-]+\$|\{\[\}|\{\]\}", "", text)
    assert not set(bare) & set("\\&%$#_{}~^<>|[]")
    assert bare.isascii() and bare.count("?") == 2
    assert tables.escaped("9.19x less, 4 workers x 32, box, -0.28, 2-fold") == (
        r"9.19$\times$ less, 4 workers $\times$ 32, box, $-$0.28, 2-fold"
    )


def test_latex_tables_have_equal_columns(tmp_path):
    run_folder(tmp_path, "none")
    run_folder(tmp_path, "topk")
    run_folder(tmp_path, "powersgd", adaptive=accordion())
    text = write.tex(grouped(tmp_path), 1)
    (page_columns,) = re.findall(r"\\begin\{tabular\}\{(\w+)\}", text)
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert [len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows] == [len(page_columns)] * 7
    assert text.count(r"\begin") == text.count(r"\end") == 2
    assert all(text.count(rf"\{side}{{{name}}}") == 1 for side in ("begin", "end") for name in ("table", "tabular"))
    assert all(text.count(rf"\{rule}") == 1 for rule in ("toprule", "midrule", "bottomrule", "caption", "label"))
    assert r"TopK 10 \%" in text and text.count("{") == text.count("}")


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="no pdflatex")
def test_latex_compiles(tmp_path):
    run_folder(tmp_path / "runs", "none")
    run_folder(tmp_path / "runs", "topk")
    hostile = tables.latex([[HOSTILE, "[x]"], ["[1]", HOSTILE]], HOSTILE, "hostile")
    body = "\n".join([write.tex(grouped(tmp_path / "runs"), 1), hostile])
    document = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{body}\end{{document}}"
    (tmp_path / "a.tex").write_text(document)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "a.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


# ---- the command line


def test_formats(tmp_path, no_figures):  # noqa: F811
    run_folder(tmp_path / "runs")
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("mine")
    (out / "table.csv").touch()
    assert report_main([str(tmp_path / "runs"), "--out", str(out), "--formats", "latex,html"]) == 0
    assert {path.name for path in out.iterdir()} == {"table.tex", "report.html", "README.md", "table.csv"}
    assert (out / "README.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--formats", "md,pdf", "--formats must be one of md, csv, latex, html, got pdf; type --formats="),
        ("--figures", "png,gif", "--figures must be one of png, pdf, svg, got gif; type --figures="),
        ("--paper", "a4", "--paper must be one of one-column, two-column, got a4; type --paper="),
        ("--bandwidths", "1e9,fast", "--bandwidths must be a number above 0, got fast; type --bandwidths=1000000000.0"),
        (
            "--out",
            "/dev/null/x",
            "--out must be a folder that can be written, got /dev/null/x: Not a directory; type --out=",
        ),
        ("--out", "/dev/null", "--out must be a folder that can be written, got /dev/null: File exists; type --out="),
        ("--out", "/proc", "--out must be a folder that can be written, got /proc: "),
        ("--bandwidths", "0", "--bandwidths must be a number above 0, got 0.0; type --bandwidths=1000000000.0"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, capsys, option, value, told):
    run_folder(tmp_path)
    assert report_main([str(tmp_path), option, value]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(told)


def test_options_reach_the_figures(tmp_path, monkeypatch):
    """Every figure is a file where formats are typed, or there is no page; else those that the page does not draw."""
    seen = []
    monkeypatch.setattr(
        figures,
        "draw",
        lambda parts, out, names, printed: seen.append((names, printed)) or [DrawnFigures([], [])],
    )
    run_folder(tmp_path / "runs")
    typed = [str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--bandwidths", "1mbit,2e9"]
    for more in (
        [],
        ["--figures", "png"],
        ["--figures", "svg,pdf"],
        ["--pdf", "--paper", "one-column"],
        ["--formats", "md"],
    ):
        assert report_main([*typed, *more]) == 0
    monkeypatch.setattr(write, "missing", lambda: "no plotly")
    assert report_main(typed) == 0
    every = list(figures.OF_A_SETTING)
    few = [name for name in every if name == "comparison" or name not in figures.INTERACTIVE]
    on_links = [name for name in every if name in few or name == "accuracy_modelled"]
    assert [names for names, _ in seen] == [on_links, every, every, every, every, every]
    asked = [Print(), Print(), Print(formats=("svg", "pdf")), Print("one-column", ("png", "pdf")), Print(), Print()]
    assert [printed for _, printed in seen] == [replace(one, bandwidths=(1e6, 2e9)) for one in asked]
    assert "norms" in few and "tradeoff" not in few
    assert write.names_of(False) == few


def test_signs_and_sizes():
    accuracy, perplexity = metric("accuracy"), metric("perplexity")
    assert (intervals.signed(accuracy, -0.0028), intervals.size(accuracy, -0.0028)) == ("-0.28", "0.28")
    assert (intervals.signed(perplexity, 1.26), intervals.size(perplexity, -12.34)) == ("+1.26", "12.3")
    assert verdicts.NOT_SHOWN == "no difference shown"


@pytest.mark.parametrize(
    ("times", "told"),
    [
        (1.002, "the same to within 0.5 %"),
        (0.998, "the same to within 0.5 %"),
        (1.0, "the same"),
        (1.006, "1.01x less"),
        (1024, "1,024x less"),
        (1 / 999.7, "1,000x MORE"),
    ],
)
def test_times_less_is_never_1_nor_a_power(times, told):
    assert intervals.show_times(times) == told


def test_a_gap_below_what_is_written():
    accuracy, perplexity = metric("accuracy"), metric("perplexity")
    assert intervals.show_gap(accuracy, intervals.Difference(-1e-5, 1e-5, "Welch")) == "less than 0.01 points"
    assert intervals.show_gap(accuracy, intervals.Difference(-1e-5, 2e-3, "Welch")) == "-0.00 ± 0.20 points"
    assert intervals.size(accuracy, -1e-5) == "less than 0.01" and intervals.size(accuracy, 0) == "0.00"
    assert intervals.show_value(perplexity, 4321, 1234) == "4321 ± 1,234"
    assert intervals.signed(perplexity, -1234) == "-1,234"


def test_a_dense_arm_that_sends_nothing_has_no_ratio(tmp_path):
    run_folder(tmp_path, payload=0)
    run_folder(tmp_path, "powersgd", payload=100)
    found = grouped(tmp_path)
    assert math.isnan(columns.tidy(found)["payload_times_less"][1])
    assert ": payload 100 B, where dense sends nothing;" in verdicts.verdicts(found)[0]


def test_with_two_dense_arms_a_difference_says_against_which(tmp_path):
    for lr, accuracy in ((0.1, 0.8), (0.3, 0.9)):
        run_folder(tmp_path, accuracy=accuracy, optimizer__lr=lr)
        run_folder(tmp_path, "powersgd", accuracy=accuracy - 0.01, optimizer__lr=lr)
    found = grouped(tmp_path)
    rows = tables.cells(columns.tidy(found))
    column = rows[0].index("minus dense, points")
    assert [row[column] for row in rows[1:]] == ["–", "–", "-1.00 vs dense, lr=0.1", "-1.00 vs dense, lr=0.3"]
    assert "accuracy 1.00 points below dense, lr=0.3" in verdicts.verdicts(found)[1]


def test_a_time_with_communication_beside_one_without_has_neither_ratio_nor_noise(tmp_path):
    for seed in (0, 1):
        run_folder(tmp_path, seed=seed, seconds=2 + seed)
        run_folder(tmp_path, "powersgd", seed=seed, seconds=2 + seed, comm_seconds=0.5)
    row = columns.tidy(grouped(tmp_path)).iloc[1]
    assert math.isnan(row["seconds_over_dense"]) and not row["seconds_within_noise"]


def test_the_best_value_is_that_of_the_test_split_where_it_is_known(tmp_path):
    path = edited(run_folder(tmp_path), "summary.json", best_metric=0.97, selected_by="validation_accuracy")
    found = grouped(tmp_path)
    heading, row = tables.cells(columns.tidy(found))
    assert row[heading.index("best, validation")] == "97.00 %"
    assert "; best, validation: of all epochs" in captions.evaluated(found)
    edited(path, "summary.json", test_at_best=0.88)
    found = grouped(tmp_path)
    heading, row = tables.cells(columns.tidy(found))
    assert row[heading.index("best")] == "88.00 %"
    shown = next(column for column in page_columns(columns.tidy(found)) if column.name == "accuracy, best")
    assert shown.key == "test_accuracy_at_best" and shown.cells[0].text == "88.00"
    assert "; best: the test split in the epoch that was best by the validation split" in captions.evaluated(found)
