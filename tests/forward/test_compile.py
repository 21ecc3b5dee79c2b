"""compile and channels_last: how the forward pass is computed makes no difference to anything else."""

import pytest
import torch
from torch import nn

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.worker_axis import Batch, WorkerAxis
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import Ladder, Plan
from accordion_bench.position import StepInfo
from tests.exchange.test_overlap import TINY, left_early, same, trained  # noqa: F401
from tests.kit import composed
from tests.kit.helpers import optimizer_for, yaml_names, yaml_node

ARMS = {
    "topk": ["compressor=topk"],
    "micro-batches": ["micro_batch_size=2"],
    "local sgd": ["sync=local_sgd", "sync.period=2"],
    "bfloat16": ["precision=bfloat16"],
}

IN_DOUBLE = "model._target_=tests.kit.models.ResNetInDouble"


def buffers_are_equal(a, b) -> bool:
    return all(torch.equal(value, b.axis.buffers_W[name]) for name, value in a.axis.buffers_W.items())


@pytest.mark.sample(8)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("arm", ARMS)
def test_compiled_is_not_compiled_bit_for_bit(tmp_path, arm, backend):
    """Every worker's own buffers, and own parameters, go through one compiled graph."""
    plain = trained(tmp_path, True, *ARMS[arm])
    ours = trained(tmp_path, True, *ARMS[arm], f"compile={backend}")
    same(ours, plain)
    assert buffers_are_equal(ours, plain)
    for mine, theirs in zip(ours.axis.replicas, plain.axis.replicas, strict=True):
        assert all(map(torch.equal, mine, theirs))
    assert "_orig_mod" in dict(ours.step.forward.named_children()) and ours.step.forward._orig_mod is ours.axis.model


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_and_overlapped_equals_the_reference_path(tmp_path, left_early, backend):  # noqa: F811
    overlapped, reference = (trained(tmp_path, on, "compressor=topk", f"compile={backend}") for on in (True, False))
    assert left_early == [len(overlapped.exchange.buckets)] * 4
    same(overlapped, reference)


def test_compiled_for_another_size_of_batch(tmp_path):
    cfg = ["adaptive=adabatch", "adaptive.adabatch.freq=1", "epochs=2"]
    runs = [trained(tmp_path, True, *cfg, *own, steps=0) for own in ([], ["compile=eager"])]
    for run in runs:
        run.fit()
    same(*runs)
    assert runs[0].position.plan.batch_size > 4


@pytest.mark.slow
def test_inductor_computes_the_same_up_to_rounding(tmp_path):
    plain, ours = (trained(tmp_path, True, *own) for own in ([], ["compile=inductor"]))
    for x, y in zip(plain.axis.params, ours.axis.params, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
    assert plain.comm.ledger.counts == ours.comm.ledger.counts


@pytest.mark.sample(5)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("arm", ["topk", "micro-batches", "local sgd"])
def test_channels_last_is_contiguous_up_to_rounding(tmp_path, arm, workers):
    """In float64: in float32 rounding may choose another entry of two that are nearly equal."""
    arms = [[*ARMS[arm], IN_DOUBLE, *own] for own in ([], ["channels_last=true"])]
    plain, ours = (trained(tmp_path, True, *own, workers=workers) for own in arms)
    for x, y in zip(plain.axis.params, ours.axis.params, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)
    assert plain.comm.ledger.counts == ours.comm.ledger.counts
    if arm != "local sgd":  # replicas lie side by side
        weights = [p for p in ours.axis.params if p.ndim == 4 and p.shape[1] > 1 and p.shape[2] > 1]
        assert weights and all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
        momenta = [ours.inner.common.state[p]["momentum_buffer"] for p in weights]
        assert all(m.stride() == p.stride() for m, p in zip(momenta, weights, strict=True))


class Weights(nn.Module):
    """Parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for i, shape in enumerate([(8, 6, 3, 3), (8, 6, 3, 3), (7,), (12, 8, 1, 1), (10, 12)]):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape, generator=generator)))


def exchanged(name: str, workers: int, memory_format: torch.memory_format) -> tuple[list, dict, list]:
    """Updates and state of three exchanges of the same gradients, and the parameters' gradients at the end."""
    node = {**yaml_node("compressor", name), "momentum": 0.9} if name == "signum" else yaml_node("compressor", name)
    node.pop("momentum", None)
    optimizer = optimizer_for("compressor", name) | {"momentum": 0.0, "nesterov": False}
    wrapped = wrapped_compressor(node, optimizer)
    axis = WorkerAxis(Weights().to(memory_format=memory_format), Comm(workers), seed=0)
    level = wrapped.compressor.level
    ladder = Ladder(wrapped.compressor.traits.knob or "", () if level is None else (level,))
    sending = SendOptions(**wrapped.for_exchange)
    exchange = Exchange(wrapped.compressor, axis.specs, ladder, axis.comm, axis.params[0], sending)
    plan, updates = Plan({spec.name: 0 for spec in exchange.sent} if wrapped.compressor.traits.knob else {}), []
    generator = torch.Generator().manual_seed(5)
    for step in range(3):
        for row in range(workers):
            gradients = [torch.randn(p.shape, generator=generator) for p in axis.params]

            def loss(_, gradients=gradients):
                return sum(
                    (p * g.to(memory_format=memory_format if g.ndim == 4 else torch.preserve_format)).sum()
                    for p, g in zip(axis.params, gradients, strict=True)
                )

            axis.backward(row, step, Batch(loss))
        updates += exchange(axis.gradients_W, StepInfo(plan, step, 0.1))
    axis.apply(updates[-len(axis.params) :])
    return updates, exchange.state, [p.grad for p in axis.params]


@pytest.mark.sample(5)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", yaml_names("compressor"))
def test_no_exchange_sees_the_memory_format(name, workers):
    plain, state, _ = exchanged(name, workers, torch.contiguous_format)
    ours, same_state, applied = exchanged(name, workers, torch.channels_last)
    assert all(map(torch.equal, plain, ours))
    for key, entries in state.items():
        assert all(torch.equal(value, same_state[key][part]) for part, value in entries.items())
    assert applied[0].is_contiguous(memory_format=torch.channels_last) and not applied[0].is_contiguous()


TEXT = ["model=lstm_small", "dataset=synthetic_text"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["compile=tvm"], "compile must be one of inductor, aot_eager, eager, got tvm; type compile=inductor"),
        (["compile=true"], "compile must be one of inductor, aot_eager, eager, got true; type compile=inductor"),
        ([*TEXT, "compile=eager"], "does not compile recurrent layers, got eager; type compile=null"),
        ([*TEXT, "channels_last=true"], "which has no images, got true; type channels_last=null"),
        (["channels_last=1"], "channels_last must be true or false, got 1; type channels_last=null"),
    ],
)
def test_refused(tmp_path, overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        composed.validated(composed.cfg(f"paths.runs={tmp_path}", *overrides))


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="needs a C\\+\\+ compiler, got no no-such-compiler here; type compile=null"):
        composed.validated(composed.cfg(*TINY, f"paths.runs={tmp_path}", "compile=inductor", "device=cpu"))
