"""Gradients reduced to their shards by codes: torch's FSDP2 where nothing is lost, the code's error elsewhere."""

import traceback
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp_common
from torch.distributed.tensor import Shard

import accordion_bench as ab
from accordion_bench.attaching.fsdp import ShardAxis, scattered
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import NonFinite
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.partition import levelled
from accordion_bench.methods.compatibility import ladder_of
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.tensors import keyed_rng
from tests.kit.fsdp import Found, Net, all_equal, joined, local, loss_of, node_of, sgd, sharded, trained

STEPS, SEED = 3, 7
BLOCK = {"bucket_size": 64}
INT4 = {"bits": 4, **BLOCK}
# by name: shards, the compressor's file, options of it, what else is passed, how the model is sharded
WHOLE = {
    "none over 2": (2, "none", {}, {}, {}),
    "none over 4": (4, "none", {}, {}, {}),
    "none over 4, two levels": (4, "none", {}, {"machine": 2}, {}),
    "none over 2, a frozen parameter": (2, "none", {}, {}, {"frozen": True}),
    "none over 2, micro-batches": (2, "none", {}, {}, {"micro_batches": 2}),
}
CODED = {
    "fp8 over 2": (2, "fp8", BLOCK, {}, {}),
    "int8 over 2": (2, "int8", BLOCK, {}, {}),
    "int4 over 2": (2, "qsgdinf", INT4, {}, {}),
    "fp8 over 4": (4, "fp8", BLOCK, {}, {}),
    "int8 over 4": (4, "int8", BLOCK, {}, {}),
    "int4 over 4": (4, "qsgdinf", INT4, {}, {}),
}
FED = {
    "int8 with feedback": (4, "int8", {**BLOCK, "rounding": "nearest", "error_feedback": True}, {}, {}),
    "topk with feedback": (2, "topk", {"density": 0.2, "error_feedback": True}, {}, {}),
}
MORE = {
    "none over 2 in float64": (2, "none", {}, {}, {"dtype": torch.float64}),
    "none over 2 by columns": (2, "none", {}, {}, {"columns": True}),
    "none over 2 wrapped together": (2, "none", {}, {}, {"together": True}),
    "fp8 over 2 in bfloat16": (2, "fp8", BLOCK, {}, {"reduce_dtype": torch.bfloat16}),
}
TWO = {"int8 inside int4": (4, "qsgdinf", INT4, {"machine": 2, "inside": {"int8": BLOCK}}, {})}
EXEMPT = {"int4, biases exempt": (4, "qsgdinf", INT4, {"exempt": "bias"}, {})}
CASES = {**WHOLE, **CODED, **FED, **TWO, **EXEMPT, **MORE}
# of the largest magnitude, or of the number itself and the largest: how far a code may be from what it stands for
STEP = {"int8": 1 / 127, "qsgdinf": 1 / 7}


def attached(net: Net, name: str, options: dict, **passed) -> ShardAxis:
    return ab.attach_shards(net, {name: options}, seed=SEED, **passed)


def recorded(axis: ShardAxis) -> dict[str, list[tuple[list[Tensor], list[Tensor]]]]:
    """What each group will hand over, all shards of it, and the own ones that it gets back."""
    seen: dict[str, list] = {}

    class Recorder:
        def __init__(self, reduction):
            self.reduction, self.allocate = reduction, reduction.allocate

        def __call__(self, output_tensor, input_tensor, *rest, **options):
            own = self.reduction
            rows = input_tensor.view(own.group.mesh.size(), -1)
            before = [r.view(row)[0].clone() for rank, row in enumerate(rows) for r in own.group.regions(rank)]
            own(output_tensor, input_tensor, *rest, **options)
            after = [region.view(output_tensor)[0].clone() for region in own.own]
            seen.setdefault(own.group.name, []).append((before, after))

    for reduction in axis.reductions:
        reduction.group.module.set_custom_reduce_scatter(Recorder(reduction))
    return seen


