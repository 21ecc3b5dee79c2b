"""The end of an attachment: nothing of it is left that could disturb a process that ends."""

import gc
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import accordion_bench as ab
from accordion_bench.attaching.connecting import _detach_at_the_end
from tests.kit.loops import loss_of, net, play, sgd
from tests.kit.processes import together


def threads() -> int:
    """Of this process, those of C++ included."""
    return len(list(Path(f"/proc/{os.getpid()}/task").iterdir()))


def trained(wrap=lambda model: model, local: bool = False, **options):
    model = net()
    module, optimizer = wrap(model), sgd(model)
    comm = ab.local(module, optimizer, **options) if local else ab.attach(module, optimizer, **options)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(module, step).backward()
        optimizer.step()
    return comm


def no_thread_is_left():
    """gloo's would abort a process that ends while one of them holds a tensor."""
    trained().detach()  # autograd and others start threads of their own once
    for kinds in (
        {},
        {"wrap": DistributedDataParallel},
        {"local": True, "sync": "local_sgd", "period": 2},
        {"local": True, "sync": "hierarchical", "groups": [[1, 1], [2, 2]]},
        {"local": True, "sync": "overlap_local_sgd", "period": 1},
    ):
        before = threads()
        comm = trained(**kinds)
        comm.detach()
        gc.collect()
        assert threads() <= before, kinds
        comm.detach()  # a second time is nothing
        print(comm, comm.metrics())


def groups_may_be_gone_before():
    comm = trained()
    dist.destroy_process_group()
    comm.detach()


def a_process_that_ends_detaches():
    comm = trained()
    _detach_at_the_end(weakref.ref(comm))
    assert not comm.attached
    comm = trained()
    sys.last_value = RuntimeError("an error has ended the process")
    _detach_at_the_end(weakref.ref(comm))
    assert comm.attached
    del sys.last_value
    comm.detach()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_no_thread_is_left(tmp_path):
    play(tmp_path, [no_thread_is_left])


def test_a_process_that_ends_detaches(tmp_path):
    play(tmp_path, [a_process_that_ends_detaches])


def test_groups_may_be_gone_before(tmp_path):
    together(2, _gone, str(tmp_path / "store"))


def _gone(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    groups_may_be_gone_before()
