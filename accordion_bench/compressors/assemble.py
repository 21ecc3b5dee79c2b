"""Build a compressor and its wrappers from the options of one config group."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from accordion_bench.compressors.compressor import Compressor
from accordion_bench.compressors.description import COLLECTIVES, OF_COMPRESSORS, OptimizerPart, Traits, declared_by
from accordion_bench.compressors.ef21 import EF21
from accordion_bench.compressors.error_feedback import ErrorFeedback, LoCo
from accordion_bench.compressors.gathered import Gathered
from accordion_bench.compressors.sparse import Sparse
from accordion_bench.compressors.tree import Tree
from accordion_bench.compressors.two_way import TwoWay
from accordion_bench.compressors.wrapper import WorkerMomentum
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.component import Idle, RunContext, idle_options
from accordion_bench.options.instantiate import Config, build, target
from accordion_bench.options.option import Option, option, options_of, with_options
from accordion_bench.plan import WHOLE_MODEL, RunFacts

WRAPPERS = (ErrorFeedback, EF21, LoCo, TwoWay, WorkerMomentum)  # LoCo shares options with ErrorFeedback


@with_options
class CommonOptions:
    """Options of every compressor's config group that belong to no wrapper."""

    error_feedback: bool | str = option(
        "true: the compression error is added to the next gradient; false; ef21, loco: other forms",
        default=False,
        choices=(True, False, "ef21", "loco"),
        instead=True,
    )
    worker_momentum: bool = option(
        "optimizer.momentum and optimizer.nesterov act on the workers, before compression", default=False
    )
    collective: str | None = option(default=None)
    scope: str = option(default="tensor", choices=("tensor", WHOLE_MODEL))
    start_step: int = option("first compressed step; earlier steps are exchanged dense", default=0, at_least=0)


def options_beside(cls: Any) -> dict[str, Option]:
    """Return the options of the wrappers, by name, as they appear in the config group of a compressor's class."""
    traits = declared_by(cls) or Traits()
    found = {name: one for part in (CommonOptions, *WRAPPERS) for name, one in options_of(part).items() if one.shown}
    found["collective"] = replace(found["collective"], default=traits.collectives[0], choices=traits.collectives)
    if not traits.whole_model:
        found["scope"] = replace(found["scope"], choices=(), help="tensor: each tensor is compressed by itself")
    return found


@dataclass(frozen=True)
class CompressorSetup:
    """A compressor in its wrappers, with the other settings of the exchange.

    Args:
        compressor: the outermost wrapper.
        scope: the unit of compression: `tensor`, `model` or `bucket`.
        start_step: first step that is compressed; earlier steps are exchanged dense.
        block_size: coordinates of a bucket, with `scope=bucket`.
        collective: the collective that carries the messages, one of the compressor's.
        exempt: names of tensors that are always exchanged dense.
    """

    compressor: Compressor
    scope: str = "tensor"
    start_step: int = 0
    block_size: int | None = None
    collective: str = ""
    exempt: frozenset[str] = frozenset()

    def fitted_to(self, run: RunFacts) -> "CompressorSetup":
        """Return a copy for a run of known length, which the compressor's options must fit."""
        try:
            self.compressor.fit_to(run)
        except ValueRefused as refused:
            raise refused.under("compressor") from None
        return replace(self, start_step=max(self.start_step, self.compressor.start_step))

    @property
    def for_exchange(self) -> Config:
        """Keyword arguments for `Exchange`."""
        return {key: getattr(self, key) for key in ("scope", "start_step", "block_size", "exempt")}


