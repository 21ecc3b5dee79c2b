"""DistributedDataParallel with hooks of torch or third parties, as a reference in place of an `Exchange`."""

import contextlib
import inspect
import math
import re
import warnings as python_warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accordion_bench.comm.worker_axis import WorkerAxis
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.compressors.compressor import Compressor
from accordion_bench.compressors.powersgd import PowerSGD
from accordion_bench.compressors.uncoded import Cast
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.partition import MB
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.instantiate import Config, imported
from accordion_bench.plan import Ladder
from accordion_bench.position import StepInfo

PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")
EXAMPLE = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks:fp16_compress_hook"
EXAMPLE_OF_STATE = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook:PowerSGDState"
SAVED_BY = ("state_dict", "load_state_dict")


@dataclass(frozen=True)
class ForeignHook:
    """A hook and the factory of its state, by import path."""

    # `package.module:function`; called for each bucket as function(state, bucket), returns a Future of the mean
    # gradients of the bucket
    path: str
    # `package.module:factory`; called once in each process as factory(process_group, **options), with the group of all
    # workers; None = the state is None
    state_path: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of the factory

    def function(self) -> Callable:
        """Return the hook; ConfigError if it cannot be imported, or does not take a state and a bucket."""
        found = _callable("comm.hook", self.path, "function", EXAMPLE)
        named = hasattr(found, "__qualname__")  # required by torch
        if not named or list(_parameters(found))[1:2] != ["bucket"] or not _takes(found, None, None):
            rule = "a function of two arguments, state and bucket, the second of this name"
            raise ConfigError(f"comm.hook must be {rule}, got {self.path}; type comm.hook={EXAMPLE}, say")
        return found

    def factory(self) -> Callable | None:
        """Return the state's factory, or None; ConfigError if it cannot be imported, or does not take the options."""
        if self.state_path is None:
            return None
        found = _callable("comm.hook_state", self.state_path, "factory", EXAMPLE_OF_STATE)
        if not _takes(found, None, **self.options):
            known = list(_parameters(found))[1:]
            takes = f"takes {', '.join(known)}" if known else "takes none"
            raise ConfigError(
                f"comm.hook_options must be what {self.state_path} takes beside the process group, got "
                f"{checks.show(dict(self.options))}, and it {takes}; type comm.hook_options=null, or others"
            )
        return found

    def register(self, module: DistributedDataParallel) -> Any:
        """Register the hook, and return its new state; ConfigError if the factory or the module refuses."""
        state = self._new_state()
        try:
            module.register_comm_hook(state, self.function())
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"comm.hook must be one that DistributedDataParallel takes, got {self.path}: "
                f"{str(error).rstrip('.')}; type comm.hook={EXAMPLE}, say"
            ) from error
        return state

    def _new_state(self) -> Any:
        make = self.factory()
        if make is None:
            return None
        try:
            return make(dist.group.WORLD, **self.options)
        except Exception as error:
            options = checks.show(dict(self.options))
            raise ConfigError(
                f"comm.hook_options must be accepted by {self.state_path}, got {options}: {error}; type others"
            ) from error


def refuse_hook(path: object, state_path: object, options: object) -> None:
    """Check the options of a hook, its state and the state's options, whatever the rest of the run is; None = unset."""
    if path is not None:
        _parts("comm.hook", path, "function", EXAMPLE)
    if state_path is not None and path is None:
        raise ValueRefused("comm.hook_state", "{null} without comm.hook", state_path, None)
    if state_path is not None:
        _parts("comm.hook_state", state_path, "factory", EXAMPLE_OF_STATE)
    if not isinstance(options, Mapping | None):
        raise ValueRefused("comm.hook_options", "{null} or a group of options", options, None)
    if options is not None and state_path is None:
        raise ValueRefused("comm.hook_options", "{null} without comm.hook_state", options, None)


def can_be_saved(state: Any) -> bool:
    """Whether a hook's state, or its class, has `state_dict` and `load_state_dict`."""
    return all(callable(getattr(state, name, None)) for name in SAVED_BY)


def _parts(key: str, path: object, what: str, example: str) -> tuple[str, str, str]:
    """Split a path into module and name, and return them with the rule for error messages."""
    rule = f"{key} must be package.module:{what} of a module that can be imported, got {checks.show(path)}"
    named = PATH.fullmatch(path) if isinstance(path, str) else None
    if named is None:
        raise ConfigError(f"{rule}; type {key}={example}, say")
    return named[1], named[2], rule


def _callable(key: str, path: str, what: str, example: str) -> Callable:
    module, name, rule = _parts(key, path, what, example)
    found = imported(module, name, rule, f"{key}={example}, say")
    if not callable(found):
        raise ConfigError(f"{key} must name what can be called, got {path}, a {type(found).__name__}; type {key}=null")
    return found


