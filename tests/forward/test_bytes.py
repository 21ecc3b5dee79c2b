"""Bytes: their evaluation, what a run and a report say of them, dropout in every placement."""

import json
import math

import pytest
import torch
from torch import Tensor, nn

from accordion_bench import train
from accordion_bench.comm.collectives import Comm
from accordion_bench.config.validate import validate
from accordion_bench.forward.task import Windows
from accordion_bench.models.transformer import GPT
from accordion_bench.options.checks import ConfigError
from accordion_bench.processes.placement import place
from accordion_bench.report.compare.columns import tidy
from accordion_bench.report.compare.grouping import group
from accordion_bench.report.compare.verdicts import verdicts
from accordion_bench.report.read import read_runs
from accordion_bench.report.render import captions
from accordion_bench.report.render.figures.sheet import metric_label
from accordion_bench.report.render.tables import cells
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import checkpoint
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer
from tests.kit import composed
from tests.kit.processes import forked
from tests.kit.tiny import only

BYTES = [
    "model=gpt_nano",
    "model.layers=2",
    "model.width=24",
    "model.heads=2",
    "model.positions=16",
    "dataset=pydocs_bytes",
    "dataset.context=16",
    "dataset.subset=1100",
    "dataset.limit_eval=300",
    "batch_size=4",
    "epochs=2",
    "workers=4",
    "optimizer=adamw",
    "optimizer.lr=0.003",
    "optimizer.decay_on=matrices",
    "schedule=warmup_cosine",
    "schedule.warmup=0.2",
    "schedule.lr_scaling=none",
    "clip_norm=1",
    "comm=simulated",
    "checkpoint.every=0",
]


class Double(GPT):
    """In float64, so that another order of summation shows no difference."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.double()


def typed(*overrides: str) -> list[str]:
    """A run of a second; later options replace earlier ones."""
    return list({item.split("=")[0]: item for item in (*BYTES, *overrides)}.values())


def trainer_for(tmp_path, *overrides: str) -> Trainer:
    cfg = composed.cfg(*typed(*overrides, f"paths.runs={tmp_path}"))
    return Trainer(RunConfig.from_dict(cfg), Comm(cfg["workers"]), RunFolder(tmp_path))


def run(runs, *overrides: str):
    """The folder of a whole run."""
    train.run(composed.cfg(*typed(*overrides, f"paths.runs={runs}")))
    return only(runs)


# ---- evaluation


def by_the_byte(model: nn.Module, text: Tensor, context: int) -> tuple[float, int]:
    """Nats and bytes of a split: a window after the other, a byte at a time."""
    nats, seen = 0.0, 0
    for target in range(1, len(text)):
        begin = (target - 1) // context * context
        logits = model(text[None, begin:target].long())[0, -1]
        nats -= logits.double().log_softmax(0)[int(text[target])].item()
        seen += 1
    return nats, seen


@pytest.mark.parametrize("limit", [2, 16, 17, 18, 120])
@pytest.mark.parametrize("split", ["valid", "test"])
def test_bits_per_byte_are_those_of_an_obvious_loop(tmp_path, limit, split):
    target = "model._target_=tests.forward.test_bytes.Double"
    trainer = trainer_for(tmp_path, target, f"dataset.limit_eval={limit}", f"dataset.metric_split={split}")
    model, data, task = trainer.axis.model.eval(), trainer.data, trainer.task
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)  # else all bytes would be almost equally likely
        model.float()  # the loss is one in float32
        expected = {part: by_the_byte(model, data.tokens[part], 16) for part in ("test", "valid")}
        for workers in (1, 3, 40):
            columns = task.columns(sum(task.totals(model, data, w, workers) for w in range(workers)).tolist())
            for part, (nats, seen) in expected.items():
                assert seen == limit - 1
                assert columns[f"{part}_bits_per_byte"] == pytest.approx(nats / seen / math.log(2), rel=1e-5)
    assert columns["bits_per_byte"] == columns[f"{split}_bits_per_byte"]
    assert columns["perplexity_per_byte"] == pytest.approx(2 ** columns["bits_per_byte"])
    assert columns["test_loss"] == pytest.approx(columns["test_bits_per_byte"] * math.log(2))


def test_a_diverged_model_has_an_infinite_perplexity():
    """2 to the power of 1024 bits is no float any more; the loss still is one."""
    columns = Windows().columns([800.0, 1.0, 800.0, 1.0])
    assert columns["perplexity_per_byte"] == math.inf and columns["test_loss"] == 800


def test_untrained_and_trained(tmp_path):
    """From a guess to below the entropy of this text's bytes, of which no model that knows no context gets below."""
    trainer = trainer_for(
        tmp_path, "workers=1", "epochs=12", "batch_size=8", "dataset.subset=6000", "dataset.limit_eval=2000"
    )
    trainer.data.tokens["valid"] = trainer.data.tokens["train"][:2000]
    assert trainer.evaluate()["bits_per_byte"] == pytest.approx(8, rel=0.02)
    trainer.fit()
    share = torch.bincount(trainer.data.tokens["valid"].long(), minlength=256) / 2000
    entropy = -(share[share > 0] * share[share > 0].log2()).sum().item()
    assert trainer.evaluate()["bits_per_byte"] < entropy < 5


