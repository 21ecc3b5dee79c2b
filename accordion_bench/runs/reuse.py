"""Sameness: which earlier run is the one that is asked for, and whether a process is running it."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from accordion_bench import locks
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.instantiate import Config
from accordion_bench.options.override import config_in_todays_words
from accordion_bench.run_config import SAID, completed
from accordion_bench.runs import untrusted
from accordion_bench.runs.folder import RunFolder

LOCK = "run.lock"  # in a run's folder; stays there, empty
STARTING = ".starting"  # under paths.runs: a lock for each configuration of which equal runs are looked for
# keys that decide no result
FREE = (
    *(*SAID, "dataset.check", "threads", "paths", "tracker", "resume", "resume_sweep", "checkpoint", "profile"),
    *("graphs", "workers_at_once"),
)
# top-level options which, where they are plain numbers, look the same in every config.yaml: read before YAML is parsed
QUICK = ("seed", "epochs", "batch_size")


def decisive(cfg: Config) -> Config:
    """Everything that decides the result, the seed included.

    `choices` are only names; an option that is null is left out, and one that is lacking has the value that was in
    effect before there was that option.
    """
    return without(completed(cfg), (*FREE, "choices"))


def without(cfg: Config, free: Sequence[str]) -> Config:
    """A configuration without some dotted keys, and without nulls: as in runs from before there was that option."""

    def kept(node: Config, prefix: str) -> Config:
        return {
            key: kept(value, f"{prefix}{key}.") if isinstance(value, dict) else value
            for key, value in node.items()
            if value is not None and f"{prefix}{key}" not in free
        }

    return kept(cfg, "")


def find_earlier(cfg: Config, sweep: str = "", wait: bool = True) -> RunFolder | None:
    """The newest run under `paths.runs` with this configuration: a finished one, else one that can be continued.

    Args:
        cfg: as it would be saved, with the number of workers.
        sweep: only runs of this one; "" = all.
        wait: for the end of one that another process is running.

    Returns:
        the folder of a finished run, or of one with a checkpoint; None where there is neither.

    Raises:
        ConfigError: another process is running it, and there is no waiting.
    """
    from accordion_bench.runs import checkpoint  # imports torch, which reports do without

    wanted, unfinished, running = decisive(cfg), None, None
    lines = {f"{key}: {cfg[key]}" for key in QUICK if not isinstance(cfg[key], list)}
    for file in sorted(Path(cfg["paths"]["runs"]).glob("*/config.yaml"), reverse=True):
        if not lines <= _lines(file) or _decisive(file, file.stat().st_mtime_ns) != wanted:
            continue
        folder = RunFolder(file.parent)
        if sweep and folder.sweep != sweep:
            continue
        if folder.done:
            return folder
        try:
            with hold(folder):
                unfinished = unfinished or (folder if checkpoint.latest(folder.path) else None)
        except ConfigError:
            running = folder
    if running is None:
        return unfinished
    if wait:
        print(f"waiting for the process that is running {running.path}", flush=True)
    with hold(running, wait):
        pass
    return find_earlier(cfg, sweep, wait)


@contextlib.contextmanager
def one_at_a_time(cfg: Config) -> Iterator[None]:
    """Around looking for an equal run and making one: of two equal runs that start at once, one finds the other.

    Args:
        cfg: as it would be saved, with the number of workers.
    """
    folder = Path(cfg["paths"]["runs"]) / STARTING
    with contextlib.suppress(OSError):  # where nothing can be written, making the run says so
        folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(json.dumps(decisive(cfg), sort_keys=True).encode()).hexdigest()
    with locks.locked(folder / f"{digest[:16]}.lock", wait=True):
        yield


def _lines(file: Path) -> set[str]:
    """Those of a text file; none where it cannot be read."""
    try:
        return set(untrusted.read_text(file).splitlines())
    except (OSError, ValueError):
        return set()


@functools.cache  # the cells of a sweep look at the same folders
def _decisive(file: Path, changed: int) -> Config | None:
    import yaml

    try:
        saved = untrusted.read_yaml(file)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return decisive(config_in_todays_words(saved)) if isinstance(saved, dict) else None


@contextlib.contextmanager
def hold(folder: RunFolder, wait: bool = False) -> Iterator[None]:
    """Hold a run's folder against other processes, see `locks.locked`.

    Args:
        folder: of the run.
        wait: until no other process holds it.

    Raises:
        ConfigError: another process holds it, and there is no waiting.
    """
    try:
        with locks.locked(folder.path / LOCK, wait):
            yield
    except locks.Taken:
        raise ConfigError(
            f"resume must be a run that no process is running, got {folder.path}, which one is; "
            "wait for its end, or type resume=null"
        ) from None