def _run(rank: int, names: list[str], edges: list[str], folder: str) -> None:
    meshes = {2: joined(rank, folder)["shard"], 4: init_device_mesh("cpu", (4,))}
    found: dict = {}
    for name in names:
        shards, compressor, options, passed, how = CASES[name]
        net = sharded(meshes[shards], **how)
        axis = attached(net, compressor, options, **passed)
        seen = recorded(axis)
        stages = [stage for reduction in axis.reductions for stage in reduction.stages]
        predicted = sum(s.exchange.predicted_bytes(StepInfo(s.plan, 0)) for s in stages[:: len(axis._comms)])
        found[name] = {
            "parameters": trained(net, range(STEPS), **how),
            "stock": trained(sharded(meshes[shards], **how), range(STEPS), **how),
            "seen": seen,
            "names": {r.group.name: [region.spec.name for region in r.own] for r in axis.reductions},
            "state": axis.state_dict(),
            "ledger": axis.ledger.columns(),
            "inside": axis.inside_ledger and axis.inside_ledger.columns(),
            "predicted": predicted * STEPS,
        }
        axis.detach()
    for edge in edges:
        found[edge] = ""
        try:
            EDGES[edge](meshes)
        except Exception:
            found[edge] = traceback.format_exc()
        dist.barrier()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    usual = [case for case in CASES if case not in MORE]
    return Found(tmp_path_factory.mktemp("shards"), _run, (usual, [*EDGES]), ([*MORE], []))


def each(*names: str) -> list:
    return [pytest.param(name, marks=pytest.mark.slow) if name in MORE else name for name in names]


def peers(found, name: str) -> list[list[dict]]:
    """The ranks of each shard axis."""
    shards = CASES[name][0]
    return [found[name][first : first + shards] for first in range(0, 4, shards)]


@pytest.mark.parametrize("name", each(*(name for name in CASES if name.startswith("none over 2"))))
def test_what_travels_whole_over_two_shards_is_fsdp2_bit_for_bit(found, name):
    for of_rank in found[name]:
        assert all_equal(of_rank["parameters"], of_rank["stock"])


