"""`ab.advice`: whether communicating less would make the training of a model of one's own faster."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accordion_bench.advising.advice import Advice
from accordion_bench.advising.arms import chosen_arms
from accordion_bench.advising.basis import TimedMethods, advised, asked_for, here
from accordion_bench.advising.counted_step import counted_step
from accordion_bench.advising.gpus import HALF, asked_device
from accordion_bench.advising.predict import cluster_like_here
from accordion_bench.advising.rehearsal import Beside
from accordion_bench.advising.step_times import Loss, MakeOptimizer, measured_step, trained_module
from accordion_bench.advising.verdict import verdict
from accordion_bench.network.link_model import Network
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.conf_dir import read_options, yaml_files
from accordion_bench.options.instantiate import build
from accordion_bench.options.units import without_units
from accordion_bench.tensors.clip import check_clipping


def advice(
    model: nn.Module,
    example_batch: Any,
    workers: int,
    network: str | Mapping[str, Any] | Network = "1gbit",
    *,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    methods: Sequence[str] = (),
    workers_per_machine: int = 1,
    inside: str | None = None,
    seconds: float = 40.0,
    batch_size: int = 0,
    gpu: str | None = None,
    compute_ms: float | None = None,
    precision: str | None = None,
    clip_norm: float | None = None,
    clip_at: str | None = None,
) -> Advice:
    """What each method would do for this model on a cluster; nothing is trained, one process asks.

        found = ab.advice(model, (images, labels), workers=16, network="10gbit")
        print(*found.verdict, sep="\\n")
        found.table()    # a row for each method

    A copy of the model is timed, and every method's exchange of its gradients, under the settings of this process, as
    your loop would compute; links are modelled.

    Args:
        model: on its device.
        example_batch: a batch as it comes from a data loader, on the same device.
        workers: of the cluster.
        network: the link between machines: a name in conf/network, its options (`{"bandwidth": "25gbit"}`), or a
            Network, which says by itself how many workers a machine has.
        loss: loss(model, batch), a scalar; None = cross-entropy of a batch (inputs, labels).
        optimizer: makes the optimizer of some parameters; None = SGD with momentum.
        methods: names in conf/compressor and conf/sync, beside none and bf16; none = all.
        workers_per_machine: that share a machine's link.
        inside: the link between those, a name in conf/network.
        seconds: for timing all methods, about.
        batch_size: samples in the batch, for messages; 0 = not known.
        gpu: estimate a step on this GPU, which is not here: a100, h100, h200, l40s, 4090; its work is counted, and
            codecs are those timed on an H200, by the memory's speed.
        compute_ms: a step's forward and backward pass take so many milliseconds on the cluster's GPUs; codecs are
            timed here where the model is on a GPU, else estimated.
        precision: of the forward pass on `gpu`: float32 (None), bfloat16, float16.
        clip_norm, clip_at: clipping, as in `ab.attach`; before the exchange it waits for all gradients.

    Raises:
        ConfigError: what was passed breaks a rule, or the model does not take the batch.

    Example:
        >>> model = torch.nn.Linear(64, 10)
        >>> batch = torch.zeros(8, 64), torch.zeros(8, dtype=torch.int64)
        >>> found = ab.advice(model, batch, workers=16, network="10gbit", compute_ms=5, methods=["topk"])
        >>> table = found.table()  # a row for each method
        >>> bool(found.verdict)
        True
    """
    try:
        checks.integer("workers", workers, at_least=2, instead=16)
        checks.number("seconds", seconds, above=0, instead=40.0)
        link, options = link_of(network, workers_per_machine, inside)
        if workers % link.workers_per_machine:
            raise ValueRefused("workers_per_machine", f"a divisor of workers={workers}", link.workers_per_machine, 1)
        asked = asked_device(gpu, compute_ms)
        if precision is not None:
            checks.choice("precision", precision, ["float32", *HALF])
        check_clipping(clip_norm, clip_at)
        device = next(trained_module(model).parameters()).device
        looked_at = TimedMethods(
            chosen_arms(methods, key="methods", beside=Beside(clip_norm, clip_at)), device, seconds, optimizer=optimizer
        )
        work = (model, example_batch, loss or cross_entropy)
        if asked:
            counted = counted_step(*work, batch_size)
            found = asked_for(asked, counted, looked_at, precision, at_hand=device.type == "cuda")
        else:
            times = measured_step(*work, optimizer, batch_size=batch_size)
            found = here(times, looked_at, counted_step(*work, computed=True) if device.type == "cpu" else None)
        table = advised(found, lambda kind: cluster_like_here(link, workers, kind, torch.get_num_threads()), options)
    except ConfigError as refused:
        raise refused.in_python() from None
    return replace(table, verdict=verdict(table))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Of a batch (inputs, labels)."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def link_of(
    network: str | Mapping[str, Any] | Network, workers_per_machine: int, inside: str | None
) -> tuple[Network, dict[str, Any]]:
    """The links, and their options for the record.

    Raises:
        ConfigError: there is no such link.
    """
    if isinstance(network, Network):
        told = {key: getattr(network, key) for key in ("bandwidth", "latency", "workers_per_machine")}
        return network, told
    files = yaml_files("network")
    if isinstance(network, str):
        chosen, own = checks.choice("network", network, [name for name in files if name != "custom"]), {}
    else:
        chosen, own = "custom", dict(network)
    machine = {"workers_per_machine": workers_per_machine, "inside": inside}
    options = without_units({**read_options(files[chosen]), **machine, **own})
    link: Network = build(options, "network")
    return link, {key: value for key, value in options.items() if key != "_target_"}
