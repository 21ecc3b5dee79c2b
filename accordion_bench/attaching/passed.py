"""What was passed to a door, as it was passed, and as it is kept when it has been checked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accordion_bench.attaching.chosen_options import Named, Several
from accordion_bench.attaching.own_parameters import Exempt
from accordion_bench.attaching.users_optimizer import Stepping
from accordion_bench.loop.step import StepOptions
from accordion_bench.methods.compatibility import Chosen
from accordion_bench.network.link_model import Network


@dataclass(frozen=True, kw_only=True)
class PassedArguments:
    """The arguments of `ab.attach` and `ab.local`, see there.

    Args:
        options: of compressor and scheme, by name.
        known: names of all other arguments of the door, for messages.
        takes_local_steps: the door is `ab.local`.
    """

    model: nn.Module
    optimizer: Stepping
    compressor: Named
    adaptive: Several
    sync: Named
    exempt: Exempt
    epochs: int | None
    steps_per_epoch: int | None
    schedule: Callable[[float], float] | None
    warmup_epochs: float
    seed: int
    batch_size: int
    overlap: bool | None
    bucket_cap_mb: float | None
    network: str
    name: str | None
    process_group: dist.ProcessGroup | None
    timeout: float
    store: dist.Store | None
    options: Mapping[str, Any]
    known: Sequence[str]
    takes_local_steps: bool = False
    clip_norm: float | None = None
    clip_at: str | None = None
    scaler: torch.amp.GradScaler | None = None


@dataclass(frozen=True)
class Setting:
    """What was passed beside the methods.

    Args:
        chosen: the methods, as options.
        network, link: the link of modelled times, and its name in conf/network.
        step: what decides its steps, beside the methods.
        seed: as it was passed; that of `step` differs where processes have different shards.
        name: of the arm, for reports.
        batch_size: samples per worker and step.
        epochs, steps_per_epoch, schedule: of the training, where they were told.
        scaled: gradients come multiplied by a loss scale.
        timeout: seconds after which a worker that does not answer is lost.
    """

    chosen: Chosen
    network: Network
    link: str
    step: StepOptions
    seed: int
    name: str | None = None
    batch_size: int = 1
    epochs: int | None = None
    steps_per_epoch: int | None = None
    schedule: Callable[[float], float] | None = None
    scaled: bool = False
    timeout: float = 600.0
