"""`target_every`: looks for the target within an epoch tell when it was reached, and change nothing else."""

import pytest
import torch

from accordion_bench.report.compare.beside import first_row
from accordion_bench.runs.metrics import METRICS
from accordion_bench.training.evaluation import Score
from tests.kit.local import consensus, trained

ACCURACY = METRICS["accuracy"]
NEVER = ["target=1.0", "target_every=0.3"]
ARMS = {
    "powersgd, overlapped": ["compressor=powersgd", "comm.overlap=true", "comm.bucket_cap_mb=0.05"],
    "BatchNorm estimated again": ["compressor=topk", "bn=recompute"],
    "fragments under way": ["sync=streaming_diloco", "sync.period=4", "sync.fragments=2", "sync.delay=1"],
}


def score(target=0.8, every=0.25):
    return Score(ACCURACY, target, every, torch.zeros(1, dtype=torch.float64), "accuracy", "accuracy")


@pytest.mark.parametrize("arm", ARMS)
def test_a_run_that_is_looked_at_trains_as_one_that_is_not(arm, tmp_path):
    plain = trained(tmp_path / "plain", *ARMS[arm])
    looked = trained(tmp_path / "looked", *ARMS[arm], *NEVER)
    assert all(torch.equal(a, b) for a, b in zip(consensus(looked), consensus(plain), strict=True))
    for row, other in zip(looked.folder.read_metrics(), plain.folder.read_metrics(), strict=True):
        assert "looks" not in other and row["accuracy"] == other["accuracy"]
        assert all(row[f"{what}_bytes"] == other[f"{what}_bytes"] for what in ("payload", "wire", "control"))
        told = [look["seconds"] for look in row["looks"]]
        assert len(told) == 3 and told == sorted(told) and told[-1] < row["seconds"]
        first, steps = row["step"] - looked.position.steps_per_epoch, looked.position.steps_per_epoch
        assert [look["step"] for look in row["looks"]] == [first + round(share * steps) for share in (0.3, 0.6, 0.9)]


def test_looks_are_as_many_as_the_share_asks_for_and_the_end_of_the_epoch_is_none():
    assert [step for step in range(1, 41) if score().due(step, 40)] == [10, 20, 30]
    assert [step for step in range(1, 11) if score(every=0.3).due(step, 10)] == [3, 6, 9]
    assert not any(score(every=1.0).due(step, 40) for step in range(41))
    assert not any(score(target=None).due(step, 40) for step in range(41))


def test_after_the_target_nobody_looks_and_its_time_is_that_of_the_look():
    seen = score()
    seen.look({"accuracy": 0.7, "step": 5, "seconds": 1.0, "modelled_seconds": 3.0, "payload_bytes": 10})
    seen.look({"accuracy": 0.9, "step": 10, "seconds": 2.0, "modelled_seconds": 4.0, "payload_bytes": 20})
    assert seen.to_target == {"seconds": 2.0, "payload_bytes": 20} and not seen.due(10, 40)
    resumed = score()
    resumed.load_state_dict(seen.state_dict())
    assert resumed.looks == seen.looks and len(seen.looks) == 2 and resumed.to_target == seen.to_target
    row = {"epoch": 0, "accuracy": 0.95, "seconds": 5.0, "payload_bytes": 50}
    resumed.note(row)
    assert resumed.looks == [] and resumed.to_target["seconds"] == 2.0


def test_a_report_reads_the_first_look_that_reached_it():
    looks = [{"accuracy": 0.7, "seconds": 1.0}, {"accuracy": 0.85, "seconds": 2.0}]
    rows = [{"accuracy": 0.5, "seconds": 0.5}, {"accuracy": 0.9, "seconds": 3.0, "looks": looks}]
    assert first_row(rows, ACCURACY, "accuracy", 0.8) == looks[1]
    assert first_row(rows, ACCURACY, "accuracy", 0.88) == rows[1]
    assert first_row(rows, ACCURACY, "accuracy", 0.99) is None
