"""Tensors of an averaging: fragments of whole layers, or a random subset of coordinates; and averages in flight.

Layers are derived from parameter names: `blocks.3.attention.qkv.weight` belongs to the layer `blocks.3`,
`stages.0.1.conv1.weight` to `stages.0.1`, and `rnn.weight_hh_l1` to the second layer of `rnn`.
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
from accordion_bench.compressors.uncoded import Dense
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.finite import Look, largest
from accordion_bench.exchange.runner import CompletedExchange, ExchangeRunner
from accordion_bench.plan import Ladder, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.sync.scheme import Stateful
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.keyed_rng import draw_distinct
from accordion_bench.tensors.upload import upload

# ---- fragments

NUMBERED = re.compile(r"\d+|\w*(layer|block)_?\d+")  # a numbered module: 3, layer1, encoder_layer_0
RECURRENT = re.compile(r"\w+_l(\d+)(_reverse)?")  # a parameter of torch's recurrent modules


class Layers(NamedTuple):
    """Indices of the trained tensors of a model.

    layers: indices of each layer, in the model's order.
    before: tensors before the first layer, such as an embedding.
    after: tensors after the last layer, such as an output layer.
    """

    layers: list[list[int]]
    before: list[int]
    after: list[int]


def fragments(specs: Sequence[TensorSpec], count: int) -> list[list[int]]:
    """Return the indices of the tensors of each fragment: fragment p has the layers p, p + P, p + 2 P, ...

    Tensors before the first layer belong to the first fragment, those after the last layer to the last fragment. The
    specs are in the model's order; P = `count` is at most the number of layers.
    """
    layers, before, after = layers_of(specs)
    found = [list(itertools.chain(*layers[p::count])) for p in range(count)]
    found[0] += before
    found[-1] += after
    return [sorted(tensors) for tensors in found]


def layers_of(specs: Sequence[TensorSpec]) -> Layers:
    """Return the layers of a model: its numbered modules, or all modules with parameters if there are none.

    A module without a matrix, such as a norm between convolutions, belongs to the preceding layer.
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
    """Return the numbered module of a parameter: `stages.0.1` for `stages.0.1.conv1.weight`; "" = none."""
    *path, last = parameter.split(".")
    is_number = [NUMBERED.fullmatch(part) is not None for part in path]
    if True in is_number:
        first = is_number.index(True)
        run = itertools.takewhile(bool, is_number[first:])
        return ".".join(path[: first + len(list(run))])
    recurrent = RECURRENT.fullmatch(last)
    return ".".join([*path, recurrent[1]]) if recurrent else ""


# ---- a random subset


class SparseAverage(Exchange):
    """Average of a random subset: x_w[mask] <- mean_w x_w[mask], with k = max(1, floor(p N)) of all N coordinates.

    All subsets of size k are equally likely. All workers draw the same subset from a common key, so that only values
    are sent: 4 k bytes in one all-reduce.

    Args:
        share: p, in (0, 1]; a smaller value means fewer bytes and a larger distance between workers.
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
        """Return (index of a tensor, its drawn coordinates [n], ascending) for each tensor with drawn coordinates."""
        places = draw_distinct(self.numel, self.kept, keyed_rng.generator(self.seed, "sparse average", step))
        counts = torch.searchsorted(places, self._ends).diff(prepend=torch.zeros(1, dtype=torch.int64))
        starts = self._ends.roll(1)
        starts[0] = 0
        own = upload(places - starts.repeat_interleave(counts), self.comm.device).split(counts.tolist())
        return [(i, part) for i, part in enumerate(own) if len(part)]

    def __call__(self, xs_W: Sequence[Tensor], info: StepInfo) -> list[Tensor]:
        """Average tensors [W, ...] in place, one per spec; return no updates."""
        self.average_([[x_W[row] for x_W in xs_W] for row in range(self.comm.local_workers)], info.step)
        return []

    @torch.no_grad()
    def average_(self, replicas: Sequence[Sequence[Tensor]], step: int) -> None:
        """Replace the coordinates drawn at a step in each local worker's tensors by their means over all workers.

        Raises:
            NonFinite: a drawn value is NaN or infinite; on a CPU it is raised before anything is sent.
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
        """Raise on non-finite values; on a GPU, note them for the check at the end of the step."""

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
    if flat.data_ptr() != x.data_ptr():  # a copy if the memory format differs (channels last)
        x.copy_(flat.view(x.shape))


# ---- in flight


class InFlight(Stateful):
    """Averages between their launch and their application; at most one launch at a time.

    Args:
        runner: runs the exchanges.

    Attributes:
        updates: results [...] of a completed launch, group by group; [] = none, or not waited for yet.
        landing: function that waits for the launch and returns the results; None = nothing is pending.
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
        """Launch an exchange of parameter differences; return it if it was blocking.

        Args:
            exchanges, moved: exchange and differences [rows, ...] of each group, in the storage of the gradients.
            late: whether the exchange may overlap the next step.
        """
        if late and self.runner.may_launch:
            exchange, own_W, info = exchanges[0], moved[0], self.runner.position.info()
            if self.runner.comm.local_workers > 1:  # the next step overwrites the storage
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
        """Wait for a pending launch."""
        if self.landing is not None:
            self.clock.lap("update")
            self.updates, self.landing = self.landing(), None
            self.clock.lap("exposed")

    def take(self) -> list[Tensor]:
        """Wait for the updates, return them and clear the flight."""
        self.land()
        taken, self.updates = self.updates, []
        return taken

    def drop(self) -> None:
        """Wait for the updates and discard them."""
        self.land()
        self.updates = []

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = [value.to(self.runner.comm.device, copy=True) for value in state["updates"]]
