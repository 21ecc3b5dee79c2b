"""Compatibility of policies, compressors and synchronisation schemes: every pair runs, or is refused here.

Each refusal is one sentence that gives the reason and an alternative.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from accordion_bench.adaptive.policy import Policy
from accordion_bench.compressors.assemble import CompressorSetup, pseudo_gradient_compressor, wrapped_compressor
from accordion_bench.compressors.compressor import Compressor
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.conf_dir import read_options, yaml_files
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import WHOLE_MODEL, Ladder
from accordion_bench.sync.scheme import Sync


@dataclass(frozen=True)
class MethodOptions:
    """The methods of a training, as options.

    Args:
        compressor_name, sync_name: names of the YAML files, for messages.
        compressor, sync: their options, with `_target_`.
        adaptive: the options of each policy by its name, in order.
        optimizer: the options of the optimizer, with `_target_`.
    """

    compressor_name: str
    compressor: Config
    sync_name: str
    sync: Config
    adaptive: Mapping[str, Config] = field(default_factory=dict)
    optimizer: Config = field(default_factory=dict)


NO_FREE_LEVEL = (-1.0, 0.0, 1.0)  # both ends and 0 are fixed


def ladder_of(compressor: Compressor, policies: dict[str, Policy]) -> Ladder:
    """Return the levels that plans may contain: those of all policies that drive them, or the configured one."""
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
            except ValueRefused as refused:  # possibly because of another option of the compressor
                raise refused.under(f"adaptive.{driver}" if refused.key == key else "compressor") from None
    return Ladder(traits.knob, tuple(sorted(values)), traits.pair)


def codebooks_of(
    compressor: Compressor, policies: dict[str, Policy], ladder: Ladder, name: str
) -> dict[int, tuple[float, ...]]:
    """Return the compressor's codebook for each number of bits of the ladder, if a policy drives codebooks; else {}."""
    driver = next((name for name, policy in policies.items() if policy.drives == "codebook"), None)
    if driver is None:
        return {}
    bits = [int(value) for value in ladder.values] if compressor.traits.knob == "bits" else []
    own = {b: compressor.codebook(b) for b in bits}
    books = {b: tuple(torch.tensor(levels).tolist()) for b, levels in own.items() if levels is not None}
    if not books:
        knob, instead = compressor.description.knob_with
        if knob == "bits":
            raise ConfigError(
                f"adaptive={driver} needs a compressor with a codebook to replace, got one whose levels are fixed",
                instead,
            )
        raise ConfigError(
            f"adaptive={driver} needs a compressor with a codebook of its own, got compressor={name}",
            {"compressor": "qsgd"},
        )
    if max(map(len, books.values())) <= len(NO_FREE_LEVEL):
        raise ConfigError(
            f"compressor.zero_level must be false where adaptive={driver} fits 2 bits, got true, which leaves only the "
            "fixed levels -1, 0 and 1",
            {"compressor.zero_level": False},
        )
    return books


def refuse_pairs(chosen: MethodOptions, compressor: Compressor, policies: dict[str, Policy], sync: Sync) -> None:
    """Raise ConfigError for the first incompatible pair of choices."""
    name = chosen.compressor_name
    check_drivers(policies)
    for policy_name, policy in policies.items():
        check_scheme(policy_name, policies, sync, chosen.sync_name)
        check_averages(policy_name, policy, sync, chosen.sync_name)
        check_knob(policy_name, policy, compressor, name)
        check_exchanges(policy_name, policy, sync, chosen.sync_name)
    own_messages = sync.messages() is not None
    leaves_nothing = "which defines its own messages" if own_messages else sync.without_averages
    if leaves_nothing and name != "none":
        raise ConfigError(
            f"compressor must be none with sync={chosen.sync_name}, {leaves_nothing}, got {name}",
            {"compressor": "none"},
        )
    if (sync.local or sync.elastic) and compressor.traits.optimizer.looks_ahead:
        where = "workers take local steps" if sync.local else "sync.elastic lets workers join and leave"
        raise ValueRefused("compressor.look_ahead", f"{{false}} where {where}", True, False)
    if sync.local and not own_messages:
        differences = pseudo_gradient_compressor(chosen.compressor, name)
        if sync.quorum is not None:
            check_quorum(differences, name)
        if sync.gradient_exchange and compressor.traits.optimizer.owns:
            instead = {"sync.phase1": "model"} if "phase1" in chosen.sync else {"sync.switch_step": 0}
            raise ConfigError(
                f"compressor must leave the momentum to the optimizer in synchronous steps before local ones, got "
                f"{name}, which would leave the inner optimizers without a momentum at the switch",
                instead,
            )


