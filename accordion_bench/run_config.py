"""The typed configuration of a run: the one declaration of what stands at run level and in `comm`.

What an option means stands beside it in conf/config.yaml and conf/comm/auto.yaml. The config groups (model, compressor,
sync ...) stay plain options, which the classes that they name check.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeGuard

from accordion_bench.batches import largest
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.instantiate import Config

LONGEST_LABEL = 40  # characters: two of them still stand in one legend


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """Processes, and how they exchange."""

    backend: str = "auto"
    processes: int | None = None
    workers_per_process: int | None = None
    timeout: float = 600
    overlap: bool | None = None
    bucket_cap_mb: float | None = None
    engine: str = "exchange"
    hook: str | None = None
    hook_state: str | None = None
    hook_options: dict | None = None
    interface: str | None = None


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """What is looked at once per epoch."""

    norms: bool = False
    error: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved, and how much of it stays."""

    every: int | None = None
    minutes: float = 10
    keep: int = 2
    best: bool = False
    background: bool = False


@dataclass(frozen=True, kw_only=True)
class PathsConfig:
    """Where things are."""

    data: str = "data"
    runs: str = "results/runs"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run, in the order in which config.yaml holds it.

    A default is also what was in effect before there was the option: earlier folders say nothing of it.
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
    label: str | None = None
    seed: int = 0
    scale: str = "full"
    epochs: int = 60
    batch_size: int | list[int] = 32
    micro_batch_size: int | None = None
    clip_norm: float | None = None
    clip_at: str | None = None
    precision: str | None = None
    compile: str | None = None
    channels_last: bool | None = None
    workers: int | None = None
    device: str = "auto"
    deterministic: bool = False
    graphs: bool | None = None
    workers_at_once: int = 1
    threads: int | None = None
    bn: str = "pooled"
    target: float | None = None
    target_every: float = 1.0
    resume: str | None = None
    resume_sweep: bool = False
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    profile: int = 0
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    choices: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, cfg: Config) -> "RunConfig":
        """From what was composed, or what a run folder holds; kinds and values are checked by `config.validate`.

        Raises:
            ConfigError: an option is missing, or unknown, or no group where there must be one.
        """
        refuse_names(cfg)
        return cls(**{**cfg, **{name: part(**cfg[name]) for name, part in PARTS.items()}})

    def to_dict(self) -> Config:
        """As it was composed, and as config.yaml holds it; a copy."""
        return dataclasses.asdict(self)

    @property
    def largest_batch(self) -> int:
        """Samples per step of the worker that has most."""
        return largest(self.batch_size)

    def chosen(self, group: str) -> str:
        """The name that was chosen of a config group, for messages."""
        return self.choices.get(group, "this one")


# what has options of its own, declared here and not by a constructor
PARTS = {"comm": CommConfig, "measure": MeasureConfig, "checkpoint": CheckpointConfig, "paths": PathsConfig}
GROUPS = tuple(own.name for own in fields(RunConfig) if own.default is MISSING and own.default_factory is MISSING)


def defaults() -> Config:
    """Every option of run level with its default, as YAML would hold it; without the config groups and `choices`."""
    empty: dict[str, Config] = {group: {} for group in GROUPS}
    options = RunConfig(**empty).to_dict()  # type: ignore[arg-type]
    return {name: value for name, value in options.items() if name not in (*GROUPS, "choices")}


def completed(saved: Config) -> Config:
    """What a run folder holds, with the value that was in effect then for each option that is younger."""
    then = defaults()
    options = {**then, **saved}
    parts = {name: {**then[name], **options[name]} for name in PARTS if isinstance(options[name], dict)}
    return {**options, **parts}


def is_label(value: Any) -> TypeGuard[str]:
    """Whether a value can be an arm's label: text of 1 to `LONGEST_LABEL` printable characters in one line."""
    return isinstance(value, str) and bool(value.strip()) and len(value) <= LONGEST_LABEL and value.isprintable()


def refuse_names(cfg: Config) -> None:
    """Refuse what is missing or unknown at run level and in its parts.

    Raises:
        ConfigError: names the first option, and what to type.
    """
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
