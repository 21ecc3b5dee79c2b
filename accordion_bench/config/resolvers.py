"""What our YAML files may say in `${...}`: values by the run's scale, and defaults that another choice may bring."""

from typing import Any

SCALES = ("full", "small", "tiny")


def register() -> None:
    """Teach YAML files two words.

    `${by_scale:FULL,SMALL,TINY}` is the value that belongs to the run's `scale`: one experiment as a full reproduction
    on GPUs, an hour on a CPU, or a minute in a test. `${brought:DEFAULT}` is the default, unless another choice of the
    run brings its own, see `config/brought.py`.
    """
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("by_scale", _by_scale, replace=True)
    OmegaConf.register_new_resolver("brought", lambda default: default, replace=True)


def _by_scale(full: Any, small: Any, tiny: Any, *, _root_: Any) -> Any:
    values = dict(zip(SCALES, (full, small, tiny), strict=True))
    return values.get(_root_.scale, full)  # another word is refused with all other wrong values, in one sentence
