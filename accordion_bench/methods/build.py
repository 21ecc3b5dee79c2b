"""Build the methods of a training from the chosen options, and check them against each other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from accordion_bench.adaptive.policy import Policy, checked, in_order, notify_refiners
from accordion_bench.compressors.assemble import (
    CompressorSetup,
    check_optimizer,
    pseudo_gradient_compressor,
    wrapped_compressor,
)
from accordion_bench.exchange.partition import levelled, sent_specs
from accordion_bench.methods.compatibility import (
    MethodOptions,
    codebooks_of,
    ladder_of,
    refuse_pairs,
    refuse_scope,
    refuse_state_of_all_workers,
)
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.instantiate import build
from accordion_bench.plan import Ladder, Plan, RunFacts, TensorSpec
from accordion_bench.sync.scheme import Sync


@dataclass(frozen=True)
class Methods:
    """Compressors, policies and synchronisation scheme of a training.

    wrapped: the compressor of gradients, or of differences if gradients are never exchanged.
    differences: factory of the compressor of differences of parameters, if workers take local steps.
    policies: by name, in the order in which they decide.
    ladder: the knob's values that the plan's levels index.
    codebooks: quantisation levels by number of bits, if a policy drives them.
    run: facts of the training.
    """

    wrapped: CompressorSetup
    differences: Callable[[], CompressorSetup]
    policies: dict[str, Policy]
    ladder: Ladder
    codebooks: dict[int, tuple[float, ...]]
    sync: Sync
    run: RunFacts

    def plan_for(self, specs: Sequence[TensorSpec]) -> Plan:
        """Return the plan before the first step, after every policy has started.

        Raises:
            ConfigError: a policy's option does not fit the run, or its plan is invalid.
        """
        wrapped, weakest = self.wrapped, len(self.ladder.values) - 1
        sent = sent_specs(specs, wrapped.scope, wrapped.block_size)
        levels = dict.fromkeys(levelled(wrapped.compressor, sent, wrapped.exempt), weakest)
        plan = self.sync.start(Plan(levels, self.run.batch_size, codebooks=self.codebooks))
        run = self.run.with_specs(specs)
        for name, policy in self.policies.items():
            try:
                plan = checked(name, plan, policy.start(plan, self.ladder, run), self.ladder)
            except ValueRefused as refused:
                raise refused.under(f"adaptive.{name}") from None
            notify_refiners(list(self.policies.values()), policy, plan)
        return plan


def build_methods(chosen: MethodOptions, run: RunFacts, workers_per_process: int) -> Methods:
    """Build the methods and check them, individually and against each other, for W workers per process.

    Raises:
        ConfigError: a value breaks a rule, or two choices are incompatible.
    """
    name = chosen.compressor_name
    policies = {policy: build(node, f"adaptive.{policy}") for policy, node in chosen.adaptive.items()}
    sync: Sync = build(chosen.sync, "sync")
    own = sync.messages()
    wrapped = own or wrapped_compressor(chosen.compressor, chosen.optimizer if sync.gradient_exchange else None)
    refuse_pairs(chosen, wrapped.compressor, policies, sync)
    refuse_scope(wrapped, sync)
    if own is not None:
        check_optimizer(own.compressor, chosen.optimizer, who=f"sync={chosen.sync_name}")

    def differences() -> CompressorSetup:
        return sync.messages() or pseudo_gradient_compressor(chosen.compressor, name)

    wrapped = (wrapped if sync.gradient_exchange else differences()).fitted_to(run)
    if sync.elastic:
        refuse_state_of_all_workers(wrapped, name)
    policies = in_order(policies)
    sync.refuse_driven({policy.drives: name for name, policy in policies.items()}, run)
    sync.check(run, workers_per_process)
    ladder = ladder_of(wrapped.compressor, policies)
    codebooks = codebooks_of(wrapped.compressor, policies, ladder, name)
    methods = Methods(wrapped, differences, policies, ladder, codebooks, sync, run)
    refuse_unequal(run.batches, chosen, methods)
    return methods


def of_unequal(methods: Methods, batches: Sequence[int], chosen: MethodOptions) -> Methods:
    """Return the methods for a loop whose workers have different batch sizes.

    Raises:
        ValueRefused: as `refuse_unequal`.
    """
    if not batches:
        return methods
    refuse_unequal(batches, chosen, methods)
    run, most = methods.run, max(batches)
    return replace(methods, run=replace(run, batch_size=most, train_size=run.train_size // run.batch_size * most))


def refuse_unequal(batches: Sequence[int], chosen: MethodOptions, methods: Methods) -> None:
    """Refuse batches that differ between workers if the method's mean cannot be weighted by samples.

    Raises:
        ValueRefused: with a batch size that all workers can have.
    """
    if not batches:
        return
    driver = next((name for name, policy in methods.policies.items() if policy.drives == "batch"), None)
    why = ""
    if driver is not None:
        why = f"adaptive={driver}, which changes it for all workers"
    elif not methods.sync.weighs:
        why = f"sync={chosen.sync_name}, whose means weight all workers equally"
    elif not methods.wrapped.compressor.traits.scaled:
        why = f"compressor={chosen.compressor_name}, whose signs have no magnitude that could be weighted"
    if why:
        raise ValueRefused("batch_size", f"the same for all workers with {why}", list(batches), max(batches))
