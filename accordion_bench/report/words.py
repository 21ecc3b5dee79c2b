"""What is said about a table: what its numbers are, one plain sentence per arm, and what is in no mean."""

import math
from collections.abc import Sequence
from typing import Any

from accordion_bench.report.arms import Arm, baseline, differences
from accordion_bench.report.load import Run
from accordion_bench.report.provenance import dense_command, machine
from accordion_bench.report.table import show_times, tidy


def heading(arm: Arm) -> str:
    """`resnet8 on digits, 4 workers x 32 samples, 60 epochs`."""
    config, workers = arm.config, arm.runs[0].summary["workers"]
    task = f"{config['choices']['model']} on {config['choices']['dataset']}"
    return f"{task}, {workers} workers x {config['batch_size']} samples, {config['epochs']} epochs"


def captions(arms: Sequence[Arm]) -> list[str]:
    """What a reader must know about the numbers of one setting."""
    several = max(arm.n for arm in arms) > 1
    interval = "mean ± Student's 95 % t-interval over n seeds" if several else "one seed per arm, so no intervals"
    accuracy = f"{arms[0].metric.capitalize()}: after the last epoch, {interval}; best: of all epochs."
    if images := arms[0].runs[0].summary.get("test_size"):
        accuracy += f" One of the {images:,} test images is {100 / images:.2g} points."
    time = "Time: training, without evaluation and warm-up; exchange: the part that is codec and communication."
    if shared := [arm.label for arm in arms if not arm.values("comm_seconds")]:
        whose = "The" if len(shared) == len(arms) else f"{', '.join(shared)}: the"
        time += f" {whose} workers share a process: no communication time was measured; time is compute and codec only."
    if not several:
        time += " One run per arm: other work on the machine is in its time."
    machines = sorted({machine(run) for arm in arms for run in arm.runs})
    if len(machines) > 1:
        time += f" The runs come from different machines ({'; '.join(machines)}); only times of one machine compare."
    return [accuracy, sent(arms), time, *modelled(arms)]


def sent(arms: Sequence[Arm]) -> str:
    """What payload and wire are, and what they are compared with."""
    dense = any(arm.dense for arm in arms)
    reference = "the measured dense run" if dense else "an fp32 all-reduce of the same tensors in the same steps"
    return (
        f"Payload: what one worker hands to the collectives; wire: what its own link sends; both against {reference}."
    )


def modelled(arms: Sequence[Arm]) -> list[str]:
    """What the modelled columns mean, where there are any."""
    with_model = [arm for arm in arms if arm.values("modelled_seconds")]
    links = sorted({link(arm.config["network"]) for arm in with_model})
    if not links:
        return []
    return [
        f"Modelled, not measured: one worker on its own machine with a link of {'; '.join(links)}. Its time is the "
        "measured computation of one worker plus modelled communication, 8 x wire bytes / bandwidth + rounds x "
        "latency, those of decisions included, without overlap."
    ]


def link(network: dict[str, Any]) -> str:
    """`1 Gbit/s and 50 µs per round`."""
    return f"{network['bandwidth'] / 1e9:g} Gbit/s and {network['latency'] * 1e6:g} µs per round"


def verdicts(arms: Sequence[Arm]) -> list[str]:
    """One plain sentence per arm against dense; without a dense run, the command that adds one."""
    if not any(arm.dense for arm in arms):
        return [
            "No dense run of this setting is among those given: nothing is said about accuracy or time against dense. "
            f"Add one: {dense_command(arms[0])}"
        ]
    rows = tidy(arms).to_dict("records")
    pairs = [(arm, baseline(arm, arms)) for arm in arms]
    return [verdict(a, row, d) for (a, d), row in zip(pairs, rows, strict=True) if d is not None and a is not d]


def verdict(arm: Arm, row: dict[Any, Any], dense: Arm) -> str:
    """Bytes, accuracy and noise of one arm against dense, in words.

    Args:
        arm: the arm.
        row: its row of `table.tidy`.
        dense: its baseline.
    """
    payload, wire = show_times(row["payload_times_less"]), show_times(row["wire_times_less"])
    sends = f"payload {payload} as dense" if payload == "the same" else f"payload {payload} than dense"
    if wire != payload:
        sends += f", wire {wire}"
    gap, half = 100 * row["accuracy_minus_dense"], 100 * row["accuracy_minus_dense_ci95"]
    accuracy = f"{arm.metric} equal to dense"
    if gap:
        accuracy = f"{arm.metric} {abs(gap):.2f} points {'below' if gap < 0 else 'above'} dense"
        if images := arm.runs[0].summary.get("test_size"):
            accuracy += f" ({_count(abs(gap) / 100 * images)} of {images:,} test images)"
    interval = f"the 95 % interval of the difference is {gap - half:+.2f} to {gap + half:+.2f} points"
    if math.isnan(half):
        noise = "one seed: no statement about noise" if arm.n == 1 else "dense has one seed: no statement about noise"
    else:
        noise = f"within noise, {interval}" if abs(gap) <= half else f"more than noise, {interval}"
    other = differences(arm, dense)
    note = f"; beware, dense differs in more than compression: {', '.join(other)}" if other else ""
    return f"{arm.label}: {sends}; {accuracy}; {noise}{note}."


def _count(images: float) -> str:
    return f"{images:.2g}" if images < 100 else f"{images:.0f}"


def unfinished(runs: Sequence[Run]) -> list[str]:
    """One line for each run that is in no mean."""
    lines = []
    for run in runs:
        epochs = run.config.get("epochs", "?")
        done = 0 if run.last_epoch is None else run.last_epoch + 1
        last = f"epoch {done} of {epochs} was the last" if done else f"no epoch of {epochs} was finished"
        lines.append(f"{run.path.name} ({run.label}, seed {run.seed}): {run.problem}; {last}")
    return lines
