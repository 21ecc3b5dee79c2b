"""Bytes of a third-party hook: marked as not counted wherever others have numbers, never 0, never dense's."""

import csv
import math
from dataclasses import replace

import pytest

from accordion_bench.methods.labels import is_dense, label
from accordion_bench.report.compare.arms import Arm, baseline, dense_command
from accordion_bench.report.compare.beside import on_the_link, to_target
from accordion_bench.report.compare.columns import tidy
from accordion_bench.report.compare.verdicts import verdicts
from accordion_bench.report.read import Run
from accordion_bench.report.read.schema import problem
from accordion_bench.report.render import captions, looks, write
from accordion_bench.report.render.tables import cells
from tests.kit.figures import figures_of
from tests.report.test_figures import arms_of, run
from tests.report.test_report import no_figures  # noqa: F401

HOOK = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks:bf16_compress_hook"
NULL = ("payload_bytes", "wire_bytes", "rounds", "modelled_seconds", "modelled_comm_seconds", "comm_seconds")
BY_BYTES = ["accuracy_bytes", "accuracy_wire", "tradeoff", "accuracy_modelled", "comparison"]


def hooked(seed: int = 0, hook: str = HOOK, sent: int | None = 4_000_000, **options) -> Run:
    """A finished run whose gradients a hook has exchanged."""
    made = run(seed=seed, **options)
    without = dict.fromkeys(NULL)
    config = {**made.config, "comm": {"engine": "ddp", "hook": hook, "hook_state": None, "hook_options": None}}
    summary = {**made.summary, **without, "control_wire_bytes": 30, "link_sent_bytes": sent}
    return replace(made, config=config, rows=[{**row, **without} for row in made.rows], summary=summary)


def both(**options) -> list[Arm]:
    """Dense, a compressor, and a hook."""
    seeds = (0, 1)
    found = [run(seed=seed, **options) for seed in seeds] + [
        run("topk", seed=seed, cost=0.1, **options) for seed in seeds
    ]
    return arms_of(*found, *(hooked(seed, **options) for seed in seeds))


def of_hook(arms: list[Arm]) -> Arm:
    (arm,) = [arm for arm in arms if not arm.counted]
    return arm


def test_the_label_is_the_functions_name_and_it_is_no_baseline():
    arm = of_hook(arms := both())
    assert arm.label == "DDP, bf16_compress_hook"
    assert not is_dense(arm.config) and baseline(arm, arms).label == "dense"
    assert len({look.colour + look.marker for look in looks(arms)}) == 3
    assert label({**arm.config, "comm": {"hook": ["strange"]}}) == "DDP, ['strange']"


def test_options_tell_two_states_of_one_hook_apart():
    runs = [hooked(), hooked()]
    for made, rank in zip(runs, (1, 2), strict=True):
        made.config["comm"]["hook_options"] = {"matrix_approximation_rank": rank}
    told = [arm.label for arm in arms_of(*runs)]
    assert told == [f"DDP, bf16_compress_hook, matrix_approximation_rank={rank}" for rank in (1, 2)]


def test_the_table_and_its_footnote_say_it():
    arms = both()
    heading, *rows = cells(tidy(arms))
    row = dict(zip(heading, next(row for row in rows if row[0] == of_hook(arms).label), strict=True))
    assert row["payload"] == row["sent per worker"] == "not counted" and row["rounds"] == row["modelled time"] == "–"
    assert any("not counted" not in cell for cell in rows[0])
    (told,) = captions.uncounted(arms)
    assert told.startswith("Not counted: DDP, bf16_compress_hook (4 MB by its interface).")
    assert "(no interface measured)" in captions.uncounted(arms_of(run(), hooked(sent=None)))[0]
    assert captions.uncounted(arms_of(run())) == []


