"""Text from files and from Python's documentation: what becomes of the words, and what is refused."""

import itertools
import os
from pathlib import Path

import pytest
import torch

from accordion_bench import train
from accordion_bench.datasets import pydocs, text_files
from accordion_bench.datasets.pydocs import PyDocs
from accordion_bench.datasets.text import EOS
from accordion_bench.datasets.text_files import ByteFiles, TextFiles, read_words
from accordion_bench.options.checks import ConfigError
from tests.forward.test_text import cfg_for
from tests.kit.helpers import yaml_node
from tests.kit.paths import SHARED

CPU = torch.device("cpu")

TOY = {"train": "a b a\nb c\n\na <unk>\n", "valid": "c b\n", "test": "a zebra\nc\n"}


def toy(root: Path, texts: dict[str, str] = TOY, names: str = "toy.{}.txt") -> Path:
    (root / "toy").mkdir(parents=True)
    for split, text in texts.items():
        (root / "toy" / names.format(split)).write_text(text, encoding="utf-8")
    return root


def toy_files(**options) -> TextFiles:
    given = {"folder": "toy", "files": ["*train*", "*valid*", "*test*"], "vocabulary": 5, "train_words": 11}
    return TextFiles(**{**given, "bptt": 2, **options})


def test_files(tmp_path):
    """Words by frequency, equal ones by their letters; every line ends with <eos>; strange words are <unk>."""
    words = toy_files().load(str(toy(tmp_path)), 0, CPU).words
    vocabulary = [EOS, "a", "b", "<unk>", "c"]
    said = {split: [vocabulary[i] for i in ids.tolist()] for split, ids in words.items()}
    assert said["train"] == f"a b a {EOS} b c {EOS} {EOS} a <unk> {EOS}".split()
    assert said["valid"] == f"c b {EOS}".split() and said["test"] == f"a <unk> {EOS} c {EOS}".split()
    assert all(ids.dtype == torch.int64 for ids in words.values())


def test_lower_case(tmp_path):
    texts = {**TOY, "train": TOY["train"].replace("a b", "A B"), "test": "A C\n"}
    data = toy_files(lower=True).load(str(toy(tmp_path, texts)), 0, CPU)
    assert data.words["test"].tolist() == [1, 4, 0]
    with pytest.raises(ConfigError) as refused:
        toy_files().load(str(tmp_path), 0, CPU)
    assert str(refused.value) == "dataset.vocabulary must be what is in toy, 7, got 5; type dataset.vocabulary=7"


@pytest.mark.parametrize("split, text", [("train", ""), ("test", "\n \n")])
def test_a_file_without_words_is_named(tmp_path, split, text):
    toy(tmp_path, {**TOY, split: text})
    with pytest.raises(ConfigError, match=rf"got .*toy\.{split}\.txt, which is empty; type paths\.data=FOLDER"):
        toy_files().load(str(tmp_path), 0, CPU)


def test_only_line_feeds_end_lines(tmp_path):
    file = tmp_path / "text"
    file.write_bytes("a\u2028b\x0cc\r\nd".encode())
    assert read_words(file) == ["a", "b", "c", EOS, "d", EOS]


