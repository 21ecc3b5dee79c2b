"""Loops with compiled models, other types, groups and optimizers: parameters are those of the same training by hand."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import accordion_bench as ab
from accordion_bench.optimizers.inner import parameter_kinds
from accordion_bench.optimizers.muon import Muon
from accordion_bench.options.checks import ConfigError
from tests.kit.loops import (
    METHODS,
    OWNERS,
    ByHand,
    Net,
    attached,
    close,
    each,
    loss_of,
    net,
    play,
    refused,
    same,
    same_on_all,
    sgd,
)

Makes = Callable[[nn.Module], torch.optim.Optimizer]


def equal_to_by_hand(
    make: Makes = sgd,
    dtype: torch.dtype = torch.float32,
    steps: int = 3,
    before: Callable[[torch.optim.Optimizer, int], Any] = lambda optimizer, step: None,
    made: Callable[[], nn.Module] = Net,
    **options: Any,
) -> None:
    """A plain module and a wrapped one, each beside the training by hand."""
    for wrap in (lambda model: model, DistributedDataParallel):
        model = net(dtype, made)
        twin = ByHand(model, make, **options)
        module, optimizer = wrap(model), make(model)
        comm = ab.attach(module, optimizer, **options)
        for step in range(steps):
            for stepped in (optimizer, twin.optimizer):
                before(stepped, step)
                stepped.zero_grad()
            loss_of(module, step, dtype).backward()
            optimizer.step()
            loss_of(twin.model, step, dtype).backward()
            twin.mean()
            twin.step()
        same(model, twin.model)
        comm.detach()


# ---- torch.compile


def compiled(way: str, backend: str, **options: Any) -> None:
    torch._dynamo.reset()
    model = net()
    twin = ByHand(model, **options)
    optimizer = sgd(model)
    module: Any = model
    if way == "before":
        module = torch.compile(model, backend=backend)
        comm = ab.attach(module, optimizer, **options)
    elif way == "after":
        comm = ab.attach(model, optimizer, **options)
        module = torch.compile(model, backend=backend)
    elif way == "in place":
        comm = ab.attach(model, optimizer, **options)
        model.compile(backend=backend)
    elif way == "then wrapped":
        module = DistributedDataParallel(torch.compile(model, backend=backend))
        comm = ab.attach(module, optimizer, **options)
    else:
        module = torch.compile(DistributedDataParallel(model), backend=backend)
        comm = ab.attach(module, optimizer, **options)
    assert [spec.name for spec in comm.axis.specs] == [name for name, _ in twin.named]
    twin.train(range(3))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(module, step).backward()
        optimizer.step()
    close(model, twin.model, 1e-6)  # graphs may fuse
    same_on_all(model)
    comm.detach()


WAYS = ["before", "after", "in place", "then wrapped", "wrapped"]


def compiled_eagerly(way):
    compiled(way, "eager")


def compiled_with_aot(way, name):
    compiled(way, "aot_eager", **METHODS[name])


def attached_once():
    model = net()
    comm, optimizer = attached(model)
    for other in (model, torch.compile(model, backend="eager"), DistributedDataParallel(model)):
        with refused("model must be attached only once"):
            ab.attach(other, optimizer)
    comm.detach()


def a_wrapped_part_is_refused():
    model = nn.Sequential(DistributedDataParallel(net()), nn.Linear(3, 3))
    with refused("got one that holds it as 0; pass 0 itself"):
        attached(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_compiled_with_every_method(tmp_path, name):
    play(tmp_path, each(compiled_with_aot, WAYS, [name]))


# ---- types


def bfloat16_parameters(name):
    """The mean is taken in float32 and rounded once."""
    options = METHODS[name]
    model = net(torch.bfloat16)
    twin = ByHand(model.float() if name == "none" else model, **options)
    model = net(torch.bfloat16)
    comm, optimizer = attached(model, **options)
    twin.model = copy.deepcopy(model)
    twin.named = list(twin.model.named_parameters())
    twin.optimizer = sgd(twin.model, momentum=optimizer.param_groups[0]["momentum"])
    for step in range(3):
        for trained, stepped in ((model, optimizer), (twin.model, twin.optimizer)):
            stepped.zero_grad()
            loss_of(trained, step, torch.bfloat16).backward()
        optimizer.step()
        if name == "none":
            for _, param in twin.named:
                wide = param.grad.float() / 2
                dist.all_reduce(wide)
                param.grad = wide.bfloat16()
        else:
            twin.mean()
        twin.step()
    same(model, twin.model)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    comm.detach()


def float64_parameters(name):
    equal_to_by_hand(dtype=torch.float64, **METHODS[name])


class Mixed(nn.Module):
    """Half precision, and a normalisation in single precision."""

    def __init__(self, narrow: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.narrow = narrow

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x.to(self.first.weight.dtype)).to(self.norm.weight.dtype))
        return self.last(hidden.to(self.last.weight.dtype)).float()


def mixed(first: torch.dtype, norm: torch.dtype) -> nn.Module:
    model = net(make=Mixed)
    model.first.to(first)
    model.last.to(first)
    model.norm.to(norm)
    return model


def parameters_of_two_types(dtypes, name):
    """Half precision travels as float32, and so does double precision in its company."""
    model = mixed(*dtypes)
    twin = ByHand(model, **METHODS[name])
    comm, optimizer = attached(model, **METHODS[name])
    twin.train(range(3))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    close(model, twin.model, 1e-7)
    same_on_all(model)
    comm.detach()


def buffers_start_as_rank_0_has_them():
    """Of any type, to the last digit, although they travel together."""
    for wide in (False, True):
        model = net()
        model.register_buffer("count", torch.tensor(2**40 + 1 + dist.get_rank()))
        model.register_buffer("mask", torch.tensor([dist.get_rank() == 0]))
        if wide:
            model.register_buffer("wide", torch.tensor(1 / 3 + dist.get_rank(), dtype=torch.float64))
        with torch.no_grad():
            model[0].weight.add_(dist.get_rank())
        comm, _ = attached(model)
        assert int(model.count) == 2**40 + 1
        assert bool(model.mask) and model.mask.dtype == torch.bool
        assert not wide or float(model.wide) == 1 / 3
        assert torch.equal(model[0].weight, net()[0].weight)
        comm.detach()


# ---- groups, optimizers, schedules


def parameter_groups(name, falling):
    """With learning rates of their own, that change alike or apart."""

    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        biases = [param for param in model.parameters() if param.ndim == 1]
        matrices = [param for param in model.parameters() if param.ndim > 1]
        return torch.optim.SGD([{"params": biases, "lr": 0.3}, {"params": matrices}], lr=0.1, momentum=0.9)

    def fall(optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    equal_to_by_hand(grouped, before=fall if falling else lambda optimizer, step: None, **METHODS[name])


def a_rate_set_between_backward_and_step():
    """As in the training by hand, where the compressor does not look at it."""
    for wrap in (lambda model: model, DistributedDataParallel):
        for name in ("none", "signum"):
            model = net()
            twin = ByHand(model, **METHODS[name])
            module, optimizer = wrap(model), sgd(model)
            comm = ab.attach(module, optimizer, **METHODS[name])
            for step in range(3):
                for stepped in (optimizer, twin.optimizer):
                    stepped.zero_grad()
                loss_of(module, step).backward()
                loss_of(twin.model, step).backward()
                twin.mean()
                for stepped in (optimizer, twin.optimizer):
                    stepped.param_groups[0]["lr"] = 0.1 / (step + 1)
                optimizer.step()
                twin.step()
            same(model, twin.model)
            comm.detach()


OPTIMIZERS = [
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    (torch.optim.Adam, {"lr": 0.01, "foreach": False}),
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
]


def optimizers(kind, name):
    make, options = kind
    equal_to_by_hand(lambda model: make(model.parameters(), **options), **METHODS[name])


def muon(name):
    """torch's, where all parameters are matrices, and ours."""

    def bare() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16, bias=False), nn.Tanh(), nn.Linear(16, 3, bias=False))

    def ours(model: nn.Module) -> torch.optim.Optimizer:
        kinds = parameter_kinds(model)
        return Muon(model.parameters(), kinds=list(kinds.values()))

    if name not in OWNERS:
        equal_to_by_hand(ours, **METHODS[name])
        equal_to_by_hand(lambda model: torch.optim.Muon(model.parameters(), lr=0.02), made=bare, **METHODS[name])
    else:
        with refused("optimizer must be sgd"):
            attached(net(make=bare), lambda model: torch.optim.Muon(model.parameters()), **METHODS[name])


