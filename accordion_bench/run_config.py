"""Typed configuration of a run: declares the run-level options and those of `comm`.

conf/config.yaml and conf/comm are generated from it (`python -m scripts.options`). Config groups (model, compressor,
sync ...) remain plain dicts; the classes that they name declare their options.
"""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeGuard

from accordion_bench.batches import largest
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import NEAREST, Choice, check_options, option

LONGEST_LABEL = 40  # maximum characters, so that two labels fit in a legend
LONGEST_NOTE = 1000  # maximum characters
SAID = ("label", "tags", "note")  # descriptions of a run, which may change later
LONGEST_TIMEOUT = 1e8  # seconds, three years
LARGEST_SEED = 2**63 - 1  # accepted by the generators of torch, NumPy and Python
MOST_EPOCHS = 10**6  # each adds a row of metrics
SCALES = ("full", "small", "tiny")


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """Processes, and how they communicate."""

    backend: str = option(default="auto", choices=("auto", "simulated", "gloo", "nccl"))
    processes: int | None = option(
        "null = derived from workers and workers_per_process", default=None, at_least=1, instead=1
    )
    workers_per_process: int | None = option(default=None, at_least=1)
    timeout: int | float = option("timeout of a collective in seconds", default=600, above=0, at_most=LONGEST_TIMEOUT)
    overlap: bool | None = option(
        "exchange buckets of gradients during the backward pass; null = with gloo and nccl", default=None
    )
    bucket_cap_mb: int | float | None = option(
        "MB of messages per bucket; null = 1, then 25, and 25 MB of gradients for casts and on GPUs",
        default=None,
        above=0,
        instead=25,
    )
    engine: str = option(
        "exchange; ddp: torch's DistributedDataParallel with its own hooks, for comparison",
        default="exchange",
        choices=("exchange", "ddp"),
    )
    hook: str | None = option(
        "with engine=ddp: any hook, package.module:function(state, bucket); its bytes are not counted", default=None
    )
    hook_state: str | None = option(
        "creates that hook's state: package.module:factory(process_group, **hook_options)", default=None
    )
    hook_options: dict | None = option(
        "{matrix_approximation_rank: 2} for torch's PowerSGDState, for example", default=None
    )
    interface: str | None = option("network interface for gloo and NCCL; its byte counters are recorded", default=None)

    chosen_as = {
        "auto": Choice(
            "processes of torchrun or Slurm if these started it; else nccl with two GPUs or more; else all workers in "
            "one process"
        ),
        "gloo": Choice("processes on CPUs (or GPUs) over gloo", {"backend": "gloo"}),
        "nccl": Choice("one process per GPU over NCCL", {"backend": "nccl"}),
        "simulated": Choice("all workers in one process", {"backend": "simulated"}),
    }


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """Measurements once per epoch, for figures."""

    norms: bool = option("norm of worker 0's summed gradients, per layer", default=False)
    error: bool = option(
        "relative error of worker 0's first compressed message: ||x - C(x)||^2 / ||x||^2", default=False
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved, and how many are kept."""

    every: int | None = option(
        "steps between checkpoints; null = one per epoch, 0 = only when the run is stopped",
        default=None,
        at_least=0,
    )
    minutes: int | float = option("maximum minutes between them; 0 = only `every` decides", default=10, at_least=0)
    keep: int = option(
        "number of newest checkpoints kept during the run; after its end one is kept",
        default=2,
        at_least=1,
        instead=NEAREST,
    )
    best: bool = option("true = also keep the weights of the best epoch, in best.pt", default=False)
    safetensors: bool = option("true = save weights and best in that format instead of .pt", default=False)
    background: bool = option("true = a thread writes a copy of the state during training", default=False)


@dataclass(frozen=True, kw_only=True)
class PathsConfig:
    """Folders, relative to the current one."""

    data: str = option("folder of the data sets", default="data")
    runs: str = option("folder in which each run creates its run folder", default="results/runs")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Configuration of a run, in the order of config.yaml.

    The default of a new option must equal the behaviour before it, because older run folders do not contain it.
    """

    model: Config
    dataset: Config
    compressor: Config
    sync: Config
    schedule: Config
    adaptive: dict[str, Config]
    optimizer: Config
    comm: CommConfig = field(default_factory=CommConfig)
    network: Config
    tracker: Config
    label: str | None = option(
        f"name of this arm in reports, 1 to {LONGEST_LABEL} characters; null = derived from its options",
        default=None,
    )
    tags: list[str] | None = option(
        f"list of words for reports and trackers, 1 to {LONGEST_LABEL} characters each: [final,ablation]", default=None
    )
    note: str | None = option(f"a sentence for reports and trackers, of 1 to {LONGEST_NOTE} characters", default=None)
    seed: int = option(default=0, at_least=0, at_most=LARGEST_SEED, instead=NEAREST)
    scale: str = option("full, small, tiny: duration and data size of +experiment=...", default="full")
    epochs: int = option(default=60, at_least=1, at_most=MOST_EPOCHS)
    batch_size: int | list[int] = option(
        "samples per worker and step; [64,32,32,32] = one number per worker, which also weights means", default=32
    )
    micro_batch_size: int | None = option("samples per backward pass; null = the whole batch", default=None, at_least=1)
    clip_norm: int | float | None = option("maximum global L2 norm of a gradient", default=None, above=0, instead=1.0)
    clip_at: str | None = option(
        "before (null): clip each worker's gradient first of all; after: clip the exchanged mean",
        default=None,
        choices=("before", "after"),
    )
    precision: str | None = option(
        "precision of forward and loss: float32 (null), bfloat16, or float16 with a loss scale",
        default=None,
        choices=("float32", "bfloat16", "float16"),
    )
    compile: str | None = option(
        "torch.compile of the forward pass: inductor, or aot_eager, eager for debugging; null = none",
        default=None,
        choices=("inductor", "aot_eager", "eager"),
        instead="inductor",
    )
    channels_last: bool | None = option("true = channels_last memory format of model and images", default=None)
    workers: int | None = option(
        "total number of workers; null = comm.processes x comm.workers_per_process, or 4", default=None, at_least=1
    )
    device: str = option(default="auto", choices=("auto", "cpu", "cuda"), instead="auto")
    deterministic: bool = option(
        "true = deterministic kernels, no TF32: bitwise reproducible on a GPU, but slower", default=False
    )
    graphs: bool | None = option(
        "CUDA graphs for steps; null = where possible, false = never, true = refuse the run if not possible",
        default=None,
    )
    workers_at_once: int = option(
        "workers of a process whose replayed passes run concurrently on a GPU; at most all of its workers",
        default=1,
        at_least=1,
    )
    threads: int | None = option(
        "CPU threads per process; null = OMP_NUM_THREADS, or its share of the cores if that is faster",
        default=None,
        at_least=1,
    )
    bn: str = option(
        "BatchNorm statistics for evaluation: pooled, average, recompute, rank0, local",
        default="pooled",
        choices=("pooled", "average", "recompute", "rank0", "local"),
    )
    target: int | float | None = option(
        "accuracy in (0, 1], or perplexity, whose time and bytes to reach are reported", default=None
    )
    target_every: int | float = option(
        "epochs between checks for the target, 1 or less; their time is not measured",
        default=1.0,
        above=0,
        at_most=1,
        instead=0.25,
    )
    resume: str | None = option("run folder to continue", default=None)
    resume_sweep: bool = option("skip finished runs under paths.runs, and continue stopped ones", default=False)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    profile: int = option(
        "number of steps to profile with torch.profiler, after the first one: trace.json, profile.txt; 0 = none",
        default=0,
        at_least=0,
    )
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    choices: dict[str, str] = field(default_factory=dict)

    def check_options(self) -> None:
        """Refuse values that break their declaration."""
        check_options(self)
        for name in PARTS:
            check_options(getattr(self, name), f"{name}.")

    @classmethod
    def from_dict(cls, cfg: Config) -> "RunConfig":
        """Build from a composed configuration or that of a run folder; `config.validate` checks kinds and values.

        Raises:
            ConfigError: an option is missing or unknown, or a group of options is not a dict.
        """
        refuse_names(cfg)
        return cls(**{**cfg, **{name: part(**cfg[name]) for name, part in PARTS.items()}})

    def to_dict(self) -> Config:
        """Return a copy as a dict, as it was composed and as config.yaml contains it."""
        return dataclasses.asdict(self)

    @property
    def largest_batch(self) -> int:
        """Largest number of samples per worker and step."""
        return largest(self.batch_size)

    @property
    def trackers(self) -> list[Config]:
        """Options of each tracker; several trackers are stored under their names."""
        return [self.tracker] if "_target_" in self.tracker else list(self.tracker.values())

    def said(self, typed: Collection[str]) -> dict[str, Any]:
        """Return the typed descriptions of the run (`SAID`)."""
        return {key: getattr(self, key) for key in SAID if key in typed}

    def chosen(self, group: str) -> str:
        """Return the chosen name of a config group, for messages."""
        return self.choices.get(group, "this one")


# groups whose options are declared here and not by a constructor
PARTS = {"comm": CommConfig, "measure": MeasureConfig, "checkpoint": CheckpointConfig, "paths": PathsConfig}
GROUPS = tuple(own.name for own in fields(RunConfig) if own.default is MISSING and own.default_factory is MISSING)


def defaults() -> Config:
    """Return the defaults of all run-level options, without the config groups and `choices`."""
    empty: dict[str, Config] = {group: {} for group in GROUPS}
    options = RunConfig(**empty).to_dict()  # type: ignore[arg-type]
    return {name: value for name, value in options.items() if name not in (*GROUPS, "choices")}


def completed(saved: Config) -> Config:
    """Return a run folder's configuration, with defaults for options added since."""
    then = defaults()
    options = {**then, **saved}
    parts = {name: {**then[name], **options[name]} for name in PARTS if isinstance(options[name], dict)}
    return {**options, **parts}


def is_label(value: Any, longest: int = LONGEST_LABEL) -> TypeGuard[str]:
    """Whether a value is a valid label: text of 1 to `longest` printable characters in one line."""
    return isinstance(value, str) and bool(value.strip()) and len(value) <= longest and value.isprintable()


def refuse_names(cfg: Config) -> None:
    """Refuse missing and unknown options at run level and in its parts."""
    declared = {**defaults(), **{group: {} for group in GROUPS}}
    for prefix in ("", *(f"{name}." for name in PARTS)):
        here, there = (cfg[prefix[:-1]], declared[prefix[:-1]]) if prefix else (cfg, declared)
        if not isinstance(here, dict):
            option = f"{prefix}{next(iter(there))}=VALUE"
            raise ConfigError(f"{prefix[:-1]} must be a group of options, got {checks.show(here)}; type {option}")
        _refuse_missing(prefix, here, there)
        _refuse_unknown(prefix, [key for key in here if key != "choices"], list(there))


def _refuse_missing(prefix: str, here: Config, there: Config) -> None:
    for key in [key for key in there if key not in here]:
        value = "NAME" if isinstance(there[key], dict) else checks.show(there[key])
        raise ConfigError(f"{prefix}{key} must be there, got ~{prefix}{key}; type {prefix}{key}={value}")


def _refuse_unknown(prefix: str, here: Sequence[str], there: Sequence[str]) -> None:
    for key in [key for key in here if key not in there]:
        near = checks.closest(str(key), there, cutoff=checks.ALIKE)
        instead = f"{prefix}{near}, or " if near else ""
        raise ConfigError(f"{prefix}{key} is no option here; type {instead}--help all for every option")
