"""What is said about a table: its heading, what its numbers are, and what sets some arms apart."""

from collections import Counter
from collections.abc import Sequence

from accordion_bench.comm.stages import MATTERS
from accordion_bench.methods.labels import hook_of
from accordion_bench.network.links import show_link
from accordion_bench.options.units import counted, digits, human_bytes
from accordion_bench.report.compare.arms import Arm, baseline
from accordion_bench.report.compare.columns import best_column, paper_reference, tidy
from accordion_bench.report.compare.provenance import machine, unequal
from accordion_bench.report.compare.show import listed
from accordion_bench.report.compare.times import shares_process
from accordion_bench.runs.metrics import LOSSES, METRICS, metric, split_of


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
    """Which arms are third-party hooks, whose bytes are not counted, and what stands in their place."""
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
    """Which arms are users' own loops, and what only they can know."""
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
    """Arms of which a run has learned nothing, with what that run has said."""
    lines = []
    for arm in arms:
        told = [said for run in arm.runs if isinstance(said := run.summary.get("not_learned"), str)]
        if told:
            lines.append(f"{arm.label}: in {len(told)} of {counted(arm.n, 'run')} {told[0]}.")
    return lines


SPEED_TOLD = 0.05  # how far from the common speed runs are named


def heading(arm: Arm) -> str:
    """`resnet8 on digits, 4 workers x 32 samples, 60 epochs`; a subset of the data and a scale below full are named."""
    config, sizes = arm.config, arm.batches or (arm.batch_each,)
    each = "" if None in sizes else f" x {' or '.join(map(str, sizes))} samples"
    workers = f"{counted(arm.workers, 'worker')}{each}"
    return f"{arm.task}, {workers}, {counted(config['epochs'], 'epoch')}{heading_end(arm)}"


def heading_end(arm: Arm) -> str:
    """The end of a heading: the part of the data, what tells the setting from others, and the scale of small runs."""
    subset, validation = arm.options.get("dataset.subset"), arm.options.get("dataset.validation")
    told = f", {subset:,} training {metric(arm.metric).counted}" if isinstance(subset, int) else ""
    told += f", {validation:,} of the training samples held out" if validation else ""
    told += f", {arm.apart}" if arm.apart else ""
    return told + ("" if arm.scale == "full" else f" (scale={arm.scale}: not the full experiment)")


def headings(parts: Sequence[Sequence[Arm]]) -> list[str]:
    """Of each setting, numbered where nothing tells two apart."""
    found = [heading(arms[0]) for arms in parts]
    before = [found[:i].count(name) for i, name in enumerate(found)]
    return [f"{name} ({count + 1})" if count else name for name, count in zip(found, before, strict=True)]


def captions(arms: Sequence[Arm], paper: bool = False) -> list[str]:
    """What a reader must know about the numbers of one setting.

    Args:
        arms: of the setting.
        paper: of the table that holds only what papers show.
    """
    lines = [evaluated(arms, paper), sent(arms, paper), time(arms, paper), *remarks(arms)]
    lines += [] if paper else labels(arms)
    lines += [*modelled(arms), *paper_count(arms), *scaled_down(arms)]
    if experiments := sorted({arm.chosen("experiment") for arm in arms} - {""}):
        lines.append(f"Experiment: {'; '.join(experiments)}.")
    return lines


def evaluated(arms: Sequence[Arm], paper: bool = False) -> str:
    """What the metric's numbers and intervals are."""
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
    """Which value is the best one: of which split, and chosen by which."""
    _, heading = best_column(tidy(arms))
    split = split_of(arms[0].selected_by)
    if heading != "best" or arms[0].attached:
        return f"{heading}: of all epochs"
    return f"best: the test split in the epoch that was best by the {split} split"


def sent(arms: Sequence[Arm], paper: bool = False) -> str:
    """What payload and wire are, and what they are compared with."""
    wire = "" if paper else "; sent per worker: what its own link sends, the bytes on the wire"
    text = f"Payload: what one worker hands to the collectives{wire}"
    dense = list(dict.fromkeys(base.label for arm in arms if (base := baseline(arm, arms))))
    if not dense:
        return f"{text}; without a dense run there are no ratios."
    measured = "dense run" if dense == ["dense"] else f"run of {' or '.join(dense)}"
    return f"{text}; {'' if paper else 'both '}against the measured {measured}."


def without_bytes(arms: Sequence[Arm]) -> str:
    """The end of a footnote: which arms have no place on an axis of bytes, or of time that is modelled from them."""
    labels = [arm.label for arm in arms if not arm.counted]
    return f" Not counted, so not shown: {listed(labels)}." if labels else ""


def time(arms: Sequence[Arm], paper: bool = False) -> str:
    """What the measured times hold, and which of them do not compare."""
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


def modelled(arms: Sequence[Arm]) -> list[str]:
    """What the modelled columns mean, where there are any."""
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
    """How computation was made comparable, and of which arms it was not."""
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
    """What modelled communication leaves out: `as far as the backward pass does not hide it`."""
    older = [arm.label for arm in arms if not arm.values("modelled_exposed_seconds")]
    if len(older) == len(arms):
        return "without overlap"
    but = f" (without overlap for {listed(older)})" if older else ""
    return f"as far as the backward pass does not hide it{but}"


def paper_count(arms: Sequence[Arm]) -> list[str]:
    """What the paper's count is, where all arms have it."""
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
    """That these are no numbers to compare with a paper's, where the experiment was shortened."""
    scale = arms[0].scale
    if scale == "full":
        return []
    return [f"Scale {scale}: fewer epochs and less data than the experiment's; no number here compares with a paper's."]
