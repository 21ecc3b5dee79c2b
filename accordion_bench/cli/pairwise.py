"""What runs together: cells of a compressor, a synchronisation scheme and policies, and few cells for all pairs."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

from accordion_bench.config.components import build_components
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import conf_dir
from accordion_bench.options.instantiate import Config

Cell = tuple[str, str, tuple[str, ...]]  # compressor, synchronisation, policies in order

# what a choice needs to be looked at fairly, beside its defaults
BESIDE: dict[str, dict[str, dict[str, object]]] = {
    "compressor=demo": {"optimizer": {"momentum": 0.0}},
    "adaptive=adabatch": {"schedule": {"milestones": []}},
}
# so that things happen within six steps
SHORT: dict[str, dict[str, object]] = {
    "sync": {"period": 2, "groups": [[1, 2], [2, 4]]},
    "adaptive": {
        **dict.fromkeys(("interval", "stat_samples", "every", "freq", "samples"), 1),
        "update_at": [0],
        "num_components": 2,
        "factor": 2,
        "smallest": 0.02,
    },
}
# up to 4 bits: a codebook is fitted for every number of bits that a policy may choose, and that of 8 takes seconds
FEW_BITS: dict[str, dict[str, object]] = {
    "accordion": {"strong": 2, "weak": 3},
    "adaqs": {"cap": 4},
    "lgreco": {"levels": [2, 3]},
    "schedule": {"inside": 3, "outside": 2},
}


@functools.cache
def names(group: str) -> list[str]:
    """The choices of a config group."""
    return sorted(file.stem for file in (conf_dir() / group).glob("*.yaml"))


@functools.cache
def _node(group: str, name: str) -> Config:
    import yaml

    node = yaml.safe_load((conf_dir() / group / f"{name}.yaml").read_text())
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
    for choice in (f"compressor={compressor}", f"sync={sync}", *(f"adaptive={name}" for name in policies)):
        for group, options in BESIDE.get(choice, {}).items():
            cfg[group] |= options
    cfg["choices"] |= {"compressor": compressor, "sync": sync, "adaptive": ",".join(policies) or "none"}
    return cfg


def shortened(cfg: Config) -> Config:
    """The configuration with options that let a scheme average, and a policy decide, within six steps of 4 workers."""
    sync = {key: value for key, value in SHORT["sync"].items() if cfg["sync"].get(key)}
    adaptive = {}
    for name, node in cfg["adaptive"].items():
        few = FEW_BITS.get(name, {}) if "bits" in cfg["compressor"] else {}
        cap = {"cap": 8} if name == "grow_batch" else {}
        adaptive[name] = node | {key: value for key, value in SHORT["adaptive"].items() if key in node} | few | cap
    return {**cfg, "sync": cfg["sync"] | sync, "adaptive": adaptive}


def refusal(cfg: Config, workers: int) -> str | None:
    """Why a configuration is refused, or None where it runs."""
    try:
        build_components(cfg, workers)
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
