"""What a checkpoint says of itself, and whether its files are as they were written."""

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
    """A checkpoint is not as it was written; `str()` says which of its files is not."""


@dataclass(frozen=True)
class Trained:
    """How far a run has come.

    Args:
        epoch: whole epochs.
        step: optimizer steps.
        step_in_epoch: steps of the epoch that is running.
        steps_per_epoch: all steps of that one.
    """

    epoch: int
    step: int
    step_in_epoch: int
    steps_per_epoch: int

    @property
    def possible(self) -> bool:
        """Whether a run can have come so far: an epoch has a step at least."""
        within = 0 <= self.step_in_epoch <= self.steps_per_epoch and self.steps_per_epoch > 0
        return within and 0 <= self.epoch <= self.step - self.step_in_epoch

    @property
    def epochs(self) -> float:
        """Epochs passed; whole ones at the end of the last step."""
        return self.epoch + self.step_in_epoch / self.steps_per_epoch


@dataclass(frozen=True)
class Manifest:
    """What stands in a checkpoint beside the state.

    Args:
        trained: how far the run had come.
        config: everything that decides its result.
        files: their sizes in bytes and checksums (CRC-32), by name.
        computed: what decides last bits and stands in no configuration: `threads` of a process, `kernels` of codecs.
    """

    trained: Trained
    config: Config
    files: dict[str, tuple[int, int]]
    computed: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """As it is written."""
        return durable.json_text(asdict(self), indent=1) + "\n"


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run folder, the newest first; damaged ones are among them."""
    found = [path for path in (run / "checkpoint").glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Optimizer steps taken before a checkpoint."""
    return int(path.name.removeprefix("step-"))


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        Damaged: it is missing, or cannot be read.
    """
    try:
        content: Any = untrusted.read_json(path / FILE)
        files = {name: (size, checksum) for name, (size, checksum) in content["files"].items()}
        trained = Trained(**{name: operator.index(number) for name, number in content["trained"].items()})
        if not trained.possible or trained.step != step_of(path):
            raise Damaged(f"{FILE} tells of step {trained.step} in epoch {trained.epoch}, which cannot be")
        return Manifest(trained, dict(content["config"]), files, dict(content["computed"]))
    except FileNotFoundError:
        raise Damaged(f"{FILE} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise Damaged(f"{FILE} cannot be read") from None


def newest_manifest(run: Path) -> Manifest | None:
    """That of the newest checkpoint whose manifest can be read; None where there is none."""
    for path in checkpoints(run):
        try:
            return read_manifest(path)
        except Damaged:
            continue
    return None


def of_something_else(path: Path, error: Exception) -> str:
    """The sentence for a checkpoint that can be read, and is not understood."""
    why = " ".join(str(error).split())[:200]
    return (
        f"resume must be a run whose checkpoints this version has written, got {path}, which holds something else "
        f"({type(error).__name__}: {why}); type the run's own options without resume= for a new run"
    )


def none_readable(run: Path, problems: list[str]) -> ConfigError:
    """What to say where no checkpoint can be read."""
    return ConfigError(
        f"resume must be a run with a checkpoint that can be read, got {run}, where {'; '.join(problems)}; "
        f"type rm -r {run / 'checkpoint'} to start it again"
    )
