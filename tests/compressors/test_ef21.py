"""EF21 with momentum: its formula by hand, its identities, and whom it refuses."""

import pytest
import torch

import accordion_bench as ab
from accordion_bench import conformance
from accordion_bench.compressors.assemble import CompressorSetup, pseudo_gradient_compressor, wrapped_compressor
from accordion_bench.compressors.probe import probe, probe_input
from accordion_bench.conformance import aggregate, placement, randomness
from accordion_bench.conformance.subject import LATE, Setup, bare
from accordion_bench.exchange.dry_exchange import compressor_input, state_of_first
from accordion_bench.methods.labels import label
from accordion_bench.options.checks import ConfigError
from accordion_bench.position import StepInfo
from tests.config.test_bad_input import never_launched, sentence  # noqa: F401  (what is not refused fails there)
from tests.conformance.test_conformance import EverySecond, owed
from tests.kit import by_hand, composed, local, small_net
from tests.kit.helpers import SGD, SPECS, gradients, yaml_names, yaml_node
from tests.kit.processes import forked

PLAIN_SGD = SGD | {"momentum": 0.0, "nesterov": False}
NEEDS = {"int8": {"rounding": "nearest"}}  # options without which a compressor is refused
FITTING = [name for name in yaml_names("compressor") if "feedback_rate" in yaml_node("compressor", name)]
WORKERS = 4


def node(name: str, **options) -> dict:
    return {**yaml_node("compressor", name), **NEEDS.get(name, {}), "error_feedback": "ef21", **options}


def ef21(name: str, **options) -> CompressorSetup:
    return wrapped_compressor(node(name, **options), PLAIN_SGD)


def setup_of(wrapped: CompressorSetup, workers: int = WORKERS, **options) -> Setup:
    return Setup(wrapped, workers=workers, **options)


@pytest.fixture
def in_group_of_one(tmp_path):
    with by_hand.in_group(0, str(tmp_path / "store"), 1):
        yield


# ---- the conformance kit

CHECKS = [c for c in conformance.CHECKS if conformance.name_of(c) not in ("placement", "devices")]


@pytest.mark.sample(7)
@pytest.mark.parametrize("check", CHECKS, ids=conformance.name_of)
@pytest.mark.parametrize("name", FITTING)
def test_the_kit_passes_with_ef21_around_it(name, check):
    options = {**NEEDS.get(name, {}), "error_feedback": "ef21"}
    owed(conformance.run(check, conformance.from_yaml(name, **options), levels=[None]))


@pytest.mark.parametrize("check", CHECKS, ids=conformance.name_of)
def test_and_around_somebody_elses(check):
    owed(conformance.run(check, conformance.from_class(EverySecond, error_feedback="ef21", feedback_rate=0.4)))


def test_the_estimates_of_every_compressor_are_checked_or_refused():
    """Where the YAML offers a rate, they are; where it does not, or at the defaults of int8, the kit says why not."""
    for name in yaml_names("compressor"):
        outcome = conformance.run(aggregate.check_estimates, conformance.from_yaml(name), levels=[None])
        fits = name in (*FITTING, "none") and name not in NEEDS
        assert outcome.status == ("pass" if fits else "n/a"), (name, outcome)
        assert fits or "must be" in outcome.text


@pytest.mark.parametrize("names", [FITTING[::4], pytest.param(FITTING, marks=pytest.mark.slow)], ids=["some", "all"])
def test_placements_do_not_matter(names, tmp_path):
    """Four workers in one process, two processes of two, four of one."""
    makes = [conformance.from_yaml(name, **NEEDS.get(name, {}), error_feedback="ef21") for name in names]
    with forked():
        found = placement.results([(make, None) for make in makes], tmp_path)
    for number in range(len(makes)):
        placement.compare(found, number)


# ---- its formula


