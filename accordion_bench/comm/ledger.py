"""Ledger: every byte counted once."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# an all-gather of unequal messages travels as an all-to-all in which each worker sends all others the same
KINDS = ("all_reduce", "all_gather", "all_gather_uneven", "all_to_all", "send_receive")
OVER_WORKERS = ("payload", "wire", "inner_wire", "control_wire", "dense", "dense_wire", "saved")  # are sums of theirs
# what a third-party hook leaves unknown
OF_EXCHANGES = ("payload_bytes", "wire_bytes", "inner_wire_bytes", "rounds", "entropy_bytes", "paper_floats")


class Ledger:
    """Bytes of one run as cumulative integers.

    `payload_bytes` is what one worker hands to the collectives; `wire_bytes` what one worker's own link sends under the
    collective's algorithm (mean over workers): ring all-reduce 2(A-1)/A x payload, all-gather (A-1) x payload,
    all-to-all (A-1)/A x payload, messages from worker to worker the payload, broadcast along a chain (A-1)/A x
    payload.

    Groups that exchange side by side may spend differently from process to process. Until `settled`, `counts` lacks
    what they have spent, and `views` holds what all of the run would have spent if it had spent as this process.

    Args:
        workers: all workers of the run, A.

    Attributes:
        complete: whether exchanges are charged here; those of a third-party hook are not.
        kinds: (wire, rounds) of exchanges by kind of collective, as this process has made them; not in checkpoints.
    """

    fields = (
        "payload",
        "wire",
        "inner_wire",
        "rounds",
        "control",
        "control_wire",
        "control_rounds",
        "eval",
        "setup",
        "dense",
        "dense_wire",
        "dense_rounds",
        "saved",
        "coded",
        "paper_floats",
        "uncounted",
    )
    viewed = ("payload", "wire", "saved")
    exchanged = (*viewed, "rounds", "coded", "paper_floats", "uncounted")

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.complete = True
        # payload, wire and their dense twins are sums over the workers, so that they stay integers
        self.counts = dict.fromkeys(self.fields, 0)
        self._again: list[Callable[[], None]] | None = None  # what the host is to do after a replay
        self.views = dict.fromkeys(self.viewed, 0)
        self.kinds = {kind: (0, 0) for kind in KINDS}

    def all_reduce(self, nbytes: int) -> None:
        """Charge a ring all-reduce to which each worker hands `nbytes`."""
        ring = 2 * (self.workers - 1)
        self._charge("all_reduce", self.workers * nbytes, wire=ring * nbytes, rounds=ring)

    def all_gather(self, nbytes: int) -> None:
        """Charge an all-gather to which each worker hands `nbytes`."""
        others = self.workers - 1
        self._charge("all_gather", self.workers * nbytes, wire=self.workers * others * nbytes, rounds=others)

    def all_gather_uneven(self, sizes_A: Sequence[int]) -> None:
        """Charge an all-gather of messages that differ in size, sent as they are."""
        others = self.workers - 1
        self._charge("all_gather_uneven", sum(sizes_A), wire=others * sum(sizes_A), rounds=others)

    def all_to_all(self, sizes_A: Sequence[int]) -> None:
        """Charge an all-to-all in which every worker sends `sizes_A[w]` bytes to worker w; its own part stays."""
        others = self.workers - 1
        self._charge("all_to_all", self.workers * sum(sizes_A), wire=others * sum(sizes_A), rounds=others)

    def send_receive(self, nbytes: int, targets_A: Sequence[int | None]) -> None:
        """Charge messages of `nbytes` from each worker that has a target; a lone one keeps them."""
        sent, meets = nbytes * sum(target is not None for target in targets_A), self.workers > 1
        self._charge("send_receive", sent, wire=sent * meets, rounds=int(meets and sent > 0))

    def _charge(self, kind: str, payload: int, wire: int, rounds: int) -> None:
        self.counts["payload"] += payload
        self.counts["wire"] += wire
        self.counts["rounds"] += rounds
        before = self.kinds[kind]
        self.kinds[kind] = before[0] + wire, before[1] + rounds

    def deliver(self, nbytes: int, receivers: int) -> None:
        """Charge one message of `nbytes` to each of so many workers, from other ones; in no exchange, at one time.

        Args:
            nbytes: of a message.
            receivers: how many workers get one.
        """
        self.counts["payload"] += nbytes * receivers
        self.counts["wire"] += nbytes * receivers
        self.counts["rounds"] += receivers > 0

    def dense_step(self, numel: int, passes: int = 2) -> None:
        """Count what an fp32 ring all-reduce of `numel` coordinates would have cost in this step.

        Args:
            numel: of one worker's tensors.
            passes: around the ring; 1 = it is a reduce-scatter.
        """
        self.counts["dense"] += self.workers * 4 * numel
        self.counts["dense_wire"] += passes * (self.workers - 1) * 4 * numel
        self.counts["dense_rounds"] += passes * (self.workers - 1)

    def paper_count(self, floats: int | None) -> None:
        """Count an exchange as the Accordion paper does, in floats of one worker; None = the paper has no count."""
        self.counts["paper_floats"] += floats or 0
        self.counts["uncounted"] += floats is None

    def entropy_count(self, saved: int) -> None:
        """Count an exchange whose codes entropy coding would shorten by so many bytes, of all workers' messages."""
        self.counts["saved"] += saved
        self.counts["coded"] += 1

    def add(self, part: "Ledger") -> None:
        """Add what some of the workers have just spent, known to the process that counts here, and clear it."""
        self._add(part)
        part.counts, part.kinds = dict.fromkeys(self.fields, 0), dict.fromkeys(KINDS, (0, 0))

    def absorb(self, inner: Sequence["Ledger"]) -> None:
        """Add what the groups of this process have just spent to its view of the run, and clear it.

        Args:
            inner: the ledgers of the local groups, which exchange side by side. How many rounds they take does not
                depend on data.
        """
        alike = self.workers // (inner[0].workers * len(inner))  # processes, or groups of several processes
        for name in self.viewed:
            self.views[name] += alike * sum(ledger.counts[name] for ledger in inner)
        for name in ("rounds", "coded", "paper_floats", "uncounted"):  # of one worker, equal in all groups
            self.counts[name] += max(ledger.counts[name] for ledger in inner)
        for ledger in inner:
            ledger.counts = dict.fromkeys(self.fields, 0)

    def settled(self, views: Sequence[int]) -> None:
        """Count what groups have spent, and forget this process's view of it.

        Args:
            views: the mean of `views` over processes. It is an integer: each group stands in as many views as it has
                processes, times the number of groups of that many processes.
        """
        self.views = dict.fromkeys(self.viewed, 0)
        for name, spent in zip(self.viewed, views, strict=True):
            self.counts[name] += spent
            self.counts["inner_wire"] += spent if name == "wire" else 0

    def charge(self, account: str, nbytes: int, wire: int = 0, rounds: int = 0) -> None:
        """Charge `control`, `eval` or `setup` traffic that each worker sends or receives once.

        Args:
            account: of the three.
            nbytes: of one worker's message.
            wire: bytes on all links, noted for `control` alone: the others are on no clock.
            rounds: one after another, noted likewise.
        """
        self.counts[account] += nbytes
        if account == "control":
            self.counts["control_wire"] += wire
            self.counts["control_rounds"] += rounds

    @contextlib.contextmanager
    def deferred(self) -> Iterator[list[Callable[[], None]]]:
        """Inside, nothing is charged; what would have been is charged by calling what the list holds afterwards."""
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
        """Let the host do its part of an exchange: now, or after each replay of the exchange that is being captured."""
        if self._again is None:
            action()
        else:
            self._again.append(action)

    # ---- workers come and go

    def noted(self) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
        """What has been counted until now, for `put_back`."""
        return dict(self.counts), dict(self.kinds)

    def put_back(self, noted: tuple[dict[str, int], dict[str, tuple[int, int]]], names: Sequence[str]) -> None:
        """What has been counted since then was for nothing: it is done again.

        Args:
            noted: then.
            names: of the counts.
        """
        counts, kinds = noted
        self.counts.update({name: counts[name] for name in names})
        self.kinds = dict(kinds)

    def resized(self, workers: int) -> None:
        """From here on there are so many workers; bytes of one worker stay what they are."""
        self.counts = of_workers(self.counts, self.workers, workers)
        self.workers = workers

    def _add(self, part: "Ledger") -> None:
        for name, spent in part.counts.items():
            self.counts[name] += spent
        for kind, (wire, rounds) in part.kinds.items():
            before = self.kinds[kind]
            self.kinds[kind] = before[0] + wire, before[1] + rounds

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"ledger": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.counts.update(state["ledger"])

    def columns(self) -> dict[str, Any]:
        """The ledger as it stands in every metrics row; bytes of one worker. Unsettled, it is this process's view.

        Of exchanges, where it is not complete, everything is None: neither 0 nor what they might have been.

        `inner_wire_bytes` is the part of `wire_bytes` that stays inside groups smaller than all workers.
        `entropy_bytes` is what the payload would be with entropy-coded messages, where a compressor counts that.
        `paper_floats` is the volume as the Accordion paper counts it, whatever is really sent; None = it has no count.
        """
        c, mean = dict(self.counts), lambda total: round(total / self.workers)
        for name, spent in self.views.items():
            c[name] += spent
        c["inner_wire"] += self.views["wire"]
        counted = {
            "payload_bytes": mean(c["payload"]),
            "wire_bytes": mean(c["wire"]),
            "inner_wire_bytes": mean(c["inner_wire"]),
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
    """A ledger's counts, where those that are sums over the workers become sums over as many as there are now."""
    return {name: round(n * workers / before) if name in OVER_WORKERS else n for name, n in counts.items()}