def refuse_clipping_after(sync: Sync, compressor: Compressor) -> None:
    """Refuse `clip_at=after` if the update is not a gradient."""
    if sync.local or compressor.traits.optimizer.owns:
        what = "workers take local steps" if sync.local else "the compressor takes the step itself"
        raise ValueRefused("clip_at", f"before where {what}, because the update is not a gradient", "after", "before")


def check_quorum(wrapped: CompressorSetup, name: str) -> None:
    """Refuse a compressor whose messages depend on the participants, for schemes that leave out late workers."""
    why = ""
    if wrapped.collective == "two_way":
        why = "whose messages are sharded over all workers"
    elif not wrapped.compressor.traits.fixed_size:
        why = "whose message sizes all workers must know"
    if why:
        raise ConfigError(
            f"compressor must send messages of a fixed size to all where sync.quorum leaves late workers out, got "
            f"{name}, {why}",
            {"compressor": "topk"},
            {"sync.quorum": None},
        )


def refuse_state_of_all_workers(wrapped: CompressorSetup, name: str) -> None:
    """Refuse a compressor whose state depends on the set of all workers, for elastic schemes."""
    why: str = ""
    instead: Config = {"compressor": "topk"}
    if wrapped.collective == "two_way":
        why = "whose owners keep residuals of other workers' messages"
    elif wrapped.compressor.traits.reduces == "estimate":
        why, instead = "whose estimate is the mean of all workers' states", {"compressor.error_feedback": True}
    if why:
        raise ConfigError(
            f"compressor must have no state that depends on the set of workers where sync.elastic lets them join and "
            f"leave, got {name}, {why}",
            instead,
            {"sync.elastic": False},
        )


def check_drivers(policies: dict[str, Policy]) -> None:
    """Refuse policies that drive one quantity, unless the later refines the earlier one, or that need two schemes."""
    drivers: dict[str, str] = {}
    for name, policy in policies.items():
        earlier = drivers.get(policy.drives)
        if policy.drives and earlier and not policy.refines:
            turned = policies[earlier].refines
            instead = [name, earlier] if turned else name
            raise ConfigError(
                f"adaptive must not drive the same quantity twice, got {earlier} and {name}, which both drive the "
                f"{policy.drives}",
                {"adaptive": instead},
            )
        drivers[policy.drives] = name
    schemes = {policy.syncs[0]: name for name, policy in policies.items() if len(policy.syncs) == 1}
    if len(schemes) > 1:
        (first, one), (_, other) = list(schemes.items())[:2]
        raise ConfigError(
            f"adaptive must choose one synchronisation scheme, got {one} and {other}, which need two",
            {"adaptive": one},
            f"sync={first} with other policies",
        )


def check_scheme(name: str, policies: dict[str, Policy], sync: Sync, scheme: str) -> None:
    """Check that a policy's own scheme is chosen, and that a policy of the period has a scheme with a period."""
    policy = policies[name]
    if policy.syncs and scheme not in policy.syncs:
        others = [other for other in policies if other != name]
        if period := next((other for other in others if policies[other].drives == "period"), None):
            rest = others[0] if len(others) == 1 else others
            raise ConfigError(
                f"adaptive={name} needs sync={policy.syncs[0]}, got sync={scheme}, which adaptive={period} chooses "
                "unless sync= is typed",
                {"sync": policy.syncs[0], "adaptive": rest},
            )
        raise ConfigError(
            f"adaptive={name} needs sync={policy.syncs[0]}, got sync={scheme}",
            f"adaptive={name} without sync=",
            f"sync={scheme} without adaptive={name}",
        )
    if policy.drives != "period":
        return
    driven, why = "the period between averagings", ""
    if not sync.local:
        why = "which exchanges in every step"
    elif sync.grows:
        why = "whose period grows by itself"
    elif sync.without_averages:
        driven, why = f"{driven} of all workers", sync.without_averages
    elif sync.groups:
        driven, why = "one period", "whose groups have one period each"
    if why:
        instead = {"sync": "local_sgd", "adaptive": name}
        raise ConfigError(f"adaptive={name} drives {driven}, got sync={scheme}, {why}", instead)


