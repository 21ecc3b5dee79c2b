"""One-word presets: a name under `adaptive` that chooses a synchronisation scheme and decides nothing."""

from accordion_bench.adaptive.base import Policy


class Preset(Policy):
    """Stands for a synchronisation scheme; refused where another one has been chosen.

    Args:
        sync: the scheme, which the preset's YAML file selects.
    """

    drives = ""

    def __init__(self, sync: str) -> None:
        self.syncs = (sync,)
