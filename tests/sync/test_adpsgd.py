"""AD-PSGD in float64 beside a plain loop of one gradient after the other; meetings, checkpoints, placements."""

import copy

import pytest
import torch
import torch.nn.functional as F

from accordion_bench.options.checks import ConfigError
from accordion_bench.tensors import keyed_rng
from tests.kit import composed
from tests.kit.local import deviation, placed, resumed, trained, trainer_for
from tests.sync.test_drawn_times import TIMES, time_of

SAME = 1e-13
OURS = ["sync=adpsgd", TIMES]


def partner_of(worker: int, number: int, workers: int = 4) -> int:
    generator = keyed_rng.generator(0, "partner", number)
    return (worker + 1 + int(torch.randint(workers - 1, (), generator=generator))) % workers


def one_after_the_other(trainer, counts: list[int]) -> tuple[list[torch.Tensor], float]:
    """The mean of all workers' parameters, and the seconds, of gradients that are used one at a time.

    Args:
        trainer: has not trained yet.
        counts: how many gradients each of its steps used, which says of which batch a gradient is taken.
    """
    models = [copy.deepcopy(trainer.axis.model) for _ in range(4)]  # x_w
    read = [copy.deepcopy(model) for model in models]  # r_w
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.0, momentum=0.9, weight_decay=1e-4) for m in models]
    ready, draws, used, step, now = [time_of(worker, 0) for worker in range(4)], [1] * 4, 0, 0, 0.0
    for epoch in range(trainer.config.epochs):
        trainer.sampler.begin_epoch(epoch, trainer.position.plan.batch_size)
        trainer.data.begin_epoch(epoch)
        for number in range(trainer.position.steps_per_epoch):
            for _ in range(counts[step]):
                worker = min(range(4), key=ready.__getitem__)
                x, y = trainer.data.train_batch(trainer.sampler.batch(worker, number))
                gradients = torch.autograd.grad(F.cross_entropy(read[worker](x), y), list(read[worker].parameters()))
                mine, theirs = models[worker], models[partner_of(worker, used)]
                with torch.no_grad():
                    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
                        mean = (a + b) / 2
                        a.copy_(mean)
                        b.copy_(mean)
                for param, gradient in zip(mine.parameters(), gradients, strict=True):
                    param.grad = gradient
                optimizers[worker].param_groups[0]["lr"] = trainer.position.lr(number, epoch)
                optimizers[worker].step()
                read[worker].load_state_dict(mine.state_dict())
                now, used = ready[worker], used + 1
                ready[worker] += time_of(worker, draws[worker])
                draws[worker] += 1
            step += 1
    params = zip(*(model.parameters() for model in models), strict=True)
    return [torch.stack([own.detach() for own in all_of_it]).mean(0) for all_of_it in params], now


def counted(trainer) -> list[int]:
    """Trains to the end; returns how many gradients each step used."""
    counts: list[int] = []
    draw = trainer.sync.samples_used

    def counting(batches):
        before = trainer.sync.used
        found = draw(batches)
        counts.append(trainer.sync.used - before)
        return found

    trainer.sync.samples_used = counting
    trainer.fit()
    return counts


@pytest.mark.parametrize("first", [None, 1])
def test_it_is_one_gradient_after_the_other(tmp_path, first):
    options = [*OURS, *([] if first is None else [f"sync.first={first}"])]
    run = trainer_for(tmp_path / "run", *options)
    counts = counted(run)
    expected, seconds = one_after_the_other(trainer_for(tmp_path / "plain", *options), counts)
    assert deviation(run.axis.shared, expected) < SAME
    assert run.last_row["simulated_seconds"] == pytest.approx(seconds, rel=1e-12)
    assert set(counts) == ({1} if first else {1, 2})
    assert run.last_row["took_part"] == pytest.approx(sum(counts) / len(counts))
    assert run.last_row["staleness"] > 1


def test_meetings_keep_the_mean_and_cost_one_model_each_way(tmp_path):
    run = trainer_for(tmp_path, *OURS)
    run.begin_epoch()
    run.train_step()
    scheme = run.sync
    for x_W in scheme.own_W:
        x_W.normal_(generator=torch.Generator().manual_seed(0))
    before = [x_W.mean(0) for x_W in scheme.own_W]
    ledger = run.axis.comm.ledger
    sent = ledger.columns()["payload_bytes"]
    scheme.meetings.pairs = [(0, 3), (1, 2)]
    after = scheme.meetings(scheme.own_W, run.position.info())
    assert deviation([x_W.mean(0) for x_W in after], before) < SAME
    assert all(torch.equal(x_W[0], x_W[3]) and torch.equal(x_W[1], x_W[2]) for x_W in after)
    floats = sum(x_W[0].numel() * x_W.element_size() for x_W in scheme.own_W)
    assert ledger.columns()["payload_bytes"] - sent == floats


def test_a_lone_worker_is_sgd(tmp_path):
    run = trained(tmp_path / "run", "sync=adpsgd", workers=1)
    plain = trained(tmp_path / "plain", workers=1)
    assert deviation(run.axis.shared, plain.axis.shared) < SAME


def test_a_run_goes_on_bit_for_bit(tmp_path):
    whole, again = trained(tmp_path / "whole", *OURS), resumed(tmp_path, *OURS)
    assert all(map(torch.equal, again.axis.shared, whole.axis.shared))
    for key in ("simulated_seconds", "took_part", "staleness", "train_loss"):
        assert again.last_row[key] == whole.last_row[key]


def test_placements(tmp_path):
    alone = trained(tmp_path / "alone", *OURS, "epochs=2").axis.shared
    for processes in (4, 2):
        (found,) = placed(tmp_path, processes, [*OURS, "epochs=2"])
        assert deviation(found, alone) < SAME


@pytest.mark.parametrize(
    "options, said",
    [
        (["sync.first=5"], "sync.first must be at most 4, the number of workers, got 5; type sync.first=4"),
        (["compressor=topk"], "compressor must be none with sync=adpsgd, whose workers meet in pairs"),
        (["batch_size=[4,2,1,1]"], "batch_size must be the same for all workers with sync=adpsgd"),
    ],
)
def test_refusals(options, said):
    with pytest.raises(ConfigError) as refused:
        composed.validated({**composed.cfg("sync=adpsgd", *options), "workers": 4})
    assert str(refused.value).startswith(said), str(refused.value)
