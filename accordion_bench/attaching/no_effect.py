"""Warnings of options that were passed and change nothing."""

from collections.abc import Iterator
from dataclasses import replace

from accordion_bench.compressors import assemble
from accordion_bench.methods.build import Methods
from accordion_bench.methods.compatibility import Chosen
from accordion_bench.options.component import Surroundings, idle_options
from accordion_bench.options.conf_dir import read_options, yaml_files
from accordion_bench.options.instantiate import Config, target


def without_effect(chosen: Chosen, methods: Methods) -> list[str]:
    """A sentence for each option that differs from its default and changes nothing here.

    Args:
        chosen: names and options.
        methods: built of them.
    """
    context = Surroundings(
        epochs=methods.run.epochs,
        workers=methods.run.workers,
        gradients=methods.sync.gradient_exchange,
        knob=methods.wrapped.compressor.traits.knob or "",
        steered_by=tuple(name for name, policy in methods.policies.items() if policy.drives == "level"),
        weight_decay=chosen.optimizer.get("weight_decay", 0.0),
    )
    return list(
        dict.fromkeys(told for group, name, node in _nodes(chosen) for told in _idle(group, name, node, context))
    )


def _nodes(chosen: Chosen) -> Iterator[tuple[str, str, Config]]:
    """Group, name and options of each choice."""
    yield "compressor", chosen.compressor_name, chosen.compressor
    yield "sync", chosen.sync_name, chosen.sync
    yield from (("adaptive", name, node) for name, node in chosen.adaptive.items())


def _idle(group: str, name: str, node: Config, context: Surroundings) -> Iterator[str]:
    default = read_options(yaml_files(group)[name])
    here = replace(context, group=f"{group}.{name}" if group == "adaptive" else group, choice=name)
    found = assemble.idle(node, here) if group == "compressor" else idle_options(target(node, group), node, here)
    for key, why in found:
        if key in node and node[key] != default.get(key):
            yield f"{key}={node[key]!r} of {name} has no effect here: {why}"
