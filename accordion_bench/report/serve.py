"""Live page of unfinished and finished runs: python -m accordion_bench.report --serve RUNS.

Running runs are drawn as curves beside the others. The server is local: it listens on 127.0.0.1, answers only requests
for localhost, and serves two paths, the page and its version. No request path is ever used as a file path.
"""

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import zip_longest
from pathlib import Path
from typing import Any

from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.grouping import group
from accordion_bench.report.parallel import classes_apart, each
from accordion_bench.report.read import FILES, METRICS_FILE, Run, find_runs, no_runs, read_run
from accordion_bench.report.read.metrics_rows import summary_of
from accordion_bench.report.read.schema import problem, problem_of_rows
from accordion_bench.report.render.page import Section, page
from accordion_bench.report.render.write import group_sound_runs, left_out, texts
from accordion_bench.runs.untrusted import printable

PATIENCE, EPOCHS = 300, 3  # seconds, or epochs of the run, without a new row after which it no longer counts as running


def is_running(run: Run) -> bool:
    """Whether an unfinished run is still running, judged by the age of its last row.

    A run that was just killed counts as running for the longer of `PATIENCE` seconds and `EPOCHS` of its epochs.
    """
    if run.finished or run.last_epoch is None or "stopped_by" in run.summary:
        return False
    try:
        age = time.time() - os.stat(run.path if run.attached else run.path / METRICS_FILE).st_mtime
    except OSError:
        return False
    seconds = run.rows[-1].get("seconds")
    epoch = seconds / len(run.rows) if isinstance(seconds, int | float) else 0.0
    return age < max(PATIENCE, EPOCHS * epoch)


def so_far(run: Run) -> Run:
    """Return a running run as if its last row were its end; unchanged if its rows are invalid."""
    if run.attached:
        summary = run.summary
        why = problem_of_rows(_ends_now(run, summary), summary, run.rows, run.path.name)
    else:
        summary = summary_of({"workers": run.config.get("workers")}, run.rows)
        why = problem(_ends_now(run, summary), summary, run.rows, done=True)
    return run if why else replace(run, summary=summary, problem="")


