"""Sweeps: one line of sweep.jsonl for each cell, whichever process runs it; and Ctrl-C while others train."""

import contextlib
import functools
import inspect
import math
import multiprocessing
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from accordion_bench import output
from accordion_bench.cli import launchers
from accordion_bench.cli.sweep_cells import Cells, best, cells_of, table
from accordion_bench.config import run_level
from accordion_bench.config.compose import refuse_unwritable, resolve
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.explain import explain
from accordion_bench.options.instantiate import build, target
from accordion_bench.options.units import counted
from accordion_bench.processes.interrupt import AT_ONCE, STOP, WARNINGS, Interrupted, end_with_parent, handle, handling
from accordion_bench.processes.launched import launched, leads
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import durable, untrusted

FILE = "sweep.jsonl"  # under paths.runs
_stopped = False  # whether this process, a worker of joblib, has been told to stop


class Sweep(Callback):
    """One command; Hydra makes it (`hydra.callbacks`), and hands copies to the processes that its launcher starts.

    Attributes:
        file: the record; None for a single run.
        name: marks the record's lines of this sweep.
        pid: the process that the user has started.
        launcher: `basic`, `joblib` or another one's class.
        cells: what is known of them.
        number: of the cell that runs in this process.
    """

    def __init__(self) -> None:
        self.file: Path | None = None
        self.name, self.pid, self.launcher = "", os.getpid(), "basic"
        self.cells, self.number = Cells(), 0

    def begin(self, runs: str) -> None:
        """Record the cells that follow under a folder."""
        self.file = Path(runs).absolute() / FILE
        self.name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """In the process that the user has started, before any cell."""
        global current
        current = self
        self.begin(config.paths.runs)
        self.launcher = config.hydra.launcher._target_.rpartition(".")[2].removesuffix("Launcher").lower()
        self.cells = cells_of(config.hydra)
        if {"-m", "--multirun"} & {*sys.argv[1:]} and not self.cells.swept and self.cells.total == 1:
            print("note: -m found no list of values, and runs one cell; type -m compressor=none,topk", file=sys.stderr)
        if needs_data:
            _refuse_before_cells(config, self.cells.first, self.launcher in ("basic", "joblib"))
        if self.launcher == "joblib":
            _let_workers_end_with(self.pid)
            self._pass_signals_on()
        elif self.launcher != "basic":  # this process only waits
            handle(_stop_waiting, (signal.SIGINT,))

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """In the process of a cell, before it."""
        global current
        current = self
        if os.getpid() != self.pid and self.launcher != "basic":
            end_with_parent(self.pid if self.launcher == "joblib" else os.getppid())
        if os.getpid() != self.pid:
            output.protect()
        self.number = 1 + (OmegaConf.select(config, "hydra.job.num") or 0)

    @property
    def side_by_side(self) -> bool:
        """Whether other cells print while this process's cell does."""
        return os.getpid() != self.pid and self.launcher == "joblib"

    def title(self, overrides: list[str]) -> str:
        """What a cell says first, `7 of 12: compressor=topk`; "" where each line says so, or there is one cell."""
        alone = not self.cells.swept or self.side_by_side
        return "" if alone else f"{self.cells.numbered(self.number)}: {self.cells.words(overrides)}"

    def in_front(self, overrides: list[str]) -> contextlib.AbstractContextManager[None]:
        """Say whose line it is in front of each, where others print at the same time."""
        if self.cells.swept and self.side_by_side:
            return output.named(self.cells.in_front(self.number, overrides))
        return contextlib.nullcontext()

    def _pass_signals_on(self) -> None:
        """Ctrl-C is for the workers to answer: they finish a step and save, while this process waits for them.

        A worker that has nothing to do must not die of it, as joblib then kills the others: workers inherit that the
        signal is blocked, and open up for it in their cells.
        """
        resource_tracker.ensure_running()  # else it is started with the workers, and leaves the signals unblocked
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP)

        def wait() -> None:
            first = signal.sigwait(STOP)
            began = time.monotonic()
            self._kill_workers(first)
            # launchers and `timeout` deliver one of them twice, the kernel its warning again and again
            while signal.sigwait(STOP) in WARNINGS or time.monotonic() < began + AT_ONCE:
                pass
            self._kill_workers(signal.SIGKILL)
            os._exit(128 + first)

        threading.Thread(target=wait, daemon=True).start()

    @staticmethod
    def _kill_workers(signum: int) -> None:
        for child in multiprocessing.active_children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid or 0, signum)

    def append(self, line: dict[str, Any]) -> None:
        """Append one whole line to the record; only the leader of several processes does."""
        if self.file is None or not leads():
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            durable.append_line(self.file, durable.json_text({"sweep": self.name, **line}))
        except OSError as error:
            print(f"warning: the record of the sweep cannot be written: {error}", file=sys.stderr)

    def lines(self) -> list[dict[str, Any]]:
        """The last line of each cell of this sweep."""
        found = {}
        with contextlib.suppress(OSError, untrusted.Refused):
            for text in [] if self.file is None else untrusted.split_lines(self.file, most=None):
                with contextlib.suppress(ValueError):  # torn, by a full disk, or damaged
                    line = untrusted.parse_json(text)
                    if isinstance(line, dict) and line.get("sweep") == self.name:
                        found[tuple(line["overrides"])] = line
        return list(found.values())


