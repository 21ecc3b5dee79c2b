"""Golden messages: records of every compressor's messages, to prove that a change of the code changes no byte.

A case is one method with its options, its levels by step, a dtype, a set of tensors and a number of workers. It is
exchanged for three steps with changing learning rate, epoch and level. The record contains a hash of the bytes of every
collective, of the updates and of the state, and the ledger. `scripts/golden_messages.py` writes the records, and
`tests/golden/test_messages.py` compares them.

- On the machine of the record, with one thread, every hash must be equal.
- On other processors, hashes must be equal for the methods in EVERYWHERE, which compute coordinate by coordinate (not
  with EF21's momentum, which may be fused or not).
- Other methods sum many numbers or multiply matrices, in an order that depends on the processor. Their lengths must be
  equal (except for methods in SIZED_BY_DATA), and summary numbers of the updates (`near`) must agree within CLOSE of
  their norm; within CODES where numbers are encoded or selected, because a number at a border may be rounded either
  way. With `ns_precision=bfloat16` numbers are rounded to bfloat16 in each iteration, after sums in an order of the
  processor (0.95 % apart between AVX2 and AVX-512).
- For methods in SIGNS_OF_NOTHING only the lengths must be equal, because signs of rounding errors around 0 are
  arbitrary.
- For messages on the pretended device, hashes must be equal on the machine of the record, and lengths everywhere.

Tensor suffixes: W workers.
"""

import contextlib
import hashlib
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.conformance.pretend_device import DEVICE, Pretend, pretended, real
from accordion_bench.conformance.subject import Make, from_yaml
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.partition import levelled
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import Ladder, Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.tensors import sixteen_bits
from accordion_bench.tensors.kernels import on_gpu
from scripts import golden
from scripts.packed import read_packed, write_packed
from tests.kit.helpers import yaml_names

FOLDERS = {"cpu": golden.RECORDS / "messages", "device": golden.RECORDS / "messages_on_device"}
LEDGER = ("payload_bytes", "wire_bytes", "rounds", "entropy_bytes", "paper_floats")
PROJECTIONS = 8
STEPS = 3

# ---- what must be equal on which machine

EVERYWHERE = frozenset(
    ("none", "bf16", "fp16", "fp8", "int8", "fp4", "natural", "signsgd", "qsgdinf", "trn", "topk", "randomk")
)
SIZED_BY_DATA = frozenset({"adacomp", "dgc", "threshold"})
SIGNS_OF_NOTHING = frozenset({"demo"})
MATRICES = frozenset({"powersgd", "acpsgd", "arctopk", "dion", "dion2", "atomo"})
CLOSE, CODES = 1e-5, 0.05


def holds_everywhere(case: "Case") -> bool:
    """Return whether every processor produces the same bytes."""
    return case.method in EVERYWHERE and case.options.get("error_feedback") != "ef21"


