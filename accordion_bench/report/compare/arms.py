"""Arms (runs that differ only in their seed), the dense baseline of each arm, and the commands of their runs."""

import math
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from accordion_bench.methods.labels import drives, is_dense, policies_of
from accordion_bench.network.links import link_name
from accordion_bench.options import checks
from accordion_bench.options.presets import named
from accordion_bench.report.read import Run, flat
from accordion_bench.run_config import completed
from accordion_bench.runs.reuse import FREE as ALWAYS_FREE
from accordion_bench.runs.reuse import without

# options that do not change what a run computes
FREE = (*ALWAYS_FREE, "seed", "choices", "measure", "target", "target_every")
# options that are compared: a difference to dense in these is not reported
METHOD = ("compressor", "sync", "adaptive", "batch_size", "attached")
TOLD_OF_DATA = ("subset", "validation")  # options of a data set that headings describe in words
NAMED = ("arm", "compressor", "adaptive", "sync")  # choices of a user's own loop, which need not report its options
HOOK = ("comm.hook", "comm.hook_state", "comm.hook_options")


@dataclass(frozen=True)
class Arm:
    """Finished runs of one configuration, one per seed.

    Args:
        label: name in tables and figures, unique within a report.
        runs: runs, by ascending seed.
        setting: text that is equal for arms that may be compared.
        batches: batch sizes per worker of all arms of the setting except its controls.
        control: whether this is an experiment's one-worker control, in the setting of the arms that it belongs to.
        apart: what distinguishes its setting from another with the same model, data, workers, batch and epochs; "" =
            none.
    """

    label: str
    runs: tuple[Run, ...]
    setting: str = ""
    batches: tuple[int | str, ...] = ()
    control: bool = False
    apart: str = ""

    @property
    def n(self) -> int:
        return len(self.runs)

    @property
    def config(self) -> dict[str, Any]:
        return self.runs[0].config

    @property
    def seeds(self) -> list[int | None]:
        return [run.seed for run in self.runs]

    @property
    def called(self) -> str:
        """The user's label, given as `label=`, if all labelled runs have the same; else ""."""
        names = {run.called for run in self.runs} - {""}
        return names.pop() if len(names) == 1 else ""

    @property
    def method(self) -> str:
        """Name of the method, which depends on its options and not on the label."""
        return self.runs[0].method

    @property
    def dense(self) -> bool:
        """Whether the arm can be the baseline of others."""
        return is_dense(self.config) and not self.control

    @property
    def attached(self) -> bool:
        """Whether the rows were written by a user's own training loop."""
        return self.runs[0].attached

    @property
    def metric(self) -> str:
        """Name of the metric, a column of metrics.jsonl: see `accordion_bench.runs.metrics`."""
        return self.runs[0].summary.get("metric_name", "accuracy")

    @property
    def selected_by(self) -> str:
        """Column of metrics.jsonl that is compared with `target` and selects the best epoch."""
        return self.runs[0].summary.get("selected_by") or self.metric

    @property
    def scale(self) -> str:
        """`full`, or the shortened form of an experiment: `small`, `tiny`."""
        return self.config.get("scale") or "full"

    @property
    def workers(self) -> int:
        """Number of workers that took part in training."""
        return int(self.runs[0].summary["workers"])

    @property
    def batch(self) -> int | None:
        """Samples per step over all workers, at the start of the run; None if a user's loop does not report it."""
        size = self.config["batch_size"]
        return sum(size) if isinstance(size, list) else None if size is None else self.workers * size

    @property
    def batch_each(self) -> int | str | None:
        """Samples per step and worker, at the start; `64+32+32` if workers differ, None if it is not reported."""
        size = self.config["batch_size"]
        return "+".join(map(str, size)) if isinstance(size, list) else size

    @property
    def batch_text(self) -> str:
        """`batch 512` over all workers; `batch 512 at first` if a policy changes it."""
        if self.batch is None:
            return "batch not told"
        grows = any(drives(policy) == "batch" for policy in policies_of(self.config).values())
        return f"batch {self.batch} at first" if grows else f"batch {self.batch}"

    @cached_property
    def options(self) -> dict[str, Any]:
        """Options that define the arm, by dotted keys."""
        return flat(fingerprint(self.runs[0]))

    def chosen(self, group: str) -> str:
        """Return the choice in a config group, or the preset (`arm`, `experiment`); "" if there is none."""
        return (self.config.get("choices") or {}).get(group) or ""

    def named(self, group: str, besides: Collection[str] = ()) -> str:
        """Return the choice of a config group with the options that differ from it: `vgg19 (width=8)`."""
        return link_name(self.config) if group == "network" else named(self.config, group, besides)

    @property
    def task(self) -> str:
        """`resnet8 on digits`, `vgg19 (width=8) on cifar10`; without data options that headings describe in words."""
        return f"{self.named('model')} on {self.named('dataset', TOLD_OF_DATA)}"

    def values(self, column: str) -> list[float]:
        """Return a column of summary.json over the seeds; [] if a run lacks it (null)."""
        found = [run.summary.get(column) for run in self.runs]
        known = [float(value) for value in found if isinstance(value, int | float)]
        return known if len(known) == len(found) else []

    @property
    def counted(self) -> bool:
        """Whether its bytes are counted; those of third-party hooks and of some users' loops are not."""
        return bool(self.values("payload_bytes"))

    def sends(self, column: str = "wire_bytes") -> bool:
        """Whether it can be drawn on an axis of bytes: its bytes are counted and above 0."""
        return bool(self.values(column)) and self.mean(column) > 0

    def mean(self, column: str) -> float:
        """Return the mean of a summary column over the seeds; NaN if there is none."""
        values = self.values(column)
        return math.fsum(values) / len(values) if values else math.nan


