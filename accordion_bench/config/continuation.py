"""Rules for resuming a run: same configuration, except for placement and a larger number of epochs."""

import math
import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from accordion_bench.config.components import Components, build_components
from accordion_bench.options.checks import ConfigError, as_typed, show
from accordion_bench.options.conf_dir import conf_dirs
from accordion_bench.options.instantiate import Config, is_trusted, target, targets_in
from accordion_bench.options.override import translate_renamed_config
from accordion_bench.options.units import counted
from accordion_bench.processes import environment
from accordion_bench.processes.rendezvous import first_difference
from accordion_bench.run_config import RunConfig, completed
from accordion_bench.runs import reuse
from accordion_bench.runs.folder import RunFolder, damaged
from accordion_bench.runs.saving import Trained, newest_manifest

# keys that may differ between a run and its continuation
MOVING = (*reuse.FREE, "comm", "device")
FREE_ON_RESUME = (*MOVING, "epochs")
# keys of comm on which the compressor's state depends
OF_THE_STATE = ("bucket_cap_mb", "engine", "hook", "hook_state", "hook_options")
# keys of comm that name code
NAMED = ("hook", "hook_state")


def resumed_config(cfg: Config, typed: set[str]) -> Config:
    """Return the configuration of the resumed run; all other typed options must agree with it.

    Raises:
        ConfigError: the run does not exist; it names code that is neither the package's nor named now; it has finished
            and no more epochs are requested; or an option differs.
    """
    folder = RunFolder(str(cfg["resume"]))
    try:
        there = (folder.path / "config.yaml").is_file()
    except OSError:  # for example, the name is too long
        there = False
    if not there:
        example = f"resume={cfg['paths']['runs']}/RUN"
        raise ConfigError(f"resume must be a run folder with a config.yaml, got {cfg['resume']}; type {example}")
    moving = {key: cfg[key] for key in reuse.FREE if key in cfg}
    merged = saved = completed({**moving, **folder.read_config()})
    refuse_foreign_code(saved, cfg, folder)
    if "threads" not in typed:  # another number of threads changes the last bits of sums
        merged = {**merged, "threads": threads_of(folder)}
    if lacking := [key for key in cfg if key not in saved and key not in MOVING]:
        raise ConfigError(
            f"resume must be a run of this version, got {cfg['resume']}, whose config.yaml lacks "
            f"{', '.join(lacking)}; type the run's own options without resume="
        )
    for key in ("choices", "comm"):
        if not isinstance(saved[key], dict):
            raise ConfigError(damaged(folder.path / "config.yaml", f"{key} of {show(saved[key])}"))
    if folder.done and not ("epochs" in typed and cfg["epochs"] != saved["epochs"]):
        raise ConfigError(
            f"resume must be a run that has not finished, got {cfg['resume']}, which has finished; type python -m "
            f"accordion_bench.report {shlex.quote(str(cfg['resume']))} to see it, or epochs=N for more than its "
            f"{saved['epochs']}"
        )
    cfg = {**cfg, "dataset": _as_counted(cfg["dataset"], saved["dataset"])}
    for key in sorted(typed):  # a group's name comes before its options
        if {key, key.split(".")[0]} & set(_free(saved)) and key not in [f"comm.{own}" for own in OF_THE_STATE]:
            merged = _with_value(merged, key, _value_at(cfg, key))
            continue
        old, new = (_value_at(c["choices"], key) for c in (saved, cfg))
        difference = (
            (key, old, new) if old != new else first_difference(_value_at(saved, key), _value_at(cfg, key), key)
        )
        if difference:
            where, old, new = difference
            raise ConfigError(
                f"{where} must be {show(old)} as in the run that is resumed, got {show(new)}; "
                f"type resume={cfg['resume']} alone"
            )
    if "comm" in typed or any(key.startswith("comm.") for key in typed):
        own = {key: saved["comm"][key] for key in OF_THE_STATE}
        merged = {**merged, "comm": {**merged["comm"], **own}}
    moved = {key: cfg["choices"][key] for key in typed if key in FREE_ON_RESUME and key in cfg["choices"]}
    return {**merged, "resume": str(cfg["resume"]), "choices": {**saved["choices"], **moved}}


