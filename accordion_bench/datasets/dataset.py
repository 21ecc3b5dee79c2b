"""What every data set is: checked before it is loaded, then read in batches, in the order asked for."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from accordion_bench.options.component import Component, Idle, Surroundings
from accordion_bench.options.instantiate import Config

Batches = Iterator[tuple[Tensor, Tensor]]


class Data(Protocol):
    """A loaded data set; batches are on the device, and a loader may read ahead, in the order given.

    Attributes:
        train_size, test_size: samples.
        indexed_on: the device where training batches of indices are wanted; one that does not say so gets them on the
            CPU.
        by_device: `begin_epoch(epoch)` draws whatever the epoch decides, each time into the same memory, and
            `train_batch(indices)` then tells the device all of its work, so that a GPU may repeat it for other indices;
            one that does not say so has no such methods.
    """

    train_size: int
    test_size: int

    def train_batches(self, epoch: int, batches: Iterable[Tensor]) -> Batches:
        """Inputs and targets, augmented as the epoch says, for each index tensor in turn."""


class LabelledData(Data, Protocol):
    """Data of which test samples can be evaluated in any order; text cannot, see `TextData.strands`.

    Attributes:
        train_labels: of the training samples, [train_size], whole numbers from 0.
    """

    train_labels: Tensor

    def test_batches(self, batches: Iterable[Tensor]) -> Batches:
        """Inputs and targets for each index tensor in turn."""

    def validation_batches(self, batches: Iterable[Tensor]) -> Batches:
        """Inputs and targets of training samples, as they are evaluated, for each index tensor in turn."""


class Split(NamedTuple):
    """Numbers of samples of the loaded training set.

    Args:
        train: that are trained on; None = all.
        validation: that are held out, to choose by; None = there are none, the test set chooses.
    """

    train: Tensor | None = None
    validation: Tensor | None = None


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    if cls.labelled and options.get("sharding") != "dirichlet":
        yield "alpha", "dataset.sharding is not dirichlet"
    if not cls.reads_files:
        yield "paths.data", f"dataset={context.choice} reads nothing from there"


class Dataset(Component):
    """A data set that can be checked before it is loaded.

    Each kind of data declares what its samples are: `ImageDataset`, `TextDataset`, `TokenDataset`.

    Attributes:
        subset: so many training samples, or words or tokens of the training split, are used; None = all.
        limit_eval: so many samples, words or tokens of each evaluation split are used; None = all.
        sharding: `reshuffled` over workers in every epoch, or `static`: each worker sees the same samples in the same
            order in every epoch (Accordion's code). Of labelled data also `dirichlet`: each worker has samples of its
            own, whose labels are drawn from a Dirichlet distribution, see `label_shards`.
        alpha: of `dirichlet`, the concentration.
        in_channels, num_classes, image_size: of images, what a model must accept.
        vocabulary: of texts, the number of different words or tokens.
        train_words, train_tokens: of texts, in the whole training split.

    Class attributes:
        task: `images`, `text` (words, on and on) or `tokens` (windows).
        train_size: training samples of the whole set.
        reads_files: it is read from, or downloaded to, `paths.data`; false where it comes with a dependency or is made.
        labelled: its samples have labels.
        counted: options that are null where the files say what they are, see `count`.
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
        """What `subset` takes some of: all training samples; of a text its words, or tokens."""
        return self.train_size

    @property
    def train_count(self) -> int:
        """Training samples of a run."""
        return min(self.subset or self.whole, self.whole)

    @property
    def chance(self) -> float | None:
        """The metric of a guess; None = unknown."""
        return None

    def split(self, size: int, seed: int) -> Split:
        """What is trained on, and what is held out, of so many loaded training samples."""
        return Split()

    def model_arguments(self) -> dict[str, Any]:
        """What a model must be told of the data, by the names of its constructor."""
        raise NotImplementedError

    def example(self, samples: int) -> tuple[Tensor, Tensor] | None:
        """Inputs and targets of the right shapes, all 0: for trials before there is data; None = nothing is tried."""
        return None

    def count(self, root: str) -> dict[str, Any]:
        """The options of `counted` as the files under `root` have them, which a run notes; this object has them, too.

        Raises:
            ConfigError: the files are not there.
        """
        return {}

    def prepare(self, root: str) -> None:
        """Make sure that the data is under `root`, downloading it where needed.

        Raises:
            ConfigError: it is not there and cannot be fetched.
        """

    def load(self, root: str, seed: int, device: torch.device) -> Data:
        """Read the data."""
        raise NotImplementedError
