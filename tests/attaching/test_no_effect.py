"""Options that were passed and change nothing are told of."""

from accordion_bench.attaching.checked_arguments import choose
from accordion_bench.attaching.users_loop import idle_clipping, options_without_effect
from accordion_bench.compressors.error_feedback import growing
from accordion_bench.methods.build import build_methods
from accordion_bench.plan import RunFacts


def told(compressor, adaptive=None, sync="every_step", **options) -> list[str]:
    chosen = choose(compressor, adaptive, sync, {"_target_": "torch.optim.SGD"}, options, [])
    return options_without_effect(chosen, build_methods(chosen, RunFacts(workers=2), 1))


def test_a_level_that_a_policy_sets():
    (sentence,) = told("powersgd", "accordion", rank=4)
    assert sentence == "rank=4 of powersgd has no effect here: adaptive=accordion sets the rank"


def test_error_feedback_around_what_is_no_contraction():
    for name, feedback, warned in (("qsgd", True, 1), ("qsgd", "loco", 0), ("qsgd", False, 0), ("topk", True, 0)):
        options = {"error_feedback": feedback}
        chosen = choose(name, None, "every_step", {"_target_": "torch.optim.SGD"}, options, [])
        methods = build_methods(chosen, RunFacts(workers=2), 1)
        sentences = growing(chosen.compressor, methods.wrapped.compressor, "error_feedback=True")
        assert [sentence.partition(" ")[0] for sentence in sentences] == ["error_feedback=True"] * warned


def test_a_place_of_clipping_without_a_norm():
    (sentence,) = idle_clipping(None, "after")
    assert sentence == "clip_at='after' has no effect here: clip_norm is None"
    assert idle_clipping(1.0, "after") == idle_clipping(None, None) == []


def test_an_option_of_the_scheme():
    assert told("none", sync="local_sgd", period=4) == []
    (sentence,) = told("none", sync="local_sgd", phase1="model")
    assert sentence == "phase1='model' of local_sgd has no effect here: sync.switch_step is 0"


def test_what_has_an_effect_and_what_is_the_default():
    assert told("powersgd", rank=4) == []
    assert told("powersgd", "accordion", rank=2) == []
