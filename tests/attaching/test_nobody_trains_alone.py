"""Whoever changes the parameters of an attached model: all workers keep one model, or are told that they do not."""

import contextlib
import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accordion_bench as ab
from accordion_bench.options.checks import ConfigError
from tests.kit.loops import ByHand, attached, loss_of, net, play, refused, same, same_on_all, sgd

Loop = Callable[[nn.Module, nn.Module, Any, torch.optim.Optimizer], None]
"""What a user does with the model, what wraps it, the attachment and the optimizer that was attached."""


def step_of(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(module, step).backward()
    optimizer.step()


class Sharpness(torch.optim.Optimizer):
    """Climbs, then lets another optimizer step from where it was: as SAM does, whose inner optimizer is its own."""

    def __init__(self, params: Any, within: bool) -> None:
        super().__init__(list(params), {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
        self.within = within

    def step(self, closure: Any = None) -> None:
        if self.within:
            self.base.step()

    @torch.no_grad()
    def climb(self) -> None:
        self.before = [param.data.clone() for param in self.params]
        for param in self.params:
            param.add_(param.grad, alpha=0.05)

    @torch.no_grad()
    def descend(self) -> None:
        for param, value in zip(self.params, self.before, strict=True):
            param.data = value
        self.base.step()

    @property
    def params(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"]]


# ---- what is refused


def another_optimizer(model, module, comm, optimizer):
    other = sgd(model, lr=0.05)
    for step in range(2):
        step_of(module, other, step)


def another_optimizer_after_some_steps(model, module, comm, optimizer):
    step_of(module, optimizer, 0)
    another_optimizer(model, module, comm, optimizer)


def an_inner_optimizer(model, module, comm, optimizer):
    comm.detach()
    outer = Sharpness(model.parameters(), within=False)
    ab.attach(module, outer)
    loss_of(module, 0).backward()
    outer.climb()
    outer.descend()


def steps_within_the_backward_pass(model, module, comm, optimizer):
    for param in model.parameters():
        own = torch.optim.SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    loss_of(module, 0).backward()


def steps_by_hand(model, module, comm, optimizer):
    for step in range(2):
        model.zero_grad()
        loss_of(module, step).backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad


def steps_by_hand_into_new_memory(model, module, comm, optimizer):
    for step in range(2):
        model.zero_grad()
        loss_of(module, step).backward()
        for param in model.parameters():
            param.data = param.data - 0.1 * param.grad


def steps_by_hand_through_data(model, module, comm, optimizer):
    """Which changes no version of a tensor."""
    for step in range(2):
        model.zero_grad()
        loss_of(module, step).backward()
        for param in model.parameters():
            param.data.sub_(0.1 * param.grad.data)


def parameters_assigned(model, module, comm, optimizer):
    step_of(module, optimizer, 0)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    step_of(module, optimizer, 1)


def parameters_assigned_and_a_new_optimizer(model, module, comm, optimizer):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    loss_of(model, 0).backward()
    sgd(model).step()


def a_layer_replaced(model, module, comm, optimizer):
    model[0] = nn.Linear(6, 16)
    loss_of(model, 0).backward()
    optimizer.step()


def a_layer_added(model, module, comm, optimizer):
    model.append(nn.Linear(3, 3))
    loss_of(model, 0).backward()
    optimizer.step()


def a_group_added(model, module, comm, optimizer):
    more = nn.Linear(3, 3)
    optimizer.add_param_group({"params": more.parameters()})
    more(model(torch.ones(2, 6))).sum().backward()
    optimizer.step()


def memory_emptied(model, module, comm, optimizer):
    step_of(module, optimizer, 0)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.1 + dist.get_rank())
    step_of(module, optimizer, 1)


def another_type(model, module, comm, optimizer):
    step_of(model, optimizer, 0)
    model.double()
    loss_of(model, 1, torch.float64).backward()


def other_values_on_one_rank_before_the_first_step(model, module, comm, optimizer):
    if dist.get_rank():
        nn.init.normal_(model[0].weight)
    step_of(module, optimizer, 0)


def other_values_on_one_rank_later(model, module, comm, optimizer):
    for step in range(11):
        if step == 5 and dist.get_rank():
            model.load_state_dict({name: value + 0.1 for name, value in model.state_dict().items()})
        step_of(module, optimizer, step)


def another_learning_rate_on_one_rank(model, module, comm, optimizer):
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + dist.get_rank())
    for step in range(11):
        step_of(module, optimizer, step)


OTHER_OPTIMIZER = r"optimizer must be the one that steps the model, got another one that did: \w+, while "
WRAPPED_AGAIN = ", wrap the model in DistributedDataParallel again, then call"
REPLACED = (
    rf"parameters must be the same as at ab.attach, got .*; call comm.detach\(\)( and|{WRAPPED_AGAIN}) ab.attach again"
)
BY_HAND = "parameters must be changed by the optimizer of ab.attach alone, got .* changed after a backward pass"
NEW_MEMORY = "parameters must keep their type and values between two steps, got others in new memory"
APART = r"parameters must be the same on all ranks, got ones that differ by .* on ranks 0 and 1 after"
REFUSED: dict[Loop, str] = {
    another_optimizer: OTHER_OPTIMIZER + "SGD was passed",
    another_optimizer_after_some_steps: OTHER_OPTIMIZER + "SGD was passed",
    an_inner_optimizer: OTHER_OPTIMIZER + "Sharpness was passed",
    steps_within_the_backward_pass: OTHER_OPTIMIZER,
    steps_by_hand: BY_HAND,
    steps_by_hand_into_new_memory: BY_HAND,
    steps_by_hand_through_data: BY_HAND,
    parameters_assigned: REPLACED,
    parameters_assigned_and_a_new_optimizer: f"{REPLACED}|{OTHER_OPTIMIZER}",
    a_layer_replaced: REPLACED,
    a_layer_added: REPLACED,
    a_group_added: REPLACED,
    memory_emptied: NEW_MEMORY,
    another_type: NEW_MEMORY,
    other_values_on_one_rank_before_the_first_step: APART + " step 1;",
    other_values_on_one_rank_later: APART + " step 10",
    another_learning_rate_on_one_rank: APART + " step 1;",
}
OF_PLAIN_MODULES = (another_type,)  # DistributedDataParallel says so itself


def all_that_is_refused():
    for loop, sentence in REFUSED.items():
        for wrap in (lambda model: model, DistributedDataParallel):
            if loop in OF_PLAIN_MODULES and wrap is DistributedDataParallel:
                continue
            model = net()
            module, optimizer = wrap(model), sgd(model)
            comm = ab.attach(module, optimizer)
            try:
                with refused(sentence):
                    loop(model, module, comm, optimizer)
            except BaseException as error:
                raise AssertionError(f"{loop.__name__}, {type(module).__name__}") from error
            dist.barrier()


def local_steps_of_another_optimizer():
    model = net()
    ab.local(model, sgd(model), "local_sgd", period=2)
    with refused(OTHER_OPTIMIZER):
        step_of(model, sgd(model), 0)


# ---- what is not


def nothing_happens(model, module, comm, optimizer):
    """The reference."""


def weights_clipped_after_a_step(model, module, comm, optimizer):
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-2, 2)


def the_same_weights_loaded(model, module, comm, optimizer):
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def the_same_values_in_new_memory(model, module, comm, optimizer):
    if dist.get_rank() == 0:
        for param in model.parameters():
            param.data = param.data.clone()


def other_weights_for_a_while(model, module, comm, optimizer):
    with comm.evaluating(), torch.no_grad():
        model(torch.ones(2, 6))


def other_models_train(model, module, comm, optimizer):
    other = nn.Linear(3, 1)
    other(model(torch.ones(2, 6)).detach()).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()


def a_module_without_parameters_added(model, module, comm, optimizer):
    model.add_module("last", nn.Identity())


def a_backward_pass_that_is_not_used(model, module, comm, optimizer):
    loss_of(module, 77).backward()
    optimizer.zero_grad()


def an_optimizer_without_gradients(model, module, comm, optimizer):
    optimizer.zero_grad()
    sgd(model).step()


ALLOWED: tuple[Loop, ...] = (
    nothing_happens,
    weights_clipped_after_a_step,
    the_same_weights_loaded,
    the_same_values_in_new_memory,
    other_weights_for_a_while,
    other_models_train,
    a_module_without_parameters_added,
    a_backward_pass_that_is_not_used,
    an_optimizer_without_gradients,
)


def all_that_is_allowed():
    for between in ALLOWED:
        for wrap in (lambda model: model, DistributedDataParallel):
            model = net()
            twin = ByHand(model)
            twin.train(range(12))
            module, optimizer = wrap(model), sgd(model)
            comm = ab.attach(module, optimizer)
            for step in range(12):
                step_of(module, optimizer, step)
                between(model, module, comm, optimizer)
            same(model, twin.model) if len(model) == len(twin.model) else same_on_all(model)
            comm.detach()


def an_outer_optimizer_steps_its_inner_one_within():
    for wrap in (lambda model: model, DistributedDataParallel):
        model = net()
        twin = ByHand(model, lambda its: torch.optim.SGD(its.parameters(), lr=0.1))
        twin.train(range(3))
        module, outer = wrap(model), Sharpness(model.parameters(), within=True)
        ab.attach(module, outer)
        for step in range(3):
            step_of(module, outer, step)
        same(model, twin.model)


def sharpness_aware_steps():
    """The climb is each worker's own, within no_sync; the descent's gradients are exchanged."""
    for wrap in (lambda model: model, DistributedDataParallel):
        model = net()
        module, outer = wrap(model), Sharpness(model.parameters(), within=False)
        comm = ab.attach(module, outer.base)
        for step in range(12):
            outer.zero_grad()
            with comm.no_sync():
                loss_of(module, step).backward()
            outer.climb()
            outer.zero_grad()
            loss_of(module, step).backward()
            outer.descend()
        same_on_all(model)
        comm.detach()


def another_optimizer_after_the_end():
    for wrap in (lambda model: model, DistributedDataParallel):
        model = net()
        module = wrap(model)
        comm, _ = attached(module)
        comm.detach()
        step_of(module, sgd(model), 0)


def all_cases_that_are_allowed():
    all_that_is_allowed()
    an_outer_optimizer_steps_its_inner_one_within()
    sharpness_aware_steps()
    another_optimizer_after_the_end()


# ---- what is told


@contextlib.contextmanager
def heard() -> Any:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("accordion_bench")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def rounding_is_told_once():
    model = net()
    comm, optimizer = attached(model)
    with torch.no_grad():
        model[0].bias[0] += 1e-7 * dist.get_rank()
    with heard() as lines:
        for step in range(11):
            step_of(model, optimizer, step)
    told = [line for line in lines if "as rounding of different processors would have it" in line]
    assert len(told) == (dist.get_rank() == 0)
    comm.detach()


def gradients_that_nobody_uses_are_told_once():
    model = net()
    comm, optimizer = attached(model)
    with heard() as lines:
        for step in range(25):
            optimizer.zero_grad()
            loss_of(model, step).backward()
    told = [line for line in lines if "used by no optimizer of ab.attach" in line]
    assert len(told) == (dist.get_rank() == 0)
    comm.detach()


def what_a_comparison_costs():
    model = net()
    comm, optimizer = attached(model)
    spent = []
    for step in range(12):
        before = comm.comm.ledger.columns()["control_bytes"]
        step_of(model, optimizer, step)
        spent.append(comm.comm.ledger.columns()["control_bytes"] - before)
    assert spent == [8, *[0] * 8, 8, 0, 0]
    comm.detach()


@pytest.mark.parametrize(
    "case",
    [
        all_that_is_refused,
        local_steps_of_another_optimizer,
        all_cases_that_are_allowed,
        rounding_is_told_once,
        gradients_that_nobody_uses_are_told_once,
        what_a_comparison_costs,
    ],
    ids=lambda case: case.__name__,
)
def test_nobody_trains_alone(case, tmp_path):
    play(tmp_path, [case])


def test_each_kind_has_a_sentence():
    assert issubclass(ConfigError, ValueError)
    assert len(REFUSED) == 17 and len(ALLOWED) == 9
