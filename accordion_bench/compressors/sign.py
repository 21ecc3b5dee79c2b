"""Signs: one bit per coordinate, plain or with one scale per block."""

import math
from dataclasses import replace

from accordion_bench.codecs.coding import SIGNS, Coding
from accordion_bench.compressors.dense import NONE_FITTED, Codebooks, DenseCodes
from accordion_bench.options import checks
from accordion_bench.plan import TensorSpec


def _contraction(compressor: "Sign", spec: TensorSpec, level: float) -> float | None:
    size = min(spec.numel, compressor.chunk or spec.numel)
    if not compressor.traits.scaled or not size:
        return None
    return 1 / size if compressor.scale == "l1" else 2 / math.sqrt(size) - 1


class Sign(DenseCodes):
    """C(v) = s_b sgn(v) on each block b of d_b coordinates, sgn(v) = +1 if v >= 0 else -1.

    s_b = 1, ||v_b||_1 / d_b, or ||v_b||_2 / sqrt(d_b).

    With l1, ||v - C(v)||^2 = ||v||^2 - sum_b ||v_b||_1^2 / d_b: a contraction, fit for error feedback. l2 keeps the
    norm of v and loses 2 ||v||^2 - 2 ||v||_1 ||v||_2 / sqrt(d): no contraction where few coordinates have most of the
    norm. Without a scale the update is the mean of signs; with `collective=two_way` the sign of their sum, a majority
    vote.

    Args:
        scale: `none` (signSGD), `l1` (scaled sign), `l2` (1-bit Adam).
        block: what shares one scale: `tensor`, a whole tensor; `chunk`, `block_size` consecutive coordinates of a
            tensor; `bucket`, consecutive tensors, flattened, of together at most `block_size` coordinates (a larger
            tensor by itself).
        block_size: coordinates; null with `block=tensor`.
        min_numel: smaller tensors (or buckets) travel dense.

    The message is a float32 scale per block, then the bits (1 = negative), least significant first. Source: Bernstein
    et al. 2018 (arXiv 1802.04434); Karimireddy et al. 2019 (1901.09847); Zheng, Huang, Kwok 2019 (1905.10936); l2: Tang
    et al. 2021 (2102.02888).
    """

    description = replace(
        DenseCodes.description,
        display_names={
            "signsgd": "signSGD",
            "signum": "Signum",
            "efsignsgd": "EF-signSGD",
            "distefblocksgd": "dist-EF-blockSGD",
        },
        kernels=("cpu", "cuda"),
        collective_reason="signs do not add up in one bit",
        claims=replace(DenseCodes.description.claims, contraction=_contraction),
    )

    stream = "Sign"
    traits = replace(DenseCodes.traits, whole_model=True, replays=True)

    def __init__(
        self, scale: str = "none", block: str = "tensor", block_size: int | None = None, min_numel: int = 0
    ) -> None:
        self.scale = checks.choice("scale", scale, ["none", "l1", "l2"])
        scaled = scale != "none"
        self.block = checks.choice("block", block, ["tensor", "chunk", "bucket"])
        if block == "tensor" and block_size is not None:
            raise checks.ValueRefused("block_size", "null where block is tensor", block_size, None)
        if block != "tensor":
            checks.integer("block_size", block_size, at_least=1, instead=1_048_576)
        self.chunk = block_size if block == "chunk" else None
        self.min_numel = checks.integer("min_numel", min_numel, at_least=0)
        self.traits = replace(self.traits, scaled=scaled, reduces="mean" if scaled else "other")

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        return level is not None and spec.numel >= self.min_numel

    def block_size(self, spec: TensorSpec) -> int | None:
        return self.chunk

    def coding(self, level: float, fitted: Codebooks = NONE_FITTED) -> Coding:
        if not self.traits.scaled:
            return Coding("sign", SIGNS)
        return Coding("sign", SIGNS, self.scale, "mean" if self.scale == "l1" else "root mean")
