"""Sweeps: run cells, record each in sweep.jsonl from any process, and handle signals in joblib's workers."""

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from accordion_bench import output
from accordion_bench.cli import launchers
from accordion_bench.config import value_checks
from accordion_bench.config.compose import refuse_unwritable, resolve
from accordion_bench.options.advice import explain
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.instantiate import build, target
from accordion_bench.options.override import key_of
from accordion_bench.options.units import counted, human_bytes, human_seconds
from accordion_bench.processes.environment import launched, leads
from accordion_bench.processes.interrupt import AT_ONCE, STOP, WARNINGS, Interrupted, end_with_parent, handle, handling
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import durable, untrusted
from accordion_bench.runs.folder import RunFolder
from accordion_bench.runs.metrics import Metric, metric

LONGEST = 48  # maximum characters of the label in front of each line; the cell's number is unique
Line = Mapping[str, Any]  # line of sweep.jsonl
FILE = "sweep.jsonl"  # in paths.runs
_stopped = False  # whether this process, a worker of joblib, has received a stop signal
needs_data = True  # whether cells need data; false for a dry run


@dataclass(frozen=True)
class Cells:
    """Information on a sweep's cells before the first one runs.

    Args:
        total: number of cells; 0 = unknown, since the sweeper decides.
        swept: keys of the overrides that vary.
        first: overrides of the first cell; empty = unknown.
    """

    total: int = 0
    swept: tuple[str, ...] = ()
    first: tuple[str, ...] = ()

    def numbered(self, number: int) -> str:
        """Return `7 of 12`, or `7` if the total is unknown."""
        return f"{number} of {self.total}" if self.total else f"{number}"

    def words(self, overrides: Iterable[str]) -> str:
        """Return the swept overrides of a cell: `compressor=topk seed=2`."""
        return " ".join(item for item in overrides if key_of(item) in self.swept)

    def in_front(self, number: int, overrides: Iterable[str]) -> str:
        """Return the prefix of each output line of a cell, for cells that print at the same time."""
        words = self.words(overrides)
        short = words if len(words) <= LONGEST else f"{words[: LONGEST - 3]}..."
        return f"{self.numbered(number)} {short} | "


def cells_of(hydra: DictConfig) -> Cells:
    """Return the cells that Hydra will run: those of its basic sweeper, or the trials of a search."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.overrides_parser import OverridesParser

    sweeper, typed = hydra.get("sweeper") or {}, OmegaConf.select(hydra, "overrides.task") or []
    params = OmegaConf.to_container(sweeper.get("params") or OmegaConf.create({}), resolve=True)
    assert isinstance(params, dict)
    running = GlobalHydra.instance()
    parser = OverridesParser.create(config_loader=running.config_loader() if running.is_initialized() else None)
    parsed = parser.parse_overrides([*(f"{key!s}={value}" for key, value in params.items()), *typed])
    typed_last = {key_of(each.get_key_element()): each for each in parsed}  # the last one counts, as in Hydra
    swept = {key: each for key, each in typed_last.items() if each.is_sweep_override()}
    if (trials := sweeper.get("n_trials")) is not None:
        return Cells(int(trials), tuple(swept))
    discrete = all(each.is_discrete_sweep() for each in swept.values())
    if not discrete:
        return Cells(0, tuple(swept))
    values = {key: list(each.sweep_string_iterator()) for key, each in swept.items()}
    first = [
        f"{each.get_key_element()}={values[key][0]}" if key in swept else str(each.input_line)
        for key, each in typed_last.items()
    ]
    return Cells(math.prod(map(len, values.values())), tuple(swept), tuple(first))


def table(cells: Cells, lines: Sequence[Line]) -> list[str]:
    """Return a table with a line per recorded cell: final metric, payload, training time and swept overrides."""
    rows = [_row(cells, line) for line in sorted(lines, key=lambda line: line.get("cell", 0))]
    names = {row[1] for row in rows if row[1]}
    shown = names.pop() if len(names) == 1 else "metric"
    columns: list[Sequence[str]] = [("", shown, "payload", "time", "cell")]
    columns += [(number, f"{name} {value}" if names and name else value, *rest) for number, name, value, *rest in rows]
    widths = [max(len(row[i]) for row in columns) for i in range(4)]
    return [
        "  ".join([*(text.rjust(width) for text, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in columns
    ]


def _row(cells: Cells, line: Line) -> tuple[str, ...]:
    """Return number, name and value of the metric (or the status), payload, time, swept overrides."""
    number, words = str(line.get("cell", "")), cells.words(line["overrides"])
    found = _summary(line)
    judged = _judged(found)
    if line["exit_status"] or judged is None:
        return number, "", str(line["status"]), "", "", words
    payload, seconds = found.get("payload_bytes"), found.get("seconds")
    sent = human_bytes(payload) if isinstance(payload, int | float) else "-"
    took = human_seconds(seconds) if isinstance(seconds, int | float) else "-"
    return number, judged.words, judged.show(found["metric"]), sent, took, words


def _summary(line: Line) -> Mapping[str, Any]:
    with contextlib.suppress(ConfigError):
        if line.get("folder"):
            return RunFolder(line["folder"]).read_json("summary.json")
    return {}


def _judged(summary: Mapping[str, Any]) -> Metric | None:
    return metric(str(summary.get("metric_name"))) if isinstance(summary.get("metric"), int | float) else None


def best(cells: Cells, lines: Sequence[Line], higher: bool) -> str | None:
    """Return the sentence on a search's best cell so far, the highest or lowest metric; None if none has finished."""
    done = [line for line in lines if isinstance(line.get("metric"), int | float) and not line["exit_status"]]
    if not done:
        return None
    line = (max if higher else min)(done, key=lambda line: line["metric"])
    judged = _judged(_summary(line))
    value = f"{judged.words} {judged.show(line['metric'])}" if judged else f"{line['metric']:g}"
    trial = f", in trial {cells.numbered(line['cell'])}" if "cell" in line else ""
    return f"best so far: {value} with {cells.words(line['overrides'])}{trial}"


