"""The yardstick: torch's DistributedDataParallel and its own communication hooks, in our harness."""

import contextlib
import math
import warnings as python_warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accordion_bench.comm.worker_axis import WorkerAxis
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.compressors.cast import Cast
from accordion_bench.compressors.compressor import Compressor
from accordion_bench.compressors.powersgd import PowerSGD
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.foreign_hook import ForeignHook, can_be_saved
from accordion_bench.exchange.partition import MB
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import Ladder
from accordion_bench.position import StepInfo

CASTS = {torch.float16: default_hooks.fp16_compress_hook, torch.bfloat16: default_hooks.bf16_compress_hook}
TORCHS_POWERSGD = (powerSGD_hook.powerSGD_hook, powerSGD_hook.batched_powerSGD_hook)
UNMEASURED = (
    *("exposed_seconds", "encode_seconds", "comm_seconds", "decode_seconds"),
    *("modelled_seconds", "modelled_exposed_seconds", "seconds_by_bucket", "seconds_by_phase"),
)


class DDPExchange(Exchange):
    """DistributedDataParallel in the place of an exchange: gradients are means already when the backward pass ends.

    Which hook exchanges them follows from the compressor. The ledger is charged with what the hook hands to the
    collectives, bucket by bucket; what a third-party hook sends is not known, so that the ledger is not complete. The
    waiting is inside the backward pass, so that its time is no column of its own.

    Args:
        axis: of one worker in each of several processes; its model is wrapped, buffers stay the workers' own.
        node: the compressor's options.
        ladder: the compressor's one level.
        seed: for keyed draws.
        bucket_cap_mb: MB of gradients that are exchanged together; None = torch's 1, then 25.
        hook: a third-party hook, in the place of the compressor's; None = the compressor's.

    Attributes:
        module: what is to be called in the place of the model, in training.
        hook_state: torch's, of PowerSGD; or the foreign hook's.
        resumable: whether nothing is lost with the process; torch's PowerSGD state cannot be put into new buckets, and
            a foreign one may have no `state_dict`.
    """

    waited_in_backward = True
    alike = False

    def __init__(
        self,
        axis: WorkerAxis,
        node: Config,
        ladder: Ladder,
        seed: int,
        bucket_cap_mb: float | None = None,
        hook: ForeignHook | None = None,
    ) -> None:
        comm, compressor, start_step = axis.comm, bare(node), node.get("start_step", 0)
        super().__init__(compressor, axis.specs, ladder, comm, axis.like, SendOptions(seed, start_step=start_step))
        self.what = "mean gradient"
        self._element_size = axis.like.element_size()
        cap = bucket_cap_mb
        if wants_one_bucket(compressor, hook) and dist.get_backend() == "gloo":
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
            self.module.register_comm_hook(None, CASTS[compressor.narrow])
        if isinstance(compressor, PowerSGD):
            self.hook_state = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=compressor.rank,
                start_powerSGD_iter=start_step,
                min_compression_rate=compressor.min_compression_rate,
                use_error_feedback=node["error_feedback"],
                warm_start=compressor.warm_start,
                orthogonalization_epsilon=compressor.eps,
                random_seed=seed % 2**32,
            )
            self.module.register_comm_hook(self.hook_state, powerSGD_hook.powerSGD_hook)
        self.foreign = hook is not None
        if hook is not None:
            self.hook_state = hook.register(self.module)
            comm.ledger.complete = False
        self.resumable = self.hook_state is None or (self.foreign and can_be_saved(self.hook_state))
        self._calls = 0
        self._shapes: list[list[torch.Size]] = []  # of each bucket's gradients

    def no_sync(self) -> contextlib.AbstractContextManager:
        """Around the forward pass of a micro-batch whose gradients are only added up."""
        return self.module.no_sync()

    def __call__(self, xs_W: Sequence[Tensor], info: StepInfo) -> list[Tensor]:
        """The gradients as DistributedDataParallel has left them.

        Raises:
            NonFinite: a mean gradient is NaN or infinite, which all workers see.
        """
        self.charge(info)
        self.refuse_non_finite(xs_W)
        return [x_W[0] for x_W in xs_W]

    def charge(self, info: StepInfo) -> None:
        """Count what the hook has sent in this step's backward pass."""
        if self.foreign:
            return
        self.comm.ledger.paper_count(self.paper_floats(self.levels(info)))
        if self._calls < 2:  # before its second forward pass it puts the gradients into new buckets, once
            buckets = self.module.reducer._get_zeros_like_grad_buckets()
            self._shapes = [[gradient.shape for gradient in bucket.gradients()] for bucket in buckets]
        compresses = self._calls >= self.start_step
        self._calls += 1
        for shapes in self._shapes:
            for entries in self._messages(shapes, compresses):
                self.comm.ledger.all_reduce(entries)

    def worker_state(self, row: int) -> dict[str, Any]:
        """What the foreign hook's state gives for checkpoints; nothing where there is none."""
        kept = self.foreign and self.hook_state is not None
        return {"hook_state": self.hook_state.state_dict()} if kept else {}

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        """Continue from `worker_state()`."""
        if "hook_state" in state:
            self.hook_state.load_state_dict(state["hook_state"])

    def _messages(self, shapes: Sequence[torch.Size], compresses: bool) -> list[int]:
        """Bytes of each all-reduce of one bucket."""
        numel = sum(shape.numel() for shape in shapes)
        if isinstance(self.compressor, Cast):
            return [numel * self.compressor.narrow.itemsize]
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


def wants_one_bucket(compressor: Compressor, hook: ForeignHook | None) -> bool:
    """Whether torch's PowerSGD is run, which starts collectives in callbacks: gloo aborts with several buckets."""
    return isinstance(compressor, PowerSGD) or (hook is not None and hook.function() in TORCHS_POWERSGD)


def bare(node: Config) -> Compressor:
    """The compressor without its wrappers: error feedback is inside torch's hook."""
    off: Config = {key: False for key in ("error_feedback", "worker_momentum") if key in node}
    return wrapped_compressor({**node, **off}).compressor
