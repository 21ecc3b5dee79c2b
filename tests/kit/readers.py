"""Functions of spawned processes in the tests of image folders, in a separate module to import little."""

import torch
from torch import Tensor

from accordion_bench.datasets.pictures import FolderData, Views

ORDER = [torch.tensor(batch) for batch in ([3, 14, 0], [7], [1, 2, 3, 4], [3, 8], [0], [5, 6])]


def passes(data: FolderData) -> list[Tensor]:
    """Return inputs and targets of an epoch, of the next epoch after an interruption, and of an evaluation."""
    found = list(data.train_batches(0, iter(ORDER)))
    broken = data.train_batches(1, ORDER)
    found.append(next(broken))
    broken.close()
    found += [*data.train_batches(1, ORDER), *data.test_batches([torch.tensor([5, 0, 2])])]
    return [part for batch in found for part in batch]


def in_a_daemon(views: Views, end) -> None:
    """Send the batches of one reading process."""
    end.send([part.numpy() for part in passes(FolderData(views, 1, torch.device("cpu")))])
    end.close()
