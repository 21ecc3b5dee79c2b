"""A sparse average: a few coordinates of the workers' parameters, drawn anew each time, become their mean."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench.codecs.selection import kept_entries
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.base import NonFinite
from accordion_bench.compressors.none import Dense
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.finite import Look, largest
from accordion_bench.plan import Ladder, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.distinct import draw_distinct
from accordion_bench.tensors.upload import upload


class SparseAverage(Exchange):
    """x_w[mask] <- mean_w x_w[mask], where the mask has k = max(1, floor(p N)) of all N coordinates.

    Every set of k is equally likely. All workers draw the same one by its key, so that values alone travel: 4 k bytes
    in one all-reduce.

    Args:
        share: p, in (0, 1]; lower share = fewer bytes, and workers that are further apart.
        specs, comm, like, seed: see `Exchange`.

    Attributes:
        kept: k.
    """

    alike = False

    def __init__(self, share: float, specs: Sequence[TensorSpec], comm: Comm, like: Tensor, seed: int = 0) -> None:
        super().__init__(Dense(), specs, Ladder("", ()), comm, like, SendOptions(seed))
        self.what = "parameter"
        self.kept = kept_entries(self.numel, share)
        self._ends = torch.tensor(list(itertools.accumulate(spec.numel for spec in specs)))

    def predicted_bytes(self, info: StepInfo) -> int:
        return 4 * self.kept

    def mean_bytes(self, info: StepInfo) -> int:
        return self.predicted_bytes(info)

    def paper_floats(self, levels: list[float | None]) -> int:
        return self.kept

    def drawn(self, step: int) -> list[tuple[int, Tensor]]:
        """(Index of a tensor, its drawn coordinates [n], ascending), for each tensor that has any."""
        places = draw_distinct(self.numel, self.kept, keyed_rng.generator(self.seed, "sparse average", step))
        counts = torch.searchsorted(places, self._ends).diff(prepend=torch.zeros(1, dtype=torch.int64))
        starts = self._ends.roll(1)
        starts[0] = 0
        own = upload(places - starts.repeat_interleave(counts), self.comm.device).split(counts.tolist())
        return [(i, part) for i, part in enumerate(own) if len(part)]

    def __call__(self, xs_W: Sequence[Tensor], info: StepInfo) -> list[Tensor]:
        """Average tensors [W, ...] in place, one per spec; nothing is left to apply."""
        self.average_([[x_W[row] for x_W in xs_W] for row in range(self.comm.local_workers)], info.step)
        return []

    @torch.no_grad()
    def average_(self, replicas: Sequence[Sequence[Tensor]], step: int) -> None:
        """Replace the drawn coordinates of each local worker's tensors by their means over all workers.

        Args:
            replicas: of each local worker, one tensor per spec.
            step: keys the draw.

        Raises:
            NonFinite: a drawn value is NaN or infinite; on a CPU nothing was sent.
        """
        with self.comm.clock.exchanging(self.kind, 0, self.comm.ledger):
            self.comm.ledger.paper_count(self.kept)
            drawn = self.drawn(step)
            values_W = torch.stack([torch.cat([_read(x[i], places) for i, places in drawn]) for x in replicas])
            self._look(values_W)
            (mean,) = self.comm.all_reduce_mean([values_W.float() if values_W.element_size() == 2 else values_W])
            means = mean.split([len(places) for _, places in drawn])
            for x in replicas:
                for (i, places), values in zip(drawn, means, strict=True):
                    _write_(x[i], places, values)

    def _look(self, values_W: Tensor) -> None:
        """Refuse values that are not finite; on a device, with the other looks of this step."""

        def told(row: int) -> str:
            return f"a parameter on worker {self.comm.first_named + row} is not finite"

        if self.finite.late:
            self.finite.note(Look(largest(list(values_W)), lambda row, _: told(row)))
        elif not values_W.isfinite().all():
            raise NonFinite(told(values_W.isfinite().all(1).tolist().index(False)))


def _read(x: Tensor, places: Tensor) -> Tensor:
    return x.flatten().index_select(0, places)


def _write_(x: Tensor, places: Tensor, values: Tensor) -> None:
    flat = x.flatten()
    flat.index_copy_(0, places, values.to(x.dtype))
    if flat.data_ptr() != x.data_ptr():  # a copy, where the memory is in another order (channels last)
        x.copy_(flat.view(x.shape))
