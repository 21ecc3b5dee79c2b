"""Loops with a plain module: whatever their shape, parameters are those of the same training by hand, bit for bit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.kit.loops import (
    METHODS,
    OWNERS,
    ByHand,
    attached,
    batch,
    close,
    closure_of,
    loss_of,
    net,
    play,
    refused,
    same,
    same_on_all,
)

EARLY_AND_LATE = ({}, {"overlap": False}, {"bucket_cap_mb": 1e-4})


# ---- gradient accumulation


def accumulated(late: bool = False, **options: Any) -> None:
    """Three micro-batches in each step."""
    model = net()
    twin = ByHand(model, **options)
    comm, optimizer = attached(model, overlap=False if late else None, **options)
    for step in range(3):
        optimizer.zero_grad()
        twin.optimizer.zero_grad()
        for micro in range(3):
            with comm.no_sync() if micro < 2 and not late else torch.enable_grad():
                loss_of(model, 3 * step + micro).backward()
            loss_of(twin.model, 3 * step + micro).backward()
        optimizer.step()
        twin.mean()
        twin.step()
        same(model, twin.model)
    comm.detach()


def accumulation_within_no_sync():
    for options in METHODS.values():
        accumulated(**options)


def accumulation_without_no_sync_where_nothing_leaves_early():
    for options in METHODS.values():
        accumulated(late=True, **options)


def accumulation_without_no_sync_is_refused_where_buckets_leave_early():
    model = net()
    comm, _ = attached(model)
    loss_of(model, 0).backward()
    with refused(r"must be within comm.no_sync\(\), got two that reach .*weight|bias"):
        loss_of(model, 1).backward()
    comm.detach()


def accumulation_without_no_sync_is_refused_after_join():
    model = net()
    comm, _ = attached(model, overlap=False)
    loss_of(model, 0).backward()
    comm.join()
    with refused(r"must be within comm.no_sync\(\)"):
        loss_of(model, 1).backward()
    comm.detach()


def two_backward_passes_that_reach_different_parameters():
    model = nn.ModuleDict({"left": net(), "right": net()})
    twin = ByHand(model)
    comm, optimizer = attached(model)
    for step in range(3):
        for trained, stepped in ((model, optimizer), (twin.model, twin.optimizer)):
            stepped.zero_grad()
            loss_of(trained["left"], step).backward()
            loss_of(trained["right"], step).backward()
        optimizer.step()
        twin.mean()
        twin.step()
        same(model, twin.model)
    comm.detach()


# ---- which parameters take part


def frozen_parameters():
    for options in METHODS.values():
        model = net()
        model[0].requires_grad_(False)
        model[3].bias.requires_grad_(False)
        before = model[0].weight.clone()
        twin = ByHand(model, **options)
        comm, optimizer = attached(model, **options)
        twin.train(range(3))
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        same(model, twin.model)
        assert torch.equal(model[0].weight, before)
        comm.detach()


def thawing_is_refused():
    model = net()
    model[0].requires_grad_(False)
    comm, _ = attached(model)
    model[0].requires_grad_(True)
    with refused("a frozen one thawed; call comm.detach"):
        loss_of(model, 0).backward()
    comm.detach()


class Branches(nn.Module):
    """Workers go different ways, and one way nobody goes."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.common = nn.Linear(3, 3)

    def forward(self, x: Tensor, way: int) -> Tensor:
        return self.common(self.ways[way](x))


def way_of(step: int) -> int:
    """Even steps: all go way 0; odd ones: rank 0 goes way 0 and rank 1 way 1. Nobody goes way 2."""
    return (step % 2) * dist.get_rank()


