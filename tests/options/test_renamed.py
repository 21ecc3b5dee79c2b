"""A key is renamed with one release of warning: the old name is read, told, and forgotten by the next release."""

import importlib

import pytest

import accordion_bench
from accordion_bench.config.compose import compose
from accordion_bench.options import override
from accordion_bench.options.advice import known_keys


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(override, "RENAMED", {"comm.cap_mb": ("comm.bucket_cap_mb", "0.2"), "link": ("network", "0.2")})


def test_the_old_name_works_and_is_told(table, capsys):
    words = override.translate_renamed_overrides(["+comm.cap_mb=5", "link=10gbit", "link.latency=0", "seed=1", "-m"])
    assert words == ["+comm.bucket_cap_mb=5", "network=10gbit", "network.latency=0", "seed=1", "-m"]
    told = capsys.readouterr().err.splitlines()
    assert told[0] == ("warning: comm.cap_mb is called comm.bucket_cap_mb since version 0.2; type comm.bucket_cap_mb=5")
    assert len(told) == 3
    assert compose(words[1:4])["network"]["latency"] == 0


def test_run_folders_are_read(table):
    old = {"comm": {"cap_mb": 5}, "link": {"_target_": "x"}, "seed": 1}
    assert override.translate_renamed_config(old) == {
        "comm": {"bucket_cap_mb": 5},
        "network": {"_target_": "x"},
        "seed": 1,
    }
    assert old["comm"] == {"cap_mb": 5}
    assert override.translate_renamed_config({"comm": {"cap_mb": 5, "bucket_cap_mb": 7}}) == {
        "comm": {"bucket_cap_mb": 7}
    }


def test_classes_of_modules_that_have_moved_are_found():
    """Those that YAML files have named by their old modules; one of another package, or that stays, keeps its name."""
    classes = {"sync.sparta.Sparta", "adaptive.adabatch.AdaBatch", "adaptive.qsr.QSR", "adaptive.gravac.GraVAC"}
    classes |= {"adaptive.accordion_batch.AccordionBatch", "adaptive.accordion_sync.AccordionSync"}
    classes |= {"schedules.constant.Constant", "schedules.warmup_cosine.WarmupCosine", "schedules.multistep.MultiStep"}
    classes |= {"compressors.onebit.OneBit", "datasets.imagenet.ImageNet"}
    classes |= {"datasets.svhn.SVHN", "datasets.digits.Digits", "datasets.synthetic.Synthetic"}
    classes |= {"datasets.synthetic_text.SyntheticText", "models.senet.SENet18", "models.gpt.GPT", "models.vit.ViT"}
    classes |= {"trackers.csv.CSV", "trackers.wandb.Wandb", "optimizers.lion.Lion", "compressors.lion.DistributedLion"}
    classes |= {"compressors.eight_bit.Blockwise", "compressors.none.Dense", "compressors.dgc.DGC", "models.vgg.VGG"}
    classes |= {"compressors.acpsgd.ACPSGD", "datasets.token_shards.TokenShards", "sync.adpsgd.ADPSGD"}
    classes |= {"sync.desloc.DesLoc", "sync.local_sgd.Sparta", "sync.streaming_diloco.StreamingDiLoCo"}
    for old in classes:
        config = override.translate_renamed_config({"part": {"_target_": f"accordion_bench.{old}"}})
        module, _, name = config["part"]["_target_"].rpartition(".")
        assert module != f"accordion_bench.{old}".rpartition(".")[0]
        assert getattr(importlib.import_module(module), name).__module__ == module
    for same in (
        "accordion_bench.adaptive.accordion.Accordion",
        "accordion_bench.sync.local_sgd.NoLoCo",
        "mine.adabatch.AdaBatch",
        "x",
        "",
    ):
        assert override.translate_renamed_config({"_target_": same}) == {"_target_": same}


def test_no_old_name_outlives_a_release():
    major, minor = map(int, accordion_bench.__version__.split(".")[:2])
    for old, (new, version) in override.RENAMED.items():
        assert (major, minor) == tuple(map(int, version.split(".")[:2])), f"{old} has been warned of; remove it"
        assert old not in known_keys() and new in known_keys()
