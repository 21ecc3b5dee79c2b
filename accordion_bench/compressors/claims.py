"""Claims: what a compressor says of its numbers, so that the conformance kit can measure it.

Nothing else reads it, but EF21, which wants sums that are not rounded.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from accordion_bench.codecs.bucket import Context
from accordion_bench.plan import TensorSpec


class Claims:
    """The part of a compressor that is there to be tested.

    Class attributes:
        draws: of the keyed numbers: `worker`: each its own; `shared`: all workers the same; "": nothing, but `worker`
            where it is unbiased.
        sum_eps: relative rounding of one addition on the wire; 0 where sums have at least the gradient's precision.
        also: options, beside the file's, by which other code runs.
    """

    draws: str = ""
    sum_eps: float = 0.0
    also: tuple[Mapping[str, Any], ...] = ()

    def contraction(self, spec: TensorSpec, level: float) -> float | None:
        """A delta with E||C(x) - x||^2 <= (1 - delta) ||x||^2 for every x; None = not declared.

        In [0, 1]; below 0 it is no contraction, and says how much more than there was may be lost.
        """
        return None

    def variance(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor | None:
        """E||Q(x) - x||^2 of one message, for each row of x_R [R, N], where unbiased; None = no closed form."""
        return None
