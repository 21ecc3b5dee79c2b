"""OneShot: compressors that are two pure functions, `encode` and `decode`.

Tensor suffixes: W local workers, A all workers, R rows (one worker's view of one tensor each), N elements, B bytes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors import packed_codes
from accordion_bench.compressors.base import (
    Compressor,
    Context,
    Exchanged,
    NonFinite,
    State,
    WhyDense,
    dense_bytes,
    ring,
    subtract_,
)
from accordion_bench.compressors.entropy import coded_bytes
from accordion_bench.compressors.non_finite_row import NonFiniteRow
from accordion_bench.compressors.traits import Traits
from accordion_bench.options.units import counted
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import keyed_rng, large_pages
from accordion_bench.tensors.same_shape import as_matrices

SMALL = 1 << 16  # coordinates that are copied at less cost than they are encoded apart


class Group(NamedTuple):
    """Tensors of equal shape and level with their messages.

    ids: G indices of tensors.
    level: of all of them.
    message: bytes [W, G, B], or of all workers [A, G, B]; where sizes differ, a list over rows w G + g.
    """

    ids: list[int]
    level: float
    message: Tensor | list[Tensor]

    def of(self, g: int) -> list[Tensor]:
        """The messages of one tensor, worker by worker, where sizes differ."""
        assert isinstance(self.message, list)
        return self.message[g :: len(self.ids)]


class OneShot(Compressor):
    """update = mean_w decode(encode(g_w)), tensor by tensor; tensors of equal shape are encoded together.

    A subclass has two pure functions. `encode` turns each row of coordinates into a message that holds everything a
    receiver needs; `decode` (or `add_decoded_`, which saves a pass) is its inverse up to what was lost. `message_bytes`
    says how long the message is.

    Carried by an all-gather. Where that would cost more wire than a dense all-reduce, what would have been decoded goes
    by dense all-reduce: the number of workers changes the bytes, never the training (up to the order of summation).
    """

    traits = Traits(collectives=("all_gather", "two_way"), collective_reason="its messages do not add up")
    entropy: str = "none"  # how entropy_bytes counts the codes, see `entropy.coded_bytes`
    by_name: bool = False  # true: decoding depends on the tensor's name

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
        rows_R = large_pages.zeros(len(message_R), spec.numel, message_R.device)
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

    def encode_many(
        self,
        rows_W: Sequence[Tensor],
        specs: Sequence[TensorSpec],
        level: float,
        ctx: Context,
        workers: Sequence[int],
        purpose: str = "",
    ) -> list[Tensor] | None:
        """`encode` of several tensors [W, N] at once, with keys for these workers; None: one by one."""
        return None

    def sums_of_many(
        self, messages_A: Sequence[Tensor], specs: Sequence[TensorSpec], level: float, ctx: Context, rows: int = 1
    ) -> list[Tensor] | None:
        """What several tensors' messages [A, B] decode to, summed: [rows, N], a to row a mod rows; None: one by one."""
        return None

    # ---- what it gets for that

    def gathers(self, spec: TensorSpec, level: float, workers: int) -> bool:
        """Whether the message costs less wire than a dense all-reduce: (A-1) B < 2 (A-1)/A 4n."""
        return self._sent_bytes(spec, level) * max(workers, 2) < 8 * spec.numel

    def why_dense(self, spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
        if not self.compresses(spec, level) or self.gathers(spec, level, workers):
            return None
        at = f" at {self.traits.knob} {level:g}" if self.traits.knob else ""
        reason = f"messages{at} from {counted(workers, 'worker')}, gathered, would cost more than a dense all-reduce"
        two_way = "compressor.collective=two_way" if "two_way" in self.traits.collectives else ""
        return WhyDense(reason, " or ".join(filter(None, [two_way, self._lower_knob()])) or "fewer workers")

    def _sent_bytes(self, spec: TensorSpec, level: float) -> int:
        size = self.message_bytes(spec, level)
        return size if self.traits.fixed_size else size + 4  # where sizes differ, they travel too

    def payload_bytes(self, spec: TensorSpec, level: float | None, workers: int) -> float:
        if level is None or not self.compresses(spec, level) or not self.gathers(spec, level, workers):
            return dense_bytes(spec)
        return self._sent_bytes(spec, level)

    def wire_bytes(self, spec: TensorSpec, level: float | None, workers: int) -> float:
        if level is None or not self.compresses(spec, level) or not self.gathers(spec, level, workers):
            return ring(workers) * dense_bytes(spec)
        return (workers - 1) * self._sent_bytes(spec, level)

    def keys(self, ctx: Context, name: str, workers: Sequence[int], purpose: str = "") -> list[int]:
        """Keys for the rounding noise of one tensor, a different one for each worker."""
        return [keyed_rng.key(ctx.seed, type(self).__name__, purpose, name, ctx.step, worker) for worker in workers]

    def encode_rows(
        self, xs_W: Sequence[Tensor], ctx: Context, ids: Sequence[int], level: float, comm: Comm
    ) -> Tensor | list[Tensor]:
        """Encode equal-shaped tensors together: [W, G, B]; a list over rows w G + g where sizes differ."""
        spec = ctx.specs[ids[0]]
        x_R = rows_of([xs_W[i] for i in ids])
        keys_G = [self.keys(ctx, ctx.specs[i].name, comm.local) for i in ids]
        keys = [keys_W[row] for row in range(comm.local_workers) for keys_W in keys_G]
        try:
            message = self.encode(x_R, spec, level, ctx, keys)
        except NonFiniteRow as bad:
            worker, g = divmod(bad.row, len(ids))
            raise non_finite(ctx, ids[g], comm.first_named + worker) from None
        return message if isinstance(message, list) else message.unflatten(0, (comm.local_workers, len(ids)))

    def encode_groups(self, xs_W: Sequence[Tensor], ctx: Context, levels: dict[int, float], comm: Comm) -> list[Group]:
        """Encode the tensors that have a level; equal shapes together, unless that would copy large tensors."""
        alike: dict[tuple[tuple[int, ...], float], list[int]] = {}
        for i, level in levels.items():
            alike.setdefault((ctx.specs[i].shape, level), []).append(i)
        groups = []
        for (_, level), ids in alike.items():
            # on an accelerator a launch costs more than a copy
            copied = xs_W[ids[0]].device.type != "cpu" or ctx.specs[ids[0]].numel <= SMALL
            together = len(ids) == 1 or copied or side_by_side([xs_W[i] for i in ids]) is not None
            for some in [ids] if together else [[i] for i in ids]:
                groups.append(Group(some, level, self.encode_rows(xs_W, ctx, some, level, comm)))
        return groups

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        compressed = {
            i: level for i, level in enumerate(ctx.levels) if level is not None and self.compresses(ctx.specs[i], level)
        }
        groups = self.encode_groups(xs_W, ctx, compressed, comm)
        place = {i: (group, g) for group in groups for g, i in enumerate(group.ids)}

        gathered = [group for group in groups if self.gathers(ctx.specs[group.ids[0]], group.level, comm.workers)]
        reduced = sorted(set(range(len(xs_W))) - {i for group in gathered for i in group.ids})
        decoded_W = zeros_like([xs_W[i] for i in reduced if i in compressed])
        own_W = dict(zip([i for i in reduced if i in compressed], decoded_W, strict=True))
        self.add_own_(own_W, place, ctx, 1.0)
        whole_W = [own_W.get(i, xs_W[i]) for i in reduced]
        update: list[Tensor] = [xs_W[0]] * len(xs_W) if xs_W else []
        payload = comm.ledger.counts["payload"]
        for i, mean in zip(reduced, comm.all_reduce_mean(whole_W), strict=True):
            update[i] = mean
        everyones = gathered_groups(gathered, comm) if self.traits.fixed_size else gathered_lists(gathered, comm)
        for i, mean in self.means(everyones, ctx, comm.workers, xs_W[0]).items() if xs_W else ():
            update[i] = mean.view(ctx.specs[i].shape)
        if self.entropy != "none":
            saved = sum(self._saved(group, ctx) for group in everyones)
            comm.ledger.counts["entropy"] += comm.ledger.counts["payload"] - payload - saved

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            subtract_({i: target_W for i, target_W in targets_W.items() if i not in compressed}, xs_W)
            lossy = {i: target_W for i, target_W in targets_W.items() if i in compressed}
            self.add_own_(lossy, place, ctx, -1.0)

        return Exchanged(update, subtract_sent_)

    def _saved(self, group: Group, ctx: Context) -> int:
        """Bytes by which entropy coding would shorten all workers' messages of a group."""
        spec, saved = ctx.specs[group.ids[0]], 0
        for g in range(len(group.ids)):
            codes_A, levels = self.codes_of(group.message[:, g], spec, group.level, ctx)  # type: ignore[call-overload]
            packed = packed_codes.code_bytes(spec.numel, len(levels))
            saved += sum(packed - coded_bytes(row, levels, self.entropy) for row in codes_A)
        return saved

    def add_own_(
        self, targets_W: Mapping[int, Tensor], place: Mapping[int, tuple[Group, int]], ctx: Context, alpha: float
    ) -> None:
        """target += alpha x what the local workers have sent of it.

        Args:
            targets_W: tensors [W, ...] by index.
            place: in which group, and where in it, the message of each is.
            ctx: as for `exchange`.
            alpha: factor.
        """
        for group in {id(group): group for group, _ in map(place.__getitem__, targets_W)}.values():
            wanted = {g: targets_W[i] for g, i in enumerate(group.ids) if i in targets_W}
            together = isinstance(group.message, Tensor) and not self.by_name
            if together and group.message[0].device.type != "cpu":  # a launch costs more than a copy
                self._add_group_(wanted, group, ctx, alpha)
                continue
            for g, target_W in wanted.items():
                flat_W, spec = target_W.view(target_W.shape[0], -1), ctx.specs[group.ids[g]]
                if isinstance(group.message, Tensor):
                    parts = [(flat_W, group.message[None, :, g])]
                else:
                    parts = [(flat_W[w : w + 1], own[None, None]) for w, own in enumerate(group.of(g))]
                for rows, message in parts:
                    self.add_decoded_(rows, message, spec, group.level, ctx, alpha)

    def _add_group_(self, targets_W: Mapping[int, Tensor], group: Group, ctx: Context, alpha: float) -> None:
        """The same for tensors of one group, by place in it, whose messages are decoded together."""
        assert isinstance(group.message, Tensor)
        (W, G), spec, like = group.message.shape[:2], ctx.specs[group.ids[0]], next(iter(targets_W.values()))
        rows = large_pages.zeros(W * G, spec.numel, like.device, like.dtype)
        self.add_decoded_(rows, group.message.flatten(0, 1)[None], spec, group.level, ctx)
        own_G = rows.view(W, G, *like.shape[1:]).unbind(1)
        torch._foreach_add_(list(targets_W.values()), [own_G[g] for g in targets_W], alpha=alpha)

    def means(self, groups: Sequence[Group], ctx: Context, workers: int, like: Tensor) -> dict[int, Tensor]:
        """The mean [N] of all workers' messages of each tensor, by index, in the type of `like`."""
        means: dict[int, Tensor] = {}
        for group in groups:
            spec, message = ctx.specs[group.ids[0]], group.message
            total_G = large_pages.zeros(len(group.ids), spec.numel, message[0].device, like.dtype)
            if isinstance(message, Tensor) and not self.by_name:
                self.add_decoded_(total_G, message, spec, group.level, ctx)
            else:
                for g, i in enumerate(group.ids):
                    for own in message[:, g] if isinstance(message, Tensor) else group.of(g):
                        self.add_decoded_(total_G[g : g + 1], own[None, None], ctx.specs[i], group.level, ctx)
            means.update(zip(group.ids, total_G.div_(workers), strict=True))
        return means


def zeros_like(xs: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous zeros of the shapes of some tensors, side by side."""
    if not xs:
        return []
    sizes = [x.numel() for x in xs]
    parts = large_pages.zeros(1, sum(sizes), xs[0].device, xs[0].dtype)[0].split(sizes)
    return [part.view(x.shape) for part, x in zip(parts, xs, strict=True)]


def gathered_groups(groups: Sequence[Group], comm: Comm) -> list[Group]:
    """All workers' messages [A, G, B] of each group, in one collective."""
    if not groups:
        return []
    message_W = torch.cat([group.message.flatten(1) for group in groups], dim=1)  # type: ignore[union-attr]
    sizes = [group.message[0].numel() for group in groups]
    message_A = comm.all_gather(message_W) if sum(sizes) else message_W.new_empty(comm.workers, 0)
    parts = message_A.split(sizes, dim=1)
    return [g._replace(message=part.unflatten(1, (len(g.ids), -1))) for g, part in zip(groups, parts, strict=True)]


def gathered_lists(groups: Sequence[Group], comm: Comm) -> list[Group]:
    """The same for messages of different sizes, which travel first: a list over rows a G + g for each group."""
    if not groups:
        return []
    owned_W = [
        [own for group in groups for own in group.message[w * len(group.ids) : (w + 1) * len(group.ids)]]
        for w in range(comm.local_workers)
    ]
    sizes_A = comm.all_gather_sizes([[len(own) for own in owned] for owned in owned_W])
    messages_A = comm.all_gather_uneven([torch.cat(owned) for owned in owned_W], [sum(sizes) for sizes in sizes_A])
    parts_A = [message.split(sizes) for message, sizes in zip(messages_A, sizes_A, strict=True)]
    out, first = [], 0
    for group in groups:
        stop = first + len(group.ids)
        out.append(group._replace(message=[part for parts in parts_A for part in parts[first:stop]]))
        first = stop
    return out


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
