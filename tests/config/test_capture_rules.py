"""What a GPU repeats by itself is known before anything starts; graphs=true refuses what would stay eager."""

from dataclasses import replace

import pytest

from accordion_bench.config import engine_rules
from accordion_bench.config.components import build_components
from accordion_bench.config.value_checks import refuse_wrong
from accordion_bench.options.checks import ConfigError
from accordion_bench.processes.placement import place
from accordion_bench.run_config import RunConfig
from tests.kit import composed


def refused(*overrides: str, device: str = "cuda", processes: int = 1) -> str:
    config = RunConfig.from_dict(composed.cfg(*overrides))
    where = replace(place(replace(config, graphs=None)), device=device, processes=processes)
    with pytest.raises(ConfigError) as error:
        engine_rules.refuse_graphs(config, build_components(config, where.workers), where)
    return str(error.value)


@pytest.mark.parametrize(
    ("overrides", "where", "why"),
    [
        ([], {"device": "cpu"}, "graphs must be null or false on a CPU, where nothing is captured"),
        ([], {"processes": 2}, "several processes exchange buckets"),
        (["profile=3"], {}, "profile records operations one by one"),
        (["compressor=dgc"], {}, "the exchange would stay eager: what the compressor sends depends on the data"),
        (["compressor=threshold"], {}, "the exchange would stay eager"),
        (["model=lstm", "dataset=synthetic_text"], {}, "the workers would stay eager: a recurrent network"),
        (["optimizer=muon"], {}, "torch has no fused kernel for this optimizer"),
    ],
    ids=str,
)
def test_graphs_true_says_what_would_stay_eager(overrides, where, why):
    sentence = refused("graphs=true", *overrides, **where)
    assert why in sentence and "graphs=null" in sentence and sentence.count("\n") == 0


@pytest.mark.parametrize(
    ("overrides", "where", "why"),
    [
        (["workers_at_once=2"], {"device": "cpu"}, "1 on a CPU, where nothing is replayed"),
        (
            ["workers_at_once=2"],
            {"processes": 2},
            "the workers' passes are not replayed: several processes exchange buckets",
        ),
        (["workers_at_once=2", "graphs=false"], {}, "not replayed: graphs is false"),
        (["workers_at_once=2", "model=lstm", "dataset=synthetic_text"], {}, "not replayed: a recurrent network"),
        (["workers_at_once=5"], {}, "at most 4, the workers of the process"),
    ],
    ids=str,
)
def test_workers_at_once_says_why_not(overrides, where, why):
    sentence = refused(*overrides, **where)
    assert why in sentence and "workers_at_once=" in sentence and sentence.count("\n") == 0


def test_workers_at_once_need_not_have_their_exchange_replayed():
    config = RunConfig.from_dict(composed.cfg("workers_at_once=4", "compressor=threshold"))
    where = replace(place(config), device="cuda", processes=1)
    engine_rules.refuse_graphs(config, build_components(config, where.workers), where)


def test_the_header_says_what_is_replayed():
    config = RunConfig.from_dict(composed.cfg())
    parts = build_components(config, 4)
    assert engine_rules.capture_told(engine_rules.stays_eager(config, parts, 1)) == "steps are captured and replayed"
    off = engine_rules.stays_eager(replace(config, graphs=False), parts, 1)
    assert engine_rules.capture_told(off) == "steps are eager: graphs is false"
    draws = RunConfig.from_dict(composed.cfg("compressor=threshold"))
    told = engine_rules.capture_told(engine_rules.stays_eager(draws, build_components(draws, 4), 1))
    assert told.startswith("steps are captured and replayed (exchange eager: what the compressor sends")
    several = engine_rules.capture_told({}, 3)
    assert several.endswith("replayed, 3 workers at once; times of a worker are sampled one by one")


def test_a_wrong_value_is_one_sentence():
    with pytest.raises(ConfigError, match="graphs must be"):
        refuse_wrong(RunConfig.from_dict({**composed.cfg(), "graphs": "sometimes"}))
    with pytest.raises(ConfigError, match="workers_at_once must be an integer of at least 1"):
        refuse_wrong(RunConfig.from_dict({**composed.cfg(), "workers_at_once": 0}))
