"""The tensors of ResNet-50 and of gpt2, in full size or small."""

import torch

from accordion_bench.plan import TensorSpec

WIDTH, LAYERS, WORDS, POSITIONS = 768, 12, 50257, 1024


def resnet50() -> list[TensorSpec]:
    """161 tensors, 25.6 million entries."""
    import torchvision

    with torch.device("meta"):
        named = torchvision.models.resnet50().named_parameters()
    return [TensorSpec(name, tuple(p.shape)) for name, p in named]


def gpt2() -> list[TensorSpec]:
    """148 tensors, 124 million entries."""
    norm = {"weight": (WIDTH,), "bias": (WIDTH,)}
    parts = {"attn.qkv": 3 * WIDTH, "attn.proj": WIDTH, "mlp.up": 4 * WIDTH}
    shapes: dict[str, tuple[int, ...]] = {"wte": (WORDS, WIDTH), "wpe": (POSITIONS, WIDTH)}
    for layer in range(LAYERS):
        for ln in ("ln_1", "ln_2"):
            shapes |= {f"{layer}.{ln}.{key}": shape for key, shape in norm.items()}
        for name, wide in parts.items():
            shapes |= {f"{layer}.{name}.weight": (wide, WIDTH), f"{layer}.{name}.bias": (wide,)}
        shapes |= {f"{layer}.mlp.down.weight": (WIDTH, 4 * WIDTH), f"{layer}.mlp.down.bias": (WIDTH,)}
    shapes |= {f"ln_f.{key}": shape for key, shape in norm.items()}
    return [TensorSpec(name, shape) for name, shape in shapes.items()]


def small(specs: list[TensorSpec]) -> list[TensorSpec]:
    """As many tensors, as many shapes, with an eighth of each side; sides below 8 stay."""
    return [TensorSpec(s.name, tuple(side // 8 if side >= 8 else side for side in s.shape)) for s in specs]
