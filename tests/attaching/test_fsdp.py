"""FSDP2 with our exchanges along both axes: torch's own where nothing is lost, identities elsewhere."""

import traceback
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import accordion_bench as ab
from accordion_bench.attaching.attached import Attached
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.compressors.compressor import NonFinite
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.partition import levelled
from accordion_bench.methods.compatibility import ladder_of
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.tensors import keyed_rng
from tests.kit.fsdp import (
    REPLICAS,
    SHARDS,
    Found,
    Net,
    Seen,
    all_equal,
    joined,
    loss_of,
    node_of,
    sgd,
    sharded,
    trained,
)

STEPS, SEED = 5, 7
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


def attached(net: nn.Module, mesh: DeviceMesh, name: str, **options) -> tuple[Attached, torch.optim.SGD]:
    """The replicas of a net, and its optimizer."""
    optimizer, group = sgd(net), mesh["replicate"].get_group()
    return ab.attach(net, optimizer, {name: options}, process_group=group, seed=SEED), optimizer


# ---- in each of the four processes


def _run(rank: int, names: list[str], edges: list[str], folder: str) -> None:
    """Every case by our hook, and the dense ones by torch's own HSDP; then the edges. Saves what this process has."""
    mesh = joined(rank, folder)
    found: dict = {}
    for name in names:
        compressor, options, how = CASES[name]
        # replicas start apart; the first one's parameters are everybody's
        net = sharded(mesh["shard"], seed=mesh["replicate"].get_local_rank(), **how)
        comm, optimizer = attached(net, mesh, compressor, **options)
        seen: Seen = []
        predicted = [comm.exchange.predicted_bytes(StepInfo(comm.position.plan, step)) for step in range(STEPS)]
        found[name] = {
            "parameters": trained(net, range(STEPS), optimizer, comm, seen, **how),
            "native": trained(sharded(mesh, **how), range(STEPS), **how) if compressor == "none" else None,
            "seen": seen,
            "specs": [(spec.name, spec.shape) for spec in comm.axis.specs],
            "state": comm.exchange.state,
            "ledger": comm.comm.ledger.columns(),
            "predicted": sum(predicted),
        }
        comm.detach()
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


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    usual = [case for case in CASES if case not in MORE]
    return Found(tmp_path_factory.mktemp("fsdp"), _run, (usual, [*EDGES]), ([*MORE], [*MORE_EDGES]))


