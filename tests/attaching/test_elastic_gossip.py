"""Gossip whose workers come and go: the graph is one of those who are there, and each counts with weight 1."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

import accordion_bench as ab
from accordion_bench.options.checks import ConfigError
from accordion_bench.sync.gossip import shifts
from tests.kit.elastic import LR, Constant, Run

GOSSIP: dict[str, Any] = {"sync": "gossip"}


def members_in(found: dict[int, dict[str, Any]], step: int, lost: int | None = None) -> list[int]:
    """Names of the members before a step, in the order of their ranks; `lost` is the one that cannot tell its own."""
    ranks = {own["ranks"][str(step)]: name for name, own in found.items() if str(step) in own["ranks"]}
    if lost is not None:
        ranks[min(set(range(len(ranks) + 1)) - set(ranks))] = lost
    return [ranks[rank] for rank in range(len(ranks))]


def mixed(x: dict[int, float], members: list[int], graph: str, turn: int) -> dict[int, float]:
    """The values of members after a round of gossip among them, by its definition."""
    hops, A = shifts(graph, len(members), turn), len(members)
    return {
        name: statistics.mean([x[name], *(x[members[(place - hop) % A]] for hop in hops)])
        for place, name in enumerate(members)
    }


def stepped(x: dict[int, float], members: list[int]) -> dict[int, float]:
    """The values of members after a step of SGD each."""
    return {name: x[name] - LR * (name + 1) for name in members}


@pytest.mark.parametrize(
    ("end", "graph"),
    [("killed", "exponential"), ("stopped", "ring"), pytest.param("killed", "complete", marks=pytest.mark.slow)],
)
def test_a_lost_worker_costs_a_repeated_round(tmp_path: Path, end: str, graph: str) -> None:
    """In the round in which it is lost the survivors mix alone, from what each had before."""
    with Run(tmp_path, 8, graph=graph, **GOSSIP) as run:
        run.start(0, 1, 2, first=4)
        run.start(3, first=4, end=(3, end))
        found = {name: run.told(name) for name in range(3)}
    assert not any("error" in own for own in found.values())
    x = dict.fromkeys(range(4), 0.0)
    for step in range(8):  # the round of step 3 is in the graph of step 4
        members = members_in(found, step, lost=3) if step < 3 else members_in(found, max(step, 4))
        x = mixed(stepped(x, members), members, graph, turn=step)
        assert {name: own["values"][str(step)][0] for name, own in found.items()} == {
            name: pytest.approx(x[name]) for name in found
        }
    for own in found.values():
        assert own["end"] == pytest.approx(statistics.mean(x.values()))
        assert list(own["members"].values()) == [4] * 3 + [3] * 5
        assert own["took"]["3"] < 5 + 2
        assert (own["row"]["members"], own["row"]["joined"], own["row"]["lost"]) == (3, 0, 1)
        distance = own["row"]["consensus_distance"]  # a complete graph mixes everything in each round
        assert distance < 1e-6 if graph == "complete" else distance > 0
    assert len({own["row"]["payload_bytes"] for own in found.values()}) == 1


def test_a_new_worker_has_the_parameters_of_one_peer(tmp_path: Path) -> None:
    """Those of the first member after the last round, with weight 1; from there on it is one of the graph."""
    with Run(tmp_path, 40, pace=0.05, **GOSSIP) as run:
        run.start(0, 1, 2, first=3)
        run.start(7)
        found = {name: run.told(name) for name in (0, 1, 2, 7)}
    assert not any("error" in own for own in found.values())
    entered = found[7]["entered"]
    assert 0 < entered < 40
    x = dict.fromkeys(range(3), 0.0)
    for step in range(40):
        members = members_in(found, step)
        if step == entered:
            x[7] = x[members[0]]
        x = mixed(stepped(x, members), members, "exponential", turn=step)
        told = {name: own["values"][str(step)][0] for name, own in found.items() if str(step) in own["values"]}
        assert told == {name: pytest.approx(x[name]) for name in members}
    for own in found.values():
        assert own["end"] == pytest.approx(statistics.mean(x.values()))
        assert (own["row"]["members"], own["row"]["joined"], own["row"]["lost"]) == (4, 1, 0)


def test_messages_under_way_are_refused() -> None:
    model, store = Constant(), torch.distributed.HashStore()
    with pytest.raises(ConfigError, match="delay must be 0 where workers may join and leave"):
        ab.local(
            model, torch.optim.SGD(model.parameters(), LR), "gossip", delay=1, elastic=True, store=store, batch_size=2
        )
