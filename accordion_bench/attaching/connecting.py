"""From what was passed to an attachment: everything is checked before anything is hooked."""

import datetime
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accordion_bench.attaching import users_optimizer
from accordion_bench.attaching.agreement import refuse_differences
from accordion_bench.attaching.attached import Attached
from accordion_bench.attaching.attachment import Setting
from accordion_bench.attaching.chosen_options import Named, Several, choose, in_python
from accordion_bench.attaching.ddp_delivery import deliver_to
from accordion_bench.attaching.exempt import Exempt, exempt_names
from accordion_bench.attaching.loop_position import UNKNOWN
from accordion_bench.attaching.loss_scaler import exchange_after_unscaling
from accordion_bench.attaching.own_parameters import trained_parameters
from accordion_bench.comm.collectives import Comm
from accordion_bench.exchange.overlap_rules import ExchangeOptions
from accordion_bench.methods.build import Methods, build_methods
from accordion_bench.methods.chosen import Chosen
from accordion_bench.network.link_model import Network
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.choice_file import read_options
from accordion_bench.options.conf_dir import yaml_file
from accordion_bench.options.instantiate import build
from accordion_bench.options.units import without_units
from accordion_bench.plan import WHOLE_MODEL, RunFacts

_attached: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def connected(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compressor: Named,
    adaptive: Several,
    sync: Named,
    exempt: Exempt,
    passed: dict[str, Any],
    options: Mapping[str, Any],
    arguments: list[str],
    takes_local_steps: bool,
) -> Attached:
    """Check everything, then hook into model and optimizer."""
    if any(cls.__name__ == "FSDPModule" for cls in type(model).__mro__):
        raise ConfigError(
            "model must not be cut into shards, got one that fully_shard was called on; call ab.attach_shards"
        )
    try:
        chosen = _chosen(compressor, adaptive, sync, optimizer, options, arguments)
        model = unwrapped(model)
        is_ddp = isinstance(model, DistributedDataParallel)
        inner = unwrapped(model.module) if isinstance(model, DistributedDataParallel) else model
        _refuse_wrapped_parts(inner)
        if model in _attached or inner in _attached:
            raise ConfigError("model must be attached once, got one that is; call detach() of what ab.attach returned")
        named = trained_parameters(inner)
        users_optimizer.refuse_parameters(named, optimizer)
        passed = {**passed, "process_group": _group_of(model, passed["process_group"])}
        comm = _comm(named[0][1].device, [param for _, param in named], passed)
        exempted = exempt_names(exempt, inner) & {name for name, _ in named}
        setting = _setting(chosen, passed, users_optimizer.options_of(optimizer).get("weight_decay", 0.0))
        methods = _methods(chosen, passed, comm, exempted, takes_local_steps)
        _refuse(methods, setting)
        refuse_differences(comm, _to_agree_on(chosen, passed, exempted, named))
    except ValueRefused as refused:
        raise in_python(refused) from None
    comm.group = _own_group(passed["process_group"], passed["timeout"]) if comm.processes > 1 else comm.group
    if not is_ddp:
        _start_alike(inner, comm)
    taken = users_optimizer.hand_over(optimizer, methods.wrapped.compressor)
    attached = Attached(inner, optimizer, methods, comm, setting)
    if isinstance(model, DistributedDataParallel):
        deliver_to(attached, model)
    attached.connect(listens=not is_ddp or setting.scaled)
    if passed["scaler"] is not None:
        exchange_after_unscaling(passed["scaler"], attached)
    _attached.add(inner)
    attached.when_detached(lambda: _attached.discard(inner))
    attached.when_detached(lambda: users_optimizer.give_back(optimizer, taken))
    return attached


def unwrapped(model: nn.Module) -> nn.Module:
    """What torch.compile has wrapped."""
    found: nn.Module = getattr(model, "_orig_mod", model)
    return found


def _refuse_wrapped_parts(model: nn.Module) -> None:
    """What exchanges by itself would be exchanged twice."""
    if part := next((name for name, each in model.named_modules() if isinstance(each, DistributedDataParallel)), None):
        raise ConfigError(
            f"model must be DistributedDataParallel or hold none, got one that holds it as {part}; pass {part} itself"
        )


def _group_of(model: nn.Module, passed: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The processes that take part: of a wrapped model those that it was wrapped for.

    Raises:
        ConfigError: others were passed.
    """
    if not isinstance(model, DistributedDataParallel):
        return passed
    own = dist.get_process_group_ranks(model.process_group)
    if passed is not None and (given := dist.get_process_group_ranks(passed)) != own:
        raise ConfigError(
            f"process_group must be that of DistributedDataParallel, got ranks {given} and {own}; leave it out"
        )
    return None if len(own) == dist.get_world_size() else model.process_group


def _chosen(
    compressor: Named, adaptive: Several, sync: Named, optimizer: torch.optim.Optimizer, options: Any, known: list[str]
) -> Chosen:
    own = users_optimizer.options_of(optimizer)
    return choose(compressor, adaptive, sync, own, options, known)


def _comm(device: torch.device, params: list[nn.Parameter], passed: dict[str, Any]) -> Comm:
    """All processes of the group, one worker in each."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "torch.distributed must have a process group, got none; call torch.distributed.init_process_group() first "
            "and start the script with torchrun --nproc_per_node=N"
        )
    if other := next((param.device for param in params if param.device != device), None):
        raise ConfigError(f"model must be on one device, got {device} and {other}; move it to one")
    checks.number("timeout", passed["timeout"], above=0, instead=600.0)
    group = passed["process_group"]
    comm = Comm(1, dist.get_world_size(group), dist.get_rank(group), str(device))
    comm.timeout = passed["timeout"]
    comm.group = group
    return comm


