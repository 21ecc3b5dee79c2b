"""Loops with DistributedDataParallel, as users configure it: parameters are those of the same training by hand."""

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accordion_bench as ab
from tests.attaching.test_loops import Branches, branched_loss, clip
from tests.kit.loops import (
    METHODS,
    OWNERS,
    ByHand,
    close,
    closure_of,
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


def as_it_is_configured():
    configured: list[dict[str, Any]] = [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"bucket_cap_mb": TINY},
        {"bucket_cap_mb": TINY, "gradient_as_bucket_view": True, "static_graph": True},
    ]
    for options in METHODS.values():
        for ddp in configured:
            trained(ddp, **options)
        trained({}, to_none=False, **options)
        trained(configured[-1], to_none=False, **options)


def with_exchanges_after_the_backward_pass():
    for options in METHODS.values():
        for ddp in ({}, {"gradient_as_bucket_view": True}):
            trained(ddp, overlap=False, **options)


def with_buckets_of_its_own():
    """Those of the exchange are not those of DistributedDataParallel."""
    for options in METHODS.values():
        for ddp in ({}, {"bucket_cap_mb": TINY}):
            trained(ddp, bucket_cap_mb=TINY, **options)


def all_tensors_as_one():
    for ddp in ({}, {"bucket_cap_mb": TINY, "gradient_as_bucket_view": True}):
        trained(ddp, compressor="topk", density=0.5, scope="model")
        trained(ddp, compressor="topk", density=0.5, scope="model", overlap=False)
        trained(ddp, compressor="signum", scope="model")


def a_compressor_that_needs_all_at_once():
    for ddp in ({}, {"bucket_cap_mb": TINY}):
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


def accumulation():
    for options in (METHODS["none"], METHODS["powersgd"], METHODS["dgc"]):
        for early in (True, False):
            for within in ("ddp", "comm"):
                for ddp in ({}, {"gradient_as_bucket_view": True}):
                    accumulated(early, within, ddp, **options)


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


def parameters_that_the_loss_does_not_reach():
    """They count as having a zero gradient, also where nobody reaches them.

    Where nothing comes of their exchange they have none at all, as of stock DistributedDataParallel: momentum would
    show it.
    """
    for name, options in METHODS.items():
        for more in ({}, {"gradient_as_bucket_view": True}):
            ddp = {"find_unused_parameters": True, "bucket_cap_mb": TINY, **more}
            module, comm, optimizer, twin = wrapped(ddp, Branches, **options)
            if name not in OWNERS:
                optimizer.param_groups[0]["momentum"] = twin.optimizer.param_groups[0]["momentum"] = 0
            twin.train(STEPS, branched_loss)
            for step in STEPS:
                optimizer.zero_grad()
                branched_loss(module, step).backward()
                optimizer.step()
            same(module.module, twin.model)
            comm.detach()


def frozen_parameters():
    def half_frozen() -> nn.Module:
        model = net()
        model[0].requires_grad_(False)
        return model

    for options in METHODS.values():
        trained({}, make=half_frozen, **options)


def clipped_after_backward():
    for name, options in METHODS.items():
        if name in OWNERS:
            continue
        for ddp in ({}, {"gradient_as_bucket_view": True}):
            module, comm, optimizer, twin = wrapped(ddp, **options)
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


def clipped_by_the_attachment():
    cases = [(name, at) for name in METHODS for at in ("before", "after") if at == "before" or name not in OWNERS]
    for name, clip_at in cases:
        for ddp in ({}, {"gradient_as_bucket_view": True}):
            options = {**METHODS[name], **({"scope": "model"} if name == "topk" else {})}
            module, comm, optimizer, twin = wrapped(ddp, dtype=torch.float64, clip_norm=0.1, clip_at=clip_at, **options)
            for step in STEPS:
                optimizer.zero_grad()
                twin.optimizer.zero_grad()
                loss_of(module, step, torch.float64).backward()
                loss_of(twin.model, step, torch.float64).backward()
                if clip_at == "before":
                    clip(twin.model, 0.1)
                twin.mean()
                if clip_at == "after":
                    clip(twin.model, 0.1)
                optimizer.step()
                twin.step()
            close(module.module, twin.model)
            comm.detach()


def steps_given_up():
    for to_none in (True, False):
        for ddp in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": TINY}):
            for more in ({}, {"overlap": False}):
                module, comm, optimizer, twin = wrapped(ddp, **more)
                twin.train([0, 2, 3])
                for step in range(4):
                    optimizer.zero_grad(set_to_none=to_none)
                    loss_of(module, step).backward()
                    if step != 1:
                        optimizer.step()
                same(module.module, twin.model)
                comm.detach()


def steps_given_up_keep_workers_together():
    for options in METHODS.values():
        module, comm, optimizer, _ = wrapped({"bucket_cap_mb": TINY}, bucket_cap_mb=TINY, **options)
        for step in STEPS:
            optimizer.zero_grad()
            loss_of(module, step).backward()
            if step != 2:
                optimizer.step()
        same_on_all(module)
        comm.detach()


def a_closure():
    for options in METHODS.values():
        module, comm, optimizer, twin = wrapped({}, **options)
        twin.train(STEPS)
        for step in STEPS:
            optimizer.step(closure_of(module, optimizer, step))
        same(module.module, twin.model)
        comm.detach()


# ---- one hook in the life of a module


def attached_again():
    """DistributedDataParallel takes one hook in its life: the next attachment takes its place."""
    for options in METHODS.values():
        model = net()
        module = DistributedDataParallel(model)
        for chosen in (options, {}, options):
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


CASES = [
    as_it_is_configured,
    with_exchanges_after_the_backward_pass,
    with_buckets_of_its_own,
    all_tensors_as_one,
    a_compressor_that_needs_all_at_once,
    accumulation,
    accumulation_without_no_sync_is_that_of_ddp,
    parameters_that_the_loss_does_not_reach,
    frozen_parameters,
    clipped_after_backward,
    clipped_by_the_attachment,
    steps_given_up,
    steps_given_up_keep_workers_together,
    a_closure,
    attached_again,
    alone_after_detach,
    somebody_elses_hook_is_refused,
    of_some_processes,
]


@pytest.mark.sample(5)
@pytest.mark.parametrize("part", range(5))
def test_loops_with_distributed_data_parallel(tmp_path, part):
    """Every fifth case by default, all in one pair of processes, which takes longer to start than they do."""
    play(tmp_path, CASES[part::5])
