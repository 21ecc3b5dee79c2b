"""Which parameters and buffers an attachment carries, complex ones as two reals; what it cannot carry it refuses."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

import accordion_bench as ab
from tests.kit.loops import play, refused, same_on_all

REFUSED = "parameters must be dense tensors of float16, bfloat16, float32, float64 or complex numbers, got w, which is "


class Spectral(nn.Module):
    """A complex matrix and a complex vector, then a real layer."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 6, dtype=dtype))
        self.shift = nn.Parameter(torch.randn(6, dtype=dtype))
        self.last = nn.Linear(6, 2, dtype=self.w.real.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x.to(self.w.dtype) @ self.w + self.shift).abs())


class AsTwoReals(nn.Module):
    """The same network, whose complex parameters are real ones [..., 2]."""

    def __init__(self, other: Spectral) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.view_as_real(other.w.detach()).clone())
        self.shift = nn.Parameter(torch.view_as_real(other.shift.detach()).clone())
        self.last = copy.deepcopy(other.last)

    def forward(self, x: Tensor) -> Tensor:
        w, shift = torch.view_as_complex(self.w), torch.view_as_complex(self.shift)
        return self.last((x.to(w.dtype) @ w + shift).abs())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        draws = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(5, 4, generator=draws, dtype=torch.float64).to(next(model.parameters()).real.dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


EVERY_STEP: list[dict[str, Any]] = [
    {},
    {"compressor": "bf16"},
    {"compressor": "powersgd", "rank": 1},
    {"compressor": "topk", "density": 0.3},
    {"compressor": "qsgd"},
    {"compressor": "signum"},
    {"compressor": "none", "overlap": False},
    {"compressor": "none", "clip_norm": 0.1},
]
LOCAL: list[dict[str, Any]] = [
    {"sync": "local_sgd", "period": 2},
    {"sync": "local_sgd", "period": 2, "buffers": "average"},
    {"sync": "slowmo", "period": 2},
    {"sync": "diloco", "period": 2, "compressor": "qsgd"},
    {"sync": "overlap_local_sgd", "period": 2},
    {"sync": "noloco", "period": 2},
    {"sync": "gossip", "delay": 1},
    {"sync": "sparta"},
]


def as_two_reals(ours: Spectral, theirs: AsTwoReals) -> None:
    for name in ("w", "shift"):
        torch.testing.assert_close(torch.view_as_real(getattr(ours, name)), getattr(theirs, name), rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.last.weight, theirs.last.weight, rtol=0, atol=1e-6)


def pair(dtype: torch.dtype = torch.complex64) -> tuple[Spectral, AsTwoReals]:
    torch.manual_seed(3)
    model = Spectral(dtype)
    return model, AsTwoReals(model)


def complex_parameters_are_two_reals():
    for options in EVERY_STEP:
        for ddp in (None, {}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
            ours, theirs = pair()
            attachments = []
            for model in (ours, theirs):
                module = model if ddp is None else DistributedDataParallel(model, **ddp)
                optimizer = sgd(model)
                attachments.append(ab.attach(module, optimizer, **options))
                train(module, optimizer)
            as_two_reals(ours, theirs)
            same_on_all(ours)
            first, second = (comm.metrics() for comm in attachments)
            assert first["payload_bytes"] == second["payload_bytes"] > 0
            held = attachments[0].consensus()
            assert held["w"].is_complex() and torch.equal(held["w"], ours.w)
            for comm in attachments:
                comm.detach()


def complex_parameters_in_double_precision():
    ours, theirs = pair(torch.complex128)
    for model in (ours, theirs):
        optimizer = sgd(model)
        with ab.attach(model, optimizer):
            train(model, optimizer)
    as_two_reals(ours, theirs)


def complex_parameters_in_local_steps():
    for options in LOCAL:
        ours, theirs = pair()
        for model in (ours, theirs):
            optimizer = adamw(model)
            with ab.local(model, optimizer, **options):
                train(model, optimizer)
        as_two_reals(ours, theirs)
        same_on_all(ours)


def complex_parameters_saved_and_loaded():
    ours, whole = pair()[0], pair()[0]
    optimizer = sgd(whole)
    ab.attach(whole, optimizer, "powersgd", rank=1)
    train(whole, optimizer)
    optimizer = sgd(ours)
    comm = ab.attach(ours, optimizer, "powersgd", rank=1)
    train(ours, optimizer, 2)
    states = comm.state_dict(), copy.deepcopy(ours.state_dict()), copy.deepcopy(optimizer.state_dict())
    again = pair()[0]
    optimizer = sgd(again)
    comm = ab.attach(again, optimizer, "powersgd", rank=1)
    again.load_state_dict(states[1])
    optimizer.load_state_dict(states[2])
    comm.load_state_dict(states[0])
    assert comm.position.step == 2


# ---- what is refused


def holding(param: Any) -> nn.Module:
    model = nn.Module()
    model.w = param if isinstance(param, nn.Parameter) else nn.Parameter(param)
    return model


def what_cannot_be_carried() -> dict[str, nn.Module]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    lazy = nn.Module()
    lazy.w = nn.UninitializedParameter()
    return {
        "lazy and has no shape yet; run one batch through the model first": lazy,
        "a DTensor; call fully_shard on the model, and use no tensor": holding(distribute_tensor(torch.ones(4), mesh)),
        r"on the meta device and holds no numbers; call model.to_empty\(device": holding(torch.ones(4, device="meta")),
        "of layout sparse_coo; store it densely": holding(torch.eye(3).to_sparse()),
        "of layout sparse_csr; store it densely": holding(torch.eye(3).to_sparse_csr()),
        "of layout nested; store it densely": holding(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        "of type float8_e4m3fn; convert it": holding(torch.ones(4).to(torch.float8_e4m3fn)),
        "of type complex32; convert it": holding(torch.ones(4, dtype=torch.complex32)),
        "a TwoTensor; convert it to a plain tensor": holding(TwoTensor(torch.ones(4), torch.ones(4))),
    }


def parameters_that_cannot_be_carried():
    for what, model in what_cannot_be_carried().items():
        for door in (ab.attach, lambda m, o: ab.local(m, o, "local_sgd")):
            with refused(REFUSED + what):
                door(model, torch.optim.SGD(model.parameters(), lr=0.1))


def sparse_gradients():
    for kind in (nn.Embedding, nn.EmbeddingBag):
        model = nn.Sequential(kind(10, 3, sparse=True), nn.Linear(3, 2))
        for module in (model, DistributedDataParallel(model)):
            with refused("gradients must be dense tensors, got 0 with sparse=True; pass sparse=False to it"):
                ab.attach(module, torch.optim.SGD(model.parameters(), lr=0.1), "topk", density=0.1)
        with refused("gradients must be dense tensors, got 0 with sparse=True; pass sparse=False to it"):
            ab.local(model, torch.optim.SGD(model.parameters(), lr=0.1), "local_sgd")
    frozen = nn.Sequential(nn.Embedding(10, 3, sparse=True).requires_grad_(False), nn.Linear(3, 2))
    ab.attach(frozen, torch.optim.SGD(frozen[1].parameters(), lr=0.1)).detach()


# ---- buffers


def named(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "of_")


class Counting(nn.Module):
    """Buffers of every type, which differ from rank to rank after a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64, torch.complex64):
            self.register_buffer(named(dtype), torch.zeros(3, dtype=dtype))
        self.register_buffer("of_float16", torch.zeros(3, dtype=torch.float16), persistent=False)
        self.register_buffer("empty", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("edges", torch.eye(3).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        for buffer in self.buffers():
            if buffer.layout == torch.strided:
                buffer.add_(1 + dist.get_rank()) if buffer.dtype != torch.bool else buffer.fill_(dist.get_rank() == 0)
        return self.layer(x)


def buffers_of(values: dict[str, Tensor]) -> dict[str, Any]:
    return {name: value.to_dense().tolist() for name, value in values.items()}


def all_buffers_are_equal_at_the_end():
    for options in ({"buffers": "average"}, {}):
        model = Counting()
        optimizer = sgd(model)
        with ab.local(model, optimizer, "local_sgd", period=2, **options) as local:
            train(model, optimizer, 3)
            evaluated = buffers_of(local.consensus())
        heard: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(heard, (buffers_of(dict(model.named_buffers())), evaluated))
        assert heard[0] == heard[1]
        (at_end, evaluated) = heard[0]
        assert at_end["of_int64"] == evaluated["of_int64"] == [3] * 3  # rank 0's
        assert at_end["of_bool"] == [True] * 3
        assert at_end["of_float32"] == at_end["of_float16"] == at_end["of_complex64"] == [4.5] * 3  # the mean


def buffers_that_cannot_be_sent_are_compared():
    model = Counting()
    if dist.get_rank():
        model.edges = 2 * model.edges
    with refused(r"all processes must pass the same, got buffers.edges=\d+ on rank 0 and buffers.edges=\d+ on rank 1"):
        ab.attach(model, sgd(model))


@pytest.mark.parametrize(
    "case",
    [
        complex_parameters_are_two_reals,
        complex_parameters_in_double_precision,
        complex_parameters_in_local_steps,
        complex_parameters_saved_and_loaded,
        parameters_that_cannot_be_carried,
        sparse_gradients,
        all_buffers_are_equal_at_the_end,
        buffers_that_cannot_be_sent_are_compared,
    ],
    ids=lambda case: case.__name__,
)
def test_kinds_of_tensors(case, tmp_path):
    play(tmp_path, [case])
