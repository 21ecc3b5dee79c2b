"""What is refused by `ab.attach` and `ab.local`, and in which words: all cases of two processes in one pair."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accordion_bench as ab
from accordion_bench.attaching.checked_arguments import choose
from accordion_bench.options import conf_dir
from accordion_bench.options.checks import ConfigError
from tests.kit import by_hand, small_net
from tests.kit.processes import together
from tests.kit.small_net import net, sgd

Case = Callable[[nn.Module, torch.optim.Optimizer], Any]
LENGTH = {"epochs": 3, "steps_per_epoch": 3}


def two_groups(model: nn.Module) -> torch.optim.SGD:
    first, *others = model.parameters()
    return torch.optim.SGD([{"params": [first], "momentum": 0.5}, {"params": others}], lr=0.1, momentum=0.9)


def on_two_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def constant(epoch: float) -> float:
    return 0.1


ONE_PROCESS: dict[str, Case] = {
    # names and options
    "compressor must be a known name, got 'powersdg'; pass compressor='powersgd' (there are acpsgd, adacomp": (
        lambda m, o: ab.attach(m, o, compressor="powersdg")
    ),
    "compressor must be a name, or {name: {option: value}}, got None; pass compressor='acpsgd', say": (
        lambda m, o: ab.attach(m, o, compressor=None)  # type: ignore[arg-type]
    ),
    "compressor must be one name with its options, got {'powersgd': {}, 'topk': {}}; pass compressor={'NAME': {}}": (
        lambda m, o: ab.attach(m, o, compressor={"powersgd": {}, "topk": {}})
    ),
    "compressor.topk must be {option: value}, got 0.1; pass compressor={'topk': {}}": (
        lambda m, o: ab.attach(m, o, compressor={"topk": 0.1})  # type: ignore[dict-item]
    ),
    "rnak is no option; pass rank=..., options here are rank, min_compression_rate, ": (
        lambda m, o: ab.attach(m, o, compressor="powersgd", rnak=2)
    ),
    "compressor.powersgd.rnak is no option; pass rank=..., options here are rank, ": (
        lambda m, o: ab.attach(m, o, compressor={"powersgd": {"rnak": 2}})
    ),
    "density is no option; options here are rank, min_": lambda m, o: ab.attach(m, o, "powersgd", density=0.1),
    "epoch is no option; pass epochs=..., options here are ": lambda m, o: ab.attach(m, o, "powersgd", epoch=3),
    "_target_ is no option; options here are bits": lambda m, o: ab.attach(m, o, "qsgd", _target_="x"),
    "adaptive must be a known name, got 'acordion'; pass adaptive='accordion' (there are ": (
        lambda m, o: ab.attach(m, o, "powersgd", "acordion")
    ),
    "adaptive.accordion.intervall is no option; pass interval=..., options here are statistic, eta": (
        lambda m, o: ab.attach(m, o, "powersgd", {"accordion": {"intervall": 2}})
    ),
    "adaptive must be a name, or {name: {option: value}}, got 3; pass adaptive='accordion', say": (
        lambda m, o: ab.attach(m, o, "powersgd", 3)  # type: ignore[arg-type]
    ),
    "sync must be a known name, got 'dilocoo'; pass sync='diloco' (": lambda m, o: ab.local(m, o, "dilocoo"),
    "sync is an argument of ab.local; call ab.local(model, optimizer, sync='diloco')": (
        lambda m, o: ab.attach(m, o, "topk", sync="diloco")
    ),
    "alpha is no option; options here are period, switch_step, ": lambda m, o: ab.local(m, o, "local_sgd", alpha=1.0),
    # values
    "rank must be a number, got '2'; pass rank=2": lambda m, o: ab.attach(m, o, "powersgd", rank="2"),
    "rank must be an integer of at least 1, got 0; pass rank=1": lambda m, o: ab.attach(m, o, "powersgd", rank=0),
    "density must be a number above 0 and at most 1, got 2; pass density=0.1": (
        lambda m, o: ab.attach(m, o, "topk", density=2)
    ),
    "collective must be all_gather or two_way, got 'ring'; pass collective='all_gather'": (
        lambda m, o: ab.attach(m, o, "qsgd", collective="ring")
    ),
    "adaptive.accordion.interval must be a number, got '2'; pass adaptive={'accordion': {'interval': 5}}": (
        lambda m, o: ab.attach(m, o, "powersgd", {"accordion": {"interval": "2"}})
    ),
    "adaptive.accordion.strong must be a rank below weak=4, got 9; pass adaptive={'accordion': {'strong': 1}}": (
        lambda m, o: ab.attach(m, o, "powersgd", {"accordion": {"strong": 9, "weak": 4}})
    ),
    "final must be True or False, got 'no'; pass final=True": lambda m, o: ab.local(m, o, "local_sgd", final="no"),
    "timeout must be a number above 0, got '3'; pass timeout=600.0": (
        lambda m, o: ab.attach(m, o, timeout="3")  # type: ignore[arg-type]
    ),
    "seed must be an integer of at least 0, got -1; pass seed=0": lambda m, o: ab.attach(m, o, seed=-1),
    "epochs must be an integer of at least 1, got 0; pass epochs=90": lambda m, o: ab.attach(m, o, epochs=0),
    "batch_size must be an integer of at least 1, got 0; pass batch_size=32": (
        lambda m, o: ab.attach(m, o, batch_size=0)
    ),
    "clip_norm must be a number above 0, got 0; pass clip_norm=1.0": lambda m, o: ab.attach(m, o, clip_norm=0),
    "clip_at must be one of before, after, got 'later'; pass clip_at='after'": (
        lambda m, o: ab.attach(m, o, clip_at="later")
    ),
    "clip_at must be before where the compressor takes the step itself, because the update is not a gradient, got "
    "'after'; pass clip_at='before'": lambda m, o: ab.attach(m, o, "signum", clip_norm=1.0, clip_at="after"),
    "bucket_cap_mb must be a number above 0, got 0; pass bucket_cap_mb=25.0": (
        lambda m, o: ab.attach(m, o, bucket_cap_mb=0)
    ),
    "network must be one of 1gbit, 10gbit, 100gbit, 25gbit, 400gbit, ... (13 in all), got '1gbits'; pass ": (
        lambda m, o: ab.attach(m, o, network="1gbits")
    ),
    "schedule must be a function from a time in epochs to a learning rate, got 0.1; pass schedule=lambda epoch: ": (
        lambda m, o: ab.attach(m, o, schedule=0.1)  # type: ignore[arg-type]
    ),
    "schedule must be a function from a time in epochs to a learning rate, got one that says None; pass schedule=": (
        lambda m, o: ab.attach(m, o, schedule=lambda epoch: None)  # type: ignore[arg-type, return-value]
    ),
    "schedule must be a function that takes what it is called with, got one that raises TypeError (": (
        lambda m, o: ab.attach(m, o, schedule=lambda: 0.1)  # type: ignore[arg-type, misc]
    ),
    "name must be text, got 3; pass name='my arm'": lambda m, o: ab.attach(m, o, name=3),  # type: ignore[arg-type]
    "overlap must be True or False, got 'yes'; pass overlap=True": (
        lambda m, o: ab.attach(m, o, overlap="yes")  # type: ignore[arg-type]
    ),
    "scaler must be a torch.amp.GradScaler, got True; pass scaler=None without one": (
        lambda m, o: ab.attach(m, o, scaler=True)  # type: ignore[arg-type]
    ),
    "process_group must be what torch.distributed.new_group returns to a process that is in it, got 'gloo'; pass ": (
        lambda m, o: ab.attach(m, o, process_group="gloo")  # type: ignore[arg-type]
    ),
    "exempt must be made of norm, bias, embedding, or be a function of name and parameter, got 'norms'; pass "
    "exempt='norm'": lambda m, o: ab.attach(m, o, "topk", exempt="norms"),
    "exempt must be made of norm, bias, embedding, or be a function of name and parameter, got ['norm']; pass "
    "exempt='norm,bias'": lambda m, o: ab.attach(m, o, "topk", exempt=["norm"]),  # type: ignore[arg-type]
    "exempt must be a function that takes what it is called with, got one that raises TypeError (": (
        lambda m, o: ab.attach(m, o, "topk", exempt=lambda name: True)  # type: ignore[arg-type, misc]
    ),
    "exempt must be None with scope='model', where tensors travel as one; pass exempt=None": (
        lambda m, o: ab.attach(m, o, "topk", scope="model", exempt="norm")
    ),
    # what does not go together
    "adaptive=adabatch drives the batch, which your loop owns; pass another policy, or run python -m accordion_bench "
    "adaptive=adabatch": lambda m, o: ab.attach(m, o, adaptive="adabatch"),
    "adaptive=accordion_batch drives the batch": lambda m, o: ab.attach(m, o, adaptive="accordion_batch"),
    "adaptive=noise_scale drives the batch": lambda m, o: ab.attach(m, o, adaptive="noise_scale"),
    "adaptive=grow_batch drives the batch": lambda m, o: ab.local(m, o, "local_sgd", adaptive="grow_batch"),
    "adaptive=slowmo stands for a scheme; call ab.local(model, optimizer, sync='slowmo')": (
        lambda m, o: ab.attach(m, o, adaptive="slowmo")
    ),
    "adaptive=diloco stands for a scheme; call ab.local(model, optimizer, sync='diloco')": (
        lambda m, o: ab.local(m, o, "diloco", adaptive="diloco")
    ),
    "adaptive=accordion needs a compressor with levels to choose from, got compressor=none; pass one of "
    "compressor='powersgd', ": lambda m, o: ab.attach(m, o, adaptive="accordion"),
    "adaptive=alq needs a compressor with a codebook of its own, got compressor=topk; pass compressor='qsgd'": (
        lambda m, o: ab.attach(m, o, "topk", "alq")
    ),
    "adaptive must not drive the same quantity twice, got lgreco and accordion, which both drive the level; pass "
    "adaptive=['accordion', 'lgreco']": lambda m, o: ab.attach(m, o, "powersgd", ["lgreco", "accordion"], **LENGTH),
    "adaptive=qsr drives the period between averagings, got sync=every_step, which exchanges in every step; call "
    "ab.local(model, optimizer, sync='local_sgd', adaptive='qsr')": (
        lambda m, o: ab.attach(m, o, adaptive="qsr", schedule=lambda epoch: 1 / (1 + epoch), **LENGTH)
    ),
    "sync must be a local method, got 'every_step'; call ab.attach": lambda m, o: ab.local(m, o, "every_step"),
    "model must be a plain module where workers take local steps, got DistributedDataParallel, which exchanges in every"
    " step; pass model.module": lambda m, o: ab.local(DistributedDataParallel(m), o, "local_sgd"),
    "compressor must leave momentum and step to the optimizer where workers take local steps, got dgc, which has its "
    "own momentum; pass compressor='topk', or call ab.attach(model, optimizer)": (
        lambda m, o: ab.local(m, o, "local_sgd", "dgc", **LENGTH)
    ),
    "fragments must be at most 2, because the model has 2 layers, got 9; pass fragments=2": (
        lambda m, o: ab.local(m, o, "streaming_diloco", fragments=9, period=90)
    ),
    "delay must be at most period=2, because one average is in flight at a time, got 9; pass delay=2": (
        lambda m, o: ab.local(m, o, "overlap_local_sgd", delay=9)
    ),
    "optimizer must be sgd, because this compressor takes the step itself and leaves the optimizer no gradient, got "
    "torch.optim.adam.Adam; pass a torch.optim.SGD": lambda m, o: ab.attach(m, adam(m), "signum"),
    "optimizer must be adamw, because this compressor takes the step itself and leaves the optimizer no gradient, got "
    "torch.optim.SGD; pass a torch.optim.AdamW": lambda m, o: ab.attach(m, o, "onebitadam", freeze_step=3),
    "optimizer must have one momentum for all groups with a compressor that takes the step itself, got several; pass "
    "one group": lambda m, o: ab.attach(m, two_groups(m), "signum"),
    "optimizer must have maximize=False with a compressor that takes the step itself, which would leave it out, got "
    "True; pass maximize=False, or another compressor": (
        lambda m, o: ab.attach(m, sgd(m, maximize=True), "distefblocksgd")
    ),
    "optimizer must have dampening=0 with a compressor that takes the step itself, which would leave it out, got 0.5": (
        lambda m, o: ab.attach(m, sgd(m, dampening=0.5), "signum")
    ),
    "optimizer must have amsgrad=False with a compressor that takes the step itself": (
        lambda m, o: ab.attach(m, torch.optim.AdamW(m.parameters(), amsgrad=True), "onebitadam", freeze_step=3)
    ),
    # what must be known beforehand
    "adaptive=qsr must know epochs and steps_per_epoch and schedule beforehand, got None; pass epochs=..., "
    "steps_per_epoch=..., schedule=...": lambda m, o: ab.local(m, o, "local_sgd", adaptive="qsr"),
    "adaptive=qsr needs a schedule that lowers the learning rate, got one that never does; pass another schedule, or "
    "adaptive={'qsr': {'alpha': 0}}": lambda m, o: ab.local(
        m, o, "local_sgd", adaptive="qsr", schedule=constant, **LENGTH
    ),
    "adaptive=schedule must know epochs and schedule beforehand, got None; pass epochs=..., schedule=...": (
        lambda m, o: ab.attach(m, o, "powersgd", "schedule")
    ),
    "adaptive=schedule must know schedule beforehand, got None; pass schedule=...": (
        lambda m, o: ab.attach(m, o, "powersgd", "schedule", epochs=3)
    ),
    "adaptive=adacomm must know epochs and steps_per_epoch beforehand, got None; pass epochs=..., steps_per_epoch": (
        lambda m, o: ab.local(m, o, "local_sgd", adaptive="adacomm")
    ),
    "adaptive.adacomm.every must be less than half the 9 steps of the run, because the losses of two intervals are "
    "compared, got 60; pass adaptive={'adacomm': {'every': 1}}": (
        lambda m, o: ab.local(m, o, "local_sgd", adaptive="adacomm", **LENGTH)
    ),
    "compressor=dgc must know steps_per_epoch beforehand, got None; pass steps_per_epoch=...": (
        lambda m, o: ab.attach(m, o, "dgc")
    ),
    "sync=post_local_sgd must know epochs and schedule beforehand, got None; pass epochs=..., schedule=...": (
        lambda m, o: ab.local(m, o, "post_local_sgd")
    ),
    "switch_step must be a number of steps where the learning rate never drops at once, to 0.7 or less, got None; pass "
    "switch_step=1000": lambda m, o: ab.local(m, o, "post_local_sgd", epochs=3, schedule=constant),
    # model and optimizer
    "model must be a torch.nn.Module, got None; pass the module that is trained": (
        lambda m, o: ab.attach(None, o)  # type: ignore[arg-type]
    ),
    "optimizer must be a torch.optim.Optimizer or a list of them, got 0.1; pass the model's": (
        lambda m, o: ab.attach(m, 0.1)  # type: ignore[arg-type]
    ),
    "model must have parameters that are trained, got none; pass one with requires_grad=True": (
        lambda m, o: ab.attach(m.requires_grad_(False), o)
    ),
    "optimizer must hold all trained parameters of the model, got one without 1.weight; pass it to the optimizer, "
    "pass a list where the model has several optimizers, or call requires_grad_(False)": (
        lambda m, o: ab.attach(m, sgd(m[0]))  # type: ignore[index]
    ),
    "model must hold all parameters of the optimizer, got one that lacks 4 of them; pass the module that holds all": (
        lambda m, o: ab.attach(m[0], o)  # type: ignore[index]
    ),
    "model must be on one device, got cpu and meta; move it to one": (
        lambda m, o: ab.attach(two := on_two_devices(), sgd(two))
    ),
    "model must be attached only once, got one that is attached; call comm.detach() first": (
        lambda m, o: (ab.attach(m, o), ab.attach(m, o))
    ),
}

# what two processes pass, and what both read
DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"compressor": "topk"},
        {"compressor": "powersgd"},
        "compressor='topk' on rank 0 and compressor='powersgd' on rank",
    ),
    ({"rank": 2}, {"rank": 4}, "compressor.rank=2 on rank 0 and compressor.rank=4 on rank 1; pass the same on all"),
    ({"seed": 0}, {"seed": 1}, "seed=0 on rank 0 and seed=1 on rank 1"),
    ({}, {"adaptive": "accordion"}, "adaptive.accordion._target_=nothing on rank 0 and adaptive.accordion._target_="),
    ({}, {"exempt": "bias"}, "exempt.0=nothing on rank 0 and exempt.0='0.bias' on rank 1"),
    ({"schedule": constant}, {}, "schedule='a function' on rank 0 and schedule=None on rank 1"),
    ({"epochs": 3}, {"epochs": 4}, "epochs=3 on rank 0 and epochs=4 on rank 1"),
    ({"clip_norm": 1.0}, {}, "clip_norm=1.0 on rank 0 and clip_norm=None on rank 1"),
    (
        {"wide": 16},
        {"wide": 17},
        "parameters.0.weight='[16, 8] torch.float32' on rank 0 and parameters.0.weight='[17, ",
    ),
    ({"momentum": 0.9}, {"momentum": 0.0}, "optimizer.momentum=0.9 on rank 0 and optimizer.momentum=0.0 on rank 1"),
    ({"optimizer": sgd}, {"optimizer": adam}, "optimizer._target_='torch.optim.SGD' on rank 0 and optimizer._target_="),
]


def said_by(call: Callable[[], Any], kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as refused:
        call()
    said = str(refused.value)
    assert "\n" not in said, said
    assert "; type " not in said, said
    return said


def refused(rank: int, store: str) -> None:
    """Each process refuses these by itself, so that one is enough."""
    with by_hand.in_group(rank, store, workers=1):
        for expected, case in ONE_PROCESS.items():
            model = net()
            said = said_by(lambda case=case, model=model: case(model, sgd(model)))
            assert said.startswith(expected), said


def different(rank: int) -> None:
    for *passed, expected in DIFFERENT:
        own = {"compressor": "powersgd", **passed[rank]}
        model = net(own.pop("wide", 16))
        optimizer = own.pop("optimizer", sgd)(model, **({"momentum": own.pop("momentum")} if "momentum" in own else {}))
        said = said_by(lambda own=own, model=model, optimizer=optimizer: ab.attach(model, optimizer, **own))
        assert said.startswith(f"all processes must pass the same, got {expected}"), said
    batch, model = (64, 32)[rank], net()
    for attach, method in ((ab.attach, "signsgd"), (ab.local, "noloco")):
        said = said_by(lambda attach=attach, method=method: attach(model, sgd(model), method, batch_size=batch))
        key = "compressor" if attach is ab.attach else "sync"
        assert said.startswith(f"batch_size must be the same for all workers with {key}={method}, whose "), said
        assert said.endswith("got [64, 32]; pass batch_size=64"), said
    model = net()
    said = said_by(lambda: ab.attach(model, sgd(model), "topk" if rank == 0 else "tokp"))
    own = "compressor must be a known name, got 'tokp'; pass compressor='topk' ("
    other = f"all processes must pass what can be used, got a refusal on rank 1: {own}"
    assert said.startswith(other if rank == 0 else own), said


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def in_the_loop(rank: int) -> None:
    """What is found out when training goes on."""
    records = Records()
    logging.getLogger("accordion_bench").addHandler(records)
    model = net()
    optimizer, more = sgd(model), nn.Linear(2, 2)
    comm = ab.attach(model, optimizer)
    small_net.step(model, optimizer, comm, rank, 0)
    optimizer.add_param_group({"params": list(more.parameters())})
    said = said_by(lambda: small_net.step(model, optimizer, comm, rank, 1))
    assert said == (
        "parameters must be the same as at ab.attach, got 8 in the optimizer, 6 before; call comm.detach() and "
        "ab.attach again"
    ), said
    comm.detach()

    model = net()
    model[0].bias.requires_grad_(False)
    optimizer = sgd(model)
    comm = ab.attach(model, optimizer)
    model[0].bias.requires_grad_(True)
    said = said_by(lambda: small_net.step(model, optimizer, comm, rank, 0))
    assert "got a frozen one thawed; call comm.detach() and ab.attach again" in said, said
    comm.detach()

    model = nn.Module()
    model.table = nn.Parameter(torch.ones(5, 3))
    comm = ab.attach(model, sgd(model))
    looked_up = nn.functional.embedding(torch.tensor([1, 2]), model.table, sparse=True)
    said = said_by(lambda: looked_up.sum().backward())
    assert said == (
        "gradients must be dense tensors, got a sparse one of table; pass sparse=False to the module that makes it"
    ), said
    comm.detach()

    model = net()
    optimizer = sgd(model)
    comm = ab.local(
        model, optimizer, "local_sgd", period=1, adaptive={"adacomm": {"every": 2}}, epochs=2, steps_per_epoch=4
    )
    said = said_by(lambda: [quiet_step(model, optimizer, rank, number) for number in range(8)])
    assert said == "adaptive=adacomm needs the loss of every step, got none; call comm.note(loss)", said
    comm.detach()

    model = net()
    optimizer = sgd(model)
    records.said.clear()
    comm = ab.attach(model, optimizer, "topk", "accordion", steps_per_epoch=2, density=0.1)
    small_net.steps(model, optimizer, comm, rank, range(7))
    forgotten = [said for said in records.said if "none has ended in 4 steps; call comm.end_epoch()" in said]
    assert len(forgotten) == (1 if rank == 0 else 0), records.said
    comm.detach()


def quiet_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    x, y = small_net.batch(rank, number)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def again() -> None:
    """An attachment that is over gives back what it has taken from the optimizer."""
    model = net()
    optimizer = sgd(model, nesterov=True)
    for _ in range(2):
        comm = ab.attach(model, optimizer, {"signum": {"weight_decay_mode": "decoupled"}})
        assert comm.exchange.compressor.momentum == 0.9
        assert optimizer.param_groups[0]["momentum"] == 0.0
        comm.detach()
        assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["nesterov"]) == (0.9, True)


def test_what_each_process_refuses(tmp_path):
    together(1, refused, str(tmp_path / "store"))


def in_two(rank: int, store: str) -> None:
    with by_hand.in_group(rank, store):
        different(rank)
        in_the_loop(rank)
        again()


def test_what_two_processes_refuse_and_are_told(tmp_path):
    together(2, in_two, str(tmp_path / "store"))


def test_no_process_group():
    assert not dist.is_initialized()
    model = net()
    assert said_by(lambda: ab.attach(model, sgd(model))) == (
        "torch.distributed must have a process group, got none; call torch.distributed.init_process_group() first and "
        "start the script with torchrun --nproc_per_node=N"
    )


def test_an_option_of_both(tmp_path, monkeypatch):
    (tmp_path / "sync").mkdir()
    (tmp_path / "sync" / "mine.yaml").write_text("_target_: accordion_bench.sync.local_sgd.LocalSGD\ndensity: 0.5\n")
    monkeypatch.setattr(conf_dir, "_own", [tmp_path])
    assert said_by(lambda: choose("topk", None, "mine", {}, {"density": 0.1}, ())) == (
        "density must say whose it is, got density=0.1 where both compressor and sync have one; pass "
        "compressor={'topk': {'density': 0.1}}, say"
    )
