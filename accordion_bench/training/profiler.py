"""Profile a few steps with torch.profiler per operator, and with the run's own clock per phase and thread."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator

import torch

from accordion_bench.comm.clock import Clock
from accordion_bench.runs.folder import RunFolder

ROWS = 30  # rows of profile.txt
SILENT = "99"  # above all log levels of Kineto


@contextlib.contextmanager
def profiled(steps: int, folder: RunFolder, clock: Clock) -> Iterator[Callable[[], None]]:
    """Profile `steps` optimizer steps, starting with step 2, after one warm-up step; yield a call for after each step.

    Writes three files to the run folder. `trace.json` and `timeline.json` are for chrome://tracing or Perfetto; the
    timeline has data, compute, exposed, update and policy on the main thread, and encode, comm and decode of each
    bucket on the exchange's thread. `profile.txt` lists the slowest operators. `trace.json` also includes work between
    those steps, such as evaluation.
    """
    if not steps:
        yield lambda: None
        return
    from torch import profiler

    cuda = clock.cuda
    if not cuda:  # otherwise Kineto logs an error that it has found no GPU
        os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"

    def write(recorded: torch.profiler.profile) -> None:
        for name in ("trace.json", "profile.txt", "timeline.json"):
            (folder.path / name).unlink(missing_ok=True)  # do not write through a link
        recorded.export_chrome_trace(str(folder.path / "trace.json"))
        table = recorded.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=60)
        (folder.path / "profile.txt").write_text(table, encoding="utf-8")
        (folder.path / "timeline.json").write_text(json.dumps({"traceEvents": clock.events()}), encoding="utf-8")
        clock.timeline = None

    activities = [profiler.ProfilerActivity.CPU, *[profiler.ProfilerActivity.CUDA] * cuda]
    schedule = profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)
    with profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write) as recorder:

        def step() -> None:
            if clock.timeline is None and recorder.step_num == 0:
                clock.timeline = []
            recorder.step()
            clock.start()  # exclude starting and writing the profile from the step's time

        yield step