def check_exchanges(name: str, policy: Policy, sync: Sync, scheme: str) -> None:
    """Refuse a policy that needs gradients, or all tensors in each exchange, if the scheme does not exchange them."""
    if policy.needs_gradients and sync.local:
        raise ConfigError(
            f"adaptive={name} needs sync=every_step, got sync={scheme}, whose workers exchange differences of "
            f"parameters, not gradients",
            {"sync": "every_step", "adaptive": name},
        )
    if sync.partial and policy.when == "exchange" and policy.drives != "period":
        raise ConfigError(
            f"adaptive={name} needs all tensors in each exchange, got sync={scheme}, which averages some of them at "
            "a time",
            {"sync": "diloco", "adaptive": name},
        )


def refuse_scope(wrapped: CompressorSetup, sync: Sync) -> None:
    """Refuse units of several tensors if tensors are averaged at different times."""
    rule = "tensor where parts of the model are averaged at different times"
    if sync.partial and wrapped.scope == WHOLE_MODEL:
        raise ValueRefused("compressor.scope", rule, "model", "tensor")
    if sync.partial and wrapped.scope != "tensor":
        raise ConfigError(
            f"compressor.block must be {rule}, got bucket",
            {"compressor.block": "tensor", "compressor.block_size": None},
        )


def check_averages(name: str, policy: Policy, sync: Sync, scheme: str) -> None:
    """Refuse a policy that steers a compressor, or uses averages, if the scheme has no averages."""
    if sync.without_averages and policy.drives in ("level", "codebook"):
        raise ConfigError(
            f"adaptive={name} steers a compressor, got sync={scheme}, {sync.without_averages}, so that it has none",
            {"sync": "diloco"},
        )
    if sync.without_averages and getattr(policy, "signal", "") == "norm_of_sum_update":
        raise ConfigError(
            f"adaptive.{name}.statistic must be local or mean with sync={scheme}, {sync.without_averages}, got update",
            {f"adaptive.{name}.statistic": "local"},
        )


def check_knob(name: str, policy: Policy, compressor: Compressor, chosen: str) -> None:
    """Refuse a policy of levels if the compressor has no knob that it can steer."""
    if policy.drives != "level":
        return
    traits = compressor.traits
    if traits.knob is None or (policy.knobs and traits.knob not in policy.knobs):
        kind = f"the knob {' or '.join(policy.knobs)}" if policy.knobs else "levels"
        knob, instead = compressor.description.knob_with
        if knob and (not policy.knobs or knob in policy.knobs):
            raise ConfigError(
                f"adaptive={name} needs a compressor with {kind} to choose from, got one whose fixed levels leave "
                "nothing to choose",
                instead,
            )
        by_name = {c: knob for c, knob in knobs().items() if knob and (not policy.knobs or knob in policy.knobs)}
        one_of_each = {knob: c for c, knob in by_name.items()}  # if there are many, suggest one per knob
        names = list(by_name) if len(by_name) <= 5 else one_of_each.values()
        raise ConfigError(
            f"adaptive={name} needs a compressor with {kind} to choose from, got compressor={chosen}",
            *({"compressor": c} for c in names),
        )


@functools.cache
def knobs() -> dict[str, str | None]:
    """Return the knob of every compressor by the name of its YAML file."""
    files = yaml_files("compressor").items()
    return {name: wrapped_compressor(read_options(file)).compressor.traits.knob for name, file in files}