def branched_loss(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return (model(x, way_of(step)) - y).square().mean()


def parameters_that_the_loss_does_not_reach():
    for options in METHODS.values():
        for when in EARLY_AND_LATE:
            model = net(make=Branches)
            twin = ByHand(model, **options)
            comm, optimizer = attached(model, **options, **when)
            twin.train(range(4), branched_loss)
            for step in range(4):
                optimizer.zero_grad()
                branched_loss(model, step).backward()
                optimizer.step()
            same(model, twin.model)
            same_on_all(model)
            comm.detach()


def tied_parameters():
    def tied() -> nn.Module:
        made = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        made[2].weight = made[0].weight
        return made

    for options in METHODS.values():
        model = net(make=tied)
        twin = ByHand(model, **options)
        comm, optimizer = attached(model, **options)
        twin.train(range(3))
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        same(model, twin.model)
        assert model[2].weight is model[0].weight
        comm.detach()


# ---- what happens to gradients between backward pass and step


def set_to_zero_instead_of_none():
    for options in METHODS.values():
        for when in EARLY_AND_LATE:
            model = net()
            twin = ByHand(model, **options)
            comm, optimizer = attached(model, **options, **when)
            twin.train(range(4))
            for step in range(4):
                optimizer.zero_grad(set_to_none=False)
                loss_of(model, step).backward()
                optimizer.step()
            same(model, twin.model)
            comm.detach()


def steps_given_up():
    """Whatever was sent of them is lost, as it would be without compression; the others are as if they had not been."""
    for to_none in (True, False):
        for when in EARLY_AND_LATE:
            for joined in (False, True):
                model = net()
                twin = ByHand(model)
                comm, optimizer = attached(model, **when)
                twin.train([0, 2, 3])
                for step in range(4):
                    optimizer.zero_grad(set_to_none=to_none)
                    loss_of(model, step).backward()
                    if step == 1:
                        if joined:
                            comm.join()
                        continue
                    optimizer.step()
                same(model, twin.model)
                comm.detach()


def steps_given_up_of_methods_with_state():
    """Nothing has left yet: their state is as if the step had not been."""
    for options in METHODS.values():
        model = net()
        twin = ByHand(model, **options)
        comm, optimizer = attached(model, overlap=False, **options)
        twin.train([0, 2, 3])
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step != 1:
                optimizer.step()
        same(model, twin.model)
        comm.detach()


def steps_given_up_keep_workers_together():
    for options in METHODS.values():
        model = net()
        comm, optimizer = attached(model, bucket_cap_mb=1e-4, **options)
        for step in range(5):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss_of(model, step).backward()
            if step != 2:
                optimizer.step()
        same_on_all(model)
        comm.detach()


def gradients_put_by_hand():
    """Without a backward pass."""
    for options in METHODS.values():
        model = net()
        twin = ByHand(model, **options)
        comm, optimizer = attached(model, **options)
        for step in range(3):
            wanted = torch.autograd.grad(loss_of(model, step), list(model.parameters()))
            for trained in (model, twin.model):
                for param, gradient in zip(trained.parameters(), wanted, strict=True):
                    param.grad = gradient.clone()
            optimizer.step()
            twin.mean()
            twin.step()
        same(model, twin.model)
        comm.detach()


def clipped_after_join():
    for name, options in METHODS.items():
        if name in OWNERS:
            continue
        model = net()
        twin = ByHand(model, **options)
        comm, optimizer = attached(model, **options)
        for step in range(3):
            optimizer.zero_grad()
            twin.optimizer.zero_grad()
            loss_of(model, step).backward()
            loss_of(twin.model, step).backward()
            comm.join()
            twin.mean()
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, twin.model)]
            assert torch.equal(*norms) and norms[0] > 0.1
            optimizer.step()
            twin.step()
        same(model, twin.model)
        comm.detach()


def clipped_without_join_is_refused():
    for when in EARLY_AND_LATE:
        model = net()
        comm, optimizer = attached(model, **when)
        loss_of(model, 0).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with refused(r"got that of 0.weight changed; call comm.join\(\) first, or pass clip_norm="):
            optimizer.step()
        comm.detach()


def gradients_replaced_before_join_are_refused():
    """Another tensor, none, or a write through `data`, which changes no version."""

    def halve(param: nn.Parameter) -> None:
        param.grad = param.grad / 2

    def remove(param: nn.Parameter) -> None:
        param.grad = None

    def write(param: nn.Parameter) -> None:
        param.grad.data.mul_(2)

    for when in EARLY_AND_LATE:
        for change in (halve, remove, write):
            model = net()
            comm, optimizer = attached(model, **when)
            loss_of(model, 0).backward()
            change(model[3].weight)
            with refused("got that of 3.weight changed"):
                optimizer.step()
            comm.detach()


def gradients_replaced_after_join():
    model = net()
    twin = ByHand(model)
    comm, optimizer = attached(model)
    for step in range(3):
        optimizer.zero_grad()
        twin.optimizer.zero_grad()
        loss_of(model, step).backward()
        loss_of(twin.model, step).backward()
        comm.join()
        twin.mean()
        for each_model in (model, twin.model):
            each_model[3].weight.grad = each_model[3].weight.grad / 2
            each_model[0].bias.grad = None
        optimizer.step()
        twin.step()
    same(model, twin.model)
    comm.detach()


