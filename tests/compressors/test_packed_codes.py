"""Packed codes: sizes, byte order, round trips, and values straight from the bytes."""

import numpy as np
import pytest
import torch

from accordion_bench.codecs import packed_codes
from accordion_bench.tensors.kernels import encode as packing

LEVELS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 32, 33, 64, 65, 128, 129, 255, 256]


def drawn(rows: int, n: int, levels: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * n + levels)
    return torch.randint(0, levels, (rows, n), generator=generator, dtype=torch.uint8)


def packed_slowly(row: list[int], levels: int) -> list[int]:
    """The definition: one long integer, little end first."""
    if levels == 3:
        padded = [*row, *[0] * (-len(row) % 5)]
        return [sum(c * 3**j for j, c in enumerate(padded[i : i + 5])) for i in range(0, len(padded), 5)]
    width = packed_codes.code_width(levels)
    return list(
        sum(c << width * i for i, c in enumerate(row)).to_bytes(packed_codes.code_bytes(len(row), levels), "little")
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("levels", LEVELS)
def test_round_trip_of_all_lengths_by_torch_and_by_kernels(levels):
    """The same bytes and codes."""
    for n in range(258):
        rows = drawn(2, n, levels)
        packed = packed_codes.pack_codes(rows, levels)
        assert packed.dtype == torch.uint8 and packed.shape == (2, packed_codes.code_bytes(n, levels))
        for row, message in zip(rows.numpy(), packed.numpy(), strict=True):
            room, out = np.full(n + 47, 255, np.uint8), np.empty_like(message)
            room[:n] = row
            packing.pack(room, n, levels, out)
            assert np.array_equal(out, message) and packing.packed_bytes(n, levels) == len(message)
            packing.unpack(message, levels, room)
            assert np.array_equal(room[:n], row)
        assert torch.equal(packed_codes.unpack_codes(packed, levels, n), rows)


@pytest.mark.parametrize("levels", LEVELS)
def test_bytes_are_the_definition(levels):
    for n in (1, 5, 7, 8, 9, 39, 40, 41):
        rows = drawn(2, n, levels)
        assert packed_codes.pack_codes(rows, levels).tolist() == [packed_slowly(row, levels) for row in rows.tolist()]


@pytest.mark.parametrize(
    ("levels", "row", "message"),
    [
        (2, [1, 0, 0, 0, 0, 0, 0, 1, 1], "8101"),
        (3, [1, 2, 0, 0, 2, 1], "a901"),
        (4, [1, 2, 3, 0, 3], "3903"),
        (8, [1, 2, 3, 4, 5, 6, 7, 0, 7], "d1581f070000"),
        (16, [1, 2, 15], "210f"),
        (32, [1, 31, 0, 16, 2, 0, 0, 9], "e103280048"),
        (64, [63, 1, 2, 3], "7f200c000000"),
        (128, [127, 1, 0, 64], "ff000008000000"),
        (256, [255, 0, 7], "ff0007"),
    ],
)
def test_byte_order_is_pinned(levels, row, message):
    packed = packed_codes.pack_codes(torch.tensor([row], dtype=torch.uint8), levels)
    assert bytes(packed[0].tolist()).hex() == message


def test_sizes():
    """3 bits and a float32 norm per bucket: ResNet-32 and ResNet-110 for CIFAR-10, ResNet-18 for ImageNet."""
    for n, size, total in ((464_154, 8192, 174_288), (1_727_962, 16384, 648_412), (11_689_512, 8192, 4_389_275)):
        assert packed_codes.code_bytes(n, 8) + 4 * -(-n // size) == total
    assert [packed_codes.code_bytes(41, levels) for levels in (2, 3, 4, 8, 16, 32, 64, 128, 256)] == [
        6, 9, 11, 18, 21, 30, 36, 42, 41,
    ]  # fmt: skip
    for levels in LEVELS:  # every 40 codes end at a byte, so a message may be cut there
        assert packed_codes.code_bytes(120, levels) == 3 * packed_codes.code_bytes(40, levels)
        rows = drawn(1, 120, levels)
        parts = [packed_codes.pack_codes(part.contiguous(), levels) for part in rows.split([40, 80], dim=1)]
        assert torch.equal(packed_codes.pack_codes(rows, levels), torch.cat(parts, dim=1))
    for levels in (0, 257):
        with pytest.raises(ValueError, match="1 to 256 levels"):
            packed_codes.code_bytes(1, levels)


@pytest.mark.parametrize("levels", LEVELS)
def test_look_up_is_indexing(levels):
    values = torch.randn(levels, generator=torch.Generator().manual_seed(levels))
    table = tuple(values.tolist())
    for n in (0, 1, 40, 83):
        rows = drawn(3, n, levels)
        packed = packed_codes.pack_codes(rows, levels)
        wider = torch.full((3, packed.shape[1] + 5), 255, dtype=torch.uint8)
        wider[:, 2 : 2 + packed.shape[1]] = packed
        for message in (packed, wider[:, 2 : 2 + packed.shape[1]]):  # the second is not contiguous
            assert torch.equal(packed_codes.look_up(message, table, n), values[rows.long()])
