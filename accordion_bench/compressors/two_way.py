"""Two-way compression: a sharded parameter server by all-to-all and all-gather.

Tensor suffixes: W local workers, A all workers, N elements, B bytes.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Feedback, Target
from accordion_bench.codecs.layout import Message, Transfer
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import (
    Context,
    Exchanged,
    Kept,
    Saved,
    State,
    forget,
    paying_levels,
    subtract_,
)
from accordion_bench.compressors.description import WhyDense, shorter_messages
from accordion_bench.compressors.gathered import Gathered, average_at_owners, naming, target_like
from accordion_bench.compressors.probe import Probed, cheaper_than_dense, payload_bytes, probe_exchanged, wire_bytes
from accordion_bench.compressors.wrapper import Wrapper
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import option, with_options
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.keyed_rng import BLOCK, blocks_of, integers_of
from accordion_bench.tensors.same_shape import in_rows, joined
from accordion_bench.tensors.upload import fresh

STATE = "two_way"


class Piece(NamedTuple):
    """Coordinates [start, stop) of one tensor, owned by one worker, from `offset` on in the owner's residual.

    Both directions compress each piece by itself.
    """

    name: str
    start: int
    stop: int
    owner: int
    offset: int = 0

    @property
    def spec(self) -> TensorSpec:
        """The piece as a separate tensor."""
        return _spec_of(self)


@functools.lru_cache(maxsize=1 << 16)
def _spec_of(piece: Piece) -> TensorSpec:
    return TensorSpec(f"{piece.name}[{piece.start}:{piece.stop}]", (1, piece.stop - piece.start))


def cut_shards(specs: Sequence[TensorSpec], workers: int, server: str = "sharded", align: str = "piece") -> list[Piece]:
    """Assign coordinates to workers; depends only on names and sizes, not on the order of the tensors.

    All coordinates, tensors in the order of their names, are cut into equal shards, one per worker. A piece is a
    non-empty intersection of a tensor and a shard.

    Args:
        specs: the tensors.
        workers: A, the number of shards.
        server: `sharded`, or `literal`: worker 0 owns everything, a star.
        align: `piece`: shards of equal size. `tensor`: a tensor belongs to the shard that contains its middle, so that
            no tensor is cut and shards differ in size.
    """
    total, owned = sum(spec.numel for spec in specs), [0] * workers
    shard = total if server == "literal" else -(-total // (8 * workers)) * 8
    pieces, position = [], 0
    for spec in sorted(specs, key=lambda spec: spec.name):
        end = position + spec.numel
        cuts = [position, *range((position // shard + 1) * shard, end, shard), end] if spec.numel else []
        for a, b in [(position, end)] if align == "tensor" and cuts else itertools.pairwise(cuts):
            owner = ((a + b) // 2 if align == "tensor" else a) // shard
            pieces.append(Piece(spec.name, a - position, b - position, owner, owned[owner]))
            owned[owner] += b - a
        position = end
    return pieces


def _longest(pieces: Sequence[Piece]) -> int:
    return max(piece.offset + piece.stop - piece.start for piece in pieces)


def break_ties_(votes: Sequence[Tensor], shard: Bucket, stream: str) -> None:
    """Replace cancelled votes [1, N] on the pieces of one owner by coins, +-1/2, keyed by a random stream."""
    if votes:
        sizes = [vote.numel() for vote in votes]
        counts = [-(-size // BLOCK) for size in sizes]
        cpu = torch.device("cpu")
        blocks = fresh(lambda moment: blocks_of(shard.at(moment).keys(stream), counts, cpu), shard, votes[0].device)
        coins = (0.5 - integers_of(blocks, 1)).to(votes[0].dtype)
        pairs = [(vote, coins[:, : -size % BLOCK]) for vote, size in zip(votes, sizes, strict=True)]
        all_votes = torch.cat([part for pair in pairs for part in pair], dim=1)  # coins pad each vote to whole blocks
        decided = torch.where(all_votes == 0, coins, all_votes).split([BLOCK * n for n in counts], dim=1)
        torch._foreach_copy_(list(votes), [own[:, :size] for own, size in zip(decided, sizes, strict=True)])


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    if options.get("collective") != "two_way":
        for key in ("server", "align", "ties"):
            yield key, "compressor.collective is not two_way"
    if options.get("scale") != "none":
        yield "ties", "there is no vote"
    if options.get("server") == "literal":
        yield "align", "compressor.server=literal has one shard"


def _why_dense(compressor: "TwoWay", spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
    if not compressor.compresses(spec, level) or compressor.pays(spec, level, workers):
        return None
    at = f" at {compressor.traits.knob} {level:g}" if compressor.traits.knob else ""
    return WhyDense(
        f"messages{at} would be no shorter than the tensors", shorter_messages(compressor) or ({"compressor": "none"},)
    )


def _probe_input(compressor: "TwoWay", ps_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> Probed:
    """Probe an exchange of the local workers only, with pieces for that many owners, cut from all tensors at once."""
    alone = TwoWay(compressor.inner, False, compressor.server, compressor.align, compressor.ties)
    alone.pieces = alone._by_name(ctx.specs, len(ps_W[0]) if ps_W else 1)
    pairs = zip(ctx.specs, ctx.levels, strict=True)
    sizes = [[f(compressor, s, level, workers) for f in (payload_bytes, wire_bytes)] for s, level in pairs]
    probe = probe_exchanged(alone, ps_W, ctx, {}, workers)
    measured = [m._replace(wire_bytes=wire) for m, (_, wire) in zip(probe.measured, sizes, strict=True)]
    return probe._replace(payload_bytes=[payload for payload, _ in sizes], measured=measured)


@with_options
class TwoWay(Wrapper):
    """update = C( mean_w C(x_w) + e~ ),  e~ <- its argument - update: workers to owner to workers, both compressed.

    Every worker owns a shard of the coordinates, see `cut_shards`. Messages are exchanged by all-to-all; the owner
    averages in the order of the workers, adds its residual, and compresses again; an all-gather returns the results.
    Wire bytes per worker are 2 (A-1)/A x message, as of a ring, at any number of workers. With plain signs and no
    residual this is majority vote.

    With `residual` the owner stores the error of its message (e~); otherwise that is lost. A tied vote is decided by a
    keyed coin (`random`), or is +1 (`plus`), a drift of all parameters: an even number of workers ties often (4 on
    noise: in 3 of 8 coordinates).

    Source: Zheng, Huang, Kwok 2019 (arXiv 1905.10936); Bernstein et al. 2018 (majority vote).
    """

    inner: Gathered
    residual: bool = False
    server: str = option(
        "sharded over the workers, or literal: worker 0 owns everything",
        default="sharded",
        choices=("sharded", "literal"),
    )
    align: str = option(
        "piece: equal shards, tensors are cut; tensor: shards of whole tensors",
        default="piece",
        choices=("piece", "tensor"),
    )
    ties: str = option("decision of a tied vote", default="random", choices=("random", "plus"))

    description = replace(Wrapper.description, idle=_idle, why_dense=_why_dense, probe_input=_probe_input)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.inner.traits.scaled:
            self.traits = replace(self.traits, reduces="vote")
        self.pieces: dict[str, list[Piece]] = {}
        self.kept_in: dict[str, str] = {}  # per tensor, the key of its owners' residuals

    def _by_name(self, specs: Sequence[TensorSpec], workers: int) -> dict[str, list[Piece]]:
        by_name: dict[str, list[Piece]] = {}
        for piece in cut_shards([s for s in specs if self.compresses(s, 1)], workers, self.server, self.align):
            by_name.setdefault(piece.name, []).append(piece)
        return by_name

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        state = self.inner.init(specs, comm, like)
        by_name = self._by_name(specs, comm.workers)
        self.pieces.update(by_name)  # each group of tensors that is exchanged together has its own shards
        forget(self)
        pieces = [piece for pieces in by_name.values() for piece in pieces]
        if self.residual and pieces:
            sizes = [sum(p.stop - p.start for p in pieces if p.owner == w) for w in range(comm.workers)]
            residual_W = torch.zeros(comm.local_workers, max(sizes), dtype=like.dtype, device=like.device)
            key = f"{STATE} from {min(by_name)}"
            state[key] = {"residual_W": residual_W}
            self.kept_in.update(dict.fromkeys(by_name, key))
        return state

    def redistributed_state(self, kept_A: Sequence[Saved], worker: int, workers: int) -> dict[str, dict[str, Tensor]]:
        """Return one worker's share; owners' residuals follow their coordinates, and are dropped if buckets differ."""
        prefix = f"{STATE} from "
        others_A = [{name: kept[name] for name in kept if not name.startswith(prefix)} for kept in kept_A]
        own = self.inner.redistributed_state(others_A, worker, workers)
        for key in set(self.kept_in.values()) & kept_A[0].keys():
            moved = self._moved(key, [kept[key]["residual_W"] for kept in kept_A], worker, workers)
            own |= {} if moved is None else {key: {"residual_W": moved}}
        return own

    def _moved(self, key: str, residuals_A: Sequence[Tensor], worker: int, workers: int) -> Tensor | None:
        """Return an owner's residual [N], from those of all previous owners; None = they belong to other tensors."""
        names = [name for name, kept_in in self.kept_in.items() if kept_in == key]
        specs = [TensorSpec(name, (1, sum(piece.stop - piece.start for piece in self.pieces[name]))) for name in names]
        before = cut_shards(specs, len(residuals_A), self.server, self.align)
        after = cut_shards(specs, workers, self.server, self.align)
        if len(residuals_A[0]) != _longest(before):
            return None
        whole = {spec.name: residuals_A[0].new_zeros(spec.numel) for spec in specs}
        for piece in before:
            residual = residuals_A[piece.owner][piece.offset : piece.offset + piece.stop - piece.start]
            whole[piece.name][piece.start : piece.stop] = residual
        moved = residuals_A[0].new_zeros(_longest(after))
        for piece in after:
            if piece.owner == worker:
                part = whole[piece.name][piece.start : piece.stop]
                moved[piece.offset : piece.offset + len(part)] = part
        return moved

    def transfers(self, spec: TensorSpec, level: float, workers: int, kept: Kept = None) -> Sequence[Transfer]:
        pieces = self.pieces.get(spec.name, [Piece("", 0, spec.numel, 0)])
        nbytes = sum(self.inner.message_bytes(piece.spec, level) for piece in pieces)
        return [Transfer("all_to_all", nbytes), Transfer("all_gather_shards", nbytes)]

    def takes_feedback(self, spec: TensorSpec, level: float | None, workers: int) -> bool:
        return level is not None and self.inner.takes_feedback(spec, level, workers) and self.pays(spec, level, workers)

    pays = cheaper_than_dense

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        W, first, named = comm.local_workers, comm.first_worker, comm.first_named
        index = {spec.name: i for i, spec in enumerate(ctx.specs)}
        levels = paying_levels(self, ctx, comm.workers)
        dense = [i for i in range(len(xs_W)) if i not in levels]
        update: list[Tensor] = [xs_W[0]] * len(xs_W) if xs_W else []
        for i, mean in zip(dense, comm.all_reduce_mean([xs_W[i] for i in dense]), strict=True):
            update[i] = mean
        owned: list[list[tuple[Piece, int]]] = [[] for _ in range(comm.workers)]  # per owner: its pieces, tensor index
        for name in sorted(self.pieces):
            if name in index and index[name] in levels:
                for piece in self.pieces[name]:
                    owned[piece.owner].append((piece, index[name]))

        # 1. every worker compresses every piece
        everything = [entry for entries in owned for entry in entries]
        flat_W = {i: in_rows(xs_W[i]) for i in levels}
        bucket = self._bucket(everything, ctx, [flat_W[i][:, p.start : p.stop] for p, i in everything], comm.local)
        feedback = ctx.feedback.cut([(i, p.start, p.stop) for p, i in everything]) if ctx.feedback else None
        bucket = replace(bucket, feedback=feedback)

        # 2. the owner of a piece receives it from all workers, and averages
        with naming(ctx, [i for _, i in everything], named):
            handed = average_at_owners(self.inner, bucket, list(map(len, owned)), comm)
        sent, sizes = handed.message, [layout.nbytes for layout in handed.layouts]

        # 3. the owner adds its residual, and compresses again
        answers = []
        for row, means in enumerate(handed.means_W if levels else []):
            entries, owner = owned[first + row], first + row
            if not entries:
                answers.append(sent.rows.new_empty(0))
                continue
            shard = replace(self._bucket(entries, ctx, means, [owner]), purpose="server")
            if self.traits.reduces == "vote" and self.ties == "random" and comm.workers % 2 == 0:
                break_ties_(means, shard, self.inner.stream)
            if kept := self._kept(entries, row, state):
                begin = sum(map(len, owned[:owner]))
                masks = feedback.masks[begin : begin + len(entries)] if feedback else ()
                shard = replace(shard, feedback=Feedback(kept, [1.0] * len(kept), masks=masks))
            with naming(ctx, [i for _, i in entries], named + row):
                answers.append(self.inner.encode_fed(shard).rows[0])

        # 4. all workers receive all pieces
        if levels:
            target = target_like([xs_W[i][0] for i in levels], self.inner.takes_empty)
            for i, sums in zip(levels, target.rows_R, strict=True):
                update[i] = sums.view(xs_W[i][0].shape)
            from_all = Message(joined(comm.all_gather_uneven(answers, sizes))[None], sent.layouts[:1])
            targets = [update[i].view(1, -1)[:, piece.start : piece.stop] for piece, i in everything]
            self.inner.add_bucket_(replace(target, rows_R=targets), from_all, bucket)

        if self.traits.reduces == "sum":
            for i in levels:
                update[i] *= comm.workers

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            subtract_({i: target_W for i, target_W in targets_W.items() if i not in levels}, xs_W)
            ks = [k for k, (_, i) in enumerate(everything) if i in targets_W]
            pieces = [everything[k] for k in ks]
            parts_W = [targets_W[i].view(W, -1)[:, piece.start : piece.stop] for piece, i in pieces]
            if ks:
                self.inner.add_bucket_(Target(parts_W, -1.0), sent.take(ks), bucket.take(ks))

        return Exchanged(update, subtract_sent_)

    def _kept(self, entries: Sequence[tuple[Piece, int]], row: int, state: State) -> list[Tensor]:
        keys = [self.kept_in.get(piece.name, "") for piece, _ in entries]
        if not all(key in state for key in keys):
            return []
        ends = [(piece.offset, piece.offset + piece.stop - piece.start) for piece, _ in entries]
        pairs = zip(keys, ends, strict=True)
        return [state[key]["residual_W"][row, start:stop][None] for key, (start, stop) in pairs]

    @staticmethod
    def _bucket(
        entries: Sequence[tuple[Piece, int]], ctx: Context, xs_W: Sequence[Tensor], workers: Sequence[int]
    ) -> Bucket:
        specs, levels = [piece.spec for piece, _ in entries], [ctx.levels[i] for _, i in entries]
        return Bucket(ctx.step, specs, levels, ctx.seed, (), ctx.codebooks, xs_W=xs_W, workers=workers)
