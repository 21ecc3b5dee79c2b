"""DistributedDataParallel in our harness: the same run as ours where it does the same, and refusals elsewhere."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.powersgd import PowerSGD
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer
from tests.kit import composed
from tests.kit.processes import in_two

DDP = ["comm=gloo", "comm.processes=2", "workers=2", "comm.engine=ddp"]
HOOK = [
    *("compressor=powersgd", "compressor.residual=aggregate", "compressor.start_step=2"),
    *("compressor.min_compression_rate=1", "compressor.rank=1"),
]
TEXT = [
    *("model=lstm_small", "model.hidden=16", "dataset=synthetic_text", "dataset.train_words=4000", "batch_size=4"),
    *("epochs=1", "optimizer.lr=0.05", "schedule.lr_scaling=none"),
]
# each is trained by both engines and resumed; only what starts them is in the default suite
MORE = {
    "none in micro-batches and small buckets": ["micro_batch_size=3", "comm.bucket_cap_mb=0.001"],
    "bf16": ["compressor=bf16"],
    "powersgd without memory": [*HOOK, "compressor.error_feedback=false", "compressor.warm_start=false"],
    "powersgd at full rank": [*HOOK, "compressor.rank=64", "compressor.min_compression_rate=0"],
    "clipped": ["clip_norm=0.5", "clip_at=after"],
    "compiled": ["compile=aot_eager", "micro_batch_size=3"],
    "channels last": ["channels_last=true", "comm.bucket_cap_mb=0.001"],
}
CASES = {
    "none": [],
    "fp16": ["compressor=fp16"],
    "powersgd": HOOK,
    "text": [],
    **MORE,
}


def _trained(rank: int, cases: list, folder: str) -> None:
    """Both engines' runs of every case, in one of two processes; saves what rank 0 has at the end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {}
    for name, engine, cfg in cases:
        trainer = Trainer(RunConfig.from_dict(cfg), Comm(1, 2, rank), RunFolder(Path(folder)))
        trainer.begin_epoch()
        for step in range(5):
            if step == 3 and engine == "ddp":
                saved = trainer.save()
            trainer.train_step()
        found[name, engine] = {
            "parameters": [p.detach().clone() for p in trainer.axis.params],
            "loss": float(trainer.axis.loss_sum_W.sum()),
            "ledger": dict(trainer.comm.ledger.counts),
            "predicted": [trainer.exchange.predicted_bytes(StepInfo(trainer.position.plan, step)) for step in range(5)],
            "times": trainer.clock.state_dict()["clock"],
            "sent by the hook": getattr(getattr(trainer.ddp, "hook_state", None), "total_numel_after_compression", 0),
        }
        trainer.comm.agree(trainer.checksum(), "the parameters")
        if engine == "ddp":
            found[name, "resumed"] = _resumed(cfg, rank, folder, saved) if saved else None
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    dist.destroy_process_group()


def _resumed(cfg: dict, rank: int, folder: str, saved: Path) -> list[torch.Tensor]:
    """Parameters after the fifth step, from a checkpoint after the third."""
    trainer = Trainer(RunConfig.from_dict(cfg), Comm(1, 2, rank), RunFolder(Path(folder)))
    trainer.load(saved)
    trainer.begin_epoch()
    for _ in range(2):
        trainer.train_step()
    return [p.detach().clone() for p in trainer.axis.params]


class Found(dict):
    """{(case, engine): what a run of two workers has come to}; `MORE` is trained when one of it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, key: tuple[str, str]) -> dict:
        asked = [name for name in CASES if (name in MORE) == (key[0] in MORE)]
        cases = []
        for name in asked:
            for engine in ("exchange", "ddp"):
                chosen = [*DDP, *CASES[name], f"comm.engine={engine}"]
                cfg = composed.cfg(*TEXT, *chosen) if name == "text" else composed.run(self.folder, *chosen)
                cases.append((name, engine, cfg))
        folder = self.folder / asked[0]
        folder.mkdir()
        in_two(_trained, cases, str(folder))
        self.update(torch.load(folder / "found.pt"))
        return self[key]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return Found(tmp_path_factory.mktemp("ddp"))


def each(wanted: Callable[[str], bool] = lambda case: True) -> list:
    """Cases for parametrize; those of `MORE` are slow."""
    return [pytest.param(case, marks=pytest.mark.slow) if case in MORE else case for case in CASES if wanted(case)]


def apart(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Relative distance of two models."""
    ours_1, theirs_1 = (torch.cat([x.flatten() for x in xs]) for xs in (ours, theirs))
    return float((ours_1 - theirs_1).norm() / theirs_1.norm())


