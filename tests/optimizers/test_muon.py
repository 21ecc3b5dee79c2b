"""Muon: its formula by hand, torch's Muon and AdamW as twins, decay, scale, shapes, refusals."""

import copy

import pytest
import torch
import torch.optim._muon as torch_muon
from torch import nn

from accordion_bench.codecs.orthonormal import orthogonalise
from accordion_bench.optimizers import muon
from accordion_bench.optimizers.inner import MATRIX, TABLE, VECTOR, without_dynamo
from accordion_bench.optimizers.muon import scale_of
from accordion_bench.options.checks import ConfigError

Muon, TorchMuon = without_dynamo(muon.Muon), without_dynamo(torch.optim.Muon)
EXACT = {"ns_precision": None}
SHAPES = [(6, 4), (4, 6), (6, 4), (5, 5)]


def parameters(shapes, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def train(optimizer, params, steps=4, scale=1.0, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for x in params:
            x.grad = scale * torch.randn(x.shape, generator=generator, dtype=x.dtype)
        optimizer.step()
    return [x.detach().clone() for x in params]


def deviation(a, b):
    return max(float((x - y).detach().abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("nesterov", [True, False])
def test_by_hand(nesterov):
    """Two steps of one matrix."""
    (x,) = parameters([(6, 4)])
    g, h = parameters([(6, 4), (6, 4)], seed=5)
    eta, mu, decay = 0.1, 0.9, 0.3
    z, buffer = x.detach().clone(), torch.zeros(6, 4, dtype=torch.float64)
    optimizer = Muon([x], lr=eta, momentum=mu, nesterov=nesterov, weight_decay=decay, **EXACT)
    for gradient in (g.detach(), h.detach()):
        buffer = mu * buffer + gradient
        direction = gradient + mu * buffer if nesterov else buffer
        z = (1 - eta * decay) * z - eta * (6 / 4) ** 0.5 * orthogonalise(direction[None])[0]
        x.grad = gradient.clone()
        optimizer.step()
    assert deviation([x.detach()], [z]) < 1e-14


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_torchs_muon_with_our_newton_schulz(monkeypatch, rule, nesterov):
    """It averages where we sum, (1 - mu) B, which its division by the norm forgets."""
    monkeypatch.setattr(torch_muon, "_zeropower_via_newtonschulz", lambda g, c, k, eps: orthogonalise(g[None], k)[0])
    options = {"lr": 0.05, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.2, "adjust_lr_fn": rule}
    theirs, ours = parameters(SHAPES), parameters(SHAPES)
    expected = train(TorchMuon(theirs, **options), theirs)
    assert deviation(train(Muon(ours, **options, **EXACT), ours), expected) < 1e-13


def test_torchs_muon_as_it_is():
    """Both in bfloat16: 8 bits of an update of size 0.4 x lr, four times, and what Newton-Schulz makes of them."""
    options = {"lr": 0.02, "momentum": 0.95, "nesterov": True, "weight_decay": 0.1}
    theirs, ours = (parameters([(48, 32), (32, 64)], dtype=torch.float32) for _ in range(2))
    start = [x.detach().clone() for x in ours]
    expected = train(TorchMuon(theirs, **options), theirs)
    found = train(Muon(ours, **options), ours)
    for x, y, z in zip(found, expected, start, strict=True):
        assert float((x - y).norm()) < 0.02 * float((y - z).norm())


def test_torchs_defaults_where_they_are_ours():
    """Learning rate and decay are those of Muon's authors' code; torch's want `match_rms_adamw`."""
    theirs, ours = (kind(parameters([(4, 4)])).param_groups[0] for kind in (TorchMuon, Muon))
    assert {key: ours[key] for key in ("momentum", "nesterov", "ns_steps")} == {
        key: theirs[key] for key in ("momentum", "nesterov", "ns_steps")
    }


@pytest.mark.parametrize(("decay_on", "of_vectors"), [("matrices", 0.0), (None, 0.2)])
def test_all_else_is_torchs_adamw(decay_on, of_vectors):
    """Bit for bit; vectors without decay, unless they are to."""
    shapes, kinds = [(6, 4), (9, 4), (4,), (7,)], [MATRIX, TABLE, VECTOR, VECTOR]
    ours, theirs = (parameters(shapes) for _ in range(2))
    mine = Muon(ours, lr=0.02, weight_decay=0.2, decay_on=decay_on, adamw_factor=0.1, betas=(0.8, 0.9), kinds=kinds)
    groups = [{"params": theirs[:2], "weight_decay": 0.2}, {"params": theirs[2:], "weight_decay": of_vectors}]
    adamw = without_dynamo(torch.optim.AdamW)(groups, lr=0.1 * 0.02, betas=(0.8, 0.9))
    found, expected = train(mine, ours), train(adamw, theirs)
    assert all(torch.equal(x, y) for x, y in zip(found[1:], expected[1:], strict=True))
    assert not torch.equal(found[0], expected[0])


def test_the_size_of_gradients_does_not_matter():
    ours, others = parameters(SHAPES), parameters(SHAPES)
    small, large = train(Muon(ours, **EXACT), ours), train(Muon(others, **EXACT), others, scale=1e4)
    assert deviation(small, large) < 1e-12


def test_equal_shapes_together_are_each_alone():
    together, alone = parameters([(6, 4)] * 3), parameters([(6, 4)] * 3)
    generator = torch.Generator().manual_seed(2)
    optimizers = [Muon(together, **EXACT), *(Muon([x], **EXACT) for x in alone)]
    for _ in range(3):
        for x, y in zip(together, alone, strict=True):
            x.grad = torch.randn(6, 4, generator=generator, dtype=torch.float64)
            y.grad = x.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert deviation(together, alone) < 1e-14


def test_a_convolution_is_its_matrix():
    (conv,) = parameters([(8, 3, 3, 3)])
    matrix = nn.Parameter(conv.detach().reshape(8, 27).clone())
    lasting = nn.Parameter(conv.detach().clone(memory_format=torch.channels_last))
    optimizers = [Muon([x], **EXACT) for x in (conv, matrix, lasting)]
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        conv.grad = torch.randn(8, 3, 3, 3, generator=generator, dtype=torch.float64)
        matrix.grad = conv.grad.reshape(8, 27).clone()
        lasting.grad = conv.grad.clone(memory_format=torch.channels_last)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(conv.reshape(8, 27), matrix)
    assert lasting.is_contiguous(memory_format=torch.channels_last)
    assert deviation([lasting], [conv]) < 1e-14


def test_decay_is_beside_the_gradient():
    """A zero gradient leaves decay alone; a decay changes nothing else of the step."""
    (x,) = parameters([(4, 4)])
    start = x.detach().clone()
    x.grad = torch.zeros_like(x)
    Muon([x], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(x, start * (1 - 0.1 * 0.5))
    decayed, plain = parameters([(4, 4)], seed=1), parameters([(4, 4)], seed=1)
    before = decayed[0].detach().clone()
    first, other = train(Muon(decayed, weight_decay=0.5), decayed, 1), train(Muon(plain, weight_decay=0), plain, 1)
    assert deviation([other[0] - first[0]], [0.02 * 0.5 * before]) < 1e-15


def test_scales():
    assert scale_of(64, 16, "original") == 2 and scale_of(16, 64, "original") == 1
    assert scale_of(16, 64, "match_rms_adamw") == scale_of(64, 16, "match_rms_adamw") == pytest.approx(1.6)


def test_an_update_of_matched_size_has_entries_as_adamws():
    """Root mean square 0.2, as AdamW's often is, for any shape."""
    for shape in ((64, 64), (32, 256), (256, 32)):
        (x,) = parameters([shape])
        start = x.detach().clone()
        train(Muon([x], lr=1, weight_decay=0, adjust_lr_fn="match_rms_adamw", **EXACT), [x], 1)
        assert 0.15 < float((x - start).square().mean().sqrt()) < 0.25


def test_what_has_no_gradient_stays():
    params = parameters([(4, 4), (6, 4), (3,), (2,)])
    start = [x.detach().clone() for x in params]
    optimizer = Muon(params)
    optimizer.step()
    params[1].grad, params[2].grad = torch.ones(6, 4).double(), torch.ones(3).double()
    optimizer.step()
    assert [torch.equal(x, y) for x, y in zip(params, start, strict=True)] == [True, False, False, True]


def test_state_dict_of_torch():
    """Saved and loaded as any optimizer of torch, the next steps are the same."""
    kinds = [MATRIX, VECTOR]
    params = parameters([(6, 4), (5,)])
    optimizer = Muon(params, kinds=kinds)
    train(optimizer, params)
    copies = [nn.Parameter(x.detach().clone()) for x in params]
    again = Muon(copies, kinds=kinds)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(
        torch.equal(x, y) for x, y in zip(train(optimizer, params, seed=7), train(again, copies, seed=7), strict=True)
    )


@pytest.mark.parametrize("options, sentence", [
    ({"adjust_lr_fn": "adamw"}, "adjust_lr_fn must be one of .*, got adamw; type adjust_lr_fn=match_rms_adamw"),
    ({"ns_steps": 0}, "ns_steps must be an integer of at least 1, got 0; type ns_steps=5"),
    ({"ns_steps": 100}, "ns_steps must be an integer of at most 99, got 100"),
    ({"ns_precision": "float16"}, "ns_precision must be null or bfloat16, got float16; type ns_precision=bfloat16"),
    ({"adamw_factor": 0}, "adamw_factor must be a number above 0, got 0; type adamw_factor=0.05"),
    ({"betas": [0.9]}, r"betas must be two numbers .*, got \[0.9\]; type betas=\[0.9,0.95\]"),
    ({"betas": [0.9, 1]}, r"betas must be two numbers .*, got \[0.9,1\]"),
    ({"kinds": [TABLE]}, "model must have a matrix besides .* where optimizer=muon, got none; type optimizer=adamw"),
])  # fmt: skip
def test_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Muon(parameters([(4, 4)]), **options)


def test_refused_without_a_matrix():
    with pytest.raises(ConfigError, match="got none; type optimizer=adamw"):
        Muon(parameters([(4,), (4, 1)]))
