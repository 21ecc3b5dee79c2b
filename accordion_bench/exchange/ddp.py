"""The yardstick: torch's DistributedDataParallel and its own communication hooks, in our harness."""

import contextlib
import math
import warnings as python_warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.worker_axis import WorkerAxis
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.compressors.base import Compressor, NonFinite
from accordion_bench.compressors.cast import Cast
from accordion_bench.compressors.none import Dense
from accordion_bench.compressors.powersgd import PowerSGD
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.partition import MB
from accordion_bench.options.checks import ConfigError, ValueRefused, show
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import Ladder, Plan
from accordion_bench.processes.placement import Layout
from accordion_bench.sync.every_step import EveryStep

if TYPE_CHECKING:
    from accordion_bench.config.components import Components

CASTS = {torch.float16: default_hooks.fp16_compress_hook, torch.bfloat16: default_hooks.bf16_compress_hook}
UNMEASURED = (
    *("exposed_seconds", "encode_seconds", "comm_seconds", "decode_seconds"),
    *("modelled_seconds", "modelled_exposed_seconds", "seconds_by_bucket"),
)
INSTEAD = "comm.engine=exchange"


class DDPExchange(Exchange):
    """DistributedDataParallel in the place of an exchange: gradients are means already when the backward pass ends.

    Which hook exchanges them follows from the compressor. The ledger is charged with what the hook hands to the
    collectives, bucket by bucket. The waiting is inside the backward pass, so that its time is no column of its own.

    Args:
        axis: its model is wrapped; buffers stay the workers' own.
        cfg: of the run.
        ladder: the compressor's one level.
        comm: of one worker in each of several processes.

    Attributes:
        module: what is to be called in the place of the model, in training.
        hook_state: torch's, of PowerSGD.
        resumable: whether nothing is lost with the process; torch's PowerSGD state cannot be put into new buckets.
    """

    def __init__(self, axis: WorkerAxis, cfg: Config, ladder: Ladder, comm: Comm) -> None:
        node = cfg["compressor"]
        compressor, start_step = bare(node), node.get("start_step", 0)
        super().__init__(compressor, axis.specs, ladder, comm, axis.params[0], cfg["seed"], start_step=start_step)
        self.what = "mean gradient"
        self.resumable = not isinstance(compressor, PowerSGD)
        self._element_size = axis.params[0].element_size()
        cap = cfg["comm"].get("bucket_cap_mb")
        if isinstance(compressor, PowerSGD) and dist.get_backend() == "gloo":  # one bucket
            cap = math.ceil(self.numel * self._element_size / MB) + 1
        with python_warnings.catch_warnings():
            # what is to take the place of broadcast_buffers copies rank 0's buffers at the start
            python_warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
            # the parameters have been broadcast by the trainer
            self.module = DistributedDataParallel(
                axis.model, broadcast_buffers=False, init_sync=False, bucket_cap_mb=cap
            )
        self.hook_state: Any = None
        if isinstance(compressor, Cast):
            self.module.register_comm_hook(None, CASTS[compressor.dtype])
        if isinstance(compressor, PowerSGD):
            self.hook_state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=compressor.rank,
                start_powerSGD_iter=start_step,
                min_compression_rate=compressor.min_compression_rate,
                use_error_feedback=node["error_feedback"],
                warm_start=compressor.warm_start,
                orthogonalization_epsilon=compressor.eps,
                random_seed=cfg["seed"] % 2**32,
            )
            self.module.register_comm_hook(self.hook_state, powerSGD_hook.powerSGD_hook)
        self._calls = 0
        self._shapes: list[list[torch.Size]] = []  # of each bucket's gradients

    def hushed(self) -> contextlib.AbstractContextManager:
        """Around the forward pass of a micro-batch whose gradients are only added up."""
        return self.module.no_sync()

    def __call__(
        self, xs_W: Sequence[Tensor], plan: Plan, step: int, lr: float | Sequence[float], epoch: float = 0
    ) -> list[Tensor]:
        """The gradients as DistributedDataParallel has left them.

        Raises:
            NonFinite: a mean gradient is NaN or infinite, which all workers see.
        """
        self.charge(plan, step, epoch)
        if bad := self.non_finite(xs_W):
            raise NonFinite(f"{bad} is not finite")
        return [x_W[0] for x_W in xs_W]

    def charge(self, plan: Plan, step: int, epoch: float) -> None:
        """Count what the hook has sent in this step's backward pass."""
        self.comm.ledger.paper_count(self.paper_floats(self.levels(plan, step, epoch)))
        if self._calls < 2:  # before its second forward pass it puts the gradients into new buckets, once
            buckets = self.module.reducer._get_zeros_like_grad_buckets()
            self._shapes = [[gradient.shape for gradient in bucket.gradients()] for bucket in buckets]
        compresses = self._calls >= self.start_step
        self._calls += 1
        for shapes in self._shapes:
            for entries in self._messages(shapes, compresses):
                self.comm.ledger.all_reduce(entries)

    def _messages(self, shapes: Sequence[torch.Size], compresses: bool) -> list[int]:
        """Bytes of each all-reduce of one bucket."""
        numel = sum(shape.numel() for shape in shapes)
        if isinstance(self.compressor, Cast):
            return [numel * self.compressor.dtype.itemsize]
        if not (compresses and isinstance(self.compressor, PowerSGD)):
            return [numel * self._element_size]
        dense = p = q = 0
        for shape in shapes:
            n, m = shape[0], shape[1:].numel()  # vectors, too, may have factors in torch's hook
            rank = self.compressor.paying_rank(n, m, self.compressor.rank)
            if rank is None:
                dense += n * m
            else:
                p, q = p + n * rank, q + m * rank
        return [entries * self._element_size for entries in (dense, p, q)]


