"""What was measured of methods among few workers beside the ledger of any number of them."""

import math
from dataclasses import replace

import pytest
import torch

from accordion_bench.advising.arms import arm_of, considered, measured_method, measured_methods, random_gradients
from accordion_bench.advising.rehearsal import Rehearsal
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.overlap import ExchangeOptions
from accordion_bench.methods.compatibility import ladder_of
from accordion_bench.options.conf_dir import read_options, yaml_file
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo

CPU = torch.device("cpu")
SPECS = [
    TensorSpec("a.weight", (64, 64, 3, 3)),
    TensorSpec("a.bias", (64,)),
    TensorSpec("b.weight", (128, 576)),
    TensorSpec("b.bias", (128,)),
    TensorSpec("c.weight", (100, 500)),
]
ARMS = considered()
MIXED = {"hierarchical", "post_local_sgd", "zerooneadam"}  # steps that are not all alike
EVERY_STEP = [arm for arm in ARMS if arm.chosen.sync_name == "every_step"]


def simulated(arm, workers: int) -> dict[str, float]:
    """The ledger of one exchange of all workers in one process, per worker; mean over its turns."""
    wrapped = wrapped_compressor(arm.chosen.compressor, arm.chosen.optimizer)
    comm = Comm(workers)
    exchange = Exchange(wrapped.compressor, SPECS, ladder_of(wrapped.compressor, {}), comm, torch.zeros(1))
    gradients = random_gradients([TensorSpec(s.name, (workers, *s.shape)) for s in SPECS], CPU)
    turns = wrapped.compressor.traits.cycle
    for _ in range(turns):
        exchange(gradients, StepInfo(exchange.weakest(), epoch=99, lr=0.1))
    payload, wire, rounds = (comm.ledger.counts[key] / turns for key in ("payload", "wire", "rounds"))
    return {"payload": payload / workers, "wire": wire / workers, "rounds": rounds}


@pytest.mark.sample(4)
@pytest.mark.parametrize("arm", EVERY_STEP, ids=lambda arm: arm.name)
def test_bytes_among_any_number_of_workers_are_those_of_the_ledger(arm):
    cost = measured_method(arm, SPECS, budget=0.0)
    exact = wrapped_compressor(arm.chosen.compressor).compressor.traits.fixed_size
    # those of other lengths hang on the data: AdaComp's messages grow by a fifth when residuals come in
    tolerance = 0.005 if exact else 0.25
    for workers in (2, 3, 8, 24):
        sent = simulated(arm, workers)
        assert cost.payload(workers) == pytest.approx(sent["payload"], rel=tolerance)
        assert cost.wire(workers) == pytest.approx(sent["wire"], rel=0.02 if exact else 0.25)
        if exact and cost.crowded_from == math.inf and "DeMo" not in arm.name:  # whose tensors change one after another
            stages = cost.stages([0.0] * len(SPECS), workers)
            assert sum(stage.rounds for stage in stages) == pytest.approx(sent["rounds"])
    assert sorted(i for bucket in cost.buckets for i in bucket.members) == list(range(len(SPECS)))


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm.chosen.sync_name not in MIXED], ids=lambda arm: arm.name)
def test_seconds_are_there_and_none_is_negative(arm):
    cost = measured_method(arm, SPECS[:3], budget=0.01)
    for bucket in (*cost.buckets, *cost.crowded):
        assert bucket.encode >= 0 and min(bucket.decode) >= 0
        assert all(math.isfinite(seconds) for seconds in (bucket.encode, *bucket.decode))
        assert all(min(sent.payload(2), sent.fixed) > -1e-6 and sent.times >= 1 for sent in bucket.messages.values())
    assert cost.repetitions and min(cost.repetitions) > 0 and math.isfinite(cost.extra)
    assert cost.local == (arm.chosen.sync_name != "every_step")
    assert cost.waits == (arm.chosen.sync_name != "adpsgd")
    assert cost.quorum == (arm.chosen.sync_name in {"local_sgd", "slowmo", "diloco"})
    gathers = any(kind.startswith("all_gather") for bucket in cost.buckets for kind in bucket.messages)
    assert gathers or not any(bucket.decode[1] for bucket in cost.buckets)


