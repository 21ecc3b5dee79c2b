"""Text as bytes: windows for training and evaluation, and what a text's own frequencies say of it."""

import itertools
import math
from collections import Counter

import pytest
import torch

from accordion_bench.datasets import pydocs
from accordion_bench.datasets.pydocs import PyDocsBytes
from accordion_bench.datasets.text_files import ByteFiles
from accordion_bench.datasets.token_windows import IGNORED, TokenData
from accordion_bench.options.checks import ConfigError
from scripts.studies.entropy import bits_per_byte
from tests.kit.helpers import yaml_node
from tests.kit.paths import SHARED

CPU = torch.device("cpu")


def counting(count: int = 200, context: int = 7, test: int = 50, reshuffled: bool = True) -> TokenData:
    """Bytes 0, 1, 2, ..., so that a byte is its place."""
    part = {"train": count, "test": test, "valid": test}
    splits = {name: torch.arange(n).to(torch.uint8) for name, n in part.items()}
    return TokenData(splits, context, 3, reshuffled, CPU)


def places(data: TokenData, epoch: int) -> list[int]:
    """Where the windows of an epoch begin."""
    data.begin_epoch(epoch)
    x, y = data.train_batch(torch.arange(data.train_size))
    assert torch.equal(y, x + 1) and torch.equal(x, x[:, :1] + torch.arange(data.context))
    return x[:, 0].tolist()


@pytest.mark.parametrize("count, context", [(200, 7), (14, 7), (15, 7), (200, 1), (20, 10)])
def test_windows_of_every_epoch_are_consecutive_and_inside(count, context):
    data = counting(count, context)
    for epoch in range(20):
        begins = places(data, epoch)
        assert len(begins) == data.train_size >= 1 and 0 <= begins[0] < context
        assert all(later - earlier == context for earlier, later in itertools.pairwise(begins))


def test_epochs_cut_the_text_elsewhere_unless_the_shards_are_static():
    assert len({places(counting(), epoch)[0] for epoch in range(40)}) == 7
    assert len({places(counting(reshuffled=False), epoch)[0] for epoch in range(40)}) == 1


@pytest.mark.parametrize("test", [2, 7, 8, 9, 15, 50])
@pytest.mark.parametrize("workers", [1, 3, 40])
def test_every_byte_but_the_first_is_a_target_once(test, workers):
    data, targets = counting(test=test), []
    for worker in range(workers):
        for x, y in data.test_windows("test", worker, workers):
            assert x.shape == y.shape and x.shape[1] == 7
            inside = y != IGNORED
            assert torch.equal(y[inside], x[inside] + 1)
            targets += y[inside].tolist()
    assert sorted(targets) == list(range(1, test))


def test_subset_and_limit_eval():
    whole, part = PyDocsBytes().load("", 0, CPU), PyDocsBytes(subset=2000, limit_eval=100).load("", 0, CPU)
    assert {name: len(text) for name, text in part.tokens.items()} == {"train": 2000, "test": 100, "valid": 100}
    assert all(torch.equal(text, whole.tokens[name][: len(text)]) for name, text in part.tokens.items())
    assert part.train_size == PyDocsBytes(subset=2000).train_count == 6 and part.test_size == 99


def test_pydocs_bytes_are_the_paragraphs_whose_words_are_in_pydocs():
    texts = PyDocsBytes().texts("")
    for split, words in pydocs.splits().items():
        found = texts[split].decode()
        own = [word for paragraph in found.split("\n\n") for word in pydocs.words_of(paragraph)]
        assert own == [word for word in words if word != pydocs.EOS]
    assert 200_000 < len(texts["train"]) < 800_000 and min(map(len, texts.values())) > 20_000


@pytest.mark.skipif(not (SHARED / "wikitext-2").is_dir(), reason="no WikiText-2 here")
def test_wikitext2_bytes():
    node = {key: value for key, value in yaml_node("dataset", "wikitext2_bytes").items() if key != "_target_"}
    dataset = ByteFiles(**node)
    data = dataset.load(str(SHARED), 0, CPU)
    sizes = {split: len(text) for split, text in data.tokens.items()}
    assert sizes == {"train": 10_797_148, "valid": 1_121_681, "test": 1_256_449}
    assert data.train_size == dataset.train_count == 42_175


@pytest.mark.parametrize(
    "options, message",
    [
        ({"context": 0}, "context must be an integer of at least 1, got 0; type context=256"),
        ({"metric_split": "train"}, "metric_split must be one of valid, test, got train; type metric_split=valid"),
        ({"limit_eval": 1}, "limit_eval must be at least 2, a byte and the one after it, got 1; type limit_eval=10000"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ConfigError) as refused:
        PyDocsBytes(**options)
    assert str(refused.value) == message


def test_too_long_windows():
    rule = "dataset.context must be at most half of the 100 bytes that are trained on, got 51; type dataset.context=50"
    with pytest.raises(ConfigError) as refused:
        _ = PyDocsBytes(context=51, subset=100).train_count
    assert str(refused.value) == rule
    assert PyDocsBytes(context=50, subset=100).train_count == 1


def test_files_of_another_size(tmp_path):
    (tmp_path / "toy").mkdir()
    for split in ("train", "valid", "test"):
        (tmp_path / "toy" / f"{split}.txt").write_bytes(b"ab\n" * 10)
    names = ["train*", "valid*", "test*"]
    assert ByteFiles(folder="toy", files=names, train_bytes=30, context=4).load(str(tmp_path), 0, CPU).train_size == 6
    with pytest.raises(ConfigError, match=r"dataset.train_bytes must be what is in toy, 30, got 31; type dataset"):
        ByteFiles(folder="toy", files=names, train_bytes=31).prepare(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"paths.data must hold the files .* type paths.data=FOLDER, or dataset=pydocs"
    ):
        ByteFiles(folder="other", files=names, train_bytes=30).prepare(str(tmp_path))
    (tmp_path / "toy" / "test.txt").write_bytes(b"a")
    with pytest.raises(ConfigError, match="dataset must have at least 2 bytes in its test split, got 1; type another"):
        ByteFiles(folder="toy", files=names, train_bytes=30).load(str(tmp_path), 0, CPU)


# ---- entropy


def test_entropy_of_a_text_that_is_known():
    assert bits_per_byte(b"aaaaaaaa", 0) == 0
    assert bits_per_byte(b"abcd" * 10, 0) == pytest.approx(2)
    assert bits_per_byte(b"abcd" * 10, 1) == pytest.approx(0, abs=1e-12)
    assert bits_per_byte(bytes(range(256)), 0) == pytest.approx(8)


@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_entropy_equals_a_count_by_hand(known):
    text = pydocs.byte_splits()["valid"][:3000]
    after = Counter(text[i : i + known + 1] for i in range(len(text) - known))
    before = Counter(text[i : i + known] for i in range(len(text) - known))
    nats = -sum(n * math.log(n / before[gram[:known]]) for gram, n in after.items())
    assert bits_per_byte(text, known) == pytest.approx(nats / math.log(2) / (len(text) - known))


def test_more_is_known_with_more_bytes():
    text = pydocs.byte_splits()["valid"]
    bits = [bits_per_byte(text, known) for known in range(5)]
    assert bits == sorted(bits, reverse=True) and bits[0] < 8
