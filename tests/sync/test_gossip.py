"""Gossip against explicit lists; averaging in each step; the mean that it keeps; bytes, distance."""

import pytest
import torch

from accordion_bench.sync.gossip import GRAPHS, shifts
from tests.kit import local
from tests.kit.local import PLAIN_SGD, deviation, trained, trainer_for

GOSSIP, SAME = "sync=gossip", 1e-13


# ---- who sends to whom


def test_neighbours():
    assert [shifts("exponential", 8, turn) for turn in range(4)] == [[1], [2], [4], [1]]
    assert [shifts("exponential", 5, turn) for turn in range(4)] == [[1], [2], [4], [1]]
    assert [shifts("exponential", 4, turn) for turn in range(3)] == [[1], [2], [1]]
    assert shifts("ring", 5, 7) == [1, 4] and shifts("ring", 2, 0) == [1] and shifts("complete", 4, 0) == [1, 2, 3]
    assert all(shifts(graph, 1, 3) == [] for graph in GRAPHS)


@pytest.mark.parametrize("workers, rounds", [(2, 1), (4, 2), (8, 3)])
def test_one_peer_after_the_other_makes_all_equal(tmp_path, workers, rounds):
    """Of 2^d workers in d rounds, without gradients; before the last round they are not."""
    run = trainer_for(tmp_path, GOSSIP, "optimizer.lr=0", *PLAIN_SGD, "dataset.train_size=192", workers=workers)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for own in run.axis.replicas:
            for x in own:
                x.add_(torch.randn(x.shape, generator=generator, dtype=x.dtype))
    mean, apart = local.mean(run.axis.replicas), []
    run.begin_epoch()
    for _ in range(rounds):
        apart.append(max(deviation(own, mean) for own in local.replicas(run)))
        run.train_step()
    assert min(apart) > 1e-2 and max(deviation(own, mean) for own in local.replicas(run)) < 1e-14


# ---- runs


def reference(run, graph, period, delay):
    """x and u of every worker by a matrix of weights; what is under way; gradients at z = x / u."""
    A = run.comm.workers
    x = [[p.detach().clone() for p in run.axis.params] for _ in range(A)]
    z = [[p.clone() for p in own] for own in x]
    at = {"u": [1.0] * A, "coming": None, "mean": local.mean(x), "kept": 0.0}

    def total():
        sent = at["coming"][0] if at["coming"] else [[torch.zeros_like(p) for p in own] for own in x]
        return [sum(x[w][i] + sent[w][i] for w in range(A)) / A for i in range(len(x[0]))]

    @torch.no_grad()
    def after_step(taken, lr, models, optimizers):
        moves = [[now - before for now, before in zip(m, own, strict=True)] for m, own in zip(models, z, strict=True)]
        for own, steps in zip(x, moves, strict=True):
            torch._foreach_add_(own, steps)
        if at["coming"] and (taken - 1) % period == 0:
            values, masses = at["coming"]
            for w in range(A):
                torch._foreach_add_(x[w], values[w])
                at["u"][w] += masses[w]
            at["coming"] = None
        if taken % period == 0:
            turn = taken // period - 1
            hops = shifts(graph, A, turn)
            P = torch.eye(A, dtype=torch.float64)
            for hop in hops:
                P += torch.eye(A, dtype=torch.float64).roll(hop, 0)
            P /= 1 + len(hops)
            assert float((P.sum(0) - 1).abs().max()) < 1e-15 > float((P.sum(1) - 1).abs().max())
            own, others = P.diag().diag(), P - P.diag().diag()
            mixed = {}
            for key, weights in {"own": own, "others": others}.items():
                values = [[sum(weights[w, j] * x[j][i] for j in range(A)) for i in range(len(x[0]))] for w in range(A)]
                mixed[key] = values, (weights @ torch.tensor(at["u"], dtype=torch.float64)).tolist()
            if delay:
                (x[:], at["u"]), at["coming"] = mixed["own"], mixed["others"]
            else:
                parts = zip(mixed["own"][0], mixed["others"][0], strict=True)
                x[:] = [[a + b for a, b in zip(*pair, strict=True)] for pair in parts]
        for w in range(A):
            local.assign([models[w], z[w]], [value / at["u"][w] for value in x[w]])
        # the mean, with what is under way, is moved by the mean step alone
        at["mean"] = [m + step for m, step in zip(at["mean"], local.mean(moves), strict=True)]
        at["kept"] = max(at["kept"], deviation(at["mean"], total()))

    return after_step, at


