"""Loops in mixed precision with torch's GradScaler: all workers skip a step together, and go on together."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import accordion_bench as ab
from tests.kit.loops import METHODS, OWNERS, ByHand, attached, each, loss_of, net, play, refused, same, same_on_all, sgd

OVERFLOWS = 2  # in this step, on rank 1 alone
STEPS = range(6)


def half_loss(model: nn.Module, step: int, dtype: torch.dtype = torch.float16) -> Tensor:
    with torch.autocast("cpu", dtype=dtype):
        loss = loss_of(model, step)
    overflows = step == OVERFLOWS and dist.get_rank() == 1
    return loss * float("inf") if overflows else loss


def scaler_of() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


def step_by_hand(twin: ByHand, scaler: torch.amp.GradScaler, scale: float, clip: float | None) -> float:
    """What GradScaler does, written out: exchange of unscaled gradients, unless anybody's overflow; the next scale."""
    gradients = [param.grad for _, param in twin.named]
    with torch.no_grad():
        torch._foreach_mul_(gradients, 1 / scale)
    bad = torch.tensor(float(not all(gradient.isfinite().all() for gradient in gradients)))
    dist.all_reduce(bad)
    if bad:
        return scale * scaler.get_backoff_factor()
    twin.mean()
    if clip is not None:
        nn.utils.clip_grad_norm_(twin.model.parameters(), clip)
    twin.step()
    return scale


def scaled(ddp: dict[str, Any] | None, clip: float | None = None, micros: int = 1, **options: Any) -> None:
    """With an overflow on one worker; also clipped after `unscale_`, and of several micro-batches."""
    model = net()
    twin = ByHand(model, **{key: value for key, value in options.items() if key not in ("overlap", "bucket_cap_mb")})
    module = model if ddp is None else DistributedDataParallel(model, **ddp)
    optimizer, scaler = sgd(model), scaler_of()
    comm = ab.attach(module, optimizer, scaler=scaler, **options)
    scale, taken = scaler.get_scale(), 0
    for step in STEPS:
        optimizer.zero_grad()
        twin.optimizer.zero_grad()
        for micro in range(micros):
            at = step if micro == micros - 1 else 100 * step + micro + 50
            if micro < micros - 1:
                with comm.no_sync():
                    scaler.scale(half_loss(module, at)).backward()
            else:
                scaler.scale(half_loss(module, at)).backward()
            (half_loss(twin.model, at) * scale).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        lowered = step_by_hand(twin, scaler, scale, clip)
        assert (scaler.get_scale() < before) == (step == OVERFLOWS)
        assert (lowered < scale) == (step == OVERFLOWS)
        scale, taken = scaler.get_scale(), taken + (step != OVERFLOWS)
        assert comm.position.step == taken
        same(model, twin.model)
    scales = [None, None]
    dist.all_gather_object(scales, scaler.get_scale())
    assert scales[0] == scales[1]
    same_on_all(model)
    comm.detach()


def without_clipping(ddp, options):
    scaled(ddp, **options)


def clipped_after_unscaling(ddp, options):
    scaled(ddp, 0.1, **options)


def several_micro_batches(ddp, options):
    scaled(ddp, micros=2, **options)


def a_scaler_that_was_not_passed():
    """`unscale_` changes gradients that are being sent, and not their version."""
    for early in ({}, {"overlap": False}):
        model = net()
        scaler = scaler_of()
        comm, optimizer = attached(model, **early)
        scaler.scale(half_loss(model, 0)).backward()
        with refused("or scaler= with a GradScaler"):
            scaler.step(optimizer)
        comm.detach()


def a_scaler_that_is_switched_off():
    model = net()
    twin = ByHand(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    comm, optimizer = attached(model, scaler=scaler)
    twin.train(range(3))
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    same(model, twin.model)
    comm.detach()


def one_scaler_for_two_models(first_detached):
    """An overflow in one of them skips that one's step alone; detached in any order."""
    models = [net(), net()]
    twins = [ByHand(model) for model in models]
    scaler = scaler_of()
    pairs = [attached(model, scaler=scaler) for model in models]
    scale = scaler.get_scale()
    for step in range(4):
        for (_, optimizer), twin in zip(pairs, twins, strict=True):
            optimizer.zero_grad()
            twin.optimizer.zero_grad()
        for number, (model, twin) in enumerate(zip(models, twins, strict=True)):
            at = step if number == 0 else step + 10
            scaler.scale(half_loss(model, at)).backward()
            (half_loss(twin.model, at) * scale).backward()
        for _, optimizer in pairs:
            scaler.step(optimizer)
        scaler.update()
        for twin in twins:
            step_by_hand(twin, scaler, scale, None)
        scale = scaler.get_scale()
    for model, twin in zip(models, twins, strict=True):
        same(model, twin.model)
    pairs[first_detached][0].detach()
    other = pairs[1 - first_detached]
    twins[1 - first_detached].optimizer.zero_grad()
    other[1].zero_grad()
    scaler.scale(half_loss(models[1 - first_detached], 20)).backward()
    (half_loss(twins[1 - first_detached].model, 20) * scale).backward()
    scaler.step(other[1])
    step_by_hand(twins[1 - first_detached], scaler, scale, None)
    same(models[1 - first_detached], twins[1 - first_detached].model)
    other[0].detach()
    before = [param.grad.clone() for param in models[0].parameters()]
    scaler.update()
    scale = scaler.get_scale()
    scaler.unscale_(pairs[0][1])  # as torch does it
    for param, scaled_one in zip(models[0].parameters(), before, strict=True):
        assert torch.equal(param.grad, scaled_one / scale)


def bfloat16_without_a_scaler(options, ddp):
    model = net()
    twin = ByHand(model, **options)
    module, optimizer = DistributedDataParallel(model) if ddp else model, sgd(model)
    comm = ab.attach(module, optimizer, **options)
    for step in range(3):
        optimizer.zero_grad()
        twin.optimizer.zero_grad()
        half_loss(module, step + 10, torch.bfloat16).backward()
        half_loss(twin.model, step + 10, torch.bfloat16).backward()
        optimizer.step()
        twin.mean()
        twin.step()
    same(model, twin.model)
    comm.detach()


VIEWS = ({}, {"gradient_as_bucket_view": True})
WHOLE = {"compressor": "topk", "density": 0.5, "scope": "model"}
ALONE = [  # none repeats another
    a_scaler_that_was_not_passed,
    a_scaler_that_is_switched_off,
    *each(one_scaler_for_two_models, (0, 1)),
]
CASES = [
    *each(without_clipping, (None, *VIEWS), METHODS.values()),
    *each(without_clipping, [None], (WHOLE, {**METHODS["topk"], "overlap": False}, {"bucket_cap_mb": 1e-4})),
    *each(without_clipping, [{"bucket_cap_mb": 1e-4, "static_graph": True}], [WHOLE]),
    *each(clipped_after_unscaling, (None, *VIEWS), [METHODS[name] for name in METHODS if name not in OWNERS]),
    *each(several_micro_batches, (None, {}), METHODS.values()),
    *each(bfloat16_without_a_scaler, METHODS.values(), (False, True)),
]
PARTS = 7  # without a common factor with the lengths of the axes, so that the cases of a part vary in each


@pytest.mark.sample(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_scaler(tmp_path, part):
    """One part of the cases by default, all in one pair of processes, which takes longer to start than they do."""
    play(tmp_path, CASES[part::PARTS] + (ALONE if part == 0 else []))
