"""FSDP2 with our exchange along the replicate axis: torch's HSDP where nothing is lost, the identities where it is."""

import importlib
import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp_common
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import accordion_bench as ab
from accordion_bench.attaching.fsdp import ReplicateAxis, attach_to_shards
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.compressors.base import NonFinite
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.partition import levelled
from accordion_bench.methods.compatibility import ladder_of
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.tensors import keyed_rng
from tests.kit.helpers import yaml_node
from tests.kit.processes import together

REPLICAS, SHARDS, STEPS, SEED = 2, 2, 5, 7
SECONDS = 300  # that a process may take: without a cache, numba compiles the kernels in each of them
FULL_RANK = {"rank": 64, "min_compression_rate": 0}
# by name: the compressor's file, options of it, how the model is sharded
DENSE = {
    "none": ("none", {}, {}),
    "none in micro-batches": ("none", {}, {"micro_batches": 2}),
    "none with a frozen parameter": ("none", {}, {"frozen": True}),
}
LOSSLESS = {
    "randomk at density 1": ("randomk", {"density": 1.0}, {}),
    "powersgd at full rank": ("powersgd", FULL_RANK, {}),
}
LOSSY = {
    "powersgd": ("powersgd", {"rank": 1, "min_compression_rate": 0}, {}),
    "randomk": ("randomk", {"density": 0.2}, {}),
}
# slow: another pass over everything, and numba compiles kernels in each of the four processes
MORE = {
    "none in bfloat16": ("none", {}, {"reduce_dtype": torch.bfloat16}),
    "none, sharded by columns": ("none", {}, {"columns": True}),
    "none of double precision": ("none", {}, {"dtype": torch.float64}),
    "none of bfloat16": ("none", {}, {"dtype": torch.bfloat16}),
    "none, modules wrapped together": ("none", {}, {"together": True}),
    "powersgd in bfloat16": ("powersgd", {"rank": 1, "min_compression_rate": 0}, {"reduce_dtype": torch.bfloat16}),
    "dist-EF-blockSGD": ("distefblocksgd", {"residual_units": "gradient", "worker_momentum": False}, {}),
    "powersgd, aggregate": ("powersgd", {"rank": 2, "min_compression_rate": 0, "residual": "aggregate"}, {}),
    "qsgd": ("qsgd", {}, {}),
    "threshold": ("threshold", {}, {}),
    "topk": ("topk", {"density": 0.2}, {}),
    "topk at density 1": ("topk", {"density": 1.0}, {}),
    "topk in micro-batches": ("topk", {"density": 0.2}, {"micro_batches": 2}),
}
CASES = {**DENSE, **LOSSLESS, **LOSSY, **MORE}


