"""A training written by hand equals the bench's run, bit for bit and byte for byte: the bench measures what users get.

ResNet-8 on digits, two processes; options are the YAML files' own.
"""

from pathlib import Path
from typing import Any

import pytest

import accordion_bench as ab
from accordion_bench.options.conf_dir import yaml_files
from tests.kit import by_hand
from tests.kit.helpers import changed_options
from tests.kit.processes import together

SHORT = ["dataset.subset=64", "epochs=2"]
COMPRESSORS = list(yaml_files("compressor"))
EVERY_EPOCH = {"interval": 1}
POLICIES: list[tuple[str, list[str], dict[str, Any]]] = [
    (
        "accordion",
        ["compressor=powersgd", "adaptive=accordion", "adaptive.accordion.interval=1", "epochs=4"],
        {"compressor": "powersgd", "adaptive": {"accordion": EVERY_EPOCH}},
    ),
    (
        "accordion on topk",
        ["compressor=topk", "adaptive=accordion", "adaptive.accordion.interval=1", "epochs=4"],
        {"compressor": "topk", "adaptive": {"accordion": EVERY_EPOCH}},
    ),
    (
        "alq",
        ["compressor=nuqsgd", "compressor.bits=3", "adaptive=alq", "adaptive.alq.update_at=[0,5]"],
        {"compressor": {"nuqsgd": {"bits": 3}}, "adaptive": {"alq": {"update_at": [0, 5]}}},
    ),
    ("adaqs", ["compressor=qsgd", "adaptive=adaqs", "epochs=3"], {"compressor": "qsgd", "adaptive": "adaqs"}),
    ("gravac", ["compressor=topk", "adaptive=gravac"], {"compressor": "topk", "adaptive": "gravac"}),
    ("lgreco", ["compressor=powersgd", "adaptive=lgreco"], {"compressor": "powersgd", "adaptive": "lgreco"}),
    ("advised", ["compressor=powersgd", "adaptive=advised"], {"compressor": "powersgd", "adaptive": "advised"}),
    ("schedule", ["compressor=powersgd", "adaptive=schedule"], {"compressor": "powersgd", "adaptive": "schedule"}),
]
LOCAL: list[tuple[str, list[str], dict[str, Any]]] = [
    ("slowmo", ["sync=slowmo", "sync.period=3"], {"sync": "slowmo", "period": 3}),
    ("diloco", ["sync=diloco", "sync.period=3"], {"sync": "diloco", "period": 3}),
    (
        "diloco with topk",
        ["sync=diloco", "sync.period=3", "compressor=topk", "compressor.density=0.01"],
        {"sync": "diloco", "period": 3, "compressor": "topk", "density": 0.01},
    ),
    (
        "late workers",
        ["sync=diloco", "sync.period=2", "sync.quorum=1", "sync.lateness=0.5"],
        {"sync": {"diloco": {"period": 2, "quorum": 1, "lateness": 0.5}}},
    ),
    ("overlap", ["sync=overlap_local_sgd"], {"sync": "overlap_local_sgd"}),
    ("sparta", ["sync=sparta", "sync.sparta=0.1"], {"sync": {"sparta": {"sparta": 0.1}}}),
    (
        "diloco with sparta",
        ["sync=diloco", "sync.period=3", "sync.sparta=0.1"],
        {"sync": "diloco", "period": 3, "sparta": 0.1},
    ),
    (
        "desloc",
        ["sync=desloc", "sync.period=2", "sync.clip=0.01", "optimizer=adamw"],
        {"sync": "desloc", "period": 2, "clip": 0.01},
    ),
    ("gossip", ["sync=gossip", "sync.delay=1"], {"sync": "gossip", "delay": 1}),
    ("noloco", ["sync=noloco", "sync.period=3"], {"sync": "noloco", "period": 3}),
    (
        "streaming",
        ["sync=streaming_diloco", "sync.period=4", "sync.delay=1", "compressor=topk"],
        {"sync": "streaming_diloco", "period": 4, "delay": 1, "compressor": "topk"},
    ),
    (
        "post-local",
        ["sync=post_local_sgd", "sync.period=3", "epochs=4"],
        {"sync": "post_local_sgd", "period": 3},
    ),
    (
        "0/1 Adam",
        ["sync=zerooneadam", "optimizer=adamw", "sync.freeze_step=4", "sync.refreshes=2", "sync.doubling_steps=2"],
        {"sync": "zerooneadam", "freeze_step": 4, "refreshes": 2, "doubling_steps": 2},
    ),
    (
        "qsr",
        ["sync=local_sgd", "adaptive=qsr", "schedule=cosine", "schedule.warmup_epochs=1"],
        {"sync": "local_sgd", "adaptive": "qsr"},
    ),
    (
        "adacomm",
        ["sync=local_sgd", "adaptive=adacomm", "adaptive.adacomm.every=2", "epochs=3"],
        {"sync": "local_sgd", "adaptive": {"adacomm": {"every": 2}}},
    ),
    (
        "accordion_sync",
        ["sync=local_sgd", "adaptive=accordion_sync", "adaptive.accordion_sync.interval=1", "epochs=4"],
        {"sync": "local_sgd", "adaptive": {"accordion_sync": EVERY_EPOCH}},
    ),
]
COUNTED = ("payload_bytes", "wire_bytes", "inner_wire_bytes", "rounds", "dense_bytes", "paper_floats")


