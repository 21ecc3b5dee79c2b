"""Progress on the leader: a line per epoch; below it a bar on a terminal, else one line at least every ten seconds.

And notes of a run that was to compress and travels dense.
"""

import math
import sys
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
from accordion_bench.training.heartbeat import Heartbeat

REFRESH_SECONDS = 0.5  # of the bar
LINE_SECONDS = 8.0  # after which a step tells its own line; a longer one leaves that to the heartbeat
BAR = 12  # columns that a bar takes at least
# of tqdm, in the order of their importance, after metric and loss
COUNTS = ("{n_fmt}/{total_fmt}", "[{elapsed}<{remaining}, {rate_fmt}]")


class Progress:
    """Loss, metric, speed, bytes, time left.

    Args:
        leader: whether this process tells anything.
        samples_before: training samples of all workers in the steps of an epoch before one.
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
        """Open the bar, or start to tell lines."""
        self.heart.__enter__()
        self.began, self.done = time.monotonic(), done
        self._epoch_began, self._skipped = self.began, 0
        if self.barred:
            # drawn by `_draw` alone, which looks how much fits
            own = {"initial": done, "unit": "step", "leave": False, "mininterval": math.inf}
            self.bar = tqdm(total=total, ncols=output.columns(), **own)

    def lead(self, position: Position) -> None:
        """This process tells from here on, in the place of one that is lost."""
        self.barred = output.on_a_terminal()
        self.lines = not self.barred
        self.heart = Heartbeat(self.lines, "in a step")
        self.begin(position.step + position.steps_left, position.step)
        self.begin_epoch(position)

    def begin_epoch(self, position: Position) -> None:
        """Training goes on in an epoch, maybe in its middle."""
        self._epoch_began, self._skipped = time.monotonic(), self.samples_before(position.step_in_epoch)
        self.heart.now(f"in a step of epoch {position.epoch + 1} of {position.epochs}")

    def step(self, position: Position, loss_sum: Tensor, comm: Comm) -> None:
        """One more step; the bar's figures are refreshed twice a second, a line is due when nothing was said for long.

        Args:
            position: where training stands.
            loss_sum: training loss of this epoch, summed over steps, of each local worker.
            comm: whose ledger tells what was sent.
        """
        if self.bar is None and not self.lines:
            return
        self._speed = self._samples_per_second(position)
        if self.bar is not None:
            self.bar.total = position.step + position.steps_left  # larger batches mean fewer steps
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
        """The metric first, then as much as the terminal is wide, and a bar where there is room."""
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
        """An epoch has been evaluated, and is over.

        Args:
            metric, value: of the evaluation.
            loss: mean training loss.
            position: where training stands, before the next epoch.
            comm: whose ledger tells what was sent.
        """
        self.evaluated = metric, value
        begin = f"epoch {position.epoch} of {position.epochs}: {metric.name} {metric.show(value)}"
        told = [begin, f"loss {loss:.4f}", *self._figures(position, comm)]
        if self.lines:
            self.heart.say(", ".join(told))
        elif self.bar is not None:
            self._draw(loss, comm)
            tqdm.write(fitting(told, output.columns())[0], file=sys.stdout)

    def _samples_per_second(self, position: Position) -> float:
        """Of all workers, in this epoch."""
        samples = self.samples_before(position.step_in_epoch) - self._skipped
        return samples / max(time.monotonic() - self._epoch_began, 1e-9)

    def _figures(self, position: Position, comm: Comm) -> list[str]:
        left = (time.monotonic() - self.began) / max(position.step - self.done, 1) * position.steps_left
        return [f"{self._speed:,.0f} samples/s", f"payload {_payload(comm)}", f"{human_seconds(left)} left"]

    def close(self) -> None:
        """Remove the bar, say nothing any more."""
        self.heart.__exit__()
        if self.bar is not None:
            self.bar.close()


def fitting(parts: Sequence[str], width: int, drawn: Callable[[str], str] = str) -> tuple[str, int]:
    """As many of the parts as fit into a line, the first one in any case; and how wide that is.

    Args:
        parts: what can be said, most important first.
        width: of the line.
        drawn: what is printed for a text.
    """
    for count in range(len(parts), 0, -1):
        text = ", ".join(parts[:count])
        if (used := len(drawn(text))) <= width or count == 1:
            return text, used
    return "", 0


def _payload(comm: Comm) -> str:
    """Bytes of one worker so far."""
    return human_bytes(comm.ledger.columns()["payload_bytes"]) if comm.ledger.complete else "not counted"


def _mean(loss_sum: Tensor, position: Position, comm: Comm) -> float:
    """Training loss of this epoch so far, mean over steps and local workers."""
    return loss_sum.sum().item() / (max(position.step_in_epoch, 1) * comm.local_workers)


class DenseNotes:
    """Says what travels dense: before the first step, in run.log where it begins, and how many steps it lasted.

    Args:
        leader: whether this process tells anything.

    Attributes:
        steps: by sentence.
    """

    def __init__(self, leader: bool) -> None:
        self.leader = leader
        self.steps: Counter[str] = Counter()
        self._told: set[str] = set()

    def predict(self, sentences: Iterable[str]) -> None:
        """Warn before the run of what will be."""
        for sentence in dict.fromkeys(filter(None, sentences)):
            if self.leader:
                print(f"warning: {sentence}", file=sys.stderr, flush=True)

    def note(self, sentence: str, step: int) -> None:
        """A step under a plan of which this is true; "" = nothing travels dense."""
        if not sentence:
            return
        self.steps[sentence] += 1
        if self.leader and sentence not in self._told:
            log.warning("from step %d on: %s", step, sentence)
            self._told.add(sentence)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"went_dense": dict(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.steps = Counter(state["went_dense"])
