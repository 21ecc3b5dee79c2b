"""The answer on top of a setting: which arm keeps what dense reaches, at how many fewer bytes, and which do not.

An arm is named before others for its bytes, which are counted, and never for a mean that seeds do not separate.
"""

from collections.abc import Sequence

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.provenance import dense_attached, dense_command
from accordion_bench.report.compare.ranking import MARGIN, Standing, against, shown_better, within_margin
from accordion_bench.report.compare.rival import Rival, rivals
from accordion_bench.report.compare.show import listed, show_gap
from accordion_bench.runs.metrics import metric

MOST = 2  # arms that one clause names


def answers(arms: Sequence[Arm]) -> list[str]:
    """At most two sentences on the arms of one setting, without markup, the answer first."""
    if not any(arm.dense for arm in arms):
        return [no_dense(arms)]
    by_bytes = sorted((one for one in rivals(arms) if not one.arm.control), key=lambda one: one.sent)
    keep, lose, undecided, unknown = ([one for one in by_bytes if one.standing is kind] for kind in Standing)
    denser = _better_dense(by_bytes, [arm for arm in arms if arm.dense])
    if keep:
        leanest, *others = keep
        beside = [*_too(leanest, others), *_worse(lose), *_open(undecided), *_without_interval(unknown)]
        return [_kept(leanest), *_sentence([*beside, *denser])]
    if undecided:
        return [_undecided(undecided, lose), *_sentence([*_worse(lose), *_without_interval(unknown), *denser])]
    if lose:
        return [_none_keeps(lose), *_sentence([*_without_interval(unknown), *denser])]
    if unknown:
        return _unranked(unknown, denser)
    if sum(arm.dense for arm in arms) > 1:
        return ["Only dense arms have run: there is no other method to compare them with.", *_sentence(denser)]
    return ["Only dense has run: there is nothing to compare it with."]


def no_dense(arms: Sequence[Arm]) -> str:
    """What is missing without a dense run, and the command that adds one."""
    return (
        f"No dense run of this setting is among those given: nothing is said about {metric(arms[0].metric).words}, "
        f"bytes or time against dense. Add one: {dense_attached() if arms[0].attached else dense_command(arms[0])}"
    )


def _kept(one: Rival) -> str:
    """The arm with the fewest bytes among those that keep dense's metric."""
    better = one.found.shown and one.judged.better(one.found.gap, 0)
    said = f"is better than {one.dense_name} in" if better else f"keeps {one.dense_name}'s"
    clauses = [f"{one.label} {said} {one.judged.words} ({one.gap()}, {one.seeds}) {one.bytes()}", one.time()]
    return f"{'; '.join([*clauses, *one.beware()])}."


def _undecided(undecided: Sequence[Rival], lose: Sequence[Rival]) -> str:
    """Where no interval is narrow enough: how wide the narrowest is. A shown loss may be within the margin."""
    one = min(undecided, key=lambda one: one.found.half)
    margin = f"{100 * MARGIN:g} {one.judged.points if one.judged.percent else '%'}"
    whose = "no arm without a shown loss" if any(within_margin(one.arm, one.dense) for one in lose) else "no arm"
    return (
        f"Undecided: {whose} is shown to keep {one.dense_name}'s {one.judged.words} within {margin}; the narrowest "
        f"interval, of {one.label} ({one.seeds}), reaches from {one.reach()} {one.bytes()}; {one.time()}."
    )


def _none_keeps(lose: Sequence[Rival]) -> str:
    told = [f"{one.label} is worse by {one.loss()} {one.bytes()}" for one in lose]
    return f"No arm keeps {lose[0].dense_name}'s {lose[0].judged.words}: {listed(told, MOST)}."


def _unranked(unknown: Sequence[Rival], denser: Sequence[str]) -> list[str]:
    """Numbers that no interval stands behind, in the order of the table."""
    single = all(one.arm.n == one.dense.n == 1 for one in unknown)
    told = [f"{one.label} ended {one.side()} {one.bytes()}" for one in reversed(unknown)]
    return [f"{'One seed' if single else 'No interval'}: nothing is ranked.", *_sentence([listed(told, MOST), *denser])]


def _too(leanest: Rival, others: Sequence[Rival]) -> list[str]:
    """Which others keep dense's metric, too: those that cannot be told apart from the leanest, and better ones."""
    found = [(other, against(other.arm, leanest.arm)) for other in others]
    alike = [other.label for other, gap in found if not gap.shown]
    better = [
        f"{other.label} is better than it by {show_gap(other.judged, gap).lstrip('+-')} {other.bytes()}"
        for other, gap in found
        if shown_better(other.arm, leanest.arm)
    ]
    told = [f"{listed(alike, MOST)} cannot be told apart from it in {leanest.judged.words}"] if alike else []
    return told + _clause(better)


def _worse(lose: Sequence[Rival]) -> list[str]:
    told = [f"{one.label} is worse by {one.loss()}" for one in lose]
    if len(told) <= MOST + 1:
        return _clause(told)
    return [f"{', '.join(told[:MOST])}; {len(told) - MOST} more are worse, too"]


def _open(undecided: Sequence[Rival]) -> list[str]:
    return _clause([f"{one.label} is undecided (from {one.reach()})" for one in undecided])


def _without_interval(unknown: Sequence[Rival]) -> list[str]:
    alone = all(min(one.arm.n, one.dense.n) == 1 for one in unknown)
    why = "one seed, so no interval" if alone else "no interval"
    if len(unknown) < 2:
        return [f"{one.label} has {why}" for one in unknown]
    return [f"{len(unknown)} arms have {why}"]


def _better_dense(told: Sequence[Rival], dense: Sequence[Arm]) -> list[str]:
    """Which dense arms are shown to be better than one that others are compared with; not those told as rivals."""
    rivals_too = {one.label for one in told}
    bases = {one.dense.label: one.dense for one in told} or {arm.label: arm for arm in dense}
    better = [
        f"{arm.label} is better than {base.label} by {show_gap(metric(arm.metric), against(arm, base)).lstrip('+-')}"
        for base in bases.values()
        for arm in dense
        if arm.label not in rivals_too and shown_better(arm, base)
    ]
    return _clause(better)


def _clause(told: Sequence[str]) -> list[str]:
    return [listed(told, MOST)] if told else []


def _sentence(clauses: Sequence[str]) -> list[str]:
    return [f"{'; '.join(clauses)}."] if clauses else []
