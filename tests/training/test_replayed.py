"""A replayed step computes what an eager one does, to the bit, and what cannot be replayed stays eager and says why."""

import contextlib
import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.graphs import CapturedWork, CaptureStage, Graphs, NotCapturable, eagerly
from accordion_bench.conformance.placement import TapeGraphs
from accordion_bench.datasets import token_windows
from accordion_bench.forward import task
from accordion_bench.options.conf_dir import yaml_files
from accordion_bench.training import replayed
from accordion_bench.training.replayed import Replayed, alike
from tests.kit import taped
from tests.kit.taped import PLAIN, pair

BYTES = [
    *("model=gpt_nano", "model.layers=1", "model.width=16", "model.heads=2", "dataset=pydocs_bytes", "epochs=3"),
    *("dataset.context=8", "dataset.subset=200", "dataset.limit_eval=300", "batch_size=4", "optimizer=adamw"),
]
OPTIONS = {
    **{name: ["optimizer=adamw"] for name in ("dion", "dion2")},
    "lion": ["optimizer=lion"],
    "onebitadam": ["optimizer=adamw", "schedule.warmup_epochs=0"],
}


class Drops(nn.Module):
    """BatchNorm and dropout."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(in_channels, 4, 3), nn.BatchNorm2d(4)
        self.last = nn.Linear(4 * 36, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.norm(self.first(x)).relu().flatten(1), 0.3, self.training))


class Reads(Drops):
    """Its forward pass reads a number of the device."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2 if x.abs().max().item() > 1e9 else x)


