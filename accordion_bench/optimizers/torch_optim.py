"""torch's optimizers without the import of torch._dynamo on first use, and fused on a GPU."""

import functools
import inspect
from typing import Any

import torch


def without_dynamo(optimizer: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a subclass whose methods lack the decorators that hide them from torch.compile.

    On first call the decorators import torch._dynamo (4 s of the 5 s that a run may take to its first step). They have
    no effect on an optimizer that is not compiled. `step` keeps its no_grad decorator.
    """
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(optimizer, name)) for name in names}
    methods["step"] = torch.no_grad()(inspect.unwrap(optimizer.step))
    return type(optimizer.__name__, (optimizer,), methods)


def fused(optimizer: type[torch.optim.Optimizer], device: torch.device) -> Any:
    """Return the optimizer with `fused=True` on a GPU, if it supports that: one kernel for many parameters.

    The results differ from torch's default in the last bits.
    """
    if device.type == "cpu" or "fused" not in inspect.signature(optimizer).parameters:
        return optimizer
    options: dict[str, Any] = {"fused": True}
    if "capturable" in inspect.signature(optimizer).parameters:
        options["capturable"] = True  # Adam checks it when its step is captured
    return functools.partial(optimizer, **options)
