"""Numbers beyond the data, the tensors, the run or the machine are refused in one sentence; what fits them is not."""

import os

import pytest

from accordion_bench.config.validate import validate
from accordion_bench.options.checks import ConfigError
from accordion_bench.processes.placement import PER_CORE, place
from accordion_bench.run_config import RunConfig
from tests.kit import composed

HUGE = 10**20
RANK = ["compressor=powersgd", "adaptive=accordion"]
MOST = PER_CORE * (os.cpu_count() or 1)


def told(typed: list[str], over: dict) -> str:
    """What is said of a configuration in which some values are set by hand."""
    cfg = composed.cfg(*typed)
    for key, value in over.items():
        *path, last = key.split(".")
        node = cfg
        for part in path:
            node = node[part]
        assert last in node
        node[last] = value
    config = RunConfig.from_dict(cfg)
    try:
        validate(config, place(config, environ={}, gpus=0), set(over))
    except ConfigError as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize(
    "typed, over, sentence",
    [
        ([], {"seed": 2**63}, f"seed must be an integer of at most {2**63 - 1}, got {2**63}; type"),
        ([], {"epochs": 10**14}, "epochs must be an integer of at most 1000000, got 1000"),
        ([], {"batch_size": HUGE}, "batch_size must be at most 1437, because there are 1437 training samples, "),
        ([], {"micro_batch_size": 33}, "micro_batch_size must be at most batch_size=32, got 33; "),
        ([], {"workers": 1438}, "workers must be at most 1437, one worker for each training sample, got 1438; "),
        ([], {"dataset.subset": 3}, "workers must be at most 3, one worker .*, got 4; type workers=3"),
        ([], {"comm.workers_per_process": 2**40}, "comm.workers_per_process must be at most 1437, one worker for each"),
        ([], {"dataset.subset": 1438}, "dataset.subset must be at most 1437, the whole training set, got "),
        ([], {"profile": 720}, "profile must be below 720, the steps of the run, of which the first"),
        ([], {"schedule.milestones": [0.8, 0.5]}, "schedule.milestones must be rising, .*, got [0.8,0.5]; type "),
        ([], {"schedule.milestones": [30, 0.5]}, "schedule.milestones must be rising, in a run of 60 epochs, got"),
        ([], {"schedule.warmup_epochs": 61}, "schedule.warmup_epochs must be at most epochs=60, got 61; "),
        ([], {"choices": {"adaptive": "alq,alq"}}, "adaptive must name each policy once, got alq twice; "),
        (["compressor=powersgd"], {"compressor.rank": HUGE}, "compressor.rank must be at most 64, the rank of the "),
        (RANK, {"adaptive.accordion.weak": HUGE}, "adaptive.accordion.weak must be at most 64, the rank of the"),
        (["compressor=topk"], {"compressor.density": 1e-12}, "compressor.density must be at least 1/36864, one entry"),
        (["compressor=demo"], {"compressor.k": HUGE}, "compressor.k must be at most 4096, the coefficients of"),
        (["comm=gloo"], {"comm.processes": MOST + 1}, f"comm.processes must be at most {MOST} on this machine, 16"),
        (["comm=gloo"], {"workers": 10**11}, f"comm.processes must be at most {MOST} on this machine, 16"),
        (["comm=gloo"], {"comm.timeout": 1e30}, "comm.timeout must be a number above 0 and at most 1e+08, got"),
    ],
)  # fmt: skip
def test_beyond_is_one_sentence(typed, over, sentence):
    said = told(typed, over)
    start, _, rest = sentence.partition(".*")
    assert said.startswith(start) and rest in said and "; type " in said and "\n" not in said, said


@pytest.mark.parametrize(
    "typed, over",
    [
        ([], {"seed": 2**63 - 1, "epochs": 10**6}),
        ([], {"workers": 1437, "batch_size": 1437, "micro_batch_size": 1437}),
        ([], {"dataset.subset": 1437, "profile": 719, "schedule.warmup_epochs": 60}),
        ([], {"schedule.milestones": [0.5, 0.8, 59]}),
        (["compressor=powersgd"], {"compressor.rank": 64}),
        (["compressor=topk"], {"compressor.density": 1 / 36864}),
        (["compressor=powersgd", "adaptive=schedule"], {"adaptive.schedule.ranges": [[0, 9, "dense"], [9, None, 1]]}),
        (["comm=gloo"], {"comm.processes": MOST}),
        (["adaptive=accordion_batch"], {"micro_batch_size": 64}),  # the batch will be larger than that
    ],
)
def test_up_to_the_limit(typed, over):
    assert told(typed, over) == ""


def test_a_default_gives_way_to_a_short_run():
    """Five epochs of warm-up in a run of three; a density that a small model rounds up to one entry."""
    assert told([], {"epochs": 3}) == ""
    config = RunConfig.from_dict(composed.cfg("compressor=topk", "compressor.density=1e-6"))
    validate(config, place(config, environ={}, gpus=0))  # not typed


def test_a_batch_that_no_worker_can_fill_is_told():
    warned = composed.warnings(composed.cfg("workers=64"), {"workers"})
    assert warned == ["batch_size=32 is more than the 23 samples that each worker has"]
