"""From a resolved configuration to components: the single place that instantiates them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from accordion_bench.adaptive.base import Policy, checked, in_order, tell_followers
from accordion_bench.compressors.assemble import Wrapped, optimizer_node, pseudo_gradient_compressor, wrapped_compressor
from accordion_bench.compressors.base import Compressor
from accordion_bench.config.compatibility import refuse_pairs
from accordion_bench.datasets.base import Dataset
from accordion_bench.exchange.overlap_rules import ExchangeOptions
from accordion_bench.exchange.partition import levelled, sent_specs
from accordion_bench.optimizers.torch_optim import fused, without_dynamo
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.instantiate import Config, build, target
from accordion_bench.plan import Ladder, Plan, RunFacts, TensorSpec
from accordion_bench.run_config import RunConfig
from accordion_bench.schedules.base import Schedule
from accordion_bench.sync.base import Sync

NO_FREE_LEVEL = (-1.0, 0.0, 1.0)  # the ends are fixed, and so is 0


@dataclass(frozen=True)
class Components:
    """Everything that needs neither data nor devices.

    wrapped: the compressor of gradients; of differences where no gradients are ever exchanged.
    differences: makes the compressor of differences of parameters, where workers take local steps.
    threads: with which each process is to compute.
    slowdown: how many times as long a step takes here in 16 bits as in float32; 0 = not tried.
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
    exchange: ExchangeOptions
    threads: int = 1
    slowdown: float = 0.0

    def plan_for(self, specs: Sequence[TensorSpec]) -> Plan:
        """The plan before the first step, after every policy has started.

        Raises:
            ConfigError: a policy's option does not fit the run, or its plan is none.
        """
        wrapped, weakest = self.wrapped, len(self.ladder.values) - 1
        sent = sent_specs(specs, wrapped.scope, wrapped.block_size)
        levels = dict.fromkeys(levelled(wrapped.compressor, sent), weakest)
        plan = self.sync.start(Plan(levels, self.run.batch_size, codebooks=self.codebooks))
        for name, policy in self.policies.items():
            try:
                plan = checked(name, plan, policy.start(plan, self.ladder, self.run), self.ladder)
            except ValueRefused as refused:
                raise refused.under(f"adaptive.{name}") from None
            tell_followers(list(self.policies.values()), policy, plan)
        return plan


def build_components(config: RunConfig, workers: int) -> Components:
    """Build and check every component of a run.

    Raises:
        ConfigError: a value breaks a rule, or two choices do not go together.
    """
    comm, name = config.comm, config.chosen("compressor")
    policies = {name: build(node, f"adaptive.{name}") for name, node in config.adaptive.items()}
    sync, dataset = build(config.sync, "sync"), build(config.dataset, "dataset")
    schedule = build(config.schedule, "schedule", epochs=config.epochs, workers=workers)
    wrapped = wrapped_compressor(config.compressor, config.optimizer if sync.gradient_exchange else None)
    refuse_pairs(config, wrapped.compressor, policies, sync)

    def differences() -> Wrapped:
        return pseudo_gradient_compressor(config.compressor, name)

    wrapped = wrapped if sync.gradient_exchange else differences()
    policies = in_order(policies)
    run = RunFacts(config.epochs, workers, dataset.train_count, config.batch_size, schedule, schedule.rises_until)
    sync.refuse_driven({policy.drives: name for name, policy in policies.items()}, run)
    sync.check(run, comm.workers_per_process or workers // (comm.processes or 1))
    ladder = _ladder(wrapped.compressor, policies)
    parts = Components(
        wrapped=wrapped,
        differences=differences,
        policies=policies,
        ladder=ladder,
        codebooks=_codebooks(wrapped.compressor, policies, ladder, name),
        schedule=schedule,
        sync=sync,
        dataset=dataset,
        run=run,
        exchange=exchange_options(config),
    )
    parts.plan_for([])  # what a policy cannot do in this run is refused here
    return parts


def exchange_options(config: RunConfig) -> ExchangeOptions:
    """What of a run decides how and when gradients are exchanged."""
    comm = config.comm
    clips = bool(config.clip_norm) and config.clip_at != "after"
    return ExchangeOptions(comm.engine, comm.overlap, comm.bucket_cap_mb, config.precision == "float16", clips)


def build_optimizer(optimizer: Config, compressor: Compressor, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer, without what the compressor applies itself."""
    node = optimizer_node(optimizer, compressor)
    device = params[0].device
    return build(node, "optimizer", positional=[params], adapt=lambda cls: fused(without_dynamo(cls), device))


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
    compressor: Compressor, policies: dict[str, Policy], ladder: Ladder, name: str
) -> dict[int, tuple[float, ...]]:
    """Where a policy drives codebooks: one per number of bits that the plan may choose, the compressor's own."""
    driver = next((name for name, policy in policies.items() if policy.drives == "codebook"), None)
    if driver is None:
        return {}
    bits = [int(value) for value in ladder.values] if compressor.traits.knob == "bits" else []
    own = {b: compressor.codebook(b) for b in bits}
    books = {b: tuple(torch.tensor(levels).tolist()) for b, levels in own.items() if levels is not None}
    if not books:
        knob, instead = compressor.traits.knob_with
        if knob == "bits":
            raise ConfigError(
                f"adaptive={driver} needs a compressor with a codebook to replace, got one whose levels are fixed; "
                f"type {instead}"
            )
        raise ConfigError(
            f"adaptive={driver} needs a compressor with a codebook of its own, got compressor={name}; "
            "type compressor=qsgd"
        )
    if max(map(len, books.values())) <= len(NO_FREE_LEVEL):
        raise ConfigError(
            f"compressor.zero_level must be false where adaptive={driver} fits 2 bits, got true, which leaves it the "
            "levels -1, 0 and 1, of which none can move; type compressor.zero_level=false"
        )
    return books


def build_model(node: Config, dataset: Dataset, name: str = "this one", data: str = "this one") -> nn.Module:
    """The model for a data set, with random weights.

    Args:
        node: the model's options.
        dataset: what it is to learn.
        name, data: what was chosen, for messages.

    Raises:
        ConfigError: the model is of another task, or needs larger images.
    """
    task = getattr(target(node, "model"), "task", "images")
    if task != dataset.task:
        instead = {"images": "dataset=digits", "text": "dataset=pydocs"}[task]
        raise ConfigError(f"model={name} needs a data set of {task}, got dataset={data}; type {instead}")
    built = build(node, "model", **dataset.model_arguments())
    smallest, size = getattr(built, "min_size", 1), getattr(dataset, "image_size", 1)
    if task == "images" and size < smallest:
        raise ConfigError(
            f"model={name} needs images of at least {smallest} x {smallest} pixels, got dataset={data} with {size}; "
            "type model=resnet20, or dataset=cifar10"
        )
    return built
