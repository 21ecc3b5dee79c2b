"""Run an example to its end in a process of a group, and save the weights of its `model`.

    torchrun --nproc-per-node 2 -m tests.kit.run_example EXAMPLE FOLDER [dense|bare]

dense: the example attaches with compressor=none; bare: it attaches nothing, so that only DistributedDataParallel runs.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

import accordion_bench as ab


def run(example: Path, folder: Path, how: str = "") -> None:
    """Run the script as started by torchrun, and save its weights to FOLDER/RANK.pt."""
    attach = ab.attach

    def dense(model: Any, optimizer: Any, **_: Any) -> Any:
        return attach(model, optimizer, compressor="none")

    if how:
        ab.attach = {"dense": dense, "bare": MagicMock()}[how]
    torch.manual_seed(0)
    names = runpy.run_path(str(example), run_name="__main__")
    weights = {name: value.detach().cpu() for name, value in names["model"].state_dict().items()}
    torch.save(weights, folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    run(*map(Path, sys.argv[1:3]), *sys.argv[3:])
