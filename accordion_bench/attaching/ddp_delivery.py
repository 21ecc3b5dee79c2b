"""Gradients of an attachment that others hold: the buckets of DistributedDataParallel, and torch's GradScaler."""

import math
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from accordion_bench.attaching.attachment import Attachment
from accordion_bench.options.checks import ConfigError
from accordion_bench.tensors.same_shape import as_kind_of, as_real

WRAP_AGAIN = "call comm.detach(), wrap the model in DistributedDataParallel again, then call ab.attach again"
SPARSE = "gradients must be dense tensors, got a sparse one of DistributedDataParallel; pass sparse=False to its module"


class DDPDelivery:
    """Reads gradients from the buckets of DistributedDataParallel, and writes the exchanged ones back.

    Buckets of the exchange are sent as they fill, independent of the buckets of DistributedDataParallel. The hook of
    its last bucket waits for all of them, so that `backward` returns after the exchange. With a loss scale, gradients
    are exchanged after they are unscaled. A module accepts one hook in its lifetime, which serves one attachment after
    another.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = weakref.ref(module)  # a weak reference, because the module references this hook
        self.shares = module.gradient_as_bucket_view  # whether buckets share memory with gradients
        self.may_skip = module.find_unused_parameters or module.static_graph
        self.attachment: Attachment | None = None
        self._index: dict[int, int] = {}
        self._held: list[tuple[torch.futures.Future, Tensor, list[tuple[int, Tensor]]]] = []
        try:
            module.register_comm_hook(None, self.__call__)
        except RuntimeError:
            raise ConfigError(
                "model must have no communication hook, got DistributedDataParallel with one; leave out its "
                "register_comm_hook"
            ) from None

    def serve(self, attachment: Attachment) -> None:
        """Pass gradients to this attachment until it is detached."""
        module = self._module()
        assert module is not None
        self.attachment = attachment
        self._index = {id(param): i for i, param in enumerate(attachment.axis.params)}
        attachment.delivering = module.no_sync
        attachment.watch.repair = WRAP_AGAIN
        attachment.when_detached(self._stop)

    def _stop(self) -> None:
        self.attachment = None

    def __call__(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Handle a full bucket; called by DistributedDataParallel."""
        attachment, module = self.attachment, self._module()
        assert module is not None
        if attachment is None:
            return default_hooks.allreduce_hook(module.process_group, bucket)
        device = bucket.buffer().device
        future: torch.futures.Future = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        if attachment.setting.scaled:  # exchanged after unscaling
            future.set_result(bucket.buffer())
            return future
        if bucket.index() == 0:
            self._held = []
            attachment.begin_delivery()
        indices = [self._index[id(param)] for param in bucket.parameters()]
        numbered = list(zip(indices, self._gradients(bucket), strict=True))
        self._held.append((future, bucket.buffer(), numbered))
        for i, gradient in numbered:
            attachment.arrive(i, gradient.clone() if self._is_kept(attachment) else gradient)
        if bucket.is_last():
            self._deliver(attachment)
        return future

    def _gradients(self, bucket: dist.GradBucket) -> list[Tensor]:
        """Split the bucket into the gradients of its parameters, complex ones as real tensors."""
        if bucket.buffer().layout != torch.strided:
            raise ConfigError(SPARSE)
        if not any(param.is_complex() for param in bucket.parameters()):
            return bucket.gradients()
        # the shapes of complex gradients in a bucket are wrong
        shapes = [as_real(param.detach()).shape for param in bucket.parameters()]
        parts = bucket.buffer().split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _is_kept(self, attachment: Attachment) -> bool:
        """Return whether a policy needs local gradients after the bucket has the exchanged ones."""
        return self.shares and bool(attachment.methods.policies)

    @torch.no_grad()
    def _deliver(self, attachment: Attachment) -> None:
        held, self._held = self._held, []
        axis = attachment.axis
        delivered = {i for *_, numbered in held for i, _ in numbered}
        if (i := next((i for i in range(len(axis.params)) if i not in delivered), None)) is not None:
            raise ConfigError(
                f"DistributedDataParallel must exchange all trained parameters, got {axis.specs[i].name}, which was "
                f"frozen or ignored when it wrapped the model; {WRAP_AGAIN}"
            )
        attachment.join()
        for future, buffer, numbered in held:
            for i, gradient in numbered:
                gradient.copy_(axis.applied[i])
            if self.may_skip:
                self._put([(axis.params[i], gradient) for i, gradient in numbered])
            future.set_result(buffer)

    def _put(self, pairs: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Set the gradients of parameters that no worker's loss reaches, which DistributedDataParallel does not set.

        Their exchange may return a residual, or signs of zeros. If it returns zeros, the gradient remains None as
        without a hook, so that weight decay and momentum do not move the parameter.
        """
        missing = [(param, gradient) for param, gradient in pairs if param.grad is None and gradient.numel()]
        if missing:  # synchronises with the device
            largest = torch.stack(torch._foreach_norm([gradient for _, gradient in missing], math.inf)).tolist()
            for (param, gradient), magnitude in zip(missing, largest, strict=True):
                if magnitude:
                    own = as_kind_of(gradient, param)
                    param.grad = own if self.shares else own.clone()
        if not self.shares:
            for param, gradient in pairs:
                if param.grad is not None:
                    as_real(param.grad).copy_(gradient)


_deliveries: "weakref.WeakKeyDictionary[DistributedDataParallel, DDPDelivery]" = weakref.WeakKeyDictionary()


def deliver_to(attachment: Attachment, module: DistributedDataParallel) -> None:
    """Pass the gradients of a wrapped model to an attachment; ConfigError if it has another communication hook."""
    if module not in _deliveries:
        _deliveries[module] = DDPDelivery(module)
    _deliveries[module].serve(attachment)


@torch.no_grad()
def exchange_after_unscaling(scaler: torch.amp.GradScaler, attachment: Attachment) -> None:
    """Replace `scaler.unscale_` by a function that agrees on overflows between workers, then exchanges.

    `scaler.step` calls `unscale_` unless the loop has called it. If the gradients of any worker overflow, those of all
    workers count as overflowed: nothing is exchanged, and the scalers of all workers skip the step and lower the scale.
    After `unscale_`, gradients are the exchanged ones and may be clipped. With several optimizers the first call
    unscales all.

    """
    unscale = scaler.unscale_
    unscaled: list[Any] = []  # optimizers unscaled with the first one, whose own calls follow

    def agree_then_exchange(optimizer: Any) -> None:
        ours = attachment.inner.all
        if not attachment.attached or optimizer not in ours or not scaler.is_enabled():
            unscale(optimizer)
            return
        if optimizer in unscaled:
            unscaled.remove(optimizer)
            return
        overflow = _any_overflow(attachment)
        for each in ours:
            unscale(each)
        unscaled[:] = [each for each in ours if each is not optimizer]
        if overflow:
            attachment.skip_step()
        else:
            attachment.join()

    def undo() -> None:
        if scaler.unscale_ is agree_then_exchange:  # otherwise it was replaced again, and calls this function
            scaler.unscale_ = unscale  # type: ignore[method-assign]

    scaler.unscale_ = agree_then_exchange  # type: ignore[method-assign]
    attachment.when_detached(undo)


@torch.no_grad()
def _any_overflow(attachment: Attachment) -> bool:
    """Return whether gradients of any worker are non-finite; make those of this worker non-finite, too."""
    gradients = [as_real(param.grad) for param in attachment.axis.params if param.grad is not None]
    found = torch.zeros((), device=attachment.comm.device)
    if gradients:
        found = (~torch.stack(torch._foreach_norm(gradients, float("inf"))).isfinite().all()).float()
    overflow = bool(attachment.comm.sum_(found, "control"))
    if overflow:
        for optimizer in attachment.inner.all:  # the scaler checks each separately
            held = (param.grad for group in optimizer.param_groups for param in group["params"])
            if (gradient := next((g for g in held if g is not None), None)) is not None:
                gradient.fill_(float("inf"))
    return overflow
