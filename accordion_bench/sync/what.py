"""What workers average: all tensors, a fragment of whole layers at a time, or a drawn share; and what is under way.

Layers are found by the names of the parameters, which say how a model is built: `blocks.3.attention.qkv.weight` is in
the layer `blocks.3`, `stages.0.1.conv1.weight` in `stages.0.1`, `rnn.weight_hh_l1` in the second layer of `rnn`.
"""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accordion_bench.codecs.selection import kept_entries
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import NonFinite
from accordion_bench.compressors.none import Dense
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.finite import Look, largest
from accordion_bench.exchange.runner import CompletedExchange, ExchangeRunner
from accordion_bench.plan import Ladder, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.sync.scheme import Stateful
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.distinct import draw_distinct
from accordion_bench.tensors.upload import upload

# ---- fragments

NUMBERED = re.compile(r"\d+|\w*(layer|block)_?\d+")  # a module of several alike: 3, layer1, encoder_layer_0
RECURRENT = re.compile(r"\w+_l(\d+)(_reverse)?")  # a parameter of torch's recurrent modules


class Layers(NamedTuple):
    """The trained tensors of a model, by index.

    layers: of each layer, in the model's order.
    before: what stands before the first one, such as an embedding.
    after: what stands after the last one, such as an output layer.
    """

    layers: list[list[int]]
    before: list[int]
    after: list[int]


def fragments(specs: Sequence[TensorSpec], count: int) -> list[list[int]]:
    """The tensors of each fragment, by index in the model's order: fragment p has the layers p, p + P, p + 2 P, ...

    What stands before the first layer is in the first fragment, what stands after the last one in the last fragment.

    Args:
        specs: the trained tensors, in the model's order.
        count: fragments, P; at most as many as there are layers.
    """
    layers, before, after = layers_of(specs)
    found = [list(itertools.chain(*layers[p::count])) for p in range(count)]
    found[0] += before
    found[-1] += after
    return [sorted(tensors) for tensors in found]


def layers_of(specs: Sequence[TensorSpec]) -> Layers:
    """Layers are the numbered modules of a model; where it has none, all modules that have parameters.

    A module without a matrix, such as a norm between convolutions, belongs to the layer before it.

    Args:
        specs: the trained tensors, in the model's order.
    """
    names = [_numbered(spec.name) for spec in specs]
    inside = [i for i, name in enumerate(names) if name]
    if not inside:
        names, inside = [spec.name.rpartition(".")[0] or spec.name for spec in specs], list(range(len(specs)))
    first, end = (inside[0], inside[-1] + 1) if inside else (0, 0)
    modules: list[list[int]] = []
    name = ""
    for i in range(first, end):
        if not modules or names[i] not in ("", name):
            modules.append([])
            name = names[i]
        modules[-1].append(i)
    layers: list[list[int]] = []
    for module in modules:
        if layers and all(specs[i].ndim < 2 for i in module):
            layers[-1] += module
        else:
            layers.append(module)
    return Layers(layers, list(range(first)), list(range(end, len(specs))))


def _numbered(parameter: str) -> str:
    """The numbered module that a parameter is in: `stages.0.1` for `stages.0.1.conv1.weight`; "" = in none."""
    *path, last = parameter.split(".")
    is_number = [NUMBERED.fullmatch(part) is not None for part in path]
    if True in is_number:
        first = is_number.index(True)
        run = itertools.takewhile(bool, is_number[first:])
        return ".".join(path[: first + len(list(run))])
    recurrent = RECURRENT.fullmatch(last)
    return ".".join([*path, recurrent[1]]) if recurrent else ""


# ---- a share


