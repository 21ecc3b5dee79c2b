"""Files of a run folder are read within limits, and nothing waits."""

import json
import os

import pytest

from accordion_bench.options.checks import ConfigError
from accordion_bench.runs import reuse, saving, untrusted
from accordion_bench.runs.folder import RunFolder
from tests.report.hostile.corpus import LAUGHS

DEEP = "[" * 200_000


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "folder", "device"):
        with pytest.raises(untrusted.Refused, match=f"^{name} is no regular file$"):
            untrusted.read_bytes(tmp_path / name)
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    assert untrusted.read_bytes(tmp_path / "link") == b"x"


def test_a_large_file_is_not_read(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert untrusted.read_bytes(tmp_path / "file", most=5) == untrusted.read_bytes(tmp_path / "file", most=None)
    with pytest.raises(untrusted.Refused, match=r"^file has 5 bytes; at most 4 are read$"):
        untrusted.read_bytes(tmp_path / "file", most=4)


@pytest.mark.parametrize(
    ("text", "deep"), [("[" * 50 + "]" * 50, False), ("[" * 51 + "]" * 51, True), ('["' + DEEP + '"]', False)]
)
def test_depth_is_counted_outside_of_texts(text, deep):
    if deep:
        with pytest.raises(untrusted.Refused, match="nested deeper than 50"):
            untrusted.parse_json(text)
    else:
        assert untrusted.parse_json(text) == json.loads(text)


def test_many_brackets_beside_each_other_are_not_deep():
    assert len(untrusted.parse_json("[" + ",".join(["[]"] * 5000) + "]")) == 5000


def test_an_honest_alias_is_read(tmp_path):
    (tmp_path / "config.yaml").write_text("a: &id001\n- 1\n- 2\nb: *id001\n")
    assert untrusted.read_yaml(tmp_path / "config.yaml") == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize("content", [DEEP, LAUGHS, "a: &a [*a]", "!!bool x", "seed: 0x" + "f" * 500])
def test_a_configuration_that_cannot_be_read_is_a_sentence_to_all_who_read_it(content, tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    (folder.path / "config.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.yaml must be as the run has written it"):
        folder.read_config()
    assert reuse._decisive(folder.path / "config.yaml", 0) is None


def test_a_manifest_that_is_too_deep_is_damaged(tmp_path):
    (tmp_path / saving.FILE).write_text(DEEP)
    with pytest.raises(saving.Damaged, match=r"manifest\.json cannot be read"):
        saving.read_manifest(tmp_path)


def test_a_sweep_beside_a_pipe_waits_for_nobody(tmp_path):
    (tmp_path / "runs" / "strange").mkdir(parents=True)
    os.mkfifo(tmp_path / "runs" / "strange" / "config.yaml")
    cfg = {"seed": 0, "epochs": 1, "batch_size": 1, "paths": {"runs": str(tmp_path / "runs")}}
    assert reuse.find_earlier(cfg) is None