def known(trainer, loop: by_hand.Loop) -> dict[str, Any]:
    """What a user may tell of the training beforehand."""
    rises = trainer.position.schedule.rises_until
    return {
        "epochs": trainer.config.epochs, "steps_per_epoch": loop.steps, "schedule": loop.lr, "warmup_epochs": rises,
    }  # fmt: skip


def same(name: str, comm, loop: by_hand.Loop, trainer) -> None:
    assert by_hand.equal(by_hand.weights(loop.model), trainer.axis.shared), name
    ours, theirs = comm.comm.ledger.columns(), trainer.comm.ledger.columns()
    assert [(key, ours[key]) for key in COUNTED] == [(key, theirs[key]) for key in COUNTED], name
    assert comm.position.plan == trainer.position.plan, name


def attached_as_bench(rank: int, folder: Path, cases, doors=(False, True)) -> None:
    with by_hand.in_group(rank, str(folder / "store")):
        for name, overrides, passed in cases:
            trainer = by_hand.bench(folder / f"{name}-{rank}", rank, *SHORT, *overrides)
            for ddp in doors:
                loop = by_hand.Loop(trainer, rank)
                comm, module = loop.attached(ddp=ddp, **passed, **known(trainer, loop))
                loop.train(comm, module)
                comm.detach()
                same(f"{name}, {'DistributedDataParallel' if ddp else 'plain'}", comm, loop, trainer)


def local_as_bench(rank: int, folder: Path, cases) -> None:
    with by_hand.in_group(rank, str(folder / "store")):
        for name, overrides, passed in cases:
            trainer = by_hand.bench(folder / f"{name}-{rank}", rank, *SHORT, *overrides)
            loop = by_hand.Loop(trainer, rank)
            with ab.local(
                loop.model, loop.optimizer, **passed, **known(trainer, loop), batch_size=loop.batch_size
            ) as comm:
                loop.train(comm)
            same(name, comm, loop, trainer)


def in_groups_as_bench(rank: int, folder: Path) -> None:
    with by_hand.in_group(rank, str(folder / "store"), 4):
        trainer = by_hand.bench(folder / f"run-{rank}", rank, *SHORT, "sync=hierarchical", workers=4)
        loop = by_hand.Loop(trainer, rank)
        with ab.local(loop.model, loop.optimizer, "hierarchical", batch_size=loop.config.batch_size) as comm:
            loop.train(comm)
        same("hierarchical", comm, loop, trainer)


def by_default(names) -> list[tuple[str, list[str], dict[str, Any]]]:
    return [
        (name, [f"compressor={name}", "epochs=1", *changed_options("compressor", name)], {"compressor": name})
        for name in names
    ]


@pytest.mark.sample(3)
@pytest.mark.parametrize("part", range(3))
def test_every_compressor(tmp_path, part):
    together(2, attached_as_bench, tmp_path, by_default(COMPRESSORS[part::3]), [False])


def test_some_compressors_with_ddp(tmp_path):
    cases = by_default(["none", "powersgd", "topk", "distefblocksgd", "demo"])
    together(2, attached_as_bench, tmp_path, cases, [True])


@pytest.mark.slow
def test_every_compressor_with_ddp(tmp_path):
    together(2, attached_as_bench, tmp_path, by_default(COMPRESSORS), [True], seconds=280)


def test_some_policies(tmp_path):
    cases = [case for case in POLICIES if case[0] in ("accordion", "alq")]
    together(2, attached_as_bench, tmp_path, cases)


@pytest.mark.slow
def test_every_policy(tmp_path):
    together(2, attached_as_bench, tmp_path, POLICIES, seconds=280)


def test_some_local_methods(tmp_path):
    some = ("slowmo", "diloco", "late workers", "streaming", "sparta", "noloco", "gossip", "desloc")
    together(2, local_as_bench, tmp_path, [case for case in LOCAL if case[0] in some])


UNEQUAL = ["batch_size=[12,4]"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("ddp", [False, True], ids=["plain", "ddp"])
def test_batches_that_differ(tmp_path, ddp):
    cases = [
        ("dense", [*UNEQUAL], {"compressor": "none"}),
        ("powersgd", ["compressor=powersgd", *UNEQUAL], {"compressor": "powersgd"}),
        ("accordion", [*POLICIES[0][1], *UNEQUAL], POLICIES[0][2]),
    ]
    together(2, attached_as_bench, tmp_path, cases, [ddp])


def test_local_methods_with_batches_that_differ(tmp_path):
    some = ("diloco", "late workers", "streaming", "sparta", "diloco with sparta")
    cases = [(name, [*overrides, *UNEQUAL], passed) for name, overrides, passed in LOCAL if name in some]
    together(2, local_as_bench, tmp_path, cases)


@pytest.mark.slow
def test_every_local_method(tmp_path):
    together(2, local_as_bench, tmp_path, LOCAL, seconds=280)


def test_groups_of_workers(tmp_path):
    together(4, in_groups_as_bench, tmp_path)
