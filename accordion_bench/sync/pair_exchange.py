"""Workers that meet in pairs, drawn anew each time, and send each other what they have."""

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.none import Dense
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.plan import Ladder, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.tensors import keyed_rng


class PairExchange(Exchange):
    """mean_pair x: of each local worker, the mean of its tensors and its partner's.

    A worker sends 4 N bytes to its partner alone, in one message, however many workers there are. Both get the same
    mean, bit for bit.

    Args:
        specs, comm, like, seed: see `Exchange`; an even number of workers, or one, which meets itself.
    """

    alike = False

    def __init__(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor, seed: int = 0) -> None:
        super().__init__(Dense(), specs, Ladder("", ()), comm, like, SendOptions(seed))
        self.what = "replica"

    def partners(self, step: int) -> list[int]:
        """Of each worker of the run, whom it meets at a step; every way to form pairs is equally likely."""
        workers = self.comm.workers
        order = torch.randperm(workers, generator=keyed_rng.generator(self.seed, "pairs", step)).tolist()
        partner = list(range(workers))
        for one, other in zip(order[::2], order[1::2], strict=False):  # a lone worker is left over
            partner[one], partner[other] = other, one
        return partner

    def __call__(self, xs_W: Sequence[Tensor], info: StepInfo) -> list[Tensor]:
        """The means [W, ...] of pairs, of tensors [W, ...], one per spec."""
        replicas = [[x_W[row] for x_W in xs_W] for row in range(self.comm.local_workers)]
        return [torch.stack(list(rows)) for rows in zip(*self.means(replicas, info.step), strict=True)]

    @torch.no_grad()
    def means(self, replicas: Sequence[Sequence[Tensor]], step: int) -> list[list[Tensor]]:
        """The mean of each local worker's tensors and its partner's, in new tensors.

        Args:
            replicas: of each local worker, one tensor per spec.
            step: keys the pairs.

        Raises:
            NonFinite: a value is NaN or infinite; on a CPU nothing was sent.
        """
        sizes = [spec.numel for spec in self.specs]
        with self.comm.clock.exchanging(self.kind, 0, self.comm.ledger):
            self.comm.ledger.paper_count(self.numel)
            own_W = torch.stack([torch.cat([x.flatten() for x in replica]) for replica in replicas])
            own_W = own_W.float() if own_W.element_size() == 2 else own_W
            rows = len(replicas)
            parts = zip(own_W.split(sizes, dim=1), self.specs, strict=True)
            self.refuse_non_finite([part.view(rows, *spec.shape) for part, spec in parts], "value")
            mean_W = self.comm.send_receive(own_W, self.partners(step)).add_(own_W).mul_(0.5)
            return [
                [part.view(x.shape).to(x.dtype) for part, x in zip(mean.split(sizes), replica, strict=True)]
                for mean, replica in zip(mean_W, replicas, strict=True)
            ]