def test_a_sample_has_no_state(tmp_path):
    """Windows are independent: the loss of a batch is the mean of its samples' losses."""
    trainer = trainer_for(tmp_path)
    x, y = trainer.data.train_batch(torch.arange(5))
    loss = [trainer.task.loss(trainer.axis.model, x[i : i + 1], y[i : i + 1], 0, 0) for i in range(5)]
    torch.testing.assert_close(trainer.task.loss(trainer.axis.model, x, y, 0, 0), torch.stack(loss).mean())
    assert trainer.task.worker_state(0) == {"task": {}}


# ---- placement


PLACEMENTS = {
    "1x4": ["comm=simulated", "workers=4"],
    "2x2": ["comm=gloo", "workers=null", "comm.processes=2", "comm.workers_per_process=2"],
    "4x1": ["comm=gloo", "workers=null", "comm.processes=4", "comm.workers_per_process=1"],
}


def test_every_placement_is_the_same_run(tmp_path):
    """1 x 4 = 2 x 2 = 4 x 1 with dropout: bytes, weights, bits per byte."""
    found = {}
    for name, options in PLACEMENTS.items():
        with forked():
            options = [*options, "model.dropout=0.3", "checkpoint.every=100"]
            folder = run(tmp_path / name, *options)
        state = torch.load(checkpoint.latest(folder) / "shared.pt", weights_only=True)
        found[name] = RunFolder(folder).read_metrics(), state["parameters"]
    rows, parameters = found["1x4"]
    for name in ("2x2", "4x1"):
        for row, other in zip(rows, found[name][0], strict=True):
            sent = [column for column in row if column.endswith("_bytes")]
            assert [row[column] for column in sent] == [other[column] for column in sent]
            for column in ("train_loss", "test_loss", "bits_per_byte", "perplexity_per_byte"):
                assert row[column] == pytest.approx(other[column], rel=1e-4), column
        for key, value in parameters.items():
            assert (found[name][1][key] - value).norm() <= 1e-3 * value.norm() + 1e-6, key
    tied = [value for value in parameters.values() if value.shape == (256, 24)]
    assert len(tied) == 1


# ---- what is told


def test_rows_summary_and_report(tmp_path, capsys):
    folders = [run(tmp_path / name, f"compressor={name}") for name in ("none", "topk")]
    out = capsys.readouterr().out
    summary = json.loads((folders[0] / "summary.json").read_text())
    assert summary["metric_name"] == "bits_per_byte" and summary["selected_by"] == "valid_bits_per_byte"
    assert "bits per byte " in out and f"perplexity {summary['perplexity_per_byte']:.4g} per byte at the end" in out
    arms, _ = group(read_runs(folders))
    assert tidy(arms)["bits_per_byte"].notna().all()
    (headings, *_), (said,) = cells(tidy(arms)), verdicts(arms)
    assert "bits per byte, final" in headings and "minus dense, bits" in headings
    assert "bits per byte" in said and " bits " in said and "points" not in said
    told = " ".join(captions.captions(arms))
    assert "Bits per byte: after the last epoch" in told and "2 to the power of it is the perplexity per byte" in told
    assert ", 1,100 training bytes" in captions.heading(arms[0])
    assert metric_label(arms) == "validation bits per byte [-], lower is better"


@pytest.mark.parametrize(
    "option",
    ["precision=bfloat16", "micro_batch_size=2", pytest.param("compile=aot_eager", marks=pytest.mark.slow)],
)
def test_trains_with(tmp_path, option):
    row = RunFolder(run(tmp_path, "epochs=1", option)).read_metrics()[-1]
    assert math.isfinite(row["train_loss"]) and row["bits_per_byte"] < 9


@pytest.mark.parametrize(
    "options, message",
    [
        (["dataset.context=17"], "dataset.context must be at most 16, the positions of model=gpt_nano, got 17; type "),
        (["dataset.subset=400000"], "dataset.subset must be at most "),
        (["target=-1"], "target must be a number at least 0, got -1.*; type target=2.5"),
        (
            ["schedule.warmup=2"],
            "schedule.warmup must be shorter than the run of epochs=2, got 2; type schedule.warmup",
        ),
        (
            ["optimizer.decay_on=all"],
            "optimizer.decay_on must be null or matrices, got all; type optimizer.decay_on=null",
        ),
    ],
)
def test_refused_before_the_run(options, message):
    config = RunConfig.from_dict(composed.cfg(*typed(*options)))
    with pytest.raises(ConfigError, match=message):
        validate(config, place(config))
