"""Check of presets on the command line: one experiment at a time, with an arm in a single run."""

from collections.abc import Sequence
from typing import Any

from accordion_bench.options.checks import ConfigError

PARTS = ("faithful", "official")  # experiments that only change others
ARM = "+arm"


def refuse_unclear(overrides: Sequence[str], sweeper: Any, choices: Any) -> None:
    """Refuse two experiments at a time, and a single run of an experiment without an arm.

    Args:
        overrides: command-line overrides.
        sweeper: Hydra's configuration of the sweep, including the experiment's.
        choices: chosen names by group.

    Raises:
        ConfigError: the presets are ambiguous; the message suggests an alternative.
    """
    typed = next((word.partition("=")[2] for word in overrides if word.lstrip("+").startswith("experiment=")), "")
    names = [name for name in typed.strip("[]'\"").split(",") if name]
    whole = [name for name in names if name.rpartition("/")[2] not in PARTS]
    if len(whole) > 1:
        raise ConfigError(
            f"experiment must be one, which {' or '.join(PARTS)} may change, got {' and '.join(whole)}; "
            f"type +experiment={whole[0]}"
        )
    arms = (sweeper.get("params") or {}).get(ARM)
    if typed and arms and "arm" not in choices:
        raise ConfigError(f"arm must be one of {arms} in a single run of {typed}, got none; type {ARM}=dense")