def test_read_once_unless_it_has_changed(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(
        text_files, "read_words", lambda path, lower: (read.append(path.name), read_words(path, lower))[1]
    )
    made = toy_files()
    made.prepare(str(toy(tmp_path)))
    first = made.load(str(tmp_path), 0, CPU)
    assert sorted(read) == ["toy.test.txt", "toy.train.txt", "toy.valid.txt"]
    file = tmp_path / "toy" / "toy.test.txt"
    file.write_text("b b b\n")
    os.utime(file, ns=(1, 1))
    assert made.load(str(tmp_path), 0, CPU).words["test"].tolist() == [2, 2, 2, 0]
    assert first.words["test"].tolist() == [1, 3, 0, 4, 0]


def test_wrong_counts_are_refused_before_there_is_a_run(tmp_path):
    toy(tmp_path)
    counts = ["dataset.vocabulary=6", "dataset.train_words=11", "dataset.bptt=2", "dataset.folder=toy"]
    with pytest.raises(ConfigError, match=r"dataset\.vocabulary must be what is in toy, 5, got 6"):
        train.run(cfg_for(tmp_path / "runs", "dataset=ptb", *counts, f"paths.data={tmp_path}"))
    assert not (tmp_path / "runs").exists()


def test_a_run_leaves_the_folder_alone(tmp_path):
    toy(tmp_path, {split: 40 * text for split, text in TOY.items()})
    counts = ["dataset.vocabulary=5", f"dataset.train_words={40 * 11}", "dataset.bptt=4", "dataset.folder=toy"]
    cfg = cfg_for(tmp_path / "runs", "dataset=ptb", *counts, f"paths.data={tmp_path}", "epochs=1")
    assert 1 < train.run(cfg) < 6
    assert sorted(file.name for file in (tmp_path / "toy").iterdir()) == [f"toy.{split}.txt" for split in sorted(TOY)]


@pytest.mark.parametrize(
    "change, options, message",
    [
        (
            {"valid": None, "test": None},
            {},
            "paths.data must hold the files *valid*, *test* in the folder toy, got ROOT without them; type "
            "paths.data=FOLDER, or dataset=pydocs, which needs no files",
        ),
        (
            {},
            {"files": ["*train*", "*", "*test*"]},
            "dataset.files must name one file each, got toy.test.txt and toy.train.txt and toy.valid.txt for one of "
            "them in ROOT/toy; type 'dataset.files=[toy.train.txt,toy.test.txt,toy.test.txt]', or other names",
        ),
        (
            {},
            {"train_words": 12},
            "dataset.train_words must be what is in toy, 11, got 12; type dataset.train_words=11",
        ),
        (
            {"train": "a b a\nb c\n\na d\n"},
            {},
            "dataset must be made of known words, got 'zebra' in its test split and no <unk> in the training split; "
            "type another paths.data",
        ),
        (
            {"valid": ""},
            {},
            "paths.data must hold files with words in them, got ROOT/toy/toy.valid.txt, which is empty; type "
            "paths.data=FOLDER, or unpack the original file again",
        ),
    ],
)  # fmt: skip
def test_refused_files(tmp_path, change, options, message):
    texts = {split: text for split, text in {**TOY, **change}.items() if text is not None}
    root = str(toy(tmp_path, texts))
    with pytest.raises(ConfigError) as refused:
        toy_files(**options).prepare(root)
    assert str(refused.value) == message.replace("ROOT", root)


def test_not_text(tmp_path):
    (toy(tmp_path) / "toy" / "toy.valid.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"dataset.files must be text in UTF-8, got .*toy.valid.txt; type another"):
        toy_files().load(str(tmp_path), 0, CPU)


@pytest.mark.skipif(not (SHARED / "wikitext-2").is_dir(), reason="no WikiText-2 here")
def test_wikitext2():
    node = {key: value for key, value in yaml_node("dataset", "wikitext2").items() if key != "_target_"}
    data = TextFiles(**node).load(str(SHARED), 0, CPU)
    assert len(data.words["train"]) == 2_088_628 and int(data.words["train"].max()) == 33_277
    assert len(data.words["valid"]) == 217_646 and len(data.words["test"]) == 245_569
    counts = torch.bincount(data.words["train"])
    assert len(counts) == 33_278 and bool((counts[1:] <= counts[:-1]).all())
    assert data.train_size == TextFiles(**node).train_count == 69_620


# ---- Python's documentation


def test_split_of_hand_made_topics():
    topics = {f"t{i}": f"only in {'abcdefgh'[i]}\n\nShared text.\n\n* in   both\n  parts" for i in range(8)}
    found = pydocs.split(topics)
    assert found["valid"] == ["only", "in", "g", EOS] and found["test"] == ["only", "in", "h", EOS]
    assert found["train"][:4] == ["only", "in", "a", EOS]
    assert found["train"].count("shared") == found["train"].count("both") == 1
    assert found["train"].count(EOS) == 8
    assert pydocs.split({"t": 'Call f_1("x").'})["train"] == ["call", "f_", "1", "(", '"', "x", '"', ")", ".", EOS]


def paragraphs(words: list[str]) -> set[tuple[str, ...]]:
    ends = [-1, *(i for i, word in enumerate(words) if word == EOS)]
    return {tuple(words[a + 1 : b + 1]) for a, b in itertools.pairwise(ends)}


def test_pydocs():
    splits = pydocs.splits()
    apart = [paragraphs(words) for words in splits.values()]
    assert [words[-1] for words in splits.values()] == [EOS] * 3
    assert sum(map(len, apart)) == len(set().union(*apart)) == sum(words.count(EOS) for words in splits.values())
    assert 60_000 < len(splits["train"]) < 200_000 and min(map(len, splits.values())) > 5_000
    made = PyDocs()
    data = made.load("", 0, CPU)
    assert made.words[0] == "<unk>" and len(set(made.words)) == made.vocabulary
    strange = set(splits["test"]) - set(splits["train"])
    assert strange and not strange & set(made.words)
    for split, words in splits.items():
        known = set(made.words)
        said = [made.words[i] for i in data.words[split].tolist()]
        assert said == [word if word in known else "<unk>" for word in words]
    assert min(splits["train"].count(word) for word in made.words[-5:]) == 2
    assert PyDocs(min_count=1).vocabulary > made.vocabulary > PyDocs(min_count=5).vocabulary


# ---- refused


def test_too_long_segments():
    with pytest.raises(ConfigError) as refused:
        toy_files(bptt=11).train_count  # noqa: B018
    assert str(refused.value) == (
        "dataset.bptt must be below 11, the words of the training split, got 11; type dataset.bptt=10"
    )


def test_too_rare():
    with pytest.raises(
        ConfigError, match=r"dataset.min_count must be at most \d+, the count of the most frequent word"
    ):
        PyDocs(min_count=10**6).model_arguments()


def test_no_files_named():
    with pytest.raises(ConfigError) as refused:
        toy_files(files=["a", 1, "c"])
    assert str(refused.value) == (
        "files must be three names: training, validation, test, got [a,1,c]; type files=[*train*,*valid*,*test*]"
    )


# ---- bytes that are no text


def test_a_mark_of_utf_8_is_no_word(tmp_path):
    """Some editors put it at the beginning."""
    plain = toy_files().load(str(toy(tmp_path / "plain")), 0, CPU)
    root = toy(tmp_path / "marked")
    for file in (root / "toy").iterdir():
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    marked = toy_files().load(str(root), 0, CPU)
    assert all(torch.equal(plain.words[split], marked.words[split]) for split in plain.words)


@pytest.mark.parametrize(
    "content, told",
    [
        (b"a b\nc \0 d\n", r"got a zero byte in line 2 of .*toy.valid.txt; type another"),
        ("a b a\n".encode("utf-16"), r"got UTF-16 in .*toy.valid.txt; type another"),
        ("a b a\n".encode("utf-16-be"), r"got a zero byte in line 1 of .*toy.valid.txt"),
        (b"a b\n" * 5000 + b"caf\xe9 a\n", r"got the byte 0xe9 at 20,003 in .*toy.valid.txt; type another"),
    ],
)
def test_bytes_that_are_no_text_are_named(content, told, tmp_path):
    (toy(tmp_path) / "toy" / "toy.valid.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=f"dataset.files must be text in UTF-8, {told}"):
        toy_files().prepare(str(tmp_path))


@pytest.mark.parametrize("of", ["words", "bytes"])
def test_texts_that_may_not_be_read(of, tmp_path, monkeypatch):
    root, file = toy(tmp_path), tmp_path / "toy" / "toy.valid.txt"

    def forbidden(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    if of == "words":
        monkeypatch.setattr("builtins.open", forbidden)
        look = lambda: read_words(file)  # noqa: E731
    else:
        monkeypatch.setattr(Path, "read_bytes", forbidden)
        node = {key: value for key, value in yaml_node("dataset", "wikitext2_bytes").items() if key != "_target_"}
        look = lambda: ByteFiles(**{**node, "folder": "toy"}).prepare(str(root))  # noqa: E731
    with pytest.raises(ConfigError, match=r"texts that can be read, got .*txt, which may not be read by this user"):
        look()
