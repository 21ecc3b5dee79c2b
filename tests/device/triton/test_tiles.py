"""The largest entries of tiles by kernels: messages and sums are those of the reference to the bit."""

import math

import pytest
import torch
from torch import Tensor

from accordion_bench.codecs import engines
from accordion_bench.codecs.bucket import Target
from accordion_bench.codecs.engine import Engine
from accordion_bench.codecs.layout import Message
from accordion_bench.codecs.matrix_tiles import TileForm, Tiles
from accordion_bench.compressors.topk import tiled_layout
from accordion_bench.plan import TensorSpec
from tests.codecs.kit import bucket_of
from tests.device.triton.test_selection import KINDS

SHAPES = [(64, 64), (67, 3), (96, 20), (33, 14), (6, 5, 4), (1, 1), (7,)]
CPU = torch.device("cpu")


def forms_of(shapes, limit: int, k: int, coded: bool = False) -> list[TileForm]:
    tiles = [Tiles.of(TensorSpec("", shape), limit) for shape in shapes]
    return [TileForm(own, min(k, own.numel), coded) for own in tiles]


def compare(gpu, rows_W: list[Tensor], shapes, forms: list[TileForm], laid=list) -> None:
    """Messages of the local workers; sums of each in a row of its own, and in one row."""
    layout, messages = tiled_layout(tuple(x_W.shape[1] for x_W in rows_W), tuple(forms)), []
    both = ((engines._on_gpu(), gpu.device), (Engine(), CPU))
    for engine, there in both:
        messages.append(Message.empty(layout, len(rows_W[0]), there))
        own_W = laid([x_W.to(there) for x_W in rows_W])
        engine.checks_input = False
        engine.encode_tiles(bucket_of(own_W, shapes), messages[-1], forms)
    assert torch.equal(messages[0].rows.cpu(), messages[1].rows)
    for rows in {1, len(rows_W[0])}:
        sums = []
        for (engine, there), message in zip(both, messages, strict=True):
            before = [torch.ones(rows, x_W.shape[1], dtype=x_W.dtype, device=there) / 3 for x_W in rows_W]
            target = Target(before, -1.0, 3 - rows)
            engine.add_tiles(target, message, forms)
            sums.append([x_R.cpu().view(torch.uint8) for x_R in target.rows_R])
        assert all(map(torch.equal, *sums))


def rows_of(kind: str, shapes, workers: int = 2) -> list[Tensor]:
    return [KINDS[kind](math.prod(shape), workers) for shape in shapes]


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_numbers(gpu, kind):
    """Ties, zeros, NaN, infinities, denormals; tiles of one entry, of prime sides, as wide as a program."""
    compare(gpu, rows_of(kind, SHAPES), SHAPES, forms_of(SHAPES, 64, 40))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("limit", "k"), [(64, 1), (64, 409), (64, 4096), (8, 5), (3, 9)])
def test_few_entries_and_all(gpu, limit, k):
    compare(gpu, rows_of("bfloat16", SHAPES), SHAPES, forms_of(SHAPES, limit, k))


@pytest.mark.parametrize("kind", ["normal", "few values"])
def test_two_bits(gpu, kind):
    compare(gpu, rows_of(kind, SHAPES), SHAPES, forms_of(SHAPES, 64, 40, True))


def test_numbers_of_64_bits_are_compared_as_float32(gpu):
    rows_W = [x_W.double() * (1 + 1e-12) for x_W in rows_of("few values", SHAPES)]
    compare(gpu, rows_W, SHAPES, forms_of(SHAPES, 64, 40))


def test_rows_that_begin_anywhere(gpu):
    """Loads are narrow where an address is no multiple of 16 bytes."""
    shapes = [(1, 1), (64, 128), (8, 8)]
    compare(
        gpu,
        rows_of("normal", shapes, 3),
        shapes,
        forms_of(shapes, 64, 40),
        lambda rows_W: list(torch.cat(rows_W, dim=1).split([x_W.shape[1] for x_W in rows_W], dim=1)),
    )


def test_tiles_wider_than_a_program(gpu):
    """By torch."""
    compare(gpu, rows_of("normal", [(128, 128)]), [(128, 128)], forms_of([(128, 128)], 128, 40))


def test_what_a_message_says_of_other_coordinates_is_not_followed(gpu):
    """Any bytes; nothing is written in front of the sums or behind them."""
    shapes = [(50, 21), (3, 30)]
    for coded in (False, True):
        forms, numels = forms_of(shapes, 64, 40, coded), tuple(map(math.prod, shapes))
        layout = tiled_layout(numels, tuple(forms))
        rows = torch.randint(0, 256, (2, layout.nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        around = torch.zeros(3000, device=gpu.device)
        sums = [around[500:1550][None], around[1550:1640][None]]
        engines._on_gpu().add_tiles(Target(sums), Message(rows.to(gpu.device), [layout] * 2), forms)
        assert not around[:500].cpu().any() and not around[1640:].cpu().any()
