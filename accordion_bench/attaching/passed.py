"""Arguments of `ab.attach` and `ab.local`, before and after they are checked."""

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
from accordion_bench.methods.compatibility import MethodOptions
from accordion_bench.network.link_model import Network


@dataclass(frozen=True, kw_only=True)
class PassedArguments:
    """Arguments of `ab.attach` and `ab.local` as passed; see these functions.

    Args:
        options: options of compressor and scheme by name.
        known: names of all other arguments of the function, for messages.
        takes_local_steps: whether the function is `ab.local`.
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
    """Checked arguments besides the methods.

    Args:
        chosen: the methods as options.
        network, link: link of modelled times, and its name in conf/network.
        step: options of the communicating step.
        seed: seed as passed; that of `step` differs between processes with different shards.
        name: name of the arm in reports.
        batch_size: samples per worker and step.
        epochs, steps_per_epoch, schedule: facts about the training; None = unknown.
        scaled: whether gradients are multiplied by a loss scale.
        timeout: seconds after which a worker that does not respond counts as lost.
    """

    chosen: MethodOptions
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
