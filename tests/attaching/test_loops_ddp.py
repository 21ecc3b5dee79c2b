"""Loops with DistributedDataParallel, as users configure it: parameters are those of the same training by hand."""

import contextlib
import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accordion_bench as ab
from accordion_bench.compressors.compressor import NonFinite
from tests.attaching.test_loops import Branches, branched_loss, train_clipped
from tests.kit.loops import (
    METHODS,
    OWNERS,
    ByHand,
    close,
    closure_of,
    each,
    loss_of,
    net,
    play,
    refused,
    same,
    same_on_all,
    sgd,
)

STEPS = range(4)  # DistributedDataParallel cuts its buckets anew after the first
TINY = 1e-4  # MB, so that every gradient is in a bucket of its own
VIEWS = ({}, {"gradient_as_bucket_view": True})
CONFIGURED: list[dict[str, Any]] = [
    *VIEWS,
    {"static_graph": True},
    {"bucket_cap_mb": TINY},
    {"bucket_cap_mb": TINY, "gradient_as_bucket_view": True, "static_graph": True},
]
BY_TORCH = [name for name in METHODS if name not in OWNERS]  # the optimizer takes the step


def wrapped(ddp: dict[str, Any], make: Any = None, dtype: torch.dtype = torch.float32, **options: Any) -> tuple:
    """The wrapped model, its attachment, its optimizer, and the training by hand."""
    of_hand = {key: value for key, value in options.items() if key in ("compressor", "density", "rank", "scope")}
    model = net(dtype, make) if make else net(dtype)
    twin = ByHand(model, **of_hand)
    module = DistributedDataParallel(model, **ddp)
    optimizer = sgd(model)
    return module, ab.attach(module, optimizer, **options), optimizer, twin


def trained(ddp: dict[str, Any], loss: Any = loss_of, make: Any = None, to_none: bool = True, **options: Any) -> None:
    """The simplest loop, with a look at the gradients after each backward pass."""
    module, comm, optimizer, twin = wrapped(ddp, make, **options)
    for step in STEPS:
        optimizer.zero_grad(set_to_none=to_none)
        twin.optimizer.zero_grad()
        loss(module, step).backward()
        loss(twin.model, step).backward()
        twin.mean()
        for (_, theirs), ours in zip(twin.named, trained_of(module), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        optimizer.step()
        twin.step()
    same(module.module, twin.model)
    comm.detach()


def trained_of(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if param.requires_grad]


def as_it_is_configured(name, ddp):
    trained(ddp, **METHODS[name])


def set_to_zero_instead_of_none(name, ddp):
    trained(ddp, to_none=False, **METHODS[name])


def with_exchanges_after_the_backward_pass(name, ddp):
    trained(ddp, overlap=False, **METHODS[name])


def with_buckets_of_its_own(name, ddp):
    """The buckets of the exchange differ from those of DistributedDataParallel."""
    trained(ddp, bucket_cap_mb=TINY, **METHODS[name])


def all_tensors_as_one(options, ddp):
    trained(ddp, scope="model", **options)


def a_compressor_that_needs_all_at_once(ddp):
    trained(ddp, compressor="randomk", density=0.5)


# ---- accumulation


def accumulated(early: bool, within: str, ddp: dict[str, Any], **options: Any) -> None:
    module, comm, optimizer, twin = wrapped(ddp, overlap=None if early else False, **options)
    for step in range(3):
        optimizer.zero_grad()
        twin.optimizer.zero_grad()
        for micro in range(3):
            not_yet = {"ddp": module.no_sync, "comm": comm.no_sync}[within]
            with not_yet() if micro < 2 else contextlib.nullcontext():
                loss_of(module, 3 * step + micro).backward()
            loss_of(twin.model, 3 * step + micro).backward()
        optimizer.step()
        twin.mean()
        twin.step()
    same(module.module, twin.model)
    comm.detach()


def accumulation(name, early, within, ddp):
    accumulated(early, within, ddp, **METHODS[name])


def accumulation_without_no_sync_is_that_of_ddp():
    """Each backward pass is exchanged, and the next one's gradients are added to the mean."""
    model = net()
    plain = DistributedDataParallel(ByHand(model).model)
    stock = sgd(plain)
    module = DistributedDataParallel(model)
    optimizer = sgd(model)
    comm = ab.attach(module, optimizer)
    for step in range(3):
        for trained_one, stepped in ((module, optimizer), (plain, stock)):
            stepped.zero_grad()
            loss_of(trained_one, 2 * step).backward()
            loss_of(trained_one, 2 * step + 1).backward()
            stepped.step()
    same(module.module, plain.module)
    comm.detach()


# ---- parameters that are not reached, gradients that are changed or given up


def parameters_that_the_loss_does_not_reach(name, more):
    """They count as having a zero gradient, also where nobody reaches them.

    Where nothing comes of their exchange they have none at all, as of stock DistributedDataParallel: momentum would
    show it.
    """
    ddp = {"find_unused_parameters": True, "bucket_cap_mb": TINY, **more}
    module, comm, optimizer, twin = wrapped(ddp, Branches, **METHODS[name])
    if name not in OWNERS:
        optimizer.param_groups[0]["momentum"] = twin.optimizer.param_groups[0]["momentum"] = 0
    twin.train(STEPS, branched_loss)
    for step in STEPS:
        optimizer.zero_grad()
        branched_loss(module, step).backward()
        optimizer.step()
    same(module.module, twin.model)
    comm.detach()


def frozen_parameters(name):
    def half_frozen() -> nn.Module:
        model = net()
        model[0].requires_grad_(False)
        return model

    trained({}, make=half_frozen, **METHODS[name])


def clipped_after_backward(name, ddp):
    module, comm, optimizer, twin = wrapped(ddp, **METHODS[name])
    for step in STEPS:
        optimizer.zero_grad()
        twin.optimizer.zero_grad()
        loss_of(module, step).backward()
        loss_of(twin.model, step).backward()
        twin.mean()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (module, twin.model)]
        assert torch.equal(*norms) and norms[0] > 0.1
        optimizer.step()
        twin.step()
    same(module.module, twin.model)
    comm.detach()