def fingerprint(run: Run) -> dict[str, Any]:
    """Return the options that are equal within an arm, with the number of workers that actually ran.

    Null options are omitted; a missing option has the value that was in effect before it existed.
    """
    kept = without(run.config if run.attached else completed(run.config), FREE)
    kept["adaptive"] = policies_of(run.config)  # a preset itself changes no result: its scheme is under sync
    kept["scale"] = run.config.get("scale") or "full"
    if run.attached:
        kept["attached"] = {name: run.config["choices"].get(name) for name in NAMED}
    if isinstance(lab := run.environment.get("netlab"), dict):
        kept["link"] = describe_netlab(lab)
    if "processes" in run.summary:  # processes of a launcher are not in the configuration
        kept["processes"] = run.summary["processes"]
    return {**kept, "workers": run.summary.get("workers", run.config.get("workers"))}


def describe_netlab(lab: dict[str, Any]) -> str:
    """Describe the links of a netlab: `links of 100 Mbit/s, host 2 20 Mbit/s`."""

    def speed(rate: float | None) -> str:
        return "unlimited" if rate is None else f"{rate / 1e6:g} Mbit/s"

    slow = [f"host {host} {speed(rate)}" for host, rate in lab.get("slow_host", {}).items()]
    cuts = [f"host {host} cut for {seconds:g} s" for host, seconds in lab.get("cuts", [])]
    delay = [f"{1000 * lab['delay']:g} ms"] if lab.get("delay") else []
    return ", ".join([f"links of {speed(lab.get('rate'))}", *delay, *slow, *cuts])


def baseline(arm: Arm, arms: Sequence[Arm]) -> Arm | None:
    """Return the dense arm of the same setting that differs least in all other options; None if there is none.

    Equal batch size comes first, then origin: a bench arm prefers a bench baseline, a user's loop one of its kind. The
    baseline of a dense arm is itself, or the nearest dense arm with the smallest batch of the setting.
    """
    dense = [other for other in arms if other.dense and other.setting == arm.setting]
    if arm.dense:
        smallest = min((other.batch for other in dense if other.batch is not None), default=None)
        dense = [other for other in dense if other.batch == smallest]

    def distance(other: Arm) -> tuple[bool, bool, int]:
        return other.batch != arm.batch, other.attached != arm.attached, len(differences(arm, other))

    return min(dense, key=distance, default=None)


