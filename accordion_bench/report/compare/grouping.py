"""Grouping of runs into arms, and of arms into settings within which they may be compared."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from accordion_bench.network.links import CUSTOM
from accordion_bench.report.compare.arms import Arm, fingerprint, in_order
from accordion_bench.report.compare.intervals import listed
from accordion_bench.report.compare.times import at_common_speed
from accordion_bench.report.read import Run
from accordion_bench.runs.untrusted import printable

LONGEST = 500  # characters of a label with all distinguishing options
# options that must be equal for two arms to be compared; batch sizes may differ within one experiment
SETTING = ("model", "dataset", "workers", "epochs", "scale")
# options with which a data set's name alone does not determine the training and evaluation data
PART_OF_DATA = ("dataset.subset", "dataset.validation", "dataset.limit_eval")


def group(runs: Sequence[Run]) -> tuple[list[Arm], list[Run]]:
    """Group finished runs into arms, in the order of their first run; also return runs that repeat a seed of their arm.

    Of several runs with one seed only the newest counts: repeats are not independent and would make intervals too
    narrow. Modelled times are rescaled to a common speed over all runs.
    """
    arms: dict[str, dict[Any, Run]] = {}
    repeats = []
    for run in at_common_speed([run for run in runs if run.finished]):
        same = [run.summary.get("metric_name"), fingerprint(run)]
        seeds = arms.setdefault(_text(same), {})
        newest, *older = sorted(filter(None, [run, seeds.get(run.seed)]), key=_started, reverse=True)
        seeds[run.seed] = newest
        repeats += older
    grouped = [tuple(sorted(seeds.values(), key=lambda run: run.seed or 0)) for seeds in arms.values()]
    named = [Arm("", members) for members in grouped]
    placed = _placed([replace(arm, label=arm.called or arm.method) for arm in named])
    return _told_apart(_with_methods(_with_settings_told_apart(placed))), repeats


def _text(options: Any) -> str:
    """Return a text that is the same for equal options; 1 and 1.0 are equal."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        if isinstance(value, list):
            return [plain(one) for one in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(plain(options), sort_keys=True)


def _started(run: Run) -> tuple[str, str]:
    return run.environment.get("started", ""), run.path.name


def settings(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Group arms that may be compared: same metric, model, data, workers, epochs, scale and (see `_placed`) batch."""
    found: dict[str, list[Arm]] = {}
    for arm in arms:
        found.setdefault(arm.setting, []).append(arm)
    return [_beside(members) for members in found.values()]


def _beside(arms: Sequence[Arm]) -> list[Arm]:
    """Sort arms: dense first, then by bytes sent per worker, descending; uncounted ones last.

    Each one-worker control follows the arm from which it differs in the fewest options.
    """
    ordered = sorted((arm for arm in arms if not arm.control), key=_place)
    for control in reversed([arm for arm in arms if arm.control]):
        others = [other for other in ordered if not other.control]
        nearest = min(others, key=lambda other: len(_unequal(control, other)), default=control)
        ordered.insert(ordered.index(nearest) + 1 if others else 0, control)
    return ordered


def _place(arm: Arm) -> tuple[bool, float, bool]:
    """Return the sort key. Of arms with equal bytes, those of the bench come first, then the older ones."""
    sent = arm.mean("wire_bytes")
    return not arm.dense, math.inf if math.isnan(sent) else -sent, arm.attached


def _unequal(arm: Arm, other: Arm) -> list[str]:
    return [key for key in arm.options.keys() | other.options.keys() if arm.options.get(key) != other.options.get(key)]


def _placed(arms: Sequence[Arm]) -> list[Arm]:
    """Assign each arm its setting: arms of one batch size, or of one experiment; labels then include the batch.

    A control joins the setting of the arms that it belongs to, a user's own loop that of the bench's runs that train
    the same. The user's own labels are unchanged.
    """
    joint: list[set[tuple[str, str]]] = []  # keys of each setting
    keys = [setting_keys(arm) for arm in arms]
    for own in keys:
        common = [other for other in joint if other & own]
        joint = [other for other in joint if not other & own] + [own.union(*common)]
    numbers = [next(i for i, other in enumerate(joint) if other & own) for own in keys]
    beside = [_beside_bench(arm, arms, numbers) if arm.attached else None for arm in arms]
    numbers = [own if other is None else other for own, other in zip(numbers, beside, strict=True)]
    controlled = [_controlled(arm, arms, numbers) for arm in arms]
    placed = []
    for arm, own_number, of_controlled in zip(arms, numbers, controlled, strict=True):
        control = of_controlled is not None
        number = own_number if of_controlled is None else of_controlled
        together = [other for i, other in enumerate(arms) if numbers[i] == number and controlled[i] is None]
        batches = in_order({size for other in together if (size := other.batch_each)})
        label = f"{arm.label}, 1 worker" if control and "1 worker" not in arm.label else arm.label
        label = f"{label}, {arm.batch_text}" if len(batches) > 1 else label
        label = arm.called or label
        setting = json.dumps(sorted(joint[number]))
        placed.append(replace(arm, label=label, setting=setting, batches=tuple(batches), control=control))
    return placed


def _beside_bench(arm: Arm, arms: Sequence[Arm], numbers: Sequence[int]) -> int | None:
    """Return the setting of the bench's runs that train the same as a user's loop; None if that is not exactly one."""
    pairs = zip(arms, numbers, strict=True)
    found = {number for other, number in pairs if not other.attached and _trains_as(arm, other)}
    return found.pop() if len(found) == 1 else None


def _trains_as(arm: Arm, bench: Arm) -> bool:
    """Whether a loop reports the same model, data set, workers, batch size and epochs as the bench's runs have.

    A model is the same if its name in the bench agrees, or its class and number of parameters.
    """
    own, theirs = arm.config, bench.config
    if arm.metric != bench.metric or arm.workers != bench.workers or own["epochs"] != theirs["epochs"]:
        return False
    if own["batch_size"] is None or own["batch_size"] != theirs["batch_size"]:
        return False
    if own["dataset"]["name"] != bench.chosen("dataset") or bench.scale != "full":
        return False
    if any(bench.options.get(key) for key in PART_OF_DATA):
        return False
    name, sizes = own["model"]["name"], {own["model"]["parameters"], bench.runs[0].summary.get("parameters")}
    if name == bench.chosen("model"):
        return len(sizes - {None}) < 2
    spelled = str((theirs.get("model") or {}).get("_target_")).rpartition(".")[2]
    return name == spelled and len(sizes) == 1 and None not in sizes


def _controlled(arm: Arm, arms: Sequence[Arm], numbers: Sequence[int]) -> int | None:
    """Return the setting of the arms that a one-worker arm controls: the other arms of its experiment, in one setting.

    None if it is no control: in a sweep over numbers of workers, arms with more workers have its name, too.
    """
    name, experiment = arm.chosen("arm"), arm.chosen("experiment")
    if arm.workers > 1 or not name or not experiment:
        return None
    many = [
        (other, number)
        for other, number in zip(arms, numbers, strict=True)
        if other.workers > 1 and other.chosen("experiment") == experiment and _task(other) == _task(arm)
    ]
    found = {number for _, number in many}
    return found.pop() if len(found) == 1 and name not in {other.chosen("arm") for other, _ in many} else None


def _task(arm: Arm) -> list[Any]:
    return [arm.metric, *(fingerprint(arm.runs[0]).get(key) for key in SETTING if key not in ("workers", "epochs"))]


def setting_keys(arm: Arm) -> set[tuple[str, str]]:
    """Return the keys of an arm's setting; arms that share a key are in one setting.

    The batch size is a key, and so is each experiment of the arm.
    """
    same = _text([arm.metric, *(fingerprint(arm.runs[0]).get(key) for key in SETTING)])
    experiments = {(run.config.get("choices") or {}).get("experiment") for run in arm.runs}
    return {(same, f"batch_size {arm.config.get('batch_size')}"), *((same, str(name)) for name in experiments if name)}


def _with_settings_told_apart(arms: Sequence[Arm]) -> list[Arm]:
    """Set `apart` of arms whose settings have the same heading to the model and data options in which they differ."""
    firsts: dict[str, Arm] = {}
    for arm in arms:
        if not arm.control:
            firsts.setdefault(arm.setting, arm)
    alike: dict[tuple[Any, ...], list[Arm]] = {}
    for first in firsts.values():
        shown = [first.options.get(key) for key in ("dataset.subset", "dataset.validation")]
        task = (first.named("model"), first.named("dataset"), first.config.get("epochs"), first.workers, first.scale)
        alike.setdefault((*task, first.batches, str(shown)), []).append(first)
    apart = {first.setting: _apart(first, twins) for twins in alike.values() if len(twins) > 1 for first in twins}
    return [replace(arm, apart=apart.get(arm.setting, "")) for arm in arms]


def _apart(arm: Arm, twins: Sequence[Arm]) -> str:
    """Return `dataset.augment=False`, `perplexity`; for a user's own loop, whose options are unknown, `attached`."""
    if arm.attached:
        return "attached"
    twins = [twin for twin in twins if not twin.attached]
    keys = {key for twin in twins for key in _unequal(arm, twin) if key.startswith(("model.", "dataset."))}
    told = [f"{key}={arm.options.get(key)}" for key in sorted(keys)]
    told += [arm.metric.replace("_", " ")] if len({twin.metric for twin in twins}) > 1 else []
    return printable(listed(told, 3)) if told else ""


def _with_methods(arms: Sequence[Arm]) -> list[Arm]:
    """Relabel arms of one setting that share a label but not the method to `label (method)`: they are never merged."""
    result = []
    for arm in arms:
        several = arm.called and len({twin.method for twin in _twins(arm, arms)}) > 1
        result.append(replace(arm, label=f"{arm.label} ({arm.method})") if several else arm)
    return result


def _twins(arm: Arm, arms: Sequence[Arm]) -> list[Arm]:
    """Return the arms of one setting with one label, including the arm itself."""
    return [other for other in arms if (other.label, other.setting) == (arm.label, arm.setting)]


def _told_apart(arms: list[Arm]) -> list[Arm]:
    """Extend labels that arms of one setting share by their names in the experiment, or by the options that differ."""
    result = []
    for arm in arms:
        twins = _twins(arm, arms)
        if len(twins) == 1:
            result.append(arm)
            continue
        names = [twin.chosen("arm") for twin in twins]
        told = arm.chosen("arm") if all(names) and len(set(names)) == len(names) else _differing(arm, twins)
        said = [arm.label] if told == arm.label else [arm.label, told]
        result.append(replace(arm, label=printable(", ".join(filter(None, said)), LONGEST)))
    return result


def _short(value: Any) -> str:
    """Format an option for a label: spans of epochs such as [[0, 3], [5, 6]] as `0-3,5-6`.

    An open end and a level, [[0, 3, 4], [3, null, 1]], are shown as `0-3:4,3-:1`.
    """
    if isinstance(value, list) and value and all(isinstance(span, list) and len(span) > 1 for span in value):
        return ",".join(":".join([_span(*span[:2]), *map(str, span[2:])]) for span in value)
    return str(value)


def _span(first: Any, end: Any) -> str:
    return f"{first}-{'' if end is None else end}"


def _differing(arm: Arm, twins: Iterable[Arm]) -> str:
    """Return the options in which an arm differs from most of its twins: `lr=0.1, error_feedback=True`.

    For a group with another class its name is returned, `optimizer=lion`, without options shared by all twins of that
    class.
    """
    own = arm.options
    leaves = [twin.options for twin in twins]
    keys = sorted({key for leaf in leaves for key in leaf.keys() | own.keys() if leaf.get(key) != own.get(key)})
    usual = {key: [leaf.get(key) for leaf in leaves].count(own.get(key)) > len(leaves) / 2 for key in keys}
    keys = [key for key in keys if not usual[key] and not _follows_from_class(key, own, leaves)]
    short = [key.rpartition(".")[2] for key in keys]
    names = short if len(set(short)) == len(short) else keys
    by_name = arm.named("network") == arm.chosen("network") != CUSTOM  # otherwise its options describe it
    network = [f"modelled on {arm.chosen('network')}"] if any(key.startswith("network.") for key in keys) else []
    told = [
        _said(arm, name, key)
        for name, key in zip(names, keys, strict=True)
        if not (network and by_name and key.startswith("network."))
    ]
    return ", ".join([*(network if by_name else []), *told])


def _follows_from_class(key: str, own: dict[str, Any], leaves: Sequence[dict[str, Any]]) -> bool:
    """Whether twins differ in a group's class, and all twins with this arm's class share the option."""
    target = f"{key.partition('.')[0]}._target_"
    alike = [leaf for leaf in leaves if leaf.get(target) == own.get(target)]
    return key != target and len(alike) < len(leaves) and all(leaf.get(key) == own.get(key) for leaf in alike)


def _said(arm: Arm, name: str, key: str) -> str:
    value, group = arm.options.get(key), key.partition(".")[0]
    if key == "link" and value:
        return str(value)
    if key == f"{group}._target_" and arm.chosen(group):
        return f"{group}={arm.chosen(group)}"
    return f"{name}={_short(value)}"
