"""What runs together: cells of a compressor, a synchronisation scheme and policies, and few cells for all pairs."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.config.brought import bring_again
from accordion_bench.config.components import build_components
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.choice_file import read_yaml
from accordion_bench.options.conf_dir import yaml_files
from accordion_bench.options.instantiate import Config, target
from accordion_bench.run_config import RunConfig

Cell = tuple[str, str, tuple[str, ...]]  # compressor, synchronisation, policies in order


@functools.cache
def names(group: str) -> list[str]:
    """The choices of a config group."""
    return list(yaml_files(group))


@functools.cache
def _node(group: str, name: str) -> Config:
    node = read_yaml(yaml_files(group)[name])
    return {key: value for key, value in node.items() if key != "defaults"}


def cell(base: Config, compressor: str, sync: str, adaptive: Iterable[str]) -> Config:
    """The configuration of one cell.

    Args:
        base: of the run around it.
        compressor, sync: names.
        adaptive: names of policies, in order; `none` is no policy.
    """
    cfg = copy.deepcopy(base)
    policies = [name for name in adaptive if name != "none"]
    cfg["compressor"], cfg["sync"] = dict(_node("compressor", compressor)), dict(_node("sync", sync))
    cfg["adaptive"] = {name: dict(_node("adaptive", name)) for name in policies}
    for group in ("compressor", "sync"):
        _set_beside(cfg, cfg[group], group)
    for name in policies:
        _set_beside(cfg, cfg["adaptive"][name], f"adaptive.{name}")
    cfg["choices"] |= {"compressor": compressor, "sync": sync, "adaptive": ",".join(policies) or "none"}
    bring_again(cfg)
    return cfg


def _set_beside(cfg: Config, node: Config, group: str) -> None:
    """Set what must stand in other groups, or a component is refused."""
    for other, wanted in target(node, group).description.requires.items():
        if isinstance(wanted, str):
            cfg[other] = dict(_node(other, wanted))
            cfg["choices"][other] = wanted
        else:
            cfg[other] |= wanted


def shortened(cfg: Config) -> Config:
    """The configuration with options that let a scheme average, and a policy decide, within six steps of 4 workers."""
    knob = wrapped_compressor(cfg["compressor"]).compressor.traits.knob or ""

    def short(node: Config, group: str) -> Config:
        return node | target(node, group).description.smoke_options(node, knob)

    return {
        **cfg,
        "compressor": short(cfg["compressor"], "compressor"),
        "sync": short(cfg["sync"], "sync"),
        "adaptive": {name: short(node, f"adaptive.{name}") for name, node in cfg["adaptive"].items()},
    }


def refusal(cfg: Config, workers: int) -> str | None:
    """Why a configuration is refused, or None where it runs."""
    try:
        build_components(RunConfig.from_dict(cfg), workers)
    except ConfigError as refused:
        return str(refused)
    return None


def pairs(compressor: str, sync: str, policy: str) -> set[tuple[str, str, str]]:
    """The pairs that occur in a cell."""
    return {("cs", compressor, sync), ("ca", compressor, policy), ("as", policy, sync)}


def cover(
    runs: Callable[[Cell], bool], compressors: Sequence[str], syncs: Sequence[str], policies: Sequence[str]
) -> list[Cell]:
    """Cells that run, so few that every pair that runs with some third choice occurs in one of them.

    Several policies share a cell where they run together. Greedy: the first pair that is missing chooses the cell that
    brings in most that are.

    Args:
        runs: whether a cell runs.
        compressors, syncs, policies: names.
    """
    single = [one for one in itertools.product(compressors, syncs, policies) if runs((*one[:2], one[2:]))]
    missing = set().union(*(pairs(*one) for one in single))
    cells: list[Cell] = []
    while missing:
        first = min(missing)
        compressor, sync, policy = max(
            (one for one in single if first in pairs(*one)), key=lambda one: len(pairs(*one) & missing)
        )
        together: tuple[str, ...] = (policy,)
        for more in policies:
            new = more not in together and "none" not in (policy, more) and pairs(compressor, sync, more) & missing
            if new and runs((compressor, sync, (*together, more))):
                together = (*together, more)
        cells.append((compressor, sync, together))
        missing -= set().union(*(pairs(compressor, sync, one) for one in together))
    return cells
