"""Local SGD: identities with synchronous SGD, when workers average, buffers, evaluation, compression, memory."""

import math

import pytest
import torch

from tests.kit import local
from tests.kit.helpers import residuals, server_residuals
from tests.kit.local import PLAIN_SGD, deviation, trained, trainer_for

LOCAL = "sync=local_sgd"
SAME = 1e-14  # parameters are of size 1


@pytest.mark.parametrize("options", [
    ["optimizer.momentum=0"], ["optimizer.momentum=0.9"], ["optimizer.nesterov=true"],
])  # fmt: skip
def test_period_1_is_synchronous_sgd(tmp_path, options):
    """With coupled weight decay and drops of the learning rate; averaged buffers are the synchronous ones."""
    options = [*options, "optimizer.weight_decay=0.01"]
    dense = trained(tmp_path, *options)
    kept = trained(tmp_path, *options, LOCAL, "sync.period=1")
    assert deviation(kept.axis.shared, dense.axis.shared) < SAME
    assert kept.comm.ledger.counts["payload"] == dense.comm.ledger.counts["payload"]
    if "optimizer.momentum=0" not in options:
        averaged = trained(tmp_path, *options, LOCAL, "sync.period=1", "sync.buffers=average")
        assert deviation(averaged.axis.shared, dense.axis.shared) < SAME
        for row in range(4):
            assert deviation(local.momenta(averaged, row), local.momenta(dense)) < SAME
        counts = averaged.comm.ledger.counts, dense.comm.ledger.counts
        assert [counts[0][key] / counts[1][key] for key in ("payload", "paper_floats")] == [2, 2]
        assert deviation(local.momenta(kept, 0), local.momenta(dense)) > 1e-4


