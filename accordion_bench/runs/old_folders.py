"""Run folders of earlier versions: what their config.yaml says, in today's words."""

from typing import Any

from accordion_bench.options.override import config_in_todays_words

# classes that have moved since version 0.1, or gave way to equal ones, by the `_target_` that its folders hold
MOVED = {
    "accordion_bench.adaptive.codebooks.FittedCodebook": "accordion_bench.adaptive.fitted_codebook.FittedCodebook",
    "accordion_bench.adaptive.level_schedule.LevelSchedule": "accordion_bench.adaptive.schedule.LevelSchedule",
    "accordion_bench.adaptive.preset.Preset": "accordion_bench.adaptive.scheme_alias.Preset",
    "accordion_bench.compressors.blockwise.Blockwise": "accordion_bench.compressors.eight_bit.Blockwise",
    "accordion_bench.network.Network": "accordion_bench.network.link_model.Network",
    "accordion_bench.optimizers.SGDPlusGradient": "accordion_bench.optimizers.sgd_plus_gradient.SGDPlusGradient",
    **{
        f"accordion_bench.sync.{module}.{name}": f"accordion_bench.sync.local_sgd.{name}"
        for module, name in (
            ("noloco", "NoLoCo"),
            ("overlap_local_sgd", "OverlapLocalSGD"),
            ("sparta", "Sparta"),
            ("streaming_diloco", "StreamingDiLoCo"),
        )
    },
    "torch.optim.AdamW": "accordion_bench.optimizers.adamw.AdamW",
}


def in_todays_words(config: Any) -> Any:
    """A configuration with every renamed key and moved `_target_` replaced; to be applied before any comparison."""
    return _with_moved_classes(config_in_todays_words(config) if isinstance(config, dict) else config)


def _with_moved_classes(config: Any) -> Any:
    if isinstance(config, dict):
        return {
            key: MOVED.get(value, value) if key == "_target_" and isinstance(value, str) else _with_moved_classes(value)
            for key, value in config.items()
        }
    return [_with_moved_classes(item) for item in config] if isinstance(config, list) else config


def checkpoint_in_todays_words(shared: dict[str, Any], own: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The common state of a checkpoint of version 0.1, then that of each worker.

    Version 0.1 kept the loss scale with the scheme, and one state of torch's global generator for all workers.
    """
    scale = {"loss_scale": shared["sync"]["loss_scale"]} if "loss_scale" in shared["sync"] else {}
    return [{**shared, **scale}, *({"rng": shared["rng"], **state} for state in own)]
