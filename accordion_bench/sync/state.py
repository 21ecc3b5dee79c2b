"""What a scheme and its exchanges keep, for checkpoints; tensors with a row per worker end in `_W`."""

from typing import Any

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.on_device import copy_on_cpu, restore_
from accordion_bench.sync.base import Placed, Sync

PER_WORKER = "_W"


class SyncState:
    """The state of a scheme and of its exchanges: of all workers, and of each one.

    Args:
        sync: the scheme.
        comm: of all workers.
    """

    def __init__(self, sync: Sync, comm: Comm) -> None:
        self.sync, self.comm = sync, comm

    def state_dict(self) -> dict[str, Any]:
        """What all workers have in common."""
        places = [place for place in self.sync.exchanges() if place.exchange.comm is self.comm]
        return {"sync": self.sync.state_dict(), "exchange_states": {place.name: _common(place) for place in places}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.sync.load_state_dict(state["sync"])
        for place in self.sync.exchanges():
            self._load_common(state["exchange_states"].get(place.name, {}), place)

    def worker_state(self, row: int) -> dict[str, Any]:
        """What belongs to one local worker."""
        places = [place for place in self.sync.exchanges() if row in place.rows]
        return {
            "sync": self.sync.worker_state(row),
            "exchange_states": {place.name: _row(place, row) for place in places},
            # a group's own state is the leader's to save only where everybody is in it
            "groups": {p.name: _common(p) for p in places if p.exchange.comm is not self.comm},
        }

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        """Continue from `worker_state()`."""
        self.sync.load_worker_state(row, state["sync"])
        for place in self.sync.exchanges():
            if row not in place.rows:
                continue
            self._load_common(state["groups"].get(place.name, {}), place)
            for name, entries in state["exchange_states"].get(place.name, {}).items():
                for key, value in entries.items():
                    restore_(place.exchange.state[name][key][row - place.rows.start], value)

    def _load_common(self, state: dict[str, Any], place: Placed) -> None:
        """What the workers of one exchange have in common."""
        for name, entries in state.items():
            moved = {key: value.to(self.comm.device, copy=True) for key, value in entries.items()}
            place.exchange.state.setdefault(name, {}).update(moved)


def _common(place: Placed) -> dict[str, Any]:
    return {
        name: {key: copy_on_cpu(value) for key, value in entries.items() if not key.endswith(PER_WORKER)}
        for name, entries in place.exchange.state.items()
    }


def _row(place: Placed, row: int) -> dict[str, Any]:
    at = row - place.rows.start
    return {
        name: {key: copy_on_cpu(value[at]) for key, value in entries.items() if key.endswith(PER_WORKER)}
        for name, entries in place.exchange.state.items()
    }
