"""Every policy with every compressor under every synchronisation: it runs, or is refused with one sentence."""

import functools
import itertools
from pathlib import Path

import pytest
import torch

from accordion_bench import config
from accordion_bench.comm import Comm
from accordion_bench.record import RunFolder
from accordion_bench.trainer import Trainer
from scripts import matrix
from tests import tiny

DOCUMENT = Path(__file__).parents[1] / "docs" / "matrix.md"
RUN = tuple(tiny.typed(Path("runs"), "epochs=3", "dataset.train_size=32", "dataset.test_size=8"))
# so that things happen within six steps
SHORT = {
    "sync": {"period": 2},
    "adaptive": {
        **dict.fromkeys(("interval", "stat_samples", "every", "freq", "samples"), 1),
        "update_at": [0],
        "num_components": 2,
        "factor": 2,
        "smallest": 0.02,
    },
}
# up to 4 bits: a codebook is fitted for every number of bits that a policy may choose, and that of 8 takes seconds
FEW_BITS = {"accordion": {"strong": 2, "weak": 3}, "adaqs": {"cap": 4}, "lgreco": {"levels": [2, 3]},
            "schedule": {"inside": 3, "outside": 2}}  # fmt: skip


def test_the_document_is_up_to_date():
    told = "write it anew with: python -m scripts.matrix docs/matrix.md"
    assert DOCUMENT.read_text() == matrix.document(), told


def test_three_go_together_where_each_pair_does():
    """Every cell is validated; the document's tables of pairs say it all."""
    wrong = []
    for c, s, a in itertools.product(*(matrix.names(group) for group in ("compressor", "sync", "adaptive"))):
        pairs = [("compressor", c, "adaptive", a), ("adaptive", a, "sync", s), ("compressor", c, "sync", s)]
        expected = all(matrix.of_pair(*pair) is None for pair in pairs)
        if (said := matrix.refusal(c, s, [a])) is not None:
            assert "\n" not in said and "; type " in said, said
        if (said is None) != expected:
            wrong.append((c, s, a, said))
    assert wrong == []


@functools.cache
def runnable(compressor: str, sync: str, policies: tuple[str, ...]) -> bool:
    return matrix.refusal(compressor, sync, policies) is None


@functools.cache
def cover() -> list[tuple[str, str, tuple[str, ...]]]:
    """Cells that run, so few that every pair that runs occurs in one of them; several policies may share a cell."""
    together = [("compressor", "adaptive"), ("adaptive", "sync"), ("compressor", "sync")]
    open_pairs = {
        (first, a, second, b)
        for first, second in together
        for a, b in itertools.product(matrix.names(first), matrix.names(second))
        if matrix.of_pair(first, a, second, b) is None
    }
    cells = []
    while open_pairs:
        first, a, second, b = min(open_pairs)
        fixed = {first: a, second: b}
        (third,) = {"compressor", "sync", "adaptive"} - {first, second}
        triples = [{**fixed, third: c} for c in matrix.names(third)]
        fitting = [t for t in triples if runnable(t["compressor"], t["sync"], (t["adaptive"],))]
        best = max(fitting, key=lambda t: len(pairs_of(t["compressor"], t["sync"], (t["adaptive"],)) & open_pairs))
        policies: tuple[str, ...] = (best["adaptive"],)
        for name in matrix.names("adaptive"):
            more = (*policies, name)
            new = pairs_of(best["compressor"], best["sync"], (name,)) & open_pairs
            if new and name not in policies and "none" not in more and runnable(best["compressor"], best["sync"], more):
                policies = more
        cells.append((best["compressor"], best["sync"], policies))
        open_pairs -= pairs_of(*cells[-1])
    return cells


def pairs_of(compressor: str, sync: str, policies: tuple[str, ...]) -> set[tuple[str, str, str, str]]:
    found = {("compressor", compressor, "sync", sync)}
    for name in policies:
        found |= {("compressor", compressor, "adaptive", name), ("adaptive", name, "sync", sync)}
    return found


@pytest.mark.parametrize("part", range(8))
def test_every_pair_that_runs_trains_a_few_steps(tmp_path, part):
    for compressor, sync, policies in cover()[part::8]:
        cfg = matrix.cell(compressor, sync, policies, RUN)
        cfg["sync"] |= {k: v for k, v in SHORT["sync"].items() if cfg["sync"].get(k)}
        if cfg["sync"].get("groups"):
            cfg["sync"]["groups"] = [[1, 2], [2, 4]]
        for name, node in cfg["adaptive"].items():
            node |= {key: value for key, value in SHORT["adaptive"].items() if key in node}
            node |= {"cap": 8} if name == "grow_batch" else {}
            node |= FEW_BITS.get(name, {}) if "bits" in cfg["compressor"] else {}
        config.components(cfg, matrix.WORKERS)
        folder = RunFolder(tmp_path / f"{compressor}-{sync}-{'-'.join(policies)}")
        folder.path.mkdir()
        trainer = Trainer(cfg, Comm(matrix.WORKERS), folder)
        start = [value.clone() for value in trainer.axis.shared]
        summary = trainer.fit()
        named = f"{compressor}, {sync}, {policies}"
        assert summary["epochs"] == 3 and 0 <= summary["metric"] <= 1, named
        assert summary["payload_bytes"] > 0 or compressor == "threshold", named
        assert not any(map(torch.equal, start, trainer.axis.shared)), named
