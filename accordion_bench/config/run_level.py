"""Wrong values at run level, which are refused without importing torch, so that a typo costs no seconds."""

import shlex
from typing import Any

from accordion_bench.config.compose import SCALES
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused, show
from accordion_bench.options.kinds import same_kinds
from accordion_bench.run_config import LONGEST_LABEL, RunConfig, defaults, is_label

LARGEST_SEED = 2**63 - 1  # torch's, NumPy's and Python's generators take it
MOST_EPOCHS = 10**6  # each leaves a row of metrics


def refuse_wrong(config: RunConfig) -> None:
    """Refuse values of another kind than their defaults, and such as are wrong whatever the other options say.

    Raises:
        ConfigError: for the first one.
    """
    same_kinds(defaults(), {**config.to_dict(), "batch_size": _batch_sizes(config)[0]}, "")
    _refuse_absurd(config)
    if config.scale != "full" and "experiment" not in config.choices:
        raise ValueRefused("scale", "full without +experiment=NAME, which says what to shorten", config.scale, "full")
    checks.choice("scale", config.scale, SCALES)
    if config.label is not None and not is_label(config.label):
        raise ValueRefused("label", f"text of 1 to {LONGEST_LABEL} printable characters in one line", *_label(config))
    if config.graphs is not None:
        checks.boolean("graphs", config.graphs, instead=False)
    checks.integer("workers_at_once", config.workers_at_once, at_least=1, instead=1)
    saving = config.checkpoint
    if saving.every is not None:
        checks.integer("checkpoint.every", saving.every, at_least=0)
    checks.number("checkpoint.minutes", saving.minutes, at_least=0, instead=10)
    checks.integer("checkpoint.keep", saving.keep, at_least=1)
    for key in ("best", "background"):
        checks.boolean(f"checkpoint.{key}", getattr(saving, key), instead=True)
    for key in ("norms", "error"):
        checks.boolean(f"measure.{key}", getattr(config.measure, key), instead=True)
    for key, folder in (("data", "data"), ("runs", "results/runs")):
        if not getattr(config.paths, key):
            raise ValueRefused(f"paths.{key}", "a folder", "''", folder)
    checks.number("target_every", config.target_every, above=0, at_most=1, instead=0.25)


def _label(config: RunConfig) -> tuple[str, str]:
    """What a wrong label is shown as, and the nearest one that is allowed."""
    text = config.label if isinstance(config.label, str) else f"arm {show(config.label)}"
    given = " ".join(text.split())
    printable = "".join(letter for letter in given if letter.isprintable())[:LONGEST_LABEL].strip()
    return repr(config.label), shlex.quote(printable or "NAME")


def _batch_sizes(config: RunConfig) -> list[Any]:
    """The entries of a list of batches, or the number that all workers have."""
    given: Any = config.batch_size
    if given == []:
        raise ValueRefused("batch_size", "a number, or a list of one for each worker", given, 32)
    return given if isinstance(given, list) else [given]


def _refuse_absurd(config: RunConfig) -> None:
    """Numbers that are too large or too small for any run, and policies that are named twice."""
    checks.integer("seed", config.seed, at_least=0, at_most=LARGEST_SEED)
    checks.integer("epochs", config.epochs, at_least=1, at_most=MOST_EPOCHS, instead=60)
    for size in _batch_sizes(config):
        if isinstance(config.batch_size, int):
            checks.integer("batch_size", size, at_least=1, instead=32)
        elif type(size) is not int or size < 1:
            fitting = [n if type(n) is int and n > 0 else 32 for n in config.batch_size]
            raise ValueRefused("batch_size", "a list of numbers of samples, at least 1", config.batch_size, fitting)
    if config.micro_batch_size is not None:
        checks.integer("micro_batch_size", config.micro_batch_size, at_least=1, instead=config.largest_batch)
    checks.integer("profile", config.profile, at_least=0)
    names = config.choices.get("adaptive", "").split(",")
    if twice := next((name for name in names if names.count(name) > 1), None):
        once = list(dict.fromkeys(names))
        raise ConfigError(
            f"adaptive must name each policy once, got {twice} twice; type "
            f"adaptive={once[0] if len(once) == 1 else show(once)}"
        )
