"""Captions of tables and figures: headings, explanations of the numbers, remarks on special arms, and provenance."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from accordion_bench.comm.stages import MATTERS
from accordion_bench.methods.labels import hook_of
from accordion_bench.network.links import show_link
from accordion_bench.options.units import counted, digits, human_bytes
from accordion_bench.processes.waiting import BUSY
from accordion_bench.report.compare.arms import Arm, baseline
from accordion_bench.report.compare.columns import best_column, paper_reference, tidy
from accordion_bench.report.compare.intervals import listed, show_seeds
from accordion_bench.report.compare.times import machine, shares_process, waited
from accordion_bench.report.read import Run
from accordion_bench.runs.metrics import LOSSES, METRICS, metric, split_of


def remarks(arms: Sequence[Arm]) -> list[str]:
    """Return all remarks; none if no arm is special."""
    return [*uncounted(arms), *went_dense(arms), *outliers(arms), *attached(arms), *not_learned(arms)]


def labels(arms: Sequence[Arm]) -> list[str]:
    """Explain the names that users have given to arms, and name arms with several labels, which are ignored."""
    told = [f"{arm.label} is {arm.method}" for arm in arms if arm.called and arm.method not in arm.label]
    lines = [f"Named by label=: {listed(told)}."] if told else []
    for arm in arms:
        names = sorted({run.called for run in arm.runs} - {""})
        if len(names) > 1:
            lines.append(
                f"{arm.label}: its seeds have {len(names)} labels ({listed(names)}), so that its options name it; type "
                "its command with resume_sweep=true and one label for all."
            )
    return lines


def uncounted(arms: Sequence[Arm]) -> list[str]:
    """Name arms with third-party hooks, whose bytes are not counted, and the bytes measured instead."""
    told = []
    for arm in [arm for arm in arms if hook_of(arm.config)]:
        measured = "no interface measured"
        if arm.values("link_sent_bytes"):
            measured = f"{human_bytes(arm.mean('link_sent_bytes'))} by its interface"
        told.append(f"{arm.label} ({measured})")
    if not told:
        return []
    return [f"Not counted: {listed(told)}. What a third-party hook sends is known to the hook alone."]


def outliers(arms: Sequence[Arm]) -> list[str]:
    """Name arms whose measured times include significant stalls: at least a hundredth of the training time."""
    found = []
    for arm in arms:
        seconds, steps = (sum(arm.values(name)) for name in ("outlier_seconds", "outlier_seconds_count"))
        if seconds >= MATTERS * sum(arm.values("seconds")) > 0:
            found.append(f"{arm.label} {counted(int(steps), 'step')}, {digits(seconds)} s")
    if not found:
        return []
    return [
        "Outliers: steps that took 3 times as long as usual or longer, and what they took more, over all seeds: "
        f"{listed(found)}. Measured time has them, modelled time does not."
    ]


def went_dense(arms: Sequence[Arm]) -> list[str]:
    """Name arms that were to compress but sent their tensors dense, with the reason and a remedy.

    A policy can change what is sent dense from one decision to the next; for each arm, what held in most steps is
    reported.
    """
    found: dict[str, list[str]] = {}
    for arm in arms:
        if counts := _steps_dense(arm):
            (sentence, most), *rest = counts.most_common()
            others = sum(steps for _, steps in rest)
            when = f" ({most:,} of its steps; {others:,} with other tensors)" if others else ""
            found.setdefault(sentence, []).append(arm.label + when)
    return [f"{listed(labels)}: {sentence}." for sentence, labels in found.items()]


def _steps_dense(arm: Arm) -> Counter[str]:
    """Count steps by sentence, over all runs; an invalid count is 0."""
    counts: Counter[str] = Counter()
    for note in (run.summary.get("went_dense") for run in arm.runs):
        for sentence, steps in note.items() if isinstance(note, dict) else ():
            counts[sentence] += steps if isinstance(steps, int) else 0
    return counts


def attached(arms: Sequence[Arm]) -> list[str]:
    """Name arms that are users' own loops, and state what is not known about them."""
    own = [arm for arm in arms if arm.attached]
    if not own:
        return []
    text = (
        "Attached: users' own training loops, which have written their rows by comm.metrics(). Model, data, "
        f"{own[0].metric.replace('_', ' ')} and epochs are what they say. Not known here: their other options, what "
        "was typed, and whether they have come to their end."
    )
    if any(arm.values("modelled_seconds") for arm in own):
        text += " Their modelled time starts from their own computation, which is brought to no common speed."
    if own[0].metric in LOSSES:
        text += f" Their rows have none of {', '.join(METRICS)}: they are judged by {own[0].metric.replace('_', ' ')}."
    if any(arm.config["dataset"]["name"] is None for arm in own):
        text += " They do not name their data set (comm.metrics(dataset=...)): it may differ from arm to arm."
    if any(arm.batch is None for arm in own):
        text += " They do not tell their samples per step (comm.metrics(batch_size=...)): these may differ, too."
    return [text]


