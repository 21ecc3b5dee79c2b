"""Who takes part in an averaging: agreed in a store, with threads in the place of processes."""

import threading
import time

import pytest

from accordion_bench.comm.sealed_store import SealedStore
from accordion_bench.sync.late_processes import Arrivals
from tests.kit.stores import LocalStore

NOW = (4, 0.1, 3, 0.5)  # samples, lr, step, epoch


def processes(number: int, needed: int, grace: float = 0.0, timeout: float = 20.0, store=None) -> list[Arrivals]:
    shared = SealedStore(store or LocalStore(), number, "a secret of 24 letters!!")
    return [Arrivals(shared, rank, number, needed, grace, timeout) for rank in range(number)]


def side_by_side(*calls) -> list:
    """Call all in threads of their own; what each has returned, or raised."""
    found: list = [None] * len(calls)

    def run(i: int) -> None:
        try:
            found[i] = calls[i]()
        except RuntimeError as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "somebody waits for ever"
    return found


def after(seconds: float, call):
    def later():
        time.sleep(seconds)
        return call()

    return later


def ranks(found) -> list[int]:
    return [arrival.rank for arrival in found]


def test_those_who_come_in_time_agree_and_the_late_one_is_in_the_next():
    a, b, c = processes(3, needed=2)
    first = side_by_side(lambda: a.come(*NOW), after(0.1, lambda: b.come(*NOW)))
    assert [ranks(found) for found in first] == [[0, 1], [0, 1]]
    waits = lambda: c.come(*NOW)  # noqa: E731
    second = side_by_side(waits, after(0.2, lambda: a.come(*NOW)))
    assert [ranks(found) for found in second] == [[0, 2], [0, 2]]
    assert [arrival.current for arrival in second[0]] == [True, False]
    assert (a.number, b.number, c.number) == (2, 1, 2)


def test_the_grace_takes_who_is_late_by_less():
    for late, together in ((0.1, [0, 1, 2]), (1.2, [0, 1])):
        a, b, c = processes(3, needed=2, grace=0.6)
        others = [lambda who=who: who.come(*NOW) for who in (a, b)]
        found = side_by_side(*others, after(late, lambda: c.current if late > 1 else c.come(*NOW)))  # noqa: B023
        assert ranks(found[0]) == ranks(found[1]) == together


def test_all_who_have_come_do_not_wait_for_the_grace():
    three = processes(3, needed=2, grace=15.0)
    began = time.monotonic()
    found = side_by_side(*(lambda who=who: who.come(*NOW) for who in three))
    assert all(ranks(each) == [0, 1, 2] for each in found) and time.monotonic() - began < 5


def test_nobody_averages_without_the_last_consensus():
    """Two were late for an averaging of the other two: they are enough by number, and wait for one who knows it."""
    a, b, c, d = processes(4, needed=2)
    side_by_side(lambda: a.come(*NOW), lambda: b.come(*NOW))
    found = side_by_side(lambda: c.come(*NOW), lambda: d.come(*NOW), after(0.3, lambda: b.come(*NOW)))
    assert all(ranks(each) == [1, 2, 3] for each in found)
    assert [arrival.current for arrival in found[0]] == [True, False, False]


def test_who_waits_is_let_go_where_all_others_meet():
    a, b, c = processes(3, needed=2)
    side_by_side(lambda: a.come(*NOW), lambda: b.come(*NOW))
    a.meet()
    off, _ = side_by_side(lambda: c.come(*NOW), after(0.1, b.meet))
    assert off == [] and not c.current  # it knows that it lacks something
    c.meet()
    three = (a, b, c)
    for each in three:
        each.number, each.current, each.grace = max(other.number for other in three), True, 10.0
    found = side_by_side(*(lambda who=who: who.come(*NOW) for who in three))
    assert all(ranks(each) == [0, 1, 2] for each in found)


def test_of_many_averagings_all_know_the_same():
    """Five processes at different speeds: every averaging has a quorum, and those in it agree."""
    five, seen = processes(5, needed=3), []

    def train(who: Arrivals) -> None:
        for k in range(12):
            time.sleep(0.002 * ((7 * who.rank + 3 * k) % 5))
            found = who.come(*NOW)
            seen.append((who.rank, who.number - 1, tuple(ranks(found))))
            who.current = True if found else who.current
        who.meet()

    side_by_side(*(lambda who=who: train(who) for who in five))
    by_number: dict[int, set] = {}
    for rank, number, together in seen:
        assert not together or rank in together
        by_number.setdefault(number, set()).add(together)
    assert all(len(found) == 1 for found in by_number.values())
    assert all(len(next(iter(found))) in (0, 3, 4, 5) for found in by_number.values())
    assert sum(len(next(iter(found))) >= 3 for found in by_number.values()) >= 10


def test_waiting_has_an_end():
    a, _, _ = processes(3, needed=2, timeout=0.2)
    with pytest.raises(RuntimeError, match=r"has waited 0.2 s for 2 of 3 processes, and only \[0\] have come"):
        a.come(*NOW)


def test_a_forged_text_is_not_believed(capsys):
    store = LocalStore()
    (a, _) = processes(2, needed=1, store=store)
    store.values["averaging-0"] = b"[true, [[1, true, 4, 0.1, 3, 0.5]]]"
    with pytest.raises(RuntimeError, match="is lost in the store of the run"):
        a.come(*NOW)
    assert "is passed over" in capsys.readouterr().err


def test_few_looks_while_waiting_long():
    store = LocalStore()
    a, b, _ = processes(3, needed=2, store=store)
    side_by_side(lambda: a.come(*NOW), after(1.0, lambda: b.come(*NOW)))
    assert store.calls < 300