def clip(model: nn.Module, norm: float) -> None:
    """As `clip_grad_norm_`, which divides by the norm and 1e-6 more."""
    gradients = [param.grad for param in model.parameters()]
    total = nn.utils.get_total_norm(gradients)
    assert total > norm
    torch._foreach_mul_(gradients, norm / total)


def train_clipped(model: nn.Module, optimizer: torch.optim.Optimizer, twin: ByHand, clip_at: str) -> None:
    """Train with gradients or means that the attachment clips to a norm of 0.1, and the twin by hand, in float64."""
    for step in range(4):
        optimizer.zero_grad()
        twin.optimizer.zero_grad()
        loss_of(model, step, torch.float64).backward()
        loss_of(twin.model, step, torch.float64).backward()
        if clip_at == "before":
            clip(twin.model, 0.1)
        twin.mean()
        if clip_at == "after":
            clip(twin.model, 0.1)
        optimizer.step()
        twin.step()


def clipped_by_the_attachment():
    """In float64: the norm is a sum in another order."""
    cases = [(name, at) for name in METHODS for at in ("before", "after") if at == "before" or name not in OWNERS]
    for name, clip_at in cases:
        for more in EARLY_AND_LATE + (({"scope": "model"},) if name in ("topk", "signum") else ()):
            options = METHODS[name]
            model = net(torch.float64)
            twin = ByHand(model, **options, **({"scope": "model"} if "scope" in more else {}))
            comm, optimizer = attached(model, clip_norm=0.1, clip_at=clip_at, **options, **more)
            train_clipped(model, optimizer, twin, clip_at)
            close(model, twin.model)
            comm.detach()


def clipping_after_is_refused_where_the_compressor_takes_the_step():
    with refused("clip_at must be before where the compressor takes the step itself"):
        attached(net(), clip_norm=0.1, clip_at="after", compressor="signum")


# ---- closures


def mean_loss(loss: Tensor) -> Tensor:
    """That of all workers, so that they decide alike."""
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


def step_with_a_closure():
    for options in METHODS.values():
        for by_name in (True, False):
            model = net()
            twin = ByHand(model, **options)
            comm, optimizer = attached(model, **options)
            twin.train(range(3))
            for step in range(3):
                closure = closure_of(model, optimizer, step)
                loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
                assert loss.requires_grad
            same(model, twin.model)
            comm.detach()


def closure_after_a_backward_pass_of_its_own():
    """What the loop has computed before is given up."""
    model = net()
    twin = ByHand(model)
    comm, optimizer = attached(model, bucket_cap_mb=1e-4)
    twin.train(range(3))
    for step in range(3):
        loss_of(model, step + 10).backward()
        optimizer.step(closure_of(model, optimizer, step))
    same(model, twin.model)
    comm.detach()


def lbfgs():
    """Many closures in one step, also with a line search."""

    for search in (None, "strong_wolfe"):

        def newton(model: nn.Module, search: Any = search) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn=search)

        model = net(torch.float64)
        twin = ByHand(model, newton)
        comm, optimizer = attached(model, newton)
        for step in range(3):
            closure = closure_of(model, optimizer, step, torch.float64)
            by_hand = closure_of(twin.model, twin.optimizer, step, torch.float64, twin.mean)
            optimizer.step(lambda closure=closure: mean_loss(closure()))
            twin.optimizer.step(lambda closure=by_hand: mean_loss(closure()))
        same(model, twin.model)
        same_on_all(model)
        comm.detach()


CASES = [
    accumulation_within_no_sync,
    accumulation_without_no_sync_where_nothing_leaves_early,
    two_backward_passes_that_reach_different_parameters,
    accumulation_without_no_sync_is_refused_where_buckets_leave_early,
    accumulation_without_no_sync_is_refused_after_join,
    frozen_parameters,
    thawing_is_refused,
    parameters_that_the_loss_does_not_reach,
    tied_parameters,
    set_to_zero_instead_of_none,
    steps_given_up,
    steps_given_up_of_methods_with_state,
    steps_given_up_keep_workers_together,
    gradients_put_by_hand,
    clipped_after_join,
    clipped_without_join_is_refused,
    gradients_replaced_before_join_are_refused,
    gradients_replaced_after_join,
    clipped_by_the_attachment,
    clipping_after_is_refused_where_the_compressor_takes_the_step,
    step_with_a_closure,
    closure_after_a_backward_pass_of_its_own,
    lbfgs,
]


@pytest.mark.sample(5)
@pytest.mark.parametrize("part", range(5))
def test_loops_with_a_plain_module(tmp_path, part):
    """Every fifth case by default, all in one pair of processes, which takes longer to start than they do."""
    play(tmp_path, CASES[part::5])