ALONE = {
    "local": [LOCAL, "sync.period=3"],
    "post-local": ["sync=post_local_sgd", "sync.period=3"],
    "post-local, models first": ["sync=post_local_sgd", "sync.period=3", "sync.phase1=model"],
    "groups": ["sync=hierarchical", "sync.groups=[[4,1]]"],
    "cocod": ["sync=overlap_local_sgd", "sync.period=3", "sync.merge=cocod", "sync.beta=0"],
    "slowmo": ["sync=slowmo", "sync.period=3", "sync.beta=0", "sync.buffers=keep"],
    "diloco": ["sync=diloco", "sync.period=3", "sync.outer_lr=1", "sync.outer_momentum=0", "sync.outer_nesterov=false"],
}
EXACT = {"muon": ["optimizer.ns_precision=null"]}  # 8 bits would make much of the last bit of a gradient


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Optimizer -> (what is typed, one worker's run without local steps), trained once."""
    kept = {}

    def of(optimizer: str):
        if optimizer not in kept:
            typed = [f"optimizer={optimizer}", "optimizer.lr=0.01", "epochs=2", *EXACT.get(optimizer, [])]
            kept[optimizer] = typed, trained(tmp_path_factory.mktemp("plain"), *typed, workers=1)
        return kept[optimizer]

    return of


@pytest.mark.sample(4)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize("name", ALONE)
def test_alone_they_are_the_inner_optimizer(tmp_path, plain, name, optimizer):
    typed, expected = plain(optimizer)
    alone = trained(tmp_path, *typed, *ALONE[name], workers=1)
    assert deviation(alone.axis.shared, expected.axis.shared) < SAME


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_alone_but_pulled_back_it_is_another_run(tmp_path, plain, optimizer):
    typed, other = plain(optimizer)
    pulled = trained(tmp_path, *typed, "sync=overlap_local_sgd", "sync.beta=0", workers=1)
    assert deviation(pulled.axis.shared, other.axis.shared) > 1e-4


# ---- when


@pytest.mark.parametrize("overrides, averaged", [
    (["sync.period=4"], [4, 8, 12, 16]),
    (["sync.period=4", "sync.switch_step=6", "epochs=5"], [10, 14, 18]),
    (["sync.period=5"], [5, 10, 15]),
    (["sync.period=1"], list(range(1, 17))),
    (["sync.period=99"], []),
    (["sync.period=3", "sync.switch_step=null"], [11, 14]),  # the learning rate drops after 8 steps
    (["sync.period=3", "sync.switch_step=6", "sync.phase1=model"], [1, 2, 3, 4, 5, 6, 9, 12, 15]),
])  # fmt: skip
def test_workers_average_after_every_period_and_at_the_end(tmp_path, overrides, averaged):
    seen = []

    def watch(trainer):
        if trainer.axis.replicas and local.all_equal(local.replicas(trainer)):
            seen.append(trainer.position.step)

    run = trained(tmp_path, "dataset.train_size=64", LOCAL, *overrides, watch=watch)
    assert seen == averaged
    assert run.comm.ledger.counts["payload"] == 8 * 4 * run.comm.ledger.counts["paper_floats"]  # in float64, 4 workers
    assert local.all_equal(local.replicas(run)) and local.all_equal([local.replicas(run)[0], run.axis.shared])


def test_equals_plain_torch(tmp_path):
    """A round of 5 steps: the learning rate drops inside one, and the tail is averaged."""
    run = trainer_for(tmp_path, LOCAL, "sync.period=5", "sync.switch_step=2")

    def average(taken, lr, models, optimizers):
        if taken <= 2:  # the same gradient everywhere, hence the same momentum
            local.assign(models, local.mean(models))
            states = [[o.state[x]["momentum_buffer"] for x in own] for o, own in zip(optimizers, models, strict=True)]
            local.assign(states, local.mean(states))
        elif (taken - 2) % 5 == 0:
            local.assign(models, local.mean(models))

    expected = local.twin(run, average)
    own = []
    local.fitted(run, lambda t: own.append(local.replicas(t)))
    assert deviation([x for model in own[-1] for x in model], [x for model in expected for x in model]) < SAME
    assert not local.all_equal(own[-1])
    assert deviation(run.axis.shared, local.mean(expected)) < SAME


def test_without_a_last_average(tmp_path):
    run = trained(tmp_path, LOCAL, "sync.period=5", "sync.final=false")
    assert not local.all_equal(local.replicas(run))
    assert deviation(local.consensus(run), local.mean(local.replicas(run))) < SAME


# ---- the switch


@pytest.mark.parametrize("compressor", ["none", "topk"])
def test_before_the_switch_it_is_synchronous_bit_for_bit(tmp_path, compressor):
    dense, post = [], []

    def note(into):
        return lambda t: into.append(
            ([x.clone() for x in t.axis.shared], dict(t.comm.ledger.counts)) if t.position.step <= 12 else None
        )

    trained(tmp_path, f"compressor={compressor}", watch=note(dense))
    run = trained(tmp_path, f"compressor={compressor}", "sync=post_local_sgd", "sync.period=4", watch=note(post))
    assert run.sync.switch == 2  # the epoch of the drop: 12 steps
    for (a, bytes_a), (b, bytes_b) in zip(dense[:12], post[:12], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) and bytes_a == bytes_b
    assert run.inner.common.state == {} and len(run.inner.of_replicas) == 4
    assert [place.name for place in run.sync.exchanges()] == ["pseudo_gradient-4"]


def test_two_versions_of_the_first_phase(tmp_path):
    """Equal parameters until the switch, other buffers and hence other parameters after it."""
    seen = {}
    for phase1 in ("gradient", "model"):
        seen[phase1] = []
        overrides = [LOCAL, "sync.switch_step=10", "sync.period=4", f"sync.phase1={phase1}"]
        trained(tmp_path, *overrides, watch=lambda t, into=seen[phase1]: into.append(local.consensus(t)))
    apart = [deviation(a, b) for a, b in zip(*seen.values(), strict=True)]
    assert max(apart[:10]) < SAME and min(apart[13:]) > 1e-7


@pytest.mark.parametrize("phase1", ["gradient", "model"])
def test_reset_begins_with_the_first_round_and_leaves_synchronous_steps_alone(tmp_path, phase1):
    """SlowMo zeroes the buffers at the start of every round; before the switch there is no round."""
    overrides = ["sync=slowmo", "sync.period=4", "sync.switch_step=6", f"sync.phase1={phase1}"]
    seen, sync = [], []
    run = trainer_for(tmp_path, *overrides)

    def watch(trainer):
        seen.append([x.clone() for x in trainer.axis.shared])
        if trainer.position.step == 7:  # one step after a reset: the momentum is the gradient
            for row, own in enumerate(trainer.axis.replicas):
                gradients = [g_W[row] for g_W in trainer.axis.gradients_W]
                decayed = [g + 1e-4 * z for g, z in zip(gradients, trainer.axis.shared, strict=True)]
                assert deviation(local.momenta(trainer, row), decayed) < SAME and own

    local.fitted(run, watch)
    trained(tmp_path, watch=lambda t: sync.append([x.clone() for x in t.axis.shared]))
    assert max(deviation(a, b) for a, b in zip(seen[:6], sync[:6], strict=True)) < SAME


def test_sums_of_gradients_do_not_go_on_with_differences(tmp_path):
    """The switch after 3 of 6 steps: what is summed of the epoch's updates, and of recent messages, begins anew."""
    shared, counts = [], []

    def watch(trainer):
        shared.append([x.clone() for x in trainer.axis.shared])
        counts.append(trainer.policy_runner.recent_count)

    options = ["compressor=topk", "epochs=2", "sync.switch_step=3", "adaptive=[lgreco,accordion_sync]"]
    options += ["adaptive.accordion_sync.statistic=update", "adaptive.accordion_sync.interval=1"]
    options += ["adaptive.lgreco.every=6", "adaptive.lgreco.samples=6"]
    run = trained(tmp_path, LOCAL, *options, watch=watch)
    moved = torch.cat([(a - b).flatten() for a, b in zip(shared[5], shared[2], strict=True)])
    decided = run.folder.read_metrics()[0]["decisions"]["accordion_sync"]
    assert decided["norm"] == [pytest.approx(float(moved.norm()), rel=1e-12)]
    assert counts[:6] == [1, 2, 3, 0, 1, 1]  # averaged after step 5


@pytest.mark.parametrize("sync", ["local_sgd", "diloco"])
def test_a_compressor_with_momentum_leaves_it_to_any_inner_optimizer(tmp_path, sync):
    """Where no gradients are exchanged; dist-EF's own momentum is taken out, and its step."""
    run = trained(tmp_path, f"sync={sync}", "sync.period=4", "compressor=distefblocksgd", "optimizer=adamw", "epochs=1")
    assert run.runner.gradients.compressor.traits.optimizer.owns == frozenset()
    assert "exp_avg" in run.inner.of_replicas[0].state[run.axis.replicas[0][0]]
    plain = trained(tmp_path, f"sync={sync}", "sync.period=4", "compressor=distefblocksgd")
    assert plain.inner.common.param_groups[0]["momentum"] == 0.9


# ---- buffers


def test_buffers_follow_their_policy(tmp_path):
    def state_after_the_average(*overrides):
        found = []

        def watch(trainer):
            if trainer.position.step == 3:
                states = [trainer.inner.of_replicas[w].state[trainer.axis.replicas[w][0]] for w in range(4)]
                found.extend({k: v.clone() for k, v in state.items()} for state in states)

        trained(tmp_path, "sync.period=3", "epochs=1", *overrides, watch=watch)
        return found

    def equal(states, key):
        return all(torch.equal(state[key], states[0][key]) for state in states)

    for options in ([LOCAL], ["sync=diloco"]):
        assert not equal(state_after_the_average(*options), "momentum_buffer")
    averaged = state_after_the_average(LOCAL, "sync.buffers=average")
    kept = state_after_the_average(LOCAL)
    assert equal(averaged, "momentum_buffer")
    mean = torch.stack([state["momentum_buffer"] for state in kept]).mean(0)
    assert float((averaged[0]["momentum_buffer"] - mean).abs().max()) < SAME
    assert state_after_the_average(LOCAL, "sync.buffers=reset") == [{}] * 4
    assert state_after_the_average("sync=slowmo") == [{}] * 4  # the paper, for SGD
    adam = state_after_the_average("sync=slowmo", "optimizer=adamw")  # and for Adam
    assert not equal(adam, "exp_avg") and float(adam[0]["step"]) == 3
    averaged = state_after_the_average(LOCAL, "sync.buffers=average", "optimizer=adamw")
    assert equal(averaged, "exp_avg") and equal(averaged, "exp_avg_sq") and float(averaged[0]["step"]) == 3
    assert state_after_the_average(LOCAL, "sync.buffers=reset", "optimizer=adamw") == [{}] * 4


# ---- evaluation


@pytest.mark.sample(3)
@pytest.mark.parametrize("sync", ["local_sgd", "slowmo", "overlap_local_sgd", "hierarchical"])
@pytest.mark.parametrize("bn", ["pooled", "recompute"])
def test_evaluation_in_mid_round_changes_nothing(tmp_path, sync, bn):
    """With BatchNorm and dropout."""
    net = ["model._target_=tests.kit.tiny.Net", f"bn={bn}", f"sync={sync}", "epochs=2"]
    net += ["sync.groups=[[2,2],[8,4]]"] if sync == "hierarchical" else ["sync.period=4"]
    evaluated, blind = trainer_for(tmp_path, *net), trainer_for(tmp_path, *net)
    blind.evaluate = lambda: {"test_loss": 0.0, "accuracy": 0.0}
    for run in (evaluated, blind):
        local.fitted(run)
    assert evaluated.folder.read_metrics()[0]["test_loss"] > 0
    for a, b in zip(local.replicas(evaluated), local.replicas(blind), strict=True):
        assert local.all_equal([a, b])
    for name, buffer_W in evaluated.axis.buffers_W.items():
        assert torch.equal(buffer_W, blind.axis.buffers_W[name])


def test_what_is_evaluated_is_the_mean_with_its_own_statistics(tmp_path):
    """bn=recompute estimates for the mean of the workers, not for a worker or the last consensus."""
    net = ["model._target_=tests.kit.tiny.Net", "sync=local_sgd", "sync.period=4"]
    run = trainer_for(tmp_path, *net, "bn=recompute")
    run.begin_epoch()
    for _ in range(2):
        run.train_step()
    before = local.replicas(run)
    used = {}
    recompute, evaluate_with = run.axis.recompute_buffers, run.axis.evaluate_with

    def spied(values, forward, batches):
        used["recomputed"] = [value.clone() for value in values]
        return recompute(values, forward, batches)

    def seen(values, buffers):
        used.setdefault("evaluated", [value.clone() for value in values])
        evaluate_with(values, buffers)

    run.axis.recompute_buffers, run.axis.evaluate_with = spied, seen
    assert math.isfinite(run.evaluate()["test_loss"])
    for values in used.values():
        assert deviation(values, local.mean(before)) < 1e-6
    assert len(used) == 2 and deviation(used["evaluated"], run.axis.shared) > 1e-4
    assert all(local.all_equal([a, b]) for a, b in zip(before, local.replicas(run), strict=True))


def test_batchnorm_of_replicas_is_pooled(tmp_path):
    """Workers' means differ more, the longer they are apart: their variance belongs to the pooled variance."""
    run = trainer_for(tmp_path, "model._target_=tests.kit.tiny.Net", "sync=local_sgd", "sync.period=99")
    run.begin_epoch()
    for _ in range(6):
        run.train_step()
    means, variances = (run.axis.buffers_W[f"norm.running_{kind}"].double() for kind in ("mean", "var"))
    pooled = run.axis.consensus_buffers()[0]
    between = means.var(0, correction=0)
    torch.testing.assert_close(pooled["norm.running_var"].double(), variances.mean(0) + between, rtol=1e-6, atol=0)
    assert float(between.max()) > 1e-4 and pooled["norm.num_batches_tracked"].dtype == torch.int64


def test_a_parameter_that_one_worker_does_not_reach(tmp_path):
    """It counts with a zero gradient there, and the mean is over all workers."""
    run = trainer_for(
        tmp_path, "model._target_=tests.kit.local.Sometimes", LOCAL, "sync.period=2", *PLAIN_SGD, "epochs=1"
    )
    reached = []
    backward = run.axis.backward

    def spied(row, *rest):
        loss = backward(row, *rest)
        reached.append(run.axis.params[-1].grad is not None)
        return loss

    run.axis.backward = spied

    def average(taken, lr, models, optimizers):
        if taken % 2 == 0:
            local.assign(models, local.mean(models))

    expected = local.twin(run, average, momentum=0, weight_decay=0)
    local.fitted(run)
    by_step = [reached[i : i + 4] for i in range(0, len(reached), 4)]
    assert any(any(row) and not all(row) for row in by_step)
    assert deviation(run.axis.shared, expected[0]) < SAME


# ---- compression


def exchanges_of(run, see):
    """Let `see` look at every exchange: called before with (exchange, differences), and its result with the updates."""
    exchanged = run.runner.run

    def spied(exchanges, xs_W):
        after = see(exchanges[0], [x.clone() for x in xs_W[0]])
        completed = exchanged(exchanges, xs_W)
        after(completed.updates[0])
        return completed

    run.runner.run = spied


def test_two_way_signs_with_error_feedback_lose_nothing(tmp_path):
    """y = z - (E~ + mean E_w) takes exactly the uncompressed average: y <- y - mean(z - x_w)."""
    run = trainer_for(tmp_path, LOCAL, "sync.period=4", "compressor=distefblocksgd")
    worst = []

    def virtual():
        mine, server = residuals(run.exchange), server_residuals(run.exchange)
        pairs = zip(run.axis.specs, run.axis.shared, strict=True)
        return [z - (mine[s.name].mean(0) + server[s.name]) if s.name in mine else z.clone() for s, z in pairs]

    def see(exchange, differences):
        before = virtual()
        exact = [y - d.mean(0) for y, d in zip(before, differences, strict=True)]
        worst.append(exact)
        return lambda updates: None

    exchanges_of(run, see)
    apart = []
    local.fitted(run, lambda t: apart.append(deviation(virtual(), worst[-1])) if t.position.step % 4 == 0 else None)
    assert len(apart) == 6 and max(apart) < SAME
    assert max(float(e.abs().max()) for e in server_residuals(run.exchange).values()) > 1e-4


def test_with_period_1_and_local_nesterov_it_is_dist_ef_sgdm(tmp_path):
    """Under a schedule: residuals are in the units of the parameters in both."""
    overrides = ["compressor=distefblocksgd", "optimizer.nesterov=true", "optimizer.weight_decay=0"]
    every_step = trained(tmp_path, *overrides)
    local_steps = trained(tmp_path, *overrides, LOCAL, "sync.period=1")
    assert deviation(local_steps.axis.shared, every_step.axis.shared) < 1e-12
    assert local_steps.comm.ledger.counts["payload"] == every_step.comm.ledger.counts["payload"]
    dense = trained(tmp_path, "optimizer.nesterov=true", "optimizer.weight_decay=0")
    assert deviation(dense.axis.shared, every_step.axis.shared) > 1e-3


def test_topk_keeps_what_it_does_not_send(tmp_path):
    run = trainer_for(tmp_path, LOCAL, "sync.period=4", "compressor=topk", "compressor.density=0.1")
    seen = []

    def see(exchange, differences):
        old = {name: e.clone() for name, e in residuals(exchange).items()}
        named = dict(zip([spec.name for spec in exchange.specs], differences, strict=True))

        def after(updates):
            for (name, new), update in zip(residuals(exchange).items(), updates[::2], strict=True):
                sent = old[name] + named[name] - new
                assert float((sent.mean(0) - update).abs().max()) < SAME
                kept = sent.abs() > 1e-15
                assert bool((new.abs() <= 1e-7 * sent.abs())[kept].all())  # values travel in float32
                assert bool((kept.flatten(1).sum(1) == round(0.1 * new[0].numel())).all())
                seen.append(name)

        return after

    exchanges_of(run, see)
    local.fitted(run)
    assert seen == ["a.weight", "b.weight"] * 6


def test_everything_sent_is_local_sgd(tmp_path):
    """As float32, in which the values travel."""
    everything = trained(tmp_path, LOCAL, "compressor=topk", "compressor.density=1", "sync.period=5")
    assert deviation(everything.axis.shared, trained(tmp_path, LOCAL, "sync.period=5").axis.shared) < 1e-8


# ---- bytes and memory


@pytest.mark.parametrize("period", [1, 3, 5])
def test_bytes_are_the_formula(tmp_path, period):
    run = trained(tmp_path, "model._target_=tests.kit.models.Plain", LOCAL, f"sync.period={period}")
    columns, d = run.comm.ledger.columns(), sum(spec.numel for spec in run.axis.specs)
    averages = -(-24 // period)  # with the last one
    assert columns["payload_bytes"] == averages * 4 * d
    assert columns["wire_bytes"] == averages * 4 * d * 2 * 3 // 4 and columns["inner_wire_bytes"] == 0
    assert columns["rounds"] == averages * 2 * 3 and columns["dense_bytes"] == 24 * 4 * d


@pytest.mark.parametrize("optimizer, models", [("sgd", 2), ("adamw", 3)])
def test_averaged_buffers_cost_as_much_again_each(tmp_path, optimizer, models):
    """And Adam's counts of steps nothing."""
    overrides = [f"optimizer={optimizer}", LOCAL, "sync.period=3", "sync.buffers=average", "epochs=1"]
    run = trained(tmp_path, "model._target_=tests.kit.models.Plain", *overrides)
    d = sum(spec.numel for spec in run.axis.specs)
    assert run.comm.ledger.columns()["payload_bytes"] == 2 * models * 4 * d


def test_replicas_of_equal_shape_lie_side_by_side(tmp_path):
    run = trainer_for(tmp_path, "model._target_=tests.kit.tiny.Net", LOCAL)
    by_shape = {}
    for own in run.axis.replicas:
        for spec, x in zip(run.axis.specs, own, strict=True):
            by_shape.setdefault(spec.shape, set()).add(x.untyped_storage().data_ptr())
    assert len(by_shape) == 5 and all(len(storages) == 1 for storages in by_shape.values())


def stored(value, seen=None) -> dict:
    """Bytes of every tensor storage that an object reaches."""
    seen, found = seen if seen is not None else set(), {}
    if id(value) in seen:
        return found
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        inner = [value.grad] if value.is_leaf and value.grad is not None else []
    elif isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple):
        inner = list(value)
    else:
        inner = [vars(value)] if hasattr(value, "__dict__") and not isinstance(value, type) else []
    for part in inner:
        found |= stored(part, seen)
    return found


@pytest.mark.parametrize("sync, models", [("slowmo", 1), ("diloco", 1), ("hierarchical", 2)])
def test_memory_beyond_local_sgd(tmp_path, sync, models):
    """SlowMo's and DiLoCo's one buffer, the anchors of two local groups; whatever the number of workers."""

    def held(*overrides):
        run = trained(tmp_path, "sync.buffers=keep", *overrides, "epochs=2")
        model = sum(spec.numel for spec in run.axis.specs) * 8
        return sum(stored([run.axis, run.sync, run.inner.of_replicas]).values()) / model

    base = held(LOCAL, "sync.period=4")
    groups = ["sync.groups=[[2,2],[4,4]]"] if sync == "hierarchical" else ["sync.period=4"]
    assert 12 <= base < 14.5  # of 4 workers: parameters, gradients, momentum; the model with its last gradient
    assert held(f"sync={sync}", *groups) - base == pytest.approx(models, abs=0.3)


def test_dist_ef_goes_with_models_first(tmp_path):
    run = trained(tmp_path, LOCAL, "compressor=distefblocksgd", "sync.switch_step=6", "sync.phase1=model", "epochs=2")
    assert all(optimizer.defaults["momentum"] == 0.9 for optimizer in run.inner.of_replicas)
