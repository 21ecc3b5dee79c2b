"""A communication hook of DistributedDataParallel that hands its buckets to an attachment."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from accordion_bench.attaching.attachment import Attachment


class DDPDelivery:
    """Takes gradients from DistributedDataParallel's buckets, and puts there what came of their exchange.

    Buckets of the exchange leave as they fill, however DistributedDataParallel cuts its own; its last bucket waits for
    all of them, so that gradients are the exchanged ones when `backward` returns.

    Args:
        module: the wrapped model; it takes one hook in its life.
        attachment: that exchanges.
    """

    def __init__(self, module: DistributedDataParallel, attachment: Attachment) -> None:
        self.module, self.attachment = module, attachment
        self.copies = module.gradient_as_bucket_view  # else a bucket is nobody's gradient
        self._index = {id(param): i for i, param in enumerate(attachment.axis.params)}
        self._held: list[tuple[torch.futures.Future, Tensor, list[tuple[int, Tensor]]]] = []
        module.register_comm_hook(None, self.__call__)

    def __call__(self, _: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """For DistributedDataParallel: one of its buckets is full."""
        attachment = self.attachment
        if not attachment.attached:
            return default_hooks.allreduce_hook(self.module.process_group, bucket)
        device = bucket.buffer().device
        future: torch.futures.Future = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        if not attachment.early or attachment.comm.workers == 1:  # they are exchanged before the optimizer's step
            future.set_result(bucket.buffer())
            return future
        if not self._held:
            attachment.begin_delivery()
        indices = [self._index[id(param)] for param in bucket.parameters()]
        numbered = list(zip(indices, bucket.gradients(), strict=True))
        self._held.append((future, bucket.buffer(), numbered))
        for i, gradient in numbered:
            attachment.arrive(i, gradient.clone() if self._is_kept else gradient)
        if bucket.is_last():
            self._deliver()
        return future

    @property
    def _is_kept(self) -> bool:
        """Whether somebody looks at local gradients when the bucket already holds exchanged ones."""
        return self.copies and bool(self.attachment.methods.policies)

    @torch.no_grad()
    def _deliver(self) -> None:
        held, self._held = self._held, []
        self.attachment.join()
        applied = self.attachment.axis.applied
        for future, buffer, numbered in held:
            for i, gradient in numbered:
                gradient.copy_(applied[i])
            future.set_result(buffer)
