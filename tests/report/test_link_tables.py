"""Tables of runs that have really communicated, from made-up runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from accordion_bench.report.compare import columns
from accordion_bench.report.compare.beside import against_model, on_the_link, tables
from accordion_bench.report.compare.grouping import group
from accordion_bench.report.read.load import Run
from accordion_bench.report.render import captions, write
from tests.report.test_figures import run
from tests.report.test_report import no_figures  # noqa: F401

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


def arms(*runs):
    return group(runs)[0]


def test_error_is_the_mean_over_seeds():
    found = arms(measured(0, seconds=10.0, modelled_seconds=11.0), measured(1, seconds=10.0, modelled_seconds=10.6))
    heading, row = against_model(found).cells
    assert heading[-3:] == ["measured", "modelled", "error"]
    assert row == ["dense", "2", "100 Mbit/s and 100 µs per round", "10 s", "10.8 s", "+8.0 ± 25.4 %"]
    (one,) = arms(measured(seconds=10.0, modelled_seconds=9.68))
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
    assert len(against_model(arms(measured(**options))).cells) == 1 + shown


def test_bytes_of_the_interface_beside_the_ledgers():
    found = arms(
        measured(0, wire_bytes=900_000, control_wire_bytes=100_000, link_sent_bytes=1_030_000),
        measured(1, wire_bytes=900_000, control_wire_bytes=100_000, link_sent_bytes=1_010_000),
    )
    _, row = on_the_link(found).cells
    assert row == ["dense", "2", "900 kB", "100 kB", "1.02 MB", "1.020"]
    assert len(on_the_link(arms(measured(link_sent_bytes=None))).cells) == 1


def test_they_stand_in_every_form_of_the_report(tmp_path, no_figures):  # noqa: F811
    sent = {"control_wire_bytes": 0, "link_sent_bytes": 1_000_000}
    text = write.write([measured(**sent)], tmp_path).text
    for page in (text, (tmp_path / "report.html").read_text(), (tmp_path / "README.md").read_text()):
        assert "Modelled against measured" in page and "Bytes on the link" in page
    assert tables(arms(run())) == []
    assert "Bytes on the link" not in write.write([run()], tmp_path).text


def test_ddp_measures_its_communication_inside_the_time():
    ddp = measured(engine="ddp", network="1gbit", seconds=3.0, comm_seconds=None, exposed_seconds=None)
    ours = measured(compressor="powersgd", network="1gbit", seconds=3.3)
    both = arms(ours, ddp)
    assert "share a process" not in captions.time(both)
    assert columns.tidy(both)["seconds_over_dense"].tolist() == [pytest.approx(1.1), 1.0]
