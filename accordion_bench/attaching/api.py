"""`ab.attach` and `ab.local`: the methods of this package in a training loop of one's own."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accordion_bench.attaching.attached import Attached
from accordion_bench.attaching.chosen_options import Named, Several, arguments_of, choose
from accordion_bench.attaching.connecting import connected
from accordion_bench.attaching.own_parameters import Exempt, unwrapped
from accordion_bench.attaching.passed import PassedArguments
from accordion_bench.attaching.users_optimizer import stepping_optimizer
from accordion_bench.options.checks import ConfigError

if TYPE_CHECKING:
    from accordion_bench.attaching.fsdp import ShardAxis

Schedule = Callable[[float], float]


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    compressor: Named = "none",
    adaptive: Several = None,
    *,
    exempt: Exempt = None,
    epochs: int | None = None,
    steps_per_epoch: int | None = None,
    schedule: Schedule | None = None,
    warmup_epochs: float = 0,
    clip_norm: float | None = None,
    clip_at: str | None = None,
    scaler: torch.amp.GradScaler | None = None,
    seed: int = 0,
    batch_size: int = 1,
    overlap: bool | None = None,
    bucket_cap_mb: float | None = None,
    network: str = "1gbit",
    name: str | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
    store: dist.Store | None = None,
    **options: Any,
) -> Attached:
    """Exchange the gradients of a training loop by a compressor, adapted by policies. All processes call it.

    Of DistributedDataParallel, gradients are the exchanged ones when `backward` returns. Of a plain module, buckets
    leave while the backward pass goes on, and are waited for in `optimizer.step`, or in `comm.join()` before it. A
    parameter that the loss does not reach counts as having a zero gradient. A plain module starts with rank 0's
    parameters and buffers. Where something else than the attached optimizer changes the parameters, so that workers
    would train alone, a ConfigError says so.

    With `elastic=True` workers may be lost and others may enter, see docs/attach.md.

    Args:
        model: DistributedDataParallel, a plain module, or one of FSDP2, whose replicas exchange the gradients of their
            shards; in an initialised process group, one worker per process.
        optimizer: holds all its trained parameters; of a framework's wrapper, the one inside is meant. A list where
            several do, each with parameters of its own; all of them step after each backward pass.
        compressor: name of a YAML file in conf/compressor, or {name: {option: value}}.
        adaptive: policies, likewise: a name, {name: {option: value}}, or a list of names.
        exempt: what is never compressed: words of `norm,bias,embedding`, or a function of name and parameter.
        epochs, steps_per_epoch: of the training, where a policy needs them.
        schedule: learning rate at a time in epochs, where a policy needs to know it beforehand.
        warmup_epochs: in which the schedule still raises it.
        clip_norm: largest global L2 norm of a gradient.
        clip_at: `before` (None): of each worker's own; `after`: of the exchanged mean.
        scaler: of gradients in float16: all workers skip a step together.
        seed: for keyed draws; the same on all processes.
        batch_size: samples of this worker in a step; where they differ, means are weighted by them.
        overlap: false = exchange after the backward pass.
        bucket_cap_mb: MB of messages that are exchanged together; None = 1, then 25.
        network: the link of modelled times, a name in conf/network.
        name: of this arm, for reports.
        process_group: whose processes take part; None = all, or those of DistributedDataParallel. Of an FSDP2 model
            those that hold the same shards, mesh["replicate"].get_group().
        timeout: seconds after which a worker that does not answer counts as lost.
        store: where workers meet that come and go (`elastic=True`); it outlives them. None = that of the launcher.
        options: of the compressor, such as rank=2; `elastic` and `min_workers`.

    Raises:
        ConfigError: what was passed breaks a rule, does not fit together, or differs between processes.

    Example:
        >>> model = torch.nn.Linear(64, 32)  # in an initialised process group
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> comm = ab.attach(model, optimizer, compressor="powersgd", rank=2)
        >>> model(torch.ones(4, 64)).sum().backward()
        >>> optimizer.step()
        >>> str(comm).partition(",")[0]
        'compressor=powersgd'
        >>> comm.detach()
    """
    passed = PassedArguments(
        model=model, optimizer=stepping_optimizer(optimizer), compressor=compressor, adaptive=adaptive,
        sync="every_step",
        exempt=exempt, epochs=epochs, steps_per_epoch=steps_per_epoch, schedule=schedule, warmup_epochs=warmup_epochs,
        seed=seed, batch_size=batch_size, overlap=overlap, bucket_cap_mb=bucket_cap_mb, network=network, name=name,
        process_group=process_group, timeout=timeout, store=store, options=options, known=arguments_of(attach),
        clip_norm=clip_norm, clip_at=clip_at, scaler=scaler,
    )  # fmt: skip
    return connected(passed)


def local(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    sync: Named,
    compressor: Named = "none",
    adaptive: Several = None,
    *,
    exempt: Exempt = None,
    epochs: int | None = None,
    steps_per_epoch: int | None = None,
    schedule: Schedule | None = None,
    warmup_epochs: float = 0,
    seed: int = 0,
    batch_size: int = 1,
    overlap: bool | None = None,
    bucket_cap_mb: float | None = None,
    network: str = "1gbit",
    name: str | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
    store: dist.Store | None = None,
    **options: Any,
) -> Attached:
    """Let every process take steps of its own, and exchange what they have become every so many. All call it.

    With `elastic=True` workers may be lost and others may enter, see docs/attach.md.

    Any optimizer is the inner one. Where parameter groups have several learning rates, SlowMo's and overlap local SGD's
    gamma is that of the first tensor. With a loss scale (float16) a worker that skips a step would average at another
    time than the others: use bfloat16.

    Args:
        model: a plain module, or one of FSDP2; not DistributedDataParallel, which exchanges in every step.
        sync: name of a YAML file in conf/sync, or {name: {option: value}}.
        options: of the scheme or of the compressor, whichever has them, such as period=30.
        optimizer, compressor, adaptive, exempt, epochs, steps_per_epoch, schedule, warmup_epochs, seed, batch_size,
        overlap, bucket_cap_mb, network, name, process_group, timeout, store: see `attach`.

    Raises:
        ConfigError: as `attach`.

    Example:
        >>> model = torch.nn.Linear(64, 32)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with ab.local(model, optimizer, sync="local_sgd", period=2) as comm:
        ...     for _ in range(4):
        ...         model(torch.ones(4, 64)).sum().backward()
        ...         optimizer.step()
        >>> str(comm).partition(",")[0]
        'compressor=none sync=local_sgd'
    """
    if isinstance(unwrapped(model), DistributedDataParallel):
        raise ConfigError(
            "model must be a plain module where workers take local steps, got DistributedDataParallel, which exchanges "
            "in every step; pass model.module"
        )
    passed = PassedArguments(
        model=model, optimizer=stepping_optimizer(optimizer), compressor=compressor, adaptive=adaptive, sync=sync,
        exempt=exempt, epochs=epochs, steps_per_epoch=steps_per_epoch, schedule=schedule, warmup_epochs=warmup_epochs,
        seed=seed, batch_size=batch_size, overlap=overlap, bucket_cap_mb=bucket_cap_mb, network=network, name=name,
        process_group=process_group, timeout=timeout, store=store, options=options,
        known=arguments_of(local), takes_local_steps=True,
    )  # fmt: skip
    return connected(passed)


def attach_shards(
    model: nn.Module,
    compressor: Named = "none",
    *,
    machine: int | None = None,
    inside: Named = "none",
    exempt: Exempt = None,
    seed: int = 0,
    **options: Any,
) -> "ShardAxis":
    """Reduce the gradients of an FSDP2 model to their shards by codes of few bits. All processes call it.

    Every process sends every other one a code of that one's shards, which adds up in float32 what it has got. Replicas
    of the shards, where there are any, are attached by `ab.attach` or `ab.local`; see docs/attach.md.

    Args:
        model: `fully_shard` was called with the shard axis alone, so that torch itself averages no replicas.
        compressor: name of a YAML file in conf/compressor, such as fp8, int8, qsgdinf (bits=4), or
            {name: {option: value}}. With error_feedback=True each process keeps a residual as large as the whole model.
        machine: processes of a machine, consecutive on the shard axis: they add up first what goes to other machines.
        inside: with `machine`, the code between the processes of one.
        exempt: what travels as it is: words of `norm,bias,embedding`, or a function of name and parameter.
        seed: for keyed draws; the same on all processes.
        options: of the compressor, such as bits=4.

    Raises:
        ConfigError: what was passed breaks a rule, or differs between processes.

    Example:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.fsdp import fully_shard
        >>> mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))  # two processes
        >>> model = fully_shard(torch.nn.Linear(64, 32), mesh=mesh["shard"])
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> axis = ab.attach_shards(model, "int8")
        >>> comm = ab.attach(model, optimizer, "powersgd", rank=2, process_group=mesh["replicate"].get_group())
        >>> model(torch.ones(4, 64)).sum().backward()
        >>> optimizer.step()
        >>> comm.detach()
        >>> axis.detach()
    """
    from accordion_bench.attaching.fsdp import ShardOptions, attach_to_shards  # half a second that others need not wait

    try:
        if "process_group" in options:
            raise ConfigError(
                "replicas of shards are attached by ab.attach; call ab.attach(model, optimizer, ..., process_group=...)"
            )
        known = arguments_of(attach_shards)
        chosen = choose(compressor, None, "every_step", {}, options, known).compressor
        within = choose(inside, None, "every_step", {}, {}, known).compressor
        return attach_to_shards(model, ShardOptions(chosen, within, machine, exempt, seed))
    except ConfigError as refused:
        raise refused.in_python() from None
