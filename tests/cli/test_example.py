"""The model that is timed, and the data that is assumed for it."""

import pytest

from accordion_bench.cli.advice_command import composed
from accordion_bench.cli.example import subject_of
from accordion_bench.options.checks import ConfigError


@pytest.mark.parametrize(
    ("model", "dataset"),
    [("imagenet_resnet50", "imagenet"), ("lstm", "wikitext2"), ("resnet20", "cifar10"), ("torchvision", "imagenet")],
)
def test_each_model_has_data_of_its_own(model, dataset):
    config, assumed = composed([f"model={model}"])
    assert (config.chosen("dataset"), assumed) == (dataset, dataset)


@pytest.mark.parametrize("typed", [["model=resnet20", "dataset=svhn"], ["dataset=svhn"], ["batch_size=8"]])
def test_nothing_is_assumed_where_data_is_typed_or_no_model(typed):
    assert composed(typed)[1] == ""


@pytest.mark.parametrize("typed", [["model=resnet8", "batch_size=3"], ["model=lstm_small", "dataset=synthetic_text"]])
def test_a_batch_that_the_model_takes_without_reading_data(typed):
    found = subject_of(composed([*typed, "device=cpu", "paths.data=/nowhere"])[0], workers_each=1)
    loss = found.loss(found.model, found.batch)
    loss.backward()
    assert loss.isfinite() and len(found.batch[0]) == found.config.batch_size
    assert all(param.grad is not None for param in found.model.parameters())


def test_an_optimizer_is_told_what_its_parameters_are():
    found = subject_of(composed(["model=resnet8", "dataset=digits", "optimizer=muon", "device=cpu"])[0], workers_each=1)
    optimizer = found.optimizer(list(found.model.parameters()))
    assert [(group["kind"], len(group["params"])) for group in optimizer.param_groups] == [
        ("matrix", 7), ("vector", 15), ("table", 1),
    ]  # fmt: skip


def test_the_loss_is_computed_in_the_configuration_s_precision():
    typed = ["model=resnet8", "dataset=digits", "batch_size=2"]
    exact, rounded = (
        subject_of(composed([*typed, f"precision={name}"])[0], workers_each=1) for name in ("float32", "bfloat16")
    )
    losses = [found.loss(found.model, exact.batch).item() for found in (exact, rounded)]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.05)


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        (
            ["compressor=powersgd"],
            "compressor must be left out, got compressor=powersgd, because all methods are advised",
        ),
        (["sync.period=3"], "sync.period must be left out"),
        (["compile=inductor"], "compile must be null here"),
        (["model=lstm", "dataset=digits"], "model=lstm needs a data set of text, got dataset=digits; type"),
        (["batch_size=0"], "batch_size must be an integer of at least 1, got 0"),
        (["model=imagenet_vgg16", "dataset=digits"], "model "),
    ],
)
def test_refusals_are_one_sentence(typed, sentence):
    with pytest.raises(ConfigError) as refused:
        subject_of(composed(typed)[0], workers_each=1)
    assert str(refused.value).startswith(sentence) and "\n" not in str(refused.value)
