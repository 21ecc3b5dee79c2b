"""The user's own optimizer, in the place of those that the bench makes."""

from collections.abc import Sequence

import torch
from torch import nn

from accordion_bench.comm.replicas import Replicas
from accordion_bench.compressors.assemble import optimizer_node
from accordion_bench.compressors.base import Compressor
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.instantiate import Config
from accordion_bench.position import Rate

MOVED = ("momentum", "nesterov", "weight_decay")  # what a compressor may apply in the optimizer's place
UNREAD = {"dampening": 0, "maximize": False, "amsgrad": False}  # what none applies, and where it does nothing
READ = ("betas", "eps")  # what it may have to know, too


class UsersOptimizer:
    """As `InnerOptimizers` for one worker: the optimizer of the shared parameters is that of the replica.

    Args:
        optimizer: the user's.
        axis: whose parameters it trains.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, axis: Replicas) -> None:
        self.axis, self.common = axis, optimizer
        self.of_replicas: list[torch.optim.Optimizer] = []
        numbered = enumerate(optimizer.param_groups)
        group_of = {id(param): number for number, group in numbered for param in group["params"]}
        self._groups = [group_of[id(param)] for param in axis.params]  # by number: load_state_dict makes new ones

    def fork(self) -> None:
        """The replica's optimizer is the common one."""
        self.of_replicas = [self.common]

    def rate(self) -> Rate:
        """Learning rate that is set now: one, or one for each tensor where groups differ."""
        rates = [float(self.common.param_groups[number]["lr"]) for number in self._groups]
        return rates[0] if len(set(rates)) == 1 else rates


def stepping_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The innermost optimizer of wrappers that keep it as `.optimizer`, as Accelerate's and Lightning's do."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def refuse_parameters(named: Sequence[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer) -> None:
    """Refuse a model and an optimizer that are not about the same parameters.

    Raises:
        ConfigError: naming the first one that only one of them has.
    """
    if not named:
        raise ConfigError("model must have parameters that are trained, got none; pass one with requires_grad=True")
    known = {id(param) for _, param in named}
    held = {id(param) for group in optimizer.param_groups for param in group["params"] if param.requires_grad}
    if left := next((name for name, param in named if id(param) not in held), None):
        raise ConfigError(
            f"optimizer must hold all trained parameters of the model, got one without {left}; pass it to the "
            "optimizer, or call requires_grad_(False)"
        )
    if held - known:
        raise ConfigError(
            f"model must hold all parameters of the optimizer, got one that lacks {len(held - known)} of them; pass "
            "the module that holds all, or an optimizer for each module"
        )


def options_of(optimizer: torch.optim.Optimizer) -> Config:
    """What a configuration would say of this optimizer.

    Raises:
        ConfigError: groups differ in what a compressor may have to apply.
    """
    known = {"torch.optim.SGD": torch.optim.SGD, "torch.optim.AdamW": torch.optim.AdamW}
    kind = next((name for name, cls in known.items() if isinstance(optimizer, cls)), _path(type(optimizer)))
    first, *others = optimizer.param_groups
    found: Config = {key: first[key] for key in (*MOVED, *READ) if key in first}
    alike = [key for key in found if key != "weight_decay" or "betas" not in found]  # AdamW decays by itself
    differ = next((key for key in alike if any(group[key] != first[key] for group in others)), None)
    return {"_target_": kind, **found, **({"differs": differ} if differ else {})}


def hand_over(optimizer: torch.optim.Optimizer, compressor: Compressor) -> Config:
    """Take from the optimizer what the compressor applies itself; returns the values that were taken.

    Raises:
        ConfigError: parameter groups differ in one of them, or one has what the compressor's step would leave out.
    """
    if not compressor.traits.owns:
        return {}
    _refuse_unread(optimizer)
    if compressor.traits.shares_steps:
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


def _refuse_unread(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for key, off in UNREAD.items():
            if group.get(key, off) != off:
                raise ConfigError(
                    f"optimizer must have {key}={off} with a compressor that takes the step itself, which would leave "
                    f"it out, got {group[key]}; pass {key}={off}, or another compressor"
                )


def give_back(optimizer: torch.optim.Optimizer, taken: Config) -> None:
    """Put back what `hand_over` has taken."""
    for group in optimizer.param_groups:
        group |= taken


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
