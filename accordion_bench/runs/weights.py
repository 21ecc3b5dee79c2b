"""The weights of a run as a plain state dict: `model.load_state_dict(torch.load("RUN/weights.pt"))`."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from accordion_bench.runs import durable, tensor_file

FINAL, BEST = "weights.pt", "best.pt"


def save_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a model's state dict; the file is replaced as a whole.

    Raises:
        ConfigError: the disk is full.
    """
    part = path.with_name(f"{path.name}.part")
    with durable.room(path.parent):
        try:
            tensor_file.write(part, dict(state))
            durable.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
