"""Run one configuration: validate, create the run folder, launch, summarise; `run` returns the final metric."""

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from accordion_bench import output
from accordion_bench.batches import unequal
from accordion_bench.comm.stages import MATTERS
from accordion_bench.config import engine_rules
from accordion_bench.config.components import Components, with_counts
from accordion_bench.config.continuation import continuing, refuse_changed_history, resumed_config, threads_of
from accordion_bench.config.validate import options_without_effect, validate
from accordion_bench.network.links import link_name
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.instantiate import Config
from accordion_bench.options.presets import changed_options, named
from accordion_bench.options.units import counted, digits, human_bytes, samples
from accordion_bench.processes import machine, rendezvous
from accordion_bench.processes.placement import Placement, place, with_placement
from accordion_bench.processes.waiting import BUSY
from accordion_bench.processes.watchdog import Watch
from accordion_bench.run_config import RunConfig, refuse_names
from accordion_bench.runs import checkpoint, reuse
from accordion_bench.runs.folder import RunFolder
from accordion_bench.runs.metrics import metric, split_of
from accordion_bench.training import codec_kernels, launch
from accordion_bench.training.progress import Heartbeat


def run(
    cfg: Config,
    typed: dict[str, Any] | None = None,
    note: dict[str, Any] | None = None,
    sweep: str = "",
    once: bool = False,
) -> float:
    """Run one configuration to the end.

    Args:
        cfg: resolved configuration, from `config.compose` or the command line.
        typed: keys that the user has typed, for warnings and for the comparison with a resumed run.
        note: dict that receives `folder` once it exists, and `status`, done or skipped; its `title` is printed first.
        sweep: name of the sweep that the run belongs to.
        once: whether a finished or running run of the same sweep with this configuration replaces this one.

    Returns:
        the final metric.

    Raises:
        ConfigError: a value breaks a rule; nothing was changed.
        Interrupted: Ctrl-C or SIGTERM; the state is saved.
    """
    if "timeout" not in (cfg.get("comm") or {}):  # other options may be missing if a run is resumed
        refuse_names(cfg)
    elastic = bool((cfg.get("sync") or {}).get("elastic"))
    with rendezvous.meet(cfg["comm"]["timeout"], elastic) as watch:
        return _run(cfg, typed or {}, {} if note is None else note, sweep, once, watch)


def _run(
    cfg: Config, typed: dict[str, Any], note: dict[str, Any], sweep: str, once: bool, watch: Watch | None
) -> float:
    if cfg["resume"] is not None:
        cfg = resumed_config(cfg, set(typed))
    config = with_counts(RunConfig.from_dict(cfg))
    where = place(config)
    if watch is not None and watch.over:  # this process was lost at the end, and restarted after it
        note["status"] = "skipped"
        return float("nan")
    rendezvous.agree(config, where, watch)
    parts = validate(config, where, set(typed))
    config, where = replace(config, workers=where.workers), replace(where, threads=parts.threads)
    if config.resume is not None:
        refuse_changed_history(with_placement(config, where), parts)
    joins = watch is not None and watch.joins
    if joins:  # none of the first processes, so that it never leads before the others have admitted it
        config, where = replace(config, resume=None), replace(where, rank=where.rank + where.processes)
    leader = where.rank == 0
    if leader:
        placed = replace(config, comm=replace(config.comm, backend=where.backend))
        for warning in options_without_effect(placed, set(typed), parts):
            print(f"warning: {warning}", file=sys.stderr)
    looks = not joins and config.resume is None and (config.resume_sweep or bool(once and sweep))
    with contextlib.ExitStack() as held:
        held.enter_context(machine.use_deterministic_variables(config.deterministic))
        held.enter_context(launch.join_process_group(config, where, watch))
        with reuse.one_at_a_time(config.to_dict()) if looks and leader else contextlib.nullcontext():
            found, done = _find_earlier(config, leader, watch, sweep) if looks else ("", False)
            if found and done:
                note |= {"folder": found, "status": "skipped"}
                if leader:
                    RunFolder(found).update_description(config.said(typed))
                return _tell_done(RunFolder(found)) if leader else float("nan")
            if found:
                config = replace(config, resume=found)
                if "threads" not in typed:  # another number of threads changes the last bits of sums
                    where = replace(where, threads=threads_of(RunFolder(found)) or where.threads)
                refuse_changed_history(with_placement(config, where), parts)
            with Heartbeat(leader and not output.on_a_terminal(), "getting the data"):
                launch.prepare_data(parts.dataset, config.paths.data, where, watch)
            folder = _make_or_resume_folder(config, where, parts, watch, sweep)
            if leader:
                held.enter_context(reuse.hold(folder))
        note["folder"] = str(folder.path)

        def ended(error: BaseException) -> None:
            if leader and not folder.done:
                with contextlib.suppress(ConfigError, OSError):  # an error here must not hide the first one
                    folder.write_json("summary.json", unfinished_summary(folder, error))

        if watch is not None:
            watch.last_words = ended
        if leader:
            if folder.read_config()["epochs"] != config.epochs:
                folder.reopen(config.epochs)
            folder.update_description(config.said(typed))
            if config.resume is not None:
                folder.note_resumption(where.threads, codec_kernels.computed_with(where.device, parts))
            if found:
                print(f"going on with {found}", flush=True)
            print("\n".join(filter(None, [note.get("title"), header(config, where, parts)])), flush=True)
        try:
            reports = launch.run(config, where, folder, parts, watch)
        except BaseException as error:
            ended(error)
            if isinstance(error, KeyboardInterrupt):
                hint = f"continue with: {continuing(config.to_dict(), folder)}"
                if checkpoint.latest(folder.path) is None:
                    hint = f"nothing is saved: {folder.path} would start again"
                error.args = (f"{str(error) or 'stopped'}; {hint}" if leader else "stopped",)
            raise
    note["status"] = "done"
    if not reports:
        return float("nan")
    summary = folder.read_json("summary.json")
    print(footer(summary, config, folder.path), flush=True)
    return summary["metric"]


