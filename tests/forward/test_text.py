"""Text: segments, the state that is carried, evaluation; placements and resumption."""

import copy
import functools
import io
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from tqdm import tqdm

from accordion_bench import train
from accordion_bench.comm.collectives import Comm
from accordion_bench.config.compose import compose
from accordion_bench.datasets import text
from accordion_bench.datasets.sampler import Sampler, Sharding
from accordion_bench.datasets.text import IGNORED, SyntheticText, TextData
from accordion_bench.forward.task import Text
from accordion_bench.models.lstm import LSTM
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import conf_dir
from accordion_bench.processes import placement
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import checkpoint
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training import launch
from accordion_bench.training.trainer import Trainer
from tests.kit import composed
from tests.kit.processes import together
from tests.runs.test_resume import differences, far, resume, stop, without_times

CPU = torch.device("cpu")
STEPS = 6  # per epoch: 8 strands of 5 or 6 segments
TEXT = [
    "model=lstm_small",
    "model.hidden=8",
    "dataset=synthetic_text",
    "dataset.vocabulary=12",
    "dataset.branches=2",
    "dataset.train_words=182",
    "dataset.test_words=50",
    "dataset.bptt=4",
    "batch_size=2",
    "epochs=2",
    "workers=4",
    "optimizer.lr=0.2",
    "schedule.milestones=[]",
    "schedule.warmup_epochs=0",
    "comm=simulated",
]
DOUBLE = ["model._target_=tests.forward.test_text.Double", "model.dropout=0"]
PLAIN_SGD = ["optimizer.momentum=0", "optimizer.nesterov=false", "optimizer.weight_decay=0"]