class Sweep(Callback):
    """Hydra callback of one command (`hydra.callbacks`); the processes of Hydra's launcher have copies.

    Attributes:
        file: path of the record; None for a single run.
        name: identifier of this sweep's lines in the record.
        pid: number of the process that the user started.
        launcher: `basic`, `joblib` or another launcher's class.
        number: number of the cell that runs in this process.
    """

    def __init__(self) -> None:
        self.file: Path | None = None
        self.name, self.pid, self.launcher = "", os.getpid(), "basic"
        self.cells, self.number = Cells(), 0

    def begin(self, runs: str) -> None:
        """Start a record of the following cells in a folder."""
        self.file = Path(runs).absolute() / FILE
        self.name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Prepare the sweep; Hydra calls this in the process that the user started, before any cell."""
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
        elif self.launcher != "basic":  # this process waits for submitted jobs
            handle(_stop_waiting, (signal.SIGINT,))

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Prepare a cell; Hydra calls this in the process of the cell."""
        global current
        current = self
        if os.getpid() != self.pid and self.launcher != "basic":
            end_with_parent(self.pid if self.launcher == "joblib" else os.getppid())
        if os.getpid() != self.pid:
            output.protect()
        self.number = 1 + (OmegaConf.select(config, "hydra.job.num") or 0)

    @property
    def side_by_side(self) -> bool:
        """Whether other cells print at the same time as this process's cell."""
        return os.getpid() != self.pid and self.launcher == "joblib"

    def title(self, overrides: list[str]) -> str:
        """Return the title of a cell, `7 of 12: compressor=topk`; "" if each line has a prefix, or without a sweep."""
        alone = not self.cells.swept or self.side_by_side
        return "" if alone else f"{self.cells.numbered(self.number)}: {self.cells.words(overrides)}"

    def in_front(self, overrides: list[str]) -> contextlib.AbstractContextManager[None]:
        """Context that prefixes each output line with the cell's label if others print at the same time."""
        if self.cells.swept and self.side_by_side:
            return output.named(self.cells.in_front(self.number, overrides))
        return contextlib.nullcontext()

    def _pass_signals_on(self) -> None:
        """Forward stop signals to joblib's workers, which finish a step and save while this process waits for them.

        An idle worker must not die of a signal, since joblib would then kill the others. Workers therefore inherit
        blocked signals, and unblock them within their cells.
        """
        resource_tracker.ensure_running()  # before blocking; started later with the workers, it would unblock signals
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP)

        def wait() -> None:
            first = signal.sigwait(STOP)
            began = time.monotonic()
            self._kill_workers(first)
            # launchers and `timeout` deliver a signal twice, the kernel repeats its warning
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
        """Append one line to the record. With several processes, only the leader writes."""
        if self.file is None or not leads():
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            durable.append_line(self.file, durable.json_text({"sweep": self.name, **line}))
        except OSError as error:
            print(f"warning: the record of the sweep cannot be written: {error}", file=sys.stderr)

    def lines(self) -> list[dict[str, Any]]:
        """Return the last line of each cell of this sweep."""
        found = {}
        with contextlib.suppress(OSError, untrusted.Refused):
            for text in [] if self.file is None else untrusted.split_lines(self.file, most=None):
                with contextlib.suppress(ValueError):  # incomplete, by a full disk, or damaged
                    line = untrusted.parse_json(text)
                    if isinstance(line, dict) and line.get("sweep") == self.name:
                        found[tuple(line["overrides"])] = line
        return list(found.values())