# ---- cases

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "acpsgd": [{}, {"min_compression_rate": 0}, {"residual": "aggregate"}],
    "arctopk": [{}, {"density": 0.05, "sketch": 2}, {"residual": "aggregate"}],
    "adacomp": [{}, {"bin_conv": 7, "bin_dense": 33}, {"scope": "model"}],
    "bf16": [{}, {"residual": "aggregate"}],
    "demo": [{}, {"chunk": 8, "value_dtype": "bfloat16"}, {"value_dtype": "float16", "decay": 0.9}],
    "dgc": [{}, {"warmup_epochs": 0, "clip": 0.5}, {"sample_share": 0.2}],
    "dion": [{}, {"momentum": 0}],
    "dion2": [{}, {"momentum": 0}, {"ns_precision": "bfloat16"}],
    "distefblocksgd": [
        {},
        {"server": "literal"},
        {"align": "tensor", "min_numel": 100},
        {"block": "chunk", "block_size": 100},
        {"block": "bucket", "block_size": 1000, "zero_lr": "flush"},
        {"residual_units": "gradient", "weight_decay_mode": "in_gradient"},
        {"worker_momentum": False},
    ],
    "efsignsgd": [
        {},
        {"block": "chunk", "block_size": 100},
        {"block": "bucket", "block_size": 1000},
        {"residual": "aggregate"},
    ],
    "gradiveq": [
        {"basis_steps": 1, "period": 3},
        {"basis_steps": 1, "period": 2, "length": 16, "rank": 2},
        {"basis_steps": 1, "period": 3, "residual": "aggregate"},
    ],
    "fp16": [{}, {"residual": "aggregate"}],
    "fp4": [{}, {"bucket_size": None}, {"bucket_size": 100}, {"scope": "model"}, {"residual": "aggregate"}],
    "fp8": [{}, {"format": "e5m2", "bucket_size": None}, {"bucket_size": 100}, {"scope": "model"}],
    "int8": [{}, {"rounding": "nearest"}, {"bucket_size": None}, {"bucket_size": 100}, {"scope": "model"}],
    "lion": [{}, {"vote": "mean"}, {"scope": "model"}],
    "natural": [{}, {"exponent_bits": 7}, {"scope": "model"}],
    "nuqsgd": [
        {},
        {"p": 0.8, "zero_level": False},
        {"bucket_size": None},
        {"balanced": True, "bucket_size": 100},
        {"entropy": "huffman"},
    ],
    "onebit": [{}, {"residual": "aggregate"}],
    "onebitadam": [{"freeze_step": 1}, {"freeze_step": 2}],
    "powersgd": [
        {},
        {"min_compression_rate": 0, "orthonormalisation": "gramschmidt"},
        {"warm_start": False},
        {"on_switch": "redraw", "residual": "aggregate"},
        {"feedback_rate": 0.3},
    ],
    "qsgd": [
        {},
        {"zero_level": False},
        {"bucket_size": None},
        {"balanced": True, "bucket_size": 100},
        {"entropy": "elias"},
        {"scope": "model", "entropy": "ans"},
    ],
    "qsgdinf": [{}, {"zero_level": False, "bucket_size": 371}, {"scope": "model"}, {"residual": "aggregate"}],
    "randomk": [{}, {"residual": "aggregate"}, {"scope": "model"}],
    "signsgd": [{}, {"ties": "plus"}, {"scope": "model"}],
    "signum": [{}, {"ties": "plus"}, {"worker_momentum": False}],
    "terngrad": [{}, {"clip": None}, {"entropy": "huffman"}, {"scope": "model"}, {"residual": "aggregate"}],
    "threshold": [{}, {"threshold": 0.9}, {"sample_share": 0.2, "least": 0.9, "most": 1.1}, {"scope": "model"}],
    "topk": [
        {},
        {"count": "floor", "reduce": "sum"},
        {"chunk": 8},
        {"chunk": 64, "value_bits": 2, "residual_decay": 0.95},
        {"chunk": 16, "clip": "median"},
        {"scope": "model"},
        {"residual": "aggregate"},
    ],
    "trn": [{}, {"bucket_size": 100}, {"balanced": True}, {"entropy": "huffman"}, {"scope": "model"}],
}
LEVELS = {"rank": (1, 2, 4), "k": (1, 8, 32), "density": (0.001, 0.01, 0.1, 0.5, 1.0), "bits": (2, 3, 4, 5, 8)}
LRS = {"falls": (0.1, 0.04, 0.02), "stops": (0.1, 0.0, 0.2)}
EPOCHS = (0.0, 2.0, 1000.0)

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "short": [(), (1,), (7,), (513,), (33, 17), (5, 1, 3), (0, 3), (1, 1)],
    "long": [(3 * 4096 + 5,)],
    "matrix": [(65, 67)],
    "many": [(33, 17), (17,), (64, 3, 3, 3), (4097,), (33, 17), (64, 3, 3, 3), (64,), (8, 9, 3, 3), (12, 1031)],
    "ties": [(513,), (33, 17), (16, 3, 3, 3), (90, 51)],
    "special": [(33, 17), (513,), (600,), (64, 9), (40, 30), (7, 3, 3)],
}
# few and small, because the interpreter is slow
ON_DEVICE = {"tensors": ["few"], "dtype": ["float32"], "workers": [2], "lrs": ["falls"], "start_step": [0]}
FEW: list[tuple[int, ...]] = [(), (7,), (33, 17), (33, 17)]