class SparseAverage(Exchange):
    """x_w[mask] <- mean_w x_w[mask], where the mask has k = max(1, floor(p N)) of all N coordinates.

    Every set of k is equally likely. All workers draw the same one by its key, so that values alone travel: 4 k bytes
    in one all-reduce.

    Args:
        share: p, in (0, 1]; lower share = fewer bytes, and workers that are further apart.
        specs, comm, like, seed: see `Exchange`.

    Attributes:
        kept: k.
    """

    alike = False

    def __init__(self, share: float, specs: Sequence[TensorSpec], comm: Comm, like: Tensor, seed: int = 0) -> None:
        super().__init__(Dense(), specs, Ladder("", ()), comm, like, SendOptions(seed))
        self.what = "parameter"
        self.kept = kept_entries(self.numel, share)
        self._ends = torch.tensor(list(itertools.accumulate(spec.numel for spec in specs)))

    def predicted_bytes(self, info: StepInfo) -> int:
        return 4 * self.kept

    def mean_bytes(self, info: StepInfo) -> int:
        return self.predicted_bytes(info)

    def paper_floats(self, levels: list[float | None]) -> int:
        return self.kept

    def drawn(self, step: int) -> list[tuple[int, Tensor]]:
        """(Index of a tensor, its drawn coordinates [n], ascending), for each tensor that has any."""
        places = draw_distinct(self.numel, self.kept, keyed_rng.generator(self.seed, "sparse average", step))
        counts = torch.searchsorted(places, self._ends).diff(prepend=torch.zeros(1, dtype=torch.int64))
        starts = self._ends.roll(1)
        starts[0] = 0
        own = upload(places - starts.repeat_interleave(counts), self.comm.device).split(counts.tolist())
        return [(i, part) for i, part in enumerate(own) if len(part)]

    def __call__(self, xs_W: Sequence[Tensor], info: StepInfo) -> list[Tensor]:
        """Average tensors [W, ...] in place, one per spec; nothing is left to apply."""
        self.average_([[x_W[row] for x_W in xs_W] for row in range(self.comm.local_workers)], info.step)
        return []

    @torch.no_grad()
    def average_(self, replicas: Sequence[Sequence[Tensor]], step: int) -> None:
        """Replace the drawn coordinates of each local worker's tensors by their means over all workers.

        Args:
            replicas: of each local worker, one tensor per spec.
            step: keys the draw.

        Raises:
            NonFinite: a drawn value is NaN or infinite; on a CPU nothing was sent.
        """
        with self.comm.clock.exchanging(self.kind, 0, self.comm.ledger):
            self.comm.ledger.paper_count(self.kept)
            drawn = self.drawn(step)
            values_W = torch.stack([torch.cat([_read(x[i], places) for i, places in drawn]) for x in replicas])
            self._look(values_W)
            wide_W = values_W.float() if values_W.element_size() == 2 else values_W
            (mean,) = self.comm.all_reduce_mean([self.comm.weighted(wide_W)])
            means = mean.split([len(places) for _, places in drawn])
            for x in replicas:
                for (i, places), values in zip(drawn, means, strict=True):
                    _write_(x[i], places, values)

    def _look(self, values_W: Tensor) -> None:
        """Refuse values that are not finite; on a device, with the other looks of this step."""

        def told(row: int) -> str:
            return f"a parameter on worker {self.comm.first_named + row} is not finite"

        if self.finite.late:
            self.finite.note(largest(list(values_W)), Look(len(values_W), lambda row, _: told(row)))
        elif not values_W.isfinite().all():
            raise NonFinite(told(values_W.isfinite().all(1).tolist().index(False)))


def _read(x: Tensor, places: Tensor) -> Tensor:
    return x.flatten().index_select(0, places)


def _write_(x: Tensor, places: Tensor, values: Tensor) -> None:
    flat = x.flatten()
    flat.index_copy_(0, places, values.to(x.dtype))
    if flat.data_ptr() != x.data_ptr():  # a copy, where the memory is in another order (channels last)
        x.copy_(flat.view(x.shape))


# ---- under way


class InFlight(Stateful):
    """Averages from their launch to their use: those of one moment at a time.

    Args:
        runner: runs them.

    Attributes:
        updates: what has come of them [...], group by group; [] = nothing has, or it has not been waited for.
        landing: waits for them; None = there is nothing to wait for.
    """

    keeps = ("updates",)

    def __init__(self, runner: ExchangeRunner) -> None:
        self.runner, self.clock = runner, runner.comm.clock
        self.updates: list[Tensor] = []
        self.landing: Callable[[], list[Tensor]] | None = None

    def __bool__(self) -> bool:
        return bool(self.updates) or self.landing is not None

    def launch(
        self, exchanges: Sequence[Exchange], moved: Sequence[list[Tensor]], late: bool
    ) -> CompletedExchange | None:
        """Send differences of parameters; returns the exchange where it was waited for.

        Args:
            exchanges: one for each group of workers.
            moved: of each group, [rows, ...], in the storage of gradients.
            late: it may travel beside the next step.
        """
        if late and self.runner.may_launch:
            exchange, own_W, info = exchanges[0], moved[0], self.runner.position.info()
            if self.runner.comm.local_workers > 1:  # the next step needs the storage
                own_W = [x_W.clone() for x_W in own_W]

            def again() -> list[Tensor]:
                self.clock.waits(exchange.kind)
                return self.runner.exchanged(exchange, own_W, info)

            begin = functools.partial(self.runner.launch, exchange, own_W)
            self.landing = self.runner.comm.membership.repeated(begin, again, exchange.keep)
            return None
        completed = self.runner.run(exchanges, moved)
        self.updates = [x for updates in completed.updates for x in updates]
        return completed

    def land(self) -> None:
        """Wait for what has been launched."""
        if self.landing is not None:
            self.clock.lap("update")
            self.updates, self.landing = self.landing(), None
            self.clock.lap("exposed")

    def take(self) -> list[Tensor]:
        """The updates, to be used now; nothing is in flight any more."""
        self.land()
        taken, self.updates = self.updates, []
        return taken

    def drop(self) -> None:
        """Wait for it and forget it."""
        self.land()
        self.updates = []

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = [value.to(self.runner.comm.device, copy=True) for value in state["updates"]]