def _find_earlier(config: RunConfig, leader: bool, watch: Watch | None, sweep: str) -> tuple[str, bool]:
    """Return (folder, whether it is finished) of an earlier equal run; the leader searches and informs the others.

    With `resume_sweep` all runs under `paths.runs` are searched, otherwise those of the sweep; "" = no such run. One of
    several processes does not wait for another process that is executing it, and raises ConfigError.
    """
    if not leader and watch is not None:
        return watch.get("earlier", rendezvous.earlier_run)
    folder = reuse.find_earlier(config.to_dict(), "" if config.resume_sweep else sweep, wait=watch is None)
    found, done = (str(folder.path), folder.done) if folder else ("", False)
    if watch is not None:
        watch.store.set("earlier", json.dumps([found, done]))
    return found, done


def _tell_done(folder: RunFolder) -> float:
    """Report that a run is already finished and return its metric."""
    print(f"done already: {folder.path}", flush=True)
    return folder.read_json("summary.json")["metric"]


def _make_or_resume_folder(
    config: RunConfig, where: Placement, parts: Components, watch: Watch | None, sweep: str
) -> RunFolder:
    """Return the resumed run folder, or a new one that the leader creates and announces to the others."""
    if config.resume is not None:
        if where.rank == 0 and watch is not None:
            watch.store.set("run_folder", str(config.resume))  # for processes that join later
        return RunFolder(config.resume)
    if where.rank and watch is not None:
        return RunFolder(watch.get("run_folder", rendezvous.run_folder))
    announced = None
    if watch is not None and config.sync.get("elastic"):  # an earlier rank 0 may have been lost before the first step
        announced = watch.store.read("run_folder", rendezvous.run_folder)
    if announced is not None:
        return RunFolder(announced)
    choices, policies = config.choices, list(config.adaptive)
    scheme = [choices["sync"]] if choices["sync"] not in ("every_step", *policies) else []
    hook = [config.comm.hook.rpartition(":")[2]] if config.comm.hook else []
    names = [*(choices[group] for group in ("model", "dataset", "compressor")), *hook, *scheme, *policies]
    label = f"{'-'.join(names)}-s{config.seed}"
    computed_with = codec_kernels.computed_with(where.device, parts)
    folder = RunFolder.create(config.paths.runs, label, config.to_dict(), where.threads, sweep, computed_with)
    if watch is not None:
        watch.store.set("run_folder", str(folder.path))
    return folder


def unfinished_summary(folder: RunFolder, error: BaseException) -> dict[str, Any]:
    """Return summary.json of a run that did not finish: figures of the last epoch, and the reason."""
    rows = folder.read_metrics()
    last = {k: v for k, v in rows[-1].items() if k not in ("plan", "decisions")} if rows else {}
    return {**last, "stopped_by": getattr(error, "kind", type(error).__name__), "reason": str(error)}


def header(config: RunConfig, where: Placement, parts: Components) -> str:
    """Return a line on the run and its placement, and further lines on the optimizer, kernels and capture."""
    choices, compressor = config.choices, parts.wrapped.compressor
    momentum = (
        "; momentum acts on the workers, before compression" if "momentum" in compressor.traits.optimizer.owns else ""
    )
    local = ""
    composed = config.to_dict()
    if parts.sync.local:
        driven = any(policy.drives == "period" for policy in parts.policies.values())
        period = counted(parts.plan_for([]).period, "step") + (" at first" if driven or parts.sync.grows else "")
        told = "; ".join([*changed_options(composed, "sync", ("period",)), f"averaging every {period}"])
        momentum, local = "", f", sync {choices['sync']} ({told})"
    adaptive = ", ".join(config.adaptive) or "none"
    batch = samples(unequal(config.batch_size) or config.largest_batch)
    place = f"{counted(where.processes, 'process')} x {where.workers_per_process} on {where.device}"
    if where.device == "cuda" and where.backend == "gloo":
        place += ", exchanging through the host's memory"
    if where.device == "cuda" and config.deterministic:
        place += ", deterministic kernels"
    line = (
        f"{named(composed, 'model')} on {named(composed, 'dataset', ('fingerprint',))}, "
        f"compressor {named(composed, 'compressor')}{local}, adaptive {adaptive}; "
        f"{counted(where.workers, 'worker')} ({where.backend}, {place}), "
        f"{counted(config.epochs, 'epoch')} of {batch} per worker and "
        f"step{momentum}{describe_exchange(config, where, parts)}"
        f"{'; ' if 'brought' in choices else ''}{choices.get('brought', '')}"
    )
    graphs = ""
    if where.device == "cuda":
        eager = engine_rules.stays_eager(config, parts, where.processes)
        graphs = engine_rules.capture_told(eager, config.workers_at_once)
    return "\n".join(filter(None, [line, parts.split, codec_kernels.missing(where.device, parts), graphs]))


