"""The store of a run: what processes tell each other there; its values are authenticated and validated.

Every program that reaches the port of one of torch's stores may read and write in it. So a value counts only if it has
the seal of the run's secret, where there is one, and if it can be what its key says. Any other one counts as absent.
"""

import hmac
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from accordion_bench.options.checks import ConfigError

SECRET = "ACCORDION_BENCH_SECRET"  # the environment's variable
SHORTEST = 16  # characters of a secret
LONGEST = 1 << 20  # bytes of a value
SEALED = b"sealed:"
# what the meaning of a text may raise where it has none
NO_MEANING = (ValueError, TypeError, LookupError, RecursionError)

T = TypeVar("T")


class _WrongSeal(Exception):
    """The text says what is wrong."""


def shared_secret(environ: Mapping[str, str] = os.environ) -> str:
    """The secret that all processes of a run have been given; "" where there is none.

    Raises:
        ConfigError: it is so short that it can be guessed.
    """
    secret = environ.get(SECRET, "")
    if secret and len(secret) < SHORTEST:
        raise ConfigError(
            f"{SECRET} must have at least {SHORTEST} characters, got {len(secret)}; "
            f"type export {SECRET}=$(openssl rand -hex 16) on one machine, and its words on the others"
        )
    return secret


class SealedStore:
    """A store of torch.distributed, whose values are sealed when they are written and looked at when they are read.

    A value with a wrong seal, or without the meaning that its key promises, counts as absent and is told once. Counters
    bear no seal, since the store's server counts by itself: believe them no more than that something may be there.

    Args:
        base: store of torch.distributed.
        processes: how many share it.
        secret: that they share; "" = no seals.
        path: where in the store of all launches it lies; a seal is worth nothing elsewhere.
    """

    def __init__(self, base: Any, processes: int, secret: str = "", path: str = "") -> None:
        self.base, self.processes = base, processes
        self._secret, self._path = secret, path
        self._told: set[str] = set()

    def under(self, name: str) -> "SealedStore":
        """A part of it, with keys of its own."""
        return self._alike(self.base, f"{self._path}{name}/")

    def clone(self) -> "SealedStore":
        """The same store by a connection of its own, for another thread."""
        return self._alike(self.base.clone(), self._path)

    def of_torch(self) -> Any:
        """The same part of the store as torch.distributed knows it, without seals."""
        import torch.distributed as dist

        return dist.PrefixStore(f"{self._path}torch", self.base)

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self.base.set(self._path + key, self._seal(key, value))

    def add(self, key: str, amount: int) -> int:
        """Count on, by 0 to look; returns the counter. Counters bear no seal."""
        return int(self.base.add(self._path + key, amount))

    def read(self, key: str, meaning: Callable[[str], T]) -> T | None:
        """A value, or None where there is none that counts; waits for nothing.

        Args:
            key: where it stands.
            meaning: makes of the text what is meant, `str` the text itself; raises ValueError where it cannot.
        """
        there = self._path + key
        return self._open(key, self.base.get(there), meaning) if self.base.check([there]) else None

    def read_all(self, keys: Sequence[str], meaning: Callable[[str], T]) -> list[T | None] | None:
        """As `read`, of several keys in one go; None where one of them is not there."""
        there = [self._path + key for key in keys]
        if not there:
            return []
        if not self.base.check(there):
            return None
        found = self.base.multi_get(there)
        return [self._open(key, value, meaning) for key, value in zip(keys, found, strict=True)]

    def replace(self, key: str, before: str, value: str, meaning: Callable[[str], T]) -> T | None:
        """Write a value where `before` stands, "" for nothing; returns what stands there now, as `read` does."""
        expected = self._seal(key, before) if before else ""
        found = self.base.compare_set(self._path + key, expected, self._seal(key, value))
        return self._open(key, found, meaning)

    def first(self, key: str, value: str, meaning: Callable[[str], T]) -> T:
        """Write a value unless there is one that counts; returns the one that stands there now."""
        found = self.replace(key, "", value, meaning)
        if found is None:
            self.set(key, value)
        return meaning(value) if found is None else found

    def distrust(self, key: str, why: str) -> None:
        """Tell once that a value is passed over."""
        if key not in self._told:
            self._told.add(key)
            print(
                f"warning: {key} in the store of the run {why}, and is passed over: another program writes there, or "
                f"has another {SECRET}; type export {SECRET}=WORDS, the same on every machine",
                file=sys.stderr,
                flush=True,
            )

    def _alike(self, base: Any, path: str) -> "SealedStore":
        other = SealedStore(base, self.processes, self._secret, path)
        other._told = self._told
        return other

    def _seal(self, key: str, value: str) -> str:
        if not self._secret:
            return value
        return f"{SEALED.decode()}{self._signature(key, value.encode())}:{value}"

    def _signature(self, key: str, value: bytes) -> str:
        return hmac.digest(self._secret.encode(), f"{self._path}{key}\0".encode() + value, "sha256").hex()

    def _open(self, key: str, found: bytes, meaning: Callable[[str], T]) -> T | None:
        try:
            return meaning(self._unsealed(key, found).decode())
        except _WrongSeal as wrong:
            self.distrust(key, str(wrong))
        except NO_MEANING:
            self.distrust(key, f"is no such thing: {found[:40]!r}")
        return None

    def _unsealed(self, key: str, found: bytes) -> bytes:
        if len(found) > LONGEST:
            raise _WrongSeal(f"has {len(found)} bytes")
        if not self._secret:
            if found.startswith(SEALED):
                raise _WrongSeal("is sealed")
            return found
        seal, _, value = found.removeprefix(SEALED).partition(b":")
        if not hmac.compare_digest(seal, self._signature(key, value).encode()):
            raise _WrongSeal("has a wrong seal")
        return value


