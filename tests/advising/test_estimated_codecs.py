"""Costs on a GPU that is not here: messages stay, seconds are those of the table."""

import pytest
import torch

from accordion_bench.advising import api
from accordion_bench.advising.api import TimedMethods
from accordion_bench.advising.arms import arm_of, measured_method
from accordion_bench.advising.counted_step import FEEDBACK, costs_on, counted_step, relative_copy_time
from accordion_bench.advising.gpus import asked_device, codec_times, named
from accordion_bench.plan import TensorSpec
from tests.advising.test_counted_step import batch, loss, net

SPECS = (TensorSpec("a", (256, 512)), TensorSpec("b", (512,)), TensorSpec("c", (512, 300)))
NUMBERS = sum(spec.numel for spec in SPECS)
ARMS = {
    "none": arm_of(),
    "bf16": arm_of("bf16"),
    "qsgd": arm_of("qsgd"),
    "powersgd": arm_of("powersgd"),
    "efsignsgd": arm_of("efsignsgd"),
    "local": arm_of(sync="diloco"),
}


def seconds(cost) -> float:
    """Of all buckets, with one message decoded."""
    return sum(bucket.encode + sum(bucket.decode) for bucket in cost.buckets)


@pytest.fixture(scope="module")
def costs():
    return {name: measured_method(arm, SPECS, budget=0.0) for name, arm in ARMS.items()}


@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize("name", ["bf16", "qsgd", "powersgd", "efsignsgd"])
def test_codecs_are_those_of_the_table(name, gpu, costs):
    (found,), left_out = costs_on(named(gpu), [costs[name]], [ARMS[name]], SPECS, 0.01)
    wanted = codec_times()[name].on(named(gpu), len(SPECS), NUMBERS)
    if ARMS[name].chosen.compressor.get("error_feedback"):
        wanted += FEEDBACK * NUMBERS / named(gpu).copies
    assert seconds(found) == pytest.approx(wanted) and not left_out
    assert [bucket.messages for bucket in found.buckets] == [bucket.messages for bucket in costs[name].buckets]
    assert found.extra == pytest.approx(0.01 * costs[name].extra) and found.repetitions == ()


@pytest.mark.parametrize("name", ["none", "local"])
def test_what_only_moves_memory_is_scaled(name, costs):
    (found,), _ = costs_on(named("h100"), [costs[name]], [ARMS[name]], SPECS, 0.02)
    assert seconds(found) == pytest.approx(0.02 * seconds(costs[name]))


def test_what_nobody_has_timed_on_a_gpu_is_left_out():
    arm = arm_of("atomo")
    found, left_out = costs_on(named("h100"), [measured_method(arm, SPECS, budget=0.0)], [arm], SPECS, 0.02)
    assert not found and list(left_out) == [arm.name] and "was not timed on a GPU" in left_out[arm.name]


def test_copies_are_timed_here():
    tensors = [torch.zeros(1_000_000)]
    fast, slow = (relative_copy_time(named(gpu), tensors) for gpu in ("h200", "4090"))
    assert 0 < fast < slow < 1


def methods(names=("none", "bf16", "qsgd")) -> TimedMethods:
    return TimedMethods([ARMS[name] for name in names], torch.device("cpu"), 0.0)


@pytest.mark.parametrize(
    ("asked", "place"), [({"gpu": "l40s"}, "an NVIDIA L40S (estimated)"), ({"compute_ms": 3}, "a GPU with")]
)
def test_a_basis_of_a_gpu(asked, place):
    counted = counted_step(net(), batch(), loss)
    found = api.asked_for(asked_device(**asked), counted, methods(), None)
    assert found.times.place.startswith(place) and found.times.device == "cuda" and found.on_gpus is None
    assert [cost.name for cost in found.costs] == [ARMS[name].name for name in ("none", "bf16", "qsgd")]
    assert any("codecs are estimated" in doubt for doubt in found.doubts) and len(found.doubts) == 2


def test_a_step_time_of_devices_that_are_at_hand_has_their_codecs():
    counted = counted_step(net(), batch(), loss)
    found = api.asked_for(asked_device(compute_ms=3), counted, methods(), at_hand=True)
    assert (found.times.place, found.times.device) == ("a CPU with compute_ms=3", "cpu")
    assert not any("codecs are estimated" in doubt for doubt in found.doubts) and len(found.costs[2].repetitions) > 0