class DrawsOutside(Drops):
    """Its forward pass draws from NumPy, which a replay does not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * float(np.random.rand()))


def model(cls: type[nn.Module]) -> list[str]:
    return [f"model._target_=tests.training.test_replayed.{cls.__name__}", "~model.depth"]


class TestSameBits:
    @pytest.mark.sample(3)
    @pytest.mark.parametrize(
        "overrides",
        [
            [],
            ["precision=bfloat16"],
            ["micro_batch_size=2"],
            ["precision=float16"],
            ["optimizer=adamw", "clip_norm=0.5"],
            ["sync=local_sgd", "sync.period=3"],
            ["sync=slowmo", "sync.period=2"],
            ["compressor=powersgd", "compressor.min_compression_rate=0"],
            ["compressor=demo", "compressor.look_ahead=true"],
            ["measure.norms=true", "bn=recompute"],
            ["channels_last=true"],
        ],
        ids=" ".join,
    )
    def test_over_epochs_on_a_cpu(self, tmp_path, overrides):
        """With dropout, BatchNorm, rates that change, a shorter last batch, evaluation in between."""
        with pair(tmp_path, *model(Drops), *overrides, "dataset.train_size=76") as both:
            both.step(16)
            assert both.same()
            assert both.tape.replayed["workers"] > 16 and "workers" not in both.taped.step.replayed.eager

    @pytest.mark.sample(4)
    @pytest.mark.parametrize("name", sorted(yaml_files("compressor")))
    def test_of_every_compressor_on_a_device(self, tmp_path, name):
        options = [*PLAIN, f"compressor={name}", *OPTIONS.get(name, [])]
        with pair(tmp_path, *options, device="meta") as both:
            traits = both.taped.exchange.compressor.traits
            both.step(12 * traits.cycle)  # each turn has graphs of its own
            assert both.same()
            assert both.tape.replayed["workers"] >= 2 * 8
            replays = traits.replays
            assert ("exchange" in both.tape.replayed) == replays == ("exchange" not in both.taped.step.replayed.eager)
            assert both.tape.replayed["update"] >= (3 if replays else 6)
            # once for each turn, and once more where eager exchanges had happened to leave updates in one place
            captured, before = dict(both.tape.captured), both.tape.replayed["update"]
            assert captured["update"] <= 2 * traits.cycle
            both.step(2 * traits.cycle)  # from here on nothing more is captured
            assert all(both.tape.captured.get(part) == captured.get(part) for part in ("workers", "exchange", "update"))
            assert both.tape.replayed["update"] == before + 2 * traits.cycle

    @pytest.mark.parametrize("name", ["powersgd", "topk"])
    def test_levels_that_change(self, tmp_path, name):
        """Each decision has an exchange of its own; the passes and the update go on."""
        options = ["compressor.min_compression_rate=0"] if name == "powersgd" else []
        with pair(tmp_path, *PLAIN, f"compressor={name}", "adaptive=accordion", *options, device="meta") as both:
            for levels in (0, 1, 0):
                for trainer in (both.eager, both.taped):
                    plan = trainer.position.plan
                    trainer.position.plan = replace(plan, levels=dict.fromkeys(plan.levels, levels))
                both.step(7)
                assert both.same()
            assert both.tape.captured["exchange"] >= 2 and both.tape.captured["workers"] == 2
            assert "exchange" not in both.taped.step.replayed.eager

    def test_one_process_and_one_worker(self, tmp_path):
        with pair(tmp_path, *model(Drops), workers=1) as both:
            both.step(12)
            assert both.same() and both.tape.replayed["exchange"] >= 4

    def test_a_checkpoint_between_replays_is_that_of_an_eager_run(self, tmp_path):
        options = ["compressor=powersgd", "compressor.min_compression_rate=0", "optimizer=adamw"]
        with pair(tmp_path, *model(Drops), *options) as both:
            both.step(9)
            whole, taped_ = ([owner.state_dict() for owner in t.owners.of_all] for t in (both.eager, both.taped))
            for one, other in zip(whole[:4], taped_[:4], strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
            rest = taped.trainer_for(tmp_path, TapeGraphs(), *model(Drops), *options, device="cpu")
            for owner, state in zip(rest.owners.of_all, copy.deepcopy(taped_), strict=True):
                owner.load_state_dict(state)
            for mine, theirs in zip(rest.owners.of_each, both.taped.owners.of_each, strict=True):
                for row in range(2):
                    mine.load_worker_state(row, copy.deepcopy(theirs.worker_state(row)))
            rest.step.feed.begin_epoch(0, range(9, 12))
            with contextlib.closing(rest.progress):
                for _ in range(3):
                    rest.train_step()
            both.step(3)
            assert all(torch.equal(x, y) for x, y in zip(rest.axis.shared, both.eager.axis.shared, strict=True))

    @pytest.mark.parametrize(
        "overrides",
        [
            [*model(Drops), "channels_last=true"],
            [*model(Drops), "bn=local", "sync=local_sgd", "sync.period=3"],
            [*model(Drops), "bn=recompute", "dataset.validation=20"],
            BYTES,
        ],
        ids=" ".join,
    )
    def test_of_evaluations(self, tmp_path, monkeypatch, overrides):
        """Of whole and of shorter batches, after each of two epochs; the consensus may lie elsewhere each time."""
        monkeypatch.setattr(task, "EVAL_BATCH", 5)
        monkeypatch.setattr(token_windows, "EVALUATED_AT_ONCE", 40)
        images = [] if overrides is BYTES else ["dataset.test_size=46"]
        with pair(tmp_path, *overrides, *images) as both:
            for _ in range(2):
                both.step(3)
                assert both.eager.evaluate() == both.taped.evaluate()
            assert both.tape.replayed["evaluation"] >= 4 and "evaluation" not in both.taped.step.replayed.eager
            assert both.taped.axis.model.training is False and both.same()

    @pytest.mark.parametrize("period", [6, 7])
    def test_a_momentum_that_is_reset(self, tmp_path, period):
        """After each averaging SlowMo's workers begin with a new one: the graph of the old one must not be replayed."""
        with pair(tmp_path, *PLAIN, "sync=slowmo", f"sync.period={period}", "dataset.train_size=240") as both:
            both.step(3 * period + 2)
            assert both.same() and both.tape.replayed["update"] >= 4 and "update" not in both.taped.step.replayed.eager


class TestRequests:
    def test_what_a_replayed_step_asks_of_the_device(self, tmp_path):
        """W passes, the exchange, the update; beside them the numbers of the samples go there, and a look is joined."""
        with pair(tmp_path, *PLAIN, device="meta", workers=4) as both:
            both.step(14)
            for trainer, launches in ((both.eager, 60), (both.taped, 4 + 4)):
                both.counts.reset()
                trainer.train_step()
                asked = sum(both.counts.launches.values())
                assert asked >= launches if trainer is both.eager else asked <= launches
                assert both.counts.waits == {"tolist": 1}
            assert both.counts.launches["graph"] == 4 + 2

    def test_counts_and_rounds_are_those_of_eager_steps(self, tmp_path):
        with pair(tmp_path, *PLAIN, "compressor=powersgd", "compressor.min_compression_rate=0") as both:
            both.step(12)
            eager, counted = (
                {part.name: n for part, n in t.clock.totals.items() if not isinstance(part, str)}
                for t in (both.eager, both.taped)
            )
            assert eager == counted and len(eager) > 3
            lengths = [{part.name: s.count for part, s in t.clock.series.items()} for t in (both.eager, both.taped)]
            assert lengths[0] == lengths[1]


