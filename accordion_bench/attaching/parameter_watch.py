"""Detection of changes to attached parameters that would let each process train its own model.

change                                                detected
another optimizer steps them                          after its step
a loop changes them without an optimizer              in the next backward pass
a module or its parameters are replaced               in the next backward pass, or before the optimizer's step
their memory is replaced, with other values           in the next backward pass
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from accordion_bench.attaching.agreement import is_due
from accordion_bench.options.checks import ConfigError
from accordion_bench.tensors.same_shape import as_real, is_sharded

ATTACH_AGAIN = "call comm.detach() and ab.attach again"


class ParameterWatch:
    """Detects changes to the exchanged parameters of an attached model by anything but its optimizers."""

    def __init__(
        self, model: nn.Module, named: Sequence[tuple[str, nn.Parameter]], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._model, self._names, self._optimizers = model, [name for name, _ in named], list(optimizers)
        self._params = [param for _, param in named]
        self._ids = {id(param) for param in self._params}
        self._frozen = [param for param in model.parameters() if not param.requires_grad]
        self._held = self._count_held()
        self.repair = ATTACH_AGAIN  # what to do after the model has other parameters, for messages
        self._stepping = False
        self.pending = False  # whether gradients have arrived since the last step of these optimizers
        self._steps = self._repeated = 0
        self._entered: dict[int, int] = {}  # id of another optimizer in its step -> number of our steps before
        self._structure = _structure(model)
        self._places: list[int] = []
        self.note()

    def start(self) -> None:
        """Start to monitor all optimizers of this process."""
        _look_at_all_optimizers()
        _watches.add(self)

    def stop(self) -> None:
        """Stop monitoring."""
        _watches.discard(self)

    def stepping(self) -> None:
        """Note the start of a step of an attached optimizer, in which any change is allowed."""
        self._stepping = True

    def stepped(self) -> None:
        """Note the end of the step."""
        self._stepping, self._steps = False, self._steps + 1

    @torch.no_grad()
    def note(self) -> None:
        """Record the current parameters as valid."""
        self.pending = False
        self._versions = [param._version for param in self._params]
        places = [_place(param) for param in self._params]
        if places != self._places:
            self._places, self._firsts = places, self._first_numbers()
        self._samples = torch.cat(self._firsts)

    def _first_numbers(self) -> list[Tensor]:
        values = [as_real(param.detach()) for param in self._params]
        return [value.as_strided((1,), (1,)) for value in values if value.numel()]

    def refuse_replaced(self) -> None:
        """Raise ConfigError if the model or the optimizers have other parameters than at the start."""
        held = self._count_held()
        if held != self._held:
            got = f"{held} in the optimizer, {self._held} before"
        elif any(param.requires_grad for param in self._frozen):
            got = "a frozen one thawed"
        elif name := self._replaced():
            got = f"{name} replaced, added or taken out"
        else:
            return
        raise ConfigError(f"parameters must be the same as at ab.attach, got {got}; {self.repair}")

    def refuse_moved(self) -> None:
        """Check that no parameter was changed without a step of an attached optimizer.

        Between a step and the next backward pass weights may be loaded or clipped. Once gradients have arrived, only
        the optimizer may change them. New memory with equal values is always allowed.

        Raises:
            ConfigError: a parameter was changed; the message names the first one.
        """
        if self._stepping:  # a closure computes gradients within the step
            return
        if self.pending:
            pairs = zip(self._params, self._versions, self._places, strict=True)
            changed = (i for i, (param, v, at) in enumerate(pairs) if (param._version, _place(param)) != (v, at))
            if (i := next(changed, None)) is None:
                i = self._changed_through_data()
            if i is not None:
                raise ConfigError(
                    f"parameters must be changed by the optimizer of ab.attach alone, got {self._names[i]} changed "
                    f"after a backward pass and without its step; {ATTACH_AGAIN} with the optimizer that steps"
                )
        elif [_place(param) for param in self._params] != self._places:
            now = torch.cat(self._first_numbers())
            if now.dtype != self._samples.dtype or not torch.equal(now.to(self._samples.device), self._samples):
                raise ConfigError(
                    "parameters must keep their type and values between two steps, got others in new memory, as by "
                    f"model.to_empty(), model.half() or p.data = ...; {ATTACH_AGAIN} after that"
                )

    def _changed_through_data(self) -> int | None:
        """The first parameter whose first number is another one: a write through `p.data` changes no version.

        A GPU makes the host wait for it, so that it is looked at now and then; a loop by hand takes no step, and each
        of its backward passes but the first comes here.
        """
        self._repeated += 1
        if not is_due(self._repeated) or not self._firsts:
            return None
        away = torch.cat(self._firsts).to(self._samples) != self._samples
        if not away.any():
            return None
        filled = [i for i, param in enumerate(self._params) if param.numel()]
        return filled[int(away.nonzero()[0])]

    def _count_held(self) -> int:
        return sum(len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups)

    def _replaced(self) -> str | None:
        """Name of a trained parameter that is not exchanged, or of an exchanged one that the model has no more."""
        entries, sizes = self._structure
        same = all(own.get(name) is it or _is_gathered(own.get(name), it) for own, name, it in entries)
        if same and all(len(own) == n for own, n in sizes):
            return None
        there = dict(self._model.named_parameters())
        ids = {id(param) for param in there.values()}
        new = (name for name, param in there.items() if param.requires_grad and id(param) not in self._ids)
        gone = (name for name, param in zip(self._names, self._params, strict=True) if id(param) not in ids)
        if name := next(new, None) or next(gone, None):
            return name
        self._structure = _structure(self._model)  # what was replaced has nothing that is trained
        return None

    def enter(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer of this process starts a step."""
        if not self._owns(optimizer):
            self._entered[id(optimizer)] = self._steps

    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer of this process has completed its step.

        Raises:
            ConfigError: it stepped attached parameters, and no attached optimizer stepped within its step or around it.
        """
        if self._owns(optimizer) or self._stepping or self._entered.pop(id(optimizer), -1) != self._steps:
            return
        stepped = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        trained = self._ids | {id(param) for param in self._model.parameters() if param.requires_grad}
        if any(id(param) in trained for param in stepped):
            passed = ", ".join(type(own).__name__ for own in self._optimizers)
            raise ConfigError(
                "optimizer must be the one that steps the model, got another one that did: "
                f"{type(optimizer).__name__}, while {passed} was passed; {ATTACH_AGAIN} with the one that steps, or a "
                "list where several do"
            )

    def _owns(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(own is optimizer for own in self._optimizers)


Structure = tuple[list[tuple[dict[str, Any], str, Any]], list[tuple[dict[str, Any], int]]]


def _structure(model: nn.Module) -> Structure:
    """Return all parameters and modules by position; comparing it costs a hundredth of traversing the model."""
    homes = [own for module in model.modules() for own in (module._parameters, module._modules)]
    return [(own, name, it) for own in homes for name, it in own.items()], [(own, len(own)) for own in homes]


def _place(param: Tensor) -> int:
    return (as_real(param) if is_sharded(param) else param).data_ptr()


def _is_gathered(there: Any, shard: Any) -> bool:
    """Return whether a parameter is FSDP2's gathered form of a shard, between forward and backward pass."""
    return isinstance(there, nn.Parameter) and is_sharded(shard) and not is_sharded(there)


_watches: "weakref.WeakSet[ParameterWatch]" = weakref.WeakSet()


@functools.cache
def _look_at_all_optimizers() -> None:
    register_optimizer_step_pre_hook(lambda optimizer, *_: _ask("enter", optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: _ask("leave", optimizer))


def _ask(what: str, optimizer: torch.optim.Optimizer) -> None:
    if not torch.compiler.is_compiling():
        for watch in list(_watches):
            getattr(watch, what)(optimizer)
