"""Some of the methods that advice looks at, by the names of their YAML files."""

from collections.abc import Sequence
from dataclasses import replace

from accordion_bench.advising.arms import FIRST, Arm, considered
from accordion_bench.advising.rehearsal import NOTHING, Beside
from accordion_bench.options import checks
from accordion_bench.options.instantiate import Config


def chosen_arms(
    names: Sequence[str], optimizer: Config | None = None, key: str = "--methods", beside: Beside = NOTHING
) -> list[Arm]:
    """The baselines, and every setting of the methods with these names; none = of all.

    Args:
        names: in conf/compressor and conf/sync; commas may stand between them.
        optimizer: as a configuration says it; None = SGD with momentum.
        key: where the names were given, for messages.
        beside: what else a step does with gradients.

    Raises:
        ValueRefused: a name is unknown.
    """
    arms = considered(optimizer)
    known = list(dict.fromkeys(name_of(arm) for arm in arms))
    wanted = [word for name in names for word in name.split(",") if word]
    for name in wanted:
        checks.choice(key, name, known)
    return [
        replace(arm, beside=beside) for arm in arms if not wanted or arm.overrides in FIRST or name_of(arm) in wanted
    ]


def name_of(arm: Arm) -> str:
    """Of its scheme, or else of its compressor."""
    return arm.overrides[0].partition("=")[2]