def test_the_formula_with_topk_by_hand():
    """Workers one by one, each with an estimate of its own that everybody knows."""
    a, setup = 0.3, setup_of(ef21("topk", density=0.25, feedback_rate=0.3))
    bare_node = {**yaml_node("compressor", "topk"), "density": 0.25, "error_feedback": False}
    alone = [setup_of(wrapped_compressor(bare_node), 1) for _ in range(WORKERS)]
    vs, hs = ([[torch.zeros(s.shape, dtype=torch.float64) for s in SPECS] for _ in range(WORKERS)] for _ in range(2))
    for step in range(12):
        xs_W = gradients(step=step).tensors
        updates = setup(xs_W, step)
        for w, worker in enumerate(alone):
            vs[w] = [(1 - a) * v + a * x_W[w] for v, x_W in zip(vs[w], xs_W, strict=True)]
            sent = worker([(v - h)[None] for v, h in zip(vs[w], hs[w], strict=True)], step)
            hs[w] = [h + c for h, c in zip(hs[w], sent, strict=True)]
        for i, update in enumerate(updates):
            expected = sum(h[i] for h in hs) / WORKERS
            torch.testing.assert_close(update, expected, rtol=1e-12, atol=1e-12)


LOSSLESS = {
    "randomk": {"density": 1.0},
    "powersgd": {"rank": 64, "min_compression_rate": 0},
}


