"""Signs: one bit per coordinate, with no scale, a scale per block, or two centroids per column; Distributed Lion."""

import math
from collections.abc import Sequence
from dataclasses import field, replace

import torch
from torch import Tensor

from accordion_bench.codecs.coding import SIGNS, Coding
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Compressor, Context, Exchanged, State, zeros_in_state
from accordion_bench.compressors.demo import signs_of
from accordion_bench.compressors.dense import NONE_FITTED, Codebooks, DenseCodes
from accordion_bench.compressors.description import FEEDBACK, KEPT, NO_EF21, TRAVEL, OptimizerPart
from accordion_bench.compressors.two_way import TwoWay
from accordion_bench.compressors.wrapper import Wrapper
from accordion_bench.options import checks
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import TensorSpec

CENTROIDS = Coding("sign", SIGNS, "means")


def _contraction(compressor: "Sign", spec: TensorSpec, level: float) -> float | None:
    size = min(spec.numel, compressor.block_of(spec) or spec.numel)
    if not compressor.traits.scaled or not size:
        return None
    return 1 / size if compressor.scale == "l1" else 2 / math.sqrt(size) - 1


VOTES = {
    "optimizer.lr": (1e-3, "step size of every parameter in every step"),
    "schedule.lr_scaling": ("sqrt", "the size of a vote's step does not grow with the workers"),
}


