"""Timelines of somebody's loop as times of a step: what is read, and what is refused."""

import json
import re

import pytest
from torch import nn

import accordion_bench as ab
from accordion_bench.advising.step_times import step_times_from
from accordion_bench.attaching.own_parameters import trained_parameters
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec
from tests.kit import by_hand, small_net
from tests.kit.processes import together

SPECS = [TensorSpec(name, tuple(param.shape)) for name, param in trained_parameters(small_net.net())]


def written(path, **changes):
    """A timeline as it is, or with some parts changed."""
    found = {
        "format": 2,
        "model": "Sequential",
        "device": "cpu",
        "steps": 3,
        "seconds": {"data": 0.5, "compute": 3.0, "exposed": 1.0, "update": 0.25, "policy": 0.0},
        "step_seconds": [3.5, 3.75, 4.0],
        "tensors": [
            {"name": spec.name, "shape": list(spec.shape), "ready_seconds": 3.0 - i if i else None}
            for i, spec in enumerate(SPECS[:3])
        ],
        "buckets": [],
    } | changes
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not ...}))
    return path


def test_what_is_read(tmp_path):
    times = step_times_from(written(tmp_path / "t.json"), SPECS[:3])
    assert times.specs == tuple(SPECS[:3])
    assert times.ready == (3.5, 2.0, 1.0) and times.backward_end == 3.5  # the first has no gradient
    assert (times.update, times.compute, times.steps) == (0.25, 3.75, (3.5, 3.75, 4.0))
    assert (times.model, times.device, times.source) == ("Sequential", "cpu", str(tmp_path / "t.json"))
    assert len(times.doubts()) == 1 and "has 3 steps, fewer than 10" in times.doubts()[0]


def test_of_an_earlier_version_the_spread_is_not_known(tmp_path):
    times = step_times_from(written(tmp_path / "t.json", format=1, step_seconds=...))
    assert times.steps == () and times.compute == 3.75
    assert times.doubts() == [
        f"{tmp_path / 't.json'} lacks the duration of each step, so their spread is unknown: record it again"
    ]


def record(rank, folder, ddp) -> None:
    with by_hand.in_group(rank, str(folder / "store")):
        model = small_net.net()
        optimizer = small_net.sgd(model)
        module = nn.parallel.DistributedDataParallel(model) if ddp else model
        comm = ab.attach(module, optimizer, "powersgd", rank=1)
        small_net.steps(module, optimizer, comm, rank, range(2))
        comm.timeline(steps=4, path=folder / "timeline.json")
        small_net.steps(module, optimizer, comm, rank, range(2, 8))
        comm.detach()


@pytest.mark.sample(2)
@pytest.mark.parametrize("ddp", [False, True])
def test_what_a_loop_has_recorded_is_read(tmp_path, ddp):
    together(2, record, tmp_path, ddp)
    times = step_times_from(tmp_path / "timeline.json", SPECS)
    assert times.specs == tuple(SPECS) and len(times.steps) == 4 and min(times.steps) > 0
    assert times.ready[-1] > 0 and max(times.ready) <= times.backward_end


WRONG = [
    ({"format": 3}, "its format must be a number from 1 to 2, got 3"),
    ({"format": ...}, "its format must be a number from 1 to 2, got null"),
    ({"tensors": []}, "tensors must be a list of at least one, got none"),
    ({"tensors": 7}, "tensors must be a list, got 7"),
    ({"tensors": [{"name": "a", "shape": [-1]}]}, "a tensor must have a name and a shape, got "),
    ({"seconds": ...}, "seconds must be an object, got null"),
    ({"seconds": {"data": 0, "compute": float("nan"), "update": 0}}, "seconds.compute must be a finite number of "),
    ({"seconds": {"data": 0, "compute": 1, "update": -1}}, "seconds.update must be a finite number of seconds of at "),
    ({"step_seconds": ...}, "step_seconds must be a list, got null"),
    ({"step_seconds": [1, float("inf")]}, "step_seconds[1] must be a finite number of seconds of at least 0, got Inf"),
    (
        {"tensors": [{"name": SPECS[0].name, "shape": list(SPECS[0].shape), "ready_seconds": "soon"}]},
        f'ready_seconds of {SPECS[0].name} must be a finite number of seconds of at least 0, got "soon"',
    ),
]


@pytest.mark.parametrize("changes, said", WRONG)
def test_refused_in_one_sentence(tmp_path, changes, said):
    path = written(tmp_path / "t.json", **changes)
    with pytest.raises(ConfigError, match=re.escape(f"comm.timeline() has written, got {path}: {said}")) as refused:
        step_times_from(path)
    assert str(refused.value).endswith("; record one with comm.timeline() of ab.attach")


def test_another_model_is_told_by_its_first_tensor(tmp_path):
    path = written(tmp_path / "t.json")
    wide = [TensorSpec(spec.name, (99, *spec.shape[1:])) if i == 1 else spec for i, spec in enumerate(SPECS[:3])]
    with pytest.raises(
        ConfigError, match=r"it must be of the same model, got 0.bias \[16\] where the model has 0.bias "
    ):
        step_times_from(path, wide)
    with pytest.raises(ConfigError, match="got no further tensor where the model has"):
        step_times_from(path, SPECS)
    with pytest.raises(ConfigError, match="where the model has no further tensor"):
        step_times_from(path, SPECS[:2])


def test_what_is_no_timeline_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"it cannot be read \(No such file or directo"):
        step_times_from(tmp_path / "nowhere.json")
    for text in ("no json", "[1]", "7", ""):
        (tmp_path / "t.json").write_text(text)
        with pytest.raises(ConfigError, match="it must hold one JSON object, got "):
            step_times_from(tmp_path / "t.json")
    (tmp_path / "t.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it must hold one JSON object, got something else"):
        step_times_from(tmp_path / "t.json")
