"""Blocks: tensors of a bucket in one allocation."""

import pytest
import torch

from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.same_shape import ALIGNMENT, Blocks, in_rows, one_allocation

SPECS = [TensorSpec(f"t{i}", shape) for i, shape in enumerate([(3, 5), (7,), (3, 5), (), (2, 0), (3, 5), (7,)])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("workers", [1, 3])
def test_all_is_one_allocation_whose_blocks_are_aligned(dtype, workers):
    blocks = Blocks(SPECS, workers, torch.zeros((), dtype=dtype))
    assert blocks.flat.ndim == 1 and not blocks.flat.any() and blocks.flat.dtype == dtype
    for block in blocks.blocks:
        assert block.untyped_storage().data_ptr() == blocks.flat.untyped_storage().data_ptr()
        assert block.storage_offset() * dtype.itemsize % ALIGNMENT == 0
    for i, (spec, x_W) in enumerate(zip(SPECS, blocks.tensors, strict=True)):
        assert x_W.shape == (workers, *spec.shape)
        x_W.fill_(i + 1)  # nobody writes where another one is
    assert all((x_W == i + 1).all() for i, x_W in enumerate(blocks.tensors))
    assert blocks.flat.count_nonzero() == workers * sum(spec.numel for spec in SPECS)  # gaps stay zero


def test_all_tensors_of_both_are_one_flat_tensor_of_each():
    first, second = (Blocks(SPECS, 2, torch.zeros(())) for _ in range(2))
    (a,), (b,) = one_allocation(first.tensors, second.tensors)
    assert a is first.flat and b is second.flat
    assert [x.shape for (x,) in one_allocation(first.tensors[::-1])] == [first.flat.shape]  # in any order


def test_parts_that_have_all_numbers_are_it_too():
    first, second = (Blocks(SPECS, 2, torch.zeros(())) for _ in range(2))
    pairs = [[in_rows(x_W).tensor_split(2, dim=1) for x_W in own.tensors] for own in (first, second)]
    halves = [[part for pair in own for part in pair] for own in pairs]
    (a,), (b,) = one_allocation(*halves)
    assert a is first.flat and b is second.flat
    few = Blocks([TensorSpec("cut", (8,)), TensorSpec("left out", (8,))], 2, torch.zeros(())).tensors
    parts = list(few[0].tensor_split(2, dim=1))  # as many as there are tensors
    assert [id(x) for x in one_allocation(parts)[0]] == [id(x) for x in parts]


def test_what_is_not_all_of_an_allocation_stays_a_list():
    first, second = (Blocks(SPECS, 2, torch.zeros(())) for _ in range(2))
    others = [x.clone() for x in first.tensors]
    for given in (
        (first.tensors[:-1],),
        ([*first.tensors[:-1], first.tensors[0]],),  # one twice, one missing
        (others,),
        (first.tensors, others),
        (first.tensors, [*second.tensors[:-1], others[-1]]),
        (first.tensors, Blocks(SPECS, 3, torch.zeros(())).tensors),  # of another size
        ([],),
    ):
        assert [[id(x) for x in xs] for xs in one_allocation(*given)] == [[id(x) for x in xs] for xs in given]
