"""Command line `python -m accordion_bench OVERRIDES`: compose with Hydra, call `train.run`; subcommand `demo`."""

import faulthandler
import functools
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import Any

from accordion_bench import __version__, output
from accordion_bench.advising import gpus
from accordion_bench.advising.gpus import AskedDevice
from accordion_bench.cli import command_line, demo, help, launchers
from accordion_bench.options.advice import explain
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import add_conf_dir, conf_dir, import_from_here
from accordion_bench.options.override import translate_renamed_overrides
from accordion_bench.processes.environment import launched, sleep_while_waiting
from accordion_bench.processes.interrupt import handle, handling

# Hydra is imported inside main, because spawned processes import this module

# errors of joblib and submitit for a process that ended without an exception
LOST = ("TerminatedWorkerError", "BrokenProcessPool", "UncompletedJobError")
LEAVE = 5.0  # timeout in seconds for a failed process of several to end


def main() -> None:
    """Run the command line. Exit status: 0, 1 (fault of the program), 2 (the user can fix it), 128 + signal."""
    output.protect()
    status, answered = _main()
    if status := output.finish(status, *(output.ANSWER if answered else ())):
        raise SystemExit(status)


def _main() -> tuple[int, bool]:
    """Return the exit status, and whether the printed text is all that was requested."""
    if sys.platform == "win32":
        print("accordion_bench must run on Linux or macOS, got Windows; run it inside WSL 2", file=sys.stderr)
        return 2, True
    if sys.argv[1:2] == ["demo"]:
        return demo.main(sys.argv[2:]), False
    sleep_while_waiting()
    import_from_here()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # let Hydra raise errors, which `_tell` reports
    if launched():  # otherwise torch's own stack traces hide the cause
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if sys.argv[1:2] == [command_line.SHOW]:
        from accordion_bench.cli import show

        return show.main(sys.argv[2:]), True
    sys.argv[1:] = in_order(command_line.quoted(translate_renamed_overrides(sys.argv[1:])))
    if sys.argv[1:] == ["--version"]:
        print(f"accordion_bench {__version__}")
        return 0, True
    if (status := _answered(command_line.without_ours(sys.argv[1:]))) is not None:
        return status, True
    asked, device = next((flag for flag in command_line.OURS if flag in sys.argv[1:]), ""), AskedDevice()
    failures: list[int] = []
    usual = signal.getsignal(signal.SIGINT)
    # torch's imports would swallow a KeyboardInterrupt
    importing = _leave if usual is signal.default_int_handler else usual
    with handling(importing, (signal.SIGINT,)), tempfile.TemporaryDirectory() if asked else nullcontext("") as folder:
        try:
            if asked == command_line.DRY_RUN:
                device, sys.argv[1:] = gpus.split(sys.argv[1:])
            if asked:
                sys.argv[1:] = command_line.for_dry_run(sys.argv[1:], folder)
            _hydra_main(failures, functools.partial(handle, usual, (signal.SIGINT,)), asked, device)
        except KeyboardInterrupt as stop:
            print(str(stop) or "stopped", file=sys.stderr)
            failures.append(128 + getattr(stop, "signum", signal.SIGINT))
        except Exception as error:
            failures.append(_tell(error))
            if launched():
                from accordion_bench.processes import rendezvous

                rendezvous.publish_start_failure(error)
    from accordion_bench.cli import sweep

    failures.append(sweep.close())
    if max(failures) and launched():
        # a thread may wait for a lost peer forever, and an exception cannot reach it
        nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(LEAVE, exit=True, file=nowhere)
    return max(failures), bool(asked)


def _answered(arguments: list[str]) -> int | None:
    """Print help, or refuse unreadable arguments, before anything is imported; None = continue with Hydra."""
    try:
        if not help.asked(arguments):
            command_line.refuse_unreadable(arguments)
            return None
        print(help.text(arguments))
    except ConfigError as refused:
        print(refused, file=sys.stderr)
        return 2
    return 0


def _leave(signum: int, frame: FrameType | None) -> None:
    os._exit(128 + signum)


