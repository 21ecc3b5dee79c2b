"""Several attachments, several groups of processes, and none any more."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import accordion_bench as ab
from tests.attaching.test_loops import Branches, branched_loss
from tests.kit import collective_order
from tests.kit.loops import METHODS, ByHand, attached, batch, close, loss_of, net, play, same, same_on_all, sgd

WRAPS = {"plain": lambda model: model, "ddp": DistributedDataParallel}


# ---- two models, two optimizers


def judged(judge: nn.Module, made: Tensor, real: bool) -> Tensor:
    wanted = torch.full((len(made),), float(real))
    return nn.functional.binary_cross_entropy_with_logits(judge(made).mean(1), wanted)


class Painter(nn.Sequential):
    """From noise to samples, [.., 6] to [.., 6]."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))


def adversaries(wrap: Any, to_none: bool, painters: dict[str, Any], judges: dict[str, Any]) -> None:
    """The painter's backward pass reaches the judge's parameters, too; those gradients are thrown away."""
    painter, judge = net(make=Painter), net()
    hands = ByHand(painter, **painters), ByHand(judge, **judges)
    wrapped = wrap(painter), wrap(judge)
    optimizers = sgd(painter), sgd(judge)
    comms = [
        ab.attach(model, optimizer, **options)
        for model, optimizer, options in zip(wrapped, optimizers, (painters, judges), strict=True)
    ]
    for step in range(4):
        noise, sample = batch(step)[0], batch(step + 50)[0]
        optimizers[1].zero_grad(set_to_none=to_none)
        hands[1].optimizer.zero_grad()
        for paint, look in (wrapped, [hand.model for hand in hands]):
            with torch.no_grad():
                painted = paint(noise)
            (judged(look, sample, True) + judged(look, painted, False)).backward()
        optimizers[1].step()
        hands[1].mean()
        hands[1].step()
        optimizers[0].zero_grad(set_to_none=to_none)
        hands[0].optimizer.zero_grad()
        for paint, look in (wrapped, [hand.model for hand in hands]):
            look.requires_grad_(False)
            judged(look, paint(noise), True).backward()
            look.requires_grad_(True)
        optimizers[0].step()
        hands[0].mean()
        hands[0].step()
        same(painter, hands[0].model)
        same(judge, hands[1].model)
    for comm in comms:
        comm.detach()


def two_models():
    for options in METHODS.values():
        for to_none in (True, False):
            adversaries(WRAPS["plain"], to_none, options, {})
            adversaries(WRAPS["ddp"], to_none, {}, options)


def a_model_that_others_backward_passes_reach():
    """Nobody freezes the judge: what reaches it from the painter is exchanged and thrown away, without harm."""
    for to_none in (True, False):
        painter, judge = net(make=Painter), net()
        hands = ByHand(painter), ByHand(judge)
        pairs = attached(painter), attached(judge, bucket_cap_mb=1e-4)
        for step in range(4):
            noise, sample = batch(step)[0], batch(step + 50)[0]
            for paint, look, painting, judging, is_hand in (
                (painter, judge, pairs[0][1], pairs[1][1], False),
                (hands[0].model, hands[1].model, hands[0].optimizer, hands[1].optimizer, True),
            ):
                painting.zero_grad(set_to_none=to_none or is_hand)
                judged(look, paint(noise), True).backward()
                if is_hand:
                    hands[0].mean()
                painting.step()
                judging.zero_grad(set_to_none=to_none or is_hand)
                judged(look, sample, True).backward()
                if is_hand:
                    hands[1].mean()
                judging.step()
            same(painter, hands[0].model)
            same(judge, hands[1].model)
        for comm, _ in pairs:
            comm.detach()


# ---- detached


def alone_after_detach():
    """Workers part, and the optimizer has everything that was its own."""
    for name, options in METHODS.items():
        model = net()
        comm, optimizer = attached(model, **options)
        assert (optimizer.param_groups[0]["momentum"] == 0.9) == (name != "signum")
        loss_of(model, 0).backward()
        optimizer.step()
        comm.detach()
        assert optimizer.param_groups[0]["momentum"] == 0.9
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
        assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
        twin = net()
        twin.load_state_dict(model.state_dict())
        optimizers = [sgd(model), sgd(twin)]
        for step in range(1, 4):
            for trained, stepped in zip((model, twin), optimizers, strict=True):
                stepped.zero_grad()
                loss_of(trained, step).backward()
                stepped.step()
        same(model, twin)
        theirs = model[0].weight.detach().clone()
        dist.broadcast(theirs, 0)
        assert dist.get_rank() == 0 or not torch.equal(theirs, model[0].weight)


def attached_again():
    """Workers start with what rank 0 has."""
    model = net()
    optimizer = sgd(model)
    for options in METHODS.values():
        loss_of(model, 0).backward()
        optimizer.step()  # apart
        optimizer = sgd(model)
        comm = ab.attach(model, optimizer, **options)
        same_on_all(model)
        twin = ByHand(model, **options)
        twin.train(range(3))
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        same(model, twin.model)
        comm.detach()


def detached_in_the_middle_of_a_step():
    """What has been sent arrives; the optimizer uses what the worker has."""
    for when in ({}, {"overlap": False}):
        model = net()
        comm, optimizer = attached(model, bucket_cap_mb=1e-4, **when)
        loss_of(model, 0).backward()
        wanted = [param.grad.clone() for param in model.parameters()]
        comm.detach()
        for param, gradient in zip(model.parameters(), wanted, strict=True):
            assert torch.equal(param.grad, gradient)
        optimizer.step()
        comm.detach()