def describe_exchange(config: RunConfig, where: Placement, parts: Components) -> str:
    """Describe how the processes of a run exchange gradients; "" with one process."""
    if where.processes == 1 or not parts.sync.gradient_exchange:
        return ""
    if parts.exchange.engine == "ddp":
        by = f" and its hook {config.comm.hook}" if config.comm.hook else ""
        return f"; gradients are exchanged by DistributedDataParallel{by}"
    why = parts.exchange.after_backward(parts.wrapped, where.processes)
    return f"; gradients are exchanged {f'after the backward pass: {why}' if why else 'during the backward pass'}"


def footer(summary: dict[str, Any], config: RunConfig, path: Path) -> str:
    """Return the closing lines; the last one is the run folder."""

    def line(name: str, sent: int, dense: int) -> str:
        if sent == dense:
            ratio = "the same as dense"
        elif sent < dense:
            ratio = f"{dense / sent:.3g}x less than dense, {human_bytes(dense)}" if sent else "nothing to send"
        else:
            ratio = f"{sent / dense:.3g}x MORE than dense, {human_bytes(dense)}"
        return f"{name:<11}{human_bytes(sent)} per worker ({ratio})"

    judged = metric(summary["metric_name"])
    simulated = summary["comm_seconds"] is None and config.comm.engine != "ddp"
    remark = ""
    if simulated and summary["processes"] == 1:
        remark = " (workers share a process: no communication time)"
    elif simulated:
        remark = " (several workers in each process: communication in it)"
    best = f", {judged.show(summary['best_metric'])} best"
    if split_of(summary["selected_by"]) != "test" and summary["best_epoch"] is not None:
        then = f"in epoch {summary['best_epoch'] + 1}, when the test had {judged.show(summary['test_at_best'])}"
        best = f"; best of the validation split {judged.show(summary['best_metric'])} {then}"
    steps = counted(summary["steps"], "step")
    lines = [f"{judged.words + ' ':<11}{judged.show(summary['metric'])} at the end{best} ({steps})"]
    if (perplexity := summary.get("perplexity_per_byte")) is not None:
        lines.append(f"{'perplexity':<11}{perplexity:.4g} per byte at the end")
    if config.comm.hook:
        lines.append(f"{'payload':<11}not counted: what comm.hook={config.comm.hook} sends is known to the hook alone")
        if (sent := summary["link_sent_bytes"]) is not None:
            lines.append(f"{'interface':<11}{human_bytes(sent)} sent by {config.comm.interface}")
    else:
        lines.append(line("payload", summary["payload_bytes"], summary["dense_bytes"]))
        lines.append(line("wire", summary["wire_bytes"], summary["dense_wire_bytes"]))
    if entropy := summary["entropy_bytes"]:
        lines.append(line("entropy", entropy, summary["dense_bytes"]))
    lines += [
        f"{'control':<11}{human_bytes(summary['control_bytes'])} of decisions and checks, "
        f"{human_bytes(summary['eval_bytes'])} for evaluation",
        f"{'time':<11}{digits(summary['seconds'])} s of training{remark}",
    ]
    if summary["outlier_seconds"] >= MATTERS * summary["seconds"] > 0:
        count = summary["outlier_seconds_count"]
        lines.append(
            f"{'outliers':<11}{count} of {steps} took 3 times as long as usual or longer "
            f"({summary['outlier_seconds']:.2g} s more in all, left out of modelled time)"
        )
    if (waited := summary.get("waited_for_cores") or 0.0) >= BUSY:
        lines.append(f"{'machine':<11}busy: {waited:.0%} of their time processes waited for a core; times are too long")
    for sentence, took in summary["went_dense"].items():
        lines.append(f"{'dense':<11}{took} of {steps}: {sentence}")
    if summary["modelled_seconds"] is not None:
        link = link_name(config.to_dict())
        lines.append(
            f"{'modelled':<11}{summary['modelled_seconds']:.3g} s for one worker on {link}; "
            f"{summary['modelled_comm_seconds']:.3g} s of communication (dense "
            f"{summary['modelled_dense_comm_seconds']:.3g} s), {summary['modelled_exposed_seconds']:.3g} s not hidden, "
            "codec and wait for the slowest worker included"
        )
    if warning := summary.get("not_learned"):
        lines.append(f"{'warning':<11}{warning}")
    return "\n".join([*lines, str(path)])
