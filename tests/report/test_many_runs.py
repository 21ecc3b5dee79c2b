"""Very many runs, and runs that do not go together: a line for each thing there is to say, never one for each run."""

from dataclasses import replace

from accordion_bench.report import read
from accordion_bench.report.__main__ import main as report_main
from accordion_bench.report.compare import grouping, intervals
from accordion_bench.report.compare.arms import own_commands
from accordion_bench.report.compare.columns import tidy
from accordion_bench.report.compare.intervals import listed, show_seeds
from accordion_bench.report.render import captions, write
from accordion_bench.runs.folder import RunFolder
from tests.report.test_report import grouped, no_figures, run_folder  # noqa: F401
from tests.report.test_tables import edited

SEEDS = 1000


def copies(run, seeds):
    """The same run with other seeds, typed as one would."""
    command = "python -m accordion_bench compressor=powersgd seed={} epochs=4"
    return [
        replace(
            run,
            config={**run.config, "seed": seed},
            environment={**run.environment, "command": command.format(seed)},
            summary={**run.summary, "metric": 0.8 + seed % 7 / 1000},
        )
        for seed in range(seeds)
    ]


def test_thousands_of_seeds_of_one_arm_are_a_page(tmp_path):
    (run,) = read.read_runs([run_folder(tmp_path, "powersgd")])
    arms, repeats = grouping.group(copies(run, SEEDS))
    (part,) = grouping.settings(arms)
    said, latex = write.texts([part])
    text = "\n".join([*said, *latex, write.provenance(part[0].runs)])
    assert part[0].n == SEEDS and not repeats
    assert "seeds: 0 to 999" in text and len(text.splitlines()) < 80
    assert tidy(part)["seeds"].iloc[0].split() == list(map(str, range(SEEDS)))


def test_the_command_of_seeds_says_each(tmp_path):
    (run,) = read.read_runs([run_folder(tmp_path, "powersgd")])
    assert own_commands(copies(run, 3)) == ["python -m accordion_bench -m compressor=powersgd epochs=4 seed=0,1,2"]
    assert own_commands(copies(run, 1)) == ["python -m accordion_bench compressor=powersgd seed=0 epochs=4"]
    without = replace(run, environment={**run.environment, "command": "python -m accordion_bench compressor=powersgd"})
    assert len(own_commands([without, *copies(run, 2)])) == 2
    sweep = "python -m accordion_bench -m compressor=powersgd epochs=4 seed=0,1"
    swept = replace(run, environment={**run.environment, "command": sweep})
    assert own_commands([swept, swept]) == [sweep]


def test_thousands_that_are_in_no_mean_are_twenty_lines(tmp_path):
    (run,) = read.read_runs([run_folder(tmp_path)])
    left = write.left_out([replace(run, problem="killed")] * SEEDS, [run] * 22, [("a", "empty")] * 21)
    many, repeated, skipped = write.notes(left)
    assert len(many.splitlines()) == 2 + intervals.LINES + 1 and many.endswith("- ... and 980 more")
    assert repeated.endswith("- ... and 2 more") and "more" not in skipped.splitlines()[-1]
    assert [len(lines) for lines in left.values()] == [SEEDS, 22, 21]


def test_thousands_of_empty_folders_are_twenty_warnings(tmp_path, capsys, no_figures):  # noqa: F811
    run_folder(tmp_path / "runs")
    for number in range(60):
        (tmp_path / "runs" / f"empty{number:02}").mkdir()
    assert report_main([str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--formats", "md"]) == 0
    out, err = capsys.readouterr()
    assert err.count("warning: ") == intervals.LINES + 1 and "warning: ... and 40 more" in err
    assert "- ... and 40 more" in out


def test_names_in_a_row_are_counted_from_the_eleventh_on():
    assert listed(["a"]) == "a" and listed(["a", "b"]) == "a and b" and listed(["a", "b", "c"], 1) == "a and 2 more"
    assert listed(list("abc"), 2) == "a, b and c"
    assert listed(list(map(str, range(1500)))).endswith("8, 9 and 1,490 more")
    assert show_seeds([2, 1, 1]) == "2, 1" and show_seeds([None]) == "None"
    assert show_seeds(list(range(5, 50))) == "5 to 49" and show_seeds([*range(30), 99]) == "31 different ones"
    assert show_seeds([None, *range(30)]) == "31 different ones"


def test_runs_on_other_data_are_another_table_that_says_so(tmp_path):
    run_folder(tmp_path)
    run_folder(tmp_path, "powersgd", dataset__augment="flip")
    run_folder(tmp_path, "topk", epochs=8)
    parts = grouping.settings(grouped(tmp_path))
    first, second, third = captions.headings(parts)
    assert first.endswith(", 4 epochs, dataset.augment=None") and second.endswith(", 4 epochs, dataset.augment=flip")
    assert third.endswith(", 8 epochs")


def test_runs_of_other_threads_have_no_ratio_of_times(tmp_path):
    edited(run_folder(tmp_path, seconds=2.0), "environment.json", threads=2)
    path = edited(run_folder(tmp_path, "powersgd", seconds=1.0), "environment.json", threads=1)
    (part,) = grouping.settings(grouped(tmp_path))
    assert tidy(part)["seconds_over_dense"].isna().tolist() == [False, True]
    assert "The arms differ in threads per process (dense 2 and PowerSGD rank 2 1)" in captions.time(part)
    edited(path, "environment.json", threads=2)
    assert tidy(grouping.settings(grouped(tmp_path))[0])["seconds_over_dense"].tolist() == [1.0, 0.5]


def test_a_folder_of_everything_at_once(tmp_path, capsys, no_figures):  # noqa: F811
    """Empty, damaged, unfinished and old folders beside a good one, no dense run among them."""
    runs = tmp_path / "runs"
    run_folder(runs, "powersgd")
    (run_folder(runs, "topk") / "done").unlink()
    (run_folder(runs, "qsgd") / "summary.json").write_text("{")
    old = run_folder(runs, "signsgd")
    (old / "environment.json").unlink()
    (runs / "empty").mkdir()
    RunFolder(runs / "begun").path.mkdir()
    assert report_main([str(runs), "--out", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err and out.startswith("No dense run of this setting is among those given")
    assert "no done marker" in out and "no readable summary.json" in out and "signsgd" in out.lower()
    assert sum(line.startswith("- empty: no run") for line in out.splitlines()) == 1


def test_the_report_begins_with_the_answers(tmp_path, no_figures):  # noqa: F811
    for seed in (0, 1, 2):
        run_folder(tmp_path / "runs", seed=seed, accuracy=0.9 + seed / 1000)
        run_folder(tmp_path / "runs", "powersgd", seed=seed, accuracy=0.9 + seed / 990, payload=100)
    run_folder(tmp_path / "runs", epochs=8)
    write.write(read.read_runs([tmp_path / "runs"]), tmp_path / "out")
    for name in ("README.md", "table.md"):
        first, second, third, *_ = (tmp_path / "out" / name).read_text().split("\n\n")
        assert first.startswith(
            "**resnet8 on digits, 4 workers x 32 samples, 4 epochs.** PowerSGD rank 2 keeps dense's "
        )
        assert second.endswith("8 epochs.** Only dense has run: there is nothing to compare it with.")
        assert third.startswith("## resnet8 on digits")
