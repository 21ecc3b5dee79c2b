"""Conformance checks: properties that every compressor must have, testable on any of them.

    python -m accordion_bench.conformance compressor=topk compressor.density=0.01
    python -m accordion_bench.conformance compressor._target_=my.module.Class +compressor.option=1

In a test: `outcome = run(check, from_class(MyCompressor))` for each check in `CHECKS`. Checks depend on a compressor's
`Traits` and `Claims` (see `compressors`), never on its name.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from accordion_bench.conformance import aggregate, purity, randomness
from accordion_bench.conformance.placement import check_devices, check_placement, check_replays
from accordion_bench.conformance.subject import (
    Check,
    Make,
    Maker,
    NotApplicable,
    from_class,
    from_overrides,
    from_yaml,
    levels_of,
)
from accordion_bench.options.units import counted

__all__ = [
    "CHECKS",
    "Make",
    "Maker",
    "NotApplicable",
    "Outcome",
    "from_class",
    "from_overrides",
    "from_yaml",
    "levels_of",
    "name_of",
    "run",
]

CHECKS: list[Check] = [
    aggregate.check_payload,
    aggregate.check_wire,
    aggregate.check_mean,
    aggregate.check_identical,
    aggregate.check_telescopes,
    aggregate.check_estimates,
    randomness.check_unbiased,
    randomness.check_variance,
    randomness.check_contraction,
    aggregate.check_fidelity,
    purity.check_zero,
    purity.check_ties,
    purity.check_shapes,
    purity.check_no_entries,
    purity.check_dtypes,
    purity.check_non_finite,
    purity.check_extremes,
    purity.check_inputs,
    purity.check_global_rng,
    purity.check_probe,
    purity.check_put_back,
    purity.check_order,
    purity.check_neighbours,
    purity.check_same_key,
    purity.check_draws,
    purity.check_permutation,
    aggregate.check_state,
    aggregate.check_levels,
    aggregate.check_collectives,
    aggregate.check_start_step,
    aggregate.check_scope,
    check_placement,
    check_devices,
    check_replays,
]

ONCE: list[Check] = [aggregate.check_levels, aggregate.check_collectives, purity.check_neighbours, check_placement]
OFTEN: list[Check] = [aggregate.check_payload, aggregate.check_mean, aggregate.check_identical]


@dataclass(frozen=True)
class Outcome:
    """Result of a check: `pass` with the measurement, `fail` with the failure, or `n/a` with the reason."""

    name: str
    status: str
    text: str


def name_of(check: Check) -> str:
    """Return the name of the property that a check tests."""
    return check.__name__.removeprefix("check_")


def run(check: Check, make: Maker, levels: Sequence[float | None] | None = None) -> Outcome:
    """Run a check at several levels. The outcome is that of the first level that fails, otherwise of the first level.

    The default levels are the configured one and the policies' pair; for ONCE the configured one, for OFTEN more.
    """
    name, told, why = name_of(check), [], ""
    if check in ONCE:
        levels = [None]
    elif not levels:
        levels = levels_of(make, more=check in OFTEN)
    for level in levels:
        where = "" if level is None else f" at {make().compressor.traits.knob}={level:g}"
        try:
            told.append(check(make, level) + where)
        except NotApplicable as reason:
            why = why or str(reason)
        except AssertionError as wrong:
            return Outcome(name, "fail", f"{wrong}{where}")
        except Exception as error:
            return Outcome(name, "fail", f"stops with {type(error).__name__}: {error}{where}")
    if not told:
        return Outcome(name, "n/a", why)
    if len(told) == 1:
        return Outcome(name, "pass", told[0])
    return Outcome(name, "pass", f"{told[0]} ({counted(len(told), 'level')})")
