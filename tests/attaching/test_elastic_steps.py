"""Workers that come and go where every step exchanges: a step that is not whole is repeated without the lost one."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import accordion_bench as ab
from accordion_bench.options.checks import ConfigError
from tests.kit.elastic import LR, Constant, Run, slopes, wait_for

EVERY_STEP: dict[str, Any] = {"sync": "every_step", "momentum": 0.5, "bucket_cap_mb": 1e-6}
TOP_1: dict[str, Any] = {"compressor": {"topk": {"density": 0.01, "error_feedback": True}}}


def reference(steps: list[list[int]], compressed: bool) -> list[list[list[float]]]:
    """The parameters after steps, each of these workers alone: SGD with momentum, of top-1 with error feedback."""
    values = [layer.weight.detach() for layer in Constant().layers]
    momenta = [torch.zeros_like(x) for x in values]
    residuals: dict[int, list[torch.Tensor]] = {}
    for names in steps:
        for i, (x, momentum) in enumerate(zip(values, momenta, strict=True)):
            sent = []
            for name in names:
                kept = residuals.setdefault(name, [torch.zeros_like(x) for x in values])
                gradient = (name + 1) * slopes(x) + kept[i]
                largest = torch.zeros_like(x)
                at = int(gradient.abs().argmax())
                largest.view(-1)[at] = gradient.view(-1)[at]
                sent.append(largest if compressed else gradient)
                kept[i] = gradient - sent[-1]
            momentum.mul_(0.5).add_(sum(sent) / len(sent))
            x.sub_(LR * momentum)
    return [x.tolist() for x in values]


@pytest.mark.parametrize(
    ("end", "compressed"),
    [
        ("amid killed", True),
        ("amid stopped", False),
        pytest.param("amid stopped", True, marks=pytest.mark.slow),
        pytest.param("killed", True, marks=pytest.mark.slow),
    ],
)
def test_a_lost_worker_costs_a_repeated_step(tmp_path: Path, end: str, compressed: bool) -> None:
    """The step in which it was lost is the survivors' alone, from their residuals before it."""
    with Run(tmp_path, 6, **EVERY_STEP, **(TOP_1 if compressed else {})) as run:
        run.start(0, 1, 2, first=4)
        run.start(3, first=4, end=(1, end))
        found = [run.told(name) for name in range(3)]
    assert not any("error" in own for own in found)
    steps = [[0, 1, 2, 3], *[[0, 1, 2]] * 5]
    for own in found:
        for step in range(6):
            expected = reference(steps[: step + 1], compressed)
            for ours, theirs in zip(own["whole"][str(step)], expected, strict=True):
                torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))
        assert list(own["members"].values()) == [4] + [3] * 5
        assert own["took"]["1"] < 5 + 2
        assert (own["row"]["members"], own["row"]["joined"], own["row"]["lost"]) == (3, 0, 1)
    assert len({str(own["whole"]) for own in found}) == 1  # to the bit
    assert len({own["row"]["payload_bytes"] for own in found}) == 1
    seen = [i for own in found for step in range(3) for i in own["samples"][str(step)]]
    assert len(set(seen)) == len(seen)


def test_who_returns_too_late_is_told(tmp_path: Path) -> None:
    """A worker that was stopped while the others went on is left behind; what another program says counts nowhere."""
    with Run(tmp_path, 4, **EVERY_STEP) as run:
        run.start(0, 1, first=3)
        run.start(2, first=3, end=(1, "stopped"))
        wait_for(lambda: run.store.check(["members/generation-1"]))
        run.store.set(f"members/arrival-{run.store.add('members/arrivals', 1)}", "garbage")
        run.store.set("members/generation-7", "[[], -1]")
        assert not any("error" in run.told(name) for name in (0, 1))
        os.kill(run.processes[2].pid, signal.SIGCONT)
        assert run.told(2)["error"] == (
            "LostWorker: step 1: this worker must be in time, got one that the others went on without after 5 s or "
            "longer; start it again, and it enters after a round"
        )


@pytest.mark.parametrize(
    ("passed", "said"),
    [
        ({"adaptive": "accordion", "compressor": "topk"}, "elastic must be False with adaptive=accordion, because"),
        ({"min_workers": 0}, "min_workers must be an integer of at least 1, got 0; pass min_workers=2"),
        ({"scaler": torch.amp.GradScaler(enabled=False)}, "scaler must be None where workers join and leave, got"),
    ],
)
def test_what_does_not_go_together_is_refused(passed: dict[str, Any], said: str) -> None:
    model, store = Constant(), torch.distributed.HashStore()
    with pytest.raises(ConfigError, match=said):
        ab.attach(model, torch.optim.SGD(model.parameters(), LR), elastic=True, store=store, **passed)


def test_a_new_worker_goes_on_as_the_others_do(tmp_path: Path) -> None:
    """It has their parameters, their optimizer's momentum and their step; its residual is zero."""
    with Run(tmp_path, 60, pace=0.05, **EVERY_STEP, **TOP_1) as run:
        run.start(0, 1, first=2)
        run.start(7)
        found = {name: run.told(name) for name in (0, 1, 7)}
    entered = found[7]["entered"]
    assert 0 < entered < 60
    steps = [*[[0, 1]] * entered, *[[0, 1, 7]] * (60 - entered)]
    for own in found.values():
        for ours, theirs in zip(own["whole"]["59"], reference(steps, compressed=True), strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))
        assert (own["row"]["members"], own["row"]["joined"], own["row"]["lost"]) == (3, 1, 0)
    together = [[own["whole"][str(step)] for step in range(entered, 60)] for own in found.values()]
    assert together[0] == together[1] == together[2]
