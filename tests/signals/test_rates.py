"""Which learning rates policies see at the end of an epoch."""

from accordion_bench.adaptive.accordion import Accordion
from accordion_bench.runs.folder import RunFolder
from tests.kit import tiny
from tests.kit.local import trained

COSINE = ["schedule=cosine", "schedule.warmup_epochs=0"]


def seen(tmp_path, monkeypatch, *overrides: str) -> list[tuple[float, float, float]]:
    """Of each epoch of a run: its learning rate, the one that it ends with, the next epoch's."""
    rates = []
    update = Accordion.update

    def noting(self, signals, plan):
        rates.append((signals.lr, signals.end_lr, signals.next_lr))
        return update(self, signals, plan)

    monkeypatch.setattr(Accordion, "update", noting)
    trained(tmp_path, "compressor=powersgd", "adaptive=accordion", *overrides)
    return rates


def reasons(tmp_path) -> list[str | None]:
    rows = RunFolder(tiny.only(tmp_path)).read_metrics()
    return [row["decisions"].get("accordion", {}).get("reason") for row in rows]


def test_a_cosine_down_to_0_is_no_drop(tmp_path, monkeypatch):
    rates = seen(tmp_path, monkeypatch, *COSINE)
    assert "learning-rate drop" not in reasons(tmp_path)
    starts = [lr for lr, _, _ in rates]
    assert [following for _, _, following in rates] == [*starts[1:], starts[-1]]  # nothing follows the last epoch
    assert starts[3] < 0.5 * starts[2]
    assert all(abs(end - start) < 1e-12 for (_, end, _), start in zip(rates, starts[1:], strict=False))


def test_a_milestone_is_a_drop(tmp_path, monkeypatch):
    rates = seen(tmp_path, monkeypatch)
    dropped = [reason == "learning-rate drop" for reason in reasons(tmp_path)]
    assert dropped == [following < lr for lr, _, following in rates] == [False, True, True, False]
    assert all(end == lr for lr, end, _ in rates)


def test_no_batch_grows_after_the_last_epoch(tmp_path):
    trained(tmp_path, *COSINE, "adaptive=grow_batch", "dataset.train_size=960", "batch_size=2")
    rows = RunFolder(tiny.only(tmp_path)).read_metrics()
    assert [bool(row["decisions"]) for row in rows] == [True, True, True, False]
