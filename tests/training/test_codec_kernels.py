"""What a user hears of the kernels of a run's codecs, and what its folder says of them."""

import pytest

from accordion_bench import train
from accordion_bench.processes.placement import Placement
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.tensors import kernels
from accordion_bench.tensors.kernels import on_gpu
from accordion_bench.training import codec_kernels
from tests.kit import composed, tiny

SENTENCE = "type pip install 'accordion-bench[fast]'"


def headers(monkeypatch, where: Placement, *overrides: str) -> list[int]:
    """How often the header says what to type, with numba and without."""
    cfg = composed.cfg(*overrides)
    told = []
    for there in (True, False):
        monkeypatch.setattr(kernels, "installed", lambda there=there: there)
        told.append(train.header(RunConfig.from_dict(cfg), where, composed.parts_of({**cfg, "workers": 4})))
    return [header.count(SENTENCE) for header in told]


def test_a_run_that_could_be_faster_is_told_so_once(monkeypatch):
    assert headers(monkeypatch, Placement("simulated", 1, 4), "compressor=bf16") == [0, 1]


def test_so_is_one_on_a_gpu(monkeypatch):
    parts = composed.parts_of({**composed.cfg("compressor=qsgd"), "workers": 4})
    told = []
    for there in (True, False):
        monkeypatch.setattr(on_gpu, "installed", lambda there=there: there)
        told.append((codec_kernels.computed_with("cuda", parts), codec_kernels.missing("cuda", parts)))
    said = "without triton the compressor uses torch, with the same codes but slower; type pip install triton"
    assert told == [("triton", ""), ("torch", said)]


@pytest.mark.parametrize("overrides, device", [
    (["compressor=none"], "cpu"),
    (["compressor=bf16"], "cuda"),
    (["compressor=bf16", "comm.engine=ddp", "comm=gloo"], "cpu"),
])  # fmt: skip
def test_a_run_without_codecs_that_have_kernels_is_told_nothing(monkeypatch, overrides, device):
    assert headers(monkeypatch, Placement("gloo", 2, 2, device=device), *overrides) == [0, 0]


def test_a_run_that_goes_on_with_other_kernels_is_warned(tmp_path, monkeypatch, capsys):
    cfg = composed.run(tmp_path, "compressor=bf16", "epochs=1", "schedule=constant", "checkpoint.every=1")
    monkeypatch.setattr(kernels, "installed", lambda: False)
    train.run(cfg)
    folder = RunFolder(tiny.only(tmp_path))
    environment = folder.read_json("environment.json")
    assert environment["kernels"] == "torch" and environment["versions"]["numba"]
    told = {}
    for epochs, there in ((2, False), (3, True)):
        monkeypatch.setattr(kernels, "installed", lambda there=there: there)
        capsys.readouterr()
        train.run({**cfg, "epochs": epochs, "resume": str(folder.path)}, {"epochs": epochs})
        told[there] = capsys.readouterr().err
    warning = "this run's codecs have used torch and continue with numba"
    assert warning in told[True] and warning not in told[False]
    assert warning in (folder.path / "run.log").read_text()


def test_what_is_not_known_is_no_warning():
    assert codec_kernels.other_than("", "torch") == codec_kernels.other_than("numba", "") == ""
    assert codec_kernels.other_than("numba", "torch").endswith(f"; {SENTENCE} to continue as before")
