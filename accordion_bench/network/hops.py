"""What links differ in: by kind of collective, and inside machines."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from accordion_bench.network.collective_costs import KINDS, Hop
from accordion_bench.options import checks
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.conf_dir import yaml_file, yaml_files
from accordion_bench.options.units import without_units


class KindCost(NamedTuple):
    """One kind of collective between machines.

    latency: seconds that each round adds.
    bandwidth: bit/s.
    cpu: seconds of processor time for each byte that a worker sends.
    """

    latency: float
    bandwidth: float
    cpu: float = 0.0


def checked_kinds(kinds: Any, usual: Hop) -> dict[str, KindCost]:
    """What differs by kind of collective; what is not said of one is as usual.

    Raises:
        ValueRefused: a name is no kind, or a number none.
    """
    if not isinstance(kinds, Mapping) or not {*kinds} <= {*KINDS}:
        raise ValueRefused("kinds", f"groups of numbers by kind of collective ({', '.join(KINDS)})", kinds, None)
    found = {}
    for kind, said in without_units(dict(kinds)).items():
        if not isinstance(said, Mapping) or set(said) - set(KindCost._fields):
            raise ValueRefused(f"kinds.{kind}", f"a group of {', '.join(KindCost._fields)}", said, None)
        own = {"latency": usual.latency, "bandwidth": usual.bandwidth, "cpu": 0.0, **said}
        latency = checks.number(f"kinds.{kind}.latency", own["latency"], at_least=0, instead=usual.latency)
        bandwidth = checks.number(f"kinds.{kind}.bandwidth", own["bandwidth"], above=0, instead=usual.bandwidth)
        cpu = checks.number(f"kinds.{kind}.cpu", own["cpu"], at_least=0, instead=0)
        found[str(kind)] = KindCost(latency, bandwidth, cpu)
    return found


def inner_hop(inside: Any) -> Hop:
    """The link inside a machine: that of a file in conf/network, or {bandwidth, latency}.

    Raises:
        ValueRefused: there is no file of this name, or a number is none.
    """
    if isinstance(inside, Mapping):
        said = without_units(dict(inside))
        if set(said) != {"latency", "bandwidth"}:
            raise ValueRefused("inside", "a preset's name, or a group of bandwidth and latency", inside, "pcie4")
        bandwidth = checks.number("inside.bandwidth", said["bandwidth"], above=0, instead=2e11)
        return Hop(checks.number("inside.latency", said["latency"], at_least=0, instead=1e-5), bandwidth)
    file = yaml_file("network", inside) if isinstance(inside, str) else None
    said = yaml.safe_load(file.read_text(encoding="utf-8")) if file else {}
    if not said.get("bandwidth"):
        known = [known for known in yaml_files("network") if known != "custom"]
        raise ValueRefused("inside", f"one of {', '.join(known)}", inside, checks.closest(str(inside), known))
    numbers = without_units(said)
    return Hop(numbers["latency"], numbers["bandwidth"])
