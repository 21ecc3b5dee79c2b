"""What every compressor owes, for every YAML of the group; a new file is tested by being there."""

import pytest
import torch

from accordion_bench import config
from accordion_bench.check import ConfigError
from accordion_bench.comm import Comm
from tests.helpers import SPECS, compressor, exchange_for, gradients, residuals, yaml_names, yaml_node

NAMES = yaml_names("compressor")
LEVELS = {"rank": [1, 2, 4, 1000], "density": [0.01, 0.1, 0.5, 0.99, 1.0]}


def levels_of(name):
    return LEVELS.get(compressor(name).compressor.knob, [None])


CASES = [(name, level) for name in NAMES for level in levels_of(name)]
EF = [name for name in NAMES if "error_feedback" in yaml_node("compressor", name)]


def run_steps(exchange, plan, steps=3, workers=4, dtype=torch.float64):
    out = []
    for step in range(steps):
        xs_W = gradients(workers=workers, step=step, dtype=dtype).tensors
        out.append(([x.clone() for x in xs_W], exchange(xs_W, plan, step, lr=0.1)))
    return out


@pytest.mark.parametrize("workers", [1, 2, 4, 16])
@pytest.mark.parametrize(("name", "level"), CASES)
def test_ledger_equals_prediction(name, level, workers):
    exchange, plan = exchange_for(name, workers, level=level, dtype=torch.float32)
    for step in range(2):
        exchange(gradients(workers=workers, step=step, dtype=torch.float32).tensors, plan, step, lr=0.1)
        exchange.comm.ledger.dense_step(exchange.numel)
    columns = exchange.comm.ledger.columns()
    assert columns["payload_bytes"] == 2 * exchange.predicted_bytes(plan, 0)
    assert columns["dense_bytes"] == 2 * 4 * sum(spec.numel for spec in SPECS)


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize(("name", "level"), CASES)
def test_never_more_wire_than_dense(name, level, workers):
    """One all-reduce or all-gather for each tensor, whichever the rule has chosen, costs at most a dense all-reduce."""
    exchange, plan = exchange_for(name, workers, level=level, dtype=torch.float32)
    exchange(gradients(workers=workers, dtype=torch.float32).tensors, plan, 0, lr=0.1)
    exchange.comm.ledger.dense_step(exchange.numel)
    columns = exchange.comm.ledger.columns()
    assert columns["wire_bytes"] <= columns["dense_wire_bytes"]


@pytest.mark.parametrize(("name", "level"), CASES)
def test_zero_gradients_stay_zero_and_finite(name, level):
    exchange, plan = exchange_for(name, level=level)
    zeros = [torch.zeros_like(x) for x in gradients().tensors]
    for step in range(2):
        assert all((update == 0).all() for update in exchange(zeros, plan, step, lr=0.1))
    # and the way back: the next real gradient is not lost
    xs_W = gradients().tensors
    updates = exchange(xs_W, plan, 2, lr=0.1)
    assert all(update.isfinite().all() for update in updates)
    cosine = torch.cosine_similarity(flat(updates), flat([x.mean(0) for x in xs_W]), dim=0)
    assert cosine > 0.1


def flat(tensors):
    return torch.cat([t.reshape(-1) for t in tensors])


@pytest.mark.parametrize(("name", "level"), CASES)
def test_inputs_and_global_rng_are_left_alone(name, level):
    exchange, plan = exchange_for(name, level=level)
    before = torch.get_rng_state()
    run_steps(exchange, plan)
    xs_W = gradients(step=9).tensors
    exchange(xs_W, plan, 9, lr=0.1)
    assert all(torch.equal(x, y) for x, y in zip(xs_W, gradients(step=9).tensors, strict=True))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("name", "level"), CASES)
