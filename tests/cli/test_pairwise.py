"""Every policy with every compressor under every synchronisation: it runs, or is refused with one sentence."""

import functools
import itertools
import re
from pathlib import Path

import pytest
import torch

from accordion_bench.cli import smoke
from accordion_bench.comm.collectives import Comm
from accordion_bench.config.components import build_components
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer
from scripts import matrix
from tests.kit import tiny
from tests.kit.paths import ROOT

DOCUMENT = ROOT / "docs" / "matrix.md"
RUN = tuple(tiny.typed(Path("runs"), "epochs=3", "dataset.train_size=32", "dataset.test_size=8"))


WRITE = "write it anew with: python -m scripts.matrix docs/matrix.md"
PAIRS = [("compressor", "adaptive"), ("adaptive", "sync"), ("compressor", "sync")]


@pytest.mark.slow
def test_the_document_is_up_to_date():
    assert DOCUMENT.read_text() == matrix.document(), WRITE


@pytest.mark.parametrize(("rows", "columns"), PAIRS)
def test_every_seventh_cell_of_the_document_is_up_to_date(rows, columns):
    """All names are there, and a cell's dot or sentence is what a run with this pair is told."""
    section = DOCUMENT.read_text().split(f"## {rows} × {columns}\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    heading, table = lines[0], {line[0]: line[1:] for line in lines[1:]}
    assert (heading[1:], list(table)) == (matrix.names(columns), matrix.names(rows)), WRITE
    numbered = re.findall(r"^(\d+)\. (.+(?:\n +.+)*)", section, re.MULTILINE)
    sentences = {number: " ".join(sentence.split()) for number, sentence in numbered}
    cells = list(itertools.product(matrix.names(rows), enumerate(matrix.names(columns))))
    for row, (i, column) in cells[::7]:
        said = matrix.of_pair(rows, row, columns, column)
        wanted = "·" if said is None else " ".join(matrix.general(said, row, column).split())
        assert sentences.get(table[row][i], table[row][i]) == wanted, WRITE


@pytest.mark.sample(5)
@pytest.mark.parametrize("c", matrix.names("compressor"))
def test_three_go_together_where_each_pair_does(c):
    """Every cell is validated; the document's tables of pairs say it all."""
    wrong = []
    for s, a in itertools.product(*(matrix.names(group) for group in ("sync", "adaptive"))):
        pairs = [("compressor", c, "adaptive", a), ("adaptive", a, "sync", s), ("compressor", c, "sync", s)]
        expected = all(matrix.of_pair(*pair) is None for pair in pairs)
        if (said := matrix.refusal(c, s, (a,))) is not None:
            assert "\n" not in said and "; type " in said, said
        if (said is None) != expected:
            wrong.append((c, s, a, said))
    assert wrong == []


def cover(*names: list[str]) -> list[smoke.Cell]:
    """Cells in which every pair of these names that runs occurs, see test_smoke.py."""
    return smoke.cover(lambda cell: matrix.refusal(*cell) is None, *names)


@functools.cache
def cells() -> list[smoke.Cell]:
    """Of all names."""
    return cover(*map(matrix.names, matrix.GROUPS))


PARTS = 40


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_pair_that_runs_trains_a_few_steps(tmp_path, part):
    train(tmp_path, cells()[part::PARTS])


def test_some_pairs_train_a_few_steps(tmp_path):
    """Every scheme, with a quantiser and two policies."""
    train(tmp_path, cover(["qsgd"], matrix.names("sync"), ["accordion", "none"]))


def train(tmp_path: Path, chosen: list[smoke.Cell]) -> None:
    """Each cell, of which every one must do what a run does."""
    for compressor, sync, policies in chosen:
        cfg = smoke.shortened(matrix.cell(compressor, sync, policies, RUN))
        build_components(RunConfig.from_dict(cfg), matrix.WORKERS)
        folder = RunFolder(tmp_path / f"{compressor}-{sync}-{'-'.join(policies)}")
        folder.path.mkdir()
        trainer = Trainer(RunConfig.from_dict(cfg), Comm(matrix.WORKERS), folder)
        start = [value.clone() for value in trainer.axis.shared]
        summary = trainer.fit()
        named = f"{compressor}, {sync}, {policies}"
        assert summary["epochs"] == 3 and 0 <= summary["metric"] <= 1, named
        assert summary["payload_bytes"] > 0 or compressor == "threshold", named
        assert not any(map(torch.equal, start, trainer.axis.shared)), named