@pytest.mark.parametrize("rate", [0.1, 0.75, 1.0])
@pytest.mark.parametrize("name", LOSSLESS)
def test_without_loss_it_is_sgd_with_dampening_and_a_buffer_that_starts_at_zero(name, rate):
    """Decay beside it; torch's own buffer would start at the first gradient."""
    setup = setup_of(ef21(name, feedback_rate=rate, **LOSSLESS[name]))
    xs, ys = ([torch.ones(s.shape, dtype=torch.float64) for s in SPECS] for _ in range(2))
    buffers = [torch.zeros_like(y) for y in ys]
    for step in range(25):
        noise = gradients(step=step).tensors
        updates = setup([n + x for n, x in zip(noise, xs, strict=True)], step)
        xs = [x - 0.1 * u for x, u in zip(xs, updates, strict=True)]
        means = [(n + y).mean(0) for n, y in zip(noise, ys, strict=True)]
        buffers = [(1 - rate) * b + (1 - (1 - rate)) * g for b, g in zip(buffers, means, strict=True)]
        ys = [y - 0.1 * b for y, b in zip(ys, buffers, strict=True)]
    for x, y in zip(xs, ys, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_the_whole_step_in_a_loop_is_torchs_sgd_with_a_primed_buffer(in_group_of_one):
    """Through `ab.attach`: learning rate, decoupled decay, and an optimizer that has no momentum."""
    models = [small_net.net().double() for _ in range(2)]
    mine = small_net.sgd(models[0], 0.0, weight_decay=0.02)
    comm = ab.attach(models[0], mine, compressor="randomk", density=1.0, error_feedback="ef21", feedback_rate=0.2)
    twin = small_net.sgd(models[1], 0.8, dampening=0.8)
    for param in models[1].parameters():
        twin.state[param]["momentum_buffer"] = torch.zeros_like(param)
    for step in range(20):
        x, y = small_net.batch(0, step)
        for model, optimizer in zip(models, (mine, twin), strict=True):
            if optimizer is twin:
                with torch.no_grad():
                    decayed = [param * (1 - 0.1 * 0.02) for param in model.parameters()]
            torch.nn.functional.cross_entropy(model(x.double()), y).backward()
            if optimizer is twin:
                with torch.no_grad():
                    for param, value in zip(model.parameters(), decayed, strict=True):
                        param.copy_(value)
            optimizer.step()
            optimizer.zero_grad()
    comm.detach()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name, options", [("topk", {"density": 0.2}), ("efsignsgd", {}), ("fp8", {})])
def test_on_a_gradient_that_stays_the_gap_shrinks_by_the_contraction(name, options):
    """At a = 1 the momentum is the gradient: ||g_w - h_w||^2 loses its share delta in every step."""
    wrapped = ef21(name, feedback_rate=1.0, **options)
    setup, inner = setup_of(wrapped), bare(wrapped.compressor)
    xs_W, before = gradients().tensors, {}
    for step in range(8):
        setup(xs_W, step)
        ctx = setup.context(step)
        for spec, level, x_W in zip(ctx.specs, ctx.levels, xs_W, strict=True):
            gaps = setup.exchange.state[spec.name].get("residual_W")
            if gaps is None or level is None:
                continue
            last = before.get(spec.name, x_W.flatten(1).square().sum(1))
            before[spec.name] = gaps.flatten(1).square().sum(1)
            delta = inner.description.claims.contraction(inner, spec, level) or 0.0
            rounding = 1e-12 * x_W.flatten(1).square().sum(1)  # values travel in float32
            assert (before[spec.name] <= (1 - delta) * last + rounding).all(), (spec.name, step)
    assert len(before) > 5


@pytest.mark.parametrize("name", FITTING)
def test_the_update_converges_to_a_gradient_that_stays(name):
    setup, xs_W = setup_of(ef21(name, feedback_rate=0.5), dtype=torch.float32), gradients(dtype=torch.float32).tensors
    slower = {"efsignsgd": (300, 0.05), "randomk": (150, 0.01), "gradiveq": (70, 0.01)}  # whose second basis is of 64
    steps, limit = slower.get(name, (60, 0.01))
    for step in range(steps):
        updates = setup(xs_W, step)
    for spec, update, x_W in zip(SPECS, updates, xs_W, strict=True):
        off = float((update - x_W.mean(0)).norm() / x_W.mean(0).norm())
        assert off < limit, (spec.name, off)


@pytest.mark.parametrize("name", FITTING)
def test_it_costs_what_error_feedback_costs(name):
    """The payload is that of the compressor inside, whatever is around it."""
    sent = []
    for feedback in ("ef21", True):
        setup = setup_of(ef21(name, error_feedback=feedback), dtype=torch.float32)
        promised = 0
        for step in range(2):
            promised += setup.payload(step)
            setup(gradients(dtype=torch.float32, step=step).tensors, step)
        sent.append((promised, setup.comm.ledger.counts["payload"] if setup.compressor.traits.fixed_size else promised))
    assert sent[0] == sent[1] == (sent[0][0],) * 2


def test_before_start_step_the_estimates_are_the_momenta():
    setup = setup_of(ef21("topk", density=0.1, start_step=2), start_step=2)
    for step in range(3):
        updates = setup(gradients(step=step).tensors, step)
        entries = [setup.exchange.state[spec.name] for spec in SPECS]
        for update, kept in zip(updates, entries, strict=True):
            if step < 2:
                torch.testing.assert_close(update, kept["momentum_W"].mean(0), rtol=1e-12, atol=1e-12)
        gaps = [float(kept["residual_W"].abs().max()) for kept in entries if "residual_W" in kept]
        assert (max(gaps) == 0) == (step < 2)


def test_an_update_is_nobodys_storage():
    """The next exchange changes the estimate in place, and what was handed out stays."""
    for workers in (1, 3):
        setup = setup_of(ef21("powersgd"), workers)
        first = setup(gradients(workers=workers).tensors, 0)
        kept = [update.clone() for update in first]
        setup(gradients(workers=workers, step=1).tensors, 1)
        assert all(map(torch.equal, first, kept))


# ---- whom it refuses

TRUE_OR_FALSE = "error_feedback must be true or false, because "
REFUSED = {
    "qsgd": f"{TRUE_OR_FALSE}EF21 needs a contraction, and this compressor's error may exceed its input",
    "terngrad": f"{TRUE_OR_FALSE}EF21 needs a contraction",
    "int8": f"{TRUE_OR_FALSE}EF21 needs a contraction",
    "bf16": f"{TRUE_OR_FALSE}EF21 accumulates messages, and sums that are rounded on the wire would drift",
    "signsgd": f"{TRUE_OR_FALSE}EF21 accumulates means, and this compressor's update is not a mean, got ef21",
    "distefblocksgd": "collective must be all_gather with error_feedback=ef21, because owners compress the mean",
    "adacomp": "error_feedback must be false, because it already accumulates unsent entries in e, .*, got ef21",
    "dgc": "error_feedback must be false, because it already accumulates unsent entries in v",
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_a_sentence(name):
    with pytest.raises(ConfigError, match=rf"compressor\.{REFUSED[name]}.*; type compressor\.\w+=\w+$"):
        wrapped_compressor({**yaml_node("compressor", name), "error_feedback": "ef21"}, PLAIN_SGD)


OPTIONS_REFUSED = {
    "collective=two_way": "collective must be all_gather with error_feedback=ef21, because owners compress the mean",
    "worker_momentum=true": "worker_momentum must be false, because this compressor has its own momentum",
    "reduce=sum": f"{TRUE_OR_FALSE}EF21 accumulates means, and this compressor's update is not a mean, got ef21",
    "feedback_rate=0": "feedback_rate must be a number above 0 and at most 1, got 0; type compressor.feedback_rate=0.1",
    "feedback_rate=1.5": "feedback_rate must be a number above 0 and at most 1, got 1.5",
    "feedback_rate=often": "feedback_rate must be a number above 0 and at most 1, got often",
    "error_feedback=ef22": "error_feedback must be true, false, ef21 or loco, got ef22; type compressor.error_fe",
    "error_feedback=2": "error_feedback must be true, false, ef21 or loco, got 2",
}


@pytest.mark.parametrize("option", OPTIONS_REFUSED)
def test_options_beside_it_are_refused_before_the_run(option):
    plus = "+" if option.startswith("worker_momentum") else ""
    typed = ["compressor=topk", "optimizer.momentum=0", "compressor.error_feedback=ef21", f"{plus}compressor.{option}"]
    if option.startswith("error_feedback"):
        typed.pop(2)
    assert sentence(*typed).startswith(f"compressor.{OPTIONS_REFUSED[option]}")


ELSEWHERE = {
    "optimizer=sgd": "optimizer.momentum must be 0, because this compressor has its own momentum",
    "optimizer=adamw": "optimizer must be sgd, because this compressor takes the step itself",
    "optimizer=muon": "optimizer must be sgd, because this compressor takes the step itself",
    "sync=diloco": "compressor.error_feedback must be true or false where workers take local steps, because ef21 has "
    "its own momentum, got ef21; type compressor.error_feedback=true",
    "sync=post_local_sgd": "compressor.error_feedback must be true or false where workers take local steps",
}


@pytest.mark.parametrize("choice", ELSEWHERE)
def test_what_does_not_go_with_it_is_refused_before_the_run(choice):
    own = [] if choice.startswith("optimizer") else ["optimizer.momentum=0"]
    assert sentence("compressor=topk", "compressor.error_feedback=ef21", choice, *own).startswith(ELSEWHERE[choice])


def test_distributed_data_parallel_has_no_hook_for_it():
    said = sentence(
        *("compressor=powersgd", "compressor.error_feedback=ef21", "optimizer.momentum=0"),
        *("comm=gloo", "comm.engine=ddp", "workers=2"),
    )
    assert said.startswith(
        "compressor.error_feedback with comm.engine=ddp must be true or false: torch's hooks have no"
    )
    assert "type compressor.error_feedback=true" in said


def test_differences_of_parameters_are_refused():
    with pytest.raises(ConfigError, match="where workers take local steps, because ef21"):
        pseudo_gradient_compressor(node("powersgd"))


def test_what_is_idle_warns():
    typed = ["compressor=topk", "optimizer.momentum=0", "workers=4"]
    found = composed.warnings(composed.cfg(*typed, "compressor.feedback_rate=0.2"), {"compressor.feedback_rate"})
    assert found == ["compressor.feedback_rate has no effect here: compressor.error_feedback is not ef21"]
    chosen = [*typed, "compressor.error_feedback=ef21", "compressor.residual=aggregate", "compressor.feedback_rate=0.2"]
    found = composed.warnings(composed.cfg(*chosen), {"compressor.feedback_rate", "compressor.residual"})
    assert found == ["compressor.residual has no effect here: compressor.error_feedback is ef21"]


def test_reports_tell_it_from_error_feedback():
    assert label(composed.cfg("compressor=topk", "compressor.error_feedback=ef21")) == "TopK 10 %, EF21"
    assert label(composed.cfg("compressor=topk")) == "TopK 10 %"


# ---- in the user's own loop


def attached(**options):
    model = small_net.net()
    momentum = options.pop("momentum", 0.0)
    door = ab.local if "sync" in options else ab.attach
    return door(model, small_net.sgd(model, momentum), compressor="topk", error_feedback="ef21", **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"momentum": 0.9}, "momentum must be 0, because .*; pass momentum=0 to the optimizer"),
        ({"feedback_rate": 2}, "feedback_rate must be a number above 0 and at most 1, got 2; pass feedback_rate=0.1"),
        ({"sync": "diloco"}, "error_feedback must be True or False where workers .*; pass error_feedback=True"),
    ],
)
def test_the_doors_refuse_in_the_words_of_python(in_group_of_one, options, said):
    with pytest.raises(ConfigError, match=said):
        attached(**options)