class Double(LSTM):
    """In float64, so that another order of summation shows no difference."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.double()


@functools.cache
def _composed(groups: tuple[str, ...]) -> dict:
    return compose(groups)


def cfg_for(runs: Path, *overrides: str) -> dict:
    """A run on text of a tenth of a second; options are set by hand, because composing costs more than training."""
    given = dict(item.split("=", 1) for item in overrides)
    defaults = dict(item.split("=", 1) for item in TEXT)
    pairs = {key: value for key, value in defaults.items() if key.split(".")[0] not in given} | given
    groups = {key for key in pairs if (conf_dir() / key).is_dir()}
    cfg = copy.deepcopy(_composed(tuple(f"{key}={value}" for key, value in pairs.items() if key in groups)))
    for key, value in {**pairs, "paths.runs": str(runs)}.items():
        *path, last = key.split(".")
        node = functools.reduce(lambda inner, part: inner[part], path, cfg)
        if key not in groups:
            assert last in node, key
            node[last] = yaml.safe_load(value)
    return cfg


def trainer_for(runs: Path, *overrides: str) -> Trainer:
    cfg = cfg_for(runs, *overrides)
    return Trainer(RunConfig.from_dict(cfg), Comm(cfg["workers"]), RunFolder(runs))


def fitted(runs: Path, *overrides: str) -> Trainer:
    trainer = trainer_for(runs, *overrides)
    trainer.fit()
    return trainer


def weights(trainer: Trainer) -> list[Tensor]:
    return [p.detach().clone() for p in trainer.axis.params]


def numbered(count: int, bptt: int = 4, test: int = 2) -> TextData:
    """Words that are their own places."""
    return TextData(torch.arange(count), torch.arange(test), torch.arange(test), bptt, CPU)


# ---- segments


@pytest.mark.parametrize(
    "workers, batch, segments", [(1, 1, 5), (4, 2, 45), (4, 2, 48), (3, 4, 50), (4, 8, 3), (2, 3, 1)]
)
def test_segments(workers, batch, segments):
    """Every word is seen, by one worker in one strand, but for the fill-up from the beginning of the text."""
    data, sampler = numbered(4 * segments + 2), Sampler(segments, workers, 0, Sharding("consecutive"))
    assert data.train_size == segments
    sampler.begin_epoch(0, batch)
    steps = sampler.steps(batch)
    assert steps == math.ceil(segments / (workers * batch))
    seen = []
    for worker in range(workers):
        batches = data.train_batches(0, (sampler.batch(worker, step) for step in range(steps)))
        xs, ys = (torch.cat(parts, dim=1) for parts in zip(*batches, strict=True))
        assert xs.shape == (batch, 4 * steps) and torch.equal(ys, xs + 1)
        goes_on = xs[:, 1:] == ys[:, :-1]
        assert bool((goes_on | (xs[:, 1:] == 0)).all())  # or begins anew, at the first word
        seen += xs.flatten().tolist()
    total = workers * batch * steps
    assert seen == [word % (4 * segments) for word in range(4 * total)]


def test_one_more_word_than_whole_segments_is_needed():
    assert [numbered(count).train_size for count in (5, 8, 9, 12, 13)] == [1, 1, 2, 2, 3]
    for name in ("subset", "train_words"):
        made = SyntheticText(bptt=4, **{name: 13})
        assert made.train_count == made.load("", 0, CPU).train_size == 3


def test_the_order_is_that_of_the_text_in_every_epoch():
    sampler, orders = Sampler(45, 4, 0, Sharding("consecutive")), []
    for epoch in (0, 1):
        sampler.begin_epoch(epoch, 2)
        orders.append([sampler.batch(3, step).tolist() for step in range(sampler.steps(2))])
    assert orders[0] == orders[1]


# ---- the state


def reference(trainer: Trainer, period: int | None = None) -> list[list[Tensor]]:
    """A fresh trainer's run in plain PyTorch: per worker a model and a state; SGD without momentum.

    Args:
        trainer: has not trained yet, and is not changed.
        period: local steps between two averagings; None = gradients are averaged in every step.
    """
    config, workers = trainer.config, trainer.comm.workers
    words, bptt, batch = trainer.data.words["train"], config.dataset["bptt"], config.batch_size
    models = [copy.deepcopy(trainer.axis.model) for _ in range(workers)]
    count, taken = (len(words) - 1) // bptt, 0
    steps = math.ceil(count / (workers * batch))
    for _ in range(config.epochs):
        states = [None] * workers
        for step in range(steps):
            gradients = []
            for worker, model in enumerate(models):
                starts = [(worker * batch + i) * steps + step for i in range(batch)]
                rows = torch.stack([words[s % count * bptt :][: bptt + 1] for s in starts])
                logits, state = model(rows[:, :-1], states[worker])
                states[worker] = tuple(part.detach() for part in state)
                loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), rows[:, 1:].reshape(-1))
                gradients.append(torch.autograd.grad(loss, list(model.parameters())))
            taken += 1
            with torch.no_grad():
                if period is None:
                    gradients = [[sum(parts) / workers for parts in zip(*gradients, strict=True)]] * workers
                for model, own in zip(models, gradients, strict=True):
                    for p, g in zip(model.parameters(), own, strict=True):
                        p -= config.optimizer["lr"] * g
                if period and (taken % period == 0 or taken == config.epochs * steps):
                    for ps in zip(*(model.parameters() for model in models), strict=True):
                        mean = sum(ps) / workers
                        for p in ps:
                            p.copy_(mean)
    return [[p.detach() for p in model.parameters()] for model in models]


@pytest.mark.parametrize("period", [None, 4])
def test_truncated_backpropagation_is_that_of_plain_pytorch(tmp_path, period):
    """States are carried over steps, of each worker its own, and begin at zero in every epoch."""
    local = [] if period is None else ["sync=local_sgd", f"sync.period={period}"]
    options = [*DOUBLE, *PLAIN_SGD, "schedule.lr_scaling=none", *local]
    expected = reference(trainer_for(tmp_path, *options), period)
    trainer = fitted(tmp_path, *options)
    assert trainer.position.step == 2 * STEPS
    for ours, plain in zip(trainer.sync.consensus(), expected[0], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-13)


def test_states_in_an_epoch(tmp_path):
    """Workers' states differ, hold no graph, and are forgotten where an epoch begins."""
    trainer = trainer_for(tmp_path)
    trainer.begin_epoch()
    for _ in range(2):
        trainer.train_step()
    task = trainer.task
    assert isinstance(task, Text) and set(task.states) == {0, 1, 2, 3}
    hs = [task.states[row][0][0] for row in range(4)]
    assert all(h.shape == (2, 2, 8) and not h.requires_grad and h.abs().max() > 0 for h in hs)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(hs, 2))
    trainer.position.epoch, trainer.position.step_in_epoch = 1, 0
    trainer.begin_epoch()
    assert not task.states


