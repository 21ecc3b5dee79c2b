"""Placement: 4 workers in one process, two processes of two, and four of one are the same run."""

import multiprocessing

import pytest
import torch

from accordion_bench import checkpoint, config, train
from accordion_bench.comm import Comm
from accordion_bench.record import RunFolder
from tests import placement_worker
from tests.helpers import compressor, yaml_names, yaml_node

LEVELS = {"rank": [1, 2], "density": [0.01, 0.3, 0.99]}
CASES = [
    (name, {"level": level, **({"error_feedback": ef} if "error_feedback" in yaml_node("compressor", name) else {})})
    for name in yaml_names("compressor")
    for level in LEVELS.get(compressor(name).compressor.knob, [None])
    for ef in ([False, True] if "error_feedback" in yaml_node("compressor", name) else [None])
]


@pytest.fixture(scope="module")
def by_placement(tmp_path_factory):
    """Results of every case for 1x4, 2x2 and 4x1."""
    results = {"1x4": [placement_worker.all_updates(Comm(4), CASES)]}
    context = multiprocessing.get_context("spawn")
    for processes in (2, 4):
        folder = tmp_path_factory.mktemp(f"{processes}")
        arguments = (processes, 4 // processes, str(folder), CASES)
        children = [context.Process(target=placement_worker.run, args=(rank, *arguments)) for rank in range(processes)]
        for child in children:
            child.start()
        for child in children:
            child.join(120)
            assert child.exitcode == 0
        ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(processes)]
        results[f"{processes}x{4 // processes}"] = ranks
    return results


@pytest.mark.parametrize("placement", ["2x2", "4x1"])
@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{n}-{o}" for n, o in CASES])
def test_compressors_do_not_see_the_placement(by_placement, case, placement):
    (alone,), ranks = by_placement["1x4"], by_placement[placement]
    # 16-bit sums are rounded after every addition, so their order shows
    rounding = {"fp16": 2e-2, "bf16": 1e-1}.get(CASES[case][0], 1e-11)
    for rank in ranks:
        assert rank[case]["ledger"] == alone[case]["ledger"]
        for ours, theirs in zip(rank[case]["updates"], alone[case]["updates"], strict=True):
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=rounding, atol=rounding)
    for name, residual_W in alone[case]["residuals"].items():
        joined = torch.cat([rank[case]["residuals"][name] for rank in ranks])
        torch.testing.assert_close(joined, residual_W, rtol=rounding, atol=rounding)
    for rank in ranks[1:]:  # every process has the very same bits
        for ours, theirs in zip(rank[case]["updates"], ranks[0][case]["updates"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def finished(tmp_path, name, *overrides):
    """(metrics rows, shared state, per-worker states) of a run with dropout, BatchNorm and Accordion."""
    cfg = config.compose(
        [
            "model._target_=tests.models.DropoutNet",
            "~model.depth",
            "dataset=synthetic",
            "dataset.size=8",
            "dataset.train_size=256",
            "dataset.test_size=64",
            "dataset.noise=1",
            "adaptive=accordion",
            "adaptive.accordion.interval=1",
            "adaptive.accordion.eta=0.25",
            "schedule.milestones=[0.75]",
            "epochs=4",
            "batch_size=16",
            "optimizer.lr=0.02",
            "checkpoint.every=16",
            f"paths.runs={tmp_path}/{name}",
            *overrides,
        ]
    )
    train.run(cfg)
    (folder,) = (tmp_path / name).iterdir()
    state = checkpoint.latest(folder)
    load = lambda file: torch.load(state / file, weights_only=True)  # noqa: E731
    return RunFolder(folder).read_metrics(), load("shared.pt"), [load(f"worker-{w}.pt") for w in range(4)]


@pytest.mark.parametrize("options", [["compressor=powersgd", "compressor.min_compression_rate=0"], ["compressor=topk"]])
def test_two_processes_of_two_workers_equal_one_of_four(tmp_path, options):
    """Same bytes, same plans, same weights up to summation order; BatchNorm and dropout included."""
    rows, shared, workers = finished(tmp_path, "one", "comm=simulated", "workers=4", *options)
    placement = ["comm=gloo", "comm.processes=2", "comm.workers_per_process=2"]
    other_rows, other_shared, other_workers = finished(tmp_path, "two", *placement, *options)
    byte_columns = [c for c in rows[0] if c.endswith("_bytes")]
    for row, other in zip(rows, other_rows, strict=True):
        assert [row[c] for c in byte_columns] == [other[c] for c in byte_columns]
        assert row["plan"] == other["plan"] and row["rounds"] == other["rounds"]
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)
        assert row["accuracy"] == pytest.approx(other["accuracy"], abs=1 / 64 + 1e-9)
    assert shared["plan"] == other_shared["plan"] and shared["step"] == other_shared["step"] == 16
    assert len({str(row["plan"]["levels"]) for row in rows}) > 1  # Accordion has switched
    for name, value in shared["parameters"].items():
        assert (other_shared["parameters"][name] - value).norm() <= 2e-6 * value.norm()
    for mine, other in zip(workers, other_workers, strict=True):
        for name, buffer in mine["buffers"].items():
            assert (other["buffers"][name] - buffer).double().norm() <= 2e-6 * buffer.double().norm()
    # the workers are different ones: each has seen its own data and dropped its own units
    means = [worker["buffers"]["net.1.running_mean"] for worker in workers]
    assert not torch.equal(means[0], means[1])
