"""Averagings without late workers, drawn: identities in float64, who takes part, bytes, residuals, columns."""

import pytest
import torch

from accordion_bench.batches import weights
from accordion_bench.network.link_model import Network, exchanges_of
from tests.kit import local
from tests.kit.helpers import residuals
from tests.kit.local import deviation, trained, trainer_for

SAME = 1e-13
PERIOD = 3
LATE = ["sync.quorum=2", "sync.lateness=0.5", f"sync.period={PERIOD}"]
PLAIN = {  # every second one is in the default suite: each scheme once
    "local_sgd": ["sync=local_sgd"],
    "slowmo": ["sync=slowmo"],
    "diloco with powersgd": ["sync=diloco", "compressor=powersgd"],
    "diloco": ["sync=diloco"],
    "slowmo with bf16": ["sync=slowmo", "compressor=bf16"],
    "local_sgd with topk": ["sync=local_sgd", "compressor=topk"],
}


def present_of(trainer, averagings: int) -> list[list[int]]:
    """Who will take part in the first averagings; asking changes nothing."""
    late, found = trainer.sync.attendance, []
    for late.averagings in range(averagings):
        found.append(late.present())
    late.averagings = 0
    return found


# ---- nobody is late


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PLAIN)
def test_a_quorum_of_all_is_the_plain_method_bit_for_bit(tmp_path, name):
    options = [*PLAIN[name], "sync.period=5"]
    plain = trained(tmp_path / "plain", *options)
    whole = trained(tmp_path / "whole", *options, "sync.quorum=4", "sync.lateness=0.9")
    never = trained(tmp_path / "never", *options, "sync.quorum=2", "sync.lateness=0")
    for other in (whole, never):
        assert local.all_equal([plain.axis.shared, other.axis.shared])
        assert local.all_equal([*local.replicas(plain), *local.replicas(other)])
        assert plain.comm.ledger.counts == other.comm.ledger.counts
        assert plain.comm.ledger.kinds == other.comm.ledger.kinds
    assert plain.sync.state_dict().keys() == whole.sync.state_dict().keys()
    assert never.sync.attendance.took_part == 4 * never.sync.attendance.averagings == 4 * 4


# ---- some are late


def outer_of(scheme: str):
    """The outer step with explicit lists: z, D, gamma -> z."""
    kept: list = []

    def step(z, D, gamma):
        if not kept:
            kept.extend(torch.zeros_like(value) for value in z)
        out = []
        for i, (value, difference) in enumerate(zip(z, D, strict=True)):
            if scheme == "local_sgd":
                out.append(value - difference)
            elif scheme == "slowmo":
                kept[i] = 0.5 * kept[i] + difference / gamma
                out.append(value - gamma * kept[i])
            else:
                kept[i] = 0.9 * kept[i] + difference
                out.append(value - 0.7 * (difference + 0.9 * kept[i]))
        return out

    return step


