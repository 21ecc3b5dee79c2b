"""Numbers that no run can have: beyond the data, the tensors, the length of the run or the machine."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from accordion_bench.exchange.partition import sent_specs
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.units import counted
from accordion_bench.plan import TensorSpec
from accordion_bench.run_config import RunConfig

if TYPE_CHECKING:
    from accordion_bench.config.components import Components


def refuse_beyond(
    config: RunConfig, parts: "Components", specs: Sequence[TensorSpec], typed: Collection[str] = ()
) -> None:
    """Refuse numbers that lie beyond the data, the run or the tensors.

    A default gives way to a short run or a small model; what was typed does not.

    Args:
        config: the configuration.
        parts: the run's components.
        specs: the model's tensors.
        typed: the keys on the command line.

    Raises:
        ConfigError: for the first one.
    """
    run, batch = parts.run, config.batch_size
    samples = counted(run.train_size, "training sample")
    whole = parts.dataset.whole
    if (subset := parts.dataset.subset) is not None and subset > whole:
        raise ValueRefused("dataset.subset", f"at most {whole}, the whole training set", subset, None)
    if run.workers > run.train_size:
        made_of = {f"comm.{name}": getattr(config.comm, name) for name in ("workers_per_process", "processes")}
        key = next((key for key in made_of if key in typed), "workers")
        got = made_of.get(key, run.workers)
        most = max(1, run.train_size // (run.workers // got))
        raise ValueRefused(key, f"at most {most}, one worker for each training sample", got, min(4, most))
    if batch > run.train_size:
        rule = f"at most {run.train_size}, because there are {samples}"
        raise ValueRefused("batch_size", rule, batch, min(32, run.train_size))
    grows = any(policy.drives == "batch" for policy in parts.policies.values())
    if config.micro_batch_size is not None and config.micro_batch_size > batch and not grows:
        raise ValueRefused("micro_batch_size", f"at most batch_size={batch}", config.micro_batch_size, batch)
    if "schedule.warmup_epochs" in typed and config.schedule["warmup_epochs"] > config.epochs:
        warmup = config.schedule["warmup_epochs"]
        raise ValueRefused("schedule.warmup_epochs", f"at most epochs={config.epochs}", warmup, config.epochs)
    steps = config.epochs * run.steps_per_epoch()
    if config.profile >= steps and config.profile:
        rule = f"below {steps}, the steps of the run, of which the first is not recorded"
        raise ValueRefused("profile", rule, config.profile, min(10, steps - 1))
    _refuse_levels(config, parts, specs, typed)


def _refuse_levels(config: RunConfig, parts: "Components", specs: Sequence[TensorSpec], typed: Collection[str]) -> None:
    """Refuse a typed rank above every matrix, and a typed density below one entry of the largest tensor."""
    wrapped, knob = parts.wrapped, parts.wrapped.compressor.traits.knob
    sent = sent_specs(specs, wrapped.scope, wrapped.block_size)
    sizes = [spec for spec in sent if spec.ndim >= wrapped.compressor.traits.min_ndim]
    if not sizes or knob not in ("rank", "density"):
        return
    options = {f"compressor.{knob}": config.compressor.get(knob)}
    for name, policy in parts.policies.items():
        if policy.drives == "level":
            options |= {f"adaptive.{name}.{key}": config.adaptive[name].get(key) for key in policy.level_keys}
    for key in [key for key in options if key in typed]:
        given = options[key]
        for value in given if isinstance(given, list) else [given]:
            if not isinstance(value, int | float):  # null, or a range of epochs
                continue
            if knob == "rank" and value > (most := max(min(spec.matrix) for spec in sizes)):
                raise ValueRefused(key, f"at most {most}, the rank of the model's largest matrix", value, most)
            least = 1 / max(spec.numel for spec in sizes)
            if knob == "density" and value < least:
                rule = f"at least 1/{round(1 / least)}, one entry of the model's largest tensor"
                raise ValueRefused(key, rule, f"{value:g}", f"{1.05 * least:.2g}")
