"""NonFiniteRow: what an encoder says of input that has no code."""


class NonFiniteRow(ValueError):
    """NaN, infinity or a norm beyond float32 in something to be encoded.

    Args:
        row: index of the first row that holds such a value.
    """

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row} holds NaN or infinity, or its norm exceeds float32")
        self.row = row
