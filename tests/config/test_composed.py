"""What the tests compose in a short cut is what the command line composes."""

import pytest
from hydra.errors import ConfigCompositionException

from accordion_bench.config.compose import compose
from accordion_bench.run_config import GROUPS
from tests.adaptive.test_period_policies import OVERLAP
from tests.kit import composed, tiny
from tests.kit.helpers import yaml_names
from tests.runs.test_resume import ARMS

LISTS = [
    ARMS["powersgd accordion"],
    ARMS["alq in its window"],
    [*OVERLAP, "adaptive=[accordion,qsr]", "adaptive.qsr.alpha=1e-3", "adaptive.accordion.weak=null"],
    ["adaptive=schedule", "adaptive.schedule.ranges=[[0,1,weak],[1,null,0.5]]", "adaptive.schedule.ranges=null"],
    ["model._target_=tests.kit.models.DropoutNet", "~model.depth", "optimizer.lr=1e30"],
    ["+model.more=1", "schedule.final=0.5", "seed=1", "seed=2", "seed=1", "schedule=cosine"],
    ["paths={data: elsewhere}"],
    ["sync=slowmo", "optimizer.nesterov=false", "adaptive=[slowmo,accordion]", "compressor=qsgd"],
    ["adaptive=[qsr,slowmo]"],
    ["sync=slowmo", "optimizer=adamw", "schedule=cosine", "comm=gloo", "workers=2"],
    ["compressor=demo", "optimizer.weight_decay=1e-3", "dataset=pydocs", "model=lstm_small"],
    ["compressor=signsgd", "scale=tiny", "paths.data='/a(b)'", "network=custom", "tracker=wandb"],
    ["adaptive=grow_batch", "adaptive.grow_batch.cap=20", "sync=hierarchical", "sync.groups=[[2,2],[4,4]]"],
]
CHOICES = [f"{group}={name}" for group in GROUPS for name in yaml_names(group)]


@pytest.mark.sample(13)
@pytest.mark.parametrize("overrides", [*LISTS, *([choice] for choice in CHOICES)], ids=" ".join)
def test_the_same_as_the_command_line(overrides):
    expected, found = compose(overrides), composed.cfg(*overrides)
    assert found == expected
    found["schedule"].clear()  # nobody else's
    assert composed.cfg(*overrides) == expected


def test_the_same_as_a_tiny_run(tmp_path):
    assert tiny.cfg(tmp_path, *OVERLAP, "epochs=2") == compose(tiny.typed(tmp_path, *OVERLAP, "epochs=2"))


def test_what_hydra_refuses_is_refused():
    with pytest.raises(ConfigCompositionException, match="epohcs"):
        composed.cfg("epohcs=3")