def whole_number(text: str) -> int:
    """A number of steps, processes or the like, as a text in a store says it.

    Raises:
        ValueError: it is none.
    """
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ValueError(text)
    return int(text)


def printable(text: str) -> str:
    """The text without signs that a terminal obeys."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "?" for sign in text)


LOOK = 0.2  # seconds between two looks into the store
CROWD = 200  # processes that look that often; of more of them each looks less often, so that the store can serve them
GO, LAST = "go", "last"


class AgreedStep:
    """A process asks in the store, which all read a few times per second; how long steps take is not foreseen.

    The store holds the highest step that any process has gone on to since it was asked. None goes on without reading
    it, and raising it where it is lower. When all have read the question, that step is declared the last one, in one
    atomic exchange: no process is beyond it, each reads it before going beyond it, and none has waited for another.

    Where processes exchange something in every step, all of them reach that step within `LOOK` and four steps, as long
    as steps are then: a step to notice, `LOOK` and a step until all have read the question, two steps to the last one.
    If all processes want it at once, as after a signal to all, two steps do. With local steps those come on top by
    which the slowest process is behind the fastest one. With more than `CROWD` processes `LOOK` grows in proportion.

    Args:
        name: of what is done then.
        store: of the run; None with one process.
    """

    def __init__(self, name: str, store: SealedStore | None = None) -> None:
        self.name, self.store = name, store
        self._round = 0  # steps that have been agreed on and are over
        self._asked = False  # and this process knows it
        self._last: int | None = None  # the step
        self._next_look = 0.0

    def due(self, step: int, wanted: Callable[[], bool]) -> bool:
        """Whether this is the step; call it after every step, in every process.

        Args:
            step: steps taken.
            wanted: whether this process asks for it; called after every step until one has.
        """
        if self.store is None:
            return wanted()
        if self._last is None and (self._asked or wanted() or self._hears(self.store)):
            self._go_on(self.store, step)
        if self._last is None or step < self._last:
            return False
        self._round, self._asked, self._last = self._round + 1, False, None
        return True

    @property
    def _key(self) -> str:
        return f"{self.name}-{self._round}"

    def _hears(self, store: SealedStore) -> bool:
        """Whether another process has asked."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK * max(1.0, store.processes / CROWD)
        return store.read(self._key, _state) is not None

    def _go_on(self, store: SealedStore, step: int) -> None:
        """Go on to the next step with the others' knowledge, or learn which one is the last."""
        found = store.replace(self._key, "", f"{GO} {step + 1}", _state)  # asks, unless another process has
        while found is not None and found[0] == GO and found[1] <= step:
            found = store.replace(self._key, f"{GO} {found[1]}", f"{GO} {step + 1}", _state)
        if not self._asked:
            self._asked = True
            if store.add(f"{self._key}-asked", 1) >= store.processes:
                while found is not None and found[0] == GO:
                    found = store.replace(self._key, f"{GO} {found[1]}", f"{LAST} {found[1]}", _state)
        if found is not None and found[0] == LAST:
            if found[1] >= step:
                self._last = found[1]
            else:
                store.distrust(self._key, f"is step {found[1]}, which is over")


def _state(text: str) -> tuple[str, int]:
    """What the store holds: `go` and the highest step that any process has gone on to, or `last` and the step."""
    word, _, step = text.partition(" ")
    if word not in (GO, LAST):
        raise ValueError(text)
    return word, whole_number(step)
