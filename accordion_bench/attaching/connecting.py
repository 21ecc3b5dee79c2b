"""Creation of attachments: checks arguments on all processes, then hooks into model and optimizer."""

import atexit
import datetime
import logging
import sys
import weakref
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from accordion_bench.attaching import users_optimizer
from accordion_bench.attaching.agreement import lost_worker_told, refuse_differences
from accordion_bench.attaching.attached import Attached
from accordion_bench.attaching.checked_arguments import Checked, PassedArguments, attached_models, checked_arguments
from accordion_bench.attaching.ddp_delivery import deliver_to, exchange_after_unscaling
from accordion_bench.attaching.door import Door, door_of
from accordion_bench.attaching.own_parameters import unwrapped
from accordion_bench.attaching.users_loop import options_without_effect
from accordion_bench.batches import unequal
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.replicas import is_dense
from accordion_bench.methods.build import Methods, of_unequal
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError
from accordion_bench.tensors.real_view import as_real

log = logging.getLogger("accordion_bench")


def connected(passed: PassedArguments) -> Attached:
    """Check the arguments on all processes, then hook into model and optimizer."""
    passed = replace(passed, optimizer=users_optimizer.stepping_optimizer(passed.optimizer))
    if (door := door_of(passed)) is not None:
        return _entered(passed, door)
    group, timeout = _group(passed), passed.timeout
    found: Checked | ConfigError
    agreed: dict[str, Any] | ConfigError
    try:
        found = checked_arguments(passed, dist.get_world_size(group))
        agreed, device = found.agreed, found.named[0][1].device
    except ConfigError as refused:
        found = agreed = refused.in_python()
        device = torch.device("cpu")
    with lost_worker_told("ab.attach or ab.local", timeout):
        comm = _comm(group, timeout, device)
        batches = unequal(refuse_differences(comm, agreed, passed.batch_size))
        assert isinstance(found, Checked)
        try:
            methods = of_unequal(found.methods, batches, found.setting.chosen)
        except ConfigError as refused:
            raise refused.in_python() from None
        comm.weigh(batches)
        if found.wrapper is None:
            parameters = [as_real(param.detach()) for param in found.inner.parameters()]
            comm.broadcast_([*parameters, *filter(is_dense, found.inner.buffers())], "setup")
    return _hooked(passed, found, methods, comm)


def _entered(passed: PassedArguments, door: Door) -> Attached:
    """Check the arguments on this process, hook into model and optimizer, and enter an elastic run."""
    try:
        found = checked_arguments(passed, door.expected)
    except ConfigError as refused:
        raise refused.in_python() from None
    attached = _hooked(passed, found, found.methods, door.comm(found))
    try:
        door.enter(attached)
    except BaseException:
        attached.detach()
        raise
    return attached


def _detach_at_the_end(attached: "weakref.ref[Attached]") -> None:
    """Detach at exit if the user has not, except after an error, when other processes may be waiting."""
    if (left := attached()) is not None and getattr(sys, "last_value", None) is None:
        left.detach()


def _hooked(passed: PassedArguments, found: Checked, methods: Methods, comm: Comm) -> Attached:
    if comm.leader:
        for sentence in options_without_effect(found.setting.chosen, found.methods):
            log.warning("%s", sentence)
    taken = users_optimizer.hand_over(passed.optimizer, found.methods.wrapped.compressor)
    try:
        attached = Attached(found.inner, passed.optimizer, methods, comm, found.setting)
    except ConfigError as refused:
        users_optimizer.give_back(passed.optimizer, taken)
        raise refused.in_python() from None
    if found.wrapper is not None:
        deliver_to(attached, found.wrapper)
    attached.connect(listens=found.wrapper is None or found.setting.scaled)
    if passed.scaler is not None:
        exchange_after_unscaling(passed.scaler, attached)
    atexit.register(_detach_at_the_end, weakref.ref(attached))
    attached_models.add(found.inner)
    attached.when_detached(lambda: attached_models.discard(found.inner))
    attached.when_detached(lambda: users_optimizer.give_back(passed.optimizer, taken))
    return attached


def _group(passed: PassedArguments) -> dist.ProcessGroup | None:
    """Return the process group of the workers, for DistributedDataParallel the wrapper's; None = the default one."""
    group = passed.process_group
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            "torch.distributed must have a process group, got none; call torch.distributed.init_process_group() first "
            "and start the script with torchrun --nproc_per_node=N"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"process_group must be what torch.distributed.new_group returns to a process that is in it, got {group!r};"
            " pass process_group=None for all processes"
        )
    try:
        checks.number("timeout", passed.timeout, above=0, instead=600.0)
    except ConfigError as refused:
        raise refused.in_python() from None
    wrapper = unwrapped(passed.model)
    if not isinstance(wrapper, DistributedDataParallel):
        return group
    own = dist.get_process_group_ranks(wrapper.process_group)
    if group is not None and (given := dist.get_process_group_ranks(group)) != own:
        raise ConfigError(
            f"process_group must be that of DistributedDataParallel, got ranks {given} and {own}; leave it out"
        )
    return None if len(own) == dist.get_world_size() else wrapper.process_group


def _comm(group: dist.ProcessGroup | None, timeout: float, device: torch.device) -> Comm:
    """Create a communicator with one worker per process, in a new group, separate from the user's collectives."""
    comm = Comm(1, dist.get_world_size(group), dist.get_rank(group), str(device))
    comm.timeout, comm.group, comm.before = timeout, group, group
    if comm.processes > 1:
        ranks = None if group is None else dist.get_process_group_ranks(group)
        limit = datetime.timedelta(seconds=timeout)
        own = dist.new_group(ranks, timeout=limit, use_local_synchronization=ranks is not None)
        assert isinstance(own, dist.ProcessGroup)
        comm.group = own
        comm.made.append(comm)
    return comm