def _let_workers_end_with(parent: int) -> None:
    """Let joblib's workers end with this process, those without a cell too: each keeps the others' pipes open."""
    from hydra_plugins.hydra_joblib_launcher import _core

    if "backend_kwargs" in inspect.signature(_core.Parallel.__init__).parameters:  # else only those with a cell
        _core.Parallel = functools.partial(_core.Parallel, initializer=end_with_parent, initargs=(parent,))


def _refuse_before_cells(config: DictConfig, first: Sequence[str], here: bool) -> None:
    """Refuse what no cell could run with, and get the data that cells of this machine share, or end in one sentence.

    A sweep that is resumed may have nothing left to do that needs data.

    Args:
        config: without what is swept.
        first: the overrides of the first cell; empty = not known.
        here: whether the cells run on this machine.
    """
    try:
        launchers.refuse(config.hydra.launcher)
        refuse_unwritable("paths.runs", config.paths.runs)
        _refuse_a_typo(config, first)
        if here and not config.resume_sweep:
            _prepare_data(config)
    except ConfigError as error:
        print(f"{error} (nothing has been run)", file=sys.stderr)
        if launched():
            from accordion_bench.processes import rendezvous

            rendezvous.call_off(error)
        raise SystemExit(2) from None  # Hydra makes a warning of what else a callback raises


def _refuse_a_typo(config: DictConfig, first: Sequence[str]) -> None:
    """Refuse a key that no cell could have, and a wrong value that all of them share; each cell tells of its own."""
    from hydra.core.global_hydra import GlobalHydra

    try:
        if first:
            GlobalHydra.instance().config_loader().load_sweep_config(config, list(first))
    except Exception as error:
        raise ConfigError(explain(error) or str(error)) from error
    try:
        cfg = resolve(config, config.hydra.runtime.choices, list(config.hydra.overrides.task))
    except ConfigError:
        raise
    except Exception:  # of an experiment without an arm, which the cells have
        return
    if not cfg["resume"]:
        run_level.refuse_wrong(RunConfig.from_dict(cfg))


def _prepare_data(config: DictConfig) -> None:
    from accordion_bench.datasets.dataset import Dataset

    dataset: Any = OmegaConf.to_container(config.dataset, resolve=True)
    cls = target(dataset, "dataset")
    if issubclass(cls, Dataset) and cls.reads_files:
        build(dataset, "dataset").prepare(config.paths.data)


needs_data = True  # of the cells; a dry run does without
current = Sweep()  # of this process


def run_cell(overrides: list[str], run: Callable[[dict[str, Any]], float], tell: Callable[[Exception], int]) -> float:
    """Run one cell and record what became of it; each line says whose it is where others print at the same time.

    Args:
        overrides: what makes this cell.
        run: trains; gets a dict with the cell's `title`, adds `folder` and `status` to it, returns the metric.
        tell: tells the user of an error, returns the exit status.

    Returns:
        the metric; NaN for a cell that failed, or was stopped in a process of the launcher.

    Raises:
        KeyboardInterrupt: the cell was stopped, in the process that the user has started.
    """
    with contextlib.nullcontext() if _stopped else current.in_front(overrides):
        return _run_cell(overrides, run, tell)