def owners_take_what_is_sgds(options, name):
    equal_to_by_hand(lambda model: sgd(model, **options), **METHODS[name])


def owners_refuse_other_optimizers():
    for name in OWNERS:
        with pytest.raises(ConfigError):
            attached(net(), lambda model: torch.optim.Adam(model.parameters()), **METHODS[name])


SCHEDULERS: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=6),
    lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
]


def schedulers(number, made_first, name):
    kind, options = SCHEDULERS[number], {} if name in OWNERS else METHODS[name]
    model = net()
    twin = ByHand(model, **options)
    optimizer = sgd(model)
    schedule = kind(optimizer) if made_first else None
    comm = ab.attach(model, optimizer, **options)
    schedule = schedule or kind(optimizer)
    by_hand = kind(twin.optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        schedule.step()
        twin.train([step])
        by_hand.step()
    same(model, twin.model)
    comm.detach()


# ---- what is never compressed


class Words(nn.Module):
    """An embedding, layers, a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.last = nn.Embedding(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.words((10 * x).long() % 5).mean(1)))


def exempt_tensors():
    """They are exactly the dense mean; others are not, although this compressor takes vectors, too."""

    def weights(name: str, param: nn.Parameter) -> bool:
        return name.endswith("weight") and param.ndim == 2

    norm, bias, embedding = {"norm.weight", "norm.bias"}, {"norm.bias", "last.bias"}, {"words.weight"}
    wraps: list[Callable[[nn.Module], Any]] = [
        lambda model: model,
        DistributedDataParallel,
        lambda model: torch.compile(model, backend="eager"),
    ]
    for exempt, names in (
        ("norm,bias", norm | bias),
        ("norm", norm),
        (" bias , embedding ", bias | embedding),
        (weights, {"words.weight", "last.weight"}),
        (None, set()),
    ):
        for wrap in wraps:
            model = net(make=Words)
            twin = ByHand(model)
            module, optimizer = wrap(model), sgd(model)
            comm = ab.attach(module, optimizer, "qsgd", bits=2, exempt=exempt)
            loss_of(module, 0).backward()
            comm.join()
            loss_of(twin.model, 0).backward()
            twin.mean()
            pairs = zip(twin.named, model.parameters(), strict=True)
            dense = {name for (name, theirs), ours in pairs if torch.equal(theirs.grad, ours.grad)}
            assert dense == names, (exempt, dense)
            comm.detach()


def an_unknown_word_is_refused():
    with refused("exempt must be made of norm, bias, embedding, or be a function of name and parameter, got 'norms'"):
        attached(net(), compressor="topk", exempt="norms")


TYPES = [
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
]
BY_TORCH = [name for name in METHODS if name not in OWNERS]  # the optimizer takes the step
ALONE = [  # none repeats another
    attached_once,
    a_wrapped_part_is_refused,
    buffers_start_as_rank_0_has_them,
    owners_refuse_other_optimizers,
    an_unknown_word_is_refused,
]
CASES = [
    a_rate_set_between_backward_and_step,
    *each(compiled_eagerly, WAYS),
    *each(compiled_with_aot, WAYS, ["powersgd"]),
    *each(bfloat16_parameters, METHODS),
    *each(float64_parameters, ("none", "topk", "signum")),
    *each(parameters_of_two_types, TYPES, METHODS),
    *each(parameter_groups, METHODS, (False, True)),
    *each(optimizers, OPTIMIZERS, BY_TORCH),
    *each(owners_take_what_is_sgds, ({"nesterov": True}, {"weight_decay": 0.01}), OWNERS),
    *each(schedulers, range(len(SCHEDULERS)), (True, False), METHODS),
    *each(muon, METHODS),
    exempt_tensors,
]
PARTS = 7  # without a common factor with the lengths of the axes, so that the cases of a part vary in each


@pytest.mark.sample(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_loops_by_model_and_optimizer(tmp_path, part):
    """One part of the cases by default, all in one pair of processes, which takes longer to start than they do."""
    play(tmp_path, CASES[part::PARTS] + (ALONE if part == 0 else []))
