"""One-word presets: a name under `adaptive` that chooses a synchronisation scheme and decides nothing."""

from accordion_bench.adaptive.base import Policy
from accordion_bench.options.option import Choice, option, with_options


@with_options
class Preset(Policy):
    """Stands for a synchronisation scheme; refused where another one has been chosen."""

    sync: str = option(default="local_sgd")

    chosen_as = {
        name: Choice(f"one word for sync={name}; its options are sync.*", {"sync": name}, selects={"sync": name})
        for name in ("local_sgd", "post_local_sgd", "slowmo", "diloco")
    }

    drives = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.syncs = (self.sync,)