@with_options
class Sign(DenseCodes):
    """C(v) = s_b sgn(v) on each block b of d_b coordinates, sgn(v) = +1 if v >= 0 else -1.

    s_b = 1, ||v_b||_1 / d_b, or ||v_b||_2 / sqrt(d_b).

    With l1, ||v - C(v)||^2 = ||v||^2 - sum_b ||v_b||_1^2 / d_b: a contraction, suited to error feedback. l2 preserves
    the norm of v and loses 2 ||v||^2 - 2 ||v||_1 ||v||_2 / sqrt(d): no contraction if few coordinates have most of the
    norm. Without a scale the update is the mean of signs; with `collective=two_way` it is the sign of their sum, a
    majority vote.

    A scale is shared by a whole tensor, a `chunk` of `block_size` consecutive coordinates of a tensor, or a `bucket`:
    consecutive tensors, flattened, with at most `block_size` coordinates in total (a larger tensor is a bucket of one).
    `none` is signSGD, `l1` scaled sign, `l2` 1-bit Adam.

    The message is a float32 scale per block, then the bits (1 = negative), least significant first. Source: Bernstein
    et al. 2018 (arXiv 1802.04434); Karimireddy et al. 2019 (1901.09847); Zheng, Huang, Kwok 2019 (1905.10936); l2: Tang
    et al. 2021 (2102.02888).
    """

    scale: str = option(default="none", choices=("none", "l1", "l2"))
    block: str = option("coordinates that share one scale", default="tensor", choices=("tensor", "chunk", "bucket"))
    block_size: int | None = option("coordinates, for chunk and bucket", default=None, at_least=1, instead=1_048_576)
    min_numel: int = option("smaller tensors are exchanged dense", default=0, at_least=0)

    chosen_as = {
        "signsgd": Choice(
            "one bit per coordinate, mean of signs; collective=two_way is the majority vote (Bernstein et al. 2018)",
            beside=("collective", "ties", *TRAVEL),
            leaves_out=("block", "block_size", "min_numel"),
            comments={
                "collective": "all_gather: mean of signs; two_way: majority vote, one bit up and one down",
                "scope": "tensor, model: one message for all tensors, less padding",
            },
            brings=VOTES,
        ),
        "signum": Choice(
            "majority vote of the signs of the workers' momenta (Bernstein et al. 2018)",
            {"worker_momentum": True, "weight_decay_mode": "decoupled", "collective": "two_way"},
            beside=("worker_momentum", "weight_decay_mode", "collective", "ties", *TRAVEL),
            leaves_out=("block", "block_size", "min_numel"),
            comments={
                "worker_momentum": "optimizer.momentum acts on the workers, before compression",
                "collective": "two_way: majority vote; all_gather: mean of signs",
            },
            brings=VOTES,
        ),
        "efsignsgd": Choice(
            "scaled sign with error feedback (Karimireddy et al. 2019)",
            {"scale": "l1", "error_feedback": True},
            beside=(*FEEDBACK, "collective", "start_step"),
            leaves_out=("min_numel",),
            comments={"scale": "", "collective": "all_gather, two_way (then the owners also keep residuals)"},
        ),
        "distefblocksgd": Choice(
            "two-way blockwise scaled sign, error feedback on both sides, momentum before compression (Zheng, Huang, "
            "Kwok 2019)",
            {
                "scale": "l1",
                "worker_momentum": True,
                "error_feedback": True,
                "residual_units": "parameter",
                "collective": "two_way",
            },
            beside=(
                *("worker_momentum", "weight_decay_mode", "error_feedback", "residual_units", "zero_lr"),
                *(*KEPT, "collective", "server", "align", "start_step"),
            ),
            comments=NO_EF21,
            brings={"optimizer.nesterov": (True, "as in the paper")},
        ),
    }

    description = replace(
        DenseCodes.description,
        display_names={
            "signsgd": "signSGD",
            "signum": "Signum",
            "efsignsgd": "EF-signSGD",
            "distefblocksgd": "dist-EF-blockSGD",
        },
        kernels=("cpu", "cuda"),
        collective_reason="signs cannot be summed in one bit",
        claims=replace(DenseCodes.description.claims, contraction=_contraction),
    )

    stream = "Sign"
    traits = replace(DenseCodes.traits, whole_model=True, replays=True)

    def __post_init__(self) -> None:
        if self.block == "tensor" and self.block_size is not None:
            raise checks.ValueRefused("block_size", "{null} where block is tensor", self.block_size, None)
        super().__post_init__()
        if self.block != "tensor":
            checks.integer("block_size", self.block_size, at_least=1, instead=1_048_576)
        scaled = self.scale != "none"
        self.traits = replace(self.traits, scaled=scaled, reduces="mean" if scaled else "other")

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        return level is not None and spec.numel >= self.min_numel

    def block_of(self, spec: TensorSpec) -> int | None:
        return self.block_size if self.block == "chunk" else None

    def coding(self, level: float, fitted: Codebooks = NONE_FITTED) -> Coding:
        if not self.traits.scaled:
            return Coding("sign", SIGNS)
        return Coding("sign", SIGNS, self.scale, "mean" if self.scale == "l1" else "root mean")


@with_options
class OneBit(DenseCodes):
    """C(v)_i = c+ if v_i >= 0 else c-, per column: c+ the mean of its non-negative entries, c- of its negative ones.

    A column holds the weights of one output unit, which is a row of the matrix view (first dimension by all others); a
    tensor of one dimension is one column. An empty part has c = 0. No other pair of values per sign has a smaller
    squared error, so that this is a contraction, intended for error feedback.

    Under `collective=two_way` a piece of a tensor is one column. The message is (c+ + c-)/2 and (c+ - c-)/2 as float32
    per column, then the bits (1 = negative). Source: Seide et al. 2014.
    """

    chosen_as = {
        "onebit": Choice(
            "1-bit SGD: two centroids per column, with error feedback (Seide et al. 2014)",
            {"error_feedback": True},
            beside=(*FEEDBACK, "collective", "start_step"),
            comments={"collective": "all_gather, two_way (then one pair of centroids per piece, not per column)"},
        )
    }

    description = replace(
        DenseCodes.description,
        display_names={"onebit": "1-bit SGD"},
        kernels=("cpu", "cuda"),
        collective_reason="signs cannot be summed in one bit",
        claims=replace(
            DenseCodes.description.claims, contraction=lambda compressor, spec, level: 1 / compressor.blocks(spec)
        ),
    )

    stream = "OneBit"
    traits = replace(DenseCodes.traits, replays=True)

    def block_of(self, spec: TensorSpec) -> int:
        return spec.matrix[1] if spec.ndim > 1 else spec.numel

    def coding(self, level: float, fitted: Codebooks = NONE_FITTED) -> Coding:
        return CENTROIDS