def not_learned(arms: Sequence[Arm]) -> list[str]:
    """Name arms with runs that have learned nothing, with those runs' own warning."""
    lines = []
    for arm in arms:
        told = [said for run in arm.runs if isinstance(said := run.summary.get("not_learned"), str)]
        if told:
            lines.append(f"{arm.label}: in {len(told)} of {counted(arm.n, 'run')} {told[0]}.")
    return lines


SPEED_TOLD = 0.05  # relative deviation from the common speed from which runs are named


def heading(arm: Arm) -> str:
    """Return `resnet8 on digits, 4 workers x 32 samples, 60 epochs`, with a subset of the data and a reduced scale."""
    config, sizes = arm.config, arm.batches or (arm.batch_each,)
    each = "" if None in sizes else f" x {' or '.join(map(str, sizes))} samples"
    workers = f"{counted(arm.workers, 'worker')}{each}"
    return f"{arm.task}, {workers}, {counted(config['epochs'], 'epoch')}{heading_end(arm)}"


def heading_end(arm: Arm) -> str:
    """Return the end of a heading: part of the data, distinction from other settings, and scale of shortened runs."""
    subset, validation = arm.options.get("dataset.subset"), arm.options.get("dataset.validation")
    told = f", {subset:,} training {metric(arm.metric).counted}" if isinstance(subset, int) else ""
    told += f", {validation:,} of the training samples held out" if validation else ""
    told += f", {arm.apart}" if arm.apart else ""
    return told + ("" if arm.scale == "full" else f" (scale={arm.scale}: not the full experiment)")


def headings(parts: Sequence[Sequence[Arm]]) -> list[str]:
    """Return the heading of each setting, numbered if two are equal."""
    found = [heading(arms[0]) for arms in parts]
    before = [found[:i].count(name) for i, name in enumerate(found)]
    return [f"{name} ({count + 1})" if count else name for name, count in zip(found, before, strict=True)]


def captions(arms: Sequence[Arm], paper: bool = False) -> list[str]:
    """Return the explanations of the numbers of one setting; with `paper`, for the table with the columns of papers."""
    lines = [evaluated(arms, paper), sent(arms, paper), time(arms, paper), *remarks(arms)]
    lines += [] if paper else labels(arms)
    lines += [*modelled(arms), *paper_count(arms), *scaled_down(arms)]
    if experiments := sorted({arm.chosen("experiment") for arm in arms} - {""}):
        lines.append(f"Experiment: {'; '.join(experiments)}.")
    return lines


def evaluated(arms: Sequence[Arm], paper: bool = False) -> str:
    """Explain the metric's values and intervals."""
    judged = metric(arms[0].metric)
    several = max(arm.n for arm in arms) > 1
    interval = "mean ± Student's 95 % t-interval over n seeds" if several else "one seed per arm, so no intervals"
    best = "" if paper else f"; {_best(arms)}"
    text = f"{judged.words.capitalize()}: after the last epoch, {interval}{best}."
    text += "" if judged.higher_is_better else " Lower is better."
    text += " 2 to the power of it is the perplexity per byte." if judged.name == "bits_per_byte" else ""
    images = arms[0].runs[0].summary.get("test_size")
    if judged.name == "accuracy" and images:
        text += f" One of the {images:,} test images is {100 / images:.2g} points."
    if several and any(arm.dense for arm in arms):
        text += (
            " Difference to dense: 95 % t-interval of the seed-by-seed differences where both arms have the same seeds,"
            ' else Welch\'s; "no difference shown": it holds 0.'
        )
    return text


