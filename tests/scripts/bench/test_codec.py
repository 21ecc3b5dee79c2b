"""What the bench of codecs computes of its times, and how it finds GRACE."""

import sys

import pytest
import torch

from accordion_bench.options.checks import ConfigError
from scripts.bench import codec
from scripts.studies import grace_codecs

FP16 = """
class FP16Compressor:
    def compress(self, tensor, name):
        return [tensor.half()], tensor.dtype

    def decompress(self, tensors, dtype):
        assert tensors[0].dtype != dtype
        return tensors[0].type(dtype)
"""


def timed(**seconds: list[float]) -> codec.Codec:
    return codec.Codec("one", {}, 1.0, seconds=seconds)


def test_a_ratio_is_of_throughputs_in_the_same_round():
    mine, other = timed(encode=[1.0, 2.0, 3.0], decode=[1.0, 2.0, 3.0]), timed(both=[1.0, 2.0, 3.0])
    assert codec.ratio(mine, other) == (0.5, 0.5, 0.5)
    assert codec.ratio(mine, other, size=4.0).median == 2.0
    assert codec.ratio(timed(both=[2.0]), timed(both=[1.0])).median == 0.5
    assert codec.verdict(0.5, 0.5) == "0.5 met" and codec.verdict(0.49, 0.5) == "0.5 MISSED"


def test_targets_and_twins_are_of_rows_that_there_are():
    from accordion_bench.options.conf_dir import yaml_files

    rows = {*yaml_files("compressor"), *codec.VARIANTS}
    assert {*codec.TARGETS, *grace_codecs.COMPRESSORS} <= rows
    aimed = {name for name, target in codec.TARGETS.items() if target.grace}
    assert aimed <= set(grace_codecs.COMPRESSORS)


def test_a_folder_without_grace_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--grace must be a checkout of GRACE .* got .*; type --grace FOLDER"):
        grace_codecs.check_checkout(str(tmp_path))


def test_grace_is_taken_from_the_folder(tmp_path, monkeypatch):
    folder = tmp_path / "grace_dl" / "dist" / "compressor"
    folder.mkdir(parents=True)
    (folder / "fp16.py").write_text(FP16)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "grace_dl"]:
        monkeypatch.delitem(sys.modules, name)
    grace_codecs.check_checkout(str(tmp_path))
    found = grace_codecs.twin("bf16", [torch.ones(3), torch.ones(2, 2)])
    assert found is not None
    both, payload = found
    both()
    assert payload == 14
    assert grace_codecs.twin("powersgd", [torch.ones(3)]) is None
    for name in [name for name in sys.modules if name.partition(".")[0] == "grace_dl"]:
        monkeypatch.delitem(sys.modules, name)
