"""A training that goes on from `comm.state_dict()` is the training that was never interrupted, bit for bit."""

import copy
import io
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accordion_bench as ab
from accordion_bench.optimizers.elementwise import Lion
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import yaml_files
from tests.kit import by_hand, small_net
from tests.kit.helpers import optimizer_for
from tests.kit.processes import together
from tests.kit.small_net import net, sgd

EPOCHS, STEPS = 3, 4
SAVED_AT = (6, 8)  # in mid-epoch, and between two
KNOWN = {"epochs": EPOCHS, "steps_per_epoch": STEPS}
SHORT: dict[str, dict[str, Any]] = {
    "onebitadam": {"freeze_step": 6},
    "dgc": {"steps_per_epoch": 4},
    "gradiveq": {"basis_steps": 2, "period": 5, "length": 16, "rank": 2},
}  # else nothing happens in so few steps


def falls(epoch: float) -> float:
    return 0.1 if epoch < 1 else 0.05


EVERY_EPOCH = {"interval": 1}
ALL: dict[str, dict[str, Any]] = {
    **{name: {"compressor": name, **SHORT.get(name, {})} for name in yaml_files("compressor")},
    "two-way signs": {"compressor": "efsignsgd", "collective": "two_way", "error_feedback": True},
    "ef21": {"compressor": "powersgd", "rank": 1, "min_compression_rate": 0, "error_feedback": "ef21"},
    "loco": {"compressor": "topk", "error_feedback": "loco", "residual_reset": 5},
    "eight bits": {"compressor": "powersgd", "rank": 1, "min_compression_rate": 0, "residual_bits": 8},
    "accordion": {"compressor": "powersgd", "adaptive": {"accordion": EVERY_EPOCH}},
    "accordion of all gradients": {
        "compressor": "topk",
        "adaptive": {"accordion": {**EVERY_EPOCH, "statistic": "mean"}},
    },
    "alq": {"compressor": "nuqsgd", "adaptive": {"alq": {"update_at": [0, 5, 9]}}},
    "adaqs": {"compressor": "qsgd", "adaptive": "adaqs"},
    "gravac": {"compressor": "topk", "adaptive": "gravac"},
    "lgreco": {"compressor": "powersgd", "adaptive": "lgreco", "steps_per_epoch": STEPS},
    "advised": {"compressor": "topk", "adaptive": "advised", "steps_per_epoch": STEPS},
    "local_sgd": {"sync": "local_sgd", "period": 4},
    "slowmo": {"sync": "slowmo", "period": 4},
    "diloco with topk": {"sync": "diloco", "period": 4, "compressor": "topk", "density": 0.2},
    "overlap": {"sync": "overlap_local_sgd", "period": 3, "delay": 2},
    "streaming": {"sync": "streaming_diloco", "period": 6, "delay": 2, "compressor": "topk", "density": 0.2},
    "sparta": {"sync": {"sparta": {"sparta": 0.2}}},
    "diloco with sparta": {"sync": "diloco", "period": 4, "sparta": 0.2},
    "noloco": {"sync": "noloco", "period": 4},
    "desloc": {"sync": "desloc", "period": 2, "variance_period": 4, "momentum_period": 2},
    "gossip, used late": {"sync": "gossip", "graph": "ring", "delay": 1},
    "cocod": {"sync": "overlap_local_sgd", "period": 4, "delay": 3, "merge": "cocod", "beta": 0.0},
    "post-local before the switch": {"sync": "post_local_sgd", "period": 3, "switch_step": 7},
    "post-local after it": {"sync": "post_local_sgd", "period": 3, "switch_step": 4},
    "post-local by models": {"sync": "post_local_sgd", "period": 3, "switch_step": 7, "phase1": "model"},
    "adacomm": {"sync": "local_sgd", "adaptive": {"adacomm": {"every": 3}}, **KNOWN},
    "zerooneadam": {"sync": "zerooneadam", "freeze_step": 5, "refreshes": 1, "doubling_steps": 2, "longest_period": 2},
    "accordion_sync": {"sync": "local_sgd", "adaptive": {"accordion_sync": EVERY_EPOCH}},
    "qsr": {"sync": "local_sgd", "adaptive": "qsr", **KNOWN, "schedule": falls},
}
PLAIN = [
    "topk",
    "ef21",
    "eight bits",
    "gravac",
    "slowmo",
    "streaming",
    "noloco",
    "gossip, used late",
    "desloc",
    "adacomm",
    "onebitadam",
    "zerooneadam",
]
DDP = ["powersgd", "accordion"]
SLOW_DDP = [name for name, passed in ALL.items() if "sync" not in passed]


