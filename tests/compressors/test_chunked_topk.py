"""TopK of tiles: which entries, what two bits make of them, the median clip, and the bytes of all that."""

import math

import pytest
import torch
from torch import Tensor

from accordion_bench import conformance
from accordion_bench.codecs.layout import Message
from accordion_bench.codecs.matrix_tiles import Tiles, in_order, pack_numbers, quantised, unpack_numbers
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.members import Present
from accordion_bench.compressors.probe import payload_bytes
from accordion_bench.compressors.topk import TopK, form_of
from accordion_bench.conformance.placement import check_devices
from accordion_bench.conformance.pretend_device import DEVICE, pretended
from accordion_bench.conformance.subject import Setup, from_yaml, plain
from accordion_bench.methods.labels import label
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import kernels
from tests.conformance.test_conformance import owed
from tests.kit.coded import bucket_of, coded, decoded
from tests.kit.helpers import compressor, yaml_node

SHAPES = [(64, 64), (128, 192), (100, 60), (7, 11), (67, 5), (8, 3, 3, 3), (1, 1), (1, 130), (130, 1)]
TWO_BITS = {"chunk": 64, "value_bits": 2, "density": 1 / 64}
CHECKS = [check for check in conformance.CHECKS if conformance.name_of(check) != "devices"]  # below, on one that is not


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def codec(**options) -> TopK:
    return TopK(**{"density": 1 / 64, "chunk": 64, **options})


def sent(topk: TopK, x_R: Tensor, spec: TensorSpec) -> tuple[Tensor, Tensor]:
    """(messages, decoded) of tensors [R, ...]."""
    return coded(topk, x_R.flatten(1), spec.shape, level=topk.density)


def two_bits(values: list[float]) -> list[float]:
    """Each value as the mean of its bin, by the definition."""
    mu = math.fsum(values) / len(values)
    sigma = math.sqrt(math.fsum((v - mu) ** 2 for v in values) / max(len(values) - 1, 1))
    bins = [min(max(round((v - mu) / (6 * sigma / 4)) + 2, 0), 3) if sigma else 2 for v in values]
    members = {b: [v for v, other in zip(values, bins, strict=True) if other == b] for b in set(bins)}
    means = {b: math.fsum(own) / len(own) for b, own in members.items()}
    return [means[b] for b in bins]


