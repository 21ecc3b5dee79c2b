"""DeMo: its DCT against the explicit sum, a twin of obvious loops, the bookkeeping of the momentum, bytes."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import accordion_bench as ab
from accordion_bench import train
from accordion_bench.codecs import packed_codes
from accordion_bench.codecs.matrix_tiles import Chunks, dct_matrix, largest_divisor
from accordion_bench.compressors.compressor import NonFinite
from accordion_bench.compressors.demo import (
    ChunkGroup,
    DeMo,
    SentCoefficients,
    answer_bytes,
    pack_signs,
    unpack_signs,
)
from accordion_bench.compressors.probe import payload_bytes
from accordion_bench.config.components import build_components
from accordion_bench.exchange.dry_exchange import probe_exchange
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import Ladder, Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from tests.kit import by_hand, composed
from tests.kit.helpers import SPECS, exchange_for, gradients
from tests.kit.local import deviation, placed, resumed, trained, trainer_for

FLOAT64 = {"dtype": torch.float64, "device": torch.device("cpu")}


def slow_dct(x):
    """Coefficients of one chunk [a, b], each as its double sum."""
    a, b = x.shape
    out = torch.zeros(a, b, dtype=torch.float64)
    for p in range(a):
        for q in range(b):
            scale = math.sqrt((1 if p == 0 else 2) / a) * math.sqrt((1 if q == 0 else 2) / b)
            for s in range(a):
                for t in range(b):
                    wave = math.cos(math.pi * (2 * s + 1) * p / (2 * a)) * math.cos(math.pi * (2 * t + 1) * q / (2 * b))
                    out[p, q] += scale * wave * x[s, t]
    return out


@pytest.mark.parametrize("n", [1, 2, 3, 10, 64])
def test_dct_matrix_is_orthonormal(n):
    matrix = dct_matrix(n, **FLOAT64)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-13)


@pytest.mark.parametrize("shape", [(6, 10), (4, 3), (12, 1), (7, 5), (1, 9)])
def test_chunks_equal_the_explicit_sum_and_come_back(shape):
    x = torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    chunks = Chunks(*shape, *(largest_divisor(side, 5) for side in shape))
    coefficients = chunks.coefficients(chunks.cut(x))
    assert coefficients.shape == (2, chunks.count, chunks.numel)
    c = 0
    for top in range(0, shape[0], chunks.a):
        for left in range(0, shape[1], chunks.b):
            expected = slow_dct(x[1, top : top + chunks.a, left : left + chunks.b])
            torch.testing.assert_close(coefficients[1, c].view(chunks.a, chunks.b), expected, rtol=0, atol=1e-13)
            c += 1
    torch.testing.assert_close(chunks.inverse(coefficients), x, rtol=0, atol=1e-13)


def test_sides():
    assert [largest_divisor(n, 64) for n in (1, 64, 576, 4608, 27, 10, 67, 72)] == [1, 64, 64, 64, 27, 10, 1, 36]
    demo = DeMo()
    assert demo.chunks(TensorSpec("conv", (64, 64, 3, 3))) == Chunks(64, 576, 64, 64)
    assert demo.chunks(TensorSpec("bias", (96,))) == Chunks(96, 1, 48, 1)
    assert demo.chunks(TensorSpec("scale", ())) == Chunks(1, 1, 1, 1)


class Twin:
    """DeMo as one writes it down: a worker, a tensor, a chunk at a time, delta in the tensor's own coordinates."""

    def __init__(self, k, decay, chunk):
        self.k, self.decay, self.chunk, self.delta = k, decay, chunk, {}

    def step(self, xs_W, lr):
        """What the signs are taken of, per tensor."""
        return [self.tensor(spec, x_W.double(), lr) for spec, x_W in zip(SPECS, xs_W, strict=True)]

    def tensor(self, spec, x_W, lr):
        n, m = spec.matrix
        a, b = (max(d for d in range(1, self.chunk + 1) if side % d == 0) for side in (n, m))
        A, B = dct_matrix(a, **FLOAT64), dct_matrix(b, **FLOAT64)
        for w, x in enumerate(x_W):
            self.delta[spec.name, w] = self.decay * self.delta.get((spec.name, w), 0) + lr * x.reshape(n, m)
        mean = torch.zeros(n, m, dtype=torch.float64)
        for top in range(0, n, a):
            for left in range(0, m, b):
                block = (slice(top, top + a), slice(left, left + b))
                sums, counts = torch.zeros(a, b).double(), torch.zeros(a, b).double()
                for w in range(len(x_W)):
                    coefficients = A @ self.delta[spec.name, w][block] @ B.T
                    flat = coefficients.flatten().tolist()
                    order = sorted(range(a * b), key=lambda c: -abs(flat[c]))[: self.k]
                    sent = torch.zeros(a * b, dtype=torch.float64)
                    for c in order:
                        value = flat[c] if self.k >= a * b else float(torch.tensor(flat[c]).float())
                        sent[c] = value
                        sums.view(-1)[c] += value
                        counts.view(-1)[c] += 1
                    self.delta[spec.name, w][block] -= A.T @ sent.view(a, b) @ B
                mean[block] = A.T @ (sums / counts.clamp_min(1)) @ B
        return mean.view(spec.shape)


