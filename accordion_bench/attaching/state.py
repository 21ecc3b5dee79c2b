"""State of an attachment for checkpoints, per process, besides model and optimizer."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accordion_bench.attaching.agreement import checksum, first_difference
from accordion_bench.attaching.attachment import Attachment
from accordion_bench.attaching.checked_arguments import recorded
from accordion_bench.comm.ledger import of_workers
from accordion_bench.comm.membership import SampleAssignment
from accordion_bench.comm.on_device import copy_on_cpu
from accordion_bench.options.checks import ConfigError
from accordion_bench.sync.scheme import SyncState, renamed

State = dict[str, Any]
FORMAT = 1
log = logging.getLogger("accordion_bench")


def redistributed_state(attachment: Attachment, owns: Sequence[State]) -> State:
    """Return this worker's state from those of another number of workers, in their order: the mean of all residuals."""
    comm, first = attachment.comm, owns[0]
    exchanges = {place.name: place.exchange for place in attachment.sync.exchanges()}
    kept = {}
    for name in first["exchange_states"]:
        held = exchanges[name].state
        shares = exchanges[name].compressor.redistributed_state(
            [own["exchange_states"][name] for own in owns], comm.rank, comm.workers
        )
        kept[name] = {tensor: entries for tensor, entries in shares.items() if tensor in held}
    of_all = {name for name in first["signals"] if all(name in own["signals"] for own in owns)}
    means = mean_of([{**own, "signals": {name: own["signals"][name] for name in of_all}} for own in owns])
    if comm.leader:  # sums that only the leader has
        means |= {"signals": first["signals"] | means["signals"], "recent": first["recent"]}
    else:
        means |= {"recent": []}
    return means | {"exchange_states": kept}