def test_update_is_the_mean_of_what_was_sent(name, level):
    built = compressor(name, **({"error_feedback": False} if name in EF else {})).compressor
    exchange, plan = exchange_for(name, level=level, **({"error_feedback": False} if name in EF else {}))
    xs_W = gradients().tensors
    from accordion_bench.compressors.base import Context

    ctx = Context(0, SPECS, exchange.levels(plan, 0), 3, [0.1] * len(SPECS))
    out = built.exchange(xs_W, ctx, {}, exchange.comm)
    minus_sent = [torch.zeros_like(x) for x in xs_W]
    for i, update in enumerate(out.update):
        out.subtract_sent_(i, minus_sent[i])
        assert update.shape == xs_W[i].shape[1:]
        # casts add in 16 bits, so the sum is rounded once more
        tolerance = {"fp16": 1e-2, "bf16": 4e-2}.get(name, 1e-12)
        torch.testing.assert_close(-minus_sent[i].mean(0), update, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("residual", ["local", "aggregate"])
@pytest.mark.parametrize(("name", "level"), [case for case in CASES if case[0] in EF])
def test_error_feedback_telescopes(name, level, residual):
    """Sum of updates + mean of residuals = sum of mean gradients."""
    exchange, plan = exchange_for(name, level=level, error_feedback=True, residual=residual)
    given, sent = zip(*run_steps(exchange, plan, steps=6), strict=True)
    left = residuals(exchange)
    for i, spec in enumerate(SPECS):
        target = sum(xs[i].mean(0) for xs in given)
        total = sum(updates[i] for updates in sent)
        if spec.name in left:
            total = total + left[spec.name].mean(0)
        rounding = {"fp16": 1e-2, "bf16": 6e-2}.get(name, 1e-12)
        torch.testing.assert_close(total, target, rtol=rounding, atol=rounding)


@pytest.mark.parametrize(("name", "level"), CASES)
def test_nothing_depends_on_the_order_of_tensors(name, level):
    order = [5, 3, 6, 0, 4, 2, 1]
    exchange, plan = exchange_for(name, level=level)
    shuffled, _ = exchange_for(name, level=level, specs=[SPECS[i] for i in order])
    for step in range(3):
        xs_W = gradients(step=step).tensors
        updates = exchange(xs_W, plan, step, lr=0.1)
        again = shuffled([xs_W[i].clone() for i in order], plan, step, lr=0.1)
        for position, i in enumerate(order):
            torch.testing.assert_close(again[position], updates[i], rtol=1e-12, atol=1e-12)


SCOPED = [
    name for name in NAMES if "scope" in yaml_node("compressor", name) and compressor(name).compressor.whole_model
]


@pytest.mark.parametrize("name", SCOPED)
def test_whole_model_scope_sends_one_vector(name):
    exchange, plan = exchange_for(name, scope="model")
    xs_W = gradients().tensors
    updates = exchange(xs_W, plan, 0, lr=0.1)
    assert [u.shape for u in updates] == [x.shape[1:] for x in xs_W]
    assert list(plan.levels) == ["model"]
    kept = sum(int((u != 0).sum()) for u in updates)
    assert 0 < kept <= 4 * 0.1 * sum(spec.numel for spec in SPECS)


@pytest.mark.parametrize("name", [n for n in NAMES if "start_step" in yaml_node("compressor", n)])
def test_start_step_is_dense_before_and_compressed_after(name):
    exchange, plan = exchange_for(name, start_step=2)
    reference, _ = exchange_for("none")
    for step in range(3):
        xs_W = gradients(step=step).tensors
        updates, dense = exchange(xs_W, plan, step, lr=0.1), reference(xs_W, Plan0, step, lr=0.1)
        same = all(torch.equal(u, d) for u, d in zip(updates, dense, strict=True))
        assert same == (step < 2)
        if step < 2:
            assert all((r == 0).all() for r in residuals(exchange).values())
    assert exchange.predicted_bytes(plan, 0) == 4 * sum(spec.numel for spec in SPECS)


Plan0 = exchange_for("none")[1]


@pytest.mark.parametrize("name", NAMES)
def test_levels_are_checked(name):
    built = compressor(name).compressor
    for value in (0, -1, "x", None, True):
        with pytest.raises(ConfigError):
            built.check_level("weak", value)
    if built.knob:
        strong, weak = built.pair
        assert built.check_level("strong", strong) < built.check_level("weak", weak)
        spec = SPECS[1]
        assert built.payload_bytes(spec, strong, 4) <= built.payload_bytes(spec, weak, 4)


def test_single_worker_sends_nothing_over_the_wire():
    exchange, plan = exchange_for("none", comm=Comm(1))
    exchange(gradients(workers=1).tensors, plan, 0, lr=0.1)
    assert exchange.comm.ledger.columns()["wire_bytes"] == 0


def test_compressors_with_levels_are_found_by_their_files():
    assert {"powersgd", "topk"} <= set(config.compressors_with_levels())
    assert not {"none", "fp16", "bf16"} & set(config.compressors_with_levels())
