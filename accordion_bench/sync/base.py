"""What every synchronisation scheme is."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accordion_bench.trainer import Trainer


class Sync:
    """Takes one optimizer step from the gradients that the trainer has collected, and exchanges what it must."""

    def step(self, trainer: "Trainer", lr: float) -> None:
        """From gradients [W, ...] to parameters."""
        raise NotImplementedError

    def finish(self, trainer: "Trainer") -> None:
        """After the last step: leave one consensus model behind."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, strings and containers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
