"""A worker that dies or hangs: the others end with one sentence, within the time that they were given."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accordion_bench as ab
from tests.kit import by_hand, small_net
from tests.kit.processes import forked
from tests.kit.small_net import net, sgd

TIMEOUT = 3.0
AT = 3  # steps that go well
FOR_EVER = 10_000
ENDED = f"step {AT}: another worker has ended, as its own output may say ("
SILENT = f"step {AT}: another worker did not answer within timeout=3 s, as its own output may say ("


def killed(model: nn.Module) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(model: nn.Module) -> None:
    sys.exit(0)


def fails(model: nn.Module) -> None:
    raise ValueError("its own mistake")


def hangs(model: nn.Module) -> None:
    time.sleep(FOR_EVER)


def not_a_number(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan  # type: ignore[index]


# what worker 1 does before its step, and how the others' sentence begins
ENDS: dict[str, tuple[Any, str]] = {
    "killed": (killed, ENDED),
    "sys.exit": (leaves, ENDED),
    "exception": (fails, ENDED),
    "hangs": (hangs, SILENT),
    "nan": (not_a_number, ENDED),
}


def attached(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = net()
    optimizer = sgd(model)
    if kind == "local":
        return model, optimizer, ab.local(model, optimizer, "local_sgd", period=2, timeout=TIMEOUT)
    module = DistributedDataParallel(model) if kind == "ddp" else model
    return module, optimizer, ab.attach(module, optimizer, "topk", density=0.1, timeout=TIMEOUT)


def train(rank: int, folder: Path, kind: str, end: str) -> None:
    """Worker 1 comes to its end; what each process says goes to a file, and then it ends as it does for a user."""
    by_hand.joined(rank, str(folder / "store"))
    module, optimizer, comm = attached(kind)
    model = module.module if kind == "ddp" else module
    small_net.steps(module, optimizer, comm, rank, range(AT))
    ready = time.monotonic()
    try:
        if rank == 1:
            ENDS[end][0](model)
        small_net.steps(module, optimizer, comm, rank, range(AT, AT + 4))
    except Exception as error:
        told(folder, rank, error, time.monotonic() - ready)
        raise


def comes_never(rank: int, folder: Path) -> None:
    by_hand.joined(rank, str(folder / "store"))
    if rank == 1:
        time.sleep(FOR_EVER)
    began = time.monotonic()
    try:
        attached("plain")
    except Exception as error:
        told(folder, rank, error, time.monotonic() - began)
        raise


def told(folder: Path, rank: int, error: Exception, seconds: float) -> None:
    (folder / f"{rank}").write_text(f"{seconds:.1f}\n{type(error).__name__}: {error}")


def run(folder: Path, target: Any, *args: Any) -> tuple[float, str, str]:
    """Seconds until worker 0 had something to say, that, and what worker 1 said; worker 0 must end by itself."""
    folder.mkdir()
    with forked():
        context = multiprocessing.get_context("spawn")
        children = [context.Process(target=target, args=(rank, folder, *args)) for rank in range(2)]
        for child in children:
            child.start()
    children[0].join(100)
    assert children[0].exitcode == 1
    children[1].kill()
    children[1].join()
    seconds, said = (folder / "0").read_text().split("\n")
    others = folder / "1"
    return float(seconds), said, others.read_text().split("\n")[1] if others.exists() else ""


CASES = [(kind, end) for kind in ("plain", "ddp", "local") for end in ENDS]
QUICK = [("plain", "nan"), ("ddp", "hangs"), ("local", "killed")]


@pytest.mark.parametrize(
    ("kind", "end"), [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_the_others_end_with_one_sentence(tmp_path, kind, end):
    seconds, said, others = run(tmp_path / "run", train, kind, end)
    assert said.startswith(f"LostWorker: {ENDS[end][1]}"), said
    if end == "hangs":
        assert seconds >= TIMEOUT - 0.1
    if end == "nan":
        assert others.startswith("NonFinite: step 3: the gradient of "), others
        assert " on worker 1 is not finite; lower the learning rate, now 0.09" in others, others


def test_a_worker_that_never_attaches(tmp_path):
    seconds, said, _ = run(tmp_path / "run", comes_never)
    assert said.startswith(
        "LostWorker: ab.attach or ab.local: another worker did not answer within timeout=3 s, as its own output may say"
    ), said
    assert seconds >= TIMEOUT - 0.1
