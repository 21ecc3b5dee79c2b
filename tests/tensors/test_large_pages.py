"""Memory of results, used again."""

import torch

from accordion_bench.tensors import same_shape

CPU = torch.device("cpu")


def test_memory_is_used_again_only_when_nobody_holds_it_any_more():
    n = same_shape.SMALL // 4 + 1
    first = same_shape.empty_vector(n, torch.float32, CPU)
    part, where = first[5:9].view(2, 2), first.data_ptr()
    part.fill_(3)
    del first
    second = same_shape.empty_vector(n, torch.float32, CPU)
    assert second.data_ptr() != where
    second.zero_()
    assert part.tolist() == [[3, 3], [3, 3]]
    del part
    assert same_shape.empty_vector(2 * n, torch.bfloat16, CPU).data_ptr() == where


def test_memory_that_nobody_asks_for_is_given_back(monkeypatch):
    monkeypatch.setattr(same_shape, "RECENT", 3)
    monkeypatch.setattr(same_shape, "_pieces", [])
    same_shape.empty_vector(3 * same_shape.SMALL, torch.uint8, CPU)
    kept = [same_shape.empty_vector(same_shape.SMALL + i, torch.uint8, CPU) for i in range(5)]
    assert [len(piece.memory) for piece in same_shape._pieces] == [len(x) for x in kept]
