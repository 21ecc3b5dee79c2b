"""Progress output of the leader: a line per epoch, and a bar on a terminal or else a line at least every ten seconds.

Also notes when a run that should compress sends dense gradients.
"""

import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from tqdm import tqdm

from accordion_bench import output
from accordion_bench.comm.collectives import Comm
from accordion_bench.options.units import human_bytes, human_seconds
from accordion_bench.position import Position
from accordion_bench.runs.folder import log
from accordion_bench.runs.metrics import Metric

REFRESH_SECONDS = 0.5  # interval between updates of the bar
LINE_SECONDS = 8.0  # a step prints a line after this silence; within longer steps the heartbeat prints
PATIENCE = 9.5  # seconds without output after which the heartbeat prints
BAR = 12  # minimum width of the bar in columns
# fields of tqdm in order of importance, after metric and loss
COUNTS = ("{n_fmt}/{total_fmt}", "[{elapsed}<{remaining}, {rate_fmt}]")


class Heartbeat:
    """Prints the current activity, a clause, when nothing else has been printed for a while."""

    def __init__(self, shown: bool, what: str) -> None:
        self.what = what
        self._said = self._since = time.monotonic()
        self._end, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._beat, daemon=True) if shown else None

    def __enter__(self) -> "Heartbeat":
        self._said = self._since = time.monotonic()  # the silence before belongs to another activity
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()

    @property
    def silent(self) -> float:
        """Seconds since the last line."""
        return time.monotonic() - self._said

    def now(self, what: str) -> None:
        """Set the current activity."""
        self.what, self._since = what, time.monotonic()

    def say(self, line: str) -> None:
        """Print one line atomically."""
        with self._lock:
            self._said = time.monotonic()
            print(line, flush=True)

    def _beat(self) -> None:
        while not self._end.wait(max(PATIENCE - self.silent, 0.05)):
            if self.silent >= PATIENCE:
                self.say(f"still {self.what}, for {time.monotonic() - self._since:.0f} s")


