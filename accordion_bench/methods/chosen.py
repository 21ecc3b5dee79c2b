"""What was chosen: names and options of the methods, before anything is built of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from accordion_bench.options.instantiate import Config


@dataclass(frozen=True)
class Chosen:
    """The methods of a training, as options.

    Args:
        compressor_name, sync_name: of the YAML files, for messages.
        compressor, sync: their options, with `_target_`.
        adaptive: the options of each policy by its name, in order.
        optimizer: the options of the optimizer, with `_target_`.
    """

    compressor_name: str
    compressor: Config
    sync_name: str
    sync: Config
    adaptive: Mapping[str, Config] = field(default_factory=dict)
    optimizer: Config = field(default_factory=dict)