def _ends_now(run: Run, summary: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run with as many epochs as it has rows."""
    return {**run.config, "epochs": summary["epochs"]}


def how_far(run: Run) -> str:
    """Return the progress: `running, epoch 7 of 30`."""
    return f"running, epoch {len(run.rows)} of {run.config.get('epochs', '?')}"


def arm_so_far(run: Run) -> Arm | None:
    """Return a running run as a separate arm, with its progress in the label; None if its rows are invalid."""
    try:
        arms, _ = group([so_far(run)])
    except Exception:  # an untrusted run must not break the report of the others
        return None
    return replace(arms[0], label=f"{arms[0].label}, seed {run.seed}: {how_far(run)}") if arms else None


def beside(parts: Sequence[Sequence[Arm]], running: Sequence[Arm]) -> list[list[Arm]]:
    """Return the running arms of each setting, followed by one list for each setting in which nothing has finished.

    Args:
        parts: finished arms of each setting.
        running: one arm per run, see `arm_so_far`.
    """
    settings = [_keys(arms[0]) for arms in parts]
    found: list[list[Arm]] = [[] for _ in parts]
    for arm in running:
        number = next((i for i, keys in enumerate(settings) if keys & _keys(arm)), len(settings))
        if number == len(settings):
            settings.append(_keys(arm))
            found.append([])
        found[number].append(arm)
    return found


def _keys(arm: Arm) -> set[tuple[str, ...]]:
    return set(map(tuple, json.loads(arm.setting)))


def live_page(
    ended: Sequence[Run], running: Sequence[Run], folders: Sequence[tuple[str, str]] = (), follow: str = ""
) -> str:
    """Return the page as one HTML text, without the slow figures for papers.

    Args:
        ended: finished runs, and unfinished ones that are no longer running.
        running: runs that are still running.
        folders: names of folders without a run, with the reason; see `read.no_runs`.
        follow: script that reloads the page when its runs change.
    """
    ended, parts, repeats, _ = group_sound_runs(ended, texts)
    absent = left_out(ended, repeats, folders)
    if running:
        lines = [f"{run.name} ({run.label}, seed {run.seed}): {how_far(run)}" for run in running]
        absent = {"Running, in no mean": lines, **absent}
    curves = beside(parts, [arm for run in running if (arm := arm_so_far(run))])
    sections = [Section(arms, [], others) for arms, others in zip_longest(parts, curves, fillvalue=())]
    return page(sections, [], absent, follow)


HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # accepted host names; other names that resolve to this address are refused
LEAST = 2.0  # least seconds between two polls of a page
SHARE = 10  # polls are at least this many build times apart, because the runs need the machine
WAIT = 10  # seconds after which an idle connection is closed
FOLLOW = Path(__file__).with_name("follow.js").read_text(encoding="utf-8")

Stamp = tuple[tuple[int, int] | None, ...]


class Followed:
    """Page of the runs under some paths, rebuilt when a run has changed.

    Args:
        paths: run folders, files of metrics rows, or folders that contain some, now or later.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths
        self._read: dict[Path, tuple[Stamp, Run]] = {}
        self._built, self._page, self._pause = "", "", LEAST
        self._alone = threading.Lock()

    def version(self) -> str:
        """Return a hash of the runs' files and of which of them are running."""
        with self._alone, classes_apart():
            return self._look()[0]

    def page(self) -> str:
        """Return the page of the current runs."""
        with self._alone, classes_apart():
            version, ended, running = self._look()
            if version != self._built:
                start = time.monotonic()
                # pause of the previous page: how long this one takes to build is not yet known
                known = f'"use strict";\nconst version = "{version}", pause = {1000 * self._pause:.0f};\n'
                self._page = live_page(ended, running, no_runs(self.paths), known + FOLLOW)
                self._built, self._pause = version, max(LEAST, SHARE * (time.monotonic() - start))
            return self._page

    def _look(self) -> tuple[str, list[Run], list[Run]]:
        """Return the version, the ended runs and the running ones; read only runs that have changed."""
        found = {path: stamp(path) for path in find_runs(self.paths)}
        changed = [path for path, now in found.items() if path not in self._read or self._read[path][0] != now]
        read = dict(zip(changed, each(read_run, changed, "reading"), strict=True))
        self._read = {path: (now, read[path]) if path in read else self._read[path] for path, now in found.items()}
        runs = [run for _, run in self._read.values()]
        goes_on = [is_running(run) for run in runs]
        seen = [(os.fspath(path), now, on) for (path, now), on in zip(found.items(), goes_on, strict=True)]
        version = hashlib.sha256(repr(seen).encode()).hexdigest()
        ended = [run for run, on in zip(runs, goes_on, strict=True) if not on]
        return version, ended, [run for run, on in zip(runs, goes_on, strict=True) if on]


def stamp(path: Path) -> Stamp:
    """Return modification times and sizes of the files of a run."""

    def of_file(file: Path) -> tuple[int, int] | None:
        try:
            seen = os.stat(file)
        except OSError:
            return None
        return seen.st_mtime_ns, seen.st_size

    return tuple(map(of_file, [path / name for name in (*FILES, "done")] if os.path.isdir(path) else [path]))


class Handler(BaseHTTPRequestHandler):
    """Request handler that serves the page and its version, and refuses all other requests."""

    server: "Server"
    timeout = WAIT

    def do_GET(self) -> None:
        """Send the page, its version, or a refusal."""
        answers = {"/": (self.server.followed.page, "html"), "/version": (self.server.followed.version, "plain")}
        if self.headers.get("Host", "").partition(":")[0].lower() not in NAMES:
            self._send(HTTPStatus.FORBIDDEN, f"The address must be http://localhost:{self.server.server_port}/.\n")
        elif self.path not in answers:
            self._send(HTTPStatus.NOT_FOUND, "Only the page / and its /version are served.\n")
        else:
            make, kind = answers[self.path]
            try:
                self._send(HTTPStatus.OK, make(), kind)
            except ConnectionError:
                raise
            except Exception as error:  # of untrusted runs or a full disk: keep serving
                why = printable(f"{type(error).__name__}: {error}", longest=500)
                self._send(HTTPStatus.INTERNAL_SERVER_ERROR, f"The page could not be built: {why}\n")

    def _send(self, status: HTTPStatus, text: str, kind: str = "plain") -> None:
        body = text.encode("utf-8")
        self.send_response(status)
        headers = {
            "Content-Type": f"text/{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": "frame-ancestors 'none'",  # in addition to the page's own
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Suppress the log of requests."""


class Server(ThreadingHTTPServer):
    """HTTP server of one page; port 0 selects any free port.

    Raises:
        OSError: the port is not available.
    """

    daemon_threads = True

    def __init__(self, followed: Followed, port: int) -> None:
        self.followed = followed
        super().__init__((HOST, port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error on stderr; ignore closed connections."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            print(printable(f"a request failed: {type(error).__name__}: {error}", longest=500), file=sys.stderr)


def serve(paths: Sequence[str], port: int) -> None:
    """Serve the page of some runs until Ctrl-C; port 0 selects any free port.

    Raises:
        ConfigError: the port is not available.
    """
    if not 0 <= port <= 65535:
        raise ValueRefused("--port", "a number from 0 (any free port) to 65535", port, 8765)
    try:
        server = Server(Followed(paths), port)
    except OSError as error:
        why = f"{port}: {error.strerror}"
        raise ConfigError(f"--port must be a free port of this machine, got {why}; type --port=0 for any") from None
    with server:
        server.followed.version()  # reads all runs before the first request waits for them
        print(f"http://localhost:{server.server_port}/ follows the runs; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nstopped: the page in the browser is no longer updated")