def _best(arms: Sequence[Arm]) -> str:
    """Explain the best value: its split, and the split by which it was chosen."""
    _, heading = best_column(tidy(arms))
    split = split_of(arms[0].selected_by)
    if heading != "best" or arms[0].attached:
        return f"{heading}: of all epochs"
    return f"best: the test split in the epoch that was best by the {split} split"


def sent(arms: Sequence[Arm], paper: bool = False) -> str:
    """Explain payload and wire bytes, and their baseline."""
    wire = "" if paper else "; sent per worker: what its own link sends, the bytes on the wire"
    text = f"Payload: what one worker hands to the collectives{wire}"
    dense = list(dict.fromkeys(base.label for arm in arms if (base := baseline(arm, arms))))
    if not dense:
        return f"{text}; without a dense run there are no ratios."
    measured = "dense run" if dense == ["dense"] else f"run of {' or '.join(dense)}"
    return f"{text}; {'' if paper else 'both '}against the measured {measured}."


def without_bytes(arms: Sequence[Arm]) -> str:
    """Return the end of a footnote that names arms without counted bytes, and hence without bytes or modelled times."""
    labels = [arm.label for arm in arms if not arm.counted]
    return f" Not counted, so not shown: {listed(labels)}." if labels else ""


def time(arms: Sequence[Arm], paper: bool = False) -> str:
    """Explain what the measured times include, and which of them are not comparable."""
    exchange = "" if paper else "; exchange: the part that is codec and communication"
    text = f"Time: training, without evaluation and warm-up{exchange}."
    if shared := [arm.label for arm in arms if shares_process(arm)]:
        whose = "The" if len(shared) == len(arms) else f"{listed(shared)}: the"
        text += f" {whose} workers share a process: no communication time was measured; time is compute and codec only."
    if max(arm.n for arm in arms) == 1:
        text += " One run per arm: other work on the machine is in its time."
    machines = sorted({machine(run) for arm in arms for run in arm.runs})
    if len(machines) > 1:
        text += f" The runs come from different machines ({'; '.join(machines)}); only times of one machine compare."
    return " ".join([text, *unequal(arms)])


def unequal(arms: Sequence[Arm]) -> list[str]:
    """Return sentences about unequal conditions of the arms' time measurements: threads, and other load."""
    return [*_unequal_threads(arms), *(_waited(arms) or _unequal_load(arms))]


def _waited(arms: Sequence[Arm]) -> list[str]:
    """Report processes that waited for cores, on a busy machine or because they were too many for it."""
    shares = {arm.label: max((waited(run) or 0.0 for run in arm.runs), default=0.0) for arm in arms}
    busy = [f"{label} {share:.0%}" for label, share in shares.items() if share >= BUSY]
    if not busy:
        return []
    return [
        f"The machine was busy: processes waited for a core for part of their time ({listed(busy)}), so times are too "
        "long."
    ]


def _unequal_threads(arms: Sequence[Arm]) -> list[str]:
    said = {
        arm.label: sorted({str(seen.get("threads") or "unknown") for run in arm.runs for seen in run.environments})
        for arm in arms
    }
    if len(set(map(tuple, said.values()))) == 1:
        return []
    if len({count for counts in said.values() for count in counts} - {"unknown"}) == 1:
        unknown = listed([label for label, counts in said.items() if "unknown" in counts])
        return [f"With how many threads per process {unknown} computed is not known: the times may differ by that."]
    each = listed([f"{label} {' and '.join(counts)}" for label, counts in said.items()])
    return [f"The arms differ in threads per process ({each}): so do their times."]