def test_no_ratio_is_made_of_it():
    arms = both()
    row = tidy(arms).set_index("arm").loc[of_hook(arms).label]
    for column in ("payload_bytes", "wire_bytes", "rounds", "modelled_seconds"):
        assert math.isnan(row[column]), column
    assert all(math.isnan(row[f"{name}_times_less"]) for name in ("payload", "wire", "rounds"))
    assert row["link_sent_bytes"] == 4_000_000
    told = next(said for said in verdicts(arms) if said.startswith("DDP"))
    assert "bytes not counted; accuracy" in told and "–" not in told and "comm.hook" not in told


def test_what_the_interface_has_sent_stands_beside_it():
    _, row = on_the_link([of_hook(both())]).cells
    assert row == ["DDP, bf16_compress_hook", "2", "not counted", "30 B", "4 MB", "–"]


def test_time_to_a_target_has_no_payload():
    rows = {row[0]: row for row in to_target(both(target=0.6)).cells}
    assert rows["DDP, bf16_compress_hook"][1] == "2 of 2" and rows["DDP, bf16_compress_hook"][4] == "not counted"
    assert "MB" in rows["dense"][4]


@pytest.mark.parametrize("name", BY_BYTES)
def test_a_figure_by_bytes_leaves_it_out_and_says_so(name):
    figure = figures_of(both(), only=[name])[name]
    text = " ".join(text.get_text() for text in figure.findobj(lambda part: hasattr(part, "get_text")))
    text = " ".join(text.split())
    assert "Not counted, so not shown: DDP, bf16_compress_hook." in text
    labels = [entry for legend in figure.legends for entry in legend.get_texts()]
    labels += [entry for axes in figure.axes if axes.get_legend() for entry in axes.get_legend().get_texts()]
    assert not any("hook" in entry.get_text() for entry in labels)


def test_rows_of_arms_have_it_at_the_end():
    (axes,) = figures_of(both(), only=["forest"])["forest"].axes
    names = [name.get_text() for name in axes.get_yticklabels()]
    assert names[0].startswith("dense") and "TopK" in names[1] and names[-1].endswith("not counted")


def test_hooks_alone_are_drawn_against_epochs_and_not_on_an_empty_axis_of_bytes():
    found = figures_of(arms_of(hooked(), hooked(hook="mine:own")))
    (axes,) = found["comparison"].axes
    assert axes.get_xlabel() == "training [epochs]" and len(axes.get_lines()) > 0
    assert all(name.get_text().endswith("not counted") for name in found["forest"].axes[0].get_yticklabels())
    assert not {"accuracy_bytes", "accuracy_wire", "tradeoff", "accuracy_modelled"} & found.keys()


def test_every_form_of_the_report_says_it(tmp_path, no_figures):  # noqa: F811
    text = write.write([run(), hooked()], tmp_path).text
    for page in (text, *((tmp_path / name).read_text() for name in ("report.html", "README.md", "table.tex"))):
        assert "not counted" in page and "Not counted: DDP" in page
    rows = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [row["payload_bytes"] for row in rows if row["arm"].startswith("DDP")] == [""]


def test_a_row_without_bytes_is_whole_only_where_a_hook_has_sent_them():
    made, plain = hooked(), run()

    def said(config: dict, rows: list) -> str:
        return problem(config, made.summary | {"epochs": len(rows)}, rows, True)

    assert said(made.config, made.rows) == ""
    assert said(plain.config, made.rows) == "metrics.jsonl has a row without payload_bytes"
    claimed = [{**row, "wire_bytes": 0} for row in made.rows]
    assert said(made.config, claimed) == "metrics.jsonl has a row with bytes of a hook, which are not counted"


def test_the_dense_twin_of_a_hook_has_none():
    typed = f"accordion_bench comm=gloo comm.engine=ddp comm.hook={HOOK} comm.hook_options={{a:1}} seed=0"
    (arm,) = arms_of(replace(hooked(), environment={"command": typed}))
    assert dense_command(arm).endswith("accordion_bench compressor=none adaptive=none comm=gloo comm.engine=ddp seed=0")
