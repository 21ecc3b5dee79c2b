"""What is counted equals what torch's own counter counts, without importing torch's compiler."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from accordion_bench.advising.counted_step import decomposed
from accordion_bench.models.resnet import CifarResNet
from accordion_bench.tensors.counted_work import CountedWork

MODELS = {
    "convolutions": (lambda: CifarResNet(3, 10, 8), lambda: torch.randn(2, 3, 32, 32)),
    "attention": (
        lambda: nn.Sequential(nn.Embedding(9, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)),
        lambda: torch.randint(9, (2, 5)),
    ),
    "products": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), lambda: torch.randn(5, 4)),
}


def computed(model: nn.Module, x: torch.Tensor, trained: bool) -> None:
    with torch.set_grad_enabled(trained):
        found = model(x).sum()
        if trained:
            found.backward()


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_it_counts_as_torch_does(name, trained):
    model, x = (make() for make in MODELS[name])
    with CountedWork() as ours:
        computed(model, x, trained)
    with FlopCounterMode(display=False) as theirs:
        computed(model, x, trained)
    by_kind = theirs.get_flop_counts()["Global"]
    convolved = sum(count for operation, count in by_kind.items() if "convolution" in str(operation))
    assert (ours.convolved, ours.multiplied) == (convolved, theirs.get_total_flops() - convolved)
    assert ours.flops == theirs.get_total_flops() > 0


def test_views_start_nothing_and_recurrent_layers_are_one_operation():
    with CountedWork() as work:
        torch.zeros(4).view(2, 2).t()
    assert work.started == 1
    for steps in (3, 30):
        model, x = nn.LSTM(4, 4, batch_first=True), torch.randn(2, steps, 4, requires_grad=True)
        with decomposed(), CountedWork() as work:
            work.count_as_one(model)
            out, _ = model(x)
            between = work.started
            out.sum().backward()
        assert between == 1 and work.started < 8
        assert work.multiplied > 0


def test_the_compiler_is_not_imported():
    said = "import sys, torch; from accordion_bench.tensors.counted_work import CountedWork\n"
    said += "with CountedWork() as work: torch.nn.Linear(3, 3)(torch.randn(2, 3))\n"
    said += "print(work.flops, 'torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["36.0", "False"]