def _parameters(called: Callable) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a callable by name; empty if Python cannot inspect it, such as some C functions."""
    try:
        return inspect.signature(called).parameters
    except ValueError:
        return {}


def _takes(called: Callable, *arguments: Any, **options: Any) -> bool:
    """Whether a callable accepts these arguments; True if Python cannot inspect it."""
    try:
        inspect.signature(called).bind(*arguments, **options)
    except TypeError:
        return False
    except ValueError:
        pass
    return True


CASTS = {torch.float16: default_hooks.fp16_compress_hook, torch.bfloat16: default_hooks.bf16_compress_hook}
TORCHS_POWERSGD = (powerSGD_hook.powerSGD_hook, powerSGD_hook.batched_powerSGD_hook)
UNMEASURED = (
    *("exposed_seconds", "encode_seconds", "comm_seconds", "decode_seconds"),
    *("modelled_seconds", "modelled_exposed_seconds", "seconds_by_bucket", "seconds_by_phase"),
)


class DDPExchange(Exchange):
    """DistributedDataParallel in place of an exchange: gradients are already means at the end of the backward pass.

    The compressor determines the hook that exchanges them. The ledger is charged with the hook's payload, bucket by
    bucket. The payload of a third-party hook is unknown, so that the ledger is then incomplete. The wait is part of the
    backward pass, so that its time is not measured separately.

    Args:
        axis: of one worker in each of several processes; its model is wrapped, and each worker keeps its own buffers.
        node, ladder: the compressor's options, and its one level.
        bucket_cap_mb: MB of gradients per bucket; None = torch's 1, then 25.
        hook: a third-party hook, in place of the compressor's; None = the compressor's.

    Attributes:
        module: module to call in place of the model during training.
        resumable: whether a checkpoint restores the whole state; torch's PowerSGD state cannot be moved to new buckets,
            and a third-party state may have no `state_dict`.
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
            # the replacement of broadcast_buffers would copy rank 0's buffers at the start
            python_warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
            # the trainer has already broadcast the parameters
            self.module = DistributedDataParallel(
                axis.model, broadcast_buffers=False, init_sync=False, bucket_cap_mb=cap
            )
        self.hook_state: Any = None  # torch's of PowerSGD, or the third-party hook's
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
        """Return a context for the forward pass of a micro-batch whose gradients are only accumulated."""
        return self.module.no_sync()

    def __call__(self, xs_W: Sequence[Tensor], info: StepInfo) -> list[Tensor]:
        """Return the averaged gradients; NonFinite on all workers if one is NaN or infinite."""
        self.charge(info)
        self.refuse_non_finite(xs_W)
        return [x_W[0] for x_W in xs_W]

    def charge(self, info: StepInfo) -> None:
        """Charge the ledger with the hook's payload in this step's backward pass."""
        if self.foreign:
            return
        self.comm.ledger.paper_count(self.paper_floats(self.levels(info)))
        if self._calls < 2:  # DDP rebuilds its buckets once, before the second forward pass
            buckets = self.module.reducer._get_zeros_like_grad_buckets()
            self._shapes = [[gradient.shape for gradient in bucket.gradients()] for bucket in buckets]
        compresses = self._calls >= self.start_step
        self._calls += 1
        for shapes in self._shapes:
            for entries in self._messages(shapes, compresses):
                self.comm.ledger.all_reduce(entries)

    def worker_state(self, row: int) -> dict[str, Any]:
        """Return the third-party hook's `state_dict` for checkpoints; empty if there is none."""
        kept = self.foreign and self.hook_state is not None
        return {"hook_state": self.hook_state.state_dict()} if kept else {}

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        """Restore the result of `worker_state()`."""
        if "hook_state" in state:
            self.hook_state.load_state_dict(state["hook_state"])

    def _messages(self, shapes: Sequence[torch.Size], compresses: bool) -> list[int]:
        numel = sum(shape.numel() for shape in shapes)
        if isinstance(self.compressor, Cast):
            return [numel * self.compressor.narrow.itemsize]
        if not (compresses and isinstance(self.compressor, PowerSGD)):
            return [numel * self._element_size]
        dense = p = q = 0
        for shape in shapes:
            n, m = shape[0], shape[1:].numel()  # torch's hook may also factorise vectors
            rank = self.compressor.paying_rank(n, m, self.compressor.rank)
            if rank is None:
                dense += n * m
            else:
                p, q = p + n * rank, q + m * rank
        return [entries * self._element_size for entries in (dense, p, q)]


def wants_one_bucket(compressor: Compressor, hook: ForeignHook | None) -> bool:
    """Whether torch's PowerSGD hook is used; it starts collectives in callbacks: gloo aborts with several buckets."""
    return isinstance(compressor, PowerSGD) or (hook is not None and hook.function() in TORCHS_POWERSGD)


def bare(node: Config) -> Compressor:
    """Return the compressor without its wrappers, because torch's hook contains the error feedback."""
    off: Config = {key: False for key in ("error_feedback", "worker_momentum") if key in node}
    return wrapped_compressor({**node, **off}).compressor