COLLECTIVE_OF_VOTE = {"majority": "two_way", "mean": "all_gather"}


@with_options
class DistributedLion(Wrapper):
    """u_w = sgn(b1 m_w + (1 - b1) g_w);  m_w <- b2 m_w + (1 - b2) g_w;  update = majority or mean of u_w.

    x <- x - eta lambda x - eta update: the optimizer, Lion, only applies weight decay. Each worker sends one bit per
    coordinate. The majority is returned in one bit more, with a keyed coin for ties. A bit cannot represent 0: sgn 0 =
    +1 here, so that coordinates without any gradient drift. With one worker, all other coordinates move as under Lion.
    Tensors that are exchanged dense move by sgn of the mean of the values that would be signed, with sgn 0 = 0.

    Source: Liu et al. 2024, "Communication Efficient Distributed Training with Distributed Lion" (arXiv 2404.00438).
    """

    inner: Compressor = field(init=False)
    vote: str = option(
        "majority: of the workers' signs, by owners; mean: all signs are gathered",
        default="majority",
        choices=tuple(COLLECTIVE_OF_VOTE),
    )
    betas: Sequence[float] = option(default=(0.9, 0.99), shown=False)

    chosen_as = {
        "lion": Choice(
            "signs of each worker's Lion step, one bit each way (Distributed Lion, Liu et al. 2024); optimizer=lion",
            beside=TRAVEL,
            comments={"scope": "tensor, model: one message for all tensors, less padding"},
        )
    }

    description = replace(
        Wrapper.description,
        display_names={"lion": "Distributed Lion"},
        collective_reason="compressor.vote determines the collective",
        no_error_feedback="its momenta are local and do not depend on what was sent",
        kernels=("cpu", "cuda"),
        requires={"optimizer": "lion"},
    )

    traits = replace(
        Sign.traits,
        reduces="other",
        scaled=False,
        collectives=("two_way",),
        optimizer=OptimizerPart(frozenset({"momentum"}), fits=("Lion",), takes=frozenset({"betas"})),
    )

    def __post_init__(self) -> None:
        checks.choice("vote", self.vote, list(COLLECTIVE_OF_VOTE))
        self.betas = checks.betas(self.betas, [0.9, 0.99])
        self.inner = TwoWay(Sign()) if self.vote == "majority" else Sign()
        super().__post_init__()
        self.traits = replace(type(self).traits, collectives=(COLLECTIVE_OF_VOTE[self.vote],))

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        return zeros_in_state(self.inner.init(specs, comm, like), "momentum_W", specs, comm, like)

    @torch.no_grad()
    def compressor_input(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> list[Tensor]:
        """Return b1 m_w + (1 - b1) g_w."""
        return self._signed(xs_W, [state[spec.name]["momentum_W"] for spec in ctx.specs])

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        ms_W = [state[spec.name]["momentum_W"] for spec in ctx.specs]
        out = self.inner.exchange(self._signed(xs_W, ms_W), ctx, state, comm)
        if ms_W:
            torch._foreach_lerp_(ms_W, list(xs_W), 1 - self.betas[1])
        pairs = zip(out.update, ctx.levels, strict=True)
        update = [signs_of(mean) if level is None else mean for mean, level in pairs]
        return Exchanged(update, out.subtract_sent_)

    def _signed(self, xs_W: Sequence[Tensor], ms_W: Sequence[Tensor]) -> list[Tensor]:
        return list(torch._foreach_lerp(list(xs_W), list(ms_W), self.betas[0])) if ms_W else []
