"""What was asked, and the command that would train it."""

import shlex

from accordion_bench.advise.arguments import read
from accordion_bench.advise.asked import asked_of
from accordion_bench.advise.command import with_accuracies
from tests.advising import made_up
from tests.kit import composed


def trained(tmp_path, words: str) -> list[str]:
    return asked_of(read([*words.split(), "device=cpu", "--methods", "none", "--out", str(tmp_path / "out")])).trained


def test_the_command_trains_what_was_typed(tmp_path):
    """But on whatever machine it runs; where nobody has typed a data set, on the one that was assumed."""
    own = "model=gpt_nano dataset=pydocs_bytes optimizer=adamw optimizer.betas=[0.9,0.95] precision=bfloat16"
    own += " schedule=warmup_cosine dataset.context=128"
    found = trained(tmp_path, f"{own} network=10gbit network.latency=1e-3 threads=1 workers=4")
    assert found == [*own.split(), "workers=4"]
    assert trained(tmp_path, "model=resnet8 workers=2") == ["model=resnet8", "dataset=cifar10", "workers=2"]
    command = with_accuracies(made_up.advice(), {}, found).row("PowerSGD rank 4").command
    cfg = composed.cfg(*shlex.split(command)[3:])
    assert cfg["optimizer"]["betas"] == [0.9, 0.95] and cfg["precision"] == "bfloat16"
