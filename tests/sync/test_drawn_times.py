"""Drawn worker times in float64: K-sync, K-async and anytime minibatch beside plain loops, the clock, checkpoints."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from accordion_bench.options.checks import ConfigError
from accordion_bench.sync.drawn_times import DrawnTimes
from accordion_bench.tensors import keyed_rng
from tests.kit import composed
from tests.kit.local import deviation, placed, resumed, trained, trainer_for

SAME = 1e-13
TIMES = "sync.worker_times=[[1,1],[2,0.5],[0.5,3],[1,0]]"
PAIRS = [(1, 1), (2, 0.5), (0.5, 3), (1, 0)]
DRAWN = ["sync=drawn_times", TIMES]
RULES = {
    "k_sync": ["sync.first=3"],
    "k_async": ["sync.rule=k_async", "sync.first=2"],
    "anytime": ["sync.rule=anytime", "sync.budget=2"],
}


def time_of(worker: int, number: int) -> float:
    """c + m Exp(1), by inversion of a keyed uniform number."""
    generator = keyed_rng.generator(0, "worker time", worker, number)
    uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
    constant, mean = PAIRS[worker]
    return constant + mean * -math.log(1 - uniform)


def plain(trainer, rule) -> tuple[list[torch.Tensor], float]:
    """A freshly built trainer's run in plain PyTorch, and its simulated seconds.

    Args:
        trainer: has not trained yet.
        rule: called with (step, gradient of (worker, samples)); returns the mean gradient and the seconds of the step.
    """
    model = copy.deepcopy(trainer.axis.model)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.0, momentum=0.9, weight_decay=1e-4)
    step = now = 0
    for epoch in range(trainer.config.epochs):
        trainer.sampler.begin_epoch(epoch, trainer.position.plan.batch_size)
        trainer.data.begin_epoch(epoch)
        for number in range(trainer.position.steps_per_epoch):

            def gradient(worker, samples=None, at=None, number=number):
                x, y = trainer.data.train_batch(trainer.sampler.batch(worker, number))
                net = model if at is None else at
                return torch.autograd.grad(F.cross_entropy(net(x[:samples]), y[:samples]), list(net.parameters()))

            means, now = rule(step, now, gradient, model)
            for param, mean in zip(params, means, strict=True):
                param.grad = mean
            optimizer.param_groups[0]["lr"] = trainer.position.lr(number, epoch)
            optimizer.step()
            step += 1
    return [param.detach() for param in params], now


def mean_of(gradients, weights):
    total = sum(weights)
    return [sum(w * g for w, g in zip(weights, gs, strict=True)) / total for gs in zip(*gradients, strict=True)]


# ---- beside plain loops


def test_k_sync_averages_the_first_and_drops_the_others(tmp_path):
    def rule(step, now, gradient, model):
        times = [time_of(worker, step) for worker in range(4)]
        first = sorted(range(4), key=times.__getitem__)[:3]
        return mean_of([gradient(worker) for worker in first], [1] * 3), now + sorted(times)[2]

    options = [*DRAWN, *RULES["k_sync"]]
    expected, seconds = plain(trainer_for(tmp_path / "plain", *options), rule)
    run = trained(tmp_path / "run", *options)
    assert deviation(run.axis.shared, expected) < SAME
    assert run.last_row["simulated_seconds"] == pytest.approx(seconds, rel=1e-12)
    assert run.last_row["took_part"] == 3 and run.last_row["staleness"] == 0


def test_k_async_applies_stale_gradients_as_they_arrive(tmp_path):
    draws, ready = [1] * 4, [time_of(worker, 0) for worker in range(4)]
    stale: list = []
    read_at, ages = [0] * 4, []

    def rule(step, now, gradient, model):
        for worker in range(4) if not stale else arrived:
            fresh = copy.deepcopy(model)
            stale.append(fresh) if len(stale) < 4 else stale.__setitem__(worker, fresh)
            if step:
                read_at[worker] = step
        order = sorted(range(4), key=ready.__getitem__)[:2]
        arrived[:] = order
        now = max(ready[worker] for worker in order)
        ages.extend(step - read_at[worker] for worker in order)
        found = mean_of([gradient(worker, at=stale[worker]) for worker in order], [1, 1])
        for worker in order:
            ready[worker] = now + time_of(worker, draws[worker])
            draws[worker] += 1
        return found, now

    arrived: list[int] = []
    options = [*DRAWN, *RULES["k_async"]]
    expected, seconds = plain(trainer_for(tmp_path / "plain", *options), rule)
    run = trained(tmp_path / "run", *options)
    assert deviation(run.axis.shared, expected) < SAME
    assert run.last_row["simulated_seconds"] == pytest.approx(seconds, rel=1e-12)
    assert run.last_row["staleness"] == pytest.approx(sum(ages) / len(ages)) and max(ages) > 2


@pytest.mark.parametrize("batches", [None, (7, 2, 3, 1)])
def test_anytime_minibatch_weights_by_samples(tmp_path, batches):
    sizes = batches or (4,) * 4

    def rule(step, now, gradient, model):
        times = [time_of(worker, step) for worker in range(4)]
        last = batches is not None and step % 8 == 7
        own = (2, 1, 1, 1) if last else sizes
        samples = [min(n, math.floor(n * 2 / time)) for n, time in zip(own, times, strict=True)]
        if not any(samples):
            each = [time / n for n, time in zip(own, times, strict=True)]
            fastest = each.index(min(each))
            return gradient(fastest, 1), now + min(each)
        some = [worker for worker in range(4) if samples[worker]]
        gradients = [gradient(worker, samples[worker]) for worker in some]
        return mean_of(gradients, [samples[worker] for worker in some]), now + 2

    options = [*DRAWN, *RULES["anytime"], *([] if batches is None else [f"batch_size={list(batches)}"])]
    expected, seconds = plain(trainer_for(tmp_path / "plain", *options), rule)
    run = trained(tmp_path / "run", *options)
    assert deviation(run.axis.shared, expected) < SAME
    assert run.last_row["simulated_seconds"] == pytest.approx(seconds)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["sync.rule=k_async"],
        ["sync.rule=anytime", "sync.worker_times=[2,0]"],
        ["sync.rule=k_async", "sync.first=4", "sync.worker_times=[0,1]"],
    ],
)
def test_all_gradients_are_a_synchronous_step(tmp_path, options):
    run = trained(tmp_path / "run", "sync=drawn_times", *options)
    plain_run = trained(tmp_path / "plain")
    assert all(map(torch.equal, run.axis.shared, plain_run.axis.shared))
    assert run.last_row["train_loss"] == plain_run.last_row["train_loss"]
    assert run.last_row["payload_bytes"] == plain_run.last_row["payload_bytes"]


# ---- the clock


def test_the_clock_has_the_mean_of_an_order_statistic(tmp_path):
    """E T_(K) = c + m (H_A - H_(A - K)) of A equal workers: 4,000 steps, within five standard errors."""
    run = trainer_for(tmp_path, "sync=drawn_times", "sync.first=3", "sync.worker_times=[1,0.5]")
    seconds = []
    for _ in range(4000):
        before = run.sync.now
        assert sum(n > 0 for n in run.sync.samples_used([4] * 4)) == 3
        seconds.append(run.sync.now - before)
    expected = 1 + 0.5 * (1 / 4 + 1 / 3 + 1 / 2)
    variance = 0.25 * (1 / 16 + 1 / 9 + 1 / 4)
    assert abs(sum(seconds) / 4000 - expected) < 5 * (variance / 4000) ** 0.5
    assert min(seconds) > 1


def test_fewer_gradients_take_less_time(tmp_path):
    def seconds(*options):
        return trained(tmp_path / "-".join(options), *DRAWN, "epochs=1", *options).last_row["simulated_seconds"]

    by_first = [seconds(f"sync.first={first}") for first in (1, 2, 3, 4)]
    assert by_first == sorted(by_first)
    assert seconds("sync.rule=k_async", "sync.first=1") < by_first[0]


# ---- checkpoints and placements


@pytest.mark.parametrize("rule", RULES)
def test_a_run_goes_on_bit_for_bit(tmp_path, rule):
    options = [*DRAWN, *RULES[rule]]
    whole, again = trained(tmp_path / "whole", *options), resumed(tmp_path, *options)
    assert all(map(torch.equal, again.axis.shared, whole.axis.shared))
    for key in ("simulated_seconds", "took_part", "staleness", "train_loss"):
        assert again.last_row[key] == whole.last_row[key]


def test_placements(tmp_path):
    runs = [[*DRAWN, *own, "epochs=2"] for own in RULES.values()]
    alone = [trained(tmp_path / "alone", *own).axis.shared for own in runs]
    for processes in (4, 2):
        for found, expected in zip(placed(tmp_path, processes, *runs), alone, strict=True):
            assert deviation(found, expected) < SAME


# ---- refused


@pytest.mark.parametrize(
    "options, said",
    [
        (["sync.rule=async"], "sync.rule must be one of k_sync, k_async, anytime, got async; type sync.rule="),
        (["sync.first=5"], "sync.first must be at most 4, the number of workers, got 5; type sync.first=4"),
        (["sync.first=0"], "sync.first must be an integer of at least 1, got 0; type sync.first="),
        (["sync.budget=0"], "sync.budget must be a number above 0, got 0; type sync.budget="),
        (
            ["sync.worker_times=[[1,1],[2,1]]"],
            "sync.worker_times must be [constant, mean], or a list of such a pair for each of 4 workers, got "
            "[[1,1],[2,1]]; type sync.worker_times=[[1.0,1.0],[2.0,1.0],[1.0,1.0],[2.0,1.0]]",
        ),
        (["sync.worker_times=[1,-1]"], "sync.worker_times must be [constant, mean] in seconds, at least 0 and not"),
        (["sync.worker_times=[0,0]"], "sync.worker_times must be [constant, mean] in seconds, at least 0 and not"),
        (["sync.worker_times=[]"], "sync.worker_times must be [constant, mean] in seconds, at least 0 and not"),
        (["compressor=topk"], "compressor must be none with sync=drawn_times, which averages the gradients of some"),
        (
            ["comm=gloo", "comm.processes=4", "comm.engine=ddp"],
            "sync must be every_step with comm.engine=ddp, which exchanges gradients, got",
        ),
        (["adaptive=accordion"], "adaptive=accordion steers a compressor, got sync=drawn_times, which averages the"),
    ],
)
def test_refusals(options, said):
    with pytest.raises(ConfigError) as refused:
        composed.validated({**composed.cfg("sync=drawn_times", *options), "workers": 4})
    assert str(refused.value).startswith(said), str(refused.value)


def test_a_scheme_of_equal_workers_needs_no_list():
    assert DrawnTimes(worker_times=[1, 2]).pairs == [(1.0, 2.0)]
