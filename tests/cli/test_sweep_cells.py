"""What the cells of a sweep are called, and the table and the sentence on what became of them."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from accordion_bench.cli.sweep import LONGEST, Cells, best, cells_of, table
from accordion_bench.runs.folder import RunFolder
from tests.kit.composed import unresolved


def hydra(*typed: str, **sweeper) -> OmegaConf:
    return OmegaConf.create({"sweeper": {"params": None, **sweeper}, "overrides": {"task": list(typed)}})


@pytest.mark.parametrize(
    "typed, params, total, swept, first",
    [
        (["compressor=none,topk", "seed=0,1", "epochs=3"], {}, 4, "compressor seed", "compressor=none seed=0 epochs=3"),
        (["seed=range(0,5)"], {"+arm": "dense,topk"}, 10, "arm seed", "+arm=dense seed=0"),
        (["compressor=topk"], {"compressor": "none,topk", "seed": "0,1"}, 2, "seed", "compressor=topk seed=0"),  # typed
        (["model.blocks=[1,2],[3,4]", "a='x,y'"], {}, 2, "model.blocks", "model.blocks=[1,2] a='x,y'"),
        (["epochs=3"], {}, 1, "", "epochs=3"),
        (["epochs=interval(0,1)"], {}, 0, "epochs", ""),
    ],
)
def test_cells_are_counted_before_the_first(typed, params, total, swept, first):
    found = cells_of(hydra(*typed, params=params))
    assert found == Cells(total, tuple(swept.split()), tuple(first.split()))


def test_trials_of_a_search():
    found = cells_of(hydra(n_trials=20, params={"optimizer.lr": "tag(log, interval(0.003, 1))", "epochs": 3}))
    assert found == Cells(20, ("optimizer.lr",))
    assert cells_of(OmegaConf.create({})) == Cells(1, ())


def test_an_experiments_arms():
    node = unresolved("accordion/table1_resnet18").hydra
    found = cells_of(OmegaConf.merge(node, {"overrides": {"task": []}}))
    arms = node.sweeper.params["+arm"].split(",")
    assert "arm" in found.swept and found.total % len(arms) == 0


def test_names():
    cells = Cells(12, ("compressor", "seed"))
    typed = ["compressor=topk", "epochs=3", "seed=2"]
    assert cells.in_front(7, typed) == "7 of 12 compressor=topk seed=2 | "
    assert Cells(0, ("arm",)).in_front(7, ["+arm=dense"]) == "7 +arm=dense | "
    long = Cells(2, ("a",)).in_front(1, [f"a={'x' * 100}"])
    assert long.startswith("1 of 2 a=xxx") and long.endswith("... | ") and len(long) == LONGEST + len("1 of 2  | ")


def line(runs: Path, cell: int, name: str = "accuracy", value: float = 0.5, **changed) -> dict:
    """The record's line of a cell that is done, and the summary that its run has left."""
    folder = runs / str(cell)
    folder.mkdir()
    summary = {"metric_name": name, "metric": value, "payload_bytes": 1_500_000, "seconds": 61.0}
    RunFolder(folder).write_json("summary.json", summary)
    own = {"overrides": [f"seed={cell}", "epochs=3"], "status": "done", "exit_status": 0, "metric": value}
    return {**own, "cell": cell, "folder": str(folder), **changed}


def test_the_table_has_what_was_refused_and_what_failed(tmp_path):
    """In the order of the cells, in whichever they have ended."""
    lines = [
        line(tmp_path, 3, value=0.9125),
        line(tmp_path, 1, status="refused", exit_status=2, folder=None, metric=None),
        line(tmp_path, 2, status="skipped"),
        line(tmp_path, 10, status="failed", exit_status=1),
    ]
    (tmp_path / "3" / "summary.json").write_text(
        json.dumps({"metric_name": "accuracy", "metric": 0.9125, "payload_bytes": None, "seconds": 0.2})
    )
    assert table(Cells(10, ("seed",)), lines) == [
        "    accuracy  payload       time  cell",
        " 1   refused                      seed=1",
        " 2   50.00 %   1.5 MB  1 min 1 s  seed=2",
        " 3   91.25 %        -        0 s  seed=3",
        "10    failed                      seed=10",
    ]


def test_metrics_of_several_tasks_are_named(tmp_path):
    lines = [line(tmp_path, 1), line(tmp_path, 2, "perplexity", 97.21)]
    title, first, second = table(Cells(2, ("seed",)), lines)
    assert title.split()[0] == "metric" and "accuracy 50.00 %" in first and "perplexity 97.21" in second


def test_a_folder_that_is_gone_has_its_status(tmp_path):
    gone = line(tmp_path, 1, folder=str(tmp_path / "nowhere"))
    assert table(Cells(1, ("seed",)), [gone])[1].split() == ["1", "done", "seed=1"]


@pytest.mark.parametrize("higher, seed", [(True, 2), (False, 1)])
def test_the_best_so_far(higher, seed, tmp_path):
    lines = [line(tmp_path, i, value=value) for i, value in ((1, 0.25), (2, 0.75), (3, 0.5))]
    lines.append(line(tmp_path, 4, value=1.0 if higher else 0.0, exit_status=1))
    value = "75.00 %" if higher else "25.00 %"
    told = best(Cells(9, ("seed",)), lines, higher)
    assert told == f"best so far: accuracy {value} with seed={seed}, in trial {seed} of 9"
    assert best(Cells(), lines[3:], higher) is None