def _tell(error: Exception, cell: str = "") -> int:
    """Print an error in one line if the user can fix it, otherwise with its traceback; return the exit status."""
    if type(error).__name__ in LOST:
        print(f"a process of the sweep was killed (out of memory?): {str(error).splitlines()[0]}", file=sys.stderr)
        print("type the same command with resume_sweep=true to run what is missing", file=sys.stderr)
        return 1
    failed = type(error).__name__ == "RankFailed"  # its message is the traceback of another process
    sentence = str(error) if failed else launchers.explain_launcher(error) or explain(error)
    if sentence is None:
        traceback.print_exception(error)
    elif sentence:
        print(cell + sentence, file=sys.stderr)
    return 1 if failed or sentence is None else 2


def _hydra_main(failures: list[int], imported: Callable[[], object], asked: str, device: AskedDevice) -> None:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import DictConfig, OmegaConf

    from accordion_bench.cli import sweep
    from accordion_bench.config import compose

    compose.register_resolvers()
    sweep.needs_data = not asked

    @hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")
    def task(composed: DictConfig) -> float:
        hydra_config = HydraConfig.get()
        sweep.limit_threads(hydra_config.launcher)
        from accordion_bench.config import value_checks
        from accordion_bench.config.compose import as_written, resolve
        from accordion_bench.run_config import RunConfig

        compose.register_resolvers()  # this may be a process that a launcher has started
        for source in hydra_config.runtime.config_sources:
            if source.provider == "command-line":  # --config-dir
                add_conf_dir(source.path)
        overrides = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)
        assert isinstance(overrides, list)
        unnamed = hydra_config.mode == RunMode.MULTIRUN and not sweep.current.side_by_side
        cell = f"{' '.join(overrides)}: " if unnamed else ""
        cfg: dict[str, Any] = {}
        wrong: Exception | None = None
        try:
            command_line.refuse_unclear(overrides, hydra_config.sweeper, hydra_config.runtime.choices)
            cfg = resolve(composed, hydra_config.runtime.choices, overrides)
            if cfg["resume"] is None and not launched():  # otherwise `train` checks, after other checks
                value_checks.refuse_wrong(RunConfig.from_dict(cfg))
            if asked == command_line.PRINT:
                print(f"---\n# {cell.rstrip(': ')}\n{as_written(cfg)}" if cell else as_written(cfg), end="")
                return float("nan")
        except Exception as error:
            wrong = error
        else:
            from accordion_bench import train  # and torch
            from accordion_bench.cli import dry_run

            imported()

        def run(note: dict[str, Any]) -> float:
            if wrong is not None:
                raise wrong
            # an experiment may sweep an option that only some of its arms use, so that equal cells train once
            once = "experiment" in cfg["choices"]
            return train.run(cfg, typed(overrides), note, sweep.current.name, once)

        def tell(error: Exception, cell: str = cell) -> int:  # record the error, so that the other cells still run
            failures.append(_tell(error, cell))
            return failures[-1]

        if asked:
            try:
                if wrong is not None:
                    raise wrong
                metric = dry_run.run(cfg, typed(overrides), cell, device)
                return sweep.metric_for_search(hydra_config.sweeper, metric)
            except Exception as error:
                return tell(error)
        if OmegaConf.select(composed, "setup.experiment") == "smoke" and wrong is None:  # derives its own cells
            from accordion_bench.cli import smoke

            return smoke.run(cfg, typed(overrides), tell)
        return sweep.metric_for_search(hydra_config.sweeper, sweep.run_cell(overrides, run, tell))

    task()


def in_order(arguments: list[str]) -> list[str]:
    """Sort flags first, as argparse requires, and arms last, because an arm overrides its experiment."""
    flags, words = command_line.split_flags(arguments)
    return [*flags, *sorted(words, key=lambda word: word.startswith("+arm="))]


def typed(overrides: list[str]) -> dict[str, str]:
    """Return the keys on the command line with their values: `+compressor.rank=2` has the key compressor.rank."""
    return {key.lstrip("+~").split("@")[0]: value for key, _, value in (item.partition("=") for item in overrides)}


if __name__ == "__main__":
    main()
