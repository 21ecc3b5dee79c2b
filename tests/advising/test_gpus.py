"""The table of GPUs: every number has a source, rates follow from it, codec times are those of results/gpu."""

import json
import math

import numpy as np
import pytest
import torch
import yaml
from scipy.optimize import lsq_linear
from torch import nn

from accordion_bench.advising import gpus as table
from accordion_bench.advising.counted_step import counted_step
from accordion_bench.advising.gpus import codec_times, gpus, measured_gpu, named
from accordion_bench.options.checks import ConfigError
from tests.kit.paths import ROOT

SAID = yaml.safe_load((ROOT / "accordion_bench" / "advising" / "gpus.yaml").read_text(encoding="utf-8"))
REPORT = json.loads((ROOT / "results" / "gpu" / "report.json").read_text(encoding="utf-8"))
MILLIONS = {11: (62, 11_689_512), 25: (161, 25_557_032), 138: (32, 138_357_544)}  # (tensors, numbers) of the report's


def reported() -> dict[str, list[float]]:
    """Seconds of each codec by the report, of the three networks."""
    found: dict[str, list[float]] = {}
    for _, name, microseconds, *_ in REPORT["codecs"]["found"]:
        if not name.endswith("by torch"):
            found.setdefault(name, []).append(1e-6 * float(microseconds))
    return found


def test_who_is_in_it():
    assert list(gpus()) == ["a100", "h100", "h200", "l40s", "4090"]
    assert all(len(gpu.source) > 20 for gpu in gpus().values())
    assert named("H100") is gpus()["h100"] and named("4090").name == "NVIDIA RTX 4090"
    with pytest.raises(
        ConfigError, match=r"^gpu must be one of a100, h100, h200, l40s, 4090, got h1000; type gpu=h100$"
    ):
        named("h1000")


@pytest.mark.parametrize("key", ["a100", "h100", "h200", "l40s", "4090"])
def test_rates_are_means_of_what_was_published(key):
    gpu, said = named(key), SAID["gpus"][4090 if key == "4090" else key]
    for rate, samples in ((gpu.half, said["half"]), (gpu.tf32, said["tf32"])):
        each = [per_second * SAID["networks"][network] for network, per_second in samples.items()]
        assert rate == pytest.approx(math.prod(each) ** (1 / len(each)))
        assert min(each) <= rate <= max(each)
    assert gpu.float32 <= min(gpu.tf32, said["peak_float32"]) < gpu.half
    assert gpu.rates("bfloat16") == gpu.rates("float16") == (gpu.half, gpu.half)
    assert gpu.rates(None) == gpu.rates("float32") == (gpu.tf32, gpu.float32)
    assert gpu.rates(None, deterministic=True) == (gpu.float32, gpu.float32)


def test_operations_of_the_known_networks():
    """As they are counted for the network that is asked about, of one sample."""
    import torchvision

    with torch.device("meta"):
        model = torchvision.models.resnet50()
    batch = torch.empty(2, 3, 224, 224, device="meta"), torch.zeros(2, dtype=torch.long, device="meta")
    found = counted_step(model, batch, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]))
    assert (found.whole.convolved + found.whole.multiplied) / 2 == pytest.approx(SAID["networks"]["resnet50"], rel=0.01)


def test_codec_times_are_fitted_to_what_was_measured():
    """Least squares of relative errors; no part is below that of the quicker cast."""
    assert measured_gpu().name in REPORT["header"]["gpus"]
    parts = np.array([[1.0, *MILLIONS[floats]] for floats in MILLIONS])
    scale = parts.max(axis=0)

    def fitted(seconds, least):
        rows = parts / scale / np.array(seconds)[:, None]
        return lsq_linear(rows, np.ones(len(rows)), (np.array(least) * scale, np.inf)).x / scale

    measured = reported()
    least = np.minimum(*(fitted(measured[name], [0, 0, 0]) for name in ("bf16", "fp16")))
    assert set(codec_times()) == set(measured) - {"copy"}
    for name, time in codec_times().items():
        wanted = fitted(measured[name], [0, 0, 0] if name in ("bf16", "fp16") else least)
        assert tuple(time) == pytest.approx(tuple(wanted), rel=2e-3)
        if name != "randomk":
            again = [time.on(measured_gpu(), *MILLIONS[floats]) for floats in MILLIONS]
            assert again == pytest.approx(measured[name], rel=0.1)
    copied = 8 * MILLIONS[138][1] / measured["copy"][-1]
    assert measured_gpu().copies == pytest.approx(copied, rel=1e-3)


def test_only_what_hangs_on_the_memory_is_scaled():
    codec, slow, fast = codec_times()["qsgd"], named("4090"), named("h200")
    assert codec.on(slow, 10, 0) == codec.on(fast, 10, 0) == codec.once + 10 * codec.tensor
    numbers = codec.on(slow, 0, 1e9) - codec.once, codec.on(fast, 0, 1e9) - codec.once
    assert numbers[0] / numbers[1] == pytest.approx(fast.memory / slow.memory)
    assert fast.copies / slow.copies == pytest.approx(fast.memory / slow.memory)


@pytest.mark.parametrize(("how", "precision"), [("float32", None), ("bfloat16, channels_last", "bfloat16")])
def test_the_estimate_is_within_twice_of_what_was_measured(how, precision):
    """ResNet-18 on 512 images of 32 x 32, on the GPU of results/gpu: a plain loop."""
    from accordion_bench.models.resnet import ResNet18

    with torch.device("meta"):
        model = ResNet18(3, 10)
    batch = torch.empty(512, 3, 32, 32, device="meta"), torch.zeros(512, dtype=torch.long, device="meta")
    counted = counted_step(model, batch, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]))
    measured = float(np.median(REPORT["training"]["found"][how]["a plain loop"]))
    estimated = counted.on_gpu(measured_gpu(), precision, False, update=0.0).compute
    assert measured / 2 < estimated < 2 * measured


def test_the_host_s_seconds_for_an_operation_are_those_of_a_host_that_was_measured():
    """ResNet-50 on 64 images of 32 x 32 leaves the GPU idle: its step is what the host takes to start operations."""
    from accordion_bench.models.resnet import ResNet50

    with torch.device("meta"):
        model = ResNet50(3, 10)
    batch = torch.empty(64, 3, 32, 32, device="meta"), torch.zeros(64, dtype=torch.long, device="meta")
    counted = counted_step(model, batch, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]))
    measured = float(np.median(REPORT["steps"]["found"]["DDP"]))
    assert counted.whole.started * table.operation_seconds() == pytest.approx(measured, rel=0.15)