def bare(node: Config) -> Compressor:
    """The compressor without its wrappers: error feedback is inside torch's hook."""
    off: Config = {key: False for key in ("error_feedback", "worker_momentum") if key in node}
    return wrapped_compressor({**node, **off}).compressor


def warnings(cfg: Config) -> list[str]:
    """What is done that nobody has asked for."""
    one = cfg["comm"].get("engine") == "ddp" and cfg["comm"]["backend"] == "gloo"
    if not one or not isinstance(bare(cfg["compressor"]), PowerSGD):
        return []
    return [
        "compressor=powersgd with comm.engine=ddp gets one bucket for the whole model on gloo, because torch's hook "
        "aborts the process there with more: nothing overlaps with the backward pass"
    ]


def refuse(cfg: Config, where: Layout, parts: "Components") -> None:
    """Refuse what DistributedDataParallel and its hooks cannot do.

    Raises:
        ConfigError: for the first such thing, with what to type instead.
    """
    comm, choices = cfg["comm"], cfg.get("choices", {})
    if where.processes == 1:
        rule = "at least 2 with comm.engine=ddp, which puts one worker into each process"
        raise ConfigError(
            f"comm.processes must be {rule}, got 1; type comm=gloo comm.processes={max(where.workers, 2)}"
        )
    if where.workers_per_process > 1:
        rule = "1 with comm.engine=ddp, which has one worker in each process"
        raise ValueRefused("comm.workers_per_process", rule, where.workers_per_process, 1)
    if comm.get("overlap") is False:
        raise ValueRefused("comm.overlap", "null with comm.engine=ddp, which always overlaps", False, None)
    if not isinstance(parts.sync, EveryStep):
        raise ConfigError(
            f"sync must be every_step with comm.engine=ddp, which exchanges gradients, got {choices.get('sync')}; "
            f"type sync=every_step, or {INSTEAD}"
        )
    for name, policy in parts.policies.items():
        if policy.drives != "batch" or policy.needs_gradients or any(map(policy.needs, range(cfg["epochs"]))):
            raise ConfigError(
                f"adaptive must be none with comm.engine=ddp, whose hooks neither change their levels nor show the "
                f"workers' own gradients, got {name}; type adaptive=none, or {INSTEAD}"
            )
    for key in ("norms", "error"):
        if cfg["measure"][key]:
            rule = "false with comm.engine=ddp, which does not show the workers' own gradients"
            raise ValueRefused(f"measure.{key}", rule, True, False)
    if cfg["clip_norm"] is not None and cfg["clip_at"] != "after":
        rule = "after with comm.engine=ddp, whose gradients have been exchanged when the backward pass ends"
        raise ValueRefused("clip_at", rule, cfg["clip_at"], "after")
    _refuse_options(cfg, where, parts.wrapped.compressor)


