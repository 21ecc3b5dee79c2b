"""Every component's name in reports, as its paper writes it: said by its class, and nowhere else."""

import pytest

from accordion_bench.methods.labels import label
from accordion_bench.options.conf_dir import conf_dir
from tests.kit.figures import node

SPELLED = {
    "compressor": "ACP-SGD, AdaComp, ARC-TopK, ATOMO, bf16, DeMo, DGC, Dion, Dion2, dist-EF-blockSGD, EF-signSGD, "
    "fp16, fp4, fp8, GradiVeQ, int8, Distributed Lion, natural compression, dense, NUQSGD, 1-bit SGD, 1-bit Adam, "
    "PowerSGD, QSGD, QSGDinf, RandomK, signSGD, Signum, TernGrad, threshold, TopK, TRN",
    "sync": "AD-PSGD, DES-LOC, DiLoCo, drawn times, dense, gossip SGD, hierarchical local SGD, local SGD, NoLoCo, "
    "overlap local SGD, post-local SGD, SlowMo, SPARTA, Streaming DiLoCo, 0/1 Adam",
    "adaptive": "Accordion, AccordionBatch, AccordionSync, AdaBatch, AdaComm, AdaQS, Advised, ALQ, ALQ-G, ALQ-N, AMQ, "
    "AMQ-N, GraVAC, GrowBatch, L-GreCo, NoiseScale, QSR, schedule",
}


def names(group):
    """Of the YAML files, without those that stand for something else."""
    found = sorted(file.stem for file in (conf_dir() / group).glob("*.yaml"))
    return [name for name in found if group != "adaptive" or not alias(name)]


def alias(name):
    return str(node("adaptive", name).get("_target_", "Preset")).endswith("Preset")


@pytest.mark.parametrize("group", SPELLED)
def test_every_component_is_spelled_as_its_paper_writes_it(group):
    written = {}
    for name in names(group):
        chosen = {"adaptive": {"adaptive": {name: node(group, name)}}}.get(group, {group: node(group, name)})
        config = {"compressor": node("compressor", "none"), "choices": {"compressor": "none", group: name}, **chosen}
        text = label(config)
        written[name] = text.partition(" (" if group == "adaptive" else ", H ")[0]
    begins = dict(zip(names(group), SPELLED[group].split(", "), strict=True))
    assert {name: text for name, text in written.items() if not text.startswith(begins[name])} == {}
    assert not any("_" in text for text in written.values())


def test_a_class_that_nobody_trusts_is_its_name():
    config = {"compressor": {"_target_": "strangers.Sign", "rank": 2}, "choices": {"compressor": "sign"}}
    assert label(config) == "Sign rank 2"
