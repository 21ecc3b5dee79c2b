"""Arguments of `ab.attach` and `ab.local`, and the checks that each process makes by itself before hooking."""

import inspect
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accordion_bench.adaptive.policy import Policy
from accordion_bench.attaching import users_optimizer
from accordion_bench.attaching.agreement import answer, checksum
from accordion_bench.attaching.own_parameters import (
    Exempt,
    exempt_names,
    is_fsdp,
    refuse_tensors,
    reshard,
    trained_parameters,
    trained_specs,
    unwrapped,
)
from accordion_bench.attaching.users_loop import UNKNOWN
from accordion_bench.attaching.users_optimizer import Stepping
from accordion_bench.comm.replicas import check_clipping, dense_parts, is_dense
from accordion_bench.exchange.overlap import ExchangeOptions
from accordion_bench.loop.step import StepOptions
from accordion_bench.methods.build import Methods, build_methods
from accordion_bench.methods.compatibility import MethodOptions, refuse_clipping_after
from accordion_bench.network.link_model import Network
from accordion_bench.options import checks
from accordion_bench.options.advice import ALSO_CALLED
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.conf_dir import read_options, yaml_file, yaml_files
from accordion_bench.options.instantiate import Config, build, check_value_kinds
from accordion_bench.options.units import without_units
from accordion_bench.plan import WHOLE_MODEL, RunFacts
from accordion_bench.tensors import keyed_rng

Named = str | Mapping[str, Mapping[str, Any]]
"""A name, or {name: {option: value}}."""

Several = Named | Sequence[str] | None
"""One or several names, in order."""


def choose(
    compressor: Named,
    adaptive: Several,
    sync: Named,
    optimizer: Config,
    options: Mapping[str, Any],
    arguments: Collection[str],
) -> MethodOptions:
    """Return the chosen compressor, scheme and policies with all options, defaults from the YAML files.

    `options` are those of the compressor or the scheme; `arguments` are the names of all others, for messages.

    Raises:
        ConfigError: a name or an option is unknown, or a value has the wrong type.
    """
    if "sync" in options:
        raise ConfigError(f"sync is an argument of ab.local; call ab.local(model, optimizer, sync={options['sync']!r})")
    names = {"compressor": compressor, "sync": sync}
    nodes = {group: _node(group, named) for group, named in names.items()}
    for key, value in options.items():
        holders = [group for group, (_, node) in nodes.items() if key in node and key != "_target_"]
        if not holders:
            raise _unknown(key, [node for _, node in nodes.values()], arguments)
        if len(holders) > 1:
            name = nodes[holders[0]][0]
            raise ConfigError(
                f"{key} must say whose it is, got {key}={value!r} where both compressor and sync have one; pass "
                f"{holders[0]}={{{name!r}: {{{key!r}: {value!r}}}}}, say"
            )
        nodes[holders[0]][1][key] = value
    for group, (name, node) in nodes.items():
        check_value_kinds(read_options(_file(group, name)), node, f"{group}.")
    (compressor_name, compressor_node), (sync_name, sync_node) = nodes["compressor"], nodes["sync"]
    policies = dict(_node("adaptive", named) for named in _listed(adaptive))
    policies.pop("none", None)
    for name, node in policies.items():
        check_value_kinds(read_options(_file("adaptive", name)), node, f"adaptive.{name}.")
    return MethodOptions(compressor_name, compressor_node, sync_name, sync_node, policies, optimizer)


def recorded(chosen: MethodOptions) -> dict[str, Any]:
    """Return names and options of the chosen methods as plain data."""
    return {
        "compressor": {"name": chosen.compressor_name, **chosen.compressor},
        "sync": {"name": chosen.sync_name, **chosen.sync},
        "adaptive": {name: dict(node) for name, node in chosen.adaptive.items()},
    }


def _listed(adaptive: Several) -> list[Named]:
    if adaptive is None:
        return []
    if isinstance(adaptive, str):
        return [adaptive]
    if isinstance(adaptive, Mapping):
        return [{name: options} for name, options in adaptive.items()]
    return list(adaptive) if isinstance(adaptive, Sequence) else [adaptive]


def _node(group: str, named: Named) -> tuple[str, Config]:
    if isinstance(named, Mapping) and len(named) != 1:
        raise ConfigError(
            f"{group} must be one name with its options, got {dict(named)}; pass {group}={{'NAME': {{}}}}"
        )
    name, given = next(iter(named.items())) if isinstance(named, Mapping) else (named, {})
    node = read_options(_file(group, name))
    if not isinstance(given, Mapping | None):
        raise ConfigError(f"{group}.{name} must be {{option: value}}, got {given!r}; pass {group}={{{name!r}: {{}}}}")
    for key in given or {}:
        if key not in node or key == "_target_":
            raise _unknown(f"{group}.{name}.{key}", [node], ())
    return name, {**node, **(given or {})}


