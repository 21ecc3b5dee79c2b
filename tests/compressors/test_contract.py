"""What every compressor owes, for every YAML of the group; a new file is tested by being there."""

import pytest

from accordion_bench import conformance
from accordion_bench.comm.collectives import Comm
from accordion_bench.methods.compatibility import knobs
from accordion_bench.position import StepInfo
from tests.conformance.test_conformance import owed
from tests.kit.helpers import exchange_for, gradients, yaml_names

ELSEWHERE = {"placement", "devices"}  # test_placement.py starts its processes once for all; below
ALIKE = {"mean", "contraction", "dtypes", "inputs", "global_rng", "same_key", "levels", "collectives", "scope", "ties"}
BY_NAME = {conformance.name_of(check): check for check in conformance.CHECKS}
CHECKS = [name for name in BY_NAME if name not in ELSEWHERE]
CARRIED = [name for name in CHECKS if name not in ALIKE]  # what depends on the collective
NAMES = yaml_names("compressor")
MAKES = {name: conformance.from_yaml(name) for name in NAMES}
MADE = {name: make() for name, make in MAKES.items()}
OTHERS = [
    (name, other)
    for name, made in MADE.items()
    for other in made.compressor.traits.collectives
    if other != made.collective
]


@pytest.mark.sample(7)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", NAMES)
def test_every_yaml(name, check):
    """At the configured level; of the check of levels at all."""
    owed(conformance.run(BY_NAME[check], MAKES[name], levels=[None] if check != "levels" else None))


def further_levels(name: str, check: str):
    """Return the levels at which `test_every_yaml` does not run the check."""
    if BY_NAME[check] in conformance.ONCE:
        return []
    return conformance.levels_of(MAKES[name], more=BY_NAME[check] in conformance.OFTEN)[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "check"), [(name, check) for name in NAMES for check in CHECKS if further_levels(name, check)]
)
def test_every_yaml_at_its_other_levels(name, check):
    owed(conformance.run(BY_NAME[check], MAKES[name], levels=further_levels(name, check)))


def other(name: str, collective: str):
    """In the default suite, the first compressor that can travel so."""
    first = next(of for of, way in OTHERS if way == collective)
    return pytest.param(name, collective, marks=[] if name == first else [pytest.mark.slow])


@pytest.mark.parametrize("check", CARRIED)
@pytest.mark.parametrize(("name", "collective"), [other(*pair) for pair in OTHERS])
def test_every_other_collective(name, collective, check):
    """At the configured level."""
    owed(conformance.run(BY_NAME[check], conformance.from_yaml(name, collective=collective), levels=[None]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_gpu_equals_cpu(name):
    owed(conformance.run(BY_NAME["devices"], MAKES[name]))


def test_single_worker_sends_nothing_over_the_wire():
    exchange, plan = exchange_for("none", comm=Comm(1))
    exchange(gradients(workers=1).tensors, StepInfo(plan, 0, 0.1))
    assert exchange.comm.ledger.columns()["wire_bytes"] == 0


def test_compressors_with_levels_are_found_by_their_files():
    declared = {name for name, made in MADE.items() if made.compressor.traits.knob}
    assert declared <= {name for name, knob in knobs().items() if knob}
