"""Start and update policies without a run, with synthetic measurements."""

import pytest

from accordion_bench.config.components import build_components
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import Ladder, Measured, Plan, RunFacts
from tests.kit import composed

PAIRS = {"rank": (1, 2), "density": (0.1, 0.99), "bits": (3, 8)}


def started(policy, knob, names="ab", run=None):
    """Return a policy with its plan before the first step, on its own ladder."""
    ladder = Ladder(knob, policy.ladder(knob, PAIRS[knob]), PAIRS[knob])
    plan = policy.start(Plan(dict.fromkeys(names, len(ladder.values) - 1), 8), ladder, run or RunFacts())
    return policy, ladder, plan


def values(plan, ladder):
    return [ladder.values[level] for level in plan.levels.values()]


def components(*overrides):
    return build_components(composed.config(*overrides), workers=4)


def refused(*overrides) -> str:
    with pytest.raises(ConfigError) as caught:
        components(*overrides)
    told = str(caught.value)
    assert "\n" not in told and "; type " in told
    return told


def probes(ladder, **gains):
    """Return probes of every level: `gains` by density (d0_1 for 0.1) with norms 1 and 3; bytes = 1000 x density."""

    def one(density, norm):
        kept = gains.get("d" + f"{density:g}".replace(".", "_"), 1.0)
        return Measured(0.0, norm, kept * norm, 1000 * density)

    return {i: {"a": one(d, 1.0), "b": one(d, 3.0)} for i, d in enumerate(ladder.values)}


def measured(ladder, errors):
    """Return probes of every level from errors per tensor and level; bytes = 10 x level."""
    return {
        i: {name: Measured(e[i] ** 2, 1.0, 1.0, 10 * ladder.values[i]) for name, e in errors.items()}
        for i in range(len(ladder.values))
    }


GRAVAC = {"mildest": 0.4, "smallest": 0.1, "smoothing": 1.0, "window": 2, "interval": 3}
ERRORS = {"a": [4.0, 2.0, 1.9, 1.8], "b": [4.0, 3.9, 1.0, 0.5]}  # at ranks 1, 2, 3, 4