class Net(nn.Module):
    """Matrices, a convolution and vectors; 5 and 7 rows do not divide into equal shards, 1 row leaves one empty."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv1d(2, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 7))
        self.norm = nn.LayerNorm(7)
        self.outer = nn.Linear(7, 5)
        self.last = nn.Linear(5, 1)

    def forward(self, x: Tensor, to_the_end: bool = True) -> Tensor:
        hidden = self.outer(self.norm(self.inner(x).relu()))
        return self.last(hidden.relu()) if to_the_end else hidden


def node_of(name: str, **options) -> dict:
    return {**yaml_node("compressor", name), **options}


def sharded(mesh: DeviceMesh, seed: int = 0, **how) -> Net:
    """The net in two FSDP groups; `how` as in the cases."""
    torch.manual_seed(seed)
    net = Net().to(how.get("dtype", torch.float32))
    net.outer.bias.requires_grad_(not how.get("frozen", False))
    options: dict = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=how.get("reduce_dtype"))}
    if how.get("columns"):
        options["shard_placement_fn"] = lambda p: Shard(1) if p.ndim > 1 and p.shape[1] % SHARDS == 0 else None
    fully_shard([net.inner, net.norm] if how.get("together") else net.inner, **options)
    return fully_shard(net, **options)


def loss_of(net: nn.Module, step: int, micro_batch: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of this process's own samples."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * dist.get_rank() + micro_batch)
    return net(torch.randn(6, 2, 8, generator=generator).to(dtype)).square().mean()


def trained(net: nn.Module, steps: range, **how) -> list[Tensor]:
    """The parameters after some steps, what this process has of them."""
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05)
    parts = how.get("micro_batches", 1)
    for step in steps:
        for part in range(parts):
            if parts > 1:
                net.set_requires_gradient_sync(part == parts - 1)
            loss_of(net, step, part, how.get("dtype", torch.float32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return local(net)


def local(net: nn.Module) -> list[Tensor]:
    return [p.detach().to_local().clone() for p in net.parameters()]


def attached(net: nn.Module, mesh: DeviceMesh, name: str, **options) -> ReplicateAxis:
    return attach_to_shards(net, node_of(name, **options), mesh["replicate"].get_group(), SEED)


def recorded(axis: ReplicateAxis) -> dict[str, list[tuple[list[Tensor], list[Tensor]]]]:
    """What each group will hand over, and what it gets back, exchange by exchange; shards without padding."""
    seen: dict[str, list] = {}

    def hook_of(exchange) -> Callable[[Tensor], None]:
        def hook(reduced: Tensor) -> None:
            before = [shard_W[0].clone() for shard_W in exchange.group.split(reduced)]
            exchange(reduced)
            after = [shard_W[0].clone() for shard_W in exchange.group.split(reduced)]
            seen.setdefault(exchange.group.name, []).append((before, after))

        return hook

    for exchange in axis.exchanges:
        exchange.group.module.set_all_reduce_hook(hook_of(exchange))
    return seen


# ---- in each of the four processes


def _in_four(_: int, cases: list[str], edges: list[str], folder: str) -> None:
    """Fork them from one process that has imported FSDP2 and what `fully_shard` imports, once instead of four times."""
    importlib.import_module("torch._dynamo")
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=_run, args=(rank, cases, edges, folder)) for rank in range(REPLICAS * SHARDS)]
    for child in children:
        child.start()
    for child in children:
        child.join(SECONDS)
        if child.is_alive():
            child.kill()
    assert [child.exitcode for child in children] == [0] * len(children)


def _joined(rank: int, folder: str) -> DeviceMesh:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=REPLICAS * SHARDS)
    return init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replicate", "shard"))


def _run(rank: int, names: list[str], edges: list[str], folder: str) -> None:
    """Every case by our hook, and the dense ones by torch's own HSDP; then the edges. Saves what this process has."""
    mesh = _joined(rank, folder)
    found: dict = {}
    for name in names:
        compressor, options, how = CASES[name]
        # replicas start apart; the first one's parameters are everybody's
        net = sharded(mesh["shard"], seed=mesh["replicate"].get_local_rank(), **how)
        axis = attached(net, mesh, compressor, **options)
        seen = recorded(axis)
        exchanges = {exchange.group.name: exchange for exchange in axis.exchanges}
        found[name] = {
            "parameters": trained(net, range(STEPS), **how),
            "native": trained(sharded(mesh, **how), range(STEPS), **how) if compressor == "none" else None,
            "seen": seen,
            "specs": {group: [(s.name, s.shape) for s in e.exchange.specs] for group, e in exchanges.items()},
            "state": axis.state_dict(),
            "ledger": axis.ledger.columns(),
            "predicted": sum(
                e.exchange.predicted_bytes(StepInfo(e.plan, step)) for e in axis.exchanges for step in range(STEPS)
            ),
        }
    found["ddp"] = _of_ddp(mesh["shard"])
    for edge in edges:
        found[edge] = ""
        try:
            (EDGES | MORE_EDGES)[edge](mesh)
        except Exception:
            found[edge] = traceback.format_exc()
        dist.barrier()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _of_ddp(mesh: DeviceMesh) -> list[Tensor]:
    """This process's shards of the parameters that DistributedDataParallel comes to."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(STEPS):
        loss_of(ddp, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [distribute_tensor(p.detach(), mesh, [Shard(0)]).to_local() for p in ddp.module.parameters()]


class Found(dict):
    """By case, what each rank has come to; what is slow is run when one of it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, name: str) -> list:
        more = name in MORE or name in MORE_EDGES
        folder = self.folder / ("more" if more else "default")
        folder.mkdir()
        cases = [case for case in CASES if (case in MORE) == more]
        edges = [*(MORE_EDGES if more else EDGES)]
        together(1, _in_four, cases, edges, str(folder), seconds=5 * SECONDS)
        ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(REPLICAS * SHARDS)]
        for key in ranks[0]:
            self.setdefault(key, [of_rank[key] for of_rank in ranks])
        return self[name]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return Found(tmp_path_factory.mktemp("fsdp"))