# ---- one process


def a_lone_worker():
    """One worker without compression is the training without us; with it, it is the exchange of one."""
    for name, options in METHODS.items():
        for wrap in WRAPS.values():
            for more in ({}, {"clip_norm": 0.05}) if not options else ({},):
                model = net()
                twin = ByHand(model, **options)
                module, optimizer = wrap(model), sgd(model)
                comm = ab.attach(module, optimizer, **options, **more)
                for step in range(4):
                    optimizer.zero_grad(set_to_none=step % 2 == 0)
                    twin.optimizer.zero_grad()
                    loss_of(module, step).backward()
                    loss_of(twin.model, step).backward()
                    if more:
                        nn.utils.clip_grad_norm_(twin.model.parameters(), 0.05)
                    optimizer.step()
                    twin.mean()
                    twin.step()
                if more:
                    close(model, twin.model, 1e-5)
                else:
                    same(model, twin.model)
                assert comm.metrics()["wire_bytes"] == 0, name
                comm.detach()


def test_a_lone_worker(tmp_path):
    play(tmp_path, [a_lone_worker], workers=1)


# ---- some of the processes


def two_of_three():
    """Ranks 1 and 2 train together; rank 0 does something else. Their own rank 0 leads."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    for wrap in WRAPS.values():
        for options in ({}, {"compressor": "topk", "density": 0.5}):
            model = net()
            if wrap is DistributedDataParallel:
                module = DistributedDataParallel(model, process_group=group)
                optimizer = sgd(model)
                comm = ab.attach(module, optimizer, **options)
            else:
                module, optimizer = model, sgd(model)
                comm = ab.attach(module, optimizer, process_group=group, **options)
            assert (comm.comm.workers, comm.comm.leader) == (2, dist.get_rank() == 1)
            twin = ByHand(model, group=group)
            if not options:
                twin.train(range(3))
            for step in range(3):
                optimizer.zero_grad()
                loss_of(module, step).backward()
                optimizer.step()
            if not options:
                same(model, twin.model)
            same_on_all(model, group)
            comm.end_epoch()
            comm.detach()


def local_steps_of_two_of_three():
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    for sync, options in (("local_sgd", {"period": 2}), ("slowmo", {"period": 2})):
        model = net()
        optimizer = sgd(model)
        with ab.local(model, optimizer, sync, process_group=group, **options):
            for step in range(5):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
        same_on_all(model, group)


def two_groups_side_by_side():
    """Each trains a model of its own."""
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    group = groups[dist.get_rank() > 0]
    model = net()
    twin = ByHand(model, group=group)
    optimizer = sgd(model)
    comm = ab.attach(model, optimizer, process_group=group)
    twin.train(range(3))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    same(model, twin.model)
    comm.detach()


def test_some_of_the_processes(tmp_path):
    play(tmp_path, [two_of_three, local_steps_of_two_of_three, two_groups_side_by_side], workers=3)


# ---- local steps


def local_loops():
    """Averages of parameters by hand, however the loop is written."""
    for shape in ("simple", "to zero", "accumulates", "closure"):
        model = net(torch.float64)
        twin = ByHand(model)
        optimizer = sgd(model)
        comm = ab.local(model, optimizer, "local_sgd", period=2)
        for step in range(6):
            parts = [2 * step, 2 * step + 1] if shape == "accumulates" else [step]

            def backward(trained: nn.Module = model, parts: list[int] = parts) -> Tensor:
                for at in parts:
                    loss = loss_of(trained, at, torch.float64)
                    loss.backward()
                return loss

            optimizer.zero_grad(set_to_none=shape != "to zero")
            if shape == "closure":
                optimizer.step(backward)
            else:
                backward()
                optimizer.step()
            twin.optimizer.zero_grad()
            backward(twin.model)
            twin.optimizer.step()
            if step % 2:
                with torch.no_grad():
                    for param in twin.model.parameters():
                        param.div_(2)
                        dist.all_reduce(param)
        close(model, twin.model)
        comm.detach()


# ---- the order of collectives


def the_order_of_collectives():
    """The same on all workers, whatever parameters their own loss reaches, and in whatever order."""
    with collective_order.recorded() as calls:
        for options in METHODS.values():
            for ddp in (False, True):
                model = net(make=Branches)
                module = DistributedDataParallel(model, find_unused_parameters=True) if ddp else model
                optimizer = sgd(model)
                comm = ab.attach(module, optimizer, **options, bucket_cap_mb=1e-5)
                for step in range(4):
                    optimizer.zero_grad()
                    branched_loss(module, step).backward()
                    if step != 2:
                        optimizer.step()
                comm.end_epoch()
                comm.detach()
    logs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(logs, calls)
    assert len(calls) > 50
    collective_order.compare(logs)


CASES = [
    two_models,
    a_model_that_others_backward_passes_reach,
    alone_after_detach,
    attached_again,
    detached_in_the_middle_of_a_step,
    local_loops,
    the_order_of_collectives,
]


@pytest.mark.sample(5)
@pytest.mark.parametrize("part", range(5))
def test_several_attachments_and_none_any_more(tmp_path, part):
    """Every fifth case by default, all in one pair of processes, which takes longer to start than they do."""
    play(tmp_path, CASES[part::5])
