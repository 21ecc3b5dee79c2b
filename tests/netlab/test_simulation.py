"""Simulated and real links where one host is slow; needs root and network namespaces."""

import json
import os
import statistics
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from accordion_bench.advising.disturbances import Disturbances, UnsteadyLinks
from accordion_bench.advising.predict import BucketCost, Messages
from accordion_bench.netlab import hosts
from accordion_bench.network.link_model import Network
from scripts.studies import validate_simulation
from tests.kit import inside
from tests.kit.processes import together

pytestmark = [pytest.mark.netlab, pytest.mark.usefixtures("allowed")]
FAST, SLOW = 1e8, 2e7
CARRIED = 0.945  # of a rate, by messages: the rest is headers and acknowledgements
NBYTES, REPEATED = 1_000_000, 5
AGREE = 0.1
TRIES = 3  # what else the machine does in between is none of the links'


def around(host: int, entrances: list[inside.Entrance], file: Path) -> None:
    """All-reduces one after another; host 0 writes the seconds of all."""
    inside.enter(entrances[host])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    message = torch.ones(NBYTES // 4)
    dist.all_reduce(message[:1000])
    dist.barrier()
    time.sleep(0.2)  # until the links have saved their bursts again
    dist.barrier()
    began = time.perf_counter()
    for _ in range(REPEATED):
        dist.all_reduce(message)
    took = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    if host == 0:
        file.write_text(json.dumps(float(took)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.sample(3)
@pytest.mark.parametrize("number", [2, 3, 4])
def test_a_ring_goes_at_the_rate_of_the_slow_host(tmp_path, number):
    slow = number - 1
    network = Network(CARRIED * FAST, 1e-3, burst=hosts.burst_bytes(SLOW))
    links = UnsteadyLinks(network, Disturbances(slow_links={slow: CARRIED * SLOW}), number, seed=0)
    stage = BucketCost((0,), 0.0, (0.0, 0.0), {"all_reduce": Messages(NBYTES, 0, 1)}).stage(0.0, number)
    end = 0.0
    for _ in range(REPEATED):
        end = links.collectives(stage, end, np.ones(number, dtype=bool))
    took = []
    with hosts.Hosts(number, FAST, {slow: SLOW}) as lab:
        while len(took) < TRIES and end != pytest.approx(min(took, default=0.0), rel=AGREE):
            file = tmp_path / f"seconds-{len(took)}.json"
            together(number, around, inside.entrances(lab), file)
            took.append(json.loads(file.read_text()))
    assert min(took) == pytest.approx(end, rel=AGREE), took


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [2, 3, 4])
def test_steps_with_a_slow_host_are_those_that_are_simulated(number):
    """On a machine with nothing else to do; see results/advice/simulation.md."""
    if os.getloadavg()[0] > 1:
        pytest.skip("the machine is busy")
    errors = [cell.error for cell in validate_simulation.cells(number, FAST, SLOW, rounds=5, seconds=2.0)]
    assert statistics.median(map(abs, errors)) < AGREE