class TestStaysEager:
    def test_a_model_that_reads_a_number(self, tmp_path, capsys):
        with pair(tmp_path, *model(Reads)) as both:
            both.step(8)
            for _ in range(3):
                assert both.eager.evaluate() == both.taped.evaluate()
            assert both.same() and not {"workers", "evaluation"} & both.tape.replayed.keys()
        told = capsys.readouterr().err
        for work in ("workers", "evaluation"):
            assert told.count(f"not replayed: {work}, because the host reads a number of the device") == 1

    def test_a_model_that_draws_from_numpy(self, tmp_path, capsys):
        """The replay has the number of its capture: the comparison with an eager step finds it."""
        with pair(tmp_path, *model(DrawsOutside)) as both:
            both.step(8)
            assert "differs" in both.taped.step.replayed.eager["workers"]
        assert capsys.readouterr().err.count("differs from the same work run eagerly") == 1

    def test_a_recurrent_network(self, tmp_path, capsys):
        with pair(tmp_path, "model=lstm", "dataset=synthetic_text") as both:
            for work in ("workers", "evaluation"):
                assert "continues from the state of the previous batch" in both.taped.step.replayed.eager[work]
        assert not capsys.readouterr().err

    def test_work_that_never_comes_back_is_given_up(self):
        do = Replayed(TapeGraphs(), [])
        for key in range(replayed.CHANGING + 2):
            do(CapturedWork("update", key, [CaptureStage(lambda: None, lambda: torch.zeros(1))], list))
        assert "its key changed 1000 times in a row" in do.eager["update"]


class TestWork:
    def work(self, xs: list[Tensor], begin=lambda: None) -> CapturedWork:
        def run() -> Tensor:
            xs[0].mul_(2).add_(1)
            return xs[0].sum()

        return CapturedWork("w", 0, [CaptureStage(begin, run)], lambda: xs)

    def test_a_capture_computes_nothing_and_a_replay_what_was_captured(self):
        x, eager = torch.arange(3.0), torch.arange(3.0)
        do = Replayed(TapeGraphs(), [])
        for _ in range(8):
            assert do(self.work([x])) == eagerly(self.work([eager])) and torch.equal(x, eager)
        assert do.graphs.replayed == {"w": 5}  # the fourth to the eighth, of which the first two are compared

    def test_what_seeds_within_work_is_not_captured(self):
        do = Replayed(TapeGraphs(), [])
        work = CapturedWork("w", 0, [CaptureStage(lambda: None, lambda: torch.manual_seed(3) and torch.rand(2))], list)
        first = [do(work) for _ in range(6)]
        assert all(torch.equal(x, first[0]) for x in first) and "it seeds a generator" in do.eager["w"]

    def test_a_capture_that_fails_charges_nothing(self):
        """What it had counted before the host read is counted by the eager work alone."""
        ledger, x = Comm(2).ledger, torch.ones(1)

        def run() -> float:
            ledger.all_reduce(100)
            return float(x.sum().item())

        do = Replayed(TapeGraphs(), [ledger])
        for _ in range(6):
            do(CapturedWork("exchange", 0, [CaptureStage(lambda: None, run)], list))
        assert ledger.counts["payload"] == 6 * 200 and "reads a number" in do.eager["exchange"]

    def test_the_least_used_captures_are_dropped(self, monkeypatch):
        monkeypatch.setattr(replayed, "KEPT", {"w": 2})
        do, xs = Replayed(TapeGraphs(), []), [torch.zeros(1)]
        for key in (1, 2, 3, 1):
            for _ in range(4):
                do(CapturedWork("w", key, [CaptureStage(lambda: None, lambda: xs[0].add_(1))], lambda: xs))
        assert xs[0] == 16 and len(do._kept["w"]) == 2

    def test_what_was_seen_is_remembered_of_the_latest_keys(self, monkeypatch):
        monkeypatch.setattr(replayed, "CHANGING", 20)
        do, xs = Replayed(TapeGraphs(), []), [torch.zeros(1)]
        for key in range(100):
            for own in (0, 0, key):
                do(CapturedWork("w", own, [CaptureStage(lambda: None, lambda: xs[0].add_(1))], lambda: xs))
        assert xs[0] == 300 and len(do._seen["w"]) <= 20 and "w" not in do.eager

    def test_a_cpu_captures_nothing(self):
        with pytest.raises(NotCapturable):
            Graphs().capture(lambda: None, "w")
        x = torch.zeros(1)
        do = Replayed(Graphs(), [Comm(2).ledger])
        for _ in range(6):
            do(self.work([x]))
        assert not do._kept and x == 63


def test_alike_allows_another_order_of_additions_and_no_other_numbers():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert alike(x, x) and alike(x * (1 + 1e-6), x)
    assert not alike(x * 1.01, x) and not alike(x[:5], x) and not alike(x.double(), x)
    assert not alike(torch.tensor([1]), torch.tensor([2])) and not alike(x * float("nan"), x)
