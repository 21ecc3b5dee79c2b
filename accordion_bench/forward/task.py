"""Tasks: loss and evaluation for labelled images, next-word prediction and next-token prediction."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accordion_bench.comm.graphs import EVALUATION, WORKERS
from accordion_bench.comm.on_device import copy_on_cpu
from accordion_bench.datasets.dataset import Batches, Data, Dataset, LabelledData
from accordion_bench.datasets.text import TextData
from accordion_bench.datasets.token_windows import TokenData, TokenDataset
from accordion_bench.runs.metrics import BITS_PER_BYTE, METRICS, Metric

EVAL_BATCH = 512
DataT = TypeVar("DataT", bound=Data)
OfBatch = Callable[[Tensor, Tensor], Tensor]
"""Function of the inputs and targets of one batch."""
Do = Callable[[OfBatch, Tensor, Tensor], Tensor]
"""Executes such a function on one batch, possibly captured; its result is valid until the next batch."""


def at_once(compute: OfBatch, x: Tensor, y: Tensor) -> Tensor:
    """Compute eagerly."""
    return compute(x, y)


class Task(Generic[DataT]):
    """Loss and evaluation of a kind of data.

    Class attributes:
        metric: evaluation metric.

    Attributes:
        selected_by, tested: its columns on the split that decides on target and best epoch, and on the test split.
        not_captured: reasons why kinds of work cannot be captured, by kind.
    """

    metric: Metric
    selected_by: str
    tested: str
    not_captured: Mapping[str, str] = {}

    def begin_epoch(self) -> None:
        """Prepare for the first step of an epoch."""

    def loss(self, model: nn.Module, x: Tensor, y: Tensor, row: int, micro: int) -> Tensor:
        """Return the mean loss of one micro-batch of a local worker."""
        raise NotImplementedError

    def totals(self, model: nn.Module, data: DataT, worker: int, workers: int, do: Do = at_once) -> Tensor:
        """Return float64 sums over one worker's share of the evaluation data; `columns` takes the sum over workers."""
        raise NotImplementedError

    def columns(self, totals: list[float]) -> dict[str, float]:
        """Return the evaluation columns of a metrics row: `test_loss`, the metric, and others."""
        raise NotImplementedError

    def worker_state(self, row: int) -> dict[str, Any]:
        """Return the state of one local worker within an epoch."""
        return {"task": {}}

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        """Restore from `worker_state()`."""


class Images(Task[LabelledData]):
    """Cross-entropy with one label per image; accuracy on the test set.

    Args:
        validation: indices of held-out training samples that choose the best epoch; None = the test set.
    """

    metric = METRICS["accuracy"]
    tested = "accuracy"

    def __init__(self, validation: Tensor | None = None, device: torch.device | None = None) -> None:
        self.validation, self.device = validation, device
        self.selected_by = "accuracy" if validation is None else "validation_accuracy"

    def loss(self, model: nn.Module, x: Tensor, y: Tensor, row: int, micro: int) -> Tensor:
        return F.cross_entropy(model(x), y)

    def totals(self, model: nn.Module, data: LabelledData, worker: int, workers: int, do: Do = at_once) -> Tensor:
        def compute(x: Tensor, y: Tensor) -> Tensor:
            output = model(x)
            loss, correct = F.cross_entropy(output, y, reduction="sum"), (output.argmax(1) == y).sum()
            return torch.stack([loss.double(), correct.double(), torch.full_like(loss, len(y), dtype=torch.float64)])

        def summed(batches: Batches) -> Tensor:
            totals = torch.zeros(3, dtype=torch.float64, device=self.device)
            for x, y in batches:
                totals += do(compute, x, y)
            return totals

        share = torch.arange(min(worker, data.test_size), data.test_size, workers)
        totals = summed(data.test_batches(share.split(EVAL_BATCH) if len(share) else []))
        if self.validation is None:
            return totals
        share = self.validation[worker::workers]
        held_out = summed(data.validation_batches(share.split(EVAL_BATCH) if len(share) else []))
        return torch.cat([totals, held_out])

    def columns(self, totals: list[float]) -> dict[str, float]:
        loss, correct, count = totals[:3]
        columns = {"test_loss": loss / count, "accuracy": correct / count}
        if self.validation is not None:
            loss, correct, count = totals[3:]
            columns |= {"validation_loss": loss / count, "validation_accuracy": correct / count}
        return columns