@pytest.mark.parametrize("optimizer, buffers", [("sgd", 1), ("adamw", 2)])
def test_averaged_buffers_are_sent_like_one_more_model_each(optimizer, buffers):
    arm = arm_of(sync="local_sgd", optimizer=read_options(yaml_file("optimizer", optimizer)))
    averaging = replace(arm, chosen=replace(arm.chosen, sync={**arm.chosen.sync, "buffers": "average"}))
    kept, averaged = (measured_method(one, SPECS, budget=0.0) for one in (arm, averaging))
    for workers in (2, 24):
        assert averaged.payload(workers) == (1 + buffers) * kept.payload(workers)
        assert averaged.wire(workers) == pytest.approx((1 + buffers) * kept.wire(workers))
        stages = averaged.stages([0.0] * len(SPECS), workers)
        assert sum(stage.rounds for stage in stages) == (1 + buffers) * 2 * (workers - 1)


def test_moments_are_sent_as_often_as_their_periods_say():
    adam = read_options(yaml_file("optimizer", "adamw"))
    desloc, plain = (
        measured_method(arm_of(sync=name, optimizer=adam), SPECS, budget=0.0) for name in ("desloc", "local_sgd")
    )
    for workers in (2, 24):
        assert desloc.payload(workers) == pytest.approx((1 + 1 / 3 + 1 / 6) * plain.payload(workers))
        assert desloc.wire(workers) == pytest.approx((1 + 1 / 3 + 1 / 6) * plain.wire(workers))


CROWDED = [
    ("int8", 8),
    ("qsgd", 16),
    ("efsignsgd", 64),
    ("none", math.inf),
    ("powersgd", math.inf),
    ("signum", math.inf),
]


@pytest.mark.parametrize("name, many", CROWDED)
def test_messages_of_many_workers_give_way_to_an_all_reduce(name, many):
    cost = measured_method(arm_of(name), SPECS, budget=0.0)
    assert cost.crowded_from == many
    dense = 4 * sum(spec.numel for spec in SPECS)
    if many < math.inf:
        assert cost.payload(int(many)) == pytest.approx(dense, rel=1e-3)
        assert cost.payload(int(many) - 1) < dense / 3
        assert cost.among(int(many)) == cost.crowded and cost.among(int(many) - 1) == cost.buckets


@pytest.mark.parametrize("name", ["none", "bf16", "efsignsgd", "powersgd", "signum"])
def test_buckets_are_those_of_a_run(name):
    arm = arm_of(name)
    large = [TensorSpec(f"{i}", (512, 1024)) for i in range(20)]
    wrapped, options = wrapped_compressor(arm.chosen.compressor, arm.chosen.optimizer), ExchangeOptions()
    sizes = {"bucket_mb": options.bucket_mb, "gradient_mb": options.gradient_mb}
    ladder = ladder_of(wrapped.compressor, {})
    sending = SendOptions(**wrapped.for_exchange, **sizes)
    run = Exchange(wrapped.compressor, large, ladder, Comm(1, 16), torch.zeros(1), sending)
    rehearsal = Rehearsal(arm.chosen, large, 16, CPU)
    assert rehearsal.exchange.members == run.members
    few = Rehearsal(arm.chosen, large, 2, CPU, rehearsal.exchange.buckets)
    assert few.exchange.members == run.members


STATE = {"none": 0, "topk": 4, "dgc": 8, "signum": 4}  # bytes for each coordinate
SCHEMES = {"local_sgd": 4, "slowmo": 8, "diloco": 8, "overlap_local_sgd": 12, "streaming_diloco": 8}
BESIDE = {"overlap_local_sgd", "streaming_diloco"}


@pytest.mark.parametrize("name", STATE)
def test_state_of_a_compressor(name):
    matrices = [spec for spec in SPECS if spec.ndim > 1]
    cost = measured_method(arm_of(name), matrices, budget=0.0)
    assert cost.state == STATE[name] * sum(spec.numel for spec in matrices)


@pytest.mark.parametrize("name", SCHEMES)
def test_state_of_a_scheme(name):
    cost = measured_method(arm_of(sync=name), SPECS, budget=0.0)
    assert cost.local and cost.overlaps == (name in BESIDE)
    assert cost.state == SCHEMES[name] * sum(spec.numel for spec in SPECS)
    assert cost.payload(2) == 4 * sum(spec.numel for spec in SPECS)


def test_fragments_and_their_delay():
    """Layers a and c are one fragment, b the other; each has its own buckets."""
    arm = arm_of(sync="streaming_diloco")
    cost = measured_method(arm, SPECS, budget=0.05)
    tensors = [sorted(i for bucket in part for i in cost.buckets[bucket].members) for part in cost.parts]
    assert tensors == [[0, 1, 4], [2, 3]] and cost.delay == arm.chosen.sync["delay"] == 5
    assert all(bucket.decode[0] > 0 for bucket in cost.buckets)


