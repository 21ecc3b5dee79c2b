"""Runs of version 0.2, which the archives of results hold, are read as today's."""

import tarfile
from pathlib import Path

import pytest

from accordion_bench.report import load_metrics, load_runs
from accordion_bench.report.__main__ import main as report
from accordion_bench.report.read import find_runs, read_run
from tests.kit.paths import ROOT

ARCHIVES = sorted(file.relative_to(ROOT / "results") for file in (ROOT / "results").rglob("runs.tar.xz"))


def unpacked(archive: Path, folder: Path, most: int) -> list[Path]:
    """Some runs of an archive, whose files lie beside those of their kind."""
    with tarfile.open(ROOT / "results" / archive) as packed:
        members = packed.getmembers()
        configs = [Path(member.name).parent for member in members if Path(member.name).name == "config.yaml"]
        chosen = {str(parent) for parent in configs[:most]}
        packed.extractall(folder, [m for m in members if str(Path(m.name).parent) in chosen], filter="data")
    return sorted(find_runs([folder]))


def test_each_claim_has_an_archive():
    assert {str(archive.parent) for archive in ARCHIVES} >= {f"claims/{claim}" for claim in ("gpt", "links", "rank")}
    assert len(ARCHIVES) == 10


@pytest.mark.parametrize("archive", ARCHIVES, ids=str)
def test_a_run_of_each_archive_is_read(archive, tmp_path):
    (folder,) = unpacked(archive, tmp_path, most=1)
    run = read_run(folder)
    assert run.problem == "" and run.environment["versions"]["accordion-bench"] == "0.2.0"
    assert [row["epoch"] for row in run.rows] == list(range(len(run.rows)))
    assert run.rows[-1]["wire_bytes"] == run.summary["wire_bytes"] > 0
    rows = load_metrics([str(folder)])
    assert list(rows["payload_bytes"]) == [row["payload_bytes"] for row in run.rows]


def test_a_report_shows_them(tmp_path, capsys):
    folders = unpacked(Path("claims/text/runs.tar.xz"), tmp_path, most=3)
    assert report([*map(str, folders), "--out", str(tmp_path / "report"), "--formats", "md"]) == 0
    printed = capsys.readouterr().out
    found = load_runs([str(folder) for folder in folders])
    assert len(found) == 3 and f"{found['metric'].mean():.1f} ± " in printed
    assert "Accordion (TopK 99/2 %)" in printed
