"""Advice about a network that nobody has: step times by a formula that is easily followed."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from accordion_bench.advising.advice import Advice, AdviceRow, Interval, Regions, by_step

COMPUTE = 0.1  # seconds
LATENCY = 2e-5
BANDWIDTHS = tuple(1e7 * 10 ** (i / 20) for i in range(93))
WORKERS = tuple(2**i for i in range(1, 13))


class Method(NamedTuple):
    """Bytes of a worker's message, seconds of codec, whether it is gathered, and the period of a local one."""

    size: float
    codec: float = 0.0
    gathered: bool = False
    period: int = 1


METHODS = {
    "dense": Method(1e8),
    "bf16": Method(5e7, 1e-3),
    "PowerSGD rank 4": Method(4e6, 1e-2),
    "PowerSGD rank 1": Method(1e6, 1.3e-2),
    "TopK 0.1 %": Method(4e4, 4e-2, gathered=True),
    "QSGD 4 bits": Method(1.25e7, 2e-2, gathered=True),
    "local SGD, H 32": Method(1e8, period=32),
    "DiLoCo, H 64": Method(1e8, 2e-2, period=64),
}
OVERRIDES = {
    "dense": ("compressor=none",),
    "bf16": ("compressor=bf16",),
    "PowerSGD rank 4": ("compressor=powersgd", "compressor.rank=4"),
    "PowerSGD rank 1": ("compressor=powersgd", "compressor.rank=1"),
    "TopK 0.1 %": ("compressor=topk", "compressor.density=0.001"),
    "QSGD 4 bits": ("compressor=qsgd", "compressor.bits=4"),
    "local SGD, H 32": ("sync=local_sgd", "sync.period=32"),
    "DiLoCo, H 64": ("sync=diloco", "sync.period=64"),
}


def wire(method: Method, workers: int) -> float:
    return method.size * ((workers - 1) if method.gathered else 2 * (workers - 1) / workers)


def step(method: Method, bandwidth: float, workers: int) -> float:
    """Half of computing hides what is sent; codec and latency are always waited for."""
    rounds = (workers - 1) * (1 if method.gathered else 2)
    sent = 8 * wire(method, workers) / bandwidth + rounds * LATENCY
    if method.period > 1:
        return COMPUTE + (sent + method.codec) / method.period
    return COMPUTE + method.codec + max(0.0, sent - COMPUTE / 2)


def around(value: float, noise: float) -> Interval:
    return Interval(value, value * (1 - noise), value * (1 + noise))


def ratio(reference: float, value: float, noise: float) -> Interval:
    return around(reference / value, noise)


def break_even(method: Method, reference: Method, workers: int) -> float:
    slower = [b for b in BANDWIDTHS if step(method, b, workers) >= step(reference, b, workers)]
    if not slower:
        return math.inf
    return 0.0 if slower[0] == BANDWIDTHS[0] else slower[0]


def advice(
    bandwidth: float = 1e10,
    workers: int = 16,
    noise: float | Mapping[str, float] = 0.001,
    methods: Sequence[str] = tuple(METHODS),
) -> Advice:
    """The advice, without its verdict.

    Args:
        noise: half of each interval, relatively; or by method.
    """

    def own(name: str) -> float:
        return noise if isinstance(noise, float) else noise.get(name, 0.001)

    def row(name: str) -> AdviceRow:
        method = METHODS[name]
        took = step(method, bandwidth, workers)
        fp32, bf16 = (step(METHODS[reference], bandwidth, workers) for reference in ("dense", "bf16"))
        return AdviceRow(
            method=name,
            overrides=OVERRIDES[name],
            step=around(took, own(name)),
            over_fp32=ratio(fp32, took, own(name)),
            over_bf16=ratio(bf16, took, own(name)),
            exposed=around(took - COMPUTE, own(name)),
            payload_bytes=method.size / method.period,
            wire_bytes=wire(method, workers) / method.period,
            memory_bytes=0.0 if name in ("dense", "bf16") else 1e8,
            break_even_fp32=break_even(method, METHODS["dense"], workers),
            break_even_bf16=break_even(method, METHODS["bf16"], workers),
            period=method.period,
            local=method.period > 1,
            command=f"python -m accordion_bench model=made_up {' '.join(OVERRIDES[name])}",
        )

    def over(axis: str, at: Sequence[float], here: float) -> Regions:
        def steps(name: str) -> tuple[float, ...]:
            if axis == "workers":
                return tuple(step(METHODS[name], bandwidth, int(count)) for count in at)
            return tuple(step(METHODS[name], rate, workers) for rate in at)

        return Regions(axis, tuple(at), here, {name: steps(name) for name in methods})

    return Advice(
        model="made_up",
        device="cpu",
        machines=workers,
        workers_per_machine=1,
        network={"bandwidth": bandwidth, "latency": LATENCY},
        compute=around(COMPUTE, 0.001),
        verdict=(),
        doubts=(),
        rows=tuple(by_step([row(name) for name in methods])),
        by_bandwidth=over("bandwidth", BANDWIDTHS, bandwidth),
        by_workers=over("workers", WORKERS, workers),
        left_out={"ATOMO rank 4": "it needs matrices, and the model has none"},
        on="THIS CPU",
    )
