"""One order of a step for the bench's trainer, a user's loop and the advisor's rehearsal, written once."""

import ast
import importlib
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import accordion_bench
from accordion_bench.advising.arms import arm_of
from accordion_bench.advising.rehearsal import Beside, Rehearsal
from accordion_bench.attaching.attachment import Attachment
from accordion_bench.attaching.checked_arguments import PassedArguments, Setting, choose
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.ledger import Ledger
from accordion_bench.comm.replicas import Replicas
from accordion_bench.loop.step import StepOptions
from accordion_bench.methods.build import build_methods
from accordion_bench.network.link_model import Network
from accordion_bench.plan import RunFacts, TensorSpec
from accordion_bench.position import Position
from accordion_bench.signals.policy_runner import PolicyRunner
from accordion_bench.signals.statistics import GradientSums
from accordion_bench.sync.every_step import EveryStep
from tests.kit import local

PACKAGE = Path(accordion_bench.__file__).parent
WATCHED = [
    *((Replicas, "clip"), (GradientSums, "add_gradients"), (Ledger, "dense_step")),
    *((EveryStep, "before_step"), (EveryStep, "after_step"), (PolicyRunner, "after_exchange")),
    (Position, "step_taken"),
]
ORDER = ["clip", "add_gradients", "dense_step", "before_step", "update", "after_step", "after_exchange", "step_taken"]
OF_THE_STEP = {"add_gradients", "dense_step", "before_step", "after_step", "after_exchange", "step_taken"}


@pytest.fixture
def calls(monkeypatch):
    """Names of what is called, in order; each call goes on as before."""
    made: list[str] = []

    def watch(owner, name: str, told: str) -> None:
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **named: (made.append(told), own(*args, **named))[1])

    for cls, name in WATCHED:
        watch(cls, name, name)
    watch(importlib.import_module("torch.optim.sgd"), "sgd", "update")  # what a step calls between its hooks
    return made


def of_the_trainer(tmp_path) -> None:
    trainer = local.trainer_for(tmp_path, "clip_norm=0.5", workers=1)
    trainer.begin_epoch()
    trainer.train_step()


def of_a_users_loop(tmp_path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = choose("none", None, "every_step", {}, {}, ())
    methods = build_methods(chosen, RunFacts(workers=1, train_size=8), 1)
    passed = dict.fromkeys(field.name for field in fields(PassedArguments)) | {"batch_size": 1, "timeout": 600.0}
    setting = Setting(chosen, Network(1e9, 0.0), StepOptions(clip_norm=0.5), PassedArguments(**passed))
    attachment = Attachment(model, optimizer, methods, Comm(1), setting)
    attachment.connect()
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    attachment.detach()


def of_a_rehearsal(tmp_path) -> None:
    specs = [TensorSpec("a", (4, 4))]
    Rehearsal(arm_of().chosen, specs, 4, torch.device("cpu"), None, Beside(0.5)).step([torch.ones(4, 4)])


@pytest.mark.parametrize("take", [of_the_trainer, of_a_users_loop, of_a_rehearsal])
def test_the_order_is_one(take, tmp_path, calls):
    take(tmp_path)
    decides = take is not of_a_rehearsal  # whose policies decide nothing
    assert calls == [name for name in ORDER if decides or name != "after_exchange"]


def calls_in(path: Path) -> set[str]:
    """Names of the methods that a module calls."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.func.attr for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)}


def test_the_order_is_written_once():
    found = {path.relative_to(PACKAGE).as_posix(): calls_in(path) & OF_THE_STEP for path in PACKAGE.rglob("*.py")}
    assert found.pop("loop/step.py") == OF_THE_STEP
    alone = {  # bytes of gradients in steps of other kinds
        "training/training_step.py": "that all workers leave out after DistributedDataParallel has exchanged",
        "attaching/fsdp.py": "of shards, which have no scheme and no policies",
        "conformance/aggregate.py": "of a compressor alone",
    }
    assert all(found.pop(path) == {"dense_step"} for path in alone)
    found = {path: names for path, names in found.items() if names and not path.startswith("sync/")}
    assert not found  # a scheme may go through another one


def test_the_trainer_is_known_where_it_is_started():
    imported = "accordion_bench.training.trainer"
    known = [path for path in PACKAGE.rglob("*.py") if imported in path.read_text(encoding="utf-8")]
    assert [path.relative_to(PACKAGE).as_posix() for path in known] == ["training/launch.py"]