def _let_workers_end_with(parent: int) -> None:
    """Make joblib's workers end with this process, also idle ones, since each keeps the pipes of the others open."""
    from hydra_plugins.hydra_joblib_launcher import _core

    if "backend_kwargs" in inspect.signature(_core.Parallel.__init__).parameters:  # else only workers with a cell
        _core.Parallel = functools.partial(_core.Parallel, initializer=end_with_parent, initargs=(parent,))


def _refuse_before_cells(config: DictConfig, first: Sequence[str], here: bool) -> None:
    """Check what all cells share, and prepare their data if they run `here`. An error ends the process.

    No data is prepared for a resumed sweep, whose remaining cells may not need any. `first` has the overrides of the
    first cell; empty = unknown.
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

            rendezvous.publish_start_failure(error)
        raise SystemExit(2) from None  # Hydra turns other exceptions of callbacks into warnings


def _refuse_a_typo(config: DictConfig, first: Sequence[str]) -> None:
    """Refuse unknown keys and wrong values that all cells share; each cell reports errors of its own."""
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
    except Exception:  # such as an experiment without an arm, which the cells add
        return
    if not cfg["resume"]:
        value_checks.refuse_wrong(RunConfig.from_dict(cfg))


def _prepare_data(config: DictConfig) -> None:
    from accordion_bench.datasets.dataset import Dataset

    dataset: Any = OmegaConf.to_container(config.dataset, resolve=True)
    cls = target(dataset, "dataset")
    if issubclass(cls, Dataset) and cls.reads_files:
        build(dataset, "dataset").prepare(config.paths.data)


current = Sweep()  # sweep of this process


def run_cell(overrides: list[str], run: Callable[[dict[str, Any]], float], tell: Callable[[Exception], int]) -> float:
    """Run one cell and record its result. Output lines have a prefix if other cells print at the same time.

    Args:
        run: trains the cell and returns the metric; receives a dict with its `title` and adds `folder` and `status`.
        tell: reports an error to the user and returns the exit status.

    Returns:
        the metric; NaN for a cell that failed, or was stopped in a process of the launcher.

    Raises:
        KeyboardInterrupt: the cell was stopped in the process that the user started.
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
        if not _stopped or isinstance(stop, SystemExit):  # the launcher may restart a process that it ends
            raise
    except Exception as error:
        status = tell(error)
        refused = status == 2 and "folder" not in note
        line |= {"status": "refused" if refused else "failed", "exit_status": status, "error": _sentence(error)}
    finally:
        if "status" in line:
            current.append(line | {"folder": note.get("folder"), "seconds": round(time.monotonic() - began, 3)})
    return metric


def metric_for_search(sweeper: Mapping[str, Any], metric: float) -> float:
    """Return the metric to report to a search, and print the best cell so far.

    A failed cell gets the worst possible metric, because NaN would end Optuna's search.
    """
    worst = {"maximize": -math.inf, "minimize": math.inf}.get(str(sweeper.get("direction")))
    if worst is None:
        return metric
    if leads() and (told := best(current.cells, current.lines(), worst < 0)):
        print(told, flush=True)
    return worst if math.isnan(metric) else metric


def _sentence(error: Exception) -> str:
    return explain(error) or "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]


@contextlib.contextmanager
def _listening() -> Iterator[None]:
    """Context in which a worker of joblib is interrupted by signals; outside cells it only records them."""
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
    """Set OMP_NUM_THREADS to the cores that the launcher was asked for, unless it is set; before torch is imported."""
    if launcher.get("cpus_per_task"):  # joblib limits threads itself
        os.environ.setdefault("OMP_NUM_THREADS", str(launcher["cpus_per_task"]))


def close() -> int:
    """Print the results of all cells, in the process that the user started; return the largest exit status."""
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
    shared = set.intersection(*(set(other["overrides"]) for other in lines)) if len(lines) > 1 else set()
    return " ".join(item for item in line["overrides"] if item not in shared) or " ".join(line["overrides"])
