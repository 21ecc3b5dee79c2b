"""Manifest of a checkpoint: position in training, configuration, and checksums of its files."""

import operator
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accordion_bench.options.checks import ConfigError
from accordion_bench.options.instantiate import Config
from accordion_bench.runs import durable, untrusted

FILE = "manifest.json"
NAME = re.compile(r"step-[0-9]{1,18}")


class Damaged(Exception):
    """A checkpoint is damaged; `str()` names the file."""


@dataclass(frozen=True)
class Trained:
    """Position in training.

    Args:
        epoch: number of complete epochs.
        step: number of optimizer steps.
        step_in_epoch: number of steps taken in the current epoch.
        steps_per_epoch: number of steps of the current epoch.
    """

    epoch: int
    step: int
    step_in_epoch: int
    steps_per_epoch: int

    @property
    def possible(self) -> bool:
        """Whether the numbers are consistent; an epoch has at least one step."""
        within = 0 <= self.step_in_epoch <= self.steps_per_epoch and self.steps_per_epoch > 0
        return within and 0 <= self.epoch <= self.step - self.step_in_epoch

    @property
    def epochs(self) -> float:
        """Number of epochs passed, with the fraction of the current one."""
        return self.epoch + self.step_in_epoch / self.steps_per_epoch


@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint's manifest.json.

    Args:
        trained: position in training.
        config: all options that affect the result.
        files: size in bytes and checksum (CRC-32) of each file, by name.
        computed: settings outside the configuration that affect the last bits: `threads` per process, codec `kernels`.
    """

    trained: Trained
    config: Config
    files: dict[str, tuple[int, int]]
    computed: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """Return the content of the file."""
        return durable.json_text(asdict(self), indent=1) + "\n"


def checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run folder, newest first, including damaged ones."""
    found = [path for path in (run / "checkpoint").glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return the number of optimizer steps taken before a checkpoint."""
    return int(path.name.removeprefix("step-"))


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        Damaged: it is missing or cannot be read.
    """
    try:
        content: Any = untrusted.read_json(path / FILE)
        files = {name: (size, checksum) for name, (size, checksum) in content["files"].items()}
        trained = Trained(**{name: operator.index(number) for name, number in content["trained"].items()})
        if not trained.possible or trained.step != step_of(path):
            raise Damaged(f"{FILE} says step {trained.step} in epoch {trained.epoch}, which is impossible")
        return Manifest(trained, dict(content["config"]), files, dict(content["computed"]))
    except FileNotFoundError:
        raise Damaged(f"{FILE} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise Damaged(f"{FILE} cannot be read") from None


def newest_manifest(run: Path) -> Manifest | None:
    """Return the newest checkpoint manifest that can be read; None if there is none."""
    for path in checkpoints(run):
        try:
            return read_manifest(path)
        except Damaged:
            continue
    return None


def unexpected_content_message(path: Path, error: Exception) -> str:
    """Return the error message for a checkpoint that is readable but has unexpected content."""
    why = " ".join(str(error).split())[:200]
    return (
        f"resume must be a run whose checkpoints this version has written, got {path}, which holds something else "
        f"({type(error).__name__}: {why}); type the run's own options without resume= for a new run"
    )


def none_readable(run: Path, problems: list[str]) -> ConfigError:
    """Return the error for a run without a readable checkpoint."""
    return ConfigError(
        f"resume must be a run with a checkpoint that can be read, got {run}, where {'; '.join(problems)}; "
        f"type rm -r {run / 'checkpoint'} to start it again"
    )
