"""Training on hosts behind links: what travels, and links that are cut; needs root and network namespaces."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accordion_bench import train
from accordion_bench.netlab import hosts
from tests.kit import composed, inside
from tests.kit.labs import lab
from tests.kit.processes import together

pytestmark = [pytest.mark.netlab, pytest.mark.usefixtures("allowed")]
Job = Callable[[str], tuple[subprocess.CompletedProcess, Path]]
AGREE = 0.03
# of a model whose start-up broadcast takes as long as a step
ONE_STEP = [
    "model=resnet20",
    "dataset=synthetic",
    "dataset.train_size=8",
    "dataset.test_size=8",
    "batch_size=4",
    "epochs=1",
    "comm=gloo",
    "comm.interface=eth0",
    "comm.workers_per_process=1",
]


@pytest.fixture(scope="module")
def ended(allowed: None, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Of a job's name, how it has ended, and the folder of its runs."""
    run = "-m accordion_bench comm=gloo comm.interface=eth0 comm.workers_per_process=1 tracker=none"
    torchrun = f"{sys.executable} -m torch.distributed.run --nnodes=$WORLD_SIZE --nproc_per_node=1"
    static = "--node_rank=$RANK --master_addr=$MASTER_ADDR --master_port=29501"
    elastic = "--rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:29501 --local_addr=$HOST_ADDR"
    elastic += " --rdzv_conf=is_host=$([ $RANK = 0 ] && echo 1 || echo 0)"
    two = ["--hosts", "2", "--rate"]
    words = {
        "static": [*two, "100mbit", "--cut", "1:1s@0.2s", "--command", f"{torchrun} {static} {run} epochs=3"],
        "elastic": [*two, "none", "--command", f"{torchrun} {elastic} {run} epochs=1"],
        "long cut": [*two, "100mbit", "--cut", "1:200s@0.3s", "--", "comm.timeout=8", "epochs=200"],
    }

    @functools.cache
    def end(name: str) -> tuple[subprocess.CompletedProcess, Path]:
        folder = tmp_path_factory.mktemp("runs")
        *options, last = words[name]
        paths = f"paths.runs={folder}"
        return lab(*options, *([last, paths] if "--" in options else [f"{last} {paths}"])), folder

    return end


def summary(folder: Path) -> dict:
    (file,) = folder.glob("*/summary.json")
    return json.loads(file.read_text())


@pytest.mark.sample(2)
@pytest.mark.parametrize("rendezvous", ["static", "elastic"])
def test_torchrun_meets_across_hosts(ended, rendezvous):
    done, folder = ended(rendezvous)
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(folder)["steps"] > 0


@pytest.mark.slow
def test_a_run_records_what_its_link_has_carried(ended):
    _, folder = ended("elastic")
    found = summary(folder)
    on_links = found["wire_bytes"] + found["control_wire_bytes"]
    assert abs(found["link_sent_bytes"] / on_links - 1) < AGREE, (found["link_sent_bytes"], on_links)


def train_inside(host: int, entrances: list[inside.Entrance], cfg: dict) -> None:
    inside.enter(entrances[host])
    train.run(cfg)


def test_what_is_sent_before_the_first_step_is_not_counted(tmp_path):
    cfg = composed.cfg(*ONE_STEP, f"paths.runs={tmp_path}")
    with hosts.Hosts(2, 1e8) as two:
        together(2, train_inside, inside.entrances(two), cfg)
    found = summary(tmp_path)
    assert found["steps"] == 1
    on_links = found["wire_bytes"] + found["control_wire_bytes"]
    assert abs(found["link_sent_bytes"] / on_links - 1) < AGREE, (found["link_sent_bytes"], on_links)


WHOLE = ["sync=diloco", "sync.period=8"]
STREAMED = ["sync=streaming_diloco", "sync.period=8", "sync.delay=3"]


@pytest.mark.slow
def test_fragments_travel_behind_the_next_steps(tmp_path):
    """At the same rate: as many bytes on the link as DiLoCo sends, and less of their time is waited for."""
    long = ["dataset.train_size=1024", "batch_size=32", "sync.final=false"]  # 16 steps
    found = {}
    for name, scheme in {"whole": WHOLE, "streamed": STREAMED}.items():
        cfg = composed.cfg(*ONE_STEP, *scheme, *long, f"paths.runs={tmp_path / name}")
        with hosts.Hosts(2, 3e7) as two:
            together(2, train_inside, inside.entrances(two), cfg)
        found[name] = summary(tmp_path / name)
        on_links = found[name]["wire_bytes"] + found[name]["control_wire_bytes"]
        assert abs(found[name]["link_sent_bytes"] / on_links - 1) < AGREE, (
            name,
            found[name]["link_sent_bytes"],
            on_links,
        )
    whole, streamed = found["whole"], found["streamed"]
    print({name: (one["exposed_seconds"], one["comm_seconds"]) for name, one in found.items()})
    assert whole["steps"] == streamed["steps"] == 16 and whole["payload_bytes"] == streamed["payload_bytes"]
    assert streamed["exposed_seconds"] < 0.6 * whole["exposed_seconds"]


def test_a_link_that_is_cut_for_less_than_the_timeout_is_waited_for(ended):
    done, folder = ended("static")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.index("link of host 1 is down") < done.stderr.index("link of host 1 is up again")
    assert summary(folder)["epochs"] == 3


@pytest.mark.slow
def test_a_link_that_is_cut_for_longer_ends_the_run(ended):
    done, folder = ended("long cut")
    assert done.returncode not in (0, 2), done.stdout + done.stderr
    assert "link of host 1 is down" in done.stderr
    assert "is up again" not in done.stderr
    assert not list(folder.glob("*/done"))