@dataclass(frozen=True)
class Case:
    """One exchange of three steps.

    Args:
        method: name of a YAML file.
        options: options that replace those of the file.
        levels: level of each step: the knob's value, None = dense, `mixed` = all of LEVELS and dense, tensor by tensor;
            1 without a knob.
        dtype: dtype of the gradients.
        tensors: key of SHAPES; `few` = FEW.
        workers: number of workers in the process.
        lrs: key of LRS.
        books: whether a policy has replaced the codebooks.
        device: `cpu`, or `device` for a pretended device.
    """

    method: str
    options: dict[str, Any] = field(hash=False)
    levels: tuple[float | str | None, ...]
    dtype: str
    tensors: str
    workers: int
    lrs: str = "falls"
    books: bool = False
    device: str = "cpu"

    def __str__(self) -> str:
        typed = [f"{key}={value}" for key, value in self.options.items()]
        books = ["fitted codebooks"] if self.books else []
        levels = f"levels {', '.join(str(level) for level in self.levels)}"
        where = "on the pretended device" if self.device == "device" else "on the CPU"
        facts = [levels, self.dtype, f"tensors '{self.tensors}'", f"{self.workers} workers", f"lr {self.lrs}", where]
        return f"{' '.join([self.method, *typed])} ({'; '.join([*facts, *books])})"


def cases(method: str, device: str = "cpu") -> list[Case]:
    """Return cases that contain every compatible pair of values of different kinds."""
    make = from_yaml(method)
    node = make.node
    axes: dict[str, list[Any]] = {
        "options": OPTIONS.get(method, [{}]),
        "levels": _schedules(make),
        "dtype": ["float32", "float64"],
        "tensors": list(SHAPES),
        "workers": [1, 3, 4],
        "lrs": list(LRS),
    }
    if "collective" in node:
        axes["collective"] = [way for way in make().compressor.traits.collectives if way != "tree"]
        if "two_way" in _offered(method):
            axes["collective"] = ["all_gather", "two_way"]
    if "error_feedback" in node:
        axes["error_feedback"] = [True, False, *(["ef21"] if "feedback_rate" in node else [])]
    if "start_step" in node:
        axes["start_step"] = [0, 1]
    if make().compressor.traits.knob == "bits":
        axes["books"] = [False, True]
    if device == "device":
        axes |= {key: values for key, values in ON_DEVICE.items() if key in axes} | {"levels": axes["levels"][-1:]}
        if "cuda" in make().compressor.description.kernels:
            axes |= {"options": axes["options"][:1], "books": [False]}
    return [_case(method, device, chosen) for chosen in paired(axes, lambda chosen: _stands(method, chosen))]


def _offered(method: str) -> tuple[str, ...]:
    try:
        from_yaml(method, collective="two_way", error_feedback=False)()
    except ConfigError:
        return ()
    return ("two_way",)


def _schedules(make: Make) -> list[tuple[float | str | None, ...]]:
    """Return levels by step: each level constant, dense, and a change in every step."""
    knob = make().compressor.traits.knob
    if not knob:
        return [(1,) * STEPS]
    levels = LEVELS[knob]
    return [*((level,) * STEPS for level in levels), (None,) * STEPS, (levels[1], "mixed", levels[2])]


def _case(method: str, device: str, chosen: Mapping[str, Any]) -> Case:
    of_case = {key: chosen[key] for key in ("levels", "dtype", "tensors", "workers", "lrs", "books") if key in chosen}
    typed = {k: chosen[k] for k in ("collective", "error_feedback", "start_step") if k in chosen}
    return Case(method, {**typed, **chosen["options"]}, device=device, **of_case)