def _run_cell(overrides: list[str], run: Callable[[dict[str, Any]], float], tell: Callable[[Exception], int]) -> float:
    global _stopped
    note: dict[str, Any] = {"title": current.title(overrides)}
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line: dict[str, Any] = {"overrides": overrides, "started": started, "metric": None}
    began, metric = time.monotonic(), math.nan
    if current.number:
        line["cell"] = current.number
    try:
        with _listening():
            if _stopped:
                return math.nan
            metric = run(note)
        line |= {"status": note.get("status", "done"), "exit_status": 0}
        line["metric"] = metric if math.isfinite(metric) else None
    except (KeyboardInterrupt, SystemExit) as stop:
        _stopped = os.getpid() != current.pid
        status = 128 + getattr(stop, "signum", signal.SIGINT)
        line |= {"status": "interrupted", "exit_status": status, "error": str(stop)}
        if isinstance(stop, SystemExit):
            line["error"] = "ended by its launcher, maybe to be started anew"
        if not _stopped or isinstance(stop, SystemExit):  # a launcher that ends the process wants to start it anew
            raise
    except Exception as error:
        status = tell(error)
        refused = status == 2 and "folder" not in note
        line |= {"status": "refused" if refused else "failed", "exit_status": status, "error": _sentence(error)}
    finally:
        if "status" in line:
            current.append(line | {"folder": note.get("folder"), "seconds": round(time.monotonic() - began, 3)})
    return metric


def told_to(sweeper: Mapping[str, Any], metric: float) -> float:
    """What a sweeper that searches is told of a cell: NaN, of one that failed, would end Optuna's search.

    The user is told which cell is the best so far.
    """
    worst = {"maximize": -math.inf, "minimize": math.inf}.get(str(sweeper.get("direction")))
    if worst is None:
        return metric
    if leads() and (told := best(current.cells, current.lines(), worst < 0)):
        print(told, flush=True)
    return worst if math.isnan(metric) else metric


def _sentence(error: Exception) -> str:
    """What the user can act on, or the traceback's last line."""
    return explain(error) or "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]


@contextlib.contextmanager
def _listening() -> Iterator[None]:
    """A worker of joblib hears signals from here on; outside cells it only notes them."""
    if os.getpid() == current.pid or current.launcher != "joblib":
        yield
        return
    handle(_note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
    with handling(_raise):
        yield


def _note(signum: int, frame: FrameType | None) -> None:
    global _stopped
    _stopped = True


def _stop_waiting(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt("stopped waiting; jobs that have been submitted go on")


def _raise(signum: int, frame: FrameType | None) -> None:
    global _stopped
    if not _stopped:
        _stopped = True
        raise Interrupted(None, signum)


def limit_threads(launcher: Mapping[str, Any]) -> None:
    """As many threads as cores were asked for, where the user has not said how many; joblib does so by itself.

    Call it before torch is imported.
    """
    if launcher.get("cpus_per_task"):
        os.environ.setdefault("OMP_NUM_THREADS", str(launcher["cpus_per_task"]))


def close() -> int:
    """After the last cell, in the process that the user has started: tell what became of them, and which failed.

    Returns:
        the exit status: 0, or the worst cell's.
    """
    global current
    sweep, current = current, Sweep()
    if sweep.file is None:
        return 0
    lines = sweep.lines()
    if sweep.cells.swept and lines:
        print("\n".join(table(sweep.cells, lines)), f"folders: {sweep.file}", sep="\n")
    missing = [line for line in lines if line["exit_status"]]
    if missing:
        whose = "its" if len(lines) == 1 else "their"
        heading = f"{len(missing)} of {counted(len(lines), 'cell')} did not come to {whose} end"
        print(f"{heading} ({sweep.file}):", file=sys.stderr)
        for line in missing:
            print(f"  {line['status']}: {_differing_overrides(line, lines)}: {line['error']}", file=sys.stderr)
    if any(line["status"] != "refused" for line in missing):
        print("type the same command with resume_sweep=true to run what is missing", file=sys.stderr)
    return max([line["exit_status"] for line in lines], default=0)


def _differing_overrides(line: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    """The overrides in which a cell differs from others; all of them, where it is alone."""
    shared = set.intersection(*(set(other["overrides"]) for other in lines)) if len(lines) > 1 else set()
    return " ".join(item for item in line["overrides"] if item not in shared) or " ".join(line["overrides"])
