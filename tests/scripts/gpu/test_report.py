"""The report of a GPU, on a machine that has none."""

import json
import sys

import pytest

from accordion_bench.tensors.kernels import on_gpu
from scripts.bench import codec as bench_codec
from scripts.gpu import report, sections
from scripts.gpu.sections import Section, Setting


def reported(monkeypatch, *typed: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_report", *typed])
    monkeypatch.setattr(sections.torch.cuda, "is_available", lambda: False)
    return report.main()


def test_what_needs_cuda_says_so_in_one_line(tmp_path, monkeypatch):
    only = [name for name in sections.SECTIONS if name != "counts"]  # what is counted takes seconds: test_scripts
    assert reported(monkeypatch, "--smallest", "--out", str(tmp_path), "--only", *only) == 0
    page, told = (tmp_path / "README.md").read_text(), json.loads((tmp_path / "report.json").read_text())
    assert page.count(sections.ABSENT) == len(only) == 7
    assert {"command", "commit", "gpus", "driver", "versions", "seed", "n"} <= told["header"].keys()
    assert all(told[name]["found"] == {"skipped": sections.ABSENT} for name in only)


def test_launches_are_held_against_what_is_stated(tmp_path, monkeypatch):
    stated = {("none", "ResNet-50"): (1, 0)}
    monkeypatch.setattr(sections, "stated", lambda page: stated)
    setting = Setting("", True, 2, 0, tmp_path, ["none"])
    section = sections.counts(setting)
    assert section.failed and "1 / 0, EXCEEDED" in section.lines[-1]
    stated["none", "ResNet-50"] = (12, 1)
    assert not sections.counts(setting).failed


def test_a_section_that_breaks_is_told_and_stops_no_other(tmp_path, monkeypatch):
    def broken(setting: Setting) -> Section:
        raise RuntimeError("no kernel image\nand much more")

    monkeypatch.setitem(sections.SECTIONS, "codecs", broken)
    assert reported(monkeypatch, "--smallest", "--out", str(tmp_path), "--only", "codecs", "memory") == 1
    page = (tmp_path / "README.md").read_text()
    assert "next to a copy, FAILED\n\nRuntimeError: no kernel image\n\n## Memory\n" in page


def test_measurements_of_a_gpu_come_from_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for typed in ([], ["--device", "cuda"], ["--rounds", "1", "--out", "x"]):
        with pytest.raises(SystemExit):
            reported(monkeypatch, *typed)
    said = capsys.readouterr().err
    assert "type --out FOLDER" in said and "type --smallest" in said and "type --rounds 2" in said
    assert not list(tmp_path.iterdir())


def test_a_codec_in_triton_is_timed_beside_torch(tmp_path, monkeypatch):
    triton = []

    def codec(name, *_):
        return bench_codec.Codec(name, {"both": lambda: triton.append(on_gpu.usable([]))}, 1.0)

    monkeypatch.setattr(on_gpu, "usable", lambda xs: True)
    monkeypatch.setattr(bench_codec, "codec", codec)
    section = sections.codecs(Setting("cpu", True, 2, 0, tmp_path, ["qsgd"]))
    assert [row[1] for row in section.facts] == ["copy", "qsgd", "qsgd, by torch"]
    assert set(triton) == {True, False} and on_gpu.usable([])
