"""OneShot: compressors that are two pure functions, `encode` and `decode`.

Tensor suffixes: W local workers, A all workers, R rows (one worker's view of one tensor each), N elements, B bytes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench import memory, rng
from accordion_bench.blocks import as_matrices
from accordion_bench.comm import Comm
from accordion_bench.compressors import codes, entropy
from accordion_bench.compressors.base import Compressor, Context, Exchanged, NonFinite, State, dense_bytes
from accordion_bench.compressors.levels import NonFiniteInput as NonFiniteRow
from accordion_bench.plan import TensorSpec


class OneShot(Compressor):
    """update = mean_w decode(encode(g_w)), tensor by tensor; tensors of equal shape are encoded together.

    A subclass has two pure functions. `encode` turns each row of coordinates into a message that holds everything a
    receiver needs; `decode` (or `add_decoded_`, which saves a pass) is its inverse up to what was lost. `message_bytes`
    says how long the message is.

    Carried by an all-gather. Where that would cost more wire than a dense all-reduce, what would have been decoded goes
    by dense all-reduce: the number of workers changes the bytes, never the training (up to the order of summation).
    """

    collectives: tuple[str, ...] = ("all_gather", "two_way")
    because = "its messages do not add up"
    entropy: str = "none"  # how entropy_bytes counts the codes, see `entropy.coded_bytes`
    scaled: bool = True  # false: a message says nothing of the size of what it stands for (plain signs)

    # ---- what a subclass writes

    def encode(
        self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]
    ) -> Tensor | list[Tensor]:
        """Rows [R, N] as messages of bytes [R, B].

        Args:
            x_R: coordinates, float32 or float64.
            spec: name (the first of those encoded together), shape.
            level: the knob's value.
            ctx: step, seed, codebooks.
            keys: one per row, for keyed draws.

        Returns:
            uint8 [R, B]; with `fixed_size = False` a list of R 1-D messages.

        Raises:
            NonFiniteRow: for NaN and infinity, which have no code.
        """
        raise NotImplementedError

    def decode(self, message_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor:
        """Messages [R, B] as rows [R, N] of float32."""
        rows_R = memory.zeros(len(message_R), spec.numel, message_R.device)
        self.add_decoded_(rows_R, message_R[None], spec, level, ctx)
        return rows_R

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        """B, the length of a message; the largest possible one where `fixed_size` is false."""
        raise NotImplementedError

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        """total_R [R, N] += alpha x sum_a decode(message_AR[a]), in the order of a: write this or `decode`."""
        for message_R in message_AR:
            total_R.add_(self.decode(message_R, spec, level, ctx).to(total_R.dtype), alpha=alpha)

    def codes_of(
        self, message_A: Tensor, spec: TensorSpec, level: float, ctx: Context
    ) -> tuple[Tensor, Sequence[float]]:
        """The codes [A, N] in messages [A, B] and their codebook, where `entropy` is offered."""
        raise NotImplementedError

    # ---- what it gets for that

    def gathers(self, spec: TensorSpec, level: float, workers: int) -> bool:
        """Whether the message costs less wire than a dense all-reduce: (A-1) B < 2 (A-1)/A 4n."""
        return self._sent_bytes(spec, level) * max(workers, 2) < 8 * spec.numel

    def _sent_bytes(self, spec: TensorSpec, level: float) -> int:
        return self.message_bytes(spec, level) + (0 if self.fixed_size else 4)  # where sizes differ, they travel too

    def payload_bytes(self, spec: TensorSpec, level: float | None, workers: int) -> float:
        if level is None or not self.compresses(spec, level) or not self.gathers(spec, level, workers):
            return dense_bytes(spec)
        return self._sent_bytes(spec, level)

    def keys(self, ctx: Context, name: str, workers: Sequence[int], purpose: str = "") -> list[int]:
        """Keys for the rounding noise of one tensor, a different one for each worker."""
        return [rng.key(ctx.seed, type(self).__name__, purpose, name, ctx.step, worker) for worker in workers]

    def encode_rows(
        self, xs_W: Sequence[Tensor], ctx: Context, ids: Sequence[int], level: float, workers: Sequence[int]
    ) -> Tensor | list[Tensor]:
        """Encode equal-shaped tensors of some workers together: [W, G, B]; a list over rows w G + g if sizes differ."""
        spec = ctx.specs[ids[0]]
        x_R = rows_of([xs_W[i] for i in ids])
        keys_G = [self.keys(ctx, ctx.specs[i].name, workers) for i in ids]
        keys = [keys_W[row] for row in range(len(workers)) for keys_W in keys_G]
        try:
            message = self.encode(x_R, spec, level, ctx, keys)
        except NonFiniteRow as bad:
            worker, g = divmod(bad.row, len(ids))
            raise non_finite(ctx, ids[g], workers[worker]) from None
        return message if isinstance(message, list) else message.unflatten(0, (len(workers), len(ids)))

    def encode_all(
        self, xs_W: Sequence[Tensor], ctx: Context, levels: dict[int, float], workers: Sequence[int]
    ) -> dict[int, Tensor | list[Tensor]]:
        """The messages [W, B] of the tensors with a level; equal shapes together, unless that would cost a copy."""
        groups: dict[tuple[tuple[int, ...], float], list[int]] = {}
        for i, level in levels.items():
            groups.setdefault((ctx.specs[i].shape, level), []).append(i)
        rows_W: dict[int, Tensor | list[Tensor]] = {}
        for (_, level), group in groups.items():
            on_cpu = xs_W[group[0]].device.type == "cpu"  # elsewhere a launch costs more than a copy
            apart = on_cpu and len(group) > 1 and side_by_side([xs_W[i] for i in group]) is None
            for ids in [[i] for i in group] if apart else [group]:
                message = self.encode_rows(xs_W, ctx, ids, level, workers)
                for g, i in enumerate(ids):
                    rows_W[i] = message[g :: len(ids)] if isinstance(message, list) else message[:, g]
        return rows_W

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        compressed = {
            i: level for i, level in enumerate(ctx.levels) if level is not None and self.compresses(ctx.specs[i], level)
        }
        workers = range(comm.first_worker, comm.first_worker + comm.local_workers)
        rows_W = self.encode_all(xs_W, ctx, compressed, workers)

        def add_own_(i: int, target_W: Tensor, alpha: float) -> None:
            flat_W, own_W = target_W.view(target_W.shape[0], -1), rows_W[i]
            parts = (
                [(flat_W, own_W)] if isinstance(own_W, Tensor) else zip(flat_W[:, None], _one_row(own_W), strict=True)
            )
            for rows, message in parts:
                self.add_decoded_(rows, message[None], ctx.specs[i], compressed[i], ctx, alpha)

        gathered = [i for i, level in compressed.items() if self.gathers(ctx.specs[i], level, comm.workers)]
        reduced = sorted(set(range(len(xs_W))) - set(gathered))
        whole_W = [xs_W[i] for i in reduced]
        for position, i in enumerate(reduced):
            if i in compressed:
                whole_W[position] = torch.zeros_like(xs_W[i], memory_format=torch.contiguous_format)
                add_own_(i, whole_W[position], 1.0)
        update: list[Tensor] = [xs_W[0]] * len(xs_W) if xs_W else []
        payload = comm.ledger.counts["payload"]
        for i, mean in zip(reduced, comm.all_reduce_mean(whole_W), strict=True):
            update[i] = mean
        received = self._gather(rows_W, gathered, comm)
        for i, message_A in received.items():
            update[i] = self._mean(message_A, ctx, i, xs_W[i].dtype)
        if self.entropy != "none":
            sent = comm.ledger.counts["payload"] - payload
            saved = sum(self._saved(message_A, ctx, i) for i, message_A in received.items())
            comm.ledger.counts["entropy"] += sent - saved

        def subtract_sent_(i: int, target_W: Tensor) -> None:
            if i in compressed:
                add_own_(i, target_W, -1.0)
            else:
                target_W.sub_(xs_W[i])

        return Exchanged(update, subtract_sent_)

    def _gather(
        self, rows_W: dict[int, list[Tensor] | Tensor], gathered: Sequence[int], comm: Comm
    ) -> dict[int, Tensor | list[Tensor]]:
        """All workers' messages of each tensor, in one collective: [A, B], or a list of A messages."""
        if not gathered:
            return {}
        if self.fixed_size:
            rows = [row_W for i in gathered if isinstance(row_W := rows_W[i], Tensor)]
            message_W = torch.cat(rows, dim=1)
            sizes = [row_W.shape[1] for row_W in rows]
            message_A = comm.all_gather(message_W) if sum(sizes) else message_W.new_empty(comm.workers, 0)
            return dict(zip(gathered, message_A.split(sizes, dim=1), strict=True))
        W = range(comm.local_workers)
        sizes_A = comm.all_gather_sizes([[len(rows_W[i][row]) for i in gathered] for row in W])
        messages_W = [torch.cat([rows_W[i][row] for i in gathered]) for row in W]
        messages_A = comm.all_gather_uneven(messages_W, [sum(sizes) for sizes in sizes_A])
        parts_A = [message.split(sizes) for message, sizes in zip(messages_A, sizes_A, strict=True)]
        return {i: [parts[t] for parts in parts_A] for t, i in enumerate(gathered)}

    def _saved(self, message_A: Tensor | list[Tensor], ctx: Context, i: int) -> int:
        """Bytes by which entropy coding would shorten all workers' messages of one tensor."""
        spec, level = ctx.specs[i], ctx.levels[i]
        assert level is not None and isinstance(message_A, Tensor)
        codes_A, levels = self.codes_of(message_A, spec, level, ctx)
        packed = codes.code_bytes(spec.numel, len(levels))
        return sum(packed - entropy.coded_bytes(row, levels, self.entropy) for row in codes_A)

    def _mean(self, message_A: Tensor | list[Tensor], ctx: Context, i: int, dtype: torch.dtype) -> Tensor:
        """Mean over workers of one tensor's messages [A, B]."""
        spec, level = ctx.specs[i], ctx.levels[i]
        assert level is not None
        total = memory.zeros(1, spec.numel, message_A[0].device, dtype)
        if isinstance(message_A, Tensor):
            self.add_decoded_(total, message_A[:, None], spec, level, ctx)
        else:
            for message in _one_row(message_A):
                self.add_decoded_(total, message[None], spec, level, ctx)
        return total.div_(len(message_A)).view(spec.shape)


def _one_row(messages: list[Tensor]) -> list[Tensor]:
    return [message[None] for message in messages]


def rows_of(xs_W: Sequence[Tensor]) -> Tensor:
    """Equal-shaped tensors [W, ...] as rows [W*G, N], worker by worker; without a copy where they lie side by side."""
    together = side_by_side(xs_W)
    if together is None:
        together = torch.stack([x.flatten(1) for x in xs_W], dim=1).flatten(0, 1)
    return together


def side_by_side(xs_W: Sequence[Tensor]) -> Tensor | None:
    """Equal-shaped tensors [W, ...] as rows [W*G, N] without a copy; None where they are apart."""
    numel = xs_W[0][0].numel()
    together = as_matrices(xs_W, (1, numel))
    return None if together is None else together.reshape(len(xs_W) * xs_W[0].shape[0], numel)


def non_finite(ctx: Context, i: int, worker: int) -> NonFinite:
    """The error for a tensor that has no code."""
    return NonFinite(f"what worker {worker} was to send of {ctx.specs[i].name} is not finite")