def mean_of(values: Sequence[Any]) -> Any:
    """Return the mean of floating-point tensors, also in containers; the first value of other types."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: mean_of([value[key] for value in values]) for key in first}
    if isinstance(first, Tensor) and first.is_floating_point() and all(v.shape == first.shape for v in values):
        return torch.stack([value.double() for value in values]).mean(0).to(first.dtype)
    return first


def state_of(attachment: Attachment) -> State:
    """Return the state: tensors on the CPU, numbers, strings and containers; residuals and factors by parameter name.

    Raises:
        ConfigError: an exchange of gradients is in progress.
    """
    if attachment.under_way:
        raise ConfigError(
            "state must be saved between two steps, got gradients that are under way; call comm.state_dict() after "
            "optimizer.step()"
        )
    attachment.pause()
    comm, runner = attachment.comm, attachment.policy_runner
    sync = SyncState(attachment.sync, comm)
    return {
        "format": FORMAT,
        "workers": comm.workers,
        "rank": comm.rank,
        "options": _options(attachment),
        "weights": checksum(attachment.axis.params),
        "shared": shared_of(attachment),
        "own": {
            **sync.worker_state(0),
            **runner.worker_state(0),
            "loss_sum": copy_on_cpu(attachment.loss_sum),
            "losses": attachment.step.losses,
            "views": dict(comm.ledger.views),
        },
    }


def shared_of(attachment: Attachment) -> State:
    """Return the state that is equal on all workers."""
    comm, axis, deal = attachment.comm, attachment.axis, attachment.deal
    shared: list[Any] = [SyncState(attachment.sync, comm), attachment.position, attachment.policy_runner, comm.ledger]
    shared += [attachment.clock, *([axis] if axis.replicas else []), *([] if deal is None else [deal])]
    return {key: value for owner in shared for key, value in owner.state_dict().items()}


def put_state(attachment: Attachment, state: State | Sequence[State]) -> None:
    """Restore a state from `state_of`, before the first step and after loading model and optimizer.

    `state` is that of this rank, or a list of all ranks' in order. If the number of workers has changed, rank 0's state
    drops residuals; with all states each worker gets their mean.

    Raises:
        ConfigError: the state belongs to another attachment.
    """
    comm = attachment.comm
    states = _states(state)
    if attachment.position.step:
        raise ConfigError(
            f"state must be loaded before the first step, got {attachment.position.step} steps; call comm.detach() and "
            "ab.attach again"
        )
    if differs := first_difference(states[0]["options"], _options(attachment)):
        key, saved, now = differs
        raise ConfigError(
            f"state must be of the same methods, got {key}={saved} in it and {key}={now} here; pass what it was saved "
            "with"
        )
    before = states[0]["workers"]
    ranks = [each["rank"] for each in states]
    if len(states) > 1 and ranks != list(range(before)):
        raise ConfigError(f"state must be a list of the states of ranks 0 to {before - 1}, got ranks {ranks}; pass all")
    if before == comm.workers:
        _put_same(attachment, states[comm.rank] if len(states) > 1 else states[0])
    else:
        _put_other(attachment, states, before)


def _states(state: Any) -> list[State]:
    states = list(state) if isinstance(state, list | tuple) else [state]
    if not states or any(not isinstance(each, dict) or each.get("format") != FORMAT for each in states):
        raise ConfigError(
            "state must be what comm.state_dict() has returned, or a list of that of all ranks, got something else; "
            "pass torch.load(FILE)"
        )
    return states


def _put_same(attachment: Attachment, state: State) -> None:
    rank = attachment.comm.rank
    if state["rank"] != rank:
        raise ConfigError(f"state must be that of the same rank, got that of rank {state['rank']}; pass rank {rank}'s")
    if state["weights"] != checksum(attachment.axis.params):
        raise ConfigError(
            "model must hold the parameters that it had when the state was saved, got others; call "
            "model.load_state_dict after ab.attach or ab.local, and comm.load_state_dict after that"
        )
    put_shared(attachment, state["shared"])
    _put_own(attachment, state["own"])


def _put_other(attachment: Attachment, states: Sequence[State], before: int) -> None:
    """Restore the state for another number of workers: the common part, and residuals if all states are given."""
    comm = attachment.comm
    if len(states) == 1 and states[0]["rank"] != 0:
        raise ConfigError(
            f"state must be that of rank 0 where the number of workers has changed, got that of rank "
            f"{states[0]['rank']}; pass rank 0's, or a list of all ranks'"
        )
    reduces = attachment.exchange.compressor.traits.reduces
    if len(states) == 1 and reduces == "estimate":
        raise ConfigError(
            "state must be a list of all ranks' where the number of workers has changed and error_feedback is ef21, "
            "whose estimate is the mean of what all ranks keep, got one; pass the states of all ranks"
        )
    shared = renamed(states[0]["shared"], before, comm.workers)
    put_shared(attachment, shared | {"ledger": of_workers(shared["ledger"], before, comm.workers)})
    if len(states) > 1:
        owns = [renamed(state["own"], before, comm.workers) for state in states]
        _put_own(attachment, redistributed_state(attachment, owns))
        what = "each gets the mean of all residuals"
    else:
        attachment.sync.load_worker_state(0, states[0]["own"]["sync"])  # z belongs to the model of rank 0
        what = "residuals are dropped; pass the states of all ranks as a list to keep their mean"
    if comm.leader:
        log.warning("the state is of %d workers and goes on with %d: %s", before, comm.workers, what)


def put_shared(attachment: Attachment, shared: State) -> None:
    """Restore the state that is equal on all workers."""
    sync = SyncState(attachment.sync, attachment.comm)
    runner, ledger = attachment.policy_runner, attachment.comm.ledger
    for owner in (sync, attachment.position, runner, ledger, attachment.clock):
        owner.load_state_dict(shared)
    if attachment.axis.replicas:
        attachment.axis.load_state_dict(shared)
    if "deal" in shared:
        attachment.deal = SampleAssignment.of_state(shared, attachment.setting.step.seed)


def _put_own(attachment: Attachment, own: State) -> None:
    SyncState(attachment.sync, attachment.comm).load_worker_state(0, own)
    attachment.policy_runner.load_worker_state(0, own)
    attachment.loss_sum.copy_(own["loss_sum"])
    attachment.step.losses = own["losses"]
    views = attachment.comm.ledger.views
    views.update({name: n for name, n in own["views"].items() if name in views})


def _options(attachment: Attachment) -> State:
    chosen = attachment.setting.chosen
    return {
        **recorded(chosen),
        "optimizer": chosen.optimizer,
        "seed": attachment.setting.step.seed,
        "parameters": {spec.name: list(spec.shape) for spec in attachment.axis.specs},
    }