@pytest.mark.parametrize("scheme", ["local_sgd", "slowmo", "diloco"])
def test_late_differences_join_the_next_averaging(tmp_path, scheme):
    """Explicit lists: weights by samples since a worker last took part; nothing of what it did in between is lost."""
    run = trainer_for(tmp_path, f"sync={scheme}", *LATE, "sync.buffers=keep", *local.PLAIN_SGD)
    who = present_of(run, 8)
    assert {2, 3, 4} >= {len(present) for present in who} and min(map(len, who)) < 4
    z = [x.detach().clone() for x in run.axis.params]
    pending, missed, outer, gamma = [0] * 4, [0] * 4, outer_of(scheme), []
    most = 0

    def step(taken, lr, models, optimizers):
        nonlocal z, most
        gamma.append(lr)
        if taken % PERIOD:
            return
        present = who[taken // PERIOD - 1]
        pending[:] = [n + PERIOD for n in pending]
        total = sum(pending[w] for w in present)
        D = [sum(pending[w] / total * (value - models[w][i].detach()) for w in present) for i, value in enumerate(z)]
        new = outer(z, D, gamma[-PERIOD])
        for w, own in enumerate(models):
            kept = [value - x.detach() for value, x in zip(z, own, strict=True)]
            local.assign([own], new if w in present else [a - b for a, b in zip(new, kept, strict=True)])
            missed[w] = 0 if w in present else missed[w] + 1
            pending[w] = 0 if w in present else pending[w]
        most = max(most, *missed)
        z = new

    expected = local.twin(run, step, momentum=0, weight_decay=0)
    last: list = []
    local.fitted(run, lambda t: last.__setitem__(slice(None), local.replicas(t)))
    assert most >= 2  # somebody was late twice in a row
    assert max(deviation(a, b) for a, b in zip(last, expected, strict=True)) < SAME
    # the end is exact, with whoever was late for the last averaging
    assert deviation(run.axis.shared, local.mean(expected)) < SAME
    assert local.all_equal([run.axis.shared, *local.replicas(run)]) and not run.sync.attendance.pending


def test_evaluation_sees_late_differences(tmp_path):
    """After the last step of an epoch, which ends with an averaging, the consensus is the mean of all workers."""
    run = trainer_for(tmp_path, "sync=local_sgd", *LATE)
    first, second = present_of(run, 2)
    assert len(second) < 4
    run.begin_epoch()
    for _ in range(2 * PERIOD):
        run.train_step()
    samples = [PERIOD * 4 * (1 if w in first else 2) * (w not in second) for w in range(4)]
    assert run.sync.attendance.samples == samples and not run.sync.since
    assert deviation(run.sync.consensus(), local.mean(local.replicas(run))) < SAME
    assert deviation(run.sync.consensus(), run.axis.shared) > 1e-6


def test_shares_are_weights_by_samples():
    assert weights([12, 12, 12]) == [1.0, 1.0, 1.0]
    assert weights([10, 20, 30]) == [0.5, 1.0, 1.5]
    assert sum(weights([7, 3, 11, 40])) == pytest.approx(4)


# ---- who


@pytest.mark.parametrize("lateness", [0.1, 0.5, 0.9])
def test_draws_are_keyed_and_the_quorum_is_waited_for(tmp_path, lateness):
    runs = [trainer_for(tmp_path / name, "sync=diloco", "sync.quorum=3", f"sync.lateness={lateness}") for name in "ab"]
    other = trainer_for(tmp_path / "c", "sync=diloco", "sync.quorum=3", f"sync.lateness={lateness}", "seed=1")
    many = 2000
    first, again, differ = (present_of(run, many) for run in (*runs, other))
    assert first == again != differ
    assert min(map(len, first)) == 3
    for worker in range(4):  # each is late as often as any other
        left_out = sum(worker not in present for present in first) / many
        at_most_one = 1 - (1 - lateness) ** 4  # some are late: then one is left out
        assert left_out == pytest.approx(at_most_one / 4, abs=0.035)


def test_buffers_are_reset_with_those_who_take_part(tmp_path):
    seen = []

    def watch(trainer):
        if trainer.sync.since == 0:
            seen.append([len(optimizer.state) > 0 for optimizer in trainer.inner.of_replicas])

    run = trainer_for(tmp_path, "sync=slowmo", *LATE)
    who = present_of(run, 8)
    local.fitted(run, watch)
    assert seen == [[worker not in present for worker in range(4)] for present in who]


def test_residuals_of_the_absent_stay(tmp_path):
    run = trainer_for(tmp_path, "sync=local_sgd", *LATE, "compressor=topk", "compressor.density=0.1")
    who, seen = present_of(run, 8), []

    def watch(trainer):
        seen.append({name: x_W.clone() for name, x_W in residuals(trainer.sync.exchange).items()})

    local.fitted(run, watch)
    assert seen[0]
    for k, present in enumerate(who[1:], start=1):
        before, after = seen[(k + 1) * PERIOD - 2], seen[(k + 1) * PERIOD - 1]
        for worker in range(4):
            same = all(torch.equal(before[name][worker], after[name][worker]) for name in before)
            assert same == (worker not in present)


# ---- bytes and columns


def test_bytes_are_those_of_who_takes_part_and_what_the_late_ones_learn(tmp_path):
    """Dense, in float64: 8 N for each who averages, and z (DiLoCo: and its momentum) for each who was late."""
    for scheme, learnt in (("local_sgd", 1), ("slowmo", 2), ("diloco", 2)):
        run = trainer_for(tmp_path / scheme, f"sync={scheme}", *LATE, "sync.final=false")
        who, nbytes = present_of(run, 8), 8 * sum(spec.numel for spec in run.axis.specs)
        local.fitted(run)
        counts, took_part = run.comm.ledger.counts, sum(map(len, who))
        late = 4 * 8 - took_part
        assert counts["payload"] == nbytes * (took_part + learnt * late)
        assert counts["wire"] == nbytes * (sum(2 * (len(present) - 1) for present in who) + learnt * late)
        rounds = sum(2 * (len(present) - 1) + (len(present) < 4) for present in who)
        assert counts["rounds"] == rounds


def test_modelled_times_are_of_all_bytes_in_the_ledger(tmp_path):
    """Averagings are in buckets; what the late ones learn, 8 N each, is in none and takes its time beside."""
    run = trainer_for(tmp_path, "sync=local_sgd", *LATE, "sync.final=false")
    who, nbytes = present_of(run, 8), 8 * sum(spec.numel for spec in run.axis.specs)
    local.fitted(run)
    kinds = exchanges_of(run.comm, overlaps=False)
    sent = sum(kind.times * bucket.wire for kind in kinds for bucket in kind.buckets)
    learnt = nbytes * sum(4 - len(present) for present in who) / 4
    wire = run.comm.ledger.columns()["wire_bytes"]
    assert sent == pytest.approx(wire - learnt)
    codec = sum(kind.times * (bucket.encode + bucket.decode) for kind in kinds for bucket in kind.buckets)
    link = Network(8, 0)
    assert link.exposed(kinds, wire, 0, 4) == pytest.approx(link.alone(kinds, wire, 0, 4) + codec, rel=1e-6)


def test_rows_say_how_many_took_part(tmp_path):
    run = trainer_for(tmp_path, "sync=diloco", *LATE)
    who = present_of(run, 8)
    local.fitted(run)
    rows = run.folder.read_metrics()
    assert [row["averagings"] for row in rows] == [2, 4, 6, 8]
    assert [row["took_part"] for row in rows] == [sum(map(len, who[:k])) / k for k in (2, 4, 6, 8)]
    plain = trained(tmp_path / "plain", "sync=diloco")
    assert not {"averagings", "took_part"} & plain.folder.read_metrics()[-1].keys()
