"""A compressor, a model, a data set and a policy of a user's own, outside of the program."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from accordion_bench.adaptive.policy import Policy
from accordion_bench.compressors.compressor import Context
from accordion_bench.compressors.oneshot import OneShot
from accordion_bench.datasets.images import ImageData, ImageDataset
from accordion_bench.options import checks
from accordion_bench.options.option import option, with_options
from accordion_bench.plan import Ladder, Plan, RunFacts, Signals, TensorSpec
from accordion_bench.tensors import keyed_rng


@with_options
class InTurn(OneShot):
    """update = mean_w C(g_w); of n coordinates C keeps step mod s, step mod s + s, ..., with s = round(1 / density).

    Every coordinate is sent once in s steps; error feedback keeps the others until then.
    """

    density: float = option("share sent in a step; lower density = more compression", default=0.1, above=0, at_most=1)

    traits = replace(OneShot.traits, knob="density", pair=(0.1, 0.25), min_ndim=2)

    def sent(self, spec: TensorSpec, level: float, ctx: Context) -> slice:
        """The coordinates of this step, the same on all workers."""
        stride = min(round(1 / level), spec.numel)
        return slice(ctx.step % stride, None, stride)

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        return 4 * math.ceil(spec.numel / min(round(1 / level), spec.numel)) if spec.numel else 0

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> Tensor:
        values_R = x_R[:, self.sent(spec, level, ctx)].float()
        message_R = torch.zeros(len(x_R), self.message_bytes(spec, level) // 4, device=x_R.device)
        message_R[:, : values_R.shape[1]] = values_R  # the last message of a turn may be one value shorter
        return message_R.view(torch.uint8)

    def decode(self, message_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor:
        rows_R = torch.zeros(len(message_R), spec.numel, device=message_R.device)
        kept_R = rows_R[:, self.sent(spec, level, ctx)]
        kept_R.copy_(message_R.contiguous().view(torch.float32)[:, : kept_R.shape[1]])
        return rows_R


class SmallNet(nn.Module):
    """Two convolutions, a mean over the image, a linear layer.

    Args:
        in_channels, num_classes: of the data set, which the program fills in.
        width: channels.
    """

    def __init__(self, in_channels: int, num_classes: int, width: int = 16) -> None:
        super().__init__()
        checks.integer("width", width, at_least=1, instead=16)
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.conv1(x).relu()).relu()
        return self.fc(x.mean((2, 3)))


class Stripes(ImageDataset):
    """Images of 8x8 pixels: stripes that run across, down, or along a diagonal, and noise.

    Args:
        noise: standard deviation, where stripes are 1 high; larger = harder.
        options: `subset`, `limit_eval`, `sharding`, see `Dataset`.
    """

    in_channels, num_classes, image_size = 1, 3, 8
    train_size, test_size = 512, 128
    reads_files = False

    def __init__(self, noise: float = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self.noise = checks.number("noise", noise, at_least=0, instead=0.5)

    def load(self, root: str, seed: int, device: torch.device) -> ImageData:
        generator = keyed_rng.generator(seed, "stripes")
        row, column = torch.arange(8)[:, None], torch.arange(8)
        kinds = torch.stack([(row + 0 * column) // 2 % 2, (column + 0 * row) // 2 % 2, (row + column) // 2 % 2])

        def draw(count: int) -> tuple[Tensor, Tensor]:
            labels = torch.randint(0, 3, (count,), generator=generator)
            noise = self.noise * torch.randn(count, 1, 8, 8, generator=generator)
            return kinds[labels, None] + noise, labels

        train, test = self.cut(draw(self.train_size), draw(self.test_size), seed)
        return ImageData(train, test, [0.5], [0.5], padding=0, flip=False, seed=seed, device=device)


@with_options
class WeakAtFirst(Policy):
    """Weak compression in the first epochs, strong afterwards."""

    first: int = option("epochs with weak compression", default=1, at_least=1)

    drives = "level"

    def ladder(self, knob: str, pair: tuple[float, float]) -> tuple[float, ...]:
        return pair  # values of the knob, strong first

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        self.strong, weak = (ladder.values.index(value) for value in ladder.pair)  # a plan holds indices
        return plan.with_levels(dict.fromkeys(plan.levels, weak))

    def update(self, signals: Signals, plan: Plan) -> Plan:
        if signals.epoch + 1 != self.first:
            return plan
        return plan.with_levels(dict.fromkeys(plan.levels, self.strong))
