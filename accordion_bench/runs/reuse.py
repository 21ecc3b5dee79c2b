"""Reuse of earlier runs: find a run with the same configuration, and lock a run's folder against other processes."""

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from accordion_bench import locks
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.instantiate import Config
from accordion_bench.options.override import translate_renamed_config
from accordion_bench.run_config import SAID, completed
from accordion_bench.runs import untrusted
from accordion_bench.runs.folder import RunFolder

LOCK = "run.lock"  # in a run's folder; an empty file that is never removed
STARTING = ".starting"  # under paths.runs: one lock per configuration, held while an equal run is searched for
# keys that do not affect the result
FREE = (
    *(*SAID, "dataset.check", "threads", "paths", "tracker", "resume", "resume_sweep", "checkpoint", "profile"),
    *("graphs", "workers_at_once"),
)
# top-level options whose lines in config.yaml can be compared as text, before YAML is parsed, if they are plain numbers
QUICK = ("seed", "epochs", "batch_size")


def decisive(cfg: Config) -> Config:
    """Return all options that affect the result, including the seed.

    `choices` are omitted because they are only names, and so are null options. A missing option has the value that was
    in effect before it existed.
    """
    return without(completed(cfg), (*FREE, "choices"))


def without(cfg: Config, free: Sequence[str]) -> Config:
    """Return a configuration without some dotted keys and without nulls, like runs from before an option existed."""

    def kept(node: Config, prefix: str) -> Config:
        return {
            key: kept(value, f"{prefix}{key}.") if isinstance(value, dict) else value
            for key, value in node.items()
            if value is not None and f"{prefix}{key}" not in free
        }

    return kept(cfg, "")


def find_earlier(cfg: Config, sweep: str = "", wait: bool = True) -> RunFolder | None:
    """Find the newest run under `paths.runs` with this configuration: a finished one, else one that can be continued.

    Args:
        cfg: configuration as it would be saved, with the number of workers.
        sweep: search only runs of this sweep; "" = all.
        wait: wait for the end of such a run if another process is running it.

    Returns:
        the folder of a finished run, or of one with a checkpoint; None if there is neither.

    Raises:
        ConfigError: another process is running it, and `wait` is False.
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
    """Lock a configuration while an equal run is searched for or created: of two such runs one finds the other."""
    folder = Path(cfg["paths"]["runs"]) / STARTING
    with contextlib.suppress(OSError):  # an unwritable folder is reported when the run is created
        folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(json.dumps(decisive(cfg), sort_keys=True).encode()).hexdigest()
    with locks.locked(folder / f"{digest[:16]}.lock", wait=True):
        yield


def _lines(file: Path) -> set[str]:
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
    return decisive(translate_renamed_config(saved)) if isinstance(saved, dict) else None


@contextlib.contextmanager
def hold(folder: RunFolder, wait: bool = False) -> Iterator[None]:
    """Lock a run's folder against other processes, see `locks.locked`.

    Args:
        folder: the run folder.
        wait: wait until no other process holds the lock.

    Raises:
        ConfigError: another process holds the lock, and `wait` is False.
    """
    try:
        with locks.locked(folder.path / LOCK, wait):
            yield
    except locks.Taken:
        raise ConfigError(
            f"resume must be a run that no process is running, got {folder.path}, which another one is running; "
            "wait for its end, or type resume=null"
        ) from None