def _stands(method: str, chosen: Mapping[str, Any]) -> bool:
    """Return whether these options are compatible."""
    try:
        from_yaml(method, **_case(method, "cpu", chosen).options)()
    except ConfigError:
        return False
    return True


def paired(axes: Mapping[str, Sequence[Any]], stands: Callable[[Mapping[str, Any]], bool]) -> list[dict[str, Any]]:
    """Return few choices, with one value per axis, that cover every compatible pair of values of two axes."""
    asked: dict[str, bool] = {}

    def allowed(index: tuple[int, ...]) -> bool:
        chosen = {name: values[i] for (name, values), i in zip(axes.items(), index, strict=True)}
        typed = [n for n in ("options", "collective", "error_feedback", "start_step") if n in chosen]
        key = repr([chosen[name] for name in typed])
        if key not in asked:
            asked[key] = stands(chosen)
        return asked[key]

    all_ = [index for index in itertools.product(*(range(len(values)) for values in axes.values())) if allowed(index)]
    all_.sort(key=lambda index: zlib.crc32(repr(index).encode()))  # in a pseudo-random order that is always the same
    pairs_of = {index: set(itertools.combinations(enumerate(index), 2)) for index in all_}
    missing = set().union(*pairs_of.values())
    found = []
    while missing:
        best = max(all_[:400], key=lambda index: len(pairs_of[index] & missing))
        if not pairs_of[best] & missing:
            best = next(index for index in all_ if pairs_of[index] & missing)
        missing -= pairs_of[best]
        all_.remove(best)
        found.append({name: values[i] for (name, values), i in zip(axes.items(), best, strict=True)})
    return found


# ---- gradients: from random integers, by operations that every processor rounds in the same way


def shapes(case: Case) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors of a case."""
    return FEW if case.tensors == "few" else SHAPES[case.tensors]


def gradients(case: Case, step: int) -> list[Tensor]:
    """Return gradients [W, ...] of a step: a constant part, and noise."""
    out = []
    for i, shape in enumerate(shapes(case)):
        lasting = _drawn(f"{case.tensors} {i}", shape)
        noise_W = [_drawn(f"{case.tensors} {i} {step} {worker}", shape) for worker in range(case.workers)]
        x_W = torch.stack([(lasting + noise / 2) / 3 for noise in noise_W])
        if case.tensors == "ties":
            x_W = (2 * x_W).round() / 2
        if case.tensors == "special":
            x_W = _special(i, x_W)
        out.append(x_W.to(getattr(torch, case.dtype)))
    return out


def _drawn(name: str, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(-2048, 2049, (4, *shape), generator=generator).sum(0).double() / 2048


def _special(i: int, x_W: Tensor) -> Tensor:
    """Return the special tensor i: all zero; denormal in float32; a spike; large; zero on one worker and -0.0; tiny."""
    if i == 2:
        x_W[:, 5] *= 2.0**12
    if i == 4:
        x_W[0] = 0
        x_W[:, 3] = -0.0
    return x_W * (0.0, 2.0**-140, 2.0**-6, 2.0**14, 1.0, 2.0**-60)[i]


# ---- recording


class Listening(Comm):
    """Collectives that record their messages.

    Attributes:
        heard: (collective, bytes of one worker, hash of the bytes of all local workers).
        change: called with the bytes of each message before they are hashed; for tests of the record itself.
    """

    def __init__(self, workers: int, device: str = "cpu") -> None:
        super().__init__(workers, device=device)
        self.heard: list[tuple[str, int, str]] = []
        self.change: Callable[[bytes], bytes] = bytes
        self._known = False

    @contextlib.contextmanager
    def _noted(self, name: str, messages: Callable[[], Sequence[Tensor]]) -> Iterator[None]:
        """Record the messages of all local workers, unless one collective has called another one."""
        if self._known:
            yield
            return
        said = self.change(b"".join(map(bytes_of, messages())))
        self.heard.append((name, -(-len(said) // self.local_workers), hashed(said)))
        self._known = True
        try:
            yield
        finally:
            self._known = False

    def _collective(self, run: Callable[[], object]) -> None:
        assert self._known, "a collective that tests/kit/golden_messages.py does not know; add it to Listening"
        super()._collective(run)

    def _shares(self, xs_W: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        """Return the summand of each worker, one worker after another."""
        rows = [[x_W[row : row + 1] for x_W in xs_W] for row in range(self.local_workers)]
        if dtype is None:
            return [x for row in rows for x in row]
        return [sixteen_bits.sum_of_shares(row, self.workers, dtype) for row in rows]

    def all_reduce_mean(self, xs_W, dtype=None, may_alias=False):
        if not xs_W:
            return []
        with self._noted("all_reduce", lambda: self._shares(xs_W, dtype)):
            return super().all_reduce_mean(xs_W, dtype, may_alias)

    def all_reduce_max(self, xs):
        if not xs:
            return []
        with self._noted("all_reduce_max", lambda: list(xs) * self.local_workers):
            return super().all_reduce_max(xs)

    def all_gather(self, message_W, account="payload"):
        name = "all_gather" if account == "payload" else f"all_gather ({account})"
        with self._noted(name, lambda: [message_W]):
            return super().all_gather(message_W, account)

    def all_gather_uneven(self, messages_W, sizes_A):
        with self._noted("all_gather_uneven", lambda: list(messages_W)):
            return super().all_gather_uneven(messages_W, sizes_A)

    def all_to_all(self, messages_AW):
        with self._noted("all_to_all", lambda: list(messages_AW)):
            return super().all_to_all(messages_AW)

    def send_receive(self, message_W, partners_A):
        with self._noted("send_receive", lambda: [message_W]):
            return super().send_receive(message_W, partners_A)


def bytes_of(x: Tensor) -> bytes:
    """Return a tensor's bytes, in the order of its coordinates."""
    return real(x).detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def hashed(said: bytes) -> str:
    """Return a hash of 8 bytes in hexadecimal digits."""
    return hashlib.blake2b(said, digest_size=8).hexdigest()