def differences(arm: Arm, other: Arm) -> list[str]:
    """Return the options in which two arms differ, apart from those of the method, as `key value (other value)`.

    The method's options are compressor, scheme, policy and batch. For a group with another class only the name is
    given; for a user's own loop compared with the bench only that fact.
    """
    if arm.attached != other.attached:
        return ["the training loop, attached beside the bench's own, whose other options are not known"]
    own, theirs = ({k: v for k, v in a.options.items() if not _of_method(k)} for a in (arm, other))
    keys = sorted(key for key in own.keys() | theirs.keys() if own.get(key) != theirs.get(key))
    other_class = {key.split(".")[0] for key in keys if key.endswith("._target_")}
    names = [f"{name} {arm.chosen(name) or None} ({other.chosen(name) or None})" for name in sorted(other_class)]
    return names + [f"{k} {own.get(k)} ({theirs.get(k)})" for k in keys if k.split(".")[0] not in other_class]


def in_order(sizes: Iterable[int | str]) -> list[int | str]:
    """Sort batch sizes in ascending order; those that differ between workers come last."""
    return sorted(sizes, key=lambda size: (isinstance(size, str), size))


def _of_method(key: str) -> bool:
    return key.split(".")[0] in METHOD or key.startswith(HOOK)


PROGRAM = ("python", "-m", "accordion_bench")


def own_commands(runs: Sequence[Run]) -> list[str]:
    """Return the commands of some runs, without paths, which do not change the result.

    Commands that differ only in the seed are merged. A user's own loop is named in a comment.
    """
    own = list(dict.fromkeys(f"# {run.name}: a training loop of its own" for run in runs if run.attached))
    alike: dict[tuple[Any, ...], list[list[str]]] = {}
    for words in [_typed(run) for run in runs if not run.attached]:
        others = [word for word in words if _key(word) != "seed"]
        alike.setdefault((len(words) > len(others), *others), []).append(words)
    return own + [_merged(others, commands) for (_, *others), commands in alike.items()]


def _merged(others: Sequence[str], commands: Sequence[list[str]]) -> str:
    """Merge commands that have `others` in common and differ only in their seed."""
    if all(words == commands[0] for words in commands):
        return shlex.join([*PROGRAM, *commands[0]])
    seeds = [word.partition("=")[2] for words in commands for word in words if _key(word) == "seed"]
    return shlex.join([*PROGRAM, *_sweep(others), *others, f"seed={','.join(dict.fromkeys(seeds))}"])


def _sweep(words: Sequence[str]) -> list[str]:
    return [] if {"-m", "--multirun"} & set(words) else ["-m"]


def dense_command(arm: Arm) -> str:
    """Return the command of an arm's runs, made dense; for an arm of an experiment, that of its dense arm.

    For a user's own loop a description is returned.
    """
    if arm.attached:
        return 'the same loop with attach(..., compressor="none"), its rows in a file of their own'
    replaced = ("compressor", "adaptive", "sync", "seed", "resume", "arm", "label", "-m", "--multirun")
    typed = _typed(arm.runs[0])
    kept = [word for word in typed if _key(word).split(".")[0] not in replaced and not _key(word).startswith(HOOK)]
    sweep = ["-m"] if arm.n > 1 or not _sweep(typed) else []
    seeds = f"seed={','.join(map(str, arm.seeds))}"
    dense = ["compressor=none", "adaptive=none", *kept]
    if any(_key(word) == "experiment" for word in typed):
        dense = [*kept, "+arm=dense"]  # after the experiment, which would override it
        config, own = arm.config, {_key(word) for word in kept}
        if arm.workers == 1:  # a control, for which the experiment's dense arm has other sizes
            sizes = {"workers": 1, "batch_size": checks.show(config["batch_size"]), "epochs": config["epochs"]}
            dense += [f"{key}={value}" for key, value in sizes.items() if key not in own]
    return shlex.join([*PROGRAM, *sweep, *dense, seeds])


def _typed(run: Run) -> list[str]:
    """Return the arguments after the program's name, without paths."""
    typed = run.environment.get("command", "")
    try:
        words = shlex.split(typed)
    except ValueError:  # an unclosed quotation mark
        words = typed.split()
    names = ("accordion_bench", "accordion-bench", "__main__.py")
    start = next((i + 1 for i, word in enumerate(words) if word.endswith(names)), len(words))
    return [word for word in words[start:] if not _key(word).startswith("paths.")]


def _key(word: str) -> str:
    return word.lstrip("+~").split("=")[0] if "=" in word else word
