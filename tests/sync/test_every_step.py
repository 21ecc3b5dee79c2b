"""Synchronous steps whose workers come and go: what is refused beside it."""

import pytest

from accordion_bench.options.checks import ConfigError
from tests.kit import composed, tiny

FOUR = ["comm=gloo", "comm.processes=4", "workers=4", "sync.elastic=true"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["comm=simulated", "comm.processes=1"], "sync.elastic needs a run over comm=gloo on CPUs, .*; type comm=gloo"),
        (["sync.min_workers=5"], "sync.min_workers must be at most 4, the number of workers, got 5; type sync.min_wor"),
        (["compressor=topk", "adaptive=accordion"], "sync.elastic must be false with adaptive=accordion, because pol"),
        (
            ["precision=float16"],
            "precision must be float32 or bfloat16 where workers may join and leave .*, got float16",
        ),
        (["comm.engine=ddp"], "comm.engine must be own where workers may join and leave .*; type comm.engine=own"),
        (["compressor=distefblocksgd"], "got distefblocksgd, whose owners keep .*; type compressor=topk, or sync.elas"),
        (
            ["compressor=topk", "compressor.error_feedback=ef21", "optimizer.momentum=0"],
            "got topk, whose estimate .*; type compressor.error_f",
        ),
        (["sync=diloco", "compressor=distefblocksgd"], "got distefblocksgd, whose owners .*; type compressor=topk, or"),
        (["bn=recompute"], "bn must be pooled where workers may join and leave"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, typed, said):
    with pytest.raises(ConfigError, match=said):
        composed.validated(composed.cfg(*tiny.typed(tmp_path, *FOUR, *typed)))
