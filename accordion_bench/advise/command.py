"""From a command line to advice: checked, timed, told and written."""

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

from accordion_bench.advise.accuracies import with_accuracies
from accordion_bench.advise.asked import Asked, asked_of
from accordion_bench.advise.late_workers import told
from accordion_bench.advise.measured import Measured, measured
from accordion_bench.advise.progress import done, say
from accordion_bench.advising import basis, write
from accordion_bench.advising.machine import cluster_like_here
from accordion_bench.advising.pipeline import Cluster
from accordion_bench.advising.table import Advice
from accordion_bench.advising.text import short_text, text
from accordion_bench.advising.verdict import verdict
from accordion_bench.options.checks import ConfigError
from accordion_bench.runs.environment import environment

PROBED = Path("link.json")
PROBE_SECONDS = 20.0
PIPED = 110  # letters of a line where standard output is no terminal


def run(args: argparse.Namespace) -> None:
    """Give advice, or probe the link.

    Raises:
        ConfigError: a value breaks a rule.
    """
    if args.probe:
        probe(args)
        return
    asked = asked_of(args)
    found = measured(asked)
    advice = advised(asked, found)
    said, shown = text(advice), short_text(advice, shutil.get_terminal_size((PIPED, 24)).columns)
    timed_with = {"device": asked.where, "on": advice.on, **environment(found.threads)}
    late = []
    if asked.wanted is not None:
        say("simulating")
        cluster = cluster_of(asked, asked.where, found.threads)
        late = asked.wanted.run(found.basis.times, found.basis.costs, cluster, advice)
        simulated = f"\n{told(late, advice, asked.wanted)}"
        said, shown = said + simulated, shown + simulated
    write.write(advice, asked.out, timed_with, said)
    if late:
        rows = [one.flat() for one in late]
        (asked.out / "simulated.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if asked.figures:
        from accordion_bench.report.render.figures.speed_ups import draw_advice  # a second that others need not wait

        say("drawing")
        draw_advice(advice, asked.out)
    done()
    print(f"{shown}\nwhole table{' and figures' * asked.figures}: {asked.out}")


def advised(asked: Asked, found: Measured) -> Advice:
    """The advice from what was timed, with accuracies and its verdict."""
    options = {key: value for key, value in asked.config.network.items() if key != "_target_"}
    advice = basis.advised(found.basis, lambda kind: cluster_of(asked, kind, found.threads), options, asked.link_error)
    advice = with_accuracies(advice, asked.known, asked.trained)
    return replace(advice, verdict=verdict(advice))


def cluster_of(asked: Asked, device: str, threads: int) -> Cluster:
    """The reader's cluster, where steps compute on `cpu` or on `cuda`."""
    return cluster_like_here(asked.networks[device], asked.machines.workers, device, threads)


def probe(args: argparse.Namespace) -> None:
    """Time collectives between the processes that torchrun has started, and write what to type.

    Raises:
        ConfigError: other options stand beside, or there are no peers.
    """
    beside = {
        "overrides": "overrides",
        "timeline": "--timeline",
        "methods": "--methods",
        "runs": "--runs",
        "link": "--link",
    }
    beside["simulate"] = "--simulate"
    if taken := next((shown for name, shown in beside.items() if getattr(args, name)), None):
        raise ConfigError(f"--probe must stand without {taken}, got both; type --probe alone, then ask for advice")
    from accordion_bench.network.probe import probe_link

    probe_link(PROBE_SECONDS if args.seconds is None else args.seconds, args.out or PROBED)
