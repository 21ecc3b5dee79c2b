"""The golden runs: the overrides of each, and the values of it that depend on rounding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

IMAGES = [
    *("model=resnet8", "dataset=synthetic", "dataset.size=8", "dataset.train_size=48", "dataset.test_size=32"),
    *("batch_size=4", "epochs=3", "schedule.warmup_epochs=1", "optimizer.lr=0.05"),
]
DIGITS = [
    *("model=resnet8", "dataset=digits", "dataset.subset=48", "dataset.limit_eval=32", "batch_size=4", "epochs=3"),
    *("schedule.warmup_epochs=1", "optimizer.lr=0.05"),
]
TEXT = [
    *("model=lstm_small", "model.hidden=16", "dataset=synthetic_text", "dataset.vocabulary=50", "dataset.bptt=5"),
    *("dataset.train_words=400", "dataset.test_words=60", "batch_size=4", "epochs=3", "schedule.warmup_epochs=1"),
]
ONE_PROCESS = ["device=cpu", "comm=simulated", "workers=4"]
TWO_BY_TWO = ["device=cpu", "comm=gloo", "comm.processes=2", "comm.workers_per_process=2"]
FOUR_BY_ONE = ["device=cpu", "comm=gloo", "comm.processes=4", "comm.workers_per_process=1"]
TWO_BY_ONE = ["device=cpu", "comm=gloo", "comm.processes=2", "comm.workers_per_process=1"]
CRITICAL = ["adaptive.accordion.interval=1", "adaptive.accordion.min_hold=0", "schedule.milestones=[]"]
LATE_DROP = ["epochs=4", "schedule.milestones=[3]"]
SMALL_PERIOD = ["sync.period=3"]
HEAVY_BALL = ["optimizer.nesterov=false"]  # as before schemes brought their momentum
LINEAR = ["schedule.lr_scaling=linear"]  # as before other choices brought theirs


@dataclass(frozen=True)
class Run:
    """One golden run.

    Args:
        typed: the overrides; later ones replace earlier ones.
        on_rounding: names of columns and parts of plans that may differ if sums round differently. Found by trial:
            these differed when only AVX2, or only SSE, was allowed.
        loss_within: relative tolerance of the final test loss; None = not compared, because this training amplifies
            rounding too much for the comparison to prove anything.
        metric_within: tolerance of the metric: absolute for an accuracy, relative for a perplexity; None likewise.
    """

    typed: Sequence[str]
    on_rounding: tuple[str, ...] = ()
    loss_within: float | None = 0.05
    metric_within: float | None = 0.1

    @property
    def overrides(self) -> list[str]:
        """Return the overrides of a run, each key once."""
        return list({item.partition("=")[0]: item for item in self.typed}.values())


def images(*typed: str, **options: Any) -> Run:
    """Return overrides: four workers in this process train a ResNet-8 on tiny images."""
    return Run([*IMAGES, *ONE_PROCESS, *typed], **options)


def text(*typed: str, **options: Any) -> Run:
    """Return overrides: four workers in this process train a language model."""
    return Run([*TEXT, *ONE_PROCESS, *typed], **options)


FITTED = ("codebooks",)
SIZES = ("payload_bytes", "wire_bytes")

COMPRESSORS = {
    "none": images(),
    "fp16": images("compressor=fp16"),
    "bf16": images("compressor=bf16", "compressor.error_feedback=true"),
    "fp8": images("compressor=fp8"),
    "int8": images("compressor=int8"),
    "int8_two_way": images("compressor=int8", "compressor.collective=two_way"),
    "signsgd": images("compressor=signsgd", "optimizer.lr=0.0005", *LINEAR),
    "signum": images("compressor=signum", "optimizer.lr=0.0005", *LINEAR),
    "efsignsgd": images("compressor=efsignsgd", "compressor.block=bucket", "compressor.block_size=256"),
    "onebit": images("compressor=onebit"),
    "distefblocksgd": images("compressor=distefblocksgd", *HEAVY_BALL),
    "qsgd": images("compressor=qsgd"),
    "qsgd_elias": images(
        "compressor=qsgd", "compressor.bits=3", "compressor.entropy=elias", on_rounding=("entropy_bytes",)
    ),
    "qsgdinf_two_way": images("compressor=qsgdinf", "compressor.collective=two_way", "compressor.scope=model"),
    "nuqsgd": images("compressor=nuqsgd", "compressor.error_feedback=true"),
    "trn": images("compressor=trn"),
    "terngrad": images("compressor=terngrad"),
    "natural": images("compressor=natural"),
    "topk": images("compressor=topk", "compressor.density=0.02", "optimizer.nesterov=true"),
    "topk_model": images("compressor=topk", "compressor.scope=model", "compressor.residual_decay=0.95"),
    "topk_two_way": images("compressor=topk", "compressor.collective=two_way", "compressor.density=0.05"),
    "threshold": images("compressor=threshold", "compressor.density=0.05", on_rounding=SIZES),
    "randomk": images("compressor=randomk", "compressor.residual=aggregate"),
    "dgc": images("compressor=dgc", "compressor.density=0.01", "compressor.warmup_epochs=2", "compressor.clip=2"),
    "adacomp": images("compressor=adacomp", on_rounding=SIZES),
    "powersgd": images("compressor=powersgd"),
    "powersgd_aggregate": images(
        *("compressor=powersgd", "compressor.residual=aggregate", "compressor.start_step=3", "compressor.rank=1"),
        *("compressor.min_compression_rate=0", "compressor.orthonormalisation=gramschmidt"),
    ),
    "atomo": images("compressor=atomo", "epochs=2"),
    "demo": images("compressor=demo", "optimizer.momentum=0", "optimizer.lr=0.002", *LINEAR),
    "demo_one_bit": images(
        *("compressor=demo", "compressor.value_bits=1", "compressor.k=8", "optimizer.momentum=0"),
        *("optimizer.lr=0.002", *LINEAR),
    ),
    "fp4": images("compressor=fp4"),
    "topk_chunk": images(
        *("compressor=topk", "compressor.chunk=8", "compressor.value_bits=2", "compressor.clip=median"),
        *("compressor.density=0.05", "compressor.residual_decay=0.95"),
    ),
    "ef21": images("compressor=topk", "compressor.error_feedback=ef21", "optimizer.momentum=0"),
    "acpsgd": images("compressor=acpsgd"),
    "arctopk": images("compressor=arctopk"),
    "gradiveq": images("compressor=gradiveq", "compressor.basis_steps=2", "compressor.period=6"),
    "dion": images("compressor=dion", "optimizer=adamw", "optimizer.lr=0.002", *LINEAR),
    "dion2": images("compressor=dion2", "optimizer=adamw", "optimizer.lr=0.002", *LINEAR),
    "lion": images("compressor=lion", "optimizer=lion", "optimizer.lr=0.002", *LINEAR),
    "onebitadam": images("compressor=onebitadam", "optimizer=adamw", "optimizer.lr=0.002", "compressor.freeze_step=4"),
}

POLICIES = {
    "accordion_powersgd": images(
        "compressor=powersgd", "adaptive=accordion", *CRITICAL, "adaptive.accordion.eta=0.13", *LATE_DROP
    ),
    "accordion_topk": images("compressor=topk", "adaptive=accordion", *CRITICAL, "adaptive.accordion.eta=9"),
    "accordion_bits": images("compressor=qsgd", "adaptive=accordion", *CRITICAL, "adaptive.accordion.statistic=update"),
    "accordion_alq": images(
        *("compressor=qsgd", "adaptive=[accordion,alq]", *CRITICAL, "adaptive.alq.update_at=[0,5]"),
        *("adaptive.alq.stat_samples=2", "adaptive.accordion.weak=3", "adaptive.accordion.strong=2"),
        *("adaptive.alq.fit=mixture",),
        on_rounding=FITTED,
        loss_within=0.25,
    ),
    "alq": images(
        *("compressor=qsgd", "compressor.bits=3", "adaptive=alq", "adaptive.alq.update_at=[0,5]"),
        *("adaptive.alq.stat_samples=3",),
        on_rounding=FITTED,
    ),
    "alqg": images(
        *("compressor=qsgd", "compressor.bits=3", "adaptive=alqg", "adaptive.alqg.update_at=[0,5]", "epochs=2"),
        *("adaptive.alqg.fit=empirical",),
        on_rounding=FITTED,
    ),
    "amq": images(
        *("compressor=nuqsgd", "compressor.bits=3", "adaptive=amq", "adaptive.amq.update_at=[0,5]"),
        *("adaptive.amq.fit=mixture",),
        on_rounding=FITTED,
    ),
    "amqn": images(
        "compressor=qsgdinf", "compressor.bits=3", "adaptive=amqn", "adaptive.amqn.update_at=[2]", on_rounding=FITTED
    ),
    "schedule": images("compressor=powersgd", "adaptive=schedule", "adaptive.schedule.ranges=[[0,1,dense],[1,null,1]]"),
    "adaqs": images("compressor=qsgd", "adaptive=adaqs", "adaptive.adaqs.interval=1", "adaptive.adaqs.factor=1.05"),
    "lgreco": images("compressor=powersgd", "adaptive=lgreco", "adaptive.lgreco.samples=2", "adaptive.lgreco.every=3"),
    "accordion_lgreco": images(
        "compressor=topk", "adaptive=[accordion,lgreco]", *CRITICAL, "adaptive.lgreco.samples=2"
    ),
    "gravac": images(
        *("compressor=topk", "adaptive=gravac", "adaptive.gravac.window=2", "adaptive.gravac.interval=2"),
        *("adaptive.gravac.smallest=0.01", "adaptive.gravac.eps=0.5"),
    ),
    "accordion_batch": images(
        *("adaptive=accordion_batch", "adaptive.accordion_batch.interval=1", "adaptive.accordion_batch.min_hold=0"),
        *("adaptive.accordion_batch.factor=2", "adaptive.accordion_batch.eta=9", "schedule.milestones=[]"),
        "adaptive.accordion_batch.lr_scaling=linear",
    ),
    "adabatch": images("adaptive=adabatch", "adaptive.adabatch.freq=1"),
    "grow_batch": images("adaptive=grow_batch", "adaptive.grow_batch.cap=12", "schedule.milestones=[1,2]"),
    "noise_scale": images("adaptive=noise_scale", "adaptive.noise_scale.every=2", "adaptive.noise_scale.cap=8"),
    "accordion_sync": images(
        *("adaptive=accordion_sync", "adaptive.accordion_sync.interval=1", "adaptive.accordion_sync.min_hold=0"),
        *("adaptive.accordion_sync.strong=4", "adaptive.accordion_sync.eta=9", "schedule.milestones=[]"),
        *HEAVY_BALL,
        loss_within=None,
        metric_within=None,
    ),
    "adacomm": images("adaptive=adacomm", "adaptive.adacomm.every=2", *SMALL_PERIOD, *HEAVY_BALL),
    "qsr": images("adaptive=qsr", "adaptive.qsr.alpha=0.1", "sync.period=2", "schedule.milestones=[1,2]", *HEAVY_BALL),
}

SCHEMES = {
    "local_sgd": images("sync=local_sgd", *SMALL_PERIOD, *HEAVY_BALL),
    "local_sgd_powersgd": images(
        "adaptive=local_sgd", "compressor=powersgd", *SMALL_PERIOD, "sync.buffers=average", *HEAVY_BALL
    ),
    "post_local_sgd": images(
        "sync=post_local_sgd", *SMALL_PERIOD, "schedule.milestones=[1]", "compressor=topk", *HEAVY_BALL
    ),
    "slowmo": images("adaptive=slowmo", "sync.period=4", *HEAVY_BALL),
    "slowmo_qsgd_alq": images(
        *("sync=slowmo", *SMALL_PERIOD, "compressor=qsgd", "adaptive=alq", "adaptive.alq.update_at=[1]"),
        *HEAVY_BALL,
        on_rounding=FITTED,
    ),
    "diloco": images("adaptive=diloco", "sync.period=4", "optimizer=adamw", "optimizer.lr=0.001", *LINEAR),
    "streaming_diloco": images("sync=streaming_diloco", "sync.period=4", "sync.delay=1", *HEAVY_BALL),
    "sparta": images("sync=sparta", "sync.sparta=0.05", *HEAVY_BALL),
    "gossip": images("sync=gossip", "sync.delay=1", *HEAVY_BALL),
    "drawn_times": images(
        *("sync=drawn_times", "sync.rule=k_async", "sync.first=2", "sync.worker_times=[[1,1],[1,2],[2,1],[1,0]]"),
        *HEAVY_BALL,
    ),
    "adpsgd": images("sync=adpsgd", "sync.worker_times=[[1,1],[1,2],[2,1],[1,0]]", *HEAVY_BALL),
    "desloc": images(
        *("sync=desloc", "sync.period=1", "sync.clip=0.01", "compressor=topk", "optimizer=adamw"),
        *("optimizer.lr=0.001", *LINEAR),
    ),
    "noloco": images("sync=noloco", "sync.period=2", *HEAVY_BALL),
    "zerooneadam": images(
        *("sync=zerooneadam", "optimizer=adamw", "optimizer.lr=0.0005", "sync.freeze_step=4", "sync.refreshes=1"),
        *("sync.doubling_steps=2", "sync.longest_period=2"),
    ),
    "overlap_local_sgd": images("sync=overlap_local_sgd", "sync.delay=1", "compressor=int8"),
    "overlap_local_sgd_cocod": images("sync=overlap_local_sgd", "sync.merge=cocod", "sync.beta=0"),
    "hierarchical": images("sync=hierarchical", "sync.groups=[[2,2],[4,4]]", *HEAVY_BALL),
    "hierarchical_topk": images("sync=hierarchical", "sync.groups=[[2,2],[4,4]]", "compressor=topk", *HEAVY_BALL),
}

FORWARD = {
    "text": text(),
    "text_powersgd": text(
        *("compressor=powersgd", "adaptive=accordion", *CRITICAL, "clip_norm=0.4", "optimizer.nesterov=true"),
    ),
    "text_plus_gradient": text("optimizer=sgd_plus_gradient", "compressor=topk", "clip_norm=0.3", "clip_at=after"),
    "text_slowmo": text("sync=slowmo", "sync.period=4", "compressor=fp16", *HEAVY_BALL),
    "digits": Run([*DIGITS, *ONE_PROCESS, "bn=average", "compressor=powersgd"]),
    "micro_batches": images("micro_batch_size=2", "clip_norm=0.5", "bn=recompute", "schedule=cosine"),
    "bn_rank0": images("bn=rank0", "optimizer=adamw", "optimizer.lr=0.001", "schedule=constant", *LINEAR),
    "bn_local": images("bn=local", "channels_last=true"),
    "bfloat16": images("precision=bfloat16", "compressor=powersgd", "epochs=2"),
    "measured": images(
        "compressor=powersgd", "measure.norms=true", "measure.error=true", "network=internet", "epochs=2"
    ),
}

PLACEMENTS = {
    "two_by_two": Run([*IMAGES, *TWO_BY_TWO, "compressor=powersgd", "adaptive=accordion", *CRITICAL]),
    "two_by_two_late": Run(
        [*IMAGES, *TWO_BY_TWO, "compressor=powersgd", "comm.overlap=false", "comm.bucket_cap_mb=0.01"]
    ),
    "two_by_two_hierarchical": Run(
        [*IMAGES, *TWO_BY_TWO, "sync=hierarchical", "sync.groups=[[2,2],[4,4]]", "compressor=topk", *HEAVY_BALL]
    ),
    "two_by_two_text": Run([*TEXT, *TWO_BY_TWO, "compressor=topk", "clip_norm=0.4"]),
    "four_by_one": Run([*IMAGES, *FOUR_BY_ONE, "compressor=topk", "comm.bucket_cap_mb=0.01"]),
    "four_by_one_dense": Run([*IMAGES, *FOUR_BY_ONE, "bn=average"]),
    "four_by_one_overlap_local_sgd": Run([*IMAGES, *FOUR_BY_ONE, "sync=overlap_local_sgd"]),
    "four_by_one_dist_ef": Run([*IMAGES, *FOUR_BY_ONE, "compressor=distefblocksgd", *HEAVY_BALL]),
    "ddp": Run([*IMAGES, *TWO_BY_ONE, "comm.engine=ddp"]),
    "ddp_fp16": Run([*IMAGES, *TWO_BY_ONE, "comm.engine=ddp", "compressor=fp16"]),
}

RUNS = {**COMPRESSORS, **POLICIES, **SCHEMES, **FORWARD, **PLACEMENTS}

# those that start processes or take long, and those much like another one; the kept test leaves them to `-m slow`
SLOW = {
    *(PLACEMENTS.keys() - {"two_by_two", "ddp"}),
    *("int8_two_way", "qsgd_elias", "topk_two_way", "topk_model", "nuqsgd", "signum", "bf16", "trn"),
    *("accordion_lgreco", "accordion_bits", "alqg", "amqn", "slowmo_qsgd_alq", "overlap_local_sgd_cocod"),
    *("hierarchical_topk", "text_plus_gradient", "text_slowmo", "bn_rank0", "bn_local", "measured"),
}
