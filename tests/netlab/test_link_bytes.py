"""Bytes that interfaces of four hosts count, and those of the ledger; needs root and network namespaces."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accordion_bench.attaching.fsdp import scattered
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.ledger import Ledger
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.netlab import hosts
from accordion_bench.network import fit
from accordion_bench.network.meter import Interface
from accordion_bench.plan import Ladder, Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.sync.gossip import GraphNeighbours
from accordion_bench.sync.what import SparseAverage
from accordion_bench.sync.who import PairExchange
from tests.kit import inside
from tests.kit.helpers import exchange_for, yaml_names, yaml_node
from tests.kit.processes import together

pytestmark = [pytest.mark.netlab, pytest.mark.usefixtures("allowed")]
LARGE = 256 * 1024  # bytes of a message, from which on counters and ledger agree as they are
AGREE = 0.03
SPECS = [TensorSpec("matrix", (65536, 32)), TensorSpec("bias", (512,))]
# so that messages of two million coordinates are large; what is not named here travels as its file says
OPTIONS = {
    "adacomp": {"bin_dense": 50},
    "demo": {"k": 128},
    "powersgd": {"rank": 4},
}
SHARD_AXIS = {"none": ("none", {}), "fp8": ("fp8", {}), "int8": ("int8", {}), "int4": ("qsgdinf", {"bits": 4})}
CALLS = ("all_reduce", "all_gather", "all_gather_uneven", "all_to_all", "all_reduce_max", "send_receive")
CALIBRATED, SMALL = (1_000, 16_000, LARGE), 4_000  # bytes of a worker's message; from those follows what this one costs


# ---- in every host


class Noted(Ledger):
    """Notes the size of every message that is handed to a collective."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.messages: list[int] = []

    def _charge(self, kind: str, payload: int, wire: int, rounds: int) -> None:
        self.messages.append(payload // self.workers)
        super()._charge(kind, payload, wire, rounds)


@contextlib.contextmanager
def counted(comm: Comm, row: dict) -> Iterator[None]:
    """Fill a row with what the ledger and the interface count."""
    interface = Interface(hosts.INTERFACE)
    comm.ledger = ledger = Noted(comm.workers)
    dist.barrier()
    time.sleep(0.05)
    before = interface.sent()
    yield
    ended = torch.tensor([time.monotonic()], dtype=torch.float64)
    dist.all_reduce(ended, op=dist.ReduceOp.MAX)
    time.sleep(max(0.0, float(ended) + 0.06 - time.monotonic()))
    sent = torch.tensor([interface.sent() - before], dtype=torch.int64)
    dist.all_reduce(sent)
    wire, rounds = (ledger.columns()[key] for key in ("wire_bytes", "rounds"))
    largest = max(ledger.messages, default=0)
    row |= {"wire_bytes": wire, "rounds": rounds, "link_sent_bytes": int(sent) / comm.workers, "largest": largest}


def call(comm: Comm, name: str, nbytes: int) -> None:
    """One collective with about so many bytes of each worker."""
    if name == "all_reduce":
        comm.all_reduce_mean([torch.ones(1, nbytes // 4)])
    elif name == "all_gather":
        comm.all_gather(torch.ones(1, nbytes, dtype=torch.uint8))
    elif name == "all_gather_uneven":
        sizes = [nbytes * (worker + 1) // comm.workers for worker in range(comm.workers)]
        comm.all_gather_uneven([torch.ones(sizes[comm.rank], dtype=torch.uint8)], sizes)
    elif name == "all_to_all":
        comm.all_to_all([torch.ones(1, nbytes // comm.workers, dtype=torch.uint8)] * comm.workers)
    elif name == "send_receive":
        comm.send_receive(torch.ones(1, nbytes, dtype=torch.uint8), [worker ^ 1 for worker in range(comm.workers)])
    else:
        comm.all_reduce_max(list(torch.ones(nbytes // 4)))


def measure(host: int, entrances: list[inside.Entrance], file: Path) -> None:
    """Every compressor's exchange and every collective; host 0 writes the rows."""
    inside.enter(entrances[host])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = Comm(1, dist.get_world_size(), dist.get_rank())
    rows: list[dict] = []
    for name in CALLS:
        for size in (*CALIBRATED, SMALL):
            rows.append({"what": name, "size": size})
            with counted(comm, rows[-1]):
                for _ in range(2 if size == LARGE else 20):
                    call(comm, name, size)
    g = torch.Generator().manual_seed(comm.rank)
    xs_W = [torch.randn(1, *spec.shape, generator=g) for spec in SPECS]
    for name in yaml_names("compressor"):
        exchange, plan = exchange_for(name, specs=SPECS, dtype=torch.float32, comm=comm, **OPTIONS.get(name, {}))
        rows.append({"what": f"compressor={name}"})
        with counted(comm, rows[-1]):
            exchange(xs_W, StepInfo(plan, exchange.start_step, 0.1))
    schemes = {
        "sparta": SparseAverage(0.1, SPECS, comm, xs_W[0]),
        "noloco": PairExchange(SPECS, comm, xs_W[0]),
        "gossip": GraphNeighbours("ring", SPECS, comm, xs_W[0]),
    }
    for name, exchange in schemes.items():
        rows.append({"what": f"sync={name}"})
        with counted(comm, rows[-1]):
            exchange(xs_W, StepInfo(plan, 0, 0.1))
    for name, (compressor, options) in SHARD_AXIS.items():
        rows.append({"what": f"shards={name}"})
        with counted(comm, rows[-1]):
            reduced_to_shards(comm, compressor, **options)
    if comm.leader:
        file.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def reduced_to_shards(comm: Comm, name: str, **options) -> None:
    """The reduce-scatter of `ab.attach_shards`: of each of four shards of a matrix and a bias."""
    specs = [TensorSpec(f"{spec.name}[{w}]", (spec.shape[0] // 4, *spec.shape[1:])) for spec in SPECS for w in range(4)]
    owners = {spec.name: number % 4 for number, spec in enumerate(specs)}
    compressor = scattered({**yaml_node("compressor", name), **options}, owners).compressor
    exchange = Exchange(compressor, specs, Ladder(), comm, torch.zeros(0))
    exchange([torch.randn(1, *spec.shape) for spec in specs], StepInfo(Plan({}), 0))


# ---- bytes


@pytest.fixture(scope="module")
def rows(allowed: None, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int | None], dict]:
    """Four hosts for all of them."""
    file = tmp_path_factory.mktemp("netlab") / "rows.json"
    with hosts.Hosts(4) as four:
        together(4, measure, inside.entrances(four), file)
    return {(row["what"], row.get("size")): row for row in json.loads(file.read_text())}


def ratio(row: dict) -> float:
    return row["link_sent_bytes"] / row["wire_bytes"]


@pytest.mark.parametrize("name", yaml_names("compressor"))
def test_interfaces_and_ledger_agree_for_every_compressor(rows, name):
    row = rows[f"compressor={name}", None]
    assert row["largest"] >= LARGE
    assert abs(ratio(row) - 1) < AGREE, row


@pytest.mark.parametrize("name", ["sparta", "noloco", "gossip"])
def test_interfaces_and_ledger_agree_for_schemes_with_exchanges_of_their_own(rows, name):
    row = rows[f"sync={name}", None]
    assert row["largest"] >= LARGE
    assert abs(ratio(row) - 1) < AGREE, row


@pytest.mark.parametrize("name", SHARD_AXIS)
def test_interfaces_and_ledger_agree_for_gradients_reduced_to_shards(rows, name):
    row = rows[f"shards={name}", None]
    assert row["largest"] >= LARGE
    assert abs(ratio(row) - 1) < AGREE, row


@pytest.mark.parametrize("name", CALLS)
def test_interfaces_and_ledger_agree_for_every_collective(rows, name):
    row = rows[name, LARGE]
    assert abs(ratio(row) - 1) < AGREE, row


@pytest.mark.parametrize("name", CALLS)
def test_small_messages_agree_after_their_calibrated_cost(rows, name):
    cost = fit.overhead([rows[name, size] for size in CALIBRATED])
    row = rows[name, SMALL]
    after = row["link_sent_bytes"] / cost.counted(row)
    print(f"{name}: {cost.message:.0f} bytes a round; {ratio(row):.3f} before, {after:.3f} after")
    assert abs(after - 1) < AGREE
