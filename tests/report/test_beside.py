"""Tables beside the comparison: time to a target, and what really was sent and took time."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from accordion_bench.report.compare import columns
from accordion_bench.report.compare.beside import (
    against_model,
    beside_tables,
    on_the_link,
    race,
    reached,
    to_target,
)
from accordion_bench.report.compare.grouping import group
from accordion_bench.report.read import Run, read_run
from accordion_bench.report.render import captions, write
from accordion_bench.report.render.page import to_target as drawn_to_target
from tests.kit.figures import figures_of
from tests.report.test_figures import arms_of, run
from tests.report.test_report import (
    no_figures,  # noqa: F401
    run_folder,
)

FIGURE = ["time_to_target"]
LOOK = {"accuracy": 0.7, "seconds": 1.0, "modelled_seconds": None, "payload_bytes": 10}


def arms(target=0.8, shared=False):
    common = {"target": target, "shared": shared}
    dense = [run(seed=seed, end=0.9, **common) for seed in (0, 1)]
    faster = [run("topk", seed=seed, end=1.2, cost=0.1, **common) for seed in (0, 1)]
    late = [run("powersgd", seed=seed, end=0.81 if seed else 0.7, cost=0.1, **common) for seed in (0, 1)]
    never = [run("signsgd", seed=seed, end=0.5, cost=0.03, **common) for seed in (0, 1)]
    return arms_of(*dense, *faster, *late, *never)


def test_the_first_epoch_that_reached_it_counts():
    for arm in arms():
        found = reached(arm, 0.8, "seconds")
        rows = [next((row for row in one.rows if row["accuracy"] >= 0.8), None) for one in arm.runs]
        assert found.seconds == [row["seconds"] for row in rows if row]
        assert found.payload == [row["payload_bytes"] for row in rows if row]


def test_the_table_says_how_many_reached_it_and_how_fast_next_to_dense():
    heading, (names, *rows), note = to_target(arms())
    assert heading == "Time to 80.00 %" and "measured" in note
    assert names[1:] == ["reached", "time", "of dense", "payload"]
    by_reached = {row[1]: row for row in rows}
    assert set(by_reached) == {"2 of 2", "1 of 2", "0 of 2"} and by_reached["0 of 2"][2:] == ["–"] * 3
    dense, topk = rows[0], next(row for row in rows if "TopK" in row[0])
    assert dense[3] == "1.00" and float(topk[3]) < 1
    times = {arm.label: reached(arm, 0.8, "seconds").seconds for arm in arms()}
    ratio = math.fsum(times[topk[0]]) / math.fsum(times[dense[0]])
    assert float(topk[3]) == pytest.approx(ratio, abs=0.005)


def test_time_is_modelled_where_workers_share_a_process():
    assert race(arms(shared=True)).column == "modelled_seconds" and "modelled on" in to_target(arms(shared=True)).note
    assert race(arms()).column == "seconds"


def behind(bandwidth, name, *runs):
    """The same runs on another modelled network."""
    return [
        replace(
            one,
            config={
                **one.config,
                "network": {"bandwidth": bandwidth, "latency": 5e-5},
                "choices": {**one.config["choices"], "network": name},
            },
        )
        for one in runs
    ]


def test_each_arm_is_compared_with_dense_on_its_own_network():
    dense = [run(seed=seed, end=0.9, target=0.8, shared=True) for seed in (0, 1)]
    topk = [run("topk", seed=seed, end=1.2, cost=0.1, target=0.8, shared=True) for seed in (0, 1)]
    slow = [
        replace(one, rows=[{**row, "modelled_seconds": 9 * row["modelled_seconds"]} for row in one.rows])
        for one in dense
    ]
    fast, slower = behind(1e9, "ethernet_1g", *dense), behind(1e8, "ethernet_100m", *slow, *topk)
    table = to_target(arms_of(*fast, *slower))
    shares = {row[0]: row[3] for row in table.cells[1:]}
    of_topk = next(float(share) for label, share in shares.items() if "TopK" in label)
    assert of_topk < 0.2 and list(shares.values()).count("1.00") == 2
    assert "modelled on ethernet_1g and ethernet_100m" in table.note
    alone = to_target(arms_of(*fast, *slower[2:]))
    assert next(row[3] for row in alone.cells if "TopK" in row[0]) == "–"


def test_times_that_are_not_shown_to_differ_or_do_not_compare_have_no_share():
    found = arms_of(*[run(name, seed=seed, end=0.9, target=0.8) for name in ("none", "topk") for seed in (0, 1)])
    late = [
        replace(one, rows=[{**row, "seconds": row["seconds"] * (1 + one.seed)} for row in one.rows])
        for one in found[1].runs
    ]
    noisy = [found[0], replace(found[1], runs=tuple(late))]
    assert to_target(noisy).cells[2][3] == "no difference shown"
    elsewhere = tuple(replace(one, environment={"threads": i}) for i, one in enumerate(found[1].runs))
    assert to_target([found[0], replace(found[1], runs=elsewhere)]).cells[2][3] == "–"


def test_an_arm_whose_time_is_not_known_has_reached_it_all_the_same():
    """A third-party hook, say, beside runs whose workers share a process: nothing of it is modelled."""
    runs = [run(name, seed=seed, target=0.8, shared=True) for name in ("none", "topk") for seed in (0, 1)]
    for one in runs[2:]:
        one.rows[:] = [{**row, "modelled_seconds": None} for row in one.rows]
    found = arms_of(*runs)
    assert to_target(found).cells[2] == ["TopK 10 %", "2 of 2", "–", "–", "3 MB"]
    assert [row["beside"] for row in drawn_to_target(found)["rows"]] == ["", "time not known"]
    (axes,) = figures_of(found, only=FIGURE)["time_to_target"].axes
    assert [text.get_text() for text in axes.texts][1] == "time not known"


def test_without_a_common_target_there_is_nothing_to_tell():
    mixed = arms_of(run(target=0.8), run("topk", target=0.7))
    assert race(mixed) is None and to_target(mixed).heading == ""
    assert figures_of(mixed, only=FIGURE) == figures_of(arms(target=1.5), only=FIGURE) == {}


def test_the_figure_has_a_row_for_each_arm_in_the_order_of_the_table_with_its_number():
    found = arms()
    (axes,) = figures_of(found, only=FIGURE)["time_to_target"].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [arm.label for arm in found]
    seconds = [of.seconds for of in race(found).arms]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([math.fsum(s) / len(s) for s in seconds if s])
    texts = [text.get_text() for text in axes.texts]
    assert len(texts) == 4 and [text for text in texts if text.endswith(" s")] == texts[:2]
    assert texts[2].endswith("s, reached by 1 of 2") and texts[3] == "not reached"


@pytest.mark.parametrize(
    "every, said", [(1, "end of the first epoch that reached"), (10, "first look within an epoch, or end of one, that")]
)
def test_page_and_figure_say_when_it_was_looked_for(every, said):
    found = arms_of(*(run(name, target=0.8) for name in ("none", "topk")))
    for arm in found:
        arm.config["target_every"] = every
    (note,) = figures_of(found, only=FIGURE)["time_to_target"].texts
    assert said in drawn_to_target(found)["note"] and said in note.get_text().replace("\n", " ")
    assert said in to_target(found).note


@pytest.mark.parametrize("looks, fine", [([LOOK], True), ("now", False), ([1], False), ([{"accuracy": "a"}], False)])
def test_looks_of_another_kind_are_a_sentence(looks, fine, tmp_path):
    path = run_folder(tmp_path)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").open()]
    rows[0]["looks"] = looks
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problem = read_run(path).problem
    assert problem == "" if fine else "whose looks is of the wrong type" in problem


CUSTOM = {"_target_": "accordion_bench.network.link_model.Network", "bandwidth": 1e8, "latency": 1e-4}


def measured(
    seed=0, lab=None, network="custom", interface: str | None = "eth0", engine="exchange", compressor="none", **summary
) -> Run:
    """A finished run of one worker per process."""
    made = run(compressor, seed=seed)
    config = {**made.config, "network": CUSTOM, "comm": {"interface": interface, "engine": engine}}
    config["choices"] = {**made.config["choices"], "network": network}
    environment = {} if lab is None else {"netlab": lab}
    path = Path(f"{compressor}-{network}-{seed}")
    return replace(
        made, path=path, config=config, environment=environment, summary={**made.summary, "workers": 4, **summary}
    )


def arms_beside(*runs):
    return group(runs)[0]


def test_error_is_the_mean_over_seeds():
    found = arms_beside(
        measured(0, seconds=10.0, modelled_seconds=11.0), measured(1, seconds=10.0, modelled_seconds=10.6)
    )
    heading, row = against_model(found).cells
    assert heading[-3:] == ["measured", "modelled", "error"]
    assert row == ["dense", "2", "100 Mbit/s and 100 µs per round", "10 s", "10.8 s", "+8.0 ± 25.4 %"]
    (one,) = arms_beside(measured(seconds=10.0, modelled_seconds=9.68))
    assert against_model([one]).cells[1][-1] == "-3.2 %"


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, True),
        ({"interface": None}, False),
        ({"network": "100mbit"}, False),  # of which nobody knows whether it is the link's
        ({"network": "100mbit", "lab": {"rate": 1e8, "hosts": 4}}, True),
        ({"network": "100mbit", "lab": {"rate": 1e9, "hosts": 4}}, False),
        ({"network": "100mbit", "lab": {"rate": None}}, False),
        ({"network": "100mbit", "lab": "strange"}, False),
        ({"comm_seconds": None}, False),  # workers share a process
    ],
)
def test_only_where_the_network_describes_the_link(options, shown):
    assert len(against_model(arms_beside(measured(**options))).cells) == 1 + shown


def test_bytes_of_the_interface_beside_the_ledgers():
    found = arms_beside(
        measured(0, wire_bytes=900_000, control_wire_bytes=100_000, link_sent_bytes=1_030_000),
        measured(1, wire_bytes=900_000, control_wire_bytes=100_000, link_sent_bytes=1_010_000),
    )
    _, row = on_the_link(found).cells
    assert row == ["dense", "2", "900 kB", "100 kB", "1.02 MB", "1.020"]
    assert len(on_the_link(arms_beside(measured(link_sent_bytes=None))).cells) == 1


def test_they_stand_in_every_form_of_the_report(tmp_path, no_figures):  # noqa: F811
    sent = {"control_wire_bytes": 0, "link_sent_bytes": 1_000_000}
    text = write.write([measured(**sent)], tmp_path).text
    for page in (text, (tmp_path / "report.html").read_text(), (tmp_path / "README.md").read_text()):
        assert "Modelled against measured" in page and "Bytes on the link" in page
    assert beside_tables(arms_beside(run())) == []
    assert "Bytes on the link" not in write.write([run()], tmp_path).text


def test_ddp_measures_its_communication_inside_the_time():
    ddp = measured(engine="ddp", network="1gbit", seconds=3.0, comm_seconds=None, exposed_seconds=None)
    ours = measured(compressor="powersgd", network="1gbit", seconds=3.3)
    both = arms_beside(ours, ddp)
    assert "share a process" not in captions.time(both)
    assert columns.tidy(both)["seconds_over_dense"].tolist() == [pytest.approx(1.1), 1.0]