def pseudo_gradient_compressor(node: Config, name: str = "this one") -> CompressorSetup:
    """Return the compressor for local methods, which exchange differences of parameters.

    The inner optimizer keeps its momentum. Residuals have the units of the parameters, without scaling.

    Raises:
        ConfigError: the method needs a gradient in every step.
    """
    plain = {"worker_momentum": False, "residual_units": "gradient"}
    wrapped = wrapped_compressor({**node, **{key: value for key, value in plain.items() if key in node}})
    compressor = wrapped.compressor
    instead = {"compressor": "topk"}, {"sync": "every_step"}
    if compressor.traits.reduces == "estimate":
        rule = "{true} or {false} where workers take local steps, because ef21 has its own momentum"
        raise ValueRefused("compressor.error_feedback", rule, "ef21", True)
    if compressor.traits.optimizer.owns:
        raise ConfigError(
            f"compressor must leave momentum and step to the optimizer where workers take local steps, got {name}, "
            "which has its own momentum",
            *instead,
        )
    if compressor.traits.reduces not in ("mean", "senders"):
        what = {"sum": "a sum over the workers", "vote": "a vote of signs"}.get(compressor.traits.reduces, "signs")
        raise ConfigError(
            f"compressor must preserve the scale of its input where workers take local steps, got {name}, "
            f"which returns {what}",
            *instead,
        )
    return wrapped


def wrapped_compressor(
    node: Config, optimizer: Config | None = None, carried: Callable[[Compressor], Compressor] | None = None
) -> CompressorSetup:
    """Return the compressor in its wrappers, whose options are in the same config group as its own.

    Args:
        node: the config group.
        optimizer: options of the optimizer, from which methods with built-in momentum take `momentum` and `nesterov`.
        carried: wraps the compressor inside all other wrappers, to replace its exchange; None = its own exchange.

    Raises:
        ConfigError: a value breaks a rule, or two choices are incompatible.
    """
    options, optimizer = dict(node), optimizer or {}
    common = CommonOptions(**_taken(options, CommonOptions))
    feedback, ef21, average, server, decay = (_taken(options, wrapper) for wrapper in WRAPPERS)
    error_feedback, scope = common.error_feedback, common.scope
    block_size = options.get("block_size") if options.get("block") == "bucket" else None
    momentum = _momentum_of(optimizer)
    cls = target(options, "compressor")
    declared = declared_by(cls) or Traits()
    reasons = getattr(cls, "description", OF_COMPRESSORS)
    if "momentum" in declared.optimizer.takes:
        options |= momentum
    if "betas" in declared.optimizer.takes:
        options |= {key: optimizer[key] for key in ("betas", "eps") if key in optimizer}
    if "error_feedback" in declared.optimizer.takes:
        options["error_feedback"] = bool(error_feedback)
    if error_feedback and reasons.no_error_feedback:
        rule = f"{{false}}, because {reasons.no_error_feedback}"
        raise ValueRefused("compressor.error_feedback", rule, error_feedback, False)
    compressor: Compressor = build(options, "compressor")
    try:
        collective = check_collective(compressor, common.collective or compressor.traits.collectives[0])
        if scope == WHOLE_MODEL and not compressor.traits.whole_model:
            rule = "tensor, because this compressor works on matrices, and a whole model is not a matrix"
            raise ValueRefused("scope", rule, scope, "tensor")
        if scope == WHOLE_MODEL and block_size:
            raise ValueRefused("scope", "tensor where block is bucket", scope, "tensor")
        if collective == "two_way" and compressor.traits.collectives != ("two_way",):
            assert isinstance(compressor, Gathered), "only one-shot messages can be compressed again by their owners"
            if compressor.entropy != "none":
                rule = "none with collective=two_way, because no worker receives all workers' codes"
                raise ValueRefused("entropy", rule, compressor.entropy, "none")
            compressor = TwoWay(compressor, residual=bool(error_feedback), **server)
        if collective == "tree":
            assert isinstance(compressor, Sparse), "only sparse messages can be merged"
            compressor = Tree(compressor)
        if carried is not None:
            compressor = carried(compressor)
        if error_feedback == "ef21":
            if feedback.get("residual_bits") == 8:
                rule = "{null} or 32 with error_feedback=ef21, because other workers could not reproduce the rounding"
                raise ValueRefused("residual_bits", rule, 8, None)
            compressor = EF21(compressor, **ef21)
        elif error_feedback == "loco":
            compressor = LoCo(compressor, **feedback, **average)
        elif error_feedback:
            compressor = ErrorFeedback(compressor, **feedback)
        if common.worker_momentum and "momentum" in compressor.traits.optimizer.owns:
            rule = "{false}, because this compressor has its own momentum"
            raise ValueRefused("worker_momentum", rule, True, False)
        if common.worker_momentum:
            compressor = WorkerMomentum(compressor, **momentum, **decay)
    except ValueRefused as refused:
        raise refused.under("compressor") from None
    check_optimizer(compressor, optimizer, common.worker_momentum)
    start_step = max(common.start_step, compressor.start_step)
    return CompressorSetup(compressor, "bucket" if block_size else scope, start_step, block_size, collective)


