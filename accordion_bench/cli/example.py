"""Random data of the right shapes, in the place of a data set that need not be there."""

from collections.abc import Iterable

import torch
from torch import Tensor

from accordion_bench.datasets.base import Batches, Dataset
from accordion_bench.tensors import keyed_rng


class Example:
    """Random data of the right shapes.

    Args:
        dataset: that it stands for.
        device: where batches are.
    """

    def __init__(self, dataset: Dataset, device: torch.device) -> None:
        self.dataset, self.device = dataset, device
        self.train_size = self.test_size = dataset.train_count
        told = dataset.model_arguments()
        self.classes = told.get("num_classes", told.get("vocabulary", 1))
        self.generator = keyed_rng.generator(0, "dry run")

    def train_batches(self, epoch: int, batches: Iterable[Tensor]) -> Batches:
        """As many samples as each index tensor has."""
        for indices in batches:
            example = self.dataset.example(len(indices))
            assert example is not None
            x, y = (part.clone() for part in example)
            if x.is_floating_point():
                x.normal_(generator=self.generator)
            else:
                x.random_(self.classes, generator=self.generator)
            yield x.to(self.device), y.random_(self.classes, generator=self.generator).to(self.device)
