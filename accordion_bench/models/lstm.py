"""LSTM language model."""

import torch
from torch import Tensor, nn

from accordion_bench.options import checks
from accordion_bench.options.option import Choice, option, with_options

State = tuple[Tensor, Tensor]  # (h, c), each [layers, B, hidden]


@with_options
class LSTM(nn.Module):
    """logits_t = V y_t + b, y = d(LSTM(.. d(LSTM(d(E[tokens]))))), d dropout; with tied weights V is E.

    Initialisation as in the usual word-level language models: E and V uniform in +-0.1, b = 0. The recurrent layers
    keep torch's initialisation, uniform in +-1 / sqrt(hidden).

    Args:
        vocabulary: number of tokens.

    Dropout follows the embedding and each layer; weights are tied as by Press and Wolf 2017, Inan et al. 2017. 3 layers
    x 650, tied, has 31,819,578 parameters with WikiText-2's 33,278 tokens, as in the Accordion experiments.
    Source: Zaremba et al. 2014 (arXiv 1409.2329).
    """

    task = "text"
    chosen_as = {
        "lstm": Choice(
            "language model as in the Accordion paper: 31,819,578 parameters with WikiText-2's 33,278 tokens"
        ),
        "lstm_small": Choice(
            "the same language model in a size for CPUs", {"hidden": 128, "layers": 2, "dropout": 0.2}
        ),
    }

    def __init__(
        self,
        vocabulary: int,
        hidden: int = option("units per layer, and dimension of the embedding", default=650, at_least=1),
        layers: int = option(default=3, at_least=1),
        dropout: float = option("fraction of activations that is zeroed", default=0.4, at_least=0, below=1),
        tied: bool = option("share one tensor between embedding and output layer", default=True),
    ) -> None:
        super().__init__()
        checks.integer("vocabulary", vocabulary, at_least=2)
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(vocabulary, hidden)
        # one module per layer, because cuDNN's dropout between layers uses a generator that cannot be seeded
        self.recurrent = nn.ModuleList(nn.LSTM(hidden, hidden, batch_first=True) for _ in range(layers))
        self.decoder = nn.Linear(hidden, vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        if tied:
            self.decoder.weight = self.embedding.weight
        else:
            nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Return logits [B, T, vocabulary] of the token after each of tokens [B, T], and the state after the last one.

        state: None = zeros, or the result of an earlier call; gradients flow through it unless the caller detaches it.
        """
        y = self.dropout(self.embedding(tokens))
        ends = []
        for i, layer in enumerate(self.recurrent):
            # cuDNN refuses states that are not contiguous, such as slices of a batch
            begin = None if state is None else (state[0][i : i + 1].contiguous(), state[1][i : i + 1].contiguous())
            y, end = layer(y, begin)
            y = self.dropout(y)
            ends.append(end)
        h, c = (torch.cat(parts) for parts in zip(*ends, strict=True))
        return self.decoder(y), (h, c)
