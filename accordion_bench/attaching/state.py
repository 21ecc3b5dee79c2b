"""The state of an attachment, of one process: what a training that goes on needs besides model and optimizer."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accordion_bench.attaching.agreement import flat
from accordion_bench.attaching.attachment import Attachment
from accordion_bench.options.checks import ConfigError
from accordion_bench.sync.state import SyncState

log = logging.getLogger("accordion_bench")
State = dict[str, Any]
FORMAT = 1


def state_of(attachment: Attachment) -> State:
    """Tensors on the CPU, numbers, strings and containers; residuals and factors by parameter name."""
    attachment.pause()
    sync = SyncState(attachment.sync, attachment.comm)
    shared: list[Any] = [sync, attachment.position, attachment.policy_runner, attachment.comm.ledger, attachment.clock]
    own: list[Any] = [sync, attachment.policy_runner]
    forked = bool(attachment.axis.replicas)
    return {
        "format": FORMAT,
        "workers": attachment.comm.workers,
        "rank": attachment.comm.rank,
        "options": _options(attachment),
        "shared": _merged([owner.state_dict() for owner in shared]) | (attachment.axis.state_dict() if forked else {}),
        "own": _merged([owner.worker_state(0) for owner in own]),
    }


def put_state(attachment: Attachment, state: State | Sequence[State]) -> None:
    """Go on from `state_of`, before the first step.

    Args:
        attachment: freshly made, with the same options.
        state: this rank's, or those of all ranks in order. Where the number of workers has changed, residuals of one
            rank's state are dropped; of all ranks', each worker gets their mean, so that nothing is lost.

    Raises:
        ConfigError: it is another attachment's.
    """
    states = [state] if isinstance(state, Mapping) else list(state)
    comm = attachment.comm
    if not states or any(not isinstance(each, Mapping) or each.get("format") != FORMAT for each in states):
        raise ConfigError("state must be what comm.state_dict() returns, or a list of all ranks', got something else")
    if attachment.position.step:
        raise ConfigError(
            f"state must be loaded before the first step, got {attachment.position.step} steps; attach anew"
        )
    _refuse_other_options(attachment, states[0])
    before = states[0]["workers"]
    if len(states) not in (1, before):
        raise ConfigError(f"state must be of one rank or of all {before}, got {len(states)}; pass all of them")
    mine = states[comm.rank] if before == comm.workers and len(states) > 1 else states[0]
    same_place = before == comm.workers and mine["rank"] == comm.rank
    if before == comm.workers and not same_place:
        raise ConfigError(
            f"state must be that of the same rank, got that of rank {mine['rank']} on rank {comm.rank}; pass its own"
        )
    sync = SyncState(attachment.sync, comm)
    shared = mine["shared"]
    if same_place:
        own = mine["own"]
    else:
        own = _shared_anew(states, comm.leader) if len(states) == before else None
        _tell(attachment, before, own is not None)
        shared = shared | {"ledger": attachment.comm.ledger.state_dict()["ledger"]}
    for owner in (sync, attachment.position, attachment.policy_runner, comm.ledger, attachment.clock):
        owner.load_state_dict(shared)
    if attachment.axis.replicas:
        attachment.axis.load_state_dict(shared)
    if own is not None:
        _put_own(sync, attachment, own)


def _put_own(sync: SyncState, attachment: Attachment, own: State) -> None:
    """What belongs to this worker."""
    places = {place.name: place.exchange.state for place in attachment.sync.exchanges()}
    fitting = {
        name: {tensor: _fitting(entries, places.get(name, {}).get(tensor, {})) for tensor, entries in kept.items()}
        for name, kept in own["exchange_states"].items()
    }
    sync.load_worker_state(0, own | {"exchange_states": fitting})
    attachment.policy_runner.load_worker_state(0, own)


def _fitting(entries: Mapping[str, Any], held: Mapping[str, Any]) -> State:
    """The entries whose shape is that of this worker's; shards of a server change with the number of workers."""
    return {key: value for key, value in entries.items() if key in held and held[key][0].shape == value.shape}


def _shared_anew(states: Sequence[State], leader: bool) -> State:
    """This worker's share of what all workers held back: the mean, so that the mean over workers stays what it was.

    What was summed in the epoch for policies stays with the leader.
    """
    owns = [state["own"] for state in states]
    first = owns[0]
    kept = {
        name: {
            tensor: {key: _mean([own["exchange_states"][name][tensor][key] for own in owns]) for key in entries}
            for tensor, entries in held.items()
        }
        for name, held in first["exchange_states"].items()
    }
    summed = {} if leader else {"signals": {}, "unread_loss": torch.zeros_like(first["unread_loss"])}
    return first | {"exchange_states": kept} | summed


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    alike = isinstance(first, Tensor) and first.is_floating_point() and all(v.shape == first.shape for v in values)
    return torch.stack([value.double() for value in values]).mean(0).to(first.dtype) if alike else first


def _tell(attachment: Attachment, before: int, shared_anew: bool) -> None:
    if not attachment.comm.leader:
        return
    what = (
        "each gets the mean of all residuals"
        if shared_anew
        else ("residuals are dropped; pass the states of all ranks as a list to keep their mean")
    )
    log.warning("the state is of %d workers and goes on with %d: %s", before, attachment.comm.workers, what)


def _options(attachment: Attachment) -> State:
    chosen = attachment.setting.chosen
    return {
        "compressor": {"name": chosen.compressor_name, **chosen.compressor},
        "adaptive": {name: dict(node) for name, node in chosen.adaptive.items()},
        "sync": {"name": chosen.sync_name, **chosen.sync},
        "seed": attachment.setting.seed,
        "parameters": [spec.name for spec in attachment.axis.specs],
    }


def _refuse_other_options(attachment: Attachment, state: State) -> None:
    saved, now = flat(state["options"]), flat(_options(attachment))
    for key in [*saved, *(key for key in now if key not in saved)]:
        if saved.get(key, "nothing") != now.get(key, "nothing"):
            raise ConfigError(
                f"state must be of the same methods, got {key}={saved.get(key, 'nothing')!r} in it and "
                f"{key}={now.get(key, 'nothing')!r} here; attach with its options"
            )


def _merged(states: Sequence[State]) -> State:
    return {key: value for state in states for key, value in state.items()}