def _taken(options: Config, part: Any) -> Config:
    """Remove the options of a wrapper from those of a compressor, and return them checked."""
    own = {name: one for name, one in options_of(part).items() if one.shown and name in options}
    return {name: one.checked(options.pop(name), f"compressor.{name}") for name, one in own.items()}


def check_collective(compressor: Compressor, value: str) -> str:
    """Check that a collective can carry a compressor's messages, and return it."""
    traits = compressor.traits
    if value not in COLLECTIVES:
        raise ValueRefused("collective", " or ".join(traits.collectives), value, traits.collectives[0])
    if value not in traits.collectives:
        rule = f"{' or '.join(traits.collectives)}, because {compressor.description.collective_reason}"
        raise ValueRefused("collective", rule, value, traits.collectives[0])
    return value


def idle(node: Config, context: RunContext) -> Idle:
    """Yield options that have no effect, of the compressor and of the wrappers in the same config group."""
    for cls in (target(node, "compressor"), *WRAPPERS):
        yield from idle_options(cls, node, context)


def _momentum_of(optimizer: Config) -> Config:
    return {"momentum": optimizer.get("momentum", 0.0), "nesterov": optimizer.get("nesterov", False)}


def check_optimizer(
    compressor: Compressor, optimizer: Config, moves_momentum: bool = False, who: str = "this compressor"
) -> None:
    """Refuse an optimizer that would repeat what the compressor does, or could not take its step.

    Args:
        compressor, optimizer: in its wrappers; options, empty = unknown.
        moves_momentum: whether a wrapper applies the optimizer's momentum.
        who: noun for error messages, of the part that takes the step.
    """
    if not compressor.traits.optimizer.owns or not optimizer:
        return
    fits = compressor.traits.optimizer.fits
    if str(optimizer.get("_target_")).rpartition(".")[2] not in fits:
        name = fits[0].lower()
        how = "takes the step itself and leaves the optimizer no gradient"
        if compressor.traits.optimizer.shares_steps:
            how = "takes the step of some tensors itself, and leaves the others to it"
        raise ConfigError(
            f"optimizer must be {name}, because {who} {how}, got {optimizer.get('_target_')}",
            {"optimizer": name},
        )
    takes = moves_momentum or "momentum" in compressor.traits.optimizer.takes
    if optimizer.get("momentum") and not takes:
        rule = "0, because this compressor has its own momentum or takes the step itself"
        raise ValueRefused("optimizer.momentum", rule, optimizer["momentum"], 0)


def optimizer_node(optimizer: Config, compressor: Compressor) -> Config:
    """Return the optimizer's options without those that the compressor applies; all of them with `shares_steps`."""
    if not compressor.traits.optimizer.owns or compressor.traits.optimizer.shares_steps:
        return optimizer
    node = dict(optimizer)
    decaying = getattr(target(optimizer, "optimizer"), "decaying", "")
    if decaying:
        return node | {"_target_": decaying}
    part = compressor.traits.optimizer
    if part.weight_decay_mode != "after_decode" and part.fits == OptimizerPart().fits:
        node |= {"momentum": 0.0, "nesterov": False}
    if part.weight_decay_mode == "in_gradient":
        node |= {"weight_decay": 0.0}
    return node
