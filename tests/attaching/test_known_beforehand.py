"""`required_facts` names everything of a training that a policy or a scheme reads beforehand."""

from collections.abc import Callable
from typing import Any

import pytest

from accordion_bench.methods.build import build_methods
from accordion_bench.methods.compatibility import MethodOptions
from accordion_bench.options.conf_dir import read_options, yaml_files
from accordion_bench.options.instantiate import build
from accordion_bench.plan import RunFacts, TensorSpec, TrainingLoss
from tests.kit.helpers import optimizer_for

SPECS = [TensorSpec("weight", (64, 64)), TensorSpec("bias", (64,))]
FACT = {"epochs": "epochs", "train_size": "steps_per_epoch", "schedule": "schedule"}
EPOCHS, STEPS, BATCH, WORKERS = 30, 50, 8, 2
SGD = {"_target_": "torch.optim.SGD"}
COMPRESSOR = {"rank": "powersgd", "density": "topk", "bits": "qsgd"}


def halves(epoch: float) -> float:
    return 1.0 if epoch < 15 else 0.5


def facts(declared: frozenset[str]) -> RunFacts:
    """Facts of a training, of which only those that are declared may be read."""

    class Watched(RunFacts):
        def __getattribute__(self, name: str) -> Any:
            if name in FACT and FACT[name] not in declared:
                raise AssertionError(f"{name} is read, and {FACT[name]} is not in required_facts")
            return super().__getattribute__(name)

    return Watched(EPOCHS, WORKERS, STEPS * BATCH * WORKERS, BATCH, halves)


def options(group: str, name: str) -> dict[str, Any]:
    return read_options(yaml_files(group)[name])


def policies() -> list[str]:
    """All but those that drive the batch, which no loop of a user's own can carry."""
    names = [name for name in yaml_files("adaptive") if name != "none"]
    return [name for name in names if build(options("adaptive", name), "adaptive").drives != "batch"]


def chosen(sync: str, policy: str = "") -> MethodOptions:
    knobs = build(options("adaptive", policy), "adaptive").knobs if policy else ()
    drives = build(options("adaptive", policy), "adaptive").drives if policy else ""
    compressor = "nuqsgd" if drives == "codebook" else COMPRESSOR[(knobs or ("rank",))[0]]
    if sync != "every_step":
        compressor = "none"
    adaptive = {policy: options("adaptive", policy)} if policy else {}
    optimizer = optimizer_for("sync", sync)
    return MethodOptions(
        compressor, options("compressor", compressor), sync, options("sync", sync), adaptive, optimizer
    )


@pytest.mark.parametrize("name", policies())
def test_policies(name):
    policy = build(options("adaptive", name), "adaptive")
    sync = policy.syncs[0] if policy.syncs else "local_sgd" if policy.drives == "period" else "every_step"
    declared = policy.required_facts | build(options("sync", sync), "sync").required_facts
    methods = build_methods(chosen(sync, name), facts(declared), 1)
    methods.plan_for(SPECS)
    used = methods.policies[name]
    wanted = frozenset().union(*(used.needs_at(exchange) for exchange in range(200)))
    assert ("loss" in used.required_facts) == any(isinstance(request, TrainingLoss) for request in wanted)


@pytest.mark.parametrize("name", [name for name in yaml_files("sync") if name != "hierarchical"])
def test_schemes(name):
    declared = build(options("sync", name), "sync").required_facts
    build_methods(chosen(name), facts(declared), 1).plan_for(SPECS)


def test_groups():
    node = {**options("sync", "hierarchical"), "groups": [[2, 1], [4, WORKERS]]}
    wanted = MethodOptions("none", options("compressor", "none"), "hierarchical", node, {}, SGD)
    build_methods(wanted, facts(frozenset()), 1).plan_for(SPECS)


@pytest.mark.parametrize("read", [lambda run: run.epochs, lambda run: run.steps, lambda run: run.schedule(0)])
def test_what_is_not_declared_is_refused(read: Callable[[RunFacts], Any]):
    with pytest.raises(AssertionError, match="is not in required_facts"):
        read(facts(frozenset()))
    read(facts(frozenset({"epochs", "steps_per_epoch", "schedule"})))