def clipped_by_the_attachment(clip_at, name, ddp):
    options = {**METHODS[name], **({"scope": "model"} if name == "topk" else {})}
    module, comm, optimizer, twin = wrapped(ddp, dtype=torch.float64, clip_norm=0.1, clip_at=clip_at, **options)
    train_clipped(module, optimizer, twin, clip_at)
    close(module.module, twin.model)
    comm.detach()


def steps_given_up(to_none, ddp, more):
    module, comm, optimizer, twin = wrapped(ddp, **more)
    twin.train([0, 2, 3])
    for step in range(4):
        optimizer.zero_grad(set_to_none=to_none)
        loss_of(module, step).backward()
        if step != 1:
            optimizer.step()
    same(module.module, twin.model)
    comm.detach()


def steps_given_up_keep_workers_together(name):
    module, comm, optimizer, _ = wrapped({"bucket_cap_mb": TINY}, bucket_cap_mb=TINY, **METHODS[name])
    for step in STEPS:
        optimizer.zero_grad()
        loss_of(module, step).backward()
        if step != 2:
            optimizer.step()
    same_on_all(module)
    comm.detach()


def a_closure(name):
    module, comm, optimizer, twin = wrapped({}, **METHODS[name])
    twin.train(STEPS)
    for step in STEPS:
        optimizer.step(closure_of(module, optimizer, step))
    same(module.module, twin.model)
    comm.detach()


# ---- one hook in the life of a module


def attached_again(name):
    """DistributedDataParallel takes one hook in its life: the next attachment takes its place."""
    model = net()
    module = DistributedDataParallel(model)
    for chosen in (METHODS[name], {}, METHODS[name]):
        optimizer = sgd(model)
        twin = ByHand(model, **chosen)
        comm = ab.attach(module, optimizer, **chosen)
        twin.train(range(2))
        for step in range(2):
            optimizer.zero_grad()
            loss_of(module, step).backward()
            optimizer.step()
        same(model, twin.model)
        comm.detach()