class Text(Task[TextData]):
    """Cross-entropy of the next word, in nats; perplexity = exp(mean cross-entropy) of `metric_split`, test or valid.

    Truncated backpropagation through time: a worker's model continues from its state after the previous step, and from
    zeros at the start of an epoch. Every split is evaluated whole, in fixed strands, for any number of workers.
    """

    metric = METRICS["perplexity"]
    not_captured = dict.fromkeys(
        (WORKERS, EVALUATION), "a recurrent network continues from the state of the previous batch"
    )

    def __init__(self, metric_split: str = "test", device: torch.device | None = None) -> None:
        self.metric_split, self.device = metric_split, device
        self.selected_by, self.tested = f"{metric_split}_perplexity", "test_perplexity"
        self.states: dict[int, dict[int, tuple[Tensor, ...]]] = {}

    def begin_epoch(self) -> None:
        self.states.clear()

    def loss(self, model: nn.Module, x: Tensor, y: Tensor, row: int, micro: int) -> Tensor:
        states = self.states.setdefault(row, {})
        logits, state = model(x, states.get(micro))
        states[micro] = tuple(part.detach() for part in state)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def totals(self, model: nn.Module, data: TextData, worker: int, workers: int, do: Do = at_once) -> Tensor:
        totals = []
        for split in data.splits:
            total, state = torch.zeros(2, dtype=torch.float64, device=data.device), None
            for x, y in data.strands(split, worker, workers):
                logits, state = model(x, state)
                total[0] += F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum").double()
                total[1] += (y >= 0).sum()
            totals.append(total)
        return torch.cat(totals)

    def columns(self, totals: list[float]) -> dict[str, float]:
        return _perplexities(totals, "perplexity", self.metric_split)

    def worker_state(self, row: int) -> dict[str, Any]:
        states = self.states.get(row, {})
        return {"task": {micro: [copy_on_cpu(part) for part in state] for micro, state in states.items()}}

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        micros = state["task"].items()
        self.states[row] = {micro: tuple(part.to(self.device) for part in parts) for micro, parts in micros}


class Windows(Task[TokenData]):
    """Cross-entropy of the next token, in nats; its exp is the perplexity. For bytes, divided by ln 2: bits per byte.

    Windows are independent of each other, and every split is evaluated whole.

    Args:
        metric: `bits_per_byte` or `token_perplexity`, of the split `metric_split`, `valid` or `test`.
    """

    def __init__(self, metric: str = "bits_per_byte", metric_split: str = "valid") -> None:
        self.metric, self.metric_split = METRICS[metric], metric_split
        self.selected_by, self.tested = f"{metric_split}_{metric}", f"test_{metric}"

    def loss(self, model: nn.Module, x: Tensor, y: Tensor, row: int, micro: int) -> Tensor:
        return _entropy(model(x), y, "mean")

    def totals(self, model: nn.Module, data: TokenData, worker: int, workers: int, do: Do = at_once) -> Tensor:
        def compute(x: Tensor, y: Tensor) -> Tensor:
            return torch.stack([_entropy(model(x), y, "sum").double(), (y >= 0).sum().double()])

        totals = torch.zeros(len(data.splits), 2, dtype=torch.float64, device=data.device)
        for total, split in zip(totals, data.splits, strict=True):
            for x, y in data.test_windows(split, worker, workers):
                total += do(compute, x, y)
        return totals.flatten()

    def columns(self, totals: list[float]) -> dict[str, float]:
        if self.metric is not BITS_PER_BYTE:
            return _perplexities(totals, self.metric.name, self.metric_split)
        losses = {"test": totals[0] / totals[1], "valid": totals[2] / totals[3]}
        bits = {split: loss / math.log(2) for split, loss in losses.items()}
        return {
            "test_loss": losses["test"],
            "bits_per_byte": bits[self.metric_split],
            "perplexity_per_byte": torch.tensor(bits[self.metric_split], dtype=torch.float64).exp2().item(),
            **{f"{split}_bits_per_byte": bits[split] for split in ("test", "valid")},
        }


def _perplexities(totals: list[float], name: str, metric_split: str) -> dict[str, float]:
    """Return the perplexity columns from sums of nats and numbers of tokens of the test and the validation split."""
    losses = {"test": totals[0] / totals[1], "valid": totals[2] / totals[3]}
    perplexity = {split: torch.tensor(loss, dtype=torch.float64).exp().item() for split, loss in losses.items()}
    return {
        "test_loss": losses["test"],
        name: perplexity[metric_split],
        **{f"{split}_{name}": perplexity[split] for split in ("test", "valid")},
    }


def _entropy(logits: Tensor, y: Tensor, reduction: str) -> Tensor:
    """Return the cross-entropy of logits [B, T, symbols] and targets [B, T], in float32 even under 16-bit autocast."""
    return F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction=reduction)


def task_of(dataset: Dataset, device: torch.device | None = None, validation: Tensor | None = None) -> Task[Any]:
    """Return the task of a data set; `validation` has the indices of held-out training samples."""
    if dataset.task == "text":
        return Text(getattr(dataset, "metric_split", "test"), device)
    if isinstance(dataset, TokenDataset):
        return Windows(dataset.metric, dataset.metric_split)
    return Images(validation, device)
