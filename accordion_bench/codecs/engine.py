"""Engine: the interface of operations on a bucket of tensors, with one implementation per device.

A codec defines the fields of its messages (`Layout`) and how coordinates become codes (`Coding`), and calls the engine.
The engine hides the device and the implementation. `Reference` uses plain torch, one tensor at a time. The other
engines return the same messages bit for bit, and the same sums within rounding.

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
    """Parameters of a threshold that is estimated from a sample, see `selection.sampled_top`.

    share: fraction of the coordinates in the sample.
    least, most: smallest and largest count accepted, as multiples of the wanted count.
    offset: first coordinate of the sample.
    """

    share: float
    least: float
    most: float
    offset: int


class Momenta(NamedTuple):
    """Momenta u and the gradients to add to them.

    us_W, gs_W: momenta and gradients, [W, ...] of each tensor.
    factor: b.
    nesterov: whether to return Nesterov's momentum.
    sums_W: accumulated momenta v of each tensor; empty = none.
    """

    us_W: Sequence[Tensor]
    gs_W: Sequence[Tensor]
    factor: float
    nesterov: bool = False
    sums_W: Sequence[Tensor] = ()


class MomentumSteps(NamedTuple):
    """Optimizer steps by momenta that have been exchanged.

    momenta, sums, inverses: tensors [...].
    masks: zeros where `inverses` are 0, and ones elsewhere; None = ones.
    rates: learning rate of each tensor, see `codecs.rates`.
    """

    momenta: Sequence[Tensor]
    sums: Sequence[Tensor]
    inverses: Sequence[Tensor]
    masks: Sequence[Tensor | None]
    rates: Sequence[Any]


class Selection(Protocol):
    """Selected coordinates of a bucket, in a format private to the engine."""

    @property
    def counts_W(self) -> Tensor:
        """Number of selected coordinates of each tensor, int32 [W, T], on the device of the tensors."""


class Engine(ABC):
    """Operations on a bucket of tensors.

    Class attributes:
        name: name of the implementation, for the header of a run.
        checks_input: whether non-finite input is refused. On a GPU the input is not checked, because that would
            synchronise with the host; non-finite values propagate to the sum.
        copies: whether concatenating tensors is cheaper than an operation on each tensor.
        one_by_one: whether products of matrices of different sizes cost no more than products of equal sizes.
        fills: whether to pass uninitialised memory for sums. On a CPU the system provides zeros without a pass.
    """

    name: str
    checks_input: bool = True
    copies: bool = False
    one_by_one: bool = False
    fills: bool = False

    # ---- dense codes: one code per coordinate

    @abstractmethod
    def norms(self, bucket: Bucket, layout: Layout, *kinds: str) -> list[Tensor]:
        """Return one number per block, float64 [W, M] for each kind; non-finite where a coordinate is non-finite.

        Args:
            bucket: coordinates.
            layout: layout that defines the blocks.
            kinds: `l1`, `l2`, `linf`; `sum` of the coordinates; `below`: sum of the negative ones; `count`: number of
                the negative ones.
        """

    @abstractmethod
    def write(self, message: Message, name: str, numbers_S: Tensor) -> None:
        """Write one number per block, float32 [S, M], into a field of messages of one layout."""

    @abstractmethod
    def read(self, message: Message, name: str, alpha: float = 1.0) -> Tensor:
        """Return a field of one float32 per block, times alpha: [S, M]."""

    @abstractmethod
    def encode(self, bucket: Bucket, message: Message, coding: Coding, numbers: BlockNumbers) -> None:
        """Write the numbers of the blocks, and the fields `codes` and `signs`.

        Args:
            bucket: coordinates.
            message: messages of the local workers.
            coding: rounding and values of the codes.
            numbers: numbers of the blocks.

        Raises:
            NonFiniteRow: if `checks_input` and the input is non-finite; row w T + t is worker w's part of tensor t.
        """

    @abstractmethod
    def add_codes(
        self, target: Target, message: Message, coding: Coding, shared: Tensor | None, middles: Tensor | None
    ) -> None:
        """Add the decoded values of all senders; each product and each sum is rounded once.

        Args:
            target: sums, with alpha and divisor.
            message: messages of all senders; the field `header_of(coding)` contains the scales.
            coding: rounding and values of the codes.
            shared: scales of whole tensors, float32 [T], if messages contain none.
            middles: offsets of the scaled values, already multiplied by alpha, float32 [S, M]; None = 0.
        """

    # ---- sparse codes: selected coordinates and their indices

    @abstractmethod
    def largest(self, rows_W: Sequence[Tensor], counts: Sequence[int]) -> Selection:
        """Select the `counts` [T] largest magnitudes of each tensor's rows [W, N]; ties go to the lower index.

        NaN counts as the largest magnitude, so that it reaches the check of the packed values.
        """

    @abstractmethod
    def above(self, rows_W: Sequence[Tensor], threshold: float, most: Sequence[int]) -> Selection:
        """Select magnitudes of at least a threshold, at most the `most` [T] largest of each row."""

    @abstractmethod
    def about(self, rows_W: Sequence[Tensor], counts: Sequence[int], sampling: Sampling) -> Selection:
        """Select about `counts` [T] of the largest non-zero magnitudes of each row, see `selection.sampled_top`."""

    @abstractmethod
    def nonzero(self, rows_W: Sequence[Tensor]) -> Selection:
        """Select all non-zero coordinates."""

    @abstractmethod
    def encode_sparse(self, bucket: Bucket, selection: Selection, message: Message) -> None:
        """Write the selected coordinates into all fields of `SparseLayout`s.

        Raises:
            NonFiniteRow: as `encode`, for selected values.
        """

    @abstractmethod
    def add_sparse(self, target: Target, message: Message) -> None:
        """Add the entries of every sender."""

    @abstractmethod
    def select_in_bins(
        self, residuals_W: Sequence[Tensor], news_W: Sequence[Tensor], sizes: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        """Send G = e + news as +-scale where |G + news| reaches the largest |G| of its bin, else as 0; e <- G - sent.

        Args:
            residuals_W: residuals e [W, N], updated in place.
            news_W: newest gradients [W, N].
            sizes: number of consecutive coordinates per bin, for each tensor.

        Returns:
            values to send [W, N]; scales [W, T]: mean over the bins of a row of their largest magnitudes, float32.
        """

    # ---- momenta

    @abstractmethod
    def add_momenta(self, momenta: Momenta) -> Sequence[Tensor]:
        """Update momenta in place: u <- b u + g.

        Returns:
            u; with `nesterov` g + b u in new tensors. With sums, v after v <- v + u; with sums and `nesterov`, v after
            u <- b (u + g) and v <- v + u + g.
        """

    @abstractmethod
    def momentum_steps(self, given: MomentumSteps) -> list[Tensor]:
        """Set momenta to sums x masks in place; return momentum x inverse x rate."""

    # ---- coordinates that are equal for all workers

    @abstractmethod
    def places(
        self, keys: Callable[[Bucket], Sequence[int]], counts: Sequence[int], bucket: Bucket, device: torch.device
    ) -> Any:
        """Draw coordinates of each tensor for `take` and `put`; all engines draw the same.

        They are the first images of a keyed permutation of the coordinates, in that order, see `permutations`.

        Args:
            keys: function of the bucket at any step that returns a key per tensor.
            counts: number of coordinates per tensor.
            bucket: tensors.
            device: device of the tensors.
        """

    @abstractmethod
    def take(self, rows_W: Sequence[Tensor], places: Any) -> list[Tensor]:
        """Return the coordinates [W, k] of each tensor's rows [W, N] at these places."""

    @abstractmethod
    def put(self, target: Target, values_R: Sequence[Tensor], places: Any, factors: Sequence[float]) -> None:
        """Add alpha x factor x values [R, k] to each tensor's rows at these places."""

    # ---- factors of matrices

    @abstractmethod
    def orthonormalise(self, factors: Sequence[Tensor], passes: int = 2) -> list[Tensor]:
        """Orthonormalise the columns of matrices [G, n, r]: the first j columns keep their span, for every j.

        A zero matrix yields finite columns.

        Args:
            factors: batches of matrices.
            passes: 2; or 1 if only the span matters, which is faster on a GPU.
        """

    @abstractmethod
    def multiply(self, matrices_W: Sequence[Tensor], factors: Sequence[Tensor]) -> list[Tensor]:
        """Return the products M F of each batch as rows, (M F)^T [W, G, r, n].

        Sums are equal within rounding and do not depend on the number of workers.

        Args:
            matrices_W: batches of M [W, G, n, m]; transposed views are allowed.
            factors: F [G, m, r] of each batch.
        """

    @abstractmethod
    def products(self, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> list[Tensor]:
        """Return the products L R [G, n, m] of each batch of L [G, n, r] and R [G, r, m]."""

    @abstractmethod
    def subtract_products(
        self,
        targets_W: Sequence[Mapping[int, Tensor]],
        lefts_W: Sequence[Tensor],
        rights_W: Sequence[Tensor],
        alpha: float = 1.0,
    ) -> None:
        """Subtract alpha L R from the matrices of each batch in place.

        Args:
            targets_W: contiguous tensors [W, ...] with the matrices, by index in the batch; some may be missing.
            lefts_W: L [W, G, n, r] of each batch.
            rights_W: R [W, G, r, m].
            alpha: factor.
        """

    @abstractmethod
    def replace_degenerate(self, news: Sequence[Tensor], olds: Sequence[Tensor]) -> list[Tensor]:
        """Return the new matrices [G, n, r], or the old ones [G or 1, n, r] where a new one is zero or contains NaN."""

    # ---- tiles of matrices

    @abstractmethod
    def encode_tiles(self, bucket: Bucket, message: Message, forms: Sequence[TileForm]) -> None:
        """Write the largest magnitudes of each tile, see `tiles.encode_largest`.

        Raises:
            NonFiniteRow: as `encode`, for selected values.
        """

    @abstractmethod
    def add_tiles(self, target: Target, message: Message, forms: Sequence[TileForm]) -> None:
        """Add the entries of every sender."""

    # ---- derived from the operations above

    def numbers(self, bucket: Bucket, layout: Layout, rule: BlockRule) -> list[Tensor]:
        """Return the numbers that a rule derives from the norms of all blocks, float32 [W, M] each.

        See `block_numbers.finished`.
        """
        norms_W = self.norms(bucket, layout, *rule.norms)
        return finished(rule, norms_W, entries_on(layout, norms_W[0].device))

    def factors(self, rule: BlockRule, scales: Tensor) -> Tensor:
        """Return the factors of coordinates, given the scales of their blocks."""
        return factors_of(rule, scales)

    def largest_of(self, bucket: Bucket) -> Tensor:
        """Return the largest magnitude of every tensor, float32 [W, T]; 0 for an empty tensor."""
        (found_W,) = self.numbers(bucket, whole_layout(bucket.numels), LARGEST)
        if all(bucket.numels):
            return found_W
        columns, zeros_W = iter(found_W.unbind(1)), found_W.new_zeros(len(found_W))
        return torch.stack([next(columns) if n else zeros_W for n in bucket.numels], dim=1)

    def encode_dense(self, bucket: Bucket, message: Message, coding: Coding, shared: Tensor | None = None) -> None:
        """Write scales and codes of all coordinates, and keep the quantisation error in the residuals.

        Args:
            bucket: coordinates, with residuals if `bucket.feedback` is set, see `Feedback`.
            message: messages of the local workers, with the fields of `Dense.layout`.
            coding: rounding and values of the codes.
            shared: scales of whole tensors, equal on all workers, float32 [T], if messages contain none.

        Raises:
            NonFiniteRow: as `encode`.
        """
        formed, feedback = bucket.formed(), bucket.feedback
        self.encode_formed(formed, message, coding, shared)
        if feedback is not None:
            self.add_dense(Target(feedback.rows_W, -1.0), message, coding, shared)
            feedback.mask()

    def encode_formed(self, bucket: Bucket, message: Message, coding: Coding, shared: Tensor | None = None) -> None:
        """Write scales and codes without residuals, by `numbers` and `encode`; arguments as for `encode_dense`."""
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
        """Add scale x decoded value of every sender; arguments as for `encode_dense` and `add_codes`."""
        middles = self.read(message, "middles", target.alpha) if coding.norm == "means" else None
        self.add_codes(target, message, coding, shared, middles)

    def _refuse(self, layout: Layout, numbers_W: Tensor) -> None:
        """Raise NonFiniteRow if a number of a block [W, M] is non-finite."""
        if self.checks_input and not numbers_W.isfinite().all():
            w, block = (~numbers_W.isfinite()).nonzero()[0].tolist()
            counts = -(-layout.numels // layout.blocks)
            tensor = int(np.searchsorted(counts.cumsum(), block, side="right"))
            raise NonFiniteRow(w * len(counts) + tensor)


def header_of(coding: Coding) -> str:
    """Return the name of the field with the scales of the values."""
    return "halves" if coding.norm == "means" else "scales"


@functools.lru_cache(maxsize=KEPT)
def entries_on(layout: Layout, device: torch.device) -> Tensor:
    """Return the number of coordinates per block of a layout, float64 [M], on a device."""
    return table(torch.from_numpy(layout.entries), device)
