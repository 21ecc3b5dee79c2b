"""What is recorded of the policies' decisions."""

import pytest

from accordion_bench import train
from accordion_bench.runs.folder import RunFolder
from accordion_bench.signals import policy_runner
from tests.kit import composed, tiny

EVERY_STEP = ["compressor=qsgd", "adaptive=alq", "adaptive.alq.update_every=1", "adaptive.alq.stat_samples=1"]
EVERY_STEP += ["adaptive.alq.fit=single", "compressor.bits=2", "compressor.zero_level=false"]  # quick to fit


def recorded(runs, most: int) -> list[int]:
    """After which steps there is a decision."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(policy_runner, "MOST_DECISIONS", most)
        train.run(composed.run(runs, *EVERY_STEP, "epochs=1", "schedule.warmup_epochs=0", "dataset.train_size=352"))
    (row,) = RunFolder(tiny.only(runs)).read_metrics()
    return [decision["step"] for decision in row["decisions"]["alq"]["updates"]]


def test_of_very_many_decisions_some_are_recorded_the_first_and_the_last_among_them(tmp_path):
    every, some = recorded(tmp_path / "every", 1000), recorded(tmp_path / "some", 8)
    assert len(every) > 20 and 4 <= len(some) <= 8
    assert some[0] == every[0] and some[-1] == every[-1] and set(some) < set(every)


SWITCH = ["sync=local_sgd", "sync.switch_step=4", "sync.period=1", "epochs=2", "schedule.warmup_epochs=0"]
LOOKS = {
    "alq": ["compressor=qsgd", "adaptive=alq", "adaptive.alq.update_at=[6]", "adaptive.alq.stat_samples=7"],
    "gravac": ["compressor=topk", "adaptive=gravac"],
}


@pytest.mark.parametrize("policy", LOOKS)
def test_what_was_seen_of_gradients_is_forgotten_where_differences_are_exchanged(tmp_path, monkeypatch, policy):
    held = []
    forget = policy_runner.PolicyRunner.units_change

    def watched(runner):
        sums = runner.statistics.sums if policy == "alq" else runner.policies[policy].sums
        held.append(len(sums))
        forget(runner)
        held.append(len(sums))

    monkeypatch.setattr(policy_runner.PolicyRunner, "units_change", watched)
    train.run(composed.run(tmp_path, *LOOKS[policy], *SWITCH))
    seen, left = held
    assert seen and not left


def test_a_probe_of_the_present_exchange_leaves_the_mean_to_the_policy_that_asks_for_it(tmp_path, monkeypatch):
    """GraVAC looks at every third exchange, L-GreCo at the mean of the first four."""
    looked = []
    measure = policy_runner.measure_level

    def watched(exchange, xs_W, level, info, is_input=False):
        looked.append((info.step, is_input))
        return measure(exchange, xs_W, level, info, is_input=is_input)

    monkeypatch.setattr(policy_runner, "measure_level", watched)
    counts = []
    fed = policy_runner.compressor_input
    monkeypatch.setattr(policy_runner, "compressor_input", lambda *args: (counts.append(args[2].step), fed(*args))[1])
    options = ["compressor=topk", "adaptive=[gravac,lgreco]", "adaptive.gravac.every=3", "adaptive.lgreco.samples=4"]
    options += ["adaptive.gravac.smallest=0.05", "adaptive.lgreco.levels=[0.05,0.1]"]
    train.run(composed.run(tmp_path, *options, "epochs=1", "schedule.warmup_epochs=0"))
    (row,) = RunFolder(tiny.only(tmp_path)).read_metrics()
    (refined,) = row["decisions"]["lgreco"]["updates"]
    levels = len(refined["errors"])
    assert counts == [0, 1, 2, 3] and looked == [(2, False)] + [(3, True)] * levels + [(5, False)]