@pytest.mark.parametrize("workers", [2, 16, 1000])
def test_sparse_averages_and_pairs(workers):
    """A share of the parameters after every step; one message to one other, however many there are."""
    numel = sum(spec.numel for spec in SPECS)
    sparta, noloco = (measured_method(arm_of(sync=name), SPECS, budget=0.0) for name in ("sparta", "noloco"))
    assert (sparta.local, sparta.every_local_step, sparta.overlaps, sparta.in_pairs) == (True, True, False, False)
    assert sparta.payload(workers) == 4 * (numel // 200)
    assert sparta.wire(workers) == pytest.approx(2 * (workers - 1) / workers * 4 * (numel // 200))
    assert (noloco.local, noloco.every_local_step, noloco.overlaps, noloco.in_pairs) == (True, False, False, True)
    assert noloco.payload(workers) == noloco.wire(workers) == 4 * numel
    assert sum(stage.rounds for stage in noloco.stages([0.0] * len(SPECS), workers)) == 1
    assert noloco.state == 12 * numel  # z, momentum, and the start


@pytest.mark.parametrize("workers", [2, 16, 1000])
def test_workers_that_wait_for_no_one(workers):
    """A step of one of them has two meetings, one of its own and one of another; the ledger counts the same."""
    numel = sum(spec.numel for spec in SPECS)
    found = measured_method(arm_of(sync="adpsgd"), SPECS, budget=0.0)
    assert (found.local, found.every_local_step, found.overlaps, found.in_pairs) == (True, True, True, True)
    assert not found.waits and found.together(workers) == 1 and found.beside == 1
    assert found.payload(workers) == pytest.approx(2 * 4 * numel) == found.wire(workers)
    assert sum(stage.rounds for stage in found.stages([0.0] * len(SPECS), workers)) == pytest.approx(2)
    assert found.state == 4 * numel  # x_w beside what it computes with


def test_methods_in_turn_and_what_is_left_out():
    arms = [arm for arm in ARMS if arm.chosen.sync_name in {"diloco", *MIXED}] + [arm_of(), arm_of("bf16")]
    told: list[str] = []
    costs, left_out = measured_methods(arms, SPECS, "cpu", 1.0, told.append)
    assert [cost.name for cost in costs] == ["DiLoCo", "dense", "bf16"]
    assert set(left_out) == {"hierarchical local SGD", "post-local SGD", "0/1 Adam"}
    assert left_out["post-local SGD"].startswith("sync=post_local_sgd takes synchronous steps first")
    assert told == [f"{arm.name} ({number} of {len(arms)})" for number, arm in enumerate(arms, 1)]
    assert all(len(cost.repetitions) > 1 for cost in costs)


def test_a_method_that_takes_the_step_itself_refuses_another_optimizer():
    adamw = {"_target_": "torch.optim.AdamW", "lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.01}
    costs, left_out = measured_methods([arm_of("signum", optimizer=adamw), arm_of("topk", optimizer=adamw)], SPECS)
    assert [cost.name for cost in costs] == ["TopK 10 %"]
    assert left_out["Signum"].startswith("optimizer must be sgd, because this compressor takes the step itself")


def test_what_does_not_fit_into_memory_is_left_out(monkeypatch):
    def full(*_):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(Rehearsal, "step", full)
    assert measured_methods([arm_of()], SPECS) == (
        [],
        {"dense": "its exchange does not fit into the memory of this device"},
    )


def test_models_without_matrices_or_with_empty_tensors_are_measured():
    odd = [TensorSpec("a", (7,)), TensorSpec("none", (0, 3)), TensorSpec("one", ())]
    for name in ("none", "powersgd", "topk", "efsignsgd"):
        cost = measured_method(arm_of(name), odd, budget=0.0)
        assert cost.payload(2) > 0 and len(cost.stages([0.0, 0.0, 0.0], 4)) == len(cost.buckets)


@pytest.mark.gpu
@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm.chosen.sync_name not in MIXED], ids=lambda arm: arm.name)
def test_seconds_on_a_gpu(arm):
    cost = measured_method(arm, SPECS, "cuda", budget=0.05)
    # the last bucket of a method that averages the optimizer's buffers has none, and no codec
    codecs = [bucket.encode for bucket in cost.buckets if bucket.members]
    assert codecs and all(math.isfinite(seconds) and seconds > 0 for seconds in codecs)
    assert cost.payload(2) > 0
