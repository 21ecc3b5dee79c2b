"""Base class and protocols of data sets: checked before loading, then read in batches of given sample indices."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.component import Component, Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import option

Batches = Iterator[tuple[Tensor, Tensor]]
IGNORED = -100  # target that the loss ignores


class Data(Protocol):
    """Protocol of a loaded data set. Batches are on the device; a loader may read ahead, in the given order.

    Attributes:
        train_size, test_size: numbers of samples.
        indexed_on: device on which training batches of indices are expected; CPU if the attribute is missing.
        by_device: whether a GPU may capture `train_batch(indices)` and replay it with other indices.
            `begin_epoch(epoch)` then draws the random numbers of the epoch into the same memory each time. Data without
            this attribute has neither method.
    """

    train_size: int
    test_size: int

    def train_batches(self, epoch: int, batches: Iterable[Tensor]) -> Batches:
        """Yield inputs and targets, augmented for the epoch, for each tensor of indices."""


class LabelledData(Data, Protocol):
    """Protocol of data whose test samples can be evaluated in any order, unlike text (see `TextData.strands`).

    Attributes:
        train_labels: labels of the training samples, [train_size], integers from 0.
    """

    train_labels: Tensor

    def test_batches(self, batches: Iterable[Tensor]) -> Batches:
        """Yield inputs and targets for each tensor of indices."""

    def validation_batches(self, batches: Iterable[Tensor]) -> Batches:
        """Yield inputs and targets of training samples, without augmentation, for each tensor of indices."""


class Split(NamedTuple):
    """Indices into the loaded training set.

    Args:
        train: samples for training; None = all.
        validation: held-out samples that choose the best epoch; None = the test set chooses it.
    """

    train: Tensor | None = None
    validation: Tensor | None = None


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    if cls.labelled and options.get("sharding") != "dirichlet":
        yield "alpha", "dataset.sharding is not dirichlet"
    if not cls.reads_files:
        yield "paths.data", f"dataset={context.choice} does not use it"


def part_only(told: str) -> Any:
    """Declare an option for the number of samples, words or tokens that are used."""
    return option(f"{told}; null = all", default=None, at_least=1, instead=1000)


class Dataset(Component):
    """Base class of data sets, whose files can be checked before they are loaded.

    Subclasses define the kind of samples: `ImageDataset`, `TextDataset`, `TokenDataset`.

    Attributes:
        subset: number of training samples (of text: words or tokens of the training split) to use; None = all.
        limit_eval: number of samples, words or tokens of each evaluation split to use; None = all.
        sharding: `reshuffled` over workers in every epoch, or `static`: each worker sees the same samples in the same
            order in every epoch (Accordion's code). Labelled data also accept `dirichlet`: each worker has a fixed
            shard, whose labels follow a Dirichlet distribution, see `shards_by_label`.
        alpha: concentration parameter of `dirichlet`.
        in_channels, num_classes, image_size: of images, shape of the model's input and output.
        vocabulary: of text, number of distinct words or tokens.
        train_words, train_tokens: of text, size of the whole training split.

    Class attributes:
        task: `images`, `text` (words, one continuous sequence) or `tokens` (independent windows).
        train_size: number of training samples of the whole set.
        reads_files: whether the data is in `paths.data`; False if it is generated or part of a dependency.
        labelled: whether samples have labels.
        counted: options that may be null, because their value is counted in the files, see `count`.
    """

    description = replace(Component.description, idle=_idle)

    task: str
    train_size: int
    reads_files: bool = True
    labelled: bool = False
    counted: ClassVar[tuple[str, ...]] = ()
    subset: int | None = None
    limit_eval: int | None = None
    sharding: str = "reshuffled"
    alpha: float | None = None
    in_channels: int
    num_classes: int
    image_size: int
    vocabulary: int
    train_words: int
    train_tokens: int

    @property
    def whole(self) -> int:
        """Size of which `subset` takes a part: all training samples; of text, all training words or tokens."""
        return self.train_size

    @property
    def train_count(self) -> int:
        """Number of training samples of a run."""
        return min(self.subset or self.whole, self.whole)

    @property
    def chance(self) -> float | None:
        """Metric of random guessing; None = unknown."""
        return None

    def split(self, size: int, seed: int) -> Split:
        """Split `size` loaded training samples into those for training and those held out."""
        return Split()

    def model_arguments(self) -> dict[str, Any]:
        """Return the arguments of the model's constructor that depend on the data."""
        raise NotImplementedError

    def example(self, samples: int) -> tuple[Tensor, Tensor] | None:
        """Return zero inputs and targets of the right shapes, for a trial step without data; None = no trial."""
        return None

    def count(self, root: str) -> dict[str, Any]:
        """Count the options in `counted` in the files under `root`, set them, and return them for the run's record.

        Raises:
            ConfigError: the files do not exist.
        """
        return {}

    def prepare(self, root: str) -> None:
        """Check that the data is under `root`, and download it if needed.

        Raises:
            ConfigError: the data is missing and cannot be downloaded.
        """

    def load(self, root: str, seed: int, device: torch.device) -> Data:
        """Read the data and return it."""
        raise NotImplementedError


def known(dataset: Dataset, key: str) -> int:
    """Return an option's value; raise ConfigError if it has not been counted in the files yet."""
    if (value := getattr(dataset, key)) is None:
        raise ConfigError(f"dataset.{key} must be counted first, got null; call count(FOLDER), or type a number")
    return value


class LanguageDataset(Dataset):
    """Base class of text, for prediction of the next word or token.

    Class attributes:
        token: noun for a word or token in messages.
    """

    token = "word"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.limit_eval == 1:
            rule = f"at least 2, a {self.token} and the one after it"
            raise ValueRefused("limit_eval", rule, self.limit_eval, 10000)

    @property
    def chance(self) -> float:
        return float(self.vocabulary)  # perplexity of a uniform prediction

    def model_arguments(self) -> dict[str, int]:
        return {"vocabulary": known(self, "vocabulary")}

    def cut(self, splits: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the splits, of at least two tokens each, cut to `subset` (`train`) or `limit_eval`."""
        for name, whole in splits.items():
            if len(whole) < 2:
                raise ConfigError(
                    f"dataset must have at least 2 {self.token}s in its {name} split, got {len(whole)}; type another "
                    "paths.data"
                )
        return {name: x[: self.subset if name == "train" else self.limit_eval] for name, x in splits.items()}
