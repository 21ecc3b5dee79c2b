"""Letters of any language: quoted where text is free, named where one looks like another or like none."""

import re
import shlex

import pytest

from accordion_bench import __main__ as command
from accordion_bench.cli import command_line
from accordion_bench.options.checks import ConfigError
from accordion_bench.runs.folder import RunFolder
from tests.kit import tiny

REFUSED = {
    "compressor=\u0422opK": "got U+0422, cyrillic capital letter te; type compressor=topk",
    "compressor=topk\u200b": "got U+200B, zero width space; type compressor=topk",
    "\u0441ompressor=topk": "got U+0441, cyrillic small letter es; type compressor=topk",
    "\u201ccompressor=topk\u201d": "got U+201C, left double quotation mark; type compressor=topk",
    "compressor=\u00a0topk": "got U+00A0, no-break space; type compressor=topk",
    "epochs\uff1d3": "got U+FF1D, fullwidth equals sign; type epochs=3",
    "epochs=\uff13": "got U+FF13, fullwidth digit three; type epochs=3",
    "compressor.r\u0430nk=2": "got U+0430, cyrillic small letter a; type compressor.rank=2",
    "+experiment=accordion/t\u0430ble1_resnet18": "; type +experiment=accordion/table1_resnet18",
    "\u2013dry-run": "got U+2013, en dash; type --dry-run",
    "\u2014\u2014multirun": "got U+2014, em dash; type --multirun",
}


@pytest.mark.parametrize("word", REFUSED, ids=ascii)
def test_a_letter_that_is_not_what_it_looks_like(word):
    with pytest.raises(ConfigError, match=re.escape(REFUSED[word])) as refused:
        command_line.refuse_unreadable([word])
    told = str(refused.value)
    assert "\n" not in told and "\u200b" not in told and "\u00a0" not in told


@pytest.mark.parametrize("words", [["--config-dir", "FOLDER"], ["--config-dir=FOLDER"], ["paths.runs=FOLDER"]])
def test_folders_may_be_in_any_language(words, tmp_path):
    folder = tmp_path / "\u65e5\u672c"
    folder.mkdir()
    command_line.refuse_unreadable([word.replace("FOLDER", str(folder)) for word in words])


def test_free_text_is_quoted_for_hydra():
    def quoted(word: str) -> str:
        (found,) = command_line.quoted([word])
        return found

    assert quoted("paths.runs=/a(b) [1]/\u65e5'x") == "paths.runs='/a(b) [1]/\u65e5\\'x'"
    assert quoted("network.latency=50\u00b5s") == "network.latency='50\u00b5s'"
    assert quoted("label=ours (10 %), b=2") == "label='ours (10 %), b=2'"
    assert quoted("label=4") == "label='4'" and quoted("label=~x") == "label='~x'"
    assert quoted("label=H ${sync.period}") == "label='H ${sync.period}'"
    stay = ["label=null", "label='4'", "label="]
    stay += [
        "paths.runs=/a b/c",
        "paths.runs=/a,/b",
        "paths.runs='/\u65e5'",
        "paths.runs=choice(a,b)",
        "paths.runs=${x}",
    ]
    stay += ["compressor=t(o)p", "adaptive=[alq,qsr]", "--config-dir=/\u65e5", "paths.runs", "dataset.files=[a,b]"]
    assert command_line.quoted(stay) == stay


def test_a_home_that_no_shell_writes_out():
    with pytest.raises(ConfigError, match=re.escape("written out, got ~/x; type paths.data=$HOME/x")):
        command_line.refuse_unreadable(["paths.data=~/x"])


def test_a_run_in_such_a_folder(tmp_path, monkeypatch, capsys):
    """And what it says when it is stopped goes on, typed as it stands."""
    runs = tmp_path / "with space (1)" / "\u65e5\u672c"
    monkeypatch.setenv("TINY_TROUBLE", "stop:0:8")
    monkeypatch.setattr("sys.argv", ["accordion_bench", *tiny.typed(runs, "epochs=2")])
    with pytest.raises(SystemExit):
        command.main()
    monkeypatch.delenv("TINY_TROUBLE")
    words = shlex.split(capsys.readouterr().err.partition("continue with: python -m ")[2])
    monkeypatch.setattr("sys.argv", words)
    command.main()
    assert RunFolder(tiny.only(runs)).done