def alone_after_detach():
    """Stock DistributedDataParallel goes on."""
    model = net()
    module, optimizer = DistributedDataParallel(model), sgd(model)
    comm = ab.attach(module, optimizer, "topk", density=0.5)
    loss_of(module, 0).backward()
    optimizer.step()
    comm.detach()
    twin = ByHand(model)
    twin.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.train(range(1, 4))
    for step in range(1, 4):
        optimizer.zero_grad()
        loss_of(module, step).backward()
        optimizer.step()
    same(model, twin.model)


def thawed_after_wrapping_is_refused():
    """DistributedDataParallel exchanges what it has found trained: each worker would use its own gradient."""
    for attach_before in (True, False):
        model = net()
        model[0].requires_grad_(False)
        module, optimizer = DistributedDataParallel(model), sgd(model)
        comm = ab.attach(module, optimizer) if attach_before else None
        model[0].requires_grad_(True)
        comm = comm or ab.attach(module, optimizer)
        with refused("wrap the model in DistributedDataParallel again"):
            loss_of(module, 0).backward()
        comm.detach()
        comm = ab.attach(DistributedDataParallel(model), optimizer)
        comm.detach()


def an_overflow_without_a_scaler_is_refused():
    model = net()
    module, optimizer = DistributedDataParallel(model), sgd(model)
    comm = ab.attach(module, optimizer)
    with refused("or pass scaler= if a GradScaler scales the loss", NonFinite):
        (loss_of(module, 0) * math.inf).backward()
    comm.detach()


def somebody_elses_hook_is_refused():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = net()
    module = DistributedDataParallel(model)
    module.register_comm_hook(None, allreduce_hook)
    with refused("model must have no communication hook"):
        ab.attach(module, sgd(model))


def of_some_processes():
    """A wrapped model exchanges within the group that it was wrapped with."""
    group = dist.new_group([0])
    alone = dist.new_group([1])
    model = net()
    module = DistributedDataParallel(model, process_group=group if dist.get_rank() == 0 else alone)
    comm = ab.attach(module, sgd(model))
    assert comm.comm.workers == 1
    comm.detach()


WHOLE = [
    {"compressor": "topk", "density": 0.5},
    {"compressor": "topk", "density": 0.5, "overlap": False},
    {"compressor": "signum"},
]
ALONE = [  # none repeats another
    accumulation_without_no_sync_is_that_of_ddp,
    alone_after_detach,
    thawed_after_wrapping_is_refused,
    an_overflow_without_a_scaler_is_refused,
    somebody_elses_hook_is_refused,
    of_some_processes,
]
CASES = [
    *each(as_it_is_configured, METHODS, CONFIGURED),
    *each(set_to_zero_instead_of_none, METHODS, (CONFIGURED[0], CONFIGURED[-1])),
    *each(with_exchanges_after_the_backward_pass, METHODS, VIEWS),
    *each(with_buckets_of_its_own, METHODS, ({}, {"bucket_cap_mb": TINY})),
    *each(all_tensors_as_one, WHOLE, ({}, {"bucket_cap_mb": TINY, "gradient_as_bucket_view": True})),
    *each(a_compressor_that_needs_all_at_once, ({}, {"bucket_cap_mb": TINY})),
    *each(accumulation, ("none", "powersgd", "dgc"), (True, False), ("ddp", "comm"), VIEWS),
    *each(parameters_that_the_loss_does_not_reach, METHODS, VIEWS),
    *each(frozen_parameters, METHODS),
    *each(clipped_after_backward, BY_TORCH, VIEWS),
    *each(clipped_by_the_attachment, ["before"], METHODS, VIEWS),
    *each(clipped_by_the_attachment, ["after"], BY_TORCH, VIEWS),
    *each(steps_given_up, (True, False), (*VIEWS, {"bucket_cap_mb": TINY}), ({}, {"overlap": False})),
    *each(steps_given_up_keep_workers_together, METHODS),
    *each(a_closure, METHODS),
    *each(attached_again, METHODS),
]
PARTS = 7  # without a common factor with the lengths of the axes, so that the cases of a part vary in each


@pytest.mark.sample(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_loops_with_distributed_data_parallel(tmp_path, part):
    """One part of the cases by default, all in one pair of processes, which takes longer to start than they do."""
    play(tmp_path, CASES[part::PARTS] + (ALONE if part == 0 else []))