# ---- policies look at it, and workers come and go


@pytest.mark.parametrize("name", ["topk", "powersgd", "natural"])
def test_what_is_measured_is_what_would_be_sent(name):
    setup = setup_of(ef21(name))
    for step in range(3):
        setup(gradients(step=step).tensors, step)
    xs_W, info = gradients(step=3).tensors, StepInfo(setup.plan, 3, 0.3, LATE)
    fed = compressor_input(setup.exchange, xs_W, info)
    first = state_of_first(setup.exchange)
    for spec, p in zip(SPECS, fed, strict=True):
        kept = first[spec.name]
        v_W = 0.9 * kept["momentum_W"] + 0.1 * xs_W[SPECS.index(spec)][:1]
        behind = kept["momentum_W"] - kept["residual_W"] if "residual_W" in kept else 0
        torch.testing.assert_close(p, v_W - behind, rtol=1e-12, atol=1e-12)
    ctx = setup.context(3)
    direct = probe(setup.compressor, [x_W[:1] for x_W in xs_W], ctx, first, WORKERS).measured
    assert probe_input(setup.compressor, fed, ctx, first, WORKERS).measured == direct


@pytest.mark.parametrize("policy", ["accordion", "gravac", "lgreco", "schedule", "advised"])
def test_policies_of_levels_run_with_it(policy, tmp_path):
    typed = ["compressor=topk", "compressor.error_feedback=ef21", "optimizer.momentum=0", f"adaptive={policy}"]
    trainer = local.trained(tmp_path, *typed)
    for entries in trainer.exchange.state.values():
        if "estimate" in entries:
            own = (entries["momentum_W"] - entries["residual_W"]).mean(0)
            torch.testing.assert_close(entries["estimate"], own, rtol=1e-10, atol=1e-12)
            assert float(entries["estimate"].abs().max()) > 0


