"""Whether what is exchanged is finite."""

import pytest
import torch

from accordion_bench.exchange.finite import all_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_look_finds_what_is_not_finite_and_changes_nothing(dtype):
    most = torch.finfo(dtype).max
    xs = [torch.full((1, 3, 5), most, dtype=dtype), torch.tensor([[-0.0, torch.finfo(dtype).tiny]], dtype=dtype)]
    xs += [torch.empty(2, 0, dtype=dtype), torch.full((2, 4, 6), -most, dtype=dtype)[:, ::2, 1]]
    before = [x.clone() for x in xs]
    assert all_finite(xs) and all_finite([])
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(xs[:3], before[:3], strict=True))
    for bad in (float("nan"), float("inf"), -float("inf")):
        spoilt = [x.clone() for x in xs]
        spoilt[3][1, 1] = bad
        assert not all_finite(spoilt)