def optimizer_beside(model: nn.Module, passed: dict[str, Any]) -> torch.optim.Optimizer:
    """SGD with momentum, unless the method wants something else beside it."""
    if passed.get("error_feedback") == "ef21":
        return sgd(model, 0.0)
    for group, choice in (("compressor", passed.get("compressor", "none")), ("sync", passed.get("sync", "every_step"))):
        wanted = optimizer_for(group, choice if isinstance(choice, str) else next(iter(choice)))
        if wanted["_target_"].endswith("AdamW"):
            return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.01)
        if wanted["_target_"].endswith("Lion"):
            return Lion(model.parameters(), lr=0.01, weight_decay=0.1)
        if not wanted["momentum"]:
            return sgd(model, 0.0)
    return sgd(model)


class Training:
    """One process's model, optimizer and attachment, and where they stand."""

    def __init__(self, rank: int, passed: dict[str, Any], ddp: bool = False, start: Any = None) -> None:
        self.rank, self.number = rank, 0
        self.model: nn.Module = net()
        self.optimizer = optimizer_beside(self.model, passed)
        self.module = DistributedDataParallel(self.model) if ddp else self.model
        self.comm = (ab.local if "sync" in passed else ab.attach)(self.module, self.optimizer, **passed)
        if start is not None:
            self.number, model, optimizer, state = start
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)
            self.comm.load_state_dict(state)

    def go_on(self, until: int) -> None:
        while self.number < until:
            small_net.step(self.module, self.optimizer, self.comm, self.rank, self.number)
            self.number += 1
            if self.number % STEPS == 0:
                self.comm.end_epoch()

    def saved(self) -> Any:
        """What a file gives back."""
        states = self.model.state_dict(), self.optimizer.state_dict(), self.comm.state_dict()
        file = io.BytesIO()
        torch.save([self.number, *states], file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def left(self) -> dict[str, Any]:
        """Everything that must be equal in the end, without times."""
        state = self.comm.state_dict()
        state["shared"].pop("clock")
        kept = {"weights": by_hand.weights(self.model), "optimizer": self.optimizer.state_dict(), "state": state}
        return {**kept, "bytes": self.comm.comm.ledger.columns()}


def same(ours: Any, theirs: Any, where: str = "") -> None:
    assert type(ours) is type(theirs), where
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), where
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            same(ours[key], theirs[key], f"{where}, {key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            same(a, b, f"{where}, {i}")
    else:
        assert ours == theirs, f"{where}: {ours} and {theirs}"


def interrupted(rank: int, store: str, cases: dict[str, dict[str, Any]], ddp: bool, workers: int = 2) -> None:
    with by_hand.in_group(rank, store, workers):
        go_on_bit_for_bit(rank, cases, ddp)


def plain_and_ddp(rank: int, store: str) -> None:
    with by_hand.in_group(rank, store):
        go_on_bit_for_bit(rank, {name: ALL[name] for name in PLAIN}, False)
        go_on_bit_for_bit(rank, {name: ALL[name] for name in DDP}, True)


def go_on_bit_for_bit(rank: int, cases: dict[str, dict[str, Any]], ddp: bool) -> None:
    for name, passed in cases.items():
        straight, saving = Training(rank, passed, ddp), Training(rank, passed, ddp)
        straight.go_on(EPOCHS * STEPS)
        starts = []
        for at in SAVED_AT:
            saving.go_on(at)
            starts.append(saving.saved())
        saving.go_on(EPOCHS * STEPS)
        left = straight.left()
        same(saving.left(), left, f"{name}, which was saved")
        for start in starts:
            resumed = Training(rank, passed, ddp, start)
            assert resumed.comm.clock.read()["compute"] == start[3]["shared"]["clock"]["compute"] > 0
            resumed.go_on(EPOCHS * STEPS)
            same(resumed.left(), left, f"{name}, from step {start[0]}")


def test_it_goes_on_bit_for_bit(tmp_path):
    together(2, plain_and_ddp, str(tmp_path / "store"))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("names", "ddp"), [(list(ALL), False), (SLOW_DDP, True)], ids=["plain", "ddp"])
