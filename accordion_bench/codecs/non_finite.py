"""NonFiniteRow: what an encoder says of input that has no code."""

from torch import Tensor


class NonFiniteRow(ValueError):
    """NaN, infinity or a norm beyond float32 in something to be encoded.

    Args:
        row: index of the first row that holds such a value.
    """

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row} holds NaN or infinity, or its norm exceeds float32")
        self.row = row


def refuse_non_finite(values_R: Tensor) -> None:
    """Raise NonFiniteRow for the first row [N] on the CPU that holds NaN or infinity.

    On a device the host does not wait for the answer here: what is not finite shows in the exchange's flags, which
    are read once per step.
    """
    if values_R.device.type != "cpu":
        return
    finite_R = values_R.isfinite()
    if not finite_R.all():
        raise NonFiniteRow(int((~finite_R).any(1).nonzero()[0]))