@pytest.mark.parametrize("case", each(lambda case: "compressor=" not in " ".join(CASES[case])))
def test_dense_is_our_dense_run_bit_for_bit(found, case):
    ours, theirs = found[case, "exchange"], found[case, "ddp"]
    assert all(torch.equal(x, y) for x, y in zip(ours["parameters"], theirs["parameters"], strict=True))
    assert ours["loss"] == theirs["loss"]


@pytest.mark.parametrize("case", each())
def test_a_resumed_run_is_the_same_or_there_is_no_checkpoint(found, case):
    """torch's PowerSGD state belongs to buckets that a new process does not have yet."""
    resumed, straight = found[case, "resumed"], found[case, "ddp"]["parameters"]
    if "powersgd" in case:
        assert resumed is None
    else:
        assert all(map(torch.equal, resumed, straight))


@pytest.mark.parametrize(("case", "eps"), [("fp16", 2**-11), pytest.param("bf16", 2**-8, marks=pytest.mark.slow)])
def test_half_precision_is_ours_to_its_rounding(found, case, eps):
    """We divide before the cast, the hook after it."""
    ours, theirs, dense = (found[key]["parameters"] for key in ((case, "exchange"), (case, "ddp"), ("none", "ddp")))
    assert 0 < apart(theirs, dense) < eps
    assert apart(ours, theirs) < eps


@pytest.mark.parametrize("case", each(lambda case: case != "powersgd at full rank"))
def test_the_ledger_is_that_of_our_exchange(found, case):
    ours, theirs = found[case, "exchange"]["ledger"], found[case, "ddp"]["ledger"]
    counts = ("payload", "wire", "dense", "control", "setup", "paper_floats", "uncounted")
    assert [ours[key] for key in counts] == [theirs[key] for key in counts]
    assert theirs["payload"] == 2 * sum(found[case, "ddp"]["predicted"])


def test_messages_are_counted_bucket_by_bucket(found):
    """DistributedDataParallel has one bucket in the first step, and buckets of the asked size from then on."""
    assert found["none", "ddp"]["ledger"]["rounds"] == 5 * 2
    assert found["powersgd", "ddp"]["ledger"]["rounds"] == (2 + 3 * 3) * 2


@pytest.mark.slow
def test_small_buckets_are_messages_of_their_own(found):
    assert found["none in micro-batches and small buckets", "ddp"]["ledger"]["rounds"] > 5 * 2 * 2


@pytest.mark.parametrize("case", each(lambda case: case in ("powersgd", "powersgd without memory")))
def test_the_powersgd_hook_trains(found, case):
    theirs, dense = found[case, "ddp"], found["none", "ddp"]
    assert 1e-4 < apart(theirs["parameters"], dense["parameters"]) < 0.2
    assert theirs["loss"] == pytest.approx(dense["loss"], rel=0.2)
    assert theirs["ledger"]["payload"] < dense["ledger"]["payload"]


@pytest.mark.parametrize("case", each(lambda case: "powersgd" in case))
def test_the_ledger_is_what_the_hook_says_itself(found, case):
    """At a compression rate of 0 it takes vectors for matrices, too, which we do not."""
    theirs = found[case, "ddp"]
    numel = theirs["ledger"]["dense"] // (5 * 2 * 4)
    assert theirs["ledger"]["payload"] == 2 * 4 * (2 * numel + theirs["sent by the hook"])


@pytest.mark.slow
def test_the_powersgd_hook_loses_nothing_at_full_rank(found):
    dense = found["none", "ddp"]["parameters"]
    assert apart(found["powersgd at full rank", "ddp"]["parameters"], dense) < 1e-5
    assert apart(found["powersgd at full rank", "exchange"]["parameters"], dense) < 1e-5