def test_everything_goes_on_bit_for_bit(tmp_path, names, ddp, part):
    together(2, interrupted, str(tmp_path / "store"), {name: ALL[name] for name in names[part::4]}, ddp, seconds=280)


@pytest.mark.slow
def test_groups_of_workers_go_on_bit_for_bit(tmp_path):
    passed = {"sync": {"hierarchical": {"groups": [[1, 2], [4, 4]]}}, "compressor": "topk", "density": 0.2}
    together(4, interrupted, str(tmp_path / "store"), {"hierarchical": passed}, False, 4)


def keep_states(rank: int, store: str) -> None:
    """What `state_dict` returns stays, and what it was loaded from stays, however long the training goes on."""
    passed = {"slowmo": {"period": 2}, "diloco": {"period": 2}, "streaming_diloco": {"period": 4, "delay": 1}}
    with by_hand.in_group(rank, store):
        for sync, options in passed.items():
            model = net()
            optimizer = sgd(model)
            comm = ab.local(model, optimizer, sync, **options)
            small_net.steps(model, optimizer, comm, rank, range(5))
            state, weights = comm.state_dict(), copy.deepcopy(model.state_dict())
            kept = copy.deepcopy(state)
            small_net.steps(model, optimizer, comm, rank, range(5, 11))
            same(state, kept, sync)
            comm.detach()

            comm = ab.local(model, optimizer, sync, **options)
            model.load_state_dict(weights)
            comm.load_state_dict(state)
            small_net.steps(model, optimizer, comm, rank, range(5, 11))
            same(state, kept, sync)
            comm.detach()


def test_a_state_is_a_snapshot(tmp_path):
    together(2, keep_states, str(tmp_path / "store"))


# ---- another number of workers

SHARED = {
    "topk": {"compressor": "topk", "density": 0.1},
    "dgc": {"compressor": "dgc", "steps_per_epoch": STEPS},
    "two-way": {"compressor": "distefblocksgd"},
    "two-way, one server": {"compressor": "distefblocksgd", "server": "literal"},
    "diloco with topk": {"sync": "diloco", "period": 4, "compressor": "topk", "density": 0.2},
    "overlap": {"sync": "overlap_local_sgd", "period": 4, "delay": 3},
    "cocod": ALL["cocod"],
    "streaming": {"sync": "streaming_diloco", "period": 6, "delay": 2},
    "post-local": {"sync": "post_local_sgd", "period": 3, "switch_step": 9, "compressor": "topk"},
    "accordion": {
        "compressor": "topk",
        "adaptive": {"accordion": {**EVERY_EPOCH, "statistic": "mean"}},
    },
}


MEETS = {"noloco": ALL["noloco"]}  # an even number of workers


def save_six_steps(rank: int, folder: str, workers: int, names: list[str]) -> None:
    with by_hand.in_group(rank, f"{folder}/store-{workers}", workers):
        for name in names:
            passed = (SHARED | MEETS)[name]
            training = Training(rank, passed)
            training.go_on(6)
            torch.save([training.saved(), training.comm.comm.ledger.columns()], f"{folder}/{name}-{rank}.pt")


