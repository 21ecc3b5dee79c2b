"""Shards whose labels differ from worker to worker, drawn from a Dirichlet distribution: dataset.sharding=dirichlet.

    p   share of each label in the training set      q_w ~ Dir(alpha p), the label proportions of worker w

Worker by worker, in a keyed random order in which each has as many turns as its shard has samples, a label is drawn
from q_w and one of its samples goes to w. When a label has no samples left, q_w is normalised over the others. Shards
are as large as they would be without labels.

Source: Hsu, Qi, Brown 2019 (arXiv 1909.06335), whose clients have equally many samples, too.
"""

import bisect
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench.tensors import keyed_rng


def log_proportions(prior: Tensor, alpha: float, workers: int, seed: int) -> Tensor:
    """The logarithm of q_w but for a constant, [A, labels], float64: q_w itself may underflow.

    q = G / sum G of gamma variables, and G(a) = G(a + 1) U^(1 / a) with a uniform U.

    Args:
        prior: p, [labels].
        alpha: concentration, above 0; large = all workers are like p, small = few labels for each.
        workers: A.
        seed: of the run.
    """
    generator = keyed_rng.generator(seed, "label proportions")
    a = (alpha * prior.double()).expand(workers, -1)
    larger = torch._standard_gamma(a + 1, generator=generator)
    uniform = torch.rand(a.shape, generator=generator, dtype=torch.float64)
    # 1 - U is above 0; a label that the data do not have has no weight
    logarithms = larger.log() + torch.log1p(-uniform) / a
    return torch.where(a > 0, logarithms, -torch.inf)


def shards_by_label(labels: Tensor, sizes: Sequence[int], alpha: float, seed: int) -> list[Tensor]:
    """Numbers of the samples of each worker; every sample has one.

    Args:
        labels: of all samples, [n], whole numbers from 0.
        sizes: samples of each worker; their sum is n.
        alpha: concentration.
        seed: of the run.
    """
    order = torch.randperm(len(labels), generator=keyed_rng.generator(seed, "label order"))
    left = [order[labels[order] == label].tolist() for label in range(int(labels.max()) + 1)]
    counts = torch.tensor([len(own) for own in left])
    weights = log_proportions(counts / len(labels), alpha, len(sizes), seed)
    turns = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    turns = turns[torch.randperm(len(turns), generator=keyed_rng.generator(seed, "label turns"))]
    draws = torch.rand(len(turns), generator=keyed_rng.generator(seed, "label draws"), dtype=torch.float64)

    def ends() -> list[list[float]]:
        """Of each worker the sums of its proportions, over the labels that have samples left."""
        gone = torch.tensor([not samples for samples in left])
        return [list(itertools.accumulate(own)) for own in weights.masked_fill(gone, -torch.inf).softmax(1).tolist()]

    sums = ends()
    shards: list[list[int]] = [[] for _ in sizes]
    for worker, draw in zip(turns.tolist(), draws.tolist(), strict=True):
        label = bisect.bisect_right(sums[worker], draw * sums[worker][-1])
        label = min(label, bisect.bisect_left(sums[worker], sums[worker][-1]))  # rounding may lead beyond the last one
        shards[worker].append(left[label].pop())
        if not left[label] and any(left):
            sums = ends()
    return [torch.tensor(own, dtype=torch.int64) for own in shards]


def label_counts(labels: Tensor, shards: Sequence[Tensor]) -> list[list[int]]:
    """Of each worker, how many samples of each label it has."""
    count = int(labels.max()) + 1
    return [torch.bincount(labels[own], minlength=count).tolist() for own in shards]