def each(*names: str) -> list:
    """Cases for parametrize; those of `MORE` are slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in MORE else name for name in names]


def all_equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", each(*(name for name in CASES if name.startswith("none"))))
def test_dense_is_torchs_hsdp_bit_for_bit(found, name):
    for of_rank in found[name]:
        assert all_equal(of_rank["parameters"], of_rank["native"])


def test_dense_is_ddp_up_to_the_order_of_a_sum(found):
    for ours, theirs in zip(found["none"], found["ddp"], strict=True):
        torch.testing.assert_close(ours["parameters"], theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", each(*LOSSLESS, "topk at density 1"))
def test_what_loses_nothing_is_dense(found, name):
    for ours, dense in zip(found[name], found["none"], strict=True):
        torch.testing.assert_close(ours["parameters"], dense["parameters"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", each(*CASES))
def test_replicas_stay_equal_bit_for_bit(found, name):
    ranks = [of_rank["parameters"] for of_rank in found[name]]
    for shard in range(SHARDS):
        assert all_equal(ranks[shard], ranks[SHARDS + shard])


@pytest.mark.parametrize(
    "name", each(*LOSSY, *(name for name in MORE if "none" not in name and "density 1" not in name))
)
def test_something_is_lost(found, name):
    """The other tests are about something."""
    assert not all_equal(found[name][0]["parameters"], found["none"][0]["parameters"])


@pytest.mark.parametrize("name", each(*LOSSY, "powersgd, aggregate", "topk", "topk in micro-batches"))
def test_updates_and_residuals_sum_to_the_gradients(found, name):
    """sum of updates + mean of residuals = sum of mean gradients, for each parameter's shard."""
    ranks, compared = found[name], 0
    for shard in range(SHARDS):
        replicas = ranks[shard::SHARDS]
        for group, specs in replicas[0]["specs"].items():
            for i, (parameter, _) in enumerate(specs):
                seen = [replica["seen"][group] for replica in replicas]
                updates = sum(after[i].double() for _, after in seen[0])
                gradients = sum(before[i].double() for own in seen for before, _ in own) / REPLICAS
                states = [replica["state"]["groups"][group]["state"].get(parameter, {}) for replica in replicas]
                if "residual_W" in states[0]:
                    updates = updates + sum(state["residual_W"][0].double() for state in states) / REPLICAS
                    compared += gradients.numel() > 0
                torch.testing.assert_close(updates, gradients, rtol=1e-5, atol=1e-6)
    assert compared


@pytest.mark.parametrize("name", each(*LOSSY, "dist-EF-blockSGD", "qsgd", "threshold", "topk"))
def test_each_shard_is_an_exchange_between_its_replicas(found, name):
    """The same gradients, exchanged by both replicas' workers in one process, shard by shard."""
    compressor, options, _ = CASES[name]
    for shard in range(SHARDS):
        replicas = found[name][shard::SHARDS]
        for group, specs in replicas[0]["specs"].items():
            inner = wrapped_compressor(node_of(compressor, **options)).compressor
            tensors, seed = [TensorSpec(*spec) for spec in specs], keyed_rng.key(SEED, "shard", shard)
            twin = Exchange(inner, tensors, ladder_of(inner, {}), Comm(REPLICAS), torch.zeros(0), SendOptions(seed))
            plan = Plan(dict.fromkeys(levelled(inner, twin.sent), 0))
            for step, pairs in enumerate(zip(*(replica["seen"][group] for replica in replicas), strict=True)):
                shards_W = [torch.stack(list(own)) for own in zip(*(before for before, _ in pairs), strict=True)]
                updates = twin(shards_W, StepInfo(plan, step))
                torch.testing.assert_close(pairs[0][1], updates, rtol=1e-5, atol=1e-7)


def test_matrices_are_rows_and_names_are_the_parameters(found):
    specs = {rank: dict(found["powersgd"][rank]["specs"]["inner"]) for rank in (0, 1)}
    assert specs[0]["inner.3.weight"] == (4, 36)
    assert specs[1]["inner.3.weight"] == (3, 36)
    assert dict(found["powersgd"][1]["specs"][""])["last.weight"] == (0, 5)
    assert {"inner.0.weight", "inner.3.weight"} <= {*found["powersgd"][0]["state"]["groups"]["inner"]["state"]}


@pytest.mark.parametrize("name", each(*DENSE, *LOSSLESS, *LOSSY))
def test_the_ledger_counts_what_the_replicas_are_sent(found, name):
    for of_rank in found[name]:
        numel = sum(before.numel() for seen in of_rank["seen"].values() for before in seen[0][0])
        assert of_rank["ledger"]["payload_bytes"] == of_rank["predicted"]
        assert of_rank["ledger"]["dense_bytes"] == 4 * numel * STEPS
        if name in DENSE:
            assert of_rank["ledger"]["payload_bytes"] == of_rank["ledger"]["dense_bytes"]


