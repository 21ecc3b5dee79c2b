"""Smoke test (`+experiment=smoke`): run all pairs of compressor, policy and synchronisation scheme for a few steps."""

import contextlib
import copy
import functools
import io
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accordion_bench import train
from accordion_bench.cli import sweep
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.config.components import build_components, with_counts
from accordion_bench.config.compose import reapply_brought
from accordion_bench.config.validate import validate
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import read_yaml, yaml_files
from accordion_bench.options.instantiate import Config, target
from accordion_bench.options.units import counted
from accordion_bench.processes.placement import place
from accordion_bench.run_config import RunConfig

Cell = tuple[str, str, tuple[str, ...]]  # compressor, scheme, policies in order


@functools.cache
def names(group: str) -> list[str]:
    """Return the choices of a config group."""
    return list(yaml_files(group))


@functools.cache
def _node(group: str, name: str) -> Config:
    node = read_yaml(yaml_files(group)[name])
    return {key: value for key, value in node.items() if key != "defaults"}


def composed_cell(base: Config, compressor: str, sync: str, adaptive: Iterable[str]) -> Config:
    """Return the common configuration `base` with the choices of one cell; policies in order, `none` is ignored."""
    cfg = copy.deepcopy(base)
    policies = [name for name in adaptive if name != "none"]
    cfg["compressor"], cfg["sync"] = dict(_node("compressor", compressor)), dict(_node("sync", sync))
    cfg["adaptive"] = {name: dict(_node("adaptive", name)) for name in policies}
    for group in ("compressor", "sync"):
        _set_beside(cfg, cfg[group], group)
    for name in policies:
        _set_beside(cfg, cfg["adaptive"][name], f"adaptive.{name}")
    cfg["choices"] |= {"compressor": compressor, "sync": sync, "adaptive": ",".join(policies) or "none"}
    reapply_brought(cfg)
    return cfg


def _set_beside(cfg: Config, node: Config, group: str) -> None:
    """Set the options of other groups that a component requires."""
    for other, wanted in target(node, group).description.requires.items():
        if isinstance(wanted, str):
            cfg[other] = dict(_node(other, wanted))
            cfg["choices"][other] = wanted
        else:
            cfg[other] |= wanted


def shortened(cfg: Config) -> Config:
    """Return the configuration with options for which schemes average and policies decide in six steps of 4 workers."""
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
    """Return the reason why a configuration is refused; None if it is valid."""
    try:
        build_components(RunConfig.from_dict(cfg), workers)
    except ConfigError as refused:
        return str(refused)
    return None


def pairs(compressor: str, sync: str, policy: str) -> set[tuple[str, str, str]]:
    """Return the pairs of choices in a cell."""
    return {("cs", compressor, sync), ("ca", compressor, policy), ("as", policy, sync)}


def cover(
    runs: Callable[[Cell], bool], compressors: Sequence[str], syncs: Sequence[str], policies: Sequence[str]
) -> list[Cell]:
    """Return few valid cells that together contain every pair that is valid with some third choice.

    Compatible policies share a cell. The search is greedy: of the cells with the first missing pair, it takes the one
    with the most missing pairs.
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


NAME = "smoke"


def cells(base: Config, typed: Mapping[str, Any]) -> list[Cell]:
    """Return the cells to run; `compressor`, `sync` and `adaptive` on the command line (`typed`) restrict them."""

    @functools.cache
    def runs(cell: Cell) -> bool:
        return refusal(composed_cell(base, *cell), base["workers"]) is None

    chosen = {"adaptive": list(base["adaptive"]) or ["none"]}
    chosen |= {group: [base["choices"][group]] for group in ("compressor", "sync")}
    groups = ("compressor", "sync", "adaptive")
    return cover(runs, *(chosen[group] if group in typed else names(group) for group in groups))


def run(base: Config, typed: Mapping[str, Any], tell: Callable[[Exception, str], int]) -> float:
    """Train all cells in this process, print a line for each, and write run folders and a record in `paths.runs`/smoke.

    Args:
        base: common configuration of all cells; ConfigError if it is invalid.
        typed: keys on the command line.
        tell: reports an error in a cell, given its name, to the user; returns the exit status.

    Returns:
        the fraction of the cells that finished.
    """
    base = {**base, "paths": {**base["paths"], "runs": str(Path(base["paths"]["runs"], NAME))}}
    config = with_counts(RunConfig.from_dict(base))
    base = {**base, "dataset": config.dataset}
    validate(config, place(config))
    began, todo, ran = time.monotonic(), cells(base, typed), 0
    sweep.current.begin(base["paths"]["runs"])
    for number, cell in enumerate(todo, 1):
        compressor, scheme, policies = cell
        adaptive = policies[0] if len(policies) == 1 else f"[{','.join(policies)}]"
        overrides = [f"+experiment={NAME}", f"compressor={compressor}", f"sync={scheme}", f"adaptive={adaptive}"]
        ended: list[bool] = []

        def train_cell(note: dict[str, Any], cell: Cell = cell, ended: list[bool] = ended) -> float:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                metric = train.run(shortened(composed_cell(base, *cell)), {}, note)
            ended.append(True)
            return metric

        def tell_named(error: Exception, named: str = " ".join(overrides[1:])) -> int:
            return tell(error, f"{named}: ")

        start = time.monotonic()
        sweep.run_cell(overrides, train_cell, tell_named)
        ran += bool(ended)
        seconds, said = time.monotonic() - start, "ran" if ended else "FAILED"
        print(f"{number:>3} of {len(todo)}  {said:<6} {seconds:5.2f} s  {' '.join(overrides[1:])}", flush=True)
    told = f"{ran} of {counted(len(todo), 'cell')} ran, in {time.monotonic() - began:.0f} s"
    print(f"{told}: {base['paths']['runs']}", flush=True)
    return ran / len(todo)