def _start_alike(model: nn.Module, comm: Comm) -> None:
    """Everybody starts with rank 0's parameters and buffers; tensors of one type travel together, exactly."""
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for tensors in by_type.values():
        comm.broadcast_(tensors, "setup")


def _own_group(group: dist.ProcessGroup | None, timeout: float) -> dist.ProcessGroup:
    """A group of the same processes, so that our collectives meet none of the user's, with a limit of its own."""
    ranks = None if group is None else dist.get_process_group_ranks(group)
    own = dist.new_group(
        ranks, timeout=datetime.timedelta(seconds=timeout), use_local_synchronization=ranks is not None
    )
    assert isinstance(own, dist.ProcessGroup)
    return own


def _setting(chosen: Chosen, passed: dict[str, Any], weight_decay: float) -> Setting:
    for key in ("epochs", "steps_per_epoch"):
        if passed[key] is not None:
            checks.integer(key, passed[key], at_least=1, instead=90)
    checks.integer("batch_size", passed["batch_size"], at_least=1, instead=32)
    if passed["clip_norm"] is not None:
        checks.number("clip_norm", passed["clip_norm"], above=0, instead=1.0)
    if passed["clip_at"] is not None:
        checks.choice("clip_at", passed["clip_at"], ["before", "after"])
    if passed["bucket_cap_mb"] is not None:
        checks.number("bucket_cap_mb", passed["bucket_cap_mb"], above=0, instead=25.0)
    after = passed["clip_at"] == "after"
    clips = passed["clip_norm"] is not None and not after
    scaled = passed["scaler"] is not None
    return Setting(
        chosen=chosen,
        exchange=ExchangeOptions("exchange", passed["overlap"], passed["bucket_cap_mb"], scaled, clips),
        network=_network(passed["network"]),
        seed=checks.integer("seed", passed["seed"], at_least=0),
        name=passed["name"],
        batch_size=passed["batch_size"],
        epochs=passed["epochs"],
        steps_per_epoch=passed["steps_per_epoch"],
        schedule=passed["schedule"],
        clip_norm=passed["clip_norm"],
        clip_mean=after,
        weight_decay=weight_decay,
        scaled=scaled,
        timeout=passed["timeout"],
    )


def _network(name: str) -> Network:
    file = yaml_file("network", name)
    if file is None:
        raise ValueRefused("network", "a name in conf/network", name, "1gbit")
    network: Network = build(without_units(read_options(file)), "network")
    return network


def _methods(
    chosen: Chosen, passed: dict[str, Any], comm: Comm, exempt: frozenset[str], takes_local_steps: bool
) -> Methods:
    """The methods, checked against each other and what is known of the training."""
    steps, batch = passed["steps_per_epoch"] or UNKNOWN, passed["batch_size"]
    schedule = passed["schedule"] or (lambda _: 1.0)
    run = RunFacts(
        passed["epochs"] or UNKNOWN,
        comm.workers,
        steps * batch * comm.workers,
        batch,
        schedule,
        passed["warmup_epochs"],
    )
    known = {key for key in ("epochs", "steps_per_epoch", "schedule") if passed[key] is not None} | {"loss"}
    methods = build_methods(chosen, run, 1, known)
    if takes_local_steps and not methods.sync.local:
        raise ConfigError(f"sync must be a local method, got {chosen.sync_name}; call ab.attach")
    wrapped, differences = methods.wrapped, methods.differences
    if exempt and wrapped.scope != "tensor":
        scope = "compressor.scope=model" if wrapped.scope == WHOLE_MODEL else "compressor.block=bucket"
        raise ConfigError(f"exempt must be None with {scope}, where tensors travel as one; pass exempt=None")
    return replace(
        methods,
        wrapped=replace(wrapped, exempt=exempt),
        differences=lambda: replace(differences(), exempt=exempt),
    )


def _refuse(methods: Methods, setting: Setting) -> None:
    """What a loop of somebody else's cannot carry."""
    for name, policy in methods.policies.items():
        if policy.drives == "batch":
            raise ConfigError(
                f"adaptive={name} drives the batch, which your loop owns; pass another policy, or run python -m "
                f"accordion_bench adaptive={name}"
            )
        if policy.syncs and policy.drives == "":
            raise ConfigError(f"adaptive={name} stands for a scheme; call ab.local(model, optimizer, sync={name!r})")
    if setting.clip_mean and methods.wrapped.compressor.traits.owns:
        rule = "before where the compressor takes the step itself, because its update is no gradient"
        raise ValueRefused("clip_at", rule, "after", "before")


def _to_agree_on(chosen: Chosen, passed: dict[str, Any], exempt: frozenset[str], named: Any) -> dict[str, Any]:
    """What must be the same on all processes."""
    free = ("process_group", "schedule", "scaler", "name", "network", "timeout")
    return {
        "compressor": {"name": chosen.compressor_name, **chosen.compressor},
        "sync": {"name": chosen.sync_name, **chosen.sync},
        "adaptive": {name: dict(node) for name, node in chosen.adaptive.items()},
        **{key: value for key, value in passed.items() if key not in free},
        "schedule": passed["schedule"] is not None,
        "scaler": passed["scaler"] is not None,
        "exempt": sorted(exempt),
        "optimizer": chosen.optimizer,
        "parameters": {name: f"{list(param.shape)} {param.dtype}" for name, param in named},
    }