def test_micro_batches_are_exchanged_once(found):
    for of_rank in found["none in micro-batches"]:
        assert [len(seen) for seen in of_rank["seen"].values()] == [STEPS, STEPS]


# ---- what is refused, kept and taken away


def _refused(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as refused:
        call()
    return str(refused.value)


def _regions_are_gradients(mesh: DeviceMesh) -> None:
    """What an exchange sees under a name is what FSDP2 makes the gradient of that parameter."""
    for how in ({}, {"frozen": True}, {"columns": True}, {"together": True}, {"dtype": torch.bfloat16}):
        net = sharded(mesh["shard"], **how)
        axis = attached(net, mesh, "randomk")
        seen = recorded(axis)
        loss_of(net, 0, dtype=how.get("dtype", torch.float32)).backward()
        gradients = {name: p.grad.to_local() for name, p in net.named_parameters() if p.requires_grad}
        found = {}
        for exchange in axis.exchanges:
            [(_, after)] = seen[exchange.group.name]
            found |= {spec.name: shard for spec, shard in zip(exchange.exchange.specs, after, strict=True)}
        assert found.keys() == gradients.keys()
        assert all(torch.equal(found[name], gradients[name]) for name in found)


def _loses_nothing_on_other_meshes(_: DeviceMesh) -> None:
    """Four replicas of one shard, one replica of four; in double precision a part of the division is after the hook."""
    for shape in ((4, 1), (1, 4)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        native, dense, full = (sharded(m, dtype=torch.float64) for m in (mesh, mesh["shard"], mesh["shard"]))
        attached(dense, mesh, "none")
        attached(full, mesh, "powersgd", **FULL_RANK)
        expected, found, close = (trained(net, range(2), dtype=torch.float64) for net in (native, dense, full))
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(close, expected, rtol=1e-12, atol=1e-12)


def _goes_with_activation_checkpointing(mesh: DeviceMesh) -> None:
    def checkpointed(of: DeviceMesh) -> Net:
        torch.manual_seed(0)
        net = Net()
        net.inner = checkpoint_wrapper(net.inner)
        fully_shard(net.inner, mesh=of)
        return fully_shard(net, mesh=of)

    net = checkpointed(mesh["shard"])
    attached(net, mesh, "none")
    assert all_equal(trained(net, range(2)), trained(checkpointed(mesh), range(2)))


def _refuses_models(mesh: DeviceMesh) -> None:
    assert "torch averages the replicas of an HSDP mesh itself" in _refused(
        lambda: attached(sharded(mesh), mesh, "none")
    )
    assert 'call fully_shard(model, mesh=mesh["shard"])' in _refused(lambda: attached(Net(), mesh, "none"))
    part = Net()
    fully_shard(part.inner, mesh=mesh["shard"])
    assert "got norm.weight, which is in none" in _refused(lambda: attached(part, mesh, "none"))
    mixed = Net()
    mixed.norm.double()
    fully_shard(mixed, mesh=mesh["shard"])
    assert "got torch.float32 and torch.float64" in _refused(lambda: attached(mixed, mesh, "none"))
    if hasattr(fsdp_common, "ShardPlacementResult"):  # torch 2.11 has one mesh for each call of fully_shard
        several = Net()
        everybody = fsdp_common.FSDPMeshInfo(init_device_mesh("cpu", (REPLICAS * SHARDS,)), shard_mesh_dim=0)
        elsewhere = fsdp_common.ShardPlacementResult(Shard(0), everybody)
        fully_shard(several, mesh=mesh["shard"], shard_placement_fn=lambda p: elsewhere if p.ndim > 1 else None)
        assert "the whole model must have one mesh for all its" in _refused(lambda: attached(several, mesh, "none"))
    with torch.device("meta"):
        empty = Net()
    fully_shard(empty, mesh=mesh["shard"])
    assert "call model.to_empty(...) first" in _refused(lambda: attached(empty, mesh, "none"))


def _refuses_compressors(mesh: DeviceMesh) -> None:
    net, group = sharded(mesh["shard"]), mesh["replicate"].get_group()
    assert "adaptive" in _refused(lambda: ab.attach_shards(net, "topk", process_group=group, adaptive="accordion"))
    assert "compressor must leave momentum to the optimizer" in _refused(lambda: attached(net, mesh, "dgc"))
    assert "type compressor.scope=tensor" in _refused(lambda: attached(net, mesh, "topk", scope="model"))


def _refuses_groups(mesh: DeviceMesh) -> None:
    net, shards, nobody = sharded(mesh["shard"]), mesh["shard"].get_group(), dist.new_group([0])
    same = _refused(lambda: attach_to_shards(net, node_of("none"), shards))
    assert same.startswith("process_group must hold one process of each shard group")
    if dist.get_rank():
        outside = _refused(lambda: attach_to_shards(net, node_of("none"), nobody))
        assert outside.startswith("process_group must hold this process")


def _refuses_other_replicas(mesh: DeviceMesh) -> None:
    net, group = sharded(mesh["shard"]), mesh["replicate"].get_group()
    first = dist.get_rank(group) == 0
    seeds = _refused(lambda: attach_to_shards(net, node_of("none"), group, 0 if first else 3))
    assert "got seed=0 on rank 0 and seed=3 on rank 1" in seeds
    name = "powersgd" if first else "acpsgd"  # two with the same knob at the same level
    assert "got compressor._target_=" in _refused(lambda: attach_to_shards(net, node_of(name, rank=2), group))
    options = _refused(lambda: attach_to_shards(net, node_of("topk", error_feedback=first), group))
    assert "got compressor.error_feedback=True on rank 0" in options


def _refuses_what_has_no_gradient(mesh: DeviceMesh) -> None:
    net, x = sharded(mesh["shard"]), torch.randn(6, 2, 8)
    attached(net, mesh, "none")
    with pytest.raises(RuntimeError, match="had no gradient in this backward pass"):
        net(x, to_the_end=False).sum().backward()
    if hasattr(net, "set_reduce_scatter_unused_params"):
        net = sharded(mesh["shard"])
        attached(net, mesh, "none")
        net.set_reduce_scatter_unused_params(True)
        net(x, to_the_end=False).sum().backward()
        assert net.last.weight.grad.to_local().eq(0).all()
    net = sharded(mesh["shard"])
    attached(net, mesh, "none")
    net.outer.bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="attach again after requires_grad has changed"):
        loss_of(net, 0).backward()


def _refuses_what_is_not_finite(mesh: DeviceMesh) -> None:
    net = sharded(mesh["shard"])
    attached(net, mesh, "none")
    with pytest.raises(NonFinite, match=f"on worker {dist.get_rank()} is not finite"):
        (loss_of(net, 0) * float("nan")).backward()


def _continues_from_saved_state(mesh: DeviceMesh) -> None:
    net = sharded(mesh["shard"])
    axis = attached(net, mesh, "powersgd", rank=1, min_compression_rate=0)
    parameters, saved = trained(net, range(2)), axis.state_dict()
    straight = trained(net, range(2, 4))
    resumed = sharded(mesh["shard"], seed=3)
    with torch.no_grad():
        for parameter, value in zip(resumed.parameters(), parameters, strict=True):
            parameter.to_local().copy_(value)
    again = attached(resumed, mesh, "powersgd", rank=1, min_compression_rate=0)
    again.load_state_dict(saved)
    assert all_equal(trained(resumed, range(2, 4)), straight)
    assert again.ledger.columns()["payload_bytes"] == axis.ledger.columns()["payload_bytes"]
    whole = fully_shard(Net(), mesh=mesh["shard"])
    other = attached(whole, mesh, "powersgd")
    assert "call fully_shard on the modules of the saved run" in _refused(lambda: other.load_state_dict(saved))


def _detaches(mesh: DeviceMesh) -> None:
    net = sharded(mesh["shard"])
    axis = attached(net, mesh, "randomk")
    trained(net, range(1))
    sent = axis.ledger.columns()["payload_bytes"]
    assert "call detach() on what was attached before" in _refused(lambda: attached(net, mesh, "none"))
    axis.detach()
    trained(net, range(1, 2))
    assert axis.ledger.columns()["payload_bytes"] == sent > 0
    assert attached(net, mesh, "none").ledger.columns()["payload_bytes"] == 0


# each in all four processes, since they exchange something
EDGES = {
    "names and regions": _regions_are_gradients,
    "activation checkpointing": _goes_with_activation_checkpointing,
    "models that are not sharded so": _refuses_models,
    "compressors that need more than shards": _refuses_compressors,
    "groups that are no replicas": _refuses_groups,
    "replicas with other seeds": _refuses_other_replicas,
    "parameters without a gradient": _refuses_what_has_no_gradient,
    "gradients that are not finite": _refuses_what_is_not_finite,
    "saved state": _continues_from_saved_state,
    "detaching": _detaches,
}
MORE_EDGES = {"other meshes": _loses_nothing_on_other_meshes}


@pytest.mark.parametrize("edge", [*EDGES, *(pytest.param(edge, marks=pytest.mark.slow) for edge in MORE_EDGES)])
def test_at_the_edges(found, edge):
    assert found[edge] == [""] * REPLICAS * SHARDS
