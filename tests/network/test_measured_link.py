"""A measured link in a file."""

import json
from pathlib import Path

import pytest

from accordion_bench.network.collective_costs import KINDS
from accordion_bench.network.links import LinkCost, MeasuredLink, link_table, read_measured_link, write_measured_link
from accordion_bench.options.checks import ValueRefused

COSTS = {kind: LinkCost(1e-3 / n, 1e8 / n, 125_000.0 * n, 1e-9, 0.03) for n, kind in enumerate(KINDS, start=1)}
FLAT = MeasuredLink(4, 4, "gloo", "cpu", COSTS)
LAYERED = MeasuredLink(8, 2, "nccl", "cuda", COSTS, inside=COSTS, between=COSTS, between_together=COSTS)


@pytest.mark.parametrize("link", [FLAT, LAYERED])
def test_a_link_is_read_as_it_was_written(link, tmp_path):
    file = tmp_path / "made" / "link.json"
    write_measured_link(file, link, [{"collective": "all_reduce"}])
    assert read_measured_link(file) == link
    assert json.loads(file.read_text())["rows"] == [{"collective": "all_reduce"}]


def refusal(file: Path) -> str:
    with pytest.raises(ValueRefused) as refused:
        read_measured_link(file)
    said = str(refused.value)
    assert said.startswith("probe must be a file ") and "\n" not in said
    assert said.endswith("; type probe=link.json, which python -m accordion_bench.advise --probe writes")
    assert str(file) in said
    return said


def test_what_is_no_file_is_refused(tmp_path):
    assert "which does not exist" in refusal(tmp_path / "absent.json")
    assert "which is no file" in refusal(tmp_path)


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "which is no JSON"),
        ("[" * 100_000, "which is no JSON"),
        ("[]", "which says nothing of a link"),
        ('{"format": 1}', "which says nothing of a link"),
        ('{"format": 2, "kinds": {}}', "which has format 2 where this version reads 1"),
    ],
)
def test_other_files_are_refused(text, why, tmp_path):
    file = tmp_path / "link.json"
    file.write_text(text)
    assert why in refusal(file)


@pytest.mark.parametrize("name", ["bandwidth", "latency", "burst", "cpu_seconds_per_byte", "error"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1", "1" + 400 * "0", '"fast"', "null", "true"])
def test_numbers_that_no_link_has_are_refused(name, value, tmp_path):
    said = written(tmp_path)
    said["kinds"]["all_gather"][name] = "HERE"
    file = tmp_path / "link.json"
    file.write_text(json.dumps(said).replace('"HERE"', value))
    assert f"a file in which kinds.all_gather.{name} is a number" in refusal(file)


@pytest.mark.parametrize(
    "keys, value, why",
    [
        (["kinds", "all_reduce", "bandwidth"], 0, "kinds.all_reduce.bandwidth is a number above 0"),
        (["between", "all_reduce"], 3, "between.all_reduce is a group of numbers"),
        (["inside"], {}, "inside is a group of all_reduce, all_gather, all_to_all"),
        (["workers"], 1, "workers is an integer of at least 2"),
        (["machines"], 3, "machines is a divisor of workers=8"),
        (["machines"], 9, "machines is an integer of at most 8"),
        (["backend"], "mpi", "backend is one of gloo, nccl"),
        (["device"], None, "device is one of cpu, cuda"),
    ],
)
def test_what_no_probe_writes_is_refused(keys, value, why, tmp_path):
    said = node = written(tmp_path)
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    file = tmp_path / "link.json"
    file.write_text(json.dumps(said))
    assert why in refusal(file)


def written(folder: Path) -> dict:
    """What the file of a link with two levels says."""
    write_measured_link(folder / "link.json", LAYERED, [])
    return json.loads((folder / "link.json").read_text())


def test_the_table_has_a_line_for_each_kind_and_level():
    lines = link_table(LAYERED).splitlines()
    assert len(lines) == 2 + 4 * len(KINDS)
    assert "| all_reduce | 1.000 | 100.0 | 125 | 1.00 | 3 % |" in lines
    assert len(link_table(FLAT).splitlines()) == 2 + len(KINDS)
