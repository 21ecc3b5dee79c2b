"""Seconds from overrides to a resolved configuration, for every experiment with its last arm, slowest last.

python -m scripts.bench.compose
"""

import statistics
import time
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from accordion_bench.config.compose import compose, register_resolvers
from accordion_bench.options.conf_dir import conf_dir
from scripts.bench.harness import command_line, seconds_of

ROUNDS = 3


def composed(experiment: str) -> Any:
    """Return Hydra's composition of an experiment without its arms, not resolved."""
    register_resolvers()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return hydra_compose("config", [f"+experiment={experiment}"], return_hydra_config=True)


def seconds(overrides: list[str]) -> float:
    """Return the median over some rounds of this process's time."""
    compose_it = lambda: compose(overrides)  # noqa: E731
    return statistics.median(seconds_of(compose_it, clock=time.process_time) for _ in range(ROUNDS))


def main() -> None:
    """Print one line for each experiment."""
    command_line(__doc__).parse_args()
    folder = conf_dir() / "experiment"
    names = sorted(str(file.relative_to(folder).with_suffix("")) for file in folder.glob("*/*.yaml"))
    found = {}
    for name in names:
        full = composed(name)
        if "experiment" not in full.get("setup", {}):  # a part of others
            continue
        arms = (full.hydra.sweeper.params or {}).get("+arm", "")
        found[name] = seconds([f"+experiment={name}", *([f"+arm={arms.split(',')[-1]}"] if arms else [])])
    for name, median in sorted(found.items(), key=lambda item: item[1]):
        print(f"{median:6.3f} s  {name}")


if __name__ == "__main__":
    main()
