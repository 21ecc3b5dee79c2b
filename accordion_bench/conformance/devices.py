"""CPU and GPU give the same update."""

import torch

from accordion_bench.conformance.pretend_device import DEVICE, pretended
from accordion_bench.conformance.subject import Maker, Setup, demand, draws, flat
from accordion_bench.conformance.tensors import gradients


def check_devices(make: Maker, level: float | None = None, device: str = "cuda") -> str:
    """Three steps on the GPU equal those on the CPU up to rounding, byte for byte in the ledger.

    Without a GPU: on one that is pretended, whose branches of the code run with real numbers.
    """
    if device == "cuda" and not torch.cuda.is_available():
        with pretended():
            return check_devices(make, level, str(DEVICE)) + "; no GPU here, so the device is a pretended one"
    here, there = Setup(make(), level, dtype=torch.float32), Setup(make(), level, dtype=torch.float32, device=device)
    worst = 0.0
    for step in range(3):
        xs_W = gradients(step=step, dtype=torch.float32)
        ours, theirs = flat(here(xs_W, step)), flat([u.cpu() for u in there([x.to(device) for x in xs_W], step)])
        allowed = 0.01 if draws(here.compressor) else 0.0  # rounding at random may fall otherwise
        rounding = 1e-4 + 4 * (step + 1) * here.compressor.description.claims.sum_eps
        apart = float(((ours - theirs).abs() > rounding * ours.abs().max()).double().mean())
        demand(apart <= allowed, f"{apart:.2%} of the entries differ between CPU and {device} in step {step}")
        worst = max(worst, apart)
    demand(here.comm.ledger.counts == there.comm.ledger.counts, f"{device} sends other bytes than the CPU")
    return f"{worst:.2%} of the entries differ"
