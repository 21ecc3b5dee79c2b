"""NonFiniteRow: error of encoders for non-finite input."""

from torch import Tensor


class NonFiniteRow(ValueError):
    """Raised if the input of an encoder contains NaN or infinity, or if its norm exceeds float32.

    Args:
        row: index of the first such row.
    """

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row} holds NaN or infinity, or its norm exceeds float32")
        self.row = row


def refuse_non_finite(values_R: Tensor) -> None:
    """Raise NonFiniteRow for the first row [N] that contains NaN or infinity; on the CPU only.

    On a GPU the check would synchronise with the host. There the flags of the exchange, which are read once per step,
    report non-finite values.
    """
    if values_R.device.type != "cpu":
        return
    finite_R = values_R.isfinite()
    if not finite_R.all():
        raise NonFiniteRow(int((~finite_R).any(1).nonzero()[0]))
