"""What `ab.attach` and `ab.local` return."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accordion_bench.attaching import rows, state
from accordion_bench.attaching.attachment import Attachment
from accordion_bench.attaching.timeline import Timeline
from accordion_bench.options import checks


class Attached(Attachment):
    """A training loop whose gradients, or differences of parameters, are exchanged by a method of this package.

        join()            gradients are the exchanged ones from here on, and may be clipped
        no_sync()         around all backward passes of a step but the last
        note(loss)        the loss of this step, for policies that look at it
        end_epoch()       policies that decide by epoch do so now
        consensus()       parameters and buffers to evaluate; evaluating(): the model has them within
        metrics(**own)    a row for the report;  print(comm): the same in short
        timeline()        records steps for advice on other links
        state_dict()      of this rank;  load_state_dict(state)
        detach()          the end; a `with` block does so, too

    See `Attachment`.
    """

    def metrics(self, **own: Any) -> dict[str, Any]:
        """The columns of a bench run's metrics.jsonl, for a file with one JSON object per line and epoch.

        Bytes are of one worker, cumulative; of groups that exchange side by side, what this process has seen since the
        last `end_epoch`. Times are of this process. `modelled_` columns put the training on the link `network`.

        Args:
            own: further columns, such as accuracy=0.91, train_loss=0.3; `seed`, `model`, `dataset`, `batch_size` and
                `epochs` tell reports of the training, before what `attach` was passed.
        """
        return rows.metrics_row(self, own)

    def __str__(self) -> str:
        return rows.told(self)

    def timeline(self, steps: int = 20, path: str | Path | None = "timeline.json") -> None:
        """Record the coming steps; the leader writes a JSON file after the last of them.

        For each tensor when its gradient is ready, for each bucket what its exchange took, for a step its parts;
        medians in seconds.

        Args:
            steps: to record, after the one that is running.
            path: of the file.
        """
        checks.integer("steps", steps, at_least=1, instead=20)
        recording = Timeline(self.clock, steps, Path(path) if path is not None and self.comm.leader else None)

        def recorded() -> None:
            found = recording.found(self.axis.specs, rows.description(self), rows.bucket_rows(self))
            recording.write(found)

        self.recording, self.when_recorded = recording, recorded

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on bit for bit, besides its model and optimizer; every rank saves its own.

        Residuals and factors by parameter name, the scheme, the policies, the plan, bytes and times so far. It loads
        with `torch.load(..., weights_only=True)`. Training goes on as if nothing had been asked.

        Raises:
            ConfigError: gradients of a step are under way.
        """
        return state.state_of(self)

    def load_state_dict(self, state_dict: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on from `state_dict()`: of this rank, or a list of all ranks' where the number of workers has changed.

            comm = ab.attach(model, optimizer, ...)    # or ab.local; a plain module gets rank 0's parameters here
            model.load_state_dict(...)                 # this rank's own where workers take local steps
            optimizer.load_state_dict(...)
            comm.load_state_dict(...)

        Raises:
            ConfigError: it is of other methods, another model or another rank.
        """
        state.put_state(self, state_dict)
