"""Code lengths from histograms, and the bitstream that verifies them."""

import itertools

import numpy as np
import pytest
import torch

from accordion_bench.compressors import dense
from tests.kit.bitstreams import ans_decode, shannon_bits


def best_prefix_code(counts: list[int]) -> int:
    """The fewest bits over all lengths that satisfy Kraft's inequality, by exhaustion."""
    used = [n for n in counts if n]
    choices = itertools.product(range(1, max(2, len(used))), repeat=len(used))
    return min(
        sum(n * length for n, length in zip(used, lengths, strict=True))
        for lengths in choices
        if sum(2.0**-length for length in lengths) <= 1
    )


def test_huffman_is_an_optimal_prefix_code():
    generator = np.random.default_rng(0)
    for size in (2, 3, 5, 6):
        for _ in range(10):
            counts = generator.integers(0, 12, size) ** 2
            counts[generator.integers(size)] += 1
            table = torch.from_numpy(counts)
            assert dense.huffman_bits(table) == best_prefix_code(counts.tolist())


@pytest.mark.parametrize("size", [2, 3, 7, 16, 255, 256])
def test_huffman_fills_kraft_and_brackets_the_entropy(size):
    counts = torch.randint(0, 1000, (size,), generator=torch.Generator().manual_seed(size)) ** 2
    counts[:2] += 1
    lengths = dense.huffman_lengths(counts)
    assert lengths.dtype == torch.int64 and torch.equal(lengths > 0, counts > 0)
    assert float((2.0 ** -lengths[counts > 0].double()).sum()) == 1
    total = int(counts.sum())
    assert shannon_bits(counts) <= dense.huffman_bits(counts) < shannon_bits(counts) + total


def test_huffman_edges():
    def lengths(*counts):
        return dense.huffman_lengths(torch.tensor(counts, dtype=torch.int64)).tolist()

    assert lengths(0, 7, 0) == [0, 1, 0]
    assert lengths(0, 0) == [0, 0] and lengths() == []
    assert lengths(5, 5) == [1, 1] and lengths(1, 1, 2, 4) == [3, 3, 2, 1]
    assert lengths(*[1] * 8) == [3] * 8
    assert dense.huffman_bits(torch.tensor([0, 9])) == 9
    assert shannon_bits(torch.tensor([0, 0])) == 0 == shannon_bits(torch.tensor([0, 9]))
    assert shannon_bits(torch.tensor([4, 4, 8])) == pytest.approx(24)


def omega_by_construction(n: int) -> int:
    code = "0"
    while n > 1:
        code = f"{n:b}" + code
        n = len(f"{n:b}") - 1
    return len(code)


def test_elias_lengths_equal_the_codes():
    numbers = [*range(1, 300), *(2**k + shift for k in range(9, 63) for shift in (-1, 0, 1)), 2**63 - 1]
    n = torch.tensor(numbers)
    assert dense.elias_omega_length(n).tolist() == [omega_by_construction(i) for i in numbers]
    assert dense._floor_log2(n).tolist() == [i.bit_length() - 1 for i in numbers]
    table = {1: 1, 2: 3, 3: 3, 4: 6, 7: 6, 8: 7, 15: 7, 16: 11, 31: 11}
    assert dense.elias_omega_length(torch.tensor(list(table))).tolist() == list(table.values())
    assert torch.equal(n, torch.tensor(numbers))  # the argument is left alone
    assert dense.elias_omega_length(torch.tensor([[1, 2], [4, 8]], dtype=torch.uint8)).tolist() == [[1, 3], [6, 7]]


@pytest.mark.parametrize("counts", [[5], [0, 7], [3, 4, 5], [1, 10**12, 0, 7], [0] * 8, list(range(256))])
def test_bitstream_round_trip(counts):
    pytest.importorskip("constriction")
    generator = np.random.default_rng(0)
    for n in (0, 1, 5, 1000):
        codes = generator.integers(0, len(counts), n).astype(np.uint8)
        stream = dense.ans_encode(codes, counts)
        decoded = ans_decode(stream, counts, n)
        assert decoded.dtype == np.uint8 and np.array_equal(decoded, codes)


def test_bitstream_is_as_long_as_the_entropy_says():
    pytest.importorskip("constriction")
    generator = np.random.default_rng(0)
    shares = np.array([0.005, 0.045, 0.15, 0.3, 0.3, 0.15, 0.045, 0.005])
    codes = generator.choice(8, 100_000, p=shares).astype(np.uint8)
    counts = np.bincount(codes, minlength=8)
    stream = dense.ans_encode(codes, counts)
    assert 8 * len(stream) == pytest.approx(shannon_bits(torch.from_numpy(counts)), rel=1e-3)
    assert dense.ans_encode(codes, counts.tolist()) == stream == dense.ans_encode(codes, torch.from_numpy(counts))
    with pytest.raises(TypeError, match="integers"):
        dense.ans_encode(codes, counts / counts.sum())


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "constriction", None)
    with pytest.raises(ImportError, match="pip install constriction"):
        dense.ans_encode(np.zeros(3, np.uint8), [3, 1])