def go_on_with_others(rank: int, folder: str, before: int, workers: int, names: list[str]) -> None:
    records = told_of_states()
    with by_hand.in_group(rank, f"{folder}/to-{workers}", workers):
        for name in names:
            passed = (SHARED | MEETS)[name]
            files = [torch.load(f"{folder}/{name}-{old}.pt", weights_only=True) for old in range(before)]
            number, model, optimizer, leaders = files[0][0]
            states = [saved[3] for saved, _ in files]

            records.clear()
            training = Training(rank, passed, start=(number, model, optimizer, states))
            if rank == 0:
                assert records == [
                    f"the state is of {before} workers and goes on with {workers}: each gets the mean of all residuals"
                ]
            now = training.comm.comm.gather_objects(training.comm.state_dict())
            if rank == 0:
                kept_as_a_mean(name, [state["own"] for state in states], [state["own"] for state in now])
                columns = training.comm.comm.ledger.columns()
                assert {key: columns[key] for key in ("payload_bytes", "dense_bytes")} == {
                    key: files[0][1][key] for key in ("payload_bytes", "dense_bytes")
                }, name
            training.go_on(12)
            weights = training.comm.comm.gather_objects(by_hand.weights(training.model))
            if "sync" not in passed:
                assert all(by_hand.equal(weights[0], other) for other in weights), name

            records.clear()
            training = Training(rank, passed, start=(number, model, optimizer, leaders))
            if rank == 0:
                assert records == [
                    f"the state is of {before} workers and goes on with {workers}: residuals are dropped; pass the "
                    "states of all ranks as a list to keep their mean"
                ]
            residuals = [
                t for kept in training.comm.state_dict()["own"]["exchange_states"].values() for t in tensors(kept)
            ]
            assert not any(t.any() for t in residuals), name
            anchored = training.comm.state_dict()["own"]["sync"]
            same(anchored, leaders["own"]["sync"], name)
            training.go_on(7)
            assert training.comm.position.step == 7
            with pytest.raises(
                ConfigError, match="state must be that of rank 0 where the number of workers has changed"
            ):
                Training(rank, passed, start=(number, model, optimizer, states[1]))
            with pytest.raises(ConfigError, match=r"state must be a list of the states of ranks 0 to \d, got ranks"):
                Training(rank, passed, start=(number, model, optimizer, states[::-1]))


def told_of_states() -> list[str]:
    """A list that will hold what is logged of states."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)

    def note(record: logging.LogRecord) -> None:
        if record.getMessage().startswith("the state is of"):
            said.append(record.getMessage())

    handler.emit = note  # type: ignore[method-assign]
    log = logging.getLogger("accordion_bench")
    log.addHandler(handler)
    log.propagate = False
    return said


def tensors(node: Any) -> list[torch.Tensor]:
    return [node] if isinstance(node, torch.Tensor) else [t for inner in node.values() for t in tensors(inner)]


def kept_as_a_mean(name: str, before: list[Any], now: list[Any]) -> None:
    """What all workers hold back of a tensor has the same mean; owners' residuals have the same sum of squares."""
    places = zip(before[0]["exchange_states"], now[0]["exchange_states"], strict=True)  # the name says how many workers
    for place, place_now in places:
        for tensor, entries in before[0]["exchange_states"][place].items():
            for key in entries:
                old = [own["exchange_states"][place][tensor][key].double() for own in before]
                new = [own["exchange_states"][place_now][tensor][key].double() for own in now]
                if tensor.startswith("two_way from"):
                    squares = [sum(float(t.square().sum()) for t in each) for each in (old, new)]
                    assert squares[0] == pytest.approx(squares[1], rel=1e-12), name
                    assert squares[0] > 0, name
                else:
                    mean = torch.stack(old).mean(0).float().double()
                    torch.testing.assert_close(torch.stack(new).mean(0), mean, rtol=1e-7, atol=0)
    for key in ("loss_sum", "unread_loss"):
        means = [sum(float(own[key]) for own in owns) / len(owns) for owns in (before, now)]
        assert means[0] == pytest.approx(means[1], rel=1e-12), (name, key)
    if sums := before[0]["signals"].get("norm_of_sum_mean"):
        for tensor in sums:
            old, new = (
                torch.stack([own["signals"]["norm_of_sum_mean"][tensor] for own in owns]).double().mean(0)
                for owns in (before, now)
            )
            torch.testing.assert_close(old, new, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("before", "workers", "names"),
    [
        (2, 3, ["topk", "two-way", "overlap", "cocod"]),
        pytest.param(2, 3, list(SHARED), marks=pytest.mark.slow),
        pytest.param(3, 2, list(SHARED), marks=pytest.mark.slow),
        pytest.param(2, 4, ["noloco"], marks=pytest.mark.slow),
    ],
    ids=["2 to 3", "2 to 3, all", "3 to 2, all", "2 to 4"],
)
def test_another_number_of_workers(tmp_path, before, workers, names):
    together(before, save_six_steps, str(tmp_path), before, names)
    together(workers, go_on_with_others, str(tmp_path), before, workers, names)


