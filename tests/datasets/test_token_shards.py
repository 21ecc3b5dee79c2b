"""Tokenised text in .bin files: read as they were written, counted, and refused where they are something else."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from accordion_bench import train
from accordion_bench.config.compose import compose
from accordion_bench.datasets.token_windows import HEADER, MAGIC, TokenShards
from accordion_bench.options.checks import ConfigError
from accordion_bench.runs.folder import RunFolder
from tests.kit import composed, tiny

CPU = torch.device("cpu")
DRAWN = np.random.default_rng(0)
TOKENS = DRAWN.integers(0, 60000, 700)  # more than half of which have the highest of 16 bits set, or not


def written(place: Path, kind: str = "uint16", **parts: np.ndarray) -> str:
    for name, tokens in (parts or {"train": TOKENS[:500], "val": TOKENS[500:]}).items():
        tokens.astype(kind).tofile(place / f"{name}.bin")
    return str(place)


def loaded(root: str, **options):
    dataset = TokenShards(context=10, **options)
    found = dataset.count(root)
    dataset.prepare(root)
    return found, dataset, dataset.load(root, 0, CPU)


@pytest.mark.parametrize("kind", ["uint16", "uint32"])
def test_tokens_are_those_that_were_written(kind, tmp_path):
    tokens = TOKENS if kind == "uint16" else TOKENS * 70_000
    root = written(tmp_path, kind, train=tokens[:500], val=tokens[500:])
    found, dataset, data = loaded(root, dtype=kind)
    assert (found["vocabulary"], found["train_tokens"]) == (tokens.max() + 1, 500)
    assert dataset.model_arguments() == {"vocabulary": tokens.max() + 1}
    data.begin_epoch(0)
    x, y = data.train_batch(torch.arange(data.train_size))
    start = int(data.offset)
    assert x.flatten().tolist() == tokens[start : start + x.numel()].tolist()
    assert y.flatten().tolist() == tokens[start + 1 : start + 1 + x.numel()].tolist()
    for split in ("valid", "test"):
        targets = torch.cat([y[y >= 0] for _, y in data.test_windows(split, 0, 1)])
        assert targets.tolist() == tokens[501:].tolist()


def test_several_shards_follow_each_other_and_headers_are_no_tokens(tmp_path):
    head = np.zeros(HEADER // 4, np.int32)
    head[:3] = MAGIC, 1, 250
    for i, part in enumerate((TOKENS[:250], TOKENS[250:500])):
        (tmp_path / f"fineweb_train_00000{i}.bin").write_bytes(head.tobytes() + part.astype(np.uint16).tobytes())
    TOKENS[500:].astype(np.uint16).tofile(tmp_path / "fineweb_val_000000.bin")
    _, _, data = loaded(str(tmp_path))
    _, _, plain = loaded(written(tmp_path / ".."))
    assert all(torch.equal(data.tokens[split], plain.tokens[split]) for split in ("train", "valid", "test"))


def test_parts(tmp_path):
    """Both evaluation splits are their own files where there are two."""
    _, _, data = loaded(written(tmp_path, train=TOKENS[:500], val=TOKENS[500:600], test=TOKENS[600:]))
    assert {split: len(tokens) for split, tokens in data.tokens.items()} == {"train": 500, "valid": 100, "test": 100}
    assert not torch.equal(data.tokens["valid"], data.tokens["test"])


def test_a_single_file_is_not_copied(tmp_path):
    _, _, data = loaded(written(tmp_path))
    with open(tmp_path / "train.bin", "r+b") as file:
        file.write(np.array([7], np.uint16).tobytes())
    assert data.tokens["train"][0] == 7


@pytest.mark.parametrize(
    ("parts", "options", "told"),
    [
        ({"train": TOKENS}, {}, "must hold train.bin and val.bin or test.bin, got .* with train; type"),
        ({"tokens": TOKENS}, {}, "must hold train.bin and val.bin or test.bin, got .* with none"),
        ({}, {"vocabulary": 50257}, r"vocabulary must be above the largest token, 59\d+, got 50257; type dataset.voc"),
        ({}, {"train_tokens": 400}, "train_tokens must be those of .*, 500, got 400; type dataset.train_tokens=500"),
        ({}, {"fingerprint": "0" * 16}, "whose files have changed since the run started"),
        ({"train": TOKENS[:1], "val": TOKENS}, {"dtype": "uint32"}, "cannot be read .*2 bytes are not whole uint32"),
        ({"train": TOKENS[:0], "val": TOKENS}, {}, "train.bin, which is empty"),
    ],
)  # fmt: skip
def test_one_sentence(parts, options, told, tmp_path):
    root = written(tmp_path, **parts)
    with pytest.raises(ConfigError, match=told) as refused:
        loaded(root, **options)
    assert "\n" not in str(refused.value) and ";" in str(refused.value)


def test_a_run(tmp_path):
    """Words that always follow each other are learned: the perplexity falls far below their number."""
    tokens = np.tile(np.arange(40) * 5, 60)
    root = written(tmp_path, train=tokens[:2000], val=tokens[2000:])
    words = ["model=gpt_nano", "model.layers=1", "model.width=32", "model.heads=2", "model.positions=16"]
    words += [
        "dataset=token_files",
        "dataset.context=16",
        f"paths.data={root}",
        f"paths.runs={tmp_path}/runs",
        "workers=2",
    ]
    words += ["optimizer=adamw", "optimizer.lr=0.01", "schedule.lr_scaling=none", "epochs=8", "batch_size=8"]
    words += ["comm=simulated", "dataset.vocabulary=200", "checkpoint.every=0"]
    train.run(composed.cfg(*words))
    run = RunFolder(tiny.only(tmp_path / "runs"))
    summary = run.read_json("summary.json")
    assert summary["selected_by"] == "valid_token_perplexity" and 1 <= summary["metric"] < 4
    assert summary["metric"] == pytest.approx(math.exp(run.read_metrics()[-1]["test_loss"]))
    saved = run.read_config()["dataset"]
    assert saved["train_tokens"] == 2000 and len(saved["fingerprint"]) == 16
    assert compose(["dataset=token_files"])["dataset"]["train_tokens"] is None
