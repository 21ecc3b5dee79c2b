"""torch's own optimizers, without the seconds that their first use spends on importing its compiler."""

import functools
import inspect
from typing import Any

import torch


def without_dynamo(optimizer: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The same class with the methods that torch marks as invisible to torch.compile unwrapped.

    The marks import torch._dynamo on first call (4 s of the 5 s that a run may take to its first step), and mean
    nothing to an optimizer that is not compiled. `step` is wrapped there in no_grad too, which is kept.
    """
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(optimizer, name)) for name in names}
    methods["step"] = torch.no_grad()(inspect.unwrap(optimizer.step))
    return type(optimizer.__name__, (optimizer,), methods)


def fused(optimizer: type[torch.optim.Optimizer], device: torch.device) -> Any:
    """The same optimizer, on a GPU as one kernel for many parameters, where it has one.

    It rounds otherwise than torch's default, in the last bits.
    """
    if device.type == "cpu" or "fused" not in inspect.signature(optimizer).parameters:
        return optimizer
    options: dict[str, Any] = {"fused": True}
    if "capturable" in inspect.signature(optimizer).parameters:
        options["capturable"] = True  # Adam looks for it before its step is captured
    return functools.partial(optimizer, **options)
