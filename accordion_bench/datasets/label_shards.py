"""Shards whose label distributions differ between workers, drawn from a Dirichlet distribution (`dirichlet`).

    p   share of each label in the training set      q_w ~ Dir(alpha p), the label proportions of worker w

Workers take turns in a keyed random order, each as many turns as its shard has samples. In each turn a label is drawn
from q_w, and one sample with that label is assigned to worker w. When a label is used up, q_w is renormalised over the
remaining labels. The sizes of the shards equal those without `dirichlet`.

Source: Hsu, Qi, Brown 2019 (arXiv 1909.06335), whose clients also have equally many samples.
"""

import bisect
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench.tensors import keyed_rng


def log_proportions(prior: Tensor, alpha: float, workers: int, seed: int) -> Tensor:
    """Return log q_w up to a constant, [A, labels], float64; q_w itself may underflow.

    q = G / sum G of gamma variables, and G(a) = G(a + 1) U^(1 / a) with a uniform U.

    Args:
        prior: p, [labels].
        alpha: concentration, above 0; large = q_w is close to p, small = few labels per worker.
        workers: A.
        seed: seed of the run.
    """
    generator = keyed_rng.generator(seed, "label proportions")
    a = (alpha * prior.double()).expand(workers, -1)
    larger = torch._standard_gamma(a + 1, generator=generator)
    uniform = torch.rand(a.shape, generator=generator, dtype=torch.float64)
    # 1 - U is above 0; labels that do not occur have weight 0
    logarithms = larger.log() + torch.log1p(-uniform) / a
    return torch.where(a > 0, logarithms, -torch.inf)


def shards_by_label(labels: Tensor, sizes: Sequence[int], alpha: float, seed: int) -> list[Tensor]:
    """Assign every sample to one worker and return the sample indices of each.

    Args:
        labels: labels of all samples, [n], integers from 0.
        sizes: number of samples of each worker; their sum is n.
        alpha: concentration.
        seed: seed of the run.
    """
    order = torch.randperm(len(labels), generator=keyed_rng.generator(seed, "label order"))
    left = [order[labels[order] == label].tolist() for label in range(int(labels.max()) + 1)]
    counts = torch.tensor([len(own) for own in left])
    weights = log_proportions(counts / len(labels), alpha, len(sizes), seed)
    turns = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    turns = turns[torch.randperm(len(turns), generator=keyed_rng.generator(seed, "label turns"))]
    draws = torch.rand(len(turns), generator=keyed_rng.generator(seed, "label draws"), dtype=torch.float64)

    def ends() -> list[list[float]]:
        """Return the cumulative proportions of each worker, over labels that are not used up."""
        gone = torch.tensor([not samples for samples in left])
        return [list(itertools.accumulate(own)) for own in weights.masked_fill(gone, -torch.inf).softmax(1).tolist()]

    sums = ends()
    shards: list[list[int]] = [[] for _ in sizes]
    for worker, draw in zip(turns.tolist(), draws.tolist(), strict=True):
        label = bisect.bisect_right(sums[worker], draw * sums[worker][-1])
        label = min(label, bisect.bisect_left(sums[worker], sums[worker][-1]))  # rounding may exceed the last index
        shards[worker].append(left[label].pop())
        if not left[label] and any(left):
            sums = ends()
    return [torch.tensor(own, dtype=torch.int64) for own in shards]


def label_counts(labels: Tensor, shards: Sequence[Tensor]) -> list[list[int]]:
    """Return the number of samples of each label, per worker."""
    count = int(labels.max()) + 1
    return [torch.bincount(labels[own], minlength=count).tolist() for own in shards]
