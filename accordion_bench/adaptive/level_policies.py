"""Policies that choose a compression level from measured gradient statistics: AdaQS and GraVAC."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from accordion_bench.adaptive.policy import BITS, Policy
from accordion_bench.options import checks
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import WHOLE_MODEL, Ladder, Measured, Plan, Probe, Request, RunFacts, Signals


def _adaqs_idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from Policy.description.idle(cls, options, context)
    if options.get("initial", 2) == options.get("cap", 8):
        for key in ("initial", "cap", "factor", "interval"):
            yield key, "initial = cap leaves no bit to add"


@with_options
class AdaQS(Policy):
    """Add one bit, b <- b + 1, when MSDR(e) <= MSDR(at the last change) / factor, up to `cap`; never remove one.

        MSDR = ||m|| / sqrt(sum_i v_i)

    m and v are the mean and the variance of each coordinate of worker 0's gradient over the steps of an epoch. The
    ratio is measured in the last epoch of every `interval`. The first measurement sets the reference; so does the first
    one after a change of the batch size, because v falls with the batch. An undefined ratio (zero variance, or a zero
    gradient) decides nothing.

    Source: as recalled from Guo et al., ICASSP 2020; its text was not at hand.
    """

    factor: float = option(
        "drop of the ratio since the last change that adds a bit; lower = bits are added sooner", default=2.0, above=1
    )
    interval: int = option("epochs between measurements, each in the last epoch", default=5, at_least=1)
    initial: int = option("bits at the start, 2 to 8", default=2)
    cap: int = option("upper bound on the bits", default=8)
    scope: str = option("unit that has its own number of bits", default="tensor", choices=("tensor", WHOLE_MODEL))

    chosen_as = {
        "adaqs": Choice(
            "AdaQS-style: one more bit when the gradients' mean has become small against their spread (Guo et al. "
            "2020, as recalled)"
        )
    }

    description = replace(
        Policy.description,
        idle=_adaqs_idle,
        smoke_options=lambda options, knob: {"interval": 1, "factor": 2, "cap": 4},
    )

    knobs = ("bits",)
    intervals = 2  # the first measurement decides nothing
    level_keys = ("initial", "cap")
    signal = "msdr_local"
    keeps = ("bits", "saved", "steps")

    def __post_init__(self) -> None:
        super().__post_init__()
        fewest, most = BITS
        for key, value, least in (("initial", self.initial, fewest), ("cap", self.cap, self.initial)):
            if type(value) is not int or not least <= value <= most:
                rule = f"an integer from {least} to {most}"
                rule += ", with initial at its lower end" if key == "cap" else ""
                raise ValueRefused(key, rule, value, most if key == "cap" else fewest)
        self.bits: dict[str, int] = {}
        self.saved: dict[str, float] = {}
        self.steps = 0  # per epoch, for the ratios in `saved`

    def needs(self, epoch: int) -> frozenset[str]:
        return frozenset([self.signal]) if (epoch + 1) % self.interval == 0 else frozenset()

    def ladder(self, knob: str, pair: tuple[float, float]) -> tuple[float, ...]:
        return tuple(range(self.initial, self.cap + 1))

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        self._index = {bits: ladder.values.index(bits) for bits in range(self.initial, self.cap + 1)}
        self.bits = dict.fromkeys([WHOLE_MODEL] if self.scope == WHOLE_MODEL else plan.levels, self.initial)
        self.saved = {}
        return self._in_force(plan)

    def update(self, signals: Signals, plan: Plan) -> Plan:
        values = signals.values.get(self.signal)
        self._decision = {}
        if values is None:
            return plan
        if signals.epoch_steps != self.steps:
            self.saved, self.steps = {}, signals.epoch_steps
        seen = {key: values[key] for key in self.bits if key in values}
        before = {key: self.saved.get(key) for key in seen}
        raised = [key for key, value in seen.items() if self._look(key, value)]
        self._decision = {
            "names": list(seen),
            "msdr_before": list(before.values()),
            "msdr": [value if math.isfinite(value) else None for value in seen.values()],
            "bits": [self.bits[key] for key in seen],
            "raised": [key in raised for key in seen],
        }
        return self._in_force(plan) if raised else plan

    def _look(self, key: str, value: float) -> bool:
        """Add a bit where this ratio is low enough, and return whether it did; update the reference."""
        if not math.isfinite(value):
            return False
        if key not in self.saved:
            self.saved[key] = value
            return False
        if value > self.saved[key] / self.factor or self.bits[key] >= self.cap:
            return False
        self.bits[key] += 1
        self.saved[key] = value
        return True

    def _in_force(self, plan: Plan) -> Plan:
        whole = self.scope == WHOLE_MODEL
        return plan.with_levels({name: self._index[self.bits[WHOLE_MODEL if whole else name]] for name in plan.levels})


DENSE = 1.0


@with_options
class GraVAC(Policy):
    """Choose one density for all tensors by the gain (share of the gradient kept) and the modelled throughput.

        gain(d) = smoothed sum_l ||C_d(p_l)|| / smoothed sum_l ||p_l||          p = message of worker 0
        score(d) = gain(d) / (compute_seconds + 8 wire_bytes(d) / bandwidth)     wire_bytes: sent by one worker's link

    The density is the candidate if its gain >= eps; else `mildest` if its gain >= eps; else dense.

    The candidate starts at `mildest`. After every `interval` exchanges it is scored and multiplied by `step`, until the
    two best scores differ by less than omega (relative); then the smaller of these two densities remains. A new
    candidate is used once it has been measured; until then the last decision holds. Where the recalled rule is silent:
    a candidate other than the mildest whose gain is below eps when scored ends the search, and so does `smallest`; the
    density with the best score then remains. A mildest density with a gain below eps is tried again after another
    interval.

    The paper measures the throughput; here it is modelled, so that a run is reproducible. The gains of both densities
    are measured on the actual residual of the run; the densities have no separate residuals.

    Source: Tyagi and Swany, CLOUD 2023, as recalled; not the published code, whose search never advances and whose
    current gain is that of the mildest compressor.
    """

    mildest: float = option("initial density, and the fallback", default=0.1, above=0, below=1)
    smallest: float = option("lower bound of the search", default=1e-4, above=0)
    step: float = option("factor from one candidate to the next", default=0.5, above=0, at_most=0.9)
    eps: float = option("lower bound on the share of the gradient's norm to send", default=0.75, above=0, at_most=1)
    omega: float = option(
        "relative difference of the two best scores below which the search ends", default=0.05, above=0, below=1
    )
    smoothing: float = option("weight of a new value; higher = noisier", default=0.05, above=0, at_most=1)
    window: int = option("exchanges at the start that use mildest", default=25, at_least=0)
    interval: int = option("exchanges per candidate", default=2000, at_least=1)
    every: int = option(
        "exchanges between decisions; each costs two extra compressions of a message", default=1, at_least=1
    )
    bandwidth: float = option("bit/s of the modelled link", default=1e9, above=0)
    compute_seconds: float = option(
        "modelled time per step besides communication; 0 = only communication counts", default=0.0, at_least=0
    )

    chosen_as = {
        "gravac": Choice(
            "the density with the most gradient per second that still keeps enough of it (Tyagi and Swany 2023, as "
            "recalled)"
        )
    }

    description = replace(
        Policy.description, smoke_options=lambda options, knob: {"interval": 1, "every": 1, "smallest": 0.02}
    )

    when = "exchange"
    knobs = ("density",)
    level_keys = ("smallest", "mildest")
    keeps = ("candidate", "since", "searching", "level", "scores", "sums")

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number("smallest", self.smallest, above=0, at_most=self.mildest, instead=self.mildest / 10)
        # slightly above the quotient, so that rounding does not drop a smallest density that is on the ladder
        count = math.floor(math.log(self.smallest / self.mildest) / math.log(self.step) + 1e-9)
        self.densities = [self.mildest * self.step**i for i in range(count + 1)]
        self.candidate = 0  # index into densities
        self.since = 0  # first exchange of the candidate
        self.searching = True
        self.level = 0  # last decision, as an index into the ladder; another policy may have refined it since
        self.scores: dict[int, float] = {}
        self.sums: dict[int, tuple[float, float]] = {}  # per density: smoothed norms sent, and before compression

    def due(self, exchange: int) -> bool:
        return (exchange + 1) % self.every == 0

    def needs_at(self, exchange: int) -> frozenset[Request]:
        if not self.due(exchange):
            return frozenset()
        return frozenset(Probe(self._index[i]) for i in {0, self.candidate})

    def ladder(self, knob: str, pair: tuple[float, float]) -> tuple[float, ...]:
        return (*reversed(self.densities), DENSE)

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        self._index = [ladder.values.index(density) for density in self.densities]
        self._dense = ladder.values.index(DENSE)
        self.level = self._index[0]
        return plan.with_levels(dict.fromkeys(plan.levels, self.level))

    def update(self, signals: Signals, plan: Plan) -> Plan:
        probes = {i: signals.probes.get(self._index[i]) for i in {0, self.candidate}}
        self._decision = {}
        if not all(probes.values()):
            return plan
        for i, probe in probes.items():
            self._smooth(i, probe or {})
        gain, mildest_gain, done = self.gain(self.candidate), self.gain(0), signals.exchange + 1
        level, density = self._dense, DENSE
        if gain >= self.eps or mildest_gain >= self.eps or done < self.window:
            chosen = self.candidate if gain >= self.eps and done >= self.window else 0
            level, density = self._index[chosen], self.densities[chosen]
        changed, self.level = level != self.level, level
        scored = self.searching and done - self.since >= self.interval
        if changed or scored:
            sent, norm = self.sums[self.candidate]
            self._decision = {
                "exchange": signals.exchange,
                "density": density,
                "candidate": self.densities[self.candidate],
                "gain": gain,
                "mildest_gain": mildest_gain,
                "sent_norm": sent,
                "norm": norm,
            }
        if scored:
            self._search(gain, probes[self.candidate] or {}, done)
        return plan.with_levels(dict.fromkeys(plan.levels, level)) if changed else plan

    def units_change(self) -> None:
        self.sums.clear()

    def _smooth(self, i: int, probe: Mapping[str, Measured]) -> None:
        new = (sum(found.sent_norm for found in probe.values()), sum(found.norm for found in probe.values()))
        old = self.sums.get(i, new)
        self.sums[i] = (old[0] + self.smoothing * (new[0] - old[0]), old[1] + self.smoothing * (new[1] - old[1]))

    def gain(self, i: int) -> float:
        """Return the smoothed share of the norm that a density keeps; 1 where all gradients are zero."""
        sent, norm = self.sums[i]
        return sent / norm if norm else 1.0

    def throughput(self, probe: Mapping[str, Measured]) -> float:
        """Return the modelled steps per second."""
        seconds = self.compute_seconds + 8 * sum(found.wire_bytes for found in probe.values()) / self.bandwidth
        return 1 / seconds if seconds else 1.0  # a single worker sends nothing, so that only the gains count

    def _search(self, gain: float, probe: Mapping[str, Measured], done: int) -> None:
        i, self.since = self.candidate, done
        if gain < self.eps and i == 0:
            return
        if gain >= self.eps:
            self.scores[i] = self.throughput(probe) * gain
            self._decision["score"] = self.scores[i]
        best = sorted(self.scores, key=lambda j: self.scores[j])[-2:]
        alike = len(best) == 2 and self.scores[best[1]] - self.scores[best[0]] < self.omega * self.scores[best[1]]
        if alike or gain < self.eps or i + 1 == len(self.densities):
            self.searching = False
            self.candidate = max(best) if alike else best[-1]
        else:
            self.candidate = i + 1
        if self.candidate not in (0, i):
            self.sums.pop(self.candidate, None)  # outdated measurement
        self._decision["next_candidate"] = self.densities[self.candidate]