def hash_of(value: Any) -> str:
    """Return the hash of a nested value with tensors, which depends on names but not on their order."""
    found: list[bytes] = []

    def walk(where: str, x: Any) -> None:
        if isinstance(x, Mapping):
            for key in sorted(x, key=str):
                walk(f"{where}/{key}", x[key])
        elif isinstance(x, list | tuple):
            for i, item in enumerate(x):
                walk(f"{where}/{i}", item)
        elif isinstance(x, Tensor):
            found.append(f"{where} {x.dtype} {tuple(x.shape)}\n".encode() + bytes_of(x))
        else:
            found.append(f"{where} {x!r}\n".encode())

    walk("", value)
    return hashed(b"".join(found))


def near(updates: Sequence[Tensor]) -> list[float]:
    """Return norm, sum and some projections of the updates, which differ between processors only by rounding."""
    flat = torch.cat([real(update).double().reshape(-1) for update in updates])
    generator = torch.Generator().manual_seed(7)
    onto = torch.randint(-8, 9, (PROJECTIONS, len(flat)), generator=generator).double() / 8
    return [float(f"{x:.8g}") for x in (flat.norm().item(), flat.sum().item(), *(onto * flat).sum(1).tolist())]


@contextlib.contextmanager
def _place(device: str) -> Iterator[str]:
    """Use the CPU, or a pretended device with kernels in Triton's interpreter; yield the device's name."""
    if device == "cpu":
        yield "cpu"
        return
    from accordion_bench.tensors.kernels.on_gpu import launch

    def interpret(kernel: Any, grid: Any, place: Any, args: Any, constants: Any) -> None:
        kernel[grid](*map(real, args), **constants)

    def usable(xs: Sequence[Any]) -> bool:
        return bool(xs) and all(isinstance(x, Pretend) for x in xs)

    with mock.patch.object(on_gpu, "usable", usable), mock.patch.object(launch, "start", interpret), pretended():
        yield str(DEVICE)


