"""The key-value store of a run, whose values are authenticated and validated.

Every program that can reach the port of a torch store can read and write it. A value is therefore accepted only if it
is signed (sealed) with the run's secret, if there is one, and if it is valid for its key. Other values count as absent.
"""

import hmac
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from accordion_bench.options.checks import ConfigError

SECRET = "ACCORDION_BENCH_SECRET"  # environment variable
SHORTEST = 16  # minimum number of characters of a secret
LONGEST = 1 << 20  # maximum number of bytes of a value
SEALED = b"sealed:"
# exceptions of parsers for invalid text
NO_MEANING = (ValueError, TypeError, LookupError, RecursionError)

T = TypeVar("T")


class _WrongSeal(Exception):
    """Raised for a value with a wrong seal; the text says what is wrong."""


def shared_secret(environ: Mapping[str, str] = os.environ) -> str:
    """Return the run's secret from the environment, "" = none; ConfigError if it is so short that it can be guessed."""
    secret = environ.get(SECRET, "")
    if secret and len(secret) < SHORTEST:
        raise ConfigError(
            f"{SECRET} must have at least {SHORTEST} characters, got {len(secret)}; "
            f"type export {SECRET}=$(openssl rand -hex 16) on one machine, and its words on the others"
        )
    return secret


class SealedStore:
    """A store of torch.distributed whose values are sealed when written and validated when read.

    A value with a wrong seal, or that is invalid for its key, counts as absent and gives one warning. Counters have no
    seal, because the store's server increments them. Use them only as a hint that a value may be available.

    Without a secret that all processes share there are no seals. A seal is valid only under its `path`, the prefix of
    the keys.
    """

    def __init__(self, base: Any, processes: int, secret: str = "", path: str = "") -> None:
        self.base, self.processes = base, processes
        self._secret, self._path = secret, path
        self._told: set[str] = set()

    def under(self, name: str) -> "SealedStore":
        """Return the part of the store with this further prefix."""
        return self._alike(self.base, f"{self._path}{name}/")

    def clone(self) -> "SealedStore":
        """Return the same store with a new connection, for another thread."""
        return self._alike(self.base.clone(), self._path)

    def of_torch(self) -> Any:
        """Return a part of the store for torch.distributed itself, without seals."""
        import torch.distributed as dist

        return dist.PrefixStore(f"{self._path}torch", self.base)

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self.base.set(self._path + key, self._seal(key, value))

    def add(self, key: str, amount: int) -> int:
        """Increment a counter, by 0 to read it, and return it. Counters have no seal."""
        return int(self.base.add(self._path + key, amount))

    def read(self, key: str, meaning: Callable[[str], T]) -> T | None:
        """Return a value, or None if there is no valid one, without waiting.

        `meaning` parses the text, `str` for the text itself, and raises ValueError for invalid text.
        """
        there = self._path + key
        return self._open(key, self.base.get(there), meaning) if self.base.check([there]) else None

    def read_all(self, keys: Sequence[str], meaning: Callable[[str], T]) -> list[T | None] | None:
        """Read several keys at once, as `read` does; None if one of them is missing."""
        there = [self._path + key for key in keys]
        if not there:
            return []
        if not self.base.check(there):
            return None
        found = self.base.multi_get(there)
        return [self._open(key, value, meaning) for key, value in zip(keys, found, strict=True)]

    def replace(self, key: str, before: str, value: str, meaning: Callable[[str], T]) -> T | None:
        """Replace the value `before` ("" = none) atomically; return the value that is stored now, as `read` does."""
        expected = self._seal(key, before) if before else ""
        found = self.base.compare_set(self._path + key, expected, self._seal(key, value))
        return self._open(key, found, meaning)

    def first(self, key: str, value: str, meaning: Callable[[str], T]) -> T:
        """Write a value unless there is a valid one; return the value that is stored now."""
        found = self.replace(key, "", value, meaning)
        if found is None:
            self.set(key, value)
        return meaning(value) if found is None else found

    def distrust(self, key: str, why: str) -> None:
        """Warn once that a value is ignored."""
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
    """Parse a non-negative integer of at most 18 digits; ValueError for any other text."""
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ValueError(text)
    return int(text)


def printable(text: str) -> str:
    """Return the text with control characters, which a terminal would execute, replaced by "?"."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "?" for sign in text)


LOOK = 0.2  # seconds between two reads of the store
CROWD = 200  # processes that read that often; with more processes each reads less often, so that the store keeps up
GO, LAST = "go", "last"


class AgreedStep:
    """Agreement of all processes on one step, without a barrier, by requests in the store.

    A process requests a common step in the store, which every process reads a few times per second. From then on the
    store contains the highest step that any process has started; each process reads it before it starts a step, and
    raises it if it is lower. When all processes have read the request, this step is declared the agreed one by one
    atomic exchange. No process has passed it, and none has waited for another.

    If processes communicate in every step, all reach the agreed step within `LOOK` seconds and four steps: one step to
    notice, `LOOK` and one step until all have read the request, and two steps to the agreed one. If all processes
    request it at once, as after a signal to all, two steps suffice. With local steps, add the steps by which the
    slowest process is behind the fastest one. With more than `CROWD` processes, `LOOK` grows in proportion.

    `name` is that of the action at the step; one process needs no store.
    """

    def __init__(self, name: str, store: SealedStore | None = None) -> None:
        self.name, self.store = name, store
        self._round = 0  # number of agreed steps that have passed
        self._asked = False  # whether this process has seen the request
        self._last: int | None = None  # the agreed step
        self._next_look = 0.0

    def due(self, step: int, wanted: Callable[[], bool]) -> bool:
        """Return whether this is the agreed step; every process must call it after every step.

        `wanted` returns whether this process requests it; it is called after every step until a process has.
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
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK * max(1.0, store.processes / CROWD)
        return store.read(self._key, _state) is not None

    def _go_on(self, store: SealedStore, step: int) -> None:
        """Announce the next step of this process, or read the agreed step."""
        found = store.replace(self._key, "", f"{GO} {step + 1}", _state)  # requests it, unless another process has
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
    """Parse the state: `go` and the highest step that any process has started, or `last` and the agreed step."""
    word, _, step = text.partition(" ")
    if word not in (GO, LAST):
        raise ValueError(text)
    return word, whole_number(step)
