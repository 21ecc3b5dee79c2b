"""Sentences of the command line, in Python."""

import pytest

from accordion_bench.attaching.python_words import in_python, pass_instead
from accordion_bench.options.checks import ConfigError, ValueRefused

SAID = {
    "no; type compressor=topk": "no; pass compressor='topk'",
    "no; type compressor.zero_level=false": "no; pass zero_level=False",
    "no; type a lower compressor.rank": "no; pass a lower rank",
    "no; type one of compressor=topk, compressor=qsgd": "no; pass one of compressor='topk', compressor='qsgd'",
    "no; type adaptive=[accordion,lgreco]": "no; pass adaptive=['accordion', 'lgreco']",
    "no; type schedule=cosine, or adaptive.qsr.alpha=0": "no; pass another schedule, or adaptive={'qsr': {'alpha': 0}}",
    "no; type sync=local_sgd adaptive=qsr": "no; call ab.local(model, optimizer, sync='local_sgd', adaptive='qsr')",
    "no; type sync=every_step adaptive=alq": "no; call ab.attach(model, optimizer, adaptive='alq')",
    "no; type compressor=topk, or sync=every_step": "no; pass compressor='topk', or call ab.attach(model, optimizer)",
    "no; type optimizer=sgd": "no; pass a torch.optim.SGD",
    "no; pass rank=2": "no; pass rank=2",
}


@pytest.mark.parametrize("typed", SAID)
def test_what_to_type_becomes_what_to_pass(typed):
    assert pass_instead(typed) == SAID[typed]
    assert str(in_python(ConfigError(typed))) == SAID[typed]


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (ValueRefused("compressor.rank", "a number", "2", 2), "rank must be a number, got '2'; pass rank=2"),
        (
            ValueRefused("sync.final", "true or false", None, True),
            "final must be True or False, got None; pass final=True",
        ),
        (
            ValueRefused("adaptive.alq.every", "null or 5", 0, None),
            "adaptive.alq.every must be None or 5, got 0; pass adaptive={'alq': {'every': None}}",
        ),
        (
            ValueRefused("optimizer.momentum", "0", 0.9, 0),
            "optimizer.momentum must be 0, got 0.9; pass momentum=0 to the optimizer",
        ),
    ],
)
def test_a_refused_value(refused, said):
    assert str(in_python(refused)) == said