def _file(group: str, name: Any) -> Any:
    """Return the YAML file of a choice."""
    known = list(yaml_files(group))
    if not isinstance(name, str):
        rule = "a name, or {name: {option: value}}"
        raise ConfigError(f"{group} must be {rule}, got {name!r}; pass {group}={known[0]!r}, say")
    found = yaml_file(group, name)
    if found is None:
        near = checks.closest(name, known)
        raise ConfigError(
            f"{group} must be a known name, got {name!r}; pass {group}={near!r} (there are {', '.join(known)})"
        )
    return found


def _unknown(key: str, nodes: Sequence[Config], arguments: Collection[str]) -> ConfigError:
    """Return the error for an unknown option, with the nearest known one."""
    known = [option for node in nodes for option in node if option != "_target_"]
    last = key.rpartition(".")[2]
    near = ALSO_CALLED.get(last, "")
    near = near if near in known else checks.closest(last, [*known, *arguments], cutoff=0.6)
    listed = f"options here are {', '.join(known)}" if known else "there are none here"
    return ConfigError(f"{key} is no option; {f'pass {near}=..., ' if near else ''}{listed}")


def arguments_of(function: Any) -> list[str]:
    """Return the names of the arguments that a function accepts by keyword."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, value in inspect.signature(function).parameters.items() if value.kind in kinds]


@dataclass(frozen=True, kw_only=True)
class PassedArguments:
    """Arguments of `ab.attach` and `ab.local` as passed; see these functions."""

    model: nn.Module
    optimizer: Stepping
    compressor: Named
    adaptive: Several
    sync: Named
    exempt: Exempt
    epochs: int | None
    steps_per_epoch: int | None
    schedule: Callable[[float], float] | None
    warmup_epochs: float
    seed: int
    batch_size: int
    overlap: bool | None
    bucket_cap_mb: float | None
    network: str
    name: str | None
    process_group: dist.ProcessGroup | None
    timeout: float
    store: dist.Store | None
    options: Mapping[str, Any]  # options of compressor and scheme by name
    known: Sequence[str]  # names of all other arguments of the function, for messages
    takes_local_steps: bool = False  # whether the function is `ab.local`
    clip_norm: float | None = None
    clip_at: str | None = None
    scaler: torch.amp.GradScaler | None = None


@dataclass(frozen=True)
class Setting:
    """Checked arguments besides the methods."""

    chosen: MethodOptions  # the methods as options
    network: Network  # link of modelled times
    step: StepOptions  # options of the communicating step; processes with different shards have different seeds
    passed: PassedArguments  # the other arguments, as passed

    @property
    def scaled(self) -> bool:
        """Whether gradients are multiplied by a loss scale."""
        return self.step.exchange.float16


attached_models: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
AGREED = ("epochs", "steps_per_epoch", "warmup_epochs", "seed", "overlap", "bucket_cap_mb", "clip_norm", "clip_at")
TOLD = ("epochs", "steps_per_epoch", "schedule")  # of the training, by who needs them


@dataclass(frozen=True)
class Checked:
    """What one process has been passed, after every check that it can make by itself."""

    inner: nn.Module  # the model, without what wraps it
    wrapper: DistributedDataParallel | None  # DistributedDataParallel around it; None = a plain module
    named: list[tuple[str, nn.Parameter]]  # names and parameters that are trained
    methods: Methods  # built of the options
    setting: Setting  # what else was passed
    agreed: dict[str, Any]  # what must be the same on all processes, by name


def checked_arguments(passed: PassedArguments, workers: int) -> Checked:
    """Check everything that needs no other process; ConfigError in the words of the command line or of Python."""
    _refuse_kinds(passed)
    optimizer = passed.optimizer
    own = users_optimizer.options_of(optimizer)
    chosen = choose(passed.compressor, passed.adaptive, passed.sync, own, passed.options, passed.known)
    outer = unwrapped(passed.model)
    wrapper = outer if isinstance(outer, DistributedDataParallel) else None
    inner = outer if wrapper is None else unwrapped(wrapper.module)
    _refuse_wrapped_parts(inner)
    reshard(inner)
    if outer in attached_models or inner in attached_models:
        raise ConfigError("model must be attached only once, got one that is attached; call comm.detach() first")
    named = trained_parameters(inner)
    users_optimizer.refuse_parameters(named, optimizer)
    devices = [param.device for _, param in named]
    if other := next((device for device in devices if device != devices[0]), None):
        raise ConfigError(f"model must be on one device, got {devices[0]} and {other}; move it to one")
    shard = _shard(inner, named, passed)
    refuse_tensors(inner)
    exempted = exempt_names(passed.exempt, inner) & {name for name, _ in named}
    setting = _setting(chosen, passed, own.get("weight_decay", 0.0), shard)
    methods = _methods(chosen, passed, workers, exempted, setting.network)
    if shard is not None and methods.wrapped.compressor.traits.optimizer.owns:
        owned = ", ".join(sorted(methods.wrapped.compressor.traits.optimizer.owns))
        raise ConfigError(
            f"compressor must leave {owned} to the optimizer of an FSDP2 model, got one that applies it itself",
            {"compressor": "topk"},
            {"compressor": "powersgd"},
        )
    if setting.step.clip_mean:
        refuse_clipping_after(methods.sync, methods.wrapped.compressor)
    methods.sync.refuse_tensors(trained_specs(inner))
    methods.plan_for(trained_specs(inner))
    # rank 0's buffers that are not dense are not sent, so that all must have the same
    unsent = {name: checksum(dense_parts(buffer)) for name, buffer in inner.named_buffers() if not is_dense(buffer)}
    agreed = {**_to_agree_on(chosen, passed, exempted, named), "buffers": unsent, "shard": shard}
    return Checked(inner, wrapper, named, methods, setting, agreed)


def _refuse_wrapped_parts(model: nn.Module) -> None:
    if part := next((name for name, each in model.named_modules() if isinstance(each, DistributedDataParallel)), None):
        raise ConfigError(
            f"model must be DistributedDataParallel or hold none, got one that holds it as {part}; pass {part} itself"
        )


def _shard(model: nn.Module, named: Sequence[tuple[str, nn.Parameter]], passed: PassedArguments) -> int | None:
    """Which of the shards of an FSDP2 model this process has; None = the model is not cut into shards."""
    if not is_fsdp(model):
        return None
    from accordion_bench.attaching.fsdp_groups import refuse_shards  # whose imports take half a second

    if passed.clip_norm is not None:
        raise ConfigError(
            "clip_norm must be None with an FSDP2 model, of which no process sees the whole gradient, got "
            f"{passed.clip_norm}; call torch.nn.utils.clip_grad_norm_ after comm.join()"
        )
    if passed.scaler is not None:
        raise ConfigError("scaler must be None with an FSDP2 model, got a GradScaler; train in bfloat16")
    return refuse_shards(named, passed.process_group)


def _refuse_kinds(passed: PassedArguments) -> None:
    optimizer, schedule, scaler, overlap = passed.optimizer, passed.schedule, passed.scaler, passed.overlap
    if not isinstance(passed.model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {passed.model!r}; pass the module that is trained")
    if not isinstance(optimizer, torch.optim.Optimizer | users_optimizer.Together):
        told = repr(optimizer).splitlines()[0][:80]
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer or a list of them, got {told}; pass the model's")
    if schedule is not None:
        found = answer("schedule", schedule, 0.0) if callable(schedule) else None
        if not isinstance(found, Real):
            got = f"one that says {found!r}" if callable(schedule) else repr(schedule)
            raise ConfigError(
                f"schedule must be a function from a time in epochs to a learning rate, got {got}; pass schedule="
                "lambda epoch: 0.1 if epoch < 30 else 0.01, say"
            )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ConfigError(f"scaler must be a torch.amp.GradScaler, got {scaler!r}; pass scaler=None without one")
    if overlap is not None:
        checks.boolean("overlap", overlap)
    if passed.name is not None and not isinstance(passed.name, str):
        raise ValueRefused("name", "text", passed.name, "my arm")
    checks.number("warmup_epochs", passed.warmup_epochs, at_least=0, instead=5)


def _setting(chosen: MethodOptions, passed: PassedArguments, weight_decay: float, shard: int | None) -> Setting:
    for key in ("epochs", "steps_per_epoch"):
        if getattr(passed, key) is not None:
            checks.integer(key, getattr(passed, key), at_least=1, instead=90)
    checks.integer("batch_size", passed.batch_size, at_least=1, instead=32)
    check_clipping(passed.clip_norm, passed.clip_at)
    if passed.bucket_cap_mb is not None:
        checks.number("bucket_cap_mb", passed.bucket_cap_mb, above=0, instead=25.0)
    after = passed.clip_at == "after"
    clips = passed.clip_norm is not None and not after
    scaled, elastic = passed.scaler is not None, bool(chosen.sync.get("elastic"))
    seed = checks.integer("seed", passed.seed, at_least=0)
    step = StepOptions(
        exchange=ExchangeOptions("exchange", passed.overlap, passed.bucket_cap_mb, scaled, clips, elastic),
        seed=seed if shard is None else keyed_rng.key(seed, "shard", shard),  # other draws of each shard
        clip_norm=passed.clip_norm,
        clip_mean=after,
        weight_decay=weight_decay,
    )
    return Setting(chosen, _network(passed.network), step, passed)


def _network(name: Any) -> Network:
    file = yaml_files("network")[checks.choice("network", name, list(yaml_files("network")))]
    network: Network = build(without_units(read_options(file)), "network")
    return network


def _methods(
    chosen: MethodOptions, passed: PassedArguments, workers: int, exempt: frozenset[str], network: Network
) -> Methods:
    """The methods, checked against each other and against what is known of the training."""
    sync = build(chosen.sync, "sync")
    policies: dict[str, Policy] = {name: build(node, f"adaptive.{name}") for name, node in chosen.adaptive.items()}
    if passed.takes_local_steps and not sync.local:
        raise ConfigError(f"sync must be a local method, got {chosen.sync_name!r}; call ab.attach")
    for name, policy in policies.items():
        _refuse_policy(name, policy)
    needs = {f"sync={chosen.sync_name}": sync.required_facts}
    needs |= {f"adaptive={name}": policy.required_facts for name, policy in policies.items()}
    _refuse_unknown(needs, passed)
    epochs, steps, batch = passed.epochs or UNKNOWN, passed.steps_per_epoch or UNKNOWN, passed.batch_size
    schedule = passed.schedule or (lambda _: 1.0)
    run = RunFacts(
        *(epochs, workers, steps * batch * workers, batch, schedule, passed.warmup_epochs),
        bandwidth=network.bandwidth,
        latency=network.latency,
    )
    try:
        methods = build_methods(chosen, run, 1)
    except ValueRefused as refused:
        if passed.steps_per_epoch or refused.key != "sync.switch_step":
            raise
        raise ValueRefused(refused.key, refused.rule, refused.value, 1000) from None  # no share of unknown steps
    _refuse_unknown({f"compressor={chosen.compressor_name}": methods.wrapped.compressor.required_facts}, passed)
    wrapped, differences = methods.wrapped, methods.differences
    if exempt and wrapped.scope != "tensor":
        option = "scope='model'" if wrapped.scope == WHOLE_MODEL else "block='bucket'"
        raise ConfigError(f"exempt must be None with {option}, where tensors travel as one; pass exempt=None")
    return replace(
        methods,
        wrapped=replace(wrapped, exempt=exempt),
        differences=lambda: replace(differences(), exempt=exempt),
    )


def _refuse_unknown(needs: Mapping[str, Collection[str]], passed: PassedArguments) -> None:
    """Refuse what must know more of the training beforehand than was passed."""
    for key, wanted in needs.items():
        if missing := [fact for fact in TOLD if fact in wanted and getattr(passed, fact) is None]:
            raise ConfigError(
                f"{key} must know {' and '.join(missing)} beforehand, got None; pass "
                f"{', '.join(f'{fact}=...' for fact in missing)}"
            )


def _refuse_policy(name: str, policy: Policy) -> None:
    """Refuse what a user's own loop cannot carry."""
    if policy.drives == "batch":
        raise ConfigError(
            f"adaptive={name} drives the batch, which your loop owns; pass another policy, or run python -m "
            f"accordion_bench adaptive={name}"
        )
    if policy.syncs and policy.drives == "":
        raise ConfigError(f"adaptive={name} stands for a scheme; call ab.local(model, optimizer, sync={name!r})")


def _to_agree_on(chosen: MethodOptions, passed: PassedArguments, exempt: frozenset[str], named: Any) -> dict[str, Any]:
    return {
        **recorded(chosen),
        **{key: getattr(passed, key) for key in AGREED},
        "schedule": "a function" if passed.schedule else None,
        "scaler": "a GradScaler" if passed.scaler else None,
        "exempt": sorted(exempt),
        "optimizer": chosen.optimizer,
        "parameters": {name: f"{list(param.shape)} {param.dtype}" for name, param in named},
    }
