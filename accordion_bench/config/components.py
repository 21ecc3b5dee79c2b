"""From a resolved configuration to components: the single place that instantiates them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from accordion_bench.adaptive.base import Policy, in_order, tell_followers
from accordion_bench.compressors.assemble import Wrapped, optimizer_node, pseudo_gradient_compressor, wrapped_compressor
from accordion_bench.compressors.base import Compressor
from accordion_bench.config.compatibility import refuse_pairs
from accordion_bench.datasets.base import Dataset
from accordion_bench.exchange.partition import levelled, sent_specs
from accordion_bench.optimizers.torch_optim import without_dynamo
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.instantiate import Config, build, target
from accordion_bench.plan import Ladder, Plan, RunFacts, TensorSpec
from accordion_bench.schedules.base import Schedule
from accordion_bench.sync.base import Sync


@dataclass(frozen=True)
class Components:
    """Everything that needs neither data nor devices.

    wrapped: the compressor of gradients; of differences where no gradients are ever exchanged.
    differences: makes the compressor of differences of parameters, where workers take local steps.
    """

    wrapped: Wrapped
    differences: Callable[[], Wrapped]
    policies: dict[str, Policy]
    ladder: Ladder
    codebooks: dict[int, tuple[float, ...]]
    schedule: Schedule
    sync: Sync
    dataset: Dataset
    run: RunFacts

    def plan_for(self, specs: Sequence[TensorSpec]) -> Plan:
        """The plan before the first step, after every policy has started.

        Raises:
            ValueRefused: a policy's option does not fit the run.
        """
        wrapped, weakest = self.wrapped, len(self.ladder.values) - 1
        sent = sent_specs(specs, wrapped.scope, wrapped.block_size)
        levels = dict.fromkeys(levelled(wrapped.compressor, sent), weakest)
        plan = self.sync.start(Plan(levels, self.run.batch_size, codebooks=self.codebooks))
        for name, policy in self.policies.items():
            try:
                plan = policy.start(plan, self.ladder, self.run)
            except ValueRefused as refused:
                raise refused.under(f"adaptive.{name}") from None
            tell_followers(list(self.policies.values()), policy, plan)
        return plan


def build_components(cfg: Config, workers: int) -> Components:
    """Build and check every component of a run.

    Raises:
        ConfigError: a value breaks a rule, or two choices do not go together.
    """
    choices = cfg.get("choices", {})
    policies = {name: build(node, f"adaptive.{name}") for name, node in (cfg.get("adaptive") or {}).items()}
    sync, dataset = build(cfg["sync"], "sync"), build(cfg["dataset"], "dataset")
    schedule = build(cfg["schedule"], "schedule", epochs=cfg["epochs"], workers=workers)
    wrapped = wrapped_compressor(cfg["compressor"], cfg["optimizer"] if sync.gradient_exchange else None)
    refuse_pairs(cfg, wrapped.compressor, policies, sync)

    def differences() -> Wrapped:
        return pseudo_gradient_compressor(cfg["compressor"], choices.get("compressor", "this one"))

    wrapped = wrapped if sync.gradient_exchange else differences()
    policies = in_order(policies)
    run = RunFacts(cfg["epochs"], workers, dataset.train_count, cfg["batch_size"], schedule, schedule.rises_until)
    sync.refuse_driven({policy.drives: name for name, policy in policies.items()}, run)
    sync.check(cfg, run)
    ladder = _ladder(wrapped.compressor, policies)
    parts = Components(
        wrapped=wrapped,
        differences=differences,
        policies=policies,
        ladder=ladder,
        codebooks=_codebooks(wrapped.compressor, policies, ladder, cfg),
        schedule=schedule,
        sync=sync,
        dataset=dataset,
        run=run,
    )
    parts.plan_for([])  # what a policy cannot do in this run is refused here
    return parts


def build_optimizer(cfg: Config, compressor: Compressor, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer, without what the compressor applies itself."""
    node = optimizer_node(cfg["optimizer"], compressor)
    return build(node, "optimizer", positional=[params], adapt=without_dynamo)


def _ladder(compressor: Compressor, policies: dict[str, Policy]) -> Ladder:
    """The levels that plans may hold: those of all policies that drive them, or the configured one."""
    traits = compressor.traits
    drivers = {name: policy for name, policy in policies.items() if policy.drives == "level"}
    if not drivers:
        return Ladder(traits.knob or "", () if compressor.level is None else (compressor.level,), traits.pair)
    assert traits.knob is not None
    values: set[float] = set()
    for driver, policy in drivers.items():
        try:
            own = policy.ladder(traits.knob, traits.pair)
        except ValueRefused as refused:
            raise refused.under(f"adaptive.{driver}") from None
        first, *rest = policy.level_keys
        for key, value in zip([first, *rest * len(own)], own, strict=False):
            try:
                values.add(compressor.check_level(key, value))
            except ValueRefused as refused:  # maybe of another option of the compressor
                raise refused.under(f"adaptive.{driver}" if refused.key == key else "compressor") from None
    return Ladder(traits.knob, tuple(sorted(values)), traits.pair)


def _codebooks(
    compressor: Compressor, policies: dict[str, Policy], ladder: Ladder, cfg: Config
) -> dict[int, tuple[float, ...]]:
    """Where a policy drives codebooks: one per number of bits that the plan may choose, the compressor's own."""
    driver = next((name for name, policy in policies.items() if policy.drives == "codebook"), None)
    if driver is None:
        return {}
    bits = [int(value) for value in ladder.values] if compressor.traits.knob == "bits" else []
    own = {b: compressor.codebook(b) for b in bits}
    books = {b: tuple(torch.tensor(levels).tolist()) for b, levels in own.items() if levels is not None}
    if not books:
        name, (knob, instead) = cfg.get("choices", {}).get("compressor", "this one"), compressor.traits.knob_with
        if knob == "bits":
            raise ConfigError(
                f"adaptive={driver} needs a compressor with a codebook to replace, got one whose levels are fixed; "
                f"type {instead}"
            )
        raise ConfigError(
            f"adaptive={driver} needs a compressor with a codebook of its own, got compressor={name}; "
            "type compressor=qsgd"
        )
    return books


def build_model(cfg: Config, dataset: Dataset) -> nn.Module:
    """The model for a data set, with random weights.

    Raises:
        ConfigError: the model is of another task, or needs larger images.
    """
    model, choices = target(cfg["model"], "model"), cfg.get("choices", {})
    name, data = choices.get("model", "this one"), choices.get("dataset", "this one")
    task = getattr(model, "task", "images")
    if task != dataset.task:
        instead = {"images": "dataset=digits", "text": "dataset=pydocs"}[task]
        raise ConfigError(f"model={name} needs a data set of {task}, got dataset={data}; type {instead}")
    built = build(cfg["model"], "model", **dataset.model_arguments())
    smallest, size = getattr(built, "min_size", 1), getattr(dataset, "image_size", 1)
    if task == "images" and size < smallest:
        raise ConfigError(
            f"model={name} needs images of at least {smallest} x {smallest} pixels, got dataset={data} with {size}; "
            "type model=resnet20, or dataset=cifar10"
        )
    return built