# ---- what is refused


def wrong_states(rank: int, store: str) -> None:
    with by_hand.in_group(rank, store):
        passed = {"compressor": "topk", "density": 0.1}
        training = Training(rank, passed)
        training.go_on(3)
        start = training.saved()
        number, model, optimizer, state = start
        states = training.comm.comm.gather_objects(state)

        def said(passed: dict[str, Any] = passed, state: Any = state, model: Any = model) -> str:
            with pytest.raises(ConfigError) as refused:
                Training(rank, passed, start=(number, model, optimizer, state))
            return str(refused.value)

        assert said({"compressor": "powersgd"}).startswith(
            "state must be of the same methods, got compressor='topk' in it and compressor='powersgd' here; pass what"
        )
        assert said({**passed, "density": 0.2}) == (
            "state must be of the same methods, got compressor.density=0.1 in it and compressor.density=0.2 here; pass "
            "what it was saved with"
        )
        assert said({**passed, "seed": 1}).startswith("state must be of the same methods, got seed=0 in it and seed=1")
        other = {**state, "options": {**state["options"], "parameters": {"0.weight": [3, 3]}}}
        assert said(state=other).startswith("state must be of the same methods, got parameters.0.weight.0=3 in it and")
        assert said(state=states[1 - rank]) == (
            f"state must be that of the same rank, got that of rank {1 - rank}; pass rank {rank}'s"
        )
        assert (
            said(state=states[::-1]) == "state must be a list of the states of ranks 0 to 1, got ranks [1, 0]; pass all"
        )
        for nothing in ({}, [], model, "file", [{}]):
            assert said(state=nothing) == (
                "state must be what comm.state_dict() has returned, or a list of that of all ranks, got something else;"
                " pass torch.load(FILE)"
            )
        assert said(model=net().state_dict()).startswith(
            "model must hold the parameters that it had when the state was"
        )
        with pytest.raises(ConfigError, match=r"state must be loaded before the first step, got 3 steps; call comm"):
            training.comm.load_state_dict(state)
        Training(rank, passed, start=(number, model, optimizer, states))  # of all ranks, and of as many workers

        x, y = small_net.batch(rank, 3)
        nn.functional.cross_entropy(training.model(x), y).backward()
        with pytest.raises(
            ConfigError, match=r"state must be saved between two steps, got gradients that are under way"
        ):
            training.comm.state_dict()
        training.optimizer.step()
        training.comm.state_dict()


def test_wrong_states(tmp_path):
    together(2, wrong_states, str(tmp_path / "store"))
