"""Adapter that lets the user's optimizer take the place of the optimizers of the bench."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accordion_bench.comm.replicas import Replicas
from accordion_bench.compressors.assemble import optimizer_node
from accordion_bench.compressors.compressor import Compressor
from accordion_bench.optimizers.inner import OptimizerLike
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.instantiate import Config
from accordion_bench.position import Rate

MOVED = ("momentum", "nesterov", "weight_decay")  # options that a compressor may apply instead of the optimizer
# options that no compressor applies, with the values that have no effect
UNREAD = {"dampening": 0, "maximize": False, "amsgrad": False}
READ = ("betas", "eps")  # other options that a compressor may need


class Together:
    """Several optimizers of one model, with disjoint parameters, as one: Muon for matrices, AdamW for the rest."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> "Together":
        """States of all optimizers, with the methods `get` and `clear` of a dictionary."""
        return self

    def get(self, param: Tensor, default: Any) -> Any:
        """Return the state of one parameter from the optimizer that has it."""
        return next((own.state[param] for own in self.optimizers if param in own.state), default)

    def clear(self) -> None:
        """Clear all states."""
        for optimizer in self.optimizers:
            optimizer.state.clear()


Stepping = torch.optim.Optimizer | Together


def one_by_one(optimizer: Stepping) -> list[torch.optim.Optimizer]:
    """Return the user's optimizers as a list."""
    return optimizer.optimizers if isinstance(optimizer, Together) else [optimizer]


class UsersOptimizer:
    """The user's optimizer, or several as one object, with the interface of `InnerOptimizers`; `all` is their list."""

    def __init__(self, optimizer: Stepping, axis: Replicas) -> None:
        self.axis = axis
        self.common: OptimizerLike = optimizer
        self.of_replicas: list[OptimizerLike] = []
        self.all = one_by_one(optimizer)
        numbered = enumerate(optimizer.param_groups)
        group_of = {id(param): number for number, group in numbered for param in group["params"]}
        self._groups = [group_of[id(param)] for param in axis.params]  # load_state_dict creates new groups

    def fork(self) -> None:
        """Use the same optimizer for the replica."""
        self.of_replicas = [self.common]

    def rate(self) -> Rate:
        """Return the current learning rate: one number, or one per tensor if groups differ."""
        rates = [float(self.common.param_groups[number]["lr"]) for number in self._groups]
        return rates[0] if len(set(rates)) == 1 else rates


def stepping_optimizer(optimizer: Any) -> Any:
    """Return the innermost optimizer of wrappers with an attribute `optimizer`, as Accelerate's and Lightning's."""
    if isinstance(optimizer, list | tuple) and all(isinstance(own, torch.optim.Optimizer) for own in optimizer):
        each = [stepping_optimizer(own) for own in optimizer]
        return each[0] if len(each) == 1 else Together(each) if each else optimizer
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def refuse_parameters(named: Sequence[tuple[str, nn.Parameter]], optimizer: Stepping) -> None:
    """Raise ConfigError for a parameter that model or optimizer lacks, or that belongs to two optimizers."""
    if not named:
        raise ConfigError("model must have parameters that are trained, got none; pass one with requires_grad=True")
    known = {id(param) for _, param in named}
    listed = [id(param) for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    held = set(listed)
    if len(held) < len(listed):
        raise ConfigError(
            "optimizers must hold each parameter once, got one that two of them hold; pass each parameter to one"
        )
    if left := next((name for name, param in named if id(param) not in held), None):
        raise ConfigError(
            f"optimizer must hold all trained parameters of the model, got one without {left}; pass it to the "
            "optimizer, pass a list where the model has several optimizers, or call requires_grad_(False)"
        )
    if held - known:
        raise ConfigError(
            f"model must hold all parameters of the optimizer, got one that lacks {len(held - known)} of them; pass "
            "the module that holds all, or an optimizer for each module"
        )


def options_of(optimizer: Stepping) -> Config:
    """Return the options of an optimizer as in a configuration."""

    def kind_of_one(own: torch.optim.Optimizer) -> str:
        known = {"torch.optim.SGD": torch.optim.SGD, "torch.optim.AdamW": torch.optim.AdamW}
        path = f"{type(own).__module__}.{type(own).__qualname__}"
        return next((name for name, cls in known.items() if isinstance(own, cls)), path)

    kind = " and ".join(dict.fromkeys(map(kind_of_one, one_by_one(optimizer))))
    first, *others = optimizer.param_groups
    found: Config = {key: first[key] for key in (*MOVED, *READ) if key in first}
    # the decay of AdamW is not in the gradient
    alike = [key for key in found if key != "weight_decay" or "betas" not in found]
    differ = next((key for key in alike if any(group.get(key) != first[key] for group in others)), None)
    return {"_target_": kind, **found, **({"differs": differ} if differ else {})}


def hand_over(optimizer: Stepping, compressor: Compressor) -> Config:
    """Disable options of the optimizer that the compressor applies itself; return their previous values.

    Raises:
        ConfigError: parameter groups differ in such an option, or use an option that the compressor ignores.
    """
    if not compressor.traits.optimizer.owns:
        return {}
    _refuse_unread(optimizer)
    if compressor.traits.optimizer.looks_ahead:
        rule = "False here, because the model would be evaluated where gradients are computed"
        raise ValueRefused("compressor.look_ahead", rule, True, False)
    if compressor.traits.optimizer.shares_steps:
        return {}
    before = options_of(optimizer)
    left = optimizer_node(before, compressor)
    taken = {key: before[key] for key in MOVED if key in before and left[key] != before[key]}
    if before.get("differs"):
        raise ConfigError(
            f"optimizer must have one {before['differs']} for all groups with a compressor that takes the step "
            "itself, got several; pass one group"
        )
    for group in optimizer.param_groups:
        group |= {key: left[key] for key in taken}
    return taken


def _refuse_unread(optimizer: Stepping) -> None:
    for group in optimizer.param_groups:
        for key, off in UNREAD.items():
            if group.get(key, off) != off:
                raise ConfigError(
                    f"optimizer must have {key}={off} with a compressor that takes the step itself, which would leave "
                    f"it out, got {group[key]}; pass {key}={off}, or another compressor"
                )


def give_back(optimizer: Stepping, taken: Config) -> None:
    """Restore the options that `hand_over` disabled."""
    for group in optimizer.param_groups:
        group |= taken


def kind_of(optimizer: Stepping) -> str:
    """Return the class name, or several joined by `+`."""
    return "+".join(type(own).__name__ for own in one_by_one(optimizer))
