"""`label=`: what users call an arm stands in every table, figure, page and LaTeX, and never joins two methods."""

import pytest

from accordion_bench.report import BANDWIDTHS, load_runs, read
from accordion_bench.report.__main__ import main as report_main
from accordion_bench.report.compare.arms import dense_command
from accordion_bench.report.compare.verdicts import known_accuracies
from accordion_bench.report.render import captions, figures, looks, write
from accordion_bench.report.render.figures.finals import by_method
from tests.report.test_report import grouped, no_figures, run_folder  # noqa: F401


def test_every_part_of_a_report_has_the_label(tmp_path):
    for seed in (0, 1):
        run_folder(tmp_path / "runs", "none", seed=seed, label="the baseline")
        run_folder(tmp_path / "runs", "topk", seed=seed, payload=100, label="ours & co")
    out = tmp_path / "out"
    assert report_main([str(tmp_path / "runs"), "--out", str(out), "--figures", "svg"]) == 0
    for name in ("table.md", "table.csv", "README.md", "report.html"):
        text = (out / name).read_text()
        assert "the baseline" in text and ("ours & co" in text or "ours &amp; co" in text), name
    latex = (out / "table.tex").read_text()
    assert r"ours \& co" in latex and "TopK" not in latex
    assert "Named by label=: the baseline is dense and ours & co is TopK 10 %" in (out / "table.md").read_text()
    assert set(load_runs(tmp_path / "runs")["label"]) == {"the baseline", "ours & co"}


def test_the_label_is_drawn(tmp_path):
    run_folder(tmp_path, "none")
    run_folder(tmp_path, "topk", payload=100, label="ours")
    arms = grouped(tmp_path)
    drawn = figures.KINDS["accuracy_epoch"].draw(arms, BANDWIDTHS)
    texts = [text.get_text() for legend in drawn.legends for text in legend.get_texts()]
    assert any("ours" in text for text in texts) and not any("TopK" in text for text in texts)


def test_a_label_changes_neither_what_an_arm_is_compared_with_nor_its_look(tmp_path):
    for label, root in ((None, tmp_path / "a"), ("ours", tmp_path / "b")):
        run_folder(root, "none", label=None if label is None else "theirs")
        run_folder(root, "topk", payload=100, label=label)
    plain, named = grouped(tmp_path / "a"), grouped(tmp_path / "b")
    assert [arm.label for arm in named] == ["theirs", "ours"]
    assert [arm.dense for arm in named] == [arm.dense for arm in plain] == [True, False]
    assert looks(named) == looks(plain)
    assert known_accuracies([tmp_path / "b"], "", 4).keys() == known_accuracies([tmp_path / "a"], "", 4).keys()


def test_two_methods_with_one_label_are_two_arms(tmp_path):
    run_folder(tmp_path, "none", label="ours")
    run_folder(tmp_path, "topk", payload=100, label="ours")
    run_folder(tmp_path, "powersgd", payload=200, label="ours")
    assert [arm.label for arm in grouped(tmp_path)] == ["ours (dense)", "ours (PowerSGD rank 2)", "ours (TopK 10 %)"]
    assert [arm.n for arm in grouped(tmp_path)] == [1, 1, 1]


def test_one_method_with_other_options_and_one_label_is_two_arms(tmp_path):
    run_folder(tmp_path, "topk", label="ours", optimizer__lr=0.1)
    run_folder(tmp_path, "topk", label="ours", optimizer__lr=0.2)
    assert [arm.label for arm in grouped(tmp_path)] == ["ours, lr=0.1", "ours, lr=0.2"]


def test_a_label_that_is_another_arms_method(tmp_path):
    run_folder(tmp_path, "none")
    run_folder(tmp_path, "topk", payload=100, label="dense")
    assert [arm.label for arm in grouped(tmp_path)] == ["dense", "dense (TopK 10 %)"]


def test_seeds_with_several_labels_have_the_methods_name(tmp_path):
    run_folder(tmp_path, "topk", seed=0, label="ours")
    run_folder(tmp_path, "topk", seed=1, label="mine")
    (arm,) = grouped(tmp_path)
    assert (arm.label, arm.n) == ("TopK 10 %", 2)
    (said,) = captions.labels([arm])
    assert said.startswith("TopK 10 %: its seeds have 2 labels (mine and ours), so that its options name it; type ")
    assert said in write.section([arm]).replace("\\", "")


def test_seeds_without_a_label_take_the_one_that_the_others_have(tmp_path):
    run_folder(tmp_path, "topk", seed=0)
    run_folder(tmp_path, "topk", seed=1, label=None)
    run_folder(tmp_path, "topk", seed=2, label="ours")
    (arm,) = grouped(tmp_path)
    assert (arm.label, arm.n) == ("ours", 3)


def test_the_newest_run_of_a_seed_names_it(tmp_path):
    run_folder(tmp_path, "topk", seed=0, label="old", started="2026-01-01T00:00:00")
    run_folder(tmp_path, "topk", seed=0, label="new", started="2026-01-02T00:00:00")
    (arm,) = grouped(tmp_path)
    assert (arm.label, arm.n, captions.labels([arm])) == ("new", 1, ["Named by label=: new is TopK 10 %."])


def test_the_command_that_adds_dense_does_not_call_it_ours(tmp_path):
    typed = "python -m accordion_bench compressor=topk \"label='ours (10 %)'\" epochs=4 seed=0"
    run_folder(tmp_path, "topk", label="ours (10 %)", command=typed)
    told = dense_command(grouped(tmp_path)[0])
    assert told == "python -m accordion_bench compressor=none adaptive=none epochs=4 seed=0"


@pytest.mark.parametrize("several", [False, True])
def test_a_line_over_workers_joins_arms_of_one_label_and_one_method(tmp_path, several):
    for workers, compressor in ((4, "topk"), (8, "powersgd" if several else "topk")):
        path = run_folder(tmp_path, compressor, label="ours", workers=workers)
        summary = path / "summary.json"
        summary.write_text(summary.read_text().replace('"workers": 4', f'"workers": {workers}'))
    lines = by_method(grouped(tmp_path))
    assert [name for name, _ in lines] == ([] if several else ["ours"])


@pytest.mark.parametrize("label", ["", 41 * "x", 7, ["x"], {"x": 1}])
def test_what_is_no_label_in_a_strangers_folder(label, tmp_path):
    run_folder(tmp_path, "topk", label=label)
    (run,) = read.read_runs([tmp_path])
    assert run.label == "TopK 10 %" and run.problem == "label of config.yaml is missing or of the wrong type"
