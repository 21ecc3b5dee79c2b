"""What a policy may return: plans hold indices, and one sentence says what is wrong with another thing."""

from dataclasses import replace

import numpy as np
import pytest

from accordion_bench.adaptive.policy import checked
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import Ladder, Plan

LADDER = Ladder("density", (0.1, 0.5), (0.1, 0.5))
PLAN = Plan({"a": 1, "b": 1}, 32, codebooks={2: (-1.0, 0.2, 1.0)})

WRONG = {
    "nothing": (None, r"return a Plan, got null; write `return plan`"),
    "a value": (
        PLAN.with_levels({"b": 0.1}),
        r"index in the ladder \(0 = density 0.1, 1 = density 0.5\), got 0.1 for b",
    ),
    "beyond": (PLAN.with_levels({"a": 2}), r"got 2 for a; write `ladder.values.index\(VALUE\)`"),
    "from the end": (PLAN.with_levels({"a": -1}), "got -1 for a"),
    "a flag": (PLAN.with_levels({"a": True}), "got True for a"),
    "another tensor": (PLAN.with_levels({"c": 0}), "each tensor of the plan before, got c added"),
    "a tensor less": (replace(PLAN, levels={"a": 0}), "got b left out"),
    "half a sample": (replace(PLAN, batch_size=16.5), "batch_size that is a whole number of at least 1, got 16.5"),
    "no period": (replace(PLAN, period=0), "period that is a whole number of at least 1, got 0"),
    "no rate": (replace(PLAN, lr_factor=float("nan")), "lr_factor that is finite and not negative, got nan"),
    "a shorter codebook": (replace(PLAN, codebooks={2: (-1.0, 1.0)}), "as many levels as the plan before"),
}


@pytest.mark.parametrize("plan, told", list(WRONG.values()), ids=list(WRONG))
def test_one_sentence_for_a_wrong_plan(plan, told):
    with pytest.raises(ConfigError, match=f"^adaptive.mine must .*{told}") as caught:
        checked("mine", PLAN, plan, LADDER)
    assert "\n" not in str(caught.value)


def test_plans_that_can_be_followed():
    assert checked("mine", PLAN, PLAN, LADDER) is PLAN
    changed = replace(PLAN.with_levels({"a": np.int64(0)}), batch_size=64, period=4, lr_factor=0.5)
    assert checked("mine", PLAN, changed, LADDER) is changed


def test_levels_keep_their_order():
    """What is broadcast are numbers alone: every worker must read them for the same tensors."""
    turned = replace(PLAN, levels={"b": 0, "a": 1})
    assert list(checked("mine", PLAN, turned, LADDER).levels.items()) == [("a", 1), ("b", 0)]
