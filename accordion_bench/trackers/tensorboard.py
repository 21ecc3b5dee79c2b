"""TensorBoard tracker."""

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accordion_bench.options.checks import ConfigError
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.runs.folder import RunFolder
from accordion_bench.runs.untrusted import masked
from accordion_bench.trackers.tracker import FIGURES, Tracker, scalars, send_figures

# column of metrics.jsonl -> group; other columns are grouped by their suffix, nested ones by their key
TRAIN = ("epoch", "lr", "train_loss", "loss_scale", "compression_error")
OF_ENDS = {"_seconds": "time", "seconds": "time", "_bytes": "comm", "rounds": "comm", "_floats": "comm"}
HPARAMS = ("metric", "best_metric", "wire_bytes", "payload_bytes", "seconds", "modelled_seconds")  # of summary.json


@with_options
class TensorBoard(Tracker):
    """Tracker that writes rows, the loss of each step, options and figures to the run folder's `tensorboard/`.

    Tags are grouped in `train/`, `eval/`, `comm/` and `time/`; nested values keep their key: `plan/`, `norms/`.
    """

    figures: bool = option(FIGURES, default=True)

    by_step = True
    chosen_as = {"tensorboard": Choice("rows, losses of each step and figures, in the run folder's tensorboard/")}

    def __post_init__(self) -> None:
        super().__post_init__()
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("tracker=tensorboard needs the package tensorboard; type pip install tensorboard")

    def begin(self, cfg: dict[str, Any], folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.cfg, self.folder = masked(cfg), folder
        rows = RunFolder(folder).read_metrics()
        # a resumed run repeats the steps after its checkpoint, so purge them
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=rows[-1]["step"] + 1 if rows else None)
        for name, told in (("tags", ", ".join(cfg.get("tags") or [])), ("note", cfg.get("note"))):
            if told:
                self.writer.add_text(name, told)

    def log_losses(self, step: int, losses: Sequence[float]) -> None:
        for i, loss in enumerate(losses, step - len(losses) + 1):
            self.writer.add_scalar("train/loss_by_step", loss, i)

    def log(self, row: dict[str, Any]) -> None:
        for name, value in scalars(row).items():
            if name != "step":
                self.writer.add_scalar(grouped(name), value, row["step"])
        self.writer.flush()

    def finish(self, summary: dict[str, Any]) -> None:
        from accordion_bench.report.read import flat

        known = scalars(summary)
        ends = {f"hparam/{name}": known[name] for name in HPARAMS if math.isfinite(known.get(name, math.nan))}
        options = {key: value for key, value in flat(self.cfg).items() if isinstance(value, bool | int | float | str)}
        self.writer.add_hparams(options, ends, run_name=".")
        if self.figures:
            send_figures(self.folder, summary, self._send, "TensorBoard")
        self.writer.close()

    def _send(self, drawn: Sequence[Path]) -> None:
        import numpy as np
        from PIL import Image

        for png in drawn:
            pixels = np.asarray(Image.open(png).convert("RGB"))
            self.writer.add_image(f"figures/{png.stem}", pixels, dataformats="HWC")


def grouped(name: str) -> str:
    """Return the tag of a column: `time/compute_seconds`, `comm/wire_bytes`, `eval/accuracy`."""
    if "/" in name:
        return name
    ends = (group for end, group in OF_ENDS.items() if name.endswith(end))
    return f"{'train' if name in TRAIN else next(ends, 'eval')}/{name}"