def test_time_inside_the_backward_pass_is_not_divided(found):
    times = found["none", "ddp"]["times"]
    assert not any(part in key for key in times for part in ("comm", "encode", "decode", "wait", "ready"))


REFUSED = {
    "compressor=topk": "hooks for these, got topk; type compressor=bf16, or comm.engine=exchange",
    "compressor=fp16 compressor.error_feedback=true": "torch's hook has none, got true; .*error_feedback=false",
    "compressor=bf16 compressor.start_step=3": "casts from the first step on, got 3; type compressor.start_step=0",
    "compressor=fp16 +compressor.worker_momentum=true": "worker_momentum .* type compressor.worker_momentum=false",
    "compressor=fp16 +compressor.scope=model": "scope .* must be tensor, got model; type compressor.scope=tensor",
    "compressor=powersgd": "got local; type compressor.residual=aggregate compressor.start_step=2$",
    "compressor=powersgd compressor.residual=aggregate": "got 0; type compressor.start_step=2",
    "compressor=powersgd compressor.error_feedback=false compressor.warm_start=true": "type compressor.start_step=2",
    " ".join([*HOOK, "compressor.orthonormalisation=gramschmidt"]): "type compressor.orthonormalisation=qr",
    " ".join([*HOOK, "comm.bucket_cap_mb=5"]): "aborts the process .* type comm.bucket_cap_mb=null",
    " ".join([*HOOK, "checkpoint.every=5"]): "cannot be saved, got 5; type checkpoint.every=null",
    " ".join([*HOOK, "adaptive=accordion"]): "got accordion; type adaptive=none, or comm.engine=exchange",
    "adaptive=noise_scale": "got noise_scale; type adaptive=none",
    "adaptive=accordion_batch": "got accordion_batch; type adaptive=none",
    "sync=local_sgd": "got local_sgd; type sync=every_step, or comm.engine=exchange",
    "comm.overlap=false": "always overlaps, got false; type comm.overlap=null",
    "measure.norms=true": "got true; type measure.norms=false",
    "measure.error=true": "got true; type measure.error=false",
    "clip_norm=1": "clip_at must be after .*, got null; type clip_at=after",
    "workers=4 comm.workers_per_process=2": "got 2; type comm.workers_per_process=1",
    "comm=simulated comm.processes=1 workers=3": "got 1; type comm=gloo comm.processes=3",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_refused_in_one_sentence(tmp_path, overrides):
    with pytest.raises(ConfigError, match=REFUSED[overrides]):
        composed.validated(composed.run(tmp_path, *DDP, *overrides.split()))


@pytest.mark.parametrize("overrides", ["", " ".join(HOOK), "adaptive=adabatch", "bn=local", "comm.bucket_cap_mb=2"])
def test_allowed(tmp_path, overrides):
    composed.validated(composed.run(tmp_path, *DDP, *overrides.split()))


def test_what_is_done_about_gloo_and_powersgd_is_said(tmp_path):
    (warning,) = composed.warnings(composed.run(tmp_path, *DDP, *HOOK), set())
    assert "one bucket" in warning


def test_torchs_rule_of_what_is_compressed():
    """Ours, except that torch takes a vector for a matrix of one column."""
    for shape in [(8, 8), (16, 4, 3, 3), (10, 8), (5, 1), (300, 2)]:
        for rank in (1, 2, 4):
            for rate in (0.0, 0.5, 1.0, 2.0):
                spec = TensorSpec("x", shape)
                ours = PowerSGD(rank=rank, min_compression_rate=rate).factor_rank(spec, rank)
                n, m = spec.matrix
                assert (ours is not None) == powerSGD_hook._should_compress(n, m, min(n, m, rank), rate)[0]


def test_that_nothing_can_be_saved_is_told_once(tmp_path):
    def told(*options: str) -> int:
        cfg = composed.run(tmp_path, *DDP, *HOOK, *options)
        return sum("saves no checkpoint" in warning for warning in composed.warnings(cfg, set()))

    assert told("checkpoint.every=null") == 1
    assert told("checkpoint.every=0") == 0
