"""Build all components of a run from a resolved configuration."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from accordion_bench.batches import unequal
from accordion_bench.compressors.assemble import optimizer_node
from accordion_bench.compressors.compressor import Compressor
from accordion_bench.datasets.dataset import Dataset
from accordion_bench.datasets.token_windows import TokenDataset
from accordion_bench.exchange.overlap import ExchangeOptions
from accordion_bench.forward.trial import Slowdown
from accordion_bench.methods.build import Methods, build_methods
from accordion_bench.methods.compatibility import MethodOptions
from accordion_bench.network.link_model import Network
from accordion_bench.optimizers.inner import fused, without_dynamo
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.instantiate import Config, build, target
from accordion_bench.options.units import counted
from accordion_bench.plan import RunFacts
from accordion_bench.run_config import RunConfig
from accordion_bench.schedules.learning_rate import Schedule


@dataclass(frozen=True)
class Components(Methods):
    """Components of a run that need neither data nor devices.

    Args:
        threads: number of threads of each process.
        slowdown: duration of a step in 16 bits relative to float32 on this machine; None = not measured.
        buffers: whether the model has buffers, such as BatchNorm's.
        split: sentence about which parameters the optimizer treats how; "" if it treats all alike.
    """

    schedule: Schedule
    dataset: Dataset
    exchange: ExchangeOptions
    threads: int = 1
    slowdown: Slowdown | None = None
    buffers: bool = True
    split: str = ""


def build_components(config: RunConfig, workers: int) -> Components:
    """Build and check every component of a run."""
    comm = config.comm
    dataset = build(config.dataset, "dataset")
    schedule = build(config.schedule, "schedule", epochs=config.epochs, workers=workers)
    network: Network = build(config.network, "network")
    run = RunFacts(
        *(config.epochs, workers, dataset.train_count, config.largest_batch, schedule, schedule.rises_until),
        bandwidth=network.bandwidth,
        latency=network.latency,
        batches=unequal(config.batch_size),
    )
    _refuse_batches(config, run)
    chosen = MethodOptions(
        config.chosen("compressor"),
        config.compressor,
        config.chosen("sync"),
        config.sync,
        config.adaptive,
        config.optimizer,
    )
    methods = build_methods(chosen, run, comm.workers_per_process or workers // (comm.processes or 1))
    parts = Components(**vars(methods), schedule=schedule, dataset=dataset, exchange=exchange_options(config))
    parts.plan_for([])  # policies refuse here what they do not support in this run
    return parts


def _refuse_batches(config: RunConfig, run: RunFacts) -> None:
    """Refuse a list of batch sizes that does not fit the workers, or exceeds the training samples."""
    if not isinstance(config.batch_size, list):
        return
    given, workers = config.batch_size, run.workers
    if len(given) != workers:
        fitting = [given[worker % len(given)] for worker in range(workers)]
        rule = f"a number, or a list of one for each of {counted(workers, 'worker')}"
        raise ValueRefused("batch_size", rule, given, fitting)
    if run.batches and sum(given) > run.train_size:
        rule = f"a list whose sum is at most {run.train_size}, the training samples"
        raise ValueRefused("batch_size", rule, given, [max(1, n * run.train_size // sum(given)) for n in given])
    if run.batches and config.comm.engine == "ddp":
        rule = "a number with comm.engine=ddp, which weights all workers alike"
        raise ValueRefused("batch_size", rule, given, run.batch_size)


def with_counts(config: RunConfig) -> RunConfig:
    """Replace null options of the data set by values counted in its files, which a run records."""
    node = config.dataset
    null = [key for key in getattr(target(node, "dataset"), "counted", ()) if key in node and node[key] is None]
    if not null:
        return config
    found = build(node, "dataset").count(config.paths.data)
    return replace(config, dataset={**node, **{key: found[key] for key in null if key in found}})


def exchange_options(config: RunConfig) -> ExchangeOptions:
    """Return the options that decide how and when gradients are exchanged."""
    comm = config.comm
    clips = bool(config.clip_norm) and config.clip_at != "after"
    scaled, elastic = config.precision == "float16", bool(config.sync.get("elastic"))
    return ExchangeOptions(comm.engine, comm.overlap, comm.bucket_cap_mb, scaled, clips, elastic)


def build_optimizer(
    optimizer: Config, compressor: Compressor, params: list[nn.Parameter], kinds: Mapping[str, str]
) -> torch.optim.Optimizer:
    """Build the optimizer without the parts that the compressor applies itself.

    Args:
        compressor: compressor of the gradients or differences.
        params: all trained parameters, in the model's order.
        kinds: kinds of these parameters, see `parameter_kinds`.
    """
    node = optimizer_node(optimizer, compressor)
    device = params[0].device
    wanted = "kinds" in inspect.signature(target(optimizer, "optimizer")).parameters
    split = {"kinds": list(kinds.values())} if wanted else {}
    return build(node, "optimizer", positional=[params], adapt=lambda cls: fused(without_dynamo(cls), device), **split)


def build_model(node: Config, dataset: Dataset, name: str = "this one", data: str = "this one") -> nn.Module:
    """Build the model for a data set, with random weights; `name` and `data` are the chosen names, for messages.

    Raises:
        ConfigError: the task differs, the image size is unsupported, or a window is longer than the model's positions.
    """
    task = getattr(target(node, "model"), "task", "images")
    if task != dataset.task:
        instead = {"images": "dataset=digits", "text": "dataset=pydocs", "tokens": "dataset=pydocs_bytes"}[task]
        raise ConfigError(f"model={name} needs a data set of {task}, got dataset={data}; type {instead}")
    built = build(node, "model", **dataset.model_arguments())
    smallest, size = getattr(built, "min_size", 1), getattr(dataset, "image_size", 1)
    if task == "images" and size < smallest:
        raise ConfigError(
            f"model={name} needs images of at least {smallest} x {smallest} pixels, got dataset={data} with {size}; "
            "type model=resnet20, or dataset=cifar10"
        )
    made_for = getattr(built, "image_size", None)
    if task == "images" and made_for not in (None, size):
        raise ConfigError(
            f"model.image_size must be {size}, the side of the images of dataset={data}, got {made_for}; type "
            f"model.image_size={size}"
        )
    positions = getattr(built, "positions", None)
    if isinstance(dataset, TokenDataset) and positions is not None and dataset.context > positions:
        rule = f"at most {positions}, the positions of model={name}"
        raise ValueRefused("dataset.context", rule, dataset.context, positions)
    return built
