"""Memory of results, used again."""

import torch

from accordion_bench.tensors import large_pages

CPU = torch.device("cpu")


def test_memory_is_used_again_only_when_nobody_holds_it_any_more():
    n = large_pages.SMALL // 4 + 1
    first = large_pages.empty(n, torch.float32, CPU)
    part, where = first[5:9].view(2, 2), first.data_ptr()
    part.fill_(3)
    del first
    second = large_pages.empty(n, torch.float32, CPU)
    assert second.data_ptr() != where
    second.zero_()
    assert part.tolist() == [[3, 3], [3, 3]]
    del part
    assert large_pages.empty(2 * n, torch.bfloat16, CPU).data_ptr() == where


def test_memory_that_nobody_asks_for_is_given_back(monkeypatch):
    monkeypatch.setattr(large_pages, "RECENT", 3)
    monkeypatch.setattr(large_pages, "_pieces", [])
    large_pages.empty(3 * large_pages.SMALL, torch.uint8, CPU)
    kept = [large_pages.empty(large_pages.SMALL + i, torch.uint8, CPU) for i in range(5)]
    assert [len(piece.memory) for piece in large_pages._pieces] == [len(x) for x in kept]
