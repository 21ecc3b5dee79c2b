"""What sets some arms of a setting apart: other loops, bytes that nobody counted, stalls, nothing learned."""

from collections import Counter
from collections.abc import Sequence

from accordion_bench.comm.stages import MATTERS
from accordion_bench.methods.labels import hook_of
from accordion_bench.options.units import counted, digits, human_bytes
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.show import listed
from accordion_bench.runs.metrics import LOSSES, METRICS


def remarks(arms: Sequence[Arm]) -> list[str]:
    """All of them, none where all arms are alike."""
    return [*uncounted(arms), *went_dense(arms), *outliers(arms), *attached(arms), *not_learned(arms)]


def labels(arms: Sequence[Arm]) -> list[str]:
    """What the names stand for that users have given arms, and which arms have several, so that none counts."""
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
    """Which arms are hooks of somebody else's, whose bytes nobody has counted, and what stands in their place."""
    told = []
    for arm in [arm for arm in arms if hook_of(arm.config)]:
        measured = "no interface measured"
        if arm.values("link_sent_bytes"):
            measured = f"{human_bytes(arm.mean('link_sent_bytes'))} by its interface"
        told.append(f"{arm.label} ({measured})")
    if not told:
        return []
    return [f"Not counted: {listed(told)}. Nobody but a hook of somebody else's knows what it sends."]


def outliers(arms: Sequence[Arm]) -> list[str]:
    """Which measured times hold stalls of the machine that matter: a hundredth of the training time or more."""
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
    """Which arms were to compress and sent what they had dense, why, and what would have helped.

    A policy changes what travels dense from one decision to the next: of each arm what held in most of its steps.
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
    """Sentence -> steps, over all runs; a count that is none is 0."""
    counts: Counter[str] = Counter()
    for note in (run.summary.get("went_dense") for run in arm.runs):
        for sentence, steps in note.items() if isinstance(note, dict) else ():
            counts[sentence] += steps if isinstance(steps, int) else 0
    return counts


def attached(arms: Sequence[Arm]) -> list[str]:
    """Which arms are loops of somebody's own, and what nobody but they can know."""
    own = [arm for arm in arms if arm.attached]
    if not own:
        return []
    text = (
        "Attached: training loops of somebody's own, which have written their rows by comm.metrics(). Model, data, "
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
    """Arms of which a run has learned nothing, with what that run has said."""
    lines = []
    for arm in arms:
        told = [said for run in arm.runs if isinstance(said := run.summary.get("not_learned"), str)]
        if told:
            lines.append(f"{arm.label}: in {len(told)} of {counted(arm.n, 'run')} {told[0]}.")
    return lines