class Progress:
    """Shows loss, metric, speed, bytes and remaining time.

    `samples_before` returns the training samples of all workers before a step of an epoch.
    """

    def __init__(self, leader: bool, samples_before: Callable[[int], int]) -> None:
        self.barred = leader and output.on_a_terminal()
        self.samples_before = samples_before
        self.bar: tqdm | None = None
        self.lines = leader and not self.barred
        self.heart = Heartbeat(self.lines, "before the first step")
        self.evaluated: tuple[Metric, float] | None = None
        self._next = self._speed = 0.0

    def begin(self, total: int, done: int) -> None:
        """Open the bar, or start to print lines."""
        self.heart.__enter__()
        self.began, self.done = time.monotonic(), done
        self._epoch_began, self._skipped = self.began, 0
        if self.barred:
            # only `_draw` draws the bar, because it fits the text to the terminal
            own = {"initial": done, "unit": "step", "leave": False, "mininterval": math.inf}
            self.bar = tqdm(total=total, ncols=output.columns(), **own)

    def lead(self, position: Position) -> None:
        """Start to print in this process, after the leader was lost."""
        self.barred = output.on_a_terminal()
        self.lines = not self.barred
        self.heart = Heartbeat(self.lines, "in a step")
        self.begin(position.step + position.steps_left, position.step)
        self.begin_epoch(position)

    def begin_epoch(self, position: Position) -> None:
        """Note the start of an epoch, or its continuation after a resume."""
        self._epoch_began, self._skipped = time.monotonic(), self.samples_before(position.step_in_epoch)
        self.heart.now(f"in a step of epoch {position.epoch + 1} of {position.epochs}")

    def step(self, position: Position, loss_sum: Tensor, comm: Comm) -> None:
        """Report a step: update the bar at most twice a second, or print a line after a long silence.

        `loss_sum` is the training loss of this epoch, summed over steps, of each local worker.
        """
        if self.bar is None and not self.lines:
            return
        self._speed = self._samples_per_second(position)
        if self.bar is not None:
            self.bar.total = position.step + position.steps_left  # changes when policies change the batch size
            self.bar.update()
            if time.monotonic() >= self._next:
                self._draw(_mean(loss_sum, position, comm), comm)
        else:
            epoch, step, steps = position.epoch + 1, position.step_in_epoch, position.steps_per_epoch
            if self.heart.silent >= LINE_SECONDS:
                told = ", ".join([f"loss {_mean(loss_sum, position, comm):.4f}", *self._figures(position, comm)])
                self.heart.say(f"epoch {epoch} of {position.epochs}, step {step} of {steps}: {told}")
            doing = f"in step {step + 1} of {steps} of epoch" if step < steps else "evaluating epoch"
            self.heart.now(f"{doing} {epoch} of {position.epochs}")

    def _draw(self, loss: float, comm: Comm) -> None:
        """Draw the metric, as many other figures as fit, and the bar if there is room."""
        bar = self.bar
        assert bar is not None
        self._next = time.monotonic() + REFRESH_SECONDS
        parts = [f"loss={loss:.3f}", *COUNTS, f"sent={_payload(comm)}"]
        if self.evaluated:
            metric, value = self.evaluated
            parts.insert(0, f"{metric.name}={metric.show(value)}")
        bar.ncols = width = output.columns()

        def drawn(shown: str) -> str:
            return tqdm.format_meter(**{**bar.format_dict, "ncols": None, "bar_format": shown})

        shown, used = fitting(parts, width, drawn)
        bar.bar_format = f"{shown} {{percentage:3.0f}}%|{{bar}}|" if width - used > BAR else shown
        bar.refresh()

    def epoch_over(self, metric: Metric, value: float, loss: float, position: Position, comm: Comm) -> None:
        """Report metric and mean training loss at the end of an epoch; the position is that before the next one."""
        self.evaluated = metric, value
        begin = f"epoch {position.epoch} of {position.epochs}: {metric.name} {metric.show(value)}"
        told = [begin, f"loss {loss:.4f}", *self._figures(position, comm)]
        if self.lines:
            self.heart.say(", ".join(told))
        elif self.bar is not None:
            self._draw(loss, comm)
            tqdm.write(fitting(told, output.columns())[0], file=sys.stdout)

    def _samples_per_second(self, position: Position) -> float:
        samples = self.samples_before(position.step_in_epoch) - self._skipped
        return samples / max(time.monotonic() - self._epoch_began, 1e-9)

    def _figures(self, position: Position, comm: Comm) -> list[str]:
        if position.step == self.done:  # resumed at the end of an epoch, whose line is printed again
            return [f"payload {_payload(comm)}"]
        left = (time.monotonic() - self.began) / max(position.step - self.done, 1) * position.steps_left
        return [f"{self._speed:,.0f} samples/s", f"payload {_payload(comm)}", f"{human_seconds(left)} left"]

    def close(self) -> None:
        """Remove the bar and stop printing."""
        self.heart.__exit__()
        if self.bar is not None:
            self.bar.close()


def fitting(parts: Sequence[str], width: int, drawn: Callable[[str], str] = str) -> tuple[str, int]:
    """Join as many parts as fit into a line, the most important first and at least one; return text and width.

    `drawn` returns the printed form of a text.
    """
    for count in range(len(parts), 0, -1):
        text = ", ".join(parts[:count])
        if (used := len(drawn(text))) <= width or count == 1:
            return text, used
    return "", 0


def _payload(comm: Comm) -> str:
    return human_bytes(comm.ledger.columns()["payload_bytes"]) if comm.ledger.complete else "not counted"


def _mean(loss_sum: Tensor, position: Position, comm: Comm) -> float:
    """Return the training loss of this epoch so far, averaged over steps and local workers."""
    return loss_sum.sum().item() / (max(position.step_in_epoch, 1) * comm.local_workers)


class DenseNotes:
    """Reports dense steps of a compressed run: before the first step, in run.log when they start, and their number."""

    def __init__(self, leader: bool) -> None:
        self.leader = leader
        self.steps: Counter[str] = Counter()  # number of dense steps, by sentence that describes them
        self._told: set[str] = set()

    def predict(self, sentences: Iterable[str]) -> None:
        """Print warnings before the run."""
        for sentence in dict.fromkeys(filter(None, sentences)):
            if self.leader:
                print(f"warning: {sentence}", file=sys.stderr, flush=True)

    def note(self, sentence: str, step: int) -> None:
        """Count a step described by `sentence`; "" = the step is compressed."""
        if not sentence:
            return
        self.steps[sentence] += 1
        if self.leader and sentence not in self._told:
            log.warning("from step %d on: %s", step, sentence)
            self._told.add(sentence)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints."""
        return {"went_dense": dict(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self.steps = Counter(state["went_dense"])
