"""Conformance: what every compressor owes, as checks that run on any of them.

    python -m accordion_bench.conformance compressor=topk compressor.density=0.01
    python -m accordion_bench.conformance compressor._target_=my.module.Class +compressor.option=1

or, in a test of your own, `outcome = run(check, from_class(MyCompressor))` for each check in `CHECKS`. A check knows a
compressor by its `Traits` and its `Claims` (see `compressors`), never by its name.
"""

from accordion_bench.conformance.runner import CHECKS, Outcome, name_of, run
from accordion_bench.conformance.subject import (
    Make,
    Maker,
    NotApplicable,
    from_class,
    from_overrides,
    from_yaml,
    levels_of,
)

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
