"""Counts of floating-point operations, by torch's formulas, and of started operations in a block of code.

`torch.utils.flop_counter.FlopCounterMode` counts the same, and imports torch's compiler to do so: 4 seconds, 140 MB.
"""

from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

CONVOLUTIONS = "convolution"  # in the names of the operations that are one


class CountedWork(TorchDispatchMode):
    """Context manager that counts operations on tensors with or without data.

    Attributes:
        convolved: number of floating-point operations of convolutions.
        multiplied: number of floating-point operations of other products.
        started: number of torch operations, without views.

    Example:
        with CountedWork() as work:
            model(batch)
        work.flops
    """

    def __init__(self) -> None:
        super().__init__()
        self.convolved = self.multiplied = 0.0
        self.started, self._inside = 0, False

    @property
    def flops(self) -> float:
        """Number of floating-point operations of all products."""
        return self.convolved + self.multiplied

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not import its compiler; nothing is compiled in this mode."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        found = func(*args, **kwargs)
        self.started += not func.is_view and not self._inside
        if formula is not None:
            count = formula(*args, **kwargs, out_val=found)
            if CONVOLUTIONS in str(func):
                self.convolved += count
            else:
                self.multiplied += count
        return found

    def count_as_one(self, recurrent: nn.Module) -> None:
        """Count all time steps of a recurrent layer as one operation, as on a GPU; likewise its backward pass."""

        def begin(*_: Any) -> None:
            self.started, self._inside = self.started + 1, True

        def end(*_: Any) -> None:
            self._inside = False

        recurrent.register_forward_pre_hook(begin)
        recurrent.register_forward_hook(end)
        recurrent.register_full_backward_pre_hook(begin)
        recurrent.register_full_backward_hook(end)
