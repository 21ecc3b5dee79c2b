"""A communication hook of DistributedDataParallel that hands its buckets to an attachment."""

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
from accordion_bench.tensors.real_view import as_kind_of, as_real

SPARSE = "gradients must be dense tensors, got a sparse one of DistributedDataParallel; pass sparse=False to its module"


class DDPDelivery:
    """Takes gradients from DistributedDataParallel's buckets, and puts there what came of their exchange.

    Buckets of the exchange leave as they fill, however DistributedDataParallel cuts its own; its last bucket waits for
    all of them, so that gradients are the exchanged ones when `backward` returns. With a loss scale they stay what they
    are until they are unscaled.

    Args:
        module: the wrapped model; it takes one hook in its life, which serves one attachment after another.
    """

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = weakref.ref(module)  # which keeps the hook, and this with it
        self.shares = module.gradient_as_bucket_view  # its memory with gradients; else a bucket is not shared
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
        """From here on gradients go to this attachment, until it is detached."""
        module = self._module()
        assert module is not None
        self.attachment = attachment
        self._index = {id(param): i for i, param in enumerate(attachment.axis.params)}
        attachment.delivering = module.no_sync
        attachment.when_detached(self._stop)

    def _stop(self) -> None:
        self.attachment = None

    def __call__(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """For DistributedDataParallel: one of its buckets is full."""
        attachment, module = self.attachment, self._module()
        assert module is not None
        if attachment is None:
            return default_hooks.allreduce_hook(module.process_group, bucket)
        device = bucket.buffer().device
        future: torch.futures.Future = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        if attachment.setting.scaled:  # they are exchanged when they have been unscaled
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
        """The bucket cut into the gradients of its parameters, complex ones as real tensors.

        Raises:
            ConfigError: it is sparse.
        """
        if bucket.buffer().layout != torch.strided:
            raise ConfigError(SPARSE)
        if not any(param.is_complex() for param in bucket.parameters()):
            return bucket.gradients()
        shapes = [as_real(param.detach()).shape for param in bucket.parameters()]  # those of the bucket are wrong
        parts = bucket.buffer().split([shape.numel() for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _is_kept(self, attachment: Attachment) -> bool:
        """Whether a policy looks at local gradients when the bucket already holds exchanged ones."""
        return self.shares and bool(attachment.methods.policies)

    @torch.no_grad()
    def _deliver(self, attachment: Attachment) -> None:
        held, self._held = self._held, []
        attachment.join()
        axis = attachment.axis
        for future, buffer, numbered in held:
            for i, gradient in numbered:
                gradient.copy_(axis.applied[i])
            if self.may_skip:
                self._put([(axis.params[i], gradient) for i, gradient in numbered])
            future.set_result(buffer)

    def _put(self, pairs: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Give parameters that no worker's loss reaches, which DistributedDataParallel leaves alone, what has come.

        A residual, or signs of zeros, may have come of their exchange. A gradient of zeros stays None, as it does
        without us, so that no weight decay and no momentum moves the parameter.
        """
        missing = [(param, gradient) for param, gradient in pairs if param.grad is None and gradient.numel()]
        if missing:  # the host waits for a device here
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
    """Let a wrapped model hand its gradients to an attachment.

    Raises:
        ConfigError: a third-party communication hook is there.
    """
    if module not in _deliveries:
        _deliveries[module] = DDPDelivery(module)
    _deliveries[module].serve(attachment)