def _as_counted(dataset: Any, saved: Any) -> Any:
    """Replace null options of a data set by the values that the run has counted in its files."""
    if not isinstance(dataset, dict) or not isinstance(saved, dict):
        return dataset
    found = {key: saved.get(key) for key in getattr(target(dataset, "dataset"), "counted", ()) if key in dataset}
    return {key: found.get(key) if value is None else value for key, value in dataset.items()}


def refuse_foreign_code(saved: Config, cfg: Config, folder: RunFolder) -> None:
    """Refuse a run folder that names classes of others, because building them executes foreign code.

    The classes that `cfg`, the configuration composed now, names are trusted.
    """
    for key, path in untrusted(saved, cfg):
        raise ConfigError(
            f"resume must be a run whose classes are ours or named by you, got {folder.path}, whose config.yaml has "
            f"{key}={show(path)}; type {key}={show(path)} beside resume= only if you know that code"
        )


def untrusted(saved: Config, cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield key and value of each `_target_` that neither YAML files (also of --config-dir) nor `cfg` contain.

    Hooks are in no YAML file, so that each hook is untrusted.
    """
    for group, node in saved.items():
        named = [path for _, path in targets_in(cfg.get(group))]
        for key, path in targets_in(node, group):
            if not is_trusted(path, group, named):
                yield key, path
    for name in NAMED:
        path = _value_at(saved, f"comm.{name}")
        if path is not None and path != _value_at(cfg, f"comm.{name}"):
            yield f"comm.{name}", path


def continuing(config: Config, folder: RunFolder) -> str:
    """Return the command that resumes one's own run; it names untrusted classes again."""
    added = [shlex.quote(f"--config-dir={place}") for place in conf_dirs()[1:]]
    named = [f"{key}={path}" for key, path in untrusted(config, {})]
    return " ".join(["python -m accordion_bench", *added, as_typed("resume", str(folder.path)), *named])


def computed_with(folder: RunFolder) -> Config:
    """Return the facts that decide the last bits of a run and are in no configuration: `threads` and `kernels`.

    They are read from the newest checkpoint, otherwise from environment.json, which has those of the start.
    """
    if (manifest := newest_manifest(folder.path)) and manifest.computed:
        return manifest.computed
    try:
        return folder.read_json("environment.json")
    except ConfigError:
        return {}


def threads_of(folder: RunFolder) -> int | None:
    """Return the number of threads of each process of a run, if recorded; refuse more than this machine can start."""
    found = computed_with(folder).get("threads")
    return environment.checked_threads("threads", found) if type(found) is int else None


def refuse_changed_history(config: RunConfig, parts: Components) -> None:
    """Refuse to resume from a checkpoint of another configuration, or with epochs that would have changed past steps.

    Args:
        config: configuration of the resumed run, with its placement; `resume` is its folder.
        parts: its components.
    """
    assert config.resume is not None
    folder = RunFolder(config.resume)
    folder.refuse_strange()
    manifest = newest_manifest(folder.path)
    if manifest is None:
        if folder.done or folder.read_config().get("epochs") != config.epochs:
            raise ConfigError(
                f"epochs must be {folder.read_config().get('epochs')} for a run without a checkpoint to continue "
                f"from, got {config.epochs}; type the run's own options with epochs={config.epochs}, without resume="
            )
        return
    saved = completed(translate_renamed_config(manifest.config))
    if difference := first_difference(_of_the_past(saved), _of_the_past(config.to_dict())):
        key, then, here = difference
        raise ConfigError(
            f"{key} must be {show(then)} as when the checkpoint was written, got {show(here)} in "
            f"{folder.path / 'config.yaml'}; restore that, or type {key}={show(here)} without resume= for a new run"
        )
    most = saved["epochs"] * parts.run.per_worker
    if manifest.trained.step > most or manifest.trained.epoch > saved["epochs"]:
        told = f"{counted(manifest.trained.step, 'step')} in {counted(manifest.trained.epoch, 'epoch')}"
        raise ConfigError(damaged(folder.path / "checkpoint", f"{told}, more than epochs={saved['epochs']} can have"))
    if saved["epochs"] != config.epochs:
        _refuse_another_length(config, parts, saved["epochs"], manifest.trained, folder)


def _free(cfg: Config) -> tuple[str, ...]:
    """Return the keys that may change on resume; in elastic runs also the number of workers."""
    elastic = isinstance(cfg["sync"], dict) and cfg["sync"].get("elastic")
    return (*FREE_ON_RESUME, *(["workers"] if elastic else []))


def _of_the_past(cfg: Config) -> Config:
    """Return the part of a configuration on which a checkpoint's state depends."""
    decisive = {key: value for key, value in reuse.decisive(cfg).items() if key not in _free(cfg)}
    return {**decisive, "comm": {key: cfg["comm"].get(key) for key in OF_THE_STATE}}


def _refuse_another_length(
    config: RunConfig, parts: Components, before: int, trained: Trained, folder: RunFolder
) -> None:
    if config.epochs <= trained.epochs:
        rule = f"more than the {trained.epochs:g} that are trained"
        more, typed = int(trained.epochs) + 1, as_typed("resume", str(folder.path))
        raise ConfigError(f"epochs must be {rule}, got {config.epochs}; type {typed} epochs={more}")
    then = build_components(replace(config, epochs=before), config.workers or 1)
    anew = f"type the run's own options with epochs={config.epochs}, without resume="
    for when in _steps(trained, folder):
        old, new = then.schedule(when), parts.schedule(when)
        if old != new:
            lr, noun = config.optimizer["lr"], "epoch" if when == 1 else "epochs"
            raise ConfigError(
                f"epochs must leave the learning rates that were trained with as they were, got {config.epochs}, with "
                f"which schedule={config.chosen('schedule')} has {lr * new:.4g} instead of {lr * old:.4g} after "
                f"{when:.4g} {noun}; {anew}"
            )
    for key, old, new in [
        ("compressor", then.wrapped.start_step, parts.wrapped.start_step),
        ("sync", _synchronous_steps(then), _synchronous_steps(parts)),
    ]:
        if min(old, trained.step) != min(new, trained.step):
            raise ConfigError(
                f"epochs must leave the steps that were taken as they were, got {config.epochs}, with which "
                f"{key}={config.chosen(key)} would have begun after step {new} instead of {old}; {anew}"
            )
    past = math.ceil(trained.epochs)
    for name, policy in parts.policies.items():
        if then.policies[name].length_dependent_decisions(past) != policy.length_dependent_decisions(past):
            raise ConfigError(
                f"epochs must leave what was decided as it was, got {config.epochs}, with which adaptive={name} would "
                f"have decided otherwise in the first {counted(past, 'epoch')}; {anew}"
            )


def _synchronous_steps(parts: Components) -> int:
    """Return the number of steps before local steps start."""
    return parts.run.steps - parts.sync.local_steps(parts.run)


def _steps(trained: Trained, folder: RunFolder) -> Iterator[float]:
    """Yield the time of each past step in epochs, using the steps per epoch in the metrics rows."""
    ends = {row["epoch"]: row["step"] for row in folder.read_metrics() if isinstance(row.get("step"), int)}
    begin, last = 0, trained.step - trained.step_in_epoch
    for epoch in range(trained.epoch):
        end = ends.get(epoch, 0)
        end = min(end if end > begin else begin + trained.steps_per_epoch, last)
        if end <= begin:
            return  # the rows do not belong to this run, which cannot have taken more steps
        yield from (epoch + i / (end - begin) for i in range(end - begin))
        begin = end
    yield from (trained.epoch + i / trained.steps_per_epoch for i in range(trained.step_in_epoch))


def _with_value(cfg: Any, key: str, value: Any) -> Config:
    head, _, rest = key.partition(".")
    return {**cfg, head: _with_value(cfg[head], rest, value) if rest else value}


def _value_at(cfg: Any, key: str) -> Any:
    for part in key.split("."):
        cfg = cfg.get(part) if isinstance(cfg, dict) else None
    return cfg
