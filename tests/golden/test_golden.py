"""Golden runs give what they gave when their records were made (`python -m scripts.golden` makes them).

Bytes are arithmetic on shapes and plans, so they are equal everywhere; so are plans. What hangs on how sums are rounded
is named in the record (`on_rounding`): codebooks that are fitted, sizes of messages of compressors with a threshold.
Weights, losses, metric and decisions always hang on rounding: other processors, other versions of torch and other
numbers of threads sum in another order, and training amplifies the last digit. So they are compared to the last digit
only on the machine of the record. Elsewhere the training loss of the first epoch must be within 0.1 %, the final loss
within 5 % (`loss_within`; one run's codebooks lead it further off) and the metric within 0.1 (`metric_within`; of a
perplexity 10 %). Where training amplifies rounding beyond that (`accordion_sync`), the last two are not compared.
"""

import pytest

from scripts import golden
from scripts.golden_runs import RUNS, SLOW
from tests.kit.processes import forked

RECORDS = golden.records()


def _marked(name: str):
    return pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name


@pytest.fixture(autouse=True)
def as_recorded():
    """One thread, whatever else runs here; processes are forked, not spawned, which saves their imports."""
    with golden.one_thread(), forked():
        yield


def test_every_run_has_a_record():
    assert set(RECORDS) == set(RUNS) and set(RUNS) > SLOW
    assert {name: record["overrides"] for name, record in RECORDS.items()} == {
        name: run.overrides for name, run in RUNS.items()
    }


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", [_marked(name) for name in RECORDS])
def test_gives_what_it_gave(name):
    record = RECORDS[name]
    new = golden.again(record)
    assert golden.everywhere(record, new) == []
    if record["machine"] == golden.machine():
        assert golden.exactly(record, new) == []


def test_a_difference_is_found():
    """Else the tests above would pass whatever happens."""
    record = RECORDS["accordion_powersgd"]
    worse = {**record, "metric": record["metric"] + 0.2, "weights": "other"}
    assert len(golden.everywhere(record, worse)) == 1 and len(golden.exactly(record, worse)) == 2
    longer = {**record, "bytes": {**record["bytes"], "payload_bytes": [0, 0, 0, 0]}}
    assert len(golden.everywhere(record, longer)) == 4
    values = record["values"]
    early = {**values, "train_loss": [1.002 * values["train_loss"][0], *values["train_loss"][1:]]}
    late = {**values, "test_loss": [*values["test_loss"][:-1], 1.06 * values["test_loss"][-1]]}
    for changed in (early, late):
        assert len(golden.everywhere(record, {**record, "values": changed})) == 1
    chaotic = {**record, "loss_within": None, "metric_within": None}
    assert golden.everywhere(chaotic, {**worse, "values": late}) == []
    assert {plan["levels"]["fc.weight"] for plan in record["plans"]} == {2}
    assert {plan["levels"]["stages.1.0.conv1.weight"] for plan in record["plans"]} == {1, 2}
