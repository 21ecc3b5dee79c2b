"""Engine: the operations on a bucket of tensors that codecs are written against.

A codec is one text: it says which fields its messages have (`Layout`) and how coordinates become codes (`Coding`), and
calls what is below. The engine hides the device and how something is computed there. `Reference` computes it in plain
torch, tensor by tensor; the others give the same messages bit for bit, and sums within rounding.

Tensor suffixes: W local workers, S senders, T tensors, M blocks of all tensors.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from accordion_bench.codecs.block_numbers import LARGEST, BlockNumbers, factors_of, finished
from accordion_bench.codecs.bucket import Bucket, Target
from accordion_bench.codecs.coding import Coding
from accordion_bench.codecs.layout import KEPT, Layout, Message, whole_layout
from accordion_bench.codecs.non_finite import NonFiniteRow
from accordion_bench.codecs.tiles import TileForm
from accordion_bench.tensors.kernels.dense_kernels import BlockRule
from accordion_bench.tensors.upload import table


class Sampling(NamedTuple):
    """How a threshold is estimated, see `selection.sampled_top`.

    share: of the coordinates that is sampled.
    least, most: smallest and largest count accepted, as multiples of what is wanted.
    offset: where the sample starts.
    """

    share: float
    least: float
    most: float
    offset: int


class Momenta(NamedTuple):
    """Momenta u, and what is added to them.

    us_W, gs_W: momenta and gradients, [W, ...] of each tensor.
    factor: b.
    nesterov: whether what is sent looks a step ahead.
    sums_W: v of each tensor; empty = none.
    """

    us_W: Sequence[Tensor]
    gs_W: Sequence[Tensor]
    factor: float
    nesterov: bool = False
    sums_W: Sequence[Tensor] = ()


class MomentumSteps(NamedTuple):
    """Steps by momenta that have been exchanged.

    momenta, sums, inverses: tensors [...].
    masks: of zeros, just where inverses are 0, and ones; None = 1.
    rates: of each, see `codecs.rates`.
    """

    momenta: Sequence[Tensor]
    sums: Sequence[Tensor]
    inverses: Sequence[Tensor]
    masks: Sequence[Tensor | None]
    rates: Sequence[Any]


class Selection(Protocol):
    """Some coordinates of a bucket, in a form that its engine alone reads."""

    @property
    def counts_W(self) -> Tensor:
        """Entries of each tensor, int32 [W, T], where the tensors are."""


class Engine(ABC):
    """The operations on a bucket.

    Class attributes:
        name: of what computes, as a run's header says it.
        looks: whether input that is not finite is refused. On a device it is not looked at, since the host would wait:
            it shows in the sum.
        copies: whether a copy that puts tensors side by side costs less than work on each by itself.
        one_by_one: whether products of matrices of different sizes cost no more than those of equal ones.
        fills: whether sums are better begun in empty memory; a CPU has zeros without a pass over them.
    """

    name: str
    looks: bool = True
    copies: bool = False
    one_by_one: bool = False
    fills: bool = False

    # ---- dense codes: a code for every coordinate

    @abstractmethod
    def norms(self, bucket: Bucket, layout: Layout, *kinds: str) -> list[Tensor]:
        """A number of every block of a layout, float64 [W, M] for each kind; not finite where a coordinate is not.

        Args:
            bucket: coordinates.
            layout: whose blocks.
            kinds: `l1`, `l2`, `linf`; `sum` of coordinates, `below`: of the negative ones, `count`: how many these are.
        """

    @abstractmethod
    def write(self, message: Message, name: str, numbers_S: Tensor) -> None:
        """Write numbers of blocks, float32 [S, M], into a field of messages of one layout."""

    @abstractmethod
    def read(self, message: Message, name: str, alpha: float = 1.0) -> Tensor:
        """Read a field that has a float32 for every block, times alpha: [S, M]."""

    @abstractmethod
    def encode(self, bucket: Bucket, message: Message, coding: Coding, numbers: BlockNumbers) -> None:
        """Write numbers of blocks, and the fields `codes` and `signs`.

        Args:
            bucket: coordinates.
            message: of the local workers.
            coding: how.
            numbers: of the blocks.

        Raises:
            NonFiniteRow: row w T + t is worker w's part of tensor t; where the engine looks.
        """

    @abstractmethod
    def add_codes(
        self, target: Target, message: Message, coding: Coding, shared: Tensor | None, middles: Tensor | None
    ) -> None:
        """Add what codes stand for; each product and each sum is rounded once.

        Args:
            target: where, with alpha and divisor.
            message: of all senders; scales are read from its field `header_of` the coding.
            coding: how.
            shared: scales of whole tensors, float32 [T], where messages have none.
            middles: added to the scaled values, float32 [S, M], times alpha already; None = nothing.
        """

    # ---- sparse codes: some coordinates, and where they are

    @abstractmethod
    def largest(self, rows_W: Sequence[Tensor], counts: Sequence[int]) -> Selection:
        """The largest magnitudes of each tensor's rows [W, N], so many [T]; ties go to the lower index.

        NaN counts as the largest of all, so that it is seen where values are packed.
        """

    @abstractmethod
    def above(self, rows_W: Sequence[Tensor], threshold: float, most: Sequence[int]) -> Selection:
        """Magnitudes from a threshold on, of each row at most the `most` [T] largest."""

    @abstractmethod
    def about(self, rows_W: Sequence[Tensor], counts: Sequence[int], sampling: Sampling) -> Selection:
        """About so many of the largest magnitudes of each row [T], see `selection.sampled_top`; no zeros."""

    @abstractmethod
    def nonzero(self, rows_W: Sequence[Tensor]) -> Selection:
        """All coordinates that are not zero."""

    @abstractmethod
    def encode_sparse(self, bucket: Bucket, selection: Selection, message: Message) -> None:
        """Write what is selected into all fields of `SparseLayout`s.

        Raises:
            NonFiniteRow: as `encode`, of values.
        """

    @abstractmethod
    def add_sparse(self, target: Target, message: Message) -> None:
        """Add the entries of every sender."""

    @abstractmethod
    def lifted(
        self, residuals_W: Sequence[Tensor], news_W: Sequence[Tensor], sizes: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        """G = e + news is sent as +-scale where |G + news| reaches its bin's largest |G|, else as 0; e <- G - sent.

        Args:
            residuals_W, news_W: e, changed in place, and the newest gradients, [W, N].
            sizes: consecutive coordinates of a bin, of each tensor.

        Returns:
            what is sent, [W, N]; scales [W, T]: the mean over a row's bins of their largest magnitudes, as float32.
        """

    # ---- momenta

    @abstractmethod
    def add_momenta(self, momenta: Momenta) -> Sequence[Tensor]:
        """u <- b u + g, in place.

        Returns:
            u; with `nesterov` g + b u, in memory of its own. With sums these, after v <- v + u; with `nesterov` after
            u <- b (u + g) and v <- v + u + g.
        """

    @abstractmethod
    def momentum_steps(self, given: MomentumSteps) -> list[Tensor]:
        """Momenta become sums x masks; returns momentum x inverse x rate."""

    # ---- coordinates that are the same for all workers

    @abstractmethod
    def places(
        self, keys: Callable[[Bucket], Sequence[int]], counts: Sequence[int], bucket: Bucket, device: torch.device
    ) -> Any:
        """Coordinates drawn of each tensor of a bucket, the same by every engine, for `take` and `put`.

        They are the first images of a keyed permutation of its coordinates, in that order, see `permutations`.

        Args:
            keys: called with the bucket, at any step, gives a key for each tensor.
            counts: how many coordinates of each.
            bucket: whose.
            device: where its tensors are.
        """

    @abstractmethod
    def take(self, rows_W: Sequence[Tensor], places: Any) -> list[Tensor]:
        """The coordinates [W, k] of each tensor's rows [W, N] at these places."""

    @abstractmethod
    def put(self, target: Target, values_R: Sequence[Tensor], places: Any, factors: Sequence[float]) -> None:
        """Add alpha x factor x values [R, k] to each tensor's rows at these places."""

    # ---- factors of matrices

    @abstractmethod
    def orthonormalise(self, factors: Sequence[Tensor], passes: int = 2) -> list[Tensor]:
        """Orthonormal columns with the spans of the first one, two, ... given ones, of batches [G, n, r].

        A zero matrix gives finite columns.

        Args:
            factors: the batches.
            passes: 2; or 1 where only the span matters, which a device then has more quickly.
        """

    @abstractmethod
    def multiply(self, matrices_W: Sequence[Tensor], factors: Sequence[Tensor]) -> list[Tensor]:
        """The products M F of each batch as rows, (M F)^T [W, G, r, n].

        Sums are within rounding; they do not hang on how many workers there are.

        Args:
            matrices_W: batches of M [W, G, n, m], which may be transposed views.
            factors: F [G, m, r] of each batch.
        """

    @abstractmethod
    def products(self, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> list[Tensor]:
        """The products L R [G, n, m] of each batch of L [G, n, r] and R [G, r, m]."""

    @abstractmethod
    def subtract_products(
        self,
        targets_W: Sequence[Mapping[int, Tensor]],
        lefts_W: Sequence[Tensor],
        rights_W: Sequence[Tensor],
        alpha: float = 1.0,
    ) -> None:
        """Subtract alpha L R from matrices of each batch.

        Args:
            targets_W: contiguous tensors [W, ...] that hold them, by place in the batch; some may be missing.
            lefts_W: L [W, G, n, r] of each batch.
            rights_W: R [W, G, r, m].
            alpha: factor.
        """

    @abstractmethod
    def renewed(self, news: Sequence[Tensor], olds: Sequence[Tensor]) -> list[Tensor]:
        """The new matrices [G, n, r] of each batch, but the old ones [G or 1, n, r] where a new one is zero or NaN."""

    # ---- tiles of matrices

    @abstractmethod
    def encode_tiles(self, bucket: Bucket, message: Message, forms: Sequence[TileForm]) -> None:
        """Write the largest magnitudes of each tile, see `tiles.encode_largest`.

        Raises:
            NonFiniteRow: as `encode`, of values that are kept.
        """

    @abstractmethod
    def add_tiles(self, target: Target, message: Message, forms: Sequence[TileForm]) -> None:
        """Add the entries of every sender."""

    # ---- what follows from these

    def numbers(self, bucket: Bucket, layout: Layout, rule: BlockRule) -> list[Tensor]:
        """What a rule makes of the norms of every block of a layout, see `block_numbers.finished`: float32 [W, M]."""
        norms_W = self.norms(bucket, layout, *rule.norms)
        return finished(rule, norms_W, entries_on(layout, norms_W[0].device))

    def factors(self, rule: BlockRule, scales: Tensor) -> Tensor:
        """What coordinates are multiplied by, given scales of their blocks."""
        return factors_of(rule, scales)

    def largest_of(self, bucket: Bucket) -> Tensor:
        """The largest magnitude of every tensor, float32 [W, T]; 0 of one without coordinates."""
        (found_W,) = self.numbers(bucket, whole_layout(bucket.numels), LARGEST)
        if all(bucket.numels):
            return found_W
        columns, zeros_W = iter(found_W.unbind(1)), found_W.new_zeros(len(found_W))
        return torch.stack([next(columns) if n else zeros_W for n in bucket.numels], dim=1)

    def encode_dense(self, bucket: Bucket, message: Message, coding: Coding, shared: Tensor | None = None) -> None:
        """Scales and codes of all coordinates of a bucket; its residuals then hold what is lost, see `Feedback`.

        Args:
            bucket: coordinates.
            message: of the local workers, with the fields of `Dense.layout`.
            coding: how.
            shared: scales of whole tensors that every worker knows, float32 [T], where messages have none.

        Raises:
            NonFiniteRow: as `encode`.
        """
        formed, feedback = bucket.formed(), bucket.feedback
        self.encode_formed(formed, message, coding, shared)
        if feedback is not None:
            self.add_dense(Target(feedback.rows_W, -1.0), message, coding, shared)
            feedback.mask()

    def encode_formed(self, bucket: Bucket, message: Message, coding: Coding, shared: Tensor | None = None) -> None:
        """The same by `numbers` and `encode`; arguments as for `encode_dense`."""
        layout, rule, numbers = message.layout, coding.rule, BlockNumbers()
        if rule.norms:
            first_W, *rest = self.numbers(bucket, layout, rule)
            self._refuse(layout, first_W)
            if rule.kind == "means":
                self._refuse(layout, rest[0])
                numbers = BlockNumbers(rest[0], middles=first_W)
            else:
                numbers = BlockNumbers(first_W, *rest)
        elif shared is not None:
            numbers = BlockNumbers(factors=self.factors(rule, shared[None]))
        self.encode(bucket, message, coding, numbers)

    def add_dense(self, target: Target, message: Message, coding: Coding, shared: Tensor | None = None) -> None:
        """Add scale x value of code of every sender; arguments as for `encode_dense` and `add_codes`."""
        middles = self.read(message, "middles", target.alpha) if coding.norm == "means" else None
        self.add_codes(target, message, coding, shared, middles)

    def _refuse(self, layout: Layout, numbers_W: Tensor) -> None:
        """Raise NonFiniteRow where a number of a block [W, M] is not finite."""
        if self.looks and not numbers_W.isfinite().all():
            w, block = (~numbers_W.isfinite()).nonzero()[0].tolist()
            counts = -(-layout.numels // layout.blocks)
            tensor = int(np.searchsorted(counts.cumsum(), block, side="right"))
            raise NonFiniteRow(w * len(counts) + tensor)


def header_of(coding: Coding) -> str:
    """The field by whose numbers values are multiplied."""
    return "halves" if coding.norm == "means" else "scales"


@functools.lru_cache(maxsize=KEPT)
def entries_on(layout: Layout, device: torch.device) -> Tensor:
    """Coordinates of every block of a layout, float64 [M], on a device."""
    return table(torch.from_numpy(layout.entries), device)
