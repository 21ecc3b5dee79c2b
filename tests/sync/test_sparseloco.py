"""SparseLoCo: DiLoCo's rounds, of whose differences the largest entries of tiles travel at two bits."""

import pytest
import torch

from accordion_bench.compressors.topk import TopK
from tests.kit import local
from tests.kit.coded import coded
from tests.kit.local import deviation, fitted, trained, trainer_for

CHUNK, DENSITY, DECAY, LR = 4, 1 / 8, 0.95, 0.8
SPARSELOCO = [
    *("sync=diloco", "sync.period=4", f"sync.outer_lr={LR}", "sync.outer_momentum=0", "sync.outer_nesterov=false"),
    *("compressor=topk", f"compressor.chunk={CHUNK}", f"compressor.density={DENSITY}", "compressor.value_bits=2"),
    f"compressor.residual_decay={DECAY}",
]  # fmt: skip


def sent(e: torch.Tensor) -> torch.Tensor:
    """Q(TopK per tile(e)); vectors whole."""
    if e.ndim < 2:
        return e.clone()
    topk = TopK(DENSITY, chunk=CHUNK, value_bits=2)
    return coded(topk, e.reshape(1, -1), tuple(e.shape), level=DENSITY)[1].view(e.shape).double()


def test_it_equals_explicit_lists(tmp_path):
    """e <- b e + z - x_w;  s = Q(TopK(e));  e <- e - s;  z <- z - lr mean s: in float64."""
    run = trainer_for(tmp_path, *SPARSELOCO)
    z = [x.detach().clone() for x in run.axis.params]
    e_W = [[torch.zeros_like(x) for x in z] for _ in range(4)]
    lost = []

    def outer(taken, lr, models, optimizers):
        if taken % 4:
            return
        for i, value in enumerate(z):
            s_W = []
            for own, e in zip(models, e_W, strict=True):
                e[i] = (DECAY * e[i] if value.ndim > 1 else 0) + value - own[i].detach()
                s_W.append(sent(e[i]))
                e[i] = e[i] - s_W[-1]
            z[i] = value - LR * torch.stack(s_W).mean(0)
            lost.append(float(e_W[0][i].norm()))
        local.assign(models, z)

    local.twin(run, outer)
    fitted(run)
    assert deviation(run.axis.shared, z) < 1e-7  # messages hold float32
    assert max(lost) > 1e-3


def test_all_of_a_tile_at_full_width_is_diloco(tmp_path):
    whole = ["compressor=topk", f"compressor.chunk={CHUNK}", "compressor.density=1", "sync=diloco", "sync.period=4"]
    diloco = trained(tmp_path, "sync=diloco", "sync.period=4")
    assert deviation(trained(tmp_path, *whole).axis.shared, diloco.axis.shared) < 1e-6


@pytest.mark.parametrize("clip", ["none", "median"])
def test_the_ledger_has_the_bytes_of_its_messages(tmp_path, clip):
    run = trained(tmp_path, *SPARSELOCO, f"compressor.clip={clip}")
    topk = TopK(DENSITY, chunk=CHUNK, value_bits=2)
    own = [topk.message_bytes(s, DENSITY) if len(s.shape) > 1 else 8 * s.numel for s in run.axis.specs]  # of float64
    assert run.comm.ledger.counts["payload"] == 4 * 6 * sum(own)  # six rounds of four workers
