"""Half a cosine behind the warm-up, which delays it even where it is flat."""

from accordion_bench.options.component import Surroundings, idle_options
from accordion_bench.schedules.learning_rate import Cosine


def test_a_warm_up_to_one_delays_the_cosine():
    at_once, later = (Cosine(10, workers=1, warmup_epochs=epochs) for epochs in (0, 5))
    assert [later(epoch) for epoch in range(6)] == [1] * 6
    assert [later(5 + epoch / 2) for epoch in range(10)] == [at_once(epoch) for epoch in range(10)]


def test_so_it_has_an_effect_with_one_worker():
    told = dict(idle_options(Cosine, {"warmup_epochs": 5, "lr_scaling": "none"}, Surroundings(workers=1, epochs=10)))
    assert list(told) == ["lr_scaling"]