def each(*names: str) -> list:
    """Cases for parametrize; those of `MORE` are slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in MORE else name for name in names]


IN_HALF = "none in bfloat16"


@pytest.mark.parametrize("name", each(*(name for name in CASES if name.startswith("none") and name != IN_HALF)))
def test_dense_is_torchs_hsdp_bit_for_bit(found, name):
    for of_rank in found[name]:
        assert all_equal(of_rank["parameters"], of_rank["native"])


@pytest.mark.slow
def test_what_torch_reduces_in_bfloat16_is_averaged_in_float32(found):
    """torch's own HSDP rounds the mean over the replicas once more."""
    ranks = found[IN_HALF]
    for shard in range(SHARDS):
        for (first, updates), (second, _) in zip(*(of_rank["seen"] for of_rank in ranks[shard::SHARDS]), strict=True):
            assert all_equal(updates, [(a + b) / 2 for a, b in zip(first, second, strict=True)])
    for ours, theirs in zip(ranks[0]["parameters"], ranks[0]["native"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.01, atol=1e-4)


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
        for i, (parameter, _) in enumerate(replicas[0]["specs"]):
            seen = [replica["seen"] for replica in replicas]
            updates = sum(after[i].double() for _, after in seen[0])
            mean = sum(before[i].double() for own in seen for before, _ in own) / REPLICAS
            states = [replica["state"].get(parameter, {}) for replica in replicas]
            if "residual_W" in states[0]:
                updates = updates + sum(state["residual_W"][0].double() for state in states) / REPLICAS
                compared += mean.numel() > 0
            torch.testing.assert_close(updates, mean, rtol=1e-5, atol=1e-6)
    assert compared


@pytest.mark.parametrize("name", each(*LOSSY, "dist-EF-blockSGD", "qsgd", "threshold", "topk"))
def test_each_shard_is_an_exchange_between_its_replicas(found, name):
    """The same gradients, exchanged by both replicas' workers in one process, shard by shard."""
    compressor, options, _ = CASES[name]
    for shard in range(SHARDS):
        replicas = found[name][shard::SHARDS]
        inner = wrapped_compressor(node_of(compressor, **options)).compressor
        tensors = [TensorSpec(*spec) for spec in replicas[0]["specs"]]
        seed = keyed_rng.key(SEED, "shard", shard)
        twin = Exchange(inner, tensors, ladder_of(inner, {}), Comm(REPLICAS), torch.zeros(0), SendOptions(seed))
        plan = Plan(dict.fromkeys(levelled(inner, twin.sent), 0))
        for step, pairs in enumerate(zip(*(replica["seen"] for replica in replicas), strict=True)):
            shards_W = [torch.stack(list(own)) for own in zip(*(before for before, _ in pairs), strict=True)]
            updates = twin(shards_W, StepInfo(plan, step))
            torch.testing.assert_close(pairs[0][1], updates, rtol=1e-5, atol=1e-7)


def test_matrices_are_rows_and_names_are_the_parameters(found):
    specs = {rank: dict(found["powersgd"][rank]["specs"]) for rank in (0, 1)}
    assert specs[0]["inner.3.weight"] == (4, 36)
    assert specs[1]["inner.3.weight"] == (3, 36)
    assert specs[1]["last.weight"] == (0, 5)
    assert {"inner.0.weight", "inner.3.weight"} <= {*found["powersgd"][0]["state"]}


@pytest.mark.parametrize("name", each(*DENSE, *LOSSLESS, *LOSSY))
def test_the_ledger_counts_what_the_replicas_are_sent(found, name):
    for of_rank in found[name]:
        numel = sum(gradient.numel() for gradient in of_rank["seen"][0][0])
        assert of_rank["ledger"]["payload_bytes"] == of_rank["predicted"]
        assert of_rank["ledger"]["dense_bytes"] == 4 * numel * STEPS
        if name in DENSE:
            assert of_rank["ledger"]["payload_bytes"] == of_rank["ledger"]["dense_bytes"]


# ---- what is refused, kept and taken away


def _refused(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as refused:
        call()
    return str(refused.value)


def _loses_nothing_on_other_meshes(_: DeviceMesh) -> None:
    """Four replicas of one shard, one replica of four; in double precision torch divides in two parts."""
    for shape in ((4, 1), (1, 4)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        native, dense, full = (sharded(m, dtype=torch.float64) for m in (mesh, mesh["shard"], mesh["shard"]))
        (comm, ours), (other, theirs) = attached(dense, mesh, "none"), attached(full, mesh, "powersgd", **FULL_RANK)
        expected = trained(native, range(2), dtype=torch.float64)
        torch.testing.assert_close(
            trained(dense, range(2), ours, dtype=torch.float64), expected, rtol=1e-14, atol=1e-14
        )
        torch.testing.assert_close(
            trained(full, range(2), theirs, dtype=torch.float64), expected, rtol=1e-12, atol=1e-12
        )
        comm.detach()
        other.detach()


def _goes_with_activation_checkpointing(mesh: DeviceMesh) -> None:
    def checkpointed(of: DeviceMesh) -> Net:
        torch.manual_seed(0)
        net = Net()
        net.inner = checkpoint_wrapper(net.inner)
        fully_shard(net.inner, mesh=of)
        return fully_shard(net, mesh=of)

    net = checkpointed(mesh["shard"])
    comm, optimizer = attached(net, mesh, "none")
    assert all_equal(trained(net, range(2), optimizer), trained(checkpointed(mesh), range(2)))
    comm.detach()


def _refuses_models(mesh: DeviceMesh) -> None:
    assert "torch averages the replicas of an HSDP mesh itself" in _refused(
        lambda: attached(sharded(mesh), mesh, "none")
    )
    part = Net()
    fully_shard(part.inner, mesh=mesh["shard"])
    assert "got norm.weight, which is in none" in _refused(lambda: attached(part, mesh, "none"))
    with torch.device("meta"):
        empty = Net()
    fully_shard(empty, mesh=mesh["shard"])
    assert "call model.to_empty(...) first" in _refused(lambda: attached(empty, mesh, "none"))
    net, group = sharded(mesh["shard"]), mesh["replicate"].get_group()
    clipped = _refused(lambda: ab.attach(net, sgd(net), process_group=group, clip_norm=1.0))
    assert "call torch.nn.utils.clip_grad_norm_ after comm.join()" in clipped
    scaled = _refused(lambda: ab.attach(net, sgd(net), process_group=group, scaler=torch.amp.GradScaler("cpu")))
    assert scaled.startswith("scaler must be None with an FSDP2 model")


def _refuses_compressors(mesh: DeviceMesh) -> None:
    net = sharded(mesh["shard"])
    dgc = {"warmup_epochs": 0}
    assert "compressor must leave momentum to the optimizer" in _refused(lambda: attached(net, mesh, "dgc", **dgc))


def _refuses_groups(mesh: DeviceMesh) -> None:
    net, shards, nobody = sharded(mesh["shard"]), mesh["shard"].get_group(), dist.new_group([0])
    for group in (shards, None):
        same = _refused(lambda group=group: ab.attach(net, sgd(net), process_group=group))
        assert same.startswith("process_group must hold one process of each shard group")
    if dist.get_rank():
        outside = _refused(lambda: ab.attach(net, sgd(net), process_group=nobody))
        assert outside.startswith("process_group must be what torch.distributed.new_group returns")


def _refuses_other_replicas(mesh: DeviceMesh) -> None:
    net, group = sharded(mesh["shard"]), mesh["replicate"].get_group()
    first = dist.get_rank(group) == 0
    seeds = _refused(lambda: ab.attach(net, sgd(net), process_group=group, seed=0 if first else 3))
    assert "got seed=0 on rank 0 and seed=3 on rank 1" in seeds
    options = _refused(lambda: attached(net, mesh, "topk", error_feedback=first))
    assert "got compressor.error_feedback=True on rank 0" in options


def _takes_what_has_no_gradient_as_zero(mesh: DeviceMesh) -> None:
    net, x = sharded(mesh["shard"]), torch.randn(6, 2, 8)
    comm, optimizer = attached(net, mesh, "none")
    net(x, to_the_end=False).sum().backward()
    comm.join()
    assert net.last.weight.grad.to_local().eq(0).all()
    optimizer.step()
    comm.detach()


def _refuses_what_is_not_finite(mesh: DeviceMesh) -> None:
    net = sharded(mesh["shard"])
    comm, optimizer = attached(net, mesh, "none")
    (loss_of(net, 0) * float("nan")).backward()
    with pytest.raises(NonFinite, match="is not finite"):
        optimizer.step()
    comm.detach()


def _continues_from_saved_state(mesh: DeviceMesh) -> None:
    options = {"rank": 1, "min_compression_rate": 0}
    net = sharded(mesh["shard"])
    comm, optimizer = attached(net, mesh, "powersgd", **options)
    parameters, saved = trained(net, range(2), optimizer), comm.state_dict()
    straight = trained(net, range(2, 4), optimizer)
    payload = comm.comm.ledger.columns()["payload_bytes"]
    comm.detach()
    resumed = sharded(mesh["shard"], seed=3)
    again, optimizer = attached(resumed, mesh, "powersgd", **options)
    with torch.no_grad():
        for parameter, value in zip(resumed.parameters(), parameters, strict=True):
            parameter.to_local().copy_(value)
    again.load_state_dict(saved)
    assert all_equal(trained(resumed, range(2, 4), optimizer), straight)
    assert again.comm.ledger.columns()["payload_bytes"] == payload
    again.detach()


def _is_watched(mesh: DeviceMesh) -> None:
    """Another optimizer that steps the shards is noticed, as of a plain module."""
    net = sharded(mesh["shard"])
    comm, _ = attached(net, mesh, "none")
    loss_of(net, 0).backward()
    assert "got another one that did: SGD" in _refused(sgd(net).step)
    comm.detach()


def _takes_policies_and_exempt(mesh: DeviceMesh) -> None:
    """Each shard has a level of its own, the same in all replicas; what is exempt travels dense."""
    net, group = sharded(mesh["shard"]), mesh["replicate"].get_group()
    optimizer = sgd(net)
    accordion = {"accordion": {"strong": 1, "weak": 2}}
    powersgd = {"powersgd": {"min_compression_rate": 0}}
    given = {"exempt": lambda name, _: name == "inner.0.weight", "epochs": 2, "steps_per_epoch": 2}
    comm = ab.attach(net, optimizer, powersgd, accordion, process_group=group, **given)
    for epoch in range(2):
        trained(net, range(2 * epoch, 2 * epoch + 2), optimizer)
        comm.end_epoch()
    levels = comm.position.plan.levels
    assert "inner.3.weight" in levels
    assert "inner.0.weight" not in levels
    assert len({str(levels) for levels in comm.comm.gather_objects(levels)}) == 1
    comm.detach()


def _takes_local_steps(mesh: DeviceMesh) -> None:
    """DiLoCo of FSDP2 replicas is DiLoCo of whole models whose gradients are means over the shard axis."""
    group, shards = mesh["replicate"].get_group(), mesh["shard"].get_group()
    for options in ({}, {"compressor": {"topk": {"density": 1.0}}}, {"outer_momentum": 0.0, "outer_nesterov": False}):
        torch.manual_seed(0)
        whole, net = Net(), sharded(mesh["shard"])
        ours, theirs = sgd(net), sgd(whole)
        with ab.local(net, ours, "diloco", period=2, process_group=group, **options) as sharded_comm:
            trained(net, range(3), ours)
            with sharded_comm.evaluating():
                loss_of(net, 0)
                within = [p.full_tensor() for p in sharded_comm.consensus().values()]
            trained(net, range(3, 6), ours)
        with ab.local(whole, theirs, "diloco", period=2, process_group=group, **options) as comm:
            for step in range(6):
                loss_of(whole, step).backward()
                for param in whole.parameters():
                    dist.all_reduce(param.grad, group=shards)
                    param.grad.div_(SHARDS)
                theirs.step()
                theirs.zero_grad()
                if step == 2:
                    torch.testing.assert_close(within, [*comm.consensus().values()], rtol=1e-5, atol=1e-6)
        net.reshard()
        for ours_, theirs_ in zip(net.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours_.full_tensor(), theirs_.detach(), rtol=1e-5, atol=1e-6)


# each in all four processes, since they exchange something
EDGES = {
    "activation checkpointing": _goes_with_activation_checkpointing,
    "models that are not sharded so": _refuses_models,
    "compressors that need more than shards": _refuses_compressors,
    "groups that are no replicas": _refuses_groups,
    "replicas with other seeds": _refuses_other_replicas,
    "parameters without a gradient": _takes_what_has_no_gradient_as_zero,
    "gradients that are not finite": _refuses_what_is_not_finite,
    "saved state": _continues_from_saved_state,
    "another optimizer": _is_watched,
    "policies and exempt": _takes_policies_and_exempt,
    "local steps": _takes_local_steps,
}
MORE_EDGES = {"other meshes": _loses_nothing_on_other_meshes}


@pytest.mark.parametrize("edge", [*EDGES, *(pytest.param(edge, marks=pytest.mark.slow) for edge in MORE_EDGES)])
def test_at_the_edges(found, edge):
    assert found[edge] == [""] * REPLICAS * SHARDS
