"""A refusal, as it is said on a command line and in Python."""

import pytest

from accordion_bench.options.checks import ConfigError, Less, ValueRefused

WAYS = [
    ([{"compressor": "topk"}], "type compressor=topk", "pass compressor='topk'"),
    ([{"compressor.zero_level": False}], "type compressor.zero_level=false", "pass zero_level=False"),
    ([Less("a lower", "compressor.rank")], "type a lower compressor.rank", "pass a lower rank"),
    (
        [{"compressor": "topk"}, {"compressor": "qsgd"}, {"compressor": "powersgd"}],
        "type one of compressor=topk, compressor=qsgd, compressor=powersgd",
        "pass one of compressor='topk', compressor='qsgd', compressor='powersgd'",
    ),
    (
        [{"adaptive": ["accordion", "lgreco"]}],
        "type adaptive=[accordion,lgreco]",
        "pass adaptive=['accordion', 'lgreco']",
    ),
    (
        [{"schedule": "cosine"}, {"adaptive.qsr.alpha": 0}],
        "type schedule=cosine, or adaptive.qsr.alpha=0",
        "pass another schedule, or adaptive={'qsr': {'alpha': 0}}",
    ),
    (
        [{"sync": "local_sgd", "adaptive": "qsr"}],
        "type sync=local_sgd adaptive=qsr",
        "call ab.local(model, optimizer, sync='local_sgd', adaptive='qsr')",
    ),
    (
        [{"sync": "every_step", "adaptive": "alq"}],
        "type sync=every_step adaptive=alq",
        "call ab.attach(model, optimizer, adaptive='alq')",
    ),
    (
        [{"compressor": "topk"}, {"sync": "every_step"}],
        "type compressor=topk, or sync=every_step",
        "pass compressor='topk', or call ab.attach(model, optimizer)",
    ),
    ([{"optimizer": "sgd"}], "type optimizer=sgd", "pass a torch.optim.SGD"),
    (
        [{"compressor.block": "tensor", "compressor.block_size": None}],
        "type compressor.block=tensor compressor.block_size=null",
        "pass block='tensor', block_size=None",
    ),
    (["fewer workers"], "type fewer workers", "pass fewer workers"),
]


@pytest.mark.parametrize(("ways", "typed", "passed"), WAYS)
def test_what_to_do_instead(ways, typed, passed):
    refused = ConfigError("no", *ways)
    assert str(refused) == f"no; {typed}"
    assert str(refused.in_python()) == f"no; {passed}"


def test_a_sentence_without_a_way_out_stays():
    assert str(ConfigError("no; pass rank=2").in_python()) == "no; pass rank=2"


@pytest.mark.parametrize(
    ("refused", "typed", "passed"),
    [
        (
            ValueRefused("compressor.rank", "a number", "2", 2),
            "compressor.rank must be a number, got 2; type compressor.rank=2",
            "rank must be a number, got '2'; pass rank=2",
        ),
        (
            ValueRefused("sync.final", "{true} or {false}", None, True),
            "sync.final must be true or false, got null; type sync.final=true",
            "final must be True or False, got None; pass final=True",
        ),
        (
            ValueRefused("adaptive.alq.every", "{null} or 5", 0, None),
            "adaptive.alq.every must be null or 5, got 0; type adaptive.alq.every=null",
            "adaptive.alq.every must be None or 5, got 0; pass adaptive={'alq': {'every': None}}",
        ),
        (
            ValueRefused("optimizer.momentum", "0", 0.9, 0),
            "optimizer.momentum must be 0, got 0.9; type optimizer.momentum=0",
            "optimizer.momentum must be 0, got 0.9; pass momentum=0 to the optimizer",
        ),
    ],
)
def test_a_refused_value(refused, typed, passed):
    assert str(refused) == typed
    assert str(refused.in_python()) == passed
