"""Ledger: counts the bytes and rounds of all communication of a run, each byte once."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# an all-gather of unequal messages is sent as an all-to-all in which each worker sends the same data to all others
KINDS = ("all_reduce", "all_gather", "all_gather_uneven", "all_to_all", "send_receive")
# sums over the workers
OVER_WORKERS = ("payload", "wire", "inner_wire", "control_wire", "dense", "dense_wire", "saved")
# columns that are unknown with a third-party hook
OF_EXCHANGES = ("payload_bytes", "wire_bytes", "inner_wire_bytes", "rounds", "entropy_bytes", "paper_floats")


class Ledger:
    """Bytes of one run as cumulative integers.

    `payload_bytes` are the bytes that one worker passes to collectives. `wire_bytes` are those that one worker's link
    sends under the algorithm of the collective (mean over workers): ring all-reduce 2(A-1)/A x payload, all-gather
    (A-1) x payload, all-to-all (A-1)/A x payload, point-to-point messages 1 x payload, broadcast along a chain (A-1)/A
    x payload.

    Bytes of groups that exchange concurrently may differ between processes. Until `settled` is called, `counts` lacks
    them, and `views` holds the total of the run under the assumption that all processes sent as much as this one.
    """

    fields = (
        *("payload", "wire", "inner_wire", "rounds", "control", "control_wire", "control_rounds", "eval", "setup"),
        *("dense", "dense_wire", "dense_rounds", "saved", "coded", "paper_floats", "uncounted"),
    )
    viewed = ("payload", "wire", "saved")
    exchanged = (*viewed, "rounds", "coded", "paper_floats", "uncounted")

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.complete = True  # whether exchanges are charged here; those of a third-party hook are not
        # payload, wire and their dense twins are sums over the workers, so that they stay integers
        self.counts = dict.fromkeys(self.fields, 0)
        self._again: list[Callable[[], None]] | None = None  # calls that the host makes after a replay
        self.views = dict.fromkeys(self.viewed, 0)
        self.kinds = {kind: (0, 0) for kind in KINDS}  # (wire, rounds) of this process's exchanges; not in checkpoints

    def all_reduce(self, nbytes: int) -> None:
        """Charge a ring all-reduce with `nbytes` per worker."""
        ring = 2 * (self.workers - 1)
        self._charge("all_reduce", self.workers * nbytes, wire=ring * nbytes, rounds=ring)

    def all_gather(self, nbytes: int) -> None:
        """Charge an all-gather with `nbytes` per worker."""
        others = self.workers - 1
        self._charge("all_gather", self.workers * nbytes, wire=self.workers * others * nbytes, rounds=others)

    def all_gather_uneven(self, sizes_A: Sequence[int]) -> None:
        """Charge an all-gather of messages of different sizes, without padding."""
        others = self.workers - 1
        self._charge("all_gather_uneven", sum(sizes_A), wire=others * sum(sizes_A), rounds=others)

    def all_to_all(self, sizes_A: Sequence[int]) -> None:
        """Charge an all-to-all in which every worker sends `sizes_A[w]` bytes to worker w, its own part excepted."""
        others = self.workers - 1
        self._charge("all_to_all", self.workers * sum(sizes_A), wire=others * sum(sizes_A), rounds=others)

    def send_receive(self, nbytes: int, targets_A: Sequence[int | None]) -> None:
        """Charge messages of `nbytes` from each worker with a target; with one worker nothing is sent."""
        sent, meets = nbytes * sum(target is not None for target in targets_A), self.workers > 1
        self._charge("send_receive", sent, wire=sent * meets, rounds=int(meets and sent > 0))

    def _charge(self, kind: str, payload: int, wire: int, rounds: int) -> None:
        self.counts["payload"] += payload
        self.counts["wire"] += wire
        self.counts["rounds"] += rounds
        before = self.kinds[kind]
        self.kinds[kind] = before[0] + wire, before[1] + rounds

    def deliver(self, nbytes: int, receivers: int) -> None:
        """Charge concurrent messages of `nbytes` to some workers, from others, outside of exchanges."""
        self.counts["payload"] += nbytes * receivers
        self.counts["wire"] += nbytes * receivers
        self.counts["rounds"] += receivers > 0

    def dense_step(self, numel: int, passes: int = 2) -> None:
        """Count the cost of an fp32 ring all-reduce of a worker's coordinates in this step, for comparison.

        One pass around the ring is a reduce-scatter.
        """
        self.counts["dense"] += self.workers * 4 * numel
        self.counts["dense_wire"] += passes * (self.workers - 1) * 4 * numel
        self.counts["dense_rounds"] += passes * (self.workers - 1)

    def paper_count(self, floats: int | None) -> None:
        """Count an exchange as in the Accordion paper, in floats per worker; None = the paper defines no count."""
        self.counts["paper_floats"] += floats or 0
        self.counts["uncounted"] += floats is None

    def entropy_count(self, saved: int) -> None:
        """Count an exchange whose messages of all workers entropy coding would shorten by `saved` bytes."""
        self.counts["saved"] += saved
        self.counts["coded"] += 1

    def add(self, part: "Ledger") -> None:
        """Add the counts of some of the workers, which this process knows, and clear them."""
        self._add(part)
        part.counts, part.kinds = dict.fromkeys(self.fields, 0), dict.fromkeys(KINDS, (0, 0))

    def absorb(self, inner: Sequence["Ledger"]) -> None:
        """Add the counts of this process's groups, which exchange concurrently, to its view of the run; clear them."""
        alike = self.workers // (inner[0].workers * len(inner))  # processes, or groups of several processes
        for name in self.viewed:
            self.views[name] += alike * sum(ledger.counts[name] for ledger in inner)
        for name in ("rounds", "coded", "paper_floats", "uncounted"):  # per worker, independent of data
            self.counts[name] += max(ledger.counts[name] for ledger in inner)
        for ledger in inner:
            ledger.counts = dict.fromkeys(self.fields, 0)

    def settled(self, views: Sequence[int]) -> None:
        """Count the bytes of groups, given the mean of `views` over the processes, and clear the view of this process.

        The mean is an integer, because each group is part of as many views as it has processes, multiplied by the
        number of groups of that many processes.
        """
        self.views = dict.fromkeys(self.viewed, 0)
        for name, spent in zip(self.viewed, views, strict=True):
            self.counts[name] += spent
            self.counts["inner_wire"] += spent if name == "wire" else 0

    def charge(self, account: str, nbytes: int, wire: int = 0, rounds: int = 0) -> None:
        """Charge `control`, `eval` or `setup` traffic that each worker sends or receives once, in bytes of its message.

        `wire`, bytes on all links, and `rounds` are counted for `control` only, because the others are not timed.
        """
        self.counts[account] += nbytes
        if account == "control":
            self.counts["control_wire"] += wire
            self.counts["control_rounds"] += rounds

    @contextlib.contextmanager
    def deferred(self) -> Iterator[list[Callable[[], None]]]:
        """Collect charges as a list of calls instead of making them, for replays of captured work."""
        counts, kinds = dict(self.counts), dict(self.kinds)
        again: list[Callable[[], None]] = []
        spent, outer, self._again = Ledger(self.workers), self._again, again
        try:
            yield again
        finally:
            self._again = outer
            spent.counts = {name: now - counts[name] for name, now in self.counts.items()}
            spent.kinds = {kind: (now[0] - kinds[kind][0], now[1] - kinds[kind][1]) for kind, now in self.kinds.items()}
            self.counts, self.kinds = counts, kinds
        if any(spent.counts.values()):
            again.append(lambda: self._add(spent))

    def beside(self, action: Callable[[], None]) -> None:
        """Run the host's part of an exchange now, or after each replay if the exchange is being captured."""
        if self._again is None:
            action()
        else:
            self._again.append(action)

    def noted(self) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
        """Return the current counts, for `put_back`."""
        return dict(self.counts), dict(self.kinds)

    def put_back(self, noted: tuple[dict[str, int], dict[str, tuple[int, int]]], names: Sequence[str]) -> None:
        """Reset these counts to those of `noted()`, because the operation is repeated."""
        counts, kinds = noted
        self.counts.update({name: counts[name] for name in names})
        self.kinds = dict(kinds)

    def resized(self, workers: int) -> None:
        """Set the number of workers; bytes per worker do not change."""
        self.counts = of_workers(self.counts, self.workers, workers)
        self.workers = workers

    def _add(self, part: "Ledger") -> None:
        for name, spent in part.counts.items():
            self.counts[name] += spent
        for kind, (wire, rounds) in part.kinds.items():
            before = self.kinds[kind]
            self.kinds[kind] = before[0] + wire, before[1] + rounds

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints."""
        return {"ledger": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict()`."""
        self.counts.update(state["ledger"])

    def columns(self) -> dict[str, Any]:
        """Return the columns of a metrics row, bytes per worker. Before `settled` they are this process's view.

        If the ledger is not complete, all columns of exchanges are None.

        `inner_wire_bytes` is the part of `wire_bytes` inside groups smaller than all workers. `entropy_bytes` is the
        payload with entropy-coded messages, if the compressor counts it. `paper_floats` is the volume as counted in
        the Accordion paper, independent of the bytes sent; None = the paper defines no count.
        """
        c, mean = dict(self.counts), lambda total: round(total / self.workers)
        for name, spent in self.views.items():
            c[name] += spent
        c["inner_wire"] += self.views["wire"]
        counted = {
            **{f"{name}_bytes": mean(c[name]) for name in ("payload", "wire", "inner_wire")},
            "rounds": c["rounds"],
            "control_bytes": c["control"],
            "control_wire_bytes": mean(c["control_wire"]),
            "control_rounds": c["control_rounds"],
            "eval_bytes": c["eval"],
            "setup_bytes": c["setup"],
            "dense_bytes": mean(c["dense"]),
            "dense_wire_bytes": mean(c["dense_wire"]),
            "dense_rounds": c["dense_rounds"],
            "entropy_bytes": mean(c["payload"] - c["saved"]) if c["coded"] else None,
            "paper_floats": None if c["uncounted"] else c["paper_floats"],
        }
        return counted if self.complete else {**counted, **dict.fromkeys(OF_EXCHANGES)}


def of_workers(counts: Mapping[str, int], before: int, workers: int) -> dict[str, int]:
    """Scale the counts that are sums over the workers from `before` to `workers` workers."""
    return {name: round(n * workers / before) if name in OVER_WORKERS else n for name, n in counts.items()}
