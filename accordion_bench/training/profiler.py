"""Profiler: where the time of a few steps goes, operator by operator, recorded by torch.profiler.

And part by part, thread by thread, from the run's own clock.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator

import torch

from accordion_bench.comm.clock import Clock
from accordion_bench.runs.folder import RunFolder

ROWS = 30  # of profile.txt
SILENT = "99"  # above all levels of Kineto's log


@contextlib.contextmanager
def profiled(steps: int, folder: RunFolder, clock: Clock) -> Iterator[Callable[[], None]]:
    """Record optimizer steps 2, 3, ..., `steps` of them: the first one warms up.

    Leaves in the run folder, for chrome://tracing or Perfetto, `trace.json` and `timeline.json`: data, compute,
    exposed, update and policy on the main thread, encode, comm and decode of each bucket on the exchange's. And
    `profile.txt`, the operators that took longest. What happens between those steps (evaluation, say) is in
    `trace.json`, too.

    Args:
        steps: how many; 0 = none, and nothing is written.
        folder: the run folder.
        clock: of the run.

    Yields:
        what is to be called after each step.
    """
    if not steps:
        yield lambda: None
        return
    from torch import profiler

    cuda = clock.cuda
    if not cuda:  # else it says of every recording that it has found no GPU, as an error
        os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"

    def write(recorded: torch.profiler.profile) -> None:
        for name in ("trace.json", "profile.txt", "timeline.json"):
            (folder.path / name).unlink(missing_ok=True)  # no link is followed
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
            clock.start()  # starting and writing a record is no part of a step

        yield step