def test_micro_batches_carry_states_of_their_own(tmp_path):
    whole, parts = (fitted(tmp_path, *DOUBLE, f"micro_batch_size={size}") for size in ("null", 1))
    assert len(parts.task.states[0]) == 2  # type: ignore[attr-defined]
    for a, b in zip(weights(whole), weights(parts), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_uneven_micro_batches(tmp_path):
    whole, parts = (fitted(tmp_path, *DOUBLE, "batch_size=3", f"micro_batch_size={size}") for size in ("null", 2))
    for a, b in zip(weights(whole), weights(parts), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("every", [1, 3])
def test_evaluation_disturbs_nothing(tmp_path, every):
    trainer = trainer_for(tmp_path)
    train_step = trainer.train_step

    def and_evaluate() -> None:
        train_step()
        if trainer.position.step % every == 0:
            trainer.evaluate()
            trainer.axis.model.train()

    trainer.train_step = and_evaluate  # type: ignore[method-assign]
    before = torch.get_rng_state()
    trainer.fit()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, weights(trainer), weights(fitted(tmp_path))))


def test_a_larger_batch_from_the_next_epoch_on(tmp_path):
    """Twice the strands, of half the steps, in states of the new size."""
    switch = [
        "adaptive=accordion_batch",
        "adaptive.accordion_batch.factor=2",
        "adaptive.accordion_batch.fixed_switch=1",
    ]
    (tmp_path / "run").mkdir()
    trainer = fitted(tmp_path / "run", *switch)
    rows = RunFolder(tmp_path / "run").read_metrics()
    assert [row["step"] for row in rows] == [STEPS, STEPS + STEPS // 2]
    assert trainer.task.states[0][0][0].shape == (2, 4, 8)  # type: ignore[attr-defined]


@pytest.mark.parametrize("sync", ["local_sgd", "slowmo", "overlap_local_sgd", "streaming_diloco", "diloco"])
def test_local_methods_run(tmp_path, sync):
    trainer = fitted(tmp_path, f"sync={sync}", "sync.period=4", *(["sync.delay=1"] if "streaming" in sync else []))
    hs = [trainer.task.states[row][0][0] for row in range(4)]  # type: ignore[attr-defined]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(hs, 2))


# ---- stopped and resumed, and in other placements

ARMS = {
    "topk": ["compressor=topk", "clip_norm=0.1", "measure.norms=true", "measure.error=true"],
    "powersgd": ["compressor=powersgd", "compressor.min_compression_rate=0", "micro_batch_size=1"],
    "slowmo": ["sync=slowmo", "sync.period=4"],
}  # fmt: skip


def resumable(runs: Path, arm: str) -> dict:
    return cfg_for(runs, *ARMS[arm], f"checkpoint.every={2 * STEPS}")


def only(runs: Path) -> Path:
    (folder,) = runs.iterdir()
    return folder


def state(folder: Path) -> dict:
    """Everything in the newest checkpoint, and every metrics row; without times."""
    path = checkpoint.latest(folder)
    assert path is not None
    files = {file.name: torch.load(file, weights_only=True) for file in path.glob("*.pt")}
    del files["shared.pt"]["clock"]
    return {"files": without_times(files), "rows": without_times(RunFolder(folder).read_metrics())}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Arm -> state of the run in one process that was never stopped."""

    @functools.cache
    def of(arm: str) -> dict:
        runs = tmp_path_factory.mktemp("straight")
        train.run(resumable(runs, arm))
        return state(only(runs))

    return of


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "arm, stop_at", [("topk", 2), ("topk", STEPS), ("powersgd", 3), ("slowmo", STEPS - 1), ("slowmo", STEPS + 3)]
)
def test_stopped_and_resumed(tmp_path, straight, arm, stop_at):
    cfg = resumable(tmp_path, arm)
    folder = stop(cfg, stop_at, every=1)
    resume(folder, cfg)
    assert differences(state(folder), straight(arm)) == []


def test_the_comparison_compares_something(straight):
    files, rows = straight("topk")["files"], straight("topk")["rows"]
    states = [files[f"worker-{worker}.pt"]["task"][0] for worker in range(4)]
    assert len(states[0]) == 2 and states[0][0].shape == (2, 2, 8)
    assert not torch.equal(states[0][0], states[3][0])
    assert set(straight("powersgd")["files"]["worker-1.pt"]["task"]) == {0, 1}  # micro-batches
    assert len(rows) == 2 and rows[0]["compression_error"] > 0 and rows[0]["norms"]["embedding.weight"] > 0


def _in_each_process(rank: int, meeting: str, cfgs: dict[str, dict], folders: dict[str, Path]) -> None:
    """Every arm in 4 x 1; then, in the first two processes, in 2 x 2; and what was stopped in 1 x 4."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    for processes in (4, 2):
        if rank >= processes:
            return
        store = dist.FileStore(f"{meeting}-{processes}", processes)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
        where = placement.Placement("gloo", processes, 4 // processes, rank, rank, "environment")
        for arm, cfg in cfgs.items():
            launch.train(RunConfig.from_dict(cfg), where, RunFolder(folders[f"{arm} {processes}"]))
        if processes == 2:
            folder = folders["resumed"]
            launch.train(RunConfig.from_dict({**cfgs["topk"], "resume": str(folder)}), where, RunFolder(folder))
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """`ARM PROCESSES` -> folder of the run in that placement; `resumed`: of the one that was moved to two processes."""
    root = tmp_path_factory.mktemp("elsewhere")
    cfgs = {arm: resumable(root, arm) for arm in ARMS}
    folders = {f"{arm} {n}": root / f"{arm}-{n}" for arm in ARMS for n in (4, 2)}
    for folder in folders.values():
        folder.mkdir()
    folders["resumed"] = stop(
        {**cfgs["topk"], "paths": {**cfgs["topk"]["paths"], "runs": str(root / "moved")}}, STEPS + 3, every=1
    )
    together(4, _in_each_process, str(root / "store"), cfgs, folders)
    return folders


@pytest.mark.parametrize("story", [f"{arm} {n}" for arm in ARMS for n in (4, 2)] + ["resumed"])
def test_in_other_placements(straight, elsewhere, story):
    """1 x 4 = 2 x 2 = 4 x 1, up to the order of summation: bytes, plans, weights, states, perplexities."""
    arm = "topk" if story == "resumed" else story.split()[0]
    ours, theirs = state(elsewhere[story]), straight(arm)
    for row, other in zip(ours["rows"], theirs["rows"], strict=True):
        assert {c: row[c] for c in row if c.endswith("_bytes")} == {c: other[c] for c in row if c.endswith("_bytes")}
        for column in ("train_loss", "test_loss", "perplexity", "valid_perplexity"):
            assert row[column] == pytest.approx(other[column], rel=2e-5), column
        for column in ("norms", "compression_error") if arm == "topk" else ():
            assert row[column] == pytest.approx(other[column], rel=1e-4), column
    theirs = copy.deepcopy(theirs)
    for name in ("rng", "signals", "loss_sum", "unread_loss", "recent"):  # a process's sums lie with its first worker
        for file in (*ours["files"].values(), *theirs["files"].values()):
            file.pop(name, None)
    assert far(ours["files"], theirs["files"]) == []


# ---- evaluation


def by_the_word(model: LSTM, words: Tensor) -> tuple[float, int]:
    """Nats and words of a split: one strand after the other, one word at a time."""
    count = len(words) - 1
    length = math.ceil(count / 32)
    total, seen = 0.0, 0
    for strand in range(32):
        carried = None
        for at in range(strand * length, min((strand + 1) * length, count)):
            logits, carried = model(words[None, at : at + 1], carried)
            total -= logits[0, 0].double().log_softmax(0)[words[at + 1]].item()
            seen += 1
    return total, seen


@pytest.mark.parametrize("words", [2, 3, 32, 33, 34, 400])
def test_perplexity_is_that_of_an_obvious_loop(tmp_path, monkeypatch, words):
    """For any number of workers, more than there are strands, too; every word but the first counts once."""
    monkeypatch.setattr(text, "STRETCH", 5)  # else so few words would be one stretch
    trainer = trainer_for(tmp_path, *DOUBLE, f"dataset.test_words={words}", "dataset.bptt=3")
    model, data, task = trainer.axis.model.eval(), trainer.data, trainer.task
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)  # else all words would be almost equally likely
        expected = {split: by_the_word(model, data.words[split]) for split in ("test", "valid")}
        for workers in (1, 3, 40):
            found = sum(task.totals(model, data, worker, workers) for worker in range(workers))
            assert found[1] == found[3] == words - 1
            columns = task.columns(found.tolist())
            for split, (nats, seen) in expected.items():
                assert seen == words - 1
                assert columns[f"{split}_perplexity"] == pytest.approx(math.exp(nats / seen), rel=1e-12)
            assert columns["test_loss"] == pytest.approx(expected["test"][0] / (words - 1), rel=1e-12)


@pytest.mark.parametrize("words", [2, 31, 32, 33, 34, 65, 1000, 5000])
@pytest.mark.parametrize("workers", [1, 4, 40])
def test_strands_hold_every_word_once(words, workers):
    data = numbered(9, test=words)
    pairs = []
    for worker in range(workers):
        for x, y in data.strands("test", worker, workers):
            assert x.shape == y.shape and x.shape[1] <= 32
            pairs += [(int(a), int(b)) for a, b in zip(x.flatten(), y.flatten(), strict=True) if b != IGNORED]
    assert sorted(pairs) == [(place, place + 1) for place in range(words - 1)]


def test_evaluation_does_not_depend_on_bptt(tmp_path):
    short, long = (trainer_for(tmp_path, f"dataset.bptt={bptt}", "dataset.test_words=400") for bptt in (1, 90))
    assert short.evaluate() == long.evaluate()


@pytest.mark.parametrize("split", ["test", "valid"])
def test_the_split_that_counts(tmp_path, split):
    columns = trainer_for(tmp_path, f"dataset.metric_split={split}").evaluate()
    assert set(columns) == {"test_loss", "perplexity", "test_perplexity", "valid_perplexity"}
    assert columns["perplexity"] == columns[f"{split}_perplexity"]
    assert columns["test_perplexity"] == pytest.approx(math.exp(columns["test_loss"]))
    assert columns["test_perplexity"] != columns["valid_perplexity"]


def test_subset_and_limit_eval():
    whole = SyntheticText(train_words=200, test_words=100).load("", 0, CPU)
    part = SyntheticText(train_words=200, test_words=100, subset=91, limit_eval=7).load("", 0, CPU)
    sizes = {"train": 91, "test": 7, "valid": 7}
    for split, size in sizes.items():
        assert torch.equal(part.words[split], whole.words[split][:size]) and len(whole.words[split]) > size
    assert part.train_size == 3 and part.test_size == 6


def test_untrained_and_trained(tmp_path):
    """From the vocabulary's size to below what counting words would give."""
    options = ["dataset.vocabulary=50", "dataset.noise=0", "dataset.train_words=4000", "dataset.test_words=300"]
    options += ["dataset.bptt=10", "batch_size=8", "model.hidden=32", "model.layers=1", "model.dropout=0", "epochs=3"]
    trainer = trainer_for(tmp_path, *options, "workers=1", "optimizer.lr=2", "clip_norm=0.5")
    assert trainer.evaluate()["perplexity"] == pytest.approx(50, rel=0.05)
    share = torch.bincount(trainer.data.words["train"], minlength=50) / 4000
    unigram = math.exp(-share[trainer.data.words["test"]].log().mean())
    trainer.fit()
    assert trainer.evaluate()["perplexity"] < 0.5 * unigram < 25


def test_nothing_is_run_through_a_model_without_batch_norm_to_recompute_it(tmp_path):
    trainer = fitted(tmp_path, "bn=recompute", "epochs=1")
    calls: list[bool] = []
    trainer.axis.model.register_forward_hook(lambda model, *_: calls.append(model.training))
    trainer.position.step_in_epoch = STEPS
    trainer.evaluate()
    assert calls and not any(calls)


# ---- what is told


def test_lower_is_better(tmp_path, capsys):
    """The best perplexity is the least; a target is reached where it is no longer above."""
    rising = ["schedule.warmup_epochs=4", "optimizer.lr=2", "epochs=5"]  # it learns, and then diverges
    train.run(cfg_for(tmp_path / "first", *rising))
    found = [row["perplexity"] for row in RunFolder(only(tmp_path / "first")).read_metrics()]
    least = found.index(min(found))
    assert 0 < least < 4 and found[-1] == max(found)
    train.run(cfg_for(tmp_path / "second", *rising, f"target={found[least]!r}"))
    folder = RunFolder(only(tmp_path / "second"))
    rows, summary = folder.read_metrics(), folder.read_json("summary.json")
    assert [row["perplexity"] for row in rows] == found
    assert (summary["metric_name"], summary["metric"]) == ("perplexity", found[-1])
    assert summary["best_metric"] == found[least]
    assert summary["payload_bytes_to_target"] == rows[least]["payload_bytes"]
    told = capsys.readouterr().out
    assert f"perplexity {found[-1]:.4g} at the end, {found[least]:.4g} best ({5 * STEPS} steps)" in told
    assert f"perplexity {found[-1]:.4f}" in (folder.path / "run.log").read_text()


def test_not_reached(tmp_path):
    train.run(cfg_for(tmp_path, "target=1.5"))
    assert RunFolder(only(tmp_path)).read_json("summary.json")["seconds_to_target"] is None


def test_the_progress_bar_shows_perplexity(tmp_path):
    trainer = trainer_for(tmp_path)
    shown: list[str] = []

    class Bar(tqdm):
        def refresh(self, *args: object, **kwargs: object) -> None:
            shown.append(str(self.bar_format))

    trainer.progress.bar = Bar(total=1, file=io.StringIO())
    shown.clear()
    train_step = trainer.train_step

    def at_once() -> None:
        train_step()
        trainer.progress._next = 0.0

    trainer.train_step = at_once  # type: ignore[method-assign]
    trainer.fit()
    row = RunFolder(tmp_path).read_metrics()[0]
    assert "perplexity" not in shown[0] and shown[-1].startswith(f"perplexity={row['perplexity']:.4g}, ")


def test_metrics_are_plain_json(tmp_path):
    fitted(tmp_path)
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))


# ---- refused


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["target=-1"], "target must be a number at least 1, got -1; type target=100"),
        (
            ["dataset.limit_eval=1"],
            "dataset.limit_eval must be at least 2, a word and the one after it, got 1; type dataset.limit_eval=10000",
        ),
        (
            ["dataset.subset=4"],
            "dataset.subset must be more than bptt=4 words, got 4; type dataset.subset=400",
        ),
        (
            ["dataset.metric_split=train"],
            "dataset.metric_split must be one of test, valid, got train; type dataset.metric_split=valid",
        ),
        (["dataset.bptt=0"], "dataset.bptt must be an integer of at least 1, got 0; type dataset.bptt=30"),
    ],
)  # fmt: skip
def test_refused(tmp_path, overrides, message):
    with pytest.raises(ConfigError) as refused:
        composed.validated(cfg_for(tmp_path, *overrides))
    assert str(refused.value) == message