@pytest.mark.sample(3)
@pytest.mark.parametrize("period", [1, 2])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("graph, workers", [
    ("exponential", 4), ("ring", 5), ("exponential", 3), ("complete", 4), ("ring", 2), ("exponential", 1),
])  # fmt: skip
def test_equals_explicit_lists(tmp_path, graph, workers, delay, period):
    options = [f"sync.graph={graph}", f"sync.delay={delay}", f"sync.period={period}", "optimizer.weight_decay=0"]
    run = trainer_for(tmp_path, GOSSIP, *options, "epochs=2", workers=workers)
    after_step, at = reference(run, graph, period, delay)
    expected = local.twin(run, after_step, weight_decay=0)
    last: list = []
    local.fitted(run, lambda t: last.__setitem__(slice(None), local.replicas(t)))
    assert max(deviation(a, b) for a, b in zip(last, expected, strict=True)) < SAME
    assert at["kept"] < SAME and run.sync.u == pytest.approx(at["u"][0], rel=1e-14)
    assert max(at["u"]) - min(at["u"]) < 1e-15 and (at["u"][0] < 1) == (delay == 1 and workers > 1)
    assert deviation(run.axis.shared, local.mean(expected)) < SAME and local.all_equal(local.replicas(run))


def test_a_complete_graph_is_averaging_in_each_step(tmp_path):
    mixed: list = []
    averaged: list = []
    trained(tmp_path, GOSSIP, "sync.graph=complete", watch=lambda t: mixed.append(local.replicas(t)))
    trained(tmp_path, "sync=local_sgd", "sync.period=1", watch=lambda t: averaged.append(local.replicas(t)))
    assert (
        max(
            deviation(ours, theirs)
            for step, other in zip(mixed, averaged, strict=True)
            for ours, theirs in zip(step, other, strict=True)
        )
        < 1e-14
    )


@pytest.mark.parametrize("graph, messages", [("exponential", 1), ("ring", 2), ("complete", 3)])
def test_bytes_are_a_model_for_each_neighbour(tmp_path, graph, messages):
    typed = [GOSSIP, f"sync.graph={graph}", "model._target_=tests.kit.models.Plain", "sync.period=2"]
    run = trained(tmp_path, *typed)
    d, columns = sum(spec.numel for spec in run.axis.specs), run.comm.ledger.columns()
    assert columns["payload_bytes"] == (12 * messages + 1) * 4 * d
    assert columns["wire_bytes"] == 12 * messages * 4 * d + 2 * 3 / 4 * 4 * d
    assert columns["rounds"] == 12 * messages + 2 * 3
    assert columns["paper_floats"] == (12 * messages + 1) * d
    assert run.sync.exchange.predicted_bytes(run.position.info()) == 4 * messages * d


@pytest.mark.parametrize("delay", [0, 1])
def test_rows_say_how_far_the_workers_are_apart(tmp_path, delay):
    """Evaluated is the mean of z_w; the last row says what was before the exact average."""
    seen = []

    def watch(trainer):
        models = local.replicas(trainer)
        mean = local.mean(models)
        squares = sum(float((x - m).square().sum()) for own in models for x, m in zip(own, mean, strict=True))
        seen.append(((squares / 4) ** 0.5, deviation(local.consensus(trainer), mean)))

    run = trained(tmp_path, GOSSIP, f"sync.delay={delay}", watch=watch)
    rows = run.folder.read_metrics()
    told = [row["consensus_distance"] for row in rows]
    assert told == pytest.approx([seen[step][0] for step in (5, 11, 17, 23)], rel=1e-12) and min(told) > 1e-4
    assert max(apart for _, apart in seen) < 1e-14


def test_more_neighbours_keep_workers_closer(tmp_path):
    found = {}
    for graph in GRAPHS:
        run = trained(tmp_path / graph, GOSSIP, f"sync.graph={graph}", "dataset.train_size=256", workers=8)
        found[graph] = run.folder.read_metrics()[0]["consensus_distance"]
    assert found["complete"] < 1e-14 < found["exponential"] and found["complete"] < found["ring"]
