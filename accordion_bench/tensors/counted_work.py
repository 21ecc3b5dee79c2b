"""How much a piece of code computes: floating-point operations by torch's own formulas, and operations that it starts.

`torch.utils.flop_counter.FlopCounterMode` counts the same, and imports torch's compiler to do so: 4 seconds, 140 MB.
"""

from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

CONVOLUTIONS = "convolution"  # in the names of the operations that are one


class CountedWork(TorchDispatchMode):
    """Counts what is computed inside, on tensors with or without data.

    Attributes:
        convolved: floating-point operations of convolutions.
        multiplied: those of other products.
        started: operations of torch, without views.

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
        """Of all products."""
        return self.convolved + self.multiplied

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here, so that torch need not import its compiler to leave it out."""
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
        """All time steps of a recurrent layer are one operation on a GPU, and so is their backward pass."""

        def begin(*_: Any) -> None:
            self.started, self._inside = self.started + 1, True

        def end(*_: Any) -> None:
            self._inside = False

        recurrent.register_forward_pre_hook(begin)
        recurrent.register_forward_hook(end)
        recurrent.register_full_backward_pre_hook(begin)
        recurrent.register_full_backward_hook(end)