def _plan(case: Case, step: int, ladder: Ladder, names: Sequence[str], books: Mapping[int, Any]) -> Plan:
    level = case.levels[step]
    if not ladder.values:
        return Plan(dict.fromkeys(names, 0), 1)
    if level is None:
        return Plan({}, 1, codebooks=books)
    if level == "mixed":  # every level, and dense
        count = len(ladder.values) + 1
        levels = {name: i % count for i, name in enumerate(names) if i % count < len(ladder.values)}
        return Plan(levels, 1, codebooks=books)
    return Plan(dict.fromkeys(names, ladder.values.index(float(level))), 1, codebooks=books)


def ran(case: Case, change: Callable[[bytes], bytes] = bytes) -> dict[str, Any]:
    """Exchange a case, and return its steps and the counts of the ledger.

    Args:
        case: the case.
        change: applied to the bytes of each message before they are hashed.
    """
    with _place(case.device) as device:
        wrapped = from_yaml(case.method, **case.options)()
        compressor, comm = wrapped.compressor, Listening(case.workers, device)
        comm.change = change
        knob = compressor.traits.knob
        values = tuple(float(level) for level in LEVELS[knob]) if knob else ()
        specs = [TensorSpec(f"t{i}", shape) for i, shape in enumerate(shapes(case))]
        like = torch.zeros((), dtype=getattr(torch, case.dtype), device=device)
        ladder = Ladder(knob or "", values)
        exchange = Exchange(compressor, specs, ladder, comm, like, SendOptions(3, **wrapped.for_exchange))
        names = levelled(compressor, exchange.sent)
        books = _books(compressor, values) if case.books else {}
        steps = []
        for step in range(STEPS):
            info = StepInfo(_plan(case, step, ladder, names, books), step, LRS[case.lrs][step], EPOCHS[step])
            comm.heard.clear()
            updates = exchange([x_W.to(device) for x_W in gradients(case, step)], info)
            sent = [" ".join(map(str, message)) for message in comm.heard]
            steps.append({"sent": sent, "update": hash_of(updates), "state": hash_of(exchange.state)})
            if not holds_everywhere(case) and case.method not in SIGNS_OF_NOTHING and case.device == "cpu":
                steps[-1]["near"] = near(updates)
        columns = comm.ledger.columns()
    return {"steps": steps, "ledger": [columns[key] for key in LEDGER]}


def _books(compressor: Any, values: Sequence[float]) -> dict[int, tuple[float, ...]]:
    """Return the compressor's codebooks with levels closer to 0."""
    own = {int(bits): compressor.codebook(int(bits)) for bits in values}
    return {
        bits: tuple(torch.tensor([level * (1 + abs(level)) / 2 for level in book]).tolist())
        for bits, book in own.items()
        if book
    }


# ---- files


def recorded(method: str, device: str = "cpu") -> dict[str, Any]:
    """Return the record of a method.

    Raises:
        LookupError: there is no record; the message says how to write it.
    """
    path = FOLDERS[device] / f"{method}.json.xz"
    if not path.exists():
        raise LookupError(
            f"no golden messages of {method} on the {device} are kept; make them, at a commit that is trusted, with "
            f"python -m scripts.golden_messages {method}"
        )
    return json.loads(read_packed(path))


def made(method: str, device: str = "cpu") -> dict[str, Any]:
    """Compute a new record of a method."""
    found = [{"case": _saved(case), **ran(case)} for case in cases(method, device)]
    return {"method": method, "commit": golden.commit(), "machine": golden.machine(), "cases": found}


def _saved(case: Case) -> dict[str, Any]:
    """Convert a case for a file, without fields that the method and the device determine."""
    return {key: value for key, value in asdict(case).items() if key not in ("method", "device")}


def case_of(method: str, device: str, saved: Mapping[str, Any]) -> Case:
    """Convert a case from a file."""
    return Case(method, device=device, **{**saved, "levels": tuple(saved["levels"])})