def momenta(exchange):
    """delta_w in the tensors' coordinates, [W, ...] by name."""
    demo = exchange.compressor
    return {
        spec.name: demo.chunks(spec).inverse(exchange.state[spec.name]["delta_W"]).view(-1, *spec.shape)
        for spec in exchange.sent
    }


@pytest.mark.parametrize("options", [{}, {"k": 3, "chunk": 8, "decay": 0.5}, {"k": 16, "chunk": 16}])
def test_equals_the_twin(options):
    exchange, plan = exchange_for("demo", **options)
    demo = exchange.compressor
    twin = Twin(demo.k, demo.decay, demo.chunk)
    for step, lr in enumerate([0.1, 0.1, 0.05, 0.2]):
        xs_W = gradients(step=step).tensors
        expected = twin.step(xs_W, lr)
        for spec, update, mean in zip(SPECS, exchange(xs_W, StepInfo(plan, step, lr)), expected, strict=True):
            assert update.shape == spec.shape
            clear = mean.abs() > 1e-12
            assert torch.equal(update[clear], mean[clear].sign())
            assert clear.float().mean() > 0.9
    for name, delta_W in momenta(exchange).items():
        for w, delta in enumerate(delta_W):
            torch.testing.assert_close(delta.view(delta.shape[0], -1), twin.delta[name, w].view(delta.shape[0], -1))