@pytest.mark.parametrize("name", ["none over 4", "none over 4, two levels"])
def test_what_travels_whole_is_fsdp2_up_to_the_order_of_a_sum(found, name):
    for of_rank in found[name]:
        torch.testing.assert_close(of_rank["parameters"], of_rank["stock"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", each(*CODED, "fp8 over 2 in bfloat16"))
def test_the_mean_is_within_the_error_of_the_code(found, name):
    shards, compressor, _, _, how = CASES[name]
    coarse = 2**-8 if how else 0.0  # of the reduced gradient in bfloat16
    lost = 0
    for ranks in peers(found, name):
        for group, names in ranks[0]["names"].items():
            for step in range(STEPS):
                for i in range(shards * len(names)):
                    owner, k = divmod(i, len(names))
                    xs = torch.stack([of_rank["seen"][group][step][0][i].float() for of_rank in ranks])
                    got = ranks[owner]["seen"][group][step][1][k].float()
                    if not got.numel():
                        continue
                    largest = xs.abs().amax(tuple(range(1, xs.ndim)), keepdim=True)
                    bound = (
                        STEP[compressor] * largest if compressor in STEP else xs.abs() / 16 + largest / 2**16
                    ).mean(0)
                    away = (got - xs.mean(0)).abs()
                    assert (away <= 1.0001 * bound + coarse * got.abs() + 1e-9).all()
                    lost += int((away > 0).sum())
    assert lost


@pytest.mark.parametrize("name", each(*CODED, *FED))
def test_it_is_the_exchange_of_workers_in_one_process(found, name):
    """The same gradients, coded by all ranks' workers in one process; each rank gets its own shards of their mean."""
    shards, compressor, options, _, _ = CASES[name]
    for first, ranks in zip(range(0, 4, shards), peers(found, name), strict=True):
        seed = keyed_rng.key(SEED, "shard axis", *range(first, first + shards))
        for group, names in ranks[0]["names"].items():
            shapes = [tuple(x.shape) for x in ranks[0]["seen"][group][0][0]]
            pieces = [divmod(i, len(names)) for i in range(len(shapes))]
            specs = [TensorSpec(f"{names[k]}[{r}]", shape) for (r, k), shape in zip(pieces, shapes, strict=True)]
            inner = scattered(
                node_of(compressor, **options), {s.name: r for s, (r, _) in zip(specs, pieces, strict=True)}
            )
            ladder, comm = ladder_of(inner.compressor, {}), Comm(shards)
            twin = Exchange(inner.compressor, specs, ladder, comm, torch.zeros(0), SendOptions(seed))
            plan = Plan(dict.fromkeys(levelled(inner.compressor, twin.sent), 0))
            for step in range(STEPS):
                befores = [of_rank["seen"][group][step][0] for of_rank in ranks]
                updates = twin([torch.stack(xs) for xs in zip(*befores, strict=True)], StepInfo(plan, step))
                for i, (rank, k) in enumerate(pieces):
                    got = ranks[rank]["seen"][group][step][1][k]
                    torch.testing.assert_close(got, updates[i], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", [*FED])
def test_means_and_residuals_sum_to_the_gradients(found, name):
    """sum of what came + mean of residuals = sum of mean gradients, for each shard."""
    compared = 0
    for ranks in peers(found, name):
        for group, names in ranks[0]["names"].items():
            for i in range(len(ranks) * len(names)):
                owner, k = divmod(i, len(names))
                came = sum(after[k].double() for _, after in ranks[owner]["seen"][group])
                mean = sum(before[i].double() for of_rank in ranks for before, _ in of_rank["seen"][group]) / len(ranks)
                key = f"{names[k]}[{owner}]"
                states = [of_rank["state"]["groups"][group]["levels"][0].get(key, {}) for of_rank in ranks]
                if "residual_W" in states[0]:
                    came = came + sum(state["residual_W"][0].double() for state in states) / len(ranks)
                    compared += mean.numel() > 0
                torch.testing.assert_close(came, mean, rtol=1e-5, atol=1e-6)
    assert compared


def test_two_levels_lose_what_both_codes_lose(found):
    ranks = found["int8 inside int4"]
    for group, names in ranks[0]["names"].items():
        for i in range(4 * len(names)):
            owner, k = divmod(i, len(names))
            xs = torch.stack([of_rank["seen"][group][0][0][i] for of_rank in ranks])
            if xs[0].numel():
                bound = (1 / 127 + 1.01 / 7) * xs.abs().max()
                assert ((ranks[owner]["seen"][group][0][1][k] - xs.mean(0)).abs() <= bound).all()


def test_what_is_exempt_travels_as_it_is(found):
    ranks, lost = found["int4, biases exempt"], 0
    for group, names in ranks[0]["names"].items():
        for i in range(4 * len(names)):
            owner, k = divmod(i, len(names))
            mean = torch.stack([of_rank["seen"][group][0][0][i] for of_rank in ranks]).mean(0)
            got = ranks[owner]["seen"][group][0][1][k]
            if "bias" in names[k]:
                torch.testing.assert_close(got, mean, rtol=1e-6, atol=1e-9)
            else:
                lost += not torch.equal(got, mean)
    assert lost


@pytest.mark.parametrize("name", [*WHOLE, *CODED, *FED, *TWO, *EXEMPT])
def test_the_ledger_counts_what_the_shards_are_sent(found, name):
    """Of the first level, every process hands over codes of all shards, of which its own stay here."""
    shards, compressor = CASES[name][:2]
    for of_rank in found[name]:
        ledger = of_rank["inside"] or of_rank["ledger"]
        numel = sum(x.numel() for seen in of_rank["seen"].values() for x in seen[0][0])
        workers = CASES[name][3].get("machine", shards)
        assert ledger["payload_bytes"] == of_rank["predicted"]
        assert ledger["dense_bytes"] == 4 * numel * STEPS
        if compressor == "none":
            assert ledger["payload_bytes"] == ledger["dense_bytes"]
            assert (
                ledger["wire_bytes"] == ledger["dense_wire_bytes"] == round(4 * numel * (workers - 1) / workers) * STEPS
            )
        if of_rank["inside"]:
            assert of_rank["ledger"]["dense_bytes"] == 4 * numel // workers * STEPS or numel % workers


# ---- what is refused, kept and taken away


def _refused(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as refused:
        call()
    return str(refused.value)


def _regions_are_gradients(meshes: dict[int, DeviceMesh]) -> None:
    """What comes back under a name is what FSDP2 makes the gradient of that parameter."""
    for how in ({}, {"frozen": True}, {"columns": True}, {"together": True}, {"dtype": torch.bfloat16}):
        net = sharded(meshes[2], **how)
        axis = attached(net, "int8", BLOCK)
        seen = recorded(axis)
        loss_of(net, 0, dtype=how.get("dtype", torch.float32)).backward()
        gradients = {name: p.grad.to_local() for name, p in net.named_parameters() if p.requires_grad}
        found = {}
        for reduction in axis.reductions:
            [(_, after)] = seen[reduction.group.name]
            found |= {region.spec.name: shard for region, shard in zip(reduction.own, after, strict=True)}
        assert found.keys() == gradients.keys()
        assert all(torch.equal(found[name], gradients[name]) for name in found)
        axis.detach()


def _goes_with_replicas(meshes: dict[int, DeviceMesh]) -> None:
    """HSDP: codes on the shard axis, a compressor between the replicas, which stay equal; with local steps, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    group = mesh["replicate"].get_group()
    for attach in (
        lambda net, own: ab.attach(net, own, {"powersgd": {"min_compression_rate": 0}}, process_group=group),
        lambda net, own: ab.local(net, own, "diloco", period=2, process_group=group),
    ):
        net = sharded(mesh["shard"])
        optimizer = sgd(net)
        axis, comm = attached(net, "int8", BLOCK), attach(net, optimizer)
        ours = trained(net, range(4), optimizer)
        from_all = comm.comm.gather_objects(ours)
        assert all_equal(*from_all)
        assert axis.ledger.columns()["payload_bytes"] > 0 < comm.comm.ledger.columns()["payload_bytes"]
        comm.detach()
        axis.detach()


def _refuses_models(meshes: dict[int, DeviceMesh]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert "torch averages the replicas of an HSDP mesh itself" in _refused(lambda: attached(sharded(mesh), "fp8", {}))
    assert 'call fully_shard(model, mesh=mesh["shard"])' in _refused(lambda: attached(Net(), "fp8", {}))
    part = Net()
    fully_shard(part.inner, mesh=meshes[2])
    assert "got norm.weight, which is in none" in _refused(lambda: attached(part, "fp8", {}))
    mixed = Net()
    mixed.norm.double()
    fully_shard(mixed, mesh=meshes[2])
    assert "got torch.float32 and torch.float64" in _refused(lambda: attached(mixed, "fp8", {}))
    several = Net()
    everybody = fsdp_common.FSDPMeshInfo(meshes[4], shard_mesh_dim=0)
    elsewhere = fsdp_common.ShardPlacementResult(Shard(0), everybody)
    fully_shard(several, mesh=meshes[2], shard_placement_fn=lambda p: elsewhere if p.ndim > 1 else None)
    assert "the whole model must have one mesh for all its" in _refused(lambda: attached(several, "fp8", {}))
    with torch.device("meta"):
        empty = Net()
    fully_shard(empty, mesh=meshes[2])
    assert "call model.to_empty(...) first" in _refused(lambda: attached(empty, "fp8", {}))
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard"))["shard"]
    assert "at least 2 shards, got 1" in _refused(lambda: attached(sharded(alone), "fp8", {}))


def _refuses_compressors(meshes: dict[int, DeviceMesh]) -> None:
    net = sharded(meshes[4])
    for name, options in {
        "powersgd": {},
        "signsgd": {},
        "dgc": {},
        "int8": {"collective": "two_way"},
        "fp8": {"error_feedback": "ef21"},
    }.items():
        assert "must send codes whose mean is a gradient" in _refused(lambda n=name, o=options: attached(net, n, o)), (
            name
        )
    assert "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)" in _refused(lambda: attached(net, "bf16", {}))
    assert "scope must be tensor, because FSDP2" in _refused(lambda: attached(net, "fp8", {"scope": "model"}))
    aggregate = {"error_feedback": True, "residual": "aggregate"}
    assert "each shard has one owner" in _refused(lambda: attached(net, "fp8", aggregate))
    assert "adaptive" in _refused(lambda: ab.attach_shards(net, "fp8", adaptive="accordion"))
    group = meshes[4].get_group()
    assert "call ab.attach(model, optimizer" in _refused(lambda: ab.attach_shards(net, "fp8", process_group=group))
    for machine in (3, 4, 1, "2", True):
        assert "pass machine=2" in _refused(lambda m=machine: attached(net, "fp8", {}, machine=m))


def _refuses_other_processes(meshes: dict[int, DeviceMesh]) -> None:
    net, first = sharded(meshes[4]), dist.get_rank() == 0
    seeds = _refused(lambda: ab.attach_shards(net, "fp8", seed=0 if first else 3))
    assert "got seed=0 on rank 0 and seed=3 on rank 1" in seeds
    names = _refused(lambda: ab.attach_shards(net, "fp8" if first else "int8"))
    assert "got compressor.format='e4m3' on rank 0 and compressor.format='int8'" in names


def _refuses_what_has_no_gradient(meshes: dict[int, DeviceMesh]) -> None:
    net, x = sharded(meshes[2]), torch.randn(6, 2, 8)
    attached(net, "fp8", {})
    with pytest.raises(RuntimeError, match="had no gradient in this backward pass"):
        net(x, to_the_end=False).sum().backward()
    net = sharded(meshes[2])
    attached(net, "fp8", {})
    net.set_reduce_scatter_unused_params(True)
    net(x, to_the_end=False).sum().backward()
    assert net.last.weight.grad.to_local().eq(0).all()
    net = sharded(meshes[2])
    attached(net, "fp8", {})
    net.outer.bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="attach again after requires_grad has changed"):
        loss_of(net, 0).backward()


def _refuses_what_is_not_finite(meshes: dict[int, DeviceMesh]) -> None:
    net = sharded(meshes[4])
    attached(net, "int8", {})
    with pytest.raises(NonFinite, match=rf"\[\d\] on worker {dist.get_rank()} is not finite"):
        (loss_of(net, 0) * float("nan")).backward()


def _continues_from_saved_state(meshes: dict[int, DeviceMesh]) -> None:
    options = {**BLOCK, "error_feedback": True, "rounding": "nearest"}
    net = sharded(meshes[4])
    axis = attached(net, "int8", options)
    parameters, saved = trained(net, range(2)), axis.state_dict()
    straight = trained(net, range(2, 4))
    resumed = sharded(meshes[4], seed=3)
    with torch.no_grad():
        for parameter, value in zip(resumed.parameters(), parameters, strict=True):
            parameter.to_local().copy_(value)
    again = attached(resumed, "int8", options)
    again.load_state_dict(saved)
    assert all_equal(trained(resumed, range(2, 4)), straight)
    assert again.ledger.columns()["payload_bytes"] == axis.ledger.columns()["payload_bytes"]
    other = attached(fully_shard(Net(), mesh=meshes[4]), "int8", options)
    assert "call fully_shard on the modules of the saved run" in _refused(lambda: other.load_state_dict(saved))
    two = attached(sharded(meshes[4]), "int8", options, machine=2)
    assert "pass the machine= of the saved run" in _refused(lambda: two.load_state_dict(saved))


def _detaches(meshes: dict[int, DeviceMesh]) -> None:
    net = sharded(meshes[4])
    axis = attached(net, "int8", {})
    trained(net, range(1))
    sent = axis.ledger.columns()["payload_bytes"]
    assert "call axis.detach() first" in _refused(lambda: attached(net, "fp8", {}))
    axis.detach()
    before, stock = local(net), sharded(meshes[4])
    with torch.no_grad():
        for parameter, value in zip(stock.parameters(), before, strict=True):
            parameter.to_local().copy_(value)
    assert all_equal(trained(net, range(1, 2)), trained(stock, range(1, 2)))
    assert axis.ledger.columns()["payload_bytes"] == sent > 0
    assert attached(net, "fp8", {}).ledger.columns()["payload_bytes"] == 0


def _divides_as_torch_does(meshes: dict[int, DeviceMesh]) -> None:
    """Where torch reduces to a sum, and divides itself: float16, or when it is told to."""
    for sums, policy in ((False, MixedPrecisionPolicy(reduce_dtype=torch.float16)), (True, MixedPrecisionPolicy())):
        found = []
        for ours in (True, False):
            torch.manual_seed(0)
            net = fully_shard(Net(), mesh=meshes[2], mp_policy=policy)
            net.set_force_sum_reduction_for_comms(sums)
            if ours:
                attached(net, "none", {})
            loss_of(net, 0).backward()
            found.append([p.grad.to_local() for p in net.parameters()])
        torch.testing.assert_close(*found, rtol=1e-3 if not sums else 1e-6, atol=1e-4 if not sums else 1e-8)
    net = sharded(meshes[2])
    attached(net, "none", {})
    net.set_gradient_divide_factor(3.0)
    assert "leave out set_gradient_divide_factor" in _refused(loss_of(net, 0).backward)


EDGES = {
    "names and regions": _regions_are_gradients,
    "replicas": _goes_with_replicas,
    "models that are not sharded so": _refuses_models,
    "compressors that are no codes": _refuses_compressors,
    "processes that pass something else": _refuses_other_processes,
    "parameters without a gradient": _refuses_what_has_no_gradient,
    "gradients that are not finite": _refuses_what_is_not_finite,
    "saved state": _continues_from_saved_state,
    "detaching": _detaches,
    "division": _divides_as_torch_does,
}


@pytest.mark.parametrize("edge", [*EDGES])
def test_at_the_edges(found, edge):
    assert found[edge] == [""] * 4