def write(record: Mapping[str, Any], device: str = "cpu") -> Path:
    """Write a record, with one line for each case."""
    head = {key: value for key, value in record.items() if key != "cases"}
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in record["cases"])
    path = FOLDERS[device] / f"{record['method']}.json.xz"
    path.parent.mkdir(exist_ok=True)
    write_packed(path, f'{json.dumps(head)[:-1]}, "cases": [\n{lines}\n]}}\n')
    return path


def methods() -> list[str]:
    """Return all methods, from their YAML files."""
    return yaml_names("compressor")


# ---- comparing


def difference(case: Case, old: Mapping[str, Any], new: Mapping[str, Any], exact: bool) -> str | None:
    """Return the first difference of a case as a sentence; None = no difference.

    Args:
        case: the case, for the sentence.
        old, new: recorded and new results.
        exact: whether this is the machine of the record.
    """
    exact = exact or (holds_everywhere(case) and case.device == "cpu")
    for step, (was, now) in enumerate(zip(old["steps"], new["steps"], strict=True)):
        for what in (
            _first_message(case, was["sent"], now["sent"], exact),
            exact and was["update"] != now["update"] and "the updates differ, although all messages are equal",
            exact and was["state"] != now["state"] and "the state differs, although messages and updates are equal",
            not exact and _further(case, was.get("near"), now.get("near")),
        ):
            if what:
                return f"{case}, step {step}: {what}"
    if exact or case.method not in SIZED_BY_DATA:
        for key, was, now in zip(LEDGER, old["ledger"], new["ledger"], strict=True):
            if was != now and (exact or key != "entropy_bytes"):
                return f"{case}: the ledger's {key} was {was} and is now {now}"
    return None


def _first_message(case: Case, old: Sequence[str], new: Sequence[str], exact: bool) -> str | None:
    """Return the first difference of a step's messages; elsewhere, some are compared only by length and name."""
    for number, (was, now) in enumerate(itertools.zip_longest(old, new)):
        if was is None or now is None:
            more = f"{now.split()[0]} is new" if was is None else f"{was.split()[0]} is missing"
            return f"collective {number}, {more}"
        (*name, length, said), (*other, new_length, new_said) = was.split(), now.split()
        if name != other:
            return f"collective {number} was {' '.join(name)} and is now {' '.join(other)}"
        where = f"collective {number}, {' '.join(name)}"
        if length != new_length and (exact or case.method not in SIZED_BY_DATA):
            return f"{where}: {length} bytes of a worker are now {new_length}"
        if exact and said != new_said:
            return f"{where}: as long as it was, {length} bytes, but other bytes"
    return None


def _further(case: Case, old: Sequence[float] | None, new: Sequence[float] | None) -> str | None:
    """Return whether updates differ by more than rounding can explain."""
    if old is None or new is None:
        return None
    apart = max(abs(a - b) for a, b in zip(old, new, strict=True))
    exact_products = case.method in MATRICES and case.options.get("ns_precision") != "bfloat16"
    within = CLOSE if exact_products else CODES
    return f"the updates are {apart:.3g} off, of a norm of {old[0]}" if apart > within * max(old[0], 1e-30) else None


def differences(method: str, device: str = "cpu") -> list[str]:
    """Return the first difference of each case of a method from its record.

    Args:
        method: name of the YAML file.
        device: `cpu` or `device`.
    """
    record = recorded(method, device)
    exact = golden.machine() == record["machine"]
    found = []
    for kept in record["cases"]:
        case = case_of(method, device, kept["case"])
        found.append(difference(case, kept, ran(case), exact))
    return [line for line in found if line]


def values_met(method: str, device: str = "cpu") -> dict[str, set[Any]]:
    """Return the levels, collectives and other values in the cases of a record, by kind."""
    kept = [case_of(method, device, one["case"]) for one in recorded(method, device)["cases"]]
    met: dict[str, set[Any]] = {"level": {level for case in kept for level in case.levels}}
    for key in ("dtype", "tensors", "workers", "lrs"):
        met[key] = {getattr(case, key) for case in kept}
    for key in ("collective", "error_feedback"):
        met[key] = {case.options[key] for case in kept if key in case.options}
    return met