@pytest.mark.parametrize("value_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("k", [2, 32, 1000])
def test_momentum_and_what_was_sent_add_up(k, value_dtype):
    """delta_after + reconstruction of the message = decay delta_before + lr g, for each worker."""
    exchange, plan = exchange_for("demo", k=k, value_dtype=value_dtype)
    for step, lr in enumerate([0.1, 0.3, 0.02]):
        xs_W = gradients(step=step).tensors
        before = momenta(exchange)
        ctx = exchange.context(StepInfo(plan, step, lr))
        out = exchange.compressor.exchange(xs_W, ctx, exchange.state, exchange.comm)
        after = momenta(exchange)
        for i, spec in enumerate(SPECS):
            given_W = 0.999 * before[spec.name] + lr * xs_W[i]
            out.subtract_sent_({i: given_W})
            torch.testing.assert_close(given_W, after[spec.name], rtol=1e-12, atol=1e-12)
            if k == 1000:
                assert (after[spec.name] == 0).all()


def test_whole_chunks_without_memory_give_the_sign_of_the_gradient():
    exchange, plan = exchange_for("demo", workers=1, k=64 * 64, decay=0)
    for step in range(3):
        xs_W = gradients(workers=1, step=step).tensors
        for update, x_W in zip(exchange(xs_W, StepInfo(plan, step, 0.1)), xs_W, strict=True):
            assert torch.equal(update, x_W[0].sign())


def test_a_coefficient_is_averaged_over_its_senders():
    demo, chunks = DeMo(k=2), Chunks(4, 4, 4, 4)
    positions = torch.tensor([[0, 3], [3, 5], [3, 7]]).view(3, 1, 2)
    values = torch.tensor([[1.0, 6.0], [0.0, 5.0], [3.0, -2.0]]).view(3, 1, 2)
    group = ChunkGroup([0], [chunks], 2)
    message_A = demo._pack(SentCoefficients(positions, values), group)
    mean = demo._over_senders(message_A, group, torch.float32)
    expected = torch.zeros(16)
    expected[[0, 3, 5, 7]] = torch.tensor([1.0, 3.0, 5.0, -2.0])  # at 3, the zero that was sent counts
    torch.testing.assert_close(mean.flatten(), expected)


BITS = [("float32", 32 * 4), ("float16", 32 * 2), ("bfloat16", 32 * 2)]


@pytest.mark.parametrize(("value_dtype", "values"), BITS)
def test_bytes_of_full_chunks(value_dtype, values):
    """32 values and 36 bytes of positions for 4,096 coordinates: 0.32 or 0.20 bits each (12-bit indices: 48 bytes)."""
    spec = TensorSpec("conv", (128, 64, 3, 3))
    demo = DeMo(value_dtype=value_dtype)
    assert packed_codes.index_bytes(4096, 32) == ("elias-fano", 36)
    assert payload_bytes(demo, spec, 32, 4) == 18 * (values + 36)
    assert 8 * payload_bytes(demo, spec, 32, 4) / spec.numel <= (0.3204 if value_dtype == "float32" else 0.1954)


@pytest.mark.parametrize("workers", [1, 4, 16])
@pytest.mark.parametrize(("k", "value_dtype"), [(1, "float32"), (8, "float16"), (32, "float32"), (200, "bfloat16")])
def test_the_ledger_has_exactly_the_predicted_bytes(k, value_dtype, workers):
    exchange, plan = exchange_for("demo", workers, k=k, value_dtype=value_dtype, dtype=torch.float32)
    expected = 0
    for spec in SPECS:
        n, m = spec.matrix
        numel = largest_divisor(n, 64) * largest_divisor(m, 64)
        one = k * (4 if value_dtype == "float32" else 2) + packed_codes.index_bytes(numel, min(k, numel))[1]
        if k >= numel or one >= 4 * numel:
            one = 4 * numel
        elif (workers - 1) * one > 2 * (workers - 1) / workers * 4 * numel:  # a dense all-reduce costs less wire
            one += 2 * math.ceil(numel / 8) / workers
        expected += n * m // numel * one
    exchange(gradients(workers=workers, dtype=torch.float32).tensors, StepInfo(plan, 0, 0.1))
    exchange.comm.ledger.dense_step(exchange.numel)
    columns = exchange.comm.ledger.columns()
    assert columns["payload_bytes"] == exchange.predicted_bytes(StepInfo(plan, 0)) == round(expected)
    assert columns["wire_bytes"] <= columns["dense_wire_bytes"]


@pytest.mark.parametrize("workers", [2, 4, 16])
def test_how_the_messages_travel_changes_nothing(monkeypatch, workers):
    """All-gather, or shares of the chunks with their owners; also where there are fewer chunks than workers."""
    updates = {}
    for gathers in (True, False):
        monkeypatch.setattr(DeMo, "gathers", lambda self, chunks, k, workers, fixed=gathers: fixed)
        exchange, plan = exchange_for("demo", workers, k=5, chunk=24)
        updates[gathers] = [
            exchange(gradients(workers=workers, step=i).tensors, StepInfo(plan, i, 0.1)) for i in range(3)
        ]
    for ours, theirs in zip(updates[True], updates[False], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_break_even_of_the_all_gather():
    demo = DeMo()
    for chunks, first in ((Chunks(64, 64, 64, 64), 200), (Chunks(64, 1, 64, 1), 4)):
        assert demo.gathers(chunks, 32, first - 1) and not demo.gathers(chunks, 32, first)


def test_packed_signs_come_back():
    signs = torch.randint(-1, 2, (5, 27), generator=torch.Generator().manual_seed(1)).double()
    message = pack_signs(signs)
    assert len(message) == 5 * answer_bytes(Chunks(3, 9, 3, 9)) == 5 * 8
    assert torch.equal(unpack_signs(message, Chunks(3, 9, 3, 9), torch.float64), signs)


def test_k_may_change_between_steps():
    exchange, plan = exchange_for("demo")
    exchange.ladder = Ladder("k", (2, 8, 1000))
    for step, level in enumerate([0, 2, 1, 0]):
        plan = Plan(dict.fromkeys(plan.levels, level), 1)
        updates = exchange(gradients(step=step).tensors, StepInfo(plan, step, 0.1))
        assert all(((u == 0) | (u.abs() == 1)).all() for u in updates)
        assert all((delta == 0).all() for delta in momenta(exchange).values()) == (level == 2)


def test_what_16_bits_cannot_express_stays_in_the_momentum():
    specs = [TensorSpec("m", (64, 64))]
    for scale in (1e-9, 1e8):
        exchange, plan = exchange_for("demo", specs=specs, workers=1, value_dtype="float16", dtype=torch.float32)
        xs_W = [x * scale for x in gradients(specs, 1, dtype=torch.float32).tensors]
        (update,) = exchange(xs_W, StepInfo(plan, 0, 1.0))
        assert update.isfinite().all()
        left = momenta(exchange)["m"].norm() / xs_W[0].norm()
        assert left > 0.99


def test_probe_measures_what_is_compressed():
    exchange, plan = exchange_for("demo", k=4)
    exchange(gradients().tensors, StepInfo(plan, 0, 1.0))
    xs_W = gradients(step=1).tensors
    before = {name: delta_W.clone() for name, delta_W in momenta(exchange).items()}
    probe = probe_exchange(exchange, xs_W, StepInfo(plan, 1))
    assert all(torch.equal(before[name], delta_W) for name, delta_W in momenta(exchange).items())
    exchange(xs_W, StepInfo(plan, 1, 1.0))
    for spec, x_W, error in zip(SPECS, xs_W, probe.error, strict=True):
        lost = momenta(exchange)[spec.name].flatten(1).square().sum(1)
        whole = (0.999 * before[spec.name] + x_W).flatten(1).square().sum(1)
        assert error == pytest.approx(float((lost / whole).mean()), rel=1e-9, abs=1e-20)


def test_an_overflow_of_the_transform_is_refused():
    exchange, plan = exchange_for("demo", specs=[TensorSpec("m", (64, 64))], dtype=torch.float32)
    with pytest.raises(NonFinite, match="input of worker 2 for m"):
        xs_W = torch.zeros(4, 64, 64)
        xs_W[2] = 3e38
        xs_W[2, ::2] *= -1
        exchange([xs_W], StepInfo(plan, 0, 1.0))


@pytest.mark.parametrize("options", [{"k": 0}, {"decay": 1.5}, {"chunk": 0}, {"value_dtype": "fp8"}, {"k": 1.5}])
def test_bad_options(options):
    with pytest.raises(ConfigError, match="compressor." + next(iter(options))):
        exchange_for("demo", **options)


def test_error_feedback_and_the_optimizers_momentum_are_refused():
    with pytest.raises(ConfigError, match=r"compressor\.error_feedback must be false"):
        exchange_for("demo", error_feedback=True)
    with pytest.raises(ConfigError, match=r"type optimizer\.momentum=0"):
        build_components(RunConfig.from_dict(composed.cfg("compressor=demo", "optimizer.momentum=0.9")), workers=1)


def test_trains_with_decoupled_weight_decay(tmp_path):
    tiny = ["dataset=synthetic", "dataset.size=8", "dataset.train_size=64", "dataset.test_size=16", "batch_size=8"]
    run = ["epochs=2", "comm=simulated", "workers=2", "optimizer.lr=0.001", "optimizer.momentum=0"]
    train.run(composed.cfg(*tiny, *run, f"paths.runs={tmp_path}", "compressor=demo", "optimizer.nesterov=false"))
    (folder,) = tmp_path.iterdir()
    rows = RunFolder(folder).read_metrics()
    assert len(rows) == 2 and rows[1]["train_loss"] < rows[0]["train_loss"]


# ---- one bit


def one_bit_twin(spec, gradients, deltas, step_size, k, decay):
    """Update and each worker's momentum, chunk by chunk as DisTrO has it: signs travel, the coefficients are taken."""
    n, m = spec.matrix if spec.ndim > 1 else (spec.numel, 1)
    a, b = largest_divisor(n, 8), largest_divisor(m, 8)
    A, B = dct_matrix(a, **FLOAT64), dct_matrix(b, **FLOAT64)
    update = torch.zeros(n, m, dtype=torch.float64)
    for w, g in enumerate(gradients):
        deltas[w] = decay * deltas[w] + step_size * g.reshape(n, m)
    for top in range(0, n, a):
        for left in range(0, m, b):
            total = torch.zeros(a, b, dtype=torch.float64)
            for w in range(len(gradients)):
                block = deltas[w][top : top + a, left : left + b]
                q = (A @ block @ B.T).flatten()
                kept = torch.zeros_like(q)
                for i in sorted(range(a * b), key=lambda i: -abs(float(q[i])))[:k]:
                    kept[i] = q[i]
                total += kept.sign().view(a, b)
                deltas[w][top : top + a, left : left + b] = block - A.T @ kept.view(a, b) @ B
            update[top : top + a, left : left + b] = (A.T @ total @ B).sign()
    return update.view(spec.shape)


@pytest.mark.parametrize("workers", [1, 3])
def test_one_bit_is_index_and_sign(workers):
    specs = [TensorSpec("w", (16, 24)), TensorSpec("v", (24,)), TensorSpec("c", (8, 2, 3, 3))]
    options = {"k": 3, "chunk": 8, "decay": 0.995, "value_bits": 1}
    exchange, plan = exchange_for("demo", workers, specs, **options)
    deltas = {s.name: [torch.zeros(*(s.matrix if s.ndim > 1 else (s.numel, 1))).double()] * workers for s in specs}
    for step in range(5):
        xs_W = gradients(specs, workers=workers, step=step).tensors
        updates = exchange([x_W.clone() for x_W in xs_W], StepInfo(plan, step, 0.1 + step))
        for spec, x_W, update in zip(specs, xs_W, updates, strict=True):
            expected = one_bit_twin(spec, x_W, deltas[spec.name], 0.1 + step, 3, 0.995)
            torch.testing.assert_close(update, expected, rtol=0, atol=0)
            kept_W = exchange.state[spec.name]["delta_W"]
            found_W = exchange.compressor.chunks(spec).inverse(kept_W)
            for w in range(workers):
                torch.testing.assert_close(found_W[w].view(-1), deltas[spec.name][w].view(-1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("k", [4, 8, 20])
def test_bytes_of_one_bit(k):
    spec = TensorSpec("w", (64, 128))
    compressor = DeMo(k, value_bits=1)
    each = (k + 7) // 8 + packed_codes.index_bytes(4096, k)[1]
    assert payload_bytes(compressor, spec, k, 4) == 2 * each
    exchange, plan = exchange_for("demo", 4, [spec], k=k, value_bits=1)
    exchange(gradients([spec]).tensors, StepInfo(plan, 0, 0.1))
    assert exchange.comm.ledger.columns()["payload_bytes"] == 2 * each


@pytest.mark.parametrize("bits", [0, 2, 1.5, True, "1"])
def test_bits_that_are_none(bits):
    with pytest.raises(ConfigError, match=r"^value_bits must be null or 1, got"):
        DeMo(value_bits=bits)


# ---- look ahead

AHEAD = ["compressor=demo", "compressor.chunk=8", "compressor.value_bits=1", "compressor.look_ahead=true"]
AHEAD += ["compressor.k=3", "optimizer.momentum=0", "optimizer.nesterov=false", "optimizer.weight_decay=0.1"]


def looking_ahead(trainer) -> list[torch.Tensor]:
    """A freshly built trainer's run as a plain loop: gradients of worker w at x - lr sign(d_w), signs travel."""
    model = copy.deepcopy(trainer.axis.model)
    params, specs, step, before = list(model.parameters()), trainer.axis.specs, 0, 0.0
    deltas = {s.name: [torch.zeros(*(s.matrix if s.ndim > 1 else (s.numel, 1))).double()] * 4 for s in specs}
    ahead = [[torch.zeros_like(p) for p in params] for _ in range(4)]
    for epoch in range(trainer.config.epochs):
        trainer.sampler.begin_epoch(epoch, trainer.position.plan.batch_size)
        trainer.data.begin_epoch(epoch)
        for number in range(trainer.position.steps_per_epoch):
            grads = []
            for w in range(4):
                own = copy.deepcopy(model)
                with torch.no_grad():
                    torch._foreach_sub_(list(own.parameters()), ahead[w], alpha=before)
                x, y = trainer.data.train_batch(trainer.sampler.batch(w, number))
                grads.append(torch.autograd.grad(F.cross_entropy(own(x), y), list(own.parameters())))
            lr = trainer.position.lr(number, epoch)
            for i, (spec, param) in enumerate(zip(specs, params, strict=True)):
                own_W = [g[i] for g in grads]
                for w in range(4):
                    moved = 0.999 * deltas[spec.name][w] + lr * own_W[w].reshape(deltas[spec.name][w].shape)
                    ahead[w][i] = moved.sign().view(spec.shape)
                update = one_bit_twin(spec, own_W, deltas[spec.name], lr, 3, 0.999)
                param.data.mul_(1 - lr * 0.1).sub_(update, alpha=lr)
            step, before = step + 1, lr
    return [param.detach() for param in params]


def test_gradients_are_taken_ahead_of_the_parameters(tmp_path):
    expected = looking_ahead(trainer_for(tmp_path / "plain", *AHEAD))
    run = trained(tmp_path / "run", *AHEAD)
    assert deviation(run.axis.shared, expected) < 1e-13
    assert deviation(trained(tmp_path / "not", *AHEAD, "compressor.look_ahead=false").axis.shared, expected) > 1e-4


def test_looking_ahead_sends_no_byte_more(tmp_path):
    rows = [trained(tmp_path / str(on), *AHEAD, f"compressor.look_ahead={on}").last_row for on in ("true", "false")]
    assert rows[0]["payload_bytes"] == rows[1]["payload_bytes"] and rows[0]["wire_bytes"] == rows[1]["wire_bytes"]


def test_a_run_that_looks_ahead_goes_on_bit_for_bit(tmp_path):
    whole, again = trained(tmp_path / "whole", *AHEAD), resumed(tmp_path, *AHEAD)
    assert all(map(torch.equal, again.axis.shared, whole.axis.shared))


def test_placements_of_workers_that_look_ahead(tmp_path):
    alone = trained(tmp_path / "alone", *AHEAD, "epochs=2").axis.shared
    for processes in (4, 2):
        (found,) = placed(tmp_path, processes, [*AHEAD, "epochs=2"])
        assert deviation(found, alone) < 1e-13


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["sync=local_sgd"], "compressor.look_ahead must be false where workers take local steps, got true"),
        (
            ["sync.elastic=true", "sync.min_workers=2", "comm=gloo", "comm.processes=2", "workers=2"],
            "compressor.look_ahead must be false where sync.elastic lets workers join and leave, got true",
        ),
        (["comm=gloo", "comm.processes=2", "workers=2", "comm.engine=ddp"], "compressor must be none, fp16, bf16 or"),
        (["compressor.look_ahead=2"], "compressor.look_ahead must be true or false, got 2"),
    ],
)
def test_where_no_worker_can_look_ahead(options, said):
    with pytest.raises(ConfigError) as refused:
        composed.validated(composed.cfg("compressor=demo", "compressor.look_ahead=true", *options))
    assert str(refused.value).startswith(said), str(refused.value)


def test_a_model_of_a_users_own_loop_stays_where_it_is(tmp_path):
    model = torch.nn.Linear(4, 4)
    refusal = r"look_ahead must be False here, because the model would be evaluated"
    with by_hand.in_group(0, f"{tmp_path}/store", 1), pytest.raises(ConfigError, match=refusal):
        ab.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "demo", look_ahead=True)
