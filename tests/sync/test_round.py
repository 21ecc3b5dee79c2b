"""A scheme of one's own is composed in one class; its state is what it names."""

import pytest
import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.options.checks import ConfigError
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.sync.outer import OuterSGD
from accordion_bench.sync.round import Round
from accordion_bench.sync.when import When
from accordion_bench.training.trainer import Trainer
from tests.kit import local
from tests.kit.local import deviation, trained

SAME = 1e-13


class Halfway(Round):
    """Workers go a part of the way to a consensus that takes outer steps; how often they have met is state."""

    keeps = (*Round.keeps, "met")

    def __init__(self, period=5, pull=0.5):
        super().__init__(When(period), outer=OuterSGD(0.7, 0.9, False), pull=pull)
        self.met = 0

    def use(self):
        super().use()
        self.met += 1


def config(tmp_path, *options: str, **scheme) -> dict:
    cfg = local.cfg_for(tmp_path, "sync=local_sgd", "compressor=topk", *options)
    return {**cfg, "workers": 4, "sync": {"_target_": f"{__name__}.Halfway", **scheme}}


def trainer(cfg: dict, folder: RunFolder) -> Trainer:
    return Trainer(RunConfig.from_dict(cfg), Comm(4), folder)


@pytest.mark.parametrize("pull", [0.25, 1.0])
def test_equals_explicit_lists(tmp_path, pull):
    cfg = config(tmp_path, "compressor=none", pull=pull, period=4)
    run = trainer(cfg, RunFolder.create(str(tmp_path), "run", cfg))
    z = [x.detach().clone().requires_grad_() for x in run.axis.params]
    outer = torch.optim.SGD(z, lr=0.7, momentum=0.9)

    def meet(taken, lr, models, optimizers):
        if taken % 4:
            return
        for own, mean in zip(z, local.mean(models), strict=True):
            own.grad = own.detach() - mean
        outer.step()
        with torch.no_grad():
            for model in models:
                for x, own in zip(model, z, strict=True):
                    x.lerp_(own, pull)

    expected = local.twin(run, meet)
    last: list = []
    local.fitted(run, lambda t: last.__setitem__(slice(None), local.replicas(t)))
    assert max(deviation(a, b) for a, b in zip(last, expected, strict=True)) < SAME
    assert run.sync.met == 6 and run.sync.ends_apart(24, 4) == (pull < 1)
    assert local.all_equal([run.axis.shared, *local.replicas(run)])


def test_goes_on_bit_for_bit_from_mid_round(tmp_path):
    cfg = config(tmp_path, "epochs=1", "dataset.train_size=192", period=5)  # 12 steps
    straight = local.fitted(trainer(cfg, RunFolder.create(str(tmp_path), "straight", cfg)))
    folder = RunFolder.create(str(tmp_path), "stopped", cfg)
    stopped = trainer(cfg, folder)
    stopped.begin_epoch()
    for _ in range(8):
        stopped.train_step()
    stopped.save()
    resumed = trainer(cfg, folder)
    resumed.load_newest()
    assert resumed.sync.met == 1 and resumed.sync.since == 3
    local.fitted(resumed)
    assert all(map(torch.equal, resumed.axis.shared, straight.axis.shared)) and resumed.sync.met == 2
    assert resumed.comm.ledger.counts == straight.comm.ledger.counts


def test_state_of_another_version_is_refused_in_a_sentence(tmp_path):
    run = trained(tmp_path, "sync=slowmo", "epochs=1")
    state = run.sync.state_dict()
    older = {"outer": {"u": {}}, **{key: state[key] for key in ("since", "count", "forked")}}
    with pytest.raises(ConfigError, match=r"^state must be what this version saves .*, got one without \w+; begin"):
        run.sync.load_state_dict(older)
