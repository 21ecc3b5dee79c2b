"""Rows of metrics, the text of `print(comm)`, and timelines."""

import json
import time
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

import accordion_bench as ab
from accordion_bench.attaching.attached import description
from accordion_bench.report.read import read_runs
from accordion_bench.runs.folder import environment
from tests.kit import by_hand
from tests.kit.processes import together

STEPS, EPOCHS = 3, 2


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(comm, model, optimizer, rank, path=None) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(EPOCHS):
        for _ in range(STEPS):
            loss = model(torch.randn(4, 6, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        comm.end_epoch()
        if path is not None and rank == 0:
            with path.open("a") as file:
                print(json.dumps(comm.metrics(accuracy=0.5, train_loss=loss.item())), file=file)


def write_rows(rank, folder) -> None:
    with by_hand.in_group(rank, str(folder / "store")):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policies = {"accordion": {"interval": 1}}
        comm = ab.attach(model, optimizer, "topk", policies, density=0.25, batch_size=4, name="mine", seed=7)
        train(comm, model, optimizer, rank, folder / "mine.jsonl")
        if rank == 0:
            (folder / "told.txt").write_text(str(comm))
        comm.detach()


def test_the_machine_has_the_name_that_it_has_in_run_folders():
    """Else a report says of both that they come from different machines."""
    told, seen = description(MagicMock()), environment()
    assert [told[key] for key in ("processor", "cpu_cores", "gpus")] == [
        seen[key] for key in ("processor", "cpu_cores", "gpus")
    ]


def test_rows_are_those_of_a_run_and_the_report_reads_them(tmp_path):
    together(2, write_rows, tmp_path)
    first, last = (json.loads(line) for line in (tmp_path / "mine.jsonl").read_text().splitlines())
    trainer = by_hand.bench(tmp_path / "bench", 0, "epochs=1", "network=1gbit", workers=1)
    of_a_run = set(json.loads((trainer.folder.path / "metrics.jsonl").read_text())) - {"crc32"}  # of the file
    evaluated = {"test_loss", "link_sent_bytes", "link_received_bytes"}  # others' to know
    assert of_a_run - set(first) == evaluated
    assert set(first) - of_a_run == {"run"}
    assert (first["epoch"], first["step"], last["epoch"], last["step"]) == (0, 3, 1, 6)
    assert last["dense_bytes"] == 6 * 4 * sum(param.numel() for param in net().parameters())
    assert 0 < first["payload_bytes"] < last["payload_bytes"] < last["dense_bytes"]
    assert last["seconds"] > 0 and last["modelled_seconds"] > 0
    (run,) = read_runs([tmp_path / "mine.jsonl"])
    assert run.finished and run.seed == 7 and run.last_epoch == 1
    assert "mine" in run.label and "attached" in run.label


def test_told_in_short(tmp_path):
    together(2, write_rows, tmp_path)
    lines = (tmp_path / "told.txt").read_text().splitlines()
    assert lines[0] == "compressor=topk adaptive=accordion, 2 workers, 6 steps"
    assert lines[1].startswith("payload: ") and lines[1].endswith("times fewer than dense fp32")
    assert [line.split(":")[0] for line in lines[4:]] == ["  0.weight", "  2.weight"]


def write_timeline(rank, folder, ddp) -> None:
    with by_hand.in_group(rank, str(folder / "store")):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        module = nn.parallel.DistributedDataParallel(model) if ddp else model
        comm = ab.attach(module, optimizer, "powersgd", rank=1)
        comm.timeline(steps=2, path=folder / "timeline.json")
        train(comm, module, optimizer, rank)
        comm.detach()


@pytest.mark.parametrize("ddp", [False, True])
def test_timeline(tmp_path, ddp):
    together(2, write_timeline, tmp_path, ddp)
    found = json.loads((tmp_path / "timeline.json").read_text())
    assert found["steps"] == 2 and found["workers"] == 2
    shapes = {tensor["name"]: tensor["shape"] for tensor in found["tensors"]}
    assert shapes == {name: list(param.shape) for name, param in net().named_parameters()}
    ready = [tensor["ready_seconds"] for tensor in found["tensors"]]
    assert 0 < ready[-1] <= ready[0] <= found["seconds"]["compute"] + found["seconds"]["exposed"] + 1
    assert sum(bucket["numel"] for bucket in found["buckets"]) == sum(p.numel() for p in net().parameters())


def test_milliseconds_are_those_of_the_steps_that_were_timed(tmp_path):
    with by_hand.in_group(0, str(tmp_path / "store"), 1):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        comm = ab.attach(model, optimizer)
        for _ in range(6):
            for _ in range(2):  # the first one follows a pause
                model(torch.randn(4, 6)).square().mean().backward()
                time.sleep(0.01)
                optimizer.step()
            comm.end_epoch()
        told = next(line for line in str(comm).splitlines() if line.startswith("milliseconds"))
        comm.detach()
    assert float(told.split("compute ")[1].split(",")[0]) >= 10
