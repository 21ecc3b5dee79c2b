"""The LSTM language model: its equations, its state, tied weights, dropout that a seed reaches."""

import math

import pytest
import torch
from torch import Tensor, nn

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.worker_axis import Batch, WorkerAxis
from accordion_bench.models.lstm import LSTM
from accordion_bench.options.checks import ConfigError
from accordion_bench.tensors.keyed_rng import kept_rng, seeded

VOCABULARY = 40


def model(vocabulary: int = VOCABULARY, **options) -> LSTM:
    with seeded(7):
        return LSTM(vocabulary, **{"hidden": 12, "layers": 2, "dropout": 0.0} | options).double()


def tokens(batch: int = 3, length: int = 10, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def slow_twin(network: LSTM, tokens: Tensor) -> Tensor:
    """Hochreiter and Schmidhuber's equations with a forget gate, one token and one layer at a time."""
    named = dict(network.named_parameters())
    layers = len(network.recurrent)
    h = [torch.zeros(len(tokens), 12).double() for _ in range(layers)]
    c = [torch.zeros(len(tokens), 12).double() for _ in range(layers)]
    logits = []
    for t in range(tokens.shape[1]):
        x = named["embedding.weight"][tokens[:, t]]
        for i in range(layers):
            of_x = x @ named[f"recurrent.{i}.weight_ih_l0"].T + named[f"recurrent.{i}.bias_ih_l0"]
            of_h = h[i] @ named[f"recurrent.{i}.weight_hh_l0"].T + named[f"recurrent.{i}.bias_hh_l0"]
            enter, forget, new, leave = (of_x + of_h).chunk(4, dim=1)
            c[i] = forget.sigmoid() * c[i] + enter.sigmoid() * new.tanh()
            x = h[i] = leave.sigmoid() * c[i].tanh()
        logits.append(x @ network.decoder.weight.T + network.decoder.bias)
    return torch.stack(logits, dim=1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
def test_equals_the_equations(layers, tied):
    network, x = model(layers=layers, tied=tied), tokens()
    logits, (h, c) = network(x, None)
    torch.testing.assert_close(logits, slow_twin(network, x))
    assert h.shape == c.shape == (layers, 3, 12)


def test_a_carried_state_gives_the_logits_of_one_long_text():
    network, x = model(), tokens()
    whole, end = network(x, None)
    first, state = network(x[:, :4], None)
    second, last = network(x[:, 4:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    torch.testing.assert_close(last, end)


def test_a_slice_of_the_batch_goes_on_from_its_slice_of_the_state():
    network, x = model(), tokens(batch=4)
    _, state = network(x[:, :4], None)
    whole, _ = network(x[:, 4:], state)
    part, _ = network(x[1:3, 4:], tuple(s[:, 1:3] for s in state))
    torch.testing.assert_close(part, whole[1:3])


def test_gradients_flow_through_the_state_until_it_is_detached():
    network, x = model(), tokens()
    _, state = network(x[:, :4], None)
    assert all(part.requires_grad for part in state)
    _, cut = network(x[:, 4:], tuple(part.detach() for part in state))
    (inside,) = torch.autograd.grad(cut[0].sum(), [network.embedding.weight])
    assert not inside[sorted(set(x[:, :4].unique().tolist()) - set(x[:, 4:].unique().tolist()))].any()


def test_tied_weights_are_one_tensor():
    network = model()
    assert network.decoder.weight is network.embedding.weight
    names = [spec.name for spec in WorkerAxis(network, Comm(2), seed=0).specs]
    assert names.count("embedding.weight") == 1 and "decoder.weight" not in names
    assert sum(p.numel() for p in model(tied=False).parameters()) - sum(p.numel() for p in network.parameters()) == (
        VOCABULARY * 12
    )


def test_a_tied_gradient_is_the_sum_of_both_uses():
    tied, untied, x = model(), model(tied=False), tokens()
    values = tied.state_dict()
    untied.load_state_dict(values)
    for network in (tied, untied):
        nn.functional.cross_entropy(network(x[:, :-1], None)[0].flatten(0, 1), x[:, 1:].flatten()).backward()
    torch.testing.assert_close(tied.embedding.weight.grad, untied.embedding.weight.grad + untied.decoder.weight.grad)


def test_tied_weights_stay_one_after_a_swap_of_values():
    """The workers' replicas are swapped in as `param.data`: every use reads the new values."""
    network, other, x = model(), model(), tokens()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(-0.5).add_(0.01)
    before, _ = network(x, None)
    for p, q in zip(network.parameters(), other.parameters(), strict=True):
        p.data = q.data.clone()
    assert not torch.equal(network(x, None)[0], before)
    torch.testing.assert_close(network(x, None)[0], other(x, None)[0])


def test_two_workers_on_one_model_have_gradients_of_their_own():
    network, x = model(), tokens(batch=4)
    axis = WorkerAxis(network, Comm(2), seed=0)

    def loss(part: Tensor) -> Tensor:
        return nn.functional.cross_entropy(network(part[:, :-1], None)[0].flatten(0, 1), part[:, 1:].flatten())

    for row in range(2):
        axis.backward(row, 0, Batch(lambda _, row=row: loss(x[2 * row : 2 * row + 2])))
    expected = torch.autograd.grad(loss(x), axis.params)
    for g_W, g in zip(axis.gradients_W, expected, strict=True):
        torch.testing.assert_close(g_W.mean(0), g)


def test_an_untrained_model_is_as_perplexed_as_a_uniform_guess():
    network, x = model(1000, hidden=64), tokens(8, 50, 1000)
    loss = nn.functional.cross_entropy(network(x[:, :-1], None)[0].flatten(0, 1), x[:, 1:].flatten())
    assert loss.exp().item() == pytest.approx(1000, rel=0.02)


def test_first_values():
    network = model(1000, hidden=64)
    weight = network.embedding.weight
    assert weight.abs().max().item() <= 0.1 and weight.std().item() == pytest.approx(0.1 / math.sqrt(3), rel=0.01)
    assert not network.decoder.bias.any()
    assert all(p.abs().max().item() <= 1 / 8 for p in network.recurrent.parameters())
    assert model(1000, hidden=64, tied=False).decoder.weight.abs().max().item() <= 0.1


def test_dropout_is_off_in_evaluation_and_keyed_by_the_generator():
    network, x = model(dropout=0.4), tokens()
    with kept_rng():
        drawn = []
        for seed in (3, 4, 3):
            torch.manual_seed(seed)
            drawn.append(network(x, None)[0])
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
    torch.testing.assert_close(network.eval()(x, None)[0], slow_twin(network, x))


def test_dropout_acts_before_between_and_after_layers():
    network = model(layers=3, dropout=0.5)
    calls = []
    network.dropout.register_forward_hook(lambda *_: calls.append(1))
    network(tokens(), None)
    assert len(calls) == 4
    assert all(layer.dropout == 0 for layer in network.recurrent)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"hidden": 0}, "hidden must be an integer of at least 1, got 0; type hidden=650"),
        ({"layers": 1.5}, "layers must be an integer of at least 1, got 1.5; type layers=3"),
        ({"dropout": 1}, "dropout must be a number at least 0 and below 1, got 1; type dropout=0.4"),
        ({"tied": "yes"}, "tied must be true or false, got yes; type tied=true"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ConfigError) as refused:
        model(**options)
    assert str(refused.value) == message