def test_other_workers_share_out_what_there_was_and_the_estimate_stays_their_mean():
    setup = setup_of(ef21("topk"))
    for step in range(3):
        setup(gradients(step=step).tensors, step)
    kept_A = [
        {name: {key: value[w] for key, value in entries.items() if key.endswith("_W")}
         for name, entries in setup.exchange.state.items()}
        for w in range(WORKERS)
    ]  # fmt: skip
    share = setup.compressor.redistributed_state(kept_A, 0, 2)
    for name, entries in setup.exchange.state.items():
        if "estimate" in entries:
            own = share[name]["momentum_W"] - share[name]["residual_W"]
            torch.testing.assert_close(own, entries["estimate"], rtol=1e-12, atol=1e-12)


def test_one_state_of_several_workers_is_refused(in_group_of_one):
    comm = attached()
    state = comm.state_dict() | {"workers": 2}
    comm.detach()
    with pytest.raises(ConfigError, match=r"state must be a list of all ranks' where .* got one; pass"):
        attached().load_state_dict(state)


# ---- mistakes that the kit finds


class Declared(EverySecond):
    """Sends twice what it keeps: no contraction, whatever it says."""

    def encode(self, x_R, spec, level, ctx, keys):
        return super().encode(x_R * 3, spec, level, ctx, keys)


def test_the_kit_finds_who_is_no_contraction():
    make = conformance.from_class(Declared, error_feedback="ef21")
    assert conformance.run(randomness.check_contraction, make).status == "fail"