def _refuse_options(cfg: Config, where: Layout, wrapped: Compressor) -> None:
    """Refuse compressors without a hook, and options that their hooks do not have."""
    node, compressor = cfg["compressor"], bare(cfg["compressor"])
    feeds_back, start_step = node.get("error_feedback", False), node.get("start_step", 0)
    must: list[tuple[str, bool, str, Any]] = [  # option, whether it fits, rule, what to type instead
        ("worker_momentum", not node.get("worker_momentum"), "false", False),
        ("residual_units", "lr" not in wrapped.owns, "gradient", "gradient"),
        ("residual_decay", getattr(wrapped, "residual_decay", 1) == 1, "1", 1),
        ("scope", node.get("scope", "tensor") == "tensor", "tensor", "tensor"),
    ]
    if isinstance(compressor, Cast):
        must += [
            ("error_feedback", not feeds_back, "false: torch's hook has none", False),
            ("start_step", start_step == 0, "0: torch's hook casts from the first step on", 0),
        ]
    elif isinstance(compressor, PowerSGD):
        aggregate = node.get("residual") == "aggregate" or not feeds_back
        late = start_step >= 2 or not (feeds_back or compressor.warm_start)
        buckets = "at least 2, because torch makes other buckets after the first step, and what it has kept is lost"
        fixed = "qr: torch's hook takes gramschmidt up to rank 2 and qr above"
        must += [
            ("residual", aggregate, "aggregate: torch's hook keeps what the mean has lost", "aggregate"),
            ("start_step", late, buckets, 2),
            ("orthonormalisation", compressor.orthonormalisation == "qr", fixed, "qr"),
        ]
    elif not isinstance(compressor, Dense):
        name = cfg.get("choices", {}).get("compressor", "this one")
        raise ConfigError(
            "compressor must be none, fp16, bf16 or powersgd with comm.engine=ddp, which has hooks for these, got "
            f"{name}; type compressor=bf16, or {INSTEAD}"
        )
    if wrong := [(key, rule, instead) for key, fits, rule, instead in must if not fits]:
        key, rule, _ = wrong[0]
        typed = " ".join(f"compressor.{key}={show(instead)}" for key, _, instead in wrong)
        raise ConfigError(f"compressor.{key} with comm.engine=ddp must be {rule}, got {show(node[key])}; type {typed}")
    if not isinstance(compressor, PowerSGD):
        return
    if where.backend == "gloo" and cfg["comm"].get("bucket_cap_mb") is not None:
        rule = "null: torch's PowerSGD hook aborts the process on gloo with more than one bucket"
        raise ValueRefused("comm.bucket_cap_mb", rule, cfg["comm"]["bucket_cap_mb"], None)
    if cfg["precision"] == "float16":
        rule = "float32 or bfloat16 with comm.engine=ddp and compressor=powersgd: torch's hook would keep an overflow"
        raise ValueRefused("precision", rule, "float16", "bfloat16")
    for key, off in (("checkpoint.every", 0), ("resume", None)):
        group, _, option = key.partition(".")
        value = cfg[group][option] if option else cfg[group]
        if value != off:
            rule = "with comm.engine=ddp and compressor=powersgd, because the state of torch's hook cannot be saved"
            raise ValueRefused(key, f"{show(off)} {rule}", value, off)
