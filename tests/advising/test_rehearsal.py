"""A rehearsal takes the steps of a run: other draws in each, clipping, and the sums that policies want."""

from dataclasses import replace

import pytest
import torch

from accordion_bench.advising.arms import arm_of, measured_method, measured_methods, random_gradients
from accordion_bench.advising.rehearsal import Beside, Rehearsal
from accordion_bench.comm.replicas import Replicas
from accordion_bench.options.conf_dir import read_options, yaml_file
from accordion_bench.plan import TensorSpec
from accordion_bench.signals.statistics import GradientSums
from accordion_bench.sync import every_step

CPU = torch.device("cpu")
SPECS = [TensorSpec("a.weight", (32, 32)), TensorSpec("a.bias", (32,)), TensorSpec("b.weight", (16, 32))]
RANDOM = ["randomk", "qsgd", "natural", "terngrad"]


def moved(rehearsal: Rehearsal, steps: int = 3) -> list[list[torch.Tensor]]:
    """How far the parameters go in each of some steps with the same gradients."""
    gradients, found = random_gradients(SPECS, CPU), []
    for _ in range(steps):
        before = [param.detach().clone() for param in rehearsal.axis.params]
        rehearsal.step(gradients)
        found.append([param.detach() - old for param, old in zip(rehearsal.axis.params, before, strict=True)])
    return found


def plain(name: str, **options):
    """A method without memory, whose steps are alike where its draws are."""
    arm = arm_of(name, options={"error_feedback": "none", **options} if options else {})
    return replace(
        arm,
        chosen=replace(
            arm.chosen, optimizer={**arm.chosen.optimizer, "momentum": 0, "weight_decay": 0, "nesterov": False}
        ),
    )


@pytest.mark.parametrize("name", RANDOM)
def test_draws_differ_from_step_to_step(name):
    first, second, third = moved(Rehearsal(plain(name).chosen, SPECS, 4, CPU))
    assert not all(map(torch.equal, first, second)) and not all(map(torch.equal, second, third))


def test_steps_without_draws_are_alike():
    """So that the test above tells draws."""
    first, second, _ = moved(Rehearsal(plain("none").chosen, SPECS, 4, CPU))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)


def test_steps_are_counted():
    rehearsal = Rehearsal(arm_of().chosen, SPECS, 4, CPU)
    began = rehearsal.position.step
    moved(rehearsal, 3)
    assert rehearsal.position.step == began + 3 == rehearsal.position.info().step
    assert rehearsal.position.steps_left > 0


def counted(monkeypatch, cls, name: str) -> list[object]:
    """Calls of a method that goes on as before."""
    calls, own = [], getattr(cls, name)

    def noted(self, *args):
        calls.append(args)
        return own(self, *args)

    monkeypatch.setattr(cls, name, noted)
    return calls


@pytest.mark.parametrize("arm", [arm_of(), arm_of("topk"), arm_of(sync="local_sgd")], ids=lambda arm: arm.name)
def test_a_clipping_run_clips(arm, monkeypatch):
    calls = counted(monkeypatch, Replicas, "clip")
    measured_method(arm, SPECS, budget=0.0)
    assert not calls
    clipping = replace(arm, beside=Beside(clip_norm=0.5))
    cost = measured_method(clipping, SPECS, budget=0.0)
    assert calls and set(calls) == {(0.5,)}
    assert not cost.overlaps or arm.chosen.sync_name != "every_step"


def test_what_is_clipped_is_shorter():
    whole, clipped = (
        moved(Rehearsal(plain("none").chosen, SPECS, 4, CPU, None, beside), 1)[0]
        for beside in (Beside(), Beside(clip_norm=1e-3))
    )
    lr = read_options(yaml_file("optimizer", "sgd"))["lr"]
    norm = torch.cat([part.flatten() for part in clipped]).norm()
    assert norm < torch.cat([part.flatten() for part in whole]).norm()
    assert float(norm) <= 1.01e-3 * max(lr, 0.1)


def test_gradients_wait_for_each_other_where_a_worker_clips_its_own():
    assert (
        Rehearsal(arm_of().chosen, SPECS, 4, CPU).overlaps
        != Rehearsal(arm_of().chosen, SPECS, 4, CPU, None, Beside(clip_norm=1.0)).overlaps
    )
    after = Rehearsal(arm_of().chosen, SPECS, 4, CPU, None, Beside(1.0, "after"))
    assert after.overlaps == Rehearsal(arm_of().chosen, SPECS, 4, CPU).overlaps


def test_clipping_after_the_exchange(monkeypatch):
    calls = []
    own = every_step.clip_factor
    monkeypatch.setattr(every_step, "clip_factor", lambda *args: (calls.append(args[1]), own(*args))[1])
    before = counted(monkeypatch, Replicas, "clip")
    measured_method(replace(arm_of("topk"), beside=Beside(2.0, "after")), SPECS, budget=0.0)
    assert set(calls) == {2.0} and not before
    refused = [replace(arm, beside=Beside(2.0, "after")) for arm in (arm_of("dgc"), arm_of(sync="diloco"))]
    costs, left_out = measured_methods(refused, SPECS)
    assert not costs and all("clip_at must be before where" in why for why in left_out.values())


def test_sums_of_policies_are_taken(monkeypatch):
    """Norms that are measured, and those that a policy decides by."""
    arm = arm_of("topk")
    rehearsal = Rehearsal(arm.chosen, SPECS, 4, CPU)
    moved(rehearsal, 1)
    assert not rehearsal.policies.epoch_sums.sums
    with_norms = Rehearsal(arm.chosen, SPECS, 4, CPU, None, Beside(norms=True))
    moved(with_norms, 2)
    total = with_norms.policies.epoch_sums.sums["norm_of_sum_local"].tensors
    for part, gradient in zip(total, random_gradients(SPECS, CPU), strict=True):
        torch.testing.assert_close(part[0], 2 * gradient)
    added = counted(monkeypatch, GradientSums, "add_updates")
    adaptive = {"accordion": {**read_options(yaml_file("adaptive", "accordion")), "statistic": "update"}}
    by_policy = Rehearsal(replace(arm.chosen, adaptive=adaptive), SPECS, 4, CPU)
    moved(by_policy, 2)
    assert set(by_policy.policies.epoch_sums.sums) == {"norm_of_sum_update"} and len(added) == 2
