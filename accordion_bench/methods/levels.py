"""The levels and the codebooks that the plans of a training may hold: those of its policies, or the compressor's."""

import torch

from accordion_bench.adaptive.base import Policy
from accordion_bench.compressors.base import Compressor
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.plan import Ladder

NO_FREE_LEVEL = (-1.0, 0.0, 1.0)  # the ends are fixed, and so is 0


def ladder_of(compressor: Compressor, policies: dict[str, Policy]) -> Ladder:
    """The levels that plans may hold: those of all policies that drive them, or the configured one."""
    traits = compressor.traits
    drivers = {name: policy for name, policy in policies.items() if policy.drives == "level"}
    if not drivers:
        return Ladder(traits.knob or "", () if compressor.level is None else (compressor.level,), traits.pair)
    assert traits.knob is not None
    values: set[float] = set()
    for driver, policy in drivers.items():
        try:
            own = policy.ladder(traits.knob, traits.pair)
        except ValueRefused as refused:
            raise refused.under(f"adaptive.{driver}") from None
        first, *rest = policy.level_keys
        for key, value in zip([first, *rest * len(own)], own, strict=False):
            try:
                values.add(compressor.check_level(key, value))
            except ValueRefused as refused:  # maybe of another option of the compressor
                raise refused.under(f"adaptive.{driver}" if refused.key == key else "compressor") from None
    return Ladder(traits.knob, tuple(sorted(values)), traits.pair)


def codebooks_of(
    compressor: Compressor, policies: dict[str, Policy], ladder: Ladder, name: str
) -> dict[int, tuple[float, ...]]:
    """Where a policy drives codebooks: one per number of bits that the plan may choose, the compressor's own."""
    driver = next((name for name, policy in policies.items() if policy.drives == "codebook"), None)
    if driver is None:
        return {}
    bits = [int(value) for value in ladder.values] if compressor.traits.knob == "bits" else []
    own = {b: compressor.codebook(b) for b in bits}
    books = {b: tuple(torch.tensor(levels).tolist()) for b, levels in own.items() if levels is not None}
    if not books:
        knob, instead = compressor.description.knob_with
        if knob == "bits":
            raise ConfigError(
                f"adaptive={driver} needs a compressor with a codebook to replace, got one whose levels are fixed; "
                f"type {instead}"
            )
        raise ConfigError(
            f"adaptive={driver} needs a compressor with a codebook of its own, got compressor={name}; "
            "type compressor=qsgd"
        )
    if max(map(len, books.values())) <= len(NO_FREE_LEVEL):
        raise ConfigError(
            f"compressor.zero_level must be false where adaptive={driver} fits 2 bits, got true, which leaves it the "
            "levels -1, 0 and 1, of which none can move; type compressor.zero_level=false"
        )
    return books
