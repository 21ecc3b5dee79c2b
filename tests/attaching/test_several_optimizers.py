"""Several optimizers of one model, such as Muon for matrices and AdamW for the rest: one exchange before all."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accordion_bench as ab
from tests.kit.loops import ByHand, close, loss_of, net, play, refused, same, same_on_all

Optimizers = list[torch.optim.Optimizer]


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices, and the rest."""
    matrices, others = ([p for p in model.parameters() if (p.ndim == 2) == two] for two in (True, False))
    return matrices, others


def muon_and_adamw(model: nn.Module) -> Optimizers:
    matrices, others = split(model)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def two_sgds(model: nn.Module) -> Optimizers:
    return [torch.optim.SGD(params, lr=0.1, momentum=0.9) for params in split(model)]


class Both:
    """Steps several as one, for the training by hand."""

    def __init__(self, optimizers: Optimizers) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def train(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], steps: Sequence[int] = range(4)) -> None:
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()


def every_step_equals_the_training_by_hand():
    for make in (muon_and_adamw, two_sgds):
        for wrap in (lambda model: model, DistributedDataParallel):
            for more in ({}, {"overlap": False}, {"bucket_cap_mb": 1e-4}):
                model = net()
                twin = ByHand(model, lambda its, make=make: Both(make(its)))  # type: ignore[arg-type, return-value]
                twin.train(range(4))
                optimizers, module = make(model), wrap(model)
                comm = ab.attach(module, optimizers, **more)
                train(module, optimizers)
                same(model, twin.model)
                assert comm.position.step == 4
                comm.detach()


def local_steps_average():
    for make in (muon_and_adamw, two_sgds):
        for options in ({"sync": "local_sgd"}, {"sync": "slowmo"}, {"sync": "local_sgd", "buffers": "average"}):
            model = net()
            twin = copy.deepcopy(model)
            optimizers, of_twin = make(model), make(twin)
            with ab.local(model, optimizers, period=4, **options) as local:
                reset = options["sync"] == "slowmo" and make is two_sgds  # as its paper has it
                assert local.sync.buffers == options.get("buffers", "reset" if reset else "keep")
                train(model, optimizers)
                for optimizer in optimizers:
                    assert bool(optimizer.state) != reset
            train(twin, of_twin)
            for param in twin.parameters():
                dist.all_reduce(param.detach())
                param.detach().div_(2)
            if options["sync"] != "slowmo":
                close(model, twin, 1e-6)
            same_on_all(model)


def a_compressor_that_takes_the_step():
    """Two optimizers of SGD are as one with two groups."""
    ours, theirs = net(), net()
    optimizers = two_sgds(ours)
    matrices, others = split(theirs)
    one = torch.optim.SGD([{"params": matrices}, {"params": others}], lr=0.1, momentum=0.9)
    ab.attach(ours, optimizers, "signum")
    ab.attach(theirs, one, "signum")
    train(ours, optimizers)
    train(theirs, [one])
    same(ours, theirs)
    assert all(group["momentum"] == 0 for optimizer in optimizers for group in optimizer.param_groups)
    with refused("optimizer must be sgd, because this compressor takes the step itself .*, got .*Muon and torch"):
        ab.attach(model := net(), muon_and_adamw(model), "signum")


def all_skip_a_step_together():
    model = net()
    optimizers = two_sgds(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    comm = ab.attach(model, optimizers, scaler=scaler)
    for explicit in (False, True):
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            before = copy.deepcopy(model.state_dict())
            overflow = step == 2 and dist.get_rank() == 1
            scaler.scale(loss_of(model, step) * (float("inf") if overflow else 1.0)).backward()
            for optimizer in optimizers:
                if explicit:
                    scaler.unscale_(optimizer)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            changed = [not torch.equal(value, before[name]) for name, value in model.state_dict().items()]
            assert all(changed) if step != 2 else not any(changed)
            same_on_all(model)
    assert comm.position.step == 6
    comm.detach()


def a_training_goes_on_from_its_state():
    whole = net()
    optimizers = muon_and_adamw(whole)
    comm = ab.attach(whole, optimizers, "powersgd", rank=1)
    train(whole, optimizers, range(2))
    saved = copy.deepcopy((comm.state_dict(), whole.state_dict(), [optimizer.state_dict() for optimizer in optimizers]))
    train(whole, optimizers, range(2, 4))
    comm.detach()
    model = net()
    optimizers = muon_and_adamw(model)
    comm = ab.attach(model, optimizers, "powersgd", rank=1)
    model.load_state_dict(saved[1])
    for optimizer, state in zip(optimizers, saved[2], strict=True):
        optimizer.load_state_dict(state)
    comm.load_state_dict(saved[0])
    train(model, optimizers, range(2, 4))
    same(model, whole)
    assert comm.metrics()["run"]["optimizer"] == "Muon+AdamW"
    comm.detach()


def a_list_of_one_is_that_one():
    model, twin = net(), net()
    ours, theirs = torch.optim.Adam(model.parameters()), torch.optim.Adam(twin.parameters())
    assert ab.attach(model, [ours]).optimizer is ours
    ab.attach(twin, theirs)
    train(model, [ours])
    train(twin, [theirs])
    same(model, twin)


# ---- what is refused


def steps_left_out():
    for wrap in (lambda model: model, DistributedDataParallel):
        model = net()
        module, optimizers = wrap(model), muon_and_adamw(model)
        ab.attach(module, optimizers)
        loss_of(module, 0).backward()
        optimizers[0].step()
        with refused("optimizers must all take a step after each backward pass, got none of AdamW; call its step"):
            model.zero_grad()
            loss_of(module, 1).backward()
    model = net()
    optimizers = muon_and_adamw(model)
    ab.attach(model, optimizers)
    loss_of(model, 0).backward()
    optimizers[1].step()
    with refused("optimizers must all take a step after each backward pass, got none of Muon; call its step"):
        optimizers[1].step()


def what_is_no_list_of_optimizers():
    model = net()
    passed: list[tuple[Any, str]] = [
        ([], "optimizer must be a torch.optim.Optimizer or a list of them, got \\[\\]; pass the model's"),
        ([1, 2], "optimizer must be a torch.optim.Optimizer or a list of them, got \\[1, 2\\]"),
        (
            muon_and_adamw(model)[:1],
            "optimizer must hold all .*, got one without 0.bias; pass it to the ",
        ),
        (two_sgds(model) + two_sgds(model), "optimizers must hold each parameter once, got one that two of them hold"),
    ]
    for optimizers, sentence in passed:
        for door in (ab.attach, lambda m, o: ab.local(m, o, "local_sgd")):
            with refused(sentence):
                door(model, optimizers)
    optimizers = two_sgds(model)
    ab.attach(model, optimizers)
    with refused("optimizers must step without a closure where there are several, got one"):
        optimizers[0].step(lambda: loss_of(model, 0))


@pytest.mark.parametrize(
    "case",
    [
        every_step_equals_the_training_by_hand,
        local_steps_average,
        a_compressor_that_takes_the_step,
        all_skip_a_step_together,
        a_training_goes_on_from_its_state,
        a_list_of_one_is_that_one,
        steps_left_out,
        what_is_no_list_of_optimizers,
    ],
    ids=lambda case: case.__name__,
)
def test_several_optimizers(case, tmp_path):
    play(tmp_path, [case])
