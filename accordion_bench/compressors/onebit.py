"""1-bit SGD: signs that decode to the means of the positive and negative entries."""

from dataclasses import replace

from accordion_bench.codecs.coding import SIGNS, Coding
from accordion_bench.compressors.dense import NONE_FITTED, Codebooks, DenseCodes
from accordion_bench.compressors.description import FEEDBACK
from accordion_bench.options.option import Choice, with_options
from accordion_bench.plan import TensorSpec

CODING = Coding("sign", SIGNS, "means")


def _contraction(compressor: "OneBit", spec: TensorSpec, level: float) -> float:
    return 1 / compressor.blocks(spec)


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
        claims=replace(DenseCodes.description.claims, contraction=_contraction),
    )

    stream = "OneBit"
    traits = replace(DenseCodes.traits, replays=True)

    def block_of(self, spec: TensorSpec) -> int:
        return spec.matrix[1] if spec.ndim > 1 else spec.numel

    def coding(self, level: float, fitted: Codebooks = NONE_FITTED) -> Coding:
        return CODING