def twin(x: Tensor, chunk: int, density: float, value_bits: int | None) -> Tensor:
    """What a tensor decodes to, tile by tile with a stable sort."""
    matrix = x.reshape(len(x), -1)
    a, b = (max(d for d in range(1, chunk + 1) if side % d == 0) for side in matrix.shape)
    k = math.ceil(density * a * b - 1e-9)
    places, values = [], []
    for top in range(0, matrix.shape[0], a):
        for left in range(0, matrix.shape[1], b):
            tile = matrix[top : top + a, left : left + b].flatten()
            for i in sorted((-tile.abs()).sort(stable=True).indices[:k].tolist()):
                places.append((top + i // b, left + i % b))
                values.append(float(tile[i]))
    out = torch.zeros_like(matrix)
    for place, value in zip(places, two_bits(values) if value_bits else values, strict=True):
        out[place] = value
    return out.view(x.shape)


# ---- tiles


@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_are_cut_joined_and_found_again(shape):
    tiles = Tiles.of(TensorSpec("x", shape), 8)
    x_R = normal(2, *shape)
    cut_R = tiles.cut(x_R)
    assert cut_R.shape == (2, tiles.count, tiles.numel) and max(tiles.a, tiles.b) <= 8
    assert torch.equal(tiles.joined(cut_R).flatten(), x_R.flatten())
    everywhere = tiles.places(torch.arange(tiles.n * tiles.m))
    assert torch.equal(x_R.flatten(1)[:, everywhere], cut_R.flatten(1))


@pytest.mark.sample(5)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("value_bits", [None, 2])
@pytest.mark.parametrize("chunk, density", [(64, 1 / 64), (8, 0.1), (5, 1.0)])
def test_what_is_decoded_is_the_twin(shape, value_bits, chunk, density):
    spec, topk = TensorSpec("x", shape), TopK(density, chunk=chunk, value_bits=value_bits)
    smooth, tied = normal(2, *shape) ** 3, (4 * normal(2, *shape)).round()
    for x_R in (smooth, tied, torch.zeros_like(smooth), torch.full_like(smooth, 0.1)):
        decoded_R = sent(topk, x_R, spec)[1].view(x_R.shape)
        for x, own in zip(x_R, decoded_R, strict=True):
            torch.testing.assert_close(own, twin(x, chunk, density, value_bits), rtol=1e-6, atol=0)
            assert value_bits or torch.equal(own, twin(x, chunk, density, None))


# ---- bytes


@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [
        ((64, 64), 112 + 16),
        ((128, 192), 6 * 112 + 16),
        ((384, 1536), 6 * 24 * 112 + 16),
        ((100, 60), (2 * 47 * 12 + 7) // 8 + (2 * 47 * 2 + 7) // 8 + 16),  # tiles 50 x 60
        ((67, 5), (67 * 3 + 7) // 8 + (67 * 2 + 7) // 8 + 16),  # a prime: tiles 1 x 5
        ((1, 1), 0 + 1 + 16),  # one entry needs no index
    ],
)
def test_bytes_are_those_counted_by_hand(shape, nbytes):
    """k = ceil(tile / 64) entries of a tile, ceil(log2 tile) + 2 bits each, and a table of four float32."""
    spec = TensorSpec("x", shape)
    assert codec(value_bits=2).message_bytes(spec, 1 / 64) == nbytes
    assert sent(codec(value_bits=2), normal(2, *shape), spec)[0].shape == (2, nbytes)


def test_112_bytes_for_each_4096_coordinates():
    for tiles in (1, 2, 9, 64):
        spec = TensorSpec("x", (64 * tiles, 128))
        assert codec(value_bits=2).message_bytes(spec, 1 / 64) == 112 * spec.numel // 4096 + 16
        assert codec().message_bytes(spec, 1 / 64) == (64 * 4 + 96) * spec.numel // 4096


@pytest.mark.parametrize("density, k", [(1 / 64, 64), (1e-9, 1), (0.5, 2048), (1.0, 4096), (65 / 4096, 65)])
def test_density_says_how_many_of_a_tile(density, k):
    assert form_of(TensorSpec("x", (64, 128)), 64, density, True).k == k


def test_vectors_travel_dense():
    topk = compressor("topk", **TWO_BITS).compressor
    assert not topk.compresses(TensorSpec("bias", (4096,)), 1 / 64)
    assert payload_bytes(topk, TensorSpec("bias", (4096,)), None, 4) == 4 * 4096


@pytest.mark.parametrize("width", [0, 1, 2, 5, 8, 12, 13])
def test_indices_are_packed_the_lowest_bit_first(width):
    numbers_R = torch.randint(0, 1 << width, (3, 17), generator=torch.Generator().manual_seed(width))
    bytes_R = pack_numbers(numbers_R, width)
    assert bytes_R.shape == (3, -(-17 * width // 8))
    assert torch.equal(unpack_numbers(bytes_R, width, 17), numbers_R)
    for row, numbers in zip(bytes_R, numbers_R, strict=True):
        whole = sum(int(number) << (width * i) for i, number in enumerate(numbers))
        assert int.from_bytes(bytes(row.tolist()), "little") == whole


# ---- two bits


def test_bins_are_pinned():
    values = torch.tensor([[-9.0, -3.0, -1.0, 0.0, 1.0, 3.0, 9.0, 0.0]])
    codes, table = quantised(values)
    mu, sigma = 0.0, math.sqrt(182 / 7)
    assert codes.tolist() == [[min(max(round((v - mu) / (1.5 * sigma)) + 2, 0), 3) for v in values[0].tolist()]]
    assert codes.tolist() == [[1, 2, 2, 2, 2, 2, 3, 2]] and table.tolist() == [[0.0, -9.0, 0.0, 9.0]]


def test_equal_values_and_two_values_come_back():
    for values in ([0.1] * 77, [3e-30] * 5, [1e30] * 3, [-0.25, 0.25] * 6, [7.0]):
        codes, table = quantised(torch.tensor([values]))
        assert torch.equal(table.gather(1, codes.long()), torch.tensor([values]))


def test_the_sum_of_the_values_stays():
    values = normal(3, 5000).double().float()
    codes, table = quantised(values)
    decoded = table.double().gather(1, codes.long())
    torch.testing.assert_close(decoded.sum(1), values.double().sum(1), rtol=0, atol=1e-3)
    assert (decoded - values).square().sum() < values.square().sum() / 4


def test_sums_hang_neither_on_rows_nor_on_threads():
    values = normal(4, 40_000).double()
    assert all(torch.equal(in_order(values)[i], in_order(values[i : i + 1])[0]) for i in range(4))
    assert float(in_order(values[:1])) == sum(values[0].tolist())


# ---- the median clip


def test_no_message_is_larger_than_the_median():
    spec = TensorSpec("x", (64, 128))
    for value_bits in (None, 2):
        free = {**TWO_BITS, "value_bits": value_bits}
        setup = Setup(plain(from_yaml("topk", **free, clip="median")), workers=5, specs=[spec])
        x_W = normal(5, 64, 128).double() * torch.tensor([1.0, 2.0, 50.0, 0.5, 3.0]).view(5, 1, 1)
        (update,), (clipped_W,) = setup.contributions([x_W])
        whole = Setup(plain(from_yaml("topk", **free)), workers=5, specs=[spec])
        _, (free_W,) = whole.contributions([x_W])
        norms = free_W.flatten(1).norm(dim=1)
        median = norms.median()
        wanted = free_W * (median / norms).clamp(max=1).view(5, 1, 1)
        torch.testing.assert_close(clipped_W, wanted, rtol=1e-6, atol=0)
        torch.testing.assert_close(update, wanted.mean(0), rtol=1e-6, atol=1e-6)  # of float32, whose sum cancels
        assert float(norms[2]) > 20 * float(median) and torch.equal(clipped_W[0], free_W[0])


def test_of_an_even_number_the_lower_of_both_is_the_median():
    spec, options = TensorSpec("x", (64, 64)), {**TWO_BITS, "clip": "median"}
    setup = Setup(plain(from_yaml("topk", **options)), workers=2, specs=[spec])
    x = normal(1, 64, 64).double()
    _, (clipped_W,) = setup.contributions([torch.cat([x, 8 * x])])
    torch.testing.assert_close(clipped_W[1], clipped_W[0], rtol=1e-6, atol=0)


def test_workers_that_are_late_have_no_part_in_the_median():
    spec, there = TensorSpec("x", (64, 64)), [0, 2, 3]
    inner = plain(from_yaml("topk", **TWO_BITS, clip="median"))
    x_W = normal(4, 64, 64).double() * torch.tensor([1.0, 99.0, 4.0, 0.5]).view(4, 1, 1)
    some = Setup(inner, workers=4, specs=[spec], comm=Present(Comm(4), there))
    update, (own_W,) = some.contributions([x_W])
    alone = Setup(inner, workers=3, specs=[spec])
    wanted, (wanted_W,) = alone.contributions([x_W[there]])
    torch.testing.assert_close(update, wanted)
    torch.testing.assert_close(own_W[there], wanted_W)


def test_what_is_cut_off_stays_in_the_residual():
    spec = TensorSpec("x", (64, 64))
    setup = Setup(from_yaml("topk", **TWO_BITS, clip="median")(), workers=4, specs=[spec])
    total, wanted = torch.zeros(64, 64, dtype=torch.float64), torch.zeros(64, 64, dtype=torch.float64)
    for step in range(5):
        x_W = normal(4, 64, 64, seed=step).double() * torch.tensor([1.0, 1.0, 1.0, 30.0]).view(4, 1, 1)
        total += setup([x_W.clone()], step)[0]
        wanted += x_W.mean(0)
    total += setup.exchange.state["x"]["residual_W"].mean(0)
    torch.testing.assert_close(total, wanted, rtol=0, atol=1e-10)


# ---- all that every compressor owes


HERE = [check for check in CHECKS if conformance.name_of(check) != "placement"]


@pytest.mark.slow
@pytest.mark.parametrize("options", TopK.description.claims.other_options, ids=str)
def test_placements_do_not_matter(options):
    (check,) = set(CHECKS) - set(HERE)
    owed(conformance.run(check, from_yaml("topk", **options), levels=[None]))


@pytest.mark.parametrize("check", HERE, ids=conformance.name_of)
@pytest.mark.parametrize("options", TopK.description.claims.other_options, ids=str)
def test_the_kit(options, check):
    if "clip" in options and conformance.name_of(check) == "wire":
        pytest.skip("everybody must see all norms: gathered whatever it costs")
    owed(conformance.run(check, from_yaml("topk", **options), levels=[None]))


@pytest.mark.parametrize("options", TopK.description.claims.other_options, ids=str)
def test_a_device_takes_the_same_entries(options):
    with pretended():
        check_devices(from_yaml("topk", **options), device=str(DEVICE))


def test_a_device_does_not_wait():
    spec, topk = TensorSpec("x", (96, 128)), codec(value_bits=2)
    x_R = normal(3, 96 * 128)
    with pretended() as counts:
        there = x_R.to(DEVICE)
        counts.reset()
        sent(topk, there, spec)
        assert not counts.waits


@pytest.mark.parametrize("installed", [True, False])
def test_an_index_beyond_its_tile_does_no_harm(installed, monkeypatch):
    """Of tiles whose size is no power of two; the message of a stranger."""
    if installed and not kernels.installed():
        pytest.skip("numba is not installed")
    monkeypatch.setattr(kernels, "installed", lambda: installed)
    spec, topk = TensorSpec("x", (50, 60)), codec(value_bits=2)
    message_A = torch.full((1, topk.message_bytes(spec, 1 / 64)), 255, dtype=torch.uint8)
    message_A[:, :16] = torch.ones(1, 4).view(torch.uint8)
    bucket = bucket_of(torch.zeros(1, spec.numel), spec.shape, level=1 / 64)
    target = decoded(topk, Message(message_A, [topk.layout([spec], [1 / 64])]), bucket)
    assert float(target[0, -1]) > 0 and int((target != 0).sum()) == 1


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"chunk": 0}, "compressor.chunk must be"),
        ({"chunk": 1.5}, "compressor.chunk must be"),
        ({"chunk": True}, "compressor.chunk must be"),
        ({"chunk": 64, "value_bits": 3}, "compressor.value_bits must be null or 2, got 3"),
        ({"value_bits": 2}, "compressor.value_bits must be null where chunk is null"),
        ({"clip": "median"}, "compressor.clip must be none where chunk is null"),
        ({"chunk": 64, "clip": "mean"}, "compressor.clip must be"),
        ({"chunk": 64, "collective": "two_way"}, "pieces of vectors, which have no tiles"),
        ({"chunk": 64, "scope": "model"}, "compressor.scope must be tensor"),
    ],
)
def test_what_makes_no_sense_is_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        compressor("topk", **options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "TopK 10 %"),
        ({"chunk": 64}, "TopK 10 % of tiles"),
        (TWO_BITS, "TopK 1.5625 % of tiles, 2 bits"),
        ({**TWO_BITS, "clip": "median"}, "TopK 1.5625 % of tiles, 2 bits, clipped"),
    ],
)
def test_reports_tell_tiles_from_whole_tensors(options, name):
    node = {**yaml_node("compressor", "topk"), **options}
    assert label({"compressor": node, "choices": {"compressor": "topk"}}) == name
