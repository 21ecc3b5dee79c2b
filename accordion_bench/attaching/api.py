"""Public API `ab.attach`, `ab.local` and `ab.attach_shards`: the methods of this package in a user's training loop."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accordion_bench.attaching.attached import Attached
from accordion_bench.attaching.checked_arguments import Named, PassedArguments, Several, arguments_of, choose
from accordion_bench.attaching.connecting import connected
from accordion_bench.attaching.own_parameters import Exempt, unwrapped
from accordion_bench.options.checks import ConfigError

if TYPE_CHECKING:
    from accordion_bench.attaching.fsdp import ShardAxis


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    compressor: Named = "none",
    adaptive: Several = None,
    *,
    exempt: Exempt = None,
    epochs: int | None = None,
    steps_per_epoch: int | None = None,
    schedule: Callable[[float], float] | None = None,
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
    """Exchange the gradients of a training loop with a compressor, adapted by policies. All processes must call it.

    With DistributedDataParallel, `backward` returns after the exchange. With a plain module, buckets are sent during
    the backward pass; `optimizer.step` waits for them, or `comm.join()` before it. A parameter without a gradient
    counts as having a zero gradient. A plain module starts with the parameters and buffers of rank 0. If anything but
    the attached optimizer changes the parameters, so that workers would train alone, ConfigError is raised.

    With `elastic=True` workers may be lost and others may enter, see docs/attach.md.

    Args:
        model: DistributedDataParallel, a plain module, or an FSDP2 model, whose replicas exchange gradients of their
            shards. The process group must be initialised, with one worker per process.
        optimizer: optimizer of all trained parameters of the model. Wrappers of frameworks are unwrapped. A list if
            several optimizers have disjoint parameters; all of them step after each backward pass.
        compressor: name of a YAML file in conf/compressor, or {name: {option: value}}.
        adaptive: policies: a name, {name: {option: value}}, or a list of names.
        exempt: parameters that are never compressed: words of `norm,bias,embedding`, or a function of name and
            parameter that returns whether it is exempt.
        epochs, steps_per_epoch: length of the training, if a policy needs it.
        schedule: function from the time in epochs to the learning rate, if a policy needs it in advance.
        warmup_epochs: number of epochs in which the schedule increases the learning rate.
        clip_norm: largest global L2 norm of a gradient; larger ones are scaled down.
        clip_at: `before` (None): clip each worker's own gradient; `after`: clip the exchanged mean.
        scaler: gradient scaler of float16 training: all workers skip a step together.
        seed: seed of all random draws of the methods; must be equal on all processes.
        batch_size: samples of this worker per step; if they differ between workers, means are weighted by them.
        overlap: whether buckets are sent during the backward pass; None = if the method allows it.
        bucket_cap_mb: size of a bucket in MB; None = 1 for the first bucket, 25 for the others.
        network: link of modelled times, a name in conf/network.
        name: name of this arm in reports.
        process_group: process group of the workers; None = the default one, or that of DistributedDataParallel. For an
            FSDP2 model the group of processes with the same shards, mesh["replicate"].get_group().
        timeout: seconds after which a worker that does not respond counts as lost.
        store: store of an elastic run (`elastic=True`), which must outlive the workers; None = that of the launcher.
        options: options of the compressor, such as rank=2; also `elastic` and `min_workers`.

    Returns:
        the attachment: metrics, state for checkpoints, `join` and `detach`.

    Raises:
        ConfigError: an argument is invalid, arguments are incompatible, or they differ between processes.

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
    return connected(PassedArguments(**locals(), sync="every_step", known=arguments_of(attach)))


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
    schedule: Callable[[float], float] | None = None,
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
    """Train with local steps, and average parameters every `period` steps. All processes must call it.

    With `elastic=True` workers may be lost and others may enter, see docs/attach.md.

    The given optimizer is the inner one, of any class. If its parameter groups have different learning rates, gamma of
    SlowMo and overlap local SGD is the learning rate of the first tensor. Use bfloat16, not float16 with a loss scale:
    a worker that skips a step would average at a different step than the others.

    Args:
        model: a plain module or an FSDP2 model; not DistributedDataParallel, which exchanges in every step.
        sync: name of a YAML file in conf/sync, or {name: {option: value}}.
        options: options of the scheme or of the compressor, such as period=30.
        optimizer, compressor, adaptive, exempt, epochs, steps_per_epoch, schedule, warmup_epochs, seed, batch_size,
        overlap, bucket_cap_mb, network, name, process_group, timeout, store: see `attach`.

    Returns:
        the attachment, see `attach`; as a context manager it averages at the end.

    Raises:
        ConfigError: see `attach`.

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
    passed = PassedArguments(**locals(), known=arguments_of(local), takes_local_steps=True)
    if isinstance(unwrapped(model), DistributedDataParallel):
        raise ConfigError(
            "model must be a plain module where workers take local steps, got DistributedDataParallel, which exchanges "
            "in every step; pass model.module"
        )
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
    """Reduce-scatter the gradients of an FSDP2 model with low-bit codes. All processes must call it.

    Each process sends every other process a code of the gradient of that one's shards; the receiver decodes and sums in
    float32. Replicas of the shards are attached with `ab.attach` or `ab.local`; see docs/attach.md.

    Args:
        model: FSDP2 model; call `fully_shard` with the shard axis only, so that torch averages no replicas.
        compressor: name of a YAML file in conf/compressor, such as fp8, int8, qsgdinf (bits=4), or
            {name: {option: value}}. With error_feedback=True each process keeps a residual of the size of the model.
        machine: number of processes per machine, consecutive on the shard axis. They sum gradients for other machines
            before these are sent; None = one level.
        inside: compressor between the processes of a machine, if `machine` is given.
        exempt: parameters that are sent uncompressed: words of `norm,bias,embedding`, or a function of name and
            parameter.
        seed: seed of all random draws of the methods; must be equal on all processes.
        options: options of the compressor, such as bits=4.

    Returns:
        the attachment of the shard axis.

    Raises:
        ConfigError: an argument is invalid, or arguments differ between processes.

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
    from accordion_bench.attaching.fsdp import ShardOptions, attach_to_shards  # imported here: it takes half a second

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
