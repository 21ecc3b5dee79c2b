"""Creation of attachments: checks arguments on all processes, then hooks into model and optimizer."""

import atexit
import datetime
import logging
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accordion_bench.attaching import users_optimizer
from accordion_bench.attaching.agreement import flat, lost_worker_told, refuse_differences
from accordion_bench.attaching.attached import Attached
from accordion_bench.attaching.checked_arguments import Checked, PassedArguments, attached_models, checked_arguments
from accordion_bench.attaching.ddp_delivery import deliver_to, exchange_after_unscaling
from accordion_bench.attaching.own_parameters import is_fsdp, unwrapped
from accordion_bench.attaching.state import put_shared, shared_of
from accordion_bench.attaching.users_loop import idle_clipping, options_without_effect
from accordion_bench.batches import unequal
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.elastic import ElasticMembership
from accordion_bench.comm.generations import Terms
from accordion_bench.comm.replicas import is_dense
from accordion_bench.comm.sealed_store import SealedStore, shared_secret, whole_number
from accordion_bench.compressors.error_feedback import growing
from accordion_bench.loop.step import Hooks, SharedState
from accordion_bench.methods.build import Methods, of_unequal
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError
from accordion_bench.tensors.same_shape import as_real

log = logging.getLogger("accordion_bench")


class Door:
    """Entry of one worker per process into an elastic run of at least `least` workers, by a store that outlives it."""

    def __init__(self, store: dist.Store, least: int, timeout: float) -> None:
        begin = max(int(os.environ.get("WORLD_SIZE", "1")), least)
        self.least, self.timeout = least, timeout
        self.store = SealedStore(store, begin, shared_secret())
        # number of workers that start together, as set by the first arrival
        self.expected = self.store.under("members").first("expected", str(begin), whole_number)

    def comm(self, found: Checked) -> Comm:
        """Create the communicator of this worker, which is connected once it has entered."""
        device = found.named[0][1].device
        if device.type != "cpu":
            raise ConfigError(f"elastic must be False where the model is not on the CPU, got it on {device}")
        comm = Comm(1, self.expected)
        comm.timeout = self.timeout
        rank = int(os.environ.get("RANK", "0"))
        same = {"torch": torch.__version__, **flat(found.agreed), "batch_size": found.setting.passed.batch_size}
        ElasticMembership(self.store, comm, Terms(self.expected, self.least, self.timeout, _as_json(same), rank))
        return comm

    def enter(self, attached: Attached) -> None:
        """Wait until the other workers admit this one."""
        membership = attached.comm.membership
        assert isinstance(membership, ElasticMembership)
        with lost_worker_told("ab.local" if attached.sync.local else "ab.attach", self.timeout):
            membership.enter(shared_state(attached))
        attached.watch.note()


def shared_state(attached: Attached) -> SharedState:
    """Return the state that entering workers receive, and the hooks for changes of the set of workers."""

    def changed(lost: Sequence[int], before: int) -> None:
        if attached.deal is not None:
            attached.deal.change(attached.comm.workers, lost, attached.step.steps)
        if attached.comm.leader:
            told = attached.position.step, attached.comm.workers, len(lost)
            log.warning("step %d: %d workers go on, %d are lost", *told)

    def state() -> dict[str, Any]:
        optimizers = [] if attached.axis.replicas else [own.state_dict() for own in attached.inner.all]
        held = {name: value.clone() for name, value in _alike(attached).items()}
        return {**shared_of(attached), "optimizers": optimizers, "held": held}

    @torch.no_grad()
    def put(state: dict[str, Any]) -> None:
        put_shared(attached, state)
        for optimizer, own in zip(attached.inner.all, state["optimizers"], strict=False):
            optimizer.load_state_dict(own)
        for name, value in _alike(attached).items():
            value.copy_(state["held"][name])

    return SharedState(attached.step, Hooks(state, put, lambda: attached.deal, changed))


def _alike(attached: Attached) -> dict[str, torch.Tensor]:
    """Return by name the buffers and parameters that are equal on all workers, without z of local methods."""
    model = attached.model
    own = {id(param) for param in attached.axis.params} if attached.axis.replicas else set()
    named = [*model.named_buffers(), *model.named_parameters()]
    return {name: as_real(x.detach()) for name, x in named if is_dense(x) and id(x) not in own}


def door_of(passed: PassedArguments) -> Door | None:
    """Return the entry of an elastic run, None = it is not elastic; ConfigError if arguments do not fit one."""
    options = {**(next(iter(passed.sync.values())) if isinstance(passed.sync, Mapping) else {}), **passed.options}
    if options.get("elastic") is not True:
        if passed.store is not None:
            raise ConfigError("store must be None where all workers stay to the end, got one; pass elastic=True")
        return None
    outer = unwrapped(passed.model)
    if isinstance(outer, DistributedDataParallel) or (isinstance(outer, nn.Module) and is_fsdp(outer)):
        got = "DistributedDataParallel" if isinstance(outer, DistributedDataParallel) else "one of FSDP2"
        raise ConfigError(f"model must be a plain module where workers join and leave, got {got}; pass elastic=False")
    if passed.scaler is not None:
        raise ConfigError("scaler must be None where workers join and leave, got a GradScaler; train in bfloat16")
    if dist.is_available() and dist.is_initialized():
        raise ConfigError(
            "torch.distributed must have no process group where workers join and leave, got one; leave out "
            "init_process_group: one is made of the workers that are there"
        )
    least = checks.integer("min_workers", options.get("min_workers") or 1, at_least=1, instead=2)
    checks.number("timeout", passed.timeout, above=0, instead=600.0)
    return Door(passed.store or _of_environment(passed.timeout), least, passed.timeout)


def _of_environment(timeout: float) -> dist.Store:
    place = [os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK")]
    if None in place or not str(place[1]).isdigit():
        raise ConfigError(
            "store must say where workers meet, got None without a launcher's MASTER_ADDR, MASTER_PORT and RANK; start "
            "the script with torchrun, or pass torch.distributed.TCPStore(HOST, PORT, is_master=False)"
        )
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts = place[2] == "0" and not by_agent
    if hosts:
        log.warning("rank 0 hosts the store of the run, which ends with it; start with torchrun, whose agent hosts it")
    wait = datetime.timedelta(seconds=timeout)
    return dist.TCPStore(str(place[0]), int(str(place[1])), None, hosts, wait, wait_for_workers=False)


def _as_json(same: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value if isinstance(value, str | int | float | None) else repr(value) for key, value in same.items()}


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
        chosen = found.setting.chosen
        told = options_without_effect(chosen, found.methods)
        told += growing(chosen.compressor, found.methods.wrapped.compressor, "error_feedback=True")
        for sentence in told + idle_clipping(passed.clip_norm, passed.clip_at):
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
