"""Random data with the shapes of a data set that is not needed on disk, and a model with a batch of it for timing."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from accordion_bench.advising.counted_step import CountedStep, counted_step
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.config.components import build_model, build_optimizer
from accordion_bench.datasets.dataset import Batches, Dataset
from accordion_bench.forward.execution import autocast
from accordion_bench.forward.task import task_of
from accordion_bench.forward.trial import flops_per_kernel
from accordion_bench.optimizers.inner import parameter_kinds
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.instantiate import Config, build, target
from accordion_bench.options.presets import named
from accordion_bench.processes import environment
from accordion_bench.run_config import RunConfig
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.keyed_rng import key, seeded

# default data set by task
USUAL_DATA = {"images": "cifar10", "text": "wikitext2", "tokens": "wikitext2_bytes"}


class Example:
    """Random data with the shapes and sizes of `dataset`, in batches on `device`."""

    def __init__(self, dataset: Dataset, device: torch.device) -> None:
        self.dataset, self.device = dataset, device
        self.train_size = self.test_size = dataset.train_count
        told = dataset.model_arguments()
        self.classes = told.get("num_classes", told.get("vocabulary", 1))
        self.generator = keyed_rng.generator(0, "dry run")

    @property
    def train_labels(self) -> Tensor:
        """Random labels of all training samples, [train_size], for shards by label."""
        return torch.randint(self.classes, (self.train_size,), generator=keyed_rng.generator(0, "dry run"))

    def train_batches(self, epoch: int, batches: Iterable[Tensor]) -> Batches:
        """Yield a random batch for each index tensor, with as many samples."""
        for indices in batches:
            example = self.dataset.example(len(indices))
            assert example is not None
            x, y = (part.clone() for part in example)
            if x.is_floating_point():
                x.normal_(generator=self.generator)
            else:
                x.random_(self.classes, generator=self.generator)
            yield x.to(self.device), y.random_(self.classes, generator=self.generator).to(self.device)


def batch_of(dataset: Dataset, device: torch.device, samples: int) -> tuple[Tensor, Tensor]:
    """Return one random batch (inputs, targets) with this number of samples."""
    return next(iter(Example(dataset, device).train_batches(0, [torch.arange(samples)])))


@dataclass(frozen=True)
class Subject:
    """Model with a batch of random data that imitates `dataset`, for timing or counting a step."""

    config: RunConfig
    model: nn.Module
    batch: tuple[Tensor, Tensor]
    dataset: Dataset
    threads: int = 1

    @property
    def name(self) -> str:
        """Description such as `resnet18 on cifar10, batch 32`."""
        composed = self.config.to_dict()
        return f"{named(composed, 'model')} on {named(composed, 'dataset')}, batch {len(self.batch[0])}"

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Compute forward pass and loss in the configuration's precision."""
        with autocast(self.config.precision, batch[0].device):
            return self._loss(model, batch)

    def _loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return task_of(self.dataset, batch[0].device).loss(model, *batch, 0, 0)

    def counted(self, computed: bool = False) -> CountedStep:
        """Count the work of a step, which does not depend on the precision. See `counted_step`."""
        return counted_step(self.model, self.batch, self._loss, len(self.batch[0]), self.name, computed)

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Build the configuration's optimizer, as in a run."""
        compressor = wrapped_compressor(self.config.compressor, self.config.optimizer).compressor
        return build_optimizer(self.config.optimizer, compressor, params, parameter_kinds(self.model))


def usual_data(node: Config) -> str:
    """Return the default data set of a model: that of its class, otherwise that of its task."""
    cls = target(node, "model")
    return getattr(cls, "usual_data", USUAL_DATA[getattr(cls, "task", "images")])


def subject_of(config: RunConfig, workers_each: int) -> Subject:
    """Build the model and a random batch of a configuration, for one of `workers_each` workers that share a machine.

    Raises:
        ConfigError: model and data set are incompatible, the data set has no example, or the device does not exist.
    """
    dataset: Dataset = build(config.dataset, "dataset")
    if dataset.example(1) is None:
        name = config.chosen("dataset")
        raise ConfigError(f"dataset must be one with an example, got {name}; type dataset=cifar10, or write {name}'s")
    device = device_of(config)
    with seeded(key(config.seed, "model")):
        model = build_model(config.model, dataset, config.chosen("model"), config.chosen("dataset"))
    chosen = 1
    if device.type == "cpu":
        flops = functools.partial(flops_per_kernel, model, dataset, config.largest_batch)
        chosen = environment.choose_threads(config.threads, workers_each, flops)
    model = model.to(device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Subject(config, model, batch_of(dataset, device, config.largest_batch), dataset, chosen)


def device_of(config: RunConfig) -> torch.device:
    """Return the device on which the step is timed; refuse device=cuda on a machine without a GPU."""
    there = torch.cuda.is_available()
    if config.device == "cuda" and not there:
        raise ValueRefused("device", "auto or cpu on a machine without a CUDA device", "cuda", "auto")
    return torch.device("cuda" if there and config.device != "cpu" else "cpu")
