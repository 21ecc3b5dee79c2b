"""What is timed: the model of a configuration, and a batch of random data of the right shapes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accordion_bench.advising.counted_step import CountedStep, counted_step
from accordion_bench.advising.rehearsal import Beside
from accordion_bench.cli.example import Example
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.config.components import build_model, build_optimizer, with_counts
from accordion_bench.config.compose import compose
from accordion_bench.config.declared import check_kinds
from accordion_bench.config.run_level import refuse_wrong
from accordion_bench.datasets.base import Dataset
from accordion_bench.forward.precision import autocast
from accordion_bench.forward.task import task_of
from accordion_bench.forward.trial import flops_per_kernel
from accordion_bench.optimizers.inner import parameter_kinds
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.instantiate import build, target
from accordion_bench.options.override import key_of
from accordion_bench.options.presets import named
from accordion_bench.processes import threads
from accordion_bench.run_config import RunConfig
from accordion_bench.tensors.keyed_rng import key, seeded

# of a model that does not say its own
USUAL_DATA = {"images": "cifar10", "text": "wikitext2", "tokens": "wikitext2_bytes"}
METHODS = ("compressor", "sync", "adaptive")  # of which all are advised on


@dataclass(frozen=True)
class Subject:
    """A model with a batch, ready to be timed.

    Args:
        config: that they are made of.
        model: with random weights, on its device.
        batch: inputs and targets.
        threads: to compute with.
        assumed: the data set, where none is typed.
    """

    config: RunConfig
    model: nn.Module
    batch: tuple[Tensor, Tensor]
    dataset: Dataset
    threads: int
    assumed: str = ""

    @property
    def name(self) -> str:
        """`resnet18 on cifar10, batch 32`."""
        config = self.config
        composed = config.to_dict()
        return f"{named(composed, 'model')} on {named(composed, 'dataset')}, batch {config.largest_batch}"

    @property
    def device(self) -> torch.device:
        return self.batch[0].device

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Forward pass and loss, in the configuration's precision."""
        with autocast(self.config.precision, self.device):
            return self._loss(model, batch)

    def counted(self, computed: bool = False) -> CountedStep:
        """A step, counted; what is computed is the same in every precision. See `counted_step`."""
        return counted_step(self.model, self.batch, self._loss, self.config.largest_batch, self.name, computed)

    def _loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return task_of(self.dataset, batch[0].device).loss(model, *batch, 0, 0)

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The configuration's, as a dense run has it."""
        compressor, kinds = wrapped_compressor(self.config.compressor).compressor, parameter_kinds(self.model)
        return build_optimizer(self.config.optimizer, compressor, params, kinds)


def composed(overrides: Sequence[str]) -> tuple[RunConfig, str]:
    """The configuration, and the data set that was assumed for the model; "" where one was typed.

    Raises:
        ConfigError: an option has no meaning here, or breaks a rule.
    """
    typed = {key_of(override): override.partition("=")[2] for override in overrides}
    for group in METHODS:
        if taken := next((name for name in typed if name.partition(".")[0] == group), None):
            raise ConfigError(
                f"{taken} must be left out, got {taken}={typed[taken]}, because all methods are advised on; type "
                f"--methods {typed.get(group, 'NAME ...')} for some"
            )
    cfg = compose(overrides)
    assumed = ""
    if "model" in typed and "dataset" not in typed and "experiment" not in typed:
        assumed = usual_data(cfg["model"])
        cfg = compose([*overrides, f"dataset={assumed}"])
    config = with_counts(RunConfig.from_dict(cfg))
    refuse_wrong(config)
    check_kinds(config)
    for key_, value in (("compile", config.compile), ("micro_batch_size", config.micro_batch_size)):
        if value is not None:
            raise ValueRefused(key_, "null here, where a step is timed without it", value, None)
    return config, assumed


def beside(config: RunConfig) -> Beside:
    """What a step does with gradients beside exchange and optimizer."""
    return Beside(config.clip_norm, config.clip_at, config.measure.norms)


def usual_data(node: dict[str, Any]) -> str:
    """The data set that a model is usually trained on: what its class says, or what its task usually has."""
    cls = target(node, "model")
    return getattr(cls, "usual_data", USUAL_DATA[getattr(cls, "task", "images")])


def subject_of(config: RunConfig, assumed: str, workers_each: int) -> Subject:
    """Build the model, and a batch of random data.

    Args:
        config: from `composed`.
        assumed: likewise.
        workers_each: that share a machine like this one.

    Raises:
        ConfigError: model and data set do not fit, or the device is not there.
    """
    dataset: Dataset = build(config.dataset, "dataset")
    if dataset.example(1) is None:
        name = config.chosen("dataset")
        raise ConfigError(f"dataset must be one with an example, got {name}; type dataset=cifar10, or write {name}'s")
    device = device_of(config)
    with seeded(key(config.seed, "model")):
        model = build_model(config.model, dataset, config.chosen("model"), config.chosen("dataset"))
    chosen = 1 if device.type == "cuda" else _threads(config, workers_each, model, dataset)
    model = model.to(device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    indices = torch.arange(config.largest_batch)
    batch = next(Example(dataset, device).train_batches(0, [indices]))
    return Subject(config, model, batch, dataset, chosen, assumed)


def device_of(config: RunConfig) -> torch.device:
    """Where the step is timed.

    Raises:
        ValueRefused: there is no such device.
    """
    there = torch.cuda.is_available()
    if config.device == "cuda" and not there:
        raise ValueRefused("device", "auto or cpu on a machine without a CUDA device", "cuda", "auto")
    return torch.device("cuda" if there and config.device != "cpu" else "cpu")


def _threads(config: RunConfig, workers_each: int, model: nn.Module, dataset: Dataset) -> int:
    return threads.choose_threads(
        config.threads, workers_each, lambda: flops_per_kernel(model, dataset, config.largest_batch)
    )