def _unequal_load(arms: Sequence[Arm]) -> list[str]:
    """Report mean loads at the start of the runs that differ by at least half a process per core between arms."""
    known = {arm.label: [run.environment.get("load", math.nan) for run in arm.runs] for arm in arms}
    means = {label: mean for label, loads in known.items() if not math.isnan(mean := statistics.fmean(loads))}
    cores = min((run.environment.get("cpu_cores") or 1 for arm in arms for run in arm.runs), default=1)
    if len(means) < 2 or max(means.values()) - min(means.values()) < cores / 2:
        return []
    least, most = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    return [
        f"Other work ran beside some arms (mean load at the start from {means[least]:.1f}, {least}, to "
        f"{means[most]:.1f}, {most}, on {cores} cores): their times are too long."
    ]


def modelled(arms: Sequence[Arm]) -> list[str]:
    """Explain the modelled columns, if there are any."""
    with_model = [arm for arm in arms if arm.values("modelled_seconds")]
    links = sorted({show_link(arm.config["network"]) for arm in with_model})
    if not links:
        return []
    return [
        f"Modelled, not measured: one worker on its own machine with a link of {'; '.join(links)}. Its time is the "
        "measured computation of one worker plus modelled communication, 8 x wire bytes / bandwidth + rounds x "
        f"latency, those of decisions included, {hidden(with_model)}.{speeds(with_model)}"
    ]


def speeds(arms: Sequence[Arm]) -> str:
    """Explain how computation was brought to a common speed, and for which arms it was not."""
    slowness = {arm.label: arm.mean("modelled_slowness") for arm in arms if arm.values("modelled_slowness")}
    if not slowness:
        return ""
    far = [f"{label} {1 / factor:.2f}x" for label, factor in slowness.items() if abs(factor - 1) >= SPEED_TOLD]
    told = f" (what multiplied times: {listed(far)})" if far else ""
    older = [arm.label for arm in arms if arm.label not in slowness]
    but = (
        f" Not so {listed(older)}: run by an older version, whose times are means with the machine's noise."
        if older
        else ""
    )
    return (
        " Computation is steps x their median; runs that compute the same, in one process or without overlap, are "
        f"brought to one speed{told}.{but}"
    )


def hidden(arms: Sequence[Arm]) -> str:
    """Describe the modelled communication that is excluded: `as far as the backward pass does not hide it`."""
    older = [arm.label for arm in arms if not arm.values("modelled_exposed_seconds")]
    if len(older) == len(arms):
        return "without overlap"
    but = f" (without overlap for {listed(older)})" if older else ""
    return f"as far as the backward pass does not hide it{but}"


def paper_count(arms: Sequence[Arm]) -> list[str]:
    """Explain the paper's count, if all arms have it."""
    if not all(arm.values("paper_floats") for arm in arms):
        return []
    reference = paper_reference(tidy(arms))
    against = ""
    if reference:
        against = (
            f"; its ratios, as in the paper's tables, are against {reference}, MORE: it counts more floats than that"
        )
    return [f"Paper's count: floats as the paper counts them, no bytes on any link{against}."]


def scaled_down(arms: Sequence[Arm]) -> list[str]:
    """State that a shortened experiment's numbers are not comparable with a paper's."""
    scale = arms[0].scale
    if scale == "full":
        return []
    return [f"Scale {scale}: fewer epochs and less data than the experiment's; no number here compares with a paper's."]


def facts(runs: Sequence[Run]) -> dict[str, str]:
    """Return the number of runs, their seeds, commit, hardware and versions, by name."""

    def said(key: str) -> str:
        return ", ".join(dict.fromkeys(str(environment.get(key) or "unknown") for environment in environments))

    environments = [environment for run in runs for environment in run.environments]
    versions: dict[str, Any] = {}
    for environment in environments:
        versions |= {f"{name} {version}": None for name, version in (environment.get("versions") or {}).items()}
    said_by_users = {
        "tags": ", ".join(dict.fromkeys(tag for run in runs for tag in run.config.get("tags") or [])),
        "notes": "; ".join(f"{run.name}: {note}" for run in runs if (note := run.config.get("note"))),
    }
    return {
        "runs": f"{len(runs)}; seeds: {show_seeds([run.seed for run in runs])}",
        **{key: text for key, text in said_by_users.items() if text},
        "commit": said("commit"),
        "hardware": "; ".join(dict.fromkeys(machine(run) for run in runs)),
        "versions": ", ".join([f"Python {said('python')}", *versions]),
    }
